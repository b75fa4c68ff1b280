"""Prices on a CPU of operations without a nest: calls of a library, and XLA's own loops, on one core unless said.

Rates are numbers of the device (`Device.library`):

- `convolution`: of the rate of products, the share that convolutions reach, which are products of windows; on all cores.
- `patches_gop_s`: rows of windows that are copied one after the other, each with its channels, to make rows of a product.
- `window_gop_s`: elements of windows that convolutions look at in which each channel is a group of its own.
- `sorted_gop_s`: positions times the logarithm of the length; `strided_sorted_gop_s`: of rows whose neighbours lie apart;
  `sorted_integers_gop_s`: of rows that are ordered by integers, which XLA compares itself.
- `running_gop_s`: elements of windows of running sums.
- `fourier_gop_s`: positions times the logarithm of the length.
- `factorised_gop_s`: operations of factorisations and triangular systems.
- `drawn_gop_s`: random words.
"""

import math
from dataclasses import replace
from typing import assert_never

from pallasfuse.device import Device
from pallasfuse.ir.plain_work import (
    Branches,
    Convolution,
    Drawn,
    Elimination,
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
from pallasfuse.price.cpu import memory_term, thunk
from pallasfuse.price.operations import LONGEST_SPECIAL, SPECIAL
from pallasfuse.price.terms import NOTHING, Price, Term
from pallasfuse.price.xla_forms import Opaque
from pallasfuse.price.xla_habits import CHANNELS, RUN

_WINDOW_NS, _ALONG_ONE, _WINDOWS_US, _FEW_WINDOWS = 10.0, 6.0, 60.0, 100
"""A convolution in which each channel is a group of its own takes so long for each window, besides its elements. XLA has no library
for windows along one dimension, whose elements take so many times as long. (17 of 3 to 49 elements on two cores.) The third number
is what each takes besides, but for those of no more windows than the last one. (36 convolutions of 16 to 200,704 windows of 3 to 49
elements on two cores, 2026-11-30: of less than 128 windows 11 to 20 us; without the third number the price of those of 128 to
50,000 was 0.03 to 1.0 of what they took, with it 0.25 to 1.4.)"""
_ELEMENT_NS = 1.5
"""For each element of a matrix that is factorised, besides the operations. (Cholesky's factors on two cores: those of 256 x 256 and
more within 1.2; of 16 x 16 to 128 x 128, in batches, within 1.4.)"""
_COMPARED_NS = 2.3
"""For each element that is compared with the least of the largest few of its row."""
_CHANGE_NS = 100.0
"""For each change of the largest few of a row, as long as they are not yet found: a heap is brought into order again.

Of values in no order, the position n is among the k largest until there with the probability k / n.
"""
_LOGARITHM = 27.0
"""The clocks of one exponential and one logarithm in XLA's loop over a window: measured of rows of 4096 elements, on two
cores at about 3 GHz, 2026-11-27."""


def price_plain(kernel: Opaque, work: PlainWork, device: Device) -> Price:
    """The price of an operation without a nest; `kernel` says what it moves. Not of loops and branches."""
    moved = kernel.read_bytes + kernel.written_bytes
    match work:
        case Convolution():
            return _convolution(work, moved, device)
        case Ordering(rows, length, kept=int(kept)):
            changes = kept * (1 + math.log(max(1.0, length / max(1, kept))))
            looked_at_ns = rows * (length * _COMPARED_NS + changes * _CHANGE_NS)
            return _priced(Term("scalar loops", rows * length, "elements", 1e-3 * looked_at_ns), moved, device)
        case Ordering(rows, length, strided=strided, by_integers=by_integers):
            compared = rows * length * math.log2(max(2, length))
            beside = "sorted_integers_gop_s" if by_integers else "sorted_gop_s"
            name = "strided_sorted_gop_s" if strided else beside
            return _priced(_term("comparisons", compared, name, device), moved, device)
        case Running():
            looked_at, passes = _looked_at(work)
            found = _term("elements of windows", looked_at, "running_gop_s", device)
            if work.of_logarithms:
                clocks = looked_at * _LOGARITHM
                found = Term("special functions", clocks, "clocks", 1e-3 * clocks / device.clock_ghz)
            return _priced(found, passes * moved, device, thunks=2 * passes)
        case Windows(results, window):
            looked_at = float(results * window)
            return _priced(_term("elements of windows", looked_at, "running_gop_s", device), moved, device)
        case Fourier(arrays, lengths):
            positions = float(arrays * math.prod(lengths))
            steps = positions * math.log2(max(2, math.prod(lengths)))
            return _priced(_term("steps of transforms", steps, "fourier_gop_s", device), moved, device)
        case Elimination():
            found = _term("factorisations", work.operations, "factorised_gop_s", device)
            elements = float(work.matrices * work.size**2)
            return _priced(replace(found, us=found.us + 1e-3 * _ELEMENT_NS * elements), moved, device)
        case Drawn(words):
            return _priced(_term("random words", words, "drawn_gop_s", device), moved, device)
        case Special(name, elements):
            clocks = elements * SPECIAL.get(name, LONGEST_SPECIAL)[1]
            us = 1e-3 * clocks / (device.clock_ghz * device.multiprocessors)
            return _priced(Term("special functions", clocks, "clocks", us), moved, device)
        case Nothing():
            return NOTHING
        case Priced() | Unknown() | Trips() | Branches():
            return _priced(Term("calls", 1, "", 0.0), moved, device)
        case _:
            assert_never(work)


def _term(name: str, amount: float, rate: str, device: Device) -> Term:
    """So much of something at a rate of the device; at that of simple operations where the rate is not known."""
    return Term(name, amount, "", 1e-3 * amount / device.library.get(rate, device.vector_gop_s / 10))


def _priced(work: Term, moved: float, device: Device, thunks: int = 1) -> Price:
    memory, one = memory_term("memory", moved, device), thunk(1, device)
    calls = Term(one.name, thunks, one.unit, thunks * one.us)
    return Price(max(work.us, memory.us) + calls.us, (work, memory, calls))


_POSITION_NS, _CHANNEL_NS, _AMONG_ZEROS_NS = 8.0, 1.1, 8.0
"""A position of a window of three dimensions takes so long to copy, and each of its channels, on one core. (Of ten convolutions of
1 to 64 channels on two cores, 2026-11-29, nine are priced at 0.66 to 1.18 of what they took; windows of 1 x 3 x 3 in 3 channels at
0.43.) Where zeros stand between the elements of an image, every element of a window takes longer, those that meet zeros, too.
(Three such gradients of 8 to 64 channels on two cores, 2026-11-30: 6.5 to 11.)"""
_WEIGHTS_AMONG_ZEROS_NS = 0.06
"""An operation of the gradient of the weights of a transposed convolution takes so long, on one core, those with zeros among them.
(Six of one and two dimensions on two cores, 2026-11-30: 0.036 to 0.146; one of three takes half of its price.)"""
_ONE_BY_ONE_NS = 0.2
"""An operation of a convolution that no library computes takes so long, on one core: a product and its addition are two. (Three of
them, 2026-11-29: 0.2 with channels second, 0.13 with zeros between the elements, 1.1 of a gradient of weights; four whose images
are groups take 0.56 to 1.8, more than their price.)"""


_OF_GROUPS = 2.2
"""Groups of several channels take so much longer than as many convolutions by themselves are priced. (Eight of them on two cores,
of 3 to 64 channels in 2 to 32 groups, 2026-11-29: 1.6 to 3.7 times.)"""


def _convolution(work: Convolution, moved: float, device: Device) -> Price:
    """Returns the price of windows copied to rows and a product of these on all cores, or of windows one channel after the other.

    XLA brings the dimensions of convolutions into the order of its library, but for those in loops and branches: these it computes
    one product after the other, and those whose images are groups of several results.
    """
    alone = Term("products one by one", work.flops, "flop", 1e-3 * _ONE_BY_ONE_NS * work.flops)
    if device.in_body and work.lies_otherwise:
        return _priced(alone, moved, device)
    if work.groups > 1 and work.columns < CHANNELS:
        windows = float(work.groups * work.rows * work.columns)
        looked_at = _term("elements of windows", windows * work.summed, "window_gop_s", device)
        slower = _ALONG_ONE if len(work.window) == 1 else 1.0
        us = slower * looked_at.us + 1e-3 * _WINDOW_NS * windows + (_WINDOWS_US if windows > _FEW_WINDOWS else 0.0)
        return _priced(replace(looked_at, us=us), moved, device)
    if work.images_are_groups:
        return _priced(alone, moved, device)
    rates = device.matmul_tflop_s
    rate = 1e6 * rates.get(work.operand_dtype, rates["float32"]) * device.multiprocessors
    # the gradient of the weights of a transposed convolution multiplies the zeros, too
    done = work.flops * (work.apart if work.of_weights else 1)
    slower = _OF_GROUPS if work.groups > 1 and work.positions > 1 else 1.0
    product = Term("products", done, "flop", slower * done / (rate * device.library.get("convolution", 1.0)))
    if work.of_weights and work.apart > 1:
        product = replace(product, us=max(product.us, 1e-3 * _WEIGHTS_AMONG_ZEROS_NS * done))
    among_zeros = work.apart > 1 and not work.of_weights
    if work.positions == 1 and not among_zeros:
        return _priced(product, moved, device)
    windows, priced = float(work.groups * work.rows), _priced(product, moved, device)
    # positions along the last dimension lie side by side, with their channels
    rows = windows * max(1, work.positions // work.window[-1])
    copied = _term("rows of windows", slower * rows, "patches_gop_s", device)
    if len(work.window) == 3:
        us = 1e-3 * windows * (_POSITION_NS * work.positions + _CHANNEL_NS * work.summed)
        if among_zeros:
            us = 1e-3 * windows * _AMONG_ZEROS_NS * work.summed * work.apart
        copied = Term("positions of windows", windows * work.positions, "", us)
    return Price(priced.us + copied.us, (copied, *priced.terms))


def _looked_at(work: Running) -> tuple[float, int]:
    """The elements of all windows, and how many blocks of blocks there are."""
    found, levels, length = 0.0, 0, work.length
    while True:
        blocks = math.ceil(length / RUN)
        found += work.rows * (blocks * RUN * RUN if blocks > 1 else length * length)
        levels += 1
        if blocks <= 1:
            return found, levels
        length = blocks
