"""Shared memories, angles for keys, pairs of keys, blocks revealed by sureness and words that loop: their author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program
from benchmarks.workloads.thirty_fifth_parts import ends_of, stack_of
from benchmarks.workloads.twenty_fifth_parts import attention, layer_norm, rms_norm, rotary

GROUP = "forty-second"


def grouped(query, key, value, seen):
    """This lets queries [b, q, h, d] look at keys [b, k, g, d] of few heads; seen [b, q, k] tells which."""
    b, q, h, d = query.shape
    query = query.reshape(b, q, key.shape[2], -1, d)
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", query, key, preferred_element_type=jnp.float32) * d**-0.5
    probs = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e9), axis=-1).astype(value.dtype)
    return jnp.einsum("bgrqk,bkgd->bqgrd", probs, value).reshape(b, q, h * d)


@program("sambay-upper-layers-gate-the-memory-of-one-selective-layer-and-share-one-cache-decode", GROUP)
def _gated_memory(size: Size) -> Built:
    """This program writes next words where upper layers reuse what one lower layer kept, by gates and by one shared cache.

    It is SambaY (Ren, 2025; microsoft/ArchScale), as in Phi-4-mini-flash: below, selective states and windows of attention take
    turns; one layer then attends to all words; above, gated memory units and looks into that layer's cache take turns.
    """
    b, past, window, n, h, groups, d, wide, states, taps, rank, below, above, words = pick(
        size,
        (16, 4096, 512, 2560, 40, 20, 64, 10240, 16, 4, 160, 2, 2, 200064),
        (2, 256, 64, 192, 6, 2, 32, 512, 8, 4, 12, 2, 2, 8001),
        (2, 6, 4, 8, 2, 2, 4, 12, 3, 3, 2, 2, 2, 11),
    )
    dtype, inner = half(size), 2 * n

    def norm(scale, x):
        """This is a norm without a shift."""
        return layer_norm({"scale": scale, "shift": jnp.zeros((), dtype)}, x)

    def feed(q, x):
        """This is a feed-forward part."""
        gate, value = jnp.split(norm(q["norm_up"], x) @ q["up"], 2, axis=-1)
        return x + (jax.nn.silu(gate) * value) @ q["down"]

    def selective(q, x, recent, state):
        """This moves the states of one selective layer; it also gives its memory before the gate."""
        y, gate = jnp.split(norm(q["norm_state"], x) @ q["enter"], 2, axis=-1)
        recent = jnp.concatenate([recent, y[:, None]], axis=1)
        y = jax.nn.silu(jnp.einsum("bki,ki->bi", recent, q["filter"]) + q["filter_shift"])
        parts = (y @ q["parts"]).astype(jnp.float32)
        low, give, take = jnp.split(parts, [rank, rank + states], axis=-1)
        step = jax.nn.softplus(low @ q["widen"].astype(jnp.float32) + q["step"].astype(jnp.float32))
        y = y.astype(jnp.float32)
        fade = jnp.exp(-step[..., None] * jnp.exp(q["decay"].astype(jnp.float32)))
        state = fade * state + (step * y)[..., None] * give[:, None]
        memory = (jnp.einsum("bis,bs->bi", state, take) + q["skip"].astype(jnp.float32) * y).astype(dtype)
        return feed(q, x + (memory * jax.nn.silu(gate)) @ q["leave"]), memory, recent[:, 1:], state

    def attend(q, x, key, value, slot, seen):
        """This writes one row into caches at its slot and looks at all that is seen."""
        row = jnp.arange(b)
        rows = (norm(q["norm_look"], x) @ q["qkv"]).reshape(b, h + 2 * groups, d)
        query, fresh, new = jnp.split(rows, [h, h + groups], axis=1)
        key, value = key.at[row, slot].set(fresh), value.at[row, slot].set(new)
        return feed(q, x + grouped(query[:, None], key, value, seen)[:, 0] @ q["out"]), key, value

    def run(p, lower, middle, keys, values, word, count):
        """This gives the next words, the best five, entropies, sizes of memories, and new states and caches."""
        slot = count % window
        near = ((jnp.arange(window) <= slot[:, None]) | (count[:, None] >= window))[:, None]
        far = (jnp.arange(past) <= count[:, None])[:, None]

        def pair_below(x, each):
            """This is a selective layer and a layer with a window."""
            q, look, recent, state, key, value = each
            x, _, recent, state = selective(q, x, recent, state)
            x, key, value = attend(look, x, key, value, slot, near)
            return x, (recent, state, key, value)

        def pair_above(x, each):
            """This is a gated memory unit and a look into the shared cache."""
            q, look = each
            x = x + (memory * jax.nn.silu(norm(q["norm_state"], x) @ q["enter"])) @ q["leave"]
            x = feed(q, x)
            query = (norm(look["norm_look"], x) @ look["query"]).reshape(b, 1, h, d)
            return feed(look, x + grouped(query, keys, values, far)[:, 0] @ look["out"]), None

        x, lower = lax.scan(pair_below, p["table"][word], (p["states"], p["looks"], *lower))
        x, memory, *middle = selective(p["state"], x, *middle)
        x, keys, values = attend(p["look"], x, keys, values, count, far)
        x, _ = lax.scan(pair_above, x, (p["gates"], p["reads"]))
        logp = jax.nn.log_softmax((norm(p["norm"], x) @ p["head"]).astype(jnp.float32), axis=-1)
        strength = jnp.sqrt(jnp.mean(jnp.square(memory.astype(jnp.float32)), axis=-1))
        entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
        fresh = keys[jnp.arange(b), count], values[jnp.arange(b), count]
        return jnp.argmax(logp, axis=-1), lax.top_k(logp, 5), entropy, strength, lower, middle, fresh

    def layers(depth, **shapes):
        """This describes layers with their feed-forward parts."""
        many = {"norm_up": (n,), "up": (n, 2 * wide), "down": (wide, n)} | shapes
        told = stack_of(depth, dtype, **many)
        if "step" in told:
            told["step"] = normal(depth, inner, dtype=dtype, scale=0.5, offset=-3.0)
            told["decay"] = normal(depth, inner, states, dtype=dtype, scale=0.5, offset=1.0)
        return told

    def first(tree):
        """This describes one layer of a stack."""
        return {k: Random(r.shape[1:], r.dtype, r.scale, r.offset) for k, r in tree.items()}

    select = {"norm_state": (n,), "enter": (n, 2 * inner), "filter": (taps, inner), "filter_shift": (inner,)}
    select |= {"parts": (inner, rank + 2 * states), "widen": (rank, inner), "step": (inner,), "skip": (inner,)}
    select |= {"decay": (inner, states), "leave": (inner, n)}
    look = {"norm_look": (n,), "qkv": (n, (h + 2 * groups) * d), "out": (h * d, n)}
    p = ends_of(words, n, dtype) | {"states": layers(below, **select), "looks": layers(below, **look)}
    p |= {"state": first(layers(1, **select)), "look": first(layers(1, **look))}
    p["gates"] = layers(above, norm_state=(n,), enter=(n, inner), leave=(inner, n))
    p["reads"] = layers(above, norm_look=(n,), query=(n, h * d), out=(h * d, n))
    recent, state = normal(below, b, taps - 1, inner, dtype=dtype), normal(below, b, inner, states, scale=0.3)
    lower = recent, state, *(normal(below, b, window, groups, d, dtype=dtype),) * 2
    middle = tuple(Random(r.shape[1:], r.dtype, r.scale) for r in (recent, state))
    cache = normal(b, past, groups, d, dtype=dtype)
    return Built(run, (p, lower, middle, cache, cache, integers(b, below=words), integers(b, below=past)))


@program("polarquant-keys-and-values-kept-as-packed-angles-of-angles-and-one-length-per-sixteen-decode", GROUP)
def _angles(size: Size) -> Built:
    """This program writes next words while its cache keeps directions as small numbers for angles, and few lengths.

    It is PolarQuant (Han, 2025) in Llama 3.1: rows are turned by random signs and Hadamard's matrix, pairs become a length and an
    angle, lengths pair again three times, and angles keep four bits at first and two bits above, packed into 46 bits per sixteen.
    """
    b, past, n, h, groups, d, wide, depth, words = pick(
        size,
        (8, 4096, 4096, 32, 8, 128, 14336, 2, 128256),
        (2, 256, 256, 8, 2, 32, 704, 2, 4001),
        (2, 6, 16, 4, 2, 16, 24, 2, 11),
    )
    dtype, lengths = half(size), d // 16
    turn = np.ones((1, 1))
    while len(turn) < d:
        turn = np.block([[turn, turn], [turn, -turn]])
    turn = jnp.asarray(turn * d**-0.5, dtype)
    angle = np.linspace(0, np.pi / 2, 20001)[1:-1]
    tables = [(np.arange(16) + 0.5) * np.pi / 8]
    for level in (1, 2, 3):
        mass = np.sin(2 * angle) ** (2**level - 1)
        part = np.minimum(np.cumsum(mass) / np.sum(mass) * 4, 3.999).astype(int)
        tables.append(np.array([np.sum((angle * mass)[part == k]) / np.sum(mass[part == k]) for k in range(4)]))
    edges = [jnp.asarray((t[1:] + t[:-1]) / 2, jnp.float32) for t in tables]
    tables = [jnp.asarray(np.stack([np.cos(t), np.sin(t)], axis=-1), dtype) for t in tables]

    def packed(x):
        """This turns rows [..., d] into words of angles, small words of angles above, and lengths."""
        x = x.astype(jnp.float32).reshape(*x.shape[:-1], lengths, 16)
        codes = []
        for k in range(4):
            x = x.reshape(*x.shape[:-1], -1, 2)
            way = jnp.arctan2(x[..., 1], x[..., 0])
            way = jnp.mod(way, 2 * jnp.pi) if k == 0 else way
            codes.append(jnp.sum(way[..., None] > edges[k], axis=-1))
            x = jnp.sqrt(jnp.sum(x**2, axis=-1))
        low = jnp.sum(codes[0].astype(jnp.uint32) << (4 * jnp.arange(8, dtype=jnp.uint32)), axis=-1, dtype=jnp.uint32)
        rest = jnp.concatenate(codes[1:], axis=-1).astype(jnp.uint32) << (2 * jnp.arange(7, dtype=jnp.uint32))
        return low, jnp.sum(rest, axis=-1, dtype=jnp.uint32).astype(jnp.uint16), x[..., 0].astype(dtype)

    def opened(low, rest, x):
        """This makes rows [..., d] of packed angles and lengths."""
        rest = (rest[..., None].astype(jnp.uint32) >> (2 * jnp.arange(7, dtype=jnp.uint32))) & 3
        codes = [(low[..., None] >> (4 * jnp.arange(8, dtype=jnp.uint32))) & 15, *jnp.split(rest, [4, 6], axis=-1)]
        x = x[..., None]
        for k in (3, 2, 1, 0):
            x = (x[..., None] * tables[k][codes[k]]).reshape(*x.shape[:-1], -1)
        return x.reshape(*x.shape[:-2], d)

    def run(p, sign, keys, values, word, count, seed):
        """This gives drawn words, their surprises, the best five, errors of new rows, and packed new rows."""
        place, row = count[:, None], jnp.arange(b)
        seen = (jnp.arange(past) <= place)[:, None]
        sign = jnp.where(sign > 0, 1, -1).astype(dtype)

        def layer(x, carried):
            """This is one layer."""
            q, key, value = carried
            y = rms_norm(q["norm1"], x)
            query, fresh, new = ((y @ q[k]).reshape(b, 1, -1, d) for k in ("q", "k", "v"))
            query, fresh, new = ((z * sign) @ turn for z in (rotary(query, place), rotary(fresh, place), new))
            told, kept = [], []
            for rows, old in ((fresh, key), (new, value)):
                small = packed(rows[:, 0])
                cache = [o.at[row, count].set(z) for o, z in zip(old, small, strict=True)]
                error = jnp.mean(jnp.square((opened(*small) - rows[:, 0]).astype(jnp.float32)), axis=(1, 2))
                told.append(error / jnp.mean(jnp.square(rows[:, 0].astype(jnp.float32)), axis=(1, 2)))
                kept.append((opened(*cache), small))
            y = grouped(query, kept[0][0], kept[1][0], seen).reshape(b, h, d)
            x = x + ((y @ turn.T) * sign).reshape(b, h * d) @ q["out"]
            y = rms_norm(q["norm2"], x)
            x = x + (jax.nn.silu(y @ q["gate"]) * (y @ q["up"])) @ q["down"]
            return x, (jnp.stack(told), kept[0][1], kept[1][1])

        x, (error, key, value) = lax.scan(layer, p["table"][word], (p["layers"], keys, values))
        logp = jax.nn.log_softmax((rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32), axis=-1)
        drawn = jax.random.categorical(jax.random.key(seed), logp, axis=-1)
        surprise = -jnp.take_along_axis(logp, drawn[:, None], axis=-1)[:, 0]
        return drawn, surprise, lax.top_k(logp, 5), error, key, value

    shapes = {"norm1": (n,), "norm2": (n,), "q": (n, h * d), "k": (n, groups * d), "v": (n, groups * d)}
    shapes |= {"out": (h * d, n), "gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    p = ends_of(words, n, dtype) | {"layers": stack_of(depth, dtype, **shapes)}
    shape = depth, b, past, groups, lengths
    cache = (
        Random(shape, jnp.dtype(jnp.uint32), below=2**32),
        Random(shape, jnp.dtype(jnp.uint16), below=2**14),
        normal(*shape, dtype=dtype, scale=0.4, offset=4.0),
    )
    inputs = integers(b, below=words), integers(b, below=past), integers(below=1000)
    return Built(run, (p, normal(d), cache, cache, *inputs))


@program("two-simplicial-each-word-looks-at-pairs-of-earlier-words-every-fourth-layer-scored-prompts", GROUP)
def _simplicial(size: Size) -> Built:
    """This program scores prompts with layers in which some look at pairs of earlier words at once.

    It is the 2-simplicial attention of Roy (2025, "Fast and Simplex"): scores are sums of triple products of a query and two keys
    within a long and a short window, values are products of two rows, and such a layer follows three usual ones.
    """
    b, long, first, second, n, h, groups, d, wide, rounds, words = pick(
        size,
        (1, 2048, 64, 16, 2048, 32, 1, 64, 5632, 2, 32000),
        (1, 192, 16, 8, 192, 6, 1, 32, 512, 1, 4001),
        (1, 7, 3, 2, 8, 2, 1, 4, 12, 2, 11),
    )
    dtype = half(size)

    def run(p, word, short):
        """This gives surprises of words, how sharp looks at pairs are, how far back both are, and means of texts."""
        place = jnp.broadcast_to(jnp.arange(long), (b, long))
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((long, long), bool)), (b, long, long))
        one, two = (jnp.arange(long)[:, None] - jnp.arange(k) for k in (first, second))
        there = (two[:, :, None] >= 0) & (one[:, None] >= 0)

        def feed(q, x):
            """This is a feed-forward part."""
            y = rms_norm(q["norm2"], x)
            return x + (jax.nn.silu(y @ q["gate"]) * (y @ q["up"])) @ q["down"]

        def usual(x, q):
            """This is a layer with usual attention."""
            rows = (rms_norm(q["norm1"], x) @ q["qkv"]).reshape(b, long, -1, d)
            query, key, value = jnp.split(rows, [h, h + groups], axis=2)
            y = grouped(rotary(query, place), rotary(key, place), value, causal)
            return feed(q, x + y @ q["out"]), None

        def simplicial(x, q):
            """This is a layer that looks at pairs."""
            rows = (rms_norm(q["norm1"], x) @ q["qkv"]).reshape(b, long, h + 4, d)
            query = rms_norm(q["norm_q"], rows[:, :, :h])
            key, other = (rms_norm(q["norm_k"], rows[:, :, h + k]) for k in (0, 1))
            value, more = rows[:, :, h + 2], rows[:, :, h + 3]
            key, value = (z[:, jnp.maximum(one, 0)] for z in (key, value))
            other, more = (z[:, jnp.maximum(two, 0)] for z in (other, more))
            joined = query[:, :, :, None] * other[:, :, None]
            scores = jnp.einsum("bihkd,bijd->bihkj", joined, key, preferred_element_type=jnp.float32) * d**-0.5
            scores = jnp.where(there[None, :, None], scores, -1e9)
            share = jax.nn.softmax(scores.reshape(b, long, h, -1), axis=-1).reshape(scores.shape)
            seen = jnp.einsum("bihkj,bijd->bihkd", share.astype(dtype), value)
            y = jnp.sum((seen * more[:, :, None]).astype(jnp.float32), axis=3).astype(dtype)
            sharp = jnp.mean(jnp.max(share, axis=(3, 4)), axis=(0, 1))
            back = (
                jnp.einsum("bihkj,j->h", share, jnp.arange(first)),
                jnp.einsum("bihkj,k->h", share, jnp.arange(second)),
            )
            return feed(q, x + y.reshape(b, long, h * d) @ q["out"]), (sharp, jnp.stack(back) / (b * long))

        def four(x, q):
            """These are three usual layers and one that looks at pairs."""
            x, _ = lax.scan(usual, x, q["usual"])
            return simplicial(x, q["pairs"])

        x, (sharp, back) = lax.scan(four, p["table"][word], p["layers"])
        x = rms_norm(p["norm"], x)
        logp = jax.nn.log_softmax((x @ p["head"]).astype(jnp.float32), axis=-1)
        real = place < (long - short)[:, None]
        surprise = -jnp.take_along_axis(logp[:, :-1], word[:, 1:, None], axis=-1)[..., 0] * real[:, 1:]
        mean = jnp.sum(x.astype(jnp.float32) * real[..., None], axis=1) / jnp.sum(real, axis=1)[:, None]
        return surprise, jnp.sum(surprise, axis=1) / jnp.sum(real[:, 1:], axis=1), sharp, back, mean

    shapes = {"norm1": (n,), "norm2": (n,), "qkv": (n, (h + 2 * groups) * d), "out": (h * d, n)}
    shapes |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    usual = {k: Random((rounds, *r.shape), r.dtype, r.scale, r.offset) for k, r in stack_of(3, dtype, **shapes).items()}
    pairs = stack_of(rounds, dtype, **(shapes | {"qkv": (n, (h + 4) * d), "norm_q": (d,), "norm_k": (d,)}))
    p = ends_of(words, n, dtype) | {"layers": {"usual": usual, "pairs": pairs}}
    return Built(run, (p, integers(b, long, below=words), integers(b, below=long // 2)))


@program("fast-dllm-blocks-of-hidden-words-revealed-where-sure-with-caches-on-both-sides-while", GROUP)
def _revealed(size: Size) -> Built:
    """This program fills in hidden words block by block, and reveals at once all words of which it is sure.

    It is Fast-dLLM (Wu, 2025; NVlabs/Fast-dLLM) for LLaDA: one pass over the whole text fills caches, which then stand for the
    words before and after a block, and short passes over the block go on until nothing in it is hidden.
    """
    b, past, block, blocks, few, n, h, wide, depth, words = pick(
        size,
        (4, 448, 32, 2, 4, 2048, 16, 5632, 4, 126464),
        (2, 32, 8, 2, 2, 192, 6, 512, 2, 4001),
        (2, 4, 3, 2, 1, 8, 2, 12, 2, 11),
    )
    dtype, d, long, hidden = half(size), n // h, past + block * blocks, words - 1

    def run(p, prompt, bar):
        """This gives texts, when each word was revealed and how sure that was, passes by block, and surprises at the end."""
        bar = 0.3 + 0.4 * jax.nn.sigmoid(bar)
        text = jnp.concatenate([prompt % hidden, jnp.full((b, block * blocks), hidden)], axis=1)

        def passed(word, start, caches):
            """This is a pass over words from a place on; caches give all other words. It gives logits and new caches."""
            place = jnp.broadcast_to(start + jnp.arange(word.shape[1]), word.shape)

            def layer(x, each):
                """This is one layer, in which all words see each other."""
                q, key, value = each
                y = rms_norm(q["norm1"], x)
                query, fresh, new = jnp.split((y @ q["qkv"]).reshape(*word.shape, 3 * h, d), 3, axis=2)
                key = lax.dynamic_update_slice(key, rotary(fresh, place), (0, start, 0, 0))
                value = lax.dynamic_update_slice(value, new, (0, start, 0, 0))
                x = x + attention(rotary(query, place), key, value).reshape(*word.shape, n) @ q["out"]
                y = rms_norm(q["norm2"], x)
                return x + (jax.nn.silu(y @ q["gate"]) * (y @ q["up"])) @ q["down"], (key, value)

            x, caches = lax.scan(layer, p["table"][word], (p["layers"], *caches))
            return x, caches

        def reveal(word, x):
            """This puts words where the model is surest of them; it also tells how sure it was."""
            logits = (rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32)
            chance = jax.nn.softmax(logits.at[..., hidden].set(-1e9), axis=-1)
            sure = jnp.where(word == hidden, jnp.max(chance, axis=-1), -1.0)
            rank = jnp.sum(sure[:, None] > sure[..., None], axis=-1)
            chosen = (word == hidden) & ((rank < few) | (sure > bar[:, None]))
            return jnp.where(chosen, jnp.argmax(chance, axis=-1), word), chosen, sure

        def one_block(text, number):
            """This reveals one block."""
            start = past + number * block
            empty = (jnp.zeros((depth, b, long, h, d), dtype),) * 2
            x, caches = passed(text, 0, empty)
            word = lax.dynamic_slice(text, (0, start), (b, block))
            word, chosen, sure = reveal(word, lax.dynamic_slice(x, (0, start, 0), (b, block, n)))

            def going(carry):
                """This asks whether any word is hidden."""
                return jnp.any(carry[0] == hidden)

            def once(carry):
                """This is a short pass over the block."""
                word, when, surest, count = carry
                x, _ = passed(word, start, caches)
                word, chosen, sure = reveal(word, x)
                return word, jnp.where(chosen, count, when), jnp.where(chosen, sure, surest), count + 1

            begin = word, jnp.zeros((b, block), jnp.int32), jnp.where(chosen, sure, 0.0), jnp.int32(1)
            word, when, surest, count = lax.while_loop(going, once, begin)
            return lax.dynamic_update_slice(text, word, (0, start)), (when, surest, count)

        text, (when, surest, count) = lax.scan(one_block, text, jnp.arange(blocks))
        x, _ = passed(text, 0, (jnp.zeros((depth, b, long, h, d), dtype),) * 2)
        logp = jax.nn.log_softmax((rms_norm(p["norm"], x[:, past:]) @ p["head"]).astype(jnp.float32), axis=-1)
        surprise = -jnp.take_along_axis(logp, text[:, past:, None], axis=-1)[..., 0]
        when, surest = (jnp.swapaxes(z, 0, 1).reshape(b, -1) for z in (when, surest))
        return text, when, surest, count, surprise

    shapes = {"norm1": (n,), "norm2": (n,), "qkv": (n, 3 * n), "out": (n, n)}
    shapes |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    p = ends_of(words, n, dtype) | {"layers": stack_of(depth, dtype, **shapes)}
    p["head"] = normal(n, words, dtype=dtype, scale=5 * n**-0.5)
    return Built(run, (p, integers(b, past, below=words), normal(b)))


@program("mixture-of-recursions-words-chosen-to-go-on-turn-again-through-one-shared-block-scored-prompts", GROUP)
def _recursions(size: Size) -> Built:
    """This program scores prompts with a shared block of layers through which words go once, twice or three times.

    It is Mixture-of-Recursions (Bae, 2025; raymin0223/mixture_of_recursions) with choices by the block: fewer words are kept at
    each turn, words that went out never come back, and those kept see only each other in that turn.
    """
    b, long, n, h, groups, d, wide, depth, words = pick(
        size,
        (4, 1024, 1536, 24, 8, 64, 4096, 3, 49152),
        (2, 96, 192, 6, 2, 32, 512, 2, 4001),
        (2, 6, 8, 2, 2, 4, 12, 2, 11),
    )
    dtype, turns = half(size), 3
    sizes = [long * (turns - k) // turns for k in range(turns)]

    def layer(x, q, place):
        """This is one layer for words at their places."""
        rows = (rms_norm(q["norm1"], x) @ q["qkv"]).reshape(*x.shape[:2], -1, d)
        query, key, value = jnp.split(rows, [h, h + groups], axis=2)
        seen = place[:, None] <= place[..., None]
        x = x + grouped(rotary(query, place), rotary(key, place), value, seen) @ q["out"]
        y = rms_norm(q["norm2"], x)
        return x + (jax.nn.silu(y @ q["gate"]) * (y @ q["up"])) @ q["down"]

    def run(p, word, short):
        """This gives surprises of words, how often words turned, gates, losses of routers, and surprises by turns."""
        row, place = jnp.arange(b)[:, None], jnp.broadcast_to(jnp.arange(long), (b, long))
        x = layer(p["table"][word], p["first"], place)
        at, turned, gates, losses = place, jnp.zeros((b, long), jnp.int32), jnp.zeros((b, long)), []
        for k, few in enumerate(sizes):
            kept = x[row, at]
            logits = (kept @ p["router"][k]).astype(jnp.float32)
            _, which = lax.top_k(logits, few)
            which = jnp.sort(which, axis=1)
            goes = jnp.zeros(at.shape).at[row, which].set(1.0)
            losses.append(jnp.mean(jax.nn.softplus(logits) - goes * logits))
            at, gate = (jnp.take_along_axis(z, which, axis=1) for z in (at, jax.nn.sigmoid(logits)))
            kept = jnp.take_along_axis(kept, which[..., None], axis=1)
            told, _ = lax.scan(lambda y, q, at=at: (layer(y, q, at), None), kept, p["shared"])
            x = x.at[row, at].add((told - kept) * gate[..., None].astype(dtype))
            turned, gates = turned.at[row, at].add(1), gates.at[row, at].add(gate)
        x = rms_norm(p["norm"], layer(x, p["last"], place))
        logp = jax.nn.log_softmax((x @ p["head"]).astype(jnp.float32), axis=-1)
        real = (place < (long - short)[:, None])[:, 1:]
        surprise = -jnp.take_along_axis(logp[:, :-1], word[:, 1:, None], axis=-1)[..., 0] * real
        part = jax.nn.one_hot(turned[:, :-1] - 1, turns) * real[..., None]
        by_turns = jnp.sum(surprise[..., None] * part, axis=(0, 1)) / jnp.maximum(jnp.sum(part, axis=(0, 1)), 1)
        return surprise, turned, gates, jnp.stack(losses), by_turns

    shapes = {"norm1": (n,), "norm2": (n,), "qkv": (n, (h + 2 * groups) * d), "out": (h * d, n)}
    shapes |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    single = {k: Random(r.shape[1:], r.dtype, r.scale, r.offset) for k, r in stack_of(1, dtype, **shapes).items()}
    p = ends_of(words, n, dtype) | {"shared": stack_of(depth, dtype, **shapes), "first": single, "last": single}
    p["router"] = normal(turns, n, dtype=dtype, scale=n**-0.5)
    return Built(run, (p, integers(b, long, below=words), integers(b, below=long // 2)))
