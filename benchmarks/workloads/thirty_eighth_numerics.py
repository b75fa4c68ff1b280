"""Lattice encryption, turbo codes and discontinuous elements, the thirty-eighth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program

GROUP = "thirty-eighth"


@program("kyber-number-theoretic-transforms-encrypt-and-decrypt-batch", GROUP)
def _kyber(size: Size) -> Built:
    """This program encrypts and decrypts many messages with polynomials over a small field, as post-quantum keys do.

    It is the encryption inside ML-KEM-768 (FIPS 203; pq-crystals/kyber): polynomials are multiplied after number-theoretic
    transforms of seven layers, errors are differences of counted bits, and ciphertexts are rounded to ten and four bits.
    """
    b = pick(size, 8192, 192, 2)
    q, n, rank = 3329, 256, 3
    turned = [int(f"{k:07b}"[::-1], 2) for k in range(128)]
    roots = np.array([pow(17, k, q) for k in turned], np.int32)
    doubled = jnp.asarray([pow(17, 2 * k + 1, q) for k in turned], jnp.int32)
    shrink = pow(128, -1, q)

    def forward(x):
        """This transforms polynomials [..., 256], from far pairs to near ones."""
        shape, k, step = x.shape, 1, n // 2
        while step >= 2:
            pairs = x.reshape(*shape[:-1], n // (2 * step), 2, step)
            low, high = pairs[..., 0, :], pairs[..., 1, :]
            high = high * roots[k : k + n // (2 * step), None] % q
            x = jnp.stack([low + high, low - high], axis=-2).reshape(shape) % q
            k, step = k + n // (2 * step), step // 2
        return x

    def backward(x):
        """This undoes the transform, from near pairs to far ones."""
        shape, step = x.shape, 2
        while step <= n // 2:
            many = n // (2 * step)
            pairs = x.reshape(*shape[:-1], many, 2, step)
            low, high = pairs[..., 0, :], pairs[..., 1, :]
            away = (high - low) * roots[many : 2 * many][::-1, None] % q
            x = jnp.stack([(low + high) % q, away], axis=-2).reshape(shape)
            step = 2 * step
        return x * shrink % q

    def product(x, y):
        """This multiplies transforms in pairs: each pair is a polynomial of degree one."""
        a, c = (z.reshape(*z.shape[:-1], n // 2, 2) for z in (x, y))
        even = a[..., 0] * c[..., 0] + (a[..., 1] * c[..., 1] % q) * doubled
        odd = a[..., 0] * c[..., 1] + a[..., 1] * c[..., 0]
        both = jnp.stack([even % q, odd % q], axis=-1)
        return both.reshape(*both.shape[:-2], n)

    def small(nibbles):
        """This makes small errors of random nibbles: two counted bits less two others."""
        return lax.population_count(nibbles & 3) - lax.population_count(nibbles >> 2)

    def squeezed(x, bits):
        """This rounds coefficients to a few bits."""
        return ((x % q << bits) + q // 2) // q & ((1 << bits) - 1)

    def opened(x, bits):
        """This brings rounded coefficients back."""
        return (x * q + (1 << (bits - 1))) >> bits

    def run(table, secret, noise, message):
        """This gives public keys, rounded ciphertexts, how many messages come back whole, and the largest error."""
        s, e, r, one = (small(z) for z in (*secret, *noise[:2]))
        s, r = forward(s), forward(r)
        public = (jnp.sum(product(table, s[:, None]), axis=2) + forward(e)) % q
        u = (backward(jnp.sum(product(table.swapaxes(1, 2), r[:, None]), axis=2) % q) + one) % q
        bits = (message[..., None] >> jnp.arange(8)) & 1
        bits = bits.reshape(b, n)
        v = backward(jnp.sum(product(public, r), axis=1) % q) + small(noise[2, :, 0]) + bits * ((q + 1) // 2)
        u, v = squeezed(u, 10), squeezed(v, 4)
        back = opened(v, 4) - backward(jnp.sum(product(s, forward(opened(u, 10))), axis=1) % q)
        told = squeezed(back, 1)
        error = (back - bits * ((q + 1) // 2)) % q
        found = jnp.sum(told.reshape(b, n // 8, 8) << jnp.arange(8), axis=-1)
        return public, u, v, jnp.mean(jnp.all(found == message, axis=1)), jnp.max(jnp.minimum(error, q - error))

    table = integers(b, rank, rank, n, below=q)
    nibbles = integers(2, b, rank, n, below=16), integers(3, b, rank, n, below=16)
    return Built(run, (table, *nibbles, integers(b, n // 8, below=256)))


@program("turbo-code-max-log-bcjr-windows-with-extrinsic-rounds", GROUP)
def _turbo(size: Size) -> Built:
    """This program sends blocks of bits through noise with a turbo code and decodes them in rounds of two decoders.

    It is the code of LTE (3GPP 36.212; NVlabs/sionna has one): two encoders of eight states around a quadratic interleaver, and
    max-log decoders (Bahl, 1974) on windows side by side, whose borders start from what the round before found there.
    """
    b, long, first, second, window, rounds = pick(
        size, (256, 1024, 31, 64, 32, 4), (8, 512, 31, 64, 32, 4), (2, 40, 3, 10, 8, 2)
    )
    windows, states = long // window, 8
    mixed = jnp.asarray((first * np.arange(long) + second * np.arange(long) ** 2) % long, jnp.int32)
    sorted_back = jnp.argsort(mixed)
    state, bit = np.arange(states)[:, None], np.arange(2)
    fed = bit ^ (state & 1) ^ ((state >> 1) & 1)
    following = np.asarray((state >> 1) | (fed << 2), np.int32)
    parity = np.asarray(fed ^ ((state >> 2) & 1) ^ (state & 1), np.int32)
    before = np.array(
        [[(s, u) for s in range(states) for u in range(2) if following[s, u] == k] for k in range(states)]
    )
    moves, checks = jnp.asarray(following), jnp.asarray(parity)
    sign_bit, sign_check = jnp.asarray(1.0 - 2.0 * bit), jnp.asarray(1.0 - 2.0 * parity)

    def encoded(bits):
        """This gives check bits [b, long]: moves between states are tables, joined by an associative scan."""
        tables = jnp.moveaxis(moves, 1, 0)[bits.T]
        joined = lax.associative_scan(lambda x, y: jnp.take_along_axis(y, x, axis=-1), tables)
        at = jnp.concatenate([jnp.zeros((1, b), jnp.int32), joined[:-1, :, 0]])
        return checks[at, bits.T].T

    def decoder(data, check, ahead, borders):
        """This gives what checks add to beliefs of bits, and states at borders [2, b, windows, 8] for the next round."""
        cost = 0.5 * ((data + ahead)[..., None, None] * sign_bit + check[..., None, None] * sign_check)
        cost = jnp.moveaxis(cost.reshape(b, windows, window, states, 2), 2, 0)
        source, input_bit = before[..., 0], before[..., 1]

        def forth(alpha, cost):
            """This goes one bit forward."""
            fresh = jnp.max(alpha[..., source] + cost[..., source, input_bit], axis=-1)
            return fresh - jnp.max(fresh, axis=-1, keepdims=True), alpha

        def back(beta, cost):
            """This goes one bit backward."""
            fresh = jnp.max(beta[..., following] + cost, axis=-1)
            return fresh - jnp.max(fresh, axis=-1, keepdims=True), beta

        last, alpha = lax.scan(forth, borders[0], cost)
        start, beta = lax.scan(back, borders[1], cost, reverse=True)
        total = alpha[..., None] + cost + beta[..., following]
        belief = jnp.max(total[..., 0], axis=-1) - jnp.max(total[..., 1], axis=-1)
        belief = jnp.moveaxis(belief, 0, 2).reshape(b, long)
        right = jnp.roll(last, 1, axis=1).at[:, 0].set(borders[0][:, 0])
        left = jnp.roll(start, -1, axis=1).at[:, -1].set(0.0)
        return 0.75 * (belief - data - ahead), jnp.stack([right, left])

    def run(bits, noise, loud):
        """This gives decoded bits, shares of wrong bits by rounds, whole blocks, and how sure the decoder is."""
        spread = 0.85 + 0.1 * jax.nn.sigmoid(loud)[:, None]
        sent = jnp.stack([bits, encoded(bits), encoded(bits[:, mixed])])
        heard = 2.0 * (1.0 - 2.0 * sent + spread * noise) / spread**2
        data, check, other = heard
        known = jnp.zeros((2, b, windows, states)).at[0, :, 0, 1:].set(-100.0)

        def again(carry, _):
            """This lets both decoders speak once."""
            ahead, one, two = carry
            told, one = decoder(data, check, ahead, one)
            answer, two = decoder(data[:, mixed], other, told[:, mixed], two)
            ahead = answer[:, sorted_back]
            belief = data + told + ahead
            wrong = jnp.mean((belief < 0) != bits, axis=1)
            return (ahead, one, two), (jnp.mean(wrong), jnp.mean(wrong == 0), jnp.mean(jnp.abs(belief)), belief)

        _, (wrong, whole, sure, belief) = lax.scan(again, (jnp.zeros((b, long)), known, known), None, length=rounds)
        return (belief[-1] < 0).astype(jnp.int8), wrong, whole, sure

    return Built(run, (integers(b, long, below=2), normal(3, b, long), normal(b)))


@program("discontinuous-galerkin-entropy-stable-euler-shear-layer-steps", GROUP)
def _galerkin(size: Size) -> Built:
    """This program lets two layers of gas slide along each other until they roll up, with polynomials inside square elements.

    It is the flux-differencing spectral element method (Gassner, 2016; trixi-framework/Trixi.jl): fluxes between all pairs of nodes
    of a line keep entropy (Ranocha, 2018), elements meet by Rusanov's flux, and steps are of the third order (Shu, 1988).
    """
    elements, steps = pick(size, (128, 8), (24, 4), (2, 2))
    nodes, gamma, span = 4, 1.4, 2.0
    points = np.array([-1.0, -(0.2**0.5), 0.2**0.5, 1.0])
    weights = np.array([1 / 6, 5 / 6, 5 / 6, 1 / 6])
    slopes = np.zeros((nodes, nodes))
    for i in range(nodes):
        scale = np.prod([points[i] - points[k] for k in range(nodes) if k != i])
        for j in range(nodes):
            rest = [
                np.prod([points[j] - points[m] for m in range(nodes) if m not in (i, k)])
                for k in range(nodes)
                if k != i
            ]
            slopes[j, i] = np.sum(rest) / scale
    split = 2 * slopes
    split[0, 0] += 1 / weights[0]
    split[-1, -1] -= 1 / weights[-1]
    split, ends = jnp.asarray(split, jnp.float32), float(1 / weights[0])
    width = span / elements

    def mean_log(x, y):
        """This is the logarithmic mean, by a series where both are nearly equal."""
        f = ((x - y) / (x + y)) ** 2
        series = (x + y) / (2 + f * (2 / 3 + f * (2 / 5 + f * 2 / 7)))
        apart = jnp.where(f < 1e-4, 1.0, jnp.log(y / x))
        return jnp.where(f < 1e-4, series, (y - x) / apart)

    def primitive(u):
        """This gives density, both speeds and pressure of conserved values [4, ...]."""
        density, x, y = u[0], u[1] / u[0], u[2] / u[0]
        return density, x, y, (gamma - 1) * (u[3] - 0.5 * density * (x * x + y * y))

    def between(one, two):
        """This is Ranocha's flux along the first axis between two states."""
        x, y, pressure = ((a + c) / 2 for a, c in zip(one[1:], two[1:], strict=True))
        mass = mean_log(one[0], two[0]) * x
        inner = one[1] * two[1] + one[2] * two[2]
        ratio = 1 / (mean_log(one[0] / one[3], two[0] / two[3]) * (gamma - 1))
        energy = mass * (0.5 * inner + ratio) + 0.5 * (one[3] * two[1] + two[3] * one[1])
        return jnp.stack([mass, mass * x + pressure, mass * y, energy])

    def along(u):
        """This is the change by fluxes along the first axis: u [4, elements, elements, nodes, nodes]."""
        state = primitive(u)
        one, two = [z[..., :, None, :] for z in state], [z[..., None, :, :] for z in state]
        volume = jnp.einsum("ij,cxyijk->cxyik", split, between(one, two))
        left, right = [z[..., -1, :] for z in state], [jnp.roll(z[..., 0, :], -1, axis=0) for z in state]
        jump = jnp.roll(u[..., 0, :], -1, axis=1) - u[..., -1, :]
        speed = jnp.maximum(*(jnp.abs(z[1]) + jnp.sqrt(gamma * z[3] / z[0]) for z in (left, right)))
        surface = between(left, right) - 0.5 * speed * jump
        change = volume.at[..., -1, :].add(ends * surface)
        return -change.at[..., 0, :].add(-ends * jnp.roll(surface, 1, axis=1)) * (2 / width)

    def rate(u):
        """This is the change of all values, by fluxes along both axes."""
        turned = u[jnp.array([0, 2, 1, 3])].transpose(0, 2, 1, 4, 3)
        return along(u) + along(turned).transpose(0, 2, 1, 4, 3)[jnp.array([0, 2, 1, 3])]

    line = (jnp.arange(elements)[:, None] + 0.5 * (1 + jnp.asarray(points))).astype(jnp.float32) * width - 1.0
    area = jnp.asarray(np.outer(weights, weights) * (width / 2) ** 2, jnp.float32)

    def run(strength, phase):
        """This gives the gas after some steps, its mass and entropy by steps, lengths of steps and the mixed share."""
        x, y = line[:, None, :, None], line[None, :, None, :]
        layer = jnp.tanh(15 * y + 7.5) - jnp.tanh(15 * y - 7.5)
        waves = jnp.arange(1, strength.shape[0] + 1)
        ripple = jnp.sum(strength * jnp.sin(np.pi * waves * x[..., None] + phase), axis=-1)
        density = 0.5 + 0.75 * layer + 0 * x
        speed_x, speed_y = 0.5 * (layer - 1) + 0 * x, 0.1 * ripple + 0 * y
        energy = 1.0 / (gamma - 1) + 0.5 * density * (speed_x**2 + speed_y**2)
        u = jnp.stack([density, density * speed_x, density * speed_y, energy])

        def step(u, _):
            """This is one step of three stages."""
            density, speed_x, speed_y, pressure = primitive(u)
            sound = jnp.sqrt(gamma * pressure / density)
            time = 0.5 * width / (2 * nodes - 1) / jnp.max(jnp.abs(speed_x) + jnp.abs(speed_y) + 2 * sound)
            one = u + time * rate(u)
            two = 0.75 * u + 0.25 * (one + time * rate(one))
            u = (u + 2 * (two + time * rate(two))) / 3
            density, _, _, pressure = primitive(u)
            entropy = -density * jnp.log(pressure / density**gamma) / (gamma - 1)
            return u, (jnp.sum(density * area), jnp.sum(entropy * area), time)

        u, (mass, entropy, time) = lax.scan(step, u, None, length=steps)
        mixed = jnp.mean((u[0] > 0.75) & (u[0] < 1.75))
        return jnp.stack(primitive(u)), mass, entropy, time, mixed

    return Built(run, (normal(6, scale=0.3), normal(6, scale=2.0)))
