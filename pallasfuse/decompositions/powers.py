"""Powers with a constant exponent that is a whole number and a half, by a square root, products and a quotient.

XLA for CPUs calls a function of the C library for each element of most powers, and of an inverse square root.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn, Literal
from pallasfuse.decompositions.writing import wide

Array = Any

_LARGEST = 4.5
"""The largest exponent: each whole number in it is a product, and a rounding."""


def power(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """A power like x ** 1.5 by a square root; None for other exponents."""
    exponent, dtype = eqn.invars[1], _compat.dtype_of(eqn.invars[0])
    computed = wide(dtype)
    if not isinstance(exponent, Literal) or computed is None or not jnp.issubdtype(dtype, jnp.floating):
        return None
    value = float(exponent.val)
    whole = math.floor(abs(value))
    if abs(value) - whole != 0.5 or not 1 < abs(value) <= _LARGEST:
        return None

    def run(x: Array, _: Array) -> list[Array]:
        y = x.astype(computed)
        root, factor = (lax.sqrt(y), y) if value > 0 else (_inverse_root(y), 1 / y)
        for _ in range(
            whole
        ):  # by factors on the way to the result: nothing is too small or too large that the result is not
            root = root * factor
        # a power of minus infinity is that of infinity, though a root has none, and that of minus zero has no sign
        at_infinity = jnp.asarray(jnp.inf if value > 0 else 0, computed)
        return [jnp.where(y == -jnp.inf, at_infinity, lax.abs(root)).astype(dtype)]

    return run


def inverse_root(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """An inverse square root as a quotient by the root; None for other types than floats."""
    dtype = _compat.dtype_of(eqn.invars[0])
    computed = wide(dtype)
    if computed is None or not jnp.issubdtype(dtype, jnp.floating):
        return None
    return lambda x: [_inverse_root(x.astype(computed)).astype(dtype)]


def _inverse_root(x: Array) -> Array:
    """One by the root: no root is less than -1, but without the maximum XLA would make one inverse root of both again."""
    return 1 / lax.max(lax.sqrt(x), jnp.asarray(-1, x.dtype))
