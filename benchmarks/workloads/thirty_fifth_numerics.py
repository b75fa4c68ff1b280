"""Growing errors, patches that are alike, and shrunken slopes, the thirty-fifth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program

GROUP = "thirty-fifth"


@program("how-fast-small-errors-grow-along-a-ring-of-weather-by-turned-frames", GROUP)
def _growing(size: Size) -> Built:
    """This program tells how fast errors grow in many directions of a chaotic ring, for several states of the weather.

    It is the method of Benettin (1980) for Lorenz's ring of 1996: frames of directions follow states by derivatives of Runge-Kutta
    steps, are made orthogonal again by QR every few steps, and logarithms of the diagonal give exponents and a dimension.
    """
    members, n, many, turns, steps, dt = pick(
        size, (8, 128, 24, 8, 5, 0.02), (4, 64, 16, 8, 5, 0.02), (2, 6, 3, 2, 2, 0.02)
    )

    def slope(x, force):
        """This is the change of the ring."""
        return (jnp.roll(x, -1) - jnp.roll(x, 2)) * jnp.roll(x, 1) - x + force

    def step(x, force):
        """This is a step of Runge and Kutta."""
        k1 = slope(x, force)
        k2 = slope(x + 0.5 * dt * k1, force)
        k3 = slope(x + 0.5 * dt * k2, force)
        k4 = slope(x + dt * k3, force)
        return x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def of_member(x, frame, force):
        """This follows one state with its frame."""

        def follow(carry, _):
            """This moves state and frame by one step."""
            x, frame = carry
            x, push = jax.linearize(lambda x: step(x, force), x)
            return (x, jax.vmap(push, in_axes=1, out_axes=1)(frame)), None

        def turn(carry, _):
            """This moves a few steps, and makes the frame orthogonal again."""
            (x, frame), _ = lax.scan(follow, carry, None, length=steps)
            frame, upper = jnp.linalg.qr(frame)
            return (x, frame), jnp.log(jnp.abs(jnp.diagonal(upper)) + 1e-12)

        (x, frame), grown = lax.scan(turn, (x, jnp.linalg.qr(frame)[0]), None, length=turns)
        return x, jnp.sum(grown, axis=0) / (turns * steps * dt), jnp.cumsum(grown, axis=0), jnp.square(frame)

    def run(start, frame, force):
        """This gives states, exponents, growth of volumes by turn, the entropy, and where errors sit."""
        force = 8.0 + 0.5 * jnp.tanh(force)
        x, rate, grown, where = jax.vmap(of_member)(2.0 + 3.0 * start, frame, force)
        volume = jnp.cumsum(rate, axis=1)
        return x, rate, grown, jnp.sum(jnp.maximum(rate, 0.0), axis=1), jnp.max(volume, axis=1), jnp.sum(where, axis=2)

    return Built(run, (normal(members, n), normal(members, n, many), normal(members)))


@program("photographs-cleaned-by-means-of-pixels-with-patches-alike", GROUP)
def _alike(size: Size) -> Built:
    """This program takes noise off photographs by means over pixels whose patches are alike, with noise told from the photograph.

    It is non-local means (Buades, 2005; as `denoise_nl_means` in scikit-image and `fastNlMeansDenoising` in OpenCV): for each shift
    in a window, squared differences are summed over patches, and make weights; the pixel itself gets the largest of them.
    """
    b, high, wide, reach, patch = pick(size, (2, 512, 512, 7, 5), (1, 128, 128, 4, 5), (1, 8, 9, 1, 3))
    window = 2 * reach + 1

    def patches(x):
        """This is the mean over patches [b, rows, columns]."""
        padded = jnp.pad(x, ((0, 0), (patch // 2, patch // 2), (patch // 2, patch // 2)), mode="edge")
        return lax.reduce_window(padded, 0.0, lax.add, (1, patch, patch), (1, 1, 1), "VALID") / patch**2

    def run(coarse, noise, loud):
        """This gives cleaned photographs, the noise that was found, decibels before and after, and sums of weights."""
        clean = jax.image.resize(jax.nn.sigmoid(2 * coarse), (b, high, wide, 3), "cubic")
        noisy = clean + (0.04 + 0.04 * jax.nn.sigmoid(loud))[:, None, None, None] * noise
        grey = noisy @ jnp.array([0.299, 0.587, 0.114])
        kernel = jnp.array([[1.0, -2.0, 1.0], [-2.0, 4.0, -2.0], [1.0, -2.0, 1.0]])
        rough = jax.vmap(lambda x: jax.scipy.signal.convolve2d(x, kernel, mode="valid"))(grey)
        sigma = float(np.sqrt(np.pi / 2) / 6) * jnp.mean(jnp.abs(rough), axis=(1, 2)) / 0.669
        variance, strength = (sigma**2)[:, None, None], (0.8 * sigma)[:, None, None] ** 2
        padded = jnp.pad(noisy, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="reflect")

        def shift(k, carry):
            """This adds what one shift gives."""
            total, weights, largest = carry
            other = lax.dynamic_slice(padded, (0, k // window, k % window, 0), noisy.shape)
            apart = patches(jnp.mean(jnp.square(noisy - other), axis=-1))
            weigh = jnp.exp(-jnp.maximum(apart - 2 * variance, 0.0) / strength)
            weigh = jnp.where(k == window**2 // 2, 0.0, weigh)
            return total + weigh[..., None] * other, weights + weigh, jnp.maximum(largest, weigh)

        zero = jnp.zeros((b, high, wide))
        total, weights, largest = lax.fori_loop(0, window**2, shift, (jnp.zeros_like(noisy), zero, zero))
        cleaned = (total + largest[..., None] * noisy) / (weights + largest + 1e-8)[..., None]
        cleaned = jnp.where(largest[..., None] > 1e-6, cleaned, noisy)

        def decibels(x):
            """This tells how near a photograph is to the clean one."""
            return -10 * jnp.log10(jnp.mean(jnp.square(x - clean), axis=(1, 2, 3)))

        return cleaned, sigma, decibels(noisy), decibels(cleaned), weights

    return Built(run, (normal(b, high // 8, wide // 8, 3), normal(b, high, wide, 3), normal(b)))


@program("slopes-shrunk-to-nought-or-left-alone-by-drawing-each-part-in-turn", GROUP)
def _shrunk(size: Size) -> Built:
    """This program draws the slopes of a regression of which most are nearly nought, with many chains at once.

    It is Gibbs sampling of the horseshoe prior (Carvalho, 2010; Makalic and Schmidt, 2016; as bhs and bayesreg): slopes come by a
    Cholesky factor, scales of slopes and of all of them are inverse gammas by helpers, and chains are compared by their spread.
    """
    chains, n, p, sweeps, warm = pick(size, (32, 256, 96, 16, 6), (12, 192, 64, 24, 8), (2, 6, 3, 4, 1))

    def run(seed, table, true, noise, start):
        """This gives means and spreads of slopes, how much they are shrunk, agreement of chains, and likelihoods."""
        slopes = jnp.where(jnp.abs(true) > 1.2, 2.0 * true, 0.0)
        goal = table @ slopes + noise
        square, cross = table.T @ table, table.T @ goal

        def sweep(carry, key):
            """This draws each part once."""
            beta, local, whole, sigma, help_local, help_whole = carry
            keys = jax.random.split(key, 7)
            chol = jnp.linalg.cholesky(square + jnp.diag(1.0 / (local * whole)))
            mean = jax.scipy.linalg.cho_solve((chol, True), cross)
            z = jax.random.normal(keys[0], (p,))
            beta = mean + jnp.sqrt(sigma) * jax.scipy.linalg.solve_triangular(chol.T, z, lower=False)
            rest = jnp.sum(jnp.square(goal - table @ beta))
            shape = 0.5 * (n + p)
            sigma = 0.5 * (rest + jnp.sum(beta**2 / (local * whole))) / jax.random.gamma(keys[1], shape)
            local = (1 / help_local + beta**2 / (2 * whole * sigma)) / jax.random.exponential(keys[2], (p,))
            local = jnp.clip(local, 1e-4, 1e4)
            scale = 1 / help_whole + jnp.sum(beta**2 / local) / (2 * sigma)
            whole = jnp.clip(scale / jax.random.gamma(keys[3], 0.5 * (p + 1)), 1e-4, 1e2)
            help_local = (1 + 1 / local) / jax.random.exponential(keys[4], (p,))
            help_whole = (1 + 1 / whole) / jax.random.exponential(keys[5])
            shrunk = 1 / (1 + local * whole * jnp.diagonal(square))
            return (beta, local, whole, sigma, help_local, help_whole), (beta, shrunk, jnp.log(sigma), jnp.log(whole))

        def chain(key, beta):
            """This runs one chain."""
            one = jnp.ones(())
            begin = beta, jnp.ones(p), one, one, jnp.ones(p), one
            return lax.scan(sweep, begin, jax.random.split(key, sweeps))[1]

        beta, shrunk, noise_level, whole = jax.vmap(chain)(jax.random.split(jax.random.key(seed), chains), start)
        kept = beta[:, warm:]
        within = jnp.mean(jnp.var(kept, axis=1, ddof=1), axis=0)
        between = jnp.var(jnp.mean(kept, axis=1), axis=0)
        agree = jnp.sqrt(((sweeps - warm - 1) / (sweeps - warm) * within + between) / (within + 1e-12))
        mean = jnp.mean(kept, axis=(0, 1))
        left = goal - jnp.einsum("np,csp->csn", table, kept)
        level = noise_level[:, warm:, None]
        like = -0.5 * (left**2 / jnp.exp(level) + level + float(np.log(2 * np.pi)))
        flat = like.reshape(-1, n)
        points = jax.nn.logsumexp(flat, axis=0) - float(np.log(flat.shape[0]))
        information = -2 * (points - jnp.var(flat, axis=0))
        spread = jnp.std(kept.reshape(-1, p), axis=0)
        return mean, spread, jnp.mean(shrunk[:, warm:], axis=(0, 1)), agree, information, noise_level, whole

    return Built(run, (integers(below=1000), normal(n, p), normal(p), normal(n), normal(chains, p)))
