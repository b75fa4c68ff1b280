"""Tracks of several models, stiff chemistry, and text aligned to speech, the thirty-sixth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program

GROUP = "thirty-sixth"


@program("interacting-multiple-model-filter-of-many-tracks-scan", GROUP)
def _tracks(size: Size) -> Built:
    """This program follows many moving targets with Kalman filters of four kinds of motion, which are mixed at every step.

    It is the interacting multiple model filter (Blom and Bar-Shalom, 1988; as `IMMEstimator` of filterpy): constant speed, constant
    acceleration and turns to both sides; radar gives places, states are mixed by chances of models, and so are what comes out.
    """
    tracks, steps, dt, models = pick(size, (4096, 64, 1.0, 4), (256, 48, 1.0, 4), (2, 4, 1.0, 4))

    def motions():
        """These are the matrices of four motions over [x, vx, ax, y, vy, ay], and their noise."""
        steady = np.array([[1, dt, 0], [0, 1, 0], [0, 0, 0.0]])
        pushed = np.array([[1, dt, dt * dt / 2], [0, 1, dt], [0, 0, 0.9]])
        moves = [np.kron(np.eye(2), steady), np.kron(np.eye(2), pushed)]
        for rate in (0.12, -0.12):
            s, c = np.sin(rate * dt), np.cos(rate * dt)
            turn = np.zeros((6, 6))
            turn[0, [0, 1, 4]] = 1, s / rate, -(1 - c) / rate
            turn[3, [3, 1, 4]] = 1, (1 - c) / rate, s / rate
            turn[1, [1, 4]], turn[4, [1, 4]] = (c, -s), (s, c)
            moves.append(turn)
        shake = np.array([dt * dt / 2, dt, 0.0])
        jerk = np.array([dt * dt / 2, dt, 1.0])
        noise = [
            np.kron(np.eye(2), np.outer(g, g)) * q
            for g, q in ((shake, 0.01), (jerk, 0.2), (shake, 0.05), (shake, 0.05))
        ]
        return jnp.asarray(np.stack(moves), jnp.float32), jnp.asarray(np.stack(noise), jnp.float32)

    stay = np.full((models, models), 0.05 / (models - 1))
    np.fill_diagonal(stay, 0.95)

    def of_track(start, measured, loud):
        """This follows one target."""
        move, noise = motions()
        switch = jnp.asarray(stay, jnp.float32)
        see = jnp.zeros((2, 6)).at[0, 0].set(1.0).at[1, 3].set(1.0)
        cover = loud * jnp.eye(2)

        def kalman(x, cov, move, noise, z):
            """This is one step of one filter."""
            x, cov = move @ x, move @ cov @ move.T + noise
            off = z - see @ x
            s = see @ cov @ see.T + cover
            gain = jnp.linalg.solve(s, see @ cov).T
            like = -0.5 * (off @ jnp.linalg.solve(s, off) + jnp.linalg.slogdet(s)[1] + 2 * float(np.log(2 * np.pi)))
            left = jnp.eye(6) - gain @ see
            return x + gain @ off, left @ cov @ left.T + gain @ cover @ gain.T, like

        def step(carry, z):
            """This mixes states, filters with each model, and weighs the models."""
            x, cov, log_chance = carry
            joint = jnp.log(switch) + log_chance[:, None]
            ahead = jax.nn.logsumexp(joint, axis=0)
            mix = jnp.exp(joint - ahead)
            mixed = jnp.einsum("ij,id->jd", mix, x)
            apart = x[:, None] - mixed
            spread = jnp.einsum("ij,ide->jde", mix, cov) + jnp.einsum("ij,ijd,ije->jde", mix, apart, apart)
            x, cov, like = jax.vmap(kalman, (0, 0, 0, 0, None))(mixed, spread, move, noise, z)
            log_chance = ahead + like
            total = jax.nn.logsumexp(log_chance)
            log_chance = log_chance - total
            chance = jnp.exp(log_chance)
            mean = chance @ x
            off = x - mean
            whole = jnp.einsum("i,ide->de", chance, cov + off[:, :, None] * off[:, None])
            return (x, cov, log_chance), (mean, jnp.diagonal(whole), chance, total)

        begin = jnp.broadcast_to(start, (models, 6)), jnp.broadcast_to(jnp.eye(6), (models, 6, 6))
        return lax.scan(step, (*begin, jnp.full(models, -float(np.log(models)))), measured)[1]

    def run(start, pushes, noise, loud):
        """This gives states, spreads and chances of models over time, likelihoods, and errors of places by step."""
        speed = start[:, None, [1, 4]] + jnp.cumsum(0.2 * pushes, axis=1) * dt
        place = start[:, None, [0, 3]] + jnp.cumsum(speed, axis=1) * dt
        loud = 0.3 + jax.nn.softplus(loud)
        mean, spread, chance, like = jax.vmap(of_track)(start, place + jnp.sqrt(loud)[:, None, None] * noise, loud)
        error = jnp.sqrt(jnp.mean(jnp.sum(jnp.square(mean[..., [0, 3]] - place), axis=-1), axis=0))
        return mean[:, -1], spread[:, -1], chance, jnp.sum(like, axis=1), error

    return Built(run, (normal(tracks, 6), normal(tracks, steps, 2), normal(tracks, steps, 2), normal(tracks)))


@program("stiff-chemistry-of-many-cells-by-rosenbrock-steps-while", GROUP)
def _stiff(size: Size) -> Built:
    """This program lets chemicals react in many cells of air, with rates that differ by many powers of ten.

    It is an adaptive Rosenbrock method as atmospheric models use (Shampine's `ode23s`; KPP): the Jacobian of each cell comes by
    forward differentiation, three linear systems share a matrix, and each cell chooses its own steps in a loop.
    """
    cells, species, reactions, most, end = pick(
        size, (1024, 16, 40, 40, 1.0), (192, 12, 30, 40, 1.0), (2, 3, 4, 4, 1.0)
    )
    rtol, atol, inner, outer = 2e-3, 1e-5, 1.0 / (2.0 + float(np.sqrt(2.0))), 6.0 + float(np.sqrt(2.0))

    def of_cell(rate, one, two, out, start):
        """This integrates one cell."""

        def slope(y):
            """This is the change of concentrations."""
            speed = rate * y[one] * y[two]
            change = jnp.zeros(species).at[one].add(-speed).at[two].add(-speed)
            return change.at[out].add(speed).at[(out + 1) % species].add(speed)

        def going(carry):
            """This tells whether the end is not yet reached."""
            t, _, _, k = carry
            return (t < end * (1 - 1e-6)) & (k < most)

        def step(carry):
            """This tries one step."""
            t, y, h, k = carry
            h = jnp.minimum(h, end - t)
            f0 = slope(y)
            matrix = jnp.eye(species) - h * inner * jax.jacfwd(slope)(y)
            factors = jax.scipy.linalg.lu_factor(matrix)
            k1 = jax.scipy.linalg.lu_solve(factors, f0)
            f1 = slope(y + 0.5 * h * k1)
            k2 = jax.scipy.linalg.lu_solve(factors, f1 - k1) + k1
            fresh = y + h * k2
            f2 = slope(fresh)
            k3 = jax.scipy.linalg.lu_solve(factors, f2 - outer * (k2 - f1) - 2 * (k1 - f0))
            error = h / 6 * (k1 - 2 * k2 + k3)
            scale = atol + rtol * jnp.maximum(jnp.abs(y), jnp.abs(fresh))
            size = jnp.sqrt(jnp.mean(jnp.square(error / scale)))
            good = size <= 1.0
            factor = jnp.clip(0.8 * (size + 1e-10) ** (-1 / 3), 0.2, 5.0)
            t, y = jnp.where(good, t + h, t), jnp.where(good, jnp.maximum(fresh, 0.0), y)
            return t, y, h * factor, k + 1

        t, y, _, k = lax.while_loop(going, step, (jnp.float32(0.0), start, jnp.float32(1e-3), jnp.int32(0)))
        return y, t, k, slope(y)

    def run(rate, warm, one, two, out, start):
        """This gives concentrations, times reached, the mean number of steps, last changes, and what each kind gained."""
        heat = 1.0 + 0.1 * jnp.tanh(warm)
        constants = jnp.exp(2.5 * rate - 1.0) * heat[:, None] ** 3
        start = jnp.exp(start - 1.0)
        y, t, k, change = jax.vmap(of_cell, (0, None, None, None, 0))(constants, one, two, out, start)
        return y, t, jnp.mean(k.astype(jnp.float32)), change, jnp.mean(y - start, axis=0)

    which = [integers(reactions, below=species) for _ in range(3)]
    return Built(run, (normal(reactions), normal(cells), *which, normal(cells, species)))


@program("monotonic-alignment-search-of-text-to-speech-frames", GROUP)
def _aligned(size: Size) -> Built:
    """This program aligns letters of texts with frames of speech, so that no letter is skipped and none comes back.

    It is monotonic alignment search of Glow-TTS (Kim, 2020; also VITS): likelihoods of all pairs come by two products, the best
    sums by a scan over frames, the path by a loop from the end, and losses of frames and of durations follow.
    """
    b, text, frames, d = pick(size, (32, 190, 800, 80), (24, 110, 420, 80), (2, 3, 5, 4))

    def run(mean, logs, latent, guess, short, brief):
        """This gives the path as durations, the best sums, aligned means, and both losses."""
        letters, length = text - short, frames - brief
        real = jnp.arange(text) < letters[:, None]
        heard = jnp.arange(frames) < length[:, None]
        logs = 0.3 * logs
        inverse = jnp.exp(-2 * logs)
        constant = jnp.sum(-0.5 * float(np.log(2 * np.pi)) - logs - 0.5 * mean**2 * inverse, axis=-1)
        pairs = jnp.einsum("btd,bfd->btf", inverse, -0.5 * latent**2) + jnp.einsum(
            "btd,bfd->btf", mean * inverse, latent
        )
        pairs = pairs + constant[..., None]
        allowed = real[:, :, None] & heard[:, None]

        def forward(best, seen):
            """This adds one frame to the best sums, and tells where the path comes from the letter before."""
            value, at = seen
            moved = jnp.pad(best, ((0, 0), (1, 0)), constant_values=-1e9)[:, :-1]
            start = jnp.where(jnp.arange(text) == 0, 0.0, -1e9)
            before = jnp.where(at == 0, start, jnp.maximum(best, moved))
            return jnp.where(real, value + before, -1e9), (before, (moved > best) & (at > 0))

        columns = pairs.transpose(2, 0, 1)
        first = jnp.full((b, text), -1e9)
        _, (before, came) = lax.scan(forward, first, (columns, jnp.arange(frames)))
        sums = columns + before

        def back(k, carry):
            """This goes one frame back along the path."""
            at, path = carry
            f = frames - 1 - k
            on = f < length
            path = path.at[f].set(jnp.where(on, at, -1))
            moves = jnp.take_along_axis(came[f], at[:, None], axis=1)[:, 0]
            return jnp.where(on & moves, jnp.maximum(at - 1, 0), at), path

        start = letters - 1, jnp.full((frames, b), -1, jnp.int32)
        path = lax.fori_loop(0, frames, back, start)[1].T
        duration = jnp.sum(path[:, :, None] == jnp.arange(text), axis=1).astype(jnp.float32)
        index = jnp.maximum(path, 0)[..., None]
        aligned, spread = jnp.take_along_axis(mean, index, axis=1), jnp.take_along_axis(logs, index, axis=1)
        miss = spread + 0.5 * jnp.exp(-2 * spread) * (latent - aligned) ** 2
        loss = jnp.sum(miss * heard[..., None]) / (jnp.sum(length) * d) + 0.5 * float(np.log(2 * np.pi))
        wanted = jnp.log(duration + 1e-6) * real
        apart = jnp.sum(jnp.square(guess * real - wanted)) / jnp.sum(letters)
        top = jnp.take_along_axis(sums, (length - 1)[None, :, None], axis=0)[0]
        top = jnp.take_along_axis(top, (letters - 1)[:, None], axis=1)[:, 0]
        inside = jnp.sum(jnp.where(allowed, pairs, 0.0), axis=(1, 2)) / (letters * length)
        return duration, top, aligned, loss, apart, inside

    inputs = normal(b, text, d), normal(b, text, d), normal(b, frames, d), normal(b, text)
    return Built(run, (*inputs, integers(b, below=max(text // 4, 1)), integers(b, below=max(frames // 4, 1))))
