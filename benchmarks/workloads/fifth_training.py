"""Training objectives, ranking and retrieval of the fifth set."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, gain, half, integers, normal, pick, program, weight

GROUP = "fifth"


@program("ft-transformer-mixed-table-grad", GROUP)
def _ft_transformer(size: Size) -> Built:
    """A step's gradient of an FT-Transformer on a table: a token of each number and category, dropout, ReGLU, a binary loss."""
    b, numbers, categories, kinds, n, h, layers = pick(
        size, (1024, 28, 8, 100, 192, 8, 2), (48, 10, 4, 30, 48, 4, 2), (3, 3, 2, 4, 8, 2, 2)
    )
    d, wide = n // h, int(n * 4 / 3)

    def norm(p, x):
        mean = jnp.mean(x, axis=-1, keepdims=True)
        return (x - mean) / jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    def dropout(key, rate, x):
        keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
        return jnp.where(keep, x / (1.0 - rate), 0.0)

    def tokens(p, number, category):
        a = number[..., None] * p["number_weight"] + p["number_bias"]
        offsets = jnp.arange(categories) * kinds
        c = p["category_table"][category + offsets] + p["category_bias"]
        first = jnp.broadcast_to(p["class"], (b, 1, n))
        return jnp.concatenate([first, a, c], axis=1)

    def attention(p, x, key):
        q, k, v = (jnp.einsum("bti,ihd->bthd", x, p[name]) for name in "qkv")
        w = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(d), axis=-1)
        return jnp.einsum("bhqk,bkhd,hdo->bqo", dropout(key, 0.2, w), v, p["o"])

    def loss(params, number, category, label, seed):
        x = tokens(params, number, category)
        for i, p in enumerate(params["layers"]):
            k1, k2 = jax.random.split(jax.random.fold_in(jax.random.key(seed), i))
            x = x + attention(p, norm(p["norm1"], x) if i else x, k1)
            value, gate = jnp.split(norm(p["norm2"], x) @ p["in"] + p["in_bias"], 2, axis=-1)
            x = x + dropout(k2, 0.1, value * jax.nn.relu(gate)) @ p["out"] + p["out_bias"]
        logit = (jax.nn.relu(norm(params["head_norm"], x[:, 0])) @ params["head"])[:, 0]
        target = label.astype(jnp.float32)
        return -jnp.mean(target * jax.nn.log_sigmoid(logit) + (1.0 - target) * jax.nn.log_sigmoid(-logit))

    ln = {"scale": gain(n), "bias": normal(n, scale=0.05)}
    heads = {name: normal(n, h, d, scale=n**-0.5) for name in "qkv"} | {"o": normal(h, d, n, scale=n**-0.5)}
    layer = {**heads, "norm2": ln, "in": weight(n, 2 * wide), "in_bias": normal(2 * wide, scale=0.05)}
    layer |= {"out": weight(wide, n), "out_bias": normal(n, scale=0.05)}
    params = {
        "number_weight": normal(numbers, n, scale=0.3),
        "number_bias": normal(numbers, n, scale=0.3),
        "category_table": normal(categories * kinds, n, scale=0.3),
        "category_bias": normal(categories, n, scale=0.3),
        "class": normal(1, 1, n, scale=0.3),
        "layers": [layer] + [{**layer, "norm1": ln}] * (layers - 1),
        "head_norm": ln,
        "head": weight(n, 1),
    }
    rows = (normal(b, numbers), integers(b, categories, below=kinds), integers(b, below=2), integers(below=1000))
    return Built(jax.value_and_grad(loss), (params, *rows))


