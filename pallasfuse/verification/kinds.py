"""The rules for sums, products and quotients of zeros, infinities and NaN."""

from collections.abc import Callable

import numpy as np

from pallasfuse.verification.field import Array
from pallasfuse.verification.value import FINITE, NAN, NEGATIVE_INFINITY, POSITIVE_INFINITY, ZERO

_F, _Z, _P, _N, _X = FINITE, ZERO, POSITIVE_INFINITY, NEGATIVE_INFINITY, NAN
_SIGNED = 5
"""An infinity whose sign is the product of the operands' signs."""

# rows and columns: finite, zero, +inf, -inf, NaN
_ADD = np.array(
    [[_F, _F, _P, _N, _X], [_F, _Z, _P, _N, _X], [_P, _P, _P, _X, _X], [_N, _N, _X, _N, _X], [_X] * 5], np.int8
)
_MULTIPLY = np.array(
    [[_F, _Z, _SIGNED, _SIGNED, _X], [_Z, _Z, _X, _X, _X], [_SIGNED, _X, _SIGNED, _SIGNED, _X],
     [_SIGNED, _X, _SIGNED, _SIGNED, _X], [_X] * 5], np.int8,
)  # fmt: skip
_DIVIDE = np.array(
    [[_F, _SIGNED, _Z, _Z, _X], [_Z, _X, _Z, _Z, _X], [_SIGNED, _SIGNED, _X, _X, _X], [_SIGNED, _SIGNED, _X, _X, _X], [_X] * 5],
    np.int8,
)  # fmt: skip


_NEGATIVE = np.array([_F, _Z, _N, _P, _X], np.int8)


def negative(kind: Array) -> Array:
    return np.asarray(_NEGATIVE[kind])


def add(a: Array, b: Array) -> Array:
    return np.asarray(_ADD[a, b])


def _signed(kind: Array, a: Array, b: Array, sign_a: Callable[[], Array], sign_b: Callable[[], Array]) -> Array:
    if not (kind == _SIGNED).any():
        return kind

    def sign(kind: Array, finite: Callable[[], Array]) -> Array:
        of_finite = finite() if (kind == _F).any() else np.int64(1)
        return np.where(kind == _N, -1, np.where(kind == _F, of_finite, 1))

    result = np.where(sign(a, sign_a) * sign(b, sign_b) < 0, _N, _P)
    return np.where(kind == _SIGNED, result, kind).astype(np.int8)


def multiply(a: Array, b: Array, sign_a: Callable[[], Array], sign_b: Callable[[], Array]) -> Array:
    return _signed(_MULTIPLY[a, b], a, b, sign_a, sign_b)


def divide(a: Array, b: Array, sign_a: Callable[[], Array], sign_b: Callable[[], Array]) -> Array:
    """A zero divisor counts as positive."""
    return _signed(_DIVIDE[a, b], a, b, sign_a, sign_b)
