"""Proof of plans: what is right is proven for every target, what is wrong is refuted at the stage that broke it."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from benchmarks.cases import all_cases
from pallasfuse.first_time import known
from pallasfuse.form_choice import Placements, choose_groups
from pallasfuse.ir.expr import Read, apply, const, mul, postorder, read, sub, substitute
from pallasfuse.ir.fold import OLD
from pallasfuse.ir.tile_program import Let, Load, Loop, Store
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import prove_plan, schedule_grouping
from pallasfuse.proof import Counterexample, PlannedKernel, Proof, deciding, groups, prove, stages
from pallasfuse.proof.result import Record
from pallasfuse.targets import INTERPRET, TRITON, XLA_CPU, Target
from tests.ir.nested_programs import EXAMPLES
from tests.programs_by_name import PROGRAMS, attention, softmax

pytestmark = pytest.mark.any_jax

TARGETS = {t.name: t for t in (XLA_CPU, INTERPRET, TRITON)}
"""Whatever is legal is fused."""
TILES = tuple((a, 4 if a == "i" else 8) for a in "ijklmno")

DELTA = {"xla": 1e-9, "interpret": 1e-2, "triton": 1e-2}
"""The bound that is claimed on one target; fewer of the same tests on the others."""


@cache
def plan(name: str, target: str = "xla", parts: int | None = None):
    case = PROGRAMS[name]
    arguments = [jax.ShapeDtypeStruct(s, case.dtype) for s in case.shapes]
    return plan_of(case.function, arguments, TARGETS[target], FuseOptions(tiles=TILES, parts=parts))


def plan_of(function, arguments, target: Target = TARGETS["xla"], options: FuseOptions = FuseOptions()):  # noqa: B008
    converted = convert(jax.make_jaxpr(function)(*arguments))
    placements = Placements(converted, target, options)
    return schedule_grouping(placements, choose_groups(placements))


def parts_of(found):
    return [PlannedKernel(k.group, k.schedule, k.phases) for k in found.kernels]


def with_body(part, body):
    """The same part, whose first phase does something else."""
    first, *rest = part.phases
    return replace(part, phases=(replace(first, program=replace(first.program, body=body)), *rest))


# --- what is right


@pytest.mark.sampled(40, cover=("target",))
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_is_proven(name, target, monkeypatch):
    if (
        target == "interpret"
    ):  # Triton's programs are evaluated at their own extents: these are the same but for arithmetic
        monkeypatch.setattr(groups, "_MOST_BLOCKS", 0)
    found = plan(name, target)
    delta = 1e-9 if name == "scaled_max" else DELTA[target]
    proof = prove_plan(found, delta=delta)
    assert proof.counterexample is None
    assert not proof.uncovered
    assert proof.holds
    assert 0 <= proof.bound <= delta
    assert len(found.kernels) >= 1


@pytest.mark.sampled(30, cover=())
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_split_program_is_proven(name):
    proof = prove_plan(plan(name, "triton", parts=2), delta=1e-2)
    assert proof.counterexample is None
    assert not proof.uncovered
    assert proof.holds


@pytest.mark.sampled(30, cover=())
@pytest.mark.parametrize("target", ["xla", "triton"])
@pytest.mark.parametrize("case", all_cases(), ids=lambda c: c.name)
def test_every_example_is_proven_at_full_size(case, target):
    arrays = jax.eval_shape(lambda: case.arrays(8192, jnp.float32))
    proof = prove_plan(case.fused.explain(*arrays, *case.static, target=target), delta=1e-9)
    assert proof.holds, (proof.counterexample, proof.uncovered)
    assert proof.bound <= 1e-9
    assert max(proof.extents.values()) <= 8


def test_a_proof_says_what_it_tested():
    proof = prove_plan(plan("attention"), delta=1e-6)
    (kernel,) = plan("attention").kernels
    assert proof.stages[:2] == ("inlining of calls", "removing duplicates")
    for stage in ("bounds", "folds", "lowering"):
        assert any(s.startswith(f"{stage} of {kernel.name}") for s in proof.stages)
    assert "conversion to loops" in proof.stages
    assert "max and min" in proof.opaque
    assert set(proof.extents) == {a.name for d in plan("attention").program.definitions() for a in d.axes}
    assert proof.counterexample is None
    assert any("cheaper arithmetic" in s for s in prove_plan(plan("attention", "triton"), delta=1e-2).stages)


def test_uninterpreted_functions_and_facts_are_named():
    assert "tanh" in prove_plan(plan("fourth_moment"), delta=1e-2).opaque
    given = prove_plan(plan("scaled_max"), delta=1e-1).assumed
    assert any("positive" in g for g in given)


def test_a_smaller_bound_needs_more_tests_and_the_seed_does_not_matter():
    loose, tight = (prove_plan(plan("softmax"), delta=d) for d in (1e-2, 1e-8))
    assert loose.holds
    assert tight.holds
    assert loose.trials < tight.trials
    assert tight.bound <= 1e-8
    for seed in (1, 2):
        again = prove_plan(plan("softmax"), delta=1e-2, seed=seed)
        assert again.holds
        assert again.trials == loose.trials


# --- what is not covered


def uncovered_plan():
    def function(x):
        return jnp.sum(jnp.exp(jnp.cumsum(x, -1) - jnp.max(x, -1, keepdims=True)), -1)

    return plan_of(function, [jax.ShapeDtypeStruct((5, 13), jnp.float32)])


def test_what_xla_computes_is_outside_the_kernels_and_does_not_spoil_the_proof():
    found = uncovered_plan()
    proof = prove_plan(found, delta=1e-3)
    assert found.fallbacks
    assert proof.counterexample is None
    assert proof.holds


def test_an_equation_without_a_rule_is_not_covered(monkeypatch):
    from pallasfuse.verification.jaxprs import Equations

    monkeypatch.setattr(Equations, "_reduce_sum", lambda self, eqn, args: None, raising=False)
    proof = prove_plan(plan("softmax"), delta=1e-3)
    assert not proof.holds
    assert proof.counterexample is None
    assert any("reduce_sum" in u for u in proof.uncovered)


def test_a_bound_that_cannot_be_reached_does_not_hold():
    """The eighth power of a sum of 13 exponentials has too many terms for any number of tests."""
    found = plan_of(lambda x: jnp.sum(softmax(x), -1) ** 8 + jnp.sum(jnp.exp(x), -1) ** 12,
                    [jax.ShapeDtypeStruct((5, 13), jnp.float32)])  # fmt: skip
    proof = prove_plan(found, delta=1e-9)
    assert found.kernels
    assert not proof.holds
    assert proof.counterexample is None
    assert any("bound" in u for u in proof.uncovered)
    assert proof.bound > 1e-9


def test_a_failing_verifier_proves_nothing(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("planted")

    monkeypatch.setattr(groups, "lowered", fail)
    proof = prove_plan(plan("softmax"), delta=1e-3)
    assert not proof.holds
    assert any("planted" in u for u in proof.uncovered)


# --- what is wrong


def refuted(name: str, change, target: str = "xla") -> Counterexample:
    found = plan(name, target)
    proof = prove(found.converted, [change(p) for p in parts_of(found)], delta=1e-4)
    assert not proof.holds
    assert proof.bound == 1.0
    assert proof.counterexample is not None, proof.uncovered
    return proof.counterexample


def with_repair(part: PlannedKernel, change) -> PlannedKernel:
    """The part with every repair changed, as `fusion` would have derived it."""

    def accumulator(a):
        return a if a.update is None else replace(a, update=change(a.update))

    folds = tuple(
        replace(f, accumulators=tuple(accumulator(a) for a in f.accumulators)) for f in part.group.folds
    )  # fmt: skip
    assert folds != part.group.folds
    return replace(part, group=replace(part.group, folds=folds))


def swapped(update):
    """Old and new frames exchanged."""
    names = {n.tensor for n in postorder(update) if isinstance(n, Read)}
    pairs = {n.removesuffix(OLD) for n in names if n.endswith(OLD)}
    return substitute(update, {
        n: read(n.tensor.removesuffix(OLD) if n.tensor.endswith(OLD) else n.tensor + OLD, n.indices, n.dtype)
        for n in postorder(update) if isinstance(n, Read) and n.tensor.removesuffix(OLD) in pairs
    })  # fmt: skip


def doubled(update):
    return mul(update, update)


def negated(update):
    return apply("neg", update, dtype=update.dtype)


@pytest.mark.sampled(6, cover=())
@pytest.mark.parametrize("change", [negated, doubled, swapped])
@pytest.mark.parametrize("name", ["softmax", "attention", "variance"])
def test_a_wrong_repair_is_refuted_at_the_folds(name, change):
    wrong = refuted(name, lambda p: with_repair(p, change))
    assert wrong.stage.startswith("folds of")
    assert wrong.tensor in str(wrong)


@pytest.mark.parametrize("name", ["softmax", "attention"])
def test_a_missing_repair_is_refuted_at_the_folds(name):
    assert refuted(name, lambda p: with_repair(p, lambda u: None)).stage.startswith("folds of")


def test_a_repair_of_one_term_too_few_is_refuted():
    def lost(update):
        return next(n for n in postorder(update) if isinstance(n, Read) and ".acc" in n.tensor)

    assert refuted("softmax", lambda p: with_repair(p, lost)).stage.startswith("folds of")


def test_a_wrong_output_is_refuted():
    def change(part):
        outputs = tuple(replace(n, body=apply("neg", n.body, dtype=n.body.dtype)) for n in part.group.outputs)
        return replace(part, group=replace(part.group, outputs=outputs))

    wrong = refuted("attention", change)
    assert wrong.stage.startswith("folds of")
    assert wrong.index == (0, 0)


def first_segment_stops_early(part: PlannedKernel) -> PlannedKernel:
    body = []
    for s in part.phases[0].program.body:
        if isinstance(s, Loop) and s.carries:
            last = s.segments[-1]
            early = replace(last, stop=sub(last.stop, const(1, "int32")))
            body.append(replace(s, segments=(*s.segments[:-1], early)))
        else:
            body.append(s)
    return with_body(part, tuple(body))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["attention", "causal"])
def test_wrong_bounds_are_refuted_by_name(name, target):
    wrong = refuted(name, first_segment_stops_early, target)
    assert wrong.stage.startswith("bounds of")


def test_a_wrong_tile_program_is_refuted_by_name():
    """The plan's own program is evaluated where it is small."""

    def change(part):
        body = tuple(
            replace(s, value=apply("neg", s.value, dtype=s.value.dtype)) if isinstance(s, Store) else s
            for s in part.phases[0].program.body
        )
        assert body != part.phases[0].program.body
        return with_body(part, body)

    wrong = refuted("variance", change)
    assert wrong.stage.startswith("tile program")


