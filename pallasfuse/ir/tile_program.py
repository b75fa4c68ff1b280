"""`TileProgram`: a kernel as statements over tiles with named axes (Blockbuster's listings, Neptune figure 14).

A tile value has a set of axes and no layout: elementwise expressions align by axis name. Every axis has a *window*: `tile`
positions of it, from the first one of the grid block; in a trip of a loop, those of the segment's `tile`. Loops nest, over other
axes or over the same one, in pieces of the window around them. Scalar expressions are the IR's own: a `Read` names an earlier
statement's value, `Index(axis)` is the global position of each row of the tile.

Invariants, checked by `verify`: every read names a value that is in scope, made in the windows in which it is read; loops carry and
yield the same names, and stay inside the windows that they cut; buffers are read by `Get` only, in windows that they hold.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, Read
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.lookup import verify as verify_lookup
from pallasfuse.ir.ranges import Range
from pallasfuse.ir.statements import (
    ZERO,
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
    Split,
    Statement,
    Store,
    before,
    block_start,
    every,
    expressions,
    in_windows,
    least,
    most,
    not_flat,
    sets,
    tile_name,
    to_visit,
    visited,
)
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.windows import Window, at_block, in_trip, misfit, moved, of_axes

__all__ = [
    "Buffer",
    "Carry",
    "Contract",
    "Get",
    "Instead",
    "Let",
    "Load",
    "Loop",
    "Range",
    "Reduce",
    "Segment",
    "Set",
    "Split",
    "Statement",
    "Store",
    "TileProgram",
    "before",
    "block_start",
    "every",
    "expressions",
    "in_windows",
    "least",
    "most",
    "not_flat",
    "sets",
    "show",
    "tile_name",
    "to_visit",
    "verify",
    "visited",
]


@dataclass(frozen=True, slots=True)
class Instead:
    """Names another program, whose results are taken where `measure`, known after the loop, reaches `limit` in some row.

    It means the same and rounds otherwise, has the same grid and tiles, and loads and stores the same; a kernel may run it for
    more blocks than need it.
    """

    measure: Expr
    limit: float
    program: "TileProgram"


@dataclass(frozen=True, slots=True)
class TileProgram:
    """One kernel. `grid` gives the axes and block sizes that run in parallel; `order` is the canonical axis order."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    grid: tuple[tuple[Axis, int], ...]
    tiles: tuple[tuple[Axis, int], ...]
    body: tuple[Statement, ...]
    warps: int = 4
    stages: int = 2
    alternate: bool = False
    """Two warpgroups take turns with the products of a loop's step."""
    descending: tuple[Axis, ...] = ()
    """Grid axes whose blocks start from the end: the longest first, when masks make later blocks longer."""
    ahead: bool = False
    """The products that a trip begins with are computed together with those that the trip before ends with."""
    persistent: bool = False
    """As many blocks are started as run at a time; each goes on to the next one while its last results leave."""
    interleave: int = 1
    """The number of blocks of the other grid axes that run side by side, for one position of the last axis after the other."""
    eager: bool = False
    """The operands that the next trip begins with are awaited while the last products of a trip run."""
    instead: Instead | None = None
    ranges: tuple[Range, ...] = ()
    """The ranges of which the kernel reads what is found: whoever runs it computes them first, from other inputs."""
    later: tuple[Statement, ...] = ()
    """Statements that turn a stored state into results once parts are merged, where they are known. They do not run here."""
    lookups: tuple[Lookup, ...] = ()
    """The inputs that nobody stores: their tiles are loaded from other tensors, by tables."""
    unrolled: tuple[Axis, ...] = ()
    """Short axes along which every position is written out (`ir.unrolling`), so that no tile has them."""
    late: bool = False
    """Loops leave what they can to their end (`ir.late_folds`)."""
    prefetch_distance: int = 0
    """The number of trips by which a loop's loads along its own axis begin before they are needed. Registers hold them."""

    @property
    def followed(self) -> tuple[Statement, ...]:
        """Returns the statements that results depend on: the stores of a state give way to what follows."""
        return (*(s for s in self.body if not isinstance(s, Store)), *self.later) if self.later else self.body

    @property
    def is_recurrent(self) -> bool:
        """Says whether each trip of a loop is one step, that begins with what the step before has left."""
        loops = [s for s in self.body if isinstance(s, Loop)]
        steps = [g for loop in loops for g in loop.segments]
        return (
            any(loop.carries for loop in loops)
            and all(g.tile == 1 for g in steps)
            and not any(isinstance(s, Loop) for g in steps for s in g.body)
        )

    def long_products(self, longest: int) -> "list[Contract]":
        """Returns the products in loops that sum over more than `longest` positions in a trip.

        A sum over the loop's own axis goes on from trip to trip, and is none of them.
        """
        return [
            s
            for loop in self.body if isinstance(loop, Loop)
            for s in loop.segments[0].body if isinstance(s, Contract) and loop.axis not in s.over
            if math.prod(self.tile(a) for a in s.over) > longest
        ]  # fmt: skip

    def tile(self, axis: Axis) -> int:
        for a, tile in self.tiles:
            if a is axis:
                return tile
        raise KeyError(axis)

    @property
    def given(self) -> tuple[Tensor, ...]:
        """The inputs without what is found of ranges from the others, and with what is looked up in place of its result."""
        made = {t.name for r in self.ranges for t in r.found} | {x.result.name for x in self.lookups}
        own = {t.name: t for t in self.inputs if t.name not in made}
        for x in self.lookups:
            own |= {t.name: t for t in (x.source, x.table) if t.name not in own}
        return tuple(own.values())

    @property
    def order(self) -> tuple[Axis, ...]:
        return tuple(a for a, _ in self.tiles)

    def __str__(self) -> str:
        return show(self)


