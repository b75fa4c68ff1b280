"""Prices on a GPU of operations without a nest: those of a library, and the kernels that XLA writes for them.

Rates of a library are numbers of the device (`Device.library`):

- `channelwise_tflop_s`: convolutions in which each channel is a group of its own, where no kernel is made for that: for windows
  that are no squares.
- `compared_gop_s`: words of 4 bytes that pass one step of a network that sorts, inside blocks.
- `kept_gop_s`: positions looked at, times how many of each row are kept, where there are many rows.
- `factored_us`, `pivoted_us`, `reflected_us`, `solved_us`: one column of a factorisation or of a triangular system, which waits
  for the one before (`Elimination`); `solved_one_us`: where there is one right side; `.._many_us`: of many small matrices at once,
  before what depends on their rows and on how many there are, which was measured on an H200 and stands here.
"""

import math
from collections.abc import Mapping
from typing import assert_never

from pallasfuse.device import Device
from pallasfuse.ir.plain_work import (
    Branches,
    Convolution,
    Drawn,
    Elimination,
    EliminationKind,
    Fourier,
    Nothing,
    Ordering,
    PlainWork,
    Priced,
    Running,
    Special,
    Trips,
    Unknown,
    Windows,
)
from pallasfuse.price.gpu_convolutions import convolution_on_gpu
from pallasfuse.price.gpu_library import OVERLAP, copy_on_gpu, launch, memory_us
from pallasfuse.price.gpu_sorting import sorting_on_gpu
from pallasfuse.price.operations import LONGEST_SPECIAL, SPECIAL
from pallasfuse.price.terms import NOTHING, Price, Term, total
from pallasfuse.price.xla_forms import Opaque
from pallasfuse.price.xla_habits import RUN, windows_operations

_PANEL = 32
"""Columns that a library eliminates with a few kernels, on devices of which nothing is known."""
_LONGEST_TRANSFORM = 1 << 12
"""Positions that a transform takes in one pass."""
_DRAWN_OPERATIONS = 60
"""Integer operations for one random word: 20 rounds on pairs of words, each addition, rotation and exclusive or."""
_INTEGERS = 0.66
"""Loops compute random words at this share of the rate of float32. (Up to 8 million random numbers on an H100.)"""


def price_plain(kernel: Opaque, work: PlainWork, device: Device) -> Price:
    """The price of an operation without a nest; `kernel` says what it moves. Not of loops and branches."""
    match work:
        case Convolution():
            return convolution_on_gpu(work, device)
        case Ordering():
            return sorting_on_gpu(work, device)
        case Running():
            return _running(work, kernel.stored, device)
        case Windows(results, window, element_bytes, read_bytes):
            return _of_windows(results, window, read_bytes + results * element_bytes, device)
        case Fourier():
            passes = sum(math.ceil(math.log(max(2, n), _LONGEST_TRANSFORM)) for n in work.lengths)
            return total(copy_on_gpu(work.moved_bytes, device) for _ in range(passes))
        case Elimination():
            return _eliminated(work, device)
        case Drawn(words):
            drawn = Term("vector units", words * _DRAWN_OPERATIONS, "op",
                         1e-3 * words * _DRAWN_OPERATIONS / (_INTEGERS * device.vector_gop_s))  # fmt: skip
            computed = Price(drawn.us, (drawn,))
            return computed + copy_on_gpu(4.0 * words, device) if kernel.stored else computed
        case Special(name, elements):
            instructions = elements * SPECIAL.get(name, LONGEST_SPECIAL)[0]
            found = Term("vector units", instructions, "op", 1e-3 * instructions / device.vector_gop_s)
            return Price(found.us, (found,)) + copy_on_gpu(kernel.read_bytes + kernel.written_bytes, device)
        case Nothing():
            return NOTHING
        case Priced(us):
            return Price(us, (Term("a loop as one kernel", 1, "kernel", us),))
        case Unknown() | Trips() | Branches():
            return copy_on_gpu(kernel.read_bytes + kernel.written_bytes, device)
        case _:
            assert_never(work)


def _of_windows(results: float, window: float, moved: float, device: Device) -> Price:
    """Returns the price of one kernel that reduces a window around each of so many results."""
    operations, one = windows_operations(results, window), launch(device)
    vector = Term("vector units", operations, "op", 1e-3 * operations / device.vector_gop_s)
    memory = Term("device memory", moved, "B", memory_us(moved, device))
    return Price((memory.us**OVERLAP + vector.us**OVERLAP) ** (1 / OVERLAP) + one.us, (vector, memory, one))


def _running(work: Running, stored: bool, device: Device) -> Price:
    """Returns the price of running sums: in blocks, in blocks of the blocks' sums, and so on, and of a kernel that adds them all.

    stored: without it, that last kernel is a part of the one that reads the sums.
    """
    prices, length = [], work.length
    while length > 1:
        results = float(work.rows * length)
        prices.append(_of_windows(results, min(length, RUN), 2 * results * work.element_bytes, device))
        length = math.ceil(length / RUN) if length > RUN else 1
    if stored and len(prices) > 1:
        prices.append(copy_on_gpu(2.0 * work.rows * work.length * work.element_bytes, device))
    return total(prices)


_OF_ONE_MATRIX: Mapping[EliminationKind, tuple[float, float, float]] = {
    "factored": (0.12, 0.04, 0.0012), "pivoted": (0.0, 0.0, 0.0021), "solved": (0.04, 0.0095, 0.0), "reflected": (0.0, 0.0, 0.0),
}  # fmt: skip
"""The microseconds of a multiprocessor for one of many matrices: to begin, for each column, and for each row of each column. (94
factorisations and systems on an H200, `xla_alone.py systems`: up to 131,072 matrices of 2 to 128 rows.)"""
_SEVERAL_SIDES = 1.7
"""Triangular systems with several right sides take so many times as long where there are many (from the same)."""
_REFLECTED_ROW_US, _REFLECTED_ELEMENT_US = 0.17, 0.002
"""A column of many matrices that are factorised by reflections waits so much longer for each row, and each element (the same, of
square matrices)."""


def _eliminated(work: Elimination, device: Device) -> Price:
    """Adds up columns one after the other, of as many matrices at a time as there is room for, and products at full precision."""
    alone = "solved_one_us" if work.kind == "solved" and work.right_sides == 1 else f"{work.kind}_us"
    unknown_us = 10 * device.kernel_us / _PANEL
    waits_us = work.size * device.library.get(alone, unknown_us)
    if work.matrices > 1:
        each_us = device.library.get(f"{work.kind}_many_us", unknown_us)
        if work.kind == "reflected":
            each_us += work.rows * (_REFLECTED_ROW_US + _REFLECTED_ELEMENT_US * work.size)
        begin_us, column_us, row_us = _OF_ONE_MATRIX[work.kind]
        of_one_us = begin_us + work.size * (column_us + row_us * work.rows)
        shared_us = (
            work.matrices / device.multiprocessors * of_one_us * (_SEVERAL_SIDES if work.right_sides > 1 else 1.0)
        )
        # large ones may be eliminated one after the other
        waits_us = min(work.matrices * waits_us, max(work.size * each_us, shared_us))
    waits = Term("columns", work.size, "", waits_us)
    products = Term("matrix units", work.operations, "flop", 1e-6 * work.operations / device.matmul_tflop_s["float32"])
    return Price(waits.us + products.us, (waits, products)) + copy_on_gpu(work.moved_bytes, device)
