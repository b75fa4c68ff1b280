"""Linear programs by restarted steps, bodies that know which way is up, sheets of neurons that learn: their author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program

GROUP = "forty-fourth"


@program("many-linear-programs-by-averaged-primal-and-dual-steps-restarted-when-gaps-shrink-while", GROUP)
def _programs(size: Size) -> Built:
    """This program solves many linear programs with bounds at once by steps that need nothing but products with the matrix.

    It is PDLP (Applegate, 2021; google/or-tools, MIT-Lu-Lab/MPAX): rows and columns are balanced, the length of steps comes from
    powers of the matrix, averages or last points start again when errors have fallen, and weights of both sides are adapted.
    """
    many, rows, columns, inner, outer, balance, tolerance = pick(
        size, (24, 256, 512, 40, 14, 8, 1e-3), (8, 48, 96, 40, 20, 8, 1e-3), (2, 4, 6, 8, 12, 3, 1e-3)
    )

    def norm(x):
        """This is the length of each row of x."""
        return jnp.sqrt(jnp.sum(x**2, axis=-1))

    def run(matrix, density, price, inside, slack, width):
        """This gives points, prices of rows, values of both sides, errors, which are solved, rounds, weights and active rows."""
        matrix = jnp.where(density < 4, matrix, 0.0) * jnp.exp(0.3 * price[:, None])
        upper = 0.5 + jnp.abs(width)
        start = upper * jax.nn.sigmoid(inside)
        least = jnp.einsum("pij,pj->pi", matrix, start) - jnp.maximum(slack, 0.0)
        wants = jnp.einsum("pij,pi->pj", matrix, jnp.maximum(-slack, 0.0)) + 0.3 * price

        def balanced(_, carry):
            """This divides rows and columns by roots of their largest numbers."""
            left, right = carry
            now = jnp.abs(left[..., None] * matrix * right[:, None])
            high, wide = jnp.max(now, axis=2), jnp.max(now, axis=1)
            left = left * lax.rsqrt(jnp.where(high > 0, high, 1.0))
            return left, right * lax.rsqrt(jnp.where(wide > 0, wide, 1.0))

        left, right = lax.fori_loop(0, balance, balanced, (jnp.ones((many, rows)), jnp.ones((many, columns))))
        small = left[..., None] * matrix * right[:, None]
        b, c, top = left * least, right * wants, upper / right

        def forward(x):
            """This multiplies by the matrix."""
            return jnp.einsum("pij,pj->pi", small, x)

        def back(y):
            """This multiplies by the matrix from the other side."""
            return jnp.einsum("pij,pi->pj", small, y)

        def power(_, x):
            """This is one step towards the largest singular vector."""
            x = back(forward(x))
            return x / norm(x)[:, None]

        way = lax.fori_loop(0, 12, power, 1.0 + 0.1 * jnp.tanh(inside))
        length = 0.95 / norm(forward(way))

        def errors(x, y):
            """These are how far rows are broken, how far prices are wrong, and the gap, all relative."""
            broken = norm(jnp.maximum(b - forward(x), 0.0)) / (1 + norm(b))
            reduced = c - back(y)
            low = jnp.sum(b * y, axis=1) + jnp.sum(jnp.minimum(reduced, 0.0) * top, axis=1)
            high = jnp.sum(c * x, axis=1)
            gap = jnp.abs(high - low) / (1 + jnp.abs(high) + jnp.abs(low))
            return jnp.sqrt(broken**2 + gap**2), jnp.stack([broken, gap, high, low])

        def going(carry):
            """This asks whether any program is still unsolved."""
            return (carry[5] < outer) & jnp.any(carry[4] > tolerance)

        def once(carry):
            """These are some steps, and a new start from the better of the average and the last point."""
            x, y, begin, weight, error, count = carry
            one, two = length / weight, length * weight

            def step(_, carry):
                """This is a step of both sides."""
                x, y, sum_x, sum_y = carry
                fresh = jnp.clip(x - one[:, None] * (c - back(y)), 0.0, top)
                y = jnp.maximum(y + two[:, None] * (b - forward(2 * fresh - x)), 0.0)
                return fresh, y, sum_x + fresh, sum_y + y

            last_x, last_y, sum_x, sum_y = lax.fori_loop(0, inner, step, (x, y, jnp.zeros_like(x), jnp.zeros_like(y)))
            mean_x, mean_y = sum_x / inner, sum_y / inner
            last, mean = errors(last_x, last_y)[0], errors(mean_x, mean_y)[0]
            better = (mean < last)[:, None]
            fresh_x, fresh_y = jnp.where(better, mean_x, last_x), jnp.where(better, mean_y, last_y)
            fresh = jnp.minimum(mean, last)
            done = (error <= tolerance)[:, None]
            fresh_x, fresh_y = jnp.where(done, x, fresh_x), jnp.where(done, y, fresh_y)
            fresh = jnp.where(done[:, 0], error, fresh)
            again = fresh < 0.6 * error
            far = norm(fresh_x - begin[0]), norm(fresh_y - begin[1])
            moved = (far[0] > 1e-6) & (far[1] > 1e-6) & again
            ratio = jnp.log(jnp.maximum(far[1], 1e-6) / jnp.maximum(far[0], 1e-6))
            weight = jnp.where(moved, jnp.exp(0.5 * ratio + 0.5 * jnp.log(weight)), weight)
            begin = tuple(jnp.where(again[:, None], z, w) for z, w in zip((fresh_x, fresh_y), begin, strict=True))
            return fresh_x, fresh_y, begin, jnp.clip(weight, 1e-3, 1e3), fresh, count + 1

        x, y = 0.5 * top, jnp.zeros((many, rows))
        weight = norm(c) / jnp.maximum(norm(b), 1e-3)
        carry = x, y, (x, y), weight, jnp.full(many, 1e9), jnp.int32(0)
        x, y, _, weight, error, count = lax.while_loop(going, once, carry)
        parts = errors(x, y)[1]
        active = jnp.sum(y > 1e-4, axis=1), jnp.sum((x > 1e-5) & (x < top - 1e-5), axis=1)
        return right * x, left * y, parts, error, error <= tolerance, count, weight, active

    inputs = normal(many, rows, columns, scale=columns**-0.5), integers(many, rows, columns, below=10)
    inputs += normal(many, columns), normal(many, columns), normal(many, rows), normal(many, columns)
    return Built(run, inputs)


@program(
    "flying-bodies-know-which-way-is-up-by-turning-rates-pulls-and-north-with-errors-of-turns-filtered-scan", GROUP
)
def _upright(size: Size) -> Built:
    """This program finds how bodies are turned and how wrong their turning sensors are, from three sensors with noise.

    It is the multiplicative extended Kalman filter (Lefferts, 1982; as in PX4 and mbloesch/rovio): turns are unit quaternions, the
    errors are three small angles and three drifts, pulls are left out while bodies speed up, and north is asked now and then.
    """
    bodies, times, every = pick(size, (8192, 64, 4), (96, 48, 4), (3, 5, 2))
    step, gyro, drift, pull, north = 0.01, 0.02, 0.004, 0.05, 0.06
    up = np.array([0.0, 0.0, 1.0], np.float32)
    field = np.array([0.6, 0.0, -0.8], np.float32)

    def times_(one, two):
        """This multiplies quaternions [..., 4] whose first part is real."""
        a, u = one[..., :1], one[..., 1:]
        b, v = two[..., :1], two[..., 1:]
        real = a * b - jnp.sum(u * v, axis=-1, keepdims=True)
        return jnp.concatenate([real, a * v + b * u + jnp.cross(u, v)], axis=-1)

    def turn_of(angle):
        """This is the quaternion of a turn by a vector [..., 3]."""
        long = jnp.sqrt(jnp.sum(angle**2, axis=-1, keepdims=True) + 1e-12)
        return jnp.concatenate([jnp.cos(long / 2), jnp.sin(long / 2) * angle / long], axis=-1)

    def matrix_of(q):
        """This is the matrix that brings vectors of the world into the body."""
        w, x, y, z = jnp.moveaxis(q, -1, 0)
        one = jnp.stack([1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)], axis=-1)
        two = jnp.stack([2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x)], axis=-1)
        three = jnp.stack([2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)], axis=-1)
        return jnp.stack([one, two, three], axis=-2)

    def crossed(v):
        """This is the matrix of the product across with v."""
        x, y, z = jnp.moveaxis(v, -1, 0)
        none = jnp.zeros_like(x)
        rows = [[none, -z, y], [z, none, -x], [-y, x, none]]
        return jnp.stack([jnp.stack(r, axis=-1) for r in rows], axis=-2)

    def inverse(a):
        """This inverts matrices of three rows by products across."""
        one, two, three = a[..., 0, :], a[..., 1, :], a[..., 2, :]
        parts = jnp.stack([jnp.cross(two, three), jnp.cross(three, one), jnp.cross(one, two)], axis=-1)
        return parts / jnp.sum(one * jnp.cross(two, three), axis=-1)[..., None, None]

    def asked(q, wrong, cov, look, world, noise, use):
        """This brings a direction that was seen into the guess, where it is used and believable."""
        told = jnp.einsum("bij,j->bi", matrix_of(q), world)
        slope = jnp.concatenate([crossed(told), jnp.zeros_like(crossed(told))], axis=-1)
        off = look - told
        cross = jnp.einsum("bij,bkj->bik", cov, slope)
        wide = jnp.einsum("bij,bjk->bik", slope, cross) + noise**2 * jnp.eye(3)
        back = inverse(wide)
        odd = jnp.einsum("bi,bij,bj->b", off, back, off)
        use = use & (odd < 16.3)
        gain = jnp.where(use[:, None, None], jnp.einsum("bij,bjk->bik", cross, back), 0.0)
        change = jnp.einsum("bij,bj->bi", gain, off)
        keep = jnp.eye(6) - jnp.einsum("bij,bjk->bik", gain, slope)
        cov = jnp.einsum("bij,bjk,blk->bil", keep, cov, keep) + noise**2 * jnp.einsum("bij,bkj->bik", gain, gain)
        q = times_(q, turn_of(change[:, :3]))
        return q / jnp.linalg.norm(q, axis=-1, keepdims=True), wrong + change[:, 3:], cov, odd, use

    def run(start, lost, bias, swing, gyros, pulls, norths, push):
        """This gives turns and guesses, errors of both by time, widths, how odd looks were, drifts, and how often pulls count."""
        true = start / jnp.linalg.norm(start, axis=-1, keepdims=True)
        guess = times_(true, turn_of(0.4 * lost))
        blind = guess
        cov = jnp.broadcast_to(jnp.diag(jnp.asarray([0.2] * 3 + [0.01] * 3)), (bodies, 6, 6))
        heavy = jnp.diag(jnp.asarray([(gyro * step) ** 2 + 1e-6] * 3 + [(drift * step) ** 2 + 1e-9] * 3))

        def away(one, two):
            """This is the angle between turns."""
            return 2 * jnp.arccos(jnp.clip(jnp.abs(jnp.sum(one * two, axis=-1)), 0.0, 1 - 1e-6))

        def moment(carry, each):
            """This turns bodies, hears the sensors and mends the guess."""
            true, guess, blind, wrong, cov, bias, rate, hard = carry
            count, swing, error, one, two, push = each
            rate = 0.95 * rate + 0.5 * swing
            true = times_(true, turn_of(step * rate))
            true = true / jnp.linalg.norm(true, axis=-1, keepdims=True)
            bias = bias + drift * step * swing[:, ::-1]
            heard = rate + bias + gyro / np.sqrt(step) * 0.1 * error
            hard = 0.9 * hard + 0.05 * push
            body = matrix_of(true)
            felt = jnp.einsum("bij,bj->bi", body, up + hard) + pull * one
            magnet = jnp.einsum("bij,j->bi", body, field) + north * two
            calm = jnp.abs(jnp.linalg.norm(felt, axis=-1) - 1) < 0.15
            angle = step * (heard - wrong)
            guess = times_(guess, turn_of(angle))
            blind = times_(blind, turn_of(step * heard))
            ahead = jnp.eye(3) - crossed(angle)
            top = jnp.concatenate([ahead, jnp.broadcast_to(-step * jnp.eye(3), ahead.shape)], axis=-1)
            low = jnp.broadcast_to(jnp.eye(6)[3:], top.shape)
            move = jnp.concatenate([top, low], axis=-2)
            cov = jnp.einsum("bij,bjk,blk->bil", move, cov, move) + heavy
            guess, wrong, cov, odd, used = asked(guess, wrong, cov, felt, up, 3 * pull, calm)
            now = jnp.broadcast_to(count % every == 0, calm.shape)
            guess, wrong, cov, _, _ = asked(guess, wrong, cov, magnet, field, north, now)
            width = jnp.sqrt(jnp.diagonal(cov, axis1=1, axis2=2))
            told = away(true, guess), away(true, blind), jnp.mean(width, axis=0), jnp.minimum(odd, 99.0), jnp.mean(used)
            return (true, guess, blind, wrong, cov, bias, rate, hard), told

        begin = true, guess, blind, jnp.zeros((bodies, 3)), cov, 0.1 * bias, swing[0], 0.1 * push[0]
        last, told = lax.scan(moment, begin, (jnp.arange(times), swing, gyros, pulls, norths, push))
        error, lost, width, odd, used = told
        drifts = jnp.linalg.norm(last[3] - last[5], axis=-1)
        inside = jnp.mean(error < 3 * jnp.sqrt(3.0) * jnp.mean(width[:, :3], axis=1)[:, None], axis=1)
        return last[0], last[1], error, lost, width, jnp.mean(odd, axis=1), used, drifts, inside, last[4]

    one = normal(times, bodies, 3)
    return Built(run, (normal(bodies, 4), normal(bodies, 3), normal(bodies, 3), one, one, one, one, one))


@program("a-sheet-of-bursting-neurons-learns-by-which-of-two-fires-first-with-delays-in-a-ring-scan", GROUP)
def _bursting(size: Size) -> Built:
    """This program lets sheets of neurons fire, where bonds grow if the first neuron fires before the second and else shrink.

    It is the spiking network of Izhikevich (2006, "Polychronization"; as in Brian and BrainPy): two equations for each neuron, four
    of five excite and the rest inhibit, spikes travel for some moments through a ring of memory, and traces tell who was first.
    """
    sheets, n, times, delays, lags = pick(size, (2, 2000, 120, 4, 40), (2, 240, 100, 4, 24), (2, 10, 6, 2, 3))
    excite = n * 4 // 5
    first = np.arange(n) < excite
    part = np.where(first, 0.02, 0.1).astype(np.float32)

    def one_sheet(bond, there, delay, shape, begin, noise, key):
        """This is one sheet."""
        strong = jnp.where(first, 5.0 * (1 + 0.3 * jnp.tanh(bond)), -4.0)
        bond = jnp.where((there == 0) & (first | first[:, None]) & ~jnp.eye(n, dtype=bool), strong, 0.0)
        alive = bond > 0
        reset = jnp.where(first, 8.0 - 6.0 * jnp.tanh(shape) ** 2, 2.0)
        late = jax.nn.one_hot(delay, delays, axis=0)

        def moment(carry, each):
            """This is a thousandth of a second."""
            v, u, bond, ring, before, after, change = carry
            noise, key = each
            fired = v >= 30.0
            fire = fired.astype(jnp.float32)
            v, u = jnp.where(fired, -65.0, v), jnp.where(fired, u + reset, u)
            ring = ring + late[:, None] * fire
            arrive, ring = ring[0, 0], jnp.concatenate([ring[1:], jnp.zeros_like(ring[:1])])
            before, after = 0.95 * before + 0.1 * arrive, 0.95 * after + 0.12 * fire
            drive = bond @ arrive + 6.0 * noise * jnp.where(first, 1.0, 0.4)
            hit = jax.random.uniform(key, (n,)) < 0.01
            drive = drive + jnp.where(hit, 18.0, 0.0)
            learn = fire[:, None] * before - after[:, None] * arrive
            change = jnp.where(alive, 0.95 * change + learn, 0.0)
            bond = jnp.where(alive, jnp.clip(bond + 0.02 * (0.01 + change), 1e-3, 10.0), bond)
            for _ in range(2):
                v = jnp.minimum(v + 0.5 * (0.04 * v**2 + 5 * v + 140 - u + drive), 60.0)
            v = jnp.maximum(v, -110.0)
            u = u + part * (0.2 * v - u)
            rates = jnp.stack([jnp.mean(fire[:excite]), jnp.mean(fire[excite:])])
            return (v, u, bond, ring, before, after, change), (fired, rates, jnp.mean(v), jnp.mean(drive))

        v = -65.0 + 12.0 * begin
        none = jnp.zeros(n)
        carry = v, 0.2 * v, bond, jnp.zeros((delays, 1, n)), none, none, jnp.zeros((n, n))
        carry, told = lax.scan(moment, carry, (noise, jax.random.split(key, times)))
        fired, rates, volt, drive = told
        spikes = fired.astype(jnp.float32)
        often = jnp.sum(spikes, axis=0)
        each, whole = jnp.var(spikes, axis=0), jnp.var(jnp.mean(spikes, axis=1))
        together = jnp.sqrt(whole / jnp.maximum(jnp.mean(each), 1e-9))
        wave = rates[:, 0] - jnp.mean(rates[:, 0])
        echo = jnp.stack([jnp.sum(wave[: times - k] * wave[k:]) for k in range(min(lags, times - 1))])
        bonds = jnp.where(alive, carry[2], 0.0)
        place = jnp.where(alive, jnp.minimum(bonds, 9.99) * 2, 20).astype(jnp.int32)
        spread = jnp.zeros(21).at[place.reshape(-1)].add(1.0)[:20] / jnp.maximum(jnp.sum(alive), 1)
        grown = jnp.sum(bonds - jnp.where(alive, bond, 0.0), axis=1) / jnp.maximum(jnp.sum(alive, axis=1), 1)
        return fired, rates, volt, drive, often, together, echo / (jnp.sum(wave**2) + 1e-9), spread, grown, bonds

    def run(bond, there, delay, shape, begin, noise, seed):
        """This gives spikes, rates, voltages, how often each fires, how much together, echoes, and bonds with their growth."""
        keys = jax.random.split(jax.random.key(seed), sheets)
        return jax.vmap(one_sheet)(bond, there, delay, shape, begin, noise, keys)

    inputs = normal(sheets, n, n), integers(sheets, n, n, below=pick(size, 20, 6, 2))
    inputs += integers(sheets, n, below=delays), normal(sheets, n), normal(sheets, n), normal(sheets, times, n)
    return Built(run, (*inputs, integers(below=1000)))
