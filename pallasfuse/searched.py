"""Schedules of a group that a search over trees finds, for the targets that run every tree.

The search prices trees by the model of `schedule`; its best ones are lowered with several launches and priced again as the kernels
that they become. Only small spaces are searched. What is found is for tuning: the least of many prices is more often too low than
that of the few listed schedules, so that a clock must decide (`benchmarks/tree_prices.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

from pallasfuse.decisions import Phase, Placed
from pallasfuse.errors import InvalidProgramError, Refusal
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.ir.fold import Group
from pallasfuse.ir.region import Region, region_of_group
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tree import Launch, Node, RangeLoop, TreeKernel, walk
from pallasfuse.lowering import lower_on
from pallasfuse.phases import problem_of
from pallasfuse.price.kernel import price_kernel
from pallasfuse.resources.triton_view import WARP_ROWS, View
from pallasfuse.schedule import expressions, pruning, tiles
from pallasfuse.schedule.candidates import ModelPrices, Space
from pallasfuse.schedule.folds import derivable
from pallasfuse.schedule.model import Model
from pallasfuse.schedule.search import search
from pallasfuse.schedule.space import all_trees
from pallasfuse.targets import Target
from pallasfuse.tiling import arithmetic
from pallasfuse.tiling.choose import examine
from pallasfuse.tiling.tree_values import Bounded

LAUNCHES = ((4, 1), (4, 3), (8, 1), (8, 3))
"""Warps of a block, and slots of what its innermost loops load."""
_LEADERS = 12
"""The best trees by the model that are lowered."""
_MOST_NESTS, _MOST_TREES = 4, 256
"""The largest spaces that are searched: there is no bound by which the number of trees grows with that of nests."""


def searched(group: Group, target: Target, tensors: Mapping[str, Tensor]) -> list[tuple[float, Placed]]:
    """The kernels of the best trees of a group that a target can run, with their prices in microseconds, the lowest first.

    Empty where the target runs no trees, where the model is not of its kind of device, where the space is too large, and where
    the group has no product: what only reads rows has few schedules, all of which are listed (`tiling/choose.py`).
    """
    if not target.runs_trees or target.platform != "gpu" or not examine(group).has_products:
        return []
    region = region_of_group(group, tensors)
    space = _space(region, strict=group.strict)
    if space is None:
        return []
    found = search(space, ModelPrices(space, Model(region, target.device)), keep=_LEADERS)
    kernels: dict[TreeKernel, tuple[float, Placed]] = {}
    for us, candidate in found.best:
        if us == float("inf"):
            continue
        for tree in _launches(replace(space.tree(candidate), name=group.name)):
            placed = None if tree in kernels else placed_by_tree(group, tree, target, tensors)
            if placed is not None and not any(map(_repeats_rows, placed.phases)):
                kernels[tree] = price_kernel([(p.program, p.target) for p in placed.phases]).us, placed
    return sorted(kernels.values(), key=lambda priced: priced[0])


def placed_by_tree(group: Group, tree: TreeKernel, target: Target, tensors: Mapping[str, Tensor]) -> Placed | None:
    """A group run as a tree says; None where the target cannot, or results would differ in ways that the group does not say."""
    folds = FoldsOnDemand(region_of_group(group, tensors), strict=group.strict)
    schedule = Schedule((), group.rolled, group.rolled.extent, tree=(tree,))
    bounded: list[Bounded] = []
    try:
        programs = lower_on(target, schedule, folds, bounded=bounded)
    except (InvalidProgramError, AssertionError):
        return None
    if isinstance(programs, Refusal) or any(b.guards.fills for b in bounded):
        return None
    if not (folds.conditions.keys() <= set(group.conditions) and folds.exceptions.keys() <= set(group.exceptions)):
        return None
    phases = tuple(Phase(arithmetic.rewrite_for(target, p), target) for p in programs)
    return None if any(problem_of(p) is not None for p in phases) else Placed(schedule, phases, ())


def _repeats_rows(phase: Phase) -> bool:
    """Do warps compute rows of a product that others have, too? Products that read each other share a layout in which warps own
    rows, and the least number of warps makes up for few rows by columns."""
    rows = [p.m for p in View(phase.program, phase.target).products.values()]
    return phase.program.warps > min(w for w, _ in LAUNCHES) and any(m < WARP_ROWS * phase.program.warps for m in rows)


def _space(region: Region, *, strict: bool) -> Space | None:
    """The trees and tiles of a region; None where they are too many."""
    if len(region.nests) > _MOST_NESTS:
        return None
    choices = tiles.choices(
        region.axes.values(), [a.name for a in expressions.independent_axes(region)], little_padding=True
    )
    may_fold = derivable(region, strict=strict)
    trees = tuple(islice(all_trees(region, may_fold), _MOST_TREES + 1))
    if len(trees) > _MOST_TREES:
        return None
    space = pruning.PADDING.apply(pruning.EQUAL_TREES.apply(Space(region, trees, choices, may_fold)))
    return space if space.count else None


def _launches(tree: TreeKernel) -> Iterator[TreeKernel]:
    """The tree with each number of warps and slots that makes a difference."""
    loops = any(isinstance(n, RangeLoop) and n.level == "serial" for _, n in walk(tree.body))
    return (launched(tree, warps, slots) for warps, slots in LAUNCHES if slots == 1 or loops)


def launched(tree: TreeKernel, warps: int, slots: int) -> TreeKernel:
    """The tree with so many warps, and slots in the loops that run one after the other and have none inside."""

    def with_slots(node: Node) -> Node:
        if not isinstance(node, RangeLoop):
            return node
        innermost = node.level == "serial" and not any(isinstance(n, RangeLoop) for _, n in walk(node.body))
        return replace(node, body=tuple(map(with_slots, node.body)), slots=slots if innermost else 1)

    return replace(tree, body=tuple(map(with_slots, tree.body)), launch=Launch(warps=warps))
