"""Cuts of series, spectra of similar places and wobbling stars, the thirty-fourth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program

GROUP = "thirty-fourth"


@program("series-cut-into-a-few-sloping-pieces-by-least-sums-from-both-ends", GROUP)
def _cut(size: Size) -> Built:
    """This program tells what it costs to cut series into a few pieces with a line each, and what a cut at each place adds.

    It is segmented least squares (Bellman, 1961; Bai and Perron, 2003; as in ruptures): sums up to each place give the cost of all
    pieces, least sums over last cuts are found from both ends for each number of pieces, and all are compared by a penalty.
    """
    b, n, pieces = pick(size, (16, 1536, 6), (6, 640, 6), (1, 13, 6))
    place = (np.arange(n) - (n - 1) / 2) / n

    def sums(x):
        return jnp.pad(jnp.cumsum(x, axis=-1), [(0, 0)] * (x.ndim - 1) + [(1, 0)])

    def costs(series):
        """These are costs [n + 1, n + 1] of pieces that begin at one place and end before another."""
        at = jnp.asarray(place, jnp.float32)
        y, yy, xy, x, xx = (sums(z) for z in (series, series * series, series * at, at, at * at))
        y, yy, xy, x, xx = (z[None] - z[:, None] for z in (y, yy, xy, x, xx))
        many = jnp.arange(n + 1.0) - jnp.arange(n + 1.0)[:, None]
        safe = jnp.maximum(many, 1.0)
        slope = (xy - x * y / safe) / (xx - x * x / safe + 1e-3)
        rest = yy - y * y / safe - slope * (xy - x * y / safe) * (1 - 1e-3)
        return jnp.where(many >= 2, jnp.maximum(rest, 0.0) + 0.05, 1e6)

    def of_series(step, noise):
        """This is the whole work on one series."""
        jumps = jnp.cumsum(jnp.where(jnp.abs(step) > 2.6, step, 0.0))
        series = 0.4 * jumps + 0.5 * noise + at_rest(noise)
        series = 0.5 * (series - jnp.mean(series))
        cost = costs(series)

        def onward(best, _):
            best = jnp.min(best[:, None] + cost, axis=0)
            return best, best

        def backward(best, _):
            best = jnp.min(cost + best[None], axis=1)
            return best, best

        none = jnp.full(n + 1, 1e6)
        _, fore = lax.scan(onward, none.at[0].set(0.0), None, length=pieces)
        _, back = lax.scan(backward, none.at[n].set(0.0), None, length=pieces)
        whole = fore[:, n]
        through = [jnp.min(fore[:m] + back[:m][::-1], axis=0) - whole[m] for m in range(1, pieces)]
        through = jnp.minimum(jnp.stack(through), 50.0)
        law = jax.nn.softmax(-through / 2.0, axis=1)
        law = law @ jnp.arange(n + 1.0), -jnp.sum(law * jnp.log(law + 1e-9), axis=1)
        penalty = n * jnp.log(whole / n) + 3 * jnp.arange(1, pieces + 1) * float(np.log(n))
        return whole, through, law, jax.nn.softmax(-0.05 * penalty)

    def at_rest(noise):
        return 0.2 * jnp.sin(jnp.arange(n) * 0.02 + noise[0])

    def run(step, noise):
        """This gives costs by number of pieces, what cuts add, where cuts lie on the whole, and how likely numbers are."""
        return jax.vmap(of_series)(step, noise)

    return Built(run, (normal(b, n), normal(b, n)))


@program("spectra-of-similar-places-and-log-determinants-by-short-runs-from-random-signs", GROUP)
def _spectra(size: Size) -> Built:
    """This program tells how eigenvalues of a large table of likenesses lie, and its log-determinants, without taking it apart.

    It is Lanczos quadrature (Ubaru, 2017; as in gpytorch and matfree): runs from random signs are kept at right angles to all that
    came before, small tables with three diagonals are taken apart, and their weights give means of any function of the spectrum.
    """
    n, d, probes, steps, grid, noises = pick(
        size, (8192, 6, 16, 20, 256, 8), (1024, 4, 8, 14, 64, 6), (9, 2, 2, 3, 5, 2)
    )

    def run(place, sign, noise):
        """This gives log-determinants with their spread, the density, and the small tables' diagonals."""
        square = jnp.sum(place * place, axis=1)
        apart = jnp.maximum(square[:, None] + square - 2 * jnp.matmul(place, place.T, precision="highest"), 0.0)
        apart = jnp.where(jnp.eye(n, dtype=bool), 0.0, apart)
        like = jnp.exp(-1.5 * jnp.sqrt(apart + 1e-6))
        degree = lax.rsqrt(jnp.sum(like, axis=1))
        like = degree[:, None] * like * degree * 8.0

        def step(k, carry):
            basis, now, before, side, middles, sides = carry
            basis = basis.at[k].set(now)
            fresh = jnp.matmul(like, now, precision="highest") - side * before
            middle = jnp.sum(fresh * now, axis=0)
            fresh = fresh - middle * now
            for _ in range(2):
                fresh = fresh - jnp.einsum("knp,kp->np", basis, jnp.einsum("knp,np->kp", basis, fresh))
            side = jnp.sqrt(jnp.sum(fresh * fresh, axis=0))
            return basis, fresh / (side + 1e-9), now, side, middles.at[k].set(middle), sides.at[k].set(side)

        start = (2.0 * sign - 1.0).astype(jnp.float32).T * n**-0.5
        zero = jnp.zeros((steps, probes))
        begin = (jnp.zeros((steps, n, probes)), start, jnp.zeros((n, probes)), jnp.zeros(probes), zero, zero)
        *_, middles, sides = lax.fori_loop(0, steps, step, begin)
        small = jax.vmap(jnp.diag)(middles.T)
        off = jax.vmap(lambda s: jnp.diag(s, 1) + jnp.diag(s, -1))(sides[:-1].T)
        value, vector = jnp.linalg.eigh(small + off)
        weigh = jnp.square(vector[:, 0])
        shift = 0.05 + jax.nn.softplus(noise)
        logs = jnp.sum(weigh * jnp.log(jnp.maximum(value, 0.0) + shift[:, None, None]), axis=-1)
        spot = jnp.linspace(0.0, 9.0, grid)
        bell = jnp.exp(-0.5 * jnp.square((spot[:, None, None] - value) / 0.1)) / (0.1 * float(np.sqrt(2 * np.pi)))
        density = jnp.mean(jnp.sum(bell * weigh, axis=-1), axis=1)
        powers = jnp.sum(weigh * value[None] ** jnp.arange(1, 5)[:, None, None], axis=-1)
        return jnp.mean(logs, axis=1), jnp.std(logs, axis=1), density, powers, middles[:3], sides[:3]

    return Built(run, (normal(n, d), integers(probes, n, below=2), normal(noises)))


