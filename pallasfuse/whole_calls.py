"""The check of a whole call: what its kernels gain alone may be lost by what XLA could have fused around them.

Should that be so, fewer kernels are tried; and those that were only nearly even alone, where XLA's neighbours gain by them.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pallasfuse.decisions import Placed
from pallasfuse.executables import Request
from pallasfuse.forms import UNTIMED
from pallasfuse.isolation import apart, cores
from pallasfuse.measure import Measured, compare, is_shortage
from pallasfuse.parts import primitives, way_of_kernel, whole_key
from pallasfuse.plan import Plan
from pallasfuse.store import Identity
from pallasfuse.subjects import OURS, XLA, Bench, comparison, revised
from pallasfuse.timing import LEAST_GAIN
from pallasfuse.verdicts import WHOLE_CALL, Verdict, words_for_kernels, words_for_times

BUDGET_S = 0.25
"""The seconds that the timed calls of one comparison may take together, or twice that if they are few."""
_MORE_FOR_CALLS_S = 1.0
"""The seconds that a whole call of long programs gets beyond that while its kernels seem to win: it decides on all of them."""
_FEWER_KERNELS = 3
"""So often some kernels are given up to save the others, when the whole call is not faster with them."""
_NEARLY_EVEN = 1.15
"""A kernel that takes so much longer than XLA's at most may still be worth having for what XLA makes of its neighbours."""
_MORE_TOGETHER = 1.03
"""The whole call must gain so much more by such kernels."""


def settled_as_a_whole(
    bench: Bench,
    plan: Plan,
    changes: Mapping[str, Placed | str],
    as_planned: set[str],
    verdicts: Sequence[Verdict],
    measures: bool,
) -> Plan:
    """Returns the plan of a call whose kernels were timed alone, with those that make the whole call faster, and all verdicts.

    plan: as it was made. changes: what follows from what kernels take alone, by their names. as_planned: the names of those that
    ran as they are planned. verdicts: on the kernels. measures: False looks up what is known, and measures nothing.
    """
    lost = [v for v in verdicts if v.subject in changes.keys() & as_planned and not v.kept and v.ours_us is not None]
    nearly = {v.subject for v in lost if v.speedup > 1 / _NEARLY_EVEN}
    chosen = revised(plan, changes)
    more = revised(plan, {name: change for name, change in changes.items() if name not in nearly}) if nearly else chosen
    if measures:
        _compile_ahead(bench, [chosen, more])
    left, of_calls = _as_a_whole(bench, chosen, verdicts, measures)
    left = replace(left, verdicts=(*verdicts, *of_calls))
    return _with_nearly_even(bench, more, nearly, left, measures) if nearly else left


def _is_one_kernel(plan: Plan) -> bool:
    """Is the whole call one kernel and nothing else? Then what was measured of that is said of the call."""
    return len(plan.steps) == 1 and plan.steps[0] is plan.kernels[0]


def requests_for(bench: Bench) -> list[Request]:
    """Returns what the comparison of the whole call is going to ask for whatever becomes of its kernels: XLA's own program."""
    return [Request(bench.xla_call, _avals(bench.plan))] if _is_measured(bench.plan) else []


def _as_a_whole(bench: Bench, plan: Plan, verdicts: Sequence[Verdict], measures: bool) -> tuple[Plan, list[Verdict]]:
    """Returns a plan whose whole call is faster than XLA's, with the verdicts on calls.

    Where it is not, kernels are given up, the ones that gain the least first (`_next_given_up`); all after a few tries.
    """
    found: list[Verdict] = []
    while plan.kernels and not _is_one_kernel(plan):
        whole = _whole(bench, plan, measures)
        found += [] if whole is None else [whole]
        if whole is None or whole.kept:
            break
        if measures and len(found) == 1:
            _compile_ahead(bench, _with_fewer(bench, plan, verdicts, whole))
        given_up = list(_saved(plan, verdicts))
        if len(found) <= _FEWER_KERNELS:
            given_up = _next_given_up(bench, plan, verdicts, whole)
        if len(given_up) < len(plan.kernels):
            found[-1] = replace(whole, reason=f"without {', '.join(given_up)}, then")
        times = words_for_times(whole.ours_us, whole.xla_us)
        reason = f"the whole call is not faster than XLA's: {times}" if whole.ours_us is not None else whole.reason
        plan = revised(plan, dict.fromkeys(given_up, reason))
    return plan, found


