"""Checks a whole call: what its kernels gain alone may be lost by what XLA could have fused around them.

Should that be so, some of them are tried in groups. Those that were only nearly even alone are tried as well: what XLA runs beside
them may gain. And where the price promises clearly more than the clock has found, so is what it alone would run. A call that no
clock can see was planned as if nothing were timed, and keeps those of its kernels that are faster alone by their own clock, too.
"""

import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from pallasfuse.decisions import Placed
from pallasfuse.doubts import doubtful
from pallasfuse.executables import Request, is_shortage
from pallasfuse.index_ranges import index_ranges
from pallasfuse.isolation import apart, cores
from pallasfuse.measure import BUDGET_S, MORE_FOR_CALLS_S, Measured, compare
from pallasfuse.parts import untimed, way_of_kernel, whole_key
from pallasfuse.plan import Kernel, Plan
from pallasfuse.store import Identity, Record
from pallasfuse.subjects import OURS, XLA, Bench, comparison, revised, unbound
from pallasfuse.timing import LEAST_GAIN
from pallasfuse.verdicts import WHOLE_CALL, Verdict, words_for_kernels, words_for_times

_SHARE_OF_PROMISED = 0.5
"""Kernels that gain less than this of what they gain alone are looked at again in the call. All gain a little less there, where
what XLA computes beside them reads what they leave; which ones lose is not worth asking before half of it is missing."""
_ALONE = 3
"""So many of them, those that gain the most, are timed in the call one by one: each takes a compilation of the whole call."""
_SEEN_GAIN = 1.005
"""Kernels that gain more than this in the call are tried together: the sums of what kernels take differ by less from run to run."""
_CLEARLY = 1.01
"""Fewer kernels must be faster by this than all: of several that take the same, one seems to be the fastest."""
_CORES_TO_SPARE = 4
"""From so many on, what is perhaps never asked for is compiled beside what is: two for that, and two for what is."""
_NOT_FASTER = "the whole call is not faster than XLA's"
_DOES_NOT_RUN = "it does not run: "
_FASTER_WITHOUT = "the whole call is faster without it"
_NEARLY_EVEN = 1.15
"""A kernel that takes so much longer than XLA's at most may still be worth having for what XLA makes of its neighbours."""
_MORE_TOGETHER = 1.03
"""The whole call must gain so much more by such kernels, and by those that the price alone would run."""


def settled_as_a_whole(
    bench: Bench,
    plan: Plan,
    changes: Mapping[str, Placed | str],
    as_planned: Collection[str],
    verdicts: Sequence[Verdict],
    measures: bool,
) -> Plan:
    """Returns the plan of a call whose kernels were timed alone, with those that make the whole call faster, and all verdicts.

    plan: as it was made. changes: what follows from what kernels take alone, by their names. as_planned: the names of those that
    ran as they are planned. verdicts: on the kernels. measures: False looks up what is known, and measures nothing.
    """
    lost = [v for v in verdicts if v.subject in changes and v.subject in as_planned and not v.kept]
    nearly = {v.subject for v in lost if v.ours_us is not None and v.speedup > 1 / _NEARLY_EVEN}
    with_nearly = {name: change for name, change in changes.items() if name not in nearly}
    chosen = revised(plan, changes)
    if measures:
        _compile_calls_ahead(bench, [chosen, revised(plan, with_nearly)])
    best, of_calls = _fastest(bench, chosen, verdicts, measures)
    best = replace(best, plan=replace(best.plan, verdicts=(*verdicts, *of_calls)))
    if nearly:
        kept = {k.name for k in best.plan.kernels} or {k.name for k in chosen.kernels}
        given_up = {k.name: _FASTER_WITHOUT for k in chosen.kernels if k.name not in kept}
        best = _with_nearly_even(bench, revised(plan, with_nearly | given_up), nearly, best, measures)
    if plan.options.strict:  # all are wanted
        return best.plan
    return _by_price_alone(bench, plan, _promised(plan, changes, as_planned), best, measures).plan


def _is_one_kernel(plan: Plan) -> bool:
    """Is the whole call one kernel and nothing else? Then what was measured of that is said of the call.

    Not so in another form: the kernel was compared with XLA's program of that form, and the call may be faster as it is written.
    """
    return plan.converted.whole is None and len(plan.steps) == 1 and plan.steps[0] is plan.kernels[0]


def requests_for(bench: Bench) -> list[Request]:
    """Returns what the comparison of the whole call asks for whatever becomes of its kernels, XLA's own program; and where there
    are cores to spare, what it asks for if all kernels win alone."""
    calls = [bench.xla_call, bench.call(bench.plan)] if cores() >= _CORES_TO_SPARE else [bench.xla_call]
    return [Request(call, _avals(bench.plan)) for call in calls] if _is_measured(bench.plan) else []


