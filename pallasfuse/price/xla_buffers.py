"""The memory that XLA needs for what a program computes on the way: one block, as large as all that lives at once."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pallasfuse.price.xla_forms import LibraryProduct, LoopFusion, XlaKernel


@dataclass(frozen=True, slots=True)
class _Step:
    """One kernel of XLA, or one copy, with the tensors that it makes at once and those that it reads."""

    makes: Mapping[str, float]
    """Bytes by name."""
    reads: tuple[str, ...]
    overwrites: frozenset[str] = frozenset()
    """The tensors in whose place it may write, where it reads them last."""


@dataclass(slots=True)
class _Buffer:
    """Memory of tensors that take each other's place, from the step that makes the first to the last one that reads."""

    bytes: float
    first: int
    last: int
    holds_result: bool

    def meets(self, other: "_Buffer") -> bool:
        """Do both have to be in memory at the same time?"""
        return self.first <= other.last and other.first <= self.last


def temporary_bytes(kernels: Sequence[XlaKernel], results: Iterable[str]) -> float:
    """Returns about how much memory a program needs beside its inputs and its results. kernels: each after those it reads.

    A tensor lives from the step that makes it to the last one that reads it. A loop without a reduction writes over what it
    reads last, but not over a product of other dimensions. The memory of a result is used for something else before. What stays
    inside a library's call takes nothing.
    """
    buffers = sorted(_buffers(_breadth_first(_steps(kernels)), frozenset(results)), key=lambda b: -b.bytes)
    guests = [(b, [b]) for b in buffers if b.holds_result]
    others: list[_Buffer] = []
    for buffer in (b for b in buffers if not b.holds_result):
        fits = (at for host, at in guests if host.bytes >= buffer.bytes and not any(buffer.meets(b) for b in at))
        next(fits, others).append(buffer)
    return _most_at_once(others)


def _most_at_once(buffers: Iterable[_Buffer]) -> float:
    """The most bytes that are in memory at one step."""
    changes = defaultdict[int, float](float)
    for buffer in buffers:
        changes[buffer.first] += buffer.bytes
        changes[buffer.last + 1] -= buffer.bytes
    return max(accumulate(changes[n] for n in sorted(changes)), default=0.0)


def _buffers(steps: Sequence[_Step], results: frozenset[str]) -> list[_Buffer]:
    """The memory of what steps make, in order; results stay to the end."""
    last = {tensor: n for n, step in enumerate(steps) for tensor in step.reads}
    of: dict[str, _Buffer] = {}
    found: list[_Buffer] = []
    for n, step in enumerate(steps):
        ended = [of[t] for t in step.reads if last[t] == n and t in of and t in step.overwrites]
        for tensor, size in step.makes.items():
            buffer = next((b for b in ended if b.bytes == size and b.last == n), None)
            if buffer is None:
                buffer = _Buffer(size, n, n, holds_result=False)
                found.append(buffer)
            buffer.holds_result |= tensor in results
            buffer.last = len(steps) if buffer.holds_result else last.get(tensor, n)
            of[tensor] = buffer
    return found


def _steps(kernels: Sequence[XlaKernel]) -> list[_Step]:
    """The kernels as steps, the copies of operands before the products that read them."""
    reshaped = {k.name for k in kernels if isinstance(k, LibraryProduct) and k.reshaped}
    found: list[_Step] = []
    for kernel in kernels:
        reads = tuple(kernel.sources)
        if isinstance(kernel, LibraryProduct):
            copied = {c.tensor: f"{kernel.name}.{c.tensor}" for c in kernel.copies}
            found += [_Step({copied[c.tensor]: c.moved_bytes / 2}, (c.tensor,)) for c in kernel.copies]
            reads = tuple(copied.get(t, t) for t in reads)
        in_place = isinstance(kernel, LoopFusion) and not kernel.reduced
        found.append(_Step(_written(kernel), reads, frozenset(reads) - reshaped if in_place else frozenset()))
    return found


def _breadth_first(steps: Sequence[_Step]) -> list[_Step]:
    """The order in which XLA runs them on a CPU: whatever is ready first, so that much can run at the same time."""
    maker = {name: n for n, step in enumerate(steps) for name in step.makes}
    sources = [{maker[t] for t in step.reads if t in maker} - {n} for n, step in enumerate(steps)]
    readers: dict[int, list[int]] = {}
    for n, of in enumerate(sources):
        for source in of:
            readers.setdefault(source, []).append(n)
    missing = [len(of) for of in sources]
    ready = [n for n, count in enumerate(missing) if not count]
    for n in ready:
        for reader in readers.get(n, ()):
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return [steps[n] for n in ready]


def result_bytes(kernels: Sequence[XlaKernel], results: Iterable[str]) -> list[float]:
    """The bytes of each result that the kernels make."""
    wanted = frozenset(results)
    return [b for k in kernels for t, b in _written(k).items() if t in wanted]


def in_order(kernels: Sequence[XlaKernel]) -> list[XlaKernel]:
    """The kernels, each after those that make what it reads."""
    maker = {name: n for n, k in enumerate(kernels) for name in k.makes}
    found: list[XlaKernel] = []
    seen: set[int] = set()
    for first in range(len(kernels)):
        stack = [(first, False)]
        while stack:
            at, done = stack.pop()
            if done:
                found.append(kernels[at])
            elif at not in seen:
                seen.add(at)
                stack.append((at, True))
                stack += [(maker[t], False) for t in kernels[at].sources if t in maker]
    return found


def _written(kernel: XlaKernel) -> dict[str, float]:
    if isinstance(kernel, LoopFusion):
        return {n.name: 0.0 if n.name in kernel.inside else kernel.bytes_of(n) for n in kernel.roots}
    return {kernel.makes[0]: kernel.written_bytes}
