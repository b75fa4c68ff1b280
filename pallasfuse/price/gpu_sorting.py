"""Prices on a GPU of rows that are sorted, and of the largest elements of rows.

Found on an H100 with the largest 1 to 64 of twelve arrays, whole and in parts of 512 to 8192 elements (0.7 to 1.5 times what
was measured for 61 of 68 programs), and with the largest 1 to 16 of 23 more (94 of 110).
"""

import math

from pallasfuse.device import Device
from pallasfuse.ir.plain_work import Ordering
from pallasfuse.price.gpu_library import copy_on_gpu, launch, memory_us
from pallasfuse.price.terms import Price, Term, total

_MOST_KEPT, _SHORTEST_KEPT = 16, 1 << 10
"""XLA has a kernel that keeps the largest few of a row: so few, of so long a row. Others are sorted."""
_POSITION_BYTES, _PACKED_BYTES, _LONGEST_PACKED = 4, 6, 1 << 16
"""An element of two bytes and its position are sorted as one word, where the row is no longer."""
_START_US, _STEP_KEPT_US, _SETTLED = 3.6, 0.089e-3, 1 << 13
"""A row takes, for each element kept, a time to begin and end, and one for each of its positions. Up to so many positions, those
kept change often; after them few are better. Shorter rows begin sooner, and a multiprocessor has several at a time."""
_WITHOUT_WORDS = 3.0
"""The kernel takes so many times as long for elements of two bytes."""
_TILE = 1 << 12
"""Positions that a block of XLA's sorting kernel brings into order on the chip (bitonic networks)."""
_STEP_US, _THREADS = 0.06, 1 << 10
"""A step of a network waits for the one before: the time of a word of each thread of a block, which has so many at most."""
_BLOCKS = 32
"""Blocks that a multiprocessor has at once, at most: each sorts one of many short rows."""
_RADIX_POSITIONS, _RADIX_LENGTH = 2e6, 20_000
"""A library may sort rows of so many positions by digits: one row, or several that have so many together."""
_RADIX_US, _RADIX_LEAST_US = 57e-6, 42.0
"""The time that it takes for a word of a single row, and the least."""
_OF_A_ROW_NS, _OF_FURTHER_WORD, _OF_FLOATS, _OF_KEPT_FLOATS = 3.0, 0.72, 2.27, 1.6
"""Each of several rows is sorted by one block, and each multiprocessor has one: the nanoseconds of an element of a word, or of half
of one, and how many times as long a further word takes, floats of a whole word of which all are wanted, and those of which some
are. (25 sorts of 64 to 1000 rows of 20,000 to 50,257 on an H200, `benchmarks/xla_alone.py sorts`: the price is 0.65 to 1.24 times
their time. What is kept: of three other measurements.)"""
_SECTOR = 32
"""The bytes that a strided read of one position brings."""


def sorting_on_gpu(work: Ordering, device: Device) -> Price:
    """Returns the price of sorting rows, or of finding the largest elements of each."""
    packed = work.kept is not None and work.element_bytes == _PACKED_BYTES and work.length <= _LONGEST_PACKED
    is_kept = work.kept is not None and work.kept <= _MOST_KEPT and work.length >= _SHORTEST_KEPT
    if is_kept and not packed and "kept_gop_s" in device.library:
        return _kept(work, device)
    words = 1.0 if packed else work.element_bytes / 4
    all_words = work.rows * work.length * words
    network = _by_network(work, words, device)
    by_digits = work.rows == 1 or work.rows * work.length >= _RADIX_POSITIONS
    if by_digits and work.length >= _RADIX_LENGTH and not work.strided:
        one_us = _RADIX_US * all_words if work.rows == 1 else _by_blocks_us(work, words, device)
        digits = Term("sorting by digits", all_words, "words", max(_RADIX_LEAST_US, one_us))
        return min(network, Price(digits.us, (digits,)), key=lambda price: price.us)
    return network


def _by_blocks_us(work: Ordering, words: float, device: Device) -> float:
    """Returns the time of sorting several rows by digits, each by one block. words: of four bytes, of an element."""
    each_ns = _OF_A_ROW_NS * (1.0 + _OF_FURTHER_WORD * max(0.0, words - 1.0))
    if words >= 1 and not work.by_integers:
        each_ns *= _OF_FLOATS if work.kept is None else _OF_KEPT_FLOATS
    return 1e-3 * each_ns * work.length * max(1.0, work.rows / device.multiprocessors)


def _kept(work: Ordering, device: Device) -> Price:
    """Returns the price of the few largest of each row: a block goes along one, and compares each position with those kept."""
    kept = 1 << math.ceil(math.log2(max(1, work.kept or 1)))
    share = math.sqrt(min(1.0, work.length / _SETTLED))
    of_one_us = kept * (_START_US * share + _STEP_KEPT_US * work.length)
    of_settled_us = kept * (_START_US + _STEP_KEPT_US * _SETTLED)
    many_us = 1e-3 * kept * _SETTLED * work.rows / device.library["kept_gop_s"]  # of rows of so many positions
    us = max(of_one_us, many_us * share * of_one_us / of_settled_us)
    compared = float(kept * work.length * work.rows)
    us *= _WITHOUT_WORDS if work.element_bytes == _PACKED_BYTES else 1.0
    read = (work.element_bytes - _POSITION_BYTES) * work.rows * work.length
    memory, one = Term("device memory", read, "B", memory_us(read, device)), launch(device)
    return Price(max(us, memory.us) + one.us, (Term("positions kept or not", compared, "", us), memory, one))


def _by_network(work: Ordering, words: float, device: Device) -> Price:
    """Returns the price of a bitonic network: steps of a stage inside a tile are one kernel, every wider step is one of its own."""
    packing = words * 4 != work.element_bytes
    positions_bytes = _POSITION_BYTES * work.tells_equals_apart
    words += positions_bytes / 4
    stages = math.ceil(math.log2(max(2, work.length)))
    tile = min(stages, int(math.log2(_TILE)))
    wide = stages - tile
    inside = tile * (tile + 1) // 2 + wide * tile
    positions = float(work.rows << stages)
    rate = device.library.get("compared_gop_s", device.vector_gop_s / 20)
    waves = max(1.0, work.rows / (_BLOCKS * device.multiprocessors)) if wide == 0 else 1.0
    step_us = max(1e-3 * positions * words / rate, waves * words * _STEP_US * max(2.0, (1 << tile) / _THREADS))
    steps = Term("steps of sorting", positions * inside * words, "", inside * step_us)
    moved = 2 * work.rows * work.length * (_SECTOR if work.strided else work.element_bytes + positions_bytes)
    memory, one = Term("device memory", moved, "B", memory_us(moved, device)), launch(device)
    packed = copy_on_gpu(moved, device) if packing else Price(0.0, ())
    passes = 1 + wide + wide * (wide + 1) // 2
    each = Price(memory.us + one.us, (memory, one))
    return Price(steps.us, (steps,)) + total(each for _ in range(passes)) + packed
