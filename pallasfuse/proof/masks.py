"""Masks by which kernels skip tiles: their terms are neutral there, and hide on short axes what they hide at the actual extents."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate_over
from pallasfuse.ir.expr import Expr
from pallasfuse.ir.fold import Fold, Group
from pallasfuse.ir.neutrality import fills_of
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Loop, Statement, TileProgram
from pallasfuse.jaxpr_frontend import Converted
from pallasfuse.lowering import lowered
from pallasfuse.proof.instance import Instance, constant_masks, masks_of
from pallasfuse.proof.result import Counterexample, PlannedKernel, Record
from pallasfuse.tiling.bounds import guards_of
from pallasfuse.tiling.tree_values import Bounded
from pallasfuse.verification.domain import FiniteFields
from pallasfuse.verification.folds import GroupRun, random_frame
from pallasfuse.verification.value import Value
from pallasfuse.verification.visits import skips, wrong_visits


def bounded_by(converted: Converted, part: PlannedKernel) -> tuple[tuple[TileProgram, ...], list[Bounded]]:
    """Returns the kernels of a plan's schedule tree, and their loops that masks may bound; nothing if its schedule is no tree."""
    bounded: list[Bounded] = []
    if not part.schedule.tree:
        return (), bounded
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in converted.program.definitions()}
    return lowered(part.phases[0].target, part.group, part.schedule, tensors, bounded=bounded), bounded


def filled_numbers(group: Group, bounded: Sequence[Bounded], *, ranged: bool) -> frozenset[float]:
    """Returns the numbers that masks fill in by which tiles are skipped; over fields they are infinities.

    bounded: the loops of its tree. ranged: as in `guards`.
    """
    found = {n for b in bounded for n in b.numbers}
    for pass_index in range(group.passes):
        if guards_of(group, pass_index, ranged=ranged).fills:
            terms = [a.term for f in group.folds if f.pass_index == pass_index for a in f.accumulators]
            found.update(n for fills in map(fills_of, terms) if fills is not None for n in fills.numbers)
    return frozenset(found)


def masks_vary(
    part: PlannedKernel,
    instance: Instance,
    programs: Sequence[TileProgram],
    bounded: Sequence[Bounded],
    seed: int,
    record: Record,
) -> None:
    """Tests that a mask which hides something at the actual extents does so on the short axes, and leaves what it leaves there.

    What it fills in must be no number of anything else, which would be an infinity with it.

    Args:
      programs: the kernels over short axes.
      bounded: the loops of its tree there.
    """
    ranged, short = any(phase.program.ranges for phase in part.phases), instance.small.of(part.group)
    at_full_size, actual = bounded_by(instance.converted, part)
    numbers = filled_numbers(part.group, actual, ranged=ranged)
    if numbers != filled_numbers(short, bounded, ranged=ranged):
        record.uncovered[f"the masks of {part.group.name} hide other rows on short axes"] = None
    fills = [fills_of(e) for e in short.expressions()] if numbers else []
    if any(f is None for f in fills):
        record.uncovered[f"{part.group.name} computes with a number that is as far as what its masks fill in"] = None
    bounding = list(dict.fromkeys(p for b in actual for p in b.guards.predicates))
    for predicate in constant_masks(bounding if part.schedule.tree else masks_of(part), instance.small):
        record.uncovered[f"the mask {predicate} hides nothing, or everything, on short axes"] = None
    on_short_axes = skipping(programs, bounded, seed)
    for kernel, axis, masks in skipping(at_full_size, actual, seed):
        if (kernel, instance.small.axis(axis), frozenset(map(instance.small.expr, masks))) not in on_short_axes:
            record.uncovered[f"{kernel}: the loop over {axis}, which masks bound, visits all of it on short axes"] = (
                None
            )


Hidden = tuple[str, Value, Value]
"""An accumulator and a predicate; the identity; its terms where the predicate is false, and the identity elsewhere."""


def masked_terms(
    group: Group, bounded: Sequence[Bounded], tensors: Mapping[str, Value], fields: FiniteFields, *, ranged: bool
) -> Iterator[Hidden]:
    """Yields what is added where a mask by which tiles are skipped is false, at random frames: identities.

    bounded: the loops of its tree. ranged: as in `guards`.
    """
    done: dict[tuple[Fold, Expr], None] = {}
    for loop in bounded:
        done |= dict.fromkeys((fold, p) for fold in loop.folds for p in loop.guards.predicates)
    for number, (fold, predicate) in enumerate(done):
        for name, expected, found in _hidden(fold, predicate, tensors, fields):
            yield f"{name} ({number})", expected, found
    if not group.folds:
        return
    run = GroupRun(group, tensors, fields, split=False)
    known = dict(tensors)
    for name, value in run.run():
        known[name] = value
    known |= run.tensors
    for pass_index in range(group.passes):
        folds = [f for f in group.folds if f.pass_index == pass_index]
        known_guards = guards_of(group, pass_index, ranged=ranged)
        visible = () if known_guards.visible is None else (known_guards.visible,)
        for predicate in dict.fromkeys((*known_guards.predicates, *visible)):
            for fold in folds:
                yield from _hidden(fold, predicate, known, fields)


def _hidden(fold: Fold, predicate: Expr, known: Mapping[str, Value], fields: FiniteFields) -> Iterator[Hidden]:
    frames = {f.name: random_frame(f, fields) for f in fold.frames}
    space = fold.nest.axes + fold.nest.reduced
    extents = tuple(x.extent for x in space)
    for a in fold.accumulators:
        identity = fields.constant(a.reducer.identity(a.dtype), a.dtype, len(space))
        term = evaluate_over(a.term, space, {**known, **frames}, fields)
        kept = evaluate_over(predicate, space, known, fields)
        found = fields.apply("select", [kept, identity, term], a.dtype)
        yield f"{a.name} where {predicate} is false", identity.broadcast(extents), found.broadcast(extents)


# --- the loops of schedule trees that masks bound, at their actual extents


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
