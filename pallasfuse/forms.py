"""The check of a rewritten program: XLA's program of the form that was found against that of the form as it is written."""

from dataclasses import replace
from typing import Any

from pallasfuse import _compat
from pallasfuse.environment import environment
from pallasfuse.execution import execute
from pallasfuse.first_time import IMPORTS
from pallasfuse.isolation import apart
from pallasfuse.measure import Measured, compare
from pallasfuse.parts import primitives, whole_key
from pallasfuse.plan import Plan
from pallasfuse.store import Record, current
from pallasfuse.subjects import XLA, comparison
from pallasfuse.verdicts import FORM, Verdict

UNTIMED = frozenset({"while", "pure_callback", "io_callback", "debug_callback", "infeed", "outfeed"})
"""A program with such operations is not run on drawn arguments: its loops might not end, its callbacks are the user's."""
ONE_OF_SEVERAL = frozenset({"cond"})
"""A program with such an operation is not timed on drawn arguments: they take one branch, which says nothing of the others."""
_BUDGET_S = 0.25
_REWRITTEN = "rewritten"
_CERTAIN = 2.0
"""A form that cannot be timed must be predicted to be so many times as fast."""


def in_faster_form(plan: Plan, device: Any, *, measure: bool) -> tuple[Plan, tuple[Verdict, ...]]:
    """The plan, or that of the program as it is written, if this is as fast without any kernel; with what a clock said.

    measure: False looks up what is known, and measures nothing.
    """
    if not plan.rewritings:
        return plan, ()
    verdict = _verdict(plan, device, measure)
    if verdict is None:
        return plan, ()
    return (plan if verdict.kept else _as_written(plan)), (verdict,)


def _as_written(plan: Plan) -> Plan:
    with IMPORTS:
        from pallasfuse.pipeline import make_plan
    made = make_plan(plan.converted.original, plan.target, replace(plan.options, rewrite=False), plan.boundary)
    return replace(made, bodies=plan.bodies, written_out=plan.written_out)


def _is_certain(plan: Plan) -> bool:
    """Is the form so much faster by its price that no clock is needed?"""
    before, after = sum(r.before.us for r in plan.rewritings), sum(r.after.us for r in plan.rewritings)
    return before >= _CERTAIN * after


def _verdict(plan: Plan, device: Any, measure: bool) -> Verdict | None:
    written, rewritten = plan.converted.whole, plan.converted.jaxpr
    assert written is not None
    unfit = sorted(primitives(written) & UNTIMED)
    if unfit:
        reason = f"not measured: it has {', '.join(unfit)}"
        return Verdict(FORM, _is_certain(plan), reason) if measure or not _is_certain(plan) else None
    store = current()
    identity = {**environment(device), "of": "form", "program": whole_key(written), "form": whole_key(rewritten)}
    known, seconds = store.get(identity), 0.0
    if known is None and measure:
        found = apart(lambda: _measured(plan, device), device)
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


def _measured(plan: Plan, device: Any) -> Measured:
    with IMPORTS:
        from pallasfuse.pipeline import revised
    free = replace(plan, options=replace(plan.options, strict=False, verify=None))
    plain = revised(free, {k.name: "to compare" for k in plan.kernels})
    original = plan.converted.original
    functions = {
        XLA: lambda *args: _compat.eval_jaxpr(original, original.consts, *args),
        _REWRITTEN: lambda *args: execute(plain, [*plan.converted.jaxpr.consts, *args]),
    }
    avals = [v.aval for v in plan.converted.jaxpr.invars]
    return compare(functions, avals, device, budget_s=_BUDGET_S)
