"""Updates that add to few places, as sums of what meets at each place, or in a type whose additions are single steps.

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
from pallasfuse.decompositions.writing import wide

type Array = Any

_MOST_PLACES = 128
"""The most places, each of which is a sum over all updates."""


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
