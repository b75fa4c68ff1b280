"""Survival, cells in groups, texts of machines, phones of speech and the next trials, the fortieth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import dense, dense_of

GROUP = "fortieth"


@program("uno-concordance-integrated-brier-and-dynamic-areas-by-censoring-weights-resampled", GROUP)
def _survival_marks(size: Size) -> Built:
    """This program marks several models of survival by how well they order patients and how good their chances are.

    As scikit-survival does, it takes Uno's concordance (2011), the integrated Brier score (Graf, 1999) and areas by time
    (Uno, 2007), all weighed by one over the chance to be still watched, and differences between models by weighted resamples.
    """
    models, n, times, draws, few = pick(size, (4, 4096, 128, 256, 12), (3, 700, 40, 32, 6), (2, 12, 4, 3, 3))

    def watched(time, event):
        """This estimates the chance to be still watched (Kaplan and Meier), just before each time."""
        order = jnp.argsort(time)
        lost = (~event)[order].astype(jnp.float32)
        at_risk = n - jnp.arange(n)
        left = jnp.cumprod(1 - lost / at_risk)
        return time[order], jnp.concatenate([jnp.ones(1), left[:-1]])

    def run(risk, scale, shape, time, happened, seed):
        """This gives concordances with their spreads, chances that one model beats the first, Brier scores and areas by time."""
        time = jnp.exp(0.5 * time + 0.2 * jnp.sum(risk, axis=0))
        event = happened < 5
        sorted_time, left = watched(time, event)
        end = jnp.quantile(time, 0.9)

        def chance(at):
            """This looks up the chance to be watched at times."""
            return jnp.maximum(left[jnp.clip(jnp.searchsorted(sorted_time, at), 0, n - 1)], 0.05)

        weigh = jnp.where(event & (time < end), chance(time) ** -2, 0.0)
        later = (time[:, None] < time).astype(jnp.float32) * weigh[:, None]
        many = jax.random.poisson(jax.random.key(seed), 1.0, (draws, n)).astype(jnp.float32)
        many = jnp.concatenate([jnp.ones((1, n)), many])
        total = jnp.einsum("di,ij,dj->d", many, later, many)

        def ordered(score):
            """This is the concordance of one model in the sample and in all resamples."""
            right = (score[:, None] < score) + 0.5 * (score[:, None] == score)
            return jnp.einsum("di,ij,dj->d", many, later * right, many) / jnp.maximum(total, 1e-6)

        agreed = lax.map(ordered, risk)
        spread = jnp.std(agreed[:, 1:], axis=1)
        better = jnp.mean(agreed[:, 1:] > agreed[:1, 1:], axis=1)

        grid = jnp.quantile(time, jnp.linspace(0.05, 0.9, times))
        power = 1.0 + 0.3 * jnp.tanh(shape)[:, None, None]
        alive = jnp.exp(-((grid[:, None] / jnp.exp(0.4 * risk + 0.2 * scale)[:, None]) ** power))
        dead = (time <= grid[:, None]) & event
        weights = jnp.where(dead, 1 / chance(time), jnp.where(time > grid[:, None], 1 / chance(grid)[:, None], 0.0))
        brier = jnp.mean(weights * (alive - (time > grid[:, None])) ** 2, axis=2)
        integrated = jnp.trapezoid(brier, grid, axis=1) / (grid[-1] - grid[0])

        at = grid[:: times // few][:few]

        def area(score):
            """This is the area under the curve at some times: those with the event before against those still alive."""
            order = jnp.argsort(score)
            case = (((time <= at[:, None]) & event) / chance(time))[:, order]
            alive = (time > at[:, None]).astype(jnp.float32)[:, order]
            above = jnp.sum(alive, axis=1, keepdims=True) - jnp.cumsum(alive, axis=1)
            return jnp.sum(case * above, axis=1) / jnp.maximum(jnp.sum(case, axis=1) * jnp.sum(alive, axis=1), 1e-6)

        return agreed[:, 0], spread, better, brier, integrated, jax.vmap(area)(risk)

    inputs = normal(models, n), normal(models, n), normal(models), normal(n)
    return Built(run, (*inputs, integers(n, below=8), integers(below=1000)))


@program("single-cells-shared-neighbours-louvain-moves-at-many-resolutions-compared", GROUP)
def _cell_groups(size: Size) -> Built:
    """This program puts single cells into groups by a graph of shared neighbours, with several finenesses at once.

    It is what Seurat and scanpy do: counts are scaled and reduced to main directions, cells that share near cells are joined, cells
    and then whole groups move to where modularity grows most (Blondel, 2008), and groups are compared with known kinds.
    """
    n, genes, parts, near, levels, rounds, kinds = pick(
        size, (8192, 1024, 48, 24, 6, 16, 16), (900, 96, 12, 12, 3, 10, 6), (14, 6, 3, 4, 2, 3, 3)
    )

    most = n // 4 + 2

    def run(loading, mixing, kind, depth, noise, seed):
        """This gives groups by fineness, their modularity by round, counts of groups, and agreement with kinds."""
        state = mixing[kind] @ loading
        mean = jnp.exp(0.7 * state + 0.3 * depth[:, None] - 0.5)
        count = jnp.maximum(jnp.round(mean + jnp.sqrt(mean) * noise), 0.0)
        x = jnp.log1p(count / jnp.maximum(jnp.sum(count, axis=1, keepdims=True), 1.0) * 1e3)
        x = jnp.clip((x - jnp.mean(x, axis=0)) / (jnp.std(x, axis=0) + 1e-3), -10.0, 10.0)
        _, ways = jnp.linalg.eigh(x.T @ x / n)
        x = x @ ways[:, -parts:]
        square = jnp.sum(x**2, axis=1)
        away = square[:, None] + square - 2 * x @ x.T
        away = jnp.where(jnp.eye(n, dtype=bool), jnp.inf, away)
        _, at = lax.top_k(-away, near)
        beside = at[at]
        shared = jnp.sum(jnp.any(beside[..., None] == at[:, None, None], axis=-1), axis=-1)
        mutual = jnp.any(beside == jnp.arange(n)[:, None, None], axis=-1)
        weight = jnp.where(mutual, (shared + 1.0) / (2 * near - shared + 1.0), 0.0)
        degree = jnp.sum(weight, axis=1)
        whole = jnp.maximum(jnp.sum(degree), 1e-6)

        def joined(fineness):
            """This moves labels round by round at one fineness."""

            def quality(label):
                """This is the modularity of labels."""
                inside = jnp.sum(weight * (label[at] == label[:, None])) / whole
                group = jax.ops.segment_sum(degree, label, num_segments=n)
                return inside - fineness * jnp.sum((group / whole) ** 2)

            def move(carry, key):
                """This lets a random half of the cells go where they gain most."""
                label, _ = carry
                group = jax.ops.segment_sum(degree, label, num_segments=n)
                other = label[at]
                strength = jnp.sum(weight[:, None] * (other[:, :, None] == other[:, None]), axis=-1)
                mine = jnp.sum(weight * (other == label[:, None]), axis=1)
                gain = (
                    strength
                    - fineness * degree[:, None] * (group[other] - degree[:, None] * (other == label[:, None])) / whole
                )
                stay = mine - fineness * degree * (group[label] - degree) / whole
                best = jnp.argmax(jnp.where(weight > 0, gain, -jnp.inf), axis=1)[:, None]
                better = jnp.take_along_axis(gain, best, axis=1)[:, 0] > stay + 1e-6
                turn = jax.random.uniform(key, (n,)) < 0.5
                goal = jnp.take_along_axis(other, best, axis=1)[:, 0]
                label = jnp.where(better & turn, goal, label)
                worth = quality(label)
                return (label, worth), worth

            keys = jax.random.split(jax.random.key(seed), rounds)
            (label, _), worths = lax.scan(move, (jnp.arange(n), jnp.float32(0)), keys)
            filled = jax.ops.segment_sum(jnp.ones(n), label, num_segments=n) > 0
            group = jnp.minimum(jnp.cumsum(filled) - 1, most - 1)[label]
            between = jnp.zeros((most, most)).at[group[:, None], group[at]].add(weight)
            total = jax.ops.segment_sum(degree, group, num_segments=most)
            self_ = jnp.diagonal(between)

            def merge(label, key):
                """This lets a random half of the groups go, as whole, where they gain most."""
                hot = jax.nn.one_hot(label, most)
                mine = jax.nn.one_hot(label, most) * total[:, None]
                gain = between @ hot - hot * self_[:, None] - fineness * total[:, None] * (total @ hot - mine) / whole
                stay = jnp.take_along_axis(gain, label[:, None], axis=1)[:, 0]
                turn = (jax.random.uniform(key, (most,)) < 0.5) & (jnp.max(gain, axis=1) > stay + 1e-6)
                label = jnp.where(turn, jnp.argmax(gain, axis=1), label)
                return label, quality(label[group])

            higher, more = lax.scan(merge, jnp.arange(most), keys[: rounds // 2])
            label, worths = higher[group], jnp.concatenate([worths, more])
            sizes = jax.ops.segment_sum(jnp.ones(n), label, num_segments=n)
            cross = jax.ops.segment_sum(jax.nn.one_hot(kind, kinds), label, num_segments=n)
            share, true = sizes / n, jnp.sum(cross, axis=0) / n
            ratio = cross / n / jnp.maximum(share[:, None] * true, 1e-12)
            common = jnp.sum(jnp.where(cross > 0, cross / n * jnp.log(jnp.maximum(ratio, 1e-12)), 0.0))
            entropy = [-jnp.sum(jnp.where(q > 0, q * jnp.log(jnp.maximum(q, 1e-12)), 0.0)) for q in (share, true)]
            return label, worths, jnp.sum(sizes > 0), jnp.sort(sizes)[-min(8, n) :], 2 * common / (sum(entropy) + 1e-9)

        return *lax.map(joined, 0.25 * 2.0 ** jnp.arange(levels)), degree

    inputs = normal(parts, genes, scale=parts**-0.5), normal(kinds, parts, scale=2.0), integers(n, below=kinds)
    return Built(run, (*inputs, normal(n), normal(n, genes), integers(below=1000)))


@program("mauve-texts-of-people-and-machines-as-clusters-and-their-frontier-of-divergences", GROUP)
def _mauve(size: Size) -> Built:
    """This program tells how near texts of machines are to texts of people, from what a language model makes of both.

    It is MAUVE (Pillutla, 2021; krishnap25/mauve): states are reduced to main directions and given length one, k-means with several
    starts makes groups, shares of groups are smoothed, and divergences to all mixtures draw a curve whose area is the mark.
    """
    systems, n, width, parts, groups, starts, rounds, mixtures = pick(
        size, (4, 2048, 1024, 128, 256, 3, 20, 25), (2, 300, 96, 24, 24, 2, 8, 25), (2, 10, 6, 3, 3, 2, 2, 5)
    )
    sharp, rows = 5.0, 2 * n

    def run(people, machine, shift, seed):
        """This gives marks, areas under frontiers, middle divergences, how many directions matter, and shares of groups."""
        people = people.astype(jnp.float32)

        def one(each):
            """This compares the texts of one system."""
            text, shift, key = each
            x = jnp.concatenate([people, text.astype(jnp.float32) + 0.3 * shift])
            x = x * lax.rsqrt(jnp.sum(x**2, axis=1, keepdims=True) + 1e-6)
            x = x - jnp.mean(x, axis=0)
            size, ways = jnp.linalg.eigh(x.T @ x / rows)
            told = jnp.cumsum(size[::-1]) / jnp.sum(size)
            used = jnp.arange(parts) <= jnp.sum(told[:parts] < 0.9)
            x = x @ ways[:, ::-1][:, :parts] * used
            x = x * lax.rsqrt(jnp.sum(x**2, axis=1, keepdims=True) + 1e-6)

            def clustered(key):
                """This is k-means from one start."""
                middle = x[jax.random.choice(key, rows, (groups,), replace=False)]

                def step(middle, _):
                    """This is one round of Lloyd's."""
                    away = jnp.sum(middle**2, axis=1) - 2 * x @ middle.T
                    label = jnp.argmin(away, axis=1)
                    hot = jax.nn.one_hot(label, groups)
                    many = jnp.sum(hot, axis=0)[:, None]
                    return jnp.where(many > 0, hot.T @ x / jnp.maximum(many, 1), middle), jnp.mean(
                        jnp.min(away, axis=1)
                    )

                middle, cost = lax.scan(step, middle, None, length=rounds)
                return middle, cost[-1]

            middles, costs = lax.map(clustered, jax.random.split(key, starts))
            middle = middles[jnp.argmin(costs)]
            label = jnp.argmin(jnp.sum(middle**2, axis=1) - 2 * x @ middle.T, axis=1)
            p, q = (jnp.zeros(groups).at[k].add(1.0) for k in (label[:n], label[n:]))
            p, q = ((k + 0.5) / (n + 0.5 * groups) for k in (p, q))
            share = jnp.linspace(1e-6, 1 - 1e-6, mixtures)[:, None]
            mixed = share * p + (1 - share) * q
            to_p, to_q = (jnp.sum(k * jnp.log(k / mixed), axis=1) for k in (p, q))
            across, up = jnp.exp(-sharp * to_q), jnp.exp(-sharp * to_p)
            across = jnp.concatenate([jnp.zeros(1), jnp.sort(across), jnp.ones(1)])
            up = jnp.concatenate([jnp.ones(1), jnp.sort(up)[::-1], jnp.zeros(1)])
            mark = jnp.trapezoid(up, across)
            gap = jnp.where(jnp.abs(p - q) > 1e-7, p - q, 1.0)
            inner = jnp.where(jnp.abs(p - q) > 1e-7, (p + q) / 2 - p * q / gap * (jnp.log(p) - jnp.log(q)), 0.0)
            half = 0.5 * jnp.sum(p * jnp.log(2 * p / (p + q)) + q * jnp.log(2 * q / (p + q)))
            return mark, jnp.sum(jnp.maximum(inner, 0.0)), half, jnp.sum(used), jnp.sort(p - q), costs

        return lax.map(one, (machine, shift, jax.random.split(jax.random.key(seed), systems)))

    dtype = half(size)
    texts = normal(n, width, dtype=dtype, offset=0.5), normal(systems, n, width, dtype=dtype, offset=0.5)
    return Built(run, (*texts, normal(systems, width), integers(below=1000)))


