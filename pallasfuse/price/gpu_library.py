"""The times of a library's kernels on GPUs, and of the traffic with memory, as XLA's own kernels have it, too."""

import math
from collections.abc import Sequence

from pallasfuse.device import Device
from pallasfuse.ir import dtypes
from pallasfuse.price.terms import Price, Term
from pallasfuse.price.xla_forms import Copy, LibraryProduct, Row
from pallasfuse.resources.block import WARP

OVERLAP = 4.0
CACHED_SHARE = 0.4
"""Of the cache, as much as is still there when the next kernel reads and writes it."""
KEPT_OPERANDS = 0.8
"""The same of operands of a product, which nothing is written beside."""
_CACHED_RATE = 0.95
"""Of the cache's bandwidth, what loops reach."""
_SHARED_LOADS = 2.7
"""How many multiprocessors take a tile of an operand from the cache together (clusters of a library's kernels)."""
STREAMED = 0.95
"""Of the memory's bandwidth, what loops reach that read and write everything once, in order."""
_UNALIGNED = 0.4
"""A product reaches this share of its rate if the rows of an operand do not begin at multiples of 16 bytes. (35 products of four
layouts on an H100, `benchmarks/xla_alone.py`, also for the next two.)"""
_HALF_ALIGNED = 0.8
"""A product reaches this share if such rows begin at multiples of 8 bytes, and what lies along them is not summed."""
_ODD_SUM = 0.75
"""A product reaches this share if its rows are whole, and only the length of its sum is no multiple of 16 bytes."""
_UNALIGNED_RESULT = 0.55
"""One product of float32 reaches this share if the rows of its result do not begin at multiples of 16 bytes. (Five products with
32,003 to 50,257 columns on an H100: 0.45 to 0.59. Of bfloat16, 0.75 to 0.9, which is not counted; batches were not measured.)"""
_ONE_TILE = 256
"""The columns of a library's largest tile: results of no more were not measured, either."""
UNALIGNED_LOADS = 0.6
"""A product reaches this share of the memory's bandwidth if the rows of an operand do not begin at multiples of 16 bytes."""
COMPUTED_BEFORE = 0.2
"""A product that computes an operand as it reads it takes longer by this share of its arithmetic. (10 products in bfloat16 on an
H100: 0 to 0.4.)"""
_SPLIT_TILE, _SHARES_BY_ROOT, _FEWEST_SHARES, _WHOLE_SUM = 128, 0.36, 4, 1 << 18
"""XLA splits the sum of a product into so many shares, times the root of the terms for each tile of so many rows and columns; into
fewer than so many it splits none, nor that of so few terms."""
_FEWEST_ELEMENTS = 100
"""The least number of elements of both operands of one product for which a library is called."""
_OF_A_TERM, _OF_A_RESULT = 4.0, 20.0
"""Operations of a product in a loop: two loads, their places and the sum for each term; the place of each result."""
_TURNED_BYTES = 10.0
"""A copy that turns elements of one byte takes so many times as long as one in order. (Three operands of 5 to 17 MB
on an H100, `benchmarks/xla_alone.py`: 0.7 to 1.1 times what the products took.)"""


def memory_us(moved: float, device: Device, efficiency: float = 1.0, kept: float = CACHED_SHARE) -> float:
    """Returns the microseconds in which bytes are moved, which stay in the cache where they fit.

    efficiency: the share of the bandwidth that is reached. kept: the share of the cache that they may fill to stay there.
    """
    cached = moved <= kept * device.found_bytes
    return 1e-3 * moved / ((_CACHED_RATE * device.cache_gb_s if cached else device.memory_gb_s) * efficiency)


def launch(device: Device) -> Term:
    """Returns the time of one kernel that does nothing, with the gap before it."""
    return Term("launch", 1, "kernel", device.kernel_us + device.launch_us)


def copy_on_gpu(moved: float, device: Device) -> Price:
    """Returns the price of one kernel that only moves so many bytes, those read and those written together."""
    one = launch(device)
    memory = Term("device memory", moved, "B", memory_us(moved, device, 0.8))
    return Price(one.us + memory.us, (memory, one))


def copy_of_operand(copy: Copy, p: LibraryProduct, device: Device) -> Price:
    """Returns the price of a kernel that brings an operand of a product into another order."""
    price = copy_on_gpu(copy.moved_bytes, device)
    if copy.in_rows or _size(p) > 1:
        return price
    us = copy.moved_bytes * 1e-3 * (_TURNED_BYTES - 1.0) / device.memory_gb_s
    return price + Price(us, (Term("turned bytes", copy.moved_bytes / 2, "", us),))