@dataclass(frozen=True, slots=True)
class _Timed:
    """Holds a plan whose whole call was compared with XLA's own. `entry`: the record of that; None where it was not timed."""

    plan: Plan
    verdict: Verdict
    entry: Record | None = None

    def told(self, reason: str) -> Verdict:
        """Returns the verdict of a plan that was tried and is not used."""
        return replace(self.verdict, kept=False, reason=reason)


def _gains(several: Sequence[_Timed]) -> list[float]:
    """Returns how many times as long XLA's own call takes, for calls that were timed.

    By their kernels alone, where all were compared by these: their sum differs less from run to run than what the clock says of
    calls that wait for their starts.
    """
    entries = [one.entry for one in several if one.entry is not None]
    assert len(entries) == len(several)
    by = "kernels_us" if all("kernels_us" in entry for entry in entries) else "us"
    return [entry[f"xla_{by}"] / entry[by] for entry in entries]


def _fastest(bench: Bench, plan: Plan, verdicts: Sequence[Verdict], measures: bool) -> tuple[_Timed, list[Verdict]]:
    """Returns a plan with those of its kernels that make the whole call the fastest, and the verdicts on calls; without any where
    none is faster than XLA's own.

    Should all kernels together gain less than half of what they gain alone, XLA fuses in the call what it cannot fuse in parts of
    it, and some kernels lose by that. Then they are timed in the call in groups (`_groups`), and those that gain there together.
    """
    every = None if not plan.kernels or _is_one_kernel(plan) else _whole(bench, plan, measures)
    if every is None:
        return _Timed(plan, Verdict(WHOLE_CALL, True, "")), []
    if every.entry is None and not every.verdict.kept and every.verdict.seconds:
        error = every.verdict.reason.removeprefix(_DOES_NOT_RUN)
        warnings.warn(f"pallasfuse: the fused call does not run on {bench.device.device_kind}: {error}; XLA's own is used instead",
                      stacklevel=2)  # fmt: skip
    tried = _tried_in_groups(bench, plan, _groups(bench, plan, verdicts, every), measures)
    used = _clearly_ahead(every, tried)
    told = [one.told(f"with {', '.join(names)} alone") for names, one in tried if used is None or one is not used[1]]
    if used is not None:
        names, best = used
        return replace(best, plan=_with_only(plan, names)), [every.told("with all kernels"), *told, best.verdict]
    if every.verdict.kept:
        return every, [*told, every.verdict]
    times = words_for_times(every.verdict.ours_us, every.verdict.xla_us)
    reason = every.verdict.reason if every.entry is None else f"{_NOT_FASTER}: {times}"
    without = revised(plan, {k.name: reason for k in plan.kernels})
    return _Timed(without, every.verdict), [*told, every.verdict]


type _Tried = list[tuple[list[str], _Timed]]
"""The calls that were tried with some kernels only, and the names of these."""


def _tried_in_groups(bench: Bench, plan: Plan, groups: Sequence[list[str]], measures: bool) -> _Tried:
    """Tries the call with each group of kernels, and with those together that gain something in it."""
    free = unbound(plan)
    if measures:
        _compile_calls_ahead(bench, [_with_only(free, names) for names in groups])
    found: _Tried = []

    def take(names: list[str]) -> None:
        one = _whole(bench, _with_only(free, names), measures)
        found.extend([] if one is None else [(names, one)])

    for names in groups:
        take(names)
    gaining = [names for names, one in found if one.entry is not None and _gains([one])[0] > _SEEN_GAIN]
    together = list(chain.from_iterable(gaining))
    if len(gaining) > 1 and len(together) < len(plan.kernels):
        take(together)
    return found


def _clearly_ahead(every: _Timed, tried: _Tried) -> tuple[list[str], _Timed] | None:
    """Returns the fastest of the calls that were tried, with its kernels, if it is faster than XLA's own, and clearly faster than
    the call with every kernel."""
    faster = [(names, one) for names, one in tried if one.entry is not None and one.verdict.kept]
    if not faster:
        return None
    least, *gains = _gains([every, *(one for _, one in faster)])
    best = max(range(len(faster)), key=gains.__getitem__)
    return faster[best] if gains[best] > _CLEARLY * least else None


def _with_only(plan: Plan, names: Collection[str]) -> Plan:
    return revised(plan, {k.name: _FASTER_WITHOUT for k in plan.kernels if k.name not in names})


