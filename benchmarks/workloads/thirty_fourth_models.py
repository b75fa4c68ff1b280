"""Clean pictures, forecasts, streets, asked pairs and hidden patches, the thirty-fourth set: its author saw no plan."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, booleans, half, integers, normal, pick, program
from benchmarks.workloads.transformer_models import library
from benchmarks.workloads.twenty_sixth_parts import drawn, is_random

GROUP = "thirty-fourth"


@program("rain-wiped-off-photographs-by-channels-that-attend-on-three-levels-linen", GROUP)
def _wiped(size: Size) -> Built:
    """This program takes rain off photographs with a U of blocks whose attention goes between channels.

    It is Restormer (Zamir, 2022; swz30/Restormer), with linen: norms have no shift and take no mean off, queries and keys pass a
    filter per channel and have length one over all pixels, and maps change size by moving pixels into channels and back.
    """
    from flax import linen as nn

    b, high, wide, c, depth, heads = pick(
        size,
        (2, 256, 384, 48, (1, 2, 2, 1), (1, 2, 4)),
        (1, 48, 64, 16, (1, 1, 1, 1), (1, 2, 4)),
        (1, 8, 4, 4, (1, 1, 1, 1), (1, 1, 2)),
    )
    dtype = half(size)
    how = {"dtype": dtype, "param_dtype": dtype, "use_bias": False}

    def alone(x, stride=1):
        """This filters each channel with nine taps."""
        return nn.Conv(x.shape[-1], (3, 3), stride, feature_group_count=x.shape[-1], **how)(x)

    class Scale(nn.Module):
        """This divides by the spread of channels, and takes no mean off what it divides."""

        @nn.compact
        def __call__(self, x):
            gain = self.param("scale", nn.initializers.ones, (x.shape[-1],), dtype)
            spread = jnp.var(x.astype(jnp.float32), axis=-1, keepdims=True)
            return (x.astype(jnp.float32) * lax.rsqrt(spread + 1e-5)).astype(dtype) * gain

    class Block(nn.Module):
        """This is attention between channels, and a gated layer of filters."""

        heads: int

        @nn.compact
        def __call__(self, x):
            b, h, w, c = x.shape
            warm = self.param("warm", nn.initializers.ones, (self.heads,), dtype)
            y = alone(nn.Conv(3 * c, (1, 1), **how)(Scale()(x))).reshape(b, h * w, 3, self.heads, c // self.heads)
            query, key, value = y[:, :, 0], y[:, :, 1], y[:, :, 2]

            def unit(z):
                """This gives channels length one over pixels."""
                z = z.astype(jnp.float32)
                return (z * lax.rsqrt(jnp.sum(z * z, axis=1, keepdims=True) + 1e-6)).astype(dtype)

            scores = jnp.einsum("bphi,bphj->bhij", unit(query), unit(key), preferred_element_type=jnp.float32)
            shares = nn.softmax(scores * (4 * warm)[:, None, None].astype(jnp.float32), axis=-1).astype(dtype)
            out = jnp.einsum("bhij,bphj->bphi", shares, value).reshape(b, h, w, c)
            x = x + nn.Conv(c, (1, 1), **how)(out)
            one, two = jnp.split(alone(nn.Conv(2 * int(2.66 * c), (1, 1), **how)(Scale()(x))), 2, axis=-1)
            return x + nn.Conv(c, (1, 1), **how)(nn.gelu(one, approximate=False) * two)

    def packed(x):
        """This halves sides: four pixels become channels."""
        b, h, w, c = x.shape
        return x.reshape(b, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 5, 2, 4).reshape(b, h // 2, w // 2, 4 * c)

    def opened(x):
        """This doubles sides: channels become four pixels."""
        b, h, w, c = x.shape
        return x.reshape(b, h, w, c // 4, 2, 2).transpose(0, 1, 4, 2, 5, 3).reshape(b, 2 * h, 2 * w, c // 4)

    class Cleaner(nn.Module):
        """This is the whole network."""

        @nn.compact
        def __call__(self, photo):
            x, kept = nn.Conv(c, (3, 3), **how)(photo), []
            for k in range(3):
                for _ in range(depth[k]):
                    x = Block(heads[k])(x)
                if k < 2:
                    kept.append(x)
                    x = packed(nn.Conv(x.shape[-1] // 2, (3, 3), **how)(x))
            for k in (1, 0):
                x = opened(nn.Conv(2 * x.shape[-1], (3, 3), **how)(x))
                x = jnp.concatenate([x, kept[k]], axis=-1)
                if k:
                    x = nn.Conv(x.shape[-1] // 2, (1, 1), **how)(x)
                x = Block(heads[k])(x)
            for _ in range(depth[3]):
                x = Block(heads[0])(x)
            return photo + nn.Conv(3, (3, 3), **how)(x)

    model = Cleaner()

    def run(p, rainy, clean):
        """This gives cleaned photographs, and how near they come to clean ones: decibels and likeness of parts."""
        made = jnp.clip(model.apply(p, rainy).astype(jnp.float32) * 0.2 + 0.5, 0, 1)
        true = jnp.clip(clean.astype(jnp.float32) * 0.2 + 0.5, 0, 1)
        grey = jnp.array([0.257, 0.504, 0.098])
        one, two = made @ grey + 0.0627, true @ grey + 0.0627
        loud = -10 * jnp.log10(jnp.mean(jnp.square(one - two), axis=(1, 2)) + 1e-8)

        def blurred(x):
            return lax.reduce_window(x, 0.0, lax.add, (1, 7, 7), (1, 1, 1), "SAME") / 49

        m, n = blurred(one), blurred(two)
        v, w, both = blurred(one * one) - m * m, blurred(two * two) - n * n, blurred(one * two) - m * n
        alike = (2 * m * n + 1e-4) * (2 * both + 9e-4) / ((m * m + n * n + 1e-4) * (v + w + 9e-4))
        return made, loud, jnp.mean(alike, axis=(1, 2))

    photo = normal(b, high, wide, 3, dtype=dtype)
    return Built(run, (drawn(jax.eval_shape(model.init, jax.random.key(0), photo.struct)), photo, photo))


@program("days-known-ahead-mixed-along-time-then-along-columns-counts-forecast-nnx", GROUP)
def _ahead(size: Size) -> Built:
    """This program foretells daily counts of goods from their past, from what is known of days ahead, and from what goods are.

    It is TSMixer with extra inputs (Chen, 2023; google-research/tsmixer), with nnx: small layers mix times and then columns, norms
    go over both at once, what goods are joins in each block, and two heads give a negative binomial law of counts.
    """
    from flax import nnx

    b, past, ahead, c, known, still, w, depth = pick(
        size, (2048, 512, 96, 32, 16, 24, 128, 4), (128, 96, 28, 8, 6, 10, 64, 4), (2, 6, 3, 2, 2, 2, 4, 4)
    )
    dtype = half(size)
    how = {"dtype": dtype, "param_dtype": dtype}

    class Columns(nnx.Module):
        """This mixes columns at each time, with a shortcut that is mixed too where widths differ."""

        def __init__(self, i, o, rngs):
            self.norm = nnx.LayerNorm(o, reduction_axes=(-2, -1), feature_axes=-1, rngs=rngs, **how)
            self.one, self.two = nnx.Linear(i, o, rngs=rngs, **how), nnx.Linear(o, o, rngs=rngs, **how)
            self.short = nnx.Linear(i, o, rngs=rngs, **how) if i != o else None

        def __call__(self, x):
            y = self.two(nnx.relu(self.one(x)))
            return self.norm(y + (x if self.short is None else self.short(x)))

    class Times(nnx.Module):
        """This mixes times of each column."""

        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(w, reduction_axes=(-2, -1), use_fast_variance=False, rngs=rngs, **how)
            self.mix = nnx.Linear(ahead, ahead, rngs=rngs, **how)

        def __call__(self, x):
            return self.norm(x + nnx.relu(self.mix(x.swapaxes(-1, -2))).swapaxes(-1, -2))

    class Block(nnx.Module):
        """This joins what goods are, and mixes both ways."""

        def __init__(self, i, rngs):
            self.fixed, self.times, self.columns = Columns(still, w, rngs), Times(rngs), Columns(i + w, w, rngs)

        def __call__(self, x, good):
            same = jnp.broadcast_to(self.fixed(good[:, None]), (b, ahead, w))
            return self.times(self.columns(jnp.concatenate([x, same], axis=-1)))

    class Mixer(nnx.Module):
        """This is the whole network."""

        def __init__(self, rngs):
            self.along = nnx.LinearGeneral(past, ahead, axis=1, rngs=rngs, **how)
            self.seen, self.known = Columns(c + known, w, rngs), Columns(known, w, rngs)
            self.blocks = nnx.List([Block(2 * w if not k else w, rngs) for k in range(depth)])
            self.head = nnx.Linear(w, 2, rngs=rngs, **how)

        def __call__(self, x, days, good):
            before = jnp.concatenate([x, days[:, :past]], axis=-1)
            x = self.along(before).swapaxes(1, 2)
            x = jnp.concatenate([self.seen(x), self.known(days[:, past:])], axis=-1)
            for block in self.blocks:
                x = block(x, good)
            return self.head(x)

    graph, state = nnx.split(nnx.eval_shape(lambda: Mixer(nnx.Rngs(0))))

    def run(p, counts, other, days, good, truth):
        """This gives means and spreads of days ahead, surprise at the truth, and the error scaled by that of last week's days."""
        sold = counts.astype(jnp.float32)
        level = jnp.mean(sold, axis=1, keepdims=True) + 1.0
        x = jnp.concatenate([(sold / level)[..., None].astype(dtype), other], axis=-1)
        head = nnx.merge(graph, p)(x, days, good).astype(jnp.float32)
        mean, shape = level * jax.nn.softplus(head[..., 0] + 0.5) + 1e-3, jax.nn.softplus(head[..., 1]) + 0.05
        each = 1 / shape
        true = truth.astype(jnp.float32)
        logp = lax.lgamma(true + each) - lax.lgamma(each) - lax.lgamma(true + 1)
        logp = logp - each * jnp.log1p(shape * mean) + true * (jnp.log(shape * mean) - jnp.log1p(shape * mean))
        gap = min(7, past - 1)
        plain = jnp.mean(jnp.square(sold[:, gap:] - sold[:, :-gap]), axis=1) + 1e-3
        scaled = jnp.sqrt(jnp.mean(jnp.square(true - mean), axis=1) / plain)
        share = jnp.sum(sold, axis=1) / (jnp.sum(sold) + 1e-3)
        return mean, mean + shape * mean * mean, -jnp.sum(logp, axis=1), jnp.sum(share * scaled), scaled

    inputs = (
        integers(b, past, below=30),
        normal(b, past, c - 1, dtype=dtype),
        normal(b, past + ahead, known, dtype=dtype),
    )
    return Built(run, (drawn(state), *inputs, normal(b, still, dtype=dtype), integers(b, ahead, below=30)))


