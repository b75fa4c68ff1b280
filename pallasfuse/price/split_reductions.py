"""Reductions that XLA computes in several steps on a GPU: those of dimensions between which there are others that are kept.

A block reduces rows, or columns. What is neither is reduced along its longest dimension first, and what that leaves along the
others; of rows that lie apart in many batches, the rows are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from pallasfuse.first_time import Recent
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Expr, Read, postorder, read
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.price.xla_reductions import is_product
from pallasfuse.resources.block import WARP

_MOST_OF_A_BATCH = 8
"""A block reduces so many rows together, at most, that lie apart (`BatchedReductionRaceFreeBound`)."""


def _split(program: LoopProgram) -> LoopProgram:
    maps = {n.name: n for n in program.nests if isinstance(n, Nest) and not n.is_reduction}
    nests = [part for n in program.nests for part in (_parts(n, maps) if isinstance(n, Nest) else (n,))]
    return replace(program, nests=tuple(nests)) if len(nests) > len(program.nests) else program


split_reductions = Recent(_split)
"""Returns the program with two nests or more for each reduction that XLA computes in several steps. (20 reductions of arrays of
three to five dimensions, compiled for an H100, `ReductionSplitter`. A step of few elements shares a kernel with the other.)"""


def _parts(nest: Nest, maps: Mapping[str, Nest]) -> tuple[Nest, ...]:
    """Returns the nests that a nest is on a GPU, in order: itself, where it is one kernel."""
    if not nest.is_reduction or nest.picks or len(nest.reduced) < 2 or is_product(nest):
        return (nest,)
    order = _order(nest, maps)
    runs = _runs([a for a in order if a.extent > 1], nest.reduced)
    batched = _are_batched_rows([a for a in order if a.extent > 1], runs)
    if len(runs) < 2 or (batched and volume(runs[0]) <= _MOST_OF_A_BATCH):
        return (nest,)
    first = runs[1] if batched else max(runs, key=volume)  # of equals, the first
    kept = tuple(a for a in order if a not in first)
    part = replace(nest, name=f"{nest.name}.part{len(runs)}", axes=kept, reduced=first)
    rest = tuple(a for a in nest.reduced if a not in first)
    return part, *_parts(replace(nest, body=read(part.name, kept, nest.dtype), reduced=rest), maps)


def _order(nest: Nest, maps: Mapping[str, Nest]) -> tuple[Axis, ...]:
    """Returns the axes of what is reduced, in the order in which they lie in memory; empty where nothing has all of them.

    Maps lie nowhere: the order is that of what they read. Of several arrays, that of the longest elements counts, and of these the
    first.
    """
    space = frozenset((*nest.axes, *nest.reduced))
    found: list[Read] = []
    waiting = _reads_of(nest.body, space)
    seen = {x.tensor for x in waiting}
    while waiting:
        one = waiting.pop(0)
        source = maps.get(one.tensor)
        if source is None or len(source.axes) != len(space):
            found.append(one)
            continue
        own = dict(zip(source.axes, one.indices, strict=True))
        inner = [x for x in _reads_of(source.body, frozenset(source.axes)) if x.tensor not in seen]
        waiting += [read(x.tensor, (own[a] for a in x.indices), x.dtype) for x in inner]
        seen.update(x.tensor for x in inner)
    return max(found, key=lambda x: dtypes.itemsize_bytes(x.dtype)).indices if found else ()


def _reads_of(body: Expr, space: frozenset[Axis]) -> list[Read]:
    """Lists what a body reads along all axes of a space, each of them once."""
    reads = [x for x in postorder(body) if isinstance(x, Read)]
    return [x for x in reads if frozenset(x.indices) == space and len(x.indices) == len(space)]


def _runs(order: Sequence[Axis], reduced: Sequence[Axis]) -> list[tuple[Axis, ...]]:
    """Groups the reduced axes: those together that are neighbours."""
    return [tuple(run) for is_reduced, run in groupby(order, lambda a: a in reduced) if is_reduced]


def _are_batched_rows(order: Sequence[Axis], runs: Sequence[Sequence[Axis]]) -> bool:
    """Are the outermost dimensions reduced, and the innermost ones, which lanes of a warp can share?"""
    if len(runs) != 2 or runs[0][0] != order[0] or runs[1][-1] != order[-1]:
        return False
    length = volume(runs[1])
    return length >= WARP or WARP % length == 0
