"""Prices on a GPU of convolutions, which a library computes as products of the windows' positions without writing these down.

Found on an H100 with 126 convolutions and their gradients of one, two and three dimensions, in bfloat16 and float32 (0.6 to 1.6
times what was measured for four of five). What is multiplied among zeros, and copied for three dimensions, was found on an H200.
"""

import math

from pallasfuse.device import Device
from pallasfuse.ir.plain_work import Convolution
from pallasfuse.price.gpu_library import (
    KEPT_OPERANDS,
    STREAMED,
    copy_on_gpu,
    launch,
    matrix_rate,
    memory_us,
    shares_of,
    tiled_us,
)
from pallasfuse.price.terms import Price, Term
from pallasfuse.price.xla_habits import CHANNELS

_TILES = ((256, 128), (256, 64), (256, 32), (128, 128), (64, 128), (128, 32), (64, 64), (64, 32))
_SHARED_LOADS = 1.2
"""A tile of an operand that is read from the cache serves so many multiprocessors: about one, as each gathers its own windows."""
_STEP, _STEP_OF_THREE = 32, 16
"""Channels that are summed in one step, at one position of a window, and by windows of three dimensions in float32: fewer take as
long. (The second of ten layers of 1 to 16 channels on an H200, `xla_alone.py films`.)"""
_MOST_SHARES, _MOST_SHARES_OF_GRADIENTS = 8, 128
"""Among so many blocks a sum is split at most; that of a gradient of weights, which is over all positions, among more."""
_DIRECT = 0.25
"""Of the rate of the vector units, what kernels reach that use no matrix units: they win where there are very few channels."""
_TURNED_BYTE_US, _XLA_TURNS_US, _XLA_TURNS_ELEMENT_US = 0.68, 10.0, 1.85
"""The library takes so long to copy a million bytes to another order, of all that windows of three dimensions read and write.
XLA copies them, too, where images or results lie in another order in the program: it takes so long to start that, and so long for a
million elements. (106 convolutions and gradients in both types on an H200, `xla_alone.py films`.)"""


def convolution_on_gpu(work: Convolution, device: Device) -> Price:
    """Returns the price of a convolution, or of a gradient of one, with what is copied around it."""
    if work.groups > 1 and work.columns < CHANNELS:
        return _channel_by_channel(work, device)
    if work.of_examples and work.groups >= _FEWEST_EXAMPLES:
        return _weights_of_examples(work, device)
    work = work.without_padding()
    size = 4.0 if work.operand_dtype == "float32" else 2.0
    rate = matrix_rate(work.operand_dtype, device)
    direct_us = 1e-3 * work.flops * work.holes / 2 / (_DIRECT * device.vector_gop_s)
    if work.of_weights and work.apart == 1:
        # rows are channels, and sums are over positions: tf32 is turned in registers for that
        turned = 2.0 if work.operand_dtype == "float32" else 1.0
        rows = math.ceil(work.images / _STEP) * _STEP * work.rows // work.images
        product_us = _tiled(work, rows, work.summed, turned * size, rate / turned, device)
    elif work.of_weights:  # of a transposed convolution: it is not seen that it is one, and zeros are multiplied
        product_us = _tiled(work, work.rows, work.summed * work.apart, size, rate, device)
        direct_us = math.inf
    else:
        step = _STEP_OF_THREE if len(work.window) == 3 and work.operand_dtype == "float32" else _STEP
        summed = work.apart * work.positions * work.holes * math.ceil(work.channels / step) * step
        product_us = _tiled(work, work.rows, summed, size, rate, device)
    least_us = _of_one_channel_us(work) if work.groups == 1 and len(work.window) == 2 else 0.0
    matrix = Term("matrix units", work.flops, "flop", max(min(product_us, direct_us), least_us))
    memory = Term("device memory", work.moved_bytes, "B", memory_us(work.moved_bytes, device, STREAMED, KEPT_OPERANDS))
    one = launch(device)
    price = Price(matrix.us + memory.us + one.us, (matrix, memory, one))
    if work.padded_bytes:
        price += copy_on_gpu(2 * work.padded_bytes, device)
    if len(work.window) < 3:
        return price + Price(one.us, (one,))  # the order of the weights
    if work.positions == 1:
        return price + copy_on_gpu(2 * work.moved_bytes, device)
    turned_us = _TURNED_BYTE_US * 1e-6 * work.moved_bytes
    if any(work.turned):
        turned_us += _XLA_TURNS_US + _XLA_TURNS_ELEMENT_US * 1e-6 * work.moved_bytes / size
    return price + Price(turned_us, (Term("copies to another order", work.moved_bytes, "B", turned_us),))


def _of_one_channel_us(work: Convolution) -> float:
    """Returns the least time of a convolution of images of one channel, or of the gradient of its weights; 0 for others."""
    if work.of_weights:
        is_of_one = work.images == 1 < work.channels and work.positions >= _LONG_WINDOW
        return 1e-6 * _GRADIENT_OF_ONE_US * work.summed * work.columns if is_of_one else 0.0
    return 1e-6 * _ONE_CHANNEL_US * work.rows * min(work.columns, _MOST_OF_ONE) if work.channels == 1 else 0.0


def _weights_of_examples(work: Convolution, device: Device) -> Price:
    """Returns the price of gradients of weights of which each example of a batch has its own.

    The library has a kernel that takes them position by position. Where images have many channels there is one for each example.
    """
    by_positions_us = 1e-6 * work.flops / _POSITIONS_TFLOP_S
    each_us = _EXAMPLE_US + 1e-6 * work.flops / work.groups / _EXAMPLE_TFLOP_S
    us = by_positions_us if work.images < _MANY_CHANNELS else work.groups * each_us
    term, one = Term("positions of each group", work.flops, "flop", us), launch(device)
    return Price(term.us + one.us, (term, one))


