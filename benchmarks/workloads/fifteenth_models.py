"""Small models of images, speech, points, tables and words, the fifteenth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import linen_program, module_weights
from benchmarks.workloads.registry import Built, Size, half, normal, pick, program, weight

GROUP = "fifteenth"


@program("shufflenet-split-and-shuffled-channels-linen", GROUP)
def _shuffle(size: Size) -> Built:
    """This gives the class probabilities of images by a network like ShuffleNet V2 with mixed halves of channels."""
    import flax.linen as nn

    b, side, stem, widths, repeats, classes = pick(
        size,
        (24, 160, 24, (116, 232, 464), (3, 7, 3), 1000),
        (6, 128, 24, (48, 96), (3, 3), 1000),
        (2, 16, 4, (8, 12), (2, 1), 5),
    )
    dtype = half(size)

    def shuffled(x):
        n = x.shape[-1]
        return jnp.swapaxes(x.reshape(*x.shape[:-1], 2, n // 2), -1, -2).reshape(x.shape)

    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=True, epsilon=1e-5, dtype=dtype)(x)

    class Unit(nn.Module):
        width: int
        stride: int

        def point(self, x):
            return nn.relu(Norm()(nn.Conv(self.width // 2, (1, 1), use_bias=False, dtype=dtype)(x)))

        def depth(self, x):
            step, n = (self.stride, self.stride), x.shape[-1]
            return Norm()(nn.Conv(n, (3, 3), step, feature_group_count=n, use_bias=False, dtype=dtype)(x))

        @nn.compact
        def __call__(self, x):
            if self.stride == 1:
                kept, x = jnp.split(x, 2, axis=-1)
            else:
                kept = self.point(self.depth(x))
            y = self.point(self.depth(self.point(x)))
            return shuffled(jnp.concatenate([kept, y], axis=-1))

    class Classifier(nn.Module):
        @nn.compact
        def __call__(self, images):
            x = (images - jnp.array([0.485, 0.456, 0.406])) / jnp.array([0.229, 0.224, 0.225])
            x = nn.relu(Norm()(nn.Conv(stem, (3, 3), (2, 2), use_bias=False, dtype=dtype)(x.astype(dtype))))
            x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
            for width, repeat in zip(widths, repeats, strict=True):
                x = Unit(width, 2)(x)
                for _ in range(repeat):
                    x = Unit(width, 1)(x)
            x = nn.relu(Norm()(nn.Conv(2 * widths[-1], (1, 1), use_bias=False, dtype=dtype)(x)))
            logits = nn.Dense(classes, dtype=dtype)(jnp.mean(x, axis=(1, 2)))
            return nn.softmax(logits.astype(jnp.float32), axis=-1)

    module = Classifier()
    shapes = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct((b, side, side, 3), jnp.float32))
    params = module_weights(shapes["params"], dtype)
    stats = jax.tree_util.tree_map_with_path(
        lambda path, s: normal(*s.shape, scale=0.02, offset=0.5 if path[-1].key == "var" else 0.0),
        shapes["batch_stats"],
    )

    def predict(params, stats, images):
        return module.apply({"params": params, "batch_stats": stats}, images)

    return Built(predict, (params, stats, normal(b, side, side, 3, scale=0.25, offset=0.5)))


@program("hifi-gan-upsampled-mel-to-wave-haiku", GROUP)
def _vocoder(size: Size) -> Built:
    """This gives the sound wave of a mel spectrogram by a generator like HiFi-GAN's, with kernels of several widths."""
    import haiku as hk

    b, frames, mels, n, rates, kernels, dilations = pick(
        size,
        (4, 87, 80, 256, (8, 8, 2, 2), (3, 7, 11), (1, 3, 5)),
        (2, 43, 80, 96, (8, 8, 2), (3, 7), (1, 3)),
        (2, 5, 6, 8, (2, 2), (3, 5), (1, 2)),
    )
    dtype = half(size)

    def leaky(x):
        return jax.nn.leaky_relu(x, 0.1)

    def residual(x, width):
        for dilation in dilations:
            y = hk.Conv1D(x.shape[-1], width, rate=dilation)(leaky(x))
            x = x + hk.Conv1D(x.shape[-1], width)(leaky(y))
        return x

    def generator(mel):
        x = hk.Conv1D(n, 7)(mel)
        for i, rate in enumerate(rates):
            x = hk.Conv1DTranspose(n // 2 ** (i + 1), 2 * rate, stride=rate)(leaky(x))
            x = sum(residual(x, width) for width in kernels) / len(kernels)
        return jnp.tanh(hk.Conv1D(1, 7)(jax.nn.leaky_relu(x)).astype(jnp.float32))[..., 0]

    model = hk.without_apply_rng(hk.transform(generator))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((b, frames, mels), dtype))

    def speak(params, log_mel):
        wave = model.apply(params, jnp.log(jnp.clip(jnp.exp(log_mel), 1e-5)).astype(dtype))
        return wave / jnp.maximum(jnp.max(jnp.abs(wave), axis=-1, keepdims=True), 1e-3) * 0.95

    return Built(speak, (module_weights(shapes, dtype), normal(b, frames, mels, scale=2.0, offset=-4.0)))


