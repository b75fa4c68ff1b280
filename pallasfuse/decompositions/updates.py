"""Updates that add to few places: as sums of what meets at each place, into several copies of all places, or in a type whose
additions are single steps.

XLA's threads for GPUs add one element each. Where many meet at one place they wait for each other; and of types that are smaller
than a word, all that meet there compare and exchange, of which one succeeds and all others try again.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn
from pallasfuse.decompositions.writing import one_dimension_more, wide

type Array = Any

_MOST_PLACES = 128
"""The most places, each of which is a sum over all updates."""
COPIES = (8, 32, 512)
"""The numbers of copies of all places, of which the price takes one. Threads that are neighbours add to different ones."""
_MOST_COPIES_OF_ROWS = 8
"""The most copies of places that are rows. XLA adds up eight arrays in a loop over their elements; of more, it lays equal elements
beside each other, so that no row is in one piece. (65,536 rows of 16 to 256 numbers, to 8 to 1024 places on an H200, 2026-11-29:
8 copies take 5 to 42 us, 32 take 15 to 206.)"""


def in_single_steps(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """Returns an update that adds numbers of half precision, in float32, which is rounded once; None for other types."""
    (target, _, changes), params = eqn.invars, eqn.params
    dtype, summed = _compat.dtype_of(target), wide(_compat.dtype_of(target))
    is_half = jnp.issubdtype(dtype, jnp.floating) and summed not in (None, dtype)
    if (
        not is_half
        or _compat.dtype_of(changes) != dtype
        or min(*_compat.shape_of(target), *_compat.shape_of(changes), 1) < 1
    ):
        return None

    def run(x: Array, places: Array, updates: Array) -> list[Array]:
        found = lax.scatter_add(
            x.astype(summed), places, updates.astype(summed), params["dimension_numbers"], mode=params["mode"],
            indices_are_sorted=params["indices_are_sorted"], unique_indices=params["unique_indices"],
        )  # fmt: skip
        return [found.astype(dtype)]

    return run


def by_place(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """Returns an update that adds to places along one dimension, as sums over all that name each place; None where these are many.

    Updates that name no place count nowhere, as in the update that is written; of a mode that clips, they name the nearest one. A
    -0 to which nothing is added becomes 0.
    """
    target, _, changes = eqn.invars
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    shape, dtype = _compat.shape_of(target), _compat.dtype_of(target)
    dims = numbers.scatter_dims_to_operand_dims
    if len(dims) != 1 or numbers.inserted_window_dims != dims or numbers.operand_batching_dims:
        return None
    (dim,) = dims
    window = [n for d, n in enumerate(shape) if d != dim]
    outside = [d for d in range(len(_compat.shape_of(changes))) if d not in numbers.update_window_dims]
    number = math.prod(_compat.shape_of(changes)[d] for d in outside)
    if not 1 <= shape[dim] <= _MOST_PLACES or number <= 1 or min(shape, default=0) < 1:
        return None
    if [_compat.shape_of(changes)[d] for d in numbers.update_window_dims] != window:
        return None  # a window of a part, of which the place is where it begins
    if (summed := wide(dtype)) is None:
        return None

    def run(x: Array, places: Array, updates: Array) -> list[Array]:
        at = places.reshape(number)
        at = at.astype(jnp.int32) if at.dtype.itemsize < 4 else at
        if mode == lax.GatherScatterMode.CLIP:
            at = jnp.clip(at, 0, shape[dim] - 1)
        rows = lax.transpose(updates, (*outside, *numbers.update_window_dims)).reshape(1, number, *window)
        here = at == jnp.arange(shape[dim], dtype=at.dtype)[:, None]
        here = here.reshape(*here.shape, *[1] * len(window))
        added = jnp.sum(jnp.where(here, rows.astype(summed), jnp.zeros((), summed)), axis=1, dtype=summed)
        return [(x.astype(summed) + jnp.moveaxis(added, 0, dim)).astype(dtype)]

    return run


def in_copies(copies: int) -> Callable[[JaxprEqn], Callable[..., list[Array]] | None]:
    """Returns the rule by which updates add to so many copies of all places in turn, which are added up then.

    Updates that name no place count nowhere, in each copy as in the array. There are never more places in all copies than updates.
    A -0 to which nothing is added becomes 0.
    """

    def rule(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
        target, named, changes = eqn.invars
        numbers, params = eqn.params["dimension_numbers"], eqn.params
        shape, dtype = _compat.shape_of(target), _compat.dtype_of(target)
        outside, changed = _compat.shape_of(named)[:-1], _compat.shape_of(changes)
        has_rows = any(changed[d] > 1 for d in numbers.update_window_dims)
        if (
            params["unique_indices"]
            or not numbers.scatter_dims_to_operand_dims
            or (has_rows and copies > _MOST_COPIES_OF_ROWS)
            or copies * math.prod(shape) > math.prod(changed)
            or min(shape, default=0) < 1
            or (summed := wide(dtype)) is None
        ):
            return None

        def run(x: Array, places: Array, updates: Array) -> list[Array]:
            of_places = places.dtype if places.dtype.itemsize >= 4 else jnp.int32
            turn = jnp.arange(math.prod(outside), dtype=of_places) % copies
            found = lax.scatter_add(
                jnp.zeros((copies, *shape), summed),
                jnp.concatenate([turn.reshape(*outside, 1), places.astype(of_places)], axis=-1),
                updates.astype(summed), one_dimension_more(numbers), mode=params["mode"],
            )  # fmt: skip
            return [(x.astype(summed) + jnp.sum(found, axis=0, dtype=summed)).astype(dtype)]

        return run

    return rule
