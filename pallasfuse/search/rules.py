"""The equivalences of sums and products with named axes, as data: what saturates an e-graph.

But for inverses they are complete: any two sums of products that are equal for all operands can be turned into each other (SPORES,
theorem 1), where none is refused for its rounding. Together with commuting and associating, which the graph has by itself, they
contain Mirage's equivalences of products, sums and scales, and Blockbuster's rules 4, 5 and 8.

A rule yields classes that equal the term it was given. It may be partial: what it leaves out is not searched, never wrong.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

from pallasfuse.ir.axes import Axis
from pallasfuse.search.egraph import (
    DiagonalError,
    EGraph,
    Inverse,
    Node,
    Over,
    Plus,
    Quality,
    Times,
    copies,
    plain_name,
)

_MOST_FACTORS = 7
"""A product of more is not split in all ways: there are 2 to this power."""

type Apply = Callable[[EGraph, Node], Iterator[int]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One equivalence."""

    name: str
    before: str
    after: str
    condition: str
    apply: Apply
    """Yields what equals a term, as classes."""


def _flattened(graph: EGraph, node: Node) -> Iterator[int]:
    match node:
        case Times(factors):
            for n, factor in enumerate(factors):
                for inner in graph.nodes(factor):
                    if isinstance(inner, Times):
                        yield graph.times([*factors[:n], *inner.factors, *factors[n + 1 :]])
        case Plus(terms):
            for n, term in enumerate(terms):
                for inner in graph.nodes(term):
                    if isinstance(inner, Plus):
                        yield graph.plus([*terms[:n], *inner.terms, *terms[n + 1 :]])
        case Over(axes, term):
            for inner in graph.nodes(term):
                if isinstance(inner, Over) and axes.isdisjoint(inner.axes):
                    yield graph.over(axes | inner.axes, inner.term)


def _merged(graph: EGraph, node: Node) -> Iterator[int]:
    """Takes the sum that is a factor of a product to the outside of it; its axes get other names where the product has them."""
    if not isinstance(node, Times):
        return
    for n, factor in enumerate(node.factors):
        others = (*node.factors[:n], *node.factors[n + 1 :])
        taken = frozenset().union(*(graph.axes(f) for f in others))
        for inner in graph.nodes(factor):
            if isinstance(inner, Over):
                renaming = copies(inner.axes & taken, taken | graph.axes(inner.term))
                term = graph.renamed(inner.term, renaming) if renaming else inner.term
                axes = [renaming.get(a, a) for a in inner.axes]
                yield graph.over(axes, graph.times([term, *others]))


def _split(graph: EGraph, node: Node) -> Iterator[int]:
    """Takes a sum of a product of many apart into one of two, each of them summed over what only it has."""
    if not isinstance(node, Over):
        return
    for product in graph.nodes(node.term):
        factors = _with_one_scalar(graph, product.factors) if isinstance(product, Times) else []
        if 1 < len(factors) <= _MOST_FACTORS:
            for left, right in _halves(factors):
                if _joined(graph, left) and _joined(graph, right):
                    yield _as_two(graph, node.axes, left, right)


def _with_one_scalar(graph: EGraph, factors: Sequence[int]) -> list[int]:
    """The factors of a product, with all that have no axis as one: they go together, wherever that is."""
    scalars = [f for f in factors if not graph.axes(f)]
    others = [f for f in factors if graph.axes(f)]
    return [*others, graph.times(scalars)] if scalars else others


def _as_two(graph: EGraph, axes: frozenset[Axis], left: Sequence[int], right: Sequence[int]) -> int:
    of_left, of_right = (frozenset().union(*(graph.axes(f) for f in side)) for side in (left, right))
    sides = [
        graph.over(axes & own - others, graph.times(side))
        for side, own, others in ((left, of_left, of_right), (right, of_right, of_left))
    ]
    return graph.over(axes & of_left & of_right, graph.times(sides))


