"""Programs whose results a rounding can turn over: signs, thresholds, integers."""

import jax
import jax.numpy as jnp

from tests.users_programs.registry import BF16, F16, Programs

PROGRAMS = Programs()
program = PROGRAMS.register


@program(((12, 40), BF16))
def quantised_rows_of_bfloat16(x):
    scale = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
    return jnp.clip(jnp.round(x / scale), -128, 127).astype(jnp.int8)


@program(((24, 40), BF16))
def thresholds_in_bfloat16(x):
    p = jax.nn.softmax(x, -1)
    return jnp.where(p > 0.02, p, 0), jnp.argmax(p, -1), jnp.floor(4 * p / p.max(-1, keepdims=True))


@program(((24, 40), F16))
def signs_in_float16(x):
    x = x - x.mean(-1, keepdims=True)
    return jnp.sign(x), x > 0, jnp.round(3 * x / x.std(-1, keepdims=True))


@program((24, 40))
def signs_and_steps(x):
    x = x - x.mean(-1, keepdims=True)
    return jnp.sign(x), jnp.floor(x * 100), jnp.where(x > x.max(-1, keepdims=True) * 0.5, x, 0)


@program(((12, 40), BF16))
def quantised_and_back_in_bfloat16(x):
    x = x - x.mean(-1, keepdims=True)
    scale = x.std(-1, keepdims=True) / 9
    return jnp.round(x / scale) * scale, jnp.floor(x / scale), (x / scale).astype(jnp.int32)


@program(((24, 40), BF16))
def one_hot_of_the_largest_in_bfloat16(x):
    p = jax.nn.softmax(jnp.round(4 * x) / 4 / jnp.sqrt(jnp.bfloat16(3)), -1)
    return (p == p.max(-1, keepdims=True)).astype(x.dtype), jnp.sqrt(p.max(-1, keepdims=True) - p)


@program((24, 40))
def roots_of_differences_of_equal_numbers(x):
    y = x - x.mean(-1, keepdims=True) + x.mean(-1, keepdims=True)
    return jnp.sqrt(jnp.abs(y - x)).sum(-1), jnp.sqrt(
        jnp.maximum(jnp.var(x, -1) - (x * x).mean(-1) + x.mean(-1) ** 2, 0)
    )
