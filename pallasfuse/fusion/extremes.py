"""Reductions of what is where an extremum is: positions, counts, sums over the elements that equal a maximum or minimum.

Until the extremum is known, elements are compared with the one of the part that was seen. When a further part has a better one, no
element before equals it, so that what was reduced is the identity; else it stays. That is a repair of any reduction, and no
algebra of reals: the accumulator itself, or nothing.
"""

from collections.abc import Mapping

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Expr, Read, apply, const, convert, postorder, read, select, substitute
from pallasfuse.ir.fold import OLD, Accumulator, Fold, Frame
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import MAX, MIN
from pallasfuse.ir.simplify import simplify

CONDITION = (
    "an element equals a maximum or minimum by its value in the kernel, which is rounded otherwise than the program's"
)


def fold_at_extremes(
    nest: Nest, rolled: Axis, pass_index: int, unfinished: Mapping[str, Fold]
) -> tuple[Fold, tuple[str, ...]] | None:
    """Derives the fold of a reduction that takes in only the elements that equal an unfinished maximum or minimum of them.

    Returns it with the conditions that it has; None where it is another reduction.
    """
    assert nest.reducer is not None
    body = convert(nest.body, dtypes.accumulator(nest.body.dtype))
    identity = const(nest.reducer.identity(body.dtype), body.dtype)
    tests = {e: v for e in postorder(body) if (v := _extremum(e, rolled, unfinished)) is not None}
    if nest.reduced != (rolled,) or not tests:
        return None
    if any(simplify(substitute(body, {test: const(False, "bool")})) != identity for test in tests):
        return None
    passed: dict[Expr, Expr] = {test: const(True, "bool") for test in tests}
    # -0.0 equals 0.0, and what is computed of it need not
    if not substitute(body, passed).tensors.isdisjoint(unfinished):
        return None
    frames = {
        value: Frame(f"{nest.name}.frame{n}", value.indices, value, (value.tensor,), (), compared=True)
        for n, value in enumerate(dict.fromkeys(tests.values()))
    }
    instead: dict[Expr, Expr] = {v: read(f.name, f.axes, v.dtype) for v, f in frames.items()}
    term = substitute(body, instead)
    name = f"{nest.name}.acc0"
    accumulated: Expr = read(name, nest.axes, body.dtype)
    same: Expr = const(True, "bool")
    for frame in frames.values():
        now, before = (read(frame.name + s, frame.axes, frame.value.dtype) for s in ("", OLD))
        same = simplify(apply("and", same, apply("eq", now, before)))
    update = select(same, accumulated, identity)
    accumulator = Accumulator(name, nest.axes, nest.reducer, term, update)
    fold = Fold(nest, pass_index, (accumulator,), tuple(frames.values()), accumulated, matrix=f"[[{same}]]")
    rounded = any(not isinstance(unfinished[value.tensor].nest.body, Read) for value in frames)
    return fold, (CONDITION,) if rounded else ()


def _extremum(test: Expr, rolled: Axis, unfinished: Mapping[str, Fold]) -> Read | None:
    """Finds the unfinished extremum that a comparison looks for among its own elements."""
    match test:
        case Apply("eq", (a, b)):
            pairs = ((a, b), (b, a))
        case _:
            return None
    for element, value in pairs:
        if not isinstance(value, Read) or value.tensor not in unfinished or rolled not in element.axes:
            continue
        fold = unfinished[value.tensor]
        is_simple = fold.nest.reducer in (MAX, MIN) and len(fold.accumulators) == 1 and not fold.frames
        if is_simple and fold.nest.axes == value.indices and fold.nest.body == element:
            return value
    return None
