"""A product over five axes has no matrix instruction, and its padded tiles were too large: the kernel failed to compile."""

import jax.numpy as jnp

from tests.property.programs import Input

INPUTS = (
    Input("x0", (3, 3, 3, 3), offset=2.0),
    Input("x1", (4, 3)),
)
TILES: tuple[tuple[str, int], ...] = ()
DATA_SEED = 0


def fn(x0, x1):
    return jnp.einsum("abcd,za->bcdz", x0 / (x0 * x0 + 1.0), x1)
