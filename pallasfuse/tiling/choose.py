"""Tile sizes from a small analytical model (MCFuser, section 4): reuse along rows, footprint of one tile, trips.

On a CPU these are where the search by price begins (`descent`).
"""

import math
from dataclasses import dataclass, replace

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Read, reads_in
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.schedule import Schedule
from pallasfuse.targets import XLA_CPU, Target, power_of_two
from pallasfuse.tiling.bounds import bounding_axes
from pallasfuse.tiling.products import contracts


@dataclass(frozen=True, slots=True)
class Shape:
    """The facts about a group on which its tiles depend."""

    row: Axis | None
    """The parallel axis along which streamed operands are reused; None when nothing is."""
    packed: tuple[Axis, ...]
    """Parallel axes along which the same operands are reused, `row` among them."""
    has_products: bool
    inner_elements: int
    pairs: bool
    """Every streamed operand is reused along some parallel axis: what is computed of it has more elements than it."""


def streams(group: Group) -> list[Read]:
    """Reads of inputs that vary along the rolled axis."""
    nests = group.nests
    reads = {n for nest in nests for n in reads_in(nest.body)}
    return sorted((r for r in reads if r.tensor in group.inputs and group.rolled in r.indices), key=str)


def _is_product(nest: Nest) -> bool:
    return nest.reducer is not None and contracts(nest.body, frozenset(nest.reduced))


def examine(group: Group) -> Shape:
    """The axis to tile as rows, and whether matrix products run inside the tile."""
    streamed = streams(group)
    reused = [a for a in group.parallel if any(a not in r.indices for r in streamed)]
    products = any(_is_product(n) for n in [*(f.nest for f in group.folds), *group.inner])
    grid = frozenset(group.parallel)
    nests = [*(f.nest for f in group.folds), *group.inner]
    inner = {a for n in nests for a in (*n.axes, *n.reduced)} - grid - {group.rolled}
    wide = [r for r in streamed if not inner.isdisjoint(r.indices)] or streamed  # operands, not masks or biases
    best = max(reused, key=lambda a: (sum(a not in r.indices for r in wide), a.extent), default=None)
    size = max((volume(inner.intersection((*n.axes, *n.reduced))) for n in nests), default=1)
    missed = [r for r in streamed if best is not None and best not in r.indices]
    packed = tuple(a for a in reused if best is not None and all(a not in r.indices for r in missed))
    pairs = bool(streamed) and all(any(a not in r.indices for a in group.parallel) for r in streamed)
    return Shape(best, packed, products, size, pairs)


def choose(group: Group, target: Target, *, ranged: bool = False) -> list[Schedule]:
    """Schedules for `target`, best first by prediction. ranged: those whose loops are bounded by the ranges of masks over data."""
    shape = examine(group)
    if target.slices_sums and shape.row is not None and sums_beyond_tiles(group, target):
        return _in_slices(group, shape, shape.row)
    if _calls_library(group, shape, target):
        return [_for_library(group, target)]
    found = _for_gpu(group, shape, target) if target.platform == "gpu" else [_for_cpu(group, shape)]
    if target.static_bounds:
        return found
    single = _single(group, shape, ranged=ranged)
    if ranged:
        found = [replace(s, ranges=True) for s in found]
    return [replace(s, grid=tuple((a, 1 if a in single else t) for a, t in s.grid)) for s in found] if single else found


def _single(group: Group, shape: Shape, *, ranged: bool) -> frozenset[Axis]:
    """The axes of which blocks have one position, as bounds from data differ along them; a range bounds blocks of rows together."""
    rows = () if shape.row is None else (shape.row, *shape.packed)
    return bounding_axes(group) - frozenset(rows if ranged else ())


def _schedule(group: Group, tiles: dict[Axis, int], rolled_tile: int, warps: int = 4, stages: int = 2) -> Schedule:
    grid = tuple((a, min(tiles.get(a, 1), a.extent)) for a in group.parallel)
    return Schedule(grid, group.rolled, min(rolled_tile, group.rolled.extent), warps, stages)


_LIBRARY_ROWS = 1 << 12
"""Rows of a product beyond which more of them make it no faster."""
_LIBRARY_COLUMNS = {"cpu": (128, 1024), "gpu": (1024, 4096)}
"""The fewest that keep the device busy, and the most that are of use."""
_LIBRARY_SHARE = 30
"""What a tile and the slice of the matrix for it may take of the memory for the whole product: one of so many parts. (The library
may leave sums in float32 beside it.)"""


