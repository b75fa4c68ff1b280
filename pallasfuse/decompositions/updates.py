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

type Array = Any

_MOST_PLACES = 128
"""The most places, each of which is a sum over all updates."""
_WIDE = jnp.float32
"""The smallest floats that are added to in one step."""


def in_single_steps(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """An update that adds half types, in float32, which is rounded once; None for other types."""
    (target, _, changes), params = eqn.invars, eqn.params
    dtype = _compat.dtype_of(target)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize >= jnp.dtype(_WIDE).itemsize:
        return None
    if _compat.dtype_of(changes) != dtype:
        return None

    def run(x: Array, places: Array, updates: Array) -> list[Array]:
        found = lax.scatter_add(
            x.astype(_WIDE), places, updates.astype(_WIDE), params["dimension_numbers"], mode=params["mode"],
            indices_are_sorted=params["indices_are_sorted"], unique_indices=params["unique_indices"],
        )  # fmt: skip
        return [found.astype(dtype)]

    return run


def by_place(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """An update that adds to places along one dimension, as sums over all updates that name each place; None where these are many.

    Updates that name no place count nowhere, as in the update that is written; of a mode that clips, they name the last one.
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
    half = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < jnp.dtype(_WIDE).itemsize
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        return None
    summed = _WIDE if half else dtype

    def run(x: Array, places: Array, updates: Array) -> list[Array]:
        at = places.reshape(number)
        if mode == lax.GatherScatterMode.CLIP:
            at = jnp.clip(at, 0, shape[dim] - 1)
        rows = lax.transpose(updates, (*outside, *numbers.update_window_dims)).reshape(1, number, *window)
        here = at == jnp.arange(shape[dim], dtype=at.dtype)[:, None]
        here = here.reshape(*here.shape, *[1] * len(window))
        added = jnp.sum(jnp.where(here, rows.astype(summed), jnp.zeros((), summed)), axis=1, dtype=summed)
        return [(x.astype(summed) + jnp.moveaxis(added, 0, dim)).astype(dtype)]

    return run
