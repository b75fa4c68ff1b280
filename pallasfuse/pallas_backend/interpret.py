"""TileProgram -> Pallas in interpret mode: the Pallas emitter, runnable on any machine."""

from collections.abc import Mapping

import jax

from pallasfuse.emission import pallas_kernel
from pallasfuse.ir.tile_program import TileProgram


def run(program: TileProgram, inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Every output of the kernel, by name; tails are masked as on a GPU."""
    return pallas_kernel.call(program, inputs, interpret=True)
