"""Copies of arguments and results that XLA makes beside a kernel, which wants them in whole small tiles or in longer rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pallasfuse.device import Device
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Load, Store, TileProgram, every
from pallasfuse.resources.as_threads import as_threads_run_it
from pallasfuse.resources.padded_rows import padded_rows, row_of

_COPY_ROWS = 8
"""The rows of a small tile in which the copy engine moves matrices."""
_SWIZZLES = (128, 64, 32, 16)
"""Bytes of a row of such a tile: the most of these that divide a row of the tile that a block moves."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A tensor that XLA copies: the bytes that it reads and writes, and the elements that it writes."""

    bytes: float
    elements: float

    def us(self, device: Device) -> float:
        """The time of its kernel, without its start: that of the memory, or of the threads that begin, one in a clock."""
        threads = self.elements / _ELEMENTS_OF_A_THREAD
        begin_us = threads / (1e3 * device.multiprocessors * device.clock_ghz)
        return max(1e-3 * self.bytes / device.memory_gb_s, begin_us)


_ELEMENTS_OF_A_THREAD = 4
"""The most elements that a thread of a map writes, as `price.gpu_loops` has them."""


def copied(program: TileProgram) -> list[Copied]:
    """Lists what XLA copies before and after a kernel for warpgroups.

    Booleans become bytes. Matrices whose extents are no multiple of a small tile's are padded, and vectors that are none of their
    own tile's.
    """
    tensors = {t.name: t for t in (*program.inputs, *program.outputs)}
    multiples: dict[str, dict[Axis, int]] = {}
    for s in every(program.body):
        if isinstance(s, Load | Store):
            own = multiples.setdefault(s.tensor, {})
            for axis, multiple in _multiples(program, tensors[s.tensor], s.indices).items():
                own[axis] = math.lcm(own.get(axis, 1), multiple)
    found = []
    for name, own in multiples.items():
        tensor = tensors[name]
        given = math.prod(a.extent for a in tensor.axes)
        padded = math.prod(-(-a.extent // own.get(a, 1)) * own.get(a, 1) for a in tensor.axes)
        if tensor.dtype == "bool" or padded > given:
            found.append(_of(tensor, given, padded))
    return found


def with_longer_rows(program: TileProgram) -> list[Copied]:
    """Lists the inputs of which XLA makes copies with longer rows for a kernel by threads."""
    tensors = {t.name: t for t in program.inputs}
    found = []
    for name, longer in padded_rows(as_threads_run_it(program).program).items():
        extents = [a.extent for a in tensors[name].axes]
        padded = [longer if n == row_of(tensors[name].axes) else e for n, e in enumerate(extents)]
        found.append(_of(tensors[name], math.prod(extents), math.prod(padded)))
    return found


def _of(tensor: Tensor, given: int, padded: int) -> Copied:
    return Copied(float(dtypes.itemsize_bytes(tensor.dtype) * (given + padded)), float(padded))


def _multiples(program: TileProgram, tensor: Tensor, indices: Sequence[Axis]) -> dict[Axis, int]:
    """The multiples to which the extents of a tensor are rounded up for a load or a store, by the tensor's own axes."""
    kept = [n for n, a in enumerate(indices) if program.tile(a) > 1]
    if not kept:
        return {}
    last = program.tile(indices[kept[-1]])
    if len(kept) > 1:
        item = dtypes.itemsize_bytes(tensor.dtype)
        width = next((s for s in _SWIZZLES if last * item % s == 0), item)
        return {tensor.axes[kept[0]]: _COPY_ROWS, tensor.axes[kept[-1]]: max(1, width // item)}
    return {tensor.axes[kept[0]]: last}
