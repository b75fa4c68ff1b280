"""Losses whose logits are a product with a long sum: none is special."""

import jax
import jax.numpy as jnp
from jax import lax


def taken_along(x, n):
    return jnp.take_along_axis(x, n[:, None], axis=-1)[:, 0]


def difference(h, w, n):
    logits = h @ w
    return jax.nn.logsumexp(logits, axis=-1) - taken_along(logits, n)


def shifted(h, w, n):
    """As libraries of losses write it."""
    logits = h @ w
    logits = logits - lax.stop_gradient(logits.max(-1, keepdims=True))
    return jnp.log(jnp.exp(logits).sum(-1)) - taken_along(logits, n)


def of_logarithms(h, w, n):
    log_p = jax.nn.log_softmax(h @ w)
    return -log_p[jnp.arange(n.shape[0]), n]


def by_one_hot(h, w, n):
    log_p = jax.nn.log_softmax(h @ w)
    return -(jax.nn.one_hot(n, w.shape[1], dtype=log_p.dtype) * log_p).sum(-1)


def with_everything(h, w, n):
    """A soft cap, smoothed labels, and a penalty for large normalisers."""
    logits = (h @ w).astype(jnp.promote_types(h.dtype, jnp.float32))
    logits = 30.0 * jnp.tanh(logits / 30.0)
    lse = jax.nn.logsumexp(logits, axis=-1)
    return 0.9 * (lse - taken_along(logits, n)) + 0.1 * (lse - logits.mean(-1)) + 1e-2 * lse**2


LOSSES = [difference, shifted, of_logarithms, by_one_hot, with_everything]


def batched(h, w, n):
    logits = h @ w
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, n[..., None], axis=-1)[..., 0]


def biased(h, w, b, n):
    logits = h @ w + b
    return jax.nn.logsumexp(logits, axis=-1) - logits[jnp.arange(n.shape[0]), n]


def tied(h, e, n):
    logits = jnp.einsum("nd,vd->nv", h, e, preferred_element_type=jnp.float32)
    return jax.nn.logsumexp(logits, axis=-1) - taken_along(logits, n)


def some_ignored(h, w, n):
    logits, counts = h @ w, n != -100
    loss = jax.nn.logsumexp(logits, axis=-1) - taken_along(logits, jnp.where(counts, n, 0))
    return jnp.where(counts, loss, 0.0)


FORMS = {
    "two axes of rows": (batched, ((2, 512, 2048), (2048, 32768)), (2, 512)),
    "a bias": (biased, ((1024, 2048), (2048, 32768), (32768,)), (1024,)),
    "a matrix whose rows are the columns": (tied, ((1024, 2048), (32768, 2048)), (1024,)),
    "ignored labels": (some_ignored, ((1024, 2048), (2048, 32768)), (1024,)),
}
