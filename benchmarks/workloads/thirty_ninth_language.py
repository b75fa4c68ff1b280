"""Hashed letters, remembered keys, weighed drafts, butterfly turns and named spans: their author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.thirty_fifth_parts import ends_of, stack_of
from benchmarks.workloads.twenty_fifth_parts import attention, dense, dense_of, layer_norm, norm_of, rms_norm, rotary

GROUP = "thirty-ninth"


@program("canine-hashed-code-points-local-attention-strided-then-upsampled-letter-tags", GROUP)
def _canine(size: Size) -> Built:
    """This program tags each letter of texts without any vocabulary: letters are looked up in several hashed tables.

    It is CANINE (Clark, 2022; google-research/language): a layer attends inside blocks of letters, every fourth place goes through
    a deep stack, and its results return to all letters, where a last layer looks from letters at everything.
    """
    b, t, n, h, block, rate, buckets, depth, tags = pick(
        size,
        (4, 2048, 768, 12, 128, 4, 16384, 4, 25),
        (1, 256, 160, 5, 32, 4, 1000, 4, 9),
        (1, 16, 8, 2, 8, 4, 7, 4, 3),
    )
    dtype, d = half(size), n // h
    primes = np.array([31, 43, 59, 61, 73, 97, 103, 113])
    hashes = 4 if size == "tiny" else len(primes)

    def looked(tables, letter):
        """This joins what each table says about a letter."""
        place = (letter[..., None] + 1) * primes[:hashes] % buckets
        return tables[jnp.arange(hashes), place].reshape(*letter.shape, n)

    def layer(q, x, y, mask):
        """This is one layer of an encoder with norms after residuals: x [..., length, n] looks at y."""
        query = dense(q["q"], x).reshape(*x.shape[:-1], h, d)
        key, value = (dense(q[k], y).reshape(*y.shape[:-1], h, d) for k in ("k", "v"))
        x = layer_norm(q["norm1"], x + dense(q["out"], attention(query, key, value, mask).reshape(x.shape)))
        return layer_norm(q["norm2"], x + dense(q["down"], jax.nn.gelu(dense(q["up"], x))))

    def strided(q, x, stride):
        """This convolves letters with filters of four and a stride."""
        how = {"window_strides": (stride,), "padding": "SAME", "dimension_numbers": ("NWC", "WIO", "NWC")}
        return lax.conv_general_dilated(x, q["w"], **how) + q["b"]

    def run(p, letter, short, tag):
        """This gives the loss of tags by texts, the most probable tags, confusions, and the first state of the stack."""
        real = jnp.arange(t) < t - short[:, None]
        letter = jnp.where(real, letter, 0)
        x = looked(p["tables"], letter) + p["places"] + p["kind"]
        x = layer_norm(p["norm"], x)
        split = x.reshape(b, t // block, block, n)
        near = real.reshape(b, t // block, 1, 1, block)
        letters = layer(p["first"], split, split, near).reshape(b, t, n)

        few = jax.nn.gelu(strided(p["squeeze"], letters, rate))
        few = layer_norm(p["squeezed"], jnp.concatenate([letters[:, :1], few[:, :-1]], axis=1))
        seen = real[:, ::rate][:, None, None]
        few, _ = lax.scan(lambda x, q: (layer(q, x, x, seen), None), few, p["layers"])

        wide = jnp.concatenate([letters, jnp.repeat(few, rate, axis=1)], axis=-1)
        wide = layer_norm(p["widened"], jax.nn.gelu(strided(p["widen"], wide, 1)))
        wide = layer(p["last"], wide, wide, real[:, None, None])
        logp = jax.nn.log_softmax(dense(p["head"], wide).astype(jnp.float32), axis=-1)
        surprise = -jnp.take_along_axis(logp, tag[..., None], axis=-1)[..., 0]
        told = jnp.argmax(logp, axis=-1)
        confused = jnp.zeros((tags, tags), jnp.int32).at[tag, told].add(real)
        loss = jnp.sum(jnp.where(real, surprise, 0.0), axis=1) / jnp.sum(real, axis=1)
        return loss, told, confused, jnp.tanh(dense(p["pool"], few[:, 0]))

    def layer_of(*many):
        """This describes one layer, or a stack."""
        shapes = {"q": (n, n), "k": (n, n), "v": (n, n), "out": (n, n), "up": (n, 4 * n), "down": (4 * n, n)}
        parts = {k: dense_of(*v, dtype) for k, v in shapes.items()} | {f"norm{k}": norm_of(n, dtype) for k in (1, 2)}
        leaf = {"is_leaf": lambda r: hasattr(r, "offset")}
        how = {"dtype": dtype}
        return jax.tree.map(lambda r: normal(*many, *r.shape, scale=r.scale, offset=r.offset, **how), parts, **leaf)

    p = {"tables": normal(hashes, buckets, n // hashes, dtype=dtype), "places": normal(t, n, dtype=dtype, scale=0.3)}
    p |= {"kind": normal(n, dtype=dtype, scale=0.3), "layers": layer_of(depth), "first": layer_of(), "last": layer_of()}
    for name, i in (("squeeze", n), ("widen", 2 * n)):
        p[name] = {"w": normal(4, i, n, dtype=dtype, scale=(4 * i) ** -0.5), "b": normal(n, dtype=dtype, scale=0.1)}
    p |= {k: norm_of(n, dtype) for k in ("norm", "squeezed", "widened")}
    p |= {"head": dense_of(n, tags, dtype), "pool": dense_of(n, n, dtype)}
    return Built(run, (p, integers(b, t, below=65000), integers(b, below=t // 2), integers(b, t, below=tags)))


@program("memorizing-transformer-nearest-keys-of-past-segments-gated-scored-segment", GROUP)
def _memorizing(size: Size) -> Built:
    """This program reads a segment of a long text, and one layer also looks at the nearest of many remembered keys.

    It is the memorizing transformer (Wu, 2022; lucidrains/memorizing-transformers-pytorch): keys have length one, each head takes
    its nearest memories by top-k, a learned gate mixes them with the segment, and the segment is then written over the oldest ones.
    """
    b, t, past, memory, near, n, h, d, wide, depth, words = pick(
        size,
        (2, 384, 384, 4096, 32, 1024, 8, 128, 4096, 2, 32128),
        (1, 64, 64, 640, 16, 192, 4, 48, 512, 2, 8001),
        (1, 4, 4, 12, 3, 8, 2, 4, 12, 2, 11),
    )
    dtype, kinds = half(size), 32

    def unit(x):
        """This gives the last axis length one."""
        y = x.astype(jnp.float32)
        return (y * lax.rsqrt(jnp.sum(y**2, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)

    away = np.arange(t)[:, None] + past - np.arange(past + t)
    far = 16 + (np.log(np.maximum(away, 1) / 16) / np.log((past + t) / 16 + 1.01) * 16).astype(np.int32)
    bucket = jnp.asarray(np.where(away < 16, np.maximum(away, 0), np.minimum(far, kinds - 1)), jnp.int32)

    def parts(q, x):
        """This makes queries and keys of length one, and values [b, t, h, d]."""
        query, key, value = jnp.split((rms_norm(q["norm1"], x) @ q["qkv"]).reshape(b, t, 3 * h, d), 3, axis=2)
        return unit(query), unit(key), value

    def near_words(q, query, key, value, kept):
        """This attends to the segment and the one before it, with a bias by distance."""
        key, value = (jnp.concatenate([old, new], axis=1) for old, new in zip(kept, (key, value), strict=True))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
        scores = scores * jnp.exp(q["heat"].astype(jnp.float32))[:, None, None]
        scores = scores + jnp.moveaxis(q["bias"].astype(jnp.float32)[bucket], -1, 0)
        probs = jax.nn.softmax(jnp.where(away >= 0, scores, -1e9), axis=-1).astype(dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", probs, value)

    def feed_forward(q, x):
        """This is the gated layer."""
        y = rms_norm(q["norm2"], x)
        return x + (jax.nn.gelu(y @ q["gate"]) * (y @ q["up"])) @ q["down"]

    def plain(x, carried):
        """This is one layer without memory."""
        q, kept = carried
        query, key, value = parts(q, x)
        x = x + near_words(q, query, key, value, kept).reshape(b, t, h * d) @ q["out"]
        return feed_forward(q, x), (key, value)

    def run(p, text, kept, keys, values, filled, at):
        """This gives surprises of words, keys and values for the next segment, new memories, and shares of old words."""
        x, before = lax.scan(plain, p["table"][text[:, :-1]], (p["below"], kept["below"]))
        q = p["middle"]
        query, key, value = parts(q, x)
        near_out = near_words(q, query, key, value, kept["middle"])
        scores = jnp.einsum("bqhd,bhmd->bhqm", query, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(jnp.arange(memory) < filled[:, None, None, None] + near, scores, -1e9)
        best, place = lax.top_k(scores, near)
        share = jax.nn.softmax(best * jnp.exp(q["heat"].astype(jnp.float32))[:, None, None], axis=-1)
        row, head = jnp.arange(b)[:, None, None, None], jnp.arange(h)[:, None, None]
        far_out = jnp.einsum("bhqk,bhqkd->bqhd", share.astype(dtype), values[row, head, place])
        gate = jax.nn.sigmoid(q["memory_gate"])[:, None]
        out = gate * far_out + (1 - gate) * near_out
        x = feed_forward(q, x + out.reshape(b, t, h * d) @ q["out"])
        x, after = lax.scan(plain, x, (p["above"], kept["above"]))

        start = at // t * t % (memory - t)
        write = (0, 0, start, 0)
        keys = lax.dynamic_update_slice(keys, key.swapaxes(1, 2), write)
        values = lax.dynamic_update_slice(values, value.swapaxes(1, 2), write)
        logits = (rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), text[:, 1:, None], axis=-1)[..., 0]
        age = jnp.mean((start - place) % memory, axis=(0, 2, 3))
        return -logp, {"below": before, "middle": (key, value), "above": after}, keys, values, age

    shapes = {"norm1": (n,), "norm2": (n,), "qkv": (n, 3 * h * d), "out": (h * d, n)}
    shapes |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}

    def layers_of(*many):
        """This describes layers, or one."""
        stack = stack_of(1, dtype, **shapes)
        q = {k: normal(*many, *r.shape[1:], dtype=dtype, scale=r.scale, offset=r.offset) for k, r in stack.items()}
        q["heat"] = normal(*many, h, dtype=dtype, scale=0.2, offset=2.0)
        return q | {"bias": normal(*many, kinds, h, dtype=dtype, scale=0.3)}

    def pair_of(*many):
        """This describes kept keys and values."""
        return normal(*many, b, past, h, d, dtype=dtype, scale=d**-0.5), normal(*many, b, past, h, d, dtype=dtype)

    middle = layers_of() | {"memory_gate": normal(h, dtype=dtype)}
    p = ends_of(words, n, dtype) | {"below": layers_of(depth), "middle": middle, "above": layers_of(depth)}
    kept = {"below": pair_of(depth), "middle": pair_of(), "above": pair_of(depth)}
    caches = normal(b, h, memory, d, dtype=dtype, scale=d**-0.5), normal(b, h, memory, d, dtype=dtype)
    counts = integers(b, below=memory), integers(below=memory)
    return Built(run, (p, integers(b, t + 1, below=words), kept, *caches, *counts))


@program("sequential-monte-carlo-steered-decode-with-resampled-caches-scan", GROUP)
def _steered(size: Size) -> Built:
    """This program writes several words with many drafts per prompt, which are weighed by a judge and drawn anew.

    It is twisted sequential Monte Carlo (Zhao, 2024; Silent-Zebra/twisted-smc-lm): a small head guesses how good a draft will be,
    weights change by the growth of the guess, and where few drafts carry the weight, drafts and their caches are resampled evenly.
    """
    b, drafts, before, steps, n, h, groups, d, wide, depth, words = pick(
        size,
        (4, 16, 496, 8, 1024, 16, 4, 64, 2816, 3, 32000),
        (2, 6, 60, 4, 192, 6, 2, 32, 512, 3, 4001),
        (1, 3, 4, 2, 8, 2, 1, 4, 12, 3, 11),
    )
    dtype, rows, long = half(size), b * drafts, before + steps

    def run(p, keys, values, word, count, seed):
        """This gives drafts with weights, how many carry the weight, estimates of the evidence, and parents of drafts."""
        count = jnp.repeat(1 + count, drafts)
        row = jnp.arange(rows)

        def read(word, keys, values, at):
            """This reads one word of each draft [rows]; caches are [depth, rows, long, groups, d]."""
            place = count + at
            seen = (jnp.arange(long) <= place[:, None])[:, None, None]

            def layer(x, carried):
                """This is one layer."""
                q, key, value = carried
                qkv = (rms_norm(q["norm1"], x) @ q["qkv"]).reshape(rows, 1, h + 2 * groups, d)
                query, fresh, new = jnp.split(qkv, [h, h + groups], axis=2)
                query, fresh = rotary(query, place[:, None]), rotary(fresh, place[:, None])
                key, value = key.at[row, place].set(fresh[:, 0]), value.at[row, place].set(new[:, 0])
                many = (jnp.repeat(z, h // groups, axis=2) for z in (key, value))
                x = x + attention(query, *many, seen).reshape(rows, h * d) @ q["out"]
                y = rms_norm(q["norm2"], x)
                return x + (jax.nn.silu(y @ q["gate"]) * (y @ q["up"])) @ q["down"], (key, value)

            x, (keys, values) = lax.scan(layer, p["table"][word], (p["layers"], keys, values))
            x = rms_norm(p["norm"], x)
            logp = jax.nn.log_softmax((x @ p["head"]).astype(jnp.float32), axis=-1)
            guess = dense(p["judge2"], jax.nn.gelu(dense(p["judge1"], x)))[:, 0].astype(jnp.float32)
            return logp, jax.nn.log_sigmoid(guess), keys, values

        def step(carry, at):
            """This draws one word for each draft, weighs drafts, and draws drafts where it is needed."""
            word, keys, values, weight, guess, evidence, text = carry
            logp, fresh, keys, values = read(word, keys, values, at)
            one, two = jax.random.split(jax.random.fold_in(jax.random.key(seed), at))
            weight = weight + (fresh - guess).reshape(b, drafts)
            share = jax.nn.softmax(weight, axis=-1)
            carrying = 1.0 / jnp.sum(share**2, axis=-1)
            poor = carrying < 0.9 * drafts
            comb = (jax.random.uniform(one, (b, 1)) + jnp.arange(drafts)) / drafts
            parent = jax.vmap(jnp.searchsorted)(jnp.cumsum(share, axis=-1), comb)
            parent = jnp.where(poor[:, None], jnp.minimum(parent, drafts - 1), jnp.arange(drafts))
            whole = jax.nn.logsumexp(weight, axis=-1) - jnp.log(drafts)
            evidence = evidence + jnp.where(poor, whole, 0.0)
            weight = jnp.where(poor[:, None], 0.0, weight)
            source = (parent + jnp.arange(b)[:, None] * drafts).reshape(rows)
            keys, values, text, logp = keys[:, source], values[:, source], text[source], logp[source]
            word = jax.random.categorical(two, logp / 0.8, axis=-1).astype(jnp.int32)
            text = text.at[:, at].set(word)
            return (word, keys, values, weight, fresh[source], evidence, text), (carrying, parent)

        start = jnp.zeros((b, drafts)), jnp.zeros(rows), jnp.zeros(b), jnp.zeros((rows, steps), jnp.int32)
        carry = (jnp.repeat(word, drafts), keys, values, *start)
        (_, _, _, weight, _, evidence, text), (carrying, parent) = lax.scan(step, carry, jnp.arange(steps))
        whole = evidence + jax.nn.logsumexp(weight, axis=-1) - jnp.log(drafts)
        return text.reshape(b, drafts, steps), jax.nn.softmax(weight, axis=-1), carrying, whole, parent

    layers = {"norm1": (n,), "norm2": (n,), "qkv": (n, (h + 2 * groups) * d), "out": (h * d, n)}
    layers |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    p = ends_of(words, n, dtype) | {"layers": stack_of(depth, dtype, **layers)}
    p |= {"judge1": dense_of(n, n // 2, dtype), "judge2": dense_of(n // 2, 1, dtype)}
    cache = normal(depth, rows, long, groups, d, dtype=dtype)
    return Built(run, (p, cache, cache, integers(b, below=words), integers(b, below=before), integers(below=1000)))


@program("boft-butterfly-orthogonal-turns-of-frozen-weights-by-cayley-solves-grad", GROUP)
def _butterfly(size: Size) -> Built:
    """This program gives slopes of turns of the frozen matrices of a language model; a turn is a product of sparse turns.

    It is BOFT (Liu, 2024; huggingface/peft): each factor turns small groups of inputs that lie ever further apart, its blocks come
    from skew matrices by Cayley's transform, and a scale of outputs is learned beside.
    """
    b, t, n, h, d, wide, small, depth, words = pick(
        size,
        (2, 512, 1024, 8, 128, 2816, 8, 3, 32000),
        (1, 96, 192, 6, 32, 512, 4, 3, 4001),
        (1, 5, 8, 2, 4, 12, 2, 3, 11),
    )
    dtype, factors = half(size), 3
    skewed = ("q", "k", "v", "out")

    def turned(free, w):
        """This turns the inputs of a matrix [inputs, outputs] by all factors of one skew table [factors, blocks, s, s]."""
        skew = 0.5 * (free - free.swapaxes(-1, -2))
        eye = jnp.eye(small)
        blocks = jnp.linalg.solve(eye + skew, eye - skew)
        x = w.astype(jnp.float32)
        for k in range(factors):
            apart = small**k
            split = x.reshape(-1, small, apart, x.shape[-1])
            factor = blocks[k].reshape(-1, apart, small, small)
            x = jnp.einsum("gsij,gjso->giso", factor, split).reshape(x.shape)
        return x.astype(dtype)

    def run(p, free, text, short):
        """This gives the loss, slopes of turns and scales, their lengths, and how far turns move the first matrices."""
        real = jnp.arange(1, t + 1) < t + 1 - short[:, None]
        places = jnp.broadcast_to(jnp.arange(t), (b, t))
        mask = jnp.tril(jnp.ones((t, t), bool))

        def loss(free):
            """This is the mean surprise of the next words."""

            @jax.checkpoint
            def layer(x, carried):
                """This is one layer with turned matrices."""
                q, turn = carried
                w = {k: turned(turn[k], q[k]) * turn[f"{k}_scale"].astype(dtype) for k in skewed}
                y = rms_norm(q["norm1"], x)
                query, key, value = ((y @ w[k]).reshape(b, t, h, d) for k in ("q", "k", "v"))
                out = attention(rotary(query, places), rotary(key, places), value, mask)
                x = x + out.reshape(b, t, h * d) @ w["out"]
                y = rms_norm(q["norm2"], x)
                moved = jnp.mean((w["q"] - q["q"]).astype(jnp.float32) ** 2)
                return x + (jax.nn.silu(y @ q["gate"]) * (y @ q["up"])) @ q["down"], moved

            x, moved = lax.scan(layer, p["table"][text[:, :-1]], (p["layers"], free))
            logp = jax.nn.log_softmax((rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32), axis=-1)
            surprise = -jnp.take_along_axis(logp, text[:, 1:, None], axis=-1)[..., 0]
            return jnp.sum(jnp.where(real, surprise, 0.0)) / jnp.maximum(jnp.sum(real), 1), moved

        (value, moved), slopes = jax.value_and_grad(loss, has_aux=True)(free)
        lengths = jax.tree.map(lambda g: jnp.sqrt(jnp.sum(g**2, axis=tuple(range(1, g.ndim)))), slopes)
        return value, slopes, lengths, moved

    layers = {"norm1": (n,), "norm2": (n,), "q": (n, h * d), "k": (n, h * d), "v": (n, h * d), "out": (h * d, n)}
    layers |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    p = ends_of(words, n, dtype) | {"layers": stack_of(depth, dtype, **layers)}
    inputs = {k: h * d if k == "out" else n for k in skewed}
    free = {k: normal(depth, factors, i // small, small, small, scale=0.2) for k, i in inputs.items()}
    free |= {f"{k}_scale": normal(depth, n if k == "out" else h * d, scale=0.05, offset=1.0) for k in skewed}
    return Built(run, (p, free, integers(b, t + 1, below=words), integers(b, below=t // 2)))


@program("gliner-spans-scored-against-prompted-labels-greedy-flat-entities", GROUP)
def _gliner(size: Size) -> Built:
    """This program finds names in texts whose kinds are told as words before the text, by comparing spans with kinds.

    It is GLiNER (Zaratiana, 2024; urchade/GLiNER): an encoder reads kinds and text at once, a recurrent layer runs over words in
    both ways, spans of up to a few words meet the vectors of kinds, and the best spans that do not overlap stay.
    """
    b, kinds, told, t, many, longest, n, h, wide, inner, kept, depth, words = pick(
        size,
        (16, 16, 3, 224, 128, 12, 768, 12, 3072, 384, 64, 3, 128003),
        (3, 6, 3, 78, 40, 8, 192, 6, 512, 96, 24, 3, 8001),
        (1, 2, 2, 6, 4, 2, 8, 2, 12, 4, 3, 3, 15),
    )
    dtype, d = half(size), n // h
    head, whole = kinds * told + 1, kinds * told + 1 + t

    def lstm(q, x, backwards):
        """This runs over words [b, many, n]."""
        gates = jnp.moveaxis(x @ q["w"] + q["b"], 1, 0)

        def step(carry, gate):
            """This reads one word."""
            state, cell = carry
            i, f, g, o = jnp.split((gate + state @ q["u"]).astype(jnp.float32), 4, axis=-1)
            cell = jax.nn.sigmoid(f + 1.0) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
            state = (jax.nn.sigmoid(o) * jnp.tanh(cell)).astype(dtype)
            return (state, cell), state

        start = jnp.zeros((b, inner), dtype), jnp.zeros((b, inner))
        return jnp.moveaxis(lax.scan(step, start, gates, reverse=backwards)[1], 0, 1)

    def run(p, kind, text, heads, short):
        """This gives entities [b, kept, 3] with scores and which of them stay, and how many words each kind has."""
        count = many - short
        opened = jnp.full((b, kinds, 1), words - 1)
        prompt = jnp.concatenate([opened, kind], axis=-1)[..., :told].reshape(b, kinds * told)
        ids = jnp.concatenate([prompt, jnp.full((b, 1), words - 2), text], axis=1)
        first = jnp.sort(heads, axis=1)
        real = jnp.arange(t) <= jnp.take_along_axis(first, count[:, None] - 1, axis=1)
        mask = jnp.concatenate([jnp.ones((b, head), bool), real], axis=1)[:, None, None]
        places = jnp.broadcast_to(jnp.arange(whole), (b, whole))

        def layer(x, q):
            """This is one layer of the encoder."""
            qkv = (rms_norm(q["norm1"], x) @ q["qkv"]).reshape(b, whole, 3 * h, d)
            query, key, value = jnp.split(qkv, 3, axis=2)
            out = attention(rotary(query, places), rotary(key, places), value, mask)
            x = x + out.reshape(b, whole, n) @ q["out"]
            y = rms_norm(q["norm2"], x)
            return x + jax.nn.gelu(y @ q["up"]) @ q["down"], None

        x, _ = lax.scan(layer, p["table"][ids], p["layers"])
        x = rms_norm(p["norm"], x)
        label = dense(p["label2"], jax.nn.relu(dense(p["label1"], x[:, : kinds * told : told])))
        word = jnp.take_along_axis(x[:, head:], first[..., None], axis=1)
        word = jnp.concatenate([lstm(p["forth"], word, False), lstm(p["back"], word, True)], axis=-1)
        begin = jnp.arange(many)[:, None] + jnp.zeros(longest, jnp.int32)
        end = begin + jnp.arange(longest)
        start, stop = jax.nn.relu(dense(p["start"], word)), jax.nn.relu(dense(p["stop"], word))
        span = jnp.concatenate([start[:, begin], stop[:, jnp.minimum(end, many - 1)]], axis=-1)
        span = dense(p["span"], span)
        logits = jnp.einsum("bwkd,bcd->bwkc", span, label, preferred_element_type=jnp.float32) * n**-0.5
        good = (end < count[:, None, None])[..., None]
        chance = jnp.where(good, jax.nn.sigmoid(logits), 0.0)
        best, which = lax.top_k(chance.reshape(b, -1), kept)
        one, what = which // (longest * kinds), which % kinds
        two = one + which // kinds % longest

        def choose(taken, each):
            """This keeps a span if none of its words is taken."""
            one, two, best = each
            place = jnp.arange(many)
            inside = (place >= one[:, None]) & (place <= two[:, None])
            stays = ~jnp.any(taken & inside, axis=1) & (best > 0.5)
            return taken | (inside & stays[:, None]), stays

        ordered = (z.swapaxes(0, 1) for z in (one, two, best))
        _, stays = lax.scan(choose, jnp.zeros((b, many), bool), tuple(ordered))
        stays = stays.T
        used = jnp.sum(jax.nn.one_hot(what, kinds) * (stays * (two - one + 1))[..., None], axis=1)
        return jnp.stack([one, two, what], axis=-1), best, stays, used, jnp.mean(chance, axis=(1, 2))

    layers = {"norm1": (n,), "norm2": (n,), "qkv": (n, 3 * n), "out": (n, n), "up": (n, wide), "down": (wide, n)}
    p = ends_of(words, n, dtype) | {"layers": stack_of(depth, dtype, **layers)}
    del p["head"]
    for k in ("forth", "back"):
        p[k] = dense_of(n, 4 * inner, dtype) | {"u": normal(inner, 4 * inner, dtype=dtype, scale=inner**-0.5)}
    p |= {"label1": dense_of(n, 2 * n, dtype), "label2": dense_of(2 * n, n, dtype), "span": dense_of(2 * n, n, dtype)}
    p |= {k: dense_of(2 * inner, n, dtype) for k in ("start", "stop")}
    texts = integers(b, kinds, told, below=words - 2), integers(b, t, below=words - 2)
    return Built(run, (p, *texts, integers(b, many, below=t), integers(b, below=many // 2)))
