"""Loads and stores of one block of a tile program: bytes, how they lie in memory, and how often."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.tensors import Tensor
from pallasfuse.resources.thread_layouts import LANES, VECTOR_BYTES


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
    """The number of times that a block goes over the same sectors, each time for some of their elements.

    Twice that where several arrays are stored so. (36 kernels that store one to six arrays with a last axis of 2 to 4 elements, on
    an H100: with one, a store takes as long as if it went over its sectors that often, or less; with more, twice as long.)
    """
    part_bytes: float = 0.0
    """The bytes of the parts of a run that are loaded one after the other, each from a sector of its own; 0: runs are whole."""
    vector_bytes: int = VECTOR_BYTES
    """The bytes that a thread moves at once."""

    @property
    def bytes(self) -> float:
        return self.tile_bytes * self.times

    def sector_bytes(self, sector: int = 32) -> float:
        """The bytes of all sectors that a block touches.

        Runs that begin anywhere are moved in smaller pieces: what a warp asks for at once begins and ends in the midst of sectors,
        which it touches both. (Rows of 197 and 1001 elements of two and of four bytes on an H100.)
        """
        touched = self.passes * self.bytes * sector * math.ceil(self.run_bytes / sector) / self.run_bytes
        if self.vector_bytes >= VECTOR_BYTES or self.run_bytes < sector:
            return touched
        return touched * (1 + (sector - self.vector_bytes) / (LANES * self.vector_bytes))

    def scattered(self, sector: int = 32) -> float:
        """Counts the loads or stores of a block that each find little in a sector."""
        run = min(self.part_bytes or self.run_bytes, self.run_bytes)
        return self.bytes / run if run < sector else 0.0

    def one_by_one(self, tensor: Tensor, unrolled: Collection[Axis], sector: int = 32) -> "Access":
        """Returns a load or a store whose `unrolled` axes are written out.

        Neighbours along those are loaded one after the other, from sectors that the cache of a multiprocessor keeps. And they are
        stored one after the other: no such cache gathers a sector until it is whole.
        """
        size = dtypes.itemsize_bytes(tensor.dtype)
        if not self.is_store:
            places = [n for n, a in enumerate(tensor.axes) if a in unrolled and a.extent > 1]
            if not places or size * math.prod(a.extent for a in tensor.axes[places[0] :]) < sector:
                return self
            return replace(self, part_bytes=float(size * math.prod(a.extent for a in tensor.axes[places[-1] + 1 :])))
        neighbours = math.prod(
            a.extent for a in takewhile(lambda a: a in unrolled or a.extent == 1, reversed(tensor.axes))
        )
        passes = min(neighbours, max(1, sector // size))
        return replace(self, passes=passes)

    def beside_others(self) -> "Access":
        """Returns a store in parts that takes turns with those of other arrays: sectors leave the cache before they are whole."""
        return replace(self, passes=2 * self.passes) if self.is_store and self.passes > 1 else self


def access(
    tensor: Tensor, indices: tuple[Axis, ...], tiles: Mapping[Axis, int], times: float, pipelined: bool, loop: int, *,
    is_store: bool = False, vector_bytes: int = VECTOR_BYTES,
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
    return Access(
        tensor.name, tile * size, run * size, unique * size, times, pipelined, is_store, loop, vector_bytes=vector_bytes
    )


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
