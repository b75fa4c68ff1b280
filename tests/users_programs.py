"""Programs as users write them, at small shapes: what `pallasfuse.verify` must not cry wolf over.

Each takes arrays whose shapes and types are given beside it; integers are drawn between 0 and `_LARGEST`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import lax

type Shape = tuple[int, ...]

F32, F16, BF16, I32, I8, BOOL = "float32", "float16", "bfloat16", "int32", "int8", "bool"
_LARGEST = 4


@dataclass(frozen=True)
class Program:
    """A function, and the shapes and types of its arguments."""

    function: Callable[..., Any]
    arguments: tuple[tuple[Shape, str], ...]

    def arrays(self, seed: int = 0) -> list[np.ndarray[Any, Any]]:
        random = np.random.default_rng(seed)
        return [_drawn(random, shape, dtype) for shape, dtype in self.arguments]


def _drawn(random: np.random.Generator, shape: Shape, dtype: str) -> np.ndarray[Any, Any]:
    if dtype == BOOL:
        return random.random(shape) < 0.7
    if dtype == I8:
        return random.integers(-127, 128, shape).astype(np.int8)
    if dtype == "uint8":
        return random.integers(0, 256, shape).astype(np.uint8)
    if dtype == I32:
        return random.integers(0, _LARGEST, shape).astype(np.int32)
    return random.normal(size=shape).astype(jnp.dtype(dtype))


PROGRAMS: dict[str, Program] = {}


def program(*arguments: Shape | tuple[Shape, str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function. An argument is a shape (float32) or a shape and a type."""
    full = tuple((a[0], a[1]) if a and isinstance(a[0], tuple) else (a, F32) for a in arguments)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[function.__name__] = Program(function, full)  # type: ignore[arg-type]
        return function

    return register


# --- attention


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


def _rotate(x, base=10000.0):
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[-2])[:, None] / base ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


@program(*QKV)
def rotary_attention(q, k, v):
    return _attend(_rotate(q), _rotate(k), v)


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


# --- norms


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


# --- activations and products with epilogues


@program((12, 16), (16, 20), (20,))
def gelu_by_erf_after_a_product(x, w, b):
    return jax.nn.gelu(x @ w + b, approximate=False)


@program((12, 16), (16, 20), (20,))
def gelu_by_tanh_after_a_product(x, w, b):
    return jax.nn.gelu(x @ w + b, approximate=True)


@program((12, 40))
def softmax_of_gelu(x):
    return jax.nn.softmax(0.5 * x * (1 + lax.erf(x / jnp.sqrt(2.0))), axis=-1)


@program((12, 40))
def softmax_of_gelu_by_tanh(x):
    inner = jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)
    return jax.nn.softmax(0.5 * x * (1 + jnp.tanh(inner)), axis=-1)


@program((12, 40))
def sums_of_activations(x):
    return sum(f(x).sum(-1) for f in (jax.nn.softplus, jax.nn.silu, jax.nn.leaky_relu, jax.nn.elu, jax.nn.hard_swish,
                                      jax.nn.mish, jax.nn.relu6, jax.nn.selu))  # fmt: skip


@program((12, 16), (16, 40), (16, 40), (40, 16))
def gated_mlp(x, w, u, v):
    return (jax.nn.silu(x @ w) * (x @ u)) @ v


@program((12, 16), (16, 4), (4, 16), (16, 16))
def adapter(x, a, b, w):
    return x @ w + (x @ a @ b) * (32.0 / 4)


# --- losses


@program((12, 40), ((12,), I32))
def cross_entropy_with_labels(logits, label):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], axis=-1))


@program((12, 40), ((12,), I32))
def cross_entropy_one_hot(logits, label):
    return -(jax.nn.one_hot(label, 40) * jax.nn.log_softmax(logits)).sum(-1).mean()


@program((12, 40), ((12,), I32), ((12,), BOOL))
def cross_entropy_smoothed_and_masked(logits, label, keep):
    log_p = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_p, label[:, None], -1)[:, 0]
    loss = -(0.9 * picked + 0.1 * log_p.mean(-1))
    return jnp.sum(jnp.where(keep, loss, 0.0)) / jnp.maximum(keep.sum(), 1)


