"""Losses with their gradients and whole training steps, the nineteenth set: its author saw no plan."""

from itertools import pairwise

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
from benchmarks.workloads.sixteenth_language import rms, rotate
from benchmarks.workloads.sixteenth_training import moments

GROUP = "nineteenth"


@program("experts-chosen-by-rectified-scores-steered-sparsity-grad", GROUP)
def _remoe(size: Size) -> Built:
    """This gives gradients of a language model whose experts count by rectified scores, as ReMoE (Wang et al. 2024).

    The sum of scores is penalised, and the penalty grows or shrinks so that a wanted share of the scores is zero.
    """
    b, t, n, h, experts, m, words = pick(
        size, (4, 256, 512, 8, 8, 512, 8000), (2, 64, 128, 4, 8, 64, 1000), (2, 5, 8, 2, 3, 4, 11)
    )
    dtype = half(size)

    def loss(p, text, strength):
        x = p["table"][text]
        mask = jnp.tril(jnp.ones((t, t), bool))
        penalty, zeros = 0.0, []
        for layer in p["layers"]:
            y = rms(x, layer["norm"])
            q, k, v = (jnp.einsum("btn,nhd->bthd", y, layer[name]) for name in "qkv")
            q, k = rotate(q, jnp.arange(t)), rotate(k, jnp.arange(t))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * (n // h) ** -0.5
            probs = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1).astype(dtype)
            x = x + jnp.einsum("bhqk,bkhd,hdn->bqn", probs, v, layer["o"])
            y = rms(x, layer["norm2"])
            gate = jax.nn.relu((y @ layer["router"]).astype(jnp.float32))
            z = jax.nn.silu(jnp.einsum("btn,enm->btem", y, layer["gate"])) * jnp.einsum("btn,enm->btem", y, layer["up"])
            x = x + jnp.einsum("btem,bte,emn->btn", z, gate.astype(dtype), layer["down"])
            used = jnp.mean((gate > 0).astype(jnp.float32), axis=(0, 1))
            penalty = penalty + jnp.mean(gate * lax.stop_gradient(used * experts / 2))
            zeros.append(1 - used)
        logits = (rms(x, p["last"]) @ p["table"].T).astype(jnp.float32)[:, :-1]
        picked = jnp.take_along_axis(logits, text[:, 1:, None], axis=-1)[..., 0]
        value = jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)
        return value + strength * penalty / 2, (value, jnp.stack(zeros))

    def gradients(p, text, raw):
        strength = 1e-3 * jnp.exp(raw)
        (_, (value, zeros)), grads = jax.value_and_grad(loss, has_aux=True)(p, text, strength)
        fresh = strength * 1.2 ** jnp.sign(1 - 2 / experts - jnp.mean(zeros))
        return grads, value, zeros, fresh

    def layer():
        p = {name: normal(n, h, n // h, dtype=dtype, scale=n**-0.5) for name in "qkv"}
        p |= {"o": normal(h, n // h, n, dtype=dtype, scale=n**-0.5), "router": weight(n, experts, dtype=dtype)}
        p |= {"gate": weight(experts, n, m, dtype=dtype), "up": weight(experts, n, m, dtype=dtype)}
        return p | {"down": weight(experts, m, n, dtype=dtype), "norm": gain(n, dtype), "norm2": gain(n, dtype)}

    p = {"table": normal(words, n, dtype=dtype, scale=n**-0.5), "layers": [layer(), layer()], "last": gain(n, dtype)}
    return Built(gradients, (p, integers(b, t, below=words), normal()))


@program("fast-and-slow-averages-mixed-on-a-schedule-update", GROUP)
def _ademamix(size: Size) -> Built:
    """This gives one update of AdEMAMix (Pagliardini, 2024), which mixes a fast and a slow average of gradients.

    The share and the memory of the slow average grow on schedules; a step without finite gradients changes nothing.
    """
    n, m, words = pick(size, (1024, 2816, 8000), (256, 700, 2000), (8, 12, 9))
    dtype = half(size)

    def update(params, grads, fast, slow, square, count):
        count = count.astype(jnp.float32) + 1
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))
        good = jnp.isfinite(norm)
        clip = jnp.where(good, jnp.minimum(1.0, 1.0 / (norm + 1e-6)), 0.0)
        way = jnp.minimum(count / 1000.0, 1.0)
        share = 5.0 * way
        l1, l3 = np.log(0.9), np.log(0.9999)
        keep = jnp.minimum(jnp.exp(l1 * l3 / ((1 - way) * l3 + way * l1)), 0.9999)
        rate = 3e-4 * jnp.where(count < 10, count / 10, 0.5 * (1 + jnp.cos(jnp.pi * way)))

        def one(path, w, g, m1, m2, v):
            g = g.astype(jnp.float32) * clip
            a1, a2, a3 = 0.9 * m1 + 0.1 * g, keep * m2 + (1 - keep) * g, 0.999 * v + 0.001 * g * g
            top = a1 / (1 - 0.9**count) + share * a2
            change = top / (jnp.sqrt(a3 / (1 - 0.999**count)) + 1e-8)
            change = change + (0.1 * w.astype(jnp.float32) if w.ndim >= 2 else 0.0)
            new = (w.astype(jnp.float32) - rate * change).astype(w.dtype)
            return tuple(jnp.where(good, z, old) for z, old in ((new, w), (a1, m1), (a2, m2), (a3, v)))

        out = jax.tree_util.tree_map_with_path(one, params, grads, fast, slow, square)
        parts = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0, 0, 0)), out)
        moved = jax.tree.map(lambda a, b: jnp.sqrt(jnp.mean((a - b).astype(jnp.float32) ** 2)), parts[0], params)
        return parts, moved, norm, rate

    layer = {"qkv": weight(n, 3 * n, dtype=dtype), "o": weight(n, n, dtype=dtype), "norm": gain(n, dtype)}
    layer |= {"up": weight(2, n, m, dtype=dtype), "down": weight(m, n, dtype=dtype)}
    params = {"table": normal(words, n, dtype=dtype, scale=0.02), "layers": [dict(layer), dict(layer)]}
    grads = jax.tree.map(
        lambda r: Random(r.shape, r.dtype, 1e-3), params, is_leaf=lambda leaf: isinstance(leaf, Random)
    )
    averages = (moments(params, False), moments(params, False), moments(params, True))
    return Built(update, (params, grads, *averages, integers(below=900)))


