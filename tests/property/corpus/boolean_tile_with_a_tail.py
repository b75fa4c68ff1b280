"""A masked load of booleans gave integers in Pallas interpret mode, which `select` does not take: compiling failed."""

import jax.numpy as jnp

from tests.property.programs import AXIS_NAMES, Input

INPUTS = (
    Input("x0", (9, 11)),
    Input("x1", (1, 11), "bool"),
)
TILES = tuple((a, 4) for a in AXIS_NAMES)
DATA_SEED = 0


def fn(x0, x1):
    s = jnp.where(x1, x0, -3.0)
    return jnp.sum(jnp.exp(s - jnp.max(s, 0)), 0)
