"""Numerics, signals, statistics and physics as users write them, the twenty-second set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import erfc, gammaln

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program, weight

GROUP = "twenty-second"


@program("heat-carried-by-winds-by-arnoldi-least-residuals", GROUP)
def _gmres(size: Size) -> Built:
    """This solves steady heat carried by winds on grids by GMRES with a preconditioner of a few Jacobi sweeps.

    Each basis vector is made orthogonal to the earlier ones twice, and the small least-squares problem is solved by reflections.
    """
    fields, rows, columns, count = pick(size, (4, 255, 513, 16), (2, 127, 200, 12), (2, 6, 9, 4))

    def solve(flow, swirl, roughness, source):
        y, x = jnp.linspace(0, 1, rows)[:, None], jnp.linspace(0, 1, columns)
        u = 0.16 * jnp.tanh(flow) * jnp.sin(jnp.pi * y) * jnp.cos(jnp.pi * x * (1 + 0.1 * swirl))
        v = -0.16 * jnp.tanh(flow) * jnp.cos(jnp.pi * y) * jnp.sin(jnp.pi * x * (1 + 0.1 * swirl))
        k = 0.5 + jax.nn.softplus(roughness)
        padded = jnp.pad(k, 1, mode="edge")
        north, south = 0.5 * (k + padded[:-2, 1:-1]), 0.5 * (k + padded[2:, 1:-1])
        west, east = 0.5 * (k + padded[1:-1, :-2]), 0.5 * (k + padded[1:-1, 2:])
        middle = north + south + west + east + jnp.abs(u) + jnp.abs(v) + 0.05

        def apply(t):
            p = jnp.pad(t, 1)
            up, down, left, right = p[:-2, 1:-1], p[2:, 1:-1], p[1:-1, :-2], p[1:-1, 2:]
            carried = jnp.where(u > 0, u * left, -u * right) + jnp.where(v > 0, v * up, -v * down)
            return middle * t - north * up - south * down - west * left - east * right - carried

        def smooth(r):
            z = 0.8 * r / middle
            for _ in range(2):
                z = z + 0.8 * (r - apply(z)) / middle
            return z

        size_of = jnp.linalg.norm(source)
        start = jnp.zeros((count + 1, rows * columns)).at[0].set((source / size_of).reshape(-1))

        def step(j, carry):
            basis, small = carry
            w = apply(smooth(basis[j].reshape(rows, columns))).reshape(-1)
            first = basis @ w
            w = w - first @ basis
            second = basis @ w
            w = w - second @ basis
            length = jnp.linalg.norm(w)
            small = small.at[:, j].set((first + second).at[j + 1].set(length))
            return basis.at[j + 1].set(w / (length + 1e-12)), small

        basis, small = lax.fori_loop(0, count, step, (start, jnp.zeros((count + 1, count))))
        q, r = jnp.linalg.qr(small)
        weights = solve_triangular(r, q[0] * size_of)
        answer = smooth((weights @ basis[:-1]).reshape(rows, columns))
        rest = source - apply(answer)
        return answer, jnp.linalg.norm(rest) / size_of, jnp.mean(answer * u), jnp.mean(answer * v)

    inputs = (normal(fields), normal(fields), normal(fields, rows, columns, scale=0.5), normal(fields, rows, columns))
    return Built(jax.vmap(solve), inputs)


@program("poses-of-a-long-walk-pulled-together-by-closed-loops", GROUP)
def _pose_graph(size: Size) -> Built:
    """This straightens the poses of a walk by Gauss-Newton steps with robust weights and preconditioned conjugate gradients.

    The pose graph has an edge between any two steps in turn and many edges that close loops; gradients come from scatters.
    """
    poses, loops, outer, inner = pick(size, (10007, 20011, 3, 15), (2003, 5003, 3, 12), (9, 7, 2, 3))

    def wrapped(a):
        return jnp.arctan2(jnp.sin(a), jnp.cos(a))

    def residual(first, second, measure):
        c, s = jnp.cos(first[2]), jnp.sin(first[2])
        gap = second[:2] - first[:2]
        local = jnp.stack([c * gap[0] + s * gap[1], -s * gap[0] + c * gap[1]])
        return jnp.concatenate([local - measure[:2], wrapped(second[2] - first[2] - measure[2])[None]])

    blocks = jax.vmap(jax.jacfwd(residual, argnums=(0, 1)))
    residuals = jax.vmap(residual)

    def align(drift, noise, loop_noise, source, target):
        turn = jnp.arange(poses) * (2 * jnp.pi / 301)
        truth = jnp.stack([20 * jnp.cos(turn), 14 * jnp.sin(2 * turn), turn], axis=-1)
        i = jnp.concatenate([jnp.arange(poses - 1), source])
        j = jnp.concatenate([jnp.arange(1, poses), target])
        clean = residuals(truth[i], truth[j], jnp.zeros((i.shape[0], 3)))
        measured = clean + jnp.concatenate([noise, loop_noise]) * jnp.array([0.05, 0.05, 0.01])
        trust = jnp.array([1.0, 1.0, 4.0])
        x = truth + 0.1 * drift * jnp.array([1.0, 1.0, 0.2])

        def step(x, _):
            r = residuals(x[i], x[j], measured)
            a, b = blocks(x[i], x[j], measured)
            length = jnp.sqrt(jnp.sum(trust * r * r, axis=-1) + 1e-12)
            w = jnp.minimum(1.0, 0.3 / length)[:, None] * trust
            pull = jax.ops.segment_sum(jnp.einsum("eki,ek->ei", a, w * r), i, poses)
            pull = pull + jax.ops.segment_sum(jnp.einsum("eki,ek->ei", b, w * r), j, poses)
            diagonal = jax.ops.segment_sum(jnp.einsum("eki,ek,ekj->eij", a, w, a), i, poses)
            diagonal = diagonal + jax.ops.segment_sum(jnp.einsum("eki,ek,ekj->eij", b, w, b), j, poses)
            diagonal = diagonal + 1e-2 * jnp.eye(3)
            p00, p01, p02, p11, p12, p22 = (
                diagonal[:, m, n] for m, n in ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))
            )
            c00, c01, c02 = p11 * p22 - p12 * p12, p02 * p12 - p01 * p22, p01 * p12 - p02 * p11
            c11, c12, c22 = p00 * p22 - p02 * p02, p01 * p02 - p00 * p12, p00 * p11 - p01 * p01
            rows = [jnp.stack(z, axis=-1) for z in ((c00, c01, c02), (c01, c11, c12), (c02, c12, c22))]
            inverse = jnp.stack(rows, axis=-2) / (p00 * c00 + p01 * c01 + p02 * c02)[:, None, None]

            def apply(z):
                moved = w * (jnp.einsum("eki,ei->ek", a, z[i]) + jnp.einsum("eki,ei->ek", b, z[j]))
                out = jax.ops.segment_sum(jnp.einsum("eki,ek->ei", a, moved), i, poses)
                out = out + jax.ops.segment_sum(jnp.einsum("eki,ek->ei", b, moved), j, poses)
                return out + 1e-2 * z

            def descend(_, carry):
                z, rest, way, size_of = carry
                image = apply(way)
                alpha = size_of / (jnp.sum(way * image) + 1e-12)
                z, rest = z + alpha * way, rest - alpha * image
                y = jnp.einsum("pij,pj->pi", inverse, rest)
                fresh = jnp.sum(rest * y)
                return z, rest, y + fresh / (size_of + 1e-12) * way, fresh

            y = jnp.einsum("pij,pj->pi", inverse, -pull)
            z, *_ = lax.fori_loop(0, inner, descend, (jnp.zeros_like(x), -pull, y, -jnp.sum(pull * y)))
            return x + z, jnp.sum(jnp.where(length < 0.3, 0.5 * length**2, 0.3 * length - 0.045))

        x, costs = lax.scan(step, x, None, length=outer)
        return x, costs, jnp.sqrt(jnp.mean((x - truth)[:, :2] ** 2, axis=0))

    inputs = (normal(poses, 3), normal(poses - 1, 3), normal(loops, 3))
    return Built(align, (*inputs, integers(loops, below=poses), integers(loops, below=poses)))


@program("tones-and-drums-parted-by-medians-of-a-spectrum", GROUP)
def _medians(size: Size) -> Built:
    """This parts tones from drums by medians of a spectrum along time and along frequency, and finds onsets of the drums."""
    b, samples, window, hop, wide = pick(size, (4, 110250, 1024, 256, 17), (1, 22050, 512, 256, 17), (2, 64, 16, 8, 3))
    frames = samples // hop + 1
    index = np.arange(frames)[:, None] * hop + np.arange(window)
    shape = np.hanning(window + 1)[:-1].astype(np.float32)

    def median(x, axis):
        pad = [(0, 0)] * x.ndim
        pad[axis] = (wide // 2, wide // 2)
        x = jnp.pad(x, pad, mode="reflect" if size != "tiny" else "edge")
        length = x.shape[axis] - wide + 1
        shifted = jnp.stack([lax.slice_in_dim(x, i, i + length, axis=axis) for i in range(wide)], axis=-1)
        return jnp.sort(shifted, axis=-1)[..., wide // 2]

    def back(spectrum, total):
        pieces = jnp.fft.irfft(spectrum, n=window, axis=-1) * shape
        wave = jnp.zeros((b, total)).at[:, index].add(pieces)
        weigh = jnp.zeros(total).at[index].add(shape**2)
        return (wave / jnp.maximum(weigh, 1e-2))[:, window // 2 : window // 2 + samples]

    def part(sound, pitches):
        turn = ((300 + pitches)[..., None] * jnp.arange(samples)) % 22050
        sound = sound + jnp.sum(jnp.sin(2 * jnp.pi / 22050 * turn), axis=1)
        padded = jnp.pad(sound, ((0, 0), (window // 2, window)))
        spectrum = jnp.fft.rfft(padded[:, index] * shape, axis=-1)
        size_of = jnp.abs(spectrum)
        tones, drums = median(size_of, 1), median(size_of, 2)
        a, c = tones**2, drums**2
        tone, drum = a / (a + 4 * c + 1e-6), c / (c + 4 * a + 1e-6)
        rest = jnp.clip(1 - tone - drum, 0, 1)
        beat = jnp.log1p(10 * size_of * drum)
        flux = jnp.mean(jax.nn.relu(beat[:, 1:] - beat[:, :-1]), axis=-1)
        slow = lax.reduce_window(flux, 0.0, lax.add, (1, 9), (1, 1), "SAME") / 9
        onset = jax.nn.relu(flux - slow)
        pulse = jnp.fft.irfft(jnp.abs(jnp.fft.rfft(onset, n=2 * frames)) ** 2)[:, :frames]
        pulse = pulse / (pulse[:, :1] + 1e-6)
        shares = jnp.sum(rest * size_of**2, axis=(1, 2)) / jnp.sum(size_of**2, axis=(1, 2))
        whole = padded.shape[1]
        return back(spectrum * tone, whole), back(spectrum * drum, whole), onset, pulse, shares

    return Built(part, (normal(b, samples, scale=0.3), integers(b, 5, below=400)))


@program("sets-of-classes-with-promised-coverage-and-shifted-weights", GROUP)
def _conformal(size: Size) -> Built:
    """This gives sets of classes that hold the truth with a promised chance, as regularised adaptive sets (Angelopoulos, 2021).

    Scores of held-out examples give one level, a level for each cluster of classes, and a level weighted by likelihood ratios.
    """
    held, fresh, classes, clusters = pick(size, (8009, 4001, 1000, 20), (1009, 601, 307, 10), (11, 7, 5, 2))
    dtype, alpha = half(size), 0.1

    def scores(logits, u):
        logp = jax.nn.log_softmax(logits.astype(jnp.float32) / 1.3, axis=-1)
        order = jnp.argsort(-logp, axis=-1, stable=True)
        rank = jnp.argsort(order, axis=-1)
        probs = jnp.exp(logp)
        ranked = jnp.take_along_axis(probs, order, axis=-1)
        total = jnp.cumsum(ranked, axis=-1) - jax.nn.sigmoid(u)[:, None] * ranked
        total = total + 0.01 * jax.nn.relu(jnp.arange(classes) + 1.0 - 5)
        return jnp.take_along_axis(total, rank, axis=-1), probs

    def level(values, mass):
        order = jnp.argsort(values)
        run = jnp.cumsum(mass[order])
        place = jnp.searchsorted(run / run[-1], 1 - alpha)
        return values[order][jnp.minimum(place, values.shape[0] - 1)]

    def predict(seen, labels, u, asked, v, cluster, tilt):
        every, probs = scores(seen + 4 * jax.nn.one_hot(labels, classes, dtype=dtype), u)
        own = jnp.take_along_axis(every, labels[:, None], axis=1)[:, 0]
        plain = level(own, jnp.ones(held))
        kind = cluster[labels]
        each = jax.vmap(lambda c: level(own, jnp.where(kind == c, 1.0, 1e-6)))(jnp.arange(clusters))
        ratio = jnp.exp(jnp.clip(0.5 * (seen.astype(jnp.float32) @ tilt), -3, 3))
        tilted = level(own, ratio)
        there, chances = scores(asked, v)
        levels = jnp.stack([jnp.full(classes, plain), each[cluster], jnp.full(classes, tilted)])
        inside = jax.nn.sigmoid((levels[:, None] - there) / 0.05)
        sizes, mass = jnp.sum(inside, axis=-1), jnp.sum(inside * chances, axis=-1)
        count = jax.ops.segment_sum(jnp.ones(held), kind, clusters)
        missed = jax.ops.segment_sum(jax.nn.sigmoid((own - plain) / 0.05), kind, clusters) / jnp.maximum(count, 1)
        brier = jnp.mean(jnp.sum(probs**2, axis=-1) - 2 * jnp.take_along_axis(probs, labels[:, None], axis=1)[:, 0] + 1)
        return plain, each, tilted, sizes, mass, missed, brier

    inputs = (normal(held, classes, dtype=dtype), integers(held, below=classes), normal(held))
    inputs += (normal(fresh, classes, dtype=dtype, scale=2.0), normal(fresh), integers(classes, below=clusters))
    return Built(predict, (*inputs, normal(classes, scale=classes**-0.5)))


@program("sunlight-and-warmth-through-layered-columns-of-air", GROUP)
def _radiation(size: Size) -> Built:
    """This gives fluxes and heating of columns of air by two-stream adding of layers over bands, as schemes of climate models do.

    Absorption comes from tables between pressures and temperatures; clouds scatter with a scaled forward peak.
    """
    columns, layers, bands, pressures, temperatures = pick(
        size, (2048, 60, 16, 31, 12), (1009, 40, 16, 21, 9), (3, 5, 2, 4, 3)
    )

    def run(table, warmth, vapour, cloud, sun, ground, share):
        edges = jnp.linspace(0.0, 1.0, layers + 1) ** 1.5 * 1000
        p = 0.5 * (edges[1:] + edges[:-1])
        t = 210 + 80 * (p / 1000) ** 0.8 + 5 * warmth
        gas = 1e-2 * jnp.exp(0.7 * vapour) * (p / 1000) ** 2
        water = jax.nn.relu(cloud - 0.8) * 20 * jax.nn.sigmoid((p - 400) / 80)
        at = jnp.log(p / p[0]) / jnp.log(p[-1] / p[0]) * (pressures - 1.001)
        low = at.astype(jnp.int32)
        part = at - low
        heat = jnp.clip((t - 180) / 140 * (temperatures - 1), 0, temperatures - 1.001)
        cold = heat.astype(jnp.int32)
        rest = (heat - cold)[..., None]

        def corner(i, j):
            return table[low + i, cold + j]

        k = (1 - part)[:, None] * ((1 - rest) * corner(0, 0) + rest * corner(0, 1))
        k = jnp.exp(k + part[:, None] * ((1 - rest) * corner(1, 0) + rest * corner(1, 1)))
        thick = jnp.diff(edges)
        absorb = k * gas[..., None] * thick[:, None] + 1e-5
        air = 2e-4 * thick[:, None] * jnp.exp(-jnp.arange(bands) / 4)
        drops = water[..., None] * 0.1 * thick[:, None] / (layers / 2) * jnp.ones(bands)
        tau = absorb + air + drops
        omega = jnp.clip((air + 0.98 * drops) / tau, 0, 0.999)
        g = 0.85 * 0.98 * drops / (air + 0.98 * drops)
        f = g * g
        tau, omega, g = (1 - omega * f) * tau, (1 - f) * omega / (1 - omega * f), (g - f) / (1 - f)
        mu = 0.2 + 0.7 * jax.nn.sigmoid(sun)[:, None, None]
        g1, g2 = (8 - omega * (5 + 3 * g)) / 4, 3 * omega * (1 - g) / 4
        g3 = (2 - 3 * mu * g) / 4
        root = jnp.sqrt(jnp.maximum((g1 - g2) * (g1 + g2), 1e-6))
        fade = jnp.exp(-jnp.minimum(root * tau, 30.0))
        below = 1 / (root * (1 + fade**2) + g1 * (1 - fade**2))
        reflect, through = g2 * (1 - fade**2) * below, 2 * root * fade * below
        beam = jnp.exp(-jnp.minimum(tau / mu, 30.0))
        lost = omega * (1 - beam)
        up, down = lost * g3 * (1 - 0.5 * (1 - through)), lost * (1 - g3) * (1 - 0.5 * (1 - through))
        direct = jnp.cumprod(beam, axis=1)
        direct = jnp.concatenate([jnp.ones_like(direct[:, :1]), direct], axis=1) * mu
        albedo = 0.05 + 0.4 * jax.nn.sigmoid(ground)[:, None] * jnp.ones(bands)
        over, under = direct[:, :-1], direct[:, -1]
        layered = tuple(jnp.moveaxis(z, 1, 0) for z in (reflect, through, up * over, down * over))

        def rise(carry, xs):
            r, s = carry
            reflect, through, up, down = xs
            again = 1 / (1 - r * reflect)
            fresh = reflect + through**2 * r * again
            source = up + through * (s + r * down) * again
            return (fresh, source), (r, s)

        (top_r, top_s), (r, s) = lax.scan(rise, (albedo, albedo * under), layered, reverse=True)

        def sink(down, xs):
            (reflect, through, _, made), r, s = xs
            down = (through * down + reflect * s + made) / (1 - r * reflect)
            return down, (down, r * down + s)

        _, (downs, ups) = lax.scan(sink, jnp.zeros_like(albedo), (layered, r, s))
        weights = jax.nn.softmax(share)
        net = jnp.moveaxis(downs - ups, 0, 1) + direct[:, 1:]
        net = jnp.concatenate([(direct[:, 0] - top_s)[:, None], net], axis=1) @ weights * 1361
        heating = (net[:, :-1] - net[:, 1:]) / thick * 8.44e-2
        lid = jnp.exp(-jnp.cumsum(1.66 * absorb[:, ::-1], axis=1))[:, ::-1]
        lost = jnp.concatenate([lid, jnp.ones_like(lid[:, :1])], axis=1)
        glow = 5.67e-8 * t**4
        down = jnp.sum((lost[:, 1:] - lost[:, :-1]) * glow[..., None], axis=1) @ weights
        return net, heating, down, (top_s / mu[:, 0]) @ weights, top_r @ weights

    inputs = (normal(pressures, temperatures, bands), normal(columns, layers), normal(columns, layers))
    inputs += (normal(columns, layers), normal(columns), normal(columns), normal(bands))
    return Built(run, inputs)


@program("counts-of-genes-by-negative-binomial-fits-and-shrunken-spreads", GROUP)
def _deseq(size: Size) -> Built:
    """This tests genes between treatments by negative binomial regressions with shrunken dispersions, as DESeq2 (Love, 2014).

    Sizes of samples come from medians of ratios, dispersions from a trend and a mean on a grid, and p-values are adjusted.
    """
    genes, samples, grid, rounds = pick(size, (20011, 24, 25, 6), (3001, 12, 21, 6), (7, 6, 5, 3))

    def fit(counts, level, effect, age):
        treated = (jnp.arange(samples) >= samples // 2).astype(jnp.float32)
        base = 1 + counts // (1 + level[:, None])
        y = (base + jnp.where((effect == 0)[:, None], base * treated.astype(jnp.int32), 0)).astype(jnp.float32)
        logs = jnp.log(y)
        ratio = logs - jnp.mean(logs, axis=1, keepdims=True)
        sizes = jnp.exp(jnp.median(ratio, axis=0))
        x = jnp.stack([jnp.ones(samples), treated, age], axis=-1)
        normed = y / sizes
        mean, var = jnp.mean(normed, axis=1), jnp.var(normed, axis=1, ddof=1)
        rough = jnp.clip((var - mean * jnp.mean(1 / sizes)) / mean**2, 1e-3, 10.0)
        design = jnp.stack([jnp.ones(genes), 1 / mean], axis=-1)

        def trend(_, coefficients):
            w = 1 / jnp.maximum(design @ coefficients, 1e-3) ** 2
            gram = jnp.einsum("gi,g,gj->ij", design, w, design) + 1e-3 * jnp.eye(2)
            return jnp.maximum(jnp.linalg.solve(gram, jnp.einsum("gi,g,g->i", design, w, rough)), 1e-3)

        prior = jnp.clip(design @ lax.fori_loop(0, 4, trend, jnp.array([0.1, 1.0])), 1e-3, 10.0)

        def regress(dispersion):
            def step(_, beta):
                mu = sizes * jnp.exp(jnp.clip(beta @ x.T, -8, 12))
                w = mu / (1 + dispersion[:, None] * mu)
                z = beta @ x.T + (y - mu) / mu
                gram = jnp.einsum("si,gs,sj->gij", x, w, x) + 1e-3 * jnp.eye(3)
                factor = jnp.linalg.cholesky(gram)
                return jax.scipy.linalg.cho_solve((factor, True), jnp.einsum("si,gs->gi", x, w * z)[..., None])[..., 0]

            start = jnp.zeros((genes, 3)).at[:, 0].set(jnp.log(mean))
            beta = lax.fori_loop(0, rounds, step, start)
            return beta, sizes * jnp.exp(jnp.clip(beta @ x.T, -8, 12))

        _, mu = regress(prior)

        def likelihood(log_a):
            r = jnp.exp(-log_a)[:, None]
            each = gammaln(y + r) - gammaln(r) + y * jnp.log(mu / (mu + r)) + r * jnp.log(r / (mu + r))
            w = mu * r / (mu + r)
            gram = jnp.einsum("si,gs,sj->gij", x, w, x) + 1e-3 * jnp.eye(3)
            pivots = jnp.diagonal(jnp.linalg.cholesky(gram), axis1=1, axis2=2)
            return jnp.sum(each, axis=1) - jnp.sum(jnp.log(pivots), axis=1)

        steps = jnp.linspace(-3, 3, grid)
        chances = lax.map(lambda s: likelihood(jnp.log(prior) + s) - s * s / 2, steps)
        chances = jax.nn.softmax(chances, axis=0)
        shift = jnp.einsum("kg,k->g", chances, steps)
        dispersion = prior * jnp.exp(shift)
        beta, mu = regress(dispersion)
        w = mu / (1 + dispersion[:, None] * mu)
        cover = jnp.linalg.inv(jnp.einsum("si,gs,sj->gij", x, w, x) + 1e-3 * jnp.eye(3))
        stat = beta[:, 1] / jnp.sqrt(cover[:, 1, 1])
        p = erfc(jnp.abs(stat) / 2**0.5)
        order = jnp.argsort(p)
        adjusted = lax.cummin(p[order] * genes / (jnp.arange(genes) + 1), reverse=True)
        adjusted = jnp.zeros(genes).at[order].set(jnp.minimum(adjusted, 1))
        return sizes, beta, dispersion, stat, adjusted

    inputs = (integers(genes, samples, below=200), integers(genes, below=9), integers(genes, below=5))
    return Built(fit, (*inputs, normal(samples, scale=0.5)))


@program("scales-and-clips-searched-for-four-bit-weights-by-channel", GROUP)
def _awq(size: Size) -> Built:
    """This searches scales of channels and clips of groups for four-bit weights from sample activations, as AWQ (Lin, 2023)."""
    tokens, n, m, group, ratios, clips = pick(
        size, (1009, 1024, 3072, 128, 20, 10), (201, 256, 512, 64, 10, 6), (7, 8, 12, 4, 3, 2)
    )
    dtype, sample = half(size), pick(size, 64, 32, 3)

    def rounded(w, shrink=1.0):
        """This gives weights [outputs, inputs] back from four bits with a scale and a zero for each group."""
        parts = w.reshape(m, -1, group)
        high = jnp.max(parts, axis=-1, keepdims=True) * shrink
        low = jnp.min(parts, axis=-1, keepdims=True) * shrink
        scale = jnp.maximum(high - low, 1e-5) / 15
        zero = jnp.clip(jnp.round(-low / scale), 0, 15)
        q = jnp.clip(jnp.round(parts / scale) + zero, 0, 15)
        return ((q - zero) * scale).reshape(w.shape)

    def search(x, w, spikes):
        x = x * jnp.exp(0.8 * spikes).astype(dtype)
        w32 = w.astype(jnp.float32)
        want = (x @ w.T).astype(jnp.float32)
        loud = jnp.mean(jnp.abs(x.astype(jnp.float32)), axis=0)
        parts = jnp.abs(w32).reshape(m, -1, group)
        heavy = jnp.mean((parts / (jnp.max(parts, axis=-1, keepdims=True) + 1e-6)).reshape(m, n), axis=0)

        def scale_of(ratio):
            s = jnp.maximum(loud**ratio / (heavy + 1e-4) ** (1 - ratio), 1e-4)
            return s / jnp.sqrt(jnp.max(s) * jnp.min(s))

        def loss(ratio):
            s = scale_of(ratio)
            got = (x @ (rounded(w32 * s) / s).astype(dtype).T).astype(jnp.float32)
            return jnp.mean((got - want) ** 2)

        grid = jnp.arange(ratios) / ratios
        losses = lax.map(loss, grid)
        share = jax.nn.softmax(-losses / (0.02 * jnp.mean(losses)))
        s = jnp.exp(share @ jnp.log(jax.vmap(scale_of)(grid)))
        scaled = w32 * s
        few = (x[:: max(tokens // sample, 1)].astype(jnp.float32) / s).reshape(-1, n // group, group)
        exact = jnp.einsum("tgi,mgi->mgt", few, scaled.reshape(m, -1, group))

        def clip(shrink):
            q = rounded(scaled, shrink).reshape(m, -1, group)
            return jnp.mean((jnp.einsum("tgi,mgi->mgt", few, q) - exact) ** 2, axis=-1)

        shrinks = 1 - 0.5 * jnp.arange(clips) / clips
        errors = lax.map(clip, shrinks)
        best = jax.nn.softmax(-errors / (0.3 * jnp.mean(errors, axis=0) + 1e-12), axis=0)
        return losses, s, jnp.einsum("kmg,k->mg", best, shrinks), jnp.mean(errors, axis=1)

    return Built(search, (normal(tokens, n, dtype=dtype), weight(m, n, dtype=dtype), normal(n)))


@program("cuts-of-graphs-by-alternating-quantum-layers-many-starts-grad", GROUP)
def _qaoa(size: Size) -> Built:
    """This gives gradients of the expected cut of a graph by a simulated quantum circuit of four layers (QAOA, Farhi, 2014)."""
    starts, qubits, edges, layers = pick(size, (12, 16, 37, 4), (16, 12, 25, 4), (2, 4, 5, 4))

    each = qubits // 4
    flips = np.array([[bin(i ^ j).count("1") for j in range(2**each)] for i in range(2**each)])
    phase = ((-1j) ** flips).astype(np.complex64)

    def cut(ends, weights):
        bits = (jnp.arange(2**qubits)[:, None] >> jnp.arange(qubits)[::-1]) & 1
        apart = bits[:, ends[:, 0]] != bits[:, ends[:, 1]]
        return apart.astype(jnp.float32) @ weights

    def expected(angles, cost):
        gammas, betas = angles
        state = jnp.full(2**qubits, 2 ** (-qubits / 2), jnp.complex64)
        for i in range(layers):
            state = state * jnp.exp(-1j * gammas[i] * cost)
            c, s = jnp.cos(betas[i]), jnp.sin(betas[i])
            turn = (c ** (each - flips) * s**flips) * phase
            for _ in range(4):
                state = (turn @ state.reshape(2**each, -1)).T.reshape(-1)
        chances = state.real**2 + state.imag**2
        return chances @ cost, chances

    def run(gammas, betas, ends, raw):
        weights = 0.2 + jax.nn.softplus(raw)
        cost = cut(ends, weights / jnp.sum(weights) * 4)
        grad = jax.vmap(jax.value_and_grad(expected, has_aux=True), in_axes=(0, None))
        (values, chances), (g, h) = grad((0.5 * gammas, 0.5 * betas), cost)
        return values, g, h, chances @ jnp.exp(cost - jnp.max(cost))

    inputs = (normal(starts, layers), normal(starts, layers), integers(edges, 2, below=qubits), normal(edges))
    return Built(run, inputs)