_BY_TILE, _BY_TILE_OF_FLOATS = (1.0, 0.85, 0.6), (1.0, 0.5, 0.4)
"""The shares of its rate that a library reaches by tiles of at least 128 x 128, of at least 64 x 128, and by smaller ones; and
those of float32 that is rounded to tf32.

(139 products of float32 on an H100 and an H200, `xla_alone.py` products, those with ends and small ones: priced at 0.85 of what
they take by the shares of other types, at 0.93 by their own.)
"""
_STEP_BYTES, _STEP_US = 128, 0.04
"""The terms of a sum that a block takes at a time, in bytes of a row, and the time that each waits for the one before."""
_TILES = ((128, 256), (128, 128), (64, 128), (64, 64), (64, 32), (16, 64), (16, 32))
_SHARES = (1, 2, 4, 8, 16, 32, 64, 128)


def product_on_gpu(p: LibraryProduct, device: Device) -> Price:
    """Returns the price of a product by the library, which chooses the tile and the shares that suit its shape."""
    if is_loop(p):
        return _product_in_a_loop(p, device)
    loads = STREAMED if _is_aligned(p) else UNALIGNED_LOADS
    at_end = p.read_at_end or 0.0
    moved = p.read_bytes + p.written_bytes + at_end
    kept = KEPT_OPERANDS if moved <= KEPT_OPERANDS * device.found_bytes else 0.0
    moved_us = memory_us(p.read_bytes, device, loads, kept) + memory_us(
        p.written_bytes, device, loads, min(kept, CACHED_SHARE)
    )
    end_us = memory_us(at_end, device, loads, kept)
    memory = Term("device memory", moved, "B", moved_us + end_us)
    slower = 1.0 + COMPUTED_BEFORE if p.computes_operand else 1.0
    matrix = Term("matrix units", p.flops, "flop", product_us(p, device) * slower)
    one = launch(device)
    busy = (moved_us**OVERLAP + matrix.us**OVERLAP) ** (1 / OVERLAP)
    return Price(busy + end_us + one.us, (memory, matrix, one))


def is_loop(p: LibraryProduct) -> bool:
    """Does XLA make a loop of a product, or of each of a batch? It calls no library for matrices of so few elements.

    (`IsMatrixMultiplicationTooSmallForRewriting`; seventeen shapes compiled for an H100. Half types are padded to eight rows
    before, and no product is that small.)
    """
    return p.operand_dtype == "float32" and (p.rows + p.columns) * p.summed < _FEWEST_ELEMENTS


def _product_in_a_loop(p: LibraryProduct, device: Device) -> Price:
    """Returns the price of a product each of whose results is the sum of a thread, with its loads and their places."""
    results = float(p.batch * p.rows * p.columns)
    operations = results * (p.summed * _OF_A_TERM + _OF_A_RESULT)
    moved = p.read_bytes + p.written_bytes
    memory = Term("device memory", moved, "B", memory_us(moved, device, STREAMED, KEPT_OPERANDS))
    vector = Term("vector units", operations, "op", 1e-3 * operations / device.vector_gop_s)
    started = Term("threads that begin", results, "", results / (1e3 * device.multiprocessors * device.clock_ghz))
    one = launch(device)
    busy = max((memory.us**OVERLAP + vector.us**OVERLAP) ** (1 / OVERLAP), started.us)
    return Price(busy + one.us, (memory, vector, started, one))


def product_us(p: LibraryProduct, device: Device) -> float:
    """The time of the best of a library's tiles and splits of the sum, by rounds of blocks over the multiprocessors."""
    rate = matrix_rate(p.operand_dtype, device, p.precise)
    shares = _shares_of_sum(p, device)
    of_floats = p.operand_dtype == "float32" and not p.precise
    unaligned = of_floats and p.batch == 1 and p.columns > _ONE_TILE and p.columns * _size(p) % 16
    of_result = _UNALIGNED_RESULT if unaligned else 1.0
    return tiled_us(
        p.batch, p.rows, p.columns, p.summed, _size(p), rate, device, _TILES, _SHARED_LOADS,
        [shares] if shares > 1 else shares_of(p.summed), ended=p.read_at_end is not None,
        reached=min(of_result, *(_share_by_row(row, p) for row in _rows(p))),
        by_tile=_BY_TILE_OF_FLOATS if of_floats else _BY_TILE,
    )  # fmt: skip


