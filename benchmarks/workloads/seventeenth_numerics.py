"""Programs of options, spectra, microscopes, light, search and pitch, the seventeenth set: its author saw no plan."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program, weight
from benchmarks.workloads.sixteenth_training import moments

GROUP = "seventeenth"


@program("option-on-price-and-variance-grid-alternating-directions", GROUP)
def _option(size: Size) -> Built:
    """This gives prices of puts with a random variance on grids, by steps that are implicit in one direction at a time.

    The mixed derivative is taken explicitly; rows and columns of tridiagonal equations are solved by sweeps, and an early exercise
    is allowed after each step.
    """
    books, prices, variances, steps = pick(size, (256, 71, 51, 2), (4, 81, 41, 6), (2, 9, 7, 3))
    s = np.linspace(0.0, 3.0, prices).astype(np.float32)[:, None]
    v = np.linspace(0.0, 1.0, variances).astype(np.float32)[None, :]
    ds, dv, dt, theta = s[1, 0], v[0, 1], np.float32(0.5 / steps), 0.5

    def swept(lower, middle, upper, right):
        """Solve tridiagonal equations along the first axis, for every column at once."""

        def down(carry, x):
            c, d = carry
            lo, mid, up, r = x
            scale = 1.0 / (mid - lo * c)
            carry = (up * scale, (r - lo * d) * scale)
            return carry, carry

        zero = jnp.zeros_like(right[0])
        _, (c, d) = lax.scan(down, (zero, zero), (lower, middle, upper, right))

        def up(x, cd):
            x = cd[1] - cd[0] * x
            return x, x

        _, x = lax.scan(up, zero, (c, d), reverse=True)
        return x

    def price(raw):
        strike, rate = 1.0 + 0.1 * jnp.tanh(raw[0]), 0.03 + 0.01 * jnp.tanh(raw[1])
        pull, mean, wild, rho = 1.5 + jnp.tanh(raw[2]), 0.09, 0.4 + 0.1 * jnp.tanh(raw[3]), 0.7 * jnp.tanh(raw[4])
        payoff = jnp.broadcast_to(jnp.maximum(strike - s, 0.0), (prices, variances))
        inside_s = (jnp.arange(prices) > 0)[:, None] & (jnp.arange(prices) < prices - 1)[:, None]
        # Coefficients of the second and the first derivative in each direction, as three diagonals.
        a, b = 0.5 * v * s**2 / ds**2, rate * s / (2 * ds)
        first = [jnp.where(inside_s, c, 0.0) for c in (a - b, -2 * a - 0.5 * rate, a + b)]
        first = [jnp.broadcast_to(c, payoff.shape) for c in first]
        a, b = 0.5 * wild**2 * v / dv**2, pull * (mean - v) / (2 * dv)
        low = (jnp.arange(variances) == 0)[None]
        high = (jnp.arange(variances) == variances - 1)[None]
        second = [jnp.where(low | high, 0.0, a - b), jnp.where(low, -pull * mean / dv, jnp.where(high, 0.0, -2 * a))]
        second = [*second, jnp.where(low, pull * mean / dv, jnp.where(high, 0.0, a + b))]
        second[1] = second[1] - 0.5 * rate
        second = [jnp.broadcast_to(c, payoff.shape) for c in second]

        def along(diagonals, u, axis):
            pads = ((1, 1), (0, 0)) if axis == 0 else ((0, 0), (1, 1))
            p = jnp.pad(u, pads)
            before, after = (p[:-2], p[2:]) if axis == 0 else (p[:, :-2], p[:, 2:])
            return diagonals[0] * before + diagonals[1] * u + diagonals[2] * after

        def mixed(u):
            cross = (u[2:, 2:] - u[2:, :-2] - u[:-2, 2:] + u[:-2, :-2]) / (4 * ds * dv)
            return jnp.pad(cross, 1) * rho * wild * s * v

        def implicit(diagonals, right, axis):
            lo, mid, up = (-theta * dt * c for c in diagonals)
            if axis == 1:
                return swept(lo.T, 1 + mid.T, up.T, right.T).T
            return swept(lo, 1 + mid, up, right)

        def step(carry, _):
            u, early = carry
            along_s, along_v, both = along(first, u, 0), along(second, u, 1), mixed(u)
            y0 = u + dt * (along_s + along_v + both)
            y = implicit(first, y0 - theta * dt * along_s, 0)
            y = implicit(second, y - theta * dt * along_v, 1)
            y = y0 + 0.5 * dt * (mixed(y) - both)
            y = implicit(first, y - theta * dt * along_s, 0)
            y = implicit(second, y - theta * dt * along_v, 1)
            return (jnp.maximum(y, payoff), early | (y < payoff)), jnp.max(y)

        (u, early), tops = lax.scan(step, (payoff, jnp.zeros(payoff.shape, bool)), None, length=steps)
        edge = jnp.max(jnp.where(early, s, 0.0), axis=0)
        return u, (u[2:] - u[:-2]) / (2 * ds), edge, tops

    return Built(jax.vmap(price), (normal(books, 5),))


@program("peptides-matched-to-spectra-with-decoys-and-false-rates", GROUP)
def _peptides(size: Size) -> Built:
    """This gives the best peptide of each measured spectrum, and the share of false matches above each score.

    Peaks are binned, scaled in windows, and less their local mean; a peptide's ions are sums of masses from both ends, and the
    same ions of reversed peptides are decoys.
    """
    spectra, peaks, peptides, length, bins = pick(
        size, (1024, 300, 3000, 24, 2000), (150, 120, 500, 16, 1200), (5, 9, 8, 5, 60)
    )
    masses = np.array([71.0, 103.0, 115.0, 129.0, 147.1, 57.0, 137.1, 113.1, 128.1, 113.1, 131.0, 114.0, 97.1, 128.1])
    masses = np.concatenate([masses, [156.1, 87.0, 101.0, 99.1, 186.1, 163.1]]).astype(np.float32) * bins / 3000

    def prepared(places, heights):
        at = jnp.clip(places, 0, bins - 1)
        row = jnp.zeros(bins).at[at].max(jnp.sqrt(jnp.abs(heights)))
        windows = row.reshape(10, bins // 10)
        top = jnp.max(windows, axis=1, keepdims=True)
        row = jnp.where(windows > 0.05 * jnp.max(row), windows / jnp.maximum(top, 1e-6), 0.0).reshape(-1) * 50.0
        sums = jnp.cumsum(jnp.pad(row, (38, 37)))
        return row - (sums[75:] - sums[:-75]) / 75

    def ions(letters, count):
        mass = jnp.where(jnp.arange(length) < count, jnp.asarray(masses)[letters], 0.0)
        total = jnp.cumsum(mass)
        ahead, behind = total + 1.0, total[-1] - total + 19.0
        real = jnp.arange(length) < count - 1
        return jnp.stack([ahead, behind, 0.5 * (ahead + 1), ahead - 17.0, behind - 18.0]), real, total[-1]

    def theory(letters, count):
        places, real, mass = ions(letters, count)
        height = jnp.array([50.0, 50.0, 25.0, 10.0, 10.0])[:, None] * real
        at = jnp.clip(jnp.round(places).astype(jnp.int32), 0, bins - 1)
        return jnp.zeros(bins).at[at].max(height), mass

    def search(places, heights, letters, counts, weights_seen):
        rows = jax.vmap(prepared)(places, heights)
        counts = counts + length // 2
        turned = jnp.where(
            jnp.arange(length) < counts[:, None] - 1, counts[:, None] - 2 - jnp.arange(length), jnp.arange(length)
        )
        decoys = jnp.take_along_axis(letters, turned, axis=1)
        wanted, mass = jax.vmap(theory)(jnp.concatenate([letters, decoys]), jnp.concatenate([counts, counts]))
        score = rows @ wanted.T * 1e-4
        middle, spread = jnp.mean(mass), jnp.std(mass)
        near = jnp.abs(mass[None] - (middle + spread * weights_seen)[:, None]) < 0.5 * spread
        score = jnp.where(near, score, -1e3)
        top, which = lax.top_k(score, 2)
        gap = (top[:, 0] - top[:, 1]) / jnp.maximum(jnp.abs(top[:, 0]), 1e-6)
        order = jnp.argsort(-top[:, 0])
        false = (which[:, 0] >= peptides)[order]
        rate = jnp.cumsum(false) / jnp.maximum(jnp.cumsum(~false), 1)
        least = lax.cummin(jnp.minimum(rate, 1.0), reverse=True)
        q = jnp.zeros(spectra).at[order].set(least)
        return which[:, 0], top[:, 0], gap, q, jnp.sum((q < 0.05) & (which[:, 0] < peptides))

    inputs = (integers(spectra, peaks, below=bins), normal(spectra, peaks), integers(peptides, length, below=20))
    return Built(search, (*inputs, integers(peptides, below=length // 2), normal(spectra)))


@program("noisy-particles-averaged-in-classes-over-turns-and-shifts", GROUP)
def _particles(size: Size) -> Built:
    """This gives class averages of noisy pictures of particles by rounds of expectation over turns and shifts.

    Each reference is turned by bilinear reads; all shifts are compared at once by Fourier products, and only small ones count.
    """
    pictures, side, classes, turns, rounds = pick(size, (160, 49, 6, 20, 2), (24, 25, 3, 12, 2), (3, 8, 2, 3, 2))
    reach = 3

    def turned(image, angle):
        middle = (side - 1) / 2
        y, x = jnp.meshgrid(jnp.arange(side) - middle, jnp.arange(side) - middle, indexing="ij")
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        rows, columns = cos * y - sin * x + middle, sin * y + cos * x + middle
        return jax.scipy.ndimage.map_coordinates(image, [rows, columns], order=1, mode="constant")

    away = np.minimum(np.arange(side), side - np.arange(side))
    small = (away[:, None] <= reach) & (away[None] <= reach)
    disc = ((np.arange(side) - (side - 1) / 2)[:, None] ** 2 + (np.arange(side) - (side - 1) / 2)[None] ** 2) <= (
        side / 2
    ) ** 2

    def average(images, references):
        angles = jnp.arange(turns) * (2 * np.pi / turns)
        outside = ~disc
        mean = jnp.sum(images * outside, axis=(1, 2), keepdims=True) / outside.sum()
        spread = jnp.sqrt(jnp.sum((images - mean) ** 2 * outside, axis=(1, 2), keepdims=True) / outside.sum())
        images = (images - mean) / spread
        waves = jnp.fft.rfft2(images)
        power = jnp.sum(images**2, axis=(1, 2))

        def step(carry, _):
            references, prior, noise = carry
            bank = jax.vmap(lambda r: jax.vmap(lambda a: turned(r * disc, a))(angles))(references)
            bank_waves = jnp.fft.rfft2(bank)
            cross = jnp.fft.irfft2(waves[:, None, None] * jnp.conj(bank_waves), s=(side, side))
            apart = power[:, None, None, None, None] + jnp.sum(bank**2, axis=(2, 3))[None, :, :, None, None] - 2 * cross
            fit = -apart / (2 * noise) + jnp.log(prior + 1e-9)[None, :, None, None, None]
            fit = jnp.where(small, fit, -1e30).reshape(pictures, -1)
            evidence = jax.nn.logsumexp(fit, axis=1)
            share = jnp.exp(fit - evidence[:, None]).reshape(cross.shape)
            back = jnp.fft.irfft2(jnp.einsum("iktyx,iyx->ktyx", jnp.conj(jnp.fft.rfft2(share)), waves), s=(side, side))
            heard = jax.vmap(lambda r: jax.vmap(turned)(r, -angles))(back)
            mass = jnp.sum(share, axis=(0, 2, 3, 4))
            fresh = jnp.sum(heard, axis=1) / (mass[:, None, None] + 1.0)
            noise = jnp.sum(share * apart) / (pictures * side * side)
            sure = jnp.max(share.reshape(pictures, -1), axis=1)
            where = jnp.argmax(share.reshape(pictures, -1), axis=1)
            return (fresh, mass / pictures, noise), (jnp.sum(evidence), sure, where)

        carry = (references, jnp.full(classes, 1 / classes), jnp.float32(1.0))
        (references, prior, noise), seen = lax.scan(step, carry, None, length=rounds)
        spectrum = jnp.mean(jnp.abs(jnp.fft.rfft2(references)) ** 2, axis=0)
        return references, prior, noise, seen, spectrum

    return Built(average, (normal(pictures, side, side), normal(classes, side, side, scale=0.3)))


@program("spheres-lit-by-paths-that-end-at-random", GROUP)
def _paths(size: Size) -> Built:
    """This gives a picture of spheres by paths of light that bounce until they end at random.

    A path meets the nearest sphere, and goes on by a mirror, through glass or in a random direction; light that paths meet is
    averaged, and the picture is tone-mapped to bytes.
    """
    high, wide, samples, spheres, bounces = pick(size, (270, 480, 4, 30, 5), (90, 120, 2, 30, 5), (5, 6, 2, 4, 5))

    def unit(x):
        return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-9)

    def render(places, sizes, colours, kinds, light, seed):
        centres = places * jnp.array([3.0, 1.2, 3.0]) + jnp.array([0.0, 0.0, 8.0])
        centres = centres.at[0].set(jnp.array([0.0, -1003.0, 8.0]))
        radii = (0.5 + 0.2 * jnp.tanh(sizes)).at[0].set(1000.0)
        albedo, shine = jax.nn.sigmoid(colours), jnp.where(light[:, None] == 0, 4.0 * jax.nn.sigmoid(colours), 0.0)
        key = jax.random.key(seed[0])
        count = high * wide * samples
        jitter = jax.random.uniform(jax.random.fold_in(key, 99), (high, wide, samples, 2))
        y, x = jnp.meshgrid(jnp.arange(high), jnp.arange(wide), indexing="ij")
        aim = (jnp.stack([x, y], axis=-1)[..., None, :] + jitter - jnp.array([wide / 2, high / 2])) / high
        aim = jnp.concatenate([aim * jnp.array([1.0, -1.0]), jnp.ones((high, wide, samples, 1))], axis=-1)
        way = unit(aim).reshape(count, 3)

        def bounce(carry, i):
            start, way, share, seen, alive = carry
            gap = start[:, None] - centres
            b = jnp.einsum("psc,pc->ps", gap, way)
            c = jnp.sum(gap**2, axis=-1) - radii**2
            inner = b**2 - c
            root = jnp.sqrt(jnp.maximum(inner, 0.0))
            near, far = -b - root, -b + root
            t = jnp.where(near > 1e-3, near, far)
            t = jnp.where((inner > 0) & (t > 1e-3), t, jnp.inf)
            hit, met = jnp.argmin(t, axis=1), jnp.isfinite(jnp.min(t, axis=1))
            distance = jnp.where(met, jnp.min(t, axis=1), 0.0)
            sky = 0.5 * (way[:, 1:2] + 1.0) * jnp.array([0.4, 0.6, 1.0]) + 0.1
            seen = seen + share * jnp.where(alive[:, None], jnp.where(met[:, None], shine[hit], sky), 0.0)
            point = start + distance[:, None] * way
            normal_ = (point - centres[hit]) / radii[hit][:, None]
            cosine = jnp.sum(normal_ * way, axis=-1, keepdims=True)
            outside = cosine < 0
            facing = jnp.where(outside, normal_, -normal_)
            cosine = jnp.abs(cosine)
            k1, k2, k3 = jax.random.split(jax.random.fold_in(key, i), 3)
            rough = unit(facing + unit(jax.random.normal(k1, (count, 3))) * 0.999)
            mirror = way + 2 * cosine * facing
            ratio = jnp.where(outside, 1 / 1.5, 1.5)
            squared = 1 - ratio**2 * (1 - cosine**2)
            through = ratio * way + (ratio * cosine - jnp.sqrt(jnp.maximum(squared, 0.0))) * facing
            schlick = 0.04 + 0.96 * (1 - cosine) ** 5
            reflected = (squared < 0) | (jax.random.uniform(k2, (count, 1)) < schlick)
            glass = jnp.where(reflected, mirror, through)
            kind = kinds[hit][:, None]
            way = unit(jnp.select([kind == 0, kind == 1], [mirror, glass], rough))
            share = share * jnp.where(kind == 1, 1.0, albedo[hit])
            stay = jnp.clip(jnp.max(share, axis=-1), 0.05, 1.0)
            stay = jnp.where(i < 2, 1.0, stay)
            alive = alive & met & (jax.random.uniform(k3, (count,)) < stay)
            return (point, way, share / stay[:, None], seen, alive), jnp.sum(alive)

        zero = jnp.zeros((count, 3))
        carry = (zero, way, jnp.ones((count, 3)), zero, jnp.ones(count, bool))
        (_, _, _, seen, _), left = lax.scan(bounce, carry, jnp.arange(bounces))
        image = jnp.mean(seen.reshape(high, wide, samples, 3), axis=2)
        mapped = image * (2.51 * image + 0.03) / (image * (2.43 * image + 0.59) + 0.14)
        return image, jnp.round(255 * jnp.clip(mapped, 0.0, 1.0) ** (1 / 2.2)).astype(jnp.uint8), left

    inputs = (
        normal(spheres, 3),
        normal(spheres),
        normal(spheres, 3),
        integers(spheres, below=4),
        integers(spheres, below=5),
    )
    return Built(render, (*inputs, integers(1, below=1000)))


@program("pages-ranked-by-rare-words-and-by-links", GROUP)
def _search(size: Size) -> Built:
    """This gives the best pages for queries by how often rare words occur, mixed with the fame of pages by their links.

    The counts are postings of word and page; the fame is a walk on the links that goes on until it hardly changes.
    """
    pages, words, postings, links, queries, asked, top = pick(
        size,
        (20011, 5000, 600000, 300000, 64, 6, 50),
        (3001, 800, 60000, 30000, 12, 6, 50),
        (11, 9, 60, 40, 3, 2, 4),
    )

    def rank(word, page, times, source, target, query, taste):
        times = times.astype(jnp.float32) + 1.0
        length = jax.ops.segment_sum(times, page, pages)
        holds = jax.ops.segment_sum(jnp.ones(postings), word, words)
        rare = jnp.log1p((pages - holds + 0.5) / (jnp.minimum(holds, pages) + 0.5) * (holds < pages))
        scale = 1.2 * (0.25 + 0.75 * length[page] / jnp.mean(length))
        heard = rare[word] * times * 2.2 / (times + scale)

        def score(query):
            wanted = jnp.zeros(words).at[query].add(1.0)
            return jax.ops.segment_sum(heard * wanted[word], page, pages)

        scores = lax.map(score, query)
        out = jax.ops.segment_sum(jnp.ones(links), source, pages)
        favour = jax.nn.softmax(taste)

        def walk(state):
            fame, _, i = state
            flow = fame / jnp.maximum(out, 1.0)
            stuck = jnp.sum(jnp.where(out == 0, fame, 0.0))
            fresh = 0.85 * (jax.ops.segment_sum(flow[source], target, pages) + stuck * favour) + 0.15 * favour
            return fresh, jnp.sum(jnp.abs(fresh - fame)), i + 1

        start = (jnp.full(pages, 1 / pages), jnp.float32(1.0), 0)
        fame, change, count = lax.while_loop(lambda s: (s[1] > 1e-4) & (s[2] < 25), walk, start)
        mixed = scores + 0.3 * jnp.log(fame * pages + 1e-3)
        best, which = lax.top_k(mixed, top)
        nearness = jnp.sum((which[:, None] == which[None]) * 1.0, axis=-1) / top
        gains = (jnp.take_along_axis(scores, which, axis=1) > jnp.mean(scores)) / jnp.log2(jnp.arange(top) + 2.0)
        return which, best, fame, change, count, nearness, jnp.sum(gains, axis=1)

    texts = (integers(postings, below=words, ramp=True), integers(postings, below=pages), integers(postings, below=5))
    graph = (integers(links, below=pages), integers(links, below=pages, ramp=True))
    return Built(rank, (*texts, *graph, integers(queries, asked, below=words), normal(pages)))


@program("pitch-of-voices-by-differences-and-smoothest-track", GROUP)
def _pitch(size: Size) -> Built:
    """This gives the pitch of voices over time: dips of the normalised difference of a wave with itself, and the best track.

    Candidates are dips under many thresholds; a track may not jump far, and may fall silent. The voices are hums in noise.
    """
    voices, frames, frame, hop, bins = pick(size, (24, 200, 1024, 160, 180), (3, 100, 512, 128, 90), (2, 5, 32, 8, 7))
    lags = frame // 2
    weights = np.exp(-np.linspace(0.5, 6.0, 20)).astype(np.float32)
    weights = weights / weights.sum()

    def track(wave, loud):
        starts = jnp.arange(frames) * hop
        period = lags / 6 * jnp.exp(0.2 * jnp.tanh(loud))[:, None]
        phase = 2 * np.pi * jnp.arange(wave.shape[1]) / period
        wave = 0.1 * wave + 0.3 * jnp.sin(phase) + 0.2 * jnp.sin(2 * phase) * (jnp.sin(phase / 200) > 0)
        pre = wave - 0.97 * jnp.pad(wave, ((0, 0), (1, 0)))[:, :-1]
        x = pre[:, starts[:, None] + jnp.arange(frame)]
        waves = jnp.fft.rfft(x, n=2 * frame)
        head = jnp.fft.rfft(x[..., :lags], n=2 * frame)
        same = jnp.fft.irfft(waves * jnp.conj(head), n=2 * frame)[..., :lags]
        energy = jnp.cumsum(jnp.pad(x**2, ((0, 0), (0, 0), (1, 0))), axis=-1)
        power = energy[..., lags : 2 * lags] - energy[..., :lags]
        gap = jnp.maximum(power[..., :1] + power - 2 * same, 0.0)
        mean = jnp.cumsum(gap[..., 1:], axis=-1) / jnp.arange(1, lags)
        dips = jnp.concatenate([jnp.ones((voices, frames, 1)), gap[..., 1:] / (mean + 1e-6)], axis=-1)
        left, right = jnp.roll(dips, 1, axis=-1), jnp.roll(dips, -1, axis=-1)
        inside = (jnp.arange(lags) > 1) & (jnp.arange(lags) < lags - 1)
        trough = (dips < left) & (dips <= right) & inside
        thresholds = np.linspace(0.05, 1.0, 20).astype(np.float32)
        under = trough[..., None] & (dips[..., None] < thresholds)
        first = under & (jnp.cumsum(under, axis=2) == 1)
        chance = jnp.sum(first * weights, axis=-1)
        shift = jnp.where(trough, 0.5 * (left - right) / jnp.maximum(left - 2 * dips + right, 1e-6), 0.0)
        lag = jnp.arange(lags) + jnp.clip(shift, -0.5, 0.5)
        place = jnp.clip(jnp.round(bins * (1 - jnp.log(jnp.maximum(lag, 2.0) / 2) / np.log(lags / 2))), 0, bins - 1)
        place = place.astype(jnp.int32)
        rows = jnp.arange(voices)[:, None, None], jnp.arange(frames)[None, :, None]
        seen = jnp.zeros((voices, frames, bins)).at[(*rows, place)].add(chance)
        voiced = jnp.clip(jnp.sum(seen, axis=-1, keepdims=True), 0.01, 0.99)
        silent = jnp.broadcast_to((1 - voiced) / bins, seen.shape)
        logs = jnp.log(jnp.stack([seen * (0.9 + 0.1 * jax.nn.sigmoid(loud))[:, None, None] + 1e-6, silent], axis=2))
        far = jnp.abs(jnp.arange(bins)[:, None] - jnp.arange(bins)[None])
        move = jnp.log(jnp.maximum(12.0 - far, 1e-4) / 144.0)
        turn = jnp.log(jnp.array([[0.99, 0.01], [0.01, 0.99]]))

        def step(state, log):
            by_kind = jnp.max(state[:, :, None] + turn[None, :, :, None], axis=1)
            from_kind = jnp.argmax(state[:, :, None] + turn[None, :, :, None], axis=1)
            options = by_kind[..., :, None] + move
            return jnp.max(options, axis=2) + log, (jnp.argmax(options, axis=2), from_kind)

        last, (ways, kinds) = lax.scan(step, logs[:, 0], jnp.moveaxis(logs[:, 1:], 1, 0))
        end = jnp.argmax(last.reshape(voices, -1), axis=1)

        def back(state, way):
            kind, at = state
            n = jnp.arange(voices)
            before = way[0][n, kind, at]
            state = (way[1][n, kind, before], before)
            return state, state

        final = (end // bins, end % bins)
        _, (kind, at) = lax.scan(back, final, (ways, kinds), reverse=True)
        kind, at = (jnp.concatenate([p, f[None]]).T for p, f in zip((kind, at), final, strict=True))
        period = 2.0 * jnp.exp((1 - at / bins) * np.log(lags / 2))
        return jnp.where(kind == 0, 16000.0 / period, 0.0), jnp.max(last, axis=(1, 2)) / frames, voiced[..., 0]

    return Built(track, (normal(voices, (frames - 1) * hop + frame, scale=0.3), normal(voices)))


@program("curvature-in-two-factors-of-an-image-coder-step", GROUP)
def _factored(size: Size) -> Built:
    """This gives one step of an auto-encoder by its curvature, which is a product of two small matrices for each layer.

    The factors are moving averages of products of inputs and of sampled slopes; damped Cholesky factors solve for the direction,
    and the length of the step is limited by the change that the curvature foretells.
    """
    b, widths = pick(
        size,
        (1000, (784, 500, 250, 30, 250, 500, 784)),
        (150, (400, 120, 60, 20, 60, 120, 400)),
        (6, (9, 6, 5, 3, 5, 6, 9)),
    )
    layers = len(widths) - 1

    def forward(params, taps, x):
        seen = []
        for i, (w, tap) in enumerate(zip(params, taps, strict=True)):
            x = jnp.concatenate([x, jnp.ones((x.shape[0], 1))], axis=1)
            seen.append(x)
            x = x @ w + tap
            x = x if i in (layers // 2 - 1, layers - 1) else jnp.tanh(x)
        return x, seen

    def nll(logits, x):
        return jnp.sum(jnp.maximum(logits, 0) - logits * x + jnp.log1p(jnp.exp(-jnp.abs(logits))))

    def step(params, factors, speed, images, noise):
        x = images.astype(jnp.float32) / 255.0
        taps = [jnp.zeros((b, n)) for n in widths[1:]]

        def loss(params, taps, target):
            logits, seen = forward(params, taps, x)
            return nll(logits, target) / b, (logits, seen)

        (value, (logits, seen)), grads = jax.value_and_grad(loss, has_aux=True)(params, taps, x)
        sampled = (noise < jax.nn.sigmoid(lax.stop_gradient(logits))).astype(jnp.float32)
        slopes = jax.grad(lambda taps: loss(params, taps, sampled)[0] * b)(taps)
        grads = [g + 1e-5 * w for g, w in zip(grads, params, strict=True)]
        fresh, moves = [], []
        for (old_a, old_s), y, slope, g in zip(factors, seen, slopes, grads, strict=True):
            a, s = 0.95 * old_a + 0.05 * (y.T @ y) / b, 0.95 * old_s + 0.05 * (slope.T @ slope) / b
            ratio = jnp.sqrt((jnp.trace(a) / a.shape[0]) / (jnp.trace(s) / s.shape[0] + 1e-12))
            left = jax.scipy.linalg.cho_factor(a + ratio * 0.1 * jnp.eye(a.shape[0]), lower=True)
            right = jax.scipy.linalg.cho_factor(s + 0.1 / ratio * jnp.eye(s.shape[0]), lower=True)
            half_way = jax.scipy.linalg.cho_solve(left, g)
            moves.append(jax.scipy.linalg.cho_solve(right, half_way.T).T)
            fresh.append((a, s))
        foretold = sum(jnp.vdot(m, g) for m, g in zip(moves, grads, strict=True))
        rate = jnp.minimum(0.05, jnp.sqrt(1e-3 / (foretold + 1e-12)))
        speed = jax.tree.map(lambda v, m: 0.9 * v - rate * m, speed, moves)
        params = jax.tree.map(lambda w, v: w + v, params, speed)
        return params, fresh, speed, value, rate

    params = [weight(i + 1, o) for i, o in pairwise(widths)]

    def start(params, roots, speed, images, noise):
        """The factors are made positive from their roots, which are drawn."""
        factors = [tuple(r.T @ r / r.shape[0] for r in pair) for pair in roots]
        return step(params, factors, speed, images, noise)

    roots = [(normal(64, i + 1), normal(64, o, scale=0.1)) for i, o in pairwise(widths)]
    images = integers(b, widths[0], below=256)
    return Built(start, (params, roots, moments(params, False), images, normal(b, widths[0], scale=0.25, offset=0.5)))
