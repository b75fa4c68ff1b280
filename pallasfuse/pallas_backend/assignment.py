"""Assigns the blocks of a grid to the instances of a persistent kernel."""

import heapq

import numpy as np

from pallasfuse.emission.pallas_kernel import block_starts
from pallasfuse.ir.tile_program import Loop, TileProgram, block_start
from pallasfuse.price.visited_tiles import trips

_MOST_BLOCKS = 1 << 18
"""More blocks than this are not listed: each instance then runs so many that it hardly matters which."""
_BLOCK_TRIPS = 0.5
"""The time to begin and to end a block, in trips of its loop, when the next one's operands are on their way: less than what
`Schedule.start_trips` counts for a block by itself."""


def assignment(program: TileProgram, loop: Loop, blocks: int, instances: int) -> np.ndarray | None:
    """Returns a table of the blocks that each instance runs; None where all blocks are alike.

    int32 [instances, 2 + most]: how many blocks an instance runs, and their numbers.

    List scheduling (Graham 1969): in the order of their numbers, blocks go to the instance that is free first, as the hardware
    does with blocks that it starts.
    """
    if not program.descending or blocks > _MOST_BLOCKS:
        return None
    known: dict[tuple[int, ...], int] = {}
    free = [(0.0, n) for n in range(instances)]
    given: list[list[int]] = [[] for _ in range(instances)]
    for number in range(blocks):
        starts = block_starts(program, number)
        key = tuple(starts[a] for a in program.descending)
        if key not in known:
            known[key] = trips(loop, {block_start(a): s for a, s in starts.items()})
        time, instance = heapq.heappop(free)
        given[instance].append(number)
        heapq.heappush(free, (time + known[key] + _BLOCK_TRIPS, instance))
    table = np.zeros((instances, 2 + max(map(len, given))), np.int32)
    for row, numbers in zip(table, given, strict=True):
        row[0] = len(numbers)
        row[1 : 1 + len(numbers)] = numbers
    return table
