"""Candidates: a tree with the sizes of its tiles; a space of them, and their prices by the model, many at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from pallasfuse.schedule.space import Dropped, tiled

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


Prices = Callable[[Sequence[Candidate]], Sequence[float]]
"""Returns the microseconds of candidates; infinity for one that is illegal or does not fit."""


def each(space: Space, price: Callable[[TreeKernel], float]) -> Prices:
    """Returns prices that take one tree at a time; candidates with equal trees are priced once."""
    known: dict[TreeKernel, float] = {}

    def prices(candidates: Sequence[Candidate]) -> list[float]:
        found = [space.tree(c) for c in candidates]
        for tree in found:
            if tree not in known:
                known[tree] = price(tree)
        return [known[tree] for tree in found]

    return prices


@dataclass
class ModelPrices:
    """The prices of a space's candidates by the model. Those with the same loops that run once are priced together."""

    space: Space
    model: Model
    _placements: dict[tuple[int, frozenset[str]], Placement | None] = field(default_factory=dict)
    _serial: dict[int, frozenset[str]] = field(default_factory=dict)
    _of_every: dict[int, list[tuple[Integers, Amounts]]] = field(default_factory=dict)

    def __call__(self, candidates: Sequence[Candidate]) -> list[float]:
        us = np.empty(len(candidates))
        trees = np.array([c.tree for c in candidates])
        sizes = np.array([c.sizes for c in candidates], dtype=np.int64).reshape(len(candidates), -1)
        for tree in np.unique(trees):
            rows = trees == tree
            us[rows] = self.of_tree(int(tree), sizes[rows])
        return [float(u) for u in us]

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

    def fitting(self, tree: int, sizes: Integers) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Returns which candidates are legal and fit."""
        result = np.zeros(len(sizes), dtype=np.bool_)
        for rows, placement in self._placed(tree, sizes):
            result[rows] = self.model.fits(self.model.estimate(placement, self._by_axis(sizes[rows])))
        return result

    def best(self) -> tuple[float, Candidate]:
        """Returns the lowest price of all candidates, by trying each."""
        sizes = self.space.all_sizes()
        found = (np.inf, Candidate(0, tuple(int(s) for s in sizes[0])))
        for tree in range(len(self.space.trees)):
            us = self.of_tree(tree, sizes)
            n = int(np.argmin(us))
            if us[n] < found[0]:
                found = (float(us[n]), Candidate(tree, tuple(int(s) for s in sizes[n])))
        return found

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
