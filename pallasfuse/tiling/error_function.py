"""The error function and its complement, written with an exponential and polynomials for targets that have neither.

The complement of a number x >= 0 is exp(-x^2) t p(t) with t = 1 / (1 + x/2), which runs from 1 to 0: exp(x^2) erfc(x) / t hardly
varies with t, so that a short polynomial p has all digits of a type (Numerical Recipes, 3rd edition, 6.2.2, fits its logarithm).
It is as exact as the square of x: 9^2 in float32 has an error of 4e-6, and so has the complement of 9. Near zero the error function
is x q(x^2), without a difference. Both polynomials interpolate at Chebyshev's points, and are evaluated on [-1, 1], where their
coefficients do not cancel.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.polynomial import chebyshev

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Expr, add, apply, const, div, mul, select, sub


@dataclass(frozen=True, slots=True)
class _Precision:
    """The polynomials that reach the precision of a float type."""

    smallest: float
    """The least t for which p is fitted. Beyond, exp(-x^2) is zero, or so small that few digits of it are left."""
    complement: int
    """The degree of p: its relative error on [smallest, 1] is less than a unit of float32 in the last place, 16 of float64."""
    near_zero: int
    """The degree of q, whose relative error on [0, 1] is less than a unit in the last place."""


_PRECISIONS = {4: _Precision(1 / 6.5, 11, 7), 8: _Precision(1 / 14, 24, 12)}
"""By the bytes of the type."""


def complement(x: Expr) -> Expr | None:
    """Returns erfc(x); None for a type that has no polynomial."""
    if dtypes.itemsize_bytes(x.dtype) not in _PRECISIONS:
        return None
    size = apply("abs", x)
    above = _above(size)
    far = select(apply("lt", x, const(0.0, x.dtype)), sub(const(2.0, x.dtype), above), above)
    near = sub(const(1.0, x.dtype), _near(x))  # which is 1 at zero, and exact where it cancels little
    return select(apply("lt", size, const(0.5, x.dtype)), near, far)


def error_function(x: Expr) -> Expr | None:
    """Returns erf(x); None for a type that has no polynomial."""
    if dtypes.itemsize_bytes(x.dtype) not in _PRECISIONS:
        return None
    one, size = const(1.0, x.dtype), apply("abs", x)
    rest = sub(one, _above(size))
    far = select(apply("lt", x, const(0.0, x.dtype)), apply("neg", rest), rest)
    return select(apply("lt", size, one), _near(x), far)


def _near(x: Expr) -> Expr:
    """Returns erf(x) of a number between -1 and 1."""
    precision = _PRECISIONS[dtypes.itemsize_bytes(x.dtype)]
    return mul(x, _polynomial(mul(x, x), 0.0, _near_zero(precision.near_zero)))


def _above(x: Expr) -> Expr:
    """Returns erfc(x) of a number that is not negative."""
    precision = _PRECISIONS[dtypes.itemsize_bytes(x.dtype)]
    one = const(1.0, x.dtype)
    t = div(one, add(mul(x, const(0.5, x.dtype)), one))
    slow = _polynomial(t, precision.smallest, _complement(precision.smallest, precision.complement))
    return mul(mul(apply("exp", apply("neg", mul(x, x))), t), slow)


def _polynomial(x: Expr, lowest: float, coefficients: tuple[float, ...]) -> Expr:
    """Returns the polynomial on [lowest, 1], whose coefficients are those of the powers of a number that runs from -1 to 1."""
    scale = 2.0 / (1.0 - lowest)
    s = add(mul(x, const(scale, x.dtype)), const(1.0 - scale, x.dtype))
    value: Expr = const(coefficients[-1], x.dtype)
    for c in reversed(coefficients[:-1]):
        value = add(mul(value, s), const(c, x.dtype))
    return value


@lru_cache
def _complement(lowest: float, degree: int) -> tuple[float, ...]:
    def slow(t: float) -> float:
        """Returns exp(x^2) erfc(x) / t; x^2 is the exact square of the first half of the digits, and what is left."""
        x = 2 * (1 - t) / t
        upper = float(np.float32(x))
        return math.erfc(x) * math.exp(upper * upper) * math.exp((x - upper) * (x + upper)) / t

    return _interpolated(slow, lowest, degree)


_SUMMED = 24
"""Terms of the series of the error function that count on [0, 1]."""


@lru_cache
def _near_zero(degree: int) -> tuple[float, ...]:
    def ratio(square: float) -> float:
        """Returns erf(x) / x by its series in x^2."""
        terms = ((-square) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(_SUMMED))
        return 2 / math.sqrt(math.pi) * math.fsum(terms)

    return _interpolated(ratio, 0.0, degree)


def _interpolated(function: Callable[[float], float], lowest: float, degree: int) -> tuple[float, ...]:
    """Returns the coefficients of a polynomial that equals a function at Chebyshev's points of [lowest, 1]."""
    points = [math.cos(math.pi * (k + 0.5) / (degree + 1)) for k in range(degree + 1)]
    values = [function((lowest + 1 + (1 - lowest) * p) / 2) for p in points]
    return tuple(
        float(c) for c in chebyshev.cheb2poly(chebyshev.chebfit(np.asarray(points), np.asarray(values), degree))
    )
