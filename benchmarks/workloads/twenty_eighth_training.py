"""Losses with their gradients and whole training steps, the twenty-eighth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, gain, half, integers, normal, pick, program, weight
from benchmarks.workloads.twenty_fifth_parts import attention, conv, rms_norm, rotary
from benchmarks.workloads.twenty_sixth_parts import drawn

GROUP = "twenty-eighth"


@program("words-left-out-of-the-loss-by-hashes-of-words-before-learned-squares-grad", GROUP)
def _left_out(size: Size) -> Built:
    """This gives the gradients of a language model that never learns some words, so that it cannot recite what it has read.

    It is the recipe of Apertus (2025; swiss-ai): the goldfish loss (Hans, 2024) leaves words out by a hash of those before, layers
    use a square and an exponential with learned slopes, queries and keys are normed, and texts are packed.
    """
    b, t, n, h, few, wide, depth, words = pick(
        size, (2, 1021, 1024, 16, 4, 5120, 2, 32003), (1, 137, 128, 4, 2, 512, 2, 4001), (2, 17, 16, 4, 2, 24, 2, 13)
    )
    dtype, d, before, every = half(size), n // h, 13, 4

    def bent(q, x):
        """This is a square above zero and an exponential below, with learned slopes."""
        x = x.astype(jnp.float32)
        up, low = jax.nn.softplus(q[0]), 0.5 + jax.nn.softplus(q[1])
        y = jnp.where(x > 0, up * x * x + 0.5 * x, low * (jnp.expm1(jnp.minimum(x, -1e-6)) - x) + 0.5 * x)
        return y.astype(dtype)

    def hashed(text):
        """This tells by a hash of the words before whether a word is left out."""
        padded = jnp.pad(text, ((0, 0), (before, 0))).astype(jnp.uint32)

        def mix(k, total):
            """This mixes one more of the words before into the hash."""
            past = lax.dynamic_slice_in_dim(padded, before - k, t, axis=1)
            return (total * jnp.uint32(0x9E3779B1) + past + jnp.uint32(1)) ^ (total >> 15)

        total = lax.fori_loop(0, before, mix, jnp.zeros(text.shape, jnp.uint32))
        total = (total ^ (total >> 13)) * jnp.uint32(0x85EBCA6B)
        return (total ^ (total >> 16)) % jnp.uint32(every) == 0

    def layer(x, q, mask, places):
        """This is one layer of attention and a wide layer without gates."""
        y = rms_norm(q["norm1"], x)
        query, key, value = jnp.split((y @ q["qkv"]).reshape(b, t, -1, d), [h, h + few], axis=2)
        query, key = (rotary(rms_norm(q[k], z), places) for k, z in (("norm_q", query), ("norm_k", key)))
        key, value = (jnp.repeat(z, h // few, axis=2) for z in (key, value))
        x = x + attention(query, key, value, mask).reshape(b, t, n) @ q["o"]
        y = bent(q["slopes"], rms_norm(q["norm2"], x) @ q["up"])
        return x + y @ q["down"], jnp.mean((y > 0).astype(jnp.float32))

    def loss(p, text, ended):
        """This is the loss of words that are kept, and what is told beside it."""
        begun = jnp.pad(~ended, ((0, 0), (1, 0)))[:, :t]
        part = jnp.cumsum(begun, axis=1)
        places = jnp.arange(t) - lax.cummax(jnp.where(begun, jnp.arange(t), 0), axis=1)
        mask = (part[:, :, None] == part[:, None]) & np.tril(np.ones((t, t), bool))

        def one(x, q):
            """This is one layer for all texts."""
            return layer(x, q, mask[:, None], places)

        x, live = lax.scan(one, p["table"][text], p["layers"])
        logits = jnp.dot(rms_norm(p["norm"], x), p["head"], preferred_element_type=jnp.float32)
        target = jnp.roll(text, -1, axis=1)
        real = ended & (jnp.arange(t) < t - 1)
        kept = real & ~jnp.roll(hashed(text), -1, axis=1)
        total = jax.nn.logsumexp(logits, axis=-1)
        own = total - jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        value = jnp.sum(own * kept) / jnp.maximum(jnp.sum(kept), 1)
        out = jnp.sum(own * (real & ~kept)) / jnp.maximum(jnp.sum(real & ~kept), 1)
        right = jnp.sum((jnp.argmax(logits, axis=-1) == target) & kept)
        return value, (out, jnp.sum(kept), right, live, jnp.max(part, axis=1), jnp.sum(total * kept))

    def stacked(described):
        """This describes one array for all layers."""
        return normal(depth, *described.shape, dtype=described.dtype, scale=described.scale, offset=described.offset)

    q = {"norm1": gain(n, dtype), "norm2": gain(n, dtype), "norm_q": gain(d, dtype), "norm_k": gain(d, dtype)}
    q |= {"qkv": weight(n, n + 2 * few * d, dtype=dtype), "o": weight(n, n, dtype=dtype), "slopes": normal(2)}
    q |= {"up": weight(n, wide, dtype=dtype), "down": weight(wide, n, dtype=dtype)}
    p = {"table": normal(words, n, dtype=dtype), "head": weight(n, words, dtype=dtype), "norm": gain(n, dtype)}
    p["layers"] = {k: stacked(r) for k, r in q.items()}
    return Built(jax.value_and_grad(loss, has_aux=True), (p, integers(b, t, below=words), booleans(b, t)))


@program("labels-guessed-where-sure-with-bars-per-class-from-counts-grad-nnx", GROUP)
def _bars(size: Size) -> Built:
    """This gives the gradients of a classifier of pictures, few of which have labels: it learns from its own sure guesses.

    It is FlexMatch (Zhang, 2021; TorchSSL), with nnx: guesses on weakly changed pictures are labels of strongly changed ones if
    they pass a bar, which is lower for classes of which few pictures were learned so far.
    """
    from flax import nnx

    few, many, side, w, classes, known = pick(
        size, (64, 448, 32, 32, 100, 50000), (5, 35, 32, 16, 10, 5000), (2, 4, 8, 4, 3, 20)
    )
    dtype = half(size)

    class Network(nnx.Module):
        """This is a network of two convolutions, each normed over the batch."""

        def __init__(self, rngs):
            """This makes all layers."""

            def plain_conv(i, o, stride):
                """This makes a convolution without a bias."""
                how = {"strides": stride, "use_bias": False, "dtype": dtype, "param_dtype": dtype}
                return nnx.Conv(i, o, (3, 3), rngs=rngs, **how)

            sides = ((3, w, 1), (w, 4 * w, 2))
            self.convs = nnx.List([plain_conv(i, o, s) for i, o, s in sides])
            self.norms = nnx.List([nnx.BatchNorm(o, momentum=0.999, dtype=jnp.float32, rngs=rngs) for _, o, _ in sides])
            self.head = nnx.Linear(4 * w, classes, rngs=rngs)

        def __call__(self, x):
            """This gives scores of classes."""
            for c, norm in zip(self.convs, self.norms, strict=True):
                x = nnx.leaky_relu(norm(c(x.astype(dtype))), 0.1)
            return self.head(jnp.mean(x, axis=(1, 2)))

    graph, weights, stats = nnx.split(nnx.eval_shape(lambda: Network(nnx.Rngs(0))), nnx.Param, nnx.BatchStat)

    def loss(weights, stats, labelled, label, plain, changed, number, learned, sharp):
        """This is the loss of true and of guessed labels, and what is kept for the next step."""
        count = jnp.bincount(learned, length=classes + 1)
        most = jnp.maximum(jnp.max(count), 1)
        share = count[:classes] / most
        bars = 0.95 * share / (2 - share)
        x = jnp.concatenate([labelled, plain, changed])
        model = nnx.merge(graph, weights, stats, copy=True)
        logits = sharp * model(x).astype(jnp.float32)
        true, soft, hard = jnp.split(logits, [few, few + many])
        logp = jax.nn.log_softmax(true, axis=-1)
        own = -jnp.mean(jnp.take_along_axis(logp, label[:, None], axis=-1))
        chance = jax.nn.softmax(lax.stop_gradient(soft), axis=-1)
        sure, guess = jnp.max(chance, axis=-1), jnp.argmax(chance, axis=-1)
        passed = sure >= bars[guess]
        logp = jax.nn.log_softmax(hard, axis=-1)
        other = -jnp.take_along_axis(logp, guess[:, None], axis=-1)[:, 0]
        other = jnp.mean(jnp.where(passed, other, 0.0))
        at = jnp.where(sure >= 0.95, number, known)
        learned = learned.at[at].set(guess, mode="drop")
        alike = jnp.sum(jnp.argmax(hard, axis=-1) == guess)
        often = jnp.zeros(classes, jnp.int32).at[guess].add(passed.astype(jnp.int32))
        return own + other, (nnx.state(model, nnx.BatchStat), learned, bars, often, alike, own)

    inputs = (
        normal(few, side, side, 3),
        integers(few, below=classes),
        normal(many, side, side, 3),
        normal(many, side, side, 3),
    )
    inputs += (integers(many, below=known), integers(known, below=classes + 1), normal(scale=0.1, offset=9.0))
    return Built(jax.value_and_grad(loss, has_aux=True), (drawn(weights), drawn(stats), *inputs))


@program("colours-told-pixel-by-pixel-by-masked-filters-and-logistic-mixtures-grad-linen", GROUP)
def _colours(size: Size) -> Built:
    """This gives the gradients of a model that tells each pixel's colours from the pixels above and left of it.

    It is PixelCNN (van den Oord, 2016) with the curves of PixelCNN++ (Salimans, 2017; also an example of flax), with linen: filters
    are masked, and a mixture of ten logistic curves gives chances of 256 steps, where green hears red and blue hears both.
    """
    from flax import linen as nn

    b, side, w, units, mix = pick(size, (128, 32, 160, 1, 10), (2, 24, 24, 1, 10), (2, 6, 4, 1, 2))
    dtype = half(size)

    def before(wide, itself):
        """This is the mask of a filter that sees what comes before a pixel, and perhaps itself."""
        seen = np.zeros(wide * wide, np.float32)
        seen[: wide * wide // 2 + itself] = 1
        return seen.reshape(wide, wide, 1, 1)

    class Network(nn.Module):
        """This is the whole network."""

        def masked(self, name, x, wide, o, itself):
            """This convolves with a masked filter."""
            kernel = self.param(name, nn.initializers.normal(), (wide, wide, x.shape[-1], o), jnp.float32)
            return conv(x, (kernel * before(wide, itself)).astype(dtype))

        @nn.compact
        def __call__(self, x):
            """This gives the numbers of the mixtures."""
            x = self.masked("enter", x.astype(dtype), 7, w, 0)
            for k in range(units):
                y = nn.relu(nn.Dense(w // 2, dtype=dtype)(nn.relu(x)))
                y = nn.relu(self.masked(f"unit{k}", y, 3, w // 2, 1))
                x = x + nn.Dense(w, dtype=dtype)(y)
            return nn.Dense(10 * mix)(nn.relu(x).astype(jnp.float32))

    model = Network()

    def loss(p, raw):
        """This is the surprise in bits per colour, and which curves are used."""
        x = raw.astype(jnp.float32) / 127.5 - 1
        out = model.apply(p, x)
        share, out = out[..., :mix], out[..., mix:].reshape(b, side, side, 3, 3, mix)
        mean, log_scale, hear = out[..., 0, :], jnp.maximum(out[..., 1, :], -7.0), jnp.tanh(out[..., 2, :])
        red, green = x[..., 0:1, None], x[..., 1:2, None]
        blue = mean[..., 2:, :] + hear[..., 1:2, :] * red + hear[..., 2:, :] * green
        mean = jnp.concatenate([mean[..., :1, :], mean[..., 1:2, :] + hear[..., :1, :] * red, blue], axis=-2)
        off, sharp = x[..., None] - mean, jnp.exp(-log_scale)
        high, low, middle = sharp * (off + 1 / 255), sharp * (off - 1 / 255), sharp * off
        inside = nn.sigmoid(high) - nn.sigmoid(low)
        thin = middle - log_scale - 2 * nn.softplus(middle) - np.log(127.5)
        logp = jnp.where(inside > 1e-5, jnp.log(jnp.maximum(inside, 1e-12)), thin)
        logp = jnp.where((raw == 255)[..., None], -nn.softplus(low), logp)
        logp = jnp.where((raw == 0)[..., None], high - nn.softplus(high), logp)
        each = jnp.sum(logp, axis=-2) + nn.log_softmax(share, axis=-1)
        whole = nn.logsumexp(each, axis=-1)
        used = jnp.bincount(jnp.argmax(each, axis=-1).reshape(-1), length=mix)
        return -jnp.mean(whole) / (3 * np.log(2)), (used, jnp.sum(whole, axis=(1, 2)), jnp.mean(log_scale, (0, 1, 2)))

    structs = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((b, side, side, 3), jnp.float32))
    return Built(jax.value_and_grad(loss, has_aux=True), (drawn(structs), integers(b, side, side, 3, below=256)))


@program("phones-send-only-their-largest-changes-and-keep-the-rest-server-step-equinox", GROUP)
def _phones(size: Size) -> Built:
    """This is a round of learning from many phones: each one learns alone and sends its largest changes in few bits.

    It is FedAvgM (Hsu, 2019) with the largest changes only and a memory of what was not sent (Stich, 2018), as in
    google/fedjax, with equinox and optax; phones count by how many pictures they have, and
    signs and steps are told in seven levels.
    """
    import equinox as eqx
    import optax

    phones, steps, batch, seen, deep, classes, part = pick(
        size, (24, 4, 20, 784, 200, 62, 100), (10, 4, 20, 392, 100, 62, 50), (2, 2, 3, 9, 5, 4, 4)
    )
    levels = 7

    shapes = eqx.filter_eval_shape(lambda key: eqx.nn.MLP(seen, classes, deep, 1, key=key), jax.random.key(0))
    arrays, still = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    leaves, tree = jax.tree.flatten(arrays)
    sizes = [int(np.prod(s.shape)) for s in leaves]
    total = sum(sizes)
    top = total // part

    def flat(p):
        """This lays all weights into one row."""
        return jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(p)])

    def unflat(row):
        """This takes weights out of one row."""
        parts = jnp.split(row, np.cumsum(sizes)[:-1])
        return jax.tree.unflatten(tree, [x.reshape(s.shape) for x, s in zip(parts, leaves, strict=True)])

    def loss(p, x, label, real):
        """This is the mean loss of real pictures and how many are told right."""
        logits = jax.vmap(eqx.combine(p, still))(x)
        own = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        right = jnp.sum((jnp.argmax(logits, axis=-1) == label) & real)
        return jnp.sum(own * real) / jnp.maximum(jnp.sum(real), 1), right

    def alone(p, x, label, count, kept):
        """This learns on one phone and packs its change."""
        places = jnp.arange(steps * batch).reshape(steps, batch)

        def step(q, now):
            """This is one step of plain descent with clipped gradients."""
            x, label, at = now
            (value, right), grads = jax.value_and_grad(loss, has_aux=True)(q, x, label, at < count)
            scale = jnp.minimum(1.0, 1.0 / (optax.global_norm(grads) + 1e-9))
            return jax.tree.map(lambda a, g: a - 0.05 * scale * g, q, grads), (value, right)

        label = label % (1 + classes // 3) + count % (classes // 2)
        q, (value, right) = lax.scan(step, p, (x, label, places))
        change = flat(jax.tree.map(lambda a, o: a - o, q, p)) + kept
        _, at = lax.top_k(jnp.abs(change), top)
        some = change[at]
        most = jnp.max(jnp.abs(some)) + 1e-12
        code = jnp.round(some / most * levels).astype(jnp.int8)
        sent = jnp.zeros(total).at[at].set(code.astype(jnp.float32) * most / levels)
        return sent, change - sent, jnp.zeros(total, jnp.int32).at[at].add(1), value, right, jnp.sum(code == 0)

    def run(p, state, kept, x, label, count):
        """This lets all phones learn and moves the server's weights."""
        count = 1 + count
        sent, kept, votes, value, right, nought = jax.vmap(alone, (None, 0, 0, 0, 0))(p, x, label, count, kept)
        share = count / jnp.sum(count)
        mean = share @ sent
        changes, state = optimiser.update(unflat(-mean), state, p)
        fresh = optax.apply_updates(p, changes)
        told = jnp.bincount(jnp.minimum(jnp.sum(votes, axis=0), phones), length=phones + 1)
        return fresh, state, kept, value, jnp.sum(right) / jnp.sum(count), told, nought, share @ value[:, -1]

    optimiser = optax.sgd(1.0, momentum=0.9, nesterov=True)
    state = jax.tree.map(
        lambda s: integers(*s.shape, below=1000) if s.dtype == jnp.int32 else normal(*s.shape, scale=1e-4, offset=1e-3),
        jax.eval_shape(optimiser.init, arrays),
    )
    inputs = (normal(phones, total, scale=1e-4), normal(phones, steps, batch, seen))
    inputs += (integers(phones, steps, batch, below=1000), integers(phones, below=steps * batch))
    return Built(run, (drawn(arrays), state, *inputs))
