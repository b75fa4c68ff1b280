"""TileProgram -> Pallas:Triton. JAX has deprecated that backend: this room is a leaf that can be deleted."""

from collections.abc import Mapping

import jax
from jax.experimental.pallas import triton as pltr

from pallasfuse import _compat
from pallasfuse.emission import pallas_kernel
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.resources.as_threads import as_threads_run_it

_compat.name_triton_dialect()


def run(program: TileProgram, inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Every output of the kernel, by name."""
    params = pltr.CompilerParams(num_warps=program.warps, num_stages=as_threads_run_it(program).program.stages)
    return pallas_kernel.call(program, inputs, compiler_params=params)
