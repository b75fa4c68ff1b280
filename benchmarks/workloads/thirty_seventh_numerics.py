"""First arrivals of waves, quadratic programs and antennas in channels, the thirty-seventh set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import cho_factor, cho_solve

from benchmarks.workloads.registry import Built, Random, Size, integers, normal, pick, program

GROUP = "thirty-seventh"


@program("first-arrivals-of-shots-by-upwind-rounds-and-rays-that-mend-the-ground-while", GROUP)
def _arrivals(size: Size) -> Built:
    """This program mends a picture of the ground by the times at which waves of shots arrive first.

    It is travel-time tomography: the eikonal equation is solved by Godunov's upwind rounds until nothing changes (as in the fast
    iterative method of Jeong, 2008), rays go back down the slope of times, and cells share what is too late or early (SIRT).
    """
    n, shots, receivers, rounds, burst = pick(size, (96, 24, 96, 2, 8), (72, 6, 32, 2, 8), (6, 2, 3, 2, 2))
    far, most = 1e3, 6 * n // burst + 2
    steps = 3 * n // 2

    def smoothed(x):
        """This is a mean over near cells, twice."""
        for _ in range(2):
            wide = jnp.pad(x, 1, mode="edge")
            x = (wide[:-2] + wide[1:-1] + wide[2:]) / 3
            x = (x[:, :-2] + x[:, 1:-1] + x[:, 2:]) / 3
        return x

    def times(slow, source):
        """This gives first arrivals of all shots at all cells [shots, n, n], and how many bursts of rounds it took."""
        start = jnp.full((shots, n, n), far).at[jnp.arange(shots), source[:, 0], source[:, 1]].set(0.0)

        def once(_, t):
            """This updates each cell by its earliest neighbours."""
            wide = jnp.pad(t, ((0, 0), (1, 1), (1, 1)), constant_values=far)
            a = jnp.minimum(wide[:, :-2, 1:-1], wide[:, 2:, 1:-1])
            b = jnp.minimum(wide[:, 1:-1, :-2], wide[:, 1:-1, 2:])
            both = 0.5 * (a + b + jnp.sqrt(jnp.maximum(2 * slow**2 - (a - b) ** 2, 0.0)))
            return jnp.minimum(t, jnp.where(jnp.abs(a - b) < slow, both, jnp.minimum(a, b) + slow))

        def several(carry):
            """This does a burst of rounds."""
            t, _, k = carry
            fresh = lax.fori_loop(0, burst, once, t)
            return fresh, jnp.max(t - fresh), k + 1

        def changing(carry):
            """This tells whether times still change."""
            return (carry[1] > 1e-4) & (carry[2] < most)

        t, _, k = lax.while_loop(changing, several, (start, jnp.float32(far), jnp.int32(0)))
        return t, k

    def between(x, place):
        """This reads a picture between its cells, at places [..., 2]."""
        place = jnp.clip(place, 0.0, n - 1.001)
        low = jnp.floor(place).astype(jnp.int32)
        f = place - low
        i, j = low[..., 0], low[..., 1]
        top = x[i, j] * (1 - f[..., 1]) + x[i, j + 1] * f[..., 1]
        return (
            top * (1 - f[..., 0]) + x[i + 1, j + 1] * f[..., 0] * f[..., 1] + x[i + 1, j] * f[..., 0] * (1 - f[..., 1])
        )

    def rays(t, source, receiver):
        """This follows rays of one shot from receivers to the source: places [steps, receivers, 2] and lengths of steps."""
        down, right = jnp.gradient(t)

        def step(place, _):
            """This goes one step down the slope."""
            slope = jnp.stack([between(down, place), between(right, place)], axis=-1)
            slope = slope * lax.rsqrt(jnp.sum(slope * slope, axis=-1, keepdims=True) + 1e-9)
            gap = source - place
            left = jnp.sqrt(jnp.sum(gap * gap, axis=-1, keepdims=True) + 1e-12)
            long = jnp.minimum(left, 1.0)
            fresh = jnp.clip(place + jnp.where(left < 2.0, gap / left, -slope) * long, 0.0, n - 1.0)
            return fresh, (0.5 * (place + fresh), jnp.where(left > 1e-3, long, 0.0)[..., 0])

        return lax.scan(step, receiver.astype(jnp.float32), None, length=steps)[1]

    def run(hidden, source, receiver):
        """This gives the mended ground, misfits of rounds, how well cells are met by rays, and rounds of the solver."""
        true = 1.0 + 0.3 * jnp.tanh(3 * smoothed(hidden))
        sight = source, jnp.arange(shots)[:, None], receiver[:, 0], receiver[:, 1]
        seen = times(true, source)[0][sight[1:]]

        def mend(slow, _):
            """This is one round of mending."""
            t, k = times(slow, source)
            late = seen - t[sight[1:]]
            place, long = jax.vmap(rays, in_axes=(0, 0, None))(t, source.astype(jnp.float32), receiver)
            cell = jnp.round(place).astype(jnp.int32)
            total = jnp.sum(long, axis=1, keepdims=True) + 1e-6
            share = long * (late[:, None] / total)
            met = jnp.zeros((n, n)).at[cell[..., 0], cell[..., 1]].add(long)
            push = jnp.zeros((n, n)).at[cell[..., 0], cell[..., 1]].add(share)
            slow = jnp.clip(slow + smoothed(push) / (smoothed(met) + 0.1), 0.5, 1.6)
            return slow, (jnp.sqrt(jnp.mean(late**2)), met, k)

        slow, (misfit, met, k) = lax.scan(mend, jnp.ones((n, n)), None, length=rounds)
        return slow, misfit, met[-1], k, jnp.sqrt(jnp.mean((slow - true) ** 2))

    return Built(run, (normal(n, n), integers(shots, 2, below=n), integers(receivers, 2, below=n)))


@program("quadratic-programs-by-interior-steps-as-a-layer-implicit-slopes-grad", GROUP)
def _programs(size: Size) -> Built:
    """This program gives slopes of a network whose last layer solves a quadratic program for each example.

    It is OptNet (Amos, 2017; also qpax of Tracy, 2024): interior steps with a guess and a correction (Mehrotra, 1992) by Cholesky
    factors of the reduced equations run until all gaps are small, and slopes come from one more solve at the answer.
    """
    b, features, wide, n, m, e = pick(size, (128, 256, 512, 32, 48, 6), (96, 64, 128, 28, 44, 6), (2, 3, 4, 4, 5, 1))
    most = 20

    def factors(square, g, a, ratio):
        """This gives Cholesky factors of the reduced equations, and what equalities need."""
        whole = cho_factor(square + (g.T * ratio) @ g + 1e-6 * jnp.eye(n), lower=True)
        across = cho_solve(whole, a.T)
        return whole, across, cho_factor(a @ across + 1e-7 * jnp.eye(e), lower=True)

    def reduced(found, a, one, two):
        """This solves the reduced equations for a step of the answer and of prices of equalities."""
        whole, across, small = found
        price = cho_solve(small, across.T @ one - two)
        return cho_solve(whole, one) - across @ price, price

    def longest(x, step):
        """This is the longest step that keeps all parts above nought."""
        return jnp.minimum(1.0, 0.99 * jnp.min(jnp.where(step < 0, -x / jnp.minimum(step, -1e-12), jnp.inf)))

    def solve(square, g, a, limit, level, cost):
        """This solves one program: the answer, room and prices of limits, prices of equalities, and how many steps it took."""

        def residuals(x, s, z, y):
            """This tells how far the conditions are from being met."""
            return square @ x + cost + g.T @ z + a.T @ y, g @ x + s - limit, a @ x - level

        def step(carry):
            """This is one guess and its correction."""
            x, s, z, y, _, k = carry
            slope, room, equal = residuals(x, s, z, y)
            ratio, gap = z / s, jnp.dot(s, z) / m
            found = factors(square, g, a, ratio)

            def direction(product):
                """This gives steps of all parts for a wanted product of rooms and prices."""
                one = -slope - g.T @ (ratio * room - product / s)
                dx, dy = reduced(found, a, one, -equal)
                ds = -room - g @ dx
                return dx, ds, -(product + z * ds) / s, dy

            _, ds, dz, _ = direction(s * z)
            guess = jnp.dot(s + longest(s, ds) * ds, z + longest(z, dz) * dz) / m
            centre = (guess / gap) ** 3
            dx, ds, dz, dy = direction(s * z + ds * dz - centre * gap)
            far = jnp.minimum(longest(s, ds), longest(z, dz))
            x, s, z, y = x + far * dx, s + far * ds, z + far * dz, y + far * dy
            worst = jnp.max(jnp.abs(jnp.concatenate([*residuals(x, s, z, y), jnp.dot(s, z)[None] / m])))
            return x, s, z, y, worst, k + 1

        def unsettled(carry):
            """This tells whether conditions are not met yet."""
            return (carry[4] > 2e-4) & (carry[5] < most)

        start = jnp.zeros(n), jnp.ones(m), jnp.ones(m), jnp.zeros(e), jnp.float32(1.0), jnp.int32(0)
        return lax.while_loop(unsettled, step, start)

    def run(p, square, g, a, slack, feature, true):
        """This gives the loss, slopes, answers, which limits bind, and how many steps and how much error each program had."""
        square = square @ square.T / n + 0.1 * jnp.eye(n)
        start = 0.1 * jnp.ones(n)
        limit, level = g @ start + jnp.abs(slack) + 0.1, a @ start
        solved = jax.vmap(solve, in_axes=(None, None, None, None, None, 0))

        @jax.custom_vjp
        def layer(cost):
            """This solves programs of all examples."""
            return solved(square, g, a, limit, level, cost)

        def forward(cost):
            """This keeps the rooms and the prices."""
            out = layer(cost)
            return out, (out[1], out[2])

        def backward(kept, slope):
            """This solves the same equations once more for slopes of costs."""

            def one(s, z, slope):
                """This is the solve of one example."""
                found = factors(square, g, a, z / s)
                return reduced(found, a, -slope, jnp.zeros(e))[0]

            return (jax.vmap(one)(*kept, slope[0]),)

        layer.defvjp(forward, backward)

        def loss(p):
            """This is the mean squared distance of answers from the true ones."""
            y = jax.nn.relu(feature @ p["one"] + p["bias"])
            y = jax.nn.relu(y @ p["two"])
            x, s, z, _, worst, k = layer(y @ p["last"])
            return jnp.mean((x - true) ** 2), (x, z > s, worst, k)

        (value, out), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        return value, slopes, out

    p = {"one": normal(features, wide, scale=features**-0.5), "bias": normal(wide, scale=0.1)}
    p |= {"two": normal(wide, wide, scale=wide**-0.5), "last": normal(wide, n, scale=2 * wide**-0.5)}
    parts = normal(n, n), normal(m, n, scale=n**-0.5), normal(e, n, scale=n**-0.5), normal(m, scale=0.5)
    return Built(run, (p, *parts, normal(b, features), normal(b, n, scale=0.5)))


@program("antennas-in-channels-by-overlapped-windows-then-products-of-all-pairs-scan", GROUP)
def _antennas(size: Size) -> Built:
    """This program makes visibilities of a radio telescope from raw samples of its antennas.

    It is an FX correlator with a polyphase filter bank (Price, 2016; xGPU of Clark, 2012): windows overlap eight times, delays are
    turned back, voltages are rounded to four bits, channels whose kurtosis is odd are left out, and products add up over blocks.
    """
    inputs, channels, spectra, blocks = pick(size, (64, 1024, 32, 6), (12, 512, 24, 6), (3, 8, 4, 2))
    taps, wide = 8, 2 * channels
    place = (np.arange(taps * wide) + 0.5) / wide - taps / 2
    window = jnp.asarray((np.sinc(place) * np.hanning(taps * wide)).reshape(taps, wide), jnp.float32)
    frames = blocks * spectra + taps - 1

    def run(samples, gain, delay, rate):
        """This gives mean visibilities, shares of data kept, spectra and kurtoses, and delays at which pairs agree best."""
        pieces = samples.reshape(inputs, frames, wide)
        frequency = jnp.arange(channels) / wide

        def block(carry, k):
            """This adds one block of spectra."""
            sums, counts = carry
            mine = lax.dynamic_slice_in_dim(pieces, k * spectra, spectra + taps - 1, axis=1)
            mine = mine.astype(jnp.float32) - 63.5
            mixed = sum(mine[:, j : j + spectra] * window[j] for j in range(taps))
            x = jnp.fft.rfft(mixed, axis=-1)[..., :channels]
            time = (k * spectra + jnp.arange(spectra)) * 1e-3
            late = 4 * delay[:, None] + rate[:, None] * time
            x = x * jnp.exp(-2j * np.pi * late[..., None] * frequency)
            power = jnp.square(x.real) + jnp.square(x.imag)
            first, second = jnp.sum(power, axis=1), jnp.sum(power * power, axis=1)
            odd = (spectra + 1) / (spectra - 1) * (spectra * second / (first * first + 1e-6) - 1)
            good = (jnp.abs(odd - 1) < 3 * (4 / spectra) ** 0.5).astype(jnp.float32)
            level = 2.5 * gain / jnp.sqrt(jnp.mean(first, axis=1, keepdims=True) / spectra + 1e-6)
            x = x * level[:, None]
            x = lax.complex(*(jnp.clip(jnp.round(z), -7, 7) for z in (x.real, x.imag))) * good[:, None]
            sums = sums + jnp.einsum("itc,jtc->ijc", x, x.conj())
            return (sums, counts + spectra * good[:, None] * good), (first / spectra, odd)

        start = jnp.zeros((inputs, inputs, channels), jnp.complex64), jnp.zeros((inputs, inputs, channels))
        (sums, counts), (power, odd) = lax.scan(block, start, jnp.arange(blocks))
        one, two = np.tril_indices(inputs)
        seen = (sums / jnp.maximum(counts, 1.0))[one, two]
        own = jnp.diagonal(sums / jnp.maximum(counts, 1.0)).real.T
        scaled = seen * lax.rsqrt(own[one] * own[two] + 1e-6)
        lags = jnp.abs(jnp.fft.fftshift(jnp.fft.ifft(scaled, 2 * channels, axis=-1), axes=-1))
        best = jnp.argmax(lags, axis=-1) - channels
        return seen, counts[one, two] / (blocks * spectra), power, jnp.mean(odd, axis=0), best, jnp.max(lags, axis=-1)

    samples = Random((inputs, frames * wide), jnp.dtype(jnp.int8), below=128)
    gain = normal(inputs, channels, scale=0.05, offset=1.0)
    return Built(run, (samples, gain, normal(inputs), normal(inputs)))
