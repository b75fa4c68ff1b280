"""Losses, optimizers and statistics of training, by an author who knew nothing of the package: a third set."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import (
    Built,
    Size,
    booleans,
    gain,
    half,
    integers,
    like,
    normal,
    pick,
    program,
    weight,
)

GROUP = "third"


@program("orpo-odds-ratio-loss-grad", GROUP)
def _orpo(size: Size) -> Built:
    """The gradient of ORPO in the final hidden states and the head: a likelihood of the chosen and a log odds ratio."""
    b, t, n, v = pick(size, (2, 256, 1024, 32000), (2, 24, 64, 2000), (2, 5, 8, 11))
    dtype = half(size)

    def mean_log_prob(head, hidden, labels, mask):
        logits = (hidden @ head).astype(jnp.float32)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), labels[..., None], axis=-1)[..., 0]
        return jnp.sum(logp * mask, axis=-1) / jnp.maximum(jnp.sum(mask, axis=-1), 1)

    def loss(head, chosen, rejected, labels_w, labels_l, mask_w, mask_l):
        won = mean_log_prob(head, chosen, labels_w, mask_w)
        lost = mean_log_prob(head, rejected, labels_l, mask_l)
        log_odds = (won - lost) - (jnp.log1p(-jnp.exp(won)) - jnp.log1p(-jnp.exp(lost)))
        return jnp.mean(-won - 0.1 * jax.nn.log_sigmoid(log_odds)), jnp.mean(log_odds > 0)

    hidden, labels, mask = normal(b, t, n, dtype=dtype), integers(b, t, below=v), booleans(b, t)
    step = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    return Built(step, (weight(n, v, dtype=dtype), hidden, hidden, labels, labels, mask, mask))


@program("kto-unpaired-preference-loss", GROUP)
def _kto(size: Size) -> Built:
    """The loss of KTO over logits of a policy and a reference: a clamped baseline of KL, desirable or not per sequence."""
    b, t, v = pick(size, (4, 512, 32000), (4, 32, 4000), (2, 4, 9))
    dtype = half(size)

    def sequence(logits, labels, mask):
        logits = logits[:, :-1].astype(jnp.float32)
        picked = jnp.take_along_axis(logits, labels[:, 1:, None], axis=-1)[..., 0]
        return jnp.sum((picked - jax.nn.logsumexp(logits, axis=-1)) * mask[:, 1:], axis=-1)

    def loss(policy, reference, labels, mask, desirable):
        ratio = sequence(policy, labels, mask) - sequence(reference, labels, mask)
        kl = sequence(policy, jnp.roll(labels, 1, axis=0), mask) - sequence(
            reference, jnp.roll(labels, 1, axis=0), mask
        )
        kl = lax.stop_gradient(jnp.maximum(jnp.mean(kl), 0.0))
        good = 1.0 - jax.nn.sigmoid(0.1 * (ratio - kl))
        bad = 1.33 * (1.0 - jax.nn.sigmoid(0.1 * (kl - ratio)))
        return jnp.mean(jnp.where(desirable, good, bad)), kl, ratio

    logits = normal(b, t, v, dtype=dtype, scale=2.0)
    return Built(loss, (logits, logits, integers(b, t, below=v), booleans(b, t), booleans(b)))


@program("vicreg-expander-loss-grad", GROUP)
def _vicreg(size: Size) -> Built:
    """The gradient of VICReg in the embeddings of two views: invariance, a hinge of the variance, the covariance."""
    b, n = pick(size, (2048, 4096), (256, 256), (6, 5))
    dtype = half(size)

    def off_diagonal(c):
        return jnp.sum(jnp.square(c)) - jnp.sum(jnp.square(jnp.diag(c)))

    def loss(za, zb):
        za, zb = za.astype(jnp.float32), zb.astype(jnp.float32)
        similar = jnp.mean((za - zb) ** 2)
        za, zb = za - za.mean(0), zb - zb.mean(0)
        hinge = sum(jnp.mean(jax.nn.relu(1.0 - jnp.sqrt(z.var(0, ddof=1) + 1e-4))) for z in (za, zb)) / 2
        covariance = sum(off_diagonal(z.T @ z / (b - 1)) / n for z in (za, zb))
        return 25.0 * similar + 25.0 * hinge + covariance

    z = normal(b, n, dtype=dtype, scale=0.7)
    return Built(jax.value_and_grad(loss, argnums=(0, 1)), (z, z))


@program("moco-queue-momentum-step", GROUP)
def _moco(size: Size) -> Built:
    """A step of MoCo's heads: queries against keys and a queue, the queue's replacement, the momentum of the key head."""
    b, n, d, k = pick(size, (1024, 2048, 128, 65536), (64, 256, 64, 4096), (4, 8, 4, 12))
    dtype = half(size)

    def head(p, x):
        y = jax.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"]
        y = y.astype(jnp.float32)
        return y / (jnp.linalg.norm(y, axis=-1, keepdims=True) + 1e-6)

    def loss(p, x, keys, queue):
        q = head(p, x)
        positive = jnp.sum(q * keys, axis=-1, keepdims=True)
        negative = (q.astype(dtype) @ queue.T).astype(jnp.float32)
        logits = jnp.concatenate([positive, negative], axis=1) / 0.2
        accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == 0)
        return -jnp.mean(jax.nn.log_softmax(logits, axis=-1)[:, 0]), accuracy

    def step(p, slow, x1, x2, queue, pointer):
        slow = jax.tree.map(lambda s, f: (0.999 * s + 0.001 * f).astype(s.dtype), slow, p)
        keys = lax.stop_gradient(head(slow, x2))
        (value, accuracy), grads = jax.value_and_grad(loss, has_aux=True)(p, x1, keys, queue)
        queue = lax.dynamic_update_slice(queue, keys.astype(dtype), (pointer * b, 0))
        p = jax.tree.map(lambda a, g: (a - 0.03 * g).astype(a.dtype), p, grads)
        return p, slow, queue, (pointer + 1) % (k // b), value, accuracy

    params = {"w1": weight(n, n, dtype=dtype), "b1": normal(n, dtype=dtype), "w2": weight(n, d, dtype=dtype)}
    x, queue = normal(b, n, dtype=dtype), normal(k, d, dtype=dtype, scale=d**-0.5)
    return Built(step, (params, params, x, x, queue, integers(below=k // b)))


@program("lion-clipped-average-update", GROUP)
def _lion(size: Size) -> Built:
    """Lion over a tree of parameters: a clip by the global norm, decoupled decay off for vectors, an average of weights."""
    layers, n = 2, pick(size, 3072, 384, 6)
    dtype = half(size)

    def update(params, grads, momentum, average, count):
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))
        scale = jnp.minimum(1.0, 1.0 / (norm + 1e-6))
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) * scale, grads)
        progress = jnp.clip(count / 1000.0, 0.0, 1.0)
        rate = 1e-4 * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))

        def one(p, g, m):
            decay = 0.1 if p.ndim > 1 else 0.0
            direction = jnp.sign(0.9 * m + 0.1 * g) + decay * p
            return p - rate * direction

        new = jax.tree.map(one, params, grads, momentum)
        momentum = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g, momentum, grads)
        average = jax.tree.map(lambda a, p: a + (p - a) * 0.001, average, new)
        cast = jax.tree.map(lambda p: p.astype(dtype), new)
        return new, cast, momentum, average, count + 1, norm

    def tree(kind):
        one = {"w1": weight(n, 4 * n, dtype=kind), "w2": weight(4 * n, n, dtype=kind)}
        return [one | {"scale": gain(n, kind), "bias": normal(n, dtype=kind)} for _ in range(layers)]

    f32 = jnp.float32
    return Built(update, (tree(f32), tree(dtype), tree(f32), tree(f32), integers(below=1000)))


@program("soap-rotated-adam-update", GROUP)
def _soap(size: Size) -> Built:
    """Adam in the eigenbases of Shampoo's factors, as SOAP does between refreshes, with a QR step of the bases."""
    m, n = pick(size, (512, 384), (160, 96), (6, 4))

    def update(p, g, state):
        left = 0.95 * state["left"] + 0.05 * g @ g.T
        right = 0.95 * state["right"] + 0.05 * g.T @ g
        ql, _ = jnp.linalg.qr(left @ state["ql"])
        qr, _ = jnp.linalg.qr(right @ state["qr"])
        momentum = 0.95 * state["m"] + 0.05 * g
        rotated = ql.T @ g @ qr
        v = 0.95 * jnp.square(state["v"]) + 0.05 * jnp.square(rotated)
        step = ql @ ((ql.T @ momentum @ qr) / (jnp.sqrt(v) + 1e-8)) @ qr.T
        step = step * jnp.minimum(1.0, 1.0 / (jnp.sqrt(jnp.mean(step**2)) + 1e-8))
        p = p - 3e-3 * (step + 0.01 * p)
        return p, {"left": left, "right": right, "ql": ql, "qr": qr, "m": momentum, "v": jnp.sqrt(v)}

    state = {"left": normal(m, m), "right": normal(n, n), "ql": weight(m, m), "qr": weight(n, n)}
    state |= {"m": normal(m, n, scale=0.1), "v": normal(m, n, scale=0.1, offset=1.0)}
    return Built(update, (normal(m, n, scale=0.05), normal(m, n), state))


