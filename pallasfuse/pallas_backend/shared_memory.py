"""Shared memory of the kernels that are written here: one list of allocations, which rules add up and emitters make."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from pallasfuse.ir import dtypes
from pallasfuse.resources.block import Buffer, Resources, most_registers

RESERVED_BYTES = 2048
"""The scratch of reductions."""
BARRIER_BYTES = 8
ALIGNMENT = 1024
COPY_BYTES = 128
"""The copy engine reads and writes shared memory from a multiple of so many bytes on. Anywhere else is a misaligned address, which
ends the CUDA context of the process."""


def copied(size: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """The size of a tile with what follows it, so that the next copy of it begins where the copy engine can write.

    Tiles with rows are there already: eight rows of sixteen bytes are the smallest piece in which they lie."""
    if len(size) != 1:
        return size
    together = COPY_BYTES // item_bytes
    return (-(-size[0] // together) * together,)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Room for so many copies of a tile, for as long as the kernel runs."""

    name: str
    copies: int
    size: tuple[int, ...]
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all copies together, each with the elements that are lost behind it."""
        return (self.copies, *copied(self.size, dtypes.itemsize_bytes(self.dtype)))

    @property
    def bytes(self) -> int:
        """The bytes of the allocation, with those that are lost at the end."""
        exact = prod(self.shape) * dtypes.itemsize_bytes(self.dtype)
        return -(-exact // ALIGNMENT) * ALIGNMENT


def total_bytes(allocations: Iterable[Allocation], barriers: int) -> int:
    """Returns the bytes of shared memory that one block takes."""
    return RESERVED_BYTES + BARRIER_BYTES * barriers + sum(a.bytes for a in allocations)


def resources_of(allocations: Iterable[Allocation], barriers: int, threads: int) -> Resources:
    """Returns the shared memory, threads and registers that one block takes.

    A kernel starts with all the registers that its threads can have, and is refused where its tiles need more.
    """
    found = tuple(allocations)
    named = [(f"{a.copies} of {a.name}", a.bytes) for a in found]
    named += [("scratch of reductions", RESERVED_BYTES), ("barriers", BARRIER_BYTES * barriers)]
    buffers = tuple(Buffer(name, size) for name, size in named)
    return Resources(total_bytes(found, barriers), threads, most_registers(threads), (), buffers)
