"""Makes a `Plan` of a jaxpr in four steps: convert, group, schedule, lower.

A plan is a list of steps: kernels, and equations of the original jaxpr that XLA keeps. Every value that passes between
steps is a variable of the jaxpr.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr
from pallasfuse.decisions import Grouping, Left, Original, Placed
from pallasfuse.doubts import doubtful, too_little
from pallasfuse.errors import (
    FusionError,
    InvalidProgramError,
    ScheduleError,
    TargetError,
    TraceError,
    VerificationError,
)
from pallasfuse.first_time import IMPORTS, Later, known, shared, without_collection
from pallasfuse.fusion import widening
from pallasfuse.fusion.cost import together
from pallasfuse.fusion.joined_axes import with_joined_axes
from pallasfuse.indirect import unable, with_lookups
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.boundary import NO_LOOP, Boundary
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.jaxpr_frontend import Converted, convert, convert_in_parts, convert_rewritten, convert_terms_apart
from pallasfuse.jaxpr_frontend.converted import named_boundary
from pallasfuse.options import FuseOptions
from pallasfuse.pallas_backend import cluster_rules, mosaic_rules
from pallasfuse.placement import placements, promising_trees
from pallasfuse.plan import REORDERED_SUMS, Kernel, Plan, Strategy
from pallasfuse.price.kernel import price_kernel
from pallasfuse.price.stored_at_boundary import boundary_prices
from pallasfuse.price.stored_beside import stored_beside
from pallasfuse.price.terms import NOTHING, Price, total
from pallasfuse.price.visited_tiles import visited_share
from pallasfuse.proof import PlannedKernel, Proof, disproved_form, prove
from pallasfuse.repetition import Places, Planned, grouped, predicted_us
from pallasfuse.scheduled import scheduled
from pallasfuse.search import rewriting
from pallasfuse.search.found import CONDITION as REORDERED
from pallasfuse.search.found import EXCEPTION as ALL_FINITE
from pallasfuse.search.found import Rewriting
from pallasfuse.steps import fallbacks_of, gathered_anyway, steps_of
from pallasfuse.targets import Target
from pallasfuse.tiling import arithmetic, bounds

_CONDITIONS: dict[str, Callable[[TileProgram], tuple[str, ...]]] = {"mosaic_gpu": mosaic_rules.conditions}
"""Returns the ways in which a kernel rounds otherwise than its program, by the name of the target."""


def make_plan(jaxpr: Jaxpr, target: Target, options: FuseOptions, boundary: Boundary = NO_LOOP) -> Plan:
    """Plan `jaxpr` for `target`. boundary: how values enter and leave it, where it is the body of a loop.

    Raises:
      FusionError: `options.strict` and something is left to XLA. A strict plan has no exceptions: what would need one
        takes another pass, or visits masked tiles too.
    """
    converted = convert(jaxpr, exclude=options.exclude, symbolic=True)
    return schedule_grouping(*choose_form(converted, target, options), boundary=boundary)


def plan_converted(
    converted: Converted, target: Target, options: FuseOptions, *, along: frozenset[Axis] = frozenset()
) -> Plan:
    """Plans a program that was converted already, whose kernels read nothing but what is stored. Otherwise as `make_plan`;
    along: as in `fusion.grouping.group`."""
    placements = Placements(converted, target, options, looks_up=False)
    grouping = choose_groups(placements, along=along)
    return schedule_grouping(placements, grouping, wanted=bool(along))


class Placements(Places):
    """Finds where the groups of a converted function run. rewritings: what is computed otherwise than it is written."""

    def __init__(
        self, converted: Converted, target: Target, options: FuseOptions, *, looks_up: bool = True,
        rewritings: tuple[Rewriting, ...] = (), planned: Planned | None = None,
    ) -> None:  # fmt: skip
        super().__init__(converted.program, target, options, looks_up=looks_up, planned=planned)
        self.converted, self.rewritings = converted, rewritings
        self.outdoes = False
        """Is there another form, with cheaper sums and products?"""


def choose_groups(
    placements: Placements, *, along: frozenset[Axis] = frozenset(), to_save_us: Later[float] | None = None
) -> Grouping:
    """The groups of a program. Whatever goes wrong here leaves the program with XLA: never wrong, and never a crash.

    along, to_save_us: as of `grouped`."""
    converted = placements.converted
    reductions = [n for n in converted.program.nests if isinstance(n, Nest) and n.is_reduction]
    if converted.jaxpr.effects:
        reason = "the function has side effects or collectives: it stays with XLA as a whole"
    else:
        try:
            return grouped(converted.program, placements, along=along, to_save_us=to_save_us)
        except Exception as error:
            reason = f"planning failed ({type(error).__name__}: {error}): a bug in pallasfuse, please report it"
    return Grouping((), tuple(Left(n.name, reason, n.source) for n in reductions))


@without_collection()
def choose_form(converted: Converted, target: Target, options: FuseOptions) -> tuple[Placements, Grouping]:
    """The program with its groups, in the form that is predicted to be the fastest: as it is written, with its concatenated axes
    or its products of sums taken apart, with neighbouring axes as one, or with sums and products in another order.

    Raises:
      ScheduleError: the user has written a schedule, and it cannot be run.
    """
    if options.schedule is not None:
        if _compat.has_symbolic_shapes(converted.original):
            raise ScheduleError("FuseOptions.schedule needs static shapes: its tiles are numbers of positions. Leave it out to "
                                "export for symbolic shapes, which are left to XLA")  # fmt: skip
        placements = Placements(converted, target, options, looks_up=False)
        grouping, placed = scheduled(converted, options.schedule, target, strict=options.strict)
        placements.adopt(grouping.groups[0], placed, None, {})
        return placements, grouping
    target = target.on(target.device.among(_bytes_around(converted)))
    # other programs of a call have most parts in common with this one
    planned = shared((Planned, target, options), Planned)
    placements = Placements(converted, target, options, planned=planned)
    grouping = choose_groups(placements)
    best, best_us = (placements, grouping), Later(lambda: predicted_us(placements, grouping.groups))
    for others in () if converted.jaxpr.effects else _other_forms(placements, grouping):
        found = _if_faster(others, placements, best_us)
        if found is not None:
            best, best_us = (others, found[0]), known(found[1])
    return best


def _if_faster(others: Placements, written: Placements, best_us: Later[float]) -> tuple[Grouping, float] | None:
    """The groups of another form and its predicted time; None where that is not less than the best so far."""
    # another order is worth it only where it is clearly faster
    error = others.target.device.price_error if others.rewritings else 1.0
    by_xla_us = Later(lambda: predicted_us(others, ()))
    # neighbouring axes as one are the same equations: what XLA takes for them does not differ
    joins = others.converted.unjoined is not None
    added_us = Later(lambda: predicted_us(written, ()) - by_xla_us.value if joins else 0.0)
    to_save_us = Later(lambda: by_xla_us.value + added_us.value - best_us.value / error)
    groups = choose_groups(others, to_save_us=to_save_us)
    if not groups.groups and not others.rewritings:
        return None
    us = predicted_us(others, groups.groups) + added_us.value
    return (groups, us) if error * us < best_us.value else None


def _bytes_around(converted: Converted) -> int:
    """The bytes of the numbers among a program's arguments and results; none where shapes are symbolic."""
    if _compat.has_symbolic_shapes(converted.original):
        return 0
    program = converted.program
    by_name = {t.name: t for t in program.definitions()}
    around = [by_name[name] for name in {*(t.name for t in program.inputs), *program.outputs}]
    numbers = (t for t in around if t.dtype == "bool" or dtypes.is_integer(t.dtype) or dtypes.is_float(t.dtype))
    return sum(volume(t.axes) * dtypes.itemsize_bytes(t.dtype) for t in numbers)


