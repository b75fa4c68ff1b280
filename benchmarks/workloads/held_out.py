"""Programs of the same kinds that were not looked at while the price was built: pieces of other models, losses and methods, as
their users write them."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads.attention import attend
from benchmarks.workloads.decoder import rms_norm
from benchmarks.workloads.layers import layer_norm
from benchmarks.workloads.registry import (
    Built,
    Size,
    add,
    booleans,
    gain,
    half,
    integers,
    normal,
    pick,
    program,
    weight,
)


def _heads(x: Any, number: int) -> Any:
    return x.reshape(*x.shape[:-1], number, x.shape[-1] // number)


def _attention_block(heads: int, w: dict[str, Any], x: Any, context: Any) -> Any:
    """Projections, attention of x over a context, and the output's projection."""
    q, k, v = (_heads(y @ w[n], heads) for n, y in (("q", x), ("k", context), ("v", context)))
    return attend(q, k, v).reshape(x.shape) @ w["out"]


def _projections(n: int, dtype: Any) -> dict[str, Any]:
    return {name: weight(n, n, dtype=dtype) for name in ("q", "k", "v", "out")}


def _norm_pair(n: int, dtype: Any) -> tuple[Any, Any]:
    return gain(n, dtype), normal(n, dtype=dtype, scale=0.1)


@program("perceiver-cross-attention", "held-out")
def _perceiver(size: Size) -> Built:
    """A few latent vectors attend to a long input, then go through a feed-forward block."""
    batch, latents, inputs, n, heads = pick(size, (4, 512, 16384, 1024, 8), (1, 128, 4096, 256, 4), (1, 8, 32, 16, 2))
    dtype = half(size)
    weights = {"attention": _projections(n, dtype), "norms": [_norm_pair(n, dtype) for _ in range(3)]}
    weights["up"], weights["down"] = weight(n, 4 * n, dtype=dtype), weight(4 * n, n, dtype=dtype)

    def block(w: Any, latent: Any, data: Any) -> Any:
        h = layer_norm(latent, *w["norms"][0])
        latent = latent + _attention_block(heads, w["attention"], h, layer_norm(data, *w["norms"][1]))
        return latent + jax.nn.gelu(layer_norm(latent, *w["norms"][2]) @ w["up"]) @ w["down"]

    return Built(block, (weights, normal(batch, latents, n, dtype=dtype), normal(batch, inputs, n, dtype=dtype)))


@program("conformer-convolution", "held-out")
def _conformer(size: Size) -> Built:
    """The convolution module of a Conformer: norm, gated product, depthwise convolution, norm, product."""
    batch, frames, n, width = pick(size, (16, 1500, 512, 31), (2, 500, 256, 31), (1, 16, 8, 5))
    dtype = half(size)

    def module(x: Any, norms: Any, inner: Any, kernel: Any, outer: Any) -> Any:
        gate, value = jnp.split(layer_norm(x, *norms[0]) @ inner, 2, -1)
        h = value * jax.nn.sigmoid(gate)
        h = jax.lax.conv_general_dilated(
            h, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=n
        )
        return x + jax.nn.silu(layer_norm(h, *norms[1])) @ outer

    arguments = normal(batch, frames, n, dtype=dtype), [_norm_pair(n, dtype) for _ in range(2)]
    kernel = normal(width, 1, n, dtype=dtype, scale=width**-0.5)
    return Built(module, (*arguments, weight(n, 2 * n, dtype=dtype), kernel, weight(n, n, dtype=dtype)))


@program("dlrm-interaction", "held-out")
def _dlrm(size: Size) -> Built:
    """Recommendation: embeddings of many features from tables, all dot products between them, and a tower."""
    batch, features, rows, n = pick(size, (16384, 26, 10000, 128), (4096, 26, 1000, 64), (8, 4, 10, 8))
    dtype = half(size)
    pairs = features * (features + 1) // 2

    def interact(dense: Any, tables: Any, index: Any, bottom: Any, top: Any) -> Any:
        embedded = tables[jnp.arange(features)[None, :], index]
        vectors = jnp.concatenate([jax.nn.relu(dense @ bottom)[:, None], embedded], 1)
        products = jnp.einsum("bid,bjd->bij", vectors, vectors)
        low, high = jnp.tril_indices(features + 1, -1)
        joined = jnp.concatenate([vectors[:, 0], products[:, low, high]], -1)
        return jax.nn.sigmoid((jax.nn.relu(joined @ top[0]) @ top[1])[:, 0])

    top = [weight(n + pairs, 512, dtype=dtype), weight(512, 1, dtype=dtype)]
    arguments = (normal(batch, 13, dtype=dtype), normal(features, rows, n, dtype=dtype, scale=0.1))
    return Built(interact, (*arguments, integers(batch, features, below=rows), weight(13, n, dtype=dtype), top))


