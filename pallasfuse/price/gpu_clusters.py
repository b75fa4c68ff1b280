"""The price of a block of a cluster, by itself: it copies its part of a row, and computes with one warpgroup, phase by phase.

Several blocks live on a multiprocessor, whose time is that of one block, shared among them. The numbers are fitted to 139 kernels
of 11 programs on an H200: clusters of 1 to 16 blocks, with 1 to 16 tiles for each (a geometric standard deviation of 1.35).
"""

import math
from collections.abc import Sequence

from pallasfuse.device import Device
from pallasfuse.ir.tile_program import Loop, TileProgram, every
from pallasfuse.price.block_work import BlockWork
from pallasfuse.resources.block import REGISTERS, Resources
from pallasfuse.resources.clusters import slot_bytes

OVERLAP = 3.7
"""The exponent of the smooth maximum of resources: the blocks of a cluster wait for each other, and for what they copy."""
_BLOCK_US = 2.2
"""To begin, and to end."""
_MEETING_US = 0.8
"""From the end of a phase until all blocks have the states of all."""
_MEMBER_US = 0.18
"""The time that each block of a cluster adds to that of every one: they begin together, and end together."""
_TRIP_US = 0.21
_REDUCTION_US = 0.11
"""The latency of a reduction over the warpgroup."""
_COPIED_GB_S = 130.0
"""The rate at which a block copies its part, while others do the same."""
_BOUND_REGISTERS, _TAKEN_SHARE = 64, 0.9
"""The registers of a thread that the bound counts and the compiler does without, and the share of the others that it takes."""
_LEAST_REGISTERS = 32
_MOST_BLOCKS = 16


def block_us(programs: Sequence[TileProgram], works: Sequence[BlockWork]) -> float:
    """Returns the time of one block, from its first copy to its last."""
    computed_us = sum(_TRIP_US * w.trips + _REDUCTION_US * w.reductions for w in works)
    waited_us = _BLOCK_US + _MEETING_US * (len(programs) - 1) + _MEMBER_US * members(programs)
    return computed_us + waited_us + 1e-3 * kept_bytes(works[0]) / _COPIED_GB_S


def members(programs: Sequence[TileProgram]) -> int:
    """Counts the blocks of a cluster."""
    splits = [s.split for p in programs for s in every(p.body) if isinstance(s, Loop) and s.split is not None]
    return splits[0].part.extent if splits else 1


def resident_blocks(programs: Sequence[TileProgram], device: Device, held: Resources | None) -> int:
    """Counts the blocks that live on a multiprocessor, by what they keep in shared memory and in registers."""
    by_registers = _MOST_BLOCKS
    if held is not None:
        registers = max(_LEAST_REGISTERS, _TAKEN_SHARE * (held.registers - _BOUND_REGISTERS))
        by_registers = int(REGISTERS / (registers * held.threads))
    return max(1, min(_MOST_BLOCKS, by_registers, device.shared_memory_bytes // max(1, _shared_bytes(programs))))


def _shared_bytes(programs: Sequence[TileProgram]) -> int:
    """Returns the bytes of the slots of a block: as many tiles as it has, of all that is copied to it and leaves from it."""
    loops = [s for p in programs for s in p.body if isinstance(s, Loop)]
    if not loops:
        return 0
    rolled = loops[0].axis
    tile = programs[0].tile(rolled)
    tiles = -(-rolled.extent // tile)
    rows = math.prod(t for _, t in programs[-1].grid)
    return rows * -(-tiles // members(programs)) * tile * slot_bytes(programs, rolled)


def kept_bytes(work: BlockWork) -> float:
    """Returns the bytes that a block keeps: what it loads of each tensor, in the loop that loads most of it."""
    found: dict[tuple[str, int], float] = {}
    for a in work.accesses:
        if not a.is_store:
            found[a.tensor, a.loop] = found.get((a.tensor, a.loop), 0.0) + a.bytes
    return sum(max(b for (other, _), b in found.items() if other == t) for t in dict.fromkeys(t for t, _ in found))