@program((12, 16), (16, 40), ((12,), I32))
def cross_entropy_of_a_product_with_a_cap(x, w, label):
    logits = 30.0 * jnp.tanh(x @ w / 30.0)
    return (jax.nn.logsumexp(logits, -1) - logits[jnp.arange(12), label]).mean()


@program((12, 40), ((12,), I32))
def cross_entropy_with_a_penalty(logits, label):
    z = jax.nn.logsumexp(logits, axis=-1)
    return (z - jnp.take_along_axis(logits, label[:, None], -1)[:, 0] + 1e-4 * z**2).mean()


@program((12, 40), ((12,), I32))
def focal_loss(logits, label):
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], -1)[:, 0]
    return -((1 - jnp.exp(log_p)) ** 2.0 * log_p).mean()


@program((12, 40), (12, 40))
def binary_cross_entropy(x, y):
    return jnp.mean(jnp.maximum(x, 0) - x * y + jnp.log1p(jnp.exp(-jnp.abs(x))), axis=-1)


@program((12, 40), (12, 40))
def divergence_of_two_softmaxes(x, y):
    p, log_q = jax.nn.softmax(x / 2.0), jax.nn.log_softmax(y / 2.0)
    return jnp.sum(p * (jnp.log(p) - log_q), -1) * 4.0


@program((12, 40))
def perplexity(x):
    log_p = jax.nn.log_softmax(x)
    return jnp.exp2(-(jnp.exp(log_p) * log_p).sum(-1) / jnp.log(2.0))


@program((12, 16), (12, 16))
def contrastive_loss(a, b):
    a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
    logits = a @ b.T / 0.07
    diagonal = jnp.diagonal(logits)
    return ((jax.nn.logsumexp(logits, -1) + jax.nn.logsumexp(logits, 0)) / 2 - diagonal).mean()


@program((12, 16), (12, 16), (), ())
def sigmoid_contrastive_loss(a, b, t, bias):
    logits = a @ b.T * jnp.exp(t) + bias
    return -jax.nn.log_sigmoid(logits * (2 * jnp.eye(12) - 1)).sum(-1).mean()


@program((12, 16), ((12,), I32))
def supervised_contrastive_loss(x, label):
    x = x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-8)
    scores = jnp.where(jnp.eye(12, dtype=bool), -1e9, x @ x.T / 0.1)
    same = (label[:, None] == label[None, :]) & ~jnp.eye(12, dtype=bool)
    log_p = scores - jax.nn.logsumexp(scores, -1, keepdims=True)
    return -(jnp.where(same, log_p, 0.0).sum(-1) / jnp.maximum(same.sum(-1), 1)).mean()


@program((12, 40), (12, 40))
def huber_loss(x, y):
    error = jnp.abs(x - y)
    return jnp.where(error < 1.0, 0.5 * error**2, error - 0.5).mean(-1)


@program((12, 16), (12, 16), (12, 16))
def triplet_loss(a, p, n):
    near, far = (jnp.sqrt(jnp.sum((a - x) ** 2, -1) + 1e-12) for x in (p, n))
    return jnp.maximum(near - far + 0.2, 0.0).mean()


@program((12, 30), (12, 30))
def correlation(x, y):
    x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
    return (x * y).sum(-1) / jnp.sqrt((x * x).sum(-1) * (y * y).sum(-1))


@program((12, 30), (12, 30))
def cosine_similarity(x, y):
    return (x * y).sum(-1) / (jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1) + 1e-8)


@program((6, 24, 8), (6, 24, 8))
def decibels(x, y):
    noise = jnp.sum((x - y) ** 2, (1, 2))
    return 10.0 * jnp.log10(jnp.sum(x * x, (1, 2)) / noise)


@program((12, 40), (12, 40))
def gaussian_likelihood(x, s):
    return -0.5 * jnp.sum(x**2 * jnp.exp(-2 * s) + 2 * s + jnp.log(2 * jnp.pi), -1)


