"""The memory that XLA needs for what a program computes on the way: one block, as large as all that lives at once."""

from collections.abc import Iterable, Sequence

from pallasfuse.price.xla_kernels import LibraryProduct, LoopFusion, XlaKernel


def temporary_bytes(kernels: Sequence[XlaKernel], results: Iterable[str]) -> float:
    """Returns about how much memory a program needs beside its inputs and its results. kernels: in order.

    A tensor lives from the kernel that makes it to the last one that reads it. A loop without a reduction writes over what it
    reads last, but not over a product of other dimensions. What stays inside a library's call takes nothing.
    """
    results = frozenset(results)
    sources = [k.sources for k in kernels]
    last = {tensor: n for n, read in enumerate(sources) for tensor in read}
    reshaped = {k.name for k in kernels if isinstance(k, LibraryProduct) and k.reshaped}
    live: dict[str, float] = {}
    most = 0.0
    for n, kernel in enumerate(kernels):
        made = {t: b for t, b in _written(kernel).items() if t not in results}
        ended = [t for t in sources[n] if last[t] == n and t in live]
        if isinstance(kernel, LoopFusion) and not kernel.reduced:
            for size in made.values():
                over = next((t for t in ended if live.get(t) == size and t not in reshaped), None)
                if over is not None:
                    del live[over]
        live |= made
        copied = sum(c.moved_bytes / 2 for c in kernel.copies) if isinstance(kernel, LibraryProduct) else 0.0
        most = max(most, sum(live.values()) + copied)
        for tensor in (*ended, *(t for t in made if t not in last)):
            live.pop(tensor, None)
    return most


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
        return {n.name: kernel.bytes_of(n) for n in kernel.roots if n.name not in kernel.inside}
    return {kernel.makes[0]: kernel.written_bytes}
