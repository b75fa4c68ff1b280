"""Running reductions, small products and powers in parts, against XLA's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

from pallasfuse import device
from pallasfuse.decompositions import Decomposer, powers, products, running
from tests.decompositions.test_windows import drawn


def decomposed(rule, function, *arrays):
    """The only operation of a function decomposed; None where it is not."""
    (eqn,) = jax.make_jaxpr(function)(*arrays).eqns
    run = rule(eqn)
    return None if run is None else run(*arrays, *(a.val for a in eqn.invars if hasattr(a, "val")))[0]


@pytest.mark.sampled(16, cover=("combine", "backwards"))
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("combine", [lax.cumsum, lax.cumprod, lax.cummax, lax.cummin])
@pytest.mark.parametrize("shape", [(4, 3), (5, 7), (64, 2), (100, 3), (257, 2), (5000, 1)])
def test_a_running_reduction_is_the_same_in_blocks(combine, shape, backwards):
    x = 1 + 0.01 * drawn(shape)
    x = x.at[shape[0] // 2].set(jnp.inf)
    for axis, array in ((0, x), (1, jnp.stack([x, x]).reshape(2, *shape))):
        wanted = combine(array, axis=axis, reverse=backwards)
        found = decomposed(running.running, lambda a, axis=axis: combine(a, axis=axis, reverse=backwards), array)
        np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_a_running_sum_of_integers_is_exact():
    x = (100 * drawn((300, 5))).astype("int32")
    np.testing.assert_array_equal(decomposed(running.running, lax.cumsum, x), lax.cumsum(x))


def test_many_rows_stay_with_xla_along_the_last_axis():
    assert decomposed(running.running, lambda a: lax.cumsum(a, axis=1), drawn((64, 64))) is None


@pytest.mark.sampled(8, cover=())
@pytest.mark.parametrize("part", range(8))
@settings(max_examples=8, deadline=None)
@given(
    batch=st.integers(0, 2),
    own=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    summed=st.integers(0, 2),
    sizes=st.permutations([2, 3, 4, 1, 5, 3, 2, 4]),
    order=st.randoms(use_true_random=False),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_any_small_product(part, batch, own, summed, sizes, order, dtype):
    names = iter("abcdefgh")
    shared, mine, its, over = ([next(names) for _ in range(n)] for n in (batch, *own, summed))
    left, right = [*shared, *mine, *over], [*shared, *its, *over]
    order.shuffle(left)
    order.shuffle(right)
    size = dict(zip("abcdefgh", sizes, strict=True))
    x, y = drawn([size[n] for n in left], dtype), drawn([size[n] for n in right], dtype, 1)
    dims = (
        ([left.index(n) for n in over], [right.index(n) for n in over]),
        ([left.index(n) for n in shared], [right.index(n) for n in shared]),
    )

    def product(x, y):
        return lax.dot_general(x, y, dims)

    found = decomposed(products.product, product, x, y)
    wanted = product(x, y)
    if found is not None:
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        tolerance = 5e-2 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(
            found.astype("float32"), wanted.astype("float32"), rtol=tolerance, atol=4 * tolerance
        )


def test_which_products_are_small():
    def is_small(text, *shapes):
        return decomposed(products.product, lambda x, y: jnp.einsum(text, x, y), *map(drawn, shapes)) is not None

    assert is_small("nij,njk->nik", (64, 3, 3), (64, 3, 3))
    assert is_small("bi,oi->bo", (2, 32), (64, 32))
    assert not is_small("bi,oi->bo", (32, 32), (64, 32))


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("part", range(3))
@settings(max_examples=10, deadline=None)
@given(
    st.integers(0, 2), st.lists(st.integers(1, 4), min_size=1, max_size=2), st.integers(1, 4), st.integers(5, 9),
    st.integers(5, 9), st.sampled_from(["float32", "bfloat16"]), st.booleans(),
)  # fmt: skip
def test_a_product_of_few_terms(part, batch, summed, split, left, right, dtype, turned):
    """Its rows along several dimensions; sums along several, which together have few terms."""
    shared, summed = tuple(range(2, 2 + batch)), tuple(summed)
    assume(np.prod(summed) <= products.MOST_TERMS)
    x, y = drawn((*shared, left, split, *summed)).astype(dtype), drawn((*shared, *summed, right)).astype(dtype)
    first = batch + 2
    dims = (tuple(range(first, first + len(summed))), tuple(range(batch, batch + len(summed))))
    both = tuple(range(batch))

    def product(one, other):
        how = {"preferred_element_type": jnp.float32, "precision": "highest"}
        return lax.dot_general(one, other, (dims[::-1] if turned else dims, (both, both)), **how)

    operands = (y, x) if turned else (x, y)
    found = decomposed(products.of_few_terms, product, *operands)
    wanted = product(*(a.astype("float32") for a in operands))  # CPUs have not all products of half types
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "shapes", "how"),
    [
        ("ik,jk->ij", [(9, 5), (9, 5)], {}),  # many terms
        ("ik,jk->ij", [(4, 3), (9, 3)], {}),  # few rows
        ("ik,jk->ij", [(9, 3), (9, 3)], {"precision": lax.DotAlgorithmPreset.F32_F32_F32}),
        ("ik,jk->ij", [(9, 3), (9, 3)], {"precision": lax.DotAlgorithm(*[np.float32] * 3)}),
    ],
)
def test_other_products_are_not_of_few_terms(text, shapes, how):
    x, y = map(drawn, shapes)
    assert decomposed(products.of_few_terms, lambda x, y: jnp.einsum(text, x, y, **how), x, y) is None


def test_distances_that_are_compared_are_not_stored_on_a_gpu():
    """By a clock on an H100, XLA takes 143 us for the nearest of 2000 points to 1500 others, twelve times, and 34 us where their
    distances are sums of squares and no product."""

    def written(points, sums):
        struct = jax.ShapeDtypeStruct
        jaxpr = jax.make_jaxpr(lambda x, y: jnp.min(-jnp.einsum("bik,bjk->bij", x, y), -1))(
            struct((12, 1500, sums), jnp.float32), struct((12, points, sums), jnp.float32)
        )
        h100 = device.find("NVIDIA H100 80GB HBM3", "gpu")
        return "dot_general" not in {e.primitive.name for e in Decomposer(h100, (), h100.price_error).of(jaxpr).eqns}

    assert written(2000, 3)
    assert not written(2000, 64)
    assert not written(20, 3)  # nobody would see it


@pytest.mark.parametrize("exponent", [1.5, -1.5, 2.5, -2.5, 3.5, -4.5])
def test_a_power_by_a_square_root(exponent):
    x = jnp.asarray([0.0, -0.0, 1e-30, 1e-12, 0.3, 2.0, 1e12, 1e30, jnp.inf, -jnp.inf, -2.0, jnp.nan], "float32")
    np.testing.assert_allclose(decomposed(powers.power, lambda a: a**exponent, x), x**exponent, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("exponent", [0.5, 1.25, 7.5])
def test_other_powers_stay(exponent):
    assert decomposed(powers.power, lambda a: a**exponent, drawn((3,))) is None


def test_an_inverse_root_by_a_quotient():
    x = jnp.asarray([0.0, 1e-30, 0.3, 2.0, 1e30, jnp.inf, -jnp.inf, -2.0, jnp.nan], "float32")
    np.testing.assert_allclose(decomposed(powers.inverse_root, lax.rsqrt, x), lax.rsqrt(x), rtol=1e-6)


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("part", range(3))
@settings(max_examples=8, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 19)] * 3),
    left=st.permutations("mk"),
    right=st.permutations("kn"),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_uneven_rows_are_longer_with_zeros(part, sizes, left, right, dtype):
    size = dict(zip("mkn", sizes, strict=True))
    x, y = drawn([size[n] for n in left], dtype), drawn([size[n] for n in right], dtype, 1)
    dims = (((left.index("k"),), (right.index("k"),)), ((), ()))
    found = decomposed(products.aligned, lambda a, b: lax.dot_general(a, b, dims), x, y)
    per_row = 4 if dtype == "float32" else 8
    of_result = size["n"] if dtype == "float32" else 0
    assert (found is None) == all(n % per_row == 0 for n in (size[left[-1]], size[right[-1]], of_result))
    if found is not None:
        np.testing.assert_allclose(
            found.astype("float32"), lax.dot_general(x, y, dims).astype("float32"), rtol=2e-2, atol=1e-4
        )


@pytest.mark.parametrize(
    ("shapes", "dims"),
    [
        (((3, 5, 7), (3, 7, 9)), (((2,), (1,)), ((0,), (0,)))),  # a batch
        (((5, 7), (7, 3, 5)), (((1,), (0,)), ((), ()))),  # rows of two dimensions
        (((5, 8), (8, 2, 4)), (((1,), (0,)), ((), ()))),  # which are even together
        (((0, 7), (7, 9)), (((1,), (0,)), ((), ()))),
    ],
)
def test_products_whose_rows_stay(shapes, dims):
    x, y = (jnp.zeros(s) for s in shapes)
    assert decomposed(products.aligned, lambda a, b: lax.dot_general(a, b, dims), x, y) is None


def test_a_product_with_a_number_is_no_product_of_rows():
    assert (
        decomposed(
            products.aligned, lambda a, b: lax.dot_general(a, b, (((), ()), ((), ()))), jnp.ones(5), jnp.ones(())
        )
        is None
    )


def test_the_repeated_row_of_a_product_stands_behind_the_matrix():
    """XLA's library for a CPU takes 5 to 8 times as long where it stands before it."""
    rows, matrix = jax.ShapeDtypeStruct((2, 64), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32)
    (eqn,) = jax.make_jaxpr(lambda x, w: lax.dot_general(x, w, (((1,), (1,)), ((), ()))))(rows, matrix).eqns
    written = products.product(eqn)
    assert written is not None
    made = jax.make_jaxpr(written)(rows, matrix)
    by = {v: e.primitive.name for e in made.eqns for v in e.outvars}
    multiplied = [e.invars for e in made.eqns if e.primitive.name == "mul"]
    assert len(multiplied) == 2
    assert all(by.get(x) != "broadcast_in_dim" and by[y] == "broadcast_in_dim" for x, y in multiplied)
