"""Stages of a fused function offer what those of `jax.jit` do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import primitive
from tests.programs_by_name import attention, softmax

X = np.random.default_rng(0).normal(size=(6, 40)).astype("float32")
QKV = tuple(
    np.random.default_rng(n).normal(size=s).astype("float32") for n, s in enumerate([(20, 8), (37, 8), (37, 5)])
)


def same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, want)


def bytes_of(compiled):
    sizes = compiled.memory_analysis()
    return sizes.argument_size_in_bytes, sizes.output_size_in_bytes


def test_lower_is_that_of_jit():
    fused = pf.fuse(attention)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in QKV]
    lowered = fused.lower(*shapes)
    assert isinstance(lowered, jax.stages.Lowered)
    assert "@jit_attention" in lowered.as_text()
    staged = fused.trace(*shapes).fuse().tile().lower().as_text()
    assert lowered.as_text().count("dot_general") == staged.count("dot_general")
    compiled = lowered.compile()
    same(compiled(*QKV), attention(*QKV))
    assert bytes_of(compiled) == bytes_of(jax.jit(attention).lower(*shapes).compile())
    assert compiled.cost_analysis()["flops"] > 0


def test_lower_with_static_arguments_and_trees():
    @pf.fuse(static_argnames="axis")
    def function(inputs, *, axis):
        return {"p": jax.nn.softmax(inputs["x"], axis=axis)}

    compiled = function.lower({"x": X}, axis=0).compile()
    same(compiled({"x": X}), {"p": jax.nn.softmax(X, axis=0)})


def test_lower_of_methods():
    class Layer:
        scale = 0.5

        @pf.fuse
        def method(self, x):
            return softmax(x * self.scale)

    @jax.tree_util.register_pytree_node_class
    class Weights:
        def __init__(self, scale):
            self.scale = scale

        def tree_flatten(self):
            return (self.scale,), None

        @classmethod
        def tree_unflatten(cls, _, leaves):
            return cls(*leaves)

        @pf.fuse
        def method(self, x):
            return softmax(x * self.scale)

    same(Layer().method.lower(X).compile()(X), softmax(X * 0.5))
    weights = Weights(jnp.float32(0.5))
    same(weights.method.lower(X).compile()(weights, X), softmax(X * 0.5))


def test_analyses_of_the_stages_of_a_plan():
    lowered = pf.fuse(attention).trace(*QKV).fuse().tile().lower()
    assert lowered.cost_analysis()["flops"] > 0
    assert "stablehlo" in str(lowered.compiler_ir())
    compiled = lowered.compile()
    assert bytes_of(compiled) == (4 * sum(x.size for x in QKV), 4 * 20 * 5)
    assert compiled.cost_analysis()["flops"] > 0
    assert "HloModule" in compiled.as_text()


@pytest.mark.parametrize("of", [lambda f: f, jax.jit])
def test_export_takes_the_fused_function_itself(of):
    fused = pf.fuse(lambda inputs: {"p": softmax(inputs["x"])})
    assert isinstance(fused, jax.stages.Wrapped)
    program = jax.export.export(of(fused))({"x": X})
    same(program.call({"x": X}), {"p": softmax(X)})


def test_the_jaxpr_of_a_trace_is_that_of_a_call():
    traced = pf.fuse(softmax).trace(X)
    assert "pallasfuse" in str(traced.jaxpr)
    assert "reduce_max" in str(traced.call.jaxpr)
    same(traced.lower().compile()(X), softmax(X))


def test_explain_and_then_a_call_trace_and_plan_once(monkeypatch):
    """Whoever is first."""
    made, traced = [], []
    original = primitive.plan_of
    monkeypatch.setattr(primitive, "plan_of", lambda *a: made.append(a) or original(*a))

    x = jnp.linspace(-1, 1, 64 * 256).reshape(64, 256)
    for options in (pf.FuseOptions(price=False), pf.FuseOptions(target="xla")):

        def rows(x):
            traced.append(x.shape)
            return jax.nn.softmax(x, -1)

        fused = pf.fuse(rows, options=options)
        plan = fused.explain(jax.ShapeDtypeStruct(x.shape, x.dtype))
        assert fused.explain(x) is plan
        fused(x)
        assert (len(made), len(traced)) == (1, 1)
        made.clear()
        traced.clear()


def test_what_is_shown_is_what_a_call_runs():
    """Also kernels around products, which a program on one device has."""

    def both(a, b, c):
        return (a @ b) @ c

    shapes = [jax.ShapeDtypeStruct(s, jnp.float16) for s in ((1, 512, 64), (1, 64, 256), (1, 256, 128))]
    fused = pf.fuse(both, options=pf.FuseOptions(target="triton", check=False, price=True))
    shown = [fused.explain(*shapes), fused.explain(*shapes, target="triton"), fused.trace(*shapes).fuse().tile().plan]
    kernels = [[str(k.schedule) for k in plan.kernels] for plan in shown]
    assert kernels[0] and kernels[0] == kernels[1] == kernels[2]


def test_the_form_that_is_shown_is_decided_as_for_a_call(monkeypatch):
    """Who calls names no target: kernels that a named one keeps may go, and with them the reason for a form."""
    asked, other = [], jax.make_jaxpr(jnp.tanh)(X)
    original = primitive.plan_of

    def planned(jaxpr, target, options, *more):
        asked.append((jaxpr, target.name, options.target, options.check))
        return original(jaxpr, target, options, *more)

    monkeypatch.setattr(primitive, "sure_forms", lambda *_: iter([other]))
    monkeypatch.setattr(primitive, "may_lose_kernels", lambda jaxpr, _, plan: bool(plan(jaxpr)))
    monkeypatch.setattr(primitive, "plan_of", planned)
    plan = pf.fuse(softmax, options=pf.FuseOptions(price=True)).explain(X, target="triton")
    assert not plan.written_out
    assert [entry[1:] for entry in asked] == [("triton", None, False)]
