"""Cells that are charged, chains of spins let go and thin gas in a box, the fortieth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, integers, normal, pick, program

GROUP = "fortieth"


@program("lithium-cells-of-two-spheres-charged-rested-and-emptied-with-heat-and-ageing-scan", GROUP)
def _batteries(size: Size) -> Built:
    """This program charges many lithium cells that differ a little, lets them rest and empties them, until limits are met.

    It is the single-particle model with heat and a growing film (as in PyBaMM; curves of Chen, 2020): lithium spreads in a sphere
    of each electrode by implicit steps with a matrix of three diagonals, and currents are held until voltages meet their limits.
    """
    cells, shells, steps, tries = pick(size, (8192, 24, 160, 12), (256, 12, 60, 10), (3, 4, 5, 3))
    faraday, gas, step = 96485.0, 8.314, 60.0
    edge = np.linspace(0, 1, shells + 1)
    volume = jnp.asarray((edge[1:] ** 3 - edge[:-1] ** 3) / 3, jnp.float32)[:, None]
    area = jnp.asarray(edge[1:-1] ** 2 * shells, jnp.float32)[:, None]
    most = jnp.asarray([33133.0, 63104.0])[:, None]
    radius = jnp.asarray([5.86e-6, 5.22e-6])[:, None]
    thick = jnp.asarray([8.52e-5, 7.56e-5])[:, None]
    part = jnp.asarray([0.75, 0.665])[:, None]
    surface = 3 * part / radius * thick * 0.1027

    def potential(x):
        """These are the open voltages of both electrodes at fillings of their surfaces [2, cells]."""
        x, y = jnp.clip(x, 0.005, 0.995)
        low = 1.97938 * jnp.exp(-39.3631 * x) + 0.2482 - 0.0909 * jnp.tanh(29.8538 * (x - 0.1234))
        low = low - 0.04478 * jnp.tanh(14.9159 * (x - 0.2769)) - 0.0205 * jnp.tanh(30.4444 * (x - 0.6103))
        high = (
            -0.809 * y + 4.4875 - 0.0428 * jnp.tanh(18.5138 * (y - 0.5542)) - 17.7326 * jnp.tanh(15.789 * (y - 0.3117))
        )
        return low, high + 17.5842 * jnp.tanh(15.9308 * (y - 0.312))

    def solved(lower, middle, upper, right):
        """This solves systems of three diagonals [shells, 2 * cells] by going down and up."""

        def down(carry, each):
            """This takes out what is below the diagonal."""
            ratio, value = carry
            a, b, c, r = each
            pivot = 1.0 / (b - a * ratio)
            ratio, value = c * pivot, (r - a * value) * pivot
            return (ratio, value), (ratio, value)

        def up(after, each):
            """This puts in what is known."""
            ratio, value = each
            after = value - ratio * after
            return after, after

        nought = jnp.zeros_like(right[0])
        _, parts = lax.scan(down, (nought, nought), (lower, middle, upper, right))
        return lax.scan(up, nought, parts, reverse=True)[1]

    def run(spread, size_of, film, warm, rate, start):
        """This gives voltages, currents and warmth by step, phases at the end, what was taken out, films and fillings."""
        rate = 5.0 * (0.5 + jax.nn.sigmoid(rate))
        capacity = 1 + 0.03 * jnp.tanh(size_of)
        spread = jnp.asarray([3.3e-14, 4e-15])[:, None] * jnp.exp(0.2 * spread)
        film = 0.02 + 0.005 * jnp.tanh(film)
        outside = 298.0 + 8.0 * jnp.tanh(warm)
        fill = jnp.asarray([0.15, 0.80])[:, None] + jnp.asarray([0.04, -0.025])[:, None] * jnp.tanh(start)
        filled = jnp.broadcast_to(fill, (shells, 2, cells))

        def volt(filled, current, heat, film):
            """This is the voltage of cells under currents, which are positive when they charge, and the lost part of it."""
            flux = current / faraday * jnp.asarray([1.0, -1.0])[:, None] / (surface * capacity)
            reach = jnp.clip(filled[-1] + flux * radius / shells / 2 / (spread * most), 0.005, 0.995)
            low, high = potential(reach)
            swap = jnp.asarray([6.48e-7, 3.42e-6])[:, None] * jnp.exp(3.0e4 / gas * (1 / 298.15 - 1 / heat))
            swap = swap * jnp.sqrt(1000.0 * reach * (1 - reach)) * most
            lost = 2 * gas * heat / faraday * jnp.arcsinh(flux * faraday / (2 * swap))
            lost = lost[0] - lost[1] + current * film
            return high - low + lost, lost

        def hold(filled, target, heat, film):
            """This seeks the current that keeps a voltage, by halving."""

            def halve(_, carry):
                """This keeps the half in which the current is."""
                low, high = carry
                middle = 0.5 * (low + high)
                over = volt(filled, middle, heat, film)[0] > target
                return jnp.where(over, low, middle), jnp.where(over, middle, high)

            low, high = lax.fori_loop(0, tries, halve, (jnp.zeros(cells), rate))
            return 0.5 * (low + high)

        def advance(carry, _):
            """This is one minute: phases are charging, holding, resting, emptying and done."""
            filled, heat, film, phase, rested, taken = carry
            held = hold(filled, 4.2, heat, film)
            current = jnp.select([phase == 0, phase == 1, phase == 3], [rate, held, -rate], 0.0)
            now, lost = volt(filled, current, heat, film)
            quick = spread * jnp.exp(3.5e4 / gas * (1 / 298.15 - 1 / heat)) * step / radius**2
            link = (area[..., None] * quick).reshape(shells - 1, 2 * cells)
            none = jnp.zeros((1, 2 * cells))
            inner, outer = jnp.concatenate([none, link]) / volume, jnp.concatenate([link, none]) / volume
            flux = current / faraday * jnp.asarray([1.0, -1.0])[:, None] / (surface * capacity)
            right = filled.reshape(shells, -1)
            right = right.at[-1].add((flux * step / radius / most).reshape(-1) / volume[-1])
            filled = jnp.clip(solved(-inner, 1 + inner + outer, -outer, right), 0.002, 0.998).reshape(shells, 2, cells)
            heat = heat + step / 40.0 * (jnp.abs(current * lost) - 0.15 * (heat - outside))
            growth = 2e-5 * jnp.exp(-4.0 * potential(filled[-1])[0]) * jnp.exp(3e4 / gas * (1 / 298.15 - 1 / heat))
            film = film + growth * step / 3600 / (film / 0.02)
            rested = rested + (phase == 2)
            over = [(now > 4.2), held < rate / 20, rested >= steps // 10, now < 2.5]
            next_ = jnp.select([phase == k for k in range(4)], over, False)
            taken = taken + jnp.stack([jnp.maximum(current, 0), jnp.maximum(-current, 0)]) * step / 3600
            return (filled, heat, film, phase + next_, rested, taken), (now, current, heat)

        begin = filled, outside, film, jnp.zeros(cells, jnp.int32), jnp.zeros(cells, jnp.int32), jnp.zeros((2, cells))
        (filled, _, film, phase, _, taken), told = lax.scan(advance, begin, None, length=steps)
        mean = jnp.sum(filled * volume[..., None], axis=0) * 3
        return *told, phase, taken, film, mean

    inputs = normal(2, cells), normal(cells), normal(cells), normal(cells), normal(cells)
    return Built(run, (*inputs, normal(cells)))


@program("spin-chains-let-go-as-matrix-product-states-with-cut-singular-values-scan", GROUP)
def _spins(size: Size) -> Built:
    """This program lets chains of quantum spins in random fields go from up and down in turn, and tells how they forget it.

    It is time-evolving block decimation (Vidal, 2004; TeNPy): states are products of small tensors, neighbours are turned by a
    gate and cut back to their largest singular values, odd and even bonds in turn, without dividing by small ones (Hastings, 2009).
    """
    chains, sites, bond, steps = pick(size, (12, 24, 16, 10), (3, 12, 8, 6), (1, 4, 2, 2))
    time, pull = 0.1, 1.0
    up = np.array([[0.0, 1.0], [0.0, 0.0]])
    z = np.diag([0.5, -0.5])
    pair = 0.5 * (np.kron(up, up.T) + np.kron(up.T, up)) + pull * np.kron(z, z)
    left, right = np.kron(z, np.eye(2)), np.kron(np.eye(2), z)

    def run(field, flip, strength):
        """This gives sums of spins by site and step, entropies of bonds, what was cut off, and energies."""
        field = strength[:, None] ** 2 * jnp.tanh(field)
        half = jnp.full(sites, 0.5).at[0].set(1.0).at[-1].set(1.0) * field
        energy = jnp.asarray(pair) + half[:, :-1, None, None] * left + half[:, 1:, None, None] * right
        value, ways = jnp.linalg.eigh(energy)

        def gate(long):
            """These are turns of pairs of sites [chains, bonds, 2, 2, 2, 2] for a length of time."""
            whole = (ways * jnp.exp(-1j * long * value)[..., None, :]) @ ways.swapaxes(-1, -2).astype(jnp.complex64)
            return whole.reshape(chains, sites - 1, 2, 2, 2, 2)

        down = (jnp.arange(sites) % 2 == 1) ^ (flip & (jnp.arange(sites) % 4 == 0))
        state = jnp.zeros((chains, sites, bond, 2, bond), jnp.complex64)
        state = state.at[:, :, 0, :, 0].set(jax.nn.one_hot(down.astype(jnp.int32), 2).astype(jnp.complex64))
        weight = jnp.zeros((chains, sites + 1, bond)).at[:, :, 0].set(1.0)

        def both(state, weight, gates, first):
            """This turns every second bond from the first one on."""
            at = jnp.arange(first, sites - 1, 2)
            plain = jnp.einsum("csaib,csbjd->csaijd", state[:, at], state[:, at + 1])
            plain = jnp.einsum("csklij,csaijd->csakld", gates[:, at], plain)
            full = plain * weight[:, at, :, None, None, None]
            matrix = full.reshape(chains, at.size, 2 * bond, 2 * bond)
            _, values, after = jnp.linalg.svd(matrix, full_matrices=False)
            kept = values[..., :bond]
            norm = jnp.sqrt(jnp.sum(kept**2, axis=-1, keepdims=True))
            lost = 1 - norm[..., 0] ** 2 / jnp.sum(values**2, axis=-1)
            after = after[..., :bond, :].reshape(chains, at.size, bond, 2, bond)
            before = jnp.einsum("csaijd,csbjd->csaib", plain, after.conj()) / norm[..., None, None]
            state = state.at[:, at].set(before).at[:, at + 1].set(after)
            return state, weight.at[:, at + 1].set(kept / norm), jnp.sum(lost, axis=1)

        short, long = gate(0.5 * time), gate(time)

        def step(carry, _):
            """This is one step of the second order: half of the even bonds, the odd bonds, half of the even bonds."""
            state, weight = carry
            state, weight, one = both(state, weight, short, 0)
            state, weight, two = both(state, weight, long, 1)
            state, weight, three = both(state, weight, short, 0)
            seen = state * weight[:, :-1, :, None, None]
            chance = jnp.sum(jnp.abs(seen) ** 2, axis=(2, 4))
            spin = 0.5 * (chance[..., 0] - chance[..., 1]) / jnp.sum(chance, axis=-1)
            share = weight[:, 1:-1] ** 2
            entropy = -jnp.sum(share * jnp.log(share + 1e-12), axis=-1)
            two_sites = jnp.einsum("csaib,csbjd->csaijd", seen[:, :-1], state[:, 1:])
            turned = jnp.einsum("csklij,csaijd->csakld", energy.reshape(chains, sites - 1, 2, 2, 2, 2), two_sites)
            worth = jnp.sum((two_sites.conj() * turned).real, axis=(1, 2, 3, 4, 5))
            return (state, weight), (spin, entropy, one + two + three, worth)

        _, (spin, entropy, lost, worth) = lax.scan(step, (state, weight), None, length=steps)
        sign = jnp.where(down, -2.0, 2.0)
        return spin, entropy, lost, worth, jnp.mean(spin * sign, axis=-1)

    return Built(run, (normal(chains, sites), booleans(chains, sites), normal(chains, offset=1.0)))


@program("thin-gas-in-a-box-with-a-moving-lid-by-random-pairs-that-collide-in-cells-scan", GROUP)
def _thin_gas(size: Size) -> Built:
    """This program follows particles of a gas so thin that it is no fluid, in a box whose lid moves.

    It is direct simulation by Monte Carlo (Bird, 1994; as in SPARTA): particles fly, walls give them new random speeds, a sort by
    cells with random keys makes pairs, and pairs collide by chance and leave in random ways; cells then tell what is seen.
    """
    n, side, steps, warm = pick(size, (1 << 18, 64, 60, 20), (6000, 14, 30, 10), (40, 3, 4, 1))
    step, lid, heat, thin, omega = 0.25 / side, 0.6, 1.0, 0.08, 0.81
    cells = side * side
    cross = 1.0 / (np.sqrt(2.0) * thin * n)

    def speeds(key, many):
        """This draws speeds of particles that leave a wall: the first away from it, then two along it."""
        one, two = jax.random.split(key)
        out = jnp.sqrt(-2 * heat * jnp.log(jax.random.uniform(one, (many,), minval=1e-7)))
        return out, jnp.sqrt(heat) * jax.random.normal(two, (many, 2))

    def run(place, speed, seed):
        """This gives by cell how many there are, their mean speed, warmth and stress, and by step collisions and pushes."""
        place = jax.nn.sigmoid(1.7 * place)
        speed = jnp.sqrt(heat) * speed

        def fly(key, place, speed):
            """This moves particles, and lets walls give them new speeds; it also tells how the lid was pulled."""
            pulled = jnp.float32(0)
            place = place + step * speed[:, :2]
            for axis in (0, 1):
                for wall in (0.0, 1.0):
                    key, fresh = jax.random.split(key)
                    hit = place[:, axis] > 1 if wall else place[:, axis] < 0
                    late = jnp.where(hit, (place[:, axis] - wall) / speed[:, axis], 0.0)
                    away, along = speeds(fresh, n)
                    moving = lid if axis and wall else 0.0
                    across = along[:, 0] + moving
                    pulled = pulled + jnp.sum(jnp.where(hit, across - speed[:, 1 - axis], 0.0)) * (moving > 0)
                    parts = [across, across, along[:, 1]]
                    parts[axis] = -away if wall else away
                    new = jnp.stack(parts, axis=-1)
                    back = place - late[:, None] * speed[:, :2] + late[:, None] * new[:, :2]
                    place = jnp.where(hit[:, None], back, place)
                    speed = jnp.where(hit[:, None], new, speed)
            return jnp.clip(place, 0.0, 1.0 - 1e-6), speed, pulled

        def cell_of(place):
            """This numbers the cells of particles."""
            at = jnp.clip((place * side).astype(jnp.int32), 0, side - 1)
            return at[:, 0] * side + at[:, 1]

        def collide(key, place, speed):
            """This makes pairs inside cells and lets some of them collide."""
            one, two, three = jax.random.split(key, 3)
            cell = cell_of(place)
            order = jnp.lexsort((jax.random.bits(one, (n,)), cell))
            cell, place, speed = cell[order], place[order], speed[order]
            many = jnp.zeros(cells, jnp.int32).at[cell].add(1)
            rank = jnp.arange(n) - (jnp.cumsum(many) - many)[cell]
            first = (rank % 2 == 0) & (rank + 1 < many[cell])
            other = jnp.roll(speed, -1, axis=0)
            gap = speed - other
            fast = jnp.sqrt(jnp.sum(gap**2, axis=1) + 1e-12)
            wide = cross * fast ** (1 - 2 * omega) * (2 * heat) ** (omega - 0.5) * 2
            pairs = jnp.maximum(many[cell] // 2, 1)
            chance = 0.5 * many[cell] * (many[cell] - 1) / pairs * wide * fast * step * cells
            met = first & (jax.random.uniform(two, (n,)) < chance)
            draw = jax.random.uniform(three, (n, 2))
            height, turn = 2 * draw[:, 0] - 1, 2 * jnp.pi * draw[:, 1]
            flat = jnp.sqrt(1 - height**2)
            way = jnp.stack([flat * jnp.cos(turn), flat * jnp.sin(turn), height], axis=-1) * fast[:, None]
            mean = 0.5 * (speed + other)
            up, low = mean + 0.5 * way, mean - 0.5 * way
            was = jnp.roll(met, 1)
            speed = jnp.where(met[:, None], up, jnp.where(was[:, None], jnp.roll(low, 1, axis=0), speed))
            return cell, place, speed, jnp.sum(met), jnp.mean(jnp.minimum(chance, 9.0) > 1.0)

        def advance(carry, k):
            """This is one step."""
            place, speed, seen = carry
            one, two = jax.random.split(jax.random.fold_in(jax.random.key(seed), k))
            place, speed, pulled = fly(one, place, speed)
            cell, place, speed, met, over = collide(two, place, speed)
            x, y, w = speed.T
            what = jnp.stack([jnp.ones(n), x, y, w, x * x, y * y, w * w, x * y], axis=-1)
            seen = seen + jnp.where(k >= warm, jax.ops.segment_sum(what, cell, cells, indices_are_sorted=True), 0.0)
            energy = 0.5 * jnp.mean(jnp.sum(speed**2, axis=1))
            return (place, speed, seen), (met, jnp.stack([pulled / n, energy, over]))

        start = place, speed, jnp.zeros((cells, 8))
        (_, _, seen), (met, told) = lax.scan(advance, start, jnp.arange(steps))
        many = jnp.maximum(seen[:, 0], 1.0)
        mean = seen[:, 1:4] / many[:, None]
        spread = seen[:, 4:7] / many[:, None] - mean**2
        stress = seen[:, 7] / many - mean[:, 0] * mean[:, 1]
        grid = (side, side)
        density = seen[:, 0].reshape(grid) / (steps - warm) * cells / n
        return density, mean.reshape(*grid, 3), jnp.mean(spread, axis=1).reshape(grid), stress.reshape(grid), met, told

    return Built(run, (normal(n, 2), normal(n, 3), integers(below=1000)))
