"""Running sums, products and extremes, as a loop over positions of short blocks, all rows and blocks at once.

XLA computes a running sum over windows of 16 elements, each anew. Here a trip of a loop adds one element to each block, with
vectors; the totals of blocks are run in the same way, and combined with all elements of the blocks behind. Along the last axis that
takes two transpositions, which cost more than is gained, unless the rows are few.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn

Array = Any

_COMBINED: dict[str, Callable[[Array, Array], Array]] = {
    "cumsum": lax.add,
    "cumprod": lax.mul,
    "cummax": lax.max,
    "cummin": lax.min,
}
_MOST_ROWS = 8
"""The most rows that are transposed: a cache line has an element of each."""
_LONGEST = 64
"""The longest block: its trips are few beside the elements that each computes."""


def running(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """A running reduction along one axis by blocks; None where the axis is too short."""
    axis, backwards = eqn.params["axis"], eqn.params["reverse"]
    combine, shape = _COMBINED[eqn.primitive.name], _compat.shape_of(eqn.invars[0])
    rows, is_last = math.prod(shape) // max(1, shape[axis]), math.prod(shape[axis + 1 :]) == 1
    if shape[axis] < 4 or min(shape) < 1 or (is_last and rows > _MOST_ROWS):
        return None

    def run(x: Array) -> list[Array]:
        rows = jnp.moveaxis(x, axis, 0).reshape(shape[axis], -1)  # the axis, and all rows side by side
        found = _along_first(rows, combine, backwards)
        moved = (shape[axis], *(n for d, n in enumerate(shape) if d != axis))
        return [jnp.moveaxis(found.reshape(moved), 0, axis)]

    return run


def _along_first(x: Array, combine: Callable[[Array, Array], Array], backwards: bool) -> Array:
    """The running reduction of [length, rows] along its first axis."""
    length, rows = x.shape
    block = min(_LONGEST, 1 << math.ceil(math.log2(math.sqrt(length)) + 0.5))
    blocks = -(-length // block)
    if blocks <= 2:
        return _trips(x, combine, backwards)
    # the positions behind the end are read by nobody that matters: results of a block depend on what is before them only
    padding = (blocks * block - length, 0, 0) if backwards else (0, blocks * block - length, 0)
    x = lax.pad(x, jnp.zeros((), x.dtype), [padding, (0, 0, 0)])
    parts = jnp.moveaxis(x.reshape(blocks, block, rows), 1, 0).reshape(block, blocks * rows)
    inside = _trips(parts, combine, backwards).reshape(block, blocks, rows)
    totals = _along_first(inside[0 if backwards else -1], combine, backwards)
    if backwards:
        found = jnp.concatenate([combine(inside[:, :-1], totals[None, 1:]), inside[:, -1:]], axis=1)
    else:
        found = jnp.concatenate([inside[:, :1], combine(inside[:, 1:], totals[None, :-1])], axis=1)
    found = jnp.moveaxis(found, 0, 1).reshape(blocks * block, rows)
    return found[blocks * block - length :] if backwards else found[:length]


def _trips(x: Array, combine: Callable[[Array, Array], Array], backwards: bool) -> Array:
    """The running reduction of [length, rows], one position after the other."""

    def trip(before: Array, here: Array) -> tuple[Array, Array]:
        found = combine(before, here)
        return found, found

    first, others = (x[-1], x[:-1]) if backwards else (x[0], x[1:])
    _, found = lax.scan(trip, first, others, reverse=backwards)
    return jnp.concatenate([found, first[None]] if backwards else [first[None], found])
