"""An e-graph over sums and products with named axes: many equal terms at once, each shared part once.

    term = Leaf(read) | Number(value) | Times(terms) | Plus(terms) | Over(axes, term) | Inverse(term)

`Over(axes, term)` is the sum of a term over axes. A term has the axes of what it reads, less those that it is summed over; where
two terms are multiplied or added, each stretches along the axes that only the other one has. So a matrix product is an `Over` of a
`Times`, and transposes and broadcasts are nothing at all (SPORES, Wang et al., VLDB 2020, calls this relational algebra).

Products and sums have any number of operands, in the order of their numbers: that they commute and associate needs no rules, which
is why the graph is our own and no general one. A class holds terms that are equal; its axes are those of all of them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import IntEnum
from itertools import count

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Read, read


@dataclass(frozen=True, slots=True)
class Leaf:
    """An element of a tensor that the graph does not look into."""

    read: Read


@dataclass(frozen=True, slots=True)
class Number:
    """A literal."""

    value: float


@dataclass(frozen=True, slots=True)
class Times:
    """The product of classes, sorted by their numbers."""

    factors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plus:
    """The sum of classes, sorted by their numbers."""

    terms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Over:
    """The sum of a class over some of its axes."""

    axes: frozenset[Axis]
    term: int


@dataclass(frozen=True, slots=True)
class Inverse:
    """One divided by a class."""

    term: int


class Quality(IntEnum):
    """The error of a term, measured by the sum of the magnitudes of all that is added up in it."""

    CANCELLED = 0
    """It may be much smaller: a difference of exact values, for one."""
    EXACT = 1
    """There is none."""
    ROUNDED = 2
    """It is in the order of a rounding of that sum."""


type Node = Leaf | Number | Times | Plus | Over | Inverse


class FullError(Exception):
    """The graph has as many terms as it may have."""


class DiagonalError(Exception):
    """A tensor would be read along its diagonal, which is no leaf."""


class EGraph:
    """Classes of equal terms, by number. `find` gives the number that stands for a class now."""

    def __init__(self, most: int = 4000, deltas: Set[str] = frozenset()) -> None:
        """most: terms; one more raises `FullError`. deltas: tensors of two axes that are true where their positions are equal."""
        self.most, self._deltas = most, deltas
        self._parent: list[int] = []
        self._nodes: list[dict[Node, None]] = []
        self._axes: list[frozenset[Axis]] = []
        self._quality: list[Quality] = []
        self._table: dict[Node, int] = {}
        self._grown: list[int] = []
        self._sums: dict[int, bool] = {}
        self._growths = count()

    # --- reading

    def find(self, number: int) -> int:
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number

    def nodes(self, number: int) -> tuple[Node, ...]:
        """The terms of a class."""
        return tuple(self._nodes[self.find(number)])

    def axes(self, number: int) -> frozenset[Axis]:
        """The axes of a class."""
        return self._axes[self.find(number)]

    def classes(self) -> list[int]:
        return [n for n, p in enumerate(self._parent) if n == p]

    def number_of(self, number: int) -> float | None:
        """The value of a class that is a literal."""
        return next((n.value for n in self.nodes(number) if isinstance(n, Number)), None)

    def quality(self, number: int) -> Quality:
        """How exact a class is where its terms are computed as they are written."""
        return self._quality[self.find(number)]

    def delta(self, number: int) -> tuple[Axis, Axis] | None:
        """The axes of a class that is one where their positions are equal, and else zero."""
        for node in self.nodes(number):
            if isinstance(node, Leaf) and node.read.tensor in self._deltas:
                a, b = node.read.indices
                return a, b
        return None

    def state(self, node: Node) -> tuple[int, ...]:
        """Differs from before once a class that a term is made of has more terms."""
        return tuple(self._grown[self.find(n)] for n in operands(node))

    def __len__(self) -> int:
        return len(self._table)

    # --- making

    def leaf(self, of: Read) -> int:
        """An element of a tensor.

        Raises:
          DiagonalError: two of its dimensions have the same axis.
        """
        if len(of.axes) < len(of.indices):
            raise DiagonalError
        return self._add(Leaf(of), of.axes)

    def literal(self, value: float) -> int:
        return self._add(Number(float(value)), frozenset())

    def times(self, factors: Iterable[int]) -> int:
        """The product of classes; literals among them become one, and a factor of one is left out."""
        value, others = self._apart(factors)
        scale = math.prod(value)
        if scale != 1 or not others:
            others.append(self.literal(scale))
        if len(others) == 1:
            return others[0]
        return self._add(Times(tuple(sorted(others))), self._axes_of(others))

    def plus(self, terms: Iterable[int]) -> int:
        """The sum of classes."""
        found = sorted(self.find(t) for t in terms)
        return found[0] if len(found) == 1 else self._add(Plus(tuple(found)), self._axes_of(found))

    def over(self, axes: Iterable[Axis], term: int) -> int:
        """The sum of a class over axes; along those that it does not have, it is as often as they are long."""
        own = self.axes(term)
        within = frozenset(axes) & own
        repeated = math.prod(a.extent for a in frozenset(axes) - own)
        summed = self._add(Over(within, self.find(term)), own - within) if within else self.find(term)
        return summed if repeated == 1 else self.times([self.literal(repeated), summed])

    def inverse(self, term: int) -> int:
        value = self.number_of(term)
        if value:
            return self.literal(1.0 / value)
        return self._add(Inverse(self.find(term)), self.axes(term))

    def renamed(self, number: int, renaming: Mapping[Axis, Axis], done: dict[int, int] | None = None) -> int:
        """The class over other axes."""
        done = {} if done is None else done
        number = self.find(number)
        if self.axes(number).isdisjoint(renaming):
            return number
        if number not in done:
            node = next(iter(self._nodes[number]))
            match node:
                case Leaf(of):
                    done[number] = self.leaf(read(of.tensor, [renaming.get(a, a) for a in of.indices], of.dtype))
                case Number():
                    done[number] = number
                case Times(factors):
                    done[number] = self.times([self.renamed(f, renaming, done) for f in factors])
                case Plus(terms):
                    done[number] = self.plus([self.renamed(t, renaming, done) for t in terms])
                case Inverse(term):
                    done[number] = self.inverse(self.renamed(term, renaming, done))
                case Over(axes, term):
                    # what this sum binds keeps its meaning, and new names of what is outside are not caught by it
                    free = {a: b for a, b in renaming.items() if a not in axes}
                    outside = frozenset(free.values())
                    caught = copies(axes & outside, self.axes(term) | outside | frozenset(free))
                    inside = self.renamed(term, caught) if caught else term
                    done[number] = self.over([caught.get(a, a) for a in axes], self.renamed(inside, free))
        return done[number]

    def _apart(self, factors: Iterable[int]) -> tuple[list[float], list[int]]:
        values, others = [], []
        for factor in factors:
            value = self.number_of(factor)
            if value is None:
                others.append(self.find(factor))
            else:
                values.append(value)
        return values, others

    def _axes_of(self, numbers: Iterable[int]) -> frozenset[Axis]:
        return frozenset().union(*(self.axes(n) for n in numbers))

    def _add(self, node: Node, axes: frozenset[Axis]) -> int:
        found = self._table.get(node)
        if found is not None:
            return self.find(found)
        if len(self._table) >= self.most:
            raise FullError
        number = len(self._parent)
        self._parent.append(number)
        self._nodes.append({node: None})
        self._axes.append(axes)
        self._quality.append(self._quality_of(node))
        self._grown.append(next(self._growths))
        self._table[node] = number
        return number

    def _quality_of(self, node: Node) -> Quality:
        parts = [self.quality(n) for n in operands(node)]
        match node:
            case Leaf() | Number():
                return Quality.EXACT
            case Times(factors) if Quality.CANCELLED not in parts:
                others = [f for f in factors if self.number_of(f) is None]
                # two small sums of large terms have a product whose error is small as well
                if len(others) > 1 and sum(map(self.adds_up, others)) > 1:
                    return Quality.CANCELLED
                return self.quality(others[0]) if len(others) == 1 else Quality.ROUNDED
            case Plus() if Quality.CANCELLED not in parts and parts.count(Quality.EXACT) <= 1:
                return Quality.ROUNDED
            case Over() if parts[0] is Quality.ROUNDED:
                return Quality.ROUNDED
            case Inverse():  # whatever it is of, it is rounded, and nothing more is added up in it
                return Quality.ROUNDED
        return Quality.CANCELLED

    def adds_up(self, number: int) -> bool:
        """May a class be much smaller than what is added up in it?"""
        number = self.find(number)
        if number not in self._sums:
            self._sums[number] = False  # what is made of itself adds nothing
            nodes = self.nodes(number)
            self._sums[number] = any(
                isinstance(n, Plus | Over) or (isinstance(n, Times) and any(map(self.adds_up, n.factors)))
                for n in nodes
            )
        return self._sums[number]

    # --- joining

    def union(self, one: int, other: int) -> bool:
        """Makes two classes one. False where they are already, or a rule has lost an axis: such terms stay apart."""
        one, other = sorted((self.find(one), self.find(other)))
        if one == other or self._axes[one] != self._axes[other]:
            return False
        self._parent[other] = one
        self._nodes[one] |= self._nodes[other]
        self._nodes[other] = {}
        self._grown[one] = next(self._growths)
        self._sums.clear()  # what is made of the joined class may add up more than before
        self._quality[one] = max(self._quality[one], self._quality[other])
        return True

    def rebuild(self) -> None:
        """Makes equal terms over joined classes one, until no two are left."""
        changed = True
        while changed:
            changed = False
            self._table = {}
            for number in self.classes():
                for node in tuple(self._nodes[number]):
                    now = with_classes(node, self.find)
                    if now != node:
                        self._nodes[self.find(number)].pop(node, None)
                        self._nodes[self.find(number)][now] = None
                    other = self._table.setdefault(now, self.find(number))
                    changed |= self.union(other, number)


def plain_name(axis: Axis) -> str:
    """The name of an axis, or of that which it is a copy of."""
    return axis.name.partition("~")[0]


def copies(axes: Iterable[Axis], taken: Set[Axis]) -> dict[Axis, Axis]:
    """Returns for each axis another one of its extent that is not taken: `k~1`, `k~2` and so on, the first that is free."""
    found: dict[Axis, Axis] = {}
    for axis in sorted(axes):
        name = plain_name(axis)
        named = (Axis(f"{name}~{n}", axis.extent) for n in count(1))
        found[axis] = next(a for a in named if a not in taken and a not in found.values())
    return found


def with_classes(node: Node, of: Callable[[int], int]) -> Node:
    """The term over other classes."""
    match node:
        case Times(factors):
            return Times(tuple(sorted(map(of, factors))))
        case Plus(terms):
            return Plus(tuple(sorted(map(of, terms))))
        case Over(axes, term):
            return Over(axes, of(term))
        case Inverse(term):
            return Inverse(of(term))
    return node


def operands(node: Node) -> Iterator[int]:
    """Yields the classes that a term is made of."""
    match node:
        case Times(factors):
            yield from factors
        case Plus(terms):
            yield from terms
        case Over(_, term) | Inverse(term):
            yield term
