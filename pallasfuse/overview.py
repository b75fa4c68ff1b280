"""A plan on one screen: the kernels by source line, what share of the time they are, and what is worst of the rest.

All times are predicted, for the device of the plan's target.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pallasfuse.ir.loop_program import LoopProgram, unknown_in
from pallasfuse.loop_calls import loops_as_kernels, recurrence_p
from pallasfuse.price.xla import kernels_on, of_kernel, price_xla
from pallasfuse.price.xla_forms import LibraryProduct, LoopFusion, XlaKernel

if TYPE_CHECKING:
    from pallasfuse.ir.schedule import Schedule
    from pallasfuse.plan import Plan

LINES = 40
"""A screen. A plan that says everything in as many lines needs no overview."""
_WORST = 3
_PLACES = 12
_WIDTH = 160
_COLUMN = re.compile(r"(:[0-9]+):[0-9]+")
_AS_GOOD = "a single reduction"
"""The reason of what XLA runs as well as a kernel would."""
_ADVICE = (
    ("one kernel would not be faster", "pf.tune measures it, FuseOptions(price=False) fuses it to save memory"),
    ("all kernels of the program together", "decorate a smaller function to compare it alone"),
    ("its kernel is not faster", "it was measured on this device, and nothing is lost; pf.tune tries other tiles"),
    ("the whole call is not faster", "it was measured on this device: decorate a smaller function to compare it alone"),
    ("pallasfuse.leave", "you asked for it"),
    ("FuseOptions(exclude", "you asked for it"),
    ("slice", "where it splits an axis that kernels run over, pass the parts as arrays of their own"),
    ("elementwise", "it is fused by XLA; inside a chain of reductions it would be a part of their kernel"),
)
_OTHERWISE = "write it with operations that tie no other dimensions together, or move it before or after the chain"


@dataclass
class _Left:
    """What XLA keeps of one source line."""

    us: float = 0.0
    count: int = 0
    reasons: dict[str, float] = field(default_factory=dict)
    """Microseconds by reason: the decisive one is that of most of them."""


def overview(plan: Plan) -> str:
    """At most `LINES` lines; `plan.kernels`, `plan.show(...)` and `str(plan)` have the rest."""
    total, (left, rest) = _left_to_xla(plan, fused=False)[1], _left_to_xla(plan, fused=True)
    outer = loops_as_kernels(plan.converted.jaxpr, inside=False)  # nobody knows how often those inside of others run
    of_loops = sum(k.price.us for k in outer)
    total += sum(k.price_of_xla(plan.target.device).us for k in outer) - of_loops
    rest -= of_loops
    left = [(k, us) for k, us in left if getattr(k, "name", "") not in _made_by_loops(plan)]
    ours = sum(k.price.us for k in plan.kernels) + of_loops
    device = plan.target.device.kind
    lines = [
        f"{_counted(len(plan.kernels), 'kernel')} for {plan.target.name}; predicted on {device}: {_time(ours + rest)}, "
        f"XLA alone {_time(total)}",
        f"fused: {_share(max(0.0, total - rest), total)} of the time of XLA's program, which takes {_time(ours)} in kernels",
    ]
    unknown = unknown_in(plan.program)
    if unknown:
        lines.append(f"not counted, as nobody knows beforehand how long it takes: {', '.join(unknown)}")
    lines += _some([f"rewritten: {r}" for r in plan.rewritings], 4)
    lines += _kernels(plan)
    lines += _worst(plan, left, total)
    loops = [
        f"{n.trips} trips of the loop at {_short(n.source)} in one kernel: {_time(n.price.us)}" for n in plan.loops
    ]
    lines += _some(loops, 4)
    inside = [f"{b.what}: {_counted(len(b.plan.kernels), 'kernel')}" for b in plan.bodies]
    lines += _some(inside, 4)
    lines += _some([f"checked: {v}" for v in plan.verdicts], 4)
    exceptions = plan.own_exceptions
    notes = [f"{'exception' if c in exceptions else 'condition'}: {c}" for c in plan.own_conditions]
    lines += _some(notes, 6)
    lines.append(
        "more: plan.kernels, plan.fallbacks, plan.show('kernels'), plan.show('left'), plan.html(path), print(plan)"
    )
    return "\n".join(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 4]} ..." for line in lines)


def _kernels(plan: Plan) -> Iterator[str]:
    """The kernels by source line, those that take longest first."""
    places: dict[str, list[int]] = {}
    for number, kernel in enumerate(plan.kernels):
        places.setdefault(str(kernel.group.source), []).append(number)
    found = []
    for place, numbers in places.items():
        kernels = [plan.kernels[n] for n in numbers]
        ours, theirs = (sum(p.us for p in of) for of in ([k.price for k in kernels], [k.replaced for k in kernels]))
        first = kernels[0]
        how = f"{first.strategy} over {first.group.rolled}, {first.schedule}"
        others = "" if len({_tiles(k.schedule) for k in kernels}) == 1 else ", and others"
        found.append((ours, f"  {len(kernels)} x {_short(place)}: {_time(ours)}, XLA's {_time(theirs)}; {how}{others}"))
    ranked = [text for _, text in sorted(found, key=lambda f: -f[0])]
    yield "kernels, by source line:" if ranked else "kernels: none"
    yield from _some(ranked, _PLACES)


def _worst(plan: Plan, left: list[tuple[XlaKernel, float]], total: float) -> Iterator[str]:
    """What XLA keeps that might be fused, the worst first, each with the decisive reason; and the sum of the rest."""
    reasons = {item.name: item.reason for item in plan.grouping.left}
    nests = {n.name: n for n in plan.program.nests}
    found: dict[str, _Left] = {}
    as_good = 0.0
    for kernel, us in left:
        if isinstance(kernel, LibraryProduct):
            as_good += us
            continue
        name = kernel.roots[-1].name if isinstance(kernel, LoopFusion) else kernel.name
        nest = nests.get(name) or nests.get(name.partition(".")[0])  # of what is stored before it
        external = getattr(nest, "reason", "")
        reason = reasons.get(name) or external or "elementwise, outside every kernel: XLA fuses it"
        if reason.startswith(_AS_GOOD):
            as_good += us
            continue
        entry = found.setdefault("<unknown line>" if nest is None else str(nest.source), _Left())
        entry.us, entry.count = entry.us + us, entry.count + 1
        entry.reasons[reason] = entry.reasons.get(reason, 0.0) + us
    yield f"left to XLA: {_share(as_good, total)} in products and single passes, which it runs as well"
    for place, entry in sorted(found.items(), key=lambda f: -f[1].us)[:_WORST]:
        reason = max(entry.reasons, key=entry.reasons.__getitem__)
        yield f"  {entry.count} x {_short(place)}: {_share(entry.us, total)}, {_time(entry.us)}"
        yield f"    why: {reason}"
        yield f"    to change it: {_advice(reason)}"


def _tiles(schedule: Schedule) -> tuple[object, ...]:
    """What equal kernels have in common, however their axes are called."""
    return (*(tile for _, tile in schedule.grid), schedule.rolled_tile, schedule.parts, schedule.warps)


def _short(place: str) -> str:
    """A source line without the folder of an installed package or of the process, and without its column."""
    path = place.rpartition("site-packages/")[2].removeprefix(f"{Path.cwd()}/")
    return _COLUMN.sub(r"\1", path)


def _advice(reason: str) -> str:
    return next((advice for start, advice in _ADVICE if reason.startswith(start)), _OTHERWISE)


def _left_to_xla(plan: Plan, *, fused: bool) -> tuple[list[tuple[XlaKernel, float]], float]:
    """XLA's kernels for the program, with or beside those of the plan, and how long each takes; and all together."""
    program: LoopProgram = plan.program
    made = frozenset(name for k in plan.kernels for name in k.stores) if fused else frozenset[str]()
    read = frozenset(name for k in plan.kernels for name in k.reads) if fused else frozenset[str]()
    device = plan.target.device
    each = [(k, of_kernel(k, device).us) for k in kernels_on(device, program, made, read)]
    return each, price_xla(program, device, made, read).us


def _made_by_loops(plan: Plan) -> frozenset[str]:
    """The names of the tensors that loops leave which are one kernel."""
    made = {v for e in plan.converted.jaxpr.eqns if e.primitive is recurrence_p for v in e.outvars}
    return frozenset(name for name, v in plan.converted.variable.items() if v in made)


def _some(lines: list[str], most: int) -> list[str]:
    """The first lines, and how many there are besides."""
    return lines if len(lines) <= most else [*lines[: most - 1], f"  and {len(lines) - most + 1} more"]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "0%"


def _time(us: float) -> str:
    amount, unit = (us, "us") if us < 1e3 else (us / 1e3, "ms") if us < 1e6 else (us / 1e6, "s")
    return f"{amount:.3g} {unit}"
