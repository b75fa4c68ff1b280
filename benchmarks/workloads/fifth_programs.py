"""Objectives, retrieval, vision, physics and signals, by an author who has seen no plan of the package: a fifth set."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, gain, half, integers, like, normal, pick, program, weight

GROUP = "fifth"


@program("rnn-transducer-joint-grad", GROUP)
def _transducer(size: Size) -> Built:
    """The gradient of a transducer's loss for speech: the joint network of frames and labels, and its lattice by diagonals."""
    b, t, u, n, joint, vocabulary = pick(
        size, (16, 96, 24, 640, 512, 1024), (4, 48, 12, 96, 96, 256), (2, 5, 3, 6, 4, 7)
    )
    dtype, low = half(size), -1e9

    def joined(p, frames, states):
        y = (frames @ p["frame"])[:, :, None, :] + (states @ p["state"])[:, None, :, :] + p["bias"]
        return (jnp.tanh(y) @ p["out"]).astype(jnp.float32) + p["out_bias"]

    def lattice(blank, emit, frames, labels):
        """The log probability of one utterance: blank [t, u + 1], emit [t, u]."""
        at = jnp.arange(u + 1)

        def skew(x, width):
            row = jnp.arange(t + u)[:, None] - jnp.arange(width)[None, :]
            inside = (row >= 0) & (row < t)
            return jnp.where(inside, jnp.take_along_axis(x, jnp.clip(row, 0, t - 1), axis=0), low)

        def diagonal(alpha, xs):
            step, blank_before, emit_here = xs
            stay = alpha + blank_before
            move = jnp.concatenate([jnp.full(1, low), alpha[:-1]]) + jnp.concatenate([jnp.full(1, low), emit_here])
            alpha = jnp.logaddexp(stay, move)
            alpha = jnp.where((step - at >= 0) & (step - at < t), alpha, low)
            return alpha, alpha

        start = jnp.where(at == 0, 0.0, low)
        blanks, emits = skew(blank, u + 1), skew(emit, u)
        steps = jnp.arange(1, t + u)
        # An emission at (t, u - 1) lies on the diagonal before, as does the blank at (t - 1, u).
        _, alphas = lax.scan(diagonal, start, (steps, blanks[:-1], emits[:-1]))
        alphas = jnp.concatenate([start[None], alphas])
        return alphas[frames - 1 + labels, labels] + blank[frames - 1, labels]

    def loss(p, encoded, labels, frames, length):
        frames = jnp.clip(frames, t // 2, t)
        length = jnp.clip(length, 1, u)
        shifted = jnp.pad(labels, ((0, 0), (1, 0)))
        states = jnp.tanh(p["labels"][shifted] + jnp.roll(p["labels"][shifted], 1, axis=1) @ p["context"])
        logp = jax.nn.log_softmax(joined(p, encoded, states), axis=-1)
        blank = logp[..., 0]
        index = jnp.broadcast_to(labels[:, None, :, None], (b, t, u, 1))
        emit = jnp.take_along_axis(logp[:, :, :-1], index, axis=-1)[..., 0]
        total = jax.vmap(lattice)(blank, emit, frames, length)
        return -jnp.mean(total / length)

    params = {
        "frame": weight(n, joint, dtype=dtype),
        "state": weight(n, joint, dtype=dtype),
        "bias": normal(joint, dtype=dtype, scale=0.05),
        "out": weight(joint, vocabulary, dtype=dtype),
        "out_bias": normal(vocabulary, scale=0.05),
        "labels": normal(vocabulary, n, dtype=dtype),
        "context": weight(n, n, dtype=dtype),
    }
    speech = (normal(b, t, n, dtype=dtype), integers(b, u, below=vocabulary))
    return Built(
        jax.value_and_grad(loss, argnums=(0, 1)),
        (params, *speech, integers(b, below=t + 1), integers(b, below=u + 1)),
    )


@program("dreamer-two-hot-returns-grad", GROUP)
def _dreamer(size: Size) -> Built:
    """DreamerV3's gradient: balanced divergences of mixed categoricals, symlog two-hot heads, lambda returns, the actor's loss."""
    b, t, n, latents, classes, bins, actions = pick(
        size, (16, 64, 1024, 32, 32, 255, 18), (8, 32, 192, 16, 16, 41, 6), (2, 4, 6, 2, 3, 7, 3)
    )
    dtype, discount, trace = half(size), 0.997, 0.95
    support = np.linspace(-20.0, 20.0, bins, dtype=np.float32)

    def symlog(x):
        return jnp.sign(x) * jnp.log1p(jnp.abs(x))

    def symexp(x):
        return jnp.sign(x) * jnp.expm1(jnp.abs(x))

    def two_hot(x):
        x = jnp.clip(symlog(x), support[0], support[-1])
        below = jnp.clip(jnp.sum(support <= x[..., None], axis=-1) - 1, 0, bins - 2)
        share = (x - jnp.asarray(support)[below]) / (support[1] - support[0])
        lower, upper = jax.nn.one_hot(below, bins), jax.nn.one_hot(below + 1, bins)
        return lower * (1.0 - share)[..., None] + upper * share[..., None]

    def mixed(logits):
        probs = 0.99 * jax.nn.softmax(logits.astype(jnp.float32), axis=-1) + 0.01 / classes
        return jnp.log(probs)

    def divergence(p, q):
        return jnp.sum(jnp.exp(p) * (p - q), axis=(-2, -1))

    def head(p, x):
        y = x @ p["in"]
        z = y.astype(jnp.float32)
        y = (z * lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + 1e-4)).astype(dtype) * p["scale"]
        return (jax.nn.silu(y) @ p["out"]).astype(jnp.float32)

    def expected(logits):
        return symexp(jnp.sum(jax.nn.softmax(logits, axis=-1) * support, axis=-1))

    def returns(reward, keep, value):
        def step(following, xs):
            r, c, v = xs
            now = r + discount * c * ((1.0 - trace) * v + trace * following)
            return now, now

        xs = (reward[:, 1:].T, keep[:, 1:].T, value[:, 1:].T)
        _, out = lax.scan(step, value[:, -1], xs, reverse=True)
        return out.T

    def loss(p, feature, prior, posterior, slow, action, reward, done):
        prior, posterior = mixed(prior), mixed(posterior)
        stopped = lax.stop_gradient
        dynamics = jnp.maximum(divergence(stopped(posterior), prior), 1.0)
        representation = jnp.maximum(divergence(posterior, stopped(prior)), 1.0)
        reward_logits, value_logits = head(p["reward"], feature), head(p["value"], feature)
        going = head(p["going"], feature)[..., 0]
        alive = 1.0 - (done == 0).astype(jnp.float32)
        fit = -jnp.sum(two_hot(reward) * jax.nn.log_softmax(reward_logits, axis=-1), axis=-1)
        fit = fit - alive * jax.nn.log_sigmoid(going) - (1.0 - alive) * jax.nn.log_sigmoid(-going)
        target = stopped(returns(expected(reward_logits), jax.nn.sigmoid(going), expected(value_logits)))
        values = jax.nn.log_softmax(value_logits[:, :-1], axis=-1)
        slow_values = stopped(jax.nn.softmax(head(slow, feature)[:, :-1], axis=-1))
        critic = -jnp.sum((two_hot(target) + slow_values) * values, axis=-1)
        spread = jnp.maximum(jnp.quantile(target, 0.95) - jnp.quantile(target, 0.05), 1.0)
        advantage = stopped((target - expected(value_logits[:, :-1])) / spread)
        policy = jax.nn.softmax(head(p["actor"], stopped(feature))[:, :-1], axis=-1)
        policy = jnp.log(0.99 * policy + 0.01 / actions)
        chosen = jnp.take_along_axis(policy, action[:, :-1, None], axis=-1)[..., 0]
        entropy = -jnp.sum(jnp.exp(policy) * policy, axis=-1)
        seen = stopped(jnp.cumprod(discount * jax.nn.sigmoid(going), axis=1))[:, :-1]
        actor = -seen * (chosen * advantage + 3e-4 * entropy)
        total = jnp.mean(fit + dynamics + 0.1 * representation) + jnp.mean(seen * critic) + jnp.mean(actor)
        return total, {"entropy": jnp.mean(entropy), "return": jnp.mean(target), "spread": spread}

    def mlp(out):
        return {"in": weight(n, n, dtype=dtype), "scale": gain(n, dtype), "out": weight(n, out, dtype=dtype)}

    params = {"reward": mlp(bins), "value": mlp(bins), "going": mlp(1), "actor": mlp(actions)}
    logits = normal(b, t, latents, classes, dtype=dtype)
    arguments = (params, normal(b, t, n, dtype=dtype), logits, logits, mlp(bins), integers(b, t, below=actions))
    return Built(
        jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True),
        (*arguments, normal(b, t, scale=2.0), integers(b, t, below=50)),
    )


