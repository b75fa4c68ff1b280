"""Packed weights, searches, learned tokens, drawn words and read lines, the twenty-eighth set: its author saw no plan."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, booleans, gain, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import dense, dense_of, rms_norm, rotary
from benchmarks.workloads.twenty_sixth_parts import drawn

GROUP = "twenty-eighth"


@program("four-and-six-bit-weights-in-blocks-with-packed-scales-layer-decode", GROUP)
def _blocks(size: Size) -> Built:
    """This writes one word for a few answers with a layer whose weights are blocks of 256 with scales packed into six bits.

    It is a layer of a Llama in the format Q4_K_M of ggml (ggml-org/llama.cpp), as loaders of gguf in JAX open it: values and what
    leads down have six bits, all others four, and all are opened on the way into the product.
    """
    b, n, h, few, wide, seen = pick(
        size, (6, 4096, 32, 8, 14336, 1283), (2, 1024, 16, 4, 2048, 231), (2, 256, 4, 2, 256, 7)
    )
    dtype, d = half(size), n // h

    def four(q):
        """This opens weights of four bits: eight parts of 32, each with a scale and a least value of six bits."""
        packed = q["scales"]
        low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
        scale = jnp.concatenate([low & 63, (rest & 15) | ((low >> 6) << 4)], axis=-1).astype(jnp.float32)
        least = jnp.concatenate([high & 63, (rest >> 4) | ((high >> 6) << 4)], axis=-1).astype(jnp.float32)
        nibbles = q["bits"].reshape(*q["bits"].shape[:-1], 4, 1, 32)
        nibbles = jnp.concatenate([nibbles & 15, nibbles >> 4], axis=-2).reshape(*packed.shape[:-1], 8, 32)
        scale = q["size"].astype(jnp.float32)[..., None] * scale
        least = q["low"].astype(jnp.float32)[..., None] * least
        w = scale[..., None] * nibbles.astype(jnp.float32) - least[..., None]
        return w.reshape(w.shape[0], -1).astype(dtype)

    def six(q):
        """This opens weights of six bits: sixteen parts of 16, each with a scale of a byte."""
        low = q["low"].reshape(*q["low"].shape[:-1], 2, 2, 32)
        high = q["high"].reshape(*q["high"].shape[:-1], 2, 32)
        sides = [(low[..., 0, :] & 15), (low[..., 1, :] & 15), (low[..., 0, :] >> 4), (low[..., 1, :] >> 4)]
        bits = jnp.stack([s | (((high >> (2 * k)) & 3) << 4) for k, s in enumerate(sides)], axis=-2)
        bits = bits.astype(jnp.int8).reshape(*q["scales"].shape, 16) - jnp.int8(32)
        w = q["size"].astype(jnp.float32)[..., None] * q["scales"].astype(jnp.float32)
        return (w[..., None] * bits.astype(jnp.float32)).reshape(bits.shape[0], -1).astype(dtype)

    def product(x, w):
        """This multiplies rows with opened weights [outputs, inputs]."""
        return jnp.einsum("bi,oi->bo", x, w, preferred_element_type=jnp.float32).astype(dtype)

    def step(p, x, cache, count):
        """This puts one word of each answer through the layer and adds it to the cache."""
        y = rms_norm(p["norm1"], x)
        both = rotary(product(y, four(p["qk"])).reshape(b, 1, h + few, d), count[:, None])
        query, key = both[:, :, :h], both[:, :, h:]
        rows = jnp.arange(b)
        keys = cache["k"].at[rows, count].set(key[:, 0])
        values = cache["v"].at[rows, count].set(product(y, six(p["v"])).reshape(b, few, d))
        query = query.reshape(b, few, h // few, d)
        scores = jnp.einsum("bkgd,blkd->bkgl", query, keys, preferred_element_type=jnp.float32) * d**-0.5
        scores = jnp.where(jnp.arange(seen) <= count[:, None, None, None], scores, -jnp.inf)
        y = jnp.einsum("bkgl,blkd->bkgd", jax.nn.softmax(scores, axis=-1).astype(dtype), values)
        x = x + product(y.reshape(b, n), four(p["o"]))
        y = rms_norm(p["norm2"], x)
        gate, up = jnp.split(product(y, four(p["up"])), 2, axis=-1)
        return (
            x + product(jax.nn.silu(gate) * up, six(p["down"])),
            {"k": keys, "v": values},
            jnp.argmax(jnp.max(scores, axis=(1, 2)), -1),
        )

    def bytes_of(*shape, dtype=jnp.uint8, below=256):
        """This describes random bytes."""
        return Random(shape, jnp.dtype(dtype), below=below)

    def four_of(i, o):
        """This describes a matrix of four bits."""
        q = {"bits": bytes_of(o, i // 256, 128), "scales": bytes_of(o, i // 256, 12)}
        sides = {"size": (1e-4, 1e-3), "low": (1e-4, 7e-3)}
        return q | {
            k: normal(o, i // 256, dtype=jnp.float16, scale=s * 9 / i**0.5, offset=m * 9 / i**0.5)
            for k, (s, m) in sides.items()
        }

    def six_of(i, o):
        """This describes a matrix of six bits."""
        q = {"low": bytes_of(o, i // 256, 128), "high": bytes_of(o, i // 256, 64)}
        q |= {"scales": bytes_of(o, i // 256, 16, dtype=jnp.int8, below=127)}
        return q | {"size": normal(o, i // 256, dtype=jnp.float16, scale=1e-4 / i**0.5, offset=8e-4 / i**0.5)}

    p = {"norm1": gain(n, dtype), "norm2": gain(n, dtype), "qk": four_of(n, (h + few) * d)}
    p |= {"v": six_of(n, few * d), "o": four_of(n, n), "up": four_of(n, 2 * wide)}
    p |= {"down": six_of(wide, n)}
    cache = {k: normal(b, seen, few, d, dtype=dtype) for k in ("k", "v")}
    return Built(step, (p, normal(b, n, dtype=dtype), cache, integers(b, below=seen)))


@program("trees-of-moves-grown-by-promise-and-backed-up-with-a-learned-model", GROUP)
def _moves(size: Size) -> Built:
    """This chooses moves of many games by growing a tree for each: it goes down by promise, adds a place and backs its worth up.

    It is the search of MuZero (Schrittwieser, 2020) on arrays, as in google-deepmind/mctx: places are numbers, a learned model
    tells the next state, reward, worth and likely moves, and worths are scaled between the lowest and the highest of the tree.
    """
    b, moves, rounds, n, depth = pick(size, (1021, 82, 24, 256, 8), (64, 33, 40, 96, 8), (2, 4, 3, 8, 3))
    places, fade = rounds + 1, 0.997

    def told(p, x):
        """This tells scores of moves and the worth of states."""
        y = jax.nn.relu(dense(p["inner"], x))
        return dense(p["moves"], y), jnp.tanh(dense(p["worth"], y)[:, 0])

    def model(p, x, move):
        """This tells the next state and the reward of a move."""
        y = jax.nn.relu(dense(p["enter"], x) + p["table"][move])
        x = x + dense(p["leave"], y)
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)
        return x, jnp.tanh(dense(p["reward"], y)[:, 0])

    def promise(tree, at):
        """This is the promise of all moves of one place of one tree."""
        child = tree["child"][at]
        seen = child >= 0
        visits = jnp.where(seen, tree["visits"][child], 0)
        total = jnp.sum(visits)
        worth = tree["reward"][child] + fade * tree["worth"][child]
        low = jnp.minimum(tree["worth"][at], jnp.min(jnp.where(seen, worth, jnp.inf)))
        high = jnp.maximum(tree["worth"][at], jnp.max(jnp.where(seen, worth, -jnp.inf)))
        worth = (jnp.where(seen, worth, tree["worth"][at]) - low) / jnp.maximum(high - low, 1e-5)
        rate = 1.25 + jnp.log((total + 19653.0) / 19652.0)
        share = jax.nn.softmax(tree["scores"][at])
        return worth + rate * share * jnp.sqrt(total.astype(jnp.float32)) / (1 + visits)

    def down(tree):
        """This goes down one tree until a move leads to no place yet."""

        def on(carry):
            """This tells whether there is a place to go to."""
            _, after, _, level = carry
            return (after >= 0) & (level < depth)

        def go(carry):
            """This goes one level down."""
            _, at, _, level = carry
            move = jnp.argmax(promise(tree, at))
            return at, tree["child"][at, move], move, level + 1

        at, after, move, level = lax.while_loop(on, go, (jnp.int32(-1), jnp.int32(0), jnp.int32(0), jnp.int32(0)))
        return at, after, move, level

    def up(tree, leaf, worth):
        """This backs the worth of a leaf up to the root of one tree."""

        def go(carry):
            """This goes one level up."""
            tree, at, worth = carry
            above = tree["above"][at]
            worth = tree["reward"][at] + fade * worth
            count = tree["visits"][above]
            mean = (tree["worth"][above] * count + worth) / (count + 1)
            tree = tree | {"worth": tree["worth"].at[above].set(mean), "visits": tree["visits"].at[above].add(1)}
            return tree, above, worth

        return lax.while_loop(lambda carry: carry[1] != 0, go, (tree, leaf, worth))[0]

    def run(p, x, legal, noise, gumbel):
        """This searches for all games and draws moves by visits."""
        legal = legal.at[:, 0].set(True)
        scores, worth = told(p, x)
        scores = jnp.where(legal, scores + noise, -1e9)
        wide, long = (b, places, moves), (b, places)
        tree = {k: jnp.zeros(long, jnp.int32) for k in ("visits", "above")} | {
            k: jnp.zeros(long) for k in ("worth", "reward")
        }
        tree |= {"child": jnp.full(wide, -1), "scores": jnp.zeros(wide)}
        tree["scores"] = tree["scores"].at[:, 0].set(scores)
        tree["worth"], tree["visits"] = tree["worth"].at[:, 0].set(worth), tree["visits"].at[:, 0].set(1)
        states = jnp.zeros((b, places, n)).at[:, 0].set(x)
        rows = jnp.arange(b)

        def grow(k, carry):
            """This adds at most one place to every tree."""
            tree, states, deepest = carry
            at, after, move, level = jax.vmap(down)(tree)
            leaf = jnp.where(after < 0, k + 1, after)
            state, reward = model(p, states[rows, at], move)
            scores, worth = told(p, state)
            states = states.at[rows, leaf].set(state)
            tree = tree | {"child": tree["child"].at[rows, at, move].set(leaf)}
            tree |= {"reward": tree["reward"].at[rows, leaf].set(reward), "above": tree["above"].at[rows, leaf].set(at)}
            tree |= {"scores": tree["scores"].at[rows, leaf].set(scores)}
            tree |= {"worth": tree["worth"].at[rows, leaf].set(worth), "visits": tree["visits"].at[rows, leaf].add(1)}
            return jax.vmap(up)(tree, leaf, worth), states, jnp.maximum(deepest, level)

        tree, _, deepest = lax.fori_loop(0, rounds, grow, (tree, states, jnp.zeros(b, jnp.int32)))
        first = tree["child"][:, 0]
        visits = jnp.where(first >= 0, tree["visits"][rows[:, None], first], 0)
        share = visits / jnp.sum(visits, axis=-1, keepdims=True)
        logs = jnp.where(visits > 0, jnp.log(jnp.maximum(share, 1e-9)), -jnp.inf)
        return jnp.argmax(logs + gumbel, axis=-1), jnp.argmax(visits, axis=-1), share, tree["worth"][:, 0], deepest

    p = {"inner": dense_of(n, n), "moves": dense_of(n, moves), "worth": dense_of(n, 1), "reward": dense_of(n, 1)}
    p |= {"enter": dense_of(n, n), "leave": dense_of(n, n), "table": normal(moves, n)}
    return Built(run, (p, normal(b, n), booleans(b, moves), normal(b, moves), normal(b, moves)))


@program("pairs-of-symbols-most-often-seen-merged-round-by-round", GROUP)
def _merged(size: Size) -> Built:
    """This learns a tokeniser from counted words: it joins the pair of symbols that is seen most often, again and again.

    It is byte-pair encoding (Sennrich, 2016), as in rsennrich/subword-nmt, on padded arrays: pairs are counted into one table, ties
    go to the first pair, and joined words are moved to the front.
    """
    words, most, letters, rounds = pick(size, (262139, 24, 256, 32), (4001, 15, 96, 24), (13, 5, 6, 3))
    symbols = letters + rounds

    def joined(text, pair, fresh):
        """This joins one pair wherever it stands in words, from the left and without overlaps."""
        after = jnp.concatenate([text[:, 1:], jnp.full((words, 1), -1, text.dtype)], axis=1)
        hit = (text == pair[0]) & (after == pair[1])
        places = jnp.arange(most)
        begun = hit & ~jnp.concatenate([jnp.zeros((words, 1), bool), hit[:, :-1]], axis=1)
        start = lax.cummax(jnp.where(begun, places, -1), axis=1)
        hit = hit & ((pair[0] != pair[1]) | ((places - start) % 2 == 0))
        gone = jnp.concatenate([jnp.zeros((words, 1), bool), hit[:, :-1]], axis=1)
        text = jnp.where(hit, fresh, text)
        kept = ~gone & (text >= 0)
        at = jnp.where(kept, jnp.cumsum(kept, axis=1) - 1, most)
        rows = jnp.arange(words)[:, None]
        return jnp.full_like(text, -1).at[rows, at].set(text, mode="drop"), jnp.sum(hit, axis=1)

    def run(raw, length, often):
        """This learns the pairs and tells how short words have become."""
        often = 1 + often * often // 97
        text = raw * raw // letters
        text = jnp.where(jnp.arange(most) < 2 + length[:, None], text, -1)

        def step(k, carry):
            """This counts pairs and joins the first one of those seen most often."""
            text, pairs, seen, saved = carry
            left, right = text[:, :-1], text[:, 1:]
            both = (left >= 0) & (right >= 0)
            at = jnp.where(both, left * symbols + right, symbols * symbols)
            count = jnp.zeros(symbols * symbols + 1, jnp.int32).at[at].add(often[:, None])
            best = jnp.argmax(count[:-1])
            pair = jnp.stack([best // symbols, best % symbols])
            text, hits = joined(text, pair, letters + k)
            return text, pairs.at[k].set(pair), seen.at[k].set(count[best]), saved.at[k].set(jnp.sum(hits * often))

        start = (text, jnp.zeros((rounds, 2), jnp.int32), jnp.zeros(rounds, jnp.int32), jnp.zeros(rounds, jnp.int32))
        fresh, pairs, seen, saved = lax.fori_loop(0, rounds, step, start)
        used = jnp.zeros(symbols + 1, jnp.int32).at[jnp.where(fresh >= 0, fresh, symbols)].add(often[:, None])[:-1]
        share = used / jnp.sum(used)
        unsure = -jnp.sum(jax.scipy.special.xlogy(share, share)) / np.log(2)
        long = jnp.sum(fresh >= 0, axis=1)
        shorter = jnp.sum(often * jnp.sum(text >= 0, axis=1)) / jnp.sum(often * long)
        return fresh, pairs, seen, saved, used, unsure, shorter, jnp.bincount(long, length=most + 1)

    return Built(
        run, (integers(words, most, below=letters), integers(words, below=most - 1), integers(words, below=100))
    )


@program("next-words-under-packed-bits-of-a-grammar-bans-and-counts-with-ranks", GROUP)
def _allowed(size: Size) -> Built:
    """This draws one word for many askers with unlike wishes and tells the likeliest words and the rank of the drawn one.

    It is the sampler of a server of language models (vllm-project/vllm and its port, vllm-project/tpu-inference): a grammar's
    allowed words come as packed bits, words seen are penalised by counts, and some words are banned or raised.
    """
    b, n, words, seen, few, best = pick(
        size, (160, 1024, 128256, 509, 16, 20), (6, 128, 24032, 97, 7, 20), (2, 8, 64, 5, 2, 3)
    )
    dtype = half(size)

    def unpacked(bits):
        """This opens 32 words from each whole number."""
        one = (bits[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & jnp.uint32(1)
        return (one != 0).reshape(b, words)

    def run(p, x, text, prompt, bits, plain, banned, raised, wish, ends, seed):
        """This draws words."""
        logits = jnp.dot(rms_norm(p["norm"], x), p["head"], preferred_element_type=jnp.float32)
        rows, places = jnp.arange(b)[:, None], jnp.arange(seen)
        length, shortest = wish["length"], wish["shortest"]
        written = places >= prompt[:, None]
        real = places < length[:, None]
        count = jnp.zeros((b, words), jnp.int32).at[rows, text].add((written & real).astype(jnp.int32))
        asked = jnp.zeros((b, words), bool).at[rows, text].max(~written & real)
        raw = jax.nn.log_softmax(logits, axis=-1)
        logits = logits.at[rows, raised["word"]].add(raised["by"])
        known = (count > 0) | asked
        again = jnp.exp(0.2 * jnp.abs(wish["again"]))[:, None]
        logits = jnp.where(known, jnp.where(logits > 0, logits / again, logits * again), logits)
        logits = logits - wish["often"][:, None] * count - wish["there"][:, None] * (count > 0)
        last = jnp.take_along_axis(text, jnp.maximum(length - 1, 0)[:, None], axis=1)
        stop = jnp.zeros((b, words), bool).at[rows, banned[..., 1]].max(banned[..., 0] % 7 == last % 7)
        young = (length - prompt < shortest)[:, None]
        stop = stop | (young & jnp.zeros((b, words), bool).at[rows, ends].set(True))
        stop = stop | ~(unpacked(bits) | plain[:, None])
        logits = jnp.where(stop, -jnp.inf, logits).at[:, 0].max(-50.0)
        heat = jnp.maximum(wish["heat"], 0.0)[:, None]
        greedy = jnp.argmax(logits, axis=-1)
        noise = jax.random.gumbel(jax.random.key(seed), logits.shape)
        word = jnp.where(heat[:, 0] < 1e-5, greedy, jnp.argmax(logits / jnp.maximum(heat, 1e-5) + noise, axis=-1))
        own = jnp.take_along_axis(raw, word[:, None], axis=1)
        top, at = lax.top_k(raw, best)
        rank = 1 + jnp.sum(raw > own, axis=-1)
        ended = jnp.any(ends == word[:, None], axis=1) | (length + 1 >= seen)
        return word, own[:, 0], rank, top, at, jnp.sum(~stop, axis=-1), jnp.sum(count > 0, axis=-1), ended

    wish = {k: normal(b, scale=0.3) for k in ("again", "often", "there")} | {"heat": normal(b, offset=0.7, scale=0.5)}
    wish |= {"length": integers(b, below=seen + 1), "shortest": integers(b, below=32)}
    p = {"norm": gain(n, dtype), "head": normal(n, words, dtype=dtype, scale=2 * n**-0.5)}
    raised = {"word": integers(b, few, below=words), "by": normal(b, few)}
    inputs = (
        integers(b, seen, below=words),
        integers(b, below=seen // 2),
        Random((b, words // 32), jnp.dtype("uint32"), below=2**32),
    )
    inputs += (
        booleans(b),
        integers(b, few, 2, below=words),
        raised,
        wish,
        integers(b, 3, below=words),
        integers(below=99),
    )
    return Built(run, (p, normal(b, n, dtype=dtype), *inputs))


@program("printed-lines-read-two-ways-letters-collapsed-and-edits-counted-equinox", GROUP)
def _printed(size: Size) -> Built:
    """This reads printed lines, collapses what is read into letters and counts the edits that lead to the true letters.

    It is the CRNN of Shi (2015), with equinox: convolutions, two layers of memory that go both ways, the likeliest letter per
    column with repeats and blanks taken out, and the distance of Levenshtein.
    """
    import equinox as eqx

    b, broad, w, deep, letters, most = pick(
        size, (96, 388, 64, 256, 97, 39), (4, 132, 16, 64, 97, 17), (2, 36, 4, 6, 7, 5)
    )
    dtype, columns = half(size), broad // 4 + 1

    class Reader(eqx.Module):
        """This is the whole network."""

        convs: list[eqx.nn.Conv2d]
        cells: list[eqx.nn.LSTMCell]
        join: eqx.nn.Linear
        head: eqx.nn.Linear

        def __init__(self, key):
            """This makes all layers."""
            keys = iter(jax.random.split(key, 20))
            widths = [1, w, 2 * w, 4 * w, 4 * w, 8 * w, 8 * w, 8 * w]
            sides = [(3, 1)] * 6 + [(2, 0)]
            self.convs = [
                eqx.nn.Conv2d(i, o, k, padding=s, key=next(keys))
                for i, o, (k, s) in zip(widths[:-1], widths[1:], sides, strict=True)
            ]
            self.cells = [eqx.nn.LSTMCell(i, deep, key=next(keys)) for i in (8 * w, 8 * w, deep, deep)]
            self.join = eqx.nn.Linear(2 * deep, deep, key=next(keys))
            self.head = eqx.nn.Linear(2 * deep, letters, key=next(keys))

        def both(self, x, k):
            """This reads columns in both ways with a pair of memories."""
            start = (jnp.zeros(deep, dtype), jnp.zeros(deep, dtype))
            out = []
            for cell, back in zip(self.cells[k : k + 2], (False, True), strict=True):

                def step(carry, now, cell=cell):
                    """This reads one column."""
                    carry = cell(now, carry)
                    return carry, carry[0]

                out.append(lax.scan(step, start, x, reverse=back)[1])
            return jnp.concatenate(out, axis=-1)

        def __call__(self, x):
            """This gives scores of letters for columns of one line [1, 32, width]."""
            for k, conv in enumerate(self.convs):
                x = jax.nn.relu(conv(x))
                if k in (0, 1):
                    x = eqx.nn.MaxPool2d(2, 2)(x)
                elif k in (3, 5):
                    x = eqx.nn.MaxPool2d((2, 2), (2, 1), (0, 1))(x)
            x = self.both(x[:, 0].T, 0)
            return jax.vmap(self.head)(self.both(jax.vmap(self.join)(x), 2))

    shapes = eqx.filter_eval_shape(Reader, jax.random.key(0))
    arrays, still = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def collapsed(best):
        """This takes repeats and blanks out and moves the rest to the front."""
        before = jnp.concatenate([jnp.full((1,), -1, best.dtype), best[:-1]])
        kept = (best != 0) & (best != before)
        at = jnp.where(kept, jnp.cumsum(kept) - 1, columns)
        return jnp.full(columns, -1).at[at].set(best, mode="drop"), jnp.sum(kept)

    def edits(text, length, truth, real):
        """This counts the fewest letters put in, left out or changed."""
        places = jnp.arange(most + 1)

        def row(cost, now):
            """This fills one row of the table; what is put in comes from a running minimum."""
            letter, k = now
            change = cost[:-1] + (truth != letter)
            least = jnp.concatenate([cost[:1] + 1, jnp.minimum(cost[1:] + 1, change)])
            least = lax.cummin(least - places) + places
            return jnp.where(k < length, least, cost), None

        cost, _ = lax.scan(row, places, (text, jnp.arange(text.shape[0])))
        return cost[real]

    def run(arrays, lines, truth, real):
        """This reads lines and judges what was read."""
        logits = jax.vmap(eqx.combine(arrays, still))(lines[:, None].astype(dtype)).astype(jnp.float32)
        logp = jax.nn.log_softmax(logits, axis=-1)
        best = jnp.argmax(logp, axis=-1)
        text, length = jax.vmap(collapsed)(best)
        real = jnp.maximum(real, 1)
        wrong = jax.vmap(edits)(text, length, truth, real)
        used = jnp.sum(jax.nn.one_hot(text, letters, dtype=jnp.int32), axis=(0, 1))
        return text, length, wrong, jnp.sum(wrong) / jnp.sum(real), jnp.sum(jnp.max(logp, axis=-1), axis=-1), used

    p = jax.tree.map(
        lambda r: replace(r, scale=(2 / np.prod(r.shape[1:])) ** 0.5) if len(r.shape) == 4 else r,
        drawn(arrays, dtype),
        is_leaf=lambda r: hasattr(r, "below"),
    )
    truth = integers(b, most, below=letters)
    return Built(run, (p, normal(b, 32, broad), truth, integers(b, below=most + 1)))
