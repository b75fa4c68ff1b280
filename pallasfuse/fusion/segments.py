"""Long programs are grouped in segments: the choice of groups costs more than linear time in what it looks at.

A program within the limits is one segment. A longer one is cut where the fewest elements are alive, and what crosses a cut
is stored, as it would be between two kernels. Layers that repeat are cut at the same place, so that equal layers are equal
segments. Maps of positions alone, like masks, are part of every segment that reads them, and so are maps of what takes fewer bytes
than they do: logits less their largest, of logits that a product has stored in half precision, are computed again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pallasfuse.fusion.roundings import told_apart
from pallasfuse.fusion.sources import Sources
from pallasfuse.ir.axes import volume
from pallasfuse.ir.expr import Apply, Const, Index, Read, postorder
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.ir.tensors import Tensor

MOST_NESTS = 512
MOST_REDUCTIONS = 24


def segments(program: LoopProgram) -> Iterator[LoopProgram]:
    """Programs that together compute `program`, in order; the inputs of each are inputs and earlier values."""
    if _fits(program.nests):
        yield program
        return
    free = _positional(program)
    nests = [n for n in program.nests if n.name not in free]
    last_read = {name: n for n, nest in enumerate(nests) for name in nest.reads}
    last_read |= dict.fromkeys(program.outputs, len(nests))
    types = {d.name: Tensor(d.name, d.axes, d.dtype) for d in program.definitions()}
    parts = [nests[start:stop] for start, stop in pairwise(_boundaries(nests, last_read))]
    again = free | _computed_again(program)
    order = {name: n for n, name in enumerate(again)}
    copies = [_needed(inside, again, order) for inside in parts]
    reads = [_read_by((*copied, *inside)) for copied, inside in zip(copies, parts, strict=True)]
    wanted = [*accumulate(map(frozenset, reads[:0:-1]), frozenset.union, initial=frozenset(program.outputs))][::-1]
    for inside, copied, read, later in zip(parts, copies, reads, wanted, strict=True):
        yield LoopProgram(
            tuple(types[t] for t in read), (*copied, *inside), tuple(n.name for n in inside if n.name in later)
        )


def _read_by(nests: Sequence[Nest | External]) -> list[str]:
    """Returns what a program of these nests reads and does not make, in order."""
    made = {n.name for n in nests}
    return list(dict.fromkeys(t for n in nests for t in _operands(n) if t not in made))


_MOST_AGAIN = 16
"""So many maps at most are computed again for one that is needed behind a cut: a bound on how much longer segments become. (Ten
long programs as an H200 would have them: with 64 none is predicted to be faster than with 16, with 8 one is 3% slower.)"""


def _computed_again(program: LoopProgram) -> dict[str, Nest]:
    """Returns the maps that are cheaper to compute again in a later segment than to store for it. Results are stored anyway."""
    sources, stored = Sources(told_apart(program)), frozenset(program.outputs)
    maps = (n for n in program.nests if isinstance(n, Nest) and not n.is_reduction and n.name not in stored)
    return {nest.name: nest for nest in maps if sources.add(nest, _MOST_AGAIN)}


def _operands(nest: Nest | External) -> Iterator[str]:
    """What a nest reads, in the order of its body: the order is the same in equal nests."""
    if isinstance(nest, External):
        yield from nest.operands
    else:
        yield from (node.tensor for node in postorder(nest.body) if isinstance(node, Read))


def _positional(program: LoopProgram) -> dict[str, Nest]:
    """The maps that read nothing but maps of positions."""
    found: dict[str, Nest] = {}
    for nest in program.nests:
        if isinstance(nest, Nest) and not nest.is_reduction and nest.reads <= found.keys():
            found[nest.name] = nest
    return found


def _needed(nests: Sequence[Nest | External], free: Mapping[str, Nest], order: Mapping[str, int]) -> list[Nest]:
    """Those of `free` that `nests` read and do not make, directly or through each other, in their `order`."""
    names = {n.name for n in nests}
    found: set[str] = set()
    stack = [t for n in nests for t in n.reads]
    while stack:
        name = stack.pop()
        if name in free and name not in names and name not in found:
            found.add(name)
            stack.extend(free[name].reads)
    return [free[name] for name in sorted(found, key=order.__getitem__)]


def _boundaries(nests: Sequence[Nest | External], last_read: Mapping[str, int]) -> list[int]:
    """Where segments begin and end. Layers that repeat are cut at the same place, each for itself if it is not small."""
    ends = [*_between_layers(nests, 0, len(nests), last_read, _numbered(nests)), len(nests)]
    boundaries = [0]
    for end in ends:
        while boundaries[-1] < end:
            boundaries.append(_cut(nests, boundaries[-1], end, last_read))
    return boundaries


def _numbered(nests: Sequence[Nest | External]) -> list[int]:
    """A number for each nest, the same for those that do the same."""
    numbers: dict[tuple[object, ...], int] = {}
    return [numbers.setdefault(signature(n), len(numbers)) for n in nests]


def _between_layers(
    nests: Sequence[Nest | External], start: int, stop: int, last_read: Mapping[str, int], numbers: Sequence[int]
) -> Iterator[int]:
    """Cuts of `nests[start:stop]` between layers that repeat, where it is too long for one segment."""
    if _fits(nests[start:stop]):
        return
    run = longest_run(numbers[start:stop])
    if run is None or _fits(nests[start + run.start : start + run.stop]):
        return  # a few equal steps in a row are no layers: what is cut there is a chain
    first, last = start + run.start, start + run.stop
    # in the second layer, what it reads of the first one is known to be alive
    place = _quietest(nests, first, first + run.period, first + 2 * run.period, last_read) - first
    first += place % run.period
    layers = MOST_NESTS // 2 // run.period
    reductions = _reductions(nests[first : first + run.period])
    if reductions:
        layers = min(layers, MOST_REDUCTIONS // 2 // reductions)
    end = first + (last - first) // run.period * run.period  # behind the last whole layer, and so beyond `start`
    cuts = [*range(first, end, run.period * max(1, layers)), end]
    yield from _between_layers(nests, start, cuts[0], last_read, numbers)
    yield from (c for c in cuts if start < c < stop)
    yield from _between_layers(nests, cuts[-1], stop, last_read, numbers)


def _reductions(nests: Sequence[Nest | External]) -> int:
    return sum(isinstance(n, Nest) and n.is_reduction for n in nests)


def _fits(nests: Sequence[Nest | External]) -> bool:
    return len(nests) <= MOST_NESTS and _reductions(nests) <= MOST_REDUCTIONS


def _cut(nests: Sequence[Nest | External], start: int, end: int, last_read: Mapping[str, int]) -> int:
    """Where the segment from `start` ends, at most at `end`: in the second half of what fits, where the fewest elements are
    alive."""
    reductions, stop = 0, start
    while stop < end and stop - start < MOST_NESTS:
        nest = nests[stop]
        reductions += isinstance(nest, Nest) and nest.is_reduction
        if reductions > MOST_REDUCTIONS:
            break
        stop += 1
    return stop if stop == end else _quietest(nests, start, (start + stop) // 2, stop, last_read)


def _quietest(nests: Sequence[Nest | External], start: int, first: int, stop: int, last_read: Mapping[str, int]) -> int:
    """The place in `(first, stop]` with the fewest elements alive of those made from `start` on; the last one of several."""
    dies: dict[int, int] = {}
    alive, best, smallest = 0, stop, None
    for position in range(start, stop):
        size = volume(nests[position].axes)
        last = last_read.get(nests[position].name, position)
        alive += size
        dies[last] = dies.get(last, 0) + size
        alive -= dies.pop(position, 0)  # nothing behind this nest reads it
        if position >= first and (smallest is None or alive <= smallest):
            best, smallest = position + 1, alive
    return best


# --- where a long program repeats itself: the layers of a model


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
