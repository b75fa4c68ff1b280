"""Inlining, duplicate reductions, linear forms and hoisting."""

import numpy as np
import pytest

from pallasfuse.fusion.hoisting import hoist
from pallasfuse.fusion.inline import deduplicate, inline_maps
from pallasfuse.fusion.stability import linear_form
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate, evaluate_expr
from pallasfuse.ir.expr import add, apply, const, convert, div, mul, read, select, sub
from pallasfuse.ir.loop_program import LoopProgram, Nest, verify
from pallasfuse.ir.reducers import MAX, SUM
from pallasfuse.ir.tensors import Tensor
from tests.programs_by_name import PROGRAMS, close, program, random_inputs, values

I, J, K = Axis("i", 3), Axis("j", 4), Axis("k", 4)  # noqa: E741
X = Tensor("x", (I, J), "float32")
XR = read("x", (I, J), "float32")
M = read("m", (I,), "float32")
MAXIMUM = Nest("m", (I,), XR, "float32", (J,), MAX)


def exp(x):
    return apply("exp", x)


def number(value, dtype="float32"):
    return const(value, dtype)


# --- inlining


def chain(*nests, output):
    return verify(LoopProgram((X,), nests, (output,)))


def test_maps_are_inlined_and_reductions_are_not():
    shifted = Nest("s", (I, J), sub(XR, M), "float32")
    total = Nest("t", (I,), exp(read("s", (I, J), "float32")), "float32", (J,), SUM)
    bodies = inline_maps(chain(MAXIMUM, shifted, total, output="t"))
    assert str(bodies["t"]) == "exp(x[i, j] - m[i])"
    assert bodies["m"] is XR


def test_kept_maps_are_read():
    shifted = Nest("s", (I, J), sub(XR, M), "float32")
    total = Nest("t", (I,), exp(read("s", (I, J), "float32")), "float32", (J,), SUM)
    bodies = inline_maps(chain(MAXIMUM, shifted, total, output="t"), {"s"})
    assert str(bodies["t"]) == "exp(s[i, j])"
    assert str(bodies["s"]) == "x[i, j] - m[i]"


def test_maps_read_at_other_axes_are_renamed():
    doubled = Nest("d", (I, J), mul(XR, number(2.0)), "float32")
    swapped = Nest("g", (J, K), mul(read("d", (I, J), "float32"), read("d", (I, K), "float32")), "float32", (I,), SUM)
    assert str(inline_maps(chain(doubled, swapped, output="g"))["g"]) == "x[i, j] * 2 * (x[i, k] * 2)"


def test_inlining_simplifies():
    same = Nest("s", (I, J), mul(XR, number(1.0)), "float32")
    assert inline_maps(chain(same, output="s"))["s"] is XR


@pytest.mark.parametrize("name", PROGRAMS)
def test_inlined_bodies_keep_their_value(name):
    want = values(name)
    for nest in program(name).nests:
        body = inline_maps(program(name))[nest.name]
        value = evaluate_expr(body, nest.axes + nest.reduced, want)
        if nest.reducer is not None:
            value = nest.reducer.reduce(value, axis=tuple(range(len(nest.axes), value.ndim)))
        close(value, want[nest.name], message=nest.name)


# --- duplicate reductions


def total(name, body, **changes):
    return Nest(
        **({"name": name, "axes": (I,), "body": body, "dtype": "float32", "reduced": (J,), "reducer": SUM} | changes)
    )


def kinds(loops):
    return {n.name: "reduction" if n.is_reduction else str(n.body) for n in loops.nests}


def test_the_second_of_two_equal_reductions_is_a_copy():
    again = Nest("n", (I,), XR, "float32", (J,), MAX)
    loops = LoopProgram((X,), (MAXIMUM, again, Nest("o", (I,), add(M, read("n", (I,), "float32")), "float32")), ("o",))
    got = verify(deduplicate(loops))
    assert kinds(got) == {"m": "reduction", "n": "m[i]", "o": "m[i] + n[i]"}
    inputs = {"x": np.random.default_rng(0).normal(size=(3, 4))}
    np.testing.assert_array_equal(evaluate(got, inputs)["o"], evaluate(loops, inputs)["o"])


def test_copies_are_followed_through_maps_and_later_reductions():
    again = Nest("n", (I,), XR, "float32", (J,), MAX)
    first, second = total("a", exp(sub(XR, M))), total("b", exp(sub(XR, read("n", (I,), "float32"))))
    last = Nest("o", (I,), div(read("a", (I,), "float32"), read("b", (I,), "float32")), "float32")
    got = deduplicate(LoopProgram((X,), (MAXIMUM, again, first, second, last), ("o",)))
    assert kinds(verify(got)) == {"m": "reduction", "n": "m[i]", "a": "reduction", "b": "a[i]", "o": "a[i] / b[i]"}


