"""How much of the rolled axis a kernel visits: its loop bounds evaluated for every grid block."""

import operator
from collections.abc import Callable, Mapping
from itertools import product

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.expr import Apply, Const, Expr, Read, postorder
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tile_program import Contract, Let, Loop, Reduce, TileProgram, block_start

_MAX_BLOCKS = 128
"""Blocks along one axis that are looked at; of more, an even sample."""

_INTEGER: dict[str, Callable[..., int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg, "max": max, "min": min,
    "div": lambda a, b: int(a / b), "ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt,
    "select": lambda p, a, b: a if p else b,
}  # fmt: skip


def _number(root: Expr, starts: Mapping[str, int]) -> int:
    """A loop bound, in Python's integers."""
    values: dict[Expr, int] = {}
    for node in postorder(root):
        match node:
            case Const(value):
                values[node] = int(value)
            case Read(name):
                values[node] = starts[name]
            case Apply(op, args):
                values[node] = _INTEGER[op](*(values[a] for a in args))
            case _:
                raise InvalidProgramError(f"a loop bound reads a position: {root}")
    return values[root]


def trips(loop: Loop, starts: Mapping[str, int]) -> int:
    """Of a loop, in the grid block whose starts are given by name (`block_start`).

    Raises:
      KeyError: the loop's bounds read something else.
    """
    return sum(max(0, _number(s.stop, starts) - _number(s.start, starts)) for s in loop.segments)


def visited_share(program: TileProgram, schedule: Schedule) -> float:
    """Tiles visited over all tiles, on average over the passes: 1.0 when nothing is skipped."""
    shares = visited_shares(program, schedule)
    return sum(shares) / len(shares)


def visited_shares(program: TileProgram, schedule: Schedule) -> list[float]:
    """The share of the tiles that each pass visits."""
    loops = [s for s in program.body if isinstance(s, Loop) and s.carries]
    return [_visited_share(loop, program, schedule) for loop in loops] or [1.0]


def _visited_share(loop: Loop, program: TileProgram, schedule: Schedule) -> float:
    read = frozenset().union(*(s.start.tensors | s.stop.tensors for s in loop.segments))
    ranges = []
    names = []
    for axis, tile in program.grid:
        if block_start(axis) in read:
            names.append(block_start(axis))
            count = -(-axis.extent // tile)
            step = -(-count // _MAX_BLOCKS)
            ranges.append([min(n * tile, max(0, axis.extent - tile)) for n in range(0, count, step)])
    total, visited = 0, 0.0
    for starts in product(*ranges):
        bound = dict(zip(names, starts, strict=True))
        for segment in loop.segments:
            trips = max(0, _number(segment.stop, bound) - _number(segment.start, bound))
            visited += trips * segment.tile / schedule.rolled_tile
        total += 1
    return min(1.0, visited / (total * schedule.rolled.extent / schedule.rolled_tile))


def operations_per_score(program: TileProgram) -> int:
    """How many elementwise operations a trip without masks makes of a tile along the rolled axis and another one."""
    loop = next((s for s in program.body if isinstance(s, Loop)), None)
    if loop is None:
        return 0
    body = loop.segments[0].body
    values = [s.value for s in body if isinstance(s, Let | Reduce)] + [s.lhs for s in body if isinstance(s, Contract)]
    wide = {n for n in postorder(*values) if isinstance(n, Apply) and loop.axis in n.axes}
    return sum(sum(program.tile(a) > 1 for a in n.axes) > 1 for n in wide)
