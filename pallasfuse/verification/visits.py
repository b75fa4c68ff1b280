"""The bounds of loops at their actual extents: is every element that counts visited, and every mask that was dropped true?

Bounds are numbers, which a small instance cannot stand for. They depend on no data, so they are evaluated: for blocks of the grid
and positions of the rolled axis, all of them or those around the bounds and a sample of the rest.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import numpy as np

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.domain import FLOAT64, Array
from pallasfuse.ir.evaluate import evaluate_over
from pallasfuse.ir.expr import Apply, Expr, Index, Read, const, postorder, read, rebuild, substitute, with_args
from pallasfuse.ir.ranges import Range
from pallasfuse.ir.tile_program import Load, Loop, Segment, TileProgram, block_start, least, most

_MOST_BLOCKS = 48
_MOST_POSITIONS = 512
_MOST_DRAWS = 8


def wrong_visits(
    program: TileProgram, loop: Loop, predicates: Sequence[Expr], generator: np.random.Generator,
    sure: Sequence[Expr] | None = None,
) -> str | None:  # fmt: skip
    """A description of a position that the loop treats wrongly; None when there is none.

    `predicates`: an element of the loop counts only where all of them are true. `sure`: nothing is masked where all of these are;
    if None, where all of those. Of what bounds read, some values are tried.
    """
    sure = predicates if sure is None else sure
    for starts in _blocks(program, loop, generator):
        for data in _data(program, loop, predicates, generator):
            for unknown in (True, False):
                known = [[_known(p, data, unknown=unknown) for p in of] for of in (predicates, sure)]
                wrong = _wrong_in_block(program, loop, known[0], known[1], starts, data, generator)
                if wrong is not None:
                    where = ", ".join(f"{tensor} = {value}" for tensor, value in data.items())
                    return f"{wrong} (where {where})" if where else wrong
                if known == [[_known(p, data, unknown=not unknown) for p in of] for of in (predicates, sure)]:
                    break
    return None


def skips(program: TileProgram, loop: Loop, generator: np.random.Generator) -> bool:
    """Returns whether a loop, whose bounds read no data, leaves out positions of its axis in some block."""
    for starts in _blocks(program, loop, generator):
        runs = [(begin, end) for one in _parts(loop, starts) for _, begin, end in _runs(program, loop, one, {})]
        if _complement(runs, loop.axis.extent):
            return True
    return False


def _parts(loop: Loop, starts: dict[Axis, int]) -> list[dict[Axis, int]]:
    split = loop.split
    return [starts] if split is None else [{**starts, split.part: n} for n in range(split.part.extent)]


def _wrong_in_block(
    program: TileProgram, loop: Loop, predicates: Sequence[Expr], sure: Sequence[Expr], starts: dict[Axis, int],
    data: dict[str, int], generator: np.random.Generator,
) -> str | None:  # fmt: skip
    runs = [run for one in _parts(loop, starts) for run in _runs(program, loop, one, data)]
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
            wrong = _where(program, loop, starts, sure, inside, False)
            if wrong is not None:
                return f"{wrong} is masked, but the mask was dropped"
        if not segment.edge and end > loop.axis.extent:
            return f"positions up to {end} leave {loop.axis} of {loop.axis.extent}"
    return None


def _loads(program: TileProgram, loop: Loop) -> list[Load]:
    """Returns the loads whose values the bounds of a loop read."""
    names = _read_by_bounds(loop)
    return [s for s in program.body if isinstance(s, Load) and s.name in names]


def _read_by_bounds(loop: Loop) -> frozenset[str]:
    return frozenset().union(*(e.tensors for g in loop.segments for e in (g.start, g.stop)))


def ranges_of(program: TileProgram, loop: Loop) -> list[Range]:
    """The ranges that bound a loop."""
    names = _read_by_bounds(loop)
    return [r for r in program.ranges if not names.isdisjoint({most(r.left.name), most(r.right.name)})]


def _data(
    program: TileProgram, loop: Loop, predicates: Sequence[Expr], generator: np.random.Generator
) -> Iterator[dict[str, int]]:
    """Values of what bounds, and the predicates where there are such bounds, read of inputs: some near the ends of tiles and of the
    axis, and the extremes of the type."""
    ranges = ranges_of(program, loop)
    for data in _numbers(program, loop, predicates, generator):
        for _ in range(_MOST_DRAWS) if ranges else [None]:
            drawn = [_ends(r, program.tile(loop.axis), generator) for r in ranges]
            yield data | {name: end for ends in drawn for name, end in ends.items()}


def _ends(r: Range, tile: int, generator: np.random.Generator) -> dict[str, int]:
    """The ends of a range, in rows and in a block whose rows are alike: some intervals near the ends of tiles, and none.

    Something is hidden inside of some of them.
    """
    extent = r.axis.extent
    near = [0, 1, tile - 1, tile, tile + 1, extent - tile, extent - 1, extent]
    somewhere = generator.integers(0, extent + 1, 4).tolist()
    first, last = sorted(min(max(int(n), 0), extent) for n in generator.choice(near + somewhere, 2))
    left, right = (extent - first, last) if first < last else (0, 0)
    everything = r.all_if_none and not right
    solid = first < last and bool(generator.random() < 0.7)
    count = max(0, last - first) if solid else max(0, last - first - 1)
    block = {most(t.name): extent if everything else n for t, n in ((r.left, left), (r.right, right))}
    block |= {least(t.name): n if solid else 0 for t, n in ((r.left, left), (r.right, right))}
    return {r.left.name: left, r.right.name: right, r.count.name: count, **block}


def _numbers(
    program: TileProgram, loop: Loop, predicates: Sequence[Expr], generator: np.random.Generator
) -> Iterator[dict[str, int]]:
    types = {load.tensor: load.dtype for load in _loads(program, loop)}
    if not types:
        yield {}
        return
    reads = [n for n in postorder(*predicates) if isinstance(n, Read) and loop.axis not in n.indices]
    types |= {n.tensor: n.dtype for n in reads if dtypes.is_integer(n.dtype)}
    tile, extent = program.tile(loop.axis), loop.axis.extent
    some = [-1, 0, 1, tile - 1, tile, tile + 1, extent - 1, extent, extent + 1, extent + tile]
    some += [int(n) for t in types.values() for n in (np.iinfo(t).min, np.iinfo(t).max)]
    if len(types) == 1:
        yield from ({tensor: n} for tensor in types for n in dict.fromkeys(some))
    for _ in range(_MOST_DRAWS * len(types)):
        yield {
            tensor: int(generator.choice(some)) if generator.random() < 0.3 else int(generator.integers(0, extent + 1))
            for tensor in types
        }


def _known(predicate: Expr, data: dict[str, int], *, unknown: bool) -> Expr:
    """The predicate, with numbers for what it reads of inputs, and with `unknown` for conditions on what no bound can read."""

    def step(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if isinstance(node, Read) and node.tensor in data:
            return const(data[node.tensor], node.dtype)
        new = with_args(node, args)
        return const(unknown, "bool") if new.dtype == "bool" and _reads_directly(new) else new

    return rebuild(predicate, step)


def _reads_directly(node: Expr) -> bool:
    """A boolean that is read, or made of reads that are no booleans."""
    if isinstance(node, Read):
        return True
    return isinstance(node, Apply) and any(a.dtype != "bool" and a.tensors for a in node.args)


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


def _scalar(expr: Expr, starts: dict[Axis, int], loads: Sequence[Load], data: dict[str, int]) -> int:
    names = {block_start(a): np.asarray(s) for a, s in starts.items()}
    values = data | {load.name: data[load.tensor] for load in loads}
    reads: dict[Expr, Expr] = {
        n: const(values[n.tensor], n.dtype) for n in postorder(expr) if isinstance(n, Read) and n.tensor in values
    }
    return int(evaluate_over(substitute(expr, reads), (), names, FLOAT64).item())


def _runs(
    program: TileProgram, loop: Loop, starts: dict[Axis, int], data: dict[str, int]
) -> Iterator[tuple[Segment, int, int]]:
    """Yields (segment, first position, position after the last) of the segments that run."""
    every = {a: starts.get(a, 0) for a, _ in program.grid}
    loads = _loads(program, loop)
    for segment in loop.segments:
        first, last = (_scalar(e, every, loads, data) for e in (segment.start, segment.stop))
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
