"""Physics, astronomy, statistics, signals, finance and biology, the twenty-third set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import digamma, gammaln

from benchmarks.workloads.registry import Built, Size, booleans, integers, normal, pick, program

GROUP = "twenty-third"


@program("quarks-on-a-lattice-of-unitary-links-twelve-sources", GROUP)
def _quarks(size: Size) -> Built:
    """This carries quarks from twelve sources over a lattice of unitary links by conjugate gradients of Wilson's operator.

    The links are made special unitary by rows, and the answers give correlations of pions and rhos over time.
    """
    shape, rounds, kappa = pick(size, ((14, 8, 8, 8), 12, 0.115), ((4, 4, 3, 3), 12, 0.115), ((3, 2, 2, 2), 12, 0.115))
    pauli = np.array([[[0, 1], [1, 0]], [[0, -1j], [1j, 0]], [[1, 0], [0, -1]]])
    gammas = np.zeros((4, 4, 4), np.complex64)
    gammas[0, :2, 2:] = gammas[0, 2:, :2] = np.eye(2)
    for i in range(3):
        gammas[i + 1, :2, 2:], gammas[i + 1, 2:, :2] = -1j * pauli[i], 1j * pauli[i]
    five = np.array([-1.0, -1.0, 1.0, 1.0], np.float32)[:, None]
    minus, plus = (np.eye(4, dtype=np.complex64) + sign * gammas for sign in (-1, 1))

    def special(raw):
        a, c = raw[..., 0, :], raw[..., 1, :]
        a = a / jnp.sqrt(jnp.sum(jnp.abs(a) ** 2, axis=-1, keepdims=True))
        c = c - jnp.sum(jnp.conj(a) * c, axis=-1, keepdims=True) * a
        c = c / jnp.sqrt(jnp.sum(jnp.abs(c) ** 2, axis=-1, keepdims=True))
        return jnp.stack([a, c, jnp.conj(jnp.cross(a, c))], axis=-2)

    def dirac(links, psi):
        out = psi
        for mu in range(4):
            u = links[mu]
            ahead = jnp.einsum("...ab,k...sb->k...sa", u, jnp.roll(psi, -1, axis=mu + 1))
            behind = jnp.roll(jnp.einsum("...ba,k...sb->k...sa", jnp.conj(u), psi), 1, axis=mu + 1)
            out = out - kappa * jnp.einsum("rs,k...sa->k...ra", minus[mu], ahead)
            out = out - kappa * jnp.einsum("rs,k...sa->k...ra", plus[mu], behind)
        return out

    def run(real, imaginary):
        links = special(jnp.eye(3) + lax.complex(real, imaginary))
        source = jnp.zeros((12, *shape, 4, 3), jnp.complex64)
        source = source.at[:, 0, 0, 0, 0].set(jnp.eye(12, dtype=jnp.complex64).reshape(12, 4, 3))

        def dot(x, y):
            return jnp.sum((jnp.conj(x) * y).real, axis=tuple(range(1, 7)), keepdims=True)

        def normal_equations(x):
            return five * dirac(links, five * dirac(links, x))

        def step(_, carry):
            x, r, d, size_of = carry
            q = normal_equations(d)
            a = size_of / dot(d, q)
            x, r = x + a * d, r - a * q
            fresh = dot(r, r)
            return x, r, r + fresh / size_of * d, fresh

        right = five * dirac(links, five * source)
        x, _, _, rest = lax.fori_loop(0, rounds, step, (jnp.zeros_like(right), right, right, dot(right, right)))
        quark = x.reshape(4, 3, *shape, 4, 3)
        pion = jnp.sum(jnp.abs(quark) ** 2, axis=(0, 1, 3, 4, 5, 6, 7))
        sink, start = np.diag(five[:, 0]) @ gammas[1], gammas[1] @ np.diag(five[:, 0])
        turned = jnp.einsum("rs,pctxyzsa,pq->qctxyzra", sink, quark, start)
        rho = jnp.sum((jnp.conj(quark) * turned).real, axis=(0, 1, 3, 4, 5, 6, 7))
        loops = []
        for m in range(4):
            for k in range(m):
                ahead, side = jnp.roll(links[k], -1, axis=m), jnp.roll(links[m], -1, axis=k)
                half = jnp.einsum("...ab,...bc->...ac", links[m], ahead)
                other = jnp.einsum("...ab,...bc->...ac", links[k], side)
                loops.append(jnp.mean(jnp.sum((half * jnp.conj(other)).real, axis=(-1, -2))) / 3)
        return pion, rho, jnp.sqrt(rest.reshape(12)), jnp.stack(loops)

    return Built(run, (normal(4, *shape, 3, 3, scale=0.25), normal(4, *shape, 3, 3, scale=0.25)))


@program("light-bent-around-a-spinning-black-hole-and-its-disk", GROUP)
def _black_hole(size: Size) -> Built:
    """This draws the glowing disk of a spinning black hole by rays traced backwards with Runge-Kutta steps (Kerr metric)."""
    rows, columns, steps, spirals = pick(size, (225, 300, 160, 7), (27, 37, 160, 7), (5, 6, 160, 3))
    far, edge = 30.0, 20.0

    def energy(r, th, pr, pth, el, a):
        """This is the Hamiltonian of light with energy one."""
        wide, delta = r * r + a * a * jnp.cos(th) ** 2, r * r - 2 * r + a * a
        sin = jnp.sin(th)
        sin = jnp.where(sin < 0, jnp.minimum(sin, -0.03), jnp.maximum(sin, 0.03))
        turn = a * sin - el / sin
        return (delta * pr**2 + pth**2 + turn**2 - (r * r + a * a - a * el) ** 2 / delta) / (2 * wide)

    slopes = jax.grad(energy, argnums=(0, 1, 2, 3, 4))

    def picture(spin, tilt, amounts, phases, glow):
        a = 0.9 * jax.nn.sigmoid(spin) + 0.05
        hole, view = 1 + jnp.sqrt(1 - a * a), 1.1 + 0.3 * jnp.tanh(tilt)
        z1 = 1 + jnp.cbrt(1 - a * a) * (jnp.cbrt(1 + a) + jnp.cbrt(1 - a))
        z2 = jnp.sqrt(3 * a * a + z1 * z1)
        inner = 3 + z2 - jnp.sqrt((3 - z1) * (3 + z1 + 2 * z2))

        def ray(alpha, beta):
            el = -alpha * jnp.sin(view)
            across = beta**2 + (alpha**2 - a * a) * jnp.cos(view) ** 2
            pth = -jnp.sign(beta) * jnp.sqrt(jnp.maximum(across, 0.0))
            delta = far * far - 2 * far + a * a
            pull = (far * far + a * a - a * el) ** 2 - delta * ((el - a) ** 2 + across)
            pr = -jnp.sqrt(jnp.maximum(pull, 0.0)) / delta

            def speed(state):
                r, th, _, pr, pth = state
                dr, dth, vr, vth, vphi = slopes(r, th, pr, pth, el, a)
                return jnp.stack([vr, vth, vphi, -dr, -dth])

            def step(_, carry):
                state, light = carry
                r = state[0]
                alive = (r > 1.04 * hole) & (r < 1.2 * far)
                h = 0.07 * (r - hole)
                k1 = speed(state)
                k2 = speed(state + 0.5 * h * k1)
                k3 = speed(state + 0.5 * h * k2)
                k4 = speed(state + h * k3)
                fresh = state + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
                alive = alive & jnp.all(jnp.isfinite(fresh))
                fresh = jnp.where(alive, fresh, state)
                before, after = jnp.cos(state[1]), jnp.cos(fresh[1])
                part = before / jnp.where(before == after, 1.0, before - after)
                at = state[0] + part * (fresh[0] - state[0])
                phi = state[2] + part * (fresh[2] - state[2])
                at_safe = jnp.clip(at, inner, edge)
                whirl = 1 / (at_safe**1.5 + a)
                lapse = 1 - 2 / at_safe + 4 * a * whirl / at_safe
                lapse = lapse - (at_safe**2 + a * a + 2 * a * a / at_safe) * whirl**2
                shift = jnp.sqrt(jnp.maximum(lapse, 1e-4)) / jnp.maximum(1 - whirl * el, 0.05)
                arms = jnp.arange(1, spirals + 1)
                waves = amounts @ jnp.cos(arms * (phi + 2.5 * jnp.log(at_safe)) + phases)
                sheet = jnp.exp(0.5 * jnp.tanh(waves)) * (1 - jnp.sqrt(inner / at_safe)) / at_safe**2
                soft = jax.nn.sigmoid(4 * (at - inner)) * jax.nn.sigmoid(2 * (edge - at))
                crossed = alive & (before * after < 0)
                light = light + jnp.where(crossed, soft * sheet, 0.0) * jnp.stack([shift**3, shift**4, shift**5])
                return fresh, light

            start = jnp.stack([jnp.float32(far), view, 0.0, pr, pth])
            state, light = lax.fori_loop(0, steps, step, (start, jnp.zeros(3)))
            return light, jax.nn.sigmoid(2 * (state[0] - 2 * hole))

        alpha = (jnp.arange(columns) - columns / 2 + 0.37) * (44 / columns)
        beta = (jnp.arange(rows) - rows / 2 + 0.41) * (33 / rows)
        light, away = jax.vmap(lambda y: jax.vmap(lambda x: ray(x, y))(alpha))(beta)
        spread = jnp.exp(-0.5 * (jnp.arange(-4, 5) / (0.5 + jax.nn.softplus(glow))) ** 2)
        spread = spread / jnp.sum(spread)
        padded = jnp.pad(light, ((4, 4), (4, 4), (0, 0)))
        halo = sum(spread[i] * padded[i : i + rows] for i in range(9))
        halo = sum(spread[i] * halo[:, i : i + columns] for i in range(9))
        shade = 0.7 * light + 0.3 * halo
        shade = shade / (jnp.mean(shade) + 1e-6)
        return (shade / (1 + shade)) ** 0.45, 1 - jnp.mean(away), jnp.sum(light, axis=(0, 1))

    return Built(picture, (normal(), normal(), normal(spirals, scale=0.5), normal(spirals, scale=2.0), normal()))


@program("points-of-a-random-field-elliptic-slices-by-fourier-draws", GROUP)
def _cox(size: Size) -> Built:
    """This samples the density behind counted points by elliptic slices, with fields drawn by Fourier products (Murray, 2010)."""
    rows, columns, chains, rounds = pick(size, (90, 77, 24, 10), (30, 37, 6, 10), (5, 6, 2, 3))
    tall, broad = 2 * rows, 2 * columns

    def run(counts, covered, level, lengths, seed):
        y, x = jnp.minimum(jnp.arange(tall), tall - jnp.arange(tall)), jnp.arange(broad)
        x = jnp.minimum(x, broad - x)
        reach = 0.06 * rows * jnp.exp(0.3 * lengths)
        far = jnp.sqrt(y[:, None] ** 2.0 + x**2.0)[None] / reach[:, None, None]
        matern = (1 + 3**0.5 * far) * jnp.exp(-(3**0.5) * far)
        power = jnp.sqrt(jnp.maximum(jnp.fft.fft2(matern).real, 0.0))
        seen = covered.astype(jnp.float32)
        observed = counts.astype(jnp.float32)
        base = jnp.log(jnp.mean(observed)) - 0.5 + 0.1 * level

        def likely(field):
            logs = field + base
            return jnp.sum(seen * (observed * logs - jnp.exp(jnp.minimum(logs, 8.0))), axis=(-1, -2)) / 4

        def chain(power, key):
            def draw(key):
                noise = jax.random.normal(key, (2, tall, broad))
                wave = jnp.fft.fft2(power * lax.complex(noise[0], noise[1])) / (tall * broad) ** 0.5
                return wave.real[:rows, :columns]

            def step(carry, key):
                field, value, mean, square = carry
                k1, k2, k3, k4 = jax.random.split(key, 4)
                other = draw(k1)
                line = value + jnp.log(jax.random.uniform(k2, minval=1e-6))
                angle = jax.random.uniform(k3, maxval=2 * jnp.pi)

                def turned(angle):
                    return field * jnp.cos(angle) + other * jnp.sin(angle)

                def rejected(state):
                    _, _, _, value, tries, _ = state
                    return (value < line) & (tries < 24)

                def shrink(state):
                    angle, low, high, _, tries, key = state
                    low, high = jnp.where(angle < 0, angle, low), jnp.where(angle < 0, high, angle)
                    key, now = jax.random.split(key)
                    angle = low + (high - low) * jax.random.uniform(now)
                    return angle, low, high, likely(turned(angle)), tries + 1, key

                start = (angle, angle - 2 * jnp.pi, angle, likely(turned(angle)), 0, k4)
                angle, _, _, value, tries, _ = lax.while_loop(rejected, shrink, start)
                field = turned(angle)
                rate = jnp.exp(jnp.minimum(field + base, 8.0))
                return (field, value, mean + rate / rounds, square + rate**2 / rounds), (value, tries)

            first, rest = jax.random.split(key)
            field = draw(first)
            zero = jnp.zeros((rows, columns))
            (_, _, mean, square), trace = lax.scan(
                step, (field, likely(field), zero, zero), jax.random.split(rest, rounds)
            )
            return mean, square, trace

        keys = jax.random.split(jax.random.key(seed), chains)
        mean, square, (values, tries) = jax.vmap(chain)(power, keys)
        middle = jnp.mean(mean, axis=0)
        within = jnp.mean(square - mean**2, axis=0)
        expected = jnp.sum(jnp.where(covered, 0.0, middle))
        between = jnp.var(mean, axis=0)
        fit = observed * jnp.log(middle) - middle - gammaln(observed + 1)
        return (
            middle,
            between / (within + 1e-3),
            expected,
            jnp.sum(fit * seen),
            jnp.mean(values, axis=0),
            jnp.mean(tries),
        )

    inputs = (integers(rows, columns, below=6), booleans(rows, columns), normal(), normal(chains))
    return Built(run, (*inputs, integers(below=1000)))


@program("satellites-found-by-gold-codes-and-followed-by-loops", GROUP)
def _satellites(size: Size) -> Built:
    """This finds satellites in a radio signal by their codes and shifts of pitch, then follows each by two locked loops."""
    chips, every, satellites, bins, millis, track, heard = pick(
        size, (1023, 4, 32, 41, 10, 40, 6), (1023, 2, 8, 11, 3, 12, 4), (31, 2, 3, 3, 2, 3, 2)
    )
    samples, rate = chips * every, 1000.0 * chips * every

    def gold():
        """This makes the codes from two shift registers of ten bits."""
        one, two = np.ones(10, int), np.ones(10, int)
        first, second = [], []
        for _ in range(1023):
            first.append(one[9])
            second.append(two[9])
            one = np.roll(one, 1)
            one[0] = (one[0] + one[3]) % 2
            two = np.roll(two, 1)
            two[0] = (two[0] + two[2] + two[3] + two[6] + two[8] + two[9]) % 2
        pairs = [(np.array(first) + np.roll(second, 37 * k + 5)) % 2 for k in range(satellites)]
        return (1.0 - 2.0 * np.stack(pairs)[:, :chips]).astype(np.float32)

    codes = gold()
    replicas = np.conj(np.fft.fft(np.repeat(codes, every, axis=1))).astype(np.complex64)
    when = np.arange(samples, dtype=np.float32) / rate
    shifts = ((np.arange(bins) - bins // 2) * 500.0).astype(np.float32)

    def chip(code, place):
        return code[jnp.mod(jnp.floor(place).astype(jnp.int32), chips)]

    def run(delays, pitches, noise, bits):
        pitch = 400.0 * jnp.clip(pitches, -4, 4)
        clock = jnp.arange(track * samples) / every

        def sent(code, delay, pitch, bits):
            turns = jnp.mod(pitch * (jnp.arange(track * samples) / rate), 1.0)
            flips = jnp.repeat(jnp.where(bits, 1.0, -1.0), samples)
            return flips * chip(code, clock - delay / every) * jnp.exp(2j * jnp.pi * turns)

        signal = jnp.sum(jax.vmap(sent)(codes[:heard], delays, pitch, bits), axis=0)
        noise = noise.reshape(2, -1)
        signal = (0.7 * signal + lax.complex(noise[0], noise[1])).reshape(track, samples)
        wipe = jnp.exp(-2j * jnp.pi * jnp.mod(shifts[:, None] * when, 1.0)).astype(jnp.complex64)
        spectra = jnp.fft.fft(signal[:millis, None] * wipe, axis=-1)

        def search(replica):
            power = jnp.mean(jnp.abs(jnp.fft.ifft(spectra * replica, axis=-1)) ** 2, axis=0)
            best = jnp.argmax(jnp.max(power, axis=1))
            row = power[best]
            at = jnp.argmax(row)
            apart = jnp.abs(jnp.arange(samples) - at)
            apart = jnp.minimum(apart, samples - apart)
            second = jnp.max(jnp.where(apart > every, row, 0.0))
            return at, jnp.asarray(shifts)[best], row[at] / second, jnp.sum(row) / samples

        at, coarse, ratio, floor = lax.map(search, jnp.asarray(replicas))

        def follow(code, at, coarse):
            def step(carry, block):
                delay, turn, speed, hidden = carry
                place = jnp.arange(samples) / every - delay
                wave = jnp.exp(-2j * jnp.pi * jnp.mod(turn + speed * when, 1.0))
                base = block * wave
                early, prompt, late = (jnp.sum(base * chip(code, place + s)) / samples for s in (0.5, 0.0, -0.5))
                ahead, behind = jnp.abs(early), jnp.abs(late)
                wrong = 0.5 * (ahead - behind) / (ahead + behind + 1e-6)
                error = jnp.arctan(prompt.imag / (prompt.real + jnp.where(prompt.real < 0, -1e-3, 1e-3))) / (2 * jnp.pi)
                hidden = hidden + 8.0 * error
                turn = jnp.mod(turn + speed * 1e-3 + 0.2 * error, 1.0)
                fresh = (delay - 0.3 * wrong, turn, coarse + hidden + 20.0 * error, hidden)
                return fresh, (prompt.real, prompt.imag, wrong, speed)

            start = (at / every + 0.0, jnp.float32(0.0), coarse, jnp.float32(0.0))
            (delay, _, speed, _), trace = lax.scan(step, start, signal)
            power = jnp.mean(trace[0] ** 2 + trace[1] ** 2)
            return delay, speed, power, jax.nn.sigmoid(20 * trace[0]), trace[2]

        followed = jax.vmap(follow)(jnp.asarray(codes[:heard]), at[:heard], coarse[:heard])
        return ratio, floor, coarse, at, followed

    inputs = (integers(heard, below=samples), normal(heard), normal(2, track, samples), booleans(heard, track))
    return Built(run, inputs)


@program("portfolios-of-rolling-months-by-shrunken-spreads-and-split-steps", GROUP)
def _portfolios(size: Size) -> Built:
    """This holds the best shares for each month and taste of risk by shrunken spreads and split steps, then tells how they did.

    Spreads are shrunken as by Ledoit and Wolf (2004); shares add up to one and none is above a tenth or so.
    """
    days, assets, factors, window, month, tastes, rounds = pick(
        size, (2520, 193, 11, 252, 21, 5, 40), (567, 37, 5, 126, 21, 3, 40), (23, 5, 2, 9, 4, 2, 4)
    )
    months, cap = (days - window) // month, max(0.1, 2.5 / assets)

    def shrunken(r):
        centred = r - jnp.mean(r, axis=0)
        s = centred.T @ centred / window
        size_of = jnp.trace(s) / assets
        away = jnp.sum((s - size_of * jnp.eye(assets)) ** 2)
        squares = jnp.sum(centred * centred, axis=1) ** 2
        noise = (jnp.sum(squares) / window - jnp.sum(s * s)) / window
        share = jnp.clip(noise / away, 0.0, 1.0)
        return (1 - share) * s + share * size_of * jnp.eye(assets), share

    def capped(v):
        """This finds the nearest shares between nothing and the cap that add up to one, by halving."""

        def halve(_, ends):
            low, high = ends
            middle = 0.5 * (low + high)
            over = jnp.sum(jnp.clip(v - middle, 0.0, cap)) > 1
            return jnp.where(over, middle, low), jnp.where(over, high, middle)

        low, high = lax.fori_loop(0, 20, halve, (jnp.min(v) - cap, jnp.max(v)))
        w = jnp.clip(v - 0.5 * (low + high), 0.0, cap)
        return w / jnp.sum(w)

    def best(spread, hope, taste):
        rho = 2.0
        factor = jax.scipy.linalg.cho_factor(taste * spread + rho * jnp.eye(assets), lower=True)
        inverse = jax.scipy.linalg.cho_solve(factor, jnp.eye(assets))

        def step(_, carry):
            z, u = carry
            x = inverse @ (hope + rho * (z - u))
            z = capped(x + u)
            return z, u + x - z

        start = jnp.full(assets, 1 / assets)
        z, u = lax.fori_loop(0, rounds, step, (start, jnp.zeros(assets)))
        return z, jnp.linalg.norm(u)

    def run(common, loads, own, tails, tilt):
        heavy = lax.rsqrt(0.3 + jnp.abs(tails))[:, None]
        r = 0.01 * heavy * (common @ (loads / factors**0.5) + 0.8 * own) + 3e-4 * (1 + tilt)
        index = jnp.arange(months)[:, None] * month
        past, ahead = r[index + jnp.arange(window)], r[index + window + jnp.arange(month)]
        spread, share = jax.vmap(shrunken)(past)
        fade = 0.5 ** (jnp.arange(window)[::-1] / (window / 3))
        hope = jnp.einsum("mwa,w->ma", past, fade / jnp.sum(fade))
        hope = 0.5 * hope + 0.5 * jnp.mean(hope, axis=1, keepdims=True)
        taste = jnp.array([2.0, 4.0, 8.0, 16.0, 32.0])[:tastes]
        year = 252.0
        shares, rest = jax.vmap(lambda s, h: jax.vmap(lambda t: best(year * s, year * h, t))(taste))(spread, hope)
        grown = jnp.exp(jnp.cumsum(jnp.log1p(ahead), axis=1))
        drifted = shares * grown[:, None, -1]
        drifted = drifted / jnp.sum(drifted, axis=-1, keepdims=True)
        moved = jnp.sum(jnp.abs(shares[1:] - drifted[:-1]), axis=-1)
        moved = jnp.concatenate([jnp.ones((1, tastes)), moved])
        worth = jnp.einsum("mta,mda->tmd", shares, jnp.concatenate([jnp.ones_like(grown[:, :1]), grown], axis=1))
        gained = jnp.log(worth[..., 1:] / worth[..., :-1])
        gained = gained.at[..., 0].add(-1e-3 * moved.T).reshape(tastes, -1)
        total = jnp.cumsum(gained, axis=1)
        fall = jnp.min(total - lax.cummax(total, axis=1), axis=1)
        ratio = jnp.mean(gained, axis=1) / jnp.std(gained, axis=1) * year**0.5
        ordered = jnp.sort(gained, axis=1)
        worst = -jnp.mean(ordered[:, : max(gained.shape[1] // 20, 1)], axis=1)
        risk = jnp.sqrt(jnp.einsum("mta,mab,mtb->tm", shares, spread, shares) * year)
        parts = shares * jnp.einsum("mab,mtb->mta", spread, shares)
        even = jnp.sum(parts, axis=-1) ** 2 / jnp.sum(parts**2, axis=-1)
        return shares, share, total, fall, ratio, worst, risk, even, rest

    inputs = (normal(days, factors), normal(factors, assets), normal(days, assets), normal(days), normal(assets))
    return Built(run, inputs)


@program("reads-shared-by-transcripts-variational-rounds-and-resamples", GROUP)
def _transcripts(size: Size) -> Built:
    """This shares reads among the transcripts that may have made them, by variational rounds over classes, as Salmon (2017).

    Every resample of the counts of classes is run beside the first; the spread over resamples is told for each gene.
    """
    transcripts, classes, most, copies, genes, rounds = pick(
        size, (40009, 90001, 7, 8, 11003, 24), (907, 1511, 5, 3, 307, 24), (9, 13, 3, 2, 4, 3)
    )

    def run(members, degree, counts, fits, lengths, noise, owner):
        length = 200 + 1500 * jax.nn.softplus(lengths)
        inside = jnp.arange(most) < 1 + degree[:, None]
        weigh = jnp.where(inside, jnp.exp(0.5 * fits) / length[members], 0.0)
        weigh = weigh / jnp.sum(weigh, axis=1, keepdims=True)
        seen = 1 + counts.astype(jnp.float32) ** 2
        resampled = jax.nn.relu(seen + jnp.sqrt(seen) * noise)
        every = jnp.concatenate([seen[None], resampled])
        total = jnp.sum(every, axis=1, keepdims=True)
        prior = 1e-2

        def share(alpha):
            logs = digamma(alpha + prior) - digamma(total + prior * transcripts)
            theta = jnp.exp(jnp.maximum(logs, -50.0))
            parts = theta[:, members] * weigh
            below = jnp.sum(parts, axis=-1, keepdims=True)
            parts = parts / jnp.maximum(below, 1e-20) * every[..., None]
            flat = parts.reshape(copies + 1, -1)
            add = jax.vmap(lambda x: jax.ops.segment_sum(x, members.reshape(-1), transcripts))
            return add(flat), jnp.log(jnp.maximum(below[..., 0], 1e-20))

        def step(_, carry):
            alpha, _ = carry
            fresh, _ = share(alpha)
            return fresh, jnp.max(jnp.abs(fresh - alpha) / (fresh + 1.0), axis=1)

        start = jnp.broadcast_to(total / transcripts, (copies + 1, transcripts))
        alpha, change = lax.fori_loop(0, rounds, step, (start, jnp.zeros(copies + 1)))
        alpha, logs = share(alpha)
        bound = jnp.sum(every * logs, axis=1) + jnp.sum(gammaln(alpha + prior), axis=1) / transcripts
        rate = alpha / length
        million = 1e6 * rate / jnp.sum(rate, axis=1, keepdims=True)
        of_gene = jax.vmap(lambda x: jax.ops.segment_sum(x, owner, genes, indices_are_sorted=True))(million)
        mean, spread = jnp.mean(of_gene[1:], axis=0), jnp.var(of_gene[1:], axis=0)
        unsure = jax.nn.relu(spread - mean) / (mean + 5.0) + 0.01
        usage = million[0] / jnp.maximum(of_gene[0][owner], 1e-6)
        entropy = jax.ops.segment_sum(-usage * jnp.log(usage + 1e-9), owner, genes, indices_are_sorted=True)
        return million[0], jnp.log1p(of_gene), unsure, entropy, bound, change

    inputs = (integers(classes, most, below=transcripts), integers(classes, below=most), integers(classes, below=40))
    inputs += (normal(classes, most), normal(transcripts), normal(copies, classes))
    return Built(run, (*inputs, integers(transcripts, below=genes, ramp=True)))
