"""Reductions of long rows: softmax, log-sum-exp and layer norm over a vocabulary."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads.layers import layer_norm
from benchmarks.workloads.registry import Built, Size, add, gain, half, normal, pick, program


@program("softmax-4096", "rows")
def _softmax(size: Size) -> Built:
    n = pick(size, 4096, 4096, 64)
    return Built(lambda x: jax.nn.softmax(x, -1), (normal(n, n, dtype=half(size)),))


def _vocabulary(size: Size, function: Callable[..., Any], *, with_gain: bool = False) -> Built:
    rows, n = pick(size, (4096, 128256), (64, 128256), (2, 512))
    more = (gain(n, half(size)), normal(n, dtype=half(size))) if with_gain else ()
    return Built(function, (normal(rows, n, dtype=half(size)), *more))


add("softmax-128256", "rows", functools.partial(_vocabulary, function=lambda x: jax.nn.softmax(x, -1)))
add("logsumexp-128256", "rows", functools.partial(_vocabulary, function=lambda x: jax.nn.logsumexp(x, -1)))
add("layer-norm-128256", "rows", functools.partial(_vocabulary, function=layer_norm, with_gain=True))


@program("sampling-entropy", "rows")
def _entropy(size: Size) -> Built:
    """Entropy and the largest probability of every row of logits, at a temperature."""
    rows, n = pick(size, (256, 50257), (32, 50257), (2, 100))

    def entropy(logits: Any, temperature: Any) -> Any:
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, -1)
        p = jnp.exp(log_p)
        return -(p * log_p).sum(-1), p.max(-1), logits.argmax(-1)

    return Built(entropy, (normal(rows, n, dtype=half(size)), normal(offset=1.0, scale=0.01)))


@program("standardise-columns", "rows")
def _standardise(size: Size) -> Built:
    rows, n = pick(size, (65536, 512), (32768, 256), (32, 16))
    return Built(lambda x: (x - x.mean(0)) / (x.std(0) + 1e-6), (normal(rows, n, dtype=jnp.float32),))
