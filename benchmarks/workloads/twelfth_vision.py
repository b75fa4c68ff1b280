"""Ordinary networks, losses and pre-processing of images, the twelfth set: its author had seen no plan."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import linen_program, module_weights
from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program, weight

GROUP = "twelfth"
MEAN, DEVIATION = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], np.float32)


@program("focal-modulation-block-nnx", GROUP)
def _focal(size: Size) -> Built:
    """This gives a block like FocalNet's, in which each place is multiplied by a gated sum of its wider and wider surroundings.

    Depthwise convolutions of growing size gather the surroundings, the mean of the map is the widest, and one gate per level and
    place says how much of each is taken; layer scales damp both branches.
    """
    from flax import nnx

    b, side, n, kernels = pick(size, (8, 28, 192, (3, 5, 7)), (2, 28, 120, (3, 5, 7)), (2, 4, 6, (3, 3)))
    dtype, levels = half(size), len(kernels)
    kinds = {"dtype": dtype, "param_dtype": dtype}

    class Modulation(nnx.Module):
        def __init__(self, rngs):
            self.inwards = nnx.Linear(n, 2 * n + levels + 1, rngs=rngs, **kinds)
            self.convs = nnx.List(
                [nnx.Conv(n, n, (k, k), feature_group_count=n, use_bias=False, rngs=rngs, **kinds) for k in kernels]
            )
            self.mix = nnx.Conv(n, n, (1, 1), rngs=rngs, **kinds)
            self.out = nnx.Linear(n, n, rngs=rngs, **kinds)

        def __call__(self, x):
            q, context, gates = jnp.split(self.inwards(x), [n, 2 * n], axis=-1)
            total = jnp.zeros_like(context)
            for level, conv in enumerate(self.convs):
                context = nnx.gelu(conv(context))
                total = total + context * gates[..., level : level + 1]
            whole = nnx.gelu(jnp.mean(context, axis=(1, 2), keepdims=True))
            return self.out(q * self.mix(total + whole * gates[..., levels:]))

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm1, self.norm2 = (nnx.LayerNorm(n, epsilon=1e-5, rngs=rngs, **kinds) for _ in range(2))
            self.modulation = Modulation(rngs)
            self.up, self.down = nnx.Linear(n, 4 * n, rngs=rngs, **kinds), nnx.Linear(4 * n, n, rngs=rngs, **kinds)
            self.scale1, self.scale2 = (nnx.Param(jnp.full((n,), 0.1, dtype)) for _ in range(2))

        def __call__(self, x):
            x = x + self.scale1[...] * self.modulation(self.norm1(x))
            return x + self.scale2[...] * self.down(nnx.gelu(self.up(self.norm2(x))))

    graph, state = nnx.split(nnx.eval_shape(lambda: Block(nnx.Rngs(0))))
    arguments = (module_weights(state, dtype), normal(b, side, side, n, dtype=dtype))
    return Built(lambda s, x: nnx.merge(graph, s)(x), arguments)


@program("xcit-attention-over-channels-linen", GROUP)
def _xcit(size: Size) -> Built:
    """This gives a layer like XCiT's, whose attention is between channels instead of places, and then the classes.

    Queries and keys are normalised over the places and compared at a learned temperature, two depthwise convolutions let
    neighbouring patches talk, and the mean of the patches goes to the head.
    """
    import flax.linen as nn

    b, side, n, h, classes = pick(size, (32, 14, 384, 8, 1000), (4, 14, 192, 4, 1000), (2, 3, 8, 2, 5))
    dtype, t, d = half(size), side * side, n // h

    def norm():
        return nn.LayerNorm(epsilon=1e-6, dtype=dtype)

    def unit(x):
        y = x.astype(jnp.float32)
        return y / jnp.maximum(jnp.linalg.norm(y, axis=-1, keepdims=True), 1e-6)

    class ChannelAttention(nn.Module):
        @nn.compact
        def __call__(self, x):
            qkv = nn.Dense(3 * n, dtype=dtype)(x).reshape(b, t, 3, h, d)
            q, k, v = jnp.moveaxis(qkv, (2, 1), (0, 4))
            heat = self.param("temperature", nn.initializers.ones, (h, 1, 1), jnp.float32)
            scores = jnp.einsum("bhdt,bhet->bhde", unit(q), unit(k)) * heat
            out = nn.softmax(scores, axis=-1).astype(dtype) @ v
            return nn.Dense(n, dtype=dtype)(jnp.moveaxis(out, 3, 1).reshape(b, t, n))

    class Local(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x.reshape(b, side, side, n)
            x = norm()(nn.gelu(nn.Conv(n, (3, 3), feature_group_count=n, dtype=dtype)(x)))
            return nn.Conv(n, (3, 3), feature_group_count=n, dtype=dtype)(x).reshape(b, t, n)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            def scaled(name, y):
                return self.param(name, nn.initializers.constant(0.1), (n,)).astype(dtype) * y

            x = x + scaled("scale1", ChannelAttention()(norm()(x)))
            x = x + scaled("scale2", Local()(norm()(x)))
            y = nn.Dense(n, dtype=dtype)(nn.gelu(nn.Dense(4 * n, dtype=dtype)(norm()(x))))
            x = norm()(x + scaled("scale3", y)).mean(axis=1)
            return nn.softmax(nn.Dense(classes, dtype=dtype)(x).astype(jnp.float32))

    return linen_program(size, Net(), normal(b, t, n, dtype=dtype))


@program("unbounded-scene-proposals-distortion-grad", GROUP)
def _proposals(size: Size) -> Built:
    """This gives the loss and gradient of a radiance field of an unbounded scene in the manner of mip-NeRF 360.

    A small network proposes where along each ray to look, its histogram is resampled by inverse transform, a larger network gives
    colours there, and a bound on the histograms and a distortion term are added to the error of the pixels.
    """
    rays, coarse, fine, octaves, small, large = pick(
        size, (2048, 49, 33, 8, 64, 192), (96, 33, 24, 6, 48, 96), (3, 6, 5, 2, 6, 8)
    )
    features = 3 * 2 * octaves

    def contract(x):
        length = jnp.sqrt(jnp.maximum(jnp.sum(x**2, axis=-1, keepdims=True), 1e-6))
        return jnp.where(length <= 1, x, (2.0 - 1.0 / length) * x / length)

    def encode(x):
        flat = (x[..., None, :] * 2.0 ** jnp.arange(octaves)[:, None]).reshape(*x.shape[:-1], -1)
        return jnp.concatenate([jnp.sin(flat), jnp.cos(flat)], axis=-1)

    def mlp(layers, x):
        for w, b in layers[:-1]:
            x = jax.nn.relu(x @ w + b)
        return x @ layers[-1][0] + layers[-1][1]

    def distances(s):
        return 1.0 / (s / 100.0 + (1.0 - s) / 0.2)

    def render(density, s):
        depth = density * jnp.diff(distances(s), axis=-1)
        return (1.0 - jnp.exp(-depth)) * jnp.exp(depth - jnp.cumsum(depth, axis=-1))

    def points(origins, directions, s):
        t = distances(s)
        middle = 0.5 * (t[..., 1:] + t[..., :-1])
        return encode(contract(origins[:, None] + middle[..., None] * directions[:, None]))

    def resample(s, weights):
        pdf = (weights + 0.01) / jnp.sum(weights + 0.01, axis=-1, keepdims=True)
        cdf = jnp.concatenate([jnp.zeros_like(pdf[..., :1]), jnp.minimum(1.0, jnp.cumsum(pdf, axis=-1))], axis=-1)
        u = jnp.linspace(0.0, 1.0 - 1e-5, fine)
        return jax.vmap(lambda c, edges: jnp.interp(u, c, edges))(cdf, s)

    def outer_bound(s, s_prop, w_prop):
        total = jnp.concatenate([jnp.zeros_like(w_prop[..., :1]), jnp.cumsum(w_prop, axis=-1)], axis=-1)
        find = jax.vmap(lambda edges, x: jnp.searchsorted(edges, x, side="right"))
        low = jnp.clip(find(s_prop, s[:, :-1]) - 1, 0, coarse - 1)
        high = jnp.clip(find(s_prop, s[:, 1:]), 0, coarse - 1)
        return jnp.take_along_axis(total, high, axis=-1) - jnp.take_along_axis(total, low, axis=-1)

    def distortion(s, w):
        middle = 0.5 * (s[:, 1:] + s[:, :-1])
        apart = jnp.abs(middle[:, :, None] - middle[:, None, :])
        between = jnp.sum(w * jnp.sum(w[:, None, :] * apart, axis=-1), axis=-1)
        return jnp.mean(between + jnp.sum(w**2 * jnp.diff(s, axis=-1), axis=-1) / 3.0)

    def loss(p, origins, directions, pixels):
        directions = directions / jnp.linalg.norm(directions, axis=-1, keepdims=True)
        s = jnp.broadcast_to(jnp.linspace(0.0, 1.0, coarse), (rays, coarse))
        proposed = render(jax.nn.softplus(mlp(p["small"], points(origins, directions, s))[..., 0] - 1.0), s)
        new = lax.stop_gradient(resample(s, proposed))
        raw = mlp(p["large"], points(origins, directions, new))
        w = render(jax.nn.softplus(raw[..., 3] - 1.0), new)
        colour = jnp.sum(w[..., None] * jax.nn.sigmoid(raw[..., :3]), axis=1)
        colour = colour + (1.0 - jnp.sum(w, axis=-1, keepdims=True)) * 0.5
        error = jnp.mean(jnp.sqrt((colour - jax.nn.sigmoid(pixels)) ** 2 + 1e-6))
        fixed = lax.stop_gradient(w)
        excess = jnp.maximum(0.0, fixed - outer_bound(new, s, proposed)) ** 2
        bound = jnp.mean(jnp.sum(excess / (fixed + 1e-5), axis=-1))
        return error + bound + 0.01 * distortion(new, w), colour

    def network(widths):
        return [(weight(i, o), normal(o, scale=0.02)) for i, o in itertools.pairwise(widths)]

    params = {"small": network((features, small, small, 1)), "large": network((features, large, large, large, 4))}
    inputs = (normal(rays, 3, scale=0.3), normal(rays, 3), normal(rays, 3))
    return Built(jax.value_and_grad(loss, has_aux=True), (params, *inputs))


@program("region-aligned-box-head-inference", GROUP)
def _regions(size: Size) -> Built:
    """This gives the classes and refined boxes of the regions of one image, as the second stage of a detector does.

    Each region is sampled bilinearly on a grid of two by two points per bin, two linear layers read the bins, and the four
    deltas of every class move and stretch the region before it is clipped to the image.
    """
    height, width, n, rois, out, hidden, classes = pick(
        size, (50, 76, 256, 300, 7, 1024, 91), (25, 38, 96, 149, 7, 256, 91), (6, 8, 4, 3, 2, 8, 3)
    )
    dtype, stride = half(size), 16.0

    def bilinear(features, y, x):
        y, x = jnp.clip(y, 0.0, height - 1.0), jnp.clip(x, 0.0, width - 1.0)
        y0, x0 = jnp.floor(y).astype(jnp.int32), jnp.floor(x).astype(jnp.int32)
        y1, x1 = jnp.minimum(y0 + 1, height - 1), jnp.minimum(x0 + 1, width - 1)
        dy, dx = (y - y0)[..., None].astype(dtype), (x - x0)[..., None].astype(dtype)
        top = features[y0, x0] * (1 - dx) + features[y0, x1] * dx
        bottom = features[y1, x0] * (1 - dx) + features[y1, x1] * dx
        return top * (1 - dy) + bottom * dy

    def align(features, box):
        y0, x0, y1, x1 = box / stride - 0.5
        steps = (jnp.arange(2 * out) + 0.5) / (2 * out)
        ys, xs = jnp.meshgrid(y0 + steps * (y1 - y0), x0 + steps * (x1 - x0), indexing="ij")
        return bilinear(features, ys, xs).reshape(out, 2, out, 2, n).mean(axis=(1, 3))

    def head(p, features, raw):
        limit = jnp.array([height * stride, width * stride])
        centre = jax.nn.sigmoid(raw[:, :2]) * limit
        half_size = 0.25 * jax.nn.sigmoid(raw[:, 2:]) * limit + 8.0
        boxes = jnp.concatenate([centre - half_size, centre + half_size], axis=-1)
        bins = jax.vmap(align, in_axes=(None, 0))(features, boxes).reshape(rois, -1)
        x = jax.nn.relu(bins @ p["fc1"] + p["b1"])
        x = jax.nn.relu(x @ p["fc2"] + p["b2"])
        probs = jax.nn.softmax((x @ p["classes"]).astype(jnp.float32), axis=-1)
        deltas = (x @ p["boxes"]).astype(jnp.float32).reshape(rois, classes, 4) / jnp.array([10.0, 10.0, 5.0, 5.0])
        moved = centre[:, None] + deltas[..., :2] * 2.0 * half_size[:, None]
        sized = half_size[:, None] * jnp.exp(jnp.minimum(deltas[..., 2:], np.log(1000 / 16)))
        low, high = jnp.clip(moved - sized, 0.0, limit), jnp.clip(moved + sized, 0.0, limit)
        return jnp.concatenate([low, high], axis=-1)[:, 1:], probs[:, 1:], 1.0 - probs[:, 0]

    params = {"fc1": weight(out * out * n, hidden, dtype=dtype), "fc2": weight(hidden, hidden, dtype=dtype)}
    params |= {name: normal(hidden, dtype=dtype, scale=0.02) for name in ("b1", "b2")}
    params["classes"] = normal(hidden, classes, dtype=dtype, scale=8 * hidden**-0.5)
    params["boxes"] = weight(hidden, classes * 4, dtype=dtype)
    return Built(head, (params, normal(height, width, n, dtype=dtype), normal(rois, 4)))


@program("painting-style-image-adam-step-grad", GROUP)
def _style(size: Size) -> Built:
    """This gives one Adam step on the pixels of an image that is to look like a painting.

    The gradient goes through the first layers of a VGG network: Gram matrices of three layers are compared with those of the
    painting, the last layer with that of the photograph, and the total variation of the image keeps it smooth.
    """
    height, width, n = pick(size, (256, 320, 64), (72, 104, 32), (8, 8, 4))
    dtype = half(size)

    def conv(x, p):
        y = lax.conv_general_dilated(x, p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(y + p["b"])

    def pool(x):
        return lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4

    def gram(x):
        area = x.shape[1] * x.shape[2]
        return jnp.einsum("byxc,byxd->cd", x, x, preferred_element_type=jnp.float32) / area

    def layers(p, image):
        first = conv(((image - MEAN) / DEVIATION).astype(dtype), p[0])
        second = conv(pool(conv(first, p[1])), p[2])
        return first, second, conv(second, p[3])

    def loss(image, p, grams, content):
        first, second, third = layers(p, image)
        style = sum(jnp.mean((gram(x) - g) ** 2) for x, g in zip((first, second, third), grams, strict=True))
        alike = jnp.mean((third - content).astype(jnp.float32) ** 2)
        rough = jnp.mean(jnp.abs(jnp.diff(image, axis=1))) + jnp.mean(jnp.abs(jnp.diff(image, axis=2)))
        return 10.0 * style + alike + 0.1 * rough

    def step(image, moments, count, p, grams, content):
        value, grad = jax.value_and_grad(loss)(image, p, grams, content)
        m, v = 0.9 * moments[0] + 0.1 * grad, 0.999 * jnp.abs(moments[1]) + 0.001 * grad**2
        count = count + 1
        scaled = (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-8)
        return jnp.clip(image - 0.02 * scaled, 0.0, 1.0), (m, v), value

    def kernel(i, o):
        return {"w": normal(3, 3, i, o, dtype=dtype, scale=(4.5 * i) ** -0.5), "b": normal(o, dtype=dtype, scale=0.02)}

    params = [kernel(3, n), kernel(n, n), kernel(n, 2 * n), kernel(2 * n, 2 * n)]
    targets = ([normal(c, c, scale=0.1, offset=0.3) for c in (n, 2 * n, 2 * n)],)
    targets += (normal(1, height // 2, width // 2, 2 * n, dtype=dtype),)
    image = normal(1, height, width, 3, scale=0.2, offset=0.5)
    moments = (normal(1, height, width, 3, scale=1e-3), normal(1, height, width, 3, scale=1e-6))
    return Built(step, (image, moments, integers(below=1000), params, *targets))


@program("differentiable-jpeg-artefacts-augmentation", GROUP)
def _jpeg(size: Size) -> Built:
    """This gives photographs as they look after a JPEG of random quality, normalised for a network.

    Bytes become luma and halved chroma, blocks of eight by eight go through a cosine transform, their coefficients are rounded
    softly by a sine to the steps of each image's quality, and everything is turned back before the normalisation.
    """
    b, height, width = pick(size, (32, 224, 224), (4, 160, 208), (2, 16, 16))
    k, i = np.meshgrid(np.arange(8), np.arange(8), indexing="ij")
    basis = (np.cos((2 * i + 1) * k * np.pi / 16) * np.where(k == 0, 0.125**0.5, 0.5)).astype(np.float32)
    to_luma = np.array([[0.299, 0.587, 0.114], [-0.1687, -0.3313, 0.5], [0.5, -0.4187, -0.0813]], np.float32)

    def compress(plane, steps):
        rows, columns = plane.shape
        blocks = plane.reshape(rows // 8, 8, columns // 8, 8).transpose(0, 2, 1, 3)
        coefficients = jnp.einsum("ki,yxij,lj->yxkl", basis, blocks, basis)
        whole = coefficients / steps
        rounded = (whole - jnp.sin(2 * jnp.pi * whole) / (2 * jnp.pi)) * steps
        back = jnp.einsum("ki,yxkl,lj->yxij", basis, rounded, basis)
        return back.transpose(0, 2, 1, 3).reshape(rows, columns)

    def one(image, quality, base):
        factor = jnp.where(quality < 50, 5000.0 / (quality + 1.0), 200.0 - 2.0 * quality)
        steps = jnp.clip(jnp.floor((jnp.abs(base) * factor + 50.0) / 100.0), 1.0, 255.0)
        colours = image.astype(jnp.float32) @ to_luma.T - jnp.array([128.0, 0.0, 0.0])
        luma = compress(colours[..., 0], steps[0])
        halved = colours[..., 1:].reshape(height // 2, 2, width // 2, 2, 2).mean(axis=(1, 3))
        chroma = jax.vmap(compress, in_axes=(-1, None), out_axes=-1)(halved, steps[1])
        chroma = jnp.repeat(jnp.repeat(chroma, 2, axis=0), 2, axis=1)
        whole = jnp.concatenate([luma[..., None] + 128.0, chroma], axis=-1)
        rgb = jnp.clip(whole @ np.linalg.inv(to_luma).T.astype(np.float32), 0.0, 255.0)
        return (rgb / 255.0 - MEAN) / DEVIATION

    images = Random((b, height, width, 3), jnp.dtype(jnp.uint8), below=256)
    arguments = (images, integers(b, below=96), normal(2, 8, 8, scale=15.0, offset=50.0))
    return Built(jax.vmap(one, in_axes=(0, 0, None)), arguments)
