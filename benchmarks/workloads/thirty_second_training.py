"""Made pictures, voices, numerals, walks and callable bonds, with slopes, the thirty-second set: its author saw no plan."""

from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import conv, dense, dense_of, kernel_of
from benchmarks.workloads.twenty_sixth_parts import drawn, state_of

GROUP = "thirty-second"


@program("few-made-pictures-whose-slopes-match-those-of-many-true-ones-step", GROUP)
def _made(size: Size) -> Built:
    """This program is a step that makes a handful of pictures from which a network learns as if from a whole collection.

    It is dataset condensation with siamese changes (Zhao, 2021; VICO-UoE/DatasetCondensation): class by class, the slopes of a
    small network on made pictures are pulled towards its slopes on true ones, then the network itself learns from made pictures.
    """
    classes, each, true, side, w, inner, judged = pick(
        size, (10, 10, 64, 32, 128, 3, 512), (4, 2, 8, 16, 16, 2, 24), (2, 1, 2, 8, 3, 1, 3)
    )
    last = side // 8
    labels = np.repeat(np.arange(classes), each)

    def scores(p, x):
        """These are the scores of pictures, from three layers that each halve the side."""
        for q in p["layers"]:
            x = conv(x, q["kernel"]) + q["b"]
            x = (x - jnp.mean(x, (1, 2), keepdims=True)) * lax.rsqrt(jnp.var(x, (1, 2), keepdims=True) + 1e-5)
            x = jax.nn.relu(x * q["scale"] + q["shift"])
            rows, columns = x.shape[1] // 2, x.shape[2] // 2
            x = jnp.mean(x.reshape(x.shape[0], rows, 2, columns, 2, x.shape[-1]), axis=(2, 4))
        return dense(p["head"], x.reshape(x.shape[0], -1))

    def loss(p, x, label):
        """This is the mean surprise at labels."""
        logp = jax.nn.log_softmax(scores(p, x), axis=-1)
        return -jnp.mean(jnp.take_along_axis(logp, label[:, None], axis=1))

    def changed(x, key):
        """This mirrors, moves, brightens and hides a part of pictures, all in the same way."""
        keys = jax.random.split(key, 5)
        x = jnp.where(jax.random.bernoulli(keys[0]), x[:, :, ::-1], x)
        x = jnp.roll(x, jax.random.randint(keys[1], (2,), -side // 8, side // 8 + 1), axis=(1, 2))
        x = x + 0.5 * (jax.random.uniform(keys[2]) - 0.5)
        mean = jnp.mean(x, axis=(1, 2, 3), keepdims=True)
        x = (x - mean) * (0.5 + jax.random.uniform(keys[3])) + mean
        at = jax.random.randint(keys[4], (2,), 0, side)
        off = jnp.abs(jnp.arange(side) - at[:, None]) < side // 4
        return jnp.where((off[0][:, None] & off[1])[..., None], 0.0, x)

    def apart(one, two):
        """This is how far slopes point apart, channel by channel of what a layer gives."""
        total = 0.0
        for g, f in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
            if g.ndim > 1:
                a, c = g.reshape(-1, g.shape[-1]), f.reshape(-1, f.shape[-1])
                both = jnp.sum(a * c, 0) * lax.rsqrt((jnp.sum(a * a, 0) + 1e-8) * (jnp.sum(c * c, 0) + 1e-8))
                total = total + jnp.sum(1 - both)
        return total

    def train(p, made, speed, pictures, tests, test_label, seed):
        """This is one step for made pictures, and the steps of the network after it."""
        key, inner_key = jax.random.split(jax.random.key(seed))

        def of_class(now):
            own, many, c, key = now
            goal = jax.grad(loss)(p, changed(many, key), jnp.full(true, c))

            def miss(own):
                return apart(jax.grad(loss)(p, changed(own, key), jnp.full(each, c)), goal)

            return jax.value_and_grad(miss)(own)

        keys = jax.random.split(key, classes)
        miss, slope = lax.map(of_class, (made, pictures, jnp.arange(classes), keys))
        speed = 0.5 * speed + slope
        made = made - 0.1 * speed
        all_made = made.reshape(classes * each, side, side, 3)

        def step(carry, key):
            p, past = carry
            value, g = jax.value_and_grad(loss)(p, changed(all_made, key), jnp.asarray(labels))
            past = jax.tree.map(lambda m, g: 0.9 * m + g, past, g)
            return (jax.tree.map(lambda a, m: a - 0.01 * m, p, past), past), value

        start = (p, jax.tree.map(jnp.zeros_like, p))
        (p, _), course = lax.scan(step, start, jax.random.split(inner_key, inner))
        hit = jnp.argmax(scores(p, tests), axis=-1) == test_label
        right = jax.ops.segment_sum(hit.astype(jnp.float32), test_label, classes)
        return p, made, speed, miss, course, right

    def one(i):
        shift = normal(w, scale=0.1)
        return {"kernel": kernel_of(3, i, w), "b": shift, "scale": normal(w, scale=0.1, offset=1.0), "shift": shift}

    p = {"layers": [one(3), one(w), one(w)], "head": dense_of(last * last * w, classes)}
    inputs = (normal(classes, each, side, side, 3), normal(classes, each, side, side, 3, scale=0.01))
    inputs += (normal(classes, true, side, side, 3), normal(judged, side, side, 3), integers(judged, below=classes))
    return Built(train, (p, *inputs, integers(below=1000)))


@program("three-voices-parted-by-masks-over-learned-waves-best-order-counts-grad-linen", GROUP)
def _parted(size: Size) -> Built:
    """This program gives the gradients of a network that parts a recording of three speakers into one recording for each.

    It is Conv-TasNet (Luo and Mesgarani, 2019; kaituoxu/Conv-TasNet), with linen: learned short waves take the place of spectra,
    ever wider filters give masks, and the loss is that of the best order of the speakers, in decibels.
    """
    from flax import linen as nn

    b, samples, waves, n, wide, blocks, repeats = pick(
        size, (4, 16000, 512, 128, 384, 8, 2), (1, 1600, 96, 32, 64, 4, 2), (1, 64, 6, 4, 5, 2, 1)
    )
    voices, long = 3, 16
    hop, dtype = long // 2, half(size)
    orders = np.array(list(permutations(range(voices))))
    how = {"dtype": dtype, "param_dtype": dtype}

    class Whole(nn.Module):
        """This takes off the mean over time and channels, and divides by the spread."""

        @nn.compact
        def __call__(self, x):
            c = x.shape[-1]
            scale = self.param("scale", nn.initializers.ones, (c,))
            shift = self.param("bias", nn.initializers.zeros, (c,))
            y = x.astype(jnp.float32)
            y = (y - jnp.mean(y, (1, 2), keepdims=True)) * lax.rsqrt(jnp.var(y, (1, 2), keepdims=True) + 1e-8)
            return (y * scale + shift).astype(dtype)

    class Block(nn.Module):
        """This is one widening filter; it gives what goes on and what is kept."""

        step: int

        @nn.compact
        def __call__(self, x):
            y = Whole()(nn.PReLU(param_dtype=dtype)(nn.Dense(wide, **how)(x)))
            y = nn.Conv(wide, (3,), kernel_dilation=self.step, feature_group_count=wide, **how)(y)
            y = Whole()(nn.PReLU(param_dtype=dtype)(y))
            return x + nn.Dense(n, **how)(y), nn.Dense(n, **how)(y)

    class Network(nn.Module):
        """This gives the voices [b, voices, samples]."""

        @nn.compact
        def __call__(self, mixed):
            x = jnp.pad(mixed, ((0, 0), (hop, hop))).astype(dtype)
            heard = nn.relu(nn.Conv(waves, (long,), strides=hop, padding="VALID", use_bias=False, **how)(x[..., None]))
            frames = heard.shape[1]
            y = nn.Dense(n, **how)(Whole()(heard))
            kept = 0.0
            for k in range(repeats * blocks):
                y, more = Block(2 ** (k % blocks))(y)
                kept = kept + more
            masks = nn.sigmoid(nn.Dense(voices * waves, **how)(nn.PReLU(param_dtype=dtype)(kept)))
            own = masks.reshape(b, frames, voices, waves) * heard[:, :, None]
            parts = nn.Dense(long, use_bias=False, **how)(own).astype(jnp.float32)
            first = parts[..., :hop].transpose(0, 2, 1, 3).reshape(b, voices, -1)
            second = parts[..., hop:].transpose(0, 2, 1, 3).reshape(b, voices, -1)
            whole = jnp.pad(first, ((0, 0), (0, 0), (0, hop))) + jnp.pad(second, ((0, 0), (0, 0), (hop, 0)))
            return whole[..., hop : hop + samples]

    model = Network()

    def decibels(guess, true):
        """This is how loud a guess [..., samples] is along the true voice, against what is left."""
        along = jnp.sum(guess * true, -1, keepdims=True) / (jnp.sum(true * true, -1, keepdims=True) + 1e-8) * true
        left = jnp.sum(jnp.square(guess - along), axis=-1)
        return 10 / np.log(10) * jnp.log((jnp.sum(along * along, axis=-1) + 1e-6) / (left + 1e-6))

    def grads(p, noise, pitch, loud, short):
        """This gives the loss, the order of voices, the gain in decibels and clipped gradients."""
        time = jnp.arange(samples) / 8000
        real = jnp.arange(samples) < (samples - short)[:, None, None]
        tone = 100 + 60 * jnp.abs(pitch)[..., None] * (1 + 0.05 * jnp.sin(2 * jnp.pi * 3 * time))
        turn = 2 * jnp.pi * jnp.cumsum(tone, axis=-1) / 8000
        true = sum(jnp.sin(k * turn) / k for k in range(1, 6)) * 10 ** (0.1 * loud[..., None]) + 0.1 * noise
        true = jnp.where(real, true, 0.0)
        true = true - jnp.where(real, jnp.mean(true, axis=-1, keepdims=True), 0.0)
        mixed = jnp.sum(true, axis=1)

        def loss(p):
            guess = jnp.where(real, model.apply(p, mixed), 0.0)
            guess = guess - jnp.where(real, jnp.mean(guess, axis=-1, keepdims=True), 0.0)
            each = decibels(guess[:, :, None], true[:, None])
            total = jnp.mean(each[:, orders, np.arange(voices)], axis=-1)
            best = jnp.argmax(total, axis=1)
            top = jnp.max(total, axis=1)
            return -jnp.mean(jnp.minimum(top, 30.0)), (best, top)

        (value, (best, top)), g = jax.value_and_grad(loss, has_aux=True)(p)
        before = jnp.mean(decibels(mixed[:, None], true), axis=1)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(a.astype(jnp.float32))) for a in jax.tree.leaves(g)))
        scale = jnp.minimum(1.0, 5.0 / (norm + 1e-6))
        return (
            value,
            jnp.asarray(orders)[best],
            top - before,
            norm,
            jax.tree.map(lambda a: (a * scale).astype(a.dtype), g),
        )

    structs = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((b, samples), jnp.float32))
    inputs = (normal(b, voices, samples), normal(b, voices), normal(b, voices), integers(b, below=samples // 4))
    return Built(grads, (drawn(structs), *inputs))


@program("numerals-put-in-order-by-softened-swaps-of-a-fixed-network-step-equinox", GROUP)
def _order(size: Size) -> Built:
    """This program is a training step of a network that reads numbers in pictures, told only in which order they should stand.

    It is differentiable sorting by networks (Petersen, 2022; Felix-Petersen/diffsort), with equinox and optax: swaps of Batcher's
    fixed network happen in part, by how far two values are apart, and their product is compared with the true order.
    """
    import equinox as eqx
    import optax

    b, m, high, wide, c, n = pick(size, (64, 16, 28, 112, 32, 64), (3, 8, 28, 56, 12, 48), (2, 4, 8, 12, 2, 4))
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-4))
    pairs = []
    for k in range(1, m.bit_length()):
        for j in range(k - 1, -1, -1):
            own = np.arange(m)[(np.arange(m) >> j) % 2 == 0]
            other = own | (1 << j)
            up = (own >> k) % 2 == 0 if (1 << k) < m else np.ones(len(own), bool)
            pairs.append((np.where(up, own, other), np.where(up, other, own)))
    small = (high - 4) // 2, (wide - 4) // 2
    small = (small[0] - 2) // 2, (small[1] - 2) // 2

    class Reader(eqx.Module):
        """This gives one value for a picture of a number."""

        one: eqx.nn.Conv2d
        two: eqx.nn.Conv2d
        pool: eqx.nn.MaxPool2d
        wide: eqx.nn.Linear
        last: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 4)
            self.one, self.two = eqx.nn.Conv2d(1, c, 5, key=keys[0]), eqx.nn.Conv2d(c, 2 * c, 3, key=keys[1])
            self.pool = eqx.nn.MaxPool2d(2, 2)
            self.wide = eqx.nn.Linear(2 * c * small[0] * small[1], n, key=keys[2])
            self.last = eqx.nn.Linear(n, 1, key=keys[3])

        def __call__(self, x):
            x = self.pool(jax.nn.relu(self.one(x[None])))
            x = self.pool(jax.nn.relu(self.two(x)))
            return self.last(jax.nn.relu(self.wide(x.reshape(-1))))[0]

    shapes = eqx.filter_eval_shape(Reader, jax.random.key(0))
    arrays, still = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def share(gap):
        """This is how far a swap is left undone, by a bell without slopes that vanish."""
        x = 8.0 * gap
        x = x / (jnp.abs(x) + 0.25) ** 0.25
        return jnp.arctan(jnp.pi * x) / jnp.pi + 0.5

    def ordered(values):
        """This gives the ordered values [b, m] and the matrix [b, place, thing] that orders them."""
        moved = jnp.broadcast_to(jnp.eye(m), (b, m, m))
        for low, top in pairs:
            stay = share(values[:, top] - values[:, low])
            one, two = values[:, low], values[:, top]
            values = values.at[:, low].set(stay * one + (1 - stay) * two)
            values = values.at[:, top].set(stay * two + (1 - stay) * one)
            stay = stay[..., None]
            one, two = moved[:, low], moved[:, top]
            moved = moved.at[:, low].set(stay * one + (1 - stay) * two)
            moved = moved.at[:, top].set(stay * two + (1 - stay) * one)
        return values, moved

    def loss(p, pictures, true):
        """This judges the order of sets of pictures."""
        reader = eqx.combine(p, still)
        values = jax.vmap(jax.vmap(reader))(pictures)
        soft, moved = ordered(values)
        moved = jnp.clip(moved, 1e-6, 1 - 1e-6)
        miss = -(true * jnp.log(moved) + (1 - true) * jnp.log1p(-moved))
        return jnp.mean(miss), (values, soft, moved)

    def train(p, state, pictures, number):
        """This is one step of the optimiser, with how many sets and places are right."""
        pictures = jax.nn.relu(pictures) + 0.002 * number[..., None, None].astype(jnp.float32)
        order = jnp.argsort(number, axis=1, stable=True)
        true = jax.nn.one_hot(order, m)
        (value, (values, soft, moved)), g = jax.value_and_grad(loss, has_aux=True)(p, pictures, true)
        changes, state = optimiser.update(g, state, p)
        own = jnp.argsort(values, axis=1)
        right = jnp.take_along_axis(number, own, axis=1) == jnp.sort(number, axis=1)
        told = (value, jnp.mean(right), jnp.mean(jnp.all(right, axis=1)), jnp.mean(jnp.max(moved, axis=-1)))
        return optax.apply_updates(p, changes), state, told, soft

    p = drawn(arrays)
    return Built(train, (p, state_of(optimiser, p), normal(b, m, high, wide), integers(b, m, below=1000)))


