"""Elements at places that a program computes, as sums and choices over all positions of an axis.

A kernel that holds an axis in registers cannot take the element whose number it has just computed, or change that one alone:
threads do not read each other's registers. But each can compare its positions with the number. What is taken is a sum in which all
terms but one are zero, and what is changed is a choice at each position: greedy methods take and change one element a trip, after
they have looked at all of them anyway. A sum of zeros and one number is that number, except that -0 becomes 0.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn
from pallasfuse.decompositions.writing import Run

type Array = Any

COMBINED: Mapping[str, Callable[[Array, Array], Array]] = {
    "scatter": lambda _, new: new, "scatter-add": operator.add, "scatter-sub": operator.sub, "scatter-mul": operator.mul,
    "scatter-min": lax.min, "scatter-max": lax.max,
}  # fmt: skip
"""The updates, and what they make of what stands at a place and what comes."""


_MOST_COMPARED = 64
"""A gather of several places compares at most so many pairs of a place and a position: rows of eight by eight matrices."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Says where a gather or a scatter takes its places from."""

    by_number: Mapping[int, int]
    """The dimensions of which one position is taken, each with its component of an index: of `x[:, i, j]`, 1 has 0, and 2 has 1."""
    batching: Mapping[int, int]
    """Dimensions of the indices of a batch of arrays, each with the one of the array."""
    drops: bool
    """Places outside of the array are none; otherwise they are the nearest inside."""


