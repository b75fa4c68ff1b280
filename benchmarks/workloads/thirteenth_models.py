"""Whole modules of Flax, Haiku and Equinox as public repositories have them, the thirteenth set: its author had seen no plan."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.eleventh_vision import linen_program, module_weights
from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program

GROUP = "thirteenth"


@program("patch-tst-reversible-norm-forecast-linen", GROUP)
def _patch_tst(size: Size) -> Built:
    """This gives the forecast of many sensors by a model like PatchTST's, which reads each sensor by itself."""
    import flax.linen as nn

    b, past, sensors, n, h, depth, horizon, length, stride = pick(
        size, (32, 336, 21, 128, 16, 3, 96, 16, 8), (4, 336, 7, 64, 8, 2, 96, 16, 8), (2, 12, 3, 8, 2, 2, 5, 4, 2)
    )
    dtype, patches, d = half(size), (past - length) // stride + 2, n // h

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, before):
            qkv = nn.Dense(3 * n, dtype=dtype)(x).reshape(*x.shape[:-1], 3, h, d)
            q, k, v = qkv[..., 0, :, :], qkv[..., 1, :, :], qkv[..., 2, :, :]
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * d**-0.5 + before
            out = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores, axis=-1).astype(dtype), v)
            x = nn.LayerNorm(dtype=dtype)(x + nn.Dense(n, dtype=dtype)(out.reshape(x.shape)))
            y = nn.Dense(n, dtype=dtype)(nn.gelu(nn.Dense(2 * n, dtype=dtype)(x), approximate=False))
            return nn.LayerNorm(dtype=dtype)(x + y), scores

    class Forecaster(nn.Module):
        @nn.compact
        def __call__(self, series):
            mean = jnp.mean(series, axis=1, keepdims=True)
            deviation = jnp.sqrt(jnp.var(series, axis=1, keepdims=True) + 1e-5)
            x = (series - mean) / deviation
            x = jnp.swapaxes(x, 1, 2).reshape(b * sensors, past)
            x = jnp.pad(x, ((0, 0), (0, stride)), mode="edge")
            index = jnp.arange(patches)[:, None] * stride + jnp.arange(length)[None]
            x = nn.Dense(n, dtype=dtype)(x[:, index].astype(dtype))
            x = x + self.param("places", nn.initializers.normal(0.02), (patches, n)).astype(dtype)
            scores = jnp.zeros((1, 1, 1, 1), jnp.float32)
            for _ in range(depth):
                x, scores = Layer()(x, scores)
            y = nn.Dense(horizon, dtype=dtype)(x.reshape(b, sensors, patches * n)).astype(jnp.float32)
            return jnp.swapaxes(y, 1, 2) * deviation + mean

    return linen_program(size, Forecaster(), normal(b, past, sensors, scale=3.0, offset=10.0))


@program("conv-tasnet-two-speakers-permuted-snr-grad-linen", GROUP)
def _tasnet(size: Size) -> Built:
    """This gives the loss and gradient of a separator of two voices like Conv-TasNet."""
    import flax.linen as nn

    b, frames, filters, n, wide, blocks, window = pick(
        size, (3, 1599, 256, 128, 256, 6, 16), (1, 399, 96, 64, 128, 6, 16), (2, 9, 8, 6, 8, 6, 4)
    )
    dtype, hop = half(size), window // 2
    samples = (frames + 1) * hop

    def norm():
        return nn.LayerNorm(epsilon=1e-8, reduction_axes=(1, 2), dtype=dtype)

    class Block(nn.Module):
        dilation: int

        @nn.compact
        def __call__(self, x):
            y = norm()(nn.PReLU()(nn.Dense(wide, dtype=dtype)(x)))
            y = nn.Conv(wide, (3,), kernel_dilation=(self.dilation,), feature_group_count=wide, dtype=dtype)(y)
            y = norm()(nn.PReLU()(y))
            return x + nn.Dense(n, dtype=dtype)(y), nn.Dense(n, dtype=dtype)(y)

    class Separator(nn.Module):
        @nn.compact
        def __call__(self, wave):
            index = jnp.arange(frames)[:, None] * hop + jnp.arange(window)[None]
            coded = nn.relu(nn.Dense(filters, use_bias=False, dtype=dtype)(wave[:, index].astype(dtype)))
            x = nn.Dense(n, dtype=dtype)(norm()(coded))
            skips = 0.0
            for i in range(blocks):
                x, skip = Block(2**i)(x)
                skips = skips + skip
            masks = nn.sigmoid(nn.Dense(2 * filters, dtype=dtype)(nn.PReLU()(skips))).reshape(b, frames, 2, filters)
            pieces = nn.Dense(window, use_bias=False, dtype=dtype)(masks * coded[:, :, None]).astype(jnp.float32)
            pieces = jnp.moveaxis(pieces, 2, 1)
            first = jnp.pad(pieces[..., :hop].reshape(b, 2, -1), ((0, 0), (0, 0), (0, hop)))
            second = jnp.pad(pieces[..., hop:].reshape(b, 2, -1), ((0, 0), (0, 0), (hop, 0)))
            return first + second

    def ratio(estimate, target):
        along = jnp.sum(estimate * target, axis=-1, keepdims=True) / (jnp.sum(target**2, axis=-1, keepdims=True) + 1e-8)
        projected = along * target
        noise = jnp.sum((estimate - projected) ** 2, axis=-1)
        return 10.0 * jnp.log10(jnp.sum(projected**2, axis=-1) / (noise + 1e-8) + 1e-4)

    module = Separator()

    def loss(p, voices):
        out = module.apply(p, jnp.sum(voices, axis=1))
        every = ratio(out[:, :, None], voices[:, None])
        straight, crossed = every[:, 0, 0] + every[:, 1, 1], every[:, 0, 1] + every[:, 1, 0]
        return -jnp.mean(jnp.maximum(straight, crossed)) / 2

    shapes = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct((b, samples), jnp.float32))
    return Built(jax.value_and_grad(loss), (module_weights(shapes, jnp.float32), normal(b, 2, samples)))


