"""Tile sizes from a small analytical model (MCFuser, section 4): reuse along rows, footprint of one tile, trips."""

import math
from dataclasses import dataclass, replace

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.schedule import Schedule
from pallasfuse.targets import Target
from pallasfuse.tiling.products import contracts


@dataclass(frozen=True, slots=True)
class Shape:
    """What matters about a group for its tiles."""

    row: Axis | None
    """The parallel axis along which streamed operands are reused; None when nothing is."""
    has_products: bool
    inner_elements: int


def _streams(group: Group) -> list[Read]:
    """Reads of inputs that vary along the rolled axis."""
    nests = [*(f.nest for f in group.folds), *group.inner, *group.outputs]
    reads = {n for nest in nests for n in postorder(nest.body) if isinstance(n, Read)}
    return sorted((r for r in reads if r.tensor in group.inputs and group.rolled in r.indices), key=str)


def _is_product(nest: Nest) -> bool:
    return nest.reducer is not None and contracts(nest.body, frozenset(nest.reduced))


def examine(group: Group) -> Shape:
    """The axis to tile as rows, and whether matrix products run inside the tile."""
    streams = _streams(group)
    reused = [a for a in group.parallel if any(a not in r.indices for r in streams)]
    products = any(_is_product(n) for n in [*(f.nest for f in group.folds), *group.inner])
    best = max(reused, key=lambda a: (sum(a not in r.indices for r in streams), a.extent), default=None)
    grid = frozenset(group.parallel)
    inner = (
        {a for n in [*(f.nest for f in group.folds), *group.inner] for a in (*n.axes, *n.reduced)}
        - grid
        - {group.rolled}
    )
    size = 1
    for axis in inner:
        size *= axis.extent
    return Shape(best if products or best is not None else None, products, size)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not less than n."""
    return 1 << max(0, n - 1).bit_length()


def choose(group: Group, target: Target) -> list[Schedule]:
    """Schedules for `target`, best first by prediction."""
    shape = examine(group)
    if target.platform == "gpu":
        return _for_gpu(group, shape, target)
    return [_for_cpu(group, shape)]


def _schedule(group: Group, tiles: dict[Axis, int], rolled_tile: int, warps: int = 4, stages: int = 2) -> Schedule:
    grid = tuple((a, min(tiles.get(a, 1), a.extent)) for a in group.parallel)
    return Schedule(grid, group.rolled, min(rolled_tile, group.rolled.extent), warps, stages)


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


_REGISTER_ELEMENTS = 1 << 14
"""Elements of a row block that a GPU block keeps in registers."""
_SMALL_BLOCK = 1 << 11
"""Elements below which a GPU block has too little to do."""

# (rows, rolled tile, warps, stages, time relative to the first for the same visited elements); the keys bound the widest
# axis that is kept whole inside a tile. Up to 1.04: measured on an H100 with benchmarks/sweep.py (float16, 8192); the others,
# which serve narrow masks and operands that do not fit, are estimates.
_PRODUCT_TILES: dict[int, tuple[tuple[int, int, int, int, float], ...]] = {
    64: ((64, 128, 4, 3, 1.0), (64, 64, 4, 3, 1.02), (128, 64, 8, 3, 1.03), (64, 32, 4, 2, 1.3), (32, 32, 4, 2, 2.0)),
    128: ((128, 128, 8, 3, 1.0), (128, 64, 8, 2, 1.04), (64, 64, 4, 3, 1.1), (64, 32, 4, 3, 1.2), (64, 64, 4, 2, 1.2),
          (64, 32, 4, 2, 1.3), (32, 32, 4, 2, 2.0)),
    1 << 30: ((128, 64, 8, 2, 1.0), (64, 64, 8, 2, 1.1), (64, 32, 8, 2, 1.5), (32, 32, 4, 2, 2.0), (16, 16, 4, 1, 4.0)),
}  # fmt: skip


# The same for kernels that are written for warpgroups of four warps, 64 rows each. From spikes on an H100, not swept yet.
_WARPGROUP_TILES: dict[int, tuple[tuple[int, int, int, int, float], ...]] = {
    64: ((128, 128, 8, 3, 1.0), (128, 64, 8, 3, 1.1), (128, 64, 8, 2, 1.2)),
    128: ((128, 128, 8, 2, 1.0), (128, 64, 8, 3, 1.05), (128, 64, 8, 2, 1.1)),
    1 << 30: ((128, 64, 8, 2, 1.0), (64, 64, 4, 2, 1.4), (64, 32, 4, 2, 2.0)),
}  # fmt: skip


def _for_gpu(group: Group, shape: Shape, target: Target) -> list[Schedule]:
    if shape.has_products and shape.row is not None:
        return _products_on_gpu(group, shape.row, target)
    n, inner = group.rolled.extent, shape.inner_elements
    tiles: dict[Axis, int] = {}
    # neighbours in memory belong to one block: when that is not the rolled axis, take some of the axis that is
    fastest = next((r.indices[-1] for r in _streams(group)), group.rolled)
    if fastest != group.rolled and fastest in group.parallel:
        tiles[fastest] = min(64, power_of_two(fastest.extent))
        inner *= tiles[fastest]
    rolled_tile = n if power_of_two(n) * inner <= _REGISTER_ELEMENTS else max(16, 8192 // inner)
    rows = _SMALL_BLOCK // (power_of_two(min(rolled_tile, n)) * inner)
    for axis in reversed(group.parallel):
        if axis not in tiles and rows > 1:
            tiles[axis] = min(power_of_two(axis.extent), rows)
            rows //= tiles[axis]
    warps = 4 if min(rolled_tile, n) * inner <= _SMALL_BLOCK else 8
    return [_schedule(group, tiles, rolled_tile, warps, 2)]


def _products_on_gpu(group: Group, row: Axis, target: Target) -> list[Schedule]:
    """Every listed tiling whose pipelined operands fit into shared memory; the smallest one if none does."""
    nests = [*(f.nest for f in group.folds), *group.inner]
    whole = {a for n in nests for a in (*n.axes, *n.reduced)} - frozenset(group.parallel) - {group.rolled}
    widest = max((power_of_two(a.extent) for a in whole), default=1)
    table = _WARPGROUP_TILES if target.warpgroup_rows else _PRODUCT_TILES
    options = next(tiles for bound, tiles in table.items() if widest <= bound)
    operands = {n for nest in nests for n in postorder(nest.body) if isinstance(n, Read) and n.tensor in group.inputs}

    def shared_bytes(rows: int, rolled_tile: int, stages: int) -> int:
        total = 0
        for r in operands:
            if not any(a in whole for a in r.indices):
                continue  # row values and biases stay in registers
            size = dtypes.itemsize_bytes(r.dtype) * (stages if group.rolled in r.indices else 1)
            for axis in r.indices:
                size *= rows if axis == row else rolled_tile if axis == group.rolled else 1
                size *= power_of_two(axis.extent) if axis in whole else 1
            total += size
        return total

    fitting = [o for o in options if shared_bytes(o[0], o[1], o[3]) <= target.shared_memory_bytes] or [options[-1]]
    alternate = bool(target.warpgroup_rows)
    return [replace(_schedule(group, {row: m}, k, w, s), relative_time=time, alternate=alternate and w == 8)
            for m, k, w, s, time in fitting]  # fmt: skip
