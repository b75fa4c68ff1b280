"""What may reject a mutant: the proof over finite fields, the verifiers of the representations, comparisons with float64."""

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import form_choice, jaxpr_frontend, pipeline, proof, recurrences
from pallasfuse.emission import pallas_kernel
from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir import evaluate_tiles as tile_interpreter
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.loop_calls import KernelOfLoop
from pallasfuse.proof import loops
from pallasfuse.targets import INTERPRET, MOSAIC_GPU, TRITON, Target
from tests.loops_of_programs import LOOPS
from tests.mutation.subjects import SUBJECTS
from tests.programs_by_name import FREE
from tests.property.judging import compare, exact

FREE_GPU, FREE_INTERPRET = TRITON, INTERPRET
FREE_HOPPER = replace(MOSAIC_GPU, name="any size")
"""Tile programs for warpgroups, also where no kernel could be emitted."""

FIELDS, VERIFIERS, COMPARISON, SAMPLES = "finite fields", "IR verifiers", "comparison", "samples of the repair"
FAILURE, NOTHING_SHOWN = "failure when lowered", "nothing shown"


@dataclass(frozen=True)
class Outcome:
    """What a check says. `evidence`: what the mutant may have changed, to be compared with the unspoiled one."""

    evidence: Any
    rejected_by: str = ""
    reason: str = ""


@dataclass(frozen=True)
class _Planned:
    jaxpr: Any
    converted: Any
    plan: Any
    broken: str

    @property
    def evidence(self) -> Any:
        groups, kernels = self.plan.grouping.groups, tuple(k.phases for k in self.plan.kernels)
        shares = [k.visited_share for k in self.plan.kernels]
        return str(self.converted.jaxpr), self.converted.program, groups, kernels, self.plan.fallbacks, shares


def _reports(plan: Any) -> str:
    return "; ".join(str(f) for f in plan.fallbacks if "please report" in f.reason)


def _plan(name: str, target: Target) -> _Planned:
    subject = SUBJECTS[name]
    arguments = [jax.ShapeDtypeStruct(a.shape, jnp.dtype(a.dtype)) for a in subject.arguments()]
    jaxpr = jax.make_jaxpr(subject.function)(*arguments)
    converted = jaxpr_frontend.convert(jaxpr)
    placements = form_choice.Placements(converted, target, subject.fuse_options)
    plan = pipeline.schedule_grouping(placements, form_choice.choose_groups(placements))
    return _Planned(jaxpr, converted, plan, _reports(plan))


def _planning(check: Callable[[_Planned, str], tuple[str, str]], target: Target) -> Callable[[str], Outcome]:
    """A check of a plan; one that an invariant of the representations rejects needs no further check."""

    def run(name: str) -> Outcome:
        try:
            planned = _plan(name, target)
        except InvalidProgramError as error:
            return Outcome(str(error), VERIFIERS, str(error))
        if planned.broken:
            return Outcome(planned.evidence, VERIFIERS, planned.broken)
        return Outcome(planned.evidence, *check(planned, name))

    return run


def _prove(planned: _Planned, name: str) -> tuple[str, str]:
    parts = [proof.PlannedKernel(k.group, k.schedule, k.phases) for k in planned.plan.kernels]
    return _judged(proof.prove(planned.converted, parts, delta=1e-4))


def _judged(found: proof.Proof) -> tuple[str, str]:
    if found.holds:
        return "", ""
    if found.counterexample is not None:
        return FIELDS, str(found.counterexample)
    text = "; ".join(found.uncovered)
    verified = any(word in text for word in ("InvalidProgramError", "AssertionError", "not lowered"))
    return VERIFIERS if verified else NOTHING_SHOWN, text


def _samples(planned: _Planned, _: str) -> tuple[str, str]:
    """Does `repair` itself refuse?"""
    refusals = [r for k in planned.plan.kernels for f in k.group.folds for r in f.refusals]
    found = next((r for r in refusals if "does not agree" in r or "could not be proved" in r), "")
    return (SAMPLES, found) if found else ("", "")


