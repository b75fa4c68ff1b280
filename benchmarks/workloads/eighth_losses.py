"""Losses, metrics and codes of training steps of the eighth set: its author had seen no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, half, integers, like, normal, pick, program, weight

GROUP = "eighth"


def _unit(x, eps=1e-12):
    """The rows in float32 with length one."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), eps))


@program("albef-soft-targets-two-queues-grad", GROUP)
def _albef(size: Size) -> Built:
    """This gives the gradient of ALBEF's contrastive loss of images and texts, its new queues, and the hard negatives it draws.

    Both directions compare a batch with the momentum features of the batch and of a queue; targets are a mixture of the true
    pair and of what the momentum model believes; negatives for the matching loss are drawn where the similarity is high.
    """
    b, n, d, queue = pick(size, (128, 768, 256, 65536), (32, 256, 128, 4096), (3, 6, 4, 9))
    dtype, alpha, momentum = half(size), 0.4, 0.995

    def project(p, image, text):
        return _unit(image @ p["image"] + p["image_bias"]), _unit(text @ p["text"] + p["text_bias"])

    def loss(p, image, text, slow_image, slow_text, queues):
        temperature = jnp.clip(p["temperature"], 0.001, 0.5)
        every_image = jnp.concatenate([slow_image.T.astype(dtype), queues["image"]], axis=1)
        every_text = jnp.concatenate([slow_text.T.astype(dtype), queues["text"]], axis=1)

        def similar(rows, columns):
            return jnp.matmul(rows.astype(dtype), columns, preferred_element_type=jnp.float32) / temperature

        def targets(rows, columns):
            own = jnp.eye(b, b + queue, dtype=jnp.float32)
            believed = jax.nn.softmax(similar(rows, columns), axis=1)
            return lax.stop_gradient(alpha * believed + (1.0 - alpha) * own)

        image, text = project(p, image, text)
        to_text, to_image = similar(image, every_text), similar(text, every_image)
        first = -jnp.sum(jax.nn.log_softmax(to_text, axis=1) * targets(slow_image, every_text), axis=1)
        second = -jnp.sum(jax.nn.log_softmax(to_image, axis=1) * targets(slow_text, every_image), axis=1)
        return 0.5 * (jnp.mean(first) + jnp.mean(second)), (to_text[:, :b], to_image[:, :b])

    def negatives(key, logits):
        weights = jax.nn.softmax(logits, axis=1) + 1e-4
        return jax.random.categorical(key, jnp.where(jnp.eye(b, dtype=bool), -jnp.inf, jnp.log(weights)), axis=1)

    def step(p, slow, image, text, image_again, text_again, queues, pointer, seed):
        slow = jax.tree.map(lambda s, f: (momentum * s + (1.0 - momentum) * f).astype(s.dtype), slow, p)
        slow_image, slow_text = project(slow, image_again, text_again)
        run = jax.value_and_grad(loss, has_aux=True)
        (value, (to_text, to_image)), grads = run(p, image, text, slow_image, slow_text, queues)
        first, second = jax.random.split(jax.random.key(seed))
        hard = {"texts": negatives(first, to_text), "images": negatives(second, to_image)}
        new = {"image": slow_image.T.astype(dtype), "text": slow_text.T.astype(dtype)}
        queues = {k: lax.dynamic_update_slice(queues[k], new[k], (0, pointer * b)) for k in new}
        return value, grads, slow, queues, hard

    params = {name: weight(n, d, dtype=dtype) for name in ("image", "text")}
    params |= {name: normal(d, dtype=dtype, scale=0.02) for name in ("image_bias", "text_bias")}
    params["temperature"] = normal(scale=0.0, offset=0.07)
    features = (normal(b, n, dtype=dtype),) * 4
    queues = {name: normal(d, queue, dtype=dtype, scale=d**-0.5) for name in ("image", "text")}
    return Built(step, (params, params, *features, queues, integers(below=queue // b), integers(below=1000)))


@program("swav-crops-prototypes-queue-grad", GROUP)
def _swav(size: Size) -> Built:
    """This gives the gradient of SwAV's loss, where the crops of an image predict each other's assignment to prototypes.

    Two large crops are assigned by three Sinkhorn iterations together with a queue of earlier features, so that all prototypes
    are used alike; the other crops, large and small, predict the assignment by a softmax with a temperature.
    """
    b, crops, n, d, prototypes, queue = pick(
        size, (64, 8, 2048, 128, 3000, 3840), (32, 8, 256, 64, 300, 480), (3, 3, 6, 4, 5, 6)
    )
    dtype, large, epsilon, temperature = half(size), 2, 0.05, 0.1

    def head(p, x):
        y = x @ p["in"] + p["in_bias"]
        z = y.astype(jnp.float32)
        z = (z - jnp.mean(z, axis=0)) * lax.rsqrt(jnp.var(z, axis=0) + 1e-5) * p["gain"] + p["shift"]
        return _unit(jax.nn.relu(z).astype(dtype) @ p["out"] + p["out_bias"])

    def sinkhorn(scores):
        q = jnp.exp(scores / epsilon).T
        q = q / jnp.sum(q)
        for _ in range(3):
            q = q / jnp.sum(q, axis=1, keepdims=True) / prototypes
            q = q / jnp.sum(q, axis=0, keepdims=True) / q.shape[1]
        return (q * q.shape[1]).T

    def loss(p, x, earlier):
        directions = _unit(p["prototypes"]).astype(dtype)

        def against(z):
            return jnp.matmul(z.astype(dtype), directions.T, preferred_element_type=jnp.float32)

        z = head(p, x)
        scores = against(z).reshape(crops, b, prototypes)
        total, used = 0.0, []
        for crop in range(large):
            together = jnp.concatenate([against(earlier[crop]), scores[crop]])
            q = lax.stop_gradient(sinkhorn(together)[-b:])
            others = np.delete(np.arange(crops), crop)
            predicted = jax.nn.log_softmax(scores[others] / temperature, axis=-1)
            total = total - jnp.mean(jnp.sum(q * predicted, axis=-1))
            used.append(jnp.mean(q, axis=0))
        share = sum(used) / large
        spread = jnp.exp(-jnp.sum(share * jnp.log(share + 1e-12)))
        return total / large, (z.reshape(crops, b, d)[:large], spread)

    def step(p, x, earlier):
        (value, (z, spread)), grads = jax.value_and_grad(loss, has_aux=True)(p, x, earlier)
        earlier = jnp.concatenate([z.astype(earlier.dtype), earlier[:, :-b]], axis=1)
        return value, spread, grads, earlier

    params = {
        "in": weight(n, n, dtype=dtype),
        "in_bias": normal(n, dtype=dtype, scale=0.02),
        "gain": normal(n, scale=0.1, offset=1.0),
        "shift": normal(n, scale=0.1),
        "out": weight(n, d, dtype=dtype),
        "out_bias": normal(d, dtype=dtype, scale=0.02),
        "prototypes": normal(prototypes, d, dtype=dtype, scale=d**-0.5),
    }
    return Built(step, (params, normal(crops * b, n, dtype=dtype), normal(large, queue, d, scale=d**-0.5)))


@program("batch-hard-triplets-persons-linen-grad", GROUP)
def _triplets(size: Size) -> Built:
    """This gives the gradient of the batch-hard triplet loss with a soft margin, as models that recognise persons are trained.

    Each embedding is compared with its farthest of the same person and its nearest of another person in the batch.
    """
    import flax.linen as nn

    b, n, hidden, d, persons = pick(size, (3072, 2048, 1024, 128, 768), (768, 512, 256, 64, 192), (8, 6, 8, 4, 3))
    dtype = half(size)

    class Head(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(hidden, dtype=dtype)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=dtype)(x))
            return nn.Dense(d, dtype=dtype)(x).astype(jnp.float32)

    module, x = Head(), normal(b, n, dtype=dtype)
    shapes = jax.eval_shape(module.init, jax.random.key(0), x.struct)

    def loss(params, statistics, x, person):
        z, changed = module.apply({"params": params, "batch_stats": statistics}, x, mutable=["batch_stats"])
        length = jnp.sum(z * z, axis=1)
        squared = length[:, None] + length[None, :] - 2.0 * jnp.matmul(z, z.T, precision=lax.Precision.HIGHEST)
        apart = jnp.sqrt(jnp.maximum(squared, 1e-12))
        same = person[:, None] == person[None, :]
        itself = jnp.eye(b, dtype=bool)
        positive = jnp.max(jnp.where(same & ~itself, apart, 0.0), axis=1)
        negative = jnp.min(jnp.where(same, jnp.inf, apart), axis=1)
        valid = jnp.any(same & ~itself, axis=1)
        each = jnp.where(valid, jax.nn.softplus(positive - negative), 0.0)
        value = jnp.sum(each) / jnp.maximum(jnp.sum(valid), 1)
        nearest = jnp.argmin(jnp.where(itself, jnp.inf, apart), axis=1)
        metrics = {
            "top1": jnp.mean(person[nearest] == person),
            "active": jnp.mean(valid & (positive > negative)),
            "positive": jnp.mean(positive),
            "negative": jnp.mean(negative),
            "length": jnp.mean(jnp.sqrt(length)),
        }
        return value, (metrics, changed["batch_stats"])

    params, statistics = like(shapes["params"], dtype), like(shapes["batch_stats"])
    step = jax.value_and_grad(loss, has_aux=True)
    return Built(step, (params, statistics, x, integers(b, below=persons, ramp=True)))


@program("intent-head-smoothed-calibration-metrics", GROUP)
def _intents(size: Size) -> Built:
    """This gives the loss and metrics of RoBERTa's classifier head on a set of sentences whose intents are to be recognised.

    The loss has smoothed labels; the metrics are accuracy, accuracy in the best five, Brier's score and the expected calibration
    error over fifteen bins of confidence. Rows that only fill up the last batch do not count.
    """
    import optax

    b, n, classes, bins = pick(size, (16384, 1024, 151, 15), (2048, 384, 151, 15), (6, 8, 7, 3))
    dtype, smoothing, best = half(size), 0.1, 5

    def evaluate(p, features, label, counts):
        x = jnp.tanh(features @ p["dense"] + p["dense_bias"])
        logits = (x @ p["out"] + p["out_bias"]).astype(jnp.float32)
        weights = counts.astype(jnp.float32)
        total = jnp.maximum(jnp.sum(weights), 1.0)

        def mean(values):
            return jnp.sum(values * weights) / total

        one_hot = jax.nn.one_hot(label, classes)
        loss = optax.softmax_cross_entropy(logits, optax.smooth_labels(one_hot, smoothing))
        probs = jax.nn.softmax(logits, axis=-1)
        confidence, guess = jnp.max(probs, axis=-1), jnp.argmax(probs, axis=-1)
        right = (guess == label).astype(jnp.float32)
        own = jnp.take_along_axis(logits, label[:, None], axis=-1)
        rank = jnp.sum(logits > own, axis=-1)
        bucket = jnp.clip(jnp.ceil(confidence * bins).astype(jnp.int32) - 1, 0, bins - 1)
        inside = jax.nn.one_hot(bucket, bins) * weights[:, None]
        count = jnp.sum(inside, axis=0)
        accurate = jnp.sum(inside * right[:, None], axis=0) / jnp.maximum(count, 1.0)
        confident = jnp.sum(inside * confidence[:, None], axis=0) / jnp.maximum(count, 1.0)
        gap = jnp.abs(accurate - confident)
        return {
            "loss": mean(loss),
            "likelihood": mean(optax.softmax_cross_entropy_with_integer_labels(logits, label)),
            "accuracy": mean(right),
            "best_five": mean((rank < best).astype(jnp.float32)),
            "brier": mean(jnp.sum((probs - one_hot) ** 2, axis=-1)),
            "calibration_error": jnp.sum(gap * count) / total,
            "worst_gap": jnp.max(jnp.where(count > 0, gap, 0.0)),
            "bins": (count, accurate, confident),
        }

    params = {
        "dense": weight(n, n, dtype=dtype),
        "dense_bias": normal(n, dtype=dtype, scale=0.02),
        "out": normal(n, classes, dtype=dtype, scale=3.0 * n**-0.5),
        "out_bias": normal(classes, dtype=dtype, scale=0.02),
    }
    return Built(evaluate, (params, normal(b, n, dtype=dtype), integers(b, below=classes), booleans(b)))


@program("encodec-eight-residual-codebooks-step", GROUP)
def _encodec(size: Size) -> Built:
    """This gives the codes of audio frames by EnCodec's eight residual codebooks, and the codebooks after a step of training.

    Each level finds the code nearest to what the levels before it left over, averages the frames of every code over time, and
    puts frames of the batch in the place of codes which are hardly used; gradients pass straight through to the encoder.
    """
    b, t, d, codes, levels = pick(size, (20, 750, 128, 1024, 8), (4, 150, 64, 256, 8), (2, 3, 4, 5, 2))
    decay, dead, frames = 0.99, 0.5, b * t

    def one(left, book, key):
        squares = jnp.sum(left**2, axis=1, keepdims=True) + jnp.sum(book["codes"] ** 2, axis=1)[None, :]
        distance = squares - 2.0 * jnp.matmul(left, book["codes"].T, precision=lax.Precision.HIGHEST)
        index = jnp.argmin(distance, axis=1)
        chosen = book["codes"][index]
        one_hot = jax.nn.one_hot(index, codes)
        hits = jnp.sum(one_hot, axis=0)
        size_now = decay * jnp.abs(book["size"]) + (1.0 - decay) * hits
        sums = decay * book["sums"] + (1.0 - decay) * one_hot.T @ left
        total = jnp.sum(size_now)
        smoothed = (size_now + 1e-5) / (total + codes * 1e-5) * total
        replaced = left[jax.random.randint(key, (codes,), 0, frames)]
        expired = (size_now < dead)[:, None]
        new = {
            "codes": jnp.where(expired, replaced, sums / smoothed[:, None]),
            "sums": jnp.where(expired, replaced, sums),
            "size": jnp.where(expired[:, 0], 1.0, size_now),
        }
        share = hits / frames
        perplexity = jnp.exp(-jnp.sum(share * jnp.log(share + 1e-10)))
        return chosen, index, new, perplexity

    def step(x, books, seed):
        keys = jax.random.split(jax.random.key(seed), levels)
        flat = x.reshape(frames, d)
        left, total, indices, news, losses, used = flat, jnp.zeros_like(flat), [], [], [], []
        for book, key in zip(books, keys, strict=True):
            chosen, index, new, perplexity = one(left, book, key)
            losses.append(jnp.mean((left - lax.stop_gradient(chosen)) ** 2))
            left, total = left - lax.stop_gradient(chosen), total + chosen
            indices.append(index.reshape(b, t))
            news.append(new)
            used.append(perplexity)
        through = flat + lax.stop_gradient(total - flat)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *news)
        return through.reshape(x.shape), jnp.stack(indices), jnp.stack(losses), jnp.stack(used), stacked

    books = [
        {
            "codes": normal(codes, d, scale=0.7**level),
            "sums": normal(codes, d, scale=20.0 * 0.7**level),
            "size": normal(codes, scale=5.0, offset=frames / codes),
        }
        for level in range(levels)
    ]
    return Built(step, (normal(b, t, d), books, integers(below=1000)))
