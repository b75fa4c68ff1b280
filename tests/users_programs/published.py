"""Layers as the repositories of published models have them: vision, proteins, tags, caches that wrap around."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.users_programs.registry import F32, I32, Programs

PROGRAMS = Programs()
program = PROGRAMS.register


@program((2, 12, 4), (2, 12, 4), (2, 12, 4), (7, 4), (5, 4))
def attention_with_a_bias_of_rows_and_of_columns(q, k, v, of_rows, of_columns):
    height, width = 4, 3
    scores = (q * 4**-0.5) @ k.swapaxes(-1, -2)
    rows = of_rows[np.arange(height)[:, None] - np.arange(height) + height - 1]
    columns = of_columns[np.arange(width)[:, None] - np.arange(width) + width - 1]
    pixels = q.reshape(2, height, width, 4)
    along, across = jnp.einsum("hijd,ikd->hijk", pixels, rows), jnp.einsum("hijd,jkd->hijk", pixels, columns)
    scores = scores.reshape(2, height, width, height, width) + along[..., :, None] + across[..., None, :]
    return jax.nn.softmax(scores.reshape(2, 12, 12), -1) @ v


@program((9, 2, 4), (9, 2, 4), (9, 2, 4), (9, 2, 4), (2, 4), (2, 4))
def attention_with_shifted_relative_scores(q, k, v, r, of_content, of_position):
    content = jnp.einsum("ihd,jhd->hij", q + of_content, k)
    position = jnp.einsum("ihd,jhd->hij", q + of_position, r)
    position = jnp.pad(position, ((0, 0), (0, 0), (1, 0))).reshape(2, 10, 9)[:, 1:].reshape(2, 9, 9)
    scores = jnp.where(jnp.tril(jnp.ones((9, 9), bool)), (content + position) * 0.5, -1e30)
    return jnp.einsum("hij,jhd->ihd", jax.nn.softmax(scores, -1), v)


@program((11, 2, 4), (11, 2, 4), (11, 2, 4), (8, 4))
def attention_by_positive_random_features(q, k, v, features):
    def mapped(x, largest_over):
        projected = jnp.einsum("thd,md->thm", x * 4**-0.25, features)
        half = jnp.sum((x * 4**-0.25) ** 2, -1, keepdims=True) / 2
        return jnp.exp(projected - half - jnp.max(projected, largest_over, keepdims=True)) + 1e-6

    of_queries, of_keys = mapped(q, -1), mapped(k, (0, 2))
    state, total = jnp.einsum("thm,thd->hmd", of_keys, v), of_keys.sum(0)
    return jnp.einsum("thm,hmd->thd", of_queries, state) / jnp.einsum("thm,hm->th", of_queries, total)[..., None]


@program((11, 2, 8), (11, 2, 8), (11, 2, 8), (4,), (4,), (8,))
def difference_of_two_attentions(q, k, v, first, second, g):
    scores = jnp.einsum("thcd,shcd->hcts", q.reshape(11, 2, 2, 4), k.reshape(11, 2, 2, 4)) * 0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((11, 11), bool)), scores, -jnp.inf), -1)
    out = jnp.einsum("hts,shd->thd", weights[:, 0] - (jnp.exp(jnp.sum(first * second)) - 0.2) * weights[:, 1], v)
    return out * lax.rsqrt(jnp.mean(out * out, -1, keepdims=True) + 1e-5) * g


@program((4, 8), (1, 2, 8), (1, 2, 8), (13, 2, 8), (13, 2, 8), ((), I32))
def attention_to_a_cache_that_wraps_around(q, k, v, keys, values, position):
    at = lax.rem(position + 9, 13)
    keys, values = lax.dynamic_update_slice(keys, k, (at, 0, 0)), lax.dynamic_update_slice(values, v, (at, 0, 0))
    age = lax.rem(at + 13 - jnp.arange(13), 13)
    scores = jnp.einsum("kgd,skd->kgs", q.reshape(2, 2, 8), keys) * 8**-0.5
    scores = jnp.where(age <= jnp.minimum(position + 9, 12), scores, -1e30)
    return jnp.einsum("kgs,skd->kgd", jax.nn.softmax(scores, -1), values), keys, values


@program((9, 4), (9, 4), ((9, 9), F32), (4, 4), (4, 4), (4, 4), (4, 2), (4, 2))
def pair_update_of_incoming_edges(x, gate, mask, left, right, out, to_bias, to_value):
    pair = x[:, None] * gate[None]
    normed = (pair - pair.mean(-1, keepdims=True)) * lax.rsqrt(pair.var(-1, keepdims=True) + 1e-5)
    a, b = jax.nn.sigmoid(normed @ left) * mask[..., None], (normed @ right) * mask[..., None]
    pair = pair + jnp.einsum("ikc,jkc->ijc", a, b) @ out
    return jnp.einsum("ijh,jkh->ikh", jax.nn.softmax(pair @ to_bias, 1), pair @ to_value)


@program((2, 5, 4), (4, 4), ((2, 4), F32))
def step_of_a_chain_of_tags(emissions, transitions, score):
    def step(score, emission):
        return jax.nn.logsumexp(score[:, :, None] + transitions, 1) + emission, None

    return jax.nn.logsumexp(lax.scan(step, score, emissions.swapaxes(0, 1))[0], -1)
