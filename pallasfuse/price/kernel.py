"""The price of a lowered kernel: its tile programs, each on the target that runs it."""

from collections.abc import Sequence
from itertools import groupby

from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.price import cpu, gpu, gpu_loops
from pallasfuse.price.terms import Price, total
from pallasfuse.resources import triton
from pallasfuse.resources.block import Resources
from pallasfuse.targets import Target


def _held(programs: Sequence[TileProgram], target: Target) -> list[Resources] | None:
    """The resources of the blocks of each program, where a compiler decides on them."""
    if target.warpgroup_rows or target.cluster:
        return None
    return [triton.resources(p, target) for p in programs]


def price_kernel(phases: Sequence[tuple[TileProgram, Target]]) -> Price:
    """The price of programs that run one after the other; those of a cluster are one kernel."""
    found = []
    for target, own in groupby(phases, key=lambda phase: phase[1]):
        programs = [program for program, _ in own]
        if target.platform == "cpu":
            found.append(cpu.price(programs, target.device))
        elif target.writes_kernels:
            emission = gpu.Emission(warpgroups=target.warpgroup_rows > 0, together=target.cluster > 0)
            found.append(gpu.price(programs, target.device, emission, _held(programs, target)))
        else:
            found.append(gpu_loops.price(programs, target.device))
    return total(found)
