"""Chooses the form in which a program is planned, with its groups: the one that is predicted to be the fastest.

Forms compute the same: the program as it is written, with concatenated axes or products of sums taken apart, with neighbouring axes
as one, or with sums and products in another order.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pallasfuse import _compat
from pallasfuse.decisions import Grouping, Left
from pallasfuse.errors import ScheduleError
from pallasfuse.first_time import Later, known, shared, without_collection
from pallasfuse.fusion.joined_axes import with_joined_axes
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.loop_program import Nest
from pallasfuse.jaxpr_frontend import Converted, convert, convert_in_parts, convert_rewritten, convert_terms_apart
from pallasfuse.options import FuseOptions
from pallasfuse.plan import Plan
from pallasfuse.proof import disproved_form
from pallasfuse.repetition import Places, Planned, grouped, paying_together, predicted_us
from pallasfuse.scheduled import scheduled
from pallasfuse.search import rewriting
from pallasfuse.search.found import Rewriting
from pallasfuse.targets import Target


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
    """Returns the groups of a program. Whatever goes wrong here leaves the program with XLA: never wrong, and never a crash.

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


_MOST_NESTS = 5000
"""Other forms of larger programs are not planned, as each takes as long as the first. This is a limit on time, and no more: one
program of the benchmark is known to have more nests (6285: 243 s with its other forms, 44 s without)."""


@without_collection()
def choose_form(converted: Converted, target: Target, options: FuseOptions) -> tuple[Placements, Grouping]:
    """Returns the program with its groups, in the form that is predicted to be the fastest.

    It is as it is written, with its concatenated axes or its products of sums taken apart, with neighbouring axes as one, or with
    sums and products in another order; a very large program as it is written.

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
    # other programs of a call have most parts in common with this one; whether they are checked changes no plan
    planned = shared((Planned, target, replace(options, check=None)), Planned)
    placements = Placements(converted, target, options, planned=planned)
    grouping = choose_groups(placements)
    best, best_us = (placements, grouping), Later(lambda: predicted_us(placements, grouping.groups))
    is_large = len(converted.program.nests) > _MOST_NESTS
    for others in () if converted.jaxpr.effects or is_large else _other_forms(placements, grouping):
        found = _if_faster(others, placements, best_us)
        if found is not None:
            best, best_us = (others, found[0]), known(found[1])
    return best


def _if_faster(others: Placements, written: Placements, best_us: Later[float]) -> tuple[Grouping, float] | None:
    """Returns the groups of another form and its predicted time; None where that is not less than the best so far.

    Another order is worth it only where it is clearly faster, and reshapes are left to XLA only where that gains more than the
    price of the kernels may be wrong.
    """
    error = others.target.device.price_error
    by_xla_us = Later(lambda: predicted_us(others, ()))
    # neighbouring axes as one are the same equations: what XLA takes for them does not differ
    joins = others.converted.unjoined is not None
    added_us = Later(lambda: predicted_us(written, ()) - by_xla_us.value if joins else 0.0)
    most_us = Later(lambda: best_us.value / (error if others.rewritings else 1.0))
    to_save_us = Later(lambda: by_xla_us.value + added_us.value - most_us.value)
    groups = choose_groups(others, to_save_us=to_save_us)
    if not groups.groups and not others.rewritings:
        return None
    us = predicted_us(others, groups.groups) + added_us.value
    # it decides only here: a further form competes with the time itself
    unsure_us = (error - 1.0) * others.kernels_us(groups.groups) if others.converted.leaves_reshapes else 0.0
    if us + unsure_us >= most_us.value:
        return None
    paying = paying_together(groups, others)
    return paying, us if paying is groups else predicted_us(others, paying.groups) + added_us.value


def _bytes_around(converted: Converted) -> int:
    """Counts the bytes of the numbers among a program's arguments and results; none where shapes are symbolic."""
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
    """Returns a program with products of normalised terms taken apart; None where there are none, or none allowed, or proved."""
    if not options.rewrite or options.strict or _compat.has_symbolic_shapes(converted.original):
        return None
    exact, longest = target.platform == "cpu", target.max_inner
    apart = convert_terms_apart(converted, exact=exact, longest=longest, exclude=options.exclude)
    return None if apart is None or disproved_form(apart) is not None else apart


def _with_joined_axes(converted: Converted, *, leaves_reshapes: bool = False) -> Converted | None:
    """Returns a program with neighbouring axes as one, as `with_joined_axes`; None also where dimensions of arrays have sizes or
    shards of their own."""
    constrained = any(map(_compat.is_sharding_constraint, converted.jaxpr.eqns))
    if constrained or _compat.has_symbolic_shapes(converted.original):
        return None
    program = with_joined_axes(converted.program, leaves_reshapes=leaves_reshapes)
    return None if program is None else converted.joined(known(program), leaves_reshapes=leaves_reshapes)


def _rewritings(converted: Converted, target: Target, options: FuseOptions) -> list[Rewriting]:
    """Finds the sums and products of a program that are cheaper in another order, where that is allowed."""
    symbolic = _compat.has_symbolic_shapes(converted.original)
    if not options.rewrite or not options.price or options.strict or symbolic:
        return []
    return rewriting.rewritings(converted.program, target.device)


def _rewritten(
    converted: Converted, target: Target, options: FuseOptions, cheaper: Sequence[Rewriting],
    planned: Planned | None = None,
) -> Placements | None:  # fmt: skip
    """Returns a program with some rewritings; None where there are none, JAX has other types for them, or they are not proved.

    planned: as of `Places`."""
    nests, leaves = [r.nests for r in cheaper], {t.name for r in cheaper for t in r.leaves}
    mixed = target.platform == "gpu"
    made = convert_rewritten(converted, nests, leaves, mixed=mixed, exclude=options.exclude) if cheaper else None
    if made is None or disproved_form(made) is not None:
        return None
    return Placements(made, target, options, rewritings=tuple(cheaper), planned=planned)


def rewritten_form(plan: Plan) -> Placements | None:
    """Returns the program of a plan with its sums and products in another order, whatever its kernels promise; None where there is
    none."""
    written = convert(plan.converted.original, exclude=plan.options.exclude, symbolic=True)
    found = _rewritings(written, plan.target, plan.options)
    return _rewritten(written, plan.target, plan.options, found)


def _is_covered(found: Rewriting, placements: Placements, grouping: Grouping) -> bool:
    """Do kernels of ours compute all that a rewriting changes, and more, in clearly less time?"""
    left = {n.name for n in found.old if n.is_reduction}
    us = 0.0
    for group in grouping.groups:
        made = {n.name for n in group.nests}
        price = placements.price(group)
        if left & made and not isinstance(price, str):
            left, us = left - made, us + price.us
    return not left and us * placements.target.device.price_error <= found.after.us