def _stores(name: str) -> Outcome:
    """Stores of Pallas kernels that may leave their array have a mask. (The interpret mode drops what lies outside; a device
    does not.)"""
    jaxprs, problem = [], ""
    for kernel in _plan(name, FREE_INTERPRET).plan.kernels:
        shapes = {t.name: jax.ShapeDtypeStruct([a.extent for a in t.axes], t.dtype) for t in kernel.program.inputs}
        jaxpr = jax.make_jaxpr(functools.partial(pallas_kernel.call, kernel.program, interpret=True))(shapes)
        jaxprs.append(str(jaxpr))
        for eqn in _equations(jaxpr):
            if eqn.primitive.name != "masked_swap":
                continue
            ref, (*_, at), _, mask = jax.tree.unflatten(eqn.params["args_tree"], eqn.invars)
            sizes = [getattr(index, "size", 1) for index in at.indices]
            if mask is None and any(n % size for n, size in zip(ref.aval.shape, sizes, strict=True)):
                problem = f"{kernel.name}: a tile of {sizes} is stored to an array of {ref.aval.shape} without a mask"
    return Outcome(jaxprs, COMPARISON if problem else "", problem)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns"):
                yield from _equations(value)


def _differs(name: str, got: Any, want: Any) -> str:
    scale = float(np.max(np.abs(want), initial=0.0, where=np.isfinite(want)))
    if np.allclose(got, want, rtol=1e-9, atol=1e-9 * scale, equal_nan=True):
        return ""
    return f"{name} differs from its float64 evaluation"


def _evaluated(planned: _Planned, name: str) -> dict[str, Any]:
    """Every tensor of the loop program, in float64."""
    program = planned.converted.program
    arguments = [np.asarray(c) for c in planned.converted.jaxpr.consts] + SUBJECTS[name].arguments()
    given = zip(program.inputs, arguments, strict=True)
    return evaluate(program, {t.name: a.reshape([x.extent for x in t.axes]) for t, a in given})


def _tiles(planned: _Planned, name: str) -> tuple[str, str]:
    """The tile programs, at the extents of the program itself, in float64."""
    tensors = _evaluated(planned, name)
    for kernel in planned.plan.kernels:
        inputs = {t.name: tensors[t.name] for t in kernel.program.given}
        for back in (False, True) if planned.plan.target.tails == "exact" else (False,):
            try:
                outputs = tile_interpreter.evaluate_tiles(kernel.program, inputs, move_last_block_back=back)
            except InvalidProgramError as error:
                return VERIFIERS, str(error)
            for tensor, got in outputs.items():
                problem = _differs(f"{tensor} of {kernel.name}", got, tensors[tensor])
                if problem:
                    return COMPARISON, problem
    return "", ""


def _loops(planned: _Planned, name: str) -> tuple[str, str]:
    """The loop program in float64, against the jaxpr."""
    tensors, reference = _evaluated(planned, name), _reference(name)
    have = [
        np.asarray(tensors[r]).reshape(p.shape).astype(p.dtype)
        for r, p in zip(planned.converted.results, reference.plain, strict=True)
    ]
    problems, _ = compare(have, reference.plain, reference.exact)
    return (COMPARISON, problems[0]) if problems else ("", "")


