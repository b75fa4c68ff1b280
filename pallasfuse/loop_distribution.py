"""Loop distribution: what need not be in a loop is computed before it.

That is what constants alone give, parts of slices, and what needs nothing of the trip before and no kernel computes. So a loop that
becomes one kernel (`recurrences`) has short trips of operations that a kernel has.
"""

from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Var
from pallasfuse.decompositions.products import with_parts_of_products
from pallasfuse.decompositions.selections import is_selection
from pallasfuse.decompositions.writing import Run, Writer
from pallasfuse.first_time import IMPORTS
from pallasfuse.jaxpr_frontend import called, flatten
from pallasfuse.loop_invariants import bytes_of, computed_outside, split

_MOST_WRITTEN_OUT = 192
"""The largest number of equations that a loop inside of a trip may have in all its trips together, to be written out."""
_MOST_STACKED = 4.0
"""The largest ratio of the bytes that are computed before a loop to those that its trips get and hand on anyway."""
_DECIDE = frozenset({"argmax", "argmin", "ceil", "eq", "floor", "ge", "gt", "le", "lt", "ne", "rem", "round", "sign"})
"""Operations whose results jump where floats differ by a rounding; a conversion to integers is another one."""


def distributed(eqn: JaxprEqn) -> Run | None:
    """Returns what computes a scan as a loop with less in its trips, after what can be computed before it.

    None: nobody knows which of its operands change from trip to trip, or what both need would take too much memory.
    """
    counts = _compat.scan_counts(eqn)
    if counts is None:
        return None
    constants, carried = counts
    body = _with_inner_loops_written_out(flatten(eqn.params["jaxpr"]))
    body = with_parts_of_products(body, body.invars[:constants])
    found = _before_all_trips(body, constants, carried, eqn.params["length"])
    if found is None:
        return None
    before = found
    made = [v for e in before for v in e.outvars]
    of_rows = flatten(_compat.replace_jaxpr(body, body.constvars, body.consts, body.eqns, made))
    left = [e for e in body.eqns if not any(e is b for b in before)]
    body = _compat.with_arguments(_compat.replace_jaxpr(body, body.constvars, body.consts, left, body.outvars), made)
    fixed = [0 <= n - len(made) < constants for n in range(len(body.invars))]
    parts = split(body, fixed)
    inside = body if parts is None else parts.inside

    def run(*args: Any) -> list[Any]:
        given, init, xs = args[:constants], args[constants : constants + carried], args[constants + carried :]
        carry = [None] * carried  # of which this reads nothing
        taken = (
            jax.vmap(lambda *row: _compat.eval_jaxpr(of_rows, of_rows.consts, *given, *carry, *row))(*xs)
            if made
            else []
        )
        known = iter(given)
        handed = [] if parts is None else computed_outside(parts, body, [next(known) if f else None for f in fixed])

        def trip(states: list[Any], row: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            results = _compat.eval_jaxpr(inside, inside.consts, *handed, *row[0], *given, *states, *row[1])
            return results[:carried], results[carried:]

        how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        last, slices = lax.scan(trip, list(init), (list(taken), list(xs)), **how)
        return [*last, *slices]

    return run


def _may_run_for_all(eqn: JaxprEqn) -> bool:
    """Does an operation compute the same for all trips together?

    Under `vmap` a choice would run all of its branches, and a loop, or a call of the user's, might not end.
    """
    return not eqn.effects and not any(True for _ in called(eqn)) and "call" not in eqn.primitive.name


def _with_inner_loops_written_out(body: Jaxpr) -> Jaxpr:
    """Returns a flat body in which scans of a few short trips, as the steps of a solver are, stand trip by trip."""
    writer, changed = Writer(body), False
    for eqn in body.eqns:
        length = eqn.params.get("length") if eqn.primitive.name == "scan" else None
        short = isinstance(length, int) and length * len(flatten(eqn.params["jaxpr"]).eqns) <= _MOST_WRITTEN_OUT
        run = _trip_by_trip(eqn) if short and not eqn.effects else None
        if run is None:
            writer.keep(eqn)
            continue
        changed = True
        writer.instead(eqn, run)
    return _with_inner_loops_written_out(flatten(writer.written())) if changed else body


def _trip_by_trip(eqn: JaxprEqn) -> Run | None:
    """Returns what computes a scan without a loop; None where nobody knows which of its operands change."""
    counts, body, length = _compat.scan_counts(eqn), eqn.params["jaxpr"], eqn.params["length"]
    if counts is None:
        return None
    constants, carried = counts

    def run(*args: Any) -> list[Any]:
        given, states, xs = args[:constants], args[constants : constants + carried], args[constants + carried :]
        slices = dict[int, Any]()
        for n in reversed(range(length)) if eqn.params["reverse"] else range(length):
            row = [lax.index_in_dim(x, n, keepdims=False) for x in xs]
            results = _compat.eval_jaxpr(body, body.consts, *given, *states, *row)
            states, slices[n] = tuple(results[:carried]), results[carried:]
        stacked = [jnp.stack([slices[n][k] for n in range(length)]) for k in range(len(eqn.outvars) - carried)]
        return [*states, *stacked]

    return run


def _before_all_trips(body: Jaxpr, constants: int, carried: int, length: int) -> list[JaxprEqn] | None:
    """Returns the equations of a flat body that are computed for all trips at once: they need nothing of the trip before.

    Parts of slices are taken before all trips, and whatever no kernel can compute; the rest costs a trip little. But what is
    decided for them (`_decisions`) trips do not decide again; None where that would take too much memory.
    """
    with IMPORTS:
        from pallasfuse.jaxpr_frontend.conversion import may_have_nest

    changing = set(body.invars[constants : constants + carried])
    rows = set(body.invars[constants + carried :])
    direct = frozenset(rows)
    allowed = _MOST_STACKED * length * sum(map(bytes_of, (*body.invars[constants:], *body.outvars)))
    found = []
    for eqn in body.eqns:
        reads = {a for a in eqn.invars if isinstance(a, Var)}
        if not reads.isdisjoint(changing):
            changing.update(eqn.outvars)
            continue
        if reads.isdisjoint(rows):
            continue
        rows.update(eqn.outvars)
        is_part = eqn.primitive.name in ("slice", "split") and not reads.isdisjoint(direct)
        is_other = eqn.primitive.name == "gather" or not (may_have_nest(eqn) or is_selection(eqn))
        if is_part or (is_other and _may_run_for_all(eqn)):
            needed = 0.0 if is_part else length * sum(map(bytes_of, eqn.outvars))
            if needed <= allowed:
                allowed -= needed
                found.append(eqn)
    decisions = _decisions(body, found, rows)
    fit = length * sum(bytes_of(v) for e in decisions for v in e.outvars) <= allowed
    return [*found, *decisions] if fit else None


def _decisions(body: Jaxpr, before: list[JaxprEqn], rows: set[Var]) -> list[JaxprEqn]:
    """Returns the decisions of a flat body that its trips need, and so does what is computed before them all.

    Computed twice, in other kernels, a float next to a whole number may be rounded down once, and up once: then a position and the
    distance from it would not belong together. rows: the variables that differ from trip to trip and need none before.
    """
    needed_before = {a for e in before for a in e.invars if isinstance(a, Var)}
    given = {id(e) for e in before}
    needed = {a for a in body.outvars if isinstance(a, Var)}
    found = []
    for eqn in reversed(body.eqns):
        reads = {a for a in eqn.invars if isinstance(a, Var)}
        is_before = not needed_before.isdisjoint(eqn.outvars)
        if is_before:
            needed_before |= reads
        if id(eqn) in given or needed.isdisjoint(eqn.outvars):
            continue
        if is_before and _decides(eqn) and not rows.isdisjoint(eqn.outvars):
            found.append(eqn)
        else:
            needed |= reads
    return found


def _decides(eqn: JaxprEqn) -> bool:
    """Do the results of an operation jump where floats differ by a rounding?"""
    of_floats = any(jnp.issubdtype(_compat.dtype_of(a), jnp.floating) for a in eqn.invars)
    whole = eqn.primitive.name == "convert_element_type" and not jnp.issubdtype(
        _compat.dtype_of(eqn.outvars[0]), jnp.floating
    )
    return of_floats and (whole or eqn.primitive.name in _DECIDE)
