"""The shared memory of the kernels that are written here: allocations, which rules add up and emitters make; those of a kernel for
warpgroups, and by which buffer each of its results leaves."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.tile_program import Store, TileProgram, expressions
from pallasfuse.pallas_backend.mosaic_shape import WARPGROUP_ROWS, Shape, box, present
from pallasfuse.resources.block import WARPGROUP_THREADS, Buffer, Resources, most_registers
from pallasfuse.targets import MOSAIC_GPU

THREADS = WARPGROUP_THREADS
"""Threads of one warpgroup."""
SHARED_BYTES = MOSAIC_GPU.shared_memory_bytes
VERDICT = "verdict"


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


def slots(program: TileProgram, shape: Shape) -> dict[str, int]:
    """Buffers of every load: one for each stage of a pipeline, or for each warpgroup."""
    streamed = {s.name: program.stages for s in (*shape.streamed, *shape.sliced)}
    return streamed | {s.name: shape.warpgroups for s in shape.resident}


def barrier_count(slots: Mapping[str, int], warpgroups: int) -> int:
    """Counts the barriers: two for each slot, which is full or empty, one turn for each warpgroup, and the verdict."""
    return 2 * sum(slots.values()) + warpgroups + 1


def own_size(program: TileProgram, shape: Shape, axes: tuple[Axis, ...]) -> tuple[int, ...]:
    """The part of a tile that one warpgroup owns."""
    return tuple(WARPGROUP_ROWS if a == shape.rows else program.tile(a) for a in present(program, axes))


def allocations(program: TileProgram, shape: Shape) -> tuple[Allocation, ...]:
    """Every buffer of the kernel: those of loads by their name, those of results by the tensor's."""
    return _allocations(program, shape, direct(program, shape).union(staging(program, shape)))


def _allocations(program: TileProgram, shape: Shape, elsewhere: Collection[str]) -> tuple[Allocation, ...]:
    """Lists the buffers of the kernel. elsewhere: stored tensors without a buffer of their own."""
    count = slots(program, shape)
    streamed = (*shape.streamed, *shape.sliced)
    found = [Allocation(s.name, count[s.name], box(program, shape, s), s.dtype) for s in streamed]
    found += [Allocation(s.name, count[s.name], own_size(program, shape, s.indices), s.dtype) for s in shape.resident]
    types = {t.name: t.dtype for t in program.outputs}
    for s in shape.stores:
        if s.tensor not in elsewhere:
            found.append(Allocation(s.tensor, shape.warpgroups, own_size(program, shape, s.indices), types[s.tensor]))
    if program.instead is not None:
        found.append(Allocation(VERDICT, shape.warpgroups, (THREADS,), "int32"))
    return tuple(found)


def shared_bytes(program: TileProgram, shape: Shape) -> int:
    """Returns the bytes of shared memory that one block takes."""
    return total_bytes(allocations(program, shape), barrier_count(slots(program, shape), shape.warpgroups))


def _fits(program: TileProgram, shape: Shape, elsewhere: Collection[str]) -> bool:
    barriers = barrier_count(slots(program, shape), shape.warpgroups)
    return total_bytes(_allocations(program, shape, elsewhere), barriers) <= SHARED_BYTES


def staging(program: TileProgram, shape: Shape) -> dict[str, str]:
    """Stored tensor -> the load whose buffer it leaves by, where there is no space else: one that nothing reads after the loop."""
    if _fits(program, shape, ()):
        return {}
    late = {t for s in shape.after for e in expressions(s) for t in e.tensors}
    free = [s for s in shape.resident if s in shape.before and s.name not in late]
    found: dict[str, str] = {}
    types = {t.name: t.dtype for t in program.outputs}
    for store in shape.stores:
        sizes = [program.tile(a) for a in present(program, store.indices)]
        for load in free:
            kept = present(program, load.indices)
            alike = kept[0] == shape.rows and [program.tile(a) for a in kept] == sizes
            if alike and load.dtype == types[store.tensor]:
                found[store.tensor] = load.name
                free.remove(load)
                break
    return found


def direct(program: TileProgram, shape: Shape) -> frozenset[str]:
    """Stored tensors that leave from registers, as there is no space for a buffer: of two dimensions, the widest first."""
    elsewhere = set(staging(program, shape))
    types = {t.name: t.dtype for t in program.outputs}

    def width(s: Store) -> int:
        return dtypes.itemsize_bytes(types[s.tensor]) * program.tile(s.indices[-1])

    wide = [s for s in shape.stores if s.tensor not in elsewhere and len(present(program, s.indices)) == 2]
    wide.sort(key=width, reverse=True)
    found: list[str] = []
    while wide and not _fits(program, shape, elsewhere.union(found)):
        found.append(wide.pop(0).tensor)
    return frozenset(found)
