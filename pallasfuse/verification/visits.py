"""The bounds of loops at their actual extents: is every element that counts visited, and every mask that was dropped true?

Bounds are numbers, which a small instance cannot stand for. They depend on no data, so they are evaluated: for blocks of the grid
and positions of the rolled axis, all of them or those around the bounds and a sample of the rest.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import numpy as np

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.domain import FLOAT64, Array
from pallasfuse.ir.evaluate import evaluate_over
from pallasfuse.ir.expr import Expr, Index, postorder, read, substitute
from pallasfuse.ir.tile_program import Loop, Segment, TileProgram, block_start

_MOST_BLOCKS = 48
_MOST_POSITIONS = 512


def wrong_visits(
    program: TileProgram, loop: Loop, predicates: Sequence[Expr], generator: np.random.Generator
) -> str | None:
    """A description of a position that the loop treats wrongly; None when there is none.

    `predicates`: an element of the loop counts only where all of them are true.
    """
    for starts in _blocks(program, loop, generator):
        parts = (
            [starts] if loop.split is None else [{**starts, loop.split.part: n} for n in range(loop.split.part.extent)]
        )
        runs = [run for one in parts for run in _runs(program, loop, one)]
        problem = _contiguous(loop, starts, runs)
        if problem is not None:
            return problem
        visited = [(begin, end) for _, begin, end in runs]
        outside = _sample(_complement(visited, loop.axis.extent), program.tile(loop.axis), generator)
        wrong = _where(program, loop, starts, predicates, outside, True)
        if wrong is not None:
            return f"{wrong} counts, but is not visited"
        for segment, begin, end in runs:
            if segment.label == "unmasked":
                inside = _sample([(begin, end)], segment.tile, generator)
                wrong = _where(program, loop, starts, predicates, inside, False)
                if wrong is not None:
                    return f"{wrong} is masked, but the mask was dropped"
            if not segment.edge and end > loop.axis.extent:
                return f"positions up to {end} leave {loop.axis} of {loop.axis.extent}"
    return None


def _blocks(program: TileProgram, loop: Loop, generator: np.random.Generator) -> Iterator[dict[Axis, int]]:
    """First positions of grid blocks along the axes that the bounds depend on: all, or the first, the last and a sample."""
    read_starts = frozenset().union(*(e.tensors for g in loop.segments for e in (g.start, g.stop)))
    part = None if loop.split is None else loop.split.part
    axes = [(a, t) for a, t in program.grid if block_start(a) in read_starts and a != part]
    choices = []
    for axis, tile in axes:
        blocks = -(-axis.extent // tile)
        if blocks > _MOST_BLOCKS:
            some = {*range(8), *range(blocks - 8, blocks), *generator.integers(0, blocks, _MOST_BLOCKS - 16).tolist()}
        else:
            some = set(range(blocks))
        # the last block may be moved back to fit
        choices.append(sorted({min(b * tile, s) for b in some for s in (b * tile, max(0, axis.extent - tile))}))
    for starts in product(*choices):
        yield {a: s for (a, _), s in zip(axes, starts, strict=True)}


def _scalar(expr: Expr, starts: dict[Axis, int]) -> int:
    names = {block_start(a): np.asarray(s) for a, s in starts.items()}
    return int(evaluate_over(expr, (), names, FLOAT64).item())


def _runs(program: TileProgram, loop: Loop, starts: dict[Axis, int]) -> Iterator[tuple[Segment, int, int]]:
    """(segment, first position, position after the last) of the segments that run."""
    every = {a: starts.get(a, 0) for a, _ in program.grid}
    for segment in loop.segments:
        first, last = _scalar(segment.start, every), _scalar(segment.stop, every)
        if last > first:
            yield segment, segment.offset + first * segment.tile, segment.offset + last * segment.tile


def _contiguous(loop: Loop, starts: dict[Axis, int], runs: list[tuple[Segment, int, int]]) -> str | None:
    for (_, _, end), (_, begin, _) in pairwise(runs):
        if begin != end:
            return (
                f"at {_show(starts)} positions {end} to {begin} of {loop.axis} are skipped or repeated between segments"
            )
    return None


def _complement(visited: list[tuple[int, int]], extent: int) -> list[tuple[int, int]]:
    if not visited:
        return [(0, extent)]
    gaps = [(0, visited[0][0]), (visited[-1][1], extent)]
    return [(a, b) for a, b in gaps if a < b]


def _sample(intervals: list[tuple[int, int]], tile: int, generator: np.random.Generator) -> Array:
    """Positions of the intervals: all, or those near their ends and some between."""
    found = []
    for begin, end in intervals:
        if end - begin <= _MOST_POSITIONS:
            found.append(np.arange(begin, end))
        else:
            near = min(tile, _MOST_POSITIONS // 4)
            found += [
                np.arange(begin, begin + near),
                np.arange(end - near, end),
                generator.integers(begin, end, _MOST_POSITIONS // 2),
            ]
    return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)


def _where(
    program: TileProgram,
    loop: Loop,
    starts: dict[Axis, int],
    predicates: Sequence[Expr],
    positions: Array,
    wanted: bool,
) -> str | None:
    """A place among `positions` of the rolled axis, and in the rows of the block, where all predicates hold (or not)."""
    if not positions.size:
        return None
    grid = dict(program.grid)
    axes = [loop.axis, *sorted(frozenset().union(*(p.axes for p in predicates)) - {loop.axis})]
    along = [positions if a == loop.axis else _rows(a, starts.get(a), grid.get(a)) for a in axes]
    short = [Axis(a.name, len(x)) for a, x in zip(axes, along, strict=True)]
    values = {f"at.{a}": x for a, x in zip(axes, along, strict=True)}
    holds = np.ones([a.extent for a in short], bool)
    for predicate in predicates:
        reads: dict[Expr, Expr] = {
            n: read(f"at.{n.axis}", (short[axes.index(n.axis)],), n.dtype)
            for n in postorder(predicate) if isinstance(n, Index)
        }  # fmt: skip
        holds = holds & evaluate_over(substitute(predicate, reads), tuple(short), values, FLOAT64)
    at = np.argwhere(holds == wanted)
    if not len(at):
        return None
    return _show({a: int(x[n]) for a, x, n in zip(axes, along, at[0], strict=True)})


def _rows(axis: Axis, start: int | None, tile: int | None) -> Array:
    if tile is None:
        return np.arange(axis.extent) if axis.extent <= _MOST_POSITIONS else np.arange(_MOST_POSITIONS)
    if start is None:  # the bounds do not depend on it: they must be right for every block
        ends = np.concatenate([np.arange(min(32, axis.extent)), np.arange(max(0, axis.extent - 32), axis.extent)])
        return np.unique(ends)
    return np.arange(start, min(start + tile, axis.extent))


def is_constant(predicate: Expr, generator: np.random.Generator) -> bool:
    """Is a predicate over positions true everywhere, or false everywhere? Of long axes, the ends and a sample are looked at."""
    axes = sorted(predicate.axes)
    along = [_few(a, generator) for a in axes]
    short = tuple(Axis(a.name, len(x)) for a, x in zip(axes, along, strict=True))
    values = {f"at.{a}": x for a, x in zip(axes, along, strict=True)}
    reads: dict[Expr, Expr] = {
        n: read(f"at.{n.axis}", (short[axes.index(n.axis)],), n.dtype)
        for n in postorder(predicate)
        if isinstance(n, Index)
    }
    holds = evaluate_over(substitute(predicate, reads), short, values, FLOAT64)
    return bool(holds.all() or not holds.any())


def _few(axis: Axis, generator: np.random.Generator) -> Array:
    if axis.extent <= 64:
        return np.arange(axis.extent)
    ends = [np.arange(16), np.arange(axis.extent - 16, axis.extent), generator.integers(0, axis.extent, 32)]
    return np.unique(np.concatenate(ends))


def _show(at: dict[Axis, int]) -> str:
    return ", ".join(f"{a} = {n}" for a, n in at.items()) or "every block"