def _other_forms(written: Placements, grouping: Grouping) -> Iterator[Placements]:
    """Yields other forms of a program that compute the same. grouping: of the program as it is written."""
    converted, target, options = written.converted, written.target, written.options

    def another(made: Converted | None) -> Placements | None:
        return None if made is None else Placements(made, target, options, planned=written.planned)

    def reordered() -> Placements | None:
        found = _rewritings(converted, target, options)
        written.outdoes = bool(found)
        uncovered = [r for r in found if not _is_covered(r, written, grouping)]
        return _rewritten(converted, target, options, uncovered, written.planned)

    # who asks for tiles names the axes of the program as it is written
    joins = options.rewrite and not options.tiles
    makers: tuple[Callable[[], Placements | None], ...] = (
        lambda: another(convert_in_parts(converted, exclude=options.exclude)),
        lambda: another(_with_terms_apart(converted, target, options)),
        lambda: another(_with_joined_axes(converted) if joins else None),
        lambda: another(_with_joined_axes(converted, leaves_reshapes=True) if joins else None),
        reordered,
    )
    for make in makers:
        try:
            form = make()
        except Exception as error:  # never a crash: the program as it is written is planned already
            warnings.warn(f"no other form was found ({type(error).__name__}: {error}): a bug in pallasfuse, please report it",
                          stacklevel=2)  # fmt: skip
            continue
        if form is not None:
            yield form


