"""Programs of language models, spelled as the users of several code bases spell them."""

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


@program("mixtral-top2-dispatch-einsum", "foreign-language")
def _top2(size: Size) -> Built:
    """Two experts for each token, with one-hot dispatch, a capacity, and the loss that balances the load."""
    groups, seq, n, hidden, experts = pick(size, (4, 1024, 1024, 2816, 8), (1, 256, 256, 512, 4), (2, 8, 8, 16, 4))
    dtype = half(size)
    capacity = max(4, int(2 * seq * 1.25 / experts))

    def moe(x: Any, router: Any, wi_0: Any, wi_1: Any, wo: Any) -> Any:
        gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x.astype(jnp.float32), router), axis=-1)
        index_1 = jnp.argmax(gates, axis=-1)
        mask_1 = jax.nn.one_hot(index_1, experts, dtype=jnp.float32)
        without = gates * (1 - mask_1)
        mask_2 = jax.nn.one_hot(jnp.argmax(without, axis=-1), experts, dtype=jnp.float32)
        aux = jnp.mean(gates.mean(1) * mask_1.mean(1)) * experts * experts

        place_1 = jnp.cumsum(mask_1, axis=1) * mask_1 - mask_1
        mask_1 = mask_1 * (place_1 < capacity)
        place_2 = (jnp.cumsum(mask_2, axis=1) - 1 + mask_1.sum(1, keepdims=True)) * mask_2
        mask_2 = mask_2 * (place_2 < capacity)
        gate_1, gate_2 = (gates * mask_1).sum(-1), (gates * mask_2).sum(-1)
        total = gate_1 + gate_2
        total = jnp.where(total > 0, total, 1.0)
        gate_1, gate_2 = gate_1 / total, gate_2 / total

        def spread(gate: Any, mask: Any, place: Any) -> Any:
            slot = jax.nn.one_hot((place * mask).sum(-1).astype(jnp.int32), capacity, dtype=jnp.float32)
            return gate[..., None, None] * mask[..., None] * slot[:, :, None, :]

        combine = spread(gate_1, mask_1, place_1) + spread(gate_2, mask_2, place_2)
        dispatch = (combine > 0).astype(x.dtype)
        inputs = jnp.einsum("gsec,gsm->egcm", dispatch, x)
        h = jax.nn.silu(jnp.einsum("egcm,emh->egch", inputs, wi_0)) * jnp.einsum("egcm,emh->egch", inputs, wi_1)
        outputs = jnp.einsum("egch,ehm->egcm", h, wo)
        return jnp.einsum("gsec,egcm->gsm", combine.astype(x.dtype), outputs), aux

    up, down = weight(experts, n, hidden, dtype=dtype), weight(experts, hidden, n, dtype=dtype)
    return Built(moe, (normal(groups, seq, n, dtype=dtype), weight(n, experts), up, up, down))


@program("expert-choice-routing", "foreign-language")
def _expert_choice(size: Size) -> Built:
    """Each expert picks its tokens with top_k; one-hot gather, a two-layer expert, and a weighted scatter."""
    groups, seq, n, hidden, experts = pick(size, (8, 512, 768, 3072, 16), (2, 256, 384, 768, 8), (2, 8, 8, 16, 4))
    dtype = half(size)
    capacity = 2 * seq // experts

    def route(x: Any, router: Any, norm: Any, wi: Any, bias: Any, wo: Any) -> Any:
        h = _rms(x, norm)
        logits = lax.dot_general(h.astype(jnp.float32), router, (((2,), (0,)), ((), ())))
        probs = jax.nn.softmax(logits, axis=-1)
        gate, index = lax.top_k(jnp.swapaxes(probs, 1, 2), capacity)
        permutation = jax.nn.one_hot(index, seq, dtype=h.dtype)
        picked = jnp.einsum("gecs,gsd->gecd", permutation, h)

        def expert(tokens: Any, w_in: Any, b_in: Any, w_out: Any) -> Any:
            return jax.nn.gelu(tokens @ w_in + b_in, approximate=False) @ w_out

        done = jax.vmap(expert, in_axes=(1, 0, 0, 0), out_axes=1)(picked, wi, bias, wo)
        done = done * gate[..., None].astype(done.dtype)
        return x + jnp.einsum("gecs,gecd->gsd", permutation, done)

    up, down = weight(experts, n, hidden, dtype=dtype), weight(experts, hidden, n, dtype=dtype)
    bias = normal(experts, hidden, dtype=dtype, scale=0.1)
    return Built(route, (normal(groups, seq, n, dtype=dtype), weight(n, experts), gain(n, dtype), up, bias, down))


