"""Inference of language, speech and picture models as people write it by hand, the thirteenth set: its author had seen no plan."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program, weight

GROUP = "thirteenth"


def rms_norm(x, scale, eps=1e-6):
    """This function divides by the root mean square of the last axis in float32."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * scale


def layer_norm(x, scale, bias, eps=1e-5):
    """This function norms the last axis in float32."""
    y = x.astype(jnp.float32)
    mean, var = jnp.mean(y, axis=-1, keepdims=True), jnp.var(y, axis=-1, keepdims=True)
    return ((y - mean) / jnp.sqrt(var + eps)).astype(x.dtype) * scale + bias


def rope(x, positions, theta=10000.0):
    """This function rotates the halves of [..., tokens, heads, features] by the positions [..., tokens]."""
    d = x.shape[-1]
    freqs = theta ** -(jnp.arange(0, d, 2, dtype=jnp.float32) / d)
    angles = positions[..., None].astype(jnp.float32) * freqs
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def stacked(layers, dtype, vectors=(), **matrices):
    """This function describes weights of several layers, stacked on the leading axis; vectors are scales of norms."""
    described = {name: weight(layers, *shape, dtype=dtype) for name, shape in matrices.items()}
    return described | {name: normal(layers, n, dtype=dtype, scale=0.1, offset=1.0) for name, n in vectors}


