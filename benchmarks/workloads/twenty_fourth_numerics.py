"""Chemistry, optics, cloth, photographs, statistics and tables of events, the twenty-fourth set: its author saw no plan."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import erf, erfinv

from benchmarks.workloads.registry import Built, Size, booleans, integers, normal, pick, program

GROUP = "twenty-fourth"


@program("electrons-of-many-small-chains-by-self-consistent-fields", GROUP)
def _electrons(size: Size) -> Built:
    """This finds the electrons of many chains of hydrogen by self-consistent fields of bell-shaped functions (Roothaan, 1951).

    Every atom has an inner function of three bells and an outer one; the fields are mixed with those of the round before.
    """
    chains, atoms, rounds, grid = pick(size, (29, 6, 9, 24), (3, 6, 9, 9), (2, 2, 9, 3))
    bells, functions = 4 * atoms, 2 * atoms
    powers = np.tile(np.array([18.7311370, 2.8253937, 0.6401217, 0.1612778], np.float32), atoms)
    inner = np.array([[0.03349460, 0.0], [0.23472695, 0.0], [0.81375733, 0.0], [0.0, 1.0]], np.float32)
    made = np.kron(np.eye(atoms, dtype=np.float32), inner) * ((2 * powers / np.pi) ** 0.75)[:, None]
    owner = np.repeat(np.arange(atoms), 4)
    total = (powers[:, None] + powers).astype(np.float32)
    less = (powers[:, None] * powers / total).astype(np.float32)

    def boys(x):
        """This is the integral of exp(-x u²) over u from zero to one."""
        safe = jnp.maximum(x, 0.05)
        small = 1 - x / 3 + x * x / 10 - x**3 / 42
        return jnp.where(x > 0.05, 0.5 * jnp.sqrt(jnp.pi / safe) * erf(jnp.sqrt(safe)), small)

    def integrals(where):
        centre = where[owner]
        apart = jnp.sum((centre[:, None] - centre) ** 2, axis=-1)
        fall = jnp.exp(-less * apart)
        middle = (powers[:, None, None] * centre[:, None] + powers[:, None] * centre) / total[..., None]
        overlap = (np.pi / total) ** 1.5 * fall
        motion = less * (3 - 2 * less * apart) * overlap
        far = jnp.sum((middle[:, :, None] - where) ** 2, axis=-1)
        pull = -2 * np.pi / total * fall * jnp.sum(boys(total[..., None] * far), axis=-1)
        flat, p = middle.reshape(-1, 3), total.reshape(-1)
        gap = jnp.sum((flat[:, None] - flat) ** 2, axis=-1)
        both = p[:, None] * p
        share = both / (p[:, None] + p)
        push = 2 * np.pi**2.5 / (both * jnp.sqrt(p[:, None] + p)) * boys(share * gap)
        push = (push * fall.reshape(-1)[:, None] * fall.reshape(-1)).reshape(bells, bells, bells, bells)
        push = jnp.einsum("pqrs,pa,qb,rc,sd->abcd", push, made, made, made, made)
        return made.T @ overlap @ made, made.T @ (motion + pull) @ made, push

    def solve(where):
        overlap, alone, push = integrals(where)
        sizes, ways = jnp.linalg.eigh(overlap)
        root = (ways * lax.rsqrt(jnp.maximum(sizes, 1e-5))) @ ways.T

        def field(density):
            direct = jnp.einsum("abcd,cd->ab", push, density)
            swapped = jnp.einsum("acbd,cd->ab", push, density)
            return alone + direct - 0.5 * swapped

        def step(carry, _):
            density, _ = carry
            f = field(density)
            levels, turned = jnp.linalg.eigh(root @ f @ root)
            waves = root @ turned[:, : atoms // 2]
            fresh = 2 * waves @ waves.T
            energy = 0.5 * jnp.sum(density * (alone + f))
            return (0.3 * density + 0.7 * fresh, levels), (energy, jnp.max(jnp.abs(fresh - density)))

        start = (jnp.zeros((functions, functions)), jnp.zeros(functions))
        (density, levels), (energy, change) = lax.scan(step, start, None, length=rounds)
        cores = jnp.sum(jnp.triu(lax.rsqrt(jnp.sum((where[:, None] - where) ** 2, axis=-1) + jnp.eye(atoms)), 1))
        charge = 1 - jnp.sum((density @ overlap).diagonal().reshape(atoms, 2), axis=1)
        at = jnp.stack(jnp.meshgrid(*[jnp.linspace(-2.0, 2.0, grid)] * 2, indexing="ij"), axis=-1).reshape(-1, 2)
        spots = jnp.concatenate([at, jnp.full((grid * grid, 1), 0.1)], axis=-1) + jnp.mean(where, axis=0)
        far = jnp.sum((spots[:, None] - where[owner]) ** 2, axis=-1)
        seen = jnp.exp(-powers * far) @ made
        cloud = jnp.einsum("sa,ab,sb->s", seen, density, seen)
        return energy + cores, change, levels, charge, cloud

    def run(jitter, stretch):
        line = (jnp.arange(atoms) * (1.6 + 0.1 * jnp.tanh(stretch))[:, None])[..., None] * jnp.array([1.0, 0.0, 0.0])
        with jax.default_matmul_precision("highest"):
            return jax.vmap(solve)(line + 0.15 * jnp.tanh(jitter))

    return Built(run, (normal(chains, atoms, 3), normal(chains)))


@program("lost-phases-regained-from-overlapping-spots-of-a-probe", GROUP)
def _spots(size: Size) -> Built:
    """This regains the phases of an object and its probe from spots of scattered light that overlap (difference map, 2009)."""
    side, m, across, rounds = pick(size, (395, 128, 13, 9), (93, 32, 7, 9), (15, 8, 3, 9))
    spacing = (side - m) // across
    window = np.hypot(*(np.indices((m, m)) - (m - 1) / 2)) / m
    aperture = (window < 0.3).astype(np.float32)

    def smooth(noise, width):
        rate = jnp.fft.fftfreq(noise.shape[-1])
        fade = jnp.exp(-((rate[:, None] ** 2 + rate**2) * width**2))
        y = jnp.fft.ifft2(jnp.fft.fft2(noise) * fade).real
        return y / jnp.std(y)

    def project(amplitude, waves):
        far = jnp.fft.fft2(waves, norm="ortho")
        return jnp.fft.ifft2(amplitude * far / (jnp.abs(far) + 1e-6), norm="ortho")

    def run(thick, dense, shake, bend, photons):
        true = (0.8 + 0.1 * jnp.tanh(smooth(dense, 12.0))) * jnp.exp(1j * 0.7 * smooth(thick, 9.0))
        phase = bend * 9 * window**2
        probe = jnp.fft.ifft2(jnp.fft.ifftshift(aperture * jnp.exp(1j * (phase + 20 * window**2))), norm="ortho")
        probe = jnp.fft.fftshift(probe) * m / 8
        base = jnp.stack(jnp.meshgrid(jnp.arange(across), jnp.arange(across), indexing="ij"), axis=-1).reshape(-1, 2)
        spots = base * spacing + shake
        row = spots[:, 0, None, None] + jnp.arange(m)[:, None]
        column = spots[:, 1, None, None] + jnp.arange(m)
        bright = jnp.abs(jnp.fft.fft2(true[row, column] * probe, norm="ortho")) ** 2
        amplitude = jnp.sqrt(jnp.maximum(bright + 0.02 * jnp.sqrt(bright) * photons, 0.0))

        def shared(waves, thing, light):
            """This fits one object and one probe to all waves by two rounds of means."""
            for _ in range(2):
                above = jnp.zeros((side, side), jnp.complex64).at[row, column].add(jnp.conj(light) * waves)
                below = jnp.zeros((side, side)).at[row, column].add(jnp.broadcast_to(jnp.abs(light) ** 2, waves.shape))
                thing = (above + 1e-3 * thing) / (below + 1e-3)
                thing = thing / jnp.maximum(jnp.abs(thing), 1.0)
                views = thing[row, column]
                above = jnp.sum(jnp.conj(views) * waves, axis=0)
                light = (above + 1e-3 * light) / (jnp.sum(jnp.abs(views) ** 2, axis=0) + 1e-3)
            return thing, light

        def step(carry, _):
            waves, thing, light = carry
            thing, light = shared(waves, thing, light)
            exits = thing[row, column] * light
            fresh = waves + project(amplitude, 2 * exits - waves) - exits
            wrong = jnp.sum((jnp.abs(jnp.fft.fft2(exits, norm="ortho")) - amplitude) ** 2) / jnp.sum(amplitude**2)
            return (fresh, thing, light), jnp.sqrt(wrong)

        guess = probe * jnp.exp(1j * 2 * window).astype(jnp.complex64)
        start, waves = jnp.ones((side, side), jnp.complex64), jnp.broadcast_to(guess, amplitude.shape)
        (_, thing, light), wrong = lax.scan(step, (waves, start, guess), None, length=rounds)
        turn = jnp.sum(jnp.conj(thing) * true)
        thing = thing * (turn / (jnp.abs(turn) + 1e-6))
        ring = jnp.floor(jnp.hypot(*jnp.meshgrid(*[jnp.fft.fftfreq(side) * side] * 2))).astype(jnp.int32)
        a, c = jnp.fft.fft2(thing).ravel(), jnp.fft.fft2(true).ravel()
        add = partial(jax.ops.segment_sum, segment_ids=ring.ravel(), num_segments=side // 2)
        both = add((a * jnp.conj(c)).real) * lax.rsqrt(add(jnp.abs(a) ** 2) * add(jnp.abs(c) ** 2) + 1e-6)
        return thing.real, thing.imag, jnp.abs(light), wrong, both

    inputs = (normal(side, side), normal(side, side), integers(across**2, 2, below=min(spacing, 5)), normal())
    return Built(run, (*inputs, normal(across**2, m, m)))


@program("cloths-fall-on-a-ball-by-projected-lengths-and-bends", GROUP)
def _cloths(size: Size) -> Built:
    """This drops cloths on a ball by small steps that project lengths, slants and bends with given softness (Macklin, 2016)."""
    cloths, rows, columns, steps, inner = pick(size, (5, 161, 213, 10, 6), (2, 41, 53, 10, 6), (2, 5, 6, 10, 6))
    h, gap, radius = 1 / 90, 2.0 / max(rows, columns), 0.55
    bonds = [(0, 1, 1.0), (1, 0, 1.0), (1, 1, 2**0.5), (1, -1, 2**0.5), (0, 2, 2.0), (2, 0, 2.0)]

    def ends(x, di, dj):
        """This gives both ends of every bond of a kind."""
        if dj >= 0:
            return x[: rows - di, : columns - dj], x[di:, dj:]
        return x[: rows - di, -dj:], x[di:, : columns + dj]

    def put(change, di, dj):
        """This adds the change of a bond to its first end and takes it from its second."""
        more, less = max(dj, 0), max(-dj, 0)
        first, second = ((0, di), (less, more)), ((di, 0), (more, less))
        return jnp.pad(change, (*first, (0, 0))) - jnp.pad(change, (*second, (0, 0)))

    def drop(start, speed, softness, wind, rough):
        soft = [jnp.exp(softness[k] - 12.0) for k in (0, 0, 1, 1, 2, 2)]
        loose = jnp.ones((rows, columns, 1)).at[0, 0].set(0.0).at[0, -1].set(0.0)

        def project(carry, _):
            x, lags = carry
            change, fresh = jnp.zeros_like(x), []
            for (di, dj, far), lag, a in zip(bonds, lags, soft, strict=True):
                one, two = ends(x, di, dj)
                way = one - two
                length = jnp.sqrt(jnp.sum(way * way, axis=-1, keepdims=True) + 1e-12)
                alpha = a / h**2
                step = (-(length - far * gap) - alpha * lag) / (2.0 + alpha)
                fresh.append(lag + step)
                change = change + put(step * way / length, di, dj)
            x = x + loose * change * 0.3
            far = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-12)
            x = jnp.where((far < radius) & (loose > 0), x * (radius / far), x)
            return (x, fresh), None

        def step(carry, _):
            x, v = carry
            face = jnp.cross(jnp.gradient(x, axis=1), jnp.gradient(x, axis=0))
            face = face / jnp.sqrt(jnp.sum(face * face, axis=-1, keepdims=True) + 1e-12)
            blow = jnp.sum((wind - v) * face, axis=-1, keepdims=True) * face
            v = v + h * loose * (jnp.array([0.0, 0.0, -9.81]) + 2 * blow)
            guess = x + h * v * loose
            zeros = [jnp.zeros((rows - di, columns - abs(dj), 1)) for di, dj, _ in bonds]
            (fresh, _), _ = lax.scan(project, (guess, zeros), None, length=inner)
            v = (fresh - x) / h * 0.995
            far = jnp.sqrt(jnp.sum(fresh * fresh, axis=-1, keepdims=True) + 1e-12)
            slide = v - jnp.sum(v * fresh, axis=-1, keepdims=True) * fresh / far**2
            v = jnp.where(far < 1.01 * radius, v - jax.nn.sigmoid(rough) * slide, v)
            speed_of = jnp.sqrt(jnp.sum(v * v, axis=-1, keepdims=True) + 1e-12)
            v = v * jnp.minimum(1.0, 8.0 / speed_of)
            energy = jnp.mean(0.5 * jnp.sum(v * v, axis=-1) + 9.81 * fresh[..., 2])
            return (fresh, v), (energy, jnp.mean((far < 1.01 * radius).astype(jnp.float32)))

        (x, v), trace = lax.scan(step, (start, speed), None, length=steps)
        pull = [
            jnp.mean(jnp.abs(jnp.linalg.norm(jnp.subtract(*ends(x, i, j)), axis=-1) / (f * gap) - 1))
            for i, j, f in bonds
        ]
        return x, v, trace, jnp.stack(pull)

    def run(bumps, speed, softness, wind, rough):
        i, j = jnp.meshgrid(jnp.arange(rows) - rows / 2, jnp.arange(columns) - columns / 2, indexing="ij")
        flat = jnp.stack([i * gap, j * gap, jnp.full((rows, columns), 0.57)], axis=-1)
        start = flat + 0.02 * gap * bumps
        return jax.vmap(drop)(start, 0.05 * speed, softness, wind, rough)

    inputs = (normal(cloths, rows, columns, 3), normal(cloths, rows, columns, 3), normal(cloths, 3), normal(cloths, 3))
    return Built(run, (*inputs, normal(cloths)))


@program("mosaic-of-a-sensor-to-a-photograph-by-slopes-and-alike-patches", GROUP)
def _sensor(size: Size) -> Built:
    """This makes a photograph of a sensor's mosaic: missing colours by slopes (Malvar, 2004), noise out by alike patches, tones."""
    rows, columns, reach = pick(size, (1212, 1820, 3), (150, 204, 3), (14, 18, 1))
    offsets = np.array([(i, j) for i in range(-reach, reach + 1) for j in range(-reach, reach + 1) if (i, j) > (0, 0)])
    green = np.array([[0, 0, -1, 0, 0], [0, 0, 2, 0, 0], [-1, 2, 4, 2, -1], [0, 0, 2, 0, 0], [0, 0, -1, 0, 0]]) / 8
    flat = np.array([[0, 0, 0.5, 0, 0], [0, -1, 0, -1, 0], [-1, 4, 5, 4, -1], [0, -1, 0, -1, 0], [0, 0, 0.5, 0, 0]]) / 8
    cross = (
        np.array([[0, 0, -1.5, 0, 0], [0, 2, 0, 2, 0], [-1.5, 0, 6, 0, -1.5], [0, 2, 0, 2, 0], [0, 0, -1.5, 0, 0]]) / 8
    )
    bank = np.stack([green, flat, flat.T, cross], axis=-1)[:, :, None].astype(np.float32)
    to_eyes = np.array([[1.66, -0.52, -0.14], [-0.22, 1.48, -0.26], [0.02, -0.58, 1.56]], np.float32)

    def boxed(x, r):
        """This sums the square of pixels around each by cumulative sums along both ways."""
        for axis in (0, 1):
            pad = [(r + 1, r) if k == axis else (0, 0) for k in range(x.ndim)]
            y = jnp.cumsum(jnp.pad(x, pad, mode="edge"), axis=axis)
            n = x.shape[axis]
            x = lax.slice_in_dim(y, 2 * r + 1, 2 * r + 1 + n, axis=axis) - lax.slice_in_dim(y, 0, n, axis=axis)
        return x

    def patches(x):
        tall = lax.reduce_window(x, 0.0, lax.add, (5, 1), (1, 1), "SAME")
        return lax.reduce_window(tall, 0.0, lax.add, (1, 5), (1, 1), "SAME")

    def coloured(raw):
        padded = jnp.pad(raw, 2, mode="reflect")[None, :, :, None]
        guess = lax.conv_general_dilated(padded, bank, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))[0]
        i, j = jnp.arange(rows)[:, None] % 2, jnp.arange(columns) % 2
        red, blue = (i == 0) & (j == 0), (i == 1) & (j == 1)
        red_row = jnp.broadcast_to(i == 0, raw.shape)
        g = jnp.where(red | blue, guess[..., 0], raw)
        along, down = guess[..., 1], guess[..., 2]
        r = jnp.where(red, raw, jnp.where(blue, guess[..., 3], jnp.where(red_row, along, down)))
        b = jnp.where(blue, raw, jnp.where(red, guess[..., 3], jnp.where(red_row, down, along)))
        return jnp.stack([r, g, b], axis=-1)

    def cleaned(x, strength):
        padded = jnp.pad(x, ((reach, reach), (reach, reach), (0, 0)), mode="reflect")

        def add(carry, offset):
            total, parts, most = carry
            other = lax.dynamic_slice(padded, (reach + offset[0], reach + offset[1], 0), x.shape)
            apart = patches(jnp.mean((x - other) ** 2, axis=-1)) / 25
            share = jnp.exp(-jax.nn.relu(apart - 2e-4) / strength)
            return (total + share[..., None] * other, parts + share, jnp.maximum(most, share)), None

        empty = jnp.zeros(x.shape[:2])
        every = jnp.concatenate([jnp.asarray(offsets), -jnp.asarray(offsets)])
        (total, parts, most), _ = lax.scan(add, (jnp.zeros_like(x), empty, empty), every)
        most = jnp.maximum(most, 1e-3)
        return (total + most[..., None] * x) / (parts + most)[..., None]

    def photograph(raw, lamp, dim, noise):
        scene = jax.image.resize(jnp.tanh(lamp), (rows, columns), "cubic")
        raw = (scene * 0.35 + 0.45) * 900 * jnp.exp(dim) + 64 + raw.astype(jnp.float32) % 23
        raw = jnp.clip((raw - 64) / 959, 0.0, 1.0)
        y, x = jnp.linspace(-1, 1, rows)[:, None], jnp.linspace(-1, 1, columns)
        raw = raw * (1 + 0.25 * (x * x + y * y))
        picture = coloured(raw)
        usable = jnp.all(picture < 0.95, axis=-1, keepdims=True)
        mean = jnp.sum(picture * usable, axis=(0, 1)) / jnp.maximum(jnp.sum(usable), 1)
        gains = mean[1] / jnp.maximum(mean, 1e-3)
        picture = jnp.clip(picture * gains, 0.0, 1.2)
        steady = 2 * jnp.sqrt(jnp.maximum(picture, 0) + 3 / 8 * 0.01)
        steady = cleaned(steady, 2e-3 * (1 + jax.nn.softplus(noise)))
        picture = jnp.maximum((steady / 2) ** 2 - 3 / 8 * 0.01, 0.0) @ to_eyes.T
        light = picture @ jnp.array([0.2126, 0.7152, 0.0722])
        low, high = jnp.percentile(light[::4, ::4], jnp.array([1.0, 99.0]))
        light = jnp.clip((light - low) / jnp.maximum(high - low, 1e-3), 0.0, 2.0)
        around = boxed(boxed(light, 5), 5) / 121**2
        sharp = jnp.clip(light + 0.6 * (light - around), 1e-4, 2.0)
        curve = sharp * (2.51 * sharp + 0.03) / (sharp * (2.43 * sharp + 0.59) + 0.14)
        hue = picture / jnp.maximum(jnp.mean(picture, axis=-1, keepdims=True), 1e-3)
        shown = jnp.clip(curve[..., None] * (0.9 * jnp.clip(hue, 0.0, 3.0) + 0.1), 0.0, 1.0)
        shown = jnp.where(shown <= 0.0031308, 12.92 * shown, 1.055 * jnp.maximum(shown, 1e-6) ** (1 / 2.4) - 0.055)
        return shown, gains, jnp.stack([low, high]), around

    inputs = (integers(rows, columns, below=1024), normal(max(rows // 12, 3), max(columns // 12, 3)))
    return Built(photograph, (*inputs, normal(scale=0.1), normal()))


@program("guesses-warmed-step-by-step-to-a-posterior-of-prey-and-hunters", GROUP)
def _warmed(size: Size) -> Built:
    """This moves many guesses of rates of prey and hunters from prior to posterior by chosen powers (Del Moral, 2006).

    Powers are chosen by halving so that half of the guesses stay of use; the evidence and forecasts are told at the end.
    """
    guesses, days, stages, moves = pick(size, (12007, 21, 6, 2), (1501, 21, 6, 2), (17, 21, 6, 2))
    start, true, small = np.log(np.array([2.0, 1.0])), np.array([-0.3, -0.7, -0.2, -0.6, 0.0, 0.0]), 2

    def course(theta):
        rates = jnp.exp(jnp.clip(theta[..., :4], -4.0, 2.0))
        u = start + 0.3 * theta[..., 4:]

        def slope(u):
            many = jnp.exp(jnp.clip(u, -12.0, 5.0))
            prey = rates[..., 0] - rates[..., 1] * many[..., 1]
            return jnp.stack([prey, rates[..., 3] * many[..., 0] - rates[..., 2]], axis=-1)

        def day(u, _):
            for _ in range(small):
                h = 0.5 / small
                k1 = slope(u)
                k2 = slope(u + 0.5 * h * k1)
                k3 = slope(u + 0.5 * h * k2)
                u = u + h / 6 * (k1 + 2 * k2 + 2 * k3 + slope(u + h * k3))
            return u, u

        return lax.scan(day, u, None, length=days)[1]

    def run(noise, seed):
        seen = course(jnp.asarray(true, jnp.float32)) + 0.15 * noise
        keys = jax.random.split(jax.random.key(seed), stages + 1)

        def prior(theta):
            return -0.5 * jnp.sum(theta**2, axis=-1)

        def likely(theta):
            miss = jnp.clip((course(theta) - seen[:, None]) / 0.15, -25.0, 25.0)
            return -jnp.sum(jnp.log1p(miss**2 / 4) * 2.5, axis=(0, 2))

        def useful(logs, gain):
            w = jax.nn.softmax(gain * logs)
            return 1 / (guesses * jnp.sum(w * w))

        def stage(carry, key):
            theta, logs, power, evidence = carry

            def halve(_, ends):
                low, high = ends
                middle = 0.5 * (low + high)
                good = useful(logs, middle - power) > 0.5
                return jnp.where(good, middle, low), jnp.where(good, high, middle)

            low, _ = lax.fori_loop(0, 20, halve, (power, jnp.float32(1.0)))
            fresh = jnp.where(useful(logs, 1 - power) > 0.5, 1.0, low)
            gained = (fresh - power) * logs
            evidence = evidence + jax.nn.logsumexp(gained) - np.log(guesses)
            w = jax.nn.softmax(gained)
            first, *rest = jax.random.split(key, 1 + moves)
            ticks = (jnp.arange(guesses) + jax.random.uniform(first)) / guesses
            parent = jnp.minimum(jnp.searchsorted(jnp.cumsum(w), ticks), guesses - 1)
            mean = w @ theta
            cov = (theta - mean).T @ ((theta - mean) * w[:, None])
            factor = jnp.linalg.cholesky(cov * (2.38**2 / 6) * 0.3 + 1e-5 * jnp.eye(6))
            theta, logs = theta[parent], logs[parent]
            taken = []
            for k in rest:
                one, two = jax.random.split(k)
                other = theta + jax.random.normal(one, theta.shape) @ factor.T
                after = likely(other)
                ratio = fresh * (after - logs) + prior(other) - prior(theta)
                accept = jnp.log(jax.random.uniform(two, (guesses,), minval=1e-7)) < ratio
                theta, logs = jnp.where(accept[:, None], other, theta), jnp.where(accept, after, logs)
                taken.append(jnp.mean(jnp.exp(jnp.minimum(ratio, 0.0))))
            return (theta, logs, fresh, evidence), (fresh, jnp.stack(taken), mean)

        theta = jax.random.normal(keys[0], (guesses, 6))
        begin = (theta, likely(theta), jnp.float32(0.0), jnp.float32(0.0))
        (theta, logs, power, evidence), (powers, taken, means) = lax.scan(stage, begin, keys[1:])
        evidence = evidence + jax.nn.logsumexp((1 - power) * logs) - np.log(guesses)
        w = jax.nn.softmax((1 - power) * logs)
        mean = w @ theta
        spread = (theta - mean).T @ ((theta - mean) * w[:, None])
        paths = jnp.exp(jnp.clip(course(theta), -12.0, 5.0))
        bands = jnp.quantile(paths, jnp.array([0.05, 0.5, 0.95]), axis=1)
        return evidence, powers, taken, means, mean, spread, bands

    return Built(run, (normal(days, 2), integers(below=1000)))


@program("events-of-users-to-columns-by-sorted-joins-and-windows", GROUP)
def _events(size: Size) -> Built:
    """This makes columns for learning from events of users: windows, joins to the price of the day, means of answers, ranks."""
    events, users, shops, kinds, prices = pick(
        size, (300007, 20011, 1501, 37, 40009), (20011, 1501, 101, 23, 3001), (41, 5, 3, 4, 9)
    )
    hours = 8760

    def mean_of(x, owner, many):
        count = jax.ops.segment_sum(jnp.ones_like(x), owner, many)
        return jax.ops.segment_sum(x, owner, many) / jnp.maximum(count, 1.0)

    def run(user, hour, shop, kind, cents, answer, price_shop, price_hour, price):
        order = jnp.lexsort((hour, user))
        user, hour, shop, kind, cents, answer = (z[order] for z in (user, hour, shop, kind, cents, answer))
        key = user * hours + hour
        first, place = jnp.concatenate([jnp.ones(1, bool), user[1:] != user[:-1]]), jnp.arange(events)
        begin = lax.cummax(jnp.where(first, place, 0))
        earlier = place - begin
        spent = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(cents)])
        columns = [jnp.log1p(earlier.astype(jnp.float32))]
        columns.append((spent[place] - spent[begin]) / jnp.maximum(earlier, 1).astype(jnp.float32))
        for span in (24, 168, 720):
            low = jnp.maximum(jnp.searchsorted(key, key - span), begin)
            count = (place - low).astype(jnp.float32)
            columns += [count, (spent[place] - spent[low]) / jnp.maximum(count, 1.0)]
        gap = jnp.where(first, 720, hour - jnp.roll(hour, 1)).astype(jnp.float32)
        columns.append(jnp.log1p(gap))

        def after(one, two):
            return one[0] * two[0], one[1] * two[0][..., None] + two[1]

        keep = jnp.where(first, 0.0, jnp.exp(-gap / 200.0))
        money = cents.astype(jnp.float32) / 100
        put = jnp.stack([jnp.ones(events), money, answer.astype(jnp.float32)], axis=-1)
        _, faded = lax.associative_scan(after, (keep, put))
        past = jnp.where(first[:, None], 0.0, jnp.roll(faded, 1, axis=0) * keep[:, None])
        columns += [past[:, 0], past[:, 1] / (past[:, 0] + 1e-3), past[:, 2] / (past[:, 0] + 1.0)]
        listed = price_shop * hours + price_hour
        by = jnp.argsort(listed)
        listed, price, owner = listed[by], jnp.exp(0.3 * price[by]), price_shop[by]
        at = jnp.searchsorted(listed, shop * hours + hour, side="right") - 1
        found = (at >= 0) & (owner[jnp.maximum(at, 0)] == shop)
        usual = mean_of(price, owner, shops)
        now = jnp.where(found, price[jnp.maximum(at, 0)], usual[shop] + (usual[shop] == 0))
        columns += [jnp.log(now), money / (10 * now), found.astype(jnp.float32)]
        truth, overall = answer.astype(jnp.float32), jnp.mean(answer.astype(jnp.float32))
        for name, many in ((shop, shops), (kind, kinds), (shop * kinds + kind, shops * kinds)):
            both = jax.ops.segment_sum(jnp.stack([truth, jnp.ones(events)], axis=-1), name, many)[name]
            columns.append((both[:, 0] - truth + 20 * overall) / (both[:, 1] - 1 + 20))
        held = jnp.clip(money, *jnp.quantile(money, jnp.array([0.005, 0.995])))
        columns.append(held / mean_of(held, kind, kinds)[kind] - 1)
        rank = jnp.zeros(events).at[jnp.argsort(cents)].set((place + 0.5) / events)
        columns.append(2**0.5 * erfinv(2 * rank - 1))
        for period in (24, 168):
            angle = 2 * np.pi * (hour % period) / period
            columns += [jnp.sin(angle), jnp.cos(angle)]
        x = jnp.stack(columns, axis=-1)
        ends = jnp.stack([jnp.min(x, axis=0), jnp.max(x, axis=0)])
        centred = x - jnp.mean(x, axis=0)
        x = centred / (jnp.std(x, axis=0) + 1e-3)
        linked = (x.T @ x) / events
        useful = jnp.abs(x.T @ (truth - overall)) / events
        share = jax.ops.segment_sum(jax.nn.one_hot(kind, kinds), user, users, indices_are_sorted=True)
        share = share / jnp.maximum(jnp.sum(share, axis=1, keepdims=True), 1.0)
        variety = -jnp.sum(share * jnp.log(share + 1e-9), axis=1)
        last = jnp.maximum(jax.ops.segment_max(hour, user, users, indices_are_sorted=True), 0)
        away = (hours - last).astype(jnp.float32)
        worth = jax.ops.segment_sum(money, user, users, indices_are_sorted=True)
        return x, ends, linked, useful, jnp.stack([variety, away, worth], axis=-1)

    inputs = (integers(events, below=users), integers(events, below=hours), integers(events, below=shops))
    inputs += (integers(events, below=kinds), integers(events, below=5000), booleans(events))
    return Built(run, (*inputs, integers(prices, below=shops), integers(prices, below=hours), normal(prices)))
