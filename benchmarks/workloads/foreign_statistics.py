"""Programs of statistics, efficient attention, graphs and robotics, as users write them who knew nothing of the package."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.foreign_vision import GROUP, _apply, _bias, _dense
from benchmarks.workloads.registry import (
    Built,
    Size,
    booleans,
    half,
    integers,
    normal,
    pick,
    program,
    weight,
)


@program("mmd-encoder-mixture-grad", GROUP)
def _mmd(size: Size) -> Built:
    """Domain adaptation: the unbiased MMD of encoded samples with five RBF widths of the mean distance, and its gradients."""
    rows, n, hidden = pick(size, (2048, 512, 256), (384, 128, 64), (4, 6, 5))

    def loss(p, source, target):
        def encode(x):
            return jax.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"]

        total = jnp.concatenate([encode(source), encode(target)], axis=0)
        l2 = jnp.sum(total**2, 1)[:, None] + jnp.sum(total**2, 1)[None, :] - 2.0 * total @ total.T
        l2 = jnp.maximum(l2, 0.0)
        bandwidth = lax.stop_gradient(jnp.sum(l2)) / (2 * rows * (2 * rows - 1)) / 2.0**2
        kernel = sum(jnp.exp(-l2 / (bandwidth * 2.0**i)) for i in range(5))
        off = 1.0 - jnp.eye(rows)
        xx = jnp.sum(kernel[:rows, :rows] * off) / (rows * (rows - 1))
        yy = jnp.sum(kernel[rows:, rows:] * off) / (rows * (rows - 1))
        return xx + yy - 2.0 * jnp.mean(kernel[:rows, rows:])

    params = {"w1": weight(n, hidden), "b1": _bias(hidden), "w2": weight(hidden, hidden // 2)}
    return Built(jax.value_and_grad(loss), (params, normal(rows, n), normal(rows, n, scale=1.2, offset=0.1)))


@program("sliced-wasserstein-sorted", GROUP)
def _sliced(size: Size) -> Built:
    """The sliced Wasserstein distance of two clouds: unit directions, sorted projections, and a mean power of differences."""
    rows, n, directions = pick(size, (4096, 512, 256), (1024, 96, 64), (5, 4, 3))

    def distance(x, y, theta):
        theta = theta / jnp.linalg.norm(theta, axis=0, keepdims=True)
        px, py = jnp.sort(x @ theta, axis=0), jnp.sort(y @ theta, axis=0)
        per_direction = jnp.mean(jnp.abs(px - py) ** 2, axis=0)
        return jnp.sqrt(per_direction.mean()), jnp.sqrt(per_direction.max())

    return Built(distance, (normal(rows, n), normal(rows, n, offset=0.2), normal(n, directions)))


@program("real-nvp-density-scan", GROUP)
def _real_nvp(size: Size) -> Built:
    """The log density of a normalising flow: eight affine couplings over stacked weights in a scan, halves swapped between."""
    rows, n, hidden, layers = pick(size, (16384, 64, 256, 8), (4096, 32, 64, 8), (5, 4, 8, 2))
    d = n // 2

    def log_prob(p, x):
        def coupling(carry, q):
            z, log_det = carry
            a, b = z[:, :d], z[:, d:]
            h = jax.nn.leaky_relu(a @ q["w1"] + q["b1"], 0.2)
            h = jax.nn.leaky_relu(h @ q["w2"] + q["b2"], 0.2)
            s, t = jnp.split(h @ q["w3"], 2, axis=-1)
            s = 2.0 * jnp.tanh(s / 2.0)
            return (jnp.concatenate([(b - t) * jnp.exp(-s), a], axis=-1), log_det - s.sum(-1)), None

        (z, log_det), _ = lax.scan(coupling, (x, jnp.zeros(rows)), p)
        return -0.5 * jnp.sum(z**2, axis=1) - 0.5 * n * jnp.log(2 * jnp.pi) + log_det

    params = {"w1": weight(layers, d, hidden), "b1": normal(layers, hidden, scale=0.02)}
    params |= {"w2": weight(layers, hidden, hidden), "b2": normal(layers, hidden, scale=0.02)}
    params["w3"] = normal(layers, hidden, n, scale=0.3 * hidden**-0.5)
    return Built(log_prob, (params, normal(rows, n)))


@program("perplexity-search-affinities", GROUP)
def _perplexity(size: Size) -> Built:
    """The affinities of t-SNE: squared distances, a bisection of every row's precision to perplexity 30, symmetrised."""
    n, dim, steps, perplexity = pick(size, (2048, 50, 30, 30.0), (384, 50, 24, 30.0), (6, 3, 10, 3.0))

    def affinities(x):
        sq = jnp.einsum("ij,ij->i", x, x)
        dist = jnp.maximum(sq[:, None] + sq[None, :] - 2 * jnp.dot(x, x.T), 0.0)
        diagonal = jnp.eye(n, dtype=bool)

        def rows(beta):
            logits = jnp.where(diagonal, -jnp.inf, -dist * beta[:, None])
            return jax.nn.softmax(logits, axis=1)

        def body(_, state):
            low, high, beta = state
            p = rows(beta)
            entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0), axis=1)
            spread = entropy > jnp.log(perplexity)
            low, high = jnp.where(spread, beta, low), jnp.where(spread, high, beta)
            return low, high, jnp.where(jnp.isinf(high), beta * 2, (low + high) / 2)

        start = jnp.zeros(n), jnp.full((n,), jnp.inf), jnp.full((n,), 1.0 / dim)
        _, _, beta = lax.fori_loop(0, steps, body, start)
        p = rows(beta)
        return jnp.maximum((p + p.T) / (2.0 * n), 1e-12), beta

    return Built(affinities, (normal(n, dim),))