@program("mamba2-segsum-chunks", "foreign-language")
def _mamba2(size: Size) -> Built:
    """The state-space dual in chunks: segment sums, products inside the chunks, states passed between them."""
    batch, length, heads, d, states, chunk = pick(
        size, (2, 2048, 24, 64, 128, 256), (1, 1024, 12, 64, 64, 128), (1, 8, 2, 4, 4, 4)
    )
    dtype = half(size)
    chunks = length // chunk

    def segsum(x: Any) -> Any:
        t = x.shape[-1]
        x = jnp.repeat(x[..., None], t, axis=-1)
        x = jnp.where(jnp.tril(jnp.ones((t, t), dtype=bool), k=-1), x, 0)
        total = jnp.cumsum(x, axis=-2)
        return jnp.where(jnp.tril(jnp.ones((t, t), dtype=bool), k=0), total, -jnp.inf)

    def ssd(x: Any, dt: Any, dt_bias: Any, a_log: Any, b: Any, c: Any, skip: Any) -> Any:
        dt = jax.nn.softplus(dt.astype(jnp.float32) + dt_bias)
        a = -jnp.exp(a_log) * dt
        scaled = x * dt[..., None].astype(x.dtype)
        scaled = scaled.reshape(batch, chunks, chunk, heads, d)
        b_, c_ = (t.reshape(batch, chunks, chunk, 1, states) for t in (b, c))
        b_, c_ = (jnp.broadcast_to(t, (batch, chunks, chunk, heads, states)) for t in (b_, c_))
        a = a.reshape(batch, chunks, chunk, heads).transpose(0, 3, 1, 2)
        a_cumsum = jnp.cumsum(a, axis=-1)

        inside = jnp.exp(segsum(a)).astype(x.dtype)
        scores = jnp.einsum("bclhn,bcshn->bhcls", c_, b_) * inside
        y_diagonal = jnp.einsum("bhcls,bcshp->bclhp", scores, scaled)

        decay_states = jnp.exp(a_cumsum[..., -1:] - a_cumsum).astype(x.dtype)
        summary = jnp.einsum("bclhn,bhcl,bclhp->bchpn", b_, decay_states, scaled)
        summary = jnp.concatenate([jnp.zeros_like(summary[:, :1]), summary], axis=1)
        decay_chunk = jnp.exp(segsum(jnp.pad(a_cumsum[..., -1], ((0, 0), (0, 0), (1, 0))))).astype(x.dtype)
        passed = jnp.einsum("bhzc,bchpn->bzhpn", decay_chunk, summary)
        passed, final = passed[:, :-1], passed[:, -1]
        y_off = jnp.einsum("bclhn,bchpn,bhcl->bclhp", c_, passed, jnp.exp(a_cumsum).astype(x.dtype))
        y = (y_diagonal + y_off).reshape(batch, length, heads, d)
        return y + x * skip[:, None].astype(x.dtype), final

    x, dt = normal(batch, length, heads, d, dtype=dtype), normal(batch, length, heads, dtype=dtype)
    state = normal(batch, length, states, dtype=dtype, scale=states**-0.5)
    per_head = (normal(heads, offset=-3.0), normal(heads, scale=0.5, offset=0.5))
    return Built(ssd, (x, dt, *per_head, state, state, gain(heads)))


