"""Inference, quantum chemistry, molecules, transport and an optimiser's step of the seventh set."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program, weight

GROUP = "seventh"


@program("sparse-variational-classes-elbo-grad", GROUP)
def _sparse_variational(size: Size) -> Built:
    """This gives the gradient of the evidence bound of a sparse variational Gaussian process of classes, as GPJax's users fit it.

    Each class has a latent function with a Matern kernel of its own scales and whitened inducing values; the expected likelihood
    of a minibatch, one class against the rest, is by quadrature of Gauss and Hermite.
    """
    b, inducing, inputs, classes, points, total = pick(
        size, (2000, 500, 8, 4, 20, 100_000), (1000, 250, 6, 3, 20, 20_000), (5, 4, 2, 2, 3, 40)
    )
    nodes, weights = np.polynomial.hermite.hermgauss(points)
    nodes, weights = np.float32(nodes * np.sqrt(2.0)), np.float32(weights / np.sqrt(np.pi))

    def matern(x, y, scales, amplitude):
        x, y = x / scales, y / scales
        squared = jnp.sum(x**2, axis=-1)[:, None] + jnp.sum(y**2, axis=-1)[None, :] - 2.0 * x @ y.T
        r = np.sqrt(5.0, dtype=np.float32) * jnp.sqrt(jnp.maximum(squared, 1e-10))
        return amplitude * (1.0 + r + r**2 / 3.0) * jnp.exp(-r)

    def latent(p, places, x):
        """The marginals of one class's function at x, and its divergence from the prior."""
        scales, amplitude = jax.nn.softplus(p["scales"]), jax.nn.softplus(p["amplitude"])
        kzz = matern(places, places, scales, amplitude) + 1e-3 * jnp.eye(inducing)
        cholesky = jnp.linalg.cholesky(kzz)
        a = jax.scipy.linalg.solve_triangular(cholesky, matern(places, x, scales, amplitude), lower=True)
        root = jnp.tril(p["root"], -1) + jnp.diag(jax.nn.softplus(jnp.diagonal(p["root"])) + 1e-4)
        mean = p["constant"] + a.T @ p["mean"]
        variance = amplitude - jnp.sum(a**2, axis=0) + jnp.sum((root.T @ a) ** 2, axis=0)
        log_det = 2.0 * jnp.sum(jnp.log(jnp.diagonal(root)))
        divergence = 0.5 * (jnp.sum(root**2) + jnp.sum(p["mean"] ** 2) - inducing - log_det)
        return mean, jnp.maximum(variance, 1e-6), divergence

    def negative(p, x, label):
        mean, variance, divergence = jax.vmap(latent, in_axes=(0, None, None))(p["latent"], p["places"], x)
        sign = 2.0 * jax.nn.one_hot(label, classes, axis=0) - 1.0
        values = mean[..., None] + jnp.sqrt(variance)[..., None] * nodes
        probability = 0.5 * (1.0 + jax.scipy.special.erf(sign[..., None] * values / np.sqrt(2.0, dtype=np.float32)))
        expected = jnp.sum(jnp.log(1e-3 + (1.0 - 2e-3) * probability) * weights, axis=-1)
        bound = total / b * jnp.sum(expected) - jnp.sum(divergence)
        chance = jax.scipy.stats.norm.cdf(mean / jnp.sqrt(1.0 + variance))
        accuracy = jnp.mean(jnp.argmax(chance, axis=0) == label)
        return -bound / total, (accuracy, divergence)

    functions = {
        "scales": normal(classes, inputs, scale=0.3, offset=1.5),
        "amplitude": normal(classes, scale=0.2, offset=0.5),
        "constant": normal(classes, scale=0.1),
        "mean": normal(classes, inducing, scale=0.5),
        "root": normal(classes, inducing, inducing, scale=0.02),
    }
    params = {"places": normal(inducing, inputs), "latent": functions}
    return Built(jax.value_and_grad(negative, has_aux=True), (params, normal(b, inputs), integers(b, below=classes)))


