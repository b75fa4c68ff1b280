"""A mask that is true nowhere: the loop visited the tail although it said that it visits nothing."""

import jax.numpy as jnp

from tests.property.programs import AXIS_NAMES, Input

INPUTS = (Input("x0", (3, 7)),)
TILES = tuple((a, 4) for a in AXIS_NAMES)
DATA_SEED = 0


def fn(x0):
    s = jnp.where(jnp.arange(7) >= 9, x0, -jnp.inf)
    return jnp.sum(jnp.exp(s - jnp.max(s, 1, keepdims=True)), 1), jnp.max(s, 1)
