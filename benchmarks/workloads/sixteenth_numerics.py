"""Programs of epidemics, RNA, plates, scanners, markets and robots, the sixteenth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program

GROUP = "sixteenth"


@program("tensor-parts-nonnegative-multiplied-rounds", GROUP)
def _parts(size: Size) -> Built:
    """This gives a nonnegative decomposition of a tensor in three directions by multiplied updates of each factor."""
    i, j, k, rank, rounds = pick(size, (300, 232, 160, 24, 12), (90, 72, 60, 12, 12), (5, 4, 3, 2, 3))
    dtype = half(size)

    def fit(x, a, b, c):
        x = jnp.abs(x)
        total = jnp.sum(jnp.square(x.astype(jnp.float32)))
        start = tuple(jnp.abs(f) + 0.01 for f in (a, b, c))

        def product(spelling, f, g):
            return jnp.einsum(spelling, x, f.astype(dtype), g.astype(dtype), preferred_element_type=jnp.float32)

        def one_round(factors, _):
            a, b, c = factors
            a = a * product("ijk,jr,kr->ir", b, c) / (a @ ((b.T @ b) * (c.T @ c)) + 1e-6)
            b = b * product("ijk,ir,kr->jr", a, c) / (b @ ((a.T @ a) * (c.T @ c)) + 1e-6)
            top = product("ijk,ir,jr->kr", a, b)
            c = c * top / (c @ ((a.T @ a) * (b.T @ b)) + 1e-6)
            inner = jnp.sum(c * product("ijk,ir,jr->kr", a, b))
            square = jnp.sum((a.T @ a) * (b.T @ b) * (c.T @ c))
            return (a, b, c), jnp.sqrt(jnp.maximum(total - 2 * inner + square, 0.0) / total)

        (a, b, c), errors = lax.scan(one_round, start, None, length=rounds)
        sizes = [jnp.linalg.norm(f, axis=0) + 1e-9 for f in (a, b, c)]
        loads = sizes[0] * sizes[1] * sizes[2]
        return a / sizes[0], b / sizes[1], c / sizes[2], jnp.sort(loads)[::-1], errors

    return Built(fit, (normal(i, j, k, dtype=dtype), *(normal(m, rank) for m in (i, j, k))))


@program("epidemic-among-cities-leaps-of-random-counts", GROUP)
def _epidemic(size: Size) -> Built:
    """This gives random courses of an epidemic among cities that travellers join, in leaps with binomial counts."""
    courses, cities, days = pick(size, (400, 301, 60), (40, 101, 40), (3, 5, 4))
    labels = ("susceptible", "exposed", "infectious", "recovered")

    def one(key, travel, people, rates):
        beta, leave, heal = rates

        def draw(key, count, chance):
            mean, spread = count * chance, jnp.sqrt(jnp.maximum(count * chance * (1 - chance), 0.0))
            value = jnp.round(mean + spread * jax.random.normal(key, count.shape))
            small = jnp.floor(mean + jax.random.uniform(key, count.shape))
            return jnp.clip(jnp.where(mean < 10.0, small, value), 0.0, count)

        def day(state, t):
            s, e, i, r, locked = state
            keys = jax.random.split(jax.random.fold_in(key, t), 3)
            alive = jnp.maximum(s + e + i + r, 1.0)
            near = i / alive
            pressure = (
                beta
                * jnp.where(locked > 0, 0.35, 1.0)
                * (0.85 * near + 0.15 * jnp.matmul(travel, near, precision="highest"))
            )
            new_e = draw(keys[0], s, -jnp.expm1(-pressure))
            new_i = draw(keys[1], e, -jnp.expm1(-leave))
            new_r = draw(keys[2], i, -jnp.expm1(-heal))
            state = (s - new_e, e + new_e - new_i, i + new_i - new_r, r + new_r)
            burden = state[2] / alive
            locked = jnp.where(burden > 0.05, 14, jnp.maximum(locked - 1, 0))
            return (*state, locked), (jnp.sum(new_e), jnp.sum(state[2]), jnp.sum(locked > 0))

        seeds = jnp.where(jnp.arange(cities) == 0, 30.0, 0.0)
        zeros = jnp.zeros(cities)
        start = (people - seeds, zeros, seeds, zeros, jnp.zeros(cities, jnp.int32))
        (*state, _), seen = lax.scan(day, start, jnp.arange(days))
        return dict(zip(labels, state, strict=True)), seen

    def run(seed, attraction, log_people, noise):
        people = jnp.round(jnp.exp(log_people))
        travel = jax.nn.softmax(attraction + jnp.log(people)[None] - 1e9 * jnp.eye(cities), axis=-1)
        rates = jnp.exp(jnp.log(jnp.array([0.6, 0.25, 0.2])) + 0.1 * noise)
        keys = jax.random.split(jax.random.key(seed[0]), courses)
        last, (new, ill, locked) = jax.vmap(one, in_axes=(0, None, None, 0))(keys, travel, people, rates)
        shares = jnp.quantile(ill, jnp.array([0.05, 0.25, 0.5, 0.75, 0.95]), axis=0)
        return (
            jax.tree.map(lambda x: jnp.mean(x, axis=0), last),
            shares,
            jnp.mean(new, axis=0),
            jnp.mean(locked, axis=0),
        )

    people = normal(cities, scale=1.0, offset=10.0)
    return Built(run, (integers(1, below=999), normal(cities, cities), people, normal(courses, 3)))


@program("base-pairs-of-rna-inside-sums-and-probabilities", GROUP)
def _rna(size: Size) -> Built:
    """This gives the log partition function of foldings of RNA and the chance of every pair as its derivative.

    A pair may stack on a pair, and a stretch leaves its last base open or pairs it; sums run by length of stretch.
    """
    many, length = pick(size, (96, 67), (6, 61), (2, 11))
    pairs = np.full((4, 4), -np.inf, np.float32)
    for (one, two), strength in {(0, 3): 1.0, (1, 2): 2.2, (2, 3): 0.4}.items():
        pairs[one, two] = pairs[two, one] = strength
    pairs = np.maximum(pairs, -1e4).astype(np.float32)
    lowest = -1e6

    def partition(bias, bases, heat):
        bond = jnp.asarray(pairs)[bases[:, None], bases[None]] / heat + bias
        starts = jnp.arange(length)

        def stretch(span, tables):
            free, paired = tables
            ends = starts + span
            inside = jnp.minimum(ends, length - 1)
            real = ends < length
            loop = free[starts + 1, inside]
            stack = paired[jnp.minimum(starts + 1, length), jnp.maximum(inside - 1, 0)] + 0.9 / heat
            closed = jnp.logaddexp(loop - 0.5 / heat, stack) + bond[starts, inside]
            closed = jnp.where(real & (span > 3), closed, lowest)
            paired = paired.at[starts, ends].set(closed, mode="drop")
            opened = free[starts, inside]
            middle = jnp.arange(length + 1)
            left = free[starts[:, None], middle[None, :]]
            right = paired[middle[None, :], inside[:, None]]
            allowed = (middle[None] >= starts[:, None]) & (middle[None] <= inside[:, None])
            both = jax.nn.logsumexp(jnp.where(allowed, left + right, lowest), axis=1)
            value = jnp.where(real, jnp.logaddexp(opened, both), lowest)
            return free.at[starts, ends + 1].set(value, mode="drop"), paired

        empty = jnp.arange(length + 1)[:, None] >= jnp.arange(length + 1)[None]
        free = jnp.where(empty, 0.0, lowest)
        paired = jnp.full((length + 1, length), lowest)
        free, _ = lax.fori_loop(0, length, stretch, (free, paired))
        return free[0, length]

    def fold(bases, log_heat):
        heat = jnp.exp(0.1 * log_heat)
        bias = jnp.zeros((many, length, length))
        value, chances = jax.vmap(jax.value_and_grad(partition))(bias, bases, heat)
        chances = chances + jnp.swapaxes(chances, 1, 2)
        lone = 1.0 - jnp.sum(chances, axis=-1)
        entropy = -jnp.sum(jax.scipy.special.xlogy(chances, jnp.maximum(chances, 1e-9)), axis=-1)
        return value, chances, lone, entropy

    return Built(fold, (integers(many, length, below=4), normal(many)))


@program("elastic-plate-of-triangles-conjugate-gradients", GROUP)
def _plate(size: Size) -> Built:
    """This gives stresses of a loaded elastic plate of linear triangles by preconditioned conjugate gradients."""
    high, wide, most = pick(size, (160, 300, 90), (30, 60, 90), (3, 4, 6))
    nodes = (high + 1) * (wide + 1)
    corner = (np.arange(high)[:, None] * (wide + 1) + np.arange(wide)).reshape(-1)
    lower = np.stack([corner, corner + 1, corner + wide + 1], axis=-1)
    upper = np.stack([corner + 1, corner + wide + 2, corner + wide + 1], axis=-1)
    cells = np.concatenate([lower, upper]).astype(np.int32)
    grid = np.stack(np.meshgrid(np.arange(wide + 1), np.arange(high + 1)), axis=-1).reshape(-1, 2)
    held = (np.arange(nodes) % (wide + 1) == 0)[:, None]
    pulled = np.arange(nodes) % (wide + 1) == wide

    def solve(noise, log_stiffness, load):
        places = (grid + 0.1 * jnp.tanh(noise)).astype(jnp.float32)
        p = places[cells]
        edge = jnp.stack([p[:, 1] - p[:, 0], p[:, 2] - p[:, 0]], axis=-1)
        area = 0.5 * jnp.abs(jnp.linalg.det(edge))
        slopes = jnp.array([[-1.0, -1.0], [1.0, 0.0], [0.0, 1.0]]) @ jnp.linalg.inv(edge)
        young, ratio = jnp.exp(0.3 * log_stiffness), 0.3
        mu, lam = young / (2 * (1 + ratio)), young * ratio / (1 - ratio**2)

        def stress(u):
            slope = jnp.einsum("eai,eaj->eij", u[cells], slopes)
            strain = 0.5 * (slope + jnp.swapaxes(slope, 1, 2))
            trace = jnp.trace(strain, axis1=1, axis2=2)
            return lam[:, None, None] * trace[:, None, None] * jnp.eye(2) + 2 * mu[:, None, None] * strain

        def stiff(u):
            forces = jnp.einsum("e,eij,eaj->eai", area, stress(u), slopes)
            sums = jnp.zeros((nodes, 2)).at[cells.reshape(-1)].add(forces.reshape(-1, 2))
            return jnp.where(held, 0.0, sums)

        own = jnp.einsum("e,e,eai->eai", area, lam + 2 * mu, slopes**2)
        own = own + jnp.einsum("e,e,ea->ea", area, mu, jnp.sum(slopes**2, axis=-1))[..., None]
        diagonal = jax.ops.segment_sum(own.reshape(-1, 2), cells.reshape(-1), num_segments=nodes)
        force = jnp.where(pulled[:, None], jnp.stack([1.0 + 0.1 * load, 0.2 * load], axis=-1), 0.0) / high
        force = jnp.where(held, 0.0, force)

        def going(state):
            return (state[0] < most) & (state[-1] > 1e-10 * jnp.sum(force**2 / diagonal))

        def step(state):
            count, u, r, way, rho = state
            image = stiff(way)
            alpha = rho / jnp.sum(way * image)
            u, r = u + alpha * way, r - alpha * image
            z = r / diagonal
            new = jnp.sum(r * z)
            return count + 1, u, r, z + new / rho * way, new

        z = force / diagonal
        start = (0, jnp.zeros((nodes, 2)), force, z, jnp.sum(force * z))
        _, u, r, _, _ = lax.while_loop(going, step, start)
        s = stress(u)
        mises = jnp.sqrt(s[:, 0, 0] ** 2 - s[:, 0, 0] * s[:, 1, 1] + s[:, 1, 1] ** 2 + 3 * s[:, 0, 1] ** 2)
        weights = jax.ops.segment_sum(jnp.repeat(area, 3), cells.reshape(-1), num_segments=nodes)
        smooth = jax.ops.segment_sum(jnp.repeat(area * mises, 3), cells.reshape(-1), num_segments=nodes) / weights
        return u, smooth, jnp.linalg.norm(r), 0.5 * jnp.sum(u * force)

    return Built(solve, (normal(nodes, 2), normal(len(cells)), normal(nodes)))


@program("scanner-filtered-back-projection-and-ordered-subsets", GROUP)
def _scanner(size: Size) -> Built:
    """This gives slices of a scanner by filtered back-projection and a few corrections with subsets of the views."""
    slices, side, views, subsets = pick(size, (6, 200, 60, 4), (2, 72, 60, 6), (2, 8, 6, 2))
    bins = int(1.5 * side) | 1
    angles = np.pi * np.arange(views) / views
    axis = (np.arange(side) - (side - 1) / 2).astype(np.float32)
    wide = 1 << int(np.ceil(np.log2(2 * bins)))
    order = np.arange(views).reshape(-1, subsets).T

    def beams(angle):
        place = axis[None, :] * jnp.cos(angle) + axis[:, None] * jnp.sin(angle) + (bins - 1) / 2
        low = jnp.floor(place).astype(jnp.int32)
        return low, place - low

    def project(images, angles):
        def view(angle):
            low, share = beams(angle)
            flat = images.reshape(slices, -1)
            low, share = low.reshape(-1), share.reshape(-1)
            empty = jnp.zeros((slices, bins))
            return empty.at[:, low].add(flat * (1 - share)).at[:, low + 1].add(flat * share)

        return jnp.moveaxis(lax.map(view, angles), 0, 1)

    def back(sinogram, angles):
        def view(total, inputs):
            rows, angle = inputs
            low, share = beams(angle)
            return total + rows[:, low] * (1 - share) + rows[:, low + 1] * share, None

        start = jnp.zeros((slices, side, side))
        total, _ = lax.scan(view, start, (jnp.moveaxis(sinogram, 1, 0), angles))
        return total

    def rebuild(counts):
        sinogram = jnp.log(1e4 / jnp.clip(counts, 1.0, 1e4)) * 5.0
        frequency = jnp.fft.rfftfreq(wide)
        ramp = 2 * jnp.abs(frequency) * (0.54 + 0.46 * jnp.cos(2 * jnp.pi * frequency))
        spectrum = jnp.fft.rfft(sinogram, n=wide, axis=-1) * ramp
        filtered = jnp.fft.irfft(spectrum, n=wide, axis=-1)[..., :bins]
        image = jnp.maximum(back(filtered, jnp.asarray(angles)) * jnp.pi / (2 * views), 0.0)
        ones = jnp.ones((slices, side, side))

        def subset(image, chosen):
            part = jnp.asarray(angles)[chosen]
            reach = project(ones, part)
            gap = (sinogram[:, chosen] - project(image, part)) / jnp.maximum(reach, 1.0)
            image = jnp.maximum(image + 0.7 * back(gap, part) / chosen.shape[0], 0.0)
            return image, jnp.mean(jnp.abs(gap), axis=(1, 2))

        better, errors = lax.scan(subset, image, jnp.asarray(order))
        return image, better, errors

    return Built(rebuild, (normal(slices, views, bins, scale=900.0, offset=5000.0),))


@program("clouds-aligned-by-trimmed-nearest-rotations", GROUP)
def _clouds(size: Size) -> Built:
    """This gives rotations and shifts that lay scanned clouds of points upon models, from the best half of matches."""
    many, points, models, rounds = pick(size, (12, 1500, 2000, 8), (2, 300, 400, 10), (2, 12, 15, 4))

    def align(cloud, model):
        square = jnp.sum(model**2, axis=-1)

        def one(state, _):
            rotation, shift = state
            moved = cloud @ rotation.T + shift
            apart = square[None] - 2 * jnp.matmul(moved, model.T, precision="highest")
            near = jnp.argmin(apart, axis=-1)
            partner = model[near]
            error = jnp.sum((moved - partner) ** 2, axis=-1)
            limit = jnp.median(error)
            share = (error <= limit) / (1.0 + error / (limit + 1e-9))
            share = share / jnp.sum(share)
            middle, goal = share @ cloud, share @ partner
            cross = jnp.einsum("p,pi,pj->ij", share, partner - goal, cloud - middle, precision="highest")
            u, s, vt = jnp.linalg.svd(cross)
            flip = jnp.where(jnp.linalg.det(u @ vt) < 0, -1.0, 1.0)
            rotation = (u * jnp.array([1.0, 1.0, flip])) @ vt
            return (rotation, goal - rotation @ middle), (jnp.sum(share * error), s)

        start = (jnp.eye(3), jnp.mean(model, axis=0) - jnp.mean(cloud, axis=0))
        (rotation, shift), seen = lax.scan(one, start, None, length=rounds)
        angle = jnp.arccos(jnp.clip((jnp.trace(rotation) - 1) / 2, -1.0, 1.0))
        return rotation, shift, angle, seen

    def run(models_of, noise, turn):
        z = 0.2 * turn
        zero = jnp.zeros(many)
        rows = [[zero, -z[:, 2], z[:, 1]], [z[:, 2], zero, -z[:, 0]], [-z[:, 1], z[:, 0], zero]]
        skew = jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=1)
        rotations = jax.scipy.linalg.expm(skew)
        shape = models_of * jnp.array([3.0, 2.0, 1.0])
        clouds = jnp.einsum("mij,mpj->mpi", rotations, shape[:, :points]) + 0.02 * noise + 0.1 * turn[:, None]
        return jax.vmap(align)(clouds, shape)

    return Built(run, (normal(many, models, 3), normal(many, points, 3), normal(many, 3)))


@program("volatility-clusters-with-leverage-fits-by-adam", GROUP)
def _volatility(size: Size) -> Built:
    """This gives fits of asymmetric volatility with heavy tails to many stocks, then their changing correlations."""
    import optax

    stocks, days, rounds = pick(size, (500, 160, 6), (200, 160, 10), (3, 9, 3))
    adam = optax.adam(0.05)

    def unpack(raw):
        alpha, gamma = 0.2 * jax.nn.sigmoid(raw["alpha"]), 0.2 * jax.nn.sigmoid(raw["gamma"])
        beta = 0.95 * jax.nn.sigmoid(raw["beta"]) * (1 - alpha - gamma / 2)
        return alpha, gamma, beta, 2.1 + jax.nn.softplus(raw["tail"])

    def variances(raw, returns, long_run):
        alpha, gamma, beta, _ = unpack(raw)
        base = long_run * (1 - alpha - gamma / 2 - beta)

        news = base + (alpha + gamma * (returns < 0)) * returns**2
        news = jnp.concatenate([long_run[None], news[:-1]])

        def joined(early, late):
            return early[0] * late[0], late[0] * early[1] + late[1]

        _, h = lax.associative_scan(joined, (jnp.broadcast_to(beta, news.shape), news))
        return h

    def loss(raw, returns, long_run):
        h = variances(raw, returns, long_run)
        tail = unpack(raw)[-1]
        z = returns**2 / h
        gamma_part = lax.lgamma((tail + 1) / 2) - lax.lgamma(tail / 2) - 0.5 * jnp.log(jnp.pi * (tail - 2))
        log_p = gamma_part - 0.5 * jnp.log(h) - 0.5 * (tail + 1) * jnp.log1p(z / (tail - 2))
        return -jnp.mean(jnp.sum(log_p, axis=0)) / days

    def fit(raw, returns):
        returns = returns - jnp.mean(returns, axis=0)
        long_run = jnp.var(returns, axis=0)

        def step(carry, _):
            raw, state = carry
            value, grads = jax.value_and_grad(loss)(raw, returns, long_run)
            change, state = adam.update(jax.tree.map(lambda g: g * stocks, grads), state)
            return (optax.apply_updates(raw, change), state), value

        (raw, _), values = lax.scan(step, (raw, adam.init(raw)), None, length=rounds)
        z = returns / jnp.sqrt(variances(raw, returns, long_run))
        target = z.T @ z / days

        def correlate(q, row):
            scale = lax.rsqrt(jnp.diagonal(q))
            rho = q * scale[:, None] * scale[None]
            seen = ((jnp.sum(rho) - stocks) / (stocks * (stocks - 1)), row @ rho @ row / stocks)
            return 0.03 * target + 0.05 * jnp.outer(row, row) + 0.92 * q, seen

        q, (mean, load) = lax.scan(correlate, target + 1e-3 * jnp.eye(stocks), z)
        return unpack(raw), values, mean, load, q

    raw = {name: normal(stocks, scale=0.3, offset=shift) for name, shift in (("alpha", -1.0), ("gamma", -1.0))}
    raw |= {name: normal(stocks, scale=0.3, offset=shift) for name, shift in (("beta", 2.0), ("tail", 1.5))}
    return Built(fit, (raw, normal(days, stocks, scale=0.02)))


@program("quadrotors-flown-by-iterated-quadratic-control", GROUP)
def _quadrotors(size: Size) -> Built:
    """This gives thrusts of quadrotors in a plane by backward Riccati sweeps, each tried with several step lengths."""
    flights, steps, rounds = pick(size, (1500, 24, 3), (40, 24, 3), (2, 5, 2))
    lengths = np.array([1.0, 0.5, 0.25, 0.1], np.float32)
    cost_x = np.array([4.0, 4.0, 1.0, 0.4, 0.4, 0.2], np.float32)

    def move(x, u):
        def rate(x):
            push, spin = 9.81 + u[0] + u[1], 5.0 * (u[0] - u[1])
            drag = 0.1 * x[3:5] * jnp.sqrt(jnp.sum(x[3:5] ** 2) + 1e-3)
            faster = jnp.stack([-push * jnp.sin(x[2]) - drag[0], push * jnp.cos(x[2]) - 9.81 - drag[1], spin])
            return jnp.concatenate([x[3:], faster])

        half_way = x + 0.025 * rate(x)
        return x + 0.05 * rate(half_way)

    def cost(x, u, goal):
        gap = x - goal
        near = jnp.sum((x[:2] - goal[:2] / 2) ** 2)
        return 0.05 * jnp.sum(cost_x * gap**2) + 0.01 * jnp.sum(u**2) + 2.0 * jnp.exp(-4.0 * near)

    def last_cost(x, goal):
        return 5.0 * jnp.sum(cost_x * (x - goal) ** 2)

    def roll(start, us, goal):
        def step(x, u):
            return move(x, u), (x, cost(x, u, goal))

        last, (xs, costs) = lax.scan(step, start, us)
        return xs, last, jnp.sum(costs) + last_cost(last, goal)

    def fly(start, us, goal):
        def sweep(carry, _):
            us, damp = carry
            xs, last, before = roll(start, us, goal)
            jac_x, jac_u = jax.vmap(jax.jacfwd(move, argnums=(0, 1)))(xs, us)
            slope_x, slope_u = jax.vmap(jax.grad(cost, argnums=(0, 1)), in_axes=(0, 0, None))(xs, us, goal)
            bend_x = 0.1 * jnp.diag(cost_x)
            bend_u = 0.02 * jnp.eye(2)

            def back(value, row):
                v, vv = value
                fx, fu, lx, lu = row
                qx, qu = lx + fx.T @ v, lu + fu.T @ v
                qxx, qux = bend_x + fx.T @ vv @ fx, fu.T @ vv @ fx
                quu = bend_u + fu.T @ vv @ fu + damp * jnp.eye(2)
                (a, b), (c, d) = quu
                inverse = jnp.array([[d, -b], [-c, a]]) / (a * d - b * c)
                gains = -inverse @ jnp.concatenate([qu[:, None], qux], axis=1)
                k, kk = gains[:, 0], gains[:, 1:]
                v = qx + kk.T @ (quu @ k + qu) + qux.T @ k
                vv = qxx + kk.T @ quu @ kk + kk.T @ qux + qux.T @ kk
                return (v, 0.5 * (vv + vv.T)), (k, kk)

            final = (jax.grad(last_cost)(last, goal), 10.0 * jnp.diag(cost_x))
            _, (k, kk) = lax.scan(back, final, (jac_x, jac_u, slope_x, slope_u), reverse=True)

            def attempt(length):
                def step(x, row):
                    old_x, old_u, k, kk = row
                    u = jnp.clip(old_u + length * k + kk @ (x - old_x), -6.0, 6.0)
                    return move(x, u), (u, cost(x, u, goal))

                last, (new, costs) = lax.scan(step, start, (xs, us, k, kk))
                return new, jnp.sum(costs) + last_cost(last, goal)

            tried, costs = jax.vmap(attempt)(jnp.asarray(lengths))
            best = jnp.argmin(costs)
            better = costs[best] < before
            us = jnp.where(better, tried[best], us)
            damp = jnp.where(better, damp * 0.5, damp * 5.0)
            return (us, damp), (before, costs)

        (us, damp), seen = lax.scan(sweep, (us, jnp.float32(1.0)), None, length=rounds)
        xs, last, total = roll(start, us, goal)
        return us, xs, last, total, damp, seen

    def run(start, us, goals):
        ends = jnp.concatenate([2.0 * jnp.tanh(goals), jnp.zeros((flights, 4))], axis=-1)
        return jax.vmap(fly)(0.3 * start, 0.1 * us, ends)

    return Built(run, (normal(flights, 6), normal(flights, steps, 2), normal(flights, 2)))
