"""Equations that are added to a flat jaxpr: those of a function of some of its variables, traced once for equal shapes."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn, Literal, Var
from pallasfuse.ir import dtypes
from pallasfuse.jaxpr_frontend.plans import dtype_of, shape_of

type Atom = Var | Literal


@dataclass
class AddedEquations:
    """Equations of a jaxpr that is being written, in order."""

    eqns: list[JaxprEqn] = field(default_factory=list)
    traced: dict[Any, Any] = field(default_factory=dict)
    """Jaxprs of calls: parts of equal shapes, computed alike, are many."""

    def add(self, like: JaxprEqn | None, run: partial[Any], *atoms: Atom) -> Atom:
        """Adds the equations of `run(*atoms)`, with the source of another equation. Returns the atom of its one result."""
        values = tuple((shape_of(a), _compat.dtype_of(a)) for a in atoms)
        key = _key(run, values)
        made = self.traced.get(key) if key is not None else None
        if made is None:
            made = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(*v) for v in values))
            if key is not None:
                self.traced[key] = made
        names: dict[Any, Atom] = dict(zip(made.invars, atoms, strict=True))
        for eqn in made.eqns:
            outvars = [Var(v.aval) for v in eqn.outvars]
            names |= dict(zip(eqn.outvars, outvars, strict=True))
            invars = [a if isinstance(a, Literal) else names[a] for a in eqn.invars]
            self.eqns.append(eqn.replace(invars=invars, outvars=outvars, source_info=(like or eqn).source_info))
        (result,) = made.outvars
        return result if isinstance(result, Literal) else names[result]

    def converted(self, like: JaxprEqn | None, dtype: str, atom: Atom) -> Atom:
        """Returns an atom as a number of another type; itself where it has that type."""
        return atom if dtype_of(atom) == dtype else self.add(like, partial(_converted, dtype), atom)

    def product(self, eqn: JaxprEqn, left: Atom, right: Atom) -> Atom:
        """Adds a product like that of an equation. Half results are float32, to be added before they are rounded."""
        result = dtype_of(eqn.outvars[0])
        wide = dtypes.accumulator(result)
        params = {**eqn.params, "preferred_element_type": np.dtype(wide)} if wide != result else eqn.params
        return self.add(eqn, partial(eqn.primitive.bind, **params), left, right)


def _converted(dtype: str, x: Any) -> Any:
    return lax.convert_element_type(x, dtype)


def _key(run: partial[Any], values: tuple[Any, ...]) -> Any:
    """A key that differs for calls that trace to other equations; None where a parameter is not hashable.

    Numbers that are equal and not the same (0.0 and -0.0, 1 and True) are kept apart by their text.
    """
    parameters = (*run.args, *sorted(run.keywords.items()))
    key = run.func, parameters, repr(parameters), values
    try:
        hash(key)
    except TypeError:
        return None
    return key
