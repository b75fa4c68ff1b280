"""Remainders of floats, by arithmetic on vectors.

XLA for CPUs calls a function of the C library for each element. Kernels for GPUs write remainders with products and differences
(`tiling.legalize`), which are exact wherever the C library is; the same serves here.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn
from pallasfuse.decompositions.writing import wide
from pallasfuse.emission.elementwise import TABLE, select
from pallasfuse.first_time import IMPORTS
from pallasfuse.ir.expr import Apply, Const, Expr, Read, postorder, read

type Array = Any


def of_floats(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """A remainder that has the sign of the dividend; None for integers, which XLA divides with vectors."""
    dtype = _compat.dtype_of(eqn.outvars[0])
    computed = wide(dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or computed is None:
        return None
    with IMPORTS:  # most programs have none
        from pallasfuse.tiling.legalize import RULES
    found = RULES["rem"](*(read(name, (), computed.name) for name in ("dividend", "divisor")))
    if found is None:
        return None

    def run(x: Array, y: Array) -> list[Array]:
        return [_evaluated(found, {"dividend": x.astype(computed), "divisor": y.astype(computed)}).astype(dtype)]

    return run


def _evaluated(root: Expr, arrays: dict[str, Array]) -> Array:
    """The value of an expression of arrays, element by element."""
    values: dict[Expr, Array] = {}
    for node in postorder(root):
        match node:
            case Const(value, dtype):
                values[node] = jnp.asarray(value, dtype)
            case Read(tensor):
                values[node] = arrays[tensor]
            case Apply(op, args):
                values[node] = (select if op == "select" else TABLE[op])(*(values[a] for a in args))
    return values[root]
