"""Unusual layers of language models, decoding and packing of texts, the twenty-seventh set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, gain, half, integers, normal, pick, program, weight
from benchmarks.workloads.twenty_fifth_parts import attention, dense, dense_of, rms_norm, rotary, short

GROUP = "twenty-seventh"


@program("reflections-gathered-between-words-tell-places-prefill", GROUP)
def _reflections(size: Size) -> Built:
    """This reads a prompt with attention in which each word reflects the space between a query and a key that lies before it.

    It is PaTH attention with forgetting (Yang, 2025; fla-org/flash-linear-attention): the product of reflections between two words
    is never built, one triangular solve per head gives all of them at once.
    """
    b, t, n, h, rank, wide = pick(size, (2, 733, 768, 12, 32, 2112), (1, 251, 192, 6, 16, 512), (2, 9, 16, 2, 3, 24))
    dtype, depth, d = half(size), 2, n // h

    def smoothed(kernel, x):
        """This mixes each channel with the two words before."""
        padded = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))
        return jax.nn.silu(sum(kernel[k] * padded[:, k : k + t] for k in range(3)))

    def block(q, x, real):
        y = rms_norm(q["norm1"], x)
        query, key, value = jnp.split((y @ q["qkv"]).reshape(b, t, 3 * h, d), 3, axis=2)
        query, key = (rms_norm(q[k], z) for k, z in (("norm_q", query), ("norm_k", key)))
        way = smoothed(q["kernel"], (y @ q["way1"]) @ q["way2"]).reshape(b, t, h, d).astype(jnp.float32)
        way = way * lax.rsqrt(jnp.sum(way * way, axis=-1, keepdims=True) + 1e-6)
        strength = 2 * jax.nn.sigmoid(y.astype(jnp.float32) @ q["strength"])
        strength = jnp.where(real[..., None], strength, 0.0).transpose(0, 2, 1)[..., None]
        query, key, way = (z.astype(jnp.float32).transpose(0, 2, 1, 3) for z in (query, key, way))
        plain = jnp.einsum("bhid,bhjd->bhij", query, key)
        told = jnp.tril(jnp.einsum("bhid,bhsd->bhis", query, way))
        system = jnp.eye(t) + jnp.tril(strength * jnp.einsum("bhsd,bhrd->bhsr", way, way), -1)
        ways = strength * jnp.tril(jnp.einsum("bhsd,bhjd->bhsj", way, key), -1)
        solved = lax.linalg.triangular_solve(system, ways, left_side=True, lower=True, unit_diagonal=True)
        scores = (plain - told @ solved) * d**-0.5
        kept = jnp.cumsum(jax.nn.log_sigmoid(y.astype(jnp.float32) @ q["forget"] + 4.0), axis=1).transpose(0, 2, 1)
        scores = scores + kept[..., :, None] - kept[..., None, :]
        mask = jnp.tril(jnp.ones((t, t), bool)) & real[:, None, None, :]
        probs = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        y = jnp.einsum("bhij,bjhd->bihd", probs.astype(dtype), value)
        x = x + y.reshape(b, t, n) @ q["o"]
        gate, up = jnp.split(rms_norm(q["norm2"], x) @ q["up"], 2, axis=-1)
        near = jnp.sum(probs * jnp.maximum(jnp.arange(t)[:, None] - jnp.arange(t), 0), axis=-1)
        return x + (jax.nn.silu(gate) * up) @ q["down"], jnp.mean(near, axis=(0, 2))

    def run(p, text, start):
        real = jnp.arange(t) >= start[:, None]
        x, reach = jnp.where(real[..., None], p["table"][text], 0), []
        for q in p["layers"]:
            x, near = block(q, x, real)
            reach.append(near)
        last = rms_norm(p["norm"], x[:, -1])
        return jax.nn.log_softmax((last @ p["table"].T).astype(jnp.float32), axis=-1), jnp.stack(reach)

    def layer():
        q = {"norm1": gain(n, dtype), "norm2": gain(n, dtype), "norm_q": gain(d, dtype), "norm_k": gain(d, dtype)}
        q |= {"qkv": weight(n, 3 * n, dtype=dtype), "o": weight(n, n, dtype=dtype), "strength": weight(n, h)}
        q |= {"way1": weight(n, rank, dtype=dtype), "way2": weight(rank, n, dtype=dtype), "forget": weight(n, h)}
        q |= {"kernel": normal(3, n, dtype=dtype, scale=0.6), "up": weight(n, 2 * wide, dtype=dtype)}
        return q | {"down": weight(wide, n, dtype=dtype)}

    words = pick(size, 32003, 5003, 13)
    p = {"table": normal(words, n, dtype=dtype, scale=0.05), "norm": gain(n, dtype)}
    p["layers"] = [layer() for _ in range(depth)]
    return Built(run, (p, integers(b, t, below=words), integers(b, below=t // 2)))


@program("short-gated-convolutions-few-attentions-sigmoid-experts-decode", GROUP)
def _short_convolutions(size: Size) -> Built:
    """This writes one word for many answers of unlike lengths with layers that mostly remember only the last two states.

    It is LFM2-8B-A1B (Liquid AI, 2025; in transformers as lfm2_moe): gated convolutions of three taps, two layers of grouped
    attention with normed queries and keys, and experts chosen by sigmoids with a bias that is used for choosing only.
    """
    b, n, h, few, d, experts, top, hidden, wide, seen, words = pick(
        size,
        (13, 2048, 32, 8, 64, 24, 4, 1024, 7168, 1537, 65536),
        (3, 256, 8, 2, 32, 12, 3, 160, 704, 257, 8009),
        (2, 16, 4, 2, 4, 5, 2, 6, 24, 9, 13),
    )
    dtype, kinds, dense_first = half(size), "ccacca", 2

    def feed(q, x):
        gate, up = jnp.split(x @ q["up"], 2, axis=-1)
        return (jax.nn.silu(gate) * up) @ q["down"]

    def routed(q, x):
        """This lets every expert work and keeps the few that were chosen, as small batches do."""
        chance = jax.nn.sigmoid((x @ q["router"]).astype(jnp.float32))
        _, at = lax.top_k(chance + q["lift"], top)
        own = jnp.take_along_axis(chance, at, axis=-1)
        own = own / (jnp.sum(own, axis=-1, keepdims=True) + 1e-6)
        share = jnp.einsum("bk,bke->be", own, jax.nn.one_hot(at, experts))
        gate = jnp.einsum("bn,enf->ebf", x, q["gate"])
        y = jax.nn.silu(gate) * jnp.einsum("bn,enf->ebf", x, q["rise"])
        y = jnp.einsum("ebf,efn->ebn", y, q["fall"], preferred_element_type=jnp.float32)
        return jnp.einsum("ebn,be->bn", y, share).astype(dtype), share

    def convolved(q, x, kept):
        before, after, y = jnp.split(x @ q["in"], 3, axis=-1)
        window = jnp.concatenate([kept, (before * y)[:, None]], axis=1)
        y = after * jnp.sum(window * q["kernel"], axis=1)
        return y @ q["o"], window[:, 1:]

    def attended(q, x, cache, count):
        query = rms_norm(q["norm_q"], (x @ q["q"]).reshape(b, 1, h, d))
        key = rms_norm(q["norm_k"], (x @ q["k"]).reshape(b, 1, few, d))
        query, key = rotary(query, count[:, None]), rotary(key, count[:, None])
        rows = jnp.arange(b)
        keys = cache["k"].at[rows, count].set(key[:, 0])
        values = cache["v"].at[rows, count].set((x @ q["v"]).reshape(b, few, d))
        query = query.reshape(b, few, h // few, d)
        scores = jnp.einsum("bkgd,blkd->bkgl", query, keys, preferred_element_type=jnp.float32) * d**-0.5
        scores = jnp.where(jnp.arange(seen) <= count[:, None, None, None], scores, -jnp.inf)
        y = jnp.einsum("bkgl,blkd->bkgd", jax.nn.softmax(scores, axis=-1).astype(dtype), values)
        return y.reshape(b, h * d) @ q["o"], {"k": keys, "v": values}

    def step(p, now, count, caches):
        x, fresh, used = p["table"][now], [], jnp.zeros((b, experts))
        for k, (q, cache) in enumerate(zip(p["layers"], caches, strict=True)):
            y = rms_norm(q["norm1"], x)
            y, grown = convolved(q, y, cache) if kinds[k] == "c" else attended(q, y, cache, count)
            fresh.append(grown)
            x = x + y
            y = rms_norm(q["norm2"], x)
            if k < dense_first:
                x = x + feed(q, y)
            else:
                y, share = routed(q, y)
                x, used = x + y, used + share
        logits = (rms_norm(p["norm"], x) @ p["table"].T).astype(jnp.float32)
        spread = jnp.std(jnp.sum(used, axis=0)) / jnp.mean(jnp.sum(used, axis=0))
        return jnp.argmax(logits, axis=-1), jax.nn.logsumexp(logits, axis=-1), logits, fresh, spread

    def layer(k):
        q = {"norm1": gain(n, dtype), "norm2": gain(n, dtype)}
        if kinds[k] == "c":
            q |= {"in": weight(n, 3 * n, dtype=dtype), "kernel": normal(3, n, dtype=dtype, scale=0.6)}
            q |= {"o": weight(n, n, dtype=dtype)}
        else:
            q |= {"norm_q": gain(d, dtype), "norm_k": gain(d, dtype), "q": weight(n, h * d, dtype=dtype)}
            q |= {"k": weight(n, few * d, dtype=dtype), "v": weight(n, few * d, dtype=dtype)}
            q |= {"o": weight(h * d, n, dtype=dtype)}
        if k < dense_first:
            return q | {"up": weight(n, 2 * wide, dtype=dtype), "down": weight(wide, n, dtype=dtype)}
        q |= {"router": weight(n, experts, dtype=dtype), "lift": normal(experts, scale=0.1)}
        q |= {k: weight(experts, n, hidden, dtype=dtype) for k in ("gate", "rise")}
        return q | {"fall": weight(experts, hidden, n, dtype=dtype)}

    def cache(kind):
        if kind == "c":
            return normal(b, 2, n, dtype=dtype)
        return {k: normal(b, seen, few, d, dtype=dtype) for k in ("k", "v")}

    p = {"table": normal(words, n, dtype=dtype, scale=0.05), "norm": gain(n, dtype)}
    p["layers"] = [layer(k) for k in range(len(kinds))]
    return Built(step, (p, integers(b, below=words), integers(b, below=seen), [cache(k) for k in kinds]))


@program("four-streams-mixed-by-doubly-stochastic-tables-layers", GROUP)
def _streams(size: Size) -> Built:
    """This reads texts with four streams of states, which each layer mixes by a small table whose rows and columns sum to one.

    It is manifold-constrained hyper-connections (Xie, 2025; DeepSeek): tables depend on the word and are made by twenty rounds of
    Sinkhorn's division, so that signals neither grow nor fade with depth.
    """
    b, t, n, h, wide = pick(size, (2, 1531, 1280, 10, 3456), (1, 197, 160, 5, 448), (2, 7, 8, 2, 12))
    dtype, streams, depth, rounds = half(size), 4, 3, 20
    sides = (streams, streams, streams * streams)

    def tables(q, x):
        """This gives how streams are read, how they are written and how they are mixed."""
        flat = x.reshape(b, t, streams * n).astype(jnp.float32)
        size_of = lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + 1e-6)
        told = jnp.einsum("btn,no->bto", flat.astype(dtype), q["phi"], preferred_element_type=jnp.float32) * size_of
        read, write, mix = jnp.split(
            told * jnp.repeat(q["alpha"], np.array(sides)) + q["bias"], np.cumsum(sides)[:2], -1
        )
        mix = mix.reshape(b, t, streams, streams)
        mix = jnp.exp(mix - jnp.max(mix, axis=(-2, -1), keepdims=True))

        def divide(_, m):
            m = m / (jnp.sum(m, axis=-1, keepdims=True) + 1e-6)
            return m / (jnp.sum(m, axis=-2, keepdims=True) + 1e-6)

        return jax.nn.sigmoid(read), 2 * jax.nn.sigmoid(write), lax.fori_loop(0, rounds, divide, mix)

    def around(q, x, part):
        read, write, mix = tables(q, x)
        wide_x = x.astype(jnp.float32)
        y = part(jnp.einsum("bts,btsn->btn", read, wide_x).astype(dtype)).astype(jnp.float32)
        fresh = jnp.einsum("btsr,btrn->btsn", mix, wide_x) + write[..., None] * y[:, :, None]
        return fresh.astype(dtype), jnp.mean(jnp.abs(jnp.sum(mix, axis=-1) - 1))

    def run(p, text, parts):
        same = parts[:, :, None] == parts[:, None, :]
        mask = (same & jnp.tril(jnp.ones((t, t), bool)))[:, None]
        first = jnp.argmax(same, axis=-1)
        places = jnp.arange(t) - first
        x, wrong = jnp.repeat(p["table"][text][:, :, None], streams, axis=2), []
        for q in p["layers"]:

            def attend(x, q=q):
                query, key, value = jnp.split((rms_norm(q["norm1"], x) @ q["qkv"]).reshape(b, t, 3 * h, -1), 3, axis=2)
                y = attention(rotary(query, places), rotary(key, places), value, mask)
                return y.reshape(b, t, n) @ q["o"]

            def feed(x, q=q):
                gate, up = jnp.split(rms_norm(q["norm2"], x) @ q["up"], 2, axis=-1)
                return (jax.nn.silu(gate) * up) @ q["down"]

            x, one = around(q["mix1"], x, attend)
            x, two = around(q["mix2"], x, feed)
            wrong += [one, two]
        y = rms_norm(p["norm"], jnp.sum(x.astype(jnp.float32), axis=2).astype(dtype))
        apart = jnp.sqrt(jnp.mean(jnp.var(x.astype(jnp.float32), axis=2), axis=-1))
        return y, jnp.stack(wrong), apart

    def mixer():
        o = sum(sides)
        return {"phi": weight(streams * n, o, dtype=dtype), "alpha": normal(3, scale=0.2), "bias": normal(o)}

    def layer():
        q = {"norm1": gain(n, dtype), "norm2": gain(n, dtype), "mix1": mixer(), "mix2": mixer()}
        q |= {"qkv": weight(n, 3 * n, dtype=dtype), "o": weight(n, n, dtype=dtype)}
        return q | {"up": weight(n, 2 * wide, dtype=dtype), "down": weight(wide, n, dtype=dtype)}

    words = pick(size, 32003, 5003, 13)
    p = {"table": normal(words, n, dtype=dtype), "norm": gain(n, dtype), "layers": [layer() for _ in range(depth)]}
    return Built(run, (p, integers(b, t, below=words), integers(b, t, below=7, ramp=True)))


@program("sounds-to-letters-by-prefix-beams-with-a-pair-model", GROUP)
def _prefix_beams(size: Size) -> Built:
    """This turns chances of letters per frame of speech into the likeliest texts, where beams that spell the same text are joined.

    It is prefix beam search (Hannun, 2014) for connectionist temporal classification with the chances of pairs of letters, as
    in decoders for wav2vec2 in JAX: two sums per beam, whether the last frame was blank or not, and hashes tell texts apart.
    """
    b, t, n, words, beams, best = pick(
        size, (48, 151, 512, 1025, 16, 24), (4, 97, 96, 129, 12, 16), (2, 7, 8, 11, 3, 4)
    )
    dtype, low = short(size), -1e9

    def one(logp, length, pairs):
        chances, letters = lax.top_k(logp[:, 1:], best)
        letters = letters + 1

        def frame(beam, now):
            text, last, blank, other, count = beam
            chance, letter, void, k, row = now
            whole = jnp.logaddexp(blank, other)
            repeat = jnp.where(last > 0, row[last], low)
            stay_blank, stay_other = whole + void, other + repeat
            grown = jnp.where(letter[None] == last[:, None], blank[:, None], whole[:, None]) + chance[None]
            grown = grown + 0.4 * pairs[last[:, None], letter[None]] + 0.6
            spelled = (text[:, None] * jnp.uint32(1000003)) ^ (letter[None].astype(jnp.uint32) + jnp.uint32(2654435769))
            grown, spelled = grown.reshape(-1), spelled.reshape(-1)
            same = (spelled[:, None] == text[None]) & (count > 0)
            joined = jax.nn.logsumexp(jnp.where(same, grown[:, None], low), axis=0)
            stay_other = jnp.logaddexp(stay_other, joined)
            grown = jnp.where(jnp.any(same, axis=1), low, grown)
            all_blank = jnp.concatenate([stay_blank, jnp.full(beams * best, low)])
            all_other = jnp.concatenate([stay_other, grown])
            _, at = lax.top_k(jnp.logaddexp(all_blank, all_other), beams)
            parent = jnp.where(at < beams, at, (at - beams) // best)
            put = jnp.where(at < beams, 0, letter[(at - beams) % best])
            fresh_text = jnp.concatenate([text, spelled])[at]
            fresh_last = jnp.where(put > 0, put, last[parent])
            fresh = (fresh_text, fresh_last, all_blank[at], all_other[at], count[parent] + (put > 0))
            alive = k < length
            fresh = jax.tree.map(lambda x, y: jnp.where(alive, x, y), fresh, beam)
            return fresh, (jnp.where(alive, parent, jnp.arange(beams)), jnp.where(alive, put, 0))

        start = (jnp.zeros(beams, jnp.uint32), jnp.zeros(beams, jnp.int32), jnp.full(beams, low).at[0].set(0.0))
        start = (*start, jnp.full(beams, low), jnp.zeros(beams, jnp.int32))
        inputs = (chances, letters, logp[:, 0], jnp.arange(t), logp)
        (_, _, blank, other, count), (parents, puts) = lax.scan(frame, start, inputs)
        score = jnp.logaddexp(blank, other)

        def back(at, now):
            parent, put = now
            return parent[at], put[at]

        _, spelled = lax.scan(back, jnp.argmax(score), (parents, puts), reverse=True)
        return spelled, jax.nn.softmax(score), score / jnp.maximum(count, 1), count

    def run(p, states, length, pairs):
        logits = dense(p, states).astype(jnp.float32)
        logp = jax.nn.log_softmax(logits, axis=-1)
        unsure = jnp.mean(-jnp.sum(jnp.exp(logp) * logp, axis=-1), axis=-1)
        return *jax.vmap(one, (0, 0, None))(logp, length, jax.nn.log_softmax(pairs, axis=-1)), unsure

    p = {"w": normal(n, words, dtype=dtype, scale=3 * n**-0.5), "b": normal(words, dtype=dtype, scale=0.1)}
    inputs = (normal(b, t, n, dtype=dtype), integers(b, below=t), normal(words, words))
    return Built(run, (p, *inputs))


@program("texts-packed-into-bits-by-chances-and-unpacked-again", GROUP)
def _packed(size: Size) -> Built:
    """This packs texts into as few bits as a model of words allows, unpacks them again and counts what came back wrong.

    It is compression by language models (Delétang, 2023; google-deepmind/language_modeling_is_compression, in JAX and haiku) with
    asymmetric numeral systems (Duda, 2013): chances become whole counts of 65536ths, and one whole number holds the text.
    """
    b, t, n, words = pick(size, (32, 157, 512, 6007), (6, 83, 96, 2003), (2, 7, 8, 17))
    dtype, total = half(size), 1 << 16

    def counted(logits):
        """This makes counts of words that sum to 65536, none of which is zero; the likeliest word takes the rest."""
        probs = jax.nn.softmax(logits, axis=-1)
        count = 1 + jnp.floor(probs * (total - words)).astype(jnp.int32)
        rest = total - jnp.sum(count, axis=-1, keepdims=True)
        likeliest = jnp.argmax(logits, axis=-1, keepdims=True)
        return count + jnp.where(jnp.arange(words) == likeliest, rest, 0)

    def states(p, text):
        """This reads the words before with a gated average."""
        x = p["table"][jnp.pad(text[:, :-1], ((0, 0), (1, 0)))].astype(jnp.float32)
        keep, new = jnp.split(dense(p["gates"], x.astype(dtype)).astype(jnp.float32), 2, axis=-1)
        keep = jax.nn.sigmoid(keep + 1.0)

        def join(one, two):
            return one[0] * two[0], one[1] * two[0] + two[1]

        y = lax.associative_scan(join, (keep, (1 - keep) * jnp.tanh(new)), axis=1)[1]
        return rms_norm(p["norm"], (x + y).astype(dtype))

    def run(p, text):
        logits = dense(p["head"], states(p, text)).astype(jnp.float32)
        count = counted(logits)
        own = jnp.take_along_axis(count, text[..., None], axis=-1)[..., 0].astype(jnp.uint32)
        below = jnp.sum(jnp.where(jnp.arange(words) < text[..., None], count, 0), axis=-1).astype(jnp.uint32)

        def pack(carry, now):
            """This goes backwards, so that what is packed last is unpacked first."""
            number, bits, used = carry
            f, c = now
            full = number >= (f << 16)
            at = jnp.where(full, used, t)
            bits = bits.at[jnp.arange(b), at].set(number & 0xFFFF, mode="drop")
            number = jnp.where(full, number >> 16, number)
            return (((number // f) << 16) + number % f + c, bits, used + full), None

        start = (jnp.full(b, 1 << 16, jnp.uint32), jnp.zeros((b, t), jnp.uint32), jnp.zeros(b, jnp.int32))
        (number, bits, used), _ = lax.scan(pack, start, (own.T, below.T), reverse=True)

        def unpack(carry, count):
            number, left = carry
            slot = (number & 0xFFFF).astype(jnp.int32)
            ends = jnp.cumsum(count, axis=-1)
            word = jnp.sum(ends <= slot[:, None], axis=-1)
            f = jnp.take_along_axis(count, word[:, None], axis=-1)[:, 0]
            c = jnp.take_along_axis(ends, word[:, None], axis=-1)[:, 0] - f
            number = f.astype(jnp.uint32) * (number >> 16) + (slot - c).astype(jnp.uint32)
            short_of = number < (1 << 16)
            more = jnp.take_along_axis(bits, jnp.maximum(left - 1, 0)[:, None], axis=-1)[:, 0]
            number = jnp.where(short_of, (number << 16) | more, number)
            return (number, left - short_of), word

        (end, left), back = lax.scan(unpack, (number, used), jnp.swapaxes(count, 0, 1))
        wrong = jnp.sum(text != back.T, axis=-1) + (end != (1 << 16)) + (left != 0)
        logp = jax.nn.log_softmax(logits, axis=-1)
        ideal = -jnp.sum(jnp.take_along_axis(logp, text[..., None], axis=-1)[..., 0], axis=-1) / np.log(2)
        spent = jnp.sum(16 - jnp.log2(own.astype(jnp.float32)), axis=-1)
        return wrong, ideal / t, spent / t, (spent - ideal) / ideal, jnp.mean(used.astype(jnp.float32)) * 16 / t

    p = {"table": normal(words, n, dtype=dtype), "norm": gain(n, dtype), "gates": dense_of(n, 2 * n, dtype)}
    p["head"] = dense_of(n, words, dtype)
    return Built(run, (p, integers(b, t, below=words)))


@program("speech-frame-told-code-by-code-by-a-small-model-after-a-large-one", GROUP)
def _frame(size: Size) -> Built:
    """This makes one frame of speech for many talks: a large model reads the past, a small one tells sixteen codes in turn.

    It is the pair of transformers of Moshi (Défossez, 2024) and of Sesame's CSM: each code has a head of its own, the small model
    keeps a cache of the frame only, and codes are drawn from the fifty best; codes of talks whose frame is known are forced.
    """
    b, n, h, few, wide, small, hs, small_wide, seen, codes, words = pick(
        size,
        (24, 2048, 32, 8, 5632, 1024, 8, 2816, 701, 16, 2051),
        (7, 320, 8, 2, 896, 160, 4, 448, 301, 8, 1027),
        (2, 16, 4, 2, 24, 8, 2, 12, 7, 3, 11),
    )
    dtype, big_depth, small_depth, best = half(size), 4, 3, min(50, words)

    def layer(q, x, cache, at, count):
        """This reads one state per talk [b, c] and writes its key and value at `at` [b]."""
        heads, groups, d = count
        y = rms_norm(q["norm1"], x)
        query = rotary((y @ q["q"]).reshape(b, 1, heads, d), at[:, None])
        key = rotary((y @ q["k"]).reshape(b, 1, groups, d), at[:, None])[:, 0]
        keys = cache[0].at[jnp.arange(b), at].set(key)
        values = cache[1].at[jnp.arange(b), at].set((y @ q["v"]).reshape(b, groups, d))
        query = query.reshape(b, groups, heads // groups, d)
        scores = jnp.einsum("bkgd,blkd->bkgl", query, keys).astype(jnp.float32) * d**-0.5
        scores = jnp.where(jnp.arange(keys.shape[1]) <= at[:, None, None, None], scores, -1e9)
        y = jnp.einsum("bkgl,blkd->bkgd", jax.nn.softmax(scores, axis=-1).astype(dtype), values)
        x = x + y.reshape(b, heads * d) @ q["o"]
        gate, up = jnp.split(rms_norm(q["norm2"], x) @ q["up"], 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ q["down"], (keys, values)

    def run(p, before, at, caches, heat, given, known, seed):
        x = jnp.sum(p["tables"][jnp.arange(codes), before], axis=1, dtype=jnp.float32).astype(dtype)
        fresh = []
        for q, cache in zip(p["big"], caches, strict=True):
            x, grown = layer(q, x, cache, at, (h, few, n // h))
            fresh.append(grown)
        x = rms_norm(p["norm"], x)
        heat = 0.7 + 0.4 * jax.nn.sigmoid(heat)

        def tell(carry, now):
            state, small_caches = carry
            k, head, table, key, told = now
            y, kept = (state @ p["bridge"]), []
            for q, cache in zip(p["small"], small_caches, strict=True):
                y, grown = layer(q, y, cache, jnp.full(b, k), (hs, hs, small // hs))
                kept.append(grown)
            logits = (rms_norm(p["small_norm"], y) @ head).astype(jnp.float32) / heat[:, None]
            top, which = lax.top_k(logits, best)
            drawn_at = jnp.argmax(top + jax.random.gumbel(key, top.shape), axis=-1)[:, None]
            code = jnp.where(known, told, jnp.take_along_axis(which, drawn_at, axis=-1)[:, 0])
            logp = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), code[:, None], axis=-1)[:, 0]
            return (table[code], kept), (code, logp, jax.nn.logsumexp(logits, axis=-1))

        empty = jnp.zeros((b, codes, hs, small // hs), dtype)
        inputs = (jnp.arange(codes), p["heads"], p["tables"], jax.random.split(jax.random.key(seed), codes), given.T)
        (_, _), (code, logp, whole) = lax.scan(tell, (x, [(empty, empty)] * small_depth), inputs)
        return code.T, jnp.sum(logp, axis=0), whole, x, fresh

    def weights(c, heads, groups, hidden):
        d = c // heads
        q = {"norm1": gain(c, dtype), "norm2": gain(c, dtype), "q": weight(c, c, dtype=dtype)}
        q |= {k: weight(c, groups * d, dtype=dtype) for k in ("k", "v")} | {"o": weight(c, c, dtype=dtype)}
        return q | {"up": weight(c, 2 * hidden, dtype=dtype), "down": weight(hidden, c, dtype=dtype)}

    p = {"tables": normal(codes, words, n, dtype=dtype, scale=0.3), "bridge": weight(n, small, dtype=dtype)}
    p |= {"heads": weight(codes, small, words, dtype=dtype), "norm": gain(n, dtype), "small_norm": gain(small, dtype)}
    p |= {"big": [weights(n, h, few, wide) for _ in range(big_depth)]}
    p |= {"small": [weights(small, hs, hs, small_wide) for _ in range(small_depth)]}
    caches = [tuple(normal(b, seen, few, n // h, dtype=dtype) for _ in range(2)) for _ in range(big_depth)]
    inputs = (integers(b, codes, below=words), integers(b, below=seen), caches, normal(b))
    inputs += (integers(b, codes, below=words), booleans(b), integers(below=1000))
    return Built(run, (p, *inputs))
