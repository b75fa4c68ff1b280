"""Paths over maps, candidates of least risk, ranked boxes, flows on graphs and signs of vectors: their author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import conv, dense, dense_of, kernel_of

GROUP = "thirty-seventh"


@program("perturbed-shortest-paths-over-costs-of-maps-fenchel-young-grad-optax", GROUP)
def _paths(size: Size) -> Built:
    """This program gives slopes of a network that learns costs of terrain from shortest paths alone.

    It is the perturbed optimiser of Berthet (2020; google-research/perturbations) on maps like those of Warcraft, with
    `make_fenchel_young_loss` of optax: costs are shaken many times, each time the shortest path is found by sweeps and walked back.
    """
    import optax

    b, grid, cell, samples, width = pick(size, (32, 12, 8, 32, 64), (8, 12, 8, 6, 32), (2, 3, 4, 2, 4))
    dtype, sigma, far, side = half(size), 0.5, 1e4, grid * cell
    moves = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]
    steps = jnp.asarray(np.array(moves), jnp.int32)

    def around(x):
        """This gives the values of the eight neighbours of each cell [8, grid, grid]."""
        padded = jnp.pad(x, 1, constant_values=far)
        return jnp.stack([padded[1 + i : 1 + i + grid, 1 + j : 1 + j + grid] for i, j in moves])

    def shortest(cost):
        """This marks cells of the shortest path from corner to corner, by sweeps over all cells."""
        cost = jnp.maximum(cost, 0.02)
        start = jnp.full((grid, grid), far).at[0, 0].set(cost[0, 0])

        def sweep(_, length):
            """This lets lengths spread to neighbours."""
            return jnp.minimum(length, jnp.min(around(length), axis=0) + cost)

        length = lax.fori_loop(0, 3 * grid, sweep, start)
        back = jnp.argmin(around(length), axis=0)

        def walk(carry, _):
            """This goes one cell back."""
            at, path = carry
            path = path.at[at[0], at[1]].set(1.0)
            return (jnp.where(jnp.all(at == 0), at, at + steps[back[at[0], at[1]]]), path), None

        end = jnp.full((2,), grid - 1, jnp.int32)
        (_, path), _ = lax.scan(walk, (end, jnp.zeros((grid, grid))), None, length=3 * grid)
        return path

    def run(p, picture, true, seed):
        """This gives the loss, slopes, how often the found path costs no more than the true one, and mean paths."""
        label = jax.vmap(shortest)(jax.nn.softplus(true))
        noise = sigma * optax.perturbations.Normal().sample(jax.random.key(seed), (samples, grid * grid))

        def largest(score):
            """This is the mean value of best paths under shaken scores; its slope is the mean path."""
            shaken = score + noise
            best = jax.vmap(shortest)(lax.stop_gradient(-shaken).reshape(samples, grid, grid))
            return jnp.mean(jnp.sum(best.reshape(samples, -1) * shaken, axis=1))

        measure = optax.losses.make_fenchel_young_loss(largest)

        def scored(p):
            """This tells scores of cells, which are costs with the other sign."""
            x = jax.nn.relu(conv(picture, p["stem"], 2))
            for q in p["blocks"]:
                y = jax.nn.relu(conv(x, q["one"]))
                x = jax.nn.relu(x + conv(y, q["two"]))
            b, rows, columns, c = x.shape
            x = x.reshape(b, grid, rows // grid, grid, columns // grid, c).max(axis=(2, 4))
            return -jax.nn.softplus(dense(p["head"], x)[..., 0].astype(jnp.float32))

        def loss(p):
            """This is the mean loss of maps."""
            score = scored(p)
            return jnp.mean(measure(score.reshape(b, -1), label.reshape(b, -1))), score

        (value, score), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        found = jax.vmap(shortest)(-score)
        costs = (jnp.sum(z * jax.nn.softplus(true), axis=(1, 2)) for z in (found, label))
        regret = jnp.subtract(*costs)
        return value, slopes, jnp.mean(regret < 1e-3), regret, jnp.mean(found, axis=0)

    blocks = [{k: kernel_of(3, width, width, dtype) for k in ("one", "two")} for _ in range(3)]
    p = {"stem": kernel_of(5, 3, width, dtype), "blocks": blocks, "head": dense_of(width, 1, dtype)}
    picture = normal(b, side, side, 3, dtype=dtype)
    return Built(run, (p, picture, normal(b, grid, grid, scale=1.5), integers(below=1000)))


@program("bertscore-among-all-candidates-with-rare-words-picks-least-risk", GROUP)
def _risk(size: Size) -> Built:
    """This program picks the translation that is most alike to all other candidates, by greedy matches of word states.

    It is decoding by least Bayes risk with BERTScore (Zhang, 2020; Tiiiger/bert_score; Fernandes, 2022): words weigh by how few
    sentences hold them, a baseline is taken off, candidates weigh by their chances, and a chain of them is tried as well.
    """
    b, many, t, n, words, baseline = pick(
        size, (8, 32, 64, 1024, 30522, 0.83), (4, 20, 40, 256, 8000, 0.3), (1, 3, 4, 4, 9, 0.2)
    )
    dtype = half(size)

    def run(state, word, short, logp):
        """This gives the picked candidate of each sentence by three measures, values of all pairs, and gains of picking."""
        real = jnp.arange(t) < t - short[..., None]
        unit = state.astype(jnp.float32)
        unit = unit * lax.rsqrt(jnp.sum(jnp.square(unit), axis=-1, keepdims=True) + 1e-9)
        unit = unit.astype(dtype)
        sentence = jnp.arange(b * many)[:, None]
        held = jnp.zeros((b * many, words), bool).at[sentence, word.reshape(b * many, t)].max(real.reshape(b * many, t))
        rare = jnp.log((b * many + 1) / (jnp.sum(held, axis=0) + 1))
        weigh = jnp.where(real, rare[word] + 1e-3, 0.0)
        weigh = weigh / jnp.sum(weigh, axis=-1, keepdims=True)

        def pairs(z):
            """This scores all pairs of candidates of one sentence [many, many]: which words find a match."""
            unit, real, weigh = z
            alike = jnp.einsum("itd,jsd->ijts", unit, unit, preferred_element_type=jnp.float32)
            alike = jnp.where(real[:, None, :, None] & real[None, :, None], alike, -1.0)
            exact = jnp.einsum("ijt,it->ij", jnp.max(alike, axis=3), weigh)
            recall = jnp.einsum("ijs,js->ij", jnp.max(alike, axis=2), weigh)
            return (jnp.stack([exact, recall, 2 * exact * recall / (exact + recall)]) - baseline) / (1 - baseline)

        value = lax.map(pairs, (unit, real, weigh))
        chance = jax.nn.softmax(logp / jnp.sum(real, axis=-1), axis=-1)
        others = ~jnp.eye(many, dtype=bool)
        mean = jnp.sum(jnp.where(others, value, 0.0) * chance[:, None, None], axis=-1)
        mean = mean / (1 - chance)[:, None]
        best = jnp.argmax(mean, axis=-1)
        top = jnp.max(mean, axis=-1)
        likely = jnp.take_along_axis(mean, jnp.argmax(logp, axis=-1)[:, None, None], axis=2)[..., 0]
        spread = jnp.sqrt(jnp.mean(jnp.square(mean - jnp.mean(mean, axis=-1, keepdims=True)), axis=-1))
        return best, value, top - likely, (top - jnp.mean(mean, axis=-1)) / (spread + 1e-6), rare

    inputs = normal(b, many, t, n, dtype=dtype, offset=0.6), integers(b, many, t, below=words)
    return Built(run, (*inputs, integers(b, many, below=max(t // 2, 1)), normal(b, many, scale=20.0, offset=-60.0)))


@program("boxes-matched-greedily-at-ten-overlaps-and-four-sizes-mean-precision", GROUP)
def _precision(size: Size) -> Built:
    """This program marks an object detector by mean precision over ten overlaps, all classes and four ranges of sizes.

    It is the measure of COCO (Lin, 2014; cocodataset/cocoapi): boxes in order of scores take the best free true box of their
    class, crowds and boxes of other sizes are neither right nor wrong, and precision is read at 101 places of recall.
    """
    images, found, most, classes, at_once = pick(size, (96, 100, 40, 80, 16), (48, 60, 20, 20, 10), (3, 5, 3, 2, 2))
    limits = jnp.asarray(np.linspace(0.5, 0.95, 10), jnp.float32)
    low, high = jnp.asarray([0.0, 0.0, 1024.0, 9216.0]), jnp.asarray([1e10, 1024.0, 9216.0, 1e10])
    recalls = jnp.asarray(np.linspace(0.0, 1.0, 101), jnp.float32)

    def corners(box):
        """This makes corners of middles and of logarithms of sides."""
        middle, sides = 320 + 120 * box[..., :2], jnp.exp(4.0 + 0.8 * box[..., 2:])
        return jnp.concatenate([middle - sides / 2, middle + sides / 2], axis=-1)

    def area(box):
        """This is the area of boxes."""
        return (box[..., 2] - box[..., 0]) * (box[..., 3] - box[..., 1])

    def matched(box, score, kind, true, label, crowd, real):
        """This matches boxes of one picture: which are right and which are left out [4, 10, found], by falling scores."""
        order = jnp.argsort(-score)
        box, kind = box[order], kind[order]
        one, two = jnp.maximum(box[:, None, :2], true[:, :2]), jnp.minimum(box[:, None, 2:], true[:, 2:])
        both = jnp.prod(jnp.maximum(two - one, 0.0), axis=-1)
        over = both / jnp.where(crowd, area(box)[:, None], area(box)[:, None] + area(true) - both)
        over = jnp.where((kind[:, None] == label) & real, over, 0.0)
        inside = (area(true) >= low[:, None]) & (area(true) < high[:, None])
        aside = crowd | ~inside

        def take(free, over):
            """This lets one box take a true box at each range of sizes and each overlap."""
            good = (free | crowd) & (over >= limits[:, None] - 1e-9)
            rank = jnp.where(good, over + 2.0 * ~aside[:, None], -1.0)
            which = jnp.argmax(rank, axis=-1)
            hit = jnp.max(rank, axis=-1) > 0
            free = free & ~(jax.nn.one_hot(which, most, dtype=bool) & hit[..., None])
            left = hit & jnp.take_along_axis(jnp.broadcast_to(aside[:, None], free.shape), which[..., None], 2)[..., 0]
            return free, (hit & ~left, hit, left)

        _, (right, hit, left) = lax.scan(take, jnp.broadcast_to(real, (4, 10, most)), over)
        size_of = area(box)[:, None]
        outside = ((size_of < low) | (size_of >= high))[:, :, None]
        counted = jnp.zeros((classes, 4)).at[label].add((real & ~aside).T.astype(jnp.float32))
        return score[order], kind, right, left | (~hit & outside), counted

    def run(box, logits, true, label, crowd, short):
        """This gives mean precision as the usual twelve numbers do, by class, and the curves of precision."""
        real = jnp.arange(most) < most - short[:, None]
        score, kind = jnp.max(jax.nn.sigmoid(logits), axis=-1), jnp.argmax(logits, axis=-1)
        near = true[:, jnp.arange(found) % most] + 0.04 * box
        kind = jnp.where(logits[..., 0] > -3.0, label[:, jnp.arange(found) % most], kind)
        score, kind, right, left, counted = jax.vmap(matched)(
            corners(near), score, kind, corners(true), label, crowd == 0, real
        )
        order = jnp.argsort(-score.reshape(-1), stable=True)
        kind = kind.reshape(-1)[order]
        right, left = (z.reshape(-1, 4, 10)[order].transpose(1, 2, 0) for z in (right, left))
        total = jnp.sum(counted, axis=0)

        def curve(c):
            """This is precision of one class at places of recall [4, 10, 101], and the largest recall."""
            mine = (kind == c) & ~left
            yes, no = (jnp.cumsum((mine & z).astype(jnp.float32), axis=-1) for z in (right, ~right))
            recall = yes / jnp.maximum(total[c], 1.0)[:, None, None]
            exact = lax.cummax(yes / jnp.maximum(yes + no, 1.0), axis=2, reverse=True)
            search = jax.vmap(jax.vmap(lambda r: jnp.searchsorted(r, recalls, side="left")))
            place = search(recall)
            value = jnp.take_along_axis(exact, jnp.minimum(place, exact.shape[-1] - 1), axis=-1)
            return jnp.where(place < exact.shape[-1], value, 0.0), recall[..., -1]

        exact, recall = lax.map(curve, jnp.arange(classes), batch_size=at_once)
        there = (total > 0).astype(jnp.float32)
        by_class = jnp.mean(exact, axis=(2, 3)) * there
        means = jnp.sum(by_class, axis=0) / jnp.maximum(jnp.sum(there, axis=0), 1)
        strict = jnp.sum(jnp.mean(exact, axis=3) * there[..., None], axis=0) / jnp.sum(there, axis=0)[:, None]
        return means, strict[0, 0], strict[0, 5], by_class, jnp.mean(recall, axis=(0, 2)), jnp.mean(exact[:, 0], axis=0)

    inputs = normal(images, found, 4), normal(images, found, classes, scale=1.5, offset=-2.0)
    truth = normal(images, most, 4), integers(images, most, below=classes), integers(images, most, below=25)
    return Built(run, (*inputs, *truth, integers(images, below=most)))


@program("flows-on-a-graph-of-proteins-spread-and-sharpened-until-still-while", GROUP)
def _flows(size: Size) -> Built:
    """This program clusters proteins by flows on the graph of their likeness, which are spread and sharpened in turns.

    It is the Markov cluster process (van Dongen, 2000; micans.org/mcl): columns of chances are squared as a matrix and raised to
    a power, small ones are pruned and what is lost is given back, until chaos is small; clusters are named by their attractors.
    """
    n, edges, family, rounds = pick(size, (2560, 60000, 40, 30), (360, 6000, 18, 30), (6, 20, 3, 4))
    inflation, small = 2.0, 1e-4

    def run(one, step, stray, far, score):
        """This gives clusters, how large they are, how many rounds it took, chaos, shares of flow kept, and modularity."""
        within = (one // family) * family + step
        two = jnp.minimum(jnp.where(stray == 0, far, within), n - 1)
        like = jax.nn.softplus(score)
        graph = jnp.zeros((n, n)).at[one, two].max(like)
        graph = jnp.maximum(graph, graph.T) * ~jnp.eye(n, dtype=bool)
        loops = jnp.maximum(jnp.max(graph, axis=0), 1.0)
        flow = graph + jnp.diag(loops)
        flow = flow / jnp.sum(flow, axis=0)

        def again(carry):
            """This spreads, sharpens and prunes once."""
            flow, _, _, k = carry
            wide = flow @ flow
            sharp = wide**inflation
            sharp = sharp / jnp.sum(sharp, axis=0)
            keep = sharp >= jnp.minimum(small, jnp.max(sharp, axis=0))
            cut = jnp.where(keep, sharp, 0.0)
            mass = jnp.sum(cut, axis=0)
            cut = cut / mass
            peak, square = jnp.max(cut, axis=0), jnp.sum(cut * cut, axis=0)
            return cut, jnp.max((peak - square) * jnp.sum(keep, axis=0)), jnp.mean(mass), k + 1

        def moving(carry):
            """This tells whether flows still change."""
            return (carry[1] > 1e-3) & (carry[3] < rounds)

        flow, chaos, mass, k = lax.while_loop(moving, again, (flow, jnp.inf, jnp.float32(1.0), jnp.int32(0)))
        attractor = jnp.diagonal(flow) > 1e-3
        best = jnp.argmax(jnp.where(attractor[:, None], flow, -1.0), axis=0)
        joined = (flow > 1e-3) & attractor[:, None] & attractor
        joined = joined | joined.T | jnp.eye(n, dtype=bool)
        name = jnp.min(jnp.where(joined, jnp.arange(n), n), axis=1)[best]
        many = jnp.zeros(n, jnp.int32).at[name].add(1)
        degree = jnp.sum(graph, axis=0)
        weight = jnp.sum(degree)
        inner = jnp.sum(graph * (name[:, None] == name)) / weight
        strength = jnp.zeros(n).at[name].add(degree) / weight
        return name, many, jnp.sum(many > 0), k, chaos, mass, inner - jnp.sum(strength**2)

    pairs = integers(edges, below=n), integers(edges, below=family), integers(edges, below=12), integers(edges, below=n)
    return Built(run, (*pairs, normal(edges, offset=1.0)))


@program("signs-of-turned-vectors-bound-distances-before-few-are-measured-search", GROUP)
def _signs(size: Size) -> Built:
    """This program finds nearest vectors by one bit per axis, with bounds that tell which must be measured exactly.

    It is RaBitQ (Gao, 2024; gaoj0017/RaBitQ) on lists around means: queries are turned at random, rounded at random to four bits,
    met with packed signs by counting bits plane by plane, and the candidates with the lowest bounds are measured.
    """
    q, lists, long, d, probes, exact, best = pick(
        size, (512, 1024, 256, 256, 32, 256, 10), (64, 128, 80, 128, 10, 160, 10), (3, 4, 5, 32, 2, 4, 2)
    )
    planes, words = 4, d // 32

    def run(vector, middle, turn, query, seed):
        """This gives places and distances of the nearest, how many bounds were broken, and how far estimates are off."""
        turn = jnp.linalg.qr(turn)[0]
        base = (middle[:, None] + vector).astype(jnp.float32)
        length = jnp.sqrt(jnp.sum(vector * vector, axis=-1) + 1e-12)
        turned = (vector / length[..., None]) @ turn
        shifts = jnp.arange(32, dtype=jnp.uint32)
        bits = (turned > 0).reshape(lists, long, words, 32).astype(jnp.uint32)
        code = jnp.sum(bits << shifts, axis=-1, dtype=jnp.uint32)
        ones = jnp.sum(lax.population_count(code), axis=-1).astype(jnp.float32)
        inner = jnp.sum(jnp.abs(turned), axis=-1) * d**-0.5
        error = jnp.sqrt(jnp.maximum(1 - inner**2, 0.0) / (inner**2 * (d - 1)))
        away = jnp.sum(query**2, axis=1)[:, None] - 2 * query @ middle.T + jnp.sum(middle**2, axis=1)
        near, which = lax.top_k(-away, probes)
        gap = jnp.sqrt(jnp.maximum(-near, 1e-12))
        asked = (query[:, None] - middle[which]) / gap[..., None] @ turn
        least = jnp.min(asked, axis=-1, keepdims=True)
        width = (jnp.max(asked, axis=-1, keepdims=True) - least) / (2**planes - 1)
        shaken = jax.random.uniform(jax.random.key(seed), asked.shape)
        level = jnp.clip(jnp.floor((asked - least) / width + shaken), 0, 2**planes - 1).astype(jnp.uint32)
        total = jnp.sum(level, axis=-1).astype(jnp.float32)
        met = jnp.zeros((q, probes, long), jnp.int32)
        for k in range(planes):
            plane = ((level >> k) & 1).reshape(q, probes, words, 32)
            packed = jnp.sum(plane << shifts, axis=-1, dtype=jnp.uint32)
            common = lax.population_count(code[which] & packed[:, :, None])
            met = met + (jnp.sum(common.astype(jnp.int32), axis=-1) << k)
        scale = d**-0.5
        product = 2 * scale * width * met + 2 * scale * least * ones[which]
        product = product - scale * width * total[..., None] - scale * d * least
        product = product / inner[which]
        reach = 2 * length[which] * gap[..., None]
        guess = length[which] ** 2 + gap[..., None] ** 2 - reach * product
        bound = guess - 1.9 * reach * error[which]
        flat = bound.reshape(q, probes * long)
        chosen = lax.top_k(-flat, exact)[1]
        row = jnp.take_along_axis(which, chosen // long, axis=1) * long + chosen % long
        true = jnp.sum(jnp.square(base.reshape(-1, d)[row] - query[:, None]), axis=-1)
        value, place = lax.top_k(-true, best)
        broken = jnp.take_along_axis(flat, chosen, axis=1) > true
        off = jnp.take_along_axis(guess.reshape(q, -1), chosen, axis=1) / true - 1.0
        left = jnp.sum(flat < -value[:, -1:], axis=1)
        return jnp.take_along_axis(row, place, axis=1), -value, jnp.mean(broken), jnp.mean(off), left

    parts = Random((lists, long, d), jnp.dtype(jnp.float32), 0.5), normal(lists, d), normal(d, d)
    return Built(run, (*parts, normal(q, d, scale=1.1), integers(below=1000)))
