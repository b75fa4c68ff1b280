"""Losses on distances between rows, and rows with numbers that are large, missing, zero or masked."""

import jax
import jax.numpy as jnp

from tests.users_programs.registry import BOOL, I32, Programs

PROGRAMS = Programs()
program = PROGRAMS.register


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
