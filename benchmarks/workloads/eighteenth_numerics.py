"""Programs of planets, arms, clusters, sources, regressions and scores of texts, the eighteenth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, integers, normal, pick, program

GROUP = "eighteenth"


@program("planets-pass-before-stars-limb-darkened-likelihood-grad", GROUP)
def _transits(size: Size) -> Built:
    """This gives the likelihood of the brightness of stars with a planet, with its gradients for each guess of the orbit.

    Kepler's equation is solved by a few Newton steps; the darker limb of the star is integrated on rings, and each exposure is the
    mean of several moments.
    """
    guesses, times, rings, moments_ = pick(size, (24, 1501, 20, 5), (8, 701, 20, 5), (2, 9, 4, 3))

    def hidden(apart, ratio):
        """The share of each ring of the star that the planet covers."""
        edges = jnp.linspace(0.0, 1.0, rings + 1)
        mid = 0.5 * (edges[1:] + edges[:-1])
        z = jnp.maximum(apart[..., None], 1e-4)
        cosine = (mid**2 + z**2 - ratio**2) / (2 * mid * z)
        inside = jnp.abs(cosine) < 1.0
        angle = jnp.arccos(jnp.where(inside, cosine, 0.0)) / jnp.pi
        return mid, edges[1:] ** 2 - edges[:-1] ** 2, jnp.where(inside, angle, jnp.where(cosine <= -1, 1.0, 0.0))

    def light(p, t):
        period, ratio = jnp.exp(0.02 * p[0]) * 3.1, 0.1 * jnp.exp(0.1 * p[1])
        far, tilt = 8.0 * jnp.exp(0.05 * p[2]), 0.3 * jax.nn.sigmoid(p[3])
        e, w = 0.4 * jax.nn.sigmoid(p[4] - 1.0), 0.5 * p[5]
        q1, q2 = jax.nn.sigmoid(p[6]), jax.nn.sigmoid(p[7])
        u1, u2 = 2 * jnp.sqrt(q1) * q2, jnp.sqrt(q1) * (1 - 2 * q2)
        mean = 2 * jnp.pi * (t - 0.05 * p[8]) / period
        mean = jnp.remainder(mean + jnp.pi, 2 * jnp.pi) - jnp.pi

        def newton(_, x):
            return x - (x - e * jnp.sin(x) - mean) / (1 - e * jnp.cos(x))

        x = lax.stop_gradient(lax.fori_loop(0, 6, newton, mean + e * jnp.sin(mean)))
        x = newton(0, x)
        true = 2 * jnp.arctan2(jnp.sqrt(1 + e) * jnp.sin(x / 2), jnp.sqrt(1 - e) * jnp.cos(x / 2))
        r = far * (1 - e * jnp.cos(x))
        around = true + w + jnp.pi / 2
        side, front = r * jnp.sin(around), r * jnp.cos(around)
        apart = jnp.sqrt(side**2 + (front * tilt / far) ** 2 + 1e-8)
        mid, area, share = hidden(apart, ratio)
        mu = jnp.sqrt(1 - mid**2)
        bright = (1 - u1 * (1 - mu) - u2 * (1 - mu) ** 2) * area
        lost = jnp.sum(share * bright, axis=-1) / jnp.sum(bright)
        return 1.0 - jnp.where(front > 0, lost, 0.0)

    def score(p, when, seen, good):
        t = (when * 4.0)[:, None] + 0.02 * (jnp.arange(moments_) / (moments_ - 1) - 0.5)
        model = jnp.mean(light(p, t), axis=1)
        trend = jnp.stack([jnp.ones(times), when, when**2], axis=1) * good[:, None]
        left = seen * 1e-3 + 1.0 - model
        coefficients = jnp.linalg.solve(trend.T @ trend + 1e-3 * jnp.eye(3), trend.T @ left)
        residual = left - trend @ coefficients
        noise = 1e-3 * jnp.exp(0.2 * p[9])
        chi = jnp.where(good, (residual / noise) ** 2, 0.0)
        soft = jnp.where(chi < 25, chi, 10 * jnp.sqrt(jnp.maximum(chi, 1.0)) - 25)
        return -0.5 * jnp.sum(soft) - jnp.sum(good) * jnp.log(noise) - 0.5 * jnp.sum(p**2), model

    def many(guesses, when, seen, good):
        (value, model), slope = jax.vmap(jax.value_and_grad(score, has_aux=True), (0, None, None, None))(
            guesses, when, seen, good
        )
        share = jax.nn.softmax(value)
        return value, slope, share @ guesses, jnp.einsum("g,gt->t", share, model)

    return Built(many, (normal(guesses, 10), normal(times), normal(times), booleans(times)))


@program("many-robot-arms-by-forward-and-backward-passes-of-forces", GROUP)
def _arms(size: Size) -> Built:
    """This gives the motion of many jointed arms that hold a pose by torques, for a few steps.

    Forces are found by a pass outwards and a pass inwards along the links; columns of the mass matrix are the same passes for unit
    accelerations, and a Cholesky factor solves for the motion.
    """
    arms, joints, steps = pick(size, (3000, 7, 4), (500, 7, 4), (2, 7, 4))
    axes = np.eye(3, dtype=np.float32)[[(2, 1, 0)[i % 3] for i in range(joints)]]
    skew = np.zeros((joints, 3, 3), np.float32)
    for i, (x, y, z) in enumerate(axes):
        skew[i] = [[0, -z, y], [z, 0, -x], [-y, x, 0]]

    def turns(q):
        s, c = jnp.sin(q)[:, None, None], jnp.cos(q)[:, None, None]
        return jnp.eye(3) + s * skew + (1 - c) * (skew @ skew)

    def torques(body, q, speed, pull, gravity):
        offsets, centres, mass, inertia = body
        r = turns(q)

        def outwards(carry, xs):
            w, dw, a = carry
            r, axis, v, dv, offset, centre, m, j = xs
            a = r.T @ (a + jnp.cross(dw, offset) + jnp.cross(w, jnp.cross(w, offset)))
            w = r.T @ w
            dw = r.T @ dw + axis * dv + jnp.cross(w, axis * v)
            w = w + axis * v
            at = a + jnp.cross(dw, centre) + jnp.cross(w, jnp.cross(w, centre))
            force = m * at
            return (w, dw, a), (force, jnp.cross(centre, force) + j * dw + jnp.cross(w, j * w))

        zero = jnp.zeros(3)
        links = (r, jnp.asarray(axes), speed, pull, offsets, centres, mass, inertia)
        _, (forces, couples) = lax.scan(outwards, (zero, zero, gravity), links)
        after = jnp.concatenate([r[1:], jnp.eye(3)[None]]), jnp.concatenate([offsets[1:], jnp.zeros((1, 3))])

        def inwards(carry, xs):
            f, n = carry
            force, couple, axis, r, offset = xs
            told = r @ f
            n = couple + r @ n + jnp.cross(offset, told)
            return (force + told, n), jnp.dot(n, axis)

        _, tau = lax.scan(inwards, (zero, zero), (forces, couples, jnp.asarray(axes), *after), reverse=True)
        return tau

    def flown(raw, q, speed, goal):
        offsets = jnp.array([0.0, 0.0, 0.3]) + 0.02 * raw[:, :3]
        body = (
            offsets,
            0.5 * offsets + 0.01,
            1.0 + 0.3 * jnp.tanh(raw[:, 3]),
            0.02 + 0.01 * jax.nn.sigmoid(raw[:, 4:7]),
        )
        down, rest = jnp.array([0.0, 0.0, 9.81]), jnp.zeros(joints)

        def step(carry, _):
            q, v = carry
            bias = torques(body, q, v, rest, down)
            columns = jax.vmap(lambda unit: torques(body, q, rest, unit, jnp.zeros(3)))(jnp.eye(joints))
            mass = 0.5 * (columns + columns.T) + 0.05 * jnp.eye(joints)
            motor = jnp.clip(20.0 * (goal - q) - 4.0 * v, -30.0, 30.0) + torques(body, q, rest, rest, down)
            factor = jax.scipy.linalg.cho_factor(mass, lower=True)
            pull = jax.scipy.linalg.cho_solve(factor, motor - bias - 0.1 * v)
            v = jnp.clip(v + 0.005 * pull, -8.0, 8.0)
            q = q + 0.005 * v
            over = jnp.abs(q) > 2.9
            q, v = jnp.clip(q, -2.9, 2.9), jnp.where(over, 0.0, v)
            return (q, v), (0.5 * v @ mass @ v, jnp.max(jnp.abs(motor)))

        (q, v), seen = lax.scan(step, (q, speed), None, length=steps)
        return q, v, seen

    inputs = (normal(arms, joints), normal(arms, joints, scale=0.3), normal(arms, joints))
    return Built(jax.vmap(flown), (normal(arms, joints, 7), *inputs))


@program("dense-clusters-whose-labels-spread-to-near-points-while", GROUP)
def _dense(size: Size) -> Built:
    """This gives clusters of points in which enough others are near, where labels spread until nothing changes.

    Points that are near a dense one but not dense themselves join its cluster; the rest are noise. A silhouette of each point and
    the sizes of clusters follow.
    """
    n, d, centres, enough = pick(size, (3001, 17, 60, 6), (701, 9, 20, 5), (23, 3, 4, 3))

    def clusters(points, which, middles):
        x = 0.35 * points + 2.0 * middles[which]
        square = jnp.sum(x * x, axis=1)
        apart = jnp.maximum(square[:, None] + square[None] - 2 * jnp.matmul(x, x.T, precision="highest"), 0.0)
        apart = jnp.sqrt(jnp.where(jnp.eye(n, dtype=bool), 0.0, apart))
        kth = jnp.sort(apart[:: max(n // 64, 1)], axis=1)[:, enough]
        radius = 1.3 * jnp.median(kth)
        near = apart <= radius
        core = jnp.sum(near, axis=1) >= enough
        joined = near & core[None] & core[:, None]

        def spread(carry):
            label, _, rounds = carry
            new = jnp.min(jnp.where(joined, label[None], n), axis=1)
            new = jnp.minimum(new, label)
            new = jnp.where(core, new[jnp.minimum(new, n - 1)], n)
            return new, jnp.any(new != label), rounds + 1

        first = jnp.where(core, jnp.arange(n), n)
        label, _, rounds = lax.while_loop(lambda c: c[1] & (c[2] < 40), spread, (first, jnp.array(True), 0))
        nearest = jnp.argmin(jnp.where(core[None], apart, jnp.inf), axis=1)
        border = ~core & jnp.any(near & core[None], axis=1)
        label = jnp.where(border, label[nearest], label)
        noise = label >= n
        counts = jnp.zeros(n + 1, jnp.int32).at[label].add(1)[:n]
        best, kinds = lax.top_k(counts, min(centres, n))
        member = (label[:, None] == kinds) & ~noise[:, None] & (best > 0)
        sums = apart @ member.astype(jnp.float32)
        own = jnp.sum(jnp.where(member, sums / jnp.maximum(best - 1, 1), 0.0), axis=1)
        other = jnp.min(jnp.where(member | (best == 0), jnp.inf, sums / jnp.maximum(best, 1)), axis=1)
        other = jnp.where(jnp.isfinite(other), other, own)
        shape = jnp.where(noise, 0.0, (other - own) / jnp.maximum(jnp.maximum(own, other), 1e-6))
        return label, noise, best, shape, jnp.mean(shape), rounds, radius

    return Built(clusters, (normal(n, d), integers(n, below=centres), normal(centres, d)))


@program("sources-unmixed-by-fixed-point-steps-and-matched", GROUP)
def _sources(size: Size) -> Built:
    """This gives hidden sources of recordings by steps that make their laws least normal, and matches them to known ones.

    Rows are made orthogonal by an iteration of products instead of eigenvectors; several starts run side by side.
    """
    starts, n, samples, rounds = pick(size, (6, 19, 10007, 12), (3, 11, 5003, 12), (2, 3, 33, 12))

    def orthogonal(w):
        w = w / jnp.sqrt(jnp.sum(w * w))

        def closer(_, w):
            return 1.5 * w - 0.5 * (w @ w.T) @ w

        return lax.fori_loop(0, 14, closer, w)

    def unmix(noise, mixing, first):
        t = jnp.arange(samples) / samples
        rates = 7.0 + 5.0 * jnp.arange(n)
        waves = jnp.sin(2 * jnp.pi * rates[:, None] * t)
        kinds = (jnp.arange(n) % 3)[:, None]
        spiky = noise * jnp.abs(noise)
        known = jnp.where(kinds == 0, jnp.sign(waves), jnp.where(kinds == 1, waves, spiky)) + 0.05 * noise
        known = (known - jnp.mean(known, axis=1, keepdims=True)) / jnp.std(known, axis=1, keepdims=True)
        seen = (mixing + 2.0 * jnp.eye(n)) @ known
        x = seen - jnp.mean(seen, axis=1, keepdims=True)
        factor = jnp.linalg.cholesky(x @ x.T / samples + 1e-4 * jnp.eye(n))
        x = lax.linalg.triangular_solve(factor, x, left_side=True, lower=True)

        def run(w):
            def step(w, _):
                y = jnp.tanh(w @ x)
                new = orthogonal(y @ x.T / samples - jnp.mean(1 - y * y, axis=1, keepdims=True) * w)
                moved = jnp.max(jnp.abs(jnp.abs(jnp.sum(new * w, axis=1)) - 1))
                return new, moved

            w, moved = lax.scan(step, orthogonal(w), None, length=rounds)
            y = w @ x
            odd = (jnp.mean(jnp.log(jnp.cosh(y)), axis=1) - 0.3746) ** 2
            return w, moved, jnp.sum(odd)

        w, moved, odd = jax.vmap(run)(first)
        found = w[jnp.argmax(odd)] @ x
        alike = jnp.abs(found @ known.T) / samples

        def match(alike, _):
            at = jnp.argmax(alike)
            i, j = at // n, at % n
            taken = (jnp.arange(n)[:, None] == i) | (jnp.arange(n)[None] == j)
            return jnp.where(taken, -1.0, alike), (i, j, alike[i, j])

        _, pairs = lax.scan(match, alike, None, length=n)
        return found, odd, moved, pairs

    inputs = (normal(n, samples), normal(n, n, scale=0.5), normal(starts, n, n))
    return Built(unmix, inputs)


@program("paths-of-penalties-in-folds-by-accelerated-shrinking-steps", GROUP)
def _penalties(size: Size) -> Built:
    """This gives sparse regressions for falling penalties, each started at the last, and the penalty that predicts best.

    All folds run side by side on masked rows; momentum is restarted when it points uphill, and the best model is refitted.
    """
    n, columns, folds, penalties, steps = pick(size, (1203, 1000, 5, 5, 6), (601, 500, 5, 5, 6), (13, 7, 5, 5, 6))

    def shrink(w, by):
        return jnp.sign(w) * jnp.maximum(jnp.abs(w) - by, 0.0)

    def fit(x, y, fold):
        x = (x - jnp.mean(x, axis=0)) / (jnp.std(x, axis=0) + 1e-6)
        truth = jnp.where(jnp.arange(columns) % 13 == 0, 1.0, 0.0) * jnp.cos(jnp.arange(columns))
        y = x @ truth + y
        train = (fold[None] != jnp.arange(folds + 1)[:, None]).astype(jnp.float32)  # The last fold keeps all rows.
        count = jnp.sum(train, axis=1, keepdims=True)
        intercept = train @ y / count[:, 0]
        centred = y[None] - intercept[:, None]
        most = jnp.max(jnp.abs((train * centred) @ x / count))
        grid = most * jnp.geomspace(0.8, 0.05, penalties)

        def power(_, v):
            v = x.T @ (x @ v)
            return v / jnp.linalg.norm(v)

        v = lax.fori_loop(0, 8, power, jnp.ones(columns) / np.sqrt(columns))
        rate = 0.6 * jnp.min(count) / (jnp.sum((x @ v) ** 2) + 1e-6)

        def path(w, penalty):
            def step(carry, _):
                w, z, k = carry
                slope = (train * (z @ x.T - centred)) @ x / count
                new = shrink(z - rate * slope, rate * 0.9 * penalty) / (1 + rate * 0.1 * penalty)
                after = 0.5 * (1 + jnp.sqrt(1 + 4 * k**2))
                uphill = jnp.sum((z - new) * (new - w), axis=1, keepdims=True) > 0
                after = jnp.where(uphill, 1.0, after)
                z = new + jnp.where(uphill, 0.0, (k - 1) / after) * (new - w)
                return (new, z, after), jnp.max(jnp.abs(new - w))

            (w, _, _), moved = lax.scan(step, (w, w, jnp.ones((folds + 1, 1))), None, length=steps)
            error = (1 - train) * (w @ x.T - centred) ** 2
            total = jnp.sum(error, axis=1)[:folds] / jnp.maximum(jnp.sum(1 - train, axis=1)[:folds], 1)
            return w, (w[-1], total, jnp.sum(w != 0, axis=1), moved[-1])

        _, (ws, errors, used, moved) = lax.scan(path, jnp.zeros((folds + 1, columns)), grid)
        mean = jnp.mean(errors, axis=1)
        spread = jnp.std(errors, axis=1) / np.sqrt(folds)
        best = jnp.argmin(mean)
        simple = jnp.argmax(mean <= mean[best] + spread[best])
        explained = 1 - jnp.var(y - intercept[-1] - x @ ws[simple]) / jnp.var(y)
        return ws[simple], grid[simple], mean, used, moved, explained

    return Built(fit, (normal(n, columns), normal(n), integers(n, below=folds)))


@program("translations-scored-by-shared-runs-of-words-and-resamples", GROUP)
def _shared(size: Size) -> Built:
    """This gives scores of translations against several references by the runs of words that they share.

    The count of a run is clipped by its largest count in a reference; runs are compared by hashes, and a bootstrap over sentences
    gives an interval for the score of the whole.
    """
    pairs, t, references, samples, longest = pick(size, (1500, 47, 3, 1000, 4), (400, 33, 2, 1000, 4), (3, 7, 2, 5, 4))

    def runs(text, length, k):
        h = jnp.zeros(text.shape, jnp.uint32)
        for i in range(k):
            h = (h ^ (jnp.roll(text, -i).astype(jnp.uint32) + jnp.uint32(0x9E3779B9))) * jnp.uint32(0x85EBCA6B)
            h = h ^ (h >> 13)
        return h, jnp.arange(t) <= length - k

    def one(guess, length, others, lengths):
        hits, wholes, recalls = [], [], []
        for k in range(1, longest + 1):
            g, alive = runs(guess, length, k)
            o, there = jax.vmap(lambda s, m, k=k: runs(s, m, k))(others, lengths)
            same = (g[:, None] == g[None]) & alive[None]
            copy = jnp.sum(same & jnp.tri(t, k=-1, dtype=bool), axis=1)
            counts = jnp.sum((g[None, :, None] == o[:, None]) & there[:, None], axis=-1)
            hit = jnp.sum((copy < jnp.max(counts, axis=0)) & alive)
            each = jnp.sum((copy[None] < counts) & alive, axis=1)
            hits.append(hit)
            wholes.append(jnp.sum(alive))
            recalls.append(jnp.max(each / jnp.maximum(jnp.sum(there, axis=1), 1)))
        gap = jnp.abs(lengths - length) * 1000 + lengths
        return jnp.stack(hits), jnp.stack(wholes), jnp.stack(recalls), lengths[jnp.argmin(gap)]

    def total(hits, wholes, length, closest):
        precision = (hits + 0.1) / (wholes + 0.1)
        brevity = jnp.where(length < closest, jnp.exp(1 - closest / jnp.maximum(length, 1.0)), 1.0)
        return 100 * brevity * jnp.exp(jnp.mean(jnp.log(precision), axis=-1))

    def evaluate(text, cuts, others, other_cuts, noise, seed):
        length = cuts + t // 2
        # A reference is the guess with some words changed, so that runs are shared.
        kept = noise[:, None] < 0.6
        others = jnp.where(kept, text[:, None], others)
        lengths = other_cuts + t // 2
        hits, wholes, recalls, closest = jax.vmap(one)(text, length, others, lengths)
        precision = (hits + 0.1) / (wholes + 0.1)
        f = jnp.mean(5 * precision * recalls / (4 * precision + recalls + 1e-9), axis=1)
        rows = jax.random.randint(jax.random.key(seed[0]), (samples, pairs), 0, pairs)
        weights = jax.vmap(lambda r: jnp.zeros(pairs).at[r].add(1.0))(rows)
        table = jnp.concatenate([hits, wholes, length[:, None], closest[:, None]], axis=1).astype(jnp.float32)
        sums = jnp.matmul(weights, table, precision="highest")
        drawn = total(sums[:, :longest], sums[:, longest : 2 * longest], sums[:, -2], sums[:, -1])
        all_ = jnp.sum(table, axis=0)
        whole = total(all_[:longest], all_[longest : 2 * longest], all_[-2], all_[-1])
        low, high = jnp.quantile(drawn, jnp.array([0.025, 0.975]))
        each = total(hits, wholes, length, closest)
        return whole, low, high, jnp.mean(f), each, jnp.argsort(each)

    inputs = (integers(pairs, t, below=90), integers(pairs, below=t // 2), integers(pairs, references, t, below=90))
    inputs += (integers(pairs, references, below=t // 2), normal(pairs, t), integers(1, below=999))
    return Built(evaluate, inputs)
