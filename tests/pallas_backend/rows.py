"""Functions of long rows, for the tests of kernels of clusters: on a CPU, through ptxas, and on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

f32 = jnp.float32


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def log_softmax(x):
    return jax.nn.log_softmax(x.astype(f32), axis=-1).astype(x.dtype)


def log_sum(x):
    return jax.nn.logsumexp(x.astype(f32), axis=-1)


def layer_norm(x, w, b):
    y = x.astype(f32)
    mean, variance = y.mean(-1, keepdims=True), y.var(-1, keepdims=True)
    return ((y - mean) * jax.lax.rsqrt(variance + 1e-5) * w + b).astype(x.dtype)


def rms_norm(x, w):
    y = x.astype(f32)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6) * w).astype(x.dtype)


def cross_entropy(x, labels):
    """With a term for the logarithm, and the probabilities that a gradient needs."""
    y = x.astype(f32)
    lse = jax.nn.logsumexp(y, axis=-1)
    picked = jnp.take_along_axis(y, labels[:, None], axis=-1)[:, 0]
    return lse - picked + 1e-4 * lse**2, jnp.exp(y - lse[:, None]).astype(x.dtype)


def entropy(x):
    y = x.astype(f32)
    p = jax.nn.softmax(y, axis=-1)
    return -(p * jax.nn.log_softmax(y, axis=-1)).sum(-1)


def several(x):
    y = x.astype(f32)
    return softmax(y).astype(x.dtype), jax.nn.log_softmax(y, axis=-1).astype(x.dtype), y.max(-1)


def three_passes(x):
    y = x.astype(f32)
    z = jnp.tanh(y - y.mean(-1, keepdims=True))
    u = jnp.round(8 * z / jnp.sqrt((z * z).mean(-1, keepdims=True)))
    return (u - u.max(-1, keepdims=True)).astype(x.dtype)


def tempered(x, t):
    return jax.nn.softmax(x / t[:, None], axis=-1)


def biased(x, y):
    return jax.nn.softmax(x + y, axis=-1)


def gradient(p, g):
    q, h = p.astype(f32), g.astype(f32)
    return (q * (h - (q * h).sum(-1, keepdims=True))).astype(p.dtype)


def standardized(x):
    y = jax.nn.gelu(x.astype(f32))
    return ((y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def by_head(x):
    """Rows along two axes, and a position."""
    ramp = jnp.arange(x.shape[-1], dtype=f32) * 1e-3
    return jax.nn.softmax(x.astype(f32) - ramp, axis=-1).astype(x.dtype)


@dataclass(frozen=True, slots=True)
class Rows:
    """x: an array [rows, columns]; w: [columns]; t: [rows]; l: labels [rows]; h: an array [2, rows, columns]."""

    function: Callable[..., Any]
    takes: str

    def arrays(self, rows: int, columns: int, dtype: str, seed: int = 0) -> list[Any]:
        random = np.random.default_rng(seed)
        sizes = {"x": (rows, columns), "w": (columns,), "t": (rows,), "h": (2, rows, columns)}

        def array(kind: str) -> Any:
            if kind == "l":
                return jnp.asarray(random.integers(0, columns, rows), jnp.int32)
            size = sizes[kind]
            numbers = random.uniform(0.5, 2, size) if len(size) == 1 else random.normal(0.3, 2, size)
            return jnp.asarray(numbers, jnp.dtype(dtype))

        return [array(kind) for kind in self.takes]


ROWS = {
    "softmax": Rows(softmax, "x"),
    "log softmax": Rows(log_softmax, "x"),
    "log sum": Rows(log_sum, "x"),
    "layer norm": Rows(layer_norm, "xww"),
    "rms norm": Rows(rms_norm, "xw"),
    "cross entropy": Rows(cross_entropy, "xl"),
    "entropy": Rows(entropy, "x"),
    "several": Rows(several, "x"),
    "three passes": Rows(three_passes, "x"),
    "tempered": Rows(tempered, "xt"),
    "biased": Rows(biased, "xx"),
    "gradient": Rows(gradient, "xx"),
    "standardized": Rows(standardized, "x"),
    "by head": Rows(by_head, "h"),
}