@program("ferminet-local-energies", GROUP)
def _ferminet(size: Size) -> Built:
    """This gives the local energies of a batch of walkers by FermiNet and their clipped mean, as variational Monte Carlo needs.

    Streams of electrons and of pairs of electrons exchange means; determinants of orbitals with exponential envelopes are added
    in the logarithm; the Laplacian is a loop over the directions of a linearised gradient, as in the authors' code.
    """
    walkers, up, down, atoms, n, m, determinants, layers = pick(
        size, (256, 4, 4, 2, 128, 16, 8, 3), (64, 3, 2, 2, 48, 8, 4, 2), (2, 1, 1, 1, 4, 2, 2, 1)
    )
    electrons = up + down
    places = np.array([[0.0, 0.0, -1.2], [0.0, 0.0, 1.2]], np.float32)[:atoms]
    charges = np.full(atoms, electrons / atoms, np.float32)

    def dense(p, x):
        return x @ p["w"] + p["b"]

    def distances(x):
        x = x.reshape(electrons, 3)
        to_atoms = x[:, None] - places[None]
        apart = x[:, None] - x[None]
        eye = jnp.eye(electrons)
        far = jnp.linalg.norm(apart + eye[..., None], axis=-1) * (1.0 - eye)
        return to_atoms, jnp.linalg.norm(to_atoms, axis=-1), apart, far

    def symmetric(one, two):
        means = [jnp.mean(g, axis=0, keepdims=True) for g in jnp.split(one, [up], axis=0)]
        means = [jnp.broadcast_to(g, one.shape) for g in means]
        pairs = [jnp.mean(g, axis=0) for g in jnp.split(two, [up], axis=0)]
        return jnp.concatenate([one, *means, *pairs], axis=-1)

    def residual(x, y):
        return (x + y) / np.sqrt(2.0) if x.shape == y.shape else y

    def log_psi(p, x):
        to_atoms, r_atoms, apart, far = distances(x)
        one = jnp.concatenate([to_atoms, r_atoms[..., None]], axis=-1).reshape(electrons, -1)
        two = jnp.concatenate([apart, far[..., None]], axis=-1)
        for i, layer in enumerate(p["layers"]):
            one = residual(one, jnp.tanh(dense(layer["one"], symmetric(one, two))))
            if i < layers - 1:
                two = residual(two, jnp.tanh(dense(layer["two"], two)))
        one = symmetric(one, two)
        signs, logs = jnp.ones(determinants), jnp.zeros(determinants)
        groups = zip(jnp.split(one, [up]), jnp.split(r_atoms, [up]), p["orbitals"], strict=True)
        for h, r, orbital in groups:
            envelope = jnp.sum(jnp.exp(-r[:, :, None] * jnp.abs(orbital["decay"])) * orbital["mix"], axis=1)
            phi = (dense(orbital, h) * envelope).reshape(h.shape[0], determinants, h.shape[0])
            sign, log = jnp.linalg.slogdet(jnp.swapaxes(phi, 0, 1))
            signs, logs = signs * sign, logs + log
        top = lax.stop_gradient(jnp.max(logs))
        return jnp.log(jnp.abs(jnp.sum(signs * jnp.exp(logs - top)))) + top

    def kinetic(p, x):
        slope, along = jax.linearize(lambda y: jax.grad(log_psi, argnums=1)(p, y), x)
        eye = jnp.eye(3 * electrons)
        laplacian = lax.fori_loop(0, 3 * electrons, lambda i, value: value + along(eye[i])[i], 0.0)
        return -0.5 * (laplacian + jnp.sum(slope**2))

    def potential(x):
        _, r_atoms, _, far = distances(x)
        repelled = jnp.sum(jnp.triu(1.0 / jnp.where(far > 0.0, far, jnp.inf), k=1))
        nuclei = sum(
            float(charges[i] * charges[j] / np.linalg.norm(places[i] - places[j]))
            for i, j in itertools.combinations(range(atoms), 2)
        )
        return repelled - jnp.sum(charges / r_atoms) + nuclei

    def energies(p, x):
        local = jax.vmap(lambda y: kinetic(p, y) + potential(y))(x)
        centre = jnp.median(local)
        width = 5.0 * jnp.mean(jnp.abs(local - centre))
        clipped = jnp.clip(local, centre - width, centre + width)
        mean = jnp.mean(clipped)
        return mean, jnp.mean((local - mean) ** 2), clipped - mean, local

    def pair(i, o):
        return {"w": weight(i, o), "b": normal(o, scale=0.1)}

    widths_one, widths_two = [4 * atoms] + [n] * layers, [4] + [m] * layers
    every = [
        {"one": pair(3 * widths_one[i] + 2 * widths_two[i], n), "two": pair(widths_two[i], m)} for i in range(layers)
    ]
    final = 3 * n + 2 * widths_two[layers - 1]
    orbitals = [
        {**pair(final, s * determinants), "decay": normal(atoms, s * determinants, scale=0.1, offset=1.0)}
        | {"mix": normal(atoms, s * determinants, scale=0.1, offset=1.0)}
        for s in (up, down)
    ]
    return Built(energies, ({"layers": every, "orbitals": orbitals}, normal(walkers, 3 * electrons)))


