"""Methods of science and learning in other spellings and odd shapes, written before anybody had seen a plan of them."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads.registry import (
    Built,
    Size,
    booleans,
    gain,
    half,
    integers,
    normal,
    pick,
    program,
    weight,
)
from benchmarks.workloads.unseen_models import _norm, _rms


@program("stein-gradient", "unseen")
def _stein(size: Size) -> Built:
    """Stein variational gradient descent: particles that attract by scores and repel by a kernel."""
    particles, n = pick(size, (4096, 64), (1024, 32), (6, 3))

    def direction(x: Any, score: Any) -> Any:
        difference = x[:, None, :] - x[None, :, :]
        squared = (difference**2).sum(-1)
        k = jnp.exp(-squared / (2 * n))
        repel = jnp.einsum("ij,ijd->id", k, difference) / n
        return (k @ score + repel) / particles

    return Built(direction, (normal(particles, n), normal(particles, n)))


@program("softened-bodies", "unseen")
def _bodies(size: Size) -> Built:
    """Accelerations and the potential of bodies that attract each other, softened."""
    bodies = pick(size, 16384, 2048, 6)

    def forces(x: Any, mass: Any) -> Any:
        d = x[None] - x[:, None]
        r2 = jnp.sum(d * d, -1) + 1e-2
        inverse = jax.lax.rsqrt(r2)
        return jnp.sum(mass[None, :, None] * d * (inverse**3)[..., None], 1), -jnp.sum(mass[None] * inverse, 1)

    return Built(forces, (normal(bodies, 3), normal(bodies, scale=0.1, offset=1.0)))


@program("neighbour-embedding-gradient", "unseen")
def _neighbours(size: Size) -> Built:
    """The gradient of an embedding whose affinities have heavy tails, against given ones."""
    points = pick(size, 4096, 1024, 6)

    def gradient(p: Any, y: Any) -> Any:
        squared = jnp.sum(jnp.square(y[:, None] - y[None]), -1)
        w = 1 / (1 + squared) * (1 - jnp.eye(points))
        q = w / w.sum()
        force = (p - q) * w
        loss = jnp.sum(p * jnp.log((p + 1e-12) / (q + 1e-12)))
        return 4 * (force.sum(1)[:, None] * y - force @ y), loss

    return Built(gradient, (normal(points, points, scale=1e-8, offset=6e-8), normal(points, 2)))


@program("radiance-rendering", "unseen")
def _radiance(size: Size) -> Built:
    """Colours of rays from densities and colours of samples along them, with depth and opacity."""
    rays, samples = pick(size, (65536, 192), (8192, 64), (6, 5))

    def render(density: Any, colour: Any, depths: Any) -> Any:
        steps = jnp.concatenate([depths[:, 1:] - depths[:, :-1], jnp.full_like(depths[:, :1], 1e10)], -1)
        alpha = 1 - jnp.exp(-jax.nn.relu(density) * steps)
        through = jnp.cumprod(jnp.concatenate([jnp.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        w = alpha * through
        return (w[..., None] * jax.nn.sigmoid(colour)).sum(-2), (w * depths).sum(-1), w.sum(-1)

    return Built(
        render, (normal(rays, samples), normal(rays, samples, 3), normal(rays, samples, scale=0.1, offset=2.0))
    )


@program("hidden-markov-forward", "unseen")
def _markov(size: Size) -> Built:
    """Log likelihoods of sequences under a hidden Markov model, one step after the other."""
    batch, steps, states, symbols = pick(size, (256, 64, 128, 1000), (32, 32, 64, 100), (2, 3, 4, 5))

    def likelihood(initial: Any, transition: Any, emission: Any, observed: Any) -> Any:
        log_a, log_b = jax.nn.log_softmax(transition, -1), jax.nn.log_softmax(emission, -1)

        def step(alpha: Any, symbol: Any) -> Any:
            return jax.nn.logsumexp(alpha[:, :, None] + log_a[None], axis=1) + log_b[:, symbol].T, None

        start = jax.nn.log_softmax(initial)[None] + log_b[:, observed[0]].T
        last, _ = jax.lax.scan(step, start, observed[1:])
        return jax.nn.logsumexp(last, -1)

    return Built(
        likelihood,
        (normal(states), normal(states, states), normal(states, symbols), integers(steps, batch, below=symbols)),
    )


@program("vector-quantiser", "unseen")
def _quantiser(size: Size) -> Built:
    """Nearest codes of latent vectors, with losses of commitment and the perplexity of the codes."""
    rows, codes, n = pick(size, (32768, 1024, 64), (4096, 512, 32), (8, 5, 3))

    def quantise(z: Any, book: Any) -> Any:
        distance = jnp.sum(z**2, -1, keepdims=True) - 2 * jnp.dot(z, book.T) + jnp.sum(book**2, -1)
        nearest = jnp.argmin(distance, -1)
        hot = jax.nn.one_hot(nearest, codes)
        quantised = hot @ book
        loss = jnp.mean((jax.lax.stop_gradient(quantised) - z) ** 2) * 0.25 + jnp.mean((quantised - z) ** 2)
        share = hot.mean(0)
        return z + jax.lax.stop_gradient(quantised - z), loss, jnp.exp(-jnp.sum(share * jnp.log(share + 1e-10)))

    return Built(quantise, (normal(rows, n), normal(codes, n)))


@program("two-towers-loss", "unseen")
def _towers(size: Size) -> Built:
    """Users and items in two towers, a softmax over the items of the batch with a correction for popularity, and its gradient."""
    batch, n, width = pick(size, (8192, 256, 128), (1024, 128, 64), (6, 8, 4))

    def loss(w: Any, users: Any, items: Any, log_share: Any, ids: Any) -> Any:
        u, v = (jax.nn.relu(x @ w[k][0]) @ w[k][1] for k, x in (("user", users), ("item", items)))
        u, v = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (u, v))
        logits = u @ v.T / 0.05 - log_share[None]
        same = (ids[:, None] == ids[None]) & ~jnp.eye(batch, dtype=bool)
        logits = jnp.where(same, -1e9, logits)
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits, -1)))

    w = {k: [weight(n, 2 * n), weight(2 * n, width)] for k in ("user", "item")}
    rows = normal(batch, n)
    return Built(jax.value_and_grad(loss), (w, rows, rows, normal(batch), integers(batch, below=batch)))


@program("graph-attention-leaky", "unseen")
def _graph_attention(size: Size) -> Built:
    """Attention over neighbours in a graph given as a matrix, with scores that are sums of two terms."""
    nodes, heads, n = pick(size, (4096, 4, 64), (1024, 2, 32), (6, 2, 4))
    dtype = half(size)

    def layer(x: Any, adjacent: Any, w: Any, a: Any, b: Any) -> Any:
        h = jnp.einsum("nf,fhd->hnd", x, w)
        e = jax.nn.leaky_relu((h * a[:, None]).sum(-1)[:, :, None] + (h * b[:, None]).sum(-1)[:, None, :], 0.2)
        p = jax.nn.softmax(jnp.where(adjacent[None], e, -1e9), -1)
        return jax.nn.elu(jnp.einsum("hij,hjd->ihd", p, h).reshape(nodes, -1))

    vectors = normal(heads, n, dtype=dtype, scale=0.3)
    w = normal(n, heads, n, dtype=dtype, scale=n**-0.5)
    return Built(layer, (normal(nodes, n, dtype=dtype), booleans(nodes, nodes), w, vectors, vectors))


@program("point-attention", "unseen")
def _points(size: Size) -> Built:
    """Scores of features and of squared distances of points, which also move along their differences."""
    points, heads, d = pick(size, (1024, 8, 32), (256, 4, 16), (5, 2, 4))

    def layer(q: Any, k: Any, v: Any, x: Any, scale: Any) -> Any:
        distance = jnp.sum((x[:, None] - x[None]) ** 2, -1)
        s = jnp.einsum("ihd,jhd->hij", q, k) / math.sqrt(d) - jax.nn.softplus(scale)[:, None, None] * distance
        p = jax.nn.softmax(s, -1)
        return jnp.einsum("hij,jhd->ihd", p, v), x + jnp.einsum("ij,ijc->ic", p.mean(0), x[:, None] - x[None])

    f = normal(points, heads, d)
    return Built(layer, (f, f, f, normal(points, 3), normal(heads)))


@program("spectrogram-features", "unseen")
def _spectrogram(size: Size) -> Built:
    """Mel features of frames of sound: a power spectrum, bands, a logarithm, and a norm over time."""
    batch, frames, bins, bands = pick(size, (32, 1500, 201, 80), (4, 300, 201, 80), (2, 4, 5, 3))

    def features(real: Any, imaginary: Any, mel: Any) -> Any:
        power = real**2 + imaginary**2
        logs = jnp.log10(jnp.maximum(jnp.einsum("btf,fm->btm", power, jnp.abs(mel)), 1e-10))
        logs = jnp.maximum(logs, logs.max(axis=(1, 2), keepdims=True) - 8.0)
        return (logs - logs.mean(1, keepdims=True)) / (logs.std(1, keepdims=True) + 1e-5)

    x = normal(batch, frames, bins)
    return Built(features, (x, x, normal(bins, bands)))


@program("ensemble-of-networks", "unseen")
def _ensemble(size: Size) -> Built:
    """Many small networks on the same rows, their mean and their disagreement."""
    members, rows, n, width = pick(size, (16, 4096, 32, 256), (8, 512, 16, 64), (2, 4, 3, 4))

    def predict(w: Any, x: Any) -> Any:
        def one(p: Any) -> Any:
            h = jnp.tanh(x @ p["a"] + p["b"])
            h = jnp.tanh(h @ p["c"] + p["d"])
            return h @ p["e"]

        y = jax.vmap(one)(w)
        return y.mean(0), jnp.log(y.var(0) + 1e-6)

    w = {
        "a": normal(members, n, width, scale=n**-0.5),
        "b": normal(members, 1, width),
        "c": normal(members, width, width, scale=width**-0.5),
    }
    return Built(
        predict,
        (w | {"d": normal(members, 1, width), "e": normal(members, width, 2, scale=width**-0.5)}, normal(rows, n)),
    )


@program("mixture-density-loss", "unseen")
def _mixture_density(size: Size) -> Built:
    """The likelihood of targets under mixtures that a network gives, and its gradient."""
    rows, parts, n, outputs = pick(size, (65536, 32, 128, 4), (8192, 16, 64, 2), (6, 3, 4, 2))

    def loss(w: Any, x: Any, y: Any) -> Any:
        h = jax.nn.relu(x @ w["h"])
        mean = (h @ w["mean"]).reshape(rows, parts, outputs)
        log_scale = jnp.clip((h @ w["scale"]).reshape(rows, parts, outputs), -5, 5)
        z = (y[:, None] - mean) * jnp.exp(-log_scale)
        each = -0.5 * (z**2).sum(-1) - log_scale.sum(-1) - 0.5 * outputs * math.log(2 * math.pi)
        return -jax.nn.logsumexp(jax.nn.log_softmax(h @ w["share"], -1) + each, -1).mean()

    w = {
        "h": weight(n, n),
        "mean": weight(n, parts * outputs),
        "scale": weight(n, parts * outputs),
        "share": weight(n, parts),
    }
    return Built(jax.value_and_grad(loss), (w, normal(rows, n), normal(rows, outputs)))


@program("pooling-by-attention", "unseen")
def _pooling(size: Size) -> Built:
    """Bags of instances pooled by gated attention, with lengths of bags, then classified."""
    bags, length, n, width, classes = pick(size, (64, 1000, 512, 128, 10), (16, 200, 128, 64, 10), (2, 4, 6, 3, 2))
    dtype = half(size)

    def classify(x: Any, lengths: Any, w: Any) -> Any:
        a = (jnp.tanh(x @ w["v"]) * jax.nn.sigmoid(x @ w["u"])) @ w["w"]
        a = jnp.where(jnp.arange(length)[None, :, None] < lengths[:, None, None], a, -jnp.inf)
        p = jax.nn.softmax(a.astype(jnp.float32), axis=1).astype(dtype)
        pooled = jnp.sum(p * x, axis=1)
        return jax.nn.log_softmax((pooled @ w["c"]).astype(jnp.float32)), p[..., 0]

    w = {
        "v": weight(n, width, dtype=dtype),
        "u": weight(n, width, dtype=dtype),
        "w": weight(width, 1, dtype=dtype),
        "c": weight(n, classes, dtype=dtype),
    }
    return Built(classify, (normal(bags, length, n, dtype=dtype), integers(bags, below=length), w))


@program("correlation-attention", "unseen")
def _correlation(size: Size) -> Built:
    """Matching of two images: similarities of all pairs of pixels, softmaxes along both sides, and expected positions."""
    pixels, n = pick(size, (4096, 256), (1024, 64), (6, 4))
    dtype = half(size)

    def match(a: Any, b: Any, positions: Any) -> Any:
        s = (a @ b.T).astype(jnp.float32) / n**0.5 / 0.1
        p = jax.nn.softmax(s, 0) * jax.nn.softmax(s, 1)
        return (jax.nn.softmax(s, -1) @ positions), p.max(1), p.argmax(1)

    return Built(match, (normal(pixels, n, dtype=dtype), normal(pixels, n, dtype=dtype), normal(pixels, 2)))


@program("differential-attention", "unseen")
def _differential(size: Size) -> Built:
    """The difference of two causal attentions over the same values, normalised."""
    length, heads, d = pick(size, (2048, 8, 64), (512, 2, 32), (6, 2, 4))
    dtype = half(size)

    def attention(q: Any, k: Any, v: Any, weight_: Any, scale: Any) -> Any:
        s = jnp.einsum("cthd,cshd->chts", q, k) * d**-0.5
        s = jnp.where(jnp.tril(jnp.ones((length, length), bool)), s, -jnp.inf)
        p = jax.nn.softmax(s.astype(jnp.float32), -1)
        p = (p[0] - jax.nn.sigmoid(weight_)[:, None, None] * p[1]).astype(dtype)
        return _rms(jnp.einsum("hts,shd->thd", p, v), scale) * 0.2

    q = normal(2, length, heads, d, dtype=dtype)
    return Built(
        attention,
        (q, q, normal(length, heads, 2 * d, dtype=dtype), normal(heads), normal(2 * d, dtype=dtype, scale=0.1)),
    )


@program("chunked-attention-scan", "unseen")
def _chunked(size: Size) -> Built:
    """Attention that a user has written in chunks of queries with a scan, to save memory."""
    length, heads, d, chunk = pick(size, (4096, 16, 80, 512), (1024, 4, 40, 256), (8, 2, 4, 4))
    dtype = half(size)

    def attention(q: Any, k: Any, v: Any) -> Any:
        def step(_: Any, part: Any) -> Any:
            s = jnp.einsum("qhd,khd->hqk", part, k, preferred_element_type=jnp.float32) / math.sqrt(d)
            e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
            return None, jnp.einsum("hqk,khd->qhd", (e / e.sum(-1, keepdims=True)).astype(dtype), v)

        _, out = jax.lax.scan(jax.checkpoint(step), None, q.reshape(-1, chunk, heads, d))
        return out.reshape(length, heads, d)

    x = normal(length, heads, d, dtype=dtype)
    return Built(attention, (x, x, x))


@program("cached-decoder-step", "unseen")
def _cached(size: Size) -> Built:
    """A step of a decoder layer that writes into a cache at each row's length, and attends to what is filled."""
    batch, length, n, heads, groups, width = pick(
        size, (8, 2048, 2048, 8, 2, 5632), (2, 512, 256, 2, 2, 704), (2, 6, 16, 2, 2, 8)
    )
    d, dtype = n // (heads * groups), half(size)

    def step(x: Any, keys: Any, values: Any, at: Any, w: Any, scales: Any) -> Any:
        h = _rms(x, scales[0])
        q = (h @ w["q"]).reshape(batch, heads, groups, d)
        write = jax.vmap(lambda cache, new, i: jax.lax.dynamic_update_slice(cache, new[None], (i, 0, 0)))
        keys = write(keys, (h @ w["k"]).reshape(batch, heads, d), at)
        values = write(values, (h @ w["v"]).reshape(batch, heads, d), at)
        s = jnp.einsum("bhgd,bshd->bhgs", q, keys) * d**-0.5
        s = jnp.where((jnp.arange(length) <= at[:, None])[:, None, None], s, jnp.finfo(dtype).min)
        o = jnp.einsum("bhgs,bshd->bhgd", jax.nn.softmax(s.astype(jnp.float32), -1).astype(dtype), values)
        x = x + o.reshape(batch, n) @ w["o"]
        h = _rms(x, scales[1])
        return x + (jax.nn.gelu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], keys, values

    w = {"q": weight(n, n, dtype=dtype), "o": weight(n, n, dtype=dtype)}
    w |= {k: weight(n, heads * d, dtype=dtype) for k in "kv"}
    w |= {k: weight(n, width, dtype=dtype) for k in ("gate", "up")} | {"down": weight(width, n, dtype=dtype)}
    cache = normal(batch, length, heads, d, dtype=dtype)
    scales = [normal(n, dtype=dtype, scale=0.1)] * 2
    return Built(step, (normal(batch, n, dtype=dtype), cache, cache, integers(batch, below=length - 1), w, scales))


