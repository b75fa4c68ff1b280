"""Pieces of layers in plain `jax.numpy`: norms before products, gated products, adapters, routers, norms of other kinds."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads.decoder import rms_norm
from benchmarks.workloads.registry import Built, Size, add, booleans, gain, half, normal, pick, program, weight


def layer_norm(x: Any, scale: Any, shift: Any) -> Any:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype) * scale + shift


CPU_WIDTHS = {16: 4096, 512: 2048, 4096: 1024}
"""By rows: products of some milliseconds."""


def _layer_norm_product(size: Size, rows: int) -> Built:
    n, dtype = pick(size, 4096, CPU_WIDTHS[rows], 64), half(size)
    rows = pick(size, rows, rows, min(rows, 64))
    arguments = (normal(rows, n, dtype=dtype), gain(n, dtype), normal(n, dtype=dtype), weight(n, n, dtype=dtype))
    return Built(lambda x, scale, shift, w: layer_norm(x, scale, shift) @ w, arguments)


def _rms_norm_product(size: Size, rows: int) -> Built:
    n, dtype = pick(size, 4096, CPU_WIDTHS[rows], 64), half(size)
    rows = pick(size, rows, rows, min(rows, 64))
    return Built(
        lambda x, g, w: rms_norm(x, g) @ w, (normal(rows, n, dtype=dtype), gain(n, dtype), weight(n, n, dtype=dtype))
    )


for _rows in (16, 512, 4096):
    add(f"layer-norm-matmul-{_rows}", "norm-product", functools.partial(_layer_norm_product, rows=_rows))
    add(f"rms-norm-linear-{_rows}", "norm-product", functools.partial(_rms_norm_product, rows=_rows))


def swiglu(x: Any, gate: Any, up: Any, down: Any) -> Any:
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def _swiglu(size: Size, rows: int, *, normed: bool) -> Built:
    n, hidden = pick(size, (4096, 11008), (2048, 5504) if rows < 512 else (512, 1376), (64, 96))
    dtype, rows = half(size), pick(size, rows, rows, min(rows, 32))
    weights = (weight(n, hidden, dtype=dtype), weight(n, hidden, dtype=dtype), weight(hidden, n, dtype=dtype))
    x = normal(rows, n, dtype=dtype)
    if not normed:
        return Built(swiglu, (x, *weights))
    return Built(lambda x, g, *w: swiglu(rms_norm(x, g), *w), (x, gain(n, dtype), *weights))


add("swiglu-16", "gated", functools.partial(_swiglu, rows=16, normed=False))
add("swiglu-2048", "gated", functools.partial(_swiglu, rows=2048, normed=False))
add("rms-norm-swiglu-16", "gated", functools.partial(_swiglu, rows=16, normed=True))
add("rms-norm-swiglu-512", "gated", functools.partial(_swiglu, rows=512, normed=True))


@program("geglu-1024", "gated")
def _geglu(size: Size) -> Built:
    n, hidden = pick(size, (2048, 8192), (512, 1024), (32, 64))
    dtype, rows = half(size), pick(size, 1024, 512, 16)
    arguments = (normal(rows, n, dtype=dtype), weight(n, hidden, dtype=dtype), weight(n, hidden, dtype=dtype))
    return Built(lambda x, gate, up: jax.nn.gelu(x @ gate) * (x @ up), arguments)


def _lora(size: Size, rows: int) -> Built:
    n, dtype = pick(size, 4096, 4096, 64), half(size)
    arguments = (
        normal(rows, n, dtype=dtype),
        weight(n, n, dtype=dtype),
        weight(n, 16, dtype=dtype),
        weight(16, n, dtype=dtype),
    )
    return Built(lambda x, w, a, b: x @ w + 2.0 * ((x @ a) @ b), arguments)


for _rows in (1, 8, 16):
    add(f"lora-{_rows}", "adapter", functools.partial(_lora, rows=_rows))


@program("bottleneck-adapter", "adapter")
def _adapter(size: Size) -> Built:
    n, dtype, rows = pick(size, 1024, 768, 64), half(size), pick(size, 4096, 4096, 16)
    arguments = (normal(rows, n, dtype=dtype), gain(n, dtype), normal(n, dtype=dtype))
    arguments += (weight(n, 64, dtype=dtype), weight(64, n, dtype=dtype))
    return Built(lambda x, s, b, down, up: x + jax.nn.gelu(layer_norm(x, s, b) @ down) @ up, arguments)


@program("router-top-k", "router")
def _router(size: Size) -> Built:
    """Gates of a mixture of experts: the two largest of 64, softmax over them, and the balancing loss."""
    rows, n, experts = pick(size, (8192, 2048, 64), (8192, 1024, 64), (32, 16, 8))

    def route(x: Any, w: Any) -> Any:
        logits = jnp.dot(x, w, preferred_element_type=jnp.float32)
        probabilities = jax.nn.softmax(logits, -1)
        top, index = jax.lax.top_k(probabilities, 2)
        load = jax.nn.one_hot(index[:, 0], logits.shape[-1]).mean(0)
        balance = logits.shape[-1] * (load * probabilities.mean(0)).sum()
        z_loss = jnp.square(jax.nn.logsumexp(logits, -1)).mean()
        return top / top.sum(-1, keepdims=True), index, balance + 1e-3 * z_loss

    return Built(route, (normal(rows, n, dtype=half(size)), weight(n, experts, dtype=half(size))))


@program("router-noisy-dense", "router")
def _dense_router(size: Size) -> Built:
    """Soft mixture of experts: dispatch weights are a softmax over tokens, combine weights one over slots."""
    tokens, n, slots = pick(size, (4096, 1024, 256), (4096, 512, 64), (32, 16, 8))

    def soft(x: Any, phi: Any) -> Any:
        logits = jnp.dot(x, phi, preferred_element_type=jnp.float32)
        inputs = jax.nn.softmax(logits, 0).astype(x.dtype).T @ x
        return jax.nn.softmax(logits, 1).astype(x.dtype) @ jnp.tanh(inputs)

    return Built(soft, (normal(tokens, n, dtype=half(size)), weight(n, slots, dtype=half(size))))


@program("group-norm", "norm")
def _group_norm(size: Size) -> Built:
    batch, height, channels, groups = pick(size, (8, 64, 512, 32), (2, 64, 128, 32), (2, 4, 16, 4))

    def norm(x: Any, scale: Any, shift: Any) -> Any:
        wide = x.astype(jnp.float32).reshape(batch, height * height, groups, channels // groups)
        mean = wide.mean((1, 3), keepdims=True)
        variance = wide.var((1, 3), keepdims=True)
        normed = ((wide - mean) * jax.lax.rsqrt(variance + 1e-6)).reshape(x.shape).astype(x.dtype)
        return jax.nn.silu(normed * scale + shift)

    dtype = half(size)
    return Built(
        norm,
        (normal(batch, height, height, channels, dtype=dtype), gain(channels, dtype), normal(channels, dtype=dtype)),
    )


@program("batch-norm-statistics", "norm")
def _batch_norm(size: Size) -> Built:
    batch, height, channels = pick(size, (64, 32, 256), (64, 32, 128), (2, 4, 8))

    def norm(x: Any, scale: Any, shift: Any, running: Any) -> Any:
        wide = x.astype(jnp.float32)
        mean = wide.mean((0, 1, 2))
        variance = jnp.square(wide).mean((0, 1, 2)) - jnp.square(mean)
        out = ((wide - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + shift).astype(x.dtype)
        return jax.nn.relu(out), 0.9 * running + 0.1 * jnp.stack([mean, variance])

    arguments = (
        normal(batch, height, height, channels, dtype=half(size)),
        gain(channels),
        normal(channels),
        normal(2, channels),
    )
    return Built(norm, arguments)


@program("normalise-and-multiply", "norm")
def _normalise_and_multiply(size: Size) -> Built:
    """Rows of unit length, all against all."""
    rows, n = pick(size, (8192, 256), (2048, 128), (64, 16))

    def cosine(x: Any) -> Any:
        unit = x / jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-12).astype(x.dtype)
        return unit @ unit.T

    return Built(cosine, (normal(rows, n, dtype=half(size)),))


@program("normalise-and-multiply-wide", "norm")
def _normalise_and_scale(size: Size) -> Built:
    rows, n = pick(size, (8192, 4096), (4096, 1024), (16, 64))

    def scaled(x: Any, w: Any) -> Any:
        total = jnp.sum(jnp.abs(x.astype(jnp.float32)), -1, keepdims=True)
        return (x / (total + 1e-6).astype(x.dtype)) * w

    return Built(scaled, (normal(rows, n, dtype=half(size)), normal(rows, n, dtype=half(size))))


@program("masked-mean-pool", "norm")
def _masked_mean_pool(size: Size) -> Built:
    """Sentence embeddings: the mean of the tokens that are there, of unit length."""
    batch, length, n = pick(size, (256, 512, 1024), (64, 512, 768), (2, 8, 16))

    def pool(x: Any, mask: Any) -> Any:
        there = mask[..., None].astype(jnp.float32)
        mean = (x * there).sum(1) / jnp.maximum(there.sum(1), 1.0)
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)

    return Built(pool, (normal(batch, length, n, dtype=half(size)), booleans(batch, length)))
