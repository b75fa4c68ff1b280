"""TileProgram -> `plgpu.kernel`: warp-specialised kernels for Hopper.

A memory warpgroup keeps a pipeline of the streamed operands full; each compute warpgroup owns 64 rows: its resident operands
are copied once, carried values stay in registers, and its results leave through shared memory. Mosaic infers all layouts.

The interpreter of Mosaic kernels has no products with operands in registers and none that start from a value: `interpret`
emits the same kernel with both sides in shared memory and the addition apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallasfuse.emission.interpreter import Array, Interpreter, Scope, Tile, Window
from pallasfuse.emission.pallas_kernel import block_starts
from pallasfuse.errors import TargetError
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Expr, Index, Read, postorder
from pallasfuse.ir.loop_program import Tensor
from pallasfuse.ir.tile_program import Contract, Load, Statement, Store, TileProgram, block_start
from pallasfuse.pallas_backend.mosaic_rules import (
    WARPGROUP_ROWS,
    Shape,
    accumulated,
    examine,
    may_approximate,
    present,
    staging,
)

MEMORY_REGISTERS = 40
_WARPGROUP, _BLOCK = "warpgroup", "block"


def run(program: TileProgram, inputs: Mapping[str, jax.Array], *, interpret: bool = False) -> dict[str, jax.Array]:
    """Every output of the kernel, by name. interpret: on any machine, looking for races.

    Raises:
      TargetError: Mosaic GPU cannot run this program.
    """
    shape = examine(program)
    if isinstance(shape, str):
        raise TargetError(f"Mosaic GPU cannot run {program.name}: {shape}")
    kernel = _Kernel(program, shape, interpret=interpret)
    # scalars have no tile: they travel as arrays of one element
    arrays = [inputs[t.name].reshape((1,)) if not t.axes else kernel.pad(t, inputs[t.name]) for t in program.inputs]
    results = plgpu.kernel(
        kernel.body,
        out_type=[jax.ShapeDtypeStruct(kernel.extents(t), jnp.dtype(t.dtype)) for t in program.outputs],
        grid=(prod(-(-a.extent // t) for a, t in program.grid),),
        grid_names=(_BLOCK,),
        num_threads=shape.warpgroups + 1,
        thread_name=_WARPGROUP,
        kernel_name=program.name[:60],
        compiler_params=plgpu.CompilerParams(approx_math=may_approximate(program)),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else False,
    )(*arrays)
    return {t.name: r[tuple(slice(a.extent) for a in t.axes)] for t, r in zip(program.outputs, results, strict=True)}


@dataclass(frozen=True, slots=True)
class _Staged:
    """A tile that lies in shared memory; its dimensions are `axes`."""

    ref: Any
    axes: tuple[Axis, ...]

    def oriented(self, first: Axis) -> Any:
        """The reference with `first` as its first dimension."""
        return self.ref if self.axes[0] == first else self.ref.T


def _buffer(copies: int, size: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for copies of a tile; one that has two dimensions is laid out as matrix products want it."""
    return plgpu.SMEM((copies, *size), dtype, transforms=_transforms(size, dtype))


def _transforms(size: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    if len(size) < 2:
        return ()
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(size[-1] * bits)
    return plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]


