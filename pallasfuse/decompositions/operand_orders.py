"""Sums of products element by element are written with the operand of more rows first.

XLA's library for CPUs treats a sum of products along neighbours as a product of matrices, and is fast where the second factor has
fewer rows. Where `v * w` is written instead of `w * v`, for a vector and a matrix, it takes 1.3 to 8 times as long. The
products are the same; the library may sum them in another order.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.decompositions.writing import Instead
from pallasfuse.jaxpr_frontend.elementwise import RULES as MAPS


def sums_of_products(jaxpr: Jaxpr) -> dict[Var, JaxprEqn]:
    """Finds the products element by element that only a sum along their last dimension reads: the sums, by the products."""
    readers = Counter(a for eqn in jaxpr.eqns for a in eqn.invars if isinstance(a, Var))
    readers.update(a for a in jaxpr.outvars if isinstance(a, Var))
    made = {v for eqn in jaxpr.eqns if eqn.primitive.name == "mul" for v in eqn.outvars}
    return {
        eqn.invars[0]: eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "reduce_sum" and eqn.invars[0] in made and readers[eqn.invars[0]] == 1
        and len(_compat.shape_of(eqn.invars[0])) - 1 in eqn.params["axes"]
    }  # fmt: skip


def with_more_rows_first(eqn: JaxprEqn, makers: Mapping[Var, JaxprEqn], sums: Mapping[Var, JaxprEqn]) -> Instead | None:
    """A product whose first operand has fewer rows than the second, and a sum along them, with the second first; None for others.

    Only products of float32: of other types nothing is known to be gained. And none of what is transposed before: what looks like a
    row is none in memory then.

    makers: the equations that make the variables of the program. sums: as of `sums_of_products`.
    """
    if eqn.primitive.name != "mul" or eqn.outvars[0] not in sums:
        return None
    total, shape = sums[eqn.outvars[0]], _compat.shape_of(eqn.outvars[0])
    if _compat.dtype_of(eqn.outvars[0]) != jnp.float32 or any(
        len(_compat.shape_of(a)) != len(shape) for a in eqn.invars
    ):
        return None
    kept = frozenset(range(len(shape))) - frozenset(total.params["axes"])
    repeated = [_repeated(a, shape, makers) for a in eqn.invars]
    if any(len(shape) - 1 in dims for dims in repeated):
        return None
    rows = [math.prod(shape[d] for d in kept - dims) for dims in repeated]
    if rows[0] >= rows[1] or any(_is_turned(a, makers) for a in eqn.invars):
        return None
    chains = [_chain(a, makers) for a in eqn.invars]
    sources = tuple(chain[-1].invars[0] if chain else a for chain, a in zip(chains, eqn.invars, strict=True))

    def run(*values: Any, turned: bool) -> list[Any]:
        operands = [_repeat(x, chain) for x, chain in zip(values, chains, strict=True)]
        return _compat.bind(total, _compat.bind(eqn, operands[::-1] if turned else operands))

    turned = eqn.replace(invars=eqn.invars[::-1])
    return Instead(turned, partial(run, turned=False), partial(run, turned=True), sources)


def _chain(atom: Var | Literal, makers: Mapping[Var, JaxprEqn]) -> list[JaxprEqn]:
    """Returns the equations that repeat an operand along dimensions, the last one first."""
    found: list[JaxprEqn] = []
    while isinstance(atom, Var) and atom in makers and makers[atom].primitive.name == "broadcast_in_dim":
        found.append(makers[atom])
        atom = makers[atom].invars[0]
    return found


def _repeat(value: Any, chain: Sequence[JaxprEqn]) -> Any:
    for eqn in reversed(chain):
        (value,) = _compat.bind(eqn, [value])
    return value


def _repeated(atom: Var | Literal, shape: tuple[int, ...], makers: Mapping[Var, JaxprEqn]) -> frozenset[int]:
    """Returns the dimensions of a result along which all elements of an operand are the same, as far as broadcasts say."""
    own = _compat.shape_of(atom)
    found = frozenset(d for d, size in enumerate(shape) if own[d] != size)
    if not isinstance(atom, Var) or atom not in makers or makers[atom].primitive.name != "broadcast_in_dim":
        return found
    (source, *_), places = makers[atom].invars, makers[atom].params["broadcast_dimensions"]
    inside = _repeated(source, tuple(own[d] for d in places), makers)
    return found | frozenset(range(len(shape))).difference(d for n, d in enumerate(places) if n not in inside)


def _is_turned(atom: Var | Literal, makers: Mapping[Var, JaxprEqn]) -> bool:
    """Is an operand computed from what is transposed before, element by element?"""
    waiting, seen = [atom], set[Var]()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Var) or one in seen or one not in makers:
            continue
        seen.add(one)
        eqn = makers[one]
        if eqn.primitive.name == "transpose":
            return True
        if eqn.primitive.name in MAPS or eqn.primitive.name == "broadcast_in_dim":
            waiting += eqn.invars
    return False