def test_a_wrong_lowering_is_refuted_by_name(monkeypatch):
    right = groups.lowered

    def wrong_lower(*args, **kwargs):
        *before, program = right(*args, **kwargs)
        body = tuple(
            replace(s, value=apply("neg", s.value, dtype=s.value.dtype)) if isinstance(s, Store) else s
            for s in program.body
        )
        return (*before, replace(program, body=body))

    monkeypatch.setattr(groups, "lowered", wrong_lower)
    assert refuted("attention", lambda p: p).stage.startswith("lowering of")


def test_wrong_arithmetic_is_refuted_by_name(monkeypatch):
    def wrong_rewrite(program, **_):
        def loop(s):
            if not isinstance(s, Loop):
                return s
            segments = tuple(
                replace(g, body=tuple(
                    replace(x, value=apply("neg", x.value, dtype=x.value.dtype))
                    if isinstance(x, Let) and x.value.dtype == "float32" else x for x in g.body
                )) for g in s.segments
            )  # fmt: skip
            return replace(s, segments=segments)

        return replace(program, body=tuple(loop(s) for s in program.body))

    monkeypatch.setattr(groups.arithmetic, "rewrite", wrong_rewrite)
    assert refuted("softmax", lambda p: p, "triton").stage.startswith("cheaper arithmetic of")


