"""Functions that a kernel for warpgroups must take alike: none is special."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Variant:
    """`function` of arrays with these shapes, after q [n, h, d], k [n, g, d], v [n, g, e]."""

    function: Any
    heads: tuple[int, int] = (2, 2)
    sizes: tuple[int, int] = (64, 64)
    queries: int = 160
    keys: int = 192
    more: tuple[tuple[tuple[int, ...], str], ...] = ()

    def arrays(self, dtype: str) -> list[jax.Array]:
        (h, g), (d, e) = self.heads, self.sizes
        shapes = [((self.queries, h, d), dtype), ((self.keys, g, d), dtype), ((self.keys, g, e), dtype)]
        shapes += [(s, t or dtype) for s, t in self.more]
        return [draw(n, shape, t) for n, (shape, t) in enumerate(shapes)]


def draw(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    random = np.random.default_rng(seed)  # JAX's generator is compiled for every shape
    if dtype == "bool":
        return jnp.asarray(random.random(shape) < 0.6)
    return jnp.asarray(random.standard_normal(shape), jnp.dtype(dtype))


def wide(x):
    """The type that products are accumulated in."""
    return jnp.promote_types(x.dtype, jnp.float32)


def scores(q, k):
    return jnp.einsum("ihd,jhd->hij", q, k, preferred_element_type=wide(q)) * q.shape[-1] ** -0.5


def weighted(s, v):
    p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
    return jnp.einsum("hij,jhd->ihd", p, v, preferred_element_type=wide(v)).astype(v.dtype)


def positions(s):
    return jnp.arange(s.shape[-2])[:, None], jnp.arange(s.shape[-1])


def plain(q, k, v):
    return weighted(scores(q, k), v)


def causal(q, k, v):
    s = scores(q, k)
    i, j = positions(s)
    return weighted(jnp.where(i >= j, s, -jnp.inf), v)


def window(q, k, v):
    s = scores(q, k)
    i, j = positions(s)
    return weighted(jnp.where((i >= j) & (i - j < 40), s, -jnp.inf), v)


def covered(q, k, v, fill=-1e9):
    """A finite mask that covers whole rows, from the first tile on."""
    s = scores(q, k)
    i, j = positions(s)
    return weighted(jnp.where((i >= j) & (i < 100), s, fill), v)


def deeply_covered(q, k, v):
    return covered(q, k, v, -1e30)


def capped(q, k, v):
    return weighted(20 * jnp.tanh(scores(q, k) / 20), v)


def by_distance(q, k, v):
    s = scores(q, k)
    i, j = positions(s)
    slope = 2.0 ** -(1.0 + jnp.arange(s.shape[0]))
    return weighted(jnp.where(i >= j, s + slope[:, None, None] * (j - i), -jnp.inf), v)


def by_absolute_distance(q, k, v):
    s = scores(q, k)
    i, j = positions(s)
    return weighted(s - 0.1 * jnp.abs(i - j), v), jnp.max(s, axis=-1)


def biased(q, k, v, bias):
    return weighted(scores(q, k) + bias, v)


def by_key(q, k, v, bias):
    return weighted(scores(q, k) + bias[:, None, :], v)


def by_row_and_head(q, k, v, row, head):
    return weighted(scores(q, k) * jnp.exp(row)[None, :, None] + head[:, None, None], v)


def masked(q, k, v, mask):
    return weighted(jnp.where(mask | jnp.eye(*mask.shape, dtype=bool), scores(q, k), -jnp.inf), v)


def covered_by_mask(q, k, v, mask):
    return weighted(jnp.where(mask, scores(q, k), -1e9), v)


def covered_by_rows_and_keys(q, k, v, rows, keys):
    """A mask of what is there, as for sequences that are filled up to the longest one."""
    return weighted(jnp.where((rows[:, None] & keys) != 0, scores(q, k), -1e9), v)


def gated(q, k, v, gate):
    return plain(q, k, v) * jax.nn.sigmoid(gate)


def with_log_sum(q, k, v):
    s = scores(q, k)
    return weighted(s, v), jax.nn.logsumexp(s, axis=-1)


def with_sum(q, k, v, bias):
    """The bias is read by ordinary instructions, after the last product."""
    s = jax.nn.relu(scores(q, k))
    out = jnp.einsum("hij,jhd->ihd", s.astype(v.dtype), v, preferred_element_type=wide(v))
    return out.astype(v.dtype), (s * bias).sum(-1)


def half_scores(q, k, v):
    """Scores, their maximum and their exponentials in the type of the operands, as modules that users write have them."""
    s = jnp.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("hij,jhd->ihd", jax.nn.softmax(s, axis=-1), v)


def half_causal(q, k, v):
    """The mask's value is finite and of that type."""
    s = jnp.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    i, j = positions(s)
    s = jnp.where(i >= j, s, jnp.finfo(s.dtype).min)
    return jnp.einsum("hij,jhd->ihd", jax.nn.softmax(s, axis=-1), v)


