"""Kernels that masks over data bound, as they are priced: as if the masks hid nothing."""

from dataclasses import replace

from pallasfuse.ir.expr import Expr, const, read, substitute
from pallasfuse.ir.simplify import simplify
from pallasfuse.ir.tile_program import Let, Load, Loop, Reduce, Statement, TileProgram, most


def hiding_nothing(program: TileProgram) -> TileProgram:
    """The kernel of a program whose ranges hide nothing: loops as long as they can be, and nothing that finds their ends."""
    ends = {t.name: r.axis.extent for r in program.ranges for t in (r.left, r.right)}
    if not ends:
        return program
    most_of: dict[Expr, Expr] = {read(most(t), (), "int32"): const(n, "int32") for t, n in ends.items()}
    names: set[str] = set()
    body: list[Statement] = []
    for s in program.body:
        match s:
            case Load(name, tensor) if tensor in ends:
                names.add(name)
            case Let(name, _, value) | Reduce(name, _, _, value) if value.tensors and value.tensors <= names:
                names.add(name)
            case Loop():
                body.append(_with_bounds(s, most_of))
            case _:
                body.append(s)
    return replace(program, body=tuple(body), inputs=program.given, ranges=(), instead=None)


def _with_bounds(loop: Loop, known: dict[Expr, Expr]) -> Loop:
    def bound(expr: Expr) -> Expr:
        return simplify(substitute(expr, known))

    segments = tuple(replace(g, start=bound(g.start), stop=bound(g.stop)) for g in loop.segments)
    split = None if loop.split is None else replace(loop.split, here=bound(loop.split.here))
    return replace(loop, segments=segments, to_visit=bound(loop.to_visit), first=bound(loop.first), split=split)
