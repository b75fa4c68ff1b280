"""Equations of a jaxpr replaced by others that compute the same."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var

Atom = Var | Literal

type Run = Callable[..., list[Any]]
"""Computes the results of an equation from its operands."""


@dataclass(frozen=True, slots=True)
class Instead:
    """Holds an equation that may stand in place of one of a program, and what computes the same with the one and with the other."""

    eqn: JaxprEqn
    written: Run
    """Computes what the program does, from the atoms."""
    other: Run
    """Computes the same from them with the other equation."""
    atoms: tuple[Atom, ...]


class Writer:
    """A jaxpr that is being written: the equations of another one, and what stands instead of some of them."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr = jaxpr
        self.eqns: list[JaxprEqn] = []
        self._constvars, self._consts = list(jaxpr.constvars), list(jaxpr.consts)
        self._known: dict[Var, Atom] = {}

    def atom(self, atom: Atom) -> Atom:
        """Returns the atom that stands for one of the jaxpr in the one that is written."""
        return atom if isinstance(atom, Literal) else self._known.get(atom, atom)

    def keep(self, eqn: JaxprEqn) -> None:
        """Append an equation as it is."""
        invars = [self.atom(a) for a in eqn.invars]
        same = all(new is old for new, old in zip(invars, eqn.invars, strict=True))
        self.eqns.append(eqn if same else eqn.replace(invars=invars))  # type: ignore[no-untyped-call]

    def name(self, var: Var, atom: Atom) -> None:
        """Let an atom stand for a variable of the jaxpr from now on."""
        self._known[var] = atom

    def emit(self, eqn: JaxprEqn, run: Callable[..., Sequence[Any]], atoms: Sequence[Atom]) -> list[Atom]:
        """Append the equations of `run` on atoms, with the source of an equation; returns the atoms of its results."""
        traced = traced_as(eqn, run, atoms)
        names: dict[Any, Atom] = dict(zip(traced.invars, atoms, strict=True))
        self._constvars += traced.constvars
        self._consts += traced.consts

        def named(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else names.get(atom, atom)

        for inner in with_source_of(eqn, traced).eqns:
            self.eqns.append(inner.replace(invars=[named(a) for a in inner.invars]))
        return [named(a) for a in traced.outvars]

    def instead(self, eqn: JaxprEqn, run: Run, operands: Sequence[Atom] | None = None) -> None:
        """Append the equations of `run` in place of an equation. operands: of the jaxpr; by default those of the equation."""
        atoms = [self.atom(a) for a in (eqn.invars if operands is None else operands)]
        for var, atom in zip(eqn.outvars, self.emit(eqn, run, atoms), strict=True):
            self.name(var, atom)

    def written(self) -> Jaxpr:
        """The jaxpr as it is written."""
        outvars = [self.atom(a) for a in self.jaxpr.outvars]
        return _compat.replace_jaxpr(self.jaxpr, self._constvars, self._consts, self.eqns, outvars)


def with_some_instead(flat: Jaxpr, rule: Callable[[JaxprEqn], Run | None]) -> Jaxpr | None:
    """Returns a flat jaxpr with what a rule has in place of its equations; None where it has nothing for any of them."""
    writer, changed = Writer(flat), False
    for eqn in flat.eqns:
        run = rule(eqn)
        if run is None:
            writer.keep(eqn)
        else:
            writer.instead(eqn, run)
            changed = True
    return writer.written() if changed else None


def traced_as(eqn: JaxprEqn, run: Callable[..., Sequence[Any]], atoms: Sequence[Atom]) -> Jaxpr:
    """Returns the jaxpr of `run` on atoms, traced as an equation was: its types do not depend on what the caller has configured.

    The variables are new ones: of one function JAX would return the same jaxpr again.
    """

    def traced(*operands: Any) -> Sequence[Any]:
        return run(*operands)

    with ExitStack() as stack:
        stack.enter_context(eqn.ctx.manager)
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        return jax.make_jaxpr(traced)(*(_compat.struct_of(a) for a in atoms))


def with_source_of(eqn: JaxprEqn, jaxpr: Jaxpr) -> Jaxpr:
    """Returns a jaxpr that stands for an equation, with the source line and the scopes of that equation."""
    eqns = []
    for inner in jaxpr.eqns:
        source, _ = _compat.inside_scopes(eqn.source_info, inner, eqn.source_info.name_stack)
        eqns.append(inner.replace(source_info=source, ctx=eqn.ctx))
    return _compat.replace_jaxpr(jaxpr, jaxpr.constvars, jaxpr.consts, eqns, jaxpr.outvars)


def with_results(jaxpr: Jaxpr, wanted: Sequence[bool]) -> Jaxpr:
    """Returns a jaxpr with the results that are wanted, and what they are computed from."""
    results = [v for v, one in zip(jaxpr.outvars, wanted, strict=True) if one]
    return _compat.without_unused(_compat.replace_jaxpr(jaxpr, jaxpr.constvars, jaxpr.consts, jaxpr.eqns, results))


def usually(condition: Any, of: Callable[..., Any], library: Callable[..., Any], *operands: Any) -> Any:
    """Computes `of` of operands where a condition holds, as it usually does, else `library`: one choice for all of them."""
    return lax.cond(condition, of, library, *operands)


def as_usual(jaxpr: Jaxpr) -> tuple[Jaxpr, int]:
    """Returns a way to compute an operation without the branches that are rarely taken (`usually`), and how many choices it has."""
    choices = sum(map(_is_choice, jaxpr.eqns))
    if not choices:
        return jaxpr, 0
    writer = Writer(jaxpr)
    for eqn in jaxpr.eqns:
        if _is_choice(eqn):
            held = eqn.params["branches"][1]
            writer.instead(eqn, partial(_compat.eval_jaxpr, held, held.consts), eqn.invars[1:])
        else:
            writer.keep(eqn)
    return writer.written(), choices


def _is_choice(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "cond" and len(eqn.params["branches"]) == 2


def wide(dtype: Any) -> Any:
    """The type in which numbers of a type are added up: float32 for half precision; None for types that are left as they are.

    Those are what is no number, complex numbers, and floats of less than 16 bits.
    """
    if jnp.issubdtype(dtype, jnp.integer):
        return dtype if jnp.iinfo(dtype).bits >= 8 else None
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 16:
        return None
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype("float32")


def has_types_of(atoms: Sequence[Atom], others: Sequence[Atom]) -> bool:
    """Have atoms the shapes and types of others?"""
    found, wanted = ([(_compat.shape_of(a), _compat.dtype_of(a)) for a in of] for of in (atoms, others))
    return found == wanted


def one_dimension_more(numbers: lax.ScatterDimensionNumbers) -> lax.ScatterDimensionNumbers:
    """Returns the dimension numbers of an update of an array with one more dimension, its first, whose place comes first."""
    return lax.ScatterDimensionNumbers(
        update_window_dims=numbers.update_window_dims,
        inserted_window_dims=(0, *(d + 1 for d in numbers.inserted_window_dims)),
        scatter_dims_to_operand_dims=(0, *(d + 1 for d in numbers.scatter_dims_to_operand_dims)),
        operand_batching_dims=tuple(d + 1 for d in numbers.operand_batching_dims),
        scatter_indices_batching_dims=numbers.scatter_indices_batching_dims,
    )
