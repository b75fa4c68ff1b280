"""Stages of the whole program: inlining, conversion, removal of duplicates; and the bounds of loops."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from pallasfuse import _compat
from pallasfuse._compat import Literal, Var
from pallasfuse.errors import InvalidProgramError, Refusal
from pallasfuse.fusion.inline import deduplicate
from pallasfuse.fusion.joined_axes import joined, joins_of, with_joined_axes, with_left
from pallasfuse.ir.evaluate import evaluate_nest, evaluate_program
from pallasfuse.ir.expr import Expr
from pallasfuse.ir.loop_program import External, LoopProgram, Nest, verify
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Loop, not_flat
from pallasfuse.jaxpr_frontend import Converted
from pallasfuse.lowering import lowered
from pallasfuse.proof.deciding import Tests, decide
from pallasfuse.proof.instance import MOST_ELEMENTS, Instance, all_axes, nest_volume
from pallasfuse.proof.masks import bounds_of_loops
from pallasfuse.proof.result import Counterexample, PlannedKernel, Record
from pallasfuse.tiling.bounds import guards_of
from pallasfuse.tiling.tree_values import Bounded
from pallasfuse.verification.bound import Size, miss_probability, sizes, trials_for
from pallasfuse.verification.domain import FiniteFields
from pallasfuse.verification.field import Chain, tower
from pallasfuse.verification.jaxprs import Equations
from pallasfuse.verification.shrink import dims_of, shrinking
from pallasfuse.verification.structure import Positions, Structure, terms
from pallasfuse.verification.value import Value
from pallasfuse.verification.visits import ranges_of, wrong_visits

_MOST_TESTS = 1 << 10
"""The most tests of a single nest, which is of low degree."""


def inlining(converted: Converted, record: Record) -> None:
    """Calls inlined, dead code dropped."""
    record.stages["inlining of calls"] = None
    inputs = [hash(("input", n)) for n in range(len(converted.original.invars))]
    before, after = (terms(j, inputs) for j in (converted.original, converted.whole or converted.jaxpr))
    for n, (a, b) in enumerate(zip(before, after, strict=True)):
        if a != b:
            record.wrong = Counterexample(
                "inlining of calls", f"result {n}", (), "the term of the traced function", "another"
            )


def duplicates(converted: Converted, record: Record) -> None:
    """Reductions that are computed once instead of twice."""
    program = converted.program
    small = shrinking(program, {})
    if isinstance(small, Refusal) and max((nest_volume(n) for n in program.nests), default=0) <= MOST_ELEMENTS:
        small = shrinking(program, {a: a.extent for a in all_axes(program)})
    if isinstance(small, Refusal):
        record.uncovered[f"removing duplicates: {small}"] = None
        return
    record.stages["removing duplicates"] = None
    domain = Structure()
    results = []
    for version in (program, deduplicate(program)):
        short: LoopProgram = small.of(version)
        results.append(_terms(short, domain))
    for name, value in results[0].items():
        if not np.array_equal(value, results[1][name]):
            record.wrong = Counterexample("removing duplicates", name, (), "its own term", "another reduction's")
            return


def joining(converted: Converted, record: Record) -> None:
    """Neighbouring axes that became one."""
    written = converted.with_axes_apart.program
    if with_joined_axes(written, leaves_reshapes=converted.leaves_reshapes) != converted.program:
        record.wrong = Counterexample("joining axes", "the program", (), "what joining makes of it", "another")
        return
    short = written
    small = shrinking(written, {})
    if not isinstance(small, Refusal):
        short = small.of(written)
    elif max((nest_volume(n) for n in written.nests), default=0) > MOST_ELEMENTS:
        record.uncovered[f"joining axes: {small}"] = None
        return
    # what is small there need not be so over short axes
    joins = joins_of(written, leaves_reshapes=converted.leaves_reshapes)
    try:
        short_joined = verify(joined(short, joins))
    except InvalidProgramError as error:
        # a factor of positions that is not short in step with the axes that it counts
        record.uncovered[f"joining axes: they are not one over short axes ({error})"] = None
        return
    record.stages["joining axes"] = None
    domain = Positions()  # positions along joined axes are not added up
    before, after = _terms(with_left(short, joins), domain), _terms(short_joined, domain)
    for name, value in before.items():
        if not np.array_equal(value, np.reshape(after[name], np.shape(value))):
            record.wrong = Counterexample("joining axes", name, (), "its own term", "another")
            return


def _terms(program: LoopProgram, domain: Structure) -> dict[str, Any]:
    """Every tensor of a program as terms; inputs, and what XLA computes, are variables, numbered row by row."""

    def variable(node: Tensor | External) -> Any:
        return domain.variable(node.name, [a.extent for a in node.axes])

    return evaluate_program(program, {t.name: variable(t) for t in program.inputs}, domain, lambda e, _: variable(e))


def bounds(converted: Converted, part: PlannedKernel, seed: int, record: Record) -> None:
    """The loops of the plan's own tile program."""
    if part.schedule.tree:
        _bounds_of_tree(converted, part, seed, record)
        return
    generator = np.random.default_rng(seed)
    loops = [(phase.program, s) for phase in part.phases for s in phase.program.body if isinstance(s, Loop)]
    for pass_index, (program, loop) in enumerate(loops):
        stage = f"bounds of {program.name}"
        record.stages[stage] = None
        several = not_flat(program.body)
        if several is not None:  # which masks hide what of an inner loop is not known here
            record.uncovered[f"{stage}: {several}"] = None
            continue
        # a loop that carries nothing stores outputs: every position counts
        predicates: tuple[Expr, ...] = ()
        sure: tuple[Expr, ...] = ()
        if loop.carries:
            known, ranges = guards_of(part.group, pass_index, ranged=part.schedule.ranges), ranges_of(program, loop)
            predicates = (*known.predicates, *(r.covers() for r in ranges))
            # inside the ranges of solid rows everything is true that the pass before the kernel looked at
            implied = known.ranged if any(r.predicate is known.visible for r in ranges) else ()
            sure = (*(p for p in known.predicates if p not in implied), *(r.fills() for r in ranges))
        wrong = wrong_visits(program, loop, predicates, generator, sure)
        if wrong is not None and record.wrong is None:
            record.wrong = Counterexample(stage, str(loop.axis), (), "every element that counts", wrong)


