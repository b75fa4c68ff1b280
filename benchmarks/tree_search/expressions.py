"""Tiling expressions: the orders in which loops over a region's axes stand inside of each other (MCFuser, section 3.1).

    Expression = (Loops, ...)                     # one after the other
    Loops      = axis Expression                  # what stands inside of this axis' loop

Every axis has one loop. Axes of one nest stand on one path from the root, since the nest is computed inside of all their loops.
*Deep* expressions are one path; in *flat* ones loops follow each other. A nest stands under the innermost of its own axes' loops,
and no further out than what it reads is finished.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from pallasfuse.ir.region import Region, independent_axes, spatial_axes


@dataclass(frozen=True, slots=True, order=True)
class Loops:
    """A loop over an axis, and the loops inside of it."""

    axis: str
    inside: tuple["Loops", ...] = ()


Expression = tuple[Loops, ...]


def is_deep(expression: Expression) -> bool:
    """Returns whether no two loops follow each other."""
    return len(expression) <= 1 and all(is_deep(loops.inside) for loops in expression)


def show(expression: Expression) -> str:
    """Returns the expression as the paper prints it: `mn(k,h)`."""
    return ",".join(
        loops.axis + (show(loops.inside) if len(loops.inside) < 2 else f"({show(loops.inside)})")
        for loops in expression
    )


def paths(expression: Expression, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields, for every loop, the axes of the loops around it and its own, the outermost first."""
    for loops in expression:
        here = (*above, loops.axis)
        yield here
        yield from paths(loops.inside, here)


def without(expression: Expression, axes: Collection[str]) -> Expression:
    """Returns the expression without the loops over some axes; what was inside of them takes their place."""
    found: list[Loops] = []
    for loops in expression:
        inside = without(loops.inside, axes)
        found += inside if loops.axis in axes else [Loops(loops.axis, inside)]
    return tuple(found)


def intermediates(region: Region) -> frozenset[str]:
    """Returns the nests that other nests read."""
    return frozenset(r for n in region.nests for r in n.reads) & frozenset(region.by_name)


# --- all expressions


def expressions(region: Region) -> tuple[Expression, ...]:
    """Returns every tiling expression of a region, without loops over independent axes, which are always those of the grid."""
    independent = frozenset(independent_axes(region))
    tied: set[frozenset[str]] = set()
    for nest in region.nests:
        names = sorted(a.name for a in (*nest.axes, *nest.reduced) if a not in independent)
        tied |= {frozenset(pair) for pair in combinations(names, 2)}
    order = {name: n for n, name in enumerate(region.axes)}

    @cache
    def orders(axes: frozenset[str]) -> tuple[Expression, ...]:
        if not axes:
            return ((),)
        found: list[Expression] = []
        for first, rest in _divisions(axes, tied, order):
            for axis in sorted(first, key=order.__getitem__):
                for inside in orders(first - {axis}):
                    found += [(Loops(axis, inside), *after) for after in orders(rest)]
        return tuple(found)

    return orders(frozenset(a.name for a in region.axes.values() if a not in independent))


def _divisions(
    axes: frozenset[str], tied: Collection[frozenset[str]], order: dict[str, int]
) -> Iterator[tuple[frozenset[str], frozenset[str]]]:
    """Yields the first group of axes, that with the earliest axis, and the others, so that no nest ties one to the other."""
    pieces: list[frozenset[str]] = []
    for axis in sorted(axes, key=order.__getitem__):
        touched = [p for p in pieces if any(frozenset((axis, other)) in tied for other in p)]
        pieces = [p for p in pieces if p not in touched] + [frozenset((axis,)).union(*touched)]
    pieces.sort(key=lambda p: min(map(order.__getitem__, p)))
    first, others = pieces[0], pieces[1:]
    for count in range(len(others) + 1):
        for chosen in combinations(others, count):
            group = first.union(*chosen)
            yield group, axes - group


def places(expression: Expression, region: Region) -> dict[str, tuple[str, ...]]:
    """Returns for every nest the axes of the loops around its place, the outermost first.

    It is the innermost loop over one of its axes ("the rightmost related loop"), or, further in, where what it reads is finished.
    """
    every = list(paths(expression))
    found: dict[str, tuple[str, ...]] = {}
    for nest in region.nests:
        own = {a.name for a in (*nest.axes, *nest.reduced)}
        place = max((p for p in every if p[-1] in own), key=len, default=())
        for read in region.reads(nest):
            around, reduced = found[read.name], {a.name for a in read.reduced}
            finished = around[: next((n for n, axis in enumerate(around) if axis in reduced), len(around))]
            if len(finished) > len(place) and finished[: len(place)] == place:
                place = finished
        found[nest.name] = place
    return found


# --- which loops become those of the grid


def bound_where_possible(expression: Expression, region: Region) -> frozenset[str]:
    """Returns the axes of the grid, read from the paper's words: spatial axes, unless other loops stand beside theirs."""
    every = list(paths(expression))
    spatial = {a.name for a in spatial_axes(region)}
    return frozenset(
        a for a in spatial if all(a in p or any(p == q[: len(p)] for q in every if q[-1] == a) for p in every)
    )


def bound_without_recomputing(expression: Expression, region: Region) -> frozenset[str]:
    """Returns the axes of the grid that add no work: spatial axes inside of whose loops every nest stands already."""
    found = places(expression, region)
    return frozenset(a.name for a in spatial_axes(region) if all(a.name in place for place in found.values()))


def holds_partial_tiles(expression: Expression, region: Region) -> bool:
    """Returns whether an intermediate is reduced by a loop around one over an axis that it keeps: all its tiles wait unfinished."""
    read = intermediates(region)
    for nest in region.nests:
        kept, reduced = {a.name for a in nest.axes}, {a.name for a in nest.reduced}
        for path in paths(expression):
            if nest.name in read and path[-1] in kept and reduced & set(path):
                return True
    return False
