"""Segments, medoids, ratings, encodings of sets and areas under curves, the thirty-eighth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import erfc

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import dense, dense_of, layer_norm, norm_of

GROUP = "thirty-eighth"


@program("semi-markov-crf-named-entity-segments-likelihood-and-best-path-grad", GROUP)
def _segments(size: Size) -> Built:
    """This program gives slopes of a tagger that splits sentences into labelled segments of up to a few words.

    It is the semi-Markov conditional random field (Sarawagi, 2004): a forward pass sums over all lengths of the last segment, its
    gradient trains a small network of word states, and the best segmentation is found with maxima and read back.
    """
    b, t, longest, labels, n, wide = pick(size, (32, 96, 8, 18, 768, 512), (8, 40, 6, 9, 128, 128), (2, 5, 3, 3, 4, 6))
    dtype = half(size)

    def scored(p, state):
        """This gives scores of segments [b, t, longest, labels] by last word and length."""
        x = layer_norm(p["norm"], jax.nn.gelu(dense(p["inner"], state)))
        inside, start, end = jnp.split(dense(p["head"], x).astype(jnp.float32), 3, axis=-1)
        total = jnp.pad(jnp.cumsum(inside, axis=1), ((0, 0), (1, 0), (0, 0)))
        first = jnp.arange(t)[:, None] - jnp.arange(longest)
        at = jnp.maximum(first, 0)
        score = total[:, 1:, None] - total[:, at] + start[:, at] + end[:, :, None] + p["length"]
        return jnp.where((first >= 0)[..., None], score, -1e9)

    def partition(p, score, real):
        """This sums over all segmentations of each sentence."""

        def step(ring, at):
            """This ends segments at one word; the ring holds what led to the starts [b, longest, labels]."""
            score, real = at
            fresh = jax.nn.logsumexp(ring + score, axis=1)
            led = jax.nn.logsumexp(fresh[:, :, None] + p["moves"], axis=1)
            moved = jnp.concatenate([led[:, None], ring[:, :-1]], axis=1)
            return jnp.where(real[:, None, None], moved, ring), fresh

        ring = jnp.full((b, longest, labels), -1e9).at[:, 0].set(p["begin"])
        _, ends = lax.scan(step, ring, (score.swapaxes(0, 1), real.T))
        last = jnp.sum(real, axis=1) - 1
        return jax.nn.logsumexp(ends[last, jnp.arange(b)] + p["finish"], axis=-1)

    def best_path(p, score, real):
        """This gives the best label of each word and where segments start."""

        def step(ring, at):
            """This keeps the best way to each label, and how long the last segment and what label before it were."""
            score, real = at
            both = ring + score
            long, fresh = jnp.argmax(both, axis=1), jnp.max(both, axis=1)
            led = fresh[:, :, None] + p["moves"]
            moved = jnp.concatenate([jnp.max(led, axis=1)[:, None], ring[:, :-1]], axis=1)
            return jnp.where(real[:, None, None], moved, ring), (fresh, long, jnp.argmax(led, axis=1))

        ring = jnp.full((b, longest, labels), -1e9).at[:, 0].set(p["begin"])
        _, (ends, longs, before) = lax.scan(step, ring, (score.swapaxes(0, 1), real.T))
        last, row = jnp.sum(real, axis=1) - 1, jnp.arange(b)

        def back(carry, k):
            """This reads one word back: at the last word of a segment the next label and length are looked up."""
            label, left = carry
            here, begins = k <= last, k == last
            fresh = jnp.argmax(ends[last, row] + p["finish"], axis=-1)
            other = before[k, row, label]
            label = jnp.where(begins, fresh, jnp.where(left == 0, other, label))
            left = jnp.where(begins | (left == 0), longs[k, row, label], left - 1)
            return (jnp.where(here, label, 0), jnp.where(here, left, 1)), (jnp.where(here, label, -1), left == 0)

        start = jnp.zeros(b, jnp.int32), jnp.ones(b, jnp.int32)
        _, (label, starts) = lax.scan(back, start, jnp.arange(t), reverse=True)
        return label.T, starts.T & real

    def run(p, state, kind, cut, short):
        """This gives the loss, slopes, best labels and starts, and the shares of segments that are found."""
        real = jnp.arange(t) < t - short[:, None]
        begins = ((cut == 0) | (jnp.arange(t) % longest == 0)) & real
        first = lax.cummax(jnp.where(begins, jnp.arange(t), 0), axis=1)
        label = jnp.take_along_axis(kind, first, axis=1)
        ends = real & (jnp.pad(begins[:, 1:], ((0, 0), (0, 1)), constant_values=True) | ~jnp.roll(real, -1, axis=1))

        def loss(p):
            """This is the mean surprise of true segmentations by words."""
            score = scored(p, state)
            chosen = jnp.take_along_axis(score, (jnp.arange(t) - first)[..., None, None], axis=2)[:, :, 0]
            chosen = jnp.take_along_axis(chosen, label[..., None], axis=2)[..., 0]
            gold = jnp.sum(jnp.where(ends, chosen, 0.0), axis=1) + p["begin"][label[:, 0]]
            moves = p["moves"][label[:, :-1], label[:, 1:]]
            gold = gold + jnp.sum(jnp.where(begins[:, 1:], moves, 0.0), axis=1)
            gold = gold + p["finish"][jnp.take_along_axis(label, jnp.sum(real, axis=1)[:, None] - 1, axis=1)[:, 0]]
            return jnp.sum(partition(p, score, real) - gold) / jnp.sum(real), score

        (value, score), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        told, starts = best_path(p, score, real)
        stop = jnp.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=True) | ~jnp.roll(real, -1, axis=1)
        since = lax.cummax(jnp.where(starts, jnp.arange(t), 0), axis=1)
        hit = jnp.sum(ends & stop & real & (since == first) & (told == label))
        exact, recall = hit / jnp.sum(starts), hit / jnp.sum(begins)
        return value, slopes, told, starts, 2 * exact * recall / jnp.maximum(exact + recall, 1e-6)

    p = {"inner": dense_of(n, wide, dtype), "norm": norm_of(wide, dtype), "head": dense_of(wide, 3 * labels, dtype)}
    p |= {"length": normal(longest, labels, scale=0.3), "moves": normal(labels, labels, scale=0.3)}
    p |= {"begin": normal(labels, scale=0.3), "finish": normal(labels, scale=0.3)}
    inputs = normal(b, t, n, dtype=dtype), integers(b, t, below=labels), integers(b, t, below=3)
    return Built(run, (p, *inputs, integers(b, below=t // 2)))


@program("faster-pam-k-medoids-build-and-swap-until-no-gain-while", GROUP)
def _medoids(size: Size) -> Built:
    """This program clusters points around medoids: members of the clusters that are nearest to all others of their cluster.

    It is PAM with the removal losses of FasterPAM (Schubert, 2021; kno10/python-kmedoids): medoids are first picked greedily, then
    the best swap of a medoid and another point is done until none helps; silhouettes tell how good the clusters are.
    """
    n, d, k, most = pick(size, (3072, 64, 32, 64), (640, 24, 10, 40), (9, 3, 2, 4))

    def run(middle, which, noise):
        """This gives medoids, clusters, the mean distance, how many swaps it took, silhouettes and sizes of clusters."""
        x = middle[which] + noise
        square = jnp.sum(x * x, axis=1)
        gap = jnp.sqrt(jnp.maximum(square[:, None] + square - 2 * x @ x.T, 0.0))
        gap = jnp.where(jnp.eye(n, dtype=bool), 0.0, gap)

        def grow(near, _):
            """This adds the point that brings all points nearest to a medoid."""
            cost = jnp.sum(jnp.minimum(near[:, None], gap), axis=0)
            best = jnp.argmin(cost)
            return jnp.minimum(near, gap[:, best]), best

        _, medoid = lax.scan(grow, jnp.full(n, 1e9), None, length=k)

        def measured(medoid):
            """This gives for each point its nearest medoid, and distances to the nearest and the second."""
            away, at = lax.top_k(-gap[:, medoid], 2)
            return at[:, 0], -away[:, 0], -away[:, 1]

        def swap(carry):
            """This does the best swap of all pairs of a medoid and a point."""
            medoid, _, rounds = carry
            at, near, second = measured(medoid)
            mine = jax.nn.one_hot(at, k)
            removal = (second - near) @ mine
            closer = gap < near[:, None]
            shared = jnp.sum(jnp.where(closer, gap - near[:, None], 0.0), axis=0)
            own = jnp.where(closer, near[:, None] - second[:, None], jnp.minimum(gap - second[:, None], 0.0))
            change = removal[:, None] + shared + mine.T @ own
            best = jnp.argmin(change)
            gain = -change.reshape(-1)[best]
            moved = medoid.at[best // n].set(best % n)
            return jnp.where(gain > 1e-3, moved, medoid), gain, rounds + 1

        def going(carry):
            """This tells whether the last swap helped."""
            return (carry[1] > 1e-3) & (carry[2] < most)

        medoid, _, rounds = lax.while_loop(going, swap, (medoid, jnp.float32(jnp.inf), jnp.int32(0)))
        at, near, _ = measured(medoid)
        mine = jax.nn.one_hot(at, k)
        many = jnp.sum(mine, axis=0)
        away = gap @ mine
        own = jnp.sum(away * mine, axis=1) / jnp.maximum(many[at] - 1, 1.0)
        other = jnp.min(jnp.where(mine > 0, jnp.inf, away / jnp.maximum(many, 1.0)), axis=1)
        silhouette = jnp.where(many[at] > 1, (other - own) / jnp.maximum(jnp.maximum(own, other), 1e-9), 0.0)
        return medoid, at, jnp.mean(near), rounds, silhouette, many

    return Built(run, (normal(k, d, scale=1.5), integers(n, below=k), normal(n, d)))


@program("bradley-terry-arena-ratings-with-ties-and-bootstrap-intervals", GROUP)
def _ratings(size: Size) -> Built:
    """This program ranks language models by which of two answers people liked better, with intervals by resampling.

    It is the rating of Chatbot Arena (Chiang, 2024; lm-sys/FastChat): a Bradley-Terry model is fitted to counts of wins, where ties
    are half a win for each, by minorisation (Hunter, 2004), and once more for each of many resampled sets of battles.
    """
    models, battles, samples, rounds = pick(size, (96, 60000, 64, 60), (32, 6000, 40, 40), (4, 12, 3, 4))

    def fitted(one, two, result):
        """This gives the ratings of models, wins of pairs, and how well ratings explain the results."""
        cell = jnp.zeros((models, models))
        won = jnp.where(result == 0, 1.0, jnp.where(result == 1, 0.0, 0.5))
        wins = cell.at[one, two].add(won).at[two, one].add(1.0 - won)
        wins = jnp.where(jnp.eye(models, dtype=bool), 0.0, wins + 0.02)
        games, total = wins + wins.T, jnp.sum(wins, axis=1)

        def again(_, strength):
            """This is one step of minorisation."""
            fresh = total / jnp.sum(games / (strength[:, None] + strength), axis=1)
            return fresh / jnp.exp(jnp.mean(jnp.log(fresh)))

        strength = lax.fori_loop(0, rounds, again, jnp.ones(models))
        surprise = jnp.sum(wins * jnp.log1p(strength / strength[:, None])) / jnp.sum(wins)
        return 1000.0 + 400.0 / np.log(10.0) * jnp.log(strength), wins, surprise

    def run(skill, one, step, shaken, seed):
        """This gives ratings, their intervals, ranks by them, expected shares of wins, and surprises."""
        two = (one + 1 + step) % models
        away = skill[one] - skill[two] + shaken
        result = jnp.where(jnp.abs(away) < 0.3, 2, jnp.where(away > 0, 0, 1))
        rating, wins, surprise = fitted(one, two, result)

        def resampled(key):
            """This fits ratings to battles drawn with replacement."""
            drawn = jax.random.randint(key, (battles,), 0, battles)
            return fitted(one[drawn], two[drawn], result[drawn])[0]

        many = jax.vmap(resampled)(jax.random.split(jax.random.key(seed), samples))
        low, middle, high = jnp.quantile(many, jnp.array([0.025, 0.5, 0.975]), axis=0)
        rank = 1 + jnp.sum(low > high[:, None], axis=1)
        expected = 1.0 / (1.0 + 10.0 ** ((middle - middle[:, None]) / 400.0))
        games = wins + wins.T
        order = jnp.argsort(-middle)
        uneven = jnp.sum(jnp.abs(wins - games * expected)) / jnp.sum(games)
        return rating, jnp.stack([low, middle, high]), rank, expected[order][:, order], surprise, uneven

    inputs = normal(models, scale=0.8), integers(battles, below=models), integers(battles, below=models - 1)
    return Built(run, (*inputs, normal(battles, scale=1.2), integers(below=1000)))


@program("muvera-fixed-dimensional-encodings-then-chamfer-rerank-search", GROUP)
def _muvera(size: Size) -> Built:
    """This program searches documents of many vectors each by first turning every set of vectors into one long vector.

    It is MUVERA (Dhulipala, 2024; google/graph-mining): random hyperplanes split the space, a query adds up its vectors in each
    part and a document averages its own, empty parts take the nearest vector, and candidates are scored by sums of maxima.
    """
    documents, t, queries, s, d, repeats, planes, small, kept, best = pick(
        size,
        (3072, 64, 32, 32, 128, 8, 4, 16, 64, 10),
        (320, 24, 12, 16, 32, 4, 3, 8, 24, 5),
        (4, 4, 2, 3, 4, 2, 2, 2, 3, 2),
    )
    dtype, parts = half(size), 2**planes
    corner = (jnp.arange(parts)[:, None] >> jnp.arange(planes)) & 1

    def parted(x, plane):
        """This tells on which sides of planes vectors lie [..., repeats, planes], and in which part."""
        sides = (jnp.einsum("...d,rdk->...rk", x, plane, preferred_element_type=jnp.float32) > 0).astype(jnp.int32)
        return sides, jnp.sum(sides << jnp.arange(planes), axis=-1)

    def run(document, short, query, plane, signs):
        """This gives the best documents and their scores, what long vectors ranked first, and shares of filled parts."""
        real = jnp.arange(t) < t - short[:, None]
        document, query = (
            x / jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True) for x in (document, query)
        )
        document, query = document.astype(dtype), query.astype(dtype)
        thinned = jnp.where(signs > 0, 1.0, -1.0) * small**-0.5

        def encoded_document(z):
            """This is the long vector of one document."""
            x, real = z
            sides, part = parted(x, plane)
            mine = jax.nn.one_hot(part, parts) * real[:, None, None]
            many = jnp.sum(mine, axis=0)
            mean = jnp.einsum("trp,td->rpd", mine, x.astype(jnp.float32)) / jnp.maximum(many, 1.0)[..., None]
            apart = jnp.sum(sides[:, :, None] != corner, axis=-1)
            nearest = jnp.argmin(jnp.where(real[:, None, None], apart, planes + 1), axis=0)
            full = jnp.where((many > 0)[..., None], mean, x[nearest].astype(jnp.float32))
            return jnp.einsum("rpd,rds->rps", full, thinned).reshape(-1).astype(dtype), jnp.mean(many > 0)

        def encoded_query(x):
            """This is the long vector of one query."""
            mine = jax.nn.one_hot(parted(x, plane)[1], parts)
            total = jnp.einsum("trp,td->rpd", mine, x.astype(jnp.float32))
            return jnp.einsum("rpd,rds->rps", total, thinned).reshape(-1).astype(dtype)

        long, filled = jax.vmap(encoded_document)((document, real))
        asked = jax.vmap(encoded_query)(query)
        guess = jnp.matmul(asked, long.T, preferred_element_type=jnp.float32) / repeats
        first, chosen = lax.top_k(guess, kept)
        met = jnp.einsum("qsd,qktd->qkst", query, document[chosen], preferred_element_type=jnp.float32)
        exact = jnp.sum(jnp.max(jnp.where(real[chosen][:, :, None], met, -1.0), axis=-1), axis=-1)
        value, place = lax.top_k(exact, best)
        off = jnp.mean(first - exact, axis=1)
        return jnp.take_along_axis(chosen, place, axis=1), value, place, off, jnp.mean(filled)

    inputs = normal(documents, t, d, dtype=dtype), integers(documents, below=t // 2), normal(queries, s, d, dtype=dtype)
    return Built(run, (*inputs, normal(repeats, d, planes, dtype=dtype), normal(repeats, d, small)))


@program("delong-comparison-of-areas-under-correlated-curves-with-holm-correction", GROUP)
def _areas(size: Size) -> Built:
    """This program tells which of several classifiers have a larger area under their curve than others, for many labels.

    It is the test of DeLong (1988) in the fast form by sorted ranks (Sun, 2014): placements of cases among controls give
    covariances of areas, chances of all pairs are corrected by Holm's steps, and the best cut of each classifier is told.
    """
    labels, models, n = pick(size, (14, 8, 20000), (8, 5, 4000), (2, 3, 7))
    one, two = np.triu_indices(models, 1)
    pairs = len(one)

    def placed(score, case):
        """This gives the placement of every example among the others, average precision and the best cut of one model."""
        order = jnp.argsort(score)
        value, yes = score[order], case[order].astype(jnp.float32)
        below = jnp.concatenate([jnp.zeros((1, 2)), jnp.cumsum(jnp.stack([yes, 1 - yes], axis=1), axis=0)])
        left, right = (jnp.searchsorted(value, value, side=k, method="sort") for k in ("left", "right"))
        middle = 0.5 * (below[left] + below[right]) / jnp.maximum(below[-1], 1.0)
        mine = jnp.where(yes > 0, middle[:, 1], 1 - middle[:, 0])
        above = below[-1] - below[left]
        exact = above[:, 0] / jnp.maximum(above[:, 0] + above[:, 1], 1.0)
        precision = jnp.sum(exact * yes) / jnp.maximum(jnp.sum(yes), 1.0)
        share = above / jnp.maximum(below[-1], 1.0)
        cut = jnp.argmax(share[:, 0] - share[:, 1])
        return jnp.zeros(n).at[order].set(mine), precision, value[cut], share[cut]

    def compared(score, case):
        """This compares all models on one label: score [models, n], case [n]."""
        place, precision, cut, share = jax.vmap(placed, in_axes=(0, None))(score, case)
        cases = jnp.sum(case)
        area = jnp.sum(jnp.where(case, place, 0.0), axis=1) / cases
        off = place - area[:, None]
        spread = 0.0
        for mine, many in ((case, cases), (~case, n - cases)):
            kept = jnp.where(mine, off, 0.0)
            spread = spread + kept @ kept.T / (jnp.maximum(many - 1, 1) * many)
        gap = area[one] - area[two]
        variance = spread[one, one] + spread[two, two] - 2 * spread[one, two]
        z = gap / jnp.sqrt(jnp.maximum(variance, 1e-10))
        chance = erfc(jnp.abs(z) * 0.5**0.5)
        order = jnp.argsort(chance)
        stepped = jnp.minimum(lax.cummax(chance[order] * (pairs - jnp.arange(pairs))), 1.0)
        inside = jnp.clip(area, 1e-4, 1 - 1e-4)
        odds = jnp.log(inside / (1 - inside))
        error = jnp.sqrt(jnp.maximum(jnp.diagonal(spread), 0.0)) / (inside * (1 - inside))
        interval = jax.nn.sigmoid(odds[:, None] + jnp.array([-1.96, 1.96]) * error[:, None])
        return area, interval, spread, z, jnp.zeros(pairs).at[order].set(stepped), precision, cut, share

    def run(strength, hidden, noise, threshold):
        """This gives areas with intervals and covariances, tests of pairs, precisions and cuts for all labels."""
        truth = hidden > threshold[:, None]
        truth = truth.at[:, 0].set(True).at[:, 1].set(False)
        score = jax.nn.sigmoid(jax.nn.softplus(strength)[..., None] * hidden[:, None] + noise)
        return jax.vmap(compared)(jnp.round(score * 4096) / 4096, truth)

    inputs = normal(labels, models, scale=0.3), normal(labels, n), normal(labels, models, n)
    return Built(run, (*inputs, normal(labels, scale=0.3, offset=1.0)))
