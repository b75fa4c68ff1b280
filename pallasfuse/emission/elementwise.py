"""Scalar operations as JAX functions: one table, shared by every backend."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

Function = Callable[..., Any]


def _spread(function: Function) -> Function:
    """`lax` functions want operands of one shape."""

    def call(*args: Any) -> Any:
        shape = jnp.broadcast_shapes(*(jnp.shape(a) for a in args))
        return function(*(jnp.broadcast_to(a, shape) for a in args))

    return call


def _round(method: lax.RoundingMethod) -> Function:
    return lambda x: lax.round(x, method)


def _shift_left(x: Any, amount: Any) -> Any:
    inside, amount = _within(x, amount)
    shifted = _spread(lax.shift_left)(x, amount)
    return shifted if inside is None else jnp.where(inside, shifted, jnp.zeros_like(shifted))


def _shift_right(x: Any, amount: Any) -> Any:
    signed = jnp.issubdtype(jnp.result_type(x), jnp.signedinteger)
    inside, amount = _within(x, amount)
    shifted = _spread(lax.shift_right_arithmetic if signed else lax.shift_right_logical)(x, amount)
    return shifted if inside is None or signed else jnp.where(inside, shifted, jnp.zeros_like(shifted))


def _within(x: Any, amount: Any) -> tuple[Any, Any]:
    """Returns where an amount of bits is one that x can be shifted by (None: it is), and such an amount: processors differ in what
    they do by others."""
    bits = 8 * jnp.result_type(x).itemsize
    if isinstance(amount, np.generic) and 0 <= int(amount) < bits:
        return None, amount
    inside = (amount >= 0) & (amount < bits)
    return inside, jnp.where(inside, amount, jnp.asarray(bits - 1, jnp.result_type(amount)))


TABLE: dict[str, Function] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _spread(lax.div),
    "rem": _spread(lax.rem),
    "pow": _spread(lax.pow),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "atan2": _spread(lax.atan2),
    "nextafter": _spread(lax.nextafter),
    "neg": lax.neg,
    "abs": lax.abs,
    "sign": lax.sign,
    "floor": lax.floor,
    "ceil": lax.ceil,
    "round_even": _round(lax.RoundingMethod.TO_NEAREST_EVEN),
    "round_away": _round(lax.RoundingMethod.AWAY_FROM_ZERO),
    "square": lambda x: x * x,
    "sqrt": lax.sqrt,
    "rsqrt": lax.rsqrt,
    "cbrt": lax.cbrt,
    "exp": lax.exp,
    "exp2": lax.exp2,
    "expm1": lax.expm1,
    "log": lax.log,
    "log1p": lax.log1p,
    "sin": lax.sin,
    "cos": lax.cos,
    "tan": lax.tan,
    "asin": lax.asin,
    "acos": lax.acos,
    "atan": lax.atan,
    "sinh": lax.sinh,
    "cosh": lax.cosh,
    "tanh": lax.tanh,
    "asinh": lax.asinh,
    "acosh": lax.acosh,
    "atanh": lax.atanh,
    "logistic": lax.logistic,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erf_inv": lax.erf_inv,
    "is_finite": lax.is_finite,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "shift_left": _shift_left,
    "shift_right": _shift_right,
}

REDUCTIONS: dict[str, Function] = {
    "sum": lambda x, axes: jnp.sum(x, axis=axes, dtype=x.dtype),
    "prod": lambda x, axes: jnp.prod(x, axis=axes, dtype=x.dtype),
    "max": lambda x, axes: jnp.max(x, axis=axes),
    "min": lambda x, axes: jnp.min(x, axis=axes),
    "and": lambda x, axes: jnp.all(x, axis=axes),
    "or": lambda x, axes: jnp.any(x, axis=axes),
}


def select(predicate: Any, on_true: Any, on_false: Any) -> Any:
    """`on_true` where `predicate` holds, all three broadcast."""
    shape = jnp.broadcast_shapes(jnp.shape(predicate), jnp.shape(on_true), jnp.shape(on_false))
    return lax.select(*(jnp.broadcast_to(x, shape) for x in (predicate, on_true, on_false)))


def dot_precision(name: str | None) -> Any:
    """The `precision` argument of a product: a sum of products that is no contraction keeps full precision."""
    if name is None:
        return "highest"
    both = tuple(n.lower() if n in ("DEFAULT", "HIGH", "HIGHEST") else n for n in name.split(","))
    return both[0] if len(both) == 1 else both
