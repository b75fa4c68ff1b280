"""Losses with their gradients and whole training steps, the twentieth set: its author saw no plan."""

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

GROUP = "twentieth"


def _norm(x, scale):
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


@program("hidden-patches-and-spread-out-class-tokens-of-a-teacher-grad", GROUP)
def _ibot(size: Size) -> Built:
    """This gives gradients of a student that predicts hidden patches of a slow teacher, as iBOT in DINOv2 (2023).

    Targets are balanced by three rounds of Sinkhorn and Knopp, and the KoLeo term spreads out the class tokens by
    their nearest neighbours.
    """
    b, t, pixels, n, h, heads = pick(size, (32, 196, 588, 384, 6, 4096), (8, 49, 147, 96, 3, 512), (3, 6, 12, 8, 2, 10))
    dtype, layers = half(size), 2

    def encode(p, x, hidden):
        x = x.astype(dtype) @ p["patch"]
        if hidden is not None:
            x = jnp.where(hidden[..., None], p["mask"], x)
        x = jnp.concatenate([jnp.broadcast_to(p["cls"], (b, 1, n)), x], axis=1) + p["places"]
        for layer in p["layers"]:
            q, k, v = jnp.moveaxis((_norm(x, layer["norm"]) @ layer["qkv"]).reshape(b, t + 1, 3, h, n // h), 2, 0)
            x = x + layer["s1"] * (jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ layer["out"])
            x = x + layer["s2"] * (jax.nn.gelu(_norm(x, layer["norm2"]) @ layer["up"]) @ layer["down"])
        y = _norm(x, p["last"])
        y = jax.nn.gelu(y @ p["head1"]) @ p["head2"]
        y = y.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6)
        protos = p["protos"].astype(jnp.float32)
        protos = protos / jnp.linalg.norm(protos, axis=0)
        return x[:, 0], y.astype(dtype) @ protos.astype(dtype)

    def balanced(logits, used):
        q = jnp.exp((logits.astype(jnp.float32) - 1.0) / 0.07) * used[:, None]
        q = q / jnp.sum(q)
        count = jnp.sum(used)
        for _ in range(3):
            q = q / (jnp.sum(q, axis=0) * heads + 1e-12)
            q = q / (jnp.sum(q, axis=1, keepdims=True) * count + 1e-12)
        return lax.stop_gradient(q * count)

    def loss(p, teacher, clean, noisy, hidden):
        cls, student = encode(p, noisy, hidden)
        _, wanted = encode(teacher, clean, None)
        used = hidden.reshape(-1).astype(jnp.float32)
        targets = balanced(wanted[:, 1:].reshape(b * t, heads), used)
        logp = jax.nn.log_softmax(student.astype(jnp.float32) / 0.1, axis=-1)
        each = -jnp.sum(targets * logp[:, 1:].reshape(b * t, heads), axis=-1).reshape(b, t)
        share = hidden / jnp.maximum(jnp.sum(hidden, axis=-1, keepdims=True), 1)
        patches = jnp.mean(jnp.sum(each * share, axis=-1))
        whole = -jnp.mean(jnp.sum(balanced(wanted[:, 0], jnp.ones(b)) * logp[:, 0], axis=-1))
        z = cls.astype(jnp.float32)
        z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
        like = z @ z.T - 2 * jnp.eye(b)
        nearest = jnp.argmax(lax.stop_gradient(like), axis=-1)
        spread = -jnp.mean(jnp.log(jnp.linalg.norm(z - z[nearest] + 1e-6, axis=-1) + 1e-6))
        return patches + whole + 0.1 * spread, (patches, whole, spread)

    def step(p, teacher, clean, noisy, hidden):
        (_, parts), grads = jax.value_and_grad(loss, has_aux=True)(p, teacher, clean, noisy, hidden)
        teacher = jax.tree.map(lambda s, w: (0.994 * s + 0.006 * w).astype(s.dtype), teacher, p)
        return grads, parts, teacher

    def make():
        def layer():
            p = {"qkv": weight(n, 3 * n, dtype=dtype), "out": weight(n, n, dtype=dtype), "norm": gain(n, dtype)}
            p |= {"up": weight(n, 4 * n, dtype=dtype), "down": weight(4 * n, n, dtype=dtype), "norm2": gain(n, dtype)}
            return p | {"s1": gain(n, dtype), "s2": gain(n, dtype)}

        p = {"patch": weight(pixels, n, dtype=dtype), "mask": normal(n, dtype=dtype), "cls": normal(n, dtype=dtype)}
        p |= {"places": normal(t + 1, n, dtype=dtype, scale=0.1), "layers": [layer() for _ in range(layers)]}
        p |= {"head1": weight(n, 2 * n, dtype=dtype), "head2": weight(2 * n, 64, dtype=dtype)}
        return p | {"protos": weight(64, heads, dtype=dtype), "last": gain(n, dtype)}

    return Built(step, (make(), make(), normal(b, t, pixels), normal(b, t, pixels), booleans(b, t)))


@program("energy-learned-from-rolled-out-leapfrog-paths-grad", GROUP)
def _hamiltonian(size: Size) -> Built:
    """This gives gradients of a learned energy through leapfrog rollouts, as SRNN (Chen et al., 2020).

    The energy is a quadratic of momenta with a learned mass and a network of pairs of bodies; the start is refined by
    a learned shift and every step of the path is compared.
    """
    b, bodies, axes, n, steps = pick(size, (256, 5, 2, 128, 12), (64, 5, 2, 64, 12), (3, 3, 2, 8, 12))

    def potential(p, q):
        gap = q[:, None] - q
        far = jnp.sqrt(jnp.sum(gap**2, axis=-1) + 0.05)
        x = jnp.stack([far, 1 / far, jnp.log(far)], axis=-1)
        y = jnp.tanh(jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]) @ p["w3"]
        return 0.5 * jnp.sum(jnp.triu(y[..., 0], 1)) + 0.05 * jnp.sum(q**2)

    def energy(p, q, m):
        mass = jax.nn.softplus(p["mass"])[:, None]
        return jnp.sum(m**2 / (2 * mass)) + potential(p, q)

    def rollout(p, q, m):
        by_q, by_m = jax.grad(energy, argnums=1), jax.grad(energy, argnums=2)

        def step(state, _):
            q, m = state
            m = m - 0.05 * by_q(p, q, m)
            q = q + 0.1 * by_m(p, q, m)
            m = m - 0.05 * by_q(p, q, m)
            return (q, m), (q, m, energy(p, q, m))

        return lax.scan(step, (q, m), None, length=steps)[1]

    def loss(p, q0, m0, seen, noise):
        q, m, e = jax.vmap(rollout, in_axes=(None, 0, 0))(p, q0 + p["shift"], m0)
        apart = jnp.sum((q - seen) ** 2, axis=(-2, -1))
        weights = 0.9 ** jnp.arange(steps)
        spread = jnp.exp(p["noise"])
        value = jnp.mean(jnp.sum(weights * (0.5 * apart / spread**2 + bodies * axes * p["noise"]), axis=-1))
        drift = jnp.mean(jnp.abs(e - e[:, :1]))
        turned = jnp.mean((jnp.cumsum(noise, axis=1) * 0.01 * m) ** 2)
        return value / steps + 0.01 * drift + turned, (drift, jnp.sqrt(jnp.mean(apart, axis=0)))

    p = {"w1": weight(3, n), "b1": normal(n, scale=0.1), "w2": weight(n, n), "b2": normal(n, scale=0.1)}
    p |= {
        "w3": weight(n, 1),
        "mass": normal(bodies),
        "shift": normal(bodies, axes, scale=0.05),
        "noise": normal(scale=0.1),
    }
    inputs = (normal(b, bodies, axes), normal(b, bodies, axes, scale=0.3), normal(b, steps, bodies, axes))
    return Built(jax.value_and_grad(loss, has_aux=True), (p, *inputs, normal(b, steps, bodies, axes)))


