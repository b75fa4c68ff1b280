"""Which target runs a group, with which schedule: the first that has a kernel for it, with the fastest that it can run."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice

from pallasfuse.decisions import Phase, Placed
from pallasfuse.errors import TargetError
from pallasfuse.indirect import unable, with_lookups
from pallasfuse.ir.expr import Apply, postorder
from pallasfuse.ir.fold import Group
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.ops import COMPARISONS
from pallasfuse.ir.ranges import Range
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tensors import Tensor
from pallasfuse.options import FuseOptions
from pallasfuse.pallas_backend.kernel_resources import is_of_triton
from pallasfuse.phases import lowered_phases, phases_of, problem_of, refused_alike, too_large, unsuited, us_of
from pallasfuse.price.gpu_copies import copied
from pallasfuse.price.kernel import price_range
from pallasfuse.price.visited_tiles import operations_per_score, visited_shares
from pallasfuse.price.xla import price_gather
from pallasfuse.searched import Patience, searched, with_others
from pallasfuse.spilling import with_fewer_spilled
from pallasfuse.targets import XLA_CPU, Target
from pallasfuse.tiles_by_price import with_cheapest_parts, with_cheapest_tiles
from pallasfuse.tiling import arithmetic, clusters, states
from pallasfuse.tiling.bounds import guards_of
from pallasfuse.tiling.choose import choose, examine, prices_decide, sums_beyond_tiles
from pallasfuse.tiling.descent import smaller
from pallasfuse.tiling.split import split
from pallasfuse.warps import spilled_bytes, with_warps_by_price

_MOST_TREES = 4
"""So many trees that are predicted to be faster than what is planned are tried when a kernel is tuned."""


def place(group: Group, target: Target, tensors: Mapping[str, Tensor], options: FuseOptions) -> tuple[Phase, ...]:
    """The phases of a kernel for a piece of a group of the plan. Tiles that were asked for are clipped to the piece; where the
    target has no kernel with them, they are chosen anew.

    Raises:
      TargetError: no target has a kernel for it.
    """
    placed = placed_on(group, target, tensors, options)
    if options.tiles and (
        isinstance(placed, str) or placed.refused is not None or placed.phases[0].target is not target
    ):
        placed = placed_on(group, target, tensors, replace(options, tiles=()))
    if isinstance(placed, str):
        raise TargetError(f"target {target.name!r} has no kernel for {group.name}: {placed}")
    return placed.phases


def phase_of_state(group: Group, piece: states.Piece, target: Target, options: FuseOptions) -> Phase:
    """Returns the phase that makes the state of a piece inside the axis, on the first target in turn that can.

    Tiles that were asked for: as in `place`."""
    while True:
        for asked in dict.fromkeys((options, replace(options, tiles=()))):
            # what a cluster leaves in memory are results
            unfit = target.cluster > 0 or unsuited(piece.group, target) is not None
            for candidate in () if unfit else _listed_and_smaller(piece.group, target):
                schedule = _override(candidate, options=asked, target=target)
                program = states.local(group, piece, replace(schedule, parts=1), target, inside=True)
                if not states.counts_positions(program, group):
                    if options.parts is None:
                        keep_tile = any(name == group.rolled.name for name, _ in asked.tiles)
                        schedule = split(piece.group, schedule, target, keep_tile=keep_tile)
                    if schedule.parts > 1:
                        program = states.local(group, piece, schedule, target, inside=True)
                phase = Phase(arithmetic.rewrite_for(target, program), target)
                if problem_of(phase) is None and operations_per_score(phase.program) <= candidate.most_operations:
                    return phase
        target = target.fallback or XLA_CPU


def _listed_and_smaller(group: Group, target: Target) -> Iterator[Schedule]:
    """Every listed schedule; then, where a compiler decides what lies in shared memory, smaller ones."""
    listed = choose(group, target)
    yield from listed
    if is_of_triton(target):
        yield from smaller(listed[0], target)


def placed_on(
    chosen: Group, target: Target, tensors: Mapping[str, Tensor], options: FuseOptions, patience: Patience | None = None
) -> Placed | str:
    """Places a group on the first of the targets that stand in for each other, or says why there is none.

    patience: where nothing is found near so many microseconds, no long search goes on.
    """
    if not chosen.folds:
        trees = list(_by_trees(chosen, target, tensors, options, patience))
        return with_others(trees) or "no target has a schedule for it"
    declined: list[str] = []
    refused: Placed | None = None
    for candidate in _in_turn(target):
        reason = unsuited(chosen, candidate, by_name=candidate == target)
        if reason is None:
            schedule, phases, reason = _fastest(chosen, candidate, tensors, options, patience)
            if reason is None and options.warps is None:
                phases = with_warps_by_price(phases)
                schedule = replace(schedule, warps=phases[0].program.warps)
            found = Placed(schedule, phases, tuple(declined), reason)
            if reason is None:
                instead = _bounded_instead(chosen, found, tensors, options)
                if instead is None and (candidate != target or not candidate.cluster):
                    instead = _by_another(chosen, found, tensors, options)
                return instead or found
            refused = found
        declined.append(f"{candidate.name}: {reason}")
    if refused is None:
        return declined[0].partition(": ")[2]
    assert refused.refused is not None
    # tiles that were asked for are refused by the last target's emitter, with the reason
    return refused if options.tiles else refused.refused


def _by_trees(
    chosen: Group, target: Target, tensors: Mapping[str, Tensor], options: FuseOptions, patience: Patience | None = None
) -> Iterator[tuple[float, Placed]]:
    """Yields the trees of a group without folds with their prices in microseconds, for each target in turn the lowest first; none
    where tiles or the like are asked for."""
    declined: list[str] = []
    for candidate in () if options.shapes_kernels else _in_turn(target):
        found = searched(chosen, candidate, tensors, patience)
        yield from ((us, replace(placed, declined=tuple(declined))) for us, placed in found)
        declined.append(f"{candidate.name}: {'no tree that fits' if candidate.runs_trees else 'runs no trees'}")


def _by_another(chosen: Group, placed: Placed, tensors: Mapping[str, Tensor], options: FuseOptions) -> Placed | None:
    """Instead of a cluster for each row, or of a kernel beside which arrays are copied, one on the target that stands in, where
    that is predicted to be faster. A kernel with copies stays where `FuseOptions.target` names its target."""
    target = placed.phases[0].target
    copies = bool(target.warpgroup_rows) and options.target is None and any(copied(p.program) for p in placed.phases)
    if not (target.cluster or copies) or target.fallback is None or options.tiles:
        return None
    find = _without_copies if copies else placed_on
    other = find(chosen, target.fallback, tensors, options)
    clearly = 1 / target.device.price_error if copies else _CLEARLY  # the kernels of two emitters have little in common
    if isinstance(other, str) or other.refused is not None or us_of(other.phases) >= clearly * us_of(placed.phases):
        return None
    why = "without copies of arrays" if copies else "one block for each row"
    return replace(other, declined=(*placed.declined, f"{target.name}: {why} seems to be faster", *other.declined))


def _without_copies(chosen: Group, target: Target, tensors: Mapping[str, Tensor], options: FuseOptions) -> Placed | str:
    """The kernel of threads that `placed_on` takes, or the one with the least price, if that is clearly less; the first where loops
    are not bounded by masks over data: `_bounded_instead` has looked at these, and where they hide nothing, others are faster."""
    planned = placed_on(chosen, target, tensors, options)
    kernels = (p for p in _others(chosen, target, tensors, options) if p.phases[0].target.writes_kernels)
    least = min(kernels, key=lambda p: us_of(p.phases), default=None)
    if isinstance(planned, str) or planned.refused is not None or least is None:
        return planned
    # the least of many prices is more often too low, as in `fusion.judging`
    error = 1.0 if any(p.program.ranges for p in planned.phases) else target.device.price_error**2
    return least if error * us_of(least.phases) < us_of(planned.phases) else planned


def looking_up(
    placed: Placed, inputs: Iterable[str], known: Mapping[str, Lookup], readers: Mapping[str, int], *, price: bool
) -> Placed:
    """The kernel of a group with these inputs, which looks up those of `known` that it can.

    readers: how many nests of the program read each of these: every one of them is to save its share of the gather.
    price: only what it loses less by than that.
    """
    taken: list[Lookup] = []
    for name in inputs:
        if name in known and unable(placed.phases, known[name]) is None:
            more = [*taken, known[name]]
            # what is a slice, XLA stores for this kernel alone
            others = 1 if known[name].is_slice else max(1, readers[name])
            saved_us = price_gather(known[name], placed.phases[0].target.device).us / others
            if (
                not price
                or us_of(with_lookups(placed.phases, more)) < us_of(with_lookups(placed.phases, taken)) + saved_us
            ):
                taken = more
    return replace(placed, phases=with_lookups(placed.phases, taken)) if taken else placed


def placements(chosen: Group, target: Target, tensors: Mapping[str, Tensor], options: FuseOptions) -> Iterator[Placed]:
    """Ways to run a group that the targets which stand in for each other can run: the one of `placed_on` first, then for each
    target in turn the others, the fastest by the model first, and last what differs from the first by half or twice a tile."""
    if not chosen.folds:
        yield from (placed for _, placed in islice(_by_trees(chosen, target, tensors, options), _MOST_TREES))
        return
    first = placed_on(chosen, target, tensors, options)
    if isinstance(first, str) or first.refused is not None:
        return
    seen = set()
    listed = (*_others(chosen, target, tensors, options), *_neighbours(first, chosen, tensors, options))
    for placed in (first, *listed):
        key = placed.phases[0].target.name, placed.schedule
        if key not in seen:
            seen.add(key)
            yield placed


def promising_trees(
    chosen: Group, target: Target, tensors: Mapping[str, Tensor], options: FuseOptions
) -> Iterator[Placed]:
    """Yields the few trees that are predicted to be faster than the way of `placed_on`; the search for them takes seconds."""
    if not chosen.folds:
        return  # `placements` are trees already
    first = placed_on(chosen, target, tensors, options)
    if isinstance(first, str) or first.refused is not None or options.shapes_kernels:
        return
    for candidate in _in_turn(target):
        found = searched(chosen, candidate, tensors)
        yield from islice((p for us, p in found if us < us_of(first.phases)), _MOST_TREES)


def _others(chosen: Group, target: Target, tensors: Mapping[str, Tensor], options: FuseOptions) -> Iterator[Placed]:
    """On every target, all candidates that it can run, with the rolled axis in one part and in several."""
    for candidate in _in_turn(target):
        if unsuited(chosen, candidate, by_name=True) is not None:
            continue
        found: list[Placed] = []
        for listed in _candidates(chosen, candidate):
            whole = _override(listed, options, candidate)
            parted = whole if candidate.cluster or options.parts else split(chosen, whole, candidate)
            for schedule in dict.fromkeys((whole, parted)):
                phases, problem = phases_of(chosen, schedule, candidate, tensors)
                if problem is None:
                    found.append(Placed(schedule, phases, ()))
        yield from sorted(found, key=lambda p: us_of(p.phases))


def _neighbours(placed: Placed, chosen: Group, tensors: Mapping[str, Tensor], options: FuseOptions) -> Iterator[Placed]:
    """Yields the same schedule with one tile half or twice as large, or with half or twice as many parts."""
    schedule, target = placed.schedule, placed.phases[0].target
    asked = {name for name, _ in options.tiles}
    changed = [
        replace(options, tiles=(*options.tiles, (axis.name, size)))
        for axis, tile in ((schedule.rolled, schedule.rolled_tile), *schedule.grid)
        for size in (tile // 2, min(2 * tile, axis.extent))
        if 0 < size != tile and axis.name not in asked and not target.cluster
    ]
    if options.parts is None and not target.cluster:
        counts = {schedule.parts // 2, 2 * schedule.parts} - {0, schedule.parts}
        changed += [replace(options, parts=n) for n in sorted(counts)]
    for option in changed:
        other = _override(schedule, option, target)
        phases = lowered_phases(chosen, other, target, tensors)
        if phases is not None:
            yield Placed(other, phases, ())


def _in_turn(target: Target) -> Iterator[Target]:
    """The target, and those that stand in for it."""
    yield target
    if target.fallback:
        yield from _in_turn(target.fallback)


def _fastest(
    chosen: Group, target: Target, tensors: Mapping[str, Tensor], options: FuseOptions, patience: Patience | None = None
) -> tuple[Schedule, tuple[Phase, ...], str | None]:
    """Returns the schedule with the least predicted time of those that the target can run; else the first, and why it cannot.

    The time is the price of its kernel where `prices_decide`, with or without prices for kernels as a whole; else what is listed
    with it, for the share of the tiles that its bounds visit. patience: as of `placed_on`.
    """
    best: tuple[float, Schedule, tuple[Phase, ...]] | None = None
    refused: tuple[Schedule, tuple[Phase, ...], str] | None = None
    priced = prices_decide(chosen, target)
    for candidate in _candidates(chosen, target):
        schedule = _override(candidate, options, target)
        if not priced and best is not None and _is_slower(chosen, schedule, target, options, best[0]):
            continue
        if refused is not None and refused_alike(schedule, refused, target):
            continue
        phases, problem = phases_of(chosen, schedule, target, tensors)
        programs = [p.program for p in phases]
        if operations_per_score(programs[0]) > candidate.most_operations:
            continue
        if problem is not None:
            refused = refused or (schedule, phases, problem)
            continue
        if target.searches_tiles and not options.parts:
            schedule, phases = with_cheapest_tiles(chosen, schedule, phases, tensors, options)
            programs = [p.program for p in phases]
        share = visited_shares(programs)[0]
        if options.parts is None and not target.cluster:
            keep_tile = any(name == chosen.rolled.name for name, _ in options.tiles)
            schedule, phases = _split(chosen, schedule, phases, tensors, share, keep_tile=keep_tile)
        time = us_of(phases) if priced else schedule.time(share)
        if best is None or time < best[0] * (_CLEARLY if target.cluster else 1.0):
            best = time, schedule, phases
        if (share == 1.0 and schedule.parts == 1 and not priced) or options.tiles:
            break  # the listed order decides where no mask does
    if best is not None:
        schedule, phases = _in_parts(chosen, best[1], best[2], tensors, options)
        ranged = None if options.parts else _with_ranges(chosen, target, tensors, options)
        if ranged is not None:
            ranged = _in_parts(chosen, *ranged, tensors, options)
            if not options.price or us_of(ranged[1]) <= (1 + _PASS_SHARE) * us_of(phases):
                return *ranged, None
        return *_with_smaller_tiles_if_near(chosen, schedule, phases, tensors, options, patience), None
    assert refused is not None
    return refused if options.tiles else _with_smaller_tiles(chosen, refused, tensors, options)


def _with_smaller_tiles_if_near(
    chosen: Group, schedule: Schedule, phases: tuple[Phase, ...], tensors: Mapping[str, Tensor], options: FuseOptions,
    patience: Patience | None,
) -> tuple[Schedule, tuple[Phase, ...]]:  # fmt: skip
    """Looks for smaller tiles (`with_fewer_spilled`), but not for a kernel that spills and is far from what it may take."""
    spills = options.price and any(map(spilled_bytes, phases))
    if spills and patience is not None and not patience.allows(us_of(phases), _NEAR_ENOUGH):
        return schedule, phases
    return with_fewer_spilled(chosen, schedule, phases, tensors, options)


def _is_slower(chosen: Group, schedule: Schedule, target: Target, options: FuseOptions, time: float) -> bool:
    """Does a schedule take at least so long, whether it is split or not, as is known before it is lowered? Where no prices decide.

    Only of those that are split: one that is not ends the search (`_fastest`). Where masks bound loops, its time is not known yet.
    """
    if target.searches_tiles or options.parts or options.tiles or schedule.time(1.0) < time:
        return False
    parted = split(chosen, schedule, target)
    unmasked = not any(guards_of(chosen, p).predicates for p in range(chosen.passes))
    return unmasked and parted.parts > 1 and parted.time(1.0) >= time


_CLEARLY = 0.95
"""Clusters are listed the simplest first; another one's price, or that of another target, is less than so much of its price.

