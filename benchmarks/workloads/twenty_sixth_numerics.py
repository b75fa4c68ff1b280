"""Households, radio skies, sheared galaxies, taste and atoms, the twenty-sixth set: its author saw no plan."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.stats import norm

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import dense, dense_of

GROUP = "twenty-sixth"


@program("households-save-against-bad-years-and-wealth-settles", GROUP)
def _households(size: Size) -> Built:
    """This solves many economies of households that save against bad years, and how wealth is spread once it settles.

    It is the model of Aiyagari (1994) by endogenous grid points (Carroll, 2006) and by lotteries between grid points (Young, 2010),
    as in the JAX lectures of QuantEcon.
    """
    economies, grid, states = pick(size, (48, 801, 11), (5, 151, 7), (2, 13, 3))
    rounds, flows, top = 60, 150, 60.0
    wealth = jnp.asarray(top * np.linspace(0, 1, grid) ** 2.5, jnp.float32)

    def incomes(stay, spread):
        """This cuts an income that drifts back to its mean into states (Tauchen, 1986)."""
        width = 3 * spread * lax.rsqrt(1 - stay * stay)
        levels = jnp.linspace(-1.0, 1.0, states) * width
        half_gap = width / (states - 1)
        z = levels - stay * levels[:, None]
        high = norm.cdf((z + half_gap) / spread).at[:, -1].set(1.0)
        low = norm.cdf((z - half_gap) / spread).at[:, 0].set(0.0)
        chances = high - low
        share = lax.fori_loop(0, 40, lambda _, s: s @ chances, jnp.full(states, 1.0 / states))
        pay = jnp.exp(levels)
        return chances, share, pay / jnp.sum(share * pay)

    def economy(a, b, c, d, e):
        patience, risk = 0.955 + 0.01 * jnp.tanh(a), 1.5 + jax.nn.softplus(b)
        rate, stay, spread = 0.02 + 0.01 * jnp.tanh(c), 0.8 + 0.1 * jnp.tanh(d), 0.2 + 0.08 * jnp.tanh(e)
        chances, share, pay = incomes(stay, spread)
        wage = 1.0
        cash = (1 + rate) * wealth + wage * pay[:, None]

        def better(carry, _):
            """This finds what to spend from what is spent next year, without solving for it."""
            spend, _ = carry
            ahead = patience * (1 + rate) * chances @ spend**-risk
            now = ahead ** (-1 / risk)
            had = (now + wealth - wage * pay[:, None]) / (1 + rate)
            fresh = jax.vmap(lambda x, y: jnp.interp(wealth, x, y))(had, now)
            fresh = jnp.where(wealth < had[:, :1], cash, fresh)
            fresh = jnp.clip(fresh, 1e-4, cash)
            return (fresh, jnp.max(jnp.abs(fresh - spend))), jnp.mean(jnp.abs(fresh / spend - 1))

        (spend, error), path = lax.scan(better, (0.3 * cash, jnp.float32(1.0)), None, length=rounds)
        saved = jnp.clip(cash - spend, 0.0, top)
        at = jnp.clip(jnp.searchsorted(wealth, saved, side="right") - 1, 0, grid - 2)
        up = jnp.clip((saved - wealth[at]) / (wealth[at + 1] - wealth[at]), 0.0, 1.0)

        def flow(people, _):
            def one(people, at, up):
                return jnp.zeros(grid).at[at].add(people * (1 - up)).at[at + 1].add(people * up)

            after = chances.T @ jax.vmap(one)(people, at, up)
            return after, jnp.sum(jnp.abs(after - people))

        people, moves = lax.scan(flow, share[:, None] * jnp.full(grid, 1.0 / grid), None, length=flows)
        held = jnp.sum(people, axis=0)
        mean = jnp.sum(held * wealth)
        lorenz = jnp.cumsum(held * wealth) / (mean + 1e-6)
        before = jnp.concatenate([jnp.zeros(1), lorenz[:-1]])
        gini = 1 - jnp.sum(held * (lorenz + before))
        poorest = jnp.sum(jnp.where(jnp.cumsum(held) <= 0.5, held * wealth, 0.0)) / (mean + 1e-6)
        hungry = jnp.sum(people * (saved < 1e-4))
        usage = jnp.sum(people * spend)
        swings = jnp.sqrt(jnp.sum(people * (jnp.log(spend) - jnp.sum(people * jnp.log(spend))) ** 2))
        return spend, held, (mean, gini, poorest, hungry, usage, swings), error, path, moves[-1]

    return Built(jax.vmap(economy), tuple(normal(economies) for _ in range(5)))


@program("sky-from-pairs-of-dishes-gridded-and-cleaned-of-side-lobes", GROUP)
def _sky(size: Size) -> Built:
    """This makes a picture of the sky from what pairs of radio dishes measure, and takes bright points out one by one.

    It grids with a bell of six cells, weighs by density (Briggs, 1995) and cleans (Högbom, 1974; rounds of Schwab, 1984), as radio
    imagers such as codex-africanus and its ports to JAX do.
    """
    pairs, n, reach, minor, rounds = pick(size, (400009, 1024, 6, 150, 3), (5003, 128, 6, 40, 3), (61, 16, 4, 5, 2))
    patch = np.arange(reach) - reach // 2 + 1
    steep = 0.55 * reach

    def bell(x):
        return jnp.exp(-steep * (2 * x / reach) ** 2)

    def taken_off(m):
        """This is the Fourier transform of the bell over a picture of m cells, to divide by."""
        x = (np.arange(m) - m // 2) / m
        fine = np.linspace(-reach / 2, reach / 2, 201)
        wave = np.cos(2 * np.pi * np.outer(x, fine)) @ np.exp(-steep * (2 * fine / reach) ** 2) * (fine[1] - fine[0])
        return jnp.asarray(np.outer(wave, wave), jnp.float32)

    def cells(u, m):
        """These are the cells around a place of the grid and their weights."""
        at = u * m + m // 2
        low = jnp.floor(at).astype(jnp.int32)
        near = low[:, :, None] + patch
        shares = bell(near - at[:, :, None]) * ((near >= 0) & (near < m))
        near = jnp.clip(near, 0, m - 1)
        flat = near[:, 0, :, None] * m + near[:, 1, None, :]
        return flat.reshape(pairs, -1), (shares[:, 0, :, None] * shares[:, 1, None, :]).reshape(pairs, -1)

    def centred(transform, x):
        return jnp.fft.fftshift(transform(jnp.fft.ifftshift(x)))

    def picture(u, values, m):
        """This gives the picture of weighed measurements by putting them on a grid."""
        flat, shares = cells(u, m)
        grid = jnp.zeros(m * m, jnp.complex64).at[flat].add(shares * values[:, None])
        return centred(jnp.fft.ifft2, grid.reshape(m, m)).real * m * m / taken_off(m)

    def measured(u, sky):
        flat, shares = cells(u, n)
        grid = centred(jnp.fft.fft2, sky / taken_off(n)).reshape(-1)
        return jnp.sum(shares * grid[flat], axis=-1)

    def run(u, real, imaginary, noise, spots, bright):
        u = 0.4 * jnp.tanh(0.35 * u)
        places = jnp.round(0.3 * n * jnp.tanh(spots))
        turns = -2 * np.pi * u @ places.T
        truth = jnp.abs(bright) + 0.2
        seen = jnp.exp(1j * turns) @ truth.astype(jnp.complex64)
        seen = seen + 0.3 * lax.complex(real, imaginary) * jnp.exp(0.2 * noise)
        quality = jnp.exp(-0.4 * noise)
        cell = jnp.round(u * n + n // 2).astype(jnp.int32)
        cell = cell[:, 0] * n + cell[:, 1]
        dense_at = jnp.zeros(n * n).at[cell].add(quality)
        factor = (5 * 10.0**-0.3) ** 2 / (jnp.sum(dense_at**2) / jnp.sum(quality))
        weigh = quality / (1 + factor * dense_at[cell])
        weigh = weigh / jnp.sum(weigh)
        lobes = picture(u * 0.5, weigh.astype(jnp.complex64), 2 * n)
        lobes = lobes / jnp.max(lobes)
        peak = jnp.sum(weigh)

        def one(_, carry):
            left, sky, flux = carry
            k = jnp.argmax(jnp.abs(left))
            row, column = k // n, k % n
            step = 0.1 * left[row, column]
            moved = lax.dynamic_slice(lobes, (n - row, n - column), (n, n))
            return left - step * moved, sky.at[row, column].add(step), flux + step

        sky, told = jnp.zeros((n, n)), []
        for _ in range(rounds):
            left = picture(u, weigh * (seen - measured(u, sky)), n) / peak
            told.append(jnp.stack([jnp.max(jnp.abs(left)), jnp.std(left), jnp.median(jnp.abs(left))]))
            _, sky, flux = lax.fori_loop(0, minor, one, (left, sky, 0.0))
        left = picture(u, weigh * (seen - measured(u, sky)), n) / peak
        tones = jnp.fft.fftfreq(n)
        beam = jnp.exp(-2 * (np.pi * 1.5) ** 2 * (tones[:, None] ** 2 + tones**2))
        restored = jnp.fft.ifft2(jnp.fft.fft2(sky) * beam).real * (2 * np.pi * 1.5**2)
        spread = 1.4826 * jnp.median(jnp.abs(left - jnp.median(left)))
        return restored + left, jnp.stack(told), flux, jnp.sum(sky > 0), jnp.max(restored) / spread, jnp.sum(truth)

    inputs = (normal(pairs, 2), normal(pairs), normal(pairs), normal(pairs), normal(23, 2), normal(23))
    return Built(run, inputs)


@program("galaxies-sheared-by-matter-spectra-of-bins-and-their-fisher-matrix", GROUP)
def _sheared(size: Size) -> Built:
    """This tells how matter shears the pictures of galaxies in five bins of distance, and how well that measures a universe.

    It follows jax-cosmo (Campagne, 2023; DifferentiableUniverseInitiative/jax_cosmo): growth by an equation, a smooth transfer
    function, clustering beyond linear (Takahashi, 2012), Limber's sums, and slopes by every parameter.
    """
    ells, waves, steps, radii, bins = pick(size, (101, 512, 257, 129, 5), (23, 96, 49, 25, 5), (3, 16, 9, 5, 2))
    ell = np.geomspace(20, 3000, ells).astype(np.float32)
    k = np.geomspace(1e-4, 50, waves).astype(np.float32)
    z = np.linspace(0.0, 3.0, steps).astype(np.float32)
    r = np.geomspace(0.05, 20, radii).astype(np.float32)
    log_k = np.log(k)

    def over(y, x):
        return jnp.sum(0.5 * (y[..., 1:] + y[..., :-1]) * np.diff(x), axis=-1)

    def summed(y, x):
        parts = 0.5 * (y[..., 1:] + y[..., :-1]) * np.diff(x)
        return jnp.pad(jnp.cumsum(parts, axis=-1), ((0, 0),) * (y.ndim - 1) + ((1, 0),))

    def growth(matter):
        """This gives how much matter clumps at each distance, by steps of Runge and Kutta in the logarithm of size."""
        start, many = -4.0, 60
        h = -start / many

        def slope(n, y):
            share = matter * jnp.exp(-3 * n)
            share = share / (share + 1 - matter)
            return jnp.stack([y[1], 1.5 * share * y[0] - (2 - 1.5 * share) * y[1]])

        def step(y, n):
            a = slope(n, y)
            b = slope(n + 0.5 * h, y + 0.5 * h * a)
            c = slope(n + 0.5 * h, y + 0.5 * h * b)
            d = slope(n + h, y + h * c)
            y = y + h / 6 * (a + 2 * b + 2 * c + d)
            return y, y[0]

        times = start + h * np.arange(many, dtype=np.float32)
        _, path = lax.scan(step, jnp.full(2, np.exp(start), jnp.float32), jnp.asarray(times))
        return jnp.interp(-jnp.log1p(z), times + h, path / path[-1])

    def linear(matter, baryon, hubble, tilt, sigma8):
        """This is the linear spectrum today without wiggles (Eisenstein and Hu, 1998), with the wanted spread in eight."""
        m, b = matter * hubble**2, baryon * hubble**2
        sound = 44.5 * jnp.log(9.83 / m) / jnp.sqrt(1 + 10 * b**0.75)
        share = b / m
        alpha = 1 - 0.328 * jnp.log(431 * m) * share + 0.38 * jnp.log(22.3 * m) * share**2
        shape = matter * hubble * (alpha + (1 - alpha) / (1 + (0.43 * k * hubble * sound) ** 4))
        q = k * 1.0404 / shape
        low = jnp.log(2 * np.e + 1.8 * q)
        transfer = low / (low + (14.2 + 731 / (1 + 62.5 * q)) * q * q)
        power = k**tilt * transfer**2
        x = 8 * k
        window = 3 * (np.sin(x) - x * np.cos(x)) / x**3
        return power * sigma8**2 / over(power * window**2 * k**3 / (2 * np.pi**2), log_k)

    def clustered(power, grown, matter):
        """This raises a linear spectrum where matter has fallen together: [steps, waves]."""
        power = power * grown[:, None] ** 2
        delta = power * k**3 / (2 * np.pi**2)
        blur = np.exp(-((k * r[:, None]) ** 2))
        x2 = (k * r[:, None]) ** 2
        s0 = over(delta[:, None] * blur, log_k)
        s1 = over(delta[:, None] * blur * 2 * x2, log_k)
        s2 = over(delta[:, None] * blur * (4 * x2 - 4 * x2 * x2), log_k)
        at = jax.vmap(lambda s: jnp.interp(0.0, -jnp.log(s), np.log(r)))(s0)
        near = jax.vmap(lambda a, s: jnp.interp(a, np.log(r), s), (0, 0))
        n, bend = near(at, s1 / s0) - 3, near(at, (s1 / s0) ** 2 + s2 / s0)
        n, bend = n[:, None], bend[:, None]
        share = (matter * (1 + z) ** 3 / (matter * (1 + z) ** 3 + 1 - matter))[:, None]
        y = k * jnp.exp(at)[:, None]
        an = 10 ** (1.5222 + 2.8553 * n + 2.3706 * n**2 + 0.9903 * n**3 + 0.2250 * n**4 - 0.6038 * bend)
        bn = 10 ** (-0.5642 + 0.5864 * n + 0.5716 * n**2 - 1.5474 * bend)
        cn = 10 ** (0.3698 + 2.0404 * n + 0.8161 * n**2 + 0.5869 * bend)
        gamma = 0.1971 - 0.0843 * n + 0.8460 * bend
        alpha = jnp.abs(6.0835 + 1.3373 * n - 0.1959 * n**2 - 5.5274 * bend)
        beta = 2.0379 - 0.7354 * n + 0.3157 * n**2 + 1.2490 * n**3 + 0.3980 * n**4 - 0.1682 * bend
        nu = 10 ** (5.2105 + 3.6902 * n)
        two = delta * (1 + delta) ** beta / (1 + alpha * delta) * jnp.exp(-(y / 4 + y * y / 8))
        one = (
            an * y ** (3 * share**-0.0307) / (1 + bn * y ** (share**-0.0585) + (cn * share**0.0743 * y) ** (3 - gamma))
        )
        return (two + one / (1 + nu / (y * y))) * 2 * np.pi**2 / k**3

    def spectra(theta, shifts):
        matter, sigma8, tilt = 0.3 + 0.03 * theta[0], 0.8 + 0.05 * theta[1], 0.96 + 0.02 * theta[2]
        baryon, hubble = 0.049 + 0.003 * theta[3], 0.68 + 0.03 * theta[4]
        slow = 2997.92 * lax.rsqrt(matter * (1 + z) ** 3 + 1 - matter)
        far = summed(slow, z)
        power = clustered(linear(matter, baryon, hubble, tilt, sigma8), growth(matter), matter)
        edges = np.linspace(0.2, 1.6, bins + 1)
        centre = 0.5 * (edges[1:] + edges[:-1]) + 0.02 * shifts
        shape = z**2 * jnp.exp(-((z / 0.6) ** 1.5))
        many = shape * jnp.exp(-0.5 * ((z - centre[:, None]) / (0.05 * (1 + z) + 0.1)) ** 2)
        many = many / over(many, z)[:, None]
        apart = jnp.where(far[None] > far[:, None], 1 - far[:, None] / jnp.maximum(far[None], 1.0), 0.0)
        lens = over(many[:, None] * apart, z)
        lens = 1.5 * matter / 2997.92**2 * (1 + z) * far * lens
        asked = jnp.log((ell[:, None] + 0.5) / jnp.maximum(far, 1.0)[None])
        read = jax.vmap(lambda x, p: jnp.interp(x, log_k, jnp.log(p)), (1, 0), 1)(asked, power)
        kernel = jnp.exp(read) * slow / jnp.maximum(far, 1.0) ** 2
        return over(jnp.einsum("iz,jz,lz->ijlz", lens, lens, kernel), z)

    def run(theta, shifts, noise):
        model = spectra(theta, shifts)
        by_theta, by_shift = jax.jacfwd(spectra, argnums=(0, 1))(theta, shifts)
        slopes = jnp.concatenate([by_theta, by_shift], axis=-1)
        whole = model + 3e-9 * jnp.eye(bins)[..., None]
        inverse = jnp.linalg.inv(1e9 * jnp.moveaxis(whole, -1, 0))
        weigh = 0.5 * 0.4 * (2 * ell + 1) * np.gradient(ell)
        turned = jnp.einsum("lij,jklp->lpik", inverse, 1e9 * slopes)
        fisher = jnp.einsum("l,lpij,lqji->pq", weigh, turned, turned) + jnp.eye(slopes.shape[-1])
        spread = jnp.sqrt(jnp.diagonal(jnp.linalg.inv(fisher)))
        wrong = noise * jnp.sqrt(2 / ((2 * ell + 1) * np.gradient(ell)))
        score = jnp.einsum("l,lpij,lji->p", weigh, turned, jnp.einsum("lij,jkl->lik", inverse, 1e9 * whole * wrong))
        return model, fisher, spread, jnp.linalg.solve(fisher, score)

    return Built(run, (normal(5, scale=0.5), normal(bins), normal(bins, bins, ells)))


@program("tastes-by-alternating-solves-from-clicks-ranked-hits", GROUP)
def _tastes(size: Size) -> Built:
    """This learns tastes of users and features of items from clicks by solving for one of them at a time, then ranks items.

    It is implicit matrix factorisation (Hu, 2008) as ALX does it in JAX (Mehta, 2021; google-research/alx): lists padded to one
    length, a matrix per user by Cholesky, and hits among the first twenty of items held back.
    """
    users, items, likes, liked, n, held = pick(
        size, (10007, 5003, 97, 197, 96, 10), (401, 211, 29, 53, 24, 5), (5, 11, 3, 7, 4, 2)
    )
    rounds, best = 2, pick(size, 20, 20, 3)

    def solved(other, at, real, count):
        """This solves for every row [n] from the rows of the other side that it met."""
        met = other[at] * real[..., None]
        gram = 0.1 * other.T @ other
        trust = 1.0 + jnp.log1p(count) * real
        left = jnp.einsum("ulp,ul,ulq->upq", met, trust, met) + gram
        ridge = 0.05 * (jnp.sum(real, axis=1) + 0.1 * other.shape[0]) ** 0.8
        left = left + ridge[:, None, None] * jnp.eye(n)
        right = jnp.einsum("ul,uln->un", trust + 0.1, met)
        factor = jax.scipy.linalg.cho_factor(left, lower=True)
        return jax.scipy.linalg.cho_solve(factor, right[..., None])[..., 0]

    def missed(tastes, features, at, real):
        own = jnp.einsum("un,uln->ul", tastes, features[at])
        known = jnp.sum(real * ((1 - own) ** 2 - 0.1 * own**2))
        every = 0.1 * jnp.sum((tastes.T @ tastes) * (features.T @ features))
        return (known + every) / jnp.sum(real)

    def run(features, at, count, many, back, back_count, back_many, aside):
        real = (jnp.arange(likes) <= many[:, None]).astype(jnp.float32)
        back_real = (jnp.arange(liked) <= back_many[:, None]).astype(jnp.float32)
        count, back_count = jnp.exp(count), jnp.exp(back_count)
        losses = []
        for _ in range(rounds):
            tastes = solved(features, at, real, count)
            features = solved(tastes, back, back_real, back_count)
            losses.append(missed(tastes, features, at, real))
        tastes = solved(features, at, real, count)
        scores = tastes @ features.T
        rows = jnp.arange(users)[:, None]
        scores = scores.at[rows, at].min(jnp.where(real > 0, -1e9, jnp.inf))
        value, shown = lax.top_k(scores, best)
        hit = jnp.any(shown[:, :, None] == aside[:, None], axis=-1).astype(jnp.float32)
        recall = jnp.sum(hit, axis=1) / held
        fade = 1 / np.log2(np.arange(best, dtype=np.float32) + 2)
        gained = hit @ fade / np.sum(fade[:held])
        reach = jnp.zeros(items).at[shown].add(1.0)
        share = reach / jnp.sum(reach)
        return (
            value,
            shown,
            jnp.mean(recall),
            jnp.mean(gained),
            jnp.stack(losses),
            jnp.sum(jax.scipy.special.entr(share)),
        )

    inputs = (normal(items, n, scale=0.3), integers(users, likes, below=items), normal(users, likes))
    inputs += (integers(users, below=likes), integers(items, liked, below=users), normal(items, liked))
    return Built(run, (*inputs, integers(items, below=liked), integers(users, held, below=items)))


@program("atoms-by-bells-of-distances-and-angles-eight-networks-and-forces", GROUP)
def _bells(size: Size) -> Built:
    """This tells energies of molecules, pulls on atoms and doubts from bells over distances and angles of all neighbours.

    It is ANI (Smith, 2017; aiqm/torchani), whose symmetry functions (Behler, 2011) are also in jax-md: every kind of atom has
    networks of its own, and eight copies tell how sure they are.
    """
    molecules, atoms, wide = pick(size, (96, 29, (160, 128, 96)), (2, 13, (80, 64, 48)), (2, 5, (6, 5, 4)))
    kinds, copies, far, near = 4, 8, 5.2, 3.5
    shells = np.linspace(0.9, far - 0.3, 16).astype(np.float32)
    rings = np.linspace(0.9, near - 0.4, 4).astype(np.float32)
    turns = ((np.arange(8) + 0.5) * np.pi / 8).astype(np.float32)
    pairs = [(i, j) for i in range(kinds) for j in range(i, kinds)]
    first, second = np.array(pairs).T
    features = kinds * 16 + len(pairs) * 32

    def cut(x, reach):
        return jnp.where(x < reach, 0.5 * jnp.cos(np.pi * jnp.minimum(x, reach) / reach) + 0.5, 0.0)

    def described(x, kind, real):
        """This describes the surroundings of every atom of a molecule: x [atoms, 3]."""
        one_hot = jax.nn.one_hot(kind, kinds) * real[:, None]
        gap = x[None] - x[:, None]
        alone = jnp.eye(atoms, dtype=bool)
        length = jnp.sqrt(jnp.where(alone, 1.0, jnp.sum(gap * gap, axis=-1)) + 1e-6)
        seen = ~alone & (real[:, None] * real > 0)
        radial = 0.25 * jnp.exp(-16 * (length[..., None] - shells) ** 2) * (cut(length, far) * seen)[..., None]
        radial = jnp.einsum("ijf,jk->ikf", radial, one_hot).reshape(atoms, -1)
        inside = cut(length, near) * seen
        cosine = 0.95 * jnp.einsum("ijx,ikx->ijk", gap, gap) / (length[:, :, None] * length[:, None])
        angle = jnp.arccos(jnp.clip(cosine, -0.99, 0.99))
        mean = 0.5 * (length[:, :, None] + length[:, None])
        both = inside[:, :, None] * inside[:, None] * ~jnp.eye(atoms, dtype=bool)
        bend = (0.5 * (1 + jnp.cos(angle[..., None] - turns))) ** 32
        ring = jnp.exp(-8 * (mean[..., None] - rings) ** 2) * both[..., None]
        angular = jnp.einsum("ijkt,ijkr,jp,kq->ipqtr", bend, ring, one_hot, one_hot)
        return jnp.concatenate([radial, angular[:, first, second].reshape(atoms, -1)], axis=-1)

    def energies(p, x, kind, real):
        """This gives an energy for each copy of the networks."""
        y = described(x, kind, real)
        whole = 0.0
        for k in range(kinds):

            def network(layers, y=y):
                for n, q in enumerate(layers):
                    y = dense(q, y)
                    y = jax.nn.celu(y, 0.1) if n + 1 < len(layers) else y
                return y[:, 0]

            own = jax.vmap(network)(p["networks"][k])
            whole = whole + jnp.sum(jnp.where((kind == k) & (real > 0), own + p["alone"][k], 0.0), axis=-1)
        return whole

    def one(p, x, kind, many):
        real = (jnp.arange(atoms) <= many).astype(jnp.float32)
        grid = np.stack(np.unravel_index(np.arange(atoms), (4, 4, -(-atoms // 16))), axis=-1).astype(np.float32)
        x = 1.4 * grid + 0.2 * x

        def mean(x):
            every = energies(p, x, kind, real)
            return jnp.mean(every), every

        (energy, every), slope = jax.value_and_grad(mean, has_aux=True)(x)
        size_of = jnp.sqrt(jnp.sum(slope * slope, axis=-1) + 1e-12) * real
        doubt = jnp.std(every) / jnp.sqrt(jnp.sum(real))
        return energy, every, -slope, doubt, jnp.max(size_of), jnp.einsum("ax,ay->xy", x * real[:, None], -slope)

    def run(p, x, kind, many):
        return jax.vmap(lambda x, kind, many: one(p, x, kind, many))(x, kind, many)

    def copied(i, o):
        q = dense_of(i, o)
        return {"w": normal(copies, i, o, scale=q["w"].scale), "b": normal(copies, 1, o, scale=0.1)}

    widths = (features, *wide, 1)
    p = {
        "networks": [[copied(i, o) for i, o in itertools.pairwise(widths)] for _ in range(kinds)],
        "alone": normal(kinds),
    }
    inputs = (normal(molecules, atoms, 3), integers(molecules, atoms, below=kinds), integers(molecules, below=atoms))
    return Built(run, (p, *inputs))
