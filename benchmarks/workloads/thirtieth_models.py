"""Whole models of hearts, boards, speech, genomes and shoppers, the thirtieth set: its author saw no plan."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, gain, half, integers, normal, pick, program, weight
from benchmarks.workloads.twenty_fifth_parts import attention, rms_norm, rotary
from benchmarks.workloads.twenty_sixth_parts import drawn, layers_of_nnx

GROUP = "thirtieth"


@program("hearts-heard-on-twelve-wires-by-filters-of-three-lengths-equinox", GROUP)
def _hearts(size: Size) -> Built:
    """This tells diagnoses of hearts from twelve leads with filters of three lengths side by side.

    It is InceptionTime (Fawaz, 2019) as used on PTB-XL (Strodthoff, 2020), with equinox: the drift of the baseline is taken off by
    a long mean, maps are narrowed before wide filters, every third unit has a shortcut, and time is pooled by attention.
    """
    import equinox as eqx

    b, long, w, depth, classes = pick(size, (128, 1000, 48, 6, 71), (3, 500, 16, 6, 71), (2, 40, 4, 3, 5))
    leads, reaches = 12, (39, 19, 9)
    dtype, drift = half(size), long // 5

    class Unit(eqx.Module):
        """This narrows, filters at three lengths and keeps the largest of three."""

        narrow: eqx.nn.Conv1d
        filters: list[eqx.nn.Conv1d]
        pool: eqx.nn.MaxPool1d
        after: eqx.nn.Conv1d
        norm: eqx.nn.GroupNorm

        def __init__(self, i, key):
            keys = jax.random.split(key, 5)
            self.narrow = eqx.nn.Conv1d(i, w, 1, use_bias=False, key=keys[0])
            self.filters = [
                eqx.nn.Conv1d(w, w, k, padding="SAME", use_bias=False, key=key)
                for k, key in zip(reaches, keys[1:4], strict=True)
            ]
            self.pool = eqx.nn.MaxPool1d(3, 1, padding=1)
            self.after = eqx.nn.Conv1d(i, w, 1, use_bias=False, key=keys[4])
            self.norm = eqx.nn.GroupNorm(4, 4 * w)

        def __call__(self, x):
            y = self.narrow(x)
            y = jnp.concatenate([f(y) for f in self.filters] + [self.after(self.pool(x))], axis=0)
            return jax.nn.relu(self.norm(y))

    class Network(eqx.Module):
        """This is the whole network for one record [leads, long]."""

        units: list[Unit]
        shortcuts: list[eqx.nn.Conv1d]
        score: eqx.nn.Conv1d
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = iter(jax.random.split(key, 2 * depth + 2))
            self.units = [Unit(leads if k == 0 else 4 * w, next(keys)) for k in range(depth)]
            sides = [leads if k == 0 else 4 * w for k in range(depth // 3)]
            self.shortcuts = [eqx.nn.Conv1d(i, 4 * w, 1, key=next(keys)) for i in sides]
            self.score = eqx.nn.Conv1d(4 * w, 1, 1, key=next(keys))
            self.head = eqx.nn.Linear(8 * w, classes, key=next(keys))

        def __call__(self, x, real):
            short = x
            for k, unit in enumerate(self.units):
                x = unit(x)
                if k % 3 == 2:
                    x = jax.nn.relu(x + self.shortcuts[k // 3](short))
                    short = x
            share = jax.nn.softmax(jnp.where(real, self.score(x)[0].astype(jnp.float32), -jnp.inf))
            y = x.astype(jnp.float32)
            top = jnp.max(jnp.where(real, y, -jnp.inf), axis=1)
            pooled = jnp.concatenate([y @ share, top]).astype(dtype)
            return self.head(pooled).astype(jnp.float32), share

    shapes = eqx.filter_eval_shape(Network, jax.random.key(0))
    arrays, still = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def run(arrays, record, length, label):
        """This takes off the drift, scales leads and judges all diagnoses."""
        real = jnp.arange(long) < long - length[:, None]
        mask = real[:, None].astype(jnp.float32)
        total = jnp.cumsum(jnp.pad(record * mask, ((0, 0), (0, 0), (drift, 0))), axis=-1)
        count = jnp.cumsum(jnp.pad(mask, ((0, 0), (0, 0), (drift, 0))), axis=-1)
        mean = (total[..., drift:] - total[..., :-drift]) / jnp.maximum(count[..., drift:] - count[..., :-drift], 1.0)
        x = (record - mean) * mask
        spread = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) / jnp.sum(mask, -1, keepdims=True) + 1e-6)
        x = jnp.clip(x / spread, -8.0, 8.0).astype(dtype)
        scores, share = jax.vmap(eqx.combine(arrays, still))(x, real)
        chance = jax.nn.sigmoid(scores)
        value = jnp.mean(jax.nn.softplus(scores) - scores * label)
        f = (
            2
            * jnp.sum((chance > 0.5) & label, axis=0)
            / jnp.maximum(jnp.sum(chance > 0.5, axis=0) + jnp.sum(label, axis=0), 1)
        )
        return chance, value, f, jnp.argmax(share, axis=-1), spread[..., 0]

    def kept(r: Any) -> Any:
        """This scales filters [out, in, reach] by what they read."""
        if len(r.shape) < 2:
            return r
        scale = 0.1 if r.shape[-1] == 1 and len(r.shape) == 2 else 1.4 * float(np.prod(r.shape[1:])) ** -0.5
        return replace(r, scale=scale)

    p = jax.tree.map(kept, drawn(arrays, dtype), is_leaf=lambda r: hasattr(r, "below"))
    return Built(run, (p, normal(b, leads, long), integers(b, below=long // 3), booleans(b, classes)))


@program("squares-of-a-board-with-attention-drawn-from-the-whole-board-moves-as-pairs-linen", GROUP)
def _board(size: Size) -> Built:
    """This tells chances of moves and of winning from boards of chess, whose squares are words.

    It is the transformer of Leela Chess Zero (LeelaChessZero/lczero-training), with linen: attention gets added tables that a small
    network makes from the whole board, moves are pairs of squares, and 1858 moves are picked out of all pairs and promotions.
    """
    from flax import linen as nn

    b, planes, n, h, wide, depth, small = pick(
        size, (256, 112, 512, 16, 1024, 5, 256), (6, 112, 128, 4, 256, 3, 64), (2, 5, 16, 2, 16, 1, 8)
    )
    dtype = half(size)
    how = {"dtype": dtype, "param_dtype": dtype}
    alpha = (2 * depth) ** 0.25
    far = [(s, t, abs(s % 8 - t % 8), abs(s // 8 - t // 8)) for s in range(64) for t in range(64) if s != t]
    pairs = [(s, t) for s, t, x, y in far if x * y in (0, 2) or x == y]
    raised = [(s, t) for s in range(48, 56) for t in range(56, 64) if abs(s % 8 - t % 8) < 2]
    listed = np.array(
        [s * 64 + t for s, t in pairs] + [4096 + 3 * ((s - 48) * 8 + t - 56) + k for s, t in raised for k in range(3)]
    )

    class Layer(nn.Module):
        """This is one layer, with its own added tables."""

        @nn.compact
        def __call__(self, x, spread):
            y = nn.Dense(32, use_bias=False, name="few", **how)(x).reshape(x.shape[0], -1)
            y = nn.LayerNorm(name="norm_a", **how)(nn.swish(nn.Dense(small, name="hear", **how)(y)))
            y = nn.LayerNorm(name="norm_b", **how)(nn.swish(nn.Dense(h * small, name="per_head", **how)(y)))
            bias = spread(y.reshape(-1, h, small)).reshape(-1, h, 64, 64)
            q, k, v = (nn.Dense(n, name=s, **how)(x).reshape(-1, 64, h, n // h) for s in ("query", "key", "value"))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (n // h) ** -0.5 + bias
            probs = nn.softmax(scores.astype(jnp.float32), axis=-1).astype(dtype)
            y = nn.Dense(n, name="out", **how)(jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(x.shape))
            x = nn.LayerNorm(name="norm_c", **how)(alpha * x + y)
            y = nn.Dense(n, name="down", **how)(jax.nn.mish(nn.Dense(wide, name="up", **how)(x)))
            return nn.LayerNorm(name="norm_d", **how)(alpha * x + y)

    class Network(nn.Module):
        """This is the whole network."""

        @nn.compact
        def __call__(self, x):
            own = nn.Dense(64 * 8, name="places", **how)(x[..., :12].reshape(x.shape[0], -1)).reshape(-1, 64, 8)
            x = jax.nn.mish(nn.Dense(n, name="enter", **how)(jnp.concatenate([x, own], axis=-1)))
            scale = self.param("scale", nn.initializers.ones, (64, n), dtype)
            shift = self.param("shift", nn.initializers.zeros, (64, n), dtype)
            x = nn.LayerNorm(name="norm", **how)(x * (1 + scale) + shift)
            spread = nn.Dense(64 * 64, use_bias=False, name="spread", **how)
            for k in range(depth):
                x = Layer(name=f"layer{k}")(x, spread)
            y = jax.nn.mish(nn.Dense(n, name="policy", **how)(x))
            q, k = nn.Dense(n, name="from", **how)(y), nn.Dense(n, name="to", **how)(y)
            scores = jnp.einsum("bsn,btn->bst", q, k).astype(jnp.float32) * n**-0.5
            more = nn.Dense(4, use_bias=False, name="raise", **how)(k[:, 56:]).astype(jnp.float32)
            more = more[..., :3] + more[..., 3:]
            raised = scores[:, 48:56, 56:, None] + more[:, None]
            every = jnp.concatenate([scores.reshape(-1, 4096), raised.reshape(-1, 192)], axis=-1)
            z = jax.nn.mish(nn.Dense(32, name="value", **how)(x)).reshape(x.shape[0], -1)
            z = jax.nn.mish(nn.Dense(128, name="value2", **how)(z))
            left = nn.relu(nn.Dense(1, name="left", **how)(z))[:, 0]
            return every[:, listed], nn.Dense(3, name="won", **how)(z).astype(jnp.float32), left.astype(jnp.float32)

    model = Network()

    def run(p, boards, legal, move):
        """This tells chances of legal moves, and what the better side may hope for."""
        x = boards.swapaxes(1, 2).astype(dtype)
        scores, won, left = model.apply(p, x)
        scores = jnp.where(legal.at[jnp.arange(b), move].set(True), scores, -1e9)
        logp = jax.nn.log_softmax(scores / 1.36, axis=-1)
        won = jax.nn.softmax(won, axis=-1)
        best, at = lax.top_k(jnp.exp(logp), 8)
        unsure = -jnp.sum(jnp.where(logp > -60, jnp.exp(logp) * logp, 0.0), axis=-1)
        lost = -jnp.take_along_axis(logp, move[:, None], axis=1)[:, 0]
        return best, jnp.asarray(listed)[at], unsure, jnp.mean(lost), won[:, 0] - won[:, 2], won[:, 1], left

    structs = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((b, 64, planes), dtype))
    inputs = (booleans(b, planes, 64), booleans(b, len(listed)), integers(b, below=len(listed)))
    return Built(run, (drawn(structs), *inputs))


@program("letters-with-leaps-over-frames-greedy-until-speech-ends-nnx", GROUP)
def _leaps(size: Size) -> Built:
    """This hears speech and writes pieces of words, each with how many frames may be leapt over, until all speech has ended.

    It is the token-and-duration transducer (Xu, 2023; NVIDIA/NeMo), with nnx: a small convolutional encoder, a memory of what was
    written, a joint network, and a loop in which utterances move at their own pace.
    """
    from flax import nnx

    b, long, bins, n, deep, words, units = pick(
        size, (64, 1024, 80, 512, 640, 1024, 4), (8, 512, 80, 176, 192, 512, 2), (2, 32, 6, 8, 8, 7, 1)
    )
    dtype, frames, leaps, reach = half(size), long // 8, 5, 9
    most, blank = 2 * frames, words
    dense, norm, _ = layers_of_nnx(dtype)
    how = {"dtype": dtype, "param_dtype": dtype}

    class Unit(nnx.Module):
        """This is a gated convolution along time and two dense layers."""

        def __init__(self, rngs):
            self.norm1, self.norm2, self.norm3 = norm(n, rngs), norm(n, rngs), norm(n, rngs)
            self.gate, self.out = dense(n, 2 * n, rngs), dense(n, n, rngs)
            self.near = nnx.Conv(n, n, (reach,), feature_group_count=n, padding="SAME", rngs=rngs, **how)
            self.up, self.down = dense(n, 4 * n, rngs), dense(4 * n, n, rngs)

        def __call__(self, x, real):
            y = nnx.glu(self.gate(self.norm1(x)))
            y = self.near(jnp.where(real[..., None], y, 0))
            x = x + self.out(nnx.silu(self.norm2(y)))
            return x + 0.5 * self.down(nnx.silu(self.up(self.norm3(x))))

    class Network(nnx.Module):
        """This is the encoder, the memory of what was written and the joint network."""

        def __init__(self, rngs):
            self.enter = nnx.List(
                [nnx.Conv(i, n, (3,), strides=2, padding="SAME", rngs=rngs, **how) for i in (bins, n, n)]
            )
            self.units = nnx.List([Unit(rngs) for _ in range(units)])
            self.table = nnx.Embed(words + 1, deep, rngs=rngs, **how)
            self.given, self.kept = dense(deep, 4 * deep, rngs), dense(deep, 4 * deep, rngs)
            self.heard, self.written = dense(n, deep, rngs), dense(deep, deep, rngs)
            self.joint = dense(deep, words + 1 + leaps, rngs)

        def encode(self, x, length):
            for conv in self.enter:
                x = nnx.relu(conv(x))
            real = jnp.arange(frames) < length[:, None]
            for unit in self.units:
                x = unit(x, real)
            return self.heard(x)

        def remember(self, word, state):
            hidden, cell = state
            i, f, g, o = jnp.split((self.given(self.table(word)) + self.kept(hidden)).astype(jnp.float32), 4, axis=-1)
            cell = nnx.sigmoid(f + 1) * cell + nnx.sigmoid(i) * jnp.tanh(g)
            return (nnx.sigmoid(o) * jnp.tanh(cell)).astype(dtype), cell

        def judge(self, heard, hidden):
            y = self.joint(nnx.relu(heard + self.written(hidden))).astype(jnp.float32)
            return y[:, : words + 1].at[:, blank].add(1.5), y[:, words + 1 :]

    graph, weights = nnx.split(nnx.eval_shape(lambda: Network(nnx.Rngs(0))))

    def run(weights, spectrum, length):
        """This writes what it hears, and how sure it is of each piece."""
        model = nnx.merge(graph, weights)
        length = frames - length
        heard = model.encode(spectrum.astype(dtype), length)
        rows = jnp.arange(b)

        def on(carry):
            at, count, *_ = carry
            return jnp.any((at < length) & (count < most))

        def step(carry):
            """This asks once for every utterance."""
            at, count, same, state, text, when, sure, rounds = carry
            live = (at < length) & (count < most)
            scores, leap = model.judge(heard[rows, jnp.minimum(at, frames - 1)], state[0])
            word, leap = jnp.argmax(scores, axis=-1), jnp.argmax(leap, axis=-1)
            logp = jnp.max(jax.nn.log_softmax(scores, axis=-1), axis=-1)
            told = live & (word != blank)
            place = jnp.where(told, count, most)
            text = text.at[rows, place].set(word, mode="drop")
            when = when.at[rows, place].set(at, mode="drop")
            sure = sure.at[rows, place].set(logp, mode="drop")
            fresh = model.remember(word, state)
            state = jax.tree.map(lambda new, old: jnp.where(told[:, None], new, old), fresh, state)
            same = jnp.where(told & (leap == 0), same + 1, 0)
            stuck = ((leap == 0) & ~told) | (same >= 3)
            leap, same = jnp.where(stuck, 1, leap), jnp.where(stuck, 0, same)
            return at + jnp.where(live, leap, 0), count + told, same, state, text, when, sure, rounds + 1

        nought = jnp.zeros(b, jnp.int32)
        state = model.remember(nought + blank, (jnp.zeros((b, deep), dtype), jnp.zeros((b, deep))))
        text, when = jnp.full((b, most), -1, jnp.int32), jnp.zeros((b, most), jnp.int32)
        start = (nought, nought, nought, state, text, when, jnp.zeros((b, most)), jnp.int32(0))
        _, count, _, _, text, when, sure, rounds = lax.while_loop(on, step, start)
        return text, when, count, jnp.sum(sure, axis=1) / jnp.maximum(count, 1), rounds

    return Built(run, (drawn(weights), normal(b, long, bins), integers(b, below=frames // 2)))


@program("genomes-letter-by-letter-by-filters-of-damped-turns-and-one-attention-decode", GROUP)
def _genomes(size: Size) -> Built:
    """This writes the next letter of one genome with long filters that are kept as sums of damped turns, and one attention.

    It is a step of StripedHyena (Poli, 2023; as in evo-design/evo): a short filter over three letters, gates before and after, and
    each channel has some states that are damped and turned; the last layer attends to all letters before.
    """
    n, h, wide, poles, long, depth, words = pick(
        size, (2048, 16, 5504, 16, 16384, 3, 512), (512, 8, 1376, 16, 2048, 2, 512), (16, 2, 24, 3, 8, 2, 9)
    )
    dtype, reach = half(size), 3

    def gated(q, x):
        """This is a gated pair of layers."""
        y = rms_norm(q["norm2"], x)
        return x + (jax.nn.silu(y @ q["gate"]) * (y @ q["up"])) @ q["down"]

    def filtered(x, now):
        """This is one layer with filters."""
        q, past, state = now
        y = rms_norm(q["norm1"], x) @ q["enter"]
        both = jnp.concatenate([past, y[:, None]], axis=1)
        y = jnp.einsum("btc,ct->bc", both, q["short"], preferred_element_type=jnp.float32) + q["short_b"]
        after, before, value = jnp.split(y, 3, axis=-1)
        z = before * value
        size_of, turn = jnp.exp(-jnp.exp(q["damp"])), q["turn"]
        real, imag = size_of * jnp.cos(turn), size_of * jnp.sin(turn)
        a, c = state[..., 0], state[..., 1]
        fresh = jnp.stack([real * a - imag * c + z[..., None], real * c + imag * a], axis=-1)
        y = jnp.einsum("bcpk,cpk->bc", fresh, q["share"]) + q["straight"] * z
        x = x + (after * y).astype(dtype) @ q["leave"] + q["leave_b"]
        return gated(q, x), (both[:, 1:], fresh)

    def step(p, letter, past, state, cache, count, seed, heat):
        """This writes one letter."""
        x = p["table"][letter]
        x, (past, state) = lax.scan(filtered, x, (p["filters"], past, state))
        q, place = p["attend"], count + long // 2
        y = rms_norm(q["norm1"], x)
        query, key, value = jnp.split((y @ q["qkv"]).reshape(1, 1, 3 * h, n // h), 3, axis=2)
        where = jnp.full((1, 1), place)
        query, key = rotary(query, where), rotary(key, where)
        keys = lax.dynamic_update_slice(cache["k"], key, (0, place, 0, 0))
        values = lax.dynamic_update_slice(cache["v"], value, (0, place, 0, 0))
        y = attention(query, keys, values, jnp.arange(long) <= place)
        x = gated(q, x + y.reshape(1, n) @ q["out"])
        logits = jnp.einsum("bn,wn->bw", rms_norm(p["norm"], x), p["table"], preferred_element_type=jnp.float32)
        best, at = lax.top_k(logits / (0.5 + jnp.abs(heat)), 4)
        pick_of = jax.random.categorical(jax.random.key(seed), best, axis=-1)
        word = jnp.take_along_axis(at, pick_of[:, None], axis=1)[:, 0]
        return word, jax.nn.log_softmax(logits, axis=-1), past, state, {"k": keys, "v": values}

    def of(*shape):
        return normal(depth, *shape, dtype=dtype, scale=shape[0] ** -0.5)

    q = {"norm1": normal(depth, n, dtype=dtype, scale=0.1, offset=1.0), "enter": of(n, 3 * n), "leave": of(n, n)}
    q |= {
        "norm2": normal(depth, n, dtype=dtype, scale=0.1, offset=1.0),
        "leave_b": normal(depth, n, dtype=dtype, scale=0.1),
    }
    q |= {"short": normal(depth, 3 * n, reach, dtype=dtype, scale=0.6), "short_b": normal(depth, 3 * n, scale=0.1)}
    q |= {"damp": normal(depth, n, poles, offset=-2.0), "turn": normal(depth, n, poles), "straight": normal(depth, n)}
    q |= {"share": normal(depth, n, poles, 2, scale=0.1)}
    q |= {"gate": of(n, wide), "up": of(n, wide), "down": of(wide, n)}
    a = {
        "norm1": gain(n, dtype),
        "norm2": gain(n, dtype),
        "qkv": weight(n, 3 * n, dtype=dtype),
        "out": weight(n, n, dtype=dtype),
    }
    a |= {
        "gate": weight(n, wide, dtype=dtype),
        "up": weight(n, wide, dtype=dtype),
        "down": weight(wide, n, dtype=dtype),
    }
    p = {"table": normal(words, n, dtype=dtype, scale=n**-0.5), "filters": q, "attend": a, "norm": gain(n, dtype)}
    past, state = normal(depth, 1, reach - 1, 3 * n, dtype=dtype), normal(depth, 1, n, poles, 2, scale=0.5)
    cache = {k: normal(1, long, h, n // h, dtype=dtype) for k in ("k", "v")}
    inputs = (integers(1, below=words), past, state, cache, integers(below=long // 2), integers(below=1000), normal())
    return Built(step, (p, *inputs))


@program("wishes-of-shoppers-that-grow-by-gates-drawn-to-the-shown-good-haiku", GROUP)
def _wishes(size: Size) -> Built:
    """This tells chances that shoppers click a good, from a memory whose gates open for what is like the good.

    It is DIEN (Zhou, 2018; alibaba/ai-matrix), with haiku: a first memory reads the history and is asked to tell the next good from
    a drawn one; a second memory moves by the attention of each step; dense layers have slopes of their own below zero.
    """
    import haiku as hk

    b, long, d, deep, goods, kinds = pick(
        size, (2048, 100, 18, 36, 300007, 1601), (128, 40, 18, 36, 20011, 301), (3, 5, 4, 8, 13, 5)
    )

    class Drawn(hk.RNNCore):
        """This is a gated memory whose gate is scaled by attention."""

        def __call__(self, inputs, state):
            x, share = inputs
            both = jnp.concatenate([x, state], axis=-1)
            moves, reset = jnp.split(jax.nn.sigmoid(hk.Linear(2 * deep, name="gates")(both)), 2, axis=-1)
            fresh = jnp.tanh(hk.Linear(deep, name="fresh")(jnp.concatenate([x, reset * state], axis=-1)))
            move = share[:, None] * moves
            state = (1 - move) * state + move * fresh
            return state, state

        def initial_state(self, batch_size):
            return jnp.zeros((batch_size, deep))

    def sloped(x, name):
        """This is a slope per channel below zero."""
        slope = hk.get_parameter(name, (x.shape[-1],), init=hk.initializers.Constant(0.25))
        return jnp.where(x > 0, x, 0.25 * slope * x)

    @hk.without_apply_rng
    @hk.transform
    def network(good, kind, past, past_kind, other, other_kind, length):
        """This gives scores of clicks and the loss of the next goods."""
        table, kinds_of = hk.Embed(goods, d, name="goods"), hk.Embed(kinds, d, name="kinds")

        def told(i, k):
            return jnp.concatenate([table(i), kinds_of(k)], axis=-1)

        shown, x, wrong = told(good, kind), told(past, past_kind), told(other, other_kind)
        real = jnp.arange(long) < length[:, None]
        x = x * real[..., None]
        core = hk.GRU(deep)
        y, _ = hk.dynamic_unroll(core, x.swapaxes(0, 1), core.initial_state(b))
        y = y.swapaxes(0, 1)
        judge = hk.Sequential(
            [hk.Linear(100), jax.nn.sigmoid, hk.Linear(50), jax.nn.sigmoid, hk.Linear(1)], name="judge"
        )
        true = judge(jnp.concatenate([y[:, :-1], x[:, 1:]], axis=-1))[..., 0]
        false = judge(jnp.concatenate([y[:, :-1], wrong[:, 1:]], axis=-1))[..., 0]
        aside = jnp.where(real[:, 1:], jax.nn.softplus(-true) + jax.nn.softplus(false), 0.0)
        asked = sloped(hk.Linear(deep, name="asked")(shown), "slope_a")[:, None]
        four = jnp.concatenate([jnp.broadcast_to(asked, y.shape), y, asked - y, asked * y], axis=-1)
        scores = hk.nets.MLP([80, 40, 1], activation=jax.nn.sigmoid, name="match")(four)[..., 0]
        share = jax.nn.softmax(jnp.where(real, scores, -1e9), axis=-1)
        second = Drawn()
        wish, last = hk.dynamic_unroll(second, (y.swapaxes(0, 1), share.T), second.initial_state(b))
        whole = jnp.sum(x, axis=1) / jnp.maximum(length, 1)[:, None]
        z = jnp.concatenate([shown, whole, shown * whole, last], axis=-1)
        z = hk.LayerNorm(-1, True, True)(z)
        z = sloped(hk.Linear(200)(z), "slope_b")
        z = sloped(hk.Linear(80)(z), "slope_c")
        return hk.Linear(2)(z), jnp.sum(aside) / jnp.sum(real), share, jnp.mean(wish * wish, axis=(0, 2))

    def run(p, good, past, other, length, click):
        """This judges the scores; the kind of a good follows from its number."""
        length = length + 1
        scores, aside, share, large = network.apply(
            p, good, good % kinds, past, past % kinds, other, other % kinds, length
        )
        logp = jax.nn.log_softmax(scores, axis=-1)
        value = -jnp.mean(jnp.where(click, logp[:, 1], logp[:, 0])) + aside
        chance = jnp.exp(logp[:, 1])
        before = (chance[:, None] > chance) & click[:, None] & ~click
        area = jnp.sum(before) / jnp.maximum(jnp.sum(click) * jnp.sum(~click), 1)
        return chance, value, aside, area, jnp.max(share, axis=1), large

    one, many = jax.ShapeDtypeStruct((b,), jnp.int32), jax.ShapeDtypeStruct((b, long), jnp.int32)
    p = drawn(jax.eval_shape(network.init, jax.random.key(0), one, one, many, many, many, many, one))
    for name in ("goods", "kinds"):
        p[name] = jax.tree.map(lambda r: replace(r, scale=0.3), p[name], is_leaf=lambda r: hasattr(r, "below"))
    inputs = (integers(b, below=goods), integers(b, long, below=goods), integers(b, long, below=goods))
    return Built(run, (p, *inputs, integers(b, below=long), booleans(b)))
