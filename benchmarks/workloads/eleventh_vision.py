"""Ordinary networks and losses of images, the eleventh set: its author had seen no plan."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import (
    Built,
    Random,
    Size,
    gain,
    half,
    integers,
    like,
    normal,
    pick,
    program,
    weight,
)

GROUP = "eleventh"


def module_weights(structs, dtype):
    """This function describes the weights of a module as `like` does, but with biases around zero."""

    def centred(path, leaf):
        name = jax.tree_util.keystr(path)
        shift = "bias" in name or "offset" in name or name.endswith("['b']")
        return dataclasses.replace(leaf, offset=0.0) if shift else leaf

    described = like(structs, dtype)
    return jax.tree_util.tree_map_with_path(centred, described, is_leaf=lambda leaf: isinstance(leaf, Random))


def linen_program(size: Size, module, *inputs: Random) -> Built:
    """This function makes a program of a linen module that is applied to inputs."""
    structs = jax.eval_shape(lambda *xs: module.init(jax.random.key(0), *xs), *(r.struct for r in inputs))
    return Built(module.apply, (module_weights(structs, half(size)), *inputs))


@program("small-vit-class-token-layer-scale-linen", GROUP)
def _vit(size: Size) -> Built:
    """This gives the classes of photographs by a small vision transformer: patches, two blocks, and a linear head.

    A class token goes before the patches, learned places are added, and each branch of a block is multiplied by a layer scale; the
    head reads the normed class token and has as many classes as the full ImageNet.
    """
    import flax.linen as nn

    b, side, patch, n, h, classes = pick(
        size, (12, 224, 16, 384, 6, 21841), (3, 112, 16, 384, 6, 21841), (2, 8, 4, 12, 2, 7)
    )
    dtype = half(size)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            def scaled(name, y):
                return y * self.param(name, nn.initializers.constant(0.1), (n,)).astype(dtype)

            y = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x)
            y = nn.MultiHeadDotProductAttention(num_heads=h, dtype=dtype)(y, y)
            x = x + scaled("scale1", y)
            y = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x)
            y = nn.Dense(n, dtype=dtype)(nn.gelu(nn.Dense(4 * n, dtype=dtype)(y), approximate=False))
            return x + scaled("scale2", y)

    class Vit(nn.Module):
        @nn.compact
        def __call__(self, images):
            x = nn.Conv(n, (patch, patch), strides=(patch, patch), padding="VALID", dtype=dtype)(images)
            x = x.reshape(b, -1, n)
            token = self.param("class_token", nn.initializers.zeros, (1, 1, n)).astype(dtype)
            x = jnp.concatenate([jnp.tile(token, (b, 1, 1)), x], axis=1)
            x = x + self.param("places", nn.initializers.normal(0.02), (1, x.shape[1], n)).astype(dtype)
            for _ in range(2):
                x = Block()(x)
            x = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x)
            return nn.Dense(classes, dtype=dtype)(x[:, 0]).astype(jnp.float32)

    return linen_program(size, Vit(), normal(b, side, side, 3, dtype=dtype))


@program("latent-map-attends-to-77-words-nnx", GROUP)
def _latent_attention(size: Size) -> Built:
    """This gives the transformer block of a latent diffusion network, in which a map of latents attends to a text.

    The map is normed in groups and projected, its places attend to each other and then to 77 vectors of another width, a gated
    multilayer perceptron follows, and the result is added to the map after a last projection.
    """
    from flax import nnx

    b, height, width, n, h, groups, words, text = pick(
        size, (3, 40, 24, 480, 6, 24, 77, 768), (1, 20, 12, 480, 6, 24, 77, 768), (2, 3, 2, 12, 2, 3, 5, 8)
    )
    dtype, d = half(size), n // h

    def lin(i, o, rngs, bias=True):
        return nnx.Linear(i, o, use_bias=bias, dtype=dtype, param_dtype=dtype, rngs=rngs)

    class Attention(nnx.Module):
        def __init__(self, context, rngs):
            self.q = lin(n, n, rngs, bias=False)
            self.k, self.v = (lin(context, n, rngs, bias=False) for _ in range(2))
            self.out = lin(n, n, rngs)

        def __call__(self, x, context):
            q = self.q(x).reshape(b, -1, h, d)
            k = self.k(context).reshape(b, -1, h, d)
            v = self.v(context).reshape(b, -1, h, d)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * d**-0.5
            probs = nnx.softmax(scores.astype(jnp.float32), axis=-1).astype(dtype)
            return self.out(jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(b, -1, n))

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.group_norm = nnx.GroupNorm(n, groups, dtype=dtype, param_dtype=dtype, rngs=rngs)
            self.norm1, self.norm2, self.norm3 = (
                nnx.LayerNorm(n, epsilon=1e-5, dtype=dtype, param_dtype=dtype, rngs=rngs) for _ in range(3)
            )
            self.inwards, self.outwards = lin(n, n, rngs), lin(n, n, rngs)
            self.own, self.cross = Attention(n, rngs), Attention(text, rngs)
            self.up, self.down = lin(n, 8 * n, rngs), lin(4 * n, n, rngs)

        def __call__(self, latents, context):
            x = self.inwards(self.group_norm(latents).reshape(b, height * width, n))
            y = self.norm1(x)
            x = x + self.own(y, y)
            x = x + self.cross(self.norm2(x), context)
            y, gate = jnp.split(self.up(self.norm3(x)), 2, axis=-1)
            x = x + self.down(y * nnx.gelu(gate))
            return latents + self.outwards(x).reshape(latents.shape)

    graph, state = nnx.split(nnx.eval_shape(lambda: Block(nnx.Rngs(0))))
    arguments = (normal(b, height, width, n, dtype=dtype), normal(b, words, text, dtype=dtype))
    return Built(lambda s, x, context: nnx.merge(graph, s)(x, context), (module_weights(state, dtype), *arguments))


@program("group-norm-silu-residual-classifier-grad", GROUP)
def _residual(size: Size) -> Built:
    """This gives the loss and gradient of a classifier of maps with two residual blocks of group norm, SiLU and convolution.

    The second block doubles the channels and halves the map, so that its shortcut is a strided convolution; the mean over the map
    goes to a linear layer, and the cross-entropy smooths its labels.
    """
    b, side, c, groups, classes = pick(size, (12, 28, 192, 24, 1000), (3, 14, 72, 24, 1000), (2, 4, 4, 2, 5))
    dtype, smoothing = half(size), 0.1

    def conv(x, kernel, stride=1):
        return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def group_norm(p, x):
        shape = x.shape
        y = x.astype(jnp.float32).reshape(shape[0], shape[1], shape[2], groups, -1)
        mean = y.mean(axis=(1, 2, 4), keepdims=True)
        var = y.var(axis=(1, 2, 4), keepdims=True)
        y = ((y - mean) / jnp.sqrt(var + 1e-5)).reshape(shape)
        return (y * p["scale"] + p["shift"]).astype(x.dtype)

    def block(p, x, stride):
        y = conv(jax.nn.silu(group_norm(p["norm1"], x)), p["conv1"], stride)
        y = conv(jax.nn.silu(group_norm(p["norm2"], y)), p["conv2"])
        return y + (conv(x, p["shortcut"], stride) if "shortcut" in p else x)

    def loss(p, x, labels):
        x = block(p["first"], x, 1)
        x = block(p["second"], x, 2)
        x = jnp.mean(jax.nn.silu(group_norm(p["norm"], x)).astype(jnp.float32), axis=(1, 2))
        logits = x @ p["head"] + p["bias"]
        targets = jax.nn.one_hot(labels, classes) * (1 - smoothing) + smoothing / classes
        accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == labels)
        return -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)), accuracy

    def kernel(taps, i, o):
        return normal(taps, taps, i, o, dtype=dtype, scale=(taps * taps * i) ** -0.5)

    def norm(n):
        return {"scale": gain(n), "shift": normal(n, scale=0.02)}

    params = {
        "first": {"norm1": norm(c), "norm2": norm(c), "conv1": kernel(3, c, c), "conv2": kernel(3, c, c)},
        "second": {"norm1": norm(c), "norm2": norm(2 * c), "shortcut": kernel(1, c, 2 * c)},
        "norm": norm(2 * c),
        "head": weight(2 * c, classes),
        "bias": normal(classes, scale=0.02),
    }
    params["second"] |= {"conv1": kernel(3, c, 2 * c), "conv2": kernel(3, 2 * c, 2 * c)}
    images = normal(b, side, side, c, dtype=dtype)
    return Built(jax.value_and_grad(loss, has_aux=True), (params, images, integers(b, below=classes)))


@program("focal-dice-sorted-overlap-segmentation-grad", GROUP)
def _segmentation(size: Size) -> Built:
    """This gives the loss and gradient of a head that segments images: focal, dice and Lovász-softmax terms are added.

    A pointwise projection makes the logits; the focal term skips unlabelled pixels, dice sums over each image, and the Lovász term
    sorts the errors of each class over all pixels and weights them by the steps of the Jaccard index.
    """
    b, height, width, n, classes = pick(size, (3, 197, 333, 96, 11), (1, 77, 97, 96, 11), (2, 4, 3, 6, 3))
    dtype, gamma = half(size), 2.0

    def focal(log_probs, labels, there):
        picked = jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
        each = -((1.0 - jnp.exp(picked)) ** gamma) * picked
        return jnp.sum(each * there) / jnp.maximum(jnp.sum(there), 1.0)

    def dice(probs, target):
        both = jnp.sum(probs * target, axis=(1, 2))
        sizes = jnp.sum(probs, axis=(1, 2)) + jnp.sum(target, axis=(1, 2))
        return 1.0 - jnp.mean((2.0 * both + 1.0) / (sizes + 1.0))

    def lovasz(probs, target):
        def one_class(p, y):
            errors = jnp.abs(y - p)
            order = jnp.argsort(-errors)
            y = lax.stop_gradient(y[order])
            total = jnp.sum(y)
            jaccard = 1.0 - (total - jnp.cumsum(y)) / jnp.maximum(total + jnp.cumsum(1.0 - y), 1.0)
            steps = jnp.diff(jaccard, prepend=0.0)
            return jnp.dot(errors[order], steps), total > 0

        losses, present = jax.vmap(one_class, in_axes=1)(probs.reshape(-1, classes), target.reshape(-1, classes))
        return jnp.sum(jnp.where(present, losses, 0.0)) / jnp.maximum(jnp.sum(present), 1)

    def loss(p, features, labels):
        there = (labels < classes).astype(jnp.float32)
        labels = jnp.minimum(labels, classes - 1)
        logits = (features @ p["w"] + p["b"]).astype(jnp.float32)
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        probs = jnp.exp(log_probs) * there[..., None]
        target = jax.nn.one_hot(labels, classes) * there[..., None]
        parts = (focal(log_probs, labels, there), dice(probs, target), lovasz(probs, target))
        return sum(parts), parts

    params = {"w": weight(n, classes, dtype=dtype), "b": normal(classes, dtype=dtype, scale=0.02)}
    features, labels = normal(b, height, width, n, dtype=dtype), integers(b, height, width, below=classes + 1)
    return Built(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), (params, features, labels))


@program("gated-attention-pooled-patches-equinox", GROUP)
def _pooled(size: Size) -> Built:
    """This gives the class of a large image from the features of its patches, which gated attention averages.

    The features are normed and projected; a hyperbolic tangent times a sigmoid gives each head its score of a patch, patches past
    the image's own number are masked, and the attention weights are returned for a heat map.
    """
    import equinox as eqx

    b, patches, n, hidden, heads, classes = pick(
        size, (12, 1536, 768, 384, 3, 24), (3, 333, 768, 192, 3, 24), (2, 7, 8, 6, 2, 3)
    )
    dtype = half(size)

    class Pool(eqx.Module):
        norm: eqx.nn.LayerNorm
        project: eqx.nn.Linear
        tanh: eqx.nn.Linear
        gate: eqx.nn.Linear
        score: eqx.nn.Linear
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 5)
            self.norm = eqx.nn.LayerNorm(n)
            self.project = eqx.nn.Linear(n, hidden, key=keys[0])
            self.tanh = eqx.nn.Linear(hidden, hidden // 2, key=keys[1])
            self.gate = eqx.nn.Linear(hidden, hidden // 2, key=keys[2])
            self.score = eqx.nn.Linear(hidden // 2, heads, key=keys[3])
            self.head = eqx.nn.Linear(heads * hidden, classes, key=keys[4])

        def __call__(self, x, count):
            def patch(row):
                y = jax.nn.relu(self.project(self.norm(row)))
                return y, self.score(jnp.tanh(self.tanh(y)) * jax.nn.sigmoid(self.gate(y)))

            features, scores = jax.vmap(patch)(x)
            there = jnp.arange(patches)[:, None] <= count
            weights = jax.nn.softmax(jnp.where(there, scores.astype(jnp.float32), -1e9), axis=0)
            pooled = jnp.einsum("ph,pn->hn", weights.astype(dtype), features).reshape(-1)
            return jax.nn.softmax(self.head(pooled).astype(jnp.float32)), weights

    module = eqx.filter_eval_shape(Pool, jax.random.key(0))
    structs, rest = eqx.partition(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def run(arrays, x, counts):
        return jax.vmap(eqx.combine(arrays, rest))(x, counts)

    arguments = (normal(b, patches, n, dtype=dtype), integers(b, below=patches))
    return Built(run, (module_weights(structs, dtype), *arguments))
