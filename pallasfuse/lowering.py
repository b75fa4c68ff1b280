"""A group and its schedule to tile programs, whatever form the schedule has: one rolled axis, or a tree."""

from collections.abc import Iterable, Mapping

from pallasfuse.errors import InvalidProgramError, Refusal
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.ir.fold import Group
from pallasfuse.ir.region import region_of_group
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.targets import Target
from pallasfuse.tiling.bounds import assumed_by
from pallasfuse.tiling.lower import lower_for
from pallasfuse.tiling.tree_values import Bounded, Tiles
from pallasfuse.tiling.trees import lower_tree


def lowered(
    target: Target, group: Group, schedule: Schedule, tensors: Mapping[str, Tensor], *, most_padded: int = 1 << 30,
    uneven: bool = False, bounded: list[Bounded] | None = None,
) -> tuple[TileProgram, ...]:  # fmt: skip
    """The kernel as `target` has it.

    Args:
      most_padded: pad the tiles of short axes to no more than that.
      uneven: as in `lower_tree`.
      bounded: gets the loops of a tree that masks may bound.

    Raises:
      InvalidProgramError: the schedule is a tree that breaks a rule.
    """
    if not schedule.tree:
        return lower_for(target, group, schedule, tensors, most_padded=most_padded)
    folds = FoldsOnDemand(region_of_group(group, tensors), strict=group.strict)
    found = lower_on(target, schedule, folds, most_padded=most_padded, uneven=uneven, bounded=bounded)
    if isinstance(found, Refusal):
        raise InvalidProgramError(f"the schedule of {group.name} breaks {found}")
    return found


def lower_on(
    target: Target, schedule: Schedule, folds: FoldsOnDemand, *, most_padded: int = 1 << 30,
    uneven: bool = False, bounded: list[Bounded] | None = None,
) -> tuple[TileProgram, ...] | Refusal:  # fmt: skip
    """The kernels of a schedule tree on a target, or the rule that it breaks. folds: derives what it reads unfinished."""
    tiles = Tiles(target.tails, min(target.smallest_dot, most_padded), min(target.tile_multiple, most_padded))
    return lower_tree(
        folds.region, schedule.tree, folds, tiles, strict=folds.strict, uneven=uneven, bounded=bounded
    )  # fmt: skip


def assumptions(bounded: Iterable[Bounded]) -> tuple[str, ...]:
    """Returns the conditions under which loops of trees may skip tiles that masks hide."""
    return tuple(dict.fromkeys(text for b in bounded for text in assumed_by(b.guards)))
