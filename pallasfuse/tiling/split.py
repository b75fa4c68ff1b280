"""Rolling or split (Neptune, section 4.3): into how many parts a rolled axis is cut where its blocks leave the device idle."""

import math
from dataclasses import dataclass, replace

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import volume
from pallasfuse.ir.fold import Group
from pallasfuse.ir.schedule import Schedule
from pallasfuse.targets import Target
from pallasfuse.tiling.choose import examine, streams, sums_beyond_tiles

_SMALL_TILE = 1 << 12
"""Elements of a tile that are not split further, to make more parts."""
_TRIP_MS = 3e-4
"""What a trip of a block takes at least: the latency of its loads."""
_MOST_STATES = 1 << 15
"""Elements of the states of a row that one block combines."""


_MOST_PARTS = 256
"""Of a product with a long sum."""


@dataclass(frozen=True, slots=True)
class _Occupancy:
    """In blocks for each multiprocessor: how many reach half of the memory's bandwidth, and how many a split makes at most."""

    half: float
    most: int


_WITH_PRODUCTS, _WITHOUT = _Occupancy(0.2, 2), _Occupancy(1.4, 4)
"""Of kernels with matrix products, whose loads are pipelined (8 blocks move 365 GB/s on an H100), and of others (4 move 64)."""


def _blocks(schedule: Schedule) -> int:
    """Of the grid, without parts."""
    return math.prod(-(-a.extent // t) for a, t in schedule.grid)


def fills(schedule: Schedule, target: Target) -> bool:
    """Are there blocks for nearly all multiprocessors? A split of products would only add traffic (128 blocks on an H100); whether
    that of others gains is a question of their price (`tiles_by_price`). Loops of XLA run one block after the other."""
    return not target.writes_kernels or 4 * _blocks(schedule) >= 3 * target.multiprocessors


def _occupancy(group: Group) -> _Occupancy:
    return _WITH_PRODUCTS if examine(group).has_products else _WITHOUT


def state_elements(group: Group, schedule: Schedule) -> int:
    """Of the largest accumulator, for one row of the grid."""
    kept = frozenset(a for a, _ in schedule.grid)
    return max(volume(a for a in f.nest.axes if a not in kept) for f in group.folds)


def most_parts(group: Group, schedule: Schedule, target: Target) -> int:
    """Returns how many parts may be worth their states: those that fill the device, and whose states one block combines."""
    to_fill = _occupancy(group).most * target.multiprocessors // _blocks(schedule)
    return min(to_fill, _MOST_STATES // state_elements(group, schedule))


def _all_states(group: Group) -> int:
    """Of one part: accumulators and frames of all passes."""
    axes = [a.axes for f in group.folds for a in f.accumulators] + [x.axes for f in group.folds for x in f.frames]
    return sum(map(volume, axes))


class Times:
    """Predicted milliseconds of a group's schedules, by the bytes that stream through the loop, of which masks leave a share:
    what a block and what the device can move."""

    def __init__(self, group: Group, target: Target, share: float) -> None:
        tensors = {
            (r.tensor, frozenset(r.indices)): volume(r.indices) * dtypes.itemsize_bytes(r.dtype) for r in streams(group)
        }
        self.share, self.at_once = share, target.device.memory_gb_s * 1e6
        self.moved_ms = share * group.passes * sum(tensors.values()) / self.at_once
        self.half = _occupancy(group).half * target.multiprocessors
        self.states_ms = 8.0 * _all_states(group) / self.at_once  # of one part: written and read
        self.launches_ms = 1e-3 * target.device.kernel_us * group.passes

    def loop_ms(self, schedule: Schedule, parts: int) -> float:
        """The loop alone, in so many parts."""
        waits = _TRIP_MS * -(-schedule.trips // parts) * self.share
        return self.moved_ms * (1 + self.half / (parts * _blocks(schedule))) + waits

    def ms(self, schedule: Schedule) -> float:
        """The kernel, and what combines its parts."""
        split = 0.0 if schedule.parts == 1 else schedule.parts * self.states_ms + self.launches_ms
        return self.loop_ms(schedule, schedule.parts) + split


def split(group: Group, schedule: Schedule, target: Target, share: float = 1.0, *, keep_tile: bool = False) -> Schedule:
    """The schedule with the number of parts that is predicted to be fastest; 1 where it is not faster.

    share: of the tiles along the rolled axis that masks leave to visit. keep_tile: tiles of the rolled axis are not made smaller.
    """
    if target.slices_sums and sums_beyond_tiles(group, target):
        return _balanced(group, schedule, target, share)
    if fills(schedule, target) or schedule.trips * share <= 1:
        return schedule
    inner, most = state_elements(group, schedule), most_parts(group, schedule, target)
    rows = max(t for _, t in schedule.grid) if schedule.grid else 1
    candidate = schedule
    smallest = candidate.rolled_tile if keep_tile else max(1, _SMALL_TILE // inner)
    while rows == 1 and candidate.trips * share < most and candidate.rolled_tile > smallest:
        candidate = replace(candidate, rolled_tile=candidate.rolled_tile // 2)
    trips = math.ceil(candidate.trips * share)
    found = [schedule]
    for parts in sorted({-(-trips // each) for each in range(1, trips)}, reverse=True):
        if 2 <= parts <= most:
            idle = [max(1.0, target.multiprocessors / (n * _blocks(schedule))) for n in (1, parts)]
            found.append(replace(candidate, parts=parts, relative_time=candidate.relative_time * idle[1] / idle[0]))
    return min(found, key=Times(group, target, share).ms)


def _balanced(group: Group, schedule: Schedule, target: Target, share: float) -> Schedule:
    """Parts such that all multiprocessors are busy to the end: where a trip takes long, and much longer than combining a state."""
    trips = math.ceil(schedule.trips * share)
    most = max(1, min(_MOST_PARTS, _MOST_STATES // state_elements(group, schedule)))

    def time(parts: int) -> float:
        rounds = -(-parts * _blocks(schedule) // target.multiprocessors)
        return rounds * (-(-trips // parts) + schedule.start_trips)

    counts = {-(-trips // each) for each in range(1, trips + 1)}
    return replace(schedule, parts=min(sorted(n for n in counts if n <= most), key=time))
