"""The habits of XLA's fusion passes on a platform, as far as a price depends on them."""

from dataclasses import dataclass

from pallasfuse.device import Device

RUN = 16
"""What a row adds up to is found in blocks of so many positions, each from all before it in its block; then over the blocks."""
CHANNELS = 8
"""A convolution of groups with fewer results each is no product."""
LONGEST_COLUMN = 1 << 12
"""Elements of a column that one block reduces; longer ones are reduced in two steps (GPUs)."""
LOADED = 2.0
"""A GPU takes so many operations to find and load an element."""
_WINDOW, _IN_WINDOW, _OF_FEW = 100.0, 4.0, 14.0
"""A GPU takes so many operations to begin and end a window, and for each of its elements; the third number for each of few,
whose loop is written out. (Windows of 2 x 2, 3 x 3 and 7 x 7 around each of 0.8 to 8.4 million elements on an H100; running sums
agree. On an H200 windows of 4, 8, 9, 27, 49 and 125 elements take 72, 114, 135, 184, 287 and 591 operations.)"""


def windows_operations(windows: float, elements: float) -> float:
    """Returns the operations of reducing so many windows of so many elements each (GPUs)."""
    return windows * min(_OF_FEW * elements, _WINDOW + _IN_WINDOW * elements)


@dataclass(frozen=True, slots=True)
class Habits:
    """The habits of XLA's fusion passes on a platform."""

    duplicates_maps: bool
    longest_row: int
    """Elements of a row that is reduced and read again in one kernel; 0: never."""
    shares_reads: bool
    """Reductions of the same values are one kernel."""
    library_reduces: bool = False
    """Reductions are a library's, which takes what it can of their operands; loops make the rest, and store it."""
    strides_batches: bool = True
    """A library reads batches of matrices wherever they lie; else only those that lie one after the other."""
    sums_neighbours: bool = False
    """A library multiplies bytes only where the summed elements are neighbours in memory."""
    smallest_product: int = 0
    """Elements of a matrix: the product of a smaller one and a vector is a reduction, and no library's."""
    fused_rows: int = 0
    """Few enough rows of a product for its other operand to be computed as it is read: once, in one tile."""
    fuses_moves: bool = False
    """Operations that take, join or rearrange elements are computed where their results are read."""
    chooses_orders: bool = False
    """XLA stores what its loops make in the order of dimensions of the largest tensor that it is made of (`xla_layouts`)."""


_FUSED_ROWS = 128
"""On GPUs, `Habits.fused_rows`: those of a tile."""
_SMALLEST_PRODUCT = 10_000_000
"""On GPUs, `Habits.smallest_product` (XLA's strength reduction of products)."""


def habits_on(device: Device) -> Habits:
    """XLA's habits for a device."""
    if device.platform == "gpu":
        return Habits(
            True,
            device.longest_row,
            shares_reads=True,
            sums_neighbours=True,
            smallest_product=_SMALLEST_PRODUCT,
            fused_rows=_FUSED_ROWS,
            fuses_moves=True,
            chooses_orders=True,
        )
    return Habits(False, device.longest_row, shares_reads=False, library_reduces=True, strides_batches=False)
