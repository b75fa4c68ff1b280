"""Sums over the trips of a loop that leave the loop: what is only added to is not needed by the next trip.

The gradient of whatever all trips read is such a sum: each trip adds its own part, reduced over a batch. So no part of the batch
could go its way alone. A sum of a reduction over trips is the reduction of sums, each of one part of the batch; and a sum of
products over trips is one product, over the trips as well, of what the trips leave.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.decompositions.writing import Run, wide
from pallasfuse.jaxpr_frontend import flatten

type Array = Any

_LINEAR = frozenset({"transpose", "reshape", "neg", "squeeze", "expand_dims"})
"""Operations of one operand that are the same before and after a sum over trips."""
_MOST_STACKED = 4.0
"""The largest ratio of the bytes that are left for products after a loop to those that it reads and leaves anyway."""


@dataclass(frozen=True, slots=True)
class Accumulator:
    """A carried value that each trip adds something to: the equation that makes it, and what is done to it before it is added."""

    number: int
    made: JaxprEqn
    after: tuple[JaxprEqn, ...]

    @property
    def is_product(self) -> bool:
        return self.made.primitive.name == "dot_general"

    def added(self, first: Array, total: Array) -> Array:
        """The accumulator after all trips, from its first value and the sum of what the equation makes: added up in a wide type."""
        for eqn in self.after:
            (total,) = _compat.bind(eqn, [total]) if eqn.primitive.name != "convert_element_type" else (total,)
        return (first.astype(total.dtype) + total).astype(first.dtype)


def accumulators(body: Jaxpr, constants: int, carried: int) -> list[Accumulator]:
    """The accumulators of a loop whose body is a flat jaxpr."""
    uses = Counter(a for a in (*body.outvars, *(x for e in body.eqns for x in e.invars)) if isinstance(a, Var))
    maker = {v: e for e in body.eqns for v in e.outvars}
    found = []
    for number in range(carried):
        state, after = body.invars[constants + number], list[JaxprEqn]()
        result = body.outvars[number]
        add = maker.get(result) if isinstance(result, Var) and uses[result] == 1 else None
        if add is None or add.primitive.name not in ("add", "add_any") or uses[state] != 1:
            continue
        others = [a for a in add.invars if a is not state]
        value = others[0] if len(others) == 1 else None
        if not isinstance(value, Var) or not jnp.issubdtype(_compat.dtype_of(value), jnp.floating):
            continue
        if wide(_compat.dtype_of(value)) is None or _compat.shape_of(value) != _compat.shape_of(state):
            continue
        made = maker.get(value)
        while made is not None and (made.primitive.name in _LINEAR or _widens(made) or _drops_units(made)):
            after.insert(0, made)
            operand = made.invars[0]
            made = maker.get(operand) if isinstance(operand, Var) else None
        if made is not None and made.primitive.name in ("reduce_sum", "dot_general"):
            found.append(Accumulator(number, made, tuple(after)))
    return found


def _widens(eqn: JaxprEqn) -> bool:
    """Is an equation a change of type that adds are as exact after as before?"""
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = (_compat.dtype_of(a) for a in (eqn.invars[0], eqn.outvars[0]))
    return bool(jnp.issubdtype(before, jnp.floating) and wide(before) == wide(after))


def _drops_units(eqn: JaxprEqn) -> bool:
    """Is an equation a sum over dimensions of one element?"""
    if eqn.primitive.name != "reduce_sum":
        return False
    shape = _compat.shape_of(eqn.invars[0])
    return all(shape[d] == 1 for d in eqn.params["axes"])


def accumulators_apart(eqn: JaxprEqn) -> Run | None:
    """Returns what computes a scan with the sums over its trips outside of it; None where it has none, or they would take much
    memory."""
    counts, body = _compat.scan_counts(eqn), flatten(eqn.params["jaxpr"])
    if counts is None or body.effects:
        return None
    constants, carried = counts
    length = eqn.params["length"]
    moved = sum(_bytes(v) for v in (*eqn.invars, *eqn.outvars))
    found, stacked = list[Accumulator](), 0.0
    slices = body.invars[constants + carried :]
    for one in accumulators(body, constants, carried):
        more = length * sum(_bytes(a) for a in one.made.invars if a not in slices) if one.is_product else 0.0
        if stacked + more <= _MOST_STACKED * moved:
            found.append(one)
            stacked += more
    if not found:
        return None
    apart = {one.number for one in found}
    kept = [n for n in range(carried) if n not in apart]
    sums, products = ([one for one in found if one.is_product == of] for of in (False, True))
    factors = [a for one in products for a in one.made.invars]
    wanted = [
        *(body.outvars[n] for n in kept),
        *(one.made.invars[0] for one in sums),
        *factors,
        *body.outvars[carried:],
    ]
    inside = flatten(_compat.replace_jaxpr(body, body.constvars, body.consts, body.eqns, wanted))
    first, second = len(kept), len(kept) + len(sums)

    def run(*operands: Array) -> list[Array]:
        given, init, xs = _compat.scan_parts(operands, counts)

        def trip(state: Any, rows: Any) -> Any:
            states, partial = state
            known = dict(zip(kept, states, strict=True))
            results = _compat.eval_jaxpr(inside, inside.consts, *given, *(known.get(n) for n in range(carried)), *rows)
            added = [p + g.astype(p.dtype) for p, g in zip(partial, results[first:second], strict=True)]
            return (results[:first], added), results[second:]

        shapes = [_compat.struct_of(one.made.invars[0]) for one in sums]
        zeros = [jnp.zeros(s.shape, wide(s.dtype)) for s in shapes]
        (last, totals), left = lax.scan(
            trip, ([init[n] for n in kept], zeros), list(xs), length=length, reverse=eqn.params["reverse"]
        )
        of_products = iter(left[: len(factors)])
        results: dict[int, Array] = dict(zip(kept, last, strict=True))
        for one, total in zip(sums, totals, strict=True):
            results[one.number] = one.added(init[one.number], jnp.sum(total, one.made.params["axes"]))
        for one in products:
            total = _product(one.made, next(of_products), next(of_products))
            results[one.number] = one.added(init[one.number], total)
        return [*(results[n] for n in range(carried)), *left[len(factors) :]]

    return run


def _product(eqn: JaxprEqn, lhs: Array, rhs: Array) -> Array:
    """The sum over the trips, which are the first dimensions, of products."""
    (over, batch), params = eqn.params["dimension_numbers"], eqn.params
    contracted = (0, *(d + 1 for d in over[0])), (0, *(d + 1 for d in over[1]))
    batched = [d + 1 for d in batch[0]], [d + 1 for d in batch[1]]
    summed = wide(_compat.dtype_of(eqn.outvars[0]))
    return lax.dot_general(
        lhs, rhs, (contracted, batched), precision=params["precision"], preferred_element_type=summed
    )


def _bytes(atom: Any) -> float:
    size = float(jnp.dtype(_compat.dtype_of(atom)).itemsize) if not isinstance(atom, Literal) else 0.0
    for n in _compat.shape_of(atom):
        size *= n
    return size