def _with_fewer(bench: Bench, plan: Plan, verdicts: Sequence[Verdict], lost: Verdict) -> list[Plan]:
    """Returns the plans that are tried next, as far as there are cores to compile them beside each other: the first may be the
    last that is needed. lost: the verdict on the whole call with all kernels."""
    found: list[Plan] = []
    while plan.kernels and len(found) < min(_FEWER_KERNELS, max(1, cores() // 2)):
        plan = revised(plan, dict.fromkeys(_next_given_up(bench, plan, verdicts, lost), ""))
        found.append(plan)
    return found


def _next_given_up(bench: Bench, plan: Plan, verdicts: Sequence[Verdict], lost: Verdict) -> list[str]:
    """Returns the names of the kernels that gain the least, equal ones together; of all, when the others gain too little for a
    clock to see it in the call. lost: the verdict on a whole call that was not faster."""
    saved = _saved(plan, verdicts)
    least = _least(bench, saved)
    left_us = sum(us for name, us in saved.items() if name not in least)
    seen = lost.ours_us is not None and lost.xla_us is not None and left_us >= (1 - 1 / LEAST_GAIN) * lost.xla_us
    return least if seen else list(saved)


def _with_nearly_even(bench: Bench, more: Plan, nearly: Collection[str], left: Plan, measures: bool) -> Plan:
    """Returns the plan that is left, or the one with more kernels, if its whole call is faster: XLA may read what those leave
    faster than what it would have left itself. nearly: the names of the kernels that were given up for being a little slower."""
    if _is_one_kernel(more):
        return left
    call = _whole(bench, more, measures)
    if call is None or call.ours_us is None:
        return left
    names = ", ".join(sorted(nearly))
    gain = call.speedup / max((v.speedup for v in left.verdicts if v.subject == WHOLE_CALL and v.kept), default=1.0)
    if not call.kept or gain < _MORE_TOGETHER:
        refused = replace(call, kept=False, reason=f"with {names}: no faster than without")
        return replace(left, verdicts=(*left.verdicts, refused))
    chosen = [replace(v, kept=True, reason="the kernel is used: the whole call is faster with it") if v.subject in nearly else v
              for v in left.verdicts if v.subject != WHOLE_CALL]  # fmt: skip
    return replace(more, verdicts=(*chosen, replace(call, reason=f"with {names}: the kernels are used")))


def _saved(plan: Plan, verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Returns the microseconds that the kernels of a plan save alone, by their names; for unmeasured ones what is predicted."""
    saved = {k.name: max(0.0, k.replaced.us - k.price.us) for k in plan.kernels}
    return saved | {v.subject: v.saved_us for v in verdicts if v.ours_us is not None and v.subject in saved}


def _least(bench: Bench, saved: Mapping[str, float]) -> list[str]:
    """Returns the names of the kernels that save the least, equal ones together. saved: microseconds, by their names."""
    parts = _parts(bench)
    together: dict[str, list[str]] = {}
    for name in saved:
        together.setdefault(parts[name], []).append(name)
    return min(together.values(), key=lambda names: sum(saved[n] for n in names))


def _parts(bench: Bench) -> dict[str, str]:
    """Returns the key of each kernel's part by the name of the kernel. Equal kernels have the same key."""
    return {s.kernel.name: s.identity["part"] for s in bench.subjects}


def _compile_ahead(bench: Bench, plans: Sequence[Plan]) -> None:
    """Compiles the whole calls of plans that are not known yet at the same time, with XLA's own beside them."""
    open_ones = [p for p in plans if _is_measured(p) and bench.store.get(_identity(bench, p)) is None]
    if open_ones:
        requests = [Request(f, _avals(bench.plan)) for f in (bench.xla_call, *map(bench.call, open_ones))]
        apart(lambda: bench.executables.of(requests, bench.device), bench.device)


def _is_measured(plan: Plan) -> bool:
    """Says whether the whole call of a plan is what decides about its kernels, and can be timed."""
    return bool(plan.kernels) and not _is_one_kernel(plan) and not primitives(plan.converted.jaxpr) & UNTIMED


def _whole(bench: Bench, plan: Plan, measures: bool) -> Verdict | None:
    """Compares the whole call with its kernels to the same without any; None where nothing is known."""
    unfit = sorted(primitives(plan.converted.jaxpr) & UNTIMED)
    if unfit:
        return Verdict(WHOLE_CALL, True, f"not measured: it has {', '.join(unfit)}") if measures else None
    identity = _identity(bench, plan)
    known, seconds = bench.store.get(identity), 0.0
    if known is None and measures:
        found = apart(lambda: _measured(bench, plan), bench.device)
        seconds = found.seconds
        if OURS not in found.microseconds:
            return _not_measured(bench, found)
        entry = comparison(found, OURS)
        known = bench.store.update(identity, lambda _: entry)
    if known is None:
        return None
    reason = "the kernels are used" if known["faster"] else "XLA's own is used"
    reason += words_for_kernels(known)
    return Verdict(WHOLE_CALL, known["faster"], reason, known["us"], known["xla_us"], seconds, remembered=not seconds)


def _identity(bench: Bench, plan: Plan) -> Identity:
    parts = _parts(bench)
    kernels = ", ".join(f"{parts[k.name]} on {way_of_kernel(k)}" for k in plan.kernels)
    return {**bench.around, "of": "call", "program": whole_key(plan.converted.jaxpr), "kernels": kernels}


def _not_measured(bench: Bench, found: Measured) -> Verdict:
    failed = {**found.uncompiled, **found.failed}.get(OURS, "")
    if not failed or is_shortage(failed):
        reason = f"not measured ({found.skipped}): its kernels are used"
        return Verdict(WHOLE_CALL, True, reason, seconds=found.seconds)
    warnings.warn(f"pallasfuse: the fused call does not run on {bench.device.device_kind}: {failed}; XLA's own is used instead",
                  stacklevel=2)  # fmt: skip
    return Verdict(WHOLE_CALL, False, f"it does not run: {failed}", seconds=found.seconds)


def _measured(bench: Bench, plan: Plan) -> Measured:
    functions = {XLA: bench.xla_call, OURS: bench.call(plan)}
    return compare(
        functions,
        _avals(plan),
        bench.device,
        budget_s=BUDGET_S,
        more_s=_MORE_FOR_CALLS_S,
        executables=bench.executables,
    )


def _avals(plan: Plan) -> list[Any]:
    """Returns the shapes and types of the arguments of a call."""
    return [v.aval for v in plan.converted.jaxpr.invars]
