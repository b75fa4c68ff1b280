"""Whole models of voices, photographs, cells and sales, the twenty-eighth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, half, integers, normal, pick, program
from benchmarks.workloads.twenty_sixth_parts import drawn, layers_of_nnx

GROUP = "twenty-eighth"


@program("sung-notes-as-bins-along-the-likeliest-path-of-a-voice-linen", GROUP)
def _notes(size: Size) -> Built:
    """This tells the note of a voice a hundred times a second from short pieces of raw sound, and which notes were sung how often.

    It is CREPE (Kim, 2018; marl/crepe), with linen: six convolutions give chances of 360 bins of 20 cents, the likeliest path
    through the bins is found, and the note is the weighted mean of nine bins around the path.
    """
    from flax import linen as nn

    b, frames, times, bins = pick(size, (8, 257, 16, 360), (2, 21, 3, 360), (2, 5, 1, 360))
    dtype, window, hop = half(size), 1024, 160
    widths = [times * k for k in (32, 4, 4, 4, 8, 16)]
    cents = np.linspace(0.0, 7180.0, bins, dtype=np.float32) + 1997.3794084376191

    class Network(nn.Module):
        """This is the network of six convolutions."""

        @nn.compact
        def __call__(self, x):
            """This gives scores of bins for pieces of sound."""
            x = x[..., None].astype(dtype)
            for k, (c, wide, stride) in enumerate(zip(widths, (512, *(64,) * 5), (4, *(1,) * 5), strict=True)):
                x = nn.relu(nn.Conv(c, (wide,), strides=(stride,), dtype=dtype, param_dtype=dtype, name=f"conv{k}")(x))
                x = nn.BatchNorm(True, epsilon=1e-3, dtype=dtype, name=f"norm{k}")(x)
                x = nn.max_pool(x, (2,), (2,))
            x = x.reshape(x.shape[0], -1)
            return nn.Dense(bins, dtype=dtype, param_dtype=dtype)(x).astype(jnp.float32)

    model = Network()

    def path(logp):
        """This finds the likeliest path of bins when a voice moves by less than twelve bins at once."""
        gap = np.abs(np.arange(bins)[:, None] - np.arange(bins))
        moves = np.maximum(12 - gap, 0).astype(np.float32)
        moves = np.log(moves / 12 + 1e-9)

        def ahead(score, now):
            """This goes one frame ahead and keeps where each bin was reached from."""
            each = score[:, :, None] + moves
            return jnp.max(each, axis=1) + now, jnp.argmax(each, axis=1)

        last, back = lax.scan(ahead, logp[0], logp[1:])

        def before(at, came):
            """This goes one frame back along the path."""
            at = jnp.take_along_axis(came, at[:, None], axis=1)[:, 0]
            return at, at

        end = jnp.argmax(last, axis=-1)
        _, rest = lax.scan(before, end, back, reverse=True)
        return jnp.concatenate([rest, end[None]]), jnp.max(last, axis=-1)

    def run(p, sound):
        """This cuts sound into pieces and tells notes."""
        wander = jnp.cumsum(sound, axis=-1)
        sound = sound + jnp.sin(jnp.cumsum(0.1 * jnp.exp(0.05 * wander), axis=-1))
        sound = jnp.pad(sound, ((0, 0), (window // 2, window // 2)))
        pieces = sound[:, np.arange(frames)[:, None] * hop + np.arange(window)]
        pieces = pieces - jnp.mean(pieces, axis=-1, keepdims=True)
        pieces = pieces / jnp.clip(jnp.std(pieces, axis=-1, keepdims=True), 1e-8, None)
        chance = jax.nn.sigmoid(model.apply(p, pieces.reshape(b * frames, window)).reshape(b, frames, bins))
        logp = jnp.log(chance / jnp.sum(chance, axis=-1, keepdims=True))
        at, score = path(logp.swapaxes(0, 1))
        at = at.T
        near = jnp.abs(jnp.arange(bins) - at[..., None]) <= 4
        kept = jnp.where(near, chance, 0.0)
        told = jnp.sum(kept * cents, axis=-1) / jnp.sum(kept, axis=-1)
        sure = jnp.max(chance, axis=-1)
        pitch = jnp.where(sure > 0.5, 10.0 * 2.0 ** (told / 1200), 0.0)
        note = jnp.clip(jnp.round(69 + 12 * jnp.log2(jnp.maximum(pitch, 1.0) / 440)), 0, 127).astype(jnp.int32)
        often = jnp.zeros((b, 128), jnp.int32).at[jnp.arange(b)[:, None], note].add((pitch > 0).astype(jnp.int32))
        return pitch, sure, often, jnp.argmax(often, axis=-1), at, score

    structs = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((b * frames, window), jnp.float32))
    return Built(run, (drawn(structs), normal(b, frames * hop, scale=0.1)))


@program("corners-with-codes-of-two-photographs-joined-when-both-agree-haiku", GROUP)
def _corners(size: Size) -> Built:
    """This finds corners in two photographs, tells them by codes, joins those that choose each other and votes for a shift.

    It is SuperPoint (DeTone, 2018), with haiku: each cell of eight by eight pixels chooses one of its pixels or none, weaker
    corners near a stronger one go, and codes are read between cells.
    """
    import haiku as hk

    pairs, rows, columns, w, most, codes = pick(
        size, (4, 360, 488, 64, 1021, 256), (1, 120, 160, 16, 101, 64), (1, 32, 40, 4, 7, 8)
    )
    dtype, tall, broad, reach = half(size), rows // 8, columns // 8, 4

    @hk.without_apply_rng
    @hk.transform
    def network(x):
        """This gives scores of pixels of cells and codes of cells."""
        for k, c in enumerate((w, w, 2 * w, 2 * w)):
            x = jax.nn.relu(hk.Conv2D(c, 3)(x))
            x = jax.nn.relu(hk.Conv2D(c, 3)(x))
            if k < 3:
                x = hk.max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        scores = hk.Conv2D(65, 1)(jax.nn.relu(hk.Conv2D(4 * w, 3)(x)))
        return scores, hk.Conv2D(codes, 1)(jax.nn.relu(hk.Conv2D(4 * w, 3)(x)))

    def highest(x):
        """This is the highest value near each pixel."""
        sides = 2 * reach + 1
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, sides, sides), (1, 1, 1), "SAME")

    def alone(heat):
        """This keeps corners that are the highest near them, in two rounds, and zeroes all others."""
        peak = heat == highest(heat)
        near = highest(peak.astype(jnp.float32)) > 0
        rest = jnp.where(near, 0.0, heat)
        return jnp.where(peak | ((rest == highest(rest)) & ~near), heat, 0.0)

    def read(map_of, place):
        """This reads codes between the four nearest cells and gives them the length one."""
        y, x = (jnp.clip((place[..., k] - 3.5) / 8, 0.0, s - 1.001) for k, s in enumerate((tall, broad)))
        top, left = jnp.floor(y).astype(jnp.int32), jnp.floor(x).astype(jnp.int32)
        down, right = (y - top)[:, None], (x - left)[:, None]
        code = (1 - down) * ((1 - right) * map_of[top, left] + right * map_of[top, left + 1])
        code = code + down * ((1 - right) * map_of[top + 1, left] + right * map_of[top + 1, left + 1])
        return code * lax.rsqrt(jnp.sum(code * code, axis=-1, keepdims=True) + 1e-9)

    def joined(one, two):
        """This joins corners of one photograph with those of the other that choose them in return."""
        (code1, at1, heat1), (code2, at2, heat2) = one, two
        like = code1 @ code2.T
        there, back = jnp.argmax(like, axis=1), jnp.argmax(like, axis=0)
        best = lax.top_k(like, 2)[0]
        far = jnp.sqrt(jnp.maximum(2 - 2 * best, 1e-9))
        agree = (back[there] == jnp.arange(most)) & (far[:, 0] < 0.999 * far[:, 1])
        agree = agree & (heat1 > 0.005) & (heat2[there] > 0.005)
        shift = (at2[there] - at1) // 16
        cell = (shift[:, 0] + rows // 16 + 1) * (columns // 8 + 3) + shift[:, 1] + columns // 16 + 1
        votes = jnp.zeros((rows // 8 + 3) * (columns // 8 + 3), jnp.int32).at[cell].add(agree.astype(jnp.int32))
        won = jnp.argmax(votes)
        return jnp.where(agree, there, -1), best[:, 0], jnp.sum(agree), won, votes[won]

    def run(p, pictures):
        """This finds, reads and joins corners."""
        scores, maps = network.apply(p, pictures.astype(dtype))
        chance = jax.nn.softmax(scores.astype(jnp.float32), axis=-1)[..., :64]
        heat = chance.reshape(-1, tall, broad, 8, 8).transpose(0, 1, 3, 2, 4).reshape(-1, rows, columns)
        heat = alone(heat)
        border = np.zeros((rows, columns), bool)
        border[reach:-reach, reach:-reach] = True
        heat = jnp.where(border, heat, 0.0).reshape(2 * pairs, -1)
        best, at = lax.top_k(heat, most)
        place = jnp.stack([at // columns, at % columns], axis=-1)
        maps = maps.astype(jnp.float32)
        maps = maps * lax.rsqrt(jnp.sum(maps * maps, axis=-1, keepdims=True) + 1e-9)
        code = jax.vmap(read)(maps, place)
        sides = [tuple(z[k::2] for z in (code, place, best)) for k in range(2)]
        return *jax.vmap(joined)(*sides), place, jnp.sum(heat > 0.015, axis=-1)

    pictures = normal(2 * pairs, rows, columns, 1)
    structs = jax.eval_shape(network.init, jax.random.key(0), jax.ShapeDtypeStruct(pictures.shape, dtype))
    return Built(run, (drawn(structs), pictures))


@program("cells-as-pixels-that-flow-to-common-sinks-counted-and-named-linen", GROUP)
def _cells(size: Size) -> Built:
    """This tells which pixels of a microscope's picture belong to which cell by letting them flow to the middle of their cell.

    It is Cellpose (Stringer, 2021; MouseLand/cellpose), with linen: a residual U with a style of the whole picture gives flows,
    pixels follow them, and places where many of them end become cells, which are named and counted; norms are in the filters.
    """
    from flax import linen as nn

    b, side, w, steps, most = pick(size, (6, 448, 32, 40, 4096), (1, 136, 8, 30, 512), (1, 16, 4, 3, 32))
    dtype, widths = half(size), (w, 2 * w, 4 * w)
    how = {"dtype": dtype, "param_dtype": dtype}

    class Unit(nn.Module):
        """This is two convolutions beside a short way; the second one hears the style."""

        wide: int

        @nn.compact
        def __call__(self, x, style=None):
            """This gives the sum of both ways."""
            short = nn.Conv(self.wide, (1, 1), **how)(x)
            x = nn.Conv(self.wide, (3, 3), **how)(nn.relu(x))
            if style is not None:
                x = x + nn.Dense(self.wide, **how)(style)[:, None, None]
            return short + nn.Conv(self.wide, (3, 3), **how)(nn.relu(x))

    class Network(nn.Module):
        """This is the whole U."""

        @nn.compact
        def __call__(self, x):
            """This gives two flows and a score of being inside a cell."""
            kept = []
            for k, c in enumerate(widths):
                x = Unit(c)(nn.max_pool(x, (2, 2), (2, 2)) if k else x)
                kept.append(x)
            style = jnp.mean(x.astype(jnp.float32), axis=(1, 2))
            style = (style * lax.rsqrt(jnp.sum(style * style, axis=-1, keepdims=True) + 1e-6)).astype(dtype)
            x = Unit(widths[-1])(x, style)
            for c, y in zip(widths[-2::-1], kept[-2::-1], strict=True):
                x = nn.Conv(c, (1, 1), **how)(jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)) + y
                x = Unit(c)(x, style)
            return nn.Conv(3, (1, 1), **how)(nn.relu(x)).astype(jnp.float32), style

    model = Network()

    def followed(flow, inside):
        """This moves every pixel along the flows, which are read between pixels."""
        flow = jnp.where(inside[..., None], flow / 5, 0.0)
        grid = jnp.stack(jnp.meshgrid(jnp.arange(side), jnp.arange(side), indexing="ij"), axis=-1)

        def step(_, at):
            """This moves pixels once."""
            low = jnp.clip(jnp.floor(at).astype(jnp.int32), 0, side - 2)
            y, x = low[..., 0], low[..., 1]
            down, right = jnp.split(at - low, 2, axis=-1)
            move = (1 - down) * ((1 - right) * flow[y, x] + right * flow[y, x + 1])
            move = move + down * ((1 - right) * flow[y + 1, x] + right * flow[y + 1, x + 1])
            return jnp.clip(at + move, 0.0, side - 1.0)

        return jnp.round(lax.fori_loop(0, steps, step, grid.astype(jnp.float32))).astype(jnp.int32)

    def named(end, inside):
        """This names sinks, lets names grow over places where pixels ended and gives every pixel the name of its end."""
        ended = jnp.zeros((side, side), jnp.int32).at[end[..., 0], end[..., 1]].add(inside.astype(jnp.int32))

        def largest(x, k):
            """This is the largest number in a window."""
            return lax.reduce_window(x, jnp.iinfo(jnp.int32).min, lax.max, (k, k), (1, 1), "SAME")

        seed = (ended == largest(ended, 5)) & (ended > 6)
        name = jnp.where(seed, jnp.cumsum(seed.reshape(-1)).reshape(side, side), 0)
        for _ in range(2):
            name = jnp.where((ended > 2) & (name == 0), largest(name, 3), name)
        label = jnp.where(inside, name[end[..., 0], end[..., 1]], 0)
        label = jnp.minimum(label, most - 1).reshape(-1)
        area = jax.ops.segment_sum(jnp.ones_like(label), label, most)
        label = jnp.where(area[label] < 9, 0, label)
        return label.reshape(side, side), jnp.where(area >= 9, area, 0)[1:], jnp.sum(seed)

    def run(p, pictures):
        """This names the pixels of pictures."""
        out, style = model.apply(p, pictures.astype(dtype))
        out = out - jnp.mean(out, axis=(1, 2), keepdims=True)
        inside, flow = out[..., 2] > 0, out[..., :2]
        flow = 5 * flow * lax.rsqrt(jnp.mean(flow * flow, axis=(1, 2), keepdims=True))
        end = jax.vmap(followed)(flow, inside)
        label, area, seeds = jax.vmap(named)(end, inside)
        cells = jnp.sum(area > 0, axis=-1)
        return label, cells, seeds, jnp.sum(area, axis=-1) / jnp.maximum(cells, 1), style

    structs = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((b, side, side, 2), dtype))
    return Built(run, (drawn(structs), normal(b, side, side, 2)))


@program("sales-from-chosen-columns-gated-residuals-and-one-value-for-all-heads-nnx", GROUP)
def _sales(size: Size) -> Built:
    """This tells bounds of sales in the days ahead of many shops and goods, and which columns and days mattered.

    It is the temporal fusion transformer (Lim, 2019; google-research/tft), with nnx: each column passes a gated residual of its own
    and is weighed, memories read the past and the future, and all heads of attention share one value.
    """
    from flax import nnx

    b, past, ahead, n, h = pick(size, (192, 139, 24, 160, 4), (16, 83, 12, 48, 4), (2, 5, 3, 8, 2))
    dtype, reals, kinds, t = half(size), 5, (7, 12, 31, 4), past + ahead
    dense, norm, _ = layers_of_nnx(dtype)
    quantiles = np.array([0.1, 0.5, 0.9], np.float32)

    class Gated(nnx.Module):
        """This is a gated residual; the whole may hear a context."""

        def __init__(self, i, o, rngs, context=False):
            """This makes its layers."""
            self.enter, self.inner, self.gate = dense(i, n, rngs), dense(n, n, rngs), dense(n, 2 * o, rngs)
            self.skip = dense(i, o, rngs) if i != o else None
            self.hear = dense(n, n, rngs) if context else None
            self.norm = norm(o, rngs)

        def __call__(self, x, context=None):
            """This gives the normed sum of a gate and what came in."""
            y = self.enter(x) if context is None else self.enter(x) + self.hear(context)
            y = nnx.glu(self.gate(self.inner(nnx.elu(y))))
            return self.norm(y + (x if self.skip is None else self.skip(x)))

    class Chosen(nnx.Module):
        """This weighs columns, each of which has a gated residual; those of all columns are kept in one array."""

        def __init__(self, m, rngs):
            """This makes its layers."""
            self.share = Gated(m * n, m, rngs, context=True)
            self.one = nnx.Param(jax.random.normal(rngs.params(), (n, m, n), dtype))
            self.two = nnx.Param(jax.random.normal(rngs.params(), (n, m, 2 * n), dtype))
            self.norm = norm(n, rngs)

        def __call__(self, x, context):
            """This gives the weighted sum of columns [batch, days, columns, n] and the weights."""
            flat = x.reshape(*x.shape[:-2], -1)
            share = nnx.softmax(self.share(flat, context).astype(jnp.float32), axis=-1)
            y = nnx.elu(jnp.einsum("btmi,imo->btmo", x, self.one[...]))
            y = self.norm(x + nnx.glu(jnp.einsum("btmi,imo->btmo", y, self.two[...])))
            return jnp.einsum("btm,btmn->btn", share.astype(dtype), y), share

    class Network(nnx.Module):
        """This is the whole network."""

        def __init__(self, rngs):
            """This makes all layers."""
            own = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
            self.tables = nnx.List([nnx.Embed(k, n, **own) for k in kinds])
            self.shops, self.goods = nnx.Embed(1021, n, **own), nnx.Embed(4093, n, **own)
            self.scale = nnx.Param(jax.random.normal(rngs.params(), (reals, n), dtype))
            self.contexts = Gated(2 * n, 4 * n, rngs)
            self.before, self.after = Chosen(reals + len(kinds), rngs), Chosen(len(kinds), rngs)
            self.read, self.write = dense(2 * n, 4 * n, rngs), dense(2 * n, 4 * n, rngs)
            self.gates, self.norms = nnx.List([dense(n, 2 * n, rngs) for _ in range(3)]), norm(n, rngs)
            self.rich = Gated(n, n, rngs, context=True)
            self.query, self.key = dense(n, n, rngs), dense(n, n, rngs)
            self.value, self.leave = dense(n, n // h, rngs), dense(n // h, n, rngs)
            self.head = dense(n, 3, rngs)

        def memory(self, layer, carry, x):
            """This reads days one by one."""

            def step(carry, now):
                """This is one step of a long short-term memory."""
                deep, cell = carry
                i, f, g, o = jnp.split(layer(jnp.concatenate([now, deep], axis=-1)), 4, axis=-1)
                cell = nnx.sigmoid(f + 1) * cell + nnx.sigmoid(i) * jnp.tanh(g)
                deep = nnx.sigmoid(o) * jnp.tanh(cell)
                return (deep, cell), deep

            carry, out = lax.scan(step, carry, x.swapaxes(0, 1))
            return carry, out.swapaxes(0, 1)

        def __call__(self, x, days, shop, good):
            """This gives three bounds per day ahead, weights of columns and attention."""
            who = jnp.concatenate([self.shops(shop), self.goods(good)], axis=-1)
            choose, rich, deep, cell = jnp.split(self.contexts(who), 4, axis=-1)
            known = jnp.stack([table(days[..., k]) for k, table in enumerate(self.tables)], axis=2)
            seen = jnp.concatenate([x[..., None].astype(dtype) * self.scale[...], known[:, :past]], axis=2)
            old, share = self.before(seen, choose[:, None])
            new, _ = self.after(known[:, past:], choose[:, None])
            carry, one = self.memory(self.read, (deep, cell), old)
            _, two = self.memory(self.write, carry, new)
            x = jnp.concatenate([old, new], axis=1)
            x = self.norms(x + nnx.glu(self.gates[0](jnp.concatenate([one, two], axis=1))))
            y = self.rich(x, rich[:, None])
            query, key = (f(z).reshape(b, -1, h, n // h) for f, z in ((self.query, y[:, past:]), (self.key, y)))
            scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) * (n // h) ** -0.5
            scores = jnp.where(np.tril(np.ones((ahead, t), bool), past), scores, -1e9)
            probs = jnp.mean(nnx.softmax(scores, axis=-1), axis=1)
            z = self.leave(jnp.einsum("bqk,bkd->bqd", probs.astype(dtype), self.value(y)))
            z = y[:, past:] + nnx.glu(self.gates[1](z))
            z = self.norms(x[:, past:] + nnx.glu(self.gates[2](z)))
            return jnp.sort(self.head(z).astype(jnp.float32), axis=-1), jnp.mean(share, axis=1), probs

    graph, state = nnx.split(nnx.eval_shape(lambda: Network(nnx.Rngs(0))))

    def run(state, x, days, shop, good, later, open_at):
        """This foretells sales and judges the bounds on days on which shops are open."""
        mean, spread = jnp.mean(x, axis=1, keepdims=True), jnp.std(x, axis=1, keepdims=True) + 1e-3
        out, share, probs = nnx.merge(graph, state)((x - mean) / spread, days % np.array(kinds), shop, good)
        out = out * spread[..., :1] + mean[..., :1]
        off = later[..., None] - out
        loss = jnp.maximum(quantiles * off, (quantiles - 1) * off) * open_at[..., None]
        inside = (later >= out[..., 0]) & (later <= out[..., 2]) & open_at
        held = jnp.sum(inside, axis=0) / jnp.maximum(jnp.sum(open_at, axis=0), 1)
        risk = 2 * jnp.sum(loss, axis=(0, 1)) / jnp.sum(jnp.abs(later) * open_at)
        return out, risk, held, share, jnp.argmax(jnp.mean(probs, axis=1), axis=-1)

    inputs = (normal(b, past, reals, scale=3.0), integers(b, t, len(kinds), below=372), integers(b, below=1021))
    inputs += (integers(b, below=4093), normal(b, ahead, scale=3.0), booleans(b, ahead))
    return Built(run, (drawn(state), *inputs))
