"""Counts what one block of a kernel takes of a multiprocessor: shared memory, threads and registers."""

from collections.abc import Iterable
from dataclasses import dataclass

MOST_REGISTERS = 255
"""The most registers of one thread."""
REGISTERS = 1 << 16
"""Registers of one multiprocessor."""
REGISTER_UNIT = 8
"""Registers are given to a thread in such multiples."""
REGISTER_BYTES = 4
THREADS = 2048
"""The most threads that live on a multiprocessor."""
BLOCKS = 32
"""The most blocks that live on a multiprocessor."""
SYSTEM_BYTES = 1024
"""Bytes of shared memory that each block takes besides its own."""
WARP = 32
WARPGROUP_THREADS = 4 * WARP


@dataclass(frozen=True, slots=True)
class Buffer:
    """A part of shared memory, alive from the statement numbered `first` to the one numbered `last`."""

    name: str
    bytes: int
    first: int = 0
    last: int = 0
    passing: bool = False
    """Values pass through it while a statement runs: one such buffer is there at a time."""


@dataclass(frozen=True, slots=True)
class Spill:
    """Values of a thread that lie in memory, as there is no register for them."""

    path: tuple[int, ...]
    """The place of the loop in which they are written and read: those of statements and of segments, from the outside in."""
    bytes: int
    """Written and read, in one trip."""
    kept: int = 0
    """The bytes of memory that hold them."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The shared memory that one block takes, and the buffers in it."""

    bytes: int
    buffers: tuple[Buffer, ...]

    def problem(self, shared_memory_bytes: int) -> str | None:
        """Returns why a kernel cannot run on a device whose blocks have so much shared memory; None if it can."""
        if self.bytes <= shared_memory_bytes:
            return None
        widest = max(self.buffers, key=lambda b: b.bytes, default=None)
        which = "" if widest is None else f" ({widest.name}: {widest.bytes})"
        return f"its tiles take up to {self.bytes} bytes of shared memory{which}, of {shared_memory_bytes}"


@dataclass(frozen=True, slots=True)
class Resources:
    """The shared memory, threads and registers that one block takes: never less than the compiler reports, but for estimates."""

    shared_bytes: int
    threads: int
    registers: int
    """Registers of one thread."""
    spills: tuple["Spill", ...] = ()
    """An estimate of the values that find no register. They make a kernel slow, not wrong."""
    buffers: tuple[Buffer, ...] = ()
    """The buffers in shared memory, with the statements during which they live."""
    likely_registers: int | None = None
    """An estimate of the registers that one thread really takes; None where there is none."""

    @property
    def spilled_bytes(self) -> int:
        """Bytes that one thread spills, each counted once."""
        return sum(s.bytes for s in self.spills)

    @property
    def kept_bytes(self) -> int:
        """Bytes of memory that hold what one thread spills."""
        return sum(s.kept for s in self.spills)

    def problem(self, shared_memory_bytes: int) -> str | None:
        """Says why a block does not fit in so much shared memory; None where it does."""
        return Shared(self.shared_bytes, self.buffers).problem(shared_memory_bytes)

    def show(self, shared_memory_bytes: int) -> str:
        """Returns a sentence on a block's needs, for a device whose blocks have so much shared memory."""
        spilled = f", {self.spilled_bytes} bytes of each spilled" if self.spilled_bytes else ""
        return (
            f"takes {self.shared_bytes} bytes of shared memory and up to {self.registers} registers for each of "
            f"{self.threads} threads{spilled}; at least {self.resident_blocks(shared_memory_bytes)} on a multiprocessor at a time"
        )

    def resident_blocks(self, shared_memory_bytes: int) -> int:
        """Counts the blocks that live on a multiprocessor at a time, at least; 0 where one does not fit.

        shared_memory_bytes: what one block may have; a multiprocessor has that for one block, and `SYSTEM_BYTES`.
        """
        by_shared = (shared_memory_bytes + SYSTEM_BYTES) // (self.shared_bytes + SYSTEM_BYTES)
        return min(by_shared, self._with_registers(self.registers), THREADS // self.threads, BLOCKS)

    @property
    def likely_blocks(self) -> int:
        """The blocks for which a multiprocessor has registers at a time, if threads take as many as is likely."""
        return self._with_registers(self.registers if self.likely_registers is None else self.likely_registers)

    def _with_registers(self, registers: int) -> int:
        given = max(1, -(-registers // REGISTER_UNIT)) * REGISTER_UNIT
        return REGISTERS // (given * self.threads)


def peak_bytes(buffers: Iterable[Buffer], multiple: int = 1) -> int:
    """The most bytes that are alive at once. Buffers that are no multiple of some bytes are gathered in one that is."""
    found = list(buffers)

    def alive(n: int) -> int:
        here = [b.bytes for b in found if b.first <= n <= b.last and not b.passing]
        here.append(max((b.bytes for b in found if b.first <= n <= b.last and b.passing), default=0))
        others = sum(size for size in here if size % multiple)
        return sum(size for size in here if not size % multiple) + -(-others // multiple) * multiple

    return max((alive(n) for n in {b.first for b in found}), default=0)


def most_registers(threads: int) -> int:
    """The registers that each thread of a block can have."""
    return min(MOST_REGISTERS, REGISTERS // threads // REGISTER_UNIT * REGISTER_UNIT)
