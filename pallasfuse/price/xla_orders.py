"""The order of dimensions in which kernels read and write what XLA's libraries make and read, and what it costs to turn it.

XLA is free to choose how its own results lie in memory. A kernel reads its operands in the order of their dimensions, and XLA
hands that order on, through maps and reductions, to the matrix product that they come from. If the product makes another one,
a map that is stored for the kernel writes what it computes in the new order; but before a reduction, all of the product is
written once more.

Convolutions have one order of their own, whatever the program's: channels last, or first where windows have three dimensions. All
that is computed element by element between two of them is in that order, too, and so are their results beside each other as one
array, and parts of them. A kernel between them has what it reads and what it writes turned, each by a kernel of its own or by one
that is as slow.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import compress

from pallasfuse.first_time import Recent
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.ir.plain_work import Convolution
from pallasfuse.price.xla_reductions import is_product, product_operands


def turned_bytes(program: LoopProgram, read: Collection[str]) -> Iterator[float]:
    """Yields for each product that is turned for a kernel how many bytes are read and written for that.

    read: the tensors that kernels read.
    """
    nests = _by_name(program)
    found: dict[str, Nest] = {}
    seen: set[_Asked] = set()
    for t in read:
        product = _turned(nests[t], nests, seen) if t in nests else None
        if product is not None:
            found[product.name] = product
    for product in found.values():
        yield 2.0 * volume(product.axes) * dtypes.itemsize_bytes(product.dtype)


def _nests_by_name(program: LoopProgram) -> dict[str, Nest]:
    return {n.name: n for n in program.nests if isinstance(n, Nest)}


_by_name = Recent(_nests_by_name)
_Asked = tuple[str, tuple[Axis, ...], bool]
"""A nest, its axes in the order that is asked for, and whether its result is reduced later."""


def _turned(nest: Nest, nests: Mapping[str, Nest], seen: set[_Asked]) -> Nest | None:
    """The product that a nest's result is reduced from, if that has another order.

    XLA asks what is reduced for the order of the result, with the reduced axes last. seen: what was asked in vain; is added to.
    """
    waiting: list[_Asked] = [(nest.name, tuple(a for a in nest.axes if a.extent > 1), False)]
    while waiting:
        asked = waiting.pop()
        if asked in seen:
            continue
        seen.add(asked)
        nest, order, is_reduced = nests[asked[0]], asked[1], asked[2]
        if is_product(nest):
            if is_reduced and not any(tuple(a for a in one if a.extent > 1) == order for one in _orders(nest)):
                return nest
            continue
        reads = [x for x in postorder(nest.body) if isinstance(x, Read) and x.tensor in nests]
        most = max((volume(x.indices) for x in reads), default=0)
        for x in reads:
            source = nests[x.tensor]
            if volume(x.indices) == most and len(source.axes) == len(x.indices):
                own = dict(zip(x.indices, source.axes, strict=True))
                passed_on = tuple(own[a] for a in (*order, *nest.reduced) if a in own and own[a].extent > 1)
                waiting.append((source.name, passed_on, is_reduced or nest.is_reduction))
    return None


def _orders(product: Nest) -> Iterator[list[Axis]]:
    """The orders in which a library makes a product: batches, then rows and columns, or columns and rows."""
    operands = product_operands(product.reduced, product.body)
    assert operands is not None
    lhs, rhs = (o.axes for o in operands)
    sides = [[a for a in product.axes if a in own and a not in other] for own, other in ((lhs, rhs), (rhs, lhs))]
    batch = [a for a in product.axes if a in lhs & rhs]
    yield [*batch, *sides[0], *sides[1]]
    yield [*batch, *sides[1], *sides[0]]


def _found_lookups(program: LoopProgram) -> frozenset[str]:
    """Returns the tensors that are looked up: XLA writes them in any order, as what reads them wants it.

    (Keys and values in pages, compiled for an H100.)
    """
    return frozenset(n.name for n in program.nests if isinstance(n, External) and n.lookup is not None)


written_as_wanted = Recent(_found_lookups)


# --- convolutions


@dataclass(frozen=True, slots=True)
class TurnedTensors:
    """The tensors between kernels and convolutions of another order: each is read and written once more."""

    read: frozenset[str]
    """Those that kernels read."""
    made: frozenset[str]
    """Those that kernels make, and convolutions read."""


NOTHING_TURNED = TurnedTensors(frozenset(), frozenset())


def turned_for_convolutions(program: LoopProgram, made: Collection[str], read: Collection[str]) -> TurnedTensors:
    """Finds what is turned between convolutions and kernels. made, read: the tensors that kernels write and read."""
    convolutions = _convolutions(program)
    if not convolutions:
        return NOTHING_TURNED
    from_results = {n.name for n, work in convolutions if work.turned[2]}
    for_operands = {t for n, work in convolutions for t in compress(n.operands, work.turned)}
    passing = [(n, sources) for n, sources in _element_by_element(program) if n not in made]
    for name, sources in passing:
        if not from_results.isdisjoint(sources):
            from_results.add(name)
    for name, sources in reversed(passing):
        if name in for_operands:
            for_operands |= sources
    return TurnedTensors(frozenset(read) & from_results - frozenset(made), frozenset(made) & for_operands)


def _found_convolutions(program: LoopProgram) -> list[tuple[External, Convolution]]:
    """Lists the convolutions of a program for which an operand or the result is turned."""
    return [(n, n.work) for n in program.nests
            if isinstance(n, External) and isinstance(n.work, Convolution) and any(n.work.turned)]  # fmt: skip


_convolutions = Recent(_found_convolutions)


def _found_element_by_element(program: LoopProgram) -> list[tuple[str, frozenset[str]]]:
    """Lists, in order, the tensors whose elements are computed from those of others as large, or are theirs, each with the names
    of these."""
    sizes = {d.name: volume(d.axes) for d in program.definitions()}

    def sources(node: Nest | External) -> frozenset[str]:
        if isinstance(node, External) and node.form == "join":
            return node.reads
        cut = node.operands[:1] if isinstance(node, External) and node.form == "selection" else ()
        return frozenset([*cut, *(t for t in node.reads if sizes[t] == sizes[node.name])])

    return [(n.name, sources(n)) for n in program.nests
            if (not n.is_reduction if isinstance(n, Nest) else n.work is None)]  # fmt: skip


_element_by_element = Recent(_found_element_by_element)
