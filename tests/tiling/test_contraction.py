"""Products that differences under exponentials take up, and where they may not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.tile_program import Let, Loop, verify
from pallasfuse.tiling.contraction import LIMIT

ARRAYS = [jax.ShapeDtypeStruct((n, 2, 64), jnp.bfloat16) for n in (160, 192, 192)]


def scores(q, k):
    return jnp.einsum("ihd,jhd->hij", q, k, preferred_element_type=jnp.float32) * 0.125


def weighted(p, v):
    return jnp.einsum("hij,jhd->ihd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)


def attention(q, k, v):
    return weighted(jax.nn.softmax(scores(q, k), axis=-1), v)


def with_log_sum(q, k, v):
    return attention(q, k, v), jax.nn.logsumexp(scores(q, k), axis=-1)


def masked(q, k, v):
    s = scores(q, k)
    seen = jnp.arange(s.shape[-2])[:, None] >= jnp.arange(s.shape[-1])
    return weighted(jax.nn.softmax(jnp.where(seen, s, -jnp.inf), axis=-1), v)


def terms(q, k):
    s = scores(q, k)
    return jnp.exp(s - s.max(-1, keepdims=True))


def not_normalized(q, k, v):
    return weighted(terms(q, k), v)


def with_the_sum(q, k, v):
    e = terms(q, k)
    return weighted(e / e.sum(-1, keepdims=True), v), e.sum(-1)


def covered(q, k, v):
    """A finite mask: rows without a visible key have equal terms of any size."""
    s = scores(q, k)
    seen = jnp.arange(s.shape[-2])[:, None] >= jnp.arange(s.shape[-1])
    return weighted(jax.nn.softmax(jnp.where(seen, s, -1e30), axis=-1), v)


def sharp_rows_only(q, k, v):
    """The size of the sum decides, though it cancels elsewhere."""
    e = terms(q, k)
    total = e.sum(-1, keepdims=True)
    return weighted(e / total, v) * jnp.where(total < 20.0, 1.0, 0.0).transpose(1, 0, 2)


def bounded_below(q, k, v):
    e = terms(q, k)
    return weighted(e / jnp.maximum(e.sum(-1, keepdims=True), 0.1), v)


def program(function):
    plan = pf.fuse(function).explain(*ARRAYS, target="mosaic_gpu")
    (kernel,) = plan.kernels
    assert kernel.target.name == "mosaic_gpu", kernel.declined
    return verify(kernel.program)


@pytest.mark.parametrize("function", [attention, with_log_sum, masked])
def test_what_does_not_care_for_the_maximum(function):
    after = program(function)
    assert after.instead is not None
    assert after.instead.limit == LIMIT
    draw = np.random.default_rng(0)
    inputs = {t.name: draw.normal(size=[a.extent for a in t.axes]) for t in after.inputs}
    ours, theirs = (evaluate_tiles(p, inputs) for p in (after, after.instead.program))
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("function", [not_normalized, with_the_sum, covered, sharp_rows_only, bounded_below])
def test_what_does(function):
    assert program(function).instead is None


def test_text():
    after = program(attention)
    (loop,) = (s for s in after.body if isinstance(s, Loop))
    lets = [s for s in loop.segments[0].body if isinstance(s, Let)]
    (frame,) = (s.name for s in lets if s.name.endswith(".frame0"))
    (peak,) = (s for s in lets if s.name == f"{frame}.peak.next")
    assert str(peak.value) == f"max({frame}.peak[j, i], abs({frame}[j, i]))"
    usual, other = str(after).split(f"  where {frame}.peak[j, i] >= 1.67772e+07 in a row, instead:")
    assert "base2" not in usual
    assert f"sum(exp2(t0[j, i, m] * 0.18033688011112042 - {frame}[j, i]); m)" in usual
    assert "t0.base2[j, i, m] = t0[j, i, m] * 0.18033688011112042" in other
