"""Rivers, bonds, floods, packed sound and cut surfaces, the twenty-ninth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, booleans, integers, normal, pick, program

GROUP = "twenty-ninth"


@program("rain-gathered-down-filled-hollows-wears-mountains-away", GROUP)
def _rivers(size: Size) -> Built:
    """This fills the hollows of mountains, gathers rain along steepest ways and lets rivers wear the ground away.

    It is the model of Braun and Willett (2013; fastscape-lem/fastscape) without stacks: hollows are filled by rounds (Planchon,
    2001), and sums along rivers and the implicit step of wear are found by jumping twice as far in each round.
    """
    b, side, steps, most = pick(size, (4, 384, 2, 150), (1, 144, 2, 60), (2, 9, 1, 8))
    cells = side * side
    far = float(2**0.5)
    ways = [(y, x, far if y and x else 1.0) for y in (-1, 0, 1) for x in (-1, 0, 1) if y or x]
    edge = np.zeros((side, side), bool)
    edge[0], edge[-1], edge[:, 0], edge[:, -1] = True, True, True, True
    shift = np.array([y * side + x for y, x, _ in ways], np.int32)
    long = np.array([d for _, _, d in ways], np.float32)
    rounds = int(np.ceil(np.log2(4 * side)))

    def around(z, fill):
        """These are the eight neighbours of all cells."""
        padded = jnp.pad(z, 1, constant_values=fill)
        return jnp.stack([padded[1 + y : 1 + y + side, 1 + x : 1 + x + side] for y, x, _ in ways])

    def filled(z):
        """This lifts hollows until water leaves them, and tells how many rounds that took."""

        def lower(carry):
            """This lowers the water once."""
            w, _, k = carry
            least = jnp.min(around(w, jnp.inf) + 1e-4 * long[:, None, None], axis=0)
            fresh = jnp.where(edge, z, jnp.maximum(z, jnp.minimum(w, least)))
            return fresh, jnp.any(fresh != w), k + 1

        start = jnp.where(edge, z, jnp.max(z) + 1.0)
        w, _, k = lax.while_loop(lambda c: c[1] & (c[2] < most), lower, (start, jnp.bool(True), jnp.int32(0)))
        return w, k

    def receivers(z):
        """This is the cell that each cell gives its water to, and how far it is; edges give to themselves."""
        slope = (z - around(z, jnp.inf)) / long[:, None, None]
        best = jnp.argmax(slope, axis=0)
        stays = edge | (jnp.max(slope, axis=0) <= 0)
        own = jnp.arange(cells)
        target = jnp.where(stays.reshape(-1), own, own + jnp.asarray(shift)[best].reshape(-1))
        return target, jnp.asarray(long)[best].reshape(-1), stays.reshape(-1)

    def one(z, rain, lift):
        """This is one stretch of time of one mountain."""
        w, k = filled(z)
        target, length, stays = receivers(w)

        def double(_, carry):
            """This gathers once and jumps on; water that has reached its end moves no further."""
            area, to, live = carry
            moved = jnp.zeros(cells).at[to].add(jnp.where(live, area, 0.0))
            return area + moved, to[to], live & live[to]

        area, _, _ = lax.fori_loop(0, rounds, double, (rain, target, ~stays))
        rate = 0.05 * jnp.sqrt(area) / length * ~stays
        risen = (w + jnp.where(edge, 0.0, lift)).reshape(-1)
        part = jnp.where(stays, 0.0, rate / (1 + rate))

        def solve(_, carry):
            """This puts the height of a cell's receiver into its own equation."""
            a, f, to = carry
            return a + f * a[to], f * f[to], to[to]

        a, _, _ = lax.fori_loop(0, rounds, solve, (jnp.where(stays, risen, risen / (1 + rate)), part, target))
        fresh = a.reshape(side, side)
        bend = jnp.sum(around(fresh, 0.0)[np.array([1, 3, 4, 6])], axis=0) - 4 * fresh
        fresh = jnp.where(edge, fresh, fresh + 0.05 * bend)
        return fresh, (area, k, jnp.sum(stays), jnp.mean(w - z))

    def run(noise, rain, lift):
        """This makes mountains and wears them away."""
        z = noise
        for wide in (3, 9, 27):
            window = (1, min(wide, side), min(wide, side))
            z = z + 0.8 * lax.reduce_window(noise, 0.0, lax.add, window, (1, 1, 1), "SAME") / wide
        z = z - jnp.min(z, axis=(1, 2), keepdims=True)
        rain = jnp.exp(0.3 * rain).reshape(b, cells)

        def step(_, carry):
            """This is one stretch of time of all mountains."""
            z, _ = carry
            return jax.vmap(one)(z, rain, 0.05 + 0.01 * jnp.abs(lift))

        told = (jnp.zeros((b, cells)), jnp.zeros(b, jnp.int32), jnp.zeros(b, jnp.int32), jnp.zeros(b))
        z, (area, k, ends, water) = lax.fori_loop(0, steps, step, (z, told))
        best, at = lax.top_k(area, 5)
        steep = jnp.sort(jnp.abs(jnp.diff(z, axis=2)).reshape(b, -1), axis=-1)[:, :: max(cells // 10, 1)]
        return z, best, at, k, ends, water, steep

    return Built(run, (normal(b, side, side), normal(b, side, side), normal(b, side, side)))


@program("prices-of-bonds-to-curves-of-two-humps-by-damped-steps", GROUP)
def _bonds(size: Size) -> Built:
    """This fits a curve of rates to the prices of bonds on many days and tells which bonds are cheap.

    It is the curve of Svensson (1994) as the US curve of Gürkaynak (2006) is fitted: payments are ragged, errors are divided by
    how much prices answer to rates, and steps of Levenberg and Marquardt with forward derivatives find six numbers.
    """
    days, bonds, most, steps = pick(size, (512, 97, 60, 8), (40, 61, 40, 8), (2, 7, 4, 2))
    terms = np.array([0.25, 0.5, 1, 2, 3, 5, 7, 10, 20, 30], np.float32)

    def curve(q, t):
        """This is the rate of a term."""
        one, two = jnp.exp(q[4]), jnp.exp(q[5])
        x, y = t / one, t / two
        load = -jnp.expm1(-x) / x
        hump = -jnp.expm1(-y) / y - jnp.exp(-y)
        return q[0] + q[1] * load + q[2] * (load - jnp.exp(-x)) + q[3] * hump

    def worth(q, time, cash):
        """This is the worth of payments [bonds, most]."""
        return jnp.sum(cash * jnp.exp(-curve(q, time) * time), axis=-1)

    def yields(price, time, cash):
        """This is the one rate that gives a price, by steps of Newton, and how much the price answers to it."""

        def step(_, rate):
            """This is one step."""
            each = cash * jnp.exp(-rate[:, None] * time)
            return jnp.clip(rate + (each.sum(-1) - price) / (each * time).sum(-1), -0.2, 0.5)

        rate = lax.fori_loop(0, 6, step, jnp.full(bonds, 0.03))
        each = cash * jnp.exp(-rate[:, None] * time)
        return rate, (each * time).sum(-1)

    def fit(price, time, cash, live):
        """This fits one day."""
        rate, answer = yields(price, time, cash)
        weigh = live / jnp.maximum(answer, 0.05)
        start = jnp.array([0.04, -0.01, 0.0, 0.0, 0.5, 2.0])

        def errors(q):
            """These are the errors of prices as errors of rates, and a weak pull to usual numbers."""
            usual = 1e-3 * (q - start) * jnp.array([1.0, 1.0, 1.0, 1.0, 0.3, 0.3])
            return jnp.concatenate([weigh * (worth(q, time, cash) - price), usual])

        def step(_, carry):
            """This is one damped step, which is kept if it helps."""
            q, damp, value = carry
            e, j = errors(q), jax.jacfwd(errors)(q)
            left = j.T @ j
            left = left + jnp.diag(damp * jnp.diagonal(left) + 1e-9)
            fresh = q - jnp.linalg.solve(left, j.T @ e)
            fresh = fresh.at[4:].set(jnp.clip(fresh[4:], -1.5, 3.0))
            fresh = fresh.at[:4].set(jnp.clip(fresh[:4], -0.3, 0.3))
            then = jnp.sum(errors(fresh) ** 2)
            good = then < value
            damp = jnp.clip(jnp.where(good, damp * 0.3, damp * 4), 1e-6, 1e4)
            return jnp.where(good, fresh, q), damp, jnp.where(good, then, value)

        q, _, value = lax.fori_loop(0, steps, step, (start, jnp.float32(1e-2), jnp.sum(errors(start) ** 2)))
        off = worth(q, time, cash) - price
        ahead = curve(q, jnp.asarray(terms))
        forward = jax.vmap(jax.grad(lambda t: t * curve(q, t)))(jnp.asarray(terms))
        return q, value, rate, off / jnp.maximum(answer, 0.05), ahead, forward

    def run(shape, ripe, coupon, noise, live):
        """This makes prices from true curves and fits them."""
        time = (1 + ripe) / 12.0 - 0.5 * jnp.arange(most)[:, None]
        time = jnp.moveaxis(time, 0, -1)[None] - jnp.arange(days)[:, None, None] / 3650.0 % 0.05
        real = time > 0.01
        cash = real * (0.25 * coupon[:, None]) + (jnp.arange(most) == 0) * 100.0
        time = jnp.where(real, time, 1.0)
        cash = jnp.where(real, cash, 0.0)
        usual = jnp.array([0.045, -0.02, 0.01, 0.01, 0.6, 1.9])
        true = usual + shape * jnp.array([0.005, 0.01, 0.01, 0.01, 0.1, 0.1])
        price = jax.vmap(worth)(true, time, cash) * (1 + 0.001 * noise)
        q, value, rate, off, ahead, forward = jax.vmap(fit)(price, time, cash, live.astype(jnp.float32))
        cheap, which = lax.top_k(jnp.where(live, off, -jnp.inf).at[:, 0].set(0.0), min(5, bonds))
        missed = jnp.sqrt(jnp.mean((ahead - jax.vmap(curve, (0, None))(true, jnp.asarray(terms))) ** 2, axis=-1))
        return q, value, rate, jnp.maximum(cheap, -1.0), which, ahead, forward, missed

    inputs = (normal(days, 6), integers(bonds, below=6 * most), integers(bonds, below=33))
    return Built(run, (*inputs, normal(days, bonds), booleans(days, bonds)))


@program("highest-floods-of-years-by-sorted-moments-of-regions-redrawn", GROUP)
def _floods(size: Size) -> Built:
    """This tells how high the flood of a hundred years is at many rivers, from sorted highest floods, alone and by regions.

    It is the index flood by L-moments (Hosking and Wallis, 1997; OpenHydrology/lmoments3): records have unlike lengths, means over
    sorted floods give three numbers of a curve, rivers that do not fit are marked, and years are drawn again for bounds.
    """
    rivers, years, again, regions = pick(size, (400, 61, 150, 12), (41, 47, 60, 5), (5, 7, 3, 2))
    spans = np.array([2, 10, 50, 100, 500], np.float32)

    def moments(x, count):
        """These are four moments of sorted floods; those past the count do not count."""
        x = jnp.sort(jnp.where(jnp.arange(years) < count[..., None], x, jnp.inf), axis=-1)
        real = jnp.isfinite(x)
        x = jnp.where(real, x, 0.0)
        k, n = jnp.arange(years, dtype=jnp.float32), count[..., None].astype(jnp.float32)
        w1 = k / (n - 1)
        w2 = w1 * (k - 1) / (n - 2)
        w3 = w2 * (k - 2) / (n - 3)
        b0, b1, b2, b3 = (jnp.sum(w * x, axis=-1) / n[..., 0] for w in (jnp.ones_like(w1), w1, w2, w3))
        l2 = 2 * b1 - b0
        l3, l4 = 6 * b2 - 6 * b1 + b0, 20 * b3 - 30 * b2 + 12 * b1 - b0
        return jnp.stack([b0, l2, l3 / l2, l4 / l2], axis=-1)

    def extremes(m):
        """These are place, spread and tail of the curve of highest values."""
        c = 2 / (3 + m[..., 2]) - np.log(2) / np.log(3)
        tail = 7.8590 * c + 2.9554 * c * c
        tail = jnp.where(jnp.abs(tail) < 1e-4, 1e-4, tail)
        gamma = jnp.exp(lax.lgamma(1 + tail))
        spread = m[..., 1] * tail / (gamma * (1 - 2.0**-tail))
        return m[..., 0] - spread * (1 - gamma) / tail, spread, tail

    def heights(m):
        """These are the floods of given spans of years."""
        place, spread, tail = (z[..., None] for z in extremes(m))
        rare = -jnp.log1p(-1 / spans)
        return place + spread / tail * (1 - rare**tail)

    def run(noise, count, region, size_of, redraw):
        """This makes floods, fits curves and draws years again."""
        count = years // 2 + 2 + count
        tail = -0.1 - 0.02 * region.astype(jnp.float32)[:, None]
        even = jnp.clip(jax.scipy.stats.norm.cdf(noise), 1e-6, 1 - 1e-6)
        flood = jnp.exp(size_of)[:, None] * (5 + (1 - (-jnp.log(even)) ** tail) / tail)
        own = moments(flood, count)
        ratio = own / own[:, :1]
        ratio = ratio.at[:, 2:].set(own[:, 2:])
        n = count.astype(jnp.float32)
        total = jax.ops.segment_sum(n, region, regions)
        mean = jax.ops.segment_sum(ratio * n[:, None], region, regions) / jnp.maximum(total, 1.0)[:, None]
        off = ratio[:, 1:] - mean[region, 1:]
        square = jax.ops.segment_sum(off[:, :, None] * off[:, None], region, regions) + 1e-4 * jnp.eye(3)
        solved = jnp.linalg.solve(square, jnp.eye(3))[region]
        members = jax.ops.segment_sum(jnp.ones(rivers), region, regions)
        strange = members[region] / 3 * jnp.einsum("ri,rij,rj->r", off, solved, off)
        unlike = jnp.sqrt(jax.ops.segment_sum(n * off[:, 0] ** 2, region, regions) / jnp.maximum(total, 1.0))
        grown = heights(jnp.where(total[:, None] > 0, mean, jnp.array([1.0, 0.3, 0.2, 0.15])))
        by_region = grown[region] * own[:, :1]

        def once(index):
            """This fits years that were drawn again."""
            x = jnp.take_along_axis(flood, index[None] % count[:, None], axis=1)
            return heights(moments(x, count))

        drawn_again = jnp.sort(lax.map(once, redraw), axis=0)
        low, high = (drawn_again[int(q * (again - 1))] for q in (0.05, 0.95))
        alone = heights(own)
        return alone, by_region, low, high, strange, unlike, jnp.sum((alone < low) | (alone > high), axis=0)

    inputs = (normal(rivers, years), integers(rivers, below=years // 2 - 1), integers(rivers, below=regions))
    return Built(run, (*inputs, normal(rivers), integers(again, years, below=100003)))


@program("sound-in-nibbles-whose-steps-grow-and-shrink-packed-and-opened", GROUP)
def _nibbles(size: Size) -> Built:
    """This packs sound into four bits per sample, opens it again and tells how much was lost.

    It is the ADPCM of the IMA (1992), as in Python's audioop and in ffmpeg, on whole numbers: each block begins with a sample, a
    nibble is a sign and three bits of the present step, and tables tell the next step.
    """
    blocks, long = pick(size, (16384, 257), (1024, 505), (3, 9))
    table = [7]
    exact = 7.0
    for _ in range(88):
        exact *= 1.1
        table.append(min(round(exact), 32767))
    steps = np.array(table, np.int32)
    moves = np.array([-1, -1, -1, -1, 2, 4, 6, 8], np.int32)

    def opened(state, code):
        """This opens one nibble of all blocks."""
        value, at = state
        step = jnp.asarray(steps)[at]
        change = (step >> 3) + sum(jnp.where((code & (4 >> k)) != 0, step >> k, 0) for k in range(3))
        value = jnp.clip(jnp.where((code & 8) != 0, value - change, value + change), -32768, 32767)
        return (value, jnp.clip(at + jnp.asarray(moves)[code & 7], 0, 88)), value

    def packed(state, now):
        """This packs one sample of all blocks."""
        value, at = state
        step = jnp.asarray(steps)[at]
        off = now - value
        code = jnp.where(off < 0, 8, 0)
        off = jnp.abs(off)
        for k in range(3):
            hit = off >= (step >> k)
            code = code | jnp.where(hit, 4 >> k, 0)
            off = off - jnp.where(hit, step >> k, 0)
        return opened(state, code)[0], code.astype(jnp.uint8)

    def run(noise, pitch, loud):
        """This makes, packs, opens and compares sound."""
        time = jnp.arange(long, dtype=jnp.float32)
        wave = jnp.sin(time * (0.02 + 0.1 * jnp.abs(pitch))[:, None]) + 0.5 * jnp.sin(time * 0.31 + pitch[:, None])
        wave = (wave + 0.1 * noise.astype(jnp.float32) / 128) * jnp.exp(7.5 + 0.5 * loud)[:, None]
        sound = jnp.clip(jnp.round(wave), -32768, 32767).astype(jnp.int32)
        first = jnp.argmin(
            jnp.abs(jnp.asarray(steps) - jnp.mean(jnp.abs(jnp.diff(sound[:, :9])), axis=1)[:, None]), axis=1
        )
        start = (sound[:, 0], first.astype(jnp.int32))
        _, code = lax.scan(packed, start, sound[:, 1:].T)
        bits = code[0::2] | (code[1::2] << 4)
        again = jnp.stack([bits & 15, bits >> 4], axis=1).reshape(long - 1, blocks).astype(jnp.int32)
        (_, last), heard = lax.scan(opened, start, again)
        heard = jnp.concatenate([sound[:, :1], heard.T], axis=1)
        off = (heard - sound).astype(jnp.float32)
        power = jnp.mean(sound.astype(jnp.float32) ** 2, axis=1)
        clear = 10 * jnp.log10((power + 1) / (jnp.mean(off * off, axis=1) + 1))
        often = jnp.zeros(16, jnp.int32).at[again.reshape(-1)].add(1)
        share = often / jnp.sum(often)
        return bits, heard.astype(jnp.int16), clear, last, -jnp.sum(share * jnp.log2(jnp.maximum(share, 1e-9))), often

    sound = Random((blocks, long), jnp.dtype(jnp.int8), below=127)
    return Built(run, (sound, normal(blocks), normal(blocks)))


@program("surfaces-cut-out-of-grids-by-six-tetrahedra-per-cell", GROUP)
def _surfaces(size: Size) -> Built:
    """This cuts the surface of soft balls out of a grid of values and tells its triangles, area, room inside and bends.

    It is marching tetrahedra (Doi, 1991), as in NVIDIAGameWorks/kaolin: each cell is six tetrahedra, a table of sixteen cases tells
    which edges are cut, and triangles of all cells are moved to the front of one array.
    """
    side, balls, most, sorts = pick(size, (89, 40, 262144, 16), (33, 12, 24576, 8), (6, 3, 300, 2))
    corners = np.array([[k >> 2 & 1, k >> 1 & 1, k & 1] for k in range(8)])
    tets = np.array([[0, 4, 6, 7], [0, 6, 2, 7], [0, 2, 3, 7], [0, 3, 1, 7], [0, 1, 5, 7], [0, 5, 4, 7]])
    edges = np.array([[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]])
    cases = np.full((16, 6), -1)
    for k, row in {
        1: [0, 1, 2],
        2: [4, 3, 0],
        3: [1, 4, 3, 1, 2, 4],
        4: [3, 5, 1],
        5: [0, 3, 2, 3, 5, 2],
        6: [0, 4, 1, 4, 5, 1],
        7: [5, 2, 4],
    }.items():
        cases[k, : len(row)] = row
        other = np.array(row).reshape(-1, 3)[:, ::-1].reshape(-1)
        cases[15 - k, : len(row)] = other
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, side)] * 3, indexing="ij"), axis=-1).astype(np.float32)

    def field(place, ball):
        """This is above zero inside of balls that flow into each other, and tells the nearest ball."""

        def add(carry, one):
            """This adds one ball."""
            total, best, which, k = carry
            gap = jnp.sum((place - 0.5 * jnp.tanh(one[:3])) ** 2, axis=-1)
            value = jnp.exp(-gap * 40 / (1 + 0.3 * jnp.tanh(one[3])))
            near = value > best
            return (total + value, jnp.where(near, value, best), jnp.where(near, k, which), k + 1), None

        zero = jnp.zeros(place.shape[:-1])
        (total, _, which, _), _ = lax.scan(add, (zero, zero, zero.astype(jnp.int32), jnp.int32(0)), ball)
        return total - 0.5, which

    def run(ball, bumps):
        """This cuts and measures the surface."""
        value, which = field(jnp.asarray(grid), ball)
        value = value + 0.01 * bumps
        border = jnp.pad(jnp.ones((side - 2,) * 3, bool), 1)
        value = jnp.where(border, value, -0.5)
        m = side - 1

        def of_corners(z):
            """This gives the eight corners of all cells."""
            return jnp.stack([z[i : i + m, j : j + m, k : k + m] for i, j, k in corners], axis=-1).reshape(m**3, 8)

        eight = of_corners(value)
        four = eight[:, tets]
        code = jnp.sum((four > 0) * np.array([1, 2, 4, 8]), axis=-1)
        cut = jnp.asarray(cases)[code].reshape(-1, 2, 3)
        live = cut[..., 0] >= 0
        count = jnp.sum(live)
        at = jnp.where(live, jnp.cumsum(live.reshape(-1)).reshape(live.shape) - 1, most)
        source = jnp.full(most, -1).at[at.reshape(-1)].set(jnp.arange(live.size), mode="drop")
        real = source >= 0
        source = jnp.maximum(source, 0)
        cell, tet = source // 12, source // 2 % 6
        edge = jnp.maximum(cut.reshape(-1, 3)[source], 0)
        ends = jnp.asarray(tets)[tet][jnp.arange(most)[:, None, None], jnp.asarray(edges)[edge]]
        worth = eight[cell[:, None, None], ends]
        base = jnp.stack([cell // (m * m), cell // m % m, cell % m], axis=-1)
        spot = (base[:, None, None] + jnp.asarray(corners)[ends]).astype(jnp.float32) * (2 / m) - 1
        gap = worth[..., 0] - worth[..., 1]
        part = jnp.where(jnp.abs(gap) > 1e-9, worth[..., 0] / jnp.where(jnp.abs(gap) > 1e-9, gap, 1.0), 0.5)
        point = spot[:, :, 0] + part[..., None] * (spot[:, :, 1] - spot[:, :, 0])
        point = jnp.where(real[:, None, None], point, 0.0)
        normal_of = jnp.cross(point[:, 1] - point[:, 0], point[:, 2] - point[:, 0])
        area = 0.5 * jnp.sqrt(jnp.sum(normal_of**2, axis=-1))
        inside = jnp.einsum("ti,ti->", point[:, 0], normal_of) / 6
        sort_of = of_corners(which)[cell, 0] % sorts
        shares = jax.ops.segment_sum(area, sort_of, sorts)
        middle = jnp.einsum("t,tki->i", area, point) / (3 * jnp.maximum(jnp.sum(area), 1e-9))
        spread = jnp.einsum("t,tki,tkj->ij", area, point - middle, point - middle) / 3
        solid = jnp.mean((value > 0).astype(jnp.float32)) * 8
        return (
            point,
            count,
            jnp.sum(area),
            inside,
            solid,
            shares,
            middle,
            spread,
            jnp.bincount(code.reshape(-1), length=16),
        )

    return Built(run, (normal(balls, 4), normal(side, side, side)))
