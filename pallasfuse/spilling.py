"""This module finds smaller tiles for kernels whose threads spill registers.

Listed tiles are sized along two axes. What a kernel computes along more of them, as attention does whose keys differ from row to
row, holds more than a thread has registers for, and the largest tiles that fit in shared memory are not the fastest.
"""

from collections.abc import Mapping

from pallasfuse.decisions import Phase
from pallasfuse.ir.fold import Group
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tensors import Tensor
from pallasfuse.options import FuseOptions
from pallasfuse.phases import lowered_phases, us_of
from pallasfuse.tiling.descent import smaller
from pallasfuse.warps import spilled_bytes


def with_fewer_spilled(
    chosen: Group, schedule: Schedule, phases: tuple[Phase, ...], tensors: Mapping[str, Tensor], options: FuseOptions
) -> tuple[Schedule, tuple[Phase, ...]]:
    """Returns the same kernel with smaller tiles, where its threads spill registers and it is predicted to be faster with these.

    It stays as it is where its tiles, warps or stages are asked for, and where its rolled axis is split.
    """
    if schedule.parts > 1 or options.shapes_kernels or not options.price or not any(map(spilled_bytes, phases)):
        return schedule, phases
    target, best = phases[0].target, (us_of(phases), schedule, phases)
    for candidate in smaller(schedule, target):
        other = None if candidate.stages != schedule.stages else lowered_phases(chosen, candidate, target, tensors)
        if other is None:
            continue
        best = min(best, (us_of(other), candidate, other), key=lambda found: found[0])
        if not any(map(spilled_bytes, other)):
            break  # still smaller ones load more for their operations
    return best[1], best[2]
