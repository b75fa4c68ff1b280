"""The price of what XLA makes of nests (`price_xla`): the kernels of `xla_kernels`, each as its platform runs it."""

from dataclasses import replace
from typing import assert_never

from pallasfuse.device import Device
from pallasfuse.first_time import Later, Recent
from pallasfuse.ir.axes import volume
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.loop_program import LoopProgram, as_xla_runs, is_slice
from pallasfuse.ir.plain_work import Branches, Nothing, PlainWork, Trips
from pallasfuse.price import cpu, plain_cpu, plain_gpu
from pallasfuse.price.gpu_library import (
    OVERLAP,
    copy_of_operand,
    copy_on_gpu,
    launch,
    memory_us,
    product_on_gpu,
)
from pallasfuse.price.gpu_loops import computed, loop_on_gpu, operations_of, read_again
from pallasfuse.price.scattered import cached_change, changed_in_memory, contended_us
from pallasfuse.price.terms import NOTHING, Price, Term, repeated, total
from pallasfuse.price.xla_buffers import result_bytes, temporary_bytes
from pallasfuse.price.xla_forms import LibraryProduct, LoopFusion, Opaque, XlaKernel
from pallasfuse.price.xla_habits import Habits, habits_on
from pallasfuse.price.xla_kernels import gather_of, xla_kernels
from pallasfuse.price.xla_library import together
from pallasfuse.price.xla_orders import turned_bytes
from pallasfuse.price.xla_programs import Known
from pallasfuse.price.xla_repeats import with_repeated
from pallasfuse.price.xla_trips import copied_for_libraries, copied_in_a_trip, filled_before, updated


def price_xla(
    program: LoopProgram, device: Device, made: frozenset[str] = frozenset(), read: frozenset[str] = frozenset()
) -> Price:
    """The price of computing a program with XLA's kernels, where the tensors `made` come from kernels that read `read`."""
    return XlaPrices(program, device).price(made, read)


class XlaPrices:
    """Prices of one program beside other kernels on one device: kernels that several of these have in common are priced once."""

    def __init__(self, program: LoopProgram, device: Device) -> None:
        self.program, self.device = as_xla_runs(program, one_by_one=device.platform == "cpu"), device
        self.slices = frozenset(n.name for n in program.nests if is_slice(n))
        self._known = Known()
        self._of_kernels: dict[object, Price] = {}

    def price(self, made: frozenset[str] = frozenset(), read: frozenset[str] = frozenset()) -> Price:
        """The price, as of `price_xla`."""
        kernels = kernels_on(self.device, self.program, made, read, self._known)
        return total(map(self._of_kernel, kernels)) + self._beside(kernels, made, read)

    def _beside(self, kernels: list[XlaKernel], made: frozenset[str], read: frozenset[str]) -> Price:
        """The price of what XLA does besides its kernels: products that are written once more, or new pages of memory."""
        if self.device.platform == "gpu":
            return self._turned(read - made) + copied_for_libraries(self.program, kernels, self.slices, self.device)
        stored = read.union(self.program.outputs)
        return cpu.pages([temporary_bytes(kernels, stored), *result_bytes(kernels, stored)], self.device)

    def us(self, made: frozenset[str] = frozenset(), read: frozenset[str] = frozenset()) -> float:
        """The time of the price, which is found in half the time without its terms. Summed as `total` does: not a bit differs."""
        kernels = kernels_on(self.device, self.program, made, read, self._known)
        us = 0.0
        for kernel in kernels:  # `sum` would round otherwise
            us += self._of_kernel(kernel).us
        return us + self._beside(kernels, made, read).us

    def _turned(self, read: frozenset[str]) -> Price:
        """The price of products that are written once more, in the order in which a kernel reads what comes from them."""
        return total(copy_on_gpu(moved, self.device) for moved in turned_bytes(self.program, read))

    def _of_kernel(self, kernel: XlaKernel) -> Price:
        key: object = kernel
        if isinstance(kernel, LoopFusion):
            names = kernel.makes
            key = (
                names, tuple(kernel.bodies), kernel.is_row, kernel.streams_matrix, kernel.inside, kernel.threads,
                kernel.cached_bytes, kernel.pieces, kernel.window_operations, tuple(n.axes for n in kernel.roots),
            )  # fmt: skip
            if self.device.platform == "cpu":  # where it depends on the layouts that others ask for
                tensors = {*names, *(tensor for tensor, _ in kernel.reads)}
                inside, in_order = kernel.inside.intersection(tensors), kernel.in_order.intersection(names)
                axes, moved = tuple(n.axes for n in kernel.roots), sum(kernel.reads.values())
                key = names, axes, tuple(kernel.bodies), inside, in_order, kernel.by_library, kernel.calls, moved
        found = self._of_kernels.get(key)
        if found is None:
            found = self._of_kernels[key] = of_kernel(kernel, self.device)
        return found