def sums_beyond_tiles(group: Group, target: Target) -> bool:
    """Is there a product whose sum no tile holds?"""
    return any(math.prod(a.extent for a in n.reduced) > target.max_inner for n in group.inner)


def _calls_library(group: Group, shape: Shape, target: Target) -> bool:
    """Is the work one product of all rows with one matrix, which is reduced at once?"""
    if sums_beyond_tiles(group, target):
        return True
    rows, products = frozenset(group.parallel), [n for n in group.inner if _is_product(n)]
    if target.platform != "cpu" or len(products) != 1 or any(_is_product(f.nest) for f in group.folds):
        return False
    streams = [r for r in reads_in(products[0].body) if group.rolled in r.indices]
    return bool(streams) and shape.row is not None and not any(rows & frozenset(r.indices) for r in streams)


def fixed_axes(group: Group, *, ranged: bool = False) -> frozenset[Axis]:
    """Returns the axes whose listed tiles are for more than speed, on a CPU.

    Tiles of a library's product bound the memory that it takes, bounds from data need single rows, and sums of few rows are
    sequential.
    """
    shape = examine(group)
    if sums_beyond_tiles(group, XLA_CPU) or _calls_library(group, shape, XLA_CPU):
        return frozenset((*group.parallel, group.rolled))
    few = shape.has_products and shape.row is not None and shape.row.extent < _FEW_ROWS
    return _single(group, shape, ranged=ranged) | frozenset((group.rolled,) if few else ())