@program("gaussian-mixture-step", "held-out")
def _mixture(size: Size) -> Built:
    """One step of expectation and maximisation with diagonal covariances."""
    rows, parts, n = pick(size, (65536, 256, 64), (16384, 64, 32), (64, 4, 8))

    def step(x: Any, log_share: Any, mean: Any, log_scale: Any) -> Any:
        precision = jnp.exp(-2 * log_scale)
        squared = jnp.square(x) @ precision.T - 2 * x @ (mean * precision).T + (jnp.square(mean) * precision).sum(-1)
        joint = log_share - 0.5 * squared - log_scale.sum(-1) - 0.5 * n * math.log(2 * math.pi)
        total = jax.nn.logsumexp(joint, -1, keepdims=True)
        share = jnp.exp(joint - total)
        mass = share.sum(0)
        new_mean = share.T @ x / mass[:, None]
        variance = share.T @ jnp.square(x) / mass[:, None] - jnp.square(new_mean)
        return jnp.log(mass / rows), new_mean, 0.5 * jnp.log(variance + 1e-6), total.mean()

    arguments = (normal(rows, n), normal(parts, scale=0.1), normal(parts, n), normal(parts, n, scale=0.1))
    return Built(step, arguments)


@program("gated-state-update", "held-out")
def _gated_state(size: Size) -> Built:
    """One step of a selective state space for decoding: projections, the state's decay, and a gate."""
    batch, n, states = pick(size, (64, 4096, 16), (64, 4096, 16), (2, 16, 4))
    dtype = half(size)

    def update(x: Any, z: Any, state: Any, w: Any, log_a: Any, skip: Any) -> Any:
        delta = jax.nn.softplus(x @ w["down"] @ w["up"]).astype(jnp.float32)
        inputs, outputs = jnp.split((x @ w["parameters"]).astype(jnp.float32), 2, -1)
        decay = jnp.exp(-delta[..., None] * jnp.exp(log_a))
        state = state * decay + (delta * x.astype(jnp.float32))[..., None] * inputs[:, None, :]
        y = (state * outputs[:, None, :]).sum(-1) + skip * x
        return (y * jax.nn.silu(z)).astype(dtype), state

    weights = {"down": weight(n, n // 16, dtype=dtype), "up": weight(n // 16, n, dtype=dtype)}
    weights["parameters"] = weight(n, 2 * states, dtype=dtype)
    rows = normal(batch, n, dtype=dtype)
    return Built(update, (rows, rows, normal(batch, n, states), weights, normal(n, states, scale=0.5), normal(n)))


@program("vit-block-with-registers", "held-out")
def _registers(size: Size) -> Built:
    """A vision block over patches and registers, with scaled residuals and norms of queries and keys."""
    batch, patches, registers, n, heads = pick(size, (16, 1024, 5, 1024, 16), (2, 256, 5, 384, 6), (1, 16, 2, 16, 2))
    dtype = half(size)

    def block(w: Any, x: Any, extra: Any) -> Any:
        x = jnp.concatenate([jnp.broadcast_to(extra, (batch, *extra.shape)), x], 1)
        h = layer_norm(x, *w["norms"][0])
        q, k, v = (_heads(y, heads) for y in jnp.split(h @ w["qkv"], 3, -1))
        out = attend(rms_norm(q, w["q"]), rms_norm(k, w["k"]), v).reshape(x.shape) @ w["out"]
        x = x + w["scales"][0] * out
        h = jax.nn.gelu(layer_norm(x, *w["norms"][1]) @ w["up"] + w["bias"])
        return (x + w["scales"][1] * (h @ w["down"]))[:, registers:]

    weights = {"norms": [_norm_pair(n, dtype) for _ in range(2)], "scales": [normal(n, dtype=dtype, scale=0.1)] * 2}
    weights |= {"qkv": weight(n, 3 * n, dtype=dtype), "out": weight(n, n, dtype=dtype)}
    weights |= {"q": gain(n // heads, dtype), "k": gain(n // heads, dtype), "bias": normal(4 * n, dtype=dtype)}
    weights |= {"up": weight(n, 4 * n, dtype=dtype), "down": weight(4 * n, n, dtype=dtype)}
    return Built(block, (weights, normal(batch, patches, n, dtype=dtype), normal(registers, n, dtype=dtype)))


@program("retrieval-top-k", "held-out")
def _retrieval(size: Size) -> Built:
    """The ten most similar documents of every query, by cosine, with a softmax over them."""
    queries, documents, n = pick(size, (256, 131072, 768), (64, 16384, 384), (4, 64, 8))

    def retrieve(query: Any, document: Any) -> Any:
        query, document = (x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6) for x in (query, document))
        scores, index = jax.lax.top_k(jnp.dot(query, document.T, preferred_element_type=jnp.float32), 10)
        return jax.nn.softmax(scores / 0.05, -1), index

    dtype = half(size)
    return Built(retrieve, (normal(queries, n, dtype=dtype), normal(documents, n, dtype=dtype)))


@program("set-transformer-pooling", "held-out")
def _set_pooling(size: Size) -> Built:
    """A learned seed attends to the members of every set; those that are not there are hidden."""
    batch, members, seeds, n, heads = pick(size, (256, 1024, 4, 256, 4), (32, 512, 4, 128, 4), (2, 16, 2, 16, 2))
    dtype = half(size)

    def pool(w: Any, seed: Any, x: Any, there: Any) -> Any:
        members = jax.nn.relu(x @ w["members"])
        q = _heads(jnp.broadcast_to(seed @ w["q"], (batch, seeds, n)), heads)
        k, v = (_heads(members @ w[name], heads) for name in ("k", "v"))
        h = (q + attend(q, k, v, lambda s: jnp.where(there[:, None, None, :], s, -1e9))).reshape(batch, seeds, n)
        h = layer_norm(h, *w["norm"])
        return h + jax.nn.relu(h @ w["out"])

    weights = {**_projections(n, dtype), "members": weight(n, n, dtype=dtype), "norm": _norm_pair(n, dtype)}
    arguments = normal(seeds, n, dtype=dtype), normal(batch, members, n, dtype=dtype), booleans(batch, members)
    return Built(pool, (weights, *arguments))


@program("token-shift-channel-mix", "held-out")
def _token_shift(size: Size) -> Built:
    """RWKV's channel mixing: a norm, the token before, squared relu, and a gate."""
    batch, length, n = pick(size, (8, 1024, 2048), (2, 256, 512), (1, 8, 16))
    dtype = half(size)

    def mix(x: Any, norm: Any, shares: Any, w: Any) -> Any:
        h = layer_norm(x, *norm)
        before = jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        key, gate = (h * s + before * (1 - s) for s in shares)
        return x + jax.nn.sigmoid(gate @ w["gate"]) * (jnp.square(jax.nn.relu(key @ w["key"])) @ w["value"])

    weights = {"gate": weight(n, n, dtype=dtype), "key": weight(n, 4 * n, dtype=dtype)}
    weights["value"] = weight(4 * n, n, dtype=dtype)
    shares = [normal(n, dtype=dtype, scale=0.1, offset=0.5)] * 2
    return Built(mix, (normal(batch, length, n, dtype=dtype), _norm_pair(n, dtype), shares, weights))


@program("hopfield-retrieval", "held-out")
def _hopfield(size: Size) -> Built:
    """Three updates of a modern Hopfield network: states move to the stored patterns they resemble."""
    rows, patterns, n = pick(size, (4096, 16384, 128), (512, 2048, 64), (8, 32, 8))

    def retrieve(state: Any, stored: Any) -> Any:
        for _ in range(3):
            scores = 8.0 * jnp.dot(state, stored.T, preferred_element_type=jnp.float32) / math.sqrt(n)
            state = jax.nn.softmax(scores, -1).astype(stored.dtype) @ stored
        return state

    dtype = half(size)
    return Built(retrieve, (normal(rows, n, dtype=dtype), normal(patterns, n, dtype=dtype)))


@program("dino-loss", "held-out")
def _dino(size: Size) -> Built:
    """Self-distillation: two views of a teacher, centred and sharpened, against eight of a student; and the next centre."""
    batch, views, n = pick(size, (64, 8, 65536), (8, 6, 16384), (2, 3, 32))

    def loss(student: Any, teacher: Any, centre: Any) -> Any:
        log_p = jax.nn.log_softmax(student.astype(jnp.float32) / 0.1, -1)
        q = jax.nn.softmax((teacher.astype(jnp.float32) - centre) / 0.04, -1)
        entropy = -jnp.einsum("tbn,sbn->ts", q, log_p) / batch
        other = 1.0 - jnp.eye(2, views)
        return (entropy * other).sum() / other.sum(), 0.9 * centre + 0.1 * teacher.astype(jnp.float32).mean((0, 1))

    dtype = half(size)
    return Built(loss, (normal(views, batch, n, dtype=dtype), normal(2, batch, n, dtype=dtype), normal(n, scale=0.1)))


@program("vq-vae-quantise", "held-out")
def _quantise(size: Size) -> Built:
    """The nearest codes, the commitment loss, and the perplexity of the codebook."""
    rows, codes, n = pick(size, (32768, 4096, 256), (4096, 512, 64), (32, 8, 8))

    def quantise(x: Any, codebook: Any) -> Any:
        distance = jnp.square(x).sum(1, keepdims=True) - 2 * x @ codebook.T + jnp.square(codebook).sum(1)
        index = distance.argmin(1)
        quantised = codebook[index]
        commitment = jnp.square(jax.lax.stop_gradient(quantised) - x).mean()
        share = jax.nn.one_hot(index, codes).mean(0)
        perplexity = jnp.exp(-(share * jnp.log(share + 1e-10)).sum())
        return x + jax.lax.stop_gradient(quantised - x), 0.25 * commitment, perplexity

    return Built(quantise, (normal(rows, n), normal(codes, n)))


@program("triplet-all-pairs", "held-out")
def _triplet(size: Size) -> Built:
    """Batch-hard triplets: the furthest row of the same class and the nearest one of another."""
    rows, n = pick(size, (8192, 512), (2048, 128), (32, 8))

    def loss(x: Any, label: Any) -> Any:
        squares = jnp.square(x.astype(jnp.float32)).sum(-1)
        products = jnp.dot(x, x.T, preferred_element_type=jnp.float32)
        distance = jnp.sqrt(jnp.maximum(squares[:, None] - 2 * products + squares[None, :], 1e-12))
        same = label[:, None] == label[None, :]
        positive = jnp.where(same & ~jnp.eye(rows, dtype=bool), distance, 0.0).max(1)
        negative = jnp.where(same, jnp.inf, distance).min(1)
        return jax.nn.softplus(positive - negative).mean()

    return Built(loss, (normal(rows, n, dtype=half(size)), integers(rows, below=pick(size, 512, 128, 4))))


@program("barlow-twins", "held-out")
def _barlow(size: Size) -> Built:
    """Two views, standardised over the batch: their cross-correlation should be the identity."""
    rows, n = pick(size, (2048, 8192), (512, 1024), (16, 8))

    def loss(first: Any, second: Any) -> Any:
        first, second = ((x - x.mean(0)) / (x.std(0) + 1e-5) for x in (first, second))
        correlation = first.T @ second / rows
        diagonal = jnp.square(jnp.diagonal(correlation) - 1)
        return diagonal.sum() + 5e-3 * (jnp.square(correlation).sum() - jnp.square(jnp.diagonal(correlation)).sum())

    return Built(loss, (normal(rows, n), normal(rows, n)))


@program("spectral-norm-linear", "held-out")
def _spectral(size: Size) -> Built:
    """A linear layer whose weight is divided by its largest singular value, found by a step of power iteration."""
    rows, n = pick(size, (4096, 4096), (512, 1024), (16, 16))

    def layer(x: Any, w: Any, u: Any) -> Any:
        v = w.T @ u
        v = v / (jnp.linalg.norm(v) + 1e-12)
        product = w @ v
        u = product / (jnp.linalg.norm(product) + 1e-12)
        return x @ (w / (u @ w @ v)), jax.lax.stop_gradient(u)

    return Built(layer, (normal(rows, n), weight(n, n), normal(n)))


@program("graph-attention-dense", "held-out")
def _graph(size: Size) -> Built:
    """Graph attention with a dense adjacency: additive scores, a leaky relu, neighbours only."""
    nodes, heads, n = pick(size, (4096, 8, 64), (1024, 4, 32), (16, 2, 4))
    dtype = half(size)

    def layer(x: Any, adjacent: Any, w: Any, source: Any, target: Any) -> Any:
        h = (x @ w).reshape(nodes, heads, n)
        scores = (h * source).sum(-1).T[:, :, None] + (h * target).sum(-1).T[:, None, :]
        scores = jnp.where(adjacent[None], jax.nn.leaky_relu(scores, 0.2).astype(jnp.float32), -1e9)
        return jax.nn.elu(jnp.einsum("hij,jhd->ihd", jax.nn.softmax(scores, -1).astype(x.dtype), h)).reshape(nodes, -1)

    arguments = normal(nodes, 256, dtype=dtype), booleans(nodes, nodes), weight(256, heads * n, dtype=dtype)
    return Built(
        layer, (*arguments, normal(heads, n, dtype=dtype, scale=0.1), normal(heads, n, dtype=dtype, scale=0.1))
    )


def _linear_attention(size: Size, *, causal: bool) -> Built:
    """Attention with positive features instead of a softmax; causal in chunks of 64, with a running state."""
    batch, length, heads, n = pick(size, (4, 4096, 16, 64), (1, 1024, 4, 64), (1, 128, 2, 8))

    def linear(q: Any, k: Any, v: Any) -> Any:
        q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
        if not causal:
            state, total = jnp.einsum("blhd,blhe->bhde", k, v), k.sum(1)
            return jnp.einsum("blhd,bhde->blhe", q, state) / jnp.einsum("blhd,bhd->blh", q, total)[..., None]
        q, k, v = (x.reshape(batch, length // 64, 64, heads, n) for x in (q, k, v))
        state = jnp.cumsum(jnp.einsum("bclhd,bclhe->bchde", k, v), 1)
        state = jnp.pad(state, ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))[:, :-1]
        scores = jnp.einsum("bclhd,bcmhd->bchlm", q, k) * jnp.tril(jnp.ones((64, 64), q.dtype))
        out = jnp.einsum("bchlm,bcmhd->bclhd", scores, v) + jnp.einsum("bclhd,bchde->bclhe", q, state)
        return out.reshape(batch, length, heads, n)

    return Built(linear, (normal(batch, length, heads, n, dtype=half(size)),) * 3)


add("linear-attention", "held-out", functools.partial(_linear_attention, causal=False))
add("linear-attention-chunks", "held-out", functools.partial(_linear_attention, causal=True))


@program("ppo-loss", "held-out")
def _ppo(size: Size) -> Built:
    """The clipped objective over a batch of discrete actions, with value loss, entropy and standardised advantages."""
    rows, actions = pick(size, (262144, 64), (65536, 18), (32, 4))

    def loss(logits: Any, old: Any, action: Any, advantage: Any, value: Any, target: Any) -> Any:
        log_p = jax.nn.log_softmax(logits, -1)
        chosen = jnp.take_along_axis(log_p, action[:, None], -1)[:, 0]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = jnp.exp(chosen - old)
        policy = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()
        entropy = -(jnp.exp(log_p) * log_p).sum(-1).mean()
        return policy + 0.5 * jnp.square(value - target).mean() - 0.01 * entropy

    scalars = [normal(rows, scale=0.3) for _ in range(3)]
    old = normal(rows, offset=-math.log(actions), scale=0.2)
    return Built(loss, (normal(rows, actions), old, integers(rows, below=actions), *scalars))
