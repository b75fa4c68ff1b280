"""Programs of statistics, physics and learning without networks, by an author who knows nothing of the package."""

import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import (
    Built,
    Random,
    Size,
    booleans,
    half,
    integers,
    normal,
    pick,
    program,
    weight,
)

GROUP = "second"


@program("unbalanced-transport-while", GROUP)
def _unbalanced(size: Size) -> Built:
    """Unbalanced optimal transport in the log domain: damped potentials until they rest, then plan, cost and map."""
    n, m, d, limit = pick(size, (3000, 2500, 50, 40), (620, 550, 20, 40), (6, 5, 3, 4))
    eps, tau, tolerance = 0.1, 0.5, 1e-3

    def transport(x, y, a_logits, b_logits):
        log_a, log_b = jax.nn.log_softmax(a_logits), jax.nn.log_softmax(b_logits)
        cost = jnp.sum(x * x, -1)[:, None] + jnp.sum(y * y, -1)[None, :] - 2.0 * x @ y.T
        cost = cost / jnp.median(jnp.max(cost, axis=1))
        damping = tau / (tau + eps)

        def smooth(f, g):
            return (f[:, None] + g[None, :] - cost) / eps

        def unfinished(state):
            step, _, _, moved = state
            return (step < limit) & (moved > tolerance)

        def sweep(state):
            step, f, g, _ = state
            new_f = damping * (f + eps * (log_a - jax.nn.logsumexp(smooth(f, g), axis=1)))
            new_g = damping * (g + eps * (log_b - jax.nn.logsumexp(smooth(new_f, g), axis=0)))
            moved = jnp.max(jnp.abs(new_f - f)) + jnp.max(jnp.abs(new_g - g))
            return step + 1, new_f, new_g, moved

        _, f, g, _ = lax.while_loop(unfinished, sweep, (0, jnp.zeros(n), jnp.zeros(m), jnp.inf))
        plan = jnp.exp(smooth(f, g))
        mass = plan.sum(axis=1)
        barycentre = plan @ y / jnp.maximum(mass, 1e-30)[:, None]
        kl = jnp.sum(jax.scipy.special.xlogy(mass, mass) - mass * log_a) - mass.sum() + 1.0
        return jnp.sum(plan * cost) + tau * kl, barycentre, f, g

    return Built(transport, (normal(n, d), normal(m, d, scale=1.1, offset=0.3), normal(n), normal(m)))


@program("matern-ridge-cg-row-blocks", GROUP)
def _matern_ridge(size: Size) -> Built:
    """Kernel ridge regression by conjugate gradients; the Matern 5/2 matrix is made anew by blocks in a lax.map."""
    blocks, block, d, targets, steps = pick(size, (8, 750, 18, 3, 5), (4, 300, 9, 2, 5), (2, 3, 2, 2, 2))
    n = blocks * block

    def fit(x, y, log_length, log_noise):
        z = x * jnp.exp(-log_length)
        sq = jnp.sum(z**2, axis=-1)
        ridge = jnp.exp(log_noise)

        def matvec(v):
            def one(rows):
                zb, sb = rows
                r2 = jnp.clip(sb[:, None] + sq[None, :] - 2 * jnp.matmul(zb, z.T), 1e-12, None)
                r = math.sqrt(5.0) * jnp.sqrt(r2)
                return ((1 + r + 5.0 / 3.0 * r2) * jnp.exp(-r)) @ v

            out = lax.map(one, (z.reshape(blocks, block, d), sq.reshape(blocks, block)))
            return out.reshape(n, targets) + ridge * v

        def step(_, state):
            alpha, r, p, rs = state
            kp = matvec(p)
            a = rs / (jnp.sum(p * kp, axis=0) + 1e-20)
            alpha, r = alpha + a * p, r - a * kp
            new = jnp.sum(r * r, axis=0)
            return alpha, r, r + new / (rs + 1e-20) * p, new

        centre = y - y.mean(axis=0)
        start = jnp.zeros_like(y), centre, centre, jnp.sum(centre**2, axis=0)
        alpha, _, _, rs = lax.fori_loop(0, steps, step, start)
        return alpha, jnp.sqrt(rs)

    arguments = normal(n, d), normal(n, targets), normal(d, scale=0.2, offset=1.0), normal(scale=0.1, offset=0.5)
    return Built(fit, arguments)


