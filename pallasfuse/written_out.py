"""Programs as XLA runs them faster: with loops and operations written out.

XLA fuses what stands in one program as operations that it knows. Trips of a loop that are written out one after the other
(`unrolled_loops`), and operations decomposed into others (`decompositions`), give it more to fuse. Which of these forms of a
program is used, a clock decides, for the call as a whole, once; what is planned afterwards is the program that has won. Without a
clock, only what is predicted to be faster beyond the error of the price is written out.
"""

import contextlib
import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from pallasfuse._compat import Jaxpr, JaxprEqn
from pallasfuse.decompositions import Decomposer, Rule, WithKernels, systems
from pallasfuse.decompositions.complex_numbers import in_parts
from pallasfuse.decompositions.fourier_turns import in_turn
from pallasfuse.device import Device
from pallasfuse.environment import environment
from pallasfuse.executables import Function, executables_of_task, is_shortage
from pallasfuse.first_time import IMPORTS, Later
from pallasfuse.index_ranges import index_ranges
from pallasfuse.isolation import apart
from pallasfuse.jaxpr_frontend import flatten, fused_calls
from pallasfuse.loop_calls import KernelOfLoop, loops_as_kernels
from pallasfuse.loop_failures import fails, note_failure, words_for
from pallasfuse.loop_layouts import winner_of
from pallasfuse.lost_in_bodies import OF_KERNELS, bodies_left, lost_in_bodies, that_kernels_have
from pallasfuse.measure import BUDGET_S, MORE_FOR_CALLS_S, Measured, compare, requests
from pallasfuse.parts import CHOICE, branches, primitives, untimed, whole_key
from pallasfuse.plan import Plan
from pallasfuse.store import Identity, Record, current
from pallasfuse.subjects import XLA, comparison, function_of
from pallasfuse.targets import Target
from pallasfuse.unrolled_loops import priced_us, unrolled_surely, unrollings
from pallasfuse.verdicts import BODIES, WHOLE_CALL, WRITTEN_OUT, Verdict

if TYPE_CHECKING:  # most programs have no loop that may be a kernel
    from pallasfuse.recurrences import AsKernel

_MORE_MEMORY = 1.1
"""A form may take so many times as much memory: who computes in chunks has a reason for it."""
_MOST_ALONE = 4.0
"""An operation alone may take so many times as much: what it stores there may be computed in the program. (A product with both
operands padded takes about twice as much.)"""
_WORTH_A_CLOCK = 1.05
"""An operation must be predicted to be so many times as fast for a clock to be asked."""
_CLEARLY = 1.03
"""Times that two comparisons have found differ by more than this, where one is to say which is shorter."""
_MOST_REPLACED = 3.0
"""XLA is taken to need at most so many times what is predicted for what the kernels of a program replace. (For 39 kernels on an
H200 it needed 0.5 to 3.1 times that, 1.15 times in the geometric mean; not measured on CPUs.)"""
_AS_KERNELS = ("scan", *systems.RULES)
"""Loops, and operations that may be loops, which may be kernels."""
_OPERATIONS = "operations in parts"
_BY_DATA = frozenset({"scatter-add"})
"""Operations that take longer or shorter by the numbers that they are given. A check cannot draw those that a program computes."""
_IN_PARTS = "complex numbers in parts"
_ALSO_BY_PRICE = f"{_OPERATIONS}, by their prices where data decides"
_FAILS, _TOO_LARGE = "it does not run", "it takes too much memory"
_SURELY = "written out where that is faster by its price"
"""Says what is written out without a clock."""
_OPERATION_S = 0.1
"""The seconds for which one operation is timed, at most."""


