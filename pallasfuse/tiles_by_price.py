"""Tiles and parts are found by their price here: downhill from those of a listed schedule, tiles without a lowering for each."""

import math
from collections.abc import Mapping
from dataclasses import replace

from pallasfuse.decisions import Phase
from pallasfuse.ir.fold import Group
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tensors import Tensor
from pallasfuse.options import FuseOptions
from pallasfuse.phases import lowered_phases, us_of
from pallasfuse.price import cpu
from pallasfuse.price.ranges import hiding_nothing
from pallasfuse.tiling.choose import fixed_axes
from pallasfuse.tiling.descent import cheapest
from pallasfuse.tiling.split import most_parts


def with_cheapest_tiles(
    chosen: Group, schedule: Schedule, phases: tuple[Phase, ...], tensors: Mapping[str, Tensor], options: FuseOptions
) -> tuple[Schedule, tuple[Phase, ...]]:
    """Returns the schedule with the tiles that the price likes best, starting from a listed one; its exact price must be lower.

    Along axes of ranges it stays: large tiles would cost nothing where masks hide nothing, and hide nothing.
    """
    asked = {name for name, _ in options.tiles}
    listed = {**dict(schedule.grid), schedule.rolled: schedule.rolled_tile}
    fixed = fixed_axes(chosen, ranged=schedule.ranges)
    fixed |= frozenset(a for p in phases for r in p.program.ranges for a in (r.axis, *r.left.axes))
    free = [a for a in listed if a.name not in asked and a not in fixed]
    if not free or schedule.parts > 1 or len(phases) > 1:
        return schedule, phases
    (phase,) = phases
    looped = replace(schedule, rolled_tile=min(schedule.rolled_tile, -(-schedule.rolled.extent // 2)))
    template = phases if looped == schedule else lowered_phases(chosen, looped, phase.target, tensors)
    if template is None:
        return schedule, phases
    whole = {a: a.extent if a in free else t for a, t in listed.items()}
    rows = {a: a.extent if a == schedule.rolled and a in free else t for a, t in listed.items()}

    price = cpu.price_by_tiles(hiding_nothing(template[0].program), phase.target.device)
    best = cheapest([listed, rows, whole], lambda tiles: price(tiles).us, free)
    if best == listed:
        return schedule, phases
    other = replace(schedule, grid=tuple((a, best[a]) for a, _ in schedule.grid), rolled_tile=best[schedule.rolled])
    again = lowered_phases(chosen, other, phase.target, tensors)
    if again is None:
        return schedule, phases
    own, better = (us_of(of) for of in (phases, again))
    return (other, again) if better < own else (schedule, phases)


_GAIN_OF_PARTS = 0.9
"""More parts must cost less than so much of what fewer cost: an estimate, as no kernel was measured in several numbers of parts."""


def with_cheapest_parts(
    chosen: Group, schedule: Schedule, phases: tuple[Phase, ...], tensors: Mapping[str, Tensor]
) -> tuple[Schedule, tuple[Phase, ...]]:
    """Returns the schedule with its rolled axis in up to twice as many parts, as often as the price falls by that.

    Blocks that only load and add fill a device where there are several for each multiprocessor. No part is without a trip.
    """
    target, best_us = phases[0].target, us_of(phases)
    trips, most = schedule.trips, most_parts(chosen, schedule, target)
    while 2 * schedule.parts <= min(trips, most):
        parts = -(-trips // -(-trips // (2 * schedule.parts)))
        other = replace(schedule, parts=parts)
        again = lowered_phases(chosen, other, target, tensors)
        us = math.inf if again is None else us_of(again)
        if again is None or us > _GAIN_OF_PARTS * best_us:
            break
        schedule, phases, best_us = other, again, us
    return schedule, phases
