"""Seas, elliptic equations, sequences and cold gases of the tenth set: its author had seen no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program

GROUP = "tenth"


@program("shallow-water-beta-plane-steps", GROUP)
def _shallow_water(size: Size) -> Built:
    """This gives heights and currents of a sea in a channel on a beta plane after some steps on a staggered grid.

    Currents live on the faces of cells; the absolute vorticity turns them, the Bernoulli function and a wind drive them, and the
    height follows from the divergence of fluxes; walls are in the north and south, and each step records its energy.
    """
    rows, columns, steps = pick(size, (1000, 1530, 150), (150, 210, 90), (6, 9, 3))
    step, drag, viscosity = 0.2, 1e-3, 0.05
    latitude = (np.arange(rows, dtype=np.float32) / rows - 0.5)[:, None]
    turning = (0.1 + 0.05 * latitude).astype(np.float32)
    wind = (1e-3 * np.cos(2.0 * np.pi * latitude)).astype(np.float32)
    inside = (np.arange(rows) < rows - 1)[:, None]

    def east(x):
        return jnp.roll(x, -1, axis=1)

    def west(x):
        return jnp.roll(x, 1, axis=1)

    def north(x):
        return jnp.concatenate([x[1:], x[-1:]], axis=0)

    def south(x):
        return jnp.concatenate([x[:1], x[:-1]], axis=0)

    def smooth(x):
        return east(x) + west(x) + north(x) + south(x) - 4.0 * x

    def advance(fields, _):
        h, u, v = fields
        flux_u, flux_v = u * 0.5 * (h + east(h)), jnp.where(inside, v * 0.5 * (h + north(h)), 0.0)
        below = jnp.concatenate([jnp.zeros_like(flux_v[:1]), flux_v[:-1]], axis=0)
        h = h - step * (flux_u - west(flux_u) + flux_v - below)
        vorticity = turning + east(v) - v - north(u) + u
        around_u = 0.25 * (v + east(v) + south(v) + east(south(v)))
        around_v = 0.25 * (u + west(u) + north(u) + west(north(u)))
        kinetic = 0.25 * (u**2 + west(u) ** 2 + v**2 + south(v) ** 2)
        head = h + kinetic
        new_u = u + step * (0.5 * (vorticity + south(vorticity)) * around_u - east(head) + head + wind / h)
        new_v = v - step * (0.5 * (vorticity + west(vorticity)) * around_v + north(head) - head)
        new_u = (new_u + step * viscosity * smooth(u)) / (1.0 + step * drag)
        new_v = jnp.where(inside, (new_v + step * viscosity * smooth(v)) / (1.0 + step * drag), 0.0)
        energy = jnp.mean(h * kinetic + 0.5 * (h - 1.0) ** 2)
        return (h, new_u, new_v), (energy, jnp.max(jnp.abs(new_u)))

    def simulate(noise, u, v):
        x = jnp.linspace(-1.0, 1.0, columns)[None, :]
        hill = jnp.exp(-8.0 * (x**2 + 4.0 * latitude**2))
        return lax.scan(advance, (1.0 + 0.1 * hill + noise, u, jnp.where(inside, v, 0.0)), None, length=steps)

    return Built(simulate, tuple(normal(rows, columns, scale=0.01) for _ in range(3)))


@program("multigrid-rough-diffusion-cycles", GROUP)
def _multigrid(size: Size) -> Built:
    """This gives the solution of a screened diffusion equation with a rough coefficient by V-cycles of multigrid.

    Faces have harmonic means of the cells' coefficients; three levels are smoothed by damped Jacobi sweeps in loops, residuals are
    averaged to the coarser level and corrections spread back; cycles go on while the residual is large.
    """
    n, sweeps, coarse, most = pick(size, (1536, 3, 40, 6), (480, 3, 30, 5), (12, 2, 4, 2))
    levels, screen, damping = 3, 0.02, 0.8

    def halve(x):
        return x.reshape(x.shape[0] // 2, 2, x.shape[1] // 2, 2).mean(axis=(1, 3))

    def double(x):
        return jnp.repeat(jnp.repeat(x, 2, axis=0), 2, axis=1)

    def faces(k, spacing):
        across = 2.0 * k[:, 1:] * k[:, :-1] / (k[:, 1:] + k[:, :-1]) / spacing**2
        along = 2.0 * k[1:] * k[:-1] / (k[1:] + k[:-1]) / spacing**2
        across, along = jnp.pad(across, ((0, 0), (1, 1))), jnp.pad(along, ((1, 1), (0, 0)))
        return across, along, across[:, 1:] + across[:, :-1] + along[1:] + along[:-1] + screen

    def apply(u, face):
        across, along, diagonal = face
        padded = jnp.pad(u, 1)
        y = diagonal * u - across[:, 1:] * padded[1:-1, 2:] - across[:, :-1] * padded[1:-1, :-2]
        return y - along[1:] * padded[2:, 1:-1] - along[:-1] * padded[:-2, 1:-1]

    def relax(u, f, face, times):
        return lax.fori_loop(0, times, lambda _, u: u + damping * (f - apply(u, face)) / face[2], u)

    def cycle(u, f, every, level):
        face = every[level]
        if level == levels - 1:
            return relax(u, f, face, coarse)
        u = relax(u, f, face, sweeps)
        residual = halve(f - apply(u, face))
        u = u + double(cycle(jnp.zeros_like(residual), residual, every, level + 1))
        return relax(u, f, face, sweeps)

    def solve(logarithm, f):
        k, every = jnp.exp(0.7 * logarithm), []
        for level in range(levels):
            every.append(faces(k, 2.0**level))
            k = halve(k) if level < levels - 1 else k
        scale = jnp.sqrt(jnp.mean(f**2))

        def unfinished(state):
            i, _, size = state
            return (i < most) & (size > 1e-7 * scale)

        def once(state):
            i, u, _ = state
            u = cycle(u, f, every, 0)
            return i + 1, u, jnp.sqrt(jnp.mean((f - apply(u, every[0])) ** 2))

        cycles, u, size = lax.while_loop(unfinished, once, (0, jnp.zeros_like(f), scale))
        return u, jnp.log1p(size / scale), cycles

    return Built(solve, (normal(n, n), normal(n, n)))


@program("smith-waterman-affine-diagonals", GROUP)
def _smith_waterman(size: Size) -> Built:
    """This gives scores of local alignments with affine gaps of many pairs of proteins, by a scan over antidiagonals.

    Along an antidiagonal all cells are independent; the state keeps two antidiagonals of the best scores and one of each kind of
    gap; the scores of pairs of letters are gathered from a matrix, and places beyond a sequence's length count nothing.
    """
    pairs, m, n = pick(size, (1024, 150, 222), (160, 90, 130), (3, 5, 7))
    letters, opening, extending, never = 24, 11.0, 1.0, -1e4

    def align(query, reference, long, table):
        row = jnp.arange(m)
        profile = table[query]

        def advance(state, diagonal):
            best, before, across, down, rows = state
            column = diagonal - row
            inside = (column >= 0) & (column <= long)
            letter = reference[jnp.clip(column, 0, n - 1)]
            score = jnp.take_along_axis(profile, letter[:, None], axis=1)[:, 0]

            def above(x, start):
                return jnp.concatenate([jnp.full(1, start, x.dtype), x[:-1]])

            across = jnp.maximum(best - opening, across - extending)
            down = jnp.maximum(above(best, 0.0) - opening, above(down, never) - extending)
            new = jnp.maximum(jnp.maximum(above(before, 0.0) + score, 0.0), jnp.maximum(across, down))
            new = jnp.where(inside, new, 0.0)
            across, down = jnp.where(inside, across, never), jnp.where(inside, down, never)
            return (new, best, across, down, jnp.maximum(rows, new)), jnp.max(new)

        zero, low = jnp.zeros(m), jnp.full(m, never)
        (*_, rows), diagonals = lax.scan(advance, (zero, zero, low, low, zero), jnp.arange(m + n - 1))
        return jnp.max(rows), rows, diagonals

    def search(queries, references, lengths, raw):
        table = raw + raw.T - 1.0 + 7.0 * jnp.eye(letters)
        score, rows, diagonals = jax.vmap(align, in_axes=(0, 0, 0, None))(queries, references, lengths, table)
        bits = (0.267 * score - jnp.log(0.041)) / jnp.log(2.0)
        return bits, rows, diagonals, jax.nn.softmax(0.267 * score)

    sequences = (integers(pairs, m, below=letters), integers(pairs, n, below=letters), integers(pairs, below=n))
    return Built(search, (*sequences, normal(letters, letters, scale=1.5)))


@program("gross-pitaevskii-vortex-imaginary-time", GROUP)
def _gross_pitaevskii(size: Size) -> Built:
    """This gives densities of cold gases in a turning trap for some interactions, by split steps in imaginary time.

    Half a step of the potential and the interaction, a step of the kinetic energy in Fourier space, another half, then the norm
    is restored; at the end stand the chemical potential, the angular momentum and the widths of each gas.
    """
    gases, nx, ny, steps = pick(size, (6, 480, 400, 60), (3, 144, 120, 40), (2, 6, 10, 2))
    box, step = 16.0, 0.004
    x = np.linspace(-box / 2, box / 2, nx, endpoint=False, dtype=np.float32)[:, None]
    y = np.linspace(-box / 2, box / 2, ny, endpoint=False, dtype=np.float32)[None, :]
    kx = (2 * np.pi * np.fft.fftfreq(nx, box / nx)).astype(np.float32)[:, None]
    ky = (2 * np.pi * np.fft.fftfreq(ny, box / ny)).astype(np.float32)[None, :]
    kinetic, cell = 0.5 * (kx**2 + ky**2), box**2 / (nx * ny)
    trap = 0.5 * (x**2 + 1.2 * y**2)

    def normalised(psi):
        return psi / jnp.sqrt(jnp.sum(jnp.abs(psi) ** 2) * cell)

    def turn(psi, kx, ky):
        spectrum = jnp.fft.fft2(psi)
        return x * jnp.fft.ifft2(1j * ky * spectrum) - y * jnp.fft.ifft2(1j * kx * spectrum)

    def relax(real, imaginary, strength):
        def advance(_, psi):
            psi = psi * jnp.exp(-0.5 * step * (trap + strength * jnp.abs(psi) ** 2))
            psi = jnp.fft.ifft2(jnp.exp(-step * kinetic) * jnp.fft.fft2(psi))
            psi = psi * jnp.exp(-0.5 * step * (trap + strength * jnp.abs(psi) ** 2))
            return normalised(psi)

        vortex = (x + 1j * y + 0.3 * (real + 1j * imaginary)) * np.exp(-0.1 * (x**2 + y**2))
        psi = lax.fori_loop(0, steps, advance, normalised(vortex.astype(jnp.complex64)))
        density = jnp.abs(psi) ** 2
        moving = jnp.real(jnp.conj(psi) * jnp.fft.ifft2(kinetic * jnp.fft.fft2(psi)))
        potential = jnp.sum(moving + (trap + strength * density) * density) * cell
        momentum = jnp.sum(jnp.imag(jnp.conj(psi) * turn(psi, kx, ky))) * cell
        widths = jnp.stack([jnp.sum(density * x**2), jnp.sum(density * y**2)]) * cell
        return 10.0 * density, potential, momentum, jnp.sqrt(widths)

    def every(real, imaginary, logarithms):
        return jax.vmap(relax)(real, imaginary, 20.0 * jnp.exp(0.3 * logarithms))

    return Built(every, (normal(gases, nx, ny), normal(gases, nx, ny), normal(gases)))
