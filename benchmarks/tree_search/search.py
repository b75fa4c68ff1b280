"""The search for the candidate with the lowest price: all of them where they are few, else evolution (MCFuser, algorithm 1)."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.tree_search import moves
from pallasfuse.ir.tree import TreeKernel
from pallasfuse.schedule.candidates import Candidate, ModelPrices, Space

MOST_EXHAUSTIVE = 10_000
"""Candidates up to which every one is priced."""


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


def by_model(prices: ModelPrices) -> Prices:
    """Returns the prices of the model, many of one tree at a time."""

    def found(candidates: Sequence[Candidate]) -> list[float]:
        us = np.empty(len(candidates))
        trees = np.array([c.tree for c in candidates])
        sizes = np.array([c.sizes for c in candidates], dtype=np.int64).reshape(len(candidates), -1)
        for tree in np.unique(trees):
            rows = trees == tree
            us[rows] = prices.of_tree(int(tree), sizes[rows])
        return [float(u) for u in us]

    return found


@dataclass(frozen=True, slots=True)
class Evolution:
    """The parameters of algorithm 1."""

    population: int = 256
    measured: int = 8
    """The best by price, which are measured in each generation, and whose neighbours are all tried at the end."""
    epsilon: float = 1e-3
    """The search ends when a generation improves the best by a smaller share, `patience` times one after the other."""
    patience: int = 3
    generations: int = 100
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found: its best candidates with their prices, the best first, and how many it priced."""

    best: tuple[tuple[float, Candidate], ...]
    priced: int

    @property
    def us(self) -> float:
        """The lowest time; infinity where nothing could run."""
        return self.best[0][0] if self.best else float("inf")


def search(
    space: Space,
    prices: Prices,
    *,
    keep: int = 10,
    evolution: Evolution | None = None,
    measure: Callable[[Candidate], float] | None = None,
) -> Found:
    """Searches a space: exhaustively where it is small, unless `evolution` is given.

    measure: microseconds of a candidate on the device; without it the price decides alone. Equal arguments find the same.
    """
    if evolution is None and space.count <= MOST_EXHAUSTIVE and measure is None:
        every = list(space)
        return _found(space, dict(zip(every, prices(every), strict=True)), keep)
    return _Search(space, prices, evolution or Evolution(), measure).run(keep)


def _found(space: Space, us: dict[Candidate, float], keep: int) -> Found:
    """Returns the best candidates, each tree once: two are equal where they differ by a loop that runs once."""
    best: dict[TreeKernel, tuple[float, Candidate]] = {}
    for candidate in sorted(us, key=lambda c: (us[c], c)):
        if len(best) < keep and (us[candidate] < float("inf") or not best):
            best.setdefault(space.tree(candidate), (us[candidate], candidate))
        else:
            break
    return Found(tuple(best.values()), len(us))


class _Search:
    """One run of algorithm 1."""

    def __init__(
        self, space: Space, prices: Prices, evolution: Evolution, measure: Callable[[Candidate], float] | None
    ) -> None:
        self.space, self.prices, self.evolution, self.measure = space, prices, evolution, measure
        self.draw = random.Random(evolution.seed)
        self.choices = tuple(space.choices.values())
        self.known: dict[Candidate, float] = {}
        self.measured: dict[Candidate, float] = {}
        self.near = moves.Neighbours(space)

    def run(self, keep: int) -> Found:
        population = self._first()
        best, still = float("inf"), 0
        for _ in range(self.evolution.generations):
            self._price(population)
            population = sorted(set(population), key=lambda c: (self.known[c], c))[: self.evolution.population]
            top = self._best(population[: self.evolution.measured])
            still = still + 1 if best < float("inf") and top >= best * (1 - self.evolution.epsilon) else 0
            best = min(best, top)
            if still >= self.evolution.patience:
                break
            population = population[: self.evolution.measured] + self._mutated(population)
        self._descend()
        if self.measure is not None:
            leaders = sorted(self.known, key=lambda c: (self.known[c], c))[: self.evolution.measured]
            self._best(leaders)
            return _found(self.space, self.measured, keep)
        return _found(self.space, self.known, keep)

    def _first(self) -> list[Candidate]:
        """Returns random candidates: at least one of every tree where there are not more than that."""
        count = max(self.evolution.population, min(len(self.space.trees), 4 * self.evolution.population))
        trees = list(range(len(self.space.trees)))
        self.draw.shuffle(trees)
        return [
            Candidate(trees[n % len(trees)], tuple(self.draw.choice(c) for c in self.choices)) for n in range(count)
        ]

    def _price(self, candidates: Iterable[Candidate]) -> None:
        new = [c for c in dict.fromkeys(candidates) if c not in self.known]
        if new:
            self.known.update(zip(new, self.prices(new), strict=True))

    def _best(self, candidates: Sequence[Candidate]) -> float:
        """Returns the least time of some candidates, measured where that is asked for."""
        if self.measure is None:
            return min((self.known[c] for c in candidates), default=float("inf"))
        for c in candidates:
            if c not in self.measured and self.known[c] < float("inf"):
                self.measured[c] = self.measure(c)
        return min((self.measured[c] for c in candidates if c in self.measured), default=float("inf"))

    def _mutated(self, population: Sequence[Candidate]) -> list[Candidate]:
        """Returns candidates that differ from those of the population in one tile or one move; the faster, the more often."""
        weights = np.array([1.0 / self.known[c] for c in population])  # nothing for what is infinitely slow
        if weights.sum() == 0:
            return self._first()
        parents = self.draw.choices(population, list(weights), k=self.evolution.population)
        return [self._mutant(p) for p in parents]

    def _mutant(self, parent: Candidate) -> Candidate:
        others = self.near.trees(parent.tree)
        axes = [n for n, c in enumerate(self.choices) if len(c) > 1]
        if others and (not axes or self.draw.random() < 1 / (1 + len(axes))):
            return parent._replace(tree=self.draw.choice(others))
        if not axes:
            return parent
        n = self.draw.choice(axes)
        return parent._replace(sizes=(*parent.sizes[:n], self.draw.choice(self.choices[n]), *parent.sizes[n + 1 :]))

    def _descend(self) -> None:
        """Tries all neighbours of the best of every tree among the leaders, until none is faster."""
        ordered = sorted((c for c in self.known if self.known[c] < float("inf")), key=lambda c: (self.known[c], c))
        leaders: dict[int, Candidate] = {}
        for c in ordered:
            leaders.setdefault(c.tree, c)
        for start in list(leaders.values())[: self.evolution.measured]:
            at = start
            while True:
                around = list(self.near.of(at))
                self._price(around)
                better = min(around, key=lambda c: (self.known[c], c), default=at)
                if self.known[better] >= self.known[at]:
                    break
                at = better