def _with_terms_apart(converted: Converted, target: Target, options: FuseOptions) -> Converted | None:
    """A program with products of normalised terms taken apart; None where it has none, they are not allowed, or not proved."""
    if not options.rewrite or options.strict or _compat.has_symbolic_shapes(converted.original):
        return None
    exact, longest = target.platform == "cpu", target.max_inner
    apart = convert_terms_apart(converted, exact=exact, longest=longest, exclude=options.exclude)
    return None if apart is None or disproved_form(apart) is not None else apart


def _with_joined_axes(converted: Converted, *, leaves_reshapes: bool = False) -> Converted | None:
    """A program with neighbouring axes as one, as `with_joined_axes`; None also where dimensions of arrays have sizes or shards of
    their own."""
    constrained = any(map(_compat.is_sharding_constraint, converted.jaxpr.eqns))
    if constrained or _compat.has_symbolic_shapes(converted.original):
        return None
    program = with_joined_axes(converted.program, leaves_reshapes=leaves_reshapes)
    return None if program is None else converted.joined(known(program), leaves_reshapes=leaves_reshapes)


def _rewritings(converted: Converted, target: Target, options: FuseOptions) -> list[Rewriting]:
    """The sums and products of a program that are cheaper in another order, where that is allowed."""
    symbolic = _compat.has_symbolic_shapes(converted.original)
    if not options.rewrite or not options.price or options.strict or symbolic:
        return []
    return rewriting.rewritings(converted.program, target.device)


def _rewritten(
    converted: Converted, target: Target, options: FuseOptions, cheaper: Sequence[Rewriting],
    planned: Planned | None = None,
) -> Placements | None:  # fmt: skip
    """A program with some rewritings; None where there are none, JAX has other types for them, or they are not proved.

    planned: as of `Places`."""
    nests, leaves = [r.nests for r in cheaper], {t.name for r in cheaper for t in r.leaves}
    mixed = target.platform == "gpu"
    made = convert_rewritten(converted, nests, leaves, mixed=mixed, exclude=options.exclude) if cheaper else None
    if made is None or disproved_form(made) is not None:
        return None
    return Placements(made, target, options, rewritings=tuple(cheaper), planned=planned)


def rewritten_form(plan: Plan) -> Placements | None:
    """The program of a plan with its sums and products in another order, whatever its kernels promise; None where it has none."""
    written = convert(plan.converted.original, exclude=plan.options.exclude, symbolic=True)
    found = _rewritings(written, plan.target, plan.options)
    return _rewritten(written, plan.target, plan.options, found)


def plan_of_form(plan: Plan, form: Placements) -> Plan:
    """The plan of another form of the program of a plan."""
    made = schedule_grouping(form, choose_groups(form), boundary=plan.boundary)
    return replace(made, bodies=plan.bodies, written_out=plan.written_out)


def _is_covered(found: Rewriting, placements: Placements, grouping: Grouping) -> bool:
    """Do kernels of ours compute all that a rewriting changes, and more, in clearly less time?"""
    left = {n.name for n in found.old if n.is_reduction}
    us = 0.0
    for group in grouping.groups:
        made = {n.name for n in (*(f.nest for f in group.folds), *group.inner, *group.outputs)}
        price = placements.price(group)
        if left & made and not isinstance(price, str):
            left, us = left - made, us + price.us
    return not left and us * placements.target.device.price_error <= found.after.us


