"""Attention and decoding of language models, as users write them who knew nothing of the package."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, gain, half, integers, normal, pick, program, weight


def _int8(*shape: int) -> Any:
    return dataclasses.replace(integers(*shape, below=256), dtype=jnp.dtype(jnp.int8))


def _uint8(*shape: int) -> Any:
    return dataclasses.replace(integers(*shape, below=256), dtype=jnp.dtype(jnp.uint8))


def _rms(x: Any, scale: Any, eps: float = 1e-6) -> Any:
    x32 = x.astype(jnp.float32)
    y = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def _rms_one_plus(x: Any, scale: Any) -> Any:
    var = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    normed = jnp.asarray(x * lax.rsqrt(var + 1e-06), dtype=x.dtype)
    return normed * (1 + scale)


def _rope_half(x: Any, positions: Any, base: float = 10000.0) -> Any:
    d = x.shape[-1]
    timescale = base ** (2 * jnp.arange(0, d // 2) / d)
    angle = positions[..., None, None] / timescale
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _rope_pairs(x: Any, sin: Any, cos: Any) -> Any:
    even, odd = x[..., ::2], x[..., 1::2]
    out = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return out.reshape(x.shape).astype(x.dtype)


@program("deepseek-mla-rope-prefill", "foreign-language")
def _mla(size: Size) -> Built:
    """Latent attention of a prompt, keys expanded from the latent, with a shared rotary key."""
    batch, seq, n, heads, nope, rope, dv, rank = pick(
        size, (2, 1536, 2048, 16, 128, 64, 128, 512), (1, 384, 512, 4, 64, 32, 64, 128), (2, 6, 16, 2, 8, 4, 8, 8)
    )
    dtype = half(size)

    def mla(p: Any, x: Any) -> Any:
        b, s, _ = x.shape
        q = (x @ p["wq"]).reshape(b, s, heads, nope + rope)
        q_nope, q_pe = jnp.split(q, [nope], axis=-1)
        low = x @ p["wkv_a"]
        c_kv, k_pe = low[..., :rank], low[..., rank:]
        kv = (_rms(c_kv, p["kv_norm"]) @ p["wkv_b"]).reshape(b, s, heads, nope + dv)
        k_nope, v = jnp.split(kv, [nope], axis=-1)

        freqs = 1.0 / (10000.0 ** (jnp.arange(0, rope, 2, dtype=jnp.float32) / rope))
        angles = jnp.outer(jnp.arange(s), freqs)
        sin, cos = jnp.sin(angles)[None, :, None, :], jnp.cos(angles)[None, :, None, :]
        q_pe = _rope_pairs(q_pe, sin, cos)
        k_pe = _rope_pairs(k_pe[:, :, None, :], sin, cos)

        q = jnp.concatenate([q_nope, q_pe], axis=-1)
        k = jnp.concatenate([k_nope, jnp.broadcast_to(k_pe, (b, s, heads, rope))], axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * (nope + rope) ** -0.5
        mask = jnp.full((s, s), float("-inf"))
        scores = scores + jnp.triu(mask, k=1)
        probs = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        out = jnp.einsum("bhqk,bkhd->bqhd", probs, v)
        return out.reshape(b, s, heads * dv) @ p["wo"]

    params = {
        "wq": weight(n, heads * (nope + rope), dtype=dtype),
        "wkv_a": weight(n, rank + rope, dtype=dtype),
        "kv_norm": gain(rank, dtype),
        "wkv_b": weight(rank, heads * (nope + dv), dtype=dtype),
        "wo": weight(heads * dv, n, dtype=dtype),
    }
    return Built(mla, (params, normal(batch, seq, n, dtype=dtype)))


@program("gemma-local-soft-cap-gqa", "foreign-language")
def _gemma_local(size: Size) -> Built:
    """Grouped queries, capped logits and a local causal window, masked with the smallest number of the type."""
    batch, seq, heads, kv, d, window = pick(
        size, (2, 2048, 16, 8, 256, 1024), (1, 512, 8, 4, 64, 128), (2, 9, 4, 2, 8, 3)
    )
    dtype = half(size)
    cap = 50.0

    def attention(q: Any, k: Any, v: Any, segment_pos: Any) -> Any:
        q = _rope_half(q, segment_pos) * d**-0.5
        k = _rope_half(k, segment_pos)
        b, t, _, h = q.shape
        q = q.reshape(b, t, kv, heads // kv, h)
        logits = jnp.einsum("BTKGH,BSKH->BTKGS", q, k)
        logits = jnp.tanh(logits / cap) * cap
        attn_mask = jnp.tril(jnp.ones((b, t, t), jnp.bool_))
        all_ones = jnp.ones_like(attn_mask)
        sliding_mask = jnp.triu(all_ones, -window + 1) * jnp.tril(all_ones, window - 1)
        attn_mask = sliding_mask * attn_mask
        padded = jnp.where(attn_mask[:, :, None, None, :], logits, jnp.finfo(logits.dtype).min)
        probs = jax.nn.softmax(padded.astype(jnp.float32), axis=-1).astype(k.dtype)
        out = jnp.einsum("BTKGS,BSKH->BTKGH", probs, v)
        return out.reshape(b, t, heads, h)

    arguments = (normal(batch, seq, heads, d, dtype=dtype, scale=2.0), normal(batch, seq, kv, d, dtype=dtype))
    positions = integers(batch, seq, below=seq, ramp=True)
    return Built(attention, (*arguments, normal(batch, seq, kv, d, dtype=dtype), positions))


@program("whisper-cross-attention-padding", "foreign-language")
def _cross(size: Size) -> Built:
    """A decoder attends to encoder frames, of which a boolean mask [batch, keys] keeps the real ones."""
    batch, queries, keys, n, heads = pick(size, (8, 448, 1500, 1024, 16), (2, 64, 375, 256, 4), (2, 5, 7, 16, 2))
    dtype = half(size)

    def cross(p: Any, x: Any, encoded: Any, mask: Any) -> Any:
        def split(y: Any) -> Any:
            return y.reshape(y.shape[0], y.shape[1], heads, n // heads).transpose(0, 2, 1, 3)

        scaling = (n // heads) ** -0.5
        q = split((x @ p["q"] + p["q_bias"]) * scaling)
        k = split(encoded @ p["k"])
        v = split(encoded @ p["v"] + p["v_bias"])
        bias = lax.select(
            mask,
            jnp.full(mask.shape, 0.0).astype(x.dtype),
            jnp.full(mask.shape, jnp.finfo(x.dtype).min).astype(x.dtype),
        )
        scores = q @ k.transpose(0, 1, 3, 2) + bias[:, None, None, :]
        scores = scores - lax.stop_gradient(scores.max(-1, keepdims=True))
        unnormalised = jnp.exp(scores)
        probs = unnormalised / unnormalised.sum(-1, keepdims=True)
        out = (probs @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        return x + out @ p["o"] + p["o_bias"]

    params: dict[str, Any] = {name: weight(n, n, dtype=dtype) for name in ("q", "k", "v", "o")}
    params |= {f"{name}_bias": normal(n, dtype=dtype, scale=0.1) for name in ("q", "v", "o")}
    x, encoded = normal(batch, queries, n, dtype=dtype), normal(batch, keys, n, dtype=dtype)
    return Built(cross, (params, x, encoded, booleans(batch, keys)))


@program("paligemma2-prefix-lm-layer", "foreign-language")
def _prefix_sandwich(size: Size) -> Built:
    """A layer with norms before and after each block, under a mask that is full in the prefix and causal after it."""
    batch, seq, n, heads, kv, d, hidden = pick(
        size, (4, 640, 2304, 8, 4, 256, 9216), (1, 160, 256, 4, 2, 64, 1024), (2, 7, 16, 2, 1, 8, 32)
    )
    dtype = half(size)

    def layer(p: Any, x: Any, prefix_len: Any) -> Any:
        b, t, _ = x.shape
        positions = jnp.arange(t)[None, :].repeat(b, axis=0)
        in_prefix = positions < prefix_len[:, None]
        mask_ar = jnp.where(in_prefix, 0, 1)
        cumsum = jnp.cumsum(mask_ar, axis=1)
        mask = cumsum[:, None, :] <= cumsum[:, :, None]

        h = _rms_one_plus(x, p["pre_attention_norm"])
        q = jnp.einsum("BTD,NDH->BTNH", h, p["q_einsum"])
        k, v = jnp.einsum("BSD,CKDH->CBSKH", h, p["kv_einsum"])
        q = _rope_half(q, positions) * d**-0.5
        k = _rope_half(k, positions)
        q = q.reshape(b, t, kv, heads // kv, d)
        logits = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32)
        logits = jnp.tanh(logits / 50.0) * 50.0
        logits = jnp.where(mask[:, None, None, :, :], logits, -2.3819763e38)
        probs = jax.nn.softmax(logits, axis=-1).astype(k.dtype)
        encoded = jnp.einsum("BKGTS,BSKH->BTKGH", probs, v).reshape(b, t, heads, d)
        attn = jnp.einsum("BTNH,NHD->BTD", encoded, p["attn_vec_einsum"])
        x = x + _rms_one_plus(attn, p["post_attention_norm"])

        h = _rms_one_plus(x, p["pre_ffw_norm"])
        ff_gate = jnp.dot(h, p["gating"][0])
        activations = jax.nn.gelu(ff_gate) * jnp.dot(h, p["gating"][1])
        return x + _rms_one_plus(jnp.dot(activations, p["linear"]), p["post_ffw_norm"])

    names = ("pre_attention_norm", "post_attention_norm", "pre_ffw_norm", "post_ffw_norm")
    params: dict[str, Any] = {name: normal(n, dtype=dtype, scale=0.1) for name in names}
    params["q_einsum"] = weight(heads, n, d, dtype=dtype)
    params["kv_einsum"] = weight(2, kv, n, d, dtype=dtype)
    params["attn_vec_einsum"] = normal(heads, d, n, dtype=dtype, scale=(heads * d) ** -0.5)
    params["gating"] = weight(2, n, hidden, dtype=dtype)
    params["linear"] = weight(hidden, n, dtype=dtype)
    return Built(layer, (params, normal(batch, seq, n, dtype=dtype), integers(batch, below=seq)))


@program("btlm-alibi-attention", "foreign-language")
def _alibi(size: Size) -> Built:
    """Causal attention with a linear bias by distance, made from arange and the slopes of the heads."""
    batch, seq, heads, d = pick(size, (2, 1000, 32, 80), (1, 500, 8, 80), (2, 7, 3, 8))
    dtype = half(size)

    def slopes_of(h: int) -> list[float]:
        def power_of_two(m: int) -> list[float]:
            start = 2 ** (-(2 ** -(math.log2(m) - 3)))
            return [start * start**i for i in range(m)]

        if math.log2(h).is_integer():
            return power_of_two(h)
        near = 2 ** math.floor(math.log2(h))
        return power_of_two(near) + power_of_two(2 * near)[0::2][: h - near]

    def attention(qkv: Any) -> Any:
        q, k, v = (jnp.squeeze(t, 2) for t in jnp.split(qkv, 3, axis=2))
        q, k, v = (jnp.swapaxes(t, 1, 2) for t in (q, k, v))
        slopes = jnp.array(slopes_of(heads), jnp.float32)[:, None, None]
        context, memory = jnp.arange(seq)[:, None], jnp.arange(seq)[None, :]
        alibi = slopes * (memory - context)[None].astype(jnp.float32)
        w = lax.dot_general(q, k, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
        w = w / math.sqrt(d) + alibi[None]
        w = jnp.where(memory <= context, w, -1e9)
        w = jax.nn.softmax(w, axis=-1)
        out = lax.dot_general(w.astype(v.dtype), v, (((3,), (2,)), ((0, 1), (0, 1))))
        return jnp.swapaxes(out, 1, 2).reshape(batch, seq, heads * d)

    return Built(attention, (normal(batch, seq, 3, heads, d, dtype=dtype),))


@program("qwen2-cache-append-decode", "foreign-language")
def _cache_append(size: Size) -> Built:
    """One token per row is written into the cache at the row's length, then seven query heads share a key head."""
    batch, length, kv, groups, d = pick(size, (32, 4096, 4, 7, 128), (8, 2048, 2, 7, 64), (3, 8, 2, 7, 8))
    dtype = half(size)

    def decode(q: Any, k_new: Any, v_new: Any, cache: Any, lengths: Any) -> Any:
        positions = lengths[:, None]
        q = _rope_half(q, positions, 1e6)
        k_new = _rope_half(k_new, positions, 1e6)

        def write(buffer: Any, update: Any, index: Any) -> Any:
            return lax.dynamic_update_slice(buffer, update.astype(buffer.dtype), (index, 0, 0))

        keys = jax.vmap(write)(cache["k"], k_new, lengths)
        values = jax.vmap(write)(cache["v"], v_new, lengths)
        q = q.reshape(batch, kv, groups, d)
        scores = jnp.einsum("bkgd,bskd->bkgs", q, keys).astype(jnp.float32) / jnp.sqrt(d)
        valid = jnp.arange(length)[None, :] <= lengths[:, None]
        scores = jnp.where(valid[:, None, None, :], scores, jnp.finfo(jnp.float32).min)
        probs = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
        out = jnp.einsum("bkgs,bskd->bkgd", probs, values)
        return out.reshape(batch, 1, kv * groups * d), {"k": keys, "v": values}, lengths + 1

    cache = {name: normal(batch, length, kv, d, dtype=dtype) for name in ("k", "v")}
    q, new = normal(batch, 1, kv * groups, d, dtype=dtype), normal(batch, 1, kv, d, dtype=dtype)
    return Built(decode, (q, new, new, cache, integers(batch, below=length)))