@program("places-met-on-leaning-walks-through-a-graph-drawn-near-each-other-rounds", GROUP)
def _walks(size: Size) -> Built:
    """This program gives each node of a graph numbers that are alike for nodes that random walks meet soon after each other.

    It is node2vec (Grover, 2016; aditya-grover/node2vec): a step likes or shuns going back and going far, near nodes on a walk are
    pulled together and drawn ones pushed off, and only rows that were seen are changed, by steps that shrink row by row.
    """
    nodes, most, walkers, steps, n, near, false, rounds = pick(
        size, (100000, 32, 1024, 40, 128, 5, 5, 3), (4000, 16, 64, 20, 64, 3, 5, 2), (12, 4, 3, 5, 4, 2, 2, 2)
    )
    back, far, rate, reach = 0.5, 2.0, 0.05, max(2, nodes // 100)
    gaps = [k for k in range(-near, near + 1) if k]

    def run(own, context, own_sum, context_sum, gap, count, starts, seed):
        """This makes some rounds of walks and changes both tables after each."""
        neighbour = (jnp.arange(nodes)[:, None] + gap - reach // 2) % nodes
        degree = 1 + count

        def walked(start, key):
            """These are walks [walkers, steps]."""

            def step(carry, key):
                before, now = carry
                there = neighbour[now]
                known = (there[:, :, None] == neighbour[before][:, None]) & (
                    jnp.arange(most) < degree[before][:, None, None]
                )
                lean = jnp.where(jnp.any(known, axis=-1), 0.0, -np.log(far))
                lean = jnp.where(there == before[:, None], -np.log(back), lean)
                lean = jnp.where(jnp.arange(most) < degree[now][:, None], lean, -jnp.inf)
                which = jnp.argmax(lean + jax.random.gumbel(key, lean.shape), axis=1)
                new = jnp.take_along_axis(there, which[:, None], axis=1)[:, 0]
                return (now, new), new

            _, course = lax.scan(step, (start, start), jax.random.split(key, steps - 1))
            return jnp.concatenate([start[None], course]).T

        def loss(one, two, wrong, real):
            """This judges nodes [walkers, steps, n] against those near on the walk and those drawn."""
            total = 0.0
            for k in gaps:
                on = (jnp.arange(steps) + k >= 0) & (jnp.arange(steps) + k < steps)
                true = jnp.sum(one * jnp.roll(two, -k, axis=1), axis=-1)
                total = total - jnp.sum(jnp.where(on, jax.nn.log_sigmoid(true), 0.0))
            drawn_of = jnp.einsum("wtn,wtkn->wtk", one, wrong)
            return total - len(gaps) * jnp.sum(jnp.where(real, jax.nn.log_sigmoid(-drawn_of), 0.0))

        def changed(table, total, at, slope):
            """This changes the rows that were seen."""
            at, slope = at.reshape(-1), slope.reshape(-1, n)
            total = total.at[at].add(jnp.mean(slope * slope, axis=-1))
            return table.at[at].add(-rate * slope * lax.rsqrt(total[at] + 1e-6)[:, None]), total

        def one_round(carry, now):
            own, context, own_sum, context_sum = carry
            start, key = now
            keys = jax.random.split(key, 2)
            walk = walked(start, keys[0])
            seen = jnp.zeros(nodes).at[walk].add(1.0)
            course = jnp.cumsum(seen**0.75)
            luck = jax.random.uniform(keys[1], (walkers, steps, false)) * course[-1]
            wrong = jnp.minimum(jnp.searchsorted(course, luck, side="right", method="sort"), nodes - 1)
            real = wrong != walk[..., None]
            value, slopes = jax.value_and_grad(loss, argnums=(0, 1, 2))(own[walk], context[walk], context[wrong], real)
            own, own_sum = changed(own, own_sum, walk, slopes[0])
            both = jnp.concatenate([walk[..., None], wrong], axis=-1)
            slope = jnp.concatenate([slopes[1][:, :, None], slopes[2]], axis=2)
            context, context_sum = changed(context, context_sum, both, slope)
            told = value / (walkers * steps * len(gaps)), jnp.sum(seen > 0), jnp.mean(walk[:, 2:] == walk[:, :-2])
            return (own, context, own_sum, context_sum), told

        carry = (own, context, jnp.abs(own_sum), jnp.abs(context_sum))
        return lax.scan(one_round, carry, (starts, jax.random.split(jax.random.key(seed), rounds)))

    inputs = (normal(nodes, n, scale=0.2), normal(nodes, n, scale=0.2), normal(nodes), normal(nodes))
    inputs += (integers(nodes, most, below=reach), integers(nodes, below=most))
    return Built(run, (*inputs, integers(rounds, walkers, below=nodes), integers(below=1000)))


@program("bonds-that-may-be-called-back-on-a-tree-of-rates-spreads-and-slopes-grad", GROUP)
def _bonds(size: Size) -> Built:
    """This program prices bonds that their issuers may call back, finds their spreads, and tells how prices move with rates.

    It is the tree of three branches (Hull and White, 1994; as in QuantLib): the tree is fitted to the curve of today going forward,
    values roll back with calls and coupons, Newton's steps give spreads, and slopes come per year of the curve and for the swing.
    """
    bonds, steps, per_year, a, keys, rounds = pick(
        size, (1024, 96, 12, 0.05, 10, 3), (300, 60, 4, 0.06, 6, 3), (3, 8, 2, 0.1, 3, 2)
    )
    dt = 1 / per_year
    most = int(np.ceil(0.184 / (a * dt)))
    nodes = 2 * most + 1
    j = np.arange(-most, most + 1)
    z = a * dt * j
    chances = np.stack([1 / 6 + (z * z - z) / 2, 2 / 3 - z * z, 1 / 6 + (z * z + z) / 2])
    chances[:, -1] = (
        7 / 6 + (z[-1] ** 2 - 3 * z[-1]) / 2,
        -1 / 3 - z[-1] ** 2 + 2 * z[-1],
        1 / 6 + (z[-1] ** 2 - z[-1]) / 2,
    )
    chances[:, 0] = chances[::-1, -1]
    goes = np.zeros((nodes, nodes), np.float32)
    for k in range(3):
        goes[np.arange(nodes), np.clip(j, 1 - most, most - 1) + most + 1 - k] += chances[k]
    key_times = np.linspace(0.0, steps * dt, keys).astype(np.float32)
    times = (dt * np.arange(1, steps + 1)).astype(np.float32)
    slot = np.clip(np.searchsorted(key_times, times, side="right") - 1, 0, keys - 2)
    lean = (times - key_times[slot]) / (key_times[slot + 1] - key_times[slot])

    def fitted(zeros, swing):
        """This gives the rates [steps, bonds] in the middle of the tree that agree with curves [bonds, keys]."""
        log_price = -(zeros[:, slot] * (1 - lean) + zeros[:, slot + 1] * lean) * times
        wide = (swing * (3 * dt) ** 0.5)[:, None] * j

        def step(state, now):
            worth = state * jnp.exp(-wide * dt)
            middle = (jnp.log(jnp.sum(worth, axis=1)) - now) / dt
            return (worth * jnp.exp(-middle * dt)[:, None]) @ goes, middle

        start = jnp.zeros((bonds, nodes)).at[:, most].set(1.0)
        return lax.scan(step, start, log_price.T)[1], wide

    def rolled(middle, wide, spread, bond):
        """This gives the prices of bonds, and the chance-weighted share of nodes at which they are called."""
        coupon, every, ends, first_call, premium = bond

        def step(value, now):
            k, middle = now
            pays = ((ends - k - 1) % every == 0) & (k < ends)
            value = value + jnp.where(pays, coupon * every * dt, 0.0)[:, None]
            value = jnp.where((k + 1 == ends)[:, None], 100.0 + (coupon * every * dt)[:, None], value)
            value = (value @ goes.T) * jnp.exp(-(middle[:, None] + wide + spread[:, None]) * dt)
            bar = 100 + premium * jnp.maximum(ends - k, 0) / steps
            may = (k >= first_call) & (k < ends) & (k > 0)
            called = may[:, None] & (value > bar[:, None])
            value = jnp.where(called, bar[:, None], value)
            return jnp.where((k < ends)[:, None], value, 0.0), jnp.mean(called, axis=1)

        value, called = lax.scan(step, jnp.zeros((bonds, nodes)), (jnp.arange(steps), middle), reverse=True)
        return value[:, most], called

    def run(curve, swing, quote, coupon, every, ends, first_call, premium):
        """This gives prices, spreads, slopes per key of the curve and for the swing, and where calls happen."""
        level = 0.03 + 0.01 * (1 - jnp.exp(-key_times / 5)) + 0.002 * curve
        zeros = jnp.broadcast_to(level, (bonds, keys))
        swing = 0.008 * jnp.exp(0.2 * swing)
        ends = steps - ends
        bond = (4 + jnp.tanh(coupon), jnp.where(every > 0, per_year, per_year // 2), ends, first_call, jnp.abs(premium))
        middle, wide = fitted(zeros, swing)
        plain, _ = rolled(middle, wide, jnp.zeros(bonds), bond)
        market = plain * (1 - 0.03 * jax.nn.sigmoid(quote))

        def newton(spread, _):
            def priced(s):
                return rolled(middle, wide, s, bond)[0]

            value, slope = jax.jvp(priced, (spread,), (jnp.ones(bonds),))
            return jnp.clip(spread - (value - market) / jnp.minimum(slope, -1.0), -0.1, 0.1), jnp.max(
                jnp.abs(value - market)
            )

        spread, course = lax.scan(newton, jnp.zeros(bonds), None, length=rounds)

        def total(zeros, swing, spread):
            value, called = rolled(*fitted(zeros, swing), spread, bond)
            return jnp.sum(value), (value, called)

        slopes, (value, called) = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(zeros, swing, spread)
        lasting = [-slopes[0] / value[:, None], 0.01 * slopes[1], -slopes[2] / value]
        return plain, spread, value, lasting, course, called

    inputs = (normal(keys), normal(bonds), normal(bonds), normal(bonds), integers(bonds, below=2))
    inputs += (integers(bonds, below=steps // 2), integers(bonds, below=steps // 2), normal(bonds))
    return Built(run, inputs)
