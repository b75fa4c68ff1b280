"""Whole models of photographs, beats, meetings, clicks and sales drawn ahead, the twenty-ninth set: its author saw no plan."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import short
from benchmarks.workloads.twenty_sixth_parts import drawn, layers_of_nnx

GROUP = "twenty-ninth"


@program("pictures-mixed-by-means-of-near-places-less-themselves-classifier-nnx", GROUP)
def _means(size: Size) -> Built:
    """This names photographs with a network in which places hear each other only by the mean of their neighbours.

    It is PoolFormer (Yu, 2022; sail-sg/poolformer), with nnx: the mean leaves out what lies beyond the edge, a place takes itself
    off, norms go over all of a picture, and each branch has a learned scale per channel.
    """
    from flax import nnx

    b, side, w, depths, classes = pick(
        size, (48, 224, 64, (2, 2, 4, 2), 1000), (2, 96, 24, (1, 1, 2, 1), 100), (2, 32, 4, (1, 1, 1, 1), 5)
    )
    dtype, widths = half(size), (w, 2 * w, 5 * w, 8 * w)
    dense, norm, conv = layers_of_nnx(dtype)

    def near(x):
        """This is the mean over three by three places, less the place itself."""
        ones = np.ones(x.shape[1:3], np.float32)[None, :, :, None]
        total, count = (
            lax.reduce_window(z.astype(jnp.float32), 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
            for z in (x, jnp.asarray(ones))
        )
        return (total / count).astype(dtype) - x

    class Unit(nnx.Module):
        """This mixes places, then channels."""

        def __init__(self, c, rngs):
            """This makes its layers."""
            self.norm1, self.norm2 = (nnx.Param(jnp.ones((2, c), dtype)) for _ in range(2))
            self.scale1, self.scale2 = (nnx.Param(jnp.ones(c, dtype)) for _ in range(2))
            self.up, self.down = dense(c, 4 * c, rngs), dense(4 * c, c, rngs)

        def normed(self, q, x):
            """This norms a whole picture."""
            y = x.astype(jnp.float32)
            mean = jnp.mean(y, axis=(1, 2, 3), keepdims=True)
            spread = jnp.mean(jnp.square(y - mean), axis=(1, 2, 3), keepdims=True)
            y = (y - mean) * lax.rsqrt(spread + 1e-5)
            return (y * (1 + 0.1 * q[0].astype(jnp.float32)) + 0.1 * q[1].astype(jnp.float32)).astype(dtype)

        def __call__(self, x):
            """This adds both branches."""
            x = x + self.scale1[...] * near(self.normed(self.norm1[...], x))
            return x + self.scale2[...] * self.down(nnx.gelu(self.up(self.normed(self.norm2[...], x))))

    class Network(nnx.Module):
        """This is the whole network."""

        def __init__(self, rngs):
            """This makes all layers."""
            sides = zip((3, *widths[:-1]), widths, (7, 3, 3, 3), (4, 2, 2, 2), strict=True)
            self.enter = nnx.List([conv(i, o, k, rngs, stride=s) for i, o, k, s in sides])
            self.units = nnx.List(
                [nnx.List([Unit(c, rngs) for _ in range(m)]) for c, m in zip(widths, depths, strict=True)]
            )
            self.norm, self.head = norm(widths[-1], rngs), dense(widths[-1], classes, rngs)

        def __call__(self, x):
            """This gives scores of classes and the size of each stage."""
            large = []
            for enter, units in zip(self.enter, self.units, strict=True):
                x = enter(x)
                for unit in units:
                    x = unit(x)
                large.append(jnp.max(jnp.abs(x.astype(jnp.float32)), axis=(1, 2, 3)))
            x = self.norm(jnp.mean(x.astype(jnp.float32), axis=(1, 2)).astype(dtype))
            return self.head(x).astype(jnp.float32), jnp.stack(large)

    graph, state = nnx.split(nnx.eval_shape(lambda: Network(nnx.Rngs(0))))

    def run(state, raw, label):
        """This names pictures of bytes and tells how many names are right."""
        x = (raw.astype(jnp.float32) - jnp.array([123.7, 116.3, 103.5])) / jnp.array([58.4, 57.1, 57.4])
        scores, large = nnx.merge(graph, state)(x.astype(dtype))
        chance, name = lax.top_k(jax.nn.softmax(scores, axis=-1), 5)
        hits = jnp.sum(jnp.cumsum(name == label[:, None], axis=-1) > 0, axis=0)
        return name, chance, hits, large

    return Built(run, (drawn(state), integers(b, side, side, 3, below=256), integers(b, below=classes)))


@program("beats-of-music-on-bars-of-many-lengths-by-widening-convolutions-linen", GROUP)
def _beats(size: Size) -> Built:
    """This finds the beats of music: a network tells where they may be, and the likeliest path over beats of all lengths decides.

    It is the tracker of Davies (2019) with the states of Krebs (2015), as in CPJKU/madmom, with linen: convolutions widen by
    twos and go both ways, a place moves along a beat by one frame, and its length changes only where a beat ends.
    """
    from flax import linen as nn

    b, frames, bands, c, rounds, shortest, longest = pick(
        size, (8, 301, 81, 32, 8, 28, 108), (2, 177, 81, 16, 6, 28, 84), (2, 9, 81, 4, 2, 2, 5)
    )
    dtype = half(size)
    lengths = np.arange(shortest, longest + 1)
    firsts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    lasts, states = firsts + lengths - 1, int(lengths.sum())
    tempo = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(states) - firsts[tempo]
    isbeat = place < np.maximum(lengths[tempo] / 16, 1)
    moves = -100.0 * np.abs(lengths[None] / lengths[:, None] - 1)
    moves = (moves - np.log(np.exp(moves).sum(axis=1, keepdims=True))).astype(np.float32)

    class Network(nn.Module):
        """This is the whole network."""

        @nn.compact
        def __call__(self, x):
            """This gives scores of beats and of first beats for each frame."""
            how = {"dtype": dtype, "param_dtype": dtype}
            x = x[..., None].astype(dtype)
            for k, wide in enumerate(((3, 3), (3, 3), (1, 8))):
                sides = ((wide[0] // 2, wide[0] // 2), (0, 0))
                x = nn.elu(nn.Conv(c, wide, padding=sides, name=f"conv{k}", **how)(x))
                if k < 2:
                    x = nn.max_pool(x, (1, 3), (1, 3))
            x = jnp.max(x, axis=2)
            kept = 0
            for k in range(rounds):
                y = [nn.Conv(c, (5,), kernel_dilation=(2**k * m,), name=f"wide{k}-{m}", **how)(x) for m in (1, 2)]
                y = nn.elu(jnp.concatenate(y, axis=-1))
                y = nn.Dense(c, name=f"join{k}", **how)(y)
                x, kept = x + y, kept + y
            scores = [nn.Dense(1, name=f"head{k}", **how)(nn.elu(x)).astype(jnp.float32)[..., 0] for k in range(2)]
            meter = nn.Dense(len(lengths), name="tempo", **how)(jnp.mean(kept, axis=1))
            return *scores, nn.softmax(meter.astype(jnp.float32), axis=-1)

    model = Network()

    def path(chance):
        """This finds the likeliest path of one piece of music [frames]."""
        beat = jnp.log(jnp.clip(chance, 1e-4, 1 - 1e-4))
        rest = jnp.log((1 - jnp.clip(chance, 1e-4, 1 - 1e-4)) / 15)

        def ahead(score, now):
            """This goes one frame ahead; only first places of beats keep where they come from."""
            each = score[lasts][:, None] + moves
            score = jnp.roll(score, 1).at[firsts].set(jnp.max(each, axis=0))
            return score + jnp.where(isbeat, now[0], now[1]), jnp.argmax(each, axis=0).astype(jnp.int16)

        start = jnp.full(states, -float(np.log(states)))
        last, came = lax.scan(ahead, start, (beat, rest))

        def before(at, came):
            """This goes one frame back."""
            return jnp.where(place_of[at] == 0, jnp.asarray(lasts)[came[tempo_of[at]]], at - 1), at

        place_of, tempo_of = jnp.asarray(place), jnp.asarray(tempo)
        end = jnp.argmax(last)
        _, at = lax.scan(before, end, came, reverse=True)
        return at, jnp.max(last)

    def run(p, music):
        """This tells beats, lengths and how regular they are."""
        slow = jnp.cumsum(music, axis=1) / jnp.sqrt(jnp.arange(1.0, frames + 1))[:, None]
        x = jnp.log1p(jnp.abs(music + 0.5 * slow))
        beat, first, meter = model.apply(p, x)
        beat = jax.nn.sigmoid(2 * (beat - jnp.mean(beat, axis=1, keepdims=True)))
        at, score = jax.vmap(path)(beat)
        is_beat = jnp.asarray(place)[at] == 0
        count = jnp.sum(is_beat, axis=1)
        long = jnp.asarray(lengths)[jnp.asarray(tempo)[at]]
        number = jnp.cumsum(is_beat, axis=1)
        bar = jax.nn.sigmoid(first)
        votes = jnp.stack([jnp.sum(bar * (is_beat & (number % 4 == k)), axis=1) for k in range(4)], axis=-1)
        mean = jnp.mean(60 * 100 / long, axis=1)
        return is_beat, count, mean, score, jnp.argmax(votes, axis=-1), jnp.argmax(meter, axis=-1)

    structs = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((b, frames, bands), jnp.float32))
    return Built(run, (drawn(structs), normal(b, frames, bands)))


@program("meetings-change-what-each-side-remembers-then-links-are-told-linen", GROUP)
def _meetings(size: Size) -> Built:
    """This tells which pairs meet next from what each one remembers, after what it remembers has changed by its last meeting.

    It is the temporal graph network (Rossi, 2020; twitter-research/tgn), with linen: of many messages of one node the last one
    counts, a gated unit changes its memory, times become cosines, and a node attends over its latest neighbours.
    """
    from flax import linen as nn

    nodes, events, n, edge, near, h = pick(
        size, (65521, 4001, 172, 172, 20, 2), (4001, 301, 64, 32, 10, 2), (11, 5, 4, 3, 2, 2)
    )
    dtype = half(size)
    how = {"dtype": dtype, "param_dtype": dtype}

    class Clock(nn.Module):
        """This makes cosines of times that passed."""

        @nn.compact
        def __call__(self, passed):
            """This gives n numbers per time."""
            rate = self.param("rate", nn.initializers.normal(), (n,))
            turn = self.param("turn", nn.initializers.normal(), (n, 1))[:, 0]
            base = 10.0 ** (-jnp.linspace(0.0, 6.0, n))
            return jnp.cos(passed[..., None] * base * rate + turn).astype(dtype)

    class Network(nn.Module):
        """This is the whole network."""

        def setup(self):
            """This makes all layers."""
            self.clock = Clock()
            self.cell = nn.GRUCell(n, recurrent_kernel_init=nn.initializers.lecun_normal(), **how)
            self.query, self.key = nn.Dense(h * n, use_bias=False, **how), nn.Dense(h * n, use_bias=False, **how)
            self.value, self.leave = nn.Dense(h * n, use_bias=False, **how), nn.Dense(n, **how)
            self.one, self.two = nn.Dense(n, **how), nn.Dense(n, **how)
            self.pair, self.score = nn.Dense(n, **how), nn.Dense(1, **how)

        def remember(self, memory, seen, past):
            """This changes memories by the last meeting of each node."""
            source, target, time, feature = past
            node = jnp.concatenate([source, target])
            other = jnp.concatenate([target, source])
            when, what = jnp.concatenate([time, time]), jnp.concatenate([feature, feature])
            order = jnp.arange(2 * events)
            last = jax.ops.segment_max(order, node, nodes)
            wins = last[node] == order
            told = [
                memory[node],
                memory[other],
                what.astype(dtype),
                self.clock((when - seen[node]).astype(jnp.float32)),
            ]
            fresh, _ = self.cell(memory[node], jnp.concatenate(told, axis=-1))
            at = jnp.where(wins, node, nodes)
            return memory.at[at].set(fresh, mode="drop"), seen.at[at].set(when, mode="drop")

        def told_of(self, memory, node, now, table):
            """This describes nodes by their latest neighbours."""
            who, when, what = table["who"][node], table["when"][node], table["what"][node]
            real = (who >= 0) & (when < now[:, None])
            passed = (now[:, None] - when).astype(jnp.float32)
            own = jnp.concatenate([memory[node], self.clock(jnp.zeros(node.shape))], axis=-1)
            theirs = jnp.concatenate([memory[jnp.maximum(who, 0)], what.astype(dtype), self.clock(passed)], axis=-1)
            query = self.query(own).reshape(-1, h, n)
            key, value = (f(theirs).reshape(-1, near, h, n) for f in (self.key, self.value))
            scores = (query[:, None] * key).sum(-1).astype(jnp.float32) * n**-0.5
            scores = jnp.where(real[..., None], scores, -1e9)
            probs = jnp.where(jnp.any(real, axis=1)[:, None, None], nn.softmax(scores, axis=1), 0.0)
            y = (probs.astype(dtype)[..., None] * value).sum(1).reshape(-1, h * n)
            return self.two(nn.relu(self.one(jnp.concatenate([self.leave(y), memory[node]], axis=-1))))

        def __call__(self, memory, seen, past, table, asked):
            """This gives scores of true and of drawn pairs, and the new memories."""
            memory, seen = self.remember(memory, seen, past)
            source, target, wrong, now = asked
            every = self.told_of(memory, jnp.concatenate([source, target, wrong]), jnp.tile(now, 3), table)
            one, two, three = jnp.split(every, 3)
            both = jnp.concatenate([jnp.concatenate([one, z], axis=-1) for z in (two, three)])
            scores = self.score(nn.relu(self.pair(both)))[:, 0].astype(jnp.float32)
            return *jnp.split(scores, 2), memory, seen

    model = Network()

    def run(p, memory, past, table, asked):
        """This moves memories on and judges the scores of pairs."""
        seen = jnp.min(table["when"], axis=1) // 2
        source, target, wrong = asked
        table = table | {"who": table["who"] - nodes // 8}
        past = (*past[:2], 10007 + past[2], past[3])
        now = 20011 + jnp.arange(events)
        true, false, memory, seen = model.apply(p, memory, seen, past, table, (source, target, wrong, now))
        scores = jnp.concatenate([true, false])
        order = jnp.argsort(-scores)
        hit = order < events
        exact = jnp.cumsum(hit) / jnp.arange(1, 2 * events + 1)
        mean = jnp.sum(jnp.where(hit, exact, 0.0)) / events
        loss = jnp.mean(jax.nn.softplus(-true)) + jnp.mean(jax.nn.softplus(false))
        return true, false, mean, loss, memory, jnp.max(seen), jnp.sum(jnp.diff(seen) != 0)

    past = (integers(events, below=nodes), integers(events, below=nodes), integers(events, below=9973, ramp=True))
    past += (normal(events, edge),)
    table = {"who": integers(nodes, near, below=nodes), "when": integers(nodes, near, below=20011)}
    table |= {"what": normal(nodes, near, edge, dtype=dtype)}
    asked = tuple(integers(events, below=nodes) for _ in range(3))
    memory = normal(nodes, n, dtype=dtype, scale=0.5)
    structs = [jax.tree.map(lambda r: r.struct, z, is_leaf=lambda r: hasattr(r, "below")) for z in (past, table, asked)]
    args = (memory.struct, jax.ShapeDtypeStruct((nodes,), jnp.int32), structs[0], structs[1])
    asked_of = (*structs[2], jax.ShapeDtypeStruct((events,), jnp.int32))
    return Built(
        run, (drawn(jax.eval_shape(model.init, jax.random.key(0), *args, asked_of)), memory, past, table, asked)
    )


@program("columns-weighed-by-their-means-and-multiplied-through-matrices-clicks-equinox", GROUP)
def _clicks(size: Size) -> Built:
    """This tells chances of clicks from columns of kinds, each of which is weighed, and from products of all pairs of columns.

    It is FiBiNET (Huang, 2019; as in shenweichen/DeepCTR), with equinox: means of columns are squeezed into weights, one column of
    a pair passes a matrix of its own before the product, and both the plain and the weighed columns give such products.
    """
    import equinox as eqx

    b, fields, reals, kinds, d, deep = pick(
        size, (4096, 26, 13, 50021, 16, 400), (301, 26, 13, 2003, 8, 128), (3, 4, 2, 7, 3, 5)
    )
    dtype = short(size)
    left, right = np.triu_indices(fields, 1)

    class Network(eqx.Module):
        """This is the whole network for one row."""

        table: jax.Array
        lines: jax.Array
        pairs: jax.Array
        scale: jax.Array
        squeeze: list[eqx.nn.Linear]
        layers: list[eqx.nn.Linear]
        norms: list[eqx.nn.LayerNorm]

        def __init__(self, key):
            """This makes all weights."""
            keys = iter(jax.random.split(key, 12))
            self.table = jax.random.normal(next(keys), (fields, kinds, d))
            self.lines = jax.random.normal(next(keys), (fields, kinds))
            self.pairs = jax.random.normal(next(keys), (d, fields, d))
            self.scale = jax.random.normal(next(keys), (reals, 1))
            small = max(fields // 3, 1)
            self.squeeze = [eqx.nn.Linear(i, o, False, key=next(keys)) for i, o in ((fields, small), (small, fields))]
            widths = (2 * len(left) * d + reals, deep, deep, 1)
            self.layers = [eqx.nn.Linear(i, o, key=next(keys)) for i, o in pairwise(widths)]
            self.norms = [eqx.nn.LayerNorm(deep) for _ in range(2)]

        def products(self, x):
            """This multiplies columns in pairs, one of them after its matrix."""
            y = jnp.einsum("fi,ifo->fo", x, self.pairs)
            return (y[left] * x[right]).reshape(-1)

        def __call__(self, kind, x):
            """This gives the score of one row and the weights of its columns."""
            rows = jnp.arange(fields)
            y = self.table[rows, kind]
            share = jax.nn.relu(self.squeeze[1](jax.nn.relu(self.squeeze[0](jnp.mean(y, axis=-1)))))
            x = jnp.sign(x) * jnp.log1p(jnp.abs(x))
            line = jnp.sum(self.lines[rows, kind].astype(jnp.float32)) + jnp.sum(x * self.scale[:, 0])
            z = jnp.concatenate([self.products(y), self.products(y * share[:, None]), x.astype(dtype)])
            for layer, norm in zip(self.layers[:-1], self.norms, strict=True):
                z = jax.nn.relu(norm(layer(z)))
            return self.layers[-1](z)[0].astype(jnp.float32) + 0.1 * line, share

    shapes = eqx.filter_eval_shape(Network, jax.random.key(0))
    arrays, still = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def run(arrays, kind, x, click):
        """This scores all rows and judges the scores by loss, order and bins."""
        score, share = jax.vmap(eqx.combine(arrays, still))(kind * kind // kinds, x)
        chance = jax.nn.sigmoid(score)
        loss = jnp.mean(jax.nn.softplus(score) - score * click)
        rank = jnp.zeros(b).at[jnp.argsort(score)].set(jnp.arange(1.0, b + 1))
        good = jnp.sum(click)
        area = (jnp.sum(rank * click) - good * (good + 1) / 2) / jnp.maximum(good * (b - good), 1)
        at = jnp.minimum((chance * 20).astype(jnp.int32), 19)
        told, true, count = (jax.ops.segment_sum(z, at, 20) for z in (chance, click.astype(jnp.float32), jnp.ones(b)))
        off = jnp.sum(jnp.abs(told - true)) / b
        return chance, loss, area, off, count, jnp.mean(share.astype(jnp.float32), axis=0)

    def kept(r: Any) -> Any:
        """This keeps entries of tables small and scales matrices by their inputs, which come last."""
        return replace(r, scale={3: 0.3, 2: r.shape[-1] ** -0.5}.get(len(r.shape), r.scale))

    p = jax.tree.map(kept, drawn(arrays, dtype), is_leaf=lambda r: hasattr(r, "below"))
    return Built(run, (p, integers(b, fields, below=kinds), normal(b, reals, scale=3.0), booleans(b)))


@program("many-futures-drawn-day-by-day-with-long-tails-lstm-haiku", GROUP)
def _futures(size: Size) -> Built:
    """This draws many futures of many series day by day and tells bounds that hold them, and how good the bounds are.

    It is DeepAR (Salinas, 2017; as in awslabs/gluonts), with haiku: two memories read the past and its lags, each day gives a
    curve of Student from which the next day is drawn, and series are scaled by their mean size.
    """
    import haiku as hk

    b, past, ahead, draws, deep, kinds = pick(
        size, (128, 168, 24, 100, 64, 321), (24, 97, 12, 24, 40, 321), (2, 9, 3, 4, 4, 5)
    )
    lags = np.array([1, 2, 3, 7, 14, 28] if past > 30 else [1, 2])
    most = int(lags.max())
    levels = np.array([0.1, 0.25, 0.5, 0.75, 0.9], np.float32)

    @hk.without_apply_rng
    @hk.transform
    def network(x, kind, day, state):
        """This moves the memories by one day and tells a curve."""
        turn = 2 * np.pi * day[..., None] / np.array([7.0, 30.5, 365.25])
        clock = jnp.broadcast_to(jnp.concatenate([jnp.sin(turn), jnp.cos(turn)], axis=-1), (*x.shape[:-1], 6))
        table = hk.Embed(kinds, 12)(kind)
        x = jnp.concatenate([x, table, clock], axis=-1)
        core = hk.DeepRNN([hk.LSTM(deep), jax.nn.relu, hk.LSTM(deep)])
        y, state = core(x, state)
        middle, spread, tails = jnp.split(hk.Linear(3)(y), 3, axis=-1)
        return (middle[..., 0], jax.nn.softplus(spread[..., 0]) + 1e-3, 2 + jax.nn.softplus(tails[..., 0])), state

    def start_of(rows):
        """This is the state of empty memories."""
        return tuple(hk.LSTMState(jnp.zeros((rows, deep)), jnp.zeros((rows, deep))) for _ in range(2))

    def surprise(curve, y):
        """This is how unlikely days are."""
        middle, spread, tails = curve
        z = (y - middle) / spread
        front = jax.lax.lgamma((tails + 1) / 2) - jax.lax.lgamma(tails / 2) - 0.5 * jnp.log(np.pi * tails)
        return jnp.log(spread) - front + (tails + 1) / 2 * jnp.log1p(z * z / tails)

    def run(p, series, kind, truth, seed):
        """This reads the past, draws futures and judges them."""
        walk = 5 + 0.3 * jnp.cumsum(series, axis=1) + 2 * series
        size_of = jnp.mean(jnp.abs(walk), axis=1, keepdims=True) + 1e-3
        walk = walk / size_of
        at = np.arange(most, past)[:, None] - lags

        def read(state, now):
            """This reads one day of the past."""
            x, y, day = now
            curve, state = network.apply(p, x, kind, day, state)
            return state, surprise(curve, y)

        days = jnp.arange(past, dtype=jnp.float32)
        state, lost = lax.scan(read, start_of(b), (walk[:, at].swapaxes(0, 1), walk[:, most:].T, days[most:]))
        rows = b * draws
        state, recent, kind_of = (
            jax.tree.map(lambda z: jnp.repeat(z, draws, axis=0), z) for z in (state, walk[:, -most:], kind)
        )

        def draw(carry, now):
            """This draws one day for all futures: a curve of Student from two even numbers."""
            state, recent = carry
            key, day = now
            curve, state = network.apply(p, recent[:, most - lags], kind_of, day, state)
            u, v = jax.random.uniform(key, (2, rows), minval=1e-4)
            middle, spread, tails = curve
            y = jnp.sqrt(tails * (u ** (-2 / tails) - 1)) * jnp.cos(2 * np.pi * v)
            y = jnp.clip(middle + spread * y, -50.0, 50.0)
            return (state, jnp.concatenate([recent[:, 1:], y[:, None]], axis=1)), y

        keys = jax.random.split(jax.random.key(seed), ahead)
        _, out = lax.scan(draw, (state, recent), (keys, past + jnp.arange(ahead, dtype=jnp.float32)))
        out = jnp.sort(out.reshape(ahead, b, draws) * size_of, axis=-1)
        bound = jnp.stack([out[..., int(q * (draws - 1))] for q in levels], axis=-1)
        truth = (walk[:, -1] * size_of[:, 0])[None] + 0.3 * jnp.cumsum(truth, axis=0)
        off = truth[..., None] - bound
        risk = 2 * jnp.sum(jnp.maximum(levels * off, (levels - 1) * off), axis=(0, 1)) / jnp.sum(jnp.abs(truth))
        pairs = jnp.sum(out * (2 * jnp.arange(draws) - draws + 1), axis=-1) / draws**2
        ranked = jnp.mean(jnp.abs(out - truth[..., None]), axis=-1) - pairs
        held = jnp.mean((off[..., 0] > 0) & (off[..., -1] < 0), axis=1)
        return bound, risk, jnp.mean(ranked, axis=0), held, jnp.mean(lost, axis=0)

    def f32(*shape):
        """This is the shape of an array."""
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    kind_of = jax.ShapeDtypeStruct((b,), jnp.int32)
    structs = jax.eval_shape(
        network.init, jax.random.key(0), f32(b, len(lags)), kind_of, f32(), jax.eval_shape(lambda: start_of(b))
    )
    inputs = (normal(b, past), integers(b, below=kinds), normal(ahead, b), integers(below=1000))
    return Built(run, (drawn(structs), *inputs))
