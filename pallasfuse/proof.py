"""Proof of a plan: every stage of its derivation against the stage before (see `verification`).

- inlining, removal of duplicates: the same term for every result, with every operation uninterpreted;
- conversion: each nest against its equation, on random operands in the finite fields;
- each group: its folds, its masks and its tile programs against the nests that it replaces, on random inputs of the group. The
  group is shrunk to short axes and lowered again with small tiles, so that loops have several trips, tails and masked tiles;
- the bounds of the loops of the plan's own tile programs, at their actual extents.

A plan that is wrong has a part that is wrong, which passes with a probability of at most `delta`. What cannot be covered is
listed, and the plan does not count as proven.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.extend.core import Literal, Var

from pallasfuse import _compat
from pallasfuse.errors import InvalidProgramError, Refusal
from pallasfuse.fusion.deduplicate import deduplicate
from pallasfuse.fusion.graph import Graph
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate_nest, evaluate_over, evaluate_program
from pallasfuse.ir.evaluate_tiles import evaluate_tiles_over
from pallasfuse.ir.expr import Apply, Expr, postorder
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import External, LoopProgram, Nest, Tensor
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tile_program import Loop, TileProgram
from pallasfuse.jaxpr_frontend import Converted
from pallasfuse.targets import Target
from pallasfuse.tiling import arithmetic
from pallasfuse.tiling.bounds import guards
from pallasfuse.tiling.lower import lower
from pallasfuse.verification.bound import Size, miss_probability, sizes, trials_for
from pallasfuse.verification.compare import Comparison
from pallasfuse.verification.domain import FiniteFields
from pallasfuse.verification.field import is_square, tower
from pallasfuse.verification.folds import GroupRun
from pallasfuse.verification.jaxprs import Equations
from pallasfuse.verification.shrink import Shrinking, dims_of, shrinking
from pallasfuse.verification.structure import Structure, terms
from pallasfuse.verification.value import FINITE, Value
from pallasfuse.verification.visits import wrong_visits

_EXPONENTIALS = frozenset({"exp", "exp2", "expm1", "sinh", "cosh", "pow"})
_LOGARITHMS = frozenset({"log", "log1p"})
_ALGEBRAIC = frozenset({"add", "sub", "mul", "div", "neg", "integer_pow", "square", "abs", "sign", "sqrt", "rsqrt", "cbrt",
                        "select", "convert", "max", "min"})  # fmt: skip
"""Operations that keep the levels of their arguments; all others give fresh values."""
_MOST_TRIALS = 20_000
_BATCH_ELEMENTS = 1 << 21
_MANY_TRIALS = 3000
"""More than these are avoided by shorter axes, if possible."""
_MOST_ELEMENTS = 1 << 12
"""Of a nest that is tested at its actual extents."""


@dataclass(frozen=True, slots=True)
class Counterexample:
    """Where a stage computes something else than the stage before."""

    stage: str
    tensor: str
    index: tuple[int, ...]
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.tensor}{list(self.index)} is {self.found}, expected {self.expected}"


@dataclass(frozen=True)
class Proof:
    """What random tests over finite fields say about a plan.

    `bound`: the probability that two different programs would have passed, at most. `extents`: of the instance that was
    tested, by axis. `opaque`: functions that were treated as arbitrary ones. `uncovered`: what no test speaks for.
    """

    holds: bool
    bound: float
    trials: int
    extents: Mapping[str, int]
    stages: tuple[str, ...]
    opaque: tuple[str, ...]
    assumed: tuple[str, ...]
    uncovered: tuple[str, ...]
    counterexample: Counterexample | None


@dataclass(frozen=True, slots=True)
class Part:
    """One kernel of a plan: its group and how it is tiled."""

    group: Group
    schedule: Schedule
    program: TileProgram


@dataclass
class _Record:
    """Comparisons by stage and tensor, in the order in which they were first made."""

    comparisons: dict[tuple[str, str], Comparison] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    uncovered: dict[str, None] = field(default_factory=dict)
    stages: dict[str, None] = field(default_factory=dict)
    wrong: Counterexample | None = None
    bound: float = 0.0
    trials: int = 0

    def counterexample(self) -> Counterexample | None:
        if self.wrong is not None:
            return self.wrong
        for (stage, tensor), comparison in self.comparisons.items():
            if comparison.mismatch is not None:
                m = comparison.mismatch
                return Counterexample(stage, tensor, m.index, m.expected, m.found)
        return None

    def settle(self, needed: int, miss: float, trials: int) -> None:
        """Take stock of comparisons that needed `needed` trials each."""
        for (stage, tensor), comparison in self.comparisons.items():
            if comparison.mismatch is None and comparison.fewest < needed:
                text = f"{stage}: {tensor} was determined in {comparison.fewest} of {trials} tests, {needed} are needed"
                self.uncovered[text] = None
        if self.counterexample() is None:
            fewest = min((c.fewest for c in self.comparisons.values()), default=needed)
            self.bound = max(self.bound, min(1.0, miss**fewest))
            self.trials = max(self.trials, trials)
            self.comparisons.clear()


def prove(converted: Converted, parts: Sequence[Part], target: Target, *, delta: float = 1e-9, seed: int = 0) -> Proof:
    """Test every stage from the jaxpr to the tile programs.

    Args:
      delta: the probability with which a wrong plan may pass (Mirage, theorem 3).
    """
    record = _Record()
    instance: _Instance | None = None
    try:
        for stage in (_inlining, _duplicates):
            stage(converted, record)
        for part in parts:
            _bounds(part, seed, record)
        instance = _Instance.of(converted, parts, record)
        if instance is not None:
            _conversion(instance, delta, seed, record)
            for number, part in enumerate(parts):
                if record.counterexample() is None:
                    _GroupTest(instance, part, target, record).run(delta, seed + 31 * number)
    except (InvalidProgramError, AssertionError, RecursionError) as error:
        record.uncovered[
            f"the verifier failed ({type(error).__name__}: {error}): a bug in pallasfuse, please report it"
        ] = None
    found = record.counterexample()
    return Proof(
        found is None and not record.uncovered, 1.0 if found else record.bound, record.trials,
        {} if instance is None else {a.name: instance.small.axis(a).extent for a in sorted(_all_axes(converted.program))},
        tuple(record.stages), tuple(record.notes), () if instance is None else instance.assumed,
        tuple(record.uncovered), found,
    )  # fmt: skip


# --- stages without numbers


def _inlining(converted: Converted, record: _Record) -> None:
    """Calls inlined, dead code dropped."""
    record.stages["inlining of calls"] = None
    inputs = [hash(("input", n)) for n in range(len(converted.original.invars))]
    before, after = (terms(j, inputs) for j in (converted.original, converted.jaxpr))
    for n, (a, b) in enumerate(zip(before, after, strict=True)):
        if a != b:
            record.wrong = Counterexample(
                "inlining of calls", f"result {n}", (), "the term of the traced function", "another"
            )


def _duplicates(converted: Converted, record: _Record) -> None:
    """Reductions that are computed once instead of twice."""
    program = converted.program
    small = shrinking(program, {})
    if isinstance(small, Refusal):
        return
    record.stages["removing duplicates"] = None
    domain = Structure()
    results = []
    for version in (program, deduplicate(program)):
        short: LoopProgram = small.of(version)
        inputs = {t.name: domain.variable(t.name, [a.extent for a in t.axes]) for t in short.inputs}

        def external(nest: External, _: Mapping[str, Any]) -> Any:
            return domain.variable(nest.name, [a.extent for a in nest.axes])

        results.append(evaluate_program(short, inputs, domain, external))
    for name, value in results[0].items():
        if not np.array_equal(value, results[1][name]):
            record.wrong = Counterexample("removing duplicates", name, (), "its own term", "another reduction's")
            return


def _bounds(part: Part, seed: int, record: _Record) -> None:
    """The loops of the plan's own tile program."""
    generator = np.random.default_rng(seed)
    loops = [s for s in part.program.body if isinstance(s, Loop) and s.carries]
    for pass_index, loop in enumerate(loops):
        stage = f"bounds of {part.program.name}"
        record.stages[stage] = None
        folds = [f for f in part.group.folds if f.pass_index == pass_index]
        predicates, _ = guards(folds, strict=part.group.strict)
        wrong = wrong_visits(part.program, loop, predicates, generator)
        if wrong is not None and record.wrong is None:
            record.wrong = Counterexample(stage, str(loop.axis), (), "every element that counts", wrong)