def _groups(bench: Bench, plan: Plan, verdicts: Sequence[Verdict], every: _Timed) -> list[list[str]]:
    """Returns the names of the kernels that are timed in the call together: the few that save the most alone, equal ones together,
    one by one, and all others. None where nothing is to be found out by that, or a strict user wants all. every: the call with
    all of them."""
    if every.entry is None or plan.options.strict:
        return []
    saved = _saved(plan, verdicts)
    promised_us, unseen_us = sum(saved.values()), (1 - 1 / LEAST_GAIN) * every.entry["xla_us"]
    if every.entry["xla_us"] - every.entry["us"] >= min(_SHARE_OF_PROMISED * promised_us, promised_us - unseen_us):
        return []
    keys, equal = _parts(bench), dict[str, list[str]]()
    for name in saved:
        equal.setdefault(keys[name], []).append(name)
    us = {tuple(names): sum(saved[n] for n in names) for names in equal.values()}
    least_us = (1 - 1 / _CLEARLY) * every.entry["xla_us"]
    largest = sorted((names for names in us if us[names] >= least_us), key=us.__getitem__, reverse=True)[:_ALONE]
    others = [n for n in saved if not any(n in names for names in largest)]
    groups = [*map(list, largest), *([others] if sum(saved[n] for n in others) >= least_us else [])]
    return groups if len(largest) > 1 or (largest and others) else []


def _with_nearly_even(bench: Bench, more: Plan, nearly: Collection[str], best: _Timed, measures: bool) -> _Timed:
    """Returns the call that is left, or the one with more kernels, if that is faster: XLA may read what those leave faster than
    what it would have left itself. nearly: the names of the kernels that were given up for being a little slower. best: the call
    that is left."""
    return _if_clearly_faster(bench, more, best, f"with {', '.join(sorted(nearly))}", measures)


def _by_price_alone(
    bench: Bench, plan: Plan, promised: Mapping[str, Placed | str], best: _Timed, measures: bool
) -> _Timed:
    """Returns the call that is left, or the one with the kernels that the price alone would run, where that promises clearly more
    than the clock has found, and is faster.

    Alone, a kernel is compared with what XLA makes of its part, which gets its operands stored and stores its results: in the
    call XLA may take longer. plan: as it was made. promised: its changes, as of `_promised`.
    """
    kernels = [k for k in plan.kernels if not isinstance(promised.get(k.name), str)]
    if not kernels or {k.name for k in kernels} == {k.name for k in best.plan.kernels}:  # which run in the same ways
        return best
    whole_us = best.verdict.xla_us or sum(k.replaced.us for k in kernels)
    found_us = best.entry["xla_us"] - best.entry["us"] if best.entry is not None else 0.0
    promised_us = sum(k.replaced.us - plan.target.device.price_error * k.price.us for k in kernels)
    if promised_us - found_us < (_MORE_TOGETHER - 1) * whole_us:
        return best
    return _if_clearly_faster(bench, revised(plan, promised), best, "with what the price alone would run", measures)


def _promised(plan: Plan, changes: Mapping[str, Placed | str], as_planned: Collection[str]) -> dict[str, Placed | str]:
    """Returns the changes of a plan by which it has the kernels that are predicted to be faster if no clock decides.

    changes, as_planned: as of `settled_as_a_whole`. What did not run as it is planned, or runs faster in another way, stays as it
    was changed.
    """
    kept = {n: c for n, c in changes.items() if n not in as_planned or isinstance(c, Placed)}
    return kept | _doubts(plan)


def _doubts(plan: Plan) -> dict[str, str]:
    """Says why kernels of a plan would not run if no clock decided, by their names."""
    target = plan.target.judged(timed=False, one_device=plan.target.one_device)

    def doubt(kernel: Kernel) -> str | None:
        margin = target.margin if kernel.group.folds else target.margin**2
        if kernel.replaced.us <= margin * kernel.price.us:
            return "it is not predicted to be faster by more than the error of prices"
        return doubtful(kernel, target, plan.options)

    return {k.name: reason for k in plan.kernels if (reason := doubt(k)) is not None}


def _if_clearly_faster(bench: Bench, other: Plan, best: _Timed, words: str, measures: bool) -> _Timed:
    """Returns the call of a plan with other kernels, if it is clearly faster than the best so far; else that, with a verdict on
    the other one. words: say what is different."""
    call = None if _is_one_kernel(other) else _whole(bench, other, measures)
    if call is None or call.entry is None:
        return best
    gain, least = _gains([call, best]) if best.entry is not None else [*_gains([call]), 1.0]
    before = best.plan.verdicts
    if not call.verdict.kept or gain < _MORE_TOGETHER * least:
        return replace(best, plan=replace(best.plan, verdicts=(*before, call.told(f"{words}: no faster than without"))))
    used = {k.name for k in other.kernels}
    alone = [_changed(v, used) for v in before if v.subject != WHOLE_CALL]
    verdict = replace(call.verdict, reason=f"{words}: the kernels are used")
    return replace(call, plan=replace(other, verdicts=(*alone, verdict)), verdict=verdict)