@pytest.mark.parametrize(("stage", "op", "other"), [("conversion to loops", "exp", "exp2"),
                                                    ("conversion to loops", "div", "mul")])  # fmt: skip
def test_a_wrong_conversion_is_refuted_by_name(stage, op, other):
    """One nest of the loop program computes something else than its equation."""
    found = plan("softmax")
    nests = []
    for nest in found.program.nests:
        swaps = {n: apply(other, *n.args, dtype=n.dtype) for n in postorder(nest.body) if getattr(n, "op", "") == op}
        nests.append(replace(nest, body=substitute(nest.body, swaps)))
    program = replace(found.program, nests=tuple(nests))
    assert program != found.program
    proof = prove(replace(found.converted, made=known(program)), [], delta=1e-3)
    assert proof.counterexample.stage == stage


def test_a_wrong_inlining_is_refuted_by_name():
    @jax.jit
    def two(x, y):
        return x - y, x * y

    shape = jax.ShapeDtypeStruct((5, 13), jnp.float32)
    closed = jax.make_jaxpr(lambda x, y: jnp.sum(jnp.divide(*two(x, y)), -1))(shape, shape)
    converted = convert(closed)
    eqns = list(converted.jaxpr.eqns)
    at = [n for n, e in enumerate(eqns) if e.primitive.name in ("sub", "mul")]
    first, second = (eqns[n] for n in at)
    eqns[at[0]], eqns[at[1]] = first.replace(outvars=second.outvars), second.replace(outvars=first.outvars)
    spoiled = replace(converted, jaxpr=converted.jaxpr.replace(eqns=eqns))
    proof = prove(spoiled, [], delta=1e-3)
    assert proof.counterexample.stage == "inlining of calls"


