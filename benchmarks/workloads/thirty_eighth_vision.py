"""Pictures at any resolution and networks without normalisation, the thirty-eighth set: its author saw no plan."""

from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_sixth_parts import drawn, layers_of_nnx, state_of

GROUP = "thirty-eighth"


@program("liif-local-implicit-image-function-arbitrary-zoom-nnx", GROUP)
def _liif(size: Size) -> Built:
    """This program magnifies a window of each small picture by any ratio, with a network that maps places to colours.

    It is LIIF (Chen, 2021; yinboc/liif) on an EDSR encoder, with nnx: each asked place reads unfolded features of its four nearest
    cells with the offsets and the size of the asked pixel, and the four answers are weighed by the areas opposite to them.
    """
    from flax import nnx

    b, side, out, width, wide, depth = pick(size, (8, 48, 96, 64, 256, 6), (1, 32, 40, 32, 96, 6), (2, 4, 5, 4, 6, 6))
    dtype = half(size)
    dense, _, conv = layers_of_nnx(dtype)

    class Residual(nnx.Module):
        """This is a block of EDSR: two filters without norms."""

        def __init__(self, rngs):
            self.one, self.two = conv(width, width, 3, rngs), conv(width, width, 3, rngs)

        def __call__(self, x):
            return x + self.two(nnx.relu(self.one(x)))

    class Implicit(nnx.Module):
        """This is the encoder and the network of places."""

        def __init__(self, rngs):
            self.stem, self.last = conv(3, width, 3, rngs), conv(width, width, 3, rngs)
            self.blocks = nnx.List([Residual(rngs) for _ in range(depth)])
            steps = [9 * width + 4, wide, wide, wide, wide]
            self.hidden = nnx.List([dense(i, o, rngs) for i, o in pairwise(steps)])
            self.head = dense(wide, 3, rngs)

        def encoded(self, picture):
            x = y = self.stem(picture)
            for block in self.blocks:
                y = block(y)
            x = x + self.last(y)
            padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
            return jnp.concatenate([padded[:, i : i + side, j : j + side] for i in range(3) for j in range(3)], axis=-1)

        def __call__(self, picture, place, cell):
            """This tells colours [b, many, 3] at places [b, many, 2], in units of cells of the small picture."""
            features = self.encoded(picture)
            answers, areas = [], []
            for i in (-0.5, 0.5):
                for j in (-0.5, 0.5):
                    index = jnp.floor(jnp.clip(place + jnp.array([i, j]), 0.0, side - 1e-3)).astype(jnp.int32)
                    apart = place - (index + 0.5)
                    near = jax.vmap(lambda x, at: x[at[:, 0], at[:, 1]])(features, index)
                    size_of = jnp.broadcast_to(2.0 * cell[:, None], apart.shape)
                    x = jnp.concatenate([near, (2 * apart).astype(dtype), size_of.astype(dtype)], axis=-1)
                    for layer in self.hidden:
                        x = nnx.relu(layer(x))
                    answers.append(self.head(x).astype(jnp.float32))
                    areas.append(jnp.abs(apart[..., 0] * apart[..., 1]) + 1e-9)
            total = sum(areas)
            return sum(x * (a / total)[..., None] for x, a in zip(answers, areas[::-1], strict=True))

    graph, structs = nnx.split(nnx.eval_shape(lambda: Implicit(nnx.Rngs(0))))
    line = (jnp.arange(out) + 0.5) / out - 0.5
    grid = jnp.stack(jnp.meshgrid(line, line, indexing="ij"), axis=-1).reshape(out * out, 2)

    def run(p, photo, middle, zoom, true):
        """This gives magnified windows as bytes, how near they are to true ones, and the steepness of edges."""
        picture = (photo.astype(jnp.float32) / 255.0 - 0.5) / 0.5
        part = jax.nn.sigmoid(zoom)
        centre = 0.5 * side + 0.5 * side * (1 - part[:, None]) * jnp.tanh(middle)
        place = centre[:, None] + grid * side * part[:, None, None]
        cell = jnp.broadcast_to((side * part / out)[:, None], (b, 2))
        colour = nnx.merge(graph, p)(picture.astype(dtype), place, cell).reshape(b, out, out, 3)
        shown = jnp.clip(0.5 * colour + 0.5, 0.0, 1.0)
        error = jnp.mean((shown - true.astype(jnp.float32) / 255.0) ** 2, axis=(1, 2, 3))
        down, right = jnp.diff(colour, axis=1)[:, :, :-1], jnp.diff(colour, axis=2)[:, :-1]
        edges = jnp.mean(jnp.sqrt(down**2 + right**2 + 1e-8), axis=(1, 2, 3))
        return jnp.round(255.0 * shown).astype(jnp.uint8), -10.0 * jnp.log10(error), edges

    inputs = integers(b, side, side, 3, below=256), normal(b, 2), normal(b)
    return Built(run, (drawn(structs, dtype), *inputs, integers(b, out, out, 3, below=256)))


