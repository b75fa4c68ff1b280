"""Names for the tensors of a flat jaxpr: those of the function's arguments where they have some, else numbers."""

import keyword
import re
from itertools import count

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, Var


def tensor_names(jaxpr: Jaxpr) -> dict[Var, str]:
    """The name of every tensor of a flat jaxpr's loop program: those of its inputs first, then of each equation's outputs."""
    names = _input_names(jaxpr)
    taken = set(names.values())
    temporaries = (name for n in count() if (name := f"t{n}") not in taken)
    return names | {var: next(temporaries) for eqn in jaxpr.eqns for var in eqn.outvars}


def _input_names(jaxpr: Jaxpr) -> dict[Var, str]:
    """Inputs are named like the arguments of the function where that gives short, distinct names; else x0, x1, ..."""
    names: dict[Var, str] = {var: f"c{n}" for n, var in enumerate(jaxpr.constvars)}
    taken = set(names.values())
    paths = _compat.argument_names(jaxpr)
    for n, var in enumerate(jaxpr.invars):
        path = paths[n] if len(paths) == len(jaxpr.invars) else ""
        name = re.sub(r"\W+", "_", path).strip("_")
        if not name.isidentifier() or keyword.iskeyword(name) or name in taken or len(name) > 40:
            name = next(x for k in count(n) if (x := f"x{k}") not in taken)
        names[var] = name
        taken.add(name)
    return names
