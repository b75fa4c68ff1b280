"""Bodies of loops and branches are programs of their own: each is planned once, and runs as a fused call inside its loop.

Values that kernels read and that are the same in every trip are computed once, before the loop (`loop_invariants` splits the body
for that). The rest stays in the body: XLA moves out of it what it would, and what it computes together with something that changes
is not taken apart.

The body of a scan may be planned in two forms. In one, XLA cuts an element for each trip from every array that the scan runs over,
and stores it for the kernel that reads it. In the other, the body gets whole arrays and the number of the trip, and a kernel reads
its element where it lies; so it does with what the body cuts out by a number itself, as a `fori_loop` over layers does. The form is
used whose kernels save more.
"""

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, Signature
from typing import Any

import jax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.decompositions.writing import Writer
from pallasfuse.first_time import IMPORTS
from pallasfuse.ir import dtypes
from pallasfuse.ir.boundary import NO_LOOP, Boundary
from pallasfuse.jaxpr_frontend import bodies, called, flatten, fused_calls, left_by_user
from pallasfuse.jaxpr_frontend.lookups import element_by_number
from pallasfuse.jaxpr_frontend.plans import LARGEST
from pallasfuse.loop_invariants import computed, known_before, split, stored_for
from pallasfuse.plan import Plan

type Run = Callable[..., list[Any]]


@dataclass(frozen=True, slots=True)
class BodyForm:
    """One of the programs that a body may be planned as."""

    jaxpr: Jaxpr
    boundary: Boundary
    """This says which arguments and results of the body the loop slices, carries from trip to trip, and stacks."""
    by_number: bool = False
    """The body gets the number of the trip, and whole arrays instead of an element of each; what else it cuts out of arrays by
    numbers it takes as rows."""
    trips: int | None = None
    """The number of trips; None where nobody knows it, or there is no loop."""
    stored: Callable[[Collection[int]], Jaxpr | None] = lambda _: None
    """Returns the program that computes what is stored before the loop for kernels alone, by the numbers of the arguments that
    they read; None where nothing is."""
    hoists: bool = False
    """Something is computed before the loop that XLA may compute in each trip: that saves more than kernels do."""


@dataclass(frozen=True, slots=True)
class UsedForm:
    """The form in which a body is used that has kernels, and what runs it instead of its own equations."""

    form: BodyForm
    run: Run
    read: frozenset[int]
    """The numbers of the arguments that kernels read: of those, what is the same in every trip is computed before the loop."""


type FusedBody = Callable[[Sequence[BodyForm], str], UsedForm | None]
"""Returns the form of a body that is used; None where nothing of it is fused. The arguments are its forms, and words that say which
body it is."""


def read_inside(plan: Plan) -> frozenset[int]:
    """Returns the numbers of the arguments that the kernels of a plan read, and of those that loops and choices read in which there
    are kernels."""
    eqns = plan.converted.jaxpr.eqns
    loops = [eqn for eqn in eqns if any(True for body in bodies(eqn) for _ in fused_calls(body))]
    return _read_by_kernels(plan, [a for eqn in loops for a in eqn.invars if isinstance(a, Var)])


def _read_by_kernels(plan: Plan, others: Iterable[Var] = ()) -> frozenset[int]:
    """Returns the numbers of the arguments that kernels read, as they are or in another layout.

    others: variables that count as read, too.
    """
    with IMPORTS:  # most programs have no loop
        from pallasfuse.jaxpr_frontend.conversion import is_layout
    jaxpr, variable = plan.converted.jaxpr, plan.converted.variable
    read = {variable[name] for kernel in plan.kernels for name in kernel.reads if name in variable}.union(others)
    for eqn in reversed(jaxpr.eqns):
        if is_layout(eqn) and not read.isdisjoint(eqn.outvars):
            read.update(a for a in eqn.invars if isinstance(a, Var))
    return frozenset(n for n, v in enumerate(jaxpr.invars) if v in read)


