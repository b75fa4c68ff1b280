"""Local simplification of scalar expressions: constants are folded, exact identities are erased.

Only identities that hold for every float value (NaN and signed zeros included) are used.
"""

import math
from functools import lru_cache

import numpy as np

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Apply, Const, Expr, apply, const, convert, rebuild, with_args
from pallasfuse.ir.neutrality import hides
from pallasfuse.ir.ops import OPS

_FOLDABLE = frozenset({"bool", "int32", "int64", "float32", "float64", "float16"})


def _fold(op: str, args: tuple[Const, ...], dtype: str) -> Expr | None:
    if op == "bitcast" or dtype not in _FOLDABLE or any(a.dtype not in _FOLDABLE for a in args):
        return None
    with np.errstate(all="ignore"):
        values = [np.dtype(a.dtype).type(a.value) for a in args]
        result = OPS[op].evaluate(*values) if op != "convert" else values[0]
        if op == "convert" and not _is_exact(values[0], dtype):
            return None  # -1e30 in float16: the cast says what happens; log 2 in float32: float64 interpreters keep it
        return const(np.asarray(result).astype(dtype).item(), dtype)


def _is_exact(value: np.generic, dtype: str) -> bool:
    """Says whether a cast keeps the value (truncation to an integer is the cast's meaning)."""
    if not np.isfinite(value):
        return not dtypes.is_integer(dtype)
    return not dtypes.is_float(dtype) or bool(value.astype(dtype) == value)


def _is(expr: Expr, value: float | bool) -> bool:
    return isinstance(expr, Const) and expr.value == value


OPPOSITE = {"ge": "lt", "gt": "le", "le": "gt", "lt": "ge", "eq": "ne", "ne": "eq"}
"""The comparison that is true where another one is false, of integers."""
_DEEPEST = 8


def _opposite(predicate: Expr, depth: int = 0) -> Expr | None:
    """The negation of a predicate where it takes no operation more; None else."""
    match predicate:
        case Apply("not", (p,), "bool"):
            return p
        case Apply(op, (a, b)) if op in OPPOSITE and _is_exact_type(a.dtype):
            return apply(OPPOSITE[op], a, b)
        case Apply("and" | "or" as op, (a, b), "bool") if depth < _DEEPEST:
            left, right = _opposite(a, depth + 1), _opposite(b, depth + 1)
            if left is not None and right is not None:
                return apply("or" if op == "and" else "and", left, right)
    return None


def _is_exact_type(dtype: str) -> bool:
    return dtypes.is_integer(dtype) or dtype == "bool"


def _is_truth(predicate: Expr, number: Expr, value: int) -> bool:
    """Returns whether a comparison with a number asks for a truth value that was made a number."""
    return predicate.dtype == "bool" and _is(number, value)


def _step(node: Expr, args: tuple[Expr, ...]) -> Expr:
    if not isinstance(node, Apply):
        return node
    op, dtype = node.op, node.dtype
    match op, args:
        case "select", (p, a, b):
            if isinstance(p, Const):
                return a if p.value else b
            if a is b:
                return a
            if dtype == "bool" and isinstance(a, Const) and isinstance(b, Const):  # they differ
                return p if a.value else apply("not", p)
            if isinstance(a, Const) and (not isinstance(b, Const) or (hides(a) and not hides(b))):
                opposite = _opposite(p)
                if opposite is not None:
                    return apply("select", opposite, b, a)
        case "not", (p,) if dtype == "bool":
            opposite = _opposite(p)
            if opposite is not None:
                return opposite
        case ("ne" | "gt", (Apply("convert", (p,)), n)) | ("lt", (n, Apply("convert", (p,)))) if _is_truth(p, n, 0):
            return p
        case ("eq" | "ge", (Apply("convert", (p,)), n)) if _is_truth(p, n, 1):
            return p
        case ("eq", (Apply("convert", (p,)), n)) if _is_truth(p, n, 0):
            return apply("not", p)
        case "eq" | "ge" | "le", (a, b) if a is b and _is_exact_type(a.dtype):
            return const(True, "bool")
        case "and", (a, b) if dtype == "bool":
            for x, y in ((a, b), (b, a)):
                if isinstance(x, Const):
                    return y if x.value else x
            if a is b:
                return a
        case "or", (a, b) if dtype == "bool":
            for x, y in ((a, b), (b, a)):
                if isinstance(x, Const):
                    return x if x.value else y
            if a is b:
                return a
        case "convert", (Apply("convert", (x,), middle),) if dtypes.is_exact_cast(x.dtype, middle):
            return convert(x, dtype)
        case "convert", (x,) if x.dtype == dtype:
            return x
        case "max", (a, b) if dtypes.is_float(dtype):
            for x, y in ((a, b), (b, a)):
                if _is(x, -math.inf):
                    return y
        case "min", (a, b) if dtypes.is_float(dtype):
            for x, y in ((a, b), (b, a)):
                if _is(x, math.inf):
                    return y
        case "add" | "sub", (a, b) if dtypes.is_integer(dtype) and _is(b, 0):
            return a
        case "sub", (a, Const(zero)) if zero == 0 and math.copysign(1.0, zero) > 0:
            return a  # -0 - 0 is -0
        case "add", (a, b) if dtypes.is_integer(dtype) and _is(a, 0):
            return b
        case "mul", (a, b):
            for x, y in ((a, b), (b, a)):
                if _is(x, 1):
                    return y
        case "div", (a, b) if _is(b, 1):
            return a
        case "integer_pow", (x, n) if _is(n, 2):
            return apply("mul", x, x)
    if all(isinstance(a, Const) for a in args):
        folded = _fold(op, tuple(a for a in args if isinstance(a, Const)), dtype)
        if folded is not None:
            return folded
    return with_args(node, args)


def simplify(root: Expr, done: dict[Expr, Expr] | None = None) -> Expr:
    """An expression with the same value at every point, for every input. `done` remembers parts for further roots."""
    if not root.args:
        return root
    return _simplified(root) if done is None else rebuild(root, _step, done)


@lru_cache(1 << 12)
def _simplified(root: Expr) -> Expr:
    """Candidates for one kernel ask for much the same."""
    return rebuild(root, _step)
