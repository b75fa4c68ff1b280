"""Proofs about what a term contributes: the abstract value of an expression under assumptions on some parts of it.

Used for masks (what is added where a predicate is false?) and for empty rows (what is added while a running maximum is
still its identity?). The domain: a known constant, some finite number, or anything.
"""

import itertools
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

import numpy as np

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read
from pallasfuse.ir.ops import OPS
from pallasfuse.ir.reducers import Reducer


class Unknown(Enum):
    """An abstract value that is not a constant."""

    FINITE = "finite"
    ASSUMED = "assumed to be finite"
    ANYTHING = "anything"


Abstract = float | Unknown
_ALWAYS_FINITE = frozenset({"tanh", "logistic", "erf", "erfc", "sign", "sin", "cos", "atan"})
_NAN_ABSORBS = frozenset({"add", "sub", "mul", "div", "max", "min"})
_FINITE_IN_FINITE_OUT = frozenset({"add", "sub", "mul", "neg", "abs", "max", "min", "floor", "ceil", "round_even",
                                   "round_away", "square", "exp", "exp2", "expm1", "convert", "asinh"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Contribution:
    """The abstract value of a term, and whether it relies on a value that is only assumed to be finite.

    `0 * x = 0` and `-inf + x = -inf` hold for finite x only.
    """

    value: Abstract
    assumes_finite_factor: bool


def evaluate_under(
    root: Expr,
    assumptions: Mapping[Expr, float],
    finite: AbstractSet[str] = frozenset(),
    doubtful: AbstractSet[str] = frozenset(),
) -> Contribution:
    """The abstract value of `root` when the given subexpressions have the given values.

    Reads of tensors in `finite` are finite, of those in `doubtful` they are anything, and of all others they are assumed finite.
    """
    values: dict[Expr, Abstract] = {}
    assumed = False
    stack: list[tuple[Expr, bool]] = [(root, False)]
    with np.errstate(all="ignore"):
        while stack:
            node, ready = stack.pop()
            if node in values:
                continue
            if node in assumptions:
                values[node] = assumptions[node]
            elif not ready:
                stack.append((node, True))
                stack.extend((a, False) for a in node.args)
            else:
                match node:
                    case Const(value):
                        values[node] = float(value)
                    case Index():
                        values[node] = Unknown.FINITE
                    case Read(tensor):
                        values[node] = (
                            Unknown.ANYTHING if tensor in doubtful
                            else Unknown.FINITE if tensor in finite else Unknown.ASSUMED
                        )  # fmt: skip
                    case Apply(op, args, dtype):
                        values[node], used = _apply(op, [values[a] for a in args], dtype)
                        assumed |= used
                    case _:
                        assert_never(node)
    return Contribution(values[root], assumed)


def _apply(op: str, args: list[Abstract], dtype: str) -> tuple[Abstract, bool]:
    known = [a for a in args if isinstance(a, float)]
    infinite = any(math.isinf(a) or math.isnan(a) for a in known)
    if op == "select":
        if isinstance(args[0], float):
            return args[1] if args[0] else args[2], False
        return _join(args[1], args[2]), False
    if len(known) == len(args):
        if op == "convert":
            return _converted(known[0], dtype), False
        boolean = OPS[op].kind == "logical"
        value = OPS[op].evaluate(*(np.bool_(a) if boolean and dtype == "bool" else np.float64(a) for a in known))
        return float(value), False
    if op in _NAN_ABSORBS and any(math.isnan(a) for a in known):
        return math.nan, False
    others = [a for a in args if not isinstance(a, float)]
    all_finite = Unknown.ANYTHING not in others
    assumed = Unknown.ASSUMED in others
    if op in ("add", "sub") and any(math.isinf(a) for a in known) and all_finite:
        # infinity plus or minus a finite number
        position = next(i for i, a in enumerate(args) if isinstance(a, float))
        return (-known[0] if op == "sub" and position == 1 else known[0]), assumed
    if op == "mul" and 0.0 in known and all_finite:
        return 0.0, assumed
    if op == "div" and args[0] == 0.0 and all_finite:
        return 0.0, True
    if op == "and" and 0.0 in known and dtype == "bool":
        return 0.0, False
    if op == "or" and 1.0 in known and dtype == "bool":
        return 1.0, False
    if op in ("max", "min") and infinite and not math.isnan(known[0]):
        neutral = -math.inf if op == "max" else math.inf
        other = next(a for a in args if not isinstance(a, float))
        if known[0] == neutral:
            return other, False
        return (known[0], assumed) if all_finite else (Unknown.ANYTHING, False)  # it may be NaN
    if OPS[op].kind in ("comparison", "logical"):
        return Unknown.FINITE, False
    result = Unknown.ASSUMED if assumed else Unknown.FINITE
    if op in _ALWAYS_FINITE and all_finite:
        return result, False
    if op in _FINITE_IN_FINITE_OUT and not infinite and all_finite:
        return result, False
    return Unknown.ANYTHING, False


def _converted(value: float, dtype: str) -> Abstract:
    if dtypes.is_float(dtype):
        return float(np.float16(value)) if dtype == "float16" else value
    if not math.isfinite(value):
        return Unknown.ANYTHING
    return float(bool(value)) if dtype == "bool" else float(math.trunc(value))


def _join(a: Abstract, b: Abstract) -> Abstract:
    if a == b:
        return a
    if any(x is Unknown.ANYTHING or (isinstance(x, float) and not math.isfinite(x)) for x in (a, b)):
        return Unknown.ANYTHING
    return Unknown.ASSUMED if Unknown.ASSUMED in (a, b) else Unknown.FINITE


_MOST_CHOICES = 4
"""Conditions of which every combination is looked at."""


def values_under(
    root: Expr, assumptions: Mapping[Expr, float], finite: AbstractSet[str] = frozenset()
) -> list[tuple[Mapping[Expr, float], Contribution]] | None:
    """Returns the ways in which the choices in `root` may turn out, each with what it is then. Arguments as `evaluate_under`.

    None: those are too many.
    """
    conditions: dict[Expr, None] = {}
    seen: set[Expr] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node in seen or node in assumptions:
            continue
        seen.add(node)
        stack.extend(node.args)
        if isinstance(node, Apply) and node.op == "select":
            for part in _parts(node.args[0]):
                if not isinstance(evaluate_under(part, assumptions, finite).value, float):
                    conditions[part] = None
            if len(conditions) > _MOST_CHOICES:
                return None
    ways = (dict(zip(conditions, w, strict=True)) for w in itertools.product((0.0, 1.0), repeat=len(conditions)))
    return [(way, evaluate_under(root, {**way, **assumptions}, finite)) for way in ways]


def _parts(condition: Expr) -> list[Expr]:
    """The conditions that a condition is joined from."""
    if isinstance(condition, Apply) and condition.op in ("and", "or", "not"):
        return [part for a in condition.args for part in _parts(a)]
    return [condition]


def is_neutral(
    term: Expr,
    reducer: Reducer,
    assumptions: Mapping[Expr, float],
    finite: AbstractSet[str] = frozenset(),
    doubtful: AbstractSet[str] = frozenset(),
) -> Contribution | None:
    """The contribution when it is proven to be the reducer's identity, else None. Arguments as `evaluate_under`."""
    got = evaluate_under(term, assumptions, finite, doubtful)
    identity = float(reducer.identity(dtypes.accumulator(term.dtype)))
    return got if isinstance(got.value, float) and got.value == identity else None
