"""Rows without a key have the maximum -inf and are NaN; the second pass skipped their masked tiles and gave 0."""

import jax.numpy as jnp

from tests.property.programs import AXIS_NAMES, Input

INPUTS = (Input("x0", (16, 16)),)
TILES = tuple((a, 4) for a in AXIS_NAMES)
DATA_SEED = 0


def fn(x0):
    i, j = jnp.arange(16)[:, None], jnp.arange(16)[None]
    s = jnp.where(i - 5 >= j, x0, -jnp.inf)
    e = jnp.exp(s - jnp.max(s, -1, keepdims=True))
    return jnp.sum(jnp.round(e / jnp.sum(e, -1, keepdims=True) * 8.0), -1)
