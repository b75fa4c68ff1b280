"""Kinds of reductions as XLA tells them apart: products of matrices, which are a library's, and those of a few elements."""

from functools import lru_cache

from pallasfuse.ir.axes import Axis, innermost, volume
from pallasfuse.ir.expr import Apply, Expr, Read, postorder
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import SUM
from pallasfuse.resources.block import WARP


@lru_cache(1 << 12)
def product_operands(reduced: tuple[Axis, ...], body: Expr) -> tuple[Expr, Expr] | None:
    """The operands where a sum is a matrix product: of two factors, each of which keeps an axis that the other lacks."""
    if not isinstance(body, Apply) or body.op != "mul":
        return None
    lhs, rhs = body.args
    over = frozenset(reduced)
    shared = lhs.axes & rhs.axes & over
    return (lhs, rhs) if shared and (lhs.axes - rhs.axes) - over and (rhs.axes - lhs.axes) - over else None


def is_product(nest: Nest) -> bool:
    """Is a reduction a matrix product?"""
    return nest.reducer == SUM and not nest.picks and product_operands(nest.reduced, nest.body) is not None


def is_short(nest: Nest) -> bool:
    """Is a reduction so short that no lanes or warps share it (`IsUnnestedReductionFasterThanElemental`)? Rows whose elements are
    neighbours and divide a warp are reduced by its lanes. A product of vectors is a reduction, too."""
    if not nest.is_reduction or nest.picks or is_product(nest):
        return False
    number = volume(nest.reduced)
    if number >= WARP:
        return False
    last = innermost(order_of((*nest.axes, *nest.reduced), nest.body))
    return last not in nest.reduced or WARP % number != 0


@lru_cache(1 << 12)
def order_of(space: tuple[Axis, ...], body: Expr) -> tuple[Axis, ...]:
    """Returns the axes of a space in the order of the first tensor that a body reads at each of its points; else as they are."""
    whole = frozenset(space)
    return next((x.indices for x in postorder(body) if isinstance(x, Read) and frozenset(x.indices) == whole), space)
