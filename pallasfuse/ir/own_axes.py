"""Axes of their own: a program whose loops cut windows or tiles of one axis, written with an axis of its own for each of them.

Every axis then has one tile, as in a program without such loops: what counts elements need not ask where a statement stands. Such a
program is not run: its axes are the same positions under several names.
"""

from collections.abc import Mapping
from dataclasses import replace

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, rename_axes
from pallasfuse.ir.tile_program import (
    Buffer,
    Contract,
    Get,
    Let,
    Load,
    Loop,
    Reduce,
    Set,
    Statement,
    Store,
    TileProgram,
)


def with_own_axes(program: TileProgram) -> TileProgram:
    """The same statements, in which every loop in a window of its own axis, or in a tile of its own, runs over another one."""
    if not _shares_axes(program.body, dict(program.tiles), frozenset(a for a, _ in program.grid)):
        return program
    own = _OwnAxes(program)
    body = own.block(program.body, {}, frozenset(a for a, _ in program.grid))
    return replace(program, body=body, tiles=tuple(own.tiles.items()))


def _shares_axes(body: tuple[Statement, ...], tiles: Mapping[Axis, int], around: frozenset[Axis]) -> bool:
    """Is there a loop in a window of its own axis, or in a tile of its own?"""
    return any(
        loop.axis in around
        or _tile(loop) != tiles[loop.axis]
        or any(_shares_axes(g.body, tiles, around | {loop.axis}) for g in loop.segments)
        for loop in body
        if isinstance(loop, Loop)
    )


def _tile(loop: Loop) -> int:
    return max((g.tile for g in loop.segments), default=1)  # tails are smaller


class _OwnAxes:
    def __init__(self, program: TileProgram) -> None:
        self.tiles = dict(program.tiles)
        self.made = 0

    def block(
        self, body: tuple[Statement, ...], names: Mapping[Axis, Axis], around: frozenset[Axis]
    ) -> tuple[Statement, ...]:
        """The statements where axes have other names. around: the axes of which a window is open."""
        return tuple(self._loop(s, names, around) if isinstance(s, Loop) else _renamed(s, names) for s in body)

    def _loop(self, loop: Loop, names: Mapping[Axis, Axis], around: frozenset[Axis]) -> Loop:
        axis, inside = loop.axis, names
        tile = _tile(loop)
        if axis in around or tile != self.tiles[axis]:
            self.made += 1
            fresh = Axis(f"{axis.name}.{self.made}", axis.extent)
            self.tiles[fresh] = tile
            inside = {**names, axis: fresh}
        carries = tuple(replace(c, axes=_axes(c.axes, names), init=rename_axes(c.init, names)) for c in loop.carries)
        segments = tuple(replace(g, body=self.block(g.body, inside, around | {axis})) for g in loop.segments)
        return replace(loop, axis=inside.get(axis, axis), carries=carries, segments=segments)


def _axes(axes: tuple[Axis, ...], names: Mapping[Axis, Axis]) -> tuple[Axis, ...]:
    return tuple(names.get(a, a) for a in axes)


def _renamed(s: Statement, names: Mapping[Axis, Axis]) -> Statement:
    def new(expr: Expr) -> Expr:
        return rename_axes(expr, names)

    match s:
        case Load():
            return replace(s, indices=_axes(s.indices, names))
        case Store():
            return replace(s, indices=_axes(s.indices, names), value=new(s.value))
        case Reduce():
            return replace(s, axes=_axes(s.axes, names), over=_axes(s.over, names), value=new(s.value))
        case Contract():
            over = _axes(s.over, names)
            return replace(s, axes=_axes(s.axes, names), over=over, lhs=new(s.lhs), rhs=new(s.rhs))
        case Let() | Set():
            return replace(s, axes=_axes(s.axes, names), value=new(s.value))
        case Buffer() | Get():
            return replace(s, axes=_axes(s.axes, names))
        case Loop():
            raise AssertionError
