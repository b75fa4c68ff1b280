"""This module keeps an extremum, and what is where it is, lane by lane while a loop runs, and compares the lanes once, after it.

A loop that looks for a minimum and for its place finds the minimum of each trip's tile, and then where it is: threads exchange
values twice in every trip. A lane of the tile, the same position of it in all trips, is a part of the axis like any other. It has
an extremum of its own, and what is there. In the end those lanes count whose extremum is the one of all: what is reduced takes in
only elements that equal an extremum (`fusion/extremes`), so lanes with a worse one have only elements that count for nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Read, apply, read, select, substitute
from pallasfuse.ir.reducers import MAX, MIN, SUM
from pallasfuse.ir.statements import Carry, Let, Loop, Reduce, Segment, Statement, every, reads_of


@dataclass(frozen=True, slots=True)
class _Place:
    """Holds a carried value that is reduced where the extremum is, and its reduction of a trip."""

    carry: Carry
    part: Reduce


@dataclass(frozen=True, slots=True)
class _Seen:
    """Holds how a segment finds a carried extremum, and what is where it is, from those of the trip before."""

    part: Reduce
    frame: str
    """Names the extremum up to this trip, with which elements are compared."""
    places: tuple[_Place, ...]
    before: Carry
    """The carried value that holds the extremum up to the trip before: compared with it, a trip sees whether it has changed."""
    own: frozenset[str]
    """The names of all these statements."""


def with_lanes_of_extremes(
    loop: Loop, tiles: Mapping[Axis, int], most: int, most_of_one: int
) -> tuple[Loop, list[Statement], int]:
    """Returns the loop with such extremes in lanes, what compares these after it, and how many elements they take.

    most: the elements that they may take together; most_of_one: the largest tile.
    """
    after: list[Statement] = []
    taken = 0
    for carry in loop.carries:
        found = [_seen(g, loop, carry) for g in loop.segments]
        seen = [s for s in found if s is not None]
        if not seen or len(seen) < len(found) or not _agree(seen):
            continue
        lanes = tuple(sorted((*carry.axes, *seen[0].part.over), key=[*tiles].index))
        elements = math.prod(tiles[a] for a in lanes)
        together = (1 + len(seen[0].places)) * elements
        if elements > most_of_one or taken + together > most:
            continue
        taken += together
        loop, compared = _in_lanes(loop, carry, seen, lanes)
        after += compared
    return loop, after, taken


def _agree(seen: list[_Seen]) -> bool:
    """Is it the same extremum in all segments, with the same places?"""
    kinds = {
        (s.part.reducer.name, s.part.over, s.before, tuple((p.carry, p.part.reducer.name) for p in s.places))
        for s in seen
    }
    return len(kinds) == 1


def _seen(segment: Segment, loop: Loop, carry: Carry) -> _Seen | None:
    """Finds what a carried extremum is made of in a segment; None where it is no such one, or read by others."""
    by_name = {s.name: s for s in segment.body if isinstance(s, Let | Reduce)}
    part = folded_with(carry, read(carry.name, carry.axes, carry.dtype), by_name)
    if part is None or part.reducer not in (MIN, MAX) or loop.axis not in part.over:
        return None
    now = read(carry.next_name, carry.axes, carry.dtype)
    frames = [s for s in by_name.values() if isinstance(s, Let) and s.value == now]
    before = [c for c in loop.carries if len(frames) == 1 and c.next_name == frames[0].name]
    if len(before) != 1:
        return None
    frame, held = (read(n, carry.axes, carry.dtype) for n in (frames[0].name, before[0].name))
    olds = [s for s in by_name.values() if isinstance(s, Let) and _last_of(s.value, frame, held)]
    if len(olds) != 1:
        return None
    same = apply("eq", frame, read(olds[0].name, carry.axes, carry.dtype))
    places: list[_Place] = []
    for other in loop.carries:
        if other in (carry, before[0]) or other.axes != carry.axes:
            continue
        kept = select(same, read(other.name, other.axes, other.dtype), other.init)
        at = folded_with(other, kept, by_name)
        if at is not None and at.over == part.over and at.reducer in (MIN, MAX, SUM):
            places.append(_Place(other, at))
    own = {carry.name, part.name, carry.next_name, frame.tensor, held.tensor, olds[0].name}
    own |= {n for p in places for n in (p.carry.name, p.part.name, p.carry.next_name)}
    others = (s for s in every(segment.body) if getattr(s, "name", None) not in own)
    mine = (carry, before[0], *(p.carry for p in places))
    yielded = {c.next_name for c in loop.carries if c not in mine}
    read_by_parts = set().union(reads_of(part), *(reads_of(p.part) - {frame.tensor} for p in places))
    if not places or (yielded | read_by_parts) & own or any(reads_of(s) & own for s in others):
        return None
    return _Seen(part, frame.tensor, tuple(places), before[0], frozenset(own))


def folded_with(carry: Carry, kept: Expr, by_name: Mapping[str, Statement]) -> Reduce | None:
    """Returns the reduction of a trip, if a carried value goes on as what is `kept` of it, combined with that alone; None if not,
    and where it does not begin as the identity.

    by_name: the statements of the trip that define values.
    """
    following = by_name.get(carry.next_name)
    if not isinstance(following, Let) or not isinstance(following.value, Apply) or len(following.value.args) != 2:
        return None
    others = [a for a in following.value.args if a != kept]
    part = by_name.get(others[0].tensor) if len(others) == 1 and isinstance(others[0], Read) else None
    if (
        not isinstance(part, Reduce) or part.joins or following.value.op != part.reducer.combine
        or frozenset(part.axes) != frozenset(carry.axes) or part.value.dtype != carry.dtype
        or not isinstance(carry.init, Const) or carry.init.value != part.reducer.identity(carry.dtype)
    ):  # fmt: skip
        return None
    return part


def _last_of(value: Expr, frame: Expr, held: Expr) -> bool:
    """Is a value the extremum up to the trip before: what was held, but in the first trip, which has none before it?"""
    return isinstance(value, Apply) and value.op == "select" and value.args[1:] == (frame, held)


def in_lanes(name: str) -> str:
    """Returns the name of what a loop carries lane by lane in place of a value."""
    return f"{name}.lanes"


def _in_lanes(loop: Loop, carry: Carry, seen: list[_Seen], lanes: tuple[Axis, ...]) -> tuple[Loop, list[Statement]]:
    """The loop that carries an extremum of each lane and what is there, and what compares the lanes after it."""

    def lane(name: str, dtype: str) -> Expr:
        return read(in_lanes(name), lanes, dtype)

    changed = {c: replace(c, name=in_lanes(c.name), axes=lanes, next_name=in_lanes(c.next_name))
               for c in (carry, *(p.carry for p in seen[0].places))}  # fmt: skip
    segments = []
    for segment, of in zip(loop.segments, seen, strict=True):
        frame: dict[Expr, Expr] = {read(of.frame, carry.axes, carry.dtype): lane(carry.next_name, carry.dtype)}
        value: Expr = apply(of.part.reducer.combine, lane(carry.name, carry.dtype), of.part.value, dtype=carry.dtype)
        here: dict[str, Statement] = {of.part.name: Let(in_lanes(carry.next_name), lanes, value)}
        same = apply("eq", lane(carry.next_name, carry.dtype), lane(carry.name, carry.dtype))
        for place in of.places:
            own, part = place.carry, place.part
            kept = select(same, lane(own.name, own.dtype), own.init)
            reduced = apply(part.reducer.combine, kept, substitute(part.value, frame), dtype=own.dtype)
            here[part.name] = Let(in_lanes(own.next_name), lanes, reduced)
        body = [here.get(getattr(s, "name", ""), s) for s in segment.body]
        segments.append(replace(segment, body=tuple(s for s in body if getattr(s, "name", None) not in of.own)))
    first = seen[0]
    found: list[Statement] = [
        Reduce(carry.name, carry.axes, first.part.reducer, lane(carry.name, carry.dtype), first.part.over)
    ]
    best = read(carry.name, carry.axes, carry.dtype)
    for place in first.places:
        own = place.carry
        value = select(apply("eq", lane(carry.name, carry.dtype), best), lane(own.name, own.dtype), own.init)
        found.append(Reduce(own.name, own.axes, place.part.reducer, value, first.part.over))
    found.append(Let(first.before.name, first.before.axes, best))
    carries = tuple(changed.get(c, c) for c in loop.carries if c is not first.before)
    return replace(loop, carries=carries, segments=tuple(segments)), found
