"""The time that products of tiles take on a GPU: on its matrix units, in the shared memory they read from, and of its threads."""

import math
from collections.abc import Sequence

from pallasfuse.device import Device
from pallasfuse.ir import dtypes
from pallasfuse.price.block_products import Product
from pallasfuse.resources.block import WARP
from pallasfuse.resources.thread_layouts import VECTOR_BYTES
from pallasfuse.resources.triton_view import WARP_ROWS, WARPGROUP_ROWS, WARPGROUP_WARPS

_MATRIX_ROWS = 64
"""The rows that the matrix unit of a warpgroup multiplies at once."""
_OF_LIBRARY_BY_WARPGROUPS, OF_LIBRARY, OF_LIBRARY_ROUNDED, _OF_LIBRARY_NARROW = 1.05, 0.85, 0.35, 0.45
"""The share of the rate of the library's large products: of warpgroups, of other kernels, of their products of float32 operands,
which wait for the rounding, and where rows do not fill the unit."""
_UNEVEN = 0.42
"""Products whose operands have rows that do not begin at multiples of 16 bytes, or of `_WORDS` in half types, reach this part of
`OF_LIBRARY`, if trips copy them ahead. XLA's kernels by Triton reach 0.36 of the library's rate (`gpu_library`, measured)."""
_WORDS = 8
"""Matrix units take half types that were copied in pieces of two words as fast as others: 16 times attention of 1024 rows of 68
bfloat16 takes 22.6 and 26.6 us in tiles of 128 and of 64, of 72 24.6 in tiles of 64, and of 66 39.6 and 38.7. (On an H200. What is
read from memory takes as long as in other short pieces.)"""
_WARP_COLUMNS = 8
"""The columns of the smallest product of one warp."""
_OPERAND_BYTES, _OPERAND_BYTES_OF_WARPS = 100.0, 50.0
"""Operands that a multiprocessor reads from its shared memory in a clock, for products of warpgroups and for those of warps."""
_TURNED_BYTES_OF_WARPS, _TURNED_ROW_BYTES = 20.0, 128
"""The same for products of warps whose rows are turned on the way, as they lie in memory with what is summed before them, where
such a line has so many bytes. (Products of 16 to 128 rows with a matrix on an H200: 999 kernels of 16 programs in half precision,
Spearman 0.85, 87% within 1.3, 0.71 and 62% without this; 128 of two in float32, 0.69 and 46%, 0.42 and 26% without. Threads of a
warp may meet in the same banks: no profile was taken.)"""
_EXCHANGED_BYTES = 8.0
"""An element of a result that threads exchange is written to shared memory and read from it, as float32."""
_BANK_BYTES = 4.0
"""Operands that threads read from a multiprocessor's shared memory in a clock, for products of float32 without rounding: a word, as
at worst all threads of a warp meet in one bank. Which banks they meet in is not known beforehand."""
_STAGED_OPERATIONS = 32.0
"""Operations of threads for each element of a computed side of a product that passes through shared memory, in each warp that
takes it; also of a side that is loaded in each trip and whose axes become one."""
_SPLIT_OPERATIONS = 8.0
"""Operations of threads for each element of a product's result that has several axes along its rows, or along its columns. (110
kernels with such sides, and 163 without, measured on an H200: decoding with groups of heads, products with several axes and what
reduces them.)"""
_ROUNDED, _ROUNDED_ROWS_TURNED, _ROUNDED_COLUMNS_TURNED = 17.0, 30.0, 52.0
"""Operations for each element of a float32 side of a product, which is rounded on its way through registers; of rows, and of
columns, that lie in memory with what is summed before them, and are turned there."""
_BYTES_OF_ROWS_TURNED, _BYTES_OF_COLUMNS_TURNED = 28.0, 33.0
"""Operations for each element of one byte of a side of a product, of its rows and of its columns, which lies in memory with what is
summed before them: threads turn it, byte by byte. (Products of three sizes and three layouts on an H100.)"""

_REARRANGED_BY_WARPS = 0.15
"""The part of these operations that products of single warps take: each has its operands in its own registers in any case. (12
products of 16 and 32 rows of float32 and of bytes on an H200: 1.26 of their time in the geometric mean, 2.1 without this; 29 other
kernels on an H100: 1.0, and 1.2 without.)"""

_ROUNDED_AT_ONCE = 0.5
"""The part of them that float32 takes where threads have just loaded it, as no trip copies it ahead. (70 kernels with one stage on
an H200: 1.03 of their time in the geometric mean, 1.25 without this.)"""


