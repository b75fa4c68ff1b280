"""Layers, caches, searches and draws of language models, the twenty-first set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import (
    Built,
    Random,
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

GROUP = "twenty-first"


def _norm(x, scale):
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def _unit(x):
    """Returns the rows with length one, in the type they came in."""
    y = x.astype(jnp.float32)
    return (y / jnp.maximum(jnp.linalg.norm(y, axis=-1, keepdims=True), 1e-6)).astype(x.dtype)


def _rotate(x, cos, sin):
    a, b = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-b, a], axis=-1) * sin


@program("all-vectors-kept-on-a-sphere-layers-prefill", GROUP)
def _ngpt(size: Size) -> Built:
    """This runs three layers whose states, queries and keys have length one, as nGPT (Loshchilov et al., 2024).

    Each block proposes a point on the sphere and the state moves towards it by a learned rate for each channel.
    """
    b, t, n, h, d, m = pick(size, (2, 1100, 1024, 16, 64, 2816), (1, 150, 320, 5, 64, 864), (2, 5, 8, 2, 4, 12))
    dtype = half(size)

    def block(x, p, cos, sin, mask):
        q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
        q, k, v = (z.reshape(b, t, h, d) for z in (q, k, v))
        scale = (p["qk_scale"] * d**0.5).astype(dtype)
        q, k = _unit(_rotate(q, cos, sin)) * scale, _unit(_rotate(k, cos, sin)) * scale
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * d**0.5
        probs = jax.nn.softmax(jnp.where(mask, scores / d, jnp.finfo(jnp.float32).min), axis=-1)
        y = jnp.einsum("bhqk,bkhd->bqhd", probs.astype(dtype), v).reshape(b, t, h * d) @ p["out"]
        x = _unit(x + jnp.abs(p["attn_rate"]).astype(dtype) * (_unit(y) - x))
        u, gate = jnp.split(x @ p["up"], 2, axis=-1)
        u, gate = u * p["u_scale"], gate * p["gate_scale"] * n**0.5
        y = (u * jax.nn.silu(gate)) @ p["down"]
        return _unit(x + jnp.abs(p["mlp_rate"]).astype(dtype) * (_unit(y) - x)), None

    def forward(p, x, pad):
        angle = jnp.arange(t)[:, None] * 10000.0 ** (-jnp.arange(d // 2) / (d // 2))
        angle = jnp.concatenate([angle, angle], axis=-1)[:, None]
        cos, sin = jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)
        mask = jnp.tril(jnp.ones((t, t), bool)) & (jnp.arange(t) < t - pad[:, None])[:, None, None]
        x, _ = lax.scan(lambda x, p: block(x, p, cos, sin, mask), _unit(x), p)
        return x

    p = {"qkv": weight(3, n, 3 * h * d, dtype=dtype), "out": weight(3, h * d, n, dtype=dtype)}
    p |= {"up": weight(3, n, 2 * m, dtype=dtype), "down": weight(3, m, n, dtype=dtype)}
    p |= {"qk_scale": normal(3, h, d, scale=0.1, offset=1.0), "attn_rate": normal(3, n, scale=0.01, offset=0.05)}
    p |= {
        "mlp_rate": normal(3, n, scale=0.01, offset=0.05),
        "u_scale": normal(3, m, dtype=dtype, scale=0.1, offset=1.0),
    }
    p |= {"gate_scale": normal(3, m, dtype=dtype, scale=0.1, offset=1.0)}
    return Built(forward, (p, normal(b, t, n, dtype=dtype), integers(b, below=t // 4 + 1)))


@program("values-looked-up-by-products-of-two-key-halves-layer", GROUP)
def _product_keys(size: Size) -> Built:
    """This adds values found among very many slots by two short lists of keys, as product-key memories (Lample, 2019).

    Each half of a query finds its best keys; the best pairs point at rows of a large table, gated as in Memory+ (2024).
    """
    tokens, n, heads, d, side, top = pick(
        size, (1536, 1024, 4, 256, 384, 24), (500, 192, 3, 64, 96, 12), (5, 8, 2, 4, 6, 3)
    )
    dtype = half(size)

    def layer(p, x):
        y = _norm(x, p["norm"])
        q = (y @ p["query"]).reshape(tokens, heads, 2, d // 2).astype(jnp.float32)
        q = (q - q.mean(axis=0)) / jnp.sqrt(q.var(axis=0) + 1e-5)
        scores = jnp.einsum("thsd,hskd->thsk", q.astype(dtype), p["keys"], preferred_element_type=jnp.float32)
        best, index = lax.top_k(scores, top)
        sums = (best[:, :, 0, :, None] + best[:, :, 1, None, :]).reshape(tokens, heads, top * top)
        slots = (index[:, :, 0, :, None] * side + index[:, :, 1, None, :]).reshape(tokens, heads, top * top)
        final, place = lax.top_k(sums, top)
        slot = jnp.take_along_axis(slots, place, axis=-1)
        share = jax.nn.softmax(final, axis=-1).astype(dtype)
        found = jnp.einsum("thk,thkn->tn", share, p["values"][slot])
        return x + (found * jax.nn.silu(y @ p["gate"])) @ p["out"], slot

    p = {"norm": gain(n, dtype), "query": weight(n, heads * d, dtype=dtype), "gate": weight(n, n, dtype=dtype)}
    p |= {"keys": normal(heads, 2, side, d // 2, dtype=dtype, scale=(d // 2) ** -0.5), "out": weight(n, n, dtype=dtype)}
    p |= {"values": normal(side * side, n, dtype=dtype, scale=0.5)}
    return Built(layer, (p, normal(tokens, n, dtype=dtype)))


@program("groups-of-beams-made-to-differ-step", GROUP)
def _diverse_beams(size: Size) -> Built:
    """This makes one step of a beam search whose groups avoid each other's words, as diverse beams (Vijayakumar, 2016).

    The groups choose one after another, and a word that earlier groups chose is charged for each time.
    """
    b, groups, beams, words, steps = pick(size, (16, 4, 3, 50257, 40), (12, 4, 3, 24001, 20), (2, 2, 2, 11, 4))

    def step(logits, scores, tokens, ended, at):
        logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1).reshape(b, groups, beams, words)
        only_end = jnp.where(jnp.arange(words) == 2, 0.0, -1e9)
        logp = jnp.where(ended[..., None], only_end, logp)

        def choose(counts, group):
            logp, score = group
            total = score[..., None] + logp - 0.5 * counts[:, None]
            _, flat = lax.top_k(total.reshape(b, beams * words), beams)
            beam, word = flat // words, flat % words
            clean = jnp.take_along_axis((score[..., None] + logp).reshape(b, -1), flat, axis=-1)
            counts = counts.at[jnp.arange(b)[:, None], word].add(1.0)
            return counts, (clean, beam, word)

        inputs = (jnp.moveaxis(logp, 1, 0), jnp.moveaxis(scores, 1, 0))
        _, (clean, beam, word) = lax.scan(choose, jnp.zeros((b, words)), inputs)
        clean, beam, word = (jnp.moveaxis(z, 0, 1) for z in (clean, beam, word))
        tokens = jnp.take_along_axis(tokens, beam[..., None], axis=2)
        tokens = lax.dynamic_update_slice_in_dim(tokens, word[..., None], at, axis=3)
        ended = jnp.take_along_axis(ended, beam, axis=2) | (word == 2)
        return clean, tokens, ended, clean / (5.0 + at + 1) ** 0.6

    shape = (b, groups, beams)
    inputs = (
        normal(b * groups * beams, words, dtype=half(size), scale=2.0),
        normal(*shape),
        integers(*shape, steps, below=words),
    )
    return Built(step, (*inputs, booleans(*shape), integers(below=steps)))


@program("keys-of-small-length-kept-when-a-cache-is-shortened", GROUP)
def _short_keys(size: Size) -> Built:
    """This shortens a cache to the keys of least length and the newest ones, as L2-norm compression (Devoto, 2024)."""
    b, past, kv, d, kept, recent = pick(
        size, (8, 4001, 8, 128, 1000, 64), (6, 2501, 8, 64, 700, 32), (2, 11, 2, 4, 6, 2)
    )
    dtype = half(size)

    def shorten(keys, values, lengths):
        size_of = jnp.linalg.norm(keys.astype(jnp.float32), axis=-1)
        place = jnp.arange(past)
        alive = place < (past // 2 + lengths)[:, None]
        newest = place >= (past // 2 + lengths)[:, None] - recent
        score = jnp.where(alive[..., None], jnp.where((newest | (place < 2))[..., None], jnp.inf, -size_of), -jnp.inf)
        _, chosen = lax.top_k(jnp.swapaxes(score, 1, 2), kept)
        chosen = jnp.swapaxes(jnp.sort(chosen, axis=-1), 1, 2)
        keys = jnp.take_along_axis(keys, chosen[..., None], axis=1)
        values = jnp.take_along_axis(values, chosen[..., None], axis=1)
        return keys, values, chosen, jnp.minimum(jnp.sum(alive, axis=-1), kept)

    shape = (b, past, kv, d)
    return Built(shorten, (normal(*shape, dtype=dtype), normal(*shape, dtype=dtype), integers(b, below=past // 2)))


@program("words-kept-by-deviations-and-by-entropy-then-drawn", GROUP)
def _cutoffs(size: Size) -> Built:
    """This draws words whose scores are near the best by deviations (top-n-sigma, 2024) and by entropy (eta, 2022)."""
    b, words = pick(size, (96, 49157), (40, 32003), (3, 17))

    def draw(logits, bias, seen, temperature, seed):
        x = logits.astype(jnp.float32) + bias
        x = x - 0.4 * jnp.minimum(seen, 3).astype(jnp.float32)
        warm = 0.6 + jax.nn.sigmoid(temperature)[:, None]
        best, spread = jnp.max(x, axis=-1, keepdims=True), jnp.std(x, axis=-1, keepdims=True)
        x = jnp.where(x >= best - 1.5 * spread, x / warm, -jnp.inf)
        probs = jax.nn.softmax(x, axis=-1)
        entropy = -jnp.sum(jax.scipy.special.xlogy(probs, probs), axis=-1, keepdims=True)
        eta = jnp.minimum(3e-4, jnp.sqrt(3e-4) * jnp.exp(-entropy))
        keep = (probs >= eta) | (probs == probs.max(axis=-1, keepdims=True))
        probs = jnp.where(keep, probs, 0.0)
        total = jnp.cumsum(probs, axis=-1)
        point = jax.random.uniform(jax.random.key(seed), (b, 1)) * total[:, -1:]
        word = jnp.argmax(total > point, axis=-1)
        chance = jnp.take_along_axis(probs, word[:, None], axis=-1)[:, 0] / total[:, -1]
        return word, jnp.log(chance + 1e-30), entropy[:, 0], jnp.sum(keep, axis=-1)

    counts = Random((b, words), jnp.dtype(jnp.int8), below=5)
    return Built(
        draw, (normal(b, words, dtype=half(size), scale=2.0), normal(words), counts, normal(b), integers(below=999))
    )


@program("int4-weights-whose-rows-belong-to-scattered-groups-mlp", GROUP)
def _act_order(size: Size) -> Built:
    """This runs a gated block on four-bit weights whose rows' groups are out of order, as GPTQ with `desc_act`.

    Eight numbers are packed in an integer, zeros are packed along the columns, and an index names each row's group.
    """
    tokens, n, m, group = pick(size, (24, 3072, 8192, 128), (12, 768, 2048, 64), (3, 16, 32, 8))
    dtype = half(size)
    shifts = np.arange(0, 32, 4)

    def product(x, w):
        rows = (w["words"][:, None, :] >> shifts[None, :, None]) & 15
        rows = rows.reshape(-1, w["words"].shape[-1])
        zeros = ((w["zeros"][:, :, None] >> shifts) & 15).reshape(w["zeros"].shape[0], -1) + 1
        full = w["scales"][w["group"]] * (rows - zeros[w["group"]]).astype(dtype)
        return x @ full

    def mlp(p, x):
        y = _norm(x, p["norm"])
        y = jax.nn.silu(product(y, p["gate"])) * product(y, p["up"])
        return x + product(y, p["down"])

    def packed(i, o):
        whole = jnp.dtype(jnp.int32)
        w = {
            "words": Random((i // 8, o), whole, below=2**31 - 1),
            "zeros": Random((i // group, o // 8), whole, below=2**31 - 1),
        }
        return w | {
            "scales": normal(i // group, o, dtype=dtype, scale=0.01 * i**-0.5),
            "group": integers(i, below=i // group),
        }

    p = {"norm": gain(n, dtype), "gate": packed(n, m), "up": packed(n, m), "down": packed(m, n)}
    return Built(mlp, (p, normal(tokens, n, dtype=dtype)))


@program("packed-documents-word-chances-with-stretched-rotations", GROUP)
def _yarn(size: Size) -> Built:
    """This scores every word of documents packed in rows, with rotations stretched for length as YaRN (Peng, 2023).

    Two layers see only their own document; the last product runs over chunks of words and returns ranks as well.
    """
    b, t, n, h, kv, d, m, words, chunk = pick(
        size,
        (2, 1024, 768, 12, 4, 64, 2048, 32000, 256),
        (1, 160, 192, 4, 2, 48, 512, 4001, 40),
        (2, 6, 8, 2, 1, 4, 12, 13, 3),
    )
    dtype = half(size)

    def frequencies():
        stretch, original = 8.0, 512
        at = jnp.arange(0, d, 2) / d
        plain = 10000.0**-at
        low, high = (d * np.log(original / (r * 2 * np.pi)) / (2 * np.log(10000.0)) for r in (32, 1))
        ramp = jnp.clip((jnp.arange(d // 2) - max(low, 0)) / max(high - low, 1e-3), 0, 1)
        return plain * (1 - ramp) + plain / stretch * ramp, 0.1 * np.log(stretch) + 1.0

    def layer(p, x, cos, sin, mask):
        q, k, v = jnp.split(_norm(x, p["norm"]) @ p["qkv"], [h * d, (h + kv) * d], axis=-1)
        q = _rotate(q.reshape(b, t, h, d), cos, sin).reshape(b, t, kv, h // kv, d)
        k, v = _rotate(k.reshape(b, t, kv, d), cos, sin), v.reshape(b, t, kv, d)
        scores = jnp.einsum("btgrd,bsgd->bgrts", q, k).astype(jnp.float32) * d**-0.5
        probs = jax.nn.softmax(scores + mask[:, None, None], axis=-1).astype(dtype)
        x = x + jnp.einsum("bgrts,bsgd->btgrd", probs, v).reshape(b, t, h * d) @ p["out"]
        gate, up = jnp.split(_norm(x, p["norm2"]) @ p["up"], 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ p["down"]

    def score(p, tokens, breaks):
        starts = breaks.at[:, 0].set(0) == 0
        segment = jnp.cumsum(starts, axis=1)
        index = jnp.arange(t)
        position = index - lax.cummax(jnp.where(starts, index, 0), axis=1)
        frequency, factor = frequencies()
        angle = position[..., None] * frequency
        angle = jnp.concatenate([angle, angle], axis=-1)[:, :, None]
        cos, sin = (jnp.cos(angle) * factor).astype(dtype), (jnp.sin(angle) * factor).astype(dtype)
        same = (segment[:, :, None] == segment[:, None]) & (index[:, None] >= index)
        mask = jnp.where(same, 0.0, -1e9)
        x = p["table"][tokens]
        for block in p["layers"]:
            x = layer(block, x, cos, sin, mask)
        x = _norm(x, p["last"]).reshape(-1, chunk, n)
        following = jnp.roll(tokens, -1, axis=1)

        def part(args):
            x, target = args
            logits = (x @ p["head"]).astype(jnp.float32)
            own = jnp.take_along_axis(logits, target[:, None], axis=-1)
            rank = jnp.sum(logits > own, axis=-1)
            return own[:, 0] - jax.nn.logsumexp(logits, axis=-1), rank, jnp.argmax(logits, axis=-1)

        logp, rank, best = lax.map(part, (x, following.reshape(-1, chunk)))
        logp = jnp.where(jnp.roll(starts, -1, axis=1), 0.0, logp.reshape(b, t))
        totals = jax.vmap(lambda v, s: jax.ops.segment_sum(v, s, t + 1))(logp, segment)
        return logp, rank.reshape(b, t), best.reshape(b, t), totals

    def block():
        p = {
            "qkv": weight(n, (h + 2 * kv) * d, dtype=dtype),
            "out": weight(h * d, n, dtype=dtype),
            "norm": gain(n, dtype),
        }
        return p | {"up": weight(n, 2 * m, dtype=dtype), "down": weight(m, n, dtype=dtype), "norm2": gain(n, dtype)}

    p = {"table": normal(words, n, dtype=dtype), "layers": [block(), block()], "last": gain(n, dtype)}
    p |= {"head": weight(n, words, dtype=dtype)}
    return Built(score, (p, integers(b, t, below=words), integers(b, t, below=97)))