@program("logistic-hamiltonian-chains", GROUP)
def _hamiltonian(size: Size) -> Built:
    """Hamiltonian proposals of a logistic regression with Cauchy priors, vmapped over chains; step size tuned."""
    rows, d, chains, leaps = pick(size, (40000, 54, 48, 7), (6000, 23, 14, 6), (7, 4, 3, 2))

    def move(x, y, positions, log_step, iteration):
        step_size = jnp.exp(log_step) / math.sqrt(rows)

        def log_density(w):
            logits = x @ w[:-1] + w[-1]
            data = jnp.sum(jnp.where(y, -jnp.logaddexp(0.0, -logits), -jnp.logaddexp(0.0, logits)))
            prior = -jnp.sum(jnp.log1p(w[:-1] ** 2 / 4.0)) - 0.5 * (w[-1] / 10.0) ** 2
            return data + prior

        def one_chain(key, w):
            momentum = jax.random.normal(key, w.shape)

            def leap(_, state):
                q, p, g = state
                p = p + 0.5 * step_size * g
                q = q + step_size * p
                g = jax.grad(log_density)(q)
                return q, p + 0.5 * step_size * g, g

            before, gradient = jax.value_and_grad(log_density)(w)
            q, p, _ = lax.fori_loop(0, leaps, leap, (w, momentum, gradient))
            after = log_density(q)
            log_ratio = (after - 0.5 * jnp.vdot(p, p)) - (before - 0.5 * jnp.vdot(momentum, momentum))
            probability = jnp.where(jnp.isnan(log_ratio), 0.0, jnp.minimum(1.0, jnp.exp(log_ratio)))
            return q, probability, probability * jnp.sum((q - w) ** 2), after

        keys = jax.random.split(jax.random.fold_in(jax.random.key(11), iteration), chains)
        proposals, probability, jump, density = jax.vmap(one_chain)(keys, positions)
        return proposals, probability, jump.mean(), density, log_step + 0.05 * (probability.mean() - 0.8)

    arguments = normal(rows, d), booleans(rows), normal(chains, d + 1, scale=0.1), normal(scale=0.1, offset=-1.0)
    return Built(move, (*arguments, integers(below=1000)))