@program("stillinger-weber-langevin-stress", GROUP)
def _stillinger_weber(size: Size) -> Built:
    """This gives steps of Langevin dynamics of silicon by Stillinger and Weber's potential, then the stress, as JAX MD runs it.

    A list of neighbours is found among all pairs in the periodic box; energies of pairs and of triples at each atom are smooth at
    the cutoff; forces are the gradient, noise is drawn at each step, and the stress is the gradient of a strain.
    """
    cells, slots, steps = pick(size, (6, 20, 10), (3, 20, 10), (2, 18, 2))
    corners = np.array([[0, 0, 0], [0, 2, 2], [2, 0, 2], [2, 2, 0], [1, 1, 1], [1, 3, 3], [3, 1, 3], [3, 3, 1]]) / 4.0
    lattice = np.array([corner + cell for cell in itertools.product(range(cells), repeat=3) for corner in corners])
    constant, cutoff, skin, dt, friction = 2.592, 1.8, 0.25, 0.005, 0.5
    lattice, box, atoms = np.float32(lattice * constant), constant * cells, len(lattice)

    def wrapped(apart):
        return apart - box * jnp.round(apart / box)

    def neighbours(place):
        apart = wrapped(place[:, None] - place[None])
        squared = jnp.sum(apart**2, axis=-1) + jnp.where(jnp.eye(atoms, dtype=bool), jnp.inf, 0.0)
        near, index = lax.top_k(-squared, slots)
        found = -near < (cutoff + skin) ** 2
        return jnp.where(found, index, atoms), jnp.max(jnp.sum(squared < (cutoff + skin) ** 2, axis=1)) > slots

    def energy(place, strain, index):
        valid = index < atoms
        apart = wrapped(place[:, None] - place[jnp.minimum(index, atoms - 1)])
        apart = apart + apart @ strain
        squared = jnp.sum(apart**2, axis=-1)
        r = jnp.sqrt(jnp.where(valid, squared, 4.0 * cutoff**2))
        inside = valid & (r < cutoff - 1e-3)
        gap = jnp.where(inside, r - cutoff, -1.0)
        two = 7.049556277 * (0.6022245584 * r**-4.0 - 1.0) * jnp.exp(1.0 / gap)
        pairs = 0.5 * jnp.sum(jnp.where(inside, two, 0.0))
        fade = jnp.where(inside, jnp.exp(1.2 / gap), 0.0)
        direction = apart / r[..., None]
        cosine = jnp.einsum("ijx,ikx->ijk", direction, direction)
        three = 21.0 * fade[:, :, None] * fade[:, None, :] * (cosine + 1.0 / 3.0) ** 2
        triples = 0.5 * jnp.sum(jnp.where(jnp.eye(slots, dtype=bool), 0.0, three))
        return pairs + triples

    def run(moved, velocity, temperature, seed):
        still = jnp.zeros((3, 3))
        place = (lattice + moved) % box
        index, overflow = neighbours(place)
        temperature = 0.06 + 0.01 * jnp.abs(temperature)
        keep = np.exp(-friction * dt)

        def step(carry, key):
            place, velocity, force = carry
            velocity = velocity + 0.5 * dt * force
            place = place + 0.5 * dt * velocity
            noise = jax.random.normal(key, velocity.shape)
            velocity = keep * velocity + jnp.sqrt((1.0 - keep**2) * temperature) * noise
            place = (place + 0.5 * dt * velocity) % box
            value, slope = jax.value_and_grad(energy)(place, still, index)
            velocity = velocity - 0.5 * dt * slope
            moving = 0.5 * jnp.sum(velocity**2)
            return (place, velocity, -slope), (value, moving, 2.0 * moving / (3.0 * atoms))

        velocity = 0.25 * (velocity - jnp.mean(velocity, axis=0))
        start = (place, velocity, -jax.grad(energy)(place, still, index))
        (place, velocity, _), history = lax.scan(step, start, jax.random.split(jax.random.key(seed), steps))
        stress = (jax.grad(energy, argnums=1)(place, still, index) - velocity.T @ velocity) / box**3
        return place, velocity, history, stress, overflow

    arguments = (normal(atoms, 3, scale=0.04), normal(atoms, 3), normal(), integers(below=1000))
    return Built(run, arguments)


