"""Losses with their gradients and whole training steps, the twenty-first set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, gain, half, integers, normal, pick, program, weight

GROUP = "twenty-first"


def _norm(x, scale):
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def _block(p, x, mask, h):
    """This runs a layer of attention and a gated block; x: [batch, time, channels]."""
    b, t, n = x.shape
    q, k, v = jnp.moveaxis((_norm(x, p["norm"]) @ p["qkv"]).reshape(b, t, 3, h, n // h), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * (n // h) ** -0.5
    probs = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1).astype(x.dtype)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(b, t, n) @ p["out"]
    gate, up = jnp.split(_norm(x, p["norm2"]) @ p["up"], 2, axis=-1)
    return x + (jax.nn.silu(gate) * up) @ p["down"]


def _block_weights(n, m, dtype):
    p = {
        "qkv": weight(n, 3 * n, dtype=dtype),
        "out": weight(n, n, dtype=dtype),
        "norm": gain(n, dtype),
        "norm2": gain(n, dtype),
    }
    return p | {"up": weight(n, 2 * m, dtype=dtype), "down": weight(m, n, dtype=dtype)}


@program("cross-entropy-with-first-power-terms-and-soft-labels-grad", GROUP)
def _poly(size: Size) -> Built:
    """This gives the loss of classes with an added power of the error and smoothed labels, as PolyLoss (Leng, 2022)."""
    rows, classes = pick(size, (4096, 11003), (600, 5003), (5, 7))

    def loss(logits, labels, class_weights):
        logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        target = jax.nn.one_hot(labels, classes) * 0.9 + 0.1 / classes
        right = jnp.sum(target * jnp.exp(logp), axis=-1)
        each = -jnp.sum(target * logp, axis=-1) + 2.0 * (1 - right)
        w = jnp.where(labels == 0, 0.0, jnp.exp(0.1 * class_weights)[labels])
        return jnp.sum(each * w) / jnp.maximum(jnp.sum(w), 1.0), right

    def step(logits, labels, class_weights):
        (value, right), grad = jax.value_and_grad(loss, has_aux=True)(logits, labels, class_weights)
        return value, grad, jnp.mean(right)

    return Built(
        step, (normal(rows, classes, dtype=half(size), scale=2.0), integers(rows, below=classes), normal(classes))
    )


@program("search-results-swapped-in-pairs-lambda-gradients", GROUP)
def _lambda_rank(size: Size) -> Built:
    """This gives gradients and curvatures of rankings by how each swap would change the gain, as LambdaMART (2010).

    Lists of unequal length are padded; the gains are cut off after the best places, as boosted trees are trained.
    """
    lists, docs, features = pick(size, (512, 199, 136), (48, 120, 136), (3, 7, 4))

    def gradients(table, coefficients, grades, short):
        alive = jnp.arange(docs) < docs - short[:, None]
        scores = jnp.where(alive, jnp.tanh(table @ coefficients), -jnp.inf)
        order = jnp.argsort(-scores, axis=-1, stable=True)
        rank = jnp.argsort(order, axis=-1)
        gains = jnp.where(alive, 2.0 ** grades.astype(jnp.float32) - 1, 0.0)
        discount = jnp.where(jnp.arange(docs) < 30, 1 / jnp.log2(jnp.arange(docs) + 2.0), 0.0)
        ideal = jnp.sum(jnp.sort(gains, axis=-1, descending=True) * discount, axis=-1)
        worth = jnp.where(ideal > 0, 1 / jnp.maximum(ideal, 1e-6), 0.0)
        own = discount[rank]
        swap = jnp.abs((gains[:, :, None] - gains[:, None]) * (own[:, :, None] - own[:, None])) * worth[:, None, None]
        finite = jnp.where(alive, scores, 0.0)
        gap = finite[:, :, None] - finite[:, None]
        swap = swap / (0.01 + jnp.abs(gap))
        better = (grades[:, :, None] > grades[:, None]) & alive[:, :, None] & alive[:, None]
        rho = jax.nn.sigmoid(-gap)
        lam = jnp.where(better, rho * swap, 0.0)
        bend = jnp.where(better, rho * (1 - rho) * swap, 0.0)
        gradient = jnp.sum(lam, axis=1) - jnp.sum(lam, axis=2)
        curve = jnp.sum(bend, axis=1) + jnp.sum(bend, axis=2)
        total = jnp.sum(lam, axis=(1, 2))
        scale = jnp.log2(1 + total) / jnp.maximum(total, 1e-6)
        quality = jnp.sum(gains * own, axis=-1) * worth
        return gradient * scale[:, None], curve * scale[:, None], quality, jnp.mean(quality)

    inputs = (normal(lists, docs, features, dtype=half(size)), normal(features, dtype=half(size), scale=features**-0.5))
    return Built(gradients, (*inputs, integers(lists, docs, below=5), integers(lists, below=docs // 2)))


@program("weights-pushed-ahead-by-three-averages-update", GROUP)
def _adan(size: Size) -> Built:
    """This updates every weight with averages of gradients, of their changes and of both squared, as Adan (Xie, 2022)."""
    n, m, words, layers = pick(size, (1024, 2816, 16001, 4), (384, 1024, 4001, 4), (6, 10, 13, 4))

    def update(params, grads, state, step):
        total = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))
        clip = jnp.minimum(1.0, 1.0 / (total + 1e-6))
        count = step.astype(jnp.float32) + 1.0
        fix1, fix2, fix3 = (1 - b**count for b in (0.98, 0.92, 0.99))

        def one(w, g, s):
            decay = 0.02 if w.ndim > 1 else 0.0
            g = g.astype(jnp.float32) * clip
            change = jnp.where(step == 0, 0.0, g - s["before"].astype(jnp.float32))
            mean = 0.98 * s["mean"] + 0.02 * g
            drift = 0.92 * s["drift"] + 0.08 * change
            square = 0.99 * jnp.abs(s["square"]) + 0.01 * jnp.square(g + 0.92 * change)
            move = (mean / fix1 + 0.92 * drift / fix2) / (jnp.sqrt(square / fix3) + 1e-8)
            fresh = (w.astype(jnp.float32) - 1e-3 * move) / (1 + 1e-3 * decay)
            rest = {"mean": mean, "drift": drift, "square": square, "before": g.astype(w.dtype)}
            return fresh.astype(w.dtype), rest, jnp.linalg.norm(move) / (jnp.linalg.norm(fresh) + 1e-6)

        done = {k: one(w, grads[k], state[k]) for k, w in params.items()}
        fresh, states, ratios = ({k: v[i] for k, v in done.items()} for i in range(3))
        return fresh, states, ratios, total

    shapes = {"table": (words, n), "last": (n,)}
    for i in range(layers):
        shapes |= {f"qkv{i}": (n, 3 * n), f"out{i}": (n, n), f"up{i}": (n, m), f"down{i}": (m, n), f"norm{i}": (n,)}
    dtype = half(size)
    params = {k: normal(*s, dtype=dtype, scale=0.02) for k, s in shapes.items()}
    grads = {k: normal(*s, dtype=dtype, scale=0.01) for k, s in shapes.items()}
    state = {
        k: {z: normal(*s, scale=1e-3) for z in ("mean", "drift", "square")}
        | {"before": normal(*s, dtype=dtype, scale=0.01)}
        for k, s in shapes.items()
    }
    return Built(update, (params, grads, state, integers(below=1000)))


@program("answers-rewarded-against-the-mean-of-their-rivals-adamw-step", GROUP)
def _rloo(size: Size) -> Built:
    """This trains a language model on rewards less the mean of rival answers (RLOO, Ahmadian, 2024) with AdamW.

    A penalty pulls towards a reference model's word chances; the layers are recomputed in the gradient.
    """
    prompts, answers, t, n, h, m, words = pick(
        size, (4, 4, 257, 512, 8, 1408, 16001), (1, 4, 49, 192, 4, 512, 3001), (2, 3, 6, 8, 2, 12, 11)
    )
    dtype, b = half(size), prompts * answers

    def model(p, tokens):
        x = p["table"][tokens] + p["places"][: tokens.shape[1]]
        mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        x, _ = lax.scan(jax.checkpoint(lambda x, q: (_block(q, x, mask, h), None)), x, p["layers"])
        return (_norm(x, p["last"]) @ p["table"].T).astype(jnp.float32) * n**-0.5

    def chances(p, tokens):
        logp = jax.nn.log_softmax(model(p, tokens[:, :-1]), axis=-1)
        own = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]
        return own, -jnp.sum(jnp.exp(logp) * logp, axis=-1)

    def loss(p, tokens, mask, reward, reference):
        own, entropy = chances(p, tokens)
        rivals = (jnp.sum(reward, axis=1, keepdims=True) - reward) / (answers - 1)
        gain_ = (reward - rivals).reshape(b, 1)
        apart = reference - own
        kl = jnp.exp(jnp.clip(apart, -10, 5)) - apart - 1
        count = jnp.maximum(jnp.sum(mask, axis=1), 1.0)
        policy = -jnp.sum(jnp.sum(own * mask, axis=1) * gain_[:, 0]) / jnp.sum(mask)
        kl = jnp.mean(jnp.sum(kl * mask, axis=1) / count)
        return policy + 0.05 * kl, (kl, jnp.sum(entropy * mask) / jnp.sum(mask))

    def step(p, first, second, reference, tokens, lengths, raw, count):
        place = jnp.arange(t - 1)
        mask = ((place >= t // 4) & (place < t // 2 + lengths[:, None])).astype(jnp.float32)
        reward = jax.nn.sigmoid(raw)
        (value, extra), grads = jax.value_and_grad(loss, has_aux=True)(p, tokens, mask, reward, reference)
        total = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))
        at = count.astype(jnp.float32) + 1
        clip = jnp.minimum(1.0, 1 / (total + 1e-6))
        first = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * clip * g.astype(jnp.float32), first, grads)
        second = jax.tree.map(
            lambda a, g: 0.95 * jnp.abs(a) + 0.05 * jnp.square(clip * g.astype(jnp.float32)), second, grads
        )

        def move(w, a, s):
            change = a / (1 - 0.9**at) / (jnp.sqrt(s / (1 - 0.95**at)) + 1e-8)
            return (w.astype(jnp.float32) - 1e-5 * (change + 0.1 * w.astype(jnp.float32))).astype(w.dtype)

        return jax.tree.map(move, p, first, second), first, second, value, extra, total

    def weights(kind, scale):
        def of(*shape):
            return normal(*shape, dtype=kind, scale=scale or (shape[-2] ** -0.5 if len(shape) > 1 else 1.0))

        def scale_of(*shape):
            return normal(*shape, dtype=kind, scale=scale or 0.1, offset=0.0 if scale else 1.0)

        layers = {"qkv": of(3, n, 3 * n), "out": of(3, n, n), "up": of(3, n, 2 * m), "down": of(3, m, n)}
        layers |= {"norm": scale_of(3, n), "norm2": scale_of(3, n)}
        table = normal(words, n, dtype=kind, scale=scale or 1.0)
        return {
            "table": table,
            "places": normal(t, n, dtype=kind, scale=scale or 0.1),
            "layers": layers,
            "last": scale_of(n),
        }

    state = (weights(dtype, None), weights(jnp.float32, 1e-4), weights(jnp.float32, 1e-6))
    reference = normal(b, t - 1, scale=1.0, offset=-float(np.log(words)))
    inputs = (integers(b, t, below=words), integers(b, below=t // 2), normal(prompts, answers), integers(below=1000))
    return Built(step, (*state, reference, *inputs))


@program("faces-pulled-and-pushed-by-circles-of-likeness-grad", GROUP)
def _circle(size: Size) -> Built:
    """This gives the loss of likenesses of faces where each pair is weighted by its own error, as circle loss (2020)."""
    b, n, d, people = pick(size, (1536, 512, 256, 200), (500, 256, 128, 60), (8, 6, 4, 3))

    def loss(project, features, who, margin, sharp):
        z = (features @ project).astype(jnp.float32)
        z = z * lax.rsqrt(jnp.sum(z * z, axis=-1, keepdims=True) + 1e-12)
        alike = z @ z.T
        same = who[:, None] == who
        other, same = ~same, same & ~jnp.eye(b, dtype=bool)
        pull = lax.stop_gradient(jnp.maximum(1 + margin - alike, 0.0))
        push = lax.stop_gradient(jnp.maximum(alike + margin, 0.0))
        up = jnp.where(same, -sharp * pull * (alike - 1 + margin), -1e9)
        down = jnp.where(other, sharp * push * (alike - margin), -1e9)
        each = jax.nn.softplus(jax.nn.logsumexp(up, axis=1) + jax.nn.logsumexp(down, axis=1))
        some = jnp.any(same, axis=1) & jnp.any(other, axis=1)
        near = jnp.where(jnp.eye(b, dtype=bool), -jnp.inf, alike).argmax(axis=1)
        return jnp.sum(jnp.where(some, each, 0.0)) / jnp.maximum(jnp.sum(some), 1), jnp.mean(who[near] == who)

    def step(project, features, who):
        grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        return grads(project, features, who, 0.25, 32.0)

    dtype = half(size)
    return Built(step, (weight(n, d, dtype=dtype), normal(b, n, dtype=dtype), integers(b, below=people)))


@program("one-table-net-in-many-thin-copies-trained-together-step", GROUP)
def _tabm(size: Size) -> Built:
    """This trains a net for tables as many copies that share weights but scale them, as TabM (Gorishniy, 2024).

    Numbers become piecewise linear codes by bins, kinds are looked up, and the copies' losses are averaged.
    """
    rows, numbers, bins, kinds, levels, n, copies, classes = pick(
        size, (1024, 47, 24, 9, 31, 512, 32, 3), (256, 23, 16, 5, 13, 160, 8, 3), (4, 3, 4, 2, 5, 8, 3, 3)
    )
    dtype, width = half(size), 8
    inputs = numbers * width + kinds * width

    def encode(p, x):
        edges = jnp.sort(p["edges"], axis=-1)
        low, high = edges[:, :-1], edges[:, 1:]
        code = jnp.clip((x[:, :, None] - low) / jnp.maximum(high - low, 1e-3), 0, 1)
        return jax.nn.relu(jnp.einsum("rfb,fbw->rfw", code.astype(dtype), p["code"]) + p["code_bias"]).reshape(rows, -1)

    def loss(p, x, kind, labels, key):
        looked = p["kinds"][jnp.arange(kinds), kind].reshape(rows, -1)
        y = jnp.concatenate([encode(p, x), looked], axis=-1)
        y = jnp.broadcast_to(y[:, None], (rows, copies, inputs))
        for i, layer in enumerate(p["layers"]):
            y = ((y * layer["before"]) @ layer["w"]) * layer["after"] + layer["b"]
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, y.shape)
            y = jnp.where(keep, jax.nn.relu(y) / 0.9, 0).astype(dtype)
        logits = jnp.einsum("rcn,cno->rco", y, p["heads"]).astype(jnp.float32)
        logp = jax.nn.log_softmax(logits, axis=-1)
        each = -jnp.take_along_axis(logp, labels[:, None, None], axis=-1)[..., 0]
        mean = jnp.mean(jnp.exp(logp), axis=1)
        return jnp.mean(each), (jnp.mean(mean.argmax(-1) == labels), jnp.mean(each, axis=0))

    def step(p, momentum, x, kind, labels, seed):
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(p, x, kind, labels, jax.random.key(seed))
        momentum = jax.tree.map(lambda a, g: 0.9 * a + g.astype(jnp.float32), momentum, grads)
        fresh = jax.tree.map(lambda w, g, a: (w - 2e-3 * (g + 0.9 * a)).astype(w.dtype), p, grads, momentum)
        return fresh, momentum, value, aux

    def weights(kind, still):
        def of(*shape, scale=None, offset=0.0):
            return normal(
                *shape, dtype=kind, scale=1e-3 if still else scale or shape[-2] ** -0.5, offset=0.0 if still else offset
            )

        layers = []
        for i, o in ((inputs, n), (n, n), (n, n)):
            layers.append({"w": of(i, o), "b": of(copies, o, scale=0.1)})
            layers[-1] |= {
                "before": of(copies, i, offset=1.0, scale=0.3),
                "after": of(copies, o, offset=1.0, scale=0.3),
            }
        p = {"layers": layers, "heads": of(copies, n, classes), "kinds": of(kinds, levels, width, scale=1.0)}
        p |= {"code": of(numbers, bins, width), "code_bias": of(numbers, width, scale=0.1)}
        return p | {"edges": normal(numbers, bins + 1, scale=1e-3 if still else 1.0)}

    labels = (integers(rows, below=classes), integers(below=999))
    batch = (normal(rows, numbers), integers(rows, kinds, below=levels))
    return Built(step, (weights(dtype, False), weights(jnp.float32, True), *batch, *labels))


@program("words-near-each-other-in-one-space-sparse-adagrad-rounds", GROUP)
def _skip_gram(size: Size) -> Built:
    """This trains word vectors on near words against drawn words for four rounds, changing only the rows used.

    Negatives come from counts raised to three quarters, frequent words are thinned, and rows have their own rates.
    """
    words, n, b, window, negatives = pick(size, (60013, 300, 8192, 5, 15), (12007, 100, 1500, 3, 8), (23, 6, 7, 2, 3))
    rounds = 4

    def train(centre, context, rates, counts, text, seen, seed):
        counts = jnp.exp(2 * counts)
        chance = counts / jnp.sum(counts)
        law = jnp.cumsum(chance**0.75)

        def loss(c, o, negative, ok, clash):
            right = jnp.einsum("bn,bwn->bw", c, o)
            wrong = jnp.einsum("bn,bkn->bk", c, negative)
            wrong = jnp.where(clash, 0.0, jax.nn.softplus(wrong))
            each = jnp.sum(jnp.where(ok, jax.nn.softplus(-right), 0.0), axis=1) + jnp.sum(wrong, axis=1)
            return jnp.sum(each), each

        def one(carry, inputs):
            centre, context, rates = carry
            text, seen, key = inputs
            k1, k2, k3 = jax.random.split(key, 3)
            middle = text[window : window + b]
            shifts = np.concatenate([np.arange(-window, 0), np.arange(1, window + 1)])
            around = window + jnp.arange(b)[:, None] + shifts
            near = text[around]
            reach = jax.random.randint(k1, (b, 1), 1, window + 1)
            thin = jax.random.uniform(k2, middle.shape) < jnp.minimum(1.0, jnp.sqrt(1e-3 / chance[middle]))
            ok = (jnp.abs(shifts) <= reach) & seen[around] & thin[:, None]
            drawn = jnp.searchsorted(law, jax.random.uniform(k3, (b, negatives)) * law[-1])
            drawn = jnp.minimum(drawn, words - 1)
            clash = (drawn[:, :, None] == near[:, None]).any(axis=-1) | ~thin[:, None]
            parts = (centre[middle], context[near], context[drawn])
            (value, _), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*parts, ok, clash)
            used = jnp.concatenate([near.reshape(-1), drawn.reshape(-1)])
            change = jnp.concatenate([grads[1].reshape(-1, n), grads[2].reshape(-1, n)])
            first = rates[0].at[middle].add(jnp.mean(grads[0] ** 2, axis=-1))
            second = rates[1].at[used].add(jnp.mean(change**2, axis=-1))
            centre = centre.at[middle].add(-0.05 * grads[0] * lax.rsqrt(first[middle] + 1e-6)[:, None])
            context = context.at[used].add(-0.05 * change * lax.rsqrt(second[used] + 1e-6)[:, None])
            return (centre, context, (first, second)), value / jnp.maximum(jnp.sum(ok), 1)

        rates = jax.tree.map(jnp.abs, rates)
        keys = jax.random.split(jax.random.key(seed), rounds)
        (centre, context, rates), losses = lax.scan(one, (centre, context, rates), (text, seen, keys))
        return centre, context, rates, losses

    tables = (normal(words, n, scale=0.1), normal(words, n, scale=0.1), (normal(words), normal(words)))
    text = (integers(rounds, b + 2 * window, below=words), booleans(rounds, b + 2 * window))
    return Built(train, (*tables, normal(words), *text, integers(below=999)))
