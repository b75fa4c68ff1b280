"""Layers that learn alone, a learned step, tones with noise and many labels, the twenty-ninth set: its author saw no plan."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import dense, dense_of
from benchmarks.workloads.twenty_sixth_parts import drawn, is_random, layers_of_nnx, state_of

GROUP = "twenty-ninth"


@program("layers-learn-alone-to-be-loud-for-true-pictures-and-quiet-for-false-step", GROUP)
def _alone(size: Size) -> Built:
    """This is a step in which each layer learns alone to be loud for pictures with true labels and quiet for false ones.

    It is the forward-forward algorithm (Hinton, 2022; mpezeshki/pytorch_forward_forward), with optax: labels are written into the
    first pixels, false ones are drawn by how likely they seem, and nothing is sent back from layer to layer.
    """
    import optax

    b, seen, deep, depth, classes = pick(size, (4096, 784, 2000, 4, 10), (96, 784, 256, 4, 10), (4, 12, 6, 2, 3))
    dtype, bar = half(size), 2.0
    optimiser = optax.adamw(1e-3, weight_decay=3e-4)

    def labelled(x, label):
        """This writes a label into the first pixels."""
        return jnp.concatenate([jax.nn.one_hot(label, classes, dtype=x.dtype), x[:, classes:]], axis=-1)

    def unit(x):
        """This gives rows the length of the root of their width."""
        y = x.astype(jnp.float32)
        return (y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)).astype(dtype)

    def layer(q, x):
        """This is one layer, and how loud it is."""
        y = jax.nn.relu(unit(x) @ q["w"].astype(dtype) + q["b"].astype(dtype))
        return y, jnp.mean(jnp.square(y.astype(jnp.float32)), axis=-1)

    def loss(q, x):
        """This is the loss of one layer for true pictures, then false ones."""
        y, loud = layer(q, x)
        true, false = jnp.split(loud, 2)
        value = jnp.mean(jax.nn.softplus(bar - true)) + jnp.mean(jax.nn.softplus(false - bar))
        return value, (y, true, false)

    def louder(p, x):
        """This is how loud all layers but the first are for each label."""

        def one(label):
            """This tries one label."""
            y = labelled(x, jnp.full((b,), label))
            total = jnp.zeros(b)
            for k, q in enumerate(p):
                y, loud = layer(q, y)
                total = total + (loud if k or depth == 1 else 0.0)
            return total

        return lax.map(one, jnp.arange(classes)).T

    def step(p, state, x, label, noise):
        """This is one step of all layers."""
        x = x.astype(dtype)
        score = louder(p, x)
        likely = jnp.where(jax.nn.one_hot(label, classes, dtype=bool), -jnp.inf, 4 * score)
        even = jnp.clip(jax.scipy.stats.norm.cdf(noise), 1e-5, 1 - 1e-5)
        wrong = jnp.argmax(likely - jnp.log(-jnp.log(even)), axis=-1)
        y = jnp.concatenate([labelled(x, label), labelled(x, wrong)])
        fresh, states, told = [], [], []
        for q, s in zip(p, state, strict=True):
            (value, (y, true, false)), grads = jax.value_and_grad(loss, has_aux=True)(q, lax.stop_gradient(y))
            changes, s_new = optimiser.update(grads, s, q)
            fresh.append(optax.apply_updates(q, changes))
            states.append(s_new)
            parted = jnp.mean((true > bar) & (false < bar))
            told.append(jnp.stack([value, jnp.mean(true), jnp.mean(false), parted]))
        right = jnp.mean(jnp.argmax(score, axis=-1) == label)
        return fresh, states, jnp.stack(told), right, jnp.bincount(wrong, length=classes)

    widths = (seen, *(deep,) * depth)
    p = [dense_of(i, o) for i, o in pairwise(widths)]
    inputs = (normal(b, seen), integers(b, below=classes), normal(b, classes))
    return Built(step, (p, [state_of(optimiser, q) for q in p], *inputs))


@program("a-small-net-that-sets-the-step-of-each-weight-through-many-steps-meta-grad", GROUP)
def _learned(size: Size) -> Built:
    """This gives the gradients of a small network that tells how each weight of other networks moves, through many steps.

    It is the MLPLOpt of google/learned_optimization (Metz, 2020), with optax: averages of three rates, squares, the weight and
    the time are scaled over each array, two numbers come out, and one is the log of a step; its gradients are clipped.
    """
    import optax

    tasks, batch, seen, deep, classes, steps = pick(
        size, (8, 128, 196, 64, 10, 10), (3, 64, 64, 24, 10, 6), (2, 4, 5, 4, 3, 2)
    )
    rates = np.array([0.5, 0.9, 0.99], np.float32)
    spans = np.array([1, 3, 10, 30, 100, 300, 1000], np.float32)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def loss(w, x, label):
        """This is the loss of a network that is trained."""
        y = jax.nn.relu(dense(w["one"], x))
        return optax.softmax_cross_entropy_with_integer_labels(dense(w["two"], y), label).mean()

    def moved(meta, w, g, averages, square, k):
        """This moves one array."""
        clock = jnp.tanh(k / spans - 1.0)
        parts = [g[..., None], averages, w[..., None], (g * lax.rsqrt(square + 1e-8))[..., None]]
        parts += [averages * lax.rsqrt(square + 1e-8)[..., None], lax.rsqrt(square + 1e-8)[..., None]]
        x = jnp.concatenate(parts, axis=-1)
        x = x * lax.rsqrt(1e-5 + jnp.mean(x * x, axis=tuple(range(x.ndim - 1)), keepdims=True))
        x = jnp.concatenate([x, jnp.broadcast_to(clock, (*x.shape[:-1], len(spans)))], axis=-1)
        y = jax.nn.relu(dense(meta["one"], x))
        y = dense(meta["three"], jax.nn.relu(dense(meta["two"], y)))
        return w - 0.01 * y[..., 0] * jnp.exp(0.1 * y[..., 1])

    def one_task(meta, w, x, label, after):
        """This trains one network and tells its mean loss on rows that it does not learn from."""

        def step(carry, now):
            """This is one step."""
            w, averages, square, k = carry
            x, label, x_after, label_after = now
            value, grads = jax.value_and_grad(loss)(w, x, label)
            averages = jax.tree.map(lambda a, g: a * rates + g[..., None] * (1 - rates), averages, grads)
            square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, grads)
            w = jax.tree.map(lambda *z: moved(meta, *z, k), w, grads, averages, square)
            return (w, averages, square, k + 1), (value, loss(w, x_after, label_after))

        averages = jax.tree.map(lambda a: jnp.zeros((*a.shape, len(rates))), w)
        start = (w, averages, jax.tree.map(jnp.zeros_like, w), jnp.float32(0))
        (w, *_), (values, held) = lax.scan(step, start, (x, label, *after))
        return jnp.mean(jnp.minimum(held, 10.0)), (values, optax.global_norm(w))

    def train(meta, state, w, x, label, x_after, label_after):
        """This is a step of the small network, over all tasks."""

        def mean(meta):
            """This is the mean loss of all tasks."""
            each, told = jax.vmap(one_task, (None, 0, 0, 0, 0))(meta, w, x, label, (x_after, label_after))
            return jnp.mean(each), (each, told)

        (value, told), grads = jax.value_and_grad(mean, has_aux=True)(meta)
        changes, state = optimiser.update(grads, state, meta)
        return optax.apply_updates(meta, changes), state, value, told, optax.global_norm(grads)

    features = 4 + 2 * len(rates) + len(spans)
    meta = {"one": dense_of(features, 32), "two": dense_of(32, 32), "three": dense_of(32, 2)}

    def many(i, o):
        """This describes a layer of all tasks."""
        return {"w": normal(tasks, i, o, scale=i**-0.5), "b": normal(tasks, o, scale=0.1)}

    w = {"one": many(seen, deep), "two": many(deep, classes)}
    rows = [(normal(tasks, steps, batch, seen), integers(tasks, steps, batch, below=classes)) for _ in range(2)]
    return Built(train, (meta, state_of(optimiser, meta), w, *rows[0], *rows[1]))


@program("tones-with-overtones-and-shaped-noise-from-pitch-and-loudness-grad-nnx", GROUP)
def _tones(size: Size) -> Built:
    """This gives the gradients of a network that plays an instrument: it tells overtones and noise from pitch and loudness.

    It is DDSP (Engel, 2020; magenta/ddsp), with nnx: overtones above the highest rate are left out, turns are running sums of the
    pitch, noise is shaped frame by frame by short filters, and spectra of a few lengths are compared.
    """
    from flax import nnx

    b, frames, hop, tones, bands, n = pick(
        size, (16, 200, 64, 60, 65, 512), (2, 50, 64, 24, 33, 64), (2, 4, 16, 3, 5, 8)
    )
    dtype, rate = half(size), 16000.0
    long = frames * hop
    lengths = (1024, 256, 64) if long > 1024 else (32, 16)
    make_dense, make_norm, _ = layers_of_nnx(dtype)

    class Stack(nnx.Module):
        """This is three dense layers with norms."""

        def __init__(self, i, rngs):
            """This makes its layers."""
            self.layers = nnx.List([make_dense(m, n, rngs) for m in (i, n, n)])
            self.norms = nnx.List([make_norm(n, rngs) for _ in range(3)])

        def __call__(self, x):
            """This runs the layers."""
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = nnx.leaky_relu(norm(layer(x)))
            return x

    class Player(nnx.Module):
        """This is the whole network."""

        def __init__(self, rngs):
            """This makes all layers."""
            self.pitch, self.loud, self.out = Stack(1, rngs), Stack(1, rngs), Stack(3 * n, rngs)
            self.enter, self.inner = make_dense(2 * n, 3 * n, rngs), make_dense(n, 3 * n, rngs)
            self.head = make_dense(n, 1 + tones + bands, rngs)

        def __call__(self, pitch, loud):
            """This gives numbers of all frames."""
            x, y = self.pitch(pitch), self.loud(loud)
            both = jnp.concatenate([x, y], axis=-1)
            given = self.enter(both).swapaxes(0, 1)

            def step(deep, now):
                """This is one step of a gated memory."""
                a, c, e = jnp.split(now, 3, axis=-1)
                u, v, w = jnp.split(self.inner(deep), 3, axis=-1)
                keep, reset = nnx.sigmoid(a + u), nnx.sigmoid(c + v)
                deep = keep * deep + (1 - keep) * jnp.tanh(e + reset * w)
                return deep, deep

            _, deep = lax.scan(step, jnp.zeros((b, n), dtype), given)
            z = self.out(jnp.concatenate([both, deep.swapaxes(0, 1)], axis=-1))
            return self.head(z).astype(jnp.float32)

    graph, weights = nnx.split(nnx.eval_shape(lambda: Player(nnx.Rngs(0))))

    def above(x):
        """This makes numbers positive in the manner of DDSP."""
        return 2 * nnx.sigmoid(x) ** np.log(10.0).astype(np.float32) + 1e-7

    def longer(x):
        """This goes from frames to samples on straight lines."""
        after = jnp.concatenate([x[:, 1:], x[:, -1:]], axis=1)
        part = (jnp.arange(hop) / hop)[:, None]
        return (x[:, :, None] * (1 - part) + after[:, :, None] * part).reshape(b, long, -1)

    def played(out, pitch, noise):
        """This plays overtones and noise."""
        loud, share, bands_of = jnp.split(above(out), [1, 1 + tones], axis=-1)
        every = pitch[..., None] * jnp.arange(1, tones + 1)
        share = jnp.where(every < rate / 2, share, 0.0)
        share = loud * share / (jnp.sum(share, axis=-1, keepdims=True) + 1e-7)
        turn = jnp.cumsum(longer(pitch[..., None])[..., 0] / rate, axis=1)
        turn = turn - jnp.floor(turn)
        tone = jnp.einsum("btk,btk->bt", longer(share), jnp.sin(2 * np.pi * turn[..., None] * jnp.arange(1, tones + 1)))
        bent = jnp.fft.irfft(0.02 * bands_of, axis=-1)
        bent = jnp.roll(bent, bands - 1, axis=-1) * np.hanning(2 * bands - 2).astype(np.float32)
        wide = hop + 2 * bands - 3
        whole = jnp.fft.irfft(jnp.fft.rfft(noise, wide, axis=-1) * jnp.fft.rfft(bent, wide, axis=-1), wide, axis=-1)
        at = (np.arange(frames)[:, None] * hop + np.arange(wide)).reshape(-1)
        hiss = jnp.zeros((b, long + wide)).at[:, at].add(whole.reshape(b, -1))[:, bands - 1 : bands - 1 + long]
        return tone + hiss

    def spectra(x, m):
        """This gives sizes of short spectra."""
        at = np.arange(0, long - m + 1, m // 4)[:, None] + np.arange(m)
        z = jnp.fft.rfft(x[:, at] * np.hanning(m).astype(np.float32), axis=-1)
        return jnp.sqrt(z.real**2 + z.imag**2 + 1e-7)

    def loss(weights, pitch, loud, noise, truth):
        """This compares what is played with what was heard."""
        pitch = 440.0 * 2.0 ** (jnp.clip(0.05 * jnp.cumsum(pitch, axis=1) - 0.5, -3.0, 2.0))
        scaled = jnp.log2(pitch / 440.0)[..., None].astype(dtype)
        out = nnx.merge(graph, weights)(scaled, loud[..., None].astype(dtype))
        sound = played(out, pitch, noise)
        value, each = 0.0, []
        for m in lengths:
            one, two = spectra(truth, m), spectra(sound, m)
            each.append(jnp.mean(jnp.abs(one - two)) + jnp.mean(jnp.abs(jnp.log(one) - jnp.log(two))))
            value = value + each[-1]
        return value, (sound, jnp.stack(each))

    inputs = (normal(b, frames), normal(b, frames), normal(b, frames, hop, scale=0.5), normal(b, long, scale=0.3))
    return Built(jax.value_and_grad(loss, has_aux=True), (drawn(weights), *inputs))


@program("many-labels-per-picture-easy-noes-forgotten-unknown-ones-skipped-haiku-step", GROUP)
def _labels(size: Size) -> Built:
    """This is a training step of a network that tells many labels of each picture, where most labels are no and some unknown.

    It is the asymmetric loss (Ben-Baruch, 2020; Alibaba-MIIL/ASL) with a small TResNet, with haiku and optax: pictures become
    blocks of four by four pixels, maps are blurred before they shrink, easy noes count nothing, and slow weights follow.
    """
    import haiku as hk
    import optax

    b, side, w, classes = pick(size, (64, 224, 64, 80), (6, 64, 16, 80), (2, 16, 4, 5))
    dtype = half(size)
    widths = (w, 2 * w, 4 * w)
    blur = np.outer([1, 2, 1], [1, 2, 1]).astype(np.float32) / 16

    def smaller(x):
        """This blurs and takes every second place."""
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
        kernel = jnp.broadcast_to(jnp.asarray(blur, x.dtype)[..., None, None], (3, 3, 1, x.shape[-1]))
        how = {"feature_group_count": x.shape[-1], "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        return lax.conv_general_dilated(padded, kernel, (2, 2), "VALID", **how)

    def normed(x, train, slope=1e-3):
        """This norms over the batch in float32 and bends."""
        y = hk.BatchNorm(True, True, 0.9)(x.astype(jnp.float32), train)
        return jax.nn.leaky_relu(y, slope).astype(dtype)

    @hk.without_apply_rng
    @hk.transform_with_state
    def network(x, train):
        """This gives scores of labels."""
        x = x.reshape(b, side // 4, 4, side // 4, 4, 3).transpose(0, 1, 3, 5, 2, 4).reshape(b, side // 4, side // 4, 48)
        x = normed(hk.Conv2D(w, 3, with_bias=False)(x.astype(dtype)), train)
        for k, c in enumerate(widths):
            short = x
            y = normed(hk.Conv2D(c, 3, with_bias=False)(x), train)
            if k:
                y, short = smaller(y), hk.avg_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
                short = hk.Conv2D(c, 1, with_bias=False)(short)
            share = jax.nn.relu(hk.Linear(max(c // 4, 1))(jnp.mean(y.astype(jnp.float32), axis=(1, 2))))
            y = y * jax.nn.sigmoid(hk.Linear(c)(share))[:, None, None].astype(dtype)
            y = normed(hk.Conv2D(c, 3, with_bias=False)(y), train, 1.0)
            x = jax.nn.leaky_relu(y + short, 1e-3)
        return hk.Linear(classes)(jnp.mean(x.astype(jnp.float32), axis=(1, 2)))

    decay = optax.adamw(optax.cosine_onecycle_schedule(2000, 2e-4), weight_decay=1e-4, mask=_matrices)

    def loss(p, stats, x, label):
        """This is the loss of known labels: 1 is yes, 0 is no, and -1 is unknown."""
        p = jax.tree.map(lambda a: a.astype(dtype) if a.ndim == 4 and a.shape[2] > 1 else a, p)
        scores, stats = network.apply(p, stats, x, True)
        yes = jax.nn.sigmoid(scores)
        no = jnp.minimum(1 - yes + 0.05, 1.0)
        known, true = label >= 0, label > 0
        value = jnp.where(true, jnp.log(jnp.maximum(yes, 1e-8)), jnp.log(jnp.maximum(no, 1e-8)))
        sure = lax.stop_gradient(jnp.where(true, yes, no))
        weigh = (1 - sure) ** jnp.where(true, 1.0, 4.0)
        return -jnp.sum(jnp.where(known, value * weigh, 0.0)), (stats, scores)

    def exact(scores, label):
        """This is the mean exactness of each label at its true pictures."""
        order = jnp.argsort(-jnp.where(label >= 0, scores, -jnp.inf), axis=0)
        true = jnp.take_along_axis(label > 0, order, axis=0)
        share = jnp.cumsum(true, axis=0) / jnp.arange(1, b + 1)[:, None]
        return jnp.sum(share * true, axis=0) / jnp.maximum(jnp.sum(true, axis=0), 1)

    def step(p, slow, state, stats, raw, kinds):
        """This is one step."""
        label = jnp.where(kinds < 3, 1, jnp.where(kinds < 90, 0, -1))
        (value, (stats, scores)), grads = jax.value_and_grad(loss, has_aux=True)(
            p, stats, raw.astype(jnp.float32) / 128 - 1, label
        )
        changes, state = decay.update(grads, state, p)
        p = optax.apply_updates(p, changes)
        slow = optax.incremental_update(p, slow, 3e-3)
        counts = jnp.stack([jnp.sum(label == k, axis=0) for k in (-1, 0, 1)])
        return p, slow, state, stats, value, exact(scores, label), counts, optax.global_norm(grads)

    picture = jax.ShapeDtypeStruct((b, side, side, 3), jnp.float32)
    weights, stats = jax.eval_shape(lambda key, x: network.init(key, x, True), jax.random.key(0), picture)

    def of(path: Any, r: Random) -> Random:
        """This describes a weight; those of norms are [1, 1, 1, channels]."""
        if r.shape[:3] == (1, 1, 1):
            return normal(*r.shape, scale=0.1, offset=1.0 if path[-1].key == "scale" else 0.0)
        return r

    p = jax.tree_util.tree_map_with_path(of, drawn(weights), is_leaf=is_random)
    state, stats = state_of(decay, p), _moments(stats)
    return Built(step, (p, p, state, stats, integers(b, side, side, 3, below=256), integers(b, classes, below=100)))


def _matrices(p: Any) -> Any:
    """This tells which weights are drawn to zero."""
    return jax.tree.map(lambda a: a.ndim > 1, p)


def _moments(stats: Any) -> Any:
    """This describes running means and spreads of norms, and how many steps they have seen."""

    def of(s: Any) -> Random:
        if jnp.issubdtype(s.dtype, jnp.integer):
            return Random(tuple(s.shape), jnp.dtype(s.dtype), below=1000)
        return normal(*s.shape, scale=0.1, offset=1.0)

    return jax.tree.map(of, stats)
