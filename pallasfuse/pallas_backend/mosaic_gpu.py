"""TileProgram -> `plgpu.kernel`: warp-specialised kernels for Hopper.

A memory warpgroup keeps the streamed operands coming; each computing warpgroup owns 64 rows: its resident operands are copied once,
carried values stay in registers, and its results leave through shared memory. Mosaic infers all layouts.

The interpreter of Mosaic kernels has no products with operands in registers and none that start from a value: `interpret`
emits the same kernel with both sides in shared memory and the addition apart.
"""

import heapq
from collections.abc import Mapping
from copy import copy
from math import lcm, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallasfuse.emission.pallas_kernel import block_starts
from pallasfuse.errors import TargetError
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.renaming import readable
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Contract, Load, Loop, Store, TileProgram, block_start
from pallasfuse.pallas_backend import mosaic_space
from pallasfuse.pallas_backend.mosaic_block import ASSIGNMENT, BLOCK, WARPGROUP, Block
from pallasfuse.pallas_backend.mosaic_rules import examine, may_approximate, swizzle
from pallasfuse.pallas_backend.mosaic_shape import WARPGROUP_ROWS, Shape, box, present
from pallasfuse.price.visited_tiles import trips
from pallasfuse.targets import MOSAIC_GPU


def run(program: TileProgram, inputs: Mapping[str, jax.Array], *, interpret: bool = False) -> dict[str, jax.Array]:
    """Every output of the kernel, by name. interpret: on any machine, looking for races.

    Raises:
      TargetError: Mosaic GPU cannot run this program.
    """
    shape = examine(program)
    if isinstance(shape, str):
        raise TargetError(f"Mosaic GPU cannot run {program.name}: {shape}")
    kernel = Kernel(program, shape, interpret=interpret)
    # scalars have no tile: they travel as arrays of one element
    given = {t.name: inputs[t.name].astype(_held(t.dtype)) for t in program.inputs}
    arrays = [given[t.name].reshape((1,)) if not t.axes else kernel.pad(t, given[t.name]) for t in program.inputs]
    if kernel.assignment is not None:
        arrays.append(jnp.asarray(kernel.assignment))
    results = plgpu.kernel(
        kernel.body,
        out_type=[jax.ShapeDtypeStruct(kernel.extents(t), jnp.dtype(t.dtype)) for t in program.outputs],
        grid=(kernel.instances,),
        grid_names=(BLOCK,),
        num_threads=shape.warpgroups + 1,
        thread_name=WARPGROUP,
        kernel_name=readable(program.name)[:60],
        compiler_params=plgpu.CompilerParams(approx_math=may_approximate(program)),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else False,
    )(*arrays)
    return {t.name: r[tuple(slice(a.extent) for a in t.axes)] for t, r in zip(program.outputs, results, strict=True)}


def _held(dtype: str) -> Any:
    """The type in memory: booleans travel as bytes."""
    return jnp.dtype("int8" if dtype == "bool" else dtype)