@program("rnn-transducer-joint-grad", GROUP)
def _transducer(size: Size) -> Built:
    """The gradient of a transducer's loss for speech: the joint network of frames and labels, and its lattice by diagonals."""
    b, t, u, n, joint, vocabulary = pick(
        size, (16, 96, 24, 640, 512, 1024), (4, 48, 12, 96, 96, 256), (2, 5, 3, 6, 4, 7)
    )
    dtype, low = half(size), -1e9

    def joined(p, frames, states):
        y = (frames @ p["frame"])[:, :, None, :] + (states @ p["state"])[:, None, :, :] + p["bias"]
        return (jnp.tanh(y) @ p["out"]).astype(jnp.float32) + p["out_bias"]

    def lattice(blank, emit, frames, labels):
        """The log probability of one utterance: blank [t, u + 1], emit [t, u]."""
        at = jnp.arange(u + 1)

        def skew(x, width):
            row = jnp.arange(t + u)[:, None] - jnp.arange(width)[None, :]
            inside = (row >= 0) & (row < t)
            return jnp.where(inside, jnp.take_along_axis(x, jnp.clip(row, 0, t - 1), axis=0), low)

        def diagonal(alpha, xs):
            step, blank_before, emit_here = xs
            stay = alpha + blank_before
            move = jnp.concatenate([jnp.full(1, low), alpha[:-1]]) + jnp.concatenate([jnp.full(1, low), emit_here])
            alpha = jnp.logaddexp(stay, move)
            alpha = jnp.where((step - at >= 0) & (step - at < t), alpha, low)
            return alpha, alpha

        start = jnp.where(at == 0, 0.0, low)
        blanks, emits = skew(blank, u + 1), skew(emit, u)
        steps = jnp.arange(1, t + u)
        # An emission at (t, u - 1) lies on the diagonal before, as does the blank at (t - 1, u).
        _, alphas = lax.scan(diagonal, start, (steps, blanks[:-1], emits[:-1]))
        alphas = jnp.concatenate([start[None], alphas])
        return alphas[frames - 1 + labels, labels] + blank[frames - 1, labels]

    def loss(p, encoded, labels, frames, length):
        frames = jnp.clip(frames, t // 2, t)
        length = jnp.clip(length, 1, u)
        shifted = jnp.pad(labels, ((0, 0), (1, 0)))
        states = jnp.tanh(p["labels"][shifted] + jnp.roll(p["labels"][shifted], 1, axis=1) @ p["context"])
        logp = jax.nn.log_softmax(joined(p, encoded, states), axis=-1)
        blank = logp[..., 0]
        index = jnp.broadcast_to(labels[:, None, :, None], (b, t, u, 1))
        emit = jnp.take_along_axis(logp[:, :, :-1], index, axis=-1)[..., 0]
        total = jax.vmap(lattice)(blank, emit, frames, length)
        return -jnp.mean(total / length)

    params = {
        "frame": weight(n, joint, dtype=dtype),
        "state": weight(n, joint, dtype=dtype),
        "bias": normal(joint, dtype=dtype, scale=0.05),
        "out": weight(joint, vocabulary, dtype=dtype),
        "out_bias": normal(vocabulary, scale=0.05),
        "labels": normal(vocabulary, n, dtype=dtype),
        "context": weight(n, n, dtype=dtype),
    }
    speech = (normal(b, t, n, dtype=dtype), integers(b, u, below=vocabulary))
    return Built(
        jax.value_and_grad(loss, argnums=(0, 1)),
        (params, *speech, integers(b, below=t + 1), integers(b, below=u + 1)),
    )


@program("dreamer-two-hot-returns-grad", GROUP)
def _dreamer(size: Size) -> Built:
    """DreamerV3's gradient: balanced divergences of mixed categoricals, symlog two-hot heads, lambda returns, the actor's loss."""
    b, t, n, latents, classes, bins, actions = pick(
        size, (16, 64, 1024, 32, 32, 255, 18), (8, 32, 192, 16, 16, 41, 6), (2, 4, 6, 2, 3, 7, 3)
    )
    dtype, discount, trace = half(size), 0.997, 0.95
    support = np.linspace(-20.0, 20.0, bins, dtype=np.float32)

    def symlog(x):
        return jnp.sign(x) * jnp.log1p(jnp.abs(x))

    def symexp(x):
        return jnp.sign(x) * jnp.expm1(jnp.abs(x))

    def two_hot(x):
        x = jnp.clip(symlog(x), support[0], support[-1])
        below = jnp.clip(jnp.sum(support <= x[..., None], axis=-1) - 1, 0, bins - 2)
        share = (x - jnp.asarray(support)[below]) / (support[1] - support[0])
        lower, upper = jax.nn.one_hot(below, bins), jax.nn.one_hot(below + 1, bins)
        return lower * (1.0 - share)[..., None] + upper * share[..., None]

    def mixed(logits):
        probs = 0.99 * jax.nn.softmax(logits.astype(jnp.float32), axis=-1) + 0.01 / classes
        return jnp.log(probs)

    def divergence(p, q):
        return jnp.sum(jnp.exp(p) * (p - q), axis=(-2, -1))

    def head(p, x):
        y = x @ p["in"]
        z = y.astype(jnp.float32)
        y = (z * lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + 1e-4)).astype(dtype) * p["scale"]
        return (jax.nn.silu(y) @ p["out"]).astype(jnp.float32)

    def expected(logits):
        return symexp(jnp.sum(jax.nn.softmax(logits, axis=-1) * support, axis=-1))

    def returns(reward, keep, value):
        def step(following, xs):
            r, c, v = xs
            now = r + discount * c * ((1.0 - trace) * v + trace * following)
            return now, now

        xs = (reward[:, 1:].T, keep[:, 1:].T, value[:, 1:].T)
        _, out = lax.scan(step, value[:, -1], xs, reverse=True)
        return out.T

    def loss(p, feature, prior, posterior, slow, action, reward, done):
        prior, posterior = mixed(prior), mixed(posterior)
        stopped = lax.stop_gradient
        dynamics = jnp.maximum(divergence(stopped(posterior), prior), 1.0)
        representation = jnp.maximum(divergence(posterior, stopped(prior)), 1.0)
        reward_logits, value_logits = head(p["reward"], feature), head(p["value"], feature)
        going = head(p["going"], feature)[..., 0]
        alive = 1.0 - (done == 0).astype(jnp.float32)
        fit = -jnp.sum(two_hot(reward) * jax.nn.log_softmax(reward_logits, axis=-1), axis=-1)
        fit = fit - alive * jax.nn.log_sigmoid(going) - (1.0 - alive) * jax.nn.log_sigmoid(-going)
        target = stopped(returns(expected(reward_logits), jax.nn.sigmoid(going), expected(value_logits)))
        values = jax.nn.log_softmax(value_logits[:, :-1], axis=-1)
        slow_values = stopped(jax.nn.softmax(head(slow, feature)[:, :-1], axis=-1))
        critic = -jnp.sum((two_hot(target) + slow_values) * values, axis=-1)
        spread = jnp.maximum(jnp.quantile(target, 0.95) - jnp.quantile(target, 0.05), 1.0)
        advantage = stopped((target - expected(value_logits[:, :-1])) / spread)
        policy = jax.nn.softmax(head(p["actor"], stopped(feature))[:, :-1], axis=-1)
        policy = jnp.log(0.99 * policy + 0.01 / actions)
        chosen = jnp.take_along_axis(policy, action[:, :-1, None], axis=-1)[..., 0]
        entropy = -jnp.sum(jnp.exp(policy) * policy, axis=-1)
        seen = stopped(jnp.cumprod(discount * jax.nn.sigmoid(going), axis=1))[:, :-1]
        actor = -seen * (chosen * advantage + 3e-4 * entropy)
        total = jnp.mean(fit + dynamics + 0.1 * representation) + jnp.mean(seen * critic) + jnp.mean(actor)
        return total, {"entropy": jnp.mean(entropy), "return": jnp.mean(target), "spread": spread}

    def mlp(out):
        return {"in": weight(n, n, dtype=dtype), "scale": gain(n, dtype), "out": weight(n, out, dtype=dtype)}

    params = {"reward": mlp(bins), "value": mlp(bins), "going": mlp(1), "actor": mlp(actions)}
    logits = normal(b, t, latents, classes, dtype=dtype)
    arguments = (params, normal(b, t, n, dtype=dtype), logits, logits, mlp(bins), integers(b, t, below=actions))
    return Built(
        jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True),
        (*arguments, normal(b, t, scale=2.0), integers(b, t, below=50)),
    )


