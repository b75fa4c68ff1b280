"""Elementwise functions of one array, by name: what an emitter must compute, or leave to XLA."""

import jax
import jax.numpy as jnp
from jax import lax

_OF_LAX = """
neg abs sign floor ceil round square sqrt rsqrt cbrt exp exp2 expm1 log log1p sin cos tan asin acos atan sinh cosh tanh
asinh acosh atanh logistic erf erfc erf_inv
"""

ELEMENTWISE = {name: getattr(lax, name) for name in _OF_LAX.split()} | {
    "round to even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "cube": lambda x: x**3,
    "inverse square": lambda x: x**-2,
    "is finite": lambda x: jnp.where(jnp.isfinite(x), x, 0),
    "divide": lambda x: x / (x + 3),
    "remainder": lambda x: lax.rem(x, x + 3),
    "power": lambda x: lax.pow(x, x + 3),
    "atan2": lambda x: lax.atan2(x, x + 3),
    "next after": lambda x: lax.nextafter(x, x + 3),
    "logical": lambda x: jnp.where(~(x < 0) & (x < 3) | (x > 5) ^ (x > 7), x, 0),
    "clip": lambda x: jnp.clip(x, -1, 1),
    "gelu": jax.nn.gelu,
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
}
