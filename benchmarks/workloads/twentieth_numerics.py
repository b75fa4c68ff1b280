"""Physics, money, statistics, signals, images, shapes and genes, the twentieth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, integers, normal, pick, program

GROUP = "twentieth"


@program("plasma-in-phase-space-split-cubic-shifts-and-field", GROUP)
def _vlasov(size: Size) -> Built:
    """This advances a plasma on a grid of places and speeds by split semi-Lagrangian shifts, as Cheng and Knorr (1976).

    Each shift interpolates cubically between rows or columns; the field comes from a Fourier solve of the charge.
    """
    places, speeds, steps = pick(size, (1024, 1537, 6), (192, 257, 6), (12, 17, 6))
    length, top, dt = 4 * np.pi, 6.0, 0.1
    dx, dv = length / places, 2 * top / (speeds - 1)

    def weights(s):
        return (
            -s * (s - 1) * (s - 2) / 6,
            (s + 1) * (s - 1) * (s - 2) / 2,
            -(s + 1) * s * (s - 2) / 2,
            (s + 1) * s * (s - 1) / 6,
        )

    def cubic(rows, shift, periodic):
        """Moves each row [count, points] by its own shift in cells."""
        m = rows.shape[1]
        at = jnp.arange(m) - shift[:, None]
        low = jnp.floor(at).astype(jnp.int32)
        out = 0.0
        for k, w in enumerate(weights(at - low)):
            index = low + k - 1
            value = jnp.take_along_axis(rows, index % m if periodic else jnp.clip(index, 0, m - 1), axis=1)
            out = out + w * (value if periodic else jnp.where((index >= 0) & (index < m), value, 0))
        return out

    def field(f):
        charge = 1 - jnp.sum(f, axis=1) * dv
        k = 2 * jnp.pi * jnp.fft.rfftfreq(places, dx)
        hat = jnp.fft.rfft(charge)
        return jnp.fft.irfft(jnp.where(k > 0, hat / (1j * jnp.where(k > 0, k, 1)), 0), n=places)

    def run(noise, temperature):
        x, v = jnp.arange(places) * dx, jnp.linspace(-top, top, speeds)
        wide = 0.8 + 0.2 * jax.nn.sigmoid(temperature)
        beam = jnp.exp(-((v - 2) ** 2) / (2 * wide**2)) + jnp.exp(-((v + 2) ** 2) / (2 * wide**2))
        f = (1 + 0.05 * jnp.cos(0.5 * x) + 0.002 * noise)[:, None] * (beam / (jnp.sum(beam) * dv))

        def step(f, _):
            f = cubic(f.T, v * dt / 2 / dx, True).T
            e = field(f)
            f = cubic(f, -e * dt / dv, False)
            f = cubic(f.T, v * dt / 2 / dx, True).T
            kinetic = 0.5 * jnp.sum(f * v**2) * dx * dv
            return f, (0.5 * jnp.sum(e**2) * dx, kinetic, jnp.sum(f) * dx * dv, jnp.sum(f**2) * dx * dv)

        return lax.scan(step, f, None, length=steps)

    return Built(run, (normal(places), normal()))


@program("magnet-coils-joined-picture-by-conjugate-gradients-and-wavelets", GROUP)
def _sense(size: Size) -> Built:
    """This gives a magnetic resonance image from undersampled coils by conjugate gradients, as SENSE (Pruessmann, 2001).

    Maps of coils come from the calibrated middle of the spectrum; a shrinking of Haar wavelets follows each solve.
    """
    coils, high, wide, middle = pick(size, (12, 320, 256, 24), (6, 96, 80, 12), (2, 8, 8, 4))

    def shrunk(x, level):
        a, b = x[0::2], x[1::2]
        rows = jnp.concatenate([a + b, a - b]) / np.sqrt(2)
        a, b = rows[:, 0::2], rows[:, 1::2]
        w = jnp.concatenate([a + b, a - b], axis=1) / np.sqrt(2)
        size_of = jnp.abs(w)
        small = w * jnp.maximum(1 - level / jnp.maximum(size_of, 1e-9), 0)
        keep = (jnp.arange(high) < high // 2)[:, None] & (jnp.arange(wide) < wide // 2)
        w = jnp.where(keep, w, small)
        a, b = jnp.split(w, 2, axis=1)
        rows = jnp.stack([a + b, a - b], axis=-1).reshape(high, wide) / np.sqrt(2)
        a, b = jnp.split(rows, 2)
        return jnp.stack([a + b, a - b], axis=1).reshape(high, wide) / np.sqrt(2)

    def fourier(x):
        return jnp.fft.fftshift(jnp.fft.fft2(jnp.fft.ifftshift(x, axes=(-2, -1)), norm="ortho"), axes=(-2, -1))

    def inverse(x):
        return jnp.fft.fftshift(jnp.fft.ifft2(jnp.fft.ifftshift(x, axes=(-2, -1)), norm="ortho"), axes=(-2, -1))

    def joined(real, imaginary, columns):
        centre = jnp.abs(jnp.arange(wide) - wide // 2) < middle // 2
        mask = (columns & (jnp.arange(wide) % 2 == 0)) | centre
        seen = (real + 1j * imaginary) * mask
        box = centre & (jnp.abs(jnp.arange(high) - high // 2) < middle // 2)[:, None]
        taper = jnp.outer(jnp.hanning(high), jnp.hanning(wide))
        rough = inverse(seen * box * taper)
        maps = rough / jnp.sqrt(jnp.sum(jnp.abs(rough) ** 2, axis=0) + 1e-6)

        def normal_of(x):
            return jnp.sum(jnp.conj(maps) * inverse(mask * fourier(maps * x)), axis=0) + 0.05 * x

        x = jnp.sum(jnp.conj(maps) * inverse(seen), axis=0)
        right, errors = x, []
        for _ in range(2):
            r = right + 0.05 * x - normal_of(x)
            d, rr = r, jnp.vdot(r, r).real

            def body(_, state):
                x, r, d, rr = state
                q = normal_of(d)
                step = rr / jnp.maximum(jnp.vdot(d, q).real, 1e-20)
                x, r = x + step * d, r - step * q
                new = jnp.vdot(r, r).real
                return x, r, r + new / jnp.maximum(rr, 1e-20) * d, new

            x, _, _, rr = lax.fori_loop(0, 5, body, (x, r, d, rr))
            errors.append(rr)
            x = shrunk(x, 0.05 * jnp.max(jnp.abs(x)))
        size_of = jnp.abs(x)
        return size_of, jnp.angle(x), jnp.stack(errors), jnp.percentile(size_of, jnp.array([1.0, 50.0, 99.0]))

    return Built(joined, (normal(coils, high, wide), normal(coils, high, wide), booleans(wide)))


@program("credit-charge-of-a-netted-swap-book-by-short-rate-paths", GROUP)
def _credit_charge(size: Size) -> Built:
    """This gives the credit charge of a book of swaps and its slopes by paths of Hull-White rates (Gregory, 2020).

    Exposures are netted, lowered by collateral that comes late, and weighed by the chance of default in each period;
    the slopes by the curves are exact gradients through all paths.
    """
    paths, dates, swaps, knots = pick(size, (8192, 41, 61, 11), (1024, 41, 17, 11), (8, 9, 3, 4))
    years = 10.0
    dt, speed, late = years / (dates - 1), 0.05, 2

    def charge(curve, spreads, volatility, draws, notional, fixed, ends):
        at, times = jnp.linspace(0.0, years, knots), jnp.linspace(0.0, years, dates)
        zero = jnp.interp(times, at, 0.03 + 0.005 * curve)
        logs = -zero * times
        sigma = 0.01 * jnp.exp(0.2 * volatility)

        def walk(state, z):
            x, y = state
            new = x * np.exp(-speed * dt) + sigma * jnp.sqrt((1 - np.exp(-2 * speed * dt)) / (2 * speed)) * z
            y = y + 0.5 * (x + new) * dt
            return (new, y), (new, y)

        start = (jnp.zeros(paths), jnp.zeros(paths))
        _, (x, y) = lax.scan(walk, start, draws)
        x = jnp.concatenate([jnp.zeros((1, paths)), x])
        y = jnp.concatenate([jnp.zeros((1, paths)), y])
        fall = jnp.exp(logs)[:, None] * jnp.exp(-y)
        fall = fall * jnp.exp(logs)[:, None] / jnp.mean(fall, axis=1, keepdims=True)
        end = 4 + ends % (dates - 4)
        rate = 0.03 + 0.003 * fixed
        size_of = jnp.sinh(notional)

        def value(i):
            ahead = jnp.maximum(times - times[i], 0)
            b = (1 - jnp.exp(-speed * ahead)) / speed
            v = sigma**2 * (1 - jnp.exp(-2 * speed * times[i])) / (2 * speed)
            bond = jnp.exp((logs - logs[i])[:, None] - b[:, None] * x[i] - 0.5 * (b**2 * v)[:, None])
            live = (jnp.arange(dates) > i) & (jnp.arange(dates) <= end[:, None])
            annuity = jnp.einsum("sd,dp->sp", live.astype(jnp.float32), bond) * dt
            floating = jnp.where((end > i)[:, None], 1 - bond[end], 0)
            return jnp.sum(size_of[:, None] * (floating - rate[:, None] * annuity), axis=0)

        book = lax.map(value, jnp.arange(dates))
        held = jnp.concatenate([jnp.zeros((late, paths)), book[:-late]])
        called = jnp.where(jnp.abs(held) > 0.5, held - 0.5 * jnp.sign(held), 0)
        exposed = jnp.maximum(book - called, 0)
        hazard = jnp.interp(times, at, jax.nn.softplus(-4 + 0.3 * spreads))
        alive = jnp.exp(-jnp.concatenate([jnp.zeros(1), jnp.cumsum(0.5 * (hazard[1:] + hazard[:-1]) * dt)]))
        lost = alive[:-1] - alive[1:]
        expected = jnp.mean(exposed * fall, axis=1)
        total = 0.6 * jnp.sum(0.5 * (expected[1:] + expected[:-1]) * lost)
        tail = jnp.quantile(lax.stop_gradient(exposed), 0.95, axis=1)
        return total, (expected, tail, jnp.max(tail))

    inputs = (normal(knots), normal(knots), normal(), normal(dates - 1, paths))
    book = (normal(swaps, scale=0.7), normal(swaps), integers(swaps, below=997))
    return Built(jax.value_and_grad(charge, argnums=(0, 1, 2), has_aux=True), (*inputs, *book))


@program("speech-frames-predicted-by-levinson-steps-formants-and-residual", GROUP)
def _levinson(size: Size) -> Built:
    """This gives predictors of speech frames by Levinson and Durbin, with line spectra, formants and the residual.

    It is the front end of speech coders such as CELP: lags, reflection coefficients, an envelope and its peaks.
    """
    voices, length, window, hop, order, bins = pick(
        size, (32, 48017, 400, 160, 16, 257), (4, 16003, 400, 160, 16, 129), (2, 90, 20, 10, 4, 17)
    )
    frames = (length - window) // hop + 1

    def analyse(wave):
        wave = wave - 0.97 * jnp.pad(wave, ((0, 0), (1, 0)))[:, :-1]
        index = jnp.arange(frames)[:, None] * hop + jnp.arange(window)
        pieces = wave[:, index] * jnp.hamming(window).astype(jnp.float32)
        lags = jnp.stack([jnp.sum(pieces[..., : window - k] * pieces[..., k:], axis=-1) for k in range(order + 1)], -1)
        lags = lags * jnp.exp(-0.5 * (2 * jnp.pi * 60 / 16000 * jnp.arange(order + 1)) ** 2)
        lags = lags.at[..., 0].multiply(1.0001)

        def solve(r):
            def step(i, state):
                a, error, ks = state
                place = jnp.arange(order + 1)
                taken = jnp.where((place >= 1) & (place <= i), a * r[jnp.abs(i + 1 - place)], 0)
                k = -(r[i + 1] + jnp.sum(taken)) / error
                mirror = jnp.where((place >= 1) & (place <= i), a[jnp.abs(i + 1 - place)], 0)
                a = jnp.where(place == i + 1, k, a + k * mirror)
                return a, error * (1 - k * k), ks.at[i].set(k)

            start = (jnp.zeros(order + 1).at[0].set(1.0), r[0] + 1e-9, jnp.zeros(order))
            return lax.fori_loop(0, order, step, start)

        a, error, ks = jax.vmap(jax.vmap(solve))(lags)
        turn = jnp.exp(-1j * jnp.pi * jnp.arange(bins)[:, None] * jnp.arange(order + 1) / (bins - 1))
        envelope = 10 * jnp.log10(error[..., None] / (jnp.abs(a @ turn.T) ** 2 + 1e-9) + 1e-9)
        inner = envelope[..., 1:-1]
        peak = (inner > envelope[..., :-2]) & (inner >= envelope[..., 2:])
        rank = jnp.where(peak, jnp.arange(1, bins - 1), bins)
        formants = jnp.sort(rank, axis=-1)[..., :3] * (8000 / (bins - 1))
        history = jnp.pad(wave, ((0, 0), (order, 0)))
        back = history[:, index[..., None] + order - jnp.arange(order + 1)]
        residual = jnp.einsum("vfwk,vfk->vfw", back, a)
        loud = jnp.log(jnp.mean(pieces**2, axis=-1) + 1e-9)
        like = lags[..., 1] / lags[..., 0]
        voiced = (like > jnp.quantile(like, 0.4, axis=1, keepdims=True)) & (
            loud > jnp.median(loud, axis=1, keepdims=True)
        )
        area = jnp.cumsum(jnp.log((1 + 0.999 * ks) / (1 - 0.999 * ks)), axis=-1)
        return ks, envelope, formants, jnp.sqrt(jnp.mean(residual**2, axis=-1)), voiced, area

    return Built(analyse, (normal(voices, length, scale=0.1),))


@program("dependence-by-distances-with-shuffles-and-adjusted-chances", GROUP)
def _distance_correlation(size: Size) -> Built:
    """This tests features against an outcome by distance correlation with shuffles (Szekely et al., 2007).

    Matrices of distances are centred twice; chances from shuffles are adjusted by Benjamini and Hochberg.
    """
    n, features, shuffles, wide = pick(size, (499, 40, 99, 3), (151, 13, 49, 3), (9, 3, 5, 2))

    def centred(x):
        d = jnp.sqrt(jnp.sum((x[:, None] - x) ** 2, axis=-1) + 1e-12)
        total = jnp.sum(d, axis=0)
        u = d - total[:, None] / (n - 2) - total / (n - 2) + jnp.sum(d) / ((n - 1) * (n - 2))
        return jnp.where(jnp.eye(n, dtype=bool), 0, u)

    def inner(a, b):
        return jnp.sum(a * b) / (n * (n - 3))

    def tests(x, y, seed):
        ranks = jnp.argsort(jnp.argsort(y, axis=0), axis=0) / n
        b = centred(ranks)
        own = inner(b, b)
        orders = jax.vmap(lambda k: jax.random.permutation(k, n))(jax.random.split(jax.random.key(seed[0]), shuffles))

        def one(column):
            a = centred(column)
            scale = jnp.sqrt(jnp.maximum(inner(a, a) * own, 1e-20))
            real = inner(a, b) / scale
            moved = lax.map(lambda o: inner(a, b[o][:, o]) / scale, orders)
            chance = (1 + jnp.sum(moved >= real)) / (shuffles + 1)
            return real, chance, (real - jnp.mean(moved)) / (jnp.std(moved) + 1e-9)

        real, chance, z = jax.vmap(one)(x)
        order = jnp.argsort(chance)
        raised = chance[order] * features / jnp.arange(1, features + 1)
        level = lax.cummin(raised[::-1])[::-1]
        adjusted = jnp.zeros(features).at[order].set(jnp.minimum(level, 1.0))
        return real, chance, adjusted, z, jnp.sum(adjusted < 0.1)

    return Built(tests, (normal(features, n, wide), normal(n, wide), integers(1, below=999)))


@program("inside-or-outside-a-soup-of-triangles-by-solid-angles-and-nearest", GROUP)
def _winding(size: Size) -> Built:
    """This gives signed distances of points to a soup of triangles by winding numbers, as Jacobson et al. (2013).

    Solid angles of all triangles are summed; the nearest point on a triangle is clamped to its corners and sides.
    """
    points, corners, faces, block = pick(size, (4096, 1283, 2562, 256), (512, 203, 402, 64), (8, 7, 10, 2))

    def signed(queries, vertices, index):
        ball = vertices / jnp.linalg.norm(vertices, axis=-1, keepdims=True)
        a, b, c = (ball[index[:, i]] for i in range(3))

        def part(q):
            ra, rb, rc = a - q[:, None], b - q[:, None], c - q[:, None]
            la, lb, lc = (jnp.linalg.norm(r, axis=-1) for r in (ra, rb, rc))
            triple = jnp.sum(ra * jnp.cross(rb, rc), axis=-1)
            under = la * lb * lc + jnp.sum(ra * rb, -1) * lc + jnp.sum(rb * rc, -1) * la + jnp.sum(rc * ra, -1) * lb
            winding = jnp.sum(jnp.arctan2(triple, under), axis=-1) / (2 * jnp.pi)
            ab, ac, ap = b - a, c - a, -ra
            n = jnp.cross(ab, ac)
            area = jnp.sum(n * n, axis=-1) + 1e-12
            u = jnp.sum(jnp.cross(ap, jnp.broadcast_to(ac, ap.shape)) * n, axis=-1) / area
            v = jnp.sum(jnp.cross(jnp.broadcast_to(ab, ap.shape), ap) * n, axis=-1) / area
            flat = jnp.where(
                (area > 1e-9) & (u >= 0) & (v >= 0) & (u + v <= 1), jnp.sum(ap * n, axis=-1) ** 2 / area, jnp.inf
            )

            def side(start, way, gap):
                t = jnp.clip(jnp.sum(gap * way, axis=-1) / (jnp.sum(way * way, axis=-1) + 1e-12), 0, 1)
                return jnp.sum((gap - t[..., None] * way) ** 2, axis=-1)

            sides = [side(a, ab, ap), side(b, c - b, -rb), side(c, a - c, -rc)]
            square = jnp.minimum(flat, jnp.minimum(sides[0], jnp.minimum(sides[1], sides[2])))
            nearest = jnp.argmin(square, axis=-1)
            far = jnp.sqrt(jnp.min(square, axis=-1))
            return winding, jnp.where(jnp.abs(winding) > 0.5, -far, far), nearest

        winding, far, nearest = lax.map(part, queries.reshape(-1, block, 3))
        hits = jnp.bincount(nearest.reshape(-1), length=faces)
        return winding.reshape(-1), far.reshape(-1), nearest.reshape(-1), hits

    return Built(signed, (normal(points, 3, scale=0.7), normal(corners, 3), integers(faces, 3, below=corners)))


@program("missing-letters-of-genomes-filled-from-copied-panel-haplotypes", GROUP)
def _imputed(size: Size) -> Built:
    """This fills missing letters of genomes from a panel by copying chains forward and back, as Li and Stephens (2003).

    Jumps are equally likely to all haplotypes, so a step is a scaling and a sum; dosages and their quality come out.
    """
    targets, panel, sites = pick(size, (32, 1009, 401), (12, 501, 201), (2, 7, 9))

    def fill(letters, known, reference, gaps, rates):
        jump = -jnp.expm1(-0.02 * jnp.exp(0.5 * gaps))
        error = 0.01 * jax.nn.sigmoid(rates) + 1e-3

        def one(row, seen):
            emit = jnp.where(reference == row[:, None], 1 - error[:, None], error[:, None])
            emit = jnp.where(seen[:, None], emit, 1.0)

            def ahead(alpha, inputs):
                e, r = inputs
                alpha = ((1 - r) * alpha + r / panel) * e
                total = jnp.sum(alpha)
                return alpha / total, (alpha / total, jnp.log(total))

            def back(beta, inputs):
                e, r = inputs
                out = beta
                z = beta * e
                beta = (1 - r) * z + r * jnp.mean(z)
                return beta / jnp.mean(beta), out

            _, (alpha, logs) = lax.scan(ahead, jnp.full(panel, 1 / panel), (emit, jump))
            _, beta = lax.scan(back, jnp.ones(panel), (emit, jnp.roll(jump, -1)), reverse=True)
            post = alpha * beta
            post = post / jnp.sum(post, axis=-1, keepdims=True)
            dose = jnp.sum(post * reference, axis=-1)
            spread = -jnp.sum(post * jnp.log(post + 1e-12), axis=-1)
            return dose, jnp.sum(logs), spread, jnp.argmax(post, axis=-1)

        dose, logs, spread, origin = jax.vmap(one)(letters, known)
        share = jnp.mean(dose, axis=0)
        quality = jnp.var(dose, axis=0) / jnp.maximum(share * (1 - share), 1e-4)
        agree = jnp.where(known, jnp.abs(dose - letters) < 0.5, False)
        switches = jnp.sum(origin[:, 1:] != origin[:, :-1], axis=-1)
        return dose, logs, spread, quality, jnp.sum(agree, axis=0) / jnp.maximum(jnp.sum(known, axis=0), 1), switches

    inputs = (integers(targets, sites, below=2), booleans(targets, sites), integers(sites, panel, below=2))
    return Built(fill, (*inputs, normal(sites), normal(sites)))
