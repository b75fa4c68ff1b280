"""Training steps and gradients of the tenth set, of language, robots and molecules: its author had seen no plan."""

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.layers import layer_norm
from benchmarks.workloads.ninth_models import dense, linear
from benchmarks.workloads.registry import Built, Random, Size, gain, half, integers, normal, pick, program, weight

GROUP = "tenth"


def optimiser_state(optimiser, params):
    """This function describes a state of an optimiser of optax after some steps: small means, positive squares, a count."""
    structs = jax.tree.map(lambda r: r.struct, params, is_leaf=lambda leaf: isinstance(leaf, Random))

    def of(path, s):
        if jnp.issubdtype(s.dtype, jnp.integer):
            return integers(*s.shape, below=1000)
        squares = ".nu" in jax.tree_util.keystr(path)
        return normal(*s.shape, dtype=s.dtype, scale=0.0 if squares else 1e-3, offset=1e-4 if squares else 0.0)

    return jax.tree_util.tree_map_with_path(of, jax.eval_shape(optimiser.init, structs))


def network(*widths):
    """This function describes the layers of a network of dense layers in float32."""
    return [linear(n, m, jnp.float32) for n, m in itertools.pairwise(widths)]


def run_network(p, x):
    """This function runs a network of dense layers with rectifiers between them."""
    for one in p[:-1]:
        x = jax.nn.relu(dense(one, x))
    return dense(p[-1], x)


@program("stick-breaking-attention-grad", GROUP)
def _stick_breaking(size: Size) -> Built:
    """This gives the gradient of a layer with stick-breaking attention, in which each key breaks a part off what later keys left.

    The weight of a key is its own sigmoid times the product of one minus the sigmoids of all keys between it and the query, as a
    cumulative sum of logarithms from the right; what remains of the stick goes to the query's own value.
    """
    b, t, n, h, d = pick(size, (2, 1000, 1024, 16, 64), (2, 300, 192, 4, 48), (2, 7, 8, 2, 4))
    dtype = half(size)

    def attend(p, x):
        q, k, v = (jnp.swapaxes((x @ p[name]).reshape(b, t, h, d), 1, 2) for name in ("q", "k", "v"))
        logits = jnp.einsum("bhid,bhjd->bhij", q, k).astype(jnp.float32) * d**-0.5
        earlier = jnp.tril(jnp.ones((t, t), bool), -1)
        left = jnp.where(earlier, -jax.nn.softplus(logits), 0.0)
        after = lax.cumsum(left, axis=3, reverse=True) - left
        weights = jnp.where(earlier, jnp.exp(jax.nn.log_sigmoid(logits) + after), 0.0)
        rest = jnp.exp(jnp.sum(left, axis=-1, keepdims=True))
        out = jnp.einsum("bhij,bhjd->bhid", weights.astype(dtype), v) + rest.astype(dtype) * v
        y = out.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6) * p["head_gain"][:, None, :]
        return jnp.swapaxes(y.astype(dtype), 1, 2).reshape(b, t, h * d) @ p["out"], jnp.mean(rest)

    def loss(p, x, target, length):
        y, rest = attend(p, layer_norm(x, p["scale"], p["shift"]))
        there = (jnp.arange(t)[None, :] <= length[:, None]).astype(jnp.float32)
        errors = jnp.mean(jnp.square((x + y - target).astype(jnp.float32)), axis=-1)
        return jnp.sum(errors * there) / jnp.sum(there), rest

    def step(p, x, target, length):
        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(p, x, target, length)

    params = {name: weight(n, h * d, dtype=dtype) for name in ("q", "k", "v")}
    params |= {"out": weight(h * d, n, dtype=dtype), "head_gain": normal(h, d, scale=0.1, offset=1.0)}
    params |= {"scale": gain(n, dtype), "shift": normal(n, dtype=dtype, scale=0.02)}
    x = normal(b, t, n, dtype=dtype)
    return Built(step, (params, x, x, integers(b, below=t)))


