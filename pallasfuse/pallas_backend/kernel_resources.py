"""Finds what one block of a kernel takes of a multiprocessor, by the target that the kernel is written for."""

from collections.abc import Sequence

from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.pallas_backend import cluster_rules, mosaic_rules
from pallasfuse.resources import triton
from pallasfuse.resources.block import Resources
from pallasfuse.targets import Target


def resources(programs: Sequence[TileProgram], target: Target) -> Resources | str | None:
    """Returns what one block takes of a multiprocessor, or why the target cannot run the kernel; None where it writes no kernels.

    A kernel of a cluster is given by the programs of all its phases, any other one by its only program.

    For Triton an upper bound, for kernels that are written here exactly what the emitter allocates.
    """
    if target.cluster:
        return cluster_rules.resources(programs)
    (program,) = programs
    if target.warpgroup_rows:
        return mosaic_rules.resources(program)
    return triton.resources(program, target) if target.writes_kernels else None


def beyond_shared_memory(program: TileProgram, target: Target) -> str | None:
    """Returns why a kernel that Triton compiles may not fit into shared memory; None if it does.

    Kernels of other targets are counted where they are examined.
    """
    return triton.shared_memory(program, target).problem(target.shared_memory_bytes) if is_of_triton(target) else None


def is_of_triton(target: Target) -> bool:
    """Does Triton compile the kernels of a target, and decide what lies where?"""
    return target.writes_kernels and not target.warpgroup_rows and not target.cluster