def forms(
    jaxpr: Jaxpr, target: Target, at_hand: Any, exclude: Sequence[str] = (), with_kernels: WithKernels | None = None, *,
    measure: bool = True,
) -> dict[str, Jaxpr]:  # fmt: skip
    """Returns other forms of a program that may be faster, each by words that say what it is.

    Operations are timed alone on the device at hand, once. exclude: as of `FuseOptions`. with_kernels: as of `Decomposer`.
    measure: as of `fastest`.
    """
    device, some_larger = target.device, False

    def clock(written: Jaxpr, other: Jaxpr, *, within_memory: bool = False, by_data: bool = False) -> bool | None:
        nonlocal some_larger
        known = _compared_operation(written, other, target.device, at_hand, measure)
        if known is None or "skipped" in known or (by_data and "us" in known and _BY_DATA & primitives(written)):
            return None
        is_larger = bool(known.get("faster") and known.get("larger"))
        some_larger |= is_larger
        return bool(known.get("faster")) and not (is_larger and within_memory)

    def unrolled(form: Jaxpr, words: str) -> dict[str, Jaxpr]:
        found = unrollings(form, exclude, partly=device.platform == "gpu")
        return {", ".join(filter(None, (words, way))): made for way, made in found.items()}

    decomposer = Decomposer(device, tuple(exclude), _WORTH_A_CLOCK, clock, _rules(target, exclude), with_kernels)
    if measure:
        _compile_operations_ahead(decomposer, jaxpr, at_hand)
    decomposed = decomposer.of(jaxpr)
    found, others = unrolled(decomposed, "" if decomposed is jaxpr else _OPERATIONS), dict[str, Jaxpr]()
    if decomposed is not jaxpr:
        found = {_OPERATIONS: decomposed, **found}
        # no clock has seen short axes alone
        others[f"{_OPERATIONS}, but for short axes"] = replace(decomposer, short_axes=False).of(jaxpr)
    if decomposer.has_rules(_BY_DATA & primitives(jaxpr)):
        priced = replace(decomposer, clock=partial(clock, by_data=True), gain=device.price_error, _known={})
        others[_ALSO_BY_PRICE] = priced.of(jaxpr)
    # the program may compute what an operation alone has in memory; if not, there are the forms without
    if some_larger:
        less = replace(decomposer, clock=partial(clock, within_memory=True), _known={}).of(jaxpr)
        words = f"{_OPERATIONS}, but for those that take more memory"
        others |= {words: less, **unrolled(less, "" if less is jaxpr else words)}
    parted, _ = in_parts(jaxpr, device, exclude)
    if parted is not jaxpr:
        if measure:
            _compile_operations_ahead(decomposer, parted, at_hand)
        others[_IN_PARTS] = decomposer.of(parted)
    for words, form in others.items():
        if form is not jaxpr and whole_key(form) not in map(whole_key, found.values()):
            found[words] = form
    return {words: in_turn(form) for words, form in found.items()} if device.platform == "cpu" else found


def _compile_operations_ahead(decomposer: Decomposer, jaxpr: Jaxpr, device: Any) -> None:
    """Compiles what the clock is going to be asked for operations of a program, all at the same time."""
    fresh = [pair for pair in decomposer.questions(jaxpr) if current().get(_identity(*pair, device)) is None]
    # most are short: those run several times in a program, beside one that runs once
    wanted = [requests(_functions(w, {_OPERATIONS: o}), _avals(w), device, expected_us=1.0) for w, o in fresh]
    executables = executables_of_task()
    if wanted:
        apart(lambda: executables.of(list(chain.from_iterable(wanted)), device), device)


def surely_faster(
    jaxpr: Jaxpr, target: Target, exclude: Sequence[str] = (), with_kernels: WithKernels | None = None, *,
    spares: bool = False,
) -> Jaxpr:  # fmt: skip
    """Returns the program with all written out that needs no clock; itself where nothing is.

    spares: products and concatenations in bodies of loops stay as they are, for kernels that they take part in there.
    """
    device, program = target.device, jaxpr
    parted, saved_us = in_parts(jaxpr, device, exclude)
    if saved_us:
        with contextlib.suppress(Exception):  # a program must not fail because of a form of it
            jaxpr = parted if saved_us >= (device.price_error - 1) * priced_us(parted, device) else jaxpr
    jaxpr = _in_chunks(jaxpr, target, exclude)
    decomposer = Decomposer(device, tuple(exclude), device.price_error, None, _rules(target, exclude), with_kernels)
    spared = frozenset(OF_KERNELS if spares else ())
    made = unrolled_surely(replace(decomposer, spared=spared).of(jaxpr), device, exclude)
    return in_turn(made) if device.platform == "cpu" and made is not program else made


