"""Programs of the same kinds in other spellings and odd shapes, written before anybody had seen a plan of them."""

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


@program("stein-gradient", "unseen")
def _stein(size: Size) -> Built:
    """Stein variational gradient descent: particles that attract by scores and repel by a kernel."""
    particles, n = pick(size, (4096, 64), (1024, 32), (6, 3))

    def direction(x: Any, score: Any) -> Any:
        difference = x[:, None, :] - x[None, :, :]
        squared = (difference**2).sum(-1)
        k = jnp.exp(-squared / (2 * n))
        repel = jnp.einsum("ij,ijd->id", k, difference) / n
        return (k @ score + repel) / particles

    return Built(direction, (normal(particles, n), normal(particles, n)))


@program("softened-bodies", "unseen")
def _bodies(size: Size) -> Built:
    """Accelerations and the potential of bodies that attract each other, softened."""
    bodies = pick(size, 16384, 2048, 6)

    def forces(x: Any, mass: Any) -> Any:
        d = x[None] - x[:, None]
        r2 = jnp.sum(d * d, -1) + 1e-2
        inverse = jax.lax.rsqrt(r2)
        return jnp.sum(mass[None, :, None] * d * (inverse**3)[..., None], 1), -jnp.sum(mass[None] * inverse, 1)

    return Built(forces, (normal(bodies, 3), normal(bodies, scale=0.1, offset=1.0)))


@program("neighbour-embedding-gradient", "unseen")
def _neighbours(size: Size) -> Built:
    """The gradient of an embedding whose affinities have heavy tails, against given ones."""
    points = pick(size, 4096, 1024, 6)

    def gradient(p: Any, y: Any) -> Any:
        squared = jnp.sum(jnp.square(y[:, None] - y[None]), -1)
        w = 1 / (1 + squared) * (1 - jnp.eye(points))
        q = w / w.sum()
        force = (p - q) * w
        loss = jnp.sum(p * jnp.log((p + 1e-12) / (q + 1e-12)))
        return 4 * (force.sum(1)[:, None] * y - force @ y), loss

    return Built(gradient, (normal(points, points, scale=1e-8, offset=6e-8), normal(points, 2)))


@program("radiance-rendering", "unseen")
def _radiance(size: Size) -> Built:
    """Colours of rays from densities and colours of samples along them, with depth and opacity."""
    rays, samples = pick(size, (65536, 192), (8192, 64), (6, 5))

    def render(density: Any, colour: Any, depths: Any) -> Any:
        steps = jnp.concatenate([depths[:, 1:] - depths[:, :-1], jnp.full_like(depths[:, :1], 1e10)], -1)
        alpha = 1 - jnp.exp(-jax.nn.relu(density) * steps)
        through = jnp.cumprod(jnp.concatenate([jnp.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        w = alpha * through
        return (w[..., None] * jax.nn.sigmoid(colour)).sum(-2), (w * depths).sum(-1), w.sum(-1)

    return Built(
        render, (normal(rays, samples), normal(rays, samples, 3), normal(rays, samples, scale=0.1, offset=2.0))
    )


@program("hidden-markov-forward", "unseen")
def _markov(size: Size) -> Built:
    """Log likelihoods of sequences under a hidden Markov model, one step after the other."""
    batch, steps, states, symbols = pick(size, (256, 64, 128, 1000), (32, 32, 64, 100), (2, 3, 4, 5))

    def likelihood(initial: Any, transition: Any, emission: Any, observed: Any) -> Any:
        log_a, log_b = jax.nn.log_softmax(transition, -1), jax.nn.log_softmax(emission, -1)

        def step(alpha: Any, symbol: Any) -> Any:
            return jax.nn.logsumexp(alpha[:, :, None] + log_a[None], axis=1) + log_b[:, symbol].T, None

        start = jax.nn.log_softmax(initial)[None] + log_b[:, observed[0]].T
        last, _ = jax.lax.scan(step, start, observed[1:])
        return jax.nn.logsumexp(last, -1)

    return Built(
        likelihood,
        (normal(states), normal(states, states), normal(states, symbols), integers(steps, batch, below=symbols)),
    )


@program("vector-quantiser", "unseen")
def _quantiser(size: Size) -> Built:
    """Nearest codes of latent vectors, with losses of commitment and the perplexity of the codes."""
    rows, codes, n = pick(size, (32768, 1024, 64), (4096, 512, 32), (8, 5, 3))

    def quantise(z: Any, book: Any) -> Any:
        distance = jnp.sum(z**2, -1, keepdims=True) - 2 * jnp.dot(z, book.T) + jnp.sum(book**2, -1)
        nearest = jnp.argmin(distance, -1)
        hot = jax.nn.one_hot(nearest, codes)
        quantised = hot @ book
        loss = jnp.mean((jax.lax.stop_gradient(quantised) - z) ** 2) * 0.25 + jnp.mean((quantised - z) ** 2)
        share = hot.mean(0)
        return z + jax.lax.stop_gradient(quantised - z), loss, jnp.exp(-jnp.sum(share * jnp.log(share + 1e-10)))

    return Built(quantise, (normal(rows, n), normal(codes, n)))


@program("two-towers-loss", "unseen")
def _towers(size: Size) -> Built:
    """Users and items in two towers, a softmax over the items of the batch with a correction for popularity, and its gradient."""
    batch, n, width = pick(size, (8192, 256, 128), (1024, 128, 64), (6, 8, 4))

    def loss(w: Any, users: Any, items: Any, log_share: Any, ids: Any) -> Any:
        u, v = (jax.nn.relu(x @ w[k][0]) @ w[k][1] for k, x in (("user", users), ("item", items)))
        u, v = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (u, v))
        logits = u @ v.T / 0.05 - log_share[None]
        same = (ids[:, None] == ids[None]) & ~jnp.eye(batch, dtype=bool)
        logits = jnp.where(same, -1e9, logits)
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits, -1)))

    w = {k: [weight(n, 2 * n), weight(2 * n, width)] for k in ("user", "item")}
    rows = normal(batch, n)
    return Built(jax.value_and_grad(loss), (w, rows, rows, normal(batch), integers(batch, below=batch)))