def best_form[Call](
    forms: Sequence[BodyForm], planned: Callable[[BodyForm], tuple[Call, Plan]]
) -> tuple[BodyForm, tuple[Call, Plan]] | None:
    """Returns the form of a body whose kernels save most, with its plan, and what runs it; None where no form has a kernel.

    forms: the last one gets slices. Without prices the first one in which a kernel takes a slice by itself is the best.
    """
    best: tuple[BodyForm, tuple[Call, Plan]] | None = None
    for form in forms:
        call, plan = planned(form)
        if not plan.fuses or (form.by_number and not any(k.takes_slices for k in plan.kernels)):
            continue
        if plan.options.price and not _pays(form, plan):
            continue
        if best is None or (plan.options.price and _saved_us(plan) >= _saved_us(best[1][1])):
            best = form, (call, plan)
    return best


def _pays(form: BodyForm, plan: Plan) -> bool:
    """Do the kernels of a body save more in all trips than it takes to compute once what is stored for them alone?

    It is not asked on a CPU, where XLA moves such values out of loops and stores them, too; nor where nobody knows the number of
    trips, nor for kernels in loops inside of the body.
    """
    if form.trips is None or not plan.kernels or plan.target.platform == "cpu":
        return True
    stored = form.stored(_read_by_kernels(plan))
    if stored is None:
        return True
    with IMPORTS:
        from pallasfuse.jaxpr_frontend import convert
        from pallasfuse.price.xla import price_xla
    try:
        stored_us = price_xla(convert(stored).program, plan.target.device).us
    except Exception as error:  # never a crash: without a price the loop is XLA's
        warnings.warn(f"what a loop stores for kernels has no price ({type(error).__name__}: {error}): a bug in pallasfuse, please "
                      "report it", stacklevel=2)  # fmt: skip
        return False
    return form.trips * _saved_us(plan) > stored_us


def _saved_us(plan: Plan) -> float:
    """The microseconds of a trip that kernels save, less what is stored for them where the body begins and ends."""
    return sum(k.replaced.us - k.price.us for k in plan.kernels) - sum(p.us for p in plan.at_boundary.values())


def with_fused_bodies(jaxpr: Jaxpr, fused: FusedBody, exclude: Sequence[str] = ()) -> Jaxpr:
    """Returns the jaxpr with the bodies of its loops and branches fused; itself where nothing in them is.

    Whatever cannot be rebuilt stays as it is, and what the user leaves to XLA. exclude: as of `FuseOptions`.
    """
    if not _has_bodies(jaxpr):  # to make a long program flat takes as long as the rest of a plan that was kept
        return jaxpr
    flat = flatten(jaxpr)
    constvars, consts, eqns = list(flat.constvars), list(flat.consts), list[JaxprEqn]()
    for eqn in flat.eqns:
        rebuilt = None if left_by_user(eqn, exclude) else _rebuilt(eqn, _in_scopes_of(eqn, fused) if exclude else fused)
        if rebuilt is None:
            eqns.append(eqn)
            continue
        names: dict[Any, Any] = dict(zip(rebuilt.invars, eqn.invars, strict=True))
        names |= dict(zip(rebuilt.outvars, eqn.outvars, strict=True))
        constvars += rebuilt.constvars
        consts += rebuilt.consts
        for inner in rebuilt.eqns:
            invars = [a if isinstance(a, Literal) else names.get(a, a) for a in inner.invars]
            outvars = [names.get(v, v) for v in inner.outvars]
            source, _ = _compat.inside_scopes(eqn.source_info, inner, eqn.source_info.name_stack)
            eqns.append(inner.replace(invars=invars, outvars=outvars, source_info=source, ctx=eqn.ctx))
    if len(eqns) == len(flat.eqns) and all(new is old for new, old in zip(eqns, flat.eqns, strict=True)):
        return jaxpr
    return _compat.replace_jaxpr(flat, constvars, consts, eqns, flat.outvars)


