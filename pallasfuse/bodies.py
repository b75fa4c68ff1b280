"""Bodies of loops and branches are programs of their own: each is planned once, and runs as a fused call inside its loop.

What does not change in a loop is computed before it, as `loop_invariants` does for a fused call that the user has put there.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal
from pallasfuse.ir.boundary import NO_LOOP, Boundary
from pallasfuse.jaxpr_frontend import bodies, called, flatten, left_by_user
from pallasfuse.loop_invariants import computed_outside, split

type Run = Callable[..., list[Any]]
type FusedBody = Callable[[Jaxpr, str, Boundary], Run | None]
"""Returns what runs a body instead of its own equations, from its jaxpr, words that say which it is, and how values enter and leave
it; None where nothing of it is fused."""


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
    return lambda body, what, boundary: fused(_compat.within_scopes_of(body, eqn), what, boundary)


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


def _inside(
    jaxpr: Jaxpr, fixed: Sequence[bool], fused: FusedBody, what: str, carried: int
) -> tuple[Run, Callable[[Sequence[Any]], list[Any]]] | None:
    """Splits off what does not change in a loop.

    Returns what runs the rest of its body, and what computes the first arguments of that from those that do not change; None where
    nothing is fused. carried: how many values go from one trip to the next; arguments after these are elements of arrays.
    """
    parts = split(jaxpr, fixed)
    inside = jaxpr if parts is None else parts.inside
    first = sum(fixed) + len(inside.invars) - len(fixed)  # what is handed over comes before all others
    boundary = Boundary(
        sliced=tuple(range(first + carried, len(inside.invars))),
        carried=tuple((first + n, n) for n in range(carried)),
        stacked=tuple(range(carried, len(inside.outvars))),
    )
    run = fused(inside, what, boundary)
    if run is None:
        return None

    def before(values: Sequence[Any]) -> list[Any]:
        changing = [None] * (len(fixed) - len(values))
        handed = [] if parts is None else computed_outside(parts, jaxpr, [*values, *changing])
        return [*handed, *values]

    return run, before


def _scan(eqn: JaxprEqn, fused: FusedBody) -> Run | None:
    counts, body = _compat.scan_counts(eqn), eqn.params["jaxpr"]
    if counts is None or not _worth_it(body):
        return None
    constants, carried = counts
    found = _inside(body, [n < constants for n in range(len(eqn.invars))], fused, f"body of {_place(eqn)}", carried)
    if found is None:
        return None
    inner, before = found
    sliced = len(eqn.invars) > constants + carried
    how = {name: eqn.params[name] for name in ("reverse", "unroll", *(() if sliced else ("length",)))}

    def run(*operands: Any) -> list[Any]:
        given, init, xs = operands[:constants], operands[constants:][:carried], operands[constants + carried :]
        known = before(given)

        def trip(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            results = inner(*known, *carry, *x)
            return results[:carried], results[carried:]

        last, ys = jax.lax.scan(trip, list(init), list(xs), **how)
        return [*last, *ys]

    return run


def _while(eqn: JaxprEqn, fused: FusedBody) -> Run | None:
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    of_condition, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    if not _worth_it(body):
        return None
    fixed = [n < of_body for n in range(len(body.invars))]
    found = _inside(body, fixed, fused, f"body of {_place(eqn)}", len(body.invars) - of_body)
    if found is None:
        return None
    inner, before = found

    def run(*operands: Any) -> list[Any]:
        asked, given, init = (
            operands[:of_condition],
            operands[of_condition:][:of_body],
            operands[of_condition + of_body :],
        )
        known = before(given)

        def goes_on(carry: Iterable[Any]) -> Any:
            return _compat.eval_jaxpr(condition, condition.consts, *asked, *carry)[0]

        return list(jax.lax.while_loop(goes_on, lambda carry: inner(*known, *carry), list(init)))

    return run


def _cond(eqn: JaxprEqn, fused: FusedBody) -> Run | None:
    numbered = enumerate(eqn.params["branches"], 1)
    branches = [(b, fused(b, f"branch {n} of {_place(eqn)}", NO_LOOP) if _worth_it(b) else None) for n, b in numbered]
    if all(run is None for _, run in branches):
        return None

    def one(branch: Jaxpr, run: Run | None) -> Run:
        return run or (lambda *operands: _compat.eval_jaxpr(branch, branch.consts, *operands))

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
