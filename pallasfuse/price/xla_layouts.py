"""The order of dimensions in which XLA stores what its loops make on a GPU: that of the matrices that these are reduced from.

XLA gives the inputs and the results of a program the order that the program says, and chooses that of everything between them.
A reduction hands the order of what it reduces on to its result, and so do maps. Scores of one query with keys whose heads lie
inside, [batch, position, head, channel], are stored as [batch, position, head], whatever the program says, and a softmax of them
reduces columns. But where any of them is a result of the program, or is computed of an input that has all of their dimensions, the
reduction writes them in that order at once. (12 attention steps of one query, compiled for an H100.)
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pallasfuse.ir.axes import volume
from pallasfuse.ir.expr import Expr, Read, read, reads_in, substitute
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.price.xla_reductions import is_product

Order = tuple[int, ...]
"""The dimensions of a tensor as they lie in memory, the outermost first."""


class Layouts:
    """The orders of dimensions in which XLA stores the results of one program on a GPU, beside kernels of ours."""

    def __init__(self, program: LoopProgram) -> None:
        self.program = program
        self._found: _Orders | None = None
        self._programs: dict[frozenset[str], LoopProgram] = {}

    def beside(self, ours: Collection[str]) -> LoopProgram:
        """Returns a program of the same nests whose results have their dimensions in the order in which XLA stores them.

        ours: the tensors that kernels of ours make and read, which lie in the order of the program.
        """
        if self._found is None:
            self._found = _orders(self.program)
        orders, together = self._found.of, self._found.together
        as_written = frozenset(name for t in ours if t in orders for name in together[t])
        if as_written not in self._programs:
            left = {name: order for name, order in orders.items() if name not in as_written}
            self._programs[as_written] = _in_order(self.program, left)
        return self._programs[as_written]


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


@dataclass(frozen=True, slots=True)
class _Orders:
    """The tensors of a program that XLA stores in another order than the program's."""

    of: Mapping[str, Order]
    together: Mapping[str, Sequence[str]]
    """The tensors whose order is that of one of them."""


def _orders(program: LoopProgram) -> _Orders:
    """Finds the tensors that XLA stores in another order than the program's."""
    nests = {n.name: n for n in program.nests if isinstance(n, Nest)}
    orders: dict[str, Order] = {}
    together: dict[str, list[str]] = {}
    for nest in nests.values():
        found = None if is_product(nest) else _largest(nest, orders)
        order = None if found is None else _order_from(nest, found, orders)
        if found is None or order is None:
            continue
        orders[nest.name] = order
        together[nest.name] = together.get(found.tensor, []) if not nest.is_reduction else []
        together[nest.name].append(nest.name)
    given = _given(program, nests, orders)
    kept = {name for t in given for name in together[t]}
    return _Orders({name: order for name, order in orders.items() if name not in kept}, together)


def _largest(nest: Nest, orders: Collection[str]) -> Read | None:
    """The largest of the tensors that a nest reads at each of its results. Of maps, only of those in another order."""
    known = [x for x in _whole(nest) if nest.is_reduction or x.tensor in orders]
    return max(known, key=lambda x: volume(x.indices), default=None)


def _order_from(nest: Nest, source: Read, orders: Mapping[str, Order]) -> Order | None:
    """The order that a nest's result takes from a tensor that it reads; None where it is the program's."""
    place = {source.indices[d]: n for n, d in enumerate(orders.get(source.tensor, range(len(source.indices))))}
    long = [d for d, a in enumerate(nest.axes) if a.extent > 1]
    wanted = iter(sorted(long, key=lambda d: place[nest.axes[d]]))
    order = tuple(next(wanted) if a.extent > 1 else d for d, a in enumerate(nest.axes))
    return None if order == tuple(range(len(order))) else order


def _whole(nest: Nest) -> list[Read]:
    """The tensors that a nest reads at each of its results."""
    long = {a for a in nest.axes if a.extent > 1}
    return [x for x in reads_in(nest.body) if long.issubset(x.indices)]


def _given(program: LoopProgram, nests: Mapping[str, Nest], orders: Mapping[str, Order]) -> set[str]:
    """The tensors whose order is the program's: results, what else than loops reads, and what is computed of a tensor that is in
    memory otherwise."""
    found = {t for t in program.outputs if t in orders}
    in_memory: set[str] = {d.name for d in program.definitions() if d.name not in nests}
    for node in program.nests:
        if isinstance(node, External) or is_product(node):
            found |= {t for t in node.reads if t in orders}
        if isinstance(node, External) or node.name in orders:
            continue
        if node.is_reduction or any(x.tensor in in_memory for x in _whole(node)):  # else it repeats elements
            in_memory.add(node.name)
    for name, own in orders.items():
        node = nests[name]
        if not node.is_reduction and any(
            x.tensor in in_memory and _order_from(node, x, orders) != own for x in _whole(node)
        ):
            found.add(name)
    return found
