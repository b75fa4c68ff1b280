"""What a program means in float64, and how far its own rounding may carry each element of each value: a running error analysis.

Every value of a jaxpr is a `Ball`: its float64 value, and a radius such that any evaluation of the program in its own types,
with the terms of every reduction in any order, stays within the radius. The radius of a result is derived operation by
operation (Higham, Accuracy and Stability of Numerical Algorithms, section 3.3), with u the unit roundoff of the result's type:

- *What the operands' radii do.* A function that is monotone in each operand takes its extremes at the corners: it is evaluated
  at `x ± radius` of every operand, and the largest distance from the value at the centre counts. This is not an expansion to
  first order: near a pole, a jump (`round`, a comparison) or an overflow the radius is what it must be, possibly infinite.
- *What the operation adds.* `c u (|value| + radius)`, with c = 1 for + - * and a conversion, 2 for a division (XLA multiplies by
  a reciprocal), 4 for elementary functions, and u |x| relative to exp2(x) and pow, which are computed as exp of a rounded product;
  and the smallest normal number where the value may be below it and is not zero for sure (XLA flushes it to zero).
- *A reduction of n terms* adds `gamma(n) sum(|x| + radius)`. In any order each term meets at most n - 1 additions, so n u is
  rigorous. As rounding errors have no common sign, the sum of n of them exceeds `LAMBDA sqrt(n) u` with a probability below
  2 exp(-LAMBDA^2 / 2) (Higham and Mary, A new approach to probabilistic rounding error analysis, 2019, theorem 2.4); gamma is the
  smaller of both. A product of n factors likewise, relative to the product. Matrix products add in float32 at least.
- *A choice* whose condition is not certain may be any of its cases.

An infinite radius says that nothing is known, not even that the value is a number. A value that is infinite or NaN with radius 0
is so for sure. With `unit=2**-53` for all types the same analysis bounds the float64 interpreters of the compiler's stages.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from tests.property.balls import Arithmetic, Ball, distance, exactly, is_float
from tests.property.error_rules import INDEXED, RULES, by_xla


class UnknownPrimitive(Exception):
    """The analysis has no rule for a primitive."""


_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def _scan(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
    p, body = eqn.params, eqn.params["jaxpr"]
    inside = [v.aval.ndim for v in body.jaxpr.invars]
    scans = sum(v.aval.ndim > n for v, n in zip(eqn.invars, inside, strict=True))
    carried = sum(v.aval.ndim == b.aval.ndim for v, b in zip(eqn.outvars, body.jaxpr.outvars, strict=True))
    last = len(balls) - scans
    first = last - carried
    consts, carry, scanned = balls[:first], balls[first:last], balls[last:]
    stacked: list[list[Ball]] = []
    order = range(p["length"])
    for n in reversed(order) if p["reverse"] else order:
        step = [Ball(b.value[n], b.radius[n]) for b in scanned]
        results = evaluate(body.jaxpr, body.consts, [*consts, *carry, *step], a)[0]
        carry = results[:carried]
        stacked.append(results[carried:])
    stacked = stacked[::-1] if p["reverse"] else stacked
    joined = [
        Ball(np.stack([b.value for b in bs]), np.stack([b.radius for b in bs])) for bs in zip(*stacked, strict=True)
    ]
    return [*carry, *joined]


def evaluate(
    jaxpr: Any, consts: Sequence[Any], balls: Sequence[Ball], arithmetic: Arithmetic
) -> tuple[list[Ball], dict[Any, Ball]]:
    """The results of a jaxpr, and all its variables, as balls.

    Raises:
      UnknownPrimitive: there is no rule for some primitive.
    """
    known: dict[Any, Ball] = dict(zip(jaxpr.invars, balls, strict=True))
    known |= {v: exactly(c, v.aval.dtype) for v, c in zip(jaxpr.constvars, consts, strict=True)}

    def look_up(atom: Any) -> Ball:
        if not isinstance(atom, Literal):
            return known[atom]
        rounded = exactly(atom.val, atom.aval.dtype)
        if arithmetic.unit is None or not is_float(atom.aval.dtype):
            return rounded
        # some stages keep a literal as it was written: 0.1, not the float32 next to it
        written = exactly(atom.val, np.float64)
        return Ball(written.value, distance(written.value, rounded.value))

    with np.errstate(all="ignore"):
        for eqn in jaxpr.eqns:
            operands = [look_up(x) for x in eqn.invars]
            name = eqn.primitive.name
            inner = next((eqn.params[k] for k in _BODIES if eqn.params.get(k) is not None), None)
            if name == "scan":
                results = _scan(eqn, operands, arithmetic)
            elif inner is not None:
                results = evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands, arithmetic)[
                    0
                ]
            elif name in RULES:
                results = RULES[name](eqn, operands, arithmetic)
            elif name in INDEXED:
                results = by_xla(eqn, operands, arithmetic)
            else:
                raise UnknownPrimitive(name)
            known.update(zip(eqn.outvars, results, strict=True))
    return [look_up(v) for v in jaxpr.outvars], known
