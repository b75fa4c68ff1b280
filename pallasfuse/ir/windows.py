"""Windows: the part of each axis that statements see, as far as that is known before a program runs.

Outside of loops, the window of a grid axis is a block, and that of any other axis is its first tile. A loop opens a window inside
the one that it finds, in every trip another.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Const, Expr, Read

type Places = tuple[int, int]
"""The least and the largest place that a window begins at."""


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The current tile along one axis. Each is an object of its own: two are the same only if they are one object."""

    size: int
    is_open: bool
    """A block of the grid, or a trip of a loop: it is not the whole axis by default."""
    outer: "Window | None" = None
    places: Places | None = None
    """Where it may begin, counted from where the outer window begins; None where only a run tells."""

    def places_in(self, outer: "Window") -> Places | None:
        """Returns where this window may begin, counted from the start of one around it; None where only a run tells."""
        least, largest, at = 0, 0, self
        while at is not outer:
            if at.outer is None or at.places is None:
                return None
            least, largest, at = least + at.places[0], largest + at.places[1], at.outer
        return least, largest


def at_block(grid: Mapping[Axis, int], tiles: Mapping[Axis, int]) -> dict[Axis, Window]:
    """The windows of every axis outside of loops."""
    return {a: Window(grid.get(a, t), a in grid) for a, t in tiles.items()}


def in_trip(outer: Window, origin: Expr, start: Expr, stop: Expr, offset: int, tile: int) -> Window:
    """Returns the window of a trip `[start, stop)` of `tile` positions each, from `origin` and `offset` inside the outer one."""
    begin: int | None = None
    match origin:
        case Const(value) if not outer.is_open:  # the tile of an axis that is not open begins at its first position
            begin = int(value)
        case Read() if outer.is_open:
            begin = 0
    if begin is None or not (isinstance(start, Const) and isinstance(stop, Const)) or stop.value <= start.value:
        return Window(tile, True, outer)
    first, last = int(start.value), int(stop.value) - 1
    return Window(tile, True, outer, (begin + offset + first * tile, begin + offset + last * tile))


def misfit(window: Window, outer: Window, size: int) -> str | None:
    """Says why a window does not lie in the first `size` positions of one around it; None where it does, or only a run tells."""
    if window.size > size:
        return f"{window.size} positions of {size}"
    places = window.places_in(outer)
    if places is None or (places[0] >= 0 and places[1] + window.size <= size):
        return None
    return f"positions [{places[0]}, {places[1] + window.size}) of {size}"


def moved(held: Mapping[Axis, Window], now: Mapping[Axis, Window]) -> Axis | None:
    """Returns an axis whose window is no longer the one that a tile was made in; None where there is none.

    A tile of a whole axis stays what it is in a loop of one trip.
    """
    return next((a for a, w in held.items() if now[a] is not w and (w.is_open or w.size != now[a].size)), None)


def of_axes(windows: Mapping[Axis, Window], axes: Iterable[Axis]) -> dict[Axis, Window]:
    """The windows of some axes, those that the program has no tile for left out."""
    return {a: windows[a] for a in axes if a in windows}
