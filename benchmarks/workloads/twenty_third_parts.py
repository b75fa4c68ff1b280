"""Small parts that the programs of the twenty-third set share: norms, convolutions, clipped gradients, eight-bit products."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import normal


def standard(x):
    """This takes the mean off the last axis and divides by the spread."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    return (y / jnp.sqrt(jnp.var(y, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype)


def root_normed(x, scale):
    """This divides the last axis by the root of its mean square."""
    y = x.astype(jnp.float32)
    return (y / jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def chosen(logits, index):
    """This gives the log-chance of the chosen of the last axis."""
    logits = logits.astype(jnp.float32)
    own = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
    return own - jax.nn.logsumexp(logits, axis=-1)


def convolved(x, kernel, stride=1):
    """This convolves pictures [batch, rows, columns, channels] with edges of zeros."""
    names = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=names)


def kernel(size, i, o, dtype=jnp.float32):
    """This describes filters that keep the variance."""
    return normal(size, size, i, o, dtype=dtype, scale=(size * size * i) ** -0.5)


def clipped(grads, most):
    """This gives gradients whose norm is at most a number, and the norm they had."""
    norm = jnp.sqrt(sum(jnp.sum(g.astype(jnp.float32) ** 2) for g in jax.tree.leaves(grads)))
    share = jnp.minimum(1.0, most / (norm + 1e-6))
    return jax.tree.map(lambda g: (g * share).astype(g.dtype), grads), norm


def eight_bits(x, history, kind):
    """This rounds to eight bits and back with a scale from past maxima, and gives the history with the new maximum."""
    top = float(jnp.finfo(kind).max)
    scale = jnp.maximum(jnp.max(history), 1e-6) / top
    y = jnp.clip(x.astype(jnp.float32) / scale, -top, top).astype(kind).astype(jnp.float32) * scale
    fresh = jnp.roll(history, 1).at[0].set(jnp.max(jnp.abs(x)).astype(jnp.float32))
    return y.astype(x.dtype), fresh


@jax.custom_vjp
def eight_bit_product(x, w, histories):
    """This multiplies floats of eight bits; the gradient by the histories is what they are after the step."""
    return _forward(x, w, histories)[0]


def _forward(x, w, histories):
    x, first = eight_bits(x, histories[0], jnp.float8_e4m3fn)
    w, second = eight_bits(w, histories[1], jnp.float8_e4m3fn)
    return x @ w, (x, w, first, second, histories[2])


def _backward(saved, g):
    x, w, first, second, third = saved
    g, third = eight_bits(g, third, jnp.float8_e5m2)
    return g @ w.T, jnp.einsum("...i,...o->io", x, g), jnp.stack([first, second, third])


eight_bit_product.defvjp(_forward, _backward)
