"""Copies of arguments and results that XLA makes beside a kernel for warpgroups, whose copy engine moves whole small tiles."""

import math
from collections.abc import Sequence

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Load, Store, TileProgram, every

_COPY_ROWS = 8
"""The rows of a small tile in which the copy engine moves matrices."""
_SWIZZLES = (128, 64, 32, 16)
"""Bytes of a row of such a tile: the most of these that divide a row of the tile that a block moves."""


def copied(program: TileProgram) -> list[float]:
    """The bytes that XLA reads and writes before and after a kernel for warpgroups, of each tensor that it copies.

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
            found.append(float(dtypes.itemsize_bytes(tensor.dtype) * (given + padded)))
    return found


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
