"""Elements that are read from places that positions say, or changed there: in pieces, each of a run of neighbours.

A piece comes in whole sectors, from where its source is found: tensors of some 100 kB stay beside each multiprocessor, others in
the cache of all of them, and what is larger comes from memory, of which a piece takes two sectors. (Gathers and sums of segments
of 16 million elements in pieces of 1 to 256, from and to tensors of 1 kB to 64 MB, on an H100.)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pallasfuse.device import Device
from pallasfuse.first_time import Recent
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.ir.tensors import Tensor
from pallasfuse.price.moves import moves_as_maps

_SECTOR, _FROM_MEMORY = 32, 64
"""The bytes that come for a piece of fewer, from the cache and from memory."""
_NEAR_BYTES = 1 << 17
"""A tensor of so many bytes is found beside each multiprocessor."""
_ANYWHERE = 0.55
"""Of the cache's bandwidth, what reads from places that lie anywhere reach."""
_CHANGED = 0.35
"""The same of sectors that are changed in the cache."""
_WORDS_CHANGED = 0.7
"""Elements of two bytes that are changed, for one sector: each is compared and exchanged by itself."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Runs of elements that lie anywhere in a tensor."""

    number: float
    bytes: float
    """Of each."""
    source_bytes: float = 0.0
    """Of the tensor that they are in."""
    words: float = 0.0
    """The elements of each piece that are changed one by one; 0: all of a sector at once."""


def cached_read(pieces: Pieces, device: Device) -> float:
    """Returns the bytes that the cache could bring, in order, in the time in which it brings these pieces."""
    if not _NEAR_BYTES < pieces.source_bytes <= device.found_bytes:
        return 0.0
    return pieces.number * _rounded(pieces.bytes, _SECTOR) / _ANYWHERE


def read_from_memory(pieces: Pieces, device: Device) -> float:
    """Returns the bytes that come from memory beyond those of the tensor, or of its elements that are wanted."""
    if pieces.source_bytes <= device.found_bytes:
        return 0.0
    moved = pieces.number * _rounded(pieces.bytes, _FROM_MEMORY)
    return max(0.0, moved - min(pieces.number * pieces.bytes, pieces.source_bytes))


def cached_change(pieces: Pieces) -> float:
    """Returns the bytes that the cache could bring in the time in which these pieces are changed in it."""
    sectors = pieces.words / _WORDS_CHANGED if pieces.words else _rounded(pieces.bytes, _SECTOR) / _SECTOR
    return pieces.number * sectors * _SECTOR / _CHANGED


def changed_in_memory(pieces: Pieces, device: Device) -> float:
    """Returns the bytes that come from memory to be changed, and go back."""
    if pieces.source_bytes <= device.found_bytes:
        return 0.0
    return 2.0 * pieces.number * _rounded(pieces.bytes, _FROM_MEMORY)


def _rounded(moved: float, unit: int) -> float:
    return math.ceil(moved / unit) * unit


def _pieces_read(program: LoopProgram) -> dict[tuple[Axis, ...], Pieces]:
    known = {d.name: d for d in program.definitions()}
    maps = {n.name: n for n in moves_as_maps(program).nests if isinstance(n, Nest)}
    found: dict[tuple[Axis, ...], Pieces] = {}
    given = {t.name for t in program.inputs}
    for node in program.nests:
        if not given.isdisjoint(node.reads):
            given.add(node.name)
        if isinstance(node, External) and node.form == "selection" and node.name in maps:
            source, *positions = (known[t] for t in node.operands)
            if any(volume(p.axes) > 1 and p.name in given for p in positions):
                pieces = _pieces(node.axes, source)
                for read in postorder(maps[node.name].body):
                    if isinstance(read, Read) and read.tensor == source.name:
                        found[read.indices] = pieces
    return found


pieces_read = Recent(_pieces_read)
"""Returns the pieces that are read where positions say which, by the axes along which their tensors are read. Not where positions
are computed from nothing that the program is given: such ones follow each other."""


def pieces_changed(update: External, known: Mapping[str, Tensor | Nest | External]) -> Pieces | None:
    """Returns the pieces that an update changes, if positions say where each of them is."""
    target, *others = (known[t] for t in update.operands)
    positions = [d for d in others if dtypes.is_integer(d.dtype) and volume(d.axes) > 1]
    if not others or not positions:
        return None
    changed = max(others, key=lambda d: volume(d.axes))
    pieces = _pieces(changed.axes, target)
    size = dtypes.itemsize_bytes(target.dtype)
    return Pieces(pieces.number, pieces.bytes, pieces.source_bytes, pieces.bytes / size if size < 4 else 0.0)


def _pieces(axes: Sequence[Axis], source: Tensor | Nest | External) -> Pieces:
    """The pieces of elements along some axes, of which the last ones are those of the source, too."""
    neighbours = 1
    for own, other in zip(reversed(source.axes), reversed(axes), strict=False):
        if own.extent != other.extent:
            break
        neighbours *= own.extent
    size = dtypes.itemsize_bytes(source.dtype)
    return Pieces(volume(axes) / neighbours, float(neighbours * size), float(volume(source.axes) * size))
