"""The derivation as text: loop program, groups with their repairs, schedules, tile programs, costs, fallbacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from pallasfuse.errors import Refusal
from pallasfuse.ir.statements import Buffer, Contract, Get, Let, Load, Loop, Reduce, Set, Statement, Store
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.ir.tree import Level
from pallasfuse.ir.tree import show as show_tree
from pallasfuse.overview import LINES, overview
from pallasfuse.pallas_backend.kernel_resources import resources
from pallasfuse.resources.block import Resources
from pallasfuse.tiling.flat import tree_of
from pallasfuse.verdicts import WHOLE_CALL, WRITTEN_OUT

if TYPE_CHECKING:
    from pallasfuse.loop_calls import KernelOfLoop
    from pallasfuse.plan import Kernel, Plan


def _indent(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())


def _size(count: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}".rstrip() if not unit else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} P"


STAGES = ("program", "rewritten", "kernels", "checked", "bodies", "left", "conditions")
SNAPSHOTS = "snapshots"
"""The name by which `show` lists the forms that a kernel might have had, from unfused to most fused; no stage of the derivation."""


def explain(plan: Plan) -> str:
    """The whole derivation of one plan."""
    return "\n".join(line for stage in STAGES for line in _stage(plan, stage))


def show(plan: Plan, stage: str, kernel: str | None = None) -> str:
    """One stage of a derivation; kernel: of 'kernels' the one of this name.

    Raises:
      ValueError: there is no such stage, or no such kernel.
    """
    if stage not in (*STAGES, SNAPSHOTS):
        raise ValueError(f"no stage {stage!r}: choose one of {', '.join((*STAGES, SNAPSHOTS))}")
    if stage == SNAPSHOTS:
        return "\n".join(_snapshots(plan, kernel))
    if kernel is None:
        return "\n".join(_stage(plan, stage))
    found = [(number, k) for number, k in enumerate(plan.kernels, 1) if k.name == kernel]
    if not found or stage != "kernels":
        raise ValueError(
            f"no kernel {kernel!r} in stage {stage!r}: choose one of {', '.join(k.name for k in plan.kernels)}"
        )
    return "\n".join(line for number, k in found for line in _kernel(number, k, plan))


def _snapshots(plan: Plan, kernel: str | None) -> list[str]:
    """Lists the forms of what the kernels compute, those in bodies of loops as well, or of what the one of a name does.

    Raises:
      ValueError: no such kernel has any: equal ones have those of the first.
    """
    found = [s for s in plan.snapshots if kernel in (None, s.kernel.name)]
    if kernel is not None and not found:
        names = ", ".join(s.kernel.name for s in plan.snapshots)
        raise ValueError(f"no kernel {kernel!r} in stage 'snapshots': choose one of {names}")
    lines = []
    for own in found:
        shown = f"none: {own.found}" if isinstance(own.found, Refusal) else own.found.show(own.kernel.target.device)
        lines += [f"== {own.kernel.name}, from {own.kernel.group.source}", _indent(shown)]
    for body in plan.bodies if kernel is None else ():
        lines += [f"== {body.what}", _indent("\n".join(_snapshots(body.plan, None)))]
    return lines


def _stage(plan: Plan, stage: str) -> list[str]:
    match stage:
        case "program":
            return [f"== loop program (target {plan.target.name})", _indent(str(plan.program))]
        case "rewritten":
            head = "== sums and products in another order, of which the loop program above is made"
            return [head, *(f"  {line}" for r in plan.rewritings for line in r.lines())] if plan.rewritings else []
        case "kernels":
            own = [line for number, k in enumerate(plan.kernels, 1) for line in _kernel(number, k, plan)]
            return own + [line for loop in plan.loops for line in _loop(loop, plan)]
        case "checked":
            return ["== checked", *(f"  {line}" for line in _verdicts(plan))] if plan.verdicts else []
        case "bodies":
            return [line for body in plan.bodies for line in (f"== {body.what}", _indent(explain(body.plan)))]
        case "left":
            head = "== left to XLA" if plan.fallbacks else "== left to XLA: nothing but layout"
            return [head, *(f"  {f}" for f in plan.fallbacks)]
        case _:
            return ["== conditions", *([f"  {line}" for line in _conditions(plan)] or ["  none: nothing was fused"])]


def summarize(plan: Plan) -> str:
    """A few lines for each kernel, then what was left to XLA, then the conditions; of a long plan an overview of one screen."""
    lines = [f"rewritten: {r}" for r in plan.rewritings]
    if plan.written_out and not any(v.subject == WRITTEN_OUT for v in plan.verdicts):
        lines.append(
            "written out: operations that XLA runs one element at a time, or trips of loops that do nothing but start kernels"
        )
    for kernel in plan.kernels:
        group = kernel.group
        over = "" if kernel.schedule.tree else f" over {group.rolled}"
        lines.append(f"{kernel.name}: {kernel.strategy}{over}, {kernel.schedule}")
        for fold in group.folds:
            repaired = f", repair {fold.matrix}" if fold.frames else ""
            hoisted = f", after the loop: {fold.hoisted}" if fold.hoisted else ""
            lines.append(f"  {fold.name} = {fold.nest.reducer} of {fold.accumulators[0].term}{repaired}{hoisted}")
        lines.append(f"  visits {100 * kernel.visited_share:.0f}% of the tiles, moves "
                     f"{_size(kernel.bytes_read + kernel.bytes_written)}B; {kernel.price.us:.3g} us predicted, XLA "
                     f"{kernel.replaced.us:.3g} us")  # fmt: skip
    for loop in plan.loops:
        lines.append(f"{loop.kernel.name}: {loop.trips} trips of the loop at {loop.source} in one kernel; {loop.price.us:.3g} us "
                     f"predicted, XLA {loop.price_of_xla(plan.target.device).us:.3g} us")  # fmt: skip
    for body in plan.bodies:
        lines += [f"{body.what}:", _indent(summarize(body.plan))]
    lines += [f"checked: {line}" for line in _verdicts(plan)]
    lines += [f"left to XLA: {f}" for f in plan.fallbacks] or ["left to XLA: nothing"]
    lines += _conditions(plan)
    return overview(plan) if sum(1 + line.count("\n") for line in lines) > LINES else "\n".join(lines)


def _verdicts(plan: Plan) -> list[str]:
    """Lists what was measured, and the microseconds that a call saves: as a whole, where that was measured."""
    if not plan.verdicts:
        return []
    loops, rest = ([v for v in plan.verdicts if (v.subject == WRITTEN_OUT) == of] for of in (True, False))
    whole = [v for v in rest if v.subject == WHOLE_CALL and v.saved_us]
    saved = sum(v.saved_us for v in loops) + (sum(v.saved_us for v in whole or rest) if plan.kernels else 0.0)
    return [*map(str, plan.verdicts), f"saves {saved:.4g} us a call"]


def _conditions(plan: Plan) -> list[str]:
    return [f"{'exception' if c in plan.own_exceptions else 'condition'}: {c}" for c in plan.own_conditions]


def _taken(kernel: Kernel) -> list[str]:
    """Lists the shared memory and registers that a block of each GPU kernel takes of a multiprocessor."""
    lines = []
    for target, own in groupby(kernel.phases, key=lambda p: p.target):
        programs = [p.program for p in own]
        for together in [programs] if target.cluster else [[p] for p in programs]:
            taken = resources(together, target)
            if isinstance(taken, Resources):
                lines.append(f"  -- {together[0].name}: a block {taken.show(target.shared_memory_bytes)}")
    return lines


def _tree(kernel: Kernel) -> str:
    """The kernel as a schedule tree (`docs/schedules.md`)."""
    level: Level = "cluster" if kernel.target.cluster else "grid"
    return "; ".join(show_tree(tree_of(kernel.group, kernel.schedule, level=level)).splitlines())


def _kernel(number: int, kernel: Kernel, plan: Plan) -> list[str]:
    group = kernel.group
    lines = [f"== kernel {number}: {kernel.name}, {kernel.strategy}, from {group.source}"]
    lines.append(f"  reductions over {group.rolled}: {', '.join(f.name for f in group.folds)}; "
                 f"inside a tile: {', '.join(n.name for n in group.inner) or 'none'}; passes: {group.passes}")  # fmt: skip
    for fold in group.folds:
        if fold.hoisted:
            lines.append(f"  {fold.name}: hoisted {fold.hoisted}, a factor that does not vary along {group.rolled}")
        if fold.frames:
            lines.append(f"  {fold.name}: g = {fold.accumulators[0].term}, {len(fold.accumulators)} accumulators "
                         f"framed at {', '.join(f'{f.name} = {f.value}' for f in fold.frames)}")  # fmt: skip
            lines.append(f"    repair M(r, r') = {fold.matrix}")
        lines += [f"  {fold.name}: cannot share pass {n + 1}: {r}" for n, r in enumerate(fold.refusals)]
    lines += ["  -- fused loop program", _indent(_indent(str(group)))]
    lines.append(f"  -- schedule: {kernel.schedule}; visits {100 * kernel.visited_share:.0f}% of the tiles")
    lines.append(f"  -- tree: {_tree(kernel)}")
    lines += [f"  -- loads (L), computations (C) and stores (S): {outline(p.program)}" for p in kernel.phases]
    lines += [f"  -- emitted for {kernel.target.name}; {reason}" for reason in kernel.declined]
    if kernel.target.cluster:
        parts, phases = kernel.schedule.parts, len(kernel.phases)
        lines.append(f"  -- one kernel: {phases} phases in a cluster of {parts} blocks, whose shared memory keeps the row"
                     if phases > 1 else "  -- a row stays in the shared memory of its block")  # fmt: skip
    for phase in kernel.phases:
        where = f" of {phase.target.name}" if phase.target != kernel.target else ""
        lines += [f"  -- tile program{where}", _indent(_indent(str(phase.program)))]
    lines += _taken(kernel)
    moved = kernel.bytes_read + kernel.bytes_written
    lines.append(f"  -- cost: {_size(kernel.flops)}flop, {_size(moved)}B moved")
    lines.append(f"  -- price on {kernel.target.device.kind}: {kernel.price}")
    stored = plan.at_boundary.get(kernel.name)
    if stored is not None and stored.us:
        lines.append(f"  -- price of what XLA stores for it at its boundary: {stored}")
    lines.append(f"  -- price of XLA's kernels instead: {kernel.replaced}")
    return lines


def _loop(loop: KernelOfLoop, plan: Plan) -> list[str]:
    device = plan.target.device
    return [
        f"== kernel of a loop: {loop.kernel.name}, {loop.trips} trips, from {loop.source}",
        f"  -- tile program; {loop.kernel.warps} warps",
        _indent(_indent(str(loop.kernel))),
        f"  -- price on {device.kind}: {loop.price}",
        f"  -- price of XLA's kernels instead: {loop.price_of_xla(device)}",
    ]


# --- a tile program on one line


def outline(program: TileProgram) -> str:
    """Returns the kernel as `i:64 ( Lq j:64 ( Lk Cs Lv Co ) So )`.

    `Lx`: x is loaded, `Cx`: the reduction or product x is computed, `Sx`: x is stored. Of the segments of a loop, the last one with
    full tiles is shown. Buffers are `x!memory` where they begin, `>x` where a piece is read and `<x` where it is written.
    """
    inside = " ".join(_words(program.body))
    grid = " ".join(f"{a.name}:{t}" for a, t in program.grid)
    return f"{grid} ( {inside} )" if grid else inside


def _words(body: Iterable[Statement]) -> Iterator[str]:
    for s in body:
        match s:
            case Load(_, tensor):
                yield f"L{tensor}"
            case Reduce(name) | Contract(name):
                yield f"C{name.removesuffix('.tile').removesuffix('.all')}"
            case Store(tensor):
                yield f"S{tensor}"
            case Loop():
                whole = [g for g in s.segments if not g.offset] or list(s.segments)
                if whole:
                    yield f"{s.axis.name}:{whole[-1].tile} ( {' '.join(_words(whole[-1].body))} )"
            case Buffer(name):
                yield f"{name}!{s.memory}"
            case Get(_, buffer):
                yield f">{buffer}"
            case Set(buffer):
                yield f"<{buffer}"
            case Let():
                pass