@program("int8-cache-decode", "foreign-language")
def _int8_cache(size: Size) -> Built:
    """Decoding against a cache in eight bits, with a scale for every key and value and valid lengths."""
    batch, length, kv, groups, d = pick(size, (16, 6144, 8, 4, 128), (8, 4096, 2, 4, 64), (2, 9, 2, 2, 8))
    dtype = half(size)

    def decode(q: Any, keys: Any, key_scale: Any, values: Any, value_scale: Any, lengths: Any) -> Any:
        k = keys.astype(dtype) * key_scale[..., None].astype(dtype)
        v = values.astype(dtype) * value_scale[..., None].astype(dtype)
        q = q.reshape(batch, kv, groups, d) * jnp.asarray(d**-0.5, dtype)
        logits = jnp.einsum("bkgd,bksd->bkgs", q, k, preferred_element_type=jnp.float32)
        mask = lax.broadcasted_iota(jnp.int32, (batch, 1, 1, length), 3) < (lengths + 1)[:, None, None, None]
        logits = logits + jnp.where(mask, 0.0, -0.7 * float(jnp.finfo(jnp.float32).max))
        m = jnp.max(logits, axis=-1, keepdims=True)
        e = jnp.exp(logits - m)
        out = jnp.einsum("bkgs,bksd->bkgd", e.astype(dtype), v, preferred_element_type=jnp.float32)
        return (out / jnp.sum(e, axis=-1, keepdims=True)).astype(dtype).reshape(batch, kv * groups * d)

    def scales() -> Any:
        return normal(batch, kv, length, scale=0.002, offset=0.014)

    cache = (_int8(batch, kv, length, d), scales(), _int8(batch, kv, length, d), scales())
    return Built(decode, (normal(batch, kv * groups, d, dtype=dtype), *cache, integers(batch, below=length)))


