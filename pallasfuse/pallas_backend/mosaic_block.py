"""Emits one thread block: computing warpgroups, and a memory warpgroup that keeps their slots of shared memory full.

A slot is full when the copy engine has written it, and empty when all its readers are done with it.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallasfuse.emission.interpreter import Array, DynamicSlice, Scope, Tile
from pallasfuse.emission.pallas_kernel import block_starts
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr
from pallasfuse.ir.tile_program import Contract, Load, Statement, block_start, expressions
from pallasfuse.pallas_backend.mosaic_compute import Computing, Product, Staged
from pallasfuse.pallas_backend.mosaic_shape import WARPGROUP_ROWS, Slices, Trip, present, trip_of
from pallasfuse.pallas_backend.mosaic_space import THREADS, VERDICT

if TYPE_CHECKING:
    from pallasfuse.pallas_backend.mosaic_gpu import Kernel

WARPGROUP, BLOCK, ASSIGNMENT = "warpgroup", "block", "assignment"
MEMORY_REGISTERS = 40


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a warpgroup: trip `now` of [start, stop), in a block before which it has made `done` trips."""

    done: Any
    start: Any
    stop: Any
    now: Any

    def slot(self, stages: int, slices: int = 1, number: Any = 0) -> Any:
        """Returns the slot that holds the streamed operands of the trip; of operands that come in slices, the slice `number`."""
        return lax.rem((self.done + self.now - self.start) * slices + number, jnp.int32(stages))

    @property
    def is_last(self) -> Any:
        return self.now == self.stop - 1

    @property
    def following(self) -> "Position":
        return replace(self, now=self.now + 1)