def _in_chunks(jaxpr: Jaxpr, target: Target, exclude: Sequence[str]) -> Jaxpr:
    """Returns the program with loops of unknown length in chunks that are kernels, where the target writes these."""
    if not target.writes_kernels or "while" not in primitives(jaxpr):
        return jaxpr
    with IMPORTS:
        from pallasfuse.while_chunks import in_chunks
    return in_chunks(jaxpr, _as_kernel(target, exclude))


def _as_kernel(target: Target, exclude: Sequence[str]) -> "AsKernel":
    """Returns the rule that makes kernels of loops, but for those that are known to fail on the target's device."""
    with IMPORTS:  # most programs have no loop, and no systems of equations
        from pallasfuse.recurrences import AsKernel
    device = target.device
    return AsKernel(
        device, tuple(exclude), lambda loop: fails(loop, device), fastest=lambda loop: winner_of(loop, device)
    )  # fmt: skip


def sure_forms(
    jaxpr: Jaxpr, target: Target, exclude: Sequence[str] = (), with_kernels: WithKernels | None = None
) -> Iterator[Jaxpr]:
    """Yields the forms of a program that need no clock: `surely_faster`, and what spares kernels in bodies if that is another.

    Where the first loses products or concatenations in bodies and is not predicted to be faster, only the second.
    """
    form = surely_faster(jaxpr, target, exclude, with_kernels)
    if form is jaxpr:
        return
    if not lost_in_bodies(flatten(jaxpr), flatten(form)):
        yield form
        return
    spared = surely_faster(jaxpr, target, exclude, with_kernels, spares=True)
    gains = False
    with contextlib.suppress(Exception):  # a program must not fail because of a form of it
        gains = target.device.price_error * priced_us(form, target.device) <= priced_us(spared, target.device)
    if gains:
        yield form
    if spared is not jaxpr:
        yield spared


def _rules(target: Target, exclude: Sequence[str]) -> dict[str, tuple[Rule, ...]]:
    """The rules that write kernels, where the target is one that does."""

    def as_kernels() -> Mapping[str, Rule]:
        with IMPORTS:
            from pallasfuse.recurrences import InLoops
        of_loop = _as_kernel(target, exclude)
        in_loops = partial(InLoops, target.device, (), of_loop.fails, systems.FEWEST_ROWS, of_loop.fastest)
        return {"scan": of_loop, **{name: in_loops(way=way) for name, way in systems.RULES.items()}}

    made = Later(as_kernels)

    def rule(eqn: JaxprEqn) -> Callable[..., list[Any]] | None:
        return made.value[eqn.primitive.name](eqn)

    return dict.fromkeys(_AS_KERNELS, (rule,)) if target.writes_kernels else {}


def _compared_operation(
    written: Jaxpr, other: Jaxpr, numbers: Device, device: Any, measure: bool
) -> Mapping[str, Any] | None:
    """Returns how two programs of one operation compare by the clock; None where nobody knows. One that does not run is not faster.

    `larger`: the second takes clearly more memory. numbers: of the device, as plans have them. measure: as of `fastest`.
    """
    store = current()
    identity = _identity(written, other, device)
    known = store.get(identity)
    if known is None and measure:
        found = _compared(written, {_OPERATIONS: other}, device, _OPERATION_S, runs_up_to=_MOST_ALONE)
        error = _error_of(found, _OPERATIONS)
        timed = _OPERATIONS in found.microseconds
        entry: Record = comparison(found, _OPERATIONS) if timed else {"skipped": found.skipped}
        if timed and _OPERATIONS in found.larger:
            entry["larger"] = True
        if _OPERATIONS in found.too_large:
            entry = {"too_large": found.too_large[_OPERATIONS]}
        lasts = timed or _OPERATIONS in found.uncompiled or _OPERATIONS in found.too_large
        if error:
            entry = {"error": error}
            kernels = loops_as_kernels(other)
            for loop in kernels:
                note_failure(loop, numbers, error, on_disk=lasts)
            what = ", ".join(map(words_for, kernels)) or f"{', '.join(e.primitive.name for e in written.eqns)} in parts"
            warnings.warn(
                f"pallasfuse: {what} does not run on {device.device_kind}: {error}; XLA's own is used", stacklevel=2
            )
        known = store.update(identity, lambda _: entry, on_disk=lasts)
    return known