@program("edm-heun-steps-small-unet-nnx", GROUP)
def _edm(size: Size) -> Built:
    """This gives images after a few Heun steps of a diffusion model with the preconditioning of Karras and others."""
    from flax import nnx

    b, side, n, h, steps = pick(size, (16, 32, 128, 4, 3), (2, 16, 32, 2, 2), (2, 4, 8, 2, 2))
    dtype, centre = half(size), 0.5
    kinds = {"dtype": dtype, "param_dtype": dtype}

    class Unit(nnx.Module):
        def __init__(self, i, o, rngs):
            self.norm1, self.norm2 = (nnx.GroupNorm(c, num_groups=4, rngs=rngs, **kinds) for c in (i, o))
            self.conv1, self.conv2 = (nnx.Conv(c, o, (3, 3), rngs=rngs, **kinds) for c in (i, o))
            self.level = nnx.Linear(4 * n, o, rngs=rngs, **kinds)
            self.skip = nnx.Conv(i, o, (1, 1), rngs=rngs, **kinds)

        def __call__(self, x, level):
            y = self.conv1(nnx.silu(self.norm1(x))) + self.level(level)[:, None, None]
            return (self.skip(x) + self.conv2(nnx.silu(self.norm2(y)))) * 2**-0.5

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed1, self.embed2 = (nnx.Linear(i, 4 * n, rngs=rngs, **kinds) for i in (n, 4 * n))
            self.first, self.last = (nnx.Conv(i, o, (3, 3), rngs=rngs, **kinds) for i, o in ((3, n), (n, 3)))
            self.down, self.middle = Unit(n, n, rngs), Unit(n, 2 * n, rngs)
            self.norm = nnx.LayerNorm(2 * n, rngs=rngs, **kinds)
            self.attend = nnx.MultiHeadAttention(h, 2 * n, decode=False, rngs=rngs, **kinds)
            self.up = Unit(3 * n, n, rngs)

        def __call__(self, x, noise):
            angles = noise[:, None] * 2 * jnp.pi * jnp.linspace(0.1, 2.0, n // 2)
            waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1).astype(dtype)
            level = nnx.silu(self.embed2(nnx.silu(self.embed1(waves))))
            fine = self.down(self.first(x.astype(dtype)), level)
            y = self.middle(nnx.avg_pool(fine, (2, 2), strides=(2, 2)), level)
            flat = y.reshape(b, -1, 2 * n)
            y = (flat + self.attend(self.norm(flat))).reshape(y.shape)
            y = jnp.repeat(jnp.repeat(y, 2, axis=1), 2, axis=2)
            return self.last(nnx.silu(self.up(jnp.concatenate([y, fine], axis=-1), level))).astype(jnp.float32)

    graph, state = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))

    def sample(state, noise):
        net = nnx.merge(graph, state)

        def denoised(x, sigma):
            total = sigma**2 + centre**2
            out = net(x / jnp.sqrt(total), jnp.full((b,), jnp.log(sigma) / 4))
            return centre**2 / total * x + sigma * centre / jnp.sqrt(total) * out

        ramp = jnp.linspace(0, 1, steps)
        sigmas = (10.0 ** (1 / 7) + ramp * (0.2 ** (1 / 7) - 10.0 ** (1 / 7))) ** 7
        x = sigmas[0] * noise
        for i in range(steps - 1):
            now, after = sigmas[i], sigmas[i + 1]
            slope = (x - denoised(x, now)) / now
            guess = x + (after - now) * slope
            x = 0.5 * (x + guess) + 0.5 * (after - now) * (guess - denoised(guess, after)) / after
        return denoised(x, sigmas[-1])

    return Built(sample, (module_weights(state, dtype), normal(b, side, side, 3)))


