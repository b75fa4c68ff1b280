"""Is there a cheaper order? A quick answer, before an e-graph is made: most parts of most programs have none.

Of every sum of several terms the term is followed that costs most: what is left is one product of operands, summed over axes. All
orders of it are compared by a dynamic program over subsets. No form of the whole takes less than the cheapest of them, unless terms
that are added have a factor in common, which is looked for apart.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Read, postorder
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.search.costs import Costing
from pallasfuse.search.egraph import copies

_MOST_OPERANDS = 9
"""Orders of a longer product are not compared."""
_SCALING = frozenset({"mul", "div", "convert", "neg"})


def is_scaling(nest: Nest) -> bool:
    """Is a map the product of several tensors, or their quotient?"""
    several = len(nest.reads) > 1 and not nest.is_reduction
    return several and all(n.op in _SCALING for n in postorder(nest.body) if isinstance(n, Apply))


@dataclass(frozen=True, slots=True)
class Written:
    """A product as the program computes it: the axes of its operands, those of the result, and the cost of its contractions."""

    operands: tuple[frozenset[Axis], ...]
    axes: frozenset[Axis]
    us: float


def may_gain(part: LoopProgram, nests: Mapping[str, Nest], costing: Costing) -> bool:
    """Could the first output of a part be computed in clearly less time by another order of its sums and products?"""
    root, *others = part.outputs
    inside = {name: nest for name, nest in nests.items() if name not in others}
    if any(_adds_contractions(nest, inside) for nest in inside.values()):
        return True
    leading = _Leading(inside, costing).value(root, inside[root].axes)
    least = least_us(leading.operands, leading.axes, costing)
    return least is not None and least * costing.device.price_error < leading.us


def _adds_contractions(nest: Nest, nests: Mapping[str, Nest]) -> bool:
    """Does a nest add what several contractions make?"""
    if not any(isinstance(n, Apply) and n.op in ("add", "sub") for n in postorder(nest.body)):
        return False
    return sum(_leads_to_contraction(t, nests) for t in nest.reads) > 1


def _leads_to_contraction(name: str, nests: Mapping[str, Nest]) -> bool:
    """Is a tensor a contraction, but for maps?"""
    nest = nests.get(name)
    return nest is not None and (nest.is_reduction or any(_leads_to_contraction(t, nests) for t in nest.reads))


@dataclass
class _Leading:
    """Follows the terms that cost most. Every sum is over axes of its own."""

    nests: Mapping[str, Nest]
    costing: Costing

    def __post_init__(self) -> None:
        self._taken = {a for nest in self.nests.values() for a in nest.axes}

    def value(self, name: str, indices: tuple[Axis, ...]) -> Written:
        nest = self.nests[name]
        renaming = {a: b for a, b in zip(nest.axes, indices, strict=True) if a != b}
        own = copies(frozenset(nest.reduced) & self._taken, self._taken | set(nest.reduced))
        renaming |= own
        summed = frozenset(own.get(a, a) for a in nest.reduced)
        self._taken |= summed
        inside = self._expression(nest.body, renaming)
        if not summed:
            stored_us = self.costing.elementwise(inside.axes, 1) if is_scaling(nest) else 0.0
            return Written(inside.operands, inside.axes, inside.us + stored_us)
        sides = self._sides(nest.body, renaming)
        if len(sides) == 2 and summed <= sides[0] & sides[1]:
            us = self.costing.product(summed, *sides)
        else:
            us = self.costing.sum(inside.axes | summed, inside.axes - summed)
        return Written(inside.operands, inside.axes - summed, inside.us + us)

    def _sides(self, body: Expr, renaming: Mapping[Axis, Axis]) -> list[frozenset[Axis]]:
        """The axes of the reads of a body."""
        reads = [n for n in postorder(body) if isinstance(n, Read)]
        return [frozenset(renaming.get(a, a) for a in r.indices) for r in reads]

    def _expression(self, root: Expr, renaming: Mapping[Axis, Axis]) -> Written:
        found: dict[Expr, Written] = {}
        for node in postorder(root):
            args = [found[a] for a in node.args]
            match node:
                case Read(tensor, indices, _):
                    at = tuple(renaming.get(a, a) for a in indices)
                    axes = frozenset(at)
                    found[node] = self.value(tensor, at) if tensor in self.nests else Written((axes,), axes, 0.0)
                case Const():
                    found[node] = Written((), frozenset(), 0.0)
                case Apply("add" | "sub"):
                    found[node] = max(args, key=lambda w: (w.us, len(w.operands)))
                case Apply("div"):  # what divides is an operand, whatever it is made of
                    below = Written((args[1].axes,), args[1].axes, 0.0)
                    found[node] = _times(args[0], below)
                case Apply("square"):
                    found[node] = args[0]
                case Apply("mul"):
                    found[node] = _times(*args)
                case _:
                    found[node] = args[0]
        return found[root]


def _times(a: Written, b: Written) -> Written:
    return Written((*a.operands, *b.operands), a.axes | b.axes, a.us + b.us)


def least_us(operands: tuple[frozenset[Axis], ...], kept: frozenset[Axis], costing: Costing) -> float | None:
    """The least cost of the contractions of a product, summed over all axes but `kept`; None where it is too long to say.

    An operand that has no axis of its own only scales another one: it is left out.
    """
    essential: list[frozenset[Axis]] = []
    for n, axes in enumerate(operands):
        others = (*essential, *operands[n + 1 :])
        if not any(axes <= other for other in others):
            essential.append(axes)
    if len(essential) > _MOST_OPERANDS:
        return None
    if not essential:
        return 0.0
    everything = (1 << len(essential)) - 1

    def halves(chosen: int) -> Iterator[tuple[int, int]]:
        """Yields the ways to take some operands apart, each once."""
        low, left = chosen & -chosen, (chosen - 1) & chosen
        while left:
            if left & low:
                yield left, chosen ^ left
            left = (left - 1) & chosen

    @cache
    def axes_in(chosen: int) -> frozenset[Axis]:
        """The axes of the product of some operands, summed over what nothing else has."""
        inside, outside = set[Axis](), set(kept)
        for n, axes in enumerate(essential):
            (inside if chosen >> n & 1 else outside).update(axes)
        return frozenset(inside & outside)

    @cache
    def cost(chosen: int) -> float:
        here = axes_in(chosen)
        if chosen & (chosen - 1) == 0:
            own = essential[chosen.bit_length() - 1]
            return costing.sum(own, here) if own != here else 0.0
        splits = list(halves(chosen))
        joined = [(x, y) for x, y in splits if axes_in(x) & axes_in(y)]
        return min(cost(x) + cost(y) + together(axes_in(x), axes_in(y), here) for x, y in joined or splits)

    def together(a: frozenset[Axis], b: frozenset[Axis], here: frozenset[Axis]) -> float:
        summed = (a | b) - here
        return costing.product(summed, a, b) if summed else costing.elementwise(here, 1)

    return cost(everything)