@program("bert-gathered-masked-words-lamb-step", GROUP)
def _bert_lamb(size: Size) -> Built:
    """This gives a step of BERT's pretraining with LAMB of optax: masked words, gathered for the tied head, and next sentences.

    Two post-norm layers see packed segments; hidden units at the masked places are gathered, transformed and compared with the
    table of words; gradients are clipped by their global norm and each layer's update is scaled by a trust ratio.
    """
    import optax

    b, t, n, h, words, masked = pick(size, (24, 128, 768, 12, 30522, 20), (8, 48, 128, 4, 2003, 8), (2, 9, 8, 2, 13, 3))
    dtype, d = half(size), n // h
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, 100, 2000)
    decay = optax.lamb(schedule, weight_decay=0.01, mask=lambda p: jax.tree.map(lambda leaf: leaf.ndim > 1, p))
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), decay)

    def norm(p, x):
        return layer_norm(x, p["scale"], p["shift"])

    def attend(p, x, segments):
        q, k, v = jnp.split(dense(p["qkv"], x).reshape(b, t, 3 * h, d), 3, axis=2)
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) / jnp.sqrt(jnp.asarray(d, dtype))
        same = (segments[:, :, None] == segments[:, None, :])[:, None]
        scores = scores.astype(jnp.float32) + jnp.where(same, 0.0, -1e9)
        probs = jax.nn.softmax(scores, axis=-1).astype(dtype)
        return dense(p["out"], jnp.einsum("bhij,bjhd->bihd", probs, v).reshape(b, t, n))

    def loss(p, tokens, kinds, segments, places, labels, weights, following):
        p = jax.tree.map(lambda leaf: leaf.astype(dtype), p)
        x = norm(p["norm"], p["words"][tokens] + p["places"] + p["kinds"][kinds])
        for one in p["layers"]:
            x = norm(one["norm1"], x + attend(one, x, segments))
            y = dense(one["down"], jax.nn.gelu(dense(one["up"], x), approximate=False))
            x = norm(one["norm2"], x + y)
        chosen = jnp.take_along_axis(x, places[..., None], axis=1)
        chosen = norm(p["head_norm"], jax.nn.gelu(dense(p["head"], chosen), approximate=False))
        logits = (chosen @ p["words"].T + p["bias"]).astype(jnp.float32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        weights = weights.astype(jnp.float32)
        language = jnp.sum(each * weights) / (jnp.sum(weights) + 1e-5)
        pooled = jnp.tanh(dense(p["pool"], x[:, 0]))
        sentence = dense(p["next"], pooled).astype(jnp.float32)
        sentence = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(sentence, following))
        return language + sentence, (language, sentence)

    def step(p, state, *batch):
        (value, parts), grads = jax.value_and_grad(loss, has_aux=True)(p, *batch)
        updates, state = optimiser.update(grads, state, p)
        return optax.apply_updates(p, updates), state, value, parts, optax.tree.norm(grads)

    def norms():
        return {"scale": gain(n), "shift": normal(n, scale=0.02)}

    def lin(i, o):
        return linear(i, o, jnp.float32)

    layer = {"qkv": lin(n, 3 * n), "out": lin(n, n), "up": lin(n, 4 * n), "down": lin(4 * n, n)}
    layer |= {"norm1": norms(), "norm2": norms()}
    params = {
        "words": normal(words, n, scale=n**-0.5),
        "places": normal(t, n, scale=0.02),
        "kinds": normal(2, n, scale=0.02),
        "norm": norms(),
        "layers": [layer] * 2,
        "head": lin(n, n),
        "head_norm": norms(),
        "bias": normal(words, scale=0.02),
        "pool": lin(n, n),
        "next": lin(n, 2),
    }
    batch = (integers(b, t, below=words), integers(b, t, below=2), integers(b, t, below=3))
    batch += (integers(b, masked, below=t), integers(b, masked, below=words), integers(b, masked, below=2))
    return Built(step, (params, optimiser_state(optimiser, params), *batch, integers(b, below=2)))


@program("implicit-q-learning-many-seeds-step", GROUP)
def _implicit_q(size: Size) -> Built:
    """This gives a step of implicit Q-learning for some seeds at once, with AdamW and a cosine schedule of optax.

    The value regresses to an expectile of the smaller of two target critics, the critics to rewards and next values, and the
    policy to actions of the data with weights that grow exponentially with the advantage and are clipped.
    """
    import optax

    seeds, b, seen, acts, wide, depth = pick(
        size, (8, 1024, 39, 28, 256, 2), (3, 600, 39, 28, 128, 2), (2, 5, 4, 3, 6, 2)
    )
    expectile, inverse, discount, rate = 0.7, 3.0, 0.99, 0.005
    optimiser = optax.chain(optax.clip_by_global_norm(10.0), optax.adamw(optax.cosine_decay_schedule(3e-4, 5000)))

    def critics(p, state, action):
        both = jnp.concatenate([state, action], axis=-1)
        return jax.vmap(run_network, in_axes=(0, None))(p, both)[..., 0]

    def losses(p, targets, state, action, reward, alive, after):
        target = lax.stop_gradient(jnp.min(critics(targets, state, action), axis=0))
        value = run_network(p["value"], state)[..., 0]
        advantage = target - value
        skewed = jnp.where(advantage > 0, expectile, 1.0 - expectile)
        value_loss = jnp.mean(skewed * advantage**2)
        goal = reward + discount * alive * lax.stop_gradient(run_network(p["value"], after)[..., 0])
        critic_loss = jnp.mean(jnp.sum((critics(p["critics"], state, action) - goal) ** 2, axis=0))
        weights = jnp.minimum(jnp.exp(inverse * lax.stop_gradient(advantage)), 100.0)
        mean, deviation = jnp.tanh(run_network(p["policy"], state)), jnp.clip(p["log_deviation"], -5.0, 2.0)
        likely = -0.5 * ((action - mean) * jnp.exp(-deviation)) ** 2 - deviation - 0.919
        policy_loss = -jnp.mean(weights * jnp.mean(likely, axis=-1))
        return value_loss + critic_loss + policy_loss, {"advantage": jnp.mean(advantage), "weights": jnp.mean(weights)}

    def step(p, targets, optimiser_values, state, action, reward, alive, after):
        action = jnp.tanh(action)
        run = jax.value_and_grad(losses, has_aux=True)
        (value, metrics), grads = run(p, targets, state, action, reward, alive.astype(jnp.float32), after)
        updates, optimiser_values = optimiser.update(grads, optimiser_values, p)
        p = optax.apply_updates(p, updates)
        return p, optax.incremental_update(p["critics"], targets, rate), optimiser_values, value, metrics

    def stacked(*lead, tree):
        def of(r):
            return Random((*lead, *r.shape), r.dtype, r.scale, r.offset, r.below)

        return jax.tree.map(of, tree, is_leaf=lambda leaf: isinstance(leaf, Random))

    twins = stacked(2, tree=network(seen + acts, *[wide] * depth, 1))
    params = {
        "critics": twins,
        "value": network(seen, *[wide] * depth, 1),
        "policy": network(seen, *[wide] * depth, acts),
    }
    params["log_deviation"] = normal(acts, scale=0.1)
    states = (params, twins, optimiser_state(optimiser, params))
    batch = (normal(b, seen), normal(b, acts, scale=0.5), normal(b), integers(b, below=2), normal(b, seen))
    return Built(jax.vmap(step), stacked(seeds, tree=(*states, *batch)))


