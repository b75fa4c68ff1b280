"""Equations, signals and statistics of the fifth set."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, gain, integers, normal, pick, program

GROUP = "fifth"


@program("weno5-euler-blast-steps", GROUP)
def _weno(size: Size) -> Built:
    """Steps of the compressible Euler equations: WENO5 of split fluxes in both directions, Runge and Kutta's third order."""
    n, steps = pick(size, (512, 3), (96, 2), (8, 1))
    gamma, dx = 1.4, 1.0 / n

    def pressure(u):
        return jnp.maximum((gamma - 1.0) * (u[3] - 0.5 * (u[1] ** 2 + u[2] ** 2) / u[0]), 1e-6)

    def fluxes(u):
        p, vx, vy = pressure(u), u[1] / u[0], u[2] / u[0]
        f = jnp.stack([u[1], u[1] * vx + p, u[2] * vx, (u[3] + p) * vx])
        g = jnp.stack([u[2], u[1] * vy, u[2] * vy + p, (u[3] + p) * vy])
        return f, g

    def reconstruct(a, b, c, d, e):
        q0, q1, q2 = (2 * a - 7 * b + 11 * c) / 6, (-b + 5 * c + 2 * d) / 6, (2 * c + 5 * d - e) / 6
        s0 = 13 / 12 * (a - 2 * b + c) ** 2 + 0.25 * (a - 4 * b + 3 * c) ** 2
        s1 = 13 / 12 * (b - 2 * c + d) ** 2 + 0.25 * (b - d) ** 2
        s2 = 13 / 12 * (c - 2 * d + e) ** 2 + 0.25 * (3 * c - 4 * d + e) ** 2
        w0, w1, w2 = 0.1 / (s0 + 1e-6) ** 2, 0.6 / (s1 + 1e-6) ** 2, 0.3 / (s2 + 1e-6) ** 2
        return (w0 * q0 + w1 * q1 + w2 * q2) / (w0 + w1 + w2)

    def divergence(u, f, speed, axis):
        plus, minus = 0.5 * (f + speed * u), 0.5 * (f - speed * u)
        right = reconstruct(*(jnp.roll(plus, s, axis) for s in (2, 1, 0, -1, -2)))
        left = reconstruct(*(jnp.roll(minus, s, axis) for s in (-3, -2, -1, 0, 1)))
        face = right + left
        return (face - jnp.roll(face, 1, axis)) / dx

    def rate(u, speed):
        f, g = fluxes(u)
        return -divergence(u, f, speed, 2) - divergence(u, g, speed, 1)

    def run(noise, energy):
        y, x = jnp.meshgrid((jnp.arange(n) + 0.5) * dx - 0.5, (jnp.arange(n) + 0.5) * dx - 0.5, indexing="ij")
        rho = 1.0 + 0.05 * jnp.tanh(noise[0])
        v = 0.05 * jnp.tanh(noise[1:])
        p = 0.1 + jax.nn.softplus(energy) * jnp.exp(-(x**2 + y**2) / 0.01)
        u = jnp.stack([rho, rho * v[0], rho * v[1], p / (gamma - 1.0) + 0.5 * rho * jnp.sum(v**2, axis=0)])

        def step(u, _):
            sound = jnp.sqrt(gamma * pressure(u) / u[0])
            fast = jnp.maximum(jnp.abs(u[1]), jnp.abs(u[2])) / u[0] + sound
            speed = jnp.max(fast)
            dt = 0.3 * dx / speed
            u1 = u + dt * rate(u, speed)
            u2 = 0.75 * u + 0.25 * (u1 + dt * rate(u1, speed))
            u = u / 3.0 + 2.0 / 3.0 * (u2 + dt * rate(u2, speed))
            return u, (dt, jnp.sum(u[0]) * dx**2, jnp.sum(u[3]) * dx**2)

        u, record = lax.scan(step, u, None, length=steps)
        mach = jnp.sqrt((u[1] ** 2 + u[2] ** 2) / u[0] ** 2 / (gamma * pressure(u) / u[0]))
        return u, mach, record

    return Built(run, (normal(3, n, n), normal(offset=1.0)))


