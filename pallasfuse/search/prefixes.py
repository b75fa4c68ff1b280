"""All sequences of operators that compute what a program does, each once (Mirage, algorithm 1).

A sequence is made by adding one operator after the other to the program's inputs. Operators stand in the order of what they read:
the later one of their operands first, then the other one, then the operator itself. Every set of operators has exactly one such
order, so none is made twice. A *prefix* is left as soon as the abstract expression of its last operator is no part of the output's,
or as it has more results that nothing reads yet than operators to come could join.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pallasfuse.ir.axes import volume
from pallasfuse.ir.reducers import SUM
from pallasfuse.search.abstract import LAWS, Abstraction, Goal, Law
from pallasfuse.search.operators import COMMUTATIVE, Abstracts, Contract, Join, Map, Operator, Reduce, Written
from pallasfuse.search.written import Vocabulary

_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a search. The one on seconds is only for accidents: no machine needs so many for the prefixes."""

    operators: int = 5
    """The most operators that a sequence has; inputs are none."""
    prefixes: int = 50_000
    elements: int = 1 << 32
    """The most elements that a tensor in a sequence has."""
    seconds: float = 600.0


@dataclass
class Counted:
    """What a search has visited: prefixes by their number of operators, those that were left at once, and the end."""

    visited: dict[int, int] = field(default_factory=dict)
    pruned: int = 0
    """Operators that were not added to a prefix, because of their abstract expression; remembered answers count."""
    seconds: float = 0.0
    complete: bool = True

    @property
    def prefixes(self) -> int:
        return sum(self.visited.values())


BOUNDS = Bounds()


class _Enough(Exception):
    """A bound is reached."""


@dataclass
class Prefixes:
    """The search for sequences that compute the output of a program; `found` grows while it runs.

    laws: of abstract expressions; None: nothing is pruned by them. verified: is what is found compared with the output? Without
    pruning and without it, prefixes are counted only.
    """

    written: Written
    bounds: Bounds = BOUNDS
    laws: frozenset[Law] | None = LAWS
    verified: bool = True
    counted: Counted = field(default_factory=Counted)
    found: dict[int, None] = field(default_factory=dict)
    """The numbers of operators that compute the output."""

    def __post_init__(self) -> None:
        self._table = self.written.table
        self._vocabulary = Vocabulary.of(self.written)
        self._axes = frozenset(self.written.root.axes)
        self._pairs: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
        self._left: dict[tuple[int, int], int] = {}
        self._useful: dict[int, bool] = {}
        self._outputs: dict[int, bool] = {}
        self._goal: Goal | None = None
        if self.laws is not None:
            self._abstracts = Abstracts(self._table, Abstraction(self.laws))
            of_output = self._abstracts.of(self.written.output)
            self._goal = None if of_output is None else Goal(self._abstracts.abstraction, of_output)

    def run(self) -> "Prefixes":
        """Searches until all is visited, or a bound is reached."""
        start = time.perf_counter()
        self._end = start + self.bounds.seconds
        try:
            self._extend(
                list(self.written.inputs), len(self.written.inputs), frozenset(), (0, -1, -1), self.bounds.operators
            )
        except _Enough:
            self.counted.complete = False
        self.counted.seconds = time.perf_counter() - start
        return self

    def _extend(
        self, available: list[int], inputs: int, unread: frozenset[int], last: tuple[int, int, int], left: int
    ) -> None:
        """Visits all prefixes that a prefix is continued to.

        available: its inputs and operators. unread: operators that nothing reads. last: the order of its last operator, which is
        the places of its operands in `available`, the later one first, and its own number among what they can be combined to.
        left: operators to come.
        """
        depth = len(available) - inputs + 1
        for later in range(last[0], len(available)):
            first = last[1] if later == last[0] else -1
            for earlier in range(first, later + 1):
                least = last[2] if (later, earlier) == last[:2] else -1
                reads = {available[later]} if earlier < 0 else {available[later], available[earlier]}
                others = unread - reads
                if len(others) + 1 > left:
                    continue
                for kind, number in self._combined(available[later], available[earlier] if earlier >= 0 else -1):
                    if kind <= least:
                        continue
                    self._visit(depth)
                    if not others and self._is_output(number):
                        self.found[number] = None
                    if left > 1:
                        self._extend([*available, number], inputs, others | {number}, (later, earlier, kind), left - 1)

    def _visit(self, depth: int) -> None:
        visited = self.counted.visited
        visited[depth] = visited.get(depth, 0) + 1
        total = self.counted.prefixes
        if total >= self.bounds.prefixes or (total % 1024 == 0 and time.perf_counter() > self._end):
            raise _Enough

    def _combined(self, later: int, earlier: int) -> tuple[tuple[int, int], ...]:
        """The useful operators that read one tensor (earlier: -1), or two: each with its place among all of them."""
        key = later, earlier
        if key not in self._pairs:
            combined = self._of_one(later) if earlier < 0 else self._of_two(later, earlier)
            every = [self._table.number(o) for o in combined]
            every = [n for n in every if volume(self._table.axes[n]) <= self.bounds.elements]
            self._pairs[key] = tuple((n, o) for n, o in enumerate(every) if self._is_useful(o))
            self._left[key] = len(every) - len(self._pairs[key])
        self.counted.pruned += self._left[key]
        return self._pairs[key]

    def _of_one(self, operand: int) -> Iterator[Operator]:
        for function in self._vocabulary.functions:
            yield Map(function, operand)
        for reducer, axes in self._vocabulary.folds:
            if axes <= self._table.axes[operand]:
                yield Reduce(reducer, axes, operand)

    def _of_two(self, one: int, other: int) -> Iterator[Operator]:
        for operation in self._vocabulary.operations:
            yield Join(operation, other, one)
            if operation not in COMMUTATIVE and one != other:
                yield Join(operation, one, other)
        for reducer, axes in self._vocabulary.folds:
            if reducer == SUM and axes <= self._table.axes[one] & self._table.axes[other]:
                yield Contract(axes, other, one)

    def _is_useful(self, number: int) -> bool:
        """May an operator be a part of the output?"""
        if self._goal is None:
            return True
        if number not in self._useful:
            of = self._abstracts.of(number)
            self._useful[number] = of is None or self._goal.has_part(of)
        return self._useful[number]

    def _is_output(self, number: int) -> bool:
        """Does an operator compute the output, on drawn inputs?"""
        if self._table.axes[number] != self._axes:
            return False
        if self._goal is not None:
            of = self._abstracts.of(number)
            if of is not None and of != self._goal.of:
                return False
        elif not self.verified:
            return False
        if not self.verified:
            return True
        if number not in self._outputs:
            expected, got = self._table.value(self.written.output), self._table.value(number)
            self._outputs[number] = bool(np.allclose(got, expected, rtol=_TOLERANCE, atol=_TOLERANCE))
        return self._outputs[number]
