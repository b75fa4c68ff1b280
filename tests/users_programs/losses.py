"""Losses: cross entropies, contrastive ones, divergences and likelihoods."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.users_programs.registry import BOOL, I32, Programs

PROGRAMS = Programs()
program = PROGRAMS.register


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
