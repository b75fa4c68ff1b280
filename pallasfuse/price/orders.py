"""The order of dimensions that a kernel asks for, where XLA would choose another one.

XLA is free to choose how its own results lie in memory. A kernel reads its operands in the order of their dimensions, and XLA hands
that order on, through maps and reductions, to the matrix product that they come from. If the product makes another one, a map
that is stored for the kernel writes what it computes in the new order; but before a reduction, all of the product is written
once more.
"""

from collections.abc import Collection, Iterator, Mapping

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.price.xla_products import is_product, product_operands


def turned_bytes(program: LoopProgram, read: Collection[str]) -> Iterator[float]:
    """Yields for each product that is turned for a kernel how many bytes are read and written for that.

    read: the tensors that kernels read.
    """
    nests = {n.name: n for n in program.nests if isinstance(n, Nest)}
    found: dict[str, Nest] = {}
    seen: set[_Asked] = set()
    for t in read:
        product = _turned(nests[t], nests, seen) if t in nests else None
        if product is not None:
            found[product.name] = product
    for product in found.values():
        yield 2.0 * volume(product.axes) * dtypes.itemsize_bytes(product.dtype)


_Asked = tuple[str, tuple[Axis, ...], bool]
"""A nest, its axes in the order that is asked for, and whether its result is reduced later."""


def _turned(nest: Nest, nests: Mapping[str, Nest], seen: set[_Asked]) -> Nest | None:
    """The product that a nest's result is reduced from, if that has another order.

    seen: what was asked without finding one; grows.
    """
    waiting: list[_Asked] = [(nest.name, tuple(a for a in nest.axes if a.extent > 1), False)]
    while waiting:
        asked = waiting.pop()
        if asked in seen:
            continue
        seen.add(asked)
        nest, order, is_reduced = nests[asked[0]], asked[1], asked[2]
        if is_product(nest):
            kept = frozenset(order)
            if is_reduced and not any(tuple(a for a in one if a in kept) == order for one in _orders(nest)):
                return nest
            continue
        reads = [x for x in postorder(nest.body) if isinstance(x, Read) and x.tensor in nests]
        most = max((volume(x.indices) for x in reads), default=0)
        for x in reads:
            source = nests[x.tensor]
            if volume(x.indices) == most and len(source.axes) == len(x.indices):
                own = dict(zip(x.indices, source.axes, strict=True))
                passed_on = tuple(own[a] for a in order if a in own and own[a].extent > 1)
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
