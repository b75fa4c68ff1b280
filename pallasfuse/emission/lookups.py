"""Tensors that are looked up in others, on arrays: as a whole, where a kernel cannot look them up, and tile by tile."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasfuse.emission.elementwise import select
from pallasfuse.emission.interpreter import DynamicSlice
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.tile_program import Loop, TileProgram, every

Array = Any


def shaped(array: Array, axes: Sequence[Axis]) -> Array:
    """An array with one dimension for each axis: of a tensor that is read in several ways only the row-major order counts."""
    extents = tuple(a.extent for a in axes)
    return array if array.shape == extents else array.reshape(extents)


def stored(lookups: Sequence[Lookup], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The results of lookups by name, as arrays of their own: what the program's gathers would have stored."""
    found = {}
    for lookup in lookups:
        windows = {a: DynamicSlice(0, a.extent, False) for a in lookup.result.axes}
        found[lookup.result.name] = tile_of(lookup, arrays, lookup.result.axes, windows, by_blocks=True)
    return found


def in_whole_blocks(program: TileProgram, lookup: Lookup) -> frozenset[Axis]:
    """The axes along which every tile of a program begins and ends where a block of rows does."""
    whole: set[Axis] = set()
    loops = [s for s in every(program.body) if isinstance(s, Loop)]
    for axis, tile in program.tiles:
        segments = [g for s in loops if s.axis == axis for g in s.segments]
        sizes = [n for g in segments for n in (g.offset, g.tile)] or [tile]
        if all(n % lookup.block == 0 for n in (axis.extent, *sizes)):
            whole.add(axis)
    return frozenset(whole)


def tile_of(
    lookup: Lookup,
    arrays: Mapping[str, Array],
    indices: Sequence[Axis],
    windows: Mapping[Axis, DynamicSlice],
    *,
    by_blocks: bool,
) -> Array:
    """The tile of a looked-up tensor, one dimension for each axis of it, in their order.

    indices: the axes over which the tensor is read; `windows` is theirs. by_blocks: the tile has whole blocks only.
    """
    here = dict(zip(lookup.result.axes, indices, strict=True))
    window = {a: windows[b] for a, b in here.items()}
    source, table = (shaped(arrays[t.name], t.axes) for t in (lookup.source, lookup.table))
    block = lookup.block if by_blocks else 1
    entries = _entries(lookup, table, window, by_blocks=by_blocks)
    rows = in_range(entries, lookup.count) * jnp.int32(lookup.block)
    over = list(lookup.table.axes)  # the axis of each dimension of `rows`
    if lookup.along is not None:
        over[over.index(lookup.blocks)] = lookup.along  # type: ignore[arg-type]
        if not by_blocks:
            inside = lax.rem(_positions(window[lookup.along]), jnp.int32(lookup.block))
            rows = rows + _along(inside, over.index(lookup.along), len(over))
    found = _gathered(lookup, source, rows, over, block, window)
    if lookup.fill is None:
        return found
    inside = is_inside(entries, lookup.count)
    if block > 1:
        inside = jnp.repeat(inside, block, axis=over.index(lookup.along))  # type: ignore[arg-type]
    order = [over.index(a) for a in lookup.result.axes if a in over]
    missing = [d for d, a in enumerate(lookup.result.axes) if a not in over]
    inside = jnp.expand_dims(lax.transpose(inside, order), missing)
    return select(inside, found, jnp.asarray(lookup.fill.value, found.dtype))


def _positions(window: DynamicSlice) -> Array:
    return lax.iota(jnp.int32, window.size) + jnp.asarray(window.start, jnp.int32)


def _along(vector: Array, dim: int, rank: int) -> Array:
    return vector.reshape([-1 if d == dim else 1 for d in range(rank)])


def in_range(entries: Array, count: int) -> Array:
    """Entries as numbers of blocks: those beyond an end mean the first or the last one."""
    if np.iinfo(entries.dtype).max >= count - 1:
        entries = jnp.minimum(entries, jnp.asarray(count - 1, entries.dtype))
    return jnp.maximum(entries, jnp.zeros((), entries.dtype)).astype(jnp.int32)


def is_inside(entries: Array, count: int) -> Array:
    """Are entries numbers of blocks?"""
    inside = entries >= jnp.zeros((), entries.dtype)
    if np.iinfo(entries.dtype).max >= count:
        inside &= entries < jnp.asarray(count, entries.dtype)
    return inside


def _entries(lookup: Lookup, table: Array, window: Mapping[Axis, DynamicSlice], *, by_blocks: bool) -> Array:
    """The part of the table that a tile needs: an entry for each block, or for each row."""
    starts, sizes = [], []
    for axis in lookup.table.axes:
        if axis == lookup.blocks and lookup.along is not None:
            along = window[lookup.along]
            starts.append(lax.div(jnp.asarray(along.start, jnp.int32), jnp.int32(lookup.block)))
            sizes.append(along.size // lookup.block if by_blocks else axis.extent)
        else:
            starts.append(jnp.asarray(window[axis].start, jnp.int32))
            sizes.append(window[axis].size)
    if lookup.blocks is None or lookup.along is None or by_blocks:
        return lax.dynamic_slice(table, starts, sizes)
    at = lookup.table.axes.index(lookup.blocks)
    starts[at] = jnp.int32(0)
    part = lax.dynamic_slice(table, starts, sizes)
    place = lax.div(_positions(window[lookup.along]), jnp.int32(lookup.block))
    return jnp.take(part, place, axis=at, mode="clip")


def _gathered(
    lookup: Lookup, source: Array, rows: Array, over: Sequence[Axis], block: int, window: Mapping[Axis, DynamicSlice]
) -> Array:
    """`block` rows of the source from each of `rows` on, in the order of the result's axes; over: the axes of `rows`."""
    starts: list[Array] = []
    sizes: list[int] = []
    kept: list[int] = []
    collapsed: list[int] = []
    for dim, axis in enumerate(lookup.source.axes):
        if axis == lookup.rows:
            starts.append(rows)
            sizes.append(block)
            (collapsed if block == 1 else kept).append(dim)
        elif axis in over:
            at = over.index(axis)
            starts.append(_along(_positions(window[axis]), at, len(over)))
            sizes.append(1)
            collapsed.append(dim)
        else:
            starts.append(jnp.asarray(window[axis].start, jnp.int32))
            sizes.append(window[axis].size)
            kept.append(dim)
    offset_axes = [lookup.source.axes[d] for d in kept]  # of the dimensions of the result after those of `rows`
    indices = jnp.stack([jnp.broadcast_to(s, rows.shape) for s in starts], -1)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(len(over), len(over) + len(kept))),
        collapsed_slice_dims=tuple(collapsed),
        start_index_map=tuple(range(len(starts))),
    )
    found = lax.gather(source, indices, numbers, tuple(sizes), mode="clip")
    axes = [*over, *offset_axes]
    order: list[int] = []
    for axis in lookup.result.axes:
        order.append(axes.index(axis))
        if axis == lookup.along and block > 1:
            order.append(axes.index(lookup.rows))
    return lax.transpose(found, order).reshape([window[a].size for a in lookup.result.axes])
