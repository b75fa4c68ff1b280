"""An invertible network and a classifier with two sizes of patches, the thirty-sixth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program

GROUP = "thirty-sixth"


@program("glow-invertible-1x1-convolutions-bits-per-dimension-nnx", GROUP)
def _glow(size: Size) -> Built:
    """This program tells how many bits photographs need under an invertible network.

    It is Glow (Kingma, 2018; openai/glow), with nnx: levels fold pixels into channels, steps scale channels, mix them by a square
    matrix and shift and scale one half by a network of the other, and half of the channels leave after each level.
    """
    from flax import nnx

    b, side, width, steps, levels, bits = pick(size, (16, 64, 384, 4, 3, 5), (3, 32, 144, 4, 3, 5), (1, 8, 4, 4, 3, 5))
    dtype = half(size)

    class Coupling(nnx.Module):
        """This is the network of a coupling, whose last filter has a learned scale."""

        def __init__(self, i, o, rngs):
            how = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
            self.first, self.middle = nnx.Conv(i, width, (3, 3), **how), nnx.Conv(width, width, (1, 1), **how)
            self.last = nnx.Conv(width, o, (3, 3), **how)
            self.logs = nnx.Param(jnp.zeros(o))

        def __call__(self, x):
            x = nnx.relu(self.middle(nnx.relu(self.first(x.astype(dtype)))))
            return self.last(x).astype(jnp.float32) * jnp.exp(self.logs[...] * 3.0)

    class Step(nnx.Module):
        """This is one step of the flow."""

        def __init__(self, c, rngs):
            self.bias, self.logs = nnx.Param(jnp.zeros(c)), nnx.Param(jnp.zeros(c))
            self.mix = nnx.Param(jnp.eye(c))
            self.net = Coupling(c // 2, c, rngs)

        def __call__(self, x, bits):
            cells = x.shape[1] * x.shape[2]
            x = (x + self.bias[...]) * jnp.exp(self.logs[...])
            bits = bits + cells * jnp.sum(self.logs[...])
            x = x @ self.mix[...]
            bits = bits + cells * jnp.linalg.slogdet(self.mix[...])[1]
            one, two = jnp.split(x, 2, axis=-1)
            h = self.net(one)
            shift, scale = h[..., 0::2], jax.nn.sigmoid(h[..., 1::2] + 2.0)
            bits = bits + jnp.sum(jnp.log(scale), axis=(1, 2, 3))
            return jnp.concatenate([one, (two + shift) * scale], axis=-1), bits

    class Glow(nnx.Module):
        """This is the whole network."""

        def __init__(self, rngs):
            self.levels, self.priors, c = nnx.List([]), nnx.List([]), 3
            for level in range(levels):
                c = 4 * c
                self.levels.append(nnx.List([Step(c, rngs) for _ in range(steps)]))
                if level < levels - 1:
                    c = c // 2
                    self.priors.append(nnx.Conv(c, 2 * c, (3, 3), rngs=rngs))

        def __call__(self, x):
            bits, left = jnp.zeros(x.shape[0]), []
            for level, flow in enumerate(self.levels):
                b, h, w, c = x.shape
                x = x.reshape(b, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 5, 2, 4).reshape(b, h // 2, w // 2, 4 * c)
                for step in flow:
                    x, bits = step(x, bits)
                if level < levels - 1:
                    x, z = jnp.split(x, 2, axis=-1)
                    mean, logs = jnp.split(self.priors[level](x), 2, axis=-1)
                    bits = bits + gaussian(z, mean, logs)
                    left.append((z - mean) * jnp.exp(-logs))
            return bits + gaussian(x, 0.0, jnp.zeros_like(x)), [*left, x]

    def gaussian(x, mean, logs):
        """This is the logarithm of a density, summed over a photograph."""
        each = -0.5 * (float(np.log(2 * np.pi)) + 2 * logs + jnp.square(x - mean) * jnp.exp(-2 * logs))
        return jnp.sum(each, axis=(1, 2, 3))

    graph, state = nnx.split(nnx.eval_shape(lambda: Glow(nnx.Rngs(0))))

    def run(p, photo, seed):
        """This gives bits per dimension of photographs, and the latents of each level."""
        bins = 2.0**bits
        x = jnp.floor(photo.astype(jnp.float32) / 2 ** (8 - bits)) / bins - 0.5
        x = x + jax.random.uniform(jax.random.key(seed), x.shape) / bins
        logp, latents = nnx.merge(graph, p)(x)
        size = side * side * 3
        return (-logp + size * float(np.log(bins))) / (size * float(np.log(2.0))), latents

    def weights(path, s):
        """This describes filters, square matrices, and shifts and logarithms of scales near nought."""
        names = [str(getattr(k, "key", getattr(k, "name", k))) for k in path]
        if len(s.shape) < 2:
            return normal(*s.shape, dtype=s.dtype, scale=0.05)
        quiet = 0.2 if "last" in names or "priors" in names else 1.4
        quiet = 1.0 if "mix" in names else quiet
        return normal(*s.shape, dtype=s.dtype, scale=quiet * float(np.prod(s.shape[:-1])) ** -0.5)

    p = jax.tree_util.tree_map_with_path(weights, state)
    return Built(run, (p, integers(b, side, side, 3, below=256), integers(below=1000)))


@program("crossvit-two-patch-sizes-exchange-class-tokens-equinox", GROUP)
def _cross(size: Size) -> Built:
    """This program classifies photographs with two transformers for small and large patches that exchange their class tokens.

    It is CrossViT (Chen, 2021; IBM/CrossViT), with equinox: after some layers of each branch, its class token is changed to the
    width of the other branch, attends to the patches there and is changed back; scores of both branches are averaged.
    """
    import equinox as eqx

    b, sides, patches, widths, heads, classes = pick(
        size,
        (32, (240, 224), (12, 16), (192, 384), 6, 1000),
        (1, (144, 128), (12, 16), (64, 128), 4, 100),
        (1, (12, 8), (6, 4), (8, 12), 2, 5),
    )
    dtype, stages, depths = half(size), 3, (1, 3)

    class Layer(eqx.Module):
        """This is a layer of a transformer."""

        norm1: eqx.nn.LayerNorm
        norm2: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        one: eqx.nn.Linear
        two: eqx.nn.Linear

        def __init__(self, n, key):
            keys = jax.random.split(key, 3)
            self.norm1, self.norm2 = eqx.nn.LayerNorm(n, eps=1e-6), eqx.nn.LayerNorm(n, eps=1e-6)
            biases = {f"use_{z}_bias": True for z in ("query", "key", "value", "output")}
            self.attention = eqx.nn.MultiheadAttention(heads, n, key=keys[0], **biases)
            self.one, self.two = eqx.nn.Linear(n, 4 * n, key=keys[1]), eqx.nn.Linear(4 * n, n, key=keys[2])

        def __call__(self, x):
            y = jax.vmap(self.norm1)(x)
            x = x + self.attention(y, y, y)
            return x + jax.vmap(lambda y: self.two(jax.nn.gelu(self.one(self.norm2(y)), approximate=False)))(x)

    class Change(eqx.Module):
        """This is a norm, a bend and a linear layer from one width to the other."""

        norm: eqx.nn.LayerNorm
        linear: eqx.nn.Linear

        def __init__(self, i, o, key):
            self.norm, self.linear = eqx.nn.LayerNorm(i, eps=1e-6), eqx.nn.Linear(i, o, key=key)

        def __call__(self, x):
            return self.linear(jax.nn.gelu(self.norm(x), approximate=False))

    class Fusion(eqx.Module):
        """This lets the class token of one branch attend to patches of the other."""

        into: Change
        back: Change
        norm: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention

        def __init__(self, n, m, key):
            keys = jax.random.split(key, 3)
            self.into, self.back = Change(n, m, keys[0]), Change(m, n, keys[1])
            self.norm, self.attention = eqx.nn.LayerNorm(m, eps=1e-6), eqx.nn.MultiheadAttention(heads, m, key=keys[2])

        def __call__(self, x, other):
            token = self.into(x[0])[None]
            y = jax.vmap(self.norm)(jnp.concatenate([token, other[1:]]))
            token = token + self.attention(y[:1], y, y)
            return jnp.concatenate([self.back(token[0])[None], x[1:]])

    class Net(eqx.Module):
        """This is the whole network."""

        patch: list
        token: list
        place: list
        layers: list
        fusions: list
        norms: list
        heads: list

        def __init__(self, key):
            keys = iter(jax.random.split(key, 64))
            self.patch = [eqx.nn.Conv2d(3, n, p, p, key=next(keys)) for n, p in zip(widths, patches, strict=True)]
            self.token = [jnp.zeros((1, n)) for n in widths]
            self.place = [jnp.zeros(((s // p) ** 2 + 1, n)) for s, p, n in zip(sides, patches, widths, strict=True)]
            self.layers = [
                [[Layer(n, next(keys)) for _ in range(depth)] for n, depth in zip(widths, depths, strict=True)]
                for _ in range(stages)
            ]
            self.fusions = [
                [Fusion(n, m, next(keys)) for n, m in zip(widths, widths[::-1], strict=True)] for _ in range(stages)
            ]
            self.norms = [eqx.nn.LayerNorm(n, eps=1e-6) for n in widths]
            self.heads = [eqx.nn.Linear(n, classes, key=next(keys)) for n in widths]

        def __call__(self, photo):
            x = []
            for k, side in enumerate(sides):
                y = jax.image.resize(photo, (3, side, side), "bicubic") if side != photo.shape[-1] else photo
                y = self.patch[k](y).reshape(widths[k], -1).T
                x.append(jnp.concatenate([self.token[k], y]) + self.place[k])
            for layers, fusions in zip(self.layers, self.fusions, strict=True):
                for k in range(2):
                    for layer in layers[k]:
                        x[k] = layer(x[k])
                x = [fusions[0](x[0], x[1]), fusions[1](x[1], x[0])]
            tokens = [norm(y[0]) for norm, y in zip(self.norms, x, strict=True)]
            return [head(y) for head, y in zip(self.heads, tokens, strict=True)], tokens

    shapes = eqx.filter_eval_shape(Net, jax.random.key(0))
    arrays, rest = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def run(p, photo):
        """This gives mean chances of classes, how far the branches differ, and both class tokens."""
        scores, tokens = jax.vmap(eqx.combine(p, rest))(photo)
        one, two = (jax.nn.log_softmax(z.astype(jnp.float32)) for z in scores)
        mean = jax.nn.softmax((scores[0].astype(jnp.float32) + scores[1].astype(jnp.float32)) / 2)
        return mean, jnp.sum(jnp.exp(one) * (one - two), axis=-1), tokens

    def weights(path, s):
        """This describes matrices [outputs, inputs, ...], tokens and places, gains near one and shifts near zero."""
        name = getattr(path[-1], "name", "")
        if len(s.shape) > 1 and name == "weight":
            return normal(*s.shape, dtype=dtype, scale=float(np.prod(s.shape[1:])) ** -0.5)
        return normal(*s.shape, dtype=dtype, scale=0.1, offset=1.0 if name == "weight" else 0.0)

    p = jax.tree_util.tree_map_with_path(weights, arrays)
    return Built(run, (p, normal(b, 3, sides[0], sides[0], dtype=dtype)))
