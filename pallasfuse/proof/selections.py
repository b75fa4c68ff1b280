"""Proves that parts and joins of axes, and computed places, which kernels of loops have as sums, are what they stand for.

Both jaxprs have the other equations in common. Their results are random whole numbers here; what either reads is computed from
these, and must be equal, element for element: sums of few whole numbers are exact in floating point, in any order.
"""

from typing import Any

import jax
import numpy as np

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, Literal, Var
from pallasfuse.decompositions.selections import without_selections
from pallasfuse.ir import dtypes
from pallasfuse.jaxpr_frontend import flatten
from pallasfuse.proof.result import Counterexample, Record

_TRIALS = 4
_LARGEST = 1 << 24
"""The most elements of a value that is computed here."""
_MANY, _FEW = 1000, 1
"""The largest whole numbers, of types with many digits, and of half types, in which few are other than zero."""
_OTHER_THAN_ZERO = 1 / 16


def selections(body: Jaxpr, name: str, seed: int, record: Record) -> None:
    """Compares the body of a loop with the same in which parts, joins and computed places are sums. name: of the loop."""
    before = flatten(body)
    after = without_selections(before)
    stage = f"parts, joins and places of {name}"
    shared = {v for e in before.eqns for v in e.outvars} & {v for e in after.eqns for v in e.outvars}
    own = [v for j in (before, after) for e in j.eqns for v in e.outvars if v not in shared]
    if not own:
        return
    record.stages[stage] = None
    if max(int(np.prod(_compat.shape_of(v), dtype=int)) for v in own) > _LARGEST:
        record.uncovered[f"{stage}: a value of more than {_LARGEST} elements: verify it with smaller arguments"] = None
        return
    leaves = [*before.invars, *sorted(shared, key=[v for e in before.eqns for v in e.outvars].index)]

    @jax.jit
    def both(*values: Any) -> tuple[list[Any], list[Any]]:
        first, second = (_read_by_others(j, dict(zip(leaves, values, strict=True))) for j in (before, after))
        return first, second

    generator = np.random.default_rng(seed)
    with jax.default_device(jax.devices("cpu")[0]):
        for _ in range(_TRIALS):
            expected, found = both(*(_drawn(v, generator) for v in leaves))
            for number, (a, b) in enumerate(zip(expected, found, strict=True)):
                want, have = np.asarray(a), np.asarray(b)
                differ = None if want.shape != have.shape or want.dtype != have.dtype else _where_not_equal(want, have)
                if differ is not None and not len(differ):
                    continue
                if record.wrong is None:
                    at = () if differ is None else tuple(map(int, differ[0]))
                    record.wrong = Counterexample(stage, f"value {number}", at, str(want[at]), str(have[at]))


def _where_not_equal(first: Any, other: Any) -> Any:
    """Returns the places where two arrays differ; not those where neither has a number, as for a place outside of an array."""
    return np.argwhere((first != other) & ((first == first) | (other == other)))  # noqa: PLR0124


def _read_by_others(jaxpr: Jaxpr, known: dict[Var, Any]) -> list[Any]:
    """Returns the values that equations with known results read, one after the other, and the results of the jaxpr."""
    found, known = list[Any](), {**known, **dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))}

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        given = [value(a) for a in eqn.invars]
        if eqn.outvars[0] in known:
            found += given
        else:
            known.update(zip(eqn.outvars, _compat.bind(eqn, given), strict=True))
    return [jax.numpy.asarray(x) for x in (*found, *map(value, jaxpr.outvars))]


def _drawn(var: Any, generator: np.random.Generator) -> Any:
    """Draws whole numbers of the type of a variable."""
    shape, dtype = _compat.shape_of(var), str(_compat.dtype_of(var))
    if dtype == "bool":
        return generator.random(shape) < 0.5
    if dtype in dtypes.HALF:
        numbers = generator.integers(-_FEW, _FEW, shape, endpoint=True)
        return np.where(generator.random(shape) < _OTHER_THAN_ZERO, numbers, 0).astype(_compat.dtype_of(var))
    least = 0 if dtype.startswith("uint") else -_MANY
    most = min(_MANY, np.iinfo(dtype).max) if dtypes.is_integer(dtype) else _MANY
    least = max(least, np.iinfo(dtype).min) if dtypes.is_integer(dtype) else least
    return generator.integers(least, most, shape, endpoint=True).astype(dtype)
