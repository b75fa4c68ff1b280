"""Sums of a Triton kernel that lanes share: how many threads hold each result, and all that is computed from it element by element.

Where lanes have parts of a sum, they exchange them, and each of them has all results of its warp. Values over the same axes keep
that layout, those that loops carry among them.
"""

from collections.abc import Iterable, Mapping

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.tile_program import Load, Reduce, Store
from pallasfuse.resources.thread_layouts import exchange, run_of, vector_of
from pallasfuse.resources.triton_view import Line, View

Copies = Mapping[frozenset[Axis], float]
"""The number of threads that hold a value, by the axes along which it has more than one element."""


def wide(view: View, axes: Iterable[Axis]) -> frozenset[Axis]:
    """Returns the axes along which a tile has more than one element."""
    return frozenset(a for a in axes if view.program.tile(a) > 1)


def held_by(view: View) -> Copies:
    """Counts the threads that hold each result of the sums of a kernel; results of products lie in another way."""
    found: dict[frozenset[Axis], float] = {}
    for line in view.lines:
        s = line.statement
        if isinstance(s, Reduce) and wide(view, s.over) and not of_product(view, line):
            tile, over = wide(view, (*s.value.axes, *s.over)), wide(view, s.over)
            dims, vector = order(view, tile, stores=False)
            along = [n for n, a in enumerate(dims) if a in over]
            copies = exchange([view.program.tile(a) for a in dims], along, view.program.warps, vector).copies
            found[tile - over] = max(copies, found.get(tile - over, 1.0))
    return found


def of_product(view: View, line: Line) -> bool:
    """Is a value computed from the result of a product on matrix units, in the same trip?"""
    return line.number in view.products or any(p.line.name in view.needs(line) for p in view.products.values())


def order(view: View, tile: frozenset[Axis], *, stores: bool) -> tuple[list[Axis], int]:
    """Returns the axes of a tile as threads share it out, neighbours last, and how many of these a thread has at once: as a load of
    the same axes has it, else in the order of the program. stores: a store comes before that order."""
    moves = [line.statement for line in view.lines if isinstance(line.statement, Load | Store if stores else Load)]
    alike = [s for s in moves if wide(view, s.indices) == tile]
    alike = [s for s in alike if isinstance(s, Load)] or alike
    if not alike:
        return [a for a in view.program.order if a in tile], 1
    item = max(dtypes.itemsize_bytes(s.dtype if isinstance(s, Load) else view.stored_type(s)) for s in alike)
    is_padded = isinstance(alike[0], Load) and alike[0].tensor in view.padded
    run = run_of(alike[0].indices, view.program.tile, is_padded=is_padded)
    return [a for a in alike[0].indices if a in tile], vector_of(item, view.elements(tile), view.program.warps, run)