def _shares_of_sum(p: LibraryProduct, device: Device) -> int:
    """Returns the number of products that XLA makes of one, each of a share of the sum, for a kernel that adds them up.

    It does for floats, while these have no more tiles than there are multiprocessors. (99 products of 16 to 4096 rows and
    columns, none in batches, compiled for an H100: all but eight have this number, and all but four are split or whole as here.)
    """
    if dtypes.is_integer(p.operand_dtype) or p.rows * p.columns * p.summed <= _WHOLE_SUM:
        return 1
    tiles = p.batch * math.ceil(p.rows / _SPLIT_TILE) * math.ceil(p.columns / _SPLIT_TILE)
    wanted = 2 ** math.ceil(math.log2(max(1.0, _SHARES_BY_ROOT * math.sqrt(p.summed / tiles))))
    most = 2 ** int(math.log2(max(1.0, device.multiprocessors / tiles)))
    return shares if (shares := min(wanted, most, _SHARES[-1])) >= _FEWEST_SHARES else 1


def _rows(p: LibraryProduct) -> tuple[Row, ...]:
    """The rows of the operands: of both in the order of the product where they are unknown."""
    return p.rows_of or (Row(p.summed, summed=True), Row(p.columns, summed=False))


def _is_aligned(p: LibraryProduct) -> bool:
    """Do the rows of both operands begin at multiples of 16 bytes?"""
    return all(row.elements * _size(p) % 16 == 0 for row in _rows(p))


def _share_by_row(row: Row, p: LibraryProduct) -> float:
    """The share of its rate that a product reaches by the rows of one operand."""
    size = _size(p)
    if row.elements * size % 16:
        return _HALF_ALIGNED if not row.summed and row.elements * size % 8 == 0 else _UNALIGNED
    return 1.0 if row.summed or p.summed * size % 16 == 0 else _ODD_SUM


def _size(p: LibraryProduct) -> float:
    """The bytes of an element of an operand."""
    return float(dtypes.itemsize_bytes(p.operand_dtype))


def matrix_rate(operand_dtype: str, device: Device, precise: bool = False) -> float:
    """The operations in a microsecond of all matrix units; float32 is rounded to tf32 on its way, but where it is to be precise."""
    dtype = "tf32" if operand_dtype == "float32" and not precise else operand_dtype
    return device.matmul_tflop_s.get(dtype, device.matmul_tflop_s["float32"]) * 1e6


def shares_of(summed: float, most: int = _SHARES[-1]) -> list[int]:
    """Returns the numbers of blocks among which a sum of so many terms may be split, at most so many, each with enough of them."""
    return [n for n in _SHARES if n == 1 or (n <= most and summed / n >= 64)]


def tiled_us(
    batch: int, rows: int, columns: int, summed: float, size: float, rate: float, device: Device,
    tiles: Sequence[tuple[int, int]], together: float, all_shares: Sequence[int], ended: bool = False, reached: float = 1.0,
    by_tile: tuple[float, float, float] = _BY_TILE,
) -> float:  # fmt: skip
    """The time of a product without what it moves from and to memory, in the best of the tiles of its result.

    size: the bytes of an element of the operands, and about of what a block stores. rate: the operations in a microsecond of all
    matrix units. together: how many multiprocessors take a tile of an operand from the cache at once. all_shares: the numbers of
    blocks among which the sum may be split. ended: its results are computed further; where warps add the shares, by one kernel
    more. reached: the share that is reached of the rates at which blocks multiply and take their operands. by_tile: as `_BY_TILE`.
    """
    best = math.inf
    for high, wide in tiles:
        for a, b in ((high, wide), (wide, high)):
            for shares in all_shares:
                blocks = batch * math.ceil(rows / a) * math.ceil(columns / b) * shares
                rounds = math.ceil(blocks / device.multiprocessors)
                tile = max(a, 64) * b if min(a, b) >= 64 else 64 * max(a, b)
                efficiency = by_tile[0 if tile >= 128 * 128 else 1 if tile >= 64 * 128 else 2]
                steps = summed / shares
                busy = 2.0 * tile * steps / (rate / device.multiprocessors * efficiency)
                feed = steps * (a + b) * size / (1e3 * together * device.cache_gb_s / device.multiprocessors)
                stored = a * b * size / (1e3 * device.cache_gb_s / device.multiprocessors)
                chain = device.latency_us + steps * size / _STEP_BYTES * _STEP_US + stored
                sums = 4.0 * batch * rows * columns * (shares + 1)
                split = 0.0 if shares == 1 else device.kernel_us + memory_us(sums, device)
                split += launch(device).us if ended and shares >= WARP else 0.0
                best = min(best, rounds * max(busy, feed) / reached + chain + split)
    return best