@program("approx-ndcg-list-ranking-grad", GROUP)
def _ranking(size: Size) -> Built:
    """Learning to rank padded lists: a scorer of features, the gradient of approximate NDCG with a list's log-likelihood."""
    b, items, features, wide = pick(size, (256, 200, 136, 512), (48, 100, 40, 64), (2, 5, 4, 6))

    def scorer(p, x):
        x = jnp.sign(x) * jnp.log1p(jnp.abs(x))
        for kernel, bias, scale, shift in p["layers"]:
            x = x @ kernel + bias
            mean, var = jnp.mean(x, axis=(0, 1)), jnp.var(x, axis=(0, 1))
            x = jax.nn.relu((x - mean) / jnp.sqrt(var + 1e-3) * scale + shift)
        return (x @ p["out"])[..., 0]

    def approx_ranks(scores, where):
        higher = jax.nn.sigmoid((scores[:, None, :] - scores[:, :, None]) / 0.1)
        valid = where[:, :, None] & where[:, None, :]
        higher = jnp.where(valid, higher, 0.0)
        return jnp.sum(higher, axis=-1) + 0.5

    def ndcg(scores, labels, where):
        gains = jnp.where(where, 2.0**labels - 1.0, 0.0)
        got = jnp.sum(gains / jnp.log2(1.0 + approx_ranks(scores, where)), axis=-1)
        best = -jnp.sort(-gains, axis=-1)
        ideal = jnp.sum(best / jnp.log2(2.0 + jnp.arange(items)), axis=-1)
        return jnp.where(ideal > 0, got / jnp.where(ideal > 0, ideal, 1.0), 0.0)

    def list_likelihood(scores, labels, where, key):
        ties = jax.random.uniform(key, scores.shape)
        order = jnp.lexsort((ties, -jnp.where(where, labels, -1.0)), axis=-1)
        ranked = jnp.take_along_axis(jnp.where(where, scores, -1e9), order, axis=-1)
        shown = jnp.take_along_axis(where, order, axis=-1)
        rest = lax.cumlogsumexp(ranked, axis=1, reverse=True)
        return jnp.sum(jnp.where(shown, ranked - rest, 0.0), axis=-1) / jnp.maximum(jnp.sum(shown, axis=-1), 1)

    def loss(p, x, grade, count, seed):
        where = jnp.arange(items)[None, :] < jnp.maximum(count, 1)[:, None]
        labels = grade.astype(jnp.float32)
        scores = scorer(p, x)
        quality = ndcg(scores, labels, where)
        likelihood = list_likelihood(scores, labels, where, jax.random.key(seed))
        return -jnp.mean(quality) - 0.1 * jnp.mean(likelihood), quality

    def layer(i, o):
        return (weight(i, o), normal(o, scale=0.05), gain(o), normal(o, scale=0.05))

    layers = [layer(features, wide), layer(wide, wide // 2), layer(wide // 2, wide // 4)]
    params = {"layers": layers, "out": weight(wide // 4, 1)}
    lists = (normal(b, items, features, scale=3.0), integers(b, items, below=5), integers(b, below=items + 1))
    return Built(jax.value_and_grad(loss, has_aux=True), (params, *lists, integers(below=1000)))


@program("hstu-pointwise-time-bias", GROUP)
def _hstu(size: Size) -> Built:
    """A layer of the HSTU recommender over padded histories: SiLU scores with bias of place and time, gates, the best items."""
    b, t, n, h, items, buckets = pick(
        size, (8, 1024, 512, 8, 50_000, 128), (2, 256, 128, 4, 4000, 64), (2, 6, 8, 2, 12, 8)
    )
    dtype, d = half(size), n // h

    def norm(x):
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        return (y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)

    def bias(p, times):
        following = jnp.concatenate([times[:, 1:], times[:, -1:]], axis=1)
        apart = jnp.abs(following[:, :, None] - times[:, None, :]).astype(jnp.float32)
        bucket = jnp.clip((jnp.log(jnp.maximum(apart, 1.0)) / 0.301).astype(jnp.int32), 0, buckets)
        place = jnp.arange(t)[None, :] - jnp.arange(t)[:, None] + t - 1
        return p["places"][place][None] + p["times"][bucket]

    def rank(p, history, times, length):
        length = jnp.maximum(length, 1)
        times = jnp.cumsum(times, axis=1)
        valid = jnp.arange(t)[None, :] < length[:, None]
        x = p["items"][history] * np.asarray(n**0.5, dtype) + p["positions"]
        x = jnp.where(valid[..., None], x, 0)
        u, v, q, k = jnp.split(jax.nn.silu(norm(x) @ p["uvqk"]), 4, axis=-1)
        q, k, v = (a.reshape(b, t, h, d) for a in (q, k, v))
        scores = jnp.einsum("bnhd,bmhd->bhnm", q, k) + bias(p, times)[:, None].astype(dtype)
        scores = jax.nn.silu(scores) / t
        causal = jnp.tril(jnp.ones((t, t), dtype)) * valid[:, None, :].astype(dtype)
        y = jnp.einsum("bhnm,bmhd->bnhd", scores * causal[:, None], v).reshape(b, t, n)
        x = x + (u * norm(y)) @ p["out"] + p["out_bias"]
        last = jnp.take_along_axis(x, length[:, None, None] - 1, axis=1)[:, 0].astype(jnp.float32)
        last = last / jnp.maximum(jnp.linalg.norm(last, axis=-1, keepdims=True), 1e-6)
        logits = last @ p["items"].T.astype(jnp.float32) / 0.05
        logits = logits.at[jnp.arange(b)[:, None], history].set(-jnp.inf)
        return lax.top_k(logits, min(100, items - t))

    params = {
        "items": normal(items, n, dtype=dtype, scale=n**-0.5),
        "positions": normal(t, n, dtype=dtype, scale=0.1),
        "uvqk": weight(n, 4 * n, dtype=dtype),
        "places": normal(2 * t - 1, scale=0.02),
        "times": normal(buckets + 1, scale=0.02),
        "out": weight(n, n, dtype=dtype),
        "out_bias": normal(n, dtype=dtype, scale=0.05),
    }
    history = (integers(b, t, below=items), integers(b, t, below=5000), integers(b, below=t + 1))
    return Built(rank, (params, *history))


@program("ivf-product-codes-search", GROUP)
def _ivf(size: Size) -> Built:
    """A search of an inverted file with product codes: nearest lists, tables of residuals, code distances, exact reranking."""
    queries, lists, capacity, d, parts, probes, short, k = pick(
        size, (64, 4096, 256, 128, 16, 16, 100, 10), (16, 128, 48, 64, 8, 8, 40, 10), (2, 5, 4, 4, 2, 2, 3, 2)
    )
    codes = pick(size, 256, 256, 8)

    def search(centroids, codebooks, stored, filled, vectors, query):
        query = query / jnp.linalg.norm(query, axis=-1, keepdims=True)
        coarse = jnp.sum(centroids**2, axis=-1) - 2.0 * query @ centroids.T
        _, probe = lax.top_k(-coarse, probes)

        def one(q, probe):
            residual = (q[None, :] - centroids[probe]).reshape(probes, parts, 1, d // parts)
            table = jnp.sum((residual - codebooks[None]) ** 2, axis=-1)
            code = stored[probe]
            found = jax.vmap(lambda lut, c: jnp.take_along_axis(lut, c.T, axis=1).sum(axis=0))(table, code)
            found = jnp.where(jnp.arange(capacity)[None, :] < filled[probe][:, None], found, jnp.inf)
            _, best = lax.top_k(-found.reshape(-1), short)
            which = probe[best // capacity] * capacity + best % capacity
            exact = jnp.sum((vectors[which] - q) ** 2, axis=-1)
            exact = jnp.where(jnp.isfinite(found.reshape(-1)[best]), exact, 1e9)
            top, at = lax.top_k(-exact, k)
            return -top, which[at]

        return jax.vmap(one)(query, probe)

    index = (normal(lists, d, scale=d**-0.5), normal(parts, codes, d // parts, scale=0.3 * d**-0.5))
    stored = (integers(lists, capacity, parts, below=codes), integers(lists, below=capacity + 1))
    vectors = normal(lists * capacity, d, scale=d**-0.5)
    return Built(search, (*index, *stored, vectors, normal(queries, d)))
