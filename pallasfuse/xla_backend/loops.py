"""TileProgram -> loops of XLA: the default on CPU, and the reference for the other backends.

Grid blocks run one after the other; each writes its part of the outputs in place. Tails are exact: the last grid block is
moved back so that it overlaps its neighbour (it computes the same values again), the last loop tile is smaller.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse.emission.elementwise import dot_precision
from pallasfuse.emission.interpreter import Array, DynamicSlice, Interpreter, Scope, Tile
from pallasfuse.emission.lookups import in_whole_blocks, tile_of
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.dtypes import is_integer
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read
from pallasfuse.ir.intervals import interval, within
from pallasfuse.ir.tile_orders import ranks, strided
from pallasfuse.ir.tile_program import Contract, Loop, Store, TileProgram, block_start, every


class _XlaMachine:
    """Whole arrays in memory; `outputs` is threaded through the grid loop."""

    def __init__(self, inputs: Mapping[str, jax.Array], outputs: dict[str, jax.Array], program: TileProgram) -> None:
        self.inputs, self.outputs, self.places = inputs, outputs, ranks(program)
        self.lookups = {x.result.name: (x, in_whole_blocks(program, x)) for x in program.lookups}
        self.stored: frozenset[str] = frozenset()
        """The outputs that the loop stores which is being run: it carries no others."""

    def load(self, tensor: str, indices: tuple[Axis, ...], windows: Mapping[Axis, DynamicSlice], again: str) -> Array:
        if tensor in self.lookups:
            lookup, whole = self.lookups[tensor]
            along = lookup.along and indices[lookup.result.axes.index(lookup.along)]
            return tile_of(lookup, self.inputs, indices, windows, by_blocks=along is None or along in whole)
        sizes = [windows[a].size for a in indices]
        # no position is negative, and each that might be costs three operations in every kernel
        return lax.dynamic_slice(self.inputs[tensor], _starts(indices, windows), sizes, allow_negative_indices=False)

    def store(self, tensor: str, indices: tuple[Axis, ...], windows: Mapping[Axis, DynamicSlice], value: Array) -> None:
        starts = _starts(indices, windows)
        self.outputs[tensor] = lax.dynamic_update_slice(
            self.outputs[tensor], value, starts, allow_negative_indices=False
        )

    def contract(self, lhs: Tile, rhs: Tile, over: tuple[Axis, ...], dtype: str, precision: str | None) -> Tile:
        left, right = (strided(t.axes, over, self.places, t.array.size) for t in (lhs, rhs))
        if right < left:
            lhs, rhs = rhs, lhs
        batch = tuple(a for a in lhs.axes if a in rhs.axes and a not in over)
        dims = tuple(tuple(t.axes.index(a) for a in group) for group in (over, batch) for t in (lhs, rhs))
        numbers = ((dims[0], dims[1]), (dims[2], dims[3]))
        out = lax.dot_general(
            lhs.array, rhs.array, numbers, precision=dot_precision(precision), preferred_element_type=jnp.dtype(dtype)
        )
        kept = [a for t in (lhs, rhs) for a in t.axes if a not in over and a not in batch]
        return Tile(out, (*batch, *kept))

    def pin(self, value: Array) -> Array:
        return lax.optimization_barrier(value)

    def _alike(self, values: tuple[Array, ...]) -> tuple[Array, ...]:
        """Inside a `shard_map`: typed to vary as the inputs do."""
        return tuple(_compat.varying_alike(values, tuple(self.inputs.values())))

    def loop(
        self,
        start: Array,
        stop: Array,
        body: Callable[[Array, tuple[Array, ...]], tuple[Array, ...]],
        init: tuple[Array, ...],
    ) -> tuple[Array, ...]:
        names = [n for n in self.outputs if n in self.stored]

        def step(trip: Array, state: tuple[tuple[Array, ...], tuple[Array, ...]]) -> Any:
            carried, written = state
            self.outputs = self.outputs | dict(zip(names, written, strict=True))
            carried = self._alike(body(trip, carried))
            return carried, self._alike(tuple(self.outputs[n] for n in names))

        carried: tuple[Array, ...]
        outputs = tuple(self.outputs[n] for n in names)
        carried, written = lax.fori_loop(start, stop, step, (self._alike(init), self._alike(outputs)))
        self.outputs = self.outputs | dict(zip(names, written, strict=True))
        return carried


class _XlaInterpreter(Interpreter):
    """As any interpreter, but XLA can take one element of a tile without a look at the others.

    Every kernel of a program is compiled where it is called: XLA copies what is called several times. How long that takes is the
    number of operations, most of which are scalars: so bounds of loops are written as shortly as can be.
    """

    def __init__(self, program: TileProgram, machine: _XlaMachine) -> None:
        super().__init__(program, machine)
        self.xla, self.rank = machine, machine.places
        self._products = {s.name for s in every(program.body) if isinstance(s, Contract)}
        self._known = {block_start(a): (0, max(0, a.extent - t)) for a, t in program.grid}
        for axis in {s.axis for s in every(program.body) if isinstance(s, Loop)} & {a for a, _ in program.grid}:
            self._known[block_start(axis)] = 0, axis.extent - 1  # of a block, and of every piece of it

    def initial_state(self, loop: Loop, scope: Scope) -> tuple[Array, ...]:
        for bound in (loop.first, loop.to_visit, loop.origin, *(b for s in loop.segments for b in (s.start, s.stop))):
            if bound not in scope.memo:
                scope.memo[bound] = self.value(within(bound, self._known), scope)
        return super().initial_state(loop, scope)

    def _loop(self, loop: Loop, scope: Scope) -> None:
        around, self.xla.stored = self.xla.stored, frozenset(_stored(loop))
        super()._loop(loop, scope)
        self.xla.stored = around

    def _store(self, tensor: str, indices: tuple[Axis, ...], value: Expr, scope: Scope) -> None:
        """Stores a tile; a product that is stored in another order is made in its own.

        XLA would exchange its sides instead, and read the larger one in strides.
        """
        if isinstance(value, Read) and value.tensor in self._products:
            tile = scope.names[value.tensor]
            if tile.axes != tuple(a for a in indices if a in tile.axes):
                scope.memo[value] = Tile(self.machine.pin(tile.array), tile.axes)
        super()._store(tensor, indices, value, scope)

    def evaluate(self, node: Expr, scope: Scope) -> Tile:
        match node:
            case Apply("div", (x, Const(value)), dtype) if (
                is_integer(dtype) and value > 0 and int(value).bit_count() == 1
            ):
                found = interval(x, self._known)
                if found is not None and found[0] >= 0:  # a division of what may be negative takes five operations
                    tile = scope.memo[x]
                    return Tile(
                        lax.shift_right_logical(tile.array, jnp.asarray(int(value).bit_length() - 1, dtype)), tile.axes
                    )
        return super().evaluate(node, scope)

    def _reduce(self, axes: tuple[Axis, ...], reducer: str, value: Expr, over: tuple[Axis, ...], scope: Scope) -> Tile:
        picked = self._picked(value, over, scope) if reducer == "sum" else None
        return (
            super()._reduce(axes, reducer, value, over, scope) if picked is None else self._widen(picked, axes, scope)
        )

    def _picked(self, value: Expr, over: tuple[Axis, ...], scope: Scope) -> Tile | None:
        """The sum over an axis of `select(axis == at, x, 0)`; None if `value` is something else."""
        match value:
            case Apply("select", (Apply("eq", (Index(axis), at)), x, Const(0))) if (
                over == (axis,) and axis not in at.axes
            ):
                pass
            case _:
                return None
        tile, index = self.value(x, scope), self.value(at, scope)
        window = scope.windows[axis]
        if axis not in tile.axes or axis in index.axes or not set(index.axes) <= set(tile.axes):
            return None
        along = tile.axes.index(axis)
        rows = tuple(a for a in tile.axes if a != axis)
        offset = index.array - jnp.asarray(window.start, index.array.dtype)
        inside = (offset >= 0) & (offset < window.size)
        shape = tuple(scope.windows[a].size for a in rows)
        here, inside = (
            jnp.broadcast_to(self._spread(Tile(jnp.asarray(v), index.axes), rows), shape) for v in (offset, inside)
        )
        here = jnp.expand_dims(jnp.clip(here, 0, window.size - 1), along)
        element = jnp.take_along_axis(tile.array, here, axis=along, mode="promise_in_bounds")
        return Tile(jnp.where(inside, jnp.squeeze(element, along), jnp.zeros((), tile.array.dtype)), rows)


def _stored(loop: Loop) -> Iterator[str]:
    """The outputs that are stored inside a loop."""
    return (s.tensor for s in every([loop]) if isinstance(s, Store))


def _starts(indices: tuple[Axis, ...], windows: Mapping[Axis, DynamicSlice]) -> list[Array]:
    return [jnp.asarray(windows[a].start, jnp.int32) for a in indices]


def _positions(number: Array, counts: Sequence[int]) -> list[Array]:
    """The position of a numbered block along every grid axis; the last one runs fastest."""
    found: list[Array] = [jnp.int32(0)] * len(counts)
    several = [n for n, count in enumerate(counts) if count > 1]
    rest = number
    for n in reversed(several):
        if n == several[0]:
            found[n] = rest
            break
        unsigned, count = (
            lax.convert_element_type(rest, jnp.uint32),
            jnp.uint32(counts[n]),
        )  # fewer operations than signed
        found[n] = lax.convert_element_type(lax.rem(unsigned, count), jnp.int32)
        rest = lax.convert_element_type(lax.div(unsigned, count), jnp.int32)
    return found


def _in_order(array: jax.Array) -> jax.Array:
    """Returns an array whose elements XLA must bring into row-major order before a loop reads them.

    For a transpose, XLA would choose the layout in which it is a mere copy, write that copy, and then another one in the order of
    the loop. A flat value has one layout only. The barrier keeps the reshapes apart. Where nothing is out of order, all is free.
    """
    return lax.optimization_barrier(array.reshape(-1)).reshape(array.shape) if array.ndim > 1 else array


def run(program: TileProgram, inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Every output of the kernel, by name. `inputs[name]` has one dimension per axis of the tensor."""
    outputs = {t.name: jnp.zeros([a.extent for a in t.axes], jnp.dtype(t.dtype)) for t in program.outputs}
    counts = [-(-a.extent // t) for a, t in program.grid]
    total = 1
    for count in counts:
        total *= count

    def block(number: Array, written: tuple[Array, ...]) -> tuple[Array, ...]:
        starts: dict[Axis, Array] = {}
        for (axis, tile), position in zip(program.grid, _positions(number, counts), strict=True):
            start = position if tile == 1 else position * jnp.int32(tile)
            starts[axis] = jnp.minimum(start, jnp.int32(axis.extent - tile)) if axis.extent % tile else start
        machine = _XlaMachine(inputs, dict(zip(outputs, written, strict=True)), program)
        _XlaInterpreter(program, machine).run_block(starts)
        return tuple(_compat.varying_alike([machine.outputs[n] for n in outputs], tuple(inputs.values())))

    initial = tuple(_compat.varying_alike(tuple(outputs.values()), tuple(inputs.values())))
    if total == 1:
        return dict(zip(outputs, block(jnp.int32(0), initial), strict=True))
    inputs = {name: _in_order(array) for name, array in inputs.items()}
    written = lax.fori_loop(jnp.int32(0), jnp.int32(total), block, initial)
    return dict(zip(outputs, written, strict=True))
