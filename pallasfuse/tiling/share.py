"""How much of the rolled axis a kernel visits: its loop bounds evaluated for every grid block."""

from itertools import product

import numpy as np

from pallasfuse.ir.evaluate import evaluate_expr
from pallasfuse.ir.expr import Expr
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tile_program import Loop, TileProgram, block_start

_MAX_BLOCKS = 4096


def _number(expr: Expr, starts: dict[str, int]) -> int:
    return int(evaluate_expr(expr, (), {k: np.asarray(v) for k, v in starts.items()}))


def visited_share(program: TileProgram, schedule: Schedule) -> float:
    """Tiles visited by the first loop that masks shape, over all tiles: 1.0 when nothing is skipped."""
    loops = [s for s in program.body if isinstance(s, Loop) and s.carries]
    if not loops:
        return 1.0
    loop = loops[0]
    read = frozenset().union(*(s.start.tensors | s.stop.tensors for s in loop.segments))
    ranges = []
    names = []
    for axis, tile in program.grid:
        if block_start(axis) in read:
            names.append(block_start(axis))
            count = -(-axis.extent // tile)
            step = max(1, count // _MAX_BLOCKS)
            ranges.append([min(n * tile, max(0, axis.extent - tile)) for n in range(0, count, step)])
    total, visited = 0, 0.0
    for starts in product(*ranges):
        bound = dict(zip(names, starts, strict=True))
        for segment in loop.segments:
            trips = max(0, _number(segment.stop, bound) - _number(segment.start, bound))
            visited += trips * segment.tile / schedule.rolled_tile
        total += 1
    return min(1.0, visited / (total * schedule.rolled.extent / schedule.rolled_tile))
