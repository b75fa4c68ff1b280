"""Moves out of a loop what a fused call inside it would compute again in every trip, though none of it changes.

XLA moves operations out of a loop whose operands do not change, but not out of a kernel. So whatever depends only on what comes
from outside the loop stays plain JAX, as far as it pays: a value is handed to the kernel where it is no larger than what the kernel
would have to read to compute it, and reductions and products always are.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Var
from pallasfuse.first_time import IMPORTS
from pallasfuse.jaxpr_frontend import PLAIN_CALLS, flatten

_TAKING = frozenset({"gather", "dynamic_slice"})
"""Operations that take elements of an array, and are no maps."""


@dataclass(frozen=True, slots=True)
class Split:
    """A jaxpr in two parts: equations that are computed outside the loop, and a jaxpr that has their results as first arguments."""

    constvars: tuple[Var, ...]
    consts: tuple[Any, ...]
    outside: tuple[JaxprEqn, ...]
    passed: tuple[Var, ...]
    taken: frozenset[Var]
    """Those that are made by maps, or by taking elements, of what takes fewer bytes than they do: neighbours of each element of a
    small array. On a GPU XLA computes them in every trip, where it reads them, and stores none (four functions, compiled for an
    H100; on a CPU it moves two of them out of the loop)."""
    inside: Jaxpr


def split(jaxpr: Jaxpr, invariant: Sequence[bool]) -> Split | None:
    """Splits off what depends only on constants and on arguments that do not change. None: nothing does."""
    with IMPORTS:  # most programs have no loop around a fused call
        from pallasfuse.jaxpr_frontend.conversion import is_layout, is_map

    flat = flatten(jaxpr, PLAIN_CALLS)  # what has a derivative of its own keeps it
    constants = zip(flat.constvars, flat.consts, strict=True)
    cost: dict[Var, float] = {v: bytes_of(v) for v, c in constants if not isinstance(c, jax.core.Tracer)}
    cost |= {v: bytes_of(v) for v, fixed in zip(flat.invars, invariant, strict=True) if fixed}
    by_xla = dict(cost)
    """The bytes that XLA reads for a value where it computes it as it needs it."""
    made: dict[Var, JaxprEqn] = {}
    handed_over: set[Var] = set()
    for eqn in flat.eqns:
        reads = dict.fromkeys(a for a in eqn.invars if isinstance(a, Var))
        if eqn.effects or not all(v in cost for v in reads):
            continue
        again = sum(cost[v] for v in reads) if is_map(eqn) else math.inf
        taken = sum(by_xla[v] for v in reads) if is_map(eqn) or eqn.primitive.name in _TAKING else math.inf
        size = sum(bytes_of(v) for v in eqn.outvars)
        for v in eqn.outvars:
            made[v] = eqn
            cost[v], by_xla[v] = min(again, bytes_of(v)), min(taken, bytes_of(v))
        if reads and (size < again or (size == again and not is_layout(eqn))):
            handed_over.update(eqn.outvars)
    passed = _needed(flat, made, handed_over)
    if not passed:
        return None
    known = frozenset(passed)
    inside = [e for e in flat.eqns if known.isdisjoint(e.outvars)]
    outside = _made_by(passed, made, flat.eqns)
    whole = _compat.replace_jaxpr(flat, flat.constvars, flat.consts, inside, flat.outvars)
    return Split(
        tuple(flat.constvars),
        tuple(flat.consts),
        outside,
        tuple(passed),
        frozenset(v for v in passed if by_xla[v] < bytes_of(v)),
        flatten(_compat.with_arguments(whole, passed), PLAIN_CALLS),
    )


def outside_of_loop(jaxpr: Jaxpr, fixed: Sequence[bool], values: Sequence[Any]) -> tuple[Jaxpr, list[Any]]:
    """Computes what does not change in the loop around a jaxpr; returns the jaxpr of the rest, and its arguments.

    fixed: which arguments do not change.
    """
    parts = split(jaxpr, fixed)
    if parts is None:
        return jaxpr, list(values)
    return parts.inside, [*computed_outside(parts, jaxpr, values), *values]


def stored_for(parts: Split, jaxpr: Jaxpr, read: Collection[int]) -> Jaxpr | None:
    """Returns the part of a jaxpr that computes what is stored for kernels alone (`Split.taken`); None where nothing is.

    parts: of the jaxpr. read: the values that kernels read, by their numbers among those that are handed over."""
    wanted = [v for n, v in enumerate(parts.passed) if n in read and v in parts.taken]
    made = {v: eqn for eqn in parts.outside for v in eqn.outvars}
    eqns = list(_made_by(wanted, made, parts.outside))
    return _compat.replace_jaxpr(jaxpr, parts.constvars, parts.consts, eqns, wanted) if wanted else None


def computed_outside(parts: Split, jaxpr: Jaxpr, values: Sequence[Any]) -> list[Any]:
    """Computes what is handed over to the inside of a jaxpr that was split. values: its arguments; None for those that change."""
    return list(computed(parts, parts.passed, known_before(parts, jaxpr, values)).values())


def known_before(parts: Split, jaxpr: Jaxpr, values: Sequence[Any]) -> dict[Var, Any]:
    """Returns the constants and arguments of a jaxpr that was split, by its variables. values: as of `computed_outside`."""
    return dict(zip((*parts.constvars, *jaxpr.invars), (*parts.consts, *values), strict=True))


def computed(parts: Split, wanted: Iterable[Var], known: Mapping[Var, Any]) -> dict[Var, Any]:
    """Computes some of the values that are handed over, from others that are known."""
    wanted, found = tuple(wanted), dict(known)
    made = {v: eqn for eqn in parts.outside for v in eqn.outvars if v not in known}
    for eqn in _made_by(wanted, made, parts.outside):
        results = _compat.bind(eqn, [found[a] if isinstance(a, Var) else a.val for a in eqn.invars])
        found.update(zip(eqn.outvars, results, strict=True))
    return {v: found[v] for v in wanted}


def bytes_of(v: Any) -> float:
    """Returns the bytes of a variable or literal of a jaxpr; an axis of unknown length counts as one element."""
    shape: tuple[Any, ...] = getattr(v.aval, "shape", ())
    itemsize = getattr(getattr(v.aval, "dtype", None), "itemsize", 4)
    return float(itemsize) * math.prod(n if isinstance(n, int) else 1 for n in shape)


def _needed(jaxpr: Jaxpr, made: Mapping[Var, JaxprEqn], handed_over: set[Var]) -> list[Var]:
    """The values that are handed over: of those that can be, the ones that are results, or read by what stays inside."""
    found: dict[Var, None] = {}
    seen: set[Var] = set()
    stack = [a for e in jaxpr.eqns if not any(v in made for v in e.outvars) for a in e.invars if isinstance(a, Var)]
    stack += [a for a in jaxpr.outvars if isinstance(a, Var)]
    while stack:
        v = stack.pop()
        if v in seen or v not in made:
            continue
        seen.add(v)
        if v in handed_over:
            found[v] = None
        else:
            stack.extend(a for a in made[v].invars if isinstance(a, Var))
    return list(found)


def _made_by(wanted: Sequence[Var], made: Mapping[Var, JaxprEqn], eqns: Sequence[JaxprEqn]) -> tuple[JaxprEqn, ...]:
    """The equations that compute some values, in their order."""
    needed, stack = set[int](), list(wanted)
    while stack:
        eqn = made.get(stack.pop())
        if eqn is not None and id(eqn) not in needed:
            needed.add(id(eqn))
            stack.extend(a for a in eqn.invars if isinstance(a, Var))
    return tuple(e for e in eqns if id(e) in needed)