def taken(eqn: JaxprEqn) -> Run | None:
    """Computes a gather of a single position, or one for each of a batch, and of all positions along the other dimensions; also one
    of a few positions of a short dimension, such as rows of a small matrix in another order.

    None for other ones: each of several positions is compared with all of the dimension.
    """
    numbers, sizes = eqn.params["dimension_numbers"], [int(n) for n in eqn.params["slice_sizes"]]
    shape, out = _compat.shape_of(eqn.invars[0]), _compat.shape_of(eqn.outvars[0])
    places = _places(
        shape, sizes, numbers.start_index_map, numbers.operand_batching_dims, numbers.start_indices_batching_dims, eqn
    )
    if places is None:
        return None
    count = _places_each(places, _compat.shape_of(eqn.invars[1]))
    if count != 1 and count * math.prod(shape[d] for d in places.by_number) > _MOST_COMPARED:
        return None
    if places.drops and _bits(eqn) > 32:
        return None  # JAX finds places of 64 bits outside of an array inside of it
    fill = eqn.params["fill_value"]
    dropped = [int(d) for d in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    offsets = [int(d) for d in numbers.offset_dims]

    def run(array: Array, indices: Array) -> list[Array]:
        rank = indices.ndim - 1
        found, kept = _with_dimensions_of_indices(array, places, rank)
        inside: Array = True
        for dim, number in places.by_number.items():
            at = rank + kept.index(dim)
            index, is_inside = _index(element(indices, indices.ndim - 1, number), shape[dim])
            inside = jnp.logical_and(inside, is_inside)
            found = element(found, at, index.reshape(*index.shape, *[1] * len(kept)), keepdims=True)
        found = jnp.broadcast_to(found, (*indices.shape[:-1], *found.shape[rank:]))
        found = jnp.squeeze(found, [rank + kept.index(d) for d in dropped if d in kept])
        rows = [d for d in range(len(out)) if d not in offsets]
        found = jnp.transpose(found, [([*rows, *offsets]).index(d) for d in range(len(out))])
        if places.drops:
            inside = jnp.broadcast_to(inside, indices.shape[:-1])
            inside = lax.broadcast_in_dim(inside, out, rows)
            number = _fill_of_type(found.dtype) if fill is None else fill
            found = jnp.where(inside, found, jnp.asarray(number, found.dtype))
        return [found]

    return run


def sliced(eqn: JaxprEqn) -> Run | None:
    """Computes a slice of one position along some dimensions, and of all along the others; None for other ones."""
    shape, sizes = _compat.shape_of(eqn.invars[0]), [int(n) for n in eqn.params["slice_sizes"]]
    cut = [d for d, (n, size) in enumerate(zip(shape, sizes, strict=True)) if n != size]
    if any(sizes[d] != 1 for d in cut) or not _of_numbers(eqn):
        return None

    def run(array: Array, *starts: Array) -> list[Array]:
        for dim in cut:
            index, _ = _index(starts[dim], shape[dim])
            array = element(array, dim, index, keepdims=True)
        return [array]

    return run


def changed(eqn: JaxprEqn) -> Run | None:
    """Computes a scatter that changes one position along some dimensions, or one for each of a batch; None for other ones."""
    numbers, combine = eqn.params["dimension_numbers"], COMBINED[eqn.primitive.name]
    shape, of_indices, of_update = (_compat.shape_of(v) for v in eqn.invars)
    inserted = {int(d) for d in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)}
    windows = [int(d) for d in numbers.update_window_dims]
    by_dim = dict(zip([d for d in range(len(shape)) if d not in inserted], windows, strict=True))
    sizes = [of_update[by_dim[d]] if d in by_dim else 1 for d in range(len(shape))]
    batching = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    places = _places(shape, sizes, numbers.scatter_dims_to_operand_dims, *batching, eqn)
    if places is None or _places_each(places, of_indices) != 1:
        return None
    if _bits(eqn) < 32:
        return None  # JAX compares them with lengths in their own type
    if eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"] is not None:
        return None  # what comes is a function of what stands there

    def run(array: Array, indices: Array, update: Array) -> list[Array]:
        rows = [d for d in range(update.ndim) if d not in windows]
        # the update over the dimensions of the array: those of the batch, and those of its window
        over = {dim: rows[of] for of, dim in places.batching.items()} | by_dim
        update = _over_dimensions(update, over, len(shape))
        here: Array = True
        for dim, number in places.by_number.items():
            index, inside = (
                _over_dimensions(x, {d: of for of, d in places.batching.items()}, len(shape))
                for x in _index(element(indices, indices.ndim - 1, number), shape[dim])
            )
            here = jnp.logical_and(here, lax.broadcasted_iota(jnp.int32, shape, dim) == index)
            here = jnp.logical_and(here, inside) if places.drops else here
        return [jnp.where(here, combine(array, update.astype(array.dtype)), array)]

    return run


def replaced(eqn: JaxprEqn) -> Run | None:
    """Computes an update of one position along some dimensions, and of all along the others; None for other ones."""
    shape, sizes = (_compat.shape_of(v) for v in eqn.invars[:2])
    cut = [d for d, (n, size) in enumerate(zip(shape, sizes, strict=True)) if n != size]
    if any(sizes[d] != 1 for d in cut) or not _of_numbers(eqn):
        return None

    def run(array: Array, update: Array, *starts: Array) -> list[Array]:
        here: Array = True
        for dim in cut:
            index, _ = _index(starts[dim], shape[dim])
            here = jnp.logical_and(here, lax.broadcasted_iota(jnp.int32, shape, dim) == index)
        return [jnp.where(here, update, array)]

    return run


RULES: Mapping[str, Callable[[JaxprEqn], Run | None]] = {
    "gather": taken,
    "dynamic_slice": sliced,
    "dynamic_update_slice": replaced,
    **dict.fromkeys(COMBINED, changed),
}