def _tiled(work: Convolution, rows: int, summed: float, size: float, rate: float, device: Device) -> float:
    most = _MOST_SHARES if not work.of_weights else _MOST_SHARES_OF_GRADIENTS if work.apart == 1 else 1
    shares = shares_of(summed, most)
    return tiled_us(work.groups, rows, work.columns, summed, size, rate, device, _TILES, _SHARED_LOADS, shares)


def _channel_by_channel(work: Convolution, device: Device) -> Price:
    """Returns the price where each channel, or few of them, has windows of its own: no product of matrices.

    The library has a kernel for square windows. For others it takes the faster of two ways: one by one, or as products, with
    operands and results copied to another order.
    """
    slowly = device.library.get("channelwise_tflop_s")
    size = 4.0 if work.operand_dtype == "float32" else 2.0
    is_gradient = work.of_weights or work.rows < work.positions  # windows are as long as what is convolved
    if not is_gradient and max(work.channels, work.columns) > 1 and min(work.channels, work.columns) < _FEW:
        few = Term("few channels of a group", work.moved_bytes / size, "", 1e-6 * _OF_FEW_US * work.moved_bytes / size)
        return Price(few.us + launch(device).us, (few, launch(device)))
    if work.square or not slowly:
        added = work.flops / 2
        rate = _SQUARE_FLOAT32 if work.operand_dtype == "float32" else _SQUARE
        vector = Term("vector units", added, "op", 1e-3 * added / (rate * device.vector_gop_s))
        moved = copy_on_gpu(work.moved_bytes, device)
        price = Price(max(vector.us, moved.us), (vector, *moved.terms))
        return price + copy_on_gpu(2 * work.padded_bytes, device) if work.padded_bytes else price
    is_wide = work.operand_dtype == "float32"
    in_turn = work.summed if is_gradient and not work.of_weights else 0  # sums that are not split among blocks
    direct_us = max(1e-6 * work.flops / slowly, in_turn * _STEP_IN_TURN_US)
    if work.of_weights:
        direct_us = 1e-6 * work.flops / _OF_WEIGHTS_TFLOP_S if is_wide else math.inf
    elements = 1e-6 * work.moved_bytes / size
    turned_us = 3 * _TURNED_US + elements * (
        _READ_TURNED_US if is_gradient else (_READ_TURNED_US + _MADE_TURNED_US) / 2
    )
    product_us = max(1e-6 * work.flops / _AS_PRODUCT_TFLOP_S, in_turn * _STEP_OF_PRODUCT_US) + _PRODUCT_US
    if direct_us <= turned_us + product_us or (is_wide and in_turn):
        terms: tuple[Term, ...] = (Term("channels one by one", work.flops, "flop", direct_us), launch(device))
    else:
        turned = Term("copies to another order", work.moved_bytes, "B", turned_us)
        terms = (Term("matrix units", work.flops, "flop", product_us), turned)
    return Price(sum(t.us for t in terms), terms)


_ONE_CHANNEL_US, _GRADIENT_OF_ONE_US = 5.5, 10.0
"""Images of one channel are convolved by kernels without matrix units, which take so long for a million results; and gradients of
their weights for a million results of the convolution. (Eight of each, in both types, on an H200: 0.6 to 1.8 times what was
measured, `xla_alone.py convolutions`.)"""
_MOST_OF_ONE, _LONG_WINDOW = 32, 500
"""The most results at a position, and the fewest positions whose results are summed, of those that were measured; more results are
not counted, and fewer positions are no gradient of such images."""
_FEWEST_EXAMPLES, _MANY_CHANNELS = 32, 32
"""The fewest examples that were measured (of 64 channels: 2813 us, priced 2775), and the channels from which on the library has a
kernel for each of them."""
_POSITIONS_TFLOP_S, _EXAMPLE_US, _EXAMPLE_TFLOP_S = 0.9, 10.0, 1.3
"""The rate of the kernel for gradients of weights of all examples, and the time and the rate of one for each. (14 such gradients of
64 to 1024 examples on an H200: 0.4 to 1.8 times what was measured, `xla_alone.py convolutions`.)"""
# Channel by channel, found on an H100 with 17 convolutions and the gradients of both operands of each, in bfloat16 and float32.
_SQUARE, _SQUARE_FLOAT32 = 0.21, 0.095
"""The library's kernels for square windows reach this share of the rate of the vector units."""
_OF_WEIGHTS_TFLOP_S = 0.36
"""The rate of a kernel for gradients of weights in float32."""
_STEP_IN_TURN_US, _STEP_OF_PRODUCT_US = 0.27, 0.07
"""A thread, or a block of a product, adds up a window as long as an image step by step, and each step takes so long. Such is the
gradient of the weights of a window with holes, where the library does not see that it is one."""
_TURNED_US, _READ_TURNED_US, _MADE_TURNED_US = 10.0, 9.5, 31.0
"""Copies of operands and results to another order take so long to start, and for a million elements: those read, those made."""
_FEW, _OF_FEW_US = 4, 20.0
"""A group with fewer channels, or results, but not one channel with one result, has no kernel that reads these side by side:
operands and results are copied to another order, or there is one kernel for each group. So long it takes for a million elements of
all of them. (Nine such convolutions of 4 to 64 groups in both types on an H200, 2026-11-29: 5.8 to 35.)"""
_PRODUCT_US, _AS_PRODUCT_TFLOP_S = 15.0, 1.5
"""Products for every channel take so long to start, and reach this rate, as each fills a small part of the matrix units."""
