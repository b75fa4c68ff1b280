"""Layers and whole models of words and bytes, the twenty-second set: its author saw no plan and no part of the compiler."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import linen_program
from benchmarks.workloads.registry import Built, Size, gain, half, integers, normal, pick, program, weight
from benchmarks.workloads.sixteenth_models import equinox_parts

GROUP = "twenty-second"


def _norm(x, scale):
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def _turn(x, places, base=10000.0):
    """This rotates halves of heads by places; x: [batch, time, heads, width], places: [batch or 1, time]."""
    d = x.shape[-1]
    angle = places[..., None, None].astype(jnp.float32) * base ** (-jnp.arange(0, d, 2) / d)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _gated(p, x):
    gate, up = jnp.split(_norm(x, p["norm2"]) @ p["up"], 2, axis=-1)
    return x + (jax.nn.silu(gate) * up) @ p["down"]


def _layer_weights(n, m, dtype):
    p = {"norm": gain(n, dtype), "norm2": gain(n, dtype), "qkv": weight(n, 3 * n, dtype=dtype)}
    p |= {"out": weight(n, n, dtype=dtype), "up": weight(n, 2 * m, dtype=dtype), "down": weight(m, n, dtype=dtype)}
    return p


@program("words-that-mask-earlier-words-by-summed-scores-prefill", GROUP)
def _selective(size: Size) -> Built:
    """This gives the next words of prompts by selective attention (Leviathan et al., 2024).

    The rectified scores of the first head, summed over earlier queries, are taken off the scores of every head, so that a word may
    hide a word from all that follow. The prompts are padded on the right.
    """
    b, t, n, h, m, words = pick(size, (4, 777, 768, 12, 2048, 32003), (1, 201, 192, 4, 512, 4001), (2, 7, 8, 2, 12, 13))
    dtype, d = half(size), n // h

    def layer(p, x, alive):
        q, k, v = jnp.moveaxis((_norm(x, p["norm"]) @ p["qkv"]).reshape(b, t, 3, h, d), 2, 0)
        places = jnp.arange(t)[None]
        q, k = _turn(q, places), _turn(k, places)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * d**-0.5
        mask = jnp.tril(jnp.ones((t, t), bool)) & alive[:, None, None, :]
        scores = jnp.where(mask, scores, -1e9)
        hidden = jax.nn.relu(scores[:, 0]) * (1 - jnp.eye(t))
        hidden = hidden.at[:, :, 0].set(0)
        hidden = jnp.cumsum(jnp.roll(hidden, 1, axis=1).at[:, 0].set(0), axis=1)
        probs = jax.nn.softmax(scores - hidden[:, None], axis=-1).astype(dtype)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(b, t, n) @ p["out"]
        return _gated(p, x), jnp.sum(hidden * mask[:, 0], axis=(1, 2)) / (t * t)

    def model(p, tokens, lengths):
        length = t // 2 + lengths
        alive = jnp.arange(t) < length[:, None]
        x = p["table"][tokens]
        cost = jnp.zeros(b)
        for q in p["layers"]:
            x, extra = layer(q, x, alive)
            cost = cost + extra
        last = jnp.take_along_axis(x, (length - 1)[:, None, None], axis=1)[:, 0]
        logits = (_norm(last, p["last"]) @ p["table"].T).astype(jnp.float32) * n**-0.5
        return jax.nn.log_softmax(logits, axis=-1), cost

    p = {"table": normal(words, n, dtype=dtype), "last": gain(n, dtype)}
    p["layers"] = [_layer_weights(n, m, dtype) for _ in range(3)]
    return Built(model, (p, integers(b, t, below=words), integers(b, below=t // 2)))


@program("bytes-with-wide-layers-only-after-spaces-byte-chances", GROUP)
def _spacebyte(size: Size) -> Built:
    """This gives the chances of bytes by narrow layers, with wide layers only where a word begins, as SpaceByte (Slagle, 2024).

    The starts of words are gathered into a padded list, run through the wide layers, and added back to their places.
    """
    b, t, most, n, wide, h, near = pick(
        size, (4, 1543, 401, 384, 768, 6, 256), (1, 389, 111, 128, 256, 4, 96), (2, 17, 6, 8, 12, 2, 5)
    )
    dtype = half(size)

    def attend(p, x, places, mask):
        bb, tt, c = x.shape
        q, k, v = jnp.moveaxis((_norm(x, p["norm"]) @ p["qkv"]).reshape(bb, tt, 3, h, c // h), 2, 0)
        q, k = _turn(q, places), _turn(k, places)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * (c // h) ** -0.5
        probs = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1).astype(x.dtype)
        return _gated(p, x + jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(bb, tt, c) @ p["out"])

    def model(p, tokens):
        places = jnp.arange(t)
        back = places[:, None] - places
        local = (back >= 0) & (back < near)
        letters = ((tokens >= 48) & (tokens < 58)) | ((tokens >= 65) & (tokens < 123)) | (tokens > 127)
        begins = jnp.concatenate([jnp.ones((b, 1), bool), letters[:, 1:] & ~letters[:, :-1]], axis=1)
        x = p["table"][tokens]
        for q in p["first"]:
            x = attend(q, x, places[None], local)
        at = jax.vmap(lambda s: jnp.nonzero(s, size=most, fill_value=t)[0])(begins)
        real = at < t
        y = jnp.take_along_axis(x, jnp.minimum(at, t - 1)[..., None], axis=1) @ p["widen"]
        y = jnp.where(real[..., None], y, 0)
        mask = jnp.tril(jnp.ones((most, most), bool)) & real[:, None, None]
        for q in p["middle"]:
            y = attend(q, y, at, mask)
        y = (y @ p["narrow"]).astype(jnp.float32)
        x = jax.vmap(lambda row, i, z: row.at[i].add(z, mode="drop"))(x.astype(jnp.float32), at, y).astype(dtype)
        for q in p["second"]:
            x = attend(q, x, places[None], local)
        logits = (_norm(x, p["last"]) @ p["head"]).astype(jnp.float32)
        logp = jax.nn.log_softmax(logits[:, :-1], axis=-1)
        own = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]
        word = jnp.cumsum(begins, axis=1)[:, 1:]
        each = jax.vmap(lambda o, w: jax.ops.segment_sum(o, w, most + 1, indices_are_sorted=True))(own, word)
        return own, each, jnp.sum(begins, axis=1)

    p = {"table": normal(256, n, dtype=dtype), "last": gain(n, dtype), "head": weight(n, 256, dtype=dtype)}
    p |= {"widen": weight(n, wide, dtype=dtype), "narrow": weight(wide, n, dtype=dtype)}
    p |= {k: [_layer_weights(n, 2 * n, dtype)] for k in ("first", "second")}
    p["middle"] = [_layer_weights(wide, 2 * wide, dtype) for _ in range(2)]
    return Built(model, (p, integers(b, t, below=256)))


@program("far-words-kept-in-fewer-states-by-powers-of-two-layers", GROUP)
def _log_linear(size: Size) -> Built:
    """This runs layers of log-linear attention (Guo et al., 2025): spans of doubling length have weights of their own.

    The span of a pair of places follows from their Fenwick tree; gates also let the past decay, as in Mamba-2.
    """
    b, t, n, h = pick(size, (4, 1000, 768, 12), (1, 250, 192, 4), (2, 9, 8, 2))
    dtype, d = half(size), n // h
    levels = int(np.ceil(np.log2(t))) + 1

    def spans():
        q, k = np.indices((t, t))
        level = np.zeros((t, t), np.int32)
        rest = q ^ k
        while rest.any():
            level += rest > 0
            rest >>= 1
        return level

    table = spans()

    def layer(p, x):
        y = _norm(x, p["norm"])
        past = jnp.pad(y, ((0, 0), (3, 0), (0, 0)))
        y = jax.nn.silu(sum(past[:, i : i + t] * p["taps"][i] for i in range(4)))
        q, k, v = jnp.moveaxis((y @ p["qkv"]).reshape(b, t, 3, h, d), 2, 0)
        small = (y @ p["gates"]).astype(jnp.float32).reshape(b, t, h, levels + 1)
        decay = jnp.cumsum(-0.1 * jax.nn.softplus(small[..., 0]), axis=1)
        share = jax.nn.softplus(small[..., 1:])
        each = jnp.moveaxis(share, 2, 1)
        pairs = jnp.take_along_axis(each, jnp.broadcast_to(table, (b, h, t, t)), axis=-1)
        fade = jnp.moveaxis(decay, 2, 1)
        fade = jnp.where(jnp.tril(jnp.ones((t, t), bool)), fade[..., :, None] - fade[..., None, :], -jnp.inf)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * d**-0.5
        mixed = (scores * jnp.exp(fade) * pairs).astype(dtype)
        y = jnp.einsum("bhqk,bkhd->bqhd", mixed, v)
        y = _norm(y, p["head_norm"]).reshape(b, t, n)
        return _gated(p, x + (y * jax.nn.silu(x @ p["gate"])) @ p["out"])

    def model(p, x):
        for q in p:
            x = layer(q, x)
        return x

    def weights():
        p = _layer_weights(n, 2 * n, dtype) | {"taps": normal(4, n, dtype=dtype, scale=0.5)}
        p |= {"gates": weight(n, h * (levels + 1), dtype=dtype), "gate": weight(n, n, dtype=dtype)}
        return p | {"head_norm": gain(d, dtype)}

    return Built(model, ([weights() for _ in range(2)], normal(b, t, n, dtype=dtype)))


@program("dense-sparse-and-many-vector-scores-of-one-encoder-linen", GROUP)
def _three_ways(size: Size) -> Built:
    """This scores passages for questions in three ways by one encoder, as BGE-M3 (Chen et al., 2024).

    One way is the cosine of first words, one the product of weights that words get, kept at their largest in a table of the whole
    vocabulary, and one the sum over a question's words of the best match among those of a passage.
    """
    import flax.linen as nn

    asks, pages, short, long, n, h, words = pick(
        size, (16, 48, 37, 301, 384, 6, 30011), (4, 8, 19, 93, 192, 4, 5003), (2, 3, 4, 7, 8, 2, 17)
    )
    dtype, common = half(size), pick(size, 3001, 601, 9)

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, tokens, alive):
            x = nn.Embed(words, n, dtype=dtype)(tokens) + nn.Embed(long, n, dtype=dtype)(jnp.arange(tokens.shape[1]))
            x = nn.LayerNorm(dtype=dtype)(x)
            mask = alive[:, None, None, :]
            for _ in range(3):
                y = nn.MultiHeadDotProductAttention(h, dtype=dtype)(x, mask=mask)
                x = nn.LayerNorm(dtype=dtype)(x + y)
                y = nn.Dense(n, dtype=dtype)(nn.gelu(nn.Dense(4 * n, dtype=dtype)(x), approximate=False))
                x = nn.LayerNorm(dtype=dtype)(x + y)
            dense = x[:, 0].astype(jnp.float32)
            sparse = jnp.where(alive, nn.softplus(nn.Dense(1, dtype=dtype)(x))[..., 0].astype(jnp.float32), 0)
            sparse = jnp.where(tokens < 3, 0, sparse)
            many = nn.Dense(n, dtype=dtype)(x[:, 1:]).astype(jnp.float32)

            def unit(z):
                return z * lax.rsqrt(jnp.sum(z * z, axis=-1, keepdims=True) + 1e-9)

            rows = jnp.arange(tokens.shape[0])[:, None]
            lexical = jnp.zeros((tokens.shape[0], words)).at[rows, tokens].max(sparse)
            return unit(dense), lexical, jnp.where(alive[:, 1:, None], unit(many), 0)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, questions, passages, cut, trim):
            encoder = Encoder()
            asked = jnp.arange(short) < (short - cut)[:, None]
            kept = jnp.arange(long) < (long - trim)[:, None]
            d1, s1, m1 = encoder(questions, asked)
            d2, s2, m2 = encoder(passages, kept)
            dense, lexical = d1 @ d2.T, s1 @ s2.T
            match = jnp.einsum("aqd,pkd->apqk", m1.astype(dtype), m2.astype(dtype)).astype(jnp.float32)
            best = jnp.max(jnp.where(kept[None, :, None, 1:], match, -1.0), axis=-1)
            count = jnp.sum(asked[:, 1:], axis=1)[:, None]
            late = jnp.sum(jnp.where(asked[:, None, 1:], best, 0), axis=-1) / count
            return dense, lexical, late, (dense + 0.3 * lexical + late) / 2.3

    inputs = (integers(asks, short, below=common), integers(pages, long, below=common))
    return linen_program(size, Net(), *inputs, integers(asks, below=short // 2), integers(pages, below=long // 2))


@program("forget-gates-with-floors-rising-by-depth-outer-states-equinox", GROUP)
def _hgrn(size: Size) -> Built:
    """This gives chances of words by gated outer states whose gates have floors that rise by depth, as HGRN2 (Qin, 2024)."""
    import equinox as eqx

    b, t, chunk, n, h, words = pick(size, (8, 777, 32, 768, 6, 16001), (2, 201, 24, 192, 3, 3001), (2, 11, 4, 8, 2, 9))
    dtype, d, layers = half(size), n // h, 3

    class Mixer(eqx.Module):
        into: eqx.nn.Linear
        out: eqx.nn.Linear
        norm: eqx.nn.RMSNorm

        def __init__(self, key):
            k1, k2 = jax.random.split(key)
            self.into, self.out = eqx.nn.Linear(n, 4 * n, key=k1), eqx.nn.Linear(n, n, key=k2)
            self.norm = eqx.nn.RMSNorm(d)

        def __call__(self, x, floor):
            q, f, v, gate = jnp.split(jax.vmap(self.into)(x), 4, axis=-1)
            f = floor + (1 - floor) * jax.nn.sigmoid(f.astype(jnp.float32))
            q, v = jax.nn.silu(q.astype(jnp.float32)), v.astype(jnp.float32)
            pad = ((0, -t % chunk), (0, 0))
            f = jnp.pad(f, pad, constant_values=1.0)
            q, f, v = (z.reshape(-1, chunk, h, d) for z in (jnp.pad(q, pad), f, jnp.pad(v, pad)))
            k, run = 1 - f, jnp.cumsum(jnp.log(f), axis=1)

            def step(state, xs):
                q, k, v, run = xs
                now = q * jnp.exp(run)
                scores = jnp.tril(jnp.einsum("qhd,khd->hqk", now, k * jnp.exp(-run)))
                y = jnp.einsum("hqk,khe->qhe", scores, v) + jnp.einsum("qhd,hde->qhe", now, state)
                left = k * jnp.exp(run[-1] - run)
                return state * jnp.exp(run[-1])[..., None] + jnp.einsum("khd,khe->hde", left, v), y

            _, y = lax.scan(step, jnp.zeros((h, d, d)), (q, k, v, run))
            y = jax.vmap(jax.vmap(self.norm))(y.reshape(-1, h, d)[:t].astype(dtype)).reshape(t, n)
            return jax.vmap(self.out)(y * jax.nn.silu(gate))

    class Block(eqx.Module):
        mixer: Mixer
        up: eqx.nn.Linear
        down: eqx.nn.Linear
        norms: list

        def __init__(self, key):
            k = jax.random.split(key, 3)
            self.mixer, self.norms = Mixer(k[0]), [eqx.nn.RMSNorm(n), eqx.nn.RMSNorm(n)]
            self.up = eqx.nn.Linear(n, 4 * n, use_bias=False, key=k[1])
            self.down = eqx.nn.Linear(2 * n, n, use_bias=False, key=k[2])

        def __call__(self, x, floor):
            x = x + self.mixer(jax.vmap(self.norms[0])(x), floor)
            gate, y = jnp.split(jax.vmap(self.up)(jax.vmap(self.norms[1])(x)), 2, axis=-1)
            return x + jax.vmap(self.down)(jax.nn.silu(gate) * y)

    class Net(eqx.Module):
        table: eqx.nn.Embedding
        blocks: list
        floors: jax.Array
        norm: eqx.nn.RMSNorm

        def __init__(self, key):
            k = jax.random.split(key, layers + 1)
            self.table, self.blocks = eqx.nn.Embedding(words, n, key=k[0]), [Block(z) for z in k[1:]]
            self.floors, self.norm = jnp.zeros((layers, n)), eqx.nn.RMSNorm(n)

        def __call__(self, tokens):
            x = jax.vmap(self.table)(tokens)
            share = jax.nn.softmax(self.floors.astype(jnp.float32), axis=0)
            floors = jnp.cumsum(share, axis=0) - share[0]
            for block, floor in zip(self.blocks, floors, strict=True):
                x = block(x, floor)
            logits = jax.vmap(self.norm)(x) @ self.table.weight.T
            logp = jax.nn.log_softmax(logits[:-1].astype(jnp.float32), axis=-1)
            return jnp.take_along_axis(logp, tokens[1:, None], axis=-1)[:, 0]

    leaves, whole = equinox_parts(Net, dtype)
    return Built(lambda leaves, tokens: jax.vmap(whole(leaves))(tokens), (leaves, integers(b, t, below=words)))


@program("rows-and-blocks-of-eight-bit-floats-scanned-layers-decode", GROUP)
def _tiled_floats(size: Size) -> Built:
    """This decodes a word of each sequence with float8 products that have scales for tiles, as DeepSeek-V3 (2024).

    Weights have a scale for each square tile and states one for each row of a tile; keys and values are kept in float8 too.
    """
    b, past, n, h, groups, m, tile = pick(
        size, (64, 1543, 1024, 16, 4, 2816, 128), (8, 301, 256, 8, 2, 512, 64), (2, 7, 8, 4, 2, 16, 4)
    )
    dtype, d, f8 = half(size), n // h, jnp.float8_e4m3fn

    def product(x, w, scale):
        """This multiplies rows by a float8 matrix [inputs, outputs] with scales [inputs / tile, outputs / tile]."""
        i, o = w.shape
        x = x.astype(jnp.float32).reshape(b, i // tile, tile)
        top = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1e-6) / 448
        x = (x / top).astype(f8).astype(dtype)
        w = w.reshape(i // tile, tile, o).astype(dtype)
        parts = jnp.einsum("bit,ito->bio", x, w, preferred_element_type=jnp.float32)
        wide = jnp.repeat(0.01 * jnp.exp(0.1 * scale), tile, axis=1)
        return jnp.sum(parts * top * wide, axis=1).astype(dtype)

    def layer(x, q):
        p, (keys, values, key_scale, value_scale), lengths = q
        rows = jnp.arange(b)
        y = product(_norm(x, p["norm"]), *p["qkv"])
        q, k, v = jnp.split(y, [n, n + groups * d], axis=-1)
        q = _turn(q.reshape(b, 1, h, d), lengths[:, None])[:, 0]
        k = _turn(k.reshape(b, 1, groups, d), lengths[:, None])[:, 0].astype(jnp.float32)
        keys = keys.at[rows, lengths].set((k / key_scale[..., None]).astype(f8))
        values = values.at[rows, lengths].set((v.reshape(b, groups, d) / value_scale[..., None]).astype(f8))
        q = q.reshape(b, groups, h // groups, d)
        scores = jnp.einsum("bgrd,btgd->bgrt", q, keys.astype(dtype)).astype(jnp.float32)
        scores = scores * key_scale[..., None, None] * d**-0.5
        scores = jnp.where((jnp.arange(past) <= lengths[:, None])[:, None, None], scores, -1e9)
        probs = jax.nn.softmax(scores, axis=-1).astype(dtype)
        y = jnp.einsum("bgrt,btgd->bgrd", probs, values.astype(dtype)) * value_scale[..., None, None].astype(dtype)
        x = x + product(y.reshape(b, n), *p["out"])
        gate, up = jnp.split(product(_norm(x, p["norm2"]), *p["up"]), 2, axis=-1)
        return x + product(jax.nn.silu(gate) * up, *p["down"]), (keys, values)

    def model(p, cache, x, short, last, table):
        length = past // 2 + short
        scales = tuple(0.2 + 0.01 * jnp.abs(z) for z in cache[2:])
        lengths = jnp.broadcast_to(length, (2, b))
        x, caches = lax.scan(layer, x, (p, (*cache[:2], *scales), lengths))
        return jax.nn.log_softmax((_norm(x, last) @ table).astype(jnp.float32), axis=-1), caches

    def matrix(i, o):
        return normal(2, i, o, dtype=f8, scale=100 * i**-0.5), normal(2, i // tile, o // tile)

    p = {k: normal(2, n, dtype=dtype, scale=0.1, offset=1.0) for k in ("norm", "norm2")}
    p |= {"qkv": matrix(n, n + 2 * groups * d), "out": matrix(n, n), "up": matrix(n, 2 * m), "down": matrix(m, n)}
    cache = (normal(2, b, past, groups, d, dtype=f8, scale=4.0), normal(2, b, past, groups, d, dtype=f8, scale=4.0))
    cache += (normal(2, b, groups), normal(2, b, groups))
    inputs = (normal(b, n, dtype=dtype), integers(b, below=past // 2), gain(n, dtype), weight(n, 8 * n, dtype=dtype))
    return Built(model, (p, cache, *inputs))


@program("one-shared-attention-with-own-adapters-between-state-layers-decode", GROUP)
def _shared_block(size: Size) -> Built:
    """This decodes a word by state-space layers that share one attention block, as Zamba2 (Glorioso et al., 2024).

    The shared block reads the states beside the embeddings of the words, and has a low-rank adapter for each place it is used at.
    """
    b, past, n, h, heads, state, rank, words = pick(
        size, (64, 1200, 768, 12, 24, 64, 32, 32000), (8, 300, 256, 4, 8, 32, 16, 4000), (2, 7, 8, 2, 4, 4, 2, 13)
    )
    dtype, inner = half(size), 2 * n
    wide, d = inner + 2 * state, 2 * n // h

    def space(p, x, window, s):
        y = _norm(x, p["norm"]) @ p["into"]
        z, xbc, dt = jnp.split(y, [inner, inner + wide], axis=-1)
        window = jnp.concatenate([window[:, 1:], xbc[:, None]], axis=1)
        xbc = jax.nn.silu(jnp.einsum("bkc,kc->bc", window, p["taps"]) + p["bias"])
        u, key, query = jnp.split(xbc.astype(jnp.float32), [inner, inner + state], axis=-1)
        dt = jax.nn.softplus(dt.astype(jnp.float32) + p["dt"])
        u = u.reshape(b, heads, -1)
        fade = jnp.exp(-dt * jnp.exp(0.5 * p["rate"]))
        s = s * fade[..., None, None] + jnp.einsum("bh,bhp,bn->bhpn", dt, u, key)
        y = jnp.einsum("bhpn,bn->bhp", s, query) + p["skip"][:, None] * u
        y = (y.reshape(b, inner) * jax.nn.silu(z.astype(jnp.float32))).astype(dtype)
        return x + _norm(y, p["inner"]) @ p["out"], window, s

    def shared(p, adapter, x, start, keys, values, lengths):
        both = _norm(jnp.concatenate([x, start], axis=-1), p["norm"])
        q, k, v = jnp.moveaxis((both @ p["qkv"]).reshape(b, 1, 3, h, d), 2, 0)
        q, k = _turn(q, lengths[:, None])[:, 0], _turn(k, lengths[:, None])[:, 0]
        rows = jnp.arange(b)
        keys, values = keys.at[rows, lengths].set(k), values.at[rows, lengths].set(v[:, 0])
        scores = jnp.einsum("bhd,bthd->bht", q, keys).astype(jnp.float32) * (d / 2) ** -0.5
        scores = jnp.where((jnp.arange(past) <= lengths[:, None])[:, None], scores, -1e9)
        probs = jax.nn.softmax(scores, axis=-1).astype(dtype)
        y = jnp.einsum("bht,bthd->bhd", probs, values).reshape(b, 2 * n) @ p["out"]
        y = _norm(y, p["norm2"])
        gate, up = jnp.split(y @ p["up"] + (y @ adapter["a"]) @ adapter["b"], 2, axis=-1)
        return x + ((jax.nn.gelu(gate) * up) @ p["down"]) @ adapter["mix"], keys, values

    def model(p, windows, states, keys, values, tokens, short):
        lengths = past // 2 + short
        start = x = p["table"][tokens]
        new_windows, new_states, new_keys, new_values = [], [], [], []
        for i, layer in enumerate(p["layers"]):
            x, window, s = space(layer, x, windows[i], states[i])
            new_windows.append(window)
            new_states.append(s)
            if i % 2:
                j = i // 2
                x, k, v = shared(p["shared"], p["adapters"][j], x, start, keys[j], values[j], lengths)
                new_keys.append(k)
                new_values.append(v)
        logits = (_norm(x, p["last"]) @ p["table"].T).astype(jnp.float32) * n**-0.5
        probs = jax.nn.softmax(logits / 0.8, axis=-1)
        return probs, new_windows, new_states, new_keys, new_values

    def space_weights():
        q = {"norm": gain(n, dtype), "into": weight(n, inner + wide + heads, dtype=dtype), "inner": gain(inner, dtype)}
        q |= {"taps": normal(4, wide, dtype=dtype, scale=0.5), "bias": normal(wide, dtype=dtype, scale=0.1)}
        q |= {"dt": normal(heads, offset=-2.0), "rate": normal(heads), "skip": normal(heads, offset=1.0, scale=0.1)}
        return q | {"out": weight(inner, n, dtype=dtype)}

    p = {"table": normal(words, n, dtype=dtype), "last": gain(n, dtype), "layers": [space_weights() for _ in range(4)]}
    q = {"norm": gain(2 * n, dtype), "qkv": weight(2 * n, 6 * n, dtype=dtype), "out": weight(2 * n, n, dtype=dtype)}
    q |= {"norm2": gain(n, dtype), "up": weight(n, 8 * n, dtype=dtype), "down": weight(4 * n, n, dtype=dtype)}
    pair = {"a": weight(n, rank, dtype=dtype), "b": weight(rank, 8 * n, dtype=dtype), "mix": weight(n, n, dtype=dtype)}
    p |= {"shared": q, "adapters": [dict(pair) for _ in range(2)]}
    windows = [normal(b, 4, wide, dtype=dtype) for _ in range(4)]
    states = [normal(b, heads, inner // heads, state, scale=0.3) for _ in range(4)]
    caches = [[normal(b, past, h, d, dtype=dtype) for _ in range(2)] for _ in range(2)]
    inputs = (integers(b, below=words), integers(b, below=past // 2))
    return Built(model, (p, windows, states, *caches, *inputs))