# --- stages over finite fields


@dataclass(frozen=True)
class _Instance:
    """A program over short axes."""

    converted: Converted
    program: LoopProgram
    small: Shrinking
    signs: Mapping[str, str]

    @staticmethod
    def of(converted: Converted, parts: Sequence[Part], record: _Record) -> "_Instance | None":
        program = converted.program
        signs = Graph(program).signs
        for longest in (5, 3):
            small = shrinking(program, _wanted(parts, longest))
            if isinstance(small, Refusal):
                if max((_volume(n) for n in program.nests), default=0) > _MOST_ELEMENTS:
                    reason = f"the program has no instance over short axes ({small}): verify it with small arguments"
                    record.uncovered[reason] = None
                    return None
                small = shrinking(program, {a: a.extent for a in _all_axes(program)})
                assert isinstance(small, Shrinking)
                break
            groups = [small.of(p.group) for p in parts]
            short: LoopProgram = small.of(program)
            if all(_needed(short, g, 1e-9)[0] <= _MANY_TRIALS for g in groups):
                break
        assert isinstance(small, Shrinking)
        return _Instance(converted, small.of(program), small, signs)

    @property
    def assumed(self) -> tuple[str, ...]:
        reduced = {n.name for n in self.program.nests if isinstance(n, Nest) and n.is_reduction}
        return tuple(f"{n} is {s}" for n, s in self.signs.items() if s in _SIGNED and n in reduced)

    def assume(self, name: str, value: Value, fields: FiniteFields) -> Value:
        """Facts that the derivation relies on: a trial in which one does not hold proves nothing."""
        sign = self.signs.get(name)
        if sign not in _SIGNED or not value.levels or value.lowest < 0 or value.real is not None:
            return value
        residue = value.levels[value.lowest]
        assert residue is not None
        square = is_square(residue, fields.tower.primes[value.lowest])
        wrong = square if sign in ("negative", "nonpositive") else ~square
        return replace(value, taint=value.taint | (wrong & (value.kind == FINITE)))

    def draw(self, name: str, axes: Sequence[Axis], dtype: str, fields: FiniteFields) -> Value:
        """An arbitrary value of a tensor; a positive one where that is a fact."""
        value = fields.random([a.extent for a in axes], dtype)
        return fields.squares(value) if self.signs.get(name) in ("positive", "nonnegative") and value.levels else value


