"""Programs of clusters, smoke, markets, genes and climate in plain JAX, the fifteenth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program

GROUP = "fifteenth"


@program("density-peaks-and-nearest-denser-points", GROUP)
def _density_peaks(size: Size) -> Built:
    """This gives clusters of points whose centres are dense and far from every denser point.

    Each point belongs to the cluster of its nearest denser neighbour; the chains of neighbours are followed by
    doubling.
    """
    points, features, clusters = pick(size, (5003, 12, 15), (1500, 6, 9), (20, 3, 3))

    def cluster(x, radius):
        x = (x - jnp.mean(x, axis=0)) / (jnp.std(x, axis=0) + 1e-6)
        squares = jnp.sum(x**2, axis=1)
        apart = jnp.sqrt(jnp.maximum(squares[:, None] + squares[None, :] - 2 * x @ x.T, 0.0))
        cutoff = jnp.exp(0.1 * radius) * jnp.mean(apart) * 0.3
        density = jnp.sum(jnp.exp(-((apart / cutoff) ** 2)), axis=1) - 1.0
        order = jnp.argsort(-density)
        rank = jnp.zeros(points, jnp.int32).at[order].set(jnp.arange(points))
        denser = rank[None, :] < rank[:, None]
        masked = jnp.where(denser, apart, jnp.inf)
        gap, parent = jnp.min(masked, axis=1), jnp.argmin(masked, axis=1)
        gap = jnp.where(jnp.isinf(gap), jnp.max(apart), gap)
        _, centres = lax.top_k(density * gap, clusters)
        label = jnp.full(points, -1).at[centres].set(jnp.arange(clusters))
        parent = parent.at[centres].set(centres)
        for _ in range(int(np.ceil(np.log2(points)))):
            parent = parent[parent]
        label = label[parent]
        other = label[None, :] != label[:, None]
        border = jnp.any(other & (apart < cutoff), axis=1)
        edge = jax.ops.segment_max(jnp.where(border, density, 0.0), jnp.maximum(label, 0), clusters)
        sizes = jnp.sum(jax.nn.one_hot(label, clusters), axis=0)
        return label, density > edge[label], sizes, density, gap

    return Built(cluster, (normal(points, features), normal()))


@program("stable-smoke-plume-confined-curl-steps", GROUP)
def _smoke(size: Size) -> Built:
    """This gives a plume of smoke in a box after steps that follow the flow backwards and take out its divergence.

    The pressure comes from sweeps of Jacobi's iteration, hot smoke rises, and a force along the gradient of the
    curl's size keeps the small whirls.
    """
    high, wide, steps, sweeps = pick(size, (400, 300, 4, 30), (250, 190, 4, 20), (9, 8, 2, 3))
    dt, buoyancy, confinement = 0.4, 0.6, 0.3

    def sampled(field, rows, columns):
        rows, columns = jnp.clip(rows, 0.0, high - 1.001), jnp.clip(columns, 0.0, wide - 1.001)
        i, j = jnp.floor(rows).astype(jnp.int32), jnp.floor(columns).astype(jnp.int32)
        a, b = rows - i, columns - j
        upper = (1 - b) * field[i, j] + b * field[i, j + 1]
        lower = (1 - b) * field[i + 1, j] + b * field[i + 1, j + 1]
        return (1 - a) * upper + a * lower

    def difference(field, axis):
        padded = jnp.pad(field, 1, mode="edge")
        if axis == 0:
            return 0.5 * (padded[2:, 1:-1] - padded[:-2, 1:-1])
        return 0.5 * (padded[1:-1, 2:] - padded[1:-1, :-2])

    def walled(u, v):
        return u.at[0].set(0.0).at[-1].set(0.0), v.at[:, 0].set(0.0).at[:, -1].set(0.0)

    def step(carry, _):
        u, v, smoke, heat, source = carry
        smoke, heat = jnp.maximum(smoke, source), jnp.maximum(heat, source)
        curl = difference(v, 0) - difference(u, 1)
        size_ = jnp.abs(curl)
        first, second = difference(size_, 0), difference(size_, 1)
        length = jnp.sqrt(first**2 + second**2) + 1e-5
        u = u + dt * (buoyancy * heat - 0.1 * smoke - confinement * second / length * curl)
        v = v + dt * confinement * first / length * curl
        u, v = walled(u, v)
        divergence = difference(u, 0) + difference(v, 1)

        def sweep(_, p):
            q = jnp.pad(p, 1, mode="edge")
            return 0.25 * (q[2:, 1:-1] + q[:-2, 1:-1] + q[1:-1, 2:] + q[1:-1, :-2] - divergence)

        pressure = lax.fori_loop(0, sweeps, sweep, jnp.zeros_like(u))
        u, v = walled(u - difference(pressure, 0), v - difference(pressure, 1))
        rows, columns = jnp.meshgrid(jnp.arange(high) * 1.0, jnp.arange(wide) * 1.0, indexing="ij")
        rows, columns = rows - dt * u, columns - dt * v
        u, v, smoke, heat = jax.vmap(sampled, in_axes=(0, None, None))(jnp.stack([u, v, smoke, heat]), rows, columns)
        return (u, v, 0.998 * smoke, 0.99 * heat, source), jnp.stack([jnp.sum(smoke), jnp.mean(u**2 + v**2)])

    def simulate(u, v, seed):
        rows, columns = jnp.arange(high)[:, None] / high, jnp.arange(wide)[None, :] / wide
        blob = jnp.exp(-(((rows - 0.15) / 0.05) ** 2) - ((columns - 0.5) / 0.1) ** 2)
        source = jnp.where(blob > 0.1, blob * (1 + 0.1 * jnp.tanh(seed)), 0.0)
        (u, v, smoke, heat, _), totals = lax.scan(step, (u, v, source, source, source), None, length=steps)
        return u, v, smoke, heat, totals

    field = normal(high, wide, scale=0.5)
    return Built(simulate, (field, field, normal(high, wide)))


@program("vortex-blobs-mutual-induction-runge-kutta", GROUP)
def _vortices(size: Size) -> Built:
    """This gives the places of many whirls in a plane that carry each other along, and the dye that they move."""
    whirls, tracers, steps = pick(size, (3000, 1000, 3), (500, 150, 2), (7, 4, 2))
    core, dt = 0.05, 0.01

    def induced(at, places, strengths):
        gap = at[:, None, :] - places[None, :, :]
        squared = jnp.sum(gap**2, axis=-1)
        factor = strengths * -jnp.expm1(-squared / core**2) / (squared + 1e-12) / (2 * jnp.pi)
        return jnp.stack([-jnp.sum(factor * gap[..., 1], axis=1), jnp.sum(factor * gap[..., 0], axis=1)], axis=-1)

    def slope(state, strengths):
        places, dye = state
        both = induced(jnp.concatenate([places, dye]), places, strengths)
        return both[:whirls], both[whirls:]

    def moved(state, k, step):
        return jax.tree.map(lambda x, v: x + step * v, state, k)

    def step(state, strengths):
        k1 = slope(state, strengths)
        k2 = slope(moved(state, k1, dt / 2), strengths)
        k3 = slope(moved(state, k2, dt / 2), strengths)
        k4 = slope(moved(state, k3, dt), strengths)
        return jax.tree.map(lambda x, a, b, c, d: x + dt / 6 * (a + 2 * b + 2 * c + d), state, k1, k2, k3, k4)

    def energy(places, strengths):
        gap = places[:, None] - places[None]
        squared = jnp.sum(gap**2, axis=-1) + core**2
        pairs = strengths[:, None] * strengths[None] * jnp.log(squared)
        return -jnp.sum(jnp.where(jnp.eye(whirls, dtype=bool), 0.0, pairs)) / (8 * jnp.pi)

    def run(places, dye, strengths):
        strengths = strengths / whirls**0.5
        before = energy(places, strengths)
        state, path = lax.scan(lambda s, _: (step(s, strengths), s[1]), (places, dye), None, length=steps)
        centre = jnp.sum(strengths[:, None] * state[0], axis=0) / (jnp.sum(jnp.abs(strengths)) + 1e-6)
        return state, path, centre, energy(state[0], strengths) - before

    return Built(run, (normal(whirls, 2), normal(tracers, 2), normal(whirls)))


@program("photon-stack-deblurred-by-ratios-and-variation", GROUP)
def _deblur(size: Size) -> Built:
    """This gives a stack of microscope images without their blur, by Richardson and Lucy's ratios.

    The blur is applied by Fourier transforms; every round multiplies the estimate by the blurred ratio of seen to
    predicted counts and divides it by one less the curvature of its level lines. Momentum speeds the rounds up.
    """
    planes, high, wide, rounds = pick(size, (16, 300, 360, 5), (2, 150, 180, 5), (2, 9, 8, 2))
    weight, background = 0.002, 2.0

    def blur(x, transfer):
        return jnp.fft.irfft2(jnp.fft.rfft2(x) * transfer, s=(high, wide))

    def curvature(x):
        down, right = jnp.roll(x, -1, axis=-2) - x, jnp.roll(x, -1, axis=-1) - x
        length = jnp.sqrt(down**2 + right**2 + 1e-3)
        down, right = down / length, right / length
        return down - jnp.roll(down, 1, axis=-2) + right - jnp.roll(right, 1, axis=-1)

    def restore(raw, widths):
        counts = jnp.round(40.0 * jax.nn.softplus(raw)) + background
        rows, columns = jnp.fft.fftfreq(high)[:, None], jnp.fft.rfftfreq(wide)[None]
        sigma = 1.5 + 0.3 * jnp.tanh(widths)[:, None, None]
        transfer = jnp.exp(-2 * (jnp.pi * sigma) ** 2 * (rows**2 + columns**2))
        seen = jnp.maximum(blur(counts, transfer), 1.0)

        def body(carry, i):
            x, before, _ = carry
            guess = jnp.maximum(x + jnp.clip(i / (i + 3.0), 0.0, 0.7) * (x - before), 1e-3)
            predicted = jnp.maximum(blur(guess, transfer) + background, 1e-3)
            ratio = blur(seen / predicted, jnp.conj(transfer))
            new = jnp.maximum(guess * ratio / (1.0 - weight * curvature(guess)), 1e-3)
            misfit = jnp.sum(predicted - seen + seen * jnp.log(seen / predicted), axis=(1, 2))
            return (new, x, new - guess), misfit

        start = jnp.broadcast_to(jnp.mean(seen, axis=(1, 2), keepdims=True), seen.shape)
        (x, _, last), misfits = lax.scan(body, (start, start, jnp.zeros_like(start)), jnp.arange(rounds) * 1.0)
        quiet = jnp.percentile(x, 5.0, axis=(1, 2), keepdims=True)
        return jnp.maximum(x - quiet, 0.0), misfits, jnp.max(jnp.abs(last), axis=(1, 2))

    return Built(restore, (normal(planes, high, wide), normal(planes)))


@program("mutually-exciting-events-likelihood-grad", GROUP)
def _hawkes(size: Size) -> Built:
    """This gives the likelihood and gradient of streams of events that make others more likely soon.

    The memory of every kind decays between events and jumps at them: an associative scan gives it just before each
    event.
    """
    streams, events, kinds = pick(size, (24, 2000, 30), (8, 1500, 20), (2, 7, 3))

    def combine(first, second):
        decay1, memory1 = first
        decay2, memory2 = second
        return decay1 * decay2, decay2 * memory1 + memory2

    def stream(params, gaps, marks, length):
        base, excite = jax.nn.softplus(params["base"]), jax.nn.softplus(params["excite"] - 3.0)
        decay = jax.nn.softplus(params["decay"]) + 0.1
        gaps = jax.nn.softplus(gaps)
        times = jnp.cumsum(gaps)
        real = jnp.arange(events) <= length
        jumps = jax.nn.one_hot(marks, kinds) * real[:, None]
        fades = jnp.exp(-decay * gaps[:, None])
        arrived = jnp.concatenate([jnp.zeros((1, kinds)), jumps[:-1]])
        _, memory = lax.associative_scan(combine, (fades, fades * arrived))
        rates = base + (memory * decay) @ excite
        rate = jnp.take_along_axis(rates, marks[:, None], axis=1)[:, 0]
        end = jnp.max(jnp.where(real, times, 0.0))
        left = jnp.where(real, -jnp.expm1(-decay[marks] * jnp.maximum(end - times, 0.0)), 0.0)
        compensator = jnp.sum(base) * end + jnp.sum(left * jnp.sum(excite, axis=1)[marks])
        return jnp.sum(jnp.where(real, jnp.log(rate + 1e-8), 0.0)) - compensator, jnp.sum(real)

    def loss(params, gaps, marks, lengths):
        values, counts = jax.vmap(stream, in_axes=(None, 0, 0, 0))(params, gaps, marks, lengths)
        excite = jax.nn.softplus(params["excite"] - 3.0)
        return -jnp.sum(values) / jnp.sum(counts) + 1e-3 * jnp.sum(excite), values

    params = {"base": normal(kinds, scale=0.5), "excite": normal(kinds, kinds), "decay": normal(kinds)}
    data = (normal(streams, events), integers(streams, events, below=kinds), integers(streams, below=events))
    return Built(jax.value_and_grad(loss, has_aux=True), (params, *data))


@program("market-of-forward-rates-swaptions-by-paths", GROUP)
def _libor(size: Size) -> Built:
    """This gives the prices of options on swaps by paths of forward rates, with their slopes in the first curve.

    Under the spot measure the drift of every rate is a running sum over the rates before it; noise comes from a few
    factors and from its mirror image.
    """
    paths, rates, factors, options = pick(size, (8192, 60, 3, 15), (1000, 24, 3, 7), (8, 5, 2, 2))
    expiry, accrual = rates // 3, 0.25

    def prices(curve, loadings, strikes, noise):
        curve = 0.03 * jnp.exp(0.1 * curve)
        shape = (0.05 + 0.09 * jnp.arange(rates)) * jnp.exp(-0.44 * jnp.arange(rates) * accrual) + 0.12
        loadings = loadings / jnp.linalg.norm(loadings, axis=1, keepdims=True) * shape[:, None]

        def step(carry, over):
            forwards, account = carry
            i, z = over
            alive = jnp.arange(rates) > i
            account = account * (1.0 + accrual * forwards[:, i])
            share = jnp.where(alive, accrual * forwards / (1.0 + accrual * forwards), 0.0)
            drift = jnp.einsum("pif,if->pi", jnp.cumsum(share[..., None] * loadings, axis=1), loadings)
            spread = 0.5 * jnp.sum(loadings**2, axis=-1)
            moved = forwards * jnp.exp((drift - spread) * accrual + (z @ loadings.T) * accrual**0.5)
            return (jnp.where(alive, moved, forwards), account), None

        noise = jnp.concatenate([noise, -noise], axis=1)
        start = (jnp.broadcast_to(curve, (paths, rates)), jnp.ones(paths))
        (forwards, account), _ = lax.scan(step, start, (jnp.arange(expiry), noise))
        bonds = jnp.cumprod(1.0 / (1.0 + accrual * forwards[:, expiry:]), axis=1)
        annuity = accrual * jnp.cumsum(bonds, axis=1)
        ends = jnp.linspace(1, rates - expiry - 1, options).astype(jnp.int32)
        swap = (1.0 - bonds[:, ends]) / annuity[:, ends]
        strike = 0.03 * jnp.exp(0.1 * strikes)
        payoff = annuity[:, ends] * jnp.maximum(swap - strike, 0.0) / account[:, None]
        mirrored = 0.5 * (payoff[: paths // 2] + payoff[paths // 2 :])
        return jnp.mean(mirrored, axis=0), jnp.std(mirrored, axis=0) / (paths // 2) ** 0.5

    def book(curve, loadings, strikes, noise):
        def total(curve):
            price, error = prices(curve, loadings, strikes, noise)
            return jnp.sum(price), (price, error)

        (_, (price, error)), slopes = jax.value_and_grad(total, has_aux=True)(curve)
        return price, error, slopes

    data = (normal(rates), normal(rates, factors), normal(options), normal(expiry, paths // 2, factors))
    return Built(book, data)


@program("motifs-of-sequences-by-expectation-rounds", GROUP)
def _motifs(size: Size) -> Built:
    """This gives short patterns that many sequences of DNA share, by rounds of expectation and maximisation.

    Every start in either direction gets a probability from the pattern against the background; the letters under the
    likely starts, counted with their probabilities, are the next pattern. Several first guesses run side by side.
    """
    guesses, sequences, t, width, rounds = pick(size, (12, 600, 300, 15, 3), (4, 80, 150, 11, 3), (2, 4, 9, 3, 2))
    starts = t - width + 1

    def search(letters, lengths, first):
        codes = jax.nn.one_hot(letters, 4)
        real = jnp.arange(t) <= jnp.maximum(lengths, width)[:, None]
        codes = codes * real[..., None]
        windows = codes[:, jnp.arange(starts)[:, None] + jnp.arange(width)]
        whole = jnp.arange(starts) + width - 1 <= jnp.maximum(lengths, width)[:, None]
        background = (jnp.sum(codes, axis=(0, 1)) + 1.0) / (jnp.sum(codes) + 4.0)

        def one_round(carry, _):
            pattern, share = carry
            score = jnp.log(pattern) - jnp.log(background)
            forwards = jnp.einsum("stwa,wa->st", windows, score)
            backwards = jnp.einsum("stwa,wa->st", windows, score[::-1, ::-1])
            both = jnp.stack([forwards, backwards], axis=-1)
            both = jnp.where(whole[..., None], both, -1e9)
            count = 2.0 * jnp.sum(whole, axis=1)
            both = both + (jnp.log(share) - jnp.log(count))[:, None, None]
            none = jnp.log1p(-share)
            total = jnp.logaddexp(jax.nn.logsumexp(both, axis=(1, 2)), none)
            posterior = jnp.exp(both - total[:, None, None])
            counts = jnp.einsum("st,stwa->wa", posterior[..., 0], windows)
            counts = counts + jnp.einsum("st,stwa->wa", posterior[..., 1], windows)[::-1, ::-1]
            counts = counts + 0.5 * background
            pattern = counts / jnp.sum(counts, axis=-1, keepdims=True)
            share = jnp.clip(jnp.mean(jnp.sum(posterior, axis=(1, 2))), 0.01, 0.99)
            return (pattern, share), (jnp.sum(total), jnp.argmax(jnp.max(posterior, axis=-1), axis=1))

        def run(guess):
            start = (jax.nn.softmax(guess, axis=-1), jnp.float32(0.5))
            (pattern, share), (totals, places) = lax.scan(one_round, start, None, length=rounds)
            information = jnp.sum(pattern * jnp.log2(pattern / background), axis=-1)
            return pattern, share, totals, places[-1], jnp.sum(information)

        patterns, shares, totals, places, information = jax.vmap(run)(first)
        best = jnp.argmax(totals[:, -1])
        return patterns[best], shares, totals, places[best], information

    data = (integers(sequences, t, below=4), integers(sequences, below=t), normal(guesses, width, 4))
    return Built(search, data)


@program("median-slopes-and-rank-trends-of-stations", GROUP)
def _trends(size: Size) -> Built:
    """This gives the robust trend of every station's values: the median of all slopes, and a test on their signs.

    The values may be missing; the false discovery rate over the stations is held by the sorted chances of the test.
    """
    stations, years = pick(size, (900, 77), (250, 41), (6, 7))
    first, second = np.triu_indices(years, 1)

    def station(y, seen):
        fall = y[second] - y[first]
        both = seen[second] & seen[first]
        slopes = jnp.where(both, fall / (second - first), jnp.inf)
        slopes = jnp.sort(slopes)
        pairs, count = jnp.sum(both), jnp.sum(seen)

        def quantile(q):
            place = jnp.clip(q * (pairs - 1.0), 0.0, jnp.maximum(pairs - 1.0, 0.0))
            low = jnp.floor(place).astype(jnp.int32)
            high = jnp.minimum(low + 1, jnp.maximum(pairs - 1, 0))
            return slopes[low] + (place - low) * (slopes[high] - slopes[low])

        signs = jnp.sum(jnp.where(both, jnp.sign(fall), 0.0))
        filled = jnp.where(seen, y, jnp.inf)
        ties = jnp.sum((filled[:, None] == filled[None]) & seen[:, None] & seen[None], axis=1)
        tied = jnp.sum(jnp.where(seen, (ties - 1.0) * (2.0 * ties + 5.0), 0.0))
        n = count.astype(jnp.float32)
        variance = jnp.maximum((n * (n - 1) * (2 * n + 5) - tied) / 18.0, 1.0)
        z = jnp.where(signs == 0, 0.0, (signs - jnp.sign(signs)) / jnp.sqrt(variance))
        chance = 2.0 * jax.scipy.stats.norm.sf(jnp.abs(z))
        spread = 1.96 * jnp.sqrt(variance) / jnp.maximum(pairs, 1)
        slope = quantile(0.5)
        rest = jnp.sort(jnp.where(seen, y - slope * jnp.arange(years), jnp.inf))
        level = rest[jnp.maximum(count - 1, 0) // 2]
        return (
            slope,
            level,
            quantile(0.5 - spread / 2),
            quantile(0.5 + spread / 2),
            signs / jnp.maximum(pairs, 1),
            chance,
        )

    def analyse(values, trend, chances):
        seen = chances < 1.2
        seen = seen.at[:, :3].set(True)
        values = jnp.round(values + trend[:, None] * 0.02 * jnp.arange(years), 1)
        slope, level, low, high, tau, chance = jax.vmap(station)(values, seen)
        order = jnp.argsort(chance)
        corrected = chance[order] * stations / jnp.arange(1, stations + 1)
        corrected = lax.cummin(corrected, reverse=True)
        corrected = jnp.zeros(stations).at[order].set(jnp.minimum(corrected, 1.0))
        return slope, level, low, high, tau, corrected, jnp.mean(corrected < 0.1)

    return Built(analyse, (normal(stations, years), normal(stations), normal(stations, years)))
