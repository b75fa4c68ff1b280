"""The loops of schedule trees that masks bound, at their actual extents."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr
from pallasfuse.ir.tile_program import Loop, Statement, TileProgram
from pallasfuse.proof.result import Counterexample, Record
from pallasfuse.tiling.tree_values import Bounded
from pallasfuse.verification.visits import skips, wrong_visits


def bounds_of_loops(program: TileProgram, bounded: Sequence[Bounded], seed: int, record: Record) -> None:
    """The bounds of loops: every position that counts is visited, and what is called unmasked is."""
    generator = np.random.default_rng(seed)
    for blocks, known in _bounded_in(program, bounded):
        stage = f"bounds of {program.name}"
        record.stages[stage] = None
        loop = known.loop
        wrong = wrong_visits(blocks, loop, known.guards.predicates, generator)
        if wrong is not None and record.wrong is None:
            record.wrong = Counterexample(stage, str(loop.axis), (), "every element that counts", wrong)


Skipping = tuple[str, Axis, frozenset[Expr]]
"""A kernel, the axis of a loop, and the masks by which it skips some of it."""


def skipping(programs: Sequence[TileProgram], bounded: Sequence[Bounded], seed: int) -> dict[Skipping, None]:
    """Returns the loops that visit less than their axis somewhere."""
    generator = np.random.default_rng(seed)
    return {
        (program.name, known.loop.axis, frozenset(known.guards.predicates)): None
        for program in programs for blocks, known in _bounded_in(program, bounded)
        if known.guards.predicates and skips(blocks, known.loop, generator)
    }  # fmt: skip


def _bounded_in(program: TileProgram, bounded: Sequence[Bounded]) -> Iterator[tuple[TileProgram, Bounded]]:
    """Yields the loops of a program that masks may bound, each with the program whose blocks are the windows around it."""
    for around, loop in _with_windows(program.body, {}):
        for known in bounded:
            if known.loop is loop:
                grid = {**dict(program.grid), **around}
                yield replace(program, grid=tuple(grid.items())), known


def _with_windows(body: Sequence[Statement], around: dict) -> Iterator[tuple[dict, Loop]]:  # type: ignore[type-arg]
    """Yields every loop, with the tiles of those around it."""
    for s in body:
        if isinstance(s, Loop):
            yield around, s
            for segment in s.segments:
                yield from _with_windows(segment.body, {**around, s.axis: segment.tile})
