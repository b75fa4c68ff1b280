"""Flat jaxprs: calls inlined, dead equations dropped, effects, constants and source lines kept; `Converted`."""

import time
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal, Var

import pallasfuse as pf
from pallasfuse.errors import TraceError
from pallasfuse.ir.loop_program import External, Nest
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.jaxpr_frontend.inlining import flatten
from tests.jaxpr_frontend.programs import check, converted, reasons

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
TABLE = np.arange(24, dtype=np.float32).reshape(4, 6)


def primitives(function: Any, *args: Any) -> list[str]:
    return [e.primitive.name for e in flatten(jax.make_jaxpr(function)(*args)).eqns]


@jax.jit
def helper(x: jax.Array) -> jax.Array:
    return jnp.sin(x) * 2  # the line of helper


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    return x + x


doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2 * g,))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (helper, ["sin", "mul"]),
        (lambda x: jax.jit(helper)(x) + 1, ["sin", "mul", "add"]),
        (lambda x: helper(helper(x)), ["sin", "mul", "sin", "mul"]),
        (jax.nn.relu, ["max"]),
        (doubled, ["add"]),
        (jax.checkpoint(lambda x: jnp.cos(helper(x))), ["sin", "mul", "cos"]),
        (jax.jit(lambda x: x), []),
        (jax.jit(lambda x: (x, 2.0)), []),
    ],
)
def test_calls_are_inlined(function: Any, expected: list[str]) -> None:
    assert primitives(function, X) == expected


def test_a_jaxpr_that_is_called_twice_gets_fresh_variables() -> None:
    flat = flatten(jax.make_jaxpr(lambda x: helper(x) + helper(x + 1))(X))
    bound = [v for e in flat.eqns for v in e.outvars]
    assert len(set(bound)) == len(bound)
    check(lambda x: helper(x) + helper(x + 1), X.astype(np.float64))


def test_dead_equations_are_dropped() -> None:
    assert primitives(lambda x: (jnp.exp(x).sum(), jnp.sin(x))[1], X) == ["sin"]
    assert primitives(lambda x: jax.jit(lambda y: (jnp.exp(y), jnp.sin(y)))(x)[1], X) == ["sin"]


def test_effects_are_kept() -> None:
    def function(x: jax.Array) -> jax.Array:
        jax.debug.print("x is {}", x.sum())
        return x + 1

    result = converted(function, X)
    (effectful,) = [e for e in result.jaxpr.eqns if e.effects]
    assert effectful.primitive.name.startswith("debug")
    assert result.jaxpr.effects == effectful.effects


def test_callback_results_are_left_to_xla() -> None:
    from jax.experimental import io_callback

    def function(x: jax.Array) -> jax.Array:
        return io_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True) + 1

    result = converted(function, X)
    assert any("io_callback has a side effect" in r for r in reasons(result))
    assert isinstance(result.program.nests[-1], Nest)


def test_pure_callback_is_left_to_xla() -> None:
    def function(x: jax.Array) -> jax.Array:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1

    assert reasons(converted(function, X)) == ["pure_callback is left to XLA"]