@program("graph-attention-leaky", "unseen")
def _graph_attention(size: Size) -> Built:
    """Attention over neighbours in a graph given as a matrix, with scores that are sums of two terms."""
    nodes, heads, n = pick(size, (4096, 4, 64), (1024, 2, 32), (6, 2, 4))
    dtype = half(size)

    def layer(x: Any, adjacent: Any, w: Any, a: Any, b: Any) -> Any:
        h = jnp.einsum("nf,fhd->hnd", x, w)
        e = jax.nn.leaky_relu((h * a[:, None]).sum(-1)[:, :, None] + (h * b[:, None]).sum(-1)[:, None, :], 0.2)
        p = jax.nn.softmax(jnp.where(adjacent[None], e, -1e9), -1)
        return jax.nn.elu(jnp.einsum("hij,hjd->ihd", p, h).reshape(nodes, -1))

    vectors = normal(heads, n, dtype=dtype, scale=0.3)
    w = normal(n, heads, n, dtype=dtype, scale=n**-0.5)
    return Built(layer, (normal(nodes, n, dtype=dtype), booleans(nodes, nodes), w, vectors, vectors))


@program("point-attention", "unseen")
def _points(size: Size) -> Built:
    """Scores of features and of squared distances of points, which also move along their differences."""
    points, heads, d = pick(size, (1024, 8, 32), (256, 4, 16), (5, 2, 4))

    def layer(q: Any, k: Any, v: Any, x: Any, scale: Any) -> Any:
        distance = jnp.sum((x[:, None] - x[None]) ** 2, -1)
        s = jnp.einsum("ihd,jhd->hij", q, k) / math.sqrt(d) - jax.nn.softplus(scale)[:, None, None] * distance
        p = jax.nn.softmax(s, -1)
        return jnp.einsum("hij,jhd->ihd", p, v), x + jnp.einsum("ij,ijc->ic", p.mean(0), x[:, None] - x[None])

    f = normal(points, heads, d)
    return Built(layer, (f, f, f, normal(points, 3), normal(heads)))


@program("spectrogram-features", "unseen")
def _spectrogram(size: Size) -> Built:
    """Mel features of frames of sound: a power spectrum, bands, a logarithm, and a norm over time."""
    batch, frames, bins, bands = pick(size, (32, 1500, 201, 80), (4, 300, 201, 80), (2, 4, 5, 3))

    def features(real: Any, imaginary: Any, mel: Any) -> Any:
        power = real**2 + imaginary**2
        logs = jnp.log10(jnp.maximum(jnp.einsum("btf,fm->btm", power, jnp.abs(mel)), 1e-10))
        logs = jnp.maximum(logs, logs.max(axis=(1, 2), keepdims=True) - 8.0)
        return (logs - logs.mean(1, keepdims=True)) / (logs.std(1, keepdims=True) + 1e-5)

    x = normal(batch, frames, bins)
    return Built(features, (x, x, normal(bins, bands)))


