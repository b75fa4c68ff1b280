"""Small parts that the programs of the twenty-fourth set share: norms, convolutions, attention and chosen log-chances."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Random, normal


def layer_normed(x, scale, shift=None):
    """This takes the mean off the last axis, divides by the spread, scales and shifts."""
    y = x.astype(jnp.float32)
    mean = jnp.mean(y, axis=-1, keepdims=True)
    var = jnp.mean(jnp.square(y - mean), axis=-1, keepdims=True)
    y = (y - mean) * lax.rsqrt(var + 1e-5) * scale.astype(jnp.float32)
    return (y if shift is None else y + shift.astype(jnp.float32)).astype(x.dtype)


def root_normed(x, scale):
    """This divides the last axis by the root of its mean square and scales it."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * scale


def unit(x):
    """This divides the last axis by its length."""
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def convolved(x, filters, stride=1, groups=1):
    """This convolves pictures [batch, rows, columns, channels] with edges of zeros."""
    return lax.conv_general_dilated(
        x, filters, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def filters(size: int, i: int, o: int, dtype=jnp.float32) -> Random:
    """This describes square filters that keep the variance."""
    return normal(size, size, i, o, dtype=dtype, scale=(size * size * i) ** -0.5)


def chosen(logits, index):
    """This gives the log-chance of the chosen entry of the last axis."""
    logits = logits.astype(jnp.float32)
    own = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
    return own - jax.nn.logsumexp(logits, axis=-1)


def attended(query, key, value, heads, mask=None):
    """This attends with many heads over [batch, length, features]; a mask tells which pairs are seen."""
    b, t, n = query.shape
    d = n // heads
    query, key, value = (z.reshape(b, z.shape[1], heads, d) for z in (query, key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * d**-0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    probs = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", probs, value).reshape(b, t, n)
