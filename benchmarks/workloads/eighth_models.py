"""Layers and small models of language and vision of the eighth set: its author had seen no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, gain, half, integers, like, normal, pick, program, weight

GROUP = "eighth"


@program("roformer-interleaved-rotary-encoder-linen", GROUP)
def _roformer(size: Size) -> Built:
    """This gives a layer of the RoFormer encoder on padded texts, as its port to Flax's linen has it.

    Neighbouring channels of queries and keys are rotated by angles that grow with the position; norms come after the sums, as
    in BERT.
    """
    import flax.linen as nn

    b, t, n, h, wide = pick(size, (12, 1000, 768, 12, 3072), (2, 150, 192, 3, 768), (2, 7, 8, 2, 12))
    dtype, d = half(size), n // h
    angle = np.arange(t)[:, None] * 10_000.0 ** (-2.0 * np.arange(d // 2) / d)
    sine, cosine = (np.repeat(f(angle), 2, axis=-1)[None, :, None, :].astype(np.float32) for f in (np.sin, np.cos))

    def rotate(x):
        turned = jnp.stack([-x[..., 1::2], x[..., ::2]], axis=-1).reshape(x.shape)
        return x * jnp.asarray(cosine, x.dtype) + turned * jnp.asarray(sine, x.dtype)

    class SelfAttention(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            q, k, v = (nn.Dense(n, dtype=dtype, name=name)(x).reshape(b, t, h, d) for name in ("q", "k", "v"))
            bias = jnp.where(mask[:, None, None, :], 0.0, jnp.finfo(dtype).min).astype(dtype)
            mixed = nn.dot_product_attention(rotate(q), rotate(k), v, bias=bias, dtype=dtype)
            x = x + nn.Dense(n, dtype=dtype, name="out")(mixed.reshape(b, t, n))
            return nn.LayerNorm(epsilon=1e-12, dtype=dtype)(x)

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, length):
            mask = jnp.arange(t)[None, :] < jnp.maximum(length, 1)[:, None]
            x = SelfAttention(name="attention")(x, mask)
            y = nn.gelu(nn.Dense(wide, dtype=dtype, name="up")(x), approximate=False)
            return nn.LayerNorm(epsilon=1e-12, dtype=dtype)(x + nn.Dense(n, dtype=dtype, name="down")(y))

    module, x, length = Layer(), normal(b, t, n, dtype=dtype), integers(b, below=t + 1)
    params = like(jax.eval_shape(module.init, jax.random.key(0), x.struct, length.struct), dtype)
    return Built(module.apply, (params, x, length))


@program("phi3-long-rope-left-padded-decode", GROUP)
def _phi3(size: Size) -> Built:
    """This gives a layer of Phi-3 mini in decoding: one new token of each of eight left-padded requests, with a cache.

    One product makes queries, keys and values, one makes gate and values of the network; rotations have a factor for each
    frequency, which is another one beyond the length of the first training.
    """
    b, t, n, h, wide, first = pick(
        size, (8, 4608, 3072, 32, 8192, 4096), (8, 480, 576, 6, 1536, 256), (2, 9, 12, 2, 16, 4)
    )
    dtype, d = half(size), n // h
    stretch = np.float32(np.sqrt(1.0 + np.log(32.0) / np.log(first)))

    def norm(scale, x):
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
        return scale * y.astype(x.dtype)

    def rotations(p, position, start):
        factor = jnp.where(position >= first, p["long"], p["short"])
        frequency = 1.0 / (factor * 10_000.0 ** (jnp.arange(0, d, 2, dtype=jnp.float32) / d))
        angle = (position - start).astype(jnp.float32)[:, None] * frequency
        angle = jnp.concatenate([angle, angle], axis=-1)[:, None, None, :]
        return jnp.cos(angle) * stretch, jnp.sin(angle) * stretch

    def rotate(x, cosine, sine):
        left, right = jnp.split(x, 2, axis=-1)
        return (x * cosine + jnp.concatenate([-right, left], axis=-1) * sine).astype(x.dtype)

    def layer(p, x, keys, values, position, start):
        start = jnp.minimum(start, position)
        y = norm(p["input_norm"], x) @ p["qkv"]
        q, k, v = (part.reshape(b, 1, h, d).swapaxes(1, 2) for part in jnp.split(y, 3, axis=-1))
        cosine, sine = rotations(p, position, start)
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        keys = lax.dynamic_update_slice(keys, k, (0, 0, position, 0))
        values = lax.dynamic_update_slice(values, v, (0, 0, position, 0))
        slots = jnp.arange(t)[None, :]
        seen = (slots <= position) & (slots >= start[:, None])
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, keys) * np.asarray(d**-0.5, dtype)
        scores = jnp.where(seen[:, None, None, :], scores, jnp.finfo(dtype).min)
        probs = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(dtype)
        mixed = jnp.einsum("bhqk,bhkd->bhqd", probs, values).swapaxes(1, 2).reshape(b, 1, n)
        x = x + mixed @ p["o"]
        gate, up = jnp.split(norm(p["post_norm"], x) @ p["gate_up"], 2, axis=-1)
        return x + (up * jax.nn.silu(gate)) @ p["down"], keys, values

    params = {
        "input_norm": gain(n, dtype),
        "post_norm": gain(n, dtype),
        "qkv": weight(n, 3 * n, dtype=dtype),
        "o": weight(n, n, dtype=dtype),
        "gate_up": weight(n, 2 * wide, dtype=dtype),
        "down": weight(wide, n, dtype=dtype),
        "short": normal(d // 2, scale=0.02, offset=1.1),
        "long": normal(d // 2, scale=2.0, offset=20.0),
    }
    cache = normal(b, h, t, d, dtype=dtype)
    return Built(
        layer, (params, normal(b, 1, n, dtype=dtype), cache, cache, integers(below=t), integers(b, below=t // 8))
    )


@program("gshard-random-second-expert-grad", GROUP)
def _gshard(size: Size) -> Built:
    """This gives the gradient of a GShard layer of experts, which learns to give what a dense layer's features are.

    Each token goes to its best expert, and with a chance by its weight to the second best, as far as the expert has places; a
    loss keeps the load of the experts equal and another keeps the router's logits small.
    """
    groups, t, n, wide, experts = pick(size, (4, 1024, 1024, 4096, 16), (2, 128, 128, 256, 8), (2, 6, 4, 6, 3))
    dtype, places = half(size), 2 * t // experts

    def route(logits, key):
        gates = jax.nn.softmax(logits, axis=-1)
        mask1 = jax.nn.one_hot(jnp.argmax(gates, axis=-1), experts)
        gate1 = jnp.sum(gates * mask1, axis=-1)
        balance = jnp.mean(jnp.mean(gates, axis=1) * jnp.mean(mask1, axis=1)) * experts**2
        rest = gates * (1.0 - mask1)
        mask2 = jax.nn.one_hot(jnp.argmax(rest, axis=-1), experts)
        gate2 = jnp.sum(rest * mask2, axis=-1)
        both = gate1 + gate2 + 1e-9
        gate1, gate2 = gate1 / both, gate2 / both
        kept = 2.0 * gate2 > jax.random.uniform(key, gate2.shape)
        mask2 = mask2 * kept[..., None]
        place1 = (jnp.cumsum(mask1, axis=1) - mask1) * mask1
        mask1 = mask1 * (place1 < places)
        taken = jnp.sum(mask1, axis=1, keepdims=True)
        place2 = (jnp.cumsum(mask2, axis=1) - mask2 + taken) * mask2
        mask2 = mask2 * (place2 < places)

        def spread(gate, mask, place):
            slot = jax.nn.one_hot(jnp.sum(place * mask, axis=-1).astype(jnp.int32), places)
            return (gate[..., None] * mask)[..., None] * slot[:, :, None, :]

        combine = spread(gate1, mask1, place1) + spread(gate2, mask2, place2)
        second = jnp.mean(jnp.sum(mask2, axis=-1))
        return combine, balance, second

    def loss(p, x, target, seed):
        logits = jnp.einsum("gsm,me->gse", x.astype(jnp.float32), p["router"])
        combine, balance, second = route(logits, jax.random.key(seed))
        dispatch = (combine > 0.0).astype(dtype)
        sent = jnp.einsum("gsec,gsm->egcm", dispatch, x)
        hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", sent, p["in"]))
        back = jnp.einsum("egch,ehm->egcm", hidden, p["out"])
        y = jnp.einsum("gsec,egcm->gsm", combine.astype(dtype), back)
        error = jnp.mean((x + y - target).astype(jnp.float32) ** 2)
        small = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
        return error + 0.01 * balance + 0.001 * small, {"error": error, "balance": balance, "second": second}

    params = {
        "router": normal(n, experts, scale=n**-0.5),
        "in": weight(experts, n, wide, dtype=dtype),
        "out": weight(experts, wide, n, dtype=dtype),
    }
    x = normal(groups, t, n, dtype=dtype)
    return Built(jax.value_and_grad(loss, has_aux=True), (params, x, x, integers(below=1000)))


@program("big-transfer-standardised-units-linen", GROUP)
def _big_transfer(size: Size) -> Built:
    """This gives two residual units of Big Transfer (BiT) in Flax's linen, the first of which halves the image.

    The weights of each convolution are standardised over all inputs of an output channel; group norms and activations are
    before the convolutions.
    """
    import flax.linen as nn

    b, side, channels, middle, out, groups = pick(
        size, (32, 56, 256, 128, 512, 32), (8, 28, 64, 32, 128, 32), (2, 4, 4, 2, 6, 2)
    )
    dtype = half(size)

    class StandardisedConv(nn.Module):
        features: int
        width: int = 1
        stride: int = 1

        @nn.compact
        def __call__(self, x):
            shape = (self.width, self.width, x.shape[-1], self.features)
            kernel = self.param("kernel", nn.initializers.lecun_normal(), shape).astype(jnp.float32)
            kernel = kernel - jnp.mean(kernel, axis=(0, 1, 2))
            kernel = kernel * lax.rsqrt(jnp.mean(kernel**2, axis=(0, 1, 2)) + 1e-10)
            strides = (self.stride, self.stride)
            layout = ("NHWC", "HWIO", "NHWC")
            pad = [((self.width - 1) // 2, self.width // 2)] * 2
            return lax.conv_general_dilated(x, kernel.astype(dtype), strides, pad, dimension_numbers=layout)

    class Unit(nn.Module):
        stride: int

        @nn.compact
        def __call__(self, x):
            def activated(y, name):
                return nn.relu(nn.GroupNorm(num_groups=groups, epsilon=1e-5, dtype=dtype, name=name)(y))

            y = activated(x, "norm1")
            if x.shape[-1] != out or self.stride != 1:
                x = StandardisedConv(out, stride=self.stride, name="project")(y)
            y = activated(StandardisedConv(middle, name="conv1")(y), "norm2")
            y = activated(StandardisedConv(middle, 3, self.stride, name="conv2")(y), "norm3")
            return x + StandardisedConv(out, name="conv3")(y)

    class Units(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Unit(1, name="unit2")(Unit(2, name="unit1")(x))

    module, x = Units(), normal(b, side, side, channels, dtype=dtype)
    params = like(jax.eval_shape(module.init, jax.random.key(0), x.struct), dtype)
    return Built(module.apply, (params, x))


@program("bert-tiny-sentence-pairs-equinox", GROUP)
def _bert_tiny(size: Size) -> Built:
    """This gives the classes and the pooled vector of pairs of sentences by BERT-tiny, the whole model, in Equinox.

    Words, positions and the two sentences have embeddings, two layers follow with norms after the sums, and the first token's
    vector is pooled for a classifier.
    """
    import equinox as eqx

    b, t, n, h, wide, layers, words, classes = pick(
        size, (256, 128, 128, 2, 512, 2, 30522, 3), (8, 128, 128, 2, 512, 2, 30522, 3), (2, 6, 8, 2, 12, 1, 11, 3)
    )
    dtype = half(size)

    class Layer(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        up: eqx.nn.Linear
        down: eqx.nn.Linear
        norms: list

        def __init__(self, key):
            first, second, third = jax.random.split(key, 3)
            bias = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
            self.attention = eqx.nn.MultiheadAttention(h, n, **bias, key=first)
            self.up, self.down = eqx.nn.Linear(n, wide, key=second), eqx.nn.Linear(wide, n, key=third)
            self.norms = [eqx.nn.LayerNorm(n, eps=1e-12) for _ in range(2)]

        def __call__(self, x, mask):
            x = jax.vmap(self.norms[0])(x + self.attention(x, x, x, mask=mask))
            y = jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x), approximate=False))
            return jax.vmap(self.norms[1])(x + y)

    class Bert(eqx.Module):
        words: eqx.nn.Embedding
        places: eqx.nn.Embedding
        sentences: eqx.nn.Embedding
        norm: eqx.nn.LayerNorm
        layers: list
        pooler: eqx.nn.Linear
        classifier: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 5 + layers)
            self.words = eqx.nn.Embedding(words, n, key=keys[0])
            self.places = eqx.nn.Embedding(t, n, key=keys[1])
            self.sentences = eqx.nn.Embedding(2, n, key=keys[2])
            self.norm = eqx.nn.LayerNorm(n, eps=1e-12)
            self.layers = [Layer(k) for k in keys[5:]]
            self.pooler, self.classifier = eqx.nn.Linear(n, n, key=keys[3]), eqx.nn.Linear(n, classes, key=keys[4])

        def __call__(self, word, sentence, length):
            seen = jnp.arange(t) <= length
            mask = jnp.broadcast_to(seen[None, :], (t, t))
            x = jax.vmap(self.words)(word) + jax.vmap(self.places)(jnp.arange(t)) + jax.vmap(self.sentences)(sentence)
            x = jax.vmap(self.norm)(x)
            for layer in self.layers:
                x = layer(x, mask)
            pooled = jnp.tanh(self.pooler(x[0]))
            return jax.nn.softmax(self.classifier(pooled).astype(jnp.float32)), pooled

    shapes = eqx.filter_eval_shape(Bert, jax.random.key(0))
    params, static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def forward(params, word, sentence, length):
        return jax.vmap(eqx.combine(params, static))(word, sentence, length)

    tokens = integers(b, t, below=words), integers(b, t, below=2), integers(b, below=t)
    return Built(forward, (like(params, dtype), *tokens))
