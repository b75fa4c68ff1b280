"""Steps of training by contrast, by flows and by rewards, and an optimiser's, of the ninth set: its author had seen no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, gain, half, integers, normal, pick, program

GROUP = "ninth"


def _linear(n, m, dtype=jnp.float32, scale=1.0):
    """A dense layer's weights with a bias."""
    return {"w": normal(n, m, dtype=dtype, scale=scale * n**-0.5), "b": normal(m, dtype=dtype, scale=0.02)}


def _dense(p, x):
    return x @ p["w"] + p["b"]


def _norm(x, scale=1.0, shift=0.0, eps=1e-6):
    y = x.astype(jnp.float32)
    mean, variance = jnp.mean(y, axis=-1, keepdims=True), jnp.var(y, axis=-1, keepdims=True)
    return ((y - mean) * lax.rsqrt(variance + eps) * scale + shift).astype(x.dtype)


@program("wav2vec2-gumbel-codes-contrast-grad", GROUP)
def _wav2vec2(size: Size) -> Built:
    """This gives the gradient of wav2vec 2.0's loss of pretraining, as the model in Flax of Hugging Face's transformers has it.

    Features are quantised by a Gumbel softmax of two groups of codes; a masked frame's context has to recognise its own codes
    among those of other frames of the utterance; a perplexity keeps all codes in use.
    """
    b, t, n, features, d, groups, codes, others = pick(
        size, (4, 499, 768, 512, 256, 2, 320, 100), (2, 99, 192, 128, 64, 2, 160, 30), (2, 7, 10, 6, 4, 2, 5, 3)
    )
    dtype, temperature = half(size), 0.1

    def quantise(p, x, masked, key, softness):
        logits = _dense(p["logits"], x).astype(jnp.float32).reshape(b * t * groups, codes)
        noise = jax.random.gumbel(key, logits.shape)
        soft = jax.nn.softmax((logits + noise) / softness, axis=-1)
        hard = jax.nn.one_hot(jnp.argmax(soft, axis=-1), codes)
        chosen = (hard - lax.stop_gradient(soft) + soft).reshape(b * t, groups, codes, 1)
        vectors = jnp.sum(chosen * p["codes"].reshape(1, groups, codes, -1), axis=-2).reshape(b, t, -1)
        probs = jax.nn.softmax(logits.reshape(b * t, groups, codes), axis=-1)
        probs = jnp.where(masked.reshape(-1, 1, 1), probs, 0.0)
        mean = jnp.sum(probs, axis=0) / jnp.maximum(jnp.sum(masked), 1)
        perplexity = jnp.sum(jnp.exp(-jnp.sum(mean * jnp.log(mean + 1e-7), axis=-1)))
        return vectors.astype(dtype), perplexity

    def cosine(x, y):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        product = jnp.sum(x * y, axis=-1)
        length = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
        return product / jnp.maximum(length, 1e-8)

    def loss(p, context, x, masked, negatives, key, softness):
        x = _norm(x, p["scale"], p["shift"])
        vectors, perplexity = quantise(p, x, masked, key, softness)
        vectors, context = _dense(p["project_codes"], vectors), _dense(p["project_context"], context)
        index = negatives + (jnp.arange(b) * t)[:, None, None]
        wrong = vectors.reshape(b * t, d)[index.reshape(-1)].reshape(b, t, others, d).transpose(2, 0, 1, 3)
        logits = cosine(context[None], jnp.concatenate([vectors[None], wrong], axis=0)) / temperature
        same = jnp.all(vectors == wrong, axis=-1)
        logits = logits.at[1:].set(jnp.where(same, -1e9, logits[1:]))
        each = -jax.nn.log_softmax(logits.reshape(others + 1, -1).T, axis=-1)[:, 0]
        count = jnp.sum(masked)
        contrast = jnp.sum(jnp.where(masked.reshape(-1), each, 0.0))
        diversity = (groups * codes - perplexity) / (groups * codes) * count
        return (contrast + 0.1 * diversity) / jnp.maximum(count, 1), (contrast, perplexity)

    def step(p, context, x, masked, negatives, seed, number):
        softness = jnp.maximum(2.0 * 0.999995**number, 0.5)
        run = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        return run(p, context, x, masked, negatives, jax.random.key(seed), softness)

    params = {
        "scale": gain(features),
        "shift": normal(features, scale=0.1),
        "logits": _linear(features, groups * codes, dtype, scale=2.0),
        "codes": normal(groups * codes, d // groups),
        "project_codes": _linear(d // groups * groups, d, dtype),
        "project_context": _linear(n, d, dtype),
    }
    inputs = normal(b, t, n, dtype=dtype), normal(b, t, features, dtype=dtype), booleans(b, t)
    drawn = integers(b, t, others, below=t), integers(below=1000), integers(below=100_000)
    return Built(step, (params, *inputs, *drawn))


@program("mean-flow-diffusion-transformer-jvp-grad", GROUP)
def _mean_flow(size: Size) -> Built:
    """This gives the gradient of MeanFlow's loss of a small diffusion transformer, as its authors' code in JAX has it.

    The target of the mean velocity between two times holds its derivative along the path, a Jacobian-vector product of the
    network; velocities are guided by the class, and an adaptive weight makes the loss of each image alike.
    """
    b, side, channels, patch, n, h, blocks, classes = pick(
        size, (32, 32, 4, 2, 384, 6, 2, 1000), (4, 16, 4, 2, 96, 3, 2, 10), (3, 6, 2, 3, 8, 2, 2, 5)
    )
    dtype, grid, d = half(size), side // patch, n // h
    omega, kappa, drop, unequal = 1.0, 0.5, 0.1, 0.25

    def embed(p, time):
        frequency = jnp.exp(-np.log(10_000.0) * jnp.arange(64) / 64)
        angle = 1000.0 * time[:, None] * frequency
        wave = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1).astype(dtype)
        return _dense(p["out"], jax.nn.silu(_dense(p["in"], wave)))

    def attend(p, x):
        q, k, v = (y.reshape(b, -1, h, d) for y in jnp.split(_dense(p["qkv"], x), 3, axis=-1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * d**-0.5, k).astype(jnp.float32)
        probs = jax.nn.softmax(scores, axis=-1).astype(dtype)
        return _dense(p["out"], jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(x.shape))

    def modulated(x, shift, scale):
        return _norm(x) * (1.0 + scale[:, None]) + shift[:, None]

    def network(p, z, t, gap, label):
        x = z.astype(dtype).reshape(b, grid, patch, grid, patch, channels)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(b, grid * grid, patch * patch * channels)
        x = _dense(p["in"], x) + p["places"]
        condition = jax.nn.silu(embed(p["time"], t) + embed(p["gap"], gap) + p["labels"][label])
        for block in p["blocks"]:
            parts = jnp.split(_dense(block["modulation"], condition), 6, axis=-1)
            x = x + parts[2][:, None] * attend(block, modulated(x, parts[0], parts[1]))
            y = jax.nn.gelu(_dense(block["up"], modulated(x, parts[3], parts[4])), approximate=True)
            x = x + parts[5][:, None] * _dense(block["down"], y)
        shift, scale = jnp.split(_dense(p["last_modulation"], condition), 2, axis=-1)
        x = _dense(p["last"], modulated(x, shift, scale)).reshape(b, grid, grid, patch, patch, channels)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(z.shape).astype(jnp.float32)

    def loss(p, image, label, key):
        keys = jax.random.split(key, 4)
        times = jax.nn.sigmoid(jax.random.normal(keys[0], (2, b)) - 0.4)
        t, r = jnp.max(times, axis=0), jnp.min(times, axis=0)
        r = jnp.where(jax.random.uniform(keys[1], (b,)) < unequal, r, t)
        noise = jax.random.normal(keys[2], image.shape)
        tb, rb = t[:, None, None, None], r[:, None, None, None]
        z, v = (1.0 - tb) * image + tb * noise, noise - image
        none = jnp.full((b,), classes)
        with_class, without = (network(p, z, t, jnp.zeros(b), y) for y in (label, none))
        guided = omega * v + kappa * with_class + (1.0 - omega - kappa) * without
        dropped = jax.random.uniform(keys[3], (b,)) < drop
        guided = lax.stop_gradient(jnp.where(dropped[:, None, None, None], v, guided))
        label = jnp.where(dropped, none, label)

        def mean_velocity(z, t, r):
            return network(p, z, t, t - r, label)

        u, along = jax.jvp(mean_velocity, (z, t, r), (guided, jnp.ones(b), jnp.zeros(b)))
        target = lax.stop_gradient(guided - jnp.clip(tb - rb, 0.0, 1.0) * along)
        squared = jnp.sum((u - target) ** 2, axis=(1, 2, 3))
        weighted = squared / lax.stop_gradient(squared + 0.01)
        return jnp.mean(weighted), (jnp.mean((u - target) ** 2), jnp.mean((u - v) ** 2))

    def step(p, image, label, seed):
        return jax.value_and_grad(loss, has_aux=True)(p, image, label, jax.random.key(seed))

    def block():
        shapes = {"modulation": (n, 6 * n), "qkv": (n, 3 * n), "out": (n, n), "up": (n, 4 * n), "down": (4 * n, n)}
        return {name: _linear(*shape, dtype, scale=0.5) for name, shape in shapes.items()}

    params = {name: {"in": _linear(128, n, dtype), "out": _linear(n, n, dtype)} for name in ("time", "gap")}
    params |= {
        "in": _linear(patch * patch * channels, n, dtype),
        "places": normal(grid * grid, n, dtype=dtype, scale=0.1),
        "labels": normal(classes + 1, n, dtype=dtype, scale=0.1),
        "blocks": [block() for _ in range(blocks)],
        "last_modulation": _linear(n, 2 * n, dtype, scale=0.5),
        "last": _linear(n, patch * patch * channels, dtype),
    }
    return Built(step, (params, normal(b, side, side, channels), integers(b, below=classes), integers(below=1000)))


@program("mpo-decoupled-duals-critic-grad", GROUP)
def _mpo(size: Size) -> Built:
    """This gives the gradients of an MPO learner as in DeepMind's acme: actor, critic and the duals of its three constraints.

    Actions sampled from the target policy are weighted by a softmax of their values whose temperature is learned; the online
    policy follows them, its mean and deviations each kept near to the target's by a multiplier per dimension.
    """
    b, samples, states, actions, hidden = pick(size, (512, 20, 376, 21, 512), (64, 20, 48, 8, 96), (3, 4, 5, 2, 6))
    epsilon, epsilon_mean, epsilon_deviation, epsilon_bounds, discount = 0.1, 0.0025, 1e-6, 0.001, 0.99

    def trunk(p, x):
        x = jnp.tanh(_norm(_dense(p["first"], x), p["scale"], p["shift"], eps=1e-5))
        return jax.nn.elu(_dense(p["third"], jax.nn.elu(_dense(p["second"], x))))

    def policy(p, state):
        x = trunk(p, state)
        deviation = jax.nn.softplus(_dense(p["deviation"], x)) * (0.3 / np.log(2.0)) + 1e-6
        return _dense(p["mean"], x), deviation

    def critic(p, state, action):
        x = jnp.concatenate([state, jnp.clip(action, -1.0, 1.0)], axis=-1)
        return _dense(p["value"], trunk(p, x))[..., 0]

    def log_prob(action, mean, deviation):
        return jnp.sum(jax.scipy.stats.norm.logpdf(action, mean, deviation), axis=-1)

    def divergence(mean, deviation, other_mean, other_deviation):
        """Of the normals of one from those of the other, each dimension."""
        ratio = (deviation / other_deviation) ** 2
        return 0.5 * (ratio + ((mean - other_mean) / other_deviation) ** 2 - 1.0 - jnp.log(ratio))

    def weigh(values, limit, temperature):
        scaled = lax.stop_gradient(values) / temperature
        weights = lax.stop_gradient(jax.nn.softmax(scaled, axis=0))
        return weights, temperature * (limit + jnp.mean(jax.nn.logsumexp(scaled, axis=0)) - np.log(samples))

    def held(divergences, alpha, limit):
        mean = jnp.mean(divergences, axis=0)
        return jnp.sum(lax.stop_gradient(alpha) * mean), jnp.sum(alpha * (limit - lax.stop_gradient(mean)))

    def actor_loss(p, duals, target, slow_critic, state, noise):
        old_mean, old_deviation = policy(target, state)
        mean, deviation = policy(p, state)
        action = lax.stop_gradient(old_mean + old_deviation * noise)
        values = critic(slow_critic, jnp.broadcast_to(state, (samples, b, states)), action)
        duals = jax.tree.map(lambda x: jax.nn.softplus(jnp.maximum(x, -18.0)) + 1e-8, duals)
        weights, loss_temperature = weigh(values, epsilon, duals["temperature"])
        outside = -jnp.sum((action - jnp.clip(action, -1.0, 1.0)) ** 2, axis=-1)
        bound_weights, loss_bounds = weigh(outside, epsilon_bounds, duals["bounds"])
        weights = weights + bound_weights
        by_mean = -jnp.mean(jnp.sum(weights * log_prob(action, mean, old_deviation), axis=0))
        by_deviation = -jnp.mean(jnp.sum(weights * log_prob(action, old_mean, deviation), axis=0))
        kl_mean = divergence(old_mean, old_deviation, mean, old_deviation)
        kl_deviation = divergence(old_mean, old_deviation, old_mean, deviation)
        near_mean, loss_mean = held(kl_mean, duals["mean"], epsilon_mean / actions)
        near_deviation, loss_deviation = held(kl_deviation, duals["deviation"], epsilon_deviation / actions)
        dual = loss_temperature + loss_bounds + loss_mean + loss_deviation
        entropy = jnp.mean(jnp.sum(jnp.log(deviation), axis=-1))
        metrics = (jnp.mean(kl_mean), jnp.mean(kl_deviation), entropy, jnp.mean(jnp.ptp(values, axis=0)))
        return by_mean + by_deviation + near_mean + near_deviation + dual, metrics

    def critic_loss(p, slow, target, batch, noise):
        mean, deviation = policy(target, batch["next"])
        action = mean + deviation * noise
        following = jnp.mean(critic(slow, jnp.broadcast_to(batch["next"], (samples, b, states)), action), axis=0)
        wanted = batch["reward"] + discount * batch["goes_on"].astype(jnp.float32) * following
        return 0.5 * jnp.mean((lax.stop_gradient(wanted) - critic(p, batch["state"], batch["action"])) ** 2)

    def step(actor, value, slow_actor, slow_value, duals, batch, seed):
        first, second = (jax.random.normal(k, (samples, b, actions)) for k in jax.random.split(jax.random.key(seed)))
        run = jax.value_and_grad(actor_loss, argnums=(0, 1), has_aux=True)
        actor_result = run(actor, duals, slow_actor, slow_value, batch["state"], first)
        return actor_result, jax.value_and_grad(critic_loss)(value, slow_value, slow_actor, batch, second)

    def layers(inputs, heads):
        body = {"first": _linear(inputs, hidden), "scale": gain(hidden), "shift": normal(hidden, scale=0.1)}
        body |= {name: _linear(hidden, hidden) for name in ("second", "third")}
        return body | {name: _linear(hidden, width) for name, width in heads.items()}

    actor = layers(states, {"mean": actions, "deviation": actions})
    value = layers(states + actions, {"value": 1})
    duals = {name: normal(scale=0.1, offset=1.0) for name in ("temperature", "bounds")}
    duals |= {name: normal(actions, scale=0.1, offset=1.0) for name in ("mean", "deviation")}
    batch = {"state": normal(b, states), "next": normal(b, states), "action": normal(b, actions, scale=0.5)}
    batch |= {"reward": normal(b), "goes_on": booleans(b)}
    return Built(step, (actor, value, actor, value, duals, batch, integers(below=1000)))


@program("prodigy-clipped-cosine-average-update", GROUP)
def _prodigy(size: Size) -> Built:
    """This gives an update of a transformer's layers by optax's Prodigy, which finds the rate of learning itself.

    Gradients are clipped to a global norm; the rate follows from products of all gradients with the way from the first weights;
    a cosine schedule and an average of the weights are around it.
    """
    import optax

    n, wide, words, layers = pick(size, (1024, 4096, 16384, 2), (256, 1024, 1024, 2), (6, 10, 7, 2))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 100, 10_000)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.contrib.prodigy(schedule, weight_decay=0.01, safeguard_warmup=True)
    )
    shapes = {"qkv": (n, 3 * n), "out": (n, n), "up": (n, wide), "down": (wide, n), "norm1": (n,), "norm2": (n,)}
    shapes |= {"up_bias": (wide,), "down_bias": (n,)}

    def tree(scale, offset=0.0):
        layer = {name: normal(*shape, scale=scale, offset=offset) for name, shape in shapes.items()}
        return {"words": normal(words, n, scale=scale, offset=offset), "layers": [layer] * layers}

    def step(p, average, gradients, state):
        norm = optax.global_norm(gradients)
        updates, state = optimizer.update(gradients, state, p)
        p = optax.apply_updates(p, updates)
        average = optax.incremental_update(p, average, 1e-3)
        return p, average, state, norm

    clip_state, state = jax.eval_shape(optimizer.init, jax.tree.map(lambda r: r.struct, tree(1.0)))
    state = state._replace(
        **{"exp_avg": tree(1e-6), "exp_avg_sq": tree(1e-13, 1e-12), "grad_sum": tree(1e-3), "params0": tree(0.02)},
        **{"estim_lr": normal(scale=1e-7, offset=1e-5), "numerator_weighted": normal(scale=1e-6, offset=1e-5)},
        count=integers(below=5000),
    )
    return Built(step, (tree(0.02), tree(0.02), tree(0.01), (clip_state, state)))
