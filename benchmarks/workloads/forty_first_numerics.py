"""Flames that wrinkle, grains that topple and genes that shut each other off, the forty-first set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program

GROUP = "forty-first"


@program("flames-wrinkle-by-exponential-runge-kutta-steps-with-twins-that-part-and-spectra-scan", GROUP)
def _flames(size: Size) -> Built:
    """This program lets fronts of flames wrinkle without end, and tells how fast fronts that were almost equal part.

    It is the equation of Kuramoto and Sivashinsky by the exponential steps of Cox and Matthews (2002), whose factors are means over
    circles in the complex plane (Kassam and Trefethen, 2005); products are cut to two thirds of all waves.
    """
    members, points, saves, steps, length = pick(
        size, (128, 1024, 8, 8, 200.0), (12, 256, 6, 12, 64.0), (2, 16, 2, 2, 22.0)
    )
    step, ring = 0.25, 32
    wave = 2 * np.pi / length * np.arange(points // 2 + 1)
    speed = wave**2 - wave**4
    circle = np.exp(1j * np.pi * (np.arange(ring) + 0.5) / ring)
    z = step * speed[:, None] + circle
    means = [
        (np.exp(z / 2) - 1) / z,
        (-4 - z + np.exp(z) * (4 - 3 * z + z**2)) / z**3,
        (2 + z + np.exp(z) * (z - 2)) / z**3,
        (-4 - 3 * z - z**2 + np.exp(z) * (4 - z)) / z**3,
    ]
    half_way, first, middle, last = (jnp.asarray(step * np.mean(m, axis=1).real, jnp.float32) for m in means)
    whole = jnp.asarray(np.exp(step * speed), jnp.float32)
    part = jnp.asarray(np.exp(step * speed / 2), jnp.float32)
    slope = jnp.asarray(-0.5j * wave * (np.arange(points // 2 + 1) < points // 3), jnp.complex64)

    def bent(v):
        """This is the bending by the square, for waves."""
        return slope * jnp.fft.rfft(jnp.fft.irfft(v, n=points) ** 2)

    def once(v):
        """This is one step of fourth order."""
        start = bent(v)
        a = part * v + half_way * start
        at_a = bent(a)
        b = part * v + half_way * at_a
        at_b = bent(b)
        c = part * a + half_way * (2 * at_b - start)
        return whole * v + first * start + 2 * middle * (at_a + at_b) + last * bent(c)

    def run(place, shove):
        """This gives fronts by time, mean spectra, rates at which twins part, and how slopes are spread."""
        x = jnp.arange(points) * (length / points)
        waves = 2 * jnp.pi / length * jnp.arange(1, 9)
        start = jnp.sum(place[:, :, :1] * jnp.cos(waves[:, None] * x + place[:, :, 1:]), axis=1)
        near = start + 1e-3 * jnp.sin(3 * waves[0] * x + shove[:, None])

        def save(carry, _):
            """This takes several steps, tells the front, and pulls the twin near again."""
            v, twin = lax.fori_loop(0, steps, lambda _, both: once(both), carry)
            front, other = jnp.fft.irfft(jnp.stack([v, twin]), n=points)
            far = jnp.sqrt(jnp.mean((front - other) ** 2, axis=1))
            twin = v + (twin - v) * (1e-3 / jnp.maximum(far, 1e-9))[:, None]
            return jnp.stack([v, twin]), (front, jnp.log(far / 1e-3) / (step * steps), jnp.abs(v / points) ** 2)

        begin = jnp.fft.rfft(jnp.stack([start, near]))
        _, (front, rate, power) = lax.scan(save, begin, None, length=saves)
        steep = (jnp.roll(front, -1, axis=2) - jnp.roll(front, 1, axis=2)) * (points / length / 2)
        counts, _ = jnp.histogram(steep[saves // 2 :], bins=32, range=(-4.0, 4.0))
        crests = jnp.sum((front > jnp.roll(front, 1, axis=2)) & (front > jnp.roll(front, -1, axis=2)), axis=2)
        return front, jnp.mean(power[saves // 2 :], axis=(0, 1)), rate, counts, crests

    return Built(run, (normal(members, 8, 2), normal(members)))


@program("sandpiles-topple-until-still-avalanches-measured-and-the-neutral-pile-found-while", GROUP)
def _sandpiles(size: Size) -> Built:
    """This program drops grains on piles of sand, lets cells with four grains topple until all is still, and measures avalanches.

    It is the model of Bak, Tang and Wiesenfeld (1987): grains fall off the edge, all full cells topple at once, and the pile that
    changes no other pile comes from toppling twice what is left of a pile of sixes (Dhar, 1990).
    """
    piles, side, drops, most = pick(size, (48, 256, 8, 32), (4, 64, 10, 60), (2, 6, 3, 60))

    def topple(height, limit):
        """This lets piles [..., side, side] topple until still; it gives heights, how often cells toppled, and rounds."""
        axis = height.ndim - 2
        around = ((0, 0),) * axis + ((1, 1), (1, 1))

        def going(carry):
            """This asks whether any cell is full."""
            height, _, rounds = carry
            return jnp.any(height > 3) & (rounds < limit)

        def once(carry):
            """This topples all full cells."""
            height, often, rounds = carry
            many = height >> 2
            out = jnp.pad(many, around)
            given = out[..., 2:, 1:-1] + out[..., :-2, 1:-1] + out[..., 1:-1, 2:] + out[..., 1:-1, :-2]
            return height - 4 * many + given, often + many, rounds + 1

        return lax.while_loop(going, once, (height, jnp.zeros_like(height), jnp.int32(0)))

    def run(height, where, many):
        """This gives piles, sizes, areas, reaches and losses of avalanches, counts of heights, and the neutral pile."""
        height, _, _ = topple(height, 4 * most)
        pile = jnp.arange(piles)
        row, column = jnp.arange(side)[:, None], jnp.arange(side)

        def drop(height, each):
            """This drops some grains on one cell of each pile."""
            at, grains = each
            i, j = at // side, at % side
            before = jnp.sum(height, axis=(1, 2))
            height, often, rounds = topple(height.at[pile, i, j].add(1 + grains), most)
            moved = often > 0
            reach = jnp.maximum(jnp.abs(row - i[:, None, None]), jnp.abs(column - j[:, None, None]))
            lost = before + 1 + grains - jnp.sum(height, axis=(1, 2))
            told = jnp.sum(often, axis=(1, 2)), jnp.sum(moved, axis=(1, 2)), jnp.max(reach * moved, axis=(1, 2)), lost
            return height, (*told, rounds)

        height, told = lax.scan(drop, height, (where, many))
        counts = jnp.sum(height[..., None] == jnp.arange(5), axis=(1, 2))
        small = jnp.full((min(side, 12), min(side, 12)), 6, jnp.int32)
        left, _, first = topple(small, 8 * most)
        neutral, _, second = topple(2 * (small - left), 8 * most)
        return height, told, counts, neutral, jnp.stack([first, second])

    inputs = integers(piles, side, side, below=5), integers(drops, piles, below=side * side)
    return Built(run, (*inputs, integers(drops, piles, below=16)))


@program("two-genes-shut-each-other-off-by-exact-random-jumps-with-rates-of-first-switching-while", GROUP)
def _genes(size: Size) -> Built:
    """This program follows single molecules of two genes that shut each other off, jump by jump, in many cells.

    It is Gillespie's direct method (1977) for the toggle switch (Gardner, 2000) with messages and proteins in pairs: waiting times
    are drawn from summed rates, the jump by its share, and states are told at even times; it asks when cells first switch.
    """
    cells, saves, most = pick(size, (65536, 8, 64), (2048, 8, 64), (4, 3, 64))
    gap = 0.1
    jumps = np.zeros((8, 4), np.int32)
    for k in range(4):
        jumps[k, k], jumps[k + 4, k] = 1, -1
    jump = jnp.asarray(jumps)

    def rates(state, kind):
        """These are the rates of births and deaths [cells, 8] of messages and proteins of both genes."""
        message, protein = jnp.split(state.astype(jnp.float32), 2, axis=1)
        other = protein[:, ::-1]
        birth = kind[:, :2] / (1 + (other / 12.0) ** 2.5) + 0.2
        return jnp.concatenate([birth, kind[:, 2:3] * message, 2.0 * message, kind[:, 3:] * protein], axis=1)

    def run(spread, start, seed):
        """This gives counts by time, first switches, correlations of genes, spreads over means, and numbers of jumps."""
        kind = jnp.asarray([16.0, 16.0, 4.0, 1.0]) * jnp.exp(0.2 * jnp.tanh(spread))
        state = start * jnp.asarray([1, 1, 4, 4])
        clock = jnp.zeros(cells)
        key = jax.random.key(seed)

        def until(carry, each):
            """This jumps until all cells have passed the next time, and tells their states at it."""
            number, key = each
            end = gap * (number + 1)

            def going(inside):
                """This asks whether a cell is still before the time."""
                return jnp.any(inside[1] < end) & (inside[4] < most)

            def once(inside):
                """This lets each cell that is before the time jump once, or wait until the time."""
                state, clock, switched, jumps_done, rounds, key = inside
                key, one, two = jax.random.split(key, 3)
                rate = rates(state, kind)
                summed = jnp.cumsum(rate, axis=1)
                total = summed[:, -1]
                wait = jax.random.exponential(one, (cells,)) / total
                which = jnp.sum(summed <= (jax.random.uniform(two, (cells,)) * total)[:, None], axis=1)
                live = (clock < end) & (clock + wait < end)
                fresh = jnp.maximum(state + jump[jnp.minimum(which, 7)], 0)
                state = jnp.where(live[:, None], fresh, state)
                clock = jnp.where(live, clock + wait, jnp.maximum(clock, end))
                crossed = (state[:, 2] > state[:, 3]) != (start[:, 2] > start[:, 3])
                switched = jnp.where(crossed & (switched < 0), clock, switched)
                return state, clock, switched, jumps_done + live, rounds + 1, key

            state, clock, switched, jumps_done = carry
            inside = lax.while_loop(going, once, (state, clock, switched, jumps_done, jnp.int32(0), key))
            state, clock, switched, jumps_done, rounds, _ = inside
            return (state, jnp.maximum(clock, end), switched, jumps_done), (state, rounds)

        begin = state, clock, -jnp.ones(cells), jnp.zeros(cells, jnp.int32)
        each = jnp.arange(saves), jax.random.split(key, saves)
        (_, _, switched, jumps_done), (states, rounds) = lax.scan(until, begin, each)
        protein = states[..., 2:].astype(jnp.float32)
        mean, var = jnp.mean(protein, axis=1), jnp.var(protein, axis=1)
        both = jnp.mean(protein[..., 0] * protein[..., 1], axis=1) - mean[:, 0] * mean[:, 1]
        agree = both * lax.rsqrt(jnp.maximum(var[:, 0] * var[:, 1], 1e-9))
        share = jnp.mean((switched[:, None] >= 0) & (switched[:, None] <= gap * (1 + jnp.arange(saves))), axis=0)
        grid = jnp.clip(states[-1, :, 2:] // 4, 0, 15)
        table = jnp.zeros((16, 16), jnp.int32).at[grid[:, 0], grid[:, 1]].add(1)
        return (
            states.astype(jnp.int16),
            switched,
            agree,
            var / jnp.maximum(mean, 1e-6),
            share,
            table,
            jumps_done,
            rounds,
        )

    return Built(run, (normal(cells, 4), integers(cells, 4, below=8), integers(below=1000)))
