"""Models of images, sound, purchases, molecules, robots and tables, the sixteenth set: its author saw no plan."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import linen_program, module_weights
from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program

GROUP = "sixteenth"


def nnx_program(size: Size, make, *inputs: Random) -> Built:
    """This function makes a program of an nnx module, made by `make(rngs)`, that is applied to inputs."""
    from flax import nnx

    graph, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def apply(state, *xs):
        return nnx.merge(graph, state)(*xs)

    return Built(apply, (module_weights(state, half(size)), *inputs))


def equinox_parts(make, dtype):
    """This function gives described weights of an equinox module and a function that puts weights back into it."""
    import equinox as eqx

    model = eqx.filter_eval_shape(make, jax.random.key(0))
    arrays, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def scaled(r: Random) -> Random:
        return dataclasses.replace(r, scale=r.shape[-1] ** -0.5) if len(r.shape) == 2 else r

    leaves = jax.tree.leaves(module_weights(arrays, dtype), is_leaf=lambda leaf: isinstance(leaf, Random))
    described = [scaled(r) for r in leaves]
    tree = jax.tree.structure(arrays)

    def whole(leaves):
        return eqx.combine(jax.tree.unflatten(tree, leaves), static)

    return described, whole


@program("densenet-growing-concatenated-maps-linen", GROUP)
def _dense(size: Size) -> Built:
    """This gives logits and pooled features of images by a network whose layers each add a few more channels."""
    import flax.linen as nn

    b, side, stem, growth, depths, classes = pick(
        size, (24, 168, 64, 32, (4, 6, 5), 1000), (4, 84, 32, 16, (4, 6, 5), 1000), (2, 24, 8, 4, (4, 6, 5), 7)
    )
    dtype = half(size)

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.relu(nn.GroupNorm(None, group_size=growth // 2, dtype=dtype)(x))
            y = nn.Conv(4 * growth, (1, 1), use_bias=False, dtype=dtype)(y)
            y = nn.relu(nn.LayerNorm(use_bias=False, dtype=dtype)(y))
            return nn.Dropout(0.2, deterministic=True)(nn.Conv(growth, (3, 3), use_bias=False, dtype=dtype)(y))

    class Dense(nn.Module):
        @nn.compact
        def __call__(self, images):
            x = (images.astype(jnp.float32) / 255.0 - 0.45) / 0.225
            x = nn.Conv(stem, (7, 7), (2, 2), padding=3, use_bias=False, dtype=dtype)(x.astype(dtype))
            x = nn.max_pool(nn.relu(x), (3, 3), (2, 2), padding=((1, 1), (1, 1)))
            for i, depth in enumerate(depths):
                maps = [x]
                for _ in range(depth):
                    maps.append(Layer()(jnp.concatenate(maps, axis=-1)))
                x = jnp.concatenate(maps, axis=-1)
                if i < len(depths) - 1:
                    x = nn.Conv(x.shape[-1] // 2, (1, 1), use_bias=False, dtype=dtype)(nn.relu(x))
                    x = nn.avg_pool(x, (2, 2), (2, 2))
            pooled = jnp.mean(nn.relu(x).astype(jnp.float32), axis=(1, 2))
            return nn.Dense(classes)(pooled), pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)

    return linen_program(size, Dense(), integers(b, side, side, 3, below=256))


@program("demucs-gated-wave-unet-with-lstm-haiku", GROUP)
def _demucs(size: Size) -> Built:
    """This gives the sources of a stereo mixture by strided convolutions of the wave with recurrent layers between."""
    import haiku as hk

    b, samples, widths, sources = pick(
        size, (6, 20480, (48, 96, 192, 384), 4), (2, 20480, (16, 32, 64, 128), 4), (1, 512, (4, 6, 8, 10), 2)
    )
    dtype = half(size)

    def glu(x):
        a, g = jnp.split(x, 2, axis=-1)
        return a * jax.nn.sigmoid(g)

    def net(wave):
        mono = jnp.mean(wave, axis=-1, keepdims=True)
        mean, std = jnp.mean(mono, axis=1, keepdims=True), jnp.std(mono, axis=1, keepdims=True)
        x, skips = ((wave - mean) / (1e-5 + std)).astype(dtype), []
        for n in widths:
            x = jax.nn.relu(hk.Conv1D(n, 8, stride=4)(x))
            x = glu(hk.Conv1D(2 * n, 1)(x))
            skips.append(x)
        n = widths[-1]
        series = jnp.swapaxes(x, 0, 1)
        ways = []
        for backwards in (False, True):
            core = hk.LSTM(n)
            state = jax.tree.map(lambda s: s.astype(dtype), core.initial_state(b))
            seen, _ = hk.dynamic_unroll(core, series, state, reverse=backwards)
            ways.append(seen)
        x = jnp.swapaxes(hk.Linear(n)(jnp.concatenate(ways, axis=-1)), 0, 1)
        outs = (*widths[-2::-1], 2 * sources)
        for i, n in enumerate(outs):
            skip = skips.pop()
            x = glu(hk.Conv1D(2 * x.shape[-1], 3)(x + skip))
            x = hk.Conv1DTranspose(n, 8, stride=4)(x)
            x = jax.nn.relu(x) if i < len(outs) - 1 else x
        x = x.astype(jnp.float32).reshape(b, samples, sources, 2) * std[..., None] + mean[..., None]
        missing = wave[:, :, None] - jnp.sum(x, axis=2, keepdims=True)
        return x + missing / sources, jnp.sqrt(jnp.mean(jnp.square(x), axis=(1, 3)))

    model = hk.without_apply_rng(hk.transform(net))
    wave = normal(b, samples, 2, scale=0.2)
    return Built(model.apply, (module_weights(jax.eval_shape(model.init, jax.random.key(0), wave.struct), dtype), wave))


@program("purchases-with-time-intervals-next-items-nnx", GROUP)
def _purchases(size: Size) -> Built:
    """This gives the likeliest next items of shoppers by attention whose keys know the time between two purchases."""
    from flax import nnx

    b, length, items, n, h, spans, top = pick(
        size, (128, 100, 30000, 96, 2, 256, 20), (24, 50, 5000, 48, 2, 128, 20), (2, 6, 40, 8, 2, 9, 3)
    )
    dtype = half(size)
    kinds = {"dtype": dtype, "param_dtype": dtype}

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.q, self.k, self.v, self.up, self.down = (nnx.Linear(n, n, rngs=rngs, **kinds) for _ in range(5))
            self.norm1, self.norm2 = (nnx.LayerNorm(n, epsilon=1e-8, rngs=rngs, **kinds) for _ in range(2))

        def __call__(self, x, place_k, place_v, span_k, span_v, mask, alive):
            y = self.norm1(x)
            q, k, v = self.q(y), self.k(x) + place_k, self.v(x) + place_v
            q, k, v = (m.reshape(b, length, h, n // h) for m in (q, k, v))
            span_k, span_v = (m.reshape(b, length, length, h, n // h) for m in (span_k, span_v))
            scores = jnp.einsum("bihd,bjhd->bhij", q, k) + jnp.einsum("bihd,bijhd->bhij", q, span_k)
            scores = jnp.where(mask, scores.astype(jnp.float32) / np.sqrt(n // h), -(2.0**31))
            probs = nnx.softmax(scores, axis=-1).astype(dtype)
            seen = jnp.einsum("bhij,bjhd->bihd", probs, v) + jnp.einsum("bhij,bijhd->bihd", probs, span_v)
            x = y + seen.reshape(b, length, n)
            y = self.norm2(x)
            return (y + self.down(nnx.relu(self.up(y)))) * alive

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.items = nnx.Embed(items, n, rngs=rngs, **kinds)
            self.place_k, self.place_v = (nnx.Embed(length, n, rngs=rngs, **kinds) for _ in range(2))
            self.span_k, self.span_v = (nnx.Embed(spans + 1, n, rngs=rngs, **kinds) for _ in range(2))
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])
            self.last = nnx.LayerNorm(n, epsilon=1e-8, rngs=rngs, **kinds)

        def __call__(self, history, times):
            times = jnp.cumsum(times, axis=1)
            gaps = jnp.diff(times, axis=1)
            unit = jnp.maximum(jnp.min(jnp.where(gaps > 0, gaps, 1 << 20), axis=1), 1)
            apart = jnp.abs(times[:, :, None] - times[:, None]) // unit[:, None, None]
            apart = jnp.minimum(apart, spans)
            alive = (history > 0)[..., None]
            mask = jnp.tril(jnp.ones((length, length), bool))
            x = self.items(history) * n**0.5 * alive
            shared = (self.place_k.embedding[...], self.place_v.embedding[...], self.span_k(apart), self.span_v(apart))
            for block in self.blocks:
                x = block(x, *shared, mask, alive)
            scores = self.items.attend(self.last(x)[:, -1]).astype(jnp.float32)
            bought = jnp.zeros((b, items), bool).at[jnp.arange(b)[:, None], history].set(True)
            return lax.top_k(jnp.where(bought, -1e9, scores), top)

    return nnx_program(size, Net, integers(b, length, below=items), integers(b, length, below=900))


@program("molecules-isomorphism-sums-virtual-node-equinox", GROUP)
def _molecules(size: Size) -> Built:
    """This gives properties of a batch of molecules by sums over bonds and one more node that sees a whole molecule."""
    import equinox as eqx

    graphs, atoms, bonds, n, tasks = pick(
        size, (512, 12800, 27600, 300, 128), (64, 1600, 3450, 132, 128), (3, 20, 44, 8, 5)
    )
    dtype, kinds_a, kinds_b = half(size), (119, 5, 12, 12, 10), (5, 6, 2)

    class Perceptron(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.LayerNorm
        second: eqx.nn.Linear

        def __init__(self, key):
            one, two = jax.random.split(key)
            self.first, self.second = eqx.nn.Linear(n, 2 * n, key=one), eqx.nn.Linear(2 * n, n, key=two)
            self.norm = eqx.nn.LayerNorm(2 * n)

        def __call__(self, x):
            return self.second(jax.nn.relu(self.norm(self.first(x))))

    class Net(eqx.Module):
        atom_tables: list
        bond_tables: list
        layers: list
        virtual: list
        epsilons: jax.Array
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = iter(jax.random.split(key, 40))
            self.atom_tables = [eqx.nn.Embedding(k, n, key=next(keys)) for k in kinds_a]
            self.bond_tables = [[eqx.nn.Embedding(k, n, key=next(keys)) for k in kinds_b] for _ in range(4)]
            self.layers = [Perceptron(next(keys)) for _ in range(4)]
            self.virtual = [Perceptron(next(keys)) for _ in range(3)]
            self.epsilons = jnp.zeros((4, 1))
            self.head = eqx.nn.Linear(n, tasks, key=next(keys))

        def __call__(self, atom, bond, senders, receivers, owner):
            x = sum(table.weight[atom[:, i] % kinds_a[i]] for i, table in enumerate(self.atom_tables))
            whole = jnp.zeros((graphs, n), x.dtype)
            for i, layer in enumerate(self.layers):
                x = x + whole[owner]
                edge = sum(table.weight[bond[:, j] % kinds_b[j]] for j, table in enumerate(self.bond_tables[i]))
                sums = jax.ops.segment_sum(jax.nn.relu(x[senders] + edge), receivers, num_segments=atoms)
                y = jax.vmap(layer)((1 + self.epsilons[i]) * x + sums)
                if i < 3:
                    pooled = jax.ops.segment_sum(x, owner, num_segments=graphs, indices_are_sorted=True)
                    whole = whole + jax.nn.relu(jax.vmap(self.virtual[i])(whole + pooled))
                    y = jax.nn.relu(y)
                x = y + x
            count = jax.ops.segment_sum(jnp.ones(atoms), owner, num_segments=graphs)
            mean = jax.ops.segment_sum(x.astype(jnp.float32), owner, num_segments=graphs)
            mean = mean / jnp.maximum(count, 1.0)[:, None]
            return jax.nn.sigmoid(jax.vmap(self.head)(mean.astype(dtype)).astype(jnp.float32))

    weights, whole = equinox_parts(Net, dtype)

    def predict(weights, *inputs):
        return whole(weights)(*inputs)

    ends = [integers(bonds, below=atoms) for _ in range(2)]
    tables = (integers(atoms, 5, below=119), integers(bonds, 3, below=30))
    return Built(predict, (weights, *tables, *ends, integers(atoms, below=graphs, ramp=True)))


@program("robot-arm-action-chunks-from-cameras-linen", GROUP)
def _chunks(size: Size) -> Built:
    """This gives a robot's next actions from two cameras and its joints by queries for a whole chunk of actions.

    The new chunk is averaged with older chunks of the same moment by falling weights.
    """
    import flax.linen as nn

    b, high, wide, n, h, chunk, joints, older = pick(
        size, (4, 240, 320, 512, 8, 100, 14, 24), (3, 120, 160, 128, 8, 50, 14, 12), (1, 32, 48, 8, 2, 5, 3, 3)
    )
    dtype = half(size)

    def waves(count, width):
        angle = np.arange(count)[:, None] / 10000 ** (2 * np.arange(width // 2) / width)
        return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1).astype(np.float32)

    class Attend(nn.Module):
        @nn.compact
        def __call__(self, q, k, v):
            q, k, v = (nn.DenseGeneral((h, n // h), dtype=dtype)(m) for m in (q, k, v))
            scores = jnp.einsum("...qhd,...khd->...hqk", q * (n // h) ** -0.5, k)
            probs = nn.Dropout(0.1, deterministic=True)(nn.softmax(scores.astype(jnp.float32)).astype(dtype))
            return nn.DenseGeneral(n, axis=(-2, -1), dtype=dtype)(jnp.einsum("...hqk,...khd->...qhd", probs, v))

    class Feed(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(n, dtype=dtype)(nn.relu(nn.Dense(4 * n, dtype=dtype)(x)))
            return nn.LayerNorm(dtype=dtype)(x + y)

    class Policy(nn.Module):
        @nn.compact
        def __call__(self, cameras, posture, before):
            x = cameras.reshape(-1, high, wide, 3).astype(dtype)
            for i, width in enumerate((n // 8, n // 8, n // 4, n // 2, n)):
                step, kernel = (2, 2), (7, 7) if i == 0 else (3, 3)
                y = nn.Conv(width, kernel, step, use_bias=False, dtype=dtype)(x)
                scale = self.param(f"frozen_scale{i}", nn.initializers.ones, (width,)).astype(dtype)
                x = nn.relu(y * scale + self.param(f"frozen_bias{i}", nn.initializers.zeros, (width,)).astype(dtype))
            rows, columns = waves(x.shape[1], n // 2), waves(x.shape[2], n // 2)
            places = np.concatenate(
                [np.repeat(rows[:, None], x.shape[2], 1), np.repeat(columns[None], x.shape[1], 0)], -1
            )
            x = nn.Dense(n, dtype=dtype)(x).reshape(b, -1, n)
            places = np.tile(places.reshape(-1, n), (2, 1))
            extra = self.param("extra_places", nn.initializers.normal(0.02), (2, n))
            places = jnp.concatenate([extra, places]).astype(dtype)
            own = nn.Dense(n, dtype=dtype)(posture.astype(dtype))
            style = nn.Dense(n, dtype=dtype)(jnp.zeros((b, 32), dtype))
            x = jnp.concatenate([jnp.stack([style, own], axis=1), x], axis=1)
            for _ in range(2):
                x = nn.LayerNorm(dtype=dtype)(x + Attend()(x + places, x + places, x))
                x = Feed()(x)
            queries = self.param("queries", nn.initializers.normal(0.02), (chunk, n)).astype(dtype)
            y = jnp.zeros((b, chunk, n), dtype)
            for _ in range(2):
                y = nn.LayerNorm(dtype=dtype)(y + Attend()(y + queries, y + queries, y))
                y = nn.LayerNorm(dtype=dtype)(y + Attend()(y + queries, x + places, x))
                y = Feed()(y)
            actions = nn.Dense(joints, dtype=dtype)(y).astype(jnp.float32)
            falling = jnp.exp(-0.01 * jnp.arange(older + 1))
            now = jnp.concatenate([before, actions[:, :1]], axis=1)
            filled = jnp.any(now != 0.0, axis=-1) * falling
            smooth = jnp.einsum("bo,boj->bj", filled, now) / jnp.sum(filled, axis=-1, keepdims=True)
            return smooth, actions, nn.sigmoid(nn.Dense(1, dtype=dtype)(y)[..., 0])

    cameras = normal(b, 2, high, wide, 3)
    return linen_program(size, Policy(), cameras, normal(b, joints), normal(b, older, joints))


@program("dense-residual-upscaler-pixel-shuffle-nnx", GROUP)
def _upscale(size: Size) -> Built:
    """This gives photographs at four times their size by residual blocks of densely joined convolutions."""
    from flax import nnx

    b, high, wide, n, growth = pick(size, (2, 120, 92, 64, 32), (1, 40, 36, 24, 12), (1, 6, 7, 4, 2))
    dtype = half(size)

    def conv(i, o, rngs):
        return nnx.Conv(i, o, (3, 3), dtype=dtype, param_dtype=dtype, rngs=rngs)

    class Dense(nnx.Module):
        def __init__(self, rngs):
            self.convs = nnx.List([conv(n + i * growth, n if i == 4 else growth, rngs) for i in range(5)])

        def __call__(self, x):
            maps = x
            for layer in self.convs[:4]:
                maps = jnp.concatenate([maps, nnx.leaky_relu(layer(maps), 0.2)], axis=-1)
            return x + 0.2 * self.convs[4](maps)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.trunk, self.fine, self.last = (conv(*io, rngs) for io in ((3, n), (n, n), (n, n), (n, 3)))
            self.ups = nnx.List([conv(n, 4 * n, rngs) for _ in range(2)])
            self.blocks = nnx.List([nnx.List([Dense(rngs) for _ in range(3)]) for _ in range(2)])

        def __call__(self, images):
            x = first = self.first(images.astype(dtype))
            for block in self.blocks:
                y = x
                for dense in block:
                    y = dense(y)
                x = x + 0.2 * y
            x = first + self.trunk(x)
            for up in self.ups:
                y = up(x)
                rows, columns = y.shape[1], y.shape[2]
                y = y.reshape(b, rows, columns, 2, 2, n).transpose(0, 1, 3, 2, 4, 5)
                x = nnx.leaky_relu(y.reshape(b, 2 * rows, 2 * columns, n), 0.2)
            detail = self.last(nnx.leaky_relu(self.fine(x), 0.2)).astype(jnp.float32)
            plain = jax.image.resize(images, (b, 4 * high, 4 * wide, 3), "bilinear")
            return jnp.round(255.0 * jnp.clip(plain + 0.05 * detail, 0.0, 1.0)) / 255.0

    return nnx_program(size, Net, normal(b, high, wide, 3, scale=0.2, offset=0.5))


@program("soft-oblivious-trees-sparse-choice-table", GROUP)
def _oblivious(size: Size) -> Built:
    """This gives predictions of a table's rows by two layers of soft trees that choose columns sparsely, like NODE."""
    rows, columns, trees, depth, outputs = pick(size, (3000, 136, 200, 6, 3), (150, 100, 100, 6, 3), (4, 7, 3, 3, 2))
    dtype = half(size)

    def entmax(z):
        z = z.astype(jnp.float32) / 2
        z = z - jnp.max(z, axis=-1, keepdims=True)
        falling = jnp.flip(jnp.sort(z, axis=-1), axis=-1)
        rank = jnp.arange(1, z.shape[-1] + 1)
        mean, square = jnp.cumsum(falling, axis=-1) / rank, jnp.cumsum(falling**2, axis=-1) / rank
        spread = jnp.maximum((1 - rank * (square - mean**2)) / rank, 0.0)
        thresholds = mean - jnp.sqrt(spread)
        support = jnp.sum(thresholds <= falling, axis=-1, keepdims=True)
        return jnp.maximum(z - jnp.take_along_axis(thresholds, support - 1, axis=-1), 0.0) ** 2

    def entmoid(x):
        x = x.astype(jnp.float32)
        tau = (jnp.abs(x) + jnp.sqrt(jnp.maximum(0.0, 8 - x**2))) / 2
        tau = jnp.where(tau <= jnp.abs(x), 2.0, tau)
        high = 1 - 0.25 * jnp.maximum(tau - jnp.abs(x), 0.0) ** 2
        return jnp.where(x > 0, high, 1 - high)

    codes = np.array([[leaf >> level & 1 for level in range(depth)] for leaf in range(2**depth)], np.float32)

    def layer(p, x):
        chosen = jnp.einsum("rc,tdc->rtd", x, entmax(p["choice"]).astype(dtype))
        right = entmoid((chosen - p["threshold"]) * jnp.exp(-p["log_heat"]))
        bins = codes * right[:, :, None] + (1 - codes) * (1 - right[:, :, None])
        leaves = jnp.prod(bins, axis=-1).astype(dtype)
        return jnp.einsum("rtl,tlo->rto", leaves, p["response"])

    def predict(layers, x, low, high):
        x = jnp.clip((x - low) / (high - low + 1e-3), -4.0, 4.0).astype(dtype)
        every = []
        for p in layers:
            y = layer(p, x)
            every.append(y)
            x = jnp.concatenate([x, y.reshape(rows, -1)], axis=-1)
        y = jnp.mean(jnp.concatenate(every, axis=1).astype(jnp.float32), axis=1)
        return y, jax.nn.log_softmax(y)

    layers = [
        {
            "choice": normal(trees, depth, columns + i * trees * outputs, dtype=dtype, scale=2.0),
            "threshold": normal(trees, depth, dtype=dtype, scale=0.3),
            "log_heat": normal(trees, depth, dtype=dtype, scale=0.3),
            "response": normal(trees, 2**depth, outputs, dtype=dtype, scale=4.0),
        }
        for i in range(2)
    ]
    bounds = (normal(columns, scale=0.1, offset=-1.0), normal(columns, scale=0.1, offset=1.0))
    return Built(predict, (layers, normal(rows, columns), *bounds))
