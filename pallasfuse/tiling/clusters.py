"""Schedules for rows that stay in the shared memory of a cluster of blocks (`Target.cluster`), and when they are worth it."""

import math

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.schedule import Schedule
from pallasfuse.targets import Target, power_of_two
from pallasfuse.tiling.choose import REGISTER_ELEMENTS, examine, streams

_BLOCK_BYTES = 72 << 10
"""Of shared memory, so that three blocks live on a multiprocessor: while one computes, others load and store."""
_TILE = 1 << 13
"""Elements of a tile: each thread has 64."""
_LEAST_TILE = 1 << 11
_WARPS = 4
"""One warpgroup for each block."""


def impossible(group: Group) -> str | None:
    """Why no cluster has a kernel for a group."""
    shape = examine(group)
    if shape.has_products or group.inner or shape.inner_elements > 1:
        return "a block of a cluster has one row, and neither products nor other axes in it"
    return None


def slower(group: Group, target: Target) -> str | None:
    """Why another target's kernel is expected to be as fast."""
    if not any(group.rolled in n.axes for n in group.outputs) and group.passes == 1:
        return "its rows are read once in any case"
    if power_of_two(group.rolled.extent) <= REGISTER_ELEMENTS:
        return "one block holds a row in registers"
    rows = math.prod(a.extent for a in group.parallel)
    if rows * _blocks(group, target) < target.multiprocessors:
        return f"{rows} rows leave multiprocessors idle"
    return None


def _loops(group: Group) -> list[list[Nest]]:
    """The nests of every loop along the rolled axis."""
    folds = [[f.nest for f in group.folds if f.pass_index == n] for n in range(group.passes)]
    return [*folds, [n for n in group.outputs if group.rolled in n.axes]]


def _row_bytes(group: Group) -> int:
    """What a row takes of shared memory: not what all rows have and one loop reads."""
    reads = [{n for nest in nests for n in postorder(nest.body) if isinstance(n, Read)} for nests in _loops(group)]
    kept: dict[str, str] = {}
    for r in streams(group):
        if r.indices != (group.rolled,) or sum(r in found for found in reads) > 1:
            kept[r.tensor] = r.dtype
    free, types = list(kept.values()), list(kept.values())
    for output in (n for n in group.outputs if group.rolled in n.axes):
        if output.dtype in free:
            free.remove(output.dtype)  # it leaves by the buffer of a stream
        else:
            types.append(output.dtype)
    return sum(map(dtypes.itemsize_bytes, types)) * group.rolled.extent


def _blocks(group: Group, target: Target) -> int:
    """The fewest blocks for a row of which several fit a multiprocessor."""
    blocks = 1
    while blocks < target.cluster and _row_bytes(group) > blocks * _BLOCK_BYTES:
        blocks *= 2
    return blocks


def schedules(group: Group, target: Target) -> list[Schedule]:
    """Clusters of every size, whose tiles share out the part of a block evenly. Those that can hold a row are compared by price.

    First comes the one with as few blocks as possible of which several fit a multiprocessor, and large tiles.
    """
    extent, few = group.rolled.extent, _blocks(group, target)
    grid = tuple((a, 1) for a in group.parallel)
    sizes = [few, *(n for n in _powers_of_two(1, target.cluster) if n != few)]
    most = _powers_of_two(_LEAST_TILE, _TILE)[::-1]
    found = dict.fromkeys((blocks, even_tile(extent, blocks, target, m)) for blocks in sizes for m in most)
    return [Schedule(grid, group.rolled, tile, warps=_WARPS, stages=1, parts=blocks) for blocks, tile in found]


def _powers_of_two(first: int, last: int) -> list[int]:
    return [first << n for n in range((last // first).bit_length())]


def even_tile(extent: int, blocks: int, target: Target, most: int = _TILE) -> int:
    """The tile by which every block has as many, or one less. most: elements that a tile may have, about."""
    part = -(-extent // blocks)
    tile = -(-part // -(-part // most))
    return -(-tile // target.tile_multiple) * target.tile_multiple
