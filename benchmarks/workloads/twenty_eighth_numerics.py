"""Markets, stars, narrowed pictures, grains and grown trees, the twenty-eighth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, booleans, integers, normal, pick, program

GROUP = "twenty-eighth"


@program("orders-of-many-books-matched-by-price-then-by-time-scan", GROUP)
def _orders(size: Size) -> Built:
    """This plays messages of traders through many books of orders: the best price goes first, and the older order among equals.

    It is JAX-LOB (Frey, 2023; KangOxford/jax-lob): all prices, sizes and times are whole numbers, a new order trades while prices
    cross, its rest takes the first free row, and cancelled orders are found by their numbers.
    """
    books, rows, messages = pick(size, (9001, 96, 40), (401, 64, 56), (3, 6, 5))
    far = jnp.int32(2**30)

    def best_of(side):
        """This is the best row of one side, whose prices are signed so that smaller ones are better, and its price."""
        price = jnp.where(side[:, 0] > 0, side[:, 1], far)
        top = jnp.min(price)
        return jnp.argmin(jnp.where(price == top, side[:, 3], far)), top

    def one(book, message):
        """This plays one message through one book of rows of size, price, number and time."""
        kind, buys, size_of, price, number, time = message
        side_of = buys.astype(jnp.int32)
        own, other = book[side_of], book[1 - side_of]
        price = jnp.where(buys, -price, price)
        wanted = jnp.where(kind < 6, size_of, 0)
        limit = jnp.where(kind == 5, far // 2, -price)

        def on(carry):
            """This tells whether the order still trades."""
            side, left, _, _ = carry
            _, top = best_of(side)
            return (left > 0) & (top <= limit)

        def trade(carry):
            """This trades with the best order of the other side."""
            side, left, paid, deals = carry
            at, top = best_of(side)
            part = jnp.minimum(left, side[at, 0])
            return side.at[at, 0].add(-part), left - part, paid + part * jnp.abs(top), deals + 1

        other, left, paid, deals = lax.while_loop(on, trade, (other, wanted, jnp.int32(0), jnp.int32(0)))
        cancelled = (kind >= 6) & (own[:, 2] == number)
        own = own.at[:, 0].set(jnp.where(cancelled, jnp.maximum(own[:, 0] - size_of, 0), own[:, 0]))
        free = jnp.argmin(own[:, 0])
        puts = (kind < 5) & (left > 0) & (own[free, 0] == 0)
        own = own.at[free].set(jnp.where(puts, jnp.stack([left, price, number, time]), own[free]))
        book = book.at[side_of].set(own).at[1 - side_of].set(other)
        _, tops = jax.vmap(best_of)(book)
        told = {"ask": tops[0], "bid": -tops[1], "traded": wanted - left, "paid": paid, "deals": deals}
        return book, told | {"cancelled": jnp.sum(cancelled)}

    def run(sizes, prices, messages_of):
        """This fills books, plays all messages and tells what traders see."""
        sign = jnp.array([1, -1])[:, None]
        price = sign * jnp.where(sign > 0, 1001 + prices, 1000 - prices)
        number = jnp.broadcast_to(jnp.arange(2 * rows).reshape(2, rows), price.shape)
        book = jnp.stack([jnp.maximum(sizes - 20, 0), price, number, number - 2 * rows], axis=-1)
        kind, buys, size_of, off, at = messages_of
        price = jnp.where(buys, 1004 - off, 997 + off)
        time = jnp.broadcast_to(jnp.arange(messages)[:, None], kind.shape)
        number = jnp.where(kind < 6, 2 * rows + time, at)
        book, told = lax.scan(jax.vmap(one), book, (kind, buys, 1 + size_of, price, number, time))
        whole = (told["ask"] < far) & (told["bid"] > -far)
        gap = jnp.where(whole, told["ask"] - told["bid"], 0)
        deep = jnp.sum(book[..., 0], axis=-1)
        mean = jnp.sum(told["paid"], axis=0) / jnp.maximum(jnp.sum(told["traded"], axis=0), 1)
        counts = {k: jnp.sum(told[k], axis=0) for k in ("traded", "deals", "cancelled")}
        return book, jnp.sum(gap, axis=0) / jnp.maximum(jnp.sum(whole, axis=0), 1), deep, mean, counts

    stream = (messages, books)
    messages_of = (integers(*stream, below=9), booleans(*stream), integers(*stream, below=60))
    messages_of += (integers(*stream, below=16), integers(*stream, below=2 * rows))
    inputs = (integers(books, 2, rows, below=70), integers(books, 2, rows, below=25))
    return Built(run, (*inputs, messages_of))


@program("dips-of-stars-found-in-light-folded-at-many-periods", GROUP)
def _dips(size: Size) -> Built:
    """This finds planets by the dips they leave when the light of stars is folded at many periods.

    It is the search by least squares of boxes (Kovács, 2002), as in astropy: light is freed of slow waves, phases become numbers of
    bins, sums over bins give all boxes, and odd and even dips are compared.
    """
    stars, t, periods, bins, wide = pick(size, (512, 4093, 192, 300, 12), (12, 1801, 180, 200, 8), (2, 61, 5, 16, 3))
    spans = np.unique(np.round(np.geomspace(2, bins // 10 + 2, wide)).astype(int))
    trial = np.exp(np.linspace(np.log(24.0), np.log(t / 4), periods)).astype(np.float32)

    def flat(light, real):
        """This takes slow waves off by running means over what is real."""
        span = t // 12 * 2 + 1
        total, count = (
            jnp.cumsum(jnp.pad(x, ((0, 0), (span // 2 + 1, span // 2))), axis=1) for x in (light * real, real)
        )
        mean = (total[:, span:] - total[:, :t]) / jnp.maximum(count[:, span:] - count[:, :t], 1.0)
        return jnp.where(real > 0, light - mean, 0.0)

    def boxes(mass, dip):
        """This judges all boxes of sums over bins [stars, bins]: where they begin and how long they are."""
        mass, dip = (jnp.cumsum(jnp.concatenate([x, x[:, : spans[-1]]], axis=1), axis=1) for x in (mass, dip))
        mass, dip = (jnp.pad(x, ((0, 0), (1, 0))) for x in (mass, dip))
        share = jnp.stack([mass[:, k : k + bins] - mass[:, :bins] for k in spans], axis=1)
        total = jnp.stack([dip[:, k : k + bins] - dip[:, :bins] for k in spans], axis=1)
        power = jnp.where((share > 0.005) & (share < 0.4) & (total < 0), total**2 / (share * (1 - share) + 1e-9), 0.0)
        power = power.reshape(stars, -1)
        at = jnp.argmax(power, axis=-1)
        return jnp.max(power, axis=-1), at // bins, at % bins

    def run(noise, waves, gaps, own):
        """This makes light with dips, flattens and folds it and tells the best period of each star."""
        time = jnp.arange(t, dtype=jnp.float32)
        period = 30.0 + jnp.abs(own[:, :1]) * t / 10
        inside = jnp.mod(time + 20 * own[:, 1:2], period) < 0.04 * period
        light = 1 + 0.2 * noise + 0.5 * jnp.sin(time / t * 20 + waves[:, :1]) - 0.3 * inside
        real = jnp.broadcast_to(gaps.astype(jnp.float32), noise.shape)
        light = flat(light, real)
        weigh = real / jnp.maximum(jnp.sum(real, axis=1, keepdims=True), 1.0)
        rows = jnp.concatenate([weigh, weigh * (light - jnp.sum(weigh * light, axis=1, keepdims=True))]).T

        def fold(p):
            """This folds all stars at one period."""
            at = jnp.minimum((jnp.mod(time / p, 1.0) * bins).astype(jnp.int32), bins - 1)
            sums = jax.ops.segment_sum(rows, at, bins).T
            return boxes(sums[:stars], sums[stars:])

        power, long, start = lax.map(fold, jnp.asarray(trial))
        best = jnp.argmax(power, axis=0)
        stand = (jnp.max(power, axis=0) - jnp.mean(power, axis=0)) / (jnp.std(power, axis=0) + 1e-12)
        one = jnp.arange(stars)
        p, k, s = jnp.asarray(trial)[best], jnp.asarray(spans)[long[best, one]], start[best, one]
        turn = time / p[:, None]
        at = jnp.minimum((jnp.mod(turn, 1.0) * bins).astype(jnp.int32), bins - 1)
        hit = (jnp.mod(at - s[:, None], bins) < k[:, None]) & (real > 0)

        def depth(mask):
            """This is the mean dip where a mask is true, and how many times there are."""
            count = jnp.sum(mask, axis=1)
            return -jnp.sum(light * mask, axis=1) / jnp.maximum(count, 1), count

        (all_deep, count), (deep1, _) = (depth(m) for m in (hit, hit & (jnp.mod(turn, 2.0) > 1)))
        firm = all_deep / jnp.std(light, axis=1) * jnp.sqrt(count.astype(jnp.float32))
        return p, stand, all_deep, firm, deep1 - all_deep, count, power

    return Built(run, (normal(stars, t), normal(stars, 2), booleans(t), normal(stars, 2)))


@program("photographs-narrowed-along-seams-of-least-change", GROUP)
def _seams(size: Size) -> Built:
    """This makes photographs narrower by taking out, again and again, the path from top to bottom that is missed least.

    It is seam carving (Avidan, 2007), with whole numbers: costs of paths come from rows above, the least end is followed back, and
    what lies right of the path moves left.
    """
    b, rows, columns, seams = pick(size, (48, 200, 613, 5), (6, 150, 301, 10), (2, 6, 9, 2))
    big = jnp.int32(2**24)

    def change(grey, left):
        """This is how much each pixel differs from its neighbours; pixels that are gone cost much."""
        gone = jnp.arange(columns) >= left
        right = jnp.where(jnp.arange(columns) + 1 >= left, grey, jnp.roll(grey, -1, axis=-1))
        before = jnp.concatenate([grey[..., :1], grey[..., :-1]], axis=-1)
        below = jnp.concatenate([grey[:, 1:], grey[:, -1:]], axis=1)
        above = jnp.concatenate([grey[:, :1], grey[:, :-1]], axis=1)
        return jnp.where(gone, big, jnp.abs(right - before) + jnp.abs(below - above))

    def down(cost, now):
        """This goes one row down and keeps from which of three pixels each one is reached."""
        sides = jnp.pad(cost, ((0, 0), (1, 1)), constant_values=big)
        three = jnp.stack([sides[:, :-2], cost, sides[:, 2:]])
        return jnp.minimum(jnp.min(three, axis=0) + now, big), (jnp.argmin(three, axis=0) - 1).astype(jnp.int8)

    def up(at, came):
        """This goes one row up along the path."""
        at = at + jnp.take_along_axis(came, at[:, None], axis=1)[:, 0].astype(jnp.int32)
        return at, at

    def run(pictures):
        """This narrows pictures and tells what was lost."""
        soft = pictures.astype(jnp.int32)
        soft = (soft + jnp.roll(soft, 1, axis=1) + jnp.roll(soft, 1, axis=2) + jnp.roll(soft, (1, 1), axis=(1, 2))) // 4

        def narrower(k, carry):
            """This takes one path out of every picture."""
            x, lost, paths = carry
            grey = (77 * x[..., 0] + 150 * x[..., 1] + 29 * x[..., 2]) // 256
            cost = change(grey, columns - k).swapaxes(0, 1)
            last, came = lax.scan(down, cost[0], cost[1:])
            end = jnp.argmin(last, axis=-1).astype(jnp.int32)
            _, path = lax.scan(up, end, came, reverse=True)
            path = jnp.concatenate([path, end[None]]).T
            moved = (jnp.arange(columns) >= path[..., None])[..., None]
            x = jnp.where(moved, jnp.roll(x, -1, axis=2).at[:, :, -1].set(0), x)
            return x, lost.at[k].set(jnp.min(last, axis=-1)), paths.at[k].set(path)

        start = (soft, jnp.zeros((seams, b), jnp.int32), jnp.zeros((seams, b, rows), jnp.int32))
        x, lost, paths = lax.fori_loop(0, seams, narrower, start)
        bends = jnp.sum(jnp.abs(jnp.diff(paths, axis=-1)), axis=-1)
        often = jax.vmap(lambda p: jnp.bincount(p.reshape(-1), length=columns))(paths.swapaxes(0, 1))
        return x[:, :, : columns - seams].astype(jnp.uint8), lost, bends, often, jnp.argmax(often, axis=-1)

    return Built(run, (Random((b, rows, columns, 3), jnp.dtype(jnp.uint8), below=256),))


@program("grains-parted-from-ground-by-counts-of-greys-and-numbered-while", GROUP)
def _grains(size: Size) -> Built:
    """This parts bright grains from the ground by a histogram, numbers those that hang together and measures each of them.

    It is the threshold of Otsu (1979) and connected components, as in scikit-image: numbers spread to neighbours and jump along
    their roots until nothing changes, small grains go, and the largest ones are told.
    """
    b, side, top, rounds = pick(size, (12, 768, 50, 4), (1, 208, 20, 3), (2, 24, 3, 2))
    cells = side * side

    def smooth(x):
        """This sums pixels over windows and scales them back to a byte."""
        for _ in range(rounds):
            x = lax.reduce_window(x, 0, lax.add, (1, 3, 3), (1, 1, 1), "SAME") // 9
        low, high = (f(x, axis=(1, 2), keepdims=True) for f in (jnp.min, jnp.max))
        return (x - low) * 255 // jnp.maximum(high - low, 1)

    def threshold(x):
        """This is the grey that parts the counts of greys into two sorts with the most between them."""
        count = jnp.zeros(256, jnp.int32).at[x.reshape(-1)].add(1)
        share = count / cells
        low = jnp.cumsum(share)
        mean = jnp.cumsum(share * jnp.arange(256))
        between = (mean[-1] * low - mean) ** 2 / jnp.maximum(low * (1 - low), 1e-9)
        return jnp.argmax(jnp.where((low > 0) & (low < 1), between, 0.0)), count

    def numbered(bright):
        """This gives pixels of one grain the same number, the largest place in it, and tells how many rounds that took."""
        start = jnp.where(bright, jnp.arange(1, cells + 1).reshape(side, side), 0)

        def spread(carry):
            """This spreads numbers to neighbours and jumps to the number of the pixel that a number names."""
            name, _, count = carry
            fresh = lax.reduce_window(name, 0, lax.max, (3, 3), (1, 1), "SAME")
            fresh = jnp.where(bright, fresh, 0)
            for _ in range(2):
                fresh = jnp.where(bright, fresh.reshape(-1)[jnp.maximum(fresh - 1, 0)], 0)
            return fresh, jnp.any(fresh != name), count + 1

        name, _, count = lax.while_loop(lambda carry: carry[1], spread, (start, jnp.bool(True), jnp.int32(0)))
        return name.reshape(-1), count

    def measured(name, grey):
        """This measures grains by sums over the pixels of a number."""
        area = jnp.zeros(cells + 1, jnp.int32).at[name].add(1).at[0].set(0)
        live = area >= 6
        number = jnp.cumsum(live) * live
        label = number[name]
        size_of, at = lax.top_k(jnp.where(live, area, 0), top)
        y, x = jnp.arange(cells) // side, jnp.arange(cells) % side
        middle = [jax.ops.segment_sum(z.astype(jnp.float32), name, cells + 1)[at] for z in (y, x, grey.reshape(-1))]
        box = [jax.ops.segment_min(z, name, cells + 1)[at] for z in (y, x)]
        box += [jax.ops.segment_max(z, name, cells + 1)[at] for z in (y, x)]
        found = size_of > 0
        middle = jnp.where(found, jnp.stack(middle) / jnp.maximum(size_of, 1), 0.0)
        sides = label.reshape(side, side)
        edge = (sides[:, 1:] != sides[:, :-1]).sum() + (sides[1:] != sides[:-1]).sum()
        return sides, size_of, middle, jnp.where(found, jnp.stack(box), -1), jnp.sum(live), edge

    def run(pictures):
        """This numbers and measures the grains of pictures."""
        grey = smooth(pictures.astype(jnp.int32) * 256)
        bar, count = jax.vmap(threshold)(grey)
        bright = grey > bar[:, None, None]
        name, took = lax.map(numbered, bright)
        label, size_of, middle, box, grains, edge = lax.map(lambda z: measured(*z), (name, grey))
        return label, size_of, middle, box, grains, edge / cells, jnp.mean(bright, axis=(1, 2)), bar, count, took

    return Built(run, (Random((b, side, side), jnp.dtype(jnp.uint8), below=256),))


@program("trees-grown-level-by-level-from-histograms-of-slopes-and-bends", GROUP)
def _trees(size: Size) -> Built:
    """This learns to tell two sorts of rows by trees that are grown one after another from histograms, and ranks the columns.

    It is gradient boosting as in LightGBM (Ke, 2017) and scikit-learn: numbers are binned into bytes, slopes and bends of the loss
    are summed per node, column and bin, missing values go where they help, and the area under the curve comes from ranks.
    """
    rows, columns, bins, depth, rounds = pick(size, (150001, 28, 64, 3, 3), (8009, 12, 32, 4, 4), (67, 3, 8, 2, 2))
    nodes, rate, ridge = 2**depth, 0.3, 1.0

    def binned(x, known):
        """This gives numbers a bin by quantiles; bin zero is for what is missing."""
        cuts = jnp.quantile(x[: 4 * bins * 16], np.linspace(0, 1, bins)[1:-1].astype(np.float32), axis=0)
        at = jnp.sum(x[:, None] > cuts, axis=1)
        return jnp.where(known, 1 + at, 0).astype(jnp.uint8)

    def level(x, slope, bend, node):
        """This splits all nodes of a level by the column and the bin that gain most."""
        both, count = jnp.stack([slope, bend], axis=-1), nodes // 2

        def sums(column):
            """This is the histogram of one column for all nodes."""
            return jax.ops.segment_sum(both, node * bins + column, count * bins)

        table = jax.vmap(sums, 1)(x.astype(jnp.int32)).reshape(columns, count, bins, 2)
        total = jnp.sum(table[0], axis=1)
        ahead = jnp.cumsum(table.at[:, :, 0].set(0.0), axis=2)
        gone = table[:, :, :1]

        def worth(z):
            """This is how much a part with given sums helps."""
            return z[..., 0] ** 2 / (z[..., 1] + ridge)

        left = jnp.stack([ahead, ahead + gone])
        right = total[:, None] - left
        gain = worth(left) + worth(right) - worth(total)[:, None]
        gain = jnp.where((left[..., 1] > 1.0) & (right[..., 1] > 1.0), gain, 0.0)
        gain = gain.transpose(2, 0, 1, 3).reshape(count, -1)
        at, best = jnp.argmax(gain, axis=1), jnp.max(gain, axis=1)
        way, column, cut = at // (columns * bins), at // bins % columns, at % bins
        own = jnp.take_along_axis(x, column[node][:, None], axis=1)[:, 0].astype(jnp.int32)
        goes_left = jnp.where(own == 0, way[node] == 1, own <= cut[node]) & (best[node] > 0)
        return 2 * node + 1 - goes_left, (column, cut, way, best)

    def run(x, known, slopes, noise, kept_by):
        """This makes two sorts, grows trees and judges them."""
        score = jnp.sin(2 * x[:, 0]) + x @ slopes * 0.5 + x[:, 1] * x[:, 2] + 0.5 * noise
        label = (score > 0.3).astype(jnp.float32)
        cells = binned(x, known)

        def grow(carry, kept):
            """This grows one tree on most rows and adds what its leaves tell."""
            logit, use = carry
            chance = jax.nn.sigmoid(logit)
            slope, bend = (chance - label) * kept, chance * (1 - chance) * kept
            start = jnp.zeros(rows, jnp.int32)
            node, splits = lax.scan(lambda node, _: level(cells, slope, bend, node), start, None, length=depth)
            use = use.at[splits[0]].add(splits[3])
            leaf = -jax.ops.segment_sum(slope, node, nodes) / (jax.ops.segment_sum(bend, node, nodes) + ridge)
            logit = logit + rate * leaf[node]
            loss = jnp.mean(jax.nn.softplus(logit) - label * logit)
            return (logit, use), (loss, leaf, jnp.bincount(node, length=nodes), splits)

        first = jnp.log(jnp.mean(label) / (1 - jnp.mean(label)))
        (logit, use), told = lax.scan(grow, (jnp.full(rows, first), jnp.zeros(columns)), kept_by)
        rank = jnp.zeros(rows, jnp.int32).at[jnp.argsort(logit)].set(jnp.arange(1, rows + 1))
        ones = jnp.sum(label)
        area = (jnp.sum(rank * label) - ones * (ones + 1) / 2) / (ones * (rows - ones))
        return told, area, jnp.sum((logit > 0) == (label > 0)), jnp.argsort(-use), use

    return Built(
        run,
        (
            normal(rows, columns),
            booleans(rows, columns),
            normal(columns, scale=0.4),
            normal(rows),
            booleans(rounds, rows),
        ),
    )