class _Kernel:
    """The body of one kernel."""

    def __init__(self, program: TileProgram, shape: Shape, *, interpret: bool) -> None:
        self.program, self.shape, self.interpret = program, shape, interpret
        self.staging = staging(program, shape)

    def _size(self, axes: tuple[Axis, ...]) -> tuple[int, ...]:
        return tuple(
            WARPGROUP_ROWS if a == self.shape.rows else self.program.tile(a) for a in present(self.program, axes)
        )

    def extents(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of an array, rounded up to the small tiles in which the copy engine moves it."""
        multiples: dict[Axis, int] = {}
        statements: tuple[Load | Store, ...] = (*self.shape.streamed, *self.shape.resident, *self.shape.stores)
        for kept in (present(self.program, s.indices) for s in statements if s.tensor == tensor.name):
            for transform in _transforms(self._size(kept), jnp.dtype(tensor.dtype))[:1]:
                multiples |= {a: max(n, multiples.get(a, 1)) for a, n in zip(kept, transform.tiling, strict=True)}
        return tuple(-(-a.extent // multiples.get(a, 1)) * multiples.get(a, 1) for a in tensor.axes)

    def pad(self, tensor: Tensor, array: jax.Array) -> jax.Array:
        """Zeros beyond the end, where `extents` asks for them."""
        missing = [(0, n - a.extent) for n, a in zip(self.extents(tensor), tensor.axes, strict=True)]
        return jnp.pad(array, missing) if any(n for _, n in missing) else array

    def _scratch(self) -> dict[str, Any]:
        """Buffers for every warpgroup, by the name of the load or of the stored tensor."""
        program, groups = self.program, self.shape.warpgroups
        dtypes = {t.name: jnp.dtype(t.dtype) for t in program.outputs}
        found = {s.name: _buffer(groups, self._size(s.indices), jnp.dtype(s.dtype)) for s in self.shape.resident}
        for store in self.shape.stores:
            if store.tensor not in self.staging:
                found[store.tensor] = _buffer(groups, self._size(store.indices), dtypes[store.tensor])
        for product in self.shape.segment.body if self.interpret else ():
            if isinstance(product, Contract):
                size = (WARPGROUP_ROWS, *(program.tile(a) for a in present(program, product.over)))
                found[f"{product.name}.lhs"] = _buffer(groups, size, jnp.dtype(product.lhs.dtype))
        return found

    def body(self, *refs: Any) -> None:
        names = [t.name for t in (*self.program.inputs, *self.program.outputs)]
        scratch = self._scratch()
        barriers = max(1, len(self.shape.resident)) * self.shape.warpgroups

        def scoped(copied: Any, turn: Any, *allocated: Any) -> None:
            buffers = dict(zip(scratch, allocated, strict=True))
            _Block(self, dict(zip(names, refs, strict=True)), buffers, copied, turn).emit()

        pl.run_scoped(
            scoped, plgpu.Barrier(num_barriers=barriers), plgpu.Barrier(num_arrivals=self.shape.warpgroups),
            *scratch.values(), collective_axes=_WARPGROUP,
        )  # fmt: skip


class _Registers:
    """What the interpreter asks of a machine for values in registers; `_Block` does the rest."""

    def pin(self, value: Array) -> Array:
        return lax.optimization_barrier(value) if value.dtype == jnp.float32 else value  # a cast has rounded the others


class _Block(Interpreter):
    """One thread block: the statements of the program on the tiles of one warpgroup."""

    def __init__(
        self, kernel: _Kernel, refs: Mapping[str, Any], buffers: Mapping[str, Any], barriers: Any, turn: Any
    ) -> None:
        super().__init__(kernel.program, _Registers())  # type: ignore[arg-type]
        self.shape, self.staging, self.interpret = kernel.shape, kernel.staging, kernel.interpret
        self.refs, self.buffers, self.barriers, self.turn = refs, buffers, barriers, turn
        self.warpgroup = lax.axis_index(_WARPGROUP)
        self.streamed: dict[str, Any] = {}
        self.accumulated = accumulated(self.shape.segment.body)
        self.absorbed = frozenset() if self.interpret else frozenset(s.name for s, _ in self.accumulated.values())
        """Sums that a product computes in place."""
        products = [s.name for s in self.shape.segment.body if isinstance(s, Contract)]
        starts = [n for n in products if n not in self.accumulated]
        ends = [n for n in products if n in self.accumulated]
        apart = bool(starts and ends) and products == starts + ends
        self.turns = (starts[-1], ends[0]) if kernel.program.alternate and self.shape.warpgroups == 2 and apart else ()
        """Products around which the warpgroups take turns: after one is issued, before the other is."""

    def run(self, body: tuple[Statement, ...], scope: Scope) -> None:
        super().run(tuple(s for s in body if getattr(s, "name", None) not in self.absorbed), scope)

    def emit(self) -> None:
        shape, program = self.shape, self.program
        starts = block_starts(program, lax.axis_index(_BLOCK))
        names = {block_start(a): Tile(s, ()) for a, s in starts.items()}
        windows = {a: Window(starts.get(a, 0), t, a.extent % t != 0) for a, t in program.tiles}
        rows = windows[shape.rows]
        windows[shape.rows] = Window(
            starts[shape.rows] + self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS, rows.overhangs
        )
        scope = Scope(windows, names)
        start, stop = (self.value(e, scope).array for e in (shape.segment.start, shape.segment.stop))

        def context(pipeline: Any) -> None:
            inside = scope.nested()
            self.run(shape.before, inside)
            self.scope = inside
            initial = self.initial_state(shape.loop, inside)
            if self.turns:
                pl.when(self.warpgroup == 1)(self._take_turns)
            state = pipeline(initial)
            if self.turns:
                pl.when(self.warpgroup == 0)(self._take_turns)
            self.bind_state(shape.loop, state, inside)
            self.run(shape.after, inside)
            plgpu.wait_smem_to_gmem(0)

        def step(indices: tuple[Array, ...], *operands: Any) -> Any:
            self.streamed = dict(zip((s.name for s in shape.streamed), operands[:-1], strict=True))
            return self.trip(shape.loop, shape.segment, self.scope, indices[0] + start, operands[-1])

        plgpu.emit_pipeline_warp_specialized(
            step, grid=(stop - start,), memory_registers=MEMORY_REGISTERS, wg_axis=_WARPGROUP, num_compute_wgs=shape.warpgroups,
            max_concurrent_steps=program.stages, compute_context=context,
            in_specs=[self._spec(s, starts, start) for s in shape.streamed],
        )(*(self._whole(s, starts) for s in shape.streamed))  # fmt: skip

    # --- what travels

    def _spec(self, load: Load, starts: Mapping[Axis, Array], first: Array) -> Any:
        kept, rows = present(self.program, load.indices), self.shape.rows
        size = tuple(self.program.tile(a) for a in kept)
        block = {rows: lax.div(starts[rows], jnp.int32(self.program.tile(rows)))}

        def index(trip: Array) -> tuple[Array, ...]:
            return tuple(trip + first if a == self.shape.loop.axis else block.get(a, jnp.int32(0)) for a in kept)

        return plgpu.BlockSpec(size, index, transforms=_transforms(size, jnp.dtype(load.dtype)))

    def _whole(self, load: Load, starts: Mapping[Axis, Array]) -> Any:
        """The array at the block's place along the axes that its tile lacks."""
        kept = present(self.program, load.indices)
        at = tuple(slice(None) if a in kept else starts.get(a, 0) for a in load.indices)
        return self.refs[load.tensor].at[at]

    def _place(self, tensor: str, indices: tuple[Axis, ...], scope: Scope) -> Any:
        """The current tile of an array in global memory."""
        at = []
        for axis in indices:
            window = scope.windows[axis]
            at.append(window.start if window.size == 1 else pl.ds(window.start, window.size))
        return self.refs[tensor].at[tuple(at)]

    def _load(self, statement: Load, scope: Scope) -> None:
        kept = present(self.program, statement.indices)
        if statement.name in self.streamed:
            ref = self.streamed[statement.name]
            if self.shape.rows in kept:
                mine = pl.ds(self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
                ref = ref.at[tuple(mine if a == self.shape.rows else slice(None) for a in kept)]
        elif not kept:
            at = tuple(scope.windows[a].start for a in statement.indices)
            scope.names[statement.name] = Tile(self.refs[statement.tensor][at or (0,)], ())
            return
        else:
            names = [s.name for s in self.shape.resident]
            ref = self.buffers[statement.name].at[self.warpgroup]
            barrier = self.barriers.at[self.warpgroup * len(names) + names.index(statement.name)]
            plgpu.copy_gmem_to_smem(self._place(statement.tensor, statement.indices, scope), ref, barrier)
            plgpu.barrier_wait(barrier)
        scope.names[statement.name] = Tile(_Staged(ref, kept), kept)

    def _store(self, tensor: str, indices: tuple[Axis, ...], value: Expr, scope: Scope) -> None:
        tile = self._widen(self.value(value, scope), indices, scope)
        buffer = self.buffers[self.staging.get(tensor, tensor)].at[self.warpgroup]
        buffer[...] = tile.array.astype(buffer.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, self._place(tensor, indices, scope))

    # --- what is computed

    def value(self, root: Expr, scope: Scope) -> Tile:
        """As the interpreter, but the mask of a tile is looked at only where something may be hidden (`tiling.bounds`)."""
        stack = [root]
        while stack:
            node = stack[-1]
            if node in scope.memo:
                stack.pop()
                continue
            guarded = _guarded(node)
            needed = guarded[:3] if guarded is not None else getattr(node, "args", ())
            missing = [a for a in needed if a not in scope.memo]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            if guarded is not None:
                scope.memo[node] = self._under_branch(*guarded, scope)
            else:
                scope.memo[node] = self.evaluate(node, scope)
        return scope.memo[root]

    def evaluate(self, node: Expr, scope: Scope) -> Tile:
        tile = super().evaluate(node, scope)
        return Tile(tile.array.ref[...], tile.axes) if isinstance(tile.array, _Staged) else tile

    def _under_branch(self, sure: Expr, shown: Expr, hidden: Expr, mask: Expr, scope: Scope) -> Tile:
        condition, tile = scope.memo[sure].array, scope.memo[shown]
        axes = self._union(tile.axes, tuple(a for a in mask.axes if scope.windows[a].size != 1))
        tile = self._widen(tile, axes, scope)

        def masked(array: Array) -> Array:
            inner = Scope(scope.windows, scope.names, dict(scope.memo))
            for node in postorder(mask):
                if (
                    isinstance(node, Index) and node not in scope.memo
                ):  # layout inference needs the whole shape in a branch
                    window = scope.windows[node.axis]
                    if node.axis in axes:
                        places = lax.broadcasted_iota(jnp.dtype(node.dtype), array.shape, axes.index(node.axis))
                        inner.memo[node] = Tile(places + jnp.asarray(window.start, places.dtype), axes)
            keep = self._widen(self.value(mask, inner), axes, inner).array
            other = self._widen(inner.memo[hidden], axes, inner).array
            return lax.select(keep, array, jnp.broadcast_to(other, array.shape).astype(array.dtype))

        return Tile(lax.cond(condition, lambda array: array, masked, tile.array), axes)

    def _apply(self, op: str, args: list[Tile], node: Apply, dtype: str) -> Tile:
        axes = self._union(*(t.axes for t in args))
        sizes = {a: n for t in args for a, n in zip(t.axes, jnp.shape(t.array), strict=True)}
        shape = tuple(sizes[a] for a in axes)
        args = [t if not t.axes or t.axes == axes else Tile(_broadcast(t, axes, shape), axes) for t in args]
        return super()._apply(op, args, node, dtype)

    def _widen(self, tile: Tile, axes: tuple[Axis, ...], scope: Scope) -> Tile:
        wanted = self._union(tile.axes, tuple(a for a in axes if scope.windows[a].size != 1))
        if wanted == tile.axes:
            return tile
        return Tile(_broadcast(tile, wanted, tuple(scope.windows[a].size for a in wanted)), wanted)

    def _contract(self, statement: Contract, scope: Scope) -> None:
        (contracted,) = present(self.program, statement.over)
        left, right = self._left(statement, contracted, scope), self._right(statement.rhs, scope).oriented(contracted)
        columns = next(a for a in present(self.program, tuple(statement.rhs.axes)) if a != contracted)
        axes, size = (self.shape.rows, columns), (WARPGROUP_ROWS, self.program.tile(columns))
        target = self.accumulated.get(statement.name)

        if statement.name in self.turns[1:]:
            self._take_turns()

        def product(accumulator: Any) -> Array:
            plgpu.wgmma(accumulator, left, right)
            if statement.name in self.turns[:1]:
                self._take_turns()
            return accumulator[...]

        if target is None or self.interpret:
            result = pl.run_scoped(product, plgpu.ACC(size, jnp.float32))  # type: ignore[attr-defined]
            scope.names[statement.name] = Tile(result, axes)
            return
        total, other = target
        start = self._widen(self.value(other, scope), axes, scope).array
        result = pl.run_state(lambda ref: plgpu.wgmma(ref, left, right))(plgpu.ACC.init(start))  # type: ignore[attr-defined]
        scope.names[total.name] = Tile(result, axes)

    def _take_turns(self) -> None:
        """Wait until the other warpgroup comes to its next turn."""
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.turn)

    def _right(self, root: Expr, scope: Scope) -> _Staged:
        assert isinstance(root, Read)
        staged: _Staged = scope.names[root.tensor].array
        return staged

    def _left(self, statement: Contract, contracted: Axis, scope: Scope) -> Any:
        """The left side, in shared memory if it was loaded; else in registers."""
        root = statement.lhs
        if isinstance(root, Read) and isinstance(scope.names[root.tensor].array, _Staged):
            return self._right(root, scope).oriented(self.shape.rows)
        array = self._widen(self.value(root, scope), (self.shape.rows, contracted), scope).array
        if not self.interpret:
            return array
        buffer = self.buffers[f"{statement.name}.lhs"].at[self.warpgroup]
        buffer[...] = array
        plgpu.commit_smem()
        return buffer


def _guarded(node: Expr) -> tuple[Expr, Expr, Expr, Expr] | None:
    """(sure, shown, hidden, mask) of a choice that need not be made on tiles for which `sure` holds."""
    match node:
        case Apply("select", (Apply("or", (sure, mask)), shown, hidden)) if not sure.axes and mask.axes:
            return sure, shown, hidden, mask
    return None


def _broadcast(tile: Tile, axes: tuple[Axis, ...], shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(jnp.asarray(tile.array), shape, [axes.index(a) for a in tile.axes])