@program("joint-embedding-masked-blocks-predictor-grad-nnx", GROUP)
def _jepa(size: Size) -> Built:
    """This gives the loss and gradient of a narrow predictor of masked patches' features, as I-JEPA trains."""
    from flax import nnx

    b, t, seen, hidden, n, narrow, h = pick(
        size, (16, 196, 85, 40, 768, 384, 12), (2, 196, 60, 30, 192, 96, 6), (2, 12, 5, 3, 8, 8, 2)
    )
    dtype = half(size)
    kinds = {"dtype": dtype, "param_dtype": dtype}

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm1, self.norm2 = (nnx.LayerNorm(narrow, epsilon=1e-6, rngs=rngs, **kinds) for _ in range(2))
            self.attend = nnx.MultiHeadAttention(h, narrow, use_bias=False, decode=False, rngs=rngs, **kinds)
            self.up, self.down = (nnx.Linear(w, 5 * narrow - w, rngs=rngs, **kinds) for w in (narrow, 4 * narrow))

        def __call__(self, x):
            x = x + self.attend(self.norm1(x))
            return x + self.down(nnx.gelu(self.up(self.norm2(x)), approximate=False))

    class Predictor(nnx.Module):
        def __init__(self, rngs):
            self.inwards, self.out = (nnx.Linear(i, o, rngs=rngs, **kinds) for i, o in ((n, narrow), (narrow, n)))
            self.mask = nnx.Param(jnp.zeros((1, 1, narrow), dtype))
            self.places = nnx.Param(jnp.zeros((t, narrow), dtype))
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])
            self.norm = nnx.LayerNorm(narrow, epsilon=1e-6, rngs=rngs, **kinds)

        def __call__(self, features, context, targets):
            x = jnp.take_along_axis(features, context[..., None], axis=1)
            x = self.inwards(x) + self.places[...][context]
            asked = self.mask[...] + self.places[...][targets]
            x = jnp.concatenate([x, asked], axis=1)
            for block in self.blocks:
                x = block(x)
            return self.out(self.norm(x[:, seen:]))

    graph, state = nnx.split(nnx.eval_shape(lambda: Predictor(nnx.Rngs(0))))

    def loss(state, features, slow, order):
        context, targets = (jnp.tile(o, (b, 1)) for o in (order[:seen], order[seen : seen + hidden]))
        out = nnx.merge(graph, state)(features, context, targets).astype(jnp.float32)
        wanted = jax.nn.standardize(slow.astype(jnp.float32), axis=-1, epsilon=1e-5)
        apart = jnp.abs(out - jnp.take_along_axis(wanted, targets[..., None], axis=1))
        return jnp.mean(jnp.where(apart < 1.0, 0.5 * apart**2, apart - 0.5))

    maps = (normal(b, t, n, dtype=dtype), normal(b, t, n, dtype=dtype))
    return Built(jax.value_and_grad(loss), (module_weights(state, dtype), *maps, integers(t, below=t, distinct=True)))


