"""Loops in shares of the grid: how many are useful, and the blocks of the kernel that merges them."""

import math

import pytest

from pallasfuse.ir.tree import Do, Merge, RangeLoop, TreeKernel, walk
from pallasfuse.schedule.splits import most_shares, split
from pallasfuse.tiling.levels import grid_of
from tests.schedule.regions import chain

PROCESSORS = 132


def product(rows, columns, summed, tile):
    """The first product of a chain, with tiles of 16 x 128 results, and its tree."""
    region = chain(rows, columns, summed, 64)
    nest = next(n for n in region.nests if n.is_reduction)
    (over,) = nest.reduced
    left, right = nest.axes[-2:]
    loops = RangeLoop(over.name, tile, (Do(nest.name),), "serial")
    body = RangeLoop(left.name, 16, (RangeLoop(right.name, 128, (loops,), "grid"),), "grid")
    return region, TreeKernel("kernel", (body,))


def blocks(region, kernel):
    loops, _ = grid_of(kernel.body)
    return math.prod(-(-region.axes[x.axis].extent // x.size) for x in loops if not x.shares)


@pytest.mark.parametrize(
    "rows, columns, summed, tile, shares",
    [
        (16, 4096, 4096, 128, 8),  # 32 blocks: 8 shares make 256 of them, two for each multiprocessor
        (16, 128, 4096, 512, 8),  # one block: a trip for each share
        (16, 128, 4096, 1024, 4),
        (256, 4096, 4096, 128, 1),  # there are enough blocks
        (16, 128, 128, 128, 1),  # there is one trip
    ],
)
def test_shares_fill_the_device_twice_and_have_a_trip_each(rows, columns, summed, tile, shares):
    region, tree = product(rows, columns, summed, tile)
    assert most_shares(region, tree, PROCESSORS) == shares


@pytest.mark.parametrize("rows, columns", [(16, 4096), (16, 8192), (16, 128), (64, 512)])
def test_what_merges_has_as_many_blocks_as_run_at_a_time(rows, columns):
    region, tree = product(rows, columns, 4096, 128)
    parts, merged = split(region, tree, 4, PROCESSORS)
    assert any(isinstance(n, Merge) for _, n in walk(merged.body))
    loops, _ = grid_of(merged.body)
    assert all(16 <= min(x.size, region.axes[x.axis].extent) <= 64 for x in loops)
    fewest = [x for x in loops if x.size > 16]
    assert blocks(region, merged) <= PROCESSORS or all(x.size == 64 or x.size <= 16 for x in loops)
    assert not fewest or 2 * blocks(region, merged) > PROCESSORS, "half as large tiles would be as many blocks at most"
    assert blocks(region, parts) == blocks(region, tree)
