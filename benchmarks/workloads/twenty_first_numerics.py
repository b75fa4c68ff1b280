"""Programs of tests, rhythms, mixtures, forecasts, photographs and stars, the twenty-first set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, booleans, integers, normal, pick, program

GROUP = "twenty-first"


@program("genes-compared-by-welch-tests-with-false-rates", GROUP)
def _welch(size: Size) -> Built:
    """This compares genes of two groups of samples by Welch's test and corrects for many tests (Benjamini-Hochberg).

    Counts are scaled to the depth of each sample and logged first; counts that are not present are left out.
    """
    genes, samples = pick(size, (60007, 385), (8009, 181), (7, 12))

    def compare(counts, present, treated):
        depth = jnp.sum(counts, axis=0, dtype=jnp.float32)
        x = jnp.log2(counts.astype(jnp.float32) * 1e6 / depth + 1.0)
        seen = present | (jnp.arange(samples) < 6)
        group = treated | (jnp.arange(samples) % 3 == 0)

        def moments(use):
            use = use.astype(jnp.float32)
            n = jnp.maximum(jnp.sum(use, axis=1), 2.0)
            mean = jnp.sum(x * use, axis=1) / n
            return n, mean, jnp.sum(jnp.square(x - mean[:, None]) * use, axis=1) / (n - 1)

        n1, m1, v1 = moments(seen & group)
        n2, m2, v2 = moments(seen & ~group)
        e1, e2 = v1 / n1 + 1e-6, v2 / n2 + 1e-6
        t = (m1 - m2) * lax.rsqrt(e1 + e2)
        free = jnp.square(e1 + e2) / (e1**2 / (n1 - 1) + e2**2 / (n2 - 1))
        z = t * (1 - 1 / (4 * free)) * lax.rsqrt(1 + t * t / (2 * free))
        p = 2 * jax.scipy.stats.norm.sf(jnp.abs(z))
        order = jnp.argsort(p)
        ranked = p[order] * genes / jnp.arange(1, genes + 1)
        ranked = jnp.minimum(lax.cummin(ranked, reverse=True), 1.0)
        return t, p, jnp.zeros(genes).at[order].set(ranked), m1 - m2

    counts = Random((genes, samples), jnp.dtype(jnp.int32), below=400)
    return Built(compare, (counts, booleans(genes, samples), booleans(samples)))


@program("largest-gaps-of-distributions-with-shuffled-labels", GROUP)
def _kolmogorov(size: Size) -> Built:
    """This tests if columns of a table differ between two groups by the largest gap of their distributions.

    The labels are shuffled many times to find how often chance gives as large a gap (Kolmogorov-Smirnov).
    """
    rows, columns, shuffles = pick(size, (2003, 120, 128), (601, 24, 48), (9, 3, 4))

    def test(table, labels, seed):
        order = jnp.argsort(table, axis=0)
        values = jnp.take_along_axis(table, order, axis=0)
        last = jnp.concatenate([values[1:] != values[:-1], jnp.ones((1, columns), bool)])

        def gap(labels):
            ones = jnp.sum(labels)
            steps = jnp.where(labels, 1.0 / jnp.maximum(ones, 1), -1.0 / jnp.maximum(rows - ones, 1))
            path = jnp.cumsum(steps[order], axis=0)
            return jnp.max(jnp.where(last, jnp.abs(path), 0.0), axis=0)

        own = gap(labels)
        keys = jax.random.split(jax.random.key(seed), shuffles)
        others = lax.map(lambda key: gap(jax.random.permutation(key, labels)), keys, batch_size=4)
        chance = (1 + jnp.sum(others >= own - 1e-6, axis=0)) / (shuffles + 1)
        return own, chance, jnp.quantile(others, 0.95, axis=0)

    return Built(test, (normal(rows, columns), booleans(rows), integers(below=999)))


@program("fast-rhythms-tied-to-phases-of-slow-rhythms", GROUP)
def _coupling(size: Size) -> Built:
    """This measures how the strength of fast brain rhythms follows the phase of slow ones (Tort's index, 2010).

    Bands are cut by Fourier filters, analytic signals give phases and strengths, and strengths are averaged in bins.
    """
    channels, t, slow, fast, bins = pick(size, (24, 6000, 8, 12, 18), (8, 1500, 6, 9, 18), (2, 40, 2, 3, 4))

    def couple(waves, rate):
        x = waves - jnp.mean(waves, axis=-1, keepdims=True)
        x = x * jnp.asarray(np.hanning(t), jnp.float32)
        spectrum = jnp.fft.fft(x)
        f = jnp.fft.fftfreq(t) * (200.0 + 50.0 * jax.nn.sigmoid(rate))

        def band(centres, width):
            pass_ = jnp.exp(-0.5 * ((f - centres[:, None]) / width[:, None]) ** 2) * jnp.where(f > 0, 2.0, 0.0)
            return jnp.fft.ifft(spectrum[:, None] * pass_)

        low = jnp.linspace(3.0, 12.0, slow)
        high = jnp.linspace(30.0, 90.0, fast)
        phase = jnp.angle(band(low, jnp.full(slow, 1.0)))
        strength = jnp.abs(band(high, 0.15 * high))
        slot = jnp.clip(jnp.floor((phase + jnp.pi) / (2 * jnp.pi) * bins).astype(jnp.int32), 0, bins - 1)

        def one(slot, strength):
            inside = jax.nn.one_hot(slot, bins)
            mean = strength @ inside / jnp.maximum(jnp.sum(inside, axis=0), 1.0)
            return mean / jnp.sum(mean, axis=-1, keepdims=True)

        share = jax.vmap(jax.vmap(one, in_axes=(0, None)))(slot, strength)
        index = (np.log(bins) + jnp.sum(share * jnp.log(share + 1e-9), axis=-1)) / np.log(bins)
        pull = jnp.einsum("cst,cft->csf", jnp.exp(1j * phase), strength.astype(jnp.complex64)) / t
        return index, jnp.abs(pull), share.argmax(axis=-1)

    return Built(couple, (normal(channels, t), normal()))


@program("two-liquids-part-by-half-implicit-fourier-steps", GROUP)
def _cahn_hilliard(size: Size) -> Built:
    """This follows two liquids that part, by half-implicit Fourier steps of the Cahn-Hilliard equation with noise.

    Each record holds the free energy, the mean, and the spectrum averaged over rings, whose mean is the length scale.
    """
    b, side, rings, records, inner = pick(size, (4, 384, 96, 4, 8), (1, 162, 40, 4, 8), (1, 10, 4, 2, 2))
    dt, kappa, hold = 0.1, 0.5, 1.0

    def run(start, seed):
        k = 2 * jnp.pi * jnp.fft.fftfreq(side)
        kr = 2 * jnp.pi * jnp.fft.rfftfreq(side)
        k2 = k[:, None] ** 2 + kr**2
        keep = (jnp.abs(k)[:, None] < 2 * jnp.pi / 3) & (kr < 2 * jnp.pi / 3)
        below = 1 + dt * k2 * (kappa * k2 + hold)
        ring = jnp.clip((jnp.sqrt(k2) / jnp.pi * rings).astype(jnp.int32), 0, rings - 1).reshape(-1)

        def step(carry, _):
            c, key = carry
            key, use = jax.random.split(key)
            push = jnp.fft.rfft2(c**3 - (1 + hold) * c) * keep
            noise = jnp.fft.rfft2(jax.random.normal(use, c.shape) * 0.01)
            c = jnp.fft.irfft2((jnp.fft.rfft2(c) - dt * k2 * push + dt * jnp.sqrt(k2) * noise) / below, s=(side, side))
            return (c, key), None

        def record(carry, _):
            (c, key), _ = lax.scan(step, carry, None, length=inner)
            steep = (jnp.roll(c, -1, axis=1) - c) ** 2 + (jnp.roll(c, -1, axis=2) - c) ** 2
            energy = jnp.mean(0.25 * (c * c - 1) ** 2 + 0.5 * kappa * steep, axis=(1, 2))
            power = jnp.mean(jnp.abs(jnp.fft.rfft2(c)) ** 2, axis=0).reshape(-1)
            share = jax.ops.segment_sum(power, ring, rings) / jnp.maximum(jnp.bincount(ring, length=rings), 1)
            length = jnp.sum(share) / jnp.sum(share * jnp.arange(0.5, rings))
            return (c, key), (energy, jnp.mean(c, axis=(1, 2)), share, length)

        (c, _), records_ = lax.scan(record, (0.1 * start, jax.random.key(seed)), None, length=records)
        return c, records_

    return Built(run, (normal(b, side, side), integers(below=999)))


@program("many-shops-sales-by-holt-winters-on-a-grid-of-rates", GROUP)
def _holt_winters(size: Size) -> Built:
    """This forecasts sales by level, trend and season, each shop with the smoothing rates that fit its past best.

    Every shop tries a grid of rates at once in one scan over weeks; missing weeks leave the state as predicted.
    """
    shops, weeks, season, ahead, grid = pick(size, (3001, 156, 13, 26, 4), (301, 104, 13, 26, 3), (3, 9, 2, 3, 2))
    rates = np.stack(np.meshgrid(*[np.linspace(0.05, 0.6, grid)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)

    def forecast(sales, seen):
        alpha, beta, gamma = jnp.asarray(rates, jnp.float32).T
        y = jnp.exp(0.3 * sales) * 50
        level = jnp.mean(y[:, :season], axis=1)
        trend = (jnp.mean(y[:, season : 2 * season], axis=1) - level) / season
        cycle = y[:, :season] / level[:, None]

        def step(carry, week):
            level, trend, cycle, cost = carry
            y, ok, at = week
            first = cycle[:, :, 0]
            guess = (level + trend) * first
            y = jnp.where(ok[:, None], y[:, None], guess)
            fresh = jnp.maximum(alpha * y / first + (1 - alpha) * (level + trend), 1.0)
            slope = beta * (fresh - level) + (1 - beta) * 0.98 * trend
            latest = jnp.clip(gamma * y / fresh + (1 - gamma) * first, 0.2, 5.0)
            cycle = jnp.concatenate([cycle[:, :, 1:], latest[:, :, None]], axis=2)
            return (fresh, slope, cycle, cost + jnp.where(at >= 2 * season, (y - guess) ** 2, 0)), None

        wide = (shops, len(rates))
        start = (jnp.broadcast_to(level[:, None], wide), jnp.broadcast_to(trend[:, None], wide))
        start = (*start, jnp.broadcast_to(cycle[:, None], (*wide, season)), jnp.zeros(wide))
        (level, trend, cycle, cost), _ = lax.scan(step, start, (y.T, seen.T, jnp.arange(weeks)))
        best = jnp.argmin(cost, axis=1)
        level, trend, cost = (jnp.take_along_axis(z, best[:, None], axis=1) for z in (level, trend, cost))
        cycle = jnp.take_along_axis(cycle, best[:, None, None], axis=1)[:, 0]
        h = jnp.arange(1, ahead + 1)
        damped = jnp.cumsum(0.98**h)
        path = (level + damped * trend) * cycle[:, (h - 1) % season]
        spread = jnp.sqrt(cost / (weeks - 2 * season) * h)
        return path, path - 1.28 * spread, path + 1.28 * spread, jnp.asarray(rates, jnp.float32)[best]

    return Built(forecast, (normal(shops, weeks), booleans(shops, weeks)))


@program("photographs-laid-over-each-other-by-random-fours", GROUP)
def _homography(size: Size) -> Built:
    """This lays photographs over each other by plane maps from random fours of matched points, then refits (RANSAC).

    Matches are mutual nearest descriptors; the map with most inliers is refined by weighted least squares.
    """
    b, points, d, tries = pick(size, (8, 900, 128, 512), (2, 250, 64, 160), (1, 14, 8, 6))

    def rows_of(a, c):
        x, y, u, v = a[..., 0], a[..., 1], c[..., 0], c[..., 1]
        one, zero = jnp.ones_like(x), jnp.zeros_like(x)
        top = jnp.stack([x, y, one, zero, zero, zero, -u * x, -u * y], axis=-1)
        low = jnp.stack([zero, zero, zero, x, y, one, -v * x, -v * y], axis=-1)
        return jnp.concatenate([top, low], axis=-2), jnp.concatenate([u, v], axis=-1)

    def carry(h, a):
        m = jnp.append(h, 1.0).reshape(3, 3)
        w = a @ m[2, :2] + 1.0
        return (a @ m[:2, :2].T + m[:2, 2]) / jnp.where(jnp.abs(w) < 1e-3, 1e-3, w)[:, None]

    def align(places, turns, describe, noise, key):
        describe = describe / jnp.linalg.norm(describe, axis=-1, keepdims=True)
        order = jnp.argsort(turns)
        other = describe[order] + 0.05 * noise[:, :d]
        shift = 0.05 * noise[0, :8] + jnp.array([1.0, 0, 0, 0, 1.0, 0, 0, 0])
        target = carry(shift, places)[order] + 0.004 * noise[:, :2]
        alike = describe @ other.T
        near, back = jnp.argmax(alike, axis=1), jnp.argmax(alike, axis=0)
        top = lax.top_k(alike, 2)[0]
        good = (back[near] == jnp.arange(points)) & (2 - 2 * top[:, 0] < 0.81 * (2 - 2 * top[:, 1]))
        found = target[near]

        def attempt(key):
            draw = jax.random.gumbel(key, (points,)) + jnp.where(good, 0.0, -1e9)
            pickd = lax.top_k(draw, 4)[1]
            a, y = rows_of(places[pickd], found[pickd])
            h = jnp.linalg.solve(a + 1e-6 * jnp.eye(8), y)
            error = jnp.sum((carry(h, places) - found) ** 2, axis=-1)
            score = jnp.sum(jnp.where(good, jnp.minimum(error, 4e-4), 0.0))
            return h, jnp.where(jnp.all(jnp.isfinite(h)), score, jnp.inf)

        maps, scores = jax.vmap(attempt)(jax.random.split(key, tries))
        h = maps[jnp.argmin(scores)]
        h = jnp.where(jnp.isfinite(h), h, jnp.array([1.0, 0, 0, 0, 1.0, 0, 0, 0]))
        a, y = rows_of(places, found)

        def refine(h, _):
            error = jnp.sum((carry(h, places) - found) ** 2, axis=-1)
            w = jnp.tile(good / (1 + error / 1e-4) ** 2, 2)
            wa = a * w[:, None]
            return jnp.linalg.solve(a.T @ wa + 1e-4 * jnp.eye(8), wa.T @ y + 1e-4 * h), jnp.mean(w)

        h, inside = lax.scan(refine, h, None, length=4)
        return h, inside, jnp.sum(good)

    def run(places, turns, describe, noise, seed):
        return jax.vmap(align)(places, turns, describe, noise, jax.random.split(jax.random.key(seed), b))

    inputs = (normal(b, points, 2, scale=0.5), normal(b, points), normal(b, points, d), normal(b, points, max(d, 8)))
    return Built(run, (*inputs, integers(below=999)))


@program("stars-of-a-cluster-pull-each-other-with-hermite-steps", GROUP)
def _cluster(size: Size) -> Built:
    """This moves the stars of a cluster by the pull of every other star, with fourth-order Hermite steps.

    Pulls and their rates are summed over all pairs in row blocks; energies and mass radii are recorded.
    """
    stars, block, steps = pick(size, (4000, 500, 6), (750, 125, 6), (12, 4, 2))
    dt, soft = 1 / 256, 1e-2

    def pull(x, v, mass):
        def rows(args):
            xi, vi = args
            r, w = x[None] - xi[:, None], v[None] - vi[:, None]
            d2 = jnp.sum(r * r, axis=-1) + soft**2
            inverse = lax.rsqrt(d2)
            weight = mass * inverse**3
            rate = 3 * jnp.sum(r * w, axis=-1) / d2
            force = jnp.einsum("ij,ijc->ic", weight, r)
            jerk = jnp.einsum("ij,ijc->ic", weight, w - rate[..., None] * r)
            return force, jerk, jnp.sum(mass * inverse, axis=-1)

        parts = lax.map(rows, (x.reshape(-1, block, 3), v.reshape(-1, block, 3)))
        return tuple(z.reshape(stars, *z.shape[2:]) for z in parts)

    def run(x, v, heavy):
        mass = jnp.exp(0.5 * heavy)
        mass = mass / jnp.sum(mass)
        x = x - mass @ x
        v = 0.6 * (v - mass @ v)

        def step(carry, _):
            x, v, a, j = carry
            x1 = x + dt * v + dt**2 / 2 * a + dt**3 / 6 * j
            v1 = v + dt * a + dt**2 / 2 * j
            a1, j1, potential = pull(x1, v1, mass)
            fresh_v = v + dt / 2 * (a + a1) + dt**2 / 12 * (j - j1)
            fresh_x = x + dt / 2 * (v + fresh_v) + dt**2 / 12 * (a - a1)
            energy = 0.5 * mass @ jnp.sum(fresh_v**2, axis=-1) - 0.5 * mass @ (potential - mass / soft)
            radius = jnp.linalg.norm(fresh_x - mass @ fresh_x, axis=-1)
            order = jnp.argsort(radius)
            inside = jnp.cumsum(mass[order])
            shells = radius[order][jnp.searchsorted(inside, jnp.array([0.1, 0.25, 0.5, 0.75]))]
            return (fresh_x, fresh_v, a1, j1), (energy, shells, mass @ jnp.cross(fresh_x, fresh_v))

        a, j, _ = pull(x, v, mass)
        (x, v, _, _), records = lax.scan(step, (x, v, a, j), None, length=steps)
        return x, v, records

    return Built(run, (normal(stars, 3), normal(stars, 3), normal(stars)))
