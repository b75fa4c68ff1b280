"""Makes a `Plan` of a jaxpr in four steps: convert, group, schedule, lower.

A plan is a list of steps: kernels, and equations of the original jaxpr that XLA keeps. Every value that passes between
steps is a variable of the jaxpr.
"""

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
from pallasfuse.first_time import IMPORTS, known, without_collection
from pallasfuse.form_choice import Placements, choose_form, choose_groups
from pallasfuse.fusion import widening
from pallasfuse.fusion.cost import together
from pallasfuse.indirect import unable, with_lookups
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.boundary import NO_LOOP, Boundary
from pallasfuse.ir.expr import Apply, postorder
from pallasfuse.ir.fold import Group
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.jaxpr_frontend import Converted, convert
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
from pallasfuse.proof import PlannedKernel, Proof, prove
from pallasfuse.resources.exponentials import takes_powers_of_two
from pallasfuse.search.found import CONDITION as REORDERED
from pallasfuse.search.found import EXCEPTION as ALL_FINITE
from pallasfuse.search.found import Rewriting
from pallasfuse.steps import fallbacks_of, gathered_anyway, steps_of
from pallasfuse.targets import Target
from pallasfuse.tiling import arithmetic, bounds
from pallasfuse.triton_gpu import rules as triton_rules

_CONDITIONS: dict[str, Callable[[TileProgram], tuple[str, ...]]] = {
    "mosaic_gpu": mosaic_rules.conditions, "triton": triton_rules.conditions,
}  # fmt: skip
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


def plan_of_form(plan: Plan, form: Placements) -> Plan:
    """The plan of another form of the program of a plan."""
    made = schedule_grouping(form, choose_groups(form), boundary=plan.boundary)
    return replace(made, bodies=plan.bodies, written_out=plan.written_out)


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
            has_exp = any(isinstance(n, Apply) and n.op == "exp" for n in postorder(*kernel.group.expressions()))
            if phase.target.writes_kernels and has_exp and takes_powers_of_two(phase.program):
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