def _in_scopes_of(eqn: JaxprEqn, fused: FusedBody) -> FusedBody:
    """As `fused`, of bodies whose equations say in which scopes the loop is: JAX begins anew in each body."""

    def inside(forms: Sequence[BodyForm], what: str) -> UsedForm | None:
        here = [replace(form, jaxpr=_compat.within_scopes_of(form.jaxpr, eqn)) for form in forms]
        found = fused(here, what)
        return None if found is None else replace(found, form=forms[here.index(found.form)])

    return inside


def _rebuilt(eqn: JaxprEqn, fused: FusedBody) -> Jaxpr | None:
    """A loop or a choice with fused bodies, of its operands; None where nothing is fused, or it cannot be rebuilt."""
    build = _BUILDERS.get(eqn.primitive.name)
    if build is None or eqn.effects:
        return None
    run = build(eqn, fused)
    if run is None:
        return None
    try:
        traced = jax.make_jaxpr(run)(*(_compat.struct_of(a) for a in eqn.invars))
    except Exception:  # a type that only JAX itself can give: the loop stays as it is
        return None
    made = {v for e in traced.eqns for v in e.outvars}
    same_types = [_type(v) for v in traced.outvars] == [_type(v) for v in eqn.outvars]
    distinct = len(set(traced.outvars)) == len(traced.outvars) and made.issuperset(traced.outvars)
    return traced if same_types and distinct else None


def _type(atom: Any) -> tuple[tuple[int, ...], Any]:
    return _compat.shape_of(atom), _compat.dtype_of(atom)


@dataclass(frozen=True, slots=True)
class _Inside:
    """The part of a body that runs in every trip, and what computes the values that are the same in all of them."""

    form: BodyForm
    before: Callable[[Sequence[Any], frozenset[int]], Callable[[], list[Any]]]
    """Computes values before the loop, and returns a function that gives the first arguments of that part in each trip.

    The arguments are those of the body that are the same in every trip, and the numbers of the first arguments that are computed
    before the loop; that function computes the others.
    """


def _inside(
    jaxpr: Jaxpr, fixed: Sequence[bool], carried: int, *, by_number: bool = False, trips: int | None = None
) -> _Inside:  # fmt: skip
    """Splits a body into what is the same in every trip of its loop, and the rest.

    fixed: which arguments are the same in every trip; they are the first ones. carried: the number of values that go from one trip
    to the next. The arguments after these are elements of arrays; by_number: the last one is the number of the trip.
    """
    parts = split(jaxpr, fixed)
    inside = jaxpr if parts is None else parts.inside
    first = sum(fixed) + len(inside.invars) - len(fixed)  # what is handed over comes before all others
    boundary = Boundary(
        sliced=tuple(range(first + carried, len(inside.invars) - by_number)),
        carried=tuple((first + n, n) for n in range(carried)),
        stacked=tuple(range(carried, len(inside.outvars))),
    )

    def before(values: Sequence[Any], read: frozenset[int]) -> Callable[[], list[Any]]:
        if parts is None:
            return lambda: list(values)
        known = known_before(parts, jaxpr, [*values, *[None] * (len(fixed) - len(values))])
        early = [v for n, v in enumerate(parts.passed) if n in read]
        known |= computed(parts, early, known)
        return lambda: [*computed(parts, parts.passed, known).values(), *values]

    def stored(read: Collection[int]) -> Jaxpr | None:
        return None if parts is None else stored_for(parts, jaxpr, read)

    return _Inside(BodyForm(inside, boundary, by_number, trips, stored, hoists=parts is not None), before)


