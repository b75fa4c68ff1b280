"""Norms of rows, groups and batches, and rows that are scaled by a statistic of their own."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.users_programs.registry import BF16, Programs

PROGRAMS = Programs()
program = PROGRAMS.register


@program((12, 40), (40,), (40,))
def layer_norm(x, g, b):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + b


@program((12, 40), (40,))
def root_mean_square_norm(x, g):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * (1 + g)


@program((12, 40), (40,))
def root_mean_square_norm_by_a_power(x, g):
    return x * (jnp.mean(x**2, -1, keepdims=True) + 1e-6) ** -0.5 * g


@program((12, 40), (40, 7))
def norm_before_a_product(x, w):
    return (x / jnp.linalg.norm(x, axis=-1, keepdims=True) * jnp.sqrt(40.0)) @ w


@program((3, 6, 6, 8), (8,), (8,))
def group_norm(x, g, b):
    groups = x.reshape(3, 36, 4, 2)
    mean = groups.mean((1, 3), keepdims=True)
    variance = groups.var((1, 3), keepdims=True)
    return ((groups - mean) * lax.rsqrt(variance + 1e-6)).reshape(x.shape) * g + b


@program((3, 6, 6, 8))
def instance_norm(x):
    return (x - x.mean((1, 2), keepdims=True)) / (x.std((1, 2), keepdims=True) + 1e-5)


@program((24, 8), (8,), (8,))
def batch_norm(x, g, b):
    mean, variance = x.mean(0), x.var(0)
    return (x - mean) * lax.rsqrt(variance + 1e-3) * g + b, 0.9 * mean + 0.1, 0.99 * variance


@program((12, 23))
def standard_score(x):
    return (x - x.mean(-1, keepdims=True)) / x.std(-1, ddof=1, keepdims=True)


@program((12, 23))
def variance_with_a_correction(x):
    return jnp.var(x, -1, ddof=1)


@program((12, 23))
def unit_rows(x):
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


@program((12, 23))
def unit_rows_by_a_root(x):
    return x * lax.rsqrt(jnp.maximum(jnp.sum(x * x, -1, keepdims=True), 1e-12))


@program((12, 23))
def rows_by_their_largest(x):
    return x / jnp.max(jnp.abs(x), -1, keepdims=True)


@program((12, 23))
def rows_by_their_absolute_sum(x):
    return x / jnp.sum(jnp.abs(x), -1, keepdims=True)


@program((12, 23))
def rows_between_zero_and_one(x):
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    return (x - low) / (high - low + 1e-8)


@program((12, 40))
def quantised_rows(x):
    scale = jnp.max(jnp.abs(x), -1, keepdims=True) / 127.0
    return jnp.clip(jnp.round(x / scale), -128, 127).astype(jnp.int8), scale


@program((12, 40), (40, 16), (16,))
def norm_then_gated_product(x, w, b):
    y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    a, c = jnp.split(y @ w + b, 2, axis=-1)
    return jax.nn.silu(a) * c


@program(((12, 40), BF16), ((40,), BF16))
def norm_of_bfloat16_in_float32(x, g):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(jnp.bfloat16) * g


@program((12, 17))
def norm_scaled_by_the_root_of_an_odd_size(x):
    return x * lax.rsqrt(17.0 * jnp.mean(x * x, -1, keepdims=True))


@program((12, 23))
def root_of_a_scaled_sum(x):
    return jnp.sqrt(23.0 * jnp.sum(x * x, -1)) + jnp.sqrt(3.1) * jnp.abs(x).max(-1)
