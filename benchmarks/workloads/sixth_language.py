"""Layers and steps of recent language and audio models of the sixth set: its author had seen no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, gain, half, integers, normal, pick, program, weight

GROUP = "sixth"


def _rms(x, scale=None, eps=1e-5):
    y = x.astype(jnp.float32)
    y = (y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)).astype(x.dtype)
    return y if scale is None else y * scale


def _layer_norm(p, x, eps=1e-5):
    y = x.astype(jnp.float32)
    mean, var = jnp.mean(y, axis=-1, keepdims=True), jnp.var(y, axis=-1, keepdims=True)
    return ((y - mean) * lax.rsqrt(var + eps) * p["scale"] + p["bias"]).astype(x.dtype)


def _rotate_pairs(x, position, base):
    """Rotates neighbouring pairs: x [..., d], position of x without its last axis (or broadcast to it)."""
    d = x.shape[-1]
    angle = position[..., None] * base ** (-jnp.arange(0, d, 2) / d)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    even, odd = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def _rotate_halves(x, position, base):
    d = x.shape[-1]
    angle = position[..., None] * base ** (-jnp.arange(0, d, 2) / d)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@program("llama4-chunked-and-unrotated-prefill", GROUP)
def _llama4(size: Size) -> Built:
    """This is a prefill of two layers of Llama 4, as in Hugging Face's and MaxText's ports.

    The first attends within chunks and normalises rotated queries and keys; the second has no rotation but a temperature that
    grows with the position. Each has a shared expert and experts of which a token's best one takes its input times a sigmoid.
    """
    t, n, h, kv, d, wide, experts, chunk = pick(
        size, (2500, 2048, 16, 4, 128, 1024, 8, 1024), (160, 160, 5, 1, 32, 160, 4, 64), (9, 8, 4, 2, 4, 6, 3, 4)
    )
    dtype = half(size)

    def attend(p, x, position, mask, rotated):
        q, k, v = (x @ p[name] for name in ("q", "k", "v"))
        q, k, v = q.reshape(t, h, d), k.reshape(t, kv, d), v.reshape(t, kv, d)
        if rotated:
            q = _rms(_rotate_pairs(q, position[:, None], 500_000.0))
            k = _rms(_rotate_pairs(k, position[:, None], 500_000.0))
        else:
            warm = jnp.log(jnp.floor((position + 1.0) / 512.0) + 1.0) * 0.1 + 1.0
            q = (q * warm[:, None, None]).astype(dtype)
        k, v = jnp.repeat(k, h // kv, axis=1), jnp.repeat(v, h // kv, axis=1)
        scores = jnp.einsum("qhd,khd->hqk", q, k) * np.asarray(d**-0.5, dtype)
        scores = jnp.where(mask, scores, jnp.finfo(dtype).min)
        probs = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(dtype)
        return jnp.einsum("hqk,khd->qhd", probs, v).reshape(t, h * d) @ p["o"]

    def feed(p, x):
        logits = x @ p["router"]
        best, index = lax.top_k(logits, 1)
        scattered = jnp.full_like(logits, -jnp.inf).at[jnp.arange(t)[:, None], index].set(best)
        score = jax.nn.sigmoid(scattered.astype(jnp.float32)).astype(dtype)
        routed = score.T[:, :, None] * x[None]
        gate, up = jnp.split(jnp.einsum("etn,enf->etf", routed, p["gate_up"]), 2, axis=-1)
        routed = jnp.einsum("etf,efn->etn", jax.nn.silu(gate) * up, p["down"])
        shared = (jax.nn.silu(x @ p["shared_gate"]) * (x @ p["shared_up"])) @ p["shared_down"]
        return shared + jnp.sum(routed, axis=0), logits

    def prefill(layers, x, start):
        position = jnp.arange(t) + start
        causal = position[:, None] >= position[None, :]
        local = causal & (position[:, None] // chunk == position[None, :] // chunk)
        logits = []
        for p, rotated in zip(layers, (True, False), strict=True):
            y = _rms(x, p["attention_norm"])
            x = x + attend(p, y, position, local if rotated else causal, rotated)
            y, router = feed(p, _rms(x, p["ffn_norm"]))
            x = x + y
            logits.append(router)
        return x, jnp.stack(logits)

    layer = {
        "attention_norm": gain(n, dtype),
        "ffn_norm": gain(n, dtype),
        "q": weight(n, h * d, dtype=dtype),
        "k": weight(n, kv * d, dtype=dtype),
        "v": weight(n, kv * d, dtype=dtype),
        "o": weight(h * d, n, dtype=dtype),
        "router": weight(n, experts, dtype=dtype),
        "gate_up": weight(experts, n, 2 * wide, dtype=dtype),
        "down": weight(experts, wide, n, dtype=dtype),
        "shared_gate": weight(n, 2 * wide, dtype=dtype),
        "shared_up": weight(n, 2 * wide, dtype=dtype),
        "shared_down": weight(2 * wide, n, dtype=dtype),
    }
    return Built(prefill, ([layer, layer], normal(t, n, dtype=dtype), integers(below=100)))


@program("deepseek-indexed-sparse-latent-decode", GROUP)
def _sparse_latent(size: Size) -> Built:
    """This is a decoding step of DeepSeek V3.2's sparse attention, as in its reference code of inference.

    A small indexer scores every cached token, the best are gathered from the cache of latents, and the queries attend to those
    in the latent space.
    """
    b, t, n, h, nope, turned, latent, low, ih, wide, best = pick(
        size,
        (16, 8192, 4096, 32, 128, 64, 512, 1536, 16, 128, 2048),
        (8, 2000, 512, 8, 64, 16, 128, 192, 8, 64, 500),
        (2, 9, 8, 2, 4, 2, 6, 6, 2, 4, 3),
    )
    dtype, base = half(size), 10_000.0

    def split_rotate(x, position):
        rotated = _rotate_pairs(x[..., :turned], position, base)
        return jnp.concatenate([rotated, x[..., turned:]], axis=-1)

    def choose(p, y, low_q, keys, length):
        q = split_rotate((low_q @ p["index_q"]).reshape(b, ih, wide), length[:, None])
        weights = (y @ p["index_w"]).astype(jnp.float32) * (ih**-0.5 * wide**-0.5)
        scores = jax.nn.relu(jnp.einsum("bhd,btd->bht", q, keys, preferred_element_type=jnp.float32))
        scores = jnp.einsum("bht,bh->bt", scores, weights)
        scores = jnp.where(jnp.arange(t)[None, :] <= length[:, None], scores, -jnp.inf)
        return lax.top_k(scores, best)

    def step(p, x, latents, rotated, keys, length):
        row = jnp.arange(b)
        y = _rms(x, p["norm"])
        low_q = _rms(y @ p["q_down"], p["q_norm"])
        q = (low_q @ p["q_up"]).reshape(b, h, nope + turned)
        q_nope, q_turned = q[..., :nope], _rotate_pairs(q[..., nope:], length[:, None], base)
        down = y @ p["kv_down"]
        latents = latents.at[row, length].set(_rms(down[:, :latent], p["kv_norm"]))
        rotated = rotated.at[row, length].set(_rotate_pairs(down[:, latent:], length, base))
        key = split_rotate(_layer_norm(p["index_norm"], y @ p["index_k"]), length)
        keys = keys.at[row, length].set(key)
        score, chosen = choose(p, y, low_q, keys, length)
        near = jnp.take_along_axis(latents, chosen[:, :, None], axis=1)
        near_turned = jnp.take_along_axis(rotated, chosen[:, :, None], axis=1)
        absorbed = jnp.einsum("bhd,hdc->bhc", q_nope, p["k_up"])
        logits = jnp.einsum("bhc,bkc->bhk", absorbed, near, preferred_element_type=jnp.float32)
        logits += jnp.einsum("bhr,bkr->bhk", q_turned, near_turned, preferred_element_type=jnp.float32)
        logits = logits * (nope + turned) ** -0.5
        logits = jnp.where(jnp.isfinite(score)[:, None, :], logits, -jnp.inf)
        probs = jax.nn.softmax(logits, axis=-1).astype(dtype)
        mixed = jnp.einsum("bhk,bkc->bhc", probs, near)
        value = jnp.einsum("bhc,hcd->bhd", mixed, p["v_up"]).reshape(b, h * nope)
        return x + value @ p["out"], latents, rotated, keys, chosen

    params = {
        "norm": gain(n, dtype),
        "q_down": weight(n, low, dtype=dtype),
        "q_norm": gain(low, dtype),
        "q_up": weight(low, h * (nope + turned), dtype=dtype),
        "kv_down": weight(n, latent + turned, dtype=dtype),
        "kv_norm": gain(latent, dtype),
        "k_up": normal(h, nope, latent, dtype=dtype, scale=nope**-0.5),
        "v_up": weight(h, latent, nope, dtype=dtype),
        "out": weight(h * nope, n, dtype=dtype),
        "index_q": weight(low, ih * wide, dtype=dtype),
        "index_k": weight(n, wide, dtype=dtype),
        "index_w": weight(n, ih, dtype=dtype),
        "index_norm": {"scale": gain(wide), "bias": normal(wide, scale=0.05)},
    }
    caches = (normal(b, t, latent, dtype=dtype), normal(b, t, turned, dtype=dtype), normal(b, t, wide, dtype=dtype))
    return Built(step, (params, normal(b, n, dtype=dtype), *caches, integers(b, below=t)))


@program("falcon-h1-parallel-hybrid-decode", GROUP)
def _falcon_h1(size: Size) -> Built:
    """This is a decoding step of a layer of Falcon-H1, as in its ports to servers.

    Grouped attention with a cache and a Mamba 2 mixer with its convolution's and its state's cache read the same normed input;
    their sum and a gated network follow, each with its multiplier.
    """
    b, t, n, h, kv, d, heads, hd, states, wide = pick(
        size,
        (32, 4000, 1280, 6, 2, 128, 24, 64, 256, 3840),
        (8, 1500, 384, 6, 2, 48, 6, 40, 64, 700),
        (2, 7, 8, 2, 1, 4, 2, 4, 5, 12),
    )
    dtype, inner = half(size), heads * hd
    convolved = inner + 2 * states

    def attend(p, x, cache_k, cache_v, length):
        q, k, v = jnp.split(x @ p["qkv"], (h * d, (h + kv) * d), axis=-1)
        q, k, v = q.reshape(b, h, d), k.reshape(b, kv, d) * np.asarray(0.39, dtype), v.reshape(b, kv, d)
        q, k = _rotate_halves(q, length[:, None], 1e11), _rotate_halves(k, length[:, None], 1e11)
        row = jnp.arange(b)
        cache_k, cache_v = cache_k.at[row, length].set(k), cache_v.at[row, length].set(v)
        q = q.reshape(b, kv, h // kv, d)
        scores = jnp.einsum("bkgd,btkd->bkgt", q, cache_k).astype(jnp.float32) * d**-0.5
        seen = jnp.arange(t)[None, :] <= length[:, None]
        probs = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1).astype(dtype)
        y = jnp.einsum("bkgt,btkd->bkgd", probs, cache_v).reshape(b, h * d)
        return y @ p["o"], cache_k, cache_v

    def mix(p, x, window, state):
        z, xbc, dt = jnp.split(x @ p["ssm_in"] * p["mup"], (inner, inner + convolved), axis=-1)
        window = jnp.concatenate([window[:, 1:], xbc[:, None]], axis=1)
        xbc = jax.nn.silu(jnp.sum(window * p["kernel"], axis=1) + p["kernel_bias"]).astype(jnp.float32)
        u, into, out = jnp.split(xbc, (inner, inner + states), axis=-1)
        u = u.reshape(b, heads, hd)
        dt = jax.nn.softplus(dt.astype(jnp.float32) + p["dt_bias"])
        decay = jnp.exp(-dt * jnp.exp(p["log_a"]))
        state = decay[..., None, None] * state + (dt[..., None] * u)[..., None] * into[:, None, None, :]
        y = jnp.einsum("bhps,bs->bhp", state, out) + p["skip"][:, None] * u
        y = y.reshape(b, inner).astype(dtype) * jax.nn.silu(z)
        return y @ p["ssm_out"], window, state

    def step(p, x, cache_k, cache_v, window, state, length):
        y = _rms(x, p["norm"])
        mixed, window, state = mix(p, y, window, state)
        attended, cache_k, cache_v = attend(p, y, cache_k, cache_v, length)
        x = x + mixed * np.asarray(0.24, dtype) + attended * np.asarray(0.94, dtype)
        y = _rms(x, p["ffn_norm"])
        y = jax.nn.silu(y @ p["gate"] * np.asarray(0.88, dtype)) * (y @ p["up"])
        return x + y @ p["down"] * np.asarray(0.3, dtype), cache_k, cache_v, window, state, length + 1

    params = {
        "norm": gain(n, dtype),
        "ffn_norm": gain(n, dtype),
        "qkv": weight(n, (h + 2 * kv) * d, dtype=dtype),
        "o": weight(h * d, n, dtype=dtype),
        "ssm_in": weight(n, inner + convolved + heads, dtype=dtype),
        "mup": gain(inner + convolved + heads, dtype),
        "kernel": normal(4, convolved, dtype=dtype, scale=0.5),
        "kernel_bias": normal(convolved, dtype=dtype, scale=0.05),
        "dt_bias": normal(heads, offset=-3.0),
        "log_a": normal(heads, scale=0.5, offset=1.0),
        "skip": gain(heads),
        "ssm_out": weight(inner, n, dtype=dtype),
        "gate": weight(n, wide, dtype=dtype),
        "up": weight(n, wide, dtype=dtype),
        "down": weight(wide, n, dtype=dtype),
    }
    cache = normal(b, t, kv, d, dtype=dtype)
    memory = (normal(b, 4, convolved, dtype=dtype), normal(b, heads, hd, states, scale=0.3))
    return Built(step, (params, normal(b, n, dtype=dtype), cache, cache, *memory, integers(b, below=t)))


@program("musicgen-codebooks-guided-step", GROUP)
def _musicgen(size: Size) -> Built:
    """This is a step of MusicGen's decoder, as in AudioCraft and its ports.

    Tokens of four codebooks are embedded and summed, once with the text and once without; layers attend to a cache and to the
    text; both results are combined, and a token of each codebook is drawn of the likeliest, one codebook later than the last.
    """
    songs, t, words, n, h, layers, codes, best = pick(
        size, (8, 1503, 61, 1536, 24, 2, 2048, 250), (4, 501, 19, 240, 6, 2, 700, 50), (2, 7, 3, 8, 2, 2, 11, 4)
    )
    dtype, d, books, b = half(size), n // h, 4, 2 * songs

    def attend(q, k, v, mask):
        scores = jnp.einsum("bhd,bhtd->bht", q * np.asarray(d**-0.5, dtype), k).astype(jnp.float32)
        probs = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min), axis=-1).astype(dtype)
        return jnp.einsum("bht,bhtd->bhd", probs, v).reshape(b, n)

    def embed(p, tokens, place):
        x = sum(p["tables"][i][tokens[:, i]] for i in range(books))
        angle = place * jnp.exp(-jnp.log(10_000.0) * jnp.arange(n // 2) / (n // 2 - 1))
        return x + jnp.concatenate([jnp.cos(angle), jnp.sin(angle)]).astype(dtype)

    def draw(p, x, key):
        logits = jnp.einsum("bn,knv->bkv", x, p["heads"]).astype(jnp.float32)
        with_text, without = jnp.split(logits, 2, axis=0)
        logits = without + 3.0 * (with_text - without)
        least = lax.top_k(logits, best)[0][..., -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
        return jax.random.categorical(key, logits, axis=-1)

    def step(p, tokens, caches, text, words_seen, place, seed):
        x = embed(p, jnp.concatenate([tokens, tokens], axis=0), place)
        past = (jnp.arange(t) <= place)[None, None, :]
        known = jnp.arange(words)[None, :] < jnp.maximum(words_seen, 1)[:, None]
        known = jnp.concatenate([known, known.at[:, 1:].set(False)], axis=0)[:, None, :]
        written = []
        for layer, (old_k, old_v), (text_k, text_v) in zip(p["layers"], caches, text, strict=True):
            y = _layer_norm(layer["norm1"], x)
            q, new_k, new_v = jnp.moveaxis((y @ layer["qkv"]).reshape(b, 3, h, 1, d), 1, 0)
            k = lax.dynamic_update_slice(old_k, new_k, (0, 0, place, 0))
            v = lax.dynamic_update_slice(old_v, new_v, (0, 0, place, 0))
            x = x + attend(q[:, :, 0], k, v, past) @ layer["o"]
            q = (_layer_norm(layer["norm2"], x) @ layer["text_q"]).reshape(b, h, d)
            x = x + attend(q, text_k, text_v, known) @ layer["text_o"]
            y = jax.nn.gelu(_layer_norm(layer["norm3"], x) @ layer["up"], approximate=False)
            x = x + y @ layer["down"]
            written.append((k, v))
        drawn = draw(p, _layer_norm(p["norm"], x), jax.random.key(seed))
        waiting = place + 1 <= jnp.arange(books)
        return jnp.where(waiting[None, :], codes, drawn), written, place + 1

    norm = {"scale": gain(n), "bias": normal(n, scale=0.05)}
    square = weight(n, n, dtype=dtype)
    layer = {
        **{f"norm{i}": norm for i in (1, 2, 3)},
        "qkv": weight(n, 3 * n, dtype=dtype),
        **{name: square for name in ("o", "text_q", "text_o")},
        "up": weight(n, 4 * n, dtype=dtype),
        "down": weight(4 * n, n, dtype=dtype),
    }
    params = {
        "tables": normal(books, codes + 1, n, dtype=dtype, scale=0.3),
        "layers": [layer] * layers,
        "norm": norm,
        "heads": weight(books, n, codes, dtype=dtype),
    }
    cache, text = normal(b, h, t, d, dtype=dtype), normal(b, h, words, d, dtype=dtype)
    state = ([(cache, cache)] * layers, [(text, text)] * layers, integers(songs, below=words + 1))
    arguments = (params, integers(songs, books, below=codes), *state, integers(below=t), integers(below=1000))
    return Built(step, arguments)