@without_collection()
def schedule_grouping(
    placements: Placements, grouping: Grouping, *, wanted: bool = False, boundary: Boundary = NO_LOOP
) -> Plan:
    """A plan of the chosen groups, each as its kernel. wanted: whether it is faster or not. boundary: as of `make_plan`.

    Raises:
      ScheduleError: the kernel of a given schedule cannot be run.
    """
    converted, target, options = placements.converted, placements.target, placements.options
    again = partial(schedule_grouping, placements, wanted=wanted, boundary=boundary)
    known = {a.name for g in grouping.groups for a in (*g.parallel, g.rolled)}
    if options.tiles and grouping.groups and known.isdisjoint(name for name, _ in options.tiles):
        raise TargetError(f"FuseOptions.tiles names the axes {', '.join(n for n, _ in options.tiles)}, but the kernels tile "
                          f"{', '.join(sorted(known))}: explain(...) prints the axes")  # fmt: skip
    kernels = []
    for number, chosen in enumerate(grouping.groups):
        placed = placements.placed(chosen)
        if isinstance(placed, str):
            return again(without_group(grouping, chosen, placed))
        replaced = grouping.replaced[number] if grouping.replaced else NOTHING
        try:
            price = placements.price(chosen)  # where there is none, `kernel_of` raises what the reason is made of
            own = None if isinstance(price, str) else price
            kernels.append(kernel_of(chosen, placed, replaced, *placements.original(chosen), own))
        except Exception as error:
            reason = f"its kernel could not be priced ({type(error).__name__}: {error}): a bug in pallasfuse, please report it"
            if options.schedule is not None:
                raise ScheduleError(f"FuseOptions.schedule: {chosen.name} cannot be run: {reason}") from error
            return again(without_group(grouping, chosen, reason))
        doubt = None if wanted or grouping.replaced == () else doubtful(kernels[-1], target, options)
        if doubt is not None:
            return again(without_group(grouping, chosen, doubt))
    if not wanted and grouping.replaced != () and kernels:
        named = named_boundary(converted, boundary)
        stored = boundary_prices(converted.program, [(k.name, k.group, k.reads) for k in kernels], named, target.device)
        for kernel in kernels:
            doubt = doubtful(kernel, target, options, stored[kernel.name])
            if doubt is not None:
                return again(without_group(grouping, kernel.group, doubt))
        little = too_little(placements.judge, kernels, total(stored.values()).us, target, options)
        if little is not None:
            return again(reduce(lambda found, group: without_group(found, group, little), grouping.groups, grouping))
    plan = _assembled(converted, grouping, kernels, target, options, placements.rewritings)
    if target.platform == "gpu" and options.price and plan.kernels:
        made = frozenset(name for k in plan.kernels for name in k.stores)
        read = frozenset(name for k in plan.kernels for name in k.reads)
        plan = replace(plan, stored_beside=stored_beside(converted.program, target.device, made, read))
    plan = replace(plan, boundary=boundary)
    return replace(plan, outdoes=True) if placements.outdoes and not placements.rewritings else plan