Prices of several schedules of one program err less against each other than those of several programs."""
_NEAR_ENOUGH = 4.0
"""Smaller tiles are not looked for where a kernel takes more than so many times what it may. (Of 220 kernels of five programs that
were within that at last, all but two took less than twice that before smaller tiles were looked for.)"""
_PASS_SHARE = 0.1
"""The share of a kernel's time that the pass may take which finds its ranges: it is lost where the masks hide nothing after all."""


def _with_ranges(
    chosen: Group, target: Target, tensors: Mapping[str, Tensor], options: FuseOptions
) -> tuple[Schedule, tuple[Phase, ...]] | None:
    """The first listed schedule by which masks over data bound the loop that the target can run, as its price likes it.

    None where no such mask is known.
    """
    if target.static_bounds or target.cluster:
        return None
    if all(guards_of(chosen, p, ranged=True).visible is None for p in range(chosen.passes)):
        return None
    for candidate in choose(chosen, target, ranged=True):
        schedule = _override(candidate, options, target)
        phases, problem = phases_of(chosen, schedule, target, tensors)
        if problem is None and operations_per_score(phases[0].program) <= candidate.most_operations:
            if not any(p.program.ranges for p in phases):
                return None
            if target.searches_tiles:
                schedule, phases = with_cheapest_tiles(chosen, schedule, phases, tensors, options)
            keep_tile = any(name == chosen.rolled.name for name, _ in options.tiles)
            share = visited_shares([p.program for p in phases])[0]
            return _split(chosen, schedule, phases, tensors, share, keep_tile=keep_tile)
    return None


