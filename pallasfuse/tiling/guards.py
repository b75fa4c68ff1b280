"""Where the unfinished value of a frame can be used, and what stands in for it where not."""

import math

from pallasfuse.ir.expr import Expr, apply, const
from pallasfuse.ir.fold import Frame


def usable(value: Expr, frame: Frame) -> Expr:
    """True where a frame's value is finite, and positive and in its range if the repair relies on that."""
    below = apply("lt", apply("abs", value), const(frame.high, value.dtype))
    return apply("and", below, apply("gt", value, const(frame.low, value.dtype))) if frame.positive else below


def guarded(value: Expr, frame: Frame) -> Expr:
    """The value; the end of the frame's range that is next to it where it lies outside; a safe one where there is no such end."""
    dtype = value.dtype
    instead: Expr = const(frame.safe, dtype)
    if frame.low > 0:
        low = const(frame.low, dtype)
        instead = apply("select", apply("le", value, low), low, instead)
    if frame.high < math.inf:
        high = const(frame.high, dtype)
        instead = apply("select", apply("ge", value, high), high, instead)
    return apply("select", usable(value, frame), value, instead)
