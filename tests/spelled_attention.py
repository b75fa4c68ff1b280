"""Rotations, and attention with them, in the ways in which libraries and users write them."""

import jax
import jax.numpy as jnp
import numpy as np


def _angles(x, dims=None):
    """By position and pair of dimensions, of arrays [batch, position, head, dimension]."""
    dims = dims or x.shape[-1]
    return jnp.arange(x.shape[1])[:, None] * jnp.asarray(1e4 ** (-np.arange(0, dims, 2) / dims), jnp.float32)


def _turned_halves(x):
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([-second, first], -1)


def joined_tables(x):
    angles = jnp.concatenate([_angles(x)] * 2, -1)[None, :, None]
    return (x * jnp.cos(angles) + _turned_halves(x) * jnp.sin(angles)).astype(x.dtype)


def tiled_tables(x):
    angles = jnp.tile(_angles(x), (1, 2))[None, :, None]
    return (x * jnp.cos(angles) + _turned_halves(x) * jnp.sin(angles)).astype(x.dtype)


def rolled_with_signs(x):
    angles, half = jnp.tile(_angles(x), (1, 2))[None, :, None], x.shape[-1] // 2
    signs = jnp.where(jnp.arange(x.shape[-1]) < half, -1.0, 1.0)
    return (x * jnp.cos(angles) + jnp.roll(x, half, -1) * signs * jnp.sin(angles)).astype(x.dtype)


def joined_parts(x):
    cos, sin = jnp.cos(_angles(x))[None, :, None], jnp.sin(_angles(x))[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def stacked_pairs(x):
    cos, sin = jnp.cos(_angles(x))[None, :, None], jnp.sin(_angles(x))[None, :, None]
    even, odd = x[..., ::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(x.shape).astype(x.dtype)


def repeated_tables(x):
    angles = jnp.repeat(_angles(x), 2, -1)[None, :, None]
    turned = jnp.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    return (x * jnp.cos(angles) + turned * jnp.sin(angles)).astype(x.dtype)


def complex_numbers(x):
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    turned = jax.lax.complex(pairs[..., 0], pairs[..., 1]) * jnp.exp(1j * _angles(x))[None, :, None]
    return jnp.stack([turned.real, turned.imag], -1).reshape(x.shape).astype(x.dtype)


def some_dimensions(x):
    half = x.shape[-1] // 2
    return jnp.concatenate([joined_parts(x[..., :half]), x[..., half:]], -1)


def updates_in_place(x):
    half = x.shape[-1] // 2
    cos, sin = (f(_angles(x))[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return x.at[..., :half].set(first * cos - second * sin).at[..., half:].set(second * cos + first * sin)


ROTATIONS = [
    joined_tables, tiled_tables, rolled_with_signs, joined_parts, stacked_pairs, repeated_tables, complex_numbers,
    some_dimensions, updates_in_place,
]  # fmt: skip


def normed(x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def clipped(x):
    return jnp.clip(x, -8, 8)


def scaled(x):
    """As of a cache of few bits, with a scale for each position and head."""
    return x * jnp.exp(x[..., :1].astype(jnp.float32) * 0).astype(x.dtype)


def attend(q, k, v):
    length = q.shape[1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, jnp.finfo(jnp.float32).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1).astype(v.dtype), v)


def with_rotations(rotate, before=None):
    """Attention of rotated queries and keys; `before`: what is done to both before."""

    def attention(q, k, v):
        q, k = (q, k) if before is None else (before(q), before(k))
        return attend(rotate(q), rotate(k), v)

    return attention
