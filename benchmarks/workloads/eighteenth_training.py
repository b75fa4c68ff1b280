"""Losses with their gradients and whole training steps, the eighteenth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import module_weights
from benchmarks.workloads.registry import (
    Built,
    Random,
    Size,
    booleans,
    gain,
    half,
    integers,
    normal,
    pick,
    program,
    weight,
)
from benchmarks.workloads.sixteenth_language import rms
from benchmarks.workloads.sixteenth_models import equinox_parts
from benchmarks.workloads.sixteenth_training import moments

GROUP = "eighteenth"


@program("gradients-projected-to-few-directions-adam-step", GROUP)
def _projected(size: Size) -> Built:
    """This gives one step of Adam that keeps its averages only in a few directions of each gradient, to save memory.

    The directions are renewed by two rounds of subspace iteration with a Cholesky factor, but only every few steps.
    """
    b, t, n, m, words, rank = pick(
        size, (4, 300, 768, 2100, 6001, 24), (2, 70, 192, 515, 1001, 12), (2, 5, 12, 20, 13, 3)
    )
    dtype = half(size)

    def loss(params, text):
        x = params["table"][text]
        for p in params["layers"]:
            y = rms(x, p["norm"])
            mean = jnp.cumsum(y.astype(jnp.float32), axis=1) / jnp.arange(1, t + 1)[:, None]
            x = x + (jax.nn.sigmoid(y @ p["r"]) * (mean.astype(dtype) @ p["v"])) @ p["o"]
            y = rms(x, p["norm"])
            x = x + jax.nn.gelu(y @ p["up"]) @ p["down"]
        logits = (x @ params["table"].T).astype(jnp.float32)[:, :-1]
        picked = jnp.take_along_axis(logits, text[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    def orthogonal(q):
        q = q / (jnp.linalg.norm(q, axis=0) + 1e-12)
        factor = jnp.linalg.cholesky(q.T @ q + 1e-5 * jnp.eye(rank))
        return lax.linalg.triangular_solve(factor, q.T, left_side=True, lower=True).T

    def directions(g, old):
        first = orthogonal(g @ (g.T @ old) + 1e-6 * old)
        return orthogonal(g @ (g.T @ first) + 1e-6 * first)

    def step(params, state, text, count):
        value, grads = jax.value_and_grad(loss)(params, text)
        leaves, tree = jax.tree.flatten(grads)
        norm = jnp.sqrt(sum(jnp.sum(g.astype(jnp.float32) ** 2) for g in leaves))
        age = count.astype(jnp.float32) + 1.0
        out, fresh = [], []
        for w, raw, s in zip(jax.tree.leaves(params), leaves, state, strict=True):
            g = raw.astype(jnp.float32) * jnp.minimum(1.0, 1.0 / norm)
            small = g
            if g.ndim == 2:
                basis = lax.cond(count % 2 == 0, directions, lambda g, old: old, g, s["basis"])
                small = basis.T @ g
            m1 = 0.9 * s["m"] + 0.1 * small
            m2 = 0.999 * s["v"] + 0.001 * small**2
            change = (m1 / (1 - 0.9**age)) / (jnp.sqrt(m2 / (1 - 0.999**age)) + 1e-8)
            new = {"m": m1, "v": m2}
            if g.ndim == 2:
                new["basis"], change = basis, 0.25 * (basis @ change)
            out.append((w.astype(jnp.float32) * (1 - 1e-5) - 1e-3 * change).astype(w.dtype))
            fresh.append(new)
        return jax.tree.unflatten(tree, out), fresh, value, norm

    def layer():
        p = {name: weight(n, n, dtype=dtype) for name in "rvo"} | {"norm": gain(n, dtype)}
        return p | {"up": weight(n, m, dtype=dtype), "down": weight(m, n, dtype=dtype)}

    params = {"table": normal(words, n, dtype=dtype, scale=n**-0.5), "layers": [layer(), layer()]}
    state = []
    for r in jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Random)):
        shape = (rank, r.shape[1]) if len(r.shape) == 2 else r.shape
        s = {"m": normal(*shape, scale=1e-3), "v": Random(shape, jnp.dtype(jnp.float32), 1e-5, 1e-3)}
        state.append(s | ({"basis": weight(*r.shape[:1], rank)} if len(r.shape) == 2 else {}))
    return Built(step, (params, state, integers(b, t, below=words), integers(below=20)))


@program("curvature-by-probed-labels-clipped-step-of-words-linen", GROUP)
def _curvature(size: Size) -> Built:
    """This gives a step that divides averages of gradients by a clipped diagonal of the curvature.

    The diagonal is the square of a gradient for labels drawn from the model itself, and is renewed only on some steps.
    """
    import flax.linen as nn

    b, t, n, h, words = pick(size, (4, 250, 512, 8, 5000), (2, 61, 128, 4, 701), (2, 6, 8, 2, 11))
    dtype = half(size)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, text):
            table = nn.Embed(words, n, dtype=dtype)
            x = table(text) + self.param("places", nn.initializers.normal(0.02), (t, n)).astype(dtype)
            mask = nn.make_causal_mask(text)
            for _ in range(2):
                y = nn.LayerNorm(use_bias=False, dtype=dtype)(x)
                x = x + nn.SelfAttention(h, dtype=dtype)(y, mask=mask)
                y = nn.LayerNorm(use_bias=False, dtype=dtype)(x)
                x = x + nn.Dense(n, dtype=dtype)(nn.gelu(nn.Dense(4 * n, dtype=dtype)(y)))
            return table.attend(nn.LayerNorm(dtype=dtype)(x)).astype(jnp.float32) * n**-0.5

    module = Net()

    def nll(logits, labels):
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0])

    def step(params, m, h, text, seed, count):
        def loss(params):
            return nll(module.apply(params, text)[:, :-1], text[:, 1:])

        def probed(params):
            logits = module.apply(params, text)[:, :-1]
            drawn = jax.random.categorical(jax.random.key(seed[0]), lax.stop_gradient(logits))
            return nll(logits, drawn)

        value, grads = jax.value_and_grad(loss)(params)

        def renewed(h):
            guess = jax.grad(probed)(params)
            return jax.tree.map(lambda h, g: 0.99 * h + 0.01 * b * t * g.astype(jnp.float32) ** 2, h, guess)

        h = lax.cond(count % 3 == 0, renewed, lambda h: h, h)
        m = jax.tree.map(lambda m, g: 0.965 * m + 0.035 * g.astype(jnp.float32), m, grads)
        ratio = jax.tree.map(lambda m, h: m / jnp.maximum(0.05 * h, 1e-12), m, h)
        new = jax.tree.map(lambda w, r: (0.9999 * w - 1e-3 * jnp.clip(r, -1, 1)).astype(w.dtype), params, ratio)
        clipped = [jnp.mean(jnp.abs(r) >= 1) for r in jax.tree.leaves(ratio)]
        return new, m, h, value, jnp.stack(clipped)

    text = integers(b, t, below=words)
    params = module_weights(jax.eval_shape(module.init, jax.random.key(0), text.struct), dtype)
    arguments = (params, moments(params, False), moments(params, True), text, integers(1, below=99), integers(below=7))
    return Built(step, arguments)


@program("views-whitened-in-groups-by-triangular-solves-loss-grad", GROUP)
def _whitened(size: Size) -> Built:
    """This gives gradients of an encoder whose views of pictures are pulled together after their covariance is made white.

    Channels are shuffled into small groups, and each group of each view has its own factor of the covariance.
    """
    b, pixels, n, out, wide = pick(size, (1024, 768, 1024, 256, 32), (250, 300, 256, 64, 16), (12, 9, 8, 6, 3))
    dtype = half(size)

    def encode(p, x):
        x = jax.nn.relu(x.astype(dtype) @ p["first"] + p["bias"])
        for w in p["hidden"]:
            y = (x @ w).astype(jnp.float32)
            y = (y - jnp.mean(y, axis=0)) * lax.rsqrt(jnp.var(y, axis=0) + 1e-5)
            x = x + jax.nn.relu(y).astype(dtype)
        return (x @ p["last"]).astype(jnp.float32)

    def white(z):
        z = z - jnp.mean(z, axis=0)
        covariance = 0.99 * z.T @ z / (b - 1) + 0.01 * jnp.eye(wide)
        return lax.linalg.triangular_solve(jnp.linalg.cholesky(covariance), z.T, left_side=True, lower=True).T

    def loss(p, first, second, order):
        views = jnp.stack([encode(p, first), encode(p, second)])
        padded = views[:, :, order[: out // wide * wide]].reshape(2, b, -1, wide)
        grouped = jax.vmap(jax.vmap(white, in_axes=1, out_axes=1))(padded)
        z = grouped.reshape(2, b, -1)
        z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
        alike = jnp.sum(z[0] * z[1], axis=-1)
        rank = jnp.argsort(-(z[0] @ z[1].T), axis=-1)[:, 0]
        return jnp.mean(2 - 2 * alike), (jnp.mean(rank == jnp.arange(b)), jnp.std(views, axis=1))

    p = {"first": weight(pixels, n, dtype=dtype), "bias": normal(n, dtype=dtype, scale=0.1)}
    p |= {"hidden": [weight(n, n, dtype=dtype) for _ in range(3)], "last": weight(n, out, dtype=dtype)}
    inputs = (normal(b, pixels), normal(b, pixels), integers(out, below=out, distinct=True))
    return Built(jax.value_and_grad(loss, has_aux=True), (p, *inputs))


@program("quantiles-drawn-by-cosines-duelling-values-huber-grad-equinox", GROUP)
def _quantiles(size: Size) -> Built:
    """This gives gradients of a player that learns quantiles of its returns at drawn chances, from frames of a game.

    A chance is read by cosines; values and advantages are apart; the next action is that of the online weights, and the error of a
    pair of quantiles is weighted by how likely it is to fall short.
    """
    import equinox as eqx

    b, side, n, actions, drawn = pick(size, (128, 62, 512, 18, 31), (12, 42, 128, 18, 15), (3, 22, 8, 3, 4))
    dtype = half(size)

    class Net(eqx.Module):
        convs: list
        cosines: eqx.nn.Linear
        shared: eqx.nn.Linear
        value: eqx.nn.MLP
        advantage: eqx.nn.MLP

        def __init__(self, key):
            k = jax.random.split(key, 7)
            shapes = ((4, 32, 8, 4), (32, 64, 4, 2))
            self.convs = [
                eqx.nn.Conv2d(i, o, s, d, padding=1, key=k) for (i, o, s, d), k in zip(shapes, k[:2], strict=True)
            ]
            wide = (side + 2 - 8) // 4 + 1
            wide = 64 * ((wide + 2 - 4) // 2 + 1) ** 2
            self.shared, self.cosines = eqx.nn.Linear(wide, n, key=k[2]), eqx.nn.Linear(64, n, key=k[3])
            self.value = eqx.nn.MLP(n, 1, n, 1, key=k[4])
            self.advantage = eqx.nn.MLP(n, actions, n, 1, key=k[5])

        def __call__(self, frames, chances):
            x = frames.astype(dtype) / 255
            for conv in self.convs:
                x = jax.nn.relu(conv(x))
            x = self.shared(x.reshape(-1))
            waves = jnp.cos(jnp.pi * jnp.arange(1, 65) * chances[:, None]).astype(dtype)
            y = x * jax.nn.relu(jax.vmap(self.cosines)(waves))
            value, advantage = jax.vmap(self.value)(y), jax.vmap(self.advantage)(y)
            return (value + advantage - jnp.mean(advantage, axis=-1, keepdims=True)).astype(jnp.float32)

    leaves, whole = equinox_parts(Net, dtype)

    def loss(online, slow, frames, after, actions_taken, rewards, going, seed):
        k1, k2, k3 = jax.random.split(jax.random.key(seed[0]), 3)
        chances, later, asked = (jax.random.uniform(k, (b, drawn)) for k in (k1, k2, k3))
        net, old = whole(online), whole(slow)
        quantiles = jax.vmap(net)(frames, chances)
        quantiles = jnp.take_along_axis(quantiles, actions_taken[:, None, None], axis=2)[..., 0]
        best = jnp.argmax(jnp.mean(jax.vmap(net)(after, asked), axis=1), axis=-1)
        ahead = jnp.take_along_axis(jax.vmap(old)(after, later), best[:, None, None], axis=2)[..., 0]
        target = lax.stop_gradient(jnp.clip(rewards, -1, 1)[:, None] + 0.97 * going[:, None] * ahead)
        error = target[:, None] - quantiles[:, :, None]
        huber = jnp.where(jnp.abs(error) <= 1, 0.5 * error**2, jnp.abs(error) - 0.5)
        weighted = jnp.abs(chances[:, :, None] - (error < 0)) * huber
        each = jnp.sum(jnp.mean(weighted, axis=2), axis=1)
        return jnp.mean(each), (jnp.sqrt(each + 1e-6), jnp.mean(quantiles, axis=1))

    frames = integers(b, 4, side, side, below=256)
    inputs = (frames, frames, integers(b, below=actions), normal(b), booleans(b), integers(1, below=999))
    return Built(jax.value_and_grad(loss, has_aux=True), (leaves, leaves, *inputs))


@program("hedges-of-an-option-learned-by-worst-tenth-of-paths-grad", GROUP)
def _hedges(size: Size) -> Built:
    """This gives gradients of a small network that trades a share each day so that the worst losses of a sold option are mild.

    Prices follow a random volatility; each trade costs a part of its size, and the loss is the mean beyond a learned bound.
    """
    paths, days, n = pick(size, (16384, 25, 64), (2000, 25, 32), (9, 25, 4))

    def net(p, x):
        for w, bias in p["hidden"]:
            x = jax.nn.silu(x @ w + bias)
        return jax.nn.sigmoid(x @ p["last"])[:, 0]

    def market(noise):
        def day(carry, g):
            price, wild = carry
            move = jnp.sqrt(jnp.maximum(wild, 0.0) / 252)
            after = price * jnp.exp(-0.5 * move**2 + move * g[0])
            fresh = wild + 3.0 * (0.04 - wild) / 252 + 0.6 * move * (-0.7 * g[0] + np.sqrt(0.51) * g[1])
            return (after, jnp.maximum(fresh, 1e-4)), (price, wild)

        ones = jnp.ones(paths)
        (last, _), seen = lax.scan(day, (ones, 0.04 * ones), noise)
        return last, seen

    def loss(p, noise):
        last, (prices, wilds) = market(noise)
        following = jnp.concatenate([prices[1:], last[None]])

        def day(carry, xs):
            held, gained, peak = carry
            price, wild, after, left = xs
            peak = jnp.maximum(peak, price)
            spread = jnp.sqrt(wild * left) + 1e-3
            known = [jnp.log(price) / spread, jnp.log(price), spread, held, jnp.log(peak), jnp.full(paths, left)]
            share = net(p, jnp.stack(known, axis=-1))
            share = jnp.where(jnp.abs(share - held) < 0.01, held, share)
            gained = gained + share * (after - price) - 0.002 * jnp.abs(share - held) * price
            return (share, gained, peak), share

        zero = jnp.zeros(paths)
        left = jnp.arange(days, 0, -1) / 252.0
        (held, gained, peak), shares = lax.scan(day, (zero, zero, zero), (prices, wilds, following, left))
        owed = jnp.maximum(last - 1.0, 0.0) * (peak < 1.15)
        short = owed - gained + 0.002 * held * last
        bound = p["bound"]
        mild = bound + jnp.mean(jnp.maximum(short - bound, 0.0)) / 0.1
        order = jnp.sort(lax.stop_gradient(short))
        return mild, (order[-(paths // 10 + 1)], jnp.mean(shares, axis=1), jnp.std(short))

    hidden = [(weight(i, n), normal(n, scale=0.1)) for i in (6, n, n)]
    p = {"hidden": hidden, "last": weight(n, 1), "bound": normal(scale=0.01)}
    return Built(jax.value_and_grad(loss, has_aux=True), (p, normal(days, 2, paths)))


@program("counts-of-genes-in-cells-zero-inflated-batches-elbo-grad-nnx", GROUP)
def _cells(size: Size) -> Built:
    """This gives gradients of a bound for counts of genes in cells that removes the effect of the laboratory.

    Counts follow a negative binomial law with extra zeros; the total of each cell has its own hidden scale.
    """
    from flax import nnx

    b, genes, n, hidden, labs = pick(size, (500, 4001, 256, 21, 9), (128, 1001, 128, 11, 9), (5, 13, 8, 3, 2))
    kinds = {"param_dtype": jnp.float32}

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.enter = nnx.List(
                [nnx.Linear(genes + labs, n, rngs=rngs, **kinds), nnx.Linear(n + labs, n, rngs=rngs, **kinds)]
            )
            self.norms = nnx.List([nnx.LayerNorm(n, rngs=rngs) for _ in range(4)])
            self.z = nnx.Linear(n, 2 * hidden, rngs=rngs)
            self.sizes = nnx.Linear(n, 2, rngs=rngs)
            self.leave = nnx.List([nnx.Linear(hidden + labs, n, rngs=rngs), nnx.Linear(n + labs, n, rngs=rngs)])
            self.share, self.drop = (nnx.Linear(n, genes, rngs=rngs) for _ in range(2))
            self.spread = nnx.Param(jnp.zeros((labs, genes)))

        def __call__(self, counts, lab, noise, share_kl):
            who = jax.nn.one_hot(lab, labs)
            x = jnp.log1p(counts)
            for layer, norm in zip(self.enter, list(self.norms)[:2], strict=True):
                x = nnx.relu(norm(layer(jnp.concatenate([x, who], axis=-1))))
            mean, log_std = jnp.split(self.z(x), 2, axis=-1)
            size_mean, size_log_std = jnp.split(0.1 * self.sizes(x) + jnp.array([5.0, -1.0]), 2, axis=-1)
            z = mean + jnp.exp(log_std) * noise[:, :-1]
            total = jnp.exp(size_mean + jnp.exp(size_log_std) * noise[:, -1:])
            y = z
            for layer, norm in zip(self.leave, list(self.norms)[2:], strict=True):
                y = nnx.relu(norm(layer(jnp.concatenate([y, who], axis=-1))))
            mu, drop = total * nnx.softmax(self.share(y)), self.drop(y)
            r = jnp.exp(who @ self.spread[...])
            log_r = jnp.log(r + 1e-8) - jnp.log(r + mu + 1e-8)
            log_m = jnp.log(mu + 1e-8) - jnp.log(r + mu + 1e-8)
            zero = nnx.softplus(-drop + r * log_r) - nnx.softplus(-drop)
            many = lax.lgamma(counts + r) - lax.lgamma(r) - lax.lgamma(counts + 1.0)
            many = many + r * log_r + counts * log_m - drop - nnx.softplus(-drop)
            like = jnp.sum(jnp.where(counts < 0.5, zero, many), axis=1)
            kl = jnp.sum(0.5 * (mean**2 + jnp.exp(2 * log_std) - 1) - log_std, axis=1)
            prior = jax.ops.segment_sum(jnp.log(jnp.sum(counts, 1) + 1), lab, labs) / jnp.maximum(
                jnp.sum(who, axis=0), 1
            )
            apart = size_mean[:, 0] - prior[lab]
            kl_size = 0.5 * (apart**2 + jnp.exp(2 * size_log_std[:, 0]) - 1) - size_log_std[:, 0]
            return jnp.mean(share_kl * kl + kl_size - like), (like, kl, z)

    graph, state = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))

    def loss(state, raw, *rest):
        return nnx.merge(graph, state)(jnp.maximum(raw - 12, 0).astype(jnp.float32), *rest)

    def gradients(*arguments):
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(*arguments)
        return value, aux, jax.tree.leaves(grads)

    inputs = (
        integers(b, genes, below=20),
        integers(b, below=labs),
        normal(b, hidden + 1),
        normal(scale=0.01, offset=0.5),
    )
    return Built(gradients, (module_weights(state, jnp.float32), *inputs))
