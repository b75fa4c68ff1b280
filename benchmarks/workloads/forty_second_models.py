"""Votes of near photographs, oscillators in parallel, modules that wake by turns, the forty-second set: its author saw no plan."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program
from benchmarks.workloads.transformer_models import library
from benchmarks.workloads.twenty_sixth_parts import drawn

GROUP = "forty-second"


@program("dinov2-photographs-named-by-weighed-votes-of-the-nearest-in-a-bank-of-features-transformers", GROUP)
def _votes(size: Size) -> Built:
    """This program names what photographs show by a vote of the most alike photographs in a bank of kept features.

    It is the nearest-neighbour evaluation of DINOv2 (Oquab, 2023; facebookresearch/dinov2) with FlaxDinov2Model of transformers:
    class tokens are made of length one, the bank is read in parts with a running best, and votes count by exponentials.
    """
    transformers = library()
    b, side, patch, n, heads, depth, bank, parts, kinds, votes = pick(
        size,
        (32, 224, 14, 768, 12, 12, 262144, 8, 1000, (10, 20, 100, 200)),
        (4, 70, 14, 192, 6, 4, 16000, 4, 100, (5, 10, 20, 50)),
        (2, 8, 4, 8, 2, 2, 12, 2, 3, (1, 2, 3, 4)),
    )
    dtype = half(size)
    config = transformers.Dinov2Config(
        hidden_size=n,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        image_size=side,
        patch_size=patch,
    )
    model = transformers.FlaxDinov2Model(config, dtype=dtype, _do_init=False)
    structs = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, side, side, 3)))

    def run(p, photo, kept, kept_label, label):
        """This gives hits by number of votes, chances of classes, the nearest rows with their likeness, and margins."""
        mean, spread = jnp.asarray([0.485, 0.456, 0.406]), jnp.asarray([0.229, 0.224, 0.225])
        pixels = jnp.moveaxis((photo.astype(jnp.float32) / 255.0 - mean) / spread, 3, 1).astype(dtype)
        token = model(pixels, params=p).last_hidden_state[:, 0].astype(jnp.float32)
        token = token * lax.rsqrt(jnp.sum(token**2, axis=-1, keepdims=True))
        most = votes[-1]

        def part(best, rows):
            """This reads one part of the bank and keeps the most alike rows so far."""
            alike, which = best
            number, rows = rows
            long = lax.rsqrt(jnp.sum(jnp.square(rows.astype(jnp.float32)), axis=-1))
            fresh = jnp.einsum("bn,kn->bk", token.astype(dtype), rows, preferred_element_type=jnp.float32) * long
            fresh, place = lax.top_k(fresh, most)
            alike = jnp.concatenate([alike, fresh], axis=1)
            which = jnp.concatenate([which, number * (bank // parts) + place], axis=1)
            alike, order = lax.top_k(alike, most)
            return (alike, jnp.take_along_axis(which, order, axis=1)), None

        begin = jnp.full((b, most), -2.0), jnp.zeros((b, most), jnp.int32)
        (alike, which), _ = lax.scan(part, begin, (jnp.arange(parts), kept.reshape(parts, -1, n)))
        name, weight = kept_label[which], jnp.exp(alike / 0.07)
        row = jnp.arange(b)[:, None]
        hits, margins = [], []
        for k in votes:
            share = jnp.zeros((b, kinds)).at[row, name[:, :k]].add(weight[:, :k])
            share = share / jnp.sum(share, axis=1, keepdims=True)
            top, told = lax.top_k(share, min(5, kinds))
            hits.append(jnp.stack([told[:, 0] == label, jnp.any(told == label[:, None], axis=1)]))
            margins.append(top[:, 0] - top[:, 1])
        own = jnp.take_along_axis(share, label[:, None], axis=1)[:, 0]
        return jnp.stack(hits), share, own, which, alike, jnp.stack(margins)

    inputs = integers(b, side, side, 3, below=256), normal(bank, n, dtype=dtype), integers(bank, below=kinds)
    return Built(run, (drawn(structs, dtype), *inputs, integers(b, below=kinds)))


@program("linoss-forced-oscillators-as-one-parallel-scan-damped-and-undamped-long-series-told-apart-equinox", GROUP)
def _oscillators(size: Size) -> Built:
    """This program tells long series apart with layers of oscillators that a series pushes, all moments at once.

    It is LinOSS (Rusch and Rus, 2024; tk-rusch/linoss), with equinox: states are places and speeds, implicit steps damp them and
    mixed steps keep their energy, an associative scan joins two-by-two matrices, and a gated layer follows.
    """
    import equinox as eqx

    b, long, inputs, n, states, depth, kinds = pick(
        size, (8, 4096, 6, 128, 128, 4, 5), (4, 512, 6, 64, 48, 2, 5), (2, 7, 3, 4, 3, 2, 3)
    )
    dtype = half(size)

    def joined(one, two):
        """This follows one stretch of time by another: matrices are multiplied and pushes carried on."""
        (a, b, c, d), (x, y) = one
        (e, f, g, h), (z, w) = two
        product = e * a + f * c, e * b + f * d, g * a + h * c, g * b + h * d
        return product, (e * x + f * y + z, g * x + h * y + w)

    class Oscillators(eqx.Module):
        """These are states that swing at rates of their own."""

        stiff: jax.Array
        step: jax.Array
        enter: jax.Array
        leave: jax.Array
        past: jax.Array
        damped: bool = eqx.field(static=True)

        def __init__(self, damped):
            self.stiff, self.step, self.past = jnp.zeros(states), jnp.zeros(states), jnp.zeros(n)
            self.enter, self.leave, self.damped = jnp.zeros((states, n, 2)), jnp.zeros((n, states, 2)), damped

        def __call__(self, u):
            u = u.astype(jnp.float32)
            stiff, step = jax.nn.relu(self.stiff.astype(jnp.float32)), jax.nn.sigmoid(self.step.astype(jnp.float32))
            enter, leave = (lax.complex(z[..., 0], z[..., 1]) for z in (self.enter, self.leave))
            push = u.astype(jnp.complex64) @ enter.T
            if self.damped:
                part = 1 / (1 + step**2 * stiff)
                matrix = 1 - step**2 * stiff * part, -step * stiff * part, step * part, part
                force = step * matrix[0], step * matrix[2]
            else:
                matrix = jnp.ones_like(step), -step * stiff, step, 1 - step**2 * stiff
                force = step, step**2
            matrix = tuple(jnp.broadcast_to(z, (long, states)) for z in matrix)
            _, (speed, place) = lax.associative_scan(joined, (matrix, (force[0] * push, force[1] * push)))
            energy = jnp.mean(jnp.abs(speed) ** 2 + stiff * jnp.abs(place) ** 2, axis=1)
            return (jnp.real(place @ leave.T) + self.past * u).astype(dtype), energy

    class Block(eqx.Module):
        """This is a norm, oscillators and a gated layer."""

        norm: eqx.nn.LayerNorm
        swing: Oscillators
        gate: eqx.nn.Linear

        def __init__(self, damped, key):
            self.norm, self.swing = eqx.nn.LayerNorm(n), Oscillators(damped)
            self.gate = eqx.nn.Linear(n, 2 * n, key=key)

        def __call__(self, x):
            y, energy = self.swing(jax.vmap(self.norm)(x))
            value, gate = jnp.split(jax.vmap(self.gate)(jax.nn.gelu(y)), 2, axis=-1)
            return x + value * jax.nn.sigmoid(gate), energy

    class Net(eqx.Module):
        """This is the whole network for one series [long, inputs]."""

        enter: eqx.nn.Linear
        blocks: list
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, depth + 2)
            self.enter, self.head = eqx.nn.Linear(inputs, n, key=keys[0]), eqx.nn.Linear(n, kinds, key=keys[1])
            self.blocks = [Block(k % 2 == 0, keys[k + 2]) for k in range(depth)]

        def __call__(self, x):
            x = jax.vmap(self.enter)(x)
            energies = []
            for block in self.blocks:
                x, energy = block(x)
                energies.append(energy)
            pooled = jnp.mean(x.astype(jnp.float32), axis=0)
            return self.head(pooled.astype(dtype)), pooled, jnp.stack(energies)

    shapes = eqx.filter_eval_shape(Net, jax.random.key(0))
    arrays, rest = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def run(p, series, label):
        """This gives logarithms of chances, surprises, hits, means of series, and energies of layers by time."""
        mean = jnp.mean(series, axis=1, keepdims=True)
        series = (series - mean) / jnp.std(series, axis=1, keepdims=True)
        logits, pooled, energy = jax.vmap(eqx.combine(p, rest))(series.astype(dtype))
        logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        surprise = -jnp.take_along_axis(logp, label[:, None], axis=1)[:, 0]
        few = energy.reshape(b, depth, -1, 8 if size != "tiny" else 1)
        return logp, surprise, jnp.argmax(logp, axis=1) == label, pooled, jnp.mean(few, axis=3)

    def weights(path, s):
        """This describes matrices [outputs, inputs], and what makes states swing, in float32."""
        name = path[-1].name
        if name in ("stiff", "step"):
            return normal(*s.shape, scale=0.15 if name == "stiff" else 0.5, offset=0.5 if name == "stiff" else -1.0)
        if len(s.shape) == 3:
            return normal(*s.shape, scale=0.7 * s.shape[1] ** -0.5)
        if len(s.shape) == 2:
            return normal(*s.shape, dtype=dtype, scale=s.shape[1] ** -0.5)
        is_gain = name == "weight"
        return normal(*s.shape, dtype=dtype, scale=0.1, offset=1.0 if is_gain else 0.0)

    p = jax.tree_util.tree_map_with_path(weights, arrays)
    return Built(run, (p, normal(b, long, inputs), integers(b, below=kinds)))


@program("recurrent-modules-of-which-those-most-drawn-to-a-frame-wake-and-talk-next-frames-of-balls-grad-haiku", GROUP)
def _modules(size: Size) -> Built:
    """This program learns to foretell films of bouncing balls with small memories of which only a few wake at each frame.

    They are the Recurrent Independent Mechanisms of Goyal (2019; anirudh9119/RIMs), with haiku: each memory asks whether the frame
    or nothing matters more to it, the most drawn ones run their own LSTM and read from all, and the others stay as they are.
    """
    import haiku as hk

    b, long, side, balls, many, awake, n, d, talk, wide, channels = pick(
        size,
        (32, 20, 64, 4, 6, 4, 100, 64, 32, 400, (32, 64, 64)),
        (8, 8, 32, 3, 6, 4, 48, 32, 16, 96, (16, 32, 32)),
        (2, 3, 8, 2, 3, 2, 4, 3, 2, 6, (2, 3, 3)),
    )
    dtype, small = jnp.float32, side // 8

    class Modules(hk.RNNCore):
        """These are memories with weights of their own."""

        def initial_state(self, batch_size):
            return jnp.zeros((batch_size, many, n), dtype), jnp.zeros((batch_size, many, n), dtype)

        def __call__(self, x, state):
            """This reads one frame [b, wide]; it gives states and which memories were awake."""
            old, old_cell = state

            def matrix(name, *shape):
                """This is one matrix, or one for each memory."""
                start = hk.initializers.RandomNormal(shape[-2] ** -0.5)
                return hk.get_parameter(name, shape, dtype, start)

            both = jnp.stack([x, jnp.zeros_like(x)], axis=1)
            query = jnp.einsum("bmn,mnd->bmd", old, matrix("query", many, n, d))
            scores = jnp.einsum("bmd,bkd->bmk", query, both @ matrix("key", wide, d)) * d**-0.5
            share = jax.nn.softmax(scores.astype(jnp.float32) + hk.get_parameter("want", (many, 2), init=jnp.zeros))
            real = share[..., 0]
            least = lax.top_k(real, awake)[0][:, -1:]
            wakes = lax.stop_gradient(real >= least)[..., None]
            seen = jnp.einsum("bmk,bkd->bmd", share.astype(dtype), both @ matrix("value", wide, n))
            gates = jnp.einsum("bmi,mio->bmo", jnp.concatenate([seen, old], -1), matrix("lstm", many, 2 * n, 4 * n))
            gates = gates + hk.get_parameter("bias", (many, 4 * n), dtype, jnp.zeros)
            enter, fresh, forget, leave = jnp.split(gates, 4, axis=-1)
            cell = jax.nn.sigmoid(forget + 1) * old_cell + jax.nn.sigmoid(enter) * jnp.tanh(fresh)
            new = jax.nn.sigmoid(leave) * jnp.tanh(cell)
            query, key, value = (
                jnp.einsum("bmn,mnc->bmc", new, matrix(f"talk_{k}", many, n, talk)) for k in ("q", "k", "v")
            )
            scores = jnp.einsum("bqc,bkc->bqk", query, key, preferred_element_type=jnp.float32) * talk**-0.5
            told = jnp.einsum("bqk,bkc->bqc", jax.nn.softmax(scores, axis=-1).astype(dtype), value)
            new = new + jnp.einsum("bmc,mcn->bmn", told, matrix("talk_out", many, talk, n))
            state = jnp.where(wakes, new, old), jnp.where(wakes, cell, old_cell)
            return (state[0], wakes[..., 0]), state

    def net(frames):
        """This gives logits of the next frames and which memories were awake."""
        x = frames.reshape(-1, side, side, 1)
        for c in channels:
            x = jax.nn.elu(hk.Conv2D(c, 4, 2)(x))
        x = hk.LayerNorm(-1, True, True)(hk.Linear(wide)(hk.Flatten()(x))).reshape(long - 1, b, wide)
        core = Modules()
        (x, wakes), _ = hk.dynamic_unroll(core, x, core.initial_state(b))
        x = jax.nn.elu(hk.Linear(small * small * channels[-1])(x.reshape(-1, many * n)))
        x = x.reshape(-1, small, small, channels[-1])
        for c in channels[-2::-1]:
            x = jax.nn.elu(hk.Conv2DTranspose(c, 4, 2)(x))
        x = hk.Conv2DTranspose(1, 4, 2)(x)
        return x.reshape(long - 1, b, side, side).astype(jnp.float32), wakes

    model = hk.without_apply_rng(hk.transform(net))
    films = jax.ShapeDtypeStruct((long - 1, b, side, side), dtype)
    structs = jax.eval_shape(lambda x: model.init(jax.random.key(0), x), films)

    def run(p, start, speed, large):
        """This gives the loss, slopes, losses by time, how often each memory wakes, and guesses of the last frames."""
        time = jnp.arange(long)[:, None, None, None]
        way = jnp.mod(0.8 * jnp.tanh(start) + 0.12 * jnp.tanh(speed) * time + 1.0, 2.0)
        place = 0.1 + 0.8 * (1.0 - jnp.abs(1.0 - way))
        line = (jnp.arange(side) + 0.5) / side
        gap = (line[:, None] - place[..., 0, None, None]) ** 2 + (line - place[..., 1, None, None]) ** 2
        round_ = 0.12 + 0.03 * jnp.tanh(large)
        film = jnp.max(jnp.clip((round_[..., None, None] - jnp.sqrt(gap)) * side + 0.5, 0.0, 1.0), axis=2)

        def loss(p):
            """This is the surprise of pixels of the next frames."""
            logits, wakes = model.apply(p, film[:-1].astype(dtype))
            each = jax.nn.softplus(logits) - film[1:] * logits
            return jnp.mean(each), (jnp.mean(each, axis=(1, 2, 3)), wakes, logits[-1])

        (value, (each, wakes, last)), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        often = jnp.mean(wakes.astype(jnp.float32), axis=1)
        return value, slopes, each, often, jax.nn.sigmoid(last)

    def lively(path, r):
        """This makes filters and questions large enough for what ramps and strides take away."""
        size_ = 4.0 if path[-1].key == "query" else 2.0 if "transpose" in path[0].key else 1.4
        return normal(*r.shape, dtype=dtype, scale=size_ * r.scale) if len(r.shape) > 2 else r

    p = jax.tree_util.tree_map_with_path(lively, drawn(structs, dtype), is_leaf=lambda r: isinstance(r, Random))
    return Built(run, (p, normal(b, balls, 2), normal(b, balls, 2), normal(b, balls)))