@program("ensemble-of-networks", "unseen")
def _ensemble(size: Size) -> Built:
    """Many small networks on the same rows, their mean and their disagreement."""
    members, rows, n, width = pick(size, (16, 4096, 32, 256), (8, 512, 16, 64), (2, 4, 3, 4))

    def predict(w: Any, x: Any) -> Any:
        def one(p: Any) -> Any:
            h = jnp.tanh(x @ p["a"] + p["b"])
            h = jnp.tanh(h @ p["c"] + p["d"])
            return h @ p["e"]

        y = jax.vmap(one)(w)
        return y.mean(0), jnp.log(y.var(0) + 1e-6)

    w = {
        "a": normal(members, n, width, scale=n**-0.5),
        "b": normal(members, 1, width),
        "c": normal(members, width, width, scale=width**-0.5),
    }
    return Built(
        predict,
        (w | {"d": normal(members, 1, width), "e": normal(members, width, 2, scale=width**-0.5)}, normal(rows, n)),
    )


@program("mixture-density-loss", "unseen")
def _mixture_density(size: Size) -> Built:
    """The likelihood of targets under mixtures that a network gives, and its gradient."""
    rows, parts, n, outputs = pick(size, (65536, 32, 128, 4), (8192, 16, 64, 2), (6, 3, 4, 2))

    def loss(w: Any, x: Any, y: Any) -> Any:
        h = jax.nn.relu(x @ w["h"])
        mean = (h @ w["mean"]).reshape(rows, parts, outputs)
        log_scale = jnp.clip((h @ w["scale"]).reshape(rows, parts, outputs), -5, 5)
        z = (y[:, None] - mean) * jnp.exp(-log_scale)
        each = -0.5 * (z**2).sum(-1) - log_scale.sum(-1) - 0.5 * outputs * math.log(2 * math.pi)
        return -jax.nn.logsumexp(jax.nn.log_softmax(h @ w["share"], -1) + each, -1).mean()

    w = {
        "h": weight(n, n),
        "mean": weight(n, parts * outputs),
        "scale": weight(n, parts * outputs),
        "share": weight(n, parts),
    }
    return Built(jax.value_and_grad(loss), (w, normal(rows, n), normal(rows, outputs)))


@program("pooling-by-attention", "unseen")
def _pooling(size: Size) -> Built:
    """Bags of instances pooled by gated attention, with lengths of bags, then classified."""
    bags, length, n, width, classes = pick(size, (64, 1000, 512, 128, 10), (16, 200, 128, 64, 10), (2, 4, 6, 3, 2))
    dtype = half(size)

    def classify(x: Any, lengths: Any, w: Any) -> Any:
        a = (jnp.tanh(x @ w["v"]) * jax.nn.sigmoid(x @ w["u"])) @ w["w"]
        a = jnp.where(jnp.arange(length)[None, :, None] < lengths[:, None, None], a, -jnp.inf)
        p = jax.nn.softmax(a.astype(jnp.float32), axis=1).astype(dtype)
        pooled = jnp.sum(p * x, axis=1)
        return jax.nn.log_softmax((pooled @ w["c"]).astype(jnp.float32)), p[..., 0]

    w = {
        "v": weight(n, width, dtype=dtype),
        "u": weight(n, width, dtype=dtype),
        "w": weight(width, 1, dtype=dtype),
        "c": weight(n, classes, dtype=dtype),
    }
    return Built(classify, (normal(bags, length, n, dtype=dtype), integers(bags, below=length), w))


@program("correlation-attention", "unseen")
def _correlation(size: Size) -> Built:
    """Matching of two images: similarities of all pairs of pixels, softmaxes along both sides, and expected positions."""
    pixels, n = pick(size, (4096, 256), (1024, 64), (6, 4))
    dtype = half(size)

    def match(a: Any, b: Any, positions: Any) -> Any:
        s = (a @ b.T).astype(jnp.float32) / n**0.5 / 0.1
        p = jax.nn.softmax(s, 0) * jax.nn.softmax(s, 1)
        return (jax.nn.softmax(s, -1) @ positions), p.max(1), p.argmax(1)

    return Built(match, (normal(pixels, n, dtype=dtype), normal(pixels, n, dtype=dtype), normal(pixels, 2)))


