"""Products of the rows of each group with a matrix of its own, as products of blocks of rows with the matrices of their groups.

Rows of experts stand one group after the other. XLA multiplies all of them with the matrices of all groups, and adds up what zeros
have left. Here the rows of each group are divided into blocks of equally many rows, the last one filled up with zeros; every block
is multiplied with one matrix. There are at most as many blocks as whole ones of all rows, and one more for each group.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn

type Array = Any

_FEWEST, _MOST = 16, 128
"""Rows of a block: about those of a group, and at least what matrix units multiply at a time; 128 rows, of half precision, are
multiplied about as long as their matrix is read from memory."""


def in_blocks(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """A product of ragged groups of rows as products of blocks; None for ragged sums, batches, and groups that begin elsewhere.

    A NaN or an infinity in the matrix of a group stays in the rows of that group, which XLA's product of all spreads over all rows.
    """
    params = eqn.params
    numbers = params["ragged_dot_dimension_numbers"]
    (summed, batch) = numbers.dot_dimension_numbers
    rows, matrices, _ = (_compat.shape_of(a) for a in eqn.invars[:3])
    of_matrix = tuple(summed[1])
    if len(eqn.invars) > 3 or params["group_offset"] is not None or params.get("out_sharding") is not None:
        return None
    if len(rows) != 2 or len(matrices) != 3 or any(batch) or tuple(summed[0]) != (1,) or of_matrix not in ((1,), (2,)):
        return None
    if tuple(numbers.lhs_ragged_dimensions) != (0,) or tuple(numbers.rhs_group_dimensions) != (0,):
        return None
    if min((*rows, *matrices)) < 1:
        return None
    (count, _), groups = rows, matrices[0]
    size = min(_MOST, max(_FEWEST, 1 << (math.ceil(count / groups) - 1).bit_length()))
    blocks = min(math.ceil(count / size) + groups, count)  # each has a row

    def run(x: Array, w: Array, sizes: Array) -> list[Array]:
        sizes = sizes.astype(jnp.int32)  # numbers of rows, which small types cannot count
        ends = jnp.cumsum(sizes)
        starts = ends - sizes
        of_group = lax.div(sizes + (size - 1), jnp.asarray(size, sizes.dtype))
        last = jnp.cumsum(of_group)  # the first block behind those of each group
        first = last - of_group
        group = _group_of(jnp.arange(blocks, dtype=sizes.dtype), last)
        begin = _taken(starts, group) + (jnp.arange(blocks, dtype=sizes.dtype) - _taken(first, group)) * size
        place = begin[:, None] + jnp.arange(size, dtype=sizes.dtype)
        inside = place < _taken(ends, group)[:, None]
        padded = jnp.where(inside[:, :, None], _taken(x, place), jnp.zeros((), x.dtype))
        found = lax.dot_general(
            padded, _taken(w, group), (((2,), of_matrix), ((0,), (0,))), precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
        )  # fmt: skip
        row = jnp.arange(count, dtype=sizes.dtype)
        group = _group_of(row, ends)
        place = _taken(first, group) * size + row - _taken(starts, group)
        results = _taken(found.reshape(blocks * size, found.shape[-1]), place)
        behind = row >= ends[-1]  # rows of no group
        return [jnp.where(behind[:, None], jnp.zeros((), results.dtype), results)]

    return run


def _group_of(place: Array, ends: Array) -> Array:
    """The group of each place, where the places of groups end; the last one for those behind all."""
    return jnp.minimum(jnp.sum(ends[None, :] <= place[:, None], 1, dtype=ends.dtype), len(ends) - 1)


def _taken(values: Array, index: Array) -> Array:
    return jnp.take(values, index, axis=0, mode="clip")
