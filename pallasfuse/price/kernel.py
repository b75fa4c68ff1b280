"""The price of a lowered kernel: its tile programs, each on the target that runs it."""

from collections.abc import Sequence
from itertools import batched, groupby
from typing import Any

from pallasfuse.device import Device
from pallasfuse.first_time import Recent
from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.ir.loop_program import LoopProgram
from pallasfuse.ir.ranges import Range
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.price import cpu, gpu
from pallasfuse.price.block_work import examine
from pallasfuse.price.gpu_library import memory_us, product_us
from pallasfuse.price.ranges import FINDING_RANGES, hiding_nothing
from pallasfuse.price.terms import Price, Term, total
from pallasfuse.price.without_loops import WITHOUT_LOOPS, as_program
from pallasfuse.price.xla import price_xla
from pallasfuse.price.xla_forms import LibraryProduct
from pallasfuse.resources import triton
from pallasfuse.resources.as_threads import as_threads_run_it
from pallasfuse.resources.block import Resources
from pallasfuse.targets import Target


def _held(programs: Sequence[TileProgram], target: Target) -> list[Resources] | None:
    """The resources of the blocks of each program, where a compiler decides on them."""
    if target.warpgroup_rows or target.cluster:
        return None
    return [triton.resources(as_threads_run_it(p).program, target) for p in programs]


def price_range(found: Range, device: Device) -> Price:
    """The price of the pass that finds a range: its ends and the count are one reduction, of what the predicate reads."""
    reads = [n for n in postorder(found.predicate) if isinstance(n, Read)]
    tensors = {r.tensor: Tensor(r.tensor, r.indices, r.dtype) for r in reads}
    nest = found.nests[0]
    return price_xla(LoopProgram(tuple(tensors.values()), (nest,), (nest.name,)), device)


def price_kernel(phases: Sequence[tuple[TileProgram, Target]]) -> Price:
    """The price of programs that run one after the other; those of a cluster are one kernel.

    Masks over data that bound a loop count as if they hid nothing, and the pass that finds what they leave is added.
    """
    return _priced(*(x for phase in phases for x in phase))


def _found(*parts: Any) -> Price:
    """As `price_kernel`, of each program and its target in turn."""
    found = []
    for target, own in groupby(batched(parts, 2), key=lambda phase: phase[1]):
        bounded = [program for program, _ in own]
        programs = [hiding_nothing(p) for p in bounded]
        if target.platform == "cpu":
            found += [_on_cpu(p, target.device) for p in programs]
        elif target.writes_kernels:
            emission = gpu.Emission(
                warpgroups=target.warpgroup_rows > 0, longest=target.max_inner, together=target.cluster > 0
            )
            found.append(gpu.price(programs, target.device, emission, _held(programs, target)))
        else:
            found.append(_price_loops(programs, target.device))
        passes = [price_range(r, target.device).us for p in bounded for r in p.ranges]
        if passes:
            found.append(Price(sum(passes), (Term(FINDING_RANGES, len(passes), "passes", sum(passes)),)))
    return total(found)


_priced = Recent(_found, most=16)


def _on_cpu(program: TileProgram, device: Device) -> Price:
    """Returns the price of loops of XLA on a CPU; a kernel without loops is not cheaper than the same program of XLA's."""
    own, plain = cpu.price([program], device), as_program(program)
    if plain is None:
        return own
    return max(own, price_xla(plain, device), key=lambda p: p.us) + Price(
        0.0, (Term(WITHOUT_LOOPS, 1, "kernels", 0.0),)
    )


# --- tile programs as loops of XLA on a GPU: every trip is a few kernels, among them the library's products


_BESIDE = 2.0
"""Kernels of a block, and passes over a tile, besides its statements: slices of operands, what joins a tile to the state."""


def _price_loops(programs: Sequence[TileProgram], device: Device) -> Price:
    """The price of programs whose blocks and trips run one after the other."""
    return total(_loops(p, device) for p in programs)


def _loops(program: TileProgram, device: Device) -> Price:
    work = examine(program)
    products_us = 0.0
    for p in work.products:
        operands = dtypes.itemsize_bytes(p.lhs_dtype) * p.batch * p.summed * (p.rows + p.columns)
        tile = 4.0 * p.batch * p.rows * p.columns
        one = LibraryProduct(p.batch, p.rows, p.columns, p.summed, p.lhs_dtype, p.precise, operands, tile, ())
        products_us += p.times * (product_us(one, device) + _BESIDE * memory_us(tile, device))
    moved = sum(a.bytes for a in work.accesses)
    kernels = work.blocks * (work.statements + _BESIDE)
    between = (work.tile_bytes + work.computed_bytes) * work.blocks
    terms = (
        Term("products", sum(p.flops for p in work.products) * work.blocks, "flop", products_us * work.blocks),
        Term("copied slices", 2.0 * moved * work.blocks, "B", 2.0 * memory_us(moved, device) * work.blocks),
        Term("passes over tiles", between, "B", memory_us(between, device)),
        Term("launches", kernels, "", kernels * (device.kernel_us + device.launch_us)),
    )  # fmt: skip
    return Price(sum(t.us for t in terms), terms)
