"""The traffic of a block's tensors: what crosses the memory of a GPU, its shared cache, and the ports of a multiprocessor."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pallasfuse.device import Device
from pallasfuse.price.block_accesses import Access
from pallasfuse.price.block_work import BlockWork

SECTOR_BYTES = 32
"""The shared cache hands out so many bytes at a time."""
_COPIED_AHEAD, _BY_THREADS = 0.875, 0.4375
"""The shares of a port's rate that copies reach which begin trips ahead, and that threads reach which load into registers."""
_NEAR_SHARE = 0.5
"""The part of the memory that a multiprocessor has for shared memory and its own cache, which that cache keeps: an estimate."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Says what all blocks move of one tensor through the device's memory, and one block through the shared cache, in bytes."""

    tensor: str
    memory: float
    sectors: float
    """Bytes of all sectors that a block touches."""
    ahead: float
    """The bytes of these sectors whose copies begin trips ahead."""
    is_store: bool


def moved_by(work: BlockWork, in_cache: float, *, kept: bool, ahead: bool) -> list[Moved]:
    """Returns the traffic of every tensor of a block.

    What it reads in several loops comes from memory again where the blocks that run at a time read more in between than the cache
    holds (`in_cache` bytes a block), unless the block keeps it (`kept`). ahead: all copies begin trips ahead.
    """
    by_tensor: dict[tuple[str, bool], list[Access]] = {}
    for a in work.accesses:
        by_tensor.setdefault((a.tensor, a.is_store), []).append(a)
    found = []
    for (tensor, is_store), accesses in by_tensor.items():
        loops: dict[int, float] = {}
        sectors: dict[int, float] = {}
        early = 0.0
        for a in accesses:
            loops[a.loop] = loops.get(a.loop, 0.0) + a.bytes
            sectors[a.loop] = sectors.get(a.loop, 0.0) + a.sector_bytes(SECTOR_BYTES)
            early += a.sector_bytes(SECTOR_BYTES) if ahead or (a.pipelined and work.stages > 1) else 0.0
        unique = max(a.unique_bytes for a in accesses)  # one of them may look up a few rows
        once = min(unique, max(loops.values()) * work.blocks)
        again = (
            0.0 if kept or max(loops.values()) <= in_cache else (sum(loops.values()) / max(loops.values()) - 1) * once
        )
        of_cache = max(sectors.values()) if kept else sum(sectors.values())
        found.append(Moved(tensor, once + again, of_cache, early, is_store))
    return found


def through_port(moved: Moved, near: Collection[str]) -> float:
    """Returns the bytes that take as long through a multiprocessor's port at its whole rate as what a block loads of one tensor.

    near: tensors that a multiprocessor keeps.
    """
    by_threads = 1.0 if moved.tensor in near else _BY_THREADS
    return 0.0 if moved.is_store else moved.ahead / _COPIED_AHEAD + (moved.sectors - moved.ahead) / by_threads


def kept_near(moved: Sequence[Sequence[Moved]], blocks: float, device: Device) -> frozenset[str]:
    """Returns the tensors that threads load and that stay in a multiprocessor's own cache for its next blocks.

    The smallest ones come first.
    """
    left = _NEAR_SHARE * device.shared_memory_bytes
    found: set[str] = set()
    again = [m for w in moved for m in w if not m.is_store and not m.ahead and m.sectors * blocks > 2 * m.memory]
    for m in sorted(again, key=lambda m: m.memory):
        left -= 0.0 if m.tensor in found else m.memory
        if left < 0:
            break
        found.add(m.tensor)
    return frozenset(found)


def largest_by_tensor(moved: Sequence[Sequence[Moved]], *, sectors: bool = False) -> float:
    """Returns the bytes of memory, or of sectors, that programs move which keep what they have read: of each tensor the most."""
    largest: dict[str, float] = {}
    for m in (m for work in moved for m in work):
        largest[m.tensor] = max(largest.get(m.tensor, 0.0), m.sectors if sectors else m.memory)
    return sum(largest.values())