@program("dice-and-boundary-segmentation-grad", GROUP)
def _dice(size: Size) -> Built:
    """A segmenter's loss: generalised Dice by class, cross-entropy weighted near boundaries, an ignored label."""
    b, side, classes = pick(size, (8, 512, 21), (2, 96, 8), (1, 8, 3))
    dtype = half(size)

    def boundary(onehot):
        dims, strides = (1, 5, 5, 1), (1, 1, 1, 1)
        grown = lax.reduce_window(onehot, -jnp.inf, lax.max, dims, strides, "SAME")
        eroded = -lax.reduce_window(-onehot, -jnp.inf, lax.max, dims, strides, "SAME")
        return jnp.max(grown - eroded, axis=-1)

    def loss(logits, labels, valid):
        logits = logits.astype(jnp.float32)
        onehot = jax.nn.one_hot(labels, classes) * valid[..., None]
        weights = (1.0 + 4.0 * boundary(onehot)) * valid
        ce = -jnp.sum(onehot * jax.nn.log_softmax(logits, axis=-1), axis=-1)
        ce = jnp.sum(ce * weights) / jnp.maximum(jnp.sum(weights), 1.0)
        probs = jax.nn.softmax(logits, axis=-1) * valid[..., None]
        volume = jnp.sum(onehot, axis=(1, 2))
        w = 1.0 / (volume**2 + 1.0)
        inter = jnp.sum(w * jnp.sum(probs * onehot, axis=(1, 2)), axis=-1)
        total = jnp.sum(w * (jnp.sum(probs, axis=(1, 2)) + volume), axis=-1)
        return ce + jnp.mean(1.0 - 2.0 * inter / (total + 1e-6))

    args = (
        normal(b, side, side, classes, dtype=dtype),
        integers(b, side, side, below=classes),
        booleans(b, side, side),
    )
    return Built(jax.value_and_grad(loss), args)


