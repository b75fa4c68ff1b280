"""Decoding, prefilling, searching and mixing of experts in language models, the twentieth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, gain, half, integers, normal, pick, program, weight

GROUP = "twentieth"


def _norm(x, scale):
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def _turn(x, places, base=10000.0):
    """Rotates the two halves of the last axis; x: [..., time, heads, width]."""
    d = x.shape[-1] // 2
    angle = places[..., None].astype(jnp.float32) * base ** (-jnp.arange(d) / d)
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@program("one-global-cache-read-by-all-upper-layers-decode", GROUP)
def _yoco(size: Size) -> Built:
    """This gives one step of a model whose upper layers all read one cache, as YOCO (Sun et al., 2024).

    The lower layers keep a short window in ring caches; the last of them writes the keys and values that the upper
    layers share.
    """
    b, past, window, n, h, kv, d, m, words = pick(
        size, (4, 6001, 512, 1536, 12, 4, 128, 4096, 32003), (4, 1501, 192, 512, 8, 2, 64, 1376, 8003),
        (2, 11, 4, 16, 4, 2, 4, 24, 13),
    )  # fmt: skip
    dtype = half(size)

    def attend(q, keys, values, seen):
        q = q.reshape(b, kv, h // kv, d)
        scores = jnp.einsum("bgrd,bkgd->bgrk", q, keys, preferred_element_type=jnp.float32) * d**-0.5
        probs = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1).astype(dtype)
        return jnp.einsum("bgrk,bkgd->bgrd", probs, values).reshape(b, h * d)

    def feed(p, x):
        y = _norm(x, p["norm2"])
        gate, up = jnp.split(y @ p["up"], 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ p["down"]

    def step(p, rings, shared, token, lengths):
        rows = jnp.arange(b)
        x = p["table"][token]
        at = (past // 2 + lengths)[:, None]
        slot, fresh = at[:, 0] % window, []
        age = (slot[:, None] - jnp.arange(window)) % window
        for layer, ring in zip(p["lower"], rings, strict=True):
            y = _norm(x, layer["norm"])
            q, k, v = jnp.split(y @ layer["qkv"], [h * d, (h + kv) * d], axis=-1)
            q = _turn(q.reshape(b, 1, h, d), at)
            k = _turn(k.reshape(b, 1, kv, d), at)
            keys = ring[0].at[rows, slot].set(k[:, 0])
            values = ring[1].at[rows, slot].set(v.reshape(b, kv, d))
            x = feed(layer, x + attend(q, keys, values, age <= at) @ layer["out"])
            fresh.append((keys, values))
        y = _norm(x, p["shared_norm"])
        k, v = (z.reshape(b, kv, d) for z in jnp.split(y @ p["shared"], 2, axis=-1))
        keys = shared[0].at[rows, at[:, 0]].set(_turn(k[:, None], at)[:, 0])
        values = shared[1].at[rows, at[:, 0]].set(v)
        seen = jnp.arange(past) <= at
        for layer in p["upper"]:
            q = _turn((_norm(x, layer["norm"]) @ layer["q"]).reshape(b, 1, h, d), at)
            x = feed(layer, x + attend(q, keys, values, seen) @ layer["out"])
        logits = (_norm(x, p["last"]) @ p["table"].T).astype(jnp.float32)
        return jnp.argmax(logits, axis=-1), jax.nn.logsumexp(logits, axis=-1), fresh, (keys, values)

    def layer(names):
        p = {"norm": gain(n, dtype), "norm2": gain(n, dtype), "out": weight(h * d, n, dtype=dtype)}
        return p | {"up": weight(n, 2 * m, dtype=dtype), "down": weight(m, n, dtype=dtype)} | names

    lower = [layer({"qkv": weight(n, (h + 2 * kv) * d, dtype=dtype)}) for _ in range(2)]
    upper = [layer({"q": weight(n, h * d, dtype=dtype)}) for _ in range(2)]
    p = {"table": normal(words, n, dtype=dtype, scale=n**-0.5), "lower": lower, "upper": upper, "last": gain(n, dtype)}
    p |= {"shared": weight(n, 2 * kv * d, dtype=dtype), "shared_norm": gain(n, dtype)}
    ring = [(normal(b, window, kv, d, dtype=dtype), normal(b, window, kv, d, dtype=dtype)) for _ in range(2)]
    shared = (normal(b, past, kv, d, dtype=dtype), normal(b, past, kv, d, dtype=dtype))
    return Built(step, (p, ring, shared, integers(b, below=words), integers(b, below=past // 2)))


@program("thinking-in-depth-one-core-looped-until-states-settle-decode", GROUP)
def _huginn(size: Size) -> Built:
    """This gives one token by looping the same two layers until the state settles, as Huginn (Geiping et al., 2025).

    The loop ends early when the words predicted after two rounds hardly differ, or after eight rounds.
    """
    past, n, h, d, m, words = pick(
        size, (1537, 1280, 10, 128, 3456, 16001), (385, 256, 4, 64, 688, 3001), (9, 16, 2, 8, 20, 11)
    )
    dtype = half(size)

    def block(p, x, keys, values, at):
        y = _norm(x, p["norm"])
        q, k, v = (z.reshape(1, h, d) for z in jnp.split(y @ p["qkv"], 3, axis=-1))
        q, k = _turn(q, at[None], 50000.0), _turn(k, at[None], 50000.0)
        keys = lax.dynamic_update_slice(keys, k, (at, 0, 0))
        values = lax.dynamic_update_slice(values, v, (at, 0, 0))
        scores = jnp.einsum("qhd,khd->hqk", q, keys).astype(jnp.float32) * d**-0.5
        probs = jax.nn.softmax(jnp.where(jnp.arange(past) <= at, scores, -1e30), axis=-1)
        y = jnp.einsum("hqk,khd->qhd", probs.astype(dtype), values).reshape(1, n)
        x = _norm(x + y @ p["out"], p["norm2"])
        gate, up = jnp.split(_norm(x, p["norm3"]) @ p["up"], 2, axis=-1)
        return _norm(x + (jax.nn.silu(gate) * up) @ p["down"], p["norm4"]), keys, values

    def step(p, caches, token, noise, where):
        at = past // 2 + where
        keys, values = caches
        e = p["table"][token] * np.sqrt(n).astype(dtype)
        e, k0, v0 = block(p["layers"][0], e, keys[0], values[0], at)

        def words_of(s):
            s, k, v = block(p["layers"][3], s, keys[3], values[3], at)
            return jax.nn.log_softmax((_norm(s, p["last"]) @ p["table"].T).astype(jnp.float32)), k, v

        def unsettled(state):
            count, _, _, _, _, apart = state
            return (count < 8) & (apart > 5e-4)

        def think(state):
            count, s, old, keys, values, _ = state
            s = jnp.concatenate([s, e], axis=-1) @ p["adapter"]
            s, k1, v1 = block(p["layers"][1], s, keys[0], values[0], at)
            s, k2, v2 = block(p["layers"][2], s, keys[1], values[1], at)
            new = words_of(s)[0]
            apart = jnp.sum(jnp.exp(new) * (new - old))
            return count + 1, s, new, jnp.stack([k1, k2]), jnp.stack([v1, v2]), apart

        flat = jnp.full((1, words), -np.log(words), jnp.float32)
        first = (jnp.int32(0), noise, flat, keys[1:3], values[1:3], jnp.float32(1))
        count, s, logp, k, v, apart = lax.while_loop(unsettled, think, first)
        _, k3, v3 = words_of(s)
        keys = jnp.concatenate([k0[None], k, k3[None]])
        values = jnp.concatenate([v0[None], v, v3[None]])
        return jnp.argmax(logp), count, apart, logp, (keys, values)

    def layer():
        p = {"qkv": weight(n, 3 * n, dtype=dtype), "out": weight(n, n, dtype=dtype)}
        p |= {"up": weight(n, 2 * m, dtype=dtype), "down": weight(m, n, dtype=dtype)}
        return p | {name: gain(n, dtype) for name in ("norm", "norm2", "norm3", "norm4")}

    p = {"table": normal(words, n, dtype=dtype, scale=n**-0.5), "layers": [layer() for _ in range(4)]}
    p |= {"adapter": weight(2 * n, n, dtype=dtype), "last": gain(n, dtype)}
    caches = (normal(4, past, h, d, dtype=dtype), normal(4, past, h, d, dtype=dtype))
    inputs = (integers(1, below=words), normal(1, n, dtype=dtype, scale=0.6), integers(below=past // 2))
    return Built(step, (p, caches, *inputs))


@program("hadamard-turned-int4-states-weights-and-cache-decode", GROUP)
def _quarot(size: Size) -> Built:
    """This gives a layer of a decoder in four-bit integers after Hadamard rotations, as QuaRot (Ashkboos et al., 2024).

    States are quantised by rows with a fast Hadamard transform before the last product; keys and values are kept in
    four bits by groups with a scale and a zero.
    """
    b, past, n, h, kv, d, m = pick(
        size, (16, 1031, 2048, 16, 4, 128, 4096), (8, 1025, 512, 8, 4, 64, 2048), (2, 7, 16, 2, 1, 8, 32)
    )
    dtype = half(size)

    def hadamard(x):
        count = x.shape[-1]
        y, step = x.astype(jnp.float32), 1
        while step < count:
            y = y.reshape(*x.shape[:-1], count // (2 * step), 2, step)
            y = jnp.stack([y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]], axis=-2).reshape(x.shape)
            step *= 2
        return (y / np.sqrt(count)).astype(x.dtype)

    def unpack(packed):
        low, high = (packed << 4).astype(jnp.int8) >> 4, packed.astype(jnp.int8) >> 4
        return jnp.stack([low, high], axis=1).reshape(-1, packed.shape[-1])

    def product(x, w):
        scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True).astype(jnp.float32) * 0.9 / 7 + 1e-8
        q = jnp.clip(jnp.round(x.astype(jnp.float32) / scale), -8, 7).astype(jnp.int8)
        y = lax.dot_general(q, unpack(w["bits"]), (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
        return (y.astype(jnp.float32) * scale * jnp.exp(0.1 * w["scale"]) * 0.02).astype(dtype)

    def squeeze(x):
        x = x.astype(jnp.float32)
        low, high = jnp.min(x, axis=-1, keepdims=True), jnp.max(x, axis=-1, keepdims=True)
        scale = (high - low) / 15 + 1e-6
        bits = jnp.clip(jnp.round((x - low) / scale), 0, 15).astype(jnp.uint8)
        return bits[..., ::2] | (bits[..., 1::2] << 4), jnp.concatenate([scale, low], axis=-1).astype(dtype)

    def expand(bits, affine):
        x = jnp.stack([bits & 15, bits >> 4], axis=-1).reshape(*bits.shape[:-1], d).astype(dtype)
        return x * affine[..., :1] + affine[..., 1:]

    def step(p, cache, x, lengths):
        at = past // 2 + lengths
        y = _norm(x, p["norm"])
        q, k, v = jnp.split(product(y, p["qkv"]), [h * d, (h + kv) * d], axis=-1)
        q = hadamard(_turn(q.reshape(b, 1, h, d), at[:, None]))[:, 0]
        k = hadamard(_turn(k.reshape(b, 1, kv, d), at[:, None]))[:, 0]
        rows = jnp.arange(b)
        new = [*squeeze(k), *squeeze(v.reshape(b, kv, d))]
        cache = [old.at[rows, at].set(part) for old, part in zip(cache, new, strict=True)]
        keys, values = expand(*cache[:2]), expand(*cache[2:])
        scores = jnp.einsum("bgrd,bkgd->bgrk", q.reshape(b, kv, h // kv, d), keys).astype(jnp.float32) * d**-0.5
        seen = (jnp.arange(past) <= at[:, None])[:, None, None]
        probs = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1).astype(dtype)
        y = hadamard(jnp.einsum("bgrk,bkgd->bgrd", probs, values).reshape(b, h * d))
        x = x + product(y, p["out"])
        gate, up = jnp.split(product(_norm(x, p["norm2"]), p["up"]), 2, axis=-1)
        return x + product(hadamard(jax.nn.silu(gate) * up), p["down"]), cache

    def packed(i, o):
        return {"bits": Random((i // 2, o), jnp.dtype(jnp.uint8), below=256), "scale": normal(o)}

    p = {"qkv": packed(n, (h + 2 * kv) * d), "out": packed(h * d, n), "up": packed(n, 2 * m), "down": packed(m, n)}
    p |= {"norm": gain(n, dtype), "norm2": gain(n, dtype)}
    half_cache = [Random((b, past, kv, d // 2), jnp.dtype(jnp.uint8), below=256)]
    half_cache += [normal(b, past, kv, 2, dtype=dtype, scale=0.1)]
    return Built(step, (p, half_cache * 2, normal(b, n, dtype=dtype), integers(b, below=past // 2)))


@program("experts-that-do-nothing-and-a-shortcut-past-attention-prefill", GROUP)
def _longcat(size: Size) -> Built:
    """This gives a layer whose router may choose experts that return the token itself, as LongCat-Flash (2025).

    The experts' output joins only after the second attention and dense block (a shortcut), and a bias steers the load.
    """
    b, t, n, h, d, m, dense, experts, idle, top = pick(
        size, (1, 1021, 1024, 8, 128, 512, 2816, 24, 8, 4), (1, 192, 192, 4, 48, 96, 512, 6, 3, 3),
        (2, 5, 8, 2, 4, 4, 12, 3, 2, 2),
    )  # fmt: skip
    dtype = half(size)

    def attention(p, x, mask):
        q, k, v = jnp.moveaxis((_norm(x, p["norm"]) @ p["qkv"]).reshape(b, t, 3, h, d), 2, 0)
        places = jnp.broadcast_to(jnp.arange(t), (b, t))
        return (
            x
            + jax.nn.dot_product_attention(_turn(q, places), _turn(k, places), v, mask=mask).reshape(b, t, h * d)
            @ p["out"]
        )

    def swiglu(p, y):
        gate, up = jnp.split(y @ p["up"], 2, axis=-1)
        return (jax.nn.silu(gate) * up) @ p["down"]

    def mixture(p, y, load_bias):
        flat = y.reshape(b * t, n)
        chance = jax.nn.softmax(flat.astype(jnp.float32) @ p["router"], axis=-1)
        _, chosen = lax.top_k(chance + 0.01 * load_bias, top)
        share = jnp.take_along_axis(chance, chosen, axis=-1) * 6.0
        owner = chosen.reshape(-1)
        order = jnp.argsort(owner, stable=True)
        token = order // top
        counts = jnp.bincount(owner, length=experts + idle)
        sorted_rows = flat[token]
        gate, up = jnp.split(lax.ragged_dot(sorted_rows, p["up"], counts[:experts]), 2, axis=-1)
        made = lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], counts[:experts])
        worked = (owner[order] < experts)[:, None]
        made = jnp.where(worked, made, sorted_rows).astype(jnp.float32) * share.reshape(-1)[order][:, None]
        out = jnp.zeros((b * t, n)).at[token].add(made).astype(dtype)
        wanted = top * b * t * 0.75 / experts
        fresh = load_bias.at[:experts].add(0.1 * jnp.sign(wanted - counts[:experts]))
        return out.reshape(b, t, n), counts, fresh, jnp.mean(jnp.sum(chosen < experts, axis=-1))

    def layer(p, x, lengths, load_bias):
        ok = jnp.arange(t) < (t // 2 + lengths)[:, None]
        mask = jnp.tril(jnp.ones((t, t), bool)) & ok[:, None, None]
        x = attention(p["first"], x, mask)
        y = _norm(x, p["norm"])
        shortcut, counts, fresh, active = mixture(p, y, load_bias)
        x = x + swiglu(p["dense"], y)
        x = attention(p["second"], x, mask)
        x = x + swiglu(p["dense2"], _norm(x, p["norm2"])) + shortcut
        return jnp.where(ok[..., None], x, 0), counts, fresh, active

    def attend():
        return {
            "qkv": weight(n, 3 * h * d, dtype=dtype),
            "out": weight(h * d, n, dtype=dtype),
            "norm": gain(n, dtype),
        }

    def feed():
        return {"up": weight(n, 2 * dense, dtype=dtype), "down": weight(dense, n, dtype=dtype)}

    p = {"first": attend(), "second": attend(), "dense": feed(), "dense2": feed()}
    p |= {"norm": gain(n, dtype), "norm2": gain(n, dtype), "router": weight(n, experts + idle)}
    p |= {"up": weight(experts, n, 2 * m, dtype=dtype), "down": weight(experts, m, n, dtype=dtype)}
    return Built(layer, (p, normal(b, t, n, dtype=dtype), integers(b, below=t // 2), normal(experts + idle, scale=0.1)))


@program("pages-by-signs-of-patches-then-late-interaction-rerank", GROUP)
def _colpali(size: Size) -> Built:
    """This gives the best pages for a query: a pass over bits, then late interaction of patches, as ColPali (2024).

    Signs of mean-pooled patches are compared by counting bits; the near pages are scored again with all patches.
    """
    pages, patches, words, near, n, d, queries = pick(
        size, (8209, 97, 23, 64, 768, 128, 8), (4099, 61, 19, 96, 384, 64, 8), (13, 5, 4, 3, 8, 32, 2)
    )
    dtype = half(size)

    def unit(x):
        x = x.astype(jnp.float32)
        return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-12)

    def bits_of(x):
        lanes = (x > 0).reshape(*x.shape[:-1], -1, 32).astype(jnp.uint32)
        return jnp.sum(lanes << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)

    def search(project, states, lengths, index, codes, scales, counts):
        q = unit(states @ project)
        alive = jnp.arange(words) < (words // 2 + lengths)[:, None]
        signs = bits_of(q)

        def one(q, signs, alive):
            apart = jnp.sum(lax.population_count(signs[:, None] ^ index[None]), axis=-1).astype(jnp.int32)
            rough = jnp.sum(jnp.where(alive[:, None], d - apart, 0), axis=0)
            _, found = lax.top_k(rough, near)
            rows = codes[found].astype(dtype) * scales[found][..., None]
            real = jnp.arange(patches) < (patches // 2 + counts[found])[:, None]
            pairs = jnp.einsum("wd,npd->nwp", q.astype(dtype), rows).astype(jnp.float32)
            best = jnp.max(jnp.where(real[:, None], pairs, -jnp.inf), axis=-1)
            score = jnp.sum(jnp.where(alive, best, 0), axis=-1)
            top, place = lax.top_k(score, 3)
            return found[place], top / jnp.sum(alive), rough[found[place]]

        return jax.vmap(one)(q, signs, alive)

    index = Random((pages, d // 32), jnp.dtype(jnp.uint32), below=2**32)
    codes = Random((pages, patches, d), jnp.dtype(jnp.int8), below=127)
    scales = normal(pages, patches, dtype=dtype, scale=0.001, offset=0.01)
    inputs = (weight(n, d, dtype=dtype), normal(queries, words, n, dtype=dtype), integers(queries, below=words // 2))
    return Built(search, (*inputs, index, codes, scales, integers(pages, below=patches // 2)))


@program("upright-and-slanted-lines-guessed-from-last-queries-prefill", GROUP)
def _minference(size: Size) -> Built:
    """This gives a layer whose heads see only columns and diagonals guessed from the last queries, as MInference (2024).

    Scores of the last queries are summed along columns and along diagonals, and the best of each are kept for all.
    """
    t, n, h, kv, d, last, columns, slants = pick(
        size, (1543, 1024, 8, 2, 128, 64, 120, 200), (389, 192, 4, 2, 48, 32, 30, 60), (13, 8, 2, 1, 4, 4, 3, 4)
    )
    dtype = half(size)

    def layer(p, x):
        y = _norm(x, p["norm"])
        q, k, v = jnp.split(y @ p["qkv"] + p["bias"], [h * d, (h + kv) * d], axis=-1)
        places = jnp.arange(t)
        q = _turn(q.reshape(t, h, d), places)
        k = jnp.repeat(_turn(k.reshape(t, kv, d), places), h // kv, axis=1)
        v = jnp.repeat(v.reshape(t, kv, d), h // kv, axis=1)
        behind = places[:, None] - places
        causal = behind >= 0

        def head(q, k, v):
            some = (q[-last:] @ k.T).astype(jnp.float32) * d**-0.5
            some = jax.nn.softmax(jnp.where(causal[-last:], some, -jnp.inf), axis=-1)
            upright = jnp.sum(some, axis=0).at[:4].set(jnp.inf)
            slanted = jax.ops.segment_sum(some.reshape(-1), jnp.maximum(behind[-last:], 0).reshape(-1), t)
            slanted = slanted.at[:8].set(jnp.inf)
            keep = jnp.zeros(t, bool).at[lax.top_k(upright, columns)[1]].set(True)
            slope = jnp.zeros(t, bool).at[lax.top_k(slanted, slants)[1]].set(True)
            mask = causal & (keep[None] | slope[jnp.maximum(behind, 0)])
            scores = jnp.where(mask, (q @ k.T).astype(jnp.float32) * d**-0.5, -jnp.inf)
            return jax.nn.softmax(scores, axis=-1).astype(dtype) @ v, jnp.mean(jnp.sum(mask, axis=-1) / (places + 1))

        seen, density = jax.vmap(head, in_axes=1, out_axes=(1, 0))(q, k, v)
        x = x + seen.reshape(t, h * d) @ p["out"]
        y = _norm(x, p["norm2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], density

    m = 11 * n // 4
    p = {"qkv": weight(n, (h + 2 * kv) * d, dtype=dtype), "bias": normal((h + 2 * kv) * d, dtype=dtype, scale=0.1)}
    p |= {"out": weight(h * d, n, dtype=dtype), "gate": weight(n, m, dtype=dtype), "up": weight(n, m, dtype=dtype)}
    p |= {"down": weight(m, n, dtype=dtype), "norm": gain(n, dtype), "norm2": gain(n, dtype)}
    return Built(layer, (p, normal(t, n, dtype=dtype)))


@program("words-of-late-and-most-distant-early-layer-contrasted-draw", GROUP)
def _dola(size: Size) -> Built:
    """This draws words by contrasting the last layer with the early layer that differs most, as DoLa (Chuang, 2023).

    The early layer is chosen by Jensen-Shannon divergence for each row; words far below the best are left out.
    """
    b, n, words, layers, recent = pick(size, (16, 1024, 32003, 5, 97), (8, 256, 12007, 5, 41), (2, 8, 17, 5, 4))
    dtype = half(size)

    def draw(states, norm, table, temperature, history, seed):
        logits = jnp.einsum("lbn,wn->lbw", _norm(states, norm), table, preferred_element_type=jnp.float32)
        logp = jax.nn.log_softmax(logits, axis=-1)
        late, early = logp[-1], logp[:-1]
        middle = jnp.logaddexp(early, late) - np.log(2)
        split = jnp.sum(jnp.exp(late) * (late - middle), axis=-1) + jnp.sum(jnp.exp(early) * (early - middle), axis=-1)
        chosen = jnp.argmax(split, axis=0)
        base = jnp.take_along_axis(early, chosen[None, :, None], axis=0)[0]
        plausible = late >= jnp.max(late, axis=-1, keepdims=True) + np.log(0.1)
        contrast = jnp.where(plausible, late - base, -jnp.inf)
        said = jnp.zeros((b, words), bool).at[jnp.arange(b)[:, None], history].set(True)
        contrast = jnp.where(said, jnp.where(contrast > 0, contrast / 1.2, contrast * 1.2), contrast)
        warmth = 0.5 + jax.nn.sigmoid(temperature)[:, None]
        keys = jax.vmap(lambda s: jax.random.fold_in(jax.random.key(7), s))(seed)
        picked = jax.vmap(jax.random.categorical)(keys, contrast / warmth)
        final = jax.nn.log_softmax(contrast / warmth, axis=-1)
        chance = jnp.take_along_axis(final, picked[:, None], axis=-1)[:, 0]
        return picked, chance, chosen, split / 2, jnp.sum(plausible, axis=-1)

    inputs = (normal(layers, b, n, dtype=dtype), gain(n, dtype), weight(words, n, dtype=dtype), normal(b))
    inputs = (*inputs[:2], normal(words, n, dtype=dtype, scale=2 * n**-0.5), inputs[3])
    return Built(draw, (*inputs, integers(b, recent, below=words), integers(b, below=999)))