_VISIBLE = 0.5
"""The share of tiles that masks over data are taken to leave, where kernels that skip the others or do not are compared.

As causal masks leave; of documents in one sequence it is far less.
"""


def _bounded_instead(
    chosen: Group, placed: Placed, tensors: Mapping[str, Tensor], options: FuseOptions
) -> Placed | None:
    """A kernel on a target that stands in, whose loop is bounded by masks over data, where the loops of a kernel's own target are
    planned ahead; None where it is not predicted to be faster."""
    own = placed.phases[0].target
    if not own.static_bounds or options.target is not None or options.tiles or options.parts:
        return None
    for target in _in_turn(own):
        if target.static_bounds or target.cluster or unsuited(chosen, target) is not None:
            continue
        ranged = _with_ranges(chosen, target, tensors, options)
        if ranged is None:
            continue
        if not any(_compares_rows(r) for p in ranged[1] for r in p.program.ranges):
            return None
        passes_us = sum(price_range(r, target.device).us for p in ranged[1] for r in p.program.ranges)
        if passes_us + _VISIBLE * (us_of(ranged[1]) - passes_us) > us_of(placed.phases):
            return None
        why = f"{own.name}: its loops are planned ahead, and masks over data bound those of {target.name}"
        return Placed(*ranged, (*placed.declined, why))
    return None


