"""Layers of models of code, language, genomes and robots of the tenth set: its author had seen no plan."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.haiku_modules import _transformed
from benchmarks.workloads.layers import layer_norm
from benchmarks.workloads.ninth_models import dense, linear
from benchmarks.workloads.registry import Built, Random, Size, gain, half, integers, like, normal, pick, program, weight

GROUP = "tenth"


def rotate(x, position, base=10000.0):
    """This function rotates the two halves of each head's features [..., heads, features] by the position [...]."""
    d = x.shape[-1]
    angle = position[..., None].astype(jnp.float32) * base ** (-np.arange(0, d, 2, dtype=np.float32) / d)
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@program("starcoder2-many-adapters-ring-window-decode", GROUP)
def _starcoder2(size: Size) -> Built:
    """This gives one decoding step of two layers of StarCoder2 for 16 requests, each of which has its own LoRA adapter.

    The adapters of the queries and values are gathered by request from a stack of adapters with ranks that are scaled apart; keys
    and values of the last tokens lie in a ring that wraps around, and new ones are written over the oldest.
    """
    b, n, h, groups, d, wide, window, adapters, rank = pick(
        size,
        (16, 3072, 24, 2, 128, 12288, 2048, 6, 16),
        (16, 768, 6, 2, 128, 3072, 384, 6, 16),
        (16, 12, 4, 2, 4, 20, 8, 3, 2),
    )
    dtype = half(size)

    def norm(p, x):
        return layer_norm(x, p["scale"], p["shift"])

    def adapt(p, x, which, scales):
        low = jnp.einsum("bn,bnr->br", x, p["a"][which])
        return jnp.einsum("br,brm->bm", low, p["b"][which]) * scales[which][:, None].astype(x.dtype)

    def layer(p, x, cache, position, which, scales):
        y = norm(p["norm1"], x)
        q = (dense(p["q"], y) + adapt(p["adapt_q"], y, which, scales)).reshape(b, h, d)
        k = dense(p["k"], y).reshape(b, groups, d)
        v = (dense(p["v"], y) + adapt(p["adapt_v"], y, which, scales)).reshape(b, groups, d)
        q, k = rotate(q, position, 999999.0), rotate(k, position, 999999.0)
        rows, slot = jnp.arange(b), position % window
        keys, values = cache["k"].at[rows, slot].set(k), cache["v"].at[rows, slot].set(v)
        scores = jnp.einsum("bghd,bsgd->bghs", q.reshape(b, groups, h // groups, d), keys) * d**-0.5
        written = jnp.arange(window)[None, :] <= position[:, None]
        scores = jnp.where(written[:, None, None, :], scores.astype(jnp.float32), -jnp.inf)
        probs = jax.nn.softmax(scores, axis=-1).astype(dtype)
        out = jnp.einsum("bghs,bsgd->bghd", probs, values).reshape(b, h * d)
        x = x + dense(p["out"], out)
        x = x + dense(p["down"], jax.nn.gelu(dense(p["up"], norm(p["norm2"], x)), approximate=True))
        return x, {"k": keys, "v": values}

    def step(p, x, caches, position, which, scales):
        new = []
        for weights, cache in zip(p["layers"], caches, strict=True):
            x, written = layer(weights, x, cache, position, which, scales)
            new.append(written)
        return norm(p["norm"], x), new

    def norms():
        return {"scale": gain(n, dtype), "shift": normal(n, dtype=dtype, scale=0.02)}

    def adapter(outputs):
        return {"a": weight(adapters, n, rank, dtype=dtype), "b": weight(adapters, rank, outputs, dtype=dtype)}

    one = {
        "norm1": norms(),
        "norm2": norms(),
        "q": linear(n, h * d, dtype),
        "k": linear(n, groups * d, dtype),
        "v": linear(n, groups * d, dtype),
        "adapt_q": adapter(h * d),
        "adapt_v": adapter(groups * d),
        "out": linear(h * d, n, dtype),
        "up": linear(n, wide, dtype),
        "down": linear(wide, n, dtype),
    }
    cache = {name: normal(b, window, groups, d, dtype=dtype) for name in ("k", "v")}
    params = {"norm": norms(), "layers": [one] * 2}
    inputs = (integers(b, below=2 * window), integers(b, below=adapters), normal(adapters, scale=0.1, offset=0.5))
    return Built(step, (params, normal(b, n, dtype=dtype), [cache] * 2, *inputs))


@program("dbrx-clipped-heads-scanned-experts-prefill", GROUP)
def _dbrx(size: Size) -> Built:
    """This gives a layer of DBRX in prefill, whose queries, keys and values are clipped and whose experts are scanned.

    Each token keeps the four best of sixteen experts with weights that are divided by their sum; a scan runs every expert over all
    tokens and adds its outputs times the weight, which is zero for tokens that did not choose it.
    """
    b, t, n, h, groups, d, wide, experts, best = pick(
        size,
        (2, 384, 2048, 16, 4, 128, 3584, 16, 4),
        (2, 90, 256, 4, 2, 64, 448, 16, 4),
        (2, 7, 12, 4, 2, 4, 10, 6, 4),
    )
    dtype, clip = half(size), 8.0

    def norm(scale, x):
        return layer_norm(x, scale, jnp.zeros((), dtype))

    def attend(p, x, lengths):
        qkv = jnp.clip(x @ p["qkv"], -clip, clip)
        q, k, v = jnp.split(qkv, [h * d, (h + groups) * d], axis=-1)
        position = jnp.broadcast_to(jnp.arange(t), (b, t))
        q = rotate(q.reshape(b, t, h, d), position, 500000.0)
        k = jnp.repeat(rotate(k.reshape(b, t, groups, d), position, 500000.0), h // groups, axis=2)
        v = jnp.repeat(v.reshape(b, t, groups, d), h // groups, axis=2)
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) * d**-0.5
        there = jnp.arange(t)[None, :] <= lengths[:, None]
        seen = jnp.tril(jnp.ones((t, t), bool))[None] & there[:, None, :]
        scores = jnp.where(seen[:, None], scores, jnp.finfo(dtype).min)
        probs = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(dtype)
        return jnp.einsum("bhij,bjhd->bihd", probs, v).reshape(b, t, h * d) @ p["out"]

    def feed(p, x):
        x = x.reshape(b * t, n)
        probs = jax.nn.softmax((x @ p["router"]).astype(jnp.float32), axis=-1)
        top, index = lax.top_k(probs, best)
        top = top / jnp.sum(jnp.abs(top), axis=-1, keepdims=True)

        def expert(total, one):
            e, gate, up, down = one
            share = jnp.sum(jnp.where(index == e, top, 0.0), axis=-1, keepdims=True)
            y = (jax.nn.silu(x @ gate) * (x @ up)) @ down
            return total + y.astype(jnp.float32) * share, jnp.mean(share)

        start = jnp.zeros((b * t, n), jnp.float32)
        total, load = lax.scan(expert, start, (jnp.arange(experts), p["gate"], p["up"], p["down"]))
        return total.astype(dtype).reshape(b, t, n), load

    def layer(p, x, lengths):
        x = x + attend(p, norm(p["norm1"], x), lengths)
        y, load = feed(p, norm(p["norm2"], x))
        return x + y, load

    params = {
        "norm1": gain(n, dtype),
        "norm2": gain(n, dtype),
        "qkv": weight(n, (h + 2 * groups) * d, dtype=dtype),
        "out": weight(h * d, n, dtype=dtype),
        "router": weight(n, experts, dtype=dtype),
        "gate": weight(experts, n, wide, dtype=dtype),
        "up": weight(experts, n, wide, dtype=dtype),
        "down": weight(experts, wide, n, dtype=dtype),
    }
    return Built(layer, (params, normal(b, t, n, dtype=dtype), integers(b, below=t)))


def _relative_features(t, features):
    """This function gives Enformer's basis of relative positions: exponentials, central masks and gamma densities, with signs."""
    distances = np.arange(-t + 1, t, dtype=np.float64)
    away, count = np.abs(distances)[:, None], features // 6
    half_lives = 2.0 ** np.linspace(3.0, max(np.log2(t), 3.5), count)
    exponential = np.exp(-np.log(2.0) / half_lives * away)
    central = (2.0 ** np.arange(1, count + 1) - 1 > away).astype(np.float64)
    mean, deviation = np.linspace(t / count, t, count), t / (2 * count)
    concentration, rate = (mean / deviation) ** 2, mean / deviation**2
    constant = concentration * np.log(rate) - np.array([math.lgamma(c) for c in concentration])
    gamma = np.exp((concentration - 1.0) * np.log(np.maximum(away, 1e-3)) - rate * away + constant) + 1e-8
    basis = np.concatenate([exponential, central, gamma / gamma.max(axis=0)], axis=1)
    return np.concatenate([basis, np.sign(distances)[:, None] * basis], axis=1).astype(np.float32)


@program("enformer-pooled-tower-relative-block-haiku", GROUP)
def _enformer(size: Size) -> Built:
    """This gives a short Enformer: convolutions over one-hot DNA that softmax pooling halves, a relative block, and tracks.

    Pooling weights the two neighbours by a softmax of a product with a matrix; attention adds a content and a relative term, each
    with its own bias of the queries, and shifts the relative one; the outputs of a cropped middle are made positive.
    """
    import haiku as hk

    b, bases, n, h, keys, values, tracks, cut = pick(
        size, (2, 4096, 1536, 8, 64, 192, 5313, 64), (1, 1024, 384, 4, 32, 96, 300, 13), (2, 32, 12, 2, 6, 6, 5, 1)
    )
    dtype, t = half(size), bases // 4
    basis = _relative_features(t, values).astype(dtype)
    ones, zeros = hk.initializers.Constant(1.0), hk.initializers.Constant(0.0)

    def activate(x):
        return jax.nn.sigmoid(1.702 * x) * x

    def batch_norm(x, name):
        width = x.shape[-1]
        scale, shift, mean, variance = (
            hk.get_parameter(f"{name}_{part}", (width,), dtype, init)
            for part, init in (("scale", ones), ("shift", zeros), ("mean", zeros), ("variance", ones))
        )
        return (x - mean) * lax.rsqrt(jnp.abs(variance) + 1e-5) * scale + shift

    def convolve(x, width, taps, name):
        return hk.Conv1D(width, taps, name=f"{name}_conv")(activate(batch_norm(x, name)))

    def pool(x, name):
        pairs = x.reshape(b, -1, 2, x.shape[-1])
        mixing = hk.get_parameter(f"{name}_pool", (x.shape[-1],) * 2, dtype, hk.initializers.Identity(2.0))
        return jnp.sum(pairs * jax.nn.softmax(pairs @ mixing, axis=-2), axis=-2)

    def shift(x):
        padded = jnp.concatenate([jnp.zeros_like(x[..., :1]), x], axis=-1)
        return padded.reshape(b, h, 2 * t, t)[:, :, 1:].reshape(b, h, t, 2 * t - 1)[..., :t]

    def attend(x):
        def heads(inputs, width, name):
            return hk.Linear(h * width, with_bias=False, name=name)(inputs).reshape(*inputs.shape[:-1], h, width)

        q, k, v = heads(x, keys, "q") * keys**-0.5, heads(x, keys, "k"), heads(x, values, "v")
        relative = heads(jnp.asarray(basis), keys, "relative")
        content, place = (
            hk.get_parameter(name, (1, 1, h, keys), dtype, hk.initializers.RandomNormal())
            for name in ("content_bias", "place_bias")
        )
        scores = jnp.einsum("bihd,bjhd->bhij", q + content, k)
        scores = scores + shift(jnp.einsum("bihd,rhd->bhir", q + place, relative))
        out = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores, axis=-1), v)
        return hk.Linear(n, name="attention_out")(out.reshape(b, t, h * values))

    def norm(x, name):
        return hk.LayerNorm(-1, create_scale=True, create_offset=True, name=name)(x)

    def model(letters):
        x = jax.nn.one_hot(letters, 4, dtype=dtype)
        x = hk.Conv1D(n // 2, 15, name="stem")(x)
        x = pool(x + convolve(x, n // 2, 1, "stem_pointwise"), "stem")
        x = convolve(x, n, 5, "tower")
        x = pool(x + convolve(x, n, 1, "tower_pointwise"), "tower")
        x = x + attend(norm(x, "norm1"))
        y = jax.nn.relu(hk.Linear(2 * n, name="up")(norm(x, "norm2")))
        x = x + hk.Linear(n, name="down")(y)
        x = activate(convolve(x[:, cut:-cut], 2 * n, 1, "final"))
        return jax.nn.softplus(hk.Linear(tracks, name="tracks")(x)).astype(jnp.float32)

    return _transformed(size, model, integers(b, bases, below=4))


@program("diffusion-policy-film-unet-denoising-nnx", GROUP)
def _diffusion_policy(size: Size) -> Built:
    """This gives actions of a robot by Diffusion Policy: a U-Net over the horizon predicts them clean in DDIM steps.

    Residual blocks convolve in time with group norms and Mish; the observation and the time of the noise scale and shift the
    channels (FiLM); a strided convolution halves the horizon and a transposed one doubles it again.
    """
    from flax import nnx

    b, horizon, actions, seen, c, steps = pick(
        size, (56, 24, 14, 274, 256, 6), (12, 24, 14, 66, 64, 4), (2, 8, 3, 5, 16, 2)
    )
    dtype, train_steps, width = half(size), 100, 2 * c
    angle = (np.arange(train_steps + 1) / train_steps + 0.008) / 1.008 * np.pi / 2
    kept = np.clip(np.cos(angle) ** 2 / np.cos(angle[0]) ** 2, 1e-3, 1.0).astype(np.float32)
    times = np.linspace(train_steps - 1, 0, steps + 1).astype(np.int32)

    def mish(x):
        return x * jnp.tanh(jax.nn.softplus(x))

    def conv(i, o, taps, rngs, strides=1):
        return nnx.Conv(i, o, (taps,), strides=strides, padding="SAME", dtype=dtype, param_dtype=dtype, rngs=rngs)

    def lin(i, o, rngs):
        return nnx.Linear(i, o, dtype=dtype, param_dtype=dtype, rngs=rngs)

    class Block(nnx.Module):
        def __init__(self, i, o, rngs):
            self.convs = nnx.List([conv(i, o, 5, rngs), conv(o, o, 5, rngs)])
            self.norms = nnx.List([nnx.GroupNorm(o, 8, dtype=dtype, param_dtype=dtype, rngs=rngs) for _ in range(2)])
            self.film, self.skip = lin(seen + c, 2 * o, rngs), conv(i, o, 1, rngs)

        def __call__(self, x, condition):
            y = mish(self.norms[0](self.convs[0](x)))
            scale, shift = jnp.split(self.film(mish(condition))[:, None, :], 2, axis=-1)
            y = mish(self.norms[1](self.convs[1](scale * y + shift)))
            return y + self.skip(x)

    class Denoiser(nnx.Module):
        def __init__(self, rngs):
            self.time1, self.time2 = lin(c, 4 * c, rngs), lin(4 * c, c, rngs)
            self.down, self.middle = Block(actions, c, rngs), Block(c, width, rngs)
            self.deep, self.up = Block(width, width, rngs), Block(2 * c, c, rngs)
            self.shrink = conv(c, c, 3, rngs, strides=2)
            self.grow = nnx.ConvTranspose(width, c, (4,), strides=2, dtype=dtype, param_dtype=dtype, rngs=rngs)
            self.out = conv(c, actions, 1, rngs)

        def __call__(self, x, observation, time):
            phase = time * np.exp(-np.log(10000.0) * np.arange(c // 2) / (c // 2 - 1)).astype(np.float32)
            phase = jnp.concatenate([jnp.sin(phase), jnp.cos(phase)]).astype(dtype)
            embedded = self.time2(mish(self.time1(phase)))
            condition = jnp.concatenate([observation, jnp.broadcast_to(embedded, (b, c))], axis=-1)
            first = self.down(x, condition)
            y = self.deep(self.middle(self.shrink(first), condition), condition)
            y = self.up(jnp.concatenate([self.grow(y), first], axis=-1), condition)
            return self.out(y)

    graph, state = nnx.split(nnx.eval_shape(lambda: Denoiser(nnx.Rngs(0))))

    def sample(state, noise, observation):
        model = nnx.merge(graph, state)

        def step(x, pair):
            now, after = pair
            a, a_after = jnp.asarray(kept)[now], jnp.asarray(kept)[after]
            predicted = model(x.astype(dtype), observation, now.astype(jnp.float32)).astype(jnp.float32)
            clean = jnp.clip(predicted, -1.0, 1.0)
            predicted = (x - jnp.sqrt(a) * clean) * lax.rsqrt(1.0 - a)
            return jnp.sqrt(a_after) * clean + jnp.sqrt(1.0 - a_after) * predicted, jnp.mean(jnp.abs(clean))

        return lax.scan(step, noise, (times[:-1], times[1:]))

    def centred(path, leaf):
        return dataclasses.replace(leaf, offset=0.0) if "bias" in jax.tree_util.keystr(path) else leaf

    params = jax.tree_util.tree_map_with_path(
        centred, like(state, dtype), is_leaf=lambda leaf: isinstance(leaf, Random)
    )
    return Built(sample, (params, normal(b, horizon, actions), normal(b, seen, dtype=dtype)))
