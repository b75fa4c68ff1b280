"""The cheapest term of a class, and the nests that compute it.

Costs rank terms; what is taken in the end is judged by `price_xla` of the whole part.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, add, const, convert, div, mul, read, sub
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import SUM
from pallasfuse.search.costs import DIVISION, Costing
from pallasfuse.search.egraph import EGraph, Inverse, Leaf, Number, Over, Plus, Times


@dataclass(frozen=True, slots=True)
class Product:
    """A sum of a product of two classes: a contraction."""

    axes: frozenset[Axis]
    left: int
    right: int


type Choice = Leaf | Number | Times | Plus | Over | Inverse | Product


def parts_of(choice: Choice) -> tuple[int, ...]:
    """The classes that a choice is computed from."""
    match choice:
        case Times(factors):
            return factors
        case Plus(terms):
            return terms
        case Over(_, term) | Inverse(term):
            return (term,)
        case Product(_, left, right):
            return left, right
    return ()


@dataclass
class Costs:
    """The least cost of every class of a graph, in microseconds, and the choice that has it."""

    graph: EGraph
    costing: Costing
    us: dict[int, float] = field(default_factory=dict)
    best: dict[int, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choices = {n: list(self._choices(n)) for n in self.graph.classes()}
        changed = True
        while changed:  # every round settles at least one more level of the cheapest terms
            changed = False
            for number, found in choices.items():
                for choice, own_us in found:
                    parts = [self.us.get(self.graph.find(p), math.inf) for p in parts_of(choice)]
                    us = own_us + sum(parts)
                    if us < self.us.get(number, math.inf) * (1 - 1e-9):
                        self.us[number], self.best[number] = us, choice
                        changed = True

    def choice(self, number: int) -> Choice:
        return self.best[self.graph.find(number)]

    def _choices(self, number: int) -> Iterator[tuple[Choice, float]]:
        graph, axes = self.graph, self.graph.axes(number)
        for node in graph.nodes(number):
            match node:
                case Leaf() | Number():
                    yield node, 0.0
                case Times(factors) | Plus(factors):
                    yield node, self.costing.elementwise(axes, len(factors) - 1)
                case Inverse():
                    yield node, self.costing.elementwise(axes, DIVISION)
                case Over(summed, term):
                    yield node, self.costing.sum(axes | summed, axes)
                    for inner in graph.nodes(term):
                        if isinstance(inner, Times) and len(inner.factors) == 2:
                            left, right = inner.factors
                            if summed <= graph.axes(left) & graph.axes(right):
                                us = self.costing.product(summed, graph.axes(left), graph.axes(right))
                                yield Product(summed, left, right), us


@dataclass
class Nests:
    """The nests that compute the cheapest terms of a graph; what several of them read is computed once.

    names: yields names that nothing has. precision: of products.
    """

    costs: Costs
    names: Iterator[str]
    precision: str | None
    like: Nest
    """The nest whose source line the new ones have."""
    made: list[Nest] = field(default_factory=list)
    _known: dict[int, dict[str, Expr]] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        return self.costs.costing.dtype

    @property
    def wide(self) -> str:
        """The type of what is not an operand of a contraction: nothing is rounded in between."""
        return dtypes.accumulator(self.dtype)

    def root(self, number: int, nest: Nest) -> Nest:
        """The nest `nest` with the cheapest term of a class as its body."""
        last = isinstance(self.costs.choice(number), Product | Over)  # rounded when it is stored
        value = self._stored(number, self.dtype if last else self.wide)
        return self._nest(nest.name, nest.axes, convert(value, self.dtype), self.dtype)

    def _stored(self, number: int, dtype: str) -> Expr:
        """A read of what a class computes, or a literal. dtype: in which it is stored, if it is not an operand of the program."""
        number = self.costs.graph.find(number)
        known = self._known.setdefault(number, {})
        if not known or (dtype not in known and not isinstance(self.costs.choice(number), Leaf)):
            known[dtype] = self._compute(number, self.costs.choice(number), dtype)
        return known.get(dtype) or next(iter(known.values()))

    def _compute(self, number: int, choice: Choice, dtype: str) -> Expr:
        axes = self.costs.graph.axes(number)
        match choice:
            case Leaf(of):
                return of
            case Number(value):
                return const(value, dtype)
            case Times(factors):
                return self._map(axes, self._product_of(factors), dtype)
            case Plus(terms):
                return self._map(axes, self._sum_of(terms), dtype)
            case Inverse(term):
                return self._map(axes, div(const(1.0, self.wide), self._operand(term)), dtype)
            case Over(summed, term):
                body = self._operand(term)
                order = self._order(body)
                kept = tuple(a for a in order if a not in summed)
                return self._read(
                    self._nest(next(self.names), kept, body, dtype, tuple(a for a in order if a in summed))
                )
            case Product(summed, left, right):
                return self._contraction(summed, left, right, dtype)

    def _product_of(self, factors: tuple[int, ...]) -> Expr:
        """The product of classes; inverses among them divide it."""
        choices = {f: self.costs.choice(f) for f in factors}
        below = [c.term for c in choices.values() if isinstance(c, Inverse)]
        above = [f for f in factors if not isinstance(choices[f], Inverse)]
        value = self._operand(above[0]) if above else const(1.0, self.wide)
        for factor in above[1:]:
            value = mul(value, self._operand(factor))
        for term in below:
            value = div(value, self._operand(term))
        return value

    def _sum_of(self, terms: tuple[int, ...]) -> Expr:
        """The sum of classes; what is multiplied by -1 is subtracted."""
        negated = {t: self._negated(t) for t in terms}
        added = [self._operand(t) for t in terms if negated[t] is None]
        taken = [self._operand(n) for t in terms if (n := negated[t]) is not None]
        if not added:
            added = [const(0.0, self.wide)]
        value = added[0]
        for term in added[1:]:
            value = add(value, term)
        for term in taken:
            value = sub(value, term)
        return value

    def _negated(self, number: int) -> int | None:
        """The class of which this one is the negative."""
        choice = self.costs.choice(number)
        graph = self.costs.graph
        if isinstance(choice, Times) and len(choice.factors) == 2:
            for one, other in (choice.factors, choice.factors[::-1]):
                if graph.number_of(one) == -1.0:
                    return other
        return None

    def _operand(self, number: int) -> Expr:
        """What a class computes, in the wide type."""
        return convert(self._stored(number, self.wide), self.wide)

    def _contraction(self, summed: frozenset[Axis], left: int, right: int, dtype: str) -> Expr:
        first, second = self._stored(left, self.dtype), self._stored(right, self.dtype)
        a, b = self._order(first), self._order(second)
        batch = tuple(x for x in a if x in b and x not in summed)
        kept = (*batch, *(x for x in a if x not in b), *(x for x in b if x not in a))
        if first.dtype != second.dtype:
            first, second = convert(first, self.dtype), convert(second, self.dtype)
        body = mul(convert(first, self.wide), convert(second, self.wide))
        reduced = tuple(x for x in a if x in summed)
        return self._read(self._nest(next(self.names), kept, body, dtype, reduced, self.precision))

    def _order(self, stored: Expr) -> tuple[Axis, ...]:
        """The axes of what is stored, in its order."""
        return next(self._reads(stored), ())

    def _map(self, axes: frozenset[Axis], body: Expr, dtype: str) -> Expr:
        order = next((i for i in self._reads(body) if axes == frozenset(i)), tuple(sorted(axes)))
        return self._read(self._nest(next(self.names), order, convert(body, dtype), dtype))

    def _reads(self, body: Expr) -> Iterator[tuple[Axis, ...]]:
        """Yields the orders of axes in which a body reads."""
        waiting = [body]
        while waiting:
            node = waiting.pop(0)
            waiting += node.args
            indices = getattr(node, "indices", None)
            if indices is not None:
                yield indices

    def _nest(
        self, name: str, axes: tuple[Axis, ...], body: Expr, dtype: str, summed: tuple[Axis, ...] = (), precision: str | None = None
    ) -> Nest:  # fmt: skip
        reducer = SUM if summed else None
        nest = Nest(name, axes, body, dtype, summed, reducer, self.like.source, precision)
        self.made.append(nest)
        return nest

    def _read(self, nest: Nest) -> Expr:
        return read(nest.name, nest.axes, nest.dtype)
