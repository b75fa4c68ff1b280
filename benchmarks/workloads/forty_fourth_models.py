"""Summaries put in order, rows that gate themselves, points thrown away at random, the forty-fourth set: its author saw no plan."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, booleans, half, integers, normal, pick, program
from benchmarks.workloads.transformer_models import library
from benchmarks.workloads.twenty_sixth_parts import drawn

GROUP = "forty-fourth"


@program("pegasus-candidate-summaries-put-in-order-by-shared-words-margins-of-likelihood-grad-transformers", GROUP)
def _summaries(size: Size) -> Built:
    """This program teaches a writer of summaries to find those candidates likelier that share more words with the true one.

    It is BRIO (Liu, 2022; yixinL7/BRIO) with FlaxPegasusForConditionalGeneration of transformers: candidates are ranked by runs of
    shared words, margins grow with the distance of ranks, and smoothed surprise of the true summary is added.
    """
    transformers = library()
    b, long, candidates, short, n, heads, depth, words = pick(
        size,
        (4, 512, 7, 64, 1024, 16, 3, 96103),
        (1, 48, 3, 16, 128, 4, 3, 4003),
        (2, 6, 2, 5, 8, 2, 3, 17),
    )
    dtype = half(size)
    config = transformers.PegasusConfig(
        vocab_size=words,
        max_position_embeddings=512,
        d_model=n,
        encoder_layers=depth,
        decoder_layers=depth,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * n,
        decoder_ffn_dim=4 * n,
        scale_embedding=True,
    )
    model = transformers.FlaxPegasusForConditionalGeneration(config, dtype=dtype, _do_init=False)
    structs = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, long)))
    smooth, reach, power = 0.1, 0.01, 0.6

    def shared(text, many, true, true_many):
        """This is the balanced share of single words and of pairs that texts [b, c, short] and true ones have in common."""

        def part(one, other, count, other_count):
            """This is the share for items that are words or pairs already."""
            line = jnp.arange(one.shape[-1])
            real, other_real = line < count[..., None], line < other_count[:, None]
            same = (one[..., None] == one[..., None, :]) & real[..., None, :]
            before = jnp.sum(same & (line < line[:, None]), axis=-1)
            there = jnp.sum((one[..., None] == other[:, None, None]) & other_real[:, None, None], axis=-1)
            hit = jnp.sum((before < there) & real, axis=-1)
            return 2 * hit / jnp.maximum(count + other_count[:, None], 1)

        pairs = text[..., :-1] * words + text[..., 1:], true[:, :-1] * words + true[:, 1:]
        return (part(text, true, many, true_many) + part(*pairs, many - 1, true_many - 1)) / 2

    def run(p, document, document_short, true, true_short, other, changed):
        """This gives the loss and parts, slopes, orders, shares of words, likelihoods, and how well the two orders agree."""
        real = (jnp.arange(long) < (long - document_short)[:, None]).astype(jnp.int32)
        true_many = short - true_short
        level = jnp.arange(1, candidates + 1) * 10 // (candidates + 1) + 1
        text = jnp.where(changed < level[:, None], other, true[:, None])
        many = jnp.broadcast_to(true_many[:, None], (b, candidates))
        quality = shared(text, many, true, true_many)
        order = jnp.argsort(-quality, axis=1)
        text = jnp.concatenate([true[:, None], jnp.take_along_axis(text, order[..., None], axis=1)], axis=1)
        count = jnp.concatenate([true_many[:, None], many], axis=1)
        own = jnp.arange(short) < count[..., None]
        told = jnp.pad(text[..., :-1], ((0, 0), (0, 0), (1, 0))).reshape(-1, short)

        def loss(p):
            """This is the sum of margins and of surprise."""
            seen = model.encode(document, real, params=p)
            seen = type(seen)(last_hidden_state=jnp.repeat(seen.last_hidden_state, candidates + 1, axis=0))
            mask = jnp.repeat(real, candidates + 1, axis=0)
            logits = model.decode(told, seen, mask, own.reshape(-1, short).astype(jnp.int32), params=p).logits
            logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1).reshape(b, candidates + 1, short, words)
            chance = jnp.take_along_axis(logp, text[..., None], axis=-1)[..., 0]
            mark = jnp.sum(chance * own, axis=-1) / count**power
            gap = mark[:, None, 1:] - mark[:, 1:, None]
            apart = jnp.arange(candidates) - jnp.arange(candidates)[:, None]
            ranks = jnp.where(apart > 0, jax.nn.relu(gap + reach * apart), 0.0)
            gold = jax.nn.relu(mark[:, 1:] - mark[:, :1])
            surprise = -(1 - smooth) * chance[:, 0] - smooth * jnp.mean(logp[:, 0], axis=-1)
            surprise = jnp.sum(surprise * own[:, 0]) / jnp.sum(own[:, 0])
            parts = jnp.stack([jnp.mean(jnp.sum(ranks, axis=(1, 2))), jnp.mean(jnp.sum(gold, axis=1)), surprise])
            return 10 * parts[0] + parts[1] + 0.1 * parts[2], (parts, mark, chance)

        (value, (parts, mark, chance)), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        long_ = jnp.sqrt(sum(jnp.sum(jnp.square(z.astype(jnp.float32))) for z in jax.tree.leaves(slopes)))
        slopes = jax.tree.map(lambda z: z * jnp.minimum(1.0, 1.0 / long_).astype(z.dtype), slopes)
        agree = jnp.sign(mark[:, 1:, None] - mark[:, None, 1:])
        agree = jnp.sum(jnp.triu(agree, 1), axis=(1, 2)) / max(candidates * (candidates - 1) // 2, 1)
        return value, parts, slopes, long_, order, quality, mark, agree, jnp.sum(chance * own, axis=2)

    def table(path, r):
        """This gives the table of words, which is also the last matrix, rows of the length that the model expects."""
        names = [str(getattr(k, "key", k)) for k in path]
        return normal(*r.shape, dtype=r.dtype, scale=1.2 * n**-0.5) if "shared" in names else r

    p = jax.tree_util.tree_map_with_path(table, drawn(structs, dtype), is_leaf=lambda r: isinstance(r, Random))
    inputs = integers(b, long, below=words), integers(b, below=long // 2), integers(b, short, below=words)
    inputs += integers(b, below=short // 2), integers(b, candidates, short, below=words)
    return Built(run, (p, *inputs, integers(b, candidates, short, below=12)))


@program("masknet-rows-gate-themselves-in-parallel-blocks-many-deeds-weighed-and-authors-spread-linen", GROUP)
def _masked_rows(size: Size) -> Built:
    """This program ranks posts for readers: chances of many deeds are weighed, and later posts of one author count for less.

    It is the parallel MaskNet (Wang, 2021) of the heavy ranker in twitter/the-algorithm, with linen: logarithms of numbers and
    rows of names are joined, small networks make masks out of the whole row for several blocks, and a last network tells deeds.
    """
    from flax import linen as nn

    readers, posts, numbers, fields, values, c, blocks, inner, out, deeds, keep, authors = pick(
        size,
        (16, 1024, 512, 32, 100000, 32, 6, 1024, 512, 10, 128, 100),
        (2, 150, 96, 12, 1000, 8, 3, 128, 64, 8, 20, 12),
        (2, 7, 4, 3, 11, 2, 2, 6, 4, 3, 3, 2),
    )
    dtype = half(size)
    how = {"dtype": dtype, "param_dtype": dtype}

    class Block(nn.Module):
        """This masks a row by what a small network makes of the row, and multiplies it."""

        @nn.compact
        def __call__(self, normed, row):
            mask = nn.Dense(normed.shape[-1], **how)(nn.relu(nn.Dense(inner, **how)(row)))
            return nn.relu(nn.LayerNorm(**how)(nn.Dense(out, use_bias=False, **how)(normed * mask)))

    class Net(nn.Module):
        """This gives logits of deeds."""

        @nn.compact
        def __call__(self, number, name):
            number = jnp.sign(number) * jnp.log1p(jnp.abs(number))
            number = nn.BatchNorm(use_running_average=True, **how)(number.astype(dtype))
            shift = jnp.arange(fields) * values
            table = nn.Embed(fields * values, c, **how)(name + shift)
            row = jnp.concatenate([number, table.reshape(*name.shape[:-1], fields * c)], axis=-1)
            parts = [nn.LayerNorm(**how)(number)] + [nn.LayerNorm(**how)(table[..., k, :]) for k in range(fields)]
            normed = jnp.concatenate(parts, axis=-1)
            y = jnp.concatenate([Block()(normed, row) for _ in range(blocks)], axis=-1)
            for wide in (inner, inner // 2):
                y = nn.relu(nn.Dense(wide, **how)(y))
            return nn.Dense(deeds, dtype=jnp.float32, param_dtype=dtype)(y)

    model = Net()
    shapes = jax.ShapeDtypeStruct((readers, posts, numbers), jnp.float32)
    structs = jax.eval_shape(
        model.init, jax.random.key(0), shapes, jax.ShapeDtypeStruct((readers, posts, fields), jnp.int32)
    )

    def run(p, number, level, name, author, known, worth, done):
        """This gives kept posts with their marks, chances of deeds, how much was lost to authors, and errors by deed."""
        logits = model.apply(p, number * jnp.exp(1.5 * level), name)
        chance = jax.nn.sigmoid(logits)
        mark = chance @ jnp.exp(worth)
        mark = mark * jnp.where(known, 1.0, 0.75)
        order = jnp.argsort(-mark, axis=1)
        who = jnp.take_along_axis(author, order, axis=1)
        sorted_ = jnp.take_along_axis(mark, order, axis=1)
        hot = jax.nn.one_hot(who, authors, dtype=jnp.float32)
        before = jnp.take_along_axis(jnp.cumsum(hot, axis=1), who[..., None], axis=2)[..., 0] - 1
        spread = sorted_ * (0.75 * 0.5**before + 0.25)
        best, at = lax.top_k(spread, keep)
        kept = jnp.take_along_axis(order, at, axis=1)
        by = jnp.take_along_axis(who, at, axis=1)
        many = jnp.max(jnp.sum(jax.nn.one_hot(by, authors), axis=1), axis=1)
        real = (done < 2).astype(jnp.float32)
        error = jnp.mean(jax.nn.softplus(logits) - real * logits, axis=(0, 1))
        part = jnp.mean(real, axis=(0, 1))
        base = -(part * jnp.log(part + 1e-6) + (1 - part) * jnp.log(1 - part + 1e-6))
        lost = 1 - jnp.sum(best, axis=1) / jnp.sum(sorted_[:, :keep], axis=1)
        chosen = jnp.take_along_axis(chance, kept[..., None], axis=1)
        return kept, best, chosen, by, many, lost, error / jnp.maximum(base, 1e-3), jnp.mean(chance, axis=1)

    def statistics(path, r):
        """This makes spreads of numbers positive."""
        names = {str(getattr(k, "key", k)) for k in path}
        return normal(*r.shape, dtype=r.dtype, scale=0.1, offset=1.5) if "var" in names else r

    p = jax.tree_util.tree_map_with_path(statistics, drawn(structs, dtype), is_leaf=lambda r: isinstance(r, Random))
    inputs = normal(readers, posts, numbers), normal(numbers), integers(readers, posts, fields, below=values)
    inputs += integers(readers, posts, below=authors), booleans(readers, posts), normal(deeds)
    return Built(run, (p, *inputs, integers(readers, posts, deeds, below=12)))


@program("randla-net-points-of-streets-thrown-away-at-random-neighbours-pooled-by-shares-per-channel-equinox", GROUP)
def _thrown_away(size: Size) -> Built:
    """This program names each point of scans of streets with a network that keeps a random quarter of points at each level.

    It is RandLA-Net (Hu, 2019; QingyongHu/RandLA-Net), with equinox: places of neighbours are told to features, shares by channel
    pool them twice in each residual unit, and on the way up each point copies what its nearest kept point knows.
    """
    import equinox as eqx

    b, n, near, widths, less, channels, kinds, chunk = pick(
        size,
        (2, 8192, 16, (32, 128, 256, 512), 4, 7, 19, 1024),
        (1, 768, 8, (8, 16, 32), 4, 7, 13, 256),
        (2, 32, 3, (4, 8), 4, 5, 3, 8),
    )
    dtype, levels = half(size), len(widths)

    class Shared(eqx.Module):
        """This is a matrix for all points with a norm by kept averages, and a leaky ramp."""

        matrix: jax.Array
        mean: jax.Array
        spread: jax.Array
        scale: jax.Array
        bias: jax.Array
        leak: float = eqx.field(static=True)

        def __init__(self, i, o, leak=0.2):
            self.matrix, self.leak = jnp.zeros((i, o), dtype), leak
            self.mean, self.spread, self.scale, self.bias = (jnp.zeros(o, dtype) for _ in range(4))

        def __call__(self, x):
            x = (x @ self.matrix).astype(jnp.float32)
            x = (x - self.mean) * lax.rsqrt(jnp.abs(self.spread).astype(jnp.float32) + 1e-5) * self.scale + self.bias
            return (x if self.leak == 1 else jax.nn.leaky_relu(x, self.leak)).astype(dtype)

    class Pool(eqx.Module):
        """This sums neighbours by shares that each channel has for itself."""

        score: jax.Array
        after: Shared

        def __init__(self, i, o):
            self.score, self.after = jnp.zeros((i, i), dtype), Shared(i, o)

        def __call__(self, x):
            share = jax.nn.softmax((x @ self.score).astype(jnp.float32), axis=1)
            return self.after(jnp.sum(share.astype(dtype) * x, axis=1))

    class Unit(eqx.Module):
        """This is a residual unit of two pools around places of neighbours."""

        enter: Shared
        place1: Shared
        place2: Shared
        pool1: Pool
        pool2: Pool
        leave: Shared
        short: Shared

        def __init__(self, i, o):
            m = o // 2
            self.enter, self.place1, self.place2 = Shared(i, m), Shared(10, m), Shared(m, m)
            self.pool1, self.pool2 = Pool(2 * m, m), Pool(2 * m, o)
            self.leave, self.short = Shared(o, 2 * o, 1), Shared(i, 2 * o, 1)

        def __call__(self, x, place, at):
            there = place[at]
            here = jnp.broadcast_to(place[:, None], there.shape)
            gap = here - there
            far = jnp.sqrt(jnp.sum(gap**2, axis=-1, keepdims=True) + 1e-9)
            told = self.place1(jnp.concatenate([far, gap, here, there], axis=-1).astype(dtype))
            y = self.enter(x)
            y = self.pool1(jnp.concatenate([y[at], told], axis=-1))
            y = self.pool2(jnp.concatenate([y[at], self.place2(told)], axis=-1))
            return jax.nn.leaky_relu(self.leave(y) + self.short(x), 0.2)

    class Net(eqx.Module):
        """This gives logits of one cloud, from places [n, 3] in random order and features [n, channels]."""

        enter: Shared
        units: list
        middle: Shared
        up: list
        ends: list
        last: jax.Array

        def __init__(self):
            self.enter = Shared(channels, 8)
            before = (8, *(2 * w for w in widths))
            self.units = [Unit(i, o) for i, o in zip(before, widths, strict=False)]
            self.middle = Shared(before[-1], before[-1])
            skips = (before[1], *before[1:-1])
            self.up = [Shared(before[k + 1] + skips[k], skips[k]) for k in reversed(range(levels))]
            self.ends = [Shared(skips[0], 64), Shared(64, 32)]
            self.last = jnp.zeros((32, kinds), dtype)

        def __call__(self, place, x):
            x, kept, skips, backs = self.enter(x), place, [], []
            for k, unit in enumerate(self.units):
                at = nearest(kept, kept, near)
                x = unit(x, kept, at)
                if k == 0:
                    skips.append(x)
                count = len(kept) // less
                backs.append(nearest(kept, kept[:count], 1)[:, 0])
                x = jnp.max(x[at[:count]], axis=1)
                skips.append(x)
                kept = kept[:count]
            x = self.middle(x)
            for k, mix in zip(reversed(range(levels)), self.up, strict=True):
                x = mix(jnp.concatenate([x[backs[k]], skips[k]], axis=-1))
            for f in self.ends:
                x = f(x)
            return (x @ self.last).astype(jnp.float32)

    def nearest(asked, there, count):
        """This gives the nearest of points [m, 3] for each of points [n, 3], some rows at a time."""
        square = jnp.sum(there**2, axis=1)

        def rows(some):
            """These are the neighbours of some rows."""
            far = square - 2 * some @ there.T
            return jnp.argmin(far, axis=1)[:, None] if count == 1 else lax.top_k(-far, count)[1]

        parts = max(len(asked) // chunk, 1)
        return lax.map(rows, asked.reshape(parts, -1, 3)).reshape(-1, count)

    structs = eqx.filter_eval_shape(Net)
    arrays, rest = eqx.partition(structs, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def run(p, flat, tall, colour, label):
        """This gives classes and how sure they are, entropies by height, tables of classes and their shared parts."""
        ground = 12.0 * jnp.arctan(flat)
        high = jnp.where(tall[..., :1] > 0.3, 3.0 * jnp.abs(tall[..., 1:]), 0.05 * tall[..., 1:])
        place = jnp.concatenate([ground, high + 0.2 * jnp.sin(ground[..., :1] / 5)], axis=-1)
        place = place - jnp.mean(place, axis=1, keepdims=True)
        x = jnp.concatenate([place / 10.0, jnp.tanh(colour)], axis=-1).astype(dtype)
        logits = jax.vmap(eqx.combine(p, rest))(place, x)
        logp = jax.nn.log_softmax(logits, axis=-1)
        kind, sure = jnp.argmax(logp, axis=-1), jnp.exp(jnp.max(logp, axis=-1))
        entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
        band = jax.nn.one_hot(jnp.clip(high[..., 0], 0, 7).astype(jnp.int32), 8)
        by_height = jnp.einsum("bn,bnk->k", entropy, band) / jnp.maximum(jnp.sum(band, axis=(0, 1)), 1)
        table = jnp.zeros((kinds, kinds), jnp.int32).at[label.reshape(-1), kind.reshape(-1)].add(1)
        both = jnp.diagonal(table)
        shared = both / jnp.maximum(jnp.sum(table, axis=0) + jnp.sum(table, axis=1) - both, 1)
        surprise = -jnp.take_along_axis(logp, label[..., None], axis=-1)[..., 0]
        return kind.astype(jnp.uint8), sure, by_height, table, shared, jnp.mean(surprise, axis=1)

    def weights(path, s):
        """This describes matrices, and averages and gains of norms."""
        if len(s.shape) == 2:
            return normal(*s.shape, dtype=dtype, scale=s.shape[0] ** -0.5)
        near_zero = {str(getattr(k, "name", k)) for k in path} & {"mean", "bias"}
        return normal(*s.shape, dtype=dtype, scale=0.1, offset=0.0 if near_zero else 1.0)

    p = jax.tree_util.tree_map_with_path(weights, arrays)
    inputs = normal(b, n, 2), normal(b, n, 2), normal(b, n, channels - 3)
    return Built(run, (p, *inputs, integers(b, n, below=kinds)))
