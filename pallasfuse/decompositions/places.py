"""Places of the largest and least elements, by two reductions.

XLA for CPUs reduces pairs of a value and its place one after the other. Largest values alone it reduces with vectors, and the first
place of them, too.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn

type Array = Any


def first_place(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """The first place of an extreme along an axis, where elements equal it, or are no numbers; None for complex ones."""
    (operand,), axes = eqn.invars, eqn.params["axes"]
    dtype, places = _compat.dtype_of(operand), jnp.dtype(eqn.params["index_dtype"])
    is_number = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    shape = _compat.shape_of(operand)
    if len(axes) != 1 or not is_number or min(shape) < 1 or shape[axes[0]] > jnp.iinfo(places).max:
        return None
    (axis,) = axes
    extreme = lax.reduce_max if eqn.primitive.name == "argmax" else lax.reduce_min

    def run(x: Array) -> list[Array]:
        wanted = lax.expand_dims(extreme(x, (axis,)), (axis,)) == x
        if jnp.issubdtype(dtype, jnp.floating):  # one that is no number is found: then no element equals the extreme
            wanted |= jnp.isnan(x)
        at = lax.broadcasted_iota(places, shape, axis)
        return [lax.reduce_min(jnp.where(wanted, at, shape[axis]), (axis,))]

    return run
