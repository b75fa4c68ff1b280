"""Loads and stores of one block of a tile program: bytes, how they lie in memory, and how often."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.tensors import Tensor


@dataclass(frozen=True, slots=True)
class Access:
    """A load or a store of tiles of one tensor."""

    tensor: str
    tile_bytes: float
    run_bytes: float
    """Contiguous in memory."""
    unique_bytes: float
    """The bytes that all blocks touch together, each counted once."""
    times: float
    """The number of times that a block loads or stores such a tile."""
    pipelined: bool
    """Several trips ahead, where the kernel has stages."""
    is_store: bool = False
    loop: int = 0
    """The number of the loop that it is in; 0: outside."""
    gathered: bool = False
    """The rows of a tile come from places that a table says, and make an array of their own."""
    passes: int = 1
    """The number of times that a block goes over the same sectors, each time for some of their elements."""

    @property
    def bytes(self) -> float:
        return self.tile_bytes * self.times

    def sector_bytes(self, sector: int = 32) -> float:
        """The bytes of all sectors that a block touches."""
        return self.passes * self.bytes * sector * math.ceil(self.run_bytes / sector) / self.run_bytes

    def one_by_one(self, tensor: Tensor, unrolled: Collection[Axis], sector: int = 32) -> "Access":
        """Returns a store whose `unrolled` axes are written out.

        Neighbours along those leave one after the other: no cache of a multiprocessor gathers a sector until it is whole.
        """
        neighbours = math.prod(
            a.extent for a in takewhile(lambda a: a in unrolled or a.extent == 1, reversed(tensor.axes))
        )
        return replace(self, passes=min(neighbours, max(1, sector // dtypes.itemsize_bytes(tensor.dtype))))


def access(
    tensor: Tensor, indices: tuple[Axis, ...], tiles: Mapping[Axis, int], times: float, pipelined: bool, loop: int, *,
    is_store: bool = False,
) -> Access:  # fmt: skip
    """The load or store of tiles of a tensor. loop: the number of the loop that it is in."""
    size = dtypes.itemsize_bytes(tensor.dtype)
    run = tile = 1
    together = True
    for axis in reversed(indices):
        extent, window = axis.extent, tiles[axis]
        tile *= min(window, extent)
        if together:
            run, together = tile, window >= extent
    unique = math.prod([a.extent for a in frozenset(indices)])
    return Access(tensor.name, tile * size, run * size, unique * size, times, pipelined, is_store, loop)


def looked_up(
    lookup: Lookup, indices: tuple[Axis, ...], tiles: Mapping[Axis, int], times: float, pipelined: bool, loop: int
) -> tuple[Access, Access]:
    """The reads of a tile that is looked up: of the source, whose runs end with a block of rows, and of the table.

    A slice is read as an array is.
    """
    if lookup.is_slice:
        part = replace(lookup.result, name=lookup.source.name)
        return access(part, indices, tiles, times, pipelined, loop), access(lookup.table, (), tiles, times, False, loop)
    tile = {a: min(tiles[b], a.extent) for a, b in zip(lookup.result.axes, indices, strict=True)}
    run = 1
    for axis in reversed(lookup.source.axes):
        if axis == lookup.rows:
            # parts of a block are read row by row
            run *= 1 if lookup.along is None or tile[lookup.along] % lookup.block else lookup.block
            break
        run *= 1 if axis in lookup.table.axes else tile[axis]
        if axis in lookup.table.axes or tile[axis] < axis.extent:
            break
    elements = math.prod(tile.values())
    unique = min(math.prod(a.extent for a in t.axes) for t in (lookup.result, lookup.source))
    size = dtypes.itemsize_bytes(lookup.source.dtype)
    read = Access(
        lookup.source.name, elements * size, run * size, unique * size, times, False, loop=loop, gathered=True
    )
    entries = [tile[a] if a in tile else -(-tile[lookup.along] // lookup.block) for a in lookup.table.axes]  # type: ignore[index]
    size = dtypes.itemsize_bytes(lookup.table.dtype)
    every = math.prod(a.extent for a in lookup.table.axes)
    last = entries[-1] if entries else 1
    return read, Access(
        lookup.table.name, math.prod(entries) * size, last * size, every * size, times, False, loop=loop
    )