@program("retnet-chunk-scan", "foreign-language")
def _retention(size: Size) -> Built:
    """Retention with a scan over chunks: decay inside, a state between, then a norm of each head and a gate."""
    batch, seq, heads, dk, dv, chunk = pick(
        size, (4, 2048, 8, 256, 512, 512), (1, 1000, 8, 64, 128, 200), (2, 8, 2, 4, 8, 4)
    )
    dtype = half(size)

    def retention(q: Any, k: Any, v: Any, gate: Any, w_out: Any) -> Any:
        log_gamma = jnp.log(1 - 2.0 ** (-5 - jnp.arange(heads, dtype=jnp.float32)))
        index = jnp.arange(chunk, dtype=jnp.float32)
        delta = index[:, None] - index[None, :]
        decay = jnp.where(delta >= 0, jnp.exp(jnp.maximum(delta, 0) * log_gamma[:, None, None]), 0.0)
        cross_decay = jnp.exp((index + 1) * log_gamma[:, None])[..., None]
        key_decay = jnp.exp((chunk - index - 1) * log_gamma[:, None])[..., None]
        chunk_decay = jnp.exp(chunk * log_gamma)[:, None, None]

        def body(state: Any, entry: Any) -> Any:
            qc, kc, vc = entry
            scores = (qc @ kc.swapaxes(-1, -2)).astype(jnp.float32) * decay
            inner = scores.astype(vc.dtype) @ vc
            cross = (qc.astype(jnp.float32) * cross_decay) @ state
            update = jnp.einsum("bhsd,bhsv->bhdv", kc * key_decay.astype(kc.dtype), vc)
            return state * chunk_decay + update, inner + cross.astype(inner.dtype)

        def split(t: Any) -> Any:
            return t.reshape(batch, seq // chunk, chunk, heads, -1).transpose(1, 0, 3, 2, 4)

        start = jnp.zeros((batch, heads, dk, dv), jnp.float32)
        state, out = lax.scan(body, start, (split(q), split(k * dk**-0.5), split(v)))
        out = out.transpose(1, 0, 3, 2, 4).reshape(batch, seq, heads, dv).astype(jnp.float32)
        mean = out.mean(-1, keepdims=True)
        out = (out - mean) * lax.rsqrt(((out - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
        out = jax.nn.swish(gate) * out.reshape(batch, seq, heads * dv).astype(gate.dtype)
        return out @ w_out, state

    n = heads * dv
    qk = normal(batch, seq, heads * dk, dtype=dtype)
    v = normal(batch, seq, n, dtype=dtype)
    return Built(retention, (qk, qk, v, v, weight(n, heads * dk, dtype=dtype)))


@program("dpo-loss-grad", "foreign-language")
def _dpo(size: Size) -> Built:
    """Direct preference: chosen rows before rejected ones, log probabilities of two models, the policy's gradient."""
    pairs, seq, vocab = pick(size, (2, 512, 32000), (1, 192, 16000), (2, 6, 16))
    dtype = half(size)
    beta, smoothing = 0.1, 0.05

    def sequence_log_probs(logits: Any, labels: Any) -> Any:
        labels, logits = labels[:, 1:], logits[:, :-1]
        loss_mask = labels != -100
        labels = jnp.where(labels == -100, 0, labels)
        per_token = jnp.take_along_axis(
            jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1), labels[..., None], axis=2
        ).squeeze(2)
        return (per_token * loss_mask).sum(-1)

    def loss(policy: Any, reference: Any, tokens: Any, completion: Any) -> Any:
        labels = jnp.where(completion, tokens, -100)
        policy_logps = sequence_log_probs(policy, labels)
        reference_logps = lax.stop_gradient(sequence_log_probs(reference, labels))
        ratios = (policy_logps[:pairs] - policy_logps[pairs:]) - (reference_logps[:pairs] - reference_logps[pairs:])
        losses = -jax.nn.log_sigmoid(beta * ratios) * (1 - smoothing) - jax.nn.log_sigmoid(-beta * ratios) * smoothing
        rewards = beta * lax.stop_gradient(policy_logps - reference_logps)
        accuracy = (rewards[:pairs] > rewards[pairs:]).astype(jnp.float32)
        return losses.mean(), {"margin": (rewards[:pairs] - rewards[pairs:]).mean(), "accuracy": accuracy.mean()}

    logits = normal(2 * pairs, seq, vocab, dtype=dtype)
    tokens = integers(2 * pairs, seq, below=vocab)
    return Built(jax.value_and_grad(loss, has_aux=True), (logits, logits, tokens, booleans(2 * pairs, seq)))


@program("grpo-token-loss-grad", "foreign-language")
def _grpo(size: Size) -> Built:
    """Group-relative policy loss from hidden states: clipped ratios, a divergence to the reference, an entropy."""
    groups, samples, seq, n, vocab = pick(size, (2, 4, 256, 1024, 50257), (1, 2, 64, 128, 3001), (2, 2, 4, 8, 13))
    dtype = half(size)
    batch = groups * samples

    def loss(params: Any, hidden: Any, tokens: Any, mask: Any, old: Any, reference: Any, rewards: Any) -> Any:
        grouped = rewards.reshape(groups, samples)
        advantage = (grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, keepdims=True) + 1e-4)
        advantage = advantage.reshape(batch, 1)
        logits = (_rms(hidden, params["norm"]) @ params["head"]).astype(jnp.float32) / 0.9
        log_z = jax.scipy.special.logsumexp(logits, axis=-1)
        chosen = jnp.sum(jax.nn.one_hot(tokens, vocab) * logits, axis=-1)
        log_prob = chosen - log_z
        probs = jax.nn.softmax(logits)
        entropy = log_z - jnp.sum(probs * logits, axis=-1)
        old = lax.stop_gradient(log_prob) + 0.1 * old
        reference = lax.stop_gradient(log_prob) + 0.1 * reference
        ratio = jnp.exp(log_prob - old)
        surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.28) * advantage)
        kl = jnp.exp(reference - log_prob) - (reference - log_prob) - 1
        per_token = -(surrogate - 0.04 * kl) - 0.001 * entropy
        mask = mask.astype(jnp.float32)
        return ((per_token * mask).sum(-1) / jnp.clip(mask.sum(-1), 1.0)).mean()

    params = {"norm": gain(n, dtype), "head": weight(n, vocab, dtype=dtype)}
    rows = (normal(batch, seq, n, dtype=dtype), integers(batch, seq, below=vocab), booleans(batch, seq))
    per_token = normal(batch, seq)
    return Built(jax.grad(loss, argnums=(0, 1)), (params, *rows, per_token, per_token, normal(batch)))


