"""Vision of the sixth set: backbones, a tower for packed images, matching of key points and restoration."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, gain, half, integers, like, normal, pick, program, weight

GROUP = "sixth"


@program("maxvit-block-and-grid-linen", GROUP)
def _maxvit(size: Size) -> Built:
    """This is a stage of MaxViT with its classifier at inference, as in its authors' code and timm.

    Each block is an inverted bottleneck with squeeze and excitation, attention within windows of 7 by 7 and attention over a
    grid of 7 by 7, both with a relative bias and a network after it.
    """
    from flax import linen as nn

    b, side, before, n, d, window, classes, blocks = pick(
        size, (32, 56, 64, 128, 32, 7, 1000, 2), (1, 28, 24, 64, 32, 7, 100, 2), (1, 8, 4, 8, 4, 2, 3, 1)
    )
    dtype, h = half(size), n // d
    places = np.stack(np.meshgrid(np.arange(window), np.arange(window), indexing="ij"), axis=-1).reshape(-1, 2)
    apart = places[:, None] - places[None, :] + window - 1
    relative = apart[..., 0] * (2 * window - 1) + apart[..., 1]

    class Bottleneck(nn.Module):
        stride: int

        @nn.compact
        def __call__(self, x):
            def norm(x):
                return nn.BatchNorm(use_running_average=True, epsilon=1e-3, dtype=dtype)(x)

            shortcut = x
            if self.stride > 1:
                shortcut = nn.avg_pool(x, (2, 2), strides=(2, 2))
            if x.shape[-1] != n:
                shortcut = nn.Conv(n, (1, 1), dtype=dtype, name="shortcut")(shortcut)
            y = nn.gelu(norm(nn.Conv(4 * n, (1, 1), use_bias=False, dtype=dtype)(norm(x))))
            s = (self.stride, self.stride)
            y = nn.Conv(4 * n, (3, 3), s, feature_group_count=4 * n, use_bias=False, dtype=dtype)(y)
            y = nn.gelu(norm(y))
            squeezed = nn.silu(nn.Dense(n // 4, dtype=dtype)(jnp.mean(y, axis=(1, 2), keepdims=True)))
            y = y * nn.sigmoid(nn.Dense(4 * n, dtype=dtype)(squeezed))
            return shortcut + nn.Conv(n, (1, 1), dtype=dtype)(y)

    class Attention(nn.Module):
        grid: bool

        @nn.compact
        def __call__(self, x):
            _, height, width, _ = x.shape
            rows, columns = height // window, width // window
            if self.grid:
                y = x.reshape(b, window, rows, window, columns, n).transpose(0, 2, 4, 1, 3, 5)
            else:
                y = x.reshape(b, rows, window, columns, window, n).transpose(0, 1, 3, 2, 4, 5)
            y = y.reshape(b * rows * columns, window * window, n)
            z = nn.LayerNorm(epsilon=1e-5, dtype=dtype)(y)
            qkv = nn.Dense(3 * n, dtype=dtype)(z).reshape(-1, window * window, 3, h, d)
            q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
            table = self.param("bias", nn.initializers.normal(0.02), ((2 * window - 1) ** 2, h))
            scores = jnp.einsum("wqhd,wkhd->whqk", q * np.asarray(d**-0.5, dtype), k)
            scores = scores + jnp.transpose(table[relative], (2, 0, 1))[None].astype(dtype)
            z = jnp.einsum("whqk,wkhd->wqhd", nn.softmax(scores, axis=-1), v).reshape(y.shape)
            y = y + nn.Dense(n, dtype=dtype)(z)
            z = nn.gelu(nn.Dense(4 * n, dtype=dtype)(nn.LayerNorm(epsilon=1e-5, dtype=dtype)(y)))
            y = y + nn.Dense(n, dtype=dtype)(z)
            if self.grid:
                y = y.reshape(b, rows, columns, window, window, n).transpose(0, 3, 1, 4, 2, 5)
            else:
                y = y.reshape(b, rows, columns, window, window, n).transpose(0, 1, 3, 2, 4, 5)
            return y.reshape(b, height, width, n)

    class Stage(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(blocks):
                x = Bottleneck(1 if i else 2)(x)
                x = Attention(grid=True)(Attention(grid=False)(x))
            y = nn.LayerNorm(epsilon=1e-5, dtype=dtype)(jnp.mean(x, axis=(1, 2)))
            y = nn.tanh(nn.Dense(n, dtype=dtype)(y))
            return nn.softmax(nn.Dense(classes, dtype=dtype)(y).astype(jnp.float32)), x

    module = Stage()
    x = normal(b, side, side, before, dtype=dtype)
    params = like(jax.eval_shape(module.init, jax.random.key(0), x.struct), dtype)
    return Built(module.apply, (params, x))


@program("qwen25-vl-packed-windows-nnx", GROUP)
def _qwen_vision(size: Size) -> Built:
    """This is the vision tower of Qwen 2.5 VL, two of its layers and its merger, on images packed into one sequence.

    Patches are put into the order of windows; one layer attends within windows, the other within images; rotations are by row
    and column; four patches become a token of the language model, in the old order again. Such code serves that model.
    """
    from flax import nnx

    t, pixels, n, h, wide, out = pick(
        size, (2516, 1176, 1280, 16, 3420, 2048), (172, 294, 160, 4, 428, 256), (12, 6, 8, 2, 10, 8)
    )
    dtype, d, groups, images, windows, side = half(size), n // h, t // 4, 3, max(2, t // 60), 60

    def linear(i, o, rngs, bias=True):
        return nnx.Linear(i, o, use_bias=bias, dtype=dtype, param_dtype=dtype, rngs=rngs)

    def norm(rngs):
        return nnx.RMSNorm(n, epsilon=1e-6, dtype=dtype, param_dtype=dtype, rngs=rngs)

    def angles(row, column):
        steps = 10_000.0 ** (-jnp.arange(0, d // 2, 2) / (d // 2))
        angle = jnp.concatenate([row[:, None] * steps, column[:, None] * steps], axis=-1)
        return jnp.concatenate([angle, angle], axis=-1)[:, None, :]

    def rotate(x, sin, cos):
        y = x.astype(jnp.float32)
        a, b = jnp.split(y, 2, axis=-1)
        return (y * cos + jnp.concatenate([-b, a], axis=-1) * sin).astype(x.dtype)

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.norm1, self.norm2 = norm(rngs), norm(rngs)
            self.qkv, self.out = linear(n, 3 * n, rngs), linear(n, n, rngs)
            self.gate, self.up, self.down = linear(n, wide, rngs), linear(n, wide, rngs), linear(wide, n, rngs)

        def __call__(self, x, sin, cos, mask):
            q, k, v = jnp.moveaxis(self.qkv(self.norm1(x)).reshape(t, 3, h, d), 1, 0)
            q, k = rotate(q, sin, cos), rotate(k, sin, cos)
            scores = jnp.einsum("qhd,khd->hqk", q, k) / np.asarray(np.sqrt(d), dtype)
            scores = scores + jnp.where(mask, 0.0, jnp.finfo(dtype).min).astype(dtype)
            weights = nnx.softmax(scores.astype(jnp.float32), axis=-1).astype(dtype)
            x = x + self.out(jnp.einsum("hqk,khd->qhd", weights, v).reshape(t, n))
            y = self.norm2(x)
            return x + self.down(nnx.silu(self.gate(y)) * self.up(y))

    class Tower(nnx.Module):
        def __init__(self, rngs):
            self.embed = linear(pixels, n, rngs, bias=False)
            self.layers = nnx.List([Layer(rngs) for _ in range(2)])
            self.merge_norm = norm(rngs)
            self.merge1, self.merge2 = linear(4 * n, 4 * n, rngs), linear(4 * n, out, rngs)

        def __call__(self, patches, row, column, order, window, image):
            def ordered(x):
                return x.reshape(groups, 4, -1)[order].reshape(t, -1)

            x = ordered(self.embed(patches.astype(dtype)))
            angle = angles(ordered(row)[:, 0], ordered(column)[:, 0])
            sin, cos = jnp.sin(angle), jnp.cos(angle)
            image = ordered(image)[:, 0]
            for layer, label in zip(self.layers, (jnp.repeat(window, 4), image), strict=True):
                x = layer(x, sin, cos, label[:, None] == label[None, :])
            x = nnx.gelu(self.merge1(self.merge_norm(x).reshape(groups, 4 * n)), approximate=False)
            return self.merge2(x)[jnp.argsort(order)]

    graph, state = nnx.split(nnx.eval_shape(lambda: Tower(nnx.Rngs(0))))

    def encode(state, patches, row, column, order, window, image):
        return nnx.merge(graph, state)(patches, row, column, order, window, image)

    places = (integers(t, below=side), integers(t, below=side), integers(groups, below=groups, distinct=True))
    labels = (integers(groups, below=windows, ramp=True), integers(t, below=images, ramp=True))
    return Built(encode, (like(state, dtype), normal(t, pixels), *places, *labels))


@program("lightglue-keypoint-matching", GROUP)
def _lightglue(size: Size) -> Built:
    """This is LightGlue's matching of two images' key points, as in its authors' code: two layers, then the matches.

    Rotations come from learned frequencies of places; descriptors attend to their own image, then in both directions to the
    other; a double softmax with a score of being matchable gives the pairs that choose each other.
    """
    b, m, k, n, h, layers = pick(size, (4, 1000, 900, 256, 4, 2), (1, 250, 230, 96, 4, 2), (2, 5, 4, 8, 2, 1))
    d = n // h

    def linear(p, x):
        return x @ p[0] + p[1]

    def norm(p, x):
        mean = jnp.mean(x, axis=-1, keepdims=True)
        return (x - mean) * lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5) * p[0] + p[1]

    def feed(p, x, message):
        y = linear(p["ffn1"], jnp.concatenate([x, message], axis=-1))
        return x + linear(p["ffn2"], jax.nn.gelu(norm(p["ffn_norm"], y), approximate=False))

    def turns(p, points):
        angle = jnp.repeat(points @ p["frequencies"], 2, axis=-1)[:, None]
        return jnp.cos(angle), jnp.sin(angle)

    def rotate(turn, x):
        pairs = x.reshape(*x.shape[:-1], d // 2, 2)
        half_turned = jnp.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(x.shape)
        return x * turn[0] + half_turned * turn[1]

    def heads(x):
        return x.reshape(b, -1, h, d).swapaxes(1, 2)

    def joined(x):
        return x.swapaxes(1, 2).reshape(b, -1, n)

    def own(p, x, turn, mask):
        qkv = linear(p["qkv"], x).reshape(b, -1, h, d, 3).swapaxes(1, 2)
        q, key, v = qkv[..., 0], qkv[..., 1], qkv[..., 2]
        scores = rotate(turn, q) @ rotate(turn, key).swapaxes(-1, -2) * d**-0.5
        probs = jax.nn.softmax(jnp.where(mask[:, None, None, :], scores, -1e9), axis=-1)
        return feed(p, x, linear(p["out"], joined(probs @ v)))

    def other(p, x0, x1, mask0, mask1):
        qk0, qk1 = heads(linear(p["qk"], x0)) * d**-0.25, heads(linear(p["qk"], x1)) * d**-0.25
        v0, v1 = heads(linear(p["v"], x0)), heads(linear(p["v"], x1))
        sim = jnp.einsum("bhid,bhjd->bhij", qk0, qk1)
        both = mask0[:, None, :, None] & mask1[:, None, None, :]
        sim = jnp.where(both, sim, -1e9)
        to0 = jnp.einsum("bhij,bhjd->bhid", jax.nn.softmax(sim, axis=-1), v1)
        back = jax.nn.softmax(sim.swapaxes(-1, -2), axis=-1)
        to1 = jnp.einsum("bhji,bhjd->bhid", back.swapaxes(-1, -2), v0)
        return feed(p, x0, linear(p["out"], joined(to0))), feed(p, x1, linear(p["out"], joined(to1)))

    def assignment(p, x0, x1, mask0, mask1):
        y0, y1 = linear(p["final"], x0) / n**0.25, linear(p["final"], x1) / n**0.25
        sim = jnp.where(mask0[:, :, None] & mask1[:, None, :], jnp.einsum("bmd,bnd->bmn", y0, y1), -1e9)
        z0, z1 = linear(p["matchable"], x0), linear(p["matchable"], x1)
        certain = jax.nn.log_sigmoid(z0) + jax.nn.log_sigmoid(z1).swapaxes(1, 2)
        return jax.nn.log_softmax(sim, axis=2) + jax.nn.log_softmax(sim, axis=1) + certain

    def match(p, points0, points1, x0, x1, count0, count1):
        mask0 = jnp.arange(m)[None, :] < jnp.maximum(count0, 1)[:, None]
        mask1 = jnp.arange(k)[None, :] < jnp.maximum(count1, 1)[:, None]
        x0 = x0 / jnp.linalg.norm(x0, axis=-1, keepdims=True)
        x1 = x1 / jnp.linalg.norm(x1, axis=-1, keepdims=True)
        turn0, turn1 = turns(p, points0), turns(p, points1)
        for layer in p["layers"]:
            x0, x1 = own(layer["own"], x0, turn0, mask0), own(layer["own"], x1, turn1, mask1)
            x0, x1 = other(layer["other"], x0, x1, mask0, mask1)
        scores = assignment(p, x0, x1, mask0, mask1)
        best0, best1 = jnp.argmax(scores, axis=2), jnp.argmax(scores, axis=1)
        mutual = jnp.take_along_axis(best1, best0, axis=1) == jnp.arange(m)[None, :]
        score = jnp.where(mutual & mask0, jnp.exp(jnp.max(scores, axis=2)), 0.0)
        sure = jax.nn.sigmoid(linear(p["confidence"], x0)[..., 0])
        done = jnp.sum(jnp.where(mask0, sure > 0.5, False), axis=1) / jnp.sum(mask0, axis=1)
        return jnp.where(score > 0.1, best0, -1), score, done

    def pair(i, o):
        return (weight(i, o), normal(o, scale=0.05))

    ffn = {"ffn1": pair(2 * n, 2 * n), "ffn2": pair(2 * n, n), "out": pair(n, n)}
    ffn["ffn_norm"] = (gain(2 * n), normal(2 * n, scale=0.05))
    layer = {"own": {**ffn, "qkv": pair(n, 3 * n)}, "other": {**ffn, "qk": pair(n, n), "v": pair(n, n)}}
    params = {
        "frequencies": normal(2, d // 2),
        "layers": [layer] * layers,
        "final": (normal(n, n, scale=4.0 * n**-0.5), normal(n, scale=0.05)),
        "matchable": (weight(n, 1), normal(1, offset=3.0)),
        "confidence": pair(n, 1),
    }
    points = (normal(b, m, 2, scale=0.4), normal(b, k, 2, scale=0.4), normal(b, m, n), normal(b, k, n))
    return Built(match, (params, *points, integers(b, below=m + 1), integers(b, below=k + 1)))


@program("nafnet-denoising-loss-grad", GROUP)
def _nafnet(size: Size) -> Built:
    """This is the gradient of NAFNet's loss of the peak ratio of signal to noise, as restoration of images is trained.

    Its blocks have no activation but products of halves of channels, norms over channels, depthwise convolutions and a scale of
    each channel by its mean; a convolution of stride 2 goes down, a shuffle of pixels goes up.
    """
    b, side, n = pick(size, (4, 128, 32), (1, 40, 12), (1, 4, 4))

    def conv(p, x, stride=1, groups=1):
        y = lax.conv_general_dilated(
            x,
            p["kernel"],
            (stride, stride),
            "VALID" if stride > 1 else "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return y + p["bias"]

    def norm(p, x):
        mean = jnp.mean(x, axis=-1, keepdims=True)
        var = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
        return (x - mean) / jnp.sqrt(var + 1e-6) * p["scale"] + p["shift"]

    def gate(x):
        a, b = jnp.split(x, 2, axis=-1)
        return a * b

    def block(p, x):
        y = conv(p["conv1"], norm(p["norm1"], x))
        y = gate(conv(p["conv2"], y, groups=y.shape[-1]))
        y = y * conv(p["attention"], jnp.mean(y, axis=(1, 2), keepdims=True))
        x = x + conv(p["conv3"], y) * p["beta"]
        y = gate(conv(p["conv4"], norm(p["norm2"], x)))
        return x + conv(p["conv5"], y) * p["gamma"]

    def shuffle(x):
        _, height, width, channels = x.shape
        x = x.reshape(b, height, width, channels // 4, 2, 2)
        return x.transpose(0, 1, 4, 2, 5, 3).reshape(b, 2 * height, 2 * width, channels // 4)

    def restore(p, noisy):
        x = conv(p["intro"], noisy)
        skip = block(p["encoder"], x)
        x = conv(p["down"], skip, stride=2)
        for middle in p["middle"]:
            x = block(middle, x)
        x = block(p["decoder"], shuffle(conv(p["up"], x)) + skip)
        return conv(p["ending"], x) + noisy

    def loss(p, clean, noise, level):
        noisy = clean + noise * jax.nn.softplus(level)[:, None, None, None] * 0.1
        error = jnp.mean((restore(p, noisy) - clean) ** 2, axis=(1, 2, 3))
        return 10.0 / jnp.log(10.0) * jnp.mean(jnp.log(error + 1e-8))

    def kernel(size, i, o):
        return {"kernel": normal(size, size, i, o, scale=(size * size * i) ** -0.5), "bias": normal(o, scale=0.05)}

    def blocks(c):
        norms = {name: {"scale": gain(c), "shift": normal(c, scale=0.05)} for name in ("norm1", "norm2")}
        convs = {"conv1": kernel(1, c, 2 * c), "conv2": kernel(3, 1, 2 * c), "attention": kernel(1, c, c)}
        convs |= {"conv3": kernel(1, c, c), "conv4": kernel(1, c, 2 * c), "conv5": kernel(1, c, c)}
        return norms | convs | {"beta": normal(c, scale=0.1), "gamma": normal(c, scale=0.1)}

    params = {
        "intro": kernel(3, 3, n),
        "encoder": blocks(n),
        "down": kernel(2, n, 2 * n),
        "middle": [blocks(2 * n)] * 2,
        "up": kernel(1, 2 * n, 4 * n),
        "decoder": blocks(n),
        "ending": kernel(3, n, 3),
    }
    image = normal(b, side, side, 3, scale=0.25, offset=0.5)
    return Built(jax.value_and_grad(loss), (params, image, normal(b, side, side, 3), normal(b)))
