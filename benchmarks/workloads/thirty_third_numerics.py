"""Card bets, radar passes, rock layers, seeds of reads and long spectra, the thirty-third set: its author saw no plan."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program

GROUP = "thirty-third"


@program("last-bets-of-a-card-game-by-regrets-of-all-hands", GROUP)
def _bets(size: Size) -> Built:
    """This program finds how two players should bet on the last card of a game, for all hands that they may hold at once.

    It is counterfactual regret minimisation with positive regrets (Tammelin, 2014; as in poker solvers): each round sends the
    chances of hands [boards, hands] down a small tree of bets, values come back up, and regrets change how players act.
    """
    boards, cards, rounds, raises = pick(size, (4, 47, 50, 2), (2, 20, 20, 2), (1, 6, 3, 1))
    pairs = np.array(list(combinations(range(cards), 2)))
    hands = len(pairs)
    holds = np.zeros((hands, cards), np.float32)
    holds[np.arange(hands)[:, None], pairs] = 1.0
    apart = (holds @ holds.T == 0).astype(np.float32)
    sizes = (0.5, 1.0)
    nodes, ends = [], []

    def grown(player, pot, owes, left, checked):
        """This grows the tree: a node is (player, children), an end is what it pays; both are known by their numbers."""
        place = len(nodes)
        nodes.append(None)
        children = []
        if owes:
            children.append(ended(("fold", player, (pot - owes) / 2)))
        if checked or owes:
            children.append(ended(("show", player, (pot + owes) / 2)))
        else:
            children.append(("node", grown(1 - player, pot, 0.0, left, True)))
        if left:
            for share in sizes:
                bet = share * (pot + owes)
                children.append(("node", grown(1 - player, pot + owes + bet, bet, left - 1, True)))
        nodes[place] = (player, children)
        return place

    def ended(what):
        ends.append(what)
        return "end", len(ends) - 1

    grown(0, 2.0, 0.0, raises, False)
    most = max(len(children) for _, children in nodes)
    legal = np.array([[k < len(children) for k in range(most)] for _, children in nodes])
    shows = np.array([k for k, end in enumerate(ends) if end[0] == "show"])
    folds = np.array([k for k, end in enumerate(ends) if end[0] == "fold"])
    paid = np.array([end[2] for end in ends], np.float32)
    loser = np.array([end[1] for end in ends])

    def acts(regret):
        """This is how hands act at nodes [nodes, actions, boards, hands]."""
        good = jnp.where(legal[:, :, None, None], jnp.maximum(regret, 0.0), 0.0)
        total = jnp.sum(good, axis=1, keepdims=True)
        even = jnp.asarray(legal / legal.sum(axis=1, keepdims=True), jnp.float32)[:, :, None, None]
        return jnp.where(total > 0, good / jnp.where(total > 0, total, 1.0), even)

    def reached(plan, own):
        """These are the chances of hands at nodes and ends, of both players."""
        at_node, at_end = [None] * len(nodes), [None] * len(ends)
        at_node[0] = own
        for k, (player, children) in enumerate(nodes):
            for j, (kind, to) in enumerate(children):
                reach = list(at_node[k])
                reach[player] = reach[player] * plan[k, j]
                (at_node if kind == "node" else at_end)[to] = tuple(reach)
        return at_node, at_end

    def valued(plan, at_end, wins):
        """These are values of hands at nodes for both players, and of what each action of a node leads to."""
        worth = []
        for player in (0, 1):
            other = jnp.stack([reach[1 - player] for reach in at_end])
            show = jnp.einsum("ebh,bgh->ebg", other[shows], wins) * paid[shows][:, None, None]
            left = jnp.sum(other[folds], -1, keepdims=True) - (other[folds] @ holds) @ holds.T + other[folds]
            sign = np.where(loser[folds] == player, -1.0, 1.0).astype(np.float32) * paid[folds]
            value = jnp.zeros_like(other).at[shows].set(show).at[folds].set(left * sign[:, None, None])
            worth.append(value)
        node_value, of_action = [None] * len(nodes), [None] * len(nodes)
        for k in reversed(range(len(nodes))):
            player, children = nodes[k]
            found = [node_value[to] if kind == "node" else (worth[0][to], worth[1][to]) for kind, to in children]
            mine = jnp.stack([v[player] for v in found])
            theirs = sum(v[1 - player] for v in found)
            of_action[k] = jnp.pad(mine, ((0, most - len(found)), (0, 0), (0, 0)))
            total = jnp.sum(plan[k, : len(found)] * mine, axis=0)
            node_value[k] = (total, theirs) if player == 0 else (theirs, total)
        return node_value, of_action

    def run(strength, first, second):
        """This gives average plans at the root and after a check, values, and the surprise of plans round by round."""
        wins = jnp.sign(strength[:, :, None] - strength[:, None]).astype(jnp.float32) * apart
        own = tuple(jax.nn.softmax(0.7 * z, axis=-1) for z in (first, second))
        pairs_left = jnp.einsum("bh,hg,bg->b", own[0], apart, own[1])
        player_of = np.array([player for player, _ in nodes])

        def one_round(carry, k):
            regret, average = carry
            plan = acts(regret)
            at_node, at_end = reached(plan, own)
            node_value, of_action = valued(plan, at_end, wins)
            mine = jnp.stack([v[p] for v, p in zip(node_value, player_of, strict=True)])
            regret = jnp.maximum(regret + jnp.stack(of_action) - mine[:, None], 0.0)
            reach = jnp.stack([r[p] for r, p in zip(at_node, player_of, strict=True)])
            average = average + (k + 1.0) * reach[:, None] * plan
            value = jnp.sum(own[0] * node_value[0][0], axis=-1) / pairs_left
            doubt = -jnp.sum(plan[0] * jnp.log(plan[0] + 1e-9), axis=0)
            return (regret, average), (value, jnp.mean(doubt, axis=-1))

        start = jnp.zeros((len(nodes), most, boards, hands))
        (regret, average), course = lax.scan(one_round, (start, start), jnp.arange(rounds))
        plan = acts(average)
        return plan[:2], regret[0], course

    return Built(run, (integers(boards, hands, below=300), normal(boards, hands), normal(boards, hands)))


@program("ground-that-sank-between-two-radar-passes-unwrapped", GROUP)
def _sunk(size: Size) -> Built:
    """This program maps how ground sank between two radar passes, from turns of waves that are known only up to whole circles.

    It is the chain of isce and snaphu in short (Goldstein and Werner, 1998; Ghiglia and Romero, 1994): looks are averaged, patches
    are filtered by their own spectra, and weighted slopes are joined by conjugate gradients with cosine transforms inside.
    """
    n, looks, patch, rounds, alpha = pick(size, (4096, 4, 32, 24, 0.6), (512, 2, 32, 8, 0.6), (32, 2, 8, 2, 0.5))
    m = n // looks
    step = patch // 2

    def filtered(z):
        """This sharpens the spectra of patches that overlap by half, and lays them over each other again."""
        wide = jnp.pad(z, step)
        many = (m + 2 * step - patch) // step + 1
        at = step * np.arange(many)
        cut = (at[:, None] + np.arange(patch)).reshape(-1)
        parts = wide[cut][:, cut].reshape(many, patch, many, patch).swapaxes(1, 2)
        spectrum = jnp.fft.fft2(parts)
        power = jnp.abs(spectrum)
        soft = sum(jnp.roll(power, (i, j), axis=(2, 3)) for i in (-1, 0, 1) for j in (-1, 0, 1)) / 9
        parts = jnp.fft.ifft2(spectrum * (soft / (jnp.max(soft, axis=(2, 3), keepdims=True) + 1e-9)) ** alpha)
        hill = 1 - np.abs((np.arange(patch) + 0.5) / step - 1)
        parts = parts * (hill[:, None] * hill).astype(np.float32)
        total = jnp.zeros((m + 2 * step, m + 2 * step), z.dtype)
        for i in range(2):
            for j in range(2):
                some = parts[i::2, j::2]
                laid = some.swapaxes(1, 2).reshape(some.shape[0] * patch, some.shape[1] * patch)
                high, long = min(laid.shape[0], m + 2 * step - i * step), min(laid.shape[1], m + 2 * step - j * step)
                total = total.at[i * step : i * step + high, j * step : j * step + long].add(laid[:high, :long])
        return total[step : step + m, step : step + m]

    def turned(x):
        return (x + jnp.pi) % (2 * jnp.pi) - jnp.pi

    def against(rows, columns):
        """This sums what flows out of cells."""
        down = jnp.pad(rows, ((1, 1), (0, 0)))
        across = jnp.pad(columns, ((0, 0), (1, 1)))
        return down[:-1] - down[1:] + across[:, :-1] - across[:, 1:]

    wave = 2 * np.cos(np.pi * np.arange(m) / m)
    divide = (4 - wave[:, None] - wave).astype(np.float32)
    divide[0, 0] = 1.0

    def smooth(x):
        """This solves the equation with equal weights."""
        y = jax.scipy.fft.dctn(x, type=2, norm="ortho") / divide
        return jax.scipy.fft.idctn(y.at[0, 0].set(0.0), type=2, norm="ortho")

    def run(first, second, hollow, tilt):
        """This gives millimetres of sinking, how alike the passes are, filtered turns, and how rounds went."""
        y, x = jnp.meshgrid(jnp.linspace(-1, 1, n), jnp.linspace(-1, 1, n), indexing="ij")
        sank = 0.0
        for k in range(hollow.shape[0]):
            far = ((y - 0.4 * hollow[k, 0]) ** 2 + (x - 0.4 * hollow[k, 1]) ** 2) / (0.1 + 0.05 * hollow[k, 2] ** 2)
            sank = sank + 8.0 * hollow[k, 3] * jnp.exp(-far)
        ramp = 20 * (y * tilt[0] + x * tilt[1])
        first = lax.complex(first[0], first[1])
        second = (first + 0.5 * lax.complex(second[0], second[1])) * jnp.exp(-1j * (sank + ramp))

        def looked(z):
            return jnp.mean(z.reshape(m, looks, m, looks), axis=(1, 3))

        flat = looked(first * jnp.conj(second) * jnp.exp(-1j * ramp))
        alike = jnp.abs(flat) * lax.rsqrt(looked(jnp.abs(first) ** 2) * looked(jnp.abs(second) ** 2) + 1e-9)
        clean = filtered(flat / (jnp.abs(flat) + 1e-9) * alike)
        phase = jnp.angle(clean)
        rows, columns = (turned(jnp.diff(phase, axis=k)) for k in (0, 1))
        weight = jnp.clip(alike, 0.05, 1.0) ** 2
        down, across = jnp.minimum(weight[1:], weight[:-1]), jnp.minimum(weight[:, 1:], weight[:, :-1])
        goal = against(-down * rows, -across * columns)

        def joined(z):
            return against(-down * jnp.diff(z, axis=0), -across * jnp.diff(z, axis=1))

        def better(carry, _):
            z, rest, way, old = carry
            moved = joined(way)
            share = old / (jnp.sum(way * moved) + 1e-12)
            z, rest = z + share * way, rest - share * moved
            solved = smooth(rest)
            new = jnp.sum(rest * solved)
            return (z, rest, solved + new / (old + 1e-12) * way, new), jnp.sqrt(jnp.mean(rest * rest))

        solved = smooth(goal)
        start = (jnp.zeros((m, m)), goal, solved, jnp.sum(goal * solved))
        (z, *_), course = lax.scan(better, start, None, length=rounds)
        z = z + 2 * jnp.pi * jnp.round((jnp.mean(phase - z)) / (2 * jnp.pi))
        whole = jnp.round((z - phase) / (2 * jnp.pi))
        sinking = (phase + 2 * jnp.pi * whole) * (55.5 / (4 * np.pi))
        return sinking - jnp.median(sinking[0]), alike, jnp.stack([clean.real, clean.imag]), course

    return Built(run, (normal(2, n, n), normal(2, n, n), normal(3, 4), normal(2)))


@program("rock-layers-under-many-places-from-currents-of-the-sky", GROUP)
def _rocks(size: Size) -> Built:
    """This program finds how well layers of rock conduct under many places, from waves that currents in the sky send down.

    It is Occam's inversion of magnetotelluric soundings (Constable, 1987): waves go up through layers by a recursion, slopes come
    forwards, and each round tries several smoothnesses with a solve for each and keeps the smoothest that fits.
    """
    places, periods, layers, rounds, tries = pick(size, (512, 40, 48, 5, 6), (32, 16, 24, 3, 4), (2, 4, 5, 2, 2))
    thick = np.geomspace(30.0, 6000.0, layers - 1).astype(np.float32)
    omega = (2 * np.pi / np.geomspace(1e-2, 1e3, periods)).astype(np.float32)
    mu = 4e-7 * np.pi
    rough = (np.eye(layers) - np.eye(layers, k=-1))[1:].astype(np.float32)

    def sounded(model):
        """These are logarithms of seeming resistance and angles [2 * periods], for logarithms of resistance."""
        resist = 10.0**model
        own = jnp.sqrt(1j * (omega * mu)[:, None] * resist)

        def layer(under, now):
            own, resist, thick = now
            wave = own / resist
            share = (own - under) / (own + under) * jnp.exp(-2 * wave * thick)
            return own * (1 - share) / (1 + share), None

        top, _ = lax.scan(layer, own[:, -1], (own[:, :-1].T, resist[:-1], thick), reverse=True)
        return jnp.concatenate([jnp.log10(jnp.abs(top) ** 2 / (omega * mu)), jnp.angle(top)])

    def of_place(seen, spread):
        """This is the inversion for one place."""

        def missed(model):
            return jnp.mean(((sounded(model) - seen) / spread) ** 2)

        def one_round(model, k):
            slopes = jax.jacfwd(sounded)(model) / spread[:, None]
            goal = (seen - sounded(model)) / spread + slopes @ model
            squares = slopes.T @ slopes
            smooth = 10.0 ** (jnp.linspace(3.0, -1.0, tries) - 0.3 * k)

            def tried(s):
                return jnp.linalg.solve(squares + s * (rough.T @ rough) + 1e-3 * jnp.eye(layers), slopes.T @ goal)

            models = jnp.clip(jax.vmap(tried)(smooth), -1.0, 5.0)
            miss = jax.vmap(missed)(models)
            fits = miss <= 1.1
            best = jnp.where(jnp.any(fits), jnp.argmax(fits), jnp.argmin(miss))
            return models[best], (miss[best], smooth[best])

        model, course = lax.scan(one_round, jnp.full(layers, 2.0), jnp.arange(rounds))
        slopes = jax.jacfwd(sounded)(model) / spread[:, None]
        depth = jnp.cumsum(jnp.sum(jnp.abs(slopes), axis=0)[::-1])[::-1]
        return model, course, jnp.sum(depth > 0.05 * depth[0]), sounded(model)

    def run(truth, noise):
        """This gives resistances of layers, how rounds went, the deepest layer that is felt, and what fits."""
        true = 2.0 + 0.25 * jnp.cumsum(truth, axis=1) - 0.25 * truth[:, :1]
        spread = jnp.concatenate([jnp.full(periods, 0.04), jnp.full(periods, 0.04)])
        seen = jax.vmap(sounded)(jnp.clip(true, 0.0, 4.0)) + spread * noise
        return jax.vmap(of_place, in_axes=(0, None))(seen, spread)

    return Built(run, (normal(places, layers), normal(places, 2 * periods)))


@program("seeds-of-long-reads-looked-up-sorted-and-chained", GROUP)
def _seeds(size: Size) -> Built:
    """This program finds where long reads come from in a genome, by rare short runs of letters that follow each other in both.

    It is the core of minimap2 (Li, 2018): runs of letters are hashed, the least hash of each window is kept, reads [reads, letters]
    look theirs up in a sorted table, and matches are chained by a program over the last few of them.
    """
    reads, letters, genome, k, window, hits, most, last = pick(
        size,
        (256, 2048, 1 << 20, 15, 10, 4, 512, 48),
        (12, 512, 1 << 15, 11, 8, 3, 160, 24),
        (2, 40, 128, 4, 3, 2, 8, 3),
    )
    far = 2**31 - 1

    def hashed(text):
        """These are whole numbers below 2 ** 30 for runs of letters that start at each place of [..., n]."""
        n = text.shape[-1] - k + 1
        code = jnp.zeros((*text.shape[:-1], n), jnp.uint32)
        for j in range(k):
            code = (code << 2) | text[..., j : j + n].astype(jnp.uint32)
        code = code & jnp.uint32(4**k - 1)
        code = code ^ (code >> 16)
        code = (code * jnp.uint32(0x45D9F3B)) ^ (code >> 13)
        code = (code * jnp.uint32(0x119DE1F3)) ^ (code >> 16)
        return (code >> 2).astype(jnp.int32)

    def kept(code):
        """This tells which hashes are least in some window that they are in."""
        rank = code.ndim - 1
        shape, stride = (1,) * rank + (window,), (1,) * (rank + 1)
        none = ((0, 0),) * rank
        least = lax.reduce_window(code, far, lax.min, shape, stride, (*none, (0, window - 1)))
        bar = lax.reduce_window(least, 0, lax.max, shape, stride, (*none, (window - 1, 0)))
        return code == bar

    def chained(place, spot, good):
        """This chains matches that are sorted by place in the genome, and gives the best chain."""
        rank = jnp.arange(most)

        def step(carry, now):
            best, places, spots = carry
            j, place, spot, good = now
            ahead, along = place - places, spot - spots
            skew = jnp.abs(ahead - along)
            fits = (ahead > 0) & (along > 0) & (skew < 200) & (ahead < 2000)
            gain = jnp.minimum(jnp.minimum(ahead, along), k).astype(jnp.float32)
            cost = 0.15 * skew + 0.5 * jnp.log2(1.0 + skew)
            score = jnp.where(fits, best + gain - cost, -jnp.inf)
            top = jnp.argmax(score)
            better = score[top] > k
            value = jnp.where(good, jnp.where(better, score[top], float(k)), -1e6)
            came = jnp.where(better & good, j - last + top, j)
            carry = tuple(jnp.append(z[1:], new) for z, new in ((best, value), (places, place), (spots, spot)))
            return carry, (value, came)

        start = (jnp.full(last, -1e6), jnp.full(last, far // 2), jnp.zeros(last, jnp.int32))
        _, (value, came) = lax.scan(step, start, (rank, place, spot, good))
        end = jnp.argmax(value)

        def back(at, _):
            return came[at], at

        _, path = lax.scan(back, end, None, length=most)
        on = jnp.zeros(most, bool).at[path].set(True)
        rest = jnp.max(jnp.where(on | (jnp.abs(place - place[end]) < letters), 0.0, value))
        begin = path[-1]
        told = (jnp.sum(on), place[begin] - spot[begin], place[end] - place[begin])
        return value[end], 40 * (1 - rest / jnp.maximum(value[end], 1.0)), told

    def run(text, starts, wrong, other):
        """This gives scores of chains, how sure they are, how many seeds they have, and where reads begin."""
        code = hashed(text)
        place = jnp.arange(code.shape[0], dtype=jnp.int32)
        table, table_place = lax.sort((jnp.where(kept(code), code, far), place), num_keys=1)
        source = starts[:, None] + jnp.arange(letters)
        read = jnp.where(wrong < 6, other, text[source])
        own = hashed(read)
        low = jnp.searchsorted(table, own, side="left")
        high = jnp.searchsorted(table, own, side="right")
        at = low[..., None] + jnp.arange(hits)
        good = kept(own)[..., None] & (at < high[..., None]) & ((high - low) <= 4 * hits)[..., None]
        found = jnp.where(good, table_place[jnp.minimum(at, table.shape[0] - 1)], far // 2)
        spot = jnp.broadcast_to(jnp.arange(own.shape[1], dtype=jnp.int32)[:, None], found.shape[1:])
        spot = jnp.broadcast_to(spot, found.shape)
        found, spot = (z.reshape(reads, -1) for z in (found, spot))
        found, spot = lax.sort((found, spot), dimension=1, num_keys=2)
        found, spot = found[:, :most], spot[:, :most]
        score, sure, told = jax.vmap(chained)(found, spot, found < far // 2)
        return score, sure, told, jnp.abs(told[1] - starts) < 50

    inputs = (integers(genome, below=4), integers(reads, below=genome - letters))
    return Built(run, (*inputs, integers(reads, letters, below=100), integers(reads, letters, below=4)))


@program("spectra-of-blood-made-alike-and-read-by-few-hidden-directions", GROUP)
def _spectra(size: Size) -> Built:
    """This program makes magnetic spectra of blood samples alike and reads amounts of stuff, and strange samples, from them.

    It is the usual chain of chemometrics (Dieterle, 2006; Wold, 2001): rows [samples, columns] lose their floor, are scaled by the
    median of quotients of bins, sloped, scaled column by column, and projected on a few directions of partial least squares.
    """
    b, m, bins, directions, told, taps = pick(
        size, (4096, 16384, 512, 12, 20, 11), (96, 4096, 128, 6, 8, 7), (3, 32, 4, 2, 2, 3)
    )
    dtype = half(size)
    reach = taps // 2
    lean = (np.arange(-reach, reach + 1) / np.sum(np.arange(-reach, reach + 1) ** 2)).astype(np.float32)

    def run(spectra, floor, usual, mean, spread, weight, loading, read, offset, range_of):
        """This gives amounts, hidden values, how far samples lie in and off the directions, and what weighs most."""
        x = spectra.astype(jnp.float32) + jax.nn.relu(floor)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        usual = jnp.exp(0.3 * usual)
        area = jnp.mean((x * usual + 3.0 * usual).reshape(b, bins, m // bins), axis=-1)
        quotient = area / jnp.mean((3.0 * usual).reshape(bins, m // bins), axis=-1)
        x = x / jnp.median(quotient, axis=-1, keepdims=True)
        wide = jnp.pad(x, ((0, 0), (reach, reach)), mode="edge")
        slope = sum(lean[k] * wide[:, k : k + m] for k in range(taps))
        x = (slope - 0.05 * mean) * lax.rsqrt(jnp.square(0.2 * spread) + 0.02)
        x = jnp.where(jnp.abs(x) > 4.0, 4.0 * jnp.sign(x), x).astype(dtype)
        hidden = jnp.matmul(x, weight, preferred_element_type=jnp.float32)
        rest = x.astype(jnp.float32) - jnp.matmul(hidden.astype(dtype), loading.T, preferred_element_type=jnp.float32)
        off = jnp.sum(jnp.square(rest), axis=-1)
        inside = jnp.sum(jnp.square(hidden) / (0.1 + jnp.square(range_of)), axis=-1)
        amount = hidden @ read + offset
        strange = (off > jnp.mean(off) + 2 * jnp.std(off)) | (inside > 2 * jnp.mean(inside))
        weigh = lax.top_k(jnp.mean(jnp.square(rest), axis=0), min(16, m // 2))
        return amount, hidden, inside, off, strange, weigh

    columns = [normal(m) for _ in range(4)]
    inputs = (normal(b, m, dtype=dtype, offset=1.0), *columns, normal(m, directions, dtype=dtype, scale=m**-0.5))
    loading = Random((m, directions), jnp.dtype(dtype), 0.3)
    return Built(run, (*inputs, loading, normal(directions, told), normal(told), normal(directions)))