def test_mutable_arrays_are_left_to_xla() -> None:
    def function(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(x)
        ref[...] = ref[...] + 1
        return ref[...] * 2

    result = converted(function, X)
    assert any("side effect" in r for r in reasons(result))
    assert isinstance(result.program.nests[-1], Nest)


def test_constants_become_inputs() -> None:
    result = converted(lambda x: jax.jit(lambda y: y * TABLE)(x) + jnp.asarray(TABLE) + x, X)
    assert len(result.jaxpr.constvars) == len(result.jaxpr.consts) > 0
    names = [t.name for t in result.program.inputs]
    assert names == [*(f"c{n}" for n in range(len(result.jaxpr.consts))), "x"]
    for name, var, value in zip(names, result.jaxpr.constvars, result.jaxpr.consts, strict=False):
        assert result.variable[name] is var
        np.testing.assert_array_equal(np.asarray(value), TABLE)


def test_constants_that_nothing_uses_are_dropped() -> None:
    result = converted(lambda x: (jax.jit(lambda y: (y * TABLE, y))(x)[1], jnp.asarray(TABLE[0]) * 0)[0], X)
    assert [t.name for t in result.program.inputs] == ["x"]
    assert list(result.jaxpr.consts) == []


def test_symbolic_shapes_are_an_error() -> None:
    (n,) = jax.export.symbolic_shape("n")
    with pytest.raises(TraceError, match=r"static shapes"):
        converted(lambda x: x + 1, jax.ShapeDtypeStruct((n, 4), np.float32))


def test_flat_jaxpr_computes_the_function() -> None:
    def function(x: jax.Array) -> tuple[jax.Array, ...]:
        y = jax.nn.relu(helper(x)) * TABLE
        return doubled(y), y, x, jnp.where(x > 0, x, 0).var(0)

    flat = flatten(jax.make_jaxpr(function)(X))
    got = jax.core.eval_jaxpr(flat, flat.consts, X)
    for a, b in zip(got, function(X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_every_output_of_an_equation_is_a_tensor() -> None:
    result = converted(lambda x: jax.lax.top_k(x, 2)[0], X)
    variables = {v: name for name, v in result.variable.items()}
    assert all(v in variables for e in result.jaxpr.eqns for v in e.outvars)
    externals = [n for n in result.program.nests if isinstance(n, External)]
    assert len(externals) == 2
    assert {n.dtype for n in externals} == {"float32", "int32"}
    assert all(n.reason == "top_k is left to XLA" for n in externals)


def test_results() -> None:
    result = converted(lambda x, y: (y, 3.0, x + y, x + 0 * y, y), X, X)
    kinds = [type(r) for r in result.results]
    assert kinds == [str, Literal, str, str, str]
    assert result.results[0] == result.results[4] == "y"
    assert isinstance(result.variable["y"], Var)
    assert result.program.outputs == tuple(dict.fromkeys(r for r in result.results if isinstance(r, str)))


def test_input_names_come_from_the_arguments() -> None:
    def function(q: Any, params: Any, t0: Any) -> Any:
        return q + params["w"] + params["deep"][0] + t0

    result = converted(function, X, {"w": X, "deep": [X]}, X)
    assert [t.name for t in result.program.inputs] == ["q", "params_deep_0", "params_w", "t0"]
    names = [n.name for n in result.program.nests]
    assert names == ["t1", "t2", "t3"]


def line_of(text: str) -> int:
    with open(__file__) as file:
        return next(n for n, line in enumerate(file, 1) if text in line and "line_of" not in line)


def test_source_lines() -> None:
    def function(x: jax.Array) -> jax.Array:
        y = helper(x)
        z = jnp.where(y > 0, y, 0.0)  # first where
        return jnp.where(z > 1, z, 1.0)  # second where

    result = converted(function, X)
    sources = {n.name: n.source.summary for n in result.program.nests}
    assert all(s.startswith(f"{__file__}:") for s in sources.values())
    lines = {int(s.removeprefix(f"{__file__}:").split(":")[0]) for s in sources.values()}
    assert lines == {line_of("# the line of helper"), line_of("# first where"), line_of("# second where")}
    # `where` is a function of JAX that is traced once: its second use has its own line all the same
    selects = [n for n in result.program.nests if isinstance(n, Nest) and "select(" in str(n.body)]
    assert [int(n.source.summary.split(":")[1]) for n in selects] == [
        line_of("# first where"),
        line_of("# second where"),
    ]
    assert "(helper)" in result.program.nests[0].source.summary


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_contractions_are_carried_in_float32(dtype: str) -> None:
    x = jnp.ones((4, 6), dtype)
    (dot,) = converted(lambda x, y: x @ y, x, jnp.ones((6, 5), dtype)).program.nests
    assert isinstance(dot, Nest)
    assert dot.body.dtype == "float32"
    assert dot.dtype == dtype
    assert str(dot.body) == ("x[i, j] * y[j, k]" if dtype == "float32" else "float32(x[i, j]) * float32(y[j, k])")


def test_contractions_of_integers() -> None:
    x = jnp.ones((4, 6), jnp.int8)
    (dot,) = converted(lambda x: jnp.matmul(x, x.T, preferred_element_type=jnp.int32), x).program.nests[1:]
    assert isinstance(dot, Nest)
    assert (dot.body.dtype, dot.dtype) == ("int32", "int32")


@pytest.mark.parametrize(
    ("precision", "expected"),
    [(None, "DEFAULT"), ("default", "DEFAULT"), ("highest", "HIGHEST"), (("high", "highest"), "HIGH,HIGHEST"),
     (("default", "highest"), "DEFAULT,HIGHEST")],
)  # fmt: skip
def test_precision_is_kept(precision: Any, expected: str) -> None:
    dot = converted(lambda x, y: jnp.matmul(x, y, precision=precision), X, X.T).program.nests[-1]
    assert isinstance(dot, Nest)
    assert dot.precision == expected


def test_a_sum_of_products_has_full_precision() -> None:
    total = converted(lambda x, y: jnp.sum(x * y, -1), X, X).program.nests[-1]
    assert isinstance(total, Nest)
    assert total.precision is None


def test_unsupported_element_types_are_left_to_xla() -> None:
    assert reasons(converted(lambda x: x * 2, X.astype(np.complex64))) == ["mul on elements of type complex64"]
    assert reasons(converted(lambda x: x * 2, jnp.ones(3, jnp.float8_e4m3fn))) == [
        "mul on elements of type float8_e4m3fn"
    ]
    keys = converted(lambda k: jax.random.normal(k, (3,)) + 1, jax.random.key(0))
    assert keys.program.inputs[0].dtype == "key<fry>"
    assert isinstance(keys.program.nests[-1], Nest)


def test_the_literals_that_change_nothing_are_erased() -> None:
    result = converted(lambda x: jax.lax.stop_gradient(jnp.maximum(x, -jnp.inf)) * 1.0, X)
    assert [str(n.body) for n in result.program.nests if isinstance(n, Nest)] == ["x[i, j]", "t0[i, j]", "t1[i, j]"]
    kept = converted(lambda x: (x + 0.0, jnp.maximum(x, 0.0)), X)
    assert [str(n.body) for n in kept.program.nests if isinstance(n, Nest)] == ["x[i, j] + 0", "max(x[i, j], 0)"]


def test_long_programs_are_fast() -> None:
    def function(x: jax.Array) -> jax.Array:
        for _ in range(500):
            x = jnp.sin(x) * x
            x = x / x.sum(-1, keepdims=True)
        return x

    jaxpr = jax.make_jaxpr(function)(X)
    start = time.perf_counter()
    result = convert(jaxpr)
    elapsed_s = time.perf_counter() - start
    assert len(result.program.nests) >= 2000
    assert len({a for d in result.program.definitions() for a in d.axes}) == 2
    assert elapsed_s < 4  # about 0.3 s on an idle machine; quadratic algorithms take longer than this


def test_flax_modules_convert() -> None:
    linen = pytest.importorskip("flax.linen")
    nnx = pytest.importorskip("flax.nnx")

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y = linen.LayerNorm()(x)
            x = x + linen.MultiHeadDotProductAttention(num_heads=4)(y, y, mask=linen.make_causal_mask(x[..., 0]))
            return x + linen.Dense(16)(linen.gelu(linen.Dense(64)(linen.RMSNorm()(x))))

    x = np.sin(np.arange(2 * 6 * 16.0)).reshape(2, 6, 16)
    block = Block()
    params = block.init(jax.random.key(0), x)
    result = converted(block.apply, params, x)
    assert reasons(result) == []

    module = nnx.MultiHeadAttention(num_heads=4, in_features=16, qkv_features=16, decode=False, rngs=nnx.Rngs(0))
    graph, state = nnx.split(module)
    assert reasons(converted(lambda s, x: nnx.merge(graph, s)(x), state, x)) == []


def test_a_choice_that_all_platforms_make_alike_is_none():
    x = np.ones((5, 5), np.float32)
    assert not {"cond", "platform_index"} & set(primitives(jnp.diagonal, x))
    check(jnp.diagonal, X[:, :4])


def test_a_choice_of_a_platform_that_programs_are_lowered_for_stays_one():
    def chosen(x):
        return jax.lax.platform_dependent(x, cuda=jnp.sin, default=jnp.cos)

    assert "cond" in primitives(chosen, X)


def test_a_choice_that_all_platforms_make_alike_is_proved():
    fused = pf.fuse(lambda x: jnp.diagonal(x) + jax.nn.logsumexp(x, 0), target="interpret",
                    options=pf.FuseOptions(check=False, price=False))  # fmt: skip
    report = pf.verify(fused, X[:, :4])
    assert report.equivalent, str(report)


def test_what_solves_a_system_is_inlined():
    """Also where the user says how: of its operands, it reads its own and the right sides."""
    matrix, right = X[:, :4] @ X[:, :4].T + 3 * np.eye(4, dtype=np.float32), X[:, :1]

    def own(matrix, right):
        inverse, other = jnp.linalg.inv(matrix), matrix * 2
        return jax.lax.custom_linear_solve(
            lambda x: other @ x / 2,
            right,
            lambda _, b: inverse @ b,
            transpose_solve=lambda _, b: inverse.T @ b + other.sum(),
        )

    for function in (jnp.linalg.solve, own, lambda a, b: jax.scipy.sparse.linalg.cg(lambda x: a @ x, b)[0]):
        jaxpr = flatten(jax.make_jaxpr(function)(matrix, right))
        assert "custom_linear_solve" not in [e.primitive.name for e in jaxpr.eqns]
        got = jax.core.eval_jaxpr(jaxpr, jaxpr.consts, matrix, right)[0]
        np.testing.assert_allclose(got, function(matrix, right), rtol=1e-5, atol=1e-6)
        check(function, matrix, right, tolerance=1e-5)
        assert pf.verify(pf.fuse(function, options=pf.FuseOptions(check=False)), matrix, right).counterexample is None


def test_the_derivative_of_a_system_is_its_own():
    fused = pf.fuse(lambda a, b: jnp.linalg.solve(a, b).sum())
    matrix, right = jnp.asarray(X[:, :4] + 3 * np.eye(4, dtype=np.float32)), jnp.asarray(X[:, :1])
    for got, want in zip(
        *(jax.grad(f, (0, 1))(matrix, right) for f in (fused, lambda a, b: jnp.linalg.solve(a, b).sum())), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5)
