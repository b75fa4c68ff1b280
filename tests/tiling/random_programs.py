"""Functions for random schedule trees: extents are small and odd, so that tiles seldom divide them."""

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


def masked_twice(q, k, v):
    """Both masks fill in numbers, and the first row keeps nothing."""
    s = q @ k.T
    i, j = jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])[None, :]
    return jax.nn.softmax(jnp.where(j <= i, jnp.where(j >= 1, s, -1e9), -1e9), -1) @ v


def finite_causal(q, k, v):
    i, j = jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])[None, :]
    return jax.nn.softmax(jnp.where(j <= i, q @ k.T, -1e9), -1) @ v


def largest_above_the_diagonal(a, b):
    """Masks along both axes of a product: some columns keep nothing."""
    s = a @ b
    i, j = jnp.arange(s.shape[0])[:, None], jnp.arange(s.shape[1])[None, :]
    return jnp.max(jnp.where(j > i + 2, s, -1e9), 0)


def beside_masked_columns(q, k, v):
    """No output is the weighted sum itself."""
    o = jax.nn.softmax(q @ k.T, -1) @ v
    j, d = jnp.arange(v.shape[0])[:, None], jnp.arange(v.shape[1])[None, :]
    return jnp.sin(o) + jnp.where(d >= j, v, 0).sum(0)


def sum_of_the_first(x):
    t = jnp.sum(x * x, 1)
    return t, jnp.sum(jnp.where(jnp.arange(x.shape[0]) < 4, t, 0))


def sums_both_ways(x):
    return jnp.sum(x, 0), jnp.sum(x * x, 1)


def of_all_squares(x):
    return jnp.exp(0.0625 * jnp.sum(x * x, (1, 2)))


def exponentials_and_squares(x):
    return jnp.sum(jnp.exp(x), 1), jnp.max(x * x, 1)


def counts(x):
    """Integers: of positives, and of the last positions with one."""
    positive = x > 0
    j = jnp.arange(x.shape[1])
    return jnp.sum(positive.astype(jnp.int32), 1), jnp.max(jnp.where(positive, j, -1), 1)


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
    "masked twice": Subject(masked_twice, ((13, 5), (13, 5), (13, 6)), "", kept="t10"),
    "finite causal": Subject(finite_causal, ((13, 5), (13, 5), (13, 6)), "", kept="t9"),
    "above the diagonal": Subject(largest_above_the_diagonal, ((9, 5), (5, 13)), ""),
    "beside masked columns": Subject(beside_masked_columns, ((5, 5), (13, 5), (13, 9)), ""),
    "sum of the first": Subject(sum_of_the_first, ((13, 9),), ""),
    "sums both ways": Subject(sums_both_ways, ((8, 12),), ""),
    "a sum of two axes": Subject(of_all_squares, ((3, 8, 12),), ""),
    "exponentials and squares": Subject(exponentials_and_squares, ((8, 12),), ""),
    "counts": Subject(counts, ((7, 13),), ""),
    "positive products": Subject(positive_products, ((5, 7), (7, 9)), ""),
}
