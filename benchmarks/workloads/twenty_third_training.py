"""Losses with their gradients and whole training steps, the twenty-third set: its author saw no plan."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import module_weights
from benchmarks.workloads.registry import Built, Size, booleans, gain, half, integers, normal, pick, program, weight
from benchmarks.workloads.sixteenth_models import equinox_parts
from benchmarks.workloads.twenty_third_parts import (
    chosen,
    clipped,
    convolved,
    eight_bit_product,
    kernel,
    root_normed,
)

GROUP = "twenty-third"


@program("sessions-of-shoppers-as-small-graphs-next-item-grad-haiku", GROUP)
def _sessions(size: Size) -> Built:
    """This gives gradients of the next item of shopping sessions that are seen as small graphs of items, as SR-GNN (Wu, 2019).

    Items that come again are one node; arrows follow the clicks, and nodes take messages of arrows in and out by gates.
    """
    import haiku as hk

    b, t, n, items = pick(size, (512, 19, 120, 43098), (64, 13, 60, 3001), (3, 5, 6, 11))
    dtype = half(size)

    def net(clicks, cut):
        table = hk.get_parameter("table", (items, n), dtype, init=hk.initializers.RandomUniform(-0.1, 0.1))
        length = t - cut
        alive = jnp.arange(t) < length[:, None]
        same = (clicks[:, :, None] == clicks[:, None]) & alive[:, None] & alive[:, :, None]
        node = jnp.where(alive, jnp.argmax(same, axis=-1), 0)
        own = jax.nn.one_hot(node, t, dtype=jnp.float32) * alive[..., None]
        step = (jnp.arange(t - 1) < length[:, None] - 1).astype(jnp.float32)
        arrows = jnp.einsum("bki,bkj,bk->bij", own[:, :-1], own[:, 1:], step)
        arrows = jnp.minimum(arrows, 1.0)
        out = arrows / jnp.maximum(jnp.sum(arrows, axis=2, keepdims=True), 1.0)
        into = jnp.swapaxes(arrows / jnp.maximum(jnp.sum(arrows, axis=1, keepdims=True), 1.0), 1, 2)
        first = jnp.any(own > 0, axis=1)
        x = jnp.where(first[..., None], table[clicks], 0)
        gates, mix = hk.Linear(3 * n, name="gates"), hk.Linear(3 * n, with_bias=False, name="mix")
        lines = hk.Linear(2 * n, name="lines")
        for _ in range(2):
            left, right = jnp.split(lines(x), 2, axis=-1)
            message = jnp.concatenate([into.astype(dtype) @ left, out.astype(dtype) @ right], axis=-1)
            a, c = jnp.split(gates(message), 3, axis=-1), jnp.split(mix(x), 3, axis=-1)
            reset, update = jax.nn.sigmoid(a[0] + c[0]), jax.nn.sigmoid(a[1] + c[1])
            fresh = jnp.tanh(a[2] + reset * c[2])
            x = fresh + update * (x - fresh)
        clicked = jnp.einsum("bki,bin->bkn", own.astype(dtype), x)
        last = jnp.take_along_axis(clicked, (length - 1)[:, None, None], axis=1)[:, 0]
        ask = jax.nn.sigmoid(hk.Linear(n)(last)[:, None] + hk.Linear(n)(clicked))
        share = hk.Linear(1, with_bias=False)(ask) * alive[..., None]
        whole = jnp.sum(share * clicked, axis=1)
        session = hk.Linear(n)(jnp.concatenate([whole, last], axis=-1))
        return (session @ table.T).astype(jnp.float32)

    model = hk.without_apply_rng(hk.transform(net))
    inputs = (integers(b, t, below=min(items, 997)), integers(b, below=t - 1))
    structs = jax.eval_shape(model.init, jax.random.key(0), *(r.struct for r in inputs))

    def loss(p, clicks, cut, target):
        logits = model.apply(p, clicks, cut)
        own = chosen(logits, target)
        decay = sum(jnp.sum(w.astype(jnp.float32) ** 2) for w in jax.tree.leaves(p))
        right = jnp.take_along_axis(logits, target[:, None], axis=1)
        rank = 1 + jnp.sum(jax.nn.sigmoid((logits - right) / 0.05), axis=1)
        return 1e-6 * decay - jnp.mean(own), (own, jnp.mean(1 / rank))

    grad = jax.value_and_grad(loss, has_aux=True)
    return Built(grad, (module_weights(structs, dtype), *inputs, integers(b, below=items)))


@program("two-strands-of-dna-read-both-ways-hidden-letters-grad-equinox", GROUP)
def _strands(size: Size) -> Built:
    """This gives gradients of hidden letters of DNA, read on both strands and both ways by gated states (Caduceus, 2024).

    One set of weights reads a strand and its reverse complement, so that both give the same letters; ways share projections.
    """
    import equinox as eqx

    b, t, n, wide, states, rank = pick(size, (4, 777, 128, 256, 8, 8), (1, 131, 48, 96, 6, 4), (2, 7, 6, 8, 3, 2))
    dtype, letters = half(size), 12
    other = np.array([0, 1, 2, 3, 4, 5, 6, 10, 9, 8, 7, 11])

    class Way(eqx.Module):
        near: jax.Array
        read: eqx.nn.Linear
        speed: eqx.nn.Linear
        fade: jax.Array
        skip: jax.Array

        def __init__(self, key):
            k = jax.random.split(key, 3)
            self.near = jnp.zeros((4, wide))
            self.read = eqx.nn.Linear(wide, rank + 2 * states, use_bias=False, key=k[1])
            self.speed = eqx.nn.Linear(rank, wide, key=k[2])
            self.fade, self.skip = jnp.zeros((wide, states)), jnp.zeros(wide)

        def __call__(self, x):
            padded = jnp.pad(x, ((3, 0), (0, 0)))
            x = jax.nn.silu(sum(padded[i : i + t] * self.near[i] for i in range(4)))
            step, come, go = jnp.split(jax.vmap(self.read)(x).astype(jnp.float32), [rank, rank + states], axis=-1)
            step = jax.nn.softplus(jax.vmap(self.speed)(step.astype(dtype)).astype(jnp.float32) - 2)
            keep = jnp.exp(-step[..., None] * jnp.exp(jnp.clip(self.fade.astype(jnp.float32), -3, 3)))
            put = (step * x.astype(jnp.float32))[..., None] * come[:, None]

            def after(one, two):
                return one[0] * two[0], one[1] * two[0] + two[1]

            _, held = lax.associative_scan(after, (keep, put))
            y = jnp.einsum("tws,ts->tw", held, go).astype(dtype)
            return y + x * self.skip

    class Layer(eqx.Module):
        enter: eqx.nn.Linear
        leave: eqx.nn.Linear
        ways: tuple[Way, Way]
        norm: jax.Array

        def __init__(self, key):
            k = jax.random.split(key, 4)
            self.enter = eqx.nn.Linear(n, 2 * wide, use_bias=False, key=k[0])
            self.leave = eqx.nn.Linear(wide, n, use_bias=False, key=k[1])
            self.ways, self.norm = (Way(k[2]), Way(k[3])), jnp.ones(n)

        def __call__(self, x):
            y, gate = jnp.split(jax.vmap(self.enter)(root_normed(x, self.norm)), 2, axis=-1)
            both = self.ways[0](y) + self.ways[1](y[::-1])[::-1]
            return x + jax.vmap(self.leave)(both * jax.nn.silu(gate))

    class Net(eqx.Module):
        table: jax.Array
        layers: list
        norm: jax.Array

        def __init__(self, key):
            k = jax.random.split(key, 3)
            self.table = jax.random.normal(k[0], (letters, n))
            self.layers, self.norm = [Layer(k[1]), Layer(k[2])], jnp.ones(n)

        def __call__(self, tokens):
            x = self.table[tokens]
            for layer in self.layers:
                x = layer(x)
            return (root_normed(x, self.norm) @ self.table.T).astype(jnp.float32)

    leaves, whole = equinox_parts(Net, dtype)

    def loss(leaves, bases, spots, swaps):
        net = whole(leaves)
        text = jnp.where(spots < 4, bases + 7, 11)
        hidden = (spots % 7) == 0
        seen = jnp.where(hidden, jnp.where(spots % 5 == 0, swaps + 7, 3), text)
        strands = jnp.concatenate([seen, jnp.asarray(other)[seen[:, ::-1]]])
        one, two = jnp.split(jax.vmap(net)(strands), 2)
        logits = 0.5 * (one + two[:, ::-1][..., other])
        counted = (hidden & (text != 11)).astype(jnp.float32)
        own = chosen(logits, text)
        right = jnp.sum(jnp.exp(own) * counted) / jnp.maximum(jnp.sum(counted), 1)
        apart = jnp.mean((one - two[:, ::-1][..., other]) ** 2)
        return -jnp.sum(own * counted) / jnp.maximum(jnp.sum(counted), 1), (right, apart, own)

    def step(leaves, bases, spots, swaps):
        (value, extra), grads = jax.value_and_grad(loss, has_aux=True)(leaves, bases, spots % 211, swaps)
        grads, norm = clipped(grads, 1.0)
        return value, norm, extra, grads

    return Built(step, (leaves, integers(b, t, below=4), integers(b, t, below=5), integers(b, t, below=4)))


@program("styles-scale-filters-with-lengths-of-paths-step", GROUP)
def _styles(size: Size) -> Built:
    """This trains a maker of pictures whose styles scale its filters, with even lengths of paths, as StyleGAN2 (Karras, 2020).

    The lengths are those of gradients by styles, so the step differentiates twice; slow weights follow the fresh ones.
    """
    b, start, widths, z = pick(
        size, (16, 8, (256, 256, 128, 64), 256), (2, 4, (48, 48, 24, 12), 48), (2, 2, (8, 6, 4, 4), 5)
    )
    side = start * 8

    def lean(x):
        return jax.nn.leaky_relu(x, 0.2) * 2**0.5

    def doubled(x):
        for axis in (1, 2):
            before = jnp.concatenate(
                [lax.slice_in_dim(x, 0, 1, axis=axis), lax.slice_in_dim(x, 0, -1, axis=axis)], axis
            )
            after = jnp.concatenate(
                [lax.slice_in_dim(x, 1, None, axis=axis), lax.slice_in_dim(x, -1, None, axis=axis)], axis
            )
            shape = list(x.shape)
            shape[axis] *= 2
            x = jnp.stack([0.75 * x + 0.25 * before, 0.75 * x + 0.25 * after], axis=axis + 1).reshape(shape)
        return x

    def styled(q, x, w, even=True):
        style = w @ q["style"] + 1
        y = convolved(x * style[:, None, None], q["kernel"])
        if even:
            power = jnp.sum(q["kernel"] ** 2, axis=(0, 1))
            y = y * lax.rsqrt(style**2 @ power + 1e-6)[:, None, None]
        return y

    def mapped(p, z):
        w = z * lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + 1e-6)
        for q in p["map"]:
            w = lean(w @ q)
        return w

    def painted(p, w, noises):
        x = jnp.broadcast_to(p["constant"], (b, *p["constant"].shape))
        picture = 0.0
        for i, (q, noise) in enumerate(zip(p["blocks"], noises, strict=True)):
            if i:
                x, picture = doubled(x), doubled(picture)
                x = lean(styled(q["first"], x, w) + q["loud"][0] * noise[0][..., None])
            x = lean(styled(q["second"], x, w) + q["loud"][1] * noise[1][..., None])
            picture = picture + styled(q["colour"], x, w, even=False)
        return picture

    def judged(p, picture):
        x = lean(convolved(picture, p["enter"]))
        for q in p["blocks"]:
            y = lean(convolved(lean(convolved(x, q["a"])), q["b"], 2))
            small = jnp.mean(x.reshape(b, x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1), axis=(2, 4))
            x = (y + convolved(small, q["skip"])) * 0.5**0.5
        spread = jnp.mean(jnp.sqrt(jnp.var(x, axis=0) + 1e-6))
        x = jnp.concatenate([x, jnp.full((*x.shape[:3], 1), spread)], axis=-1)
        return (lean(convolved(x, p["last"])).reshape(b, -1) @ p["out"])[:, 0]

    def loss(p, critic, z, noises, dots, usual):
        w = mapped(p, z)
        picture = painted(p, w, noises)
        fooled = jnp.mean(jax.nn.softplus(-judged(critic, picture)))
        pull = jax.grad(lambda w: jnp.sum(painted(p, w, noises) * dots) / side)(w)
        lengths = jnp.sqrt(jnp.sum(pull**2, axis=-1) + 1e-8)
        mean = usual + 0.01 * (jnp.mean(lengths) - usual)
        return fooled + 2 * jnp.mean((lengths - lax.stop_gradient(mean)) ** 2), (fooled, lengths, mean, picture)

    def step(p, critic, slow, second, z, noises, dots, usual):
        (_, extra), grads = jax.value_and_grad(loss, has_aux=True)(p, critic, z, noises, dots, jnp.abs(usual))
        second = jax.tree.map(lambda s, g: 0.99 * jnp.abs(s) + 0.01 * g * g, second, grads)
        p = jax.tree.map(lambda w, g, s: w - 2e-3 * g * lax.rsqrt(s + 1e-8), p, grads, second)
        slow = jax.tree.map(lambda a, w: a + 0.002 * (w - a), slow, p)
        return p, slow, second, extra

    def maker(factor=None):
        def drawn(*shape, scale):
            return normal(*shape, scale=factor or scale)

        def layer(k, i, o):
            return {
                "style": drawn(z, i, scale=0.3 * z**-0.5),
                "kernel": drawn(k, k, i, o, scale=(k * k * i) ** -0.5),
            }

        p = {"map": [drawn(z, z, scale=z**-0.5) for _ in range(4)], "blocks": []}
        p["constant"] = drawn(start, start, widths[0], scale=1.0)
        for i, o in zip((widths[0], *widths[:-1]), widths, strict=True):
            q = {"first": layer(3, i, o), "second": layer(3, o, o), "colour": layer(1, o, 3)}
            p["blocks"].append(q | {"loud": drawn(2, scale=0.1)})
        return p

    critic = {"enter": kernel(1, 3, widths[3]), "blocks": []}
    for i, o in ((widths[3], widths[2]), (widths[2], widths[1]), (widths[1], widths[0])):
        critic["blocks"].append({"a": kernel(3, i, i), "b": kernel(3, i, o), "skip": kernel(1, i, o)})
    critic["last"] = kernel(3, widths[0] + 1, widths[0])
    critic["out"] = weight(start * start * widths[0], 1)
    noises = [normal(2, b, start * 2**i, start * 2**i) for i in range(4)]
    inputs = (normal(b, z), noises, normal(b, side, side, 3), normal())
    return Built(step, (maker(), critic, maker(), maker(1e-4), *inputs))


@program("worth-of-a-team-mixed-with-positive-weights-grad-linen", GROUP)
def _team(size: Size) -> Built:
    """This gives gradients of the worth of a team, mixed from each player's by positive weights of the state, as QMIX (2018).

    Players remember by one shared recurrent cell; the next move is chosen by fresh weights and judged by slow ones.
    """
    import flax.linen as nn

    b, t, players, see, world, acts, n, wide = pick(
        size, (32, 61, 8, 96, 168, 14, 64, 32), (8, 31, 5, 48, 84, 11, 48, 32), (2, 4, 3, 5, 6, 4, 8, 4)
    )

    class Player(nn.Module):
        @nn.compact
        def __call__(self, seen, last):
            who = jnp.broadcast_to(jnp.eye(players), (b, t, players, players))
            x = jnp.concatenate([seen, jax.nn.one_hot(last, acts), who], axis=-1)
            x = nn.relu(nn.Dense(n)(x)).swapaxes(1, 2).reshape(b * players, t, n)
            x = nn.RNN(nn.GRUCell(n))(x)
            return nn.Dense(acts)(nn.relu(nn.LayerNorm()(x))).reshape(b, players, t, acts).swapaxes(1, 2)

    class Mixer(nn.Module):
        @nn.compact
        def __call__(self, worths, state):
            first = jnp.abs(nn.Dense(players * wide)(nn.relu(nn.Dense(n)(state)))).reshape(b, t, players, wide)
            second = jnp.abs(nn.Dense(wide)(nn.relu(nn.Dense(n)(state))))
            hidden = nn.elu(jnp.einsum("btp,btpw->btw", worths, first) + nn.Dense(wide)(state))
            shift = nn.Dense(1)(nn.relu(nn.Dense(wide)(state)))[..., 0]
            return jnp.sum(hidden * second, axis=-1) + shift

    player, mixer = Player(), Mixer()

    def loss(p, slow, seen, world, last, moves, open_moves, rewards, cut):
        q = player.apply(p[0], seen, last)
        own = jnp.take_along_axis(q, moves[..., None], axis=-1)[..., 0]
        whole = mixer.apply(p[1], own, world)
        allowed = open_moves | (jnp.arange(acts) == 0)
        best = jnp.argmax(jnp.where(allowed, lax.stop_gradient(q), -1e9), axis=-1)
        later = player.apply(slow[0], seen, last)
        later = mixer.apply(slow[1], jnp.take_along_axis(later, best[..., None], axis=-1)[..., 0], world)
        length = t - cut
        alive = (jnp.arange(t - 1) < length[:, None] - 1).astype(jnp.float32)
        ended = (jnp.arange(t - 1) == length[:, None] - 2).astype(jnp.float32)

        def back(after, at):
            reward, worth, end, real = at
            fresh = reward + 0.99 * (1 - end) * ((1 - 0.6) * worth + 0.6 * after)
            return jnp.where(real > 0, fresh, worth), fresh

        xs = tuple(z.T for z in (rewards, later[:, 1:], ended, alive))
        _, targets = lax.scan(back, later[:, -1], xs, reverse=True)
        wrong = (whole[:, :-1] - lax.stop_gradient(targets.T)) * alive
        total = jnp.maximum(jnp.sum(alive), 1)
        return jnp.sum(wrong**2) / total, (jnp.sum(jnp.abs(wrong)) / total, jnp.mean(own), whole)

    def step(p, slow, seen, world, last, moves, open_moves, rewards, cut):
        args = (p, slow, seen, world, last, moves, open_moves, rewards, cut)
        (value, extra), grads = jax.value_and_grad(loss, has_aux=True)(*args)
        grads, norm = clipped(grads, 10.0)
        slow = jax.tree.map(lambda s, w: s + 0.01 * (w - s), slow, p)
        return value, extra, norm, grads, slow

    seen, last = normal(b, t, players, see), integers(b, t, players, below=acts)
    worths = jax.ShapeDtypeStruct((b, t, players), jnp.float32)
    state = normal(b, t, world)
    structs = (
        jax.eval_shape(player.init, jax.random.key(0), seen.struct, last.struct),
        jax.eval_shape(mixer.init, jax.random.key(0), worths, state.struct),
    )
    p, slow = (module_weights(structs, jnp.float32) for _ in range(2))
    inputs = (seen, state, last, integers(b, t, players, below=acts), booleans(b, t, players, acts))
    return Built(step, (p, slow, *inputs, normal(b, t - 1), integers(b, below=t // 2)))


@program("few-points-tell-a-function-attended-with-a-latent-elbo-grad-nnx", GROUP)
def _process(size: Size) -> Built:
    """This gives gradients of a bound for functions told by few points, by attention and a latent (neural process, Kim, 2019)."""
    from flax import nnx

    b, known, asked, n, h, places = pick(size, (64, 97, 441, 256, 8, 2), (4, 37, 121, 96, 4, 2), (2, 3, 5, 8, 2, 2))
    dtype = half(size)
    kinds = {"dtype": dtype, "param_dtype": dtype}

    class Dense(nnx.Module):
        def __init__(self, widths, rngs):
            pairs = itertools.pairwise(widths)
            self.layers = nnx.List([nnx.Linear(i, o, rngs=rngs, **kinds) for i, o in pairs])

        def __call__(self, x):
            for layer in self.layers[:-1]:
                x = nnx.relu(layer(x))
            return self.layers[-1](x)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.hidden, self.fixed = Dense((places + 1, n, n, n), rngs), Dense((places + 1, n, n, n), rngs)
            self.self_hidden = nnx.MultiHeadAttention(h, n, decode=False, use_bias=False, rngs=rngs, **kinds)
            self.self_fixed = nnx.MultiHeadAttention(h, n, decode=False, use_bias=False, rngs=rngs, **kinds)
            self.cross = nnx.MultiHeadAttention(h, n, decode=False, use_bias=False, rngs=rngs, **kinds)
            self.where, self.shape = Dense((places, n, n), rngs), Dense((n, n, 2 * n), rngs)
            self.decoder = Dense((2 * n + places, n, n, n, 2), rngs)

        def latent(self, x, y, real):
            z = self.hidden(jnp.concatenate([x, y], axis=-1))
            z = z + self.self_hidden(z, mask=real[:, None, None])
            z = jnp.sum(jnp.where(real[..., None], z, 0), axis=1) / jnp.sum(real, axis=1, keepdims=True).astype(dtype)
            mean, raw = jnp.split(self.shape(z).astype(jnp.float32), 2, axis=-1)
            return mean, 0.1 + 0.9 * jax.nn.sigmoid(raw)

        def __call__(self, x, y, count, noise):
            x, y = x.astype(dtype), y.astype(dtype)
            real = jnp.arange(known) < count[:, None]
            some_x, some_y = x[:, :known], y[:, :known]
            prior = self.latent(some_x, some_y, real)
            posterior = self.latent(x, y, jnp.ones((b, asked), bool))
            z = (posterior[0] + posterior[1] * noise).astype(dtype)
            r = self.fixed(jnp.concatenate([some_x, some_y], axis=-1))
            r = r + self.self_fixed(r, mask=real[:, None, None])
            r = self.cross(self.where(x), self.where(some_x), r, mask=real[:, None, None])
            z = jnp.broadcast_to(z[:, None], (b, asked, n))
            mean, raw = jnp.split(self.decoder(jnp.concatenate([r, z, x], axis=-1)).astype(jnp.float32), 2, axis=-1)
            return prior, posterior, mean, 0.1 + 0.9 * jax.nn.softplus(raw)

    graph, state = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))

    def loss(state, x, y, count, noise):
        prior, posterior, mean, spread = nnx.merge(graph, state)(x, y, count, noise)
        logp = -0.5 * ((y - mean) / spread) ** 2 - jnp.log(spread) - 0.919
        logp = jnp.mean(logp[..., 0], axis=1)
        ratio = posterior[1] / prior[1]
        apart = ratio**2 + ((posterior[0] - prior[0]) / prior[1]) ** 2 - 1 - 2 * jnp.log(ratio)
        apart = 0.5 * jnp.sum(apart, axis=-1)
        return jnp.mean(apart / asked - logp), (logp, apart, mean[..., 0], spread[..., 0])

    def step(state, x, waves, phases, count, noise):
        y = jnp.mean(jnp.sin(jnp.einsum("btp,bkp->btk", x, waves) + phases[:, None]), axis=-1, keepdims=True) * 2
        (value, extra), grads = jax.value_and_grad(loss, has_aux=True)(state, x, y, count + 3, noise)
        return value, extra, grads

    inputs = (normal(b, asked, places), normal(b, 7, places, scale=2.0), normal(b, 7, scale=2.0))
    inputs += (integers(b, below=max(known - 3, 1)), normal(b, n))
    return Built(step, (module_weights(state, dtype), *inputs))


@program("eight-bit-floats-scaled-by-past-maxima-training-step", GROUP)
def _eight_bits(size: Size) -> Built:
    """This trains a small language model whose products take floats of eight bits, scaled by maxima of past steps (2022).

    Values and weights have three bits of fraction, gradients two; the histories of maxima are moved on beside the weights.
    """
    b, t, n, h, m, words, past = pick(
        size, (8, 385, 768, 12, 2048, 8009, 16), (1, 97, 128, 4, 336, 1009, 16), (2, 6, 8, 2, 12, 13, 3)
    )
    dtype, d = half(size), n // h

    def loss(p, histories, tokens):
        x = p["table"].astype(dtype)[tokens[:, :-1]]
        for q, s in zip(p["layers"], histories, strict=True):
            y = root_normed(x, q["norm"])
            query, key, value = jnp.split(eight_bit_product(y, q["qkv"].astype(dtype), s["qkv"]), 3, axis=-1)
            query, key, value = (z.reshape(b, t, h, d) for z in (query, key, value))
            y = jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(b, t, n)
            x = x + eight_bit_product(y, q["out"].astype(dtype), s["out"])
            y = eight_bit_product(root_normed(x, q["norm2"]), q["up"].astype(dtype), s["up"])
            gate, up = jnp.split(y, 2, axis=-1)
            x = x + eight_bit_product(jax.nn.silu(gate) * up, q["down"].astype(dtype), s["down"])
        logits = root_normed(x, p["norm"]) @ p["head"].astype(dtype)
        own = chosen(logits, tokens[:, 1:])
        return -jnp.mean(own), own

    def step(p, histories, speed, tokens):
        histories = jax.tree.map(jnp.abs, histories)
        (value, own), (grads, histories) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(p, histories, tokens)
        grads, norm = clipped(grads, 1.0)
        speed = jax.tree.map(lambda v, g: 0.9 * v + g, speed, grads)
        p = jax.tree.map(lambda w, v: w * (1 - 1e-4) - 0.01 * v, p, speed)
        return p, histories, speed, value, norm, jnp.mean(own, axis=0)

    shapes = {"qkv": (n, 3 * n), "out": (n, n), "up": (n, 2 * m), "down": (m, n)}

    def tree(make, norm):
        layers = [{k: make(*v) for k, v in shapes.items()} | {"norm": norm(n), "norm2": norm(n)} for _ in range(3)]
        return {"table": make(words, n), "head": make(n, words), "norm": norm(n), "layers": layers}

    def still(*shape):
        return normal(*shape, scale=1e-3)

    p, speed = tree(weight, gain), tree(still, still)
    p["table"] = normal(words, n)
    histories = [{k: normal(3, past, scale=0.3, offset=1.0) for k in shapes} for _ in range(3)]
    return Built(step, (p, histories, speed, integers(b, t + 1, below=words)))
