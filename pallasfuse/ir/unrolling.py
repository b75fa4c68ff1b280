"""Short axes of a tile program written out: a value along three coordinates becomes three values.

A tile with a dimension of three elements is padded to four, what is reduced along it is exchanged between threads, and every
result is held by all of them. Written out there is no such dimension: coordinates, channels and quantiles are values in
registers.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import assert_never

from pallasfuse.first_time import Recent
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Expr, Index, Read, add, apply, const, convert, mul, read, rebuild, with_args
from pallasfuse.ir.late_folds import fold_late
from pallasfuse.ir.statements import (
    Buffer,
    Carry,
    Contract,
    Get,
    Let,
    Load,
    Loop,
    Reduce,
    Segment,
    Set,
    Statement,
    Store,
    every,
)  # fmt: skip
from pallasfuse.ir.tile_program import TileProgram

LONGEST, MOST_COPIES = 4, 16
"""Positions of an axis that may be written out, and copies of a statement along several."""


@dataclass(frozen=True, slots=True)
class Unrolled:
    """A program without some axes, and the position that each of the axes in their place stays at."""

    program: TileProgram
    positions: Mapping[Axis, int]


def unrollable(program: TileProgram) -> tuple[Axis, ...]:
    """Returns the axes that are better written out: short ones, whole in every block, that are reduced or that matrices lie along.

    Not those along which a buffer lies, or one operand of a product has elements of its own; nor those that matrix units sum up.
    """
    held = {a for a, _ in program.grid}
    reduced: set[Axis] = set()
    for s in every(program.body):
        match s:
            case Loop(axis):
                held.add(axis)
            case Buffer(_, axes):
                held |= set(axes)
            case Let(renamed=pairs):
                held |= {a for pair in pairs for a in pair}
            case Reduce():
                reduced |= set(s.over)
            case Contract():
                over = frozenset(s.over)
                held |= (s.lhs.axes ^ s.rhs.axes) - over
                if dtypes.itemsize_bytes(s.lhs.dtype) == 2 and s.lhs.axes - s.rhs.axes and s.rhs.axes - s.lhs.axes:
                    held |= over
                reduced |= over | (s.lhs.axes & s.rhs.axes)
            case _:
                pass
    found: list[Axis] = []
    for axis, tile in program.tiles:
        short = 1 < axis.extent <= LONGEST and tile >= axis.extent
        if short and axis in reduced - held and volume((*found, axis)) <= MOST_COPIES:
            found.append(axis)
    return tuple(found)


def switched(program: TileProgram) -> Unrolled:
    """Returns the program with its short axes written out and its late folds, as its switches say."""
    return _switched(program)


def _as_switches_say(program: TileProgram) -> Unrolled:
    own = unroll(program, program.unrolled)
    return replace(own, program=fold_late(own.program)) if program.late else own


_switched = Recent(_as_switches_say)


def unroll(program: TileProgram, axes: Collection[Axis]) -> Unrolled:
    """Returns the program with every statement along one of the axes once for each position."""
    positions: dict[Axis, int] = {}
    for axis in axes:
        places = [Axis(f"{axis.name}@{n}", axis.extent) for n in range(axis.extent)]
        tiles: list[tuple[Axis, int]] = []
        for a, t in program.tiles:
            tiles += [(p, 1) for p in places] if a == axis else [(a, t)]
        body = _Writer(axis, places).written(program.body)
        program = replace(program, tiles=tuple(tiles), body=tuple(body))
        positions |= {p: n for n, p in enumerate(places)}
    return Unrolled(program, positions)


class _Writer:
    """Writes statements out along one axis."""

    def __init__(self, axis: Axis, places: list[Axis]) -> None:
        self.axis, self.places = axis, places
        self.copied: set[str] = set()
        """Names of values along the axis."""

    def written(self, body: Iterable[Statement]) -> list[Statement]:
        return [new for s in body for new in self.statement(s)]

    def statement(self, s: Statement) -> list[Statement]:
        match s:
            case Load(name, _, indices) if self.axis in indices:
                return self.copies(name, lambda n: replace(s, name=self.name(name, n), indices=self.axes(indices, n)))
            case Let(name, axes, value) if self.axis in axes:
                return self.copies(
                    name,
                    lambda n: replace(s, name=self.name(name, n), axes=self.axes(axes, n), value=self.at(value, n)),
                )
            case Reduce(name, axes, _, value) if self.axis in axes:
                return self.copies(
                    name,
                    lambda n: replace(s, name=self.name(name, n), axes=self.axes(axes, n), value=self.at(value, n)),
                )
            case Reduce(name, axes, reducer, value, over) if self.axis in over:
                rest = tuple(a for a in over if a != self.axis)
                values = [self.at(value, n) for n in range(len(self.places))]
                whole = reduce(lambda x, y: apply(reducer.combine, x, y, dtype=value.dtype), values)
                return [replace(s, value=whole, over=rest) if rest else Let(name, axes, whole, pinned=True)]
            case Contract(name, axes, lhs, rhs) if self.axis in axes:
                return self.copies(name, lambda n: replace(
                    s, name=self.name(name, n), axes=self.axes(axes, n), lhs=self.at(lhs, n), rhs=self.at(rhs, n)
                ))  # fmt: skip
            case Contract(_, _, _, _, over) if self.axis in over:
                return self.added(s)
            case Store(_, indices, value) if self.axis in indices:
                places = range(len(self.places))
                return [replace(s, indices=self.axes(indices, n), value=self.at(value, n)) for n in places]
            case Loop():
                return [self.loop(s)]
            case Load() | Let() | Reduce() | Contract() | Store() | Buffer() | Get() | Set():
                return [s]
            case _:
                assert_never(s)

    def copies(self, name: str, one: Callable[[int], Statement]) -> list[Statement]:
        self.copied.add(name)
        return [one(n) for n in range(len(self.places))]

    def added(self, s: Contract) -> list[Statement]:
        """A product for every position, and their sum: one value, as that of the product was (`Let.pinned`)."""
        rest = tuple(a for a in s.over if a != self.axis)
        sides = [(self.at(s.lhs, n), self.at(s.rhs, n)) for n in range(len(self.places))]
        if not rest:
            terms: list[Expr] = [mul(convert(lhs, s.dtype), convert(rhs, s.dtype)) for lhs, rhs in sides]
            return [Let(s.name, s.axes, reduce(add, terms), pinned=True)]
        parts: list[Statement] = [
            replace(s, name=self.name(s.name, n), lhs=lhs, rhs=rhs, over=rest) for n, (lhs, rhs) in enumerate(sides)
        ]
        reads: list[Expr] = [read(self.name(s.name, n), s.axes, s.dtype) for n in range(len(sides))]
        return [*parts, Let(s.name, s.axes, reduce(add, reads), pinned=True)]

    def loop(self, loop: Loop) -> Loop:
        carries: list[Carry] = []
        for c in loop.carries:
            if self.axis not in c.axes:
                carries.append(c)
                continue
            self.copied |= {c.name, c.next_name}
            carries += [
                replace(c, name=self.name(c.name, n), axes=self.axes(c.axes, n), init=self.at(c.init, n),
                        next_name=self.name(c.next_name, n))
                for n in range(len(self.places))
            ]  # fmt: skip
        segments = tuple(self.segment(g) for g in loop.segments)
        return replace(loop, carries=tuple(carries), segments=segments)

    def segment(self, segment: Segment) -> Segment:
        return replace(segment, body=tuple(self.written(segment.body)))

    def name(self, name: str, n: int) -> str:
        return f"{name}@{n}"

    def axes(self, axes: tuple[Axis, ...], n: int) -> tuple[Axis, ...]:
        return tuple(self.places[n] if a == self.axis else a for a in axes)

    def at(self, root: Expr, n: int) -> Expr:
        """An expression at one position of the axis."""

        def replaced(node: Expr, args: tuple[Expr, ...]) -> Expr:
            match node:
                case Index(axis, dtype) if axis == self.axis:
                    return const(n, dtype)
                case Read(tensor, indices, dtype) if tensor in self.copied:
                    return read(self.name(tensor, n), self.axes(indices, n), dtype)
                case _:
                    return with_args(node, args)

        return rebuild(root, replaced)