@program("arcface-margin-softmax-grad", GROUP)
def _arcface(size: Size) -> Built:
    """Face recognition with an additive angular margin: cosines to class centres, the target's angle widened."""
    b, n, classes = pick(size, (512, 512, 85742), (64, 128, 3000), (3, 6, 7))
    dtype, margin, scale = half(size), 0.5, 64.0

    def unit(x):
        x = x.astype(jnp.float32)
        return (x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-12)).astype(dtype)

    def loss(embeddings, centres, labels):
        cosine = (unit(embeddings) @ unit(centres).T).astype(jnp.float32)
        sine = jnp.sqrt(jnp.clip(1.0 - cosine**2, 1e-9, 1.0))
        phi = cosine * np.cos(margin) - sine * np.sin(margin)
        phi = jnp.where(cosine > np.cos(np.pi - margin), phi, cosine - np.sin(np.pi - margin) * margin)
        target = labels[:, None] == jnp.arange(classes)[None, :]
        logits = scale * jnp.where(target, phi, cosine)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(target, logits, 0.0), axis=-1))

    args = (normal(b, n, dtype=dtype), normal(classes, n, dtype=dtype), integers(b, below=classes))
    return Built(jax.value_and_grad(loss, argnums=(0, 1)), args)


@program("soft-actor-critic-targets-linen", GROUP)
def _sac(size: Size) -> Built:
    """A critic's step of soft actor-critic in Flax Linen: a squashed Gaussian policy, twin ensembled critics, targets."""
    from flax import linen as nn

    b, o, a, width = pick(size, (4096, 376, 17, 1024), (256, 48, 6, 128), (4, 5, 2, 8))

    class Policy(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(width)(nn.relu(nn.Dense(width)(x))))
            return nn.Dense(a)(x), jnp.clip(nn.Dense(a)(x), -20.0, 2.0)

    class Critic(nn.Module):
        @nn.compact
        def __call__(self, x, action):
            x = jnp.concatenate([x, action], axis=-1)
            for _ in range(2):
                x = nn.relu(nn.LayerNorm()(nn.Dense(width)(x)))
            return nn.Dense(1)(x)[..., 0]

    policy = Policy()
    critics = nn.vmap(Critic, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2)()

    def step(pi, critic, target, log_alpha, obs, action, reward, done, following, noise):
        mean, log_std = policy.apply(pi, following)
        raw = mean + jnp.exp(log_std) * noise
        logp = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
        logp = jnp.sum(logp - 2.0 * (np.log(2.0) - raw - jax.nn.softplus(-2.0 * raw)), axis=-1)
        future = jnp.min(critics.apply(target, following, jnp.tanh(raw)), axis=0) - jnp.exp(log_alpha) * logp
        backup = lax.stop_gradient(reward + 0.99 * jnp.where(done, 0.0, future))

        def loss(params):
            return jnp.mean((critics.apply(params, obs, jnp.tanh(action)) - backup[None]) ** 2)

        value, grads = jax.value_and_grad(loss)(critic)
        critic = jax.tree.map(lambda p, g: p - 3e-4 * g, critic, grads)
        target = jax.tree.map(lambda t, p: 0.995 * t + 0.005 * p, target, critic)
        alpha_grad = -jnp.mean(logp - a)
        return critic, target, log_alpha - 3e-4 * alpha_grad, value

    x, act, key = normal(b, o), normal(b, a), jax.random.key(0)
    pi = like(jax.eval_shape(policy.init, key, x.struct))
    q = like(jax.eval_shape(critics.init, key, x.struct, act.struct))
    return Built(step, (pi, q, q, normal(), x, act, normal(b), booleans(b), x, act))


