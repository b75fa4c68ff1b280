"""Proofs about what a term contributes: the abstract value of an expression under assumptions on some parts of it.

Used for masks (what is added where a predicate is false?) and for empty rows (what is added while a running maximum is
still its identity?). The domain: a known constant, a number far from all that are not masked, some finite number, or anything.

Masks often fill in a finite number instead of an infinity, `-1e9` or `finfo.min`. A constant that is so large is taken to be
far: no value of the program that is not masked comes near it.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import assert_never

import numpy as np

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, apply, const, postorder
from pallasfuse.ir.ops import OPS, evaluated
from pallasfuse.ir.reducers import Reducer


class Unknown(Enum):
    """An abstract value that is not a constant."""

    FINITE = "finite"
    ASSUMED = "assumed to be finite"
    LOW = "assumed to be finite, or far below all that are"
    HIGH = "assumed to be finite, or far above all that are"
    ANYTHING = "anything"


@dataclass(frozen=True, slots=True)
class Far:
    """A finite number that is taken to be far below (negative) or above all values that are not masked, `value` or about that."""

    value: float


Abstract = float | Far | Unknown
_LEAST_FAR = 1e8
"""Constants of this size or more are far; so are those of at least half the largest number of their type."""
VANISHES = 1100.0
"""The exponential of a number this far below zero is zero in every type, also to the base of two."""
_ALWAYS_FINITE = frozenset({"tanh", "logistic", "erf", "erfc", "sign", "sin", "cos", "atan"})
_NAN_ABSORBS = frozenset({"add", "sub", "mul", "div", "max", "min"})
_FINITE_IN_FINITE_OUT = frozenset({"add", "sub", "mul", "neg", "abs", "max", "min", "floor", "ceil", "round_even",
                                   "round_away", "square", "exp", "exp2", "expm1", "convert", "asinh"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Contribution:
    """The abstract value of a term, and what it relies on.

    `assumes_finite_factor`: `0 * x = 0` and `-inf + x = -inf` hold for finite x only.
    """

    value: Abstract
    assumes_finite_factor: bool


def evaluate_under(
    root: Expr,
    assumptions: Mapping[Expr, float],
    finite: AbstractSet[str] = frozenset(),
    doubtful: AbstractSet[str] = frozenset(),
    *,
    far: bool = False,
) -> Contribution:
    """The abstract value of `root` when the given subexpressions have the given values.

    Reads of tensors in `finite` are finite, of those in `doubtful` they are anything, and of all others they are assumed finite.
    far: large constants are taken to be far from all other values, which those of `finite` must allow.
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
                        values[node] = Far(float(value)) if far and is_far(node) else float(value)
                    case Index():
                        values[node] = Unknown.FINITE
                    case Read(tensor):
                        values[node] = (
                            Unknown.ANYTHING if tensor in doubtful
                            else Unknown.FINITE if tensor in finite else Unknown.ASSUMED
                        )  # fmt: skip
                    case Apply(op, args, dtype):
                        known = [values[a] for a in args]
                        if any(_direction(a) for a in known):
                            values[node], used = _apply_far(op, known, dtype)
                        else:
                            values[node], used = _apply(op, known, dtype)
                        assumed |= used
                    case _:
                        assert_never(node)
    return Contribution(values[root], assumed)


def hides(value: Expr) -> bool:
    """Returns whether an expression is an infinity, or a number that is far from all others: what a mask fills in."""
    found = evaluate_under(value, {}, far=True).value
    return isinstance(found, Far) or (isinstance(found, float) and math.isinf(found))


@dataclass(frozen=True, slots=True)
class Fills:
    """The numbers that masks fill into an expression: `shown`, predicates that are true where none does; and the numbers."""

    shown: tuple[Expr, ...]
    numbers: frozenset[float]


@lru_cache(1 << 10)
def fills_of(root: Expr) -> Fills | None:
    """Finds the masks of an expression: choices of which one side hides.

    None where a number that is far stands anywhere else, so that it may be a number like others, or where both sides hide.
    """
    shown: dict[Expr, None] = {}
    numbers: set[float] = set()
    seen: set[Expr] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        match node:
            case Const() if is_far(node) or (dtypes.is_float(node.dtype) and math.isinf(node.value)):
                return None
            case Apply("select", (predicate, a, b)) if hides(a) or hides(b):
                if hides(a) and hides(b):
                    return None
                shown[apply("not", predicate) if hides(a) else predicate] = None
                hidden, visible = (a, b) if hides(a) else (b, a)
                numbers.update(float(n.value) for n in postorder(hidden) if isinstance(n, Const) and is_far(n))
                stack += [predicate, visible]
            case _:
                stack += node.args
    return Fills(tuple(shown), frozenset(numbers))


def is_far(number: Const) -> bool:
    """Is a constant so large that it can only stand for what is masked?"""
    if not dtypes.is_float(number.dtype) or not math.isfinite(number.value):
        return False
    return abs(number.value) >= min(_LEAST_FAR, 0.5 * dtypes.limits(number.dtype)[0])


_EXPONENTIALS = frozenset({"exp", "exp2"})


