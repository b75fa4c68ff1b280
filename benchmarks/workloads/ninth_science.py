"""Options, galaxies, exams and moving images of the ninth set: its author had seen no plan."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program

GROUP = "ninth"


@program("heston-cosine-surface-calibration", GROUP)
def _heston(size: Size) -> Built:
    """This gives parameters of Heston's model for surfaces of options after some steps of Levenberg and Marquardt.

    Prices are by the cosine method of Fang and Oosterlee: the characteristic function (in the form that avoids the little trap) at
    each maturity, times the coefficients of a payoff, summed for every strike; Jacobians are forward derivatives.
    """
    surfaces, maturities, strikes, terms, steps = pick(size, (64, 12, 25, 160, 4), (6, 8, 13, 96, 3), (2, 3, 5, 7, 2))
    times = np.linspace(0.25, 2.0, maturities, dtype=np.float32)
    moneyness = np.linspace(0.8, 1.2, strikes, dtype=np.float32)
    rate = 0.02

    def constrained(raw):
        kappa, theta = 0.5 + jax.nn.softplus(raw[0]), 0.02 + 0.1 * jax.nn.sigmoid(raw[1])
        sigma, rho = 0.1 + 0.5 * jax.nn.sigmoid(raw[2]), -0.95 * jax.nn.sigmoid(raw[3])
        return kappa, theta, sigma, rho, 0.02 + 0.1 * jax.nn.sigmoid(raw[4])

    def characteristic(u, t, kappa, theta, sigma, rho, v0):
        beta = kappa - 1j * rho * sigma * u
        root = jnp.sqrt(beta**2 + sigma**2 * (u**2 + 1j * u))
        g = (beta - root) / (beta + root)
        decay = jnp.exp(-root * t)
        first = 1j * u * rate * t + v0 / sigma**2 * (1.0 - decay) / (1.0 - g * decay) * (beta - root)
        second = kappa * theta / sigma**2 * (t * (beta - root) - 2.0 * jnp.log((1.0 - g * decay) / (1.0 - g)))
        return jnp.exp(first + second)

    def payoff(a, b, k):
        """The cosine coefficients of a put on the interval from a to b."""
        w = k * np.pi / (b - a)
        low, high = w * (a - a), w * (0.0 - a)
        chi = (jnp.cos(high) - jnp.cos(low) * jnp.exp(a) + w * (jnp.sin(high) - jnp.sin(low) * jnp.exp(a))) / (
            1.0 + w**2
        )
        psi = jnp.where(k == 0, -a, (jnp.sin(high) - jnp.sin(low)) / jnp.where(k == 0, 1.0, w))
        return 2.0 / (b - a) * (psi - chi)

    def prices(raw):
        kappa, theta, sigma, rho, v0 = constrained(raw)
        k = jnp.arange(terms, dtype=jnp.float32)
        x = -jnp.log(moneyness)

        def at(t):
            mean = (1.0 - jnp.exp(-kappa * t)) * (theta - v0) / (2.0 * kappa) - 0.5 * theta * t + rate * t
            width = 10.0 * jnp.sqrt(theta * t + sigma * v0 * t)
            a, b = mean - width, mean + width
            u = k * np.pi / (b - a)
            phi = characteristic(u, t, kappa, theta, sigma, rho, v0)
            waves = jnp.exp(1j * u[None, :] * (x[:, None] - a))
            each = jnp.real(phi[None, :] * waves) * payoff(a, b, k)
            each = each.at[:, 0].multiply(0.5)
            put = moneyness * jnp.exp(-rate * t) * jnp.sum(each, axis=1)
            return put, put + 1.0 - moneyness * jnp.exp(-rate * t)

        put, call = jax.vmap(at)(times)
        return jnp.where(moneyness[None, :] < 1.0, put, call)

    def calibrate(raw, quotes, spread):
        quotes, weights = jnp.abs(quotes), 1.0 / (0.002 + jnp.abs(spread))

        def residuals(raw):
            return (weights * (prices(raw) - quotes)).reshape(-1) / np.sqrt(maturities * strikes)

        def step(state, _):
            raw, damping, error = state
            r, jacobian = residuals(raw), jax.jacfwd(residuals)(raw)
            normal_matrix = jacobian.T @ jacobian
            damped = normal_matrix + damping * jnp.diag(jnp.diagonal(normal_matrix) + 1e-6)
            trial = raw - jnp.clip(jnp.linalg.solve(damped, jacobian.T @ r), -1.0, 1.0)
            new = jnp.sum(residuals(trial) ** 2)
            better = new < error
            raw, error = jnp.where(better, trial, raw), jnp.where(better, new, error)
            return (raw, jnp.where(better, damping / 3.0, damping * 2.0), error), error

        first = (raw, jnp.float32(0.01), jnp.sum(residuals(raw) ** 2))
        (raw, _, _), errors = lax.scan(step, first, None, length=steps)
        return jnp.stack(constrained(raw)), errors, prices(raw)

    quotes = normal(surfaces, maturities, strikes, scale=0.01, offset=0.06)
    spread = normal(surfaces, maturities, strikes, scale=0.002)
    return Built(jax.vmap(calibrate), (normal(surfaces, 5, scale=0.3), quotes, spread))


@program("particle-mesh-cloud-in-cell-steps", GROUP)
def _particle_mesh(size: Size) -> Built:
    """This gives galaxies' positions, momenta and density after some steps of gravity on a mesh, as JaxPM has it.

    Particles are painted into the eight cells around them, the potential's gradient is found in Fourier space with its finite
    differences, and read back with the same weights; kicks and drifts follow each other.
    """
    mesh, particles, steps = pick(size, (96, 96, 3), (24, 24, 2), (5, 3, 2))
    dt, growth = 0.1, 1.5
    corners = np.array(list(itertools.product((0.0, 1.0), repeat=3)), np.float32)

    def clouds(position):
        """The cells around each position, and their weights."""
        floor = jnp.floor(position)[:, None, :] + corners
        weights = jnp.prod(1.0 - jnp.abs(position[:, None, :] - floor), axis=-1)
        return jnp.mod(floor.astype(jnp.int32), mesh), weights

    def paint(position):
        cell, weights = clouds(position)
        flat = cell.reshape(-1, 3)
        return jnp.zeros((mesh,) * 3).at[flat[:, 0], flat[:, 1], flat[:, 2]].add(weights.reshape(-1))

    def read(field, position):
        cell, weights = clouds(position)
        return jnp.sum(field[cell[..., 0], cell[..., 1], cell[..., 2]] * weights, axis=-1)

    def waves():
        full = 2.0 * np.pi * jnp.fft.fftfreq(mesh)
        half = 2.0 * np.pi * jnp.fft.rfftfreq(mesh)
        return full[:, None, None], full[None, :, None], half[None, None, :]

    def gradient_kernel(k):
        return 1j * (8.0 * jnp.sin(k) - jnp.sin(2.0 * k)) / 6.0

    def forces(position):
        delta = paint(position) * (mesh / particles) ** 3
        spectrum = jnp.fft.rfftn(delta - 1.0)
        k = waves()
        squared = sum(component**2 for component in k)
        laplace = -jnp.where(squared == 0.0, 0.0, 1.0 / jnp.where(squared == 0.0, 1.0, squared))
        potential = spectrum * laplace * jnp.exp(-0.125 * squared)
        each = [read(jnp.fft.irfftn(-gradient_kernel(c) * potential, s=(mesh,) * 3), position) for c in k]
        return growth * jnp.stack(each, axis=-1)

    def evolve(displacement, momentum):
        axis = jnp.arange(particles, dtype=jnp.float32) * (mesh / particles)
        lattice = jnp.stack(jnp.meshgrid(axis, axis, axis, indexing="ij"), axis=-1).reshape(-1, 3)
        position = jnp.mod(lattice + displacement, mesh)

        def step(state, a):
            position, momentum, force = state
            momentum = momentum + 0.5 * dt * force / a
            position = jnp.mod(position + dt * momentum / a**1.5, mesh)
            force = forces(position)
            momentum = momentum + 0.5 * dt * force / a
            return (position, momentum, force), jnp.mean(jnp.sum(momentum**2, axis=-1))

        scale = jnp.linspace(0.3, 1.0, steps)
        (position, momentum, _), kinetic = lax.scan(step, (position, momentum, forces(position)), scale)
        return position, momentum, paint(position), kinetic

    n = particles**3
    return Built(evolve, (normal(n, 3, scale=0.7), normal(n, 3, scale=0.1)))


@program("microcanonical-chains-item-response", GROUP)
def _item_response(size: Size) -> Built:
    """This gives draws of abilities and difficulties of an exam with two parameters an item, by blackjax's microcanonical chains.

    The momentum has length one: it turns to the gradient by McLachlan's steps, and is partly refreshed at random; the changes of
    energy tell whether the step is small enough.
    """
    chains, students, items, steps = pick(size, (48, 800, 60, 6), (4, 150, 25, 5), (2, 7, 5, 3))
    dim, size_of_step, length = students + 2 * items + 2, 0.5, 10.0
    b1 = 0.1931833275037836

    def log_density(q, right, answered):
        ability, difficulty, slope = q["ability"], q["difficulty"], q["slope"]
        spread = jnp.exp(q["scale"])
        a = jnp.exp(0.3 * slope)
        logits = a[None, :] * (ability[:, None] - q["mean"] - spread * difficulty[None, :])
        each = jnp.where(answered, right * logits - jax.nn.softplus(logits), 0.0)
        prior = -0.5 * (jnp.sum(ability**2) + jnp.sum(difficulty**2) + jnp.sum(slope**2))
        return jnp.sum(each) + prior - 0.5 * (q["scale"] ** 2 + q["mean"] ** 2)

    def unravel(x):
        ends = np.cumsum([students, items, items, 1])
        ability, difficulty, slope, mean, scale = jnp.split(x, ends)
        return {"ability": ability, "difficulty": difficulty, "slope": slope, "mean": mean[0], "scale": scale[0]}

    def chain(x, u, seed, right, answered):
        slope = jax.value_and_grad(lambda x: log_density(unravel(x), right, answered))

        def turn(u, gradient, step):
            norm = jnp.linalg.norm(gradient)
            e = gradient / jnp.where(norm > 0.0, norm, 1.0)
            along, delta = jnp.dot(u, e), step * norm / (dim - 1)
            zeta = jnp.exp(-delta)
            u = e * (1.0 - zeta) * (1.0 + zeta + along * (1.0 - zeta)) + 2.0 * zeta * u
            change = (dim - 1) * (delta - np.log(2.0) + jnp.log(1.0 + along + (1.0 - along) * zeta**2))
            return u / jnp.linalg.norm(u), change

        def move(state, key):
            x, u, value, gradient = state
            u, first = turn(u, gradient, b1 * size_of_step)
            x = x + 0.5 * size_of_step * u
            _, gradient = slope(x)
            u, second = turn(u, gradient, (1.0 - 2.0 * b1) * size_of_step)
            x = x + 0.5 * size_of_step * u
            new, gradient = slope(x)
            u, third = turn(u, gradient, b1 * size_of_step)
            noise = jnp.sqrt((jnp.exp(2.0 * size_of_step / length) - 1.0) / dim) * jax.random.normal(key, (dim,))
            u = (u + noise) / jnp.linalg.norm(u + noise)
            energy = first + second + third - new + value
            return (x, u, new, gradient), (x[students:], energy, new)

        u = u / jnp.linalg.norm(u)
        (x, u, _, _), (draws, energy, values) = lax.scan(
            move, (x, u, *slope(x)), jax.random.split(jax.random.key(seed), steps)
        )
        return x, u, draws, jnp.mean(energy**2) / dim, values

    def run(x, u, seeds, score):
        right, answered = (score == 1).astype(jnp.float32), score < 2
        x, u, draws, error, values = jax.vmap(chain, in_axes=(0, 0, 0, None, None))(x, u, seeds, right, answered)
        within, between = jnp.mean(jnp.var(draws, axis=1), axis=0), jnp.var(jnp.mean(draws, axis=1), axis=0)
        return x, u, error, values, jnp.sqrt((steps - 1) / steps + between / jnp.maximum(within, 1e-9))

    start = normal(chains, dim, scale=0.5), normal(chains, dim)
    return Built(run, (*start, integers(chains, below=10_000), integers(students, items, below=3)))


@program("tv-l1-optical-flow-duality", GROUP)
def _optical_flow(size: Size) -> Built:
    """This gives the flow between two images by the TV-L1 method with duality, as scikit-image's optical_flow_tvl1 does at a scale.

    The second image is warped by the flow; a threshold on the linearised difference and Chambolle's projections for the total
    variation of each component take turns.
    """
    b, rows, columns, warps, iterations = pick(size, (4, 480, 640, 3, 5), (1, 180, 210, 2, 4), (2, 7, 9, 2, 3))
    attachment, tightness, inner, dt = 15.0, 0.3, 2, 0.25

    def warp(image, flow):
        grid = jnp.meshgrid(jnp.arange(rows), jnp.arange(columns), indexing="ij")
        places = [g.astype(jnp.float32) + f for g, f in zip(grid, flow, strict=True)]
        return jax.scipy.ndimage.map_coordinates(image, places, order=1, mode="nearest")

    def forward(x):
        """The differences to the next row and column, none at the ends."""
        down = jnp.concatenate([jnp.diff(x, axis=0), jnp.zeros((1, columns))], axis=0)
        return jnp.stack([down, jnp.concatenate([jnp.diff(x, axis=1), jnp.zeros((rows, 1))], axis=1)])

    def smooth(flow, dual):
        """A component of the flow and its dual after some projections."""
        current = flow
        for _ in range(inner):
            g = forward(current)
            norm = 1.0 + dt / tightness * jnp.sqrt(jnp.sum(g**2, axis=0))
            dual = (dual - dt * g) / norm
            d = -jnp.sum(dual, axis=0)
            d = d.at[1:].add(dual[0, :-1])
            current = flow + d.at[:, 1:].add(dual[1, :, :-1])
        return current, dual

    def one(first, second, flow):
        def rewarp(_, state):
            flow, dual = state
            warped = warp(second, flow)
            gradient = jnp.stack(jnp.gradient(warped))
            squared = jnp.sum(gradient**2, axis=0)
            squared = jnp.where(squared == 0.0, 1.0, squared)
            start = warped - first - jnp.sum(gradient * flow, axis=0)

            def iterate(_, state):
                flow, dual = state
                rho = start + jnp.sum(gradient * flow, axis=0)
                limit = attachment * tightness
                change = jnp.where(jnp.abs(rho) <= limit * squared, rho / squared, limit * jnp.sign(rho))
                return jax.vmap(smooth)(flow - change * gradient, dual)

            return lax.fori_loop(0, iterations, iterate, (flow, dual))

        flow, _ = lax.fori_loop(0, warps, rewarp, (flow, jnp.zeros((2, 2, rows, columns))))
        left = warp(second, flow) - first
        return flow, left, jnp.mean(jnp.abs(left)), jnp.sqrt(jnp.sum(flow**2, axis=0))

    images = normal(b, rows, columns, scale=0.2, offset=0.5)
    return Built(jax.vmap(one), (images, images, normal(b, 2, rows, columns, scale=0.5)))
