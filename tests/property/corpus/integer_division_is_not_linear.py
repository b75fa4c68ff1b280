"""`sum(40 x / total)` became `40 / total * sum(x)`, where division truncates."""

import jax.numpy as jnp
from jax import lax

from tests.property.programs import AXIS_NAMES, Input

INPUTS = (Input("x0", (5, 13), "int32"),)
TILES = tuple((a, 4) for a in AXIS_NAMES)
DATA_SEED = 0


def fn(x0):
    x = jnp.abs(x0) + 1
    return jnp.sum(lax.div(x * 40, jnp.broadcast_to(jnp.sum(x, -1, keepdims=True), x.shape)), -1)
