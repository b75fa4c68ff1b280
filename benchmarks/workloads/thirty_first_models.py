"""Bodies in photographs, small phones, voices, facts and atoms, the thirty-first set: its author saw no plan."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program, weight
from benchmarks.workloads.thirty_first_parts import drawn_with_stack
from benchmarks.workloads.twenty_fifth_parts import attention, dense, dense_of
from benchmarks.workloads.twenty_sixth_parts import drawn, is_random, layers_of_nnx

GROUP = "thirty-first"


@program("bodies-of-many-people-joined-along-fields-that-point-down-limbs-linen", GROUP)
def _bodies(size: Size) -> Built:
    """This program finds the joints of all people in photographs and tells which joints belong to one person.

    It is OpenPose (Cao, 2018; CMU-Perceptual-Computing-Lab/openpose), with linen: a network gives a map per joint and a field of
    arrows per limb, peaks of the maps are candidates, and pairs of candidates are taken greedily by how well arrows lie along them.
    """
    from flax import linen as nn

    b, side, w, stages, most = pick(size, (12, 368, 64, 3, 20), (1, 160, 12, 2, 8), (1, 48, 3, 1, 3))
    limbs = [(1, 2), (1, 5), (2, 3), (3, 4), (5, 6), (6, 7), (1, 8), (8, 9), (9, 10), (1, 11), (11, 12), (12, 13)]
    limbs += [(1, 0), (0, 14), (14, 16), (0, 15), (15, 17)]
    starts, ends = np.array(limbs).T
    joints, samples, up, dtype = 18, 10, 4, half(size)
    how = {"dtype": dtype, "param_dtype": dtype}

    class Stage(nn.Module):
        """This refines maps from the features and the maps before."""

        channels: int

        @nn.compact
        def __call__(self, x):
            kept = []
            for _ in range(3):
                x = nn.relu(nn.Conv(2 * w, (3, 3), **how)(x))
                kept.append(x)
            x = nn.relu(nn.Conv(4 * w, (1, 1), **how)(jnp.concatenate(kept, axis=-1)))
            return nn.Conv(self.channels, (1, 1), **how)(x)

    class Network(nn.Module):
        """This gives arrows of limbs and maps of joints, eight times smaller than the photographs."""

        @nn.compact
        def __call__(self, x):
            for many, c in ((2, w), (2, 2 * w), (4, 4 * w)):
                for _ in range(many):
                    x = nn.relu(nn.Conv(c, (3, 3), **how)(x))
                x = nn.max_pool(x, (2, 2), strides=(2, 2))
            for c in (8 * w, 4 * w, 2 * w):
                x = nn.relu(nn.Conv(c, (3, 3), **how)(x))
            fields = Stage(2 * len(limbs))(x)
            for _ in range(stages - 1):
                fields = Stage(2 * len(limbs))(jnp.concatenate([x, fields], axis=-1))
            return fields, Stage(joints + 1)(jnp.concatenate([x, fields], axis=-1))

    model = Network()

    def paired(scores):
        """This takes pairs of candidates greedily, and tells which end belongs to each start, or -1."""

        def step(_, carry):
            left, to = carry
            at = jnp.argmax(left)
            i, j = at // most, at % most
            good = left[i, j] > 0
            to = to.at[i].set(jnp.where(good, j, to[i]))
            return jnp.where(good, left.at[i].set(-1.0).at[:, j].set(-1.0), left), to

        return lax.fori_loop(0, most, step, (scores, jnp.full(most, -1, jnp.int32)))[1]

    def run(p, photographs):
        """This gives the joints of people, best person first."""
        x = photographs.astype(dtype) / 256 - 0.5
        fields, maps = model.apply(p, x)
        small = fields.shape[1]
        large = small * up
        maps = jax.image.resize(maps[..., :joints].astype(jnp.float32), (b, large, large, joints), "cubic")
        top = lax.reduce_window(maps, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
        peaks = jnp.where((maps == top) & (maps > 0.1), maps, 0.0)
        sure, at = lax.top_k(peaks.reshape(b, -1, joints).swapaxes(1, 2), most)
        place = jnp.stack([at // large, at % large], axis=-1).astype(jnp.float32)

        one, two = place[:, starts][:, :, :, None], place[:, ends][:, :, None]
        way = two - one
        long = jnp.sqrt(jnp.sum(way * way, axis=-1, keepdims=True) + 1e-6)
        along = jnp.linspace(0.0, 1.0, samples)[:, None]
        points = one[..., None, :] + way[..., None, :] * along
        points = jnp.clip(jnp.round(points / up), 0, small - 1).astype(jnp.int32)
        points = points[..., 0] * small + points[..., 1]
        arrows = fields.astype(jnp.float32).reshape(b, small * small, len(limbs), 2).swapaxes(1, 2)
        arrows = jnp.take_along_axis(arrows, points.reshape(b, len(limbs), -1, 1), axis=2)
        arrows = arrows.reshape(*points.shape, 2)
        each = jnp.sum(arrows * (way / long)[..., None, :], axis=-1)
        score = jnp.mean(each, axis=-1) + jnp.minimum(0.5 * large / long[..., 0] - 1, 0.0)
        real = (sure[:, starts][:, :, :, None] > 0) & (sure[:, ends][:, :, None] > 0)
        fits = real & (jnp.mean(each > 0.05, axis=-1) > 0.8)
        to = jax.vmap(jax.vmap(paired))(jnp.where(fits, score, -1.0))

        body = jnp.full((b, most, joints), -1, jnp.int32)
        body = body.at[:, :, 1].set(jnp.where(sure[:, 1] > 0, jnp.arange(most), -1))
        for k, (i, j) in enumerate(limbs):
            own = body[:, :, i]
            other = jnp.take_along_axis(to[:, k], jnp.maximum(own, 0), axis=1)
            body = body.at[:, :, j].set(jnp.where(own >= 0, other, -1))
        found = (body >= 0).swapaxes(1, 2)
        which = jnp.maximum(body, 0).swapaxes(1, 2)
        total = jnp.sum(jnp.where(found, jnp.take_along_axis(sure, which, axis=2), 0.0), axis=1)
        many = jnp.sum(found, axis=1)
        where = jnp.where(found[..., None], jnp.take_along_axis(place, which[..., None], axis=2), -1.0)
        total = jnp.where((many >= 4) & (total > 0.2 * many), total, 0.0)
        order = jnp.argsort(-total, axis=1)
        where = jnp.take_along_axis(where, order[:, None, :, None], axis=2)
        return where, jnp.take_along_axis(total, order, axis=1), jnp.sum(total > 0, axis=1), sure

    structs = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, side, side, 3), dtype))
    p = jax.tree.map(_wider, drawn(structs), is_leaf=is_random)
    return Built(run, (p, integers(b, side, side, 3, below=256)))


def _wider(r: Any) -> Any:
    """Returns the description of filters, made larger by what a rectifier takes away."""
    return replace(r, scale=1.4 * r.scale) if len(r.shape) > 1 else r


@program("places-of-patches-attend-to-their-likes-between-thin-filters-classifier-nnx", GROUP)
def _phones(size: Size) -> Built:
    """This program names what photographs show with a network that is small enough for phones.

    It is MobileViT (Mehta, 2021; apple/ml-cvnets), with nnx: blocks widen, filter each channel and narrow again, and between them
    patches of two by two are unfolded, so that each of the four places attends to the same place of all other patches.
    """
    from flax import nnx

    b, side, w, h, layers, classes = pick(
        size, (96, 224, 16, 4, (2, 2), 1000), (2, 160, 8, 4, (1, 2), 100), (1, 32, 2, 2, (1, 1), 5)
    )
    dtype = half(size)
    dense, norm, conv = layers_of_nnx(dtype)

    def batch_norm(c, rngs):
        return nnx.BatchNorm(c, use_running_average=True, dtype=dtype, param_dtype=dtype, rngs=rngs)

    class Thin(nnx.Module):
        """This widens, filters each channel and narrows."""

        def __init__(self, i, o, stride, rngs):
            self.up, self.down = conv(i, 4 * i, 1, rngs), conv(4 * i, o, 1, rngs)
            self.each = conv(4 * i, 4 * i, 3, rngs, stride, 4 * i)
            self.norms = nnx.List([batch_norm(c, rngs) for c in (4 * i, 4 * i, o)])
            self.short = stride == 1 and i == o

        def __call__(self, x):
            y = nnx.silu(self.norms[0](self.up(x)))
            y = nnx.silu(self.norms[1](self.each(y)))
            y = self.norms[2](self.down(y))
            return x + y if self.short else y

    class Layer(nnx.Module):
        """This is one layer of attention and its wide part."""

        def __init__(self, n, rngs):
            self.norm1, self.norm2 = norm(n, rngs), norm(n, rngs)
            self.qkv, self.out = dense(n, 3 * n, rngs), dense(n, n, rngs)
            self.up, self.down = dense(n, 2 * n, rngs), dense(2 * n, n, rngs)

        def __call__(self, x):
            y = self.qkv(self.norm1(x)).reshape(*x.shape[:-1], 3, h, x.shape[-1] // h)
            y = attention(y[..., 0, :, :], y[..., 1, :, :], y[..., 2, :, :])
            x = x + self.out(y.reshape(x.shape))
            return x + self.down(nnx.silu(self.up(self.norm2(x))))

    class Unfolded(nnx.Module):
        """This filters near places, lets patches attend, and joins both."""

        def __init__(self, c, n, depth, rngs):
            self.near, self.enter = conv(c, c, 3, rngs), conv(c, n, 1, rngs)
            self.layers = nnx.List([Layer(n, rngs) for _ in range(depth)])
            self.norm, self.leave, self.join = norm(n, rngs), conv(n, c, 1, rngs), conv(2 * c, c, 3, rngs)

        def __call__(self, x):
            y = self.enter(nnx.silu(self.near(x)))
            many, high, wide, n = y.shape
            y = y.reshape(many, high // 2, 2, wide // 2, 2, n).transpose(0, 2, 4, 1, 3, 5)
            y = y.reshape(many, 4, (high // 2) * (wide // 2), n)
            for layer in self.layers:
                y = layer(y)
            y = self.norm(y).reshape(many, 2, 2, high // 2, wide // 2, n).transpose(0, 3, 1, 4, 2, 5)
            y = nnx.silu(self.leave(y.reshape(many, high, wide, n)))
            return self.join(jnp.concatenate([x, y], axis=-1))

    class Network(nnx.Module):
        """This is the whole network."""

        def __init__(self, rngs):
            self.stem = conv(3, w, 3, rngs, 2)
            shapes = ((w, 2 * w, 1), (2 * w, 4 * w, 2), (4 * w, 4 * w, 1), (4 * w, 6 * w, 2), (6 * w, 8 * w, 2))
            self.thin = nnx.List([Thin(*s, rngs) for s in shapes])
            self.far = nnx.List([Unfolded(6 * w, 9 * w - w % 4, layers[0], rngs)])
            self.far.append(Unfolded(8 * w, 12 * w, layers[1], rngs))
            self.last, self.head = conv(8 * w, 40 * w, 1, rngs), dense(40 * w, classes, rngs)

        def __call__(self, x):
            x = nnx.silu(self.stem(x))
            for k, thin in enumerate(self.thin):
                x = thin(x)
                if k >= 3:
                    x = self.far[k - 3](x)
            x = jnp.mean(nnx.silu(self.last(x)), axis=(1, 2))
            return self.head(x).astype(jnp.float32)

    graph, weights = nnx.split(nnx.eval_shape(lambda: Network(nnx.Rngs(0))))

    def run(weights, photographs, flip):
        """This names photographs, some of which are mirrored, by the mean of two views."""
        x = photographs.astype(jnp.float32) / 255
        x = (x - jnp.array([0.485, 0.456, 0.406])) / jnp.array([0.229, 0.224, 0.225])
        x = jnp.where((flip > 0)[:, None, None, None], x[:, :, ::-1], x).astype(dtype)
        chance = jax.nn.softmax(nnx.merge(graph, weights)(x), axis=-1)
        best, name = lax.top_k(chance, 5)
        return best, name, -jnp.sum(chance * jnp.log(chance + 1e-9), axis=-1)

    return Built(run, (drawn(weights), integers(b, side, side, 3, below=256), integers(b, below=2)))


@program("voices-as-shifts-of-a-mixture-in-few-directions-then-two-spreads", GROUP)
def _voices(size: Size) -> Built:
    """This program tells which enrolled speaker each recording comes from, in the way used before deep networks.

    It is the i-vector (Dehak, 2011; as in kaldi's recipe for sre10): cepstra with their changes, quiet frames left out, counts and
    means over a mixture of bells, a few numbers per recording by a solve, and scores from spreads within and between speakers.
    """
    b, t, bands, cepstra, c, r, low, known = pick(
        size, (48, 1500, 40, 20, 1024, 300, 150, 1211), (3, 300, 24, 13, 128, 60, 30, 77), (2, 20, 6, 3, 4, 3, 2, 3)
    )
    d = 3 * cepstra
    k, n = np.meshgrid(np.arange(cepstra), np.arange(bands), indexing="ij")
    cosines = (np.cos(np.pi * k * (n + 0.5) / bands) * (2 / bands) ** 0.5).astype(np.float32)

    def changes(x):
        """This is the slope over five frames."""
        y = jnp.pad(x, ((0, 0), (2, 2), (0, 0)), mode="edge")
        return (2 * (y[:, 4:] - y[:, :-4]) + (y[:, 3:-1] - y[:, 1:-3])) / 10

    def centred(x, reach):
        """This takes off the mean over near frames and divides by their spread."""
        y = jnp.cumsum(jnp.pad(x, ((0, 0), (1, 0), (0, 0))), axis=1)
        z = jnp.cumsum(jnp.pad(x * x, ((0, 0), (1, 0), (0, 0))), axis=1)
        first = jnp.clip(jnp.arange(t) - reach, 0, t)
        last = jnp.clip(jnp.arange(t) + reach + 1, 0, t)
        many = (last - first)[:, None]
        mean, square = (y[:, last] - y[:, first]) / many, (z[:, last] - z[:, first]) / many
        return (x - mean) * lax.rsqrt(jnp.maximum(square - mean * mean, 0.0) + 1e-2)

    def run(p, spectrum, length, enrolled):
        """This gives scores of all recordings against all speakers."""
        real = jnp.arange(t) < t - length[:, None]
        loud = jnp.mean(spectrum, axis=-1)
        mean = jnp.sum(loud * real, axis=1, keepdims=True) / jnp.sum(real, axis=1, keepdims=True)
        near = lax.reduce_window((loud > mean - 0.1).astype(jnp.float32), 0.0, lax.add, (1, 5), (1, 1), "SAME")
        voiced = (real & (near >= 3)).astype(jnp.float32)
        x = spectrum @ cosines.T
        one = changes(x)
        x = centred(jnp.concatenate([x, one, changes(one)], axis=-1), 150)

        sharp = jnp.exp(p["sharp"])
        quadratic = jnp.einsum("btd,cd->btc", x * x, sharp) - 2 * jnp.einsum("btd,cd->btc", x, sharp * p["mean"])
        whole = p["share"] + 0.5 * jnp.sum(p["sharp"] - sharp * p["mean"] ** 2, axis=-1)
        post = jax.nn.softmax(whole - 0.5 * quadratic, axis=-1)
        post = jnp.where(post > 0.01, post, 0.0)
        post = post / jnp.sum(post, axis=-1, keepdims=True) * voiced[..., None]
        count = jnp.sum(post, axis=1)
        first = jnp.einsum("btc,btd->bcd", post, x) - count[..., None] * p["mean"]

        scaled = p["ways"] * sharp[..., None]
        inner = jnp.einsum("cdr,cds->crs", scaled, p["ways"])
        precision = jnp.eye(r) + jnp.einsum("bc,crs->brs", count, inner)
        right = jnp.einsum("bcd,cdr->br", first, scaled)
        factor = jnp.linalg.cholesky(precision)
        few = jax.scipy.linalg.cho_solve((factor, True), right[..., None])[..., 0]
        doubt = r * 1.0 - 2 * jnp.sum(jnp.log(jnp.diagonal(factor, axis1=1, axis2=2)), axis=-1)

        def projected(v):
            v = (v - p["centre"]) @ p["lower"]
            return v * lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + 1e-9)

        test, voice = projected(few), projected(enrolled)
        between = p["between"] @ p["between"].T / low + 0.1 * jnp.eye(low)
        within = p["within"] @ p["within"].T / low + 0.1 * jnp.eye(low)
        total = between + within
        solved = between @ jnp.linalg.inv(total)
        left = jnp.linalg.inv(total - solved @ between)
        own = jnp.linalg.inv(total) - left
        cross = left @ solved
        score = jnp.sum((test @ own) * test, axis=-1)[:, None] + jnp.sum((voice @ own) * voice, axis=-1)
        score = 0.5 * score + test @ cross @ voice.T
        best, who = lax.top_k(score, 3)
        spread = (score - jnp.mean(score, axis=1, keepdims=True)) / (jnp.std(score, axis=1, keepdims=True) + 1e-6)
        return best, who, jnp.max(spread, axis=1), doubt, jnp.sum(voiced, axis=1)

    p = {"sharp": normal(c, d, scale=0.3), "mean": normal(c, d), "share": normal(c, scale=0.3)}
    p |= {"ways": normal(c, d, r, scale=0.2 * r**-0.5), "centre": normal(r, scale=0.1), "lower": weight(r, low)}
    p |= {"between": normal(low, low), "within": normal(low, low)}
    return Built(run, (p, normal(b, t, bands), integers(b, below=t // 3), normal(known, r)))


@program("paths-from-a-thing-to-all-others-summed-by-learned-steps-grad-haiku", GROUP)
def _paths(size: Size) -> Built:
    """This program gives the gradients of a network that guesses missing facts from all paths between two things.

    It is NBFNet (Zhu, 2021; DeepGraphLearning/NBFNet), with haiku: as in the method of Bellman and Ford, each round sends what
    nodes hold along all facts, multiplied by their kind, and nodes keep the sum, the largest, the mean and the spread.
    """
    import haiku as hk

    b, nodes, edges, kinds, n, rounds, others = pick(
        size, (4, 14541, 120000, 474, 32, 4, 32), (4, 701, 4000, 40, 16, 4, 16), (2, 9, 20, 3, 4, 2, 3)
    )

    @hk.without_apply_rng
    @hk.transform
    def network(head, kind, tails, source, label, target):
        """This gives scores of facts [b, 1 + others]."""
        asked = hk.Embed(kinds, n, name="asked")(kind)
        rows = jnp.arange(b)
        first = jnp.zeros((nodes, b, n)).at[head, rows].set(asked)
        easy = (source[:, None] == head) & jnp.any(target[:, None, None] == tails, axis=-1)
        kept = jnp.where(easy, 0.0, 1.0)[..., None]
        degree = jax.ops.segment_sum(jnp.ones(edges), target, nodes, indices_are_sorted=True) + 1
        scale = jnp.log(degree) / jnp.mean(jnp.log(degree))
        scales = jnp.stack([jnp.ones(nodes), scale, 1 / jnp.maximum(scale, 1e-2)], axis=-1)

        def step(x):
            """This is one round."""
            ways = hk.Linear(kinds * n, name="ways")(asked).reshape(b, kinds, n).swapaxes(0, 1)
            sent = x[source] * ways[label] * kept
            both = jnp.concatenate([sent, sent * sent], axis=-1)
            both = jax.ops.segment_sum(both, target, nodes, indices_are_sorted=True)
            total, square = both[..., :n] + first, both[..., n:] + first * first
            top = jnp.maximum(jax.ops.segment_max(sent, target, nodes, indices_are_sorted=True), first)
            mean = total / degree[:, None, None]
            spread = jnp.sqrt(jnp.maximum(square / degree[:, None, None] - mean * mean, 1e-6))
            pooled = jnp.concatenate([mean, top, spread], axis=-1)
            pooled = (pooled[..., None] * scales[:, None, None]).reshape(nodes, b, 9 * n)
            y = hk.Linear(n, name="join")(jnp.concatenate([x, pooled], axis=-1))
            return x + jax.nn.relu(hk.LayerNorm(-1, True, True, name="norm")(y))

        x = hk.experimental.layer_stack(rounds, name="rounds")(step)(first)
        found = jnp.concatenate([x[tails, rows[:, None]], jnp.broadcast_to(asked[:, None], (b, 1 + others, n))], -1)
        return hk.Linear(1, name="head")(jax.nn.relu(hk.Linear(2 * n, name="wide")(found)))[..., 0]

    def loss(p, *facts):
        """This judges the true fact against drawn ones, the hardest of which count most."""
        scores = network.apply(p, *facts)
        share = lax.stop_gradient(jax.nn.softmax(scores[:, 1:] / 0.5, axis=-1))
        false = jnp.sum(share * jax.nn.softplus(scores[:, 1:]), axis=-1)
        rank = 1 + jnp.sum(scores[:, 1:] >= scores[:, :1], axis=-1)
        return jnp.mean(jax.nn.softplus(-scores[:, 0]) + false) / 2, (rank, jnp.mean(1.0 / rank))

    def grads(p, *facts):
        """This gives the loss, the ranks of true facts and the gradients."""
        return jax.value_and_grad(loss, has_aux=True)(p, *facts)

    facts = (integers(b, below=nodes), integers(b, below=kinds), integers(b, 1 + others, below=nodes))
    facts += (integers(edges, below=nodes), integers(edges, below=kinds), integers(edges, below=nodes, ramp=True))
    structs = jax.eval_shape(network.init, jax.random.key(0), *(f.struct for f in facts))
    return Built(grads, (drawn_with_stack(structs, "rounds"), *facts))


def _gaunt() -> np.ndarray:
    """Returns the integrals over the sphere of products of three real harmonics up to the second order, nine by nine by nine."""
    height, mass = np.polynomial.legendre.leggauss(8)
    turn = 2 * np.pi * np.arange(16) / 16
    z, angle = np.meshgrid(height, turn, indexing="ij")
    flat = np.sqrt(1 - z * z)
    y = np.asarray(_harmonics(np.stack([flat * np.cos(angle), flat * np.sin(angle), z], axis=-1), np))
    return np.einsum("i,ija,ijb,ijc->abc", mass / 32, y, y, y).astype(np.float32)


def _harmonics(u: Any, xp: Any) -> Any:
    """Returns the nine real harmonics of directions [..., 3], whose mean squares over the sphere are one."""
    x, y, z = u[..., 0], u[..., 1], u[..., 2]
    a, c = 3**0.5, 15**0.5
    parts = [xp.ones_like(x), a * x, a * y, a * z, c * x * y, c * y * z, 5**0.5 * (3 * z * z - 1) / 2]
    return xp.stack([*parts, c * x * z, c / 2 * (x * x - y * y)], axis=-1)


@program("atoms-by-products-of-sums-of-harmonics-energies-and-pulls", GROUP)
def _atoms(size: Size) -> Built:
    """This program tells the energies of molecules and the pulls on their atoms with few, rich messages.

    It is MACE (Batatia, 2022; ACEsuit/mace-jax), with products of harmonics by integrals of three (Luo, 2024): neighbours are
    summed once, and sums are multiplied with themselves twice, which tells of three and four atoms at a time.
    """
    molecules, m, near, k, bells, kinds = pick(size, (64, 30, 24, 64, 8, 10), (6, 15, 12, 16, 8, 5), (2, 4, 3, 2, 3, 2))
    atoms, edges, reach = molecules * m, molecules * m * near, 6.0
    gaunt, order = _gaunt(), np.array([0, 1, 1, 1, 2, 2, 2, 2, 2])

    def mixed(w, x):
        """This mixes channels, with one matrix per order."""
        return jnp.einsum("pkl,akp->alp", w[order], x)

    def energy(p, place, kind, source, target):
        """This is the energy of all molecules together, and of each."""
        way = place[source] - place[target]
        long = jnp.sqrt(jnp.sum(way * way, axis=-1) + 1e-6)
        live = (source != target) & (long < reach)
        part = jnp.minimum(long / reach, 1.0)
        fade = 1 - 21 * part**5 + 35 * part**6 - 15 * part**7
        radial = jnp.sin(jnp.pi * jnp.arange(1, bells + 1) * part[:, None]) * (2 / reach) ** 0.5 / (long[:, None] + 0.1)
        radial = radial * (fade * live)[:, None]
        direction = _harmonics(way / long[:, None], jnp)
        turned = jnp.einsum("eq,pqr->epr", direction, gaunt)
        x = jnp.zeros((atoms, k, 9)).at[..., 0].set(p["kinds"][kind])
        each = p["alone"][kind]
        for q in p["layers"]:
            y = jax.nn.silu(dense(q["radial1"], radial))
            y = (y @ q["radial2"]).reshape(edges, k, 3)[..., order]
            sent = jnp.einsum("ekp,epr->ekr", mixed(q["before"], x)[source], turned) * y
            one = jax.ops.segment_sum(sent, target, atoms, indices_are_sorted=True) / near**0.5
            one = mixed(q["after"], one)
            two = jnp.einsum("abc,nka,nkb->nkc", gaunt, one, one)
            three = jnp.einsum("abc,nka,nkb->nkc", gaunt, two, one)
            own = q["product"][kind][..., order]
            body = own[:, 0] * one + 0.3 * own[:, 1] * two + 0.1 * own[:, 2] * three
            x = mixed(q["join"], body) + mixed(q["short"], x)
            flat = x[..., 0]
            each = each + (jax.nn.silu(dense(q["read1"], flat)) @ q["read2"])[:, 0]
        whole = jax.ops.segment_sum(each, jnp.arange(atoms) // m, molecules, indices_are_sorted=True)
        return jnp.sum(whole), whole

    def run(p, place, kind, partner):
        """This gives energies, pulls and how far molecules are from rest."""
        target = jnp.arange(edges) // near
        source = target // m * m + partner
        (_, whole), slope = jax.value_and_grad(energy, argnums=1, has_aux=True)(p, place, kind, source, target)
        pull = -slope
        stress = jnp.einsum("aki,akj->aij", place.reshape(molecules, m, 3), pull.reshape(molecules, m, 3))
        return whole, pull, stress, jnp.max(jnp.sqrt(jnp.sum(pull * pull, axis=-1)).reshape(molecules, m), axis=1)

    def layer_of():
        """This describes one layer."""
        q = {s: normal(3, k, k, scale=k**-0.5) for s in ("before", "after", "join", "short")}
        q |= {"radial1": dense_of(bells, 64), "radial2": weight(64, 3 * k), "product": normal(kinds, 3, k, 3)}
        return q | {"read1": dense_of(k, 16), "read2": weight(16, 1)}

    p = {"kinds": normal(kinds, k), "alone": normal(kinds), "layers": [layer_of(), layer_of()]}
    inputs = (normal(atoms, 3, scale=1.6), integers(atoms, below=kinds), integers(edges, below=m))
    return Built(run, (p, *inputs))
