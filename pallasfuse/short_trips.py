"""Loops of which a trip computes nothing that can be computed before all trips: from constants alone, or as a part of a slice."""

from collections.abc import Callable
from typing import Any

from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn
from pallasfuse.decompositions.products import with_parts_of_products
from pallasfuse.jaxpr_frontend import flatten
from pallasfuse.loop_invariants import computed_outside, split

type Run = Callable[..., list[Any]]


def with_short_trips(eqn: JaxprEqn) -> Run | None:
    """Returns what computes a scan as a loop of shorter trips, after what they need.

    None: nobody knows which of its operands change from trip to trip.
    """
    counts = _compat.scan_counts(eqn)
    if counts is None:
        return None
    constants, carried = counts
    body = flatten(eqn.params["jaxpr"])
    body = with_parts_of_products(body, body.invars[:constants])
    rows: list[Any] = body.invars[constants + carried :]
    taken_apart = [e for e in body.eqns if e.primitive.name in ("slice", "split") and e.invars[0] in rows]
    parts_of_rows = [(e, rows.index(e.invars[0])) for e in taken_apart]
    made = [v for e in taken_apart for v in e.outvars]
    left = [e for e in body.eqns if not any(e is p for p in taken_apart)]
    body = _compat.with_arguments(_compat.replace_jaxpr(body, body.constvars, body.consts, left, body.outvars), made)
    fixed = [0 <= n - len(made) < constants for n in range(len(body.invars))]
    parts = split(body, fixed)
    inside = body if parts is None else parts.inside

    def run(*args: Any) -> list[Any]:
        given, init, xs = args[:constants], args[constants : constants + carried], args[constants + carried :]
        taken = [x for e, number in parts_of_rows for x in _of_all_rows(e, xs[number])]
        known = iter(given)
        handed = [] if parts is None else computed_outside(parts, body, [next(known) if f else None for f in fixed])

        def trip(states: list[Any], row: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            results = _compat.eval_jaxpr(inside, inside.consts, *handed, *row[0], *given, *states, *row[1])
            return results[:carried], results[carried:]

        how = {name: eqn.params[name] for name in ("length", "reverse")}
        last, slices = lax.scan(trip, list(init), (taken, list(xs)), **how)
        return [*last, *slices]

    return run


def _of_all_rows(eqn: JaxprEqn, rows: Any) -> list[Any]:
    """The results of a slice or a split, which is of one row, for all rows."""
    params = eqn.params
    if eqn.primitive.name == "split":
        return list(lax.split(rows, params["sizes"], axis=params["axis"] + 1))
    strides = None if params["strides"] is None else (1, *params["strides"])
    return [lax.slice(rows, (0, *params["start_indices"]), (rows.shape[0], *params["limit_indices"]), strides)]
