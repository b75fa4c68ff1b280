"""Attention as users write it in plain `jax.numpy`: masks, biases, tables, pages, sinks, documents."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads.registry import Built, Size, add, booleans, half, integers, normal, pick, program


def attend(q: Any, k: Any, v: Any, score: Callable[[Any], Any] = lambda s: s) -> Any:
    """q [batch, queries, heads, features], k and v [batch, keys, heads, features]; `score` changes the scaled scores."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(score(scores), -1).astype(v.dtype), v)


def _causal(scores: Any) -> Any:
    queries, keys = scores.shape[-2:]
    return jnp.where(jnp.arange(keys)[None, :] <= jnp.arange(queries)[:, None], scores, -jnp.inf)


def _qkv(size: Size, batch: int, length: int, heads: int, features: int) -> tuple[Any, ...]:
    return (normal(batch, length, heads, features, dtype=half(size)),) * 3


@program("causal-attention-4096", "attention")
def _causal_core(size: Size) -> Built:
    length = pick(size, 4096, 4096, 64)
    return Built(lambda q, k, v: attend(q, k, v, _causal), _qkv(size, 1, length, 8, 64))


@program("attention-core-512", "attention")
def _short(size: Size) -> Built:
    batch, length, heads, features = pick(size, (32, 512, 16, 64), (4, 512, 8, 64), (1, 16, 2, 8))
    return Built(attend, _qkv(size, batch, length, heads, features))


@program("mask-argument-attention", "attention")
def _mask_argument(size: Size) -> Built:
    """The mask is an array, and hides with the smallest finite number."""
    batch, length, heads, features = pick(size, (4, 2048, 16, 64), (1, 1024, 8, 64), (1, 16, 2, 8))

    def masked(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return attend(q, k, v, lambda s: jnp.where(mask, s, jnp.finfo(s.dtype).min))

    return Built(masked, (*_qkv(size, batch, length, heads, features), booleans(batch, 1, length, length)))


@program("sliding-window-attention", "attention")
def _window(size: Size) -> Built:
    length, heads, features, window = pick(size, (8192, 16, 128, 512), (2048, 4, 64, 128), (32, 2, 8, 4))

    def visible(scores: Any) -> Any:
        i, j = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
        return jnp.where((j <= i) & (i - j < window), scores, -jnp.inf)

    return Built(lambda q, k, v: attend(q, k, v, visible), _qkv(size, 1, length, heads, features))


@program("sink-attention", "attention")
def _sink(size: Size) -> Built:
    """A learned sink for every head takes its share of the softmax, and gives nothing."""
    length, heads, features = pick(size, (4096, 16, 64), (1024, 4, 64), (32, 2, 8))

    def sink(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) / math.sqrt(features)
        scores = _causal(scores)
        column = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None, None], (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, column], -1), -1)[..., :-1]
        return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)

    return Built(sink, (*_qkv(size, 1, length, heads, features), normal(heads, dtype=half(size))))


@program("document-attention", "attention")
def _documents(size: Size) -> Built:
    """Packed sequences: a token sees the earlier tokens of its own document."""
    length, heads, features = pick(size, (4096, 16, 128), (1024, 4, 64), (32, 2, 8))

    def packed(q: Any, k: Any, v: Any, segments: Any) -> Any:
        same = segments[:, None, :, None] == segments[:, None, None, :]
        return attend(q, k, v, lambda s: _causal(jnp.where(same, s, -jnp.inf)))

    return Built(packed, (*_qkv(size, 1, length, heads, features), integers(1, length, below=8, ramp=True)))


def relative_buckets(queries: int, keys: int, buckets: int, furthest: int) -> Any:
    """Distances, exact when near and in logarithmic steps when far, in both directions."""
    distance = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
    side = buckets // 2
    near, size = side // 2, jnp.abs(distance)
    far = near + (jnp.log(jnp.maximum(size, 1) / near) / math.log(furthest / near) * (side - near)).astype(jnp.int32)
    return (distance > 0) * side + jnp.where(size < near, size, jnp.minimum(far, side - 1))


@program("relative-bias-attention", "attention")
def _relative(size: Size) -> Built:
    batch, length, heads, features = pick(size, (4, 1024, 16, 64), (1, 512, 8, 64), (1, 32, 2, 8))

    def biased(q: Any, k: Any, v: Any, table: Any) -> Any:
        bias = table[relative_buckets(length, length, 32, 128)].transpose(2, 0, 1)
        return attend(q, k, v, lambda s: s + bias.astype(s.dtype))

    return Built(biased, (*_qkv(size, batch, length, heads, features), normal(32, heads, dtype=half(size))))


