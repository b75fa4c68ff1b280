"""Small parts that the programs of the twenty-sixth set share: weights, norms, convolutions, rotations and attention."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Random, gain, normal


def norm_of(n: int, dtype: Any = jnp.float32) -> dict[str, Random]:
    """This describes the scale and the shift of a norm."""
    return {"scale": gain(n, dtype), "shift": normal(n, dtype=dtype, scale=0.1)}


def dense_of(i: int, o: int, dtype: Any = jnp.float32) -> dict[str, Random]:
    """This describes a matrix and a bias."""
    return {"w": normal(i, o, dtype=dtype, scale=i**-0.5), "b": normal(o, dtype=dtype, scale=0.1)}


def drawn(structs: Any, dtype: Any = None) -> Any:
    """This describes weights of a module: biases and means near zero, gains near one, matrices by their inputs."""

    def of(path: Any, s: Any) -> Random:
        kind = s.dtype if dtype is None else dtype
        if len(s.shape) > 1:
            return normal(*s.shape, dtype=kind, scale=float(np.prod(s.shape[:-1])) ** -0.5)
        names = {str(getattr(k, "key", getattr(k, "name", k))) for k in path}
        near_zero = names & {"b", "bias", "mean", "offset"}
        return normal(*s.shape, dtype=kind, scale=0.1, offset=0.0 if near_zero else 1.0)

    return jax.tree_util.tree_map_with_path(of, structs)


def dense(q, x):
    """This is a linear layer."""
    return x @ q["w"] + q["b"]


def layer_norm(q, x):
    """This takes the mean off the last axis, divides by the spread, scales and shifts, in float32."""
    y = x.astype(jnp.float32)
    y = (y - jnp.mean(y, axis=-1, keepdims=True)) * lax.rsqrt(jnp.var(y, axis=-1, keepdims=True) + 1e-5)
    return (y * q["scale"].astype(jnp.float32) + q["shift"].astype(jnp.float32)).astype(x.dtype)


def rms_norm(scale, x):
    """This divides the last axis by the root of its mean square, in float32."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-6)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def rotary(x, places):
    """This turns halves of heads [..., length, heads, width] by angles of their places [..., length]."""
    half = x.shape[-1] // 2
    angle = places[..., None, None].astype(jnp.float32) * 10000.0 ** (-jnp.arange(half) / half)
    one, two = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1).astype(x.dtype)


def attention(query, key, value, mask=None):
    """This attends over [..., length, heads, width]; a mask tells which pairs are seen."""
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key, preferred_element_type=jnp.float32)
    scores = scores * query.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    probs = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("...hqk,...khd->...qhd", probs, value)