@program("calibration-temperature-newton", GROUP)
def _calibration(size: Size) -> Built:
    """Temperature scaling of a classifier by Newton's steps, then its expected calibration error over bins and Brier score."""
    n, classes, rounds, bins = pick(size, (20000, 1000, 4, 15), (1000, 100, 3, 10), (8, 5, 2, 4))
    dtype = half(size)

    def fit(logits, labels):
        logits = logits.astype(jnp.float32)
        picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]

        def newton(_, beta):
            p = jax.nn.softmax(beta * logits, axis=-1)
            mean = jnp.sum(p * logits, axis=-1)
            spread = jnp.sum(p * (logits - mean[:, None]) ** 2, axis=-1)
            step = jnp.mean(mean - picked) / (jnp.mean(spread) + 1e-6)
            return jnp.clip(beta - step, 0.05, 10.0)

        beta = lax.fori_loop(0, rounds, newton, 1.0)
        p = jax.nn.softmax(beta * logits, axis=-1)
        confidence, hit = jnp.max(p, axis=-1), (jnp.argmax(p, axis=-1) == labels).astype(jnp.float32)
        which = jnp.clip((confidence * bins).astype(jnp.int32), 0, bins - 1)
        count, right, sure = (jax.ops.segment_sum(x, which, bins) for x in (jnp.ones_like(confidence), hit, confidence))
        ece = jnp.sum(jnp.abs(right - sure)) / n
        brier = jnp.mean(jnp.sum((p - jax.nn.one_hot(labels, classes)) ** 2, axis=-1))
        return 1.0 / beta, ece, brier, right / jnp.maximum(count, 1.0)

    return Built(fit, (normal(n, classes, dtype=dtype, scale=2.0), integers(n, below=classes)))