@jax.custom_vjp
def _cross_entropy_with_logits(logits: Any, targets: Any, z_loss: float) -> Any:
    sum_exp = jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
    log_softmax = logits - sum_exp
    loss = -jnp.sum(targets * log_softmax, axis=-1)
    log_z = jnp.squeeze(sum_exp, axis=-1)
    total_z_loss = z_loss * lax.square(log_z)
    return loss + total_z_loss, total_z_loss


def _cross_entropy_forward(logits: Any, targets: Any, z_loss: float) -> Any:
    max_logit = logits.max(axis=-1, keepdims=True)
    shifted = logits - max_logit
    exp_shifted = jnp.exp(shifted)
    sum_exp = jnp.sum(exp_shifted, axis=-1, keepdims=True)
    log_softmax = shifted - jnp.log(sum_exp)
    loss = -jnp.sum(targets * log_softmax, axis=-1)
    log_z = jnp.squeeze(jnp.log(sum_exp) + max_logit, axis=-1)
    total_z_loss = z_loss * lax.square(log_z)
    return (loss + total_z_loss, total_z_loss), (targets, z_loss, exp_shifted, sum_exp, log_softmax, log_z)


def _cross_entropy_backward(saved: Any, cotangents: Any) -> Any:
    g = cotangents[0]
    targets, z_loss, exp_shifted, sum_exp, log_softmax, log_z = saved
    derivative = (1 + 2 * z_loss * log_z)[..., None] * exp_shifted / sum_exp - targets
    g_logits = g[..., None] * derivative
    g_targets = -g[..., None] * log_softmax
    return g_logits.astype(exp_shifted.dtype), g_targets.astype(targets.dtype), jnp.array(0.0)