@program("radar-range-doppler-cfar", GROUP)
def _radar(size: Size) -> Built:
    """A car radar's frames: windows, range and Doppler transforms, false-alarm thresholds of cells around, peaks, angles."""
    frames, antennas, chirps, samples, found = pick(size, (8, 8, 128, 512, 64), (4, 8, 64, 256, 32), (1, 2, 16, 16, 3))
    angles, outer, inner = 64, (17, 9), (5, 3)

    def window_sum(x, shape):
        return lax.reduce_window(x, 0.0, lax.add, (1, *shape), (1, 1, 1), "SAME")

    def cells_in(shape):
        def along(extent, w):
            at = np.arange(extent)
            return np.minimum(at + w // 2, extent - 1) - np.maximum(at - w // 2, 0) + 1

        return np.outer(along(chirps, shape[0]), along(samples // 2, shape[1])).astype(np.float32)

    def detect(real, imaginary, gains):
        cube = lax.complex(real, imaginary) * gains[None, :, None, None]
        cube = cube - jnp.mean(cube, axis=-1, keepdims=True)
        ranges = jnp.fft.fft(cube * np.hanning(samples).astype(np.float32), axis=-1)[..., : samples // 2]
        still = ranges - jnp.mean(ranges, axis=2, keepdims=True)
        doppler = jnp.fft.fft(still * np.hamming(chirps).astype(np.float32)[:, None], axis=2)
        doppler = jnp.fft.fftshift(doppler, axes=2)
        power = jnp.mean(jnp.abs(doppler) ** 2, axis=1)
        noise = (window_sum(power, outer) - window_sum(power, inner)) / (cells_in(outer) - cells_in(inner))
        peak = lax.reduce_window(power, -jnp.inf, lax.max, (1, 3, 3), (1, 1, 1), "SAME")
        hit = (power > 2.0 * noise) & (power >= peak)
        ratio = jnp.where(hit, power / (noise + 1e-9), 0.0).reshape(frames, -1)
        strength, at = lax.top_k(ratio, found)
        flat = doppler.reshape(frames, antennas, -1)
        snapshot = jnp.take_along_axis(flat, at[:, None, :], axis=2)
        spectrum = jnp.abs(jnp.fft.fftshift(jnp.fft.fft(snapshot, n=angles, axis=1), axes=1)) ** 2
        sine = 2.0 * (jnp.argmax(spectrum, axis=1) - angles // 2) / angles
        bins = samples // 2
        speed, distance = at // bins - chirps // 2, at % bins
        decibels = 10.0 * jnp.log10(jnp.maximum(strength, 1e-6))
        return distance, speed, jnp.arcsin(sine), decibels, strength > 0, jnp.sum(hit, axis=(1, 2))

    cube = normal(frames, antennas, chirps, samples)
    return Built(detect, (cube, cube, gain(antennas)))


@program("hierarchical-count-regression-elbo-grad", GROUP)
def _hierarchical(size: Size) -> Built:
    """The gradient of a variational bound: negative binomial counts, offsets of groups uncentred, several reparameterised draws."""
    rows, groups, p, draws = pick(size, (100_000, 1000, 16, 8), (50_000, 500, 8, 4), (12, 3, 2, 2))

    def normal_log(x, loc, scale):
        return -0.5 * jnp.square((x - loc) / scale) - jnp.log(scale) - 0.5 * np.log(2 * np.pi)

    def counts_log(k, log_mean, concentration):
        mean = jnp.exp(log_mean)
        total = jnp.log(concentration + mean)
        choose = lax.lgamma(k + concentration) - lax.lgamma(k + 1.0) - lax.lgamma(concentration)
        return choose + concentration * (jnp.log(concentration) - total) + k * (log_mean - total)

    def log_joint(z, x, group, count, exposure):
        tau = jnp.exp(z["log_tau"])
        offsets = z["mu"] + tau * z["raw"]
        slopes = z["slope"] + 0.2 * z["raw_slope"][:, 0]
        concentration = jnp.exp(z["log_concentration"])
        eta = offsets[group] + slopes[group] * x[:, 0] + x @ z["beta"] + jnp.log(exposure)
        eta = jnp.clip(eta, -10.0, 10.0)
        prior = normal_log(z["mu"], 0.0, 2.0) + normal_log(z["slope"], 0.0, 1.0)
        prior += jnp.log(2.0) + normal_log(tau, 0.0, 1.0) + z["log_tau"]
        prior += normal_log(z["log_concentration"], 1.0, 1.0)
        prior += jnp.sum(normal_log(z["raw"], 0.0, 1.0)) + jnp.sum(normal_log(z["raw_slope"], 0.0, 1.0))
        prior += jnp.sum(-jnp.log1p(jnp.square(z["beta"] / 0.5)))
        return prior + jnp.sum(counts_log(count, eta, concentration))

    def bound(guide, x, group, count, exposure, seed):
        leaves, tree = jax.tree.flatten(guide["loc"])
        scales = jax.tree.map(lambda s: jax.nn.softplus(s) + 1e-4, guide["scale"])

        def one(key):
            keys = jax.tree.unflatten(tree, list(jax.random.split(key, len(leaves))))
            noise = jax.tree.map(lambda k, m: jax.random.normal(k, m.shape), keys, guide["loc"])
            z = jax.tree.map(lambda m, s, e: m + s * e, guide["loc"], scales, noise)
            return log_joint(z, x, group, count, exposure)

        entropy = sum(jnp.sum(jnp.log(s)) for s in jax.tree.leaves(scales))
        joint = jax.vmap(one)(jax.random.split(jax.random.key(seed), draws))
        return -(jnp.mean(joint) + entropy) / rows

    def step(guide, x, group, count, exposure, seed):
        count = count.astype(jnp.float32)
        value, slope = jax.value_and_grad(bound)(guide, x, group, count, jnp.exp(exposure), seed)
        seen = jax.ops.segment_sum(count, group, groups, indices_are_sorted=True)
        return value, jax.tree.map(lambda g, s: g - 1e-3 * s, guide, slope), seen

    def tree(scale, offset):
        shapes = {"mu": (), "slope": (), "log_tau": (), "log_concentration": (), "beta": (p,), "raw": (groups,)}
        shapes |= {"raw_slope": (groups, 1)}
        return {k: normal(*s, scale=scale, offset=offset) for k, s in shapes.items()}

    guide = {"loc": tree(0.1, 0.0), "scale": tree(0.1, -3.0)}
    data = (normal(rows, p, scale=0.3), integers(rows, below=groups, ramp=True), integers(rows, below=12))
    return Built(step, (guide, *data, normal(rows, scale=0.2), integers(below=1000)))
