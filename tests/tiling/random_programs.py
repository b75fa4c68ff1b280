"""Functions for random schedule trees: extents are small and odd, so that tiles seldom divide them."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from tests.programs_by_name import PROGRAMS
from tests.tiling.tree_programs import Subject


def chain_of_three(a, b, c, d):
    return ((a @ b) @ c) @ d


def masked_products(q, k, v):
    i, j = jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])[None, :]
    return jnp.where((j <= i + 3) & (j > i - 4), q @ k.T, 0) @ v


def decayed_products(q, k, v):
    i, j = jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])[None, :]
    return jnp.where(j <= i, (q @ k.T) * jnp.exp((j - i) * 0.125), 0) @ v


def product_of_masked_columns(q, k, v):
    """The values have a mask along their own columns: later keys see fewer."""
    s = q @ k.T
    j, d = jnp.arange(v.shape[0])[:, None], jnp.arange(v.shape[1])[None, :]
    return jax.nn.softmax(s, -1) @ jnp.where(d >= j, v, 0)


def moments(x):
    return jnp.mean(x, -1), jnp.var(x, -1)


def batched_chain(a, b, c):
    return jnp.einsum("zij,zjk,zkl->zil", a, b, c)


def products_of_norms(x, g, w, v):
    n = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 0.125) * g
    return jax.nn.sigmoid(n @ w) * (n @ v)


def sum_of_two_axes(x):
    return jnp.sum(jnp.exp(x - jnp.max(x, (1, 2), keepdims=True)), (1, 2))


def low_rank(x, w, a, b):
    return x @ w + (x @ a) @ b


def positive_products(x, y):
    """Sums of terms that are not zero where their operands are."""
    return jnp.sum(jnp.sum(jnp.exp(x[:, :, None] + y[None]), 1), -1)


NAMED = [n for n in PROGRAMS if n not in ("half_attention", "quantized")]
SUBJECTS = {n: Subject(PROGRAMS[n].function, PROGRAMS[n].shapes, "") for n in NAMED} | {
    "chain": Subject(lambda a, b, c: a @ b @ c, ((7, 5), (5, 13), (13, 6)), ""),
    "chain of three": Subject(chain_of_three, ((7, 5), (5, 9), (9, 4), (4, 11)), ""),
    "batched chain": Subject(batched_chain, ((2, 7, 5), (2, 5, 9), (2, 9, 6)), ""),
    "masked products": Subject(masked_products, ((13, 5), (13, 5), (13, 6)), ""),
    "decayed products": Subject(decayed_products, ((13, 5), (13, 5), (13, 6)), ""),
    "masked columns": Subject(product_of_masked_columns, ((7, 5), (13, 5), (13, 11)), ""),
    "moments": Subject(moments, ((7, 29),), ""),
    "products of norms": Subject(products_of_norms, ((7, 13), (13,), (13, 9), (13, 9)), ""),
    "two reduced axes": Subject(sum_of_two_axes, ((3, 5, 7),), ""),
    "low rank": Subject(low_rank, ((5, 13), (13, 9), (13, 3), (3, 9)), ""),
    "positive products": Subject(positive_products, ((5, 7), (7, 9)), ""),
}


def short(subject: Subject) -> Subject:
    """The same function of shorter arguments: a proof needs as many tests as there are exponents."""
    shapes = tuple(tuple(n if n < 4 else 3 + (n > 6) + (n > 12) for n in shape) for shape in subject.shapes)
    return replace(subject, shapes=shapes)
