"""Does every row keep an element that no mask hides? A position that is shown for each row proves it."""

from collections.abc import Iterator
from functools import lru_cache, reduce

import numpy as np

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.domain import Array
from pallasfuse.ir.expr import (
    Apply,
    Const,
    Expr,
    Index,
    Read,
    add,
    apply,
    const,
    convert,
    index,
    postorder,
    rename_axes,
    substitute,
)
from pallasfuse.ir.ops import OPS
from pallasfuse.ir.simplify import simplify
from pallasfuse.tiling.masks import Affine, affine

_MOST_ROWS = 1 << 20
"""Of more rows, not each is looked at, and nothing is known."""
_EXACT = {n: np.dtype(n) for n in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")}
_WHOLE_NUMBERS = {"bfloat16": 2.0**8, "float16": 2.0**11, "float32": 2.0**24, "float64": 2.0**53}
"""Up to these, whole numbers are exact in a type."""


@lru_cache(1024)
def every_row_keeps(predicates: tuple[Expr, ...], rolled: Axis) -> bool:
    """Is there, for each position along the other axes, one along `rolled` at which all predicates are true?

    False where that depends on data, or no position is found among those at which some comparison is just true.
    """
    if not predicates:
        return True
    together = reduce(lambda a, b: apply("and", a, b), predicates)
    axes = tuple(sorted(together.axes - {rolled}))
    if volume(axes) > _MOST_ROWS:
        return False
    kept = np.zeros([a.extent for a in axes], bool)
    for candidate in _at_candidates(together, rolled):
        shown = _as_the_program_has_it(candidate, axes)
        if shown is not None:
            kept = kept | shown.astype(bool)
            if kept.all():
                return True
    return False


def _as_the_program_has_it(predicate: Expr, axes: tuple[Axis, ...]) -> Array | None:
    """The value of a predicate over positions, in the types of the program, whose integers wrap around; None where it may round."""
    values: dict[Expr, Array] = {}
    with np.errstate(all="ignore"):
        for node in postorder(predicate):
            match node:
                case Const(value, dtype) if dtype in _EXACT or float(value).is_integer():
                    values[node] = np.full((1,) * len(axes), value, _EXACT.get(dtype, np.float64))
                case Index(axis, dtype) if dtype in _EXACT:
                    shape = [axis.extent if a == axis else 1 for a in axes]
                    values[node] = np.arange(axis.extent).astype(_EXACT[dtype]).reshape(shape)
                case Apply("convert", (x,), dtype) if dtypes.is_float(dtype) and x.dtype in _EXACT:
                    values[node] = values[x].astype(np.float64)
                    if np.abs(values[node]).max(initial=0) > _WHOLE_NUMBERS[dtype]:
                        return None
                case Apply(op, args, dtype) if dtype in _EXACT:
                    result = OPS[op].evaluate(*(values[a] for a in args)) if op != "convert" else values[args[0]]
                    values[node] = np.asarray(result).astype(_EXACT[dtype])
                case _:
                    return None  # data, or arithmetic that rounds
    return values[predicate]


def _at_candidates(predicate: Expr, rolled: Axis) -> Iterator[Expr]:
    """Yields the predicate at positions along `rolled`, each a function of the row."""
    indices = [n for n in postorder(predicate) if isinstance(n, Index) and n.axis == rolled]
    for axis in sorted(predicate.axes - {rolled}):
        if axis.extent == rolled.extent:  # what is read at both becomes one
            yield simplify(rename_axes(predicate, {rolled: axis}))
    along = any(isinstance(n, Read) and rolled in n.indices for n in postorder(predicate))
    if along:
        return
    if not indices:
        yield simplify(predicate)
        return
    first, last = const(0, "int32"), const(rolled.extent - 1, "int32")
    same = (index(axis, "int32") for axis in sorted(predicate.axes - {rolled}))
    for position in dict.fromkeys((first, last, *same, *_boundaries(predicate, rolled))):
        inside = apply("min", apply("max", position, first), last)
        yield simplify(substitute(predicate, {n: convert(inside, n.dtype) for n in indices}))


def _boundaries(predicate: Expr, rolled: Axis) -> Iterator[Expr]:
    """Yields the positions along `rolled` at which the two sides of a comparison are equal, or differ by one."""
    for node in postorder(predicate):
        match node:
            case Apply("ge" | "gt" | "le" | "lt" | "eq", (a, b)):
                left, right = affine(a), affine(b)
                if left is not None and right is not None and not left.reads and not right.reads:
                    yield from _where_equal(left, right, rolled)


def _where_equal(left: Affine, right: Affine, rolled: Axis) -> Iterator[Expr]:
    total: dict[Axis, int] = {}
    for form, sign in ((left, 1), (right, -1)):
        for axis, c in form.coefficients:
            total[axis] = total.get(axis, 0) + sign * c
    along = total.pop(rolled, 0)
    if along not in (1, -1):
        return
    rest: Expr = const(-along * (left.constant - right.constant), "int32")
    for axis, c in sorted(total.items()):
        rest = add(rest, apply("mul", index(axis, "int32"), const(-along * c, "int32")))
    for shift in (0, 1, -1):
        yield simplify(add(rest, const(shift, "int32")))
