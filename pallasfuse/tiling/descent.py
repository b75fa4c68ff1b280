"""Tile sizes by price: from a schedule downhill, by the cheapest step along any axis, until none is cheaper."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from pallasfuse.ir.axes import Axis

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
