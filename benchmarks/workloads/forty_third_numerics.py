"""A robot that maps posts, rain that sinks through soils and planets kicked on their orbits: their author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program

GROUP = "forty-third"


@program("fast-slam-guessed-walks-each-with-own-filters-of-posts-redrawn-when-few-count-scan", GROUP)
def _posts(size: Size) -> Built:
    """This program finds where a robot is and where posts stand from noisy lengths and angles, by many guessed walks.

    It is FastSLAM (Montemerlo, 2002; as in AtsushiSakai/PythonRobotics): each guessed walk keeps one small Kalman filter for each
    post, weights come from how well seen posts fit, and walks are drawn anew when few of them count.
    """
    worlds, walks, posts, seen, times = pick(size, (8, 512, 64, 6, 60), (4, 100, 24, 4, 50), (2, 5, 4, 2, 3))
    reach, step = 7.0, 0.5
    noise = np.array([0.25, 0.03], np.float32)
    steer = np.array([0.15, 0.03], np.float32)
    spread = jnp.asarray(np.diag(noise**2))

    def turned(angle):
        """This brings angles between minus and plus half a turn."""
        return jnp.mod(angle + jnp.pi, 2 * jnp.pi) - jnp.pi

    def driven(pose, order):
        """This moves poses [..., 3] by speeds and turns [..., 2]."""
        x, y, way = jnp.moveaxis(pose, -1, 0)
        speed, bend = order[..., 0], order[..., 1]
        return jnp.stack(
            [x + step * speed * jnp.cos(way), y + step * speed * jnp.sin(way), turned(way + step * bend)], -1
        )

    def measured(pose, spot):
        """This gives lengths and angles from poses to spots, and the gaps."""
        gap = spot - pose[..., :2]
        long = jnp.sqrt(jnp.sum(gap**2, axis=-1) + 1e-6)
        return jnp.stack([long, turned(jnp.arctan2(gap[..., 1], gap[..., 0]) - pose[..., 2])], axis=-1), gap, long

    def one_world(spots, wander, errors, slips, key):
        """This is one robot in one world."""
        spots = 12.0 * jnp.tanh(spots)
        row = jnp.arange(walks)[:, None]

        def moment(carry, each):
            """This moves the robot and all guessed walks, and looks around."""
            real, lost, pose, mean, cov, known, weight = carry
            order, error, slip, key = each
            one, two = jax.random.split(key)
            order = jnp.stack([1.5 + 0.3 * order[0], 0.25 + 0.3 * order[1]])
            real, lost = driven(real, order), driven(lost, order + steer * slip)
            pose = driven(pose, order + steer * slip + 1.2 * steer * jax.random.normal(one, (walks, 2)))
            look, _, _ = measured(real, spots)
            near, which = lax.top_k(-look[:, 0], seen)
            there = -near < reach
            look = look[which] + noise * error
            mine, small = mean[:, which], cov[:, which]
            old = known[:, which]
            told, gap, long = measured(pose[:, None], mine)
            slope = jnp.stack(
                [gap / long[..., None], jnp.stack([-gap[..., 1], gap[..., 0]], -1) / long[..., None] ** 2], axis=-2
            )
            wide = jnp.einsum("wsij,wsjk,wslk->wsil", slope, small, slope) + spread
            det = wide[..., 0, 0] * wide[..., 1, 1] - wide[..., 0, 1] * wide[..., 1, 0]
            flip = jnp.stack([wide[..., 1, 1], -wide[..., 0, 1], -wide[..., 1, 0], wide[..., 0, 0]], -1).reshape(
                wide.shape
            )
            back = flip / det[..., None, None]
            off = look - told
            off = off.at[..., 1].set(turned(off[..., 1]))
            gain = jnp.einsum("wsij,wskj,wskl->wsil", small, slope, back)
            better = mine + jnp.einsum("wsij,wsj->wsi", gain, off)
            tighter = small - jnp.einsum("wsij,wsjk,wskl->wsil", gain, slope, small)
            way = pose[:, 2:] + look[:, 1]
            fresh = pose[:, None, :2] + look[:, :1] * jnp.stack([jnp.cos(way), jnp.sin(way)], axis=-1)
            begin = jnp.broadcast_to(jnp.eye(2) * 0.5, small.shape)
            use = there & old
            mine = jnp.where(there[:, None], jnp.where(old[..., None], better, fresh), mine)
            small = jnp.where(there[:, None, None], jnp.where(old[..., None, None], tighter, begin), small)
            mean, cov, known = (
                mean.at[:, which].set(mine),
                cov.at[:, which].set(small),
                known.at[:, which].set(old | there),
            )
            fit = -0.5 * (jnp.einsum("wsi,wsij,wsj->ws", off, back, off) + jnp.log(det))
            weight = jax.nn.log_softmax(weight + jnp.sum(jnp.where(use, fit, 0.0), axis=1))
            count = 1 / jnp.sum(jnp.exp(2 * weight))
            share = jnp.exp(weight)
            guess = share @ pose[:, :2]
            chosen = jnp.searchsorted(jnp.cumsum(share), (jnp.arange(walks) + jax.random.uniform(two)) / walks)
            again = count < walks / 2
            chosen = jnp.where(again, jnp.minimum(chosen, walks - 1), row[:, 0])
            pose, mean, cov, known = (z[chosen] for z in (pose, mean, cov, known))
            weight = jnp.where(again, jnp.full(walks, -jnp.log(float(walks))), weight)
            away = jnp.stack([jnp.linalg.norm(guess - real[:2]), jnp.linalg.norm(lost[:2] - real[:2])])
            return (real, lost, pose, mean, cov, known, weight), (real, guess, away, count, again, jnp.sum(there))

        home = jnp.asarray([0.0, -6.0, 0.0])
        begin = home, home, jnp.broadcast_to(home, (walks, 3)), jnp.zeros((walks, posts, 2))
        begin += jnp.broadcast_to(jnp.eye(2), (walks, posts, 2, 2)), jnp.zeros((walks, posts), bool)
        begin += (jnp.full(walks, -jnp.log(float(walks))),)
        last, told = lax.scan(moment, begin, (wander, errors, slips, jax.random.split(key, times)))
        share, mean, known = jnp.exp(last[6]), last[3], last[5]
        sure = share @ known
        place = jnp.einsum("w,wp,wpi->pi", share, known.astype(jnp.float32), mean) / jnp.maximum(sure, 1e-6)[:, None]
        wrong = jnp.linalg.norm(place - spots, axis=1) * (sure > 0.5)
        width = jnp.einsum("w,wp,wpii->p", share, known.astype(jnp.float32), last[4])
        return told, place, wrong, jnp.sqrt(width), sure > 0.5

    def run(spots, wander, errors, slips, seed):
        """This gives walks and guesses, how far off they are, how many count, and posts with errors and widths."""
        return jax.vmap(one_world)(spots, wander, errors, slips, jax.random.split(jax.random.key(seed), worlds))

    inputs = (
        normal(worlds, posts, 2),
        normal(worlds, times, 2),
        normal(worlds, times, seen, 2),
        normal(worlds, times, 2),
    )
    return Built(run, (*inputs, integers(below=1000)))


@program("rain-sinks-through-layered-soils-by-picard-rounds-on-three-diagonals-roots-drink-richards-while", GROUP)
def _soils(size: Size) -> Built:
    """This program follows rain down into many columns of soil, where roots drink and water leaves below.

    It is the equation of Richards with curves of van Genuchten, solved as by Celia (1990) and in HYDRUS: each moment repeats linear
    systems of three diagonals until the pressure of all columns rests, and what cannot enter runs off.
    """
    columns, cells, times, most = pick(size, (2048, 100, 12, 12), (128, 60, 24, 12), (3, 6, 3, 4))
    brief, thick, residual, full = 0.05, 2.0, 0.06, 0.43
    depth = (np.arange(cells, dtype=np.float32) + 0.5) * thick
    root = np.exp(-depth / 25)
    root = jnp.asarray(root / root.sum() / thick)

    def run(coarse, layer, wet, storm, thirst):
        """This gives contents and pressures at the end, flows by time, rounds, errors of balance, and times of wet fronts."""
        kind = coarse[:, :1] + jnp.where(jnp.asarray(depth) > 40, layer[:, None], 0.0)
        alpha = 0.02 * jnp.exp(0.5 * jnp.tanh(kind))
        power = 1.6 + 0.3 * jnp.tanh(kind)
        rate = 1.5 * jnp.exp(jnp.tanh(kind) + 0.2 * jnp.tanh(coarse[:, 1:]))
        m = 1 - 1 / power

        def curves(head):
            """These are contents, their slopes and how well soil conducts."""
            push = alpha * jnp.maximum(-head, 1e-3)
            lift = push**power
            part = (1 + lift) ** -m
            slope = (full - residual) * m * power * alpha * push ** (power - 1) * (1 + lift) ** (-m - 1)
            inner = 1 - (1 - jnp.minimum(part ** (1 / m), 1 - 1e-6)) ** m
            dry = head < 0
            content = jnp.where(dry, residual + (full - residual) * part, full)
            conduct = rate * jnp.where(dry, jnp.sqrt(part) * inner**2, 1.0)
            return content, jnp.where(dry, slope, 0.0) + 1e-5, conduct

        def moment(head, each):
            """This is a twentieth of an hour."""
            rain, ask = each
            old, _, _ = curves(head)
            ok = jnp.clip((head + 8000) / 7500, 0.0, 1.0) * jnp.clip(-head / 10, 0.0, 1.0)
            drink = ask[:, None] * root * ok

            def flows(head, conduct):
                """These are what enters above and how well borders of cells conduct."""
                border = (conduct[:, 1:] + conduct[:, :-1]) / 2
                room = (rate[:, 0] + conduct[:, 0]) / 2 * (1 - 2 * head[:, 0] / thick)
                return jnp.minimum(rain, jnp.maximum(room, 0.0)), border

            def going(carry):
                """This asks whether any pressure still moves."""
                return (carry[1] > 0.5) & (carry[2] < most)

            def once(carry):
                """This solves one linear system for all columns."""
                head, _, count = carry
                content, slope, conduct = curves(head)
                enter, border = flows(head, conduct)
                between = border / thick**2
                up, down = jnp.pad(between, ((0, 0), (1, 0))), jnp.pad(between, ((0, 0), (0, 1)))
                fall = jnp.concatenate([enter[:, None], border, conduct[:, -1:]], axis=1)
                right = (slope * head - (content - old)) / brief + (fall[:, :-1] - fall[:, 1:]) / thick - drink
                fresh = lax.linalg.tridiagonal_solve(-up, slope / brief + up + down, -down, right[..., None])[..., 0]
                fresh = jnp.clip(fresh, -1e4, 50.0)
                fresh = head + jnp.where(count < 4, 1.0, 0.5) * jnp.clip(fresh - head, -200.0, 200.0)
                return fresh, jnp.max(jnp.abs(fresh - head) / (1 + 0.01 * jnp.abs(head))), count + 1

            fresh, rest, count = lax.while_loop(going, once, (head, jnp.float32(1e9), jnp.int32(0)))
            content, _, conduct = curves(fresh)
            enter, _ = flows(fresh, conduct)
            gain = jnp.sum(content - old, axis=1) * thick / brief
            used, leave = jnp.sum(drink, axis=1) * thick, conduct[:, -1]
            error = gain - (enter - used - leave)
            front = jnp.max(jnp.where(content - old > 5e-4, jnp.asarray(depth), 0.0), axis=1)
            return fresh, (enter, rain - enter, used, leave, error, front, count, rest)

        moist = 0.35 + 0.4 * jax.nn.sigmoid(wet)[:, None]
        head = -((moist ** (-1 / m) - 1) ** (1 / power)) / alpha
        time = 8 + brief * jnp.arange(times)
        rain = jnp.repeat(jnp.where(storm > 0.4, 0.6 * storm**2, 0.0).T, 4, axis=0)[:times]
        ask = 0.05 * jnp.exp(0.3 * thirst) * jnp.maximum(jnp.sin(2 * jnp.pi * (time[:, None] - 6) / 24), 0.0)
        head, told = lax.scan(moment, head, (rain, ask))
        content, _, _ = curves(head)
        totals = brief * jnp.stack([jnp.sum(z, axis=0) for z in told[:5]])
        return content, head, told, totals, jnp.sum(content, axis=1) * thick

    inputs = normal(columns, 2), normal(columns), normal(columns), normal(columns, -(-times // 4)), normal(columns)
    return Built(run, inputs)


@program("wisdom-holman-planets-kicked-between-exact-orbits-with-twins-that-part-and-many-systems-fori", GROUP)
def _planets(size: Size) -> Built:
    """This program follows many systems of planets, with a twin of each that starts a hair away, to tell calm from wild ones.

    It is the map of Wisdom and Holman (1991; as in REBOUND's WHFast) in democratic coordinates: kicks of planets on each other, a
    jump by the star, and exact orbits by Newton steps for Kepler's equation; twins are brought near again and growth is summed.
    """
    systems, planets, outer, inner, newton = pick(size, (8192, 5, 15, 20, 5), (256, 5, 16, 20, 5), (2, 3, 2, 2, 3))
    step, soft, apart = 0.08, 1e-4, 1e-3

    def orbit(place, speed):
        """This moves planets along their orbits around the star for one step."""
        long = jnp.sqrt(jnp.sum(place**2, axis=-1))
        size_ = 1 / jnp.maximum(2 / long - jnp.sum(speed**2, axis=-1), 0.02)
        rate = size_**-1.5
        cosine = 1 - long / size_
        sine = jnp.sum(place * speed, axis=-1) / jnp.sqrt(size_)

        def nearer(_, x):
            """This is one step of Newton."""
            wrong = x - cosine * jnp.sin(x) + sine * (1 - jnp.cos(x)) - rate * step
            return x - wrong / jnp.maximum(1 - cosine * jnp.cos(x) + sine * jnp.sin(x), 0.05)

        x = lax.fori_loop(0, newton, nearer, rate * step)
        less, turn = 2 * jnp.sin(x / 2) ** 2, jnp.sin(x)
        after = size_ * (1 - cosine * jnp.cos(x) + sine * turn)
        f, g = 1 - size_ / long * less, step + (turn - x) / rate
        df, dg = -jnp.sqrt(size_) * turn / (long * after), 1 - size_ / after * less
        f, g, df, dg = (z[..., None] for z in (f, g, df, dg))
        return f * place + g * speed, df * place + dg * speed

    def gaps(place):
        """These are gaps between all planets, and their lengths."""
        gap = place[..., None, :, :] - place[..., :, None, :]
        return gap, jnp.sqrt(jnp.sum(gap**2, axis=-1) + soft**2)

    def kicked(place, speed, mass):
        """This changes speeds by the pull of all other planets, for one step."""
        gap, long = gaps(place)
        pull = jnp.where(jnp.eye(planets, dtype=bool), 0.0, mass[..., None, :] / long**3)
        return speed + step * jnp.einsum("...ij,...ijk->...ik", pull, gap)

    def jumped(place, speed, mass):
        """This moves places by the speed of the star, for half a step."""
        return place + step / 2 * jnp.sum(mass[..., None] * speed, axis=-2, keepdims=True)

    def energy(place, speed, mass):
        """This is the whole energy."""
        _, long = gaps(place)
        pairs = jnp.where(jnp.eye(planets, dtype=bool), 0.0, mass[..., None] * mass[..., None, :] / long)
        alone = jnp.sum(mass * (jnp.sum(speed**2, axis=-1) / 2 - 1 / jnp.linalg.norm(place, axis=-1)), axis=-1)
        return alone - jnp.sum(pairs, axis=(-1, -2)) / 2 + jnp.sum(jnp.sum(mass[..., None] * speed, -2) ** 2, -1) / 2

    def run(start, tilt, heavy, spacing, nudge):
        """This gives places, energies by time, growth of twins, shapes of orbits, nearest meetings, and calm systems."""
        mass = 3e-5 * jnp.exp(0.7 * heavy)
        far = jnp.exp(jnp.cumsum(0.22 + 0.08 * jnp.tanh(spacing), axis=1) - 0.22)
        angle = 2 * jnp.pi * jax.nn.sigmoid(1.7 * start[..., 0])
        place = jnp.stack([jnp.cos(angle), jnp.sin(angle), 0.01 * tilt[..., 0]], -1) * far[..., None]
        speed = jnp.stack([-jnp.sin(angle), jnp.cos(angle), 0.01 * tilt[..., 1]], -1) * far[..., None] ** -0.5
        speed = speed * (1 + 0.02 * jnp.tanh(start[..., 1:]))
        way = nudge / jnp.sqrt(jnp.sum(nudge**2, axis=(1, 2), keepdims=True))
        place, speed = jnp.stack([place, place + apart * way]), jnp.stack([speed, speed])
        begin = energy(place[0], speed[0], mass)

        def block(carry, _):
            """These are some steps, after which twins are brought near again."""

            def once(_, carry):
                """This is one step: half a jump, an orbit, half a jump and a kick."""
                place, speed, near = carry
                place = jumped(place, speed, mass)
                place, speed = orbit(place, speed)
                place = jumped(place, speed, mass)
                speed = kicked(place, speed, mass)
                _, long = gaps(place[0])
                return place, speed, jnp.minimum(near, jnp.min(long + 9.0 * jnp.eye(planets), axis=(1, 2)))

            place, speed, near = lax.fori_loop(0, inner, once, carry)
            off = place[1] - place[0], speed[1] - speed[0]
            long = jnp.sqrt(sum(jnp.sum(z**2, axis=(1, 2)) for z in off))
            back = (apart / jnp.maximum(long, 1e-9))[:, None, None]
            place, speed = (jnp.stack([z[0], z[0] + d * back]) for z, d in zip((place, speed), off, strict=True))
            wrong = energy(place[0], speed[0], mass) / begin - 1
            return (place, speed, near), (wrong, jnp.log(long / apart), place[0, :, :, :2])

        (place, speed, near), (wrong, growth, path) = lax.scan(
            block, (place, speed, jnp.full(systems, 9.0)), None, length=outer
        )
        rate = jnp.cumsum(growth, axis=0) / (step * inner * jnp.arange(1, outer + 1)[:, None])
        place, speed = place[0], speed[0]
        turn = jnp.cross(place, speed)
        long = jnp.linalg.norm(place, axis=-1)
        size_ = 1 / (2 / long - jnp.sum(speed**2, axis=-1))
        shape = jnp.cross(speed, turn) - place / long[..., None]
        lean = jnp.arccos(jnp.clip(turn[..., 2] / jnp.linalg.norm(turn, axis=-1), -1.0, 1.0))
        orbits = jnp.stack([size_, jnp.linalg.norm(shape, axis=-1), lean], axis=-1)
        calm = (rate[-1] < 0.2) & (near > 3 * far[:, 0] * (jnp.max(mass, axis=1) / 3) ** (1 / 3))
        return path, wrong, rate, orbits, near, calm, place

    inputs = (
        normal(systems, planets, 2),
        normal(systems, planets, 2),
        normal(systems, planets),
        normal(systems, planets),
    )
    return Built(run, (*inputs, normal(systems, planets, 3)))