def _bounds_of_tree(converted: Converted, part: PlannedKernel, seed: int, record: Record) -> None:
    """The loops of a tree that masks bound, as its lowering makes them: `groups.as_lowered` compares that with the plan."""
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in converted.program.definitions()}
    bounded: list[Bounded] = []
    for program in lowered(part.phases[0].target, part.group, part.schedule, tensors, bounded=bounded):
        bounds_of_loops(program, bounded, seed, record)


def conversion(instance: Instance, delta: float, seed: int, record: Record) -> None:
    """Every nest against the equation that it comes from, on random operands."""
    miss = max((miss_probability(s) for s in _each_alone(instance.program)), default=0.0)
    needed = max((trials_for(s, delta) for s in _each_alone(instance.program)), default=2)

    def over_fields(record: Record, chain: Chain) -> Tests:
        fields = FiniteFields(tower(3, min(needed, _MOST_TESTS) + 8, seed, chain))
        _convert(instance, fields, record)
        return Tests(needed, miss, fields.tower.trials, fields.constants)

    def once(record: Record, fields: FiniteFields) -> None:
        _convert(instance, fields, record)

    ordered = any(isinstance(n, Nest) and n.internal for n in instance.program.nests)
    tests = decide(record, instance.program, seed, over_fields, once, ordered=ordered)
    record.settle(tests.needed, tests.miss, tests.made)


def short_shapes(instance: Instance) -> dict[Var, tuple[int, ...]]:
    """The shapes of the variables of a converted jaxpr over short axes."""
    converted = instance.converted
    actual = {d.name: d for d in converted.program.definitions()}
    shapes: dict[Var, tuple[int, ...]] = {}
    for name, var in converted.variable.items():
        dims = dims_of(_compat.shape_of(var), actual[name].axes)
        shapes[var] = tuple(math.prod(instance.small.axis(a).extent for a in dim) for dim in dims)
    return shapes


def _convert(instance: Instance, fields: FiniteFields, record: Record) -> None:
    stage = "conversion to loops"
    record.stages[stage] = None
    converted = instance.converted
    maker = {v: e for e in converted.jaxpr.eqns for v in e.outvars}
    names = {v: n for n, v in converted.variable.items()}
    defined = {d.name: d for d in instance.program.definitions()}
    shapes = short_shapes(instance)
    equations = Equations(fields, lambda atom: shapes[atom], instance.small.number)
    steps: list[Nest] = []  # of the operation that the next nest is the last one of
    for nest in instance.program.nests:
        if isinstance(nest, External):
            continue
        if nest.internal:
            steps.append(nest)
            continue
        variable = converted.variable[nest.name]
        eqn = maker[variable]
        values: dict[str, Value] = {}

        def operand(atom: Any, nest: Nest = nest, values: dict[str, Value] = values) -> Value | None:
            """A random value; of what the nest reads in another form, what its equation makes of that."""
            if isinstance(atom, Literal):
                return equations.literal(atom)
            name = names[atom]
            if nest.picks and name not in nest.reads and atom in maker:
                made = [v for a in maker[atom].invars if (v := operand(a)) is not None]
                return equations.equation(maker[atom], made) if len(made) == len(maker[atom].invars) else None
            if name not in values:
                values[name] = fields.random([a.extent for a in defined[name].axes], defined[name].dtype)
            return values[name].reshape(shapes[atom])

        before, steps = steps, []
        operands = [operand(atom) for atom in eqn.invars]
        known = [v for v in operands if v is not None]
        expected = equations.equation(eqn, known) if len(known) == len(operands) else None
        if expected is None:
            record.uncovered[f"{stage}: {nest.name}, a {eqn.primitive.name} at {nest.source}"] = None
            continue
        for step in before:
            values[step.name] = evaluate_nest(step, values, fields).typed(step.dtype)
        found = evaluate_nest(nest, values, fields).typed(nest.dtype)
        shaped = expected.reshape(tuple(a.extent for a in nest.axes))
        record.compare(stage, nest.name, shaped, found, fields.tower.trials)


def _each_alone(program: LoopProgram) -> Iterator[Size]:
    """The size of every nest over operands that are variables of their own."""
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in program.definitions()}
    for nest in program.nests:
        if isinstance(nest, Nest):
            yield sizes(LoopProgram(tuple(tensors[t] for t in nest.reads), (nest,), (nest.name,)))[nest.name]
