"""Operations written with others are what they were, near where they lose digits too."""

import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.parametrize("op", ["floor", "ceil", "expm1", "log1p", "cosh"])
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


def test_infinities():
    with np.errstate(all="ignore"):
        for point in (np.inf, -np.inf, np.nan):
            for op in ("expm1", "is_finite", "cosh", "floor", "ceil"):
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
