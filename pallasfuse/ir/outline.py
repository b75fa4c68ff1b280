"""A tile program on one line: the loops, and between them what is loaded, computed and stored, in the manner of MCFuser's tiling
expressions with their statements."""

from collections.abc import Iterable, Iterator

from pallasfuse.ir.statements import Buffer, Contract, Get, Let, Load, Loop, Reduce, Set, Statement, Store
from pallasfuse.ir.tile_program import TileProgram


def outline(program: TileProgram) -> str:
    """Returns the kernel as `i:64 ( Lq j:64 ( Lk Cs Lv Co ) So )`.

    `Lx`: x is loaded, `Cx`: the reduction or product x is computed, `Sx`: x is stored. Of the segments of a loop, the last one with
    full tiles is shown. Buffers are `x!memory` where they begin, `>x` where a piece is read and `<x` where it is written.
    """
    inside = " ".join(_words(program.body))
    grid = " ".join(f"{a.name}:{t}" for a, t in program.grid)
    return f"{grid} ( {inside} )" if grid else inside


def _words(body: Iterable[Statement]) -> Iterator[str]:
    for s in body:
        match s:
            case Load(_, tensor):
                yield f"L{tensor}"
            case Reduce(name) | Contract(name):
                yield f"C{name.removesuffix('.tile').removesuffix('.all')}"
            case Store(tensor):
                yield f"S{tensor}"
            case Loop():
                whole = [g for g in s.segments if not g.offset] or list(s.segments)
                if whole:
                    yield f"{s.axis.name}:{whole[-1].tile} ( {' '.join(_words(whole[-1].body))} )"
            case Buffer(name):
                yield f"{name}!{s.memory}"
            case Get(_, buffer):
                yield f">{buffer}"
            case Set(buffer):
                yield f"<{buffer}"
            case Let():
                pass
