"""Intervals of integer expressions: between which numbers a value lies, and what it is shorter to write because of that.

Bounds of loops are made for any block, with minima and maxima against the ends of axes. Of a block whose first position is known to
lie in an interval, most of these decide nothing.
"""

from collections.abc import Mapping

import numpy as np

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, apply, const, postorder, rebuild, with_args

type Interval = tuple[int, int]
"""The least and the largest number."""

_LARGEST = 2**31 - 1


def interval(root: Expr, known: Mapping[str, Interval]) -> Interval | None:
    """The interval of an integer expression; None where nothing is known. known: those of the scalars that it reads."""
    found: dict[Expr, Interval | None] = {}
    for node in postorder(root):
        found[node] = _of(node, [found[a] for a in node.args], known)
    return found[root]


def _of(node: Expr, args: list[Interval | None], known: Mapping[str, Interval]) -> Interval | None:
    """The interval of a node from those of its arguments; None, too, where its type may not hold all of it: it would wrap."""
    if not dtypes.is_integer(node.dtype):
        return None
    limits = np.iinfo(node.dtype)
    least, largest = max(int(limits.min), -_LARGEST), min(int(limits.max), _LARGEST)
    result: Interval | None = None
    match node:
        case Const(value):
            result = int(value), int(value)
        case Index(axis):
            result = 0, axis.extent - 1
        case Read(name) if not node.indices:
            result = known.get(name)
        case Apply(op) if args and None not in args:
            result = _applied(op, [a for a in args if a is not None])
    return result if result is not None and least <= result[0] <= result[1] <= largest else None


def _applied(op: str, args: list[Interval]) -> Interval | None:
    (low, high), *rest = args
    match op, rest:
        case "convert", []:
            return low, high
        case "add", [(a, b)]:
            return low + a, high + b
        case "sub", [(a, b)]:
            return low - b, high - a
        case "mul", [(a, b)]:
            ends = [low * a, low * b, high * a, high * b]
            return min(ends), max(ends)
        case "min", [(a, b)]:
            return min(low, a), min(high, b)
        case "max", [(a, b)]:
            return max(low, a), max(high, b)
        case "div", [(a, b)] if low >= 0 and a > 0:
            return low // b, high // a
        case "rem", [(a, b)] if low >= 0 and a > 0:
            return 0, min(high, b - 1)
    return None


def within(root: Expr, known: Mapping[str, Interval]) -> Expr:
    """An integer expression that is equal to this one wherever the scalars that it reads are in their intervals."""
    found: dict[Expr, Interval | None] = {}

    def of(node: Expr) -> Interval | None:
        if node not in found:
            found[node] = _of(node, [of(a) for a in node.args], known)
        return found[node]

    def step(node: Expr, args: tuple[Expr, ...]) -> Expr:
        node = with_args(node, args)
        own = of(node)
        if own is not None and own[0] == own[1]:
            return const(own[0], node.dtype)
        match node:
            case Apply("min" | "max" as op, (a, b)):
                left, right = of(a), of(b)
                if left is None or right is None:
                    return node
                if left[1] <= right[0]:
                    return a if op == "min" else b
                if right[1] <= left[0]:
                    return b if op == "min" else a
            case Apply("add", (Apply("add", (a, Const(m))), Const(n)), dtype) if own is not None and of(a) is not None:
                return apply("add", a, const(int(m) + int(n), dtype))
        return node

    return rebuild(root, step)
