"""An attention variant that no library ships, in ten lines of plain jax.numpy.

Causal, with a per-head distance slope, a tanh soft cap, a learned sink (a logit per head that takes probability and
gives no value) and a sigmoid gate on the output.
"""

import jax
import jax.numpy as jnp

import pallasfuse as pf


@pf.fuse
def gated_sink_attention(q, k, v, gate, slope, sink):
    """q, k, v, gate [batch, length, heads, dim]; slope and sink [heads]; result as q."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=wide) / q.shape[-1] ** 0.5
    s = 30.0 * jnp.tanh((s - slope[:, None, None] * (i - j)) / 30.0)
    s = jnp.where(j <= i, s, -jnp.inf)
    top = jnp.maximum(s.max(-1, keepdims=True), sink[:, None, None])
    e = jnp.exp(s - top)
    p = e / (e.sum(-1, keepdims=True) + jnp.exp(sink[:, None, None] - top))
    out = jnp.einsum("bhqk,bkhd->bqhd", p.astype(v.dtype), v, preferred_element_type=wide)
    return (out * jax.nn.sigmoid(gate.astype(wide))).astype(q.dtype)


def main():
    q, k, v, gate = jax.random.normal(jax.random.key(0), (4, 2, 500, 4, 64))
    slope, sink = jnp.array([0.5, 0.25, 0.125, 0.0625]), jnp.array([-1.0, 0.0, 1.0, 2.0])
    arguments = q, k, v, gate, slope, sink
    plan = gated_sink_attention.explain(*arguments)
    error = jnp.abs(gated_sink_attention(*arguments) - gated_sink_attention.__wrapped__(*arguments)).max()
    print(f"kernels: {len(plan.kernels)}  largest difference from plain JAX: {error:.1e}")
    assert error < 1e-5


if __name__ == "__main__":
    main()
