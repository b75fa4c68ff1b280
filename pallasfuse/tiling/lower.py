"""`Group` + `Schedule` -> tile programs: one for a rolled axis, a phase after the other for a split one."""

import math
from collections.abc import Mapping
from dataclasses import replace

from pallasfuse.errors import InvalidProgramError, Refusal
from pallasfuse.ir.fold import Group
from pallasfuse.ir.region import region_of_group
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Loop, TileProgram, verify
from pallasfuse.targets import Tails, Target
from pallasfuse.tiling.flat import FoldsOfGroup, tree_of
from pallasfuse.tiling.tree_values import Tiles
from pallasfuse.tiling.trees import lower_tree


def lower(
    group: Group, schedule: Schedule, tails: Tails, tensors: Mapping[str, Tensor], smallest_dot: int = 1, *,
    multiple: int = 0, static_bounds: bool = False, together: bool = False,
) -> tuple[TileProgram, ...]:  # fmt: skip
    """The kernel of `group` under `schedule`: one tile program, or phases of which each reads what those before have stored.

    `tensors` gives the definition of every input and output by name. With masked tails, tiles are rounded up to powers of two,
    or to multiples of `multiple`, and those of axes that take part in a matrix product are padded to `smallest_dot`.
    `static_bounds`: as `Target.static_bounds`. `together`: the blocks of all parts run all phases (`Target.cluster`).

    Where the rolled axis is split (Neptune, section 4.3), every pass is a phase in which each block has a part of it and stores
    its state. What follows begins with the states of all parts. The last phase stores the results.
    """
    if static_bounds or together:
        schedule = replace(schedule, ranges=False)
    tree = tree_of(group, replace(schedule, interleave=1), together=together)
    found = lower_tree(
        region_of_group(group, tensors), tree, FoldsOfGroup(group), Tiles(tails, smallest_dot, multiple), strict=group.strict,
        static_bounds=static_bounds, together=together,
    )  # fmt: skip
    if isinstance(found, Refusal):
        raise InvalidProgramError(f"the tree of {group.name} breaks {found}")
    return tuple(_interleaved(p, schedule) for p in found)


def _interleaved(program: TileProgram, schedule: Schedule) -> TileProgram:
    """The program with its unequal blocks side by side, as far as the schedule's `interleave` divides their number."""
    segments = [s.segments for s in program.body if isinstance(s, Loop)]
    begins = frozenset().union(*(g.start.tensors for g in segments[0][:1])) if segments else frozenset()
    ends = frozenset().union(*(g.stop.tensors for of in segments for g in of))
    if not program.descending or not ends.isdisjoint(begins):
        return program
    blocks = math.prod(-(-a.extent // t) for a, t in program.grid[:-1])
    return verify(replace(program, interleave=math.gcd(schedule.interleave, blocks)))


def lower_for(
    target: Target, group: Group, schedule: Schedule, tensors: Mapping[str, Tensor], *, most_padded: int = 1 << 30
) -> tuple[TileProgram, ...]:
    """The kernel as `target` has it. most_padded: pad the tiles of short axes to no more than that."""
    least, multiple = min(target.smallest_dot, most_padded), min(target.tile_multiple, most_padded)
    return lower(
        group, schedule, target.tails, tensors, least, multiple=multiple, static_bounds=target.static_bounds,
        together=target.cluster > 0,
    )  # fmt: skip
