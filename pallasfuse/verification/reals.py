"""Real numbers in place of the finite fields: is a difference that the fields show there in float64, too?

The fields are stricter than the reals. A positive number may be no square in them, two rounded constants may not be known to be
related. So what they find equal is equal, but what they find different need not be: before a counterexample is reported, the same
stage is run on real inputs, by the same interpreters.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pallasfuse.ir import dtypes
from pallasfuse.ir.domain import FLOAT64, wide_type
from pallasfuse.ir.reducers import Reducer
from pallasfuse.verification.compare import Comparison, Mismatch
from pallasfuse.verification.domain import FiniteFields
from pallasfuse.verification.field import Array
from pallasfuse.verification.value import FINITE, Value

_CLOSE = {"float64": 1e-9, "float32": 1e-4, "float16": 0.05, "bfloat16": 0.05}
"""The largest relative difference that rounded constants of a type may make."""
_ENOUGH = 3
"""So many inputs that disagree are no accident of conditioning."""


class Reals(FiniteFields):
    """Float64 numbers as `Value`s that have no residues: every number is known."""

    def real(self, values: Any, dtype: str) -> Value:
        """Known numbers, with the trials (or 1) as their last dimension."""
        values = np.asarray(values).astype(wide_type(dtype))
        one = np.zeros((1,) * values.ndim, np.uint8)
        return Value(dtype, np.full_like(one, FINITE, np.int8), one.astype(bool), one, real=values)

    def constant(self, value: float | int | bool, dtype: str, rank: int) -> Value:
        value = np.copysign(np.inf, value) if value in self.far else value
        return self.real(np.full((1,) * (rank + 1), value), dtype)

    def random(self, shape: Sequence[int], dtype: str) -> Value:
        """An input: normal numbers; integers and booleans as the fields have them."""
        if not dtypes.is_float(dtype):
            return super().random(shape, dtype)
        return self.real(self.tower.generator.normal(size=(*shape, self.tower.trials)), dtype)

    def squares(self, value: Value) -> Value:
        """Squares any numbers, which makes them positive."""
        assert value.real is not None
        return self.real(value.real**2, value.dtype)

    def sign(self, x: Value) -> Array:
        assert x.real is not None
        return np.where(x.real < 0, -1, 1)

    def apply(self, op: str, args: Sequence[Value], dtype: str) -> Value:
        """`op` elementwise, with broadcasting of unit dimensions."""
        operands = [a.real for a in args if a.real is not None]
        result = self.real(FLOAT64.apply(op, operands, dtype), dtype)
        bad, taint = self.flags(args)
        if op == "convert" and dtypes.is_float(dtype) and result.real is not None:
            infinite, zero = dtypes.limits(dtype)
            size = np.abs(result.real)
            limited = np.where(
                size <= zero, 0.0, np.where(size >= infinite, np.copysign(np.inf, result.real), result.real)
            )
            result = self.real(limited, dtype)
        return replace(result, bad=bad, taint=taint)

    def reduce(
        self, reducer: Reducer, value: Value, dims: tuple[int, ...], dtype: str, *, joins: bool = False
    ) -> Value:
        value = value.full()
        assert value.real is not None
        result = self.real(FLOAT64.reduce(reducer, value.real, dims, dtype), dtype)
        return replace(result, bad=value.bad.any(dims, keepdims=True)) if value.bad.any() else result


class RealComparison(Comparison):
    """Counts how many real inputs tell a value from its reference."""

    def __init__(self, coarsest: str) -> None:
        """Starts with no inputs. coarsest: the type whose roundings constants may carry."""
        super().__init__()
        self.tolerance = _CLOSE[coarsest]

    def add(self, expected: Value, found: Value, trials: int, *, unfinished: bool = False) -> None:
        """Counts the inputs of one batch that disagree."""
        assert expected.real is not None and found.real is not None
        shape = (*expected.shape, trials)
        a, b, bad = (np.broadcast_to(x, shape) for x in (expected.real, found.real, expected.bad | found.bad))
        self.compared = True
        if not dtypes.is_float(expected.dtype):
            differ = (a != b) & ~bad
        else:
            with np.errstate(all="ignore"):
                typical = np.median(np.abs(np.where(np.isfinite(a), a, 0.0)), axis=-1, keepdims=True)
                close = np.isfinite(a) & (np.abs(a - b) <= self.tolerance * np.maximum(np.abs(a), typical))
            differ = ~(close | (a == b) | (np.isnan(a) & np.isnan(b))) & ~bad
        wrong = differ.sum(-1) >= min(_ENOUGH, trials)
        if wrong.any() and self.mismatch is None:
            at = tuple(int(n) for n in np.argwhere(wrong)[0])
            trial = int(np.argwhere(differ[at])[0][0])
            self.mismatch = Mismatch(at, f"{a[at][trial]:.6g}", f"{b[at][trial]:.6g}")
