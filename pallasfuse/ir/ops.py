"""The scalar operations that expressions are made of: one table from name to arity, kind and NumPy meaning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pallasfuse.ir import dtypes

Kind = Literal["arithmetic", "comparison", "logical", "cast", "select"]


@dataclass(frozen=True, slots=True)
class ScalarOp:
    """A scalar operation. `symbol` is its infix notation, or None for function notation."""

    name: str
    arity: int
    kind: Kind
    evaluate: Callable[..., Any]
    symbol: str | None = None


def _erf(x: Any) -> Any:
    from math import erf

    return np.vectorize(erf, otypes=[np.float64])(x)


def _erfc(x: Any) -> Any:
    from math import erfc

    return np.vectorize(erfc, otypes=[np.float64])(x)


def _erf_inv(x: Any) -> Any:
    from statistics import NormalDist

    inverse = NormalDist().inv_cdf

    def scalar(y: float) -> float:
        if abs(y) < 1:
            return inverse((y + 1) / 2) / 2**0.5
        return float(np.copysign(np.inf, y)) if abs(y) == 1 else float("nan")

    return np.vectorize(scalar, otypes=[np.float64])(x)


def _logistic(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def _divide(x: Any, y: Any) -> Any:
    if np.issubdtype(np.result_type(x, y), np.integer):
        return np.trunc(np.divide(x, np.where(np.asarray(y) == 0, 1, y))).astype(np.result_type(x, y))
    return np.divide(x, y)


def _round_away(x: Any) -> Any:
    return np.trunc(x + np.copysign(0.5, x))


def _integer_pow(x: Any, y: Any) -> Any:
    return np.power(x, y) if np.all(np.asarray(y) >= 0) else 1.0 / np.power(x, -y)


def _shift_left(x: Any, amount: Any) -> Any:
    inside = _is_within(x, amount)
    return np.where(inside, np.left_shift(x, np.where(inside, amount, 0)), np.zeros_like(x))


def _shift_right(x: Any, amount: Any) -> Any:
    inside, most = _is_within(x, amount), np.asarray(amount).dtype.type(8 * np.asarray(x).itemsize - 1)
    beyond = np.right_shift(x, most) if np.asarray(x).dtype.kind == "i" else np.zeros_like(x)
    return np.where(inside, np.right_shift(x, np.where(inside, amount, most)), beyond)


def _is_within(x: Any, amount: Any) -> Any:
    """Is an amount one of the bits that x has?"""
    return (amount >= 0) & (amount < 8 * np.asarray(x).itemsize)


def _arith(name: str, arity: int, evaluate: Callable[..., Any], symbol: str | None = None) -> ScalarOp:
    return ScalarOp(name, arity, "arithmetic", evaluate, symbol)


_ALL = (
    _arith("add", 2, np.add, "+"),
    _arith("sub", 2, np.subtract, "-"),
    _arith("mul", 2, np.multiply, "*"),
    _arith("div", 2, _divide, "/"),
    _arith("rem", 2, np.fmod, "%"),
    _arith("pow", 2, np.power, "**"),
    _arith("integer_pow", 2, _integer_pow, "**"),
    _arith("max", 2, np.maximum),
    _arith("min", 2, np.minimum),
    _arith("atan2", 2, np.arctan2),
    _arith("nextafter", 2, np.nextafter),
    _arith("neg", 1, np.negative),
    _arith("abs", 1, np.abs),
    _arith("sign", 1, lambda x: np.where(x == 0, x, np.sign(x))),
    _arith("floor", 1, np.floor),
    _arith("ceil", 1, np.ceil),
    _arith("round_even", 1, np.round),
    _arith("round_away", 1, _round_away),
    _arith("square", 1, np.square),
    _arith("sqrt", 1, np.sqrt),
    _arith("rsqrt", 1, lambda x: 1.0 / np.sqrt(x)),
    _arith("cbrt", 1, np.cbrt),
    _arith("exp", 1, np.exp),
    _arith("exp2", 1, np.exp2),
    _arith("expm1", 1, np.expm1),
    _arith("log", 1, np.log),
    _arith("log1p", 1, np.log1p),
    _arith("sin", 1, np.sin),
    _arith("cos", 1, np.cos),
    _arith("tan", 1, np.tan),
    _arith("asin", 1, np.arcsin),
    _arith("acos", 1, np.arccos),
    _arith("atan", 1, np.arctan),
    _arith("sinh", 1, np.sinh),
    _arith("cosh", 1, np.cosh),
    _arith("tanh", 1, np.tanh),
    _arith("asinh", 1, np.arcsinh),
    _arith("acosh", 1, np.arccosh),
    _arith("atanh", 1, np.arctanh),
    _arith("logistic", 1, _logistic),
    _arith("erf", 1, _erf),
    _arith("erfc", 1, _erfc),
    _arith("erf_inv", 1, _erf_inv),
    ScalarOp("eq", 2, "comparison", np.equal, "=="),
    ScalarOp("ne", 2, "comparison", np.not_equal, "!="),
    ScalarOp("lt", 2, "comparison", np.less, "<"),
    ScalarOp("le", 2, "comparison", np.less_equal, "<="),
    ScalarOp("gt", 2, "comparison", np.greater, ">"),
    ScalarOp("ge", 2, "comparison", np.greater_equal, ">="),
    ScalarOp("is_finite", 1, "comparison", np.isfinite),
    ScalarOp("and", 2, "logical", np.bitwise_and, "&"),
    ScalarOp("or", 2, "logical", np.bitwise_or, "|"),
    ScalarOp("xor", 2, "logical", np.bitwise_xor, "^"),
    ScalarOp("not", 1, "logical", np.invert),
    ScalarOp("shift_left", 2, "logical", _shift_left, "<<"),
    ScalarOp("shift_right", 2, "logical", _shift_right, ">>"),
    ScalarOp("convert", 1, "cast", lambda x: x),
    ScalarOp("bitcast", 1, "cast", lambda x: x),
    ScalarOp("select", 3, "select", np.where),
)

OPS: dict[str, ScalarOp] = {op.name: op for op in _ALL}

SHIFTS = frozenset({"shift_left", "shift_right"})
"""Shifts of the bits of integers, as XLA means them: a signed one keeps its sign to the right, and an amount below zero or
beyond the number of bits leaves nothing, or nothing but the sign."""

COMPARISONS = frozenset(name for name, op in OPS.items() if op.kind == "comparison" and op.arity == 2)


def evaluated(op: str, args: Sequence[Any], dtype: str) -> Any:
    """Computes an operation in float64, int64 or bool; integers wrap as those of the result's type `dtype` do.

    A float that becomes an integer is truncated, and held within the type; NaN becomes zero. Other casts keep their value.
    """
    if op == "bitcast":
        return _of_bits(np.asarray(args[0]), dtype)
    return wrapped(args[0] if op == "convert" else OPS[op].evaluate(*args), dtype)


def wrapped(value: Any, dtype: str) -> Any:
    """Returns numbers as `dtype` holds them, in a wide type: integers modulo those of their type, floats made integers truncated.

    Those of uint64 are the int64 of the same bits.
    """
    value = np.asarray(value)
    if dtypes.is_float(dtype):
        return value.astype(np.float64, copy=False)
    if dtype == "bool":
        return value.astype(np.bool_, copy=False)
    if value.dtype.kind == "f":
        limits = np.iinfo(dtype)
        value = np.nan_to_num(np.trunc(value)).clip(float(limits.min), float(min(limits.max, _LARGEST_WIDE)))
    value = value.astype(np.int64, copy=False)
    return value if dtypes.itemsize_bytes(dtype) == 8 else value.astype(dtype).astype(np.int64)


_LARGEST_WIDE = 2**63 - 1024
"""The largest float64 that int64 holds."""


def _of_bits(bits: Any, dtype: str) -> Any:
    """Returns the floats of type `dtype` that integers of as many bits stand for."""
    if dtype == "bfloat16":  # the upper half of a float32, which NumPy has
        bits, dtype = bits.astype(np.int64) << 16, "float32"
    return bits.astype(f"int{8 * dtypes.itemsize_bytes(dtype)}").view(dtype).astype(np.float64)
