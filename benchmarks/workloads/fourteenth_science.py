"""Programs of chemistry, physics, nerves, weather and stars in plain JAX, the fourteenth set: its author had seen no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, integers, normal, pick, program

GROUP = "fourteenth"


@program("self-consistent-field-purified-densities", GROUP)
def _field(size: Size) -> Built:
    """This gives energies and densities of closed-shell molecules by fixed rounds of the self-consistent field.

    The repulsion of electrons is fitted by auxiliary functions. Each density comes from its Fock matrix by trace-correcting
    purification, which squares a matrix whose eigenvalues lie between zero and one, and is mixed with the last.
    """
    molecules, n, fitted, pairs, rounds, purified = pick(
        size, (6, 115, 330, 37, 6, 22), (2, 61, 150, 19, 5, 18), (2, 7, 11, 2, 2, 6)
    )

    def purify(fock):
        around = jnp.sum(jnp.abs(fock), axis=-1) - jnp.abs(jnp.diag(fock))
        low, high = jnp.min(jnp.diag(fock) - around), jnp.max(jnp.diag(fock) + around)
        x = (high * jnp.eye(n) - fock) / (high - low)

        def body(x, _):
            squared = x @ x
            trace, trace2 = jnp.trace(x), jnp.trace(squared)
            fewer = jnp.abs(trace2 - pairs) < jnp.abs(2 * trace - trace2 - pairs)
            return jnp.where(fewer, squared, 2 * x - squared), trace - trace2

        return lax.scan(body, x, None, length=purified)

    def solve(core, factors):
        core = (core + core.T) / 2 - jnp.diag(jnp.linspace(6.0, 0.0, n))
        factors = (factors + factors.transpose(1, 0, 2)) / 2

        def repel(density):
            coulomb = jnp.einsum("pqx,rsx,rs->pq", factors, factors, density, optimize="optimal")
            exchange = jnp.einsum("prx,qsx,rs->pq", factors, factors, density, optimize="optimal")
            return 2 * coulomb - exchange

        density, _ = purify(core)
        energies = []
        for i in range(rounds):
            both = core + repel(density)
            energies.append(jnp.sum(density * (core + both)))
            new, idle = purify(both)
            density = new if i == 0 else 0.7 * new + 0.3 * density
        commutator = both @ density - density @ both
        return jnp.stack(energies), density, jnp.sqrt(jnp.mean(commutator**2)), idle[-1]

    inputs = (normal(molecules, n, n, scale=0.3 * n**-0.5), normal(molecules, n, n, fitted, scale=0.3 / n))
    return Built(jax.vmap(solve), inputs)


@program("hodgkin-huxley-cables-implicit-steps", GROUP)
def _cables(size: Size) -> Built:
    """This gives voltages and spike counts of many branches of nerve cells that are split into compartments.

    Gates follow exponential Euler steps; the voltages of a branch follow an implicit step, whose tridiagonal system is solved by
    elimination from one end to the other and back, as Jaxley does.
    """
    cells, parts, steps = pick(size, (3000, 13, 120), (900, 13, 100), (3, 4, 60))
    dt, couple = 0.025, 2.3

    def ratio(x):
        near = jnp.abs(x) < 1e-4
        return jnp.where(near, 1.0 - x / 2, x / jnp.expm1(jnp.where(near, 1.0, x)))

    def gate(x, alpha, beta):
        settled = alpha / (alpha + beta)
        return settled + (x - settled) * jnp.exp(-dt * (alpha + beta))

    def solve(diagonal, right):
        slopes, sides = [diagonal[0]], [right[0]]
        off = -dt * couple
        for i in range(1, parts):
            factor = off / slopes[-1]
            slopes.append(diagonal[i] - factor * off)
            sides.append(right[i] - factor * sides[-1])
        answers = [sides[-1] / slopes[-1]]
        for i in range(parts - 2, -1, -1):
            answers.append((sides[i] - off * answers[-1]) / slopes[i])
        return jnp.stack(answers[::-1])

    def run(start, sodium, potassium, leak, pulses):
        ends = jnp.where((jnp.arange(parts) == 0) | (jnp.arange(parts) == parts - 1), 1.0, 2.0)[:, None]
        g_na = 120.0 * jax.nn.softplus(1.0 + sodium)
        g_k = 36.0 * jax.nn.softplus(1.0 + potassium)
        g_l = 0.3 * jax.nn.softplus(leak)
        v = -65.0 + start
        gates = (jnp.full_like(v, 0.053), jnp.full_like(v, 0.596), jnp.full_like(v, 0.318))

        def step(state, pulse):
            v, (m, h, n), spikes = state
            m = gate(m, ratio(-(v + 40.0) / 10.0), 4.0 * jnp.exp(-(v + 65.0) / 18.0))
            h = gate(h, 0.07 * jnp.exp(-(v + 65.0) / 20.0), 1.0 / (1.0 + jnp.exp(-(v + 35.0) / 10.0)))
            n = gate(n, 0.1 * ratio(-(v + 55.0) / 10.0), 0.125 * jnp.exp(-(v + 65.0) / 80.0))
            na, k = g_na * m**3 * h, g_k * n**4
            driven = na * 50.0 + k * -77.0 + g_l * -54.4
            driven = driven.at[0].add(40.0 + 20.0 * pulse)
            new = solve(1.0 + dt * (na + k + g_l + couple * ends), v + dt * driven)
            spikes = spikes + ((v < 0.0) & (new >= 0.0))
            return (new, (m, h, n), spikes), (new[0], new[-1])

        empty = jnp.zeros(v.shape, jnp.int32)
        (v, gates, spikes), ends_seen = lax.scan(step, (v, gates, empty), pulses)
        return v, gates, spikes, ends_seen

    return Built(
        run, (normal(parts, cells), *(normal(parts, cells, scale=0.2) for _ in range(3)), normal(steps, cells))
    )


@program("binned-counts-with-nuisances-toys-grad", GROUP)
def _counts(size: Size) -> Built:
    """This gives the negative log likelihood and its gradient for toy experiments of a binned model such as pyhf has.

    Nuisance parameters scale and deform the expected counts of every sample: exponentials or lines outside of one deviation, and
    polynomials inside. Counts are Poisson, and parameters are held by normal terms.
    """
    toys, samples, bins, shifts = pick(size, (300, 7, 130, 24), (50, 7, 110, 24), (3, 2, 5, 3))

    def inside(a):
        return a * (15.0 + a * a * (3.0 * a * a - 10.0)) / 16.0

    def expected(p, model):
        a = p["alpha"][:, None, None]
        up, down = model["up"], model["down"]
        smooth = 0.5 * a * (up - down) + (up + down) * a * inside(a)
        added = jnp.where(a > 1.0, a * up, jnp.where(a < -1.0, -a * down, smooth))
        high, low = model["high"], model["low"]
        b = p["alpha"][:, None]
        middle = 0.5 * b * (high - low) + (high + low) * b * inside(b)
        scale = jnp.exp(jnp.where(b > 1.0, b * high, jnp.where(b < -1.0, -b * low, middle)))
        nominal = model["nominal"] + jnp.sum(added, axis=0)
        rates = jnp.maximum(nominal, 1e-3) * jnp.prod(scale, axis=0)[:, None]
        strengths = jnp.concatenate([p["mu"][None], jnp.ones(samples - 1)])
        return jnp.sum(rates * strengths[:, None], axis=0) * p["gamma"]

    def nll(p, counts, aux, model):
        rate = jnp.maximum(expected(p, model), 1e-6)
        poisson = counts * jnp.log(rate) - rate - jax.scipy.special.gammaln(counts + 1.0)
        held = jax.scipy.stats.norm.logpdf(aux, p["alpha"], 1.0)
        stats = jax.scipy.stats.norm.logpdf(1.0, p["gamma"], model["width"])
        return -(jnp.sum(poisson) + jnp.sum(held) + jnp.sum(stats))

    def fit(p, raw, counts, aux):
        model = {
            "nominal": 40.0 * jax.nn.softplus(raw["nominal"]),
            "up": raw["up"],
            "down": raw["down"],
            "high": raw["high"],
            "low": raw["low"],
            "width": 0.02 + 0.05 * jax.nn.sigmoid(raw["width"]),
        }
        counts = counts.astype(jnp.float32)
        values, slopes = jax.vmap(jax.value_and_grad(nll), in_axes=(0, 0, 0, None))(p, counts, aux, model)
        return values, slopes, jnp.sqrt(sum(jnp.sum(g.reshape(toys, -1) ** 2, axis=1) for g in slopes.values()))

    p = {"mu": normal(toys, scale=0.3, offset=1.0), "alpha": normal(toys, shifts)}
    p |= {"gamma": normal(toys, bins, scale=0.03, offset=1.0)}
    raw = {name: normal(shifts, samples, bins, scale=0.8) for name in ("up", "down")}
    raw |= {name: normal(shifts, samples, scale=0.03) for name in ("high", "low")}
    raw |= {"nominal": normal(samples, bins), "width": normal(bins)}
    return Built(fit, (p, raw, integers(toys, bins, below=400), normal(toys, shifts)))


@program("driven-qubit-and-cavity-master-equation", GROUP)
def _master(size: Size) -> Built:
    """This gives photons, inversion and purity in time of a lossy cavity with a qubit under many drives.

    Density matrices follow the Lindblad equation by Runge and Kutta's method with pulses that are interpolated from a few knots.
    """
    drives, levels, steps, knots = pick(size, (24, 43, 40, 9), (5, 13, 40, 9), (2, 3, 4, 3))
    n, dt = 2 * levels, 0.01

    def evolve(pulses, detunings, couplings):
        a = jnp.kron(jnp.eye(2), jnp.diag(jnp.sqrt(jnp.arange(1.0, levels)), k=1)).astype(jnp.complex64)
        lower = jnp.kron(jnp.array([[0.0, 1.0], [0.0, 0.0]]), jnp.eye(levels)).astype(jnp.complex64)
        number, inversion = jnp.conj(a.T) @ a, lower @ jnp.conj(lower.T) - jnp.conj(lower.T) @ lower
        jumps = jnp.stack([0.5 * a, 0.3 * lower, 0.2 * inversion])
        losses = jnp.einsum("jba,jbc->ac", jnp.conj(jumps), jumps)
        swap = jnp.conj(a.T) @ lower
        swap = swap + jnp.conj(swap.T)

        def one(pulse, detuning, coupling):
            still = detuning * number + (2.0 + coupling) * swap

            def slope(t, rho):
                place = t / (steps * dt) * (knots - 1)
                drive = jnp.interp(place, jnp.arange(knots), pulse[0]) + 1j * jnp.interp(
                    place, jnp.arange(knots), pulse[1]
                )
                drive = 3.0 * drive
                h = still + drive * jnp.conj(a.T) + jnp.conj(drive) * a
                half_step = -1j * (h - 0.5j * losses) @ rho
                jumped = jnp.einsum("jab,bc,jdc->ad", jumps, rho, jnp.conj(jumps))
                return half_step + jnp.conj(half_step.T) + jumped

            def step(rho, i):
                t = i * dt
                k1 = slope(t, rho)
                k2 = slope(t + dt / 2, rho + dt / 2 * k1)
                k3 = slope(t + dt / 2, rho + dt / 2 * k2)
                k4 = slope(t + dt, rho + dt * k3)
                rho = rho + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
                rho = rho / jnp.trace(rho).real
                photons = jnp.einsum("ab,ba->", number, rho).real
                return rho, (photons, jnp.sum(inversion * rho.T).real, jnp.sum(jnp.abs(rho) ** 2))

            start = jnp.zeros((n, n), jnp.complex64).at[levels, levels].set(1.0)
            return lax.scan(step, start, jnp.arange(steps, dtype=jnp.float32))

        rho, seen = jax.vmap(one)(pulses, detunings, couplings)
        populations = jnp.real(jnp.diagonal(rho, axis1=1, axis2=2)).reshape(drives, 2, levels)
        return populations, rho, seen

    return Built(evolve, (normal(drives, 2, knots), normal(drives), normal(drives, scale=0.3)))


def legendre(last, waves, sines):
    """This function gives normed Legendre functions [latitudes, waves, degrees] and (1 - x^2) times their slopes, by NumPy."""
    m = np.arange(waves)[:, None]
    degree = np.arange(last + 2)[None]
    eps = np.sqrt(np.maximum(degree**2 - m**2, 0) / np.maximum(4.0 * degree**2 - 1.0, 1.0))
    p = np.zeros((len(sines), waves, last + 2))
    cosine = np.sqrt(1.0 - sines**2)
    for k in range(waves):
        p[:, k, k] = np.sqrt(0.5) if k == 0 else p[:, k - 1, k - 1] * cosine * np.sqrt((2 * k + 1) / (2 * k))
        for n in range(k, last + 1):
            before = eps[k, n] * p[:, k, n - 1] if n > k else 0.0
            p[:, k, n + 1] = (sines * p[:, k, n] - before) / eps[k, n + 1]
    n = np.arange(last + 1)
    slope = -n * eps[:, 1 : last + 2] * p[:, :, 1:]
    slope[:, :, 1:] += (n[1:] + 1) * eps[:, 1 : last + 1] * p[:, :, :last]
    return p[:, :, : last + 1].astype(np.float32), slope.astype(np.float32)


@program("spherical-harmonic-vorticity-leapfrog", GROUP)
def _sphere(size: Size) -> Built:
    """This gives the vorticity of layers of air on a rotating sphere after leapfrog steps by spherical harmonics.

    Each step goes to a grid by Legendre sums and Fourier transforms, multiplies winds and vorticity there, comes back, and damps
    short waves; a time filter holds the two levels together.
    """
    layers, waves, latitudes, longitudes, steps = pick(
        size, (13, 85, 128, 256, 8), (5, 53, 80, 160, 5), (2, 4, 6, 12, 2)
    )
    last, dt, spin = waves - 1, 0.02, 2.0
    sines, shares = np.polynomial.legendre.leggauss(latitudes)
    p, slope = legendre(last, waves, sines)
    shares, squares = shares.astype(np.float32), (1.0 - sines**2).astype(np.float32)[:, None]
    degrees = np.arange(waves, dtype=np.float32)
    m = 1j * np.arange(waves, dtype=np.float32)
    kept = (np.arange(waves)[None] >= np.arange(waves)[:, None]).astype(np.float32)

    def to_grid(spectrum, functions):
        rows = jnp.einsum("zmn,ymn->zym", spectrum, functions)
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, longitudes // 2 + 1 - waves)))
        return jnp.fft.irfft(rows, n=longitudes, axis=-1) * longitudes

    def to_rows(field):
        return jnp.fft.rfft(field, axis=-1)[..., :waves] / longitudes

    def tendency(vorticity):
        inverse = jnp.where(degrees > 0, -1.0 / jnp.maximum(degrees * (degrees + 1), 1.0), 0.0)
        stream = vorticity * inverse
        east = -to_grid(stream, slope)
        north = to_grid(stream * m[:, None], p)
        total = to_grid(vorticity, p) + spin * sines.astype(np.float32)[:, None]
        a, b = to_rows(east * total / squares), to_rows(north * total / squares)
        change = jnp.einsum("y,zym,ymn->zmn", shares, -m * a, p) + jnp.einsum("y,zym,ymn->zmn", shares, b, slope)
        return change, jnp.max(east**2 / squares + north**2 / squares, axis=(1, 2))

    def run(real, imaginary):
        spectrum = (real + 1j * imaginary * (np.arange(waves) > 0)[:, None]) * kept / (1.0 + degrees) ** 1.5
        damp = 1.0 / (1.0 + 2 * dt * 20.0 * (degrees * (degrees + 1) / (last * (last + 1))) ** 4)

        def step(state, _):
            old, now = state
            change, fastest = tendency(now)
            new = (old + 2 * dt * change * kept) * damp
            filtered = now + 0.05 * (new - 2 * now + old)
            energy = jnp.sum(jnp.abs(new) ** 2 / jnp.maximum(degrees * (degrees + 1), 1.0), axis=(1, 2))
            return (filtered, new), (jnp.sqrt(fastest), energy)

        (_, spectrum), seen = lax.scan(step, (spectrum, spectrum), None, length=steps)
        return to_grid(spectrum, p), seen

    return Built(run, (normal(layers, waves, waves, scale=0.3), normal(layers, waves, waves, scale=0.3)))


@program("oscillating-stars-semiseparable-likelihood-grad", GROUP)
def _stars(size: Size) -> Built:
    """This gives the likelihood and gradient of Gaussian processes over the light of many stars in linear time, as celerite.

    A kernel of damped oscillations makes the covariance semiseparable, so a scan over the times factors it row by row.
    """
    stars, t, terms = pick(size, (1500, 130, 3), (60, 150, 3), (3, 6, 2))

    def likelihood(p, times, flux, errors):
        strength, quality, pulse = (jnp.exp(p[name]) for name in ("strength", "quality", "pulse"))
        root = jnp.sqrt(4.0 * quality**2 + 1.0)
        a = strength * pulse * (quality + 0.5)
        b = a / root
        c = pulse / (2.0 * quality + 1.0)
        d = c * root
        angles = times[:, None] * d
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        u = jnp.concatenate([a * cos + b * sin, a * sin - b * cos], axis=1)
        v = jnp.concatenate([cos, sin], axis=1)
        gaps = jnp.concatenate([jnp.zeros(1), jnp.diff(times)])
        decay = jnp.exp(-gaps[:, None] * jnp.concatenate([c, c]))
        diagonal = errors**2 + jnp.exp(2.0 * p["jitter"]) + jnp.sum(a)
        residual = flux - p["mean"]

        def step(state, row):
            s, f, w, var, z = state
            u, v, decay, diagonal, y = row
            s = decay[:, None] * decay[None, :] * (s + var * w[:, None] * w[None, :])
            f = decay * (f + w * z)
            su = s @ u
            var = jnp.maximum(diagonal - u @ su, 1e-6)
            w, z = (v - su) / var, y - u @ f
            return (s, f, w, var, z), (jnp.log(var), z * z / var)

        k = 2 * terms
        start = (jnp.zeros((k, k)), jnp.zeros(k), jnp.zeros(k), jnp.float32(0.0), jnp.float32(0.0))
        _, (logs, squares) = lax.scan(step, start, (u, v, decay, diagonal, residual))
        return -0.5 * jnp.sum(logs + squares + jnp.log(2 * jnp.pi))

    def all_stars(p, gaps, flux, errors):
        times = jnp.cumsum(0.05 + 0.2 * jax.nn.sigmoid(gaps), axis=1)
        errors = 0.1 + 0.1 * jax.nn.sigmoid(errors)
        return jax.vmap(jax.value_and_grad(likelihood))(p, times, flux, errors)

    p = {
        name: normal(stars, terms, scale=0.4, offset=o)
        for name, o in (("strength", -1), ("quality", 0.5), ("pulse", 0.7))
    }
    p |= {"jitter": normal(stars, scale=0.2, offset=-2.0), "mean": normal(stars, scale=0.1)}
    return Built(all_stars, (p, normal(stars, t), normal(stars, t), normal(stars, t)))


@program("boltzmann-machine-spin-chain-natural-gradient", GROUP)
def _chain(size: Size) -> Built:
    """This gives the energy of a spin chain under a restricted Boltzmann machine, and its natural-gradient step.

    Local energies compare every sample with copies that have two unlike neighbours swapped; the step solves with the covariance
    of the log derivatives by conjugate gradients, as NetKet's stochastic reconfiguration does.
    """
    samples, sites, hidden, rounds = pick(size, (2016, 42, 84, 20), (420, 30, 60, 20), (6, 5, 7, 3))
    coupling, rate, shift = 1.0, 0.05, 0.02

    def log_cosh(x):
        x = jnp.abs(x)
        return x + jnp.log1p(jnp.exp(-2.0 * x)) - jnp.log(2.0)

    def log_psi(p, spins):
        return spins @ p["visible"] + jnp.sum(log_cosh(spins @ p["kernel"] + p["hidden"]))

    def local_energy(p, spins):
        right = jnp.roll(spins, -1)
        here = jnp.arange(sites)
        after = (here + 1) % sites
        copies = jnp.tile(spins, (sites, 1))
        copies = copies.at[here, here].set(right).at[here, after].set(spins)
        ratios = jnp.exp(jax.vmap(log_psi, in_axes=(None, 0))(p, copies) - log_psi(p, spins))
        return coupling * jnp.sum(spins * right - jnp.where(spins != right, 2.0 * ratios, 0.0))

    def step(p, up):
        spins = jnp.where(up, 1.0, -1.0)
        energies = jax.vmap(local_energy, in_axes=(None, 0))(p, spins)
        centred = energies - jnp.mean(energies)
        slopes = jax.vmap(jax.grad(log_psi), in_axes=(None, 0))(p, spins)
        slopes = jax.tree.map(lambda g: g - jnp.mean(g, axis=0), slopes)
        force = jax.tree.map(lambda g: 2.0 * jnp.tensordot(centred, g, axes=1) / samples, slopes)

        def covariance(v):
            along = sum(jax.tree.leaves(jax.tree.map(lambda g, x: jnp.tensordot(g, x, axes=x.ndim), slopes, v)))
            return jax.tree.map(lambda g, x: jnp.tensordot(along, g, axes=1) / samples + shift * x, slopes, v)

        change, _ = jax.scipy.sparse.linalg.cg(covariance, force, maxiter=rounds, tol=1e-4)
        error = jnp.sqrt(jnp.mean(centred**2) / samples)
        return jax.tree.map(lambda w, c: w - rate * c, p, change), jnp.mean(energies), error, force

    p = {"visible": normal(sites, scale=0.05), "hidden": normal(hidden, scale=0.05)}
    p |= {"kernel": normal(sites, hidden, scale=0.05)}
    return Built(step, (p, booleans(samples, sites)))
