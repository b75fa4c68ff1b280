"""Ordinary training steps and loops over data, the eleventh set: its author had seen no plan."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import logsumexp

from benchmarks.workloads.eleventh_language import rms_norm
from benchmarks.workloads.eleventh_vision import module_weights
from benchmarks.workloads.registry import Built, Size, gain, half, integers, normal, pick, program, weight

GROUP = "eleventh"


@program("noisy-top-two-gates-balance-grad", GROUP)
def _noisy_gates(size: Size) -> Built:
    """This gives the loss and gradient of a mixture of experts with noisy gates and a penalty on unequal use.

    Noise whose deviation depends on the token is added before the two best experts are chosen; the penalty is the squared
    coefficient of variation of the gates' sums and of the smooth probability to be among the two.
    """
    tokens, n, wide, experts, best = pick(size, (3000, 768, 1152, 12, 2), (197, 192, 384, 6, 2), (5, 8, 12, 4, 2))
    dtype = half(size)

    def unequal(x):
        return jnp.var(x) / (jnp.mean(x) ** 2 + 1e-10)

    def gate(p, x, noise):
        x = x.astype(jnp.float32)
        clean = x @ p["router"]
        deviation = jax.nn.softplus(x @ p["deviation"]) + 1e-2
        noisy = clean + noise * deviation
        top, chosen = lax.top_k(noisy, best + 1)
        share = jax.nn.softmax(top[:, :best], axis=-1)
        gates = jnp.zeros((tokens, experts)).at[jnp.arange(tokens)[:, None], chosen[:, :best]].set(share)
        inside = noisy >= top[:, best - 1 : best]
        threshold = jnp.where(inside, top[:, best : best + 1], top[:, best - 1 : best])
        load = jnp.sum(jax.scipy.stats.norm.cdf((clean - threshold) / deviation), axis=0)
        return gates, unequal(jnp.sum(gates, axis=0)) + unequal(load)

    def loss(p, x, noise, target):
        gates, penalty = gate(p, x, noise)
        hidden = jax.nn.relu(jnp.einsum("tn,enf->etf", x, p["up"]) + p["up_bias"][:, None])
        out = jnp.einsum("etf,efn->etn", hidden, p["down"])
        y = x + jnp.einsum("te,etn->tn", gates.astype(dtype), out)
        error = jnp.mean((y.astype(jnp.float32) - target.astype(jnp.float32)) ** 2)
        return error + 0.01 * penalty, (error, penalty)

    params = {
        "router": weight(n, experts),
        "deviation": weight(n, experts),
        "up": weight(experts, n, wide, dtype=dtype),
        "up_bias": normal(experts, wide, dtype=dtype, scale=0.02),
        "down": weight(experts, wide, n, dtype=dtype),
    }
    x = normal(tokens, n, dtype=dtype)
    return Built(jax.value_and_grad(loss, has_aux=True), (params, x, normal(tokens, experts), x))


@program("sentence-pairs-hard-negatives-smoothed-grad", GROUP)
def _pairs(size: Size) -> Built:
    """This gives the loss and gradient of an embedder of questions and answers with answers that are known to be wrong.

    A question is compared with every answer of the batch and with its own hard negatives; answers that belong to the same document
    are no negatives, the label is smoothed over the rest, and the temperature is learned.
    """
    b, n, width, hard = pick(size, (1000, 768, 384, 7), (197, 384, 192, 5), (4, 6, 5, 2))
    dtype, smoothing = half(size), 0.1

    def embed(p, x):
        y = jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"]
        y = y.astype(jnp.float32)
        return y / jnp.maximum(jnp.linalg.norm(y, axis=-1, keepdims=True), 1e-6)

    def loss(p, questions, answers, negatives, document):
        q, a, wrong = embed(p, questions), embed(p, answers), embed(p, negatives)
        scale = jnp.exp(jnp.clip(p["log_scale"], 0.0, 4.6))
        batch = q @ a.T * scale
        own = jnp.einsum("bn,bhn->bh", q, wrong) * scale
        same = (document[:, None] == document[None, :]) & ~jnp.eye(b, dtype=bool)
        logits = jnp.concatenate([jnp.where(same, -jnp.inf, batch), own], axis=1)
        log_probs = jnp.maximum(jax.nn.log_softmax(logits, axis=1), -1e4)
        allowed = jnp.concatenate([~same, jnp.ones((b, hard), bool)], axis=1)
        rest = jnp.sum(jnp.where(allowed, log_probs, 0.0), axis=1) / jnp.sum(allowed, axis=1)
        right = jnp.diagonal(log_probs)
        found = jnp.mean(jnp.argmax(logits, axis=1) == jnp.arange(b))
        return -jnp.mean((1.0 - smoothing) * right + smoothing * rest), found

    params = {
        "w1": weight(n, n, dtype=dtype),
        "b1": normal(n, dtype=dtype, scale=0.02),
        "w2": weight(n, width, dtype=dtype),
        "log_scale": normal(scale=0.01, offset=3.0),
    }
    inputs = (normal(b, n, dtype=dtype), normal(b, n, dtype=dtype), normal(b, hard, n, dtype=dtype))
    return Built(jax.value_and_grad(loss, has_aux=True), (params, *inputs, integers(b, below=3 * b)))


@program("final-norm-word-head-masked-z-loss-grad", GROUP)
def _word_head(size: Size) -> Built:
    """This gives the loss of a language model's head and its gradient to the hidden vectors, the last norm and the words.

    The hidden vectors are normed and compared with every word; the loss is the cross-entropy plus a small multiple of the squared
    logarithm of the partition sum, averaged over the tokens of the answers only.
    """
    b, t, n, words = pick(size, (5, 333, 768, 50257), (1, 77, 192, 30522), (2, 5, 8, 11))
    dtype, z_weight = half(size), 1e-4

    def loss(p, hidden, labels, first):
        x = rms_norm(hidden, p["norm"])
        logits = jnp.einsum("btn,vn->btv", x, p["words"]).astype(jnp.float32)
        log_z = logsumexp(logits, axis=-1)
        right = jnp.take_along_axis(logits, labels[..., None], axis=-1).squeeze(-1)
        mask = (jnp.arange(t)[None, :] >= first[:, None]).astype(jnp.float32)
        total = mask.sum()
        entropy = jnp.sum((log_z - right) * mask) / total
        z_loss = z_weight * jnp.sum(log_z**2 * mask) / total
        hits = jnp.sum((jnp.argmax(logits, axis=-1) == labels) * mask) / total
        return entropy + z_loss, {"entropy": entropy, "z_loss": z_loss, "accuracy": hits}

    params = {"norm": gain(n, dtype), "words": normal(words, n, dtype=dtype, scale=n**-0.5)}
    inputs = (normal(b, t, n, dtype=dtype), integers(b, t, below=words), integers(b, below=t))
    return Built(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), (params, *inputs))


@program("lstm-next-word-grad-linen", GROUP)
def _lstm(size: Size) -> Built:
    """This gives the loss and gradient of a language model that is an LSTM: embedding, recurrence over time, and a head.

    The recurrence is the `RNN` of Flax, which scans a cell; states past a sequence's length do not count in the loss.
    """
    import flax.linen as nn

    b, t, n, words = pick(size, (12, 53, 384, 32003), (3, 41, 192, 5003), (2, 5, 6, 11))
    dtype = half(size)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(words, n, dtype=dtype)(tokens)
            x = nn.RNN(nn.OptimizedLSTMCell(n, dtype=dtype))(x)
            x = nn.LayerNorm(dtype=dtype)(x)
            return nn.Dense(words, dtype=dtype)(x)

    module, tokens = Model(), integers(b, t + 1, below=words)

    def loss(params, tokens, lengths):
        logits = module.apply(params, tokens[:, :-1]).astype(jnp.float32)
        targets = jax.nn.one_hot(tokens[:, 1:], words)
        each = -jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)
        mask = jnp.arange(t)[None] <= lengths[:, None]
        return jnp.sum(jnp.where(mask, each, 0.0)) / jnp.sum(mask)

    structs = jax.eval_shape(lambda x: module.init(jax.random.key(0), x[:, :-1]), tokens.struct)
    return Built(jax.value_and_grad(loss), (module_weights(structs, dtype), tokens, integers(b, below=t)))


@program("dropout-glu-residual-layers-grad", GROUP)
def _glu(size: Size) -> Built:
    """This gives the loss and gradient of two residual layers that norm, gate and project each token, with dropout.

    Hidden units are a SiLU of one half times the other half of a single product, a tenth of each layer's output is dropped by a
    random key, and the loss is a smooth L1 distance to a target.
    """
    b, t, n, wide = pick(size, (5, 333, 1152, 3072), (1, 77, 384, 1024), (2, 5, 8, 12))
    dtype, rate = half(size), 0.1

    def layer(p, x, key):
        gate, up = jnp.split(rms_norm(x, p["norm"]) @ p["inwards"], 2, axis=-1)
        y = (jax.nn.silu(gate) * up) @ p["outwards"]
        keep = jax.random.bernoulli(key, 1.0 - rate, y.shape)
        return x + jnp.where(keep, y / (1.0 - rate), 0).astype(dtype)

    def loss(layers, x, target, seed):
        for p, key in zip(layers, jax.random.split(jax.random.key(seed), len(layers)), strict=True):
            x = layer(p, x, key)
        error = jnp.abs(x.astype(jnp.float32) - target.astype(jnp.float32))
        return jnp.mean(jnp.where(error < 1.0, 0.5 * error**2, error - 0.5))

    one = {
        "norm": gain(n, dtype),
        "inwards": weight(n, 2 * wide, dtype=dtype),
        "outwards": weight(wide, n, dtype=dtype),
    }
    x = normal(b, t, n, dtype=dtype)
    return Built(jax.value_and_grad(loss), ([one] * 2, x, x, integers(below=10000)))


@program("adamw-clipped-skips-overflow-update", GROUP)
def _adamw(size: Size) -> Built:
    """This gives the weights after a step of AdamW on gradients in half precision, which are clipped by their common norm.

    The gradients are divided by the loss scale first, and a step whose norm is not finite changes nothing; the rate warms up and
    decays by a cosine, only matrices decay, and a copy of the weights in half precision is returned for the next step.
    """
    words, n, wide = pick(size, (50257, 384, 1536), (5003, 384, 1536), (7, 6, 8))
    dtype, limit, b1, b2, eps, decay = half(size), 1.0, 0.9, 0.95, 1e-8, 0.1

    def rate(step):
        warm = jnp.minimum(step / 500.0, 1.0)
        return 3e-4 * warm * 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.clip(step / 20000.0, 0.0, 1.0)))

    def update(params, grads, mean, square, step, loss_scale):
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / loss_scale, grads)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        fine = jnp.isfinite(norm)
        factor = jnp.where(fine, jnp.minimum(1.0, limit / (norm + 1e-6)), 0.0)
        step = step + fine.astype(jnp.int32)
        time = step.astype(jnp.float32)

        def one(p, g, m, v):
            g = jnp.where(fine, g * factor, 0.0)
            new_m, new_v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            direction = (new_m / (1 - b1**time)) / (jnp.sqrt(new_v / (1 - b2**time)) + eps)
            new_p = p - rate(time) * (direction + (decay * p if p.ndim > 1 else 0.0))
            return tuple(jnp.where(fine, new, old) for new, old in ((new_p, p), (new_m, m), (new_v, v)))

        out = jax.tree.map(one, params, grads, mean, square)
        params, mean, square = (jax.tree.map(lambda _, o, i=i: o[i], params, out) for i in range(3))
        return params, mean, square, step, norm, jax.tree.map(lambda p: p.astype(dtype), params)

    shapes = {"words": (words, n), "qkv": (n, 3 * n), "out": (n, n), "up": (n, wide), "down": (wide, n)}
    shapes |= {"norm": (n,), "up_bias": (wide,)}

    def tree(dtype=jnp.float32, scale=1.0, offset=0.0):
        return {k: normal(*s, dtype=dtype, scale=scale, offset=offset) for k, s in shapes.items()}

    state = (tree(scale=0.02), tree(dtype, scale=0.5), tree(scale=1e-4), tree(scale=0.0, offset=1e-6))
    return Built(update, (*state, integers(below=1000), normal(scale=0.0, offset=1024.0)))


@program("lloyd-means-few-rounds", GROUP)
def _lloyd(size: Size) -> Built:
    """This gives the centres of clusters after some rounds of k-means, with every point's cluster and the remaining distance.

    Each round assigns the points to the nearest centre and moves the centres to the means of their points; a centre that has lost
    all of its points stays where it is.
    """
    count, n, clusters, rounds = pick(size, (50021, 96, 333, 6), (3001, 48, 77, 6), (17, 3, 4, 2))

    def distances(points, centres):
        cross = points @ centres.T
        return jnp.sum(points**2, axis=1)[:, None] - 2.0 * cross + jnp.sum(centres**2, axis=1)[None, :]

    def run(points, centres):
        def one_round(_, centres):
            nearest = jnp.argmin(distances(points, centres), axis=1)
            sums = jax.ops.segment_sum(points, nearest, clusters)
            number = jax.ops.segment_sum(jnp.ones(count), nearest, clusters)[:, None]
            return jnp.where(number > 0, sums / jnp.maximum(number, 1.0), centres)

        centres = lax.fori_loop(0, rounds, one_round, centres)
        final = jnp.maximum(distances(points, centres), 0.0)
        return centres, jnp.argmin(final, axis=1), jnp.mean(jnp.min(final, axis=1))

    return Built(run, (normal(count, n), normal(clusters, n)))


@program("keypoint-matching-dustbin-sinkhorn", GROUP)
def _matching(size: Size) -> Built:
    """This gives the matches between the key points of two images by entropic transport with a bin for unmatched points.

    Scores are products of normed descriptors; a row and a column with one learned score are added, some rounds in the logarithm
    balance rows and columns, and points match that are each other's best with enough weight.
    """
    b, left, right, n, rounds = pick(size, (5, 777, 1000, 96, 20), (3, 197, 333, 96, 12), (2, 5, 4, 6, 3))

    def balance(scores, rows, columns):
        def one_round(_, duals):
            u, v = duals
            u = rows - logsumexp(scores + v[:, None, :], axis=2)
            v = columns - logsumexp(scores + u[:, :, None], axis=1)
            return u, v

        start = (jnp.zeros((b, left + 1)), jnp.zeros((b, right + 1)))
        u, v = lax.fori_loop(0, rounds, one_round, start)
        return scores + u[:, :, None] + v[:, None, :]

    def unit(x):
        return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-12)

    def match(first, second, bin_score):
        scores = jnp.einsum("bln,brn->blr", unit(first), unit(second)) * 10.0
        scores = jnp.pad(scores, ((0, 0), (0, 1), (0, 1)))
        bins = (jnp.arange(left + 1) == left)[:, None] | (jnp.arange(right + 1) == right)[None, :]
        scores = jnp.where(bins, bin_score, scores)
        mass = -jnp.log(jnp.asarray(left + right, jnp.float32))
        rows = jnp.full(left + 1, mass).at[-1].set(jnp.log(right) + mass)
        columns = jnp.full(right + 1, mass).at[-1].set(jnp.log(left) + mass)
        plan = (balance(scores, rows, columns) - mass)[:, :left, :right]
        best, back = jnp.argmax(plan, axis=2), jnp.argmax(plan, axis=1)
        weights = jnp.exp(jnp.max(plan, axis=2))
        mutual = jnp.take_along_axis(back, best, axis=1) == jnp.arange(left)[None]
        return jnp.where(mutual & (weights > 0.02), best, -1), jnp.where(mutual, weights, 0.0)

    return Built(match, (normal(b, left, n), normal(b, right, n), normal(scale=0.01, offset=1.0)))
