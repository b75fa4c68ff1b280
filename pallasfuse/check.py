"""The check: before a plan is used on a device at hand, its kernels are timed against what XLA makes of the same parts, once.

First every kernel alone, then, if any is left, the whole call: what a kernel gains may be lost by what XLA could have fused around
it. Should that be so, fewer kernels are tried. Ties are XLA's. A kernel that does not compile, or fails when it first runs, is
replaced by the next way to run it, or by XLA. Verdicts are kept in the store (`store.py`), so that a program is checked once for
each kind of device; equal parts are one.
"""

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from pallasfuse.decisions import Placed
from pallasfuse.execution import execute
from pallasfuse.first_time import IMPORTS
from pallasfuse.forms import UNTIMED, in_another_form, in_faster_form
from pallasfuse.isolation import apart
from pallasfuse.loop_failures import find_failing
from pallasfuse.measure import Made, Measured, compare, compiled, is_shortage
from pallasfuse.options import FuseOptions
from pallasfuse.parts import primitives, way_of_kernel, whole_key
from pallasfuse.plan import Kernel, Plan
from pallasfuse.store import Record
from pallasfuse.subjects import XLA, Bench, Subject, comparison
from pallasfuse.timing import LEAST_GAIN
from pallasfuse.verdicts import WHOLE_CALL, Verdict

BUDGET_S = 0.25
"""The seconds that the timed calls of one comparison may take together, or twice that if they are few."""
_MORE_FOR_CALLS_S = 1.0
"""The seconds that a whole call of long programs gets beyond that while its kernels seem to win: it decides on all of them."""
_OURS = "fused"
_OTHER_WAYS = 3
"""So many other ways to run a kernel are tried when its own fails."""
_RIVALS_FROM = 1.5
"""Rivals of a kernel that takes so many times as long as XLA's are not tried: they are predicted to take as long as it."""
_FEWER_KERNELS = 3
"""So often some kernels are given up to save the others, when the whole call is not faster with them."""
_NEARLY_EVEN = 1.15
"""A kernel that takes so much longer than XLA's at most may still be worth having for what XLA makes of its neighbours."""
_MORE_TOGETHER = 1.03
"""The whole call must gain so much more by such kernels."""


def wanted(options: FuseOptions) -> bool:
    """Says whether plans with these options are to be checked.

    Who asks for a target, for tiles or for everything (`strict`) gets what was asked for, unless `check` is True;
    `PALLASFUSE_CHECK=0` switches every check off.
    """
    asked = options.target or options.strict or _tiled(options)
    return not _off(options) and (options.check is True or not asked)


def _off(options: FuseOptions) -> bool:
    return os.environ.get("PALLASFUSE_CHECK", "1") == "0" or options.check is False


def _tiled(options: FuseOptions) -> bool:
    return bool(options.tiles or options.parts or options.warps or options.stages or options.schedule)


def settled(plan: Plan, device: Any, *, measure: bool = True) -> Plan:
    """Returns a plan as it is used on a device: checked, where that is wanted; else as it was tuned, without what is known to
    fail. measure: as of `check`."""
    return check(plan, device, measure=measure) if wanted(plan.options) else unchecked(plan, device)


def check(plan: Plan, device: Any, *, measure: bool = True) -> Plan:
    """Returns a plan without those kernels that are not faster than XLA's on a device, with its verdicts.

    measure: False looks up what is known, and measures nothing.
    """
    plan = _with_bodies(plan, partial(check, device=device, measure=measure))
    plan, of_form = in_faster_form(plan, device, measure=measure)
    if not plan.kernels:
        return replace(plan, verdicts=of_form)
    bench = Bench(plan, device)
    if measure and any(_is_open(s) for s in bench.subjects):
        apart(lambda: _measure_kernels(bench), device)
    changes: dict[str, Placed | str] = {}
    verdicts: list[Verdict] = [*of_form]
    for subject in bench.subjects:
        change, verdict = _decision(bench, subject)
        verdicts += [] if verdict is None else [verdict]
        changes |= {} if change is None else {subject.kernel.name: change}
    made: Made = {}
    left, of_calls = _as_a_whole(bench, _revised(plan, changes), verdicts, measure, made)
    left = replace(left, verdicts=(*verdicts, *of_calls))
    left = _with_nearly_even(bench, plan, changes, left, measure, made)
    return _in_another_form(left, device, measure) if plan.outdoes and not left.kernels else left


