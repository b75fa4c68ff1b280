"""Losses, optimisers, reinforcement learning, recommendation, modules, by one who knows nothing of the package."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import (
    Built,
    Random,
    Size,
    booleans,
    half,
    integers,
    like,
    normal,
    pick,
    program,
    weight,
)
from benchmarks.workloads.second_science import GROUP


def _linear(inputs: int, outputs: int, dtype: Any = jnp.float32) -> dict[str, Random]:
    return {"w": weight(inputs, outputs, dtype=dtype), "b": normal(outputs, dtype=dtype, scale=0.1)}


def _run(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


@program("categorical-double-dqn-grad", GROUP)
def _c51(size: Size) -> Built:
    """Distributional double Q-learning: dueling heads over 51 atoms, projected targets, weighted loss, priorities."""
    batch, n, hidden, actions, atoms = pick(size, (768, 1152, 512, 18, 51), (320, 300, 128, 7, 51), (3, 5, 6, 2, 5))
    low, high, discount = -10.0, 10.0, 0.99**3
    gap = (high - low) / (atoms - 1)

    def logits(p, obs):
        value = _run(p["value2"], jax.nn.relu(_run(p["value1"], obs))).reshape(-1, 1, atoms)
        advantage = _run(p["adv2"], jax.nn.relu(_run(p["adv1"], obs))).reshape(-1, actions, atoms)
        return value + advantage - advantage.mean(axis=1, keepdims=True)

    def project(reward, alive, probabilities):
        support = jnp.linspace(low, high, atoms)
        moved = jnp.clip(reward + discount * alive * support, low, high)
        share = jnp.clip(1.0 - jnp.abs(moved[None, :] - support[:, None]) / gap, 0.0, 1.0)
        return jnp.sum(share * probabilities[None, :], axis=-1)

    def loss(p, target, obs, action, reward, alive, next_obs, importance):
        support = jnp.linspace(low, high, atoms)
        chosen = jnp.argmax(jnp.sum(jax.nn.softmax(logits(p, next_obs)) * support, axis=-1), axis=-1)
        next_probs = jax.nn.softmax(logits(target, next_obs), axis=-1)
        next_probs = jnp.take_along_axis(next_probs, chosen[:, None, None], axis=1)[:, 0]
        wanted = lax.stop_gradient(jax.vmap(project)(reward, alive.astype(jnp.float32), next_probs))
        log_probs = jax.nn.log_softmax(logits(p, obs), axis=-1)
        taken = jnp.take_along_axis(log_probs, action[:, None, None], axis=1)[:, 0]
        cross = -jnp.sum(wanted * taken, axis=-1)
        weights = jax.nn.softplus(importance)
        return jnp.mean(weights / weights.max() * cross), (cross + 1e-6) ** 0.5

    def params():
        return {
            "value1": _linear(n, hidden),
            "value2": _linear(hidden, atoms),
            "adv1": _linear(n, hidden),
            "adv2": _linear(hidden, actions * atoms),
        }

    obs = normal(batch, n)
    arguments = obs, integers(batch, below=actions), normal(batch), booleans(batch), obs, normal(batch, scale=0.5)
    return Built(jax.value_and_grad(loss, has_aux=True), (params(), params(), *arguments))


@program("impala-vtrace-learner-grad", GROUP)
def _vtrace(size: Size) -> Built:
    """IMPALA's learner: v-trace targets by a reversed scan, losses of policy, baseline and entropy, gradients."""
    steps, batch, n, actions = pick(size, (80, 320, 256, 15), (60, 80, 128, 15), (3, 2, 5, 4))

    def vtrace(log_rhos, discounts, rewards, values, bootstrap):
        rhos = jnp.minimum(1.0, jnp.exp(log_rhos))
        cs = 0.95 * rhos
        following = jnp.concatenate([values[1:], bootstrap[None]], axis=0)
        deltas = rhos * (rewards + discounts * following - values)

        def backwards(acc, inputs):
            delta, discount, c = inputs
            acc = delta + discount * c * acc
            return acc, acc

        _, corrections = lax.scan(backwards, jnp.zeros_like(bootstrap), (deltas, discounts, cs), reverse=True)
        vs = values + corrections
        vs_next = jnp.concatenate([vs[1:], bootstrap[None]], axis=0)
        return vs, rhos * (rewards + discounts * vs_next - values)

    def loss(p, features, behaviour, actions_taken, rewards, alive):
        hidden = jax.nn.relu(_run(p["torso"], features))
        policy, baseline = _run(p["policy"], hidden[:-1]), _run(p["baseline"], hidden)[..., 0]
        log_pi, log_mu = jax.nn.log_softmax(policy), jax.nn.log_softmax(behaviour)
        index = actions_taken[..., None]
        taken = jnp.take_along_axis(log_pi, index, axis=-1)[..., 0]
        log_rhos = taken - jnp.take_along_axis(log_mu, index, axis=-1)[..., 0]
        discounts = 0.99 * alive.astype(jnp.float32)
        vs, advantages = vtrace(log_rhos, discounts, jnp.tanh(rewards), baseline[:-1], baseline[-1])
        vs, advantages = lax.stop_gradient((vs, advantages))
        pg = -jnp.mean(taken * advantages)
        value = 0.5 * jnp.mean((vs - baseline[:-1]) ** 2)
        entropy = -jnp.mean(jnp.sum(jnp.exp(log_pi) * log_pi, axis=-1))
        logs = {"pg": pg, "value": value, "entropy": entropy, "clipped": jnp.mean(jnp.exp(log_rhos))}
        return pg + 0.5 * value - 0.006 * entropy, logs

    params = {"torso": _linear(n, n), "policy": _linear(n, actions), "baseline": _linear(n, 1)}
    arguments = normal(steps + 1, batch, n), normal(steps, batch, actions), integers(steps, batch, below=actions)
    arguments += normal(steps, batch), booleans(steps, batch)
    return Built(jax.value_and_grad(loss, has_aux=True), (params, *arguments))


