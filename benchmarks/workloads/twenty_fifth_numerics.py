"""Fluids, breaks in series, brain waves and echoes, the twenty-fifth set: its author saw no plan."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import gammaln

from benchmarks.workloads.registry import Built, Size, booleans, integers, normal, pick, program

GROUP = "twenty-fifth"


@program("a-lid-stirs-boxes-of-fluid-pressure-by-red-and-black-sweeps", GROUP)
def _stirred(size: Size) -> Built:
    """This simulates boxes of fluid of different thickness that a moving lid stirs, with a dye that is carried along.

    Speeds live on the sides of cells (Harlow and Welch, 1965); pressure keeps the fluid from being squeezed and is found by
    sweeps over the red and the black cells in turn (overrelaxation).
    """
    boxes, rows, columns = pick(size, (5, 157, 211), (5, 111, 147), (2, 6, 7))
    steps, sweeps, over = 15, 13, 1.7
    h = 1.0 / columns
    i, j = np.indices((rows, columns))
    red = (i + j) % 2 == 0
    sides = (i > 0).astype(np.float32) + (i < rows - 1) + (j > 0) + (j < columns - 1)
    floor_to_lid, wall_to_wall = np.arange(rows + 1) / rows, np.arange(columns + 1) / columns
    calm = np.outer(np.sin(np.pi * floor_to_lid), np.sin(np.pi * wall_to_wall)).astype(np.float32) ** 2

    def squeezed(u, v):
        return (u[:, 1:] - u[:, :-1] + v[1:] - v[:-1]) / h

    def relaxed(p, wanted):
        def sweep(p, _):
            for cells in (red, ~red):
                q = jnp.pad(p, 1)
                around = q[:-2, 1:-1] + q[2:, 1:-1] + q[1:-1, :-2] + q[1:-1, 2:]
                p = jnp.where(cells, (1 - over) * p + over * (around - h * h * wanted) / sides, p)
            return p, None

        p = lax.scan(sweep, p, None, length=sweeps)[0]
        return p - jnp.mean(p)

    def forces(u, v, lid, thick):
        """These are the changes of the speeds on inner sides by carrying and by friction."""
        tall = jnp.concatenate([-u[:1], u, 2 * lid - u[-1:]])
        broad = jnp.concatenate([-v[:, :1], v, -v[:, -1:]], axis=1)
        corner = 0.25 * (tall[1:] + tall[:-1]) * (broad[:, 1:] + broad[:, :-1])
        along, across = (0.5 * (u[:, 1:] + u[:, :-1])) ** 2, (0.5 * (v[1:] + v[:-1])) ** 2
        du = -(along[:, 1:] - along[:, :-1]) - (corner[1:, 1:-1] - corner[:-1, 1:-1])
        dv = -(across[1:] - across[:-1]) - (corner[1:-1, 1:] - corner[1:-1, :-1])
        rub_u = tall[2:, 1:-1] + tall[:-2, 1:-1] + u[:, 2:] + u[:, :-2] - 4 * u[:, 1:-1]
        rub_v = broad[1:-1, 2:] + broad[1:-1, :-2] + v[2:] + v[:-2] - 4 * v[1:-1]
        return du / h + thick * rub_u / h**2, dv / h + thick * rub_v / h**2

    def carried(dye, u, v):
        """This is the change of the dye by what flows in and out through the sides, taken from upstream."""
        left, right = jnp.pad(dye, ((0, 0), (1, 0))), jnp.pad(dye, ((0, 0), (0, 1)))
        under, above = jnp.pad(dye, ((1, 0), (0, 0))), jnp.pad(dye, ((0, 1), (0, 0)))
        flux = jnp.maximum(u, 0) * left + jnp.minimum(u, 0) * right
        rise = jnp.maximum(v, 0) * under + jnp.minimum(v, 0) * above
        return -(flux[:, 1:] - flux[:, :-1] + rise[1:] - rise[:-1]) / h

    def run_box(noise, thin, pull):
        thick = 1e-3 * jnp.exp(0.5 * jnp.tanh(thin))
        lid = 1 + 0.3 * jnp.tanh(pull)
        dt = jnp.minimum(0.2 * h, 0.2 * h * h / thick)
        flow = calm * jax.image.resize(noise, calm.shape, "cubic") * 0.1
        u, v = (flow[1:] - flow[:-1]) / h, -(flow[:, 1:] - flow[:, :-1]) / h
        dye = jnp.asarray((j < columns // 3).astype(np.float32))

        def step(carry, _):
            u, v, p, dye = carry
            du, dv = forces(u, v, lid, thick)
            u, v = u.at[:, 1:-1].add(dt * du), v.at[1:-1].add(dt * dv)
            p = relaxed(p, squeezed(u, v) / dt)
            u = u.at[:, 1:-1].add(-dt * (p[:, 1:] - p[:, :-1]) / h)
            v = v.at[1:-1].add(-dt * (p[1:] - p[:-1]) / h)
            dye = dye + dt * carried(dye, u, v)
            energy = 0.5 * (jnp.mean(u * u) + jnp.mean(v * v))
            return (u, v, p, dye), (energy, jnp.sqrt(jnp.mean(squeezed(u, v) ** 2)), jnp.max(jnp.abs(p)))

        (u, v, p, dye), told = lax.scan(step, (u, v, jnp.zeros((rows, columns)), dye), None, length=steps)
        streams = jnp.cumsum(u, axis=0) * h
        mixed = jnp.mean(dye * (1 - dye))
        return told, streams, p, dye, mixed, u[:, columns // 2], v[rows // 2]

    inputs = (normal(boxes, 5, 7), normal(boxes), normal(boxes))
    return Built(jax.vmap(run_box), inputs)


@program("breaks-of-many-series-by-lengths-of-runs-since-the-last", GROUP)
def _breaks(size: Size) -> Built:
    """This finds breaks in many series with gaps by keeping chances of how long ago the last break was.

    It is online change-point detection (Adams and MacKay, 2007) of bell-shaped values with unknown mean and spread; afterwards the
    likeliest breaks are traced back, and every stretch gets its mean.
    """
    series, t = pick(size, (3001, 101), (211, 101), (3, 9))
    lengths = t + 1

    def student(x, mean, kappa, alpha, beta):
        """This is the log-density of a value under a normal-inverse-gamma belief."""
        freedom, scale = 2 * alpha, beta * (kappa + 1) / (alpha * kappa)
        norm = gammaln(alpha + 0.5) - gammaln(alpha) - 0.5 * jnp.log(freedom * np.pi * scale)
        return norm - (alpha + 0.5) * jnp.log1p((x - mean) ** 2 / (freedom * scale))

    def run(noise, jumps, levels, seen, rate, rough):
        level = jnp.cumsum(jnp.where(jnp.abs(jumps) > 2, 4 * levels, 0.0), axis=1)
        x = level + noise * jnp.exp(0.2 * rough)[:, None]
        seen = seen.at[:, 0].set(True)
        centre = jnp.sum(jnp.where(seen, x, 0), axis=1) / jnp.sum(seen, axis=1)
        hazard = jax.nn.log_sigmoid(0.3 * rate - 3.5)[:, None]
        stay = jnp.log1p(-jnp.exp(hazard))
        prior = (centre, jnp.full(series, 0.1), jnp.full(series, 1.5), jnp.full(series, 1.0))

        def shifted(first, rest):
            return jnp.concatenate([first[:, None], rest[:, :-1]], axis=1)

        def step(carry, now):
            chance, best, (mean, kappa, alpha, beta) = carry
            value, known = now[0][:, None], now[1][:, None]
            fit = jnp.where(known, student(value, mean, kappa, alpha, beta), 0.0)
            joint = chance + fit
            fresh = shifted(jax.nn.logsumexp(joint + hazard, axis=1), joint + stay)
            evidence = jax.nn.logsumexp(fresh, axis=1)
            fresh = jnp.maximum(fresh - evidence[:, None], -1e4)
            path = best + fit
            source = jnp.argmax(path, axis=1)
            path = shifted(jnp.max(path, axis=1) + hazard[:, 0], path + stay)
            path = jnp.maximum(path - jnp.max(path, axis=1, keepdims=True), -1e4)
            after = (
                (kappa * mean + value) / (kappa + 1),
                kappa + 1,
                alpha + 0.5,
                beta + 0.5 * kappa * (value - mean) ** 2 / (kappa + 1),
            )
            belief = (mean, kappa, alpha, beta)
            belief = tuple(shifted(p, jnp.where(known, a, z)) for p, a, z in zip(prior, after, belief, strict=True))
            expected = jnp.sum(jnp.exp(fresh) * jnp.arange(lengths), axis=1)
            told = (evidence, expected, jnp.exp(fresh[:, 0]), jnp.argmax(fresh, axis=1))
            return (fresh, path, belief), (source, told)

        start = jnp.full((series, lengths), -1e4).at[:, 0].set(0.0)
        belief = tuple(jnp.broadcast_to(p[:, None], (series, lengths)) for p in prior)
        (_, path, _), (sources, told) = lax.scan(step, (start, start, belief), (x.T, seen.T))

        def back(length, source):
            return jnp.where(length > 0, length - 1, source), length == 0

        _, ended = lax.scan(back, jnp.argmax(path, axis=1), sources, reverse=True)
        owner = jnp.cumsum(jnp.roll(ended.T, 1, axis=1).at[:, 0].set(False), axis=1)

        def means(value, weight, owner):
            total = jax.ops.segment_sum(value * weight, owner, t)
            return (total / jnp.maximum(jax.ops.segment_sum(weight, owner, t), 1.0))[owner]

        smooth = jax.vmap(means)(x, seen.astype(jnp.float32), owner)
        evidence, expected, broke, likely = told
        return jnp.sum(evidence, axis=0), expected, broke, likely, owner[:, -1], smooth, jnp.mean((smooth - level) ** 2)

    inputs = (normal(series, t), normal(series, t), normal(series, t), booleans(series, t))
    return Built(run, (*inputs, normal(series), normal(series)))


@program("logs-of-spreads-of-brain-waves-by-paired-turns-nearest-class", GROUP)
def _brain_waves(size: Size) -> Built:
    """This tells which movement a person imagines from how the waves of electrodes rise and fall together.

    Spreads of fourteen electrodes are turned to their axes by rotations of seven pairs at a time (Jacobi, in the order of a
    tournament), made to logarithms, and compared with the means of four classes (log-Euclidean, Arsigny, 2006).
    """
    trials, electrodes, samples, bands = pick(size, (288, 14, 501, 3), (233, 14, 251, 2), (8, 4, 23, 2))
    classes, sweeps = 4, 5
    others = list(range(1, electrodes))
    rounds = []
    for _ in range(electrodes - 1):
        ring = [0, *others]
        rounds.append([(ring[k], ring[-1 - k]) for k in range(electrodes // 2)])
        others = others[-1:] + others[:-1]
    pairs = np.sort(np.array(rounds), axis=-1)

    def turned(matrices):
        """This gives the sizes and the axes of symmetric matrices [..., n, n], and what is left off the diagonal."""
        eye = jnp.broadcast_to(jnp.eye(electrodes), matrices.shape)

        def step(k, carry):
            a, v = carry
            p, q = jnp.moveaxis(jnp.asarray(pairs)[k % (electrodes - 1)], -1, 0)
            gap, both = a[:, q, q] - a[:, p, p], a[:, p, q]
            tau = gap / jnp.where(jnp.abs(both) > 1e-12, 2 * both, 1.0)
            tan = jnp.where(tau >= 0, 1.0, -1.0) / (jnp.abs(tau) + jnp.sqrt(1 + tau * tau))
            tan = jnp.where(jnp.abs(both) > 1e-12, tan, 0.0)
            cos = lax.rsqrt(1 + tan * tan)
            sin = tan * cos
            c, s = cos[:, :, None], sin[:, :, None]
            one, two = a[:, p], a[:, q]
            a = a.at[:, p].set(c * one - s * two).at[:, q].set(s * one + c * two)
            c, s = cos[:, None], sin[:, None]
            one, two = a[:, :, p], a[:, :, q]
            a = a.at[:, :, p].set(c * one - s * two).at[:, :, q].set(s * one + c * two)
            one, two = v[:, :, p], v[:, :, q]
            return a, v.at[:, :, p].set(c * one - s * two).at[:, :, q].set(s * one + c * two)

        a, v = lax.fori_loop(0, sweeps * (electrodes - 1), step, (matrices, eye))
        values = jnp.diagonal(a, axis1=-2, axis2=-1)
        left = jnp.sqrt(jnp.maximum(jnp.sum(a * a, axis=(-1, -2)) - jnp.sum(values**2, axis=-1), 0.0))
        order = jnp.argsort(values, axis=-1)
        values = jnp.take_along_axis(values, order, axis=-1)
        return values, jnp.take_along_axis(v, order[:, None], axis=-1), left

    def run(raw, mixing, labels, session):
        lift = 1 + 0.5 * jax.nn.one_hot(labels, classes) @ jnp.abs(mixing[:classes])
        waves = jnp.einsum("tes,ef->tfs", raw * lift[:, :, None], mixing)
        waves = waves - jnp.mean(waves, axis=1, keepdims=True)
        waves = waves - jnp.mean(waves, axis=2, keepdims=True)
        tones = jnp.fft.rfft(waves * np.hanning(samples).astype(np.float32), axis=-1)
        edges = np.linspace(1, tones.shape[-1], bands + 1).astype(int)
        spreads = []
        for low, high in itertools.pairwise(edges):
            some = tones[..., low:high]
            spread = jnp.einsum("tes,tfs->tef", some, jnp.conj(some)).real / (high - low)
            trace = jnp.trace(spread, axis1=-2, axis2=-1)[:, None, None] / electrodes
            spreads.append(0.95 * spread / trace + 0.05 * jnp.eye(electrodes))
        spreads = jnp.concatenate(spreads)
        values, axes, left = turned(spreads)
        logs = jnp.einsum("bij,bj,bkj->bik", axes, jnp.log(jnp.maximum(values, 1e-6)), axes)
        logs = logs.reshape(bands, trials, electrodes, electrodes)
        known = jax.nn.one_hot(labels, classes) * session[:, None]
        mean = jnp.einsum("tc,btij->bcij", known, logs) / jnp.maximum(jnp.sum(known, axis=0), 1.0)[:, None, None]
        far = jnp.sum((logs[:, :, None] - mean[:, None]) ** 2, axis=(-1, -2))
        within = jnp.sum(known * far, axis=(1, 2)) / jnp.maximum(jnp.sum(known), 1.0)
        score = jax.nn.log_softmax(-jnp.sum(far / (within[:, None, None] + 1e-3), axis=0), axis=-1)
        asked = ~session
        right = jnp.sum(asked & (jnp.argmax(score, axis=-1) == labels)) / jnp.maximum(jnp.sum(asked), 1)
        return score, right, values, left, mean

    inputs = (normal(trials, electrodes, samples), normal(electrodes, electrodes, scale=electrodes**-0.5))
    return Built(run, (*inputs, integers(trials, below=classes), booleans(trials)))


@program("echoes-of-rooms-taken-out-of-calls-block-by-block", GROUP)
def _echoes(size: Size) -> Built:
    """This takes the echo of the far talker out of the microphone of many calls while the near talker speaks too.

    Filters of a room are cut in parts and learned in frequencies, a block of 15 milliseconds at a time (Soo and Pang, 1990), with
    steps that shrink when both talk (Valin, 2007); what is left is weakened by gains.
    """
    calls, block, parts, blocks = pick(size, (53, 240, 8, 31), (29, 240, 8, 31), (2, 12, 3, 5))
    length, bins = block * blocks, block + 1
    window = np.sqrt(np.hanning(2 * block + 1)[:-1] + 1e-9).astype(np.float32)
    fade = np.exp(-np.arange(block * parts) / (0.25 * block * parts)).astype(np.float32)
    turns = 2 * np.pi * np.outer(np.arange(2 * block), np.arange(bins)) / (2 * block)
    cos, sin = np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)
    twice = (np.where(np.arange(bins) % block == 0, 1, 2) / (2 * block)).astype(np.float32)

    def times(x, table):
        return jnp.matmul(x, table, precision=lax.Precision.HIGHEST)

    def tones_of(x):
        """This gives the tones of two blocks of samples: products with tables of cosines and sines."""
        return lax.complex(times(x, cos), -times(x, sin))

    def samples_of(tones):
        return times(twice * tones.real, cos.T) - times(twice * tones.imag, sin.T)

    def spoken(noise, loud):
        """This makes noise sound like speech: low tones are stronger, and loudness comes and goes."""
        padded = jnp.pad(noise, ((0, 0), (8, 0)))
        low = sum(0.7**k * padded[:, 8 - k : 8 - k + length] for k in range(9))
        return 0.5 * low * jnp.repeat(jax.nn.sigmoid(3 * loud), block, axis=1)

    def paired(x):
        """This gives every block after the one before it: [blocks, calls, two blocks]."""
        pieces = jnp.moveaxis(x.reshape(calls, blocks, block), 1, 0)
        return jnp.concatenate([jnp.concatenate([jnp.zeros_like(pieces[:1]), pieces[:-1]]), pieces], axis=-1)

    def echoed(far, room):
        """This is what a room [calls, parts, block] makes of far talk, part by part."""
        tones = jnp.pad(tones_of(paired(far)), ((parts - 1, 0), (0, 0), (0, 0)))
        filters = tones_of(jnp.pad(room, ((0, 0), (0, 0), (0, block))))
        total = sum(tones[parts - 1 - k : parts - 1 - k + blocks] * filters[:, k] for k in range(parts))
        return jnp.moveaxis(samples_of(total)[..., block:], 0, 1).reshape(calls, length)

    def learned(far, heard):
        def step(carry, now):
            weights, past, power, sent, kept, leak, before, tail = carry
            pair, wanted = now
            fresh = tones_of(pair)
            past = jnp.concatenate([fresh[:, None], past[:, :-1]], axis=1)
            power = 0.85 * power + 0.15 * jnp.sum(jnp.abs(past) ** 2, axis=1)
            guess = jnp.sum(weights * past, axis=1)
            echo = samples_of(guess)[:, block:]
            error = wanted - echo
            wrong = tones_of(jnp.pad(error, ((0, 0), (block, 0))))
            shown = tones_of(jnp.pad(echo, ((0, 0), (block, 0))))
            sent = 0.8 * sent + 0.2 * jnp.abs(shown) ** 2
            kept = 0.8 * kept + 0.2 * jnp.abs(wrong) ** 2
            shared = jnp.sum(sent * kept, axis=-1) / (jnp.sum(sent * sent, axis=-1) + 1e-6)
            leak = 0.9 * leak + 0.1 * jnp.clip(shared, 0.005, 1.0)
            residue = leak[:, None] * sent
            rate = jnp.clip(residue / (kept + 1e-6), 0.05, 0.5)
            change = jnp.conj(past) * (rate * wrong / (power + 1e-3))[:, None]
            change = samples_of(change)[..., :block]
            weights = weights + tones_of(jnp.pad(change, ((0, 0), (0, 0), (0, block))))
            both = tones_of(jnp.concatenate([before, error], axis=-1) * window)
            pass_on = jnp.maximum(1 - residue / (jnp.abs(both) ** 2 + 1e-6), 0.1)
            clean = samples_of(both * pass_on) * window
            told = (clean[:, :block] + tail, error, jnp.mean(pass_on, axis=-1), leak)
            return (weights, past, power, sent, kept, leak, error, clean[:, block:]), told

        zeros, spectra = jnp.zeros((calls, block)), jnp.zeros((calls, bins))
        filters = jnp.zeros((calls, parts, bins), jnp.complex64)
        carry = (filters, filters, spectra, spectra, spectra, jnp.ones(calls), zeros, zeros)
        carry, told = lax.scan(step, carry, (paired(far), jnp.moveaxis(heard.reshape(calls, blocks, block), 1, 0)))
        return carry[0], told

    def run(noise, loud, other, louder, room, hiss):
        far, near = spoken(noise, loud), spoken(other, louder)
        room = room * fade
        room = room / jnp.sqrt(jnp.sum(room * room, axis=-1, keepdims=True))
        echo = echoed(far, room.reshape(calls, parts, block))
        weights, (clean, error, passed, leak) = learned(far, echo + 0.3 * near + 0.003 * hiss)
        near_blocks = jnp.moveaxis(near.reshape(calls, blocks, block), 1, 0)
        left = jnp.mean((error - 0.3 * near_blocks) ** 2, axis=-1)
        was = jnp.mean(jnp.moveaxis(echo.reshape(calls, blocks, block), 1, 0) ** 2, axis=-1)
        found = samples_of(weights)[..., :block].reshape(calls, -1)
        missed = jnp.sum((found - room) ** 2, axis=-1)
        return (
            jnp.moveaxis(clean, 0, 1).reshape(calls, length),
            10 * jnp.log10((was + 1e-6) / (left + 1e-6)),
            passed,
            leak,
            missed,
        )

    inputs = (normal(calls, length), normal(calls, blocks), normal(calls, length), normal(calls, blocks))
    return Built(run, (*inputs, normal(calls, block * parts), normal(calls, length)))
