"""Folds that a loop leaves to its end: lane by lane while it runs, and the lanes together once.

A loop that adds the sum of each trip's tile to what it carries exchanges values between threads in every trip. It may as well add
the tiles to each other, element by element, and sum up one tile in the end: only the order of the additions differs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import apply, read
from pallasfuse.ir.late_extremes import folded_with, in_lanes, with_lanes_of_extremes
from pallasfuse.ir.reducers import MAX, MIN, SUM
from pallasfuse.ir.statements import Carry, Let, Loop, Reduce, Segment, Statement, every, reads_of
from pallasfuse.ir.tile_program import TileProgram

MOST_REGISTERS, MOST_OF_ONE = 64, 16
"""Elements that a thread may hold of the tiles of a loop's late folds, and of one of them."""
_THREADS = 32
"""A warp has so many threads."""


def fold_late(program: TileProgram) -> TileProgram:
    """Returns the program with the folds of its loops that can be left to the loops' ends, for its block of threads."""
    threads = _THREADS * program.warps
    body = _written(program.body, dict(program.tiles), threads)
    return program if body is program.body else replace(program, body=body)


def _written(body: tuple[Statement, ...], tiles: Mapping[Axis, int], threads: int) -> tuple[Statement, ...]:
    """The statements with late folds; where there are none, the same object: who looks at a program remembers it."""
    found: list[Statement] = []
    for s in body:
        if not isinstance(s, Loop):
            found.append(s)
            continue
        bodies = [_written(g.body, {**tiles, s.axis: g.tile}, threads) for g in s.segments]
        inner = s
        if any(new is not g.body for new, g in zip(bodies, s.segments, strict=True)):
            segments = (replace(g, body=new) for new, g in zip(bodies, s.segments, strict=True))
            inner = replace(s, segments=tuple(segments))
        found += _late(inner, tiles, threads)
    same = len(found) == len(body) and all(new is s for new, s in zip(found, body, strict=True))
    return body if same else tuple(found)


@dataclass(frozen=True, slots=True)
class _Fold:
    """A carried value, and in each segment the reduction that it is folded with."""

    carry: Carry
    parts: tuple[Reduce, ...]
    lanes: tuple[Axis, ...]
    """The axes of the tile that a trip folds, in canonical order."""


def _late(loop: Loop, tiles: Mapping[Axis, int], threads: int) -> list[Statement]:
    """The loop with its late folds, and what sums them up after it."""
    if any(g.tile != tiles[loop.axis] for g in loop.segments):
        return [loop]  # a tile of its window is another one than those of its trips
    loop, compared, taken = with_lanes_of_extremes(loop, tiles, MOST_REGISTERS * threads, MOST_OF_ONE * threads)
    left = MOST_REGISTERS * threads - taken
    folds: list[_Fold] = []
    for fold in filter(None, (_fold(loop, c, [*tiles]) for c in loop.carries)):
        elements = math.prod(tiles[a] for a in fold.lanes)
        if elements <= min(left, MOST_OF_ONE * threads):
            left -= elements
            folds.append(fold)
    for fold in folds:
        loop = _with_lanes(loop, fold)
    return [loop, *compared, *(_summed(f) for f in folds)]


def _fold(loop: Loop, carry: Carry, order: list[Axis]) -> _Fold | None:
    parts = [_part(g, loop, carry) for g in loop.segments]
    found = [p for p in parts if p is not None]
    if not found or len(found) < len(parts) or len({(p.reducer.name, p.over) for p in found}) != 1:
        return None
    return _Fold(carry, tuple(found), tuple(sorted((*carry.axes, *found[0].over), key=order.index)))


def _part(segment: Segment, loop: Loop, carry: Carry) -> Reduce | None:
    """The reduction of a trip that is all that a carried value is folded with, if nothing else reads one of them."""
    by_name = {s.name: s for s in segment.body if isinstance(s, Let | Reduce)}
    part = folded_with(carry, read(carry.name, carry.axes, carry.dtype), by_name)
    if part is None or part.reducer not in (SUM, MAX, MIN) or loop.axis not in part.over:
        return None
    following = by_name[carry.next_name]
    private = {carry.name, part.name, carry.next_name}
    others = (s for s in every(segment.body) if s is not part and s is not following)
    yielded = {c.next_name for c in loop.carries if c is not carry}
    return None if yielded & private or any(reads_of(s) & private for s in others) else part


def _with_lanes(loop: Loop, fold: _Fold) -> Loop:
    """The loop that carries the lanes of a fold."""
    own, lanes = fold.carry, fold.lanes
    carried = replace(own, name=in_lanes(own.name), axes=lanes, next_name=in_lanes(own.next_name))
    segments = []
    for segment, part in zip(loop.segments, fold.parts, strict=True):
        value = apply(part.reducer.combine, read(carried.name, lanes, own.dtype), part.value, dtype=own.dtype)
        following = Let(carried.next_name, lanes, value)
        body = [following if s is part else s for s in segment.body]
        body = [s for s in body if not (isinstance(s, Let) and s.name == own.next_name)]
        segments.append(replace(segment, body=tuple(body)))
    carries = tuple(carried if c is own else c for c in loop.carries)
    return replace(loop, carries=carries, segments=tuple(segments))


def _summed(fold: _Fold) -> Reduce:
    first, own = fold.parts[0], fold.carry
    return Reduce(own.name, own.axes, first.reducer, read(in_lanes(own.name), fold.lanes, own.dtype), first.over)
