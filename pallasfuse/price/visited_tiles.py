"""How much of the rolled axis a kernel visits: its loop bounds evaluated for every grid block."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Read, postorder
from pallasfuse.ir.tile_program import Contract, Let, Loop, Reduce, Segment, TileProgram, block_start, every
from pallasfuse.price.ranges import hiding_nothing

_MAX_BLOCKS = 128
"""Blocks along one axis that are looked at; of more, an even sample."""

Integers = np.ndarray[Any, np.dtype[np.int64]]


def _truncated(a: Integers, b: Integers) -> Integers:
    return np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)))


_INTEGER: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "max": np.maximum, "min": np.minimum,
    "div": _truncated, "ge": np.greater_equal, "gt": np.greater, "le": np.less_equal, "lt": np.less, "select": np.where,
}  # fmt: skip


def _numbers(root: Expr, starts: Mapping[str, Integers]) -> Integers:
    """A loop bound in many blocks."""
    values: dict[Expr, Integers] = {}
    for node in postorder(root):
        match node:
            case Const(value):
                values[node] = np.int64(value)  # type: ignore[assignment]
            case Read(name):
                values[node] = starts[name]
            case Apply(op, args):
                values[node] = np.asarray(_INTEGER[op](*(values[a] for a in args)), np.int64)
            case _:
                raise InvalidProgramError(f"a loop bound reads a position: {root}")
    return values[root]


def _trips(segment: Segment, starts: Mapping[str, Integers]) -> Integers:
    return np.asarray(np.maximum(0, _numbers(segment.stop, starts) - _numbers(segment.start, starts)))


def trips(loop: Loop, starts: Mapping[str, int]) -> int:
    """Of a loop, in the grid block whose starts are given by name (`block_start`).

    Raises:
      KeyError: the loop's bounds read something else.
    """
    return sum(int(_trips(s, {n: np.asarray(x, np.int64) for n, x in starts.items()})) for s in loop.segments)


def tile_range(segment: Segment, starts: Mapping[Axis, int]) -> range | None:
    """The tiles of a segment where grid axes start at these positions; None where its bounds read something else."""
    known = {block_start(a): np.asarray(n, np.int64) for a, n in starts.items()}
    if not segment.start.tensors | segment.stop.tensors <= known.keys():
        return None
    return range(int(_numbers(segment.start, known)), int(_numbers(segment.stop, known)))


@dataclass(frozen=True, slots=True)
class IterationDomain:
    """The trips of a loop around another one: how many positions each has, and where they begin."""

    size: int
    starts: range


def domain_of(segment: Segment, loop: Loop) -> IterationDomain:
    """The trips of a segment; where no constants say which, and inside a window of the axis, all tiles of the axis."""
    tile = segment.tile
    match loop.origin, segment.start, segment.stop:
        case Const(origin), Const(start), Const(stop):
            first = int(origin) + segment.offset
            return IterationDomain(tile, range(first + int(start) * tile, first + int(stop) * tile, tile))
    return IterationDomain(tile, range(0, loop.axis.extent, tile))


def mean_and_most_trips(
    segment: Segment, loop: Loop, program: TileProgram, windows: Mapping[Axis, IterationDomain] | None = None
) -> tuple[float, float]:
    """The trips of a segment in an average block and in the longest; of a loop whose bounds the data decides, all of them.

    windows: those of the loops around it, in whose trips those of a loop inside are counted.
    """
    windows = windows or {}
    read = segment.start.tensors | segment.stop.tensors
    if not read <= {block_start(a) for a in (*dict(program.grid), *windows)}:
        shares = 1 if loop.split is None else loop.split.part.extent
        in_block = dict(program.grid).get(loop.axis, loop.axis.extent)
        window = windows[loop.axis].size if loop.axis in windows else in_block
        all_trips = -(-window // (segment.tile * shares))
        return (0.0, 0.0) if segment is not loop.segments[-1] else (float(all_trips), float(all_trips))
    trips = _trips(segment, _sampled_blocks(program, read, windows))
    return float(np.mean(trips)), float(np.max(trips))


def _sampled_blocks(
    program: TileProgram, read: frozenset[str], windows: Mapping[Axis, IterationDomain] | None = None
) -> dict[str, Integers]:
    """The starts that bounds read, in all blocks or an even sample of them, and in the trips of loops around."""
    ranges, names = [], []
    windows = windows or {}
    for axis, window in windows.items():
        if block_start(axis) in read:
            names.append(block_start(axis))
            ranges.append(list(window.starts[:: -(-len(window.starts) // _MAX_BLOCKS)]))
    for axis, tile in program.grid:
        if block_start(axis) in read and axis not in windows:
            names.append(block_start(axis))
            blocks = -(-axis.extent // tile)
            step = -(-blocks // _MAX_BLOCKS)
            ranges.append([min(n * tile, max(0, axis.extent - tile)) for n in range(0, blocks, step)])
    return dict(zip(names, np.meshgrid(*(np.asarray(r, np.int64) for r in ranges)), strict=True))


def visited_share(programs: Sequence[TileProgram]) -> float:
    """Tiles visited over all tiles, on average over the passes of all phases: 1.0 when nothing is skipped."""
    shares = visited_shares(programs)
    return sum(shares) / len(shares)


def visited_shares(programs: Sequence[TileProgram]) -> list[float]:
    """The share of the tiles that each pass visits."""
    loops = [(s, p) for p in map(hiding_nothing, programs) for s in p.body if isinstance(s, Loop) and s.carries]
    return [_visited_share(loop, program) for loop, program in loops] or [1.0]


def _visited_share(loop: Loop, program: TileProgram) -> float:
    read = frozenset().union(*(s.start.tensors | s.stop.tensors for s in loop.segments))
    if not read <= {block_start(a) for a, _ in program.grid}:
        return 1.0  # known at run time only
    blocks = _sampled_blocks(program, read)
    of_segments = [np.mean(_trips(s, blocks)) * s.tile for s in loop.segments]
    parts = 1 if loop.split is None else loop.split.part.extent
    window = dict(program.grid).get(loop.axis, loop.axis.extent)
    return min(1.0, parts * float(sum(of_segments)) / window)


def operations_per_score(program: TileProgram) -> int:
    """How many elementwise operations a trip with the fewest makes of a tile along the rolled axis and another one."""
    counts = [0]
    for loop in (s for s in program.body if isinstance(s, Loop)):
        counts = []
        for segment in loop.segments:
            values = [s.value for s in every(segment.body) if isinstance(s, Let | Reduce)]
            values += [s.lhs for s in every(segment.body) if isinstance(s, Contract)]
            wide = {n for n in postorder(*values) if isinstance(n, Apply) and loop.axis in n.axes}
            counts.append(sum(sum(program.tile(a) > 1 for a in n.axes) > 1 for n in wide))
    return min(counts, default=0)  # every trip may be masked away
