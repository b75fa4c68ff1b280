"""The phases of a split -> one `plgpu.kernel`: a cluster of thread blocks for each row, which stays in their shared memory.

A block copies its part of every stream at once, tile by tile, into slots that each have a barrier. Where a phase ends, every block
writes its state to the shared memory of all blocks, and waits until those of all have come (`mosaic_code`). Results leave from the
slots. Nobody writes to a block that may have ended: it has waited for all that is written to it.

The interpreter of Mosaic kernels has no distributed shared memory: with `interpret`, states go through global memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallasfuse import _compat
from pallasfuse.emission.pallas_kernel import block_starts
from pallasfuse.errors import TargetError
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.renaming import readable
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Load, TileProgram
from pallasfuse.pallas_backend import mosaic_code
from pallasfuse.pallas_backend.cluster_compute import PART, Phase
from pallasfuse.pallas_backend.cluster_rules import MEETING_WORDS, Shape, boards, examine, slots, word, words_told

ROW = "row"


def run(
    programs: Sequence[TileProgram], inputs: Mapping[str, jax.Array], *, interpret: bool = False
) -> dict[str, jax.Array]:
    """Runs the phases as one kernel, and returns every output of the last one, by name.

    interpret: on any machine, looking for races.

    Raises:
      TargetError: the phases cannot be one kernel.
    """
    shape = examine(programs)
    if isinstance(shape, str):
        raise TargetError(f"no kernel of clusters can run {programs[0].name}: {shape}")
    kernel = Kernel(shape, interpret=interpret)
    # scalars have no tile: they travel as arrays of one element
    arrays = [inputs[t.name].reshape((1,)) if not t.axes else kernel.pad(t, inputs[t.name]) for t in shape.inputs]
    cluster: dict[str, Any] = {} if shape.part is None else {"cluster": (shape.blocks,), "cluster_names": (PART,)}
    results = plgpu.kernel(
        kernel.body,
        out_type=[*(_array(t) for t in shape.results), *kernel.boards.values()],
        grid=(kernel.rows,),
        grid_names=(ROW,),
        **cluster,
        kernel_name=readable(programs[0].name.removesuffix("_0"))[:60],
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else False,
    )(*arrays)
    found = dict(zip((t.name for t in shape.results), results, strict=False))
    return {t.name: found[t.name].reshape([a.extent for a in t.axes]) for t in shape.results}


def _array(tensor: Tensor) -> Any:
    return jax.ShapeDtypeStruct(tuple(a.extent for a in tensor.axes) or (1,), jnp.dtype(tensor.dtype))


class Kernel:
    """The parts of a cluster kernel that are the same for all blocks."""

    def __init__(self, shape: Shape, *, interpret: bool) -> None:
        self.shape, self.interpret = shape, interpret
        self.rows = prod(-(-a.extent // t) for a, t in shape.rows)
        self.slots, self.shared_boards = slots(shape), boards(shape)
        self.types = {b.name: jnp.dtype(b.dtype) for b in self.shared_boards}
        self.states: dict[str, tuple[str, int]] = {}
        """Tensor of states -> its board, and its place there."""
        for number, tensors in enumerate(shape.states):
            for tensor in tensors:
                board = f"{number}.{word(tensor)}"
                before = sum(b == board for b, _ in self.states.values())
                self.states[tensor.name] = board, before * shape.blocks
        self.boards = {b.name: jax.ShapeDtypeStruct((self.rows, *b.size), jnp.dtype(b.dtype)) for b in self.shared_boards
                       if interpret}  # fmt: skip

    def pad(self, tensor: Tensor, array: jax.Array) -> jax.Array:
        """Pads an array that is loaded without the copy engine with zeros, as far as tiles reach past its end."""
        missing = -self.shape.rolled.extent % self.shape.tile
        passing = any(s.tensor == tensor.name for s in self.shape.passing)
        return jnp.pad(array, (0, missing)) if passing and missing else array

    def body(self, *refs: Any) -> None:
        shape = self.shape
        names = [t.name for t in (*shape.inputs, *shape.results)] + list(self.boards)
        arrays = dict(zip(names, refs, strict=True))
        memory = {a.name: plgpu.SMEM(a.shape, jnp.dtype(a.dtype)) for a in self.slots}
        full = {s.tensor: plgpu.Barrier(num_barriers=shape.slots) for s in shape.streams}
        boards = {b.name: plgpu.SMEM(b.size, jnp.dtype(b.dtype)) for b in self.shared_boards if not self.interpret}
        met: Any = []
        if self.interpret:
            met = [plgpu.ClusterBarrier(collective_axes=(PART,)) for _ in shape.states]
        elif shape.states:
            met = plgpu.SMEM((MEETING_WORDS * len(shape.states),), jnp.int32)

        def scoped(memory: Any, full: Any, boards: Any, met: Any) -> None:
            Block(self, arrays, memory, full, arrays if self.interpret else boards, met).run()

        pl.run_scoped(scoped, memory, full, boards, met)


class Block:
    """One block: where it is, and its shared memory."""

    def __init__(self, kernel: Kernel, arrays: Any, memory: Any, full: Any, boards: Any, met: Any) -> None:
        self.kernel, self.shape, self.interpret = kernel, kernel.shape, kernel.interpret
        self.arrays, self.memory, self.full, self.boards, self.met = arrays, memory, full, boards, met
        shape = self.shape
        self.row = lax.axis_index(ROW)
        self.part = 0 if shape.part is None else lax.axis_index(PART)
        rows = replace(shape.programs[-1], grid=shape.rows, descending=(), interleave=1)
        self.starts: dict[Axis, Any] = block_starts(rows, self.row)
        if shape.part is not None:
            self.starts[shape.part] = self.part
        self.awaited: set[str] = set()
        """Streams whose copies an earlier loop has awaited."""

    def run(self) -> None:
        for slot in range(self.shape.slots):
            for stream in self.shape.streams:
                self._fetch(stream, slot)
        if self.shape.states and not self.interpret:
            mosaic_code.prepare_meetings(self.met, [4 * b for b in words_told(self.shape)])
        for number, program in enumerate(self.shape.programs):
            Phase(self, program, number).run_block(self.starts)
        if self.shape.buffers:
            plgpu.wait_smem_to_gmem(0)

    def at(self, indices: tuple[Axis, ...], last: Any = None) -> tuple[Any, ...]:
        """The index of the block's row, and `last` along the rolled axis."""
        found = tuple(last if a == self.shape.rolled else self.starts[a] for a in indices)
        return found or (0,)

    def is_whole(self, slot: int) -> Any:
        """Does the tile in a slot lie inside the axis? True or False where that is known."""
        shape = self.shape
        first, last = slot, (shape.blocks - 1) * shape.slots + slot
        if last < shape.whole:
            return True
        return False if first >= shape.whole else self.part * shape.slots + slot < shape.whole

    def _fetch(self, stream: Load, slot: int) -> None:
        """Ask for the tile that belongs in a slot."""
        shape, name = self.shape, stream.tensor

        def copy(start: Any, size: int) -> None:
            source = self.arrays[name].at[self.at(stream.indices, pl.ds(start, size))]
            target = self.memory[name].at[slot]
            target = target if size == shape.tile else target.at[pl.ds(0, size)]
            plgpu.copy_gmem_to_smem(source, target, self.full[name].at[slot], oob_mode=_compat.in_bounds())

        _when(self.is_whole(slot), lambda: copy((self.part * shape.slots + slot) * shape.tile, shape.tile))
        owner, place = divmod(shape.whole, shape.slots)
        if shape.rest and place == slot:
            _when(
                True if shape.part is None else self.part == owner, lambda: copy(shape.whole * shape.tile, shape.rest)
            )


def _when(condition: Any, then: Any) -> None:
    if condition is True:
        then()
    elif condition is not False:
        pl.when(condition)(then)