@program("muzero-unrolled-board-dynamics-haiku", GROUP)
def _muzero(size: Size) -> Built:
    """This gives policies, values and rewards along actions that a learned model of a board game like MuZero's imagines."""
    import haiku as hk

    b, side, n, unroll, support = pick(size, (64, 9, 128, 5, 300), (8, 9, 32, 5, 300), (2, 3, 6, 2, 3))
    dtype = half(size)

    def norm(x):
        return hk.LayerNorm(axis=(1, 2, 3), create_scale=True, create_offset=True)(x)

    def block(x):
        y = jax.nn.relu(norm(hk.Conv2D(n, 3, with_bias=False)(x)))
        return jax.nn.relu(x + norm(hk.Conv2D(n, 3, with_bias=False)(y)))

    def stretch(x):
        low, high = jnp.min(x, axis=(1, 2, 3), keepdims=True), jnp.max(x, axis=(1, 2, 3), keepdims=True)
        return (x - low) / (high - low + 1e-5)

    def expectation(logits):
        probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        x = jnp.sum(probs * jnp.arange(-support, support + 1), axis=-1)
        return jnp.sign(x) * (((jnp.sqrt(1 + 4 * 0.001 * (jnp.abs(x) + 1 + 0.001)) - 1) / 0.002) ** 2 - 1)

    def head(x, planes, outputs):
        y = hk.Flatten()(jax.nn.relu(norm(hk.Conv2D(planes, 1)(x))))
        return hk.Linear(outputs)(jax.nn.relu(hk.Linear(2 * n)(y)))

    class Dynamics(hk.Module):
        def __call__(self, x, action):
            plane = jax.nn.one_hot(action, side * side, dtype=dtype).reshape(-1, side, side, 1)
            y = jax.nn.relu(norm(hk.Conv2D(n, 3)(jnp.concatenate([x, plane], axis=-1))) + x)
            y = stretch(block(block(y)))
            return y, expectation(head(y, 1, 2 * support + 1))

    class Prediction(hk.Module):
        def __call__(self, x):
            return jax.nn.log_softmax(head(x, 2, side * side).astype(jnp.float32)), expectation(
                head(x, 1, 2 * support + 1)
            )

    def model(board, actions):
        dynamics, prediction = Dynamics(), Prediction()
        x = stretch(block(jax.nn.relu(norm(hk.Conv2D(n, 3)(board)))))
        outputs = [(*prediction(x), jnp.zeros(b))]
        for i in range(unroll):
            x, reward = dynamics(x, actions[:, i])
            outputs.append((*prediction(x), reward))
        return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *outputs)

    inputs = (normal(b, side, side, 17, dtype=dtype), integers(b, unroll, below=side * side))
    pure = hk.without_apply_rng(hk.transform(model))
    structs = jax.eval_shape(lambda *xs: pure.init(jax.random.key(0), *xs), *(r.struct for r in inputs))
    return Built(pure.apply, (module_weights(structs, dtype), *inputs))


@program("neural-controlled-equation-classifier-grad-equinox", GROUP)
def _cde(size: Size) -> Built:
    """This gives the loss and gradient of a neural controlled differential equation that labels irregular series."""
    import equinox as eqx

    b, t, channels, hidden, wide, classes = pick(
        size, (256, 60, 6, 32, 96, 9), (32, 40, 4, 16, 48, 9), (3, 5, 3, 4, 6, 3)
    )

    class Classifier(eqx.Module):
        start: eqx.nn.MLP
        field: eqx.nn.MLP
        read: eqx.nn.Linear

        def __init__(self, key):
            k1, k2, k3 = jax.random.split(key, 3)
            self.start = eqx.nn.MLP(channels, hidden, wide, 1, key=k1)
            self.field = eqx.nn.MLP(hidden, hidden * channels, wide, 1, jax.nn.softplus, jnp.tanh, key=k2)
            self.read = eqx.nn.Linear(hidden, classes, key=k3)

        def __call__(self, times, xs):
            gaps = jnp.diff(times)
            rises = jnp.diff(xs, axis=0) / gaps[:, None]

            def field(y, rise):
                return self.field(y).reshape(hidden, channels) @ rise

            def step(y, over):
                gap, rise = over
                k1 = field(y, rise)
                k2 = field(y + 0.5 * gap * k1, rise)
                return y + gap / 6 * (k1 + 4 * k2 + field(y + gap * (2 * k2 - k1), rise)), None

            y, _ = lax.scan(step, self.start(xs[0]), (gaps, rises))
            return jax.nn.log_softmax(self.read(y))

    module = eqx.filter_eval_shape(Classifier, jax.random.key(0))
    structs, rest = eqx.partition(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(arrays, gaps, values, labels):
        times = jnp.cumsum(0.02 + 0.05 * jax.nn.sigmoid(gaps), axis=1)
        xs = jnp.concatenate([times[..., None], values], axis=-1)
        log_probs = jax.vmap(eqx.combine(arrays, rest))(times, xs)
        return -jnp.mean(jnp.take_along_axis(log_probs, labels[:, None], axis=1))

    inputs = (normal(b, t), normal(b, t, channels - 1, scale=0.5), integers(b, below=classes))

    def graded(*arguments):
        value, slopes = jax.value_and_grad(loss)(*arguments)
        return value, jax.tree.leaves(slopes)

    return Built(graded, (module_weights(structs, jnp.float32), *inputs))