@program("deep-survival-breslow-grad", GROUP)
def _survival(size: Size) -> Built:
    """Cox's partial likelihood of a small SELU network with Breslow's ties, its gradients, and concordance."""
    n, d, hidden = pick(size, (6001, 210, 96), (1501, 60, 32), (9, 4, 5))

    def loss(p, x, time, event):
        h = jax.nn.selu(x @ p["w1"] + p["b1"])
        h = jax.nn.selu(h @ p["w2"] + p["b2"])
        risk = (h @ p["w3"])[:, 0]
        at_risk = lax.cumlogsumexp(risk, axis=0, reverse=True)
        first_of_tie = jnp.searchsorted(time, time, side="left")
        died = event.astype(risk.dtype)
        partial = jnp.sum((risk - at_risk[first_of_tie]) * died) / jnp.maximum(died.sum(), 1.0)
        decay = sum(jnp.sum(jnp.square(p[k])) for k in ("w1", "w2", "w3"))
        return -partial + 1e-4 * decay, lax.stop_gradient(risk)

    def evaluate(p, x, time, event):
        (value, risk), grads = jax.value_and_grad(loss, has_aux=True)(p, x, time, event)
        comparable = (time[:, None] < time[None, :]) & event[:, None]
        right = jnp.where(risk[:, None] > risk[None, :], 1.0, jnp.where(risk[:, None] == risk[None, :], 0.5, 0.0))
        pairs = jnp.sum(comparable)
        concordance = jnp.sum(jnp.where(comparable, right, 0.0)) / jnp.maximum(pairs, 1)
        return value, concordance, grads

    params = {"w1": weight(d, hidden), "b1": normal(hidden, scale=0.1), "w2": weight(hidden, hidden)}
    params |= {"b2": normal(hidden, scale=0.1), "w3": weight(hidden, 1)}
    return Built(evaluate, (params, normal(n, d), integers(n, below=max(n // 3, 4), ramp=True), booleans(n)))


@program("soft-time-warping-grad", GROUP)
def _soft_dtw(size: Size) -> Built:
    """Soft dynamic time warping of batched series by a scan over antidiagonals, and gradients of the first series."""
    batch, t, s, d, gamma = pick(size, (40, 66, 60, 24, 0.1), (30, 84, 76, 10, 0.1), (2, 5, 4, 2, 0.5))
    big = 1e8

    def distance(x, y):
        cost = jnp.mean((x[:, None, :] - y[None, :, :]) ** 2, axis=-1)
        column = jnp.arange(t + s - 1)[:, None] - jnp.arange(t)[None, :]
        skewed = cost[jnp.arange(t)[None, :], jnp.clip(column, 0, s - 1)]
        skewed = jnp.where((column >= 0) & (column < s), skewed, big)

        def down(r):
            return jnp.concatenate([jnp.full((1,), big), r[:-1]])

        def body(carry, diagonal):
            older, newer = carry
            options = jnp.stack([down(older), down(newer), newer])
            soft = -gamma * jax.scipy.special.logsumexp(-options / gamma, axis=0)
            new = jnp.minimum(diagonal + soft, big)
            return (newer, new), None

        (_, last), _ = lax.scan(body, (jnp.full((t,), big), skewed[0]), skewed[1:])
        return last[-1]

    def divergence(x, y):
        xy = jax.vmap(distance)(x, y)
        return jnp.mean(xy), xy

    return Built(jax.value_and_grad(divergence, has_aux=True), (normal(batch, t, d), normal(batch, s, d)))


@program("smoothed-particle-forces", GROUP)
def _sph(size: Size) -> Built:
    """Smoothed particle hydrodynamics: cubic spline densities, Tait pressures, and forces with artificial viscosity."""
    n = pick(size, 4500, 700, 7)
    h = 2.2 * n ** (-1 / 3)
    sigma = 1.0 / (math.pi * h**3)

    def accelerate(x, v, mass_logits):
        mass = jax.nn.softmax(mass_logits)
        dx = x[:, None, :] - x[None, :, :]
        r = jnp.sqrt(jnp.sum(dx * dx, axis=2) + 1e-12)
        q = r / h
        inner, outer = 1 - 1.5 * q**2 + 0.75 * q**3, 0.25 * (2 - q) ** 3
        w = sigma * jnp.where(q < 1, inner, jnp.where(q < 2, outer, 0.0))
        rho = jnp.sum(mass[None, :] * w, axis=1)
        rho0 = jnp.mean(rho)
        pressure = (jnp.maximum(rho / rho0, 0.5) ** 7 - 1.0) * 100.0 * rho0 / 7.0
        sound = jnp.sqrt(100.0 * jnp.maximum(rho / rho0, 0.5) ** 6)

        slope = jnp.where(q < 1, -3 * q + 2.25 * q**2, jnp.where(q < 2, -0.75 * (2 - q) ** 2, 0.0)) * sigma / h
        grad_w = (slope / r)[:, :, None] * dx
        dv = v[:, None, :] - v[None, :, :]
        approach = jnp.minimum(jnp.sum(dv * dx, axis=-1), 0.0)
        mu = h * approach / (r**2 + 0.01 * h**2)
        c_mean, rho_mean = (sound[:, None] + sound[None, :]) / 2, (rho[:, None] + rho[None, :]) / 2
        viscous = (-0.5 * c_mean * mu + mu**2) / rho_mean
        over = pressure / rho**2
        term = mass[None, :] * (over[:, None] + over[None, :] + viscous)
        acc = -jnp.sum(term[..., None] * grad_w, axis=1) - jnp.array([0.0, 0.0, 9.81])
        dt = 0.3 * h / jnp.max(sound + 1.2 * jnp.max(jnp.abs(mu), axis=1))
        v = v + dt * acc
        return x + dt * v, v, rho, dt

    return Built(accelerate, (normal(n, 3, scale=0.3), normal(n, 3, scale=0.1), normal(n, scale=0.05)))


@program("topic-model-online-update", GROUP)
def _topics(size: Size) -> Built:
    """Online variational Bayes of latent Dirichlet allocation: documents by fixed points, then a topic step."""
    docs, vocab, topics, steps = pick(size, (256, 12419, 100, 8), (80, 2500, 30, 6), (3, 7, 2, 2))
    alpha, eta, total_docs = 1.0 / topics, 0.01, 100_000

    def expectation(concentration):
        digamma = jax.scipy.special.digamma
        return digamma(concentration) - digamma(jnp.sum(concentration, axis=-1, keepdims=True))

    def update(words, log_lambda, log_gamma0, step):
        counts = jnp.maximum(words - 4, 0).astype(jnp.float32)
        lam = jnp.exp(log_lambda)
        exp_beta = jnp.exp(expectation(lam))

        def document(_, gamma):
            exp_theta = jnp.exp(expectation(gamma))
            norm = exp_theta @ exp_beta + 1e-30
            return alpha + exp_theta * ((counts / norm) @ exp_beta.T)

        gamma = lax.fori_loop(0, steps, document, jnp.exp(log_gamma0))
        log_theta = expectation(gamma)
        exp_theta = jnp.exp(log_theta)
        norm = exp_theta @ exp_beta + 1e-30
        stats = exp_beta * (exp_theta.T @ (counts / norm))
        rho = (64.0 + step) ** -0.7
        new = (1 - rho) * lam + rho * (eta + total_docs / docs * stats)

        gammaln = jax.scipy.special.gammaln
        score = jnp.sum(counts * jnp.log(norm)) + jnp.sum((alpha - gamma) * log_theta)
        score = score + jnp.sum(gammaln(gamma) - gammaln(alpha))
        score = score + jnp.sum(gammaln(alpha * topics) - gammaln(gamma.sum(axis=1)))
        return new, gamma, jnp.exp(-score / jnp.maximum(counts.sum(), 1.0))

    arguments = integers(docs, vocab, below=6), normal(topics, vocab, scale=0.3), normal(docs, topics, scale=0.1)
    return Built(update, (*arguments, integers(below=500)))


@program("tyler-scatter-per-class", GROUP)
def _tyler(size: Size) -> Built:
    """Robust statistics of each class: Weiszfeld's spatial median, Tyler's shrunk scatter, and outlier distances."""
    classes, rows, d, steps = pick(size, (6, 5000, 90, 5), (3, 900, 30, 5), (2, 8, 3, 2))

    def robust(x):
        def weiszfeld(centre, _):
            inverse = 1.0 / jnp.maximum(jnp.linalg.norm(x - centre, axis=1), 1e-6)
            return (inverse @ x) / inverse.sum(), None

        centre, _ = lax.scan(weiszfeld, jnp.median(x, axis=0), None, length=8)
        z = x - centre

        def distances(scatter):
            lower = jnp.linalg.cholesky(scatter)
            white = jax.scipy.linalg.solve_triangular(lower, z.T, lower=True)
            return jnp.sum(white * white, axis=0), lower

        def tyler(_, scatter):
            maha, _ = distances(scatter)
            weights = d / jnp.maximum(maha, 1e-8)
            scatter = 0.95 * jnp.einsum("n,ni,nj->ij", weights, z, z) / rows + 0.05 * jnp.eye(d)
            return scatter * d / jnp.trace(scatter)

        scatter = lax.fori_loop(0, steps, tyler, jnp.eye(d))
        maha, lower = distances(scatter)
        scale = jnp.median(maha) / (d * (1 - 2 / (9 * d)) ** 3)
        log_det = 2.0 * jnp.sum(jnp.log(jnp.diagonal(lower)))
        return centre, scale * scatter, jnp.sqrt(maha / scale), log_det + d * jnp.log(scale)

    return Built(jax.vmap(robust), (normal(classes, rows, d),))


@program("bilateral-detail-boost", GROUP)
def _bilateral(size: Size) -> Built:
    """A 7x7 bilateral filter of 8-bit colour images with reflected borders, detail boosted, levels stretched."""
    batch, height, width = pick(size, (6, 480, 600), (2, 150, 190), (1, 9, 8))
    dtype = half(size)
    radius, sigma_space, sigma_colour = 3, 2.0, 0.15

    def enhance(image, amount):
        x = image.astype(jnp.float32) / 255.0
        padded = jnp.pad(x, ((0, 0), (radius, radius), (radius, radius), (0, 0)), mode="reflect")
        total = jnp.zeros_like(x)
        norm = jnp.zeros((batch, height, width, 1))
        for dy, dx in itertools.product(range(2 * radius + 1), repeat=2):
            near = padded[:, dy : dy + height, dx : dx + width, :]
            space = math.exp(-((dy - radius) ** 2 + (dx - radius) ** 2) / (2 * sigma_space**2))
            away = jnp.sum((near - x) ** 2, axis=-1, keepdims=True)
            w = space * jnp.exp(-away / (2 * sigma_colour**2))
            total, norm = total + w * near, norm + w
        base = total / norm
        out = base + (1.0 + amount[:, None, None, None]) * (x - base)
        low, high = jnp.min(out, axis=(1, 2), keepdims=True), jnp.max(out, axis=(1, 2), keepdims=True)
        stretched = (out - low) / jnp.maximum(high - low, 1e-5)
        return stretched.astype(dtype), jnp.std(x - base, axis=(1, 2))

    image = Random((batch, height, width, 3), jnp.dtype(jnp.uint8), below=256)
    return Built(enhance, (image, normal(batch, scale=0.2, offset=0.8)))


@program("pairwise-complete-correlation", GROUP)
def _correlation(size: Size) -> Built:
    """Correlations of columns over rows that have both, p-values by Fisher's z, and the topological overlap."""
    rows, columns, at_least = pick(size, (7000, 650, 30), (1200, 190, 30), (12, 5, 2))

    def correlate(x, present):
        low, high = jnp.quantile(x[:: max(rows // 500, 1)], jnp.array([0.01, 0.99]), axis=0)
        x = jnp.clip(x, low, high)
        m = present.astype(x.dtype)
        xm = jnp.where(present, x - jnp.mean(x, axis=0, where=present), 0.0)
        n = m.T @ m
        n_safe = jnp.maximum(n, 1.0)
        s = xm.T @ m
        ss = (xm * xm).T @ m
        cov = (xm.T @ xm - s * s.T / n_safe) / n_safe
        var = (ss - s**2 / n_safe) / n_safe
        corr = cov / jnp.sqrt(jnp.maximum(var * var.T, 1e-12))
        corr = jnp.where(jnp.eye(columns, dtype=bool), 1.0, jnp.clip(corr, -0.999999, 0.999999))
        z = jnp.arctanh(jnp.where(jnp.eye(columns, dtype=bool), 0.0, corr)) * jnp.sqrt(jnp.maximum(n - 3, 0.0))
        p = jax.scipy.special.erfc(jnp.abs(z) / math.sqrt(2.0))
        usable = (n >= at_least) & ~jnp.eye(columns, dtype=bool)
        edges = jnp.where(usable, jnp.abs(corr) ** 2, 0.0)
        degree = edges.sum(axis=1)
        shared = edges @ edges
        overlap = (shared + edges) / (jnp.minimum(degree[:, None], degree[None, :]) + 1.0 - edges)
        return corr, jnp.where(usable, p, 1.0), overlap

    return Built(correlate, (normal(rows, columns), booleans(rows, columns)))
