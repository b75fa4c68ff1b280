"""Ranges of integers: which values can a predicate over them have, whatever the inputs are?

A test that never sees a predicate false shows nothing where it is false, unless it is true always. Remainders are the usual case:
`i % n` is computed with a correction for negative remainders, which those of positions never are.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, postorder
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.ir.ops import COMPARISONS

_BOOLEANS = frozenset({(0, 0), (0, 1), (1, 1)})

type Ends = tuple[int, int]
"""The least and the greatest value that an integer, or a boolean, may have."""


def decided(program: LoopProgram) -> frozenset[str]:
    """The names of the maps that have one value, whatever the inputs are."""
    known: dict[str, Ends] = {}
    for nest in program.nests:
        if not isinstance(nest, Nest) or nest.is_reduction or dtypes.is_float(nest.dtype):
            continue
        ranges: dict[Expr, Ends | None] = {}
        for node in postorder(nest.body):
            ranges[node] = _ends(node, [ranges[a] for a in node.args], known)
        ends = ranges[nest.body]
        if ends is not None:
            known[nest.name] = ends
    return frozenset(name for name, (least, most) in known.items() if least == most)


def _ends(node: Expr, args: Sequence[Ends | None], known: dict[str, Ends]) -> Ends | None:
    whole = _of_type(node.dtype)
    if whole is None:
        return None
    match node:
        case Const(value, _):
            found: Ends | None = int(value), int(value)
        case Index(axis, _):
            found = 0, max(axis.extent - 1, 0)
        case Read(tensor, _, _):
            found = known.get(tensor)
        case Apply("convert", (x,), _):
            found = args[0] if x.dtype != "bool" and node.dtype != "bool" else None
        case Apply("not" | "and" | "or", _, dtype) if dtype != "bool":  # of bits
            found = None
        case Apply(op, _, _):
            complete = [a for a in args if a is not None]
            found = _applied(op, complete) if len(complete) == len(args) else None
    # sums that leave their type wrap around
    return found if found is not None and whole[0] <= found[0] and found[1] <= whole[1] else whole


def _of_type(dtype: str) -> Ends | None:
    if dtype == "bool":
        return 0, 1
    return (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)) if dtypes.is_integer(dtype) else None


def _applied(op: str, args: Sequence[Ends]) -> Ends | None:
    """The ends of a result; None if nothing is known of it."""
    if len(args) == 1:
        return _of_one(op, *args[0])
    if len(args) == 2:
        return _compared(op, *args) if op in COMPARISONS else _of_two(op, *args[0], *args[1])
    predicate, x, y = args
    return x if predicate[0] else y if not predicate[1] else _hull((*x, *y))


def _of_one(op: str, a: int, b: int) -> Ends | None:
    match op:
        case "neg":
            return -b, -a
        case "abs":
            return (0 if a <= 0 <= b else min(abs(a), abs(b))), max(abs(a), abs(b))
        case "sign":
            return (a > 0) - (a < 0), (b > 0) - (b < 0)
        case "not" if (a, b) in _BOOLEANS:
            return 1 - b, 1 - a
    return None


def _of_two(op: str, a: int, b: int, c: int, d: int) -> Ends | None:
    """The ends of `op` of a number from a to b and one from c to d."""
    match op:
        case "add":
            return a + c, b + d
        case "sub":
            return a - d, b - c
        case "mul":
            return _hull((a * c, a * d, b * c, b * d))
        case "max":
            return max(a, c), max(b, d)
        case "min":
            return min(a, c), min(b, d)
        case "rem":  # of the dividend's sign; by zero it is the dividend
            most = max(abs(a), abs(b)) if c <= 0 <= d else max(abs(c), abs(d)) - 1
            return max(min(a, 0), -most), min(max(b, 0), most)
        case "and" if {(a, b), (c, d)} <= _BOOLEANS:
            return min(a, c), min(b, d)
        case "or" if {(a, b), (c, d)} <= _BOOLEANS:
            return max(a, c), max(b, d)
    return None


def _hull(numbers: Iterable[int]) -> Ends:
    some = list(numbers)
    return min(some), max(some)


def _compared(op: str, x: Ends, y: Ends) -> Ends:
    """Compares all pairs of two ranges: what is true of all is true, what is false of all is false."""
    match op:
        case "gt" | "ge":
            return _compared({"gt": "lt", "ge": "le"}[op], y, x)
        case "ne":
            never, always = _compared("eq", x, y)
            return 1 - always, 1 - never
        case "eq":
            return int(x[0] == x[1] == y[0] == y[1]), int(x[0] <= y[1] and y[0] <= x[1])
        case "lt":
            return int(x[1] < y[0]), int(x[0] < y[1])
    return int(x[1] <= y[0]), int(x[0] <= y[1])
