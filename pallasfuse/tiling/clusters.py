"""Schedules for rows that stay in the shared memory of a cluster of blocks (`Target.cluster`), and when they are worth it."""

import math
from dataclasses import replace

from pallasfuse.ir import dtypes
from pallasfuse.ir.fold import Group
from pallasfuse.ir.schedule import Schedule
from pallasfuse.targets import Target, power_of_two
from pallasfuse.tiling.choose import REGISTER_ELEMENTS, examine, streams

_BLOCK_BYTES = 40 << 10
"""Of shared memory, what lets several blocks live on a multiprocessor: while some compute, others load and store."""
_TILE = 1 << 12
"""Elements of a tile: each thread has 32."""
_ROWS = 4
"""One warpgroup for each block."""


def impossible(group: Group) -> str | None:
    """Why no cluster has a kernel for a group."""
    shape = examine(group)
    if shape.has_products or group.inner or shape.inner_elements > 1:
        return "a block of a cluster has one row, and neither products nor other axes in it"
    return None


def slower(group: Group, target: Target) -> str | None:
    """Why another target's kernel is expected to be as fast: it reads as little."""
    if not any(group.rolled in n.axes for n in group.outputs) and group.passes == 1:
        return "its rows are read once in any case"
    if power_of_two(group.rolled.extent) <= REGISTER_ELEMENTS:
        return "one block holds a row in registers"
    rows = math.prod(a.extent for a in group.parallel)
    if rows * target.cluster < target.multiprocessors:
        return f"{rows} rows leave multiprocessors idle"
    return None


def row_bytes(group: Group) -> int:
    """What the tensors along the rolled axis take of shared memory."""
    read = {r.tensor: dtypes.itemsize_bytes(r.dtype) for r in streams(group)}
    free = list(read.values())
    size = sum(free)
    for output in (n for n in group.outputs if group.rolled in n.axes):
        item = dtypes.itemsize_bytes(output.dtype)
        if item in free:
            free.remove(item)  # it leaves by the buffer of a stream
        else:
            size += item
    return size * group.rolled.extent


def schedules(group: Group, target: Target) -> list[Schedule]:
    """The fewest blocks for each row of which several fit a multiprocessor; tiles share a block's part out evenly."""
    size, extent = row_bytes(group), group.rolled.extent
    blocks = 1
    while blocks < target.cluster and size > blocks * _BLOCK_BYTES:
        blocks *= 2
    grid = tuple((a, 1) for a in group.parallel)
    own = Schedule(grid, group.rolled, extent, warps=_ROWS, stages=1, parts=blocks)
    return [replace(own, rolled_tile=even_tile(extent, blocks, target))]


def even_tile(extent: int, blocks: int, target: Target) -> int:
    """The tile by which every block has as many, or one less."""
    part = -(-extent // blocks)
    tile = -(-part // -(-part // _TILE))
    return -(-tile // target.tile_multiple) * target.tile_multiple