@program((12, 8), (20, 8))
def mixture_likelihood(x, mean):
    distance = jnp.sum((x[:, None] - mean[None]) ** 2, -1)
    return jax.nn.logsumexp(-0.5 * distance - jnp.log(20.0) - 4 * jnp.log(2 * jnp.pi), axis=-1)


# --- clustering, transport, routing


@program((24, 8), (6, 8))
def soft_k_means(x, c):
    distance = (x * x).sum(-1)[:, None] - 2 * x @ c.T + (c * c).sum(-1)
    weight = jax.nn.softmax(-distance / 0.3, axis=-1)
    return weight.T @ x / weight.sum(0)[:, None]


@program((24, 8), (6, 8))
def nearest_centre(x, c):
    distance = jnp.sqrt(jnp.maximum((x * x).sum(-1)[:, None] - 2 * x @ c.T + (c * c).sum(-1), 0.0))
    return distance.min(-1), jnp.argmin(distance, -1)


@program((12, 20))
def sinkhorn(cost):
    u, v = jnp.zeros(12), jnp.zeros(20)
    for _ in range(2):
        u = -jax.nn.logsumexp(-cost / 0.1 + v[None, :], axis=1) - jnp.log(12.0)
        v = -jax.nn.logsumexp(-cost / 0.1 + u[:, None], axis=0) - jnp.log(20.0)
    return jnp.exp(-cost / 0.1 + u[:, None] + v[None, :])


@program((12, 20))
def sinkhorn_by_scaling(cost):
    kernel = jnp.exp(-cost / 0.05)
    u = jnp.ones(12) / 12
    for _ in range(2):
        v = (1 / 20) / (kernel.T @ u + 1e-9)
        u = (1 / 12) / (kernel @ v + 1e-9)
    return u[:, None] * kernel * v


@program((24, 16), (16, 6))
def router(x, w):
    p = jax.nn.softmax(x @ w, axis=-1)
    value, index = lax.top_k(p, 2)
    return value / value.sum(-1, keepdims=True), index, p.mean(0)


@program((24, 16), (16, 6))
def router_with_a_balance_loss(x, w):
    logits = x @ w
    p = jax.nn.softmax(logits, axis=-1)
    chosen = jax.nn.one_hot(jnp.argmax(logits, -1), 6)
    return 6 * jnp.sum(p.mean(0) * chosen.mean(0)) + 1e-3 * (jax.nn.logsumexp(logits, -1) ** 2).mean()


@program((24, 6), (24, 6))
def gumbel_softmax(x, u):
    noise = -jnp.log(-jnp.log(jax.nn.sigmoid(u) + 1e-10) + 1e-10)
    return jax.nn.softmax((x + noise) / 0.67, axis=-1)


@program((24, 30))
def softmax_beside_a_cumulative_sum(x):
    p = jax.nn.softmax(x, -1)
    return p, jnp.cumsum(p, -1)


@program((24, 30))
def clipped_softmax(x):
    return jnp.clip(1.1 * jax.nn.softmax(x, -1) - 0.03, 0.0, 1.0)


@program((24, 30), ((24, 30), BOOL))
def masked_mean_and_deviation(x, keep):
    count = keep.sum(-1, keepdims=True)
    mean = jnp.where(keep, x, 0.0).sum(-1, keepdims=True) / count
    return mean, jnp.sqrt((jnp.where(keep, x - mean, 0.0) ** 2).sum(-1, keepdims=True) / count)


@program((24, 30))
def softmax_with_a_threshold(x):
    p = jax.nn.softmax(x, -1)
    kept = jnp.where(p > 0.05, p, 0.0)
    return kept / kept.sum(-1, keepdims=True)


@program((24, 30), ((24,), I32), ((24,), I32))
def sums_over_segments_by_comparison(x, a, b):
    same = a[:, None] == b[None, :]
    return (same @ x) / jnp.maximum(same.sum(-1), 1)[:, None]


@program((24, 30))
def log_sum_exp_of_two_axes(x):
    return jax.nn.logsumexp(x), jax.nn.logsumexp(x, axis=0)


@program((24, 30))
def softmax_over_the_first_axis(x):
    return jax.nn.softmax(x / 0.07, axis=0)


@program((24, 30), (24, 30))
def weighted_log_sum_exp(x, w):
    return jax.nn.logsumexp(x, axis=-1, b=w * w)


