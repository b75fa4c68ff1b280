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

Array = Any

_LARGEST = 4.5


def power(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """A power like x ** 1.5 by a square root; None for other exponents."""
    exponent = eqn.invars[1]
    if not isinstance(exponent, Literal) or not jnp.issubdtype(_compat.dtype_of(eqn.invars[0]), jnp.floating):
        return None
    value = float(exponent.val)
    whole = math.floor(abs(value))
    if abs(value) - whole != 0.5 or not 1 < abs(value) <= _LARGEST:
        return None

    def run(x: Array, _: Array) -> list[Array]:
        found = lax.sqrt(x)
        for _ in range(whole):
            found = found * x
        # a power of minus infinity is that of infinity, though a root has none, and that of minus zero has no sign
        found = jnp.where(x == -jnp.inf, jnp.asarray(jnp.inf, x.dtype), lax.abs(found))
        return [found if value > 0 else 1 / found]

    return run


def inverse_root(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """An inverse square root as a quotient by the root; None for other types than floats."""
    if not jnp.issubdtype(_compat.dtype_of(eqn.invars[0]), jnp.floating):
        return None
    # no root is less than -1; without the maximum XLA would make one inverse root of both again
    return lambda x: [1 / lax.max(lax.sqrt(x), jnp.asarray(-1, x.dtype))]
