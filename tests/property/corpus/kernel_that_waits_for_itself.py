"""A map that was handed to the kernel was computed from a value inside it: the plan was refused with an error."""

import jax.numpy as jnp

from tests.property.programs import AXIS_NAMES, Input

INPUTS = (
    Input("x0", (7, 2, 5, 2), "bfloat16", offset=30.0),
    Input("x1", (7, 2, 6, 2)),
    Input("x2", (6, 3), "int32"),
    Input("x3", (1, 1, 1, 1)),
)
TILES = tuple((a, 4) for a in AXIS_NAMES)
DATA_SEED = 0


def fn(x0, x1, x2, x3):
    t0 = jnp.einsum("bcid,bcjd->bcij", x0, x1) * 0.3
    t1 = -jnp.abs(t0)
    t2 = jnp.min(t1, axis=3, keepdims=True)
    t3 = jnp.max(t1, axis=3, keepdims=True)
    t6 = jnp.einsum("abcd,dz->abcz", (t1 - t2) / (t3 - t2 + 1e-3), x2.astype(jnp.float32))
    t7 = jnp.min(jnp.tanh(t6), axis=3, keepdims=True)
    t8 = jnp.log(jnp.abs(t7) + 1.5)
    t8 = jnp.mean((t6 - t7) * t8 * t8 + (t7 - t6), axis=3, keepdims=True)
    t9 = jnp.sum(jnp.sin(t6) * t8 + jnp.cos(t6) * t8, axis=3, keepdims=True)
    t11 = jnp.exp(t9 - jnp.max(t9, axis=0, keepdims=True))
    t13 = t11 / jnp.sum(t11, axis=0, keepdims=True)
    return t6, t9, t13, jnp.maximum(jnp.exp(-((t13 - t9) ** 2)), t13) + x3