@program("differential-attention", "unseen")
def _differential(size: Size) -> Built:
    """The difference of two causal attentions over the same values, normalised."""
    length, heads, d = pick(size, (2048, 8, 64), (512, 2, 32), (6, 2, 4))
    dtype = half(size)

    def attention(q: Any, k: Any, v: Any, weight_: Any, scale: Any) -> Any:
        s = jnp.einsum("cthd,cshd->chts", q, k) * d**-0.5
        s = jnp.where(jnp.tril(jnp.ones((length, length), bool)), s, -jnp.inf)
        p = jax.nn.softmax(s.astype(jnp.float32), -1)
        p = (p[0] - jax.nn.sigmoid(weight_)[:, None, None] * p[1]).astype(dtype)
        return _rms(jnp.einsum("hts,shd->thd", p, v), scale) * 0.2

    q = normal(2, length, heads, d, dtype=dtype)
    return Built(
        attention,
        (q, q, normal(length, heads, 2 * d, dtype=dtype), normal(heads), normal(2 * d, dtype=dtype, scale=0.1)),
    )


@program("chunked-attention-scan", "unseen")
def _chunked(size: Size) -> Built:
    """Attention that a user has written in chunks of queries with a scan, to save memory."""
    length, heads, d, chunk = pick(size, (4096, 16, 80, 512), (1024, 4, 40, 256), (8, 2, 4, 4))
    dtype = half(size)

    def attention(q: Any, k: Any, v: Any) -> Any:
        def step(_: Any, part: Any) -> Any:
            s = jnp.einsum("qhd,khd->hqk", part, k, preferred_element_type=jnp.float32) / math.sqrt(d)
            e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
            return None, jnp.einsum("hqk,khd->qhd", (e / e.sum(-1, keepdims=True)).astype(dtype), v)

        _, out = jax.lax.scan(jax.checkpoint(step), None, q.reshape(-1, chunk, heads, d))
        return out.reshape(length, heads, d)

    x = normal(length, heads, d, dtype=dtype)
    return Built(attention, (x, x, x))


@program("cached-decoder-step", "unseen")
def _cached(size: Size) -> Built:
    """A step of a decoder layer that writes into a cache at each row's length, and attends to what is filled."""
    batch, length, n, heads, groups, width = pick(
        size, (8, 2048, 2048, 8, 2, 5632), (2, 512, 256, 2, 2, 704), (2, 6, 16, 2, 2, 8)
    )
    d, dtype = n // (heads * groups), half(size)

    def step(x: Any, keys: Any, values: Any, at: Any, w: Any, scales: Any) -> Any:
        h = _rms(x, scales[0])
        q = (h @ w["q"]).reshape(batch, heads, groups, d)
        write = jax.vmap(lambda cache, new, i: jax.lax.dynamic_update_slice(cache, new[None], (i, 0, 0)))
        keys = write(keys, (h @ w["k"]).reshape(batch, heads, d), at)
        values = write(values, (h @ w["v"]).reshape(batch, heads, d), at)
        s = jnp.einsum("bhgd,bshd->bhgs", q, keys) * d**-0.5
        s = jnp.where((jnp.arange(length) <= at[:, None])[:, None, None], s, jnp.finfo(dtype).min)
        o = jnp.einsum("bhgs,bshd->bhgd", jax.nn.softmax(s.astype(jnp.float32), -1).astype(dtype), values)
        x = x + o.reshape(batch, n) @ w["o"]
        h = _rms(x, scales[1])
        return x + (jax.nn.gelu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], keys, values

    w = {"q": weight(n, n, dtype=dtype), "o": weight(n, n, dtype=dtype)}
    w |= {k: weight(n, heads * d, dtype=dtype) for k in "kv"}
    w |= {k: weight(n, width, dtype=dtype) for k in ("gate", "up")} | {"down": weight(width, n, dtype=dtype)}
    cache = normal(batch, length, heads, d, dtype=dtype)
    scales = [normal(n, dtype=dtype, scale=0.1)] * 2
    return Built(step, (normal(batch, n, dtype=dtype), cache, cache, integers(batch, below=length - 1), w, scales))


@program("z-loss-cross-entropy", "unseen")
def _z_loss(size: Size) -> Built:
    """Cross-entropy of tied logits with smoothed labels, ignored tokens and a z-loss, and its gradient in the states."""
    tokens, n, vocabulary = pick(size, (2048, 1024, 32128), (256, 128, 4000), (4, 8, 10))
    dtype = half(size)

    def loss(h: Any, table: Any, labels: Any) -> Any:
        logits = (h @ table.T).astype(jnp.float32)
        z = jax.nn.logsumexp(logits, -1)
        picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], 1)[:, 0]
        each = z - 0.9 * picked - 0.1 * logits.mean(-1) + 1e-4 * z**2
        valid = labels > 3
        return jnp.where(valid, each, 0).sum() / jnp.maximum(valid.sum(), 1)

    arguments = normal(tokens, n, dtype=dtype), normal(vocabulary, n, dtype=dtype, scale=n**-0.5)
    return Built(jax.value_and_grad(loss), (*arguments, integers(tokens, below=vocabulary)))


