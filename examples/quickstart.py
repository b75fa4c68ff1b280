"""The README's first example: a causal softmax(q kᵀ) v in plain jax.numpy becomes one kernel."""

import jax
import jax.numpy as jnp

import pallasfuse as pf


@pf.fuse
def attention(q, k, v):
    visible = jnp.arange(k.shape[0]) <= jnp.arange(q.shape[0])[:, None]
    scores = jnp.where(visible, q @ k.T / q.shape[-1] ** 0.5, -jnp.inf)
    return jax.nn.softmax(scores) @ v


q, k, v = jax.random.normal(jax.random.key(0), (3, 4000, 64))
print(attention.explain(q, k, v, target="mosaic_gpu").summary)  # what a Hopper GPU would run; none is needed
print("as plain JAX:", jnp.allclose(attention(q, k, v), attention.__wrapped__(q, k, v), atol=1e-5))
