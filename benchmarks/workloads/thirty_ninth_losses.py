"""Captions, chosen columns, shares of blame, strange points and directed arrows, the thirty-ninth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import digamma

from benchmarks.workloads.registry import Built, Size, booleans, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import dense, dense_of

GROUP = "thirty-ninth"


@program("cider-d-consensus-rewards-self-critical-captions-grad", GROUP)
def _cider(size: Size) -> Built:
    """This program gives slopes of the head of a caption writer that is paid for agreeing with what people wrote.

    It is self-critical training (Rennie, 2017; ruotianluo/self-critical.pytorch) with CIDEr-D (Vedantam, 2015): runs of one to four
    words are weighed by how rare they are, drawn captions are compared with the best words, and the difference is the reward.
    """
    b, draws, t, people, n, words, buckets = pick(
        size, (96, 5, 20, 5, 512, 10000, 1 << 16), (10, 3, 16, 4, 128, 2000, 1 << 12), (2, 2, 5, 2, 6, 9, 64)
    )
    dtype, longest, pictures = half(size), 4, 110000.0

    def written(words):
        """This tells which words belong to texts: all up to the first nought."""
        return jnp.cumsum(jnp.cumsum((words == 0).astype(jnp.int32), axis=-1), axis=-1) <= 1

    def runs(words):
        """This gives codes of runs [..., 4, t] that end at each word, and which of them exist."""
        real = written(words) & (words > 0)
        code, codes, exist = jnp.zeros(words.shape, jnp.uint32), [], []
        good = jnp.ones(words.shape, bool)
        for k in range(longest):
            back = jnp.roll(words, k, axis=-1).astype(jnp.uint32) + 1
            good = good & jnp.roll(real, k, axis=-1) & (jnp.arange(t) >= k)
            code = (code * jnp.uint32(1000003)) ^ (back * jnp.uint32(2654435761))
            codes.append(code)
            exist.append(good)
        return jnp.stack(codes, axis=-2), jnp.stack(exist, axis=-2)

    def rarity(code, count):
        """This looks up how rare runs are: count [4, buckets] tells in how many pictures they are."""
        at = (code % buckets).astype(jnp.int32)
        return jnp.log(pictures) - jnp.log(jnp.maximum(count[jnp.arange(longest)[:, None], at], 1).astype(jnp.float32))

    def consensus(said, wrote, count):
        """This scores captions [b, k, t] against what people wrote [b, people, t]."""
        one, real = runs(said)
        two, good = runs(wrote)
        rare, other = rarity(one, count), rarity(two, count)
        mine = (one[..., :, None] == one[..., None, :]) & real[..., None, :]
        mine = jnp.sum(mine, axis=-1)
        theirs = (two[..., :, None] == two[..., None, :]) & good[..., None, :]
        theirs = jnp.sum(theirs, axis=-1)
        met = (one[:, :, None, :, :, None] == two[:, None, :, :, None, :]) & good[:, None, :, :, None, :]
        met = jnp.sum(met, axis=-1)
        least = jnp.minimum(mine[:, :, None], met) * met / jnp.maximum(mine[:, :, None], 1)
        inner = jnp.sum(jnp.where(real, rare, 0.0)[:, :, None] ** 2 * least, axis=-1)
        length = jnp.sqrt(jnp.sum(jnp.where(real, mine * rare**2, 0.0), axis=-1))
        other_length = jnp.sqrt(jnp.sum(jnp.where(good, theirs * other**2, 0.0), axis=-1))
        near = inner / jnp.maximum(length[:, :, None] * other_length[:, None], 1e-6)
        gap = jnp.sum(written(said), axis=-1)[:, :, None] - jnp.sum(written(wrote), axis=-1)[:, None]
        near = jnp.mean(near, axis=-1) * jnp.exp(-(gap.astype(jnp.float32) ** 2) / 72.0)
        return 10.0 * jnp.mean(near, axis=-1)

    def run(p, state, wrote, short, count, seed):
        """This gives the loss, slopes, rewards of drawn captions and of the best words, and the surprise of words."""
        wrote = jnp.where(jnp.arange(t) < t - short[..., None], wrote + 1, 0)
        row, place = jnp.arange(b)[:, None, None], jnp.arange(t)
        leaning = jnp.zeros((b, t, words)).at[row, place, wrote].max(8.0)  # a writer that has learned some of them

        def loss(p):
            """This is the mean surprise of drawn words, weighed by how much better their caption is."""
            x = jnp.tanh(dense(p["inner"], state))
            logits = dense(p["head"], x).astype(jnp.float32) + leaning[:, None]
            logp = jax.nn.log_softmax(logits, axis=-1)
            said = jax.random.categorical(jax.random.key(seed), lax.stop_gradient(logits), axis=-1)
            best = jnp.argmax(jnp.mean(logits, axis=1), axis=-1)[:, None]
            reward, base = consensus(said, wrote, count), consensus(best, wrote, count)
            real = written(said)
            surprise = -jnp.take_along_axis(logp, said[..., None], axis=-1)[..., 0]
            entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
            gain = lax.stop_gradient(reward - base)[..., None]
            many = jnp.maximum(jnp.sum(real), 1)
            value = jnp.sum(jnp.where(real, surprise * gain - 0.01 * entropy, 0.0)) / many
            return value, (reward, base[:, 0], jnp.mean(entropy, axis=-1), said)

        (value, out), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        return value, slopes, out

    p = {"inner": dense_of(n, n, dtype), "head": dense_of(n, words, dtype)}
    inputs = normal(b, draws, t, n, dtype=dtype), integers(b, people, t, below=min(words - 1, 600))
    counts = integers(longest, buckets, below=2000)
    return Built(run, (p, *inputs, integers(b, people, below=t // 2), counts, integers(below=1000)))


@program("nearest-neighbour-mutual-information-least-redundant-columns-chosen", GROUP)
def _chosen_columns(size: Size) -> Built:
    """This program chooses columns of a table that tell much about a class and little about each other.

    It is mRMR (Peng, 2005) on estimates by nearest neighbours: between a column and a class (Ross, 2014, as in scikit-learn) from
    sorted values, and between two columns (Kraskov, 2004) from squares around points; every round adds the best column.
    """
    n, columns, classes, few, rounds, k = pick(
        size, (8192, 96, 6, 384, 12, 3), (3000, 20, 4, 160, 6, 3), (24, 4, 2, 10, 3, 2)
    )

    def with_class(x, label):
        """This estimates what one column [n] tells about the class."""
        order = jnp.lexsort((x, label))
        value, kind = x[order], label[order]
        place, radius = jnp.arange(n), jnp.full(n, jnp.inf)
        for below in range(k + 1):
            low, high = place - below, place - below + k
            inside = (low >= 0) & (high < n)
            low, high = jnp.maximum(low, 0), jnp.minimum(high, n - 1)
            inside &= (kind[low] == kind) & (kind[high] == kind)
            reach = jnp.maximum(value - value[low], value[high] - value)
            radius = jnp.where(inside, jnp.minimum(radius, reach), radius)
        many = jnp.zeros(classes, jnp.int32).at[label].add(1)
        radius = jnp.where(jnp.isfinite(radius), radius, 0.0) * (1 - 1e-6)
        rank = jnp.sort(x)
        right = jnp.searchsorted(rank, value + radius, side="right", method="sort")
        near = right - jnp.searchsorted(rank, value - radius, side="left", method="sort")
        told = digamma(n) + digamma(k) - jnp.mean(digamma(many[kind].astype(jnp.float32)))
        return jnp.maximum(told - jnp.mean(digamma(jnp.maximum(near, 1).astype(jnp.float32))), 0.0)

    def between(one, two):
        """This estimates what two columns [few] tell about each other."""
        x, y = jnp.abs(one[:, None] - one), jnp.abs(two[:, None] - two)
        both = jnp.where(jnp.eye(few, dtype=bool), jnp.inf, jnp.maximum(x, y))
        radius = -lax.top_k(-both, k)[0][:, -1:]
        inside = (jnp.sum(z < radius, axis=1).astype(jnp.float32) for z in (x, y))
        total = sum(digamma(jnp.maximum(z, 1.0)) for z in inside)
        return jnp.maximum(digamma(few) + digamma(k) - jnp.mean(total), 0.0)

    def run(hidden, mixing, noise, label, shift, rows):
        """This gives chosen columns with their scores, what columns tell about the class, and about chosen columns."""
        x = jnp.tanh(hidden @ mixing + shift[label]) + 0.3 * noise
        x = (x - jnp.mean(x, axis=0)) / jnp.std(x, axis=0)
        relevance = lax.map(lambda column: with_class(column, label), x.T)
        part = x[rows].T

        def choose(carry, at):
            """This adds one column."""
            taken, redundancy = carry
            score = relevance - redundancy / jnp.maximum(at, 1)
            best = jnp.argmax(jnp.where(taken, -jnp.inf, score))
            shared = jax.vmap(between, in_axes=(None, 0))(part[best], part)
            return (taken.at[best].set(True), redundancy + shared), (best, score[best], shared)

        start = jnp.zeros(columns, bool), jnp.zeros(columns)
        (taken, _), (best, score, shared) = lax.scan(choose, start, jnp.arange(rounds))
        linear = jnp.abs(jnp.corrcoef(part[best]))
        return best, score, relevance, shared, taken, linear

    latent = columns // 2
    inputs = normal(n, latent), normal(latent, columns, scale=latent**-0.5), normal(n, columns)
    labels = integers(n, below=classes), normal(classes, columns, scale=0.8)
    return Built(run, (*inputs, *labels, integers(few, below=n, distinct=True)))


@program("kernel-shap-paired-coalitions-weighted-solves-of-a-network", GROUP)
def _shap(size: Size) -> Built:
    """This program shares the output of a network out among the columns of each row that it was asked about.

    It is KernelSHAP (Lundberg, 2017; shap/shap) with paired draws (Covert, 2021): coalitions take some columns from the row and the
    others from a background, and a weighted regression, whose shares must add up, gives the share of each column.
    """
    rows, behind, coalitions, columns, wide, classes = pick(
        size, (32, 64, 512, 26, 128, 4), (16, 20, 192, 13, 48, 3), (2, 3, 20, 4, 5, 2)
    )
    sizes = np.arange(1, columns)
    chance = jnp.asarray((columns - 1) / (sizes * (columns - sizes)), jnp.float32)

    def run(p, asked, background, seed):
        """This gives shares [rows, columns, classes], the base, columns by weight, how well sums fit, and errors."""

        def told(x):
            """This is the network that is explained."""
            x = jax.nn.gelu(dense(p["one"], x))
            x = x + jax.nn.gelu(dense(p["two"], x))
            return jax.nn.log_softmax(dense(p["head"], x), axis=-1)

        base = jnp.mean(told(background), axis=0)

        def explain(each):
            """This explains one row."""
            row, key = each
            one, two = jax.random.split(key)
            many = 1 + jax.random.categorical(one, jnp.log(chance), shape=(coalitions // 2,))
            order = jnp.argsort(jax.random.uniform(two, (coalitions // 2, columns)), axis=1)
            rank = jnp.argsort(order, axis=1)
            taken = rank < many[:, None]
            taken = jnp.concatenate([taken, ~taken])
            mixed = jnp.where(taken[:, None], row, background)
            value = jnp.mean(told(mixed), axis=1) - base
            full = told(row) - base
            z = taken.astype(jnp.float32)
            same = jnp.all(taken[:, None] == taken, axis=-1)
            weight = 1.0 / jnp.sum(same, axis=1)
            y = value - z[:, -1:] * full
            x = z[:, :-1] - z[:, -1:]
            left = (x * weight[:, None]).T @ x + 1e-4 * jnp.eye(columns - 1)
            share = jnp.linalg.solve(left, (x * weight[:, None]).T @ y)
            share = jnp.concatenate([share, (full - jnp.sum(share, axis=0))[None]])
            off = value - z @ share
            spread = jnp.sum(weight[:, None] * (value - jnp.mean(value, axis=0)) ** 2, axis=0)
            fit = 1 - jnp.sum(weight[:, None] * off**2, axis=0) / jnp.maximum(spread, 1e-9)
            cover = jnp.linalg.inv(left).diagonal()
            error = jnp.sqrt(jnp.maximum(cover, 0.0)[:, None] * jnp.mean(off**2, axis=0))
            return share, fit, error

        share, fit, error = lax.map(explain, (asked, jax.random.split(jax.random.key(seed), rows)))
        weight = jnp.mean(jnp.abs(share), axis=0)
        return share, base, jnp.argsort(-jnp.sum(weight, axis=1)), weight, fit, error

    p = {"one": dense_of(columns, wide), "two": dense_of(wide, wide), "head": dense_of(wide, classes)}
    return Built(run, (p, normal(rows, columns), normal(behind, columns), integers(below=1000)))


@program("isolation-forest-and-local-outlier-factor-strangeness-compared", GROUP)
def _strange(size: Size) -> Built:
    """This program tells how strange points are in two ways and compares both with planted strangers.

    It is the isolation forest (Liu, 2008), whose trees of random cuts reach strange points early, and the local outlier factor
    (Breunig, 2000), which compares how dense it is around a point and around its neighbours, as in scikit-learn.
    """
    n, d, middles, trees, sample, near = pick(
        size, (4096, 24, 8, 128, 256, 20), (900, 10, 4, 24, 64, 15), (12, 2, 2, 3, 4, 3)
    )
    levels = int(np.log2(sample))
    heap = 2 ** (levels + 1) - 1

    def average(count):
        """This is the mean length of a search in a random tree of so many points."""
        count = count.astype(jnp.float32)
        longer = 2 * (jnp.log(jnp.maximum(count - 1, 1.0)) + np.euler_gamma) - 2 * (count - 1) / jnp.maximum(count, 1)
        return jnp.where(count > 2, longer, jnp.where(count == 2, 1.0, 0.0))

    def grown(x, key):
        """This grows one tree on points [sample, d], and gives columns, cuts and counts of all nodes."""

        def level(k, carry):
            """This cuts all nodes of one level."""
            node, column, cut, count = carry
            low, high = (f(x, node, num_segments=heap) for f in (jax.ops.segment_min, jax.ops.segment_max))
            here = jax.ops.segment_sum(jnp.ones(sample, jnp.int32), node, num_segments=heap)
            one, two = jax.random.split(jax.random.fold_in(key, k))
            open_ = high > low
            best = jnp.argmax(jnp.where(open_, jax.random.uniform(one, (heap, d)), -1.0), axis=1)
            split = jnp.any(open_, axis=1) & (here > 1)
            low, high = (jnp.take_along_axis(z, best[:, None], axis=1)[:, 0] for z in (low, high))
            fresh = jnp.where(split, low + jax.random.uniform(two, (heap,)) * jnp.where(split, high - low, 0.0), 0.0)
            column, cut = jnp.where(here > 0, best, column), jnp.where(split, fresh, cut)
            count = jnp.where(here > 0, here, count)
            right = x[jnp.arange(sample), best[node]] >= fresh[node]
            return jnp.where(split[node], 2 * node + 1 + right, node), column, cut, count

        start = jnp.zeros(sample, jnp.int32), jnp.zeros(heap, jnp.int32), jnp.zeros(heap), jnp.zeros(heap, jnp.int32)
        node, column, cut, count = lax.fori_loop(0, levels, level, start)
        return column, cut, count.at[node].set(jax.ops.segment_sum(jnp.ones_like(node), node, num_segments=heap)[node])

    def walked(x, tree):
        """This gives the lengths of the ways of points [n, d] through one tree."""
        column, cut, count = tree

        def step(_, carry):
            """This goes one level down where there is one."""
            node, length = carry
            fresh = 2 * node + 1 + (jnp.take_along_axis(x, column[node][:, None], axis=1)[:, 0] >= cut[node])
            inside = jnp.minimum(fresh, heap - 1)
            deeper = (fresh < heap) & (count[node] > 1) & (count[2 * node + 1] + count[2 * node + 2] > 0)
            return jnp.where(deeper, inside, node), length + deeper

        node, length = lax.fori_loop(0, levels, step, (jnp.zeros(n, jnp.int32), jnp.zeros(n, jnp.int32)))
        return length + average(count[node])

    def factor(x):
        """This is the local outlier factor of points."""
        square = jnp.sum(x * x, axis=1)
        away = jnp.maximum(square[:, None] + square - 2 * x @ x.T, 0.0)
        away = jnp.where(jnp.eye(n, dtype=bool), jnp.inf, away)
        gap, at = lax.top_k(-away, near)
        gap = jnp.sqrt(-gap)
        reach = jnp.maximum(gap[:, -1][at], gap)
        dense_there = 1.0 / (jnp.mean(reach, axis=1) + 1e-10)
        return jnp.mean(dense_there[at], axis=1) / dense_there

    def area(score, case):
        """This is the area under the curve of a score."""
        rank = jnp.argsort(jnp.argsort(score)) + 1
        many = jnp.maximum(jnp.sum(case), 1)
        total = jnp.sum(jnp.where(case, rank, 0)) - many * (many + 1) / 2
        return total / (many * jnp.maximum(n - many, 1))

    def run(middle, which, noise, odd, seed):
        """This gives both scores, areas under their curves, how alike their orders are, and the strangest points."""
        case = odd == 0
        x = middle[which] + jnp.where(case[:, None], 3.0, 0.6) * noise
        x = (x - jnp.mean(x, axis=0)) / (jnp.std(x, axis=0) + 1e-6)
        keys = jax.random.split(jax.random.key(seed), trees)

        def one(key):
            """This draws points for one tree and grows it."""
            first, second = jax.random.split(key)
            return grown(x[jax.random.permutation(first, n)[:sample]], second)

        forest = jax.vmap(one)(keys)
        length = jnp.mean(jax.vmap(walked, in_axes=(None, 0))(x, forest), axis=0)
        score = 2.0 ** (-length / average(jnp.int32(sample)))
        local = factor(x)
        ranks = jnp.stack([jnp.argsort(jnp.argsort(z)) for z in (score, local)]).astype(jnp.float32)
        alike = jnp.corrcoef(ranks)[0, 1]
        both = lax.top_k(jnp.mean(ranks, axis=0), min(16, n // 2))
        used = jnp.sum(forest[2] > 0, axis=1)
        return score, local, jnp.stack([area(score, case), area(local, case)]), alike, both, used

    inputs = normal(middles, d, scale=2.0), integers(n, below=middles), normal(n, d)
    return Built(run, (*inputs, integers(n, below=12), integers(below=1000)))


@program("dagma-log-determinant-directed-graphs-learned-by-adam-on-resamples", GROUP)
def _directed(size: Size) -> Built:
    """This program learns which columns of a table lead to which others, as a graph without circles.

    It is DAGMA (Bello, 2022; kevinsbello/dagma): a logarithm of a determinant forbids circles, the weight of the data falls along a
    path, steps that leave the allowed matrices are taken back, and resampled rows tell how sure each arrow is.
    """
    import optax

    samples, rows, d, steps = pick(size, (12, 2048, 48, 6), (6, 500, 24, 12), (2, 12, 4, 2))
    path = jnp.array([1.0, 0.1, 0.01, 0.001]), jnp.array([1.0, 0.9, 0.8, 0.7])
    eye = jnp.eye(d)

    def learned(x):
        """This learns one graph of rows [rows, d], and gives its weights, objectives and how far it is from no circles."""
        x = x - jnp.mean(x, axis=0)
        cover = x.T @ x / rows

        def objective(w, weight, size):
            """This is the squared error and the length of weights, and the barrier against circles."""
            off = eye - w
            error = 0.5 * jnp.trace(off.T @ cover @ off)
            barrier = -jnp.linalg.slogdet(size * eye - w * w)[1] + d * jnp.log(size)
            return weight * (error + 0.03 * jnp.sum(jnp.abs(w))) + barrier, barrier

        def stage(w, at):
            """This takes some steps at one weight of the data."""
            weight, size = at
            optimiser = optax.scale_by_adam(0.99, 0.999)

            def step(carry, _):
                """This is one step, or a smaller one after a step that left the allowed matrices."""
                w, state, rate = carry
                (value, barrier), slope = jax.value_and_grad(objective, has_aux=True)(w, weight, size)
                change, fresh = optimiser.update(slope, state)
                moved = (w - rate * change) * (1 - eye)
                good = jnp.all(jnp.linalg.inv(size * eye - moved * moved) > -1e-6)
                state = jax.tree.map(lambda a, c: jnp.where(good, a, c), fresh, state)
                return (jnp.where(good, moved, w), state, jnp.where(good, rate, 0.5 * rate)), (value, barrier)

            (w, _, rate), told = lax.scan(step, (w, optimiser.init(w), jnp.float32(0.03)), None, length=steps)
            return w, (*told, rate)

        w, told = lax.scan(stage, jnp.zeros((d, d)), path)
        return w, told

    def layered(arrow):
        """This takes away columns that nothing leads to, round by round, and gives the round of each; d where there are circles."""

        def going(carry):
            """This tells whether the last round took something away."""
            return carry[2] & (carry[1] < d)

        def peel(carry):
            """This is one round."""
            layer, at, _ = carry
            left = layer == d
            free = left & ~jnp.any(arrow & left[:, None], axis=0)
            return jnp.where(free, at, layer), at + 1, jnp.any(free)

        return lax.while_loop(going, peel, (jnp.full(d, d), jnp.int32(0), jnp.bool_(True)))[0]

    def run(weight, used, order, noise, seed):
        """This gives mean weights, shares of arrows, wrong arrows, rounds of columns, and what steps cost."""
        true = jnp.triu(jnp.where(used, 0.0, 0.5 * jnp.sign(weight) + 0.3 * weight), 1)
        x = jnp.linalg.solve((eye - true).T, noise.T).T[:, order]
        true = true[order][:, order] != 0
        key = jax.random.key(seed)
        drawn = jax.random.randint(key, (samples, rows), 0, rows)
        w, told = jax.vmap(lambda at: learned(x[at]))(drawn)
        arrows = jnp.abs(w) > 0.15
        share = jnp.mean(arrows, axis=0)
        chosen = share > 0.5
        extra, missing = jnp.sum(chosen & ~true & ~true.T), jnp.sum(true & ~chosen & ~chosen.T)
        wrong = jnp.stack([extra, missing, jnp.sum(chosen & true.T & ~true)])
        return jnp.mean(w, axis=0), share, wrong, layered(chosen), told

    inputs = normal(d, d), booleans(d, d), integers(d, below=d, distinct=True)
    return Built(run, (*inputs, normal(rows, d), integers(below=1000)))
