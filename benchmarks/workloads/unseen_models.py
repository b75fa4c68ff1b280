"""Layers and steps of models in other spellings and odd shapes, written before anybody had seen a plan of them."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads.registry import (
    Built,
    Size,
    booleans,
    gain,
    half,
    integers,
    normal,
    pick,
    program,
    weight,
)


def _split(x: Any, heads: int) -> Any:
    return x.reshape(*x.shape[:-1], heads, -1).swapaxes(-2, -3)


def _merge(x: Any) -> Any:
    return x.swapaxes(-2, -3).reshape(*x.shape[:-3], x.shape[-2], -1)


def _norm(x: Any, scale: Any, shift: Any = None) -> Any:
    y = x.astype(jnp.float32)
    mean = jnp.mean(y, -1, keepdims=True)
    y = (y - mean) / jnp.sqrt(jnp.var(y, -1, keepdims=True) + 1e-5)
    y = y.astype(x.dtype) * scale
    return y if shift is None else y + shift


def _rms(x: Any, scale: Any) -> Any:
    y = x.astype(jnp.float32)
    return (y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype) * (1 + scale)


@program("padded-cross-attention", "unseen")
def _padded_cross(size: Size) -> Built:
    """Cross attention of a translation decoder over padded sentences, with its projections."""
    batch, targets, sources, n, heads = pick(size, (16, 200, 300, 1024, 16), (4, 100, 150, 256, 4), (2, 4, 5, 16, 2))
    dtype = half(size)

    def block(x: Any, memory: Any, keep: Any, w: Any, scale: Any) -> Any:
        q = _split(_norm(x, scale) @ w["q"], heads) * (n // heads) ** -0.5
        k, v = _split(memory @ w["k"], heads), _split(memory @ w["v"], heads)
        bias = jnp.where(keep, 0.0, -1e9)[:, None, None, :]
        p = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k) + bias.astype(dtype), axis=-1)
        return x + _merge(p @ v) @ w["o"]

    w = {k: weight(n, n, dtype=dtype) for k in "qkvo"}
    inputs = normal(batch, targets, n, dtype=dtype), normal(batch, sources, n, dtype=dtype), booleans(batch, sources)
    return Built(block, (*inputs, w, gain(n, dtype)))


@program("gemma-local-attention", "unseen")
def _local(size: Size) -> Built:
    """Grouped queries, a soft cap and a local window, with rotary positions and normalised queries and keys."""
    batch, length, heads, groups, d, window = pick(
        size, (1, 3000, 4, 2, 256, 1024), (1, 600, 2, 2, 64, 200), (1, 12, 2, 2, 8, 4)
    )
    dtype = half(size)

    def rope(x: Any) -> Any:
        angle = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(0, d, 2) / d)
        sin, cos = jnp.sin(angle)[:, None, :], jnp.cos(angle)[:, None, :]
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    def attention(q: Any, k: Any, v: Any, q_scale: Any, k_scale: Any) -> Any:
        q, k = rope(_rms(q, q_scale)) * d**-0.5, rope(_rms(k, k_scale))
        q = q.reshape(batch, length, heads, groups, d)
        logits = jnp.einsum("BTKGH,BSKH->BTKGS", q, k)
        logits = jnp.tanh(logits / 50.0) * 50.0
        i, j = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
        mask = ((j <= i) & (j > i - window))[None, :, None, None, :]
        probs = jax.nn.softmax(jnp.where(mask, logits, -2.3819763e38), axis=-1).astype(k.dtype)
        return jnp.einsum("BTKGS,BSKH->BTKGH", probs, v).reshape(batch, length, -1)

    shape = (batch, length, heads, d)
    q = normal(batch, length, heads * groups, d, dtype=dtype)
    k = normal(*shape, dtype=dtype)
    return Built(attention, (q, k, k, normal(d, dtype=dtype, scale=0.1), normal(d, dtype=dtype, scale=0.1)))


@program("multi-latent-attention", "unseen")
def _latent(size: Size) -> Built:
    """Latent keys and values with a part that carries positions, causal, for a prompt."""
    length, heads, d, r, latent = pick(size, (2048, 16, 128, 64, 512), (256, 4, 64, 32, 128), (8, 2, 8, 4, 8))
    dtype = half(size)

    def attention(q: Any, q_rope: Any, c: Any, k_rope: Any, up_k: Any, up_v: Any) -> Any:
        k = jnp.einsum("sc,chd->shd", c, up_k)
        v = jnp.einsum("sc,chd->shd", c, up_v)
        scores = jnp.einsum("thd,shd->hts", q, k) + jnp.einsum("thr,sr->hts", q_rope, k_rope)
        scores = scores.astype(jnp.float32) * (d + r) ** -0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        p = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(jnp.float32).min), -1).astype(dtype)
        return jnp.einsum("hts,shd->thd", p, v)

    arguments = (
        normal(length, heads, d, dtype=dtype),
        normal(length, heads, r, dtype=dtype),
        normal(length, latent, dtype=dtype),
    )
    up = normal(latent, heads, d, dtype=dtype, scale=latent**-0.5)
    return Built(attention, (*arguments, normal(length, r, dtype=dtype), up, up))


@program("quantised-cache-decoding", "unseen")
def _quantised(size: Size) -> Built:
    """One step over a cache of int8 keys and values with a scale for each, and lengths of rows."""
    batch, length, heads, groups, d = pick(size, (16, 4096, 8, 4, 128), (4, 1024, 4, 2, 64), (2, 8, 2, 2, 8))
    dtype = half(size)

    def step(q: Any, k: Any, v: Any, k_scale: Any, v_scale: Any, lengths: Any) -> Any:
        keys = k.astype(dtype) * k_scale[..., None]
        values = v.astype(dtype) * v_scale[..., None]
        s = jnp.einsum("bhgd,bshd->bhgs", q, keys) / math.sqrt(d)
        s = jnp.where(jnp.arange(length)[None, None, None] < lengths[:, None, None, None], s, -1e30)
        return jnp.einsum("bhgs,bshd->bhgd", jax.nn.softmax(s.astype(jnp.float32), -1).astype(dtype), values)

    quantised = integers(batch, length, heads, d, below=127)
    scales = normal(batch, length, heads, dtype=dtype, scale=0.002, offset=0.01)

    def of_int8(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return step(q, k.astype(jnp.int8), v.astype(jnp.int8), *rest)

    q = normal(batch, heads, groups, d, dtype=dtype)
    return Built(of_int8, (q, quantised, quantised, scales, scales, integers(batch, below=length)))


@program("swin-window-attention", "unseen")
def _swin(size: Size) -> Built:
    """Attention in windows of 7 x 7 with a table of relative positions and a mask of shifted windows."""
    batch, windows, heads, d = pick(size, (16, 64, 6, 32), (2, 16, 3, 32), (1, 2, 2, 4))
    n, dtype = heads * d, half(size)

    def block(x: Any, qkv: Any, bias: Any, out: Any, table: Any, index: Any, region: Any) -> Any:
        y = (x @ qkv + bias).reshape(batch * windows, 49, 3, heads, d).transpose(2, 0, 3, 1, 4)
        q, k, v = y[0] * d**-0.5, y[1], y[2]
        attention = q @ k.swapaxes(-2, -1) + table[index].transpose(2, 0, 1)[None].astype(dtype)
        mask = jnp.where(region[:, None, :] != region[:, :, None], -100.0, 0.0).astype(dtype)
        attention = attention.reshape(batch, windows, heads, 49, 49) + mask[None, :, None]
        attention = jax.nn.softmax(attention.reshape(-1, heads, 49, 49), -1)
        return (attention @ v).transpose(0, 2, 1, 3).reshape(batch * windows, 49, n) @ out

    x = normal(batch * windows, 49, n, dtype=dtype)
    tables = normal(169, heads, scale=0.1), integers(49, 49, below=169), integers(windows, 49, below=2)
    return Built(
        block, (x, weight(n, 3 * n, dtype=dtype), normal(3 * n, dtype=dtype), weight(n, n, dtype=dtype), *tables)
    )


@program("diffusion-transformer-block", "unseen")
def _diffusion(size: Size) -> Built:
    """A block whose norms are modulated by a condition, with attention over 1024 patches."""
    batch, tokens, n, heads = pick(size, (4, 1024, 1152, 16), (1, 256, 288, 4), (1, 6, 16, 2))
    dtype = half(size)

    def norm(x: Any) -> Any:
        m = x.mean(-1, keepdims=True)
        return (x - m) * jax.lax.rsqrt(((x - m) ** 2).mean(-1, keepdims=True) + 1e-6)

    def block(x: Any, c: Any, w: Any) -> Any:
        shift, scale, gate, shift2, scale2, gate2 = jnp.split((jax.nn.silu(c) @ w["mod"])[:, None], 6, -1)
        h = norm(x) * (1 + scale) + shift
        q, k, v = (_split(h @ w[name], heads) for name in "qkv")
        p = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(n // heads), -1)
        x = x + gate * (_merge(jnp.einsum("bhqk,bhkd->bhqd", p, v)) @ w["o"])
        h = norm(x) * (1 + scale2) + shift2
        return x + gate2 * (jax.nn.gelu(h @ w["up"], approximate=True) @ w["down"])

    w = {k: weight(n, n, dtype=dtype) for k in "qkvo"} | {"mod": weight(n, 6 * n, dtype=dtype)}
    w |= {"up": weight(n, 4 * n, dtype=dtype), "down": weight(4 * n, n, dtype=dtype)}
    return Built(block, (normal(batch, tokens, n, dtype=dtype), normal(batch, n, dtype=dtype), w))


@program("parallel-block", "unseen")
def _parallel(size: Size) -> Built:
    """Attention and MLP side by side after one norm, of a language model, at 1000 tokens."""
    tokens, n, heads = pick(size, (1000, 2560, 32), (200, 320, 4), (6, 16, 2))
    dtype = half(size)

    def block(x: Any, scale: Any, shift: Any, w: Any) -> Any:
        h = _norm(x, scale, shift)
        q, k, v = (_split(y, heads) for y in jnp.split(h @ w["qkv"], 3, axis=-1))
        s = jnp.einsum("htd,hsd->hts", q, k).astype(jnp.float32) / (n // heads) ** 0.5
        s = s + jnp.where(jnp.arange(tokens)[:, None] < jnp.arange(tokens), -1e9, 0.0)
        attended = jnp.einsum("hts,hsd->htd", jax.nn.softmax(s, -1).astype(dtype), v)
        return x + _merge(attended) @ w["o"] + jax.nn.gelu(h @ w["up"]) @ w["down"]

    w = {"qkv": weight(n, 3 * n, dtype=dtype), "o": weight(n, n, dtype=dtype)}
    w |= {"up": weight(n, 4 * n, dtype=dtype), "down": weight(4 * n, n, dtype=dtype)}
    return Built(block, (normal(tokens, n, dtype=dtype), gain(n, dtype), normal(n, dtype=dtype, scale=0.1), w))


@program("triangle-attention", "unseen")
def _triangle(size: Size) -> Built:
    """Attention along one side of pairs of residues, with a bias of pairs and a gate."""
    residues, n, heads, d = pick(size, (256, 128, 4, 32), (64, 64, 4, 16), (5, 8, 2, 4))
    dtype = half(size)

    def block(z: Any, keep: Any, scale: Any, w: Any) -> Any:
        x = _norm(z, scale)
        q, k, v, g = (jnp.einsum("ijc,chd->ijhd", x, w[name]) for name in "qkvg")
        bias = jnp.einsum("jkc,ch->hjk", x, w["b"])
        s = jnp.einsum("ijhd,ikhd->ihjk", q, k) * d**-0.5 + bias[None]
        s = s + (1e9 * (keep.astype(jnp.float32) - 1))[:, None, None, :].astype(s.dtype)
        o = jnp.einsum("ihjk,ikhd->ijhd", jax.nn.softmax(s, -1), v) * jax.nn.sigmoid(g)
        return z + jnp.einsum("ijhd,hdc->ijc", o, w["o"])

    w = {k: normal(n, heads, d, dtype=dtype, scale=n**-0.5) for k in "qkvg"}
    w |= {"b": normal(n, heads, dtype=dtype, scale=n**-0.5), "o": normal(heads, d, n, dtype=dtype, scale=n**-0.5)}
    return Built(block, (normal(residues, residues, n, dtype=dtype), booleans(residues, residues), gain(n, dtype), w))


@program("triangle-multiplication", "unseen")
def _triangle_product(size: Size) -> Built:
    """Gated products over the third side of triangles of residues, normalised before and after."""
    residues, n = pick(size, (256, 128), (96, 32), (5, 8))
    dtype = half(size)

    def block(z: Any, keep: Any, norms: Any, w: Any) -> Any:
        x = _norm(z, norms[0])
        a = jax.nn.sigmoid(x @ w["ga"]) * (x @ w["a"]) * keep[..., None]
        b = jax.nn.sigmoid(x @ w["gb"]) * (x @ w["b"]) * keep[..., None]
        o = jnp.einsum("ikc,jkc->ijc", a, b)
        return z + jax.nn.sigmoid(x @ w["g"]) * (_norm(o, norms[1]) @ w["o"])

    w = {k: weight(n, n, dtype=dtype) for k in ("a", "b", "ga", "gb", "g", "o")}
    z = normal(residues, residues, n, dtype=dtype)
    return Built(block, (z, booleans(residues, residues), [gain(n, dtype), gain(n, dtype)], w))


@program("state-space-chunks", "unseen")
def _chunks(size: Size) -> Built:
    """The quadratic part of a state space model in chunks: decays between positions times scores, and the states of chunks."""
    batch, chunks, length, heads, d, states = pick(
        size, (2, 16, 128, 16, 64, 64), (1, 8, 64, 4, 32, 32), (1, 2, 4, 2, 4, 4)
    )

    def block(x: Any, log_a: Any, b: Any, c: Any) -> Any:
        total = jnp.cumsum(-jax.nn.softplus(log_a), axis=2)
        between = total[:, :, :, None, :] - total[:, :, None, :, :]
        decay = jnp.exp(
            jnp.where(jnp.tril(jnp.ones((length, length), bool))[None, None, :, :, None], between, -jnp.inf)
        )
        scores = jnp.einsum("bcln,bcsn->bcls", c, b)
        inside = jnp.einsum("bcls,bclsh,bcshp->bclhp", scores, decay, x)
        left = jnp.exp(total[:, :, -1:, :] - total)
        state = jnp.einsum("bcln,bclh,bclhp->bchpn", b, left, x)

        def carry(h: Any, s: Any) -> Any:
            new, fade = s
            return h * jnp.exp(fade)[:, :, None, None] + new, h

        _, before = jax.lax.scan(
            carry, jnp.zeros_like(state[:, 0]), (state.swapaxes(0, 1), total[:, :, -1].swapaxes(0, 1))
        )
        across = jnp.einsum("bcln,cbhpn,bclh->bclhp", c, before, jnp.exp(total))
        return inside + across

    shape = (batch, chunks, length)
    return Built(
        block, (normal(*shape, heads, d), normal(*shape, heads), normal(*shape, states), normal(*shape, states))
    )


@program("retention", "unseen")
def _retention(size: Size) -> Built:
    """Attention without a softmax whose scores decay with distance, then a norm of each head and a gate."""
    length, heads, d = pick(size, (2048, 8, 128), (512, 4, 64), (8, 2, 4))
    dtype = half(size)

    def block(q: Any, k: Any, v: Any, g: Any) -> Any:
        gamma = jnp.log(1 - 2.0 ** (-5 - jnp.arange(heads)))
        distance = jnp.arange(length)[:, None] - jnp.arange(length)[None]
        decay = jnp.where(distance >= 0, jnp.exp(distance * gamma[:, None, None]), 0)
        s = jnp.einsum("htd,hsd->hts", q, k) * d**-0.5 * decay.astype(dtype)
        s = s / jnp.maximum(jnp.abs(s.sum(-1, keepdims=True)), 1)
        o = jnp.einsum("hts,hsd->htd", s, v)
        o = o / jnp.sqrt(jnp.mean(jnp.square(o.astype(jnp.float32)), -1, keepdims=True) + 1e-6).astype(dtype)
        return _merge(o) * jax.nn.silu(g)

    x = normal(heads, length, d, dtype=dtype)
    return Built(block, (x, x, x, normal(length, heads * d, dtype=dtype)))


@program("preference-loss", "unseen")
def _preference(size: Size) -> Built:
    """Direct preference optimisation from logits of chosen and rejected answers, with masks of tokens."""
    batch, tokens, vocabulary = pick(size, (4, 512, 32000), (2, 64, 4000), (2, 4, 10))
    dtype = half(size)

    def logp(logits: Any, labels: Any, mask: Any) -> Any:
        logits = logits.astype(jnp.float32)
        picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return ((picked - jax.scipy.special.logsumexp(logits, axis=-1)) * mask).sum(-1)

    def loss(chosen: Any, rejected: Any, labels: Any, masks: Any, reference: Any) -> Any:
        margin = logp(chosen, labels[0], masks[0]) - logp(rejected, labels[1], masks[1]) - reference
        return -jax.nn.log_sigmoid(0.1 * margin).mean(), (margin > 0).mean()

    logits = normal(batch, tokens, vocabulary, dtype=dtype)
    labels = integers(2, batch, tokens, below=vocabulary)
    return Built(loss, (logits, logits, labels, booleans(2, batch, tokens), normal(batch)))


@program("token-policy-loss", "unseen")
def _policy(size: Size) -> Built:
    """A clipped policy gradient for tokens with a divergence from a reference model and the entropy, and its gradient."""
    batch, tokens, vocabulary = pick(size, (4, 256, 32000), (2, 64, 4000), (2, 4, 10))

    def loss(logits: Any, reference: Any, labels: Any, old: Any, advantage: Any, mask: Any) -> Any:
        new = jax.nn.log_softmax(logits / 0.7)
        other = jax.nn.log_softmax(reference / 0.7)
        taken = jnp.take_along_axis(new, labels[..., None], -1)[..., 0]
        ratio = jnp.exp(taken - old)
        gain_ = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        divergence = (jnp.exp(new) * (new - other)).sum(-1)
        entropy = -(jnp.exp(new) * new).sum(-1)
        return -((gain_ - 0.04 * divergence + 0.01 * entropy) * mask).sum() / mask.sum()

    logits = normal(batch, tokens, vocabulary)
    rows = normal(batch, tokens)
    return Built(
        jax.value_and_grad(loss),
        (logits, logits, integers(batch, tokens, below=vocabulary), rows, rows, booleans(batch, tokens)),
    )


@program("nucleus-filter", "unseen")
def _nucleus(size: Size) -> Built:
    """Sampling: penalties, a temperature, min-p and top-p limits by a sort, then probabilities."""
    batch, vocabulary = pick(size, (64, 50257), (16, 8000), (2, 10))

    def probabilities(logits: Any, counts: Any) -> Any:
        logits = jnp.where(counts > 0, jnp.where(logits > 0, logits / 1.2, logits * 1.2), logits) / 0.8
        p = jax.nn.softmax(logits, -1)
        logits = jnp.where(p < 0.02 * p.max(-1, keepdims=True), -jnp.inf, logits)
        ordered = jnp.sort(jax.nn.softmax(logits, -1), -1)[:, ::-1]
        limit = jnp.take_along_axis(ordered, (jnp.cumsum(ordered, -1) < 0.9).sum(-1, keepdims=True), -1)
        p = jax.nn.softmax(logits, -1)
        return jnp.where(p < limit, 0, p) / jnp.where(p < limit, 0, p).sum(-1, keepdims=True)

    return Built(probabilities, (normal(batch, vocabulary, scale=3.0), integers(batch, vocabulary, below=2)))


@program("top-two-experts", "unseen")
def _experts(size: Size) -> Built:
    """Two experts for each token, dispatched by one-hot products, with losses that balance them."""
    tokens, n, width, experts, capacity = pick(
        size, (2048, 1024, 2048, 8, 640), (256, 128, 256, 4, 160), (8, 8, 8, 2, 6)
    )
    dtype = half(size)

    def layer(x: Any, router: Any, up: Any, down: Any) -> Any:
        logits = x.astype(jnp.float32) @ router
        p = jax.nn.softmax(logits, -1)
        weights, chosen = jax.lax.top_k(p, 2)
        weights = weights / weights.sum(-1, keepdims=True)
        hot = jax.nn.one_hot(chosen, experts)
        place = (jnp.cumsum(hot.reshape(-1, experts), 0) - 1).reshape(tokens, 2, experts)
        slot = jax.nn.one_hot((place * hot).sum(-1), capacity) * hot.max(-1, keepdims=True)
        dispatch = jnp.einsum("tke,tkc->tec", hot, slot).astype(dtype)
        combine = jnp.einsum("tk,tke,tkc->tec", weights, hot, slot).astype(dtype)
        h = jnp.einsum("tec,tn->ecn", dispatch, x)
        h = jnp.einsum("ecw,ewn->ecn", jax.nn.gelu(jnp.einsum("ecn,enw->ecw", h, up)), down)
        balance = (
            experts * (hot[:, 0].mean(0) * p.mean(0)).sum() + 1e-3 * jnp.square(jax.nn.logsumexp(logits, -1)).mean()
        )
        return jnp.einsum("ecn,tec->tn", h, combine), balance

    up = normal(experts, n, width, dtype=dtype, scale=n**-0.5)
    down = normal(experts, width, n, dtype=dtype, scale=width**-0.5)
    return Built(layer, (normal(tokens, n, dtype=dtype), weight(n, experts), up, down))


@program("int8-weights-mlp", "unseen")
def _int8(size: Size) -> Built:
    """A gated MLP for a few rows whose weights are int8 with a scale for each output."""
    rows, n, width = pick(size, (8, 4096, 11008), (4, 512, 1376), (2, 8, 16))
    dtype = half(size)

    def mlp(x: Any, gate: Any, up: Any, down: Any, scales: Any) -> Any:
        def product(y: Any, w: Any, s: Any) -> Any:
            return jnp.dot(y, w.astype(jnp.int8).astype(dtype)) * s

        h = jax.nn.silu(product(x, gate, scales[0])) * product(x, up, scales[1])
        return product(h, down, scales[2])

    scales = [normal(width, dtype=dtype, scale=1e-4, offset=1e-3)] * 2 + [
        normal(n, dtype=dtype, scale=1e-4, offset=1e-3)
    ]
    into = integers(n, width, below=100)
    return Built(mlp, (normal(rows, n, dtype=dtype), into, into, integers(width, n, below=100), scales))


@program("unet-residual-block", "unseen")
def _unet(size: Size) -> Built:
    """Two group norms with convolutions and an embedded time between, of an image model, channels last."""
    batch, side, n = pick(size, (4, 64, 320), (1, 32, 64), (1, 4, 8))
    groups, dtype = pick(size, 32, 32, 2), half(size)

    def norm(x: Any, scale: Any) -> Any:
        y = x.reshape(*x.shape[:3], groups, -1).astype(jnp.float32)
        mean, square = y.mean((1, 2, 4), keepdims=True), jnp.square(y).mean((1, 2, 4), keepdims=True)
        y = (y - mean) * jax.lax.rsqrt(jnp.maximum(square - mean * mean, 0) + 1e-5)
        return y.reshape(x.shape).astype(dtype) * scale

    def convolution(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def block(x: Any, time: Any, scales: Any, kernels: Any, w: Any) -> Any:
        h = convolution(jax.nn.silu(norm(x, scales[0])), kernels[0])
        h = h + (jax.nn.silu(time) @ w)[:, None, None]
        return x + convolution(jax.nn.silu(norm(h, scales[1])), kernels[1])

    kernel = normal(3, 3, n, n, dtype=dtype, scale=(9 * n) ** -0.5)
    scales = [gain(n, dtype), gain(n, dtype)]
    return Built(
        block,
        (
            normal(batch, side, side, n, dtype=dtype),
            normal(batch, 4 * n, dtype=dtype),
            scales,
            [kernel, kernel],
            weight(4 * n, n, dtype=dtype),
        ),
    )


@program("gaussian-process-mean", "unseen")
def _process(size: Size) -> Built:
    """Weights of kernels between test and training points, with a length for each feature, times targets."""
    tests, points, n, outputs = pick(size, (8192, 4096, 16, 8), (2048, 1024, 8, 4), (6, 5, 3, 2))

    def mean(x: Any, y: Any, alpha: Any, log_length: Any, log_scale: Any) -> Any:
        a, b = x / jnp.exp(log_length), y / jnp.exp(log_length)
        squared = jnp.sum(a**2, 1)[:, None] + jnp.sum(b**2, 1)[None, :] - 2 * a @ b.T
        distance = jnp.sqrt(jnp.maximum(squared, 1e-12))
        k = jnp.exp(2 * log_scale) * (1 + math.sqrt(3) * distance) * jnp.exp(-math.sqrt(3) * distance)
        return k @ alpha

    return Built(
        mean, (normal(tests, n), normal(points, n), normal(points, outputs), normal(n, scale=0.1), normal(scale=0.1))
    )