_cross_entropy_with_logits.defvjp(_cross_entropy_forward, _cross_entropy_backward)


@program("t5x-smoothed-loss-z-grad", "foreign-language")
def _smoothed(size: Size) -> Built:
    """The gradient of a label-smoothed loss with a term of the normaliser, under a rule of its own; some labels ignored."""
    batch, seq, vocab = pick(size, (4, 512, 32128), (2, 128, 16064), (2, 4, 12))
    smoothing = 0.1

    def loss(logits: Any, labels: Any, keep: Any) -> Any:
        labels = jnp.where(keep, labels, -1)
        weights = (labels >= 0).astype(jnp.float32)
        confidence = 1.0 - smoothing
        low = (1.0 - confidence) / (vocab - 1)
        constant = -(confidence * math.log(confidence) + (vocab - 1) * low * math.log(low + 1e-20))
        one_hot = (labels[..., None] == jnp.arange(vocab).reshape((1,) * labels.ndim + (-1,))).astype(jnp.float32)
        soft = lax.select(one_hot > 0, jnp.full(one_hot.shape, confidence), jnp.full(one_hot.shape, low))
        total, z = _cross_entropy_with_logits(logits, soft, 1e-4)
        total = (total - constant) * weights
        factor = 1.0 / jnp.maximum(weights.sum(), 1.0)
        return total.sum() * factor, (z * weights).sum() * factor

    arguments = normal(batch, seq, vocab, scale=2.0), integers(batch, seq, below=vocab), booleans(batch, seq)
    return Built(jax.value_and_grad(loss, has_aux=True), arguments)


@program("perplexity-vocabulary-chunks", "foreign-language")
def _perplexity(size: Size) -> Built:
    """The perplexity of tokens with logits made a slice of the vocabulary at a time."""
    batch, seq, n, vocab, chunks = pick(size, (1, 1000, 2048, 128256, 8), (1, 100, 256, 8016, 4), (2, 5, 8, 24, 3))
    dtype = half(size)
    width = vocab // chunks

    def perplexity(hidden: Any, head: Any, tokens: Any, mask: Any) -> Any:
        h = hidden[:, :-1].reshape(-1, n)
        targets, keep = tokens[:, 1:].reshape(-1), mask[:, 1:].reshape(-1)

        def body(i: Any, carry: Any) -> Any:
            top, total, picked = carry
            part = lax.dynamic_slice_in_dim(head, i * width, width, axis=0)
            logits = jnp.einsum("td,vd->tv", h, part, preferred_element_type=jnp.float32)
            new_top = jnp.maximum(top, logits.max(-1))
            total = total * jnp.exp(top - new_top) + jnp.exp(logits - new_top[:, None]).sum(-1)
            local = targets - i * width
            here = (local >= 0) & (local < width)
            value = jnp.take_along_axis(logits, jnp.clip(local, 0, width - 1)[:, None], axis=-1)[:, 0]
            return new_top, total, jnp.where(here, value, picked)

        rows = h.shape[0]
        start = jnp.full((rows,), -jnp.inf), jnp.zeros((rows,)), jnp.zeros((rows,))
        top, total, picked = lax.fori_loop(0, chunks, body, start)
        nll = jnp.where(keep, top + jnp.log(total) - picked, 0.0)
        return jnp.exp(nll.sum() / jnp.maximum(keep.sum(), 1)), nll.reshape(batch, seq - 1)

    head = normal(vocab, n, dtype=dtype, scale=n**-0.5)
    rows = integers(batch, seq, below=vocab), booleans(batch, seq)
    return Built(perplexity, (normal(batch, seq, n, dtype=dtype), head, *rows))


