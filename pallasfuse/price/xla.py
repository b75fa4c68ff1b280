"""The price of what XLA makes of nests (`price_xla`): the kernels of `xla_kernels`, each as its platform runs it."""

import math
from typing import assert_never

from pallasfuse.device import Device
from pallasfuse.ir.expr import Expr
from pallasfuse.ir.loop_program import LoopProgram
from pallasfuse.price import cpu
from pallasfuse.price.operations import Operations, count
from pallasfuse.price.terms import Price, Term, total
from pallasfuse.price.xla_kernels import Habits, LibraryProduct, LoopFusion, Opaque, XlaKernel, habits_on, xla_kernels

_OVERLAP = 4.0


def price_xla(program: LoopProgram, device: Device, made: frozenset[str] = frozenset()) -> Price:
    """The price of computing a program with XLA's kernels, where the tensors `made` come from elsewhere."""
    kernels = xla_kernels(program, habits_on(device), made)
    price = total(of_kernel(k, device) for k in kernels)
    return price if device.platform == "gpu" else price + cpu.pages([k.written_bytes for k in kernels], device)


ONE_KERNEL = Price(1.0, (Term("kernels", 1, "", 1.0),))
"""The price of anything where only kernels are counted."""


def count_xla(program: LoopProgram, device: Device, made: frozenset[str] = frozenset()) -> Price:
    """The number of nests that are kernels of their own in the simplest compiler, and a trifle for their traffic."""
    kernels = xla_kernels(program, Habits(duplicates_maps=True, longest_row=0, shares_reads=False), made)
    moved = sum(k.read_bytes + k.written_bytes for k in kernels)
    return Price(len(kernels) + 1e-15 * moved, (Term("kernels", len(kernels), "", len(kernels)),))


def of_kernel(kernel: XlaKernel, device: Device) -> Price:
    """The price of one of XLA's kernels."""
    if device.platform == "cpu":
        return cpu.of_kernel(kernel, device)
    match kernel:
        case LibraryProduct():
            return total([_product_on_gpu(kernel, device), *(_copy_on_gpu(c, device) for c in kernel.copies)])
        case LoopFusion():
            return _fusion_on_gpu(kernel, device)
        case Opaque():
            return _copy_on_gpu(kernel.read_bytes + kernel.written_bytes, device)
        case _:
            assert_never(kernel)


def memory_us(moved: float, device: Device, efficiency: float = 1.0) -> float:
    """The time to move bytes, which stay in the cache where they fit."""
    rate = device.cache_gb_s if moved <= 0.5 * device.cache_bytes else device.memory_gb_s
    return 1e-3 * moved / (rate * efficiency)


def _launch(device: Device) -> Term:
    return Term("launch", 1, "kernel", device.kernel_us + device.launch_us)


def _copy_on_gpu(moved: float, device: Device) -> Price:
    launch = _launch(device)
    memory = Term("device memory", moved, "B", memory_us(moved, device, 0.8))
    return Price(launch.us + memory.us + device.latency_us, (memory, launch))


def _fusion_on_gpu(fusion: LoopFusion, device: Device) -> Price:
    seen: set[Expr] = set()
    work = count(fusion.bodies, lambda axes: float(math.prod(a.extent for a in axes)), seen)
    reduced = sum(math.prod(a.extent for a in (*n.axes, *n.reduced)) for n in fusion.roots if n.is_reduction)
    work += Operations(float(reduced))
    moved = fusion.read_bytes + fusion.written_bytes
    memory = Term("device memory", moved, "B", memory_us(moved, device, 0.9))
    vector = Term("vector units", work.simple, "op", 1e-3 * work.simple / (0.5 * device.vector_gop_s))
    special = Term("special functions", work.special, "op", 1e-3 * work.special / device.special_gop_s)
    idle = Term("too few rows", _rows(fusion), "rows", _idle_us(fusion, device))
    launch = _launch(device)
    terms = (memory, vector, special, idle)
    busy = sum(t.us**_OVERLAP for t in terms) ** (1 / _OVERLAP)
    return Price(busy + launch.us + 2 * device.latency_us, (*terms, launch))


def _rows(fusion: LoopFusion) -> float:
    reductions = [n for n in fusion.roots if n.is_reduction]
    return float(min((math.prod(a.extent for a in n.axes) for n in reductions), default=0))


def _idle_us(fusion: LoopFusion, device: Device) -> float:
    """The time of the longest row, where one block reduces it: a multiprocessor's share of the bandwidth, ten times over."""
    reductions = [n for n in fusion.roots if n.is_reduction]
    if not reductions:
        return 0.0
    rows = _rows(fusion)
    if rows >= device.multiprocessors:
        return 0.0
    per_row = fusion.read_bytes / max(rows, 1.0)
    return 1e-3 * per_row / (10 * device.memory_gb_s / device.multiprocessors)


_TILES = ((128, 256), (128, 128), (64, 128), (64, 64), (64, 32), (16, 64), (16, 32))
_SHARES = (1, 2, 4, 8, 16)


def _product_on_gpu(p: LibraryProduct, device: Device) -> Price:
    moved = p.read_bytes + p.written_bytes
    memory = Term("device memory", moved, "B", memory_us(moved, device, 0.92))
    matrix = Term("matrix units", p.flops, "flop", product_us(p, device))
    launch = _launch(device)
    busy = (memory.us**_OVERLAP + matrix.us**_OVERLAP) ** (1 / _OVERLAP)
    return Price(busy + launch.us, (memory, matrix, launch))


def product_us(p: LibraryProduct, device: Device) -> float:
    """The time of the best of a library's tiles and splits of the sum, by rounds of blocks over the multiprocessors."""
    dtype = "tf32" if p.operand_dtype == "float32" and not p.precise else p.operand_dtype
    rate = (
        device.matmul_tflop_s.get(dtype, device.matmul_tflop_s["float32"]) * 1e6 / device.multiprocessors
    )  # flop/us for each
    best = math.inf
    size = 4.0 if p.operand_dtype == "float32" else 2.0
    rows, columns = (p.rows, p.columns) if p.rows <= p.columns else (p.columns, p.rows)
    for high, wide in _TILES:
        for a, b in ((high, wide), (wide, high)):
            for shares in _SHARES:
                if shares > 1 and p.summed / shares < 64:
                    continue
                blocks = p.batch * math.ceil(rows / a) * math.ceil(columns / b) * shares
                rounds = math.ceil(blocks / device.multiprocessors)
                tile = max(a, 64) * b if min(a, b) >= 64 else 64 * max(a, b)
                efficiency = 1.0 if tile >= 128 * 128 else 0.85 if tile >= 64 * 128 else 0.6
                steps = p.summed / shares
                busy = 2.0 * tile * steps / (rate * efficiency)
                feed = steps * (a + b) * size / (device.cache_gb_s * 1e3 / device.multiprocessors)
                chain = 1.2 * device.latency_us + steps / 64 * 0.06
                split = (
                    0.0
                    if shares == 1
                    else 2.0 * device.kernel_us + memory_us(4.0 * p.batch * rows * columns * (shares + 1), device)
                )
                best = min(best, rounds * max(busy, feed) + chain + split)
    return best