@program("stars-that-wobble-on-oblong-orbits-sought-on-a-grid-of-periods-while", GROUP)
def _wobble(size: Size) -> Built:
    """This program seeks planets in how stars move to and fro, on a grid of periods, of how oblong orbits are, and of their starts.

    It is the Keplerian periodogram (Zechmeister and Kürster, 2009; as in PyAstronomy and rvsearch): Kepler's equation is solved by
    Newton's steps until all is still, and for each orbit a constant and two waves are fitted to speeds by sums over nights.
    """
    stars, nights, periods, shapes, starts = pick(size, (2, 96, 1024, 8, 16), (2, 40, 96, 4, 8), (1, 9, 4, 2, 2))
    oblong = np.linspace(0.0, 0.7, shapes).astype(np.float32)[:, None, None]
    begin = (np.arange(starts) / starts).astype(np.float32)[:, None]

    def kepler(mean):
        """This gives true angles of mean angles [shapes, starts, nights]."""

        def going(carry):
            _, change, k = carry
            return (jnp.max(change) > 1e-5) & (k < 16)

        def newton(carry):
            angle, _, k = carry
            change = (angle - oblong * jnp.sin(angle) - mean) / (1 - oblong * jnp.cos(angle))
            return angle - change, jnp.abs(change), k + 1

        first = mean + 0.85 * oblong * jnp.sign(jnp.sin(mean))
        angle = lax.while_loop(going, newton, (first, jnp.ones_like(first), 0))[0]
        cos = (jnp.cos(angle) - oblong) / (1 - oblong * jnp.cos(angle))
        sin = jnp.sqrt(1 - oblong**2) * jnp.sin(angle) / (1 - oblong * jnp.cos(angle))
        return cos, sin

    def of_star(night, speed, weigh):
        """This is the work on one star."""
        weigh = weigh / jnp.sum(weigh)
        speed = speed - jnp.sum(weigh * speed)
        level = jnp.sum(weigh * speed * speed)

        def of_period(period):
            turn = night / period + begin
            cos, sin = kepler(2 * jnp.pi * (turn - jnp.floor(turn)) * jnp.ones((shapes, 1, 1)))
            cos = cos - jnp.sum(weigh * cos, axis=-1, keepdims=True)
            sin = sin - jnp.sum(weigh * sin, axis=-1, keepdims=True)
            cc, ss, cs, yc, ys = (
                jnp.sum(weigh * z, axis=-1) for z in (cos * cos, sin * sin, cos * sin, speed * cos, speed * sin)
            )
            cc, ss = cc + 1e-2, ss + 1e-2
            power = (ss * yc**2 + cc * ys**2 - 2 * cs * yc * ys) / ((cc * ss - cs**2) * level)
            law = jax.nn.softmax((30.0 * power).reshape(-1)).reshape(shapes, starts)
            span = jnp.sqrt((ss * yc - cs * ys) ** 2 + (cc * ys - cs * yc) ** 2) / (cc * ss - cs**2)
            shape = jnp.sum(law * oblong[..., 0])
            return jnp.max(power), jax.scipy.special.logsumexp(30.0 * power), shape, jnp.sum(law * span)

        period = jnp.geomspace(4.0, 100.0, periods)
        power, whole, shape, span = jax.vmap(of_period)(period)
        law = jax.nn.softmax(whole)
        return power, shape, span, jnp.sum(law * jnp.log(period)), jnp.sum(law * shape), jnp.sum(law * span)

    def run(gap, noise, planet, doubt):
        """This gives powers of periods, shapes and sizes of orbits that go with them, and what all periods say together."""
        night = jnp.cumsum(0.3 + jnp.abs(gap), axis=1)
        weigh = 1.0 / (0.5 + jax.nn.softplus(doubt))
        period = 12.0 * jnp.exp(0.4 * planet[:, :1])
        turn = 2 * jnp.pi * night / period
        speed = 3.0 * jnp.cos(turn + planet[:, 1:2]) + 0.9 * jnp.cos(2 * turn + planet[:, 2:]) + noise
        return lax.map(lambda z: of_star(*z), (night, speed, weigh))

    return Built(run, (normal(stars, nights), normal(stars, nights), normal(stars, 3), normal(stars, nights)))
