"""Molecules, evolution, weather and radio of the sixth set."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, gain, integers, normal, pick, program, weight

GROUP = "sixth"


@program("painn-energies-and-forces", GROUP)
def _painn(size: Size) -> Built:
    """This gives the energies of molecules and the forces on their atoms by PaiNN, as SchNetPack and its ports do.

    Atoms carry scalars and vectors; messages along a list of neighbours are filtered by radial functions within a cutoff, and
    updates mix norms and products of the vectors; the forces are the gradient with respect to the places.
    """
    atoms, edges, molecules, n, radial, layers, kinds = pick(
        size, (2000, 30_000, 90, 128, 20, 3, 100), (300, 3000, 14, 48, 20, 2, 100), (7, 20, 2, 8, 5, 2, 4)
    )
    cutoff = 5.0

    def dense(p, x):
        return x @ p["kernel"] + p["bias"]

    def filters(p, distance):
        steps = jnp.arange(1, radial + 1) * jnp.pi / cutoff
        basis = jnp.sin(distance[:, None] * steps) / distance[:, None]
        fade = 0.5 * (jnp.cos(jnp.pi * distance / cutoff) + 1.0) * (distance < cutoff)
        return dense(p, basis) * fade[:, None]

    def message(p, q, mu, w, direction, sender, receiver):
        x = dense(p["message2"], jax.nn.silu(dense(p["message1"], q)))[sender] * w
        dq, along, across = jnp.split(x, 3, axis=-1)
        dmu = along[:, None, :] * direction[:, :, None] + across[:, None, :] * mu[sender]
        q = q + jax.ops.segment_sum(dq, receiver, atoms, indices_are_sorted=True)
        return q, mu + jax.ops.segment_sum(dmu, receiver, atoms, indices_are_sorted=True)

    def update(p, q, mu):
        v, w = jnp.split(mu @ p["mix"], 2, axis=-1)
        length = jnp.sqrt(jnp.sum(v**2, axis=-2) + 1e-8)
        x = dense(p["update2"], jax.nn.silu(dense(p["update1"], jnp.concatenate([q, length], axis=-1))))
        dq, dmu, both = jnp.split(x, 3, axis=-1)
        q = q + dq + both * jnp.sum(v * w, axis=1)
        return q, mu + dmu[:, None, :] * w

    def energy(place, params, kind, sender, receiver, shift, molecule):
        apart = place[sender] - place[receiver] + shift
        distance = jnp.sqrt(jnp.sum(apart**2, axis=-1) + 1e-6)
        direction = apart / distance[:, None]
        q, mu = params["kinds"][kind], jnp.zeros((atoms, 3, n))
        w = jnp.split(filters(params["filters"], distance), layers, axis=-1)
        for p, filtered in zip(params["layers"], w, strict=True):
            q, mu = message(p, q, mu, filtered, direction, sender, receiver)
            q, mu = update(p, q, mu)
        each = dense(params["out2"], jax.nn.silu(dense(params["out1"], q)))[:, 0]
        total = jax.ops.segment_sum(each, molecule, molecules, indices_are_sorted=True)
        return jnp.sum(total), total

    def predict(params, place, kind, sender, receiver, shift, molecule):
        slope, total = jax.grad(energy, has_aux=True)(place, params, kind, sender, receiver, shift, molecule)
        return total, -slope

    def pair(i, o):
        return {"kernel": weight(i, o), "bias": normal(o, scale=0.05)}

    layer = {"message1": pair(n, n), "message2": pair(n, 3 * n), "mix": weight(n, 2 * n)}
    layer |= {"update1": pair(2 * n, n), "update2": pair(n, 3 * n)}
    params = {
        "kinds": normal(kinds, n, scale=0.5),
        "filters": {"kernel": normal(radial, 3 * n * layers, scale=0.05), "bias": normal(3 * n * layers, scale=0.02)},
        "layers": [layer] * layers,
        "out1": pair(n, n // 2),
        "out2": pair(n // 2, 1),
    }
    pairs = (integers(edges, below=atoms), integers(edges, below=atoms, ramp=True), normal(edges, 3, scale=0.1))
    where = (normal(atoms, 3, scale=1.7), integers(atoms, below=kinds))
    return Built(predict, (params, *where, *pairs, integers(atoms, below=molecules, ramp=True)))


@program("felsenstein-pruning-rates-grad", GROUP)
def _felsenstein(size: Size) -> Built:
    """This is the gradient of a phylogeny's log posterior by Felsenstein's pruning, as Bayesian packages of evolution run it.

    A general reversible model of nucleotides with four classes of rates and invariant sites; partial likelihoods go up a fixed
    tree in one scan, rescaled at each node; patterns of sites carry their counts.
    """
    taxa, sites, classes = pick(size, (40, 1500, 4), (20, 500, 4), (4, 6, 2))
    nodes = 2 * taxa - 1
    rng = np.random.default_rng(5)
    alive, children = list(range(taxa)), []
    for node in range(taxa, nodes):
        first, second = (alive.pop(rng.integers(len(alive))) for _ in range(2))
        children.append((first, second))
        alive.append(node)
    children = np.array(children)

    def rates(shape):
        middle = (2.0 * jnp.arange(classes) + 1.0) / (2.0 * classes)
        r = (-jnp.log1p(-middle)) ** (1.0 / shape)
        return r / jnp.mean(r)

    def transitions(exchange, frequency, lengths):
        """The matrices of all branches and classes, by the eigenvectors of the symmetrised rates: [nodes - 1, classes, 4, 4]."""
        upper = jnp.zeros((4, 4)).at[np.triu_indices(4, 1)].set(exchange)
        q = (upper + upper.T) * frequency[None, :]
        q = q - jnp.diag(jnp.sum(q, axis=1))
        q = q / -jnp.sum(frequency * jnp.diag(q))
        root = jnp.sqrt(frequency)
        values, vectors = jnp.linalg.eigh(root[:, None] * q / root[None, :])
        left, right = vectors / root[:, None], vectors.T * root[None, :]
        growth = jnp.exp(values * lengths[..., None])
        return jnp.einsum("ij,ncj,jk->ncik", left, growth, right)

    def log_likelihood(p, tips, counts):
        frequency = jax.nn.softmax(p["frequency"])
        shape, invariant = jnp.exp(p["log_shape"]), jax.nn.sigmoid(p["invariant"])
        scaled = jnp.exp(p["log_length"])[:, None] * rates(shape)[None, :] / (1.0 - invariant)
        matrices = transitions(jnp.exp(p["exchange"]), frequency, scaled)
        known = jnp.where((tips == 4)[..., None], 1.0, jax.nn.one_hot(tips, 4))
        partials = jnp.zeros((nodes, sites, classes, 4)).at[:taxa].set(known[:, :, None, :])

        def node(carry, xs):
            partials, scale = carry
            parent, (first, second) = xs
            a = jnp.einsum("cij,scj->sci", matrices[first], partials[first])
            b = jnp.einsum("cij,scj->sci", matrices[second], partials[second])
            here = a * b
            top = jnp.max(here, axis=(1, 2))
            partials = partials.at[parent].set(here / top[:, None, None])
            return (partials, scale + jnp.log(top)), None

        xs = (jnp.arange(taxa, nodes), (jnp.asarray(children[:, 0]), jnp.asarray(children[:, 1])))
        (partials, scale), _ = lax.scan(node, (partials, jnp.zeros(sites)), xs)
        varying = jnp.log(jnp.mean(partials[-1] @ frequency, axis=-1)) + scale + jnp.log1p(-invariant)
        constant = jnp.all((tips == tips[:1]) | (tips == 4), axis=0)
        still = jnp.where(constant, jnp.log(invariant) + jnp.log(frequency[jnp.minimum(tips[0], 3)]), -jnp.inf)
        each = jnp.logaddexp(varying, still)
        return jnp.sum(counts * each), each

    def negative(p, tips, counts):
        likelihood, each = log_likelihood(p, tips, counts.astype(jnp.float32) + 1.0)
        length = jnp.exp(p["log_length"])
        prior = jnp.sum(-10.0 * length + p["log_length"]) - jnp.exp(p["log_shape"]) + p["log_shape"]
        prior += jnp.sum(-jnp.exp(p["exchange"]) + p["exchange"]) - 0.5 * jnp.sum(p["frequency"] ** 2)
        return -(likelihood + prior + jax.nn.log_sigmoid(p["invariant"])), each

    params = {
        "log_length": normal(nodes - 1, scale=0.5, offset=-2.3),
        "exchange": normal(6, scale=0.5),
        "frequency": normal(4, scale=0.3),
        "log_shape": normal(scale=0.3),
        "invariant": normal(offset=-2.0, scale=0.3),
    }
    data = (integers(taxa, sites, below=5), integers(sites, below=20))
    return Built(jax.value_and_grad(negative, has_aux=True), (params, *data))


@program("lorenz96-localised-ensemble-cycle", GROUP)
def _ensemble_filter(size: Size) -> Built:
    """This is a cycle of a localised ensemble square-root filter on Lorenz's model of 1996, as data assimilation is studied.

    Members go forward by Runge and Kutta's fourth order; observations are taken in one after another, with Gaspari and Cohn's
    taper of distances; the spread is relaxed to that before; the results are skill, spread and ranks.
    """
    n, members, observed, steps = pick(size, (960, 50, 96, 10), (480, 50, 96, 10), (8, 4, 3, 2))
    dt, force, noise, radius = 0.01, 8.0, 1.0, max(2.0, n / 40)

    def rate(x):
        ahead, back, far = jnp.roll(x, -1, axis=-1), jnp.roll(x, 1, axis=-1), jnp.roll(x, 2, axis=-1)
        return (ahead - far) * back - x + force

    def runge_kutta(x, _):
        k1 = rate(x)
        k2 = rate(x + 0.5 * dt * k1)
        k3 = rate(x + 0.5 * dt * k2)
        k4 = rate(x + dt * k3)
        return x + dt / 6.0 * (k1 + 2.0 * k2 + 2.0 * k3 + k4), None

    def taper(distance):
        r = distance / radius
        near = -0.25 * r**5 + 0.5 * r**4 + 0.625 * r**3 - 5.0 / 3.0 * r**2 + 1.0
        safe = jnp.maximum(r, 1e-3)
        far = r**5 / 12 - 0.5 * r**4 + 0.625 * r**3 + 5.0 / 3.0 * r**2 - 5.0 * r + 4.0 - 2.0 / (3.0 * safe)
        return jnp.where(r < 1.0, near, jnp.where(r < 2.0, far, 0.0))

    def assimilate(carry, xs):
        mean, perturbation = carry
        value, at = xs
        ring = jnp.abs(jnp.arange(n) - at)
        local = taper(jnp.minimum(ring, n - ring).astype(jnp.float32))
        here = perturbation[:, at]
        variance = jnp.sum(here**2) / (members - 1)
        gain = local * (here @ perturbation) / (members - 1) / (variance + noise)
        reduced = 1.0 / (1.0 + jnp.sqrt(noise / (variance + noise)))
        innovation = value - mean[at]
        mean = mean + gain * innovation
        perturbation = perturbation - reduced * here[:, None] * gain[None, :]
        return (mean, perturbation), innovation / jnp.sqrt(variance + noise)

    def cycle(ensemble, truth, errors, at, seed):
        start = force + jnp.concatenate([truth[None], ensemble], axis=0)
        forward, _ = lax.scan(runge_kutta, start, None, length=steps)
        truth, forecast = forward[0], forward[1:]
        values = truth[at] + np.sqrt(noise) * errors
        mean = jnp.mean(forecast, axis=0)
        perturbation = 1.02 * (forecast - mean)
        before = jnp.std(perturbation, axis=0, ddof=1)
        (mean, perturbation), normalised = lax.scan(assimilate, (mean, perturbation), (values, at))
        after = jnp.std(perturbation, axis=0, ddof=1)
        perturbation = perturbation * (1.0 + 0.7 * (before - after) / jnp.maximum(after, 1e-6))
        analysis = mean + perturbation
        drawn = forecast[:, at] + jax.random.normal(jax.random.key(seed), (members, observed))
        rank = jnp.sum(drawn < values, axis=0)
        ordered = jnp.sort(analysis, axis=0)
        weights = (2.0 * jnp.arange(1, members + 1) - members - 1.0) / members**2
        score = jnp.mean(jnp.abs(analysis - truth), axis=0) - jnp.sum(weights[:, None] * ordered, axis=0)
        skill = jnp.sqrt(jnp.mean((mean - truth) ** 2))
        histogram = jnp.bincount(rank, length=members + 1)
        return analysis - force, truth - force, skill, jnp.mean(after), jnp.mean(score), normalised, histogram

    arguments = (normal(members, n, scale=2.0), normal(n, scale=2.0), normal(observed))
    return Built(cycle, (*arguments, integers(observed, below=n, distinct=True), integers(below=1000)))


@program("ofdm-antennas-to-checked-bits", GROUP)
def _receiver(size: Size) -> Built:
    """This is the receiver of a radio uplink with several antennas, from pilots to decoded bits, as Sionna simulates it.

    The channel is estimated at two pilot symbols and interpolated in time, streams are separated by linear least mean squares,
    16 QAM symbols become log ratios of bits, and a parity code is decoded by normalised min-sum messages.
    """
    slots, antennas, streams, carriers, length, rounds = pick(
        size, (4, 8, 4, 612, 1224, 8), (1, 6, 2, 204, 408, 6), (1, 2, 1, 6, 12, 2)
    )
    symbols, first, second, pilots = 14, 2, 11, (2, 11)
    data = [s for s in range(symbols) if s not in pilots]
    checks, degree = length // 2, 6
    rng = np.random.default_rng(7)
    of_edge = rng.permutation(np.repeat(np.arange(length), 3))
    edges_of_bit = np.argsort(of_edge, kind="stable").reshape(length, 3)
    levels = np.array([1.0, 3.0, -1.0, -3.0], np.float32) / np.sqrt(10.0, dtype=np.float32)
    labels = np.array([[i >> 1 & 1, i & 1] for i in range(4)], bool)

    def estimate(received, signs):
        """Least squares at the pilots, smoothed over carriers of the same stream: [slots, streams, antennas, symbols, carriers]."""
        block = carriers // streams
        at = received[:, :, (first, second)].reshape(slots, antennas, 2, block, streams)
        raw = jnp.moveaxis(at * signs.reshape(2, block, streams), -1, 1)
        raw = (jnp.roll(raw, 1, axis=-1) + 2.0 * raw + jnp.roll(raw, -1, axis=-1)) / 4.0
        wide = jnp.repeat(raw, streams, axis=-1)
        share = (jnp.arange(symbols) - first) / (second - first)
        return wide[:, :, :, :1] * (1.0 - share)[:, None] + wide[:, :, :, 1:] * share[:, None]

    def separate(h, y, variance):
        """Linear least mean squares without bias: h [..., antennas, streams], y [..., antennas]."""
        gram = jnp.einsum("...as,...at->...st", h.conj(), h)
        matched = jnp.einsum("...as,...a->...s", h.conj(), y)
        inverse = jnp.linalg.inv(gram + variance * jnp.eye(streams))
        x = jnp.einsum("...st,...t->...s", inverse, matched)
        scale = jnp.maximum(1.0 - variance * jnp.real(jnp.diagonal(inverse, axis1=-2, axis2=-1)), 1e-3)
        return x / scale, (1.0 - scale) / scale + 1e-3

    def ratios(x, variance):
        """The log ratios of the four bits of a symbol, two for each of its parts."""
        parts = jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)
        exponent = -((parts[..., None] - levels) ** 2) / variance[..., None, None]

        def of(bit):
            one = jax.nn.logsumexp(jnp.where(labels[:, bit], exponent, -jnp.inf), axis=-1)
            return one - jax.nn.logsumexp(jnp.where(labels[:, bit], -jnp.inf, exponent), axis=-1)

        return jnp.stack([of(0), of(1)], axis=-1)

    def decode(channel):
        def body(_, messages):
            total = channel + jnp.sum(messages[:, edges_of_bit], axis=-1)
            to_check = (total[:, of_edge] - messages).reshape(-1, checks, degree)
            sign = jnp.where(to_check < 0, -1.0, 1.0)
            size = jnp.abs(to_check)
            least = jnp.min(size, axis=-1, keepdims=True)
            at = jnp.arange(degree) == jnp.argmin(size, axis=-1)[..., None]
            next_least = jnp.min(jnp.where(at, jnp.inf, size), axis=-1, keepdims=True)
            back = jnp.prod(sign, axis=-1, keepdims=True) * sign * jnp.where(at, next_least, least)
            return 0.75 * back.reshape(-1, checks * degree)

        messages = lax.fori_loop(0, rounds, body, jnp.zeros((channel.shape[0], 3 * length)))
        total = channel + jnp.sum(messages[:, edges_of_bit], axis=-1)
        bits = total > 0
        parity = jnp.sum(bits[:, of_edge].reshape(-1, checks, degree), axis=-1) % 2
        return bits, jnp.sum(parity, axis=-1), total

    def receive(real, imaginary, gains, pilot_phase, noise):
        received = lax.complex(real, imaginary) * gains[None, :, None, None]
        variance = jax.nn.softplus(noise)
        h = estimate(received, jnp.exp(-1j * jnp.pi / 4 * (2 * pilot_phase + 1)))
        h = jnp.moveaxis(h, (1, 2), (-1, -2))[:, np.array(data)]
        y = jnp.moveaxis(received, 1, -1)[:, np.array(data)]
        x, effective = separate(h, y, variance)
        llr = jnp.clip(ratios(jnp.moveaxis(x, -1, 1), jnp.moveaxis(effective, -1, 1)), -20.0, 20.0)
        bits, failed, total = decode(llr.reshape(-1, length))
        quality = 10.0 * jnp.log10(jnp.mean(1.0 / effective, axis=(1, 2)))
        return bits, failed, jnp.mean(jnp.abs(total), axis=-1), quality

    grid = normal(slots, antennas, symbols, carriers)
    phases = integers(2, carriers, below=4)
    return Built(receive, (grid, grid, gain(antennas), phases, normal(offset=-1.0)))