@program("weights-split-in-length-and-way-low-rank-tuned-layer-grad", GROUP)
def _dora(size: Size) -> Built:
    """This gives gradients of adapters that change lengths and ways of weights apart, as DoRA (Liu et al., 2024).

    The norm of each column is held fixed in the backward pass; one decoder layer and the word loss are around it.
    """
    b, t, n, h, m, rank, words = pick(
        size, (2, 511, 1024, 16, 2816, 16, 8009), (2, 95, 192, 4, 512, 8, 1501), (2, 6, 8, 2, 12, 2, 11)
    )
    dtype = half(size)

    def tuned(x, w, a, key):
        low, high = a["low"].astype(dtype), a["high"].astype(dtype)
        alone = w.astype(jnp.float32) + 2.0 * (a["low"] @ a["high"])
        norm = lax.stop_gradient(jnp.linalg.norm(alone, axis=0))
        scale = a["length"] / norm
        keep = jax.random.bernoulli(key, 0.95, x.shape)
        dropped = jnp.where(keep, x / 0.95, 0).astype(dtype)
        y = x @ w
        y = y + (scale - 1).astype(dtype) * (dropped @ w) + (2.0 * scale).astype(dtype) * ((dropped @ low) @ high)
        return y

    def loss(adapters, p, text, answer, seed):
        keys = jax.random.split(jax.random.key(seed[0]), 5)
        x = p["table"][text]
        y = _norm(x, p["norm"])
        q, k, v = (
            tuned(y, p[z], adapters[z], key).reshape(b, t, h, n // h) for z, key in zip("qkv", keys, strict=False)
        )
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, n) @ p["o"]
        y = _norm(x, p["norm2"])
        gate = jax.nn.silu(tuned(y, p["gate"], adapters["gate"], keys[3]))
        x = x + tuned(gate * (y @ p["up"]), p["down"], adapters["down"], keys[4])
        logits = (_norm(x, p["last"]) @ p["head"]).astype(jnp.float32)[:, :-1]
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), text[:, 1:, None], axis=-1)[..., 0]
        used = jnp.arange(1, t) >= (t // 4 + answer)[:, None]
        return -jnp.sum(jnp.where(used, logp, 0)) / jnp.sum(used), jnp.mean(jnp.argmax(logits, -1) == text[:, 1:])

    shapes = {"q": (n, n), "k": (n, n), "v": (n, n), "gate": (n, m), "down": (m, n)}
    adapters = {
        name: {"low": weight(i, rank), "high": Random((rank, o), jnp.dtype(jnp.float32), 0.02), "length": gain(o)}
        for name, (i, o) in shapes.items()
    }
    p = {name: weight(*shape, dtype=dtype) for name, shape in (shapes | {"o": (n, n), "up": (n, m)}).items()}
    p |= {"table": normal(words, n, dtype=dtype), "head": weight(n, words, dtype=dtype)}
    p |= {name: gain(n, dtype) for name in ("norm", "norm2", "last")}
    inputs = (integers(b, t, below=words), integers(b, below=t // 2), integers(1, below=99))
    return Built(jax.value_and_grad(loss, has_aux=True), (adapters, p, *inputs))


@program("two-causes-of-death-by-months-likelihood-and-ranking-grad-linen", GROUP)
def _deephit(size: Size) -> Built:
    """This gives gradients of chances of several causes by month, with a loss of pairs, as DeepHit (Lee et al., 2018)."""
    import flax.linen as nn

    b, features, n, months, causes = pick(size, (1021, 141, 256, 120, 3), (301, 61, 96, 60, 3), (9, 5, 8, 6, 3))
    dtype = half(size)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, missing):
            table = self.param("filling", nn.initializers.zeros, (features,))
            x = jnp.where(missing, table, jnp.clip(x, -4, 4))
            x = jnp.concatenate([x, missing.astype(jnp.float32)], axis=-1).astype(dtype)
            z = nn.relu(nn.LayerNorm(dtype=dtype)(nn.Dense(n, dtype=dtype)(x)))
            z = nn.relu(nn.LayerNorm(dtype=dtype)(nn.Dense(n, dtype=dtype)(z)))
            z = jnp.concatenate([z, x], axis=-1)
            out = [nn.Dense(months, dtype=dtype)(nn.relu(nn.Dense(n, dtype=dtype)(z))) for _ in range(causes)]
            return jnp.stack(out, axis=1).astype(jnp.float32)

    module = Net()

    def loss(params, x, missing, month, event):
        logits = module.apply(params, x, missing).reshape(b, -1)
        logits = jnp.concatenate([logits, jnp.zeros((b, 1))], axis=-1)
        pmf = jax.nn.softmax(logits, axis=-1)[:, :-1].reshape(b, causes, months)
        cdf = jnp.cumsum(pmf, axis=-1)
        rows = jnp.arange(b)
        seen = event > 0
        which = jnp.maximum(event - 1, 0)
        dead = jnp.log(pmf[rows, which, month] + 1e-7)
        alive = jnp.log(jnp.clip(1 - jnp.sum(cdf[rows, :, month], axis=1), 1e-6))
        likely = -jnp.mean(jnp.where(seen, dead, alive))
        at = cdf[:, :, month]
        own = cdf[rows, :, month]
        comparable = seen[:, None] & ((month[:, None] < month) | ((month[:, None] == month) & ~seen))
        ranked, pairs = 0.0, []
        for k in range(causes):
            used = comparable & (which[:, None] == k)
            gap = own[:, k][:, None] - at[:, k].T
            ranked = ranked + jnp.sum(jnp.where(used, jnp.exp(-gap / 0.1), 0)) / jnp.maximum(jnp.sum(used), 1)
            pairs.append(jnp.sum(used & (gap > 0)) / jnp.maximum(jnp.sum(used), 1))
        happened = (event[:, None, None] == jnp.arange(1, causes + 1)[:, None]) & (
            jnp.arange(months) >= month[:, None, None]
        )
        known = (jnp.arange(months) < month[:, None]) | seen[:, None]
        brier = jnp.sum(jnp.where(known[:, None], (cdf - happened) ** 2, 0), axis=0) / jnp.sum(known, axis=0).clip(1)
        return likely + 0.2 * ranked + 0.1 * jnp.mean(brier), (jnp.stack(pairs), brier)

    inputs = (normal(b, features), booleans(b, features), integers(b, below=months), integers(b, below=causes + 1))
    params = module_weights(jax.eval_shape(module.init, jax.random.key(0), *(r.struct for r in inputs[:2])), dtype)
    return Built(jax.value_and_grad(loss, has_aux=True), (params, *inputs))


@program("scores-matched-along-random-slices-at-many-noises-adam-step", GROUP)
def _sliced(size: Size) -> Built:
    """This gives a step of Adam for an energy by matching scores along random slices, as Song et al. (2019).

    The score is a gradient of an energy, its slice derivative a forward derivative, and the weights follow by a third.
    """
    import optax

    b, axes, n, slices = pick(size, (512, 63, 256, 4), (192, 41, 128, 2), (4, 5, 8, 2))
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 99))
    )

    def energy(p, x, level):
        wave = jnp.concatenate([jnp.sin(level * p["waves"]), jnp.cos(level * p["waves"])])
        z = x @ p["enter"]
        for w1, w2, film in p["layers"]:
            scale, shift = jnp.split(wave @ film, 2)
            y = jax.nn.softplus((z * (1 + scale) + shift) @ w1)
            z = z + jnp.tanh(y) @ w2
        return jnp.sum(jax.nn.softplus(z) @ p["last"]) - 0.5 * jnp.sum(x**2) * jax.nn.softplus(p["wide"])

    def one(p, x, level, ways):
        score = jax.grad(energy, argnums=1)

        def sliced(way):
            s, change = jax.jvp(lambda x: score(p, x, level), (x,), (way,))
            return way @ change, (way @ s) ** 2, s

        trace, square, s = jax.vmap(sliced)(ways)
        return jnp.mean(trace) + 0.5 * jnp.mean(square), (jnp.mean(trace), jnp.linalg.norm(s[0]))

    def loss(p, x, level, noise, ways):
        sigma = jnp.exp(level)
        moved = x + sigma[:, None] * noise
        signs = jnp.where(ways > 0, 1.0, -1.0)
        each, parts = jax.vmap(one, in_axes=(None, 0, 0, 0))(p, moved, level, signs)
        weights = lax.stop_gradient(sigma**2 / jnp.mean(sigma**2))
        return jnp.mean(weights * each), parts

    def step(p, state, *batch):
        (value, parts), grads = jax.value_and_grad(loss, has_aux=True)(p, *batch)
        change, state = optimiser.update(grads, state, p)
        return optax.apply_updates(p, change), state, value, parts

    p = {"enter": weight(axes, n), "last": weight(n, 1), "wide": normal(), "waves": normal(16, scale=2.0)}
    p |= {"layers": [(weight(n, n), weight(n, n), weight(32, 2 * n)) for _ in range(2)]}
    state = jax.eval_shape(optimiser.init, jax.tree.map(lambda r: r.struct, p, is_leaf=lambda r: isinstance(r, Random)))

    def moment(s):
        if jnp.issubdtype(s.dtype, jnp.integer):
            return Random(s.shape, s.dtype, below=50)
        return Random(s.shape, s.dtype, 1e-3, 0.02)

    inputs = (normal(b, axes), normal(b, scale=0.5), normal(b, axes), normal(b, slices, axes))
    return Built(step, (p, jax.tree.map(moment, state), *inputs))


