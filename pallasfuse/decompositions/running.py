"""Running sums, products and extremes, as a loop over positions of short blocks, all rows and blocks at once.

XLA computes a running sum over windows of 16 elements, each anew. Here a trip of a loop adds one element to each block, with
vectors; the totals of blocks are run in the same way, and combined with all elements of the blocks behind. Along the last axis a
trip takes one element from each cache line of a block: only few rows gain by it.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn
from pallasfuse.decompositions.writing import wide

Array = Any


def _log_of_sum(x: Array, y: Array) -> Array:
    """The logarithm of the sum of two numbers, of which logarithms are given; infinite ones of one sign have no difference."""
    apart = x - y
    return jnp.where(jnp.isnan(apart), x + y, lax.max(x, y) + lax.log1p(lax.exp(-lax.abs(apart))))


_COMBINED: dict[str, Callable[[Array, Array], Array]] = {
    "cumsum": lax.add,
    "cumprod": lax.mul,
    "cummax": lax.max,
    "cummin": lax.min,
    "cumlogsumexp": _log_of_sum,
}
_TURNED = frozenset({"cumlogsumexp"})
"""Those of which XLA's windows are so slow (155 ns an element, in rows of 4096 on two cores) that rows are worth being turned to
the first axis, and back."""
_MOST_ROWS = 8
"""The most rows along the last axis, whose neighbours no vector holds: an estimate from six shapes on two cores."""
_LONGEST = 64
"""The longest block: its trips are few beside the elements that each computes."""


def running(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """A running reduction along one axis by blocks; None where the axis is too short, or the last one of many rows."""
    axis, backwards = eqn.params["axis"], eqn.params["reverse"]
    combine, shape = _COMBINED[eqn.primitive.name], _compat.shape_of(eqn.invars[0])
    rows, is_last = math.prod(shape) // max(1, shape[axis]), math.prod(shape[axis + 1 :]) == 1
    dtype = _compat.dtype_of(eqn.invars[0])
    summed = wide(dtype)
    if summed is None or shape[axis] < 4 or min(shape) < 1:
        return None
    if is_last and rows > _MOST_ROWS:
        if eqn.primitive.name not in _TURNED:
            return None
        return lambda x: [_as_along_the_first(x.astype(summed), axis, combine, backwards).astype(dtype)]

    return lambda x: [_along(x.astype(summed), axis, combine, backwards).astype(dtype)]


def _as_along_the_first(x: Array, axis: int, combine: Callable[[Array, Array], Array], backwards: bool) -> Array:
    """The running reduction along an axis, which becomes the first one meanwhile."""
    return jnp.moveaxis(_along(jnp.moveaxis(x, axis, 0), 0, combine, backwards), 0, axis)


def _along(x: Array, axis: int, combine: Callable[[Array, Array], Array], backwards: bool) -> Array:
    """The running reduction along an axis, in blocks where it is long."""
    before, length, behind = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    block = min(_LONGEST, 1 << math.ceil(math.log2(math.sqrt(length)) + 0.5))
    blocks = -(-length // block)
    if blocks <= 2:
        return _trips(x, axis, combine, backwards)
    # what is padded stands where no result that is kept depends on it: behind the last position, or before the first of a reverse
    missing = blocks * block - length
    outside = (missing, 0, 0) if backwards else (0, missing, 0)
    padding = [outside if d == axis else (0, 0, 0) for d in range(x.ndim)]
    parts = lax.pad(x, jnp.zeros((), x.dtype), padding).reshape(*before, blocks, block, *behind)
    inside = _trips(parts, axis + 1, combine, backwards)
    totals = lax.index_in_dim(inside, 0 if backwards else block - 1, axis + 1)
    run = _along(totals, axis, combine, backwards)
    own, others = ((0, blocks - 1), (1, blocks)) if backwards else ((1, blocks), (0, blocks - 1))
    moved = combine(lax.slice_in_dim(inside, *own, axis=axis), lax.slice_in_dim(run, *others, axis=axis))
    edge = lax.index_in_dim(inside, blocks - 1 if backwards else 0, axis)
    found = lax.concatenate([moved, edge] if backwards else [edge, moved], axis)
    found = found.reshape(*before, blocks * block, *behind)
    return lax.slice_in_dim(found, missing if backwards else 0, missing + length if backwards else length, axis=axis)


def _trips(x: Array, axis: int, combine: Callable[[Array, Array], Array], backwards: bool) -> Array:
    """The running reduction along an axis, one position after the other, each in its place."""
    last = x.shape[axis] - 1

    def trip(n: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        before, found = state
        place = last - n if backwards else n
        here = combine(before, lax.dynamic_index_in_dim(x, place, axis))
        return here, lax.dynamic_update_slice_in_dim(found, here, place, axis)

    first = lax.index_in_dim(x, last if backwards else 0, axis)
    _, found = lax.fori_loop(1, last + 1, trip, (first, x))
    return found
