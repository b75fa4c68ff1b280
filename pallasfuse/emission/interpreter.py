"""Runs the statements of a tile program over JAX values.

A tile is an array with one dimension for every axis whose current tile is larger than one element, in the program's canonical
axis order. Everything that depends on the machine (loads, stores, matrix products, loops) is asked of a `Machine`.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, assert_never

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasfuse.emission.elementwise import REDUCTIONS, TABLE, select
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, postorder
from pallasfuse.ir.statements import ZERO
from pallasfuse.ir.tile_program import (
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
    TileProgram,
    before,
    block_start,
    sets,
    to_visit,
    visited,
)

Array = Any


@dataclass(frozen=True, slots=True)
class Tile:
    """An array and the axis of each of its dimensions."""

    array: Array
    axes: tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class DynamicSlice:
    """The current tile along one axis: `size` positions from `start`; `overhangs`: some may lie past the axis' end."""

    start: Array | int
    size: int
    overhangs: bool


@dataclass(frozen=True, slots=True)
class Memory:
    """The contents of a buffer: a tile with a dimension for every axis of more than one element, in canonical order."""

    array: Array
    held: Mapping[Axis, DynamicSlice]
    """The positions that it has along each axis, in canonical order."""
    dtype: str

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(a for a, w in self.held.items() if w.size != 1)

    def is_whole(self, windows: Mapping[Axis, DynamicSlice]) -> bool:
        """Are the current windows all of the buffer? One of the buffer's size can only begin where the buffer does."""
        return all(windows[a].size == w.size for a, w in self.held.items())

    def starts(self, windows: Mapping[Axis, DynamicSlice]) -> list[Array]:
        """Where the current windows begin in the buffer."""
        found = []
        for axis in self.axes:
            here, first = windows[axis].start, self.held[axis].start
            if windows[axis].size == self.held[axis].size:
                found.append(jnp.int32(0))
            elif isinstance(first, int) and first == 0:
                found.append(jnp.asarray(here, jnp.int32))
            else:
                found.append(jnp.asarray(here, jnp.int32) - jnp.asarray(first, jnp.int32))
        return found


class Machine(Protocol):
    """The operations that a backend must provide to run tile programs."""

    def load(self, tensor: str, indices: tuple[Axis, ...], windows: Mapping[Axis, DynamicSlice], again: str) -> Array:
        """The tile of an input, one dimension per index axis, in the order of `indices`; `again`: as `Load.again`."""

    def store(self, tensor: str, indices: tuple[Axis, ...], windows: Mapping[Axis, DynamicSlice], value: Array) -> None:
        """Write a tile, one dimension per index axis."""

    def contract(self, lhs: Tile, rhs: Tile, over: tuple[Axis, ...], dtype: str, precision: str | None) -> Tile:
        """The sum over `over` of the product: kept axes of lhs, then of rhs."""

    def pin(self, value: Array) -> Array:
        """Returns the same value, rounded once for all its users."""

    def loop(self, start: Array, stop: Array, body: Callable[[Array, tuple[Array, ...]], tuple[Array, ...]],
             init: tuple[Array, ...]) -> tuple[Array, ...]:  # fmt: skip
        """`for t in [start, stop): state = body(t, state)`."""


@dataclass(slots=True)
class Scope:
    """Values by name, with the windows of every axis and a memo of evaluated expressions."""

    windows: dict[Axis, DynamicSlice]
    names: dict[str, Tile]
    memo: dict[Expr, Tile] = field(default_factory=dict)
    buffers: dict[str, Memory] = field(default_factory=dict)

    def nested(self) -> "Scope":
        return Scope(dict(self.windows), dict(self.names), buffers=dict(self.buffers))