def _conversion(instance: _Instance, delta: float, seed: int, record: _Record) -> None:
    """Every nest against the equation that it comes from, on random operands."""
    stage = "conversion to loops"
    record.stages[stage] = None
    converted = instance.converted
    maker = {v: e for e in converted.jaxpr.eqns for v in e.outvars}
    names = {v: n for n, v in converted.variable.items()}
    defined = {d.name: d for d in instance.program.definitions()}
    actual = {d.name: d for d in converted.program.definitions()}
    miss = max((miss_probability(s) for s in _each_alone(instance.program)), default=0.0)
    needed = max(2, math.ceil(math.log(delta) / math.log(miss))) if miss else 2
    fields = FiniteFields(tower(3, needed + 8, seed))
    shapes: dict[Var, tuple[int, ...]] = {}
    for name, var in converted.variable.items():
        dims = dims_of(_compat.shape_of(var), actual[name].axes)
        shapes[var] = tuple(math.prod(instance.small.axis(a).extent for a in dim) for dim in dims)
    equations = Equations(fields, lambda atom: shapes[atom], instance.small.number)
    for nest in instance.program.nests:
        if isinstance(nest, External):
            continue
        variable = converted.variable[nest.name]
        eqn = maker[variable]
        values: dict[str, Value] = {}
        operands = []
        for atom in eqn.invars:
            if isinstance(atom, Literal):
                operands.append(equations.literal(atom))
            else:
                name = names[atom]
                if name not in values:
                    values[name] = fields.random([a.extent for a in defined[name].axes], defined[name].dtype)
                operands.append(values[name].reshape(shapes[atom]))
        expected = equations.equation(eqn, operands)
        if expected is None:
            record.uncovered[f"{stage}: {nest.name}, a {eqn.primitive.name} at {nest.source}"] = None
            continue
        found = evaluate_nest(nest, values, fields).typed(nest.dtype)
        shaped = expected.reshape(tuple(a.extent for a in nest.axes))
        record.comparisons.setdefault((stage, nest.name), Comparison()).add(shaped, found, fields.tower.trials)
    record.settle(needed, miss, fields.tower.trials)


