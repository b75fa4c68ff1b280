"""Losses with their gradients and whole training steps, the sixteenth set: its author saw no plan."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import module_weights
from benchmarks.workloads.registry import Built, Random, Size, gain, half, integers, normal, pick, program, weight
from benchmarks.workloads.sixteenth_language import rms, rotate
from benchmarks.workloads.sixteenth_models import equinox_parts

GROUP = "sixteenth"


def moments(params, positive: bool):
    """This function describes an optimiser's averages for described parameters: of squares, if positive."""

    def of(r: Random) -> Random:
        if positive:
            return Random(r.shape, jnp.dtype(jnp.float32), 1e-5, 1e-3)
        return Random(r.shape, jnp.dtype(jnp.float32), 1e-3)

    return jax.tree.map(of, params, is_leaf=lambda leaf: isinstance(leaf, Random))


@program("normal-float-nibbles-double-quantised-adapters-grad", GROUP)
def _nibbles(size: Size) -> Built:
    """This gives gradients of low-rank adapters of a layer whose weights are four-bit codes with quantised scales."""
    b, t, n, h, m, rank, words, block = pick(
        size, (4, 500, 1536, 12, 4096, 16, 8000, 64), (2, 96, 384, 6, 1024, 8, 1000, 64), (2, 5, 16, 2, 32, 2, 11, 8)
    )
    dtype, d = half(size), n // h
    levels = np.array([-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0, 0.0796, 0.1609, 0.2461, 0.3379])
    levels = np.concatenate([levels, [0.4407, 0.5626, 0.723, 1.0]]).astype(np.float32)

    def restored(q, shape):
        low, high = q["codes"] & 15, (q["codes"] >> 4) & 15
        values = jnp.asarray(levels)[jnp.stack([low, high], axis=-1).reshape(-1, block)]
        inner = (q["scales"].astype(jnp.float32) - 100.0) / 127.0 * q["outer"][:, None]
        scales = jnp.abs(inner.reshape(-1) + q["mean"])[: values.shape[0]]
        return (values * scales[:, None]).reshape(shape).astype(dtype)

    def linear(q, adapter, x, outputs):
        frozen = lax.stop_gradient(restored(q, (x.shape[-1], outputs)))
        return x @ frozen + (x @ adapter["a"] @ adapter["b"]) * (16.0 / rank)

    def loss(adapters, frozen, norms, table, text, answer):
        x = table[text]
        y = rms(x, norms[0])
        q, k, v = (linear(frozen[f], adapters[f], y, n).reshape(b, t, h, d) for f in "qkv")
        q, k = rotate(q, jnp.arange(t)), rotate(k, jnp.arange(t))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * d**-0.5
        scores = jnp.where(jnp.tri(t, dtype=bool), scores, jnp.finfo(jnp.float32).min)
        seen = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(dtype), v)
        x = x + linear(frozen["o"], adapters["o"], seen.reshape(b, t, n), n)
        y = rms(x, norms[1])
        y = jax.nn.silu(linear(frozen["gate"], adapters["gate"], y, m)) * linear(frozen["up"], adapters["up"], y, m)
        x = rms(x + linear(frozen["down"], adapters["down"], y, n), norms[2])
        log_probs = jax.nn.log_softmax(jnp.einsum("btn,wn->btw", x, table).astype(jnp.float32))
        picked = jnp.take_along_axis(log_probs[:, :-1], text[:, 1:, None], axis=-1)[..., 0]
        counted = answer[:, 1:] < 3
        return -jnp.sum(picked * counted) / jnp.maximum(jnp.sum(counted), 1)

    def codes(i, o):
        blocks = i * o // block
        groups = -(-blocks // 256)
        q = {"codes": integers(i * o // 2, below=256), "scales": integers(groups, 256, below=200)}
        scale = 0.5 * i**-0.5
        return q | {
            "outer": normal(groups, scale=scale / 10, offset=scale),
            "mean": normal(1, scale=0.0, offset=2 * scale),
        }

    shapes = {name: (n, n) for name in "qkvo"} | {"gate": (n, m), "up": (n, m), "down": (m, n)}
    frozen = {name: codes(*shape) for name, shape in shapes.items()}
    adapters = {
        name: {"a": weight(i, rank, dtype=dtype), "b": normal(rank, o, dtype=dtype, scale=0.01)}
        for name, (i, o) in shapes.items()
    }
    table = normal(words, n, dtype=dtype, scale=n**-0.5)
    texts = (integers(b, t, below=words), integers(b, t, below=4))
    return Built(jax.value_and_grad(loss), (adapters, frozen, [gain(n, dtype) for _ in range(3)], table, *texts))


@program("few-shot-tasks-through-inner-steps-meta-grad", GROUP)
def _meta(size: Size) -> Built:
    """This gives the meta-gradient of a small convolutional network through two inner steps on each of many tasks."""
    tasks, ways, shots, asked, side, n = pick(size, (8, 5, 5, 10, 28, 32), (4, 5, 1, 3, 28, 16), (2, 2, 1, 2, 8, 4))

    def forward(p, images):
        x = images
        for kernel, scale, shift in zip(p["kernels"], p["scales"], p["shifts"], strict=True):
            x = lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            mean, spread = jnp.mean(x, axis=(0, 1, 2)), jnp.var(x, axis=(0, 1, 2))
            x = jax.nn.relu((x - mean) * lax.rsqrt(spread + 1e-5) * scale + shift)
        return jnp.mean(x, axis=(1, 2)) @ p["head"] + p["bias"]

    def cross(p, images, labels):
        log_probs = jax.nn.log_softmax(forward(p, images))
        return -jnp.mean(jnp.sum(log_probs * jax.nn.one_hot(labels, ways), axis=-1))

    def task_loss(p, rates, support, query, order):
        labels = jnp.repeat(jnp.arange(ways), shots)
        for i in range(2):
            grads = jax.grad(cross)(p, support[order], labels[order])
            p = jax.tree.map(lambda w, g, r, i=i: w - jnp.exp(r[i]) * g, p, grads, rates)
        later = jnp.repeat(jnp.arange(ways), asked)
        logits = forward(p, query)
        return cross(p, query, later), jnp.mean(jnp.argmax(logits, axis=-1) == later)

    def loss(meta, support, query, seed):
        p, rates = meta
        keys = jax.random.split(jax.random.key(seed[0]), tasks)
        orders = jax.vmap(lambda key: jax.random.permutation(key, ways * shots))(keys)
        losses, right = jax.vmap(task_loss, in_axes=(None, None, 0, 0, 0))(p, rates, support, query, orders)
        return jnp.mean(losses), (losses, jnp.mean(right))

    inputs = (1, n, n, n)
    p = {
        "kernels": [normal(3, 3, i, n, scale=(9 * i) ** -0.5) for i in inputs],
        "scales": [gain(n) for _ in inputs],
        "shifts": [normal(n, scale=0.1) for _ in inputs],
        "head": weight(n, ways),
        "bias": normal(ways, scale=0.1),
    }
    rates = jax.tree.map(lambda r: normal(2, scale=0.1, offset=-3.0), p, is_leaf=lambda leaf: isinstance(leaf, Random))
    images = (normal(tasks, ways * shots, side, side, 1), normal(tasks, ways * asked, side, side, 1))
    return Built(jax.value_and_grad(loss, has_aux=True), ((p, rates), *images, integers(1, below=1000)))


@program("critic-with-gradient-penalty-adam-step-linen", GROUP)
def _critic(size: Size) -> Built:
    """This gives the Adam step of a critic of images whose gradient between true and made images is kept near one."""
    import flax.linen as nn
    import optax

    b, side, n, z = pick(size, (64, 64, 64, 120), (12, 32, 24, 120), (2, 16, 4, 6))
    dtype, levels = half(size), 3

    class Critic(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(levels):
                x = nn.Conv(n * 2**i, (5, 5), (2, 2), dtype=dtype)(x.astype(dtype))
                x = nn.leaky_relu(nn.LayerNorm(dtype=dtype)(x) if i else x, 0.2)
            return nn.Dense(1)(x.reshape(x.shape[0], -1).astype(jnp.float32))[:, 0]

    class Generator(nn.Module):
        @nn.compact
        def __call__(self, z):
            edge = side // 2**levels
            x = nn.Dense(edge * edge * 4 * n, dtype=dtype)(z).reshape(-1, edge, edge, 4 * n)
            for i in reversed(range(levels)):
                x = nn.relu(nn.GroupNorm(4, dtype=dtype)(x))
                x = nn.ConvTranspose(n * 2**i // 2 if i else 3, (4, 4), (2, 2), dtype=dtype)(x)
            return jnp.tanh(x.astype(jnp.float32))

    critic, generator = Critic(), Generator()
    images, noise = normal(b, side, side, 3, scale=0.4), normal(b, z)
    shapes = [
        jax.eval_shape(m.init, jax.random.key(0), r.struct)["params"] for m, r in ((critic, images), (generator, noise))
    ]
    p, g = (module_weights(s, jnp.float32) for s in shapes)
    tx = optax.chain(optax.clip_by_global_norm(50.0), optax.scale_by_adam(b1=0.0, b2=0.9), optax.scale(-1e-4))

    def step(p, g, mu, nu, images, noise, mix):
        made = lax.stop_gradient(generator.apply({"params": g}, noise))
        share = jax.nn.sigmoid(mix)[:, None, None, None]
        between = share * images + (1 - share) * made

        def loss(p):
            def score(x):
                return critic.apply({"params": p}, x)

            true, false = score(images), score(made)
            slope = jax.grad(lambda x: jnp.sum(score(x)))(between)
            norms = jnp.sqrt(jnp.sum(jnp.square(slope), axis=(1, 2, 3)) + 1e-12)
            penalty, drift = jnp.mean(jnp.square(norms - 1.0)), jnp.mean(jnp.square(true))
            gap = jnp.mean(false) - jnp.mean(true)
            return gap + 10.0 * penalty + 1e-3 * drift, (gap, penalty)

        (value, seen), grads = jax.value_and_grad(loss, has_aux=True)(p)
        state = (optax.EmptyState(), optax.ScaleByAdamState(jnp.int32(7), mu, nu), optax.EmptyState())
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state[1].mu, state[1].nu, value, seen

    return Built(step, (p, g, moments(p, positive=False), moments(p, positive=True), images, noise, normal(b)))


@program("phase-field-residuals-causal-weights-grad-equinox", GROUP)
def _phase_field(size: Size) -> Built:
    """This gives the gradient of a network's residual of the Allen-Cahn equation, where early times must fit first."""
    import equinox as eqx

    times, points, n, layers, waves = pick(size, (32, 400, 200, 4, 10), (16, 40, 64, 4, 6), (4, 5, 8, 4, 2))

    class Field(eqx.Module):
        gates: list
        layers: list
        last: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, layers + 3)
            inputs = 2 + 2 * waves
            self.gates = [eqx.nn.Linear(inputs, n, key=k) for k in keys[:2]]
            self.layers = [eqx.nn.Linear(n if i else inputs, n, key=keys[2 + i]) for i in range(layers)]
            self.last = eqx.nn.Linear(n, 1, key=keys[-1])

        def __call__(self, t, x):
            angle = jnp.pi * jnp.arange(1, waves + 1) * x
            y = jnp.concatenate([jnp.stack([jnp.ones_like(t), t]), jnp.cos(angle), jnp.sin(angle)])
            u, v = (jnp.tanh(gate(y)) for gate in self.gates)
            for layer in self.layers:
                z = jnp.tanh(layer(y))
                y = z * u + (1 - z) * v
            return self.last(y)[0]

    weights, whole = equinox_parts(Field, jnp.float32)

    def loss(weights, t_noise, x_noise, tolerance):
        field = whole(weights)

        def residual(t, x):
            u, du_dt = jax.jvp(lambda t: field(t, x), (t,), (1.0,))

            def slope(x):
                return jax.jvp(lambda x: field(t, x), (x,), (1.0,))[1]

            _, bend = jax.jvp(slope, (x,), (1.0,))
            return du_dt - 1e-4 * bend + 5.0 * (u**3 - u)

        t = jnp.sort(jax.nn.sigmoid(t_noise))
        x = jnp.tanh(x_noise)
        errors = jax.vmap(jax.vmap(residual, in_axes=(None, 0)), in_axes=(0, None))(t, x)
        by_time = jnp.mean(jnp.square(errors), axis=1)
        before = jnp.concatenate([jnp.zeros(1), jnp.cumsum(by_time)[:-1]])
        shares = lax.stop_gradient(jnp.exp(-(tolerance[0] ** 2) * before))
        start = jax.vmap(lambda x: field(jnp.float32(0.0), x))(x) - x**2 * jnp.cos(jnp.pi * x)
        return jnp.mean(shares * by_time) + 100.0 * jnp.mean(jnp.square(start)), shares

    points_of = (normal(times), normal(points), normal(1, scale=0.1))
    return Built(jax.value_and_grad(loss, has_aux=True), (weights, *points_of))


@program("continuous-flow-probed-trace-likelihood-grad", GROUP)
def _flow(size: Size) -> Built:
    """This gives the gradient of a continuous flow's likelihood, whose volume change is probed by random signs."""
    rows, columns, n, steps = pick(size, (1000, 63, 860, 6), (200, 43, 128, 6), (4, 3, 8, 6))

    def squash(p, t, x):
        return (x @ p["w"] + p["b"]) * jax.nn.sigmoid(p["gate"] * t + p["shift"]) + p["hyper"] * t

    def field(layers, t, x):
        for p in layers[:-1]:
            x = jax.nn.softplus(squash(p, t, x))
        return squash(layers[-1], t, x)

    def loss(layers, x, seed):
        signs = jax.random.rademacher(jax.random.key(seed[0]), x.shape, jnp.float32)

        def speeds(state, t):
            x, *_ = state
            v, pull = jax.vjp(lambda x: field(layers, t, x), x)
            back = pull(signs)[0]
            trace = jnp.sum(back * signs, axis=-1)
            return v, trace, jnp.mean(v**2, axis=-1), jnp.mean(back**2, axis=-1)

        def moved(state, rates, dt):
            return jax.tree.map(lambda s, r: s + dt * r, state, rates)

        @jax.checkpoint
        def step(state, i):
            dt = 1.0 / steps
            t = i * dt
            k1 = speeds(state, t)
            k2 = speeds(moved(state, k1, dt / 3), t + dt / 3)
            k3 = speeds(moved(moved(state, k2, dt), k1, -dt / 3), t + 2 * dt / 3)
            k4 = speeds(moved(moved(moved(state, k1, dt), k2, -dt), k3, dt), t + dt)
            rates = jax.tree.map(lambda a, b, c, d: (a + 3 * (b + c) + d) / 8, k1, k2, k3, k4)
            return moved(state, rates, dt), None

        zeros = jnp.zeros(rows)
        (z, volume, kinetic, jacobian), _ = lax.scan(step, (x, zeros, zeros, zeros), jnp.arange(steps) * 1.0)
        log_density = -0.5 * jnp.sum(z**2, axis=-1) - 0.5 * columns * jnp.log(2 * jnp.pi) + volume
        return -jnp.mean(log_density) + 0.01 * jnp.mean(kinetic + jacobian), log_density

    widths = (columns, n, n, columns)
    layers = [
        {"w": weight(i, o), "b": normal(o, scale=0.1)} | {k: normal(o, scale=0.3) for k in ("gate", "shift", "hyper")}
        for i, o in pairwise(widths)
    ]
    return Built(jax.value_and_grad(loss, has_aux=True), (layers, normal(rows, columns), integers(1, below=99)))


@program("twin-critics-delayed-actor-update-optax", GROUP)
def _twins(size: Size) -> Built:
    """This gives a few updates of twin critics in a scan, in which every second one also moves actor and targets."""
    import optax

    updates, b, seen, acts, n = pick(size, (6, 1024, 111, 8, 600), (6, 512, 17, 6, 120), (2, 4, 3, 2, 5))
    adam = optax.adam(3e-4)

    def perceptron(layers, x):
        for p in layers[:-1]:
            x = jax.nn.relu(x @ p["w"] + p["b"])
        return x @ layers[-1]["w"] + layers[-1]["b"]

    def act(actor, states):
        return jnp.tanh(perceptron(actor, states))

    def judge(critics, states, actions):
        x = jnp.concatenate([states, actions], axis=-1)
        return jax.vmap(perceptron, in_axes=(0, None))(critics, x)[..., 0]

    def train(online, targets, memory, seed):
        key = jax.random.key(seed[0])

        def critic_loss(critics, batch, aim):
            errors = judge(critics, batch["state"], batch["action"]) - aim
            return jnp.mean(optax.huber_loss(errors)) * 2, jnp.mean(jnp.abs(errors), axis=0)

        def actor_loss(actor, critics, states):
            actions = act(actor, states)
            value = judge(jax.tree.map(lambda w: w[:1], critics), states, actions)[0]
            return -jnp.mean(value) / lax.stop_gradient(jnp.mean(jnp.abs(value)) + 1e-6)

        def update(carry, inputs):
            online, targets, states = carry
            i, batch = inputs
            noise = 0.2 * jax.random.normal(jax.random.fold_in(key, i), (b, acts))
            later = act(targets["actor"], batch["next"]) + jnp.clip(noise, -0.5, 0.5)
            values = judge(targets["critics"], batch["next"], jnp.clip(later, -1.0, 1.0))
            aim = batch["reward"] + 0.99 * (batch["going"] > 0) * jnp.min(values, axis=0)
            loss_of = jax.value_and_grad(critic_loss, has_aux=True)
            (value, priorities), grads = loss_of(online["critics"], batch, lax.stop_gradient(aim))
            change, critic_state = adam.update(grads, states["critics"])
            critics = optax.apply_updates(online["critics"], change)

            def late(args):
                actor, actor_state, targets = args
                grads = jax.grad(actor_loss)(actor, critics, batch["state"])
                change, actor_state = adam.update(grads, actor_state)
                actor = optax.apply_updates(actor, change)
                new = {"actor": actor, "critics": critics}
                return actor, actor_state, optax.incremental_update(new, targets, 0.005)

            args = (online["actor"], states["actor"], targets)
            actor, actor_state, targets = lax.cond(i % 2 == 1, late, lambda args: args, args)
            online = {"actor": actor, "critics": critics}
            return (online, targets, {"actor": actor_state, "critics": critic_state}), (value, priorities)

        states = {name: adam.init(online[name]) for name in online}
        (online, targets, _), seen_losses = lax.scan(update, (online, targets, states), (jnp.arange(updates), memory))
        return online, targets, seen_losses

    def layers(widths, *many):
        return [
            {"w": normal(*many, i, o, scale=i**-0.5), "b": normal(*many, o, scale=0.05)} for i, o in pairwise(widths)
        ]

    nets = {"actor": layers((seen, n, n, acts)), "critics": layers((seen + acts, n, n, 1), 2)}
    memory = {"state": normal(updates, b, seen), "next": normal(updates, b, seen)}
    memory |= {"action": normal(updates, b, acts, scale=0.4), "reward": normal(updates, b)}
    memory |= {"going": normal(updates, b, offset=2.0)}
    return Built(train, (nets, nets, memory, integers(1, below=99)))


@program("graph-infomax-shuffled-nodes-grad-haiku", GROUP)
def _infomax(size: Size) -> Built:
    """This gives the gradient that tells nodes of a citation graph from shuffled nodes by a summary of the graph."""
    import haiku as hk

    nodes, edges, columns, n = pick(size, (19700, 88600, 500, 512), (1500, 8000, 232, 96), (9, 20, 6, 4))

    def both(x, shuffled, senders, receivers, keep):
        scale = lax.rsqrt(1.0 + jax.ops.segment_sum(keep, receivers, num_segments=nodes))
        first, second = hk.Linear(n, with_bias=False), hk.Linear(n, with_bias=False)
        slope = hk.get_parameter("slope", (2, n), init=hk.initializers.Constant(0.25))

        def spread(y, i):
            gathered = (y * scale[:, None])[senders] * keep[:, None]
            y = (jax.ops.segment_sum(gathered, receivers, num_segments=nodes) + y * scale[:, None]) * scale[:, None]
            return jnp.where(y > 0, y, slope[i] * y)

        def encode(x):
            return spread(second(spread(first(x), 0)), 1)

        true, false = encode(x), encode(shuffled)
        summary = jax.nn.sigmoid(jnp.mean(true, axis=0))
        mixing = hk.get_parameter("mixing", (n, n), init=hk.initializers.RandomNormal(0.05))
        return (true @ (mixing @ summary)), (false @ (mixing @ summary)), summary

    model = hk.without_apply_rng(hk.transform(both))

    def loss(params, x, senders, receivers, seed):
        one, two = jax.random.split(jax.random.key(seed[0]))
        x = x / jnp.maximum(jnp.sum(jnp.abs(x), axis=-1, keepdims=True), 1.0) * columns
        shuffled = x[jax.random.permutation(one, nodes)]
        keep = jax.random.bernoulli(two, 0.9, (edges,)).astype(jnp.float32)
        true, false, summary = model.apply(params, x, shuffled, senders, receivers, keep)
        value = jnp.mean(jax.nn.softplus(-true)) + jnp.mean(jax.nn.softplus(false))
        return value, (jnp.mean(true > 0), jnp.mean(false < 0), summary)

    x, ends = normal(nodes, columns), integers(edges, below=nodes)
    structs = (x.struct, x.struct, ends.struct, ends.struct, jax.ShapeDtypeStruct((edges,), jnp.float32))
    params = module_weights(jax.eval_shape(model.init, jax.random.key(0), *structs), jnp.float32)
    return Built(jax.value_and_grad(loss, has_aux=True), (params, x, ends, ends, integers(1, below=99)))
