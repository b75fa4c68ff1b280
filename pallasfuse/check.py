"""The check: before a plan is used on a device at hand, its kernels are timed against what XLA makes of the same parts, once.

First every kernel alone, then, if any is left, the whole call: what a kernel gains may be lost by what XLA could have fused around
it. Ties are XLA's. A kernel that does not compile, or fails when it first runs, is replaced by the next way to run it, or by XLA.
Verdicts are kept in the store (`store.py`), so that a program is checked once for each kind of device; equal parts are one.
"""

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

from pallasfuse import _compat
from pallasfuse.environment import environment
from pallasfuse.execution import execute, run_kernel
from pallasfuse.isolation import apart
from pallasfuse.measure import Function, Measured, compare, compiled, is_shortage
from pallasfuse.options import FuseOptions
from pallasfuse.parts import Part, part_of, primitives, producers, way, whole_key
from pallasfuse.pipeline import Kernel, Plan, revised, ways
from pallasfuse.placement import Placed
from pallasfuse.store import Identity, Record, Store, current
from pallasfuse.verdicts import WHOLE_CALL, Verdict

BUDGET_S = 0.25
"""What the timed calls of one comparison may take together."""
XLA = "xla's own"
_OURS = "fused"
_OTHER_WAYS = 3
"""So many other ways to run a kernel are tried when its own fails."""
_UNTIMED = frozenset({"while", "pure_callback", "io_callback", "debug_callback", "infeed", "outfeed"})
"""A program with such operations is not run on drawn arguments: its loops might not end, its callbacks are the user's."""


def wanted(options: FuseOptions) -> bool:
    """Are plans with these options to be checked? Who asks for a target, for tiles or for everything (`strict`) gets what was asked
    for, unless `check` is True; `PALLASFUSE_CHECK=0` switches every check off."""
    if os.environ.get("PALLASFUSE_CHECK", "1") == "0" or options.check is False:
        return False
    asked = options.target or options.tiles or options.parts or options.warps or options.stages or options.strict
    return options.check is True or not asked


def check(plan: Plan, device: Any, *, measure: bool = True) -> Plan:
    """A plan without those kernels that are not faster than XLA's on a device, with its verdicts.

    measure: False looks up what is known, and measures nothing.
    """
    if not plan.kernels:
        return plan
    bench = Bench(plan, device, current())
    if measure and any(s.entry is None for s in bench.subjects):
        apart(lambda: _measure_kernels(bench), device)
    changes: dict[str, Placed | str] = {}
    verdicts: list[Verdict] = []
    for subject in bench.subjects:
        change, verdict = _decision(bench, subject)
        verdicts += [] if verdict is None else [verdict]
        if change is not None:
            changes[subject.kernel.name] = change
    left = revised(plan, changes)
    if left.kernels and not _is_one_kernel(left):
        whole = _whole(bench, left, measure)
        verdicts += [] if whole is None else [whole]
        if whole is not None and not whole.kept:
            times = _times(whole.ours_us, whole.xla_us)
            left = revised(left, {k.name: f"the whole call is not faster than XLA's: {times}" for k in left.kernels})
    return replace(left, verdicts=tuple(verdicts))


def without_failures(plan: Plan, device: Any) -> Plan:
    """A plan whose kernels that are known to fail on a device run in another way, or by XLA. Nothing is measured or compiled."""
    changes: dict[str, Placed | str] = {}
    for subject in Bench(plan, device, current()).subjects:
        entry = subject.entry
        if entry is None or "error" not in entry:
            continue
        others = ((p, subject.record["ways"].get(subject.way_of(p))) for p in _other_ways(plan, subject))
        instead = next((p for p, known in others if known is not None and "error" not in known), None)
        changes[subject.kernel.name] = instead or _does_not_run(entry)
    return revised(plan, changes) if changes else plan


