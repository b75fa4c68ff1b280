"""XLA stores what its loops make on a GPU in the order of dimensions of the matrices that these are reduced from.

XLA gives the inputs and the results of a program the order that the program says, and chooses that of everything between them.
A reduction hands the order of what it reduces on to its result, and so do maps. Scores of one query with keys whose heads lie
inside, [batch, position, head, channel], are stored as [batch, position, head], whatever the program says, and a softmax of them
reduces columns. But where any of them is a result of the program, or is computed of an input that has all of their dimensions, the
reduction writes them in that order at once. XLA hands orders on backwards, too, from results that a program turns itself to what
they are computed from: that is not modelled. (17 small programs, compiled for an H100: 13 are stored as said here, and four, which
turn what they have computed, in the order of their results; three layers of flax.)
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pallasfuse.ir.axes import volume
from pallasfuse.ir.expr import Expr, Read, read, reads_in, substitute
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.price.xla_reductions import is_product

Order = tuple[int, ...]
"""The dimensions of a tensor as they lie in memory, the outermost first."""


@dataclass(frozen=True, slots=True)
class _Orders:
    """This names the tensors of a program that XLA stores in another order than the program's, with their orders."""

    of: Mapping[str, Order]
    together: Mapping[str, Sequence[str]]
    """The tensors whose order is that of one of them."""


class Layouts:
    """This finds the orders of dimensions in which XLA stores the results of one program on a GPU, beside kernels of ours."""

    def __init__(self, program: LoopProgram) -> None:
        self.program = program
        self._alone: _Orders | None = None
        self._beside: dict[frozenset[str], LoopProgram] = {}
        self._programs: dict[frozenset[tuple[str, Order]], LoopProgram] = {}

    def beside(self, ours: Collection[str]) -> LoopProgram:
        """Returns a program of the same nests whose results have their dimensions in the order in which XLA stores them.

        ours: the tensors that kernels of ours make and read, which lie in the order of the program.
        """
        if self._alone is None:
            self._alone = _orders(self.program, frozenset())
        alone = self._alone
        if alone.of.keys().isdisjoint(ours):
            return self._in_order(alone)
        key = frozenset(ours)
        if key not in self._beside:
            as_written = key.union(*(alone.together[t] for t in key if t in alone.of))
            self._beside[key] = self._in_order(_orders(self.program, as_written))
        return self._beside[key]

    def _in_order(self, orders: _Orders) -> LoopProgram:
        key = frozenset(orders.of.items())
        if key not in self._programs:
            self._programs[key] = _in_order(self.program, orders.of)
        return self._programs[key]


def _in_order(program: LoopProgram, orders: Mapping[str, Order]) -> LoopProgram:
    """Returns a program of the same nests where tensors have their dimensions in other orders."""
    if not orders:
        return program

    def moved(nest: Nest | External) -> Nest | External:
        if isinstance(nest, External):
            return nest
        turned: dict[Expr, Expr] = {
            x: read(x.tensor, (x.indices[d] for d in orders[x.tensor]), x.dtype)
            for x in reads_in(nest.body) if x.tensor in orders
        }  # fmt: skip
        own = orders.get(nest.name)
        axes = nest.axes if own is None else tuple(nest.axes[d] for d in own)
        return nest if own is None and not turned else replace(nest, axes=axes, body=substitute(nest.body, turned))

    return replace(program, nests=tuple(map(moved, program.nests)))


def _orders(program: LoopProgram, as_written: frozenset[str]) -> _Orders:
    """Finds the tensors that XLA stores in another order than the program's. as_written: these are not among them."""
    sources = _sources(program)
    while True:
        found = _handed_on(sources, as_written)
        given = _given(program, sources, found.of)
        if not given:
            return found
        as_written |= {name for t in given for name in found.together[t]}  # others may have their orders from these


def _sources(program: LoopProgram) -> dict[str, tuple[Nest, list[Read]]]:
    """Returns the nests that loops compute, each with what it reads at each of its results, but for what only repeats elements."""
    found: dict[str, tuple[Nest, list[Read]]] = {}
    repeats: set[str] = set()
    for nest in program.nests:
        if isinstance(nest, External) or is_product(nest):
            continue
        long = {a for a in nest.axes if a.extent > 1}
        own = [x for x in reads_in(nest.body) if long.issubset(x.indices) and x.tensor not in repeats]
        found[nest.name] = nest, own
        if not own and not nest.is_reduction:
            repeats.add(nest.name)
    return found


def _handed_on(sources: Mapping[str, tuple[Nest, list[Read]]], as_written: Collection[str]) -> _Orders:
    """Finds the orders that nests take from the largest of their sources, but for those that are as written."""
    orders: dict[str, Order] = {}
    together: dict[str, list[str]] = {}
    for name, (nest, own) in sources.items():
        if name in as_written or not own:
            continue
        largest = max(own, key=lambda x: volume(x.indices))
        order = _order_from(nest, largest, orders)
        if order is not None:
            orders[name] = order
            together[name] = [] if nest.is_reduction else together.get(largest.tensor, [])
            together[name].append(name)
    return _Orders(orders, together)


def _order_from(nest: Nest, source: Read, orders: Mapping[str, Order]) -> Order | None:
    """Returns the order that a nest's result takes from a tensor that it reads; None where it is the program's."""
    place = {source.indices[d]: n for n, d in enumerate(orders.get(source.tensor, range(len(source.indices))))}
    long = [d for d, a in enumerate(nest.axes) if a.extent > 1]
    wanted = iter(sorted(long, key=lambda d: place[nest.axes[d]]))
    order = tuple(next(wanted) if a.extent > 1 else d for d, a in enumerate(nest.axes))
    return None if order == tuple(range(len(order))) else order


def _given(
    program: LoopProgram, sources: Mapping[str, tuple[Nest, list[Read]]], orders: Mapping[str, Order]
) -> set[str]:
    """Finds the tensors whose order is the program's: results, what others than loops read, and what meets another order."""
    read = {t for n in program.nests if n.name not in sources for t in n.reads}
    found = {t for t in (*program.outputs, *read) if t in orders}
    for nest, own in sources.values():
        if not nest.is_reduction and len({_order_from(nest, x, orders) for x in own}) > 1:
            found |= {t for t in (nest.name, *(x.tensor for x in own)) if t in orders}
    return found
