"""The mean of the first tiles is -200 and that of all is 0: `exp` overflowed at the former only."""

import jax.numpy as jnp
import numpy as np

from tests.property.programs import AXIS_NAMES

TILES = tuple((a, 4) for a in AXIS_NAMES)


def arguments():
    return [np.concatenate([np.full((3, 8), -200.0), np.full((3, 8), 200.0)], 1).astype(np.float32)]


def fn(x0):
    return jnp.sum(jnp.exp(x0 - jnp.max(x0, -1, keepdims=True) - jnp.mean(x0, -1, keepdims=True)), -1)