def find_failures(plan: Plan, device: Any) -> list[str]:
    """Compile every kernel of a plan alone, and note what fails and which other way does not. Returns one line for each failure."""
    found: list[str] = []

    def try_all() -> None:
        bench = Bench(plan, device, current())
        for subject in bench.subjects:
            _first_that_compiles(bench, subject, found)

    apart(try_all, device)
    return found


@dataclass(eq=False)
class Subject:
    """A kernel that is compared with XLA's own, and under which identity it is remembered."""

    kernel: Kernel
    part: Part
    identity: Identity
    store: Store

    @cached_property
    def way(self) -> str:
        """How the kernel runs, in words that equal kernels share."""
        return way(self.kernel.group, self.kernel.schedule, self.kernel.target)

    def way_of(self, placed: Placed) -> str:
        """Another way to run it, in such words."""
        return way(self.kernel.group, placed.schedule, placed.phases[0].target)

    @property
    def record(self) -> Record:
        return self.store.get(self.identity) or {}

    @property
    def entry(self) -> Record | None:
        """How the kernel compares as it is planned, or how it fails; None where that is not known."""
        found: Record | None = self.record.get("ways", {}).get(self.way)
        return found if found is not None and ("us" in found or "error" in found) else None

    def note(self, name: str, entry: Record, *, on_disk: bool = True) -> None:
        """Remember how one way to run the kernel compares."""

        def change(record: Record) -> Record:
            return {**record, "ways": {**record.get("ways", {}), name: entry}}

        self.store.update(self.identity, change, on_disk=on_disk)


@dataclass(eq=False)
class Bench:
    """A plan on a device: its kernels, and what is noted about them while they are measured."""

    plan: Plan
    device: Any
    store: Store
    subjects: list[Subject] = field(init=False)
    around: dict[str, str] = field(init=False)
    spent: dict[str, float] = field(default_factory=dict)
    """By the name of a kernel, what its check has taken, in seconds."""
    skipped: dict[str, str] = field(default_factory=dict)
    """By the name of a kernel, why it could not be timed."""

    def __post_init__(self) -> None:
        self.around, makers = environment(self.device), producers(self.plan.converted)
        self.subjects = []
        for kernel in self.plan.kernels:
            part = part_of(self.plan.converted, kernel, makers)
            identity = {**self.around, "of": "part", "part": part.key, "target": self.plan.target.name}
            self.subjects.append(Subject(kernel, part, identity, self.store))


# --- what follows from what is known


def _decision(bench: Bench, subject: Subject) -> tuple[Placed | str | None, Verdict | None]:
    """How a kernel is to be run otherwise, or why not at all; None: as it is. Without a verdict where nothing is known."""
    kernel, entry = subject.kernel, subject.entry
    seconds = bench.spent.get(kernel.name, 0.0)
    if entry is None:
        skipped = bench.skipped.get(kernel.name)
        return None, None if skipped is None else Verdict(kernel.name, True, skipped, seconds=seconds)
    if "error" not in entry:
        return _judged(subject, entry, None, seconds)
    for placed in _other_ways(bench.plan, subject):
        other = subject.record["ways"].get(subject.way_of(placed))
        if other is not None and "us" in other:
            return _judged(subject, other, placed, seconds)
    return _does_not_run(entry), Verdict(
        kernel.name, False, _does_not_run(entry), seconds=seconds, remembered=not seconds
    )


def _does_not_run(entry: Record) -> str:
    return f"its kernel does not run on this device ({entry['error']})"


def _other_ways(plan: Plan, subject: Subject) -> Iterator[Placed]:
    return islice((p for p in ways(plan, subject.kernel) if subject.way_of(p) != subject.way), _OTHER_WAYS)


