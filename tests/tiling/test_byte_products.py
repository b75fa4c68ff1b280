"""Products of signed bytes: they stay bytes until they are multiplied, and their sums are exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse.ir.statements import Contract, every

RNG = np.random.default_rng(5)


def numbers(dtype, *shape):
    """All values of a type, the smallest and the largest one among them."""
    info = np.iinfo(dtype)
    values = RNG.integers(info.min, info.max + 1, shape)
    values.flat[:2] = info.min, info.max
    return jnp.asarray(values, dtype)


def scales(*shape):
    return jnp.asarray(RNG.uniform(0.5, 1.0, shape) * 1e-3, jnp.float32)


def exact(a, b):
    """Sums of products over the last axis of both, for each position of the first one."""
    return lax.dot_general(a, b, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.int32)


def attend(q, k, v, rows, columns):
    scores = exact(q, k).astype(jnp.float32) * rows[:, :, None] * columns[:, None, :]
    return jnp.einsum("hts,hsd->htd", jax.nn.softmax(scores, axis=-1), v)


def largest(q, k):
    return jnp.max(exact(q, k), axis=-1), jnp.min(exact(q, k), axis=-1)


def arguments(dtype="int8", heads=2, rows=160, keys=192, n=48):
    values = jnp.asarray(RNG.normal(size=(heads, keys, 32)), jnp.float32)
    return (
        numbers(dtype, heads, rows, n),
        numbers(dtype, heads, keys, n),
        values,
        scales(heads, rows),
        scales(heads, keys),
    )


def products(function, *arrays, target):
    """Every product of the plan's kernels."""
    plan = pf.fuse(function, options=pf.FuseOptions(target=target)).explain(*arrays)
    return [s for k in plan.kernels for p in k.phases for s in every(p.program.body) if isinstance(s, Contract)]


@pytest.mark.parametrize("target", ["xla", "interpret", "triton"])
def test_both_sides_are_bytes(target):
    found = products(attend, *arguments(), target=target)
    scores = [s for s in found if s.dtype == "int32"]
    assert scores
    assert len(found) > len(scores)
    assert {(s.lhs.dtype, s.rhs.dtype) for s in scores} == {("int8", "int8")}


def narrow_sums(q, k):
    return jnp.max(lax.dot_general(q, k, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.int8), axis=-1)


def test_sums_that_stay_bytes_are_no_matrix_product():
    arrays = arguments()[:2]
    assert not products(narrow_sums, *arrays, target="interpret")
    fused = pf.fuse(narrow_sums, options=pf.FuseOptions(target="interpret"))
    np.testing.assert_array_equal(fused(*arrays), narrow_sums(*arrays))


def test_other_integers_are_summed_one_by_one():
    arrays = arguments("int16")[:2]
    assert not products(largest, *arrays, target="interpret")
    fused = pf.fuse(largest, options=pf.FuseOptions(target="interpret"))
    assert fused.explain(*arrays).kernels
    for ours, theirs in zip(fused(*arrays), largest(*arrays), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("target", ["xla", "interpret"])
def test_sums_are_exact(target):
    arrays = arguments()[:2]
    fused = pf.fuse(largest, options=pf.FuseOptions(target=target))
    assert products(largest, *arrays, target=target)
    for ours, theirs in zip(fused(*arrays), largest(*arrays), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("target", ["xla", "interpret"])
def test_attention_over_bytes(target):
    arrays = arguments()
    fused = pf.fuse(attend, options=pf.FuseOptions(target=target))
    np.testing.assert_allclose(fused(*arrays), attend(*arrays), rtol=2e-5, atol=1e-6)
    assert pf.verify(fused, *arrays).equivalent
