"""Views that correlate, rare classes, columns of two sorts, codes that keep lengths, who speaks when: their author saw no plan."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import dense, dense_of, layer_norm, norm_of
from benchmarks.workloads.twenty_sixth_parts import state_of

GROUP = "forty-third"


@program("deep-canonical-correlation-two-views-turned-until-their-directions-agree-eigenvalues-rmsprop-step", GROUP)
def _canonical(size: Size) -> Built:
    """This program trains two networks so that what they tell of two views of one thing is as correlated as can be.

    It is deep canonical correlation analysis (Andrew, 2013; Michaelvll/DeepCCA), with optax: spreads of both outputs are whitened
    by their eigenvectors, the loss is minus the sum of the first singular values, and linear directions then tell pairs apart.
    """
    import optax

    m, views, wide, d, keep, shared = pick(
        size, (2048, (784, 273), 1024, 64, 20, 30), (800, (128, 96), 256, 24, 8, 12), (9, (5, 4), 6, 3, 2, 2)
    )
    dtype = half(size)
    optimiser = optax.chain(optax.add_decayed_weights(1e-5), optax.rmsprop(1e-4, decay=0.99, eps=1e-8))

    def network(p, x):
        """This is one network."""
        x = jax.nn.sigmoid(layer_norm(p["norm"], dense(p["first"], x)))
        x = jax.nn.sigmoid(dense(p["second"], x))
        return dense(p["last"], x).astype(jnp.float32)

    def whitened(x):
        """This gives rows without their mean, and the root of the inverse of their spread."""
        x = x - jnp.mean(x, axis=0)
        values, ways = jnp.linalg.eigh(x.T @ x / (m - 1) + 1e-3 * jnp.eye(d))
        return x, (ways * lax.rsqrt(jnp.maximum(values, 1e-6))) @ ways.T, values

    def run(p, state, hidden, lifts, noise, other_noise):
        """This gives the loss, correlations, spreads, new weights and state, and how well rows of one view find their pairs."""
        both = []
        for lift, own in zip(lifts, (noise, other_noise), strict=True):
            both.append((jnp.tanh(hidden @ lift) + 0.5 * own).astype(dtype))

        def loss(p):
            """This is minus the sum of the largest correlations."""
            one, two = (whitened(network(q, x)) for q, x in zip(p, both, strict=True))
            cross = one[1] @ (one[0].T @ two[0] / (m - 1)) @ two[1]
            squares = jnp.linalg.eigvalsh(cross.T @ cross + 1e-6 * jnp.eye(d))
            agree = jnp.sqrt(jnp.maximum(squares[::-1], 1e-9))
            return -jnp.sum(agree[:keep]), (one, two, cross, agree)

        (value, (one, two, cross, agree)), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        change, state = optimiser.update(slopes, state, p)
        left, _, right = jnp.linalg.svd(cross)
        rows = [one[0] @ one[1] @ left[:, :keep], two[0] @ two[1] @ right[:keep].T]
        rows = [x * lax.rsqrt(jnp.sum(x**2, axis=1, keepdims=True) + 1e-6) for x in rows]
        alike = rows[0] @ rows[1].T
        own = jnp.diagonal(alike)
        ranks = jnp.stack([jnp.sum(alike > own[:, None], axis=1), jnp.sum(alike > own, axis=0)])
        found = jnp.stack([jnp.mean(ranks < k, axis=1) for k in (1, 5, 10)])
        spreads = jnp.stack([one[2], two[2]])
        weights = optax.apply_updates(p, change)
        return value, agree, spreads, weights, jax.tree.leaves(state), jnp.mean(1 / (1 + ranks), axis=1), found

    def of(i):
        """This describes one network."""
        p = {"norm": norm_of(wide, dtype), "first": dense_of(i, wide, dtype), "second": dense_of(wide, wide, dtype)}
        return p | {"last": dense_of(wide, d, dtype)}

    p = tuple(of(i) for i in views)
    lifts = tuple(normal(shared, i, scale=shared**-0.5) for i in views)
    return Built(run, (p, state_of(optimiser, p), normal(m, shared), lifts, *(normal(m, i) for i in views)))


@program("seesaw-loss-rare-classes-spared-by-counts-so-far-unless-they-are-mistaken-long-tails-grad", GROUP)
def _seesaw(size: Size) -> Built:
    """This program trains the head that names cut-out things when few classes are common and very many are rare.

    It is the Seesaw loss (Wang, 2020; open-mmlab/mmdetection) for LVIS: rare classes are pushed away less by the ratio of counts so
    far, more where they are mistaken for the truth, logits are scaled cosines, and a second output tells things from ground.
    """
    m, n, wide, kinds, decay = pick(size, (4096, 2048, 1024, 1203, 2.2), (1024, 256, 256, 301, 1.2), (7, 6, 8, 5, 1.0))
    dtype = half(size)

    def run(p, x, middle, draw, count, things):
        """This gives the loss and parts, slopes, new counts, hits by how common classes are, and how both factors act."""
        line = jnp.arange(kinds)
        chance = jnp.exp(-decay * jnp.log1p(line))
        edge = jnp.cumsum(chance) / jnp.sum(chance)
        label = jnp.searchsorted(edge, (draw + 0.5) / 65536).astype(jnp.int32)
        label = jnp.minimum(label, kinds - 1)
        real = things < 1
        before = jnp.sort(count)[::-1].astype(jnp.float32) ** 2 / 1000
        counts = before.at[label].add(real.astype(jnp.float32))
        x = (x + jnp.where(real[:, None], 0.7 * middle[label], 0.0)).astype(dtype)

        def loss(p):
            """This is the surprise of classes with both factors, and that of things against ground."""
            y = jax.nn.relu(layer_norm(p["norm"], dense(p["first"], x)))
            y = jax.nn.relu(dense(p["second"], y))
            power = jnp.linalg.norm(y.astype(jnp.float32), axis=1, keepdims=True)
            rows = (y / (power + 1e-6)).astype(dtype)
            ways = p["ways"].astype(jnp.float32)
            ways = (ways / (jnp.linalg.norm(ways, axis=0, keepdims=True) + 1e-6)).astype(dtype)
            logits = 20.0 * (rows @ ways).astype(jnp.float32)
            thing = dense(p["thing"], y).astype(jnp.float32)
            score = lax.stop_gradient(jax.nn.softmax(logits, axis=-1))
            own = jnp.take_along_axis(score, label[:, None], axis=1)
            many = jnp.maximum(counts, 1.0)
            ratio = many[None, :] / many[label][:, None]
            spared = jnp.where(ratio < 1.0, ratio**0.8, 1.0)
            worse = score / jnp.maximum(own, 0.01)
            blamed = jnp.where(worse > 1.0, worse**2.0, 1.0)
            hot = label[:, None] == line
            shifted = logits + jnp.where(hot, 0.0, jnp.log(jnp.maximum(spared * blamed, 1e-9)))
            logp = jax.nn.log_softmax(shifted, axis=-1)
            each = -jnp.take_along_axis(logp, label[:, None], axis=1)[:, 0] * real
            classes = jnp.sum(each) / jnp.maximum(jnp.sum(real), 1)
            ground = -jnp.take_along_axis(jax.nn.log_softmax(thing), real[:, None].astype(jnp.int32), axis=1)
            parts = jnp.stack([classes, jnp.mean(ground)])
            return jnp.sum(parts), (parts, logits, thing, spared, blamed)

        (value, (parts, logits, thing, spared, blamed)), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        told = jnp.argmax(logits, axis=1)
        band = jnp.where(counts[label] > 300, 2, jnp.where(counts[label] > 30, 1, 0))
        group = jax.nn.one_hot(band, 3) * real[:, None]
        many = jnp.maximum(jnp.sum(group, axis=0), 1.0)
        five = jnp.any(lax.top_k(logits, min(5, kinds))[1] == label[:, None], axis=1)
        hits = jnp.stack([(told == label) @ group / many, five @ group / many, jnp.sum(group, axis=0)])
        acts = jnp.stack([jnp.mean(spared, axis=0), jnp.mean(blamed, axis=0), jnp.mean(blamed > 1, axis=0)])
        whole = jax.nn.softmax(logits, axis=-1) * jax.nn.softmax(thing, axis=-1)[:, 1:]
        sure, at = lax.top_k(whole.reshape(-1), min(300, m))
        return value, parts, slopes, counts, hits, acts, sure, at // kinds, at % kinds

    p = {"norm": norm_of(wide, dtype), "first": dense_of(n, wide, dtype), "second": dense_of(wide, wide, dtype)}
    p |= {"ways": normal(wide, kinds, dtype=dtype, scale=wide**-0.5), "thing": dense_of(wide, 2, dtype)}
    inputs = normal(m, n), normal(kinds, n), integers(m, below=65536), integers(kinds, below=2000), integers(m, below=4)
    return Built(run, (p, *inputs))


@program("k-prototypes-customers-grouped-by-numbers-and-by-names-many-starts-judged-by-silhouettes-while", GROUP)
def _prototypes(size: Size) -> Built:
    """This program groups customers who are described by numbers and by names such as a town or a trade.

    It is k-prototypes (Huang, 1998; nicodv/kmodes): lengths of numbers and counts of differing names are weighed, middles are means
    and most common names, rounds of several starts end when nobody moves, and silhouettes judge the best of them.
    """
    n, numbers, names, values, k, starts, most = pick(
        size, (8192, 16, 12, 24, 16, 3, 30), (1500, 8, 6, 12, 8, 3, 20), (14, 3, 2, 3, 2, 2, 4)
    )

    def run(kind, middle, noise, usual, other, strange, seed):
        """This gives groups, costs of starts, rounds, middles, purity, silhouettes, and how much each column tells."""
        x = 1.5 * middle[kind] + noise
        x = (x - jnp.mean(x, axis=0)) / jnp.std(x, axis=0)
        name = jnp.where(strange < 3, other, usual[kind])
        hot = jax.nn.one_hot(name, values)
        weigh = 0.5 * jnp.mean(jnp.std(x, axis=0))

        def lengths(mean, mode):
            """These are lengths from all customers to middles [c, numbers] and [c, names]."""
            far = jnp.sum(x**2, axis=1)[:, None] + jnp.sum(mean**2, axis=1) - 2 * x @ mean.T
            differ = jnp.sum(name[:, None] != mode, axis=2)
            return jnp.maximum(far, 0.0) + weigh * differ

        def going(carry):
            """This asks whether anyone moved."""
            return (carry[4] > 0) & (carry[5] < most)

        def once(carry):
            """This is one round."""
            mean, mode, group, _, _, count = carry
            far = lengths(mean, mode)
            fresh = jnp.argmin(far, axis=1)
            member = jax.nn.one_hot(fresh, k)
            many = jnp.sum(member, axis=0)
            mean = jnp.where(many[:, None] > 0, member.T @ x / jnp.maximum(many, 1)[:, None], mean)
            often = jnp.einsum("nk,ncv->kcv", member, hot)
            mode = jnp.where(many[:, None] > 0, jnp.argmax(often, axis=2), mode)
            return mean, mode, fresh, jnp.sum(jnp.min(far, axis=1)), jnp.sum(fresh != group), count + 1

        def started(key):
            """This draws far customers as first middles, and goes on until nobody moves."""
            first, *keys = jax.random.split(key, k)
            at = jnp.zeros(k, jnp.int32).at[0].set(jax.random.randint(first, (), 0, n))
            near = lengths(x[at[:1]], name[at[:1]])[:, 0]
            for j, one in enumerate(keys):
                at = at.at[j + 1].set(jax.random.categorical(one, jnp.log(near + 1e-6)))
                near = jnp.minimum(near, lengths(x[at[j + 1]][None], name[at[j + 1]][None])[:, 0])
            begin = x[at], name[at], jnp.full(n, -1), jnp.float32(0), jnp.int32(n), jnp.int32(0)
            return lax.while_loop(going, once, begin)

        mean, mode, group, cost, _, count = lax.map(started, jax.random.split(jax.random.key(seed), starts))
        best = jnp.argmin(cost)
        mean, mode, group = mean[best], mode[best], group[best]
        member = jax.nn.one_hot(group, k)
        many = jnp.sum(member, axis=0)

        def summed(part):
            """These are sums of roots of lengths from some customers to each group."""
            one, two = part
            far = jnp.sum(one**2, axis=1)[:, None] + jnp.sum(x**2, axis=1) - 2 * one @ x.T
            differ = names - jnp.einsum("ncv,mcv->nm", jax.nn.one_hot(two, values), hot)
            return jnp.sqrt(jnp.maximum(far, 0.0) + weigh * differ) @ member

        parts = 4 if n % 4 == 0 else 2
        sums = lax.map(summed, (x.reshape(parts, -1, numbers), name.reshape(parts, -1, names))).reshape(n, k)
        own = jnp.take_along_axis(sums, group[:, None], axis=1)[:, 0] / jnp.maximum(many[group] - 1, 1)
        next_ = jnp.min(jnp.where((member > 0) | (many == 0), jnp.inf, sums / jnp.maximum(many, 1)), axis=1)
        next_ = jnp.where(jnp.isfinite(next_), next_, own)
        outline = (next_ - own) / jnp.maximum(jnp.maximum(next_, own), 1e-6)
        table = jnp.zeros((middle.shape[0], k)).at[kind, group].add(1.0)
        within = jnp.sum((x - mean[group]) ** 2, axis=0) / jnp.sum(x**2, axis=0)
        agree = jnp.mean(name == mode[group], axis=0)
        pure = jnp.sum(jnp.max(table, axis=0)) / n
        by_group = outline @ member / jnp.maximum(many, 1)
        return group, cost, count, mean, mode, pure, outline, by_group, 1 - within, agree

    inputs = integers(n, below=k), normal(k, numbers), normal(n, numbers), integers(k, names, below=values)
    return Built(run, (*inputs, integers(n, names, below=values), integers(n, names, below=10), integers(below=1000)))


@program("scann-codes-that-mind-errors-along-a-row-more-than-across-it-learned-then-searched-twice", GROUP)
def _anisotropic(size: Size) -> Built:
    """This program learns small codes of rows for search by products, where errors along a row cost more than those across it.

    It is the anisotropic quantisation of ScaNN (Guo, 2019; google-research): codes of parts are chosen in turn, middles solve small
    systems, then queries sum up tables by codes, and the best rows are measured again with bytes.
    """
    n, d, parts, middles, rounds, queries, pool, keep, cost = pick(
        size,
        (16384, 128, 16, 16, 2, 256, 200, 10, 4.0),
        (1536, 32, 8, 16, 3, 64, 60, 10, 4.0),
        (18, 6, 3, 2, 2, 3, 6, 2, 4.0),
    )
    part = d // parts

    def run(low, lift, noise, pick_, asked):
        """This gives books, codes, losses by round, found rows with products, recalls of both looks, and errors."""
        x = jnp.tanh(low @ lift) + 0.3 * noise
        x = x * lax.rsqrt(jnp.sum(x**2, axis=1, keepdims=True))
        query = jnp.tanh(asked @ lift)
        query = query * lax.rsqrt(jnp.sum(query**2, axis=1, keepdims=True))
        cut = x.reshape(n, parts, part)
        book = jnp.swapaxes(cut[pick_], 0, 1)

        def chosen(book, code):
            """This chooses codes of parts in turn while all other parts stay; the error along a row ties them together."""
            along = jnp.einsum("npd,pmd->npm", cut, book)
            square = jnp.sum((cut[:, :, None] - book) ** 2, axis=3)
            whole = jnp.sum(cut**2, axis=2)

            def one(carry, k):
                """This is one part."""
                code, total = carry
                mine, gap = along[:, k], square[:, k]
                old = jnp.take_along_axis(mine, code[:, k, None], axis=1)[:, 0]
                rest = total + old - whole[:, k]
                fit = gap + (cost - 1) * (rest[:, None] + whole[:, k, None] - mine) ** 2
                fresh = jnp.argmin(fit, axis=1)
                new = jnp.take_along_axis(mine, fresh[:, None], axis=1)[:, 0]
                return (code.at[:, k].set(fresh), rest + whole[:, k] - new), None

            read = jnp.take_along_axis(along, code[:, :, None], axis=2)[..., 0]
            (code, total), _ = lax.scan(one, (code, jnp.sum(whole - read, axis=1)), jnp.arange(parts))
            error = jnp.sum(jnp.take_along_axis(square, code[:, :, None], axis=2)[..., 0], axis=1)
            return code, jnp.stack([jnp.mean(error), jnp.mean(total**2)])

        def moved(book, code):
            """This solves for the middles of one part after the other."""

            def one(book, k):
                """This solves systems of the middles of a part."""
                read = book[jnp.arange(parts), code]
                rest = jnp.sum(cut * (cut - read), axis=(1, 2)) + jnp.sum(cut[:, k] * read[:, k], axis=1)
                member = jax.nn.one_hot(code[:, k], middles)
                many = jnp.sum(member, axis=0)
                mine = cut[:, k]
                gram = jnp.einsum("nm,nd,ne->mde", member, mine, mine) * (cost - 1)
                gram = gram + (many[:, None, None] + 1e-3) * jnp.eye(part)
                wanted = member.T @ (mine + (cost - 1) * rest[:, None] * mine)
                fresh = jnp.linalg.solve(gram, (wanted + 1e-3 * book[k])[..., None])[..., 0]
                return book.at[k].set(fresh), None

            return lax.scan(one, book, jnp.arange(parts))[0]

        def round_(carry, _):
            """This chooses codes and moves middles."""
            book, code = carry
            code, error = chosen(book, code)
            return (moved(book, code), code), error

        near = jnp.argmin(jnp.sum((cut[:, :, None] - book) ** 2, axis=3), axis=2)
        (book, code), errors = lax.scan(round_, (book, near), None, length=rounds)
        code, last = chosen(book, code)
        table = jnp.einsum("qpd,pmd->qpm", query.reshape(queries, parts, part), book)
        low_, high = jnp.min(table, axis=(1, 2), keepdims=True), jnp.max(table, axis=(1, 2), keepdims=True)
        step = (high - low_) / 255
        byte = jnp.round((table - low_) / step).astype(jnp.uint8)
        total = lax.fori_loop(
            0, parts, lambda k, s: s + byte[:, k][:, code[:, k]].astype(jnp.int32), jnp.zeros((queries, n), jnp.int32)
        )
        guess, at = lax.top_k(total, pool)
        guess = guess * step[:, :, 0] + parts * low_[:, :, 0]
        scale = jnp.max(jnp.abs(x), axis=0) / 127
        small = jnp.round(x / scale).astype(jnp.int8)
        again = jnp.einsum("qd,qkd->qk", query * scale, small[at].astype(jnp.float32))
        best, order = lax.top_k(again, keep)
        found = jnp.take_along_axis(at, order, axis=1)
        exact = query @ x.T
        _, true = lax.top_k(exact, keep)
        recall = [jnp.mean(jnp.any(true[:, :, None] == z[:, None], axis=2), axis=1) for z in (at[:, :keep], at, found)]
        wrong = jnp.mean(jnp.abs(guess - jnp.take_along_axis(exact, at, axis=1)), axis=1)
        return book, code.astype(jnp.uint8), errors, last, found, best, jnp.stack(recall), wrong

    hidden = d // 2
    inputs = normal(n, hidden), normal(hidden, d, scale=hidden**-0.5), normal(n, d)
    return Built(run, (*inputs, integers(middles, below=n, distinct=True), normal(queries, hidden)))


@program("eend-eda-who-speaks-when-by-drawn-speakers-best-order-loss-and-share-of-time-told-wrong-grad", GROUP)
def _speakers(size: Size) -> Built:
    """This program learns who speaks when in talks with several voices, also at once, and marks how much time is told wrong.

    It is EEND with attractors (Horiguchi, 2020; hitachi-speech/EEND): frames attend to each other, an LSTM reads shuffled frames
    and another one gives a row for each voice, the loss takes the best order of voices, and told speech is smoothed by medians.
    """
    b, long, bins, n, h, depth, voices, median = pick(
        size, (32, 300, 345, 256, 4, 4, 4, 11), (4, 100, 80, 96, 4, 2, 3, 11), (2, 9, 4, 8, 2, 1, 2, 3)
    )
    dtype, d = half(size), n // h
    orders = np.array(list(itertools.permutations(range(voices))))

    def unit(q, carry, x):
        """This is one step of an LSTM."""
        state, cell = carry
        gates = (x @ q["enter"] + state @ q["again"] + q["shift"]).astype(jnp.float32)
        enter, forget, fresh, leave = jnp.split(gates, 4, axis=-1)
        cell = jax.nn.sigmoid(forget + 1) * cell + jax.nn.sigmoid(enter) * jnp.tanh(fresh)
        state = (jax.nn.sigmoid(leave) * jnp.tanh(cell)).astype(dtype)
        return (state, cell), state

    def run(p, sound, turns, marks, count, seed):
        """This gives the loss and parts, slopes, best orders, chances of voices, and missed, false and confused shares of time."""
        many = 1 + count
        walk = jnp.cumsum(turns, axis=1) * 0.4 + 0.5 * turns
        walk = walk - jnp.mean(walk, axis=1, keepdims=True)
        real = (walk > 0.2) & (jnp.arange(voices) < many[:, None])[:, None]
        truth = real.astype(jnp.float32)
        x = (sound + 0.7 * jnp.einsum("btv,bvf->btf", truth, marks)).astype(dtype)

        def layer(x, q):
            """This is one layer over frames."""
            rows = (layer_norm(q["norm1"], x) @ q["qkv"]).reshape(b, long, 3, h, d)
            y = jax.nn.dot_product_attention(rows[:, :, 0], rows[:, :, 1], rows[:, :, 2])
            x = x + y.reshape(b, long, n) @ q["out"]
            return x + dense(q["down"], jax.nn.relu(dense(q["up"], layer_norm(q["norm2"], x)))), None

        def loss(p):
            """This is the surprise of speech in the best order of voices, and that of whether a voice is there."""
            y = layer_norm(p["norm0"], dense(p["enter"], x))
            y = layer_norm(p["norm"], lax.scan(layer, y, p["layers"])[0])
            order = jax.random.permutation(jax.random.key(seed), long)
            begin = jnp.zeros((b, n), dtype), jnp.zeros((b, n))
            carry, _ = lax.scan(lambda c, z: unit(p["read"], c, z), begin, jnp.swapaxes(y[:, order], 0, 1))
            none = jnp.zeros((voices + 1, b, n), dtype)
            _, rows = lax.scan(lambda c, z: unit(p["write"], c, z), carry, none)
            rows = jnp.swapaxes(rows, 0, 1)
            alive = dense(p["alive"], rows)[..., 0].astype(jnp.float32)
            wanted = (jnp.arange(voices + 1) < many[:, None]).astype(jnp.float32)
            asked = (jnp.arange(voices + 1) <= many[:, None]).astype(jnp.float32)
            exist = jnp.sum((jax.nn.softplus(alive) - wanted * alive) * asked) / jnp.sum(asked)
            logits = jnp.einsum("btn,bvn->btv", y, rows[:, :-1], preferred_element_type=jnp.float32)
            valid = (jnp.arange(voices) < many[:, None]).astype(jnp.float32)
            cross = jnp.einsum("btv,btw->bvw", logits, truth) / long
            pairs = (jnp.mean(jax.nn.softplus(logits), axis=1)[:, :, None] - cross) * valid[:, None] * valid[..., None]
            spare = jnp.where(valid[:, None] == valid[..., None], pairs, 1e3)
            sums = jnp.sum(spare[:, jnp.arange(voices), orders], axis=2)
            best = jnp.argmin(lax.stop_gradient(sums), axis=1)
            speech = jnp.mean(jnp.take_along_axis(sums, best[:, None], axis=1)[:, 0] / many)
            return speech + exist, (jnp.stack([speech, exist]), best, jax.nn.sigmoid(logits), alive)

        (value, (parts, best, chance, alive)), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        padded = jnp.pad((chance > 0.5).astype(jnp.float32), ((0, 0), (median // 2, median // 2), (0, 0)))
        window = jnp.stack([padded[:, k : k + long] for k in range(median)], axis=-1)
        told = (jnp.median(window, axis=-1) > 0.5) & (jnp.arange(voices) < many[:, None])[:, None]
        moved = jnp.take_along_axis(real, jnp.asarray(orders)[best][:, None], axis=2)
        ours, theirs, right = (jnp.sum(z, axis=2) for z in (told, moved, told & moved))
        time = jnp.maximum(jnp.sum(theirs, axis=1), 1)
        missed, false = (jnp.sum(jnp.maximum(z, 0), axis=1) / time for z in (theirs - ours, ours - theirs))
        confused = jnp.sum(jnp.minimum(ours, theirs) - right, axis=1) / time
        slope = jax.tree.map(lambda z: z.astype(jnp.float32), slopes)
        long_ = jnp.sqrt(sum(jnp.sum(z**2) for z in jax.tree.leaves(slope)))
        errors = jnp.stack([missed, false, confused, missed + false + confused])
        return value, parts, slopes, long_, best, chance, jax.nn.sigmoid(alive), errors

    def stacked(r):
        """This makes one layer's description into that of all layers."""
        return normal(depth, *r.shape, dtype=dtype, scale=r.scale, offset=r.offset)

    lstm = {
        "enter": normal(n, 4 * n, dtype=dtype, scale=n**-0.5),
        "again": normal(n, 4 * n, dtype=dtype, scale=n**-0.5),
    }
    lstm |= {"shift": normal(4 * n, dtype=dtype, scale=0.1)}
    one = {"norm1": norm_of(n, dtype), "norm2": norm_of(n, dtype), "qkv": dense_of(n, 3 * n, dtype)["w"]}
    one |= {"out": dense_of(n, n, dtype)["w"], "up": dense_of(n, 4 * n, dtype), "down": dense_of(4 * n, n, dtype)}
    layers = jax.tree.map(stacked, one, is_leaf=lambda r: hasattr(r, "offset"))
    p = {"enter": dense_of(bins, n, dtype), "norm0": norm_of(n, dtype), "norm": norm_of(n, dtype), "layers": layers}
    p |= {"read": lstm, "write": lstm, "alive": dense_of(n, 1, dtype)}
    inputs = normal(b, long, bins), normal(b, long, voices), normal(b, voices, bins), integers(b, below=voices)
    return Built(run, (p, *inputs, integers(below=1000)))
