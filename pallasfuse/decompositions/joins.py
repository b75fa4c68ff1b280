"""Concatenations as choices between padded arrays.

XLA's kernel for a concatenation on a GPU starts a thread for each element of the longest operand, and one that moves more than an
element only where a number divides the lengths of all operands. A loop over the result, which chooses the operand, moves as much
at once as its last dimensions allow.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn

Array = Any

_MOST_OPERANDS = 4
"""The most operands between which each element chooses: three took 1.2 times as long as an even concatenation on an H100."""


def choice(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """A concatenation of a few arrays as a choice between them, each padded to the result's length. None for others."""
    dimension, shape = eqn.params["dimension"], _compat.shape_of(eqn.outvars[0])
    operands = [_compat.shape_of(a) for a in eqn.invars]
    if not 2 <= len(operands) <= _MOST_OPERANDS or min(min(s) for s in operands) < 1:
        return None
    if not any(jnp.issubdtype(_compat.dtype_of(eqn.outvars[0]), t) for t in (jnp.number, jnp.bool_)):
        return None
    length = shape[dimension]

    def run(*arrays: Array) -> list[Array]:
        place, at = lax.broadcasted_iota(jnp.int32, shape, dimension), arrays[0].shape[dimension]
        found = _padded(arrays[0], dimension, 0, length)
        for array in arrays[1:]:
            found = lax.select(lax.ge(place, jnp.int32(at)), _padded(array, dimension, at, length), found)
            at += array.shape[dimension]
        return [found]

    return run


def _padded(x: Array, dimension: int, before: int, length: int) -> Array:
    """An array with so many zeros before it along a dimension, and as many behind as its length is to have."""
    ends: Sequence[tuple[int, int, int]] = [
        (before, length - before - n, 0) if d == dimension else (0, 0, 0) for d, n in enumerate(x.shape)
    ]
    return lax.pad(x, jnp.zeros((), x.dtype), ends)
