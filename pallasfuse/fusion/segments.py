"""Long programs are grouped in segments: the choice of groups costs more than linear time in what it looks at.

A program within the limits is one segment. A longer one is cut where the fewest elements are alive, and what crosses a cut
is stored, as it would be between two kernels. Layers that repeat are cut at the same place, so that equal layers are equal
segments. Maps of positions alone, like masks, are part of every segment that reads them.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from pallasfuse.fusion.periods import longest_run, signature
from pallasfuse.ir.axes import volume
from pallasfuse.ir.expr import Read, postorder
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
    for start, stop in pairwise(_boundaries(nests, last_read)):
        inside = nests[start:stop]
        copied = _needed(inside, free)
        made = frozenset(n.name for n in (*copied, *inside))
        read = dict.fromkeys(t for n in inside for t in _operands(n) if t not in made)
        outputs = tuple(n.name for n in inside if last_read.get(n.name, -1) >= stop)
        yield LoopProgram(tuple(types[t] for t in read), (*copied, *inside), outputs)


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


def _needed(nests: Sequence[Nest | External], free: Mapping[str, Nest]) -> list[Nest]:
    """Those of `free` that `nests` read, directly or through each other, in the program's order."""
    names: set[str] = set()
    stack = [t for n in nests for t in n.reads if t in free]
    while stack:
        name = stack.pop()
        if name not in names:
            names.add(name)
            stack.extend(free[name].reads)
    return [nest for name, nest in free.items() if name in names]


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
