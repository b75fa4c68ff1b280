"""Floats in order by integers that stand in the same order.

XLA for CPUs calls a comparison of floats, as JAX defines it, for each two elements. Integers of the same order it compares itself.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn

type Array = Any

_INTEGERS = {2: jnp.int16, 4: jnp.int32}
"""The integers of so many bytes as floats have."""


def by_integers(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """Rows in order by their first operand; None where that is no float of 16 or 32 bits.

    NaNs stand behind all numbers. A single operand is computed from its integers again; several move along with them. To JAX,
    zeros of both signs and numbers below the least normal one are equal, and stay in the order in which they were: so they do
    here if there are several operands. A single one has them in order of their values, with -0 before 0.
    """
    first = eqn.invars[0]
    dtype, axis = _compat.dtype_of(first), eqn.params["dimension"]
    integer = _INTEGERS.get(jnp.dtype(dtype).itemsize) if jnp.issubdtype(dtype, jnp.floating) else None
    if integer is None or eqn.params["num_keys"] != 1:
        return None

    def run(*operands: Array) -> list[Array]:
        last = operands[0].ndim - 1
        order = _order_with_last(last + 1, axis)
        x, *others = (lax.transpose(a, order) if axis != last else a for a in operands)
        key = _key(x, integer, one_zero=bool(others))
        if others:
            _, *found = lax.sort((key, x, *others), dimension=last, num_keys=1, is_stable=eqn.params["is_stable"])
        else:
            found = [from_keys(lax.sort(key, dimension=last), dtype)]
        return [lax.transpose(a, order) for a in found] if axis != last else found

    return run


def _order_with_last(dimensions: int, axis: int) -> list[int]:
    """The order of axes in which one and the last have changed their places."""
    order = list(range(dimensions))
    order[axis], order[-1] = order[-1], order[axis]
    return order


def _key(x: Array, integer: Any, *, one_zero: bool) -> Array:
    """Integers that are in the order in which JAX sorts floats: NaNs of both signs are the last."""
    key = order_keys(x)
    if one_zero:
        key = jnp.where(x == 0, jnp.zeros((), integer), key)
    return jnp.where(jnp.isnan(x), jnp.asarray(jnp.iinfo(integer).max, integer), key)


def has_keys(dtype: Any) -> bool:
    """Do numbers of a type have `order_keys`?"""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return bool(is_integer or (jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize in _INTEGERS))


def order_keys(x: Array) -> Array:
    """Returns integers in the order of all bits of floats (-NaN, -inf, -0, 0, inf, NaN), and integers as they are.

    Those of floats with a sign are in the other order, and are turned.
    """
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x
    return _turned(lax.bitcast_convert_type(x, _INTEGERS[x.dtype.itemsize]))


def from_keys(key: Array, dtype: Any) -> Array:
    """Returns the numbers of a type that have such keys."""
    return key if jnp.issubdtype(dtype, jnp.integer) else lax.bitcast_convert_type(_turned(key), dtype)


def _turned(bits: Array) -> Array:
    return jnp.where(bits < 0, bits ^ jnp.asarray(jnp.iinfo(bits.dtype).max, bits.dtype), bits)
