"""Candidates: a tree with the sizes of its tiles; a space of them, and their prices by the model, many at a time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from pallasfuse.device import Device
from pallasfuse.ir.region import Region
from pallasfuse.ir.tree import RangeLoop, TreeKernel, walk
from pallasfuse.schedule import tiles
from pallasfuse.schedule.model import Amounts, Model
from pallasfuse.schedule.placement import Broken, MayFold, Placement, no_folds, place
from pallasfuse.schedule.space import Dropped, Signature, canonical, signature, tiled

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


class Candidate(NamedTuple):
    """The number of a tree in its space, and the size of the tile along each axis."""

    tree: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Space:
    """Trees and the sizes to choose from: every tree with every tuple of sizes is a candidate."""

    region: Region
    trees: tuple[TreeKernel, ...]
    choices: tiles.Choices
    may_fold: MayFold = no_folds
    dropped: Dropped = field(default_factory=dict, init=False, repr=False, compare=False)
    """What `tiled` has found so far."""

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.choices)

    @property
    def count(self) -> int:
        return len(self.trees) * tiles.count(self.choices)

    def __iter__(self) -> Iterator[Candidate]:
        for tree, *sizes in product(range(len(self.trees)), *self.choices.values()):
            yield Candidate(tree, tuple(sizes))

    def tree(self, candidate: Candidate) -> TreeKernel:
        """Returns the tree of a candidate with its tiles."""
        sizes = dict(zip(self.axes, candidate.sizes, strict=True))
        return tiled(self.region, self.trees[candidate.tree], sizes, self.may_fold, self.dropped)

    def all_sizes(self) -> Integers:
        """Returns every tuple of sizes: one row for each, one column for each axis."""
        found = np.meshgrid(*(np.array(c, dtype=np.int64) for c in self.choices.values()), indexing="ij")
        return np.stack([f.ravel() for f in found], axis=1) if found else np.zeros((1, 0), np.int64)


def without_equal_trees(space: Space) -> Space:
    """Returns a space with one of the trees that do the same in each block."""
    found: dict[Signature, TreeKernel] = {}
    for form in dict.fromkeys(canonical(space.region, tree) for tree in space.trees):
        placement = place(space.region, form, space.may_fold)
        if not isinstance(placement, Broken) and not placement.unread:
            found.setdefault(signature(placement), form)
    return replace(space, trees=tuple(found.values()))


def without_padding(space: Space) -> Space:
    """Returns a space whose tiles divide an extent that is a power of two, and pad others by less than 5%."""
    axes = space.region.axes
    fitting = {
        a: tuple(s for s in sizes if sizes == (1,) or tiles.pads_little(axes[a].extent, s)) or sizes
        for a, sizes in space.choices.items()
    }
    return replace(space, choices=fitting)


@dataclass
class ModelPrices:
    """The prices of a space's candidates by the model. Those with the same loops that run once are priced together."""

    space: Space
    model: Model
    _placements: dict[tuple[int, frozenset[str]], Placement | None] = field(default_factory=dict)
    _serial: dict[int, frozenset[str]] = field(default_factory=dict)
    _of_every: dict[int, list[tuple[Integers, Amounts]]] = field(default_factory=dict)

    def on(self, device: Device) -> "ModelPrices":
        """Returns the prices on another device; what no device changes is found once for both."""
        return replace(self, model=self.model.on(device))

    def of_tree(self, tree: int, sizes: Integers) -> Floats:
        """Returns the prices of one tree with many tuples of sizes, one row each."""
        return self._priced(self._asked(tree, sizes), len(sizes))

    def of_every(self, tree: int) -> Floats:
        """Returns the prices of one tree with all tuples of sizes of the space, one row each."""
        sizes = self.every_size
        if tree not in self._of_every:
            self._of_every[tree] = self._asked(tree, sizes)
        return self._priced(self._of_every[tree], len(sizes))

    @cached_property
    def every_size(self) -> Integers:
        return self.space.all_sizes()

    def _asked(self, tree: int, sizes: Integers) -> list[tuple[Integers, Amounts]]:
        return [
            (rows, self.model.amounts(placement, self._by_axis(sizes[rows])))
            for rows, placement in self._placed(tree, sizes)
        ]

    def _priced(self, asked: Iterable[tuple[Integers, Amounts]], count: int) -> Floats:
        us = np.full(count, np.inf)
        for rows, amounts in asked:
            found = self.model.priced(amounts)
            us[rows] = np.where(self.model.fits(found), found.us, np.inf)
        return us

    def _by_axis(self, sizes: Integers) -> dict[str, Integers]:
        return dict(zip(self.space.axes, sizes.T, strict=True))

    def _placed(self, tree: int, sizes: Integers) -> Iterator[tuple[Integers, Placement]]:
        """Yields the rows of sizes with which the same serial loops run once, and the placement without these."""
        if tree not in self._serial:
            loops = [n for _, n in walk(self.space.trees[tree].body) if isinstance(n, RangeLoop)]
            self._serial[tree] = frozenset(n.axis for n in loops if n.level == "serial")
        extents = np.array([self.space.region.axes[a].extent for a in self.space.axes])
        serial = np.array([a in self._serial[tree] for a in self.space.axes], dtype=bool)
        once = (sizes >= extents) & serial
        patterns = once @ (1 << np.arange(once.shape[1], dtype=np.int64))
        for pattern in np.unique(patterns):
            rows = np.flatnonzero(patterns == pattern)
            placement = self._placement(tree, frozenset(a for n, a in enumerate(self.space.axes) if pattern >> n & 1))
            if placement is not None:
                yield rows, placement

    def _placement(self, tree: int, once: frozenset[str]) -> Placement | None:
        key = (tree, once)
        if key not in self._placements:
            extents = {a: self.space.region.axes[a].extent for a in once}
            whole = tiled(self.space.region, self.space.trees[tree], extents, self.space.may_fold, self.space.dropped)
            placement = place(self.space.region, whole, self.space.may_fold)
            self._placements[key] = None if isinstance(placement, Broken) else placement
        return self._placements[key]
