"""Splits of trees: the loop over a reduced axis in shares of the grid, whose partial states a second kernel merges (split-k)."""

import math
from collections.abc import Sequence
from dataclasses import replace

from pallasfuse.ir.region import Region
from pallasfuse.ir.tree import Do, Launch, Merge, RangeLoop, Tree, TreeKernel, walk
from pallasfuse.tiling.levels import grid_of, in_grid

_LEAST, _MERGED = 16, 64
"""The smallest and the largest tile along an axis of the kernel that merges."""


def split(region: Region, tree: TreeKernel, shares: int, processors: int = 1, warps: int = 0) -> Tree | None:
    """Returns a tree as two kernels, of which the first runs its outermost serial loop in so many shares.

    None where the block does something before that loop, or runs several loops over its axis. Whether the states of all reductions
    in it can be merged, `placement` says. processors: multiprocessors of the device; the kernel
    that merges has at most so many blocks, unless its tiles would be larger than 64. warps: of that kernel; 0: the default.
    """
    around, body = grid_of(tree.body)
    if not body or not isinstance(body[0], RangeLoop) or body[0].level != "serial":
        return None
    loop, after = body[0], body[1:]
    inside = [n.nest for _, n in walk((loop,)) if isinstance(n, Do)]
    own = frozenset(a for a in region.by_name[inside[0]].reduced if a.name == loop.axis)
    partial = [n for n in inside if own & frozenset(region.by_name[n].reduced)]
    if len(partial) < len(inside) or any(isinstance(n, RangeLoop) and n.axis == loop.axis for _, n in walk(after)):
        return None
    shared = RangeLoop(loop.axis, shares, (loop,), "grid", shares=True)
    merging = _merging(region, around, processors)
    return (
        replace(tree, name=f"{tree.name}_parts", body=in_grid(around, (shared,))),
        replace(tree, launch=Launch(warps=warps), body=in_grid(merging, (*map(Merge, partial), *after))),
    )


def most_shares(region: Region, tree: TreeKernel, processors: int) -> int:
    """Returns the most shares, a power of two, that make two blocks at most for each multiprocessor and have a trip each."""
    around, body = grid_of(tree.body)
    if not body or not isinstance(body[0], RangeLoop):
        return 1
    trips = -(-region.axes[body[0].axis].extent // body[0].size)
    most = min(trips, 2 * processors // _blocks(region, around))
    return 1 << max(0, most.bit_length() - 1)


def _blocks(region: Region, around: Sequence[RangeLoop]) -> int:
    """Returns how many blocks these loops of the grid make."""
    return math.prod(-(-region.axes[x.axis].extent // x.size) for x in around)


def _merging(region: Region, around: Sequence[RangeLoop], processors: int) -> list[RangeLoop]:
    """Returns the loops of the grid of the kernel that merges: it only reads states, in as many blocks as run at a time."""
    found = list(around)
    while True:
        n = max(range(len(found)), key=lambda n: min(found[n].size, region.axes[found[n].axis].extent), default=None)
        if n is None or found[n].size <= _LEAST:
            return found
        smaller = [*found]
        smaller[n] = replace(found[n], size=found[n].size // 2)
        if _blocks(region, smaller) > processors and found[n].size <= _MERGED:
            return found
        found = smaller
