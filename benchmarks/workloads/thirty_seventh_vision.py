"""A network of many branches and one of two speeds, the thirty-seventh set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_sixth_parts import drawn

GROUP = "thirty-seventh"


@program("inception-v3-factorised-branches-auxiliary-classifier-grad-linen", GROUP)
def _inception(size: Size) -> Built:
    """This program gives slopes of a photograph classifier whose modules join branches of different filters.

    It is a short Inception v3 (Szegedy, 2016), with linen: one module of each kind, square filters split into a row and a column,
    smoothed labels, an auxiliary classifier that weighs 0.4, and slopes clipped by their joint length.
    """
    import flax.linen as nn
    import optax

    b, side, classes = pick(size, (32, 224, 1000), (2, 139, 200), (2, 75, 5))
    dtype = half(size)

    def wide(c):
        """This is the number of filters at the size."""
        return pick(size, c, c // 2, max(c // 32, 1))

    class Filter(nn.Module):
        """This is a convolution, a batch norm and a bend."""

        channels: int
        kernel: tuple
        stride: int = 1
        padding: str = "SAME"

        @nn.compact
        def __call__(self, x):
            how = {"strides": (self.stride,) * 2, "padding": self.padding, "use_bias": False, "dtype": dtype}
            x = nn.Conv(wide(self.channels), self.kernel, param_dtype=dtype, **how)(x)
            x = nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-3, use_scale=False, dtype=dtype)(x)
            return nn.relu(x)

    def chain(x, *steps):
        """This applies filters one after another; each step is channels and a kernel."""
        for channels, kernel in steps:
            x = Filter(channels, kernel)(x)
        return x

    def pooled(x):
        """This is a mean over near places."""
        return nn.avg_pool(x, (3, 3), (1, 1), "SAME", count_include_pad=False)

    class Inception(nn.Module):
        """This is the whole network."""

        @nn.compact
        def __call__(self, x):
            x = Filter(32, (3, 3), 2, "VALID")(x)
            x = Filter(32, (3, 3), 1, "VALID")(x)
            x = nn.max_pool(Filter(64, (3, 3))(x), (3, 3), (2, 2))
            x = Filter(192, (3, 3), 1, "VALID")(Filter(80, (1, 1), 1, "VALID")(x))
            x = nn.max_pool(x, (3, 3), (2, 2))
            branches = [chain(x, (64, (1, 1))), chain(x, (48, (1, 1)), (64, (5, 5)))]
            branches += [chain(x, (64, (1, 1)), (96, (3, 3)), (96, (3, 3))), chain(pooled(x), (32, (1, 1)))]
            x = jnp.concatenate(branches, axis=-1)
            branches = [Filter(384, (3, 3), 2, "VALID")(x), nn.max_pool(x, (3, 3), (2, 2))]
            branches.append(Filter(96, (3, 3), 2, "VALID")(chain(x, (64, (1, 1)), (96, (3, 3)))))
            x = jnp.concatenate(branches, axis=-1)
            row, column = (1, 7), (7, 1)
            branches = [chain(x, (192, (1, 1))), chain(x, (128, (1, 1)), (128, row), (192, column))]
            branches.append(chain(x, (128, (1, 1)), (128, column), (128, row), (128, column), (192, row)))
            branches.append(chain(pooled(x), (192, (1, 1))))
            x = jnp.concatenate(branches, axis=-1)
            k = min(5, x.shape[1])
            y = Filter(128, (1, 1))(nn.avg_pool(x, (k, k), (3, 3)))
            y = Filter(768, (min(5, y.shape[1]),) * 2, 1, "VALID")(y)
            aside = nn.Dense(classes, param_dtype=dtype)(jnp.mean(y, axis=(1, 2)))
            branches = [Filter(320, (3, 3), 2, "VALID")(chain(x, (192, (1, 1)))), nn.max_pool(x, (3, 3), (2, 2))]
            branches.append(Filter(192, (3, 3), 2, "VALID")(chain(x, (192, (1, 1)), (192, row), (192, column))))
            x = jnp.concatenate(branches, axis=-1)
            y, z = chain(x, (384, (1, 1))), chain(x, (448, (1, 1)), (384, (3, 3)))
            branches = [chain(x, (320, (1, 1))), chain(pooled(x), (192, (1, 1)))]
            branches += [Filter(384, kernel)(w) for w in (y, z) for kernel in ((1, 3), (3, 1))]
            x = jnp.mean(jnp.concatenate(branches, axis=-1), axis=(1, 2))
            return nn.Dense(classes, param_dtype=dtype)(x), aside

    model = Inception()
    photo = normal(b, side, side, 3, dtype=dtype)
    structs = jax.eval_shape(model.init, jax.random.key(0), photo.struct)

    def run(p, averages, photo, label):
        """This gives the loss, how many answers are right, clipped slopes, their length, and new averages of norms."""
        smooth = optax.smooth_labels(jax.nn.one_hot(label, classes), 0.1)

        def loss(p):
            """This is the loss of both classifiers and a penalty of large filters."""
            both = {"params": p, "batch_stats": averages}
            (scores, aside), changed = model.apply(both, photo, mutable=["batch_stats"])
            miss, other = (
                jnp.mean(optax.softmax_cross_entropy(z.astype(jnp.float32), smooth)) for z in (scores, aside)
            )
            large = sum(jnp.sum(jnp.square(w.astype(jnp.float32))) for w in jax.tree.leaves(p) if w.ndim > 1)
            right = jnp.sum(jnp.argmax(scores, axis=-1) == label)
            return miss + 0.4 * other + 2e-5 * large, (right, changed["batch_stats"])

        (value, (right, changed)), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        length = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), slopes))
        scale = jnp.minimum(1.0, 2.0 / (length + 1e-6))
        return value, right, jax.tree.map(lambda g: (g * scale).astype(g.dtype), slopes), length, changed

    p = drawn(structs["params"], dtype), drawn(structs["batch_stats"])
    return Built(run, (*p, photo, integers(b, below=classes)))


@program("films-at-two-speeds-joined-by-strided-convolutions-in-time-haiku", GROUP)
def _films(size: Size) -> Built:
    """This program tells what happens in films, by a wide network on few frames and a thin one on many.

    It is SlowFast (Feichtenhofer, 2019; facebookresearch/SlowFast), with haiku: the thin path gives its features to the wide one
    after each stage by convolutions that stride in time, early wide stages see single frames, and chances of clips are averaged.
    """
    import haiku as hk

    films, clips, frames, side, width, classes = pick(
        size, (4, 2, 32, 160, 64, 400), (1, 2, 16, 64, 32, 400), (1, 2, 8, 32, 8, 5)
    )
    dtype, apart, thinner = half(size), 8, 8
    b = films * clips

    def filtered(x, channels, kernel, stride, name, bends=True):
        """This is a convolution over time, rows and columns, a batch norm with kept averages and perhaps a bend."""
        x = hk.Conv3D(channels, kernel, stride, with_bias=False, name=name)(x)
        x = hk.BatchNorm(True, True, 0.9, name=f"{name}_norm")(x, is_training=hk.running_init())
        return jax.nn.relu(x) if bends else x

    def block(x, inner, outer, times, stride, name):
        """This is a bottleneck whose first filter looks along time."""
        y = filtered(x, inner, (times, 1, 1), (1, 1, 1), f"{name}_a")
        y = filtered(y, inner, (1, 3, 3), (1, stride, stride), f"{name}_b")
        y = filtered(y, outer, (1, 1, 1), (1, 1, 1), f"{name}_c", False)
        if x.shape != y.shape:
            x = filtered(x, outer, (1, 1, 1), (1, stride, stride), f"{name}_side", False)
        return jax.nn.relu(x + y)

    def joined(slow, fast, name):
        """This gives features of the thin path to the wide one."""
        return jnp.concatenate([slow, filtered(fast, 2 * fast.shape[-1], (5, 1, 1), (apart, 1, 1), f"{name}_join")], -1)

    def net(film):
        """This is the whole network."""
        thin = width // thinner
        slow = filtered(film[:, ::apart], width, (1, 7, 7), (1, 2, 2), "slow")
        fast = filtered(film, thin, (5, 7, 7), (1, 2, 2), "fast")
        slow, fast = (hk.max_pool(x, (1, 3, 3, 1), (1, 2, 2, 1), "SAME") for x in (slow, fast))
        for k, (times, stride) in enumerate(((1, 1), (1, 2), (3, 2))):
            slow = joined(slow, fast, f"stage_{k}")
            for j in range(2):
                step = stride if j == 0 else 1
                slow = block(slow, width * 2**k, 4 * width * 2**k, times, step, f"slow_{k}{j}")
                fast = block(fast, thin * 2**k, 4 * thin * 2**k, 3, step, f"fast_{k}{j}")
        both = jnp.concatenate([jnp.mean(x, axis=(1, 2, 3)) for x in (slow, fast)], axis=-1)
        return hk.Linear(classes, name="head")(both), both

    model = hk.transform_with_state(net)
    film = jax.ShapeDtypeStruct((b, frames, side, side, 3), dtype)
    p, state = jax.eval_shape(model.init, jax.random.key(0), film)

    def run(p, state, film, label):
        """This gives chances of actions by film, how clips disagree, right answers among five, and features."""
        x = ((film.astype(jnp.float32) / 255.0 - 0.45) / 0.225).astype(dtype)
        (scores, features), _ = model.apply(p, state, None, x.reshape(b, frames, side, side, 3))
        logs = jax.nn.log_softmax(scores.astype(jnp.float32), axis=-1).reshape(films, clips, classes)
        mean = jnp.mean(jnp.exp(logs), axis=1)
        gap = jnp.mean(jnp.sum(jnp.exp(logs) * (logs - jnp.log(mean + 1e-12)[:, None]), axis=-1), axis=1)
        hit = jnp.any(jax.lax.top_k(mean, 5)[1] == label[:, None], axis=1)
        return mean, gap, hit, features.reshape(films, clips, -1)

    def kept(path, s):
        """This describes averages of norms: means near nought, spreads near one, and a count."""
        if jnp.issubdtype(s.dtype, jnp.integer):
            return Random(tuple(s.shape), s.dtype, below=1000)
        mean = "mean_ema" in str(path[0].key)
        return normal(*s.shape, dtype=s.dtype, scale=0.1, offset=0.0 if mean else 1.0)

    def weights(path, s):
        """This describes filters that keep the variance, gains near one and shifts near nought."""
        if len(s.shape) > 1 and path[-1].key == "w":
            return normal(*s.shape, dtype=dtype, scale=float(np.sqrt(1.5 / np.prod(s.shape[:-1]))))
        return normal(*s.shape, dtype=dtype, scale=0.1, offset=1.0 if path[-1].key == "scale" else 0.0)

    p = jax.tree_util.tree_map_with_path(weights, p)
    state = jax.tree_util.tree_map_with_path(kept, state)
    film = integers(films, clips, frames, side, side, 3, below=256)
    return Built(run, (p, state, film, integers(films, below=classes)))