def _compares_rows(found: Range) -> bool:
    """Does a mask compare data of rows with positions along the loop, or with data there?

    It hides most of a row, as documents do that are packed into one sequence. An array of truth values may hide nothing."""
    for node in postorder(found.predicate):
        if isinstance(node, Apply) and node.op in COMPARISONS:
            for rows, columns in (node.args, node.args[::-1]):
                if (
                    rows.tensors
                    and found.axis not in rows.axes
                    and found.axis in columns.axes
                    and rows.axes - columns.axes
                ):
                    return True
    return False


def _with_smaller_tiles(
    chosen: Group, refused: tuple[Schedule, tuple[Phase, ...], str], tensors: Mapping[str, Tensor], options: FuseOptions
) -> tuple[Schedule, tuple[Phase, ...], str | None]:
    """Returns the largest tiles below refused ones that are not too large, where that is what they were refused for.

    Where even the smallest tiles are too large, the others are not lowered."""
    listed, phases, _ = refused
    target = phases[0].target
    if not any(map(too_large, phases)):
        return refused
    found = smaller(listed, target)
    least = min(found, key=lambda s: (s.rolled_tile * math.prod(t for _, t in s.grid), s.stages), default=None)
    if least is None or any(map(too_large, phases_of(chosen, _override(least, options, target), target, tensors)[0])):
        return refused
    for candidate in found:
        schedule = _override(candidate, options, target)
        phases, problem = phases_of(chosen, schedule, target, tensors)
        if problem is not None:
            continue
        if options.parts is None:
            share = visited_shares([p.program for p in phases])[0]
            schedule, phases = _split(chosen, schedule, phases, tensors, share, keep_tile=False)
        return *with_fewer_spilled(chosen, schedule, phases, tensors, options), None
    return refused