@program((24, 30))
def moments_of_rows(x):
    centred = x - x.mean(-1, keepdims=True)
    deviation = jnp.sqrt((centred**2).mean(-1))
    return (centred**3).mean(-1) / deviation**3, (centred**4).mean(-1) / deviation**4 - 3.0


@program((24, 30), ((24, 30), I8), ((30,), F32))
def dequantised_product(x, w, scale):
    return jnp.sum(x * (w.astype(jnp.float32) * scale), -1) / jnp.sqrt(30.0)


@program((12, 40))
def softmax_in_several_bases(x):
    a = jnp.exp2(x * 1.4426950408889634 - jnp.max(x * 1.4426950408889634, -1, keepdims=True))
    b = 10.0 ** (x - jnp.max(x, -1, keepdims=True))
    return a / a.sum(-1, keepdims=True), b / b.sum(-1, keepdims=True)


@program((12, 40), ())
def generalised_mean(x, p):
    return jnp.mean(jnp.abs(x) ** 3.0, -1) ** (1 / 3.0), jnp.sqrt(jnp.abs(p)) * x.max(-1)


@program((12, 40))
def largest_scaled_by_constants(x):
    return (
        jnp.max(17.0 * x, -1),
        23.0 * jnp.max(x, -1),
        jnp.max(x / 0.044715, -1) * jnp.log(10.0),
        jnp.min(-3.7 * x, -1),
    )


@program((12, 40))
def softmax_with_folded_constants(x):
    scale = jnp.tanh(0.5) * jnp.exp(0.3) / jnp.log(10.0) + jnp.sqrt(0.044715) ** 3 - jnp.cbrt(5.0)
    return jax.nn.softmax(x * scale, -1)


@program(((12, 40), F16))
def softmax_in_float16_with_folded_constants(x):
    scale = jnp.sqrt(jnp.float16(13)) / jnp.log(jnp.float16(5)) * jnp.exp(jnp.float16(0.7))
    return jax.nn.softmax(x * scale, -1)


@program(((12, 40), BF16))
def softmax_in_bfloat16_with_constants(x):
    return jax.nn.softmax(x * jnp.bfloat16(0.0441941738) / jnp.sqrt(jnp.bfloat16(6)), -1)


# --- masks


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


# --- more losses


@program((12, 16), (20, 16), ((12,), I32))
def additive_angular_margin(x, w, label):
    x, w = (y / jnp.linalg.norm(y, axis=-1, keepdims=True) for y in (x, w))
    cosine = x @ w.T
    logits = 64.0 * jnp.where(jax.nn.one_hot(label, 20, dtype=bool), cosine - 0.35, cosine)
    return optax_cross_entropy(logits, label)


def optax_cross_entropy(logits, label):
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()


@program((12, 28), (12, 28))
def optax_losses(x, y):
    import optax

    target = jax.nn.softmax(y)
    return (optax.softmax_cross_entropy(x, target), optax.kl_divergence(jax.nn.log_softmax(x), target),
            optax.cosine_distance(x, y, epsilon=1e-6), optax.huber_loss(x, y).sum(-1), optax.l2_loss(x, y).mean(-1))  # fmt: skip


@program((24, 8), (24, 8))
def redundancy_of_two_views(a, b):
    a, b = ((x - x.mean(0)) / x.std(0) for x in (a, b))
    c = a.T @ b / 24
    off = c * (1 - jnp.eye(8))
    return ((1 - jnp.diagonal(c)) ** 2).sum() + 5e-3 * (off**2).sum()


@program((24, 8))
def covariance_and_hinge_of_deviation(x):
    x = x - x.mean(0)
    covariance = x.T @ x / (x.shape[0] - 1)
    return jnp.mean(jax.nn.relu(1 - jnp.sqrt(x.var(0) + 1e-4))), (covariance**2).sum() - (
        jnp.diagonal(covariance) ** 2
    ).sum()


@program((12, 8), (20, 8))
def kernel_discrepancy(x, y):
    def kernel(a, b):
        return jnp.exp(-((a[:, None] - b[None]) ** 2).sum(-1) / (2 * 1.5**2)).mean()

    return kernel(x, x) - 2 * kernel(x, y) + kernel(y, y)