def squared(q, k, v):
    """No softmax at all: a sum of products of rectified scores, normalized by their sum."""
    s = jax.nn.relu(scores(q, k))
    out = jnp.einsum("hij,jhd->ihd", (s * s).astype(v.dtype), v, preferred_element_type=wide(v))
    return (out / (1 + jnp.sum(s * s, -1)).T[..., None]).astype(v.dtype)


def shared_keys(q, k, v):
    h, g = q.shape[1], k.shape[1]
    grouped = q.reshape(q.shape[0], g, h // g, q.shape[2])
    s = jnp.einsum("igrd,jgd->grij", grouped, k, preferred_element_type=wide(q)) * q.shape[-1] ** -0.5
    p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
    out = jnp.einsum("grij,jge->igre", p, v, preferred_element_type=wide(v))
    return out.reshape(q.shape[0], h, v.shape[2]).astype(v.dtype)


def two_products(q, k, v):
    """Scores from two products, of positions apart from contents."""
    half = q.shape[-1] // 2
    return weighted(scores(q[..., :half], k[..., :half]) * 0.5 + scores(q, k), v)


VARIANTS = {
    "plain": Variant(plain),
    "causal": Variant(causal, queries=192),
    "window": Variant(window, queries=192),
    "finite mask": Variant(covered, queries=192),
    "deep finite mask": Variant(deeply_covered, queries=192),
    "soft cap": Variant(capped),
    "bias by distance": Variant(by_distance, queries=192),
    "absolute distance": Variant(by_absolute_distance, queries=151),
    "bias": Variant(biased, more=(((2, 160, 192), ""),)),
    "odd bias": Variant(biased, queries=150, keys=149, more=(((2, 150, 149), ""),)),
    "odd features": Variant(plain, sizes=(61, 64)),
    "bias by key": Variant(by_key, more=(((2, 192), "float32"),)),
    "row and head": Variant(by_row_and_head, more=(((160,), "float32"), ((2,), "float32"))),
    "mask": Variant(masked, more=(((160, 192), "bool"),)),
    "odd mask": Variant(masked, queries=150, keys=149, more=(((150, 149), "bool"),)),
    "mask by head": Variant(covered_by_mask, more=(((2, 160, 192), "bool"),)),
    "mask by key": Variant(covered_by_mask, keys=256, more=(((256,), "bool"),)),
    "mask by row and key": Variant(covered_by_rows_and_keys, queries=256, more=(((256,), "bool"), ((192,), "bool"))),
    "gate": Variant(gated, more=(((160, 2, 64), ""),)),
    "log sum": Variant(with_log_sum),
    "sum of biased": Variant(with_sum, more=(((2, 160, 192), ""),)),
    "half scores": Variant(half_scores),
    "half causal": Variant(half_causal, queries=192),
    "squared": Variant(squared),
    "shared keys": Variant(shared_keys, heads=(4, 2)),
    "two products": Variant(two_products),
    "head dimension 80": Variant(plain, sizes=(80, 80)),
    "keys 192, values 128": Variant(plain, heads=(1, 1), sizes=(192, 128)),
    "odd lengths": Variant(causal, queries=150, keys=150),
    "few": Variant(causal, queries=40, keys=40),
}
