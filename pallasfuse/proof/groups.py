"""A group against the nests that it replaces: its folds, its masks and its tile programs, on random inputs of the group."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from pallasfuse.errors import Refusal
from pallasfuse.fusion.graph import Graph
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate_nest
from pallasfuse.ir.evaluate_tiles import evaluate_tiles_over
from pallasfuse.ir.expr import Apply, Const, Expr
from pallasfuse.ir.fold import Group
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Load, Loop, TileProgram, every
from pallasfuse.ir.tree import shortened
from pallasfuse.jaxpr_frontend import Converted
from pallasfuse.lowering import lowered
from pallasfuse.proof.deciding import Tests, decide
from pallasfuse.proof.instance import (
    MOST_ELEMENTS,
    Instance,
    all_axes,
    levels_of,
    needed_trials,
    nest_volume,
    replaced_nests,
)
from pallasfuse.proof.masks import bounded_by, filled_numbers, masked_terms
from pallasfuse.proof.predicates import compares
from pallasfuse.proof.result import Counterexample, PlannedKernel, Record
from pallasfuse.repair.signs import Sign, infer_sign
from pallasfuse.targets import Target
from pallasfuse.tiling import arithmetic
from pallasfuse.tiling.legalize import exactly
from pallasfuse.tiling.tree_values import Bounded
from pallasfuse.verification.domain import FiniteFields
from pallasfuse.verification.field import Chain, tower
from pallasfuse.verification.folds import GroupRun
from pallasfuse.verification.ranges import decided
from pallasfuse.verification.shrink import integers_of, shrinking
from pallasfuse.verification.value import Value

_MOST_TRIALS = 20_000
_SHORT_DOT = 4
"""The smallest matrix product over short axes, so that tiles are padded as the target's are."""
_PROBES = 8
"""Trials at the actual extents, of programs that are small: no bound comes from them, but every number is the actual one."""
_MOST_BLOCKS = 400
_ROUNDS = 6
"""Batches of trials, where each has other bounds of loops."""
_BATCH_ELEMENTS = 1 << 21
_OUTCOMES: dict[Sign, dict[str, bool]] = {
    "positive": {"gt": True, "ge": True, "lt": False, "le": False},
    "nonnegative": {"ge": True, "lt": False},
    "negative": {"gt": False, "ge": False, "lt": True, "le": True},
    "nonpositive": {"le": True, "gt": False},
}
"""Comparisons with zero that a sign decides, but for numbers that underflow."""