@program((12, 8))
def distances_to_itself(x):
    square = (x * x).sum(-1)
    return jnp.sqrt(jnp.maximum(square[:, None] + square - 2 * x @ x.T, 0.0))


@program((12, 8))
def angles_to_itself(x):
    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    return jnp.arccos(jnp.clip(x @ x.T, -1.0, 1.0)).mean(-1)


@program((12, 30))
def variance_by_squares(x):
    x = x + 100.0
    return (x * x).mean(-1) - x.mean(-1) ** 2


@program((12, 30))
def softmax_of_large_numbers(x):
    return jax.nn.softmax(1e4 * x), jax.nn.logsumexp(-300.0 * x * x, axis=-1)


@program((12, 30), (12, 30))
def entropy_by_products_with_logarithms(x, y):
    p = jax.nn.softmax(jnp.where(y > 0.5, -jnp.inf, x))
    return -jax.scipy.special.xlogy(p, p).sum(-1), jax.scipy.special.entr(p).sum(-1)


@program((12, 30))
def numbers_that_are_missing(x):
    x = jnp.where(x > 1.0, jnp.nan, x)
    return jnp.nanmean(x, -1), jnp.nansum(x, -1), jnp.nanmax(x, -1), jnp.nanstd(x, -1)


@program((12, 30))
def rows_of_zeros(x):
    x = jnp.where(jnp.arange(12)[:, None] < 3, 0.0, x)
    return x / x.sum(-1, keepdims=True), x / jnp.linalg.norm(x, axis=-1, keepdims=True)


@program((12, 30), ((12, 30), BOOL))
def rows_that_are_masked_as_a_whole(x, keep):
    keep = keep & (jnp.arange(12)[:, None] > 2)
    return (jax.nn.softmax(x, where=keep), jax.nn.logsumexp(x, -1, where=keep), jnp.mean(x, -1, where=keep),
            jnp.max(x, -1, where=keep, initial=-jnp.inf))  # fmt: skip


# --- what rounding turns over


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


# --- other operations beside


@program((24, 30))
def statistics_beside_a_sort(x):
    p = jax.nn.softmax(x)
    ordered = jnp.sort(p, -1)[:, ::-1]
    return jnp.cumsum(ordered, -1), jnp.median(x, -1), x.argmax(-1), jnp.ptp(x, -1)


@program((24, 30), ((24,), I32))
def sums_by_scatter(x, index):
    p = jax.nn.softmax(x)
    return jax.ops.segment_sum(p, index, num_segments=4), jnp.zeros((4, 30)).at[index].max(p)


@program((2, 12, 12, 4), (3, 3, 4, 8))
def norm_after_a_convolution(x, w):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu((y - y.mean((1, 2), keepdims=True)) * lax.rsqrt(y.var((1, 2), keepdims=True) + 1e-5))


@program((12, 20))
def sinkhorn_in_a_loop(cost):
    def step(_, uv):
        u, v = uv
        u = -jax.nn.logsumexp(v[None, :] - cost, axis=1)
        return u, -jax.nn.logsumexp(u[:, None] - cost, axis=0)

    u, v = lax.fori_loop(0, 3, step, (jnp.zeros(12), jnp.zeros(20)))
    return u[:, None] + v[None, :] - cost


@program((5, 12, 20))
def norms_in_a_scan(x):
    def step(carry, row):
        carry = carry + row / jnp.linalg.norm(row, axis=-1, keepdims=True)
        return carry, jax.nn.softmax(carry, -1)

    return lax.scan(step, jnp.zeros((12, 20)), x)


@program((12, 20), ((), BOOL))
def one_branch_or_the_other(x, flag):
    return lax.cond(flag, lambda x: jax.nn.softmax(x, -1), lambda x: x / x.std(-1, keepdims=True), x) + x.var(
        -1, keepdims=True
    )


@program((12, 20), ((), I32))
def dropout_of_a_softmax(x, seed):
    keep = jax.random.bernoulli(jax.random.key(seed), 0.9, x.shape)
    return jnp.where(keep, jax.nn.softmax(x) / 0.9, 0.0)


