"""Sums and products as the textbook has them, where another order is much cheaper: Kalman filters, graph convolutions, adapters."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program, weight


@program("merged-adapter-16", "products")
def _merged_adapter(size: Size) -> Built:
    """A linear layer of 16 rows with a low-rank update that is added to its weights."""
    rows, width, rank = pick(size, (16, 4096, 16), (16, 1024, 8), (4, 32, 2))
    dtype = half(size)

    def layer(x: Any, w: Any, down: Any, up: Any) -> Any:
        return x @ (w + 2.0 * (down @ up))

    return Built(layer, (normal(rows, width, dtype=dtype), weight(width, width, dtype=dtype),
                         weight(width, rank, dtype=dtype), weight(rank, width, dtype=dtype)))  # fmt: skip


@program("power-iteration", "products")
def _power_iteration(size: Size) -> Built:
    """One step towards the largest singular vector of a matrix."""
    rows, width = pick(size, (8192, 4096), (2048, 1024), (32, 16))

    def step(a: Any, v: Any) -> Any:
        u = a.T @ a @ v
        return u / jnp.linalg.norm(u)

    return Built(step, (normal(rows, width), normal(width)))


@program("kalman-update", "products")
def _kalman(size: Size) -> Built:
    """The update of mean and covariance of a Kalman filter by one measurement."""
    states, measured = pick(size, (4096, 64), (1024, 16), (16, 4))

    def update(mean: Any, covariance: Any, gain: Any, h: Any, z: Any) -> Any:
        mean = mean + gain @ (z - h @ mean)
        return mean, (jnp.eye(states) - gain @ h) @ covariance

    return Built(update, (normal(states), normal(states, states), weight(states, measured), weight(measured, states),
                          normal(measured)))  # fmt: skip


@program("latent-attention-decoding", "products")
def _latent_attention(size: Size) -> Built:
    """One query over a cache of latents, from which keys and values are projected."""
    batch, length, heads, features, latent = pick(
        size, (8, 4096, 32, 128, 512), (2, 1024, 8, 64, 128), (2, 16, 2, 8, 4)
    )
    dtype = half(size)

    def attend(q: Any, latents: Any, w_k: Any, w_v: Any) -> Any:
        keys = jnp.einsum("bjc,chd->bjhd", latents, w_k)
        values = jnp.einsum("bjc,chd->bjhd", latents, w_v)
        scores = jnp.einsum("bhd,bjhd->bhj", q, keys) * features**-0.5
        weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(q.dtype)
        return jnp.einsum("bhj,bjhd->bhd", weights, values)

    return Built(attend, (normal(batch, heads, features, dtype=dtype), normal(batch, length, latent, dtype=dtype),
                          weight(latent, heads, features, dtype=dtype), weight(latent, heads, features, dtype=dtype)))  # fmt: skip


@program("mean-pooled-projection", "products")
def _mean_pooled(size: Size) -> Built:
    """A projection of every token, of which the mean is taken."""
    batch, tokens, width, out = pick(size, (32, 1024, 1024, 1024), (8, 256, 512, 256), (2, 8, 16, 8))
    dtype = half(size)

    def pool(x: Any, w: Any, bias: Any) -> Any:
        return (x @ w + bias).mean(axis=1)

    return Built(
        pool, (normal(batch, tokens, width, dtype=dtype), weight(width, out, dtype=dtype), normal(out, dtype=dtype))
    )


@program("householder-step", "products")
def _householder(size: Size) -> Built:
    """A reflection of a matrix."""
    rows, columns = pick(size, (8192, 4096), (2048, 512), (32, 16))

    def reflect(v: Any, a: Any) -> Any:
        return (jnp.eye(rows) - 2.0 * jnp.outer(v, v) / (v @ v)) @ a

    return Built(reflect, (normal(rows), normal(rows, columns)))


@program("graph-convolution", "products")
def _graph_convolution(size: Size) -> Built:
    """A layer of a graph network over a dense adjacency matrix, normalised by the degrees."""
    nodes, width, out = pick(size, (8192, 512, 128), (1024, 128, 32), (16, 8, 4))

    def layer(adjacency: Any, x: Any, w: Any) -> Any:
        connected = adjacency.astype(jnp.float32)
        scale = jnp.diag(1.0 / jnp.sqrt(1.0 + connected.sum(axis=1)))
        return jax.nn.relu(scale @ connected @ scale @ x @ w)

    return Built(layer, (integers(nodes, nodes, below=2), normal(nodes, width), weight(width, out)))


@program("gradient-of-a-trace", "products")
def _trace(size: Size) -> Built:
    """The trace and the quadratic form in the gradient of a Gaussian process' likelihood."""
    points = pick(size, 4096, 1024, 16)

    def gradient(inverse: Any, kernel: Any, y: Any) -> Any:
        alpha = inverse @ y
        return 0.5 * (alpha @ kernel @ alpha - jnp.trace(inverse @ kernel))

    return Built(gradient, (weight(points, points), normal(points, points), normal(points)))


@program("conjugate-gradient-step", "products")
def _conjugate_gradient(size: Size) -> Built:
    """One step for the normal equations of a ridge regression."""
    rows, width = pick(size, (16384, 4096), (4096, 512), (32, 16))

    def step(a: Any, w: Any, r: Any, p: Any) -> Any:
        product = (a.T @ a + 0.1 * jnp.eye(width)) @ p
        rate = (r @ r) / (p @ product)
        rest = r - rate * product
        return w + rate * p, rest, rest + (rest @ rest) / (r @ r) * p

    return Built(step, (normal(rows, width, scale=rows**-0.5), normal(width), normal(width), normal(width)))


@program("unnormalised-attention", "products")
def _unnormalised(size: Size) -> Built:
    """Attention without a softmax, whose scores are made first."""
    batch, length, heads, features = pick(size, (4, 4096, 16, 64), (1, 1024, 4, 32), (1, 16, 2, 4))
    dtype = half(size)

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bihd,bjhd->bhij", jax.nn.elu(q) + 1, jax.nn.elu(k) + 1) / length
        return jnp.einsum("bhij,bjhd->bihd", scores, v)

    return Built(attend, tuple(normal(batch, length, heads, features, dtype=dtype) for _ in range(3)))
