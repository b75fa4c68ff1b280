"""Facts about all statements of a kernel: what it loads, the tiles of its loops, and what several loops read."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr
from pallasfuse.ir.tile_program import (
    Buffer,
    Contract,
    Get,
    Let,
    Load,
    Loop,
    Reduce,
    Set,
    Statement,
    Store,
    every,
    expressions,
)


def loaded(body: Iterable[Statement]) -> Iterator[str]:
    """The tensors that statements load, in order."""
    return (s.tensor for s in every(body) if isinstance(s, Load))


def tiles_of_loops(body: Iterable[Statement]) -> dict[Axis, int]:
    """The tile of the loops over each axis, where they agree and no statement outside of them has the axis."""
    tiles: dict[Axis, set[int]] = {}
    outside: set[Axis] = set()

    def visit(statements: Iterable[Statement], around: frozenset[Axis]) -> None:
        for s in statements:
            outside.update(_axes(s) - around)
            if isinstance(s, Loop):
                if s.axis not in around:
                    tiles.setdefault(s.axis, set()).add(
                        max((g.tile for g in s.segments), default=1)
                    )  # tails are smaller
                for g in s.segments:
                    visit(g.body, around | {s.axis})

    visit(body, frozenset())
    return {axis: tile for axis, (tile, *others) in tiles.items() if not others and axis not in outside}


def _axes(s: Statement) -> frozenset[Axis]:
    """The axes of the tiles that a statement reads and makes; of a loop, of those that it carries."""
    found: list[Expr] = list(expressions(s))
    own: tuple[Axis, ...] = ()
    match s:
        case Load() | Store():
            own = s.indices
        case Reduce() | Contract():
            own = (*s.axes, *s.over)
        case Let() | Buffer() | Get() | Set():
            own = s.axes
        case Loop():
            own = tuple(a for c in s.carries for a in c.axes)
    return frozenset(own).union(*(e.axes for e in found))


def with_reuse(body: Sequence[Statement]) -> tuple[Statement, ...]:
    """The statements in which what several loops load is marked."""
    tensors_of = {n: set(loaded([s])) for n, s in enumerate(body) if isinstance(s, Loop)}
    result = list(body)
    for n, s in enumerate(body):
        if not isinstance(s, Loop):
            continue
        later = frozenset().union(*(tensors for m, tensors in tensors_of.items() if m > n))
        earlier = frozenset().union(*(tensors for m, tensors in tensors_of.items() if m < n))
        if tensors_of[n].isdisjoint(later | earlier):
            continue

        def mark(x: Statement, later: frozenset[str] = later, earlier: frozenset[str] = earlier) -> Statement:
            if not isinstance(x, Load) or x.tensor not in later | earlier:
                return x
            return replace(x, again="later" if x.tensor in later else "last")

        segments = tuple(replace(g, body=tuple(map(mark, g.body))) for g in s.segments)
        result[n] = replace(s, segments=segments)
    return tuple(result)
