"""Loops of which a trip computes less: what constants alone give, parts of slices, and what no kernel can compute, come before all
trips."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Var
from pallasfuse.decompositions.products import with_parts_of_products
from pallasfuse.decompositions.selections import is_selection
from pallasfuse.first_time import IMPORTS
from pallasfuse.jaxpr_frontend import flatten
from pallasfuse.loop_invariants import bytes_of, computed_outside, split

type Run = Callable[..., list[Any]]

_MOST_STACKED = 4.0
"""Of the bytes that trips get and hand on, as many times more may be computed before all of them."""


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
    before = _before_all_trips(body, constants, carried, eqn.params["length"])
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

        how = {name: eqn.params[name] for name in ("length", "reverse")}
        last, slices = lax.scan(trip, list(init), (list(taken), list(xs)), **how)
        return [*last, *slices]

    return run


def _before_all_trips(body: Jaxpr, constants: int, carried: int, length: int) -> list[JaxprEqn]:
    """The equations of a flat body that are computed for all trips at once: they need nothing of the trip before.

    Parts of slices are taken before all trips, and whatever no kernel can compute; the rest costs a trip little.
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
        if is_part or (
            not eqn.effects and (eqn.primitive.name == "gather" or not (may_have_nest(eqn) or is_selection(eqn)))
        ):
            allowed -= 0.0 if is_part else length * sum(map(bytes_of, eqn.outvars))
            if allowed >= 0:
                found.append(eqn)
    return found
