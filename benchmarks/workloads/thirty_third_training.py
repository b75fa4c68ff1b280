"""Unpaired pictures, operators, springs on weights and traffic, with slopes, the thirty-third set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, half, integers, normal, pick, program
from benchmarks.workloads.twenty_sixth_parts import drawn, state_of

GROUP = "thirty-third"


@program("horses-to-stripes-and-back-again-without-pairs-step-linen", GROUP)
def _stripes(size: Size) -> Built:
    """This program is a training step of two networks that turn pictures of one kind into another and back, without pairs.

    It is CycleGAN (Zhu, 2017; junyanz/pytorch-CycleGAN-and-pix2pix), with linen and optax: pictures must come back after a round
    trip, two judges look at patches, and judges also see made pictures from before.
    """
    import optax
    from flax import linen as nn

    b, side, c, units, pool = pick(size, (4, 128, 64, 6, 48), (1, 32, 8, 6, 8), (1, 16, 2, 6, 3))
    dtype = half(size)
    optimiser = optax.adam(2e-4, b1=0.5)

    def calm(x):
        """This takes the mean off each map and divides by its spread."""
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=(1, 2), keepdims=True)
        return (y * lax.rsqrt(jnp.mean(y * y, axis=(1, 2), keepdims=True) + 1e-5)).astype(dtype)

    def mirrored(x, k):
        return jnp.pad(x, ((0, 0), (k, k), (k, k), (0, 0)), mode="reflect")

    class Painter(nn.Module):
        """This turns pictures into pictures of the other kind."""

        @nn.compact
        def __call__(self, x):
            x = nn.relu(calm(nn.Conv(c, (7, 7), padding="VALID", dtype=dtype)(mirrored(x, 3))))
            for k in (1, 2):
                x = nn.relu(calm(nn.Conv(c << k, (3, 3), 2, padding=1, dtype=dtype)(x)))
            for _ in range(units):
                y = nn.relu(calm(nn.Conv(4 * c, (3, 3), padding="VALID", dtype=dtype)(mirrored(x, 1))))
                x = x + calm(nn.Conv(4 * c, (3, 3), padding="VALID", dtype=dtype)(mirrored(y, 1)))
            for k in (1, 0):
                x = nn.relu(calm(nn.ConvTranspose(c << k, (3, 3), (2, 2), dtype=dtype)(x)))
            return jnp.tanh(nn.Conv(3, (7, 7), padding="VALID", dtype=dtype)(mirrored(x, 3)))

    class Judge(nn.Module):
        """This tells for patches of a picture whether they are true."""

        @nn.compact
        def __call__(self, x):
            x = nn.leaky_relu(nn.Conv(c, (4, 4), 2, padding=1, dtype=dtype)(x), 0.2)
            for k, stride in ((1, 2), (2, 1)):
                x = nn.leaky_relu(calm(nn.Conv(c << k, (4, 4), stride, padding=1, dtype=dtype)(x)), 0.2)
            return nn.Conv(1, (4, 4), padding=1, dtype=dtype)(x).astype(jnp.float32)

    painter, judge = Painter(), Judge()

    def apart(x, y):
        return jnp.mean(jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32)))

    def painted(p, judges, one, two):
        """This is the loss of the painters, and what they made."""
        made_two, made_one = painter.apply(p["to"], one), painter.apply(p["fro"], two)
        again_one, again_two = painter.apply(p["fro"], made_two), painter.apply(p["to"], made_one)
        fooled = jnp.mean(jnp.square(judge.apply(judges["two"], made_two) - 1))
        fooled += jnp.mean(jnp.square(judge.apply(judges["one"], made_one) - 1))
        back = apart(again_one, one) + apart(again_two, two)
        kept = apart(painter.apply(p["fro"], one), one) + apart(painter.apply(p["to"], two), two)
        return fooled + 10 * back + 5 * kept, (made_one, made_two, jnp.stack([fooled, back, kept]))

    def judged(judges, true, made):
        """This is the loss of the judges."""
        total = 0.0
        for name in ("one", "two"):
            good, bad = judge.apply(judges[name], true[name]), judge.apply(judges[name], made[name])
            total = total + 0.5 * (jnp.mean(jnp.square(good - 1)) + jnp.mean(jnp.square(bad)))
        return total

    def train(p, state, judges, judge_state, olds, one, two, seed):
        """This is one step for painters and judges; some made pictures change places with old ones."""
        one, two = jnp.tanh(one), jnp.tanh(two)
        grad = jax.value_and_grad(painted, has_aux=True)
        (loss, (made_one, made_two, parts)), g = grad(p, judges, one, two)
        changes, state = optimiser.update(g, state, p)
        p = optax.apply_updates(p, changes)
        keys = jax.random.split(jax.random.key(seed), 4)
        shown, kept = {}, {}
        for k, (name, made) in enumerate((("one", made_one), ("two", made_two))):
            at = jax.random.permutation(keys[2 * k], pool)[:b]
            swap = jax.random.bernoulli(keys[2 * k + 1], 0.5, (b, 1, 1, 1))
            old = olds[name][at]
            shown[name] = jnp.where(swap, old, made)
            kept[name] = olds[name].at[at].set(jnp.where(swap, made, old))
        judge_loss, g = jax.value_and_grad(judged)(judges, {"one": one, "two": two}, shown)
        changes, judge_state = optimiser.update(g, judge_state, judges)
        judges = optax.apply_updates(judges, changes)
        return p, state, judges, judge_state, kept, jnp.append(parts, jnp.stack([loss, judge_loss]))

    picture = normal(b, side, side, 3, dtype=dtype)
    shape = jax.eval_shape(painter.init, jax.random.key(0), picture.struct)
    judge_shape = jax.eval_shape(judge.init, jax.random.key(0), picture.struct)
    p = {"to": drawn(shape), "fro": drawn(shape)}
    judges = {"one": drawn(judge_shape), "two": drawn(judge_shape)}
    olds = {name: normal(pool, side, side, 3, dtype=dtype, scale=0.5) for name in ("one", "two")}
    states = state_of(optimiser, p), judges, state_of(optimiser, judges)
    return Built(train, (p, *states, olds, picture, picture, integers(below=1000)))


@program("a-branch-for-sources-and-a-trunk-for-places-obey-an-equation-step-haiku", GROUP)
def _branches(size: Size) -> Built:
    """This program is a training step of two networks that learn to solve an equation of stuff that spreads and reacts.

    It is the physics-informed DeepONet (Wang, 2021; PredictiveIntelligenceLab), with haiku and optax: a branch reads a source at
    sensors, a trunk reads a place and a time, and second slopes of their product must obey the equation; no solution is shown.
    """
    import haiku as hk
    import optax

    b, sensors, inner, edge, w, depth = pick(
        size, (256, 100, 128, 64, 128, 5), (24, 50, 32, 16, 48, 5), (2, 6, 3, 2, 4, 5)
    )
    spread, react = 0.01, 0.01
    schedule = optax.exponential_decay(1e-3, 2000, 0.9)
    optimiser = optax.adam(schedule)

    def gated(x):
        """This is a network each of whose layers blends two views of what it reads."""
        one, two = jnp.tanh(hk.Linear(w)(x)), jnp.tanh(hk.Linear(w)(x))
        for _ in range(depth):
            share = jnp.tanh(hk.Linear(w)(x))
            x = share * one + (1 - share) * two
        return hk.Linear(w)(x)

    branch = hk.without_apply_rng(hk.transform(gated))
    trunk = hk.without_apply_rng(hk.transform(gated))

    def loss(p, source, inside, times, sides, starts):
        """This is how far the product is from obeying the equation inside, at the sides, and at the start."""
        ways = branch.apply(p["branch"], source)

        def value(way, x, t):
            return jnp.sum(way * trunk.apply(p["trunk"], jnp.stack([x, t])))

        def residual(way, u, x, t):
            slope_x = jax.grad(value, argnums=1)
            s, s_t = jax.value_and_grad(value, argnums=2)(way, x, t)
            _, s_xx = jax.jvp(lambda x: slope_x(way, x, t), (x,), (jnp.ones(()),))
            there = jnp.interp(x, jnp.linspace(0.0, 1.0, sensors), u)
            return s_t - spread * s_xx - react * s * s - there, s

        over_points = jax.vmap(residual, in_axes=(None, None, 0, 0))
        miss, s = jax.vmap(over_points)(ways, source, inside, times)
        plain = jax.vmap(jax.vmap(value, in_axes=(None, 0, 0)))
        at_side = plain(ways, (jnp.arange(edge) % 2.0) * jnp.ones((b, 1)), sides)
        at_start = plain(ways, starts, jnp.zeros((b, edge)))
        parts = jnp.stack([jnp.mean(z * z) for z in (miss, at_side, at_start)])
        return parts[0] + 10 * (parts[1] + parts[2]), (parts, jnp.mean(miss * miss, axis=1), s)

    def train(p, state, waves, inside, times, sides, starts):
        """This is one step, with the parts of the loss and the worst sources; sources are smooth random curves."""
        place = jnp.linspace(0.0, 1.0, sensors)
        pitch = jnp.arange(1, waves.shape[1] + 1)
        source = (waves / pitch) @ jnp.sin(np.pi * pitch[:, None] * place)
        inside, times, sides, starts = (jax.nn.sigmoid(1.5 * z) for z in (inside, times, sides, starts))
        grad = jax.value_and_grad(loss, has_aux=True)
        (value, (parts, each, s)), g = grad(p, source, inside, times, sides, starts)
        changes, state = optimiser.update(g, state, p)
        return optax.apply_updates(p, changes), state, value, parts, lax.top_k(each, min(8, b)), s

    shapes = {
        "branch": jax.eval_shape(branch.init, jax.random.key(0), jax.ShapeDtypeStruct((b, sensors), jnp.float32)),
        "trunk": jax.eval_shape(trunk.init, jax.random.key(0), jax.ShapeDtypeStruct((2,), jnp.float32)),
    }
    p = drawn(shapes)
    points = normal(b, inner), normal(b, inner), normal(b, edge), normal(b, edge)
    return Built(train, (p, state_of(optimiser, p), normal(b, 12), *points))


@program("tasks-learned-in-turn-with-springs-on-weights-that-mattered-step-equinox", GROUP)
def _springs(size: Size) -> Built:
    """This program is a step of learning a new task while springs hold the weights that older tasks need.

    It is online elastic weight consolidation (Kirkpatrick, 2017; Schwarz, 2018; ContinualAI/avalanche), with equinox: squares of
    slopes of each old example tell how stiff a spring is, and both the springs and the resting weights are told anew.
    """
    import equinox as eqx

    b, judged, side, c, n, classes, pull = pick(
        size, (512, 384, 28, 16, 256, 10, 100.0), (64, 48, 28, 8, 64, 10, 50.0), (3, 2, 12, 2, 5, 3, 10.0)
    )
    small = (side - 4) // 2
    small = (small - 2) // 2

    class Net(eqx.Module):
        """This reads a grey picture and gives scores of classes for one task."""

        one: eqx.nn.Conv2d
        two: eqx.nn.Conv2d
        pool: eqx.nn.AvgPool2d
        wide: eqx.nn.Linear
        norm: eqx.nn.LayerNorm
        last: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 4)
            self.one, self.two = eqx.nn.Conv2d(1, c, 5, key=keys[0]), eqx.nn.Conv2d(c, 2 * c, 3, key=keys[1])
            self.pool = eqx.nn.AvgPool2d(2, 2)
            self.wide = eqx.nn.Linear(2 * c * small * small, n, key=keys[2])
            self.norm = eqx.nn.LayerNorm(n)
            self.last = eqx.nn.Linear(n, classes, key=keys[3])

        def __call__(self, x):
            x = self.pool(jax.nn.relu(self.one(x[None])))
            x = self.pool(jax.nn.relu(self.two(x)))
            return self.last(jax.nn.gelu(self.norm(self.wide(x.reshape(-1)))))

    shapes = eqx.filter_eval_shape(Net, jax.random.key(0))
    arrays, still = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def logp(p, x):
        return jax.nn.log_softmax(eqx.combine(p, still)(x))

    def train(p, rest, stiff, speed, old, order, new, label, seed):
        """This measures springs on old pictures, and makes one step on new ones whose pixels are shuffled."""
        stiff = jax.tree.map(jnp.square, stiff)

        def of_one(x, key):
            """These are squares of slopes of one picture, for a class that the network draws."""
            drawn_class = jax.random.categorical(key, logp(p, x))
            return jax.tree.map(jnp.square, jax.grad(lambda p: logp(p, x)[drawn_class])(p))

        squares = jax.vmap(of_one)(old, jax.random.split(jax.random.key(seed), judged))
        fresh = jax.tree.map(lambda g: jnp.mean(g, axis=0), squares)
        most = jnp.max(jnp.stack([jnp.max(g) for g in jax.tree.leaves(fresh)]))
        stiff = jax.tree.map(lambda s, g: 0.95 * s + g / (most + 1e-12), stiff, fresh)
        shuffled = new.reshape(b, -1)[:, order].reshape(new.shape)

        def loss(p):
            """This is surprise at new labels, and what springs hold."""
            scores = jax.vmap(lambda x: logp(p, x))(shuffled)
            miss = -jnp.mean(jnp.take_along_axis(scores, label[:, None], axis=1))
            held = jax.tree.map(lambda s, a, r: jnp.sum(s * jnp.square(a - r)), stiff, p, rest)
            return miss + 0.5 * pull * sum(jax.tree.leaves(held)), (miss, jnp.argmax(scores, axis=1) == label)

        (value, (miss, right)), g = jax.value_and_grad(loss, has_aux=True)(p)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(a)) for a in jax.tree.leaves(g)))
        scale = jnp.minimum(1.0, 1.0 / (norm + 1e-6))
        speed = jax.tree.map(lambda v, g: 0.9 * v + scale * g, speed, g)
        p = jax.tree.map(lambda a, v: a - 0.05 * v, p, speed)
        rest = jax.tree.map(lambda r, a: 0.99 * r + 0.01 * a, rest, p)
        arrays_of = [jax.tree.leaves(tree) for tree in (p, rest, stiff, speed)]
        return arrays_of, jnp.stack([value, miss, norm, jnp.mean(right)])

    def small_of(scale):
        return jax.tree.map(lambda s: normal(*s.shape, scale=scale), arrays)

    pictures = normal(judged, side, side), integers(side * side, below=side * side, distinct=True)
    inputs = (drawn(arrays), drawn(arrays), small_of(0.1), small_of(1e-3), *pictures)
    return Built(train, (*inputs, normal(b, side, side), integers(b, below=classes), integers(below=1000)))


@program("cars-on-roads-foretold-by-gates-that-walk-along-the-map-grad-haiku", GROUP)
def _roads(size: Size) -> Built:
    """This program gives the gradients of a network that tells the next hour of traffic at all meters of a city.

    It is DCRNN (Li, 2018; liyaguang/DCRNN), with haiku: gates mix meters [batch, meters, units] by random walks along roads both
    ways, a second part goes on from its own guesses or from the truth by chance, and meters that failed are not counted.
    """
    import haiku as hk

    b, nodes, w, seen, ahead, walks = pick(size, (64, 325, 64, 12, 12, 2), (4, 60, 16, 6, 6, 2), (2, 5, 3, 2, 2, 1))
    dtype = half(size)

    class Gates(hk.RNNCore):
        """This is a gated cell whose products go along walks."""

        def __init__(self, ways, name):
            super().__init__(name=name)
            self.ways = ways

        def walked(self, x, wide, name):
            """This joins what meters hold after each number of steps, and mixes it."""
            parts = [x]
            for way in self.ways:
                one, two = x, jnp.einsum("mn,bnc->bmc", way, x)
                parts.append(two)
                for _ in range(walks - 1):
                    one, two = two, 2 * jnp.einsum("mn,bnc->bmc", way, two) - one
                    parts.append(two)
            return hk.Linear(wide, name=name)(jnp.concatenate(parts, axis=-1))

        def __call__(self, x, state):
            both = jnp.concatenate([x, state], axis=-1)
            reset, keep = jnp.split(jax.nn.sigmoid(self.walked(both, 2 * w, "gates")), 2, axis=-1)
            fresh = jnp.tanh(self.walked(jnp.concatenate([x, reset * state], axis=-1), w, "fresh"))
            state = keep * state + (1 - keep) * fresh
            return state, state

        def initial_state(self, batch_size):
            return jnp.zeros((batch_size, nodes, w), dtype)

    def net(past, clock, ways, truth, use_truth):
        """This gives speeds [ahead, batch, meters] from speeds that were seen."""
        reader = hk.DeepRNN([Gates(ways, "read1"), Gates(ways, "read2")])
        teller = hk.DeepRNN([Gates(ways, "tell1"), Gates(ways, "tell2")])
        head = hk.Linear(1, name="head")

        def read(state, now):
            _, state = reader(now, state)
            return state, None

        def tell(carry, now):
            state, guess = carry
            truth, use, clock = now
            y, state = teller(jnp.concatenate([guess, clock], axis=-1), state)
            new = head(y)
            return (state, jnp.where(use, truth, new)), new[..., 0]

        inputs = jnp.concatenate([past, clock[:seen]], axis=-1)
        state, _ = hk.scan(read, reader.initial_state(b), inputs)
        start = (state, jnp.zeros((b, nodes, 1), dtype))
        return hk.scan(tell, start, (truth, use_truth, clock[seen:]))[1]

    model = hk.without_apply_rng(hk.transform(net))

    def grads(p, speed, hour, apart, works, luck):
        """This gives the loss, how far guesses are off at each time ahead, and slopes clipped as a whole."""
        near = jnp.exp(-jnp.square(apart / jnp.std(apart)))
        near = jnp.where(near < 0.1, 0.0, near)
        ways = [(z / (jnp.sum(z, axis=1, keepdims=True) + 1e-6)).astype(dtype) for z in (near, near.T)]
        truth = jnp.cumsum(speed, axis=0) * 0.4
        clock = (hour + jnp.arange(seen + ahead)[:, None]) % 288 / 288
        clock = jnp.broadcast_to(clock[..., None, None], (*truth.shape, 1)).astype(dtype)
        parts = truth[..., None].astype(dtype)

        def loss(p):
            said = model.apply(p, parts[:seen], clock, ways, parts[seen:], luck).astype(jnp.float32)
            off = jnp.where(works, jnp.abs(said - truth[seen:]), 0.0)
            good = jnp.mean(works)
            return jnp.mean(off) / good, (jnp.mean(off, axis=(1, 2)) / good, said)

        (value, (course, said)), g = jax.value_and_grad(loss, has_aux=True)(p)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(a.astype(jnp.float32))) for a in jax.tree.leaves(g)))
        scale = jnp.minimum(1.0, 5.0 / (norm + 1e-6))
        return value, course, said, jax.tree.map(lambda a: (a * scale).astype(a.dtype), g)

    def of(*shape, kind=dtype):
        return jax.ShapeDtypeStruct(shape, kind)

    structs = jax.eval_shape(
        model.init,
        jax.random.key(0),
        of(seen, b, nodes, 1),
        of(seen + ahead, b, nodes, 1),
        [of(nodes, nodes), of(nodes, nodes)],
        of(ahead, b, nodes, 1),
        of(ahead, kind=bool),
    )
    inputs = normal(seen + ahead, b, nodes), integers(b, below=288), normal(nodes, nodes)
    return Built(grads, (drawn(structs, dtype), *inputs, booleans(ahead, b, nodes), booleans(ahead)))
