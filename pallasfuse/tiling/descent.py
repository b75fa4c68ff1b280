"""Other tiles than those of listed schedules: cheaper ones, downhill from a schedule, and smaller ones where none fits."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.schedule import Schedule
from pallasfuse.targets import Target

Tiles = Mapping[Axis, int]
_MOST_PRICES = 64
"""The most prices for one group: an exact one takes a lowering, and these about a tenth of one each."""


def sizes(axis: Axis) -> list[int]:
    """Returns the tiles that are looked at along an axis: powers of two, and the whole axis."""
    return [1 << n for n in range((axis.extent - 1).bit_length())] + [axis.extent]


def cheapest(starts: Sequence[Tiles], price: Callable[[Tiles], float], free: Iterable[Axis]) -> Tiles:
    """Returns the cheapest tiles found from some starts.

    price: in any unit. free: the axes whose tiles may change.
    """
    known: dict[tuple[tuple[Axis, int], ...], float] = {}

    def of(tiles: Tiles) -> float:
        key = tuple(tiles.items())
        if key not in known:
            known[key] = price(tiles)
        return known[key]

    axes = list(free)
    at = min(starts, key=of)
    while len(known) < _MOST_PRICES:
        better = min(_neighbours(at, axes), key=of, default=at)
        if of(better) >= of(at):
            break
        at = better
    return at


def _neighbours(tiles: Tiles, axes: Sequence[Axis]) -> Iterable[Tiles]:
    """The next and the second next sizes along each axis, in both directions."""
    for axis in axes:
        among = sizes(axis)
        here = min(range(len(among)), key=lambda n: abs(among[n] - tiles[axis]))
        for step in (-2, -1, 1, 2):
            if 0 <= here + step < len(among) and among[here + step] != tiles[axis]:
                yield {**tiles, axis: among[here + step]}


# --- schedules that take less of a multiprocessor, for kernels of which no listed schedule fits


_FEWEST_STAGES = 1


def smaller(schedule: Schedule, target: Target) -> list[Schedule]:
    """Every schedule that has fewer stages, or tiles halved along the grid and the rolled axis: those first that load the fewest
    elements for their operations.

    A single stage comes late: nothing is copied while a tile is computed.
    """
    found = [
        replace(candidate, rolled_tile=rolled, stages=stages)
        for candidate in _with_fewer_rows(schedule, target)
        for rolled in _halves(schedule.rolled_tile, target.smallest_dot)
        for stages in range(schedule.stages, _FEWEST_STAGES - 1, -1)
    ]
    return sorted((s for s in found if s != schedule), key=lambda s: (-_reuse(s), -s.stages))


def _reuse(schedule: Schedule) -> float:
    """Operations for each element that is loaded, of a product; a single stage halves the rate."""
    rows = max((t for _, t in schedule.grid), default=1)
    alone = 0.5 if schedule.stages == _FEWEST_STAGES else 1.0
    return alone * rows * schedule.rolled_tile / (rows + schedule.rolled_tile)


def _halves(size: int, least: int) -> Iterator[int]:
    """The size, its half, and so on: none below `least` but the size itself."""
    yield size
    while size // 2 >= least:
        size //= 2
        yield size


def _with_fewer_rows(schedule: Schedule, target: Target) -> Iterator[Schedule]:
    """The widest tile of the grid halved; a kernel for warpgroups gives up warpgroups, others warps that have no rows."""
    widest = max(schedule.grid, key=lambda entry: entry[1], default=None)
    if widest is None:
        yield schedule
        return
    axis, tile = widest
    for rows in _halves(tile, target.warpgroup_rows or target.smallest_dot):
        grid = tuple((a, rows if a == axis else t) for a, t in schedule.grid)
        if target.warpgroup_rows:
            warps = max(1, rows // target.warpgroup_rows) * target.warpgroup_warps
        else:
            warps = min(schedule.warps, max(4, rows // 16))
        turns = schedule.alternate and (not target.warpgroup_rows or rows > target.warpgroup_rows)
        yield replace(schedule, grid=grid, warps=warps, alternate=turns)
