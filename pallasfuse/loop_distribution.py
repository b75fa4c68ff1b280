"""Loop distribution: what need not be in a loop is computed before it.

That is what constants alone give, parts of slices, and what needs nothing of the trip before and no kernel computes. So a loop that
becomes one kernel (`recurrences`) has short trips of operations that a kernel has.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Var
from pallasfuse.decompositions import computed_places
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
_LITTLE_BYTES = 64 << 20
"""Nobody minds so much more memory; beyond, what is computed before a loop takes no more than the loop has in memory anyway."""
_DECIDE = frozenset({"argmax", "argmin", "ceil", "eq", "floor", "ge", "gt", "le", "lt", "ne", "rem", "round", "sign"})
_CONVERT = frozenset({"bitcast_convert_type", "convert_element_type"})
"""Operations whose results jump where floats differ by a rounding, and those of which that is true if they make no floats."""


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
    before = _before_all_trips(body, constants, carried, eqn.params["length"])
    if before is None:
        return None
    differing = _following(body, body.invars[constants + carried :])
    once, rows = ([v for e in before for v in e.outvars if (v in differing) == of_rows] for of_rows in (False, True))
    of_once = flatten(_compat.replace_jaxpr(body, body.constvars, body.consts, body.eqns, once))
    of_rows = flatten(_without(body, [e for e in before if differing.isdisjoint(e.outvars)], once, rows))
    body = _without(body, before, [*once, *rows], body.outvars)
    fixed = [n < len(once) or 0 <= n - len(once) - len(rows) < constants for n in range(len(body.invars))]
    parts = split(body, fixed)
    inside = body if parts is None else parts.inside

    def run(*args: Any) -> list[Any]:
        given, init, xs = _compat.scan_parts(args, counts)
        carry = [None] * carried  # of which this reads nothing
        own = _compat.eval_jaxpr(of_once, of_once.consts, *given, *carry, *([None] * len(xs))) if once else []
        taken = (
            jax.vmap(lambda *row: _compat.eval_jaxpr(of_rows, of_rows.consts, *own, *given, *carry, *row))(*xs)
            if rows
            else []
        )
        known = iter([*own, *given])
        handed = [] if parts is None else computed_outside(parts, body, [next(known) if f else None for f in fixed])

        def trip(states: list[Any], row: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            results = _compat.eval_jaxpr(inside, inside.consts, *handed, *own, *row[0], *given, *states, *row[1])
            return results[:carried], results[carried:]

        how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        last, slices = lax.scan(trip, list(init), (list(taken), list(xs)), **how)
        return [*last, *slices]

    return run


def _following(body: Jaxpr, roots: Iterable[Var]) -> set[Var]:
    """Returns the variables of a flat jaxpr that depend on others, with these."""
    found = set(roots)
    for eqn in body.eqns:
        if any(isinstance(a, Var) and a in found for a in eqn.invars):
            found.update(eqn.outvars)
    return found


def _without(body: Jaxpr, eqns: Collection[JaxprEqn], given: Sequence[Var], results: Sequence[Any]) -> Jaxpr:
    """Returns a flat jaxpr with other results and without some equations, of which it is given results as its first arguments."""
    left = [e for e in body.eqns if not any(e is other for other in eqns)]
    made = _compat.replace_jaxpr(body, body.constvars, body.consts, left, [*results])
    return flatten(_compat.with_arguments(made, [*given]))


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
    _, carried = counts

    def run(*args: Any) -> list[Any]:
        given, states, xs = _compat.scan_parts(args, counts)
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

    Parts of slices are taken before all trips, and whatever no kernel can compute; the rest costs a trip little. But on what they
    decide trips decide alike (`_decided_on`); None where that would take too much memory.
    """
    with IMPORTS:
        from pallasfuse.jaxpr_frontend.conversion import may_have_nest

    changing = set(body.invars[constants : constants + carried])
    rows = set(body.invars[constants + carried :])
    direct = frozenset(rows)
    allowed = _MOST_STACKED * length * sum(map(bytes_of, (*body.invars[constants:], *body.outvars)))
    in_memory = sum(map(bytes_of, body.invars[: constants + carried]))
    in_memory += length * sum(map(bytes_of, (*body.invars[constants + carried :], *body.outvars[carried:])))
    allowed = min(allowed, max(_LITTLE_BYTES, in_memory))
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
        is_other = eqn.primitive.name in computed_places.RULES or not (may_have_nest(eqn) or is_selection(eqn))
        if is_part or (is_other and _may_run_for_all(eqn)):
            needed = 0.0 if is_part else length * sum(map(bytes_of, eqn.outvars))
            if needed <= allowed:
                allowed -= needed
                found.append(eqn)
            else:  # nor is what reads it computed before: it would be in memory for all trips
                rows.difference_update(eqn.outvars)
                changing.update(eqn.outvars)
    decided_on = _decided_on(body, found)
    needed = sum((length if not rows.isdisjoint(e.outvars) else 1) * bytes_of(v) for e in decided_on for v in e.outvars)
    return [*found, *decided_on] if needed <= allowed else None


def _decided_on(body: Jaxpr, before: list[JaxprEqn]) -> list[JaxprEqn]:
    """Returns the equations of a flat body that make floats on which something is decided before all trips, and which trips need.

    Computed twice, in other kernels, a float next to a whole number may be below it once and not below it once: then a position
    and the distance from it would not belong together.
    """
    needed_before = {a for e in before for a in e.invars if isinstance(a, Var)}
    decided = {v for e in body.eqns if _decides(e) for v in e.outvars}
    given = {id(e) for e in before}
    needed = {a for a in body.outvars if isinstance(a, Var)}
    floats, found = set[Var](), []
    for eqn in reversed(body.eqns):
        reads = {a for a in eqn.invars if isinstance(a, Var)}
        is_before = not needed_before.isdisjoint(eqn.outvars)
        if is_before:
            needed_before |= reads
            if _decides(eqn):
                floats |= {a for a in reads - decided if jnp.issubdtype(_compat.dtype_of(a), jnp.floating)}
        if id(eqn) in given or needed.isdisjoint(eqn.outvars):
            continue
        if is_before and not floats.isdisjoint(eqn.outvars):
            found.append(eqn)
        else:
            needed |= reads
    return found


def _decides(eqn: JaxprEqn) -> bool:
    """Do the results of an operation jump where floats differ by a rounding?"""
    of_floats = any(jnp.issubdtype(_compat.dtype_of(a), jnp.floating) for a in eqn.invars)
    to_others = not jnp.issubdtype(_compat.dtype_of(eqn.outvars[0]), jnp.floating)
    return of_floats and (eqn.primitive.name in _DECIDE or (eqn.primitive.name in _CONVERT and to_others))