def _in_another_form(plan: Plan, device: Any, measure: bool) -> Plan:
    """The plan, none of whose kernels was faster, or that of another form, which the kernels seemed to be better than."""
    other, of_form = in_another_form(plan, device, measure=measure)
    if other is None:
        return replace(plan, verdicts=(*plan.verdicts, *of_form))
    found = check(other, device, measure=measure)
    return replace(found, verdicts=(*plan.verdicts, *found.verdicts))


def unchecked(plan: Plan, device: Any) -> Plan:
    """A plan whose kernels that are known to fail on a device run in another way, or by XLA; and, unless checks are switched off,
    whose tuned ones run in the way that was the fastest. Nothing is measured or compiled."""
    plan = _with_bodies(plan, partial(unchecked, device=device))
    if not _off(plan.options):
        plan, _ = in_faster_form(plan, device, measure=False)
    changes: dict[str, Placed | str] = {}
    for subject in Bench(plan, device).subjects:
        best = None if _off(plan.options) else _fastest_way(subject)
        entry = subject.entry(subject.way)
        if best is not None:
            changes |= {} if best == subject.way else {subject.kernel.name: subject.find(best) or _GONE}
        elif entry is not None and "error" in entry:
            known = subject.record["ways"]
            others = ((p, known.get(subject.way_of(p))) for p, _ in islice(subject.others(), _OTHER_WAYS))
            instead = next((p for p, other in others if other is not None and "error" not in other), None)
            changes[subject.kernel.name] = instead or _does_not_run(entry)
    return _revised(plan, {n: c for n, c in changes.items() if c is not _GONE})


def _with_bodies(plan: Plan, settle: Callable[[Plan], Plan]) -> Plan:
    """The plan with the bodies of its loops settled; those in which nothing is fused any more are left out."""
    bodies = [replace(b, plan=settle(b.plan)) for b in plan.bodies]
    return replace(plan, bodies=tuple(b for b in bodies if b.plan.fuses))


def _revised(plan: Plan, changes: Mapping[str, Placed | str]) -> Plan:
    """As `pipeline.revised`, which is imported only where something changes."""
    if not changes:
        return plan
    with IMPORTS:
        from pallasfuse.pipeline import revised
    return revised(plan, changes)


_GONE = "a way to run it that there is no more"


def find_failures(plan: Plan, device: Any) -> list[str]:
    """Compile every kernel of a plan alone, and note what fails and which other way does not. Returns one line for each failure."""
    found: list[str] = []

    def try_all() -> None:
        found.extend(find_failing(plan.loops, plan.target.device, device))
        for bench in (Bench(p, device) for p in plan.all()):
            for subject in bench.subjects:
                _first_that_compiles(bench, subject, found)

    apart(try_all, device)
    return found


# --- what follows from what is known


def _winner(subject: Subject) -> str | None:
    """The winner, when the kernel was tuned: a way to run it, or XLA's own. None where it was not, or tiles were asked for."""
    winner: str | None = None if _tiled(subject.plan.options) else subject.record.get("winner")
    return winner


def _fastest_way(subject: Subject) -> str | None:
    """Returns the fastest way to run a kernel that was tuned, whether or not XLA's own is faster still; None if it was not
    tuned."""
    winner = _winner(subject)
    if winner != XLA:
        return winner
    timed = {n: entry["us"] for n, entry in subject.record["ways"].items() if "us" in entry}
    return min(timed, key=timed.__getitem__, default=None)


def _runs_as_planned(subject: Subject) -> bool:
    """Was the planned way the one that was compared with XLA's, and did it run?"""
    entry = subject.entry(subject.way)
    return entry is not None and "us" in entry and _winner(subject) in (None, XLA, subject.way)


def _is_near(subject: Subject) -> bool:
    """Is the planned way fast enough that another one of about its price may be faster than XLA's?"""
    entry = subject.entry(subject.way)
    by = "kernels_us" if entry is not None and "kernels_us" in entry else "us"
    return entry is not None and entry[by] <= _RIVALS_FROM * entry[f"xla_{by}"]


def _is_open(subject: Subject) -> bool:
    return _winner(subject) is None and subject.entry(subject.way) is None


