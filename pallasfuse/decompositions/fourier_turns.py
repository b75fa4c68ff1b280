"""Fourier transforms on a CPU, one after the other.

XLA computes parts of a program at the same time where none needs another, and a transform shares its work with the threads of the
same pool and waits for them. Where as many transforms begin together as there are threads, all of them wait for ever. (jaxlib 0.11
on two cores: a program whose layers have two transforms stood still in 6 of 15 runs, as soon as a kernel had made what one of them
reads as quickly as what the other reads.) What is changed in a program must not let it stand still: there each transform waits for
the one before.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal
from pallasfuse.decompositions.writing import Atom, Writer
from pallasfuse.jaxpr_frontend import called, flatten, with_bodies
from pallasfuse.primitive_names import WITH_BODIES

_TRANSFORM = "fft"


def after(earlier: Any, operand: Any) -> Any:
    """Returns an operand that is there only once something earlier is: what computes the operand reads one element of that, for a
    choice that always takes the operand. XLA does not see that it does; were it to, they would be computed in any order again."""
    first = lax.convert_element_type(jnp.real(earlier).ravel()[0], jnp.int32)
    is_even = (first * (first + 1)) & 1 == 0  # of two numbers that follow each other one is even
    return lax.select(jnp.broadcast_to(is_even, jnp.shape(operand)), operand, jnp.zeros_like(operand))


def transforms(eqn: JaxprEqn) -> bool:
    """Does an equation compute Fourier transforms, itself or in what it calls?"""
    return eqn.primitive.name == _TRANSFORM or any(map(transforms, (e for body in called(eqn) for e in body.eqns)))


def waiting(eqn: JaxprEqn) -> int | None:
    """Returns the number of the operand by which an equation that transforms waits for another; None where it has none."""
    fit = (n for n, a in enumerate(eqn.invars) if not isinstance(a, Literal) and _can_wait(a))
    return next(fit, None)


def result(eqn: JaxprEqn) -> int | None:
    """Returns the number of a result of an equation that another one can wait for; None where it has none."""
    return next((n for n, v in enumerate(eqn.outvars) if _can_wait(v)), None)


def _can_wait(atom: Atom) -> bool:
    dtype = _compat.dtype_of(atom)
    return 0 not in _compat.shape_of(atom) and (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_)


def in_turn(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a jaxpr in which each transform waits for the one before; itself where there are not two that may begin together."""
    if _compat.has_symbolic_shapes(jaxpr) or not any(map(transforms, jaxpr.eqns)):
        return jaxpr
    flat = flatten(jaxpr)
    writer, changed, last = Writer(flat), False, None
    for eqn in flat.eqns:
        if not transforms(eqn):
            writer.keep(eqn)
            continue
        made = with_bodies(eqn, in_turn) if eqn.primitive.name in WITH_BODIES else eqn
        at = waiting(eqn)
        if last is not None and at is not None:
            atoms = [last, writer.atom(eqn.invars[at])]
            operands = [writer.atom(a) for a in eqn.invars]
            (operands[at],) = writer.emit(eqn, lambda *both: [after(*both)], atoms)
            made = made.replace(invars=operands)  # type: ignore[no-untyped-call]
        writer.keep(made)
        changed |= made is not eqn
        found = result(eqn)
        last = last if found is None else eqn.outvars[found]
    return writer.written() if changed else jaxpr


def delayed(eqn: JaxprEqn, operands: Sequence[Any], earlier: Any | None) -> Sequence[Any]:
    """Returns the operands of an equation, one of which waits for something earlier, if there is something."""
    at = None if earlier is None else waiting(eqn)
    return operands if at is None else [after(earlier, x) if n == at else x for n, x in enumerate(operands)]