def _scan(eqn: JaxprEqn, fused: FusedBody) -> Run | None:
    counts, body = _compat.scan_counts(eqn), eqn.params["jaxpr"]
    if counts is None or not _worth_it(body):
        return None
    constants, carried = counts
    whole = _arrays_by_number(eqn, constants + carried)
    with_rows = _with_rows_by_number(body)
    numbered = _by_number(eqn, constants, whole, with_rows) if whole or with_rows is not body else None
    length = eqn.params["length"]
    trips = length if isinstance(length, int) else None
    ways = [_inside(body, [n < constants for n in range(len(eqn.invars))], carried, trips=trips)]
    if numbered is not None:
        fixed = [n < constants + len(whole) for n in range(len(numbered.invars))]
        ways.insert(0, _inside(numbered, fixed, carried, by_number=True, trips=trips))
    found = fused([way.form for way in ways], f"body of {_place(eqn)}")
    if found is None:
        return None
    (before,) = (way.before for way in ways if way.form is found.form)
    by_number = found.form.by_number
    taken = whole if by_number else ()

    def run(*operands: Any) -> list[Any]:
        given, init, rest = (
            operands[:constants],
            operands[constants:][:carried],
            range(constants + carried, len(operands)),
        )
        known = before([*given, *(operands[n] for n in taken)], found.read)
        xs = [operands[n] for n in rest if n not in taken]

        def trip(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            values, number = carry[:carried], carry[carried:]
            results = found.run(*known(), *values, *x, *number)
            return [*results[:carried], *(n + 1 for n in number)], results[carried:]

        how = {name: eqn.params[name] for name in ("reverse", "unroll", *(() if xs else ("length",)))}
        last, ys = jax.lax.scan(trip, [*init, *([jax.numpy.int32(0)] if by_number else [])], xs, **how)
        return [*last[:carried], *ys]

    return run


def _arrays_by_number(eqn: JaxprEqn, first: int) -> tuple[int, ...]:
    """The operands of a scan, from the first of those it runs over, whose elements are arrays that a kernel may read.

    There are none where several trips are written out, or the last one comes first: XLA counts trips as they come, and would find
    the number of the element by a kernel of its own.
    """
    if int(eqn.params["unroll"]) != 1 or eqn.params["reverse"]:
        return ()
    shapes = {n: _compat.shape_of(eqn.invars[n]) for n in range(first, len(eqn.invars))}
    if not all(isinstance(d, int) for shape in shapes.values() for d in shape):
        return ()
    shapes = {n: shape for n, shape in shapes.items() if math.prod(shape) <= LARGEST}
    return tuple(
        n for n, shape in shapes.items() if len(shape) > 1 and str(_compat.dtype_of(eqn.invars[n])) in dtypes.SUPPORTED
    )


def _with_rows_by_number(body: Jaxpr) -> Jaxpr:
    """Returns a flat body in which elements of arrays of arrays that are cut out by a number are gathers of one row instead, which
    kernels can do by themselves. The body itself where none is cut out, or JAX does not trace it again.

    So a loop takes the weights of its layers by its counter, if it is no scan over them. A number beyond the array means the
    nearest row to both operations. Rows of numbers are small: XLA cuts them out.
    """

    def is_row(eqn: JaxprEqn) -> bool:
        shape = _compat.shape_of(eqn.invars[0]) if eqn.primitive.name == "dynamic_slice" else ()
        return (
            len(shape) > 2
            and isinstance(eqn.invars[0], Var)
            and tuple(eqn.params["slice_sizes"]) == (1, *shape[1:])
            and math.prod(shape) <= LARGEST
            and str(_compat.dtype_of(eqn.invars[0])) in dtypes.SUPPORTED
        )

    try:
        flat = flatten(body)
        writer, changed = Writer(flat), False
        for eqn in flat.eqns:
            if is_row(eqn):
                changed = True
                writer.instead(eqn, lambda array, number, *_: [element_by_number(array, number, mode="clip")[None]])
            else:
                writer.keep(eqn)
        return writer.written() if changed else body
    except Exception:  # a type that only JAX itself can give: the rows stay slices
        return body


def _by_number(eqn: JaxprEqn, constants: int, whole: Sequence[int], body: Jaxpr) -> Jaxpr | None:
    """A body of a scan as a function of its constants, the whole arrays, all other arguments, and the number of the trip; None
    where JAX does not trace it again. body: of the same arguments as the scan's own."""
    others = [n for n in range(constants, len(eqn.invars)) if n not in whole]

    def function(*arguments: Any) -> list[Any]:
        *known, number = arguments
        given = dict(zip(order, known, strict=True))
        given |= {n: element_by_number(given[n], number) for n in whole}
        return _compat.eval_jaxpr(body, body.consts, *(given[n] for n in range(len(eqn.invars))))

    order = [*range(constants), *whole, *others]
    names = _compat.argument_names(body)
    if len(names) == len(body.invars):  # that of each argument, without what JAX puts around keys
        parameters = [f"{re.sub(r'\W+', '_', names[n]).strip('_')}_{n}" for n in order]
        asked = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in (*parameters, "trip")]
        function.__signature__ = Signature(asked)  # type: ignore[attr-defined]
    structs = {n: _compat.struct_of(eqn.invars[n] if n in whole else body.invars[n]) for n in order}
    try:
        traced: Jaxpr = jax.make_jaxpr(function)(*structs.values(), jax.ShapeDtypeStruct((), "int32"))
    except Exception:  # a type that only JAX itself can give: the body has its first form alone
        return None
    return traced


