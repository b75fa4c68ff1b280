"""Losses and distances: contrastive, clustering, density, variational, and those of optax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads.registry import Built, Size, add, booleans, half, integers, normal, pick, program, weight


def _unit(x: Any) -> Any:
    return x / jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True).astype(x.dtype)


def _distances(x: Any, centres: Any) -> Any:
    """Returns the squared distance of every row to every centre."""
    products = jnp.dot(x, centres.T, preferred_element_type=jnp.float32)
    squares = [jnp.square(a.astype(jnp.float32)).sum(-1) for a in (x, centres)]
    return squares[0][:, None] - 2.0 * products + squares[1][None, :]


@program("clip-loss", "contrastive")
def _clip(size: Size) -> Built:
    rows, n = pick(size, (8192, 512), (1024, 256), (32, 16))

    def loss(image: Any, text: Any, log_scale: Any) -> Any:
        logits = jnp.exp(log_scale) * jnp.dot(_unit(image), _unit(text).T, preferred_element_type=jnp.float32)
        diagonal = jnp.diagonal(logits)
        return 0.5 * ((jax.nn.logsumexp(logits, 1) - diagonal).mean() + (jax.nn.logsumexp(logits, 0) - diagonal).mean())

    rows_of = normal(rows, n, dtype=half(size))
    return Built(loss, (rows_of, rows_of, normal(scale=0.1, offset=2.0)))


@program("info-nce", "contrastive")
def _info_nce(size: Size) -> Built:
    rows, n = pick(size, (4096, 256), (2048, 128), (32, 16))

    def loss(x: Any) -> Any:
        unit = _unit(x)
        logits = jnp.dot(unit, unit.T, preferred_element_type=jnp.float32) / 0.07
        logits = jnp.where(jnp.eye(rows, dtype=bool), -jnp.inf, logits)
        positive = jnp.take_along_axis(logits, ((jnp.arange(rows) + rows // 2) % rows)[:, None], 1)[:, 0]
        return (jax.nn.logsumexp(logits, -1) - positive).mean()

    return Built(loss, (normal(rows, n, dtype=half(size)),))


@program("k-means-assignment", "clustering")
def _k_means(size: Size) -> Built:
    rows, centres, n = pick(size, (65536, 1024, 128), (8192, 256, 64), (64, 8, 8))

    def assign(x: Any, centre: Any) -> Any:
        distance = _distances(x, centre)
        return distance.argmin(-1), distance.min(-1).mean()

    return Built(assign, (normal(rows, n, dtype=half(size)), normal(centres, n, dtype=half(size))))


@program("soft-assignment", "clustering")
def _soft(size: Size) -> Built:
    """Responsibilities of a mixture, and the new centres."""
    rows, centres, n = pick(size, (32768, 512, 128), (8192, 128, 64), (64, 8, 8))

    def step(x: Any, centre: Any) -> Any:
        weights = jax.nn.softmax(-0.1 * _distances(x, centre), -1)
        sums = jnp.dot(weights.astype(x.dtype).T, x, preferred_element_type=jnp.float32)
        return sums / weights.sum(0)[:, None]

    return Built(step, (normal(rows, n, dtype=half(size)), normal(centres, n, dtype=half(size))))


@program("kernel-density", "clustering")
def _density(size: Size) -> Built:
    queries, points, n = pick(size, (8192, 16384, 64), (1024, 4096, 16), (16, 32, 4))

    def density(x: Any, data: Any) -> Any:
        return jax.nn.logsumexp(-0.5 * _distances(x, data), -1) - jnp.log(points)

    return Built(density, (normal(queries, n, dtype=half(size)), normal(points, n, dtype=half(size))))


@program("softmin-distance", "clustering")
def _softmin(size: Size) -> Built:
    """A differentiable nearest-point distance in both directions between two clouds of points."""
    points = pick(size, 8192, 2048, 32)

    def distance(x: Any, y: Any) -> Any:
        squared = jnp.square(x[:, None, :] - y[None, :, :]).sum(-1)
        near = [(jax.nn.softmax(-10.0 * squared, axis) * squared).sum(axis).mean() for axis in (0, 1)]
        return near[0] + near[1]

    return Built(distance, (normal(points, 3), normal(points, 3)))


@program("vae-elbo", "losses")
def _elbo(size: Size) -> Built:
    rows, latent, pixels = pick(size, (4096, 64, 3072), (4096, 32, 784), (8, 4, 16))

    def elbo(mean: Any, log_variance: Any, logits: Any, image: Any) -> Any:
        kl = -0.5 * (1 + log_variance - jnp.square(mean) - jnp.exp(log_variance)).sum(-1)
        likelihood = -(jnp.maximum(logits, 0) - logits * image + jnp.log1p(jnp.exp(-jnp.abs(logits)))).sum(-1)
        return (kl - likelihood).mean()

    hidden = normal(rows, latent, scale=0.3)
    return Built(elbo, (hidden, hidden, normal(rows, pixels), normal(rows, pixels, scale=0.1, offset=0.5)))


@program("distillation-loss", "losses")
def _distillation(size: Size) -> Built:
    rows, n = pick(size, (2048, 32000), (128, 32000), (4, 100))

    def loss(student: Any, teacher: Any) -> Any:
        teacher_log, student_log = (jax.nn.log_softmax(x.astype(jnp.float32) / 2.0, -1) for x in (teacher, student))
        return 4.0 * (jnp.exp(teacher_log) * (teacher_log - student_log)).sum(-1).mean()

    return Built(loss, (normal(rows, n, dtype=half(size)),) * 2)


@program("lm-head-log-softmax", "losses")
def _lm_head(size: Size) -> Built:
    """Tied embeddings, capped logits, and the log-probability of every token."""
    rows, n, vocabulary = pick(size, (2048, 2048, 50304), (64, 256, 50304), (8, 16, 100))

    def head(x: Any, embeddings: Any) -> Any:
        logits = jnp.einsum("td,vd->tv", x, embeddings, preferred_element_type=jnp.float32)
        return jax.nn.log_softmax(30.0 * jnp.tanh(logits / 30.0), -1)

    return Built(head, (normal(rows, n, dtype=half(size)), normal(vocabulary, n, dtype=half(size), scale=n**-0.5)))


@program("linear-cross-entropy", "losses")
def _linear_cross_entropy(size: Size) -> Built:
    rows, n, vocabulary = pick(size, (4096, 2048, 32000), (128, 256, 32000), (8, 16, 100))

    def loss(x: Any, w: Any, labels: Any) -> Any:
        logits = jnp.dot(x, w, preferred_element_type=jnp.float32)
        target = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        return (jax.nn.logsumexp(logits, -1) - target).mean()

    return Built(
        loss,
        (normal(rows, n, dtype=half(size)), weight(n, vocabulary, dtype=half(size)), integers(rows, below=vocabulary)),
    )


def _optax(size: Size, name: str) -> Built:
    import optax

    rows, n = pick(size, (4096, 32000), (256, 32000), (4, 100))
    logits, labels = normal(rows, n, dtype=half(size)), integers(rows, below=n)
    if name == "smoothed":
        return Built(
            lambda x, y: optax.softmax_cross_entropy(
                x.astype(jnp.float32), optax.smooth_labels(jax.nn.one_hot(y, x.shape[-1]), 0.1)
            ).mean(),
            (logits, labels),
        )
    if name == "integer":
        loss = optax.softmax_cross_entropy_with_integer_labels
        return Built(lambda x, y: loss(x.astype(jnp.float32), y).mean(), (logits, labels))
    if name == "kl":
        return Built(
            lambda x, y: optax.losses.kl_divergence_with_log_targets(
                jax.nn.log_softmax(x.astype(jnp.float32)), jax.nn.log_softmax(y.astype(jnp.float32))
            ).mean(),
            (logits, logits),
        )
    raise ValueError(name)


add("optax-cross-entropy-integer-labels", "optax", functools.partial(_optax, name="integer"))
add("optax-cross-entropy-smoothed", "optax", functools.partial(_optax, name="smoothed"))
add("optax-kl-divergence", "optax", functools.partial(_optax, name="kl"))


@program("optax-sigmoid-focal", "optax")
def _focal(size: Size) -> Built:
    import optax

    rows, n = pick(size, (65536, 91), (8192, 91), (8, 5))

    def loss(logits: Any, labels: Any) -> Any:
        return optax.sigmoid_focal_loss(logits, labels.astype(logits.dtype), alpha=0.25, gamma=2.0).sum(-1).mean()

    return Built(loss, (normal(rows, n), booleans(rows, n)))


@program("optax-ctc", "optax")
def _ctc(size: Size) -> Built:
    import optax

    batch, frames, labels, classes = pick(size, (16, 512, 64, 128), (16, 512, 64, 64), (2, 8, 3, 5))

    def loss(logits: Any, target: Any) -> Any:
        nothing = jnp.zeros(logits.shape[:2]), jnp.zeros(target.shape)
        return optax.ctc_loss(logits, nothing[0], target + 1, nothing[1]).mean()

    return Built(loss, (normal(batch, frames, classes), integers(batch, labels, below=classes - 1)))


@program("optax-cosine-similarity", "optax")
def _cosine(size: Size) -> Built:
    import optax

    rows, n = pick(size, (65536, 768), (8192, 768), (8, 16))
    return Built(lambda x, y: optax.cosine_similarity(x, y, epsilon=1e-6), (normal(rows, n, dtype=half(size)),) * 2)