def _apply_far(op: str, args: list[Abstract], dtype: str) -> tuple[Abstract, bool]:
    """The value of an operation of which some argument is or may be far, and whether it relies on one that is assumed finite.

    Far plus something near is far; a multiple of it by a known number is, as long as it stays far. Else it is a finite number.
    """
    found: tuple[Abstract, bool] | None = None
    if op == "select":
        return _apply(op, args, dtype)
    if dtypes.is_float(dtype):
        numbers = [a.value if isinstance(a, Far) else a for a in args if not isinstance(a, Unknown)]
        undefined = Unknown.ANYTHING in args or not all(math.isfinite(n) for n in numbers)
        if len(numbers) == len(args):
            found = _far_number(op, numbers, dtype, alone=sum(isinstance(a, Far) for a in args) == 1)
        elif op in ("add", "sub") and not undefined:
            found = _far_sum(op, args)
        elif op in ("neg", "convert") and not undefined:
            found = _far_sum("add", args) if op == "convert" else _far_sum("sub", [0.0, *args])
    return found or _apply(op, [a if isinstance(a, float) else _near(a) for a in args], dtype)


def _far_number(op: str, numbers: Sequence[float], dtype: str, *, alone: bool) -> tuple[Abstract, bool] | None:
    """The value of an operation on known numbers, some far; None where that is not known. alone: only one of them is far."""
    if op in _EXPONENTIALS:
        return (0.0, False) if numbers[0] < -VANISHES else (Unknown.ANYTHING, False)
    if op not in _STAYS_FAR or not (alone or op in ("max", "min")):
        return None
    result = numbers[0] if op == "convert" else float(OPS[op].evaluate(*(np.float64(n) for n in numbers)))
    if not abs(result) < dtypes.limits(dtype)[0]:
        return (result if math.isnan(result) else math.copysign(math.inf, result)), False
    return (Far(result) if op == "convert" or is_far(const(result, dtype)) else result), False


def _far_sum(op: str, args: Sequence[Abstract]) -> tuple[Abstract, bool] | None:
    """The sum or difference of numbers that are far, or may be, and others; None where they may be far on both sides."""
    towards = [_direction(a) for a in args]
    if op == "sub" and len(args) == 2:
        towards[1] = -towards[1]
    if 1 in towards and -1 in towards:
        return None
    toward = min(towards) + max(towards)
    distant = [a.value for a in args if isinstance(a, Far)]
    assumed = not {Unknown.ASSUMED, Unknown.LOW, Unknown.HIGH}.isdisjoint(args)
    if distant:
        return Far(math.copysign(min(map(abs, distant)), toward)), assumed
    return (Unknown.LOW if toward < 0 else Unknown.HIGH), assumed


def _direction(value: Abstract) -> int:
    """Returns -1 for what is or may be far below, 1 for far above, and 0 for all else."""
    if isinstance(value, Far):
        return -1 if value.value < 0 else 1
    return -1 if value is Unknown.LOW else 1 if value is Unknown.HIGH else 0


def _near(value: Far | Unknown) -> Unknown:
    """The value where it does not matter that it is far."""
    if isinstance(value, Far):
        return Unknown.FINITE
    return Unknown.ANYTHING if value in (Unknown.LOW, Unknown.HIGH) else value


_STAYS_FAR = frozenset({"neg", "mul", "div", "add", "sub", "convert", "max", "min"})


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
        if op == "bitcast" or (dtypes.is_integer(dtype) and not all(math.isfinite(a) for a in known)):
            return Unknown.ANYTHING, False
        of = np.int64 if dtypes.is_integer(dtype) else np.bool_ if OPS[op].kind == "logical" else np.float64
        return float(evaluated(op, [of(a) for a in known], dtype)), False
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
    if op == "div" and isinstance(args[1], float) and math.isfinite(args[1]) and args[1] != 0 and all_finite:
        return (Unknown.ASSUMED if assumed else Unknown.FINITE), False
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
    if isinstance(a, Far) and isinstance(b, Far) and (a.value < 0) == (b.value < 0):
        return min(a, b, key=lambda x: abs(x.value))
    towards = {_direction(a), _direction(b)}
    if towards != {0}:
        infinite = any(isinstance(x, float) and not math.isfinite(x) for x in (a, b))
        if {1, -1} <= towards or infinite or Unknown.ANYTHING in (a, b):
            return Unknown.ANYTHING
        return Unknown.LOW if -1 in towards else Unknown.HIGH
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
    *,
    far: bool = False,
) -> Contribution | None:
    """The contribution when it is proven to be the reducer's identity, else None. Arguments as `evaluate_under`.

    What is far below all other values changes no maximum, what is far above them no minimum, if there are others.
    """
    got = evaluate_under(term, assumptions, finite, doubtful, far=far)
    identity = float(reducer.identity(dtypes.accumulator(term.dtype)))
    if isinstance(got.value, Far):
        return got if math.isinf(identity) and (got.value.value < 0) == (identity < 0) else None
    return got if isinstance(got.value, float) and got.value == identity else None
