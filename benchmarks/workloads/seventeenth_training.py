"""Losses with their gradients and whole training steps, the seventeenth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import module_weights
from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program, weight
from benchmarks.workloads.sixteenth_language import rotate
from benchmarks.workloads.sixteenth_models import equinox_parts
from benchmarks.workloads.sixteenth_training import moments

GROUP = "seventeenth"


@program("speed-run-words-with-value-shortcuts-and-capped-scores-grad", GROUP)
def _speed_run(size: Size) -> Built:
    """This gives gradients of a language model tuned for fast training.

    The queries and keys are normed, the values are mixed with those of the first layer and with learned values of each word, the
    later half of the layers adds back the outputs of the first half, and the scores of words are softly capped.
    """
    b, t, n, h, words = pick(size, (4, 768, 768, 6, 12000), (2, 100, 192, 3, 1000), (2, 7, 12, 2, 13))
    d, dtype, layers = n // h, half(size), 4

    def normed(x):
        y = x.astype(jnp.float32)
        return (y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)

    def block(p, x, x0, first_v, extra, mask):
        x = p["mix"][0] * x + p["mix"][1] * x0
        y = normed(x)
        q, k, v = (z.reshape(b, t, h, d) for z in jnp.split(y @ p["qkv"], 3, axis=-1))
        q, k = (rotate(normed(z), jnp.arange(t)) for z in (q, k))
        first_v = v if first_v is None else first_v
        v = p["shares"][0] * v + p["shares"][1] * first_v + p["shares"][2] * extra.reshape(b, t, h, d)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * 0.12
        probs = jax.nn.softmax(jnp.where(mask, scores, -1e30)).astype(dtype)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(b, t, n) @ p["out"]
        return x + jnp.square(jax.nn.relu(normed(x) @ p["up"])) @ p["down"], first_v

    def loss(params, text, window):
        x = x0 = normed(params["table"][text])
        documents = jnp.cumsum(text == 0, axis=1)
        near = jnp.arange(t)[:, None] - jnp.arange(t)[None]
        mask = (near >= 0) & (near < t // 2 + window) & (documents[:, :, None] == documents[:, None, :])
        extras, first_v, skips = params["values"][text], None, []
        for i, p in enumerate(params["layers"]):
            if i >= layers // 2:
                x = x + params["skip"][i - layers // 2] * skips.pop()
            extra = extras[:, :, 0] if i in (0, layers - 1) else extras[:, :, 1]
            x, first_v = block(p, x, x0, first_v, extra, mask[:, None])
            if i < layers // 2:
                skips.append(x)
        logits = (normed(x) @ params["head"]).astype(jnp.float32)
        logits = 30.0 * jax.nn.sigmoid(logits / 7.5)
        picked = jnp.take_along_axis(logits[:, :-1], text[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits[:, :-1], axis=-1) - picked)

    def layer():
        p = {
            "qkv": weight(n, 3 * n, dtype=dtype),
            "out": weight(n, n, dtype=dtype),
            "up": weight(n, 4 * n, dtype=dtype),
        }
        p |= {"down": weight(4 * n, n, dtype=dtype), "shares": normal(3, dtype=dtype, scale=0.1, offset=0.4)}
        return p | {"mix": normal(2, dtype=dtype, scale=0.1, offset=0.5)}

    params = {"table": normal(words, n, dtype=dtype), "values": normal(words, 2, n, dtype=dtype)}
    params |= {"layers": [layer() for _ in range(layers)], "head": weight(n, words, dtype=dtype)}
    params["skip"] = normal(layers // 2, dtype=dtype, scale=0.1, offset=0.7)
    return Built(jax.value_and_grad(loss), (params, integers(b, t, below=words), integers(below=max(t // 4, 1))))


@program("sentences-nested-widths-angles-and-contrast-grad-linen", GROUP)
def _nested(size: Size) -> Built:
    """This gives gradients of an encoder of sentences that must work at several widths of its vectors at once.

    The vectors are means over words; pairs in a batch are told apart at each width, and graded pairs are ordered by the angle
    between their vectors, read as complex numbers.
    """
    import flax.linen as nn

    b, t, n, h, words, widths = pick(
        size,
        (96, 64, 384, 12, 20000, (384, 256, 128, 64)),
        (16, 33, 128, 4, 2000, (128, 96, 64, 32)),
        (3, 5, 8, 2, 15, (8, 6, 4, 2)),
    )
    dtype = half(size)

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, text):
            alive = text > 0
            places = self.param("places", nn.initializers.normal(0.02), (t, n)).astype(dtype)
            x = nn.LayerNorm(dtype=dtype)(nn.Embed(words, n, dtype=dtype)(text) + places)
            mask = nn.make_attention_mask(alive, alive)
            for _ in range(3):
                x = nn.LayerNorm(dtype=dtype)(x + nn.MultiHeadDotProductAttention(h, dtype=dtype)(x, mask=mask))
                y = nn.Dense(n, dtype=dtype)(nn.gelu(nn.Dense(4 * n, dtype=dtype)(x), approximate=False))
                x = nn.LayerNorm(dtype=dtype)(x + y)
            w = alive[..., None].astype(jnp.float32)
            return jnp.sum(x * w, axis=1) / jnp.maximum(jnp.sum(w, axis=1), 1e-9)

    module = Encoder()

    def unit(x):
        return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)

    def contrast(u, v):
        scores = unit(u) @ unit(v).T * 20.0
        rows, columns = jax.nn.log_softmax(scores, axis=1), jax.nn.log_softmax(scores, axis=0)
        return -0.5 * (jnp.mean(jnp.diagonal(rows)) + jnp.mean(jnp.diagonal(columns)))

    def angle(u, v, grades):
        (a, bb), (c, d) = jnp.split(u, 2, axis=-1), jnp.split(v, 2, axis=-1)
        z = jnp.sum(c**2 + d**2, axis=-1, keepdims=True) + 1e-6
        real, imaginary = (a * c + bb * d) / z, (bb * c - a * d) / z
        ratio = jnp.sqrt(jnp.sum(a**2 + bb**2, axis=-1, keepdims=True) / z + 1e-9)
        turned = jnp.abs(jnp.sum(jnp.concatenate([real, imaginary], axis=-1) / ratio, axis=-1)) * 20.0
        gap = turned[:, None] - turned[None, :]
        gap = jnp.where(grades[:, None] < grades[None, :], gap, -1e12)
        return jax.nn.logsumexp(jnp.concatenate([jnp.zeros(1), gap.reshape(-1)]))

    def loss(params, first, second, grades):
        u = module.apply(params, first)
        v = module.apply(params, second)
        parts = []
        for share, width in zip((1.0, 0.7, 0.5, 0.3), widths, strict=True):
            parts.append(
                share * (contrast(u[:, :width], v[:, :width]) + 0.1 * angle(u[:, :width], v[:, :width], grades))
            )
        return sum(parts), jnp.stack(parts)

    text = integers(b, t, below=words)
    weights = module_weights(jax.eval_shape(module.init, jax.random.key(0), text.struct), dtype)
    return Built(jax.value_and_grad(loss, has_aux=True), (weights, text, text, integers(b, below=6)))


@program("flows-over-built-objects-balance-of-paths-grad-haiku", GROUP)
def _flows(size: Size) -> Built:
    """This gives gradients for a network that builds objects with a likelihood that follows their reward.

    Paths through a grid are drawn step by step with forbidden moves masked; then the flow along a whole path is balanced, and the
    same for every part of it, weighted by its length.
    """
    import haiku as hk

    paths, axes, side, n, steps = pick(size, (2048, 4, 20, 256, 32), (128, 4, 12, 128, 16), (4, 2, 4, 8, 4))

    def net(places):
        x = jax.nn.one_hot(places, side).reshape(*places.shape[:-1], axes * side)
        for _ in range(3):
            x = jax.nn.leaky_relu(hk.Linear(n)(x))
        forward, back, flow = hk.Linear(axes + 1)(x), hk.Linear(axes)(x), hk.Linear(1)(x)
        return forward, back, flow[..., 0]

    model = hk.without_apply_rng(hk.transform(net))

    def allowed(places):
        ends = jnp.ones((*places.shape[:-1], 1), bool)
        return jnp.concatenate([places < side - 1, ends], axis=-1)

    def reward(places):
        x = jnp.abs(places / (side - 1) - 0.5)
        return jnp.log(1e-3 + 0.5 * jnp.all(x > 0.25, axis=-1) + 2.0 * jnp.all((x > 0.3) & (x < 0.4), axis=-1))

    def drawn(params, noise):
        def step(carry, g):
            places, going = carry
            forward, _, _ = model.apply(params, places)
            move = jnp.argmax(jnp.where(allowed(places), forward, -1e9) + g, axis=-1)
            move = jnp.where(going, move, axes)
            after = places + jax.nn.one_hot(move, axes + 1, dtype=jnp.int32)[:, :axes]
            return (after, going & (move < axes)), (places, move, going)

        start = (jnp.zeros((paths, axes), jnp.int32), jnp.ones(paths, bool))
        (last, going), seen = lax.scan(step, start, noise)
        return last, going, seen

    def loss(params, log_total, noise):
        last, unended, (places, moves, going) = jax.tree.map(lax.stop_gradient, drawn(params, noise))
        whole = jnp.concatenate([places, last[None]])
        forward, back, flow = model.apply(params, whole)
        log_forward = jax.nn.log_softmax(jnp.where(allowed(whole), forward, -1e9), axis=-1)
        log_back = jax.nn.log_softmax(jnp.where(whole > 0, back, -1e9), axis=-1)
        taken = jnp.take_along_axis(log_forward[:-1], moves[..., None], axis=-1)[..., 0]
        undone = jnp.take_along_axis(log_back[1:], jnp.minimum(moves, axes - 1)[..., None], axis=-1)[..., 0]
        taken, undone = taken * going, jnp.where(going & (moves < axes), undone, 0.0)
        wealth = reward(last.astype(jnp.float32))
        balance = jnp.mean((log_total + jnp.sum(taken, axis=0) - wealth - jnp.sum(undone, axis=0)) ** 2)
        ended = jnp.concatenate([going, unended[None]])
        state = jnp.where(ended, flow, wealth[None]).at[0].set(log_total)
        sums = jnp.concatenate([jnp.zeros((1, paths)), jnp.cumsum(taken - undone, axis=0)])
        level = state - sums
        gap = level[:, None] - level[None, :]
        apart = jnp.arange(steps + 1)[None, :] - jnp.arange(steps + 1)[:, None]
        share = jnp.where((apart > 0)[..., None] & ended[:, None], 0.9 ** jnp.abs(apart)[..., None], 0.0)
        parts = jnp.sum(share * gap**2, axis=(0, 1)) / jnp.sum(share, axis=(0, 1))
        return balance + jnp.mean(parts), (jnp.mean(wealth), jnp.mean(jnp.sum(going, axis=0)), last)

    structs = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((paths, axes), jnp.int32))
    arguments = (module_weights(structs, jnp.float32), normal(), normal(steps, paths, axes + 1, scale=1.3))
    return Built(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), arguments)


@program("few-step-images-from-a-slow-copy-step-equinox", GROUP)
def _consistency(size: Size) -> Built:
    """This gives one training step of a network that maps every noise level of an image to the same clean image.

    Two neighbouring levels share the noise; the lower one is read by the same weights without a gradient. The step clips,
    rectifies Adam, and keeps a slow copy of the weights.
    """
    import equinox as eqx
    import optax

    b, side, n, levels = pick(size, (64, 32, 96, 80), (4, 20, 32, 20), (2, 8, 8, 6))
    dtype = half(size)
    low, high, data, curve = 0.002, 80.0, 0.5, 7.0

    class Unit(eqx.Module):
        norms: list
        convs: list
        time: eqx.nn.Linear

        def __init__(self, key):
            k = jax.random.split(key, 3)
            self.norms = [eqx.nn.GroupNorm(8, n) for _ in range(2)]
            self.convs = [eqx.nn.Conv2d(n, n, 3, padding=1, key=key) for key in k[:2]]
            self.time = eqx.nn.Linear(n, 2 * n, key=k[2])

        def __call__(self, x, t):
            scale, shift = jnp.split(self.time(t), 2)
            y = self.convs[0](jax.nn.silu(self.norms[0](x).astype(dtype)))
            y = self.norms[1](y).astype(dtype) * (1 + scale[:, None, None]) + shift[:, None, None]
            return x + self.convs[1](jax.nn.silu(y))

    class Net(eqx.Module):
        first: eqx.nn.Conv2d
        downs: list
        ups: list
        smaller: eqx.nn.Conv2d
        last: eqx.nn.Conv2d
        time: eqx.nn.MLP

        def __init__(self, key):
            k = jax.random.split(key, 8)
            self.first, self.last = (
                eqx.nn.Conv2d(3, n, 3, padding=1, key=k[0]),
                eqx.nn.Conv2d(n, 3, 3, padding=1, key=k[1]),
            )
            self.smaller = eqx.nn.Conv2d(n, n, 2, 2, key=k[2])
            self.downs, self.ups = [Unit(key) for key in k[3:5]], [Unit(key) for key in k[5:7]]
            self.time = eqx.nn.MLP(n, n, n, 1, activation=jax.nn.silu, key=k[7])

        def __call__(self, x, sigma):
            rates = jnp.exp(-np.log(1e4) * jnp.arange(n // 2) / (n // 2))
            t = 250.0 * jnp.log(sigma + 1e-44) * rates
            t = jax.nn.silu(self.time(jnp.concatenate([jnp.sin(t), jnp.cos(t)]).astype(dtype)))
            y = self.first((x * lax.rsqrt(sigma**2 + data**2)).astype(dtype))
            skip = self.downs[0](y, t)
            y = self.downs[1](self.smaller(skip), t)
            y = self.ups[0](y, t)
            y = self.ups[1](jnp.repeat(jnp.repeat(y, 2, axis=1), 2, axis=2) + skip, t)
            y = self.last(jax.nn.silu(y)).astype(jnp.float32)
            keep = data**2 / ((sigma - low) ** 2 + data**2)
            return keep * x + data * (sigma - low) * lax.rsqrt(sigma**2 + data**2) * y

    weights, whole = equinox_parts(Net, dtype)
    rates = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 100, 5000)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_radam(), optax.scale_by_learning_rate(rates))

    def step(weights, slow, state, images, noise, level):
        ramp = (
            high ** (1 / curve) + jnp.arange(levels) / (levels - 1) * (low ** (1 / curve) - high ** (1 / curve))
        ) ** curve
        sigmas = jnp.flip(ramp)
        lower, upper = sigmas[level], sigmas[level + 1]
        pixels = images.astype(jnp.float32) / 127.5 - 1

        def loss(weights):
            model = jax.vmap(whole(weights))
            ahead = model(pixels + upper[:, None, None, None] * noise, upper)
            behind = lax.stop_gradient(model(pixels + lower[:, None, None, None] * noise, lower))
            c = 0.00054 * np.sqrt(3 * side * side)
            apart = jnp.sqrt(jnp.sum((ahead - behind) ** 2, axis=(1, 2, 3)) + c**2) - c
            return jnp.mean(apart / (upper - lower))

        value, grads = jax.value_and_grad(loss)(weights)
        updates, state = optimiser.update(grads, state, weights)
        weights = optax.apply_updates(weights, updates)
        slow = optax.incremental_update(weights, slow, 5e-4)
        return weights, slow, state, value, optax.global_norm(grads)

    count = integers(below=100)
    first, second = moments(weights, False), moments(weights, True)
    state = (optax.EmptyState(), optax.ScaleByAdamState(count, first, second), optax.ScaleByScheduleState(count))
    images, noise = integers(b, 3, side, side, below=256), normal(b, 3, side, side)
    return Built(step, (weights, weights, state, images, noise, integers(b, below=levels - 1)))


@program("flat-minima-second-gradient-batch-norms-step-linen", GROUP)
def _flat(size: Size) -> Built:
    """This gives one step of a residual network by its gradient at the worst near weights.

    The first gradient, scaled by the size of each weight, leads to the worst weights; the second is the step's. The running means
    of the norms come from the first pass only, and one-dimensional weights do not decay.
    """
    import flax.linen as nn
    import optax

    b, side, widths, classes = pick(
        size, (128, 32, (64, 128, 256), 100), (12, 24, (16, 32, 64), 100), (3, 8, (4, 6, 8), 5)
    )
    dtype = half(size)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, images, train):
            def norm(x):
                return nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=dtype)(x)

            x = (images.astype(jnp.float32) / 255.0 - 0.48) / 0.25
            x = nn.Conv(widths[0], (3, 3), use_bias=False, dtype=dtype)(x.astype(dtype))
            for i, width in enumerate(widths):
                stride = 1 if i == 0 else 2
                y = nn.relu(norm(x))
                short = x if i == 0 else nn.Conv(width, (1, 1), (stride, stride), use_bias=False, dtype=dtype)(y)
                y = nn.Conv(width, (3, 3), (stride, stride), use_bias=False, dtype=dtype)(y)
                x = short + nn.Conv(width, (3, 3), use_bias=False, dtype=dtype)(nn.relu(norm(y)))
            return nn.Dense(classes)(jnp.mean(nn.relu(norm(x)).astype(jnp.float32), axis=(1, 2)))

    module = Net()

    def mask_of(params):
        return jax.tree.map(lambda w: w.ndim > 1, params)

    optimiser = optax.chain(
        optax.add_decayed_weights(5e-4, mask=mask_of), optax.trace(0.9, nesterov=True), optax.scale(-0.05)
    )

    def step(params, running, trace, images, labels):
        def loss(params, images):
            logits, kept = module.apply(
                {"params": params, "batch_stats": running}, images, True, mutable=["batch_stats"]
            )
            target = optax.smooth_labels(jax.nn.one_hot(labels, classes), 0.1)
            return jnp.mean(optax.softmax_cross_entropy(logits, target)), (kept["batch_stats"], logits)

        (value, (kept, logits)), grads = jax.value_and_grad(loss, has_aux=True)(params, images)
        sizes = jax.tree.map(lambda w: jnp.abs(w) + 0.01, params)
        scaled = jax.tree.map(lambda s, g: (s * g).astype(jnp.float32), sizes, grads)
        radius = 2.0 / (optax.global_norm(scaled) + 1e-12)
        worst = jax.tree.map(lambda w, s, g: w + (radius * s * g).astype(w.dtype), params, sizes, scaled)
        (sharp, _), grads = jax.value_and_grad(loss, has_aux=True)(worst, images)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        state = (optax.MaskedState(optax.EmptyState()), optax.TraceState(trace), optax.EmptyState())
        updates, state = optimiser.update(grads, state, params)
        right = jnp.mean(jnp.argmax(logits, axis=-1) == labels)
        return optax.apply_updates(params, updates), kept, state[1].trace, value, sharp - value, right

    images = integers(b, side, side, 3, below=256)
    structs = jax.eval_shape(lambda x: module.init(jax.random.key(0), x, False), images.struct)
    described = module_weights(structs["params"], jnp.float32)
    running = jax.tree.map(lambda s: normal(*s.shape, scale=0.02, offset=1.0), structs["batch_stats"])
    trace = moments(described, False)
    return Built(step, (described, running, trace, images, integers(b, below=classes)))


@program("replayed-recurrent-values-burn-in-priorities-grad-nnx", GROUP)
def _replay(size: Size) -> Built:
    """This gives gradients of a recurrent critic of actions from replayed stretches, and how urgent each stretch is.

    The first part only warms the recurrent state; targets are returns of several steps, rescaled, with the action of one network
    and the value of a slow one.
    """
    from flax import nnx

    b, t, burn, seen, n, actions, ahead = pick(
        size, (128, 60, 20, 128, 512, 18, 5), (12, 40, 10, 48, 128, 18, 5), (3, 12, 3, 5, 8, 4, 5)
    )

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(seen + actions + 1, n, rngs=rngs)
            self.cell = nnx.OptimizedLSTMCell(n, n, rngs=rngs)
            self.value, self.gain = nnx.Linear(n, 1, rngs=rngs), nnx.Linear(n, actions, rngs=rngs)

        def __call__(self, state, xs):
            xs = nnx.relu(self.inner(xs))

            def step(carry, x):
                x, fresh = x
                carry = jax.tree.map(lambda s: jnp.where(fresh[:, None], 0.0, s), carry)
                return self.cell(carry, x)

            return step, xs

        def heads(self, out):
            gain = self.gain(out)
            return self.value(out) + gain - jnp.mean(gain, axis=-1, keepdims=True)

    graph, described = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))

    def squeeze(x):
        return jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1.0) - 1.0) + 1e-3 * x

    def stretch(x):
        root = (jnp.sqrt(1 + 4e-3 * (jnp.abs(x) + 1 + 1e-3)) - 1) / 2e-3
        return jnp.sign(x) * (jnp.square(root) - 1)

    def values(weights, state, xs, fresh):
        net = nnx.merge(graph, weights)
        step, xs = net(state, xs)
        state, _ = lax.scan(step, state, (xs[:burn], fresh[:burn]))
        state = jax.tree.map(lax.stop_gradient, state)
        _, out = lax.scan(step, state, (xs[burn:], fresh[burn:]))
        return net.heads(out)

    def loss(weights, slow, state, frames, moves, rewards, alive, chances):
        before = jnp.pad(moves, ((1, 0), (0, 0)))[:-1]
        paid = jnp.pad(rewards, ((1, 0), (0, 0)))[:-1]
        xs = jnp.concatenate([frames, jax.nn.one_hot(before, actions), paid[..., None]], axis=-1)
        fresh = jnp.pad(~alive, ((1, 0), (0, 0)))[:-1]
        q = values(weights, state, xs, fresh)
        best = jnp.argmax(q, axis=-1)
        later = stretch(jnp.take_along_axis(values(slow, state, xs, fresh), best[..., None], axis=-1)[..., 0])
        rewards, discounts, moves = rewards[burn:], 0.997 * alive[burn:], moves[burn:]
        goal = jnp.concatenate([later[ahead:], jnp.repeat(later[-1:], ahead, axis=0)])
        for i in reversed(range(ahead)):
            r = jnp.pad(rewards, ((0, i), (0, 0)))[i:]
            d = jnp.pad(discounts, ((0, i), (0, 0)), constant_values=1.0)[i:]
            goal = r + d * goal
        picked = jnp.take_along_axis(q, moves[..., None], axis=-1)[..., 0]
        error = lax.stop_gradient(squeeze(goal))[:-1] - picked[:-1]
        size_ = jnp.abs(error)
        urgent = 0.9 * jnp.max(size_, axis=0) + 0.1 * jnp.mean(size_, axis=0)
        share = (1.0 / (jnp.exp(chances) * b)) ** 0.6
        share = share / jnp.max(share)
        return 0.5 * jnp.mean(share * jnp.sum(error**2, axis=0)), (urgent, jnp.mean(q))

    weights = module_weights(described, jnp.float32)
    state = (normal(b, n, scale=0.3), normal(b, n, scale=0.3))
    moves, alive = integers(t, b, below=actions), integers(t, b, below=9)

    def grad(weights, slow, state, frames, moves, rewards, alive, chances):
        arguments = (weights, slow, state, frames, moves, rewards, alive > 0, chances)
        return jax.value_and_grad(loss, has_aux=True)(*arguments)

    frames = normal(t, b, seen)
    return Built(grad, (weights, weights, state, frames, moves, normal(t, b), alive, normal(b)))