def _identity(written: Jaxpr, other: Jaxpr, device: Any) -> Identity:
    operation = {"operation": whole_key(written), "parts": _key(other)}
    return {**environment(device), "of": "an operation in parts, with its memory", **operation}


def _key(form: Jaxpr) -> str:
    """A hash of a form of a program: of its equations, and of the kernels of the operations that are planned alone."""
    kernels = (k for call in fused_calls(form) for plan in call.plans.values() for k in plan.kernels)
    calls = [f"{k.target.name} {k.schedule} {k.schedule.warps}" for k in kernels]
    return " ".join([whole_key(form), *([hashlib.sha256("\n".join(calls).encode()).hexdigest()[:16]] if calls else [])])


def _error_of(found: Measured, key: str) -> str:
    """Returns the error by which one of compared programs does not run, whenever it is tried; empty where it has none."""
    error = found.uncompiled.get(key) or found.failed.get(key, "")
    return "" if is_shortage(error) else error


def loops_of_forms(
    jaxpr: Jaxpr, target: Target, device: Any, exclude: Sequence[str], with_kernels: WithKernels | None
) -> list[KernelOfLoop]:  # fmt: skip
    """Returns the loops that are kernels in some form of a program that a clock may be asked about; as far as is known without it.

    with_kernels: as of `Decomposer`.
    """
    ways = forms(jaxpr, target, device, exclude, with_kernels, measure=False)
    return [loop for form in ways.values() for loop in loops_as_kernels(form)]


def chosen_form(
    jaxpr: Jaxpr, target: Target, device: Any, exclude: Sequence[str], with_kernels: WithKernels | None = None, *,
    measure: bool,
) -> tuple[str | None, Jaxpr, Verdict | None]:  # fmt: skip
    """Chooses the form of a program that is used on a device. Returns words that say which, the form, and what the clock said.

    Without words it is the program as it is. Where there was no clock, the price decides; a form that does not run is none.
    with_kernels: as of `Decomposer`. measure: as of `fastest`.
    """
    ways = forms(jaxpr, target, device, exclude, with_kernels, measure=measure)
    best, verdict = fastest(jaxpr, ways, device, measure=measure)
    if best is not None:
        return best, ways[best], verdict
    if verdict is None or verdict.ours_us is not None or verdict.reason.startswith((_FAILS, _TOO_LARGE)):
        return None, jaxpr, verdict
    # not `sure_forms`: what kernels lose by it is asked afterwards (`FusedCall.settled`)
    sure = surely_faster(jaxpr, target, exclude, with_kernels)
    if sure is jaxpr:
        return None, jaxpr, verdict
    return _SURELY, sure, replace(verdict, kept=True, reason=f"{verdict.reason}: {_SURELY}")