@program("views-predicted-with-bell-shaped-shadows-in-random-ways-grad", GROUP)
def _sigreg(size: Size) -> Built:
    """This gives gradients of an encoder whose views agree and whose shadows in random directions are normal.

    As in LeJEPA (Balestriero and LeCun, 2025), a characteristic function at a few points is compared to that of the
    normal law.
    """
    views, b, tokens, pixels, n, out, ways = pick(
        size, (6, 128, 36, 147, 384, 64, 512), (3, 32, 16, 75, 96, 32, 128), (2, 4, 3, 5, 8, 4, 6)
    )
    dtype = half(size)
    knots = np.linspace(0, 3, 17).astype(np.float32)
    trapezoid = np.full(17, 3 / 16 * 2, np.float32)
    trapezoid[[0, -1]] = 3 / 16
    bell = np.exp(-(knots**2) / 2)

    def encode(p, x):
        x = x.astype(dtype) @ p["patch"] + p["places"]
        for layer in p["layers"]:
            y = rms(x, layer["norm"])
            y = jnp.swapaxes(jax.nn.gelu(jnp.swapaxes(y, 1, 2) @ layer["across"]) @ layer["back"], 1, 2)
            x = x + y
            x = x + jax.nn.gelu(rms(x, layer["norm2"]) @ layer["up"]) @ layer["down"]
        return jnp.mean(x.astype(jnp.float32), axis=1)

    def loss(p, pictures, seed):
        z = encode(p, pictures.reshape(views * b, tokens, pixels))
        y = jax.nn.relu((z - jnp.mean(z, axis=0)) / jnp.sqrt(jnp.var(z, axis=0) + 1e-5) @ p["project"])
        y = (y @ p["project2"]).reshape(views, b, out)
        centre = jnp.mean(y, axis=0)
        agree = jnp.mean((centre - y) ** 2)
        directions = jax.random.normal(jax.random.key(seed[0]), (out, ways))
        directions = directions / jnp.linalg.norm(directions, axis=0)
        angle = jnp.einsum("vbo,ow->vbw", y, directions)[..., None] * knots
        error = (jnp.mean(jnp.cos(angle), axis=1) - bell) ** 2 + jnp.mean(jnp.sin(angle), axis=1) ** 2
        statistic = jnp.sum(error * (bell * trapezoid), axis=-1) * b
        normality = jnp.mean(statistic)
        return 0.95 * agree + 0.05 * normality, (agree, normality, jnp.std(y, axis=(0, 1)))

    layer = {"norm": gain(n, dtype), "norm2": gain(n, dtype), "across": weight(tokens, 4 * tokens, dtype=dtype)}
    layer |= {"back": weight(4 * tokens, tokens, dtype=dtype), "up": weight(n, 3 * n, dtype=dtype)}
    layer |= {"down": weight(3 * n, n, dtype=dtype)}
    p = {"patch": weight(pixels, n, dtype=dtype), "places": normal(tokens, n, dtype=dtype, scale=0.1)}
    p |= {"layers": [dict(layer), dict(layer)], "project": weight(n, 2 * out), "project2": weight(2 * out, out)}
    inputs = (normal(views, b, tokens, pixels), integers(1, below=999))
    return Built(jax.value_and_grad(loss, has_aux=True), (p, *inputs))