@program("convolution-next-block", "unseen")
def _convolution_next(size: Size) -> Built:
    """A depthwise convolution, a norm of channels, an MLP of each pixel with a response norm, and a residual."""
    batch, side, n = pick(size, (32, 56, 96), (2, 28, 96), (1, 4, 8))
    dtype = half(size)

    def block(x: Any, kernel: Any, scale: Any, up: Any, response: Any, down: Any) -> Any:
        h = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=n
        )
        h = jax.nn.gelu(_norm(h, scale) @ up)
        size_ = jnp.sqrt(jnp.sum(jnp.square(h.astype(jnp.float32)), axis=(1, 2), keepdims=True))
        h = response * (h * (size_ / (size_.mean(-1, keepdims=True) + 1e-6)).astype(dtype)) + h
        return x + h @ down

    w = weight(n, 4 * n, dtype=dtype), normal(4 * n, dtype=dtype, scale=0.1), weight(4 * n, n, dtype=dtype)
    return Built(
        block,
        (normal(batch, side, side, n, dtype=dtype), normal(7, 7, 1, n, dtype=dtype, scale=1 / 7), gain(n, dtype), *w),
    )


@program("set-distance", "unseen")
def _sets(size: Size) -> Built:
    """Two-sample distances by a mixture of kernels, and chamfer distances of two clouds."""
    rows, n = pick(size, (4096, 32), (1024, 16), (6, 3))

    def distances(x: Any, y: Any) -> Any:
        def squared(a: Any, b: Any) -> Any:
            return jnp.maximum((a**2).sum(-1)[:, None] + (b**2).sum(-1)[None] - 2 * a @ b.T, 0)

        def kernel(d: Any) -> Any:
            return sum(jnp.exp(-d / (2.0 * s * n)) for s in (0.5, 1.0, 2.0))

        between = squared(x, y)
        mmd = kernel(squared(x, x)).mean() + kernel(squared(y, y)).mean() - 2 * kernel(between).mean()
        return mmd, between.min(1).mean() + between.min(0).mean()

    return Built(distances, (normal(rows, n), normal(rows, n, offset=0.2)))


@program("recurrent-mixer", "unseen")
def _mixer(size: Size) -> Built:
    """A shift of tokens, gates, a squared ReLU and a norm of groups, as in recurrent language models."""
    batch, tokens, n, width = pick(size, (2, 1024, 2048, 7168), (1, 128, 256, 896), (1, 4, 8, 12))
    dtype = half(size)

    def mix(x: Any, scale: Any, mu: Any, key: Any, value: Any, receptance: Any) -> Any:
        h = _norm(x, scale)
        before = jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        k = (h * mu[0] + before * (1 - mu[0])) @ key
        r = (h * mu[1] + before * (1 - mu[1])) @ receptance
        return x + jax.nn.sigmoid(r) * (jnp.square(jax.nn.relu(k)) @ value)

    w = weight(n, width, dtype=dtype), weight(width, n, dtype=dtype), weight(n, n, dtype=dtype)
    return Built(mix, (normal(batch, tokens, n, dtype=dtype), gain(n, dtype), normal(2, n, dtype=dtype, scale=0.2), *w))


@program("guided-denoising-step", "unseen")
def _denoise(size: Size) -> Built:
    """A step of a sampler: guidance, limits of each image by a quantile of its size, and the next noise level."""
    batch, side = pick(size, (16, 256), (4, 64), (2, 4))

    def step(x: Any, with_text: Any, without: Any, noise: Any, level: Any) -> Any:
        e = without + 7.5 * (with_text - without)
        factor = with_text.std((1, 2, 3), keepdims=True) / e.std((1, 2, 3), keepdims=True)
        e = 0.7 * e * factor + 0.3 * e
        clean = (x - jnp.sqrt(1 - level) * e) / jnp.sqrt(level)
        limit = jnp.maximum(jnp.abs(clean).max((1, 2, 3), keepdims=True), 1.0)
        clean = jnp.clip(clean, -limit, limit) / limit
        return jnp.sqrt(level * 0.9) * clean + jnp.sqrt(1 - level * 0.9) * noise

    x = normal(batch, side, side, 3)
    return Built(step, (x, x, x, x, normal(batch, 1, 1, 1, scale=0.01, offset=0.5)))