@program("z-loss-cross-entropy", "unseen")
def _z_loss(size: Size) -> Built:
    """Cross-entropy of tied logits with smoothed labels, ignored tokens and a z-loss, and its gradient in the states."""
    tokens, n, vocabulary = pick(size, (2048, 1024, 32128), (256, 128, 4000), (4, 8, 10))
    dtype = half(size)

    def loss(h: Any, table: Any, labels: Any) -> Any:
        logits = (h @ table.T).astype(jnp.float32)
        z = jax.nn.logsumexp(logits, -1)
        picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], 1)[:, 0]
        each = z - 0.9 * picked - 0.1 * logits.mean(-1) + 1e-4 * z**2
        valid = labels > 3
        return jnp.where(valid, each, 0).sum() / jnp.maximum(valid.sum(), 1)

    arguments = normal(tokens, n, dtype=dtype), normal(vocabulary, n, dtype=dtype, scale=n**-0.5)
    return Built(jax.value_and_grad(loss), (*arguments, integers(tokens, below=vocabulary)))


@program("convolution-next-block", "unseen")
def _convolution_next(size: Size) -> Built:
    """A depthwise convolution, a norm of channels, an MLP of each pixel with a response norm, and a residual."""
    batch, side, n = pick(size, (32, 56, 96), (2, 28, 96), (1, 4, 8))
    dtype = half(size)

    def block(x: Any, kernel: Any, scale: Any, up: Any, response: Any, down: Any) -> Any:
        h = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=n
        )
        h = jax.nn.gelu(_norm(h, scale) @ up)
        size_ = jnp.sqrt(jnp.sum(jnp.square(h.astype(jnp.float32)), axis=(1, 2), keepdims=True))
        h = response * (h * (size_ / (size_.mean(-1, keepdims=True) + 1e-6)).astype(dtype)) + h
        return x + h @ down

    w = weight(n, 4 * n, dtype=dtype), normal(4 * n, dtype=dtype, scale=0.1), weight(4 * n, n, dtype=dtype)
    return Built(
        block,
        (normal(batch, side, side, n, dtype=dtype), normal(7, 7, 1, n, dtype=dtype, scale=1 / 7), gain(n, dtype), *w),
    )


