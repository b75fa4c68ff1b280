"""Text found by learned thresholds and organs found window by window, the thirty-ninth set: its author saw no plan."""

from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_sixth_parts import drawn, state_of

GROUP = "thirty-ninth"


@program("dbnet-differentiable-binarisation-text-detector-hard-negatives-step-linen", GROUP)
def _text_detector(size: Size) -> Built:
    """This program does one step of training a detector of text lines that learns its thresholds pixel by pixel.

    It is DBNet (Liao, 2020; MhLiao/DB), with linen and optax: maps of shrunk boxes and of distances to their borders are made from
    boxes, a soft step joins both maps, and only the hardest of the empty pixels count.
    """
    import flax.linen as nn
    import optax

    b, side, lines, widths, inner = pick(
        size, (8, 320, 24, (64, 128, 256, 512), 256), (1, 96, 6, (16, 24, 48, 96), 48), (1, 32, 2, (4, 4, 6, 8), 8)
    )
    dtype = half(size)

    class Unit(nn.Module):
        """This is a convolution, a norm of batches and a rectifier."""

        channels: int
        kernel: int = 3
        stride: int = 1
        bend: bool = True

        @nn.compact
        def __call__(self, x):
            k = (self.kernel, self.kernel)
            x = nn.Conv(self.channels, k, (self.stride,) * 2, use_bias=False, dtype=dtype)(x)
            x = nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=dtype)(x)
            return nn.relu(x) if self.bend else x

    class Block(nn.Module):
        """This is a residual block of two filters."""

        channels: int
        stride: int

        @nn.compact
        def __call__(self, x):
            y = Unit(self.channels, 3, self.stride)(x)
            y = Unit(self.channels, bend=False)(y)
            if self.stride > 1 or x.shape[-1] != self.channels:
                x = Unit(self.channels, 1, self.stride, bend=False)(x)
            return nn.relu(x + y)

    class Head(nn.Module):
        """This opens features to a map of the size of the picture."""

        @nn.compact
        def __call__(self, x):
            x = Unit(inner // 4)(x)
            x = nn.ConvTranspose(inner // 4, (2, 2), (2, 2), dtype=dtype)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=dtype)(x))
            x = nn.ConvTranspose(1, (2, 2), (2, 2), dtype=dtype)(x)
            return x[..., 0].astype(jnp.float32)

    def larger(x, times):
        """This repeats pixels."""
        return jnp.repeat(jnp.repeat(x, times, axis=1), times, axis=2)

    class Detector(nn.Module):
        """This is the whole network: it gives scores of shrunk boxes and of thresholds."""

        @nn.compact
        def __call__(self, x):
            x = nn.max_pool(Unit(widths[0], 7, 2)(x), (3, 3), (2, 2), padding="SAME")
            levels = []
            for stage, width in enumerate(widths):
                x = Block(width, 2 if stage else 1)(x)
                levels.append(x)
            down = [nn.Conv(inner, (1, 1), use_bias=False, dtype=dtype)(x) for x in levels]
            for k in reversed(range(len(down) - 1)):
                down[k] = down[k] + larger(down[k + 1], 2)
            smooth = [nn.Conv(inner // 4, (3, 3), use_bias=False, dtype=dtype)(x) for x in down]
            x = jnp.concatenate([larger(y, 2**k) for k, y in enumerate(smooth)], axis=-1)
            return Head(name="shrunk")(x), Head(name="threshold")(x)

    model = Detector()
    photo = jax.ShapeDtypeStruct((b, side, side, 3), dtype)
    structs = jax.eval_shape(model.init, jax.random.key(0), photo)
    schedule = optax.polynomial_schedule(0.007, 0.0, 0.9, 2000)
    optimiser = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(schedule, momentum=0.9))

    def maps(corner, extent):
        """This makes maps of shrunk boxes, of thresholds and of where thresholds count, from boxes [lines, 2]."""
        middle, span = corner.astype(jnp.float32), 4.0 + extent.astype(jnp.float32)
        area, around = span[:, 0] * span[:, 1], 2 * jnp.sum(span, axis=1)
        offset = (area * (1 - 0.4**2) / around)[:, None, None]
        grid = jnp.arange(side)
        rows = jnp.abs(grid - middle[:, :1]) - 0.5 * span[:, :1]
        columns = jnp.abs(grid - middle[:, 1:]) - 0.5 * span[:, 1:]
        rows, columns = rows[:, :, None], columns[:, None]
        outside = jnp.sqrt(jnp.maximum(rows, 0.0) ** 2 + jnp.maximum(columns, 0.0) ** 2 + 1e-12)
        away = jnp.where(jnp.maximum(rows, columns) > 0, outside, jnp.maximum(rows, columns))
        shrunk = jnp.any(away < -offset, axis=0)
        border = jnp.max(jnp.clip(1 - jnp.abs(away) / offset, 0.0, 1.0), axis=0)
        return shrunk.astype(jnp.float32), 0.3 + 0.4 * border, jnp.any(away < offset, axis=0).astype(jnp.float32)

    def run(p, statistics, state, photo, corner, extent):
        """This gives parts of the loss, new weights, new statistics, the state of the optimiser and the share of text."""
        x = ((photo.astype(jnp.float32) / 255.0 - 0.45) / 0.225).astype(dtype)
        text, border, band = jax.vmap(maps)(corner, extent)

        def loss(p):
            """This is what shrunk boxes, thresholds and joined maps cost."""
            variables = {"params": p, "batch_stats": statistics}
            (scores, limits), fresh = model.apply(variables, x, mutable=["batch_stats"])
            each = optax.sigmoid_binary_cross_entropy(scores, text)
            many = jnp.sum(text)
            empty = jnp.minimum(jnp.sum(1 - text), 3 * jnp.maximum(many, 1.0))
            hard = -jnp.sort(-(each * (1 - text)).reshape(-1))
            hard = jnp.sum(jnp.where(jnp.arange(hard.size) < empty, hard, 0.0))
            cross = (jnp.sum(each * text) + hard) / (many + empty + 1e-6)
            chance, limit = jax.nn.sigmoid(scores), jax.nn.sigmoid(limits)
            far = jnp.sum(jnp.abs(limit - border) * band) / (jnp.sum(band) + 1e-6)
            soft = jax.nn.sigmoid(50.0 * (chance - limit))
            dice = 1 - 2 * jnp.sum(soft * text) / (jnp.sum(soft) + many + 1e-6)
            parts = jnp.stack([cross, far, dice])
            return jnp.sum(parts * jnp.array([5.0, 10.0, 1.0])), (parts, fresh["batch_stats"], jnp.mean(soft > 0.5))

        slopes, (parts, fresh, share) = jax.grad(loss, has_aux=True)(p)
        change, state = optimiser.update(slopes, state, p)
        return parts, optax.apply_updates(p, change), fresh, state, share

    p = drawn(structs["params"])
    inputs = integers(b, lines, 2, below=side), integers(b, lines, 2, below=side // 4)
    photos = integers(b, side, side, 3, below=256)
    return Built(run, (p, drawn(structs["batch_stats"]), state_of(optimiser, p), photos, *inputs))


@program("nnu-net-volume-windows-blended-by-bells-with-mirrored-views-nnx", GROUP)
def _volumes(size: Size) -> Built:
    """This program labels organs in a scan of a body, window by window, and blends the windows by bells around their middles.

    It is the inference of nnU-Net (Isensee, 2021; MIC-DKFZ/nnUNet), with nnx: values are clipped at quantiles, a U-Net of solid
    filters with norms of instances reads overlapping windows and their mirror images, and overlaps with true labels are told.
    """
    from flax import nnx

    volume, patch, widths, classes = pick(
        size,
        ((48, 112, 112), (48, 80, 80), (32, 64, 128, 256), 14),
        ((8, 24, 32), (8, 16, 24), (8, 16, 24, 32), 6),
        ((4, 12, 10), (4, 8, 8), (2, 3, 4, 4), 3),
    )
    dtype, strides = half(size), ((1, 2, 2), (2, 2, 2), (2, 2, 2))
    how = {"dtype": dtype, "param_dtype": dtype}

    class Pair(nnx.Module):
        """This is two convolutions, each with a norm of instances."""

        def __init__(self, i, o, rngs, stride=(1, 1, 1)):
            self.one = nnx.Conv(i, o, (3, 3, 3), strides=stride, rngs=rngs, **how)
            self.two = nnx.Conv(o, o, (3, 3, 3), rngs=rngs, **how)
            self.norms = nnx.List([nnx.GroupNorm(o, num_groups=o, epsilon=1e-5, rngs=rngs, **how) for _ in range(2)])

        def __call__(self, x):
            for layer, norm in zip((self.one, self.two), self.norms, strict=True):
                x = nnx.leaky_relu(norm(layer(x)), 0.01)
            return x

    class Net(nnx.Module):
        """This is the U-Net of solid filters."""

        def __init__(self, rngs):
            self.first = Pair(1, widths[0], rngs)
            steps = list(pairwise(widths))
            self.down = nnx.List([Pair(i, o, rngs, s) for (i, o), s in zip(steps, strides, strict=True)])
            opened = [nnx.ConvTranspose(o, i, s, s, rngs=rngs, **how) for (i, o), s in zip(steps, strides, strict=True)]
            self.open = nnx.List(opened)
            self.up = nnx.List([Pair(2 * i, i, rngs) for i, _ in steps])
            self.head = nnx.Conv(widths[0], classes, (1, 1, 1), rngs=rngs, **how)

        def __call__(self, x):
            seen = [self.first(x)]
            for block in self.down:
                seen.append(block(seen[-1]))
            x = seen.pop()
            for opened, block in reversed(list(zip(self.open, self.up, strict=True))):
                x = block(jnp.concatenate([opened(x), seen.pop()], axis=-1))
            return self.head(x)

    graph, structs = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))

    def places(whole, part):
        """This gives where windows start on one axis, half a window apart at most."""
        many = max(-(-2 * (whole - part) // part), 0) + 1
        return [round(k * (whole - part) / max(many - 1, 1)) for k in range(many)]

    starts = jnp.array(
        [
            (i, j, k)
            for i in places(volume[0], patch[0])
            for j in places(volume[1], patch[1])
            for k in places(volume[2], patch[2])
        ]
    )
    bell = 1.0
    for axis, part in enumerate(patch):
        line = jnp.exp(-0.5 * ((jnp.arange(part) - (part - 1) / 2) / (part / 8)) ** 2)
        bell = bell * line.reshape([-1 if a == axis else 1 for a in range(3)])
    bell = jnp.maximum(bell, 1e-4)

    def run(p, scan, true):
        """This gives labels, overlaps with true labels by class, how sure the network is, and volumes of classes."""
        net = nnx.merge(graph, p)
        low, high = jnp.quantile(scan, jnp.array([0.005, 0.995]))
        clipped = jnp.clip(scan, low, high)
        x = ((clipped - jnp.mean(clipped)) / (jnp.std(clipped) + 1e-6)).astype(dtype)

        def window(carry, start):
            """This adds what the network says about one window."""
            total, weight = carry
            cut = lax.dynamic_slice(x, start, patch)
            both = jnp.stack([cut, jnp.flip(cut, axis=2)])[..., None]
            one, two = net(both).astype(jnp.float32)
            scores = 0.5 * (one + jnp.flip(two, axis=2)) * bell[..., None]
            at = (*start, 0)
            before = lax.dynamic_slice(total, at, (*patch, classes))
            total = lax.dynamic_update_slice(total, before + scores, at)
            light = lax.dynamic_slice(weight, start, patch)
            return (total, lax.dynamic_update_slice(weight, light + bell, start)), jnp.max(scores)

        empty = jnp.zeros((*volume, classes)), jnp.zeros(volume)
        (total, weight), loudest = lax.scan(window, empty, starts)
        probs = jax.nn.softmax(total / weight[..., None], axis=-1)
        told = jnp.argmax(probs, axis=-1)
        mine, other = (jax.nn.one_hot(z.reshape(-1), classes) for z in (told, true))
        both, sizes = jnp.sum(mine * other, axis=0), jnp.sum(mine, axis=0)
        dice = 2 * both / jnp.maximum(sizes + jnp.sum(other, axis=0), 1.0)
        unsure = -jnp.sum(probs * jnp.log(probs + 1e-9), axis=-1)
        return told.astype(jnp.int8), dice, jnp.mean(unsure, axis=(1, 2)), sizes, loudest

    return Built(run, (drawn(structs, dtype), normal(*volume, scale=300.0), integers(*volume, below=classes)))
