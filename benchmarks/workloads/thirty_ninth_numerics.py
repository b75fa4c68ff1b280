"""Chained digests, power lines that fail and crystals that branch, the thirty-ninth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, integers, normal, pick, program

GROUP = "thirty-ninth"


@program("sha-256-merkle-trees-with-proofs-and-nonces-searched", GROUP)
def _digests(size: Size) -> Built:
    """This program builds trees of digests over transactions, proves that some are inside, and looks for good nonces.

    It is SHA-256 (FIPS 180-4) as Bitcoin uses it (Nakamoto, 2008): leaves are hashed two by two up to a root, the way of a leaf is
    checked with the digests beside it, and headers with many nonces are hashed twice to find the one with the most leading noughts.
    """
    trees, nonces = pick(size, (96, 4096), (4, 1024), (1, 4))
    levels = 6

    def root_part(prime, power):
        """This gives the first 32 bits after the point of a square or cube root."""
        whole, low, high = prime << (32 * power), 0, 1 << 40
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if middle**power <= whole else (low, middle)
        return low & 0xFFFFFFFF

    primes = [k for k in range(2, 312) if all(k % j for j in range(2, int(k**0.5) + 1))]
    table = jnp.asarray([root_part(k, 3) for k in primes[:64]], jnp.uint32)
    begin = jnp.asarray([root_part(k, 2) for k in primes[:8]], jnp.uint32)

    def turn(x, k):
        """This turns words to the right."""
        return (x >> k) | (x << (32 - k))

    def compress(state, block):
        """This mixes blocks [..., 16] into digests [..., 8]."""

        def mix(carry, constant):
            """This is one of 64 rounds; the window holds the next sixteen words."""
            (a, b, c, d, e, f, g, h), window = carry
            word = window[0]
            choice, most = (e & f) ^ (~e & g), (a & b) ^ (a & c) ^ (b & c)
            one = h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + choice + constant + word
            two = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + most
            low = turn(window[1], 7) ^ turn(window[1], 18) ^ (window[1] >> 3)
            high = turn(window[14], 17) ^ turn(window[14], 19) ^ (window[14] >> 10)
            fresh = word + low + window[9] + high
            return ((one + two, a, b, c, d + one, e, f, g), jnp.concatenate([window[1:], fresh[None]])), None

        start = tuple(jnp.moveaxis(state, -1, 0)), jnp.moveaxis(block, -1, 0)
        (mixed, _), _ = lax.scan(mix, start, table)
        return state + jnp.stack(mixed, axis=-1)

    def padded(words, bits):
        """This adds the closing bit, noughts and the length to fill blocks of sixteen words."""
        many = words.shape[-1]
        rest = -(many + 3) % 16
        end = jnp.asarray([0x80000000, *[0] * rest, 0, bits], jnp.uint32)
        return jnp.concatenate([words, jnp.broadcast_to(end, (*words.shape[:-1], rest + 3))], axis=-1)

    def digest(words):
        """This hashes whole words [..., many]."""
        blocks = padded(words, 32 * words.shape[-1])
        state = jnp.broadcast_to(begin, (*words.shape[:-1], 8))
        for k in range(blocks.shape[-1] // 16):
            state = compress(state, blocks[..., 16 * k : 16 * k + 16])
        return state

    def twice(words):
        """This hashes and hashes again."""
        return digest(digest(words))

    def run(transaction, asked, before, other):
        """This gives roots, whether proofs hold, digests that met the most noughts, and how many noughts others met."""
        layer = twice(transaction)
        layers = [layer]
        while layer.shape[1] > 1:
            layer = twice(layer.reshape(trees, layer.shape[1] // 2, 16))
            layers.append(layer)
        root, row = layer[:, 0], jnp.arange(trees)[:, None]
        mine = layers[0][row, asked]
        for k in range(levels):
            at = asked >> k
            beside = layers[k][row, at ^ 1]
            odd = (at & 1)[..., None] == 1
            mine = twice(jnp.where(odd, jnp.concatenate([beside, mine], -1), jnp.concatenate([mine, beside], -1)))
        holds = jnp.all(mine == root[:, None], axis=-1)

        head = jnp.concatenate([before, root, other], axis=-1)
        half_way = compress(jnp.broadcast_to(begin, (trees, 8)), head[:, :16])
        nonce = jnp.broadcast_to(jnp.arange(nonces, dtype=jnp.uint32)[:, None], (trees, nonces, 1))
        tail = jnp.broadcast_to(head[:, None, 16:], (trees, nonces, 3))
        end = padded(jnp.concatenate([jnp.zeros((trees, nonces, 16), jnp.uint32), tail, nonce], axis=-1), 640)[..., 16:]
        found = digest(compress(jnp.broadcast_to(half_way[:, None], (trees, nonces, 8)), end))
        first, second = lax.clz(found[..., 0]), lax.clz(found[..., 1])
        noughts = jnp.where(first == 32, first + second, first).astype(jnp.int32)
        best = jnp.argmax(noughts, axis=1)
        counts = jnp.zeros(65, jnp.int32).at[noughts].add(1)
        return root, holds, best, jnp.take_along_axis(found, best[:, None, None], axis=1)[:, 0], counts

    def words(*shape):
        """This describes random words."""
        return Random(shape, jnp.dtype(jnp.uint32), below=2**32)

    return Built(
        run, (words(trees, 2**levels, 24), integers(trees, 5, below=2**levels), words(trees, 9), words(trees, 2))
    )


@program("alternating-current-power-flow-newton-every-line-lost-in-turn-while", GROUP)
def _power_flow(size: Size) -> Built:
    """This program tells how a network of electric lines would carry its load if any one of its lines were lost.

    It is the screening of single losses by Newton's method in polar form (Tinney, 1967; MATPOWER and pandapower do it): slopes of
    flows are complex matrices, all losses are solved at once until the worst mismatch is small, and lost lines are ranked.
    """
    buses, chords, cases, most = pick(size, (96, 64, 48, 8), (60, 36, 30, 8), (6, 3, 3, 8))
    lines = buses + chords

    def run(load, chord, length, made, limit):
        """This gives voltages, flows of all losses, the worst lines, mismatches, rounds and the losses that hurt most."""
        ring = jnp.arange(buses)
        one = jnp.concatenate([ring, chord[:, 0]])
        two = jnp.concatenate([(ring + 1) % buses, (chord[:, 0] + 2 + chord[:, 1] % (buses - 3)) % buses])
        reach = 0.05 + 0.1 * jax.nn.sigmoid(length)
        series = 1.0 / lax.complex(0.2 * reach, reach)
        charge = lax.complex(jnp.zeros(lines), 0.02 + 0 * reach)
        use = 0.25 + 0.1 * jnp.tanh(load)
        source = ring % 4 == 0
        fixed = ring == 0
        active = jnp.where(source, 3.0 * (1 + 0.1 * jnp.tanh(made)) * jnp.mean(use[:, 0]), 0.0) - use[:, 0]
        reactive = -0.3 * use[:, 1]
        target = lax.complex(active, reactive)

        def admittance(on):
            """This builds the complex matrix of a network in which some lines are on."""
            y, c = jnp.where(on, series, 0), jnp.where(on, charge, 0)
            total = jnp.zeros((buses, buses), jnp.complex64)
            total = total.at[one, one].add(y + 0.5 * c).at[two, two].add(y + 0.5 * c)
            return total.at[one, two].add(-y).at[two, one].add(-y)

        def mismatch(matrix, angle, level):
            """This is how far injected power is from what it should be, and the voltages and currents."""
            volt = level * jnp.exp(1j * angle)
            current = matrix @ volt
            off = volt * current.conj() - target
            return jnp.where(fixed, 0, off.real), jnp.where(source, 0, off.imag), volt, current

        def newton(carry, matrix):
            """This is one step of Newton's method of one network."""
            angle, level = carry
            off_active, off_reactive, volt, current = mismatch(matrix, angle, level)
            way = volt / level
            by_level = volt[:, None] * (matrix * way).conj() + jnp.diag(current.conj() * way)
            by_angle = 1j * volt[:, None] * (jnp.diag(current) - matrix * volt).conj()
            top = jnp.concatenate([by_angle.real, by_level.real], axis=1)
            bottom = jnp.concatenate([by_angle.imag, by_level.imag], axis=1)
            whole = jnp.concatenate([top, bottom])
            held = jnp.concatenate([fixed, source])
            whole = jnp.where(held[:, None] | held, jnp.eye(2 * buses), whole)
            step = jnp.linalg.solve(whole, jnp.concatenate([off_active, off_reactive]))
            step = jnp.where(held, 0, step)
            return angle - step[:buses], jnp.clip(level - step[buses:], 0.5, 1.5)

        lost = jnp.concatenate([jnp.full(1, -1), jnp.arange(cases - 1) * lines // (cases - 1)])
        on = jnp.arange(lines) != lost[:, None]
        matrices = jax.vmap(admittance)(on)

        def worst(angle, level):
            """This is the largest mismatch of every case."""
            off_active, off_reactive, _, _ = jax.vmap(mismatch)(matrices, angle, level)
            return jnp.maximum(jnp.max(jnp.abs(off_active), axis=1), jnp.max(jnp.abs(off_reactive), axis=1))

        def going(carry):
            """This tells whether a case still has a mismatch."""
            angle, level, rounds, _ = carry
            return (rounds < most) & jnp.any(worst(angle, level) > 2e-4)

        def again(carry):
            """This steps in all cases that have a mismatch."""
            angle, level, rounds, used = carry
            open_ = worst(angle, level) > 2e-4
            moved = jax.vmap(newton)((angle, level), matrices)
            angle, level = (jnp.where(open_[:, None], x, y) for x, y in zip(moved, (angle, level), strict=True))
            return angle, level, rounds + 1, used + open_

        start = jnp.zeros((cases, buses)), jnp.where(source, 1.02, 1.0) * jnp.ones((cases, buses))
        angle, level, _, used = lax.while_loop(going, again, (*start, jnp.int32(0), jnp.zeros(cases, jnp.int32)))
        volt = level * jnp.exp(1j * angle)
        current = jnp.where(on, (volt[:, one] - volt[:, two]) * series + 0.5 * charge * volt[:, one], 0)
        flow = volt[:, one] * current.conj()
        capacity = 1.2 * jnp.abs(flow[0]) + 0.05 + 0.05 * jax.nn.sigmoid(limit)
        loading = jnp.abs(flow) / capacity
        over = jnp.sum(jnp.maximum(loading - 1, 0.0), axis=1) + 10 * jnp.sum(jnp.maximum(0.95 - level, 0.0), axis=1)
        hurt, which = lax.top_k(over, min(8, cases - 1))
        losses = jnp.sum(flow.real + (volt[:, two] * (-current + charge * 0).conj()).real, axis=1)
        worst_line = jnp.argmax(loading, axis=1)
        return jnp.stack([angle, level]), loading, worst_line, worst(angle, level), used, (hurt, lost[which]), losses

    ends = integers(chords, 2, below=buses)
    return Built(run, (normal(buses, 2), ends, normal(lines), normal(buses), normal(lines)))


@program("kobayashi-phase-field-dendrites-of-many-turned-crystals-freeze-scan", GROUP)
def _dendrites(size: Size) -> Built:
    """This program lets crystals with six arms grow in a cold melt until they meet.

    It is Kobayashi's phase field (1993): the width of the border depends on the way that it faces, melting heat warms the melt and
    slows the arms, every crystal has its own direction, and what each one covers, its border and its heat are told by steps.
    """
    n, steps, seeds = pick(size, (768, 150, 12), (160, 80, 5), (12, 3, 2))
    space, time = 0.03, 2e-4
    width, strength, arms, sharp, heat, slow, mean = 0.01, 0.04, 6.0, 0.9, 1.6, 3e-4, 10.0

    def sloped(x, axis):
        """This is the central difference along an axis of a torus."""
        return (jnp.roll(x, -1, axis) - jnp.roll(x, 1, axis)) / (2 * space)

    def spread(x):
        """This is the sum of second differences over nine points."""
        sides = sum(jnp.roll(x, k, axis) for k in (-1, 1) for axis in (0, 1))
        corners = sum(jnp.roll(jnp.roll(x, i, 0), j, 1) for i in (-1, 1) for j in (-1, 1))
        return (4 * sides + corners - 20 * x) / (6 * space**2)

    def run(corner, way, noise, seed):
        """This gives ice and warmth, what crystals cover, and by steps ice, lengths of borders, warmth and energies."""
        grid = jnp.arange(n)
        gap = jnp.abs(jnp.stack(jnp.meshgrid(grid, grid, indexing="ij"), axis=-1)[:, :, None] - corner)
        gap = jnp.minimum(gap, n - gap)
        away = jnp.sum(gap**2, axis=-1)
        nearest = jnp.argmin(away, axis=-1)
        facing = (np.pi / 3 * jax.nn.sigmoid(way))[nearest]
        ice = jnp.where(jnp.min(away, axis=-1) < 20, 1.0, 0.0)
        warm = 0.02 * noise

        def step(carry, key):
            """This is one explicit step."""
            ice, warm = carry
            x, y = sloped(ice, 0), sloped(ice, 1)
            flat = x**2 + y**2 < 1e-12
            angle = jnp.arctan2(jnp.where(flat, 0.0, y), jnp.where(flat, 1.0, x)) - facing
            thick = width * (1 + strength * jnp.cos(arms * angle))
            bent = -width * strength * arms * jnp.sin(arms * angle)
            across = sloped(thick * bent * x, 1) - sloped(thick * bent * y, 0)
            inner = thick**2 * spread(ice) + sloped(thick**2, 0) * x + sloped(thick**2, 1) * y
            pull = sharp / np.pi * jnp.arctan(mean * (1.0 - warm))
            shaken = 0.01 * ice * (1 - ice) * jax.random.uniform(key, ice.shape, minval=-0.5, maxval=0.5)
            change = (across + inner + ice * (1 - ice) * (ice - 0.5 + pull) + shaken) / slow
            fresh = jnp.clip(ice + time * change, 0.0, 1.0)
            warm = warm + time * spread(warm) + heat * (fresh - ice)
            border = jnp.sum((fresh > 0.1) & (fresh < 0.9)) * space**2
            energy = jnp.mean(0.5 * thick**2 * (x**2 + y**2) + 0.25 * ice**2 * (1 - ice) ** 2)
            return (fresh, warm), jnp.stack([jnp.mean(fresh), border, jnp.mean(warm), energy])

        keys = jax.random.split(jax.random.key(seed), steps)
        (ice, warm), told = lax.scan(step, (ice, warm), keys)
        solid = ice > 0.5
        cover = jax.ops.segment_sum(solid.reshape(-1).astype(jnp.int32), nearest.reshape(-1), num_segments=seeds)
        far = jnp.where(solid, jnp.min(away, axis=-1), 0)
        longest = jax.ops.segment_max(far.reshape(-1), nearest.reshape(-1), num_segments=seeds)
        longest = jnp.maximum(longest, 0).astype(jnp.float32)
        return ice, warm, cover, jnp.sqrt(longest) * space, told

    return Built(run, (integers(seeds, 2, below=n), normal(seeds), normal(n, n), integers(below=1000)))
