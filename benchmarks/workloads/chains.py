"""Chains of two products (G1 to G12) and small attentions (S1 to S9) at the sizes of MCFuser's evaluation, and the layers of
Mirage's: all in float16 on the GPU."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads.decoder import rms_norm
from benchmarks.workloads.registry import Built, Size, add, gain, normal, pick, weight

PRODUCTS = {
    "G1": (1, 512, 256, 64, 64), "G2": (1, 512, 256, 64, 128), "G3": (1, 512, 256, 64, 256),
    "G4": (1, 512, 512, 256, 256), "G5": (1, 512, 512, 512, 256), "G6": (1, 512, 512, 1024, 256),
    "G7": (1, 512, 512, 128, 128), "G8": (1, 1024, 512, 128, 128), "G9": (1, 2048, 512, 128, 128),
    "G10": (1, 1024, 1024, 128, 128), "G11": (4, 1024, 1024, 128, 128), "G12": (8, 1024, 1024, 128, 128),
}  # fmt: skip
"""Batch, M, N, K, H of (A[M,K] B[K,N]) C[N,H]."""
ATTENTIONS = {
    "S1": (8, 512, 512, 64, 64), "S2": (12, 512, 512, 64, 64), "S3": (16, 512, 512, 64, 64),
    "S4": (12, 256, 256, 64, 64), "S5": (16, 256, 256, 64, 64), "S6": (16, 256, 256, 80, 80),
    "S7": (1, 512, 256, 64, 64), "S8": (1, 768, 384, 64, 64), "S9": (1, 1024, 512, 64, 64),
}  # fmt: skip
"""Heads, queries, keys, features, value features."""


def _dtype(size: Size) -> Any:
    return jnp.float16 if size == "gpu" else jnp.float32


CPU_FLOPS = 1e9
"""The least operations of a chain on a CPU: its batch is as large as that takes, for times that can be measured."""


def _sized(size: Size, sizes: tuple[int, ...]) -> tuple[int, ...]:
    batch, *rest = sizes
    match size:
        case "gpu":
            return sizes
        case "cpu":
            m, n, k, h = rest
            return (batch * math.ceil(CPU_FLOPS / (2.0 * batch * m * n * (k + h))), *rest)
        case "tiny":
            return (min(batch, 2), *(x // 16 for x in rest))


def _two_products(size: Size, sizes: tuple[int, ...]) -> Built:
    batch, m, n, k, h = _sized(size, sizes)
    dtype = _dtype(size)
    arguments = normal(batch, m, k, dtype=dtype), weight(batch, k, n, dtype=dtype), weight(batch, n, h, dtype=dtype)
    return Built(lambda a, b, c: (a @ b) @ c, arguments)


def _attention(size: Size, sizes: tuple[int, ...]) -> Built:
    heads, m, n, k, h = _sized(size, sizes)

    def attention(q: Any, key: Any, v: Any) -> Any:
        scores = jnp.einsum("hmd,hnd->hmn", q, key, preferred_element_type=jnp.float32) / math.sqrt(k)
        return jnp.einsum("hmn,hnd->hmd", jax.nn.softmax(scores, -1).astype(v.dtype), v)

    arrays = [normal(heads, *shape, dtype=_dtype(size)) for shape in ((m, k), (n, k), (n, h))]
    return Built(attention, tuple(arrays))


for _name, _sizes in PRODUCTS.items():
    add(f"chain-{_name}", "chains", functools.partial(_two_products, sizes=_sizes))
for _name, _sizes in ATTENTIONS.items():
    add(f"chain-{_name}", "chains", functools.partial(_attention, sizes=_sizes))


def _low_rank_mlp(size: Size, rows: int) -> Built:
    (n, rows), dtype = pick(size, (4096, rows), (4096, 512 * rows), (64, rows)), _dtype(size)
    arguments = normal(rows, n, dtype=dtype), weight(n, 16, dtype=dtype), weight(16, n, dtype=dtype)
    return Built(lambda x, a, b: x + jax.nn.relu(x @ a) @ b, arguments)


def _gated(size: Size, rows: int) -> Built:
    n, dtype = pick(size, 4096, 4096, 64), _dtype(size)
    arguments = normal(rows, n, dtype=dtype), weight(n, n, dtype=dtype), weight(n, n, dtype=dtype)
    return Built(lambda x, w, v: jax.nn.silu(x @ w) * (x @ v), arguments)


def _normalised_residual(size: Size, rows: int) -> Built:
    """The residual of a normalised transformer: everything stays on the sphere."""
    (n, rows), dtype = pick(size, (4096, rows), (1024, 2048 * rows), (64, rows)), _dtype(size)

    def unit(t: Any) -> Any:
        return t * jax.lax.rsqrt(jnp.square(t.astype(jnp.float32)).sum(-1, keepdims=True) + 1e-6).astype(t.dtype)

    arguments = normal(rows, n, dtype=dtype), normal(rows, n, dtype=dtype), normal(n, dtype=dtype, scale=0.1)
    return Built(lambda x, h, alpha: unit(x + alpha * (unit(h) - x)), arguments)


def _normed_queries(size: Size, batch: int) -> Built:
    """Decoding with norms of queries and keys."""
    length, heads, groups, d = pick(size, (4096, 8, 4, 128), (4096, 8, 4, 64), (16, 2, 2, 8))
    dtype = _dtype(size)

    def attention(q: Any, k: Any, v: Any, gain_q: Any, gain_k: Any) -> Any:
        keys = rms_norm(k, gain_k)
        scores = jnp.einsum(
            "bhgd,bkhd->bhgk", rms_norm(q, gain_q), keys, preferred_element_type=jnp.float32
        ) / math.sqrt(d)
        return jnp.einsum("bhgk,bkhd->bhgd", jax.nn.softmax(scores, -1).astype(v.dtype), v)

    cache = normal(batch, length, heads, d, dtype=dtype)
    return Built(
        attention, (normal(batch, heads, groups, d, dtype=dtype), cache, cache, gain(d, dtype), gain(d, dtype))
    )


for _rows in (1, 16):
    add(f"low-rank-mlp-{_rows}", "chains", functools.partial(_low_rank_mlp, rows=_rows))
    add(f"gated-mlp-{_rows}", "chains", functools.partial(_gated, rows=_rows))
    add(f"normalised-residual-{_rows}", "chains", functools.partial(_normalised_residual, rows=_rows))
    add(f"normed-queries-{_rows}", "chains", functools.partial(_normed_queries, batch=_rows))