@program("self-organising-map-batch", GROUP)
def _som(size: Size) -> Built:
    """A batch update of a self-organising map: best units, their Gaussian neighbourhood on the grid, and the mean error."""
    rows, n, side = pick(size, (16384, 64, 32), (2048, 24, 16), (8, 3, 3))
    grid = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij"), -1).reshape(-1, 2).astype(np.float32)

    def update(x, codebook, log_radius):
        d = jnp.sum(x**2, 1, keepdims=True) - 2 * jnp.dot(x, codebook.T) + jnp.sum(codebook**2, 1)
        best = jnp.argmin(d, axis=1)
        error = jnp.sqrt(jnp.maximum(jnp.take_along_axis(d, best[:, None], 1), 0.0)).mean()
        offset = jnp.asarray(grid)[best][:, None, :] - grid[None, :, :]
        h = jnp.exp(-jnp.sum(offset**2, -1) / (2 * jnp.exp(2 * log_radius)))
        new = jnp.einsum("bu,bd->ud", h, x) / (h.sum(0)[:, None] + 1e-9)
        return codebook + 0.5 * (new - codebook), error

    return Built(update, (normal(rows, n), normal(side * side, n, scale=0.5), normal(scale=0.1, offset=1.0)))


@program("nystrom-landmarks-pinv", GROUP)
def _nystrom(size: Size) -> Built:
    """Nystrom attention: mean landmarks, three softmax kernels, an iterative pseudo-inverse, a depthwise convolution of values."""
    batch, heads, tokens, d, marks, width = pick(
        size, (4, 8, 4096, 64, 64, 33), (1, 4, 1024, 32, 32, 33), (1, 2, 8, 4, 2, 3)
    )
    dtype = half(size)

    def pinv(a):
        eye = jnp.eye(marks, dtype=a.dtype)
        z = a.swapaxes(-1, -2) / (jnp.abs(a).sum(-2).max() * jnp.abs(a).sum(-1).max())
        for _ in range(6):
            az = a @ z
            z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
        return z

    def attention(q, k, v, kernel):
        q = q * d**-0.25
        k = k * d**-0.25
        q_l = q.reshape(batch, heads, marks, tokens // marks, d).mean(3)
        k_l = k.reshape(batch, heads, marks, tokens // marks, d).mean(3)

        def sim(a, b):
            return jax.nn.softmax(jnp.einsum("...id,...jd->...ij", a, b).astype(jnp.float32), axis=-1)

        k1, k2, k3 = sim(q, k_l), sim(q_l, k_l), sim(q_l, k)
        right = k3.astype(dtype) @ v
        out = (k1 @ pinv(k2)).astype(dtype) @ right
        flat = v.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * d)
        conv = lax.conv_general_dilated(
            flat, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=heads * d
        )
        return out + conv.reshape(batch, tokens, heads, d).transpose(0, 2, 1, 3)

    x = normal(batch, heads, tokens, d, dtype=dtype)
    return Built(attention, (x, x, x, normal(width, 1, heads * d, dtype=dtype, scale=0.1)))


@program("performer-positive-features", GROUP)
def _performer(size: Size) -> Built:
    """FAVOR+: positive random features of queries and keys with their stabilisers, and attention in linear time."""
    batch, tokens, heads, d, m = pick(size, (4, 2048, 8, 64, 256), (2, 1000, 4, 32, 96), (1, 5, 2, 4, 6))

    def phi(x, projection, is_query):
        x = x * d**-0.25
        data_dash = jnp.einsum("blhd,md->blhm", x, projection)
        diag = jnp.sum(jnp.square(x), axis=-1, keepdims=True) / 2.0
        axis = (-1,) if is_query else (-1, -3)
        stabiliser = lax.stop_gradient(jnp.max(data_dash, axis=axis, keepdims=True))
        return m**-0.5 * (jnp.exp(data_dash - diag - stabiliser) + 1e-4)

    def attention(q, k, v, there, projection):
        qp, kp = phi(q, projection, True), phi(k, projection, False)
        kp = jnp.where(there[:, :, None, None], kp, 0.0)
        kv = jnp.einsum("blhm,blhd->bhmd", kp, v)
        den = jnp.einsum("blhm,bhm->blh", qp, kp.sum(axis=1))
        return jnp.einsum("blhm,bhmd->blhd", qp, kv) / den[..., None]

    x = normal(batch, tokens, heads, d)
    return Built(attention, (x, x, x, booleans(batch, tokens), normal(m, d)))


@program("graph-attention-edge-segments", GROUP)
def _gat(size: Size) -> Built:
    """GATv2 on a list of edges sorted by receiver: a softmax by segment maximum and sum, heads averaged, elu and residual."""
    nodes, edges, n, heads = pick(size, (10000, 160000, 128, 4), (2000, 16000, 64, 4), (5, 12, 8, 2))

    def layer(p, x, edge_features, senders, receivers):
        left = (x @ p["left"]).reshape(nodes, heads, n)
        right = (x @ p["right"]).reshape(nodes, heads, n)
        e = (edge_features @ p["edge"]).reshape(edges, heads, n)
        score = jnp.sum(jax.nn.leaky_relu(left[senders] + right[receivers] + e, 0.2) * p["a"], axis=-1)
        top = jax.ops.segment_max(score, receivers, nodes, indices_are_sorted=True)
        w = jnp.exp(score - top[receivers])
        total = jax.ops.segment_sum(w, receivers, nodes, indices_are_sorted=True)
        w = w / (total[receivers] + 1e-16)
        out = jax.ops.segment_sum(left[senders] * w[..., None], receivers, nodes, indices_are_sorted=True)
        return jax.nn.elu(out.mean(axis=1) + p["bias"]) + x

    params = {"left": weight(n, heads * n), "right": weight(n, heads * n), "edge": weight(8, heads * n)}
    params |= {"a": normal(heads, n, scale=n**-0.5), "bias": _bias(n)}
    ends = integers(edges, below=nodes), integers(edges, below=nodes, ramp=True)
    return Built(layer, (params, normal(nodes, n), normal(edges, 8), *ends))


@program("particle-filter-resample", GROUP)
def _particles(size: Size) -> Built:
    """One step of many particle filters: motion, ranges to landmarks, log weights, effective size, systematic resampling."""
    filters, count, landmarks = pick(size, (64, 4096, 16), (16, 2000, 12), (2, 6, 3))

    def one(particles, log_w, ranges, control, noise, offset, marks):
        heading = particles[:, 2] + control[1] + 0.05 * noise[:, 2]
        move = control[0] + 0.1 * noise[:, 0]
        moved = jnp.stack(
            [particles[:, 0] + move * jnp.cos(heading), particles[:, 1] + move * jnp.sin(heading), heading], 1
        )
        expected = jnp.linalg.norm(moved[:, None, :2] - marks[None] + 1e-6, axis=-1)
        log_lik = -0.5 * jnp.sum(((expected - ranges) / 0.5) ** 2, axis=-1)
        log_w = log_w + log_lik
        log_w = log_w - jax.nn.logsumexp(log_w)
        w = jnp.exp(log_w)
        ess = 1.0 / jnp.sum(w**2)
        estimate = w @ moved
        positions = (jnp.arange(count) + jax.nn.sigmoid(offset)) / count
        index = jnp.clip(jnp.searchsorted(jnp.cumsum(w), positions), 0, count - 1)
        resample = ess < count / 2
        new = jnp.where(resample, moved[index], moved)
        return new, jnp.where(resample, -jnp.log(float(count)), log_w), estimate, ess

    def step(particles, log_w, ranges, control, noise, offset, marks):
        return jax.vmap(one, in_axes=(0, 0, 0, 0, 0, 0, None))(particles, log_w, ranges, control, noise, offset, marks)

    cloud = normal(filters, count, 3)
    arguments = cloud, normal(filters, count), normal(filters, landmarks, offset=3.0), normal(filters, 2, scale=0.3)
    return Built(step, (*arguments, cloud, normal(filters), normal(landmarks, 2, scale=3.0)))


@program("path-integral-control", GROUP)
def _mppi(size: Size) -> Built:
    """Model predictive path integral control: rollouts of a learnt model in a scan, and controls weighted by a softmin of costs."""
    samples, horizon, state, action, hidden = pick(size, (4096, 32, 12, 4, 128), (1024, 24, 8, 2, 64), (6, 4, 3, 2, 8))

    def plan(p, x0, nominal, noise, goal):
        controls = jnp.clip(nominal[None] + 0.5 * noise, -1.0, 1.0)

        def step(carry, u):
            x, cost = carry
            h = jax.nn.silu(_apply(p[0], jnp.concatenate([x, u], -1)))
            h = jax.nn.silu(_apply(p[1], h))
            x = x + 0.05 * _apply(p[2], h)
            cost = cost + jnp.sum((x - goal) ** 2, -1) + 0.01 * jnp.sum(u**2, -1)
            return (x, cost), None

        start = jnp.broadcast_to(x0, (samples, state)), jnp.zeros(samples)
        (last, cost), _ = lax.scan(step, start, jnp.swapaxes(controls, 0, 1))
        cost = cost + 10.0 * jnp.sum((last - goal) ** 2, -1)
        beta = cost.min()
        w = jnp.exp(-(cost - beta) / 5.0)
        w = w / w.sum()
        best = jnp.einsum("k,kta->ta", w, controls)
        return (
            best,
            jnp.concatenate([best[1:], best[-1:]]),
            -5.0 * jnp.log(jnp.mean(jnp.exp(-(cost - beta) / 5.0))) + beta,
        )

    params = [_dense(state + action, hidden), _dense(hidden, hidden), _dense(hidden, state)]
    arguments = normal(state), normal(horizon, action, scale=0.2), normal(samples, horizon, action), normal(state)
    return Built(plan, (params, *arguments))