@program("streets-pooled-at-four-coarsenesses-and-spread-back-equinox", GROUP)
def _streets(size: Size) -> Built:
    """This program names the pixels of streets with maps that are pooled to a few cells of four sizes and spread back.

    It is PSPNet (Zhao, 2017; hszhao/semseg), with equinox: residual units have holes in their filters and norms with running
    statistics in a `State`, units bend at slopes of their own, and pictures [batch, 3, rows, columns] are read both ways round.
    """
    import equinox as eqx

    b, high, wide, c, kinds = pick(size, (4, 256, 512, 64, 19), (1, 96, 144, 12, 19), (1, 24, 32, 4, 3))
    dtype = half(size)
    cells = (1, 2, 3, 6) if size != "tiny" else (1, 2, 2, 3)

    class Step(eqx.Module):
        """This is a filter, a norm and a bend."""

        conv: eqx.nn.Conv2d
        norm: eqx.nn.BatchNorm
        bend: eqx.nn.PReLU

        def __init__(self, i, o, k, key, stride=1, hole=1):
            self.conv = eqx.nn.Conv2d(i, o, k, stride, hole * (k // 2), hole, use_bias=False, key=key)
            self.norm = eqx.nn.BatchNorm(o, "batch", mode="ema", inference=True)
            self.bend = eqx.nn.PReLU()

        def __call__(self, x, state):
            x, state = self.norm(self.conv(x), state)
            return self.bend(x), state

    class Unit(eqx.Module):
        """This is a residual bottleneck."""

        steps: list
        short: Step | None

        def __init__(self, i, o, key, stride=1, hole=1):
            keys = jax.random.split(key, 4)
            self.steps = [Step(i, o // 4, 1, keys[0]), Step(o // 4, o // 4, 3, keys[1], stride, hole)]
            self.steps.append(Step(o // 4, o, 1, keys[2]))
            self.short = Step(i, o, 1, keys[3], stride) if i != o or stride > 1 else None

        def __call__(self, x, state):
            y = x
            for step in self.steps:
                y, state = step(y, state)
            if self.short is not None:
                x, state = self.short(x, state)
            return 0.7 * (x + y), state

    class Streets(eqx.Module):
        """This is the whole network."""

        stem: list
        units: list
        narrow: list
        join: Step
        last: eqx.nn.Conv2d

        def __init__(self, key):
            keys = jax.random.split(key, 16)
            self.stem = [Step(3, c, 3, keys[0], 2), Step(c, c, 3, keys[1]), Step(c, 2 * c, 3, keys[2], 2)]
            plan = [(2 * c, 4 * c, 1, 1), (4 * c, 8 * c, 2, 1), (8 * c, 8 * c, 1, 1)]
            plan += [(8 * c, 16 * c, 1, 2), (16 * c, 16 * c, 1, 2), (16 * c, 16 * c, 1, 4)]
            self.units = [Unit(i, o, k, s, d) for (i, o, s, d), k in zip(plan, keys[3:], strict=False)]
            self.narrow = [Step(16 * c, 4 * c, 1, k) for k in keys[9:13]]
            self.join = Step(32 * c, 4 * c, 3, keys[13])
            self.last = eqx.nn.Conv2d(4 * c, kinds, 1, key=keys[14])

        def __call__(self, x, state):
            for step in self.stem + self.units:
                x, state = step(x, state)
            parts = [x]
            for many, step in zip(cells, self.narrow, strict=True):
                y, state = step(eqx.nn.AdaptiveAvgPool2d(many)(x), state)
                parts.append(jax.image.resize(y, (y.shape[0], *x.shape[1:]), "bilinear"))
            x, state = self.join(jnp.concatenate(parts), state)
            return self.last(x)

    shapes = eqx.filter_eval_shape(eqx.nn.make_with_state(Streets), jax.random.key(0))

    def is_float(x):
        return isinstance(x, jax.ShapeDtypeStruct) and jnp.issubdtype(x.dtype, jnp.floating)

    arrays, rest = eqx.partition(shapes, is_float)
    rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, rest)

    def statistics(path, s):
        """This describes means near zero, and squares near one."""
        return normal(*s.shape, dtype=dtype, scale=0.1, offset=float(path[-1].idx))

    def run(p, photo, label):
        """This gives chances of kinds per pixel, surprise, and how far found and true parts lie over each other."""
        model, state = eqx.combine(p, rest)
        look = jax.vmap(lambda x: model(x, state))
        both = look(photo) + look(photo[..., ::-1])[..., ::-1]
        scores = jax.image.resize(0.5 * both.astype(jnp.float32), (b, kinds, high, wide), "bilinear")
        logp = jax.nn.log_softmax(scores, axis=1)
        true = jax.nn.one_hot(label, kinds, axis=1)
        known = (jnp.sum(true, axis=1) > 0)[:, None]
        chance = jnp.exp(logp)
        met = jnp.sum(jnp.where(known, chance * true, 0.0), axis=(0, 2, 3))
        whole = jnp.sum(jnp.where(known, chance + true - chance * true, 0.0), axis=(0, 2, 3))
        return chance.astype(dtype), -jnp.sum(logp * true, axis=(1, 2, 3)) / jnp.sum(known, axis=(1, 2, 3)), met / whole

    def lively(path, s):
        """This describes filters that keep the variance, slopes near a quarter, and gains and shifts of norms."""
        if len(s.shape) == 4:
            return normal(*s.shape, dtype=dtype, scale=1.35 * math.prod(s.shape[1:]) ** -0.5)
        usual = 0.25 if not s.shape else 0.0 if path[-1].name == "bias" else 1.0
        return normal(*s.shape, dtype=dtype, scale=0.1, offset=usual)

    model = jax.tree_util.tree_map_with_path(lively, arrays[0])
    state = jax.tree_util.tree_map_with_path(statistics, arrays[1])
    return Built(run, ((model, state), normal(b, 3, high, wide, dtype=dtype), integers(b, high, wide, below=kinds + 1)))


@program("all-pairs-of-things-in-a-picture-asked-one-question-haiku", GROUP)
def _asked(size: Size) -> Built:
    """This program answers questions about how things in a picture stand to each other, by asking about all pairs of cells.

    It is the relation network (Santoro, 2017; kimhc6028/relational-networks), with haiku: filters give cells with their places, an
    LSTM reads the question, a network looks at each pair of cells beside the question, and sums over pairs are read.
    """
    import haiku as hk

    b, side, c, t, words, n, w, classes = pick(
        size, (64, 128, 32, 20, 90, 128, 256, 28), (16, 64, 24, 10, 90, 48, 128, 28), (2, 16, 4, 3, 7, 4, 6, 3)
    )
    dtype = half(size)

    def net(picture, question, empty):
        x = picture
        for _ in range(4):
            x = hk.GroupNorm(4)(jax.nn.relu(hk.Conv2D(c, 3, 2)(x)))
        cells = x.shape[1] * x.shape[2]
        x = x.reshape(b, cells, c)
        line = jnp.linspace(-1.0, 1.0, round(cells**0.5), dtype=dtype)
        place = jnp.stack(jnp.meshgrid(line, line, indexing="ij"), axis=-1).reshape(cells, 2)
        x = jnp.concatenate([x, jnp.broadcast_to(place, (b, cells, 2))], axis=-1)
        core = hk.ResetCore(hk.LSTM(n))
        fresh = jnp.arange(t)[:, None] <= empty
        states, _ = hk.dynamic_unroll(core, (hk.Embed(words, n)(question.T), fresh), core.initial_state(b))
        asked = states[-1]
        first = jnp.repeat(x, cells, axis=1)
        second = jnp.tile(x, (1, cells, 1))
        y = jnp.concatenate([first, second, jnp.repeat(asked[:, None], cells**2, axis=1)], axis=-1)
        y = hk.nets.MLP([w] * 4, activate_final=True, name="pair")(y)
        strength = jnp.mean(jnp.square(y.astype(jnp.float32)), axis=-1).reshape(b, cells, cells)
        y = jnp.mean(y.astype(jnp.float32), axis=1).astype(dtype)
        return hk.nets.MLP([w, w, classes], activation=jax.nn.elu, name="read")(8 * y), strength

    model = hk.without_apply_rng(hk.transform(net))

    def run(p, picture, question, empty, answer):
        """This gives chances of answers, surprise at the true ones, and how loud rows and columns of pairs are."""
        bright = (picture.astype(jnp.float32) / 128 - 1).astype(dtype)
        scores, strength = model.apply(p, bright, question, empty)
        logp = jax.nn.log_softmax(scores.astype(jnp.float32), axis=-1)
        miss = -jnp.take_along_axis(logp, answer[:, None], axis=-1)[:, 0]
        share = strength / jnp.sum(strength, axis=(1, 2), keepdims=True)
        return jnp.exp(logp), miss, jnp.sum(share, axis=2), jnp.max(share, axis=1)

    inputs = integers(b, side, side, 3, below=256), integers(b, t, below=words), integers(b, below=max(1, t // 2))
    structs = jax.eval_shape(
        model.init,
        jax.random.key(0),
        jax.ShapeDtypeStruct((b, side, side, 3), dtype),
        inputs[1].struct,
        inputs[2].struct,
    )
    return Built(run, (drawn(structs, dtype), *inputs, integers(b, below=classes)))


@program("hidden-patches-named-as-codes-with-layers-scaled-and-biased-by-place-beit", GROUP)
def _named(size: Size) -> Built:
    """This program tells how well hidden patches of photographs are named as codes of another network.

    It is FlaxBeitForMaskedImageModeling of transformers, with settings that are seldom used: each layer has its own biases by
    place, places are learned too, branches have learned scales, heads are wide and few, and shares of the last layer are read.
    """
    transformers = library()
    b, side, patch, n, h, depth, codes = pick(
        size, (32, 224, 16, 512, 4, 6, 8192), (8, 64, 8, 192, 3, 6, 1024), (1, 8, 4, 8, 2, 2, 11)
    )
    dtype, many = half(size), (side // patch) ** 2
    config = transformers.BeitConfig(
        vocab_size=codes,
        hidden_size=n,
        num_hidden_layers=depth,
        num_attention_heads=h,
        intermediate_size=3 * n,
        hidden_act="gelu_new",
        image_size=side,
        patch_size=patch,
        use_mask_token=True,
        use_absolute_position_embeddings=True,
        use_relative_position_bias=True,
        layer_scale_init_value=0.5,
        drop_path_rate=0.0,
        layer_norm_eps=1e-6,
    )
    model = transformers.FlaxBeitForMaskedImageModeling(
        config, _do_init=False, dtype=dtype, input_shape=(1, side, side, 3)
    )
    structs = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, side, side, 3)))

    def run(p, photo, hidden, code):
        """This gives surprise at hidden codes, how likely true codes and how unsure all are, by rows, and heads' far sights."""
        photo = photo.astype(jnp.float32).transpose(0, 3, 1, 2) / 127.5 - 1
        out = model(photo.astype(dtype), bool_masked_pos=hidden, params=p, output_attentions=True)
        logp = jax.nn.log_softmax(out.logits.astype(jnp.float32), axis=-1)
        found = jnp.take_along_axis(logp, code[..., None], axis=-1)[..., 0]
        doubt = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
        miss = -jnp.sum(jnp.where(hidden, found, 0.0), axis=1) / (jnp.sum(hidden, axis=1) + 1e-6)
        line = jnp.arange(side // patch, dtype=jnp.float32)
        place = jnp.stack(jnp.meshgrid(line, line, indexing="ij"), axis=-1).reshape(many, 2)
        far = jnp.sqrt(jnp.sum(jnp.square(place[:, None] - place), axis=-1))
        last = out.attentions[-1][..., 1:, 1:].astype(jnp.float32)
        return miss, found, doubt, jnp.einsum("bhqk,qk->bh", last, far) / many

    def louder(path, r):
        """This makes tables of biases as large as they get in training."""
        return replace(r, scale=1.0) if "table" in str(path[-1].key) else r

    def shown(r: Random) -> Random:
        """This keeps what stands for hidden patches and the first word near one."""
        return replace(r, scale=0.5) if r.shape[:2] == (1, 1) and len(r.shape) == 3 else r

    p = jax.tree_util.tree_map_with_path(louder, drawn(structs, dtype), is_leaf=is_random)
    p = jax.tree.map(shown, p, is_leaf=is_random)
    return Built(run, (p, integers(b, side, side, 3, below=256), booleans(b, many), integers(b, many, below=codes)))
