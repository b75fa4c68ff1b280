"""Played games, neurons that fire, nouns in a ball and hidden courses, the thirtieth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program, weight
from benchmarks.workloads.twenty_fifth_parts import dense, dense_of
from benchmarks.workloads.twenty_sixth_parts import drawn, state_of

GROUP = "thirtieth"


@program("worths-of-moves-from-fresh-plays-alone-by-norms-and-mixed-returns-radam-step-linen", GROUP)
def _plays(size: Size) -> Built:
    """This is a step that learns worths of moves of games from fresh plays, without kept plays and without a slow copy.

    It is PQN (Gallici, 2024; mttga/purejaxql), with linen and optax: convolutions with norms, returns mixed backwards over the
    steps of all games, rewards clipped to their signs, and one gradient over all frames.
    """
    import optax
    from flax import linen as nn

    steps, games, side, w, deep, moves = pick(
        size, (16, 64, 84, 32, 512, 18), (6, 16, 44, 16, 256, 18), (3, 2, 36, 2, 6, 4)
    )
    dtype = half(size)
    optimiser = optax.chain(optax.clip_by_global_norm(10.0), optax.radam(2.5e-4))
    fade, mix = 0.99, 0.65

    class Network(nn.Module):
        """This gives worths of moves from four frames."""

        @nn.compact
        def __call__(self, x):
            x = x.astype(dtype) / 255
            for c, k, s in ((w, 8, 4), (2 * w, 4, 2), (2 * w, 3, 1)):
                x = nn.Conv(c, (k, k), strides=(s, s), padding="VALID" if s > 1 else "SAME", dtype=dtype)(x)
                x = nn.relu(nn.LayerNorm(dtype=dtype)(x))
            x = x.reshape(x.shape[0], -1)
            x = nn.relu(nn.LayerNorm(dtype=dtype)(nn.Dense(deep, dtype=dtype)(x)))
            return nn.Dense(moves, dtype=jnp.float32)(x)

    model = Network()

    def returns(worth, reward, ended):
        """This mixes returns backwards."""

        def back(carry, now):
            mixed, after = carry
            worth, reward, ended = now
            one = reward + fade * (1 - ended) * after
            mixed = one + fade * mix * (1 - ended) * (mixed - after)
            return (mixed, jnp.max(worth, axis=-1)), mixed

        last = jnp.max(worth[-1], axis=-1)
        _, target = lax.scan(back, (last, last), (worth[:-1], reward, ended), reverse=True)
        return target

    def step(p, state, frames, move, reward, ended):
        """This is one step of the optimiser over all plays."""
        x = frames.reshape(-1, *frames.shape[2:])
        reward, ended = jnp.sign(jnp.trunc(reward)), (ended == 0).astype(jnp.float32)
        before = model.apply(p, x).reshape(steps + 1, games, moves)
        target = lax.stop_gradient(returns(before, reward, ended))

        def loss(p):
            worth = model.apply(p, x[: steps * games]).reshape(steps, games, moves)
            own = jnp.take_along_axis(worth, move[..., None], axis=-1)[..., 0]
            return 0.5 * jnp.mean(jnp.square(own - target)), worth

        (value, worth), grads = jax.value_and_grad(loss, has_aux=True)(p)
        changes, state = optimiser.update(grads, state, p)
        p = optax.apply_updates(p, changes)
        greedy = jnp.mean(jnp.argmax(worth, axis=-1) == move)
        often = jnp.zeros(moves).at[move.reshape(-1)].add(1.0)
        return p, state, value, target, greedy, often, optax.global_norm(grads)

    p = drawn(jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, side, side, 4), jnp.int32)))
    frames = integers(steps + 1, games, side, side, 4, below=256)
    inputs = (integers(steps, games, below=moves), normal(steps, games), integers(steps, games, below=50))
    return Built(step, (p, state_of(optimiser, p), frames, *inputs))


@program("neurons-that-fire-and-tire-taught-through-softened-edges-adamax-step", GROUP)
def _firing(size: Size) -> Built:
    """This is a training step of neurons that fire at bars, taught with softened edges to name spoken digits.

    It is the network of Cramer (2020, spoken digits; norse/norse and jeshraghian/snntorch) with bars that rise after
    each firing (Bellec, 2018), with optax: events are scattered into steps of time, and firing is pulled to a wanted rate.
    """
    import optax

    b, steps, ears, n, classes, events = pick(
        size, (256, 100, 700, 512, 20, 6000), (24, 40, 175, 128, 20, 600), (2, 6, 7, 5, 3, 9)
    )
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamax(1e-3))

    @jax.custom_jvp
    def fires(x):
        """This is one above nought."""
        return (x > 0).astype(jnp.float32)

    @fires.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return fires(x), t / jnp.square(1 + 10 * jnp.abs(x))

    def listen(p, sounds):
        """This runs one layer of neurons over time, and leaky readers behind it."""
        keep, slow, tire = (jax.nn.sigmoid(p[k]) for k in ("keep", "slow", "tire"))
        fade = jax.nn.sigmoid(p["fade"])
        given = jnp.einsum("tbe,en->tbn", sounds, p["ears"])

        def step(carry, now):
            current, level, fired, tired, out = carry
            current = slow * current + now + fired @ p["own"]
            tired = tire * tired + (1 - tire) * fired
            bar = 1 + 1.8 * tired
            level = keep * level * (1 - lax.stop_gradient(fired)) + (1 - keep) * current
            fired = fires(level - bar)
            out = fade * out + (1 - fade) * dense(p["read"], fired)
            return (current, level, fired, tired, out), (out, fired)

        zeros = jnp.zeros((b, n))
        _, (out, fired) = lax.scan(step, (zeros, zeros, zeros, zeros, jnp.zeros((b, classes))), given)
        return out, fired

    def loss(p, sounds, label):
        out, fired = listen(p, sounds)
        best = jnp.max(out, axis=0)
        logp = jax.nn.log_softmax(best, axis=-1)
        each = jnp.mean(fired, axis=0)
        value = -jnp.mean(jnp.take_along_axis(logp, label[:, None], axis=-1))
        quiet = jnp.mean(jnp.square(jax.nn.relu(0.01 - jnp.mean(each, axis=0))))
        loud = jnp.mean(jnp.square(jax.nn.relu(jnp.sum(each, axis=-1) / n - 0.1)))
        return value + 5 * quiet + 5 * loud, (best, jnp.argmax(out, axis=0), each)

    def step(p, state, when, ear, count, label):
        """This is one step of the optimiser."""
        heard = jnp.arange(events) < events - count[:, None]
        rows = jnp.arange(b)[:, None]
        sounds = jnp.zeros((steps, b, ears)).at[when, rows, ear].add(heard.astype(jnp.float32))
        sounds = jnp.minimum(sounds, 1.0)
        (value, (best, at, each)), grads = jax.value_and_grad(loss, has_aux=True)(p, sounds, label)
        changes, state = optimiser.update(grads, state, p)
        hit = jnp.mean(jnp.argmax(best, axis=-1) == label)
        return optax.apply_updates(p, changes), state, value, hit, at, jnp.mean(each, axis=0), optax.global_norm(grads)

    p = {"ears": normal(ears, n, scale=2.0 * ears**-0.5), "own": weight(n, n), "read": dense_of(n, classes)}
    p |= {k: normal(n, scale=0.3, offset=2.0) for k in ("keep", "slow")} | {"tire": normal(n, scale=0.3, offset=4.0)}
    p |= {"fade": normal(classes, scale=0.3, offset=2.0)}
    inputs = (integers(b, events, below=steps), integers(b, events, below=ears), integers(b, below=events // 2))
    return Built(step, (p, state_of(optimiser, p), *inputs, integers(b, below=classes)))


@program("nouns-in-a-ball-whose-room-grows-outwards-curved-steps", GROUP)
def _nouns(size: Size) -> Built:
    """This moves nouns in a ball of curved room so that kinds lie inwards of what they hold, in a few rounds.

    It is the embedding of Poincaré (Nickel, 2017; facebookresearch/poincare-embeddings): true pairs compete with drawn ones by
    their distances, gradients are rescaled by the curvature, steps follow straight ways of the ball, and nouns stay within.
    """
    nouns, d, b, others, rounds = pick(size, (82115, 50, 4096, 50, 4), (20011, 16, 512, 20, 4), (11, 3, 4, 3, 2))
    edge = 1 - 1e-5

    def inside(x):
        """This pulls nouns back into the ball."""
        long = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-12)
        return jnp.where(long > edge, x / long * edge, x)

    def distance(u, v):
        """This is the distance in the ball."""
        one, two = 1 - jnp.sum(u * u, axis=-1), 1 - jnp.sum(v * v, axis=-1)
        z = 2 * jnp.sum(jnp.square(u - v), axis=-1) / jnp.maximum(one * two, 1e-9)
        return jnp.log1p(z + jnp.sqrt(z * (z + 2) + 1e-9))

    def loss(table, left, right):
        """This is the surprise at true pairs, which come first among all."""
        far = distance(table[left][:, None], table[right])
        logp = jax.nn.log_softmax(jnp.where(right == left[:, None], -1e9, -far), axis=-1)
        rank = 1 + jnp.sum(far[:, 1:] < far[:, :1], axis=-1)
        return -jnp.mean(logp[:, 0]), rank

    def added(x, v):
        """This adds as velocities are added in the ball."""
        xv, xx, vv = (jnp.sum(p, axis=-1, keepdims=True) for p in (x * v, x * x, v * v))
        return ((1 + 2 * xv + vv) * x + (1 - xx) * v) / jnp.maximum(1 + 2 * xv + xx * vv, 1e-9)

    def train(table, left, right, start):
        """This is some rounds, slow at first."""
        table = inside(table)
        right = jnp.where(left[..., None] == right, (right + 1) % nouns, right)

        def one(table, now):
            left, right, k = now
            (value, rank), grads = jax.value_and_grad(loss, has_aux=True)(table, left, right)
            room = 1 - jnp.sum(table * table, axis=-1, keepdims=True)
            rate = jnp.where(start + k < 10, 0.03, 0.3) * b / 10
            way = -rate * grads * jnp.square(room) / 4
            long = jnp.sqrt(jnp.sum(way * way, axis=-1, keepdims=True) + 1e-12)
            fresh = inside(added(table, jnp.tanh(jnp.minimum(long / room, 5.0)) * way / long))
            moved = jnp.sum(jnp.any(grads != 0, axis=-1))
            return fresh, (value, jnp.mean(rank), jnp.mean(1.0 / rank), moved)

        table, told = lax.scan(one, table, (left, right, jnp.arange(rounds)))
        depth = distance(table, jnp.zeros(d))
        return table, told, jnp.histogram(depth, bins=20, range=(0.0, 8.0))[0]

    inputs = (integers(rounds, b, below=nouns), integers(rounds, b, 1 + others, below=nouns), integers(below=20))
    return Built(train, (normal(nouns, d, scale=0.4 * d**-0.5), *inputs))


@program("hidden-courses-of-neurons-with-a-steering-hand-from-counts-elbo-grad-haiku", GROUP)
def _courses(size: Size) -> Built:
    """This gives the gradients of a network that tells hidden courses of many neurons from counts of their firing.

    It is LFADS (Pandarinath, 2018; lfads/models), with haiku: memories read trials both ways, a controller steers the generator by
    drawn pushes whose likely size is learned, some counts are hidden from the reader and only those are judged.
    """
    import haiku as hk
    import optax

    b, steps, neurons, n, small, factors, pushes = pick(
        size, (256, 100, 182, 200, 128, 40, 4), (16, 40, 64, 64, 32, 20, 3), (2, 5, 4, 6, 5, 3, 2)
    )

    @hk.without_apply_rng
    @hk.transform
    def network(seen, noise, more):
        """This gives rates of firing [steps, b, neurons] and how far the beliefs are from what was likely."""
        forth, back = hk.GRU(n, name="forth"), hk.GRU(n, name="back")
        one, last = hk.dynamic_unroll(forth, seen, forth.initial_state(b))
        two, first = hk.dynamic_unroll(back, seen, back.initial_state(b), reverse=True)
        begin = hk.Linear(2 * n, name="begin")(jnp.concatenate([last, first], axis=-1))
        mean, spread = jnp.split(begin, 2, axis=-1)
        spread = jnp.clip(spread, -8.0, 4.0)
        g = mean + jnp.exp(0.5 * spread) * noise
        prior = jnp.log(0.1)
        far = 0.5 * jnp.sum(prior - spread + (jnp.exp(spread) + mean**2) / 0.1 - 1, axis=-1)

        steer, move = hk.GRU(small, name="steer"), hk.GRU(n, name="move")
        tell, told = hk.Linear(2 * pushes, name="push"), hk.Linear(factors, with_bias=False, name="factors")
        slow = jax.nn.sigmoid(hk.get_parameter("slow", (pushes,), init=jnp.ones))
        wide = hk.get_parameter("wide", (pushes,), init=jnp.zeros)
        heard = hk.Linear(small, name="heard")(jnp.concatenate([one, two], axis=-1))

        def step(carry, now):
            """This is one step of the controller and the generator."""
            hand, g, f, before = carry
            heard, eps = now
            _, hand = steer(jnp.concatenate([heard, f], axis=-1), hand)
            mean, spread = jnp.split(tell(hand), 2, axis=-1)
            spread = jnp.clip(spread, -8.0, 4.0)
            push = mean + jnp.exp(0.5 * spread) * eps
            _, g = move(push, g)
            g = jnp.clip(g, -5.0, 5.0)
            f = told(g)
            off = (jnp.exp(spread) + (mean - slow * before) ** 2) / jnp.exp(wide)
            far = 0.5 * jnp.sum(wide - spread + off - 1, axis=-1)
            return (hand, g, f, push), (f, push, far)

        start = (jnp.zeros((b, small)), g, told(g), jnp.zeros((b, pushes)))
        _, (f, push, more_far) = hk.scan(step, start, (heard, more))
        return hk.Linear(neurons, name="rates")(f), f, push, far, jnp.sum(more_far, axis=0)

    def loss(p, raw, hide, noise, more, age):
        """This is the loss of hidden counts and of beliefs, whose weight grows with age."""
        counts = jnp.maximum(jnp.floor(0.6 * jnp.exp(0.7 * raw)), 0.0)
        shown = hide > 0
        seen = jnp.where(shown, counts * 4 / 3, 0.0)
        log_rate, f, push, far, more_far = network.apply(p, seen, noise, more)
        log_rate = jnp.clip(log_rate, -6.0, 4.0)
        surprise = jnp.exp(log_rate) - counts * log_rate + lax.lgamma(counts + 1)
        judged = jnp.sum(jnp.where(shown, 0.0, surprise), axis=(0, 2)) * 4
        warm = jnp.minimum((1 + age) / 500.0, 1.0)
        value = jnp.mean(judged + warm * (far + more_far))
        value = value + 1e-3 * sum(jnp.sum(jnp.square(v)) for q in p.values() for k, v in q.items() if k == "w_h")
        flat = jnp.log(jnp.mean(counts, axis=(0, 1)) + 1e-3)
        flat = jnp.exp(flat) - counts * flat + lax.lgamma(counts + 1)
        bits = (jnp.sum(flat) - jnp.sum(surprise)) / (jnp.sum(counts) + 1) / np.log(2)
        return value, (bits, jnp.mean(far), jnp.mean(more_far), f, push)

    def grads(p, *rest):
        """This gives the gradients, clipped by their length."""
        (value, told), g = jax.value_and_grad(loss, has_aux=True)(p, *rest)
        long = optax.global_norm(g)
        return jax.tree.map(lambda z: z * jnp.minimum(1.0, 200.0 / long), g), value, told, long

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    structs = jax.eval_shape(network.init, jax.random.key(0), f32(steps, b, neurons), f32(b, n), f32(steps, b, pushes))
    inputs = (normal(steps, b, neurons), integers(steps, b, neurons, below=4), normal(b, n), normal(steps, b, pushes))
    return Built(grads, (drawn(structs), *inputs, integers(below=400)))
