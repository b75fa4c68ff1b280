"""`x1` has no third axis, whose tile reaches past its end: what it added there was not masked."""

import jax.numpy as jnp

from tests.property.programs import AXIS_NAMES, Input

INPUTS = (
    Input("x0", (5, 13, 3)),
    Input("x1", (5, 13)),
)
TILES = tuple((a, 4) for a in AXIS_NAMES)
DATA_SEED = 0


def fn(x0, x1):
    z = x0 + x1[:, :, None]
    centred = z - jnp.mean(z, (1, 2), keepdims=True)
    return jnp.sum(centred, (1, 2)), jnp.sum(z, (1, 2)), jnp.sum(x1[:, :, None] * jnp.ones((1, 1, 3)), (1, 2))
