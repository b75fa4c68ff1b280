"""Cones of entailment, unlikely repeats, panoptic segments, clusters with shapes, kernels of layers: their author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.thirty_fifth_parts import stack_of
from benchmarks.workloads.twenty_fifth_parts import dense, dense_of, layer_norm, norm_of
from benchmarks.workloads.twenty_sixth_parts import state_of

GROUP = "forty-first"


@program("meru-pictures-and-captions-on-a-hyperboloid-with-cones-of-entailment-adamw-step", GROUP)
def _meru(size: Size) -> Built:
    """This program trains heads that put pictures and captions on a hyperboloid, where captions lie before their pictures.

    It is MERU (Desai, 2023; facebookresearch/meru), with optax: rows are lifted by the exponential map, distances are contrasted
    both ways, and a picture outside the cone of its caption is pulled in; curvature, sizes and heat are learned as logarithms.
    """
    import optax

    b, n, m, d = pick(size, (4096, 1024, 768, 512), (384, 256, 192, 128), (3, 6, 5, 4))
    dtype = half(size)
    optimiser = optax.adamw(5e-4, b2=0.98, weight_decay=0.2, mask=lambda p: jax.tree.map(lambda z: z.ndim > 1, p))

    def lifted(x, curve):
        """This is the exponential map at the root of a hyperboloid, for the part in space."""
        length = jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True))
        long = jnp.maximum(jnp.sqrt(curve) * length, 1e-8)
        return x * jnp.sinh(jnp.minimum(long, 11.0)) / long

    def times(x, curve):
        """This is the part in time."""
        return jnp.sqrt(1 / curve + jnp.sum(x**2, axis=-1))

    def head(q, x):
        """This maps features of a frozen tower."""
        x = layer_norm(q["norm"], x)
        return dense(q["last"], jax.nn.gelu(dense(q["first"], x), approximate=False)).astype(jnp.float32)

    def loss(p, picture, caption):
        """This is the contrast of distances and a share of what is outside of cones."""
        curve = jnp.clip(jnp.exp(p["curve"]), 0.1, 10.0)
        x, y = head(p["eye"], picture), head(p["text"], caption)
        x, y = lifted(x * jnp.exp(p["sizes"][0]), curve), lifted(y * jnp.exp(p["sizes"][1]), curve)
        x_time, y_time = times(x, curve), times(y, curve)
        inner = x @ y.T - x_time[:, None] * y_time
        away = jnp.arccosh(jnp.maximum(-curve * inner, 1 + 1e-6)) / jnp.sqrt(curve)
        logits = -away * jnp.exp(jnp.minimum(p["heat"], 4.6))
        place = jnp.arange(b)
        across = optax.softmax_cross_entropy_with_integer_labels(logits, place)
        down = optax.softmax_cross_entropy_with_integer_labels(logits.T, place)
        own = curve * jnp.diag(inner)
        length = jnp.sqrt(jnp.sum(y**2, axis=-1))
        cosine = (x_time + y_time * own) / (length * jnp.sqrt(jnp.maximum(own**2 - 1, 1e-6)))
        outer = jnp.arccos(jnp.clip(cosine, -1 + 1e-6, 1 - 1e-6))
        open_ = jnp.arcsin(jnp.clip(0.2 / (length * jnp.sqrt(curve)), 0.0, 1 - 1e-6))
        outside = jnp.maximum(outer - open_, 0.0)
        value = 0.5 * jnp.mean(across + down) + 0.2 * jnp.mean(outside)
        found = jnp.stack([jnp.argmax(logits, axis=k) == place for k in (0, 1)])
        return value, (found, outside, jnp.sqrt(jnp.sum(x**2, axis=-1)), length, jnp.diag(away))

    def run(p, state, picture, caption):
        """This gives the loss, new weights and state, hits both ways, and how pairs lie in the cones."""
        (value, seen), slopes = jax.value_and_grad(loss, has_aux=True)(p, picture, caption)
        change, state = optimiser.update(slopes, state, p)
        return value, optax.apply_updates(p, change), jax.tree.leaves(state), optax.tree.norm(slopes), *seen

    def head_of(i):
        """This describes a head."""
        last = {"w": normal(d, d, dtype=dtype, scale=d**-0.5), "b": normal(d, dtype=dtype, scale=0.02)}
        return {"norm": norm_of(i, dtype), "first": dense_of(i, d, dtype), "last": last}

    p = {"eye": head_of(n), "text": head_of(m), "curve": normal(scale=0.1), "heat": normal(scale=0.1, offset=2.0)}
    p["sizes"] = normal(2, scale=0.05, offset=-0.5 * float(np.log(d)))
    return Built(run, (p, state_of(optimiser, p), normal(b, n, dtype=dtype), normal(b, m, dtype=dtype)))


@program("words-already-said-made-unlikely-and-repeated-fours-punished-beside-the-truth-grad", GROUP)
def _unlikelihood(size: Size) -> Built:
    """This program teaches a model of words not to say again what it said before, and gives slopes of all its weights.

    It is the unlikelihood loss of Welleck (2019; facebookresearch/unlikelihood_training): at each place all earlier words but the
    true one are pushed down, and in drawn texts each word of a repeated run of four is pushed down.
    """
    b, long, n, wide, depth, words = pick(
        size, (4, 256, 1024, 4096, 3, 50257), (2, 64, 128, 256, 2, 4001), (2, 7, 6, 8, 2, 11)
    )
    dtype, heads = half(size), pick(size, 16, 4, 2)
    d, runs = n // heads, 4

    def body(p, word):
        """This tells logarithms of chances of all next words."""
        x = p["table"][word] + p["places"]
        mask = jnp.tril(jnp.ones((long, long), bool))

        def layer(x, q):
            """This is one layer."""
            y = layer_norm({"scale": q["norm1"], "shift": jnp.zeros((), dtype)}, x)
            query, key, value = jnp.split((y @ q["qkv"]).reshape(b, long, 3 * heads, d), 3, axis=2)
            y = jax.nn.dot_product_attention(query, key, value, mask=mask)
            x = x + y.reshape(b, long, n) @ q["out"]
            y = layer_norm({"scale": q["norm2"], "shift": jnp.zeros((), dtype)}, x)
            return x + jax.nn.gelu(y @ q["up"]) @ q["down"], None

        x, _ = lax.scan(layer, x, p["layers"])
        logits = layer_norm(p["norm"], x) @ p["table"].T
        return jax.nn.log_softmax(logits.astype(jnp.float32) * n**-0.5, axis=-1)

    def run(p, text, drawn, short):
        """This gives the loss, its parts, slopes, surprises, how many words are pushed down, and which words repeat."""
        real = (jnp.arange(long) < (long - short)[:, None])[:, 1:]
        before, true = text[:, :-1], text[:, 1:]
        place = jnp.arange(long - 1)

        def said_of(word):
            """This marks all words of one text that were said before each place, but not the true one."""
            first = jnp.full(words, long).at[word[:-1]].min(place)
            said = first <= place[:, None]
            return said.at[place, word[1:]].set(False)

        def repeats_of(word):
            """This marks places of one text that lie in a run which was there before."""
            padded = jnp.concatenate([word, -1 - jnp.arange(runs - 1)])
            piece = jnp.stack([padded[k : k + long] for k in range(runs)], axis=1)
            same = jnp.all(piece[:, None] == piece, axis=-1) & (jnp.arange(long) < jnp.arange(long)[:, None])
            again = jnp.any(same, axis=1)
            return sum(jnp.pad(again, (k, 0))[:long] for k in range(runs)) > 0

        said = jax.vmap(said_of)(text) & real[..., None]
        again = jax.vmap(repeats_of)(drawn)

        def loss(p):
            """This is the sum of the surprise and of both punishments."""
            logp = body(p, text)[:, :-1]
            surprise = -jnp.take_along_axis(logp, true[..., None], axis=-1)[..., 0] * real
            down = -jnp.log(jnp.maximum(1 - jnp.exp(logp), 1e-5))
            down = jnp.sum(jnp.where(said, down, 0.0), axis=-1)
            own = jnp.take_along_axis(body(p, drawn)[:, :-1], drawn[:, 1:, None], axis=-1)[..., 0]
            whole = -jnp.log(jnp.maximum(1 - jnp.exp(own), 1e-5)) * again[:, 1:]
            many = jnp.sum(real)
            parts = jnp.stack([jnp.sum(surprise) / many, jnp.sum(down) / many, jnp.mean(whole)])
            return jnp.sum(parts), (parts, surprise, down)

        (value, (parts, surprise, down)), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        return value, parts, slopes, surprise, down, jnp.sum(said, axis=-1), again, jnp.any(before == true, axis=1)

    shapes = {"norm1": (n,), "norm2": (n,), "qkv": (n, 3 * n), "out": (n, n), "up": (n, wide), "down": (wide, n)}
    p = {
        "table": normal(words, n, dtype=dtype),
        "places": normal(long, n, dtype=dtype, scale=0.3),
        "norm": norm_of(n, dtype),
        "layers": stack_of(depth, dtype, **shapes),
    }
    texts = integers(b, long, below=words), integers(b, long, below=max(words // 4000, 3))
    return Built(run, (p, *texts, integers(b, below=long // 2)))


@program("panoptic-quality-of-things-and-stuff-with-void-and-bands-along-edges", GROUP)
def _panoptic(size: Size) -> Built:
    """This program marks pictures in which every pixel has a class and things have numbers, whole and along their edges.

    It is the panoptic quality (Kirillov, 2019; cocodataset/panopticapi) with its boundary form (Cheng, 2021): segments that share
    more than half are pairs, pixels without a truth do not count, and segments that lie mostly there are forgiven.
    """
    b, rows, columns, segments, kinds, cells, band = pick(
        size, (8, 768, 1024, 96, 80, 12, 9), (2, 192, 256, 48, 20, 8, 3), (2, 8, 8, 6, 3, 3, 1)
    )
    high, wide = rows // cells + 1, columns // cells + 1

    def drawn(cell, place):
        """This makes maps of segments [b, rows, columns] whose edges are bent."""
        i = jnp.arange(rows)[:, None] + (6.0 * jnp.sin(jnp.arange(columns) / 17.0 + place[:, :1, None])).astype(
            jnp.int32
        )
        j = jnp.arange(columns) + (6.0 * jnp.cos(jnp.arange(rows)[:, None] / 13.0 + place[:, 1:, None])).astype(
            jnp.int32
        )
        i, j = (jnp.clip(z // k, 0, cells - 1) for z, k in ((i, high), (j, wide)))
        return cell[jnp.arange(b)[:, None, None], i, j]

    def edges(x):
        """This marks pixels near an edge of their segment."""
        window = (1, 2 * band + 1, 2 * band + 1)
        low = lax.reduce_window(x, jnp.int32(2**30), lax.min, window, (1, 1, 1), "SAME")
        top = lax.reduce_window(x, jnp.int32(-1), lax.max, window, (1, 1, 1), "SAME")
        return low != top

    def shared(true, told, mask):
        """This counts pixels of pairs of segments [b, segments, segments] within a mask."""
        pair = (jnp.arange(b)[:, None, None] * segments + true) * segments + told
        count = jax.ops.segment_sum(mask.reshape(-1).astype(jnp.int32), pair.reshape(-1), b * segments * segments)
        return count.reshape(b, segments, segments)

    def run(cell, kind, swaps, guess, place):
        """This gives qualities by class, whole and along edges, counts of pairs and of faults, and shares of all pairs."""
        true = drawn(cell, place)
        moved = jnp.where((swaps < 2)[:, :, :1], jnp.roll(cell, 1, axis=2), cell)
        told = drawn(moved, place + 0.7)
        told_kind = jnp.where(guess < 3, (kind + guess) % kinds, kind)
        true_edge, told_edge = edges(true), edges(told)
        everywhere = jnp.ones_like(true, bool)
        whole = shared(true, told, everywhere)
        near = [shared(true, told, z) for z in (true_edge & told_edge, true_edge, told_edge)]
        size_true, size_told, void = jnp.sum(whole, axis=2), jnp.sum(whole, axis=1), whole[:, 0]
        alike = kind[:, :, None] == told_kind[:, None]
        real = (jnp.arange(segments) > 0) & (size_true > 0)
        both = alike & real[:, :, None]

        def ratio(inside, one, two, lost):
            """This is the share of what is in both among what is in one."""
            return inside / jnp.maximum(one[:, :, None] + (two - lost)[:, None] - inside, 1)

        share = jnp.where(both, ratio(whole, size_true, size_told, void), 0.0)
        rim = jnp.sum(near[1], axis=2), jnp.sum(near[2], axis=1), near[2][:, 0]
        least = jnp.where(both, jnp.minimum(share, ratio(near[0], *rim)), 0.0)

        def quality(share):
            """This tells qualities, and counts by class."""
            pair = share > 0.5
            found, used = jnp.any(pair, axis=2), jnp.any(pair, axis=1)
            forgiven = void / jnp.maximum(size_told, 1) > 0.5
            extra = (size_told > 0) & ~used & ~forgiven
            parts = [jnp.where(found, jnp.sum(jnp.where(pair, share, 0.0), axis=2), 0.0), found, extra, real & ~found]
            classes = [kind, kind, told_kind, kind]
            total, good, bad, missed = (
                jnp.zeros(kinds).at[k].add(z.astype(jnp.float32)) for z, k in zip(parts, classes, strict=True)
            )
            right, all_ = total / jnp.maximum(good, 1), good / jnp.maximum(good + 0.5 * bad + 0.5 * missed, 1)
            return jnp.stack([right * all_, right, all_, good, bad, missed])

        table = jnp.stack([quality(share), quality(least)])
        seen = table[:, 3] + table[:, 5] > 0
        things = jnp.arange(kinds) < kinds * 3 // 5
        groups = jnp.stack([seen, seen & things, seen & ~things])
        mean = (
            jnp.sum(table[None, :, :3] * groups[:, :, None], axis=3)
            / jnp.maximum(jnp.sum(groups, axis=2), 1)[..., None]
        )
        return table, mean, jnp.max(share, axis=2), size_true, jnp.mean(true_edge, axis=(1, 2))

    inputs = integers(b, cells, cells, below=segments), integers(b, segments, below=kinds)
    inputs += integers(b, cells, cells, below=8), integers(b, segments, below=12)
    return Built(run, (*inputs, normal(b, 2)))


@program("gustafson-kessel-fuzzy-clusters-with-own-shapes-many-counts-judged-scan", GROUP)
def _fuzzy(size: Size) -> Built:
    """This program shares points among clusters of many shapes, with different numbers of clusters, and judges which number fits.

    It is the clustering of Gustafson and Kessel (1979) with the safe spreads of Babuska (2002): each cluster measures distance by
    the inverse of its own spread of volume one, and Xie and Beni's index and entropies of shares compare the numbers.
    """
    n, d, kinds, counts, rounds = pick(
        size, (32768, 12, 8, (4, 8, 12), 8), (3000, 6, 5, (3, 5, 7), 10), (20, 2, 2, (2, 3, 4), 3)
    )
    power, blend, most = 2.0, 0.1, 1e4

    def safe(spread, whole):
        """This mixes a spread with a round one and lifts small widths; it gives spreads, their inverses and volumes."""
        round_ = jnp.exp(jnp.linalg.slogdet(whole)[1] / d) * jnp.eye(d)
        value, way = jnp.linalg.eigh((1 - blend) * spread + blend * round_)
        value = jnp.maximum(value, value[..., -1:] / most)
        volume = jnp.exp(jnp.mean(jnp.log(value), axis=-1))
        inverse = (way / value[..., None, :]) @ jnp.swapaxes(way, -1, -2)
        return inverse * volume[..., None, None], volume

    def run(middle, turn, kind, noise, start):
        """This gives shares of the best number, middles, indices of all numbers, volumes, and how shares changed by round."""
        x = 3.0 * middle[kind] + jnp.einsum("nd,nde->ne", noise, 0.7 * turn[kind])
        x = (x - jnp.mean(x, axis=0)) / jnp.std(x, axis=0)
        whole = x.T @ x / n

        def clustered(many):
            """This is the clustering with one number of clusters."""

            def measure(share):
                """This gives middles, squares of distances and volumes for shares."""
                weight = share**power
                total = jnp.sum(weight, axis=0)
                centre = weight.T @ x / total[:, None]
                gap = x[:, None] - centre
                spread = jnp.einsum("nc,nci,ncj->cij", weight, gap, gap) / total[:, None, None]
                shape, volume = safe(spread, whole)
                return centre, jnp.maximum(jnp.einsum("nci,cij,ncj->nc", gap, shape, gap), 1e-9), volume

            def step(share, _):
                """This is one round."""
                _, away, _ = measure(share)
                near = away ** (-1 / (power - 1))
                fresh = near / jnp.sum(near, axis=1, keepdims=True)
                return fresh, (jnp.max(jnp.abs(fresh - share)), jnp.sum(share**power * away))

            first = jnp.sum((x[:, None] - x[start[:many]]) ** 2, axis=-1) + 0.1
            first = (1 / first) / jnp.sum(1 / first, axis=1, keepdims=True)
            share, told = lax.scan(step, first, None, length=rounds)
            centre, away, volume = measure(share)
            apart = jnp.sum((centre[:, None] - centre) ** 2, axis=-1) + 1e9 * jnp.eye(many)
            xie = jnp.sum(share**power * away) / (n * jnp.maximum(jnp.min(apart), 1e-6))
            entropy = -jnp.mean(jnp.sum(share * jnp.log(share + 1e-12), axis=1)) / jnp.log(many)
            crisp = jnp.mean(jnp.sum(share**2, axis=1))
            table = jnp.zeros((many, kinds)).at[jnp.argmax(share, axis=1), kind].add(1.0)
            pure = jnp.sum(jnp.max(table, axis=1)) / n
            return share, centre, volume, jnp.stack([xie, entropy, crisp, pure]), jnp.stack(told)

        results = [clustered(k) for k in counts]
        marks = jnp.stack([r[3] for r in results])
        wide = max(counts)
        shares = jnp.stack([jnp.pad(r[0], ((0, 0), (0, wide - r[0].shape[1]))) for r in results])
        best = jnp.argmin(marks[:, 0])
        return shares[best], best, marks, [r[1:3] for r in results], jnp.stack([r[4] for r in results])

    inputs = normal(kinds, d), normal(kinds, d, d, scale=d**-0.5), integers(n, below=kinds), normal(n, d)
    return Built(run, (*inputs, integers(n, below=n, distinct=True)))


@program("layers-of-two-networks-compared-by-aligned-kernels-summed-over-small-batches-scan", GROUP)
def _aligned_kernels(size: Size) -> Built:
    """This program tells which layers of two networks see inputs alike, from many small batches.

    It is the centred kernel alignment of Kornblith (2019) with sums over batches that have no bias (Nguyen, 2021), with a plain
    kernel and with bells, for two residual networks of different width and depth that mix patches and channels.
    """
    batches, b, places, inputs, (n, m), (deep, deeper) = pick(
        size, (6, 256, 64, 192, (384, 256), (8, 16)), (3, 48, 16, 48, (96, 64), (4, 6)), (2, 5, 3, 4, (4, 6), (2, 3))
    )
    dtype = half(size)

    def states(p, x):
        """This gives means of states after every layer [layers, b, n]."""

        def layer(x, q):
            """This mixes places and then channels."""
            zero = jnp.zeros((), dtype)
            y = layer_norm({"scale": q["norm1"], "shift": zero}, x)
            y = jnp.einsum("bpn,pq->bqn", y, q["mix"])
            x = x + jnp.einsum("bqn,qp->bpn", jax.nn.gelu(y, approximate=False), q["back"])
            y = layer_norm({"scale": q["norm2"], "shift": zero}, x)
            x = x + jax.nn.gelu(y @ q["up"], approximate=False) @ q["down"]
            return x, jnp.mean(x.astype(jnp.float32), axis=1)

        return lax.scan(layer, x @ p["enter"], p["layers"])[1]

    def kernels(x):
        """This gives plain and bell-shaped kernels [2, layers, b, b] without their diagonals."""
        plain = jnp.einsum("lin,ljn->lij", x, x)
        square = jnp.diagonal(plain, axis1=1, axis2=2)
        away = jnp.maximum(square[:, :, None] + square[:, None] - 2 * plain, 0.0)
        wide = jnp.median(away.reshape(away.shape[0], -1), axis=1)[:, None, None]
        bells = jnp.exp(-away / jnp.maximum(wide, 1e-6))
        plain = plain / jnp.mean(square, axis=1)[:, None, None]
        return jnp.stack([plain, bells]) * (1 - jnp.eye(b))

    def dependence(x, y):
        """This is the measure of Hilbert and Schmidt without bias, for all pairs of kernels."""
        inner = jnp.einsum("kxij,kyij->kxy", x, y)
        one, two = jnp.sum(x, axis=3), jnp.sum(y, axis=3)
        means = jnp.sum(one, axis=2)[:, :, None] * jnp.sum(two, axis=2)[:, None] / ((b - 1) * (b - 2))
        return (inner + means - 2 / (b - 2) * jnp.einsum("kxi,kyi->kxy", one, two)) / (b * (b - 3))

    def run(p, q, patches):
        """This gives likeness of layers between and within networks, the best partners, and spreads over batches."""

        def one(total, x):
            """This adds one batch."""
            x = x.astype(dtype)
            k, g = kernels(states(p, x)), kernels(states(q, x))
            both = dependence(k, k), dependence(k, g), dependence(g, g)
            return jax.tree.map(jnp.add, total, both), both[1]

        shapes = (deep, deep), (deep, deeper), (deeper, deeper)
        (within, across, other), each = lax.scan(one, tuple(jnp.zeros((2, *s)) for s in shapes), patches)
        size_p, size_q = (jnp.sqrt(jnp.maximum(jnp.diagonal(z, axis1=1, axis2=2), 1e-9)) for z in (within, other))
        alike = across / (size_p[:, :, None] * size_q[:, None])
        within = within / (size_p[:, :, None] * size_p[:, None])
        other = other / (size_q[:, :, None] * size_q[:, None])
        return alike, within, other, jnp.argmax(alike, axis=2), jnp.argmax(alike, axis=1), jnp.std(each, axis=0)

    def net(wide, depth):
        """This describes a network."""
        shapes = {"norm1": (wide,), "norm2": (wide,), "mix": (places, 2 * places), "back": (2 * places, places)}
        shapes |= {"up": (wide, 4 * wide), "down": (4 * wide, wide)}
        return {
            "enter": normal(inputs, wide, dtype=dtype, scale=inputs**-0.5),
            "layers": stack_of(depth, dtype, **shapes),
        }

    return Built(run, (net(n, deep), net(m, deeper), normal(batches, b, places, inputs)))