def _buffer(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for copies of a tile; one that has two dimensions is laid out as matrix products want it."""
    return plgpu.SMEM(shape, dtype, transforms=_transforms(shape[1:], dtype))


def _transforms(size: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    if len(size) < 2:
        return ()
    item = jnp.dtype(dtype).itemsize
    width = swizzle(size[-1] * item)
    return plgpu.TilingTransform((8, width // item)), plgpu.SwizzleTransform(width)  # type: ignore[abstract]


class Kernel:
    """The parts of one kernel that all its blocks share."""

    def __init__(self, program: TileProgram, shape: Shape, *, interpret: bool) -> None:
        self.program, self.shape, self.interpret = program, shape, interpret
        self.staging, self.direct = mosaic_space.staging(program, shape), mosaic_space.direct(program, shape)
        self.slots = mosaic_space.slots(program, shape)
        self.sizes = {a.name: a.size for a in mosaic_space.allocations(program, shape)}
        self.blocks = prod(-(-a.extent // t) for a, t in program.grid)
        self.instances = min(self.blocks, _multiprocessors()) if program.persistent else self.blocks
        several = self.instances < self.blocks
        self.assignment = assignment(program, shape.loop, self.blocks, self.instances) if several else None

    def of(self, program: TileProgram) -> "Kernel":
        """Returns this kernel for another program that runs in it, with the same slots, buffers and lists of blocks."""
        shape = examine(program)
        assert not isinstance(shape, str)
        other = copy(self)
        other.program, other.shape = program, shape
        return other

    def size(self, axes: tuple[Axis, ...]) -> tuple[int, ...]:
        """Returns the size of the part of a tile that one warpgroup owns."""
        return mosaic_space.own_size(self.program, self.shape, axes)

    def slot(self, buffers: Mapping[str, Any], name: str, number: Any) -> Any:
        """One tile of a buffer, without what follows it."""
        (*_, size), ref = self.sizes[name], buffers[name].at[number]
        return ref if ref.shape[-1] == size else ref.at[pl.ds(0, size)]

    def extents(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of an array, rounded up to the small tiles in which the copy engine moves it."""
        multiples = [1] * len(tensor.axes)
        shape = self.shape
        statements: tuple[Load | Store, ...] = (*shape.streamed, *shape.resident, *shape.sliced, *shape.stores)
        for statement in (s for s in statements if s.tensor == tensor.name):
            kept = present(self.program, statement.indices)
            size = box(self.program, shape, statement) if isinstance(statement, Load) else self.size(kept)
            transforms = _transforms(size, _held(tensor.dtype))
            # vectors have no such tiles: one that reached past a row would be written to the next; nor do registers
            whole = not transforms or tensor.name in self.direct
            tiling = tuple(self.program.tile(a) for a in kept) if whole else transforms[0].tiling
            for axis, multiple in zip(kept, tiling, strict=True):
                dimension = statement.indices.index(axis)
                multiples[dimension] = lcm(multiples[dimension], multiple)
        return tuple(-(-a.extent // n) * n for a, n in zip(tensor.axes, multiples, strict=True))

    def pad(self, tensor: Tensor, array: jax.Array) -> jax.Array:
        """Zeros beyond the end, where `extents` asks for them."""
        missing = [(0, n - a.extent) for n, a in zip(self.extents(tensor), tensor.axes, strict=True)]
        return jnp.pad(array, missing) if any(n for _, n in missing) else array

    def _buffers(self) -> dict[str, Any]:
        """Returns the buffers of shared memory by the name of the load or of the stored tensor.

        Each has a slot for every stage, or for every warpgroup. See `slot`.
        """
        program, groups = self.program, self.shape.warpgroups
        allocations = mosaic_space.allocations(program, self.shape)
        found = {a.name: _buffer(a.shape, _held(a.dtype)) for a in allocations}
        for product in self.shape.body if self.interpret else ():
            if isinstance(product, Contract) and product.name not in {s.product for s in self.shape.slices}:
                size = (WARPGROUP_ROWS, *(program.tile(a) for a in present(program, product.over)))
                found[f"{product.name}.lhs"] = _buffer((groups, *size), jnp.dtype(product.lhs.dtype))
        return found

    def body(self, *refs: Any) -> None:
        given = [t.name for t in self.program.inputs] + ([ASSIGNMENT] if self.assignment is not None else [])
        names = [*given, *(t.name for t in self.program.outputs)]
        groups = self.shape.warpgroups
        readers = {s.name: groups for s in (*self.shape.streamed, *self.shape.sliced)}
        full = {n: plgpu.Barrier(num_barriers=count) for n, count in self.slots.items()}
        empty = {
            n: plgpu.Barrier(num_arrivals=readers.get(n, 1), num_barriers=count) for n, count in self.slots.items()
        }

        barriers = {
            "full": full,
            "empty": empty,
            "turn": plgpu.Barrier(num_barriers=groups),
            "verdict": plgpu.Barrier(num_arrivals=groups),
        }

        def scoped(buffers: Any, barriers: Any) -> None:
            arrays = dict(zip(names, refs, strict=True))
            block = Block(self, arrays, buffers, barriers)
            instead = self.program.instead
            other = None if instead is None else Block(self.of(instead.program), arrays, buffers, barriers)
            lax.cond(lax.axis_index(WARPGROUP) < groups, lambda: block.compute(other), lambda: block.copy(other))

        pl.run_scoped(scoped, self._buffers(), barriers, collective_axes=WARPGROUP)


def _multiprocessors() -> int:
    """Counts the multiprocessors of the GPU at hand; of an H100 where there is none."""
    try:
        return int(jax.devices("gpu")[0].core_count)
    except (RuntimeError, AttributeError):
        return MOSAIC_GPU.multiprocessors


# --- the blocks of a grid for each instance of a persistent kernel


_MOST_BLOCKS = 1 << 18
"""More blocks than this are not listed: each instance then runs so many that it hardly matters which."""
_BLOCK_TRIPS = 0.5
"""The time to begin and to end a block, in trips of its loop, when the next one's operands are on their way: less than what
`Schedule.start_trips` counts for a block by itself."""


def assignment(program: TileProgram, loop: Loop, blocks: int, instances: int) -> np.ndarray | None:
    """Returns a table of the blocks that each instance runs; None where all blocks are alike.

    int32 [instances, 2 + most]: how many blocks an instance runs, and their numbers.

    List scheduling (Graham 1969): in the order of their numbers, blocks go to the instance that is free first, as the hardware
    does with blocks that it starts.
    """
    if not program.descending or blocks > _MOST_BLOCKS:
        return None
    known: dict[tuple[int, ...], int] = {}
    free = [(0.0, n) for n in range(instances)]
    given: list[list[int]] = [[] for _ in range(instances)]
    for number in range(blocks):
        starts = block_starts(program, number)
        key = tuple(starts[a] for a in program.descending)
        if key not in known:
            known[key] = trips(loop, {block_start(a): s for a, s in starts.items()})
        time, instance = heapq.heappop(free)
        given[instance].append(number)
        heapq.heappush(free, (time + known[key] + _BLOCK_TRIPS, instance))
    table = np.zeros((instances, 2 + max(map(len, given))), np.int32)
    for row, numbers in zip(table, given, strict=True):
        row[0] = len(numbers)
        row[1 : 1 + len(numbers)] = numbers
    return table
