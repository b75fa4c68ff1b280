"""Emits what one block of a cluster computes: vectors of a tile in registers, states as one number for each part.

In a loop every thread has states of its own, of the elements that it has of each tile, and waits for no other: how states are
merged is the same for any share of a row. After the last trip comes one without elements, in which the threads meet: what frames
are made of is reduced over all of them, each moves its states to the frames of all, and they are reduced in turn.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallasfuse.emission.elementwise import REDUCTIONS, TABLE
from pallasfuse.emission.interpreter import Array, DynamicSlice, Interpreter, Scope, Tile
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Expr
from pallasfuse.ir.reducers import REDUCERS
from pallasfuse.ir.tile_program import (
    Let,
    Load,
    Loop,
    Reduce,
    Segment,
    TileProgram,
    before,
    to_visit,
    visited,
)
from pallasfuse.pallas_backend import mosaic_code
from pallasfuse.pallas_backend.cluster_rules import merging
from pallasfuse.pallas_backend.mosaic_space import THREADS
from pallasfuse.resources.exponentials import by_instruction

if TYPE_CHECKING:
    from pallasfuse.pallas_backend.cluster_gpu import Block

PART = "part"
OF_THREADS = Axis("threads", THREADS)
"""The axis of vectors that have one element for every thread."""


class _Machine:
    """The operations of one block that the interpreter asks for."""

    def __init__(self, phase: "Phase") -> None:
        self.phase, self.block = phase, phase.block

    def load(self, tensor: str, indices: tuple[Axis, ...], windows: Mapping[Axis, DynamicSlice], again: str) -> Array:
        block, rolled = self.block, self.block.shape.rolled
        if rolled not in indices:
            return block.arrays[tensor][block.at(indices)]
        window, slot = windows[rolled], self.phase.slot
        if tensor not in block.full:  # it is padded with zeros
            return self.phase.laid_out(block.arrays[tensor][pl.ds(window.start, window.size)])
        if tensor not in block.awaited:
            plgpu.barrier_wait(block.full[tensor].at[slot])
        value = self.phase.laid_out(block.memory[tensor][slot])
        if not window.overhangs:
            return value
        inside = self.phase.positions(window) < rolled.extent
        return jnp.where(inside, value, jnp.zeros_like(value))

    def store(self, tensor: str, indices: tuple[Axis, ...], windows: Mapping[Axis, DynamicSlice], value: Array) -> None:
        block, rolled = self.block, self.block.shape.rolled
        if rolled not in indices:

            def write() -> None:
                block.arrays[tensor][block.at(indices)] = value

            write() if block.shape.part is None else pl.when(block.part == 0)(write)
            return
        window, slot = windows[rolled], self.phase.slot
        buffer = block.memory[block.shape.buffers[tensor]].at[slot]
        buffer[...] = value
        plgpu.commit_smem()
        size = block.shape.rest if window.overhangs else window.size
        source = buffer if size == window.size else buffer.at[pl.ds(0, size)]
        plgpu.copy_smem_to_gmem(source, block.arrays[tensor].at[block.at(indices, pl.ds(window.start, size))])

    def pin(self, value: Array) -> Array:
        return lax.optimization_barrier(value) if value.dtype == jnp.float32 else value  # a cast has rounded the others

    def loop(
        self, start: Array, stop: Array, body: Callable[[Array, tuple[Array, ...]], tuple[Array, ...]],
        init: tuple[Array, ...],
    ) -> tuple[Array, ...]:  # fmt: skip
        result: tuple[Array, ...] = lax.fori_loop(jnp.int32(start), jnp.int32(stop), body, init)
        return result


class Phase(Interpreter):
    """One phase in one block. Along the axis of parts, a tile's array is a list of numbers."""

    def __init__(self, block: "Block", program: TileProgram, number: int) -> None:
        self.block, self.number = block, number
        super().__init__(program, _Machine(self))  # type: ignore[arg-type]
        self.shape = block.shape
        self.slot: Any = 0
        """The slot of the current trip."""
        self.left: dict[str, Array] = {}
        """The states that the phase leaves."""
        self.by_threads = False
        """Has every thread states of its own? While a loop carries any."""
        self.rank[OF_THREADS] = len(self.rank)
        rounded = block.shape.approximate and not block.interpret
        self.by_instruction = by_instruction(program, rounded=True) if rounded else frozenset()

    def run_block(self, starts: Mapping[Axis, Array]) -> None:
        super().run_block(starts)
        if self.left:
            self._exchange()

    # --- vectors

    def laid_out(self, value: Array) -> Array:
        return plgpu.layout_cast(value, self._layout())

    def _layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.shape.tile,), vec_size=self.shape.vector)

    def positions(self, window: DynamicSlice) -> Array:
        return plgpu.broadcasted_iota(jnp.int32, (window.size,), 0, layout=self._layout()) + window.start

    def _position(self, axis: Axis, dtype: str, scope: Scope) -> Tile:
        if axis == self.shape.rolled:
            return Tile(self.positions(scope.windows[axis]).astype(jnp.dtype(dtype)), (axis,))
        if axis == self.shape.parts:
            return Tile([jnp.array(n, jnp.dtype(dtype)) for n in range(self.shape.blocks)], (axis,))
        return super()._position(axis, dtype, scope)

    def _apply(self, op: str, args: list[Tile], node: Apply, dtype: str) -> Tile:
        parts = self.shape.parts
        if any(parts in t.axes for t in args):
            each = ([Tile(t.array[n], ()) if parts in t.axes else t for t in args] for n in range(self.shape.blocks))
            return Tile([super(Phase, self)._apply(op, own, node, dtype).array for own in each], (parts,))  # type: ignore[arg-type]
        if any(self.shape.rolled in t.axes for t in args):
            args = [self._along_tile(t) for t in args]
        if node in self.by_instruction and args[0].axes:
            x = args[0]
            layout = mosaic_code.BY_THREADS if OF_THREADS in x.axes else self._layout()
            array = plgpu.layout_cast(x.array, layout)
            return Tile(mosaic_code.approximately(op, array, layout), x.axes)
        return super()._apply(op, args, node, dtype)

    def _along_tile(self, tile: Tile) -> Tile:
        """Repeats what every thread has for all its elements of a tile."""
        if OF_THREADS not in tile.axes:
            return tile
        size, vector = self.shape.tile, self.shape.vector
        if self.block.interpret:
            array = jnp.broadcast_to(tile.array[None, :, None], (size // (THREADS * vector), THREADS, vector))
            return Tile(array.reshape((size,)), (self.shape.rolled,))
        return Tile(mosaic_code.repeated_by_threads(tile.array, size, vector), (self.shape.rolled,))

    def _of_threads(self, array: Array) -> Array:
        """Returns a vector with an element for each thread: itself, or that of a number that all have."""
        return array if jnp.ndim(array) else plgpu.layout_cast(jnp.full((THREADS,), array), mosaic_code.BY_THREADS)

    # --- states

    def _load(self, statement: Load, scope: Scope) -> None:
        parts = self.shape.parts
        if parts is None or parts not in statement.indices:
            array = self.machine.load(statement.tensor, statement.indices, scope.windows, statement.again)
            scope.names[statement.name] = Tile(array, tuple(a for a in statement.indices if a == self.shape.rolled))
            return
        board, place = self.block.kernel.states[statement.tensor]
        ref = self.block.boards[board]
        rows = (self.block.row,) if self.block.interpret else ()
        values = [ref[(*rows, place + n)].astype(jnp.dtype(statement.dtype)) for n in range(self.shape.blocks)]
        scope.names[statement.name] = Tile(values, (parts,))

    def _widen(self, tile: Tile, axes: tuple[Axis, ...], scope: Scope) -> Tile:
        parts = self.shape.parts
        if parts in tile.axes:
            return tile
        if OF_THREADS in tile.axes:
            return self._along_tile(tile) if self.shape.rolled in axes else tile
        if parts in axes:
            return Tile([tile.array] * self.shape.blocks, (parts,))  # type: ignore[arg-type]
        return super()._widen(tile, axes, scope)

    def _fold(self, tile: Tile, reducer: str, over: tuple[Axis, ...]) -> Tile:
        if self.shape.parts in tile.axes:
            return Tile(functools.reduce(TABLE[REDUCERS[reducer].combine], tile.array), ())
        if not self.by_threads or self.shape.rolled not in tile.axes:
            return super()._fold(tile, reducer, over)
        vector = self.shape.vector
        if self.block.interpret:
            found = REDUCTIONS[reducer](tile.array.reshape((-1, THREADS, vector)), (0, 2))
        else:
            found = mosaic_code.reduced_by_threads(self.laid_out(tile.array), REDUCERS[reducer].combine, vector)
        return Tile(found, (OF_THREADS,))

    def _store(self, tensor: str, indices: tuple[Axis, ...], value: Expr, scope: Scope) -> None:
        if tensor in self.block.kernel.states:
            self.left[tensor] = self.value(value, scope).array
            return
        tile = self._widen(self.value(value, scope), indices, scope)
        self.machine.store(tensor, indices, scope.windows, jnp.asarray(tile.array))

    def _exchange(self) -> None:
        """Gives the states to all blocks, and waits for theirs."""
        kernel, block = self.block.kernel, self.block
        boards = dict.fromkeys(kernel.states[name][0] for name in self.left)
        if not self.number and not block.interpret:
            mosaic_code.await_preparation()
        for board in boards:
            own = [n for n in self.left if kernel.states[n][0] == board]
            places = [kernel.states[n][1] for n in own]
            values = [jnp.asarray(self.left[n]).astype(kernel.types[board]) for n in own]
            if block.interpret:
                for place, value in zip(places, values, strict=True):
                    block.boards[board][block.row, place + block.part] = value
            else:
                mosaic_code.tell_cluster(
                    block.boards[board], places, block.part, values, block.met, self.number, self.shape.blocks
                )
        if block.interpret:
            plgpu.barrier_arrive(block.met[self.number])
            plgpu.barrier_wait(block.met[self.number])
        else:
            mosaic_code.meet(block.met, self.number)

    # --- loops

    def _loop(self, loop: Loop, scope: Scope) -> None:
        self.by_threads = bool(loop.carries)
        super()._loop(loop, scope)
        self.block.awaited |= {s.tensor for g in loop.segments for s in g.body if isinstance(s, Load)}

    def trip(
        self, loop: Loop, segment: Segment, scope: Scope, number: Array, state: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        self.slot = number - self.block.part * self.shape.slots
        carried = super().trip(loop, segment, scope, number, state)
        return tuple(map(self._of_threads, carried)) if self.by_threads else carried

    def initial_state(self, loop: Loop, scope: Scope) -> tuple[Array, ...]:
        state = super().initial_state(loop, scope)
        return tuple(map(self._of_threads, state)) if self.by_threads else state

    def bind_state(self, loop: Loop, state: tuple[Array, ...], scope: Scope) -> None:
        super().bind_state(loop, state, scope)
        if self.by_threads:
            scope.names |= {c.name: Tile(scope.names[c.name].array, (OF_THREADS,)) for c in loop.carries}

    def visited_by_state(self, done: Array, after: Array, window: DynamicSlice) -> Tile:
        if not self.by_threads:
            return super().visited_by_state(done, after, window)
        if not window.overhangs:
            return Tile(after // THREADS, ())
        inside = jnp.where(self.positions(window) < self.shape.rolled.extent, jnp.float32(1), jnp.float32(0))
        own = self._fold(Tile(inside, (self.shape.rolled,)), "sum", (self.shape.rolled,)).array.astype(jnp.int32)
        return Tile(jnp.maximum(done // THREADS + own, 1), (OF_THREADS,))  # a thread of none divides nothing by it

    def after_trips(self, loop: Loop, state: tuple[Array, ...], scope: Scope) -> tuple[Array, ...]:
        """Returns the states of the block, which those of all threads become in a trip without elements.

        Its frames are made of what all threads have reduced."""
        if not self.by_threads:
            return state
        rolled, inner = self.shape.rolled, scope.nested()
        stop = self.value(loop.segments[-1].stop, scope).array
        first, total = self.value(loop.first, scope).array, self.value(loop.to_visit, scope)
        done = jnp.maximum(jnp.minimum(jnp.int32(stop) * self.shape.tile, rolled.extent) - first, 0)
        inner.names |= {
            before(rolled): Tile(done, ()),
            visited(rolled): Tile(jnp.maximum(done, 1), ()),
            to_visit(rolled): total,
        }
        self.bind_state(loop, state, inner)
        segment, reducers = loop.segments[0], merging(loop)
        for s in segment.body:
            match s:
                case Reduce(name, _, reducer, value):
                    nothing = jnp.array(reducer.identity(value.dtype), jnp.dtype(value.dtype))
                    inner.names[name] = Tile(self._of_threads(nothing), (OF_THREADS,))
                case Load() if rolled not in s.indices:
                    self.run((s,), inner)
                case Let() if rolled not in s.value.axes:
                    self.run((s,), inner)
                    tile, by = inner.names[s.name], reducers.get(s.name)
                    if by is not None:
                        assert tile.axes == (OF_THREADS,)
                        inner.names[s.name] = Tile(REDUCTIONS[by.name](tile.array, (0,)), ())
        self.by_threads = False  # from here on the loop's states are numbers of the block
        return tuple(inner.names[c.next_name].array for c in loop.carries)
