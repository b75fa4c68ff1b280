"""Mended bytes, settled plans, rough prices and far bursts, the thirty-first set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program

GROUP = "thirty-first"


def _field() -> tuple[np.ndarray, np.ndarray]:
    """Returns powers of two in the field of 256 elements (twice, so that sums of logarithms need no remainder), and logarithms."""
    powers, logs, x = np.zeros(512, np.int32), np.zeros(256, np.int32), 1
    for k in range(255):
        powers[k] = powers[k + 255] = x
        logs[x] = k
        x = x << 1 if x < 128 else (x << 1) ^ 0x11D
    return powers, logs


@program("blocks-of-bytes-mended-by-checks-over-a-field-of-256", GROUP)
def _mended(size: Size) -> Built:
    """This program adds check bytes to blocks of bytes, breaks some bytes and mends the blocks from the checks.

    It is the code of Reed and Solomon (1960; 255 bytes with 32 checks, as in libfec and reedsolo): syndromes, the locator of
    errors by Berlekamp and Massey, its roots by trial of all places, and sizes of errors by Forney.
    """
    b, long, checks, broken = pick(size, (8192, 255, 32, 20), (96, 255, 32, 20), (3, 255, 4, 3))
    powers, logs = (jnp.asarray(z) for z in _field())
    data, half = long - checks, checks // 2

    def times(x, y):
        """This multiplies in the field."""
        return jnp.where((x == 0) | (y == 0), 0, powers[logs[x] + logs[y]])

    def inverse(x):
        """This is one over x in the field; nought stays nought."""
        return jnp.where(x == 0, 0, powers[255 - logs[x]])

    host, log = _field()
    made = np.array([1], np.int32)
    for k in range(checks):
        longer = np.append(made, 0)
        longer[1:] ^= np.where(made == 0, 0, host[log[made] + k]).astype(np.int32)
        made = longer

    def encode(message):
        """This adds the checks: the rest of a division."""

        def step(rest, byte):
            lead = byte ^ rest[:, 0]
            rest = jnp.pad(rest[:, 1:], ((0, 0), (0, 1)))
            return rest ^ times(lead[:, None], jnp.asarray(made[1:])), None

        rest, _ = lax.scan(step, jnp.zeros((b, checks), jnp.int32), message.T)
        return jnp.concatenate([message, rest], axis=1)

    def syndromes(code):
        """These are the values of a block at powers of two, which are nought when nothing is broken."""

        def step(value, byte):
            return times(value, powers[jnp.arange(checks)]) ^ byte[:, None], None

        value, _ = lax.scan(step, jnp.zeros((b, checks), jnp.int32), code.T)
        return value

    def locator(told):
        """This is the smallest polynomial [b, checks + 1] that makes the syndromes, and its degree."""
        first = jnp.zeros((b, checks + 1), jnp.int32).at[:, 0].set(1)

        def step(k, carry):
            now, old, degree, gap, last = carry
            at = k - jnp.arange(checks + 1)
            seen = jnp.where(at >= 0, told[:, jnp.maximum(at, 0)], 0)
            off = lax.reduce(times(now, seen), jnp.int32(0), lax.bitwise_xor, (1,))
            place = jnp.arange(checks + 1) - gap[:, None]
            moved = jnp.where(place >= 0, jnp.take_along_axis(old, jnp.maximum(place, 0), axis=1), 0)
            fresh = now ^ times(times(off, inverse(last))[:, None], moved)
            grows = (off != 0) & (2 * degree <= k)
            old = jnp.where(grows[:, None], now, old)
            last, gap = jnp.where(grows, off, last), jnp.where(grows, 1, gap + 1)
            return fresh, old, jnp.where(grows, k + 1 - degree, degree), gap, last

        ones = jnp.ones(b, jnp.int32)
        now, _, degree, _, _ = lax.fori_loop(0, checks, step, (first, first, ones - 1, ones, ones))
        return now, degree

    def valued(poly, at):
        """This is the value of polynomials [b, n], lowest first, at powers of two whose logarithms are given."""

        def step(value, c):
            return times(value, powers[at]) ^ c[:, None], None

        value, _ = lax.scan(step, jnp.zeros((b, at.shape[0]), jnp.int32), poly.T, reverse=True)
        return value

    def mend(code):
        """This mends blocks, and tells what it found."""
        told = syndromes(code)
        poly, degree = locator(told)
        poly = poly[:, : half + 1]
        place = jnp.arange(long)
        back = (255 - (long - 1 - place)) % 255
        bad = (valued(poly, back) == 0) & (degree > 0)[:, None]

        def add(carry, c):
            """This adds the syndromes, moved on by one and multiplied by one more part of the locator."""
            moved, total = carry
            total = total ^ times(c[:, None], moved)
            return (jnp.pad(moved[:, :-1], ((0, 0), (1, 0))), total), None

        (_, product), _ = lax.scan(add, (told, jnp.zeros_like(told)), poly.T)
        slope = jnp.where(jnp.arange(half) % 2 == 0, poly[:, 1:], 0)
        below = valued(slope, back)
        above = times(valued(product, back), powers[(long - 1 - place) % 255])
        size_of = jnp.where(bad, times(above, inverse(below)), 0)
        fixed = jnp.where((jnp.sum(bad, axis=1) == degree)[:, None], code ^ size_of, code)
        return fixed, degree, jnp.all(syndromes(fixed) == 0, axis=1), jnp.any(told != 0, axis=1)

    def run(message, place, change, count):
        """This sends blocks over a bad line and mends them."""
        code = encode(message)
        hit = jnp.arange(broken) < count[:, None]
        noise = jnp.zeros_like(code).at[jnp.arange(b)[:, None], place].max(jnp.where(hit, change, 0))
        fixed, degree, sound, wrong = mend(code ^ noise)
        left = jnp.sum(fixed[:, :data] != message, axis=1)
        bits = jnp.sum(lax.population_count(fixed ^ code), axis=1)
        return fixed[:, :data].astype(jnp.uint8), degree, sound, wrong, left, bits, jnp.bincount(degree, length=checks)

    inputs = (integers(b, data, below=256), integers(b, broken, below=long), integers(b, broken, below=256))
    return Built(run, (*inputs, integers(b, below=broken + 1)))


@program("sparse-plans-of-least-cost-by-two-sided-averaged-steps-until-settled-while", GROUP)
def _plans(size: Size) -> Built:
    """This program finds plans of least cost under many sparse conditions, by steps of plans and of prices in turn.

    It is PDLP (Applegate, 2021; google/or-tools and mpax): rows and columns are scaled to like sizes, steps are averaged, and the
    method starts anew from the average when that has come nearer, until both sides agree.
    """
    rows, columns, entries, inner, outer = pick(
        size, (6007, 10007, 80000, 40, 10), (307, 503, 4000, 20, 8), (5, 7, 20, 3, 2)
    )

    def scaled(row, column, value):
        """This scales rows and columns in turn by the roots of their largest entries."""

        def step(_, carry):
            left, right = carry
            now = jnp.abs(value * left[row] * right[column])
            top = jnp.zeros(rows).at[row].max(now)
            side = jnp.zeros(columns).at[column].max(now)
            left = left * jnp.where(top > 0, lax.rsqrt(jnp.maximum(top, 1e-12)), 1.0)
            return left, right * jnp.where(side > 0, lax.rsqrt(jnp.maximum(side, 1e-12)), 1.0)

        return lax.fori_loop(0, 10, step, (jnp.ones(rows), jnp.ones(columns)))

    def run(row, column, value, known, slack, price, top):
        """This solves one problem, which is made so that it has a plan."""

        def forth(a, x):
            return jnp.zeros(rows).at[row].add(a * x[column], indices_are_sorted=True)

        def back(a, y):
            return jnp.zeros(columns).at[column].add(a * y[row])

        known = jnp.abs(known)
        floor = forth(value, known) - jnp.maximum(slack, 0.0)
        cost = back(value, jnp.maximum(price, 0.0)) + jnp.maximum(slack[0], 0.1)
        roof = 2 * known + jnp.abs(top) + 0.1

        left, right = scaled(row, column, value)
        a, floor_s = value * left[row] * right[column], floor * left
        cost_s, roof_s = cost * right, roof / right

        def power(_, v):
            v = back(a, forth(a, v))
            return v / (jnp.linalg.norm(v) + 1e-12)

        norm = jnp.linalg.norm(forth(a, lax.fori_loop(0, 15, power, jnp.full(columns, columns**-0.5))))
        weigh = jnp.linalg.norm(cost_s) / (jnp.linalg.norm(floor_s) + 1e-9)
        step_of = 0.9 / (norm + 1e-9)

        def gaps(x, y):
            """This is how far conditions are broken, costs are wrong, and both sides apart."""
            short = jnp.linalg.norm(jnp.maximum(floor_s - forth(a, x), 0.0)) / (1 + jnp.linalg.norm(floor_s))
            rest = cost_s - back(a, y)
            worth = jnp.vdot(floor_s, y) + jnp.sum(jnp.minimum(rest, 0.0) * roof_s)
            spent = jnp.vdot(cost_s, x)
            apart = jnp.abs(spent - worth) / (1 + jnp.abs(spent) + jnp.abs(worth))
            return jnp.maximum(short, apart), spent, worth

        def some(x, y, weigh):
            """This makes some steps and averages them."""

            def step(_, carry):
                x, y, x_sum, y_sum = carry
                fresh = jnp.clip(x - step_of / weigh * (cost_s - back(a, y)), 0.0, roof_s)
                y = jnp.maximum(y + step_of * weigh * (floor_s - forth(a, 2 * fresh - x)), 0.0)
                return fresh, y, x_sum + fresh, y_sum + y

            x, y, x_sum, y_sum = lax.fori_loop(0, inner, step, (x, y, jnp.zeros_like(x), jnp.zeros_like(y)))
            return x, y, x_sum / inner, y_sum / inner

        def on(carry):
            return (carry[0] < outer) & (carry[4] > 1e-4)

        def round_of(carry):
            """This goes on from the better of the last and the average."""
            k, x, y, weigh, before, course = carry
            x1, y1, x2, y2 = some(x, y, weigh)
            last, mean = gaps(x1, y1)[0], gaps(x2, y2)[0]
            fresh_x, fresh_y = jnp.where(mean < last, x2, x1), jnp.where(mean < last, y2, y1)
            now = jnp.minimum(mean, last)
            dx, dy = jnp.linalg.norm(fresh_x - x), jnp.linalg.norm(fresh_y - y)
            moved = jnp.exp(0.5 * jnp.log((dy + 1e-9) / (dx + 1e-9)) + 0.5 * jnp.log(weigh))
            weigh = jnp.where((now < 0.8 * before) & (dx > 1e-6) & (dy > 1e-6), jnp.clip(moved, 1e-3, 1e3), weigh)
            return k + 1, fresh_x, fresh_y, weigh, now, course.at[k].set(now)

        start = (jnp.int32(0), jnp.zeros(columns), jnp.zeros(rows), weigh, jnp.float32(1e9), jnp.zeros(outer))
        rounds, x, y, _, gap, course = lax.while_loop(on, round_of, start)
        _, spent, worth = gaps(x, y)
        return x * right, y * left, spent, worth, gap, course, rounds, jnp.sum(x >= roof_s)

    inputs = (integers(entries, below=rows, ramp=True), integers(entries, below=columns), normal(entries))
    inputs += (normal(columns), normal(rows), normal(rows), normal(columns))
    return Built(run, inputs)


@program("prices-whose-swings-are-rough-paths-by-fourier-products-smiles-and-slopes", GROUP)
def _rough(size: Size) -> Built:
    """This program prices options on a market whose swings are rough, and tells how prices move with the model's constants.

    It is the rough model of Bayer, Friz and Gatheral (2016) by the hybrid scheme of Bennedsen (2017; ryanmccrickerd/rough_bergomi):
    the first cell is drawn exactly, the others are a long filter by Fourier transforms, and smiles are found from prices.
    """
    paths, steps, terms, strikes, rounds = pick(size, (24576, 312, 6, 21, 20), (1500, 120, 4, 11, 20), (6, 12, 2, 3, 4))
    when = (np.arange(1, terms + 1) * steps // terms).astype(np.int32)
    years = 1.0

    def market(constants, first, second, own):
        """This draws paths of the logarithm of the price, antithetic in what moves it alone."""
        alpha, eta, rho, level = constants
        dt = years / steps
        time = dt * jnp.arange(1, steps + 1)
        wide = dt ** (alpha + 0.5)
        cross = wide / (alpha + 1)
        rest = jnp.sqrt(jnp.maximum(wide**2 / (2 * alpha + 1) - cross**2, 1e-12))
        near = cross * first + rest * second
        dw = dt**0.5 * first
        k = jnp.arange(2, steps + 1)
        best = ((k ** (alpha + 1) - (k - 1) ** (alpha + 1)) / (alpha + 1)) ** (1 / alpha)
        filter_of = jnp.concatenate([jnp.zeros(1), (best * dt) ** alpha])
        both = jnp.fft.rfft(filter_of, 2 * steps) * jnp.fft.rfft(dw, 2 * steps, axis=-1)
        far = jnp.fft.irfft(both, 2 * steps, axis=-1)[:, :steps]
        rough = jnp.sqrt(2 * alpha + 1) * (near + far)
        variance = level * jnp.exp(eta * rough - 0.5 * eta**2 * time ** (2 * alpha + 1))
        variance = jnp.concatenate([jnp.full((paths, 1), level), variance[:, :-1]], axis=1)
        other = jnp.concatenate([own, -own])[: first.shape[0]] * dt**0.5
        db = rho * dw + jnp.sqrt(1 - rho**2) * other
        return jnp.cumsum(jnp.sqrt(variance) * db - 0.5 * variance * dt, axis=1), jnp.sum(variance, axis=1) * dt

    def priced(constants, bars, *noise):
        """These are the prices of options [terms, strikes] that win below or above the price of today."""
        log_price, spent = market(constants, *noise)
        price = jnp.exp(log_price[:, when - 1])
        gain = jnp.maximum((price[..., None] - bars) * jnp.where(bars > 1, 1.0, -1.0), 0.0)
        off = price - 1
        plain = jnp.mean(gain, axis=0)
        bound = jnp.mean(off[..., None] * (gain - plain), axis=0) / jnp.mean(off * off, axis=0)[:, None]
        return jnp.mean(gain - bound * off[..., None], axis=0), jnp.std(gain, axis=0), jnp.mean(spent)

    def bell(sigma, bars, time):
        """This is the price under swings that do not change, and its slope."""
        root = jnp.sqrt(time)[:, None]
        one = -jnp.log(bars) / (sigma * root) + 0.5 * sigma * root
        two = one - sigma * root
        side = jnp.where(bars > 1, 1.0, -1.0)
        cdf = jax.scipy.stats.norm.cdf
        return side * (cdf(side * one) - bars * cdf(side * two)), root * jax.scipy.stats.norm.pdf(one)

    def run(raw, shift, first, second, own):
        """This gives prices, smiles, and slopes of the misfit to quotes."""
        lows, spans = jnp.array([-0.45, 1.0, -0.95, 0.02]), jnp.array([0.2, 1.5, 0.5, 0.06])
        bars = jnp.exp(jnp.linspace(-0.35, 0.25, strikes) + 0.003)
        time = jnp.asarray(when) * (years / steps)
        quotes, vega = bell(0.2 + 0.02 * jnp.tanh(shift), bars, time)

        def misfit(raw):
            price, spread, spent = priced(lows + spans * jax.nn.sigmoid(raw), bars, first, second, own)
            return jnp.mean(jnp.square((price - quotes) / (vega + 0.02))), (price, spread, spent)

        (value, (price, spread, spent)), slope = jax.value_and_grad(misfit, has_aux=True)(raw)

        def halve(_, ends):
            low, top = ends
            middle = 0.5 * (low + top)
            dear = bell(middle, bars, time)[0] > price
            return jnp.where(dear, low, middle), jnp.where(dear, middle, top)

        low, top = lax.fori_loop(0, rounds, halve, (jnp.full_like(price, 0.01), jnp.full_like(price, 1.5)))
        smile = 0.5 * (low + top)
        skew = (smile[:, 1:] - smile[:, :-1]) / (jnp.log(bars[1:]) - jnp.log(bars[:-1]))
        return value, slope, price, spread / paths**0.5, smile, skew, spent

    noise = (normal(paths, steps), normal(paths, steps), normal((paths + 1) // 2, steps))
    return Built(run, (normal(4), normal(terms, strikes), *noise))


@program("bursts-of-far-stars-lined-up-over-trials-of-delay-and-folded-tones", GROUP)
def _bursts(size: Size) -> Built:
    """This program looks for short bursts and for steady beats of far stars in what a radio dish hears.

    It is the search of heimdall and presto: bad channels and moments are left out, channels are shifted by trials of delay and
    summed, sums over many widths tell bursts, and spectra with their overtones tell beats.
    """
    channels, samples, trials, widths, best = pick(
        size, (256, 16384, 192, 9, 40), (64, 2000, 24, 6, 16), (6, 64, 3, 2, 3)
    )
    longest = samples // 4
    kept = samples - longest
    top, bottom, dt = 1500.0, 1200.0, 256e-6
    height = np.linspace(top, bottom, channels)
    unit = height**-2.0 - top**-2.0
    step_of = longest / (trials * unit[-1])
    delay = np.floor(np.arange(1, trials + 1)[:, None] * step_of * unit).astype(np.int32)

    def median_spread(x):
        """This is the middle and the typical distance from it."""
        middle = jnp.median(x)
        return middle, 1.4826 * jnp.median(jnp.abs(x - middle)) + 1e-6

    def cleaned(heard):
        """This leaves out bad channels, moments that all channels hear, and loud points."""
        mean, spread = jnp.mean(heard, axis=1), jnp.std(heard, axis=1)
        middle, wide = median_spread(spread)
        good = jnp.abs(spread - middle) < 3 * wide
        x = jnp.where(good[:, None], (heard - mean[:, None]) / spread[:, None], 0.0)
        all_of = jnp.sum(x, axis=0) / jnp.sum(good)
        x = x - all_of * good[:, None]
        loud = jnp.abs(x) > 4.0
        return jnp.where(loud, 0.0, x), good, jnp.mean(loud)

    def lined_up(x):
        """This sums channels along all trials of delay."""

        def add(total, now):
            row, late = now
            moved = jax.vmap(lambda k: lax.dynamic_slice(row, (k,), (kept,)))(late)
            return total + moved, None

        total, _ = lax.scan(add, jnp.zeros((trials, kept)), (x, jnp.asarray(delay.T)))
        return total / channels**0.5

    def bursts(lined):
        """This tells the loudest sums over all widths, at no more than one per stretch."""
        course = jnp.cumsum(jnp.pad(lined, ((0, 0), (1, 0))), axis=1)
        loud = jnp.full_like(lined, -jnp.inf)
        which = jnp.zeros(lined.shape, jnp.int32)
        for k in range(widths):
            wide = 2**k
            y = jnp.pad((course[:, wide:] - course[:, :-wide]) / wide**0.5, ((0, 0), (0, wide - 1)))
            y = y / (jnp.std(y, axis=1, keepdims=True) + 1e-6)
            loud, which = jnp.maximum(loud, y), jnp.where(y > loud, k, which)
        near = lax.reduce_window(loud, -jnp.inf, lax.max, (3, 65), (1, 1), "SAME")
        peaks = jnp.where(loud == near, loud, 0.0)
        value, at = lax.top_k(peaks.reshape(-1), best)
        return value, at // kept, at % kept, which.reshape(-1)[at]

    def beats(lined):
        """This tells the strongest tones with up to eight overtones."""
        power = jnp.square(jnp.abs(jnp.fft.rfft(lined - jnp.mean(lined, axis=1, keepdims=True), axis=1)))
        many = power.shape[1]
        block = min(50, many)
        whole = power[:, : many // block * block].reshape(trials, -1, block)
        level = jnp.median(whole, axis=-1) / np.log(2) + 1e-6
        level = jnp.repeat(level, block, axis=1, total_repeat_length=many)
        power = (power / level).at[:, :2].set(0.0)
        bins = jnp.arange(many)
        total, strong = power, (power - 1) / 1.0
        over = jnp.zeros(power.shape, jnp.int32)
        for k in (1, 2, 3):
            parts = 2**k
            for j in range(1, parts, 2):
                total = total + power[:, (bins * j + parts // 2) // parts]
            score = (total - parts) / parts**0.5
            strong, over = jnp.maximum(strong, score), jnp.where(score > strong, k, over)
        value, at = lax.top_k(jnp.max(strong, axis=0), best)
        trial = jnp.argmax(strong[:, at], axis=0)
        return value, at / (kept * dt), trial, over[trial, at]

    def run(heard, gain, burst, where):
        """This hides a burst in noise and searches for it."""
        heard = heard * jnp.exp(0.3 * gain)[:, None] + 10 + gain[:, None]
        place = where + jnp.asarray(delay)[trials // 2]
        shape = jnp.exp(-0.5 * jnp.square((jnp.arange(samples) - place[:, None]) / 3.0))
        x, good, lost = cleaned(heard + (1 + 0.1 * burst[:, None]) * shape)
        lined = lined_up(x)
        return bursts(lined), beats(lined), jnp.sum(good), lost, jnp.max(lined, axis=1)

    inputs = (normal(channels, samples), normal(channels), normal(channels), integers(below=kept // 2))
    return Built(run, inputs)
