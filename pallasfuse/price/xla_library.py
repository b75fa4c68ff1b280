"""What XLA gives a CPU's library as a whole: a reduction, and the maps and products around it, without memory in between.

From a reduction on, XLA's rewriter takes neighbours into one call of the library: producers whose every reader is in it, and a
reader where it is the only one. A product alone is a call of its own. What has few elements (a statistic of few rows, and what
is computed of it) is left to loops, as are operations that the library lacks (`library_operations`).
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from pallasfuse.price.library_operations import TYPES, joined_calls, takes_all, takes_reduction
from pallasfuse.price.xla_buffers import in_order
from pallasfuse.price.xla_forms import LibraryProduct, LoopFusion, XlaKernel


def together(kernels: Sequence[XlaKernel], stored: frozenset[str]) -> list[XlaKernel]:
    """Returns the kernels in order, of which those in one call of the library pass on nothing through memory.

    stored: tensors that have to be in memory.
    """
    kernels = in_order(kernels)
    maker = {name: n for n, k in enumerate(kernels) for name in k.makes}
    readers: dict[str, set[int]] = {name: set() for name in maker}
    for n, kernel in enumerate(kernels):
        for name in kernel.sources.keys() & maker.keys():
            readers[name].add(n)
    taken = [_takes(k) for k in kernels]
    copied = {c.tensor for k in kernels if isinstance(k, LibraryProduct) for c in (*k.copies, *k.turned)}
    inner = [
        name for name, at in reversed(maker.items())
        if name not in stored and name not in copied and readers[name] and taken[at] and all(taken[r] for r in readers[name])
    ]  # fmt: skip
    call = joined_calls(inner, maker, readers)
    reducing = {call(n) for n, k in enumerate(kernels) if taken[n] and isinstance(k, LoopFusion) and k.reduced}
    inside = frozenset(
        t for t in inner if call(maker[t]) in reducing and {call(r) for r in readers[t]} == {call(maker[t])}
    )
    by_library = {t for t, at in maker.items() if call(at) in reducing}
    counted: set[int] = set()
    found: list[XlaKernel] = []
    for n, kernel in enumerate(kernels):
        own = call(n)
        if own in reducing and isinstance(kernel, LoopFusion):
            found.append(replace(kernel, inside=inside, by_library=True, calls=int(own not in counted)))
            counted.add(own)
        else:
            found.append(_product(kernel, inside, by_library) if isinstance(kernel, LibraryProduct) else kernel)
    return found


def _product(kernel: LibraryProduct, inside: frozenset[str], by_library: Collection[str]) -> LibraryProduct:
    """A product without what never is in memory, and with copies of what the library has made in the order of the program."""
    left = tuple((t, 0.0 if t in inside else b) for t, b in kernel.operands)
    written = 0.0 if kernel.name in inside else kernel.written_bytes
    known = {c.tensor for c in kernel.copies}
    turned = tuple(c for c in kernel.turned if c.tensor in by_library and c.tensor not in known)
    copies = (*kernel.copies, *turned)
    return replace(kernel, operands=left, read_bytes=sum(b for _, b in left), written_bytes=written, copies=copies)


def _takes(kernel: XlaKernel) -> bool:
    """Does the library compute all that a kernel does?"""
    if isinstance(kernel, LibraryProduct):
        return kernel.operand_dtype in TYPES and not kernel.in_columns
    if not isinstance(kernel, LoopFusion) or len(kernel.roots) > 1:
        return False
    (nest,) = kernel.roots
    return (not nest.is_reduction or takes_reduction(nest)) and takes_all(kernel.bodies[0])