def _judged(
    subject: Subject, entry: Record, placed: Placed | None, seconds: float
) -> tuple[Placed | str | None, Verdict]:
    ours, theirs, faster = entry["us"], entry["xla_us"], entry["faster"]
    reason = "the kernel is used" if faster else "XLA's is used"
    if placed is not None:
        reason += f" (on {placed.phases[0].target.name}, {placed.schedule}: the way that was planned fails)"
    verdict = Verdict(subject.kernel.name, faster, reason, ours, theirs, seconds, remembered=not seconds)
    if faster:
        return placed, verdict
    return f"its kernel is not faster than XLA's on this device: {_times(ours, theirs)}", verdict


def _times(ours: float | None, theirs: float | None) -> str:
    return "not measured" if ours is None or theirs is None else f"{ours:.4g} us against {theirs:.4g} us"


# --- measuring


def _measure_kernels(bench: Bench) -> None:
    """Note how every kernel that is not known yet compares with XLA's, equal ones once; one warning for all that fail."""
    failures: list[str] = []
    for subject in bench.subjects:
        if subject.entry is None:
            _measure_kernel(bench, subject, failures)
    if failures:
        warnings.warn(f"pallasfuse: {'; '.join(failures)}", stacklevel=2)


def _measure_kernel(bench: Bench, subject: Subject, failures: list[str]) -> None:
    """Measure a kernel as it is planned; should that fail, in other ways until one runs."""
    error = _measure_way(bench, subject, subject.kernel, subject.way)
    if error is not None:
        instead = None
        for placed, other in _other_kernels(bench.plan, subject):
            if _measure_way(bench, subject, other, subject.way_of(placed)) is None:
                instead = placed
                break
        failures.append(_failure(bench, subject, error, instead))


def _first_that_compiles(bench: Bench, subject: Subject, failures: list[str]) -> None:
    """Note whether a kernel compiles, and if not, which other way to run it does."""

    def error_of(kernel: Kernel) -> str | None:
        function = alone(bench.plan, kernel, subject.part)
        program = compiled(function, [v.aval for v in subject.part.inputs], bench.device)
        return program if isinstance(program, str) else None

    error = error_of(subject.kernel)
    if error is None:
        return
    subject.note(subject.way, {"schedule": str(subject.kernel.schedule), "error": error})
    instead = None
    for placed, other in _other_kernels(bench.plan, subject):
        again = error_of(other)
        subject.note(
            subject.way_of(placed), {"schedule": str(placed.schedule)} | ({} if again is None else {"error": again})
        )
        if again is None:
            instead = placed
            break
    failures.append(_failure(bench, subject, error, instead))


def _other_kernels(plan: Plan, subject: Subject) -> Iterator[tuple[Placed, Kernel]]:
    for placed in _other_ways(plan, subject):
        kernels = revised(plan, {subject.kernel.name: placed}).kernels
        yield placed, next(k for k in kernels if k.name == subject.kernel.name)


def _failure(bench: Bench, subject: Subject, error: str, instead: Placed | None) -> str:
    kernel = subject.kernel
    then = (
        "XLA's own is used" if instead is None else f"instead: {instead.schedule}, on {instead.phases[0].target.name}"
    )
    return f"{kernel.name} ({kernel.group.source}) does not run on {bench.device.device_kind}: {error}; {then}"


def _measure_way(bench: Bench, subject: Subject, kernel: Kernel, name: str) -> str | None:
    """Note how one way to run a kernel compares. Returns its error, if it has one."""
    functions = {XLA: subject.part.run, _OURS: alone(bench.plan, kernel, subject.part)}
    found = compare(functions, [v.aval for v in subject.part.inputs], bench.device, budget_s=BUDGET_S)
    bench.spent[kernel.name] = bench.spent.get(kernel.name, 0.0) + found.seconds
    return note(bench, subject, found, name, _OURS, kernel.schedule)


