"""Models of words and voices and ways to decode them, as users write them: the seventeenth set, by an author who saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import module_weights
from benchmarks.workloads.registry import Built, Random, Size, gain, half, integers, normal, pick, program, weight
from benchmarks.workloads.sixteenth_language import rms, rotate

GROUP = "seventeenth"


@program("pages-chosen-by-bounds-of-their-scores-decode", GROUP)
def _pages(size: Size) -> Built:
    """This gives the next words of a batch by layers that read only the pages of the cache that may matter most.

    Every page keeps the least and the greatest key of each channel; a query's bound on its scores with a page comes from these,
    and the pages with the greatest bounds are gathered.
    """
    b, pages, page, n, h, g, d, m, chosen, words = pick(
        size,
        (8, 320, 16, 2048, 16, 4, 128, 5632, 40, 32000),
        (3, 50, 16, 384, 6, 2, 64, 1024, 12, 3000),
        (2, 6, 3, 16, 4, 2, 4, 24, 3, 20),
    )
    dtype = half(size)

    def layer(p, x, cache, length):
        keys, values, low, high = cache
        y = rms(x, p["norm1"])
        qkv = y @ p["qkv"]
        q, k, v = jnp.split(qkv, [h * d, (h + g) * d], axis=-1)
        q, k, v = q.reshape(b, h, d), k.reshape(b, g, d), v.reshape(b, g, d)
        q, k = rotate(q, length), rotate(k, length)
        row, at, inside = jnp.arange(b), length // page, length % page
        keys, values = keys.at[row, at, inside].set(k), values.at[row, at, inside].set(v)
        fresh = (inside == 0)[:, None, None]
        low = low.at[row, at].set(jnp.where(fresh, k, jnp.minimum(low[row, at], k)))
        high = high.at[row, at].set(jnp.where(fresh, k, jnp.maximum(high[row, at], k)))
        q = q.reshape(b, g, h // g, d)
        bound = jnp.maximum(q[:, None] * low[:, :, :, None], q[:, None] * high[:, :, :, None])
        bound = jnp.sum(bound.astype(jnp.float32), axis=-1)
        ended = jnp.arange(pages)[None, :, None, None]
        bound = jnp.where(ended > at[:, None, None, None], -jnp.inf, bound)
        bound = jnp.where((ended == at[:, None, None, None]) | (ended == 0), 1e30, bound)
        _, ids = lax.top_k(jnp.moveaxis(jnp.max(bound, axis=-1), 1, -1), chosen)  # batch, group, chosen
        rows, groups = row[:, None, None], jnp.arange(g)[None, :, None]
        near_k = jnp.moveaxis(keys, 3, 1)[rows, groups, ids].reshape(b, g, chosen * page, d)
        near_v = jnp.moveaxis(values, 3, 1)[rows, groups, ids].reshape(b, g, chosen * page, d)
        place = (ids[..., None] * page + jnp.arange(page)).reshape(b, g, chosen * page)
        scores = jnp.einsum("bgrd,bgtd->bgrt", q, near_k, preferred_element_type=jnp.float32) * d**-0.5
        scores = jnp.where((place <= length[:, None, None])[:, :, None], scores, -1e30)
        probs = jax.nn.softmax(scores, axis=-1).astype(dtype)
        x = x + jnp.einsum("bgrt,bgtd->bgrd", probs, near_v).reshape(b, h * d) @ p["out"]
        y = rms(x, p["norm2"])
        x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
        return x, (keys, values, low, high)

    def step(layers, caches, table, last, words_before, length):
        length = length + (pages // 2) * page
        x, after = table[words_before], []
        for p, cache in zip(layers, caches, strict=True):
            x, grown = layer(p, x, cache, length)
            after.append(grown)
        logits = (rms(x, last) @ table.T).astype(jnp.float32)
        return jnp.argmax(logits, axis=-1), jax.nn.logsumexp(logits, axis=-1), after

    p = {"norm1": gain(n, dtype), "norm2": gain(n, dtype), "qkv": weight(n, (h + 2 * g) * d, dtype=dtype)}
    p |= {"out": weight(h * d, n, dtype=dtype), "gate": weight(n, m, dtype=dtype), "up": weight(n, m, dtype=dtype)}
    p |= {"down": weight(m, n, dtype=dtype)}
    cached = normal(b, pages, page, g, d, dtype=dtype)
    bounds = (normal(b, pages, g, d, dtype=dtype, offset=-2.0), normal(b, pages, g, d, dtype=dtype, offset=2.0))
    caches = [(cached, cached, *bounds) for _ in range(2)]
    texts = (integers(b, below=words), integers(b, below=(pages // 2) * page))
    table = normal(words, n, dtype=dtype, scale=n**-0.5)
    return Built(step, ([p, p], caches, table, gain(n, dtype), *texts))


@program("two-bit-keys-by-channel-values-by-row-recent-window-decode", GROUP)
def _two_bits(size: Size) -> Built:
    """This gives one decoding step over a cache in two bits, with the newest rows in full precision.

    Keys are scaled in groups of places for each channel, values in groups of channels for each place; four codes share a byte.
    """
    b, t, recent, n, h, d, m, group = pick(
        size, (8, 4000, 96, 2048, 16, 128, 5504, 32), (2, 800, 40, 384, 6, 64, 1024, 32), (2, 16, 5, 16, 2, 8, 24, 4)
    )
    dtype = half(size)

    def codes(packed, axis):
        parts = [(packed >> (2 * i)) & 3 for i in range(4)]
        shape = list(packed.shape)
        shape[axis] *= 4
        return jnp.stack(parts, axis=axis + 1).reshape(shape).astype(dtype)

    def restored_keys(c):
        q = codes(c["codes"], 2).reshape(b, h, t // group, group, d)
        return (q * c["scale"][:, :, :, None] + c["low"][:, :, :, None]).reshape(b, h, t, d)

    def restored_values(c):
        q = codes(c["codes"], 3).reshape(b, h, t, d // group, group)
        return (q * c["scale"][..., None] + c["low"][..., None]).reshape(b, h, t, d)

    def step(p, keys, values, new_keys, new_values, x, length, filled):
        y = rms(x, p["norm1"])
        q, k, v = (z.reshape(b, h, d) for z in jnp.split(y @ p["qkv"], 3, axis=-1))
        q, k = rotate(q, length + filled), rotate(k, length + filled)
        row = jnp.arange(b)
        new_keys = new_keys.at[row, :, filled].set(k)
        new_values = new_values.at[row, :, filled].set(v)
        q = q * d**-0.5
        old = jnp.einsum("bhd,bhtd->bht", q, restored_keys(keys), preferred_element_type=jnp.float32)
        new = jnp.einsum("bhd,bhtd->bht", q, new_keys, preferred_element_type=jnp.float32)
        old = jnp.where((jnp.arange(t) < length[:, None])[:, None], old, -1e30)
        new = jnp.where((jnp.arange(recent) <= filled[:, None])[:, None], new, -1e30)
        probs = jax.nn.softmax(jnp.concatenate([old, new], axis=-1), axis=-1).astype(dtype)
        seen = jnp.einsum("bht,bhtd->bhd", probs[..., :t], restored_values(values))
        seen = seen + jnp.einsum("bht,bhtd->bhd", probs[..., t:], new_values)
        x = x + seen.reshape(b, h * d) @ p["out"]
        y = rms(x, p["norm2"])
        a, g = jnp.split(y @ p["up"], 2, axis=-1)
        x = x + (jax.nn.silu(g) * a) @ p["down"]
        # The window as it would be packed when it is full: a code for each group of channels.
        grouped = new_values.astype(jnp.float32).reshape(b, h, recent, d // group, group)
        low, high = jnp.min(grouped, axis=-1, keepdims=True), jnp.max(grouped, axis=-1, keepdims=True)
        scale = (high - low) / 3 + 1e-6
        q2 = jnp.clip(jnp.round((grouped - low) / scale), 0, 3).astype(jnp.uint8).reshape(b, h, recent, d // 4, 4)
        packed = jnp.sum(q2 << jnp.array([0, 2, 4, 6], jnp.uint8), axis=-1, dtype=jnp.uint8)
        return x, new_keys, new_values, packed, scale[..., 0].astype(jnp.float16), low[..., 0].astype(jnp.float16)

    p = {"norm1": gain(n, dtype), "norm2": gain(n, dtype), "qkv": weight(n, 3 * h * d, dtype=dtype)}
    p |= {"out": weight(h * d, n, dtype=dtype), "up": weight(n, 2 * m, dtype=dtype), "down": weight(m, n, dtype=dtype)}

    def packed(*shape):
        return Random(shape, jnp.dtype(jnp.uint8), below=256)

    def ranged(*shape):
        return {
            "scale": normal(*shape, dtype=dtype, scale=0.1, offset=0.9),
            "low": normal(*shape, dtype=dtype, offset=-1.4),
        }

    keys = {"codes": packed(b, h, t // 4, d), **ranged(b, h, t // group, d)}
    values = {"codes": packed(b, h, t, d // 4), **ranged(b, h, t, d // group)}
    window = normal(b, h, recent, d, dtype=dtype)
    arguments = (
        p,
        keys,
        values,
        window,
        window,
        normal(b, n, dtype=dtype),
        integers(b, below=t),
        integers(b, below=recent),
    )
    return Built(step, arguments)


@program("state-is-a-linear-model-trained-while-reading", GROUP)
def _test_time(size: Size) -> Built:
    """This gives a layer whose memory is a matrix that takes a gradient step on each group of places it reads.

    The matrix learns to rebuild values from keys through a norm; the gradients of a group are summed in their dual form.
    """
    b, t, n, h, group = pick(size, (4, 2000, 1024, 16, 16), (2, 224, 256, 4, 16), (2, 8, 12, 2, 4))
    d, dtype = n // h, half(size)

    def shifted(p, x):
        before = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
        return sum(before[:, i : i + t] * p["conv"][i] for i in range(4))

    def slope_of_norm(z, target, scale, shift):
        mean, spread = jnp.mean(z, axis=-1, keepdims=True), jnp.var(z, axis=-1, keepdims=True)
        std = jnp.sqrt(spread + 1e-6)
        unit = (z - mean) / std
        slope = (scale * unit + shift - target) * scale
        inner = jnp.mean(slope, axis=-1, keepdims=True) + unit * jnp.mean(slope * unit, axis=-1, keepdims=True)
        return (slope - inner) / std

    def memory(scale, shift, w0, b0, q, k, v, rate):
        lower = jnp.tri(group)

        def chunk(carry, xs):
            w, bias = carry
            q, k, v, rate = xs
            slope = slope_of_norm(k @ w + bias, v - k, scale, shift)
            steps = rate[None, :] * lower
            new_bias = bias - steps @ slope
            z = q @ w - (steps * (q @ k.T)) @ slope + new_bias
            last = steps[-1][:, None]
            carry = (w - (last * k).T @ slope, bias - jnp.sum(last * slope, axis=0))
            mean, spread = jnp.mean(z, axis=-1, keepdims=True), jnp.var(z, axis=-1, keepdims=True)
            return carry, q + (z - mean) * lax.rsqrt(spread + 1e-6) * scale + shift

        state, out = lax.scan(chunk, (w0, b0), (q, k, v, rate))
        return out.reshape(t, d), state

    def layer(p, x):
        y = rms(x, p["norm"])
        mixed = shifted(p, y @ p["qk"])
        q, k, v = mixed @ p["q"], mixed @ p["k"], y @ p["v"]
        q, k, v = (z.reshape(b, t, h, d) for z in (q, k, v))
        places = jnp.arange(t) % group
        q, k = rotate(q, places), rotate(k, places)
        rate = jax.nn.sigmoid((y @ p["rate"]).astype(jnp.float32) + p["rate_bias"]) / d
        rate = rate * jnp.maximum(1.0 / (places + 1) + p["places"][places], 0.0)[:, None]

        def grouped(z):
            z = jnp.moveaxis(z.astype(jnp.float32), 2, 1)
            return z.reshape(b, h, t // group, group, *z.shape[3:])

        per_head = jax.vmap(memory, in_axes=(0,) * 8)
        out, state = jax.vmap(per_head, in_axes=(None,) * 4 + (0,) * 4)(
            p["scale"], p["shift"], p["w0"], p["b0"], grouped(q), grouped(k), grouped(v), grouped(rate)
        )
        out = jnp.moveaxis(out, 1, 2).reshape(b, t, n)
        centred = out - jnp.mean(out, axis=-1, keepdims=True)
        out = centred * lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5) * p["after"]
        return x + (out.astype(dtype) * jax.nn.gelu(y @ p["gate"])) @ p["out"], state

    p = {name: weight(n, n, dtype=dtype) for name in ("qk", "q", "k", "v", "gate", "out")}
    p |= {
        "norm": gain(n, dtype),
        "after": gain(n),
        "conv": normal(4, n, dtype=dtype, scale=0.5),
        "rate": weight(n, h, dtype=dtype),
    }
    p |= {"rate_bias": normal(h), "places": normal(group, scale=0.02), "scale": normal(h, d, scale=0.1, offset=1.0)}
    p |= {"shift": normal(h, d, scale=0.1), "w0": normal(h, d, d, scale=0.02), "b0": normal(h, d, scale=0.02)}
    return Built(layer, (p, normal(b, t, n, dtype=dtype)))


@program("places-counted-by-gates-of-scores-attention-grad-haiku", GROUP)
def _counted(size: Size) -> Built:
    """This gives gradients of a small language model whose places are counts of the words that pass a gate.

    A gate is the sigmoid of a score; the sum of gates between two words, read between two learned places, is their distance.
    """
    import haiku as hk

    b, t, n, h, places, words = pick(size, (4, 700, 512, 8, 64, 5000), (2, 90, 128, 4, 32, 500), (2, 6, 8, 2, 3, 11))
    d, dtype = n // h, half(size)

    def attention(x):
        q, k, v = (hk.Linear(n, with_bias=False)(x).reshape(b, t, h, d) for _ in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * d**-0.5, k).astype(jnp.float32)
        causal = jnp.tri(t, dtype=bool)
        gates = jnp.where(causal, jax.nn.sigmoid(scores), 0.0)
        counted = jnp.flip(jnp.cumsum(jnp.flip(gates, -1), axis=-1), -1)
        counted = jnp.minimum(counted, places - 1.0)
        table = hk.get_parameter("places", (d, places), q.dtype, hk.initializers.RandomNormal(0.02))
        marks = (jnp.einsum("bqhd,dp->bhqp", q, table)).astype(jnp.float32)
        above, below = jnp.ceil(counted).astype(jnp.int32), jnp.floor(counted).astype(jnp.int32)
        share = counted - below
        upper, lower = (jnp.take_along_axis(marks, i, axis=-1) for i in (above, below))
        probs = jax.nn.softmax(jnp.where(causal, scores + upper * share + lower * (1 - share), -1e30))
        seen = jnp.einsum("bhqk,bkhd->bqhd", probs.astype(dtype), v).reshape(b, t, n)
        return hk.Linear(n, with_bias=False)(seen)

    def norm(x):
        return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)

    def net(text):
        table = hk.Embed(words, n, name="table")
        x = table(text)
        for _ in range(2):
            x = x + attention(norm(x))
            x = x + hk.Linear(n)(jax.nn.gelu(hk.Linear(4 * n)(norm(x))))
        return (norm(x) @ table.embeddings.T).astype(jnp.float32) * n**-0.5

    model = hk.without_apply_rng(hk.transform(net))

    def loss(params, text):
        log_probs = jax.nn.log_softmax(model.apply(params, text)[:, :-1])
        nll = -jnp.take_along_axis(log_probs, text[:, 1:, None], axis=-1)[..., 0]
        alive = text[:, 1:] != 0
        return jnp.sum(nll * alive) / jnp.maximum(jnp.sum(alive), 1)

    text = integers(b, t, below=words)
    weights = module_weights(jax.eval_shape(model.init, jax.random.key(0), text.struct), dtype)
    return Built(jax.value_and_grad(loss), (weights, text))


@program("pieces-of-words-lattice-expectation-and-best-splits", GROUP)
def _pieces(size: Size) -> Built:
    """This gives one round of learning a vocabulary of pieces from texts, and the best splits of the texts.

    The expected count of a piece is the gradient of the likelihood of all splits; digamma functions then sparsify the counts,
    and the pieces whose loss hurts least are named. The piece that ends at a place is found by a rolling hash.
    """
    texts, t, longest, pieces, keep = pick(
        size, (640, 120, 8, 16000, 12000), (64, 100, 8, 4000, 3000), (2, 9, 8, 20, 12)
    )

    def hashes(text):
        """The piece of each length that ends at each place."""
        h, ids = jnp.zeros_like(text, dtype=jnp.uint32), []
        for k in range(longest):
            before = jnp.pad(text, ((0, 0), (k, 0)))[:, :t].astype(jnp.uint32)
            h = (h * jnp.uint32(1000003)) ^ (before + jnp.uint32(131))
            ids.append(((h ^ (h >> 15)) % jnp.uint32(pieces)).astype(jnp.int32))
        return jnp.stack(ids, axis=-1)

    def edges(scores, ids, lengths):
        fits = jnp.arange(t)[:, None] >= jnp.arange(longest)
        score = jnp.where(fits, scores[ids], -1e30)
        alive = jnp.arange(t)[None, :] < lengths[:, None]
        pad = jnp.where(jnp.arange(longest) == 0, 0.0, -1e30)
        return jnp.where(alive[..., None], score, pad)

    def total(scores, ids, lengths):
        def step(window, score):
            value = jax.nn.logsumexp(window + score, axis=-1)
            return jnp.concatenate([value[:, None], window[:, :-1]], axis=1), None

        first = jnp.full((texts, longest), -1e30).at[:, 0].set(0.0)
        last, _ = lax.scan(step, first, jnp.moveaxis(edges(scores, ids, lengths), 1, 0))
        return jnp.sum(last[:, 0]), last[:, 0]

    def best(scores, ids, lengths):
        def step(window, score):
            both = window + score
            value, way = jnp.max(both, axis=-1), jnp.argmax(both, axis=-1)
            return jnp.concatenate([value[:, None], window[:, :-1]], axis=1), way

        first = jnp.full((texts, longest), -1e30).at[:, 0].set(0.0)
        last, ways = lax.scan(step, first, jnp.moveaxis(edges(scores, ids, lengths), 1, 0))

        def back(left, way):
            ends = left == 0
            return jnp.where(ends, way, left - 1), ends

        _, ends = lax.scan(back, jnp.zeros(texts, jnp.int32), ways, reverse=True)
        return last[:, 0], ends.T

    def learn(raw, text, lengths):
        lengths, ids = lengths + t // 2, hashes(text)
        scores = jax.nn.log_softmax(raw)
        (_, each), counts = jax.value_and_grad(total, has_aux=True)(scores, ids, lengths)
        enough = counts >= 0.5
        posterior = jax.scipy.special.digamma(jnp.maximum(counts, 0.5)) - jax.scipy.special.digamma(
            jnp.sum(counts * enough) + 1
        )
        fresh = jnp.where(enough, posterior, -20.0)
        value, ends = best(fresh, ids, lengths)
        hurt, kept = lax.top_k(jnp.where(enough, counts * (fresh + 12.0), -1e9), keep)
        used = jnp.sum(ends & (jnp.arange(t) < lengths[:, None]), axis=1)
        return fresh, each / lengths, value, ends, kept, jnp.sum(jnp.maximum(hurt, 0.0)) / keep, used

    return Built(learn, (normal(pieces), integers(texts, t, below=27), integers(texts, below=t // 2)))


@program("typical-words-drawn-with-a-green-list-and-no-loops", GROUP)
def _green(size: Size) -> Built:
    """This gives drawn words that carry a watermark, and how strongly the words before carry it.

    A hash of the last word makes some words likelier; words that would go on with a loop are punished by the length of the loop;
    only words of typical surprise are kept.
    """
    b, t, n, words = pick(size, (32, 500, 2048, 64000), (8, 150, 256, 5003), (2, 9, 8, 23))
    dtype = half(size)

    def green(last, word):
        x = last.astype(jnp.uint32) * jnp.uint32(2654435761) ^ word.astype(jnp.uint32) * jnp.uint32(40503)
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        return ((x ^ (x >> 16)) & jnp.uint32(1023)) < 512

    def loops(history):
        """The length of the match between the text before each place and the end of the text."""

        def longer(carry, k):
            length, going = carry
            ahead = jnp.roll(history, k + 1, axis=0)
            same = (ahead == history[t - 1 - k]) & (jnp.arange(t) > k) & going
            return (length + same, same), None

        (length, _), _ = lax.scan(longer, (jnp.zeros(t, jnp.int32), jnp.ones(t, bool)), jnp.arange(min(t - 1, 12)))
        return length

    def draw(hidden, table, history, key):
        logits = (hidden @ table.T).astype(jnp.float32)
        length = jax.vmap(loops)(history)
        cost = jnp.where(length >= 2, 0.8 * 1.75 ** (length - 2.0), 0.0)
        punished = jax.vmap(lambda h, c: jnp.zeros(words).at[h].max(c))(history, cost)
        logits = logits - punished + 2.0 * green(history[:, -1:], jnp.arange(words)[None])
        log_probs = jax.nn.log_softmax(logits / 0.8)
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1, keepdims=True)
        order = jnp.argsort(jnp.abs(-log_probs - entropy), axis=-1)
        mass = jnp.cumsum(jnp.exp(jnp.take_along_axis(log_probs, order, axis=-1)), axis=-1)
        kept = jnp.pad(mass, ((0, 0), (1, 0)))[:, :-1] < 0.9
        kept = jax.vmap(lambda o, k: jnp.zeros(words, bool).at[o].set(k))(order, kept)
        final = jnp.where(kept, log_probs, -1e30)
        noise = jax.random.gumbel(jax.random.key(key[0]), (b, words))
        word = jnp.argmax(final + noise, axis=-1)
        sure = jnp.take_along_axis(jax.nn.log_softmax(final), word[:, None], axis=-1)[:, 0]
        hits = jnp.sum(green(history[:, :-1], history[:, 1:]), axis=1)
        return word, sure, jnp.sum(kept, axis=-1), (hits - 0.5 * (t - 1)) / np.sqrt(0.25 * (t - 1)), entropy[:, 0]

    table = normal(words, n, dtype=dtype, scale=2 * n**-0.5)
    return Built(draw, (normal(b, n, dtype=dtype), table, integers(b, t, below=words), integers(1, below=1000)))


@program("voices-compared-by-multi-scale-delays-haiku", GROUP)
def _voices(size: Size) -> Built:
    """This gives how alike voices are to enrolled ones, normalised by the scores of a cohort of strangers.

    Blocks split the channels into eight, each of which hears the one before through a dilated convolution.
    """
    import haiku as hk

    b, t, mels, n, inner, emb, enrolled, cohort = pick(
        size, (32, 301, 80, 512, 1536, 192, 40, 3000), (3, 151, 80, 128, 384, 192, 40, 500), (2, 13, 6, 16, 12, 8, 3, 9)
    )
    splits, keep, dtype = 8, pick(size, 300, 100, 4), half(size)

    class Unit(hk.Module):
        def __init__(self, n, side, rate=1):
            super().__init__("unit")
            self.n, self.side, self.rate = n, side, rate

        def __call__(self, x):
            x = jax.nn.relu(hk.Conv1D(self.n, self.side, rate=self.rate)(x))
            return x * hk.get_parameter("scale", (self.n,), x.dtype, jnp.ones)

    def block(x, rate, alive):
        y = Unit(n, 1)(x)
        parts = jnp.split(y, splits, axis=-1)
        outs = [parts[0]]
        for i, part in enumerate(parts[1:]):
            outs.append(Unit(n // splits, 3, rate)(part if i == 0 else part + outs[-1]))
        y = Unit(n, 1)(jnp.concatenate(outs, axis=-1))
        mean = jnp.sum(y * alive, axis=1) / jnp.sum(alive, axis=1)
        gate = jax.nn.sigmoid(hk.Linear(n)(jax.nn.relu(hk.Linear(max(n // 4, 2))(mean))))
        return x + y * gate[:, None]

    def net(sound, lengths, references, strangers):
        alive = jnp.arange(t)[None] < (t // 2 + lengths)[:, None]
        weight = alive[..., None].astype(jnp.float32)
        mean = jnp.sum(sound * weight, axis=1, keepdims=True) / jnp.sum(weight, axis=1, keepdims=True)
        x = ((sound - mean) * weight).astype(dtype)
        w = weight.astype(dtype)
        x, seen = Unit(n, 5)(x), []
        for rate in (2, 3, 4):
            x = block(x, rate, w)
            seen.append(x)
        x = jax.nn.relu(hk.Conv1D(inner, 1)(jnp.concatenate(seen, axis=-1))).astype(jnp.float32)
        mean = jnp.sum(x * weight, axis=1, keepdims=True) / jnp.sum(weight, axis=1, keepdims=True)
        spread = jnp.sqrt(
            jnp.sum(weight * (x - mean) ** 2, axis=1, keepdims=True) / jnp.sum(weight, axis=1, keepdims=True) + 1e-4
        )
        whole = jnp.concatenate([x, *(jnp.broadcast_to(s, x.shape) for s in (mean, spread))], axis=-1).astype(dtype)
        scores = hk.Conv1D(inner, 1)(jnp.tanh(hk.Conv1D(128, 1)(whole))).astype(jnp.float32)
        attention = jax.nn.softmax(jnp.where(weight > 0, scores, -1e9), axis=1)
        mean = jnp.sum(attention * x, axis=1)
        spread = jnp.sqrt(jnp.maximum(jnp.sum(attention * x**2, axis=1) - mean**2, 1e-4))
        voice = hk.Linear(emb)(jnp.concatenate([mean, spread], axis=-1).astype(dtype)).astype(jnp.float32)
        voice, references, strangers = (
            v / (jnp.linalg.norm(v, axis=-1, keepdims=True) + 1e-6) for v in (voice, references, strangers)
        )

        def moments(v):
            top, _ = lax.top_k(v @ strangers.T, keep)
            return jnp.mean(top, axis=-1), jnp.std(top, axis=-1) + 1e-6

        (m1, s1), (m2, s2), raw = moments(voice), moments(references), voice @ references.T
        return voice, 0.5 * ((raw - m1[:, None]) / s1[:, None] + (raw - m2) / s2)

    model = hk.without_apply_rng(hk.transform(net))
    inputs = (normal(b, t, mels), integers(b, below=t // 2), normal(enrolled, emb), normal(cohort, emb))
    structs = jax.eval_shape(model.init, jax.random.key(0), *(r.struct for r in inputs))
    return Built(model.apply, (module_weights(structs, dtype), *inputs))