@program("ensemble-of-weather-maps-fair-ranked-score-on-a-sphere-grad", GROUP)
def _fair_crps(size: Size) -> Built:
    """This gives gradients of noisy forecasts by the fair ranked probability score, as in AIFS-CRPS (Lang et al., 2024).

    Maps wrap around in longitude, rows weigh by the cosine of latitude, and spectra of rows are scored as well.
    """
    members, high, wide, fields, n = pick(size, (6, 91, 180, 13, 96), (4, 31, 60, 7, 32), (3, 6, 8, 2, 4))
    dtype = half(size)

    def conv(x, w):
        r = w.shape[0] // 2
        x = jnp.concatenate([x[..., -r:, :], x, x[..., :r, :]], axis=-2)
        x = jnp.pad(x, ((0, 0), (r, r), (0, 0), (0, 0)), mode="edge")
        return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def forecast(p, now, noise):
        x = jnp.broadcast_to(now, (members, *now.shape)).astype(dtype)
        x = conv(x, p["enter"])
        for layer in p["layers"]:
            film = (jax.nn.silu(noise @ layer["noise1"]) @ layer["noise2"]).astype(dtype)[:, None, None]
            scale, shift = jnp.split(film, 2, axis=-1)
            y = _norm(x, layer["norm"]) * (1 + scale) + shift
            y = conv(jax.nn.silu(conv(y, layer["w1"])), layer["w2"])
            x = x + y
        return now + conv(x, p["leave"]).astype(jnp.float32)

    def fair(x, y):
        """The score along the first axis, with almost fair weights of the pairs."""
        near = jnp.mean(jnp.abs(x - y), axis=0)
        order = jnp.sort(x, axis=0)
        ranks = (2 * jnp.arange(members) - members + 1.0).reshape(-1, *[1] * (x.ndim - 1))
        pairs = 2 * jnp.sum(ranks * order, axis=0)
        eps = 0.05 / members
        return near - (1 - eps) * pairs / (2 * members * (members - 1))

    def loss(p, now, later, noise, valid):
        x = forecast(p, now, noise)
        row = jnp.cos(jnp.linspace(-np.pi / 2, np.pi / 2, high + 2)[1:-1])
        area = (row / jnp.mean(row))[:, None, None]
        importance = jax.nn.softmax(0.5 * jnp.arange(fields) / fields) * fields
        local = fair(x, later)
        used = valid[..., None] * area
        maps = jnp.sum(local * used, axis=(0, 1)) / jnp.sum(used)
        power = jnp.log(jnp.abs(jnp.fft.rfft(x, axis=2)) ** 2 / wide + 1e-3)
        wanted = jnp.log(jnp.abs(jnp.fft.rfft(later, axis=1)) ** 2 / wide + 1e-3)
        spectra = jnp.mean(fair(power, wanted) * area, axis=(0, 1))
        spread = jnp.sqrt(jnp.mean(jnp.var(x, axis=0, ddof=1) * area, axis=(0, 1)))
        skill = jnp.sqrt(jnp.mean((jnp.mean(x, axis=0) - later) ** 2 * area, axis=(0, 1)))
        value = jnp.sum(importance * (maps + 0.1 * spectra)) / fields
        return value, (maps, spread / skill, jnp.argsort(jnp.argsort(x[:, :, :, 0], axis=0), axis=0)[0])

    def kernel(side, i, o):
        return normal(side, side, i, o, dtype=dtype, scale=(side * side * i) ** -0.5)

    def layer():
        p = {"w1": kernel(3, n, 2 * n), "w2": kernel(3, 2 * n, n), "norm": gain(n, dtype)}
        return p | {"noise1": weight(32, n), "noise2": weight(n, 2 * n)}

    p = {"enter": kernel(5, fields, n), "layers": [layer(), layer()], "leave": kernel(3, n, fields)}
    inputs = (normal(high, wide, fields), normal(high, wide, fields), normal(members, 32), booleans(high, wide))
    return Built(jax.value_and_grad(loss, has_aux=True), (p, *inputs))


