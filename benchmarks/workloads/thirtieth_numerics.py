"""Girders, pools of debts, crawling cells, many exposures and light in skin, the thirtieth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, booleans, integers, normal, pick, program

GROUP = "thirtieth"


def _stiffness() -> np.ndarray:
    """Returns the matrix of a square of stuff with sides of one, as Sigmund (2001) gives it."""
    v = 0.3
    k = [1 / 2 - v / 6, 1 / 8 + v / 8, -1 / 4 - v / 12, -1 / 8 + 3 * v / 8]
    k += [-1 / 4 + v / 12, -1 / 8 - v / 8, v / 6, 1 / 8 - 3 * v / 8]
    rows = [[0, 1, 2, 3, 4, 5, 6, 7], [1, 0, 7, 6, 5, 4, 3, 2], [2, 7, 0, 5, 6, 3, 4, 1], [3, 6, 5, 0, 7, 2, 1, 4]]
    rows += [[4, 5, 6, 7, 0, 1, 2, 3], [5, 4, 3, 2, 1, 0, 7, 6], [6, 3, 4, 1, 2, 7, 0, 5], [7, 2, 1, 4, 3, 6, 5, 0]]
    return np.array([[k[j] for j in row] for row in rows], np.float32) / (1 - v * v)


@program("girders-made-stiff-with-little-stuff-by-solves-and-shared-growth", GROUP)
def _girders(size: Size) -> Built:
    """This spreads little stuff over a plate so that it bends least under loads, for many plates at once.

    It is the 88 lines of Andreassen (2011; top88, and google-research/neural-structural-optimization): bending is solved by
    conjugate gradients over squares, growth is smoothed by cones, and stuff moves by a multiplier that is found by halving.
    """
    b, loads, high, wide, rounds, solves = pick(
        size, (16, 3, 64, 192, 4, 60), (2, 2, 24, 64, 3, 30), (1, 1, 4, 6, 2, 6)
    )
    reach, least, power = 2, 1e-3, 3.0
    matrix = _stiffness()
    cone = np.array([[max(0.0, 2.4 - (y * y + x * x) ** 0.5) for x in (-2, -1, 0, 1, 2)] for y in (-2, -1, 0, 1, 2)])
    own = np.arange((high + 1) * (wide + 1)).reshape(high + 1, wide + 1)
    nodes = np.stack([own[1:, :-1], own[1:, 1:], own[:-1, 1:], own[:-1, :-1]], axis=-1).reshape(-1, 4)
    parts = np.stack([2 * nodes, 2 * nodes + 1], axis=-1).reshape(-1, 8)
    freedom = 2 * own.size
    free = np.ones(freedom, np.float32)
    free[2 * own[:, 0]], free[2 * own[-1, -1] + 1] = 0.0, 0.0

    def smooth(x):
        """This sums over cones around all squares."""
        kernel = jnp.asarray(cone, jnp.float32)[:, :, None, None]
        how = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        y = lax.conv_general_dilated(x[None, ..., None], kernel, (1, 1), ((reach, reach), (reach, reach)), **how)
        return y[0, ..., 0]

    whole = np.ones((high, wide), np.float32)

    def pushed(stiff, u):
        """This is the force of a bend."""
        each = stiff[:, None] * (u[parts] @ matrix)
        return jnp.zeros(freedom).at[parts].add(each) * free + (1 - free) * u

    def bent(stiff, force, start):
        """This is the bend of one load, by conjugate gradients that are scaled by the diagonal."""
        scale = jnp.zeros(freedom).at[parts].add(stiff[:, None] * np.diag(matrix)) * free + (1 - free)
        r = force - pushed(stiff, start)
        z = r / scale

        def step(_, carry):
            u, r, z, d = carry
            q = pushed(stiff, d)
            rz = jnp.vdot(r, z)
            a = rz / jnp.maximum(jnp.vdot(d, q), 1e-20)
            u, r = u + a * d, r - a * q
            z = r / scale
            return u, r, z, z + jnp.vdot(r, z) / jnp.maximum(rz, 1e-20) * d

        u, r, _, _ = lax.fori_loop(0, solves, step, (start, r, z, z))
        return u, jnp.linalg.norm(r) / (jnp.linalg.norm(force) + 1e-9)

    def one(force, share, soft):
        """This is one plate."""
        weigh = smooth(jnp.asarray(whole))
        force = force * free * (jnp.arange(freedom) // 2 < wide + 1)
        x = jnp.clip(share + 0.05 * soft, 0.05, 1.0)

        def work(x, u):
            """This is how much all loads bend the plate, for bends that stay."""
            stiff = (least + (1 - least) * x**power).reshape(-1)
            each = jnp.einsum("lei,ij,lej->le", u[:, parts], matrix, u[:, parts])
            return jnp.sum(stiff * each)

        def step(carry, _):
            x, u = carry
            stiff = (least + (1 - least) * x**power).reshape(-1)
            u, off = jax.vmap(bent, (None, 0, 0))(stiff, force, u)
            value, g = jax.value_and_grad(work)(x, u)
            g = smooth(x * -g) / weigh / jnp.maximum(x, 1e-3)

            def moved(multiplier):
                """This moves stuff for a multiplier."""
                y = x * jnp.sqrt(jnp.maximum(-g, 1e-12) / multiplier)
                return jnp.clip(jnp.clip(y, x - 0.2, x + 0.2), 1e-3, 1.0)

            def halve(_, ends):
                low, top = ends
                middle = jnp.sqrt(low * top)
                much = jnp.mean(moved(middle)) > share
                return jnp.where(much, middle, low), jnp.where(much, top, middle)

            g = -jnp.abs(g)
            low, top = lax.fori_loop(0, 30, halve, (jnp.float32(1e-9), jnp.float32(1e9)))
            fresh = moved(jnp.sqrt(low * top))
            return (fresh, u), (value, jnp.max(jnp.abs(fresh - x)), jnp.max(off))

        (x, u), told = lax.scan(step, (x, jnp.zeros((loads, freedom))), None, length=rounds)
        grey = jnp.mean(4 * x * (1 - x))
        return x, jnp.max(jnp.abs(u), axis=-1), told, grey

    def run(force, share, soft):
        """This is all plates."""
        share = 0.4 + 0.1 * jnp.tanh(share)
        return jax.vmap(one)(jnp.where(jnp.abs(force) > 2, force, 0.0), share, soft)

    return Built(run, (normal(b, loads, freedom), normal(b), normal(b, high, wide)))


@program("pools-of-debts-that-fail-together-tranches-and-bonds-between-them-implied", GROUP)
def _pools(size: Size) -> Built:
    """This tells worths of slices of a pool of debts from one factor, and the bond between debts that prices imply.

    It is the recursion of Andersen, Sidenius and Basu (2003; as in QuantLib): given the factor debts fail apart, so that one more
    debt moves the curve of losses by its size; curves are mixed over the factor, and bonds are found by halving.
    """
    days, names, points, units, terms, rounds = pick(
        size, (24, 125, 48, 256, 5, 5), (3, 100, 20, 80, 4, 5), (2, 7, 4, 9, 2, 3)
    )
    node, mass = np.polynomial.hermite_e.hermegauss(points)
    node, mass = node.astype(np.float32), (mass / mass.sum()).astype(np.float32)
    ends = np.array([0.03, 0.06, 0.09, 0.12, 0.22], np.float32)
    when = np.arange(1, terms + 1, dtype=np.float32)
    step_of = 0.6 / units

    def losses(bond, chance, size_of):
        """This is the curve of losses [terms, units] for the bond between debts."""
        bar = jax.scipy.stats.norm.ppf(chance)
        root = jnp.sqrt(bond)
        given = jax.scipy.stats.norm.cdf((bar[..., None] - root * node) / jnp.sqrt(1 - bond))

        def one(curve, now):
            """This adds one debt, whose size is some units and a part."""
            p, big = now
            low = jnp.floor(big).astype(jnp.int32)
            part = big - low
            at = jnp.arange(units)
            one = jnp.where(at >= low, jnp.take(curve, jnp.maximum(at - low, 0), axis=-1), 0.0)
            two = jnp.where(at >= low + 1, jnp.take(curve, jnp.maximum(at - low - 1, 0), axis=-1), 0.0)
            return (1 - p[..., None]) * curve + p[..., None] * ((1 - part) * one + part * two), None

        start = jnp.zeros((terms, points, units)).at[..., 0].set(1.0)
        curve, _ = lax.scan(one, start, (given, size_of / step_of))
        return jnp.einsum("p,tpu->tu", mass, curve)

    def below(bond, end, chance, size_of):
        """This is the mean loss of all below an end, at all terms."""
        lost = jnp.arange(units) * step_of
        return losses(bond, chance, size_of) @ jnp.minimum(lost, end)

    def spread(mean, end, rate):
        """This is the fair price of a slice below an end, per year."""
        fade = jnp.exp(-rate * when)
        before = jnp.concatenate([jnp.zeros(1), mean[:-1]])
        paid = jnp.sum(fade * (mean - before))
        return paid / jnp.maximum(jnp.sum(fade * (end - 0.5 * (mean + before))), 1e-6)

    def one_day(hazard, size_of, rate, shock):
        """This makes prices from bonds and finds the bonds again."""
        chance = jnp.clip(-jnp.expm1(-hazard[:, None] * when), 1e-6, 0.5)
        true = jnp.clip(0.15 + 1.6 * ends + 0.03 * shock, 0.03, 0.85)
        quoted = jax.vmap(lambda bond, end: spread(below(bond, end, chance, size_of), end, rate))(
            true, jnp.asarray(ends)
        )

        def implied(quote, end):
            def halve(_, bounds):
                low, top = bounds
                middle = 0.5 * (low + top)
                dear = spread(below(middle, end, chance, size_of), end, rate) > quote
                return jnp.where(dear, middle, low), jnp.where(dear, top, middle)

            low, top = lax.fori_loop(0, rounds, halve, (jnp.float32(0.01), jnp.float32(0.95)))
            return 0.5 * (low + top)

        bond = jax.vmap(implied)(quoted, jnp.asarray(ends))
        curve = losses(bond[0], chance, size_of)
        mean = curve @ (jnp.arange(units) * step_of)
        rare = jnp.sum(jnp.cumsum(curve, axis=-1) < 0.99, axis=-1) * step_of
        return bond, bond - true, quoted, mean, rare, 1 - jnp.sum(curve, axis=-1)

    def run(hazard, back, rate, shock):
        """This is all days."""
        size_of = (1 - jnp.clip(0.4 + 0.1 * back, 0.1, 0.8)) / names
        hazard = 0.012 * jnp.exp(0.6 * hazard)
        return jax.vmap(one_day, (0, None, 0, 0))(hazard, size_of, 0.03 + 0.005 * rate, shock)

    return Built(run, (normal(days, names), normal(names), normal(days), normal(days, len(ends))))


@program("cells-crawl-as-blots-of-places-towards-what-they-give-off", GROUP)
def _blots(size: Size) -> Built:
    """This lets cells crawl: each is a blot of places of a grid that keeps its size, clings to some and follows a scent.

    It is the model of Graner and Glazier (1992), with scent as in CompuCell3D and morpheus: places copy a neighbour by chance, in
    nine turns so that no two neighbours change at once, and cells give off a scent that spreads and fades.
    """
    b, side, block, sweeps = pick(size, (24, 252, 12, 5), (2, 96, 12, 4), (1, 18, 6, 1))
    across = side // block
    cells = across * across + 1
    ways = np.array([(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1) if y or x], np.int32)
    cling = np.array([[0.0, 12.0, 12.0], [12.0, 6.0, 11.0], [12.0, 11.0, 10.0]], np.float32)
    wanted, heat, press = 0.8 * block * block, 8.0, 1.0
    row, column = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    turn_of = (row % 3) * 3 + column % 3

    def around(z):
        """These are the eight neighbours on a torus."""
        return jnp.stack([jnp.roll(z, (-y, -x), (0, 1)) for y, x in ways.tolist()])

    def one(live, kind, key):
        """This is one grid."""
        first = 1 + (row // block) * across + column // block
        live = jnp.concatenate([jnp.zeros(1, bool), live])
        cell = jnp.where(live[first], jnp.asarray(first), 0)
        kind = jnp.concatenate([jnp.zeros(1, jnp.int32), 1 + kind])

        def energy(own, near):
            """This is how little a place of a cell clings to its neighbours."""
            apart = own != near
            return jnp.sum(jnp.where(apart, jnp.asarray(cling)[kind[own], kind[near]], 0.0), axis=0)

        def turn(k, carry):
            """This lets a ninth of all places copy."""
            cell, scent, copied = carry
            one, two = jax.random.split(jax.random.fold_in(key, k))
            which = jax.random.randint(one, (side, side), 0, 8)
            luck = jax.random.uniform(two, (side, side))
            near = around(cell)
            other = jnp.take_along_axis(near, which[None], axis=0)[0]
            there = jnp.take_along_axis(around(scent), which[None], axis=0)[0]
            count = jnp.bincount(cell.reshape(-1), length=cells).astype(jnp.float32)
            change = energy(other, near) - energy(cell, near)
            grown = 2 * (count - wanted) + 1
            shrunk = -2 * (count - wanted) + 1
            change = change + press * jnp.where(other > 0, grown[other], 0.0) / 10
            change = change + press * jnp.where(cell > 0, shrunk[cell], 0.0) / 10
            change = change - 20.0 * (scent - there) * (other > 0)
            take = (other != cell) & (turn_of == k % 9) & (luck < jnp.exp(-jnp.maximum(change, 0.0) / heat))
            cell = jnp.where(take, other, cell)
            spread = jnp.mean(around(scent)[np.array([1, 3, 4, 6])], axis=0) - scent
            scent = scent + 0.4 * spread - 0.02 * scent + 0.05 * (kind[cell] == 1)
            return cell, scent, copied + jnp.sum(take)

        start = (cell, jnp.zeros((side, side)), jnp.int32(0))
        cell, scent, copied = lax.fori_loop(0, 9 * sweeps, turn, start)
        flat = cell.reshape(-1)
        count = jnp.bincount(flat, length=cells)
        free = jnp.sum(around(cell) != cell, axis=0).reshape(-1)
        edge = jax.ops.segment_sum(free, flat, cells)
        angle = 2 * np.pi / side
        where = [
            jnp.arctan2(
                jax.ops.segment_sum(jnp.sin(angle * z.reshape(-1)), flat, cells),
                jax.ops.segment_sum(jnp.cos(angle * z.reshape(-1)), flat, cells),
            )
            for z in (row, column)
        ]
        mixed = jnp.mean((kind[around(cell)] != kind[cell]) & (around(cell) != 0) & (cell != 0))
        return cell, scent, copied, count, edge, jnp.stack(where, axis=-1) / angle, mixed

    def run(live, kind, seed):
        """This is all grids."""
        return jax.vmap(one)(live, kind, jax.random.split(jax.random.key(seed), b))

    return Built(run, (booleans(b, cells - 1), integers(b, cells - 1, below=2), integers(below=1000)))


@program("shots-of-many-exposures-fused-level-by-level-by-what-shows-best", GROUP)
def _shots(size: Size) -> Built:
    """This fuses shots of one scene, short and long, into one photograph in which all shows well.

    It is exposure fusion (Mertens, 2007; as in enfuse and OpenCV's MergeMertens): contrast, colour and middling light weigh all
    places, weights are blurred and shots are parted into levels, and moved things are held by the middle shot.
    """
    b, shots, high, wide, levels = pick(size, (2, 5, 768, 1024, 7), (1, 3, 160, 224, 5), (1, 3, 16, 24, 3))
    stops = 2.0 * (np.arange(shots) - shots // 2)
    taps = np.array([1, 4, 6, 4, 1], np.float32) / 16

    def blurred(x):
        """This blurs rows and columns of [..., rows, columns, channels]."""
        for axis in (-3, -2):
            pad = [(0, 0)] * x.ndim
            pad[axis] = (2, 2)
            y = jnp.pad(x, pad, mode="reflect")
            x = sum(t * lax.slice_in_dim(y, k, k + x.shape[axis], axis=axis) for k, t in enumerate(taps.tolist()))
        return x

    def down(x):
        """This halves both sides."""
        return blurred(x)[..., ::2, ::2, :]

    def up(x, like):
        """This doubles both sides."""
        y = jnp.zeros(like.shape[:-1] + x.shape[-1:]).at[..., ::2, ::2, :].set(x)
        return 4 * blurred(y)

    def parted(x):
        """These are the levels of a picture, from fine to coarse."""
        parts = []
        for _ in range(levels - 1):
            small = down(x)
            parts.append(x - up(small, x))
            x = small
        return [*parts, x]

    def run(light, colour, noise, moved):
        """This makes shots of a scene and fuses them."""
        scene = jax.image.resize(light, (b, high, wide, 1), "cubic") * 1.5 + 0.3 * jax.image.resize(
            colour, (b, high, wide, 3), "linear"
        )
        shift = jnp.roll(scene, 3, axis=2)
        exposed = jnp.exp2(scene[:, None] + stops[:, None, None, None] * jnp.ones((shots, 1, 1, 1)))
        exposed = exposed.at[:, -1].set(
            jnp.where(moved[:, None, None, None], jnp.exp2(shift + stops[-1]), exposed[:, -1])
        )
        seen = 0.18 * exposed + 0.01 * noise
        x = jnp.clip(seen, 0.0, 1.0) ** (1 / 2.2)
        x = jnp.round(x * 255) / 255
        grey = x @ jnp.array([0.299, 0.587, 0.114])
        edge = jnp.pad(grey, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
        bend = edge[..., :-2, 1:-1] + edge[..., 2:, 1:-1] + edge[..., 1:-1, :-2] + edge[..., 1:-1, 2:] - 4 * grey
        colourful = jnp.std(x, axis=-1)
        middling = jnp.exp(-jnp.sum(jnp.square(x - 0.5), axis=-1) / (2 * 0.2**2))
        middle = grey[:, shots // 2]
        told = jnp.clip(middle, 1e-3, 1.0)[:, None] ** 2.2 * 2.0 ** stops[:, None, None]
        told = jnp.clip(told, 0.0, 1.0) ** (1 / 2.2)
        still = jnp.exp(
            -jnp.square(jnp.where((middle > 0.05) & (middle < 0.95), 1.0, 0.0)[:, None] * (told - grey) / 0.15)
        )
        w = (jnp.abs(bend) + 1e-4) * (colourful + 1e-3) * (middling + 1e-6) * still + 1e-12
        w = w / jnp.sum(w, axis=1, keepdims=True)
        weights = [w[..., None]]
        for _ in range(levels - 1):
            weights.append(down(weights[-1]))
        fused = [jnp.sum(p * q, axis=1) for p, q in zip(parted(x), weights, strict=True)]
        y = fused[-1]
        for part in fused[-2::-1]:
            y = part + up(y, part)
        low, top = jnp.min(y, axis=(1, 2, 3), keepdims=True), jnp.max(y, axis=(1, 2, 3), keepdims=True)
        out = jnp.round(255 * jnp.clip((y - low) / (top - low + 1e-6), 0.0, 1.0)).astype(jnp.uint8)
        often = jax.vmap(lambda z: jnp.bincount(z.reshape(-1).astype(jnp.int32), length=256))(out)
        share = often / (high * wide * 3)
        unsure = -jnp.sum(jnp.where(share > 0, share * jnp.log2(jnp.maximum(share, 1e-9)), 0.0), axis=-1)
        return out, often, unsure, jnp.mean(w, axis=(2, 3)), jnp.mean(jnp.square(x - y[:, None]), axis=(2, 3, 4))

    inputs = (normal(b, high // 16, wide // 16, 1), normal(b, high // 8, wide // 8, 3))
    return Built(run, (*inputs, Random((b, shots, high, wide, 3), jnp.dtype(jnp.float32)), booleans(b)))


@program("packets-of-light-roam-through-layers-of-skin-until-all-are-spent", GROUP)
def _packets(size: Size) -> Built:
    """This sends packets of light into layers of skin and tells what comes back, what gets through and where warmth stays.

    It is MCML (Wang, 1995; OMLC): steps are drawn, borders turn packets back or bend them by Fresnel, each hop leaves a share
    in a ring of its depth, turns follow Henyey and Greenstein, and weak packets are spun out.
    """
    packets, rings, deeps, most = pick(size, (1 << 18, 100, 200, 120), (4096, 50, 100, 50), (16, 5, 6, 8))
    thick = np.array([0.02, 0.08, 0.3], np.float32)
    tops = np.concatenate([[0.0], np.cumsum(thick)]).astype(np.float32)
    index = np.array([1.0, 1.45, 1.4, 1.44, 1.0], np.float32)
    lean = np.array([0.8, 0.85, 0.9], np.float32)
    ring, deep = 0.5 / rings, float(tops[-1]) / deeps

    def mirrored(n1, n2, cosine):
        """This is the share that a border turns back, and the cosine behind it."""
        sine = n1 / n2 * jnp.sqrt(jnp.maximum(1 - cosine**2, 0.0))
        behind = jnp.sqrt(jnp.maximum(1 - sine**2, 1e-12))
        s = (n1 * cosine - n2 * behind) / (n1 * cosine + n2 * behind)
        p = (n1 * behind - n2 * cosine) / (n1 * behind + n2 * cosine)
        return jnp.where(sine >= 1, 1.0, 0.5 * (s * s + p * p)), behind

    def run(absorbs, scatters, seed):
        """This follows all packets."""
        absorb, scatter = jnp.exp(0.3 * absorbs) * 5, jnp.exp(0.2 * scatters) * 80
        total = absorb + scatter
        key = jax.random.key(seed)
        straight = ((index[0] - index[1]) / (index[0] + index[1])) ** 2

        def hop(carry):
            """This is one step of all packets."""
            place, way, weight, layer, left, warm, back, through, k = carry
            u = jax.random.uniform(jax.random.fold_in(key, k), (5, packets), minval=1e-6)
            live = weight > 0
            left = jnp.where(left > 0, left, -jnp.log(u[0]))
            far = left / total[layer]
            border = jnp.where(way[2] > 0, jnp.asarray(tops)[layer + 1], jnp.asarray(tops)[layer])
            room = jnp.where(jnp.abs(way[2]) > 1e-6, (border - place[2]) / jnp.where(way[2] == 0, 1.0, way[2]), jnp.inf)
            room = jnp.maximum(room, 0.0)
            meets = live & (room < far)
            gone = jnp.where(meets, room, far)
            place = place + jnp.where(live, gone, 0.0) * way
            place = place.at[2].set(jnp.where(meets, border, place[2]))
            left = jnp.where(meets, left - gone * total[layer], 0.0)

            down = way[2] > 0
            n1, n2 = jnp.asarray(index)[layer + 1], jnp.asarray(index)[jnp.where(down, layer + 2, layer)]
            turned, behind = mirrored(n1, n2, jnp.abs(way[2]))
            pass_by = meets & (u[1] >= turned)
            bent = jnp.stack([way[0] * n1 / n2, way[1] * n1 / n2, jnp.sign(way[2]) * behind])
            way = jnp.where(pass_by, bent, jnp.where(meets, way * jnp.array([1.0, 1.0, -1.0])[:, None], way))
            after = jnp.where(pass_by, jnp.where(down, layer + 1, layer - 1), layer)
            outside = (after < 0) | (after > 2)
            far_out = jnp.minimum((jnp.sqrt(place[0] ** 2 + place[1] ** 2) / ring).astype(jnp.int32), rings - 1)
            back = back.at[far_out].add(jnp.where(outside & (after < 0), weight, 0.0))
            through = through.at[far_out].add(jnp.where(outside & (after > 2), weight, 0.0))
            weight = jnp.where(outside, 0.0, weight)
            layer = jnp.clip(after, 0, 2)

            stays = live & ~meets
            lost = jnp.where(stays, weight * absorb[layer] / total[layer], 0.0)
            at = jnp.clip((place[2] / deep).astype(jnp.int32), 0, deeps - 1)
            warm = warm.at[at, far_out].add(lost)
            weight = weight - lost
            g = jnp.asarray(lean)[layer]
            part = (1 - g * g) / (1 - g + 2 * g * u[2])
            cosine = jnp.clip((1 + g * g - part * part) / (2 * g), -1.0, 1.0)
            sine = jnp.sqrt(jnp.maximum(1 - cosine**2, 0.0))
            cos, sin = jnp.cos(2 * np.pi * u[3]), jnp.sin(2 * np.pi * u[3])
            x, y, z = way
            flat = jnp.sqrt(jnp.maximum(1 - z * z, 1e-12))
            spun = jnp.stack(
                [
                    sine * (x * z * cos - y * sin) / flat + x * cosine,
                    sine * (y * z * cos + x * sin) / flat + y * cosine,
                    -sine * cos * flat + z * cosine,
                ]
            )
            plain = jnp.stack([sine * cos, sine * sin, cosine * jnp.sign(z)])
            fresh = jnp.where(jnp.abs(z) > 0.99999, plain, spun)
            fresh = fresh * lax.rsqrt(jnp.sum(fresh * fresh, axis=0) + 1e-12)
            way = jnp.where(stays, fresh, way)
            weak = stays & (weight < 1e-2)
            weight = jnp.where(weak, jnp.where(u[4] < 0.1, weight * 10, 0.0), weight)
            return place, way, weight, layer, left, warm, back, through, k + 1

        place = jnp.zeros((3, packets))
        way = place.at[2].set(1.0)
        start = (place, way, jnp.full(packets, 1 - straight), jnp.zeros(packets, jnp.int32), jnp.zeros(packets))
        start += (jnp.zeros((deeps, rings)), jnp.zeros(rings), jnp.zeros(rings), jnp.int32(0))

        def on(carry):
            """This tells whether any packet is left."""
            return jnp.any(carry[2] > 0) & (carry[-1] < most)

        place, _, weight, layer, _, warm, back, through, k = lax.while_loop(on, hop, start)
        area = np.pi * ring * ring * (2 * np.arange(rings) + 1)
        told = jnp.stack([straight, *(jnp.sum(z) / packets for z in (back, through, warm, weight))])
        flow = (
            jnp.sum(warm, axis=1)
            / packets
            / deep
            / absorb[jnp.searchsorted(tops[1:-1], (np.arange(deeps) + 0.5) * deep)]
        )
        still = jnp.bincount(jnp.where(weight > 0, layer, 3), length=4)
        return warm / packets / (area * deep), back / packets / area, through / packets / area, told, flow, still, k

    return Built(run, (normal(3), normal(3), integers(below=1000)))
