"""Loops with a fusible body: optimal transport (Sinkhorn), with a cost matrix that does not change, and streaming moments."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads.registry import Built, Size, normal, pick, program

ITERATIONS = 20


def _cost(x: Any, y: Any) -> Any:
    return jnp.square(x[:, None, :] - y[None, :, :]).sum(-1)


def _potentials(step: Callable[..., Any], x: Any, y: Any) -> Any:
    cost = _cost(x, y)
    start = jnp.zeros(x.shape[0]), jnp.zeros(y.shape[0])
    return jax.lax.fori_loop(0, ITERATIONS, lambda _, fg: step(cost, *fg), start)


def _step(cost: Any, f: Any, g: Any) -> Any:
    epsilon = 0.1
    f = -epsilon * jax.nn.logsumexp((g[None, :] - cost) / epsilon, axis=1)
    g = -epsilon * jax.nn.logsumexp((f[:, None] - cost) / epsilon, axis=0)
    return f, g


def _points(size: Size) -> tuple[Any, Any]:
    rows, n = pick(size, (4096, 3), (1024, 3), (32, 3))
    return normal(rows, n), normal(rows, n)


@program("sinkhorn", "loops")
def _sinkhorn(size: Size) -> Built:
    """The whole loop inside the fused function."""
    return Built(lambda x, y: _potentials(_step, x, y), _points(size))


@program("sinkhorn-fused-step", "loops")
def _sinkhorn_step(size: Size) -> Built:
    """The user fuses the step that the loop calls."""
    x, y = _points(size)
    rows = x.shape[0]
    return Built(
        lambda x, y: _potentials(_step, x, y),
        (x, y),
        lambda fuse: lambda x, y: _potentials(fuse(_step), x, y),
        (_step, (normal(rows, rows), normal(rows), normal(rows))),
    )


@program("sinkhorn-fused-step-recomputing", "loops")
def _sinkhorn_recomputing(size: Size) -> Built:
    """The step that the user fuses computes the cost itself, from points that do not change: XLA hoists it out of the loop."""
    x, y = _points(size)

    def whole(step: Callable[..., Any], x: Any, y: Any) -> Any:
        start = jnp.zeros(x.shape[0]), jnp.zeros(y.shape[0])
        return jax.lax.fori_loop(0, ITERATIONS, lambda _, fg: step(x, y, *fg), start)

    def step(x: Any, y: Any, f: Any, g: Any) -> Any:
        return _step(_cost(x, y), f, g)

    return Built(
        lambda x, y: whole(step, x, y),
        (x, y),
        lambda fuse: lambda x, y: whole(fuse(step), x, y),
        (step, (x, y, normal(x.shape[0]), normal(x.shape[0]))),
    )


@program("scanned-layers", "loops")
def _scanned(size: Size) -> Built:
    """Layers with stacked weights in a `lax.scan`: a norm, a product, a gate."""
    rows, n, layers = pick(size, (2048, 1024, 8), (512, 512, 4), (8, 16, 2))

    def run(x: Any, weights: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            normed = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
            return x + jax.nn.gelu(normed @ w), None

        return jax.lax.scan(body, x, weights)[0]

    return Built(run, (normal(rows, n), normal(layers, n, n, scale=n**-0.5)))
