"""Products of few rows or of tiny matrices, as products element by element and their sums.

A library copies the operands of a product to an order that it likes, and starts anew for each matrix of a batch. Where a matrix has
few elements, or meets few rows, that takes longer than the product. Sums of products element by element read both as they are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn
from pallasfuse.decompositions.writing import wide

Array = Any

MOST_ROWS = 4
"""The most rows of the smaller operand, each of which is a sum over the larger one."""
MOST_TINY = 8
"""The longest side of a tiny matrix: each position of the sum is an operation of its own."""
_FEWEST = 16
"""The fewest tiny matrices of a batch."""


@dataclass(frozen=True, slots=True)
class _Side:
    """An operand of a product: which of its dimensions are shared, summed, and its own."""

    shape: tuple[int, ...]
    batch: tuple[int, ...]
    summed: tuple[int, ...]

    @property
    def own(self) -> tuple[int, ...]:
        return tuple(d for d in range(len(self.shape)) if d not in self.batch and d not in self.summed)

    @property
    def rows(self) -> int:
        return self.sizes(self.own)

    def sizes(self, dims: Sequence[int]) -> int:
        return math.prod(self.shape[d] for d in dims)


def product(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """A product as sums of products element by element; None where it has many rows, or no floats of at least 16 bits."""
    (lhs, rhs), params = eqn.invars, eqn.params
    (summed, batch), result = params["dimension_numbers"], _compat.dtype_of(eqn.outvars[0])
    sides = [_Side(_compat.shape_of(a), tuple(b), tuple(s)) for a, b, s in zip((lhs, rhs), batch, summed, strict=True)]
    dtype = wide(result)
    floats = all(jnp.issubdtype(_compat.dtype_of(a), jnp.floating) for a in (lhs, rhs, eqn.outvars[0]))
    if not floats or dtype is None or any(wide(_compat.dtype_of(a)) is None for a in (lhs, rhs)):
        return None
    if min((*sides[0].shape, *sides[1].shape), default=0) < 1:
        return None
    many, terms = sides[0].sizes(sides[0].batch), sides[0].sizes(sides[0].summed)
    if many >= _FEWEST and max(sides[0].rows, sides[1].rows, terms) <= MOST_TINY:
        return lambda x, y: [_tiny(x.astype(dtype), y.astype(dtype), sides).astype(result)]
    small = 0 if sides[0].rows <= sides[1].rows else 1
    if sides[small].rows > MOST_ROWS:
        return None

    def run(*operands: Array) -> list[Array]:
        found = _by_rows(operands[small], operands[1 - small], sides[small], sides[1 - small], dtype)
        if small == 1:  # the rows of the first operand come first
            shared, rows = len(sides[1].batch), len(sides[1].own)
            first = tuple(range(shared + rows, found.ndim))
            found = lax.transpose(found, (*range(shared), *first, *range(shared, shared + rows)))
        return [found.astype(result)]

    return run


def _tiny(x: Array, y: Array, sides: Sequence[_Side]) -> Array:
    """Tiny matrices, one position of the sum after the other."""
    one, other = sides
    shared = tuple(one.shape[d] for d in one.batch)
    terms = one.sizes(one.summed)
    x = lax.transpose(x, (*one.batch, *one.own, *one.summed)).reshape(*shared, one.rows, 1, terms)
    y = lax.transpose(y, (*other.batch, *other.own, *other.summed)).reshape(*shared, 1, other.rows, terms)
    found = x[..., 0] * y[..., 0]
    for n in range(1, terms):
        found = found + x[..., n] * y[..., n]
    return found.reshape(*shared, *(one.shape[d] for d in one.own), *(other.shape[d] for d in other.own))


def _by_rows(few: Array, many: Array, small: _Side, large: _Side, dtype: Any) -> Array:
    """Each row of the smaller operand times the larger one, whose dimensions stay in their order, and summed."""
    shared, positions = tuple(small.shape[d] for d in small.batch), tuple(small.shape[d] for d in small.summed)
    rows = lax.transpose(few, (*small.own, *small.batch, *small.summed)).reshape(small.rows, *shared, *positions)
    places = (*large.batch, *large.summed)
    order = sorted(range(len(places)), key=places.__getitem__)
    kept = [d for d in range(len(large.shape)) if d not in large.summed]
    arranged = (*(kept.index(d) for d in large.batch), *(kept.index(d) for d in large.own))

    def one(row: Array) -> Array:
        spread = lax.broadcast_in_dim(lax.transpose(row, order), large.shape, sorted(places))
        summed = jnp.sum(spread.astype(dtype) * many.astype(dtype), large.summed)
        return lax.transpose(summed, arranged)

    found = jnp.stack([one(rows[n]) for n in range(small.rows)], len(shared))
    own = tuple(small.shape[d] for d in small.own)
    return found.reshape(*shared, *own, *(large.shape[d] for d in large.own))
