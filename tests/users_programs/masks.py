"""Attention with masks that are computed from positions, labels and documents."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.users_programs.registry import BOOL, I32, Programs

PROGRAMS = Programs()
program = PROGRAMS.register


def _masked(q, k, v, mask):
    scores = jnp.where(mask, q @ k.T / np.sqrt(q.shape[-1]), -jnp.inf)
    return jax.nn.softmax(scores, axis=-1) @ v


def _positions(q, k):
    return jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])[None, :]


SHORT = ((24, 8), (24, 8), (24, 8))


@program(*SHORT)
def attention_within_blocks(q, k, v):
    i, j = _positions(q, k)
    return _masked(q, k, v, i // 4 == j // 4)


@program(*SHORT)
def dilated_attention(q, k, v):
    i, j = _positions(q, k)
    return _masked(q, k, v, ((i - j) % 3 == 0) & (j <= i))


@program(*SHORT)
def attention_in_a_window_and_to_sinks(q, k, v):
    i, j = _positions(q, k)
    return _masked(q, k, v, (j <= i) & ((i - j < 8) | (j < 2)))


@program(*SHORT, ((24,), I32))
def attention_with_a_prefix_of_each_row(q, k, v, prefix):
    i, j = _positions(q, k)
    return _masked(q, k, v, (j <= i) | (j < prefix[:, None]))


@program(*SHORT, ((24,), I32), ((24,), I32))
def attention_between_positions_that_are_given(q, k, v, q_position, k_position):
    distance = q_position[:, None] - k_position[None, :]
    return _masked(q, k, v, (distance >= 0) & (distance < 3))


@program(*SHORT, ((24,), BOOL), ((24,), BOOL))
def attention_with_two_masks(q, k, v, q_keep, k_keep):
    weights = jax.nn.softmax(jnp.where(q_keep[:, None] & k_keep, q @ k.T * 0.35, -1e9), -1)
    return jnp.where(q_keep[:, None], weights @ v, 0.0)


@program(*SHORT, ((24, 24), BOOL))
def attention_with_dropout(q, k, v, keep):
    weights = jax.nn.softmax(q @ k.T / jnp.sqrt(8.0), axis=-1)
    return jnp.where(keep, weights / 0.9, 0.0) @ v


@program(*SHORT)
def attention_with_one_more_in_the_sum(q, k, v):
    weights = jnp.exp(q @ k.T * 0.35)
    return weights / (1 + weights.sum(-1, keepdims=True)) @ v


@program(*SHORT)
def attention_of_chunks(q, k, v):
    q, k, v = (x.reshape(3, 8, 8) for x in (q, k, v))
    scores = jnp.einsum("cid,cjd->cij", q, k) / jnp.sqrt(8.0)
    return jnp.einsum("cij,cjd->cid", jax.nn.softmax(scores, -1), v).reshape(24, 8)


@program((24, 24), ((24,), I32))
def softmax_of_what_is_not_the_label(x, label):
    return jax.nn.softmax(jnp.where(jnp.arange(24) == label[:, None], -jnp.inf, x), axis=-1)
