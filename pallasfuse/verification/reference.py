"""A jaxpr in float64: what its floating-point results are compared with."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from pallasfuse import _compat

_TYPES = ("new_dtype", "preferred_element_type", "dtype", "accumulation_type")


def _wide(dtype: Any) -> Any:
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def float64_results(jaxpr: Jaxpr, arguments: Sequence[Any]) -> list[np.ndarray]:
    """The results of a flat jaxpr with float64 in place of every floating-point type.

    Args:
      arguments: the values of its constants and inputs, in this order.
    """
    with jax.enable_x64(True):
        values = {
            v: np.asarray(a, _wide(_compat.dtype_of(v)))
            for v, a in zip((*jaxpr.constvars, *jaxpr.invars), arguments, strict=True)
        }

        def run(given: dict[Any, Any]) -> list[Any]:
            known = dict(given)

            def look_up(atom: Any) -> Any:
                if isinstance(atom, Literal):
                    return jnp.asarray(atom.val, _wide(_compat.dtype_of(atom)))
                return known[atom]

            for eqn in jaxpr.eqns:
                results = _compat.bind(_widened(eqn), [look_up(a) for a in eqn.invars])
                known.update(zip(eqn.outvars, results, strict=True))
            return [look_up(v) for v in jaxpr.outvars]

        names = list(values)
        compiled = jax.jit(lambda *arrays: run(dict(zip(names, arrays, strict=True))))
        return [np.asarray(x) for x in compiled(*values.values())]


def _widened(eqn: JaxprEqn) -> JaxprEqn:
    params = dict(eqn.params)
    for key in _TYPES:
        if params.get(key) is not None:
            params[key] = _wide(params[key])
    if eqn.primitive.name == "reduce_precision":
        params |= {"exponent_bits": 11, "mantissa_bits": 52}
    widened: JaxprEqn = eqn.replace(params=params)
    return widened


def largest_bytes(jaxpr: Jaxpr) -> int:
    """Bytes of the largest value in float64."""
    return max(
        (8 * int(np.prod(_compat.shape_of(v), dtype=np.int64)) for e in jaxpr.eqns for v in e.outvars), default=0
    )
