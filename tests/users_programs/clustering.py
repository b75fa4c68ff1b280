"""Clustering, transport and routing, and softmaxes and statistics of rows in many forms."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.users_programs.registry import BF16, BOOL, F16, F32, I8, I32, Programs

PROGRAMS = Programs()
program = PROGRAMS.register


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
