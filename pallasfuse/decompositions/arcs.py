"""Inverse tangents, sines and cosines of float32, by arithmetic on vectors.

XLA for CPUs calls the C library for them, one after the other. Here two numbers become the angle between the axis of the larger
one and them, at most an eighth of a turn; of it another eighth is taken off where the rest is nearer to that. A polynomial gives
what is left. The eighths of a turn that the angle has besides are added in two parts, of which the first is exact. Values are
within three units in the last place of the exact ones. Arrays with a subnormal number, which vectors take for zero, are left to
the C library as a whole.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn
from pallasfuse.decompositions.angles import polynomial
from pallasfuse.decompositions.writing import usually, wide

type Array = Any

_TANGENT = math.tan(math.pi / 8)
"""Larger ratios of two numbers are nearer to an eighth of a turn than to none."""
_ARC = (-0.33333316445350647, 0.19998487830162048, -0.14243823289871216, 0.1059580147266388, -0.06082919239997864)
"""Coefficients of x^3 to x^11 of an inverse tangent up to a sixteenth of a turn: found by least squares whose weights follow the
errors (Lawson 1961); the relative error is 6.6e-10."""
_EIGHTH, _EIGHTH_LEFT = float.fromhex("0x1.921fp-1"), math.pi / 4 - float.fromhex("0x1.921fp-1")
"""An eighth of a turn in two parts: one of 17 digits, of which four times is exact, and what is left."""
_LARGE, _SCALE = 2.0**100, 2.0**-30
"""Sums of larger numbers than the first may be infinite, and differences of numbers as tiny may have few digits: both numbers are
multiplied by the second, or divided, which changes no ratio."""


def arc(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """An inverse tangent, sine or cosine; None for other types than float32 and narrower floats."""
    dtype, name = _compat.dtype_of(eqn.invars[0]), eqn.primitive.name
    computed = wide(dtype)
    is_float = jnp.issubdtype(dtype, jnp.floating) and computed == jnp.float32
    if not is_float or math.prod(_compat.shape_of(eqn.outvars[0])) < 1:
        return None
    library, of = _WAYS[name]

    def run(*operands: Array) -> list[Array]:
        wider = [x.astype(computed) for x in operands]
        have_all_digits = jnp.all(jnp.stack([jnp.all(~_is_subnormal(x)) for x in wider]))
        return [usually(have_all_digits, of, library, *wider).astype(dtype)]

    return run


def _of_tangent(x: Array) -> Array:
    """Returns the angles, up to a quarter of a turn, that have these tangents."""
    return _angle(x, jnp.ones_like(x))


def _of_sine(x: Array) -> Array:
    """Returns the angles that have these sines: as XLA has it, twice those of half the chord."""
    return 2 * _angle(x, 1 + lax.sqrt((1 - x) * (1 + x)))


def _of_cosine(x: Array) -> Array:
    """Returns the angles that have these cosines, found in the same way; for -1, of which no chord tells it, half a turn."""
    half = _angle(lax.sqrt((1 - x) * (1 + x)), 1 + x)
    return jnp.where(x == -1, jnp.float32(math.pi), 2 * half)


def _is_subnormal(x: Array) -> Array:
    """Is a number other than zero smaller than all that have all digits? Only its bits tell, as arithmetic may take it for zero."""
    size = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    return (size > 0) & (size < 0x00800000)


def _angle(y: Array, x: Array) -> Array:
    """The angle of the point (x, y), between minus half a turn and half a turn."""
    ahead, beside = lax.abs(x), lax.abs(y)
    less, more = lax.min(ahead, beside), lax.max(ahead, beside)
    scale = jnp.where(more > _LARGE, jnp.float32(_SCALE), jnp.where(more < 1 / _LARGE, jnp.float32(1 / _SCALE), 1.0))
    less, more = less * scale, more * scale
    are_equal = less == more  # also of two that are infinite
    is_near = less > more * jnp.float32(_TANGENT)
    above = jnp.where(are_equal, 0.0, jnp.where(is_near, less - more, less))
    below = jnp.where(is_near, less + more, more)
    ratio = above / jnp.where(below == 0, 1.0, below)
    square = ratio * ratio
    left = ratio + ratio * (square * polynomial(_ARC, square))
    eighths, sign = jnp.where(is_near, 1.0, 0.0), jnp.float32(1.0)
    eighths = jnp.where(are_equal & (more > 0), 1.0, eighths)
    is_beside, is_behind = beside > ahead, _is_negative(x)
    eighths, sign = jnp.where(is_beside, 2 - eighths, eighths), jnp.where(is_beside, -sign, sign)
    eighths, sign = jnp.where(is_behind, 4 - eighths, eighths), jnp.where(is_behind, -sign, sign)
    found = eighths * jnp.float32(_EIGHTH) + (sign * left + eighths * jnp.float32(_EIGHTH_LEFT))
    return jnp.where(_is_negative(y), -found, found)


def _is_negative(x: Array) -> Array:
    """Does a number have a minus, also a zero?"""
    return lax.bitcast_convert_type(x, jnp.int32) < 0


_WAYS: dict[str, tuple[Callable[..., Array], Callable[..., Array]]] = {
    "atan2": (lax.atan2, _angle),
    "atan": (lax.atan, _of_tangent),
    "asin": (lax.asin, _of_sine),
    "acos": (lax.acos, _of_cosine),
}
"""The library's function and the one of this module, by the names of operations."""
