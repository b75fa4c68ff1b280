"""Doubtful points asked again and attention within crossing stripes, the forty-third set: its author saw no plan."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, pick, program
from benchmarks.workloads.twenty_sixth_parts import drawn, layers_of_nnx, residual_layers_of_nnx

GROUP = "forty-third"


@program("pointrend-only-the-most-doubtful-points-are-asked-again-as-maps-of-streets-grow-finer-nnx", GROUP)
def _doubtful(size: Size) -> Built:
    """This program names each pixel of photographs of streets: coarse maps grow, and only points in doubt are told anew.

    It is PointRend (Kirillov, 2019; detectron2) with nnx on a residual network with a pyramid: at each doubling, points whose
    two best classes are nearest get fine features by bilinear looks, and a small network tells them anew beside coarse guesses.
    """
    from flax import nnx

    b, rows, columns, widths, units, c, kinds, points, turns = pick(
        size,
        (2, 512, 1024, (64, 128, 256, 512), 2, 128, 19, 8096, 4),
        (1, 96, 128, (16, 24, 32, 48), 1, 32, 19, 256, 4),
        (1, 32, 32, (4, 4, 8, 8), 1, 4, 3, 5, 4),
    )
    dtype, groups = half(size), pick(size, 32, 8, 2)
    dense, _, conv = layers_of_nnx(dtype)
    norm, Unit = residual_layers_of_nnx(dtype, groups)

    class Net(nnx.Module):
        """This gives coarse logits and fine features at a quarter of the side."""

        def __init__(self, rngs):
            self.stem, self.norm = conv(3, widths[0], 7, rngs, 2), norm(widths[0], rngs)
            stages, before = [], widths[0]
            for k, n in enumerate(widths):
                first = Unit(before, n, 1 if k == 0 else 2, rngs)
                stages.append(nnx.List([first, *(Unit(n, n, 1, rngs) for _ in range(units - 1))]))
                before = n
            self.stages = nnx.List(stages)
            self.lateral = nnx.List([conv(n, c, 1, rngs) for n in widths])
            self.scale = nnx.List([conv(c, c, 3, rngs) for _ in widths])
            self.norms = nnx.List([norm(c, rngs) for _ in widths])
            self.coarse = conv(c, kinds, 1, rngs)
            self.hidden = nnx.List([dense((c if k == 0 else 2 * c) + kinds, 2 * c, rngs) for k in range(3)])
            self.last = dense(2 * c + kinds, kinds, rngs)

        def __call__(self, x):
            x = nnx.relu(self.norm(self.stem(x)))
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            maps = []
            for stage in self.stages:
                for unit in stage:
                    x = unit(x)
                maps.append(x)
            maps = [f(x) for f, x in zip(self.lateral, maps, strict=True)]
            for k in (2, 1, 0):
                maps[k] = maps[k] + jnp.repeat(jnp.repeat(maps[k + 1], 2, axis=1), 2, axis=2)
            total, target = 0, maps[-2].shape
            for k, x in enumerate(maps):
                y = nnx.relu(self.norms[k](self.scale[k](x)))
                total = total + jax.image.resize(y, target, "bilinear")
            return self.coarse(total), maps[0]

        def asked(self, fine, coarse):
            """This gives logits of points from fine features and coarse logits of those points."""
            x = fine
            for layer in self.hidden:
                x = nnx.relu(layer(jnp.concatenate([x, coarse], axis=-1)))
            return self.last(jnp.concatenate([x, coarse], axis=-1))

    graph, structs = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))

    def looked(maps, place):
        """This reads maps [b, h, w, c] between pixels, at places [b, p, 2] from nought to one."""
        h, w = maps.shape[1:3]
        place = place * jnp.asarray([h, w]) - 0.5
        low = jnp.floor(place)
        part = place - low
        flat, total = maps.reshape(b, h * w, -1), 0
        for dy in (0, 1):
            for dx in (0, 1):
                y, x = low[..., 0].astype(jnp.int32) + dy, low[..., 1].astype(jnp.int32) + dx
                inside = (y >= 0) & (y < h) & (x >= 0) & (x < w)
                weight = (part[..., 0] if dy else 1 - part[..., 0]) * (part[..., 1] if dx else 1 - part[..., 1])
                at = jnp.clip(y, 0, h - 1) * w + jnp.clip(x, 0, w - 1)
                read = jnp.take_along_axis(flat, at[..., None], axis=1)
                total = total + read * jnp.where(inside, weight, 0.0)[..., None].astype(maps.dtype)
        return total

    def run(p, photo, truth):
        """This gives classes and how sure they are, points asked at each turn with their doubts, and tables of classes."""
        mean, spread = jnp.asarray([0.485, 0.456, 0.406]), jnp.asarray([0.229, 0.224, 0.225])
        model = nnx.merge(graph, p)
        coarse, fine = model(((photo.astype(jnp.float32) / 255.0 - mean) / spread).astype(dtype))
        logits, chosen, doubts, changes = coarse, [], [], []
        for _ in range(turns):
            h, w = 2 * logits.shape[1], 2 * logits.shape[2]
            logits = jax.image.resize(logits, (b, h, w, kinds), "bilinear")
            best = lax.top_k(logits.astype(jnp.float32), 2)[0]
            doubt, at = lax.top_k((best[..., 1] - best[..., 0]).reshape(b, -1), min(points, h * w))
            place = (jnp.stack([at // w, at % w], axis=-1) + 0.5) / jnp.asarray([h, w])
            flat = logits.reshape(b, h * w, kinds)
            before = jnp.argmax(jnp.take_along_axis(flat, at[..., None], axis=1), axis=-1)
            told = model.asked(looked(fine, place), looked(coarse, place))
            logits = flat.at[jnp.arange(b)[:, None], at].set(told).reshape(b, h, w, kinds)
            chosen.append(at)
            doubts.append(doubt)
            changes.append(jnp.mean(jnp.argmax(told, axis=-1) != before, axis=1))
        logits = jax.image.resize(logits.astype(jnp.float32), (b, rows, columns, kinds), "bilinear")
        kind, sure = jnp.argmax(logits, axis=-1), jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1)
        real = jnp.repeat(jnp.repeat(truth, rows // truth.shape[1], axis=1), columns // truth.shape[2], axis=2)
        seen = real < kinds
        table = jnp.zeros((kinds + 1, kinds), jnp.int32).at[real.reshape(-1), kind.reshape(-1)].add(1)[:kinds]
        both = jnp.diagonal(table)
        shared = both / jnp.maximum(jnp.sum(table, axis=0) + jnp.sum(table, axis=1) - both, 1)
        right = jnp.sum((kind == real) & seen) / jnp.sum(seen)
        told = chosen, doubts, jnp.stack(changes)
        return kind.astype(jnp.uint8), sure.astype(dtype), told, table, shared, right

    inputs = integers(b, rows, columns, 3, below=256), integers(b, rows // 8, columns // 8, below=kinds + 1)
    return Built(run, (drawn(structs, dtype), *inputs))


@program("cswin-half-the-heads-see-rows-and-half-see-columns-in-stripes-that-widen-classifier-linen", GROUP)
def _stripes(size: Size) -> Built:
    """This program tells what photographs show, where some heads attend along stripes of rows and others along columns.

    It is the CSWin Transformer (Dong, 2021; microsoft/CSWin-Transformer), with linen: stripes are wider in later stages, values get
    a small filter of their own within a stripe that tells places, and filters with strides join the four stages.
    """
    from flax import linen as nn

    b, side, n, depths, heads, stripes, kinds = pick(
        size,
        (32, 224, 64, (1, 2, 8, 1), (2, 4, 8, 16), (1, 2, 7, 7), 1000),
        (2, 96, 32, (1, 1, 2, 1), (2, 4, 8, 16), (1, 2, 6, 3), 100),
        (2, 32, 4, (1, 1, 1, 1), (2, 2, 4, 4), (1, 2, 2, 1), 3),
    )
    dtype = half(size)
    how = {"dtype": dtype, "param_dtype": dtype}

    class Stripes(nn.Module):
        """This is attention within stripes of a height and a width."""

        heads: int
        tall: int
        wide: int

        @nn.compact
        def __call__(self, query, key, value):
            rows, columns, c = query.shape[1:]
            d = c // self.heads

            def cut(x):
                """This cuts maps into stripes."""
                x = x.reshape(b, rows // self.tall, self.tall, columns // self.wide, self.wide, c)
                return jnp.swapaxes(x, 2, 3).reshape(-1, self.tall, self.wide, c)

            query, key, value = cut(query), cut(key), cut(value)
            place = nn.Conv(c, (3, 3), feature_group_count=c, **how)(value)
            query, key, value = (x.reshape(len(x), -1, self.heads, d) for x in (query, key, value))
            scores = jnp.einsum("wqhd,wkhd->whqk", query * d**-0.5, key)
            probs = nn.softmax(scores.astype(jnp.float32), axis=-1).astype(dtype)
            x = jnp.einsum("whqk,wkhd->wqhd", probs, value).reshape(place.shape) + place
            x = x.reshape(b, rows // self.tall, columns // self.wide, self.tall, self.wide, c)
            return jnp.swapaxes(x, 2, 3).reshape(b, rows, columns, c)

    class Block(nn.Module):
        """This is attention along rows and columns, and a feed-forward part."""

        heads: int
        stripe: int

        @nn.compact
        def __call__(self, x):
            rows, columns, c = x.shape[1:]
            query, key, value = jnp.split(nn.Dense(3 * c, **how)(nn.LayerNorm(**how)(x)), 3, axis=-1)
            if rows == self.stripe:
                y = Stripes(self.heads, rows, columns)(query, key, value)
            else:
                one, two = zip(*(jnp.split(z, 2, axis=-1) for z in (query, key, value)), strict=True)
                y = [
                    Stripes(self.heads // 2, rows, self.stripe)(*one),
                    Stripes(self.heads // 2, self.stripe, columns)(*two),
                ]
                y = jnp.concatenate(y, axis=-1)
            x = x + nn.Dense(c, **how)(y)
            y = nn.gelu(nn.Dense(4 * c, **how)(nn.LayerNorm(**how)(x)), approximate=False)
            return x + nn.Dense(c, **how)(y)

    class Net(nn.Module):
        """This gives logits and how strong features are by place in the last stage."""

        @nn.compact
        def __call__(self, x):
            x = nn.LayerNorm(**how)(nn.Conv(n, (7, 7), (4, 4), padding=2, **how)(x))
            for k, depth in enumerate(depths):
                if k:
                    x = nn.LayerNorm(**how)(nn.Conv(n << k, (3, 3), (2, 2), padding=1, **how)(x))
                for _ in range(depth):
                    x = Block(heads[k], stripes[k])(x)
            x = nn.LayerNorm(**how)(x)
            strong = jnp.linalg.norm(x.astype(jnp.float32), axis=-1)
            return nn.Dense(kinds, **how)(jnp.mean(x, axis=(1, 2))).astype(jnp.float32), strong

    model = Net()
    structs = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((b, side, side, 3), dtype))

    def run(p, photo, label):
        """This gives the best classes of photographs and their mirrors, surprises, hits, agreement, and strengths by place."""
        mean, spread = jnp.asarray([0.485, 0.456, 0.406]), jnp.asarray([0.229, 0.224, 0.225])
        x = ((photo.astype(jnp.float32) / 255.0 - mean) / spread).astype(dtype)
        logits, strong = model.apply(p, x)
        logp = jax.nn.log_softmax(logits, axis=-1)
        best, which = lax.top_k(logp, min(5, kinds))
        surprise = -0.9 * jnp.take_along_axis(logp, label[:, None], axis=1)[:, 0] - 0.1 * jnp.mean(logp, axis=1)
        hit = which == label[:, None]
        entropy = -jnp.sum(jnp.exp(logp) * logp, axis=1)
        return jnp.exp(best), which, surprise, hit[:, 0], jnp.any(hit, axis=1), entropy, strong

    return Built(run, (drawn(structs, dtype), integers(b, side, side, 3, below=256), integers(b, below=kinds)))
