"""The check of a rewritten program: XLA's program of the form that was found against that of the form as it is written."""

from dataclasses import replace
from functools import partial
from typing import Any

from pallasfuse.environment import environment
from pallasfuse.executables import executables_of_task
from pallasfuse.first_time import IMPORTS
from pallasfuse.index_ranges import index_ranges
from pallasfuse.isolation import apart
from pallasfuse.jaxpr_frontend import Converted
from pallasfuse.kept_plans import plan_of
from pallasfuse.measure import BUDGET_S, MORE_FOR_CALLS_S, Measured, compare
from pallasfuse.parts import untimed, whole_key
from pallasfuse.plan import Plan
from pallasfuse.search.found import Rewriting
from pallasfuse.store import Record, current
from pallasfuse.subjects import XLA, comparison, function_of
from pallasfuse.verdicts import FORM, Verdict

_REWRITTEN = "rewritten"
_CERTAIN = 2.0
"""A form that cannot be timed must be predicted to be so many times as fast."""


def in_faster_form(plan: Plan, device: Any, *, measure: bool) -> tuple[Plan, tuple[Verdict, ...]]:
    """The plan, or that of the program as it is written, if this is as fast without any kernel; with what a clock said.

    measure: False looks up what is known, and measures nothing.
    """
    if not plan.rewritings:
        return plan, ()
    verdict = _verdict(plan.converted, plan.rewritings, device, measure)
    if verdict is None:
        return plan, ()
    return (plan if verdict.kept else as_written(plan)), (verdict,)


def in_another_form(plan: Plan, device: Any, *, measure: bool) -> tuple[Plan | None, tuple[Verdict, ...]]:
    """The plan of the form that the kernels of a plan were predicted to outdo, if it is faster without any; with what a clock said.

    Only a form that has won is planned. None: there is none, or it has lost. measure: as of `in_faster_form`.
    """
    with IMPORTS:
        from pallasfuse.form_choice import rewritten_form
        from pallasfuse.pipeline import plan_of_form
    form = rewritten_form(plan)
    verdict = None if form is None else _verdict(form.converted, form.rewritings, device, measure)
    if form is None or verdict is None:
        return None, ()
    return (plan_of_form(plan, form) if verdict.kept else None), (verdict,)


def as_written(plan: Plan) -> Plan:
    """The plan of the same program without a form of its sums and products."""
    made = plan_of(plan.converted.original, plan.target, replace(plan.options, rewrite=False), plan.boundary)
    return replace(made, bodies=plan.bodies, written_out=plan.written_out)


def _is_certain(rewritings: tuple[Rewriting, ...]) -> bool:
    """Is the form so much faster by its price that no clock is needed?"""
    before, after = sum(r.before.us for r in rewritings), sum(r.after.us for r in rewritings)
    return before >= _CERTAIN * after


def _verdict(form: Converted, rewritings: tuple[Rewriting, ...], device: Any, measure: bool) -> Verdict | None:
    assert form.whole is not None
    unfit = untimed(form.whole)
    if unfit:
        reason = f"not measured: it has {', '.join(unfit)}"
        certain = _is_certain(rewritings)
        return Verdict(FORM, certain, reason) if measure or not certain else None
    store = current()
    identity = {**environment(device), "of": "form", "program": whole_key(form.whole), "form": whole_key(form.jaxpr)}
    known, seconds = store.get(identity), 0.0
    if known is None and measure:
        found = _measured(form, device)
        seconds = found.seconds
        error = {**found.uncompiled, **found.failed}.get(_REWRITTEN)
        if _REWRITTEN not in found.microseconds and error is None:
            return Verdict(FORM, True, f"not measured ({found.skipped}): chosen by its price", seconds=seconds)
        entry: Record = comparison(found, _REWRITTEN) if error is None else {"error": error}
        known = store.update(identity, lambda _: entry, on_disk=error is None)
    if known is None:
        return None
    if "error" in known:
        return Verdict(
            FORM, False, f"it does not run ({known['error']}): the program is run as it is written", seconds=seconds
        )
    reason = "it is used" if known["faster"] else "the program is run as it is written"
    return Verdict(FORM, known["faster"], reason, known["us"], known["xla_us"], seconds, remembered=not seconds)


def _measured(form: Converted, device: Any) -> Measured:
    avals = [v.aval for v in form.jaxpr.invars]
    functions = {XLA: function_of(form.original), _REWRITTEN: function_of(form.jaxpr)}
    below = index_ranges(form.original.eqns, form.original.invars)
    timed = partial(compare, budget_s=BUDGET_S, more_s=MORE_FOR_CALLS_S, executables=executables_of_task(), below=below)
    return apart(lambda: timed(functions, avals, device), device)
