"""Whole models of pictures, noisy speech and genes, the twenty-sixth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_sixth_parts import drawn, layers_of_nnx

GROUP = "twenty-sixth"


@program("taps-moved-and-weighed-by-each-pixel-classifier-nnx", GROUP)
def _moved_taps(size: Size) -> Built:
    """This names what a picture shows with convolutions whose nine taps each pixel moves and weighs for itself.

    It is InternImage with the third deformable convolution (Wang, 2023); the code is in OpenGVLab/InternImage and in ports of it to
    flax: taps are read between pixels, in groups of channels, and their weights go through a softmax.
    """
    from flax import nnx

    b, side, w, group, classes = pick(size, (12, 220, 64, 16, 1000), (1, 148, 32, 16, 1000), (2, 36, 4, 2, 11))
    dtype, taps = half(size), 9
    near = np.stack(np.meshgrid([-1, 0, 1], [-1, 0, 1], indexing="ij"), axis=-1).reshape(taps, 2).astype(np.float32)

    dense, norm, conv = layers_of_nnx(dtype)

    class Moved(nnx.Module):
        def __init__(self, c, rngs):
            self.groups = c // group
            self.enter, self.leave = dense(c, c, rngs), dense(c, c, rngs)
            self.around, self.norm = conv(c, c, 3, rngs, groups=c), norm(c, rngs)
            self.moves = dense(c, self.groups * taps * 2, rngs)
            self.weights = dense(c, self.groups * taps, rngs)

        def __call__(self, x):
            _, rows, columns, _ = x.shape
            told = nnx.gelu(self.norm(self.around(x)))
            moves = self.moves(told).astype(jnp.float32).reshape(b, rows, columns, self.groups, taps, 2)
            weights = self.weights(told).astype(jnp.float32).reshape(b, rows, columns, self.groups, taps)
            weights = jax.nn.softmax(weights, axis=-1)
            here = np.stack(np.indices((rows, columns)), axis=-1).astype(np.float32)
            at = here[:, :, None, None] + near + moves
            low = jnp.floor(at)
            part = at - low
            values = self.enter(x).reshape(b, rows * columns, self.groups, group)
            total = 0.0
            for i in (0, 1):
                for j in (0, 1):
                    row, column = low[..., 0].astype(jnp.int32) + i, low[..., 1].astype(jnp.int32) + j
                    inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
                    flat = jnp.clip(row, 0, rows - 1) * columns + jnp.clip(column, 0, columns - 1)
                    flat = jnp.swapaxes(flat, -1, -2).reshape(b, rows * columns * taps, self.groups, 1)
                    read = jnp.take_along_axis(values, flat, axis=1)
                    read = read.reshape(b, rows, columns, taps, self.groups, group)
                    share = jnp.abs(1 - i - part[..., 0]) * jnp.abs(1 - j - part[..., 1]) * weights * inside
                    total = total + jnp.einsum("bxygk,bxykgc->bxygc", share.astype(dtype), read)
            return self.leave(total.reshape(x.shape))

    class Block(nnx.Module):
        def __init__(self, c, rngs):
            self.mix, self.norm1, self.norm2 = Moved(c, rngs), norm(c, rngs), norm(c, rngs)
            self.up, self.down = dense(c, 4 * c, rngs), dense(4 * c, c, rngs)
            self.gain1, self.gain2 = nnx.Param(jnp.ones(c, dtype)), nnx.Param(jnp.ones(c, dtype))

        def __call__(self, x):
            x = x + self.gain1[...] * self.norm1(self.mix(x))
            return x + self.gain2[...] * self.norm2(self.down(nnx.gelu(self.up(x))))

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.stem = nnx.List([conv(3, w // 2, 3, rngs, 2), conv(w // 2, w, 3, rngs, 2)])
            self.norms = nnx.List([norm(w // 2, rngs), norm(w, rngs)])
            self.stages = nnx.List([nnx.List([Block(w * 2**k, rngs) for _ in range(2)]) for k in range(3)])
            self.smaller = nnx.List([conv(w * 2**k, w * 2 ** (k + 1), 3, rngs, 2) for k in range(2)])
            self.between = nnx.List([norm(w * 2 ** (k + 1), rngs) for k in range(2)])
            self.last = nnx.LayerNorm(4 * w, rngs=rngs)
            self.head = nnx.Linear(4 * w, classes, rngs=rngs)

        def __call__(self, x):
            x = nnx.gelu(self.norms[0](self.stem[0](x)))
            x = self.norms[1](self.stem[1](x))
            for k, stage in enumerate(self.stages):
                for block in stage:
                    x = block(x)
                if k < 2:
                    x = self.between[k](self.smaller[k](x))
            x = self.last(jnp.mean(x.astype(jnp.float32), axis=(1, 2)))
            return jax.nn.log_softmax(self.head(x), axis=-1), x

    graph, state = nnx.split(nnx.eval_shape(lambda: Network(nnx.Rngs(0))))

    def run(state, pictures):
        mean, spread = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
        logp, x = nnx.merge(graph, state)(((pictures / 255.0 - mean) / spread).astype(dtype))
        best, at = lax.top_k(logp, 5)
        return jnp.exp(best), at, -jnp.sum(jnp.exp(logp) * logp, axis=-1), x

    return Built(run, (drawn(state), integers(b, side, side, 3, below=256)))


@program("heads-mixed-before-and-after-shares-class-word-only-at-the-end-linen", GROUP)
def _talking(size: Size) -> Built:
    """This names what a picture shows with attention whose heads are mixed before and after the softmax.

    It is CaiT (Touvron, 2021) with talking heads (Shazeer, 2020), as in flax ports of vision transformers; patches never see
    the class, which reads them in two layers at the end.
    """
    from flax import linen as nn

    b, side, patch, n, h, classes = pick(
        size, (24, 224, 16, 384, 8, 1000), (2, 176, 16, 96, 6, 1000), (2, 8, 4, 8, 2, 11)
    )
    dtype, depth, last = half(size), 5, 2
    d = n // h

    def dense(o, name=None):
        return nn.Dense(o, dtype=dtype, param_dtype=dtype, name=name)

    def norm():
        return nn.LayerNorm(epsilon=1e-6, dtype=dtype, param_dtype=dtype)

    class Feed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return dense(n)(nn.gelu(dense(4 * n)(x), approximate=False))

    class Talking(nn.Module):
        @nn.compact
        def __call__(self, x):
            query, key, value = jnp.moveaxis(dense(3 * n)(x).reshape(b, -1, 3, h, d), 2, 0)
            scores = jnp.einsum("bqhd,bkhd->bqkh", query * d**-0.5, key)
            probs = nn.softmax(dense(h)(scores).astype(jnp.float32), axis=2).astype(dtype)
            y = jnp.einsum("bqkh,bkhd->bqhd", dense(h)(probs), value)
            return dense(n)(y.reshape(x.shape))

    class Asked(nn.Module):
        @nn.compact
        def __call__(self, one, x):
            both = jnp.concatenate([one, x], axis=1)
            query = dense(n)(one[:, 0]).reshape(b, h, d) * d**-0.5
            key, value = (dense(n)(both).reshape(b, -1, h, d) for _ in range(2))
            scores = jnp.einsum("bhd,bkhd->bhk", query, key).astype(jnp.float32)
            probs = nn.softmax(scores, axis=-1)
            y = jnp.einsum("bhk,bkhd->bhd", probs.astype(dtype), value)
            return dense(n)(y.reshape(b, 1, n)), probs

    class Network(nn.Module):
        @nn.compact
        def __call__(self, pictures):
            def gain(name):
                return self.param(name, nn.initializers.ones, (n,), dtype)

            x = nn.Conv(n, (patch, patch), (patch, patch), dtype=dtype, param_dtype=dtype)(pictures)
            x = x.reshape(b, -1, n)
            x = x + self.param("places", nn.initializers.normal(), (1, x.shape[1], n), dtype)
            for k in range(depth):
                x = x + gain(f"mix{k}") * Talking()(norm()(x))
                x = x + gain(f"feed{k}") * Feed()(norm()(x))
            one = jnp.broadcast_to(self.param("one", nn.initializers.normal(), (1, 1, n), dtype), (b, 1, n))
            seen = []
            for k in range(last):
                normed = norm()(jnp.concatenate([one, x], axis=1))
                y, probs = Asked()(normed[:, :1], normed[:, 1:])
                one = one + gain(f"ask{k}") * y
                one = one + gain(f"tell{k}") * Feed()(norm()(one))
                seen.append(jnp.mean(probs, axis=1))
            return nn.Dense(classes)(norm()(one[:, 0]).astype(jnp.float32)), jnp.stack(seen)

    model = Network()

    def run(p, pictures):
        logits, seen = model.apply(p, (pictures / 127.5 - 1).astype(dtype))
        logp = jax.nn.log_softmax(logits, axis=-1)
        focus = jnp.sum(jax.scipy.special.entr(seen), axis=-1)
        return logp, lax.top_k(logp, 5)[1], seen, focus

    shape = jax.ShapeDtypeStruct((b, side, side, 3), dtype)
    return Built(
        run, (drawn(jax.eval_shape(model.init, jax.random.key(0), shape)), integers(b, side, side, 3, below=256))
    )


@program("speech-cleaned-by-band-gains-then-short-complex-filters-equinox", GROUP)
def _cleaned(size: Size) -> Built:
    """This takes noise out of speech by gains of bands as ears hear them, then by short filters over time for low tones.

    It is DeepFilterNet (Schröter, 2022; Rikorose/DeepFilterNet), written with equinox: running means normalise the bands, cells
    with memory read an encoding of them, and five complex numbers per low tone filter the frames around.
    """
    import equinox as eqx

    b, t, tones, bands, low, w, cell, order = pick(
        size, (24, 601, 481, 32, 96, 64, 256, 5), (1, 151, 481, 32, 96, 16, 96, 5), (2, 7, 21, 8, 6, 3, 4, 3)
    )
    ahead = order // 2
    edges = np.unique(np.round(np.geomspace(2, tones + 1, bands + 1 + bands // 2)).astype(int))[-(bands + 1) :] - 1
    edges[0] = 0
    owner = np.searchsorted(edges, np.arange(tones), side="right") - 1
    belongs = (np.clip(owner, 0, bands - 1)[:, None] == np.arange(bands)).astype(np.float32)
    pooled = belongs / np.maximum(belongs.sum(axis=0), 1)

    class Layers(eqx.Module):
        convs: list[eqx.nn.Conv2d]
        norms: list[eqx.nn.GroupNorm]
        tones_in: eqx.nn.Conv2d
        tones_mix: eqx.nn.Linear
        squeeze: eqx.nn.Linear
        cells: list[eqx.nn.GRUCell]
        spread: eqx.nn.Linear
        ups: list[eqx.nn.ConvTranspose2d]
        paths: list[eqx.nn.Conv2d]
        gains: eqx.nn.Conv2d
        coefficients: eqx.nn.Linear
        trust: eqx.nn.Linear
        level: eqx.nn.Linear

        def __init__(self, key):
            keys = iter(jax.random.split(key, 20))

            def conv(i, o, kernel, stride=1, groups=1):
                sides = ((kernel[0] - 1, 0), (kernel[1] // 2, kernel[1] // 2))
                return eqx.nn.Conv2d(i, o, kernel, (1, stride), sides, groups=groups, key=next(keys))

            self.convs = [conv(1, w, (3, 3)), conv(w, w, (1, 3), 2), conv(w, w, (1, 3), 2)]
            self.norms = [eqx.nn.GroupNorm(1, w) for _ in range(3)]
            self.tones_in = conv(2, w, (3, 3), 2)
            self.tones_mix = eqx.nn.Linear(w * low // 2, cell, key=next(keys))
            self.squeeze = eqx.nn.Linear(w * bands // 4, cell, key=next(keys))
            self.cells = [eqx.nn.GRUCell(cell, cell, key=next(keys)) for _ in range(3)]
            self.spread = eqx.nn.Linear(cell, w * bands // 4, key=next(keys))
            self.ups = [
                eqx.nn.ConvTranspose2d(w, w, (1, 4), (1, 2), padding=((0, 0), (1, 1)), key=next(keys)) for _ in range(2)
            ]
            self.paths = [conv(w, w, (1, 1)) for _ in range(3)]
            self.gains = conv(w, 1, (1, 3))
            self.coefficients = eqx.nn.Linear(cell, low * order * 2, key=next(keys))
            self.trust = eqx.nn.Linear(cell, 1, key=next(keys))
            self.level = eqx.nn.Linear(cell, 1, key=next(keys))

        def remember(self, cell_of, x):
            def step(state, now):
                state = cell_of(now, state)
                return state, state

            return lax.scan(step, jnp.zeros(cell), x)[1]

        def __call__(self, loud, shape):
            """This reads bands [t, bands] and low tones [2, t, low] of one recording."""
            x, kept = loud[None], []
            for layer, norm in zip(self.convs, self.norms, strict=True):
                x = jax.nn.relu(norm(layer(x)))
                kept.append(x)
            y = jax.nn.relu(self.tones_in(shape))
            whole = jax.vmap(self.squeeze)(jnp.moveaxis(x, 1, 0).reshape(t, -1))
            whole = jax.nn.relu(whole + jax.vmap(self.tones_mix)(jnp.moveaxis(y, 1, 0).reshape(t, -1)))
            whole = self.remember(self.cells[0], whole)
            x = jax.nn.relu(jax.vmap(self.spread)(self.remember(self.cells[1], whole)))
            x = jnp.moveaxis(x.reshape(t, w, bands // 4), 0, 1)
            for path, skip, up in zip(self.paths, kept[:0:-1], self.ups, strict=False):
                x = jax.nn.relu(up(x + path(skip)))
            gains = jax.nn.sigmoid(self.gains(x + self.paths[2](kept[0])))[0]
            y = self.remember(self.cells[2], whole) + whole
            filters = jnp.tanh(jax.vmap(self.coefficients)(y)).reshape(t, order, low, 2)
            trust = jax.nn.sigmoid(jax.vmap(self.trust)(y))
            return gains, filters, trust, 50 * jax.nn.sigmoid(jax.vmap(self.level)(whole))[:, 0] - 15

    def running(x, start):
        def step(mean, now):
            mean = 0.99 * mean + 0.01 * now
            return mean, mean

        return lax.scan(step, start, x)[1]

    def one(layers, real, imaginary):
        power = real * real + imaginary * imaginary
        loud = 10 * jnp.log10(power @ pooled + 1e-10)
        loud = (loud - running(loud, jnp.linspace(-60.0, -90.0, bands))) / 40
        size_of = jnp.sqrt(power[:, :low] + 1e-12)
        scale = lax.rsqrt(running(size_of, jnp.linspace(0.001, 0.0001, low)) + 1e-9)
        shape = jnp.stack([real[:, :low] * scale, imaginary[:, :low] * scale])
        gains, filters, trust, level = layers(loud, shape)
        gains = jnp.where(level[:, None] < -10, 0.0, gains)
        real, imaginary = real * (gains @ belongs.T), imaginary * (gains @ belongs.T)
        sides = ((order - 1 - ahead, ahead), (0, 0))
        low_real, low_imaginary = jnp.pad(real[:, :low], sides), jnp.pad(imaginary[:, :low], sides)
        near = np.arange(t)[:, None] + np.arange(order)
        windows, turned = low_real[near], low_imaginary[near]
        new_real = jnp.sum(windows * filters[..., 0] - turned * filters[..., 1], axis=1)
        new_imaginary = jnp.sum(windows * filters[..., 1] + turned * filters[..., 0], axis=1)
        real = real.at[:, :low].set(trust * new_real + (1 - trust) * real[:, :low])
        imaginary = imaginary.at[:, :low].set(trust * new_imaginary + (1 - trust) * imaginary[:, :low])
        after = real * real + imaginary * imaginary
        lost = 10 * jnp.log10((jnp.sum(after, axis=-1) + 1e-9) / (jnp.sum(power, axis=-1) + 1e-9))
        return real, imaginary, gains, level, lost

    def run(layers, real, imaginary):
        return jax.vmap(lambda x, y: one(layers, x, y))(real, imaginary)

    shapes = eqx.filter_eval_shape(Layers, jax.random.key(0))
    arrays, rest = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def whole(arrays, real, imaginary):
        return run(eqx.combine(arrays, rest), real, imaginary)

    weights = jax.tree.map(
        lambda s: normal(*s.shape, scale=float(np.prod(s.shape[1:])) ** -0.5 if len(s.shape) > 1 else 0.1), arrays
    )
    return Built(whole, (weights, normal(b, t, tones, scale=0.1), normal(b, t, tones, scale=0.1)))


@program("where-genes-are-cut-before-and-after-a-changed-letter-haiku", GROUP)
def _cut_genes(size: Size) -> Built:
    """This tells how changes of single letters of genes change where the gene is cut and joined.

    It is SpliceAI (Jaganathan, 2019; Illumina/SpliceAI), written with haiku: residual units of ever wider dilation read both the
    known and the changed letters, and the largest gains and losses near the change are reported.
    """
    import haiku as hk

    changes, t, crop, w, reach = pick(size, (40, 5101, 50, 32, 50), (2, 1001, 50, 16, 50), (2, 41, 5, 4, 3))
    kinds = pick(size, ((11, 1), (11, 4), (21, 10), (41, 25)), ((11, 1), (11, 4), (21, 10), (41, 25)), ((3, 1), (3, 2)))
    dtype, repeats = half(size), 2

    def norm(x, training):
        return hk.BatchNorm(True, True, 0.99)(x, is_training=training)

    @hk.without_apply_rng
    @hk.transform_with_state
    def net(letters, training=False):
        x = hk.Conv1D(w, 1)(letters)
        kept = hk.Conv1D(w, 1)(x)
        for width, rate in kinds:
            for _ in range(repeats):
                y = hk.Conv1D(w, width, rate=rate)(jax.nn.relu(norm(x, training)))
                y = hk.Conv1D(w, width, rate=rate)(jax.nn.relu(norm(y, training)))
                x = x + y
            kept = kept + hk.Conv1D(w, 1)(x)
        return hk.Conv1D(3, 1)(kept[:, crop:-crop])

    def run(p, state, text, length, now):
        middle = t // 2
        changed = text.at[:, middle].set((text[:, middle] + 1 + now) % 4)
        inside = jnp.abs(jnp.arange(t) - middle) <= middle - length[:, None]
        both = jnp.concatenate([text, changed])
        letters = jax.nn.one_hot(both, 4, dtype=dtype) * jnp.concatenate([inside, inside])[..., None].astype(dtype)
        turned = letters[:, ::-1, ::-1]
        one, _ = net.apply(p, state, letters)
        two, _ = net.apply(p, state, turned)
        probs = (
            jax.nn.softmax(one.astype(jnp.float32), axis=-1) + jax.nn.softmax(two.astype(jnp.float32), axis=-1)[:, ::-1]
        )
        before, after = jnp.split(0.5 * probs[..., 1:], 2)
        centre = before.shape[1] // 2
        gap = (after - before)[:, centre - reach : centre + reach + 1]
        gained, lost = jnp.max(gap, axis=1), jnp.max(-gap, axis=1)
        at = jnp.concatenate([jnp.argmax(gap, axis=1), jnp.argmax(-gap, axis=1)], axis=-1) - reach
        likely = jnp.max(jnp.concatenate([gained, lost], axis=-1), axis=-1)
        sites = jnp.sum(before > 0.5, axis=1)
        return gained, lost, at, likely, likely > 0.2, sites, jnp.mean(jnp.abs(gap), axis=(0, 2))

    shape = jax.ShapeDtypeStruct((2 * changes, t, 4), dtype)
    p, state = jax.eval_shape(lambda key, x: net.init(key, x, True), jax.random.key(0), shape)

    def known(path, s):
        """This describes means near zero and spreads near one that were kept in training."""
        if str(path[-1].key) == "counter":
            return integers(below=1000)
        return normal(*s.shape, dtype=s.dtype, scale=0.05, offset=0.0 if "mean" in str(path[0].key) else 1.0)

    p, state = drawn(p, dtype), jax.tree_util.tree_map_with_path(known, state)
    inputs = (integers(changes, t, below=4), integers(changes, below=t // 4), integers(changes, below=3))
    return Built(run, (p, state, *inputs))