@program("gromov-wasserstein-fused-coupling", GROUP)
def _gromov(size: Size) -> Built:
    """This gives the fused Gromov-Wasserstein coupling of two clouds of points, as OTT users align cells of two measurements.

    The quadratic cost is linearised at the last coupling, each problem is solved by Sinkhorn's updates in the logarithm until the
    marginals are near, and the coupling carries labels and places over.
    """
    m, k, first, second, shared, classes, outer, inner = pick(
        size, (1000, 900, 30, 20, 10, 12, 5, 5), (200, 170, 20, 10, 5, 8, 5, 4), (6, 5, 3, 2, 2, 2, 2, 2)
    )
    epsilon, fused, chunk = 0.02, 0.3, 10

    def squared(x, y):
        cross = x @ y.T
        return jnp.maximum(jnp.sum(x**2, -1)[:, None] + jnp.sum(y**2, -1)[None, :] - 2.0 * cross, 0.0)

    def sinkhorn(cost, f, g, log_a, log_b):
        def update(_, state):
            f, g = state
            g = epsilon * (log_b - jax.nn.logsumexp((f[:, None] - cost) / epsilon, axis=0))
            f = epsilon * (log_a - jax.nn.logsumexp((g[None, :] - cost) / epsilon, axis=1))
            return f, g

        def body(state):
            f, g, _, count = state
            f, g = lax.fori_loop(0, chunk, update, (f, g))
            column = jax.nn.logsumexp((f[:, None] + g[None, :] - cost) / epsilon, axis=0)
            return f, g, jnp.sum(jnp.abs(jnp.exp(column) - jnp.exp(log_b))), count + 1

        def unfinished(state):
            return (state[2] > 1e-4) & (state[3] < inner)

        f, g, error, count = lax.while_loop(unfinished, body, (f, g, jnp.float32(jnp.inf), 0))
        return f, g, error, count

    def align(x, y, x_shared, y_shared, a, b, label):
        log_a, log_b = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
        a, b = jnp.exp(log_a), jnp.exp(log_b)
        cx, cy, linear = squared(x, x), squared(y, y), squared(x_shared, y_shared)
        cx, cy, linear = cx / jnp.mean(cx), cy / jnp.mean(cy), linear / jnp.mean(linear)
        constant = ((cx**2) @ a)[:, None] + ((cy**2) @ b)[None, :]

        def cost_of(coupling):
            return constant - 2.0 * cx @ coupling @ cy

        def linearise(carry, _):
            coupling, f, g = carry
            cost = (1.0 - fused) * cost_of(coupling) + fused * linear
            f, g, error, count = sinkhorn(cost, f, g, log_a, log_b)
            coupling = jnp.exp((f[:, None] + g[None, :] - cost) / epsilon)
            value = jnp.sum(coupling * ((1.0 - fused) * cost_of(coupling) + fused * linear))
            entropy = -jnp.sum(coupling * (jnp.log(coupling + 1e-20) - 1.0))
            return (coupling, f, g), (value - epsilon * entropy, error, count)

        start = (a[:, None] * b[None, :], jnp.zeros(m), jnp.zeros(k))
        (coupling, _, _), history = lax.scan(linearise, start, None, length=outer)
        share = coupling / jnp.maximum(jnp.sum(coupling, axis=1, keepdims=True), 1e-12)
        carried = share @ jax.nn.one_hot(label, classes)
        return coupling, share @ y, jnp.argmax(carried, axis=1), history

    clouds = (normal(m, first), normal(k, second), normal(m, shared), normal(k, shared))
    return Built(align, (*clouds, normal(m, scale=0.2), normal(k, scale=0.2), integers(k, below=classes)))


