"""The price of tile programs as loops of XLA on a GPU: every trip is a few kernels, among them the library's products."""

from collections.abc import Sequence

from pallasfuse.device import Device
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.price.block_work import examine
from pallasfuse.price.gpu_library import memory_us, product_us
from pallasfuse.price.terms import Price, Term, total
from pallasfuse.price.xla_forms import LibraryProduct

_BESIDE = 2.0
"""Kernels of a block, and passes over a tile, besides its statements: slices of operands, what joins a tile to the state."""


def price(programs: Sequence[TileProgram], device: Device) -> Price:
    """The price of programs whose blocks and trips run one after the other."""
    return total(_loops(p, device) for p in programs)


def _loops(program: TileProgram, device: Device) -> Price:
    work = examine(program)
    size = 2.0 if any(p.lhs_dtype in ("float16", "bfloat16") for p in work.products) else 4.0
    products_us = 0.0
    for p in work.products:
        operands = size * p.batch * p.summed * (p.rows + p.columns)
        tile = 4.0 * p.batch * p.rows * p.columns
        one = LibraryProduct(p.batch, p.rows, p.columns, p.summed, p.lhs_dtype, p.precise, operands, tile, ())
        products_us += p.times * (product_us(one, device) + _BESIDE * memory_us(tile, device))
    moved = sum(a.bytes for a in work.accesses)
    kernels = work.blocks * (work.statements + _BESIDE)
    terms = (
        Term("products", sum(p.flops for p in work.products) * work.blocks, "flop", products_us * work.blocks),
        Term("copied slices", 2.0 * moved * work.blocks, "B", 2.0 * memory_us(moved, device) * work.blocks),
        Term("launches", kernels, "", kernels * (device.kernel_us + device.launch_us)),
    )  # fmt: skip
    return Price(sum(t.us for t in terms), terms)
