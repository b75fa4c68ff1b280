"""The paper's four rules that make a space smaller, each with its count before and after (MCFuser, section 3.3)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.tree_search import expressions as ex
from pallasfuse.ir.region import Region
from pallasfuse.schedule.candidates import ModelPrices, Space, without_equal_trees, without_padding
from pallasfuse.schedule.model import Model
from pallasfuse.schedule.placement import Broken, place


@dataclass(frozen=True, slots=True)
class PruningRule:
    """A rule that leaves out candidates which are equal to others, waste work or cannot run."""

    name: str
    text: str
    apply: Callable[[Space], Space]


@dataclass(frozen=True, slots=True)
class Stage:
    """What one rule did to a space: trees or expressions, tuples of tiles, candidates, before and after."""

    rule: str
    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.rule}: {self.before:,} -> {self.after:,}"


def _partial_tiles(space: Space) -> Space:
    read = ex.intermediates(space.region)
    kept = []
    for tree in space.trees:
        placement = place(space.region, tree, space.may_fold)
        if isinstance(placement, Broken) or not any(b.name in read and b.indexed_by for b in placement.buffers):
            kept.append(tree)
    return replace(space, trees=tuple(kept) or space.trees)


EQUAL_TREES = PruningRule("equal trees", "of trees that do the same in each block, one is kept", without_equal_trees)
PARTIAL_TILES = PruningRule(
    "partial tiles", "no intermediate is reduced by a loop around one over an axis that it keeps, unless no other tree is legal",
    _partial_tiles,
)  # fmt: skip
PADDING = PruningRule(
    "padding", "tiles divide an extent that is a power of two, and pad others by less than 5%", without_padding
)
RULES = (EQUAL_TREES, PARTIAL_TILES, PADDING)
"""Those that judge trees and sizes apart, in order. The fourth, memory, judges candidates: `within_memory`."""
MEMORY = "shared memory and registers"


def prune(space: Space) -> tuple[Space, tuple[Stage, ...]]:
    """Applies the first three rules; returns what is left, and the number of candidates before and after each."""
    stages = []
    for rule in RULES:
        before = space.count
        space = rule.apply(space)
        stages.append(Stage(rule.name, before, space.count))
    return space, tuple(stages)


def within_memory(space: Space, model: Model) -> Stage:
    """Counts the candidates whose tiles fit a block's shared memory and registers: the fourth rule."""
    prices, sizes = ModelPrices(space, model), space.all_sizes()
    fitting = sum(int(np.isfinite(prices.of_tree(tree, sizes)).sum()) for tree in range(len(space.trees)))
    return Stage(MEMORY, space.count, fitting)


# --- the paper's own counts, over tiling expressions

READINGS: dict[str, Callable[[ex.Expression, Region], frozenset[str]]] = {
    "spatial loops are those of the grid": ex.bound_where_possible,
    "spatial loops are those of the grid where nothing is recomputed for it": ex.bound_without_recomputing,
}
"""The two readings of the paper's first rule: the axes of the grid that each takes from an expression."""


def expression_stages(region: Region, reading: str) -> tuple[Stage, ...]:
    """Counts tiling expressions before and after the first two rules, by one of the readings."""
    bound = READINGS[reading]
    every = ex.expressions(region)
    blocks = {ex.without(e, bound(e, region)) for e in every}
    left = [e for e in blocks if not ex.holds_partial_tiles(e, region)]
    return (Stage(EQUAL_TREES.name, len(every), len(blocks)), Stage(PARTIAL_TILES.name, len(blocks), len(left)))
