"""The six prefill variants of Neptune's evaluation, each as a user writes it in plain jax.numpy.

Shapes: q [batch, query, heads, dim], k and v [batch, key, heads, dim]; the result has q's shape and dtype. When the
lengths differ, the last query sees the last key. Scores and the second product accumulate in float32 (float64 for
float64 inputs); the probabilities are rounded to q's dtype, as the hand-written kernels do.
"""

from functools import partial

import jax
import jax.numpy as jnp

import pallasfuse as pf


def accumulator(x):
    """The dtype in which products of x are summed."""
    return jnp.promote_types(x.dtype, jnp.float32)


def positions(q, k):
    """Key positions of the queries [query, 1] and of the keys [key]."""
    return jnp.arange(q.shape[1])[:, None] + (k.shape[1] - q.shape[1]), jnp.arange(k.shape[1])


def scaled_scores(q, k):
    """q·k/√dim, [batch, heads, query, key]."""
    return jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=accumulator(q)) / q.shape[-1] ** 0.5


def weighted_values(scores, v):
    """softmax(scores) v, [batch, query, heads, dim]."""
    p = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v, preferred_element_type=accumulator(v)).astype(v.dtype)


@pf.fuse
def global_attention(q, k, v):
    """Every query sees every key."""
    return weighted_values(scaled_scores(q, k), v)


@pf.fuse
def causal(q, k, v):
    """A query sees the keys up to its own position."""
    i, j = positions(q, k)
    return weighted_values(jnp.where(j <= i, scaled_scores(q, k), -jnp.inf), v)


@pf.fuse
def grouped_query(q, k, v):
    """Causal; k and v have fewer heads, each serves a group of consecutive query heads."""
    batch, query, heads, dim = q.shape
    q = q.reshape(batch, query, k.shape[2], heads // k.shape[2], dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=accumulator(q)) / dim**0.5
    i, j = positions(q, k)
    p = jax.nn.softmax(jnp.where(j <= i, scores, -jnp.inf), axis=-1).astype(v.dtype)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", p, v, preferred_element_type=accumulator(v))
    return out.reshape(batch, query, heads, dim).astype(v.dtype)


@pf.fuse
def alibi(q, k, v):
    """Causal; each head adds its slope times the distance (Press et al. 2022), computed from the positions."""
    heads = q.shape[2]
    slopes = 2.0 ** (-8.0 * jnp.arange(1, heads + 1) / heads)
    i, j = positions(q, k)
    scores = scaled_scores(q, k) + slopes[:, None, None] * (j - i)
    return weighted_values(jnp.where(j <= i, scores, -jnp.inf), v)


@pf.fuse
def soft_cap(q, k, v):
    """Causal; k and v may have fewer heads; scores are capped smoothly at ±50."""
    batch, query, heads, dim = q.shape
    q = q.reshape(batch, query, k.shape[2], heads // k.shape[2], dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=accumulator(q)) / dim**0.5
    i, j = positions(q, k)
    scores = jnp.where(j <= i, 50.0 * jnp.tanh(scores / 50.0), -jnp.inf)
    p = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", p, v, preferred_element_type=accumulator(v))
    return out.reshape(batch, query, heads, dim).astype(v.dtype)


@partial(pf.fuse, static_argnums=3)
def sliding_window(q, k, v, window=256):
    """Causal; a query sees the `window` latest keys, its own included."""
    i, j = positions(q, k)
    return weighted_values(jnp.where((j <= i) & (i - j < window), scaled_scores(q, k), -jnp.inf), v)


def main():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 500, 4, 64))
    few_k, few_v = k[:, :, :2], v[:, :, :2]
    calls = [
        (global_attention, (q, k, v)),
        (causal, (q, k, v)),
        (grouped_query, (q, few_k, few_v)),
        (alibi, (q, k, v)),
        (soft_cap, (q, few_k, few_v)),
        (sliding_window, (q, k, v, 100)),
    ]
    for fused, arguments in calls:
        plan = fused.explain(*arguments)
        error = jnp.abs(fused(*arguments) - fused.__wrapped__(*arguments)).max()
        print(f"{fused.__name__:16} kernels: {len(plan.kernels)}  largest difference from plain JAX: {error:.1e}")
        assert error < 1e-5


if __name__ == "__main__":
    main()