class _GroupTest:
    """A group against the nests that it replaces, on random inputs of the group."""

    def __init__(self, instance: _Instance, part: Part, target: Target, record: _Record) -> None:
        self.instance, self.target, self.record = instance, target, record
        self.group: Group = instance.small.of(part.group)
        self.replaced = _replaced(instance.program, self.group)
        self.programs = self._lowered(part.schedule)

    def _lowered(self, schedule: Schedule) -> list[tuple[str, TileProgram]]:
        """The tile programs of the group over short axes, as the target has them."""
        small, group = self.instance.small, self.group

        def tile(axis: Axis, actual: int) -> int:
            short = small.axis(axis).extent
            return 1 if actual == 1 else short if actual >= axis.extent else min(2, -(-short // 2))

        own = tuple((small.axis(a), tile(a, t)) for a, t in schedule.grid)
        rolled = tile(schedule.rolled, schedule.rolled_tile)
        short = replace(schedule, grid=own, rolled=small.axis(schedule.rolled), rolled_tile=rolled)
        tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in self.instance.program.definitions()}
        program = lower(group, short, self.target.tails, tensors)
        result = [(f"lowering of {group.name}", program)]
        if self.target.platform == "gpu":
            result.append((f"cheaper arithmetic of {group.name}", arithmetic.rewrite(program, strict=group.strict)))
        return result

    def run(self, delta: float, seed: int) -> None:
        """Batches of trials until every element is determined often enough, or a stage is found to be wrong."""
        record = self.record
        needed, miss = _needed(self.instance.program, self.group, delta)
        elements = max((_volume(n) for n in self.replaced), default=1)
        batch = max(32, min(needed + 8, _BATCH_ELEMENTS // elements))
        done = 0
        while done < min(_MOST_TRIALS, 8 * needed + 64) and record.counterexample() is None:
            self._batch(FiniteFields(tower(_levels(self.replaced), batch, seed * 7919 + done)))
            done += batch
            if min(c.fewest for c in record.comparisons.values()) >= needed:
                break
        record.settle(needed, miss, done)

    def _compare(self, stage: str, tensor: str, expected: Value, found: Value, fields: FiniteFields) -> None:
        self.record.stages[stage] = None
        comparison = self.record.comparisons.setdefault((stage, tensor), Comparison())
        comparison.add(expected, found, fields.tower.trials)

    def _batch(self, fields: FiniteFields) -> None:
        group, instance = self.group, self.instance
        defined = {d.name: d for d in instance.program.definitions()}
        tensors = {t: instance.draw(t, defined[t].axes, defined[t].dtype, fields) for t in group.inputs}
        for nest in self.replaced:
            tensors[nest.name] = instance.assume(
                nest.name, evaluate_nest(nest, tensors, fields).typed(nest.dtype), fields
            )
        for name, expected, found in masked_terms(group, tensors, fields):
            self._compare(f"masks of {group.name}", name, expected, found, fields)
        for split in (False, True):
            stage = f"folds of {group.name}" + (", combined" if split else "")
            for name, value in GroupRun(group, tensors, fields, split=split).run():
                self._compare(stage, name, tensors[name], value, fields)
        for stage, program in self.programs:
            known = {t.name: tensors[t.name] for t in program.inputs}
            back = self.target.tails == "exact"
            for name, value in evaluate_tiles_over(program, known, fields, move_last_block_back=back).items():
                self._compare(stage, name, tensors[name], value, fields)
        self.record.notes.update(fields.notes)


def _replaced(program: LoopProgram, group: Group) -> list[Nest]:
    """The nests between the inputs of a group and what it computes, in order."""
    nests = {n.name: n for n in program.nests}
    wanted = [n.name for n in (*(f.nest for f in group.folds), *group.inner, *group.outputs)]
    found: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name in found or name in group.inputs:
            continue
        nest = nests.get(name)
        if not isinstance(nest, Nest):
            raise InvalidProgramError(f"group {group.name} computes {name}, which is not a nest")
        found.add(name)
        wanted.extend(nest.reads)
    return [n for n in program.nests if isinstance(n, Nest) and n.name in found]


def _needed(program: LoopProgram, group: Group, delta: float) -> tuple[int, float]:
    """(trials, the probability that one misses a difference) for a group."""
    replaced = _replaced(program, group)
    inputs = tuple(Tensor(d.name, d.axes, d.dtype) for d in program.definitions() if d.name in group.inputs)
    outputs = tuple(n.name for n in group.outputs)
    known = sizes(LoopProgram(inputs, tuple(replaced), outputs))
    largest = max((known[n] for n in (*outputs, *(f.name for f in group.folds))), key=miss_probability)
    return trials_for(largest, delta), miss_probability(largest)


def _each_alone(program: LoopProgram) -> Iterator[Size]:
    """The size of every nest over operands that are variables of their own."""
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in program.definitions()}
    for nest in program.nests:
        if isinstance(nest, Nest):
            yield sizes(LoopProgram(tuple(tensors[t] for t in nest.reads), (nest,), (nest.name,)))[nest.name]


def masked_terms(
    group: Group, tensors: Mapping[str, Value], fields: FiniteFields
) -> Iterator[tuple[str, Value, Value]]:
    """(accumulator, identity, terms where a mask by which tiles are skipped is false), at random frames."""
    run = GroupRun(group, tensors, fields, split=False)
    known = dict(tensors)
    for name, value in run.run():
        known[name] = value
    known |= run.tensors
    for pass_index in range(group.passes):
        folds = [f for f in group.folds if f.pass_index == pass_index]
        for predicate in guards(folds, strict=group.strict)[0]:
            for fold in folds:
                frames = {f.name: run.random_frame(f) for f in fold.frames}
                space = fold.nest.axes + fold.nest.reduced
                for a in fold.accumulators:
                    identity = fields.constant(a.reducer.identity(a.dtype), a.dtype, len(space))
                    term = evaluate_over(a.term, space, known | frames, fields)
                    kept = evaluate_over(predicate, space, {}, fields)
                    extents = tuple(x.extent for x in space)
                    found = fields.apply("select", [kept, identity, term], a.dtype)
                    yield f"{a.name} where {predicate} is false", identity.broadcast(extents), found.broadcast(extents)


_SIGNED = ("positive", "nonnegative", "negative", "nonpositive")


def _all_axes(program: LoopProgram) -> set[Axis]:
    axes = {a for d in program.definitions() for a in d.axes}
    return axes | {a for n in program.nests if isinstance(n, Nest) for a in n.reduced}


def _volume(nest: Nest | External) -> int:
    space = nest.axes if isinstance(nest, External) else (*nest.axes, *nest.reduced)
    return int(np.prod([a.extent for a in space], dtype=int))


def _wanted(parts: Sequence[Part], longest: int) -> dict[Axis, int]:
    """Extents at which loops have several trips, a tail, and blocks that overlap."""
    wanted: dict[Axis, int] = {}

    def want(axis: Axis, extent: int) -> None:
        wanted[axis] = max(wanted.get(axis, 2), extent)

    for part in parts:
        want(part.schedule.rolled, longest if part.schedule.trips > 1 else 3)
        for axis, tile in part.schedule.grid:
            want(axis, 3 if 1 < tile < axis.extent else 2)
    return wanted


def _levels(nests: Sequence[Nest]) -> int:
    """How many residues a number needs, so that each value has one: those of an exponential lack the last one of its argument, a
    logarithm has no first one."""
    known: dict[str, tuple[int, int]] = {}  # (the first level, how many are lacking at the end)
    most = 0
    for nest in nests:
        values: dict[Expr, tuple[int, int]] = {}
        for node in postorder(nest.body):
            below = [values[a] for a in node.args] or [known.get(t, (0, 0)) for t in node.tensors]
            first, lacking = (max((b[n] for b in below), default=0) for n in (0, 1))
            match node:
                case Apply(op) if op in _EXPONENTIALS:
                    values[node] = max(0, first - 1), lacking + 1
                case Apply(op) if op in _LOGARITHMS:
                    values[node] = first + 1, max(0, lacking - 1)
                case Apply(op) if op not in _ALGEBRAIC:
                    values[node] = 0, 0
                case _:
                    values[node] = first, lacking
            most = max(most, sum(values[node]))
        known[nest.name] = values[nest.body]
    return 1 + most