@program("muon-tree-update", GROUP)
def _muon(size: Size) -> Built:
    """Muon: Nesterov momentum made orthogonal by five Newton-Schulz steps, vmapped over layers; AdamW for vectors."""
    layers, n, ff = pick(size, (6, 576, 1536), (3, 96, 256), (2, 4, 6))
    dtype = half(size)

    def orthogonal(g):
        a, b, c = 3.4445, -4.7750, 2.0315
        x = g.astype(dtype)
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / (jnp.linalg.norm(x) + 1e-7)

        def step(_, x):
            gram = x @ x.T
            return a * x + (b * gram + c * gram @ gram) @ x

        x = lax.fori_loop(0, 5, step, x)
        x = x.T if tall else x
        return x.astype(jnp.float32) * max(1.0, g.shape[0] / g.shape[1]) ** 0.5

    def update(params, grads, first, second, count):
        t = count.astype(jnp.float32) + 1.0
        lr = 0.02 * jnp.minimum(1.0, t / 100.0)

        def one(path, p, g, m, v):
            g = g.astype(jnp.float32)
            if p.ndim == 3:
                m = 0.95 * m + g
                return p * (1 - lr * 0.01) - lr * jax.vmap(orthogonal)(g + 0.95 * m), m, v
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
            step = (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.95**t)) + 1e-8)
            decay = 0.0 if "norm" in jax.tree_util.keystr(path) else 0.1
            return p - 0.1 * lr * (step + decay * p), m, v

        new = jax.tree_util.tree_map_with_path(one, params, grads, first, jax.tree.map(jnp.square, second))
        return jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0, 0)), new)

    shapes = {"qkv": (layers, n, 3 * n), "out": (layers, n, n), "up": (layers, n, ff), "down": (layers, ff, n)}
    shapes |= {"norm": (layers, n), "bias": (layers, ff)}
    params = {k: normal(*s, scale=s[-2] ** -0.5) for k, s in shapes.items()}
    grads = {k: normal(*s, dtype=dtype, scale=0.01) for k, s in shapes.items()}
    first = {k: normal(*s, scale=0.01) for k, s in shapes.items()}
    second = {k: normal(*(s if len(s) == 2 else (1,)), scale=0.01) for k, s in shapes.items()}
    return Built(update, (params, grads, first, second, integers(below=200)))


