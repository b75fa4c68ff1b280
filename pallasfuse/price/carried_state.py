"""Loops whose trips wait for one another: what they carry is reduced on its way to the next trip."""

from collections.abc import Iterable

from pallasfuse.ir.statements import Contract, Loop, Reduce, Segment, Statement, every, expressions, tile_name


def is_reduced(body: Iterable[Statement]) -> bool:
    """Does some loop reduce a value that it carries, or multiply it with a matrix, to find its next value?

    Every step of such a loop waits for the step before it, because lanes and warps need each other's results: a block computes
    nothing else meanwhile. A running sum, or the maximum so far, is not reduced itself; only what is added to it is.
    """
    return any(_reduces(loop, segment) for loop in every(body) if isinstance(loop, Loop) for segment in loop.segments)


def _reduces(loop: Loop, segment: Segment) -> bool:
    """Does a segment of a loop reduce a value that the loop carries, to find the next value of the same one?"""
    computed: dict[str, set[str]] = {c.name: {c.name} for c in loop.carries}
    """The carried values that each name is computed from."""
    reduced: dict[str, set[str]] = {}
    """The carried values that each name is computed from through a reduction."""
    for statement in every(segment.body):
        name = tile_name(statement)
        if name is None:
            continue
        read = frozenset[str]().union(*(e.tensors for e in expressions(statement)))
        computed[name] = set[str]().union(*(computed.get(t, ()) for t in read))
        behind = computed if isinstance(statement, Reduce | Contract) else reduced
        reduced[name] = set[str]().union(*(behind.get(t, ()) for t in read), *(reduced.get(t, ()) for t in read))
    return any(c.name in reduced.get(c.next_name, ()) for c in loop.carries)