class Block(Computing):
    """The statements of the program on the tiles of one warpgroup, and what the memory warpgroup does for them."""

    def __init__(
        self, kernel: "Kernel", refs: Mapping[str, Any], buffers: Mapping[str, Any], barriers: Mapping[str, Any]
    ) -> None:
        super().__init__(kernel, buffers, lax.axis_index(WARPGROUP))
        self.kernel, self.refs = kernel, refs
        self.full, self.empty, self.turn, self.verdict = (barriers[n] for n in ("full", "empty", "turn", "verdict"))
        self.position = Position(0, 0, 0, 0)
        late = frozenset(t for s in self.shape.after for e in expressions(s) for t in e.tensors)
        late |= frozenset(kernel.staging.values())
        self.late = tuple(s.name for s in self.shape.resident if s.name in late or s in self.shape.after)
        """Resident operands that are still read after the loop."""
        trips = [trip_of(self.shape, g) for g in self.shape.segments]
        self.kind = trips[0]
        """The products and loads of the current trip's segment."""
        self.kinds = trips
        several = bool(self.kind.starts and self.kind.ends) and self.program.stages > 1 and not self.shape.slices
        alike = all(_order(t) == _order(self.kind) for t in trips)
        # with one slot, the warpgroup that is behind would wait for a tile that the other, which waits for it, has not asked for
        self.takes_turns = several and alike and self.program.alternate and self.shape.warpgroups == 2
        """The turn passes on when the first products of a trip are issued, and must have come before the last ones are."""
        self.ahead = self.kind.ahead if several and alike and self.program.ahead else ()
        eager = several and alike and self.program.eager and not self.ahead
        self.awaited = tuple(s for s in self.kind.ahead if isinstance(s, Load)) if eager else ()
        """Streamed operands of the first products: a trip awaits those of the next one while its last products run."""
        self.early: tuple[Array, ...] = ()
        """The products of the current trip that are there already; then, those of the next one."""

    # --- blocks

    def compute(self, other: "Block | None" = None) -> None:
        """Emits what a computing warpgroup does. other: the blocks of the program that may have to be run instead."""
        groups = self.shape.warpgroups
        available = min(256, (512 - MEMORY_REGISTERS) // groups)
        plgpu.set_max_registers(available // 8 * 8, action="increase")
        for load in (*self.shape.streamed, *self.shape.sliced):
            for slot in range(self.kernel.slots[load.name]):
                plgpu.barrier_arrive(self.empty[load.name].at[slot])
        self._release(s.name for s in self.shape.resident)
        if self.takes_turns:
            pl.when(self.warpgroup == 1)(self._pass_the_turn)
        trips, measures = self._each_block(self._compute_block, (self._none(), self._no_measures()))
        if other is not None:
            assert other.takes_turns == self.takes_turns
            limit = jnp.float32(self.program.instead.limit)  # type: ignore[union-attr]
            mine = (jnp.max(measures[0]) >= limit).astype(jnp.int32)
            board = self.buffers[VERDICT].at[self.warpgroup]
            board[...] = jnp.broadcast_to(mine, (THREADS,))
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.verdict)

            def again() -> None:
                plgpu.wait_smem_to_gmem(0)
                other._each_block(other._compute_block, (trips, ()))

            pl.when(self._is_in_doubt())(again)
        if self.takes_turns:
            pl.when(self.warpgroup == 0)(self._await_the_turn)
        plgpu.wait_smem_to_gmem(0)

    def copy(self, other: "Block | None" = None) -> None:
        """Emits what the memory warpgroup does. other: as for `compute`."""
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        trips = self._each_block(self._copy_block, self._none())
        if other is not None:

            def again() -> None:
                other._each_block(other._copy_block, trips)

            pl.when(self._is_in_doubt())(again)
        for name, count in self.kernel.slots.items():
            for slot in range(count):
                plgpu.barrier_wait(self.empty[name].at[slot])

    def _is_in_doubt(self) -> Array:
        """Says whether a warpgroup has seen a measure that asks for the other program."""
        plgpu.barrier_wait(self.verdict)
        board = self.buffers[VERDICT]
        return sum(board[n, 0] for n in range(self.shape.warpgroups)) > 0

    def _none(self) -> Array:
        """Zero trips, as a value of the kernel: conditionals take no constants."""
        return lax.axis_index(BLOCK) * 0

    def _no_measures(self) -> tuple[Array, ...]:
        return (jnp.zeros((WARPGROUP_ROWS,), jnp.float32),) if self.program.instead is not None else ()

    def _each_block(self, body: Callable[[Array, Any], Any], state: Any) -> Any:
        """`body(number, state)` for every grid block of this instance; gives the state after it."""
        total, instances = self.kernel.blocks, self.kernel.instances
        first = lax.axis_index(BLOCK)
        if instances == total:
            return body(first, state)
        if self.kernel.assignment is None:
            count = total // instances + (first < total % instances).astype(jnp.int32)
            return lax.fori_loop(0, count, lambda n, state: body(first + n * instances, state), state)
        table = self.refs[ASSIGNMENT]

        def step(n: Array, state: tuple[Array, Any]) -> tuple[Array, Any]:
            number, inner = state
            following = table[first, n + 2]  # on its way while the block runs
            return following, body(number, inner)

        return lax.fori_loop(0, table[first, 0], step, (table[first, 1], state))[1]

    def _scope(self, number: Array, warpgroup: Any = None) -> Scope:
        """Returns the windows and block starts of a grid block, or of one warpgroup's part of it."""
        starts = block_starts(self.program, number)
        names = {block_start(a): Tile(s, ()) for a, s in starts.items()}
        windows = {a: DynamicSlice(starts.get(a, 0), t, a.extent % t != 0) for a, t in self.program.tiles}
        if warpgroup is not None:
            rows = self.shape.rows
            start = starts[rows] + warpgroup * WARPGROUP_ROWS
            windows[rows] = DynamicSlice(start, WARPGROUP_ROWS, windows[rows].overhangs)
        return Scope(windows, names)

    def _bounds(self, scope: Scope) -> tuple[Array, Array]:
        none = self._none()
        start, stop = (
            none + jnp.int32(self.value(e, scope).array)
            for e in (self.shape.segments[0].start, self.shape.segments[-1].stop)
        )
        return start, jnp.maximum(start, stop)

    def _compute_block(self, number: Array, before: tuple[Array, tuple[Array, ...]]) -> tuple[Array, tuple[Array, ...]]:
        """before, and the result: how many trips there were before it, and the largest measures of rows so far."""
        trips, measures = before
        shape, scope = self.shape, self._scope(number, self.warpgroup)
        start, stop = self._bounds(scope)
        self.run(shape.before, scope)
        self.position = Position(trips, start, stop, start)
        pl.when(start < stop)(functools.partial(self._await, self.awaited, self.position))
        self._await_the_turn()
        state = (self.initial_state(shape.loop, scope), self._first_products(scope))

        for kind in self.kinds:

            def step(n: Array, state: Any, kind: Trip = kind) -> Any:
                self.kind, self.position, self.early = kind, Position(trips, start, stop, n), state[1]
                carried = self.trip(shape.loop, kind.segment, scope, n, state[0])
                return carried, self.early

            first, last = (jnp.int32(self.value(e, scope).array) for e in (kind.segment.start, kind.segment.stop))
            state = lax.fori_loop(first, last, step, state)
        if not self.ahead:
            self._pass_the_turn()
        pl.when(start == stop)(lambda: self._release(s.name for s in shape.resident if s.name not in self.late))
        self.bind_state(shape.loop, state[0], scope)
        if self.program.instead is not None:
            measures = (jnp.maximum(measures[0], self.value(self.program.instead.measure, scope).array),)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the last block
        self.run(shape.after, scope)
        if self.kernel.staging:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self._release(self.late)
        return trips + stop - start, measures

    def _copy_block(self, number: Array, trips: Array) -> Array:
        scope = self._scope(number)
        start, stop = self._bounds(scope)

        def begin(n: Array) -> None:
            position, windows = Position(trips, start, stop, n), self._windows(n, scope)
            for load in self.shape.streamed:
                self._copy(load, Scope(windows, {}), position.slot(self.program.stages))
            for slices in self.shape.slices[:1]:
                self._copy_slices(slices, position, windows, 0, self._early_slices(slices))

        def go_on(n: Array) -> None:
            position, windows = Position(trips, start, stop, n), self._windows(n, scope)
            for slices in self.shape.slices:
                first = self._early_slices(slices) if slices is self.shape.slices[0] else 0
                self._copy_slices(slices, position, windows, first, slices.count)

        def step(n: Array, _: None) -> None:
            begin(n)
            go_on(n)

        pl.when(start < stop)(lambda: begin(start))  # before what waits for the end of the last block
        self._copy_resident(number, self.shape.before)
        if self.shape.slices:
            pl.when(start < stop)(lambda: go_on(start))
        lax.fori_loop(start + 1, stop, step, None)
        self._copy_resident(number, self.shape.after)
        return trips + stop - start

    def _windows(self, n: Array, scope: Scope) -> dict[Axis, DynamicSlice]:
        axis, tile = self.shape.loop.axis, self.shape.segments[0].tile
        return scope.windows | {axis: DynamicSlice(n * tile, tile, False)}

    def _early_slices(self, slices: Slices) -> int:
        """Returns the number of slices that wait for nothing of their own trip: at most as many as there are slots."""
        return min(self.program.stages, slices.count)

    def _copy_slices(
        self, slices: Slices, position: "Position", windows: Mapping[Axis, DynamicSlice], first: int, last: int
    ) -> None:
        def step(n: Array, _: None) -> None:
            here = dict(windows) | {slices.axis: DynamicSlice(n * slices.size, slices.size, False)}
            for load in slices.loads:
                self._copy(load, Scope(here, {}), position.slot(self.program.stages, slices.count, n))

        lax.fori_loop(first, last, step, None)

    def _copy_resident(self, number: Array, body: tuple[Statement, ...]) -> None:
        for warpgroup in range(self.shape.warpgroups):
            for load in (s for s in self.shape.resident if s in body):
                self._copy(load, self._scope(number, warpgroup), warpgroup)

    # --- what travels

    def _copy(self, load: Load, scope: Scope, slot: Any) -> None:
        plgpu.barrier_wait(self.empty[load.name].at[slot])
        place = self._place(load.tensor, load.indices, scope)
        plgpu.copy_gmem_to_smem(place, self._slot(load.name, slot), self.full[load.name].at[slot])

    def _slot(self, name: str, number: Any) -> Any:
        return self.kernel.slot(self.buffers, name, number)

    def _place(self, tensor: str, indices: tuple[Axis, ...], scope: Scope) -> Any:
        """The current tile of an array in global memory."""
        at = []
        for axis in indices:
            window = scope.windows[axis]
            at.append(window.start if window.size == 1 else pl.ds(window.start, window.size))
        return self.refs[tensor].at[tuple(at)]

    def _release(self, names: Iterable[str]) -> None:
        """Resident operands of this warpgroup."""
        for name in names:
            self._arrive(name, self.warpgroup)

    def _arrive(self, name: str, slot: Any) -> None:
        """This warpgroup is done with what lies there."""
        if name in self.in_registers:
            plgpu.commit_smem()  # what was read comes before what the copy engine writes
        plgpu.barrier_arrive(self.empty[name].at[slot])

    def run(self, body: tuple[Statement, ...], scope: Scope) -> None:
        for statement in body:
            if statement in self.ahead:
                if isinstance(statement, Contract):
                    index = [s for s in self.ahead if isinstance(s, Contract)].index(statement)
                    scope.names[statement.name] = Tile(self.early[index], self._axes(statement))
                continue
            if self.interpret or not any(statement is total for total, _ in self.kind.accumulated.values()):
                super().run((statement,), scope)
            self._done(statement, self.position)

    def _done(self, statement: Statement, position: "Position") -> None:
        """Let go of what was read for the last time."""
        for load in self.kind.last_reader.get(statement, ()):
            if load in self.shape.streamed:
                self._arrive(load.name, position.slot(self.program.stages))
            elif load.name not in self.late:
                pl.when(position.is_last)(functools.partial(self._release, [load.name]))

    def _load(self, statement: Load, scope: Scope) -> None:
        kept = present(self.program, statement.indices)
        if statement in self.shape.sliced:
            return
        if kept:
            scope.names[statement.name] = self._staged(statement, kept, self.position)
        else:
            at = tuple(scope.windows[a].start for a in statement.indices)
            scope.names[statement.name] = Tile(self.refs[statement.tensor][at or (0,)], ())

    def _staged(self, load: Load, kept: tuple[Axis, ...], position: "Position") -> Tile:
        streamed = load in self.shape.streamed
        slot = position.slot(self.program.stages) if streamed else self.warpgroup
        if load not in self.awaited:
            plgpu.barrier_wait(self.full[load.name].at[slot])
        if streamed:
            return Tile(self._mine(load, slot), kept)
        return Tile(Staged(self._slot(load.name, slot), kept), kept)

    def _mine(self, load: Load, slot: Any) -> Staged:
        """Returns this warpgroup's part of what lies in a slot of a streamed operand."""
        kept, ref = present(self.program, load.indices), self._slot(load.name, slot)
        if self.shape.rows in kept:
            mine = pl.ds(self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
            ref = ref.at[tuple(mine if a == self.shape.rows else slice(None) for a in kept)]
        return Staged(ref, kept)

    def _await(self, loads: tuple[Load, ...], position: "Position") -> None:
        for load in loads:
            plgpu.barrier_wait(self.full[load.name].at[position.slot(self.program.stages)])

    def _store(self, tensor: str, indices: tuple[Axis, ...], value: Expr, scope: Scope) -> None:
        tile = self._widen(self.value(value, scope), indices, scope)
        if tensor in self.kernel.direct:
            place = self._place(tensor, indices, scope)
            place[...] = tile.array.astype(self.refs[tensor].dtype)
            return
        buffer = self._slot(self.kernel.staging.get(tensor, tensor), self.warpgroup)
        buffer[...] = tile.array.astype(buffer.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, self._place(tensor, indices, scope))

    # --- products, and whose turn it is

    def _contract(self, statement: Contract, scope: Scope) -> None:
        for slices in self.shape.slices:
            if slices.product == statement.name:
                axes = self._axes(statement)
                scope.names[statement.name] = Tile(self._sum_of_slices(slices, self._size(axes)), axes)
                return
        (contracted,) = present(self.program, statement.over)
        axes = self._axes(statement)
        left, right = self._left(statement, contracted, scope), self._right(statement.rhs, scope).oriented(contracted)
        target = self.kind.accumulated.get(statement.name) if not self.interpret else None
        start = None if target is None else self._widen(self.value(target[1], scope), axes, scope).array
        if self.takes_turns and statement.name == self.kind.ends[0]:
            start, left = self._settle(start, left, scope)
            self._await_the_turn()
        product = Product(self._size(axes), start, left, right)
        if self.ahead and statement.name == self.kind.ends[-1]:
            result, *early = self._with_the_next(product, scope)
            self.early = tuple(early)
        else:
            (result,) = self._at_once([product], functools.partial(self._issued, statement))
        scope.names[statement.name if target is None else target[0].name] = Tile(result, axes)

    def _sum_of_slices(self, slices: Slices, size: tuple[int, int]) -> Array:
        """A product whose operands come slice by slice. The other warpgroup multiplies while this one waits for its own product."""

        def multiply(total: Any) -> Array:
            def step(n: Array, _: None) -> None:
                slot = self.position.slot(self.program.stages, slices.count, n)
                for load in slices.loads:
                    plgpu.barrier_wait(self.full[load.name].at[slot])
                left, right = self._mine(slices.lhs, slot), self._mine(slices.rhs, slot)
                plgpu.wgmma(total, left.oriented(self.shape.rows), right.oriented(slices.axis))
                plgpu.wgmma_wait(0)
                for load in slices.loads:
                    plgpu.barrier_arrive(self.empty[load.name].at[slot])

            lax.fori_loop(0, slices.count, step, None)
            return total[...]

        return pl.run_scoped(multiply, plgpu.ACC(size, jnp.float32))  # type: ignore[attr-defined]

    def _issued(self, statement: Contract) -> None:
        """Uses the time of a product that was just issued: passes the turn on, or awaits the operands of the next trip."""
        if self.kind.starts and statement.name == self.kind.starts[-1]:
            self._pass_the_turn()
        if self.awaited and statement.name == self.kind.ends[-1]:
            following = self.position.following
            pl.when(jnp.logical_not(self.position.is_last))(functools.partial(self._await, self.awaited, following))

    def _early_products(self, scope: Scope, position: "Position") -> list[Product]:
        """Returns the products that a trip can begin with before the one before it has ended."""
        names = dict(scope.names)
        found = []
        for statement in self.ahead:
            if isinstance(statement, Load):
                names[statement.name] = self._staged(statement, present(self.program, statement.indices), position)
            elif isinstance(statement, Contract):
                (contracted,) = present(self.program, statement.over)
                inner = Scope(scope.windows, names)
                left = self._right(statement.lhs, inner).oriented(self.shape.rows)
                right = self._right(statement.rhs, inner).oriented(contracted)
                found.append(Product(self._size(self._axes(statement)), None, left, right))
        return found

    def _first_products(self, scope: Scope) -> tuple[Array, ...]:
        contracts = [s for s in self.ahead if isinstance(s, Contract)]
        if not contracts:
            return ()

        def multiply() -> tuple[Array, ...]:
            results = self._at_once(self._early_products(scope, self.position))
            for statement in self.ahead:
                self._done(statement, self.position)
            return tuple(results)

        def zeros() -> tuple[Array, ...]:
            return tuple(jnp.zeros(self._size(self._axes(s)), jnp.float32) for s in contracts)

        results: tuple[Array, ...] = lax.cond(self.position.start < self.position.stop, multiply, zeros)
        self._pass_the_turn()
        return results

    def _with_the_next(self, product: Product, scope: Scope) -> list[Array]:
        """The last product of a trip, and the first ones of the next trip if there is one."""
        following = self.position.following

        def both() -> list[Array]:
            results = self._at_once([product, *self._early_products(scope, following)], self._pass_the_turn)
            for statement in self.ahead:
                self._done(statement, following)
            return results

        def alone() -> list[Array]:
            sizes = [self._size(self._axes(s)) for s in self.ahead if isinstance(s, Contract)]
            return [*self._at_once([product], self._pass_the_turn), *(jnp.zeros(n, jnp.float32) for n in sizes)]

        result: list[Array] = lax.cond(self.position.is_last, alone, both)
        return result

    def _settle(self, start: Any, left: Any, scope: Scope) -> tuple[Any, Any]:
        """The operands of a product, computed before the turn comes, and with them what the loop carries on."""
        carried = [c.next_name for c in self.shape.loop.carries if c.next_name in scope.names]
        arrays = {n: scope.names[n].array for n in carried}
        arrays |= {n: v for n, v in (("", start), (".", left)) if isinstance(v, jax.Array)}
        arrays = _kept_in_order(arrays)
        scope.names.update({n: Tile(arrays[n], scope.names[n].axes) for n in carried})
        return arrays.get("", start), arrays.get(".", left)

    def _pass_the_turn(self) -> None:
        """Let the other warpgroup multiply."""
        if self.takes_turns:
            plgpu.barrier_arrive(self.turn.at[1 - self.warpgroup])

    def _await_the_turn(self) -> None:
        if self.takes_turns:
            plgpu.barrier_wait(self.turn.at[self.warpgroup])


def _kept_in_order(arrays: dict[str, Array]) -> dict[str, Array]:
    """Passes the values through one barrier of the optimiser, which keeps them in order.

    Mosaic's barrier takes half precision in pairs only: a row's value lies alone in its register, and passes as float32, which
    holds it exactly.
    """
    alone = {n: a.dtype for n, a in arrays.items() if a.ndim == 1 and a.dtype.itemsize < 4}
    passed = lax.optimization_barrier({n: a.astype(jnp.float32) if n in alone else a for n, a in arrays.items()})
    return {n: a.astype(alone[n]) if n in alone else a for n, a in passed.items()}


def _order(trip: Trip) -> tuple[object, ...]:
    """Returns what the trips of all segments must have in common to take turns, and to look ahead."""
    return trip.starts, trip.ends, trip.ahead, [trip.last_reader.get(s) for s in trip.ahead]
