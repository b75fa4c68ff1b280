"""Programs that were once fused wrongly, each as small as it could be made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from tests.property.judging import fuse_for, judge_function
from tests.property.programs import AXIS_NAMES

FOURS = tuple((name, 4) for name in AXIS_NAMES)
TARGETS = pytest.mark.parametrize("target", ["xla", "interpret"])


def normal(*shape, seed=0, scale=1.0, offset=0.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale + offset).astype(np.float32)


def check(fn, *args, target="xla", tiles=FOURS):
    verdict = judge_function(fn, args, target, tiles)
    assert not verdict.problems, verdict
    return verdict


def masked_softmax_dot(mask):
    def fn(x, w):
        s = jnp.where(mask(jnp.arange(x.shape[-1])), x, -jnp.inf)
        return jnp.sum(jax.nn.softmax(s, -1) * w, -1)

    return fn


@pytest.mark.sampled(2, cover=())
@TARGETS
def test_lower_bound_of_a_mask_inside_a_tile(target):
    """The first tile of `j >= 9` is partly masked: it must not be treated as unmasked."""

    def fn(x):
        s = jnp.where(jnp.arange(x.shape[-1]) >= 9, x, -jnp.inf)
        m = jnp.max(x, -1, keepdims=True)
        return jnp.sum(jnp.exp(s - m), -1)

    check(fn, normal(3, 37), target=target)


@pytest.mark.sampled(2, cover=())
@TARGETS
def test_left_padding_with_default_tiles(target):
    def fn(q, k, v):
        s = jnp.where(jnp.arange(k.shape[0]) >= 100, q @ k.T, -jnp.inf)
        return jax.nn.softmax(s, -1) @ v

    keys = normal(1000, 16, seed=1)
    keys[:100] *= 3
    check(fn, normal(64, 16), keys, normal(1000, 16, seed=2), target=target, tiles=())


@pytest.mark.sampled(12, cover=())
@TARGETS
@pytest.mark.parametrize("k", [1, 3, 4, 5, 36, 37])
def test_every_lower_bound(k, target):
    check(masked_softmax_dot(lambda j: j >= k), normal(2, 37), normal(2, 37, seed=1), target=target)


WRAPPING = {
    "unsigned_difference": lambda j: (j.astype(jnp.uint32) - jnp.uint32(5)) < jnp.uint32(10),
    "unsigned_byte_difference": lambda j: (j.astype(jnp.uint8) - jnp.uint8(5)) < jnp.uint8(10),
    "narrowing_cast": lambda j: (j * 5).astype(jnp.int8) >= 0,
    "product_of_bytes": lambda j: j.astype(jnp.int8) * jnp.int8(5) >= 0,
    "largest_int": lambda j: 3 * j <= 2147483647,
    "lowest_int": lambda j: j >= -2147483648,
    "lowest_int_scaled": lambda j: 3 * j >= -2147483648,
}


@pytest.mark.sampled(8, cover=())
@pytest.mark.parametrize("name", WRAPPING)
def test_mask_arithmetic_that_wraps(name):
    """Mask intervals are computed in unbounded integers; the program's integers wrap around."""
    check(masked_softmax_dot(WRAPPING[name]), normal(2, 37), normal(2, 37, seed=1))


@pytest.mark.sampled(6, cover=())
@pytest.mark.parametrize("size", [1.0, 1e22, 1e-25])
@pytest.mark.parametrize("square", ["product", "power", "square"])
def test_scaling_that_prevents_overflow_is_not_hoisted(square, size):
    """`m * sqrt(sum((x / m)**2))` exists to stay in range: 1 / m**2 must not leave the sum."""
    squares = {"product": lambda y: y * y, "power": lambda y: y**2, "square": jnp.square}

    def fn(x):
        m = jnp.max(jnp.abs(x), -1, keepdims=True)
        return m[..., 0] * jnp.sqrt(jnp.sum(squares[square](x / m), -1))

    check(fn, normal(3, 37, scale=size))


def test_frame_that_underflows_to_zero():
    """A sum of exponentials is positive, but in floating point its first tiles may be zero: log of it is not finite."""

    def fn(x):
        e = jnp.exp(x)
        total = jnp.sum(e, -1, keepdims=True)
        return jnp.sum(e / total * (x - jnp.log(total)), -1)

    x = normal(3, 37)
    x[:, :8] = -200
    check(fn, x)


@pytest.mark.optimized
@pytest.mark.sampled(2, cover=())
@TARGETS
def test_variance_far_from_zero(target):
    """The frame of the terms and the frame of the repair must be the same float (XLA contracts `x - s * c` to an fma)."""

    def fn(x):
        d = x - jnp.mean(x, 0, keepdims=True)
        return jnp.mean(d**2, 0)

    check(fn, normal(11, 24, scale=0.1, offset=100.0), target=target)


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("shape", [(5,), (1, 5), (1, 1, 7)], ids=str)
def test_interpret_reduces_to_one_element(shape):
    def fn(x):
        m = jnp.max(x, -1, keepdims=True)
        return jnp.sum(jnp.exp(x - m), -1)

    check(fn, normal(*shape), target="interpret")


def test_skipped_factor_is_a_stated_condition():
    """A masked tile is skipped, so that 0 * inf is 0 where the plain program has NaN: the plan must say so."""

    def fn(x, w):
        s = jnp.where(jnp.arange(x.shape[-1]) < 8, x, -jnp.inf)
        return jnp.sum(jax.nn.softmax(s, -1) * w, -1)

    w = normal(2, 37, seed=1)
    w[:, 30] = np.inf
    fused = fuse_for(fn, "xla", FOURS)
    same = np.array_equal(np.isnan(fused(normal(2, 37), w)), np.isnan(jax.jit(fn)(normal(2, 37), w)))
    conditions = " ".join(fused.explain(normal(2, 37), w).conditions)
    assert same or "finite" in conditions, conditions


def test_constants_that_no_integer_type_holds_do_not_crash_planning():
    pf.fuse(masked_softmax_dot(lambda j: j >= -2147483648)).explain(normal(2, 37), normal(2, 37))
