"""Finds the sign that a scalar expression can have (design, section 3, "Facts the solver needs").

Signs are those of the real value. A floating-point exponential can underflow to zero; that is still "positive" here.
"""

from collections.abc import Mapping
from typing import Literal

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, postorder
from pallasfuse.ir.ops import OPS
from pallasfuse.ir.reducers import Reducer

Sign = Literal["positive", "nonnegative", "negative", "nonpositive", "any"]

# The possible signs as a bit set, so that every rule is a table over {-, 0, +}.
_NEG, _ZERO, _POS = 1, 2, 4
_ANY = _NEG | _ZERO | _POS
_MASK: dict[Sign, int] = {
    "positive": _POS, "nonnegative": _ZERO | _POS, "negative": _NEG, "nonpositive": _NEG | _ZERO, "any": _ANY,
}  # fmt: skip
_SIGN: dict[int, Sign] = {
    _POS: "positive", _ZERO | _POS: "nonnegative", _ZERO: "nonnegative", _NEG: "negative", _NEG | _ZERO: "nonpositive",
}  # fmt: skip
_ALWAYS_POSITIVE = frozenset({"exp", "exp2", "cosh", "logistic", "rsqrt", "erfc"})
_ODD_MONOTONE = frozenset(
    {"sinh", "tanh", "asinh", "atan", "asin", "atanh", "erf", "erf_inv", "cbrt", "sign", "expm1", "log1p"}
)


def is_strict(sign: Sign) -> bool:
    """Says whether the sign excludes zero."""
    return sign in ("positive", "negative")


def infer_sign(expr: Expr, known: Mapping[Expr | str, Sign] | Mapping[Expr, Sign] | Mapping[str, Sign]) -> Sign:
    """The sign of `expr`, given the signs in `known` of subexpressions (by node) and of tensors (by name)."""
    facts: dict[object, Sign] = dict(known.items())
    masks: dict[Expr, int] = {}
    for node in postorder(expr):
        mask = _node_mask(node, tuple(masks[a] for a in node.args), facts)
        given = facts.get(node)
        masks[node] = (mask & _MASK[given]) or _MASK[given] if given is not None else mask
    return _SIGN.get(masks[expr], "any")


def reduction_sign(reducer: Reducer, body_sign: Sign) -> Sign:
    """The sign of `reducer` over at least one element whose sign is `body_sign`."""
    match reducer.name:
        case "sum" | "max" | "min":
            return body_sign
        case "prod":
            return body_sign if body_sign in ("positive", "nonnegative") else "any"
        case _:
            return "nonnegative"


def _node_mask(node: Expr, args: tuple[int, ...], facts: Mapping[object, Sign]) -> int:
    match node:
        case Const(value, _):
            return _POS if value > 0 else _NEG if value < 0 else _ZERO if value == 0 else _ANY
        case Index():
            return _ZERO | _POS
        case Read(tensor, _, dtype):
            given = facts.get(tensor)
            return _MASK[given] if given is not None else _dtype_mask(dtype)
        case Apply(op, operands, dtype):
            return _apply_mask(op, operands, args, dtype)


def _dtype_mask(dtype: str) -> int:
    return _ZERO | _POS if dtype == "bool" or dtype.startswith("uint") else _ANY


def _apply_mask(op: str, operands: tuple[Expr, ...], args: tuple[int, ...], dtype: str) -> int:
    if op in _ALWAYS_POSITIVE:
        return _POS
    if op in _ODD_MONOTONE:
        return args[0]
    if OPS[op].kind in ("comparison", "logical"):
        return _dtype_mask(dtype)
    match op:
        case "add":
            return _combine(_sum, *args)
        case "sub":
            return _combine(_sum, args[0], _negated(args[1]))
        case "neg":
            return _negated(args[0])
        case "mul" if operands[0] is operands[1]:
            return _combine_square(args[0])
        case "mul":
            return _combine(_product, *args)
        case "div":
            quotient = _combine(_product, args[0], (args[1] & ~_ZERO) or _ANY)
            return quotient if dtypes.is_float(dtype) else quotient | _ZERO
        case "square" | "abs":
            return _combine_square(args[0])
        case "sqrt" | "acosh" | "acos":
            return _POS if op == "sqrt" and args[0] == _POS else _ZERO | _POS
        case "integer_pow" | "pow":
            return _power_mask(operands[1], args[0], dtype)
        case "max":
            return _combine(max, *args)
        case "min":
            return _combine(min, *args)
        case "select":
            return args[1] | args[2]
        case "convert":
            return args[0] if dtypes.is_float(dtype) or dtype == "bool" else args[0] | _ZERO
        case "floor":
            return args[0] | _ZERO if args[0] & _POS else args[0]
        case "ceil":
            return args[0] | _ZERO if args[0] & _NEG else args[0]
        case "round_even" | "round_away" | "rem":
            return args[0] | _ZERO
        case _:
            return _ANY


def _power_mask(exponent: Expr, base: int, dtype: str) -> int:
    if base & _NEG == 0:
        return _POS if base == _POS and dtypes.is_float(dtype) else _ZERO | _POS
    if isinstance(exponent, Const) and float(exponent.value).is_integer():
        value = int(exponent.value)
        return _POS if value == 0 else _combine_square(base) if value % 2 == 0 else base
    return _ANY


def _combine_square(mask: int) -> int:
    return (_ZERO if mask & _ZERO else 0) | (_POS if mask & (_NEG | _POS) else 0)


def _negated(mask: int) -> int:
    return (_POS if mask & _NEG else 0) | (mask & _ZERO) | (_NEG if mask & _POS else 0)


def _sum(a: int, b: int) -> int | None:
    return None if a * b < 0 else (a or b)


def _product(a: int, b: int) -> int:
    return a * b


def _combine(rule: object, a: int, b: int) -> int:
    """The signs that rule(x, y) can have: `rule` maps two signs to a sign, or to None for "any"."""
    assert callable(rule)
    result = 0
    for x, bit_x in ((-1, _NEG), (0, _ZERO), (1, _POS)):
        for y, bit_y in ((-1, _NEG), (0, _ZERO), (1, _POS)):
            if a & bit_x and b & bit_y:
                outcome = rule(x, y)
                result |= _ANY if outcome is None else (_NEG, _ZERO, _POS)[outcome + 1]
    return result