def _decision(bench: Bench, subject: Subject) -> tuple[Placed | str | None, Verdict | None]:
    """Decides whether a kernel runs in another way (a `Placed`), is left to XLA (a reason), or runs as it is planned (None).

    The verdict that comes with it is None where nothing is known.
    """
    kernel, entry = subject.kernel, subject.entry(subject.way)
    seconds = bench.spent.get(kernel.name, 0.0)
    winner = _winner(subject)
    if winner is not None and winner not in (XLA, subject.way):
        placed, best = subject.find(winner), subject.entry(winner)
        if placed is not None and best is not None:
            return _judged(subject, best, placed, seconds, "tuned")
    if entry is None:
        skipped = bench.skipped.get(kernel.name)
        return None, None if skipped is None else Verdict(kernel.name, True, skipped, seconds=seconds)
    if "error" not in entry:
        better = _better_rival(subject, entry)
        if better is not None:
            return _judged(subject, better[1], better[0], seconds, "faster than what was planned")
        return _judged(subject, entry, None, seconds, "tuned" if winner else "")
    measured = any("us" in e for n, e in subject.record["ways"].items() if n != subject.way)
    for placed, _ in islice(subject.others(), _OTHER_WAYS) if measured else ():  # to find the others may take a search
        other = subject.entry(subject.way_of(placed))
        if other is not None and "us" in other:
            return _judged(subject, other, placed, seconds, "the way that was planned fails")
    reason = _does_not_run(entry)
    return reason, Verdict(kernel.name, False, reason, seconds=seconds, remembered=not seconds)


def _better_rival(subject: Subject, entry: Record) -> tuple[Placed, Record] | None:
    """The fastest rival of the planned way, with its record, if it is faster. entry: the record of the planned way."""
    best: tuple[Placed | None, Record] = None, entry
    for placed in () if _winner(subject) is not None else subject.kernel.rivals:
        other = subject.entry(subject.way_of(placed))
        if other is not None and "us" in other and _is_better(other, best[1]):
            best = placed, other
    return None if best[0] is None else (best[0], best[1])


def _is_better(one: Record, other: Record) -> bool:
    """Is one way to run a kernel faster, next to XLA's, than another one?"""
    if one["faster"] != other["faster"]:
        return bool(one["faster"])
    by = "kernels_us" if "kernels_us" in one and "kernels_us" in other else "us"
    return bool(one[by] / one[f"xla_{by}"] < other[by] / other[f"xla_{by}"])


def _does_not_run(entry: Record) -> str:
    return f"its kernel does not run on this device ({entry['error']})"


def _judged(
    subject: Subject, entry: Record, placed: Placed | None, seconds: float, why: str
) -> tuple[Placed | str | None, Verdict]:
    ours, theirs, faster = entry["us"], entry["xla_us"], entry["faster"]
    reason = "the kernel is used" if faster else "XLA's is used"
    if faster and ours >= theirs and "kernels_us" in entry:
        reason += f" (by the times of kernels alone; with their starts {_times(ours, theirs)})"
        ours, theirs = entry["kernels_us"], entry["xla_kernels_us"]
    if placed is not None:
        reason += f" (on {placed.phases[0].target.name}, {placed.schedule}: {why})"
    elif why:
        reason += f" ({why})"
    reason += _of_kernels(entry)
    verdict = Verdict(subject.kernel.name, faster, reason, ours, theirs, seconds, remembered=not seconds)
    if faster:
        return placed, verdict
    return f"its kernel is not faster than XLA's on this device: {_times(ours, theirs)}{_of_kernels(entry)}", verdict


def _of_kernels(entry: Record) -> str:
    """Returns words on the times of kernels alone, where they were compared and XLA's won; else nothing."""
    if entry["faster"] or "kernels_us" not in entry:
        return ""
    return f"; kernels alone, without the gaps between them: {_times(entry['kernels_us'], entry['xla_kernels_us'])}"


def _times(ours: float | None, theirs: float | None) -> str:
    return "not measured" if ours is None or theirs is None else f"{ours:.4g} us against {theirs:.4g} us"


# --- measuring


def _measure_kernels(bench: Bench) -> None:
    """Note how every kernel that is not known yet compares with XLA's, equal ones once; one warning for all that fail."""
    failures: list[str] = []
    for subject in bench.subjects:
        if _is_open(subject):
            _first_that_runs(bench, subject, partial(_measured_error, bench, subject), failures)
        for placed, kernel in subject.rivals if _runs_as_planned(subject) and _is_near(subject) else ():
            if subject.entry(subject.way_of(placed)) is None:
                _measured_error(bench, subject, kernel, subject.way_of(placed))
    if failures:
        warnings.warn(f"pallasfuse: {'; '.join(failures)}", stacklevel=2)