def _assembled(
    converted: Converted, grouping: Grouping, kernels: Sequence[Kernel], target: Target, options: FuseOptions,
    rewritings: tuple[Rewriting, ...],
) -> Plan:  # fmt: skip
    """The plan of these kernels, one for each group; everything else is left to XLA.

    Raises:
      FusionError: as `make_plan`.
      ScheduleError: the kernel of a given schedule waits for itself.
    """
    if options.schedule is not None:
        kernels = [replace(k, strategy="scheduled") for k in kernels]
    try:
        anyway = gathered_anyway(converted, kernels)
        kernels = [_without(k, anyway) for k in kernels]
        steps = steps_of(converted, kernels)
    except InvalidProgramError as error:
        reason = f"its kernel and another one would wait for each other ({error})"
        if options.schedule is not None:
            raise ScheduleError(f"FuseOptions.schedule: {grouping.groups[-1].name} cannot be run: {reason}") from None
        left = without_group(grouping, grouping.groups[-1], reason)
        return _assembled(converted, left, kernels[:-1], target, options, rewritings)
    fallbacks = fallbacks_of(converted, grouping, steps, options)
    refused = [f for f in fallbacks if not f.asked]
    if options.strict and refused:
        listed = "\n".join(f"  {f}" for f in refused)
        raise FusionError(f"strict: {len(refused)} operations are left to XLA:\n{listed}\n"
                          "Remove them from the fused function, or drop strict=True.")  # fmt: skip
    conditions: dict[str, None] = {}
    exceptions: dict[str, None] = {}
    if rewritings or converted.terms_apart:
        conditions |= {REORDERED: None}
        exceptions |= {ALL_FINITE: None}
    for kernel in kernels:
        conditions |= dict.fromkeys((REORDERED_SUMS, *kernel.group.conditions))
        for phase in kernel.phases:
            if phase.target.writes_kernels and arithmetic.takes_powers_of_two(phase.program):
                conditions |= {arithmetic.CONDITION: None}
            if phase.target.writes_kernels and arithmetic.shifts_exponentials(kernel.group.expressions()):
                conditions |= {arithmetic.EXPONENTIAL_CONDITION: None}
            if phase.target.name in _CONDITIONS:
                conditions |= dict.fromkeys(_CONDITIONS[phase.target.name](phase.program))
        if kernel.target.cluster:
            conditions |= dict.fromkeys(cluster_rules.conditions([p.program for p in kernel.phases]))
        several = kernel.schedule.trips > 1 or bool(kernel.schedule.tree)
        if several or any(f.refined is not None for f in kernel.group.folds):  # else it computes as the program says
            exceptions |= dict.fromkeys(kernel.group.exceptions)
        elif widening.EXCEPTION in kernel.group.exceptions:  # but for its roundings
            exceptions |= {widening.EXCEPTION: None}
        if several:
            exceptions |= dict.fromkeys(bounds.exceptions(kernel.group, ranged=kernel.schedule.ranges))
    assert not (options.strict and exceptions), "a strict plan has no exceptions"
    plan = Plan(
        converted,
        target,
        known(grouping),
        tuple(kernels),
        known(tuple(fallbacks)),
        (*conditions, *exceptions),
        tuple(exceptions),
        tuple(steps),
        options,
        rewritings=rewritings,
    )
    untested = options.verify is None or _compat.has_symbolic_shapes(
        converted.original
    )  # nothing is planned of the latter
    return plan if untested else _verified(plan, options)


def _without(kernel: Kernel, stored: frozenset[str]) -> Kernel:
    """The kernel without lookups of tensors that are stored."""
    kept = [x for name, x in kernel.lookups.items() if name not in stored]
    phases = with_lookups(kernel.phases, kept)
    if len(kept) == len(kernel.lookups):
        return kernel
    price = price_kernel([(p.program, p.target) for p in phases])
    return replace(kernel, phases=phases, price=price, original=None, names={})


def revised(plan: Plan, changes: Mapping[str, Placed | str]) -> Plan:
    """A plan with some of its kernels, by name, run in another way or, for a reason, left to XLA.

    Raises:
      FusionError: as `make_plan`.
    """
    if not changes:
        return plan
    grouping, kernels = plan.grouping, []
    for kernel in plan.kernels:
        change = changes.get(kernel.name)
        if isinstance(change, str):
            grouping = without_group(grouping, kernel.group, change)
        else:
            kernels.append(kernel if change is None else kernel_of(kernel.group, change, kernel.replaced))
    made = _assembled(plan.converted, grouping, kernels, plan.target, plan.options, plan.rewritings)
    return replace(made, bodies=plan.bodies, outdoes=plan.outdoes, boundary=plan.boundary, written_out=plan.written_out)


