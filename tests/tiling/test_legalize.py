"""Operations written with others are what they were, near where they lose digits too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallasfuse.emission.elementwise import TABLE, select
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate_expr
from pallasfuse.ir.expr import apply, const, index, postorder, read
from pallasfuse.ir.ops import OPS
from pallasfuse.targets import MOSAIC_GPU
from pallasfuse.tiling import legalize
from pallasfuse.tiling.lower import lower_for
from tests.programs_by_name import only_group, program, schedule_of, tensors_of

X = read("x", (), "float32")
POINTS = [
    -7.5,
    -3.0,
    -2.5,
    -1.0,
    -0.75,
    -1e-3,
    -1e-9,
    0.0,
    1e-12,
    3e-4,
    0.5,
    0.9999999,
    1.0,
    1.5,
    2.0,
    33.0,
    87.5,
    88.8,
]


def written(op, *args):
    result = legalize.RULES[op](*args)
    assert op not in {getattr(n, "op", "") for n in postorder(result)}
    return result


@pytest.mark.parametrize("op", ["floor", "ceil", "expm1", "log1p", "cosh", "erf", "erfc"])
def test_functions_of_one_argument(op):
    points = np.asarray([p for p in POINTS if (op != "log1p" or p > -1) and (op != "expm1" or p < 88)])
    for dtype, places in (("float64", 1e-14), ("float32", 3e-7)):
        expr = written(op, read("x", (), dtype))
        got = np.asarray([_in(dtype, expr, p) for p in points])
        want = OPS[op].evaluate(points.astype(dtype).astype(np.float64))
        np.testing.assert_allclose(got, want, rtol=places, atol=0)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def _in(dtype, expr, point):
    """The expression at a point, with every operation rounded to the type."""
    if dtype == "float64":
        return evaluate_expr(expr, (), {"x": np.asarray(point)}).item()
    values = {}
    for node in postorder(expr):
        args = [values[a] for a in getattr(node, "args", ())]
        if not args:
            values[node] = jnp.float32(getattr(node, "value", point))
        else:
            values[node] = select(*args) if node.op == "select" else TABLE[node.op](*args)
    return float(values[expr])


def exact(node, values):
    """A value in float64, and a product of two numbers of float32 as it is before it is rounded."""
    if getattr(node, "op", "") == "mul":
        return np.multiply(*(np.float64(values[a]) for a in node.args))
    return np.float64(values[node])


def remainder(xs, ys, *, contracts=False):
    """The remainders of arrays of one float type, with every operation rounded to it.

    contracts: but a difference of a product of float32 is rounded once, as a compiler may have it.
    """
    dtype = str(xs.dtype)
    x, y = read("x", (), dtype), read("y", (), dtype)
    values = {}
    with np.errstate(all="ignore"), jax.enable_x64(dtype == "float64"):
        for node in postorder(written("rem", x, y)):
            args = [values[a] for a in getattr(node, "args", ())]
            if contracts and getattr(node, "op", "") == "sub":
                values[node] = np.float32(np.subtract(*(exact(a, values) for a in node.args)))
            elif args:
                values[node] = np.asarray(select(*args) if node.op == "select" else TABLE[node.op](*args))
            else:
                values[node] = xs.dtype.type(node.value) if hasattr(node, "value") else {x: xs, y: ys}[node]
    return next(reversed(values.values()))  # the last of them is the whole


@pytest.mark.parametrize(
    ("dtype", "digits", "contracts"), [("float32", 35, False), ("float32", 35, True), ("float64", 70, False)]
)
def test_remainders_are_exact_up_to_very_many_steps(dtype, digits, contracts):
    draw = np.random.default_rng(0)
    ys = (draw.lognormal(0, 2, 20000) * draw.choice([-1, 1], 20000)).astype(dtype)
    steps = 2.0 ** draw.uniform(-3, digits, 20000)
    near = (np.round(steps) * ys).astype(dtype)  # whole multiples, as far as the type has them
    for xs in ((steps * ys).astype(dtype), near, np.nextafter(near, np.zeros_like(near)), -near):
        np.testing.assert_array_equal(remainder(xs, ys, contracts=contracts), np.fmod(xs, ys))
    small = np.float32(1e-25) if dtype == "float32" else np.float64(1e-170)  # two of them have no product
    np.testing.assert_array_equal(remainder(near * small, ys * small), np.fmod(near * small, ys * small))


def test_remainders_of_more_steps_are_numbers_of_their_range():
    draw = np.random.default_rng(1)
    xs, ys = (
        draw.lognormal(0, s, 20000).astype("float32") * draw.choice([-1, 1], 20000).astype("float32") for s in (15, 5)
    )
    found = remainder(xs, ys)
    assert np.all(np.abs(found) < np.abs(ys)) and np.all(found * np.sign(xs) >= 0)


def test_remainders_of_what_is_no_number_or_infinite_or_large():
    points = np.asarray([0.0, -0.0, 1.5, -2.0, 1e35, 3e38, -3e38, np.inf, -np.inf, np.nan], "float32")
    xs, ys = (a.ravel() for a in np.meshgrid(points, points))
    with np.errstate(all="ignore"):
        got, want = remainder(xs, ys), np.fmod(xs, ys)
    few = ~(np.abs(xs) > 1e30) | ~(np.abs(ys) < 1e30) | ~np.isfinite(xs)  # the others have more steps than are exact
    np.testing.assert_array_equal(got[few], want[few])
    zeros = few & (want == 0)
    np.testing.assert_array_equal(np.signbit(got[zeros]), np.signbit(want[zeros]))


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int8"])
def test_remainders_of_integers_never_divide_by_zero(dtype):
    n, m = read("n", (), dtype), read("m", (), dtype)
    assert legalize.RULES["rem"](n, const(3, dtype)) is None
    expr, limits = legalize.RULES["rem"](n, m), np.iinfo(dtype)
    (inner,) = (node for node in postorder(expr) if getattr(node, "op", "") == "rem")
    for x in (limits.min, limits.max, 7):
        for y in (0, 1, 5, limits.max, limits.min if limits.min else 2):
            at = {"n": np.asarray(x, dtype), "m": np.asarray(y, dtype)}
            assert evaluate_expr(inner.args[1], (), at).item() not in (0, -1)
            assert evaluate_expr(expr, (), at).item() == lax.rem(at["n"], at["m"]).item()


def test_infinities():
    with np.errstate(all="ignore"):
        for point in (np.inf, -np.inf, np.nan):
            for op in ("expm1", "is_finite", "cosh", "floor", "ceil", "erf", "erfc"):
                got = evaluate_expr(written(op, X), (), {"x": np.asarray(point)}).item()
                np.testing.assert_equal(got, OPS[op].evaluate(np.float64(point)))
        np.testing.assert_equal(evaluate_expr(written("log1p", X), (), {"x": np.asarray(np.inf)}).item(), np.inf)


def test_powers_of_a_constant():
    expr = written("pow", const(2.5, "float32"), X)
    for point in POINTS:
        np.testing.assert_allclose(evaluate_expr(expr, (), {"x": np.asarray(point)}), 2.5**point, rtol=1e-12)
    assert legalize.RULES["pow"](X, X) is None
    assert legalize.RULES["pow"](const(1.0, "float32"), X) is None  # also where the exponent is NaN
    assert legalize.RULES["pow"](const(-2.0, "float32"), X) is None


def test_the_opposite_of_a_comparison_of_integers():
    less = apply("lt", const(3, "int32"), index(Axis("i", 5)))
    assert legalize.RULES["not"](less).op == "ge"
    assert legalize.RULES["not"](apply("lt", X, const(1.0, "float32"))) is None


def test_a_kernel_is_rewritten_as_a_whole():
    group = only_group("softmax")
    (kernel,) = lower_for(MOSAIC_GPU, group, schedule_of(group, 2, 4), tensors_of(program("softmax")))
    assert legalize.rewrite(kernel, frozenset()) is kernel
    assert legalize.rewrite(kernel, MOSAIC_GPU.legalized_ops) == kernel
    exponentials = legalize.rewrite(kernel, frozenset({"exp"}))
    assert exponentials == kernel  # no rule: it stays, and the target's rules refuse it
