"""A frame that is subtracted once vouched for the place where it is added: the accumulators of its repair cancelled."""

import jax
import jax.numpy as jnp

from tests.property.programs import AXIS_NAMES, Input

INPUTS = (Input("x0", (3, 11), offset=3.0),)
TILES = tuple((a, 4) for a in AXIS_NAMES)
DATA_SEED = 0


def fn(x0):
    s = jnp.sum(x0, axis=1, keepdims=True)
    return jnp.sum((x0 + s) ** 3 * jax.lax.rsqrt(s * s + 1.0) + (x0 - s), axis=1)