@program("lattice-free-maximum-mutual-information-phone-graph-leaky-states-grad", GROUP)
def _phone_graph(size: Size) -> Built:
    """This program gives slopes of a speech network that must prefer what was said to all that could be said.

    It is lattice-free MMI (Povey, 2016) as in PyChain (Shao, 2020): a graph of phones with arcs is walked by chances that are made
    whole at each frame and leak a little, what was said is a chain of two-state phones, and the difference of both is the loss.
    """
    b, frames, feats, n, outs, states, arcs, phones, depth = pick(
        size,
        (48, 150, 80, 512, 2016, 1600, 24000, 40, 4),
        (4, 36, 24, 96, 120, 90, 700, 9, 4),
        (2, 6, 4, 6, 6, 5, 14, 2, 4),
    )
    dtype, leak = half(size), 1e-4

    def run(p, sound, start, end, what, weight, said, short):
        """This gives the loss, slopes, scores of both graphs, and how well single frames agree."""
        end = end.at[:states].set(jnp.arange(states))
        weight = jax.nn.sigmoid(weight)
        share = weight / jax.ops.segment_sum(weight, start, num_segments=states, indices_are_sorted=True)[start]
        real = jnp.arange(frames) < frames - short[:, None]
        order = jnp.argsort(end)
        source, sink, heard, share = start[order], end[order], what[order], share[order]

        def loss(p):
            """This is how much more all words together are likely than what was said, by frame."""
            x = dense(p["enter"], sound)
            for q in p["layers"]:
                y = jnp.concatenate([jnp.pad(x, ((0, 0), (1, 1), (0, 0)))[:, k : k + frames] for k in (0, 2)], axis=-1)
                y = jax.nn.relu(dense(q["wide"], y @ q["narrow"]))
                y = y.astype(jnp.float32)
                y = y * lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-5)
                x = y.astype(dtype) + 0.66 * x
            logits = jnp.clip(dense(p["head"], x).astype(jnp.float32), -30.0, 30.0)
            heat = jnp.moveaxis(logits, 1, 0)

            def walk(chance, each):
                """This is one frame in the graph of all words: chances [b, states] become those of the next frame."""
                logit, good = each
                top = jnp.max(logit, axis=1, keepdims=True)
                arc = chance[:, source] * share * jnp.exp(logit - top)[:, heard]
                fresh = jax.vmap(lambda z: jax.ops.segment_sum(z, sink, states, indices_are_sorted=True))(arc)
                total = jnp.sum(fresh, axis=1, keepdims=True) + 1e-20
                fresh = (1 - leak) * fresh / total + leak / states
                gain = jnp.where(good, (jnp.log(total) + top)[:, 0], 0.0)
                return jnp.where(good[:, None], fresh, chance), gain

            every = jnp.full((b, states), 1.0 / states)
            _, gains = lax.scan(walk, every, (heat, real.T))
            chain = jnp.stack([2 * said, 2 * said + 1], axis=-1).reshape(b, 2 * phones) % outs

            def follow(score, each):
                """This is one frame of what was said, in logarithms: stay or go on."""
                logit, good = each
                before = jnp.pad(score, ((0, 0), (1, 0)), constant_values=-1e9)[:, :-1]
                fresh = jnp.logaddexp(score, before) - jnp.log(2.0) + jnp.take_along_axis(logit, chain, axis=1)
                return jnp.where(good[:, None], fresh, score), None

            first = jnp.where(jnp.arange(2 * phones) == 0, 0.0, -1e9) + jnp.zeros((b, 1))
            last, _ = lax.scan(follow, first, (heat, real.T))
            told = jax.nn.logsumexp(last - 2.0 * jnp.arange(2 * phones)[::-1], axis=1)
            every = jnp.sum(gains, axis=0)
            many = jnp.sum(real, axis=1)
            small = 5e-4 * jnp.sum(jnp.where(real[..., None], logits**2, 0.0), axis=(1, 2)) / outs
            agree = jnp.any(jnp.argmax(logits, axis=-1)[..., None] == chain[:, None], axis=-1) & real
            value = jnp.sum(every - told + small) / jnp.sum(many)
            return value, (told / many, every / many, jnp.sum(agree, axis=1) / many)

        (value, out), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        return value, slopes, out

    narrow = {"narrow": normal(2 * n, n // 4, dtype=dtype, scale=(2 * n) ** -0.5), "wide": dense_of(n // 4, n, dtype)}
    p = {"enter": dense_of(feats, n, dtype), "head": dense_of(n, outs, dtype), "layers": [narrow for _ in range(depth)]}
    graph = (
        integers(arcs, below=states, ramp=True),
        integers(arcs, below=states),
        integers(arcs, below=outs),
        normal(arcs),
    )
    spoken = integers(b, phones, below=outs // 2), integers(b, below=frames // 3)
    return Built(run, (p, normal(b, frames, feats, dtype=dtype), *graph, *spoken))


@program("batches-of-next-trials-by-noisy-log-expected-improvement-halton-draws-adam", GROUP)
def _next_trials(size: Size) -> Built:
    """This program finds which experiments to do next, several at once, from a noisy model of those done so far.

    It is the noisy expected improvement of batches in logarithms (Ament, 2023; pytorch/botorch): a Gaussian process is drawn at old
    and new places together, draws come from a shifted Halton series, kinks are softened, and many starts climb by Adam.
    """
    n, old, q, d, starts, draws, steps = pick(
        size, (384, 48, 6, 10, 64, 256, 16), (60, 12, 3, 4, 8, 64, 6), (6, 3, 2, 2, 2, 8, 2)
    )
    soft, fat = 1e-3, 1e-2
    primes = [k for k in range(2, 400) if all(k % j for j in range(2, int(k**0.5) + 1))][: old + q]

    def halton():
        """This makes points of Halton's series [draws, old + q]."""
        whole = np.arange(1, draws + 1)
        columns = []
        for base in primes:
            rest, part, total = whole.copy(), 1.0 / base, np.zeros(draws)
            while rest.any():
                total += part * (rest % base)
                rest, part = rest // base, part / base
            columns.append(total)
        return jnp.asarray(np.stack(columns, axis=-1), jnp.float32)

    def run(place, value, length, height, noise, seed):
        """This gives the best batches, worth of all starts by step, and means and spreads at the best batch."""
        place, value = jax.nn.sigmoid(1.5 * place), (value - jnp.mean(value)) / jnp.std(value)
        length = 0.4 * jnp.exp(0.3 * length) * d**0.5
        height, noise = jnp.exp(0.3 * height), 0.05 + 0.1 * jax.nn.sigmoid(noise)

        def kernel(x, y):
            """This is the Matern kernel of five halves with a length for each input."""
            gap = jnp.sum(((x[..., :, None, :] - y[..., None, :, :]) / length) ** 2, axis=-1)
            r = jnp.sqrt(5.0 * gap + 1e-12)
            return height * (1 + r + r**2 / 3) * jnp.exp(-r)

        low = jnp.linalg.cholesky(kernel(place, place) + noise * jnp.eye(n))
        solved = jax.scipy.linalg.cho_solve((low, True), value)
        one, two = jax.random.split(jax.random.key(seed))
        shift = jax.random.uniform(one, (old + q,))
        base = jax.scipy.special.ndtri(jnp.clip((halton() + shift) % 1.0, 1e-5, 1 - 1e-5))
        _, kept = lax.top_k(value, old)
        before = place[kept]

        def posterior(x):
            """This gives means and a root of the covariance at places."""
            cross = kernel(x, place)
            half = jax.scipy.linalg.solve_triangular(low, cross.T, lower=True)
            spread = kernel(x, x) - half.T @ half
            return cross @ solved, jnp.linalg.cholesky(spread + 1e-3 * jnp.eye(x.shape[0]))

        def worth(batch):
            """This is the softened logarithm of the expected improvement of one batch [q, d]."""
            mean, root = posterior(jnp.concatenate([before, batch]))
            drawn = mean + base @ root.T
            best = jnp.max(drawn[:, :old], axis=1, keepdims=True)
            gain = jax.nn.softplus((drawn[:, old:] - best) / soft)
            gain = jnp.log(soft * jnp.maximum(gain, 1e-6) + soft * 0.1 / (1 + ((drawn[:, old:] - best) / soft) ** 2))
            most = fat * jax.nn.logsumexp(gain / fat, axis=1)
            return jax.nn.logsumexp(most) - jnp.log(draws)

        def step(carry, k):
            """This is one step of Adam uphill within bounds."""
            batch, first, second = carry
            value, slope = jax.vmap(jax.value_and_grad(worth))(batch)
            first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
            change = first / (1 - 0.9 ** (k + 1.0)) / (jnp.sqrt(second / (1 - 0.999 ** (k + 1.0))) + 1e-8)
            return (jnp.clip(batch + 0.02 * change, 0.0, 1.0), first, second), value

        batch = jax.random.uniform(two, (starts, q, d))
        (batch, _, _), values = lax.scan(step, (batch, 0 * batch, 0 * batch), jnp.arange(steps))
        chosen = batch[jnp.argmax(values[-1])]
        mean, root = posterior(chosen)
        return chosen, values, mean, jnp.sqrt(jnp.sum(root**2, axis=1)), batch

    inputs = normal(n, d), normal(n), normal(d), normal(), normal()
    return Built(run, (*inputs, integers(below=1000)))
