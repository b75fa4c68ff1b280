"""Losses with their gradients and whole training steps, the fifteenth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import module_weights
from benchmarks.workloads.registry import Built, Random, Size, gain, half, integers, normal, pick, program, weight

GROUP = "fifteenth"


@program("relations-basis-graph-link-prediction-grad-nnx", GROUP)
def _relations(size: Size) -> Built:
    """This gives the loss and gradient of a graph network that predicts which facts of a knowledge graph are true.

    Every relation's matrix is a mix of a few bases; messages are divided by the number of facts of the same relation
    at a node.
    """
    from flax import nnx

    nodes, relations, bases, facts, asked, n = pick(
        size, (14541, 237, 4, 120_000, 8192, 128), (1200, 31, 3, 6000, 900, 64), (9, 3, 2, 20, 6, 4)
    )

    class Layer(nnx.Module):
        def __init__(self, rngs):
            init = nnx.initializers.normal(0.1)
            self.bases = nnx.Param(init(rngs.params(), (bases, n, n)))
            self.mix = nnx.Param(init(rngs.params(), (2 * relations, bases)))
            self.own = nnx.Linear(n, n, rngs=rngs)

        def __call__(self, x, sources, kinds, targets):
            places = targets * 2 * relations + kinds
            counts = jax.ops.segment_sum(jnp.ones(places.shape), places, nodes * 2 * relations)
            turned = jnp.einsum("vi,kio->vko", x, self.bases[...])
            messages = jnp.einsum("eko,ek->eo", turned[sources], self.mix[...][kinds]) / counts[places][:, None]
            return self.own(x) + jax.ops.segment_sum(messages, targets, nodes)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(nodes, n, rngs=rngs)
            self.first, self.second = Layer(rngs), Layer(rngs)
            self.relation = nnx.Embed(relations, n, rngs=rngs)

        def __call__(self, sources, kinds, targets):
            ends = (jnp.concatenate([sources, targets]), jnp.concatenate([kinds, kinds + relations]))
            ends = (*ends, jnp.concatenate([targets, sources]))
            x = nnx.relu(self.first(self.embed.embedding[...], *ends))
            return self.second(x, *ends)

    graph, state = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))

    def loss(state, sources, kinds, targets, wrong):
        net = nnx.merge(graph, state)
        x = net(sources, kinds, targets)
        heads, middles = x[sources[:asked]], net.relation(kinds[:asked])
        right = jnp.sum(heads * middles * x[targets[:asked]], axis=-1)
        false = jnp.einsum("en,ekn->ek", heads * middles, x[wrong])
        losses = jax.nn.softplus(-right) + jnp.mean(jax.nn.softplus(false), axis=-1)
        decay = jnp.mean(jnp.square(x)) + jnp.mean(jnp.square(middles))
        return jnp.mean(losses) + 0.01 * decay

    ends = (integers(facts, below=nodes), integers(facts, below=relations), integers(facts, below=nodes))
    weights = jax.tree.map(lambda s: normal(*s.shape, scale=n**-0.5 if n in s.shape[:-1] else 0.8), state)
    return Built(jax.value_and_grad(loss), (weights, *ends, integers(asked, 10, below=nodes)))


@program("byol-slow-target-layerwise-rates-step-linen", GROUP)
def _byol(size: Size) -> Built:
    """This gives the weights after a step of learning without labels from two views of each image.

    The step of every matrix is scaled by the ratio of its length to its gradient's, as LARS does, and the slow copy
    moves towards the new weights.
    """
    import flax.linen as nn

    b, side, n, wide, narrow = pick(size, (64, 64, 64, 2048, 256), (6, 32, 16, 256, 64), (4, 8, 4, 8, 4))
    dtype = half(size)

    class Projector(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(wide, dtype=dtype)(x)
            y = nn.BatchNorm(use_running_average=False, axis_name=None, dtype=dtype)(y)
            return nn.Dense(narrow, dtype=dtype)(nn.relu(y))

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, images):
            x = images.astype(dtype)
            for width in (n, 2 * n, 4 * n):
                y = nn.relu(nn.GroupNorm(4, dtype=dtype)(nn.Conv(width, (3, 3), (2, 2), dtype=dtype)(x)))
                x = y + nn.relu(nn.GroupNorm(4, dtype=dtype)(nn.Conv(width, (3, 3), dtype=dtype)(y)))
            return Projector(name="projector")(jnp.mean(x, axis=(1, 2)))

    encoder, predictor = Encoder(), Projector()

    def unit(x):
        x = x.astype(jnp.float32)
        return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-12)

    def view(images, key, flip):
        left, top = key[:, 0], key[:, 1]

        def one(image, x, y, f):
            image = jnp.where(f, image[:, ::-1], image)
            image = jnp.pad(image, ((2, 2), (2, 2), (0, 0)), mode="reflect")
            return lax.dynamic_slice(image, (y, x, 0), (side, side, 3))

        return jax.vmap(one)(images, left, top, flip)

    def step(params, slow, momentum, stats, images, shifts, flips):
        first, second = view(images, shifts[0], flips[0]), view(images, shifts[1], flips[1])

        def features(p, x):
            return encoder.apply({"params": p, "batch_stats": stats["encoder"]}, x, mutable=["batch_stats"])[0]

        def loss(params):
            total = 0.0
            for one, other in ((first, second), (second, first)):
                variables = {"params": params["predictor"], "batch_stats": stats["predictor"]}
                guess, _ = predictor.apply(variables, features(params["encoder"], one), mutable=["batch_stats"])
                wanted = lax.stop_gradient(features(slow, other))
                total = total + jnp.mean(2.0 - 2.0 * jnp.sum(unit(guess) * unit(wanted), axis=-1))
            return total

        value, grads = jax.value_and_grad(loss)(params)

        def direction(p, g):
            if p.ndim < 2:
                return g
            g = g + 1e-4 * p
            lengths = jnp.linalg.norm(p), jnp.linalg.norm(g)
            return g * jnp.where((lengths[0] > 0) & (lengths[1] > 0), 0.02 * lengths[0] / (lengths[1] + 1e-9), 1.0)

        momentum = jax.tree.map(lambda m, p, g: 0.9 * m + direction(p, g), momentum, params, grads)
        params = jax.tree.map(lambda p, m: p - 0.3 * m, params, momentum)
        slow = jax.tree.map(lambda s, p: 0.996 * s + 0.004 * p, slow, params["encoder"])
        return params, slow, momentum, value

    images = jax.ShapeDtypeStruct((b, side, side, 3), jnp.float32)
    shapes = jax.eval_shape(encoder.init, jax.random.key(0), images)
    others = jax.eval_shape(predictor.init, jax.random.key(0), jax.ShapeDtypeStruct((b, narrow), jnp.float32))
    params = {
        name: module_weights(s["params"], jnp.float32) for name, s in (("encoder", shapes), ("predictor", others))
    }
    stats = {
        name: module_weights(s["batch_stats"], jnp.float32) for name, s in (("encoder", shapes), ("predictor", others))
    }
    momentum = jax.tree.map(
        lambda r: normal(*r.shape, scale=1e-3), params, is_leaf=lambda leaf: isinstance(leaf, Random)
    )
    crops = (integers(2, b, 2, below=5), Random((2, b), jnp.dtype(bool)))
    return Built(step, (params, params["encoder"], momentum, stats, normal(b, side, side, 3), *crops))


@program("mixed-pairs-smoothed-convnet-nesterov-step-linen", GROUP)
def _mixup(size: Size) -> Built:
    """This gives a small convnet's weights and running statistics after one step on mixed pairs of images."""
    import flax.linen as nn

    b, side, n, classes = pick(size, (128, 32, 64, 100), (8, 24, 16, 100), (4, 8, 4, 5))
    dtype = half(size)

    class Unit(nn.Module):
        width: int
        stride: int

        @nn.compact
        def __call__(self, x):
            def norm(y):
                return nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=dtype)(y)

            y = nn.relu(norm(x))
            if x.shape[-1] != self.width:
                x = nn.Conv(self.width, (1, 1), (self.stride, self.stride), use_bias=False, dtype=dtype)(y)
            y = nn.Conv(self.width, (3, 3), (self.stride, self.stride), use_bias=False, dtype=dtype)(y)
            return x + nn.Conv(self.width, (3, 3), use_bias=False, dtype=dtype)(nn.relu(norm(y)))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, images):
            x = nn.Conv(n // 2, (3, 3), use_bias=False, dtype=dtype)(images.astype(dtype))
            for width, stride in ((n, 1), (n, 1), (2 * n, 2), (2 * n, 1), (4 * n, 2)):
                x = Unit(width, stride)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=dtype)(x))
            return nn.Dense(classes)(jnp.mean(x, axis=(1, 2)).astype(jnp.float32))

    module = Net()

    def step(params, velocity, stats, images, labels, order, shares, count):
        share = jax.nn.sigmoid(shares)
        images = (images.astype(jnp.float32) / 255.0 - 0.47) / 0.25
        mixed = share[:, None, None, None] * images + (1 - share[:, None, None, None]) * images[order]
        targets = 0.9 * jax.nn.one_hot(labels, classes) + 0.1 / classes
        targets = share[:, None] * targets + (1 - share[:, None]) * targets[order]

        def loss(params):
            logits, new = module.apply({"params": params, "batch_stats": stats}, mixed, mutable=["batch_stats"])
            entropy = -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1))
            decay = 0.5 * sum(jnp.sum(p * p) for p in jax.tree.leaves(params) if p.ndim > 1)
            return entropy + 5e-4 * decay, (new["batch_stats"], logits)

        (value, (stats, logits)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        rate = 0.1 * 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(count / 200, 1.0)))
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
        params = jax.tree.map(lambda p, v, g: p - rate * (g + 0.9 * v), params, velocity, grads)
        right = jnp.mean(jnp.argmax(logits, axis=-1) == labels)
        return params, velocity, stats, value, right

    shapes = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct((b, side, side, 3), jnp.float32))
    velocity = jax.tree.map(lambda s: normal(*s.shape, scale=1e-3), shapes["params"])
    stats = jax.tree_util.tree_map_with_path(
        lambda path, s: normal(*s.shape, scale=0.02, offset=1.0 if path[-1].key == "var" else 0.0),
        shapes["batch_stats"],
    )
    images = Random((b, side, side, 3), jnp.dtype(jnp.uint8), below=256)
    data = (images, integers(b, below=classes), integers(b, below=b, distinct=True), normal(b, scale=2.0))
    params = module_weights(shapes["params"], jnp.float32)
    return Built(step, (params, velocity, stats, *data, integers(below=200)))


