"""Proof of a plan: every stage of its derivation against the stage before, over finite fields (see `verification`).

The plan's own groups are shrunk to short axes and lowered again with small tiles, so that loops have several trips, tails and
masked tiles. What is shown holds with an error of at most `delta`; what the fields cannot cover is listed, not counted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from pallasfuse import _compat
from pallasfuse.errors import InvalidProgramError, Refusal
from pallasfuse.fusion.deduplicate import deduplicate
from pallasfuse.fusion.graph import Graph
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate_nest, evaluate_over
from pallasfuse.ir.evaluate_tiles import evaluate_tiles_over
from pallasfuse.ir.expr import Apply, postorder
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
from pallasfuse.verification.jaxprs import JaxprEvaluation, NestedEvaluation
from pallasfuse.verification.shrink import Shrinking, dims_of, shrinking
from pallasfuse.verification.value import FINITE, Value
from pallasfuse.verification.visits import wrong_visits

_SHIFTING = frozenset({"exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "sinh", "cosh", "pow"})
_MOST_TRIALS = 20_000
_BATCH_ELEMENTS = 1 << 21
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

    trials: int = 0
    """Of the current batch."""
    comparisons: dict[tuple[str, str], Comparison] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def add(self, stage: str, tensor: str, expected: Value, found: Value) -> None:
        self.comparisons.setdefault((stage, tensor), Comparison()).add(expected, found, self.trials)

    def counterexample(self) -> Counterexample | None:
        for (stage, tensor), comparison in self.comparisons.items():
            if comparison.mismatch is not None:
                m = comparison.mismatch
                return Counterexample(stage, tensor, m.index, m.expected, m.found)
        return None

    def fewest(self) -> int:
        return min((c.fewest for c in self.comparisons.values()), default=0)


def prove(converted: Converted, parts: Sequence[Part], target: Target, *, delta: float = 1e-9, seed: int = 0) -> Proof:
    """Test every stage from the jaxpr to the tile programs.

    Args:
      delta: the error to allow (Mirage, theorem 3).
    """
    return _Proving(converted, parts, target, delta, seed).run()


class _Proving:
    def __init__(self, converted: Converted, parts: Sequence[Part], target: Target, delta: float, seed: int) -> None:
        self.converted, self.target, self.delta, self.seed = converted, target, delta, seed
        self.record = _Record()
        self.uncovered: dict[str, None] = {}
        self.signs = Graph(converted.program).signs
        small = shrinking(converted.program, _wanted(parts))
        if isinstance(small, Refusal):
            if max((_volume(n) for n in converted.program.nests), default=0) > _MOST_ELEMENTS:
                self.uncovered[
                    f"the program has no instance over short axes ({small}): verify it with small arguments"
                ] = None
            small = shrinking(converted.program, {a: a.extent for a in _all_axes(converted.program)})
            assert isinstance(small, Shrinking)
        self.small = small
        self.program: LoopProgram = small.of(converted.program)
        self.groups: list[Group] = [small.of(p.group) for p in parts]
        self.parts = parts
        self.kernels = [self._lowered(g, p.schedule) for g, p in zip(self.groups, parts, strict=True)]
        self.shapes = {
            var: tuple(int(np.prod([small.axis(a).extent for a in dim], dtype=int))
                       for dim in dims_of(_compat.shape_of(var), _axes_of(converted.program, name)))
            for name, var in converted.variable.items()
        }  # fmt: skip

    def _lowered(self, group: Group, schedule: Schedule) -> list[tuple[str, TileProgram]]:
        """The tile programs of a group over short axes, as the target has them."""

        def tile(axis: Axis, actual: int) -> int:
            short = self.small.axis(axis).extent
            return 1 if actual == 1 else short if actual >= axis.extent else -(-short // 2) if short < 5 else 2

        own = tuple((self.small.axis(a), tile(a, t)) for a, t in schedule.grid)
        rolled = tile(schedule.rolled, schedule.rolled_tile)
        short = replace(schedule, grid=own, rolled=self.small.axis(schedule.rolled), rolled_tile=rolled)
        tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in self.program.definitions()}
        try:
            program = lower(group, short, self.target.tails, tensors)
        except (InvalidProgramError, AssertionError) as error:
            self.uncovered[f"{group.name}: not lowered over short axes ({error})"] = None
            return []
        result = [("lowering to tiles", program)]
        if self.target.platform == "gpu":
            result.append(("cheaper arithmetic", arithmetic.rewrite(program, strict=group.strict)))
        return result

    # --- the tests

    def _bounds(self) -> Counterexample | None:
        """The loops of the plan's own tile programs."""
        generator = np.random.default_rng(self.seed)
        for part in self.parts:
            loops = [s for s in part.program.body if isinstance(s, Loop) and s.carries]
            for pass_index, loop in enumerate(loops):
                folds = [f for f in part.group.folds if f.pass_index == pass_index]
                predicates, _ = guards(folds, strict=part.group.strict)
                wrong = wrong_visits(part.program, loop, predicates, generator)
                if wrong is not None:
                    return Counterexample(
                        f"bounds of {part.program.name}", str(loop.axis), (), "every element that counts", wrong
                    )
        return None

    def run(self) -> Proof:
        wrong = self._bounds()
        if wrong is not None:
            return self._conclude(0, 0, 1.0, wrong)
        terms = sizes(self.program)
        largest = max((terms[n] for n in self.program.outputs), key=miss_probability, default=Size(1))
        needed = trials_for(largest, self.delta)
        levels = 1 + _depth(self.program)
        elements = max((_volume(n) for n in self.program.nests), default=1)
        batch = max(32, min(needed + 8, _BATCH_ELEMENTS // elements))
        done = 0
        limit = min(_MOST_TRIALS, 8 * needed + 64)
        while done < limit and self.record.counterexample() is None and not self.uncovered:
            try:
                self._batch(levels, batch, self.seed * 7919 + done)
            except (InvalidProgramError, AssertionError) as error:
                self.uncovered[f"{type(error).__name__}: {error}"] = None
                break
            done += batch
            if self.record.fewest() >= needed:
                break
        return self._conclude(done, needed, miss_probability(largest))

    def _conclude(self, trials: int, needed: int, miss: float, wrong: Counterexample | None = None) -> Proof:
        counterexample = wrong or self.record.counterexample()
        for (stage, tensor), comparison in self.record.comparisons.items():
            if comparison.mismatch is None and comparison.fewest < needed:
                self.uncovered[
                    f"{stage}: {tensor} was determined in {comparison.fewest} of {trials} tests, {needed} are needed"
                ] = None
        fewest = self.record.fewest()
        extents = {a.name: a.extent for a in sorted(_all_axes(self.program))}
        stages = tuple(dict.fromkeys(stage for stage, _ in self.record.comparisons))
        bound = min(1.0, miss**fewest) if counterexample is None else 1.0
        assumed = tuple(f"{n} is {s}" for n, s in self.signs.items() if s in _SIGNED and n in self._reduced())
        return Proof(
            counterexample is None and not self.uncovered, bound, trials, extents, stages,
            tuple(self.record.notes), assumed, tuple(self.uncovered), counterexample,
        )  # fmt: skip

    def _reduced(self) -> set[str]:
        return {n.name for n in self.program.nests if isinstance(n, Nest) and n.is_reduction}

    def _batch(self, levels: int, trials: int, seed: int) -> None:
        fields = FiniteFields(tower(levels, trials, seed))
        self.record.trials = trials
        jaxpr = self.converted.jaxpr
        arguments = [fields.random(self.shapes[v], str(_compat.dtype_of(v))) for v in (*jaxpr.constvars, *jaxpr.invars)]
        evaluation = JaxprEvaluation(fields, self._shape, self.small.number)
        variables = evaluation.run(jaxpr, arguments)
        if not self.uncovered:
            self._inlining(fields, arguments, [evaluation.atom(a, variables) for a in jaxpr.outvars])
        tensors = self._loops(fields, evaluation, variables)
        for name, value in self._deduplicated(tensors, fields):
            self.record.add("removing duplicates", name, tensors[name], value)
        for group in self.groups:
            for name, expected, found in masked_terms(group, tensors, fields):
                self.record.add(f"masks of {group.name}", name, expected, found)
            for split in (False, True):
                stage = f"folds of {group.name}" + (", combined" if split else "")
                for name, value in GroupRun(group, tensors, fields, split=split).run():
                    self.record.add(stage, name, tensors[name], value)
        for group, programs in zip(self.groups, self.kernels, strict=True):
            for stage, program in programs:
                known = {t.name: tensors[t.name] for t in program.inputs}
                back = self.target.tails == "exact"
                for name, value in evaluate_tiles_over(program, known, fields, move_last_block_back=back).items():
                    self.record.add(f"{stage}, {group.name}", name, tensors[name], value)
        self.record.notes.update(fields.notes)

    def _shape(self, atom: Any) -> tuple[int, ...]:
        return self.shapes[atom] if atom in self.shapes else _compat.shape_of(atom)

    def _inlining(self, fields: FiniteFields, arguments: Sequence[Value], results: Sequence[Value]) -> None:
        """Calls inlined, dead code dropped: the original over the same arguments."""
        jaxpr, original = self.converted.jaxpr, self.converted.original
        evaluation = NestedEvaluation(fields, self._shape, self.small.number, jaxpr.eqns)
        given = zip(jaxpr.consts, arguments, strict=False)
        evaluation.constants = {id(array): value for array, value in given}
        values = [evaluation.held(c) for c in original.consts]
        variables = evaluation.run(original, [*values, *arguments[len(jaxpr.constvars) :]])
        for n, (atom, expected) in enumerate(zip(original.outvars, results, strict=True)):
            self.record.add("inlining of calls", f"result {n}", evaluation.atom(atom, variables), expected)

    def _loops(
        self, fields: FiniteFields, evaluation: JaxprEvaluation, variables: Mapping[Var, Value]
    ) -> dict[str, Value]:
        """Every tensor of the loop program; each is compared with its variable."""
        maker: dict[Var, JaxprEqn] = {v: e for e in self.converted.jaxpr.eqns for v in e.outvars}
        variable = self.converted.variable
        tensors = {
            t.name: variables[variable[t.name]].reshape(tuple(a.extent for a in t.axes)) for t in self.program.inputs
        }
        for nest in self.program.nests:
            extents = tuple(a.extent for a in nest.axes)
            expected = variables[variable[nest.name]].reshape(extents)
            if isinstance(nest, External):
                tensors[nest.name] = self._external(nest, maker[variable[nest.name]], tensors, evaluation).reshape(
                    extents
                )
            else:
                tensors[nest.name] = evaluate_nest(nest, tensors, fields).typed(nest.dtype)
            self.record.add("conversion to loops", nest.name, expected, tensors[nest.name])
            tensors[nest.name] = self._assume(nest.name, tensors[nest.name], fields)
        return tensors

    def _external(
        self, nest: External, eqn: JaxprEqn, tensors: Mapping[str, Value], evaluation: JaxprEvaluation
    ) -> Value:
        names = {v: n for n, v in self.converted.variable.items()}

        def operand(atom: Any) -> Value:
            if isinstance(atom, Literal):
                return evaluation.atom(atom, {})
            return tensors[names[atom]].reshape(self.shapes[atom])

        results = evaluation.equation(eqn, [operand(a) for a in eqn.invars])
        return results[eqn.outvars.index(self.converted.variable[nest.name])]

    def _assume(self, name: str, value: Value, fields: FiniteFields) -> Value:
        """Facts that the derivation relies on: a trial in which one does not hold proves nothing."""
        sign = self.signs.get(name)
        if sign not in _SIGNED or not value.levels or value.lowest < 0 or value.real is not None:
            return value
        residue = value.levels[value.lowest]
        assert residue is not None
        square = is_square(residue, fields.tower.primes[value.lowest])
        wrong = square if sign in ("negative", "nonpositive") else ~square
        return replace(value, taint=value.taint | (wrong & (value.kind == FINITE)))

    def _deduplicated(self, tensors: Mapping[str, Value], fields: FiniteFields) -> Iterator[tuple[str, Value]]:
        short = self.small.of(deduplicate(self.converted.program))
        for before, nest in zip(self.program.nests, short.nests, strict=True):
            if isinstance(nest, Nest) and nest is not before and nest != before:
                yield nest.name, evaluate_nest(nest, tensors, fields).typed(nest.dtype)


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


def _axes_of(program: LoopProgram, name: str) -> tuple[Axis, ...]:
    return next(d.axes for d in program.definitions() if d.name == name)


def _volume(nest: Nest | External) -> int:
    space = nest.axes if isinstance(nest, External) else (*nest.axes, *nest.reduced)
    return int(np.prod([a.extent for a in space], dtype=int))


def _wanted(parts: Sequence[Part]) -> dict[Axis, int]:
    """Extents at which loops have several trips, a tail, and blocks that overlap."""
    wanted: dict[Axis, int] = {}

    def want(axis: Axis, extent: int) -> None:
        wanted[axis] = max(wanted.get(axis, 2), extent)

    for part in parts:
        want(part.schedule.rolled, 5 if part.schedule.trips > 1 else 3)
        for axis, tile in part.schedule.grid:
            want(axis, 3 if 1 < tile < axis.extent else 2)
    return wanted


def _depth(program: LoopProgram) -> int:
    """How deep exponentials and logarithms nest."""
    depths: dict[str, int] = {}
    deepest = 0
    for nest in program.nests:
        if isinstance(nest, External):
            depths[nest.name] = 0
            continue
        values: dict[Any, int] = {}
        for node in postorder(nest.body):
            below = max((values[a] for a in node.args), default=0)
            own = max((depths.get(t, 0) for t in node.tensors), default=0) if not node.args else 0
            values[node] = max(below, own) + (isinstance(node, Apply) and node.op in _SHIFTING)
        depths[nest.name] = values[nest.body]
        deepest = max(deepest, values[nest.body])
    return deepest
