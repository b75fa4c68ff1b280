"""Triton's blocked layouts: the way in which it spreads a tile over the threads of a block, unless a matrix product made it.

The last dimension of a tile is given to neighbouring lanes first, then to warps; what is left goes to the dimensions before it.
Where lanes share the axis that is summed, they exchange every result of the sum among them.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import log2, prod

from pallasfuse.ir.axes import Axis
from pallasfuse.targets import power_of_two

LANES = 32
"""Threads of a warp."""
VECTOR_BYTES = 16
"""The most that a thread loads at once."""


@dataclass(frozen=True, slots=True)
class Share:
    """A dimension of a tile, shared out: the elements of a thread, and the lanes and warps that have others."""

    own: int
    lanes: int
    warps: int


def shares(tile: Sequence[int], warps: int, vector: int = 1) -> list[Share]:
    """The share of each dimension, padded to a power of two; the last one is that of neighbours. vector: neighbours that a thread
    has at least."""
    lanes, found = LANES, []
    for at, extent in enumerate(power_of_two(t) for t in reversed(tile)):
        rest = max(1, extent // vector) if at == 0 else extent
        own_lanes = min(lanes, rest)
        own_warps = min(warps, max(1, rest // own_lanes))
        lanes, warps = lanes // own_lanes, warps // own_warps
        found.append(Share(max(1, extent // (own_lanes * own_warps)), own_lanes, own_warps))
    return found[::-1]


def vector_of(itemsize_bytes: int, elements: int, warps: int, run: int | None = None) -> int:
    """The neighbours that a thread loads at once, of a tile of so many elements. run: as `run_of`, where that is known."""
    most = VECTOR_BYTES // itemsize_bytes if run is None else min(VECTOR_BYTES // itemsize_bytes, run)
    return max(1, min(most, elements // (LANES * warps)))


def run_of(indices: Sequence[Axis], tile: Callable[[Axis], int], *, is_padded: bool = False) -> int:
    """The elements of a tile that are known to lie together in memory, at a multiple of their number.

    Rows begin where the rows before them end, and a mask hides what is past the end. is_padded: they are longer, so that each
    begins where a thread may load as much as it can at once (`resources.padded_rows`).
    """
    long = [a for a in indices if a.extent > 1]
    if not long:
        return 1
    minor, own = long[-1], tile(long[-1])
    if is_padded:
        return power_of_two(own)
    masked = minor.extent % own != 0
    return min(power_of_two(own), minor.extent & -minor.extent) if len(long) > 1 or masked else power_of_two(own)


@dataclass(frozen=True, slots=True)
class Exchange:
    """The work of a block's threads for one reduction beside adding up their own elements."""

    shuffles: float
    """Instructions of all warps by which lanes exchange results."""
    copies: float
    """The number of times that each result is held, and all that is computed from results along the same axes."""
    between_warps: bool
    """Do warps wait for each other's results?"""


def exchange(tile: Sequence[int], over: Collection[int], warps: int, vector: int = 1) -> Exchange:
    """The exchange of a reduction of a tile along the dimensions numbered `over`: one after the other, the last one first."""
    left, shuffles, copies, between_warps = list(tile), 0.0, 1.0, False
    for dimension in sorted(over, reverse=True):
        each = shares(left, warps, vector)
        results = prod(s.own for n, s in enumerate(each) if n != dimension)
        shuffles += warps * results * log2(each[dimension].lanes)
        between_warps |= each[dimension].warps > 1
        del left[dimension]
        copies, vector = results * LANES * warps / prod(power_of_two(t) for t in left), 1
    return Exchange(shuffles, copies, between_warps)
