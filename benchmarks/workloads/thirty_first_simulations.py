"""Ash in winds, lit triangles, robots in a maze and maps by laser, the thirty-first set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, integers, normal, pick, program

GROUP = "thirty-first"


@program("specks-of-ash-carried-by-gridded-winds-shaken-washed-out-and-settled", GROUP)
def _ash(size: Size) -> Built:
    """This program follows specks of ash from a volcano through winds of a weather model and tells where they come down.

    It is a particle model like FLEXPART (Stohl, 2005) and HYSPLIT: winds are found between the points of a grid in place and time,
    each speck has pushes of its own that fade, heavy ones fall fast, rain washes out, and masses are summed on maps.
    """
    specks, levels, high, wide, steps = pick(size, (300000, 23, 121, 240, 10), (6000, 12, 45, 90, 6), (20, 3, 5, 7, 2))
    dt, top, fades = 900.0, 12000.0, np.array([900.0, 900.0, 300.0], np.float32)
    degrees = 180.0 / high

    def found(winds, place, part):
        """This is the wind at places [specks, 3] in units of the grid, between two times."""
        low = jnp.floor(place).astype(jnp.int32)
        share = place - low
        total = 0.0
        for k in range(2):
            for j in range(2):
                for i in range(2):
                    way = jnp.array([k, j, i])
                    weight = jnp.prod(jnp.where(way == 1, share, 1 - share), axis=-1)
                    z, y = jnp.clip(low[:, 0] + k, 0, levels - 1), jnp.clip(low[:, 1] + j, 0, high - 1)
                    both = winds[:, z, y, (low[:, 2] + i) % wide]
                    total = total + weight[:, None] * ((1 - part) * both[0] + part * both[1])
        return total

    def run(winds, rain, start, vent, across, seed):
        """This carries all specks over all steps."""
        winds = winds * jnp.array([12.0, 6.0, 0.02])
        rain = jnp.maximum(rain - 0.8, 0.0)
        key = jax.random.key(seed)
        across = 1e-6 * jnp.exp(2.3 + 0.8 * across)
        falls = 2500 * 9.81 * across**2 / (18 * 1.8e-5)
        falls = falls / (1 + 0.15 * (2500 * falls * across / 1.8e-5 * 5e-4) ** 0.687)
        height = jnp.clip(200 + 2500 * jnp.abs(vent), 50.0, top - 50)
        place = jnp.stack([height, high * 0.55 + 1.5 * start[:, 0], wide * 0.3 + 1.5 * start[:, 1]], axis=-1)
        mass = across**3 / jnp.sum(across**3)
        drowned = jnp.zeros((high, wide))

        def cell(place):
            """This is the place of specks on the map."""
            y = jnp.clip(jnp.round(place[:, 1]).astype(jnp.int32), 0, high - 1)
            return y, jnp.round(place[:, 2]).astype(jnp.int32) % wide

        def step(carry, k):
            place, push, mass, aloft, settled, washed, first = carry
            unit = jnp.array([(levels - 1) / top, 1.0, 1.0])
            wind = found(winds, place * unit, k / steps)[:, ::-1]
            spread = jnp.where(place[:, :1] < 1500, jnp.array([0.6, 1.2, 1.2]), jnp.array([0.1, 0.8, 0.8]))
            kept = jnp.exp(-dt / fades[::-1])
            luck = jax.random.normal(jax.random.fold_in(key, k), (specks, 3))
            push = kept * push + spread * jnp.sqrt(1 - kept**2) * luck
            speed = wind + push
            latitude = jnp.deg2rad(90 - degrees * (place[:, 1] + 0.5))
            metres = 111195.0 * degrees
            rise = dt * (speed[:, 0] - falls)
            north = dt * speed[:, 1] / metres
            east = dt * speed[:, 2] / (metres * jnp.maximum(jnp.cos(latitude), 0.05))
            moved = place + jnp.stack([rise, -north, east], axis=-1)
            z = jnp.where(moved[:, 0] > top, 2 * top - moved[:, 0], moved[:, 0])
            y = jnp.clip(moved[:, 1], 0.0, high - 1.0)
            place = jnp.where(aloft[:, None], jnp.stack([z, y, moved[:, 2] % wide], axis=-1), place)
            down = aloft & (place[:, 0] <= 0)
            at = cell(place)
            rate = 8e-5 * rain[at] ** 0.8 * (place[:, 0] < 5000)
            lost = jnp.where(aloft & ~down, mass * -jnp.expm1(-rate * dt), 0.0)
            settled = settled.at[at].add(jnp.where(down, mass, 0.0))
            washed = washed.at[at].add(lost)
            mass = jnp.where(down, 0.0, mass - lost)
            aloft = aloft & ~down
            first = first.at[at].min(jnp.where(aloft, k, steps))
            centre = jnp.sum(mass[:, None] * place, axis=0) / (jnp.sum(mass) + 1e-12)
            return (place, push, mass, aloft, settled, washed, first), (jnp.mean(aloft), centre)

        ones = jnp.ones(specks, bool)
        carry = (place, jnp.zeros((specks, 3)), mass, ones, drowned, drowned, jnp.full((high, wide), steps))
        (place, _, mass, aloft, settled, washed, first), course = lax.scan(step, carry, jnp.arange(steps))
        layer = jnp.clip(place[:, 0] / top * levels, 0, levels - 1).astype(jnp.int32)
        cloud = jnp.zeros((levels, high, wide)).at[(layer, *cell(place))].add(jnp.where(aloft, mass, 0.0))
        flight = jnp.max(jnp.where(cloud > 1e-6, jnp.arange(levels)[:, None, None], -1), axis=0)
        return settled, washed, first, cloud, flight, course, jnp.sum(settled) + jnp.sum(washed) + jnp.sum(mass)

    inputs = (normal(2, levels, high, wide, 3), normal(high, wide), normal(specks, 2), normal(specks), normal(specks))
    return Built(run, (*inputs, integers(below=1000)))


@program("triangles-drawn-by-nearest-with-pictures-on-them-gloss-and-cast-shadows", GROUP)
def _triangles(size: Size) -> Built:
    """This program draws a scene of many triangles as seen by a camera, with textures, gloss and shadows.

    It is a rasteriser as in OpenGL (and ssloy/tinyrenderer): corners are projected, the nearest triangle of each point is kept,
    a second picture from the lamp tells shadows, and points are shaded, toned and made smaller.
    """
    things, rings, around, side, lamp, chunk, cloth = pick(
        size, (5, 12, 24, 320, 256, 24, 512), (3, 6, 12, 72, 48, 12, 128), (1, 2, 4, 8, 6, 4, 4)
    )
    corners_of = (rings + 1) * around
    own = np.arange(corners_of).reshape(rings + 1, around)
    a, b, c, d = own[:-1], np.roll(own, -1, 1)[:-1], own[1:], np.roll(own, -1, 1)[1:]
    faces = np.stack([np.stack([a, c, b], -1), np.stack([b, c, d], -1)]).reshape(-1, 3)
    faces = np.concatenate([faces + k * corners_of for k in range(things)])
    down, turn = np.pi * (np.arange(rings + 1) + 0.02) / (rings + 0.04), 2 * np.pi * np.arange(around) / around
    down, turn = np.meshgrid(down, turn, indexing="ij")
    ball = np.stack([np.sin(down) * np.cos(turn), np.cos(down), np.sin(down) * np.sin(turn)], -1).astype(np.float32)
    flat = np.stack([turn / (2 * np.pi) * 4, down / np.pi * 2], axis=-1).reshape(-1, 2).astype(np.float32)
    flat = np.tile(flat, (things, 1))

    def unit(x):
        return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-9)

    def looking(eye, at):
        """These are the right, the up and the forward of who looks from one place to another."""
        forward = unit(at - eye)
        right = unit(jnp.cross(forward, jnp.array([0.0, 1.0, 0.0])))
        return jnp.stack([right, jnp.cross(right, forward), forward])

    def shares(corner, x, y):
        """These are the shares of three corners [..., 3, 2] at points, which are all above nought inside."""
        (x0, y0), (x1, y1), (x2, y2) = ((corner[..., k, 0], corner[..., k, 1]) for k in range(3))
        area = (x1 - x0) * (y2 - y0) - (x2 - x0) * (y1 - y0)
        area = jnp.where(jnp.abs(area) < 1e-9, 1e-9, area)
        one = ((x1 - x) * (y2 - y) - (x2 - x) * (y1 - y)) / area
        two = ((x2 - x) * (y0 - y) - (x0 - x) * (y2 - y)) / area
        return jnp.stack([one, two, 1 - one - two], axis=-1)

    def drawn(flat, near, points):
        """This tells the nearest triangle at all points of a square picture, and how near it is."""
        at = 2 * (jnp.arange(points) + 0.5) / points - 1
        x, y = at[None, :], -at[:, None]

        def some(carry, now):
            best, which = carry
            number, corner, how_near = now
            share = shares(corner[:, None, None], x, y)
            inside = jnp.all(share >= 0, axis=-1)
            depth = jnp.where(inside, jnp.sum(share * how_near[:, None, None], axis=-1), -jnp.inf)
            first = jnp.argmax(depth, axis=0)
            top = jnp.max(depth, axis=0)
            return (jnp.maximum(best, top), jnp.where(top > best, number[first], which)), None

        start = (jnp.full((points, points), -1e9), jnp.full((points, points), -1, jnp.int32))
        every = jnp.arange(len(faces)).reshape(-1, chunk)
        parts = (every, flat[faces].reshape(-1, chunk, 3, 2), near[faces].reshape(-1, chunk, 3))
        return lax.scan(some, start, parts)[0]

    def textured(cloth_of, place):
        """This is the colour of a texture that repeats, between its points."""
        spot = place * cloth - 0.5
        low = jnp.floor(spot).astype(jnp.int32)
        share = spot - low
        i, j = jnp.array([0, 1, 0, 1]), jnp.array([0, 0, 1, 1])
        weight = jnp.abs(1 - i - share[..., :1]) * jnp.abs(1 - j - share[..., 1:])
        near = cloth_of[(low[..., 1:] + j) % cloth, (low[..., :1] + i) % cloth]
        return jnp.sum(weight[..., None] * near, axis=-2)

    def run(bumps, where, cloth_of, spin):
        """This draws one picture."""
        body = ball * (1 + 0.08 * bumps[..., None])
        points = (body + 1.3 * jnp.tanh(where)[:, None, None]).reshape(-1, 3)
        corner = points[faces]
        slant = jnp.cross(corner[:, 1] - corner[:, 0], corner[:, 2] - corner[:, 0])
        normals = unit(jnp.zeros_like(points).at[faces].add(slant[:, None]))

        eye = 7.0 * jnp.array([jnp.sin(spin), 0.35, jnp.cos(spin)])
        axes = looking(eye, jnp.zeros(3))
        view = (points - eye) @ axes.T
        near = 1 / view[:, 2]
        screen = 2.2 * view[:, :2] * near[:, None]
        sun = jnp.array([3.0, 6.0, 2.0])
        sun_axes = looking(sun, jnp.zeros(3))
        lit = (points - sun) @ sun_axes.T
        best, which = drawn(screen, near, side)
        shade, _ = drawn(lit[:, :2] / 3.5, -lit[:, 2], lamp)

        at = 2 * (jnp.arange(side) + 0.5) / side - 1
        own_face = jnp.asarray(faces)[jnp.maximum(which, 0)]
        share = shares(screen[own_face], at[None, :], -at[:, None]) * near[own_face]
        share = share / jnp.sum(share, axis=-1, keepdims=True)
        place, normal_of, spot = (
            jnp.einsum("hwk,hwkc->hwc", share, z[own_face]) for z in (points, normals, jnp.asarray(flat))
        )
        to_eye = unit(eye - place)
        normal_of = unit(normal_of)
        normal_of = jnp.where(jnp.sum(normal_of * to_eye, -1, keepdims=True) < 0, -normal_of, normal_of)
        to_sun = unit(sun)

        from_sun = (place - sun) @ sun_axes.T
        near_by = jnp.arange(9)
        column = jnp.round((from_sun[..., 0] / 3.5 + 1) / 2 * lamp - 0.5).astype(jnp.int32)[..., None] + near_by % 3 - 1
        row = jnp.round((1 - from_sun[..., 1] / 3.5) / 2 * lamp - 0.5).astype(jnp.int32)[..., None] + near_by // 3 - 1
        there = shade[jnp.clip(row, 0, lamp - 1), jnp.clip(column, 0, lamp - 1)]
        bright = jnp.mean(-from_sun[..., 2:] >= there - 0.06, axis=-1)
        diffuse = jnp.maximum(normal_of @ to_sun, 0.0) * bright
        gloss = jnp.maximum(jnp.sum(normal_of * unit(to_eye + to_sun), axis=-1), 0.0) ** 40 * bright
        colour = textured(jax.nn.sigmoid(cloth_of), spot)
        colour = colour * (0.15 + 1.1 * diffuse[..., None]) + 0.5 * gloss[..., None]
        sky = jnp.array([0.35, 0.5, 0.8]) * (0.7 + 0.3 * -at[:, None, None])
        colour = jnp.where(which[..., None] >= 0, colour, sky)
        colour = colour * (2.51 * colour + 0.03) / (colour * (2.43 * colour + 0.59) + 0.14)
        colour = jnp.mean(colour.reshape(side // 2, 2, side // 2, 2, 3), axis=(1, 3))
        picture = jnp.round(255 * jnp.clip(colour, 0.0, 1.0) ** (1 / 2.2)).astype(jnp.uint8)
        seen = jnp.zeros(len(faces), jnp.int32).at[jnp.maximum(which, 0)].add((which >= 0).astype(jnp.int32))
        return picture, jnp.where(which >= 0, 1 / best, 0.0), which, seen, jnp.mean(bright)

    inputs = (normal(things, rings + 1, around), normal(things, 3), normal(cloth, cloth, 3), normal())
    return Built(run, inputs)


@program("robots-in-a-maze-the-best-kept-for-each-place-where-they-end-rounds", GROUP)
def _maze(size: Size) -> Built:
    """This program breeds small brains of robots in a maze, and keeps the best brain for each place where a robot ends.

    It is MAP-Elites (Mouret, 2015; adaptive-intelligent-robotics/QDax) with children between parents (Vassiliades, 2018): robots
    feel walls along five rays, must not cross them, and spend as little as they can on turns.
    """
    batch, steps, rounds, across, n = pick(size, (2048, 60, 4, 40, 16), (160, 30, 3, 20, 8), (4, 5, 2, 3, 3))
    cells, rays = across * across, 5
    ends = [(0, 0, 1, 0), (1, 0, 1, 1), (1, 1, 0, 1), (0, 1, 0, 0), (0, 0.4, 0.45, 0.4), (0.3, 0.65, 1, 0.65)]
    walls = np.array([*ends, (0.65, 0.2, 0.65, 0.65), (0.3, 0.65, 0.3, 0.85)], np.float32)
    lean = np.linspace(-np.pi / 2, np.pi / 2, rays).astype(np.float32)
    shapes = [(rays + 3, n), (n,), (n, n), (n,), (n, 2), (2,)]
    cuts = np.cumsum([int(np.prod(s)) for s in shapes])
    genes = int(cuts[-1])

    def brain(gene, x):
        """This gives the push and the turn that a robot wishes."""
        w1, b1, w2, b2, w3, b3 = (g.reshape(s) for g, s in zip(jnp.split(gene, cuts[:-1]), shapes, strict=True))
        return jnp.tanh(jnp.tanh(jnp.tanh(x @ w1 + b1) @ w2 + b2) @ w3 + b3)

    def met(place, way):
        """This is how far all walls are along ways [..., 2], in lengths of the ways."""
        start, along = jnp.asarray(walls[:, :2]), jnp.asarray(walls[:, 2:] - walls[:, :2])
        way = way[..., None, :]
        cross = way[..., 0] * along[:, 1] - way[..., 1] * along[:, 0]
        cross = jnp.where(jnp.abs(cross) < 1e-9, 1e-9, cross)
        gap = start - place
        far = (gap[..., 0] * along[:, 1] - gap[..., 1] * along[:, 0]) / cross
        side = (gap[..., 0] * way[..., 1] - gap[..., 1] * way[..., 0]) / cross
        return jnp.where((far > 0) & (side >= 0) & (side <= 1), far, jnp.inf)

    def life(gene):
        """This is the worth of a brain and where its robot ends."""

        def step(carry, k):
            place, heading, spent, hits = carry
            angle = heading + lean
            seen = jnp.min(met(place, jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)), axis=-1)
            feels = jnp.concatenate([jnp.minimum(seen, 0.5) * 2, jnp.array([jnp.sin(heading), jnp.cos(heading)])])
            push, turn = brain(gene, jnp.append(feels, k / steps))
            heading = heading + 0.5 * turn
            way = 0.035 * (1 + push) * jnp.array([jnp.cos(heading), jnp.sin(heading)])
            blocked = jnp.any(met(place, way) < 1.2)
            place = jnp.where(blocked, place, place + way)
            return (place, heading, spent + turn**2, hits + blocked), place

        start = (jnp.array([0.1, 0.1]), jnp.float32(0.8), jnp.float32(0.0), jnp.int32(0))
        (place, _, spent, hits), trail = lax.scan(step, start, jnp.arange(steps))
        return -(spent + 0.5 * hits) / steps, place, jnp.sum(jnp.abs(jnp.diff(trail, axis=0)))

    def run(kept, worth, filled, seed):
        """This breeds for some rounds."""
        worth = jnp.where(filled, -jnp.abs(worth), -jnp.inf)

        def step(carry, key):
            kept, worth = carry
            one, two, three, four = jax.random.split(key, 4)
            chance = (worth > -jnp.inf) / jnp.sum(worth > -jnp.inf)
            mother, father = jax.random.choice(one, cells, (2, batch), p=chance)
            child = kept[mother] + 0.05 * jax.random.normal(two, (batch, genes))
            child = child + 0.2 * jax.random.normal(three, (batch, 1)) * (kept[father] - kept[mother])
            fresh = jax.random.uniform(four, (batch, 1)) < 0.05
            child = jnp.where(fresh, jnp.roll(child, 1, axis=1), child)
            value, place, walked = jax.vmap(life)(child)
            x, y = (jnp.clip(jnp.floor(place[:, k] * across).astype(jnp.int32), 0, across - 1) for k in range(2))
            cell = y * across + x
            best = jax.ops.segment_max(value, cell, cells)
            winner = jax.ops.segment_max(jnp.where(value == best[cell], jnp.arange(batch), -1), cell, cells)
            better = (best > worth) & (winner >= 0)
            kept = jnp.where(better[:, None], child[jnp.maximum(winner, 0)], kept)
            worth = jnp.where(better, best, worth)
            live = worth > -jnp.inf
            told = (jnp.sum(live), jnp.sum(jnp.where(live, worth + 2, 0.0)), jnp.max(value), jnp.sum(better), walked)
            return (kept, worth), told

        (kept, worth), told = lax.scan(step, (kept, worth), jax.random.split(jax.random.key(seed), rounds))
        return kept, jnp.maximum(worth, -9.0), told, jnp.argmax(worth)

    return Built(run, (normal(cells, genes, scale=0.7), normal(cells), booleans(cells), integers(below=1000)))


@program("laser-scans-fitted-to-a-map-in-all-near-poses-then-drawn-into-it-scan", GROUP)
def _laser(size: Size) -> Built:
    """This program lets robots with lasers find where they are and draw a map of rooms at the same time.

    It is scan matching by trial of all near poses (Olson, 2009; as in ROS's slam_toolbox and Cartographer's local part): the pose
    guessed from wheels is moved and turned a little in all ways, the best fit is refined, and beams free or fill cells of the map.
    """
    robots, scans, beams, side, turns, moves, probes = pick(
        size, (12, 8, 360, 300, 15, 11, 60), (2, 5, 120, 100, 9, 7, 30), (1, 2, 5, 12, 3, 3, 4)
    )
    cell, reach = 0.05, 0.4 * side * 0.05
    angles = np.linspace(-np.pi, np.pi, beams, endpoint=False).astype(np.float32)
    bell = np.exp(-0.5 * (np.arange(-2, 3) / 1.0) ** 2)
    bell = (np.outer(bell, bell) / np.sum(bell) ** 2).astype(np.float32)
    turn_of = np.deg2rad(np.linspace(-6, 6, turns)).astype(np.float32)
    move_of = (cell * np.arange(-(moves // 2), moves // 2 + 1)).astype(np.float32)

    def cells(points):
        """These are the cells of points [..., 2] in metres."""
        spot = jnp.floor(points / cell).astype(jnp.int32) + side // 2
        inside = jnp.all((spot >= 0) & (spot < side), axis=-1)
        return jnp.clip(spot, 0, side - 1), inside

    def seen_from(pose, length):
        """These are the ends of beams for a pose [x, y, heading]."""
        angle = pose[2] + jnp.asarray(angles)
        return pose[:2] + length[:, None] * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)

    def fitted(chart, guess, length, real):
        """This tries all near poses and refines the best."""
        likely = jax.nn.sigmoid(chart)
        how = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        likely = lax.conv_general_dilated(likely[None, ..., None], bell[..., None, None], (1, 1), "SAME", **how)[
            0, ..., 0
        ]

        def turned(turn):
            """This is the fit of all moves for one turn [moves, moves]."""
            ends = seen_from(guess.at[2].add(turn), length)
            x, y = move_of[:, None, None], move_of[:, None]
            spot, inside = cells(ends + jnp.stack(jnp.broadcast_arrays(x, y), axis=-1))
            value = jnp.log(likely[spot[..., 0], spot[..., 1]] + 0.05)
            return jnp.sum(jnp.where(inside & real, value, -1.5), axis=-1)

        fit = lax.map(turned, jnp.asarray(turn_of)) / jnp.maximum(jnp.sum(real), 1) * 30
        far = (move_of[:, None] ** 2 + move_of**2) / 0.15**2 + (turn_of[:, None, None] / 0.07) ** 2
        fit = fit - 0.5 * far
        share = jax.nn.softmax(fit.reshape(-1)).reshape(fit.shape)
        shift = jnp.stack(
            [
                jnp.sum(share * move_of[:, None]),
                jnp.sum(share * move_of),
                jnp.sum(share * turn_of[:, None, None]),
            ]
        )
        top = jnp.unravel_index(jnp.argmax(fit), fit.shape)
        hard = jnp.stack([jnp.asarray(move_of)[top[1]], jnp.asarray(move_of)[top[2]], jnp.asarray(turn_of)[top[0]]])
        sure = -jnp.sum(share * jnp.log(share + 1e-12))
        return guess + jnp.where(sure < 3.0, shift, hard), jnp.max(fit), sure

    def drawn_in(chart, pose, length, real):
        """This frees cells along beams and fills cells at their ends."""
        along = (jnp.arange(probes) + 0.5) / probes
        ends = seen_from(pose, length)
        ways = pose[:2] + (ends - pose[:2])[:, None] * along[:, None]
        spot, inside = cells(ways)
        before = (length[:, None] * (1 - along) > cell) & inside
        freed = jnp.zeros((side, side), bool).at[spot[..., 0], spot[..., 1]].max(before)
        spot, inside = cells(ends)
        hit = jnp.zeros((side, side), bool).at[spot[:, 0], spot[:, 1]].max(inside & real)
        return jnp.clip(chart + jnp.where(hit, 0.85, jnp.where(freed, -0.4, 0.0)), -4.0, 4.0)

    def one(chart, pose, step_of, length):
        """This is the way of one robot."""

        def step(carry, now):
            chart, pose, doubt = carry
            (ahead, aside, turn), length = now
            real = length < reach
            length = jnp.minimum(length, reach)
            cos, sin = jnp.cos(pose[2]), jnp.sin(pose[2])
            guess = pose + jnp.stack([cos * ahead - sin * aside, sin * ahead + cos * aside, turn])
            fresh, fit, sure = fitted(chart, guess, length, real)
            fresh = fresh.at[2].set(jnp.mod(fresh[2] + jnp.pi, 2 * jnp.pi) - jnp.pi)
            chart = drawn_in(chart, fresh, length, real)
            return (chart, fresh, 0.9 * doubt + sure), (fresh, fit, fresh - guess)

        (chart, pose, doubt), course = lax.scan(step, (chart, pose, jnp.float32(0.0)), (step_of, length))
        known = jnp.abs(chart) > 0.3
        edge = known & (chart < 0) & (lax.reduce_window(known, True, jnp.logical_and, (3, 3), (1, 1), "SAME") == 0)
        return chart, pose, doubt, course, jnp.sum(known) * cell**2, jnp.sum(edge)

    def run(chart, pose, wheels, rooms, noise):
        """This is all robots, in rooms that are drawn."""
        wave = jnp.stack([jnp.cos(k * jnp.asarray(angles)) for k in range(6)])
        length = reach * (0.6 + 0.12 * jnp.einsum("rk,kb->rb", rooms, wave))
        length = jnp.clip(length[:, None] + 0.02 * noise, 0.1, 1.2 * reach)
        step_of = wheels * jnp.array([0.05, 0.01, 0.02]) + jnp.array([0.05, 0.0, 0.0])
        return jax.vmap(one)(0.2 * chart, pose * jnp.array([0.3, 0.3, 1.0]), step_of, length)

    inputs = (normal(robots, side, side), normal(robots, 3), normal(robots, scans, 3), normal(robots, 6))
    return Built(run, (*inputs, normal(robots, scans, beams)))
