"""Where a long program repeats itself: the layers of a model, found by the operations of its nests."""

from collections.abc import Sequence
from dataclasses import dataclass

from pallasfuse.ir.expr import Apply, Const, Index, Read, postorder
from pallasfuse.ir.loop_program import External, Nest

_FEWEST = 3
"""A period is one that comes at least so many times in a row."""
_MOST_CANDIDATES = 64
"""Distances that are looked at: those that occur most often."""


@dataclass(frozen=True, slots=True)
class Run:
    """Nests `[start, stop)` of a program, each of which does what the one a period before it does."""

    start: int
    stop: int
    period: int


def signature(nest: Nest | External) -> tuple[object, ...]:
    """Returns what a nest does, whatever its operands and its axes are called."""
    extents = tuple(a.extent for a in nest.axes)
    if isinstance(nest, External):
        return extents, nest.dtype, nest.reason, len(nest.operands)
    reduced = tuple(a.extent for a in nest.reduced)
    steps = tuple(_step(node) for node in postorder(nest.body))
    return extents, nest.dtype, reduced, nest.reducer, nest.precision, nest.picks, steps


def _step(node: Const | Index | Read | Apply) -> tuple[object, ...]:
    match node:
        case Const(value, dtype):
            return repr(value), dtype
        case Index(axis, dtype):
            return axis.extent, dtype
        case Read(_, indices, dtype):
            return tuple(a.extent for a in indices), dtype
        case Apply(op, _, dtype):
            return op, dtype


def longest_run(signatures: Sequence[int]) -> Run | None:
    """The longest part of a sequence that repeats itself, with its smallest period; None where none comes three times."""
    gaps: dict[int, int] = {}
    last: dict[int, int] = {}
    for n, one in enumerate(signatures):
        if one in last:
            gap = n - last[one]
            gaps[gap] = gaps.get(gap, 0) + 1
        last[one] = n
    best: Run | None = None
    # the distance between equal layers occurs once for each operation that a layer has only once
    for period in sorted(sorted(gaps, key=lambda g: -g * gaps[g])[:_MOST_CANDIDATES]):
        for start, stop in _equal_runs(signatures, period):
            enough = stop - start >= (_FEWEST - 1) * period
            if enough and (best is None or stop + period - start > best.stop - best.start):
                best = Run(start, stop + period, period)
    return best


def _equal_runs(signatures: Sequence[int], period: int) -> list[tuple[int, int]]:
    """The maximal ranges of positions that equal those a period later."""
    runs: list[tuple[int, int]] = []
    start = None
    for n, (one, other) in enumerate(zip(signatures, signatures[period:], strict=False)):
        if one != other:
            if start is not None:
                runs.append((start, n))
            start = None
        elif start is None:
            start = n
    if start is not None:
        runs.append((start, len(signatures) - period))
    return runs
