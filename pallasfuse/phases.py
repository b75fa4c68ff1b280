"""The phases of a kernel on a target: lowered, in the arithmetic of the target, and why it has none or cannot run them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pallasfuse.decisions import Phase
from pallasfuse.emission import pallas_kernel
from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.axes import volume
from pallasfuse.ir.fold import Group
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Contract, TileProgram, every
from pallasfuse.pallas_backend import cluster_rules, kernel_resources, mosaic_rules
from pallasfuse.price import straight_code
from pallasfuse.price.kernel import price_kernel
from pallasfuse.targets import Target
from pallasfuse.tiling import arithmetic, clusters
from pallasfuse.tiling.lower import lower_for
from pallasfuse.triton_gpu import rules

_PROBLEMS: dict[str, Callable[[TileProgram], str | None]] = {
    "interpret": pallas_kernel.product_too_large,
    "triton": rules.problem,
    "mosaic_gpu": mosaic_rules.problem,
}
"""Why a target cannot run a kernel: one phase, where each is a kernel of its own."""
_MISSHAPEN: dict[str, Callable[[TileProgram], str | None]] = {"mosaic_gpu": mosaic_rules.misshapen}
"""The same, as far as it can be told before the arithmetic is rewritten, which takes longer than the lowering."""


def phases_of(
    chosen: Group, schedule: Schedule, target: Target, tensors: Mapping[str, Tensor]
) -> tuple[tuple[Phase, ...], str | None]:
    """Returns the phases of a kernel, and why the target cannot run the first.

    Later ones go to whichever target can, but those of a cluster, which are one kernel.
    """
    if target.cluster:
        lowering = lower_for(target, chosen, schedule, tensors)
        together = tuple(Phase(arithmetic.rewrite_for(target, p), target) for p in lowering)
        return together, cluster_rules.problem([p.program for p in together])
    phases: list[Phase] = []
    for number, lowered in enumerate(lower_for(target, chosen, schedule, tensors)):
        early = _MISSHAPEN.get(target.name)
        problem = None if early is None else early(lowered)
        if problem is not None and number == 0:
            return (Phase(lowered, target),), problem
        phase = _phase_of(lowered, target)
        problem = problem_of(phase)
        while number and problem is not None and phase.target.fallback:
            other = phase.target.fallback
            while other.cluster and other.fallback:  # it runs all phases or none
                other = other.fallback
            if other.only_long_products or _sums_beyond(phase.program, other):
                break
            phase = _phase_of(lower_for(other, chosen, schedule, tensors)[number], other)
            problem = problem_of(phase)
        phases.append(phase)
        if problem is not None:
            return tuple(phases), problem
    return tuple(phases), None


def _phase_of(lowered: TileProgram, target: Target) -> Phase:
    """Returns a lowered program in the arithmetic of a target, its short axes written out where that is predicted to be faster.

    Written out, nothing is exchanged between threads and nothing is padded; as an axis of a tile, a row is loaded and stored whole.
    """
    phase = Phase(arithmetic.rewrite_for(target, lowered), target)
    if not phase.program.unrolled:
        return phase
    whole = replace(phase, program=replace(phase.program, unrolled=()))
    return phase if problem_of(whole) is not None or us_of((phase,)) <= us_of((whole,)) else whole


def lowered_phases(
    chosen: Group, schedule: Schedule, target: Target, tensors: Mapping[str, Tensor]
) -> tuple[Phase, ...] | None:
    """Returns the phases of a kernel by any schedule; None where the target cannot run them, or they cannot be built."""
    try:
        phases, problem = phases_of(chosen, schedule, target, tensors)
    except (InvalidProgramError, AssertionError):
        return None
    return phases if problem is None else None


def us_of(phases: Sequence[Phase]) -> float:
    """Returns the predicted microseconds of the phases of a kernel, one after the other."""
    return price_kernel([(p.program, p.target) for p in phases]).us


def refused_alike(schedule: Schedule, refused: tuple[Schedule, tuple[Phase, ...], str], target: Target) -> bool:
    """Would a target refuse a schedule whatever it computes, or as it has refused another one? Known before it is lowered.

    refused: the other schedule of the same group, its phases, and the reason.
    """
    if not target.warpgroup_rows:
        return False
    before, phases, _ = refused
    tiles = [target.padded(t) for _, t in schedule.grid if t > 1]
    if len(tiles) == 1 and not mosaic_rules.takes_rows(tiles[0], schedule.warps):
        return True
    return _form(schedule) == _form(before) and mosaic_rules.is_misformed(phases[0].program)


def _form(schedule: Schedule) -> tuple[object, ...]:
    """What schedules of one group have in common that have tiles of several elements along the same axes."""
    tiled = tuple((a, t > 1) for a, t in schedule.grid)
    return tiled, schedule.rolled_tile > 1, schedule.trips > 1, schedule.parts > 1


def _sums_beyond(program: TileProgram, target: Target) -> bool:
    """Is there a product whose sum is too long for the tiles of a target?"""
    products = (s for s in every(program.body) if isinstance(s, Contract))
    return any(math.prod(program.tile(a) for a in s.over) > target.max_inner for s in products)


def problem_of(phase: Phase) -> str | None:
    """Returns why a target cannot run a phase that is a kernel of its own, or should not; None if it can."""
    return impossible(phase) or too_large(phase)


def impossible(phase: Phase) -> str | None:
    """Returns why a target cannot run a phase whatever its tiles take; None if it can."""
    rule = _PROBLEMS.get(phase.target.name)
    return None if rule is None else rule(phase.program)


def too_large(phase: Phase) -> str | None:
    """Returns why the tiles of a phase are too large, for a block's memory or for the compiler; None if they are not."""
    program, target = phase.program, phase.target
    problem = kernel_resources.beyond_shared_memory(program, target)
    if problem is not None or not target.writes_kernels or target.cluster:
        return problem
    return straight_code.too_long(program, target)


def is_misformed(phases: Sequence[Phase]) -> bool:
    """Does a target run no kernel with the same loops, whatever its tiles?"""
    return any(p.target.name == "triton" and rules.is_misformed(p.program) for p in phases)


def unsuited(group: Group, target: Target, *, by_name: bool = False) -> str | None:
    """Why a target has no kernel for a group. by_name: it was asked for, even if another one is as fast."""
    if target.cluster:
        return clusters.impossible(group) or (None if by_name else clusters.slower(group, target))
    long = next((n for n in group.inner if volume(n.reduced) > target.max_inner), None)
    if long is None:
        return "it only has kernels for products whose sum no tile holds" if target.only_long_products else None
    if target.platform == "cpu" or target.only_long_products or target.slices_sums:
        return None
    return f"{long.name} sums {volume(long.reduced)} elements, too many to keep inside a tile"
