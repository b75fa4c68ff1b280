"""What a block of a cluster keeps in its shared memory, by the programs of its phases: the emitter and the price both ask.

Tensors that differ from row to row, and what several phases read, are *streams*: a block copies its part of each into slots, one
for each tile. A result along the row leaves by the slots of a stream of its type that nothing reads any more, or by its own.
"""

from collections.abc import Sequence

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.tile_program import Load, Loop, Statement, Store, TileProgram, every


def streams_of(programs: Sequence[TileProgram], rolled: Axis) -> tuple[Load, ...]:
    """Returns the first load of every tensor that has slots. A tensor that all rows have and one loop reads has none: a cache
    keeps it.

    rolled: the axis along a row.
    """
    loads: dict[str, Load] = {}
    for s in _statements(programs):
        if isinstance(s, Load) and rolled in s.indices:
            loads.setdefault(s.tensor, s)
    loops = [s for p in programs for s in p.body if isinstance(s, Loop)]
    return tuple(s for s in loads.values() if s.indices != (rolled,) or _readers(loops, s.tensor) != 1)


def slot_bytes(programs: Sequence[TileProgram], rolled: Axis) -> int:
    """Returns the bytes that an element of a row takes in the shared memory of its block: of streams, and of results with slots of
    their own."""
    streams = streams_of(programs, rolled)
    types = {t.name: t.dtype for t in programs[-1].outputs}
    own = [name for name, buffer in leaving(programs, rolled, streams).items() if buffer == name]
    return sum(dtypes.itemsize_bytes(t) for t in (*(s.dtype for s in streams), *(types[n] for n in own)))


def leaving(programs: Sequence[TileProgram], rolled: Axis, streams: tuple[Load, ...]) -> dict[str, str]:
    """Chooses the slots by which each result along a row leaves, by the tensor that has them: a stream of its type that nothing
    reads after the store, or the result itself."""
    order = _statements(programs)
    types = {t.name: t.dtype for t in programs[-1].outputs}
    free = list(streams)
    along = dict.fromkeys(s.tensor for s in order if isinstance(s, Store) and s.tensor in types and rolled in s.indices)
    found = {name: name for name in along}
    for name in along:
        first = next(n for n, s in enumerate(order) if isinstance(s, Store) and s.tensor == name)
        loop = next(n for n in range(first, -1, -1) if isinstance(order[n], Loop))
        for stream in free:
            at = [n for n, s in enumerate(order) if isinstance(s, Load) and s.tensor == stream.tensor]
            # segments follow each other in that order, but a slot belongs to one of them
            after = [n for n in at if n > first and not _other_segment(order, loop, n, first)]
            if stream.dtype == types[name] and not after:
                found[name] = stream.tensor
                free.remove(stream)
                break
    return found


def _other_segment(order: list[Statement], loop: int, load: int, store: int) -> bool:
    """Is a load after a store in another segment of the same loop?"""
    owner = order[loop]
    assert isinstance(owner, Loop)
    segment_of = [n for n, g in enumerate(owner.segments) for _ in g.body]
    here, there = store - loop - 1, load - loop - 1
    return there < len(segment_of) and segment_of[here] != segment_of[there]


def _statements(programs: Sequence[TileProgram]) -> list[Statement]:
    return list(every(s for program in programs for s in program.body))


def _readers(loops: list[Loop], tensor: str) -> int:
    """Counts the loops that load a tensor."""
    return sum(any(isinstance(s, Load) and s.tensor == tensor for g in loop.segments for s in g.body) for loop in loops)