@program("nfnet-scaled-weight-standardisation-adaptive-gradient-clipping-step-linen", GROUP)
def _normaliser_free(size: Size) -> Built:
    """This program does one step of training a deep photograph classifier that has no normalisation layers at all.

    It is a short NFNet (Brock, 2021; google-deepmind/deepmind-research), with linen and optax: filters are standardised and scaled,
    branches are divided by the spread that is expected of them, and slopes are clipped unit by unit against the weights.
    """
    import flax.linen as nn
    import optax

    b, side, first, widths, depths, grouped, classes = pick(
        size,
        (32, 160, 64, (128, 256, 512), (1, 2, 2), 64, 1000),
        (2, 64, 16, (32, 64, 128), (1, 2, 2), 16, 200),
        (2, 16, 4, (8, 12, 16), (1, 2, 2), 2, 5),
    )
    dtype, alpha = half(size), 0.2

    def bend(x):
        """This is a GELU that keeps the spread of its input."""
        return nn.gelu(x) * 1.7015043497085571

    class ScaledConv(nn.Module):
        """This is a convolution whose filters are standardised, output by output."""

        channels: int
        kernel: int
        stride: int = 1
        groups: int = 1

        @nn.compact
        def __call__(self, x):
            shape = self.kernel, self.kernel, x.shape[-1] // self.groups, self.channels
            w = self.param("kernel", nn.initializers.lecun_normal(), shape, dtype).astype(jnp.float32)
            gain = self.param("gain", nn.initializers.ones, (self.channels,), dtype)
            bias = self.param("bias", nn.initializers.zeros, (self.channels,), dtype)
            fan = shape[0] * shape[1] * shape[2]
            mean, spread = jnp.mean(w, axis=(0, 1, 2)), jnp.var(w, axis=(0, 1, 2))
            w = (w - mean) * lax.rsqrt(jnp.maximum(spread * fan, 1e-4)) * gain.astype(jnp.float32)
            how = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": self.groups}
            return lax.conv_general_dilated(x, w.astype(dtype), (self.stride,) * 2, "SAME", **how) + bias

    class Block(nn.Module):
        """This is a bottleneck with two grouped filters, a squeeze of places and a learned gain."""

        channels: int
        stride: int
        expected: float

        @nn.compact
        def __call__(self, x):
            y = bend(x) / self.expected
            side_path = x
            if self.stride > 1 or x.shape[-1] != self.channels:
                side_path = nn.avg_pool(y, (2, 2), (2, 2)) if self.stride > 1 else y
                side_path = ScaledConv(self.channels, 1)(side_path)
            inner = self.channels // 2
            groups = max(inner // grouped, 1)
            y = ScaledConv(inner, 1)(y)
            y = ScaledConv(inner, 3, self.stride, groups)(bend(y))
            y = ScaledConv(inner, 3, 1, groups)(bend(y))
            y = ScaledConv(self.channels, 1)(bend(y))
            squeezed = nn.relu(nn.Dense(self.channels // 2, param_dtype=dtype)(jnp.mean(y, axis=(1, 2))))
            opened = nn.sigmoid(nn.Dense(self.channels, param_dtype=dtype)(squeezed))
            skip = self.param("skip", nn.initializers.zeros, (), dtype)
            return side_path + alpha * skip * 2.0 * opened[:, None, None] * y

    class Net(nn.Module):
        """This is the whole network."""

        @nn.compact
        def __call__(self, x):
            x = ScaledConv(first // 2, 3, 2)(x)
            x = ScaledConv(first, 3, 2)(bend(x))
            expected = 1.0
            for stage, (width, many) in enumerate(zip(widths, depths, strict=True)):
                for k in range(many):
                    x = Block(width, 2 if stage and k == 0 else 1, expected**0.5)(x)
                    expected = (1.0 if k == 0 else expected) + alpha**2
            x = bend(ScaledConv(2 * widths[-1], 1)(x))
            return nn.Dense(classes, param_dtype=dtype, name="head")(jnp.mean(x, axis=(1, 2)))

    model = Net()
    photo = jax.ShapeDtypeStruct((b, side, side, 3), dtype)
    structs = jax.eval_shape(model.init, jax.random.key(0), photo)["params"]

    def not_head(p):
        """This tells which weights are clipped: all but those of the last layer."""
        return {k: jax.tree.map(lambda _, k=k: k != "head", v) for k, v in p.items()}

    def matrices(p):
        """This tells which weights decay: filters and matrices."""
        return jax.tree.map(lambda w: w.ndim > 1, p)

    rate = optax.warmup_cosine_decay_schedule(0.0, 0.1 * b / 256, 500, 5000)
    optimiser = optax.chain(
        optax.masked(optax.adaptive_grad_clip(0.01), not_head),
        optax.add_decayed_weights(2e-5, matrices),
        optax.sgd(rate, momentum=0.9, nesterov=True),
    )

    def run(p, slow, state, photo, label):
        """This gives the loss, right answers, new weights, their slow averages, and the state of the optimiser."""
        x = ((photo.astype(jnp.float32) / 255.0 - 0.45) / 0.225).astype(dtype)
        smooth = optax.smooth_labels(jax.nn.one_hot(label, classes), 0.1)

        def loss(p):
            """This is the mean surprise of smoothed labels."""
            scores = model.apply({"params": p}, x).astype(jnp.float32)
            right = jnp.sum(jnp.argmax(scores, axis=-1) == label)
            return jnp.mean(optax.softmax_cross_entropy(scores, smooth)), right

        (value, right), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        change, state = optimiser.update(slopes, state, p)
        p = optax.apply_updates(p, change)
        slow = optax.incremental_update(p, slow, 1e-3)
        return value, right, p, slow, state

    p = drawn(structs, dtype)
    return Built(run, (p, p, state_of(optimiser, p), integers(b, side, side, 3, below=256), integers(b, below=classes)))
