"""Tuning: the best few ways to run every kernel are measured on the device, and the fastest is used from then on.

What was measured is kept in the same store as that of the check, and can be taken to another machine with the same kind of device:
`export` writes it to one file, `load` reads it.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pallasfuse import loop_layouts
from pallasfuse.api import FusedFunction
from pallasfuse.check import check, unchecked, wanted
from pallasfuse.device import Device
from pallasfuse.executables import Executables
from pallasfuse.isolation import apart
from pallasfuse.loop_calls import KernelOfLoop
from pallasfuse.loop_failures import words_for
from pallasfuse.measure import BUDGET_S, Measured, compare
from pallasfuse.plan import Kernel, Plan
from pallasfuse.stages import target_at_hand
from pallasfuse.store import FORMAT, Identity, Record, current
from pallasfuse.subjects import XLA, Bench, Subject
from pallasfuse.verdicts import Verdict
from pallasfuse.written_out import loops_of_forms

WAYS = 8
"""So many ways to run a kernel are measured, if the time does for them, and trees that a search finds."""
_AT_ONCE = 3
"""So many are compiled together, and race against XLA's program and the best so far."""
_FILE = "pallasfuse measurements"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a kernel: its schedule and target, what was predicted and measured of it, or the error that it ended with."""

    kernel: str
    schedule: str
    target: str
    predicted_us: float
    measured_us: float | None
    xla_us: float | None
    error: str
    won: bool

    def __str__(self) -> str:
        measured = f"{self.measured_us:10.4g} us" if self.measured_us is not None else f"fails: {self.error[:60]}"
        mark = "*" if self.won else " "
        return f"{mark} {measured}, {self.predicted_us:.4g} us predicted: {self.schedule}, on {self.target}"


@dataclass(frozen=True)
class Tuned:
    """The result of `tune`. `str(tuned)` is a table.

    `candidates`: every way that is known to run a kernel of the plan, in the form that a clock has chosen, also from before (a loop
    that was left to XLA before is no kernel of it). `predicted_xla_us`: by kernel, what was predicted of XLA's own. `plan`: what
    later calls use. `seconds`: how long it took. `unfinished`: kernels for which there was no time.
    """

    name: str
    candidates: tuple[Candidate, ...]
    predicted_xla_us: dict[str, float]
    plan: Plan
    seconds: float
    unfinished: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.name}: tuned in {self.seconds:.1f} s"]
        kept = {k.name for p in self.plan.all() for k in p.kernels}
        for kernel in dict.fromkeys(c.kernel for c in self.candidates):
            own = [c for c in self.candidates if c.kernel == kernel]
            xla = next((c.xla_us for c in own if c.xla_us is not None), None)
            winner = "" if kernel in kept or any(c.won for c in own) else " (used)"
            times = "not measured" if xla is None else f"{xla:.4g} us"
            lines.append(
                f"{kernel}: XLA's own {times}{winner}, {self.predicted_xla_us.get(kernel, 0.0):.4g} us predicted"
            )
            lines += [f"  {c}" for c in own]
        lines += [f"{k}: no time was left" for k in self.unfinished]
        return "\n".join([*lines, *(str(v) for v in self.plan.verdicts)])


def tune(
    fused: FusedFunction[..., Any],
    *args: Any,
    seconds: float | None = None,
    progress: bool | None = None,
    **kwargs: Any,
) -> Tuned:
    """Measure the best few ways to run every kernel of a fused function, for arguments of these shapes and types, on the device of
    the arguments, and the cheapest layouts of its loops that are one kernel. Later calls use the fastest, or XLA's own where that
    is as fast.

    Args:
      fused: a function from `pallasfuse.fuse`.
      *args, **kwargs: as for a call: arrays, or `jax.ShapeDtypeStruct`s. Values are drawn.
      seconds: what it may take, or a little more: what is being compiled is finished. None: until the best few are measured.
      progress: show a progress bar. None: where the standard error is a terminal.

    Raises:
      TypeError: `fused` is not a fused function.
      TraceError: it cannot be traced with these arguments.
      ValueError: the arguments are on several devices.
    """
    if not isinstance(fused, FusedFunction):
        raise TypeError(f"pallasfuse.tune takes a function from pallasfuse.fuse, got {type(fused).__name__}")
    from tqdm import tqdm

    start = time.perf_counter()
    deadline = None if seconds is None else start + seconds
    plan, device = fused.planned(*args, **kwargs)
    if device is None:
        raise ValueError("pallasfuse.tune measures on one device, but the arguments are on several")
    numbers, target = plan.target.device, target_at_hand(None, plan.options)
    has_forms = wanted(plan.options) and not plan.options.strict  # among which a clock chooses
    call = fused.call_of(args, kwargs) if has_forms else None
    of_forms: list[KernelOfLoop] = []
    if call is not None:
        with contextlib.suppress(Exception):  # where forms fail, `in_faster_form` says so below
            of_forms = loops_of_forms(call.jaxpr, target, device, call.options.exclude, call.planned_alone(target))
    loops = _named(loop_layouts.distinct((*of_forms, *(loop for p in plan.all() for loop in p.loops)), numbers))
    bars = partial(tqdm, desc=f"tuning {plan_name(fused)}", unit="kernel", leave=False,
                   disable=None if progress is None else not progress)  # fmt: skip
    left: list[str] = []
    if loops:
        with bars(total=len(loops) * WAYS) as bar:
            others = sum(len(p.kernels) for p in plan.all())
            left = apart(lambda: _tune_loops(loops, others, numbers, device, deadline, bar.update), device)
        fused.renew()
        plan, _ = fused.planned(*args, **kwargs)  # with the fastest layouts
        call = fused.call_of(args, kwargs) if has_forms else None

    def in_time() -> bool:
        return deadline is None or time.perf_counter() < deadline

    verdict: Verdict | None = None
    if call is not None:
        form, verdict = call.in_faster_form(target, device, measure=in_time())
        plan = plan if form is None else form.plan(form.judged(target, device))
    subjects = [s for p in plan.all() for s in Bench(p, device).subjects]
    distinct = {(str(sorted(s.identity.items())), s.way): s for s in subjects}
    with bars(total=len(distinct) * WAYS) as bar:
        unfinished = left + apart(lambda: _tune_all(list(distinct.values()), device, deadline, bar.update), device)
    if call is not None:
        settled = call.settled(target, device, measure=in_time())
        if verdict is not None:  # it was measured just now
            settled = replace(settled, verdicts=tuple(_as_fresh_as(verdict, v) for v in settled.verdicts))
    else:
        settled = check(plan, device, measure=in_time()) if wanted(plan.options) else unchecked(plan, device)
    fused.renew()
    candidates = tuple(c for s in distinct.values() for c in _candidates(s))
    candidates += tuple(
        c for name, loop in loops.items() for c in _recorded(name, loop_layouts.known(loop, numbers))
    )  # fmt: skip
    predicted = {s.kernel.name: s.kernel.replaced.us for s in distinct.values()}
    predicted |= {name: loop.price_of_xla(numbers).us for name, loop in loops.items()}
    return Tuned(plan_name(fused), candidates, predicted, settled, time.perf_counter() - start, tuple(unfinished))


def _as_fresh_as(measured: Verdict, verdict: Verdict) -> Verdict:
    """Returns a verdict, with the seconds of another one about the same where that was measured for it."""
    if verdict.subject != measured.subject:
        return verdict
    return replace(verdict, seconds=measured.seconds, remembered=measured.remembered)


def plan_name(fused: FusedFunction[..., Any]) -> str:
    return getattr(fused, "__name__", "function")


def _named(loops: Sequence[KernelOfLoop]) -> dict[str, KernelOfLoop]:
    """Returns loops by their kernels' names and lines, which are numbered where several have the same."""
    found: dict[str, KernelOfLoop] = {}
    for loop in loops:
        name = words_for(loop)
        same = sum(words_for(other) == name for other in found.values())
        found[f"{name}, {same + 1}" if same else name] = loop
    return found