def matrix_clocks(p: Product, warps: int, device: Device, *, warpgroups: bool, ahead: bool) -> float:
    """Returns the clocks of a multiprocessor for the products of a block of so many warps, from the rate of the library's large
    ones.

    ahead: trips copy operands of later ones. Matrix units round float32 operands. Products that keep their bits are computed by
    threads, each of which reads the rows and the columns of its results from shared memory.
    """
    if p.precise and p.lhs_dtype in ("float32", "float64") and not warpgroups:
        results = max(1.0, p.rows * p.columns / (WARP * warps))
        words = 2.0 * math.sqrt(results) * p.summed * p.batch * p.times
        return dtypes.itemsize_bytes(p.lhs_dtype) * words * WARP * warps / _BANK_BYTES
    kind = p.lhs_dtype if p.lhs_dtype in device.matmul_tflop_s else "tf32"
    if p.lhs_dtype in ("float32", "float64"):
        kind = "float32" if p.precise else "tf32"
    rate = 1e3 * device.matmul_tflop_s[kind] / (device.multiprocessors * device.clock_ghz)
    wide = p.rows >= _MATRIX_ROWS
    rows = math.ceil(p.rows / _MATRIX_ROWS) * _MATRIX_ROWS if wide else math.ceil(p.rows / 16) * 16
    of_others = OF_LIBRARY_ROUNDED if kind == "tf32" else OF_LIBRARY
    share = _OF_LIBRARY_BY_WARPGROUPS if warpgroups else of_others
    share = share if wide else min(share, _OF_LIBRARY_NARROW)
    whole = _WORDS if dtypes.itemsize_bytes(p.lhs_dtype) == 2 else VECTOR_BYTES
    share *= _UNEVEN if ahead and p.row_bytes < whole and not warpgroups else 1.0
    columns = math.ceil(p.columns / 8) * 8
    step = 32 if dtypes.itemsize_bytes(p.lhs_dtype) == 1 else 16
    summed = math.ceil(p.summed / step) * step
    return 2.0 * rows * columns * summed * p.batch * p.times / (rate * share)


def _operands(p: Product, warps: int) -> tuple[float, float]:
    """The clocks of a multiprocessor in which the warps of a block read the sides of a product from shared memory, and the elements
    of a computed right side, as often as warps lay them out for it.

    Warps share out rows among them, then columns; where both are few, warps read and compute the same.
    """
    size = dtypes.itemsize_bytes(p.lhs_dtype)
    by_warpgroups = _is_by_warpgroups(p, warps)
    units = warps // WARPGROUP_WARPS if by_warpgroups else warps
    along_rows = min(units, p.rows // (WARPGROUP_ROWS if by_warpgroups else WARP_ROWS))
    columns = max(_WARP_COLUMNS, p.columns * along_rows / units)
    left, right = (units * n * p.summed * p.batch for n in (p.rows / along_rows, columns))
    to_left, to_right = p.brought
    if by_warpgroups:  # they read shared memory each time
        clocks = size * (left + right) * p.times / _OPERAND_BYTES
        return clocks, right / units * to_right * p.computes_rhs
    is_turned = p.in_columns and size * p.rows >= _TURNED_ROW_BYTES
    rate = _TURNED_BYTES_OF_WARPS if is_turned else _OPERAND_BYTES_OF_WARPS
    clocks = size * (left * to_left + right * to_right) / rate
    return clocks, right * to_right * p.computes_rhs


def _is_by_warpgroups(p: Product, warps: int) -> bool:
    """Do four warps compute a product together, from shared memory?"""
    rounded = dtypes.itemsize_bytes(p.lhs_dtype) <= 2 or not p.precise
    return warps % WARPGROUP_WARPS == 0 and p.rows % WARPGROUP_ROWS == 0 and rounded


def on_matrix_units(p: Product) -> bool:
    """Is it a product of two matrices that are large enough? Others are products and sums of vector units."""
    return p.batch == 1 and min(p.rows, p.columns, p.summed) >= WARP_ROWS


def _rearranged(p: Product, warps: int, *, ahead: bool) -> float:
    """Counts the operations that bring operands into the order in which matrix units read them: bytes, and float32, which they
    round on the way. Half precision is read in any order.

    ahead: as in `through_shared_memory`.
    """
    share = 1.0 if _is_by_warpgroups(p, warps) else _REARRANGED_BY_WARPS
    if dtypes.itemsize_bytes(p.lhs_dtype) == 1:
        left, right = _BYTES_OF_ROWS_TURNED * p.in_columns, _BYTES_OF_COLUMNS_TURNED * p.rhs_in_rows
    elif p.precise or p.lhs_dtype != "float32":
        return 0.0
    else:
        left = _ROUNDED_ROWS_TURNED if p.in_columns else _ROUNDED
        right = _ROUNDED_COLUMNS_TURNED if p.rhs_in_rows else _ROUNDED
        share *= 1.0 if ahead else _ROUNDED_AT_ONCE
    to_left, to_right = p.brought
    return share * (left * p.rows * to_left + right * p.columns * to_right) * p.summed * p.batch


def through_shared_memory(products: Sequence[tuple[Product, int]], *, ahead: bool) -> tuple[float, float]:
    """Returns the clocks of a multiprocessor in which it reads the operands of a block's products, and the operations of threads.

    products: each with the warps of its block, those on matrix units and others. ahead: trips copy operands of later ones.
    """
    on_units = [(p, warps) for p, warps in products if on_matrix_units(p)]
    sides = [_operands(p, warps) for p, warps in on_units]
    staged = sum(p.flops for p, _ in products if not on_matrix_units(p))
    staged += sum(n for _, n in sides) * _STAGED_OPERATIONS + sum(
        _rearranged(p, warps, ahead=ahead) for p, warps in on_units
    )
    staged += sum((_STAGED_OPERATIONS * p.by_threads + _SPLIT_OPERATIONS * p.split) * p.times for p, _ in products)
    exchanged = sum(p.rows * p.columns * p.batch * p.times for p, _ in on_units if p.exchanged)
    return sum(clocks for clocks, _ in sides) + _EXCHANGED_BYTES * exchanged / _OPERAND_BYTES, staged
