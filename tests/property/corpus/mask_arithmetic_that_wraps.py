"""Bounds of masks were computed in unbounded integers; the program wraps around at 2**32."""

import jax.numpy as jnp

from tests.property.programs import AXIS_NAMES, Input

INPUTS = (Input("x0", (2, 37)),)
EMITTERS = ("xla", "interpret")  # the interpreters of the stages count in int64
TILES = tuple((a, 4) for a in AXIS_NAMES)
DATA_SEED = 0


def fn(x0):
    near = (jnp.arange(37).astype(jnp.uint32) - jnp.uint32(5)) < jnp.uint32(10)
    s = jnp.where(near, x0, -jnp.inf)
    return jnp.sum(jnp.exp(s - jnp.max(s, -1, keepdims=True)), -1)
