"""Refinement: undo the rounding of a frame that the accumulators themselves know better.

When a frame is the mean of the very elements that a companion accumulates the deviations of (sum of c - r), that companion measures
how far the rounded frame is from the mean. In real arithmetic the distance is zero; in floating point, moving
the finished accumulators by it gives the moment around the mean rather than around the rounded mean (Chan, Golub and LeVeque 1983,
the corrected two-pass algorithm, generalized to every polynomial repair).
"""

import math

from pallasfuse.fusion.stability import is_polynomial, linear_form
from pallasfuse.ir.axes import volume
from pallasfuse.ir.expr import Apply, Const, Expr, Read, apply, const, postorder, read, substitute
from pallasfuse.ir.fold import OLD, Accumulator, Frame
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import SUM


def _mean_of(frame: Frame, predecessor: Nest) -> bool:
    """True when the frame is the predecessor's sum over all its elements, divided by their number."""
    count = volume(predecessor.reduced)
    match frame.value:
        case Apply("div", (Read(name), Const(n))):
            return name == predecessor.name and n == count
        case Apply("mul", (Read(name), Const(f))) | Apply("mul", (Const(f), Read(name))):
            return name == predecessor.name and math.isclose(f * count, 1.0, rel_tol=1e-7)
    return False


def _deviation(frame: Frame, predecessor: Nest, accumulators: list[Accumulator]) -> Expr | None:
    """The exact mean minus the frame, from the accumulator of the deviations; None when there is none."""
    at = read(frame.name, frame.axes, frame.value.dtype)
    for a in accumulators:
        form = linear_form(a.term, frozenset((predecessor.body, at)))
        k = form.get(predecessor.body, 0.0)
        if k and a.reducer == SUM and form == {predecessor.body: k, at: -k}:
            total = const(k * volume(predecessor.reduced), a.dtype)
            return apply("div", read(a.name, a.axes, a.dtype), total)
    return None


def refined_value(
    frames: list[Frame], accumulators: list[Accumulator], nest: Nest, predecessors: dict[str, Nest]
) -> Expr | None:
    """Accumulator 0 moved to the exact means, over the finished accumulators; None when it does not apply."""
    main = accumulators[0]
    if main.update is None or not frames or nest.reducer != SUM or not is_polynomial(main.update):
        return None
    steps: dict[Expr, Expr] = {}
    for frame in frames:
        predecessor = predecessors.get(frame.unfinished[0]) if len(frame.unfinished) == 1 else None
        if predecessor is None or predecessor.reducer != SUM or predecessor.reduced != nest.reduced:
            return None
        if not _mean_of(frame, predecessor):
            return None
        delta = _deviation(frame, predecessor, accumulators)
        if delta is None:
            return None
        new = read(frame.name, frame.axes, frame.value.dtype)
        old = read(frame.name + OLD, frame.axes, frame.value.dtype)
        steps[apply("sub", new, old)] = delta
        steps[apply("sub", old, new)] = apply("neg", delta)
    value = substitute(main.update, steps)
    names = {f.name for f in frames} | {f.name + OLD for f in frames}
    if any(isinstance(n, Read) and n.tensor in names for n in postorder(value)):
        return None
    return value
