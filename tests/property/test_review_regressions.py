"""What a review found: fused programs that gave other numbers, or another NaN pattern, than the plain function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse.ir.tile_program import Contract, Loop
from tests.property.judging import fuse_for
from tests.property.programs import AXIS_NAMES

FOURS = tuple((name, 4) for name in AXIS_NAMES)
TARGETS = pytest.mark.parametrize("target", ["xla", "interpret"])


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def top(x):
    return jnp.max(x, -1, keepdims=True)


def mean(x):
    return jnp.mean(x, -1, keepdims=True)


def softmax(x):
    weights = jnp.exp(x - top(x))
    return weights / jnp.sum(weights, -1, keepdims=True)


def check(fn, *args, target, tolerance=1e-5, passes=None):
    """The fused function agrees with the plain one, and is one kernel (of so many passes)."""
    fused = fuse_for(fn, target, FOURS)
    plan = fused.explain(*args)
    assert plan.kernels, plan.fallbacks
    if passes is not None:
        assert [k.group.passes for k in plan.kernels] == [passes]
    plain, have = jax.tree.leaves(jax.jit(fn)(*args)), jax.tree.leaves(fused(*args))
    for want, got in zip(plain, have, strict=True):
        assert (want.shape, want.dtype) == (got.shape, got.dtype)
        x, y = np.asarray(want, np.float64), np.asarray(got, np.float64)
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
        size = max(float(np.nanmax(np.abs(x), initial=0.0)), 1e-30)
        np.testing.assert_allclose(y, x, rtol=tolerance, atol=tolerance * size, equal_nan=True)


@pytest.mark.sampled(2, cover=())
@TARGETS
def test_integer_division_is_not_linear(target):
    """sum(40 x / total) is not 40 / total times sum(x), where division truncates."""

    def fn(x):
        return jnp.sum(lax.div(x * 40, jnp.broadcast_to(jnp.sum(x, -1, keepdims=True), x.shape)), -1)

    x = np.random.default_rng(0).integers(1, 50, (5, 13)).astype(np.int32)
    check(fn, x, target=target, tolerance=0.0)


def rows_without_keys(s):
    i, j = jnp.arange(s.shape[0])[:, None], jnp.arange(s.shape[1])[None]
    return softmax(jnp.where(i - 5 >= j, s, -jnp.inf))


@pytest.mark.sampled(4, cover=())
@TARGETS
@pytest.mark.parametrize("values", [True, False], ids=["dot", "sum"])
def test_a_row_that_an_earlier_pass_made_nan_is_nan(target, values):
    """Rows without a key have the maximum -inf: the second pass must not skip their masked tiles."""

    def fn(q, k, v):
        p = rows_without_keys(q @ k.T)
        return jnp.round(p * 127) @ v if values else jnp.sum(jnp.round(p * 8), -1)

    args = [normal(16, 8, seed=n) for n in range(3)]
    assert np.isnan(jax.jit(fn)(*args)).reshape(16, -1).any(1).tolist() == [True] * 5 + [False] * 11
    check(fn, *args, target=target, passes=2)


@pytest.mark.sampled(2, cover=())
@TARGETS
def test_an_exponent_with_an_unfinished_mean(target):
    """The mean of the first tiles is -200 and that of all is 0: exp overflows at the former only."""

    def fn(x):
        return jnp.sum(jnp.exp(x - top(x) - mean(x)), -1)

    x = np.concatenate([np.full((3, 8), -200.0), np.full((3, 8), 200.0)], 1).astype(np.float32)
    check(fn, x, target=target)


@pytest.mark.optimized
@pytest.mark.sampled(2, cover=())
@TARGETS
def test_a_sum_of_squares_around_the_mean_of_something_else(target):
    """The unfinished mean wanders to 1e6 and back: accumulators at it would cancel."""

    def fn(c, x):
        return jnp.sum((c - mean(x)) ** 2, -1), jnp.sum(x * c, -1)

    x = np.concatenate([np.full((3, 8), 1e6), np.full((3, 8), -1e6)], 1).astype(np.float32)
    check(fn, normal(3, 16), x, target=target)


@pytest.mark.sampled(2, cover=())
@TARGETS
def test_an_axis_that_the_term_does_not_have_is_padded(target):
    """`a` has no third axis, whose tile reaches past its end: what it adds there must be masked."""

    def fn(x, a):
        z = x + a[:, :, None]
        centred = z - jnp.mean(z, (1, 2), keepdims=True)
        return jnp.sum(centred, (1, 2)), jnp.sum(z, (1, 2)), jnp.sum(a[:, :, None] * jnp.ones((1, 1, 3)), (1, 2))

    x, a = normal(5, 13, 3), normal(5, 13, seed=1)
    fused = fuse_for(fn, target, FOURS)
    for n, (have, plain) in enumerate(zip(fused(x, a), jax.jit(fn)(x, a), strict=True)):
        np.testing.assert_allclose(have, plain, rtol=1e-5, atol=1e-4, err_msg=str(n))  # sums of 39 that cancel


@pytest.mark.optimized
@pytest.mark.sampled(2, cover=())
@TARGETS
def test_covariance(target):
    def fn(c, x):
        return jnp.sum((c - mean(c)) * (x - mean(x)), -1)

    c = normal(3, 16)
    check(fn, c, np.cos(c), target=target, passes=1)


@pytest.mark.optimized
@pytest.mark.sampled(2, cover=())
@TARGETS
def test_product_of_centred_values(target):
    def fn(x, w):
        return ((x - mean(x)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)) @ w

    check(fn, normal(3, 16), normal(16, 5, seed=1), target=target, passes=1)


@pytest.mark.parametrize(("precision", "name"), [("highest", "HIGHEST"), ("high", "HIGH"), (None, "DEFAULT")])
def test_the_tile_program_keeps_the_precision_of_products(precision, name):
    """The accumulation of `softmax @ v` is rewritten, and still is a product of the precision that was asked for."""

    def fn(q, k, v):
        return jnp.matmul(softmax(jnp.matmul(q, k.T, precision=precision)), v, precision=precision)

    (kernel,) = pf.fuse(fn).explain(*[jnp.ones((256, 64))] * 3, target="triton").kernels
    loops = [s for s in kernel.program.body if isinstance(s, Loop)]
    found = [s.precision for loop in loops for g in loop.segments for s in g.body if isinstance(s, Contract)]
    assert found == [name, name]


@pytest.mark.sampled(12, cover=())
@pytest.mark.parametrize("target", ["xla", "interpret"])
@pytest.mark.parametrize(
    "predicate", ["abs(i - j) < 5", "5 >= abs(i - j)", "abs(i - j) > 5", "abs(2 * i - j + 3) <= 7"]
)
def test_masks_by_distance(predicate, target):
    """A window on both sides, as users write it: tiles outside are skipped, tiles inside are not masked."""

    def fn(q, k, v):
        i, j = jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])
        mask = eval(predicate, {"i": i, "j": j, "abs": jnp.abs})
        p = jax.nn.softmax(jnp.where(mask, q @ k.T, -jnp.inf), -1)
        return p @ v

    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((200, 16)), jnp.float32) for _ in range(3))
    tiles = tuple((name, 4) for name in "ijklmn")
    fused = pf.fuse(fn, target=target, options=pf.FuseOptions(tiles=tiles))
    (kernel,) = fused.explain(q, k, v).kernels
    assert (kernel.visited_share < 0.6) == (predicate != "abs(i - j) > 5")
    plain = jax.jit(fn)(q, k, v)
    np.testing.assert_allclose(fused(q, k, v), plain, rtol=1e-4, atol=1e-5)