@program("principal-neighbourhoods-molecules-grad", GROUP)
def _neighbourhoods(size: Size) -> Built:
    """This gives the gradient of a network of principal neighbourhood aggregation over a batch of molecules of unequal size.

    Messages from edges are aggregated by mean, largest, smallest and deviation, each scaled by three functions of the degree; a
    molecule's energy is read from sums and means over its atoms and compared by a Huber loss with a label.
    """
    nodes, edges, graphs, n, kinds = pick(
        size, (12000, 26000, 520, 90, 28), (2000, 4400, 90, 45, 28), (11, 19, 3, 6, 5)
    )

    def aggregate(messages, receivers, degree):
        def total(x):
            return jax.ops.segment_sum(x, receivers, nodes, indices_are_sorted=True)

        some, count = degree[:, None] > 0, jnp.maximum(degree, 1.0)[:, None]
        mean = total(messages) / count
        spread = total(jnp.square(messages - mean[receivers])) / count
        largest = jax.ops.segment_max(messages, receivers, nodes, indices_are_sorted=True)
        smallest = jax.ops.segment_min(messages, receivers, nodes, indices_are_sorted=True)
        largest, smallest = jnp.where(some, largest, 0.0), jnp.where(some, smallest, 0.0)
        every = jnp.concatenate([mean, largest, smallest, jnp.sqrt(spread + 1e-3)], axis=-1)
        grown = jnp.log(degree + 1.0)[:, None] / jnp.mean(jnp.log(degree + 1.0))
        return jnp.concatenate([every, every * grown, every / jnp.maximum(grown, 0.2)], axis=-1)

    def layer(p, x, links, senders, receivers, degree):
        messages = run_network(p["message"], jnp.concatenate([x[receivers], x[senders], links], axis=-1))
        gathered = jnp.concatenate([x, aggregate(messages, receivers, degree)], axis=-1)
        y = run_network(p["update"], gathered)
        mean, variance = jnp.mean(y, axis=0), jnp.var(y, axis=0)
        y = (y - mean) * lax.rsqrt(variance + 1e-5) * p["scale"] + p["shift"]
        return x + jax.nn.relu(y)

    def loss(p, atoms, bonds, senders, receivers, molecules, labels):
        degree = jax.ops.segment_sum(jnp.ones(edges), receivers, nodes, indices_are_sorted=True)
        x, links = p["atoms"][atoms], p["bonds"][bonds]
        for one in p["layers"]:
            x = layer(one, x, links, senders, receivers, degree)
        sums = jax.ops.segment_sum(x, molecules, graphs, indices_are_sorted=True)
        sizes = jax.ops.segment_sum(jnp.ones(nodes), molecules, graphs, indices_are_sorted=True)
        read = jnp.concatenate([sums / 20.0, sums / jnp.maximum(sizes, 1.0)[:, None]], axis=-1)
        wrong = jnp.abs(run_network(p["read"], read)[:, 0] - labels)
        return jnp.mean(jnp.where(wrong < 1.0, 0.5 * wrong**2, wrong - 0.5)), wrong

    def step(p, *batch):
        return jax.value_and_grad(loss, has_aux=True)(p, *batch)

    one = {
        "message": network(3 * n, n),
        "update": network(13 * n, n, n),
        "scale": gain(n),
        "shift": normal(n, scale=0.1),
    }
    params = {"atoms": normal(kinds, n), "bonds": normal(4, n), "layers": [one] * 2, "read": network(2 * n, n, 1)}
    batch = (integers(nodes, below=kinds), integers(edges, below=4), integers(edges, below=nodes))
    batch += (integers(edges, below=nodes, ramp=True), integers(nodes, below=graphs, ramp=True), normal(graphs))
    return Built(step, (params, *batch))
