"""Tiles have their axes in one order, chosen so that XLA need not turn what is loaded, multiplied or stored."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import combinations, product
from math import prod

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, reads_in
from pallasfuse.ir.tile_program import Contract, Load, Store, TileProgram, every

_Wish = tuple[tuple[Axis, Axis], int]
"""Two axes in the order in which they should stand, and the elements that are read in strides otherwise."""


def ranks(program: TileProgram) -> dict[Axis, int]:
    """Returns the place of each axis in one order for all tiles, in which few elements are read or written in strides.

    The order is built from its beginning: next is an axis that no wish wants behind another one that is left, or else, where wishes
    contradict each other, the one that is wanted before the others the most.
    """
    before: dict[tuple[Axis, Axis], int] = defaultdict(int)
    for pair, elements in _wishes(program):
        before[pair] += elements
    left, found = list(program.order), dict[Axis, int]()
    while left:
        ahead = {a: [before[a, b] - before[b, a] for b in left if b is not a] for a in left}
        unopposed = (a for a in left if min(ahead[a], default=0) >= 0)
        first = next(unopposed, None) or max(left, key=lambda a: sum(ahead[a]))
        found[first] = len(found)
        left.remove(first)
    return found


def strided(axes: Collection[Axis], over: Collection[Axis], places: Mapping[Axis, int], elements: int) -> int:
    """Counts the elements that the library reads in strides, where a tile is the left side of a product.

    axes: those of which the tile has several positions. places: as of `ranks`. elements: of the tile.
    """
    return elements if is_turned(tuple(sorted(axes, key=places.__getitem__)), over) else 0


def is_turned(axes: tuple[Axis, ...], over: Collection[Axis]) -> bool:
    """Are neighbours in memory of different rows? The library reads the right side of a product so, and a left one in strides."""
    return bool(axes) and axes[-1] not in over


def _wishes(program: TileProgram) -> Iterator[_Wish]:
    """Yields what each load, store and product wants of the order."""
    lying: dict[str, tuple[Axis, ...]] = {}
    for s in every(program.body):
        if isinstance(s, Load | Store):
            wide = tuple(a for a in s.indices if program.tile(a) > 1)
            yield from ((pair, _elements(program, wide)) for pair in combinations(wide, 2))
            if isinstance(s, Load):
                lying[s.name] = wide
        elif isinstance(s, Contract):
            yield from _of_product(program, s, lying)


def _of_product(program: TileProgram, s: Contract, lying: Mapping[str, tuple[Axis, ...]]) -> Iterator[_Wish]:
    """Yields the wishes that batches stand before all else, as in the result, and rows before columns.

    The rows are those of the side that is cheaper to read in strides.
    """
    sides = [_largest(program, side, lying) for side in (s.lhs, s.rhs)]
    whole = [side.axes for side in (s.lhs, s.rhs)]
    batches = [a for a in s.axes if a in whole[0] and a in whole[1]]
    turned = _elements(program, s.axes)
    for batch, other in product(batches, (*s.axes, *s.over)):
        if other not in batches:  # sides are brought into this order in any case
            own = sum(_elements(program, axes) for axes in sides if batch in axes and other in axes)
            yield (batch, other), own + (turned if other in s.axes else 0)
    costs = [_elements(program, axes) if is_turned(axes, s.over) else 0 for axes in sides]
    kept = [[a for a in s.axes if a in own and a not in batches] for own in whole]
    rows, columns = kept if costs[0] <= costs[1] else reversed(kept)
    if costs[0] != costs[1]:
        yield from (((a, b), abs(costs[0] - costs[1])) for a in rows for b in columns)


def _largest(program: TileProgram, side: Expr, lying: Mapping[str, tuple[Axis, ...]]) -> tuple[Axis, ...]:
    """Returns the axes of the largest tile from which a side is computed, as they lie in memory; none where it is not loaded."""
    loaded = (lying[x.tensor] for x in reads_in(side) if x.tensor in lying)
    return max(loaded, key=lambda axes: _elements(program, axes), default=())


def _elements(program: TileProgram, axes: Collection[Axis]) -> int:
    return prod(program.tile(a) for a in axes)
