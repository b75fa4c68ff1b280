"""What XLA moves on a GPU at the boundary of a loop's body, besides what the kernels of the body read and write.

A loop kernel takes its element of an array that the loop runs over by itself, and writes a result among the stacked ones. A
library cannot: the elements that it reads are copied before, and what it makes is copied after. A result that something else in
the body reads, or that its kernel makes beside others, is copied as well. A carried value is written over the old one only by a map
that reads no other elements of that; else it is copied. The arrays of stacked results are filled before the loop. (17 scans,
compiled for an H100; in a program of 480 products with weights of such loops, all of them were copied on an H200.)
`stored_at_boundary` has what our own kernels add.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from pallasfuse.device import Device
from pallasfuse.ir.boundary import NamedBoundary
from pallasfuse.ir.loop_program import External, LoopProgram, bytes_by_name
from pallasfuse.ir.plain_work import Branches, Trips
from pallasfuse.price import cpu
from pallasfuse.price.gpu_library import copy_on_gpu, launch, memory_us
from pallasfuse.price.terms import Price, Term, total
from pallasfuse.price.xla_forms import LibraryProduct, LoopFusion, Opaque, XlaKernel
from pallasfuse.price.xla_kernels import without_changes


def filled_before(program: LoopProgram, boundary: NamedBoundary, trips: int, device: Device) -> Price:
    """The price of filling the arrays of stacked results, by one kernel."""
    sizes = bytes_by_name(program)
    moved = trips * sum(sizes[t] for t in boundary.stacked)
    if device.platform == "cpu":
        one, memory = cpu.thunk(1, device), cpu.memory_term("stacked results filled", moved, device)
    else:
        one, memory = launch(device), Term("stacked results filled", moved, "B", memory_us(moved, device))
    return total([Price(memory.us + one.us, (memory, one))] if moved else [])


def updated(program: LoopProgram, boundary: NamedBoundary, device: Device) -> frozenset[str]:
    """Finds the carried values that a trip hands on with updates which XLA writes over them.

    On a GPU it does whoever else reads them. (Ten loops, compiled for an H100: rows written or added to where others read the old
    rows, the new ones, or all.) On a CPU it may compute an update inside of what reads it, and copy the old array for that: there
    only values that nothing else reads are found.
    """
    makers = {n.name: n for n in program.nests}
    reads = Counter(t for n in program.nests for t in n.reads)

    def updates(result: str, old: str) -> bool:
        new, found, read = without_changes(result, program), False, reads[result] > 0
        while isinstance(node := makers.get(new), External) and node.form == "update":
            read |= reads[node.operands[0]] > 1
            new, found = without_changes(node.operands[0], program), True
        return found and new == old and not (read and device.platform == "cpu")

    return frozenset(old for old, new in boundary.carried if updates(new, old))


def copied_in_a_trip(
    program: LoopProgram, kernels: Sequence[XlaKernel], boundary: NamedBoundary, device: Device
) -> Price:  # fmt: skip
    """The price of the copies in one trip. kernels: those of the body."""
    sizes, makers = bytes_by_name(program), {name: k for k in kernels for name in k.makes}
    read = [t for k in kernels for t in k.sources]
    copied = _read_by_libraries(boundary.sliced, kernels)
    carried = {new for _, new in boundary.carried}
    copied += [t for t in boundary.stacked if t in carried or t in read or not _writes_alone(makers.get(t))]
    copied += [new for old, new in boundary.carried if old != new and not _in_place(makers.get(new), old, new)]
    return total(_copy(sizes[t], device) for t in sorted(copied))


def _copy(size: float, device: Device) -> Price:
    """The price of copying so many bytes. On a CPU the thunk is counted between the trips."""
    if device.platform == "gpu":
        return copy_on_gpu(2.0 * size, device)
    memory = cpu.memory_term("memory", 2.0 * size, device)
    return Price(memory.us, (memory,))


def copied_for_libraries(
    program: LoopProgram, kernels: Sequence[XlaKernel], slices: frozenset[str], device: Device
) -> Price:  # fmt: skip
    """The price of copying slices that a library reads, which XLA does in each trip."""
    read = _read_by_libraries(slices, kernels) if slices else []
    sizes = bytes_by_name(program) if read else {}
    return total(_copy(sizes[t], device) for t in read)


def _read_by_libraries(tensors: Iterable[str], kernels: Sequence[XlaKernel]) -> list[str]:
    """Those of the tensors that a library reads, which takes no part of an array by itself; a kernel of XLA's own does.

    Products with maps before or after them count as the library's. So does that of a vector and one matrix, but each of a batch is
    a reduction. (Twelve loops, compiled for an H100.)
    """
    libraries = (
        k for k in kernels
        if isinstance(k, LibraryProduct)
        or (isinstance(k, Opaque) and k.work is not None)
        or (isinstance(k, LoopFusion) and k.is_library_product)
    )  # fmt: skip
    return sorted({t for k in libraries for t in k.sources}.intersection(tensors))


def _writes_alone(maker: XlaKernel | None) -> bool:
    """Can the kernel that makes a stacked result write it among the others, as it makes nothing else?"""
    return isinstance(maker, LoopFusion) and len(maker.roots) == 1


def _in_place(maker: XlaKernel | None, old: str, new: str) -> bool:
    """Is a carried value written where the old one was, or where nobody reads the old one any more?"""
    if maker is None or not maker.sources.get(old):
        return maker is not None
    if isinstance(maker, Opaque) and isinstance(maker.work, Trips | Branches):
        return True  # it carries the value itself
    if not isinstance(maker, LoopFusion):
        return False
    (root,) = (n for n in maker.roots if n.name == new)
    return not root.is_reduction and all(axes == root.axes for (tensor, axes) in maker.reads if tensor == old)