def _while(eqn: JaxprEqn, fused: FusedBody) -> Run | None:
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    of_condition, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    if not _worth_it(body):
        return None
    way = _inside(body, [n < of_body for n in range(len(body.invars))], len(body.invars) - of_body)
    found = fused([way.form], f"body of {_place(eqn)}")
    if found is None:
        return None

    def run(*operands: Any) -> list[Any]:
        asked, given, init = (
            operands[:of_condition],
            operands[of_condition:][:of_body],
            operands[of_condition + of_body :],
        )
        known = way.before(given, found.read)

        def goes_on(carry: Iterable[Any]) -> Any:
            return _compat.eval_jaxpr(condition, condition.consts, *asked, *carry)[0]

        return list(jax.lax.while_loop(goes_on, lambda carry: found.run(*known(), *carry), list(init)))

    return run


def _cond(eqn: JaxprEqn, fused: FusedBody) -> Run | None:
    numbered = enumerate(eqn.params["branches"], 1)
    branches = [
        (b, fused([BodyForm(b, NO_LOOP)], f"branch {n} of {_place(eqn)}") if _worth_it(b) else None)
        for n, b in numbered
    ]
    if all(found is None for _, found in branches):
        return None

    def one(branch: Jaxpr, found: UsedForm | None) -> Run:
        return found.run if found else lambda *operands: _compat.eval_jaxpr(branch, branch.consts, *operands)

    chosen = [one(*b) for b in branches]
    return lambda index, *operands: list(jax.lax.switch(index, chosen, *operands))


_BUILDERS: dict[str, Callable[[JaxprEqn, FusedBody], Run | None]] = {"scan": _scan, "while": _while, "cond": _cond}


def _has_bodies(jaxpr: Jaxpr) -> bool:
    """Is there a loop or a choice in a jaxpr, or in what it calls?"""
    seen = set[int]()  # equal layers call one function

    def within(part: Jaxpr) -> bool:
        if id(part) in seen:
            return False
        seen.add(id(part))
        return any(eqn.primitive.name in _BUILDERS or any(map(within, called(eqn))) for eqn in part.eqns)

    return within(jaxpr)


def _place(eqn: JaxprEqn) -> str:
    return f"{eqn.primitive.name} at {_compat.source_summary(eqn)}"


_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "dot_general",
                         "argmax", "argmin"})  # fmt: skip


def _worth_it(body: Jaxpr) -> bool:
    """May there be something to fuse in a body? A kernel holds reductions that depend on each other, or loops of such bodies."""
    return not body.effects and _reductions(body) > 1


def _reductions(jaxpr: Jaxpr) -> int:
    here = sum(eqn.primitive.name in _REDUCTIONS for eqn in jaxpr.eqns)
    return here + sum(_reductions(inner) for eqn in jaxpr.eqns for inner in bodies(eqn))