@program("top-p-min-p-sampler", "foreign-language")
def _top_p(size: Size) -> Built:
    """Temperature, a nucleus and a least probability for every row, then a draw, or the best when greedy."""
    rows, vocab = pick(size, (32, 128256), (2, 16032), (3, 11))

    def sample(logits: Any, temperature: Any, top_p: Any, min_p: Any, seed: Any, greedy: Any) -> Any:
        logits = logits.astype(jnp.float32) / jnp.maximum(temperature, 1e-2)[:, None]
        probs = jax.nn.softmax(logits, axis=-1)
        floor = jnp.max(probs, axis=-1, keepdims=True) * jax.nn.sigmoid(min_p)[:, None]
        logits = jnp.where(probs < floor, -jnp.inf, logits)
        ordered = jnp.sort(logits, axis=-1)[:, ::-1]
        cumulative = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
        cutoff_index = jnp.sum(cumulative < jax.nn.sigmoid(top_p)[:, None], axis=-1, keepdims=True)
        cutoff = jnp.take_along_axis(ordered, jnp.minimum(cutoff_index, vocab - 1), axis=-1)
        logits = jnp.where(logits < cutoff, jnp.full_like(logits, float("-inf")), logits)
        token = lax.cond(
            greedy > 0,
            lambda key, x: jnp.argmax(x, axis=-1),
            lambda key, x: jax.random.categorical(key, x, axis=-1),
            jax.random.PRNGKey(seed),
            logits,
        )
        return token, jax.nn.softmax(logits, axis=-1)

    per_row = normal(rows, scale=0.1, offset=0.9), normal(rows, offset=2.2), normal(rows, scale=0.5, offset=-3.0)
    arguments = (normal(rows, vocab, dtype=half(size), scale=3.0), *per_row)
    return Built(sample, (*arguments, integers(below=1000), integers(below=2)))


@program("tied-head-penalised-log-probs", "foreign-language")
def _tied_head(size: Size) -> Built:
    """A token is embedded, added to a state, and scored by the same table: capped, penalised, tempered log probabilities."""
    rows, n, vocab, past = pick(size, (64, 2048, 256000, 512), (16, 512, 24000, 200), (3, 8, 16, 4))
    dtype = half(size)

    def embed(table: Any, tokens: Any) -> Any:
        x = jnp.take(table, tokens, axis=0)
        return x * jnp.sqrt(n).astype(x.dtype)

    @jax.jit
    def head(table: Any, x: Any) -> Any:
        logits = jnp.dot(x, table.T).astype(jnp.float32)
        return jnp.tanh(logits / 30.0) * 30.0

    def step(params: Any, tokens: Any, state: Any, previous: Any, penalty: Any, temperature: Any) -> Any:
        x = embed(params["table"], tokens) + state
        logits = head(params["table"], _rms_one_plus(x, params["final_norm"]))
        seen = jnp.zeros((rows, vocab), bool).at[jnp.arange(rows)[:, None], previous].set(True)
        penalised = jnp.where(logits > 0, logits / penalty[:, None], logits * penalty[:, None])
        logits = jnp.where(seen, penalised, logits) / temperature[:, None]
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        return log_probs, jnp.take_along_axis(log_probs, tokens[:, None], axis=-1)[:, 0]

    params = {"table": normal(vocab, n, dtype=dtype, scale=n**-0.5), "final_norm": normal(n, dtype=dtype, scale=0.1)}
    per_row = normal(rows, scale=0.05, offset=1.2), normal(rows, scale=0.05, offset=0.8)
    tokens, previous = integers(rows, below=vocab), integers(rows, past, below=vocab)
    return Built(step, (params, tokens, normal(rows, n, dtype=dtype), previous, *per_row))


