"""Which sums of products are matrix products, and how their factors are divided."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate_expr
from pallasfuse.ir.expr import add, apply, const, convert, div, mul, read, sub
from pallasfuse.tiling.products import contracts, narrow, narrow_sides, split_product

I, J, K, B = Axis("i", 3), Axis("j", 4), Axis("k", 5), Axis("b", 2)  # noqa: E741
X, Y = read("x", (I, J), "float32"), read("y", (J, K), "float32")
R, C = read("r", (I,), "float32"), read("c", (K,), "float32")
V = read("v", (J,), "float32")
S = read("s", (), "float32")
OVER = frozenset({J})


def exp(x):
    return apply("exp", x)


@pytest.mark.parametrize(
    ("body", "lhs", "rhs"),
    [
        (mul(X, Y), "x[i, j]", "y[j, k]"),
        (mul(Y, X), "y[j, k]", "x[i, j]"),
        (mul(mul(X, R), Y), "x[i, j] * r[i]", "y[j, k]"),
        (mul(exp(sub(X, R)), Y), "exp(x[i, j] - r[i])", "y[j, k]"),
        (div(mul(X, Y), R), "x[i, j] / r[i]", "y[j, k]"),
        (mul(mul(X, Y), V), "x[i, j] * v[j]", "y[j, k]"),
        (mul(mul(X, Y), S), "x[i, j] * s", "y[j, k]"),
        (mul(mul(X, C), Y), "x[i, j]", "c[k] * y[j, k]"),
    ],
    ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else "",
)
def test_split(body, lhs, rhs):
    got = split_product(body, OVER, frozenset())
    assert got is not None
    assert (str(got.lhs), str(got.rhs)) == (lhs, rhs)
    random = np.random.default_rng(0)
    at = {"x": random.random((3, 4)), "y": random.random((4, 5)), "r": random.random(3), "c": random.random(5),
          "v": random.random(4), "s": np.array(1.5)}  # fmt: skip
    whole = evaluate_expr(body, (I, J, K), at)
    sides = [evaluate_expr(side, (I, J, K), at) for side in (got.lhs, got.rhs)]
    np.testing.assert_allclose(sides[0] * sides[1], whole, rtol=1e-13)


@pytest.mark.parametrize(
    "body",
    [
        X,
        mul(X, X),
        mul(X, V),  # a matrix and a vector
        mul(X, R),
        add(mul(X, Y), X),
        mul(R, C),  # nothing to contract
        mul(mul(X, Y), read("z", (I, K), "float32")),  # varies along both kept axes
        mul(read("x", (B, I, J), "float32"), read("y", (B, J, K), "float32")),  # a batch axis inside the tile
        mul(read("n", (I, J), "int32"), read("m", (J, K), "int32")),
    ],
    ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else "",
)
def test_not_a_matrix_product(body):
    assert split_product(body, OVER, frozenset()) is None


def test_axes_of_one_element_do_not_count():
    body = mul(read("x", (B, I, J), "float32"), read("y", (B, J, K), "float32"))
    got = split_product(body, OVER, frozenset({B}))
    assert got is not None
    assert (str(got.lhs), str(got.rhs)) == ("x[b, i, j]", "y[b, j, k]")
    assert split_product(mul(X, Y), OVER, frozenset({I})) is None


def test_all_contracted_axes_are_on_both_sides():
    two = frozenset({J, B})
    both = mul(read("x", (I, J, B), "float32"), read("y", (J, B, K), "float32"))
    assert split_product(both, two, frozenset()) is not None
    assert split_product(mul(read("x", (I, J, B), "float32"), Y), two, frozenset()) is None


def test_narrow_drops_an_exact_cast_of_a_half_type():
    h, f = read("h", (I,), "float16"), read("f", (I,), "float64")
    assert narrow(convert(h, "float32")) is h
    assert narrow(convert(read("b", (I,), "bfloat16"), "float32")).dtype == "bfloat16"
    for kept in (h, X, convert(f, "float32"), convert(h, "float64"), mul(convert(h, "float32"), const(2.0, "float32"))):
        assert narrow(kept) is kept


def test_contracts_wants_a_kept_axis_on_each_side():
    assert contracts(mul(X, Y), OVER)
    assert contracts(mul(mul(X, Y), read("z", (I, K), "float32")), OVER)
    for body in (X, mul(X, V), mul(X, X), mul(X, C)):
        assert not contracts(body, OVER)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("byte", ["int8", "uint8", "bool"])
def test_bytes_beside_a_half_type_become_that_type(half, byte):
    """Every one of them is a number of the half type."""
    x, y = read("x", (I, J), half), read("y", (J, K), byte)
    wide = convert(x, "float32"), convert(y, "float32")
    assert narrow_sides(*wide) == (x, convert(y, half))
    assert narrow_sides(*reversed(wide)) == (convert(y, half), x)
    values = np.arange(np.iinfo(byte).min, np.iinfo(byte).max + 1) if byte != "bool" else np.array([False, True])
    cast = values.astype(byte).astype(jnp.dtype(half)).astype("float32")
    np.testing.assert_array_equal(cast, values.astype("float32"))


def test_wider_integers_and_bytes_alone_stay_wide():
    x, short = convert(read("x", (I, J), "bfloat16"), "float32"), convert(read("y", (J, K), "int16"), "float32")
    assert narrow_sides(x, short) == (read("x", (I, J), "bfloat16"), short)
    one, other = (convert(read(n, a, "int8"), "float32") for n, a in (("x", (I, J)), ("y", (J, K))))
    assert narrow_sides(one, other) == (one, other)