def _share(planned: _Planned, _: str) -> tuple[str, str]:
    """The predicted share of the axis that is visited, against the positions that the tile interpreter visits."""
    tensors = {t.name: np.zeros([a.extent for a in t.axes]) for k in planned.plan.kernels for t in k.program.inputs}
    for kernel in planned.plan.kernels:
        counting = _Counting()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tile_interpreter._Evaluation, "_trip", counting.method(tile_interpreter._Evaluation._trip))
            tile_interpreter.evaluate_tiles(kernel.program, tensors, move_last_block_back=True)
        blocks = int(np.prod([-(-a.extent // t) for a, t in kernel.program.grid], dtype=int))
        visited = counting.positions / (blocks * kernel.schedule.rolled.extent * kernel.group.passes)
        if not np.isclose(visited, kernel.visited_share):
            return (
                COMPARISON,
                f"{kernel.name} visits {visited:.3g} of the axis, predicted are {kernel.visited_share:.3g}",
            )
    return "", ""


class _Counting:
    """Counts the positions that loops with carried values visit."""

    def __init__(self) -> None:
        self.positions = 0

    def method(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def trip(evaluation: Any, loop: Any, segment: Any, scope: Any) -> Any:
            self.positions += segment.tile if loop.carries else 0
            return real(evaluation, loop, segment, scope)

        return trip


@dataclass(frozen=True)
class _Reference:
    plain: list[Any]
    exact: list[list[np.ndarray[Any, Any]]]


@cache
def _reference(name: str) -> _Reference:
    subject = SUBJECTS[name]
    whole, arguments = subject.transform(subject.function), subject.arguments()
    return _Reference(jax.tree.leaves(jax.jit(whole)(*arguments)), exact(whole, *arguments, perturbed=True))


def _run(name: str, target: str) -> tuple[str, list[Any]]:
    """(StableHLO, results) of the fused function, made anew."""
    subject = SUBJECTS[name]
    fused = pf.fuse(subject.function, target=target, options=subject.fuse_options)
    lowered = jax.jit(subject.transform(fused)).lower(*subject.arguments())
    return lowered.as_text(), jax.tree.leaves(lowered.compile()(*subject.arguments()))


def _compiled(target: str, judge: Callable[[str, list[Any]], str]) -> Callable[[str], Outcome]:
    def run(name: str) -> Outcome:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                text, have = _run(name, target)
            except (InvalidProgramError, TypeError, KeyError) as error:
                by = VERIFIERS if isinstance(error, InvalidProgramError) else FAILURE
                return Outcome(str(error), by, f"{type(error).__name__}: {error}".splitlines()[0])
        problem = judge(name, have)
        if problem:
            return Outcome(text, COMPARISON, problem)
        subject = SUBJECTS[name]
        fused = pf.fuse(subject.function, target=target, options=subject.fuse_options)
        broken = "" if subject.transform(fused) is not fused else _reports(fused.explain(*subject.arguments()))
        return Outcome(text, VERIFIERS if broken else "", broken)

    return run


def _within_bounds(name: str, have: list[Any]) -> str:
    reference = _reference(name)
    problems, _ = compare(have, reference.plain, reference.exact)
    return problems[0] if problems else ""


def _as_accurate(name: str, have: list[Any]) -> str:
    """At most 1.5 times the largest error of the plain function (the rule of the examples), and 2 roundings."""
    reference = _reference(name)
    for n, (got, plain, want) in enumerate(zip(have, reference.plain, reference.exact[0], strict=True)):
        scale = float(np.max(np.abs(want)))
        ours, theirs = (float(np.max(np.abs(np.asarray(x, np.float64) - want))) for x in (got, plain))
        if not ours <= 1.5 * theirs + 2 * scale * float(np.finfo(np.asarray(got).dtype).eps):
            return f"output {n} has an error of {ours:.3g}, the plain function of {theirs:.3g}"
    return ""


def _loop(name: str) -> Outcome:
    """The proof of the kernel of a loop (`tests.loops_of_programs`)."""
    function, arguments = LOOPS[name]
    (eqn,) = (e for e in jax.make_jaxpr(function)(*arguments).eqns if e.primitive.name == "scan")
    try:
        own = recurrences.kernel_of(eqn, TRITON.device)
    except InvalidProgramError as error:
        return Outcome(str(error), VERIFIERS, str(error))
    assert isinstance(own, KernelOfLoop), own
    given = {t.name: jax.ShapeDtypeStruct([a.extent for a in t.axes], t.dtype) for t in own.kernel.inputs}
    emitted = jax.make_jaxpr(functools.partial(pallas_kernel.call, own.kernel, interpret=True))(given)
    found = loops.prove_loop(own, delta=1e-4)
    evidence = repr(own), str(emitted), str(recurrences.recurrence_of(eqn)), found
    return Outcome(evidence, *_judged(found))


CHECKS: dict[str, Callable[[str], Outcome]] = {
    "loops": _planning(_loops, FREE),
    "proof": _planning(_prove, FREE),
    "gpu proof": _planning(_prove, FREE_GPU),
    "hopper proof": _planning(_prove, FREE_HOPPER),
    "samples": _planning(_samples, FREE),
    "share": _planning(_share, FREE),
    "stores": _stores,
    "tiles": _planning(_tiles, FREE),
    "gpu tiles": _planning(_tiles, FREE_GPU),
    "xla": _compiled("xla", _within_bounds),
    "loop proof": _loop,
    "interpret": _compiled("interpret", _within_bounds),
    "accuracy": _compiled("xla", _as_accurate),
}


@cache
def baseline(name: str, check: str) -> Outcome:
    """The check without a mutant: it must accept."""
    return CHECKS[check](name)