def test_a_wrong_duplicate_is_refuted_by_name(monkeypatch):
    def merge_everything(program):
        sums = [n for n in program.nests if n.reduced]
        return replace(program, nests=tuple(
            replace(n, body=sums[0].body, reduced=sums[0].reduced) if n is sums[-1] else n for n in program.nests
        ))  # fmt: skip

    monkeypatch.setattr(stages, "deduplicate", merge_everything)
    found = plan_of(lambda x, y: jnp.sum(x, -1) + jnp.sum(y, -1), [jax.ShapeDtypeStruct((5, 13), jnp.float32)] * 2)
    proof = prove(found.converted, [], delta=1e-3)
    assert proof.counterexample.stage == "removing duplicates"


def test_counterexamples_read_as_a_sentence():
    assert str(Counterexample("folds of f", "t", (1, 2), "3", "4")) == "folds of f: t[1, 2] is 4, expected 3"
    assert isinstance(prove_plan(plan_of(attention, [jax.ShapeDtypeStruct((4, 4), jnp.float32)] * 3), delta=0.1), Proof)


# --- differences that only the fields have


def odd_plan(target: str = "triton"):
    """On the GPU the maximum is taken of x and multiplied by 17, which is no square in the first field."""
    return plan_of(
        lambda x: (softmax(x), jnp.max(17.0 * x, -1)), [jax.ShapeDtypeStruct((5, 13), jnp.float32)], TARGETS[target]
    )


def test_constants_that_the_standard_fields_do_not_order_are_tested_in_others(monkeypatch):
    chains = []
    real = deciding.chain_of_squares

    def spy(positive, levels):
        chains.append(real(positive, levels))
        return chains[-1]

    monkeypatch.setattr(deciding, "chain_of_squares", spy)
    proof = prove_plan(odd_plan(), delta=1e-4)
    assert chains and all(c is not None for c in chains)
    assert proof.counterexample is None
    assert proof.holds
    assert proof.bound <= 1e-4


def test_a_difference_that_real_numbers_do_not_have_is_not_covered(monkeypatch):
    monkeypatch.setattr(deciding, "chain_of_squares", lambda positive, levels: None)
    proof = prove_plan(odd_plan(), delta=1e-4)
    assert proof.counterexample is None
    assert not proof.holds
    assert any("differs over the finite fields, but on none of 512 random inputs" in u for u in proof.uncovered)


def test_a_counterexample_is_of_real_numbers():
    found = refuted("softmax", lambda part: with_repair(part, lambda update: mul(update, const(2.0, update.dtype))))
    assert "mod p" not in str(found)
    assert float(found.expected) != pytest.approx(float(found.found))


def masked_total(x, mask):
    """The sum of a row that is masked as a whole is 0, which no repair of the sum at the row's maximum gives."""
    y = jnp.where(mask, x, -jnp.inf)
    total = jnp.sum(jnp.where(mask, jnp.exp(y - jnp.max(y, -1, keepdims=True)), 0.0), -1, keepdims=True)
    return total, jnp.where(mask, y / total, 0.0)


MASKED = [jax.ShapeDtypeStruct((5, 13), jnp.float32), jax.ShapeDtypeStruct((5, 13), jnp.bool_)]


def test_states_on_which_no_result_depends_are_no_counterexample():
    found = plan_of(lambda x, mask: masked_total(x, mask)[1].sum(-1), MASKED)
    proof = prove_plan(found, delta=1e-4)
    assert len(found.kernels) == 1
    assert proof.counterexample is None


# --- loops inside loops


def test_bounds_of_loops_inside_loops_are_not_covered():
    """Which masks hide what of an inner loop is not known: a proof says so, and does not hold."""
    found = plan("softmax")
    (part,) = parts_of(found)
    body = part.phases[0].program.body
    loop = next(s for s in body if isinstance(s, Loop))
    outer = replace(loop, segments=tuple(replace(g, body=(loop, *g.body)) for g in loop.segments))
    record = Record()
    stages.bounds(found.converted, with_body(part, tuple(outer if s is loop else s for s in body)), 0, record)
    assert any(f"loops inside loops: inside that over {loop.axis}" in line for line in record.uncovered)
    record = Record()
    stages.bounds(found.converted, part, 0, record)
    assert not record.uncovered


def test_what_bounds_an_inner_loop_is_the_same_in_all_trials():
    """An input that is loaded in an outer loop, and says how long the inner one is."""
    program = EXAMPLES["triangle"].program("exact")
    outer = program.body[0]
    length = Load("n.t", "length", (), "int32")

    def bounded(segment):
        inner, *rest = segment.body
        shorter = replace(inner.segments[0], stop=read("n.t", (), "int32"))
        return replace(segment, body=(length, replace(inner, segments=(shorter,)), *rest))

    loop = replace(outer, segments=tuple(map(bounded, outer.segments)))
    assert groups._bounding(program) == frozenset()
    assert groups._bounding(replace(program, body=(loop, *program.body[1:]))) == {"length"}