@program("int8-weights-gated-mlp", "foreign-language")
def _int8_weights(size: Size) -> Built:
    """A gated feed-forward block whose weights are eight-bit integers: by column, and by groups with zero points."""
    rows, n, hidden, group = pick(size, (16, 4096, 14336, 128), (8, 1024, 2816, 64), (3, 16, 32, 8))
    dtype = half(size)

    def dequantise(w: Any, scale: Any) -> Any:
        return w.astype(scale.dtype) * scale

    @jax.jit
    def mlp(x: Any, gate: Any, up: Any, down: Any) -> Any:
        g = x @ dequantise(*gate)
        u = x @ dequantise(*up)
        h = jax.nn.silu(g) * u
        w, scale, zero = down
        w = (w.reshape(hidden // group, group, n).astype(jnp.float32) - zero[:, None]) * scale[:, None]
        return jnp.dot(h, w.reshape(hidden, n).astype(h.dtype)) + x

    step = n**-0.5 / 74

    def columns() -> Any:
        return _int8(n, hidden), normal(hidden, dtype=dtype, scale=0.1 * step, offset=step)

    groups = hidden // group
    small = hidden**-0.5 / 74
    zero = normal(groups, n, scale=4.0, offset=128.0)
    down = (_uint8(hidden, n), normal(groups, n, scale=0.1 * small, offset=small), zero)
    return Built(mlp, (normal(rows, n, dtype=dtype), columns(), columns(), down))


@program("blockwise-attention-scan-grad", "foreign-language")
def _blockwise(size: Size) -> Built:
    """The gradient of causal attention in blocks of keys and queries: scans, a running maximum, checkpoints."""
    batch, seq, heads, d, block = pick(size, (1, 1536, 16, 96, 512), (1, 256, 4, 96, 64), (1, 8, 2, 8, 4))
    dtype = half(size)
    blocks = seq // block

    def attention(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (t.reshape(batch, blocks, block, heads, d).swapaxes(0, 1) for t in (q, k, v))
        q = q / jnp.sqrt(d).astype(q.dtype)

        def for_queries(_: Any, entry: Any) -> Any:
            q_index, q_block = entry

            @functools.partial(jax.checkpoint, prevent_cse=False)
            def for_keys(carry: Any, entry: Any) -> Any:
                numerator, denominator, previous = carry
                k_index, k_block, v_block = entry
                s = jnp.einsum("bqhd,bkhd->bqhk", q_block, k_block, preferred_element_type=jnp.float32)
                q_pos = q_index * block + lax.broadcasted_iota(jnp.int32, (block, block), 0)
                k_pos = k_index * block + lax.broadcasted_iota(jnp.int32, (block, block), 1)
                s = s + jnp.where(q_pos < k_pos, jnp.finfo(jnp.float32).min, 0.0)[None, :, None, :]
                top = lax.stop_gradient(jnp.maximum(previous, s.max(axis=-1, keepdims=True)))
                e = jnp.exp(s - top)
                correction = jnp.exp(previous - top)
                update = jnp.einsum("bqhk,bkhd->bqhd", e.astype(v_block.dtype), v_block)
                return (numerator * correction + update, denominator * correction + e.sum(-1, keepdims=True), top), None

            start = (
                jnp.zeros((batch, block, heads, d), jnp.float32),
                jnp.zeros((batch, block, heads, 1), jnp.float32),
                jnp.full((batch, block, heads, 1), -1e30, jnp.float32),
            )
            (numerator, denominator, _), _ = lax.scan(for_keys, start, (jnp.arange(blocks), k, v))
            return None, (numerator / denominator).astype(q_block.dtype)

        _, out = lax.scan(for_queries, None, (jnp.arange(blocks), q))
        return out.swapaxes(0, 1).reshape(batch, seq, heads, d)

    def loss(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
        return jnp.sum(attention(q, k, v).astype(jnp.float32) * cotangent)

    each = normal(batch, seq, heads, d, dtype=dtype)
    return Built(jax.grad(loss, argnums=(0, 1, 2)), (each, each, each, normal(batch, seq, heads, d)))


@program("diff-transformer-attention", "foreign-language")
def _differential(size: Size) -> Built:
    """The difference of two attention maps, with a learnt factor, and a norm of each head."""
    batch, seq, heads, d = pick(size, (2, 1536, 12, 64), (1, 512, 4, 48), (1, 6, 2, 4))
    dtype = half(size)
    init = 0.8 - 0.6 * math.exp(-0.3 * 11)

    def attend(q: Any, k: Any, v: Any, factors: Any, sub_norm: Any) -> Any:
        q = q.reshape(batch, seq, 2 * heads, d).transpose(0, 2, 1, 3)
        k = k.reshape(batch, seq, 2 * heads, d).transpose(0, 2, 1, 3)
        v = v.reshape(batch, seq, heads, 2 * d).transpose(0, 2, 1, 3)
        weights = jnp.matmul(q * d**-0.5, k.transpose(0, 1, 3, 2))
        mask = jnp.triu(jnp.full((seq, seq), -jnp.inf, dtype=jnp.float32), 1).astype(weights.dtype)
        weights = jnp.nan_to_num(weights) + mask
        weights = jax.nn.softmax(weights.astype(jnp.float32), axis=-1).astype(weights.dtype)
        lambda_1 = jnp.exp(jnp.sum(factors["q1"] * factors["k1"]))
        lambda_2 = jnp.exp(jnp.sum(factors["q2"] * factors["k2"]))
        full = (lambda_1 - lambda_2 + init).astype(weights.dtype)
        weights = weights.reshape(batch, heads, 2, seq, seq)
        weights = weights[:, :, 0] - full * weights[:, :, 1]
        out = _rms(jnp.matmul(weights, v), sub_norm, 1e-5) * (1 - init)
        return out.transpose(0, 2, 1, 3).reshape(batch, seq, heads * 2 * d)

    factors = {name: normal(d, scale=0.1) for name in ("q1", "k1", "q2", "k2")}
    each = normal(batch, seq, heads * 2 * d, dtype=dtype)
    return Built(attend, (each, each, each, factors, gain(2 * d, dtype)))


@program("qwen3-next-gated-attention", "foreign-language")
def _gated_attention(size: Size) -> Built:
    """Attention whose query product also gives a sigmoid gate of the output; normed heads, rope on a part of them."""
    batch, seq, n, heads, kv, d, rotary = pick(
        size, (2, 1024, 2048, 16, 2, 256, 64), (1, 512, 512, 8, 1, 64, 16), (2, 5, 16, 4, 2, 8, 4)
    )
    dtype = half(size)

    def attention(p: Any, x: Any, attention_mask: Any) -> Any:
        q, gate = jnp.split((x @ p["q"]).reshape(batch, seq, heads, 2 * d), 2, axis=-1)
        k = (x @ p["k"]).reshape(batch, seq, kv, d)
        v = (x @ p["v"]).reshape(batch, seq, kv, d)
        q, k = _rms_one_plus(q, p["q_norm"]), _rms_one_plus(k, p["k_norm"])
        positions = jnp.clip(jnp.cumsum(attention_mask, axis=-1) - 1, 0)

        def rotate(t: Any) -> Any:
            return jnp.concatenate([_rope_half(t[..., :rotary], positions, 1e7), t[..., rotary:]], -1)

        q, k = rotate(q), rotate(k)
        k, v = (jnp.repeat(t, heads // kv, axis=2) for t in (k, v))
        causal = jnp.arange(seq)[:, None] >= jnp.arange(seq)[None, :]
        allowed = jnp.logical_and(causal[None, None], attention_mask[:, None, None, :].astype(bool))
        allowed = jnp.logical_or(allowed, jnp.eye(seq, dtype=bool))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * d**-0.5
        scores = jnp.where(allowed, scores, jnp.finfo(scores.dtype).min)
        probs = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(x.dtype)
        out = jnp.einsum("bhqk,bkhd->bqhd", probs, v) * jax.nn.sigmoid(gate)
        return out.reshape(batch, seq, heads * d) @ p["o"]

    params = {"q": weight(n, heads * 2 * d, dtype=dtype), "o": weight(heads * d, n, dtype=dtype)}
    params |= {name: weight(n, kv * d, dtype=dtype) for name in ("k", "v")}
    params |= {name: normal(d, dtype=dtype, scale=0.1) for name in ("q_norm", "k_norm")}
    return Built(attention, (params, normal(batch, seq, n, dtype=dtype), booleans(batch, seq)))


@program("palm-parallel-layer-qk-norm", "foreign-language")
def _parallel(size: Size) -> Built:
    """Attention and feed-forward side by side after one norm and one product; one key head, normed queries and keys."""
    batch, seq, n, heads, d, hidden = pick(
        size, (2, 1000, 3072, 16, 192, 8192), (1, 200, 384, 4, 96, 768), (2, 5, 16, 2, 8, 24)
    )
    dtype = half(size)

    def layer_norm(x: Any, scale: Any) -> Any:
        x = x.astype(jnp.float32)
        mean = jnp.mean(x, axis=-1, keepdims=True)
        var = jnp.var(x, axis=-1, keepdims=True)
        return ((x - mean) / jnp.sqrt(var + 1e-5) * scale).astype(dtype)

    def layer(p: Any, x: Any) -> Any:
        h = layer_norm(x, p["norm"])
        fused = h @ p["wi"]
        q, k, v, ff, gate = jnp.split(
            fused, [heads * d, heads * d + d, heads * d + 2 * d, heads * d + 2 * d + hidden], axis=-1
        )
        q = layer_norm(q.reshape(batch, seq, heads, d), p["q_scale"])
        k = layer_norm(k, p["k_scale"])
        sim = jnp.einsum("b i h d, b j d -> b h i j", q, k) * d**-0.5
        mask = jnp.tril(jnp.ones((seq, seq), bool))
        sim = jnp.where(mask, sim, -1e9)
        attn = jax.nn.softmax(sim, axis=-1)
        out = jnp.einsum("b h i j, b j d -> b i h d", attn, v).reshape(batch, seq, heads * d)
        return x + out @ p["attn_out"] + (jax.nn.swish(gate) * ff) @ p["ff_out"]

    params = {
        "norm": gain(n),
        "q_scale": gain(d),
        "k_scale": gain(d),
        "wi": weight(n, heads * d + 2 * d + 2 * hidden, dtype=dtype),
        "attn_out": weight(heads * d, n, dtype=dtype),
        "ff_out": weight(hidden, n, dtype=dtype),
    }
    return Built(layer, (params, normal(batch, seq, n, dtype=dtype)))
