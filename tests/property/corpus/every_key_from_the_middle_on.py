"""A lower bound that no tile divides lost the elements before it."""

import jax.numpy as jnp

from tests.property.programs import AXIS_NAMES, Input

INPUTS = (
    Input("x0", (2, 37)),
    Input("x1", (2, 37)),
)
TILES = tuple((a, 4) for a in AXIS_NAMES)
DATA_SEED = 0


def fn(x0, x1):
    s = jnp.where(jnp.arange(37) >= 5, x0, -jnp.inf)
    e = jnp.exp(s - jnp.max(s, -1, keepdims=True))
    return jnp.sum(e / jnp.sum(e, -1, keepdims=True) * x1, -1)
