"""Spins redrawn in clusters, shortest rounds over all subsets, and targets that come and go: their author saw no plan."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, integers, normal, pick, program

GROUP = "forty-second"


@program("swendsen-wang-whole-clusters-of-alike-spins-redrawn-at-once-many-temperatures-potts-while", GROUP)
def _clusters(size: Size) -> Built:
    """This program redraws spins of many kinds in whole clusters, at temperatures around the one where order begins.

    It is the method of Swendsen and Wang (1987) for the Potts model: bonds are laid between alike neighbours, clusters take the
    least number among their cells by spreading and by jumps, and each cluster gets a new kind; order and energies are told.
    """
    lattices, side, kinds, sweeps = pick(size, (32, 128, 3, 6), (8, 48, 3, 8), (2, 5, 3, 2))
    cells = side * side
    critical = float(np.log(1 + kinds**0.5))

    def run(spin, heat, seed):
        """This gives spins, energies, orders, sizes of largest clusters, mean squares of sizes, rounds, and agreement in time."""
        beta = critical * (1 + 0.15 * jnp.linspace(-1, 1, lattices) + 0.02 * jnp.tanh(heat))
        bond = -jnp.expm1(-beta)[:, None, None, None]
        row = jnp.arange(lattices)[:, None]
        own = jnp.broadcast_to(jnp.arange(cells).reshape(side, side), (lattices, side, side))

        def sweep(spin, key):
            """This lays bonds, finds clusters and redraws them."""
            one, two = jax.random.split(key)
            alike = jnp.stack([spin == jnp.roll(spin, -1, axis=k) for k in (1, 2)])
            laid = alike & (jax.random.uniform(one, (2, lattices, side, side)) < bond[:, :, :, 0][None])

            def going(carry):
                """This asks whether any number changed."""
                return carry[1]

            def once(carry):
                """This spreads the least numbers along bonds, and then jumps to the numbers of those numbers."""
                name, _, count = carry
                fresh = name
                for k, there in ((1, laid[0]), (2, laid[1])):
                    fresh = jnp.where(there, jnp.minimum(fresh, jnp.roll(fresh, -1, axis=k)), fresh)
                    back = jnp.roll(there, 1, axis=k)
                    fresh = jnp.where(back, jnp.minimum(fresh, jnp.roll(fresh, 1, axis=k)), fresh)
                flat = fresh.reshape(lattices, cells)
                flat = jnp.take_along_axis(flat, flat, axis=1)
                fresh = jnp.take_along_axis(flat, flat, axis=1).reshape(name.shape)
                return fresh, jnp.any(fresh != name), count + 1

            name, _, count = lax.while_loop(going, once, (own, jnp.bool_(True), jnp.int32(0)))
            flat = name.reshape(lattices, cells)
            drawn = jax.random.randint(two, (lattices, cells), 0, kinds)
            fresh = jnp.take_along_axis(drawn, flat, axis=1).reshape(spin.shape)
            many = jnp.zeros((lattices, cells), jnp.int32).at[row, flat].add(1)
            energy = -jnp.mean(sum((fresh == jnp.roll(fresh, -1, axis=k)).astype(jnp.float32) for k in (1, 2)), (1, 2))
            share = jnp.mean(fresh[..., None] == jnp.arange(kinds), axis=(1, 2))
            order = (kinds * jnp.max(share, axis=1) - 1) / (kinds - 1)
            wide = jnp.sum((many / cells).astype(jnp.float32) ** 2, axis=1)
            same = jnp.mean(fresh == spin, axis=(1, 2))
            told = energy, order, jnp.max(many, axis=1) / cells, wide, jnp.sum(many > 0, axis=1), same, count
            return fresh, told

        spin, told = lax.scan(sweep, spin, jax.random.split(jax.random.key(seed), sweeps))
        wide = told[3]
        ratio = jnp.mean(told[1] ** 4, axis=0) / jnp.maximum(jnp.mean(told[1] ** 2, axis=0) ** 2, 1e-6)
        far = jnp.stack([jnp.mean(spin == jnp.roll(spin, 2**k, axis=1), axis=(1, 2)) for k in range(3)])
        return spin, told, beta, jnp.mean(wide, axis=0), ratio, (kinds * far - 1) / (kinds - 1)

    return Built(run, (integers(lattices, side, side, below=kinds), normal(lattices), integers(below=1000)))


@program("held-karp-shortest-rounds-by-tables-over-all-subsets-of-cities-traced-back-beside-greedy-rounds", GROUP)
def _rounds(size: Size) -> Built:
    """This program finds the shortest round through all cities exactly, and tells how much longer a greedy round is.

    It is the table of Held and Karp (1962): for every subset of cities and every last city in it, the least length comes from
    subsets with one city fewer; subsets of one size are done at once, rounds are traced back, and greedy ones are mended by turns.
    """
    maps, cities, mends = pick(size, (64, 14, 12), (12, 11, 8), (2, 5, 2))
    m = cities - 1
    layers = []
    for many in range(2, m + 1):
        sets = np.array([sum(1 << c for c in s) for s in itertools.combinations(range(m), many)], np.int32)
        inside = (sets[:, None] >> np.arange(m)) & 1
        before = np.where(inside, sets[:, None] ^ (1 << np.arange(m)), 0).astype(np.int32)
        layers.append((sets, inside.astype(bool), before))
    far = 1e6

    def run(place, cost):
        """This gives shortest rounds and their lengths, greedy and mended lengths, ratios, and how lengths spread by last city."""
        gap = jnp.sqrt(jnp.sum((place[:, :, None] - place[:, None]) ** 2, axis=-1) + 1e-9)
        length = gap * (1 + 0.3 * jax.nn.sigmoid(cost))
        length = jnp.where(jnp.eye(cities, dtype=bool), 0.0, length)
        home, between, back = length[:, 0, 1:], length[:, 1:, 1:], length[:, 1:, 0]
        single = 1 << jnp.arange(m)
        table = jnp.full((maps, 1 << m, m), far).at[:, single, jnp.arange(m)].set(home)
        came = jnp.zeros((maps, 1 << m, m), jnp.int8)
        for sets, inside, before in layers:
            ways = table[:, before] + jnp.swapaxes(between, 1, 2)[:, None]
            best = jnp.where(inside, jnp.min(ways, axis=-1), far)
            table = table.at[:, sets].set(best)
            came = came.at[:, sets].set(jnp.argmin(ways, axis=-1).astype(jnp.int8))
        whole = table[:, -1] + back
        shortest, last = jnp.min(whole, axis=1), jnp.argmin(whole, axis=1)
        row = jnp.arange(maps)

        def trace(carry, _):
            """This goes one city back."""
            subset, city = carry
            earlier = came[row, subset, city].astype(jnp.int32)
            return (subset ^ (1 << city), earlier), city

        _, visited = lax.scan(trace, (jnp.full(maps, (1 << m) - 1), last), None, length=m)
        visited = jnp.concatenate([jnp.zeros((maps, 1), jnp.int32), visited[::-1].T + 1], axis=1)

        def near(carry, _):
            """This goes to the nearest city that is left."""
            city, left = carry
            city = jnp.argmin(jnp.where(left, length[row, city], far), axis=1)
            return (city, left.at[row, city].set(False)), city

        left = jnp.ones((maps, cities), bool).at[:, 0].set(False)
        _, greedy = lax.scan(near, (jnp.zeros(maps, jnp.int32), left), None, length=m)
        greedy = jnp.concatenate([jnp.zeros((maps, 1), jnp.int32), greedy.T], axis=1)

        def total(order):
            """This is the length of a round."""
            return jnp.sum(length[row[:, None], order, jnp.roll(order, -1, axis=1)], axis=1)

        i, j = (np.array(z) for z in zip(*itertools.combinations(range(1, cities), 2), strict=True))
        spot = np.arange(cities)
        turned = np.where((spot >= i[:, None]) & (spot <= j[:, None]), i[:, None] + j[:, None] - spot, spot)

        def mend(order, _):
            """This turns the stretch whose turning helps most."""
            tried = jnp.concatenate([order[:, None], order[:, turned]], axis=1)
            each = jax.vmap(total, in_axes=1, out_axes=1)(tried)
            best = jnp.argmin(each, axis=1)
            return tried[row, best], each[row, best]

        mended, lengths = lax.scan(mend, greedy, None, length=mends)
        ratio = jnp.stack([total(greedy), total(mended)]) / shortest
        return visited, shortest, total(visited), ratio, lengths, whole / shortest[:, None], jnp.mean(ratio, axis=1)

    return Built(run, (normal(maps, cities, 2), normal(maps, cities, cities)))


@program("targets-that-come-and-go-among-false-echoes-by-a-mixture-that-counts-them-pruned-and-merged-scan", GROUP)
def _targets(size: Size) -> Built:
    """This program follows an unknown number of targets by echoes of which some are missed and some are false.

    It is the probability hypothesis density filter with Gaussian mixtures (Vo and Ma, 2006): a sum of bells whose weights add up to
    a count is moved, is born at corners, is updated by every echo, and is pruned and merged; errors of sets are told.
    """
    scenes, times, targets, false, keep, pool = pick(
        size, (256, 10, 8, 12, 24, 64), (12, 10, 6, 8, 16, 40), (2, 3, 2, 2, 3, 6)
    )
    seen_at, stays, area, noise = 0.95, 0.99, 100.0, 1.0
    move = jnp.asarray(np.eye(4) + np.eye(4, k=2), jnp.float32)
    shake = jnp.asarray(0.1 * np.diag([0.3, 0.3, 1, 1]) + 0.03 * (np.eye(4, k=2) + np.eye(4, k=-2)), jnp.float32)
    corners = jnp.asarray([[x, y, 0, 0] for x in (-25, 25) for y in (-25, 25)], jnp.float32)
    wide = jnp.diag(jnp.asarray([200.0, 200.0, 4.0, 4.0]))

    def merged(weight, mean, cov):
        """This merges near bells of a pool, from the heaviest on."""
        inverse = jnp.linalg.inv(cov)

        def once(left, _):
            """This takes the heaviest bell and all that lie near it."""
            best = jnp.argmax(left)
            gap = mean - mean[best]
            away = jnp.einsum("ji,ik,jk->j", gap, inverse[best], gap)
            share = jnp.where(away < 4.0, left, 0.0)
            total = jnp.sum(share)
            some = total > 1e-6
            part = share / jnp.maximum(total, 1e-6)
            middle = part @ mean
            gap = mean - middle
            spread = jnp.einsum("j,jik->ik", part, cov + gap[:, :, None] * gap[:, None])
            told = jnp.where(some, total, 0.0), jnp.where(some, middle, 0.0), jnp.where(some, spread, wide)
            return jnp.where(away < 4.0, 0.0, left), told

        return lax.scan(once, weight, None, length=keep)[1]

    def step(carry, each):
        """This is one moment of one scene."""
        weight, mean, cov = carry
        echo, real = each
        weight = jnp.concatenate([stays * weight, jnp.full(4, 0.1)])
        mean = jnp.concatenate([mean @ move.T, corners])
        cov = jnp.concatenate([move @ cov @ move.T + shake, jnp.broadcast_to(wide, (4, 4, 4))])
        inner = cov[:, :2, :2] + noise * jnp.eye(2)
        inverse = jnp.linalg.inv(inner)
        pull = cov[:, :, :2] @ inverse
        gap = echo[:, None] - mean[:, :2]
        away = jnp.einsum("mji,jik,mjk->mj", gap, inverse, gap)
        level = -0.5 * (away + jnp.log(jnp.linalg.det(inner))) - jnp.log(2 * jnp.pi)
        fit = seen_at * weight * jnp.exp(level)
        fit = fit / (false * 0.75 / area**2 + jnp.sum(fit, axis=1, keepdims=True)) * real[:, None]
        updated = mean + jnp.einsum("jik,mjk->mji", pull, gap)
        shrunk = cov - pull @ cov[:, :2]
        shrunk = 0.5 * (shrunk + jnp.swapaxes(shrunk, 1, 2))
        weights = jnp.concatenate([(1 - seen_at) * weight, fit.reshape(-1)])
        means = jnp.concatenate([mean, updated.reshape(-1, 4)])
        covs = jnp.concatenate([cov[None], jnp.broadcast_to(shrunk, (len(echo), *shrunk.shape))]).reshape(-1, 4, 4)
        best, at = lax.top_k(weights, pool)
        best = jnp.where(best > 1e-5, best, 0.0)
        weight, mean, cov = merged(best, means[at], covs[at])
        return (weight, mean, cov), (weight, mean, jnp.trace(cov, axis1=1, axis2=2), jnp.max(fit, axis=1))

    def run(start, speed, leaves, error, lie, seed):
        """This gives counts by time, bells, widths, how echoes are explained, errors of counts and of places."""
        time = jnp.arange(times, dtype=jnp.float32)
        way = 30 * jnp.tanh(start) + jnp.tanh(speed) * time[:, None, None, None]
        alive = time[:, None, None] < leaves + times // 2
        one, two = jax.random.split(jax.random.key(seed))
        met = alive & (jax.random.uniform(one, alive.shape) < seen_at)
        echo = jnp.concatenate([way + noise * error, area / 2 * jnp.tanh(lie)], axis=2)
        real = jnp.concatenate([met, jax.random.uniform(two, lie.shape[:3]) < 0.75], axis=2)
        begin = jnp.zeros((scenes, keep)), jnp.zeros((scenes, keep, 4))
        begin = *begin, jnp.broadcast_to(wide, (scenes, keep, 4, 4))
        _, (weight, mean, width, fit) = lax.scan(jax.vmap(step), begin, (echo, real.astype(jnp.float32)))
        count, true = jnp.sum(weight, axis=2), jnp.sum(alive, axis=2)
        gap = jnp.sqrt(jnp.sum((way[:, :, :, None] - mean[:, :, None, :, :2]) ** 2, axis=-1) + 1e-9)
        told = weight > 0.5
        missed = jnp.minimum(jnp.min(jnp.where(told[:, :, None], gap, 10.0), axis=3), 10.0)
        wrong = jnp.minimum(jnp.min(jnp.where(alive[..., None], gap, 10.0), axis=2), 10.0)
        missed = jnp.sum(missed * alive, axis=2) / jnp.maximum(true, 1)
        wrong = jnp.sum(wrong * told, axis=2) / jnp.maximum(jnp.sum(told, axis=2), 1)
        return count, weight, mean, width, fit, count - true, jnp.mean(missed, axis=1), jnp.mean(wrong, axis=1)

    path = normal(scenes, targets, 2), normal(scenes, targets, 2, scale=0.7), integers(scenes, targets, below=times)
    return Built(run, (*path, normal(times, scenes, targets, 2), normal(times, scenes, false, 2), integers(below=1000)))