@program("segformer-shortened-keys-mixing-convolutions-nnx", GROUP)
def _segformer(size: Size) -> Built:
    """This gives a class for every pixel by a pyramid of attention like SegFormer's, whose keys are a coarser map."""
    from flax import nnx

    b, side, widths, heads, shorter, head_width, classes = pick(
        size,
        (4, 256, (32, 64, 160, 256), (1, 2, 5, 8), (8, 4, 2, 1), 256, 19),
        (1, 96, (32, 64, 96), (1, 2, 3), (4, 2, 1), 64, 19),
        (1, 16, (4, 8), (1, 2), (2, 1), 6, 3),
    )
    dtype = half(size)
    kinds = {"dtype": dtype, "param_dtype": dtype}

    class Attention(nnx.Module):
        def __init__(self, n, h, short, rngs):
            self.h, self.short = h, short
            self.q, self.k, self.v, self.out = (nnx.Linear(n, n, rngs=rngs, **kinds) for _ in range(4))
            self.coarse = nnx.Conv(n, n, (short, short), (short, short), padding="VALID", rngs=rngs, **kinds)
            self.norm = nnx.LayerNorm(n, rngs=rngs, **kinds)

        def __call__(self, x):
            size_, high, wide, n = x.shape
            keys = self.norm(self.coarse(x)) if self.short > 1 else x
            keys = keys.reshape(size_, -1, n)
            q = self.q(x).reshape(size_, high * wide, self.h, -1)
            k, v = (f(keys).reshape(size_, -1, self.h, n // self.h) for f in (self.k, self.v))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(n // self.h)
            probs = nnx.softmax(scores.astype(jnp.float32), axis=-1).astype(dtype)
            return self.out(jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(x.shape))

    class Block(nnx.Module):
        def __init__(self, n, h, short, rngs):
            self.norm1, self.norm2 = (nnx.LayerNorm(n, epsilon=1e-6, rngs=rngs, **kinds) for _ in range(2))
            self.attend = Attention(n, h, short, rngs)
            self.up, self.down = (nnx.Linear(i, o, rngs=rngs, **kinds) for i, o in ((n, 4 * n), (4 * n, n)))
            self.mix = nnx.Conv(4 * n, 4 * n, (3, 3), feature_group_count=4 * n, rngs=rngs, **kinds)

        def __call__(self, x):
            x = x + self.attend(self.norm1(x))
            return x + self.down(nnx.gelu(self.mix(self.up(self.norm2(x))), approximate=False))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.patches, self.norms, self.blocks, self.heads = nnx.List(), nnx.List(), nnx.List(), nnx.List()
            before = 3
            for i, n in enumerate(widths):
                width, stride = (7, 4) if i == 0 else (3, 2)
                self.patches.append(nnx.Conv(before, n, (width, width), (stride, stride), rngs=rngs, **kinds))
                self.norms.append(nnx.LayerNorm(n, rngs=rngs, **kinds))
                self.blocks.append(nnx.List([Block(n, heads[i], shorter[i], rngs) for _ in range(2)]))
                self.heads.append(nnx.Linear(n, head_width, rngs=rngs, **kinds))
                before = n
            self.fuse = nnx.Linear(head_width * len(widths), head_width, use_bias=False, rngs=rngs, **kinds)
            self.classes = nnx.Linear(head_width, classes, rngs=rngs, **kinds)

        def __call__(self, images):
            x, maps = images.astype(dtype), []
            for patch, norm, blocks, head in zip(self.patches, self.norms, self.blocks, self.heads, strict=True):
                x = norm(patch(x))
                for block in blocks:
                    x = block(x)
                shape = (b, side // 4, side // 4, head_width)
                maps.append(jax.image.resize(head(x), shape, "bilinear"))
            y = nnx.relu(self.fuse(jnp.concatenate(maps[::-1], axis=-1)))
            logits = self.classes(y).astype(jnp.float32)
            probs = nnx.softmax(jax.image.resize(logits, (b, side, side, classes), "bilinear"))
            return jnp.argmax(probs, axis=-1), jnp.max(probs, axis=-1)

    graph, state = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))

    def segment(state, images):
        return nnx.merge(graph, state)(images)

    return Built(segment, (module_weights(state, dtype), normal(b, side, side, 3)))


@program("centre-points-heatmap-peaks-soft-suppression-linen", GROUP)
def _centres(size: Size) -> Built:
    """This gives boxes found as peaks of a heat map, whose overlapping neighbours then lose part of their scores.

    Peaks are the places where the map equals its maximum over three by three; soft suppression takes the best box
    again and again and multiplies the scores of the others by a Gaussian of their overlap.
    """
    import flax.linen as nn

    b, side, n, classes, top, rounds = pick(
        size, (8, 256, 64, 80, 100, 60), (2, 128, 24, 80, 60, 30), (2, 16, 4, 3, 6, 4)
    )
    dtype, grid = half(size), side // 4

    class Unit(nn.Module):
        width: int
        stride: int = 1

        @nn.compact
        def __call__(self, x):
            y = nn.Conv(self.width, (3, 3), (self.stride, self.stride), dtype=dtype)(x)
            y = nn.relu(nn.GroupNorm(4, dtype=dtype)(y))
            y = nn.GroupNorm(4, dtype=dtype)(nn.Conv(self.width, (3, 3), dtype=dtype)(y))
            if x.shape != y.shape:
                x = nn.Conv(self.width, (1, 1), (self.stride, self.stride), dtype=dtype)(x)
            return nn.relu(x + y)

    class Detector(nn.Module):
        def head(self, x, outputs):
            y = nn.relu(nn.Conv(n, (3, 3), dtype=dtype)(x))
            return nn.Conv(outputs, (1, 1), dtype=dtype)(y).astype(jnp.float32)

        @nn.compact
        def __call__(self, images):
            x = nn.relu(nn.Conv(n, (7, 7), (2, 2), dtype=dtype)(images.astype(dtype)))
            fine = Unit(n, 2)(x)
            coarse = Unit(4 * n, 2)(Unit(2 * n, 2)(fine))
            for width in (2 * n, n):
                coarse = nn.relu(nn.ConvTranspose(width, (4, 4), (2, 2), dtype=dtype)(coarse))
            x = fine + coarse
            heat = nn.sigmoid(self.head(x, classes) - 2.0)
            peaks = nn.max_pool(heat, (3, 3), (1, 1), padding="SAME")
            heat = jnp.where(heat == peaks, heat, 0.0)
            scores, flat = lax.top_k(heat.reshape(b, -1), top)
            places, labels = flat // classes, flat % classes
            sizes, shifts = nn.softplus(self.head(x, 2)), self.head(x, 2)
            sizes, shifts = (
                jnp.take_along_axis(m.reshape(b, -1, 2), places[..., None], axis=1) for m in (sizes, shifts)
            )
            centres = jnp.stack([places % grid, places // grid], axis=-1) + shifts
            boxes = 4.0 * jnp.concatenate([centres - 4 * sizes, centres + 4 * sizes], axis=-1)
            return jax.vmap(suppress)(jnp.clip(boxes, 0.0, side), scores, labels)

    def overlap(box, boxes):
        low, high = jnp.maximum(box[:2], boxes[:, :2]), jnp.minimum(box[2:], boxes[:, 2:])
        shared = jnp.prod(jnp.maximum(high - low, 0.0), axis=-1)
        areas = jnp.prod(boxes[:, 2:] - boxes[:, :2], axis=-1)
        return shared / (areas + jnp.prod(box[2:] - box[:2]) - shared + 1e-6)

    def suppress(boxes, scores, labels):
        def body(i, carry):
            scores, kept, order = carry
            best = jnp.argmax(scores)
            kept, order = kept.at[i].set(scores[best]), order.at[i].set(best)
            same = labels == labels[best]
            decay = jnp.exp(-jnp.square(overlap(boxes[best], boxes)) / 0.5)
            scores = jnp.where(same, scores * decay, scores).at[best].set(-1.0)
            return scores, kept, order

        start = (scores, jnp.zeros(rounds), jnp.zeros(rounds, jnp.int32))
        _, kept, order = lax.fori_loop(0, rounds, body, start)
        return boxes[order], kept, labels[order], kept > 0.05

    return linen_program(size, Detector(), normal(b, side, side, 3))


@program("dynamic-edges-among-points-classifier-equinox", GROUP)
def _edges(size: Size) -> Built:
    """This gives the classes of clouds of points by edges between neighbours that are found anew in every layer."""
    import equinox as eqx

    b, points, k, widths, last, classes = pick(
        size,
        (8, 1000, 20, (64, 64, 128), 512, 40),
        (2, 500, 10, (32, 32, 64), 128, 40),
        (2, 12, 3, (4, 6), 8, 3),
    )
    dtype = half(size)

    class EdgeConvolution(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.LayerNorm

        def __init__(self, i, o, key):
            self.linear, self.norm = eqx.nn.Linear(2 * i, o, key=key), eqx.nn.LayerNorm(o)

        def __call__(self, x):
            y = x.astype(jnp.float32)
            squares = jnp.sum(y * y, axis=-1)
            apart = squares[:, None] + squares[None, :] - 2.0 * y @ y.T
            _, near = lax.top_k(-apart, k)
            neighbours = x[near]
            own = jnp.broadcast_to(x[:, None], neighbours.shape)
            edges = jnp.concatenate([neighbours - own, own], axis=-1)

            def one(edge):
                return jax.nn.leaky_relu(self.norm(self.linear(edge)), 0.2)

            return jnp.max(jax.vmap(jax.vmap(one))(edges), axis=1)

    class Classifier(eqx.Module):
        layers: list
        gather: eqx.nn.Linear
        head: eqx.nn.MLP

        def __init__(self, key):
            keys = jax.random.split(key, len(widths) + 2)
            inputs = (3, *widths[:-1])
            self.layers = [EdgeConvolution(i, o, kk) for i, o, kk in zip(inputs, widths, keys, strict=False)]
            self.gather = eqx.nn.Linear(sum(widths), last, key=keys[-2])
            self.head = eqx.nn.MLP(2 * last, classes, last // 2, 2, key=keys[-1])

        def __call__(self, cloud):
            cloud = cloud - jnp.mean(cloud, axis=0)
            x = (cloud / jnp.max(jnp.linalg.norm(cloud, axis=-1))).astype(dtype)
            every = []
            for layer in self.layers:
                x = layer(x)
                every.append(x)
            x = jax.nn.leaky_relu(jax.vmap(self.gather)(jnp.concatenate(every, axis=-1)), 0.2)
            pooled = jnp.concatenate([jnp.max(x, axis=0), jnp.mean(x, axis=0)])
            return jax.nn.log_softmax(self.head(pooled).astype(jnp.float32))

    model = eqx.filter_eval_shape(Classifier, jax.random.key(0))
    arrays, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def classify(arrays, clouds):
        return jax.vmap(eqx.combine(arrays, static))(clouds)

    return Built(classify, (module_weights(arrays, dtype), normal(b, points, 3)))


@program("tabnet-sparsemax-feature-steps-nnx", GROUP)
def _tabnet(size: Size) -> Built:
    """This gives the predictions of a table's rows by steps that each look at a few columns, as TabNet does."""
    from flax import nnx

    b, columns, n, steps, outputs = pick(size, (8192, 300, 64, 5, 7), (600, 120, 24, 4, 7), (4, 6, 4, 2, 3))
    dtype, relaxation = half(size), 1.3
    kinds = {"dtype": dtype, "param_dtype": dtype}

    def sparsemax(z):
        z = z.astype(jnp.float32)
        falling = -jnp.sort(-z, axis=-1)
        sums = jnp.cumsum(falling, axis=-1)
        inside = 1.0 + jnp.arange(1, z.shape[-1] + 1) * falling > sums
        count = jnp.sum(inside, axis=-1, keepdims=True)
        threshold = (jnp.take_along_axis(sums, count - 1, axis=-1) - 1.0) / count
        return jnp.maximum(z - threshold, 0.0)

    class Gated(nnx.Module):
        def __init__(self, i, rngs):
            self.linear = nnx.Linear(i, 4 * n, use_bias=False, rngs=rngs, **kinds)
            self.norm = nnx.BatchNorm(4 * n, use_running_average=True, rngs=rngs, **kinds)

        def __call__(self, x):
            return nnx.glu(self.norm(self.linear(x)))

    class Transformer(nnx.Module):
        def __init__(self, shared, rngs):
            self.first, self.second = shared
            self.third, self.fourth = Gated(2 * n, rngs), Gated(2 * n, rngs)

        def __call__(self, x):
            x = self.first(x)
            for layer in (self.second, self.third, self.fourth):
                x = (x + layer(x)) * 0.5**0.5
            return jnp.split(x, 2, axis=-1)

    class TabNet(nnx.Module):
        def __init__(self, rngs):
            shared = (Gated(columns, rngs), Gated(2 * n, rngs))
            self.norm = nnx.BatchNorm(columns, use_running_average=True, rngs=rngs, **kinds)
            self.transformers = nnx.List([Transformer(shared, rngs) for _ in range(steps + 1)])
            self.looks = nnx.List([nnx.Linear(n, columns, use_bias=False, rngs=rngs, **kinds) for _ in range(steps)])
            self.norms = nnx.List(
                [nnx.BatchNorm(columns, use_running_average=True, rngs=rngs, **kinds) for _ in range(steps)]
            )
            self.head = nnx.Linear(n, outputs, rngs=rngs, **kinds)

        def __call__(self, rows):
            rows = self.norm(jnp.where(jnp.isnan(rows), 0.0, rows).astype(dtype))
            _, asked = self.transformers[0](rows)
            prior, total, importance, entropy = jnp.ones(rows.shape), 0.0, 0.0, 0.0
            for look, norm, transformer in zip(self.looks, self.norms, self.transformers[1:], strict=True):
                mask = sparsemax(norm(look(asked)) * prior)
                prior = prior * (relaxation - mask)
                entropy = entropy - jnp.mean(jnp.sum(mask * jnp.log(mask + 1e-15), axis=-1)) / steps
                decided, asked = transformer((rows * mask).astype(dtype))
                decided = nnx.relu(decided)
                total = total + decided
                importance = importance + mask * jnp.sum(decided, axis=-1, keepdims=True).astype(jnp.float32)
            importance = importance / (jnp.sum(importance, axis=-1, keepdims=True) + 1e-9)
            return nnx.softmax(self.head(total).astype(jnp.float32)), jnp.mean(importance, axis=0), entropy

    graph, state = nnx.split(nnx.eval_shape(lambda: TabNet(nnx.Rngs(0))))

    def drawn(path, s):
        if len(s.shape) == 2:
            return weight(*s.shape, dtype=dtype)
        near_one = any(name in jax.tree_util.keystr(path) for name in ("scale", "var"))
        return normal(*s.shape, dtype=dtype, scale=0.02, offset=1.0 if near_one else 0.0)

    weights = jax.tree_util.tree_map_with_path(drawn, state)

    def predict(state, rows):
        return nnx.merge(graph, state)(rows)

    return Built(predict, (weights, normal(b, columns)))
