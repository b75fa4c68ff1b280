"""Programs of reads, snow, haze, walkers, options and survival, the nineteenth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, booleans, integers, normal, pick, program

GROUP = "nineteenth"


@program("reads-of-dna-against-candidates-by-pair-hidden-chains", GROUP)
def _pair_hmm(size: Size) -> Built:
    """This gives how likely each read is under each stretch of DNA, by the pair chain of GATK's HaplotypeCaller.

    States of match, insertion and deletion advance along antidiagonals; errors follow the quality of each base.
    """
    reads, stretches, short, long = pick(size, (200, 12, 101, 160), (24, 6, 76, 120), (3, 2, 6, 9))

    def one(read, quality, length, stretch):
        wrong = 10.0 ** (-(quality.astype(jnp.float32) + 6.0) / 10.0)
        opened, longer = 10.0**-4.5, 10.0**-1.0
        same, near = 1 - 2 * opened, 1 - longer
        rows = jnp.arange(short + 1)
        base = jnp.concatenate([jnp.full(1, 9), read])
        error = jnp.concatenate([jnp.zeros(1), wrong])
        first = 2.0**60 / long

        def shift(x):
            return jnp.concatenate([jnp.zeros(1), x[:-1]])

        def step(carry, diagonal):
            m1, i1, d1, m2, i2, d2, total = carry
            column = diagonal - rows
            inside = (column >= 1) & (column <= long) & (rows >= 1) & (rows <= length)
            letter = stretch[jnp.clip(column - 1, 0, long - 1)]
            emit = jnp.where((letter == base) | (letter == 4) | (base == 4), 1 - error, error / 3)
            m = emit * (same * shift(m2) + near * (shift(i2) + shift(d2)))
            i = opened * shift(m1) + longer * shift(i1)
            d = opened * m1 + longer * d1
            m, i, d = (jnp.where(inside, z, 0.0) for z in (m, i, d))
            d = jnp.where((rows == 0) & (column >= 0) & (column <= long), first, d)
            total = total + jnp.sum(jnp.where((rows == length) & inside, m + i, 0.0))
            return (m, i, d, m1, i1, d1, total), None

        zero = jnp.zeros(short + 1)
        start = (zero, zero, jnp.where(rows == 0, first, 0.0), zero, zero, zero, 0.0)
        out, _ = lax.scan(step, start, jnp.arange(1, short + long + 1))
        return jnp.log10(out[-1] + 1e-37) - 60 * np.log10(2.0)

    def call(read, quality, shorter, stretch):
        length = short - shorter
        table = jax.vmap(jax.vmap(one, in_axes=(None, None, None, 0)), in_axes=(0, 0, 0, None))(
            read, quality, length, stretch
        )
        best = jnp.max(table, axis=1, keepdims=True)
        table = jnp.maximum(table, best - 4.5)
        pair = jnp.logaddexp(table[:, :, None] * np.log(10), table[:, None] * np.log(10))
        genotype = jnp.sum(pair - np.log(2), axis=0)
        return table, jax.nn.softmax(genotype.reshape(-1)).reshape(stretches, stretches), jnp.argmax(table, axis=1)

    inputs = (integers(reads, short, below=5), integers(reads, short, below=35), integers(reads, below=short // 2))
    return Built(call, (*inputs, integers(stretches, long, below=4)))


@program("snow-and-jelly-as-material-points-on-a-grid", GROUP)
def _snow(size: Size) -> Built:
    """This gives steps of snow and jelly by material points that move through a grid, as in MLS-MPM (Hu et al. 2018).

    Each point spreads its momentum to nine nodes and reads it back; stretches are split by a closed form of two by
    two, and snow keeps only small ones.
    """
    points, grid, steps = pick(size, (65536, 128, 12), (8192, 64, 12), (20, 12, 3))
    dx, dt = 1.0 / grid, 0.3e-4 * 128 / grid
    volume = (dx * 0.5) ** 2
    offsets = np.stack(np.meshgrid(np.arange(3), np.arange(3), indexing="ij"), axis=-1).reshape(9, 2)

    def polar(f):
        c, s = f[:, 0, 0] + f[:, 1, 1], f[:, 1, 0] - f[:, 0, 1]
        r = jnp.sqrt(c * c + s * s + 1e-12)
        c, s = c / r, s / r
        turn = jnp.stack([jnp.stack([c, -s], -1), jnp.stack([s, c], -1)], axis=1)
        return turn, jnp.einsum("pji,pjk->pik", turn, f)

    def parted(stretch):
        a, b, d = stretch[:, 0, 0], stretch[:, 0, 1], stretch[:, 1, 1]
        half, middle = 0.5 * jnp.arctan2(2 * b, a - d), 0.5 * (a + d)
        wide = jnp.sqrt(0.25 * (a - d) ** 2 + b * b)
        c, s = jnp.cos(half), jnp.sin(half)
        vectors = jnp.stack([jnp.stack([c, -s], -1), jnp.stack([s, c], -1)], axis=1)
        return vectors, jnp.stack([middle + wide, middle - wide], axis=-1)

    def run(raw, speed, kinds):
        x = 0.2 + 0.6 * jax.nn.sigmoid(raw)
        snow = kinds == 1

        def step(carry, _):
            x, v, affine, f, packed = carry
            f = f + dt * jnp.einsum("pij,pjk->pik", affine, f)
            hard = jnp.where(snow, jnp.exp(jnp.clip(10 * (1 - packed), -3, 3)), 0.3)
            mu, lam = 4e2 * hard, 6e2 * hard
            turn, stretch = polar(f)
            vectors, values = parted(stretch)
            kept = jnp.where(snow[:, None], jnp.clip(values, 1 - 2.5e-2, 1 + 4.5e-3), values)
            packed = packed * jnp.prod(values, axis=-1) / jnp.prod(kept, axis=-1)
            f = jnp.einsum("pij,pjk,pk,plk->pil", turn, vectors, kept, vectors)
            jump = jnp.prod(kept, axis=-1)
            stress = 2 * mu[:, None, None] * jnp.einsum("pij,pkj->pik", f - turn, f)
            stress = stress + (lam * jump * (jump - 1))[:, None, None] * jnp.eye(2)
            push = -dt * volume * 4 / dx**2 * stress + volume * affine
            base = (x / dx - 0.5).astype(jnp.int32)
            fx = x / dx - base
            w = jnp.stack([0.5 * (1.5 - fx) ** 2, 0.75 - (fx - 1) ** 2, 0.5 * (fx - 0.5) ** 2])
            share = w[offsets[:, 0], :, 0] * w[offsets[:, 1], :, 1]
            apart = (offsets[:, None] - fx[None]) * dx
            momentum = share[..., None] * (volume * v + jnp.einsum("pij,opj->opi", push, apart))
            node = jnp.clip(base[None] + offsets[:, None], 0, grid - 1)
            cells = jnp.zeros((grid, grid, 2)).at[node[..., 0], node[..., 1]].add(momentum)
            mass = jnp.zeros((grid, grid)).at[node[..., 0], node[..., 1]].add(share * volume)
            cells = jnp.where(mass[..., None] > 0, cells / jnp.maximum(mass, 1e-12)[..., None], 0.0)
            cells = cells.at[..., 1].add(-dt * 50.0)
            at = jnp.arange(grid)
            low, high = (at < 3), (at >= grid - 3)
            vx = jnp.where(low[:, None], jnp.maximum(cells[..., 0], 0), cells[..., 0])
            vx = jnp.where(high[:, None], jnp.minimum(vx, 0), vx)
            vy = jnp.where(low[None], jnp.maximum(cells[..., 1], 0), cells[..., 1])
            vy = jnp.where(high[None], jnp.minimum(vy, 0), vy)
            read = jnp.stack([vx, vy], axis=-1)[node[..., 0], node[..., 1]]
            v = jnp.sum(share[..., None] * read, axis=0)
            affine = 4 / dx**2 * jnp.einsum("op,opi,opj->pij", share, read, apart)
            energy = 0.5 * volume * jnp.sum(v * v)
            return (jnp.clip(x + dt * v, 3 * dx, 1 - 3 * dx), v, affine, f, packed), energy

        eye = jnp.broadcast_to(jnp.eye(2), (points, 2, 2))
        start = (x, speed, jnp.zeros((points, 2, 2)), eye, jnp.ones(points))
        (x, v, _, f, packed), energies = lax.scan(step, start, None, length=steps)
        return x, v, f, packed, energies

    return Built(run, (normal(points, 2), normal(points, 2), integers(points, below=2)))


@program("haze-taken-out-by-the-darkest-channel-and-guided-means", GROUP)
def _haze(size: Size) -> Built:
    """This gives photographs without haze by the dark channel prior (He, 2009) and a guided filter of the haze.

    The haze's colour is the mean of the brightest of the haziest pixels; means are boxes by running sums.
    """
    b, high, wide, patch, reach = pick(size, (4, 540, 961, 15, 40), (1, 180, 321, 9, 20), (2, 12, 15, 3, 2))
    brightest = max(high * wide // 1000, 3)

    def box(x):
        side = 2 * reach + 1
        x = jnp.pad(x, ((0, 0), (reach + 1, reach), (reach + 1, reach)))
        x = jnp.cumsum(x, axis=1)
        x = x[:, side:] - x[:, :-side]
        x = jnp.cumsum(x, axis=2)
        return x[:, :, side:] - x[:, :, :-side]

    def darkest(x):
        low = jnp.min(x, axis=-1)
        return lax.reduce_window(low, jnp.inf, lax.min, (1, patch, patch), (1, 1, 1), "SAME")

    def clear(bytes_):
        x = bytes_.astype(jnp.float32) / 255
        dark = darkest(x)
        _, at = lax.top_k(dark.reshape(b, -1), brightest)
        candidates = jnp.take_along_axis(x.reshape(b, -1, 3), at[..., None], axis=1)
        light = jnp.mean(candidates, axis=1)[:, None, None]
        rough = 1 - 0.95 * darkest(x / jnp.maximum(light, 0.05))
        grey = x @ jnp.array([0.299, 0.587, 0.114])
        count = box(jnp.ones((1, high, wide)))
        mean_g, mean_r = box(grey) / count, box(rough) / count
        both, square = box(grey * rough) / count, box(grey * grey) / count
        slope = (both - mean_g * mean_r) / (square - mean_g**2 + 1e-3)
        shift = mean_r - slope * mean_g
        smooth = (box(slope) * grey + box(shift)) / count
        out = (x - light) / jnp.maximum(smooth, 0.1)[..., None] + light
        levels = jnp.clip(jnp.round(out * 255), 0, 255)
        return levels.astype(jnp.uint8), smooth, light[:, 0, 0], jnp.mean(levels, axis=(1, 2))

    return Built(clear, (Random((b, high, wide, 3), jnp.dtype(jnp.uint8), below=256),))


@program("walkers-that-stretch-towards-each-other-fit-a-line", GROUP)
def _walkers(size: Size) -> Built:
    """This gives samples of a line with outliers by walkers that stretch towards the other half, as emcee (2013).

    Each point belongs to the line or to a broad law of outliers; many data sets run at once.
    """
    sets, walkers, points, steps = pick(size, (48, 64, 300, 20), (12, 32, 120, 20), (2, 8, 5, 3))

    def density(theta, x, y, error):
        slope, shift, log_extra, share, centre, log_wide = jnp.moveaxis(theta, -1, 0)[..., None]
        chance = jax.nn.sigmoid(share)
        s2 = error**2 + jnp.exp(2 * log_extra)
        inner = -0.5 * (y - slope * x - shift) ** 2 / s2 - 0.5 * jnp.log(2 * jnp.pi * s2)
        o2 = error**2 + jnp.exp(2 * log_wide)
        outer = -0.5 * (y - centre) ** 2 / o2 - 0.5 * jnp.log(2 * jnp.pi * o2)
        like = jnp.sum(jnp.logaddexp(jnp.log(chance) + inner, jnp.log1p(-chance) + outer), axis=-1)
        prior = -1.5 * jnp.log1p(slope[..., 0] ** 2) - 0.5 * jnp.sum(theta[..., 1:] ** 2, axis=-1) / 9
        return jnp.where(jnp.all(jnp.abs(theta) < 8, axis=-1), like + prior, -jnp.inf)

    def run(start, x, noise, errors, seed):
        error = 0.1 + 0.3 * jnp.abs(errors)
        y = 1.7 * x + 0.4 + error * noise
        y = jnp.where(jnp.arange(points) % 9 == 0, 3 * noise, y)

        def fit(start, x, y, error, key):
            def half_step(moving, still, score, key):
                k1, k2, k3 = jax.random.split(key, 3)
                z = (jax.random.uniform(k1, (walkers // 2,)) + 1) ** 2 / 2
                other = still[jax.random.randint(k2, (walkers // 2,), 0, walkers // 2)]
                proposed = other + z[:, None] * (moving - other)
                fresh = density(proposed, x, y, error)
                better = 5 * jnp.log(z) + fresh - score
                take = jnp.log(jax.random.uniform(k3, (walkers // 2,))) < better
                return jnp.where(take[:, None], proposed, moving), jnp.where(take, fresh, score), take

            def step(carry, key):
                a, b, sa, sb = carry
                k1, k2 = jax.random.split(key)
                a, sa, took_a = half_step(a, b, sa, k1)
                b, sb, took_b = half_step(b, a, sb, k2)
                everyone = jnp.concatenate([a, b])
                return (a, b, sa, sb), (everyone, jnp.mean(took_a) + jnp.mean(took_b))

            a, b = start[: walkers // 2], start[walkers // 2 :]
            first = (a, b, density(a, x, y, error), density(b, x, y, error))
            _, (chain, took) = lax.scan(step, first, jax.random.split(key, steps))
            late = chain[steps // 2 :].reshape(-1, 6)
            return jnp.percentile(late, jnp.array([16.0, 50.0, 84.0]), axis=0), jnp.cov(late.T), jnp.mean(took) / 2

        return jax.vmap(fit)(start, x, y, error, jax.random.split(jax.random.key(seed[0]), sets))

    inputs = (normal(sets, walkers, 6, scale=0.5), normal(sets, points), normal(sets, points), normal(sets, points))
    return Built(run, (*inputs, integers(1, below=999)))


@program("option-quotes-to-volatilities-and-smile-fits", GROUP)
def _smiles(size: Size) -> Built:
    """This gives volatilities implied by prices of options and a fitted smile for each expiry (SVI, Gatheral 2004).

    Newton's steps fall back to bisection, calls and puts are both read, and the smile is fitted by damped least
    squares.
    """
    days, expiries, strikes = pick(size, (96, 24, 61), (16, 12, 41), (2, 2, 9))

    def price(k, total, put):
        s = jnp.sqrt(total)
        d1 = -k / s + s / 2
        call = jax.scipy.stats.norm.cdf(d1) - jnp.exp(k) * jax.scipy.stats.norm.cdf(d1 - s)
        return jnp.where(put, call - 1 + jnp.exp(k), call), jax.scipy.stats.norm.pdf(d1)

    def smile(p, k):
        a, b, rho, m, s = p[0], jnp.exp(p[1]), jnp.tanh(p[2]), p[3], jnp.exp(p[4])
        return jax.nn.softplus(a + b * (rho * (k - m) + jnp.sqrt((k - m) ** 2 + s * s)))

    def fit(k, total, weight):
        def residual(p):
            return weight * (smile(p, k) - total)

        def step(carry, _):
            p, damp, cost = carry
            r, j = residual(p), jax.jacfwd(residual)(p)
            normal_ = j.T @ j
            change = jnp.linalg.solve(normal_ + damp * (jnp.diag(jnp.diag(normal_)) + 1e-6 * jnp.eye(5)), -j.T @ r)
            fresh = p + jnp.clip(change, -1.0, 1.0)
            after = jnp.sum(residual(fresh) ** 2)
            good = after < cost
            return (
                jnp.where(good, fresh, p),
                jnp.where(good, damp * 0.4, damp * 4),
                jnp.where(good, after, cost),
            ), None

        p = jnp.array([-3.0, -1.5, -0.3, 0.0, -1.0])
        (p, _, cost), _ = lax.scan(step, (p, jnp.float32(1e-2), jnp.sum(residual(p) ** 2)), None, length=12)
        return p, cost

    def surface(levels, tilts, noise, traded):
        t = jnp.linspace(0.05, 2.0, expiries)[:, None]
        k = jnp.linspace(-0.6, 0.6, strikes) * jnp.sqrt(t)
        level = 0.2 + 0.04 * jnp.tanh(levels)[..., None]
        vol = level - 0.08 * jnp.tanh(tilts)[..., None] * k + 0.15 * k**2
        put = k < 0
        quote, _ = price(k, vol**2 * t, put)
        quote = quote * (1 + 0.01 * jnp.tanh(noise)) + 1e-6

        def newton(_, carry):
            s, low, high = carry
            value, pdf = price(k, s * s, put)
            low, high = jnp.where(value < quote, s, low), jnp.where(value < quote, high, s)
            new = s - (value - quote) / jnp.maximum(pdf, 1e-7)
            return jnp.where((new > low) & (new < high), new, 0.5 * (low + high)), low, high

        full = jnp.ones_like(quote)
        s, _, _ = lax.fori_loop(0, 14, newton, (0.3 * full, 1e-3 * full, 3.0 * full))
        weight = jnp.where(traded, 1.0, 0.0) * jnp.exp(-2 * k**2) / t
        params, cost = jax.vmap(jax.vmap(fit, in_axes=(0, 0, 0)), in_axes=(None, 0, 0))(k, s * s, weight)
        fitted = jax.vmap(jax.vmap(smile))(params, jnp.broadcast_to(k, (days, expiries, strikes)))
        crossed = jnp.sum(jnp.diff(fitted, axis=1) < 0, axis=(1, 2))
        return s / jnp.sqrt(t), params, cost, crossed

    inputs = (normal(days, expiries), normal(days, expiries), normal(days, expiries, strikes))
    return Built(surface, (*inputs, booleans(days, expiries, strikes)))


@program("survival-curves-resampled-and-genes-ranked-by-log-ranks", GROUP)
def _survival(size: Size) -> Built:
    """This gives survival curves with bands from resampled patients, and log-rank tests of a split by each gene.

    Patients are sorted by time once, counts at risk are running sums, and false discoveries are held by Benjamini and
    Hochberg.
    """
    patients, genes, resamples = pick(size, (1000, 6000, 1000), (301, 700, 200), (11, 5, 4))

    def study(times, died, expression, seed):
        time = jnp.round(jnp.exp(0.7 * times) * 50) / 50
        order = jnp.argsort(time)
        time, died, x = time[order], died[order].astype(jnp.float32), expression[:, order]
        first = jnp.searchsorted(time, time, side="left")
        last = jnp.searchsorted(time, time, side="right") - 1
        drawn = jax.random.randint(jax.random.key(seed[0]), (resamples, patients), 0, patients)
        counts = jax.vmap(lambda d: jnp.bincount(d, length=patients))(drawn).astype(jnp.float32)
        counts = jnp.concatenate([jnp.ones((1, patients)), counts])

        def curve(c):
            behind = jnp.cumsum(c[::-1])[::-1]
            risk = behind[first]
            deaths = jnp.concatenate([jnp.zeros(1), jnp.cumsum(c * died)])
            here = deaths[last + 1] - deaths[first]
            once = jnp.arange(patients) == first
            factor = jnp.where(once & (risk > 0), 1 - here / jnp.maximum(risk, 1), 1.0)
            return jnp.cumprod(factor), jnp.where(once, here / jnp.maximum(risk * (risk - here), 1), 0.0)

        curves, spreads = jax.vmap(curve)(counts)
        survived, band = curves[0], jnp.quantile(curves[1:], jnp.array([0.025, 0.975]), axis=0)
        error = survived * jnp.sqrt(jnp.cumsum(spreads[0]))
        median = jnp.take(time, jnp.minimum(jnp.sum(curves > 0.5, axis=1), patients - 1))
        group = (x > jnp.median(x, axis=1, keepdims=True)).astype(jnp.float32)
        risk = (patients - first).astype(jnp.float32)
        in_group = jnp.cumsum(group[:, ::-1], axis=1)[:, ::-1][:, first]
        share = in_group / risk
        observed = jnp.sum(group * died, axis=1)
        expected = jnp.sum(share * died, axis=1)
        variance = jnp.sum(share * (1 - share) * died, axis=1)
        z = (observed - expected) / jnp.sqrt(jnp.maximum(variance, 1e-6))
        chance = 2 * jax.scipy.stats.norm.sf(jnp.abs(z))
        rank = jnp.argsort(chance)
        held = jnp.minimum(chance[rank] * genes / jnp.arange(1, genes + 1), 1.0)
        q = jnp.zeros(genes).at[rank].set(lax.cummin(held, reverse=True))
        return survived, error, band, median, z, q

    return Built(study, (normal(patients), booleans(patients), normal(genes, patients), integers(1, below=99)))


@program("pictures-freed-of-noise-by-shifted-wavelets-and-medians", GROUP)
def _wavelets(size: Size) -> Built:
    """This gives pictures freed of noise by undecimated Daubechies wavelets and the thresholds of BayesShrink (2000).

    The noise is the median of the finest details, each band has its own threshold, and four levels are put together
    again.
    """
    b, side = pick(size, (6, 512), (1, 192), (2, 32))
    root = np.sqrt(3.0)
    low = (np.array([1 + root, 3 + root, 3 - root, 1 - root]) / 8).astype(np.float32)
    high = (low[::-1] * np.array([1, -1, 1, -1])).astype(np.float32)

    def along(x, taps, gap, axis, back=False):
        way = -1 if back else 1
        return sum(c * jnp.roll(x, -way * i * gap, axis=axis) for i, c in enumerate(taps))

    def clean(x):
        x = jnp.clip(x, -8, 8)
        level, bands = x, []
        for gap in (1, 2, 4, 8):
            rows = along(level, low, gap, 1), along(level, high, gap, 1)
            level, lh = along(rows[0], low, gap, 2), along(rows[0], high, gap, 2)
            bands.append((lh, along(rows[1], low, gap, 2), along(rows[1], high, gap, 2)))
        finest = bands[0][2]
        noise = jnp.median(jnp.abs(finest).reshape(b, -1), axis=1) / 0.6745
        limits = []
        for i, gap in reversed(list(enumerate((1, 2, 4, 8)))):
            shrunk = []
            for kind, band in enumerate(bands[i]):
                here = noise * (1.0 if i == 0 else 0.55**i) * (1.0 + 0.1 * kind)
                signal = jnp.sqrt(jnp.maximum(jnp.mean(band**2, axis=(1, 2)) - here**2, 1e-8))
                limit = jnp.minimum(here**2 / signal, jnp.max(jnp.abs(band), axis=(1, 2)))
                limits.append(limit)
                shrunk.append(jnp.sign(band) * jnp.maximum(jnp.abs(band) - limit[:, None, None], 0))
            lh, hl, hh = shrunk
            up = along(level, low, gap, 2, True) + along(lh, high, gap, 2, True)
            down = along(hl, low, gap, 2, True) + along(hh, high, gap, 2, True)
            level = along(up, low, gap, 1, True) + along(down, high, gap, 1, True)
        left = x - level
        return level, jnp.stack(limits), 10 * jnp.log10(jnp.var(level, axis=(1, 2)) / jnp.var(left, axis=(1, 2)))

    return Built(clean, (normal(b, side, side),))
