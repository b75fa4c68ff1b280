"""Programs of finance, biology, signals, chemistry and graphics in plain JAX, the thirteenth set: its author had seen no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program

GROUP = "thirteenth"


@program("american-put-least-squares-paths", GROUP)
def _american(size: Size) -> Built:
    """This gives the price of American puts of several strikes by the regression of Longstaff and Schwartz.

    Paths of a geometric Brownian motion run forwards; backwards, the cash of the paths in the money is regressed on powers
    of the standardised price, and a path is exercised, smoothly, where the payoff exceeds the fit.
    """
    paths, steps, strikes = pick(size, (50_000, 50, 7), (4000, 50, 5), (64, 4, 2))
    rate, volatility, dt = 0.06, 0.2, 1.0 / steps

    def price(spot, strike, noise):
        both = jnp.concatenate([noise, -noise], axis=1)
        drift = (rate - 0.5 * volatility**2) * dt
        spots = spot * jnp.exp(jnp.cumsum(drift + volatility * jnp.sqrt(dt) * both, axis=0))

        def payoff(s):
            return jnp.maximum(strike - s, 0.0)

        def backwards(cash, s):
            cash = cash * jnp.exp(-rate * dt)
            inside = (payoff(s) > 0).astype(s.dtype)[:, None]
            z = (s - jnp.mean(s)) / jnp.std(s)
            basis = jnp.stack([jnp.ones_like(z), z, z**2], axis=-1)
            gram = (basis * inside).T @ basis + 0.01 * jnp.eye(3)
            fit = basis @ jnp.linalg.solve(gram, (basis * inside).T @ cash)
            exercised = jnp.where(payoff(s) > 0, jax.nn.sigmoid((payoff(s) - fit) / 0.05), 0.0)
            return exercised * payoff(s) + (1.0 - exercised) * cash, jnp.mean(exercised)

        cash, shares = lax.scan(backwards, payoff(spots[-1]), spots[:-1], reverse=True)
        cash = cash * jnp.exp(-rate * dt)
        return jnp.mean(cash), jnp.std(cash) / jnp.sqrt(paths), shares

    def all_strikes(spot, moneyness, noise):
        level = 36.0 + jnp.abs(spot)
        ks = level * (1.05 + 0.05 * jnp.tanh(moneyness))
        return jax.vmap(price, in_axes=(None, 0, None))(level, ks, noise)

    return Built(all_strikes, (normal(), normal(strikes), normal(steps, paths // 2)))


@program("edit-distances-of-queries-by-running-minima", GROUP)
def _edits(size: Size) -> Built:
    """This gives the edit distance of every query to every word of a list, and the nearest distances.

    A scan over the letters of the query keeps one row of the table per word; insertions along the row are a running minimum of the
    row less its index, and rows of short words are read at their length.
    """
    queries, words, letters, alphabet, top = pick(size, (64, 6000, 24, 26, 10), (9, 500, 18, 26, 5), (2, 5, 6, 4, 3))

    def distance(query, query_length, word, word_length):
        along = jnp.arange(letters + 1)

        def row(previous, over):
            i, letter = over
            cost = jnp.where(word == letter, 0, 1)
            cheaper = jnp.minimum(previous[1:] + 1, previous[:-1] + cost)
            new = jnp.concatenate([jnp.array([i + 1]), cheaper])
            new = lax.cummin(new - along) + along
            return jnp.where(i < query_length, new, previous), None

        last, _ = lax.scan(row, along, (jnp.arange(letters), query))
        return last[word_length]

    def search(query_letters, query_lengths, word_letters, word_lengths):
        over_words = jax.vmap(distance, in_axes=(None, None, 0, 0))
        table = jax.vmap(over_words, in_axes=(0, 0, None, None))(
            query_letters, query_lengths + 1, word_letters, word_lengths + 1
        )
        longest = jnp.maximum(query_lengths[:, None], word_lengths[None, :]) + 1
        likeness = 1.0 - table / longest
        return lax.top_k(likeness, top)[0], jnp.min(table, axis=1), jnp.mean(table, axis=0)

    texts = (integers(queries, letters, below=alphabet), integers(queries, below=letters))
    return Built(search, (*texts, integers(words, letters, below=alphabet), integers(words, below=letters)))


@program("multitaper-coherence-of-electrodes", GROUP)
def _coherence(size: Size) -> Built:
    """This gives spectra, coherences and phases of all pairs of electrodes from sine tapers over many trials.

    Trials lose their linear trend, are multiplied by orthogonal tapers and transformed; cross-spectra are averages over trials and
    tapers, the tapers being weighted to favour the first ones.
    """
    trials, channels, samples, tapers, kept = pick(
        size, (60, 32, 1000, 7, 201), (12, 12, 600, 5, 121), (3, 3, 12, 2, 5)
    )

    def coherence(recordings):
        t = jnp.arange(samples)
        ramp = (t - jnp.mean(t)) / jnp.std(t)
        x = recordings - jnp.mean(recordings, axis=-1, keepdims=True)
        x = x - jnp.mean(x * ramp, axis=-1, keepdims=True) * ramp
        k = jnp.arange(1, tapers + 1)[:, None]
        windows = jnp.sqrt(2.0 / (samples + 1)) * jnp.sin(jnp.pi * k * (t + 1) / (samples + 1))
        spectra = jnp.fft.rfft(x[:, :, None, :] * windows, axis=-1)[..., 1 : kept + 1]
        share = 1.0 - ((k[:, 0] - 1.0) / tapers) ** 2
        share = share / jnp.sum(share)
        cross = jnp.einsum("ncmf,ndmf,m->cdf", spectra, jnp.conj(spectra), share) / trials
        power = jnp.real(jnp.einsum("ccf->cf", cross))
        squared = jnp.abs(cross) ** 2 / (power[:, None] * power[None, :] + 1e-12)
        decibels = 10.0 * jnp.log10(power + 1e-12)
        lagged = jnp.imag(cross) / jnp.sqrt(power[:, None] * power[None, :] + 1e-12)
        smooth = jax.vmap(lambda p: jnp.convolve(p, jnp.ones(3) / 3, mode="same"))(decibels)
        return decibels - smooth, squared, lagged

    return Built(coherence, (normal(trials, channels, samples),))


@program("adaptive-dormand-prince-reaction-ensemble", GROUP)
def _dopri(size: Size) -> Built:
    """This gives concentrations of many oscillating reactions, each by Dormand and Prince's method with its own steps.

    A mapped `while_loop` accepts or rejects a step by the error of the embedded method and adapts its length until all members
    of the ensemble have reached the end or a limit of steps.
    """
    members, end, limit = pick(size, (100_000, 4.0, 200), (20_000, 4.0, 200), (3, 1.0, 50))
    rows = (
        (1 / 5,),
        (3 / 40, 9 / 40),
        (44 / 45, -56 / 15, 32 / 9),
        (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
        (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
    )
    low = (5179 / 57600, 0.0, 7571 / 16695, 393 / 640, -92097 / 339200, 187 / 2100, 1 / 40)

    def field(y, a, b):
        x, z = y
        return jnp.stack([a + x**2 * z - (b + 1.0) * x, b * x - x**2 * z])

    def solve(y, a, b):
        def going(state):
            t, _, _, count, _ = state
            return (t < end) & (count < limit)

        def step(state):
            t, y, h, count, rejected = state
            h = jnp.minimum(h, end - t)
            ks = [field(y, a, b)]
            for row in rows:
                ks.append(field(y + h * sum(c * k for c, k in zip(row, ks, strict=True)), a, b))
            new = y + h * sum(c * k for c, k in zip(rows[-1], ks[:-1], strict=True))
            embedded = y + h * sum(c * k for c, k in zip(low, ks, strict=True))
            scale = 1e-6 + 1e-5 * jnp.maximum(jnp.abs(y), jnp.abs(new))
            error = jnp.sqrt(jnp.mean(((new - embedded) / scale) ** 2))
            accepted = error <= 1.0
            factor = jnp.clip(0.9 * jnp.maximum(error, 1e-8) ** -0.2, 0.2, 5.0)
            t, y = jnp.where(accepted, t + h, t), jnp.where(accepted, new, y)
            done = t >= end - 1e-5
            return jnp.where(done, end, t), y, h * factor, count + 1, rejected + ~accepted

        start = (jnp.float32(0.0), y, jnp.float32(0.05), 0, 0)
        return lax.while_loop(going, step, start)

    def ensemble(starts, parameters):
        a, b = 1.0 + 0.1 * jnp.tanh(parameters[:, 0]), 2.2 + 0.4 * jnp.tanh(parameters[:, 1])
        t, y, _, _, _ = jax.vmap(solve)(1.0 + jnp.abs(starts), a, b)
        return y, t, jnp.mean(y, axis=0), jnp.cov(y.T)

    return Built(ensemble, (normal(members, 2, scale=0.5), normal(members, 2)))


@program("cloud-marched-with-light-rays", GROUP)
def _cloud(size: Size) -> Built:
    """This gives the picture of a cloud in a grid of densities, lit by one sun through single scattering.

    A loop walks along every camera ray, samples the grid trilinearly, marches a few steps towards the sun at each place, and
    gathers light by a two-lobed phase function until the ray leaves the box.
    """
    height, width, cells, steps, towards = pick(size, (180, 320, 64, 48, 6), (32, 48, 32, 24, 4), (3, 4, 5, 4, 2))
    sun = np.array([0.5, 0.7, 0.5], np.float32) / np.sqrt(0.99, dtype=np.float32)

    def sample(grid, point):
        at = (point + 1.0) * 0.5 * (cells - 1)
        inside = jnp.all((at >= 0) & (at <= cells - 1), axis=-1)
        low = jnp.clip(jnp.floor(at).astype(jnp.int32), 0, cells - 2)
        part = jnp.clip(at - low, 0.0, 1.0)
        total = 0.0
        for corner in np.ndindex(2, 2, 2):
            x, y, z = (low[..., axis] + corner[axis] for axis in range(3))
            share = jnp.prod(jnp.where(np.array(corner) == 1, part, 1.0 - part), axis=-1)
            total = total + share * grid[x, y, z]
        return jnp.where(inside, total, 0.0)

    def lobe(cosine, g):
        return (1 - g**2) / (4 * jnp.pi * (1 + g**2 - 2 * g * cosine) ** 1.5)

    def render(noise, camera):
        axis = jnp.linspace(-1.0, 1.0, cells)
        squared = axis[:, None, None] ** 2 + axis[:, None] ** 2 + axis**2
        grid = jax.nn.relu(6.0 * (0.8 - squared) + noise)
        v, u = jnp.meshgrid(jnp.linspace(0.6, -0.6, height), jnp.linspace(-1.0, 1.0, width), indexing="ij")
        directions = jnp.stack([u, v, jnp.full_like(u, 2.0)], axis=-1)
        directions = directions / jnp.linalg.norm(directions, axis=-1, keepdims=True)
        origin = jnp.array([0.0, 0.0, -3.0]) + 0.1 * jnp.tanh(camera)
        phase = 0.7 * lobe(directions @ sun, 0.6) + 0.3 * lobe(directions @ sun, -0.2)
        dt, dl = 2.6 / steps, 0.9 / towards

        def march(i, carry):
            light, clear = carry
            point = origin + (1.7 + (i + 0.5) * dt) * directions
            density = sample(grid, point)
            lit = point[..., None, :] + (jnp.arange(towards)[:, None] + 0.5) * dl * sun
            shade = jnp.exp(-jnp.sum(sample(grid, lit), axis=-1) * dl)
            through = jnp.exp(-density * dt)
            light = light + clear * (1.0 - through) * (12.0 * phase * shade + 0.15)
            return light, clear * through

        light, clear = lax.fori_loop(0, steps, march, (jnp.zeros((height, width)), jnp.ones((height, width))))
        sky = jnp.array([0.4, 0.6, 0.9]) * (0.7 + 0.3 * v[..., None])
        colour = light[..., None] * jnp.array([1.0, 0.95, 0.85]) + clear[..., None] * sky
        return jnp.clip(colour / (1.0 + colour), 0.0, 1.0) ** (1 / 2.2), clear

    return Built(render, (normal(cells, cells, cells, scale=0.5), normal(3)))


@program("affinity-propagation-damped-messages", GROUP)
def _affinity(size: Size) -> Built:
    """This gives the evidence that each point is the exemplar of each other, after damped rounds of affinity propagation.

    Responsibilities take the best and second best rival of every row, availabilities take sums of positive responsibilities down
    every column, and the median similarity is the preference of all.
    """
    points, n, rounds = pick(size, (1500, 17, 30), (250, 9, 20), (7, 3, 3))

    def messages(x):
        squared = jnp.sum(x**2, axis=1)
        similar = 2.0 * x @ x.T - squared[:, None] - squared[None, :]
        own = jnp.eye(points, dtype=bool)
        similar = jnp.where(own, jnp.median(similar), similar)
        columns = jnp.arange(points)[None]

        def one_round(carry, _):
            responsible, available = carry
            total = available + similar
            best = jnp.argmax(total, axis=1)
            first = jnp.max(total, axis=1)
            second = jnp.max(jnp.where(columns == best[:, None], -jnp.inf, total), axis=1)
            rival = jnp.where(columns == best[:, None], second[:, None], first[:, None])
            responsible = 0.7 * responsible + 0.3 * (similar - rival)
            positive = jnp.where(own, responsible, jnp.maximum(responsible, 0.0))
            support = jnp.sum(positive, axis=0)[None] - positive
            available = 0.7 * available + 0.3 * jnp.where(own, support, jnp.minimum(support, 0.0))
            return (responsible, available), jnp.mean(jnp.diagonal(responsible + available) > 0)

        zeros = jnp.zeros_like(similar)
        (responsible, available), exemplars = lax.scan(one_round, (zeros, zeros), None, length=rounds)
        evidence = responsible + available
        return evidence, jnp.max(evidence, axis=1), exemplars

    return Built(messages, (normal(points, n),))