@program("adafactor-clip-and-average", GROUP)
def _adafactor(size: Size) -> Built:
    """Adafactor on a tree: a clipped global norm, factored second moments, clipped and relative steps, an average."""
    vocab, n, ff = pick(size, (20011, 512, 1408), (6007, 192, 512), (7, 4, 6))
    dtype = half(size)

    def factored(shape):
        return len(shape) >= 2 and min(shape[-2:]) >= 4

    def update(params, grads, rows, columns, average, count):
        t = count.astype(jnp.float32) + 1.0
        beta2 = 1.0 - t**-0.8
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))
        trim = jnp.where(norm > 1.0, 1.0 / norm, 1.0)

        def one(p, g, r, c, e):
            g = g.astype(jnp.float32) * trim
            squared = jnp.square(g) + 1e-30
            if factored(p.shape):
                r = beta2 * jnp.abs(r) + (1 - beta2) * jnp.mean(squared, axis=-1)
                c = beta2 * jnp.abs(c) + (1 - beta2) * jnp.mean(squared, axis=-2)
                row_factor = lax.rsqrt(r / jnp.mean(r, axis=-1, keepdims=True))
                step = g * row_factor[..., None] * lax.rsqrt(c)[..., None, :]
            else:
                r = beta2 * jnp.abs(r) + (1 - beta2) * squared
                step = g * lax.rsqrt(r)
            step = step / jnp.maximum(1.0, jnp.sqrt(jnp.mean(step**2)) / 1.0)
            scale = jnp.maximum(1e-3, jnp.sqrt(jnp.mean(jnp.square(p))))
            p = p - jnp.minimum(1e-2, lax.rsqrt(t)) * scale * step
            return p, r, c, e + (1 - 0.999) * (p - e)

        out = [one(*leaf) for leaf in zip(*map(jax.tree.leaves, (params, grads, rows, columns, average)), strict=True)]
        tree = jax.tree.structure(params)
        return *(jax.tree.unflatten(tree, list(part)) for part in zip(*out, strict=True)), norm

    shapes: dict[str, tuple[int, ...]] = {"embed": (vocab, n), "scale": (n,)}
    shapes |= {"heads": (4, n, n), "wi": (2, n, ff), "wo": (2, ff, n)}
    params = {k: normal(*s, scale=s[-2] ** -0.5 if len(s) > 1 else 1.0) for k, s in shapes.items()}
    grads = {k: normal(*s, dtype=dtype, scale=0.003) for k, s in shapes.items()}
    rows = {k: normal(*(s[:-1] if factored(s) else s), scale=1e-3, offset=0.01) for k, s in shapes.items()}
    columns = {
        k: normal(*((*s[:-2], s[-1]) if factored(s) else (1,)), scale=1e-3, offset=0.01) for k, s in shapes.items()
    }
    return Built(update, (params, grads, rows, columns, params, integers(below=5000)))


@program("private-per-example-clipping", GROUP)
def _private(size: Size) -> Built:
    """A differentially private step: gradients of every example by vmap, clipped, summed with noise; momentum."""
    batch, n, h1, h2, classes = pick(size, (256, 784, 200, 90, 10), (64, 400, 96, 40, 10), (3, 5, 4, 4, 3))
    bound, noise = 1.1, 0.8

    def loss(p, x, y):
        h = jnp.tanh(_run(p["fc1"], x))
        h = h - jnp.mean(h)
        h = jnp.tanh(_run(p["fc2"], h / jnp.sqrt(jnp.mean(h**2) + 1e-5)))
        logits = _run(p["fc3"], h)
        return jax.nn.logsumexp(logits) - logits[y]

    def step(p, velocity, x, y, iteration):
        losses, grads = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0, 0))(p, x, y)
        leaves, tree = jax.tree.flatten(grads)
        norms = jnp.sqrt(sum(jnp.sum(g.reshape(batch, -1) ** 2, axis=1) for g in leaves))
        shrink = 1.0 / jnp.maximum(1.0, norms / bound)
        summed = [jnp.tensordot(shrink, g, axes=1) for g in leaves]
        keys = jax.random.split(jax.random.fold_in(jax.random.key(5), iteration), len(leaves))
        noisy = [(g + noise * bound * jax.random.normal(k, g.shape)) / batch for g, k in zip(summed, keys, strict=True)]
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, jax.tree.unflatten(tree, noisy))
        p = jax.tree.map(lambda a, v: a - 0.25 * v, p, velocity)
        return p, velocity, losses.mean(), jnp.mean(norms > bound), jnp.quantile(norms, 0.9)

    params = {"fc1": _linear(n, h1), "fc2": _linear(h1, h2), "fc3": _linear(h2, classes)}
    velocity = jax.tree.map(lambda r: normal(*r.shape, scale=0.01), params, is_leaf=lambda r: isinstance(r, Random))
    arguments = normal(batch, n), integers(batch, below=classes), integers(below=1000)
    return Built(step, (params, velocity, *arguments))


