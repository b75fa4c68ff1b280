"""The order of dimensions that a kernel asks for, where XLA would choose another one.

XLA is free to choose how its own results lie in memory. A kernel reads its operands in the order of their dimensions, and XLA hands
that order on, through maps and reductions, to the matrix product that they come from. If the product makes another one, a map
that is stored for the kernel writes what it computes in the new order; but before a reduction, all of the product is written
once more.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.ir.reducers import SUM
from pallasfuse.price.xla_products import product_operands


def turned_bytes(program: LoopProgram, read: Collection[str]) -> Iterator[float]:
    """Yields for each product that is turned for a kernel how many bytes are read and written for that.

    read: the tensors that kernels read.
    """
    nests = {n.name: n for n in program.nests if isinstance(n, Nest)}
    found = {product.name: product for t in read if t in nests and (product := _turned(nests[t], nests)) is not None}
    for product in found.values():
        yield 2.0 * volume(product.axes) * dtypes.itemsize_bytes(product.dtype)


def _turned(
    nest: Nest, nests: Mapping[str, Nest], order: Sequence[Axis] | None = None, *, is_reduced: bool = False
) -> Nest | None:  # fmt: skip
    """The product that a nest's result is reduced from, if that has another order.

    order: the nest's axes in the order that is asked for; by default that of its dimensions.
    """
    asked = [a for a in (nest.axes if order is None else order) if a.extent > 1]
    if _is_product(nest):
        kept = frozenset(asked)
        return None if not is_reduced or any([a for a in one if a in kept] == asked for one in _orders(nest)) else nest
    reads = [x for x in postorder(nest.body) if isinstance(x, Read) and x.tensor in nests]
    most = max((volume(x.indices) for x in reads), default=0)
    for x in reads:
        source = nests[x.tensor]
        if volume(x.indices) == most and len(source.axes) == len(x.indices):
            own = dict(zip(x.indices, source.axes, strict=True))
            passed_on = [own[a] for a in asked if a in own]
            found = _turned(source, nests, passed_on, is_reduced=is_reduced or nest.is_reduction)
            if found is not None:
                return found
    return None


def _is_product(nest: Nest) -> bool:
    return nest.reducer == SUM and not nest.picks and product_operands(nest.reduced, nest.body) is not None


def _orders(product: Nest) -> Iterator[list[Axis]]:
    """The orders in which a library makes a product: batches, then rows and columns, or columns and rows."""
    operands = product_operands(product.reduced, product.body)
    assert operands is not None
    lhs, rhs = (o.axes for o in operands)
    sides = [[a for a in product.axes if a in own and a not in other] for own, other in ((lhs, rhs), (rhs, lhs))]
    batch = [a for a in product.axes if a in lhs & rhs]
    yield [*batch, *sides[0], *sides[1]]
    yield [*batch, *sides[1], *sides[0]]