@program("clipped-distance-attention", "attention")
def _clipped(size: Size) -> Built:
    length, heads, features = pick(size, (4096, 32, 128), (1024, 4, 64), (32, 2, 8))

    def biased(q: Any, k: Any, v: Any, table: Any) -> Any:
        distance = jnp.clip(jnp.arange(length)[None, :] - jnp.arange(length)[:, None], -127, 127) + 127
        return attend(q, k, v, lambda s: _causal(s + table[distance].transpose(2, 0, 1).astype(s.dtype)))

    return Built(biased, (*_qkv(size, 1, length, heads, features), normal(255, heads, dtype=half(size))))


@program("paged-decoding", "attention")
def _paged(size: Size) -> Built:
    """One token of every sequence over keys in pages, found by a table, as long as the sequence is."""
    batch, pages, page, q_heads, heads, features = pick(
        size, (16, 64, 64, 32, 8, 128), (16, 32, 64, 8, 2, 64), (2, 4, 4, 4, 2, 8)
    )

    def decode(q: Any, key_pages: Any, value_pages: Any, table: Any, lengths: Any) -> Any:
        k = key_pages[table].reshape(batch, pages * page, heads, features)
        v = value_pages[table].reshape(batch, pages * page, heads, features)
        grouped = q.reshape(batch, heads, q_heads // heads, features)
        scores = jnp.einsum("bhgd,bkhd->bhgk", grouped, k, preferred_element_type=jnp.float32) / math.sqrt(features)
        there = jnp.arange(pages * page)[None, :] < (pages * page - lengths)[:, None]
        weights = jax.nn.softmax(jnp.where(there[:, None, None], scores, -jnp.inf), -1).astype(v.dtype)
        return jnp.einsum("bhgk,bkhd->bhgd", weights, v).reshape(batch, q_heads, features)

    stored = normal(batch * pages, page, heads, features, dtype=half(size))
    table = integers(batch, pages, below=batch * pages, distinct=True)
    q = normal(batch, q_heads, features, dtype=half(size))
    return Built(decode, (q, stored, stored, table, integers(batch, below=pages * page // 4)))


def _pair(size: Size, *, gated: bool) -> Built:
    """Rows of pairs attend with a bias for every pair and a mask, as protein models do."""
    rows, length, heads, features = pick(size, (128, 256, 4, 32), (64, 128, 4, 32), (2, 16, 2, 8))

    def attention(q: Any, k: Any, v: Any, bias: Any, mask: Any, gate: Any) -> Any:
        out = attend(q, k, v, lambda s: s + bias.astype(s.dtype)[None] + jnp.where(mask[:, None, None, :], 0.0, -1e9))
        return out * jax.nn.sigmoid(gate) if gated else out

    return Built(
        attention,
        (
            *_qkv(size, rows, length, heads, features),
            normal(heads, length, length, dtype=half(size)),
            booleans(rows, length),
            normal(rows, length, heads, features, dtype=half(size)),
        ),
    )


add("pair-attention", "attention", functools.partial(_pair, gated=False))
add("pair-attention-gated", "attention", functools.partial(_pair, gated=True))


@program("vit-attention-577", "attention")
def _unaligned(size: Size) -> Built:
    batch, length, heads, features = pick(size, (16, 577, 16, 80), (1, 577, 8, 80), (1, 17, 2, 8))
    return Built(attend, _qkv(size, batch, length, heads, features))


@program("soft-capped-grouped-attention", "attention")
def _soft_capped(size: Size) -> Built:
    length, heads, groups, features = pick(size, (4096, 8, 2, 256), (1024, 2, 2, 64), (32, 2, 2, 8))

    def capped(q: Any, k: Any, v: Any) -> Any:
        grouped = q.reshape(1, length, heads, groups, features)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, k, preferred_element_type=jnp.float32) / math.sqrt(features)
        weights = jax.nn.softmax(_causal(50.0 * jnp.tanh(scores / 50.0)), -1).astype(v.dtype)
        return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(q.shape)

    dtype = half(size)
    q = normal(1, length, heads * groups, features, dtype=dtype)
    return Built(capped, (q, *(normal(1, length, heads, features, dtype=dtype),) * 2))
