"""Programs of molecules, genes, waves, markets and trees in plain JAX, fourteenth set: its author had seen no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program

GROUP = "fourteenth"


@program("morse-clusters-fire-descent-steps", GROUP)
def _fire(size: Size) -> Built:
    """This gives clusters of atoms in a periodic box after steps of the FIRE descent, as JAX MD takes them.

    Atoms are of two kinds with their own Morse wells; each cluster speeds up while forces and velocities agree, and stops if not.
    """
    clusters, atoms, steps = pick(size, (48, 127, 25), (6, 61, 20), (2, 7, 3))
    box = 1.1 * atoms ** (1 / 3)
    wells = np.array([[1.0, 1.4], [1.4, 0.6]], np.float32)
    widths = np.array([[1.0, 0.85], [0.85, 0.9]], np.float32)

    def energy(x, kinds):
        gaps = x[:, None] - x[None]
        gaps = jnp.mod(gaps + box / 2, box) - box / 2
        squares = jnp.sum(gaps**2, axis=-1)
        own = jnp.eye(atoms, dtype=bool)
        r = jnp.sqrt(jnp.where(own, 1.0, squares))
        well, width = jnp.asarray(wells)[kinds[:, None], kinds[None]], jnp.asarray(widths)[kinds[:, None], kinds[None]]
        decay = jnp.exp(-5.0 * (jnp.maximum(r, 0.3) - width))
        share = jnp.clip((2.5 - r) / 0.5, 0.0, 1.0)
        pairs = well * (decay**2 - 2.0 * decay) * share**2 * (3.0 - 2.0 * share)
        return 0.5 * jnp.sum(jnp.where(own, 0.0, pairs))

    def descend(x, kinds):
        def force(x):
            return -jax.grad(energy)(x, kinds)

        def step(state, _):
            x, v, f, dt, alpha, good = state
            x = jnp.mod(x + jnp.clip(dt * v + 0.5 * dt**2 * f, -0.1, 0.1), box)
            new = force(x)
            v = v + 0.5 * dt * (f + new)
            power = jnp.sum(new * v)
            size_f, size_v = jnp.sqrt(jnp.sum(new**2) + 1e-6), jnp.sqrt(jnp.sum(v**2))
            v = (1.0 - alpha) * v + alpha * size_v * new / size_f
            good = jnp.where(power >= 0, good + 1, 0)
            dt = jnp.where(power < 0, dt * 0.5, jnp.where(good > 5, jnp.minimum(dt * 1.1, 0.04), dt))
            alpha = jnp.where(power < 0, 0.1, jnp.where(good > 5, alpha * 0.99, alpha))
            v = jnp.where(power < 0, 0.0, v)
            return (x, v, new, dt, alpha, good), (energy(x, kinds), jnp.max(jnp.abs(new)))

        start = (x, jnp.zeros_like(x), force(x), jnp.float32(0.005), jnp.float32(0.1), jnp.int32(0))
        (x, _, f, *_), seen = lax.scan(step, start, None, length=steps)
        return x, f, seen

    def run(noise, kinds):
        side = int(np.ceil(atoms ** (1 / 3)))
        grid = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)[:atoms]
        start = jnp.mod((grid.astype(np.float32) + 0.5) * (box / side) + 0.05 * noise, box)
        return jax.vmap(descend)(start, kinds)

    return Built(run, (normal(clusters, atoms, 3), integers(clusters, atoms, below=2)))


@program("separable-covariance-evolution-generations", GROUP)
def _evolution(size: Size) -> Built:
    """This gives the searches of many runs of an evolution strategy with a diagonal covariance on a rough function.

    Each generation sorts its candidates, averages the best with falling weights, and adapts step and scales by two paths.
    """
    runs, people, n, rounds = pick(size, (32, 150, 210, 30), (8, 90, 101, 40), (2, 6, 5, 3))
    parents = people // 2
    raw = np.log(parents + 0.5) - np.log(np.arange(1, parents + 1))
    weights = (raw / raw.sum()).astype(np.float32)
    mass = float(1.0 / np.sum(weights**2))
    c_step = (mass + 2) / (n + mass + 5)
    damp = 1 + 2 * max(0.0, ((mass - 1) / (n + 1)) ** 0.5 - 1) + c_step
    c_path = (4 + mass / n) / (n + 4 + 2 * mass / n)
    c_one = 2 / ((n + 1.3) ** 2 + mass) * (n + 2) / 3
    c_many = min(1 - c_one, 2 * (mass - 2 + 1 / mass) / ((n + 2) ** 2 + mass) * (n + 2) / 3)
    expected = n**0.5 * (1 - 1 / (4 * n) + 1 / (21 * n**2))

    def rough(x, centre):
        z = x - centre
        return 10.0 * n + jnp.sum(z**2 - 10.0 * jnp.cos(2 * jnp.pi * z), axis=-1)

    def search(mean, centre, noise):
        def generation(state, draws):
            mean, step, scales, path_s, path_c, count = state
            y = draws * jnp.sqrt(scales)
            people_now = mean + step * y
            fitness = rough(people_now, centre)
            order = jnp.argsort(fitness)[:parents]
            best = y[order]
            moved = weights @ best
            mean = mean + step * moved
            path_s = (1 - c_step) * path_s + (c_step * (2 - c_step) * mass) ** 0.5 * moved / jnp.sqrt(scales)
            length = jnp.sqrt(jnp.sum(path_s**2))
            count = count + 1
            still = length / jnp.sqrt(1 - (1 - c_step) ** (2 * count)) < (1.4 + 2 / (n + 1)) * expected
            path_c = (1 - c_path) * path_c + still * (c_path * (2 - c_path) * mass) ** 0.5 * moved
            wide = (1 - c_one - c_many) * scales + c_one * path_c**2 + c_many * (weights @ best**2)
            step = step * jnp.exp(jnp.minimum(1.0, c_step / damp * (length / expected - 1)))
            seen = (fitness[order[0]], jnp.mean(fitness), step)
            return (mean, step, wide, path_s, path_c, count), seen

        zeros = jnp.zeros(n)
        start = (mean, jnp.float32(0.5), jnp.ones(n), zeros, zeros, jnp.float32(0.0))
        (mean, _, scales, *_), seen = lax.scan(generation, start, noise)
        return mean, scales, seen

    def run(mean, centre, noise):
        return jax.vmap(search, in_axes=(0, 0, 1))(mean, centre, noise)

    return Built(run, (normal(runs, n, scale=2.0), normal(runs, n), normal(rounds, runs, people, n)))


@program("cart-pole-policies-with-resets-and-returns", GROUP)
def _cart_pole(size: Size) -> Built:
    """This gives the returns of many small policies that balance poles on carts, each in several worlds that start anew.

    A fallen pole or a long episode sets its world back; returns are summed backwards without crossing a fall.
    """
    policies, worlds, steps, n = pick(size, (512, 16, 200, 32), (48, 16, 150, 16), (3, 2, 45, 4))

    def one_world(x, push):
        place, speed, angle, spin = x
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        force = (push + 0.05 * spin**2 * sin) / 1.1
        turning = (9.8 * sin - cos * force) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        moving = force - 0.05 * turning * cos / 1.1
        tau = 0.02
        return jnp.stack([place + tau * speed, speed + tau * moving, angle + tau * spin, spin + tau * turning])

    def act(p, x):
        y = jnp.tanh(p["w1"] @ x + p["b1"])
        return p["w2"] @ jnp.tanh(p["w2h"] @ y + y) + p["b2"]

    def roll(p, starts):
        def step(state, start):
            x, age = state
            logit = act(p, x)
            new = one_world(x, 10.0 * jnp.sign(logit))
            fell = (jnp.abs(new[0]) > 2.4) | (jnp.abs(new[2]) > 0.2095)
            over = fell | (age >= 49)
            state = (jnp.where(over, 0.05 * jnp.tanh(start), new), jnp.where(over, 0, age + 1))
            return state, (jnp.where(fell, 0.0, 1.0), over, jax.nn.log_sigmoid(jnp.abs(logit)))

        first = (0.05 * jnp.tanh(starts[0]), jnp.int32(0))
        _, (rewards, over, log_probs) = lax.scan(step, first, starts)

        def back(later, row):
            reward, ended = row
            value = reward + 0.99 * jnp.where(ended, 0.0, later)
            return value, value

        _, returns = lax.scan(back, jnp.float32(0.0), (rewards, over), reverse=True)
        return returns, jnp.sum(over), jnp.mean(log_probs)

    def evaluate(p, starts):
        by_world = jax.vmap(roll, in_axes=(None, 1))
        returns, falls, log_probs = jax.vmap(by_world, in_axes=(0, None))(p, starts)
        fitness = jnp.mean(returns, axis=(1, 2))
        ranks = jnp.argsort(jnp.argsort(fitness)) / (policies - 1) - 0.5
        return fitness, falls, log_probs, jax.tree.map(lambda w: jnp.tensordot(ranks, w, axes=1) / policies, p)

    p = {
        "w1": normal(policies, n, 4),
        "b1": normal(policies, n, scale=0.1),
        "w2h": normal(policies, n, n, scale=n**-0.5),
    }
    p |= {"w2": normal(policies, n), "b2": normal(policies, scale=0.1)}
    return Built(evaluate, (p, normal(steps, worlds, 4)))


@program("unscented-filter-of-turning-aircraft", GROUP)
def _unscented(size: Size) -> Built:
    """This gives filtered tracks of turning aircraft from ranges and bearings by the unscented transform.

    Sigma points come from a Cholesky factor of the covariance, pass the motion, and make means and covariances again.
    """
    tracks, steps = pick(size, (4000, 40), (150, 40), (3, 4))
    n, m, dt = 5, 2, 1.0
    spread = 0.7**2 * (n + 1.0) - n
    mean_w = np.full(2 * n + 1, 0.5 / (n + spread), np.float32)
    mean_w[0] = spread / (n + spread)
    cov_w = mean_w.copy()
    cov_w[0] += 1 - 0.7**2 + 2.0
    drift = np.diag([0.5, 0.5, 0.3, 0.3, 1e-4]).astype(np.float32)
    noise = np.diag([4.0, 1e-3]).astype(np.float32)

    def move(x):
        px, py, vx, vy, turn = x
        near = jnp.abs(turn) < 1e-3
        safe = jnp.where(near, 1.0, turn)
        s, c = jnp.sin(safe * dt), jnp.cos(safe * dt)
        a, b = jnp.where(near, dt, s / safe), jnp.where(near, 0.0, (1 - c) / safe)
        s, c = jnp.where(near, 0.0, s), jnp.where(near, 1.0, c)
        return jnp.stack([px + a * vx - b * vy, py + b * vx + a * vy, c * vx - s * vy, s * vx + c * vy, turn])

    def see(x):
        return jnp.stack([jnp.sqrt(x[0] ** 2 + x[1] ** 2 + 1e-3), jnp.arctan2(x[1], x[0])])

    def wrap(z):
        return z.at[..., 1].set(jnp.mod(z[..., 1] + jnp.pi, 2 * jnp.pi) - jnp.pi)

    def sigma(mean, cov):
        root = jnp.linalg.cholesky((cov + cov.T) / 2 + 1e-6 * jnp.eye(n)) * (n + spread) ** 0.5
        return jnp.concatenate([mean[None], mean + root.T, mean - root.T])

    def step(state, z):
        mean, cov = state
        points = jax.vmap(move)(sigma(mean, cov))
        mean = mean_w @ points
        gaps = points - mean
        cov = jnp.einsum("p,pi,pj->ij", cov_w, gaps, gaps) + drift
        points = sigma(mean, cov)
        seen = jax.vmap(see)(points)
        centre = seen[0] + mean_w @ wrap(seen - seen[0])
        apart, gaps = wrap(seen - centre), points - mean
        s = jnp.einsum("p,pi,pj->ij", cov_w, apart, apart) + noise
        cross = jnp.einsum("p,pi,pj->ij", cov_w, gaps, apart)
        gain = jnp.linalg.solve(s, cross.T).T
        missed = wrap(z - centre)
        mean, cov = mean + gain @ missed, cov - gain @ s @ gain.T
        unlikely = missed @ jnp.linalg.solve(s, missed) + jnp.log(jnp.linalg.det(s)) + m * jnp.log(2 * jnp.pi)
        return (mean, cov), (mean, jnp.diag(cov), -0.5 * unlikely)

    def track(start, turn, errors):
        mean = jnp.array([600.0, 400.0, 12.0, -9.0, 0.0]) + start * jnp.array([30.0, 30.0, 2.0, 2.0, 0.0])
        truth = mean.at[4].set(0.04 * jnp.tanh(turn))
        _, path = lax.scan(lambda x, _: (move(x), move(x)), truth, None, length=steps)
        z = wrap(jax.vmap(see)(path) + errors * jnp.array([2.0, 0.03]))
        cov = jnp.diag(jnp.array([900.0, 900.0, 25.0, 25.0, 0.01]))
        _, (means, variances, logs) = lax.scan(step, (mean, cov), z)
        return means, variances, jnp.sum(logs), jnp.mean((means - path) ** 2, axis=0)

    return Built(jax.vmap(track), (normal(tracks, n), normal(tracks), normal(tracks, steps, m)))


@program("stochastic-volatility-chains-density-grad", GROUP)
def _volatility(size: Size) -> Built:
    """This gives the log density and gradient of a model of changing volatility at many chains, after leapfrog steps.

    Returns follow Student's distribution whose scale walks as an autoregression, and a negative shock raises the next volatility.
    """
    chains, days, leaps = pick(size, (64, 2517, 5), (32, 1259, 5), (2, 7, 2))

    def log_density(p, returns):
        persistence, lever = jnp.tanh(p["persistence"]), jnp.tanh(p["lever"])
        scale, freedom = jax.nn.softplus(p["scale"]), 2.0 + jnp.exp(p["freedom"])
        shocks = p["shocks"]

        def walk(h, row):
            shock, last = row
            h = persistence * h + scale * (shock + lever * jnp.tanh(last))
            return h, h

        before = jnp.concatenate([jnp.zeros(1), returns[:-1]])
        _, h = lax.scan(walk, scale * shocks[0], (shocks, before))
        width = jnp.exp(0.5 * (p["level"] + h))
        seen = jax.scipy.stats.t.logpdf(returns, freedom, p["drift"], width)
        prior = jax.scipy.stats.norm.logpdf(shocks)
        held = jax.scipy.stats.norm.logpdf(p["persistence"], 1.5, 0.5) + jax.scipy.stats.norm.logpdf(p["level"], 0.0, 1)
        held = held + jax.scipy.stats.gamma.logpdf(freedom - 2.0, 2.0, scale=5.0) + p["freedom"]
        held = held + jax.scipy.stats.norm.logpdf(p["lever"]) + jax.scipy.stats.norm.logpdf(p["drift"])
        return jnp.sum(seen) + jnp.sum(prior) + held - scale + jax.nn.log_sigmoid(p["scale"])

    slope = jax.value_and_grad(log_density)

    def leap(p, velocity, returns):
        eps = 0.003
        value, g = slope(p, returns)
        first = value
        for _ in range(leaps):
            velocity = jax.tree.map(lambda v, g: v + 0.5 * eps * g, velocity, g)
            p = jax.tree.map(lambda x, v: x + eps * v, p, velocity)
            value, g = slope(p, returns)
            velocity = jax.tree.map(lambda v, g: v + 0.5 * eps * g, velocity, g)
        return p, value - first, g

    names = {"persistence": 1.5, "lever": -0.3, "scale": -1.0, "freedom": 1.5, "level": 0.0, "drift": 0.0}
    p = {name: normal(chains, scale=0.1, offset=offset) for name, offset in names.items()}
    p |= {"shocks": normal(chains, days)}
    velocity = {name: normal(*leaf.shape) for name, leaf in p.items()}
    return Built(jax.vmap(leap, in_axes=(0, 0, None)), (p, velocity, normal(days)))


@program("genotype-association-of-traits-with-missing-calls", GROUP)
def _genotypes(size: Size) -> Built:
    """This gives how strongly genetic variants go with traits, from counts of zero to two where three means a missing call.

    Missing calls get the mean of their variant; covariates are projected out of both sides; rare variants are dropped, and
    the effective number of traits scales the smallest p-values.
    """
    people, variants, traits, covariates = pick(size, (3001, 16_000, 33, 11), (601, 2000, 13, 7), (15, 9, 3, 2))

    def associate(calls, phenotypes, covariate):
        missing = calls == 3
        counts = jnp.where(missing, 0, calls).astype(jnp.float32)
        called = people - jnp.sum(missing, axis=0)
        mean = jnp.sum(counts, axis=0) / jnp.maximum(called, 1)
        centred = jnp.where(missing, 0.0, counts - mean)
        frequency = mean / 2
        minor = jnp.minimum(frequency, 1 - frequency)
        design = jnp.concatenate([jnp.ones((people, 1)), covariate], axis=1)
        basis, _ = jnp.linalg.qr(design)
        y = phenotypes - basis @ (basis.T @ phenotypes)
        y = y / jnp.sqrt(jnp.sum(y**2, axis=0, keepdims=True) / people)
        squares = jnp.sum(centred**2, axis=0) - jnp.sum((basis.T @ centred) ** 2, axis=0)
        slopes = (centred.T @ y) / jnp.maximum(squares, 1e-3)[:, None]
        free = people - covariates - 2
        left = jnp.maximum(jnp.sum(y**2, axis=0)[None] - slopes**2 * squares[:, None], 1e-3) / free
        z = slopes / jnp.sqrt(left / jnp.maximum(squares, 1e-3)[:, None])
        p_value = jax.scipy.special.erfc(jnp.abs(z) / 2**0.5)
        kept = (minor > 0.01) & (called > 0.5 * people)
        p_value = jnp.where(kept[:, None], p_value, 1.0)
        values = jnp.linalg.eigvalsh(y.T @ y / people)
        effective = jnp.sum(values) ** 2 / jnp.sum(values**2)
        smallest, where = lax.top_k(-p_value.T, 5)
        inflation = jnp.median(z**2, axis=0) / 0.4549
        expected = (1 - frequency) * frequency * 2
        observed = jnp.sum((counts == 1) & ~missing, axis=0) / jnp.maximum(called, 1)
        return slopes, z, jnp.minimum(-smallest * effective, 1.0), where, inflation, 1 - observed / (expected + 1e-3)

    inputs = (integers(people, variants, below=4), normal(people, traits), normal(people, covariates))
    return Built(associate, inputs)


@program("acoustic-inversion-misfit-of-shots-grad", GROUP)
def _acoustic(size: Size) -> Built:
    """This gives the misfit of recorded sound waves in rock and its gradient with respect to the speed at every place.

    Waves follow a fourth-order stencil with a sponge at the borders. Steps are grouped, and the backward pass computes each group
    again.
    """
    shots, rows, columns, groups, inner = pick(size, (6, 141, 203, 8, 15), (2, 71, 93, 6, 15), (2, 12, 14, 2, 3))
    dt, dx, edge = 0.001, 8.0, max(3, rows // 8)
    steps = groups * inner
    ramp = np.minimum(np.arange(rows)[::-1], edge)[:, None] / edge
    sides = np.minimum(np.minimum(np.arange(columns), np.arange(columns)[::-1]), edge)[None] / edge
    sponge = np.exp(-((0.3 * (1 - ramp * np.ones_like(sides))) ** 2) - (0.3 * (1 - sides)) ** 2).astype(np.float32)
    receivers = np.arange(2, columns - 2, 3)

    def laplacian(u):
        wide = jnp.pad(u, ((0, 0), (2, 2), (2, 2)))
        out = -5.0 * u
        for shift, share in ((1, 4.0 / 3.0), (2, -1.0 / 12.0)):
            for axis, length in ((1, rows), (2, columns)):
                other = 3 - axis
                middle = lax.slice_in_dim(wide, 2, 2 + (rows, columns)[other - 1], axis=other)
                for start in (2 - shift, 2 + shift):
                    out = out + share * lax.slice_in_dim(middle, start, start + length, axis=axis)
        return out / dx**2

    def misfit(raw, recorded, places):
        speed = 1500.0 + 1500.0 * jax.nn.sigmoid(raw + jnp.linspace(-2.0, 2.0, rows)[:, None])
        factor = (speed * dt) ** 2
        t = (np.arange(steps, dtype=np.float32) - 0.3 * steps) * np.float32(40.0 / steps * 0.25)
        wavelet = jnp.asarray((1 - 2 * t**2) * np.exp(-(t**2)))

        def step(state, pulse):
            old, now = state
            new = (2.0 * now - old * sponge + factor * laplacian(now)) * sponge
            new = new.at[jnp.arange(shots), 2, places].add(pulse)
            return (now * sponge, new), new[:, 3, receivers]

        @jax.checkpoint
        def group(state, pulses):
            return lax.scan(step, state, pulses)

        empty = jnp.zeros((shots, rows, columns))
        _, seen = lax.scan(group, (empty, empty), wavelet.reshape(groups, inner))
        seen = seen.reshape(steps, shots, -1)
        strength = jnp.sqrt(jnp.sum(seen**2, axis=0, keepdims=True) + 1e-4)
        wanted = recorded / jnp.sqrt(jnp.sum(recorded**2, axis=0, keepdims=True) + 1e-4)
        rough = jnp.mean(jnp.abs(jnp.diff(raw, axis=0))) + jnp.mean(jnp.abs(jnp.diff(raw, axis=1)))
        return jnp.mean(1.0 - jnp.sum(seen / strength * wanted, axis=0)) + 0.01 * rough

    inputs = (normal(rows, columns, scale=0.3), normal(steps, shots, len(receivers)), integers(shots, below=columns))
    return Built(jax.value_and_grad(misfit), inputs)


@program("boosted-symmetric-trees-classes-and-rank-score", GROUP)
def _trees(size: Size) -> Built:
    """This gives classes of table rows by boosted symmetric trees like CatBoost's, and how well the scores rank the rows.

    Values become bins by a search among borders; every level of a tree asks one question of one column, and the answers are the
    bits of the number of the leaf.
    """
    rows, columns, borders, trees, depth, classes = pick(
        size, (20_000, 57, 63, 300, 6, 3), (4000, 29, 31, 150, 6, 3), (9, 4, 3, 5, 2, 3)
    )

    def predict(table, cuts, features, thresholds, leaves, labels):
        cuts = jnp.sort(cuts, axis=1)
        bins = jax.vmap(jnp.searchsorted, in_axes=(0, 1), out_axes=1)(cuts, table)
        powers = 2 ** jnp.arange(depth)

        def one_tree(scores, tree):
            feature, threshold, leaf = tree
            answers = bins[:, feature] > threshold
            index = jnp.sum(answers * powers, axis=1)
            return scores + 0.1 * leaf[index], None

        scores, _ = lax.scan(one_tree, jnp.zeros((rows, classes)), (features, thresholds, leaves))
        log_probs = jax.nn.log_softmax(scores)
        loss = -jnp.mean(jnp.take_along_axis(log_probs, labels[:, None], axis=1))

        def area(score, positive):
            order = jnp.argsort(score)
            ranks = jnp.zeros(rows).at[order].set(jnp.arange(1.0, rows + 1))
            hits = jnp.sum(positive)
            return (jnp.sum(jnp.where(positive, ranks, 0.0)) / hits - (hits + 1) / 2) / jnp.maximum(rows - hits, 1)

        areas = jnp.stack([area(scores[:, c], labels == c) for c in range(classes)])
        chosen = jnp.argmax(scores, axis=1)
        confusion = jnp.zeros((classes, classes), jnp.int32).at[labels, chosen].add(1)
        return jnp.exp(log_probs), chosen, loss, areas, confusion

    asked = (integers(trees, depth, below=columns), integers(trees, depth, below=borders))
    inputs = (normal(rows, columns), normal(columns, borders), *asked, normal(trees, 2**depth, classes))
    return Built(predict, (*inputs, integers(rows, below=classes)))
