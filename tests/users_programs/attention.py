"""Attention as users write it: scales, masks, biases, caches and element types."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.users_programs.registry import BF16, BOOL, F16, I8, I32, Programs

PROGRAMS = Programs()
program = PROGRAMS.register


def _attend(q, k, v, bias=0.0, where=None):
    scores = jnp.einsum("hid,hjd->hij", q, k) / jnp.sqrt(q.shape[-1]) + bias
    weights = jax.nn.softmax(scores, axis=-1, where=where)
    return jnp.einsum("hij,hjd->hid", weights, v)


QKV = ((2, 12, 8), (2, 20, 8), (2, 20, 8))


@program((12, 32), (20, 32), (20, 8))
def attention_divided_by_the_root_of_a_literal(q, k, v):
    return jax.nn.softmax(q @ k.T / jnp.sqrt(32.0), axis=-1) @ v


@program((12, 17), (20, 17), (20, 8))
def attention_divided_by_the_root_of_an_odd_size(q, k, v):
    return jax.nn.softmax(q @ k.T / jnp.sqrt(17.0), axis=-1) @ v


@program((12, 7), (20, 7), (20, 8))
def attention_scaled_by_a_number_of_numpy(q, k, v):
    return jax.nn.softmax(q @ k.T * np.float32(1 / np.sqrt(7)), axis=-1) @ v


@program((12, 24), (20, 24), (20, 8))
def attention_with_both_operands_scaled(q, k, v):
    scale = q.shape[-1] ** -0.25
    return jax.nn.softmax((q * scale) @ (k * scale).T, axis=-1) @ v


@program(*QKV)
def attention_divided_by_the_root_of_an_integer(q, k, v):
    return _attend(q, k, v)


@program(*QKV)
def causal_attention_with_a_finite_fill(q, k, v):
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    scores = jnp.where(j <= i + 8, jnp.einsum("hid,hjd->hij", q, k) * 0.125, -1e9)
    return jax.nn.softmax(scores, axis=-1) @ v


@program(*QKV)
def causal_attention_filled_with_the_least_number(q, k, v):
    mask = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool), 8)
    scores = jnp.einsum("hid,hjd->hij", q, k) / np.sqrt(8)
    return jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), axis=-1) @ v


@program(*QKV, ((12,), I32), ((20,), I32))
def attention_within_segments_of_queries_and_keys(q, k, v, q_segment, k_segment):
    same = q_segment[:, None] == k_segment[None, :]
    scores = jnp.where(same, jnp.einsum("hid,hjd->hij", q, k) / jnp.sqrt(8.0), -1e30)
    return jax.nn.softmax(scores, axis=-1) @ v


@program((2, 20, 8), (2, 20, 8), (2, 20, 8), ((20,), I32))
def attention_within_segments(q, k, v, segment):
    scores = jnp.einsum("hid,hjd->hij", q, k) * 8**-0.5
    i = jnp.arange(20)
    mask = (segment[:, None] == segment[None, :]) & (i[None, :] <= i[:, None])
    return jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1) @ v


@program((20, 16), ((20,), I32), ((6,), I32))
def softmax_within_documents_looked_up(x, token, document_of):
    document = document_of[token]
    return jax.nn.softmax(jnp.where(document[:, None] == document[None, :], x @ x.T, -1e30), axis=-1)


@program(*QKV, ((2, 12, 20), BOOL))
def attention_with_a_boolean_mask(q, k, v, mask):
    return _attend(q, k, v, where=mask)


@program(*QKV, ((20,), BOOL))
def attention_with_padding(q, k, v, keep):
    bias = jnp.where(keep, 0.0, -1e10)[None, None, :]
    return _attend(q, k, v, bias)


@program(*QKV, ((2,), I32))
def attention_up_to_a_length(q, k, v, length):
    mask = jnp.arange(k.shape[1])[None, None, :] < (length * 5 + 1)[:, None, None]
    return _attend(q, k, v, where=mask)


@program(*QKV)
def attention_with_a_soft_cap(q, k, v):
    scores = jnp.einsum("hid,hjd->hij", q, k) * 8**-0.5
    return jax.nn.softmax(30.0 * jnp.tanh(scores / 30.0), axis=-1) @ v


@program(*QKV)
def attention_with_an_odd_soft_cap(q, k, v):
    scores = jnp.einsum("hid,hjd->hij", q, k) * 8**-0.5
    return jax.nn.softmax(23.0 * jnp.tanh(scores / 23.0), axis=-1) @ v


@program(*QKV)
def attention_with_slopes(q, k, v):
    slopes = 2.0 ** (-8.0 * (jnp.arange(2) + 1) / 2)
    distance = jnp.arange(k.shape[1])[None, :] - jnp.arange(q.shape[1])[:, None]
    return _attend(q, k, v, slopes[:, None, None] * distance)


@program(*QKV, (2, 32))
def attention_with_relative_bias_from_a_table(q, k, v, table):
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None, :]
    return _attend(q, k, v, table[:, distance + 19])


@program(*QKV, (2, 8))
def attention_with_bucketed_bias(q, k, v, table):
    distance = jnp.abs(jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None, :])
    far = 4 + (jnp.log(jnp.maximum(distance, 1) / 4) / jnp.log(32 / 4) * 4).astype(jnp.int32)
    bucket = jnp.where(distance < 4, distance, jnp.minimum(far, 7))
    return _attend(q, k, v, table[:, bucket])


@program(*QKV, (2,))
def attention_with_a_sink(q, k, v, sink):
    scores = jnp.einsum("hid,hjd->hij", q, k) / jnp.sqrt(8.0)
    largest = jnp.maximum(jnp.max(scores, -1), sink[:, None])
    weights = jnp.exp(scores - largest[..., None])
    total = weights.sum(-1) + jnp.exp(sink[:, None] - largest)
    return jnp.einsum("hij,hjd->hid", weights / total[..., None], v)


@program((2, 12, 8), (2, 20, 8), (2, 20, 8), (8,), (8,))
def attention_with_normalised_queries_and_keys(q, k, v, gq, gk):
    def norm(x, g):
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * g

    return _attend(norm(q, gq), norm(k, gk), v)


@program(*QKV)
def cosine_attention(q, k, v):
    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    return jax.nn.softmax(jnp.einsum("hid,hjd->hij", unit(q), unit(k)) * 10.0, axis=-1) @ v


def rotate(x, base=10000.0):
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[-2])[:, None] / base ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


@program(*QKV)
def rotary_attention(q, k, v):
    return _attend(rotate(q), rotate(k), v)


@program((12, 8), (12, 4), (12, 4))
def rotary_embedding_of_pairs(x, cos, sin):
    a, b = x[:, 0::2], x[:, 1::2]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)


@program((8, 12, 8), (2, 20, 8), (2, 20, 8))
def attention_of_grouped_heads(q, k, v):
    scores = jnp.einsum("ghid,gjd->ghij", q.reshape(2, 4, 12, 8), k) * 8**-0.5
    return jnp.einsum("ghij,gjd->ghid", jax.nn.softmax(scores, -1), v).reshape(8, 12, 8)


@program((4, 8), (4, 5, 4, 8), (4, 5, 4, 8), ((4, 3), I32), ((4,), I32))
def attention_over_pages(q, k_pages, v_pages, table, length):
    k, v = (jnp.take_along_axis(p, table[:, :, None, None], 1).reshape(4, 12, 8) for p in (k_pages, v_pages))
    scores = jnp.einsum("bd,bjd->bj", q, k) * 8**-0.5
    weights = jax.nn.softmax(jnp.where(jnp.arange(12) <= length[:, None], scores, -1e30), axis=-1)
    return jnp.einsum("bj,bjd->bd", weights, v)


@program((1, 8), (40, 8), (40, 8), ((), I32))
def attention_of_one_query_to_a_cache(q, k, v, length):
    scores = jnp.where(jnp.arange(40) <= length * 9, q @ k.T / jnp.sqrt(8.0), -jnp.inf)
    return jax.nn.softmax(scores, axis=-1) @ v


@program((12, 8), ((20, 8), I8), ((20, 8), I8), (20,), (20,))
def attention_to_a_quantised_cache(q, k, v, k_scale, v_scale):
    keys, values = (x.astype(jnp.float32) * s[:, None] / 127.0 for x, s in ((k, k_scale), (v, v_scale)))
    return jax.nn.softmax(q @ keys.T * 8**-0.5, axis=-1) @ values


@program(*QKV)
def attention_mapped_over_heads(q, k, v):
    return jax.vmap(lambda q, k, v: jax.nn.softmax(q @ k.T / jnp.sqrt(8.0), -1) @ v)(q, k, v)


@program(((12, 8), BF16), ((20, 8), BF16), ((20, 8), BF16))
def attention_in_bfloat16_with_scores_in_float32(q, k, v):
    scores = jnp.einsum("id,jd->ij", q, k, preferred_element_type=jnp.float32) / jnp.sqrt(40.0)
    return jax.nn.softmax(scores, axis=-1).astype(jnp.bfloat16) @ v


@program(((12, 40), BF16), ((20, 40), BF16), ((20, 8), BF16))
def attention_in_bfloat16(q, k, v):
    return jax.nn.softmax(q @ k.T / jnp.sqrt(jnp.array(40, jnp.bfloat16)), axis=-1) @ v


@program(((12, 8), F16), ((20, 8), F16), ((20, 8), F16))
def attention_in_float16(q, k, v):
    return jax.nn.softmax((q @ k.T).astype(jnp.float32) * 0.35355339, axis=-1).astype(jnp.float16) @ v


@program((2, 12, 8), (2, 12, 8), (2, 12, 8), (2, 12, 12), ((2, 12), BOOL))
def pair_attention(q, k, v, bias, keep):
    scores = jnp.einsum("hid,hjd->hij", q, k) / jnp.sqrt(8.0) + bias
    weights = jax.nn.softmax(jnp.where(keep[:, None, :], scores, -1e9), -1)
    return weights @ v


@program((12, 8), (12, 8), (12, 8))
def attention_with_decay(q, k, v):
    i, j = jnp.arange(12)[:, None], jnp.arange(12)
    decay = jnp.where(i >= j, jnp.exp((i - j) * jnp.log(0.9)), 0.0)
    scores = q @ k.T * decay
    return scores / jnp.maximum(jnp.abs(scores.sum(-1, keepdims=True)), 1.0) @ v


@program((12, 8), (12, 8), (12, 8))
def attention_scaled_by_the_logarithm_of_the_length(q, k, v):
    temperature = jnp.log(jnp.arange(12) + 2.0) / jnp.log(512.0)
    return jax.nn.softmax(q @ k.T * temperature[:, None] * 8**-0.5, axis=-1) @ v


@program((12, 8), (12, 8), (12, 8))
def linear_attention(q, k, v):
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    return q @ (k.T @ v) / (q @ k.sum(0))[:, None]


@program((12, 16), (20, 16), (20, 8))
def attention_with_products_of_roots(q, k, v):
    return jax.nn.softmax(q @ k.T / (jnp.sqrt(2.0) * jnp.sqrt(8.0)), axis=-1) @ v


@program((12, 16), (20, 16), (20, 8), ())
def attention_with_a_learned_temperature(q, k, v, t):
    return jax.nn.softmax(q @ k.T * jnp.minimum(jnp.exp(t), 100.0), axis=-1) @ v


@program((12, 16), (20, 16), (20, 8))
def sigmoid_attention(q, k, v):
    return jax.nn.sigmoid(q @ k.T / 4.0 - jnp.log(20.0)) @ v