@program("speculative-acceptance", "foreign-language")
def _speculative(size: Size) -> Built:
    """Drafted tokens are accepted by the ratio of two models; the first refused one is drawn from what remains."""
    batch, drafts, vocab = pick(size, (16, 5, 128256), (4, 4, 32064), (2, 3, 11))
    dtype = half(size)

    def accept(target_logits: Any, draft_logits: Any, draft_tokens: Any, seed: Any) -> Any:
        key_accept, key_sample = jax.random.split(jax.random.PRNGKey(seed))
        p = jax.nn.softmax(target_logits.astype(jnp.float32), axis=-1)
        q = jax.nn.softmax(draft_logits.astype(jnp.float32), axis=-1)
        rows, places = jnp.arange(batch)[:, None], jnp.arange(drafts)[None, :]
        p_token = p[rows, places, draft_tokens]
        q_token = q[rows, places, draft_tokens]
        u = jax.random.uniform(key_accept, (batch, drafts))
        accepted = u < jnp.minimum(1.0, p_token / jnp.maximum(q_token, 1e-20))
        prefix = jnp.cumprod(accepted.astype(jnp.int32), axis=1)
        count = prefix.sum(axis=1)
        q_padded = jnp.concatenate([q, jnp.zeros((batch, 1, vocab), q.dtype)], axis=1)

        def at(t: Any, i: Any) -> Any:
            return lax.dynamic_index_in_dim(t, i, axis=0, keepdims=False)

        left = jnp.maximum(jax.vmap(at)(p, count) - jax.vmap(at)(q_padded, count), 0.0)
        mass = left.sum(-1, keepdims=True)
        left = jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1.0), jax.vmap(at)(p, count))
        extra = jax.random.categorical(key_sample, jnp.log(left + 1e-30), axis=-1)
        padded = jnp.concatenate([draft_tokens, jnp.zeros((batch, 1), draft_tokens.dtype)], axis=1)
        index = jnp.arange(drafts + 1)[None, :]
        tokens = jnp.where(index < count[:, None], padded, -1)
        tokens = jnp.where(index == count[:, None], extra[:, None].astype(tokens.dtype), tokens)
        return tokens, count, left

    logits = (normal(batch, drafts + 1, vocab, dtype=dtype), normal(batch, drafts, vocab, dtype=dtype))
    return Built(accept, (*logits, integers(batch, drafts, below=vocab), integers(below=1000)))


@program("hyper-connections-mlp", "foreign-language")
def _hyper(size: Size) -> Built:
    """Several residual streams, mixed by weights which depend on them, around a gated feed-forward block."""
    batch, seq, n, streams, hidden = pick(size, (1, 2048, 2048, 4, 5632), (1, 256, 512, 4, 1024), (2, 4, 8, 2, 16))
    dtype = half(size)

    def connect(p: Any, streams_in: Any) -> Any:
        normed = streams_in.astype(jnp.float32)
        mean = jnp.mean(normed, -1, keepdims=True)
        normed = (normed - mean) * lax.rsqrt(jnp.var(normed, -1, keepdims=True) + 1e-5) * p["norm"]
        alpha = jnp.tanh(normed @ p["dynamic_alpha"]) * p["alpha_scale"] + p["static_alpha"]
        beta = jnp.tanh(jnp.einsum("btsd,d->bts", normed, p["dynamic_beta"])) * p["beta_scale"] + p["static_beta"]
        mixed = jnp.einsum("btse,btsd->bted", alpha, streams_in.astype(jnp.float32))
        branch, rest = mixed[..., 0, :], mixed[..., 1:, :]

        h = _rms(branch.astype(dtype), p["block_norm"])
        out = (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
        return (rest + beta[..., None] * out[..., None, :].astype(jnp.float32)).astype(streams_in.dtype)

    params = {
        "norm": gain(n),
        "dynamic_alpha": normal(n, streams + 1, scale=0.5 * n**-0.5),
        "dynamic_beta": normal(n, scale=0.5 * n**-0.5),
        "alpha_scale": normal(scale=0.01, offset=0.1),
        "beta_scale": normal(scale=0.01, offset=0.1),
        "static_alpha": normal(streams, streams + 1, scale=0.5),
        "static_beta": gain(streams),
        "block_norm": gain(n, dtype),
        "gate": weight(n, hidden, dtype=dtype),
        "up": weight(n, hidden, dtype=dtype),
        "down": weight(hidden, n, dtype=dtype),
    }
    return Built(connect, (params, normal(batch, seq, streams, n, dtype=dtype)))


@program("contrastive-search-rerank", "foreign-language")
def _contrastive(size: Size) -> Built:
    """Candidates are ranked by probability less the greatest cosine with the context, and the winner's state is kept."""
    batch, candidates, length, n, vocab = pick(
        size, (16, 8, 1000, 4096, 50304), (8, 6, 1000, 1024, 12000), (2, 3, 5, 8, 12)
    )
    dtype = half(size)
    alpha = 0.6

    def rank(logits: Any, context: Any, padding: Any, candidate_hidden: Any) -> Any:
        probs, tokens = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), candidates)
        norm_context = context / jnp.linalg.norm(context.astype(jnp.float32), axis=2, keepdims=True).astype(dtype)
        norm_next = candidate_hidden / jnp.linalg.norm(
            candidate_hidden.astype(jnp.float32), axis=2, keepdims=True
        ).astype(dtype)
        cosine = jax.vmap(lambda c, h: h @ c.T)(norm_context, norm_next).astype(jnp.float32)
        cosine = jnp.where(padding[:, None, :], cosine, jnp.finfo(jnp.float32).min)
        degeneration = jnp.max(cosine, axis=-1)
        score = (1.0 - alpha) * probs - alpha * degeneration
        best = jnp.argmax(score, axis=-1)
        state = jax.vmap(lambda h, i: h[i])(candidate_hidden, best)
        return jnp.take_along_axis(tokens, best[:, None], axis=1)[:, 0], state, score

    states = normal(batch, length, n, dtype=dtype), booleans(batch, length), normal(batch, candidates, n, dtype=dtype)
    return Built(rank, (normal(batch, vocab, dtype=dtype, scale=3.0), *states))


