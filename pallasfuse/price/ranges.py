"""Kernels that masks over data bound, as they are priced: as if the masks bounded nothing, and hid something of every row."""

from dataclasses import replace

from pallasfuse.ir.expr import Const, Expr, const, read, substitute
from pallasfuse.ir.simplify import simplify
from pallasfuse.ir.tile_program import Let, Load, Loop, Reduce, Statement, TileProgram, least, most

FINDING_RANGES = "finding ranges"
"""The name of the term for the passes that find what masks over data leave."""


def hiding_nothing(program: TileProgram) -> TileProgram:
    """The kernel of a program whose ranges hide nothing: loops as long as they can be, and nothing that finds their ends.

    No row is taken to be solid: every tile applies its mask, as it has to where something is hidden between visible elements.
    """
    if not program.ranges:
        return program
    ends = {t.name for r in program.ranges for t in r.found}
    known: dict[Expr, Expr] = {}
    for r in program.ranges:
        for t in (r.left, r.right):
            known[read(most(t.name), (), "int32")] = const(r.axis.extent, "int32")
            known[read(least(t.name), (), "int32")] = const(0, "int32")
    names: set[str] = set()
    body: list[Statement] = []
    for s in program.body:
        match s:
            case Load(name, tensor) if tensor in ends:
                names.add(name)
            case Let(name, _, value) | Reduce(name, _, _, value) if value.tensors and value.tensors <= names:
                names.add(name)
            case Loop():
                body.append(_with_bounds(s, known))
            case _:
                body.append(s)
    inputs = tuple(t for t in program.inputs if t.name not in ends)
    return replace(program, body=tuple(body), inputs=inputs, ranges=(), instead=None)


def _with_bounds(loop: Loop, known: dict[Expr, Expr]) -> Loop:
    def bound(expr: Expr) -> Expr:
        return simplify(substitute(expr, known))

    def inside(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        return tuple(_with_bounds(s, known) if isinstance(s, Loop) else s for s in body)

    bounded = [replace(g, start=bound(g.start), stop=bound(g.stop), body=inside(g.body)) for g in loop.segments]
    segments = tuple(g for g in bounded if not _is_empty(g.start, g.stop)) or tuple(bounded[:1])
    split = None if loop.split is None else replace(loop.split, here=bound(loop.split.here))
    return replace(loop, segments=segments, to_visit=bound(loop.to_visit), first=bound(loop.first), split=split)


def _is_empty(start: Expr, stop: Expr) -> bool:
    return isinstance(start, Const) and isinstance(stop, Const) and start.value >= stop.value
