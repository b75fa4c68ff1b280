"""A Llama-like decoder layer with a cache of keys and values: norms, rotary positions, grouped queries, gated feed-forward."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads.registry import Built, Size, add, gain, half, normal, pick, weight


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Rows of unit mean square, computed in float32."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return normed.astype(x.dtype) * scale


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary positions of x [batch, tokens, heads, features]."""
    pairs = x.shape[-1] // 2
    frequency = 500000.0 ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    angle = positions[:, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def layer(heads: tuple[int, int], weights: dict[str, jax.Array], x: Any, keys: Any, values: Any) -> Any:
    """A decoder layer on x [batch, tokens, features], the last tokens of the cache [batch, length, key heads, head features]."""
    (query_heads, key_heads), (batch, tokens, _) = heads, x.shape
    length, features = keys.shape[1], keys.shape[3]
    positions = length - tokens + jnp.arange(tokens)
    h = rms_norm(x, weights["attention_norm"])
    q = rotate((h @ weights["query"]).reshape(batch, tokens, query_heads, features), positions)
    k = rotate((h @ weights["key"]).reshape(batch, tokens, key_heads, features), positions)
    v = (h @ weights["value"]).reshape(batch, tokens, key_heads, features)
    keys = jax.lax.dynamic_update_slice(keys, k, (0, length - tokens, 0, 0))
    values = jax.lax.dynamic_update_slice(values, v, (0, length - tokens, 0, 0))
    grouped = q.reshape(batch, tokens, key_heads, query_heads // key_heads, features)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, keys, preferred_element_type=jnp.float32) / math.sqrt(features)
    visible = jnp.arange(length)[None, :] <= positions[:, None]
    weighted = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(x.dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", weighted, values).reshape(batch, tokens, query_heads * features)
    x = x + out @ weights["output"]
    h = rms_norm(x, weights["feed_forward_norm"])
    hidden = jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"])
    return x + hidden @ weights["down"], keys, values


def build_layer(size: Size, batch: int, tokens: int) -> Built:
    """Builds a layer, with the sizes of Llama 3 8B on the GPU."""
    width, q, kv, d, hidden, length = pick(
        size, (4096, 32, 8, 128, 14336, 4096), (1024, 16, 4, 64, 3584, 2048), (64, 4, 2, 16, 96, 64)
    )
    dtype = half(size)
    length = tokens if tokens > length // 2 else length
    weights = {
        "attention_norm": gain(width, dtype),
        "query": weight(width, q * d, dtype=dtype),
        "key": weight(width, kv * d, dtype=dtype),
        "value": weight(width, kv * d, dtype=dtype),
        "output": weight(q * d, width, dtype=dtype),
        "feed_forward_norm": gain(width, dtype),
        "gate": weight(width, hidden, dtype=dtype),
        "up": weight(width, hidden, dtype=dtype),
        "down": weight(hidden, width, dtype=dtype),
    }
    cache = normal(batch, length, kv, d, dtype=dtype)
    x = normal(batch, tokens, width, dtype=dtype)
    return Built(functools.partial(layer, (q, kv)), (weights, x, cache, cache))


for _batch in (1, 4, 16):
    add(f"decoder-layer-batch{_batch}", "decoder", functools.partial(build_layer, batch=_batch, tokens=1))
add("decoder-layer-prefill", "decoder", lambda size: build_layer(size, 1, pick(size, 2048, 256, 64)))
