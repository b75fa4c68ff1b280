"""Draws judged by slopes, softened ranks, thin vessels and cones of texts, the thirty-fourth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program

GROUP = "thirty-fourth"


@program("draws-judged-by-slopes-of-a-law-alone-with-wild-resamples", GROUP)
def _judged(size: Size) -> Built:
    """This program tells how far draws of a sampler are from the law that they should follow, from slopes of that law only.

    It is the kernel Stein discrepancy (Liu, 2016; Chwialkowski, 2016; as in blackjax and kgof): the law is a posterior of a robust
    regression, kernels fall like one over a distance at two widths, and signs that remember each other give what chance does.
    """
    n, d, points, tries, lag = pick(size, (6144, 48, 4096, 512, 8), (1024, 16, 512, 96, 8), (7, 3, 5, 4, 2))
    widths = (0.5, 2.0)

    def run(draw, table, noise, true, wild):
        """This gives discrepancies, what resamples give, how strange each draw is, and which directions are off."""
        goal = table @ true + 0.3 * noise
        middle = jnp.linalg.solve(table.T @ table + jnp.eye(d), table.T @ goal)
        draw = middle + 0.7 * draw

        def law(x):
            """This is the logarithm of the law, but for what is the same everywhere."""
            off = goal - table @ x
            return -5.6 * d * jnp.mean(jnp.log1p(off * off / 4.0)) - 0.01 * jnp.sum(x * x)

        slope = jax.vmap(jax.grad(law))(draw)
        square = jnp.sum(draw * draw, axis=1)
        apart = jnp.maximum(square[:, None] + square - 2 * draw @ draw.T, 0.0)
        apart = jnp.where(jnp.eye(n, dtype=bool), 0.0, apart)
        scale = jnp.sum(apart) / (n * (n - 1.0))
        own = jnp.sum(slope * draw, axis=1)
        cross = slope @ draw.T
        gap = own[:, None] - cross + own - cross.T
        met = slope @ slope.T

        def stein(width):
            """This is the kernel of Stein for all pairs of draws."""
            wide = width * scale
            base = 1.0 + apart / wide
            kernel = lax.rsqrt(base)
            first = kernel / base
            return met * kernel + first * gap / wide + first * (d - 3.0 * apart / (wide * base)) / wide

        keep = float(np.exp(-1.0 / lag))

        def joined(one, two):
            """This joins two stretches of a walk that forgets."""
            return one[0] * two[0], one[1] * two[0] + two[1]

        fresh = wild.T.at[1:].multiply((1 - keep * keep) ** 0.5)
        _, signs = lax.associative_scan(joined, (jnp.full((n, 1), keep), fresh))
        told = []
        for width in widths:
            pairs = stein(width)
            by_chance = jnp.sum(signs * (pairs @ signs), axis=0) / n**2
            value = jnp.mean(pairs)
            above = jnp.mean(jax.nn.sigmoid((by_chance - value) / (jnp.std(by_chance) + 1e-6) * 8))
            told.append((value, above, by_chance, jnp.mean(pairs, axis=1)))
        return told, jnp.mean(slope, axis=0), jnp.mean(slope * (draw - middle), axis=0) + 1.0

    inputs = normal(n, d), normal(points, d, scale=d**-0.5), normal(points), normal(d)
    return Built(run, (*inputs, normal(tries, n)))


@program("pictures-sought-so-that-alike-ones-come-among-the-first-few-grad", GROUP)
def _sought(size: Size) -> Built:
    """This program gives the gradients of a head that should bring pictures of the same class among the first few found.

    It is the surrogate of recall (Patel, 2022; yash0307/RecallatK_surrogate): ranks are sums of soft steps over all pictures of a
    batch with a few per class, soft steps at several numbers of first ones follow, and mixed pictures join by mixed likenesses.
    """
    classes, each, n, w, mixed = pick(size, (320, 4, 2048, 512, 160), (120, 4, 384, 96, 60), (3, 2, 8, 4, 2))
    b, dtype, firsts = classes * each, half(size), (1, 2, 4, 8)
    group = np.arange(b) // each
    alike = group[:, None] == group
    mates = np.stack([np.delete(np.arange(each), k) for k in range(each)])
    mates = (mates[None] + each * np.arange(classes)[:, None, None]).reshape(b, each - 1)

    def run(weight, gain, middle, feature, share):
        """This gives the loss, soft recalls, mean ranks, and slopes of the head and of what it reads."""
        share, feature = jax.nn.sigmoid(share), feature + 0.7 * middle[group].astype(dtype)

        def loss(weight, gain, feature):
            x = feature.astype(jnp.float32)
            x = (x - jnp.mean(x, axis=-1, keepdims=True)) * lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5)
            y = ((x * gain).astype(dtype) @ weight).astype(jnp.float32)
            y = y * lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6)
            near = jnp.matmul(y, y.T)
            blend = share * near[:, :mixed] + (1 - share) * near[:, mixed : 2 * mixed]
            found = jnp.take_along_axis(near, mates, axis=1)
            ahead = jax.nn.sigmoid((near[:, None] - found[..., None]) * 30.0)
            ahead = jnp.where(jnp.eye(b, dtype=bool)[:, None], 0.0, ahead)
            more = jax.nn.sigmoid((blend[:, None] - found[..., None]) * 20.0)
            rank = 0.5 + jnp.sum(ahead, axis=-1) + 0.5 * jnp.mean(more, axis=-1)
            recall = jnp.stack(
                [jnp.sum(jax.nn.sigmoid((k - rank) / (0.5 * k)), axis=1) / min(k, each - 1) for k in firsts]
            )
            pull = jnp.mean(jnp.where(alike, 0.0, jnp.square(jax.nn.relu(near - 0.1))))
            return 1 - jnp.mean(jnp.minimum(recall, 1.0)) + pull, (jnp.mean(recall, axis=1), jnp.mean(rank, axis=1))

        (value, told), slopes = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(weight, gain, feature)
        return value, told, slopes

    inputs = (
        normal(n, w, dtype=dtype, scale=n**-0.5),
        normal(n, scale=0.1, offset=1.0),
        normal(classes, n),
        normal(b, n, dtype=dtype),
    )
    return Built(run, (*inputs, normal(mixed)))


@program("thin-vessels-scored-by-softened-skeletons-of-volumes", GROUP)
def _vessels(size: Size) -> Built:
    """This program tells how well thin vessels were found in scans, by whether thin lines inside them lie in each other.

    It is clDice (Shit, 2021; jocpae/clDice) for volumes [scans, depth, rows, columns]: least and largest values of neighbours thin
    chances round by round, what each round would lose is kept as a skeleton, and sharp and soft overlaps are told by slice.
    """
    b, deep, high, wide, fine, rounds = pick(size, (2, 96, 160, 160, 8, 6), (1, 24, 40, 40, 4, 4), (1, 4, 6, 8, 2, 2))

    def least(x):
        """This is the least value of seven cells, as three passes of three."""
        parts = []
        for axis in (1, 2, 3):
            window = [3 if k == axis else 1 for k in range(4)]
            parts.append(lax.reduce_window(x, jnp.inf, lax.min, window, (1, 1, 1, 1), "SAME"))
        return jnp.minimum(jnp.minimum(parts[0], parts[1]), parts[2])

    def largest(x):
        """This is the largest value of 27 cells."""
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 3), (1, 1, 1, 1), "SAME")

    def skeleton(x):
        """This gives the thin lines of chances."""

        def thin(_, carry):
            x, line = carry
            x = least(x)
            lost = jax.nn.relu(x - largest(least(x)))
            return x, line + jax.nn.relu(lost - line * lost)

        return lax.fori_loop(0, rounds, thin, (x, jax.nn.relu(x - largest(least(x)))))[1]

    def blurred(x):
        """This is the mean of 27 cells; edges see noughts."""
        return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 3), (1, 1, 1, 1), "SAME") / 27.0

    def run(score, coarse):
        """This gives scores of whole scans, overlaps by slice, and skeletons summed along depth."""
        truth = (coarse == 0).astype(jnp.float32)
        for axis in (2, 3):
            truth = jnp.repeat(truth, fine, axis=axis)
        smooth = blurred(blurred(score)) * 8.0
        chance = jax.nn.sigmoid(smooth + 2.5 * truth - 1.2)
        line, true_line = skeleton(chance), skeleton(truth)

        def whole(x):
            return jnp.sum(x, axis=(1, 2, 3)) + 1.0

        exact = whole(line * truth) / whole(line)
        found = whole(true_line * chance) / whole(true_line)
        overlap = 2 * whole(chance * truth) / (whole(chance) + whole(truth))
        by_slice = 2 * jnp.sum(chance * truth, (2, 3)) / (jnp.sum(chance + truth, (2, 3)) + 1.0)
        cldice = 2 * exact * found / (exact + found)
        loss = 1 - 0.5 * cldice - 0.5 * overlap
        return jnp.stack([cldice, exact, found, overlap, loss]), by_slice, jnp.sum(line, 1), jnp.sum(true_line, 1)

    return Built(run, (normal(b, deep, high, wide), integers(b, deep, high // fine, wide // fine, below=4)))


@program("texts-as-unit-arrows-in-cones-of-their-own-widths-by-rounds", GROUP)
def _cones(size: Size) -> Built:
    """This program sorts embeddings of texts into soft groups, each a cone of arrows with a width of its own.

    It is the mixture of von Mises and Fisher (Banerjee, 2005; jasonlaska/spherecluster) by rounds: logarithms of Bessel's function
    come from its expansion for high orders, widths from lengths of mean arrows and a step of Newton, and shares are kept alive.
    """
    n, d, k, rounds = pick(size, (65536, 384, 128, 8), (8192, 128, 32, 6), (9, 6, 3, 2))
    order = d / 2 - 1

    def log_bessel(x):
        """This is the logarithm of Bessel's function of this order, for any x above nought."""
        z = x / order
        root = jnp.sqrt(1 + z * z)
        t = 1 / root
        first = (3 * t - 5 * t**3) / 24
        second = (81 * t**2 - 462 * t**4 + 385 * t**6) / 1152
        bent = root + jnp.log(z / (1 + root))
        return order * bent - 0.5 * jnp.log(2 * np.pi * order * root) + jnp.log1p(first / order + second / order**2)

    def log_scale(width):
        return order * jnp.log(width) - 0.5 * d * float(np.log(2 * np.pi)) - log_bessel(width)

    def ratio(width):
        """This is how long the mean of arrows is, from bounds of a quotient of Bessel's functions."""
        low = width / (order + 0.5 + jnp.sqrt(width**2 + (order + 1.5) ** 2))
        high = width / (order + jnp.sqrt(width**2 + (order + 2.0) ** 2))
        return 0.5 * (low + high)

    def unit(x):
        return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-9)

    def run(middle, kind, noise, start):
        """This gives cones, widths, shares, likelihoods of rounds, and how sure each text is of its group."""
        loud = (1.0 + 0.2 * jnp.sin(kind)[:, None]) * 10**-0.5
        arrow = unit(unit(middle)[kind] + loud * noise)
        cones = unit(unit(middle) + 0.6 * d**-0.5 * start)

        def scored(cones, width, share):
            """These are logarithms of what groups give to texts."""
            return width * (arrow @ cones.T) + log_scale(width) + jnp.log(share)

        def one_round(carry, _):
            cones, width, share = carry
            score = scored(cones, width, share)
            whole = jax.scipy.special.logsumexp(score, axis=1)
            weigh = jnp.exp(score - whole[:, None])
            mass = jnp.sum(weigh, axis=0) + 1e-3
            total = weigh.T @ arrow
            length = jnp.minimum(jnp.sqrt(jnp.sum(total * total, axis=1)) / mass, 0.98)
            fresh = length * (d - length**2) / (1 - length**2)
            lean = ratio(fresh)
            fresh = fresh - (lean - length) / (1 - lean**2 - (d - 1) / fresh * lean)
            fresh = jnp.clip(0.8 * fresh + 0.2 * width, 1.0, 40.0 * d)
            return (unit(total), fresh, mass / jnp.sum(mass)), (jnp.mean(whole), jnp.mean(length))

        begin = (cones, jnp.full(k, 1.0 * d), jnp.full(k, 1.0 / k))
        (cones, width, share), course = lax.scan(one_round, begin, None, length=rounds)
        score = scored(cones, width, share)
        logp = jax.nn.log_softmax(score, axis=1)
        doubt = -jnp.sum(jnp.exp(logp) * logp, axis=1)
        bare = jax.scipy.special.logsumexp(score, axis=1)
        cost = -2 * jnp.sum(bare) / n + k * d * jnp.log(float(n)) / n
        meet = cones @ cones.T - jnp.eye(k)
        return cones, width, share, course, doubt, cost, jnp.max(meet, axis=1)

    inputs = normal(k, d), integers(n, below=k), normal(n, d), normal(k, d)
    return Built(run, inputs)
