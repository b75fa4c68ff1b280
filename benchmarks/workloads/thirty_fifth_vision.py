"""Unfolded patches and ten cuts of photographs, the thirty-fifth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program

GROUP = "thirty-fifth"


@program("patches-unfolded-so-that-like-places-attend-between-narrow-filters-equinox", GROUP)
def _mobile(size: Size) -> Built:
    """This program classifies photographs with narrow filters and small transformers over like places of all patches.

    It is MobileViT (Mehta, 2022; apple/ml-cvnets), with equinox: inverted residual units widen, filter each channel and narrow, and
    in three stages maps are unfolded to patches, attended to with `eqx.nn.MultiheadAttention`, folded and joined to what was there.
    """
    import equinox as eqx

    b, side, c, wide, depths, classes = pick(
        size,
        (32, 256, (16, 32, 64, 96, 128, 160), (144, 192, 240), (2, 4, 3), 1000),
        (1, 128, (8, 16, 24, 32, 48, 64), (48, 64, 80), (1, 2, 1), 100),
        (1, 64, (4, 4, 4, 4, 4, 4), (4, 8, 8), (1, 1, 1), 5),
    )
    dtype = half(size)

    class Step(eqx.Module):
        """This is a filter and a norm, and a bend where asked."""

        conv: eqx.nn.Conv2d
        norm: eqx.nn.BatchNorm
        bend: bool = eqx.field(static=True)

        def __init__(self, i, o, k, key, stride=1, groups=1, bend=True):
            self.conv = eqx.nn.Conv2d(i, o, k, stride, k // 2, groups=groups, use_bias=False, key=key)
            self.norm = eqx.nn.BatchNorm(o, "batch", mode="ema", inference=True)
            self.bend = bend

        def __call__(self, x, state):
            x, state = self.norm(self.conv(x), state)
            return jax.nn.silu(x) if self.bend else x, state

    class Inverted(eqx.Module):
        """This is an inverted residual unit."""

        steps: list
        same: bool = eqx.field(static=True)

        def __init__(self, i, o, key, stride=1):
            one, two, three = jax.random.split(key, 3)
            self.steps = [Step(i, 4 * i, 1, one), Step(4 * i, 4 * i, 3, two, stride, 4 * i)]
            self.steps.append(Step(4 * i, o, 1, three, bend=False))
            self.same = stride == 1 and i == o

        def __call__(self, x, state):
            y = x
            for step in self.steps:
                y, state = step(y, state)
            return x + y if self.same else y, state

    class Layer(eqx.Module):
        """This is a layer of a transformer."""

        norm1: eqx.nn.LayerNorm
        norm2: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        one: eqx.nn.Linear
        two: eqx.nn.Linear

        def __init__(self, n, key):
            keys = jax.random.split(key, 3)
            self.norm1, self.norm2 = eqx.nn.LayerNorm(n), eqx.nn.LayerNorm(n)
            self.attention = eqx.nn.MultiheadAttention(
                4, n, use_query_bias=True, use_key_bias=True, use_value_bias=True, use_output_bias=True, key=keys[0]
            )
            self.one, self.two = eqx.nn.Linear(n, 2 * n, key=keys[1]), eqx.nn.Linear(2 * n, n, key=keys[2])

        def __call__(self, x):
            y = jax.vmap(self.norm1)(x)
            x = x + self.attention(y, y, y)
            return x + jax.vmap(lambda y: self.two(jax.nn.silu(self.one(self.norm2(y)))))(x)

    class Unfolded(eqx.Module):
        """This unfolds a map to patches of four, attends among like places of patches, and folds it."""

        near: Step
        into: eqx.nn.Conv2d
        layers: list
        norm: eqx.nn.LayerNorm
        out: Step
        join: Step

        def __init__(self, c, n, depth, key):
            keys = jax.random.split(key, depth + 4)
            self.near, self.into = Step(c, c, 3, keys[0]), eqx.nn.Conv2d(c, n, 1, use_bias=False, key=keys[1])
            self.layers = [Layer(n, k) for k in keys[4:]]
            self.norm, self.out, self.join = eqx.nn.LayerNorm(n), Step(n, c, 1, keys[2]), Step(2 * c, c, 3, keys[3])

        def __call__(self, x, state):
            y, state = self.near(x, state)
            y = self.into(y)
            n, h, w = y.shape
            y = y.reshape(n, h // 2, 2, w // 2, 2).transpose(2, 4, 1, 3, 0).reshape(4, h * w // 4, n)
            for layer in self.layers:
                y = jax.vmap(layer)(y)
            y = jax.vmap(jax.vmap(self.norm))(y)
            y = y.reshape(2, 2, h // 2, w // 2, n).transpose(4, 2, 0, 3, 1).reshape(n, h, w)
            y, state = self.out(y, state)
            return self.join(jnp.concatenate([x, y]), state)

    class Net(eqx.Module):
        """This is the whole network."""

        steps: list
        last: eqx.nn.Linear

        def __init__(self, key):
            keys = iter(jax.random.split(key, 16))
            self.steps = [Step(3, c[0], 3, next(keys), 2), Inverted(c[0], c[1], next(keys))]
            self.steps += [Inverted(c[1], c[2], next(keys), 2), *(Inverted(c[2], c[2], next(keys)) for _ in range(2))]
            for k in range(3):
                self.steps.append(Inverted(c[k + 2], c[k + 3], next(keys), 2))
                self.steps.append(Unfolded(c[k + 3], wide[k], depths[k], next(keys)))
            self.steps.append(Step(c[5], 4 * c[5], 1, next(keys)))
            self.last = eqx.nn.Linear(4 * c[5], classes, key=next(keys))

        def __call__(self, x, state):
            for step in self.steps:
                x, state = step(x, state)
            return self.last(jnp.mean(x, axis=(1, 2)))

    shapes = eqx.filter_eval_shape(eqx.nn.make_with_state(Net), jax.random.key(0))

    def is_float(x):
        """This tells what is a weight or a statistic."""
        return isinstance(x, jax.ShapeDtypeStruct) and jnp.issubdtype(x.dtype, jnp.floating)

    arrays, rest = eqx.partition(shapes, is_float)
    rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, rest)

    def run(p, photo):
        """This gives chances of classes."""
        model, state = eqx.combine(p, rest)
        return jax.nn.softmax(jax.vmap(lambda x: model(x, state))(photo).astype(jnp.float32))

    def weights(path, s):
        """This describes filters and matrices [outputs, inputs, ...], gains near one and shifts near zero."""
        if len(s.shape) > 1 and path[-1].name == "weight":
            return normal(*s.shape, dtype=dtype, scale=1.4 * float(np.prod(s.shape[1:])) ** -0.5)
        return normal(*s.shape, dtype=dtype, scale=0.1, offset=0.0 if path[-1].name == "bias" else 1.0)

    def statistics(path, s):
        """This describes means near zero, and squares near one."""
        return normal(*s.shape, dtype=dtype, scale=0.1, offset=float(path[-1].idx))

    model = jax.tree_util.tree_map_with_path(weights, arrays[0])
    state = jax.tree_util.tree_map_with_path(statistics, arrays[1])
    return Built(run, ((model, state), normal(b, 3, side, side, dtype=dtype)))


@program("ten-cuts-of-each-photograph-averaged-by-a-residual-network-haiku", GROUP)
def _cuts(size: Size) -> Built:
    """This program classifies photographs by the mean over four corners, the middle, and mirrored ones.

    It is `hk.nets.ResNet50` of haiku in its second version, with norms of running statistics, as papers report ten crops; on the
    CPU it is `hk.nets.ResNet` with one block per group.
    """
    import haiku as hk

    b, whole, side, blocks, channels, classes = pick(
        size,
        (4, 256, 224, (3, 4, 6, 3), (256, 512, 1024, 2048), 1000),
        (1, 72, 64, (1, 1, 1, 1), (32, 64, 128, 256), 100),
        (1, 36, 32, (1, 1, 1, 1), (4, 8, 8, 8), 5),
    )
    dtype, gap = half(size), whole - side

    def net(x, training=False):
        """This is the network, with its running statistics."""
        kind = {"blocks_per_group": blocks, "channels_per_group": channels, "bottleneck": True, "resnet_v2": True}
        return hk.nets.ResNet(num_classes=classes, **kind)(x, is_training=training)

    model = hk.without_apply_rng(hk.transform_with_state(net))

    def run(p, state, photo, label):
        """This gives mean chances, surprise, and how far cuts of a photograph differ."""
        x = (photo.astype(jnp.float32) / 255 - 0.45) / 0.225
        starts = [(0, 0), (0, gap), (gap, 0), (gap, gap), (gap // 2, gap // 2)]
        cuts = jnp.stack([x[:, i : i + side, j : j + side] for i, j in starts], axis=1)
        cuts = jnp.concatenate([cuts, cuts[..., ::-1, :]], axis=1).reshape(b * 10, side, side, 3)
        scores, _ = model.apply(p, state, cuts.astype(dtype))
        chance = jax.nn.softmax(scores.astype(jnp.float32)).reshape(b, 10, classes)
        mean = jnp.mean(chance, axis=1)
        miss = -jnp.log(jnp.take_along_axis(mean, label[:, None], axis=1)[:, 0])
        apart = jnp.sum(chance * (jnp.log(chance) - jnp.log(mean)[:, None]), axis=-1)
        return mean, miss, apart

    cuts = jax.ShapeDtypeStruct((b * 10, side, side, 3), dtype)
    p, state = jax.eval_shape(lambda key, x: model.init(key, x, training=True), jax.random.key(0), cuts)

    def statistics(path, s):
        """This describes running means near zero and running squares near one, with a count of steps."""
        if jnp.issubdtype(s.dtype, jnp.integer):
            return Random(tuple(s.shape), jnp.dtype(s.dtype), below=1000)
        variance = "var_ema" in str(path[0].key)
        return normal(*s.shape, dtype=dtype, scale=0.05, offset=1.0 if variance else 0.0)

    def weights(path, s):
        """This describes filters that keep the variance, gains near one and shifts near zero."""
        if path[-1].key == "w":
            return normal(*s.shape, dtype=dtype, scale=1.2 * float(np.prod(s.shape[:-1])) ** -0.5)
        return normal(*s.shape, dtype=dtype, scale=0.1, offset=1.0 if path[-1].key == "scale" else 0.0)

    p = jax.tree_util.tree_map_with_path(weights, p)
    state = jax.tree_util.tree_map_with_path(statistics, state)
    return Built(run, (p, state, integers(b, whole, whole, 3, below=256), integers(b, below=classes)))
