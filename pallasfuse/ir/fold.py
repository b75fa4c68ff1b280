"""Folds and groups: reductions that share the passes of one kernel, with the algebra that makes sharing right.

A `Group` is a rewritten part of a loop program. Its folds run over the rolled axis in *passes*: a fold may read
reductions of earlier passes (finished) and, through its frames, earlier folds of its own pass (not finished yet).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr
from pallasfuse.ir.loop_program import Nest, Source
from pallasfuse.ir.reducers import Reducer

OLD = ".old"
"""Suffix of the name by which an update reads a frame's previous value."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A value phi(r) of unfinished reductions at which a fold's accumulators are expressed.

    The sequence of frames is free as long as the last one is phi of the finished r (design, "frames are free").
    """

    name: str
    axes: tuple[Axis, ...]
    value: Expr
    """phi, over reads of reductions (unfinished and finished) and of whatever does not depend on the rolled axis."""
    unfinished: tuple[str, ...]
    """Reductions of the same pass that phi reads."""
    empties: tuple[str, ...]
    """Max and min folds that phi depends on: while one still is its identity, phi may be undefined."""
    positive: bool = False
    """The repair relies on the frame being positive.

    Only then: a sum of exponentials may underflow to zero, and accumulators at a stand-in that is far from their values cancel.
    """
    low: float = 0.0
    high: float = math.inf
    """Where the terms are only scaled by a positive frame: beyond these, products with it might underflow, which no repair undoes.

    Powers of four: exact, and squares wherever numbers are counted.
    """
    compared: bool = False
    """Elements are compared with it: what was accumulated at one value is empty at any other, and nothing stands in for it."""
    late: bool = False
    """The accumulators may stay at `safe` until this frame is finished: one rounding instead of one a tile."""

    @property
    def safe(self) -> float:
        """The number that stands in for the frame where its unfinished value is not usable."""
        return 1.0 if self.positive else 0.0


@dataclass(frozen=True, slots=True)
class Accumulator:
    """One carried value. `update` re-expresses it at the new frames; None when there is nothing to repair."""

    name: str
    axes: tuple[Axis, ...]
    reducer: Reducer
    term: Expr
    update: Expr | None

    @property
    def dtype(self) -> str:
        return self.term.dtype


@dataclass(frozen=True, slots=True)
class Fold:
    """A reduction as init, step, combine and finish over its accumulators.

    step: every accumulator becomes `update(old frames, new frames)` combined with its reduced `term` at the new frames.
    finish: the reduction's value is `finish`, over accumulator 0 and the finished reductions of its pass.
    """

    nest: Nest
    """The reduction itself, with its maps inlined."""
    pass_index: int
    accumulators: tuple[Accumulator, ...]
    frames: tuple[Frame, ...]
    finish: Expr
    empty_is_neutral: bool = True
    """Proven: while a predecessor in `empties` is its identity, every term is its reducer's identity."""
    identity_where: tuple[str, ...] = ()
    """Predecessors in `empties`: where one of them is its identity when it is finished, so is this reduction, though no repair
    leads to that frame."""
    refined: Expr | None = None
    """Accumulator 0 corrected for the rounding of the last frame, over the finished accumulators."""
    matrix: str = ""
    hoisted: str = ""
    finished_reads: frozenset[str] = frozenset()
    """Reductions of earlier passes that the terms read."""
    refusals: tuple[str, ...] = ()
    """Why this reduction could not share an earlier pass."""

    @property
    def name(self) -> str:
        return self.nest.name


@dataclass(frozen=True, slots=True)
class Group:
    """The part of a loop program that becomes one kernel.

    Invariants: `folds` are ordered by pass and dependency; `inner` reductions do not reduce the rolled axis and are
    computed inside a tile; every read in any body is an input, an inner reduction or a fold's nest.
    """

    name: str
    rolled: Axis
    parallel: tuple[Axis, ...]
    """Axes that every fold keeps: the candidates for the grid."""
    folds: tuple[Fold, ...]
    inner: tuple[Nest, ...]
    outputs: tuple[Nest, ...]
    """The nests that the kernel stores: maps over folds, inner reductions and inputs."""
    inputs: tuple[str, ...]
    conditions: tuple[str, ...] = ()
    """The ways, besides the order of summation, in which the kernel rounds otherwise."""
    exceptions: tuple[str, ...] = ()
    """Where a result may be NaN, infinite or finite though the program's is not."""
    strict: bool = False
    """No exception is allowed: nothing is assumed to be finite."""
    source: Source = Source()

    def expressions(self) -> Iterator[Expr]:
        """Everything that the kernel computes: bodies of nests, terms, frames, updates, and how folds finish."""
        yield from (n.body for n in self.nests)
        for fold in self.folds:
            yield fold.finish
            yield from (frame.value for frame in fold.frames)
            for a in fold.accumulators:
                yield from (a.term,) if a.update is None else (a.term, a.update)
            if fold.refined is not None:
                yield fold.refined

    @property
    def nests(self) -> tuple[Nest, ...]:
        """The nests are all that the group computes: its folds as they are written, inner reductions, and outputs."""
        return (*(f.nest for f in self.folds), *self.inner, *self.outputs)

    @property
    def heads(self) -> tuple[str, ...]:
        """The reductions that the group is made for: its folds, and in a group without any all of them."""
        return tuple(f.name for f in self.folds) or tuple(n.name for n in self.inner if n.is_reduction)

    @property
    def passes(self) -> int:
        return max((f.pass_index for f in self.folds), default=-1) + 1

    def __str__(self) -> str:
        lines = []
        for nest in self.inner:
            over = ", ".join(f"{a.name}:{a.extent}" for a in nest.reduced)
            lines.append(
                f"inner {nest.name}[{', '.join(a.name for a in nest.axes)}] {nest.reducer}[{over}]= {nest.body}"
            )
        for fold in self.folds:
            lines.append(f"fold {fold.name}[{', '.join(a.name for a in fold.nest.axes)}] over {self.rolled}, "
                         f"pass {fold.pass_index + 1} of {self.passes}")  # fmt: skip
            lines.extend(f"  frame {f.name} = {f.value}{', late' if f.late else ''}" for f in fold.frames)
            for a in fold.accumulators:
                head = f"  {a.name} {a.reducer}= {a.term}"
                lines.append(head if a.update is None else f"{head}; repaired {a.name} = {a.update}")
            if fold.refined is not None:
                lines.append(f"  refined {fold.accumulators[0].name} = {fold.refined}")
            lines.append(f"  {fold.name} = {fold.finish}")
        lines.extend(f"store {n.name}[{', '.join(a.name for a in n.axes)}] = {n.body}" for n in self.outputs)
        return "\n".join(lines)