def verify(program: TileProgram) -> TileProgram:
    """Check the invariants above; returns the program.

    Raises:
      InvalidProgramError: naming the statement and the value that is not in scope.
    """
    tensors = {t.name for t in program.inputs}
    for r in program.ranges:
        ends = {t.name for t in r.found}
        need_first = r.predicate.tensors - (tensors - ends)
        if (
            need_first
            or not ends <= tensors
            or r.predicate.axes - {r.axis} != set(r.left.axes)
            or any(t.axes != r.left.axes for t in r.found)
        ):
            raise InvalidProgramError(
                f"tile program {program.name}: the range of {r.predicate} is not what its inputs give"
            )
    for x in program.lookups:
        if verify_lookup(x).result not in program.inputs:
            raise InvalidProgramError(f"tile program {program.name}: {x} is not among its inputs")
    check = _Check(program)
    top = check.block(program.body, _Scope.of(program))
    for s in program.later:
        for expr in expressions(s):
            check.need("what follows", expr, top)
        name = tile_name(s)
        if name is not None:
            top.names[name] = {}
    if program.instead is not None:
        check.need("its measure", program.instead.measure, top)
        other = verify(program.instead.program)
        if _frame(other) != _frame(program):
            raise InvalidProgramError(f"tile program {program.name}: what runs instead is another kernel")
    others = math.prod(-(-a.extent // t) for a, t in program.grid[:-1])
    if others % program.interleave:
        raise InvalidProgramError(
            f"tile program {program.name}: {program.interleave} of {others} blocks cannot run side by side"
        )
    never = {t.name for t in program.outputs} - check.stored
    if never:
        raise InvalidProgramError(f"tile program {program.name}: {sorted(never)} is never stored")
    return program


@dataclass(slots=True)
class _Scope:
    """What statements may use: tiles with the windows that they were made in, buffers with those where they stand."""

    windows: dict[Axis, Window]
    names: dict[str, dict[Axis, Window]]
    buffers: dict[str, tuple[Buffer, dict[Axis, Window]]]

    @classmethod
    def of(cls, program: TileProgram) -> "_Scope":
        windows = at_block(dict(program.grid), dict(program.tiles))
        return cls(windows, {block_start(a): {} for a, _ in program.grid}, {})

    def nested(self) -> "_Scope":
        return _Scope(dict(self.windows), dict(self.names), dict(self.buffers))


class _Check:
    """Checks the statements of a program in the order in which they run."""

    def __init__(self, program: TileProgram) -> None:
        self.program, self.stored = program, set[str]()
        self._inputs, self._outputs = ({t.name for t in of} for of in (program.inputs, program.outputs))

    def _fail(self, why: str) -> NoReturn:
        raise InvalidProgramError(f"tile program {self.program.name}: {why}")

    def need(self, where: str, expr: Expr, scope: _Scope) -> None:
        """Check that an expression reads what is in scope, in the windows in which it was made."""
        missing = {t for t in expr.tensors if t not in scope.names}
        if not missing.isdisjoint(scope.buffers):
            self._fail(f"{where} reads {sorted(missing & scope.buffers.keys())}, which only a get may")
        if missing:
            self._fail(f"{where} reads {sorted(missing)}, not in scope")
        for name in sorted(expr.tensors):
            axis = moved(scope.names[name], scope.windows)
            if axis is not None:
                self._fail(f"{where} reads {name}, a tile of another window of {axis}")

    def _bind(self, name: str, axes: tuple[Axis, ...], scope: _Scope) -> None:
        if name in scope.buffers:
            self._fail(f"{name} is the name of a buffer")
        scope.names[name] = of_axes(scope.windows, axes)

    def block(self, body: tuple[Statement, ...], around: _Scope) -> _Scope:
        """Check statements one after the other; returns what is in scope behind them."""
        scope = around.nested()
        for s in body:
            match s:
                case Load(name, tensor, indices):
                    if tensor not in self._inputs:
                        self._fail(f"load of unknown tensor {tensor!r}")
                    self._bind(name, indices, scope)
                case Let(name, axes) | Reduce(name, axes) | Contract(name, axes):
                    if isinstance(s, Let) and s.renamed:
                        self._renamed(s, scope)
                    for expr in expressions(s):
                        self.need(name, expr, scope)
                    self._bind(name, axes, scope)
                case Store(tensor, _, value):
                    if tensor not in self._outputs:
                        self._fail(f"store to unknown tensor {tensor!r}")
                    self.need(f"store {tensor}", value, scope)
                    self.stored.add(tensor)
                case Buffer(name, axes, sizes, _, init):
                    if name in scope.names or name in scope.buffers:
                        self._fail(f"the name of buffer {name} is taken")
                    if len(sizes) != len(axes) or min(sizes, default=1) < 1 or init.tensors or init.axes:
                        self._fail(f"buffer {name} has a size for every axis and begins as a constant")
                    scope.buffers[name] = s, of_axes(scope.windows, axes)
                case Get(name, buffer, axes, dtype):
                    if self._part(f"get {buffer}", buffer, axes, scope).dtype != dtype or name in scope.names:
                        self._fail(f"{name} has another type than {buffer}, or its name is taken")
                    self._bind(name, axes, scope)
                case Set(buffer, axes, value):
                    self._part(f"set {buffer}", buffer, axes, scope)
                    self.need(f"set {buffer}", value, scope)
                case Loop():
                    self._loop(s, scope)
        return scope

    def _renamed(self, s: Let, scope: _Scope) -> None:
        """Check that the axes of a read may change their names."""
        pairs = [(scope.windows.get(a), scope.windows.get(b)) for a, b in s.renamed]
        whole = all(x and y and not x.is_open and not y.is_open and x.size == y.size for x, y in pairs)
        if not isinstance(s.value, Read) or not whole or any(a.extent != b.extent for a, b in s.renamed):
            self._fail(f"{s.name} renames axes that are not whole, or not equally long")

    def _part(self, where: str, name: str, axes: tuple[Axis, ...], scope: _Scope) -> Buffer:
        """The buffer of a get or a set, whose current windows it must hold."""
        if name not in scope.buffers:
            self._fail(f"{where}: no such buffer is in scope")
        buffer, windows = scope.buffers[name]
        if axes != buffer.axes:
            self._fail(f"{where} along [{_names(axes)}], not along [{_names(buffer.axes)}]")
        for axis, size in zip(axes, buffer.sizes, strict=True):
            wrong = misfit(scope.windows[axis], windows[axis], size)
            if wrong is not None:
                self._fail(f"{where}: a window of {axis} has {wrong}")
        return buffer

    def _loop(self, loop: Loop, scope: _Scope) -> None:
        axis, carries, where = loop.axis, loop.carries, f"loop {loop.axis}"
        bounds = [b for g in loop.segments for b in (g.start, g.stop)]
        here = [] if loop.split is None else [loop.split.here]
        for expr in (loop.origin, loop.to_visit, loop.first, *here, *bounds):
            self.need(where, expr, scope)
        for c in carries:
            self.need(c.name, c.init, scope)
        outer = scope.windows[axis]
        if outer.is_open != (block_start(axis) in loop.origin.tensors):
            self._fail(f"{where} does not begin where the window around it does")
        held = [n for g in loop.segments for n in sets(g.body) if n in scope.buffers]
        if loop.backwards and (held or (carries and len(loop.segments) > 1)):
            self._fail(f"{where} goes backwards through several segments, or writes buffers")
        inside = scope.nested()
        inside.names |= {n: {} for n in (visited(axis), before(axis), to_visit(axis), block_start(axis))}
        for c in carries:
            self._bind(c.name, c.axes, inside)
        for g in loop.segments:
            window = inside.windows[axis] = in_trip(outer, loop.origin, g.start, g.stop, g.offset, g.tile)
            wrong = misfit(window, outer, outer.size) if outer.is_open else None
            if wrong is not None:
                self._fail(f"{where} has {wrong} in the window around it")
            cut = [c.name for c in carries if moved(of_axes(scope.windows, c.axes), inside.windows) is not None]
            if cut:
                self._fail(f"{where} carries {cut} along its own axis, from window to window")
            got = self.block(g.body, inside)
            lost = [c.next_name for c in carries if c.next_name not in got.names]
            if lost:
                self._fail(f"{where} does not yield {lost}")
        for c in carries:
            self._bind(c.name, c.axes, scope)


def _frame(program: TileProgram) -> tuple[object, ...]:
    """Returns everything that two programs must have in common for one kernel to run both."""
    bounds, moves = [], []
    for s in every(program.body):
        segments = s.segments if isinstance(s, Loop) else ()
        bounds += [(g.start, g.stop, g.offset, g.tile) for g in segments]
        moves += [(s.tensor, s.indices)] if isinstance(s, Load | Store) else []
    return (
        program.inputs,
        program.outputs,
        program.ranges,
        program.lookups,
        program.grid,
        program.tiles,
        program.warps,
        program.stages,
        bounds,
        moves,
    )


def _names(axes: tuple[Axis, ...]) -> str:
    return ", ".join(a.name for a in axes)


def _lines(body: tuple[Statement, ...], indent: str, tiles: Mapping[Axis, int]) -> Iterator[str]:
    for s in body:
        match s:
            case Load(name, tensor, indices):
                yield f"{indent}{name} = load {tensor}[{_names(indices)}]"
            case Let(name, axes, value, _, renamed):
                new = f" along {', '.join(f'{b} for {a}' for a, b in renamed)}" if renamed else ""
                yield f"{indent}{name}[{_names(axes)}] = {value}{new}"
            case Reduce(name, axes, reducer, value, over):
                yield f"{indent}{name}[{_names(axes)}] = {reducer}({value}; {_names(over)})"
            case Contract(name, axes, lhs, rhs, over, dtype):
                yield f"{indent}{name}[{_names(axes)}]: {dtype} = dot({lhs}, {rhs}; {_names(over)})"
            case Store(tensor, indices, value):
                yield f"{indent}store {tensor}[{_names(indices)}] = {value}"
            case Buffer(name, axes, sizes, dtype, init, memory):
                held = ", ".join(a.name if tiles[a] == n else f"{a}:{n}" for a, n in zip(axes, sizes, strict=True))
                yield f"{indent}{name}[{held}]: {dtype} = {init} in {memory}"
            case Get(name, buffer, axes):
                yield f"{indent}{name} = get {buffer}[{_names(axes)}]"
            case Set(buffer, axes, value):
                yield f"{indent}set {buffer}[{_names(axes)}] = {value}"
            case Loop(axis, carries, segments):
                for c in carries:
                    yield f"{indent}{c.name}[{_names(c.axes)}]: {c.dtype} = {c.init}"
                origin = [] if s.origin is ZERO else [str(s.origin)]
                for g in segments:
                    places = [*origin, str(g.offset)] if g.offset else origin
                    at = f" from {' + '.join(places)}" if places else ""
                    at += " backwards" if s.backwards else ""
                    label = f"  # {g.label}" if g.label else ""
                    yield f"{indent}for {axis} in [{g.start}, {g.stop}) by {g.tile}{at}:{label}"
                    yield from _lines(g.body, indent + "  ", tiles)
                    if carries:
                        yield f"{indent}  yield {', '.join(f'{c.name} <- {c.next_name}' for c in carries)}"


def show(program: TileProgram) -> str:
    """The kernel as text: grid, loops with their bounds, loads, dots, reductions, carried values, stores."""
    grid = ", ".join(f"{a.name}:{a.extent}/{t}" for a, t in program.grid)
    lines = [f"kernel {program.name} grid({grid})"]
    lines += [
        f"  {', '.join(t.name for t in r.found)}[{_names(r.left.axes)}] = range of {r.axis} where {r.predicate}"
        for r in program.ranges
    ]
    lines += [f"  {x}" for x in program.lookups]
    lines += _lines(program.body, "  ", dict(program.tiles))
    if program.instead is not None:
        lines.append(f"  where {program.instead.measure} >= {program.instead.limit:g} in a row, instead:")
        lines += _lines(program.instead.program.body, "    ", dict(program.tiles))
    return "\n".join(lines)
