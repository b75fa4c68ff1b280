"""Pictures that grow, flows, rivers, words and baskets are learned here, the thirty-first set: its author saw no plan."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, half, integers, normal, pick, program
from benchmarks.workloads.thirty_first_parts import drawn_with_stack
from benchmarks.workloads.twenty_fifth_parts import dense_of
from benchmarks.workloads.twenty_sixth_parts import drawn, is_random, layers_of_nnx, state_of

GROUP = "thirty-first"


@program("cells-that-grow-a-picture-and-mend-wounds-by-one-local-rule-step-equinox", GROUP)
def _growth(size: Size) -> Built:
    """This program is a training step of one rule that all cells of a grid follow, so that a picture grows and heals.

    It is the growing automaton (Mordvintsev, 2020; google-research/self-organising-systems), with equinox and optax: grids come
    from a kept pool, the worst starts anew from a seed, some are wounded, and the gradient goes back through all steps.
    """
    import equinox as eqx
    import optax

    b, side, c, wide, steps, pool = pick(size, (8, 72, 16, 128, 32, 1024), (2, 24, 16, 48, 6, 48), (2, 8, 5, 6, 2, 4))
    optimiser = optax.adam(optax.exponential_decay(2e-3, 2000, 0.1))
    hurt = max(1, b // 3)
    sobel = np.outer([1, 2, 1], [-1, 0, 1]).astype(np.float32) / 8
    point = np.zeros((3, 3), np.float32)
    point[1, 1] = 1.0
    filters = np.tile(np.stack([point, sobel, sobel.T])[:, None], (c, 1, 1, 1))

    class Rule(eqx.Module):
        """This is the rule: what a cell adds to itself, from what it sees."""

        enter: eqx.nn.Conv2d
        leave: eqx.nn.Conv2d

        def __init__(self, key):
            one, two = jax.random.split(key)
            self.enter = eqx.nn.Conv2d(3 * c, wide, 1, key=one)
            self.leave = eqx.nn.Conv2d(wide, c, 1, use_bias=False, key=two)

        def __call__(self, x):
            how = {"padding": "SAME", "feature_group_count": c, "dimension_numbers": ("NCHW", "OIHW", "NCHW")}
            seen = lax.conv_general_dilated(x[None], jnp.asarray(filters), (1, 1), **how)[0]
            return self.leave(jax.nn.relu(self.enter(seen)))

    def alive(x):
        """This tells which cells have a grown neighbour."""
        top = lax.reduce_window(x[:, 3:4], -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 1, 1), "SAME")
        return top > 0.1

    def error(x, target):
        """This is how far each grid is from the picture."""
        return jnp.mean(jnp.square(x[:, :4] - target), axis=(1, 2, 3))

    shapes = eqx.filter_eval_shape(Rule, jax.random.key(0))
    arrays, still = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def loss(p, x, target, key):
        """This lets grids grow and judges them."""
        rule = eqx.combine(p, still)

        def step(x, key):
            before = alive(x)
            moved = jax.random.uniform(key, (b, 1, side, side)) < 0.5
            x = x + jax.vmap(rule)(x) * moved
            return x * (before & alive(x)), jnp.mean(jnp.square(jnp.maximum(jnp.abs(x) - 3.0, 0.0)))

        x, beyond = lax.scan(step, x, jax.random.split(key, steps))
        each = error(x, target)
        return jnp.mean(each) + jnp.mean(beyond), (x, each)

    def train(p, state, kept, target, seed):
        """This is one step of the optimiser, and the pool after it."""
        keys = jax.random.split(jax.random.key(seed), 4)
        row = jnp.arange(side)
        target = jax.nn.sigmoid(target)
        which = jax.random.choice(keys[0], pool, (b,), replace=False)
        x = jnp.clip(kept[which], -3.0, 3.0)
        order = jnp.argsort(-error(x, target))
        x, which = x[order], which[order]
        fresh = jnp.zeros((c, side, side)).at[3:, side // 2, side // 2].set(1.0)
        x = x.at[0].set(fresh)
        centre = side * (0.25 + 0.5 * jax.random.uniform(keys[1], (hurt, 2)))
        reach = side * (0.1 + 0.2 * jax.random.uniform(keys[2], (hurt,)))
        far = (row[:, None] - centre[:, :1, None]) ** 2 + (row - centre[:, 1:, None]) ** 2
        x = x.at[b - hurt :].multiply((far > reach[:, None, None] ** 2)[:, None])
        (value, (after, each)), grads = jax.value_and_grad(loss, has_aux=True)(p, x, target, keys[3])
        grads = jax.tree.map(lambda g: g / (jnp.linalg.norm(g) + 1e-8), grads)
        changes, state = optimiser.update(grads, state, p)
        return eqx.apply_updates(p, changes), state, kept.at[which].set(after), jnp.log10(value), each

    p = jax.tree.map(_filters, drawn(arrays), is_leaf=is_random)
    inputs = (normal(pool, c, side, side, scale=0.5), normal(4, side, side), integers(below=100000))
    return Built(train, (p, state_of(optimiser, p), *inputs))


def _filters(r: Any) -> Any:
    """Returns the description of filters [out, in, 1, 1], scaled by what they read; biases stay."""
    if len(r.shape) < 4:
        return replace(r, scale=0.1, offset=0.0)
    return replace(r, scale=0.3 * r.shape[1] ** -0.5) if r.shape[1] > 1 else r


@program("a-net-of-starts-and-a-net-of-places-learn-flows-from-residuals-grad-linen", GROUP)
def _flows(size: Size) -> Built:
    """This program gives the gradients of two networks that solve Burgers' equation for any start without being shown solutions.

    It is the physics-informed DeepONet (Wang, 2021; PredictiveIntelligenceLab), with linen: one network reads the start at sensors,
    one reads time and place, their product is the flow, and its slopes must fit the equation, the start and the ends.
    """
    from flax import linen as nn

    b, sensors, n, depth, inside, ends = pick(
        size, (512, 101, 100, 4, 2500, 100), (100, 101, 50, 4, 400, 50), (2, 7, 4, 4, 3, 4)
    )
    thick = 0.01

    class Layers(nn.Module):
        """This is a network of a few layers."""

        @nn.compact
        def __call__(self, x):
            for k in range(depth):
                x = nn.tanh(nn.Dense(n, name=f"layer{k}")(x))
            return nn.Dense(n, name="last")(x)

    starts, places = Layers(), Layers()

    def features(p, when, where):
        """These are the shares of all modes at one time and place."""
        return places.apply(p["places"], jnp.stack([when, where])) / n**0.5

    def slopes(p, when, where):
        """These are the shares and their slopes: once along time, once and twice along the line."""

        def along(x):
            return jax.jvp(lambda x: features(p, when, x), (x,), (1.0,))

        (f, f_x), (_, f_xx) = jax.jvp(along, (where,), (1.0,))
        f_t = jax.jvp(lambda t: features(p, t, where), (when,), (1.0,))[1]
        return jnp.stack([f, f_t, f_x, f_xx])

    def loss(p, start, when, where, edge):
        """This judges the equation, the start and the ends."""
        share = starts.apply(p["starts"], start)
        s, s_t, s_x, s_xx = jnp.einsum("bn,ikn->ibk", share, jax.vmap(slopes, (None, 0, 0), 1)(p, when, where))
        broken = jnp.mean(jnp.square(s_t + s * s_x - thick * s_xx))
        at = jnp.linspace(0.0, 1.0, sensors)
        when = jnp.concatenate([jnp.zeros(sensors), edge, edge])
        where = jnp.concatenate([at, jnp.zeros(ends), jnp.ones(ends)])
        s = share @ jax.vmap(features, (None, 0, 0))(p, when, where).T
        first, left, right = jnp.split(s, (sensors, sensors + ends), axis=1)
        begun, closed = jnp.mean(jnp.square(first - start), axis=1), jnp.mean(jnp.square(left - right))
        return broken + 20 * jnp.mean(begun) + closed, (broken, begun, closed)

    def grads(p, waves, when, where, edge):
        """This draws smooth starts from waves and gives the loss and the gradients, clipped by their length."""
        at, many = jnp.linspace(0.0, 1.0, sensors), waves.shape[-1]
        often = jnp.arange(1, many + 1)
        fade = 25.0 / (4 * jnp.pi**2 * often**2 + 25.0)
        turns = 2 * jnp.pi * often[:, None] * at
        start = (waves[:, 0] * fade) @ jnp.sin(turns) + (waves[:, 1] * fade) @ jnp.cos(turns)
        when, where, edge = (jax.scipy.stats.norm.cdf(x) for x in (when, where, edge))
        told, g = jax.value_and_grad(loss, has_aux=True)(p, start, when, where, edge)
        long = jnp.sqrt(sum(jnp.sum(z * z) for z in jax.tree.leaves(g)))
        return told, jax.tree.map(lambda z: z * jnp.minimum(1.0, 10.0 / long), g), long

    def weights(i):
        """This describes the weights of one network that reads i numbers."""
        return drawn(jax.eval_shape(starts.init, jax.random.key(0), jax.ShapeDtypeStruct((i,), jnp.float32)))

    inputs = (normal(b, 2, 12), normal(inside), normal(inside), normal(ends))
    return Built(grads, ({"starts": weights(sensors), "places": weights(2)}, *inputs))


@program("rivers-from-rain-through-snow-soil-and-wells-of-many-basins-step", GROUP)
def _rivers(size: Size) -> Built:
    """This program is a training step of a network that sets the constants of a model of rivers from what basins are like.

    It is differentiable parameter learning (Feng, 2022; mhpi/hydroDL) over the HBV model, with optax: rain becomes snow, soil water
    and two wells day by day, several copies per basin are averaged, and flow reaches the gauge along a curve of days.
    """
    import optax

    basins, copies, days, warm, traits, n, reach = pick(
        size, (671, 16, 150, 30, 35, 256, 15), (101, 4, 90, 20, 35, 64, 15), (3, 2, 9, 2, 4, 5, 3)
    )
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adadelta(1.0))
    names = ("beta", "field", "fast", "middle", "slow", "bar", "sink", "wilt", "split", "melt", "freeze", "hold")
    lows = np.array([1.0, 50.0, 0.05, 0.01, 0.001, 5.0, 0.1, 0.2, -2.5, 0.5, 0.0, 0.0], np.float32)
    tops = np.array([6.0, 900.0, 0.9, 0.5, 0.2, 80.0, 10.0, 1.0, 2.5, 10.0, 0.1, 0.2], np.float32)

    def constants(p, traits):
        """This gives constants of all copies of all basins, and the shapes of their curves of days."""
        y = jax.nn.relu(traits @ p["one"]["w"] + p["one"]["b"])
        y = jax.nn.relu(y @ p["two"]["w"] + p["two"]["b"])
        y = jax.nn.sigmoid(y @ p["last"]["w"] + p["last"]["b"])
        share = y[:, :-2].reshape(basins, copies, len(names))
        every = lows + share * (tops - lows)
        return {s: every[..., k] for k, s in enumerate(names)}, 0.5 + 2.4 * y[:, -2], 0.5 + 6.0 * y[:, -1]

    def flows(q, rain, warmth, thirst):
        """This runs all stores over the days [days, basins]."""

        def day(carry, now):
            snow, wet, soil, upper, lower = carry
            rain, warmth, thirst = (z[:, None] for z in now)
            falls = jax.nn.sigmoid(4 * (q["split"] - warmth))
            snow = snow + falls * rain
            melt = jnp.minimum(q["melt"] * jnp.maximum(warmth - q["split"], 0.0), snow)
            again = jnp.minimum(q["freeze"] * q["melt"] * jnp.maximum(q["split"] - warmth, 0.0), wet)
            snow, wet = snow - melt + again, wet + melt - again
            out = jnp.maximum(wet - q["hold"] * snow, 0.0)
            wet, given = wet - out, out + (1 - falls) * rain
            through = given * jnp.clip((soil / q["field"] + 1e-4) ** q["beta"], 0.0, 1.0)
            soil = soil + given - through
            excess = jnp.maximum(soil - q["field"], 0.0)
            soil = soil - excess
            drunk = jnp.minimum(thirst * jnp.clip(soil / (q["wilt"] * q["field"]), 0.0, 1.0), soil)
            soil = jnp.maximum(soil - drunk, 1e-4)
            upper = upper + through + excess
            sunk = jnp.minimum(q["sink"], upper)
            upper, lower = upper - sunk, lower + sunk
            quick = q["fast"] * jnp.maximum(upper - q["bar"], 0.0)
            upper = upper - quick
            middle, slow = q["middle"] * upper, q["slow"] * lower
            total = jnp.mean(quick + middle + slow, axis=-1)
            return (snow, wet, soil, upper - middle, lower - slow), (total, jnp.mean(drunk, axis=-1))

        start = jnp.full((basins, copies), 1e-3)
        _, told = lax.scan(day, (start, start, start + 50.0, start, start), (rain, warmth, thirst))
        return told

    def loss(p, traits, rain, warmth, thirst, gauge):
        """This is one less the efficiency of Nash and Sutcliffe, beside an error of logarithms."""
        q, shape, scale = constants(p, traits)
        total, drunk = flows(q, rain, warmth, thirst)
        lag = jnp.arange(reach) + 0.5
        curve = jnp.exp((shape[:, None] - 1) * jnp.log(lag) - lag / scale[:, None])
        curve = curve / jnp.sum(curve, axis=1, keepdims=True)
        padded = jnp.pad(total, ((reach - 1, 0), (0, 0)))
        how = {"dimension_numbers": ("NCH", "OIH", "NCH"), "feature_group_count": basins}
        river = lax.conv_general_dilated(padded.T[None], curve[:, None, ::-1], (1,), "VALID", **how)[0].T[warm:]
        seen = gauge[warm:]
        middle = jnp.mean(seen, axis=0)
        wrong = jnp.sum(jnp.square(river - seen), axis=0)
        good = 1 - wrong / (jnp.sum(jnp.square(seen - middle), axis=0) + 0.1)
        small = jnp.mean(jnp.square(jnp.log(river + 0.1) - jnp.log(seen + 0.1)))
        return jnp.mean(0.75 * jnp.minimum(1 - good, 50.0)) + 0.25 * small, (good, jnp.mean(drunk), river)

    def train(p, state, traits, rain, warmth, thirst, gauge):
        """This is one step of the optimiser over a season of all basins."""
        rain = 8.0 * jnp.maximum(rain - 0.3, 0.0)
        season = jnp.cos(2 * jnp.pi * jnp.arange(days) / 365)[:, None]
        warmth, thirst = 8 - 10 * season + 4 * warmth, jnp.maximum(2.5 - 2 * season + 0.5 * thirst, 0.0)
        gauge = jnp.exp(0.5 + 0.7 * gauge)
        (value, told), grads = jax.value_and_grad(loss, has_aux=True)(p, traits, rain, warmth, thirst, gauge)
        changes, state = optimiser.update(grads, state, p)
        return optax.apply_updates(p, changes), state, value, told, jnp.median(told[0])

    p = {"one": dense_of(traits, n), "two": dense_of(n, n), "last": dense_of(n, copies * len(names) + 2)}
    inputs = (normal(basins, traits), *(normal(days, basins) for _ in range(4)))
    return Built(train, (p, state_of(optimiser, p), *inputs))


@program("last-four-words-added-at-four-places-of-each-layer-words-grad-nnx", GROUP)
def _canon(size: Size) -> Built:
    """This program gives the gradients of a language model in which words hear the three words before them all over each layer.

    It is the model with Canon layers (Allen-Zhu, 2025; facebookresearch/PhysicsLM4), with nnx: short causal filters are added
    before attention, to queries, keys and values, before the wide part and inside it; a quarter of each head is turned.
    """
    from flax import nnx

    b, t, n, h, wide, depth, words, taps = pick(
        size, (8, 512, 768, 12, 2048, 4, 32000, 4), (2, 77, 96, 4, 256, 4, 1009, 4), (1, 6, 8, 2, 12, 2, 11, 3)
    )
    dtype, d = half(size), n // h
    turned = max(2, d // 4)
    dense, _, _ = layers_of_nnx(dtype)
    how = {"dtype": dtype, "param_dtype": dtype}

    class Canon(nnx.Module):
        """This adds a short causal filter of each channel."""

        def __init__(self, c, rngs):
            self.taps = nnx.Param(0.1 * jax.random.normal(rngs.params(), (taps, c), dtype))

        def __call__(self, x):
            y = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
            return x + sum(y[:, k : k + t] * self.taps[k] for k in range(taps))

    def rotate(x):
        """This turns pairs of the first part of each head."""
        rate = 10000.0 ** (-jnp.arange(0, turned, 2) / turned)
        angle = jnp.arange(t)[:, None, None] * rate
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        one, two = x[..., 0:turned:2].astype(jnp.float32), x[..., 1:turned:2].astype(jnp.float32)
        both = jnp.stack([one * cos - two * sin, one * sin + two * cos], axis=-1).reshape(b, t, h, turned)
        return jnp.concatenate([both.astype(x.dtype), x[..., turned:]], axis=-1)

    class Layer(nnx.Module):
        """This is one layer."""

        def __init__(self, rngs):
            self.norm1, self.norm2 = nnx.RMSNorm(n, rngs=rngs, **how), nnx.RMSNorm(n, rngs=rngs, **how)
            self.a, self.b, self.c, self.d = (Canon(k, rngs) for k in (n, 3 * n, n, 2 * wide))
            self.qkv, self.out = dense(n, 3 * n, rngs), dense(n, n, rngs)
            self.up, self.down = dense(n, 2 * wide, rngs), dense(wide, n, rngs)

        def __call__(self, x, seen):
            y = self.b(self.qkv(self.a(self.norm1(x)))).reshape(b, t, 3, h, d)
            query, key, value = rotate(y[:, :, 0]), rotate(y[:, :, 1]), y[:, :, 2]
            scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) * d**-0.5
            probs = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e9), axis=-1).astype(dtype)
            x = x + self.out(jnp.einsum("bhqk,bkhd->bqhd", probs, value).reshape(b, t, n))
            gate, up = jnp.split(self.d(self.up(self.c(self.norm2(x)))), 2, axis=-1)
            return x + self.down(nnx.silu(gate) * up)

    class Model(nnx.Module):
        """This is the whole model."""

        def __init__(self, rngs):
            self.table = nnx.Embed(words, n, rngs=rngs, **how)
            self.layers = nnx.split_rngs(splits=depth)(nnx.vmap(Layer))(rngs)
            self.norm = nnx.RMSNorm(n, rngs=rngs, **how)

        def __call__(self, text, seen):
            through = nnx.scan(lambda x, layer: layer(x, seen), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, graph=False)
            x = through(self.table(text), self.layers)
            return self.table.attend(self.norm(x)).astype(jnp.float32)

    graph, weights = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))

    def grads(weights, text, start):
        """This gives the loss of next words in packed texts, and the gradients."""
        text_of = jnp.cumsum(start == 0, axis=1)
        seen = (text_of[:, :, None] == text_of[:, None]) & jnp.tril(jnp.ones((t, t), bool))
        after = jnp.pad(text[:, 1:], ((0, 0), (0, 1)))
        real = jnp.pad(text_of[:, 1:] == text_of[:, :-1], ((0, 0), (0, 1)))

        def loss(weights):
            scores = nnx.merge(graph, weights)(text, seen) * n**-0.5
            whole = jax.nn.logsumexp(scores, axis=-1)
            own = jnp.take_along_axis(scores, after[..., None], axis=-1)[..., 0]
            many = jnp.maximum(jnp.sum(real), 1)
            hit = jnp.sum((jnp.argmax(scores, axis=-1) == after) & real) / many
            return jnp.sum(jnp.where(real, whole - own + 1e-4 * whole**2, 0.0)) / many, hit

        return jax.value_and_grad(loss, has_aux=True)(weights)

    return Built(grads, (drawn_with_stack(weights, "layers"), integers(b, t, below=words), integers(b, t, below=100)))


@program("baskets-of-users-rebuilt-as-shares-of-all-goods-elbo-step-linen", GROUP)
def _baskets(size: Size) -> Built:
    """This program is a training step of a network that guesses which other films users like from those that they liked.

    It is Mult-VAE (Liang, 2018; dawenl/vae_cf), with linen and optax: liked films are scattered into rows, some are left out, a few
    drawn numbers stand for a user, films compete for one share, and the ranking of held-out films is told beside the loss.
    """
    import optax
    from flax import linen as nn

    b, films, liked, held, n, few, best = pick(
        size, (500, 20108, 150, 30, 600, 200, 100), (60, 3001, 40, 10, 128, 50, 100), (3, 13, 4, 2, 5, 3, 4)
    )
    dtype = half(size)
    optimiser = optax.adamw(1e-3, weight_decay=1e-4)

    class Network(nn.Module):
        """This gives scores of all films, and what is believed of users."""

        @nn.compact
        def __call__(self, x, noise):
            y = nn.tanh(nn.Dense(n, dtype=dtype, name="enter")(x))
            y = nn.Dense(2 * few, dtype=dtype, name="believe")(y).astype(jnp.float32)
            mean, spread = jnp.split(y, 2, axis=-1)
            y = nn.tanh(nn.Dense(n, dtype=dtype, name="wide")(mean + jnp.exp(0.5 * spread) * noise))
            return nn.Dense(films, dtype=dtype, name="films")(y).astype(jnp.float32), mean, spread

    model = Network()

    def train(p, state, item, count, kept, hidden, noise, age):
        """This is one step of the optimiser."""
        rows = jnp.arange(b)[:, None]
        real = jnp.arange(liked) < liked - count[:, None]
        seen = jnp.zeros((b, films)).at[rows, item].max(real.astype(jnp.float32))
        left = jnp.zeros((b, films)).at[rows, item].max((real & kept).astype(jnp.float32))
        x = left * lax.rsqrt(jnp.sum(left, axis=1, keepdims=True) + 1e-6)
        warm = jnp.minimum(0.2, age / 200000)

        def loss(p):
            scores, mean, spread = model.apply(p, x, noise)
            logp = jax.nn.log_softmax(scores, axis=-1)
            surprise = -jnp.sum(logp * seen, axis=-1)
            far = 0.5 * jnp.sum(jnp.exp(spread) + mean**2 - 1 - spread, axis=-1)
            return jnp.mean(surprise + warm * far), (jnp.mean(far), scores)

        (value, (far, scores)), grads = jax.value_and_grad(loss, has_aux=True)(p)
        changes, state = optimiser.update(grads, state, p)
        wanted = jnp.zeros((b, films), bool).at[rows, hidden].set(True) & (seen == 0)
        _, top = lax.top_k(jnp.where(seen > 0, -jnp.inf, scores), best)
        hit = jnp.take_along_axis(wanted, top, axis=1)
        gain = 1 / jnp.log2(jnp.arange(best) + 2.0)
        most = jnp.minimum(jnp.sum(wanted, axis=1), best)
        ideal = jnp.sum(jnp.where(jnp.arange(best) < most[:, None], gain, 0.0), axis=1)
        ranked = jnp.sum(hit * gain, axis=1) / jnp.maximum(ideal, 1e-9)
        recall = jnp.sum(hit[:, : best // 5], axis=1) / jnp.maximum(jnp.minimum(most, best // 5), 1)
        told = (value, far, jnp.mean(ranked), jnp.mean(recall), optax.global_norm(grads))
        return optax.apply_updates(p, changes), state, told

    f32 = jax.ShapeDtypeStruct
    structs = jax.eval_shape(model.init, jax.random.key(0), f32((1, films), jnp.float32), f32((1, few), jnp.float32))
    p = drawn(structs)
    inputs = (
        integers(b, liked, below=films),
        integers(b, below=liked - 2),
        booleans(b, liked),
        integers(b, held, below=films),
    )
    return Built(train, (p, state_of(optimiser, p), *inputs, normal(b, few), integers(below=100000)))
