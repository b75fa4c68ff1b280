"""Assigned boxes, proxies, density trees, intelligible speech and graph search, the thirty-sixth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import dense, dense_of

GROUP = "thirty-sixth"


@program("yolox-simota-dynamic-assignment-loss-grad", GROUP)
def _boxes(size: Size) -> Built:
    """This program gives slopes of the loss of an object detector that assigns each true box to as many cells as fit it well.

    It is the loss of YOLOX (Ge, 2021; Megvii-BaseDetection/YOLOX): costs join classes, overlaps and middles, the number of
    cells of a box is the sum of its best overlaps, and a cell that two boxes claim goes to the cheaper one.
    """
    b, side, classes, most, best = pick(size, (8, 512, 80, 40, 10), (4, 288, 80, 20, 10), (1, 64, 3, 3, 2))
    strides = (8, 16, 32)
    dtype = half(size)
    cells = sum((side // s) ** 2 for s in strides)
    grid = np.concatenate(
        [np.stack(np.meshgrid(*[np.arange(side // s)] * 2), axis=-1).reshape(-1, 2) * s for s in strides]
    )
    step = np.concatenate([np.full((side // s) ** 2, s) for s in strides])
    middle = jnp.asarray(grid + 0.5 * step[:, None], jnp.float32)
    step = jnp.asarray(step, jnp.float32)[:, None]
    corner = jnp.asarray(grid, jnp.float32)

    def overlap(one, two):
        """This is the overlap of boxes [..., (x, y, wide, high)] as a share of their union."""
        low = jnp.maximum(one[..., :2] - one[..., 2:] / 2, two[..., :2] - two[..., 2:] / 2)
        high = jnp.minimum(one[..., :2] + one[..., 2:] / 2, two[..., :2] + two[..., 2:] / 2)
        both = jnp.prod(jnp.maximum(high - low, 0.0), axis=-1)
        return both / (jnp.prod(one[..., 2:], axis=-1) + jnp.prod(two[..., 2:], axis=-1) - both + 1e-9)

    def binary(score, target):
        """This is the surprise of scores at targets from nought to one."""
        return jnp.maximum(score, 0.0) - score * target + jnp.log1p(jnp.exp(-jnp.abs(score)))

    def assigned(box, thing, kind, true, label, real):
        """This assigns cells of one picture: which are taken, by which box, and how well they fit."""
        inside = jnp.all(jnp.abs(middle - true[:, None, :2]) < true[:, None, 2:] / 2, axis=-1)
        central = jnp.all(jnp.abs(middle - true[:, None, :2]) < 2.5 * step, axis=-1)
        fit = overlap(true[:, None], box)
        candidate = jnp.any((inside | central) & real[:, None], axis=0)
        chance = jnp.sqrt(jax.nn.sigmoid(kind) * jax.nn.sigmoid(thing)[:, None])
        wanted = jax.nn.one_hot(label, classes)[:, None]
        log_yes, log_no = jnp.log(chance + 1e-8), jnp.log(1 - chance + 1e-8)
        surprise = -jnp.sum(wanted * log_yes + (1 - wanted) * log_no, axis=-1)
        cost = surprise - 3.0 * jnp.log(fit + 1e-8) + 1e5 * ~(inside & central) + 1e7 * ~candidate
        cost = jnp.where(real[:, None], cost, 1e9)
        many = jnp.sum(lax.top_k(jnp.where(candidate, fit, 0.0), best)[0], axis=1)
        many = jnp.maximum(many.astype(jnp.int32), 1)
        cheap, where = lax.top_k(-cost, best)
        chosen = (jnp.arange(best) < many[:, None]) & real[:, None] & (-cheap < 1e6)
        match = jnp.zeros((most, cells), bool).at[jnp.arange(most)[:, None], where].max(chosen)
        twice = jnp.sum(match, axis=0) > 1
        cheapest = jax.nn.one_hot(jnp.argmin(cost, axis=0), most, axis=0, dtype=bool)
        match = jnp.where(twice, cheapest & match.any(axis=0), match)
        return jnp.any(match, axis=0), jnp.argmax(match, axis=0), jnp.sum(match * fit, axis=0)

    def run(out, true, label, short):
        """This gives the loss, its parts and slopes, and how many cells each picture has assigned."""
        real = jnp.arange(most) < most - short[:, None]
        centre = side * jax.nn.sigmoid(true[..., :2])
        true = jnp.concatenate([centre, 0.35 * side * jax.nn.sigmoid(true[..., 2:]) + 8.0], axis=-1)

        def loss(out):
            """This is the mean loss per assigned cell."""
            out = out.astype(jnp.float32)
            box = jnp.concatenate(
                [out[..., :2] * step + corner, jnp.exp(jnp.minimum(out[..., 2:4], 6.0)) * step], axis=-1
            )
            thing, kind = out[..., 4], out[..., 5:]
            taken, which, fit = jax.vmap(assigned)(*lax.stop_gradient((box, thing, kind)), true, label, real)
            mine = jnp.take_along_axis(true, which[..., None], axis=1)
            classes_of = jax.nn.one_hot(jnp.take_along_axis(label, which, axis=1), classes) * fit[..., None]
            count = jnp.maximum(jnp.sum(taken), 1)
            wanted = jnp.concatenate([(mine[..., :2] - corner) / step, jnp.log(mine[..., 2:] / step + 1e-8)], axis=-1)
            parts = (
                5.0 * jnp.sum(jnp.where(taken, 1 - jnp.square(overlap(box, mine)), 0.0)) / count,
                jnp.sum(binary(thing, taken.astype(jnp.float32))) / count,
                jnp.sum(jnp.where(taken[..., None], binary(kind, classes_of), 0.0)) / count,
                jnp.sum(jnp.where(taken[..., None], jnp.abs(out[..., :4] - wanted), 0.0)) / count,
            )
            return sum(parts), (jnp.stack(parts), jnp.sum(taken, axis=1))

        return jax.value_and_grad(loss, has_aux=True)(out)

    inputs = normal(b, cells, 5 + classes, dtype=dtype), normal(b, most, 4), integers(b, most, below=classes)
    return Built(run, (*inputs, integers(b, below=most)))


@program("proxy-anchor-and-multi-similarity-metric-learning-grad", GROUP)
def _proxies(size: Size) -> Built:
    """This program gives slopes of a head that should bring alike pictures together, from proxies of classes and from pairs.

    It joins two losses of pytorch-metric-learning: proxy anchors (Kim, 2020) with margins for all classes, and multiple
    similarities (Wang, 2019) of pairs that are mined by the hardest of the other sort; it also tells how often neighbours share
    the class.
    """
    b, width, n, classes, kinds = pick(size, (1024, 2048, 512, 11318, 128), (330, 512, 128, 2503, 55), (6, 5, 4, 5, 2))
    dtype = half(size)
    sharp, margin, pull, push, base = 32.0, 0.1, 2.0, 50.0, 0.5

    def unit(x):
        """This gives vectors length one."""
        return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-12)

    def log_sum(x, mask, axis):
        """This is the logarithm of one plus a sum of exponentials where the mask holds."""
        x = jnp.where(mask, x, -jnp.inf)
        top = jnp.maximum(lax.stop_gradient(jnp.max(x, axis=axis)), 0.0)
        return top + jnp.log(jnp.exp(-top) + jnp.sum(jnp.exp(x - jnp.expand_dims(top, axis)), axis=axis))

    def run(p, feature, kind, label_of):
        """This gives the loss with its parts, slopes of head and proxies, and shares of right neighbours."""
        label = label_of[kind]

        def loss(p):
            """This is the sum of both losses."""
            y = unit(dense(p["head"], feature).astype(jnp.float32))
            proxy = unit(p["proxies"].astype(jnp.float32))
            near = y @ proxy.T
            own = label[:, None] == jnp.arange(classes)
            present = jnp.sum(jnp.any(own, axis=0))
            anchors = jnp.sum(log_sum(-sharp * (near - margin), own, 0)) / present
            anchors = anchors + jnp.sum(log_sum(sharp * (near + margin), ~own, 0)) / classes

            alike = y @ y.T
            same = label[:, None] == label
            other, same = ~same, same & ~jnp.eye(b, dtype=bool)
            hardest_other = jnp.max(jnp.where(other, alike, -jnp.inf), axis=1, keepdims=True)
            hardest_same = jnp.min(jnp.where(same, alike, jnp.inf), axis=1, keepdims=True)
            kept_same = same & (alike - margin < hardest_other)
            kept_other = other & (alike + margin > hardest_same)
            pulled = log_sum(-pull * (alike - base), kept_same, 1) / pull
            pushed = log_sum(push * (alike - base), kept_other, 1) / push
            pairs = jnp.mean(pulled + pushed)
            return anchors + pairs, (anchors, pairs, alike)

        (value, (anchors, pairs, alike)), slope = jax.value_and_grad(loss, has_aux=True)(p)
        order = lax.top_k(alike - 2.0 * jnp.eye(b), min(8, b - 1))[1]
        hit = label[order] == label[:, None]
        recall = jnp.mean(jnp.cumsum(hit, axis=1) > 0, axis=0)
        many = jnp.sum(label[:, None] == label, axis=1) - 1
        rank = jnp.arange(1, hit.shape[1] + 1)
        precise = jnp.cumsum(hit, axis=1) / rank
        shown = jnp.clip(jnp.minimum(many, hit.shape[1]), 1)
        mean_average = jnp.mean(jnp.sum(precise * hit * (rank <= many[:, None]), axis=1) / shown)
        return value, anchors, pairs, slope, recall[0], recall[-1], mean_average

    p = {"head": dense_of(width, n, dtype), "proxies": normal(classes, n, dtype=dtype)}
    return Built(run, (p, normal(b, width, dtype=dtype), integers(b, below=kinds), integers(kinds, below=classes)))


@program("hdbscan-mutual-reachability-minimum-spanning-tree", GROUP)
def _density(size: Size) -> Built:
    """This program groups points by how densely they lie, from a tree of least total length between all of them.

    It is the core of HDBSCAN (Campello, 2013; scikit-learn-contrib/hdbscan): distances are at least those to each point's k-th
    neighbour, Prim's method grows the tree, and sorted edges join groups until a cut, where small groups count as noise.
    """
    n, d, near, least, kinds = pick(size, (800, 24, 12, 20, 10), (640, 8, 6, 8, 5), (7, 2, 2, 2, 2))

    def run(centre, kind, noise, spread):
        """This gives distances to k-th neighbours, sorted edges, groups at the cut, their sizes and how far out points are."""
        wide = 0.3 + 0.3 * jax.nn.sigmoid(spread)
        x = 3.0 * centre[kind] + wide[kind][:, None] * noise
        square = jnp.sum(jnp.square(x), axis=1)
        apart = jnp.sqrt(jnp.maximum(square[:, None] + square - 2 * x @ x.T, 0.0)) * (1 - jnp.eye(n))
        core = -lax.top_k(-apart, near + 1)[0][:, near]
        reach = jnp.maximum(apart, jnp.maximum(core[:, None], core))

        def grow(k, carry):
            """This adds the nearest point to the tree."""
            far, parent, inside, one, two, edge = carry
            at = jnp.argmin(jnp.where(inside, jnp.inf, far))
            one, two, edge = one.at[k].set(parent[at]), two.at[k].set(at), edge.at[k].set(far[at])
            closer = (reach[at] < far) & ~inside
            far, parent = jnp.where(closer, reach[at], far), jnp.where(closer, at, parent)
            return far, parent, inside.at[at].set(True), one, two, edge

        zeros = jnp.zeros(n - 1, jnp.int32)
        begin = reach[0], jnp.zeros(n, jnp.int32), jnp.arange(n) == 0, zeros, zeros, jnp.zeros(n - 1)
        _, _, _, one, two, edge = lax.fori_loop(0, n - 1, grow, begin)
        order = jnp.argsort(edge)
        edge, one, two = edge[order], one[order], two[order]
        cut = jnp.mean(edge) + 1.5 * jnp.std(edge)

        def join(k, label):
            """This joins the groups at both ends of an edge that is shorter than the cut."""
            low, high = jnp.minimum(label[one[k]], label[two[k]]), jnp.maximum(label[one[k]], label[two[k]])
            return jnp.where((label == high) & (edge[k] < cut), low, label)

        label = lax.fori_loop(0, n - 1, join, jnp.arange(n))
        many = jnp.zeros(n, jnp.int32).at[label].add(1)
        grouped = many[label] >= least
        label = jnp.where(grouped, label, -1)
        dense = jnp.full(n, jnp.inf).at[label].min(jnp.where(grouped, core, jnp.inf))
        outlier = jnp.where(grouped, 1 - dense[label] / (core + 1e-9), 1.0)
        return core, edge, label, many, outlier, jnp.sum(many >= least)

    return Built(run, (normal(kinds, d), integers(n, below=kinds), normal(n, d), normal(kinds)))


@program("stoi-short-time-intelligibility-of-cleaned-speech", GROUP)
def _intelligible(size: Size) -> Built:
    """This program tells how intelligible noisy speech is, by comparing short stretches of bands with those of clean speech.

    It is short-time objective intelligibility (Taal, 2011; Jensen, 2016; mpariente/pystoi) with its extended form: silent
    frames are left out, spectra are summed to third-octave bands, and correlations of stretches are averaged.
    """
    b, samples, window, bands, stretch = pick(
        size, (32, 80000, 256, 15, 30), (4, 28000, 256, 15, 30), (1, 160, 32, 4, 4)
    )
    hop, fft, rate = window // 2, 2 * window, 10000.0
    frames = (samples - window) // hop + 1
    hann = np.hanning(window + 2)[1:-1]
    line = np.linspace(0, rate, fft + 1)[: fft // 2 + 1]
    low = 150.0 * 2.0 ** ((2 * np.arange(bands) - 1) / 6)
    edges = [np.argmin(np.abs(line[:, None] - f), axis=0) for f in (low, low * 2.0 ** (1 / 3))]
    at = np.arange(fft // 2 + 1)
    octave = ((at >= edges[0][:, None]) & (at < np.maximum(edges[1], edges[0] + 1)[:, None])).astype(np.float32)

    def framed(x):
        """This cuts sound into windowed frames."""
        index = hop * np.arange(frames)[:, None] + np.arange(window)
        return x[:, index] * jnp.asarray(hann, jnp.float32)

    def measured(x, order):
        """This gives magnitudes of bands [b, bands, frames] of the frames that are kept, put together again."""
        x = jnp.take_along_axis(framed(x), order[..., None], axis=1)
        halves = x.reshape(b, frames, 2, hop)
        joined = halves[:, 1:, 0] + halves[:, :-1, 1]
        sound = jnp.concatenate([halves[:, :1, 0], joined, halves[:, -1:, 1]], axis=1).reshape(b, -1)
        spectrum = jnp.abs(jnp.fft.rfft(framed(sound), n=fft)) ** 2
        return jnp.sqrt(jnp.einsum("ck,bfk->bcf", jnp.asarray(octave), spectrum) + 1e-12)

    def unit(x, axis):
        """This takes the mean off, and gives length one."""
        x = x - jnp.mean(x, axis=axis, keepdims=True)
        return x / (jnp.linalg.norm(x, axis=axis, keepdims=True) + 1e-8)

    def run(source, loud, noise, level):
        """This gives both measures of each sound, correlations of bands, the signal-to-noise ratio and kept frames."""
        smooth = (source[:, 1:-1] + 0.7 * source[:, :-2] + 0.7 * source[:, 2:]) / 2
        swell = jax.image.resize(jnp.exp(1.5 * loud), (b, samples), "linear")
        clean = smooth * swell
        noisy = clean + 0.5 * jax.nn.softplus(level)[:, None] * noise
        power = 20 * jnp.log10(jnp.linalg.norm(framed(clean), axis=-1) + 1e-9)
        loud_enough = power > jnp.max(power, axis=1, keepdims=True) - 40.0
        order = jnp.argsort(~loud_enough, axis=1, stable=True)
        many = jnp.sum(loud_enough, axis=1)
        x, y = measured(clean, order), measured(noisy, order)
        index = np.arange(frames - stretch + 1)[:, None] + np.arange(stretch)
        x, y = (z[:, :, index].transpose(0, 2, 1, 3) for z in (x, y))
        real = jnp.arange(frames - stretch + 1) < jnp.maximum(many - stretch + 1, 1)[:, None]
        scale = jnp.linalg.norm(x, axis=-1, keepdims=True) / (jnp.linalg.norm(y, axis=-1, keepdims=True) + 1e-8)
        clipped = jnp.minimum(y * scale, x * (1 + 10 ** (15 / 20)))
        alike = jnp.sum(unit(x, -1) * unit(clipped, -1), axis=-1)
        count = jnp.sum(real, axis=1)
        stoi = jnp.sum(jnp.mean(alike, axis=-1) * real, axis=1) / count
        both = jnp.sum(unit(unit(x, -1), -2) * unit(unit(y, -1), -2), axis=(-1, -2)) / stretch
        ratio = 10 * jnp.log10(jnp.sum(clean**2, axis=1) / (jnp.sum((noisy - clean) ** 2, axis=1) + 1e-9))
        by_band = jnp.sum(alike * real[..., None], axis=1) / count[:, None]
        return stoi, jnp.sum(both * real, axis=1) / count, by_band, ratio, many

    inputs = normal(b, samples + 2), normal(b, max(samples // 1000, 4)), normal(b, samples), normal(b)
    return Built(run, inputs)


@program("graph-best-first-nearest-neighbour-search-while", GROUP)
def _graph(size: Size) -> Built:
    """This program finds the nearest of many vectors by walks over a graph of neighbours, for many queries at once.

    It is the greedy search of DiskANN (Subramanya, 2019) and CAGRA: a list of best candidates is kept, the nearest that was not yet
    opened gives its neighbours, doubles are dropped, and a search ends when all in its list are open.
    """
    n, d, degree, queries, width, most, found = pick(
        size, (100000, 96, 32, 512, 32, 64, 10), (6000, 48, 16, 96, 16, 40, 10), (9, 3, 2, 2, 3, 4, 2)
    )

    def run(base, graph, query, entry):
        """This gives nearest vectors and their distances, how many were opened, and how many true ones were found."""
        norms = jnp.sum(jnp.square(base), axis=1)

        def search(query, entry):
            """This is the search of one query."""

            def distance(ids):
                """This is the squared distance, less what is the same for all."""
                return norms[ids] - 2 * base[ids] @ query

            def going(carry):
                """This tells whether a candidate is not yet open."""
                _, far, opened, k = carry
                return jnp.any(~opened & (far < jnp.inf)) & (k < most)

            def step(carry):
                """This opens the nearest candidate."""
                ids, far, opened, k = carry
                at = jnp.argmin(jnp.where(opened, jnp.inf, far))
                opened = opened.at[at].set(True)
                fresh = graph[ids[at]]
                known = jnp.any(fresh[:, None] == ids, axis=1)
                twice = jnp.any((fresh[:, None] == fresh) & jnp.tril(jnp.ones((degree, degree), bool), -1), axis=1)
                ids = jnp.concatenate([ids, fresh])
                far = jnp.concatenate([far, jnp.where(known | twice, jnp.inf, distance(fresh))])
                opened = jnp.concatenate([opened, jnp.zeros(degree, bool)])
                best, order = lax.top_k(-far, width)
                return ids[order], -best, opened[order], k + 1

            far = jnp.where(jnp.arange(width) == 0, distance(entry)[None], jnp.inf)
            begin = jnp.full(width, entry), far, jnp.zeros(width, bool), jnp.int32(0)
            ids, far, _, k = lax.while_loop(going, step, begin)
            return ids[:found], far[:found] + jnp.sum(jnp.square(query)), k

        ids, far, opened = jax.vmap(search)(query, entry)
        true = lax.top_k(2 * query @ base.T - norms, found)[1]
        hit = jnp.any(ids[:, :, None] == true[:, None], axis=2)
        return ids, far, opened, jnp.mean(hit, axis=1)

    inputs = normal(n, d), integers(n, degree, below=n), normal(queries, d), integers(queries, below=n)
    return Built(run, inputs)