@program("approx-ndcg-list-ranking-grad", GROUP)
def _ranking(size: Size) -> Built:
    """Learning to rank padded lists: a scorer of features, the gradient of approximate NDCG with a list's log-likelihood."""
    b, items, features, wide = pick(size, (256, 200, 136, 512), (48, 100, 40, 64), (2, 5, 4, 6))

    def scorer(p, x):
        x = jnp.sign(x) * jnp.log1p(jnp.abs(x))
        for kernel, bias, scale, shift in p["layers"]:
            x = x @ kernel + bias
            mean, var = jnp.mean(x, axis=(0, 1)), jnp.var(x, axis=(0, 1))
            x = jax.nn.relu((x - mean) / jnp.sqrt(var + 1e-3) * scale + shift)
        return (x @ p["out"])[..., 0]

    def approx_ranks(scores, where):
        higher = jax.nn.sigmoid((scores[:, None, :] - scores[:, :, None]) / 0.1)
        valid = where[:, :, None] & where[:, None, :]
        higher = jnp.where(valid, higher, 0.0)
        return jnp.sum(higher, axis=-1) + 0.5

    def ndcg(scores, labels, where):
        gains = jnp.where(where, 2.0**labels - 1.0, 0.0)
        got = jnp.sum(gains / jnp.log2(1.0 + approx_ranks(scores, where)), axis=-1)
        best = -jnp.sort(-gains, axis=-1)
        ideal = jnp.sum(best / jnp.log2(2.0 + jnp.arange(items)), axis=-1)
        return jnp.where(ideal > 0, got / jnp.where(ideal > 0, ideal, 1.0), 0.0)

    def list_likelihood(scores, labels, where, key):
        ties = jax.random.uniform(key, scores.shape)
        order = jnp.lexsort((ties, -jnp.where(where, labels, -1.0)), axis=-1)
        ranked = jnp.take_along_axis(jnp.where(where, scores, -1e9), order, axis=-1)
        shown = jnp.take_along_axis(where, order, axis=-1)
        rest = lax.cumlogsumexp(ranked, axis=1, reverse=True)
        return jnp.sum(jnp.where(shown, ranked - rest, 0.0), axis=-1) / jnp.maximum(jnp.sum(shown, axis=-1), 1)

    def loss(p, x, grade, count, seed):
        where = jnp.arange(items)[None, :] < jnp.maximum(count, 1)[:, None]
        labels = grade.astype(jnp.float32)
        scores = scorer(p, x)
        quality = ndcg(scores, labels, where)
        likelihood = list_likelihood(scores, labels, where, jax.random.key(seed))
        return -jnp.mean(quality) - 0.1 * jnp.mean(likelihood), quality

    def layer(i, o):
        return (weight(i, o), normal(o, scale=0.05), gain(o), normal(o, scale=0.05))

    layers = [layer(features, wide), layer(wide, wide // 2), layer(wide // 2, wide // 4)]
    params = {"layers": layers, "out": weight(wide // 4, 1)}
    lists = (normal(b, items, features, scale=3.0), integers(b, items, below=5), integers(b, below=items + 1))
    return Built(jax.value_and_grad(loss, has_aux=True), (params, *lists, integers(below=1000)))


@program("ivf-product-codes-search", GROUP)
def _ivf(size: Size) -> Built:
    """A search of an inverted file with product codes: nearest lists, tables of residuals, code distances, exact reranking."""
    queries, lists, capacity, d, parts, probes, short, k = pick(
        size, (64, 4096, 256, 128, 16, 16, 100, 10), (16, 128, 48, 64, 8, 8, 40, 10), (2, 5, 4, 4, 2, 2, 3, 2)
    )
    codes = pick(size, 256, 256, 8)

    def search(centroids, codebooks, stored, filled, vectors, query):
        query = query / jnp.linalg.norm(query, axis=-1, keepdims=True)
        coarse = jnp.sum(centroids**2, axis=-1) - 2.0 * query @ centroids.T
        _, probe = lax.top_k(-coarse, probes)

        def one(q, probe):
            residual = (q[None, :] - centroids[probe]).reshape(probes, parts, 1, d // parts)
            table = jnp.sum((residual - codebooks[None]) ** 2, axis=-1)
            code = stored[probe]
            found = jax.vmap(lambda lut, c: jnp.take_along_axis(lut, c.T, axis=1).sum(axis=0))(table, code)
            found = jnp.where(jnp.arange(capacity)[None, :] < filled[probe][:, None], found, jnp.inf)
            _, best = lax.top_k(-found.reshape(-1), short)
            which = probe[best // capacity] * capacity + best % capacity
            exact = jnp.sum((vectors[which] - q) ** 2, axis=-1)
            exact = jnp.where(jnp.isfinite(found.reshape(-1)[best]), exact, 1e9)
            top, at = lax.top_k(-exact, k)
            return -top, which[at]

        return jax.vmap(one)(query, probe)

    index = (normal(lists, d, scale=d**-0.5), normal(parts, codes, d // parts, scale=0.3 * d**-0.5))
    stored = (integers(lists, capacity, parts, below=codes), integers(lists, below=capacity + 1))
    vectors = normal(lists * capacity, d, scale=d**-0.5)
    return Built(search, (*index, *stored, vectors, normal(queries, d)))


@program("yolo-anchor-free-nms", GROUP)
def _yolo(size: Size) -> Built:
    """YOLOv8's detections: sides from distributions at three strides, class scores, the best boxes, greedy suppression."""
    b, side, classes, best, bins = pick(size, (16, 640, 80, 200, 16), (2, 416, 80, 100, 16), (1, 64, 3, 6, 4))
    dtype, strides = half(size), (8, 16, 32)

    def anchors():
        points, scale = [], []
        for stride in strides:
            g = side // stride
            y, x = np.mgrid[:g, :g].astype(np.float32) + 0.5
            points.append(np.stack([x, y], axis=-1).reshape(-1, 2))
            scale.append(np.full((g * g, 1), stride, np.float32))
        return np.concatenate(points), np.concatenate(scale)

    def overlap(boxes):
        low = jnp.maximum(boxes[:, None, :2], boxes[None, :, :2])
        high = jnp.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
        inter = jnp.prod(jnp.maximum(high - low, 0.0), axis=-1)
        area = jnp.prod(boxes[:, 2:] - boxes[:, :2], axis=-1)
        return inter / (area[:, None] + area[None, :] - inter + 1e-7)

    def suppress(boxes, scores, labels):
        apart = boxes + labels[:, None].astype(jnp.float32) * 2.0 * side
        covers = (overlap(apart) > 0.45) & (jnp.arange(best)[:, None] < jnp.arange(best)[None, :])

        def body(i, keep):
            return keep & ~(covers[i] & keep[i])

        return lax.fori_loop(0, best, body, scores > 0.25)

    def detect(levels):
        points, scale = anchors()
        flat = jnp.concatenate([x.reshape(b, -1, 4 * bins + classes) for x in levels], axis=1).astype(jnp.float32)
        sides, logits = flat[..., : 4 * bins], flat[..., 4 * bins :]
        sides = jax.nn.softmax(sides.reshape(b, -1, 4, bins), axis=-1) @ jnp.arange(bins, dtype=jnp.float32)
        boxes = jnp.concatenate([points - sides[..., :2], points + sides[..., 2:]], axis=-1) * scale
        probs = jax.nn.sigmoid(logits)
        score, label = jnp.max(probs, axis=-1), jnp.argmax(probs, axis=-1)
        score, at = lax.top_k(score, best)
        boxes = jnp.clip(jnp.take_along_axis(boxes, at[..., None], axis=1), 0.0, side)
        label = jnp.take_along_axis(label, at, axis=1)
        keep = jax.vmap(suppress)(boxes, score, label)
        return boxes, jnp.where(keep, score, 0.0), jnp.where(keep, label, -1), jnp.sum(keep, axis=1)

    outputs = [normal(b, side // s, side // s, 4 * bins + classes, dtype=dtype) for s in strides]
    return Built(detect, (outputs,))


@program("random-affine-colour-cutmix", GROUP)
def _augment(size: Size) -> Built:
    """A batch's augmentation on the accelerator: random affine views by interpolation, colours jittered, grey, CutMix, labels."""
    b, side, classes = pick(size, (128, 224, 1000), (8, 96, 100), (2, 8, 3))
    to_yiq = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]], np.float32)
    to_rgb = np.linalg.inv(to_yiq).astype(np.float32)
    mean = np.array([0.485, 0.456, 0.406], np.float32)
    std = np.array([0.229, 0.224, 0.225], np.float32)

    def view(key, image):
        k1, k2, k3, k4, k5 = jax.random.split(key, 5)
        angle = jax.random.uniform(k1, (), minval=-0.3, maxval=0.3)
        zoom = jnp.sqrt(jax.random.uniform(k2, (), minval=0.3, maxval=1.0))
        shear = jax.random.uniform(k3, (), minval=-0.2, maxval=0.2)
        shift = jax.random.uniform(k4, (2,), minval=-1.0, maxval=1.0) * (1.0 - zoom) * side / 2
        flip = jnp.where(jax.random.bernoulli(k5), -1.0, 1.0)
        c, s = jnp.cos(angle), jnp.sin(angle)
        turn = jnp.array([[c, -s], [s + shear * c, c - shear * s]]) * zoom
        grid = jnp.stack(jnp.meshgrid(jnp.arange(side), jnp.arange(side), indexing="ij"))
        centred = (grid - (side - 1) / 2) * jnp.array([1.0, flip])[:, None, None]
        place = jnp.einsum("ij,jhw->ihw", turn, centred) + shift[:, None, None] + (side - 1) / 2

        def sample(channel):
            return jax.scipy.ndimage.map_coordinates(channel, list(place), order=1, mode="reflect")

        return jax.vmap(sample, in_axes=-1, out_axes=-1)(image)

    def colour(key, image):
        k1, k2, k3, k4, k5 = jax.random.split(key, 5)
        image = image * jax.random.uniform(k1, (), minval=0.6, maxval=1.4)
        grey = image @ to_yiq[0]
        contrast = jax.random.uniform(k2, (), minval=0.6, maxval=1.4)
        image = (image - jnp.mean(grey)) * contrast + jnp.mean(grey)
        turn = jax.random.uniform(k3, (), minval=-0.1, maxval=0.1) * 2 * jnp.pi
        c, s = jnp.cos(turn), jnp.sin(turn)
        more = jax.random.uniform(k4, (), minval=0.6, maxval=1.4)
        hue = jnp.array([[1.0, 0.0, 0.0], [0.0, c * more, -s * more], [0.0, s * more, c * more]])
        image = jnp.clip(image @ (to_rgb @ hue @ to_yiq).T, 0.0, 1.0)
        grey = jnp.broadcast_to((image @ to_yiq[0])[..., None], image.shape)
        return jnp.where(jax.random.bernoulli(k5, 0.2), grey, image)

    def cutmix(key, images, labels):
        k1, k2, k3 = jax.random.split(key, 3)
        other = jax.random.permutation(k1, b)
        edge = jnp.sqrt(1.0 - jax.random.beta(k2, 1.0, 1.0, (b, 1))) * side / 2
        centre = jax.random.uniform(k3, (b, 2), maxval=side)
        at = jnp.arange(side)[None, :]
        rows, columns = jnp.abs(at - centre[:, :1]) < edge, jnp.abs(at - centre[:, 1:]) < edge
        box = rows[:, :, None] & columns[:, None, :]
        mixed = jnp.where(box[..., None], images[other], images)
        share = jnp.mean(box, axis=(1, 2))[:, None]
        return mixed, labels * (1.0 - share) + labels[other] * share

    def augment(images, labels, seed):
        k1, k2, k3 = jax.random.split(jax.random.key(seed), 3)
        images = images.astype(jnp.float32) / 255.0
        images = jax.vmap(view)(jax.random.split(k1, b), images)
        images = jax.vmap(colour)(jax.random.split(k2, b), images)
        targets = 0.9 * jax.nn.one_hot(labels, classes) + 0.1 / classes
        images, targets = cutmix(k3, images, targets)
        return ((images - mean) / std).astype(half(size)), targets

    return Built(augment, (integers(b, side, side, 3, below=256), integers(b, below=classes), integers(below=1000)))


@program("atrous-pyramid-segmentation-linen", GROUP)
def _atrous(size: Size) -> Built:
    """DeepLabV3+'s head at inference: atrous convolutions with pooled context, a decoder with skips, upsampled labels."""
    from flax import linen as nn

    b, grid, n, low, wide, classes = pick(
        size, (8, 32, 1024, 256, 256, 21), (1, 12, 64, 24, 32, 21), (1, 4, 6, 4, 4, 3)
    )
    dtype = half(size)

    class ConvNorm(nn.Module):
        features: int
        kernel: int = 1
        dilation: int = 1
        groups: int = 1

        @nn.compact
        def __call__(self, x):
            k, r = (self.kernel, self.kernel), (self.dilation, self.dilation)
            x = nn.Conv(
                self.features,
                k,
                kernel_dilation=r,
                feature_group_count=self.groups,
                use_bias=False,
                dtype=dtype,
            )(x)
            return nn.relu(nn.BatchNorm(use_running_average=True, epsilon=1e-5, dtype=dtype)(x))

    class Pyramid(nn.Module):
        @nn.compact
        def __call__(self, x):
            branches = [ConvNorm(wide)(x)] + [ConvNorm(wide, 3, r)(x) for r in (6, 12, 18)]
            pooled = ConvNorm(wide)(jnp.mean(x, axis=(1, 2), keepdims=True))
            branches.append(jnp.broadcast_to(pooled, branches[0].shape))
            return ConvNorm(wide)(jnp.concatenate(branches, axis=-1))

    class Head(nn.Module):
        @nn.compact
        def __call__(self, deep, shallow):
            x = Pyramid()(deep)
            x = jax.image.resize(x, (*shallow.shape[:3], wide), "bilinear")
            x = jnp.concatenate([x, ConvNorm(max(1, wide * 3 // 16))(shallow)], axis=-1)
            for _ in range(2):
                x = ConvNorm(x.shape[-1], 3, groups=x.shape[-1])(x)
                x = ConvNorm(wide)(x)
            logits = nn.Conv(classes, (1, 1), dtype=dtype)(x).astype(jnp.float32)
            logits = jax.image.resize(logits, (b, grid * 16, grid * 16, classes), "bilinear")
            probs = jax.nn.softmax(logits, axis=-1)
            share = jnp.mean(probs, axis=(1, 2))
            return jnp.argmax(logits, axis=-1), jnp.max(probs, axis=-1), share

    module = Head()
    inputs = (normal(b, grid, grid, n, dtype=dtype), normal(b, 4 * grid, 4 * grid, low, dtype=dtype))
    shapes = jax.eval_shape(module.init, jax.random.key(0), *(x.struct for x in inputs))
    return Built(module.apply, (like(shapes, dtype), *inputs))


@program("weno5-euler-blast-steps", GROUP)
def _weno(size: Size) -> Built:
    """Steps of the compressible Euler equations: WENO5 of split fluxes in both directions, Runge and Kutta's third order."""
    n, steps = pick(size, (512, 3), (96, 2), (8, 1))
    gamma, dx = 1.4, 1.0 / n

    def pressure(u):
        return jnp.maximum((gamma - 1.0) * (u[3] - 0.5 * (u[1] ** 2 + u[2] ** 2) / u[0]), 1e-6)

    def fluxes(u):
        p, vx, vy = pressure(u), u[1] / u[0], u[2] / u[0]
        f = jnp.stack([u[1], u[1] * vx + p, u[2] * vx, (u[3] + p) * vx])
        g = jnp.stack([u[2], u[1] * vy, u[2] * vy + p, (u[3] + p) * vy])
        return f, g

    def reconstruct(a, b, c, d, e):
        q0, q1, q2 = (2 * a - 7 * b + 11 * c) / 6, (-b + 5 * c + 2 * d) / 6, (2 * c + 5 * d - e) / 6
        s0 = 13 / 12 * (a - 2 * b + c) ** 2 + 0.25 * (a - 4 * b + 3 * c) ** 2
        s1 = 13 / 12 * (b - 2 * c + d) ** 2 + 0.25 * (b - d) ** 2
        s2 = 13 / 12 * (c - 2 * d + e) ** 2 + 0.25 * (3 * c - 4 * d + e) ** 2
        w0, w1, w2 = 0.1 / (s0 + 1e-6) ** 2, 0.6 / (s1 + 1e-6) ** 2, 0.3 / (s2 + 1e-6) ** 2
        return (w0 * q0 + w1 * q1 + w2 * q2) / (w0 + w1 + w2)

    def divergence(u, f, speed, axis):
        plus, minus = 0.5 * (f + speed * u), 0.5 * (f - speed * u)
        right = reconstruct(*(jnp.roll(plus, s, axis) for s in (2, 1, 0, -1, -2)))
        left = reconstruct(*(jnp.roll(minus, s, axis) for s in (-3, -2, -1, 0, 1)))
        face = right + left
        return (face - jnp.roll(face, 1, axis)) / dx

    def rate(u, speed):
        f, g = fluxes(u)
        return -divergence(u, f, speed, 2) - divergence(u, g, speed, 1)

    def run(noise, energy):
        y, x = jnp.meshgrid((jnp.arange(n) + 0.5) * dx - 0.5, (jnp.arange(n) + 0.5) * dx - 0.5, indexing="ij")
        rho = 1.0 + 0.05 * jnp.tanh(noise[0])
        v = 0.05 * jnp.tanh(noise[1:])
        p = 0.1 + jax.nn.softplus(energy) * jnp.exp(-(x**2 + y**2) / 0.01)
        u = jnp.stack([rho, rho * v[0], rho * v[1], p / (gamma - 1.0) + 0.5 * rho * jnp.sum(v**2, axis=0)])

        def step(u, _):
            sound = jnp.sqrt(gamma * pressure(u) / u[0])
            fast = jnp.maximum(jnp.abs(u[1]), jnp.abs(u[2])) / u[0] + sound
            speed = jnp.max(fast)
            dt = 0.3 * dx / speed
            u1 = u + dt * rate(u, speed)
            u2 = 0.75 * u + 0.25 * (u1 + dt * rate(u1, speed))
            u = u / 3.0 + 2.0 / 3.0 * (u2 + dt * rate(u2, speed))
            return u, (dt, jnp.sum(u[0]) * dx**2, jnp.sum(u[3]) * dx**2)

        u, record = lax.scan(step, u, None, length=steps)
        mach = jnp.sqrt((u[1] ** 2 + u[2] ** 2) / u[0] ** 2 / (gamma * pressure(u) / u[0]))
        return u, mach, record

    return Built(run, (normal(3, n, n), normal(offset=1.0)))


@program("radar-range-doppler-cfar", GROUP)
def _radar(size: Size) -> Built:
    """A car radar's frames: windows, range and Doppler transforms, false-alarm thresholds of cells around, peaks, angles."""
    frames, antennas, chirps, samples, found = pick(size, (8, 8, 128, 512, 64), (4, 8, 64, 256, 32), (1, 2, 16, 16, 3))
    angles, outer, inner = 64, (17, 9), (5, 3)

    def window_sum(x, shape):
        return lax.reduce_window(x, 0.0, lax.add, (1, *shape), (1, 1, 1), "SAME")

    def cells_in(shape):
        def along(extent, w):
            at = np.arange(extent)
            return np.minimum(at + w // 2, extent - 1) - np.maximum(at - w // 2, 0) + 1

        return np.outer(along(chirps, shape[0]), along(samples // 2, shape[1])).astype(np.float32)

    def detect(real, imaginary, gains):
        cube = lax.complex(real, imaginary) * gains[None, :, None, None]
        cube = cube - jnp.mean(cube, axis=-1, keepdims=True)
        ranges = jnp.fft.fft(cube * np.hanning(samples).astype(np.float32), axis=-1)[..., : samples // 2]
        still = ranges - jnp.mean(ranges, axis=2, keepdims=True)
        doppler = jnp.fft.fft(still * np.hamming(chirps).astype(np.float32)[:, None], axis=2)
        doppler = jnp.fft.fftshift(doppler, axes=2)
        power = jnp.mean(jnp.abs(doppler) ** 2, axis=1)
        noise = (window_sum(power, outer) - window_sum(power, inner)) / (cells_in(outer) - cells_in(inner))
        peak = lax.reduce_window(power, -jnp.inf, lax.max, (1, 3, 3), (1, 1, 1), "SAME")
        hit = (power > 2.0 * noise) & (power >= peak)
        ratio = jnp.where(hit, power / (noise + 1e-9), 0.0).reshape(frames, -1)
        strength, at = lax.top_k(ratio, found)
        flat = doppler.reshape(frames, antennas, -1)
        snapshot = jnp.take_along_axis(flat, at[:, None, :], axis=2)
        spectrum = jnp.abs(jnp.fft.fftshift(jnp.fft.fft(snapshot, n=angles, axis=1), axes=1)) ** 2
        sine = 2.0 * (jnp.argmax(spectrum, axis=1) - angles // 2) / angles
        bins = samples // 2
        speed, distance = at // bins - chirps // 2, at % bins
        decibels = 10.0 * jnp.log10(jnp.maximum(strength, 1e-6))
        return distance, speed, jnp.arcsin(sine), decibels, strength > 0, jnp.sum(hit, axis=(1, 2))

    cube = normal(frames, antennas, chirps, samples)
    return Built(detect, (cube, cube, gain(antennas)))


@program("hierarchical-count-regression-elbo-grad", GROUP)
def _hierarchical(size: Size) -> Built:
    """The gradient of a variational bound: negative binomial counts, offsets of groups uncentred, several reparameterised draws."""
    rows, groups, p, draws = pick(size, (100_000, 1000, 16, 8), (50_000, 500, 8, 4), (12, 3, 2, 2))

    def normal_log(x, loc, scale):
        return -0.5 * jnp.square((x - loc) / scale) - jnp.log(scale) - 0.5 * np.log(2 * np.pi)

    def counts_log(k, log_mean, concentration):
        mean = jnp.exp(log_mean)
        total = jnp.log(concentration + mean)
        choose = lax.lgamma(k + concentration) - lax.lgamma(k + 1.0) - lax.lgamma(concentration)
        return choose + concentration * (jnp.log(concentration) - total) + k * (log_mean - total)

    def log_joint(z, x, group, count, exposure):
        tau = jnp.exp(z["log_tau"])
        offsets = z["mu"] + tau * z["raw"]
        slopes = z["slope"] + 0.2 * z["raw_slope"][:, 0]
        concentration = jnp.exp(z["log_concentration"])
        eta = offsets[group] + slopes[group] * x[:, 0] + x @ z["beta"] + jnp.log(exposure)
        eta = jnp.clip(eta, -10.0, 10.0)
        prior = normal_log(z["mu"], 0.0, 2.0) + normal_log(z["slope"], 0.0, 1.0)
        prior += jnp.log(2.0) + normal_log(tau, 0.0, 1.0) + z["log_tau"]
        prior += normal_log(z["log_concentration"], 1.0, 1.0)
        prior += jnp.sum(normal_log(z["raw"], 0.0, 1.0)) + jnp.sum(normal_log(z["raw_slope"], 0.0, 1.0))
        prior += jnp.sum(-jnp.log1p(jnp.square(z["beta"] / 0.5)))
        return prior + jnp.sum(counts_log(count, eta, concentration))

    def bound(guide, x, group, count, exposure, seed):
        leaves, tree = jax.tree.flatten(guide["loc"])
        scales = jax.tree.map(lambda s: jax.nn.softplus(s) + 1e-4, guide["scale"])

        def one(key):
            keys = jax.tree.unflatten(tree, list(jax.random.split(key, len(leaves))))
            noise = jax.tree.map(lambda k, m: jax.random.normal(k, m.shape), keys, guide["loc"])
            z = jax.tree.map(lambda m, s, e: m + s * e, guide["loc"], scales, noise)
            return log_joint(z, x, group, count, exposure)

        entropy = sum(jnp.sum(jnp.log(s)) for s in jax.tree.leaves(scales))
        joint = jax.vmap(one)(jax.random.split(jax.random.key(seed), draws))
        return -(jnp.mean(joint) + entropy) / rows

    def step(guide, x, group, count, exposure, seed):
        count = count.astype(jnp.float32)
        value, slope = jax.value_and_grad(bound)(guide, x, group, count, jnp.exp(exposure), seed)
        seen = jax.ops.segment_sum(count, group, groups, indices_are_sorted=True)
        return value, jax.tree.map(lambda g, s: g - 1e-3 * s, guide, slope), seen

    def tree(scale, offset):
        shapes = {"mu": (), "slope": (), "log_tau": (), "log_concentration": (), "beta": (p,), "raw": (groups,)}
        shapes |= {"raw_slope": (groups, 1)}
        return {k: normal(*s, scale=scale, offset=offset) for k, s in shapes.items()}

    guide = {"loc": tree(0.1, 0.0), "scale": tree(0.1, -3.0)}
    data = (normal(rows, p, scale=0.3), integers(rows, below=groups, ramp=True), integers(rows, below=12))
    return Built(step, (guide, *data, normal(rows, scale=0.2), integers(below=1000)))