@program("supervised-contrast-views-grad", GROUP)
def _supervised_contrast(size: Size) -> Built:
    """Supervised contrast of four views: a projection head, unit features, all positives of a label, and gradients."""
    batch, views, n, d, classes = pick(size, (1000, 4, 2048, 128, 90), (150, 4, 96, 48, 11), (3, 2, 6, 4, 2))
    dtype = half(size)
    temperature, base = 0.1, 0.07

    def loss(p, features, labels):
        h = jax.nn.relu(_run(p["fc1"], features))
        z = _run(p["fc2"], h).astype(jnp.float32)
        z = z * lax.rsqrt(jnp.sum(z * z, axis=-1, keepdims=True) + 1e-12)
        z = jnp.concatenate([z[:, v] for v in range(views)], axis=0).astype(dtype)
        label = jnp.tile(labels, views)
        logits = jnp.matmul(z, z.T, preferred_element_type=jnp.float32) / temperature
        logits = logits - lax.stop_gradient(jnp.max(logits, axis=1, keepdims=True))
        others = 1.0 - jnp.eye(batch * views, dtype=jnp.float32)
        positive = (label[:, None] == label[None, :]).astype(jnp.float32) * others
        log_prob = logits - jnp.log(jnp.sum(jnp.exp(logits) * others, axis=1, keepdims=True))
        mean_log_prob = jnp.sum(positive * log_prob, axis=1) / jnp.sum(positive, axis=1)
        return -(temperature / base) * mean_log_prob.reshape(views, batch).mean()

    params = {"fc1": _linear(n, n // 2, dtype), "fc2": _linear(n // 2, d, dtype)}
    arguments = normal(batch, views, n, dtype=dtype), integers(batch, below=classes)
    return Built(jax.value_and_grad(loss), (params, *arguments))


@program("interest-network-dice-history", GROUP)
def _interest(size: Size) -> Built:
    """A deep interest network: attention of the candidate over a padded history, Dice activations, log loss and AUC."""
    batch, history, goods, categories, n = pick(
        size, (2048, 100, 60000, 1600, 64), (220, 50, 5000, 300, 16), (4, 3, 9, 4, 4)
    )
    dtype = half(size)
    w1, w2 = pick(size, (200, 80), (80, 40), (6, 4))

    def dice(p, x):
        x32 = x.astype(jnp.float32)
        mean, var = jnp.mean(x32, axis=0), jnp.var(x32, axis=0)
        gate = jax.nn.sigmoid((x32 - mean) / jnp.sqrt(var + 1e-8))
        return (gate * x32 + (1.0 - gate) * p["alpha"] * x32).astype(x.dtype)

    def predict(p, candidate, candidate_category, clicked, clicked_category, lengths, label):
        query = jnp.concatenate([p["goods"][candidate], p["categories"][candidate_category]], -1)
        keys = jnp.concatenate([p["goods"][clicked], p["categories"][clicked_category]], -1)
        wide = jnp.broadcast_to(query[:, None, :], keys.shape)
        h = jnp.concatenate([wide, keys, wide - keys, wide * keys], axis=-1)
        h = jax.nn.sigmoid(_run(p["att1"], h))
        h = jax.nn.sigmoid(_run(p["att2"], h))
        score = _run(p["att3"], h)[..., 0].astype(jnp.float32) / jnp.sqrt(2.0 * n)
        there = jnp.arange(history)[None, :] <= lengths[:, None]
        share = jax.nn.softmax(jnp.where(there, score, -(2.0**32) + 1), axis=-1).astype(dtype)
        interest = jnp.einsum("bt,btc->bc", share, keys)
        total = jnp.sum(jnp.where(there[..., None], keys, 0), axis=1)
        h = jnp.concatenate([query, interest, total * query], axis=-1)
        h = dice(p["dice1"], _run(p["fc1"], h))
        h = dice(p["dice2"], _run(p["fc2"], h))
        logit = _run(p["fc3"], h)[:, 0].astype(jnp.float32)
        y = label.astype(jnp.float32)
        loss = jnp.mean(jnp.maximum(logit, 0) - logit * y + jnp.log1p(jnp.exp(-jnp.abs(logit))))
        pairs = y[:, None] * (1 - y)[None, :]
        wins = jax.nn.sigmoid(20.0 * (logit[:, None] - logit[None, :]))
        return loss, jnp.sum(pairs * wins) / jnp.maximum(pairs.sum(), 1.0), jax.nn.sigmoid(logit)

    params: dict[str, Any] = {
        "goods": normal(goods, n, dtype=dtype, scale=0.3),
        "categories": normal(categories, n, dtype=dtype, scale=0.3),
        "att1": _linear(8 * n, 80, dtype),
        "att2": _linear(80, 40, dtype),
        "att3": _linear(40, 1, dtype),
        "fc1": _linear(6 * n, w1, dtype),
        "fc2": _linear(w1, w2, dtype),
        "fc3": _linear(w2, 1, dtype),
        "dice1": {"alpha": normal(w1, scale=0.1)},
        "dice2": {"alpha": normal(w2, scale=0.1)},
    }
    arguments = integers(batch, below=goods), integers(batch, below=categories)
    arguments += integers(batch, history, below=goods), integers(batch, history, below=categories)
    return Built(predict, (params, *arguments, integers(batch, below=history), booleans(batch)))


@program("adaptive-softmax-tails-grad", GROUP)
def _adaptive(size: Size) -> Built:
    """An adaptive softmax of three clusters: a head with cluster tokens, two narrow tails, likelihoods, gradients."""
    tokens, n, cuts = pick(
        size, (35 * 32, 400, (4000, 12000, 33278)), (35 * 12, 96, (600, 1800, 5328)), (5, 8, (4, 9, 15))
    )
    dtype = half(size)
    first, clusters = cuts[0], len(cuts) - 1

    def log_likelihood(p, hidden, target):
        head = jax.nn.log_softmax((hidden @ p["head"]).astype(jnp.float32), axis=-1)
        picked = jnp.take_along_axis(head, jnp.clip(target, 0, first - 1)[:, None], axis=1)[:, 0]
        out = jnp.where(target < first, picked, 0.0)
        for i in range(clusters):
            low, high = cuts[i], cuts[i + 1]
            inside = (target >= low) & (target < high)
            tail = jax.nn.log_softmax(((hidden @ p["down"][i]) @ p["tail"][i]).astype(jnp.float32), axis=-1)
            local = jnp.where(inside, target - low, 0)
            inner = jnp.take_along_axis(tail, local[:, None], axis=1)[:, 0]
            out = out + jnp.where(inside, head[:, first + i] + inner, 0.0)
        return out

    def loss(p, hidden, previous, target, keep):
        ll = log_likelihood(p, hidden, target)
        keep = keep.astype(jnp.float32)
        activation = 2.0 * jnp.mean(jnp.square(hidden.astype(jnp.float32)))
        slowness = jnp.mean(jnp.square((hidden - previous).astype(jnp.float32)))
        return -jnp.sum(ll * keep) / jnp.maximum(keep.sum(), 1.0) + 1e-2 * (activation + slowness)

    sizes = [cuts[i + 1] - cuts[i] for i in range(clusters)]
    widths = [max(n // 4 ** (i + 1), 1) for i in range(clusters)]
    params = {
        "head": weight(n, first + clusters, dtype=dtype),
        "down": [weight(n, w, dtype=dtype) for w in widths],
        "tail": [weight(w, s, dtype=dtype) for w, s in zip(widths, sizes, strict=True)],
    }
    hidden = normal(tokens, n, dtype=dtype)
    arguments = hidden, hidden, integers(tokens, below=cuts[-1]), booleans(tokens)
    return Built(jax.value_and_grad(loss, argnums=(0, 1)), (params, *arguments))


@program("bidirectional-gru-lengths-linen", GROUP)
def _gru(size: Size) -> Built:
    """A sentence encoder in linen: a bidirectional GRU over padded lengths, layer norm, two poolings, entailment."""
    from flax import linen as nn

    batch, steps, n, hidden = pick(size, (384, 29, 300, 256), (20, 34, 120, 64), (2, 4, 5, 3))
    dtype = half(size)

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x, lengths):
            forward = nn.RNN(nn.GRUCell(hidden, dtype=dtype))
            backward = nn.RNN(nn.GRUCell(hidden, dtype=dtype))
            h = nn.Bidirectional(forward, backward)(x, seq_lengths=lengths)
            h = nn.LayerNorm(dtype=dtype)(h)
            there = (jnp.arange(h.shape[1])[None, :] < lengths[:, None])[..., None]
            mean = jnp.sum(h, axis=1, where=there) / lengths[:, None].astype(h.dtype)
            top = jnp.max(h, axis=1, initial=-jnp.inf, where=there)
            return jnp.concatenate([mean, top], axis=-1)

    class Entailment(nn.Module):
        @nn.compact
        def __call__(self, premise, hypothesis, premise_ends, hypothesis_ends):
            encoder = Encoder()
            u, v = encoder(premise, premise_ends + 1), encoder(hypothesis, hypothesis_ends + 1)
            h = jnp.concatenate([u, v, jnp.abs(u - v), u * v], axis=-1)
            h = nn.tanh(nn.Dense(2 * hidden, dtype=dtype)(h))
            return nn.log_softmax(nn.Dense(3, dtype=jnp.float32)(h))

    sentence, ends = normal(batch, steps, n, dtype=dtype), integers(batch, below=steps)
    module = Entailment()
    shapes = jax.eval_shape(
        lambda *xs: module.init(jax.random.key(0), *xs), *(r.struct for r in (sentence, sentence, ends, ends))
    )
    return Built(module.apply, (like(shapes), sentence, sentence, ends, ends))


@program("sage-pooled-neighbours-nnx", GROUP)
def _sage(size: Size) -> Built:
    """GraphSAGE in nnx: two hops of padded sampled neighbours, pooled by masked maxima, unit rows and a mean loss."""
    from flax import nnx

    nodes, seeds, near, far, n, hidden, classes = pick(
        size, (20000, 600, 10, 15, 602, 256, 41), (3000, 150, 6, 10, 130, 96, 12), (9, 3, 2, 3, 5, 4, 3)
    )
    dtype = half(size)

    class Pool(nnx.Module):
        def __init__(self, inputs, outputs, rngs):
            self.pool = nnx.Linear(inputs, outputs, dtype=dtype, param_dtype=dtype, rngs=rngs)
            self.self_ = nnx.Linear(inputs, outputs, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs)
            self.neighbour = nnx.Linear(outputs, outputs, dtype=dtype, param_dtype=dtype, rngs=rngs)

        def __call__(self, x, others, there):
            h = jnp.where(there[..., None], nnx.relu(self.pool(others)), 0.0)
            h = nnx.relu(self.self_(x) + self.neighbour(jnp.max(h, axis=-2)))
            h32 = h.astype(jnp.float32)
            return (h32 / jnp.maximum(jnp.linalg.norm(h32, axis=-1, keepdims=True), 1e-6)).astype(dtype)

    class Sage(nnx.Module):
        def __init__(self, rngs):
            self.one, self.two = Pool(n, hidden, rngs), Pool(hidden, hidden, rngs)
            self.head = nnx.Linear(hidden, classes, dtype=dtype, param_dtype=dtype, rngs=rngs)

        def __call__(self, x0, x1, x2, there1, there2):
            h0, h1 = self.one(x0, x1, there1), self.one(x1, x2, there2)
            return self.head(self.two(h0, h1, there1)).astype(jnp.float32)

    def loss(state, table, batch, hop1, hop2, there1, there2, labels):
        model = nnx.merge(graph, state)
        logits = model(table[batch], table[hop1], table[hop2], there1, there2)
        hit = jax.nn.one_hot(labels, classes)
        cross = -jnp.sum(hit * jax.nn.log_softmax(logits), axis=-1)
        return cross.mean(), jax.nn.softmax(logits)

    graph, state = nnx.split(nnx.eval_shape(lambda: Sage(nnx.Rngs(0))))
    batch, hop1, hop2 = (integers(*s, below=nodes) for s in ((seeds,), (seeds, near), (seeds, near, far)))
    masks = booleans(seeds, near), booleans(seeds, near, far)
    table = normal(nodes, n, dtype=dtype)
    return Built(loss, (like(state), table, batch, hop1, hop2, *masks, integers(seeds, below=classes)))