class GroupTest:
    """A group against the nests that it replaces, on random inputs of the group."""

    def __init__(
        self,
        instance: Instance,
        group: Group,
        variants: Sequence[tuple[str, Sequence[TileProgram]]],
        target: Target,
        record: Record,
        trips: int,
        bounded: Sequence[Bounded] = (),
    ) -> None:
        """Prepares the tests of a group.

        variants: (stage, the phases of the kernel as that stage has them). trips: of the loop over the rolled axis.
        bounded: the loops of its tree that masks may bound.
        """
        self.instance, self.group, self.variants, self.target, self.record = instance, group, variants, target, record
        self.trips, self.bounded = trips, tuple(bounded)
        self.ranged = any(p.ranges for _, phases in variants for p in phases)
        self.far = filled_numbers(group, bounded, ranged=self.ranged)
        """The numbers that masks fill in."""
        self.replaced = replaced_nests(instance.program, group)
        self.bounding = sorted(frozenset().union(*(_bounding(p) for _, phases in variants for p in phases)))
        """Inputs that bounds of loops read: one value in all trials of a batch."""
        self.decided: dict[str, set[bool]] = {}
        """The outcomes of each predicate of inputs, in all trials."""

    @staticmethod
    def small(instance: Instance, part: PlannedKernel, record: Record) -> "GroupTest":
        """Over short axes, lowered as the target has it, with small tiles."""
        group: Group = instance.small.of(part.group)
        bounded: list[Bounded] = []
        variants = _lowered(instance, group, part, bounded)
        return GroupTest(instance, group, variants, part.phases[0].target, record, part.schedule.trips, bounded)

    @property
    def ordered(self) -> bool:
        """Does the group look for elements that equal an extremum?"""
        return any(frame.compared for fold in self.group.folds for frame in fold.frames)

    def run(self, delta: float, seed: int) -> None:
        """Batches of trials until every element is determined often enough, or a stage is found to be wrong."""
        program = self.instance.program
        tests = decide(
            self.record,
            program,
            seed,
            partial(self._over_fields, delta, seed),
            self._batches,
            self.far,
            ordered=self.ordered,
        )
        always = decided(self.instance.converted.program) & decided(program)
        bodies = {n.name: n.body for n in self.replaced}
        for name, outcomes in self.decided.items():
            if len(outcomes) == 1 and name not in always:
                (outcome,) = outcomes
                if _of_sign(bodies[name], self.instance.signs) == outcome:
                    self.record.given[f"{name} is {outcome}"] = None
                else:
                    self.record.uncovered[f"the predicate {name} was {outcome} in every test"] = None
        self.record.settle(tests.needed, tests.miss, tests.made)

    def _over_fields(self, delta: float, seed: int, record: Record, chain: Chain) -> Tests:
        needed, miss = needed_trials(self.instance.program, self.group, delta)
        elements = max((nest_volume(n) for n in self.replaced), default=1)
        rounds = _ROUNDS if self.bounding else 1
        shares = rounds if needed <= _MOST_TRIALS else 1  # the trials of all rounds count
        batch = max(32, min(-(-(needed + 8) // shares), _BATCH_ELEMENTS // elements, _MOST_TRIALS))
        done = 0
        limit = (
            max(8 * needed + 64, _MOST_TRIALS) if needed <= _MOST_TRIALS else batch
        )  # else only to look for a counterexample
        literals, levels = integers_of(self.instance.program), levels_of(self.replaced)
        while True:
            fields = FiniteFields(tower(levels, batch, seed * 7919 + done, chain), literals, far=self.far)
            self._batch(record, fields)
            done += batch
            fewest = min(c.fewest for c in record.comparisons.values())
            rounds -= 1
            enough = rounds <= 0 and (fewest >= needed or (fewest == 0 and done > 8 * needed))
            if done >= limit or enough or record.counterexample() is not None:
                return Tests(needed, miss, done, fields.constants)

    def _set_aside(self, record: Record, stage: str) -> None:
        """Differences of states on which no result depends, and of states that the plan never has."""
        wrong = {c.tensor for c in record.mismatches() if c.stage == stage}
        if wrong and wrong.isdisjoint(n.name for n in self.group.outputs):
            record.drop_mismatches(stage)
        elif wrong and self.trips == 1:
            record.drop_mismatches(stage)
            record.uncovered[
                f"{stage}: the states of {', '.join(sorted(wrong))} differ, which a single tile does not have"
            ] = None

    def probe(self, seed: int) -> None:
        """A few trials that only look for a mismatch."""
        program = self.instance.program
        before, self.record.comparisons = self.record.comparisons, {}
        decide(
            self.record, program, seed, partial(self._probe_fields, seed), self._batches, self.far, ordered=self.ordered
        )
        wrong = {k: c for k, c in self.record.comparisons.items() if c.mismatch is not None}
        self.record.comparisons = before | wrong

    def _probe_fields(self, seed: int, record: Record, chain: Chain) -> Tests:
        fields = FiniteFields(tower(levels_of(self.replaced), _PROBES, seed, chain), far=self.far)
        self._batch(record, fields)
        return Tests(_PROBES, 0.0, _PROBES, fields.constants)

    def _batches(self, record: Record, fields: FiniteFields) -> None:
        """Batches with other bounds of loops each, where inputs decide them."""
        for _ in range(_ROUNDS if self.bounding else 1):
            self._batch(record, fields)

    def _batch(self, record: Record, fields: FiniteFields) -> None:
        group, instance, trials = self.group, self.instance, fields.tower.trials
        defined = {d.name: d for d in instance.program.definitions()}
        tensors = {t: instance.draw(t, defined[t].axes, defined[t].dtype, fields) for t in group.inputs}
        for t in self.bounding:
            tensors[t] = _one_value(defined[t].axes, defined[t].dtype, group.rolled.extent, fields)
        for nest in self.replaced:
            value = evaluate_nest(nest, tensors, fields).typed(nest.dtype)
            tensors[nest.name] = instance.assume(nest.name, value, fields)
            if compares(nest.body) and value.real is not None and value.real.shape[-1] > 1:
                self.decided.setdefault(nest.name, set()).update(np.unique(value.real).tolist())
        for name, expected, found in masked_terms(group, self.bounded, tensors, fields, ranged=self.ranged):
            record.compare(f"masks of {group.name}", name, expected, found, trials)
        for split in (False, True):
            stage = f"folds of {group.name}" + (", combined" if split else "")
            for name, value in GroupRun(group, tensors, fields, split=split).run():
                record.compare(stage, name, tensors[name], value, trials)
            self._set_aside(record, stage)
        before: Mapping[str, Value] = {}
        own, outputs = {n.name for n in self.replaced}, {n.name for n in group.outputs}
        for stage, phases in self.variants:
            known = {t: value for t, value in tensors.items() if t not in own}  # kernels read what kernels have stored
            results: dict[str, Value] = {}
            for program in phases:
                written = evaluate_tiles_over(program, known, fields, move_last_block_back=self.target.tails == "exact")
                known |= written
                results |= {n: value for n, value in written.items() if n in outputs}
            for name, value in results.items():
                record.compare(stage, name, tensors[name], value, trials, unfinished=True)
            for name, value in before.items():
                record.compare(stage, f"{name} as lowered", value, results[name], trials)
            before = results
        record.notes.update(fields.notes)


def _bounding(program: TileProgram) -> frozenset[str]:
    """The inputs that bounds of loops read."""
    statements = list(every(program.body))
    bounds = [g for s in statements if isinstance(s, Loop) for g in s.segments]
    read = frozenset().union(*(g.start.tensors | g.stop.tensors for g in bounds))
    found = frozenset(s.tensor for s in statements if isinstance(s, Load) and s.name in read)
    return found.union(*(r.predicate.tensors for r in program.ranges))


def _one_value(axes: Sequence[Axis], dtype: str, extent: int, fields: FiniteFields) -> Value:
    """A tensor that bounds of loops read, the same in all trials: of masks over data, more or less is true."""
    generator, shape = fields.tower.generator, [a.extent for a in axes]
    if dtype == "bool" or dtypes.is_float(dtype):
        drawn = generator.random(shape) < generator.choice([0.2, 0.5, 0.8])
        wide = drawn if dtype == "bool" else drawn.astype(np.float64)
        return fields.real(wide[..., None], dtype)
    return fields.integers(generator.integers(-1, extent + 2, shape), dtype)


def _of_sign(body: Expr, signs: Mapping[str, Sign]) -> bool | None:
    """The outcome of a comparison with zero that the other side's sign decides; None where it decides none."""
    match body:
        case Apply(op, (x, Const(0))):
            return _OUTCOMES.get(infer_sign(x, signs), {}).get(op)
    return None


def as_lowered(converted: Converted, part: PlannedKernel, record: Record) -> None:
    """The plan's own tile program is what lowering makes of its group and schedule: what short axes show then speaks for it.

    But for its warps, and which of the axes that may be written out are: the price chooses both afterwards.
    """
    stage = f"own lowering of {part.group.name}"
    record.stages[stage] = None
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in converted.program.definitions()}
    for number, phase in enumerate(part.phases):
        own = phase.program
        again = lowered(phase.target, part.group, part.schedule, tensors)[number]
        program = arithmetic.rewrite_for(phase.target, again)
        unrolled = own.unrolled if frozenset(own.unrolled) <= frozenset(program.unrolled) else program.unrolled
        if replace(program, warps=own.warps, unrolled=unrolled) != own and record.wrong is None:
            record.wrong = Counterexample(
                stage, phase.program.name, (), "the program that its group and schedule give", "another"
            )


def _lowered(
    instance: Instance, group: Group, part: PlannedKernel, bounded: list[Bounded]
) -> list[tuple[str, list[TileProgram]]]:
    """Lowers a group over short axes, and returns (stage, phases) for each of its stages. bounded: as in `lowered`."""
    schedule = part.schedule
    small = instance.small

    def tile(axis: Axis, actual: int) -> int:
        short = small.axis(axis).extent
        return 1 if actual == 1 else short if actual >= axis.extent else min(2, -(-short // 2))

    own = tuple((small.axis(a), tile(a, t)) for a, t in schedule.grid)
    rolled = tile(schedule.rolled, schedule.rolled_tile)
    short = replace(
        schedule, grid=own, rolled=small.axis(schedule.rolled), rolled_tile=rolled, parts=min(schedule.parts, 2)
    )
    if schedule.tree:
        axes = {a.name: a.extent for n in (*part.group.inner, *part.group.outputs) for a in (*n.axes, *n.reduced)}
        least = {a.name: a.extent for n in (*group.inner, *group.outputs) for a in (*n.axes, *n.reduced)}
        short = replace(schedule, rolled=small.axis(schedule.rolled), tree=shortened(schedule.tree, axes, least))
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in instance.program.definitions()}
    programs = [
        lowered(phase.target, group, short, tensors, most_padded=_SHORT_DOT, uneven=True, bounded=bounded)[number]
        for number, phase in enumerate(part.phases)
    ]
    return [(f"lowering of {group.name}", programs), *_rewritten(group.name, programs, part)]


def _rewritten(name: str, programs: list[TileProgram], part: PlannedKernel) -> Iterator[tuple[str, list[TileProgram]]]:
    if all(phase.target.platform != "gpu" for phase in part.phases):
        return
    rewritten = [
        arithmetic.rewrite_for(exactly(phase.target), p) for phase, p in zip(part.phases, programs, strict=True)
    ]
    yield f"cheaper arithmetic of {name}", rewritten
    if any(p.instead is not None for p in rewritten):
        yield _instead(name, rewritten)


def _instead(name: str, programs: Sequence[TileProgram]) -> tuple[str, list[TileProgram]]:
    return f"what {name} runs instead", [p if p.instead is None else p.instead.program for p in programs]


def probe(converted: Converted, part: PlannedKernel, seed: int, record: Record) -> None:
    """The plan's own tile program, where it is small enough to be evaluated."""
    replaced = replaced_nests(converted.program, part.group)
    programs = [phase.program for phase in part.phases]
    blocks = sum(math.prod(-(-a.extent // t) for a, t in p.grid) for p in programs) * part.schedule.trips
    if max((nest_volume(n) for n in replaced), default=0) > MOST_ELEMENTS or blocks > _MOST_BLOCKS:
        return
    identity = shrinking(converted.program, {a: a.extent for a in all_axes(converted.program)})
    if isinstance(identity, Refusal):
        return
    instance = Instance(converted, converted.program, identity, Graph(converted.program).signs)
    variants = [(f"tile program {part.group.name}", programs)]
    if any(p.instead is not None for p in programs):
        variants.append(_instead(part.group.name, programs))
    _, bounded = bounded_by(converted, part)
    GroupTest(instance, part.group, variants, part.phases[0].target, record, part.schedule.trips, bounded).probe(seed)
