"""Huge and odd shapes: a plan allocates nothing, takes no longer, and no position overflows 32 bits."""

import resource
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.ir.loop_program import Nest
from tests.programs_by_name import attention, masked_attention, softmax

TARGETS = ["xla", "interpret", "triton"]
WIDE = "more than 2**30 positions, and kernels count in 32 bits"


def shape(*extents, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(extents, dtype)


@pytest.mark.parametrize("target", TARGETS)
def test_planning_allocates_no_arrays(target):
    fused, tiny = pf.fuse(softmax), pf.fuse(softmax)
    tiny.explain(shape(8, 4096), target=target)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    (kernel,) = fused.explain(shape(1 << 20, 1 << 20), target=target).kernels  # 2**40 elements
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kernel.axes == {"i": 1 << 20, "j": 1 << 20}
    assert peak_bytes < 8 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 64 << 10


@pytest.mark.parametrize("target", TARGETS)
def test_planning_time_does_not_depend_on_the_extents(target):
    def seconds(length):
        causal = masked_attention(lambda i, j: j <= i)
        start = time.perf_counter()
        (kernel,) = pf.fuse(causal).explain(*[shape(length, 64)] * 3, target=target).kernels
        assert kernel.visited_share == pytest.approx(0.5, abs=0.02)
        return time.perf_counter() - start

    seconds(1 << 14)  # the derivation is remembered
    assert seconds(1 << 24) < 2 + 4 * seconds(1 << 14)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("extents", [(4, 1 << 30), (1 << 30, 8), (1 << 10, 1 << 20, 64)], ids=str)
def test_the_largest_loops_are_planned(extents, target):
    assert pf.fuse(softmax).explain(shape(*extents), target=target).kernels


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "extents",
    [(4, (1 << 30) + 1), (4, 1 << 31), (2, 1 << 33), (1 << 32, 8), (1 << 11, 1 << 11, 1 << 11, 64), (1 << 40, 1 << 40)],
    ids=str,
)
def test_longer_loops_are_left_to_xla_with_the_reason(extents, target):
    plan = pf.fuse(softmax).explain(shape(*extents), target=target)
    assert plan.kernels == ()
    assert any(WIDE in str(f) for f in plan.fallbacks)


def test_a_mask_on_a_loop_that_is_too_long():
    """Bounds of 2**30 stand for "everything": a longer axis would lose its end."""
    plan = pf.fuse(masked_attention(lambda i, j: i >= 3)).explain(*[shape(1 << 31, 64)] * 3)
    assert plan.kernels == ()
    assert any(WIDE in str(f) for f in plan.fallbacks)


def test_positions_of_flattened_axes_that_exceed_32_bits():
    """iota over 2**40 elements: strides that are no 32-bit integers must not reach a kernel."""

    def function(x):
        return softmax(x + jax.lax.iota(jnp.float32, x.size).reshape(x.shape))

    plan = pf.fuse(function).explain(shape(8, 1 << 16, 1 << 16))
    assert any(f.operation == "softmax" or "2**30" in f.reason or "iota" in f.reason for f in plan.fallbacks) or (
        plan.kernels
    )
    strides = [n for nest in plan.program.nests if isinstance(nest, Nest) for n in nest.body.args]
    assert all(getattr(s, "value", 0) < 2**31 for s in strides)


def test_positions_that_wrap_wrap_as_the_program_says():
    """i * 2**20 in int32: the loop must not be bounded by a product that wrapped."""

    def function(x):
        i, j = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None], jnp.arange(x.shape[1], dtype=jnp.int32)
        return softmax(jnp.where(j * (1 << 20) <= i * 3, x, -jnp.inf))

    x = np.random.default_rng(0).normal(size=(5, 5000)).astype("float32")  # 2048 * 2**20 is -2**31
    fused = pf.fuse(function, options=pf.FuseOptions(tiles=(("j", 512),)))
    np.testing.assert_allclose(fused(x), jax.jit(function)(x), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("extents", [(0, 5), (5, 0), (0, 0), (1, 1), (1,), (1, 1, 1, 1, 1, 7)], ids=str)
def test_empty_and_unit_axes(extents):
    def function(x):
        return jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)

    x = np.ones(extents, np.float32)
    np.testing.assert_allclose(pf.fuse(function)(x), jax.jit(function)(x))


def test_many_dimensions():
    x = np.random.default_rng(0).normal(size=(2,) * 12 + (5,)).astype("float32")
    np.testing.assert_allclose(pf.fuse(softmax)(x), jax.jit(softmax)(x), rtol=2e-5)


def test_new_shapes_are_planned_anew():
    fused = pf.fuse(attention)
    for length in (3, 17, 64, 17, 3):
        q = np.random.default_rng(length).normal(size=(length, 8)).astype("float32")
        np.testing.assert_allclose(fused(q, q, q), attention(q, q, q), rtol=2e-5, atol=1e-6)
