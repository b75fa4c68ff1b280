"""Two running means in one term: the accumulators of one were framed at the other."""

import jax.numpy as jnp

from tests.property.programs import AXIS_NAMES, Input

INPUTS = (Input("x0", (3, 16)),)
TILES = tuple((a, 4) for a in AXIS_NAMES)
DATA_SEED = 0


def fn(x0):
    y = jnp.cos(x0)
    return jnp.sum((x0 - jnp.mean(x0, -1, keepdims=True)) * (y - jnp.mean(y, -1, keepdims=True)), -1)
