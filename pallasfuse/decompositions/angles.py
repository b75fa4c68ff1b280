"""Sines, cosines and tangents of float32, by arithmetic on vectors.

Unless it sums them up at once, XLA for CPUs computes them one after the other. Here a quarter of a turn is taken off so many
times that no more than half of one is left (Cody and Waite 1980): its parts have so few digits that their products with whole
numbers below 2^17 are exact, and what the last differences round off is kept. The rest goes to a polynomial. Values are within
two units in the last place of the exact ones, those of tangents within four. Arrays with a larger angle, or one that is no number,
are left to the C library as a whole.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn
from pallasfuse.decompositions.writing import usually, wide

type Array = Any

_LARGEST = float(1 << 17)
"""The largest angle: 83,443 quarters of a turn."""
_QUARTER = tuple(
    map(
        float.fromhex, ("0x1.9p+0", "0x1.0cp-7", "0x1.ecp-14", "0x1.5p-22", "0x1.1p-30", "0x1.68p-39", "0x1.84698ap-48")
    )
)
"""A quarter of a turn in parts: six of seven digits, and what is left."""
_EXACT = 3
"""The first so many differences are exact: they have no more digits than float32 holds."""
_SINE = (-0.16666655, 0.00833217, -0.00019517)
_COSINE = (-0.5, 4.16666467e-02, -1.38873614e-03, 2.44377297e-05)
"""Coefficients of x^3, x^5, x^7 of a sine, and of x^2, x^4, x^6, x^8 of a cosine, up to an eighth of a turn: found by least squares
whose weights follow the errors (Lawson 1961); relative errors are 3.6e-9 and 9.6e-11."""
_SMALL = 2.0**-12
"""Below it a sine is its angle, also the sign of a zero."""


def wave(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """A sine, a cosine or a tangent; None for other types than float32 and narrower floats, and where the user asks for an
    accuracy."""
    dtype, name = _compat.dtype_of(eqn.invars[0]), eqn.primitive.name
    computed = wide(dtype)
    if (
        not jnp.issubdtype(dtype, jnp.floating)
        or computed != jnp.float32
        or math.prod(_compat.shape_of(eqn.invars[0])) < 1
        or eqn.params.get("accuracy") is not None
    ):
        return None
    library, of = {"sin": (lax.sin, _sine), "cos": (lax.cos, _cosine), "tan": (lax.tan, _tangent)}[name]

    def run(x: Array) -> list[Array]:
        angles = x.astype(computed)
        are_small = jnp.all(lax.abs(angles) <= _LARGEST)
        return [usually(are_small, of, library, angles).astype(dtype)]

    return run


def _sine(x: Array) -> Array:
    number, left = _reduced(x)
    return jnp.where(lax.abs(x) < _SMALL, x, _turned(number, left))


def _cosine(x: Array) -> Array:
    number, left = _reduced(x)
    return _turned(number + 1, left)


def _tangent(x: Array) -> Array:
    number, left = _reduced(x)
    sine, cosine = _waves(left)
    is_even = (number & 1) == 0
    found = jnp.where(is_even, sine, -cosine) / jnp.where(is_even, cosine, sine)
    return jnp.where(lax.abs(x) < _SMALL, x, found)


def _reduced(x: Array) -> tuple[Array, Array]:
    """The number of the nearest quarter of a turn, and what is left of an angle beside it."""
    whole = lax.round(x * jnp.float32(2 / math.pi), lax.RoundingMethod.TO_NEAREST_EVEN)
    *parts, last = (whole * jnp.float32(part) for part in _QUARTER)
    left, rounded_off = x, jnp.zeros_like(x)
    for number, part in enumerate(parts):
        found = left - part
        if number >= _EXACT:  # the sum of a difference and what it rounds off is exact (Knuth 1969)
            taken = left - found
            rounded_off = rounded_off + ((left - (found + taken)) + (taken - part))
        left = found
    return whole.astype(jnp.int32), left + (rounded_off - last)


def _turned(number: Array, x: Array) -> Array:
    """The sine of so many quarters of a turn and a rest."""
    sine, cosine = _waves(x)
    found = jnp.where((number & 1) == 0, sine, cosine)
    return jnp.where((number & 2) == 0, found, -found)


def _waves(x: Array) -> tuple[Array, Array]:
    """The sine and the cosine of an angle of up to an eighth of a turn."""
    square = x * x
    return x + x * (square * polynomial(_SINE, square)), 1 + square * polynomial(_COSINE, square)


def polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    """The value of a polynomial, from the last coefficient on."""
    found = jnp.float32(coefficients[-1])
    for one in reversed(coefficients[:-1]):
        found = found * x + jnp.float32(one)
    return found
