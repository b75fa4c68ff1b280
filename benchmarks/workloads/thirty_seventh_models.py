"""Grouped filters, letters from raw sound and kernels of points, the thirty-seventh set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.transformer_models import library
from benchmarks.workloads.twenty_sixth_parts import drawn

GROUP = "thirty-seventh"


@program("regnet-y-grouped-squeezed-stages-mirrored-views-transformers", GROUP)
def _regnet(size: Size) -> Built:
    """This program classifies photographs and their mirror images with a network of grouped filters, and marks the answers.

    It is FlaxRegNetForImageClassification of transformers (RegNetY; Radosavovic, 2020) with kept means of batch norms: chances of
    both views are averaged, and the shares of right answers, the surprise and the error of calibration are told.
    """
    transformers = library()
    b, side, first, widths, grouped, classes = pick(
        size,
        (32, 224, 32, (128, 192, 512, 1088), 64, 1000),
        (2, 128, 32, (48, 96, 192, 384), 24, 1000),
        (2, 32, 4, (4, 4, 8, 8), 4, 7),
    )
    dtype, bins = half(size), 15
    config = transformers.RegNetConfig(
        embedding_size=first,
        hidden_sizes=list(widths),
        depths=[1, 2, 4, 1],
        groups_width=grouped,
        layer_type="y",
        num_labels=classes,
    )
    model = transformers.FlaxRegNetForImageClassification(
        config, input_shape=(1, side, side, 3), _do_init=False, dtype=dtype
    )
    structs = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, side, side, 3)))

    def run(p, photo, label):
        """This gives chances of classes, shares of right answers among one and five, surprise and error of calibration."""
        x = (photo.astype(jnp.float32) / 255.0 - 0.45) / 0.225
        both = jnp.concatenate([x, x[..., ::-1]]).astype(dtype)
        logits = model(pixel_values=both, params=p, train=False).logits.astype(jnp.float32)
        probs = jnp.mean(jax.nn.softmax(logits, axis=-1).reshape(2, b, classes), axis=0)
        best = jax.lax.top_k(probs, 5)[1]
        hit = best == label[:, None]
        sure = jnp.max(probs, axis=-1)
        which = jnp.minimum((sure * bins).astype(jnp.int32), bins - 1)
        right = jnp.zeros(bins).at[which].add(hit[:, 0].astype(jnp.float32))
        claimed = jnp.zeros(bins).at[which].add(sure)
        surprise = -jnp.log(jnp.take_along_axis(probs, label[:, None], axis=1)[:, 0] + 1e-12)
        shares = jnp.mean(hit[:, 0]), jnp.mean(jnp.any(hit, axis=1))
        return probs, shares, jnp.mean(surprise), jnp.sum(jnp.abs(right - claimed)) / b

    return Built(run, (drawn(structs, dtype), integers(b, 3, side, side, below=256), integers(b, below=classes)))


@program("wav2vec2-letters-from-raw-sound-ctc-loss-transformers", GROUP)
def _letters(size: Size) -> Built:
    """This program tells letters of raw sound, and how surprised the model is by the true texts.

    It is FlaxWav2Vec2ForCTC of transformers (Baevski, 2020; norms stand before layers) with `ctc_loss` of optax: each sound is
    brought to mean nought and spread one where it is not padded, and the likeliest letters are collapsed as users do.
    """
    import optax

    transformers = library()
    b, samples, text, channels, n, h, wide, depth, places, groups = pick(
        size,
        (4, 64000, 64, 512, 768, 12, 3072, 3, 128, 16),
        (2, 20000, 24, 96, 160, 5, 640, 3, 64, 8),
        (1, 1500, 2, 4, 8, 2, 12, 3, 4, 2),
    )
    dtype, letters = half(size), 32
    config = transformers.Wav2Vec2Config(
        vocab_size=letters,
        hidden_size=n,
        num_hidden_layers=depth,
        num_attention_heads=h,
        intermediate_size=wide,
        conv_dim=(channels,) * 7,
        conv_bias=True,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        num_conv_pos_embeddings=places,
        num_conv_pos_embedding_groups=groups,
        pad_token_id=0,
    )
    model = transformers.FlaxWav2Vec2ForCTC(config, input_shape=(1, 1500), _do_init=False, dtype=dtype)
    structs = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, 1500)))

    def run(p, sound, cut, label, short):
        """This gives letters of frames with repeats and blanks marked, losses of texts, and how sure each frame is."""
        real = jnp.arange(samples) < samples - cut[:, None]
        count = jnp.sum(real, axis=1, keepdims=True)
        mean = jnp.sum(sound * real, axis=1, keepdims=True) / count
        spread = jnp.sum(jnp.square(sound - mean) * real, axis=1, keepdims=True) / count
        x = jnp.where(real, (sound - mean) * jax.lax.rsqrt(spread + 1e-7), 0.0).astype(dtype)
        logits = model(x, attention_mask=real.astype(jnp.int32), params=p, train=False).logits.astype(jnp.float32)
        frames, long = logits.shape[1], samples - cut
        for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
            long = (long - kernel) // stride + 1
        silent = (jnp.arange(frames) >= long[:, None]).astype(jnp.float32)
        blank = (jnp.arange(text) >= text - short[:, None]).astype(jnp.float32)
        loss = optax.ctc_loss(logits, silent, label + 1, blank, blank_id=0)
        best = jnp.argmax(logits, axis=-1)
        before = jnp.pad(best, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
        kept = (best != before) & (best != 0) & (silent == 0)
        order = jnp.argsort(~kept, axis=1, stable=True)
        told = jnp.where(jnp.take_along_axis(kept, order, axis=1), jnp.take_along_axis(best, order, axis=1), 0)
        sure = jnp.max(jax.nn.log_softmax(logits, axis=-1), axis=-1) * (1 - silent)
        return told, jnp.sum(kept, axis=1), loss / (text - short), jnp.sum(sure, axis=1) / long

    inputs = normal(b, samples, scale=0.1), integers(b, below=max(samples // 8, 1))
    labels = integers(b, text, below=letters - 1), integers(b, below=max(text // 3, 1))
    return Built(run, (drawn(structs, dtype), *inputs, *labels))


@program("kernels-of-fifteen-points-on-a-pyramid-of-scans-equinox", GROUP)
def _points(size: Size) -> Built:
    """This program labels points of scanned rooms with convolutions whose weights sit at fifteen points in space.

    It is the rigid KPConv network (Thomas, 2019; also the backbone of GeoTransformer, with group norms), with equinox: each
    neighbour adds to the kernel points near it, levels are thinned, and coarse features are laid back on the nearest points.
    """
    import equinox as eqx

    b, n, near, first, groups, classes = pick(
        size, (8, 4096, 16, 64, 8, 13), (1, 1536, 12, 32, 8, 13), (1, 64, 3, 8, 2, 4)
    )
    dtype, kernels, levels, thin = half(size), 15, 3, 4
    radius = [0.16 * 1.6**k for k in range(levels)]

    class Unary(eqx.Module):
        """This is a linear layer over points, a group norm and a bend."""

        linear: eqx.nn.Linear
        norm: eqx.nn.GroupNorm
        bends: bool = eqx.field(static=True)

        def __init__(self, i, o, key, bends=True):
            self.linear = eqx.nn.Linear(i, o, use_bias=False, key=key)
            self.norm, self.bends = eqx.nn.GroupNorm(groups, o), bends

        def __call__(self, x):
            x = self.norm(jax.vmap(self.linear)(x).T).T
            return jax.nn.leaky_relu(x, 0.1) if self.bends else x

    class Kernel(eqx.Module):
        """This is a convolution over points with weights at kernel points."""

        weight: jax.Array
        places: jax.Array
        reach: float = eqx.field(static=True)

        def __init__(self, i, o, reach):
            self.weight, self.places, self.reach = jnp.zeros((kernels, i, o)), jnp.zeros((kernels, 3)), reach

        def __call__(self, x, query, support, index):
            away = support[index] - query[:, None]
            gap = away[:, :, None] - self.reach * self.places
            pull = jnp.maximum(1.0 - jnp.sqrt(jnp.sum(gap * gap, axis=-1) + 1e-12) / (0.7 * self.reach), 0.0)
            gathered = jnp.einsum("qnk,qnc->qkc", pull.astype(x.dtype), x[index])
            return jnp.einsum("qkc,kcd->qd", gathered, self.weight) / index.shape[1]

    class Block(eqx.Module):
        """This is a bottleneck with a kernel of points; where points are thinned, the shortcut takes the largest."""

        down: Unary
        kernel: Kernel
        norm: eqx.nn.GroupNorm
        up: Unary
        side: Unary

        def __init__(self, i, o, reach, key):
            keys = jax.random.split(key, 3)
            self.down, self.kernel = Unary(i, o // 4, keys[0]), Kernel(o // 4, o // 4, reach)
            self.norm = eqx.nn.GroupNorm(groups, o // 4)
            self.up, self.side = Unary(o // 4, o, keys[1], False), Unary(i, o, keys[2], False)

        def __call__(self, x, query, support, index):
            y = self.kernel(self.down(x), query, support, index)
            y = self.up(jax.nn.leaky_relu(self.norm(y.T).T, 0.1))
            x = x if query.shape == support.shape else jnp.max(x[index], axis=1)
            return jax.nn.leaky_relu(y + self.side(x), 0.1)

    class Net(eqx.Module):
        """This is the whole network."""

        stem: Kernel
        blocks: list
        strided: list
        back: list
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = iter(jax.random.split(key, 16))
            self.stem, self.blocks, self.strided, self.back = Kernel(4, first, radius[0]), [], [], []
            wide = [2 * first * 2**k for k in range(levels)]
            for k in range(levels):
                start = first if k == 0 else wide[k - 1]
                if k:
                    self.strided.append(Block(start, start, radius[k - 1], next(keys)))
                self.blocks.append([Block(start, wide[k], radius[k], next(keys))])
                self.blocks[-1].append(Block(wide[k], wide[k], radius[k], next(keys)))
            for k in range(levels - 1):
                self.back.append(Unary(wide[k] + wide[k + 1], wide[k], next(keys)))
            self.head = eqx.nn.Linear(wide[0], classes, key=next(keys))

        def __call__(self, places, colour):
            clouds = [places[: n // thin**k] for k in range(levels)]

            def nearest(query, support, many):
                """This finds the nearest points of a cloud."""
                gaps = jnp.sum(query**2, axis=1)[:, None] + jnp.sum(support**2, axis=1) - 2 * query @ support.T
                return jax.lax.top_k(-gaps, many)[1]

            own = [nearest(c, c, near) for c in clouds]
            x = jnp.concatenate([jnp.ones((n, 1), colour.dtype), colour], axis=1)
            x = jax.nn.leaky_relu(self.stem(x, clouds[0], clouds[0], own[0]), 0.1)
            kept = []
            for k, (c, index) in enumerate(zip(clouds, own, strict=True)):
                if k:
                    down = nearest(c, clouds[k - 1], near)
                    x = self.strided[k - 1](x, c, clouds[k - 1], down)
                for block in self.blocks[k]:
                    x = block(x, c, c, index)
                kept.append(x)
            for k in reversed(range(levels - 1)):
                over = nearest(clouds[k], clouds[k + 1], 1)[:, 0]
                x = self.back[k](jnp.concatenate([kept[k], x[over]], axis=1))
            return jax.vmap(self.head)(x), kept[-1]

    shapes = eqx.filter_eval_shape(Net, jax.random.key(0))
    arrays, rest = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def run(p, places, colour, label):
        """This gives scores of classes, overlaps of classes with the true labels, and the coarsest features."""
        scores, coarse = jax.vmap(eqx.combine(p, rest))(jnp.tanh(places), colour)
        told = jnp.argmax(scores, axis=-1)
        met = jnp.bincount((label * classes + told).reshape(-1), length=classes * classes).reshape(classes, classes)
        both = jnp.diagonal(met)
        return scores, both / jnp.maximum(jnp.sum(met, axis=0) + jnp.sum(met, axis=1) - both, 1), coarse

    def weights(path, s):
        """This describes matrices, kernel points inside a ball, gains near one and shifts near zero, by their names."""
        name = getattr(path[-1], "name", "")
        if name == "places":
            return normal(*s.shape, scale=0.4)
        if len(s.shape) > 1:
            fan = 0.4 * s.shape[1] if len(s.shape) == 3 else s.shape[1]
            return normal(*s.shape, dtype=dtype, scale=float(np.sqrt(1.0 / fan)))
        return normal(*s.shape, dtype=dtype, scale=0.1, offset=1.0 if name == "weight" else 0.0)

    p = jax.tree_util.tree_map_with_path(weights, arrays)
    inputs = normal(b, n, 3, scale=0.7), normal(b, n, 3, dtype=dtype)
    return Built(run, (p, *inputs, integers(b, n, below=classes)))
