"""The clock decides between plans of one call as a whole, once: whether its loops have kernels in their bodies, and whether it runs
as prices alone would have it.

What a body gains alone may be lost in its loop. A body is checked as a program of its own (`check.py`). In its loop, XLA fuses what
one trip ends with and the next one begins with, and keeps values elsewhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pallasfuse._compat import Jaxpr
from pallasfuse.environment import environment
from pallasfuse.executables import executables_of_task
from pallasfuse.first_time import Later
from pallasfuse.first_time import known as known_already
from pallasfuse.index_ranges import index_ranges
from pallasfuse.ir.boundary import Boundary
from pallasfuse.isolation import apart
from pallasfuse.measure import BUDGET_S, MORE_FOR_CALLS_S, Measured, compare
from pallasfuse.parts import CHOICE, branches, primitives, untimed, way_of_kernel, whole_key
from pallasfuse.plan import Plan
from pallasfuse.primitive_names import FUSED_CALL
from pallasfuse.store import Record, current
from pallasfuse.subjects import XLA, comparison, whole_call
from pallasfuse.verdicts import BODIES, WHOLE_CALL, Verdict

_OURS = "with more kernels"


def with_bodies_that_pay(plan: Plan, without: Callable[[], Plan], device: Any, *, measure: bool) -> Plan:
    """Returns a checked plan, or the one of the same call whose loops are left to XLA, unless the first is faster by the clock.

    without: makes the other plan, checked as well; it is asked for only if something is measured or the first has lost.
    measure: False looks up what is known. What cannot be timed as a whole keeps the bodies that were faster alone, and says so.
    """
    unfit = why_untimed(plan)
    if unfit:
        return _with(plan, Verdict(BODIES, True, f"not measured as a whole: it has {', '.join(unfit)}"))
    other = Later(without)
    known, seconds = _compared(plan, other, _identity(plan, device), device, measure=measure)
    if known is None:
        return plan
    if "skipped" in known:
        return _with(plan, Verdict(BODIES, True, f"not measured as a whole ({known['skipped']})", seconds=seconds))
    reason = "they are used" if known["faster"] else "the loops are XLA's own"
    verdict = Verdict(BODIES, known["faster"], reason, known["us"], known["xla_us"], seconds, remembered=not seconds)
    return _with(plan if known["faster"] else other.value, verdict)


def faster_as_planned(checked: Plan, planned: Plan, device: Any, *, measure: bool) -> Plan:
    """Returns a checked plan, or another one of the same call that is as prices have made it, if that is faster by the clock.

    A call that cannot be timed keeps the checked plan. measure: as of `with_bodies_that_pay`.
    """
    same = _ways(planned) == _ways(checked) and whole_key(planned.converted.jaxpr) == whole_key(checked.converted.jaxpr)
    if same or why_untimed(checked) or why_untimed(planned):
        return checked
    identity = {**_identity(planned, device), "of": "call as it is planned", "beside": str(_identity(checked, device))}
    known, seconds = _compared(planned, known_already(checked), identity, device, measure=measure)
    if known is None or "skipped" in known or not known["faster"]:
        return checked
    reason = "as it is planned, with kernels that were not faster alone, or in another form"
    verdict = Verdict(WHOLE_CALL, True, reason, known["us"], known["xla_us"], seconds, remembered=not seconds)
    return replace(planned, verdicts=(*checked.verdicts, verdict))


def _ways(plan: Plan) -> list[str]:
    """Names the ways in which all kernels of a plan run."""
    return [way_of_kernel(k) for p in plan.all() for k in p.kernels]


def why_untimed(plan: Plan) -> list[str]:
    """Names what a call has that is not run on drawn arguments."""
    unfit = untimed(plan.converted.jaxpr)
    has_choice = any(FUSED_CALL in primitives(branch) for branch in branches(plan.converted.jaxpr))
    return [*unfit, *([CHOICE] if has_choice else [])]


def _compared(
    plan: Plan, other: Later[Plan], identity: Mapping[str, str], device: Any, *, measure: bool
) -> tuple[Mapping[str, Any] | None, float]:
    """Returns how the call of a plan compares with that of another one, or None where nobody knows, and what seconds it took."""
    store = current()
    known, seconds = store.get(identity), 0.0
    if known is None and measure:
        found = _measured(plan, other.value, device)
        is_timed, seconds = _OURS in found.microseconds, found.seconds
        skipped: Record = {"skipped": found.skipped or str({**found.uncompiled, **found.failed}.get(_OURS, ""))}
        entry = comparison(found, _OURS) if is_timed else skipped
        known = store.update(identity, lambda _: entry, on_disk=is_timed)
    return known, seconds


def timed_boundary(boundary: Boundary, program: Jaxpr, inside: Boundary | None) -> Boundary:
    """Returns the boundary of a body, which says whether the loop is timed after it: so it is in a call whose loops all have known
    lengths, and which has no branches.

    program: that the loop is in. inside: the boundary of that, if it is a body itself; None where it is the whole call.
    """
    is_open = untimed(program) or any(True for _ in branches(program))
    return replace(boundary, timed=not is_open if inside is None else inside.timed)


def _with(plan: Plan, verdict: Verdict) -> Plan:
    return replace(plan, verdicts=(*plan.verdicts, verdict))


def _identity(plan: Plan, device: Any) -> Mapping[str, str]:
    plans = list(plan.all())
    kernels = ", ".join(_ways(plan))
    programs = ", ".join(whole_key(p.converted.jaxpr) for p in plans)
    return {**environment(device), "of": "call with bodies", "program": programs, "kernels": kernels}


def _measured(plan: Plan, other: Plan, device: Any) -> Measured:
    jaxpr = plan.converted.jaxpr
    functions, avals = {XLA: whole_call(other), _OURS: whole_call(plan)}, [v.aval for v in jaxpr.invars]
    below = index_ranges(jaxpr.eqns, jaxpr.invars)
    timed = partial(compare, budget_s=BUDGET_S, more_s=MORE_FOR_CALLS_S, executables=executables_of_task(), below=below)
    return apart(lambda: timed(functions, avals, device), device)