def fastest(
    jaxpr: Jaxpr, ways: Mapping[str, Jaxpr], device: Any, *, measure: bool
) -> tuple[str | None, Verdict | None]:
    """Returns which of the forms of a program is the fastest by the clock, as XLA runs them, and what the clock said.

    None: the program as it is. ways: the forms, by words that say what they are. measure: False looks up what is known.
    """
    if not ways:
        return None, None
    unfit = untimed(jaxpr)
    chosen = Counter(map(whole_key, branches(jaxpr)))
    # the program's own choices stay as they are; those that a form adds are between ways to compute one operation
    ways = {what: way for what, way in ways.items() if Counter(map(whole_key, branches(way))) >= chosen}
    if not ways:
        unfit.append(CHOICE)
    if unfit:
        return None, Verdict(WRITTEN_OUT, False, f"not measured: it has {', '.join(unfit)}")
    store = current()
    identity = {**environment(device), "of": "written out", "program": whole_key(jaxpr),
                "ways": ", ".join(map(_key, ways.values()))}  # fmt: skip
    known, seconds = store.get(identity), 0.0
    if known is None and not measure:
        return None, None
    if known is None:
        found = _compared(jaxpr, ways, device, BUDGET_S, more_s=MORE_FOR_CALLS_S)
        seconds = found.seconds
        best = min((n for n in ways if n in found.microseconds), key=found.microseconds.__getitem__, default=None)
        best = found.winner if found.winner in ways else best
        errors = list(filter(None, (_error_of(found, way) for way in ways)))
        reasons = "; ".join(
            dict.fromkeys(
                (
                    *filter(None, [found.skipped]),
                    *found.uncompiled.values(),
                    *found.failed.values(),
                    *found.too_large.values(),
                )
            )
        )
        entry: Record = {"skipped": reasons} if best is None else {**comparison(found, best), "way": best}
        if found.too_large.keys() == ways.keys():
            entry = {"too_large": "; ".join(dict.fromkeys(found.too_large.values()))}
        if best is None and len(errors) == len(ways):
            entry = {"error": "; ".join(dict.fromkeys(errors))}
            warnings.warn(f"pallasfuse: what is written out does not run on {device.device_kind}: {entry['error']}; the program "
                          "stays as it was written", stacklevel=2)  # fmt: skip
        lasts = (
            best is not None or "too_large" in entry or ("error" in entry and found.uncompiled.keys() == ways.keys())
        )
        known = store.update(identity, lambda _: entry, on_disk=lasts)
    if "too_large" in known:
        return None, Verdict(WRITTEN_OUT, False, f"{_TOO_LARGE}: {known['too_large']}", seconds=seconds)
    if "error" in known:
        return None, Verdict(WRITTEN_OUT, False, f"{_FAILS}: {known['error']}", seconds=seconds)
    if "skipped" in known:
        return None, Verdict(WRITTEN_OUT, False, f"not measured ({known['skipped']})", seconds=seconds)
    used = bool(known["faster"]) and known["way"] in ways
    reason = f"{known['way']}: {'they are used' if used else 'all is as it was'}"
    verdict = Verdict(WRITTEN_OUT, used, reason, known["us"], known["xla_us"], seconds, remembered=not seconds)
    return (known["way"] if used else None), verdict


def may_lose_kernels(jaxpr: Jaxpr, form: Jaxpr, plan: Callable[[Jaxpr], Plan]) -> bool:
    """Are kernels predicted to gain more in a program as it is than in a form of it that XLA runs faster? plan: makes plans.

    So they may be where a body of a loop has kernels, and has lost something that they can take part in: what is gained in all
    trips is not predicted.
    """
    try:
        before, after = flatten(jaxpr), flatten(form)
        if any(fused_calls(form)):  # of operations planned alone: what is around them may take what their kernels read
            return predicted_us(plan(jaxpr)) < predicted_us(plan(form))
        lost = lost_in_bodies(before, after)
        bodies = (body for body in bodies_left(before, after) if lost.intersection(that_kernels_have(body)))
        if lost and any(plan(body).kernels for body in bodies):
            return True
        if not Counter(that_kernels_have(before)) - Counter(that_kernels_have(after)):
            return False
        own = plan(jaxpr)
        return bool(own.kernels) and predicted_us(own) < predicted_us(plan(form))
    except Exception:  # a program must not fail because of a form of it
        return True


def predicted_us(plan: Plan) -> float:
    """Returns the microseconds that a program is predicted to take with its plan's kernels, but for those in bodies of loops."""
    with IMPORTS:  # few programs have such forms
        from pallasfuse.price.xla import price_xla
    made = frozenset(n.name for k in plan.kernels for n in k.group.outputs)
    read = frozenset(t for k in plan.kernels for t in k.reads)
    by_xla = price_xla(plan.converted.program, plan.target.device, made, read)
    return by_xla.us + sum(k.price.us for k in plan.kernels) + sum(p.us for p in plan.at_boundary.values())


