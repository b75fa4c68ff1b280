"""What one block of a kernel takes of a multiprocessor, by the target that it is written for."""

from collections.abc import Sequence

from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.pallas_backend import cluster_rules, mosaic_rules
from pallasfuse.resources import triton
from pallasfuse.resources.block import Resources
from pallasfuse.targets import Target


def resources(programs: Sequence[TileProgram], target: Target) -> Resources | str | None:
    """Of the program of a kernel (of all phases, for a cluster); why the target cannot run it; None where it writes no kernels.

    For Triton an upper bound, for kernels that are written here exactly what the emitter allocates.
    """
    if target.cluster:
        return cluster_rules.resources(programs)
    (program,) = programs
    if target.warpgroup_rows:
        return mosaic_rules.resources(program)
    return triton.resources(program, target) if target.writes_kernels else None


def problem(program: TileProgram, target: Target) -> str | None:
    """Why the kernel would take more of a multiprocessor than there is; None if it fits."""
    found = resources((program,), target)
    if isinstance(found, str):
        return found
    return None if found is None else found.problem(target.shared_memory_bytes)
