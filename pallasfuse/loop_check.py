"""The clock decides how the loops of a call run: with trips written out or not, and with kernels in their bodies or not.

Both are decided for the call as a whole, once, before its loops run that way. Unrolled loops come first (`unrolled_loops`): they
are compared as XLA runs both, and what is planned afterwards is the program that has won.

Kernels in bodies: what a body gains alone may be lost in its loop. A body is checked as a program of its own (`check.py`). In its
loop, XLA fuses what one trip ends with and the next one begins with, and keeps values elsewhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr
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
from pallasfuse.verdicts import BODIES, LOOPS, Verdict

_OURS = "with kernels in the bodies of loops"
_ONE_OF_SEVERAL = frozenset({"cond"})
"""Drawn arguments take one branch, which says nothing of the others."""
_MORE_MEMORY = 1.1
"""Unrolled loops may take so many times as much memory: who computes in chunks has a reason for it."""


def fastest_unrolling(
    jaxpr: Jaxpr, ways: Mapping[str, Jaxpr], device: Any, *, measure: bool
) -> tuple[str | None, Verdict | None]:
    """Returns which of the unrolled forms of a program is the fastest by the clock, as XLA runs them, and what the clock said.

    None: the program as it is. ways: the forms, by words that say how far loops are unrolled. measure: False looks up what is
    known.
    """
    unfit = sorted(primitives(jaxpr) & (UNTIMED | _ONE_OF_SEVERAL))
    if not ways:
        return None, None
    if unfit:
        return None, Verdict(LOOPS, False, f"not measured: it has {', '.join(unfit)}")
    store = current()
    identity = {**environment(device), "of": "unrolled loops", "program": whole_key(jaxpr),
                "ways": ", ".join(map(whole_key, ways.values()))}  # fmt: skip
    known, seconds = store.get(identity), 0.0
    if known is None and not measure:
        return None, None
    if known is None:
        found = apart(lambda: _compared_unrollings(jaxpr, ways, device), device)
        seconds = found.seconds
        best = min((n for n in ways if n in found.microseconds), key=found.microseconds.__getitem__, default=None)
        best = found.winner if found.winner in ways else best
        reasons = "; ".join(
            dict.fromkeys((*filter(None, [found.skipped]), *found.uncompiled.values(), *found.failed.values()))
        )
        entry: Record = {"skipped": reasons} if best is None else {**comparison(found, best), "way": best}
        known = store.update(identity, lambda _: entry, on_disk=best is not None)
    if "skipped" in known:
        return None, Verdict(LOOPS, False, f"not measured ({known['skipped']})", seconds=seconds)
    used = bool(known["faster"]) and known["way"] in ways
    reason = f"{known['way']}: {'they are used' if used else 'loops are as they are'}"
    verdict = Verdict(LOOPS, used, reason, known["us"], known["xla_us"], seconds, remembered=not seconds)
    return (known["way"] if used else None), verdict


def _compared_unrollings(jaxpr: Jaxpr, ways: Mapping[str, Jaxpr], device: Any) -> Measured:
    def run(one: Jaxpr) -> Callable[..., Any]:
        return lambda *args: _compat.eval_jaxpr(one, one.consts, *args)

    functions = {XLA: run(jaxpr)} | {words: run(one) for words, one in ways.items()}
    avals = [v.aval for v in jaxpr.invars]
    return compare(functions, avals, device, budget_s=BUDGET_S, most_memory=_MORE_MEMORY)


def with_bodies_that_pay(plan: Plan, without: Callable[[], Plan], device: Any, *, measure: bool) -> Plan:
    """Returns a checked plan, or the one of the same call whose loops are left to XLA, unless the first is faster by the clock.

    without: makes the other plan, checked as well; it is asked for only if something is measured or the first has lost.
    measure: False looks up what is known. What cannot be timed as a whole keeps the bodies that were faster alone, and says so.
    """
    unfit = sorted(primitives(plan.converted.jaxpr) & (UNTIMED | _ONE_OF_SEVERAL))
    if unfit:
        return _with(plan, Verdict(BODIES, True, f"not measured as a whole: it has {', '.join(unfit)}"))
    other: Plan | None = None
    store, identity = current(), _identity(plan, device)
    known, seconds = store.get(identity), 0.0
    if known is None and not measure:
        return plan
    if known is None:
        other = without()
        found = apart(lambda: _measured(plan, other, device), device)
        is_timed, seconds = _OURS in found.microseconds, found.seconds
        skipped: Record = {"skipped": found.skipped or str({**found.uncompiled, **found.failed}.get(_OURS, ""))}
        entry = comparison(found, _OURS) if is_timed else skipped
        known = store.update(identity, lambda _: entry, on_disk=is_timed)
    if "skipped" in known:
        return _with(plan, Verdict(BODIES, True, f"not measured as a whole ({known['skipped']})", seconds=seconds))
    reason = "they are used" if known["faster"] else "the loops are XLA's own"
    verdict = Verdict(BODIES, known["faster"], reason, known["us"], known["xla_us"], seconds, remembered=not seconds)
    return _with(plan if known["faster"] else other or without(), verdict)


def _with(plan: Plan, verdict: Verdict) -> Plan:
    return replace(plan, verdicts=(*plan.verdicts, verdict))


def _identity(plan: Plan, device: Any) -> Mapping[str, str]:
    plans = list(plan.all())
    kernels = ", ".join(way_of_kernel(k) for p in plans for k in p.kernels)
    programs = ", ".join(whole_key(p.converted.jaxpr) for p in plans)
    return {**environment(device), "of": "call with bodies", "program": programs, "kernels": kernels}


def _measured(plan: Plan, other: Plan, device: Any) -> Measured:
    def run(one: Plan) -> Callable[..., Any]:
        free = replace(one, options=replace(one.options, strict=False, verify=None))
        consts = list(one.converted.jaxpr.consts)
        return lambda *args: execute(free, [*consts, *args])

    avals = [v.aval for v in plan.converted.jaxpr.invars]
    return compare({XLA: run(other), _OURS: run(plan)}, avals, device, budget_s=BUDGET_S)