def is_faster_as_it_is(own: Plan, other: Plan, verdict: Verdict | None, *, loses: bool = False) -> bool:
    """Does the plan of a program as it is win over the plan of a form of it that XLA runs faster?

    Clearly so by the clock where it has seen both, else by the price. verdict: what the clock said of the form, as XLA runs both.
    loses: kernels are predicted to lose more by the form than XLA gains; without a clock for the form those that are left win.
    """
    if loses and not (verdict and verdict.ours_us) and (own.kernels or own.bodies):
        return True
    if verdict is not None and verdict.ours_us is not None and verdict.xla_us is not None:
        times = _measured_us(own, verdict.xla_us), _measured_us(other, verdict.ours_us)
        if times[0] is not None and times[1] is not None:
            return _CLEARLY * times[0] < times[1]
    return predicted_us(own) < predicted_us(other)


def cannot_win_as_it_is(own: Plan, other: Plan, verdict: Verdict | None) -> bool:
    """Would the kernels of a program as it is have to save more than they could, to win over a form of it by the clock?

    They save no more than what XLA takes for what they replace in all trips of loops, by `_MOST_REPLACED` times its price. own: the
    plan of the program as it is, before its check. other, verdict: as of `is_faster_as_it_is`.
    """
    # XLA may take less for another order
    in_other_order = any(p.rewritings or p.outdoes or p.converted.terms_apart for p in own.all())
    if verdict is None or verdict.ours_us is None or verdict.xla_us is None or in_other_order:
        return False
    other_us = _measured_us(other, verdict.ours_us)
    return other_us is not None and _CLEARLY * (verdict.xla_us - _MOST_REPLACED * _replaced_us(own)) >= other_us


def _replaced_us(plan: Plan) -> float:
    """The microseconds that XLA is predicted to take in a call for what kernels replace, in all trips of loops among it; infinity
    where nobody knows how many trips there are."""
    in_bodies = (_replaced_us(b.plan) * (math.inf if b.trips is None else b.trips) for b in plan.bodies if b.plan.fuses)
    return sum((k.replaced.us for k in plan.kernels), sum(in_bodies))


def _measured_us(plan: Plan, by_xla_us: float) -> float | None:
    """The microseconds of a call with the kernels that it has kept, by the clock; None where it has not seen them.

    by_xla_us: of the same form of the program without kernels.
    """
    if not replace(plan, written_out=False).fuses:
        return by_xla_us
    of_bodies = next((v for v in reversed(plan.verdicts) if v.subject == BODIES and v.kept), None)
    if of_bodies is not None and of_bodies.ours_us is not None:
        return of_bodies.ours_us
    of_calls = [v for v in plan.verdicts if v.subject == WHOLE_CALL]
    whole = next((v for v in of_calls if v.kept), of_calls[0] if of_calls else None)
    if whole is None or whole.ours_us is None:
        return None
    return whole.ours_us if whole.kept else by_xla_us


def _compared(
    jaxpr: Jaxpr,
    ways: Mapping[str, Jaxpr],
    device: Any,
    budget_s: float,
    *,
    more_s: float = 0.0,
    runs_up_to: float | None = None,
) -> Measured:
    timed = partial(
        compare,
        budget_s=budget_s,
        more_s=more_s,
        most_memory=_MORE_MEMORY,
        runs_up_to=runs_up_to,
        executables=executables_of_task(),
        below=index_ranges(jaxpr.eqns, jaxpr.invars),
    )
    return apart(lambda: timed(_functions(jaxpr, ways), _avals(jaxpr), device), device)


def _functions(jaxpr: Jaxpr, ways: Mapping[str, Jaxpr]) -> dict[str, Function]:
    return {XLA: function_of(jaxpr)} | {words: function_of(one) for words, one in ways.items()}


def _avals(jaxpr: Jaxpr) -> list[Any]:
    return [v.aval for v in jaxpr.invars]
