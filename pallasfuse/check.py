"""The check: before a plan is used on a device at hand, its kernels are timed against what XLA makes of the same parts, once.

First every kernel alone, then, if any is left, the whole call (`whole_calls.py`): what a kernel gains may be lost by what XLA could
have fused around it. Should that be so, some of them are tried. Ties are XLA's. A kernel that does not compile, or fails when it
first runs, is replaced by the next way to run it, or by XLA. Verdicts are kept in the store (`store.py`), so that a program is
checked once for each kind of device; equal parts are one.
"""

import math
import os
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

from pallasfuse.decisions import Placed
from pallasfuse.executables import Function, Request, compiled
from pallasfuse.forms import as_written, in_another_form, in_faster_form
from pallasfuse.isolation import apart
from pallasfuse.loop_failures import find_failing
from pallasfuse.measure import BUDGET_S, compare, requests
from pallasfuse.options import FuseOptions
from pallasfuse.parts import untimed
from pallasfuse.plan import Kernel, Plan
from pallasfuse.store import Record
from pallasfuse.subjects import OURS, XLA, Bench, Subject, revised
from pallasfuse.verdicts import Verdict, words_for_kernels, words_for_times
from pallasfuse.whole_calls import requests_for, settled_as_a_whole

_OTHER_WAYS = 3
"""So many other ways to run a kernel are tried when its own fails."""
_RIVALS_FROM = 1.5
"""Rivals of a kernel that takes so many times as long as XLA's are not tried: they are predicted to take as long as it."""


def wanted(options: FuseOptions) -> bool:
    """Says whether plans with these options are to be checked.

    Who asks for a target, for tiles or for everything (`strict`) gets what was asked for, unless `check` is True;
    `PALLASFUSE_CHECK=0` switches every check off.
    """
    asked = options.target or options.strict or options.shapes_kernels
    return not _off(options) and (options.check is True or not asked)


def _off(options: FuseOptions) -> bool:
    return os.environ.get("PALLASFUSE_CHECK", "1") == "0" or options.check is False


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
    as_planned = {s.kernel.name for s in bench.subjects if _runs_as_planned(s)}
    left = settled_as_a_whole(bench, plan, changes, as_planned, verdicts, measures=measure)
    bench.forget_programs()
    if left.kernels:
        return left
    if plan.converted.terms_apart:
        return _as_it_is_written(left, device, measure)
    return _in_another_form(left, device, measure) if plan.outdoes else left


def _as_it_is_written(plan: Plan, device: Any, measure: bool) -> Plan:
    """The plan of the program as it is written, checked: the kernels of the form with its terms apart have lost."""
    found = check(as_written(plan), device, measure=measure)
    return replace(found, verdicts=(*plan.verdicts, *found.verdicts))


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
    return revised(plan, {n: c for n, c in changes.items() if c is not _GONE})


def _with_bodies(plan: Plan, settle: Callable[[Plan], Plan]) -> Plan:
    """The plan with the bodies of its loops settled; those in which nothing is fused any more are left out."""
    bodies = [replace(b, plan=settle(b.plan)) for b in plan.bodies]
    return replace(plan, bodies=tuple(b for b in bodies if b.plan.fuses))


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
    winner: str | None = None if subject.plan.options.shapes_kernels else subject.record.get("winner")
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
        reason += f" (by the times of kernels alone; with their starts {words_for_times(ours, theirs)})"
        ours, theirs = entry["kernels_us"], entry["xla_kernels_us"]
    if placed is not None:
        reason += f" (on {placed.phases[0].target.name}, {placed.schedule}: {why})"
    elif why:
        reason += f" ({why})"
    reason += words_for_kernels(entry)
    verdict = Verdict(subject.kernel.name, faster, reason, ours, theirs, seconds, remembered=not seconds)
    if faster:
        return placed, verdict
    return (
        f"its kernel is not faster than XLA's on this device: {words_for_times(ours, theirs)}{words_for_kernels(entry)}",
        verdict,
    )


# --- measuring


def _measure_kernels(bench: Bench) -> None:
    """Note how every kernel that is not known yet compares with XLA's, equal ones once; one warning for all that fail."""
    failures: list[str] = []
    fresh: dict[tuple[str, str], tuple[Subject, Kernel]] = {}
    for subject in filter(_is_open, bench.subjects):
        fresh.setdefault((subject.identity["part"], subject.way), (subject, subject.kernel))
    _compile_kernels_ahead(bench, fresh.values(), requests_for(bench))  # the largest first
    for subject, _ in fresh.values():
        _first_that_runs(bench, subject, partial(_measured_error, bench, subject), failures)
    rivals = {
        (subject.identity["part"], subject.way_of(placed)): (subject, kernel)
        for subject in bench.subjects
        if _runs_as_planned(subject) and _is_near(subject)
        for placed, kernel in subject.rivals
        if subject.entry(subject.way_of(placed)) is None
    }
    _compile_kernels_ahead(bench, rivals.values())
    for (_, name), (subject, kernel) in rivals.items():
        _measured_error(bench, subject, kernel, name)
    if failures:
        warnings.warn(f"pallasfuse: {'; '.join(failures)}", stacklevel=2)


def _compile_kernels_ahead(
    bench: Bench, kernels: Collection[tuple[Subject, Kernel]], others: Sequence[Request] = ()
) -> None:
    """Compiles what comparisons of these kernels with XLA's are going to run, and others, all at the same time."""
    start = time.perf_counter()
    asked = [
        requests(
            _functions(s, k),
            s.avals,
            bench.device,
            expected_us=_expected_us(k),
            parts=_decided_by_kernels(bench, s),
        )
        for s, k in kernels
    ]
    bench.executables.of([*others, *chain.from_iterable(asked)], bench.device)
    for _, kernel in kernels:
        bench.spent[kernel.name] = bench.spent.get(kernel.name, 0.0) + (time.perf_counter() - start) / len(asked)


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
    found = compare(
        _functions(subject, kernel),
        subject.avals,
        bench.device,
        budget_s=BUDGET_S,
        expected_us=_expected_us(kernel),
        executables=bench.executables,
        parts=_decided_by_kernels(bench, subject),
        below=subject.below,
    )
    bench.spent[kernel.name] = bench.spent.get(kernel.name, 0.0) + found.seconds
    error = subject.take_down(name, kernel, found, OURS)
    if error is None and OURS not in found.microseconds:
        reason = found.skipped or found.failed.get(OURS, "")
        bench.skipped[kernel.name] = f"not measured ({reason}): chosen by its price"
    return error


def _functions(subject: Subject, kernel: Kernel) -> dict[str, Function]:
    return {XLA: subject.part.run, OURS: subject.function(kernel)}


def _expected_us(kernel: Kernel) -> float:
    """Returns about what the shorter one of a kernel and what it replaces is predicted to take."""
    return min(kernel.price.us, kernel.replaced.us or math.inf)


def _decided_by_kernels(bench: Bench, subject: Subject) -> bool:
    """Does the time of its kernels decide about a short one? Only where the clock decides about the whole call after it."""
    return subject.within and not untimed(bench.plan.converted.jaxpr)
