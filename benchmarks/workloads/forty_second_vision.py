"""Sound and pictures that meet in few tokens, and masks from filters of their own, the forty-second set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_sixth_parts import drawn, layers_of_nnx, residual_layers_of_nnx

GROUP = "forty-second"


def mel_of(bins: int, mels: int, rate: int) -> np.ndarray:
    """Returns triangles along the scale of mels [bins, mels] for a spectrum of real sound."""
    top = 2595 * np.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, mels + 2) / 2595) - 1)
    line = np.linspace(0, rate / 2, bins)[:, None]
    up, down = (line - edges[:-2]) / np.diff(edges[:-1]), (edges[2:] - line) / np.diff(edges[1:])
    return np.maximum(np.minimum(up, down), 0).astype(np.float32)


@program("mbt-sound-and-films-meet-only-in-few-bottleneck-tokens-many-labels-linen", GROUP)
def _bottleneck(size: Size) -> Built:
    """This program tells what is heard and seen in short films, where sound and pictures may only share a few tokens.

    It is the Multimodal Bottleneck Transformer (Nagrani, 2021; google-research/scenic), with linen: blocks of frames and patches of
    a spectrum in mels have encoders of their own, and in the last layers both read and write the same four tokens.
    """
    from flax import linen as nn

    b, frames, side, patch, seconds, mels, hop, n, heads, depth, fuse, few, kinds = pick(
        size,
        (8, 8, 224, 16, 800, 128, 160, 768, 12, 12, 8, 4, 527),
        (2, 4, 64, 16, 128, 32, 160, 192, 6, 4, 2, 4, 100),
        (2, 2, 8, 4, 8, 4, 8, 8, 2, 2, 1, 2, 5),
    )
    dtype, window, bins = half(size), 5 * hop // 2, pick(size, 512, 512, 32) // 2 + 1
    how = {"dtype": dtype, "param_dtype": dtype}

    class Layer(nn.Module):
        """This is an attention and a feed-forward part."""

        @nn.compact
        def __call__(self, x):
            x = x + nn.MultiHeadDotProductAttention(heads, **how)(nn.LayerNorm(**how)(x))
            y = nn.gelu(nn.Dense(4 * n, **how)(nn.LayerNorm(**how)(x)))
            return x + nn.Dense(n, **how)(y)

    class Net(nn.Module):
        """This gives logits of both sides and the shared tokens."""

        @nn.compact
        def __call__(self, film, sound):
            start = nn.initializers.normal(0.02)
            film = nn.Conv(n, (2, patch, patch), (2, patch, patch), padding="VALID", **how)(film)
            sound = nn.Conv(n, (patch, patch), (patch, patch), padding="VALID", **how)(sound[..., None])
            both = []
            for name, rows in (("film", film), ("sound", sound)):
                whole = self.param(f"{name}_class", start, (1, 1, n), dtype)
                x = jnp.concatenate([jnp.broadcast_to(whole, (b, 1, n)), rows.reshape(b, -1, n)], axis=1)
                both.append(x + self.param(f"{name}_places", start, (1, x.shape[1], n), dtype))
            shared = jnp.broadcast_to(self.param("shared", start, (1, few, n), dtype), (b, few, n))
            for k in range(depth):
                if k < fuse:
                    both = [Layer()(x) for x in both]
                    continue
                told = [Layer()(jnp.concatenate([x, shared], axis=1)) for x in both]
                both, shared = [x[:, :-few] for x in told], (told[0][:, -few:] + told[1][:, -few:]) / 2
            tokens = [nn.LayerNorm(**how)(x)[:, 0] for x in both]
            return jnp.stack([nn.Dense(kinds, **how)(x) for x in tokens]).astype(jnp.float32), shared

    model = Net()
    shapes = (b, frames, side, side, 3), (b, seconds, mels)
    structs = jax.eval_shape(model.init, jax.random.key(0), *(jax.ShapeDtypeStruct(s, dtype) for s in shapes))
    bank = mel_of(bins, mels, 16000)

    def run(p, film, wave, label):
        """This gives chances, the best labels, surprises, how far both sides agree, and the shared tokens."""
        place = jnp.arange(seconds)[:, None] * hop + jnp.arange(window)
        wave = wave - jnp.mean(wave, axis=1, keepdims=True)
        cut = wave[:, place] * jnp.hanning(window)
        power = jnp.abs(jnp.fft.rfft(cut, n=2 * bins - 2)) ** 2
        sound = jnp.log(power @ bank + 1e-3)
        mean, spread = jnp.mean(sound, axis=(1, 2), keepdims=True), jnp.std(sound, axis=(1, 2), keepdims=True)
        sound = ((sound - mean) / (2 * spread)).astype(dtype)
        logits, shared = model.apply(p, (film.astype(jnp.float32) / 127.5 - 1).astype(dtype), sound)
        joint = jnp.mean(logits, axis=0)
        surprise = jnp.mean(jax.nn.softplus(joint) - label * joint, axis=1)
        one, two = jax.nn.sigmoid(logits)
        apart = jnp.mean(one * jnp.log(one / two) + (1 - one) * jnp.log((1 - one) / (1 - two)), axis=1)
        best, which = lax.top_k(joint, min(10, kinds))
        found = jnp.take_along_axis(label, which, axis=1)
        precise = jnp.cumsum(found, axis=1) / jnp.arange(1, which.shape[1] + 1)
        return jax.nn.sigmoid(best), which, surprise, apart, jnp.mean(precise, axis=1), shared

    inputs = integers(b, frames, side, side, 3, below=256), normal(b, seconds * hop + window, scale=0.3)
    return Built(run, (drawn(structs, dtype), *inputs, integers(b, kinds, below=2)))


@program("condinst-each-thing-brings-the-filters-that-draw-its-own-mask-over-shared-maps-nnx", GROUP)
def _condinst(size: Size) -> Built:
    """This program finds things in photographs and draws the outline of each with small filters made for that thing alone.

    It is CondInst (Tian, 2020; aim-uofa/AdelaiDet) on the head of FCOS, with nnx: every place of three levels tells a class, sides
    of a box, how central it is and 169 weights; scores of boxes that overlap fade all at once, as in SOLOv2.
    """
    from flax import nnx

    b, side, widths, units, c, kinds, pool, keep = pick(
        size,
        (4, 512, (64, 128, 256, 512), 2, 256, 80, 256, 64),
        (1, 128, (16, 32, 48, 64), 1, 48, 20, 64, 16),
        (1, 64, (4, 4, 8, 8), 1, 4, 3, 6, 3),
    )
    dtype, groups, thin = half(size), pick(size, 32, 8, 2), 8
    dense_parts = ((thin + 2, thin), (thin, thin), (thin, 1))
    weights = sum(i * o + o for i, o in dense_parts)
    _, _, conv = layers_of_nnx(dtype)
    norm, Unit = residual_layers_of_nnx(dtype, groups)

    class Tower(nnx.Module):
        """These are filters, norms and ramps."""

        def __init__(self, outputs, rngs):
            self.filters = nnx.List([conv(c, c, 3, rngs) for _ in range(3)])
            self.norms = nnx.List([norm(c, rngs) for _ in range(3)])
            self.outputs = nnx.List([conv(c, o, 3, rngs) for o in outputs])

        def __call__(self, x):
            for filter_, norm_ in zip(self.filters, self.norms, strict=True):
                x = nnx.relu(norm_(filter_(x)))
            return [out(x) for out in self.outputs]

    class Net(nnx.Module):
        """This gives logits, sides, centres and weights of all places, and maps for masks."""

        def __init__(self, rngs):
            self.stem, self.norm = conv(3, widths[0], 7, rngs, 2), norm(widths[0], rngs)
            stages, before = [], widths[0]
            for k, n in enumerate(widths):
                first = Unit(before, n, 1 if k == 0 else 2, rngs)
                stages.append(nnx.List([first, *(Unit(n, n, 1, rngs) for _ in range(units - 1))]))
                before = n
            self.stages = nnx.List(stages)
            self.lateral = nnx.List([conv(n, c, 1, rngs) for n in widths[1:]])
            self.smooth = nnx.List([conv(c, c, 3, rngs) for _ in widths[1:]])
            self.classes, self.boxes = Tower((kinds,), rngs), Tower((4, 1, weights), rngs)
            self.masks = Tower((thin,), rngs)
            self.scales = nnx.Param(jnp.ones(3, dtype))

        def __call__(self, x):
            x = nnx.relu(self.norm(self.stem(x)))
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            maps = []
            for stage in self.stages:
                for unit in stage:
                    x = unit(x)
                maps.append(x)
            maps = [f(x) for f, x in zip(self.lateral, maps[1:], strict=True)]
            for k in (1, 0):
                maps[k] = maps[k] + jnp.repeat(jnp.repeat(maps[k + 1], 2, axis=1), 2, axis=2)
            maps = [f(x) for f, x in zip(self.smooth, maps, strict=True)]
            told = []
            for k, x in enumerate(maps):
                (logits,), (sides, centre, own) = self.classes(x), self.boxes(x)
                sides = jnp.exp(jnp.clip(sides * self.scales[k], -3, 3).astype(jnp.float32)) * 2.0 ** (k + 4)
                told.append([z.reshape(b, -1, z.shape[-1]) for z in (logits, sides, centre, own)])
            return [jnp.concatenate(z, axis=1) for z in zip(*told, strict=True)], self.masks(maps[0])[0]

    graph, structs = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))
    places, reach = [], []
    for k in range(3):
        line = (np.arange(side >> (k + 3)) + 0.5) * 2 ** (k + 3)
        places.append(np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2))
        reach.append(np.full(len(places[-1]), 64.0 * 2**k))
    places, reach = np.concatenate(places).astype(np.float32), np.concatenate(reach).astype(np.float32)
    most = min(pool, len(places))

    def run(p, photo):
        """This gives scores, classes and boxes of things, their masks, and how sure masks are."""
        mean, spread = jnp.asarray([0.485, 0.456, 0.406]), jnp.asarray([0.229, 0.224, 0.225])
        x = ((photo.astype(jnp.float32) / 255.0 - mean) / spread).astype(dtype)
        (logits, sides, centre, own), maps = nnx.merge(graph, p)(x)
        score = jax.nn.sigmoid(2 * logits.astype(jnp.float32)) * jax.nn.sigmoid(centre.astype(jnp.float32))
        best, kind = jnp.max(score, axis=-1), jnp.argmax(score, axis=-1)
        best, at = lax.top_k(jnp.sqrt(best), most)
        kind = jnp.take_along_axis(kind, at, axis=1)
        sides, own = (jnp.take_along_axis(z, at[..., None], axis=1) for z in (sides, own))
        spot = jnp.asarray(places)[at]
        box = jnp.clip(jnp.concatenate([spot - sides[..., :2], spot + sides[..., 2:]], axis=-1), 0.0, side)
        area = (box[..., 2] - box[..., 0]) * (box[..., 3] - box[..., 1])
        low, top = (f(box[:, :, None], box[:, None]) for f in (jnp.maximum, jnp.minimum))
        inside = jnp.prod(jnp.maximum(top[..., 2:] - low[..., :2], 0.0), axis=-1)
        share = inside / (area[:, :, None] + area[:, None] - inside)
        before = jnp.arange(most)[:, None] < jnp.arange(most)
        share = jnp.where(before & (kind[:, :, None] == kind[:, None]), share, 0.0)
        worst = jnp.max(share, axis=1)
        fade = jnp.min(jnp.exp(2.0 * (worst[:, :, None] ** 2 - share**2)), axis=1)
        best, order = lax.top_k(best * jnp.minimum(fade, 1.0), min(keep, most))
        kind, at = (jnp.take_along_axis(z, order, axis=1) for z in (kind, at))
        box, spot, own = (jnp.take_along_axis(z, order[..., None], axis=1) for z in (box, spot, own))
        line = (jnp.arange(side // 8) + 0.5) * 8
        grid = jnp.stack(jnp.meshgrid(line, line), axis=-1)
        away = (spot[:, :, None, None] - grid) / jnp.asarray(reach)[at][..., None, None, None]
        shared = jnp.broadcast_to(maps[:, None], (*at.shape, *maps.shape[1:]))
        x, used = jnp.concatenate([shared, away.astype(dtype)], axis=-1), 0
        for k, (i, o) in enumerate(dense_parts):
            matrix = own[..., used : used + i * o].reshape(*at.shape, i, o)
            shift = own[..., used + i * o : used + i * o + o][:, :, None, None]
            x = jnp.einsum("bkyxi,bkio->bkyxo", x, matrix) * i**-0.5 + shift
            x, used = x if k == 2 else nnx.relu(x), used + i * o + o
        high = (*at.shape, side // 4, side // 4)
        mask = jax.nn.sigmoid(jax.image.resize(x[..., 0].astype(jnp.float32), high, "bilinear"))
        sure = jnp.sum(mask**2, axis=(2, 3)) / jnp.sum(mask, axis=(2, 3))
        return best * sure, kind, box, mask.astype(dtype), sure, spot

    return Built(run, (drawn(structs, dtype), integers(b, side, side, 3, below=256)))