@program("set-distance", "unseen")
def _sets(size: Size) -> Built:
    """Two-sample distances by a mixture of kernels, and chamfer distances of two clouds."""
    rows, n = pick(size, (4096, 32), (1024, 16), (6, 3))

    def distances(x: Any, y: Any) -> Any:
        def squared(a: Any, b: Any) -> Any:
            return jnp.maximum((a**2).sum(-1)[:, None] + (b**2).sum(-1)[None] - 2 * a @ b.T, 0)

        def kernel(d: Any) -> Any:
            return sum(jnp.exp(-d / (2.0 * s * n)) for s in (0.5, 1.0, 2.0))

        between = squared(x, y)
        mmd = kernel(squared(x, x)).mean() + kernel(squared(y, y)).mean() - 2 * kernel(between).mean()
        return mmd, between.min(1).mean() + between.min(0).mean()

    return Built(distances, (normal(rows, n), normal(rows, n, offset=0.2)))


@program("recurrent-mixer", "unseen")
def _mixer(size: Size) -> Built:
    """A shift of tokens, gates, a squared ReLU and a norm of groups, as in recurrent language models."""
    batch, tokens, n, width = pick(size, (2, 1024, 2048, 7168), (1, 128, 256, 896), (1, 4, 8, 12))
    dtype = half(size)

    def mix(x: Any, scale: Any, mu: Any, key: Any, value: Any, receptance: Any) -> Any:
        h = _norm(x, scale)
        before = jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        k = (h * mu[0] + before * (1 - mu[0])) @ key
        r = (h * mu[1] + before * (1 - mu[1])) @ receptance
        return x + jax.nn.sigmoid(r) * (jnp.square(jax.nn.relu(k)) @ value)

    w = weight(n, width, dtype=dtype), weight(width, n, dtype=dtype), weight(n, n, dtype=dtype)
    return Built(mix, (normal(batch, tokens, n, dtype=dtype), gain(n, dtype), normal(2, n, dtype=dtype, scale=0.2), *w))


@program("guided-denoising-step", "unseen")
def _denoise(size: Size) -> Built:
    """A step of a sampler: guidance, limits of each image by a quantile of its size, and the next noise level."""
    batch, side = pick(size, (16, 256), (4, 64), (2, 4))

    def step(x: Any, with_text: Any, without: Any, noise: Any, level: Any) -> Any:
        e = without + 7.5 * (with_text - without)
        factor = with_text.std((1, 2, 3), keepdims=True) / e.std((1, 2, 3), keepdims=True)
        e = 0.7 * e * factor + 0.3 * e
        clean = (x - jnp.sqrt(1 - level) * e) / jnp.sqrt(level)
        limit = jnp.maximum(jnp.abs(clean).max((1, 2, 3), keepdims=True), 1.0)
        clean = jnp.clip(clean, -limit, limit) / limit
        return jnp.sqrt(level * 0.9) * clean + jnp.sqrt(1 - level * 0.9) * noise

    x = normal(batch, side, side, 3)
    return Built(step, (x, x, x, x, normal(batch, 1, 1, 1, scale=0.01, offset=0.5)))