def _candidates(chosen: Group, target: Target) -> list[Schedule]:
    """Schedules, best first. Sums in slices are split at once: a tiling that does not fit in parts would leave the device idle."""
    if target.cluster:
        return clusters.schedules(chosen, target)
    in_slices = target.slices_sums and sums_beyond_tiles(chosen, target)
    return [split(chosen, s, target) if in_slices else s for s in choose(chosen, target)]


def _in_parts(
    chosen: Group, schedule: Schedule, phases: tuple[Phase, ...], tensors: Mapping[str, Tensor], options: FuseOptions
) -> tuple[Schedule, tuple[Phase, ...]]:
    """Returns the same kernel of a GPU in parts, as its price likes it, where it does nothing but load and add."""
    target = phases[0].target
    is_whole = schedule.parts == 1 and options.parts is None and not target.cluster
    if not is_whole or not options.price or target.platform != "gpu" or examine(chosen).has_products:
        return schedule, phases
    return with_cheapest_parts(chosen, schedule, phases, tensors)


def _split(
    chosen: Group, schedule: Schedule, phases: tuple[Phase, ...], tensors: Mapping[str, Tensor], share: float, *,
    keep_tile: bool,
) -> tuple[Schedule, tuple[Phase, ...]]:  # fmt: skip
    """Returns the same kernel with its rolled axis split, where that is faster and possible."""
    target = phases[0].target
    parted = split(chosen, schedule, target, share, keep_tile=keep_tile)
    if parted.parts > 1:
        several, problem = phases_of(chosen, parted, target, tensors)
        if problem is None:
            return parted, several
    return schedule, phases


def _override(schedule: Schedule, options: FuseOptions, target: Target) -> Schedule:
    tiles = dict(options.tiles)
    grid = tuple((a, min(tiles.get(a.name, t), a.extent)) for a, t in schedule.grid)
    rolled_tile = min(tiles.get(schedule.rolled.name, schedule.rolled_tile), schedule.rolled.extent)
    if target.cluster:  # the emitter knows no smaller ones, and every block has as many
        rolled_tile = -(-rolled_tile // target.tile_multiple) * target.tile_multiple
    warps = schedule.warps
    if target.warpgroup_rows and grid != schedule.grid:  # as many warpgroups as the rows need
        warps = max(1, max(t for _, t in grid) // target.warpgroup_rows) * target.warpgroup_warps
    return replace(
        schedule,
        grid=grid,
        rolled_tile=rolled_tile,
        parts=min(options.parts or schedule.parts, -(-schedule.rolled.extent // rolled_tile)),
        warps=options.warps or warps,
        stages=options.stages or schedule.stages,
    )
