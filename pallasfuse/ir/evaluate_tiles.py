"""Evaluation of tile programs with NumPy: the reference for lowering, and the strictest machine there is.

Every grid block runs, one after the other. What a device would do silently is an error here: a tile that leaves its axis
without saying so, a loop that skips or repeats positions, a part of a buffer that is not there, an output element that no block
writes.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import assert_never

import numpy as np

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.domain import FLOAT64, Array, Domain, wide_type
from pallasfuse.ir.evaluate import evaluate_nest
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, postorder
from pallasfuse.ir.lookup import looked_up
from pallasfuse.ir.reducers import SUM, Reducer
from pallasfuse.ir.tile_program import (
    Buffer,
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
    TileProgram,
    before,
    block_start,
    sets,
    to_visit,
    visited,
)


@dataclass(frozen=True, slots=True)
class _Window:
    """The current tile along one axis: `size` positions from `start`."""

    start: int
    size: int
    overhangs: bool
    whole: bool = True
    """False outside the loop over this axis, where a tile would be only a part of it."""
    is_open: bool = True
    """A block of the grid or a trip of a loop: a loop over the axis cuts it into pieces."""

    @property
    def end(self) -> int:
        return self.start + self.size


type _Box = tuple[tuple[int, int], ...]
"""The first position and the number of positions along every axis of the program, of a part of a buffer."""


@dataclass(slots=True)
class _Memory[V]:
    """A buffer: what was written to which part of it, the latest last; no part lies in a later one."""

    axes: dict[Axis, _Window]
    """The positions that it has along each axis."""
    dtype: str
    init: V
    depth: int
    """The number of loops that are open where it stands."""
    pieces: list[tuple[_Box, V]] = field(default_factory=list)
    over: set[Axis] = field(default_factory=set)
    """Axes that it lacks, in whose loops it was written: what is added up along them."""


@dataclass(frozen=True, slots=True)
class _Open:
    """A loop whose trips are under way."""

    axis: Axis
    sets: tuple[str, ...]
    """The buffers that it writes."""


@dataclass(slots=True)
class _Scope[V]:
    """Values by name: arrays with one dimension per axis of the program, of one element where they do not vary."""

    windows: dict[Axis, _Window]
    names: dict[str, V]
    buffers: dict[str, _Memory[V]] = field(default_factory=dict)
    loops: tuple[_Open, ...] = ()
    """Those around, the innermost last."""
    unfinished: set[str] = field(default_factory=set)
    """What those loops carry, and what is computed of it."""
    memo: dict[Expr, V] = field(default_factory=dict)


def evaluate_tiles(
    program: TileProgram, inputs: Mapping[str, Array], *, move_last_block_back: bool = False,
    moved: Counter[str] | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Every output of the kernel, by name, in float64 (int64, bool); `inputs[name]` has one dimension per axis.

    The ends of ranges and what is looked up are computed here, whatever `inputs` says of them.

    Args:
      move_last_block_back: a grid block that does not fit overlaps its neighbour, as in the XLA backend. Else it overhangs: what
        lies outside a tensor is read as zero and never written, as in the Pallas backends.
      moved: counts the elements of each tensor that all blocks load and store.

    Raises:
      InvalidProgramError: a tile leaves its axis where nothing says that it may, a value varies along an axis that it does
        not declare, loop tiles are not contiguous, or some element of an output is never written.
    """
    wide: dict[str, Array] = {t.name: np.asarray(inputs[t.name]).astype(wide_type(t.dtype)) for t in program.given}
    for x in program.lookups:
        wide[x.result.name] = looked_up(
            x, *(wide[t.name].reshape([a.extent for a in t.axes]) for t in (x.source, x.table))
        )
    return _Evaluation(program, wide, FLOAT64, move_last_block_back, moved).run()


