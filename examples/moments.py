"""Statistics that subtract a mean first: each is two dependent reductions, and one pass after fusion.

The sums of (x - mean)ⁿ have no finished mean to subtract while the data goes by. The derived repair carries the lower
moments along: for n = 2 it is Welford's update.
"""

import jax
import jax.numpy as jnp

import pallasfuse as pf


@pf.fuse
def variance(x):
    """Two-pass variance over the last axis. x [rows, n] -> [rows]."""
    mean = x.sum(-1, keepdims=True) / x.shape[-1]
    return ((x - mean) ** 2).sum(-1) / x.shape[-1]


@pf.fuse
def third_moment(x):
    """Third central moment over the last axis. x [rows, n] -> [rows]."""
    mean = x.sum(-1, keepdims=True) / x.shape[-1]
    return ((x - mean) ** 3).sum(-1) / x.shape[-1]


@pf.fuse
def layer_norm(x, scale, bias):
    """Layer normalisation with the two-pass variance. x [rows, features], scale and bias [features]."""
    centred = x - x.mean(-1, keepdims=True)
    deviation = jnp.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-6)
    return centred / deviation * scale + bias


def main():
    x = 1e4 + jax.random.normal(jax.random.key(0), (16, 8192))
    scale, bias = jnp.linspace(0.5, 1.5, 8192), jnp.linspace(-1.0, 1.0, 8192)
    for fused, arguments in [(variance, (x,)), (third_moment, (x,)), (layer_norm, (x, scale, bias))]:
        plan = fused.explain(*arguments)
        error = jnp.abs(fused(*arguments) - fused.__wrapped__(*arguments)).max()
        print(f"{fused.__name__:16} kernels: {len(plan.kernels)}  largest difference from plain JAX: {error:.1e}")
        # The plain program rounds the mean to float32, whose spacing at 1e4 is 1e-3: that bounds the agreement.
        assert error < 1e-2


if __name__ == "__main__":
    main()
