"""Loops with kernels in their bodies, against the same loops as XLA runs them: what a body gains alone may be lost in its loop.

A body is checked as a program of its own (`check.py`). In its loop, XLA fuses what one trip ends with and the next one begins with,
and keeps values elsewhere; so the clock decides about the whole call, once, before such bodies are used.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pallasfuse.check import BUDGET_S
from pallasfuse.environment import environment
from pallasfuse.execution import execute
from pallasfuse.forms import UNTIMED
from pallasfuse.isolation import apart
from pallasfuse.measure import Measured, compare
from pallasfuse.parts import primitives, way_of_kernel, whole_key
from pallasfuse.plan import Plan
from pallasfuse.store import Record, current
from pallasfuse.subjects import XLA, comparison
from pallasfuse.verdicts import BODIES, Verdict

_OURS = "with kernels in the bodies of loops"


def with_bodies_that_pay(plan: Plan, without: Callable[[], Plan], device: Any) -> Plan:
    """Returns a checked plan, or the one of the same call whose loops are left to XLA, unless the first is faster by the clock.

    without: makes the other plan, checked as well; it is asked for only if something is measured or the first has lost.
    """
    if primitives(plan.converted.jaxpr) & UNTIMED:
        return plan
    other: Plan | None = None
    identity = _identity(plan, device)
    known, seconds = current().get(identity), 0.0
    if known is None:
        other = without()
        found = apart(lambda: _measured(plan, other, device), device)
        if _OURS not in found.microseconds:
            return plan  # what does not run at all is found elsewhere
        seconds, entry = found.seconds, comparison(found, _OURS)
        known = current().update(identity, lambda _: entry)
    kept = plan if known["faster"] else other or without()
    return replace(kept, verdicts=(*kept.verdicts, _verdict(known, seconds)))


def with_known_bodies(plan: Plan, device: Any) -> Plan:
    """Returns a plan without the bodies that are known to lose, and with the verdict on them; nothing is measured."""
    known = current().get(_identity(plan, device)) if plan.bodies else None
    if known is None:
        return plan
    return replace(plan, bodies=plan.bodies if known["faster"] else (), verdicts=(*plan.verdicts, _verdict(known, 0.0)))


def _identity(plan: Plan, device: Any) -> Mapping[str, str]:
    kernels = ", ".join(way_of_kernel(k) for p in plan.all() for k in p.kernels)
    program = whole_key(plan.converted.jaxpr)
    return {**environment(device), "of": "call with bodies", "program": program, "kernels": kernels}


def _verdict(known: Record, seconds: float) -> Verdict:
    reason = "they are used" if known["faster"] else "the loops are XLA's own"
    return Verdict(BODIES, known["faster"], reason, known["us"], known["xla_us"], seconds, remembered=not seconds)


def _measured(plan: Plan, other: Plan, device: Any) -> Measured:
    def run(one: Plan) -> Callable[..., Any]:
        free = replace(one, options=replace(one.options, strict=False, verify=None))
        consts = list(one.converted.jaxpr.consts)
        return lambda *args: execute(free, [*consts, *args])

    avals = [v.aval for v in plan.converted.jaxpr.invars]
    return compare({XLA: run(other), _OURS: run(plan)}, avals, device, budget_s=BUDGET_S)