def _halves(factors: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the ways to put factors on two sides, both with some, each way once."""
    first, *rest = factors
    for size in range(len(rest)):
        for chosen in combinations(range(len(rest)), size):
            left = [first, *(rest[n] for n in chosen)]
            right = [rest[n] for n in range(len(rest)) if n not in chosen]
            yield left, right


def _joined(graph: EGraph, factors: Sequence[int]) -> bool:
    """Do factors hang together by their axes? What does not is larger than its parts."""
    reached, waiting = frozenset(graph.axes(factors[0])), list(factors[1:])
    while waiting:
        near = [f for f in waiting if not graph.axes(f) or graph.axes(f) & reached]
        if not near:
            return False
        reached = reached.union(*(graph.axes(f) for f in near))
        waiting = [f for f in waiting if f not in near]
    return True


def _distributed(graph: EGraph, node: Node) -> Iterator[int]:
    match node:
        case Times(factors):
            for n, factor in enumerate(factors):
                others = (*factors[:n], *factors[n + 1 :])
                for inner in graph.nodes(factor):
                    if isinstance(inner, Plus) and is_stable(graph, inner, others):
                        yield graph.plus([graph.times([t, *others]) for t in inner.terms])
        case Over(axes, term):
            for inner in graph.nodes(term):
                if isinstance(inner, Plus) and is_stable(graph, inner):
                    yield graph.plus([graph.over(axes, t) for t in inner.terms])


def is_stable(graph: EGraph, node: Plus, others: Sequence[int] = ()) -> bool:
    """May what multiplies a sum, `others`, multiply each of its terms instead?

    Where the terms cancel, a product of each is much larger than the product of their sum, and so is its error. Where all terms but
    one have an error in the order of their own size, the sum has that error already: |a| <= |a + b| + |b|. What multiplies it must
    have no larger error than a rounding of its own: that of a sum that cancels would be multiplied by each term, too.
    """
    found = [graph.quality(t) for t in node.terms]
    exact = Quality.CANCELLED not in found and found.count(Quality.EXACT) <= 1
    return exact and not any(map(graph.adds_up, others))


def _factored(graph: EGraph, node: Node) -> Iterator[int]:
    """Takes what is a factor of two terms of a sum out of both, or the axes that both are summed over."""
    if not isinstance(node, Plus):
        return
    for one, other in combinations(range(len(node.terms)), 2):
        rest = [t for n, t in enumerate(node.terms) if n not in (one, other)]
        for joined in _common(graph, node.terms[one], node.terms[other]):
            yield graph.plus([joined, *rest]) if rest else joined


def _common(graph: EGraph, one: int, other: int) -> Iterator[int]:
    for left in _products(graph, one):
        for right in _products(graph, other):
            if not any(factor in right for factor in left):
                continue
            shared = Counter(left) & Counter(right)
            for factor in shared:
                yield graph.times([factor, graph.plus([_without(graph, left, factor), _without(graph, right, factor)])])
    for a in graph.nodes(one):
        for b in graph.nodes(other):
            if isinstance(a, Over) and isinstance(b, Over) and (named := _named_alike(graph, a, b)) is not None:
                yield graph.over(a.axes, graph.plus([a.term, graph.renamed(b.term, named)]))


def _named_alike(graph: EGraph, a: Over, b: Over) -> dict[Axis, Axis] | None:
    """Names of the axes of one sum for those of another; None where they are not sums over copies of the same axes."""
    own, wanted = ({(plain_name(x), x.extent): x for x in axes} for axes in (b.axes - a.axes, a.axes - b.axes))
    distinct = len(own) == len(b.axes - a.axes) == len(a.axes - b.axes)
    if not distinct or own.keys() != wanted.keys() or graph.axes(b.term) & frozenset(wanted.values()):
        return None
    return {own[key]: wanted[key] for key in own}


def _products(graph: EGraph, number: int) -> Iterator[tuple[int, ...]]:
    """Yields the ways in which a class is a product: of itself alone, too."""
    yield (graph.find(number),)
    yield from (tuple(map(graph.find, n.factors)) for n in graph.nodes(number) if isinstance(n, Times))


def _without(graph: EGraph, factors: Sequence[int], factor: int) -> int:
    rest = list(factors)
    rest.remove(factor)
    return graph.times(rest)


def _picked(graph: EGraph, node: Node) -> Iterator[int]:
    """Reads at one position what is multiplied by a delta and summed over all positions."""
    if not isinstance(node, Over):
        return
    for product in graph.nodes(node.term):
        for n, factor in enumerate(product.factors if isinstance(product, Times) else ()):
            for axis, other in permutations(graph.delta(factor) or (), 2):
                if axis in node.axes and axis.extent == other.extent:
                    assert isinstance(product, Times)
                    others = graph.times([*product.factors[:n], *product.factors[n + 1 :]])
                    try:
                        yield graph.over(node.axes - {axis}, graph.renamed(others, {axis: other}))
                    except DiagonalError:
                        continue


def _inverted(graph: EGraph, node: Node) -> Iterator[int]:
    if isinstance(node, Inverse):
        for inner in graph.nodes(node.term):
            if isinstance(inner, Times):
                yield graph.times([graph.inverse(f) for f in inner.factors])


FLATTEN = Rule("flatten", "a·(b·c), a + (b + c), Σᵢ Σⱼ a", "a·b·c, a + b + c, Σᵢⱼ a", "i and j differ", _flattened)
MERGE = Rule("merge", "a · Σᵢ b", "Σᵢ a·b", "a does not have i: else it gets another name first", _merged)
SPLIT = Rule("split", "Σᵢⱼₖ a·b", "Σₖ (Σᵢ a)·(Σⱼ b)", "only a has i, only b has j, both have k", _split)
FACTOR = Rule("factor", "a·b + a·c, Σᵢ b + Σᵢ c", "a·(b + c), Σᵢ (b + c)", "", _factored)
INVERT = Rule("invert", "1 / (a·b)", "1/a · 1/b", "", _inverted)
DISTRIBUTE = Rule(
    "distribute", "a·(b + c), Σᵢ (b + c)", "a·b + a·c, Σᵢ b + Σᵢ c",
    "of b and c one at most is exact: else their sum may be small and exact, which its parts are not; a is no sum", _distributed,
)  # fmt: skip
PICK = Rule("pick", "Σᵢ δᵢⱼ·a", "a, with j for i", "i and j are equally long, and a has no tensor with both", _picked)
RULES = (FLATTEN, MERGE, SPLIT, PICK, FACTOR, INVERT, DISTRIBUTE)
PRODUCTS = (FLATTEN, MERGE, SPLIT, PICK, INVERT)
"""The rules that leave sums of several terms alone."""
PHASES = ((*PRODUCTS, FACTOR), (*PRODUCTS, DISTRIBUTE))
"""What is applied together. Factors are taken out first: of what was distributed, they would be the same again."""