def _places(
    shape: Sequence[int], sizes: Sequence[int], by_index: Sequence[Any], batching: Sequence[Any], with_indices: Sequence[Any],
    eqn: JaxprEqn,
) -> _Places | None:  # fmt: skip
    """Finds the places of a gather or a scatter; None where it takes parts of a dimension that are longer than one position."""
    if not _of_numbers(eqn):
        return None
    mode = eqn.params["mode"]
    own = {int(dim): number for number, dim in enumerate(by_index)}
    beside = {int(of): int(dim) for of, dim in zip(with_indices, batching, strict=True)}
    cut = [d for d, (n, size) in enumerate(zip(shape, sizes, strict=True)) if n != size and d not in beside.values()]
    known = (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS, GatherScatterMode.FILL_OR_DROP)
    drops = mode == GatherScatterMode.FILL_OR_DROP
    if 0 in shape or mode not in known or any(sizes[d] != 1 or d not in own for d in cut):
        return None
    # where all of a dimension is taken, only an index of zero is inside
    wanted = own if drops else {d: own[d] for d in own if d in cut}
    if any(sizes[d] != 1 for d in wanted):
        return None
    return _Places(wanted, beside, drops)


def _places_each(places: _Places, of_indices: Sequence[int]) -> int:
    """Counts the places in an array, or in each of a batch."""
    return math.prod(n for d, n in enumerate(of_indices[:-1]) if d not in places.batching)


def _bits(eqn: JaxprEqn) -> int:
    """Returns the bits of each number of a place."""
    return jnp.iinfo(_compat.dtype_of(eqn.invars[1])).bits


def _of_numbers(eqn: JaxprEqn) -> bool:
    """Are the elements of an array numbers or conditions?"""
    dtype = _compat.dtype_of(eqn.invars[0])
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and not jnp.issubdtype(dtype, jnp.complexfloating)


def _index(index: Array, length: int) -> tuple[Array, Array]:
    """Returns the nearest position along a dimension, and says if the index is inside."""
    if jnp.iinfo(index.dtype).bits < 32:  # the length may be no number of a narrow type
        index = index.astype(jnp.int32)
    inside = jnp.logical_and(index >= 0, index < length)
    return jnp.clip(index, 0, length - 1).astype(jnp.int32), inside


def element(array: Array, dim: int, index: Array | int, *, keepdims: bool = False) -> Array:
    """Computes the elements of an array at one position of a dimension, without the dimension unless it is to have length one."""
    is_bool = array.dtype == jnp.bool_
    values = array.astype(jnp.int32) if is_bool else array
    here = lax.broadcasted_iota(jnp.int32, array.shape, dim) == index
    found = jnp.sum(
        jnp.where(here, values, jnp.zeros((), values.dtype)), axis=dim, keepdims=keepdims, dtype=values.dtype
    )
    return found != 0 if is_bool else found


def _with_dimensions_of_indices(array: Array, places: _Places, rank: int) -> tuple[Array, list[int]]:
    """Returns an array over the `rank` dimensions of indices and its own other ones, and which of its dimensions these are."""
    ordered = sorted(places.batching)
    kept = [d for d in range(array.ndim) if d not in places.batching.values()]
    turned = jnp.transpose(array, [*(places.batching[of] for of in ordered), *kept])
    shape = [1] * rank + [array.shape[d] for d in kept]
    for of in ordered:
        shape[of] = array.shape[places.batching[of]]
    return turned.reshape(shape), kept


def _over_dimensions(array: Array, over: Mapping[int, int], rank: int) -> Array:
    """Returns an array over `rank` dimensions, of which `over` says which of its own they are; the others have length one."""
    ordered = sorted(over)
    others = [d for d in range(array.ndim) if d not in over.values()]
    array = jnp.squeeze(array, others) if others else array
    left = [d for d in range(array.ndim + len(others)) if d not in others]
    turned = jnp.transpose(array, [left.index(over[d]) for d in ordered])
    shape = [1] * rank
    for n, d in enumerate(ordered):
        shape[d] = turned.shape[n]
    return turned.reshape(shape)


def _fill_of_type(dtype: Any) -> Any:
    """Returns what a gather leaves for places outside of an array, as `jax.lax.gather` says."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if dtype == jnp.bool_:
        return True
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max