def _first_that_compiles(bench: Bench, subject: Subject, failures: list[str]) -> None:
    """Note whether a kernel compiles, and if not, which other way to run it does."""

    def error_of(kernel: Kernel, name: str) -> str | None:
        program = compiled(subject.function(kernel), subject.avals, bench.device)
        found = {"schedule": str(kernel.schedule)} | ({"error": program} if isinstance(program, str) else {})
        if isinstance(program, str) or name != subject.way:
            subject.note(name, found)
        return program if isinstance(program, str) else None

    _first_that_runs(bench, subject, error_of, failures)


def _first_that_runs(
    bench: Bench, subject: Subject, error_of: Callable[[Kernel, str], str | None], failures: list[str]
) -> None:
    """Try a kernel as it is planned; should that fail, other ways until one does not. Adds a line to `failures` if it did."""
    kernel = subject.kernel
    error = error_of(kernel, subject.way)
    if error is None:
        return
    then = "XLA's own is used"
    for placed, other in islice(subject.others(), _OTHER_WAYS):
        if error_of(other, subject.way_of(placed)) is None:
            then = f"instead: {placed.schedule}, on {placed.phases[0].target.name}"
            break
    failures.append(
        f"{kernel.name} ({kernel.group.source}) does not run on {bench.device.device_kind}: {error}; {then}"
    )


def _measured_error(bench: Bench, subject: Subject, kernel: Kernel, name: str) -> str | None:
    """Note how one way to run a kernel compares with XLA's. Returns its error, if it has one."""
    functions = {XLA: subject.part.run, _OURS: subject.function(kernel)}
    expected_us = min(kernel.price.us, kernel.replaced.us or math.inf)
    found = compare(
        functions,
        subject.avals,
        bench.device,
        budget_s=BUDGET_S,
        expected_us=expected_us,
        parts=_decided_by_kernels(bench, subject),
    )
    bench.spent[kernel.name] = bench.spent.get(kernel.name, 0.0) + found.seconds
    error = subject.take_down(name, kernel, found, _OURS)
    if error is None and _OURS not in found.microseconds:
        reason = found.skipped or found.failed.get(_OURS, "")
        bench.skipped[kernel.name] = f"not measured ({reason}): chosen by its price"
    return error


def _decided_by_kernels(bench: Bench, subject: Subject) -> bool:
    """Does the time of its kernels decide about a short one? Only where the clock decides about the whole call after it."""
    return subject.within and not primitives(bench.plan.converted.jaxpr) & UNTIMED


# --- the whole call


def _is_one_kernel(plan: Plan) -> bool:
    """Is the whole call one kernel and nothing else? Then what was measured of that is said of the call."""
    return len(plan.steps) == 1 and plan.steps[0] is plan.kernels[0]


def _as_a_whole(
    bench: Bench, plan: Plan, verdicts: Sequence[Verdict], measure: bool, made: Made
) -> tuple[Plan, list[Verdict]]:
    """A plan whose whole call is faster than XLA's, with the verdicts on calls. Where it is not, kernels are given up one after the
    other, the one that gains the least first, equal ones together; all after a few tries, or when the others gain too little for a
    clock to see it in the call."""
    found: list[Verdict] = []
    while plan.kernels and not _is_one_kernel(plan):
        whole = _whole(bench, plan, made, measure)
        found += [] if whole is None else [whole]
        if whole is None or whole.kept:
            break
        saved = _saved(plan, verdicts)
        given_up = _least(bench, saved)
        left_us = sum(us for name, us in saved.items() if name not in given_up)
        if (
            whole.ours_us is None
            or whole.xla_us is None
            or len(found) > _FEWER_KERNELS
            or left_us < (1 - 1 / LEAST_GAIN) * whole.xla_us
        ):
            given_up = list(saved)
        if len(given_up) < len(plan.kernels):
            found[-1] = replace(whole, reason=f"without {', '.join(given_up)}, then")
        times = _times(whole.ours_us, whole.xla_us)
        reason = f"the whole call is not faster than XLA's: {times}" if whole.ours_us is not None else whole.reason
        plan = _revised(plan, dict.fromkeys(given_up, reason))
    return plan, found