@program((12, 20), (20, 8))
def gradients_of_a_loss(x, w):
    return jax.value_and_grad(lambda w: jnp.mean(jax.nn.logsumexp(x @ w, -1) - (x @ w)[:, 0]))(w)


@program((12, 20), (20, 8))
def recomputed_layer(x, w):
    return jax.checkpoint(lambda x: jax.nn.softmax(x @ w / jnp.sqrt(20.0), -1))(x).sum(0)


@jax.custom_vjp
def _scaled_gradient(x):
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))


_scaled_gradient.defvjp(lambda x: (_scaled_gradient(x), x), lambda x, g: (g,))


@program((12, 20))
def function_with_its_own_gradient(x):
    return jax.nn.softmax(_scaled_gradient(x) * 7.3, -1)


@program((4, 6, 3, 2, 5))
def norms_of_five_axes(x):
    centred = x - x.mean((1, 3, 4), keepdims=True)
    return centred / jnp.sqrt((centred**2).mean((1, 3, 4), keepdims=True) + 1e-3), jax.nn.softmax(x, (1, 4))


@program((1, 30), (30, 1))
def axes_of_one_element(x, y):
    return jax.nn.softmax(x), jax.nn.softmax(y, 0), jax.nn.softmax(y, 1), jnp.linalg.norm(x @ y)


@program((0, 30), (12, 30))
def no_rows(x, y):
    return jax.nn.softmax(x), jax.nn.softmax(y), x.sum(0)


@program(((12, 30), I32), ((12, 30), "uint8"))
def integers(n, image):
    pixels = image.astype(jnp.float32) / 255.0
    pixels = pixels - pixels.mean(-1, keepdims=True)
    return (
        n.sum(-1),
        n.mean(-1),
        n.max(-1),
        pixels / jnp.sqrt(pixels.var(-1, keepdims=True) + 1e-5),
    )


@program(((12, 30), BOOL), (12, 30))
def counts(keep, x):
    share = keep.mean(-1)
    return keep.any(-1), keep.all(-1), keep.sum(-1), jnp.where(keep, x, 0).sum(-1) / (share * 30 + 1e-6)


@program((12, 30))
def results_that_are_arguments_or_constants(x):
    return x, jnp.ones(3), jax.nn.softmax(x), jax.nn.softmax(x), x.shape[0], 2.5


@program(((12, 30), "float8_e4m3fn"), (12, 1))
def dequantised_float8(x, scale):
    return jax.nn.softmax(x.astype(jnp.float32) * scale, -1)


@program((12, 30))
def waves_of_positions(x):
    position = jnp.arange(30) * jnp.pi / 7
    return jnp.sum(x * jnp.sin(position), -1) / jnp.sqrt(jnp.sum((x * jnp.cos(position)) ** 2, -1)), jax.nn.softmax(
        jnp.cos(x) * 3
    )


@program((12, 30))
def powers(x):
    y, z = jnp.abs(x) + 0.1, x - x.max(-1, keepdims=True)
    return (
        (y**1.5).sum(-1) ** (2 / 3),
        (y**0.3).mean(-1) ** (1 / 0.3),
        jnp.prod(y[:, :5], -1),
        2.0**z,
    )


@program((12, 30), (30,), ())
def scaled_by_learned_numbers(x, g, s):
    y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return jax.nn.softmax(y * (1 + g) * jax.nn.softplus(s) / 3.7) * jnp.sqrt(jnp.abs(s) + 0.5), jnp.max(
        y * jnp.exp(s), -1
    )


@program((12, 30), (12, 30))
def extremes_of_scaled_rows(x, y):
    scale = jnp.sqrt(jnp.sum(y * y, -1, keepdims=True) / 19.0)
    return (
        jnp.max(x / scale, -1),
        jnp.min(x * -0.31 * scale, -1),
        jnp.abs(x * 29.0).max(-1),
        jnp.max(jnp.sqrt(11.0 * y * y), -1),
    )


