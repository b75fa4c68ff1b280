"""Every value underflows, and so does their mean, positive in real arithmetic: the accumulators stayed at a stand-in of 1."""

import jax.numpy as jnp

from tests.property.programs import AXIS_NAMES, Input

INPUTS = (Input("x0", (2, 5)),)
TILES = tuple((a, 1) for a in AXIS_NAMES)
DATA_SEED = 0


def fn(x0):
    e = jnp.exp(x0 - 200)
    return jnp.mean((e - jnp.mean(e, -1, keepdims=True)) * (x0 - jnp.mean(x0, -1, keepdims=True)), -1)