def _with_nearly_even(
    bench: Bench, plan: Plan, changes: Mapping[str, Placed | str], left: Plan, measure: bool, made: Made
) -> Plan:
    """The plan that is left, or the one that also has the kernels that were given up for being a little slower alone, if its whole
    call is faster: XLA may read what they leave faster than what it would have left itself."""
    as_planned = {s.kernel.name for s in bench.subjects if _runs_as_planned(s)}
    lost = (
        v for v in left.verdicts if v.subject in changes.keys() & as_planned and not v.kept and v.ours_us is not None
    )
    nearly = {v.subject for v in lost if v.speedup > 1 / _NEARLY_EVEN}
    together = _revised(plan, {name: change for name, change in changes.items() if name not in nearly})
    if not nearly or _is_one_kernel(together):
        return left
    call = _whole(bench, together, made, measure)
    if call is None or call.ours_us is None:
        return left
    names = ", ".join(sorted(nearly))
    gain = call.speedup / max((v.speedup for v in left.verdicts if v.subject == WHOLE_CALL and v.kept), default=1.0)
    if not call.kept or gain < _MORE_TOGETHER:
        refused = replace(call, kept=False, reason=f"with {names}: no faster than without")
        return replace(left, verdicts=(*left.verdicts, refused))
    chosen = [replace(v, kept=True, reason="the kernel is used: the whole call is faster with it") if v.subject in nearly else v
              for v in left.verdicts if v.subject != WHOLE_CALL]  # fmt: skip
    return replace(together, verdicts=(*chosen, replace(call, reason=f"with {names}: the kernels are used")))


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


def _whole(bench: Bench, plan: Plan, made: Made, measure: bool) -> Verdict | None:
    """Compares the whole call with its kernels to the same without any; None where nothing is known. `made`: as of `compare`."""
    unfit = sorted(primitives(plan.converted.jaxpr) & UNTIMED)
    if unfit:
        return Verdict(WHOLE_CALL, True, f"not measured: it has {', '.join(unfit)}") if measure else None
    parts = _parts(bench)
    kernels = ", ".join(f"{parts[k.name]} on {way_of_kernel(k)}" for k in plan.kernels)
    identity = {**bench.around, "of": "call", "program": whole_key(plan.converted.jaxpr), "kernels": kernels}
    known, seconds = bench.store.get(identity), 0.0
    if known is None and measure:
        found = apart(lambda: _measure_whole(bench, plan, made), bench.device)
        seconds = found.seconds
        if _OURS not in found.microseconds:
            return _not_measured(bench, found)
        entry = comparison(found, _OURS)
        known = bench.store.update(identity, lambda _: entry)
    if known is None:
        return None
    reason = "the kernels are used" if known["faster"] else "XLA's own is used"
    reason += _of_kernels(known)
    return Verdict(WHOLE_CALL, known["faster"], reason, known["us"], known["xla_us"], seconds, remembered=not seconds)


def _not_measured(bench: Bench, found: Measured) -> Verdict:
    failed = {**found.uncompiled, **found.failed}.get(_OURS, "")
    if not failed or is_shortage(failed):
        reason = f"not measured ({found.skipped}): its kernels are used"
        return Verdict(WHOLE_CALL, True, reason, seconds=found.seconds)
    warnings.warn(f"pallasfuse: the fused call does not run on {bench.device.device_kind}: {failed}; XLA's own is used instead",
                  stacklevel=2)  # fmt: skip
    return Verdict(WHOLE_CALL, False, f"it does not run: {failed}", seconds=found.seconds)


def _measure_whole(bench: Bench, plan: Plan, made: Made) -> Measured:
    free = replace(plan, options=replace(plan.options, strict=False, verify=None))
    plain = _revised(free, {k.name: "to compare" for k in plan.kernels})
    consts = list(plan.converted.jaxpr.consts)
    functions = {
        XLA: lambda *args: execute(plain, [*consts, *args]),
        _OURS: lambda *args: execute(plan, [*consts, *args]),
    }
    avals = [v.aval for v in plan.converted.jaxpr.invars]
    return compare(functions, avals, bench.device, budget_s=BUDGET_S, more_s=_MORE_FOR_CALLS_S, made=made)