def _changed(verdict: Verdict, used: Collection[str]) -> Verdict:
    """Returns the verdict on a kernel; the whole call overrules it where one is used that lost alone, or one is not that won."""
    if verdict.ours_us is None or verdict.kept == (verdict.subject in used):
        return verdict
    reason = "the kernel is used: the whole call is faster with it" if not verdict.kept else _FASTER_WITHOUT
    return replace(verdict, kept=not verdict.kept, reason=reason)


def _saved(plan: Plan, verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Returns the microseconds that the kernels of a plan save alone, by their names; for unmeasured ones what is predicted."""
    saved = {k.name: max(0.0, k.replaced.us - k.price.us) for k in plan.kernels}
    return saved | {v.subject: v.saved_us for v in verdicts if v.ours_us is not None and v.subject in saved}


def _parts(bench: Bench) -> dict[str, str]:
    """Returns the key of each kernel's part by the name of the kernel. Equal kernels have the same key."""
    return {s.kernel.name: s.identity["part"] for s in bench.subjects}


def _compile_calls_ahead(bench: Bench, plans: Sequence[Plan]) -> None:
    """Compiles the whole calls of plans that are not known yet at the same time, with XLA's own beside them."""
    start = time.perf_counter()
    open_ones = [p for p in plans if _is_measured(p) and bench.store.get(_identity(bench, p)) is None]
    if open_ones:
        wanted = [Request(f, _avals(bench.plan)) for f in (bench.xla_call, *map(bench.call, open_ones))]
        apart(lambda: bench.executables.of(wanted, bench.device), bench.device)
        bench.compiling_s += time.perf_counter() - start


def _is_measured(plan: Plan) -> bool:
    """Says whether the whole call of a plan is what decides about its kernels, and can be timed."""
    return bool(plan.kernels) and not _is_one_kernel(plan) and not untimed(plan.converted.jaxpr)


def _whole(bench: Bench, plan: Plan, measures: bool) -> _Timed | None:
    """Compares the whole call with its kernels to the same without any; None where nothing is known."""
    unfit = untimed(plan.converted.jaxpr)
    if unfit:
        reason = f"not measured: it has {', '.join(unfit)}"
        return _Timed(plan, Verdict(WHOLE_CALL, True, reason)) if measures else None
    identity = _identity(bench, plan)
    known, seconds = bench.store.get(identity), 0.0
    if known is None and measures:
        found = apart(lambda: _measured(bench, plan), bench.device)
        bench.executables.forget([bench.call(plan)])
        seconds, bench.compiling_s = found.seconds + bench.compiling_s, 0.0
        error = {**found.uncompiled, **found.failed}.get(OURS, "")
        if OURS in found.microseconds:
            entry = comparison(found, OURS)
        elif error and not is_shortage(error):
            entry = {"error": error}
        else:
            reason = f"not measured ({found.skipped}): its kernels are used"
            return _Timed(plan, Verdict(WHOLE_CALL, True, reason, seconds=seconds))
        # what fails when it runs may run in another process
        known = bench.store.update(identity, lambda _: entry, on_disk="error" not in entry)
    if known is None:
        return None
    if "error" in known:
        return _Timed(plan, Verdict(WHOLE_CALL, False, f"{_DOES_NOT_RUN}{known['error']}", seconds=seconds))
    reason = "the kernels are used" if known["faster"] else "XLA's own is used"
    reason += words_for_kernels(known)
    times = known["us"], known["xla_us"]
    return _Timed(plan, Verdict(WHOLE_CALL, known["faster"], reason, *times, seconds, remembered=not seconds), known)


def _identity(bench: Bench, plan: Plan) -> Identity:
    parts = _parts(bench)
    kernels = ", ".join(f"{parts[k.name]} on {way_of_kernel(k)}" for k in plan.kernels)
    of = "body of a timed loop" if plan.boundary.timed else "call"
    return {**bench.around, "of": of, "program": whole_key(plan.converted.jaxpr), "kernels": kernels}


def _measured(bench: Bench, plan: Plan) -> Measured:
    functions, jaxpr = {XLA: bench.xla_call, OURS: bench.call(plan)}, plan.converted.jaxpr
    return compare(
        functions,
        _avals(plan),
        bench.device,
        budget_s=BUDGET_S,
        more_s=MORE_FOR_CALLS_S,
        executables=bench.executables,
        parts=plan.boundary.timed,
        below=index_ranges(jaxpr.eqns, jaxpr.invars),
    )


def _avals(plan: Plan) -> list[Any]:
    """Returns the shapes and types of the arguments of a call."""
    return [v.aval for v in plan.converted.jaxpr.invars]
