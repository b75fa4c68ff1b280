"""Prices on a CPU: XLA's own kernels, and tile programs as loops of XLA.

A kernel of XLA is a *thunk*: a fused loop over all points, spread over the cores where it is large. Buffers
beyond the size that the allocator keeps are pages that the system makes anew at every call: on many machines they cost
more than the work on them.
"""

import math
from collections.abc import Iterable, Sequence
from typing import assert_never

from pallasfuse.device import Device
from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Expr
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.price.block_work import Product, examine
from pallasfuse.price.operations import Operations, count
from pallasfuse.price.terms import Price, Term, total
from pallasfuse.price.xla_kernels import LibraryProduct, LoopFusion, Opaque, XlaKernel

_SHARED_OPERATIONS = 1 << 18
"""Operations of a loop that XLA spreads over the cores."""
_FEW_ROWS = 8
"""Rows below which a matrix product is a sequence of products with vectors."""


def of_kernel(kernel: XlaKernel, device: Device) -> Price:
    """The price of one of XLA's kernels."""
    match kernel:
        case LibraryProduct():
            product = _product(kernel.batch, kernel.rows, kernel.columns, kernel.summed, kernel.operand_dtype, device)
            moved = _memory("memory", kernel.read_bytes + kernel.written_bytes, device)
            copies = [_transposed(c, device) for c in kernel.copies]
            thunk = _thunk(_cores_for(2.0 * kernel.flops, device), device)
            return total([Price(max(product.us, moved.us) + thunk.us, (product, moved, thunk)), *copies])
        case LoopFusion():
            return _fusion(kernel, device)
        case Opaque():
            moved = _memory("memory", kernel.read_bytes + kernel.written_bytes, device)
            thunk = _thunk(1, device)
            return Price(moved.us + thunk.us, (moved, thunk))
        case _:
            assert_never(kernel)


def pages(stored: Iterable[float], device: Device) -> Price:
    """The price of buffers that are made anew at every call."""
    fresh = sum(b for b in stored if b > device.kept_bytes)
    term = Term("new pages", fresh, "B", 1e-3 * fresh / device.page_gb_s)
    return Price(term.us, (term,))


def _thunk(cores: int, device: Device) -> Term:
    """One thunk, and what it takes to spread it over the cores."""
    return Term("thunks", 1, "", device.kernel_us + (device.launch_us if cores > 1 else 0.0))


def _memory(name: str, moved: float, device: Device) -> Term:
    rate = device.cache_gb_s if moved <= device.cache_bytes else device.memory_gb_s
    return Term(name, moved, "B", 1e-3 * moved / rate)


def _transposed(moved: float, device: Device) -> Price:
    term = Term("transposed copies", moved, "B", 1e-3 * moved / (device.cache_gb_s * _STRIDED))
    thunk = _thunk(device.multiprocessors, device)
    return Price(term.us + thunk.us, (term, thunk))


_SLICED = 0.3
"""The share of the bandwidth that a slice reaches, which is read and written row by row."""
_STRIDED = 0.1
"""The share of the bandwidth that single elements in strides reach."""


def _fusion(fusion: LoopFusion, device: Device) -> Price:
    seen: set[Expr] = set()
    work = count(fusion.bodies, lambda axes: float(math.prod(a.extent for a in axes)), seen)
    work += Operations(
        float(sum(math.prod(a.extent for a in (*n.axes, *n.reduced)) for n in fusion.roots if n.is_reduction))
    )
    cores = _cores_for(work.simple + work.special, device)
    terms = (*_arithmetic(work, cores, device), _memory("memory", fusion.read_bytes + fusion.written_bytes, device))
    thunk = _thunk(cores, device)
    return Price(_joined(terms) + thunk.us, (*terms, thunk))


def _cores_for(operations: float, device: Device) -> int:
    """The cores that XLA spreads a loop over, by its operations."""
    return device.multiprocessors if operations >= _SHARED_OPERATIONS else 1


def _arithmetic(work: Operations, cores: int, device: Device) -> tuple[Term, Term]:
    vector = Term("vector units", work.simple, "op", 1e-3 * work.simple / (device.vector_gop_s * cores))
    special = Term("special functions", work.special, "op", 1e-3 * work.special / (device.special_gop_s * cores))
    return vector, special


def _joined(terms: Sequence[Term]) -> float:
    """Arithmetic adds up; traffic overlaps with it."""
    memory = sum(t.us for t in terms if t.name == "memory")
    return max(memory, sum(t.us for t in terms) - memory)


def _product(batch: int, rows: int, columns: int, summed: int, dtype: str, device: Device) -> Term:
    """A library's product: panels of 8 by 16, shared by the cores where there are enough operations."""
    flops = 2.0 * batch * rows * columns * summed
    cores = _cores_for(2.0 * flops, device)
    full = (
        rows / (8 * math.ceil(rows / 8)) * columns / (16 * math.ceil(columns / 16)) * summed / (summed + 16)
        if rows >= _FEW_ROWS
        else 0.25
    )
    rate = 1e3 * device.matmul_tflop_s.get(dtype, device.matmul_tflop_s["float32"]) * cores * max(full, 0.02)
    return Term("products", flops, "flop", 1e-3 * flops / rate)


def price(programs: Sequence[TileProgram], device: Device) -> Price:
    """The price of tile programs as loops of XLA: blocks and trips one after the other, each a few thunks."""
    return total(_loops(p, device) for p in programs)


def _loops(program: TileProgram, device: Device) -> Price:
    work = examine(program)
    each = (work.operations.simple + work.operations.special) / max(1.0, work.statements)
    cores = _cores_for(each, device)
    products = [_block_product(p, device) for p in work.products]
    vector, special = _arithmetic(work.operations.times(work.blocks), 1, device)  # tiles are too small to be shared
    product = Term(
        "products", sum(t.amount for t in products) * work.blocks, "flop", sum(t.us for t in products) * work.blocks
    )
    moved = sum(a.bytes for a in work.accesses) * work.blocks
    unique = _memory("memory", sum({a.tensor: a.unique_bytes for a in work.accesses}.values()), device)
    copied = Term("copied slices", 2 * moved, "B", 1e-3 * 2 * moved / (_SLICED * device.cache_gb_s))
    thunks = work.blocks * (work.statements + 2)
    trips = Term("thunks of trips", thunks, "", thunks * (device.trip_us + (device.launch_us if cores > 1 else 0.0)))
    arithmetic = vector.us + special.us + product.us + copied.us
    stored = [float(math.prod(a.extent for a in t.axes) * dtypes.itemsize_bytes(t.dtype)) for t in program.outputs]
    own = Price(
        max(arithmetic, unique.us) + trips.us + device.kernel_us, (vector, special, product, copied, unique, trips)
    )
    return own + pages(stored, device)


def _block_product(p: Product, device: Device) -> Term:
    one = _product(p.batch, p.rows, p.columns, p.summed, p.lhs_dtype, device)
    return Term(one.name, one.amount * p.times, one.unit, one.us * p.times)
