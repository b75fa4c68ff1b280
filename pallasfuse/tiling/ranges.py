"""Masks over data: which predicates a pass before the kernel can tell the same of as the kernel, and where they leave something.

The pass finds an interval in every row (`ir.tile_program.Range`). A kernel skips what lies outside of the intervals of all its
rows, so the pass must decide every element as the kernel does: by integers, booleans and comparisons, which no compiler rounds.
"""

from collections.abc import Sequence
from functools import reduce

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, apply, postorder
from pallasfuse.ir.ops import COMPARISONS, SHIFTS
from pallasfuse.ir.ranges import Range
from pallasfuse.ir.simplify import simplify
from pallasfuse.ir.tensors import Tensor

_EXACT = COMPARISONS | {"add", "sub", "mul", "neg", "abs", "sign", "max", "min", "select", "convert", "and", "or", "xor",
                         "not", *SHIFTS}  # fmt: skip


def is_exact(predicate: Expr) -> bool:
    """Has a predicate one value, whoever computes it? Numbers that are not integers are only compared, as they were stored."""
    for node in postorder(predicate):
        match node:
            case Const() | Index() | Read():
                pass
            case Apply(op, args, dtype):
                rounds = dtypes.is_float(dtype) or any(dtypes.is_float(a.dtype) for a in args)
                compared = op in COMPARISONS and all(isinstance(a, Const | Read) for a in args)
                if op not in _EXACT or (rounds and not compared):
                    return False
    return predicate.dtype == "bool"


def conjunction(predicates: Sequence[Expr]) -> Expr:
    """The predicate that is true where all of them are."""
    return simplify(reduce(lambda a, b: apply("and", a, b), predicates))


def range_of(predicate: Expr, axis: Axis, rows: tuple[Axis, ...], *, number: int, all_if_none: bool) -> Range:
    """The range of a predicate along an axis; what is found of it is named after the axis, and numbered.

    rows: the other axes of the predicate, in the order of the kernel. (Names of axes have no order: equal kernels share a plan.)
    """
    assert frozenset(rows) == predicate.axes - {axis}
    suffix = str(number) if number else ""
    left, right, count = (Tensor(f"{axis.name}.{n}{suffix}", rows, "int32") for n in ("left", "right", "count"))
    return Range(axis, predicate, left, right, count, all_if_none)
