"""Emits what a warpgroup computes: tiles in registers, and products of tiles in shared memory or registers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallasfuse.emission.interpreter import Array, Interpreter, Scope, Tile
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Expr, Read
from pallasfuse.ir.tile_program import Contract
from pallasfuse.pallas_backend.mosaic_shape import WARPGROUP_ROWS, present

if TYPE_CHECKING:
    from pallasfuse.pallas_backend.mosaic_gpu import Kernel


@dataclass(frozen=True, slots=True)
class Staged:
    """A tile that lies in shared memory; its dimensions are `axes`."""

    ref: Any
    axes: tuple[Axis, ...]

    def oriented(self, first: Axis) -> Any:
        """The reference with `first` as its first dimension."""
        return self.ref if self.axes[0] == first else self.ref.T


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product that is to be computed: start + left @ right; from zero if there is no start."""

    size: tuple[int, int]
    start: Any
    left: Any
    right: Any


class _Registers:
    """The operations on registers that the interpreter asks of a machine; `Block` does the rest."""

    def pin(self, value: Array) -> Array:
        return lax.optimization_barrier(value) if value.dtype == jnp.float32 else value  # a cast has rounded the others


def nothing() -> None:
    pass


class Computing(Interpreter):
    """The values of one warpgroup."""

    def __init__(self, kernel: "Kernel", buffers: Mapping[str, Any], warpgroup: Any) -> None:
        super().__init__(kernel.program, _Registers())  # type: ignore[arg-type]
        self.in_registers: set[str] = set()
        """Loads that were read by ordinary instructions; products and the copy engine have a path of their own to shared memory."""
        self.shape, self.interpret, self.buffers, self.warpgroup = kernel.shape, kernel.interpret, buffers, warpgroup

    # --- what is computed

    def evaluate(self, node: Expr, scope: Scope) -> Tile:
        tile = super().evaluate(node, scope)
        if not isinstance(tile.array, Staged):
            return tile
        assert isinstance(node, Read)
        self.in_registers.add(node.tensor)
        array = tile.array.ref[...]
        return Tile(array != 0 if node.dtype == "bool" else array, tile.axes)

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

    # --- products

    def _axes(self, statement: Contract) -> tuple[Axis, Axis]:
        over = present(self.program, statement.over)
        return self.shape.rows, next(a for a in present(self.program, tuple(statement.rhs.axes)) if a not in over)

    def _size(self, axes: tuple[Axis, Axis]) -> tuple[int, int]:
        return WARPGROUP_ROWS, self.program.tile(axes[1])

    def _at_once(self, products: list[Product], then: Callable[[], None] = nothing) -> list[Array]:
        """All of them at once. then: what follows when they are issued."""
        if self.interpret:
            results = []
            for p in products:
                assert p.start is None

                def one(ref: Any, p: Product = p) -> Array:
                    plgpu.wgmma(ref, p.left, p.right)
                    return ref[...]

                results.append(pl.run_scoped(one, plgpu.ACC(p.size, jnp.float32)))  # type: ignore[attr-defined]
            then()
            return results

        def issue(refs: tuple[Any, ...]) -> None:
            for ref, p in zip(refs, products, strict=True):
                plgpu.wgmma(ref, p.left, p.right)
            then()

        starts = [jnp.zeros(p.size, jnp.float32) if p.start is None else p.start for p in products]
        return list(pl.run_state(issue)(tuple(plgpu.ACC.init(s) for s in starts)))  # type: ignore[attr-defined]

    def _right(self, root: Expr, scope: Scope) -> Staged:
        assert isinstance(root, Read)
        staged: Staged = scope.names[root.tensor].array
        return staged

    def _left(self, statement: Contract, contracted: Axis, scope: Scope) -> Any:
        """The left side, in shared memory if it was loaded; else in registers."""
        root = statement.lhs
        if isinstance(root, Read) and isinstance(scope.names[root.tensor].array, Staged):
            return self._right(root, scope).oriented(self.shape.rows)
        array = self._widen(self.value(root, scope), (self.shape.rows, contracted), scope).array
        if not self.interpret:
            return array
        buffer = self.buffers[f"{statement.name}.lhs"].at[self.warpgroup]
        buffer[...] = array
        plgpu.commit_smem()
        return buffer


def _broadcast(tile: Tile, axes: tuple[Axis, ...], shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(jnp.asarray(tile.array), shape, [axes.index(a) for a in tile.axes])