@program("beam-score-update", "foreign-language")
def _beam(size: Size) -> Built:
    """A step of beam search: log probabilities, twice the beams kept, sequences gathered, finished ones scored by length."""
    batch, beams, vocab, length = pick(size, (32, 4, 32128, 256), (12, 4, 32128, 128), (2, 2, 11, 5))
    eos, negative = 1, -1.0e7

    def gather(t: Any, index: Any) -> Any:
        one_hot = jax.nn.one_hot(index, t.shape[1], dtype=jnp.float32)
        return jnp.einsum("beo,bo...->be...", one_hot, t.astype(jnp.float32)).astype(t.dtype)

    def step(logits: Any, alive: Any, sequences: Any, finished: Any, finished_scores: Any, position: Any) -> Any:
        candidates = jax.nn.log_softmax(logits.astype(jnp.float32).reshape(batch, beams, vocab))
        scores = (candidates + alive[..., None]).reshape(batch, beams * vocab)
        top, flat = lax.top_k(scores, 2 * beams)
        chosen = gather(sequences, flat // vocab)
        ids = (flat % vocab)[..., None].astype(chosen.dtype)
        chosen = lax.dynamic_update_slice(chosen, ids, (0, 0, position))
        ended = chosen[:, :, position] == eos
        new_log_probs = top + ended * negative
        _, keep = lax.top_k(new_log_probs, beams)
        alive_sequences, alive_scores = gather(chosen, keep), jnp.take_along_axis(new_log_probs, keep, axis=1)
        penalty = jnp.power((5.0 + position + 1) / 6.0, 0.6)
        done = top / penalty + (~ended) * negative
        all_scores = jnp.concatenate([finished_scores, done], axis=1)
        all_sequences = jnp.concatenate([finished, chosen], axis=1)
        best, index = lax.top_k(all_scores, beams)
        return alive_scores, alive_sequences, gather(all_sequences, index), best

    sequences = integers(batch, beams, length, below=vocab)
    scores = normal(batch, beams, offset=-20.0)
    logits = normal(batch * beams, vocab, dtype=half(size), scale=2.0)
    return Built(step, (logits, scores, sequences, sequences, scores, integers(below=length)))
