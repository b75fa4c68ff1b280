"""Mirrored words, mended sentences, bidding experts and rounded weights, the thirty-second set: its author saw no plan."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, gain, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import attention, dense, layer_norm, rms_norm
from benchmarks.workloads.twenty_sixth_parts import drawn

GROUP = "thirty-second"


@program("words-told-apart-by-mirrors-of-all-words-between-with-forgetting-prefill", GROUP)
def _mirrors(size: Size) -> Built:
    """This program reads prompts with layers whose sense of place comes from mirrors that words between two words hold up.

    It is PaTH attention with forgetting (Yang, 2025; fla-org/flash-linear-attention): each word gives a direction along which
    states are reflected in part, and the product of all mirrors between two words is found by one triangular solve.
    """
    b, t, n, h, groups, wide, low, depth, words = pick(
        size,
        (2, 768, 1024, 8, 4, 2816, 32, 3, 32000),
        (2, 96, 256, 4, 2, 512, 16, 2, 2003),
        (1, 6, 8, 2, 1, 12, 2, 2, 11),
    )
    dtype, d, taps = half(size), n // h, 3

    def layer(x, q, real):
        """This is one layer, and what it keeps for words that follow."""
        y = rms_norm(q["norm1"], x)
        query, key, value = jnp.split(y @ q["qkv"], [n, n + groups * d], axis=-1)
        query, key, value = (z.reshape(b, t, -1, d) for z in (query, key, value))
        query, key = rms_norm(q["q_norm"], query), rms_norm(q["k_norm"], key)
        w = jnp.pad((y @ q["down_w"]) @ q["up_w"], ((0, 0), (taps - 1, 0), (0, 0)))
        w = jax.nn.silu(sum(w[:, k : k + t] * q["taps"][k] for k in range(taps)))
        w = w.reshape(b, t, groups, d).astype(jnp.float32)
        w = w * lax.rsqrt(jnp.sum(w * w, axis=-1, keepdims=True) + 1e-6)
        sides = (y @ q["sides"]).astype(jnp.float32)
        beta = 2 * jax.nn.sigmoid(sides[..., :groups]) * real[..., None]
        forget = jnp.cumsum(jax.nn.log_sigmoid(sides[..., groups:] + 4.0), axis=1)

        def mirrored(query, key, w, beta):
            """These are the scores of heads that share keys: [t, shared, d], [t, d], [t, d] and [t]."""
            below = jnp.tril(beta[:, None] * (w @ w.T), -1)
            seen = jnp.tril(w @ key.T, -1) * beta[:, None]
            solved = jax.scipy.linalg.solve_triangular(below + jnp.eye(t), seen, lower=True, unit_diagonal=True)
            own = jnp.tril(jnp.einsum("qsd,kd->sqk", query, w))
            return jnp.einsum("qsd,kd->sqk", query, key) - own @ solved

        shared = query.astype(jnp.float32).reshape(b, t, groups, h // groups, d)
        each = jax.vmap(jax.vmap(mirrored, in_axes=(1, 1, 1, 1)), in_axes=(0, 0, 0, 0))
        scores = each(shared, key.astype(jnp.float32), w, beta).reshape(b, h, t, t) * d**-0.5
        fade = forget.swapaxes(1, 2)
        scores = scores + fade[..., :, None] - fade[..., None, :]
        seen = jnp.tril(jnp.ones((t, t), bool)) & real[:, None, None, :]
        probs = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1).astype(dtype)
        out = jnp.einsum("bghqk,bkgd->bqghd", probs.reshape(b, groups, -1, t, t), value).reshape(b, t, n)
        x = x + out @ q["out"]
        gate, up = jnp.split(rms_norm(q["norm2"], x) @ q["up"], 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ q["down"], (key, value, w.astype(dtype), fade[..., -1])

    def run(p, text, empty):
        """This gives chances of the next word, what layers keep, and the surprise of each prompt."""
        real = jnp.arange(t) >= empty[:, None]
        x, kept = lax.scan(lambda x, q: layer(x, q, real), p["table"][text], p["layers"])
        scores = (rms_norm(p["norm"], x) @ p["table"].T).astype(jnp.float32) * n**-0.5
        whole = jax.nn.logsumexp(scores, axis=-1)
        own = jnp.take_along_axis(scores[:, :-1], text[:, 1:, None], axis=-1)[..., 0]
        on = real[:, :-1]
        surprise = jnp.sum(jnp.where(on, whole[:, :-1] - own, 0.0), axis=1) / jnp.sum(on, axis=1)
        return lax.top_k(jax.nn.log_softmax(scores[:, -1], axis=-1), 8 if words > 8 else 2), kept, surprise

    def stacked(*shape):
        return normal(depth, *shape, dtype=dtype, scale=shape[0] ** -0.5)

    def gains(k):
        return normal(depth, k, dtype=dtype, scale=0.1, offset=1.0)

    layers = {
        **{name: gains(k) for name, k in (("norm1", n), ("norm2", n), ("q_norm", d), ("k_norm", d))},
        "qkv": stacked(n, n + 2 * groups * d),
        "down_w": stacked(n, low),
        "up_w": stacked(low, groups * d),
        "taps": normal(depth, taps, groups * d, dtype=dtype, scale=0.6),
        "sides": stacked(n, groups + h),
        "out": stacked(n, n),
        "up": stacked(n, 2 * wide),
        "down": stacked(wide, n),
    }
    p = {"table": normal(words, n, dtype=dtype), "layers": layers, "norm": gain(n, dtype)}
    return Built(run, (p, integers(b, t, below=words), integers(b, below=max(1, t // 3))))


@program("sentences-mended-by-deleting-words-opening-gaps-and-filling-them-while", GROUP)
def _mended(size: Size) -> Built:
    """This program translates by mending a first guess: words are deleted, gaps are opened, and gaps are filled, all at once.

    It is the Levenshtein transformer (Gu, 2019; facebookresearch/fairseq): three heads on one decoder decide for all places of a
    sentence in parallel, sentences are packed anew after each decision, and rounds go on until nothing changes.
    """
    b, s, t, n, h, depth, words, gaps, rounds = pick(
        size, (24, 64, 72, 512, 8, 6, 32768, 16, 4), (2, 20, 24, 128, 4, 2, 2003, 6, 3), (1, 4, 7, 8, 2, 1, 13, 3, 2)
    )
    dtype, d = half(size), n // h
    first_word, last_word, hole, plain = 1, 2, 3, 4

    def heads(x, many):
        return x.reshape(*x.shape[:2], many, h, d)

    def body(p, x, real, source=None, source_real=None):
        """This passes words through layers, which may read a source."""

        def layer(x, q):
            y = layer_norm(q["norm1"], x)
            y = heads(dense(q["qkv"], y), 3)
            y = attention(y[:, :, 0], y[:, :, 1], y[:, :, 2], real[:, None, None])
            x = x + dense(q["out"], y.reshape(x.shape))
            if source is not None:
                both = heads(dense(q["read"], source), 2)
                query = heads(dense(q["ask"], layer_norm(q["norm3"], x)), 1)[:, :, 0]
                y = attention(query, both[:, :, 0], both[:, :, 1], source_real[:, None, None])
                x = x + dense(q["told"], y.reshape(x.shape))
            y = jax.nn.relu(dense(q["up"], layer_norm(q["norm2"], x)))
            return x + dense(q["down"], y), None

        return layer_norm(p["norm"], lax.scan(layer, x, p["layers"])[0])

    def packed(word, to, long):
        """This moves words to places below `long`; places that nothing comes to are holes."""
        fresh = jnp.where(jnp.arange(t) < long[:, None], hole, 0)
        return fresh.at[jnp.arange(b)[:, None], to].set(word, mode="drop")

    def run(p, text, text_short, guess, guess_short):
        """This gives sentences, their lengths, rounds, how sure words are, and how much was changed."""
        place = jnp.arange(t)
        source_real = jnp.arange(s) < (s - text_short)[:, None]
        source = body(p["reader"], p["table"][text] + p["places"][:s], source_real)
        long = t // 2 - guess_short
        word = jnp.where(place < long[:, None] - 1, jnp.maximum(guess, plain), 0)
        word = word.at[:, 0].set(first_word).at[jnp.arange(b), long - 1].set(last_word)

        def written(word, long):
            x = p["table"][word] + p["places"]
            return body(p["writer"], x, place < long[:, None], source, source_real)

        def one_round(carry):
            """This is one round of three decisions."""
            k, word, long, _, _, course = carry
            real = place < long[:, None]
            ends = (word == first_word) | (word == last_word)
            y = dense(p["delete"], written(word, long)).astype(jnp.float32)
            keep = real & (ends | (y[..., 0] + 0.7 > y[..., 1]))
            less = jnp.sum(keep, axis=1)
            thinned = packed(word, jnp.where(keep, jnp.cumsum(keep, axis=1) - 1, t), less)

            y = written(thinned, less)
            pair = jnp.concatenate([y[:, :-1], y[:, 1:]], axis=-1)
            y = dense(p["gaps"], pair).astype(jnp.float32) - 1.2 * jnp.arange(gaps)
            opened = jnp.where(place[1:] < less[:, None], jnp.argmax(y, axis=-1), 0)
            before = jnp.cumsum(opened, axis=1) - opened
            opened = jnp.clip((t - less)[:, None] - before, 0, opened)
            shift = jnp.pad(jnp.cumsum(opened, axis=1), ((0, 0), (1, 0)))
            more = less + shift[:, -1]
            to = jnp.where(place < less[:, None], place + shift, t)
            wide = packed(thinned, to, more)

            y = written(wide, more)
            scores = (y @ p["table"].T).astype(jnp.float32) * n**-0.5
            scores = scores.at[..., :plain].set(-1e9)
            sure = jnp.max(scores, axis=-1) - jax.nn.logsumexp(scores, axis=-1)
            empty = wide == hole
            new = jnp.where(empty, jnp.argmax(scores, axis=-1), wide)
            told = jnp.stack([jnp.sum(real & ~keep), jnp.sum(empty)])
            same = jnp.all(new == word)
            return k + 1, new, more, same, jnp.where(empty, sure, 0.0), course.at[k].set(told)

        start = (jnp.int32(0), word, long, jnp.array(False), jnp.zeros((b, t)), jnp.zeros((rounds, 2), jnp.int32))
        k, word, long, _, sure, course = lax.while_loop(lambda c: (c[0] < rounds) & ~c[3], one_round, start)
        return word, long, k, sure, course

    def matrix(i, o):
        return {
            "w": normal(depth, i, o, dtype=dtype, scale=i**-0.5),
            "b": normal(depth, o, dtype=dtype, scale=0.1),
        }

    def norms():
        return {
            "scale": normal(depth, n, dtype=dtype, scale=0.1, offset=1.0),
            "shift": normal(depth, n, dtype=dtype, scale=0.1),
        }

    def stack(reads: bool) -> dict[str, Any]:
        q = {"norm1": norms(), "norm2": norms(), "qkv": matrix(n, 3 * n), "out": matrix(n, n)}
        q |= {"up": matrix(n, 4 * n), "down": matrix(4 * n, n)}
        if reads:
            q |= {"norm3": norms(), "ask": matrix(n, n), "read": matrix(n, 2 * n), "told": matrix(n, n)}
        shift = normal(n, dtype=dtype, scale=0.1)
        return {"layers": q, "norm": {"scale": gain(n, dtype), "shift": shift}}

    p = {"table": normal(words, n, dtype=dtype), "places": normal(t, n, dtype=dtype), "reader": stack(False)}
    p |= {"writer": stack(True), "delete": {"w": normal(n, 2, dtype=dtype, scale=n**-0.5), "b": normal(2, dtype=dtype)}}
    p["gaps"] = {
        "w": normal(2 * n, gaps, dtype=dtype, scale=(2 * n) ** -0.5),
        "b": normal(gaps, dtype=dtype, scale=0.1),
    }
    inputs = (integers(b, s, below=words), integers(b, below=s // 2), integers(b, t, below=words))
    return Built(run, (p, *inputs, integers(b, below=max(1, t // 4))))


@program("experts-bid-for-words-in-an-auction-until-all-hold-equal-shares-linen", GROUP)
def _auction(size: Size) -> Built:
    """This program gives the chances of words with a layer in which each expert gets exactly the same number of words.

    It is the BASE layer (Lewis, 2021; base_layer of fairseq), with linen: experts bid for the words that suit them best, the price
    of a word rises by each bid, and when every word is sold it passes only through the expert that bought it.
    """
    from flax import linen as nn

    b, t, n, h, wide, experts, words, most = pick(
        size, (4, 512, 768, 12, 3072, 16, 32000, 40), (2, 96, 128, 4, 256, 4, 2003, 60), (1, 8, 8, 2, 12, 2, 11, 6)
    )
    dtype, d, tokens = half(size), n // h, b * t
    each = tokens // experts
    slopes = (2.0 ** (-8 * np.arange(1, h + 1) / h)).astype(np.float32)
    how = {"dtype": dtype, "param_dtype": dtype}

    def sold(worth):
        """This shares words among experts [experts, tokens] by rounds of bids, and tells the rounds and the prices."""
        rows, eps = jnp.arange(experts)[:, None], 1e-2

        def on(carry):
            return (carry[0] < most) & ~jnp.all(carry[3])

        def bids_of(carry):
            k, price, buyer, was_sold, _ = carry
            held = was_sold & (jnp.arange(experts)[:, None] == buyer)
            value = jnp.where(held, worth, worth - price)
            top, at = lax.top_k(value, each + 1)
            bids = jnp.zeros((experts, tokens)).at[rows, at[:, :-1]].set(top[:, :-1] - top[:, -1:] + eps)
            bids = jnp.where(held, eps, bids)
            best = jnp.max(bids, axis=0)
            return k + 1, price + best, jnp.argmax(bids, axis=0), best > 0, at[:, :-1]

        nobody = jnp.zeros(tokens, jnp.int32)
        start = (
            jnp.int32(0),
            jnp.zeros(tokens),
            nobody,
            jnp.zeros(tokens, bool),
            jnp.zeros((experts, each), jnp.int32),
        )
        k, price, _, was_sold, at = lax.while_loop(on, bids_of, start)
        return at, k, price, was_sold

    class Plain(nn.Module):
        """This is an ordinary layer, in which far words are seen less."""

        @nn.compact
        def __call__(self, x, real):
            y = nn.Dense(3 * n, **how)(nn.LayerNorm(**how)(x)).reshape(b, t, 3, h, d)
            scores = jnp.einsum("bqhd,bkhd->bhqk", y[:, :, 0], y[:, :, 1], preferred_element_type=jnp.float32)
            gap = jnp.arange(t)[:, None] - jnp.arange(t)
            scores = scores * d**-0.5 - slopes[:, None, None] * gap
            seen = (gap >= 0) & (real[:, None, None, :] | (gap == 0))
            probs = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1).astype(dtype)
            y = jnp.einsum("bhqk,bkhd->bqhd", probs, y[:, :, 2]).reshape(b, t, n)
            x = x + nn.Dense(n, **how)(y)
            y = nn.gelu(nn.Dense(wide, **how)(nn.LayerNorm(**how)(x)))
            return x + nn.Dense(n, **how)(y)

    class Bought(nn.Module):
        """This sends words through the experts that bought them."""

        @nn.compact
        def __call__(self, x):
            centre = self.param("centre", nn.initializers.normal(1.0), (experts, n))
            x = x.reshape(tokens, n)
            worth = jnp.einsum("tn,en->et", x.astype(jnp.float32), centre)
            worth = worth / (jnp.std(worth) + 1e-6)
            at, rounds, price, was_sold = sold(worth)
            y = x[at]
            for k in range(2):
                scale, shift = (
                    self.param(f"{m}{k}", nn.initializers.normal(1.0), (1, n), dtype) for m in ("scale", "shift")
                )
                up = self.param(f"up{k}", nn.initializers.normal(1.0), (experts, n, wide), dtype)
                down = self.param(f"down{k}", nn.initializers.normal(1.0), (experts, wide, n), dtype)
                z = layer_norm({"scale": 1 + scale[0], "shift": shift[0]}, y)
                z = nn.relu(jnp.einsum("etn,enw->etw", z, up * experts**0.5))
                y = y + jnp.einsum("etw,ewn->etn", z, down * experts**0.5)
            gate = nn.sigmoid(jnp.take_along_axis(worth, at, axis=1))[..., None].astype(dtype)
            change = jnp.zeros_like(x).at[at].add(gate * (y - x[at]))
            many = jnp.zeros(tokens).at[at].add(1.0)
            x = x + change / jnp.maximum(many, 1.0)[:, None].astype(dtype)
            return x.reshape(b, t, n), (rounds, jnp.mean(was_sold), jnp.mean(many == 1), price)

    class Model(nn.Module):
        """This is the whole model."""

        @nn.compact
        def __call__(self, text, real):
            table = self.param("table", nn.initializers.normal(1.0), (words, n), dtype)
            x = nn.LayerNorm(**how)(table[text])
            x, told = Bought()(Plain()(x, real))
            x = nn.LayerNorm(**how)(Plain()(x, real))
            return 4 * (x @ table.T).astype(jnp.float32), told

    model = Model()

    def run(p, text, real):
        """This gives chances of words, and how the auction went."""
        scores, told = model.apply(p, text, real)
        whole = jax.nn.logsumexp(scores, axis=-1)
        own = jnp.take_along_axis(scores[:, :-1], text[:, 1:, None], axis=-1)[..., 0] - whole[:, :-1]
        place = jnp.sum(scores[:, :-1] > (own + whole[:, :-1])[..., None], axis=-1)
        return jnp.where(real[:, 1:], own, 0.0), place, told

    inputs = (integers(b, t, below=words), booleans(b, t))
    structs = jax.eval_shape(model.init, jax.random.key(0), *(z.struct for z in inputs))
    return Built(run, (drawn(structs), *inputs))


@program("weights-rounded-column-by-column-with-errors-passed-on-then-kept-in-nibbles", GROUP)
def _rounded(size: Size) -> Built:
    """This program rounds a layer's weights to four bits so that what the layer gives changes as little as it can.

    It is GPTQ (Frantar, 2022; IST-DASLab/gptq) with columns in order of their size: after each column is rounded, columns that
    follow make up for the error, by the factor of an inverse of squares; nibbles are packed by eights and the layer is tried.
    """
    samples, i, o, group, tries = pick(size, (4096, 1024, 2816, 128, 8), (384, 384, 320, 64, 6), (12, 16, 5, 8, 3))
    dtype, groups = half(size), i // group

    def ranged(w):
        """This gives the step and the nought of rows [o, group], clipped a little where that loses less."""
        top, low = jnp.maximum(jnp.max(w, axis=1), 0.0), jnp.minimum(jnp.min(w, axis=1), 0.0)

        def tried(share):
            step = jnp.maximum(share * (top - low) / 15, 1e-8)
            nought = jnp.round(-share * low / step)
            q = jnp.clip(jnp.round(w / step[:, None]) + nought[:, None], 0, 15)
            return jnp.sum(jnp.abs(step[:, None] * (q - nought[:, None]) - w) ** 2.4, axis=1), step, nought

        lost, step, nought = jax.vmap(tried)(1 - 0.5 * jnp.arange(tries) / tries)
        best = jnp.argmin(lost, axis=0)[None]
        return jnp.take_along_axis(step, best, axis=0)[0], jnp.take_along_axis(nought, best, axis=0)[0]

    def rounded(w, x):
        """This gives nibbles [o, i] of columns in their order, with steps and noughts of groups."""
        squares = jnp.matmul(x.T, x, preferred_element_type=jnp.float32) * (2 / samples)
        size_of = jnp.diagonal(squares)
        dead = size_of <= 1e-9
        squares = squares + jnp.diag(jnp.where(dead, 1.0, 0.0) + 0.01 * jnp.mean(size_of))
        order = jnp.argsort(-size_of)
        w = jnp.where(dead, 0.0, w)[:, order]
        squares = squares[order][:, order]
        factor = jnp.linalg.cholesky(squares)
        inverse = jax.scipy.linalg.cho_solve((factor, True), jnp.eye(i))
        upper = jnp.linalg.cholesky(0.5 * (inverse + inverse.T)).T

        def block(g, carry):
            w, nibbles, steps, noughts = carry
            first = g * group
            part = lax.dynamic_slice(w, (0, first), (o, group))
            rows = lax.dynamic_slice(upper, (first, 0), (group, i))
            square = lax.dynamic_slice(rows, (0, first), (group, group))
            step, nought = ranged(part)

            def column(j, carry):
                part, q, errors = carry
                own = part[:, j]
                level = jnp.clip(jnp.round(own / step) + nought, 0, 15)
                error = (own - step * (level - nought)) / square[j, j]
                part = part - error[:, None] * square[j]
                return part, q.at[:, j].set(level.astype(jnp.uint32)), errors.at[:, j].set(error)

            start = (part, jnp.zeros((o, group), jnp.uint32), jnp.zeros((o, group)))
            _, q, errors = lax.fori_loop(0, group, column, start)
            after = jnp.arange(i) >= first + group
            w = w - jnp.where(after, errors @ rows, 0.0)
            nibbles = lax.dynamic_update_slice(nibbles, q, (0, first))
            return w, nibbles, steps.at[:, g].set(step), noughts.at[:, g].set(nought)

        start = (w, jnp.zeros((o, i), jnp.uint32), jnp.zeros((o, groups)), jnp.zeros((o, groups)))
        return (*lax.fori_loop(0, groups, block, start)[1:], order)

    def packed(q):
        """This packs eight nibbles per word."""
        shift = 4 * jnp.arange(8, dtype=jnp.uint32)
        return jnp.sum(q.reshape(o, i // 8, 8) << shift, axis=-1, dtype=jnp.uint32)

    def layer(words, steps, noughts, order, x):
        """This is the layer from packed nibbles."""
        q = (words[..., None] >> (4 * jnp.arange(8, dtype=jnp.uint32))) & 15
        q = q.reshape(o, groups, group).astype(jnp.float32)
        w = ((q - noughts[..., None]) * steps[..., None]).reshape(o, i).astype(dtype)
        return x[:, order] @ w.T

    def plain(w):
        """This rounds each group to the nearest level."""
        part = w.reshape(o * groups, group)
        step, nought = ranged(part)
        q = jnp.clip(jnp.round(part / step[:, None]) + nought[:, None], 0, 15)
        return (step[:, None] * (q - nought[:, None])).reshape(o, i)

    def run(w, mix, seen, new):
        """This rounds a layer by some states and tries it on others."""
        states, tried = (jax.nn.relu(z @ mix) for z in (seen, new))
        wide = w.astype(jnp.float32)
        nibbles, steps, noughts, order = rounded(wide, states)
        words = packed(nibbles)
        true = (tried @ w.T).astype(jnp.float32)
        own = layer(words, steps, noughts, order, tried).astype(jnp.float32)
        near = (tried @ plain(wide).astype(dtype).T).astype(jnp.float32)
        spread = jnp.mean(true * true)
        lost = jnp.stack([jnp.mean(jnp.square(own - true)), jnp.mean(jnp.square(near - true))]) / spread
        used = jnp.zeros(16, jnp.int32).at[nibbles.reshape(-1).astype(jnp.int32)].add(1)
        return words, steps, noughts, order, lost, used, own

    few = i // 2
    inputs = (normal(o, i, dtype=dtype, scale=i**-0.5), normal(few, i, dtype=dtype, scale=few**-0.5))
    return Built(run, (*inputs, normal(samples, few, dtype=dtype), normal(samples // 4, few, dtype=dtype)))