class Interpreter:
    """Executes one program on one machine."""

    def __init__(self, program: TileProgram, machine: Machine) -> None:
        self.program, self.machine = program, machine
        self.rank = {a: n for n, a in enumerate(program.order)}

    def run_block(self, starts: Mapping[Axis, Array]) -> None:
        """Run the whole program for the grid block that begins at `starts`."""
        windows = {a: DynamicSlice(starts.get(a, 0), t, a.extent % t != 0) for a, t in self.program.tiles}
        names = {block_start(a): Tile(s, ()) for a, s in starts.items()}
        self.run(self.program.body, Scope(windows, names))

    def run(self, body: tuple[Statement, ...], scope: Scope) -> None:
        for statement in body:
            match statement:
                case Load():
                    self._load(statement, scope)
                case Let(name, axes, value, pinned, renamed):
                    tile = self._widen(self._renamed(self.value(value, scope), renamed), axes, scope)
                    scope.names[name] = Tile(self.machine.pin(tile.array), tile.axes) if pinned else tile
                case Reduce(name, axes, reducer, value, over):
                    scope.names[name] = self._reduce(axes, reducer.name, value, over, scope)
                case Contract():
                    self._contract(statement, scope)
                case Store(tensor, indices, value):
                    self._store(tensor, indices, value, scope)
                case Buffer():
                    self._declare(statement, scope)
                case Get(name, buffer):
                    scope.names[name] = self._get(scope.buffers[buffer], scope)
                case Set(buffer, axes, value):
                    scope.buffers[buffer] = self._set(scope.buffers[buffer], axes, value, scope)
                case Loop():
                    self._loop(statement, scope)
                case _:
                    assert_never(statement)

    def _load(self, statement: Load, scope: Scope) -> None:
        array = self.machine.load(statement.tensor, statement.indices, scope.windows, statement.again)
        scope.names[statement.name] = self._canonical(array, statement.indices, scope)

    def _contract(self, statement: Contract, scope: Scope) -> None:
        over, dtype = statement.over, statement.dtype
        left, right = (self._widen(self.value(e, scope), over, scope) for e in (statement.lhs, statement.rhs))
        present = tuple(a for a in over if scope.windows[a].size != 1)
        if not present or not set(left.axes) - set(present) or not set(right.axes) - set(present):
            tile = self._fold(self._multiply(left, right, dtype), "sum", present)
        else:
            tile = self.machine.contract(left, right, present, dtype, statement.precision)
        scope.names[statement.name] = self._widen(self._transpose(tile), statement.axes, scope)

    # --- expressions

    def value(self, root: Expr, scope: Scope) -> Tile:
        """The tile of an elementwise expression."""
        if root in scope.memo:
            return scope.memo[root]
        for node in postorder(root):
            if node not in scope.memo:
                scope.memo[node] = self.evaluate(node, scope)
        return scope.memo[root]

    def evaluate(self, node: Expr, scope: Scope) -> Tile:
        """The tile of one node, whose operands are known."""
        match node:
            case Const(value, dtype):
                return Tile(np.array(value, jnp.dtype(dtype))[()], ())
            case Index(axis, dtype):
                return self._position(axis, dtype, scope)
            case Read(tensor):
                return scope.names[tensor]
            case Apply(op, args, dtype):
                return self._apply(op, [scope.memo[a] for a in args], node, dtype)
            case _:
                assert_never(node)

    def _position(self, axis: Axis, dtype: str, scope: Scope) -> Tile:
        window = scope.windows[axis]
        if window.size == 1:
            return Tile(
                jnp.asarray(window.start, dtype)
                if not isinstance(window.start, int)
                else np.array(window.start, dtype)[()],
                (),
            )
        return Tile(
            lax.iota(jnp.dtype(dtype), window.size) + lax.convert_element_type(window.start, jnp.dtype(dtype)), (axis,)
        )

    def _apply(self, op: str, args: list[Tile], node: Apply, dtype: str) -> Tile:
        if op == "convert":
            return Tile(lax.convert_element_type(args[0].array, jnp.dtype(dtype)), args[0].axes)
        if op == "bitcast":
            return Tile(lax.bitcast_convert_type(args[0].array, jnp.dtype(dtype)), args[0].axes)
        if op == "integer_pow":
            exponent = node.args[1]
            assert isinstance(exponent, Const)
            return Tile(lax.integer_pow(args[0].array, int(exponent.value)), args[0].axes)
        axes = self._union(*(t.axes for t in args))
        arrays = [self._spread(t, axes) for t in args]
        function = select if op == "select" else TABLE[op]
        return Tile(function(*arrays), axes)

    def _union(self, *groups: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(sorted({a for g in groups for a in g}, key=self.rank.__getitem__))

    def _spread(self, tile: Tile, axes: tuple[Axis, ...]) -> Array:
        """The array with unit dimensions for the axes of `axes` that it lacks; scalars stay scalars."""
        if tile.axes == axes or not tile.axes:
            return tile.array
        missing = tuple(d for d, a in enumerate(axes) if a not in tile.axes)
        return lax.expand_dims(tile.array, missing)

    def _widen(self, tile: Tile, axes: tuple[Axis, ...], scope: Scope) -> Tile:
        """Broadcast a tile so that it has every present axis of `axes`."""
        wanted = self._union(tile.axes, tuple(a for a in axes if scope.windows[a].size != 1))
        if wanted == tile.axes:
            return tile
        shape = tuple(scope.windows[a].size for a in wanted)
        return Tile(jnp.broadcast_to(self._spread(tile, wanted), shape), wanted)

    def _canonical(self, array: Array, indices: tuple[Axis, ...], scope: Scope) -> Tile:
        """Drop unit dimensions and bring the others into canonical order."""
        present = tuple(a for a in indices if scope.windows[a].size != 1)
        array = array.reshape(tuple(scope.windows[a].size for a in present))
        return self._transpose(Tile(array, present))

    def _transpose(self, tile: Tile) -> Tile:
        axes = self._union(tile.axes)
        if axes == tile.axes:
            return tile
        return Tile(lax.transpose(tile.array, tuple(tile.axes.index(a) for a in axes)), axes)

    def _renamed(self, tile: Tile, renamed: tuple[tuple[Axis, Axis], ...]) -> Tile:
        names = dict(renamed)
        return self._transpose(Tile(tile.array, tuple(names.get(a, a) for a in tile.axes))) if names else tile

    def _multiply(self, lhs: Tile, rhs: Tile, dtype: str) -> Tile:
        axes = self._union(lhs.axes, rhs.axes)
        arrays = [lax.convert_element_type(self._spread(t, axes), jnp.dtype(dtype)) for t in (lhs, rhs)]
        return Tile(arrays[0] * arrays[1], axes)

    def _fold(self, tile: Tile, reducer: str, over: tuple[Axis, ...]) -> Tile:
        dims = tuple(d for d, a in enumerate(tile.axes) if a in over)
        if not dims:
            return tile
        return Tile(REDUCTIONS[reducer](tile.array, dims), tuple(a for a in tile.axes if a not in over))

    def _reduce(self, axes: tuple[Axis, ...], reducer: str, value: Expr, over: tuple[Axis, ...], scope: Scope) -> Tile:
        """Returns the reduced value, repeated along the other axes only then: threads would reduce every copy."""
        folded = self._fold(self._widen(self.value(value, scope), over, scope), reducer, over)
        return self._widen(folded, axes, scope)

    def _store(self, tensor: str, indices: tuple[Axis, ...], value: Expr, scope: Scope) -> None:
        tile = self._widen(self.value(value, scope), indices, scope)
        present = tuple(a for a in indices if scope.windows[a].size != 1)
        order = tuple(tile.axes.index(a) for a in present)
        array = tile.array if order == tuple(range(len(order))) else lax.transpose(tile.array, order)
        array = jnp.asarray(array).reshape(tuple(scope.windows[a].size for a in indices))
        self.machine.store(tensor, indices, scope.windows, array)

    # --- buffers

    def _declare(self, s: Buffer, scope: Scope) -> None:
        sizes = dict(zip(s.axes, s.sizes, strict=True))
        held = {a: DynamicSlice(scope.windows[a].start, sizes[a], False) for a in self._union(s.axes)}
        shape = tuple(w.size for w in held.values() if w.size != 1)
        array = jnp.full(shape, self.value(s.init, scope).array, jnp.dtype(s.dtype))
        scope.buffers[s.name] = Memory(array, held, s.dtype)

    def _get(self, memory: Memory, scope: Scope) -> Tile:
        if memory.is_whole(scope.windows):
            return Tile(memory.array, memory.axes)
        sizes = [scope.windows[a].size for a in memory.axes]
        part = lax.dynamic_slice(memory.array, memory.starts(scope.windows), sizes, allow_negative_indices=False)
        present = tuple(a for a, n in zip(memory.axes, sizes, strict=True) if n != 1)
        return Tile(part.reshape([n for n in sizes if n != 1]), present)

    def _set(self, memory: Memory, axes: tuple[Axis, ...], value: Expr, scope: Scope) -> Memory:
        tile = self._widen(self.value(value, scope), axes, scope)
        part = lax.convert_element_type(jnp.asarray(tile.array), jnp.dtype(memory.dtype))
        if not memory.is_whole(scope.windows):
            part = part.reshape([scope.windows[a].size for a in memory.axes])
            starts = memory.starts(scope.windows)
            part = lax.dynamic_update_slice(memory.array, part, starts, allow_negative_indices=False)
        return replace(memory, array=part)

    # --- loops

    def _loop(self, loop: Loop, scope: Scope) -> None:
        state = self.initial_state(loop, scope)
        for segment in reversed(loop.segments) if loop.backwards else loop.segments:
            start, stop = self.value(segment.start, scope).array, self.value(segment.stop, scope).array
            trip = functools.partial(self.trip, loop, segment, scope)
            if loop.backwards:
                trip = functools.partial(_mirrored, trip, start + stop - 1)
            state = self.machine.loop(start, stop, trip, state)
        self.bind_state(loop, self.after_trips(loop, state, scope), scope)

    def initial_state(self, loop: Loop, scope: Scope) -> tuple[Array, ...]:
        """Returns the values that the loop carries before its first trip, then the buffers that it writes.

        Makes the loop's bounds known to `trip`.
        """
        for bound in (loop.first, loop.to_visit, loop.origin):
            self.value(bound, scope)
        state: tuple[Array, ...] = ()
        for carry in loop.carries:
            initial = self.value(carry.init, scope)
            if initial.axes:
                tile = self._widen(initial, carry.axes, scope)
                state += (lax.convert_element_type(tile.array, jnp.dtype(carry.dtype)),)
            else:
                shape = tuple(scope.windows[a].size for a in self._present(carry, scope))
                state += (jnp.full(shape, initial.array, jnp.dtype(carry.dtype)),)
        return (*state, *(scope.buffers[name].array for name in _written(loop, scope)))

    def trip(
        self, loop: Loop, segment: Segment, scope: Scope, number: Array, state: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        """One trip of a segment: the carried values after it, and the buffers that the loop writes."""
        axis = loop.axis
        first, total = self.value(loop.first, scope), self.value(loop.to_visit, scope)
        inner = scope.nested()
        begin = jnp.int32(segment.offset) + number * jnp.int32(segment.tile)
        if loop.origin is not ZERO:
            begin = self.value(loop.origin, scope).array + begin
        inner.windows[axis] = DynamicSlice(begin, segment.tile, segment.edge)
        done = begin - first.array
        after = jnp.minimum(done + jnp.int32(segment.tile), jnp.int32(axis.extent) - first.array)
        seen = self.visited_by_state(done, after, inner.windows[axis])
        inner.names |= {before(axis): Tile(done, ()), visited(axis): seen, to_visit(axis): total}
        inner.names[block_start(axis)] = Tile(begin, ())
        self.bind_state(loop, state, inner)
        self.run(segment.body, inner)
        carried = (self._widen(inner.names[c.next_name], self._present(c, scope), inner).array for c in loop.carries)
        return (*carried, *(inner.buffers[name].array for name in _written(loop, scope)))

    def after_trips(self, loop: Loop, state: tuple[Array, ...], scope: Scope) -> tuple[Array, ...]:
        """Returns what a loop leaves, made of what it carries after its last trip."""
        return state

    def visited_by_state(self, done: Array, after: Array, window: DynamicSlice) -> Tile:
        """Returns of how many positions a carried state is after a trip.

        done, after: the positions that were visited before the trip, and those after it; window: those of the trip.
        """
        return Tile(after, ())

    def bind_state(self, loop: Loop, state: tuple[Array, ...], scope: Scope) -> None:
        """Give the carried values their names, and the buffers what they hold."""
        for carry, array in zip(loop.carries, state, strict=False):
            scope.names[carry.name] = Tile(array, self._present(carry, scope))
        for name, array in zip(_written(loop, scope), state[len(loop.carries) :], strict=True):
            scope.buffers[name] = replace(scope.buffers[name], array=array)

    def _present(self, carry: Carry, scope: Scope) -> tuple[Axis, ...]:
        """Returns the axes of which a carried value has several positions, in canonical order."""
        return self._union(tuple(a for a in carry.axes if scope.windows[a].size != 1))


def _mirrored(trip: Callable[..., tuple[Array, ...]], ends: Array, number: Array, state: Any) -> tuple[Array, ...]:
    """The trip that is as far from the end as `number` is from the start; `ends`: the sum of the first and the last number."""
    return trip(ends - number, state)


def _written(loop: Loop, scope: Scope) -> list[str]:
    """The buffers around a loop that it writes, and therefore carries."""
    return [n for n in dict.fromkeys(n for g in loop.segments for n in sets(g.body)) if n in scope.buffers]