@pytest.mark.parametrize(
    "other",
    [
        total("b", mul(XR, number(2.0))),
        total("b", XR, reducer=MAX),
        total("b", XR, dtype="float16"),
        total("b", XR, precision="HIGHEST"),
        total("b", XR, axes=(J,), reduced=(I,)),
    ],
    ids=["body", "reducer", "dtype", "precision", "axes"],
)
def test_what_differs_is_kept(other):
    loops = LoopProgram((X,), (total("a", XR), other), ("a", "b"))
    assert kinds(deduplicate(loops)) == {"a": "reduction", "b": "reduction"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_deduplicated_programs_keep_their_value(name):
    got = evaluate(verify(deduplicate(program(name))), random_inputs(program(name), offset=PROGRAMS[name].offset))
    for tensor, value in values(name).items():
        close(got[tensor], value)


# --- linear forms

A, B, C = (read(n, (J,), "float32") for n in "abc")
H = read("h", (J,), "float16")
PRODUCT = mul(A, B)


@pytest.mark.parametrize(
    ("expr", "form"),
    [
        (A, {A: 1.0}),
        (sub(A, B), {A: 1.0, B: -1.0}),
        (sub(A, sub(B, mul(C, number(3.0)))), {A: 1.0, B: -1.0, C: 3.0}),
        (apply("neg", add(A, number(2.0))), {A: -1.0, None: -2.0}),
        (div(A, number(4.0)), {A: 0.25}),
        (sub(A, A), {}),
        (add(A, A), {A: 2.0}),
        (PRODUCT, {PRODUCT: 1.0}),
        (mul(number(2.0), sub(PRODUCT, C)), {PRODUCT: 2.0, C: -2.0}),
        (div(number(1.0), A), {div(number(1.0), A): 1.0}),
        (div(A, number(0.0)), {div(A, number(0.0)): 1.0}),
        (convert(sub(H, number(1.0, "float16")), "float32"), {H: 1.0, None: -1.0}),
        (add(number(1.0), number(2.0)), {None: 3.0}),
    ],
    ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else "",
)
def test_linear_form(expr, form):
    assert linear_form(expr, frozenset()) == form


def test_atoms_are_not_taken_apart():
    atom = sub(A, B)
    assert linear_form(add(atom, mul(B, number(2.0))), frozenset({atom})) == {atom: 1.0, B: 2.0}
    assert linear_form(atom, frozenset({atom})) == {atom: 1.0}


# --- hoisting

R, S = read("r", (), "float32"), read("s", (), "float32")


def rolled_over_j(e):
    return J not in e.axes and bool(e.tensors & {"r", "s"})


def shown(body):
    got = hoist(body, rolled_over_j)
    return str(got.rest), [("/" if f.inverted else "*") + str(f.value) for f in got.factors]


@pytest.mark.parametrize(
    ("body", "rest", "factors"),
    [
        (mul(A, R), "a[j]", ["*r"]),
        (div(A, R), "a[j]", ["/r"]),
        (div(mul(mul(A, R), B), S), "a[j] * b[j]", ["*r", "/s"]),
        (apply("neg", mul(A, R)), "-a[j]", ["*r"]),
        (mul(exp(sub(A, R)), S), "exp(a[j] - r)", ["*s"]),
        (div(R, A), "1 / a[j]", ["*r"]),
        (apply("neg", R), "1", ["*-r"]),
        (mul(A, apply("rsqrt", add(R, number(1e-3)))), "a[j]", ["*rsqrt(r + 0.001)"]),
        (R, "1", ["*r"]),
        # what stays
        (exp(sub(A, R)), "exp(a[j] - r)", []),
        (mul(A, B), "a[j] * b[j]", []),
        (add(mul(A, R), mul(B, R)), "a[j] * r + b[j] * r", []),
        (sub(A, R), "a[j] - r", []),
        (apply("max", mul(A, R), B), "max(a[j] * r, b[j])", []),
        (apply("sqrt", mul(A, R)), "sqrt(a[j] * r)", []),
        (div(A, add(R, B)), "a[j] / (r + b[j])", []),
        (select(apply("lt", A, B), mul(A, R), mul(B, R)), "select(a[j] < b[j], a[j] * r, b[j] * r)", []),
    ],
    ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else "",
)
def test_hoisting(body, rest, factors):
    assert shown(body) == (rest, factors)


@pytest.mark.parametrize(
    ("body", "hoisted"),
    [
        (convert(mul(A, R), "float16"), False),  # a alone may be larger than float16 holds
        (convert(mul(apply("tanh", A), R), "float16"), True),
        (convert(mul(exp(sub(A, R)), S), "float16"), True),
        (convert(mul(mul(apply("tanh", A), B), R), "float16"), False),
        (convert(mul(convert(H, "float32"), R), "float16"), True),
        (convert(mul(A, R), "bfloat16"), True),  # the range of float32
        (convert(mul(A, R), "int32"), False),
    ],
    ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else "",
)
def test_hoisting_through_a_cast(body, hoisted):
    got = hoist(body, rolled_over_j)
    assert bool(got.factors) == hoisted
    assert any("the rounding to " in c for c in got.conditions) == hoisted
    if not hoisted:
        assert got.rest is body


def test_hoisting_through_an_exact_cast_moves_no_rounding():
    got = hoist(convert(mul(H, convert(R, "float16")), "float32"), rolled_over_j)
    assert str(got.rest) == "float32(h[j])"
    assert not any("rounding" in c for c in got.conditions)


@pytest.mark.parametrize("seed", range(40))
def test_hoisted_products_keep_their_sum(seed):
    random = np.random.default_rng(seed)
    body = A
    for _ in range(random.integers(1, 6)):
        other = [B, R, S, exp(B), add(R, S)][random.integers(5)]
        body = [mul(body, other), mul(other, body), div(body, other), apply("neg", body)][random.integers(4)]
    got = hoist(body, rolled_over_j)
    at = {n: random.uniform(0.5, 2.0, 4) for n in "abc"} | {"r": np.array(1.7), "s": np.array(-0.6)}
    direct = evaluate_expr(body, (J,), at).sum()
    rest = evaluate_expr(got.rest, (J,), at).sum()
    finished = evaluate_expr(got.finish(read("acc", (), "float32")), (), at | {"acc": rest})
    np.testing.assert_allclose(finished, direct, rtol=1e-12)
    assert not got.rest.tensors & {"r", "s"}
