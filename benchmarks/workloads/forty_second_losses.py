"""Lengths and angles taught, rates of coding, ranks that maps keep, subspaces, neighbours: their author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import dense, dense_of, layer_norm, norm_of
from benchmarks.workloads.twenty_sixth_parts import state_of

GROUP = "forty-second"


@program("relational-distillation-lengths-between-pairs-and-angles-of-triples-taught-adam-step", GROUP)
def _relations(size: Size) -> Built:
    """This program teaches a small network to place things as a large one does: as far apart, and at the same angles.

    It is Relational Knowledge Distillation (Park, 2019; lenscloth/RKD), with optax: lengths between all pairs in units of their
    mean and cosines at all triples are compared by Huber's loss, beside triplets with the hardest other class within reach.
    """
    import optax

    b, n, wide, d, teacher, kinds, reach = pick(
        size, (256, 2048, 1024, 128, 512, 32, 4), (96, 256, 256, 48, 96, 12, 3), (5, 6, 8, 3, 4, 2, 1)
    )
    dtype = half(size)
    optimiser = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(1e-4))
    other = ~np.eye(b, dtype=bool)

    def lengths(x):
        """These are lengths between all pairs, in units of their mean."""
        square = jnp.sum(x**2, axis=1)
        away = jnp.maximum(square[:, None] + square - 2 * x @ x.T, 1e-6)
        away = jnp.where(other, jnp.sqrt(jnp.where(other, away, 1.0)), 0.0)
        return away, away / (jnp.sum(away) / np.sum(other))

    def angles(x):
        """These are cosines at all triples [b, b, b]; the first tells where the angle lies."""
        gap = x[None] - x[:, None]
        way = gap * lax.rsqrt(jnp.sum(gap**2, axis=-1, keepdims=True) + 1e-6)
        return jnp.einsum("ijd,ikd->ijk", way, way)

    def huber(x):
        """This is a parabola that goes on as a line."""
        return jnp.where(jnp.abs(x) < 1, 0.5 * x**2, jnp.abs(x) - 0.5)

    def student(p, x):
        """This is the small network."""
        x = jax.nn.relu(layer_norm(p["norm"], dense(p["first"], x)))
        x = x + jax.nn.relu(dense(p["second"], x))
        x = dense(p["last"], x).astype(jnp.float32)
        return x * lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6)

    def run(p, state, x, taught, label, middle, their_middle):
        """This gives the loss, its parts, new weights and state, hits of nearest rows for both, and errors by row."""
        x = x + 0.5 * middle[label]
        taught = (taught + their_middle[label]).astype(jnp.float32)
        their_away, their_lengths = lengths(taught)
        their_angles = angles(taught)
        same = (label[:, None] == label) & other

        def loss(p):
            """This is the sum of what lengths, angles and triplets tell."""
            y = student(p, x)
            away, units = lengths(y)
            far = huber(units - their_lengths)
            bent = huber(angles(y) - their_angles)
            beyond = (label[:, None] != label) & (
                away > lax.stop_gradient(jnp.min(away + 9.0 * ~same, axis=1))[:, None]
            )
            hardest = jnp.min(jnp.where(beyond, away, 2.0), axis=1)
            pull = jnp.where(same, jax.nn.relu(away - hardest[:, None] + 0.2), 0.0)
            parts = jnp.mean(far), jnp.mean(bent), jnp.sum(pull) / jnp.maximum(jnp.sum(same), 1)
            return parts[0] + 2 * parts[1] + 0.5 * parts[2], (jnp.stack(parts), away, far, bent)

        (value, (parts, away, far, bent)), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        change, state = optimiser.update(slopes, state, p)
        hits = []
        for z in (away, their_away):
            near = lax.top_k(-(z + 99.0 * ~other), reach)[1]
            hits.append(jnp.mean(jnp.any(label[near] == label[:, None], axis=1)))
        agree = jnp.mean(jnp.argsort(away, axis=1)[:, 1:4] == jnp.argsort(their_away, axis=1)[:, 1:4], axis=1)
        errors = jnp.stack([jnp.mean(far, axis=1), jnp.mean(bent, axis=(1, 2)), agree])
        return value, parts, optax.apply_updates(p, change), jax.tree.leaves(state), jnp.stack(hits), errors

    p = {"norm": norm_of(wide, dtype), "first": dense_of(n, wide, dtype), "second": dense_of(wide, wide, dtype)}
    p["last"] = dense_of(wide, d, dtype)
    inputs = normal(b, n, dtype=dtype), normal(b, teacher, dtype=dtype), integers(b, below=kinds)
    inputs += normal(kinds, n, dtype=dtype), normal(kinds, teacher, dtype=dtype)
    return Built(run, (p, state_of(optimiser, p), *inputs))


@program("coding-rates-all-rows-spread-while-each-class-shrinks-by-log-determinants-momentum-step", GROUP)
def _coding_rates(size: Size) -> Built:
    """This program trains a network so that all its rows fill much room while rows of one class fill little.

    It is the Maximal Coding Rate Reduction of Yu (2020; ryanchankh/mcr2), with optax: rates are logarithms of determinants of
    spreads of rows of length one, and rows are named by the class whose spread lets most of them through.
    """
    import optax

    m, n, wide, d, kinds, error = pick(
        size, (2048, 1024, 1024, 128, 40, 0.5), (800, 192, 320, 24, 16, 0.5), (7, 5, 6, 4, 2, 0.5)
    )
    dtype = half(size)
    optimiser = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(0.01, momentum=0.9, nesterov=True))

    def volume(matrix):
        """This is the logarithm of determinants of positive matrices."""
        root = jnp.linalg.cholesky(matrix)
        return 2 * jnp.sum(jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)), axis=-1)

    def rows_of(p, x):
        """This gives rows of length one."""
        x = jax.nn.relu(layer_norm(p["norm"], dense(p["first"], x)))
        x = dense(p["last"], x + jax.nn.relu(dense(p["second"], x))).astype(jnp.float32)
        return x * lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6)

    def run(p, state, x, noise, label, flip):
        """This gives the loss, both rates, rates of classes, new weights and state, told classes, and how classes overlap."""
        mean = noise[label % noise.shape[0]]
        x = (0.6 * mean + x).astype(dtype)
        shown = jnp.where(flip < 2, (label + 1) % kinds, label)
        member = jax.nn.one_hot(shown, kinds)
        many = jnp.sum(member, axis=0)

        def loss(p):
            """This is the rate of classes less the rate of all rows."""
            z = rows_of(p, x)
            whole = jnp.eye(d) + z.T @ z * (d / (m * error))
            parted = jnp.einsum("mk,md,me->kde", member, z, z)
            own = jnp.eye(d) + parted * (d / (jnp.maximum(many, 1.0) * error))[:, None, None]
            room = volume(own)
            all_, each = 0.5 * volume(whole), 0.5 * many / m * room
            return jnp.sum(each) - all_, (z, all_, each, own, room)

        (value, (z, all_, each, own, room)), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        change, state = optimiser.update(slopes, state, p)
        back = jnp.linalg.inv(own)
        left = jnp.einsum("md,kde,me->mk", z, back, z) + 0.5 * room / d
        told = jnp.argmin(left, axis=1)
        table = jnp.zeros((kinds, kinds)).at[label, told].add(1.0)
        alike = jnp.abs(z @ z.T)
        overlap = member.T @ alike @ member / jnp.maximum(many[:, None] * many, 1.0)
        power = jnp.linalg.norm(own - jnp.eye(d), axis=(1, 2)) / jnp.maximum(jnp.trace(own, axis1=1, axis2=2) - d, 1.0)
        fresh = optax.apply_updates(p, change), jax.tree.leaves(state)
        return value, all_, each, *fresh, table, overlap, power, jnp.mean(told == label)

    p = {"norm": norm_of(wide, dtype), "first": dense_of(n, wide, dtype), "second": dense_of(wide, wide, dtype)}
    p["last"] = dense_of(wide, d, dtype)
    inputs = normal(m, n), normal(kinds, n), integers(m, below=kinds), integers(m, below=20)
    return Built(run, (p, state_of(optimiser, p), *inputs))


@program("flat-maps-judged-by-ranks-trust-continuity-shared-neighbours-and-stress-of-lengths", GROUP)
def _maps(size: Size) -> Built:
    """This program judges how well flat maps keep who is near whom among points with many coordinates.

    It uses trustworthiness and continuity (Venna, 2001; scikit-learn), the matrix of shared ranks (Lee, 2009), its curves of kept
    neighbours with one number for all scales, and agreement of lengths by ranks and by stress.
    """
    n, d, maps, kinds, reaches = pick(
        size, (1536, 64, 3, 16, (5, 15, 50, 200)), (400, 24, 3, 8, (5, 10, 20, 50)), (9, 4, 2, 2, (1, 2, 3, 4))
    )

    def lengths(x):
        """These are lengths between all pairs."""
        square = jnp.sum(x**2, axis=1)
        away = jnp.sqrt(jnp.maximum(square[:, None] + square - 2 * x @ x.T, 0.0))
        return jnp.where(jnp.eye(n, dtype=bool), 0.0, away)

    def ranks(away):
        """This tells for each point how many are nearer than each other point; itself comes first."""
        order = jnp.argsort(jnp.where(jnp.eye(n, dtype=bool), -1.0, away), axis=1)
        return jnp.zeros((n, n), jnp.int32).at[jnp.arange(n)[:, None], order].set(jnp.arange(n))

    def run(middle, kind, noise, ways, bends):
        """This gives trust and continuity by reach, curves of kept neighbours, their areas, agreement, and faults by point."""
        x = 2.0 * middle[kind] + noise
        x = x - jnp.mean(x, axis=0)
        far = lengths(x)
        rank = ranks(far)
        upper = jnp.triu(jnp.ones((n, n), bool), 1)

        def judged(each):
            """This judges one map."""
            way, bend = each
            y = jnp.tanh(x @ way * (0.3 * jax.nn.sigmoid(bend))) + 0.05 * x[:, :2]
            flat = lengths(y)
            other = ranks(flat)
            marks, faults = [], []
            for k in reaches:
                scale = 2.0 / (n * k * max(2 * n - 3 * k - 1, 1))
                come = jnp.where((other <= k) & (rank > k), rank - k, 0)
                gone = jnp.where((rank <= k) & (other > k), other - k, 0)
                kept = jnp.sum((rank <= k) & (other <= k)) - n
                marks.append(jnp.stack([1 - scale * jnp.sum(come), 1 - scale * jnp.sum(gone), kept / (n * k)]))
                faults.append(jnp.sum(come, axis=1))
            worse = jnp.maximum(rank, other).reshape(-1)
            shared = jnp.cumsum(jnp.zeros(n).at[worse].add(1.0)[1:])
            reach = jnp.arange(1, n)
            kept = shared / (n * reach)
            gain = ((n - 1) * kept - reach)[:-1] / (n - 1 - reach)[:-1]
            area = jnp.sum(gain / reach[:-1]) / jnp.sum(1 / reach[:-1])
            best = jnp.argmax(kept - reach / (n - 1))
            scale = jnp.sum(jnp.where(upper, far * flat, 0.0)) / jnp.sum(jnp.where(upper, flat**2, 0.0))
            stress = jnp.sqrt(jnp.sum(jnp.where(upper, (far - scale * flat) ** 2, 0.0)) / jnp.sum(far**2 * upper))
            one, two = (z - jnp.mean(z, axis=1, keepdims=True) for z in (rank.astype(float), other.astype(float)))
            agree = jnp.sum(one * two, axis=1) * lax.rsqrt(jnp.sum(one**2, axis=1) * jnp.sum(two**2, axis=1))
            table = jnp.zeros((16, 16)).at[(rank * 16 // n).reshape(-1), (other * 16 // n).reshape(-1)].add(1.0)
            first = jnp.argmin(jnp.where(jnp.eye(n, dtype=bool), jnp.inf, flat), axis=1)
            pure = jnp.mean(kind[first] == kind)
            return jnp.stack(marks), jnp.stack(faults), gain, jnp.stack([area, stress, pure]), best, agree, table / n

        return lax.map(judged, (ways, bends))

    inputs = normal(kinds, d), integers(n, below=kinds), normal(n, d), normal(maps, d, 2, scale=d**-0.5)
    return Built(run, (*inputs, normal(maps, 2)))


@program("points-told-by-few-others-of-their-subspace-by-orthogonal-pursuit-then-cut-into-groups", GROUP)
def _subspaces(size: Size) -> Built:
    """This program groups points that lie near several flat subspaces: each is told by a few others, mostly of its own subspace.

    It is sparse subspace clustering by orthogonal matching pursuit (You, 2016; ChongYou/subspace-clustering): least squares over
    chosen points, a graph of coefficients, its first directions by turned iterations, and groups of rows by rounds of means.
    """
    n, d, spaces, inside, few, turns, rounds = pick(
        size, (4096, 256, 12, 8, 6, 8, 10), (900, 64, 6, 6, 5, 10, 8), (16, 6, 2, 2, 2, 3, 2)
    )

    def run(bases, kind, part, noise, start):
        """This gives groups, chosen points and coefficients, purity and shared knowledge, and how often choices are right."""
        x = jnp.einsum("ndi,ni->nd", bases[kind], part) + 0.1 * noise
        x = x * lax.rsqrt(jnp.sum(x**2, axis=1, keepdims=True))
        row = jnp.arange(n)

        def pursue(carry, k):
            """This chooses one more point for each, and fits all coefficients again."""
            left, chosen, free = carry
            score = jnp.where(free, jnp.abs(left @ x.T), -1.0)
            best = jnp.argmax(score, axis=1)
            chosen, free = chosen.at[:, k].set(best), free.at[row, best].set(False)
            used = jnp.arange(few) <= k
            rows = jnp.where(used[:, None], x[chosen], 0.0)
            gram = jnp.einsum("nsd,ntd->nst", rows, rows) + jnp.diag(jnp.where(used, 1e-4, 1.0))
            wanted = jnp.einsum("nsd,nd->ns", rows, x)
            factor = jnp.linalg.solve(gram, wanted[..., None])[..., 0]
            left = x - jnp.einsum("ns,nsd->nd", factor, rows)
            return (left, chosen, free), (jnp.sqrt(jnp.sum(left**2, axis=1)), factor)

        begin = x, jnp.zeros((n, few), jnp.int32), ~jnp.eye(n, dtype=bool)
        (_, chosen, _), (size_left, factors) = lax.scan(pursue, begin, jnp.arange(few))
        factor = jnp.abs(factors[-1])
        factor = factor / jnp.max(factor, axis=1, keepdims=True)
        graph = jnp.zeros((n, n)).at[row[:, None], chosen].add(factor)
        graph = graph + graph.T
        degree = lax.rsqrt(jnp.sum(graph, axis=1))
        graph = graph * degree[:, None] * degree

        def turned(_, v):
            """This multiplies by the graph, shifted to be positive, some times, and makes columns upright."""
            for _ in range(4):
                v = (graph @ v + v) / 2
            return jnp.linalg.qr(v)[0]

        v = lax.fori_loop(0, turns, turned, jnp.linalg.qr(start)[0])
        values, inner = jnp.linalg.eigh(v.T @ (graph @ v))
        v = v @ inner
        v = v * lax.rsqrt(jnp.sum(v**2, axis=1, keepdims=True) + 1e-12)

        def further(k, middles):
            """This takes the point that is farthest from all middles so far."""
            away = jnp.max(jnp.where(jnp.arange(spaces) < k, v @ middles.T, -2.0), axis=1)
            return middles.at[k].set(v[jnp.argmin(away)])

        middles = lax.fori_loop(1, spaces, further, jnp.zeros((spaces, spaces)).at[0].set(v[0]))

        def moved(middles, _):
            """This is one round of means on the sphere."""
            group = jnp.argmax(v @ middles.T, axis=1)
            total = jax.ops.segment_sum(v, group, spaces)
            long = jnp.sqrt(jnp.sum(total**2, axis=1, keepdims=True))
            middles = jnp.where(long > 1e-3, total / jnp.maximum(long, 1e-3), middles)
            return middles, jnp.mean(jnp.max(v @ middles.T, axis=1))

        middles, tight = lax.scan(moved, middles, None, length=rounds)
        group = jnp.argmax(v @ middles.T, axis=1)
        table = jnp.zeros((spaces, spaces)).at[kind, group].add(1.0) / n
        one, two = jnp.sum(table, axis=1), jnp.sum(table, axis=0)
        both = jnp.sum(jax.scipy.special.xlogy(table, table / jnp.maximum(one[:, None] * two, 1e-12)))
        entropy = [-jnp.sum(jax.scipy.special.xlogy(z, z)) for z in (one, two)]
        marks = jnp.stack([jnp.sum(jnp.max(table, axis=0)), 2 * both / jnp.maximum(sum(entropy), 1e-3)])
        own = jnp.where(kind[chosen] == kind[:, None], factor, 0.0)
        right = jnp.sum(own, axis=1) / jnp.sum(factor, axis=1)
        return group, chosen, factors[-1], marks, right, size_left, values, tight

    inputs = normal(spaces, d, inside, scale=d**-0.5), integers(n, below=spaces), normal(n, inside)
    return Built(run, (*inputs, normal(n, d, scale=inside**0.5 * d**-0.5), normal(n, spaces)))


@program("nearest-neighbour-graph-by-descent-neighbours-of-neighbours-joined-until-few-change-while", GROUP)
def _descent(size: Size) -> Built:
    """This program finds the nearest neighbours of all points from a random graph, because neighbours of neighbours are often near.

    It is NN-descent (Dong, 2011; lmcinnes/pynndescent): fresh neighbours and some that point back are drawn, what they know is
    tried, lists keep the nearest without repeats, and rounds end when few entries change; some points are checked in full.
    """
    n, d, inside, k, draws, back, most, checked = pick(
        size, (8192, 96, 6, 20, 6, 4, 12, 512), (1300, 32, 5, 10, 4, 3, 12, 200), (12, 4, 2, 3, 2, 1, 3, 4)
    )

    def run(low, lift, noise, first, probe, seed):
        """This gives neighbours, lengths, changes by round, rounds, shares of true neighbours found, and who is known often."""
        x = jnp.tanh(low @ lift[0]) @ lift[1] + 0.05 * noise
        me = jnp.arange(n)[:, None]

        def away(i, j):
            """These are squares of lengths from points [n, 1] to listed points [n, c]."""
            return jnp.sum((x[i] - x[j]) ** 2, axis=-1)

        def joined(ids, far, fresh, more):
            """This merges tried points into lists; it gives lists, lengths, and which entries are fresh."""
            ids = jnp.concatenate([ids, more], axis=1)
            far = jnp.concatenate([far, jnp.where(more == me, jnp.inf, away(me, more))], axis=1)
            fresh = jnp.concatenate([fresh, jnp.ones(more.shape, bool)], axis=1)
            order = jnp.argsort(ids, axis=1)
            ids, far, fresh = (jnp.take_along_axis(z, order, axis=1) for z in (ids, far, fresh))
            again = jnp.pad(ids[:, 1:] == ids[:, :-1], ((0, 0), (1, 0)))
            far, which = lax.top_k(-jnp.where(again, jnp.inf, far), k)
            return *(jnp.take_along_axis(z, which, axis=1) for z in (ids, fresh)), -far

        def going(carry):
            """This asks whether enough entries changed."""
            return (carry[3] > n * k // 100) & (carry[4] < most)

        def once(carry):
            """This is one round."""
            ids, far, fresh, _, count, told, key = carry
            key, one, two = jax.random.split(key, 3)
            _, which = lax.top_k(fresh + jax.random.uniform(one, ids.shape), draws)
            ahead = jnp.take_along_axis(ids, which, axis=1)
            slot = jax.random.randint(two, ahead.shape, 0, back)
            behind = jnp.full((n, back), -1).at[ahead, slot].max(jnp.broadcast_to(me, ahead.shape))
            both = jnp.concatenate([ahead, jnp.where(behind < 0, me, behind)], axis=1)
            more = both[both].reshape(n, -1)
            ids, fresh, far = joined(ids, far, jnp.zeros_like(fresh), more)
            change = jnp.sum(fresh)
            return ids, far, fresh, change, count + 1, told.at[count].set(change), key

        empty = jnp.zeros((n, 0), jnp.int32), jnp.zeros((n, 0)), jnp.zeros((n, 0), bool)
        ids, fresh, far = joined(*empty, jnp.concatenate([first, jnp.mod(me + 1 + jnp.arange(k), n)], axis=1))
        begin = ids, far, fresh, jnp.int32(n * k), jnp.int32(0), jnp.zeros(most, jnp.int32), jax.random.key(seed)
        ids, far, _, _, count, told, _ = lax.while_loop(going, once, begin)
        square = jnp.sum(x**2, axis=1)
        whole = square[probe][:, None] + square - 2 * x[probe] @ x.T
        _, true = lax.top_k(-whole.at[jnp.arange(checked), probe].set(jnp.inf), k)
        found = jnp.mean(jnp.any(true[:, :, None] == ids[probe][:, None], axis=2), axis=1)
        often = jnp.zeros(n, jnp.int32).at[ids.reshape(-1)].add(1)
        return ids, jnp.sqrt(far), told, count, found, often

    lift = normal(inside, 2 * d, scale=inside**-0.5), normal(2 * d, d, scale=(2 * d) ** -0.5)
    inputs = normal(n, inside), lift, normal(n, d), integers(n, k, below=n)
    return Built(run, (*inputs, integers(checked, below=n, distinct=True), integers(below=1000)))
