"""Choices by likelihood, halves that mend each other, moved features, the forty-third set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program
from benchmarks.workloads.transformer_models import library
from benchmarks.workloads.twenty_sixth_parts import drawn

GROUP = "forty-third"


@program("xglm-causes-and-effects-chosen-by-likelihood-less-likelihood-without-the-premise-transformers", GROUP)
def _choices(size: Size) -> Built:
    """This program answers questions with choices by the likelihood of each choice after the premise, in several ways.

    It is how XCOPA is scored with XGLM (Lin, 2021), by FlaxXGLMForCausalLM of transformers: premises and choices of many lengths
    are joined, surprises of choices are summed or averaged, and the likelihood after a neutral start is taken off (Holtzman, 2021).
    """
    transformers = library()
    b, choices, premise, answer, start, n, heads, depth, words = pick(
        size,
        (16, 4, 40, 24, 4, 1024, 16, 12, 256008),
        (2, 2, 20, 12, 3, 256, 8, 3, 8008),
        (2, 2, 4, 3, 2, 8, 2, 2, 15),
    )
    dtype, long = half(size), premise + answer
    config = transformers.XGLMConfig(
        vocab_size=words,
        max_position_embeddings=2048 if size != "tiny" else 16,
        d_model=n,
        ffn_dim=4 * n,
        num_layers=depth,
        attention_heads=heads,
    )
    model = transformers.FlaxXGLMForCausalLM(config, input_shape=(1, long), dtype=dtype, _do_init=False)
    structs = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, long)))

    def run(p, before, before_short, after, after_short, neutral, label):
        """This gives sums, means and gains of logarithms of chances, what is chosen by each, hits, and greedy matches."""
        many = answer - after_short
        after, many = after.reshape(-1, answer), many.reshape(-1)

        def scored(told, count):
            """This scores choices after the first `count` words of what is told; both have one row for a choice."""
            place = jnp.arange(told.shape[1] + answer)
            one = told[:, jnp.minimum(place, told.shape[1] - 1)]
            at = place - count[:, None]
            two = jnp.take_along_axis(after, jnp.clip(at, 0, answer - 1), axis=1)
            own = (at >= 0) & (at < many[:, None])
            word = jnp.where(at < 0, one, jnp.where(own, two, 1))
            real = at < many[:, None]
            logits = model(word, attention_mask=real.astype(jnp.int32), params=p).logits[:, :-1]
            logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
            chance = jnp.take_along_axis(logp, word[:, 1:, None], axis=-1)[..., 0]
            own = own[:, 1:]
            greedy = jnp.all((jnp.argmax(logp, axis=-1) == word[:, 1:]) | ~own, axis=1)
            worst = jnp.min(jnp.where(own, chance, 0.0), axis=1)
            return jnp.sum(chance * own, axis=1), worst, greedy

        told = jnp.repeat(before, choices, axis=0)
        whole, worst, greedy = scored(told, jnp.repeat(premise - before_short, choices))
        alone, _, _ = scored(jnp.broadcast_to(neutral, (b * choices, start)), jnp.full(b * choices, start))
        marks = jnp.stack([whole, whole / many, whole - alone, worst]).reshape(4, b, choices)
        chosen = jnp.argmax(marks, axis=-1)
        sure = jax.nn.softmax(marks, axis=-1)
        gap = lax.top_k(marks, 2)[0]
        return marks, chosen, jnp.mean(chosen == label, axis=1), sure, gap[..., 0] - gap[..., 1], greedy

    def table(path, r):
        """This gives the table of words, which is also the last matrix, rows of the length that the model expects."""
        return normal(*r.shape, dtype=r.dtype, scale=1.5 * n**-0.5) if "embed_tokens" in str(path) else r

    p = jax.tree_util.tree_map_with_path(table, drawn(structs, dtype), is_leaf=lambda r: isinstance(r, Random))
    inputs = integers(b, premise, below=words), integers(b, below=premise // 2)
    inputs += integers(b, choices, answer, below=words), integers(b, choices, below=answer - 1)
    return Built(run, (p, *inputs, integers(start, below=words), integers(b, below=choices)))


@program("scinet-even-and-odd-moments-split-in-a-tree-mend-each-other-loads-forecast-grad-equinox", GROUP)
def _halves(size: Size) -> Built:
    """This program learns to forecast many loads with a tree that parts moments into even and odd ones again and again.

    It is SCINet (Liu, 2021; cure-lab/SCINet), with equinox: each half is scaled by an exponential of filters over the other half,
    then added to or taken from it, leaves are laced together again, and two such trees are stacked with a loss on both.
    """
    import equinox as eqx

    b, long, ahead, columns, inner, levels, stacks = pick(
        size, (64, 192, 96, 321, 321, 2, 2), (16, 96, 48, 32, 64, 2, 2), (2, 8, 4, 3, 4, 2, 2)
    )
    dtype = half(size)

    class Filters(eqx.Module):
        """This is two filters over time with edges repeated."""

        first: eqx.nn.Conv1d
        second: eqx.nn.Conv1d

        def __init__(self, key):
            one, two = jax.random.split(key)
            self.first = eqx.nn.Conv1d(columns, inner, 5, key=one)
            self.second = eqx.nn.Conv1d(inner, columns, 3, key=two)

        def __call__(self, x):
            x = jax.nn.leaky_relu(self.first(jnp.pad(x, ((0, 0), (3, 3)), mode="edge")), 0.01)
            return jnp.tanh(self.second(x))

    class Tree(eqx.Module):
        """This is a block that splits, and the blocks below it."""

        filters: list
        below: list

        def __init__(self, level, key):
            keys = jax.random.split(key, 6)
            self.filters = [Filters(k) for k in keys[:4]]
            self.below = [Tree(level - 1, k) for k in keys[4:]] if level > 1 else []

        def __call__(self, x):
            even, odd = x[:, ::2], x[:, 1::2]
            scale_odd, scale_even, plus, minus = self.filters
            one, two = even * jnp.exp(scale_even(odd)), odd * jnp.exp(scale_odd(even))
            even, odd = one + plus(two), two - minus(one)
            if self.below:
                even, odd = self.below[0](even), self.below[1](odd)
            return jnp.stack([even, odd], axis=-1).reshape(x.shape)

    class Net(eqx.Module):
        """These are stacked trees for one history [columns, long]; it gives one forecast for each tree."""

        trees: list
        ends: list

        def __init__(self, key):
            keys = jax.random.split(key, 2 * stacks)
            self.trees = [Tree(levels, k) for k in keys[:stacks]]
            self.ends = [eqx.nn.Linear(long, ahead, use_bias=False, key=k) for k in keys[stacks:]]

        def __call__(self, x):
            told = []
            for tree, end in zip(self.trees, self.ends, strict=True):
                told.append(jax.vmap(end)(tree(x) + x))
                x = jnp.concatenate([x, told[-1]], axis=1)[:, -long:]
            return jnp.stack(told)

    shapes = eqx.filter_eval_shape(Net, jax.random.key(0))
    arrays, rest = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    time = np.arange(long + ahead)[:, None]
    waves = np.concatenate([f(2 * np.pi * time / k) for k in (24, 168) for f in (np.sin, np.cos)], axis=1)

    def run(p, mix, noise, level):
        """This gives the loss, slopes, errors of both forecasts by time, the last forecast, and relative errors by column."""
        drift = 0.3 * (long + ahead) ** -0.5 * jnp.cumsum(noise, axis=1)
        series = jnp.asarray(waves, jnp.float32) @ mix + drift + 0.2 * noise
        series = jnp.swapaxes(jnp.exp(0.3 * level)[:, None] * (2 + series), 1, 2)
        past, real = series[..., :long], series[..., long:]
        mean, spread = (f(past, axis=2, keepdims=True) for f in (jnp.mean, jnp.std))
        spread = spread + 1e-3

        def loss(p):
            """This is the mean absolute error of all forecasts."""
            told = jax.vmap(eqx.combine(p, rest))(((past - mean) / spread).astype(dtype))
            told = told.astype(jnp.float32) * spread[:, None] + mean[:, None]
            error = jnp.abs(told - real[:, None])
            return jnp.mean(error), (told[:, -1], jnp.mean(error, axis=(0, 2)))

        (value, (told, error)), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        wrong = jnp.sqrt(jnp.sum((told - real) ** 2, axis=(0, 2)))
        relative = wrong / jnp.sqrt(jnp.sum((real - jnp.mean(real, axis=(0, 2), keepdims=True)) ** 2, axis=(0, 2)))
        one, two = (z - jnp.mean(z, axis=0) for z in (told, real))
        agree = jnp.sum(one * two, axis=0) * lax.rsqrt(jnp.sum(one**2, axis=0) * jnp.sum(two**2, axis=0) + 1e-9)
        return value, jax.tree.leaves(slopes), error, told, relative, jnp.mean(agree, axis=1)

    def weights(s):
        """This describes filters [outputs, inputs, width], matrices and shifts."""
        if len(s.shape) == 3:
            return normal(*s.shape, dtype=dtype, scale=0.6 * (s.shape[1] * s.shape[2]) ** -0.5)
        return normal(*s.shape, dtype=dtype, scale=s.shape[1] ** -0.5 if s.shape[1] > 1 else 0.1)

    p = jax.tree.map(weights, arrays)
    return Built(run, (p, normal(b, 4, columns, scale=0.5), normal(b, long + ahead, columns), normal(b, columns)))


@program("transporter-key-places-found-because-features-moved-there-rebuild-the-other-frame-grad-haiku", GROUP)
def _moved(size: Size) -> Built:
    """This program finds key places of things in films without labels: features moved from one frame must rebuild another.

    It is the Transporter of Kulkarni (2019; google-deepmind), with haiku: maps become places by means of softmaxes along rows and
    columns, bells around places cut features out and paste others in, and a decoder draws the target frame.
    """
    import haiku as hk

    b, side, things, keys, widths, bell = pick(
        size, (64, 80, 4, 8, (32, 64, 128), 0.1), (4, 48, 3, 5, (12, 24, 32), 0.12), (2, 8, 2, 2, (2, 3, 4), 0.2)
    )
    dtype, small = half(size), side // 4
    line = jnp.linspace(-1.0, 1.0, small)

    def filtered(x, n, width, stride):
        """This is a filter, a norm over the batch and a ramp."""
        x = hk.Conv2D(n, width, stride)(x)
        return jax.nn.relu(hk.BatchNorm(True, True, 0.99)(x, is_training=True))

    def encoder(x):
        """This makes maps at a quarter of the side."""
        for n, width, stride in zip((widths[0], *widths), (7, 3, 3, 3), (1, 1, 2, 2), strict=True):
            x = filtered(x, n, width, stride)
            x = filtered(x, n, 3, 1)
        return x

    def along(x, axis):
        """This is the mean place along an axis, where the other one is summed first."""
        chance = jax.nn.softmax(jnp.mean(x.astype(jnp.float32), axis=axis), axis=1)
        return jnp.einsum("btk,t->bk", chance, line), chance

    def bells(frames):
        """This gives key places and bells around them."""
        maps = hk.Conv2D(keys, 1)(encoder(frames))
        (down, chance), (right, _) = along(4 * maps, 2), along(4 * maps, 1)
        gap = (line[:, None, None] - down[:, None, None]) ** 2 + (line[:, None] - right[:, None, None]) ** 2
        return jnp.stack([down, right], axis=-1), jnp.exp(-gap / (2 * bell**2)), chance

    def net(source, target):
        """This rebuilds target frames; it also gives places in both, and bells of targets."""
        both = jnp.concatenate([source, target])
        features = hk.to_module(encoder)("features")(both)
        places, heat, chance = hk.to_module(bells)("bells")(both)
        any_ = jnp.max(heat, axis=-1, keepdims=True).astype(dtype)
        (one, two), (far, near) = (jnp.split(z, 2) for z in (features, any_))
        one, far = lax.stop_gradient(one), lax.stop_gradient(far)
        x = (1 - far) * (1 - near) * one + near * two
        for n in widths[::-1]:
            x = filtered(x, n, 3, 1)
            if n != widths[0]:
                x = jax.image.resize(x, (b, 2 * x.shape[1], 2 * x.shape[2], n), "bilinear")
        return hk.Conv2D(3, 3)(filtered(x, widths[0], 3, 1)).astype(jnp.float32), places, heat, chance

    model = hk.without_apply_rng(hk.transform_with_state(net))
    frames = jax.ShapeDtypeStruct((b, side, side, 3), dtype)
    structs, states = jax.eval_shape(lambda x: model.init(jax.random.key(0), x, x), frames)

    def run(p, state, start, move, colour, large, ground):
        """This gives the loss, slopes, key places, new averages, how spread bells are, and how far keys follow things."""
        places = 0.7 * jnp.tanh(jnp.stack([start, start + 0.6 * move]))
        grid = (jnp.arange(side) + 0.5) / side * 2 - 1
        gap = (grid[:, None] - places[..., :1, None]) ** 2 + (grid - places[..., 1:, None]) ** 2
        shape = jax.nn.sigmoid((0.2 + 0.05 * jnp.tanh(large)[..., None, None] - jnp.sqrt(gap)) * side / 4)
        film = jax.image.resize(jnp.tanh(ground) * 0.3, (b, side, side, 3), "bilinear")[None]
        for k in range(things):
            cut = shape[:, :, k, :, :, None]
            film = film * (1 - cut) + cut * jnp.tanh(colour)[:, k, None, None]
        source, target = film

        def loss(p):
            """This is the mean square of what differs."""
            (told, found, heat, chance), fresh = model.apply(p, state, source.astype(dtype), target.astype(dtype))
            each = jnp.mean((told - target) ** 2, axis=(1, 2, 3))
            return jnp.mean(each), (found, heat, chance, fresh, each, told)

        (value, (found, heat, chance, fresh, each, told)), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        away = jnp.sqrt(jnp.sum((found[b:, :, None] - places[1][:, None]) ** 2, axis=-1))
        spread = -jnp.sum(chance * jnp.log(chance + 1e-9), axis=1)
        gain = jnp.mean((source - target) ** 2, axis=(1, 2, 3)) - each
        near = jnp.min(away, axis=1), jnp.mean(heat, axis=(0, 1, 2))
        return value, slopes, found, fresh, spread, near, gain, told[:, ::4, ::4]

    def averages(s):
        """This describes counts and averages of norms over batches."""
        if jnp.issubdtype(s.dtype, jnp.integer):
            return integers(below=1000)
        return normal(*s.shape, dtype=s.dtype, scale=0.1, offset=1.0)

    inputs = normal(b, things, 2), normal(b, things, 2), normal(b, things, 3), normal(b, things), normal(b, 5, 5, 3)
    return Built(run, (drawn(structs, dtype), jax.tree.map(averages, states), *inputs))
