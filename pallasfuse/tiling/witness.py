"""Does every row keep an element that no mask hides? A position that is shown for each row proves it."""

from collections.abc import Iterator
from functools import lru_cache, reduce

import numpy as np

from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.domain import FLOAT64
from pallasfuse.ir.evaluate import evaluate_over
from pallasfuse.ir.expr import (
    Apply,
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
from pallasfuse.ir.simplify import simplify
from pallasfuse.tiling.masks import Affine, affine

_MOST_ROWS = 1 << 22
"""Of more rows, not each is looked at, and nothing is known."""


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
        if not candidate.tensors:
            kept = kept | np.asarray(evaluate_over(candidate, axes, {}, FLOAT64)).astype(bool)
            if kept.all():
                return True
    return False


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
    dtype = indices[0].dtype
    first, last = const(0, dtype), const(rolled.extent - 1, dtype)
    same = (index(axis, dtype) for axis in sorted(predicate.axes - {rolled}))
    for position in dict.fromkeys((first, last, *same, *_boundaries(predicate, rolled, dtype))):
        inside = apply("min", apply("max", position, first), last)
        yield simplify(substitute(predicate, {n: convert(inside, n.dtype) for n in indices}))


def _boundaries(predicate: Expr, rolled: Axis, dtype: str) -> Iterator[Expr]:
    """Yields the positions along `rolled` at which the two sides of a comparison are equal, or differ by one."""
    for node in postorder(predicate):
        match node:
            case Apply("ge" | "gt" | "le" | "lt" | "eq", (a, b)):
                left, right = affine(a), affine(b)
                if left is not None and right is not None and not left.reads and not right.reads:
                    yield from _where_equal(left, right, rolled, dtype)


def _where_equal(left: Affine, right: Affine, rolled: Axis, dtype: str) -> Iterator[Expr]:
    total: dict[Axis, int] = {}
    for form, sign in ((left, 1), (right, -1)):
        for axis, c in form.coefficients:
            total[axis] = total.get(axis, 0) + sign * c
    along = total.pop(rolled, 0)
    if along not in (1, -1):
        return
    rest: Expr = const(-along * (left.constant - right.constant), dtype)
    for axis, c in sorted(total.items()):
        rest = add(rest, apply("mul", convert(index(axis), dtype), const(-along * c, dtype)))
    for shift in (0, 1, -1):
        yield simplify(add(rest, const(shift, dtype)))