@program("small-student-of-attention-maps-and-layers-grad-equinox", GROUP)
def _tiny(size: Size) -> Built:
    """This gives the loss and gradient of a narrow encoder that copies a wide one's attention and features."""
    import equinox as eqx

    b, t, n, big, h, words, classes = pick(
        size, (24, 128, 312, 768, 12, 30522, 3), (2, 50, 96, 192, 6, 5003, 3), (2, 6, 8, 12, 2, 13, 3)
    )
    dtype = half(size)

    class Layer(eqx.Module):
        qkv: eqx.nn.Linear
        out: eqx.nn.Linear
        up: eqx.nn.Linear
        down: eqx.nn.Linear
        norm1: eqx.nn.LayerNorm
        norm2: eqx.nn.LayerNorm

        def __init__(self, n, key):
            keys = jax.random.split(key, 4)
            self.qkv, self.out = eqx.nn.Linear(n, 3 * n, key=keys[0]), eqx.nn.Linear(n, n, key=keys[1])
            self.up, self.down = eqx.nn.Linear(n, 4 * n, key=keys[2]), eqx.nn.Linear(4 * n, n, key=keys[3])
            self.norm1, self.norm2 = eqx.nn.LayerNorm(n, eps=1e-12), eqx.nn.LayerNorm(n, eps=1e-12)

        def __call__(self, x, added):
            qkv = jax.vmap(self.qkv)(x).reshape(t, 3, h, -1)
            q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
            scores = jnp.einsum("qhd,khd->hqk", q, k).astype(jnp.float32) / np.sqrt(q.shape[-1])
            probs = jax.nn.softmax(scores + added, axis=-1).astype(x.dtype)
            y = jnp.einsum("hqk,khd->qhd", probs, v).reshape(t, -1)
            x = jax.vmap(self.norm1)(x + jax.vmap(self.out)(y))
            y = jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x), approximate=False))
            return jax.vmap(self.norm2)(x + y), scores

    class Encoder(eqx.Module):
        embed: eqx.nn.Embedding
        places: jax.Array
        layers: list
        head: eqx.nn.Linear

        def __init__(self, n, depth, key):
            keys = jax.random.split(key, depth + 3)
            self.embed = eqx.nn.Embedding(words, n, key=keys[0])
            self.places = jax.random.normal(keys[1], (t, n))
            self.layers = [Layer(n, k) for k in keys[3:]]
            self.head = eqx.nn.Linear(n, classes, key=keys[2])

        def __call__(self, tokens, length):
            added = jnp.where(jnp.arange(t) <= length, 0.0, -1e9)
            x = jax.vmap(self.embed)(tokens) + self.places
            every, maps = [x], []
            for layer in self.layers:
                x, scores = layer(x, added)
                every.append(x)
                maps.append(scores)
            return every, maps, self.head(x[0]).astype(jnp.float32)

    def split(n, depth):
        made = eqx.filter_eval_shape(Encoder, n, depth, jax.random.key(0))
        return eqx.partition(made, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    (student, student_static), (teacher, teacher_static) = split(n, 2), split(big, 4)

    def loss(trained, teacher, tokens, lengths):
        model = eqx.combine(jax.tree.map(lambda p: p.astype(dtype), trained["student"]), student_static)
        features, maps, logits = jax.vmap(model)(tokens, lengths)
        model = eqx.combine(lax.stop_gradient(teacher), teacher_static)
        wide, wide_maps, wide_logits = jax.vmap(model)(tokens, lengths)
        real = (jnp.arange(t) <= lengths[:, None]).astype(jnp.float32)
        pairs = real[:, None, :, None] * real[:, None, None, :]
        total = 0.0
        for i in range(3):
            fitted = (features[i] @ trained["fit"].astype(dtype)).astype(jnp.float32)
            apart = jnp.square(fitted - wide[2 * i].astype(jnp.float32))
            total += jnp.sum(jnp.mean(apart, axis=-1) * real) / jnp.sum(real)
            if i:
                apart = jnp.square(maps[i - 1] - wide_maps[2 * i - 1]) * pairs
                total += jnp.sum(apart) / (h * jnp.sum(pairs))
        soft = jax.nn.log_softmax(wide_logits / 2.0, axis=-1)
        gap = jnp.sum(jnp.exp(soft) * (soft - jax.nn.log_softmax(logits / 2.0, axis=-1)), axis=-1)
        return total + 4.0 * jnp.mean(gap)

    def graded(*arguments):
        value, slopes = jax.value_and_grad(loss)(*arguments)
        return value, jax.tree.leaves(slopes)

    trained = {"student": module_weights(student, jnp.float32), "fit": weight(n, big)}
    data = (integers(b, t, below=words), integers(b, below=t))
    return Built(graded, (trained, module_weights(teacher, dtype), *data))


@program("total-correlation-variational-images-grad-haiku", GROUP)
def _correlation(size: Size) -> Built:
    """This gives the loss and gradient of an image autoencoder that keeps its latents independent.

    The density of every sample under every image's posterior estimates how much the latents depend on each other.
    """
    import haiku as hk

    b, side, n, latents, images = pick(size, (256, 64, 32, 10, 737_280), (16, 32, 16, 10, 50_000), (4, 16, 4, 3, 100))
    dtype = half(size)

    def encode(x):
        for width in (n, n, 2 * n):
            x = jax.nn.relu(hk.Conv2D(width, 4, 2)(x))
        x = jax.nn.relu(hk.Linear(8 * n)(hk.Flatten()(x)))
        return jnp.split(hk.Linear(2 * latents)(x).astype(jnp.float32), 2, axis=-1)

    def decode(z):
        x = jax.nn.relu(hk.Linear(8 * n)(z.astype(dtype)))
        x = jax.nn.relu(hk.Linear((side // 8) ** 2 * 2 * n)(x)).reshape(-1, side // 8, side // 8, 2 * n)
        for width in (n, n):
            x = jax.nn.relu(hk.Conv2DTranspose(width, 4, 2)(x))
        return hk.Conv2DTranspose(1, 4, 2)(x)[..., 0].astype(jnp.float32)

    def both(x, noise):
        mean, log_variance = encode(x[..., None].astype(dtype))
        z = mean + jnp.exp(0.5 * log_variance) * noise
        return mean, log_variance, z, decode(z)

    model = hk.without_apply_rng(hk.transform(both))

    def density(z, mean, log_variance):
        return -0.5 * (jnp.square(z - mean) * jnp.exp(-log_variance) + log_variance + np.log(2 * np.pi))

    def loss(params, pixels, noise):
        params, x = jax.tree.map(lambda p: p.astype(dtype), params), jax.nn.sigmoid(pixels)
        mean, log_variance, z, logits = model.apply(params, x, noise)
        lost = jnp.sum(jax.nn.softplus(logits) - x * logits, axis=(1, 2))
        own = jnp.sum(density(z, mean, log_variance), axis=-1)
        prior = jnp.sum(density(z, 0.0, jnp.zeros(latents)), axis=-1)
        every = density(z[:, None], mean[None], log_variance[None])
        each = jax.nn.logsumexp(every, axis=1) - np.log(b * images)
        joint = jax.nn.logsumexp(jnp.sum(every, axis=-1), axis=1) - np.log(b * images)
        information, correlation, apart = own - joint, joint - jnp.sum(each, axis=-1), jnp.sum(each, axis=-1) - prior
        parts = tuple(jnp.mean(p) for p in (lost, information, correlation, apart))
        return parts[0] + parts[1] + 6.0 * parts[2] + parts[3], parts

    args = (jax.ShapeDtypeStruct((b, side, side), jnp.float32), jax.ShapeDtypeStruct((b, latents), jnp.float32))
    shapes = jax.eval_shape(model.init, jax.random.key(0), *args)
    params = module_weights(shapes, jnp.float32)
    return Built(jax.value_and_grad(loss, has_aux=True), (params, normal(b, side, side), normal(b, latents)))


@program("schedule-free-adam-summed-small-batches-step", GROUP)
def _schedule_free(size: Size) -> Built:
    """This gives a small language model's weights after a step of schedule-free AdamW on several small batches.

    Gradients are taken at a mix of the fast and the averaged weights, summed over the batches by a scan, and clipped
    to a length.
    """
    pieces, b, t, n, h, words, layers = pick(
        size, (4, 4, 257, 512, 8, 16411, 3), (2, 2, 49, 128, 4, 2003, 2), (2, 2, 6, 8, 2, 13, 2)
    )
    dtype, d = half(size), n // h

    def norm(x, scale, shift):
        x = x.astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        return (x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale + shift).astype(dtype)

    def block(x, p):
        q, k, v = jnp.split(norm(x, p["scale1"], p["shift1"]) @ p["qkv"].astype(dtype), 3, axis=-1)
        q, k, v = (y.reshape(b, t, h, d) for y in (q, k, v))
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, n)
        x = x + out @ p["out"].astype(dtype)
        y = jax.nn.gelu(norm(x, p["scale2"], p["shift2"]) @ p["up"].astype(dtype) + p["bias"].astype(dtype))
        return x + y @ p["down"].astype(dtype), None

    def loss(params, tokens):
        x = (params["embed"][tokens[:, :-1]] + params["places"]).astype(dtype)
        x, _ = lax.scan(jax.checkpoint(block), x, params["layers"])
        logits = (norm(x, params["scale"], 0.0) @ params["embed"].T.astype(dtype)).astype(jnp.float32)
        right = jnp.sum(jax.nn.one_hot(tokens[:, 1:], words) * logits, axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)

    def step(fast, average, second, tokens, count):
        count = count + 1.0
        mixed = jax.tree.map(lambda z, x: 0.1 * z + 0.9 * x, fast, average)

        def add(carry, batch):
            total, grads = carry
            value, new = jax.value_and_grad(loss)(mixed, batch)
            return (total + value / pieces, jax.tree.map(lambda g, m: g + m / pieces, grads, new)), None

        (value, grads), _ = lax.scan(add, (0.0, jax.tree.map(jnp.zeros_like, fast)), tokens)
        length = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / (length + 1e-6)), grads)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, grads)
        rate = 2.5e-3 * jnp.minimum(1.0, count / 100) * jnp.sqrt(1 - 0.999**count)

        def move(z, g, v, y):
            return z - rate * (g / (jnp.sqrt(jnp.abs(v)) + 1e-8) + 0.01 * y)

        fast = jax.tree.map(move, fast, grads, second, mixed)
        average = jax.tree.map(lambda x, z: x + (z - x) / count, average, fast)
        return fast, average, second, value, length

    shapes = {"qkv": (n, 3 * n), "out": (n, n), "up": (n, 4 * n), "down": (4 * n, n)}
    every = {name: weight(layers, *shape) for name, shape in shapes.items()} | {
        "bias": normal(layers, 4 * n, scale=0.02)
    }
    every |= {f"scale{i}": normal(layers, n, scale=0.1, offset=1.0) for i in (1, 2)}
    every |= {f"shift{i}": normal(layers, n, scale=0.1) for i in (1, 2)}
    params = {
        "embed": normal(words, n, scale=0.05),
        "places": normal(t, n, scale=0.02),
        "scale": gain(n),
        "layers": every,
    }
    second = jax.tree.map(
        lambda r: normal(*r.shape, scale=1e-7, offset=1e-6), params, is_leaf=lambda leaf: isinstance(leaf, Random)
    )
    tokens = integers(pieces, b, t + 1, below=words)
    return Built(step, (params, params, second, tokens, normal(scale=0.0, offset=40.0)))