@program("steps-of-reasoning-marked-and-answers-ranked-reward-grad", GROUP)
def _reward(size: Size) -> Built:
    """This gives gradients of a reward model by pairs of answers and by marks of steps (Lightman et al., 2023).

    Rewards are read at the last real word and at the ends of steps; margins, a centring term and smoothed marks enter.
    """
    b, t, n, h, kv, m, words = pick(
        size, (4, 383, 1024, 16, 4, 2816, 16001), (2, 95, 192, 4, 2, 512, 3001), (2, 9, 8, 2, 1, 12, 13)
    )
    dtype, d = half(size), n // h

    def body(p, text, lengths):
        x = p["table"][text] + p["places"]
        ok = jnp.arange(t) < lengths[:, None]
        mask = jnp.tril(jnp.ones((t, t), bool)) & ok[:, None, None]

        @jax.checkpoint
        def layer(x, w):
            y = _norm(x, w["norm"])
            q, k, v = jnp.split(y @ w["qkv"], [n, n + kv * d], axis=-1)
            q = q.reshape(*q.shape[:2], h, d)
            k, v = (z.reshape(*z.shape[:2], kv, d) for z in (k, v))
            x = x + jax.nn.dot_product_attention(q, k, v, mask=mask).reshape(x.shape) @ w["out"]
            gate, up = jnp.split(_norm(x, w["norm2"]) @ w["up"], 2, axis=-1)
            return x + (jax.nn.gelu(gate) * up) @ w["down"], None

        return _norm(lax.scan(layer, x, p["layers"])[0], p["last"]), ok

    def loss(p, chosen, rejected, more, less, margin, marks):
        lengths = t // 2 + jnp.concatenate([more, less])
        text = jnp.concatenate([chosen, rejected])
        x, ok = body(p, text, lengths)
        hidden = jnp.tanh((x @ p["head1"]).astype(jnp.float32))
        r = hidden @ p["head2"]
        whole = jnp.take_along_axis(r[..., 0], lengths[:, None] - 1, axis=1)[:, 0]
        win, lose = jnp.split(whole, 2)
        pairs = -jax.nn.log_sigmoid(win - lose - 0.5 * jax.nn.sigmoid(margin))
        ends = ok & (text % 8 == 0)
        wanted = jnp.where(marks, 0.95, 0.05)
        z = r[..., 1]
        cross = jnp.maximum(z, 0) - z * wanted + jnp.log1p(jnp.exp(-jnp.abs(z)))
        steps = jnp.sum(jnp.where(ends, cross, 0)) / jnp.maximum(jnp.sum(ends), 1)
        product = jnp.sum(jnp.where(ends, jax.nn.log_sigmoid(z), 0), axis=1)
        weakest = jnp.min(jnp.where(ends, jax.nn.sigmoid(z), 1.0), axis=1)
        value = jnp.mean(pairs) + steps + 0.01 * jnp.mean((win + lose) ** 2)
        return value, (jnp.mean(win > lose), product, weakest)

    layers = {"qkv": weight(2, n, n + 2 * kv * d, dtype=dtype), "out": weight(2, n, n, dtype=dtype)}
    layers |= {"up": weight(2, n, 2 * m, dtype=dtype), "down": weight(2, m, n, dtype=dtype)}
    layers |= {name: normal(2, n, dtype=dtype, scale=0.1, offset=1.0) for name in ("norm", "norm2")}
    p = {"table": normal(words, n, dtype=dtype), "places": normal(t, n, dtype=dtype, scale=0.1), "layers": layers}
    p |= {"last": gain(n, dtype), "head1": weight(n, n, dtype=dtype), "head2": weight(n, 2)}
    inputs = (integers(b, t, below=words), integers(b, t, below=words), integers(b, below=t // 2))
    inputs += (integers(b, below=t // 2), normal(b), booleans(2 * b, t))
    return Built(jax.value_and_grad(loss, has_aux=True), (p, *inputs))