@program((12, 30))
def logarithms_of_scaled_sums(x):
    e = jnp.exp(x)
    return (
        jnp.log(17.0 * e.sum(-1)),
        jnp.log2((e / 0.37).mean(-1)),
        jnp.log10(1e-3 + e.sum(-1)),
        jnp.log1p(13.7 * e.sum(-1)),
    )


@program((2, 12, 8), (2, 24, 8), (2, 24, 8), (2, 4, 8), (2, 4, 8), ((), I32))
def attention_after_an_update_of_the_cache(q, k_cache, v_cache, k, v, start):
    k, v = (lax.dynamic_update_slice(c, n, (0, start, 0)) for c, n in ((k_cache, k), (v_cache, v)))
    mask = jnp.arange(24) < start + 4
    return jax.nn.softmax(jnp.where(mask, jnp.einsum("hid,hjd->hij", q, k) * 8**-0.5, -1e10), -1) @ v


@program((12, 16), (16, 24), (24,), (24,))
def norm_of_a_product_with_a_residual(x, w, g, b):
    y = x @ w
    y = jnp.roll(y, 3, -1) + jnp.pad(x, ((0, 0), (4, 4)))
    return (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5) * g + b


@program((2, 8, 8, 6))
def structural_similarity(x):
    y = x[:, ::-1]
    mx, my = x.mean((1, 2)), y.mean((1, 2))
    vx, vy = x.var((1, 2)), y.var((1, 2))
    cov = (x * y).mean((1, 2)) - mx * my
    c1, c2 = 0.01**2, 0.03**2
    return (2 * mx * my + c1) * (2 * cov + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))


@program((2, 6, 40))
def gram_matrices(x):
    g = jnp.einsum("bct,bdt->bcd", x, x) / (6 * 40)
    return jnp.linalg.norm(g - jnp.eye(6), axis=(1, 2)), jnp.trace(g, axis1=1, axis2=2)


# --- modules


def _of_linen(module, *arguments):
    variables = jax.eval_shape(lambda: module.init(jax.random.key(0), *(jnp.zeros(s, d) for s, d in arguments)))
    drawn = jax.tree.map(lambda v: np.random.default_rng(3).normal(0.1, 0.3, v.shape).astype(v.dtype), variables)
    return lambda *x: module.apply(drawn, *x)


def _register_linen(name, module, *arguments):
    PROGRAMS[name] = Program(_of_linen(module, *arguments), arguments)


class _EncoderBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        y = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(num_heads=2, qkv_features=8)(y)
        y = linen.Dense(16)(linen.LayerNorm()(x))
        return x + linen.Dense(8)(linen.gelu(y))


_register_linen("linen_encoder_block", _EncoderBlock(), ((2, 10, 8), F32))
_register_linen("linen_layer_norm", linen.LayerNorm(), ((10, 24), F32))
_register_linen("linen_group_norm", linen.GroupNorm(num_groups=4), ((2, 5, 5, 8), F32))
_register_linen("linen_rms_norm_in_bfloat16", linen.RMSNorm(dtype=jnp.bfloat16), ((10, 24), BF16))
_register_linen("linen_weight_norm", linen.WeightNorm(linen.Dense(6)), ((10, 24), F32))


class _NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=rngs)
        self.out = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.out(self.attention(self.norm(x)))


PROGRAMS["nnx_block"] = Program(_NnxBlock(nnx.Rngs(0)), (((2, 10, 8), F32),))


@program((10, 16), (16,), (16, 48), (16, 16), (16,), (16, 32), (16, 32), (32, 16))
def decoder_layer(x, g, qkv, o, h, gate, up, down):
    def norm(x, g):
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * g

    q, k, v = (y.reshape(10, 2, 8).transpose(1, 0, 2) for y in jnp.split(norm(x, g) @ qkv, 3, -1))
    q, k = _rotate(q), _rotate(k)
    scores = jnp.where(jnp.tril(jnp.ones((10, 10), bool)), q @ k.transpose(0, 2, 1) / jnp.sqrt(8.0), -1e30)
    x = x + (jax.nn.softmax(scores, -1) @ v).transpose(1, 0, 2).reshape(10, 16) @ o
    y = norm(x, h)
    return x + (jax.nn.silu(y @ gate) * (y @ up)) @ down