def _for_library(group: Group, target: Target) -> Schedule:
    """Large tiles: the product in each is a call of a library, and few other operations follow."""
    tiles: dict[Axis, int] = {}
    rows = 1
    for axis in reversed(group.parallel):
        tiles[axis] = min(axis.extent, max(1, _LIBRARY_ROWS // rows))
        rows *= tiles[axis]
    summed = max(math.prod(a.extent for a in n.reduced) for n in group.inner)
    fewest, most = _LIBRARY_COLUMNS[target.platform]
    columns = rows * group.rolled.extent // (_LIBRARY_SHARE * (summed + rows)) // (fewest // 2) * (fewest // 2)
    return _schedule(group, tiles, min(most, max(fewest, columns)))


_CACHE_ELEMENTS = 1 << 15
"""Elements of one tile that should stay in a core's cache."""


_FEW_ROWS = 8
"""Rows below which a matrix product on the CPU is a sequential sum."""


def _for_cpu(group: Group, shape: Shape) -> Schedule:
    n = group.rolled.extent
    if shape.has_products and shape.row is not None:
        # matrix products run on all cores only when they are large
        rows = min(512, max(128, power_of_two(shape.row.extent) // 8))
        if shape.row.extent < _FEW_ROWS:
            # XLA sums products of few rows in sequence: tiles of about sqrt(n) keep the rounding error of a blocked sum
            return _schedule(group, {shape.row: rows}, min(n, 2 * power_of_two(math.isqrt(n))))
        return _schedule(group, {shape.row: rows}, min(n, 512))
    rolled_tile = (
        n if n * shape.inner_elements <= _CACHE_ELEMENTS * 4 else max(256, _CACHE_ELEMENTS // shape.inner_elements)
    )
    rows = max(1, _CACHE_ELEMENTS * 2 // (min(rolled_tile, n) * shape.inner_elements))
    tiles: dict[Axis, int] = {}
    for axis in reversed(group.parallel):
        tiles[axis] = min(axis.extent, rows)
        rows = max(1, rows // tiles[axis])
    return _schedule(group, tiles, rolled_tile)


REGISTER_ELEMENTS = 1 << 14
"""Elements of a row block that a GPU block keeps in registers."""
_SMALL_BLOCK = 1 << 11
"""Elements below which a GPU block has too little to do."""


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Tile sizes and hints for a kernel of products. `time`: for the same visited elements, relative to the first of a list."""

    rows: int
    rolled: int
    warps: int
    stages: int
    time: float
    ahead: bool = False
    """Of warpgroups: products are computed a trip ahead; else, two take turns."""
    eager: bool = False
    """As `Schedule.eager`."""
    start: float = 0.0
    """As `Schedule.start_trips`."""
    operations: int = 1 << 30
    """As `Schedule.most_operations`."""


# The keys bound the widest axis that is kept whole inside a tile. Up to 1.04: measured on an H100 with benchmarks/sweep.py
# (float16, 8192); the others, which serve narrow masks and operands that do not fit, are estimates.
_PRODUCT_TILES = {
    64: (_Tiling(64, 128, 4, 3, 1.0), _Tiling(64, 64, 4, 3, 1.02), _Tiling(128, 64, 8, 3, 1.03), _Tiling(64, 32, 4, 2, 1.3),
         _Tiling(32, 32, 4, 2, 2.0)),
    128: (_Tiling(128, 128, 8, 3, 1.0), _Tiling(128, 64, 8, 2, 1.04), _Tiling(64, 64, 4, 3, 1.1), _Tiling(64, 32, 4, 3, 1.2),
          _Tiling(64, 64, 4, 2, 1.2), _Tiling(64, 32, 4, 2, 1.3), _Tiling(32, 32, 4, 2, 2.0)),
    1 << 30: (_Tiling(128, 64, 8, 2, 1.0), _Tiling(64, 64, 8, 2, 1.1), _Tiling(64, 32, 8, 2, 1.5), _Tiling(32, 32, 4, 2, 2.0),
              _Tiling(16, 16, 4, 1, 4.0)),
}  # fmt: skip


_FEW_ROWS_TILES = (_Tiling(16, 64, 4, 3, 1.0), _Tiling(16, 32, 4, 2, 1.1))
"""Of products with so few rows that only the memory counts: measured on an H100 (8 rows of 128, float16)."""


# The same for kernels that are written for warpgroups of four warps, 64 rows each. Up to 1.2: measured on an H100 (float16,
# lengths 512 to 8192); the others are estimates. The starts at 128 x 128 and 128 are fitted to causal masks of 8192 and
# 32768 and to a narrow window; the other starts are estimates.
_WARPGROUP_TILES = {
    64: (_Tiling(128, 256, 8, 2, 1.0, start=0.25), _Tiling(128, 128, 8, 3, 1.08, start=0.5),
         _Tiling(128, 128, 8, 2, 1.1, start=0.5), _Tiling(64, 128, 4, 2, 1.5, ahead=True, start=0.5),
         _Tiling(128, 64, 8, 2, 1.5, start=1.0)),
    128: (_Tiling(128, 128, 8, 2, 1.0, eager=True, start=0.5), _Tiling(128, 128, 8, 2, 0.97, ahead=True, start=1.7, operations=4),
          _Tiling(128, 64, 8, 3, 1.17, eager=True, start=1.0), _Tiling(128, 64, 8, 2, 1.2, eager=True, start=1.0),
          _Tiling(64, 128, 4, 2, 1.45, ahead=True, start=0.5)),
    1 << 30: (_Tiling(128, 64, 8, 2, 1.0, ahead=True), _Tiling(64, 64, 4, 2, 1.45, ahead=True),
              _Tiling(64, 32, 4, 2, 2.5, ahead=True)),
}  # fmt: skip


_SLICED_TILES = (
    _Tiling(128, 256, 8, 4, 1.0), _Tiling(128, 256, 8, 3, 1.01), _Tiling(128, 256, 8, 2, 1.1),
    _Tiling(128, 128, 8, 4, 1.2), _Tiling(128, 128, 8, 3, 1.21), _Tiling(128, 128, 8, 2, 1.3),
    _Tiling(64, 256, 4, 4, 1.3), _Tiling(64, 256, 4, 3, 1.31), _Tiling(64, 128, 4, 4, 1.5),
)  # fmt: skip
"""Of products whose operands come slice by slice."""
_SLICED_START = 0.05
"""What it takes to begin and to end a block of such a product, in trips."""


def _in_slices(group: Group, shape: Shape, row: Axis) -> list[Schedule]:
    """For warpgroups: a tile of a product with a long sum takes so long that blocks begin and end at no cost."""
    rows_last = replace(group, parallel=(*(a for a in group.parallel if a != row), row))
    fitting = [t for t in _SLICED_TILES if t.rows < 2 * row.extent] or [_SLICED_TILES[-1]]
    return [
        replace(
            _schedule(rows_last, {row: t.rows}, t.rolled, t.warps, t.stages), relative_time=t.time, persistent=True,
            start_trips=_SLICED_START
        )
        for t in fitting
    ]  # fmt: skip


def _power_below(n: int) -> int:
    """The largest power of two that is not more than n: larger tiles would be padded to the next one."""
    return power_of_two(n + 1) // 2


_CACHED_SHARE = 0.8
"""Of the cache, what the operands of blocks that run side by side may take."""


def _for_gpu(group: Group, shape: Shape, target: Target) -> list[Schedule]:
    if shape.has_products and shape.row is not None:
        return _products_on_gpu(group, shape, shape.row, target)
    n, inner = group.rolled.extent, shape.inner_elements
    tiles: dict[Axis, int] = {}
    # neighbours in memory belong to one block: when that is not the rolled axis, take some of the axis that is
    largest = max(
        streams(group), key=lambda r: volume(frozenset(r.indices)) * dtypes.itemsize_bytes(r.dtype), default=None
    )
    fastest = group.rolled if largest is None else largest.indices[-1]
    if fastest != group.rolled and fastest in group.parallel:
        tiles[fastest] = min(64, power_of_two(fastest.extent))
        inner *= tiles[fastest]
    rolled_tile = n if power_of_two(n) * inner <= REGISTER_ELEMENTS else max(1, _power_below(8192 // inner))
    again = any(group.rolled in o.axes for o in group.outputs) and rolled_tile < n
    row_bytes = n * inner * sum(dtypes.itemsize_bytes(r.dtype) for r in streams(group))
    if again and row_bytes * target.multiprocessors <= _CACHED_SHARE * target.cache_bytes:
        # one block for each multiprocessor, so that what it reads again is still in the cache
        return [_schedule(group, tiles, max(1, _power_below(8192 // inner)), 16, 2)]
    if shape.pairs and shape.row is not None:
        return _pairs_on_gpu(group, shape, rolled_tile * inner)
    if rolled_tile < n and inner == 1:  # of rows: fewer warps wait less for each other at the end of every tile
        return [_schedule(group, tiles, rolled_tile // 2, 4, 2)]
    rows = _SMALL_BLOCK // (power_of_two(min(rolled_tile, n)) * inner)
    for axis in reversed(group.parallel):
        if axis not in tiles and rows > 1:
            tiles[axis] = min(power_of_two(axis.extent), rows)
            rows //= tiles[axis]
    warps = 4 if min(rolled_tile, n) * inner <= _SMALL_BLOCK or shape.inner_elements > 1 else 8
    return [_schedule(group, tiles, rolled_tile, warps, 2)]


_PAIRED_ROWS = (1, 4, 16, 64)
"""Rows of a block of what is computed for pairs of positions."""


def prices_decide(group: Group, target: Target) -> bool:
    """Are listed schedules compared by the prices of their kernels? Else by their order, or by what is listed with them."""
    if target.cluster:
        return True
    shape = examine(group)
    return target.runs_trees and target.platform == "gpu" and shape.pairs and not shape.has_products


def _pairs_on_gpu(group: Group, shape: Shape, elements: int) -> list[Schedule]:
    """Blocks of so many pairs of a row and a rolled position, in several shapes: the wider, the less is read again."""
    inner = max(1, shape.inner_elements)
    most = min(_SMALL_BLOCK, elements // inner)
    rows = [r for r in _PAIRED_ROWS if r == 1 or (r < 2 * math.prod(a.extent for a in shape.packed) and 16 * r <= most)]
    return [_schedule(group, _packed(r, shape), max(1, _power_below(most // r)), 4, 2) for r in rows]


def _packed(rows: int, shape: Shape) -> dict[Axis, int]:
    """Tiles along the axes that share operands: as many rows together, of the last axis first."""
    tiles: dict[Axis, int] = {}
    for axis in sorted(shape.packed, key=lambda a: (a != shape.row, -shape.packed.index(a))):
        tiles[axis] = min(power_of_two(axis.extent), max(1, rows))
        rows //= tiles[axis]
    return tiles


def _products_on_gpu(group: Group, shape: Shape, row: Axis, target: Target) -> list[Schedule]:
    """Every listed tiling whose pipelined operands fit into shared memory; the smallest one if none does."""
    nests = [*(f.nest for f in group.folds), *group.inner]
    whole = {a for n in nests for a in (*n.axes, *n.reduced)} - frozenset(group.parallel) - {group.rolled}
    widest = max((power_of_two(a.extent) for a in whole), default=1)
    table = _WARPGROUP_TILES if target.warpgroup_rows else _PRODUCT_TILES
    options = next(tiles for bound, tiles in table.items() if widest <= bound)
    rows = math.prod(a.extent for a in shape.packed)
    if not target.warpgroup_rows and rows <= _FEW_ROWS_TILES[0].rows and widest <= 128:
        options = _FEW_ROWS_TILES
    elif not target.warpgroup_rows:  # no more warps than there are rows for
        options = tuple(t for t in options if t.rows <= max(64, power_of_two(rows))) or options
    operands = {n for nest in nests for n in reads_in(nest.body) if n.tensor in group.inputs}

    def shared_bytes(rows: int, rolled_tile: int, stages: int) -> int:
        total = 0
        for r in operands:
            if not any(a in whole for a in r.indices):
                continue  # row values and biases stay in registers
            size = dtypes.itemsize_bytes(r.dtype) * (stages if group.rolled in r.indices else 1)
            for axis in r.indices:
                size *= rows if axis == row else rolled_tile if axis == group.rolled else 1
                size *= target.padded(axis.extent) if axis in whole else 1
            total += size
        return total

    def leaving(rows: int) -> int:
        sizes = [(dtypes.itemsize_bytes(n.dtype), n.axes) for n in group.outputs]
        return sum(size * math.prod(rows if a == row else target.padded(a.extent) for a in axes if a == row or a in whole)
                   for size, axes in sizes)  # fmt: skip

    fitting = [o for o in options if shared_bytes(o.rows, o.rolled, o.stages) <= target.shared_memory_bytes] or [
        options[-1]
    ]
    if not target.warpgroup_rows:
        return [
            replace(_schedule(group, _packed(t.rows, shape), t.rolled, t.warps, t.stages), relative_time=t.time)
            for t in fitting
        ]
    rows_last = replace(group, parallel=(*(a for a in group.parallel if a != row), row))
    streamed = [r for r in operands if group.rolled in r.indices]

    def side_by_side(needed: int) -> int:
        return _side_by_side(group, row, target, streamed, needed)

    schedules = []
    for t in fitting:
        along_rows = -(-row.extent // t.rows)
        blocks = along_rows * math.prod(a.extent for a in group.parallel if a != row)
        schedules.append(replace(
            _schedule(rows_last, {row: t.rows}, t.rolled, t.warps, t.stages), alternate=t.warps == 8 and not t.ahead, ahead=t.ahead,
            eager=t.eager, start_trips=t.start, most_operations=t.operations,
            relative_time=t.time * max(1.0, target.multiprocessors / blocks),
            persistent=shared_bytes(t.rows, t.rolled, t.stages) + leaving(t.rows) <= target.shared_memory_bytes,
            interleave=side_by_side(-(-target.multiprocessors // along_rows)) if target.multiprocessors < blocks else 1,
        ))  # fmt: skip
    return sorted(schedules, key=lambda s: s.time(1.0))


def _side_by_side(group: Group, row: Axis, target: Target, streams: list[Read], needed: int) -> int:
    """Returns how many blocks of the other axes to run at a time, a divisor of their number: as many as fill the device
    (`needed`), but no more than the cache can feed."""
    others = [a for a in group.parallel if a != row]
    one = sum(dtypes.itemsize_bytes(r.dtype) * math.prod(a.extent for a in r.indices if a not in others and a != row)
              for r in streams)  # fmt: skip
    sharing = math.prod(a.extent for a in others if not any(a in r.indices for r in streams))
    fit = max(1, int(_CACHED_SHARE * target.cache_bytes) // max(1, one)) * sharing
    blocks = math.prod(a.extent for a in others)
    small = [n for n in range(1, math.isqrt(blocks) + 1) if blocks % n == 0]
    divisors = sorted({*small, *(blocks // n for n in small)})
    enough = next((n for n in divisors if n >= needed), blocks)
    return max(n for n in divisors if n <= min(enough, fit))