def note(bench: Bench, subject: Subject, found: Measured, name: str, key: str, schedule: Any) -> str | None:
    """Write down what was found of one way to run a kernel (`key` among what was compared); returns its error, if it has one."""
    uncompiled, failed = found.uncompiled.get(key), found.failed.get(key)
    if uncompiled is not None:
        subject.note(name, {"schedule": str(schedule), "error": uncompiled})
        return uncompiled
    if failed is not None and not is_shortage(failed):
        subject.note(name, {"schedule": str(schedule), "error": failed}, on_disk=False)
        return failed
    if key not in found.microseconds:
        bench.skipped[subject.kernel.name] = f"not measured ({found.skipped or failed}): chosen by its price"
        return None
    entry = {
        "schedule": str(schedule), "us": found.microseconds[key], "xla_us": found.microseconds[XLA],
        "faster": found.winner == key, "predicted_us": 1e3 * subject.kernel.predicted_ms, "seconds": found.seconds,
    }  # fmt: skip
    subject.note(name, entry)
    return None


def alone(plan: Plan, kernel: Kernel, part: Part) -> Function:
    """A kernel as a function of the inputs of its part, with the outputs of that."""
    variable = plan.converted.variable
    shapes = [_compat.shape_of(variable[n.name]) for n in kernel.group.outputs]

    def run(*arrays: Any) -> list[Any]:
        given = {n: x for n, x in zip(part.input_names, arrays, strict=True) if n is not None}
        found = run_kernel(plan, kernel, given)
        return [found[n.name].reshape(shape) for n, shape in zip(kernel.group.outputs, shapes, strict=True)]

    return run


# --- the whole call


def _is_one_kernel(plan: Plan) -> bool:
    """Is the whole call one kernel and nothing else? Then what was measured of that is said of the call."""
    return len(plan.steps) == 1 and plan.steps[0] is plan.kernels[0]


def _whole(bench: Bench, plan: Plan, measure: bool) -> Verdict | None:
    """The whole call with its kernels, against the same without any; None where nothing is known."""
    subject, jaxpr = WHOLE_CALL, plan.converted.jaxpr
    unfit = sorted(primitives(jaxpr) & _UNTIMED)
    if unfit:
        if not measure:
            return None
        return Verdict(subject, True, f"not measured: it has {', '.join(unfit)}")
    kernels = ", ".join(way(k.group, k.schedule, k.target) for k in plan.kernels)
    identity = {**bench.around, "of": "call", "program": whole_key(jaxpr), "kernels": kernels}
    known = bench.store.get(identity)
    seconds = 0.0
    if known is None and measure:
        found = apart(lambda: _measure_whole(bench, plan), bench.device)
        seconds = found.seconds
        if not found.microseconds:
            failed = {**found.uncompiled, **found.failed}.get(_OURS, "")
            if failed and not is_shortage(failed):
                warnings.warn(f"pallasfuse: the fused call does not run on {bench.device.device_kind}: {failed}; XLA's own is used "
                              "instead", stacklevel=2)  # fmt: skip
                return Verdict(subject, False, f"it does not run: {failed}", seconds=seconds)
            return Verdict(subject, True, f"not measured ({found.skipped}): its kernels are used", seconds=seconds)
        entry = {"us": found.microseconds[_OURS], "xla_us": found.microseconds[XLA], "faster": found.winner == _OURS,
                 "seconds": seconds}  # fmt: skip
        known = bench.store.update(identity, lambda _: entry)
    if known is None:
        return None
    reason = "the kernels are used" if known["faster"] else "XLA's own is used"
    return Verdict(subject, known["faster"], reason, known["us"], known["xla_us"], seconds, remembered=not seconds)


def _measure_whole(bench: Bench, plan: Plan) -> Measured:
    plain = revised(plan, {k.name: "to compare" for k in plan.kernels})
    consts = list(plan.converted.jaxpr.consts)
    functions = {
        XLA: lambda *args: execute(plain, [*consts, *args]),
        _OURS: lambda *args: execute(plan, [*consts, *args]),
    }
    avals = [v.aval for v in plan.converted.jaxpr.invars]
    return compare(functions, avals, bench.device, budget_s=BUDGET_S)
