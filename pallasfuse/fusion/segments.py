"""Long programs are grouped in segments: the choice of groups costs more than linear time in what it looks at.

A program within the limits is one segment. A longer one is cut where the fewest elements are alive, and what crosses a cut
is stored, as it would be between two kernels. Maps of positions alone, like masks, are part of every segment that reads them.
"""

from collections.abc import Iterator, Mapping, Sequence

from pallasfuse.ir.axes import volume
from pallasfuse.ir.loop_program import External, LoopProgram, Nest, Tensor

MOST_NESTS = 512
MOST_REDUCTIONS = 24


def segments(program: LoopProgram) -> Iterator[LoopProgram]:
    """Programs that together compute `program`, in order; the inputs of each are inputs and earlier values."""
    reductions = sum(isinstance(n, Nest) and n.is_reduction for n in program.nests)
    if len(program.nests) <= MOST_NESTS and reductions <= MOST_REDUCTIONS:
        yield program
        return
    free = _positional(program)
    nests = [n for n in program.nests if n.name not in free]
    last_read = {name: n for n, nest in enumerate(nests) for name in nest.reads}
    last_read |= dict.fromkeys(program.outputs, len(nests))
    types = {d.name: Tensor(d.name, d.axes, d.dtype) for d in program.definitions()}
    start = 0
    while start < len(nests):
        stop = _cut(nests, start, last_read)
        inside = nests[start:stop]
        copied = _needed(inside, free)
        made = frozenset(n.name for n in (*copied, *inside))
        read = dict.fromkeys(t for n in inside for t in sorted(n.reads) if t not in made)
        outputs = tuple(n.name for n in inside if last_read.get(n.name, -1) >= stop)
        yield LoopProgram(tuple(types[t] for t in read), (*copied, *inside), outputs)
        start = stop


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


def _cut(nests: Sequence[Nest | External], start: int, last_read: Mapping[str, int]) -> int:
    """Where the segment from `start` ends: in the second half of what fits, behind the place with the fewest elements alive."""
    reductions, stop = 0, start
    while stop < len(nests) and stop - start < MOST_NESTS:
        nest = nests[stop]
        reductions += isinstance(nest, Nest) and nest.is_reduction
        if reductions > MOST_REDUCTIONS:
            break
        stop += 1
    if stop == len(nests):
        return stop
    dies: dict[int, int] = {}
    alive, best, smallest = 0, stop, None
    for position in range(start, stop):
        size = volume(nests[position].axes)
        last = last_read.get(nests[position].name, position)
        alive += size
        dies[last] = dies.get(last, 0) + size
        alive -= dies.pop(position, 0)  # nothing behind this nest reads it
        if position >= (start + stop) // 2 and (smallest is None or alive <= smallest):
            best, smallest = position + 1, alive
    return best
