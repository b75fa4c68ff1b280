"""TileProgram -> loops of XLA: the default on CPU, and the reference for the other backends.

Grid blocks run one after the other; each writes its part of the outputs in place. Tails are exact: the last grid block is
moved back so that it overlaps its neighbour (it computes the same values again), the last loop tile is smaller.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse.emission.elementwise import dot_precision
from pallasfuse.emission.interpreter import Array, Interpreter, Scope, Tile, Window
from pallasfuse.emission.lookups import in_whole_blocks, tile_of
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Index
from pallasfuse.ir.tile_program import TileProgram


class _XlaMachine:
    """Whole arrays in memory; `outputs` is threaded through the grid loop."""

    def __init__(self, inputs: Mapping[str, jax.Array], outputs: dict[str, jax.Array], program: TileProgram) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.lookups = {x.result.name: (x, in_whole_blocks(program, x)) for x in program.lookups}

    def load(self, tensor: str, indices: tuple[Axis, ...], windows: Mapping[Axis, Window], again: str) -> Array:
        if tensor in self.lookups:
            lookup, whole = self.lookups[tensor]
            along = lookup.along and indices[lookup.result.axes.index(lookup.along)]
            return tile_of(lookup, self.inputs, indices, windows, by_blocks=along is None or along in whole)
        return lax.dynamic_slice(self.inputs[tensor], _starts(indices, windows), [windows[a].size for a in indices])

    def store(self, tensor: str, indices: tuple[Axis, ...], windows: Mapping[Axis, Window], value: Array) -> None:
        self.outputs[tensor] = lax.dynamic_update_slice(self.outputs[tensor], value, _starts(indices, windows))

    def contract(self, lhs: Tile, rhs: Tile, over: tuple[Axis, ...], dtype: str, precision: str | None) -> Tile:
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
        names = list(self.outputs)

        def step(trip: Array, state: tuple[tuple[Array, ...], tuple[Array, ...]]) -> Any:
            carried, written = state
            self.outputs = dict(zip(names, written, strict=True))
            carried = self._alike(body(trip, carried))
            return carried, self._alike(tuple(self.outputs[n] for n in names))

        carried: tuple[Array, ...]
        outputs = tuple(self.outputs[n] for n in names)
        carried, written = lax.fori_loop(start, stop, step, (self._alike(init), self._alike(outputs)))
        self.outputs = dict(zip(names, written, strict=True))
        return carried


class _XlaInterpreter(Interpreter):
    """As any interpreter, but XLA can take one element of a tile without a look at the others."""

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


def _starts(indices: tuple[Axis, ...], windows: Mapping[Axis, Window]) -> list[Array]:
    return [jnp.asarray(windows[a].start, jnp.int32) for a in indices]


def run(program: TileProgram, inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Every output of the kernel, by name. `inputs[name]` has one dimension per axis of the tensor."""
    outputs = {t.name: jnp.zeros([a.extent for a in t.axes], jnp.dtype(t.dtype)) for t in program.outputs}
    counts = [-(-a.extent // t) for a, t in program.grid]
    total = 1
    for count in counts:
        total *= count

    def block(number: Array, written: tuple[Array, ...]) -> tuple[Array, ...]:
        starts: dict[Axis, Array] = {}
        rest = number
        for (axis, tile), count in reversed(list(zip(program.grid, counts, strict=True))):
            position = lax.rem(rest, jnp.int32(count))
            rest = lax.div(rest, jnp.int32(count))
            start = position * jnp.int32(tile)
            starts[axis] = jnp.minimum(start, jnp.int32(axis.extent - tile)) if axis.extent % tile else start
        machine = _XlaMachine(inputs, dict(zip(outputs, written, strict=True)), program)
        _XlaInterpreter(program, machine).run_block(starts)
        return tuple(_compat.varying_alike([machine.outputs[n] for n in outputs], tuple(inputs.values())))

    initial = tuple(_compat.varying_alike(tuple(outputs.values()), tuple(inputs.values())))
    if total == 1:
        return dict(zip(outputs, block(jnp.int32(0), initial), strict=True))
    written = lax.fori_loop(jnp.int32(0), jnp.int32(total), block, initial)
    return dict(zip(outputs, written, strict=True))
