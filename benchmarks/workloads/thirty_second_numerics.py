"""Packed photographs, genomes, free energies, grains and echoes, the thirty-second set: its author saw no plan."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program
from benchmarks.workloads.thirty_second_parts import huffman_codes, huffman_lengths

GROUP = "thirty-second"


@program("photographs-as-waves-runs-of-noughts-and-codes-of-their-own-packed-bits", GROUP)
def _photographs(size: Size) -> Built:
    """This program packs a photograph into a stream of bits as a JPEG encoder does, with codes made for this photograph.

    It is baseline JPEG with tables of its own (ITU T.81; libjpeg with optimised tables): blocks become waves, small ones vanish,
    runs of noughts and sizes are counted, Huffman's trees are grown, and codes of many lengths are laid bit after bit.
    """
    side, coarse = pick(size, (1024, 96), (320, 32), (16, 4))
    k, m = np.meshgrid(np.arange(8), np.arange(8), indexing="ij")
    cosines = (0.5 * np.cos(np.pi * k * (2 * m + 1) / 16)).astype(np.float32)
    cosines[0] *= 0.5**0.5
    zigzag = sorted(range(64), key=lambda z: (z // 8 + z % 8, z // 8 if (z // 8 + z % 8) % 2 else z % 8))
    zigzag = np.array(zigzag)
    steps = np.maximum(1, np.round(10 + 4.5 * (k + m) + 0.8 * k * m)).reshape(64)[zigzag].astype(np.float32)
    steps = np.stack([steps, np.minimum(1.6 * steps, 99)]).astype(np.float32)
    part = np.array([0, 0, 0, 0, 1, 1])
    tiles = (side // 16) ** 2

    def blocks(x):
        """This cuts a plane into blocks [rows, columns, 8, 8]."""
        return x.reshape(x.shape[0] // 8, 8, x.shape[1] // 8, 8).swapaxes(1, 2)

    def bits_of(value):
        """This tells how many bits a size takes."""
        return 32 - lax.clz(jnp.abs(value).astype(jnp.uint32)).astype(jnp.int32)

    def run(scene, grain):
        """This gives words of bits, how many bits they are, lengths of codes, and what is seen after unpacking."""
        picture = jax.image.resize(scene, (side, side, 3), "cubic") * 50 + 128 + 2 * grain[..., None]
        picture = jnp.clip(jnp.round(picture), 0, 255)
        turn = jnp.array([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]])
        planes = picture @ turn.T - jnp.array([128.0, 0.0, 0.0])
        bright = blocks(planes[..., 0]).reshape(side // 16, 2, side // 16, 2, 8, 8).swapaxes(1, 2)
        colours = jnp.mean(planes[..., 1:].reshape(side // 2, 2, side // 2, 2, 2), axis=(1, 3))
        colours = jnp.stack([blocks(colours[..., i]) for i in range(2)], axis=2)
        x = jnp.concatenate([bright.reshape(tiles, 4, 8, 8), colours.reshape(tiles, 2, 8, 8)], axis=1)
        waves = jnp.einsum("ki,tbij,lj->tbkl", cosines, x, cosines).reshape(tiles, 6, 64)[..., zigzag]
        levels = jnp.round(waves / steps[part]).astype(jnp.int32)

        last = jnp.concatenate([levels[:, :4, 0].reshape(-1), levels[:, 4, 0], levels[:, 5, 0]])
        ends = np.cumsum([0, 4 * tiles, tiles, tiles])
        change = jnp.concatenate([jnp.diff(last[i:j], prepend=0) for i, j in pairwise(ends)])
        change = [change[: 4 * tiles].reshape(tiles, 4), change[4 * tiles :].reshape(2, tiles).T]
        value = levels.at[..., 0].set(jnp.concatenate(change, axis=1))

        place = jnp.arange(64)
        there = (levels != 0) & (place > 0)
        before = lax.cummax(jnp.where(there, place, 0), axis=2)
        before = jnp.pad(before[..., :-1], ((0, 0), (0, 0), (1, 0)))
        gap = place - before - 1
        later = lax.cummax(there.astype(jnp.int32), axis=2, reverse=True) > 0
        extra = bits_of(value)
        symbol = jnp.where(there, (gap % 16) * 16 + extra, 0)
        long_run = ~there & (gap % 16 == 15) & later & (place > 0)
        symbol = jnp.where(long_run, 0xF0, symbol)
        over = ~there & (place == 63)
        symbol = jnp.where(place == 0, extra, symbol)
        on = there | long_run | over | (place == 0)
        extra = jnp.where(there | (place == 0), extra, 0)
        table = 2 * part[:, None] + (place > 0)

        count = jnp.zeros((4, 256), jnp.int32).at[jnp.broadcast_to(table, on.shape), symbol].add(on)
        long = jax.vmap(huffman_lengths)(count)
        code = jax.vmap(huffman_codes)(long)
        own_long = jnp.where(on, long[table, symbol], 0)
        low = jnp.where(value < 0, value - 1, value) & ((1 << extra) - 1)
        word = ((code[table, symbol] << extra) | low).astype(jnp.uint32).reshape(-1)
        many = jnp.where(on, own_long + extra, 0).reshape(-1)
        start = jnp.cumsum(many) - many
        total = start[-1] + many[-1]

        room = tiles * 6 * 24
        word = jnp.where(many > 0, word << (32 - jnp.maximum(many, 1)).astype(jnp.uint32), 0)
        shift = (start % 32).astype(jnp.uint32)
        stream = jnp.zeros(room, jnp.uint32).at[start // 32].add(word >> shift, mode="drop")
        second = jnp.where(shift > 0, word << ((32 - shift) % 32), 0)
        stream = stream.at[start // 32 + 1].add(second, mode="drop")
        bytes_of = (stream[:, None] >> (8 * jnp.arange(3, -1, -1, dtype=jnp.uint32))) & 255
        stuffed = jnp.sum((bytes_of == 255).reshape(-1) & (jnp.arange(4 * room) < (total + 7) // 8))

        back = jnp.zeros_like(waves).at[..., zigzag].set(levels * steps[part]).reshape(tiles, 6, 8, 8)
        seen = jnp.einsum("ki,tbkl,lj->tbij", cosines, back, cosines)
        miss = jnp.mean(jnp.square(seen - x), axis=(0, 2, 3))
        return stream, total, (total + 7) // 8 + stuffed, long, 10 * jnp.log10(255**2 / (miss + 1e-6))

    return Built(run, (normal(coarse, coarse, 3), normal(side, side)))


@program("reads-sought-backwards-in-a-genome-sorted-by-all-its-endings", GROUP)
def _reads(size: Size) -> Built:
    """This program builds the index of a genome, and finds for short reads from both strands where they come from.

    It is the FM-index (Ferragina and Manzini, 2000; as in bwa and bowtie2): all endings are sorted by doubling of their known
    parts, letters before them and counts at every 64th are kept, seeds are sought letter by letter backwards, and places vote.
    """
    n, reads, long, seed_long, hits, block = pick(
        size, (131072, 16384, 100, 22, 8, 64), (4096, 300, 60, 14, 4, 64), (64, 3, 12, 5, 2, 8)
    )
    seeds = np.arange(0, long - seed_long + 1, seed_long // 2)
    letters = 5

    def sorted_endings(genome):
        """This gives the order of all endings, by ranks of ever longer parts."""
        first = 8 if n > 64 else 1
        padded = jnp.pad(genome, (0, first))
        known = sum(padded[k : k + n] * letters ** (first - 1 - k) for k in range(first))

        def ranked(one, two):
            one, two, at = lax.sort((one, two, jnp.arange(n)), num_keys=2)
            new = jnp.pad((one[1:] != one[:-1]) | (two[1:] != two[:-1]), (1, 0)).astype(jnp.int32)
            return jnp.zeros(n, jnp.int32).at[at].set(jnp.cumsum(new)), at

        def step(carry):
            k, rank, _ = carry
            there = jnp.arange(n) + k
            two = jnp.where(there < n, rank[jnp.minimum(there, n - 1)] + 1, 0)
            return 2 * k, *ranked(rank, two)

        rank, at = ranked(known, jnp.zeros(n, jnp.int32))
        rounds, _, at = lax.while_loop(
            lambda c: (c[0] < n) & (jnp.max(c[1]) < n - 1), step, (jnp.int32(first), rank, at)
        )
        return at, rounds

    def run(raw, repeat_from, repeat_to, start, flip, errors, error_letter):
        """This gives places, strands and mismatches of reads."""
        piece = lax.dynamic_slice(raw, (repeat_from,), (n // 16,))
        genome = lax.dynamic_update_slice(raw + 1, piece + 1, (repeat_to + n // 2,)).at[n - 1].set(0)
        at, rounds = sorted_endings(genome)
        before = genome[(at - 1) % n]
        one_hot = (before[:, None] == jnp.arange(letters)).astype(jnp.int32)
        course = jnp.cumsum(one_hot, axis=0)
        marks = jnp.pad(course[block - 1 :: block], ((1, 0), (0, 0)))
        less = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(course[-1])[:-1]])

        def counted(letter, place):
            """This counts a letter before a place, from the last mark on."""
            mark = place // block
            inside = mark[..., None] * block + jnp.arange(block)
            same = (before[jnp.minimum(inside, n - 1)] == letter[..., None]) & (inside < place[..., None])
            return marks[mark, letter] + jnp.sum(same, axis=-1)

        start = jnp.minimum(start, n - long - 2)
        true = genome[start[:, None] + jnp.arange(long)]
        read = jnp.where(errors == 0, 1 + error_letter, true)
        turned = letters - read[:, ::-1]
        read = jnp.where((flip > 0)[:, None], turned, read)
        both = jnp.stack([read, letters - read[:, ::-1]], axis=1)
        seed = both[..., seeds[:, None] + np.arange(seed_long)]

        def seek(carry, letter):
            low, top = carry
            return (less[letter] + counted(letter, low), less[letter] + counted(letter, top)), None

        zero = jnp.zeros(seed.shape[:-1], jnp.int32)
        (low, top), _ = lax.scan(seek, (zero, zero + n), jnp.moveaxis(seed, -1, 0), reverse=True)
        found = low[..., None] + jnp.arange(hits)
        good = found < jnp.minimum(top, low + hits)[..., None]
        place = at[jnp.minimum(found, n - 1)] - seeds[:, None]
        place = jnp.where(good, place, n).reshape(reads, -1)
        strand = jnp.broadcast_to(jnp.arange(2)[:, None, None], good.shape[1:]).reshape(-1)
        key = jnp.sort(jnp.where(place < n, 2 * (place + long) + strand, 2**30), axis=1)
        fresh = jnp.pad(key[:, 1:] != key[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        group = jnp.cumsum(fresh, axis=1) - 1
        votes = jnp.zeros(key.shape, jnp.int32).at[jnp.arange(reads)[:, None], group].add(key < 2**30)
        votes = jnp.where(fresh, jnp.take_along_axis(votes, group, axis=1), 0)
        most, which = lax.top_k(votes, 2)
        key = jnp.take_along_axis(key, which, axis=1)
        where, strand = key // 2 - long, key % 2
        own = jnp.take_along_axis(both, strand[..., None], axis=1)
        there = genome[jnp.clip(where[..., None] + jnp.arange(long), 0, n - 1)]
        wrong = jnp.where(most > 0, jnp.sum(there != own, axis=-1), long)
        best = jnp.argmin(wrong, axis=1)[:, None]
        where, strand = (jnp.take_along_axis(z, best, axis=1)[:, 0] for z in (where, strand))
        sure = jnp.clip(jnp.abs(wrong[:, 0] - wrong[:, 1]) * 6, 0, 60)
        right = (where == start) & (strand == (flip > 0))
        depth = jnp.zeros(n + 1, jnp.int32).at[jnp.clip(where, 0, n)].add(1).at[jnp.clip(where + long, 0, n)].add(-1)
        return where, strand, jnp.min(wrong, axis=1), sure, jnp.mean(right), jnp.cumsum(depth)[:n], rounds, top - low

    inputs = (integers(n, below=4), integers(below=n // 4), integers(below=n // 4), integers(reads, below=n))
    inputs += (integers(reads, below=2), integers(reads, long, below=40), integers(reads, long, below=4))
    return Built(run, inputs)


@program("free-energies-of-tethered-walks-from-all-their-samples-by-newton-while", GROUP)
def _energies(size: Size) -> Built:
    """This program finds the profile of energy along a path from simulations that are each tethered near one place of the path.

    It is umbrella sampling with MBAR (Shirts and Chodera, 2008; choderalab/pymbar): short walks in a field of two valleys, a first
    guess by rounds of self-consistent sums, Newton's steps to the end, and errors by drawing samples anew.
    """
    k, walkers, apart, kept, bins, redrawn = pick(
        size, (48, 64, 10, 30, 100, 8), (20, 24, 6, 20, 40, 4), (4, 3, 2, 3, 8, 2)
    )
    samples, warm = k * walkers * kept, 12
    centre = np.linspace(-1.6, 1.6, k).astype(np.float32)
    stiff = 1.5 * (k / 3.2) ** 2 * 0.15

    def field(x, y):
        """This is the energy of two valleys that are joined by a bent path."""
        return 4.0 * (x * x - 1) ** 2 + 0.5 * x + 3.0 * (y - 0.5 * jnp.sin(2 * x)) ** 2

    def run(start, seed):
        """This walks, joins all samples and gives energies, profiles and their errors."""
        key, again_key = jax.random.split(jax.random.key(seed))
        x = centre[:, None, None] + 0.2 * start

        def energy(x):
            tied = 0.5 * stiff * jnp.square(x[..., 0] - centre[:, None])
            return jnp.sum(field(x[..., 0], x[..., 1]) + tied)

        def move(x, key):
            return x - 4e-3 * jax.grad(energy)(x) + 8e-3**0.5 * jax.random.normal(key, x.shape), None

        def block(x, key):
            x, _ = lax.scan(move, x, jax.random.split(key, apart))
            return x, x

        _, course = lax.scan(block, x, jax.random.split(key, kept))
        course = jnp.moveaxis(course, 0, 2)
        place = course[..., 0].reshape(samples)
        u = 0.5 * stiff * jnp.square(place - centre[:, None])
        many = samples / k

        def mixed(f, share):
            """This is the logarithm of what all tethered walks together give to each sample."""
            return jax.nn.logsumexp(f[:, None] - u, axis=0) + np.log(many) - jnp.log(share)

        def again(f, share):
            new = -jax.nn.logsumexp(-u - mixed(f, share), axis=1)
            return new - new[0]

        def newton(carry):
            """This is one step of Newton, or of sums where that is better."""
            n, f, _ = carry
            weigh = jnp.exp(f[:, None] - u - mixed(f, 1.0))
            slope = many * (1 - jnp.sum(weigh, axis=1))
            curve = -(many**2) * (weigh @ weigh.T) + jnp.diag(many * jnp.sum(weigh, axis=1))
            step = jnp.linalg.solve(curve[1:, 1:] + 1e-3 * many * jnp.eye(k - 1), slope[1:])
            one, two = f + jnp.pad(step, (1, 0)), again(f, 1.0)

            def miss(f):
                total = jnp.sum(jnp.exp(f[:, None] - u - mixed(f, 1.0)), axis=1)
                return jnp.max(jnp.abs(1 - total))

            lost = jnp.stack([miss(one), miss(two)])
            return n + 1, jnp.where(lost[0] < lost[1], one, two), jnp.min(lost)

        f = lax.fori_loop(0, warm, lambda _, f: again(f, 1.0), jnp.zeros(k))
        rounds, f, lost = lax.while_loop(lambda c: (c[0] < 12) & (c[2] > 1e-4), newton, (0, f, jnp.float32(1.0)))

        bin_of = jnp.clip(((place + 1.8) / 3.6 * bins).astype(jnp.int32), 0, bins - 1)

        def profile(f, share):
            log_weigh = -mixed(f, share)
            weigh = jnp.exp(log_weigh - jax.nn.logsumexp(log_weigh))
            chance = jnp.zeros(bins).at[bin_of].add(weigh)
            line = -jnp.log(jnp.maximum(chance, 1e-12))
            return line - jnp.min(line), 1 / jnp.sum(weigh * weigh)

        def redraw(key):
            """This finds the profile from samples that are drawn anew within each walk."""
            picked = jax.random.randint(key, (k, samples // k), 0, samples // k)
            share = jax.vmap(lambda at: jnp.zeros(samples // k).at[at].add(1.0))(picked).reshape(samples)
            share = jnp.where(share > 0, share, 1e-12)
            own = lax.fori_loop(0, 4, lambda _, f: again(f, share), f)
            return own, profile(own, share)[0]

        fs, lines = lax.map(redraw, jax.random.split(again_key, redrawn))
        line, useful = profile(f, 1.0)
        still = course[..., 0] - jnp.mean(course[..., 0], axis=2, keepdims=True)
        power = jnp.square(jnp.abs(jnp.fft.rfft(still, 2 * kept, axis=2)))
        lag = jnp.mean(jnp.fft.irfft(power, axis=2)[..., :kept], axis=1)
        lag = lag / (lag[:, :1] + 1e-9)
        lasting = 1 + 2 * jnp.sum(jnp.where(lax.cummin(lag, axis=1) > 0.05, lag, 0.0)[:, 1:], axis=1)
        overlap = jnp.exp(f[:, None] - u - mixed(f, 1.0))
        overlap = many * overlap @ overlap.T
        return f, line, jnp.std(fs, axis=0), jnp.std(lines, axis=0), useful, lasting, overlap, rounds, lost

    return Built(run, (normal(k, walkers, 2), integers(below=1000)))


@program("grains-that-rub-and-spin-through-a-funnel-near-ones-from-cells-steps", GROUP)
def _grains(size: Size) -> Built:
    """This program lets grains of many sizes fall through a funnel, and counts how many pass the hole.

    It is the method of discrete elements (Cundall and Strack, 1979; as in LIGGGHTS, with Haff and Werner's friction): grains are
    sorted into cells, near ones push like damped springs, rub within Coulomb's bound, spin, and start anew at the top.
    """
    columns, rows, steps, room = pick(size, (160, 200, 24, 4), (36, 44, 16, 4), (4, 5, 3, 4))
    n, cell = columns * rows, 1.2
    width, high = 1.3 * columns, 1.3 * rows + 0.5 * columns
    across, up = int(width / cell) + 3, int(high / cell) + 3
    dt, push, damp, rub, bound, weight = 4e-3, 4000.0, 12.0, 10.0, 0.5, 9.81
    hole, slope = max(2.0, 0.12 * width), 0.35 * columns
    ends = [(0, slope, 0, 2 * high), (width, slope, width, 2 * high)]
    ends += [(0, slope, (width - hole) / 2, 0), (width, slope, (width + hole) / 2, 0)]
    walls = np.array(ends, np.float32)

    def contact(gap, way, moves, turns, mass):
        """This is the force of a touch and its turning part, from overlaps, ways [..., 2] and how surfaces move."""
        along = jnp.sum(moves * way, axis=-1)
        side = jnp.stack([-way[..., 1], way[..., 0]], axis=-1)
        slip = jnp.sum(moves * side, axis=-1) - turns
        straight = jnp.where(
            gap > 0, jnp.maximum(push * gap * jnp.sqrt(jnp.maximum(gap, 0.0)) - damp * mass * along, 0.0), 0.0
        )
        bent = -jnp.clip(rub * mass * slip, -bound * straight, bound * straight)
        return straight[..., None] * way + bent[..., None] * side, bent

    def forces(place, speed, spin, radius, mass):
        """These are the pulls on all grains, their turning parts, and how many touches there are."""
        at = jnp.clip((place / cell).astype(jnp.int32) + 1, 1, jnp.array([across - 2, up - 2]))
        own = at[:, 1] * across + at[:, 0]
        order = jnp.argsort(own)
        row = own[order]
        rank = jnp.arange(n) - jnp.searchsorted(row, row)
        table = jnp.full((across * up, room), n).at[row, rank].set(order, mode="drop")
        steps_of = np.array([y * across + x for y in (-1, 0, 1) for x in (-1, 0, 1)])
        other = table[own[:, None] + steps_of].reshape(n, 9 * room)
        real = (other < n) & (other != jnp.arange(n)[:, None])
        other = jnp.minimum(other, n - 1)
        way = place[:, None] - place[other]
        far = jnp.sqrt(jnp.sum(way * way, axis=-1) + 1e-9)
        gap = jnp.where(real, radius[:, None] + radius[other] - far, 0.0)
        both = mass[:, None] * mass[other] / (mass[:, None] + mass[other])
        turns = -(radius * spin)[:, None] - (radius * spin)[other]
        force, bent = contact(gap, way / far[..., None], speed[:, None] - speed[other], turns, both)

        start, line = walls[:, :2], walls[:, 2:] - walls[:, :2]
        share = jnp.sum((place[:, None] - start) * line, axis=-1) / np.sum(line * line, axis=-1)
        way = place[:, None] - start - jnp.clip(share, 0.0, 1.0)[..., None] * line
        far = jnp.sqrt(jnp.sum(way * way, axis=-1) + 1e-9)
        wall, wall_bent = contact(
            radius[:, None] - far, way / far[..., None], speed[:, None], -(radius * spin)[:, None], mass[:, None]
        )
        total = jnp.sum(force, axis=1) + jnp.sum(wall, axis=1) - jnp.array([0.0, weight]) * mass[:, None]
        turning = -radius * (jnp.sum(bent, axis=1) + jnp.sum(wall_bent, axis=1))
        return total, turning, jnp.sum(gap > 0) // 2, jnp.sum(rank >= room)

    def run(shake, grow, speed):
        """This moves all grains by all steps."""
        radius = 0.47 + 0.08 * jnp.tanh(grow)
        mass = 4.0 * radius**3
        grid = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1).reshape(n, 2)
        place = grid * np.array([1.1, 0.95]) + np.array([0.1 * width, 0.6]) + 0.08 * jnp.tanh(shake)
        place = place + jnp.array([0.0, 1.0]) * slope * jnp.abs(2 * place[:, :1] / width - 1)

        def step(carry, _):
            place, speed, spin, out = carry
            force, turning, touches, lost = forces(place, speed, spin, radius, mass)
            speed = speed + dt * force / mass[:, None]
            spin = spin + dt * turning / (0.4 * mass * radius**2)
            place = place + dt * speed
            past = place[:, 1] < 0.4
            place = jnp.where(
                past[:, None],
                jnp.stack([0.5 * width + 0.3 * (place[:, 0] - 0.5 * width), place[:, 1] + high], 1),
                place,
            )
            speed = jnp.where(past[:, None], 0.0, speed)
            energy = 0.5 * jnp.sum(mass * jnp.sum(speed**2, -1)) + 0.2 * jnp.sum(mass * radius**2 * spin**2)
            return (place, speed, spin, out + past), (jnp.sum(past), touches, lost, energy)

        start = (place, 0.5 * speed - jnp.array([0.0, 4.0]), jnp.zeros(n), jnp.zeros(n, jnp.int32))
        (place, speed, spin, out), course = lax.scan(step, start, None, length=steps)
        layer = jnp.clip((place[:, 1] / high * 16).astype(jnp.int32), 0, 15)
        many = jax.ops.segment_sum(jnp.ones(n), layer, 16)
        flow = jax.ops.segment_sum(speed[:, 1], layer, 16) / jnp.maximum(many, 1)
        return place, speed, spin, out, course, many, flow

    return Built(run, (normal(n, 2), normal(n), normal(n, 2)))


@program("echoes-of-flat-waves-focused-at-each-pixel-by-weights-of-least-power", GROUP)
def _echoes(size: Size) -> Built:
    """This program makes a picture of tissue from echoes of flat waves that were sent at several angles.

    It is the beamformer of least variance (Synnevag, 2007; as in USTB, with coherent sums of Montaldo, 2009): echoes become
    analytic by Fourier transforms, are taken at each pixel's delays, and each pixel gets weights of its own by a small solve.
    """
    angles, elements, samples, deep, wide, part, specks = pick(
        size, (5, 64, 2048, 192, 128, 16, 3000), (3, 32, 768, 56, 40, 8, 200), (2, 6, 128, 4, 3, 2, 9)
    )
    rate, sound, tone, pitch = 20e6, 1540.0, 5e6, 0.3e-3
    reach = sound * (samples - 100) / rate / 2.4
    x_of = ((np.arange(elements) - (elements - 1) / 2) * pitch).astype(np.float32)
    tilt = np.deg2rad(np.linspace(-8, 8, angles)).astype(np.float32)[:, None, None]
    pixel_z, pixel_x = np.meshgrid(
        np.linspace(0.15, 0.95, deep) * reach, np.linspace(-0.4, 0.4, wide) * elements * pitch, indexing="ij"
    )
    pixel_x, pixel_z = pixel_x.reshape(-1).astype(np.float32), pixel_z.reshape(-1).astype(np.float32)
    pixels, parts = deep * wide, elements - part + 1
    window = np.lib.stride_tricks.sliding_window_view(np.arange(elements), part)

    def delays(x, z):
        """This is when echoes of points reach elements [angles, elements, points], in samples."""
        there = z * jnp.cos(tilt) + x * jnp.sin(tilt) + 0.5 * elements * pitch * jnp.sin(jnp.abs(tilt))
        back = jnp.sqrt(jnp.square(x - x_of[:, None]) + z * z)
        return (there + back) * (rate / sound)

    def run(where, bright, noise):
        """This gives pictures in decibels with equal weights and with weights of least power."""
        spot_x, spot_z = (jax.nn.sigmoid(1.5 * where[i]) for i in range(2))
        spot_x, spot_z = (spot_x - 0.5) * elements * pitch, spot_z * reach
        empty = jnp.square(spot_x) + jnp.square(spot_z - 0.5 * reach) < (0.12 * reach) ** 2
        bright = jnp.where(empty, 0.0, bright).at[:4].set(20.0)
        late = delays(spot_x, spot_z)
        low = jnp.floor(late).astype(jnp.int32)
        rows = jnp.arange(angles)[:, None, None], jnp.arange(elements)[:, None]
        raw = jnp.zeros((angles, elements, samples))
        raw = raw.at[(*rows, low)].add(bright * (1 - late + low), mode="drop")
        raw = raw.at[(*rows, low + 1)].add(bright * (late - low), mode="drop")
        ways = jnp.fft.fftfreq(samples, 1 / rate)
        pulse = jnp.exp(-0.5 * jnp.square((jnp.abs(ways) - tone) / (0.25 * tone)))
        heard = jnp.fft.ifft(jnp.fft.fft(raw) * pulse).real + 0.03 * noise
        heard = heard * (1 + jnp.arange(samples) / samples)
        both = jnp.fft.fft(heard) * jnp.where(ways > 0, 2.0, 0.0) * (jnp.abs(ways) < 2 * tone)
        analytic = jnp.fft.ifft(both)

        late = delays(pixel_x, pixel_z)
        low = jnp.clip(jnp.floor(late).astype(jnp.int32), 0, samples - 2)
        share = jnp.clip(late - low, 0.0, 1.0)
        one = jnp.take_along_axis(analytic, low, axis=-1)
        two = jnp.take_along_axis(analytic, low + 1, axis=-1)
        y = jnp.sum((1 - share) * one + share * two, axis=0).T
        near = jnp.abs(pixel_x[:, None] - x_of) < 0.5 * pixel_z[:, None] / 1.2
        y = jnp.where(near, y, 0.0)

        plain = jnp.sum(y, axis=1) / jnp.maximum(jnp.sum(near, axis=1), 1)
        pieces = y[:, window]
        square = jnp.einsum("pml,pmk->plk", pieces, pieces.conj()) / parts
        square = 0.5 * (square + square[:, ::-1, ::-1].conj())
        power = jnp.trace(square, axis1=1, axis2=2).real / part
        square = square + (0.05 * power + 1e-6)[:, None, None] * jnp.eye(part)
        factor = jnp.linalg.cholesky(square)
        ones = jnp.ones((pixels, part, 1), square.dtype)
        weights = jax.scipy.linalg.cho_solve((factor, True), ones)[..., 0]
        weights = weights / jnp.sum(weights, axis=1, keepdims=True)
        least = jnp.einsum("pl,pml->p", weights.conj(), pieces) / parts
        alike = jnp.square(jnp.abs(jnp.sum(y, axis=1))) / (
            jnp.sum(near, 1) * jnp.sum(jnp.square(jnp.abs(y)), axis=1) + 1e-9
        )

        def picture(value):
            loud = jnp.abs(value)
            loud = 20 * jnp.log10(loud / jnp.max(loud) + 1e-6)
            return jnp.clip(loud, -60.0, 0.0).reshape(deep, wide)

        pictures = jnp.stack([picture(v) for v in (plain, least, least * alike)])
        hollow = np.square(pixel_x) + np.square(pixel_z - 0.5 * reach) < (0.1 * reach) ** 2
        inside = jnp.sum(jnp.where(hollow.reshape(deep, wide), pictures, 0.0), axis=(1, 2)) / max(1, int(hollow.sum()))
        return (
            pictures,
            jnp.mean(pictures, axis=(1, 2)) - inside,
            jnp.angle(least).reshape(deep, wide),
            jnp.abs(weights),
        )

    return Built(run, (normal(2, specks), normal(specks), normal(angles, elements, samples)))
