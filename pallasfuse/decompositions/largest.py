"""The largest elements of rows, found among the largest of their parts.

XLA gives each row to one multiprocessor, or sorts it whole. Of few long rows, all multiprocessors can look at parts; what these
leave is short.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn

type Array = Any

LENGTHS = (512, 1024, 2048, 4096)
"""The lengths of parts that are tried."""
_LEAST_LEFT_OUT = 2
"""The largest of all parts must be so many times as few as the elements of a row."""


def of_parts(length: int) -> Callable[[JaxprEqn], Callable[..., list[Array]] | None]:
    """Returns a rule that finds the largest elements of rows among the largest of parts of `length`.

    Equal elements stay in the order of their positions: parts, and what is left of each, are in that order.
    """

    def rule(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
        (operand,), params = eqn.invars, eqn.params
        *rows, whole = _compat.shape_of(operand) or (0,)
        count, parts = params["k"], whole // length
        if params.get("axis", len(rows)) not in (len(rows), -1) or len(eqn.outvars) != 2 or math.prod(rows) < 1:
            return None
        if parts < 2 or not 1 <= count <= length or parts * count * _LEAST_LEFT_OUT > whole:
            return None
        places = _compat.dtype_of(eqn.outvars[1])

        def run(x: Array) -> list[Array]:
            first, found = lax.top_k(x[..., : parts * length].reshape(*rows, parts, length), count)
            found += length * jnp.arange(parts, dtype=found.dtype)[:, None]
            values, at = (a.reshape(*rows, parts * count) for a in (first, found))
            if behind := whole - parts * length:
                last, found = lax.top_k(x[..., parts * length :], min(count, behind))
                values, at = jnp.concatenate([values, last], -1), jnp.concatenate([at, found + parts * length], -1)
            values, chosen = lax.top_k(values, count)
            return [values, jnp.take_along_axis(at, chosen, axis=-1).astype(places)]

        return run

    return rule
