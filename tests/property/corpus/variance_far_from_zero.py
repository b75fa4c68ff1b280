"""The frame of the terms and that of the repair were different floats: XLA contracts `x - s * c` to an fma."""

import jax.numpy as jnp

from tests.property.programs import AXIS_NAMES, Input

INPUTS = (Input("x0", (11, 24), offset=100.0, scale=0.1),)
TILES = tuple((a, 4) for a in AXIS_NAMES)
DATA_SEED = 0


def fn(x0):
    d = x0 - jnp.mean(x0, 0, keepdims=True)
    return jnp.mean(d**2, 0)