@program("llama-stack-indexed-in-python-batch-decode", GROUP)
def _indexed(size: Size) -> Built:
    """This gives one decoding step of a small Llama whose stacked layers are indexed in a Python loop."""
    layers, b, s, n, h, groups, d, wide, words = pick(
        size,
        (4, 12, 1500, 1536, 24, 8, 64, 4096, 32000),
        (3, 3, 200, 320, 10, 5, 32, 864, 4003),
        (2, 2, 7, 8, 4, 2, 4, 12, 11),
    )
    dtype = half(size)

    def attention(p, x, cache, lengths):
        rows = jnp.arange(b)
        q = rope((x @ p["wq"]).reshape(b, 1, h, d), lengths[:, None], 500000.0)[:, 0]
        k = rope((x @ p["wk"]).reshape(b, 1, groups, d), lengths[:, None], 500000.0)[:, 0]
        v = (x @ p["wv"]).reshape(b, groups, d)
        keys = cache["k"].at[rows, lengths].set(k)
        values = cache["v"].at[rows, lengths].set(v)
        every_k, every_v = jnp.repeat(keys, h // groups, axis=2), jnp.repeat(values, h // groups, axis=2)
        scores = jnp.einsum("bhd,bshd->bhs", q, every_k) / jnp.sqrt(d).astype(dtype)
        seen = jnp.arange(s)[None, None, :] <= lengths[:, None, None]
        scores = jnp.where(seen, scores.astype(jnp.float32), jnp.finfo(jnp.float32).min)
        probs = jax.nn.softmax(scores, axis=-1).astype(dtype)
        out = jnp.einsum("bhs,bshd->bhd", probs, every_v).reshape(b, h * d)
        return out @ p["wo"], {"k": keys, "v": values}

    def step(params, caches, tokens, lengths):
        x = params["embed"][tokens]
        new = []
        for i in range(layers):
            p = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
            cache = jax.tree.map(lambda leaf, i=i: leaf[i], caches)
            out, cache = attention(p, rms_norm(x, p["norm1"]), cache, lengths)
            x = x + out
            y = rms_norm(x, p["norm2"])
            x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
            new.append(cache)
        logits = (rms_norm(x, params["norm"]) @ params["head"]).astype(jnp.float32)
        return logits, jax.tree.map(lambda *leaves: jnp.stack(leaves), *new)

    shapes = {"wq": (n, h * d), "wk": (n, groups * d), "wv": (n, groups * d), "wo": (h * d, n)}
    shapes |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    params = {
        "layers": stacked(layers, dtype, (("norm1", n), ("norm2", n)), **shapes),
        "head": weight(n, words, dtype=dtype),
    }
    params |= {"embed": normal(words, n, dtype=dtype), "norm": normal(n, dtype=dtype, scale=0.1, offset=1.0)}
    caches = {name: normal(layers, b, s, groups, d, dtype=dtype) for name in ("k", "v")}
    return Built(step, (params, caches, integers(b, below=words), integers(b, below=s)))


@program("gpt2-fori-layers-padded-prompts-prefill", GROUP)
def _fori(size: Size) -> Built:
    """This gives the caches and last logits of a batch of padded prompts by a GPT-2 in a `fori_loop` over layers."""
    layers, b, t, s, n, h, words = pick(
        size, (6, 8, 200, 256, 768, 12, 50257), (3, 2, 45, 64, 256, 4, 6007), (2, 2, 5, 8, 8, 2, 11)
    )
    dtype, d = half(size), n // h

    def prefill(params, tokens, lengths):
        mask = jnp.tril(jnp.ones((t, t), bool)) & (jnp.arange(t) <= lengths[:, None, None, None])
        x = params["wte"][tokens] + params["wpe"][:t]
        empty = jnp.zeros((layers, b, s, h, d), dtype)

        def body(i, carry):
            x, keys, values = carry
            p = jax.tree.map(lambda leaf: leaf[i], params["blocks"])
            qkv = layer_norm(x, p["g1"], p["b1"]) @ p["c_attn"] + p["attn_bias"]
            q, k, v = (z.reshape(b, t, h, d) for z in jnp.split(qkv, 3, axis=-1))
            keys = lax.dynamic_update_slice(keys, k[None], (i, 0, 0, 0, 0))
            values = lax.dynamic_update_slice(values, v[None], (i, 0, 0, 0, 0))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * d**-0.5
            probs = jax.nn.softmax(jnp.where(mask, scores, -1e10), axis=-1).astype(dtype)
            out = jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(b, t, n)
            x = x + out @ p["c_proj"] + p["proj_bias"]
            y = layer_norm(x, p["g2"], p["b2"])
            x = x + jax.nn.gelu(y @ p["fc"] + p["fc_bias"], approximate=True) @ p["out"] + p["out_bias"]
            return x, keys, values

        x, keys, values = lax.fori_loop(0, layers, body, (x, empty, empty))
        last = jnp.take_along_axis(x, lengths[:, None, None], axis=1)[:, 0]
        return (layer_norm(last, params["g"], params["b"]) @ params["wte"].T).astype(jnp.float32), keys, values

    shapes = {"c_attn": (n, 3 * n), "c_proj": (n, n), "fc": (n, 4 * n), "out": (4 * n, n)}
    blocks = stacked(layers, dtype, (("g1", n), ("g2", n)), **shapes)
    biases = {"attn_bias": 3 * n, "proj_bias": n, "fc_bias": 4 * n, "out_bias": n, "b1": n, "b2": n}
    blocks |= {name: normal(layers, width, dtype=dtype, scale=0.02) for name, width in biases.items()}
    params = {
        "blocks": blocks,
        "wte": normal(words, n, dtype=dtype, scale=0.1),
        "wpe": normal(s, n, dtype=dtype, scale=0.02),
    }
    params |= {"g": normal(n, dtype=dtype, scale=0.1, offset=1.0), "b": normal(n, dtype=dtype, scale=0.02)}
    return Built(prefill, (params, integers(b, t, below=words), integers(b, below=t)))


@program("whisper-beams-reorder-caches-and-step", GROUP)
def _beams(size: Size) -> Built:
    """This gives one beam-search step of a speech recogniser's decoder, Whisper's, that reorders the caches first."""
    layers, b, beams, past, frames, n, h, words = pick(
        size, (4, 3, 5, 224, 1500, 384, 6, 51865), (2, 2, 5, 60, 300, 192, 3, 5189), (2, 2, 3, 6, 9, 8, 2, 13)
    )
    dtype, d = half(size), n // h

    def attend(q, k, v, seen=None):
        scores = jnp.einsum("brhd,brshd->brhs" if k.ndim == 5 else "brhd,bshd->brhs", q, k).astype(jnp.float32)
        scores = scores * d**-0.5 if seen is None else jnp.where(seen, scores * d**-0.5, -jnp.inf)
        probs = jax.nn.softmax(scores, axis=-1).astype(dtype)
        return jnp.einsum("brhs,brshd->brhd" if v.ndim == 5 else "brhs,bshd->brhd", probs, v).reshape(b, beams, n)

    def reorder(cache, parents):
        return jax.vmap(lambda c, order: jnp.take(c, order, axis=1), in_axes=(1, 0), out_axes=1)(cache, parents)

    def step(params, caches, sound, tokens, parents, scores, position):
        caches = jax.tree.map(lambda c: reorder(c, parents), caches)
        keys, values = caches["k"], caches["v"]
        x = params["words"][tokens] + lax.dynamic_index_in_dim(params["places"], position, keepdims=False)
        seen = jnp.arange(past) <= position
        for i in range(layers):
            p = {name: leaf[i] for name, leaf in params["layers"].items()}
            y = layer_norm(x, p["g1"], p["b1"])
            q, k, v = (z.reshape(b, beams, h, d) for z in (y @ p["q"] + p["q_bias"], y @ p["k"], y @ p["v"]))
            keys = lax.dynamic_update_slice(keys, k[None, :, :, None], (i, 0, 0, position, 0, 0))
            values = lax.dynamic_update_slice(values, v[None, :, :, None], (i, 0, 0, position, 0, 0))
            x = x + attend(q, keys[i], values[i], seen) @ p["o"]
            q = (layer_norm(x, p["g2"], p["b2"]) @ p["cross_q"]).reshape(b, beams, h, d)
            x = x + attend(q, sound["k"][i], sound["v"][i]) @ p["cross_o"]
            y = layer_norm(x, p["g3"], p["b3"])
            x = x + jax.nn.gelu(y @ p["fc1"] + p["fc_bias"], approximate=False) @ p["fc2"]
        logits = (layer_norm(x, params["g"], params["b"]) @ params["words"].T).astype(jnp.float32) + params["prior"]
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        best, flat = lax.top_k((scores[..., None] + log_probs).reshape(b, beams * words), beams)
        return best, flat % words, flat // words, {"k": keys, "v": values}

    shapes = {name: (n, n) for name in ("q", "k", "v", "o", "cross_q", "cross_o")} | {
        "fc1": (n, 4 * n),
        "fc2": (4 * n, n),
    }
    weights = stacked(layers, dtype, (("g1", n), ("g2", n), ("g3", n)), **shapes)
    biases = {"q_bias": n, "b1": n, "b2": n, "b3": n, "fc_bias": 4 * n}
    weights |= {name: normal(layers, width, dtype=dtype, scale=0.02) for name, width in biases.items()}
    params = {
        "layers": weights,
        "words": normal(words, n, dtype=dtype, scale=n**-0.5),
        "prior": normal(words, scale=5.0),
    }
    params |= {"places": normal(past, n, dtype=dtype, scale=0.02), "g": normal(n, dtype=dtype, scale=0.1, offset=1.0)}
    params["b"] = normal(n, dtype=dtype, scale=0.02)
    caches = {name: normal(layers, b, beams, past, h, d, dtype=dtype) for name in ("k", "v")}
    sound = {name: normal(layers, b, frames, h, d, dtype=dtype) for name in ("k", "v")}
    inputs = (
        integers(b, beams, below=words),
        integers(b, beams, below=beams),
        normal(b, beams, scale=4.0, offset=-20.0),
    )
    return Built(step, (params, caches, sound, *inputs, integers(below=past)))


@program("eagle-draft-words-int4-grouped-weights", GROUP)
def _eagle(size: Size) -> Built:
    """This gives the words that a draft head like EAGLE's proposes, and their probabilities, for speculative decoding."""
    drafts, s, n, h, d, wide, group, words = pick(
        size,
        (5, 1100, 2048, 16, 128, 5632, 64, 32000),
        (4, 120, 384, 6, 64, 1024, 64, 6007),
        (3, 8, 8, 2, 4, 16, 4, 11),
    )
    dtype = half(size)

    def unpack(p):
        low, high = (p["packed"] & 15).astype(jnp.int32) - 8, (p["packed"] >> 4).astype(jnp.int32) - 8
        values = jnp.stack([low, high], axis=1).reshape(-1, p["packed"].shape[-1])
        grouped = values.reshape(-1, group, values.shape[-1]).astype(dtype) * p["scale"][:, None].astype(dtype)
        return grouped.reshape(values.shape)

    def step(params, carry, noise):
        feature, token, keys, values, position = carry
        x = jnp.concatenate([params["embed"][token], feature])[None] @ unpack(params["merge"])
        y = rms_norm(x, params["norm1"])
        q, k, v = jnp.split(y @ unpack(params["qkv"]), 3, axis=-1)
        q, k = (rope(z.reshape(1, h, d), position[None]) for z in (q, k))
        keys = lax.dynamic_update_slice(keys, k, (position, 0, 0))
        values = lax.dynamic_update_slice(values, v.reshape(1, h, d), (position, 0, 0))
        scores = jnp.einsum("hd,shd->hs", q[0], keys, preferred_element_type=jnp.float32) * d**-0.5
        probs = jax.nn.softmax(jnp.where(jnp.arange(s) <= position, scores, -1e9), axis=-1).astype(dtype)
        x = x + jnp.einsum("hs,shd->hd", probs, values).reshape(1, h * d) @ unpack(params["out"])
        y = rms_norm(x, params["norm2"])
        x = x + (jax.nn.silu(y @ unpack(params["gate"])) * (y @ unpack(params["up"]))) @ unpack(params["down"])
        logits = (rms_norm(x, params["norm"]) @ params["head"])[0].astype(jnp.float32)
        log_probs = jax.nn.log_softmax(logits)
        token = jnp.argmax(log_probs + 3.0 * noise).astype(jnp.int32)
        return (x[0], token, keys, values, position + 1), (token, log_probs[token], jnp.exp(log_probs))

    def draft(params, feature, token, keys, values, position, noise):
        position = jnp.minimum(position, s - drafts)
        carry, proposed = lax.scan(lambda c, e: step(params, c, e), (feature, token, keys, values, position), noise)
        return proposed, carry[2], carry[3]

    def four_bits(i, o):
        packed = Random((i // 2, o), jnp.dtype(jnp.uint8), below=256)
        return {"packed": packed, "scale": normal(i // group, o, scale=0.02 * i**-0.5, offset=0.22 * i**-0.5)}

    params = {"merge": four_bits(2 * n, n), "qkv": four_bits(n, 3 * h * d), "out": four_bits(h * d, n)}
    params |= {"gate": four_bits(n, wide), "up": four_bits(n, wide), "down": four_bits(wide, n)}
    params |= {name: normal(n, dtype=dtype, scale=0.1, offset=1.0) for name in ("norm", "norm1", "norm2")}
    params |= {"embed": normal(words, n, dtype=dtype), "head": weight(n, words, dtype=dtype)}
    cache = (normal(s, h, d, dtype=dtype), normal(s, h, d, dtype=dtype))
    inputs = (normal(n, dtype=dtype), integers(below=words), *cache, integers(below=s), normal(drafts, words))
    return Built(draft, (params, *inputs))


@program("llava-patches-spliced-into-prompt-prefill", GROUP)
def _llava(size: Size) -> Built:
    """This gives the logits of prompts in which projected patches of a picture take the places of a marker word."""
    b, t, patches, seen, n, h, d, wide, words = pick(
        size, (3, 700, 576, 1024, 1024, 8, 128, 2752, 32064), (1, 150, 100, 256, 320, 5, 64, 864, 4003),
        (2, 9, 4, 6, 8, 2, 4, 12, 11),
    )  # fmt: skip
    dtype, marker = half(size), words - 1

    def layer(p, x, positions, mask):
        y = rms_norm(x, p["norm1"])
        q, k = (rope((y @ p[name]).reshape(b, t, h, d), positions) for name in ("q", "k"))
        v = (y @ p["v"]).reshape(b, t, h, d)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / d**0.5 + mask
        probs = jax.nn.softmax(scores, axis=-1).astype(dtype)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(b, t, h * d) @ p["o"]
        y = rms_norm(x, p["norm2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    def prefill(params, pictures, tokens, lengths):
        projected = jax.nn.gelu(pictures @ params["proj1"] + params["bias1"]) @ params["proj2"] + params["bias2"]
        real = jnp.arange(t)[None] <= lengths[:, None]
        tokens = jnp.where((jnp.arange(t) >= 1) & (jnp.arange(t) <= patches), marker, tokens)
        is_patch = (tokens == marker) & real
        which = jnp.clip(jnp.cumsum(is_patch, axis=1) - 1, 0, patches - 1)
        spliced = jnp.take_along_axis(projected, which[..., None], axis=1)
        x = jnp.where(is_patch[..., None], spliced, params["embed"][tokens])
        positions = jnp.clip(jnp.cumsum(real, axis=1) - 1, 0)
        mask = jnp.where(jnp.tril(jnp.ones((t, t), bool)) & real[:, None, :], 0.0, -1e30)[:, None]
        for p in params["layers"]:
            x = layer(p, x, positions, mask)
        return jax.nn.log_softmax(
            (rms_norm(x[jnp.arange(b), lengths], params["norm"]) @ params["head"]).astype(jnp.float32)
        )

    shapes = {"q": (n, h * d), "k": (n, h * d), "v": (n, h * d), "o": (h * d, n)}
    shapes |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    one = {name: weight(*shape, dtype=dtype) for name, shape in shapes.items()}
    one |= {name: normal(n, dtype=dtype, scale=0.1, offset=1.0) for name in ("norm1", "norm2")}
    params = {"layers": [one, one], "proj1": weight(seen, n, dtype=dtype), "proj2": weight(n, n, dtype=dtype)}
    params |= {name: normal(n, dtype=dtype, scale=0.02) for name in ("bias1", "bias2")}
    params |= {"embed": normal(words, n, dtype=dtype), "head": weight(n, words, dtype=dtype)}
    params["norm"] = normal(n, dtype=dtype, scale=0.1, offset=1.0)
    return Built(
        prefill, (params, normal(b, patches, seen, dtype=dtype), integers(b, t, below=words), integers(b, below=t))
    )


@program("granite-experts-in-python-loop-scaled-branches", GROUP)
def _granite(size: Size) -> Built:
    """This gives what the experts of a layer like Granite's add for few tokens, with one Python loop over all of them."""
    tokens, n, wide, shared, experts, top = pick(
        size, (24, 1536, 512, 1024, 40, 8), (9, 320, 160, 256, 12, 4), (3, 8, 6, 10, 5, 2)
    )
    dtype, branch = half(size), 0.22

    def expert(w_in, w_out, x):
        gate, up = jnp.split(x @ w_in, 2, axis=-1)
        return (jax.nn.silu(gate) * up) @ w_out

    def layer(p, x):
        y = rms_norm(x, p["norm"])
        logits = y.astype(jnp.float32) @ p["router"]
        best, index = lax.top_k(logits, top)
        shares = jax.nn.softmax(best, axis=-1)
        gates = jnp.sum(jax.nn.one_hot(index, experts) * shares[..., None], axis=1)
        out = jnp.zeros_like(y)
        for e in range(experts):
            out = out + gates[:, e : e + 1].astype(dtype) * expert(p["in"][e], p["out"][e], y)
        out = out + expert(p["shared_in"], p["shared_out"], y)
        x = x + branch * out
        return rms_norm(x, p["next_norm"]), x, jnp.mean(gates > 0, axis=0)

    params = {"in": weight(experts, n, 2 * wide, dtype=dtype), "out": weight(experts, wide, n, dtype=dtype)}
    params |= {"shared_in": weight(n, 2 * shared, dtype=dtype), "shared_out": weight(shared, n, dtype=dtype)}
    params |= {"router": normal(n, experts, scale=3 * n**-0.5)}
    params |= {name: normal(n, dtype=dtype, scale=0.1, offset=1.0) for name in ("norm", "next_norm")}
    return Built(layer, (params, normal(tokens, n, dtype=dtype)))