def ways(plan: Plan, kernel: Kernel, *, searched: bool = False) -> Iterator[Placed]:
    """Ways to run one kernel of a plan, as it is planned first, and then the most promising ones. They look up what it looks up, if
    they can. A kernel whose schedule was given has that way alone.

    searched: none of these, but trees that a search finds.
    """
    if plan.options.schedule is not None:  # who asks for a schedule gets it
        if not searched:
            yield Placed(kernel.schedule, kernel.phases, kernel.declined)
        return
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in plan.program.definitions()}
    for placed in (promising_trees if searched else placements)(kernel.group, plan.target, tensors, plan.options):
        able = [x for x in kernel.lookups.values() if unable(placed.phases, x) is None]
        yield replace(placed, phases=with_lookups(placed.phases, able))


def parts_of(plan: Plan) -> list[PlannedKernel]:
    """The kernels of a plan, as the proof takes them."""
    return [PlannedKernel(k.group, k.schedule, k.phases) for k in plan.kernels]


def prove_plan(plan: Plan, *, delta: float = 1e-9, seed: int = 0) -> Proof:
    """Test every stage of a plan over finite fields; at most `delta` is the probability that a wrong one passes.

    Raises:
      TraceError: shapes are symbolic.
    """
    if _compat.has_symbolic_shapes(plan.converted.original):
        raise TraceError("a plan for symbolic shapes cannot be tested: pass static shapes")
    proof = prove(plan.converted, parts_of(plan), delta=delta, seed=seed)
    for loop in {(repr(loop), str(loop.loop.params["jaxpr"])): loop for loop in plan.loops}.values():  # equal ones once
        with IMPORTS:  # most programs have no loop
            from pallasfuse.proof.loops import prove_loop
        proof = proof.and_of(f"the loop at {loop.source}", prove_loop(loop, delta=delta, seed=seed))
    return proof


def _verified(plan: Plan, options: FuseOptions) -> Plan:
    proof = prove_plan(plan)
    if proof.counterexample is not None:
        raise VerificationError(f"{proof.counterexample}. This is a bug in pallasfuse, please report it; without fuse the function "
                                "computes what it says.")  # fmt: skip
    if proof.uncovered and options.strict:
        raise VerificationError("strict: not everything could be verified: " + "; ".join(proof.uncovered))
    return replace(plan, proof=proof)


def without_group(grouping: Grouping, group: Group, reason: str) -> Grouping:
    """The other groups; this one's reductions are left to XLA."""
    nests = (*(f.nest for f in group.folds), *(n for n in group.inner if n.is_reduction))
    left = tuple(Left(n.name, reason, n.source) for n in nests)
    kept = [n for n, g in enumerate(grouping.groups) if g is not group]
    replaced = tuple(grouping.replaced[n] for n in kept) if grouping.replaced else ()
    return Grouping(tuple(grouping.groups[n] for n in kept), (*grouping.left, *left), replaced)


def kernel_of(
    chosen: Group,
    placed: Placed,
    replaced: Price,
    original: Original | None = None,
    names: Mapping[str, str] | None = None,
    price: Price | None = None,
) -> Kernel:
    """The kernel of a group, run in one way. replaced, original, names: as in `Kernel`. price: of it, where that is known."""
    schedule, program = placed.schedule, placed.phases[0].program
    share = visited_share([p.program for p in placed.phases])
    inside = {f.name: chosen.passes for f in chosen.folds} | {n.name: chosen.passes for n in chosen.inner}
    work = together([f.nest for f in chosen.folds], chosen.inner, chosen.outputs, chosen.parallel, inside, share)
    repaired = {f.name: f.matrix for f in chosen.folds if f.frames}
    rolling: Strategy = "rolling_update" if repaired and schedule.trips > 1 else "single_pass"
    strategy: Strategy = "searched" if schedule.tree else "split_k" if len(placed.phases) > 1 else rolling
    own = {a for n in (*(f.nest for f in chosen.folds), *chosen.inner, *chosen.outputs) for a in (*n.axes, *n.reduced)}
    return Kernel(
        chosen.name, strategy, {a.name: a.extent for a in program.order if a in own},
        {a.name: t for a, t in program.tiles if a in own}, repaired, work.flops, work.bytes_read, work.bytes_written,
        share, chosen, schedule, placed.phases, placed.declined,
        price or price_kernel([(p.program, p.target) for p in placed.phases]), replaced, original, names or {}, placed.rivals,
    )  # fmt: skip
