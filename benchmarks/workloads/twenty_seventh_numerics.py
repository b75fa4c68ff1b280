"""Clusters, seasons, judged pictures and wages, the twenty-seventh set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import dense, dense_of

GROUP = "twenty-seventh"


@program("clusters-joined-two-by-two-by-least-growth-of-spread", GROUP)
def _joined(size: Size) -> Built:
    """This joins points two by two into larger clusters, always the pair whose spread grows least, and says how many suit best.

    It is the rule of Ward (1963) by the recurrence of Lance and Williams (1967), as in scipy and scikit-learn; cuts into two to
    twelve clusters are judged by silhouettes (Rousseeuw, 1987) and by ratios of spreads.
    """
    n, d, most = pick(size, (611, 40, 12), (261, 12, 12), (13, 3, 4))

    def run(x, centres, which):
        x = x + 2.5 * centres[which]
        x = (x - jnp.mean(x, axis=0)) / (jnp.std(x, axis=0) + 1e-6)
        length = jnp.sum(x * x, axis=-1)
        far = jnp.maximum(length[:, None] + length - 2 * x @ x.T, 0.0)
        apart = jnp.where(jnp.eye(n, dtype=bool), jnp.inf, 0.5 * far)

        def join(k, carry):
            """This joins the nearest pair: the second of both dies, and its points take the name of the first."""
            apart, count, label, heights, cuts = carry
            at = jnp.argmin(apart)
            one, two = jnp.minimum(at // n, at % n), jnp.maximum(at // n, at % n)
            gap = apart[one, two]
            alive = (count > 0) & (jnp.arange(n) != one) & (jnp.arange(n) != two)
            a, b = count[one], count[two]
            fresh = (a + count) * apart[one] + (b + count) * apart[two] - count * gap
            fresh = jnp.where(alive, fresh / (a + b + count), jnp.inf)
            apart = apart.at[one].set(fresh).at[:, one].set(fresh).at[two].set(jnp.inf).at[:, two].set(jnp.inf)
            count = count.at[one].set(a + b).at[two].set(0.0)
            label = jnp.where(label == two, one, label)
            left = n - 1 - k
            cuts = cuts.at[jnp.where(left <= most, left, 0)].set(label)
            return apart, count, label, heights.at[k].set(jnp.sqrt(2 * gap)), cuts

        start = (apart, jnp.ones(n), jnp.arange(n), jnp.zeros(n - 1), jnp.zeros((most + 1, n), jnp.int32))
        _, _, _, heights, cuts = lax.fori_loop(0, n - 1, join, start)
        root = jnp.sqrt(far)

        def judged(label, groups):
            leader = jnp.zeros(n, jnp.int32).at[label].set(1)
            number = (jnp.cumsum(leader) - 1)[label]
            member = jax.nn.one_hot(number, most)
            count = jnp.sum(member, axis=0)
            total = root @ member
            own = jnp.take_along_axis(total, number[:, None], axis=1)[:, 0] / jnp.maximum(count[number] - 1, 1)
            means = total / jnp.maximum(count, 1)
            other = jnp.min(jnp.where((count > 0) & (member == 0), means, jnp.inf), axis=1)
            shape = jnp.where(count[number] > 1, (other - own) / jnp.maximum(jnp.maximum(own, other), 1e-9), 0.0)
            centre = (member.T @ x) / jnp.maximum(count, 1)[:, None]
            inside = jnp.sum((x - centre[number]) ** 2)
            between = jnp.sum(count * jnp.sum(centre * centre, axis=-1))
            return jnp.mean(shape), between / (groups - 1) / (inside / (n - groups)), count, number

        shape, ratio, count, number = jax.vmap(judged)(cuts[2:], jnp.arange(2, most + 1))
        best = jnp.argmax(shape)
        table = jax.nn.one_hot(number[best], most).T @ jax.nn.one_hot(which, centres.shape[0])
        share = table / n
        sides = jnp.sum(share, axis=1), jnp.sum(share, axis=0)
        known = jnp.sum(jax.scipy.special.xlogy(share, share / jnp.maximum(sides[0][:, None] * sides[1], 1e-9)))
        return heights, shape, ratio, count, best + 2, known / jnp.sum(jax.scipy.special.entr(sides[1]))

    return Built(run, (normal(n, d), normal(7, d), integers(n, below=7)))


@program("seasons-and-trends-by-weighted-lines-in-robust-rounds", GROUP)
def _seasons(size: Size) -> Built:
    """This parts many monthly series into a season that may change, a trend and a rest, and is not misled by odd months.

    It is STL (Cleveland, 1990), as in statsmodels: lines are fitted around every month with weights that fall with distance, and
    rounds outside weigh months by how small their rest is.
    """
    series, cycles, period, inner, rounds = pick(size, (1024, 61, 12, 2, 6), (24, 31, 12, 2, 5), (2, 5, 4, 1, 2))
    t = cycles * period
    season_span, trend_span = pick(size, 7, 7, 3), pick(size, 23, 23, 7)
    low_span = period + 1 - period % 2

    def lines(m, at, span):
        """These are, for each place, which of m months are near, their weights and how far they are."""
        near = np.clip(at[:, None] - span // 2, 0, max(m - span, 0)) + np.arange(min(span, m))
        gap = (near - at[:, None]).astype(np.float32)
        reach = np.abs(gap).max(axis=1, keepdims=True) * 1.001 + 1e-3
        return near, ((1 - (np.abs(gap) / reach) ** 3) ** 3).astype(np.float32), gap

    def smooth(x, w, at, span):
        """This fits a line around each place `at` of the last axis and reads it there."""
        near, shares, gap = lines(x.shape[-1], at, span)
        y, shares = x[..., near], w[..., near] * shares + 1e-9
        total = jnp.sum(shares, axis=-1)
        middle = jnp.sum(shares * gap, axis=-1) / total
        level = jnp.sum(shares * y, axis=-1) / total
        off = gap - middle[..., None]
        slope = jnp.sum(shares * off * (y - level[..., None]), axis=-1)
        slope = slope / (jnp.sum(shares * off * off, axis=-1) + 1e-4)
        return level - slope * middle

    def means(x, span):
        total = jnp.cumsum(jnp.pad(x, ((0, 0), (1, 0))), axis=-1)
        return (total[:, span:] - total[:, :-span]) / span

    def run(noise, raw, wild):
        month = np.arange(t, dtype=np.float32)
        wave = jnp.einsum(
            "sk,kt->st", raw[:, :4], np.stack([np.sin(2 * np.pi * month * k / period + k) for k in range(1, 5)])
        )
        walk = jnp.cumsum(0.1 * noise, axis=-1) + raw[:, 4:5] * month / t
        odd = jnp.where(jnp.abs(wild) > 2.2, 4 * wild, 0.0)
        x = wave * (1 + 0.3 * month / t) + walk + 0.3 * jnp.roll(noise, 17, axis=-1) + odd
        ones, all_months = jnp.ones_like(x), np.arange(t)

        def within(carry, _):
            trend, _, w = carry
            parts = (x - trend).reshape(series, cycles, period).swapaxes(1, 2)
            part_w = w.reshape(series, cycles, period).swapaxes(1, 2)
            cycle = smooth(parts, part_w, np.arange(-1, cycles + 1), season_span)
            cycle = cycle.swapaxes(1, 2).reshape(series, t + 2 * period)
            low = means(means(means(cycle, period), period), 3)
            low = smooth(low, ones, all_months, low_span)
            season = cycle[:, period:-period] - low
            fresh = smooth(x - season, w, all_months, trend_span)
            return (fresh, season, w), jnp.mean(jnp.abs(fresh - trend), axis=-1)

        def outside(carry, _):
            trend, season, w = carry
            (trend, season, _), moved = lax.scan(within, (trend, season, w), None, length=inner)
            rest = jnp.abs(x - trend - season)
            bound = 6 * jnp.median(rest, axis=-1, keepdims=True) + 1e-6
            w = jnp.square(1 - jnp.square(jnp.minimum(rest / bound, 1.0)))
            return (trend, season, w), moved

        start = (jnp.zeros_like(x), jnp.zeros_like(x), ones)
        (trend, season, w), moved = lax.scan(outside, start, None, length=rounds)
        rest = x - trend - season
        spread = jnp.var(rest, axis=-1)
        strong = [jnp.maximum(0.0, 1 - spread / jnp.var(rest + y, axis=-1)) for y in (trend, season)]
        centred = rest - jnp.mean(rest, axis=-1, keepdims=True)
        lags = [jnp.sum(centred[:, k:] * centred[:, :-k], axis=-1) for k in (1, 2, period)]
        lags = jnp.stack(lags) / jnp.sum(centred * centred, axis=-1)
        found = jnp.sum((w < 0.05) & (odd != 0), axis=-1) / jnp.maximum(jnp.sum(odd != 0, axis=-1), 1)
        return trend, season, w, jnp.stack(strong), lags, moved, found

    return Built(run, (normal(series, t), normal(series, 5), normal(series, t)))


@program("drawn-pictures-judged-by-frechet-kernel-and-nearest-shares", GROUP)
def _judged(size: Size) -> Built:
    """This judges drawn pictures against real ones by their features: means and spreads, kernels, and who lies among whom.

    It gives the distance of Fréchet (Heusel, 2017), of kernels in subsets (Bińkowski, 2018), precision, recall, density and
    coverage (Naeem, 2020) and the score of classes (Salimans, 2016), as in ports of torch-fidelity to JAX.
    """
    n, d, classes, near, subsets, part, block = pick(
        size, (4003, 1000, 1008, 5, 31, 613, 401), (1009, 96, 100, 5, 11, 101, 202), (23, 6, 5, 2, 3, 7, 8)
    )
    dtype, rounds = half(size), 18

    def moments(x):
        mean = jnp.mean(x, axis=0)
        return mean, (x - mean).T @ (x - mean) / (n - 1) + 1e-3 * jnp.eye(d)

    def root(m):
        """This is the square root of a matrix by rounds of Newton and Schulz, and how wrong it is."""
        scale = jnp.sqrt(jnp.sum(m * m))

        def better(carry, _):
            y, z = carry
            t = 1.5 * jnp.eye(d) - 0.5 * z @ y
            return (y @ t, t @ z), None

        (y, _), _ = lax.scan(better, (m / scale, jnp.eye(d)), None, length=rounds)
        y = y * jnp.sqrt(scale)
        return y, jnp.sqrt(jnp.sum((y @ y - m) ** 2)) / scale

    def blocks(x):
        """This cuts rows into blocks; the last one is filled with the first rows."""
        count = -(-n // block)
        return x[np.arange(count * block) % n].reshape(count, block, *x.shape[1:])

    def between(one, two):
        far = jnp.sum(one * one, axis=-1)[:, None] + jnp.sum(two * two, axis=-1) - 2 * one @ two.T
        return jnp.maximum(far, 0.0)

    def reach(x):
        """This is how far the nearest few of the same kind are, without the picture itself."""
        return lax.map(lambda rows: -lax.top_k(-between(rows, x), near + 1)[0][:, -1], blocks(x)).reshape(-1)[:n]

    def among(x, others, reaches):
        """This tells for x how many balls of others hold it, and which of its others is nearest."""

        def one(rows):
            far = between(rows, others)
            return jnp.sum(far <= reaches, axis=-1), jnp.min(far, axis=-1)

        held, least = lax.map(one, blocks(x))
        return held.reshape(-1)[:n], least.reshape(-1)[:n]

    def kernel(key, real, drawn):
        keys = jax.random.split(key)
        x, y = (z[jax.random.choice(k, n, (part,), replace=False)] for k, z in zip(keys, (real, drawn), strict=True))

        def cubed(one, two):
            return (one @ two.T / d + 1) ** 3

        same = sum((jnp.sum(k) - jnp.trace(k)) / (part * (part - 1)) for k in (cubed(x, x), cubed(y, y)))
        return same - 2 * jnp.mean(cubed(x, y))

    def run(p, real, drawn, seed):
        real, drawn = jax.nn.relu(real.astype(jnp.float32)), jax.nn.relu(0.1 + 1.05 * drawn.astype(jnp.float32))
        (mean1, spread1), (mean2, spread2) = moments(real), moments(drawn)
        first, wrong1 = root(spread1)
        both, wrong2 = root(first @ spread2 @ first)
        frechet = jnp.sum((mean1 - mean2) ** 2) + jnp.trace(spread1) + jnp.trace(spread2) - 2 * jnp.trace(both)
        kernels = jax.vmap(lambda key: kernel(key, real, drawn))(jax.random.split(jax.random.key(seed), subsets))
        reach1, reach2 = reach(real), reach(drawn)
        held1, _ = among(drawn, real, reach1)
        held2, _ = among(real, drawn, reach2)
        _, least = among(real, drawn, reach1)
        shares = jnp.stack(
            [jnp.mean(held1 > 0), jnp.mean(held2 > 0), jnp.mean(held1) / near, jnp.mean(least <= reach1)]
        )
        logp = jax.nn.log_softmax(dense(p, drawn.astype(dtype)).astype(jnp.float32), axis=-1)
        logp = logp[: n // 10 * 10].reshape(10, n // 10, classes)
        whole = jax.nn.logsumexp(logp, axis=1, keepdims=True) - np.log(n // 10)
        score = jnp.exp(jnp.mean(jnp.sum(jnp.exp(logp) * (logp - whole), axis=-1), axis=1))
        told = (jnp.mean(kernels), jnp.std(kernels), shares, jnp.mean(score), jnp.std(score))
        return frechet, told, jnp.sqrt(reach1), wrong1, wrong2

    inputs = (normal(n, d, dtype=dtype), normal(n, d, dtype=dtype), integers(below=1000))
    return Built(run, (dense_of(d, classes, dtype), *inputs))


@program("wages-with-effects-of-workers-and-firms-swept-out-clustered-errors", GROUP)
def _wages(size: Size) -> Built:
    """This tells what raises wages once what is peculiar to every worker, firm and year is taken out, and how sure that is.

    It is the regression of Abowd, Kramarz and Margolis (1999) by sweeps over groups, as in pyfixest (which has a JAX back end):
    errors are clustered by firm, draws of signs per firm give honest chances, and effects are parted into spreads.
    """
    rows, workers, firms, years, k, sweeps, draws = pick(
        size, (300007, 40009, 3011, 19, 9, 25, 599), (20011, 3001, 307, 11, 5, 25, 199), (67, 9, 5, 3, 2, 6, 7)
    )

    def run(x, noise, worker, firm, year, effects, slopes):
        groups = ((worker, workers), (firm, firms), (year, years))
        counts = [jnp.maximum(jax.ops.segment_sum(jnp.ones(rows), g, m), 1.0) for g, m in groups]
        own, place = effects[:workers], 0.5 * effects[workers : workers + firms]
        x = x + 0.4 * own[worker][:, None] + 0.3 * place[firm][:, None]
        wage = x @ slopes + own[worker] + place[firm] + noise * jnp.exp(0.2 * x[:, 0] + 0.2 * place[firm])
        real = jax.nn.sigmoid(wage) < 0.999
        wage = jnp.where(real, wage, 7.0)

        def sweep(carry, _):
            """This takes means of workers, firms and years off all columns, in turns."""
            y, taken = carry
            fresh = []
            for (g, m), count, before in zip(groups, counts, taken, strict=True):
                mean = jax.ops.segment_sum(y, g, m) / count[:, None]
                y = y - mean[g]
                fresh.append(before + mean)
            return (y, fresh), jnp.max(jnp.abs(fresh[1] - taken[1]), axis=0)

        all_columns = jnp.concatenate([wage[:, None], x], axis=1)
        start = (all_columns, [jnp.zeros((m, k + 1)) for _, m in groups])
        (y, taken), moved = lax.scan(sweep, start, None, length=sweeps)
        within, columns = y[:, 0], y[:, 1:]
        gram = columns.T @ columns
        inverse = jnp.linalg.inv(gram)
        beta = inverse @ (columns.T @ within)
        left = within - columns @ beta
        free = rows - k - workers - firms - years + 2
        plain = jnp.sqrt(jnp.sum(left**2) / max(free, 1) * jnp.diag(inverse))
        scores = jax.ops.segment_sum(columns * left[:, None], firm, firms)
        small = firms / (firms - 1)
        clustered = jnp.sqrt(small * jnp.diag(inverse @ (scores.T @ scores) @ inverse))
        robust = jnp.sqrt(jnp.diag(inverse @ jnp.einsum("rk,rl,r->kl", columns, columns, left**2) @ inverse))

        def draw(key):
            """This gives ratios of slopes to errors when all scores of a firm change their sign together."""
            sign = jax.random.rademacher(key, (firms,), jnp.float32)
            turned = scores * sign[:, None]
            off = inverse @ jnp.sum(turned, axis=0)
            gap = turned - jnp.sum(turned, axis=0) / firms
            return off / jnp.sqrt(small * jnp.sum((gap @ inverse) ** 2, axis=0) + 1e-20)

        ratios = jnp.abs(lax.map(draw, jax.random.split(jax.random.key(3), draws), batch_size=37))
        chance = jnp.mean(ratios >= jnp.abs(beta / clustered), axis=0)
        bound = jnp.quantile(ratios, 0.95, axis=0)
        parts = [(z[:, 0] - z[:, 1:] @ beta)[g] for z, (g, _) in zip(taken, groups, strict=True)]
        spreads = jnp.cov(jnp.stack([*parts, x @ beta, left])) / jnp.var(wage)
        fit = 1 - jnp.sum(left**2) / jnp.sum(within**2)
        return beta, plain, robust, clustered, chance, bound, spreads, fit, moved, taken[1][:, 0]

    inputs = (normal(rows, k), normal(rows), integers(rows, below=workers, ramp=True), integers(rows, below=firms))
    inputs += (integers(rows, below=years), normal(workers + firms), normal(k, scale=0.3))
    return Built(run, inputs)