def kernels_on(
    device: Device, program: LoopProgram, made: frozenset[str] = frozenset(), read: frozenset[str] = frozenset(),
    known: Known | None = None, owned: frozenset[str] = frozenset(),
) -> list[XlaKernel]:  # fmt: skip
    """XLA's kernels for a program on a device; `made` and `read` as in `price_xla`, `known` and `owned` as in `xla_kernels`."""
    program = as_xla_runs(program, one_by_one=device.platform == "cpu")
    kernels = xla_kernels(program, habits_on(device), made, read, known, owned)
    if device.platform == "gpu":
        return kernels
    stored = read.union(program.outputs)
    return with_repeated(together(kernels, stored), stored)


def price_gather(lookup: Lookup, device: Device) -> Price:
    """The price of the gather that a lookup stands for."""
    gather = gather_of(lookup)
    price = of_kernel(gather, device)
    return price if device.platform == "gpu" else price + cpu.pages([gather.written_bytes], device)


ONE_KERNEL = Price(1.01, (Term("kernels", 1, "", 1.0),))
"""The price of any kernel of ours where only kernels are counted: a little more than one of XLA's, to which ties go."""


def count_xla(
    program: LoopProgram, device: Device, made: frozenset[str] = frozenset(), read: frozenset[str] = frozenset()
) -> Price:
    """Counts the nests that are kernels of their own in the simplest compiler, and adds a trifle for their traffic.

    Operations that do nothing are not counted.
    """
    kernels = xla_kernels(
        as_xla_runs(program, one_by_one=False),
        Habits(duplicates_maps=True, longest_row=0, shares_reads=False),
        made,
        read,
    )
    kernels = [k for k in kernels if not isinstance(k, Opaque) or not isinstance(k.work, Nothing)]
    moved = sum(k.read_bytes + k.written_bytes for k in kernels)
    return Price(len(kernels) + 1e-15 * moved, (Term("kernels", len(kernels), "", len(kernels)),))


def of_kernel(kernel: XlaKernel, device: Device) -> Price:
    """The price of one of XLA's kernels."""
    if isinstance(kernel, Opaque) and kernel.computed_with:
        return NOTHING
    if isinstance(kernel, Opaque) and kernel.work is not None:
        return _of_work(kernel, kernel.work, device)
    if device.platform == "cpu":
        return cpu.of_kernel(kernel, device)
    match kernel:
        case LibraryProduct():
            return total([product_on_gpu(kernel, device), *(copy_of_operand(c, kernel, device) for c in kernel.copies)])
        case LoopFusion():
            return loop_on_gpu(kernel, device)
        case Opaque():
            return _opaque_on_gpu(kernel, device)
        case _:
            assert_never(kernel)


