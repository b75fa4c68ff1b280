"""Float64 evaluation of tile programs with NumPy: the reference for lowering, and the strictest machine there is.

Every grid block runs, one after the other. What a device would do silently is an error here: a tile that leaves its axis
without saying so, a loop that skips or repeats positions, an output element that no block writes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import assert_never

import numpy as np

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import Array, wide_type
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, postorder
from pallasfuse.ir.ops import OPS
from pallasfuse.ir.tile_program import (
    Contract,
    Let,
    Load,
    Loop,
    Reduce,
    Segment,
    Statement,
    Store,
    TileProgram,
    before,
    block_start,
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


@dataclass(slots=True)
class _Scope:
    """Values by name: arrays with one dimension per axis of the program, of one element where they do not vary."""

    windows: dict[Axis, _Window]
    names: dict[str, Array]
    memo: dict[Expr, Array] = field(default_factory=dict)


def evaluate_tiles(
    program: TileProgram, inputs: Mapping[str, Array], *, move_last_block_back: bool = False
) -> dict[str, Array]:
    """Every output of the kernel, by name, in float64 (int64, bool); `inputs[name]` has one dimension per axis.

    Args:
      move_last_block_back: a grid block that does not fit overlaps its neighbour, as in the XLA backend. Else it overhangs: what
        lies outside a tensor is read as zero and never written, as in the Pallas backends.

    Raises:
      InvalidProgramError: a tile leaves its axis where nothing says that it may, a value varies along an axis that it does
        not declare, loop tiles are not contiguous, or some element of an output is never written.
    """
    with np.errstate(all="ignore"):
        return _Evaluation(program, inputs, move_last_block_back).run()


class _Evaluation:
    def __init__(self, program: TileProgram, inputs: Mapping[str, Array], move_last_block_back: bool) -> None:
        self.program, self.move_last_block_back = program, move_last_block_back
        self.dimension = {a: d for d, a in enumerate(program.order)}
        self.inputs: dict[str, Array] = {
            t.name: np.asarray(inputs[t.name]).astype(wide_type(t.dtype)) for t in program.inputs
        }
        self.outputs: dict[str, Array] = {}
        self.written: dict[str, Array] = {}
        for t in program.outputs:
            shape = tuple(a.extent for a in t.axes)
            wide = wide_type(t.dtype)
            self.outputs[t.name] = np.full(shape, np.nan if wide is np.float64 else 0, wide)
            self.written[t.name] = np.zeros(shape, bool)

    def run(self) -> dict[str, Array]:
        grid = dict(self.program.grid)
        for starts in product(*(self._starts(a, t) for a, t in self.program.grid)):
            at = dict(zip(grid, starts, strict=True))
            windows = {
                a: _Window(at.get(a, 0), t, a.extent % t != 0 and not (a in grid and self.move_last_block_back),
                           a in grid or t >= a.extent)
                for a, t in self.program.tiles
            }  # fmt: skip
            names = {block_start(a): self._scalar(s) for a, s in at.items()}
            self._run(self.program.body, _Scope(windows, names))
        for name, written in self.written.items():
            if not written.all():
                where = tuple(int(n) for n in np.argwhere(~written)[0])
                self._fail(f"{name}{list(where)} and {int((~written).sum()) - 1} other elements are never written")
        return self.outputs

    def _starts(self, axis: Axis, tile: int) -> list[int]:
        starts = list(range(0, axis.extent, tile))
        if self.move_last_block_back:
            starts = [min(s, axis.extent - tile) for s in starts]
        return starts[::-1] if axis in self.program.descending else starts

    def _fail(self, why: str) -> None:
        raise InvalidProgramError(f"tile program {self.program.name}: {why}")

    # --- statements

    def _run(self, body: tuple[Statement, ...], scope: _Scope) -> None:
        for statement in body:
            match statement:
                case Load(name, tensor, indices):
                    self._bind(name, indices, self._load(tensor, indices, scope), scope)
                case Let(name, axes, value):
                    self._bind(name, axes, self._value(value, scope), scope)
                case Reduce(name, axes, reducer, value, over):
                    tile = self._widen(self._value(value, scope), over, scope)
                    dims = tuple(self.dimension[a] for a in over)
                    self._bind(name, axes, reducer.reduce(tile, axis=dims, keepdims=True), scope)
                case Contract(name, axes, lhs, rhs, over):
                    left, right = (self._widen(self._value(side, scope), over, scope) for side in (lhs, rhs))
                    dims = tuple(self.dimension[a] for a in over)
                    self._bind(name, axes, np.sum(left * right, axis=dims, keepdims=True), scope)
                case Store(tensor, indices, value):
                    self._store(tensor, indices, self._value(value, scope), scope)
                case Loop():
                    self._loop(statement, scope)
                case _:
                    assert_never(statement)

    def _bind(self, name: str, axes: tuple[Axis, ...], value: Array, scope: _Scope) -> None:
        for axis, dim in self.dimension.items():
            if axis not in axes and value.shape[dim] != 1:
                self._fail(f"{name} varies along {axis}, which it does not declare")
        scope.names[name] = value

    def _inside(self, axes: tuple[Axis, ...], scope: _Scope) -> tuple[list[Array], Array]:
        """The positions along every axis, and where all of them lie inside their axes."""
        positions, inside = [], np.ones([1] * len(self.dimension), bool)
        for axis in axes:
            at = self._position(axis, scope)
            window = scope.windows[axis]
            if not window.overhangs and window.start + window.size > axis.extent:
                self._fail(f"positions [{window.start}, {window.start + window.size}) leave {axis} of {axis.extent}")
            positions.append(np.minimum(at, axis.extent - 1))
            inside = inside & (at < axis.extent)
        return positions, inside

    def _load(self, tensor: str, indices: tuple[Axis, ...], scope: _Scope) -> Array:
        positions, inside = self._inside(indices, scope)
        array = self.inputs[tensor]
        if array.shape != tuple(a.extent for a in indices):
            self._fail(f"load of {tensor}[{', '.join(map(str, indices))}], whose shape is {array.shape}")
        return np.where(inside, array[tuple(positions)], np.zeros((), array.dtype))

    def _store(self, tensor: str, indices: tuple[Axis, ...], value: Array, scope: _Scope) -> None:
        value = self._widen(value, indices, scope)
        self._bind(f"store {tensor}", indices, value, scope)
        positions, inside = self._inside(indices, scope)
        inside = np.broadcast_to(inside, value.shape)
        where = tuple(np.broadcast_to(p, value.shape)[inside] for p in positions)
        self.outputs[tensor][where] = value[inside] if where else value.reshape(())
        self.written[tensor][where] = True

    def _loop(self, loop: Loop, scope: _Scope) -> None:
        axis = loop.axis
        first, total = self._number(loop.first, scope), self._number(loop.to_visit, scope)
        state = [
            self._widen(self._value(c.init, scope).astype(wide_type(c.dtype)), c.axes, scope) for c in loop.carries
        ]
        done = 0
        for segment in loop.segments:
            for trip in range(self._number(segment.start, scope), self._number(segment.stop, scope)):
                begin = segment.offset + trip * segment.tile
                if begin != first + done:
                    self._fail(f"the tile at {begin} of {axis} comes after {first + done} positions")
                reached = min(done + segment.tile, axis.extent - first)
                inner = _Scope(dict(scope.windows), dict(scope.names))
                inner.windows[axis] = _Window(begin, segment.tile, segment.edge)
                inner.names |= {before(axis): self._scalar(done), visited(axis): self._scalar(reached),
                                to_visit(axis): self._scalar(total)}  # fmt: skip
                inner.names |= {c.name: array for c, array in zip(loop.carries, state, strict=True)}
                state = self._trip(loop, segment, inner)
                done = reached
        if done != max(0, total):
            self._fail(f"the loop over {axis} visits {done} positions, but says {total}")
        for carry, array in zip(loop.carries, state, strict=True):
            self._bind(carry.name, carry.axes, array, scope)

    def _trip(self, loop: Loop, segment: Segment, scope: _Scope) -> list[Array]:
        self._run(segment.body, scope)
        for carry in loop.carries:
            self._bind(carry.name, carry.axes, scope.names[carry.next_name], scope)
        return [scope.names[c.next_name] for c in loop.carries]

    # --- expressions

    def _scalar(self, value: int) -> Array:
        return np.full([1] * len(self.dimension), value, np.int64)

    def _number(self, expr: Expr, scope: _Scope) -> int:
        return int(self._value(expr, scope).item())

    def _position(self, axis: Axis, scope: _Scope) -> Array:
        window = scope.windows[axis]
        if not window.whole:
            self._fail(f"a part of {axis} is used outside the loop over it")
        shape = [1] * len(self.dimension)
        shape[self.dimension[axis]] = window.size
        return (window.start + np.arange(window.size)).reshape(shape)

    def _widen(self, value: Array, axes: tuple[Axis, ...], scope: _Scope) -> Array:
        """The value with all positions of the tile along `axes`."""
        shape = list(value.shape)
        for axis in axes:
            shape[self.dimension[axis]] = scope.windows[axis].size
        return np.broadcast_to(value, shape)

    def _value(self, root: Expr, scope: _Scope) -> Array:
        result: Array
        for node in postorder(root):
            if node in scope.memo:
                continue
            match node:
                case Const(value, dtype):
                    result = np.full([1] * len(self.dimension), value, wide_type(dtype))
                case Index(axis, _):
                    result = self._position(axis, scope)
                case Read(tensor, indices, dtype):
                    result = scope.names[tensor].astype(wide_type(dtype))
                    self._check_axes(node, result, indices)
                case Apply("convert", (x,), dtype):
                    result = scope.memo[x].astype(wide_type(dtype))
                case Apply(op, args, dtype):
                    result = np.asarray(OPS[op].evaluate(*(scope.memo[a] for a in args))).astype(wide_type(dtype))
                case _:
                    assert_never(node)
            scope.memo[node] = result
        return scope.memo[root]

    def _check_axes(self, node: Read, value: Array, axes: tuple[Axis, ...]) -> None:
        for axis, dim in self.dimension.items():
            if axis not in axes and value.shape[dim] != 1:
                self._fail(f"{node} varies along {axis} as well")
