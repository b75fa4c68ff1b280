"""A fold that depends on a maximum through another fold, and does not read it: planning failed with a KeyError."""

import jax.numpy as jnp

from tests.property.programs import AXIS_NAMES, Input

INPUTS = (Input("x0", (12,)),)
TILES = tuple((a, 4) for a in AXIS_NAMES)
DATA_SEED = 0


def fn(x0):
    e = jnp.exp2(x0 - jnp.max(x0, axis=0, keepdims=True))
    t7 = e / jnp.sum(e, axis=0, keepdims=True) * 2.0 + 1.0
    t9 = jnp.max(t7 * t7 * 0.5, axis=0, keepdims=True)
    t10 = jnp.min((t7 + t9), axis=0, keepdims=True)
    t11 = jnp.max((t10 - t7), axis=0, keepdims=True)
    return t7, t11, t11 / (1.0 + jnp.abs(t9))