def _tune_loops(
    loops: Mapping[str, KernelOfLoop],
    others: int,
    numbers: Device,
    device: Any,
    deadline: float | None,
    advance: Callable[[int], Any],
) -> list[str]:
    """Measures the layouts of every loop that is a kernel, unless that was done. Returns the names of those for which no time was
    left.

    others: kernels that want as much time each as a loop does.
    """
    unfinished = []
    for number, (name, loop) in enumerate(loops.items()):
        if loop_layouts.winner_of(loop, numbers) is None:
            until = _until(deadline, len(loops) - number + others)
            if until is not None and time.perf_counter() >= until:
                unfinished.append(name)
                continue
            loop_layouts.measure(loop, numbers, device, most=WAYS, at_once=_AT_ONCE, until=until)
        advance(WAYS)
    return unfinished


def _until(deadline: float | None, left: int) -> float | None:
    """Returns when the share ends that the next of so many has of the time that is left; None where there is no limit."""
    now = time.perf_counter()
    return None if deadline is None else now + max(0.0, deadline - now) / left


def _tune_all(
    subjects: Sequence[Subject], device: Any, deadline: float | None, advance: Callable[[int], Any]
) -> list[str]:
    """Measure every kernel, each within its share of the time. Returns the names of those for which none was left."""
    unfinished = []
    for number, subject in enumerate(subjects):
        until = _until(deadline, len(subjects) - number)
        if until is not None and time.perf_counter() >= until:
            unfinished.append(subject.kernel.name)
        else:
            _tune_one(subject, device, until, advance)
    return unfinished