def evaluate_tiles_over[V](
    program: TileProgram, inputs: Mapping[str, V], domain: Domain[V], *, move_last_block_back: bool = False
) -> dict[str, V]:
    """Evaluates a tile program like `evaluate_tiles`, over another domain of numbers; `inputs` has the results of lookups."""
    return _Evaluation(program, inputs, domain, move_last_block_back).run()


class _Evaluation[V]:
    def __init__(
        self, program: TileProgram, inputs: Mapping[str, V], domain: Domain[V], move_last_block_back: bool,
        moved: Counter[str] | None = None,
    ) -> None:  # fmt: skip
        self.program, self.domain, self.move_last_block_back = program, domain, move_last_block_back
        self.moved = moved
        self.dimension = {a: d for d, a in enumerate(program.order)}
        self.rank = len(self.dimension)
        known = dict(inputs) | {n.name: evaluate_nest(n, inputs, domain) for r in program.ranges for n in r.nests}
        self.inputs = {t.name: known[t.name] for t in program.inputs}
        self.stores: dict[str, list[tuple[tuple[Array, ...], V]]] = {t.name: [] for t in program.outputs}
        self.written = {t.name: np.zeros([a.extent for a in t.axes], bool) for t in program.outputs}

    def run(self) -> dict[str, V]:
        grid = dict(self.program.grid)
        for starts in product(*(self._starts(a, t) for a, t in self.program.grid)):
            at = dict(zip(grid, starts, strict=True))
            windows = {
                a: _Window(at.get(a, 0), t, a.extent % t != 0 and not (a in grid and self.move_last_block_back),
                           a in grid or t >= a.extent, a in grid)
                for a, t in self.program.tiles
            }  # fmt: skip
            names = {block_start(a): self._scalar(s) for a, s in at.items()}
            self._run(self.program.body, _Scope(windows, names))
        for name, written in self.written.items():
            if not written.all():
                where = tuple(int(n) for n in np.argwhere(~written)[0])
                self._fail(f"{name}{list(where)} and {int((~written).sum()) - 1} other elements are never written")
        return {
            t.name: self.domain.assemble(self.stores[t.name], tuple(a.extent for a in t.axes), t.dtype)
            for t in self.program.outputs
        }

    def _starts(self, axis: Axis, tile: int) -> list[int]:
        starts = list(range(0, axis.extent, tile))
        if self.move_last_block_back:
            starts = [min(s, axis.extent - tile) for s in starts]
        return starts[::-1] if axis in self.program.descending else starts

    def _fail(self, why: str) -> None:
        raise InvalidProgramError(f"tile program {self.program.name}: {why}")

    # --- statements

    def _run(self, body: tuple[Statement, ...], scope: _Scope[V]) -> None:
        for statement in body:
            match statement:
                case Load(name, tensor, indices, dtype):
                    self._bind(name, indices, self._load(tensor, indices, dtype, scope), scope)
                case Let(name, axes, value, _, renamed):
                    self._bind(name, axes, self._renamed(self._value(value, scope), renamed), scope)
                    scope.unfinished |= {name} if value.tensors & scope.unfinished else set()
                case Reduce(name, axes, reducer, value, over, joins):
                    tile = self._widen(self._value(value, scope), over, scope)
                    folded = self._reduce(reducer, tile, over, value.dtype, joins=joins)
                    self._bind(name, axes, folded if scope.loops else self.domain.finished(folded), scope)
                case Contract(name, axes, lhs, rhs, over, dtype):
                    left, right = (self._widen(self._value(side, scope), over, scope) for side in (lhs, rhs))
                    terms = self.domain.apply("mul", (left, right), dtype)
                    self._bind(name, axes, self._reduce(SUM, terms, over, dtype), scope)
                case Store(tensor, indices, value):
                    self._store(tensor, indices, self._value(value, scope), scope)
                case Buffer(name, axes, sizes, dtype, init):
                    held = {a: _Window(scope.windows[a].start, n, False) for a, n in zip(axes, sizes, strict=True)}
                    scope.buffers[name] = _Memory(held, dtype, self._value(init, scope), len(scope.loops))
                case Get(name, buffer, axes):
                    self._bind(name, axes, self._get(buffer, scope), scope)
                case Set(buffer, axes, value):
                    self._set(buffer, axes, value, scope)
                case Loop():
                    self._loop(statement, scope)
                case _:
                    assert_never(statement)

    def _reduce(self, reducer: Reducer, tile: V, over: tuple[Axis, ...], dtype: str, *, joins: bool = False) -> V:
        return self.domain.reduce(reducer, tile, tuple(self.dimension[a] for a in over), dtype, joins=joins)

    def _bind(self, name: str, axes: tuple[Axis, ...], value: V, scope: _Scope[V]) -> None:
        self._check(name, axes, value)
        scope.names[name] = value

    def _check(self, name: str, axes: tuple[Axis, ...], value: V) -> None:
        shape = self.domain.shape(value)
        for axis, dim in self.dimension.items():
            if axis not in axes and shape[dim] != 1:
                self._fail(f"{name} varies along {axis}, which it does not declare")

    def _inside(self, axes: tuple[Axis, ...], scope: _Scope[V]) -> tuple[list[Array], Array]:
        """The positions along every axis, and where all of them lie inside their axes."""
        positions, inside = [], np.ones([1] * self.rank, bool)
        for axis in axes:
            at = self._position(axis, scope)
            window = scope.windows[axis]
            if not window.overhangs and window.end > axis.extent:
                self._fail(f"positions [{window.start}, {window.end}) leave {axis} of {axis.extent}")
            positions.append(np.minimum(at, axis.extent - 1))
            inside = inside & (at < axis.extent)
        return positions, inside

    def _load(self, tensor: str, indices: tuple[Axis, ...], dtype: str, scope: _Scope[V]) -> V:
        positions, inside = self._inside(indices, scope)
        if self.moved is not None:
            self.moved[tensor] += int(inside.sum())
        array = self.inputs[tensor]
        if self.domain.shape(array) != tuple(a.extent for a in indices):
            self._fail(f"load of {tensor}[{', '.join(map(str, indices))}], whose shape is {self.domain.shape(array)}")
        if not positions:
            return self.domain.reshape(array, (1,) * self.rank)
        windows = {self.dimension[a]: scope.windows[a] for a in indices}
        dims = [self.dimension[a] for a in indices]
        if dims == sorted(windows) and all(w.start >= 0 for w in windows.values()) and inside.all():
            # the same by slices, which copy nothing
            part = self.domain.take(array, tuple(slice(w.start, w.end) for w in windows.values()))
            return self.domain.reshape(part, tuple(windows[d].size if d in windows else 1 for d in range(self.rank)))
        tile = self.domain.take(array, tuple(positions))
        if inside.all():
            return tile
        mask = self.domain.integers(inside, "bool")
        return self.domain.apply("select", (mask, tile, self.domain.constant(0, dtype, self.rank)), dtype)

    def _store(self, tensor: str, indices: tuple[Axis, ...], value: V, scope: _Scope[V]) -> None:
        value = self._widen(value, indices, scope)
        self._bind(f"store {tensor}", indices, value, scope)
        positions, inside = self._inside(indices, scope)
        shape = self.domain.shape(value)
        inside = np.broadcast_to(inside, shape)
        if self.moved is not None:
            self.moved[tensor] += int(inside.sum())
        where = tuple(np.broadcast_to(p, shape)[inside] for p in positions)
        kept = self.domain.take(value, (inside,)) if where else self.domain.reshape(value, ())
        self.stores[tensor].append((where, kept))
        self.written[tensor][where] = True

    # --- buffers

    def _box(self, memory: _Memory[V], name: str, scope: _Scope[V]) -> _Box:
        """The part of a buffer at the current windows."""
        box = [(0, 1)] * self.rank
        for axis, held in memory.axes.items():
            window = scope.windows[axis]
            if not window.whole:
                self._fail(f"a part of {axis} is used outside the loop over it")
            if window.start < held.start or window.end > held.end:
                self._fail(f"{name} has no positions [{window.start}, {window.end}) of {axis}")
            box[self.dimension[axis]] = window.start - held.start, window.size
        return tuple(box)

    def _get(self, name: str, scope: _Scope[V]) -> V:
        memory = scope.buffers[name]
        part = self._part(memory, self._box(memory, name, scope))
        inside = {o.axis for o in scope.loops[memory.depth :] if name in o.sets}
        goes_on = bool(inside - memory.axes.keys()) or any(o.axis in memory.over for o in scope.loops)
        return part if goes_on else self.domain.finished(part)

    def _part(self, memory: _Memory[V], box: _Box) -> V:
        pieces = [(own, value) for own, value in memory.pieces if _common(own, box) is not None]
        if pieces and pieces[-1][0] == box:
            return pieces[-1][1]
        shape = tuple(n for _, n in box)
        init = self.domain.broadcast(memory.init, shape)
        if not pieces:
            return init
        parts = []
        for own, value in [(box, init), *pieces]:
            common = _common(own, box)
            assert common is not None
            places = [n.ravel() for n in np.meshgrid(*(np.arange(a, a + n) for a, n in common), indexing="ij")]
            at, of = (tuple(p - a for p, (a, _) in zip(places, origin, strict=True)) for origin in (box, own))
            parts.append((at, self.domain.take(value, of)))
        return self.domain.assemble(parts, shape, memory.dtype)

    def _set(self, name: str, axes: tuple[Axis, ...], value: Expr, scope: _Scope[V]) -> None:
        memory = scope.buffers[name]
        box = self._box(memory, name, scope)
        part = self._widen(self.domain.apply("convert", (self._value(value, scope),), memory.dtype), axes, scope)
        self._check(f"set {name}", axes, part)
        memory.pieces = [(own, old) for own, old in memory.pieces if _common(own, box) != own]
        memory.pieces.append((box, part))
        memory.over |= {o.axis for o in scope.loops[memory.depth :]} - memory.axes.keys()

    # --- loops

    def _loop(self, loop: Loop, scope: _Scope[V]) -> None:
        axis, around = loop.axis, scope.windows[loop.axis]
        first, total, origin = (self._number(e, scope) for e in (loop.first, loop.to_visit, loop.origin))
        state = []
        for c in loop.carries:
            begun = self.domain.apply("convert", (self._value(c.init, scope),), c.dtype)
            self._check(c.name, c.axes, begun)
            state.append(self._widen(begun, c.axes, scope))
        begins = reached = around.start if around.is_open else first
        loops = (*scope.loops, _Open(axis, tuple(n for g in loop.segments for n in sets(g.body))))
        trips: list[tuple[Segment, int, _Window]] = []
        for segment in loop.segments:
            for trip in range(self._number(segment.start, scope), self._number(segment.stop, scope)):
                begin = origin + segment.offset + trip * segment.tile
                if begin != reached:
                    self._fail(f"the tile at {begin} of {axis} comes after {reached} positions")
                window = _Window(begin, segment.tile, segment.edge)
                if around.is_open and window.end > around.end:
                    self._fail(f"positions [{begin}, {window.end}) of {axis} leave the window up to {around.end}")
                reached = window.end if around.is_open else min(window.end, axis.extent)
                trips.append((segment, begin, window))
        for segment, begin, window in reversed(trips) if loop.backwards else trips:
            inner = _Scope(dict(scope.windows), dict(scope.names), dict(scope.buffers), loops, set(scope.unfinished))
            inner.windows[axis] = window
            places = {block_start(axis): begin, before(axis): begin - first, to_visit(axis): total,
                      visited(axis): min(window.end, axis.extent) - first}  # fmt: skip
            inner.names |= {name: self._scalar(n) for name, n in places.items()}
            inner.names |= {c.name: array for c, array in zip(loop.carries, state, strict=True)}
            inner.unfinished |= {c.name for c in loop.carries}
            state = self._trip(loop, segment, inner)
        promised = max(0, total if loop.split is None else self._number(loop.split.here, scope))
        if around.is_open:
            promised = max(0, min(around.end, axis.extent) - begins)
            reached = max(begins, min(reached, axis.extent))
        if reached - begins != promised:
            self._fail(f"the loop over {axis} visits {reached - begins} positions, but says {promised}")
        outside = {o.axis for o in scope.loops}
        for carry, array in zip(loop.carries, state, strict=True):
            goes_on = loop.split is not None or axis in outside or not carry.init.tensors.isdisjoint(scope.unfinished)
            self._bind(carry.name, carry.axes, array if goes_on else self.domain.finished(array), scope)
            scope.unfinished |= {carry.name} if goes_on else set()

    def _trip(self, loop: Loop, segment: Segment, scope: _Scope[V]) -> list[V]:
        self._run(segment.body, scope)
        found = [scope.names[c.next_name] for c in loop.carries]  # one may be what another one was before the trip
        for carry, value in zip(loop.carries, found, strict=True):
            self._check(carry.name, carry.axes, value)
        return found

    # --- expressions

    def _scalar(self, value: int) -> V:
        return self.domain.integers(np.full([1] * self.rank, value, np.int64), "int32")

    def _number(self, expr: Expr, scope: _Scope[V]) -> int:
        return self.domain.number(self._value(expr, scope))

    def _position(self, axis: Axis, scope: _Scope[V]) -> Array:
        window = scope.windows[axis]
        if not window.whole:
            self._fail(f"a part of {axis} is used outside the loop over it")
        shape = [1] * self.rank
        shape[self.dimension[axis]] = window.size
        return (window.start + np.arange(window.size)).reshape(shape)

    def _widen(self, value: V, axes: tuple[Axis, ...], scope: _Scope[V]) -> V:
        """The value with all positions of the tile along `axes`."""
        shape = list(self.domain.shape(value))
        for axis in axes:
            shape[self.dimension[axis]] = scope.windows[axis].size
        return self.domain.broadcast(value, tuple(shape))

    def _renamed(self, value: V, renamed: tuple[tuple[Axis, Axis], ...]) -> V:
        """The value with its elements along some axes along others."""
        if not renamed:
            return value
        shape = self.domain.shape(value)
        new = {self.dimension[a]: self.dimension[b] for a, b in renamed}
        places = []
        for dim, n in enumerate(shape):
            along = [1] * self.rank
            along[new.get(dim, dim)] = n
            places.append(np.arange(n).reshape(along))
        return self.domain.take(value, tuple(places))

    def _value(self, root: Expr, scope: _Scope[V]) -> V:
        result: V
        for node in postorder(root):
            if node in scope.memo:
                continue
            match node:
                case Const(value, dtype):
                    result = self.domain.constant(value, dtype, self.rank)
                case Index(axis, dtype):
                    result = self.domain.integers(self._position(axis, scope), dtype)
                case Read(tensor, indices, dtype):
                    result = self.domain.apply("convert", (scope.names[tensor],), dtype)
                    self._check_axes(node, result, indices)
                case Apply(op, args, dtype):
                    result = self.domain.apply(op, [scope.memo[a] for a in args], dtype)
                case _:
                    assert_never(node)
            scope.memo[node] = result
        return scope.memo[root]

    def _check_axes(self, node: Read, value: V, axes: tuple[Axis, ...]) -> None:
        shape = self.domain.shape(value)
        for axis, dim in self.dimension.items():
            if axis not in axes and shape[dim] != 1:
                self._fail(f"{node} varies along {axis} as well")


def _common(a: _Box, b: _Box) -> _Box | None:
    """The part that two parts of a buffer have in common."""
    ends = [(max(p, q), min(p + n, q + m)) for (p, n), (q, m) in zip(a, b, strict=True)]
    return None if any(start >= end for start, end in ends) else tuple((start, end - start) for start, end in ends)