@program("waves-compared-by-spectra-of-many-lengths-grad", GROUP)
def _spectra(size: Size) -> Built:
    """This gives a loss of generated speech by spectra of three lengths and mel bands, with its gradient by sample.

    It is the loss of Parallel WaveGAN (2020): the relative error of magnitudes and the mean error of their
    logarithms.
    """
    b, length = pick(size, (16, 24000), (4, 8192), (2, 300))
    shapes = pick(
        size, *[[(1024, 120, 600), (2048, 240, 1200), (512, 50, 240)]] * 2, [(32, 10, 20), (64, 12, 40), (16, 5, 9)]
    )
    bands = pick(size, 80, 80, 5)
    bins = shapes[1][0] // 2 + 1
    centres = 700 * (np.exp(np.linspace(np.log(1.05), np.log(1 + 12000 / 700), bands + 2)) - 1) / 12000 * (bins - 1)
    place = np.arange(bins)[:, None]
    rise = (place - centres[:-2]) / (centres[1:-1] - centres[:-2])
    fall = (centres[2:] - place) / (centres[2:] - centres[1:-1])
    filters = np.maximum(0, np.minimum(rise, fall)).astype(np.float32)

    def magnitudes(x, fft, hop, wide):
        window = jnp.pad(jnp.hanning(wide), ((fft - wide) // 2, fft - wide - (fft - wide) // 2))
        x = jnp.pad(x, ((0, 0), (fft // 2, fft // 2)), mode="reflect")
        frames = (x.shape[1] - fft) // hop + 1
        pieces = x[:, jnp.arange(frames)[:, None] * hop + jnp.arange(fft)]
        z = jnp.fft.rfft(pieces * window.astype(jnp.float32), axis=-1)
        return jnp.sqrt(jnp.maximum(z.real**2 + z.imag**2, 1e-7))

    def loss(wave, target, lengths):
        alive = jnp.arange(length) < (length // 2 + lengths)[:, None]
        wave, target = jnp.where(alive, jnp.tanh(wave), 0), jnp.where(alive, jnp.tanh(target), 0)
        total, parts = 0.0, []
        for fft, hop, wide in shapes:
            x, y = magnitudes(wave, fft, hop, wide), magnitudes(target, fft, hop, wide)
            apart = jnp.linalg.norm((y - x).reshape(b, -1), axis=1) / jnp.linalg.norm(y.reshape(b, -1), axis=1)
            logs = jnp.mean(jnp.abs(jnp.log(x) - jnp.log(y)), axis=(1, 2))
            parts += [apart, logs]
            total = total + jnp.mean(apart) + jnp.mean(logs)
            if fft == shapes[1][0]:
                mel = [jnp.log10(jnp.maximum(z @ filters, 1e-5)) for z in (x, y)]
                total = total + 4.5 * jnp.mean(jnp.abs(mel[0] - mel[1]))
        flat = jnp.diff(wave, axis=1) - jnp.diff(target, axis=1)
        return total + 0.1 * jnp.mean(jnp.abs(flat)), jnp.stack(parts)

    inputs = (normal(b, length, scale=0.3), normal(b, length, scale=0.3), integers(b, below=length // 2))
    return Built(jax.value_and_grad(loss, has_aux=True), inputs)


@program("scene-in-hashed-grids-of-many-sizes-rendered-adam-step", GROUP)
def _hash_grids(size: Size) -> Built:
    """This gives a step of Adam for a scene held in hashed grids of many sizes, as Instant NGP (Mueller et al. 2022).

    Eight corners of a cell are read on each level and mixed; two small networks give density and colour along each
    ray.
    """
    rays, samples, levels, slots, n = pick(
        size, (1024, 48, 8, 1 << 16, 64), (128, 32, 8, 1 << 12, 32), (4, 5, 3, 16, 8)
    )
    primes = np.array([1, 2654435761, 805459861], np.uint32)
    corners = np.stack(np.meshgrid(*[[0, 1]] * 3, indexing="ij"), axis=-1).reshape(8, 3)
    dtype = half(size)

    def encode(tables, x):
        found = []
        for level in range(levels):
            scaled = x * (16 * 1.45**level)
            low = jnp.floor(scaled)
            part = scaled - low
            at = low.astype(jnp.int32)[..., None, :] + corners
            key = at.astype(jnp.uint32) * primes
            key = (key[..., 0] ^ key[..., 1] ^ key[..., 2]) & np.uint32(slots - 1)
            share = jnp.prod(jnp.where(corners == 1, part[..., None, :], 1 - part[..., None, :]), axis=-1)
            found.append(jnp.sum(share[..., None] * tables[level][key.astype(jnp.int32)], axis=-2))
        return jnp.concatenate(found, axis=-1)

    def loss(p, origins, ways, colours, jitter):
        way = ways / jnp.linalg.norm(ways, axis=-1, keepdims=True)
        far = (jnp.arange(samples) + jax.nn.sigmoid(jitter)) / samples * 2
        x = jax.nn.sigmoid(origins[:, None] + way[:, None] * far[..., None])
        y = encode(p["tables"], x).astype(dtype)
        y = jax.nn.relu(y @ p["d1"]) @ p["d2"]
        density = jnp.exp(jnp.clip(y[..., 0].astype(jnp.float32), -15, 8))
        basis = jnp.stack([jnp.ones(rays), *way.T, way[:, 0] * way[:, 1], way[:, 2] ** 2 - 1 / 3], axis=-1).astype(
            dtype
        )
        z = jnp.concatenate([y, jnp.broadcast_to(basis[:, None], (rays, samples, 6))], axis=-1)
        colour = jax.nn.sigmoid((jax.nn.relu(jax.nn.relu(z @ p["c1"]) @ p["c2"]) @ p["c3"]).astype(jnp.float32))
        step = jnp.diff(far, axis=-1, append=jnp.full((rays, 1), 2.0))
        alpha = 1 - jnp.exp(-density * jnp.maximum(step, 0))
        clear = jnp.cumprod(jnp.concatenate([jnp.ones((rays, 1)), 1 - alpha[:, :-1] + 1e-10], axis=-1), axis=-1)
        share = alpha * clear
        picture = jnp.sum(share[..., None] * colour, axis=1) + (1 - jnp.sum(share, axis=1, keepdims=True))
        apart = picture - jax.nn.sigmoid(colours)
        huber = jnp.where(jnp.abs(apart) < 0.1, 5 * apart**2, jnp.abs(apart) - 0.05)
        return jnp.mean(huber), (picture, jnp.sum(share * far, axis=1))

    def step(p, m, v, *batch):
        (value, seen), grads = jax.value_and_grad(loss, has_aux=True)(p, *batch)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
        v = jax.tree.map(lambda v, g: jnp.where(g == 0, v, 0.99 * v + 0.01 * g * g), v, grads)
        new = jax.tree.map(lambda w, m, v: (w - 1e-2 * m / (jnp.sqrt(v) + 1e-15)).astype(w.dtype), p, m, v)
        return new, m, v, value, seen

    p = {
        "tables": normal(levels, slots, 2, scale=0.3),
        "d1": weight(2 * levels, n, dtype=dtype),
        "d2": weight(n, 16, dtype=dtype),
    }
    p |= {"c1": weight(22, n, dtype=dtype), "c2": weight(n, n, dtype=dtype), "c3": weight(n, 3, dtype=dtype)}
    inputs = (normal(rays, 3), normal(rays, 3), normal(rays, 3), normal(rays, samples))
    return Built(step, (p, moments(p, False), moments(p, True), *inputs))


@program("values-kept-low-for-unseen-actions-ensemble-grad", GROUP)
def _conservative(size: Size) -> Built:
    """This gives gradients of conservative critics (CQL, Kumar 2020) and of a policy, from stored moves of a robot.

    A soft maximum over random, present and next actions is pushed down, and the value of stored actions up.
    """
    b, seen, acts, n, drawn, critics = pick(
        size, (512, 39, 11, 256, 10, 4), (128, 39, 11, 64, 6, 4), (3, 5, 2, 8, 3, 2)
    )

    def mlp(layers, x):
        for i, (w, bias) in enumerate(layers):
            x = x @ w + bias
            x = jax.nn.relu(x) if i < len(layers) - 1 else x
        return x

    def act(policy, x, noise):
        mean, log_std = jnp.split(mlp(policy, x), 2, axis=-1)
        log_std = jnp.clip(log_std, -5, 2)
        raw = mean + jnp.exp(log_std) * noise
        log_p = (
            -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - 2 * (np.log(2.0) - raw - jax.nn.softplus(-2 * raw))
        )
        return jnp.tanh(raw), jnp.sum(log_p, axis=-1)

    def values(q, x, a):
        return jax.vmap(lambda q: mlp(q, jnp.concatenate([x, a], axis=-1))[..., 0])(q)

    def loss(p, slow, x, a, reward, after, ended, seed):
        k = jax.random.split(jax.random.key(seed[0]), 5)
        frozen = lax.stop_gradient(p)
        a = jnp.tanh(a)
        next_a, next_log = act(frozen["policy"], after, jax.random.normal(k[0], (b, acts)))
        heat = jnp.exp(frozen["heat"])
        ahead = jnp.min(values(slow, after, next_a), axis=0) - heat * next_log
        target = reward + 0.99 * jnp.where(ended, 0.0, ahead)
        q = values(p["critics"], x, a)
        error = jnp.mean((q - lax.stop_gradient(target)) ** 2, axis=1)
        many = jnp.repeat(x[:, None], drawn, axis=1)
        many_after = jnp.repeat(after[:, None], drawn, axis=1)
        random = jax.random.uniform(k[1], (b, drawn, acts), minval=-1, maxval=1)
        now, now_log = act(frozen["policy"], many, jax.random.normal(k[2], (b, drawn, acts)))
        later, later_log = act(frozen["policy"], many_after, jax.random.normal(k[3], (b, drawn, acts)))
        pushed = [values(p["critics"], many, random) - acts * np.log(0.5)]
        pushed += [values(p["critics"], many, now) - now_log, values(p["critics"], many, later) - later_log]
        soft = jax.nn.logsumexp(jnp.concatenate(pushed, axis=-1), axis=-1)
        gap = jnp.clip(jnp.mean(soft - q, axis=1), -200, 200)
        mine, log_p = act(p["policy"], x, jax.random.normal(k[4], (b, acts)))
        gain_ = jnp.min(values(frozen["critics"], x, mine), axis=0)
        policy = jnp.mean(heat * log_p - gain_)
        warm = -jnp.mean(p["heat"] * lax.stop_gradient(log_p - acts))
        return jnp.sum(error + 5.0 * gap) + policy + warm, (error, gap, -jnp.mean(log_p))

    def layers(*widths, many=()):
        pairs = pairwise(widths)
        return [(weight(*many, i, o), normal(*many, o, scale=0.1)) for i, o in pairs]

    critic = layers(seen + acts, n, n, n, 1, many=(critics,))
    p = {"critics": critic, "policy": layers(seen, n, n, n, 2 * acts), "heat": normal(scale=0.1)}
    inputs = (normal(b, seen), normal(b, acts), normal(b), normal(b, seen), booleans(b), integers(1, below=99))
    return Built(jax.value_and_grad(loss, has_aux=True), (p, critic, *inputs))


@program("next-items-with-many-negatives-calibrated-loss-grad-linen", GROUP)
def _next_items(size: Size) -> Built:
    """This gives gradients of a causal model of purchases with many sampled negatives, as gSASRec (Petrov, 2023).

    The positive's chance is raised to a power that undoes the overconfidence of sampled negatives.
    """
    import flax.linen as nn

    b, t, n, h, items, negatives = pick(
        size, (64, 200, 128, 4, 40000, 128), (16, 50, 64, 2, 5000, 64), (2, 5, 8, 2, 12, 3)
    )
    dtype = half(size)
    share = negatives / (items - 1)
    power = share * (0.75 * (1 - 1 / share) + 1 / share)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, seen, positive, negative):
            table = nn.Embed(items, n, dtype=dtype)
            places = self.param("places", nn.initializers.normal(0.02), (t, n)).astype(dtype)
            alive = seen > 0
            x = (table(seen) * np.sqrt(n) + places) * alive[..., None]
            mask = nn.combine_masks(nn.make_causal_mask(seen), nn.make_attention_mask(jnp.ones_like(alive), alive))
            for _ in range(2):
                y = nn.LayerNorm(dtype=dtype)(x)
                x = y + nn.MultiHeadDotProductAttention(h, dtype=dtype)(y, x, mask=mask)
                y = nn.LayerNorm(dtype=dtype)(x)
                x = y + nn.Dense(n, dtype=dtype)(nn.relu(nn.Dense(n, dtype=dtype)(y)))
                x = x * alive[..., None]
            x = nn.LayerNorm(dtype=dtype)(x)
            both = table(jnp.concatenate([positive[..., None], negative], axis=-1))
            return jnp.einsum("btn,btkn->btk", x, both).astype(jnp.float32), table.attend(x[:, -1])

    module = Net()

    def loss(params, seen, positive, seed):
        negative = jax.random.randint(jax.random.key(seed[0]), (b, t, negatives), 1, items)
        logits, last = module.apply(params, seen, positive, negative)
        labels = jnp.concatenate([jnp.ones((b, t, 1)), jnp.zeros((b, t, negatives))], axis=-1)
        chance = jnp.clip(jax.nn.sigmoid(logits[..., :1]), 1e-7, 1 - 1e-7) ** power
        chance = jnp.clip(chance, 1e-7, 1 - 1e-7)
        lifted = jnp.log(1 / (1 / chance - 1 + 1e-9) + 1e-9)
        logits = jnp.concatenate([lifted, logits[..., 1:]], axis=-1)
        each = jnp.maximum(logits, 0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))
        known = ((seen > 0) & (positive > 0)).astype(jnp.float32)
        value = jnp.sum(jnp.mean(each, axis=-1) * known) / jnp.maximum(jnp.sum(known), 1)
        return value, lax.top_k(last.astype(jnp.float32), min(10, items))

    def gradients(*arguments):
        (value, best), grads = jax.value_and_grad(loss, has_aux=True)(*arguments)
        return value, best, jax.tree.leaves(grads)

    ids, extra = integers(b, t, below=items), integers(b, t, negatives, below=items)
    params = module_weights(jax.eval_shape(module.init, jax.random.key(0), ids.struct, ids.struct, extra.struct), dtype)
    return Built(gradients, (params, ids, ids, integers(1, below=99)))