def _tune_one(subject: Subject, device: Any, until: float | None, advance: Callable[[int], Any]) -> None:
    """Races of XLA's program, the best way so far, and the next few, until the ways or the time end. Remembers the winner."""
    best: tuple[str, Kernel] | None = None
    winner, measured = XLA, 0
    waiting = _ways(subject)
    executables = Executables()
    while True:
        field = list(islice(waiting, _AT_ONCE))
        if not field or (measured and until is not None and time.perf_counter() >= until):
            break
        field = ([] if best is None else [best]) + field
        found = _race(subject, field, device, executables)
        for name, kernel in field:
            subject.take_down(name, kernel, found, name)
        fresh = len(field) - (best is not None)
        measured += fresh
        advance(fresh)
        ran = [(n, k) for n, k in field if n in found.microseconds]
        if ran:
            best = next((pair for pair in ran if pair[0] == found.winner), None)  # by kernels alone, where these decide
            best = best or min(ran, key=lambda pair: found.microseconds[pair[0]])
            winner = found.winner
    if best is not None:
        subject.settle(winner)
    advance(max(0, WAYS - measured))


def _race(subject: Subject, field: Sequence[tuple[str, Kernel]], device: Any, executables: Executables) -> Measured:
    functions = {XLA: subject.part.run} | {name: subject.function(kernel) for name, kernel in field}
    expected_us = subject.kernel.price.us
    budget_s = BUDGET_S * len(field)
    return compare(
        functions,
        subject.avals,
        device,
        budget_s=budget_s,
        expected_us=expected_us,
        executables=executables,
        parts=subject.within,
        below=subject.below,
    )


def _ways(subject: Subject) -> Iterator[tuple[str, Kernel]]:
    """The kernel as it is planned, and the most promising other ways to run it; not those that are known to fail."""
    others = chain(islice(subject.others(), WAYS - 1), subject.others(searched=True))
    named = ((subject.way_of(placed), kernel) for placed, kernel in others)
    for name, kernel in chain([(subject.way, subject.kernel)], named):
        known = subject.entry(name)
        if known is None or "error" not in known:
            yield name, kernel


def _candidates(subject: Subject) -> list[Candidate]:
    """All that is known about a kernel, the fastest first."""
    return _recorded(subject.kernel.name, subject.record)


def _recorded(kernel: str, record: Record) -> list[Candidate]:
    """Returns what a record knows of the ways to run a kernel, the fastest first."""
    found = [
        Candidate(
            kernel, entry["schedule"], entry.get("target", ""), entry.get("predicted_us", 0.0),
            entry.get("us"), entry.get("xla_us"), entry.get("error", ""), record.get("winner") == name,
        )
        for name, entry in record.get("ways", {}).items()
    ]  # fmt: skip
    return sorted(found, key=lambda c: (c.measured_us is None, c.measured_us or 0.0))


# --- from one machine to another


def export(path: str | os.PathLike[str]) -> int:
    """Write everything that was measured, by checks and by tuning, to one file. Returns how many records it holds."""
    entries = [{"identity": identity, "record": record} for identity, record in current().entries()]
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent or None, prefix=f".{target.name}", suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"holds": _FILE, "format": FORMAT, "entries": entries}, file, indent=1)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return len(entries)


def load(path: str | os.PathLike[str]) -> int:
    """Take over what `export` has written on a machine with the same kind of device; what was measured here stays where both know
    something. What is of other devices or versions does no harm, and is never used. Returns how many records there were.

    Raises:
      ValueError: the file holds something else.
    """
    try:
        content = json.loads(Path(path).read_bytes())
        known = content["holds"] == _FILE and content["format"] == FORMAT
        entries = [_checked(e) for e in content["entries"]] if known else []
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not hold what pallasfuse.tuning.export writes: {error}") from error
    if not known:
        raise ValueError(f"{path} does not hold what this version of pallasfuse.tuning.export writes")
    for identity, record in entries:
        current().update(identity, lambda own, record=record: _merged(own, record))  # type: ignore[misc]
    return len(entries)


def _checked(entry: Any) -> tuple[Identity, Record]:
    identity, record = entry["identity"], entry["record"]
    if not all(isinstance(x, str) for pair in identity.items() for x in pair) or not isinstance(record, dict):
        raise TypeError("an entry is no record")
    return identity, record


def _merged(own: Record, other: Record) -> Record:
    """Two records of one identity: what is known here counts, and what only the other one knows is added."""
    merged = {**other, **own}
    if "ways" in merged:
        merged["ways"] = {**other.get("ways", {}), **own.get("ways", {})}
    return merged
