"""The first tile of `j >= 9` is partly masked, and was treated as unmasked."""

import jax.numpy as jnp

from tests.property.programs import AXIS_NAMES, Input

INPUTS = (Input("x0", (3, 37)),)
TILES = tuple((a, 4) for a in AXIS_NAMES)
DATA_SEED = 0


def fn(x0):
    s = jnp.where(jnp.arange(37) >= 9, x0, -jnp.inf)
    m = jnp.max(s, -1, keepdims=True)
    return jnp.sum(jnp.exp(s - m), -1)