@program("shampoo-blocks-newton-roots-update", GROUP)
def _shampoo(size: Size) -> Built:
    """This gives a step of Shampoo with blocks, grafting and Nesterov's momentum, as its distributed implementation does.

    Statistics of rows and columns of each block are averaged, their inverse fourth roots come from a coupled Newton iteration
    that starts from the greatest eigenvalue by power iteration, and the step takes its length from RMSProp.
    """
    shapes, block = pick(
        size,
        ({"in": (768, 1024), "out": (1024, 512), "bias": (1024,)}, 128),
        ({"in": (256, 192), "out": (192, 128), "bias": (192,)}, 64),
        ({"in": (8, 4), "out": (4, 12), "bias": (4,)}, 4),
    )
    rate, beta1, beta2, decay, ridge = 0.1, 0.9, 0.999, 1e-4, 1e-6
    highest = lax.Precision.HIGHEST

    def greatest(matrix):
        def body(_, v):
            v = jnp.matmul(matrix, v, precision=highest)
            return v / jnp.maximum(jnp.linalg.norm(v), 1e-16)

        start = np.random.default_rng(2).uniform(-1.0, 1.0, block).astype(np.float32)
        v = lax.fori_loop(0, 20, body, start / np.linalg.norm(start))
        return v @ jnp.matmul(matrix, v, precision=highest)

    def inverse_root(matrix, p=4):
        """The matrix to the power of minus one p-th, and how far the iteration is from its end."""
        eye = jnp.eye(block)
        damped = matrix + ridge * jnp.maximum(greatest(matrix), 1e-6) * eye
        z = (1.0 + p) / (2.0 * jnp.linalg.norm(damped))

        def unfinished(state):
            _, _, _, error, count, better = state
            return (count < 100) & (error > 1e-5) & better

        def body(state):
            m, h, _, error, count, _ = state
            step = (1.0 + 1.0 / p) * eye - m / p
            squared = jnp.matmul(step, step, precision=highest)
            m_next = jnp.matmul(jnp.matmul(squared, squared, precision=highest), m, precision=highest)
            h_next = jnp.matmul(h, step, precision=highest)
            error_next = jnp.max(jnp.abs(m_next - eye))
            return m_next, h_next, h, error_next, count + 1, error_next < 1.2 * error

        m, h = damped * z, eye * z ** (1.0 / p)
        state = (m, h, h, jnp.max(jnp.abs(m - eye)), 0, jnp.bool_(True))
        _, h, before, error, _, better = lax.while_loop(unfinished, body, state)
        return jnp.where(better, h, before), error

    def blocks(x):
        rows, columns = x.shape[0] // block, x.shape[1] // block
        return x.reshape(rows, block, columns, block).swapaxes(1, 2).reshape(-1, block, block)

    def joined(x, shape):
        rows, columns = shape[0] // block, shape[1] // block
        return x.reshape(rows, columns, block, block).swapaxes(1, 2).reshape(shape)

    def one(w, g, state):
        second = beta2 * state["second"] + (1.0 - beta2) * g * g
        grafted = g / (jnp.sqrt(second) + 1e-8)
        new = {"second": second}
        direction, error = grafted, jnp.float32(0.0)
        if w.ndim == 2:
            gb = blocks(g)
            left = beta2 * state["left"] + (1.0 - beta2) * jnp.einsum("bij,bkj->bik", gb, gb, precision=highest)
            right = beta2 * state["right"] + (1.0 - beta2) * jnp.einsum("bji,bjk->bik", gb, gb, precision=highest)
            roots, errors = jax.vmap(inverse_root)(jnp.concatenate([left, right]))
            left_root, right_root = jnp.split(roots, 2)
            direction = joined(left_root @ gb @ right_root, w.shape)
            direction = direction * jnp.linalg.norm(grafted) / (jnp.linalg.norm(direction) + 1e-16)
            new |= {"left": left, "right": right}
            error = jnp.max(errors)
        direction = direction + decay * w
        momentum = beta1 * state["momentum"] + direction
        update = beta1 * momentum + direction
        return w - rate * update, new | {"momentum": momentum}, error

    def step(params, grads, states):
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 10.0 / norm), grads)

        def factor(name, state):
            """The statistics so far, which are positive definite: products of the drawn factors."""
            if len(shapes[name]) < 2:
                return state | {"second": state["second"] ** 2}
            both = {side: jnp.einsum("bij,bkj->bik", state[side], state[side]) for side in ("left", "right")}
            return state | both | {"second": state["second"] ** 2}

        done = {name: one(w, grads[name], factor(name, states[name])) for name, w in params.items()}
        return tuple({name: value[i] for name, value in done.items()} for i in range(3))

    def state(shape):
        own = {"second": normal(*shape, scale=0.01), "momentum": normal(*shape, scale=0.1)}
        if len(shape) < 2:
            return own
        count = shape[0] * shape[1] // block**2
        return own | {side: normal(count, block, block, scale=0.01) for side in ("left", "right")}

    params, grads = ({n: normal(*s, scale=scale) for n, s in shapes.items()} for scale in (0.05, 0.01))
    return Built(step, (params, grads, {n: state(s) for n, s in shapes.items()}))
