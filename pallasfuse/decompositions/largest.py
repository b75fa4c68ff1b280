"""The largest elements of rows, found among the largest of their parts, or in those parts whose own largest are the largest.

XLA gives each row to one multiprocessor, or sorts it whole. Of few long rows, all multiprocessors can look at parts; what these
leave is short. And only as many short parts as elements are wanted can hold any of these.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn
from pallasfuse.decompositions.sorting import from_keys, has_keys, order_keys

type Array = Any

LENGTHS = (512, 1024, 2048, 4096)
"""The lengths of parts that are tried."""
SHORT_LENGTHS = (16, 32, 64, 128)
"""The lengths of parts that are tried, of which most are left out whole."""
_LEAST_LEFT_OUT = 2
"""The largest of all parts must be so many times as few as the elements of a row."""
_LEAST_NOT_LOOKED_AT = 4
"""The largest of short parts, with all elements of those that are looked at, must be so many times as few as the elements of a
row."""
_IN_BOUNDS = "promise_in_bounds"


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
            return [values, jnp.take_along_axis(at, chosen, axis=-1, mode=_IN_BOUNDS).astype(places)]

        return run

    return rule


def of_short_parts(length: int) -> Callable[[JaxprEqn], Callable[..., list[Array]] | None]:
    """Returns a rule that looks for the largest elements of rows only in as many parts of `length` as elements are wanted, those
    with the largest elements of their own, and in what is behind the last part.

    Any other element has in each of these parts one that stands before it: a larger one, or an equal one at a lower position.
    The order is that of all bits (`order_keys`), in which only equal elements are equal.
    """

    def rule(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
        (operand,), params = eqn.invars, eqn.params
        *rows, whole = _compat.shape_of(operand) or (0,)
        count, (parts, behind), dtype = params["k"], divmod(whole, length), _compat.dtype_of(operand)
        if params.get("axis", len(rows)) not in (len(rows), -1) or len(eqn.outvars) != 2 or math.prod(rows) < 1:
            return None
        if count < 1 or (parts + count * length + behind) * _LEAST_NOT_LOOKED_AT > whole or not has_keys(dtype):
            return None
        places = _compat.dtype_of(eqn.outvars[1])

        def run(x: Array) -> list[Array]:
            best_of_parts = jnp.max(order_keys(x)[..., : parts * length].reshape(*rows, parts, length), axis=-1)
            _, chosen = lax.top_k(from_keys(best_of_parts, dtype), count)
            chosen = lax.sort(chosen, dimension=len(rows))  # equal elements stay in the order of their positions
            at = (length * chosen[..., None] + jnp.arange(length, dtype=chosen.dtype)).reshape(*rows, count * length)
            last = jnp.broadcast_to(jnp.arange(parts * length, whole, dtype=at.dtype), (*rows, behind))
            at = jnp.concatenate([at, last], axis=-1)
            values, found = lax.top_k(jnp.take_along_axis(x, at, axis=-1, mode=_IN_BOUNDS), count)
            return [values, jnp.take_along_axis(at, found, axis=-1, mode=_IN_BOUNDS).astype(places)]

        return run

    return rule
