"""Reductions that XLA computes in two steps on a GPU: those of dimensions between which there are others that are kept.

A block reduces rows, or columns. What is neither is reduced along its longest dimension first, and what that leaves along the
others; of rows that lie apart in many batches, the rows are.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from pallasfuse.first_time import Recent
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Read, postorder, read
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.price.xla_reductions import is_product
from pallasfuse.resources.block import WARP

_MOST_OF_A_BATCH = 8
"""A block reduces so many rows together, at most, that lie apart (`BatchedReductionRaceFreeBound`)."""


def _split(program: LoopProgram) -> LoopProgram:
    nests = [part for n in program.nests for part in (_parts(n) if isinstance(n, Nest) else (n,))]
    return replace(program, nests=tuple(nests)) if len(nests) > len(program.nests) else program


split_reductions = Recent(_split)
"""Returns the program with two nests or more for each reduction that XLA computes in several steps. (20 reductions of arrays of
three to five dimensions, compiled for an H100, `ReductionSplitter`.)"""


def _parts(nest: Nest) -> tuple[Nest, ...]:
    """Returns the nests that a nest is on a GPU, in order: itself, where it is one kernel."""
    if not nest.is_reduction or nest.picks or len(nest.reduced) < 2 or is_product(nest):
        return (nest,)
    order = _order(nest)
    runs = _runs(order, nest.reduced)
    batched = _are_batched_rows(order, runs)
    if len(runs) < 2 or (batched and volume(runs[0]) <= _MOST_OF_A_BATCH):
        return (nest,)
    first = runs[1] if batched else max(runs, key=volume)  # of equals, the first
    kept = tuple(a for a in order if a not in first)
    part = replace(nest, name=f"{nest.name}.part{len(runs)}", axes=kept, reduced=first)
    rest = tuple(a for a in nest.reduced if a not in first)
    return part, *_parts(replace(nest, body=read(part.name, kept, nest.dtype), reduced=rest))


def _order(nest: Nest) -> tuple[Axis, ...]:
    """Returns the axes of what is reduced, in the order in which they lie in memory; empty where nothing has all of them."""
    space = frozenset((*nest.axes, *nest.reduced))
    found = (x.indices for x in postorder(nest.body) if isinstance(x, Read) and frozenset(x.indices) == space)
    return tuple(a for a in next(found, ()) if a.extent > 1)


def _runs(order: Sequence[Axis], reduced: Sequence[Axis]) -> list[tuple[Axis, ...]]:
    """Groups the reduced axes: those together that are neighbours."""
    return [tuple(run) for is_reduced, run in groupby(order, lambda a: a in reduced) if is_reduced]


def _are_batched_rows(order: Sequence[Axis], runs: Sequence[Sequence[Axis]]) -> bool:
    """Are the outermost dimensions reduced, and the innermost ones, which lanes of a warp can share?"""
    if len(runs) != 2 or runs[0][0] != order[0] or runs[1][-1] != order[-1]:
        return False
    length = volume(runs[1])
    return length >= WARP or WARP % length == 0
