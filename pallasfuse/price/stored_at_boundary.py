"""Prices of the copies that XLA makes for the sake of a kernel: at its own boundary, and in each trip at that of a loop's body.

XLA fuses what cuts an element from an array that a scan runs over into the kernels that read it, and what puts a result among the
stacked ones into the kernel that makes it; and a map that makes a carried value anew writes it where the old one was. It does none
of this around a kernel that it cannot look into: the slice is stored before, unless the kernel takes it by itself, and a copy is
made after. `tests/aot/test_boundary.py`
counts them in what XLA compiles for an H100. Branches of a choice need no such copies.

Nor does a kernel have the order of dimensions that convolutions have: what it reads of these, and makes for them, is turned.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from pallasfuse.device import Device
from pallasfuse.ir.boundary import NamedBoundary
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import LoopProgram, Nest, bytes_by_name, is_slice
from pallasfuse.ir.reducers import SUM
from pallasfuse.price.gpu_library import copy_on_gpu, memory_us
from pallasfuse.price.terms import NOTHING, Price, Term, total
from pallasfuse.price.xla_orders import NOTHING_TURNED, turned_for_convolutions
from pallasfuse.price.xla_products import without_casts
from pallasfuse.price.xla_reductions import product_operands


def boundary_prices(
    program: LoopProgram, kernels: Iterable[tuple[str, Group, tuple[str, ...]]], boundary: NamedBoundary, device: Device
) -> Mapping[str, Price]:
    """Returns for each kernel, by its name, the price of what is stored at the boundary for its sake. Nothing is what XLA's own
    kernels would store as well.

    kernels: their names, groups, and the tensors that they read. A slice that several of them read is paid by the first; what is
    turned for several, by all of them.
    """
    kernels = tuple(kernels)
    sizes = bytes_by_name(program)
    makers = {n.name for _, group, _ in kernels for n in group.outputs}
    readers = Counter(t for _, _, reads in kernels for t in frozenset(reads))
    turned = turned_for_convolutions(program, makers, readers) if device.platform == "gpu" else NOTHING_TURNED
    sliced = boundary.sliced.union(n.name for n in program.nests if is_slice(n))
    stored: set[str] = set()
    found: dict[str, Price] = {}
    for name, group, reads in kernels:
        slices = (sliced & frozenset(reads)) - stored - _operands_of_products(group)
        stored |= slices
        maps = frozenset(n.name for n in group.outputs if not n.is_reduction and not isinstance(n.body, Read))
        carried = {new for old, new in boundary.carried if new in maps and old in reads}
        stacked = (boundary.stacked & maps) - {new for _, new in boundary.carried}
        shares = [(sizes[t], 1 / readers[t]) for t in sorted(turned.read & frozenset(reads))]
        shares += [(sizes[n.name], 1.0) for n in group.outputs if n.name in turned.made]
        terms = (
            _term("slices stored for it", [sizes[t] for t in sorted(slices)], device),
            _term("copies of carried results", [sizes[t] for t in sorted(carried)], device),
            _term("copies of stacked results", [sizes[t] for t in sorted(stacked)], device),
            Term(
                "turned for convolutions",
                len(shares),
                "kernel",
                sum(s * copy_on_gpu(2 * n, device).us for n, s in shares),
            ),
        )
        found[name] = total(Price(t.us, (t,)) for t in terms if t.amount) if any(t.amount for t in terms) else NOTHING
    return found


def _term(name: str, sizes: list[float], device: Device) -> Term:
    """One launch for each tensor, which reads and writes its bytes."""
    us = sum(memory_us(2 * size, device) + device.kernel_us + device.launch_us for size in sizes)
    return Term(name, len(sizes), "kernel", us)


def _operands_of_products(group: Group) -> frozenset[str]:
    """The tensors that a group reads as they are, and only as operands of products: a library reads them from memory as well."""
    as_operands: set[str] = set()
    otherwise: set[str] = set()
    nests: tuple[Nest, ...] = group.nests
    for nest in nests:
        operands = product_operands(nest.reduced, nest.body) if nest.reducer == SUM and not nest.picks else None
        cores = [without_casts(x) for x in operands or ()]
        as_operands |= {x.tensor for x in cores if isinstance(x, Read)}
        others = [nest.body] if operands is None else [x for x in cores if not isinstance(x, Read)]
        otherwise |= {x.tensor for other in others for x in postorder(other) if isinstance(x, Read)}
    return frozenset(as_operands - otherwise)
