"""The price of a block of a cluster, by itself: it copies its part of a row, and computes with one warpgroup, phase by phase.

Several blocks live on a multiprocessor, whose time is that of one block, shared among them. The times are fitted to 119 kernels of
seven functions on an H200, of 8 to 4096 rows: clusters of 1 to 8 blocks, with 1 to 16 tiles for each (a geometric standard
deviation of 1.09, all within 0.77 to 1.21). The exponent and the registers are fitted to eleven kernels of rows of 128256.
"""

from collections.abc import Sequence

from pallasfuse.device import Device
from pallasfuse.ir.tile_program import Load, Loop, Reduce, TileProgram, every
from pallasfuse.price.block_work import BlockWork
from pallasfuse.resources.block import MOST_REGISTERS, REGISTERS, WARPGROUP_THREADS
from pallasfuse.resources.clusters import slot_bytes, streams_of

_ROOM_US = 0.25
"""The time that each block of a cluster waits for each of its blocks where clusters follow others: all need room at once."""
_TRIP_US = 0.058
"""The time that passes between two trips of a loop."""
_PASSING_GB_S = 27.0
"""The rate at which a block waits for what all rows have, which comes from the cache."""
_REDUCTION_US = 0.82
"""The time from the end of a loop until all blocks have a state of all: the warpgroup reduces, the cluster meets, each merges."""
_COPIED_GB_S = 145.0
"""The rate at which a block copies its part, while others do the same."""
_REGISTERS, _ELEMENT_REGISTERS = 24.0, 2.1
"""The registers of a thread besides those of tiles, and those for each of its elements of a tile: of eleven
kernels eight took 0.97 to 1.06 times as many, one 1.18, and two that compute little for each element 0.5 and 0.8."""
_MOST_BLOCKS = 16


def block_us(programs: Sequence[TileProgram], works: Sequence[BlockWork], rounds: int) -> float:
    """Returns the time of one block, from its first copy to its last.

    rounds: the blocks that live where it does, one after the other.
    """
    trips = sum(w.trips for w in works)
    computed_us = _TRIP_US * trips + _REDUCTION_US * reductions_over_threads(programs)
    passing = _passing(programs)
    computed_us += 1e-3 * sum(a.bytes for a in works[-1].accesses if a.tensor in passing) / _PASSING_GB_S
    waited_us = _ROOM_US * members(programs) if rounds > 1 else 0.0
    return computed_us + waited_us + 1e-3 * kept_bytes(works[0]) / _COPIED_GB_S


def overlap(resident: int) -> float:
    """Returns the exponent of the smooth maximum of resources, which rises with the blocks on a multiprocessor.

    The blocks of a cluster wait for each other, and for what they copy.
    """
    return 1.0 + resident


def _passing(programs: Sequence[TileProgram]) -> frozenset[str]:
    """Returns the tensors that all rows have and the last loop loads, which no block keeps."""
    loops = [s for s in programs[-1].body if isinstance(s, Loop)]
    if not loops:
        return frozenset()
    kept = {s.tensor for s in streams_of(programs, loops[-1].axis)}
    loads = [s for s in loops[-1].segments[0].body if isinstance(s, Load)]
    return frozenset(s.tensor for s in loads if s.indices == (loops[-1].axis,)) - kept


def reductions_over_threads(programs: Sequence[TileProgram]) -> int:
    """Counts the reductions over all threads of a block: after each loop, of every state."""
    loops = [s for p in programs for s in p.body if isinstance(s, Loop)]
    return sum(isinstance(s, Reduce) for loop in loops for s in loop.segments[0].body)


def members(programs: Sequence[TileProgram]) -> int:
    """Counts the blocks of a cluster."""
    splits = [s.split for p in programs for s in every(p.body) if isinstance(s, Loop) and s.split is not None]
    return splits[0].part.extent if splits else 1


def resident_blocks(programs: Sequence[TileProgram], device: Device) -> int:
    """Counts the blocks that live on a multiprocessor, by what they keep in shared memory and in registers."""
    tiles = [p.tile(s.axis) for p in programs for s in p.body if isinstance(s, Loop)]
    elements = max(tiles, default=0) / WARPGROUP_THREADS
    registers = min(MOST_REGISTERS, _REGISTERS + _ELEMENT_REGISTERS * elements)
    by_registers = int(REGISTERS / (registers * WARPGROUP_THREADS))
    return max(1, min(_MOST_BLOCKS, by_registers, device.shared_memory_bytes // max(1, _shared_bytes(programs))))


def _shared_bytes(programs: Sequence[TileProgram]) -> int:
    """Returns the bytes of the slots of a block: as many tiles as it has, of all that is copied to it and leaves from it."""
    loops = [s for p in programs for s in p.body if isinstance(s, Loop)]
    if not loops:
        return 0
    rolled = loops[0].axis
    tile = programs[0].tile(rolled)
    tiles = -(-rolled.extent // tile)
    return -(-tiles // members(programs)) * tile * slot_bytes(programs, rolled)


def kept_bytes(work: BlockWork) -> float:
    """Returns the bytes that a block keeps: what it loads of each tensor, in the loop that loads most of it."""
    found: dict[tuple[str, int], float] = {}
    for a in work.accesses:
        if not a.is_store:
            found[a.tensor, a.loop] = found.get((a.tensor, a.loop), 0.0) + a.bytes
    return sum(max(b for (other, _), b in found.items() if other == t) for t in dict.fromkeys(t for t, _ in found))