def _of_work(kernel: Opaque, work: PlainWork, device: Device) -> Price:
    """The price of an operation without a nest: of a loop, as often as it runs, the price of its body."""
    match work:
        case Trips(trips):
            once, each = _of_loop(work, _inside_loops(device))
            return once + repeated(each + _between_trips(work, device), trips)
        case Branches(branches):
            inside = _inside_branches(device)
            return max((_of_body(b, inside) for b in branches), key=lambda p: p.us, default=NOTHING)
        case _:
            plain = plain_cpu.price_plain if device.platform == "cpu" else plain_gpu.price_plain
            return plain(kernel, work, device)


def _priced_body(body: Later[LoopProgram], device: Device) -> Price:
    """The price of a body, whose buffers are there before it begins."""
    return total(of_kernel(k, device) for k in kernels_on(device, body.value))


_of_body = Recent(_priced_body, most=64)


def _priced_loop(work: Trips[LoopProgram], device: Device) -> tuple[Price, Price]:
    """The price of what XLA does before a loop, what it moves out of it among that, and of one trip."""
    program = work.body.value
    outside = unchanging(program, work.constants)
    inside = kernels_on(device, program, made=outside, owned=updated(program, work.boundary.value, device))
    before = kernels_on(device, replace(program, outputs=tuple(sorted(outside)))) if outside else []
    once, each = total(of_kernel(k, device) for k in before), total(of_kernel(k, device) for k in inside)
    once += filled_before(program, work.boundary.value, work.trips, device)
    each += copied_in_a_trip(program, inside, work.boundary.value, device)
    return once, each


_of_loop = Recent(_priced_loop, most=64)
_inside_loops, _inside_branches = Recent(Device.inside_loops), Recent(Device.inside_branches)
"""These return the same device each time, by which the prices of bodies are found again."""


def _between_trips(work: Trips[LoopProgram], device: Device) -> Price:
    """What XLA adds to each trip: it counts, and takes and stores slices where no kernel of the body does.

    On a GPU kernels of the body do, and wait for the number of the trip before they know where a slice is.
    """
    slices = len(work.boundary.value.sliced) + len(work.boundary.value.stacked)
    if device.platform == "gpu":
        one = launch(device)
        asked = Term("positions of slices", slices, "", slices * device.cache_latency_us)
        return Price(one.us + asked.us, (one, asked))
    thunks = Term("thunks", 2 + slices, "", (2 + slices) * device.kernel_us)
    return Price(thunks.us, (thunks,))


def _opaque_on_gpu(kernel: Opaque, device: Device) -> Price:
    """The price of what is moved, changed in the cache, and computed meanwhile."""
    moved = kernel.read_bytes + kernel.written_bytes
    if not kernel.computes and not kernel.pieces:
        return copy_on_gpu(moved, device)
    cached = waited_us = 0.0
    if kernel.pieces:
        moved += changed_in_memory(kernel.pieces, device)
        cached, waited_us = cached_change(kernel.pieces), contended_us(kernel.pieces, device)
    memory = Term("device memory", moved, "B", memory_us(moved, device))
    waited = Term("updates of one place", kernel.pieces.number if kernel.pieces else 0.0, "", waited_us)
    terms = (memory, *computed(operations_of(kernel.computes), device), read_again(cached, device), waited)
    one = launch(device)
    return Price(sum(t.us**OVERLAP for t in terms) ** (1 / OVERLAP) + one.us, (*terms, one))


# --- what leaves a loop


def unchanging(body: LoopProgram, constants: int) -> frozenset[str]:
    """The tensors that XLA computes before a loop, as they depend on nothing but its constants: so many first inputs of the body.

    Not what is larger than all that it is computed from and would have to be kept in memory: a broadcast is made in every trip.
    """
    sizes = {d.name: volume(d.axes) for d in body.definitions()}
    fixed = {t.name for t in body.inputs[:constants]}
    found: set[str] = set()
    for node in body.nests:
        if node.reads and node.reads <= fixed and sizes[node.name] <= max(sizes[t] for t in node.reads):
            fixed.add(node.name)
            found.add(node.name)
    return frozenset(found)
