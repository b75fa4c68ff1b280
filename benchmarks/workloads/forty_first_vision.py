"""Pixels that matter to a small network, and channels that attend after windows, the forty-first set: its author saw no plan."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_sixth_parts import drawn

GROUP = "forty-first"


@program("mobilenet-v1-slopes-along-paths-from-blurred-pictures-then-pixels-taken-away-haiku", GROUP)
def _attributions(size: Size) -> Built:
    """This program tells which pixels a small network looks at, and tests it by taking the most important ones away.

    It is MobileNetV1 of haiku.nets (Howard, 2017) with integrated gradients (Sundararajan, 2017) from a blurred picture, smoothed
    over noise, and with curves of deletion and insertion (RISE; Petsiuk, 2018) whose areas mark the maps.
    """
    import haiku as hk

    b, side, points, noises, cuts, strides, channels, kinds = pick(
        size,
        (
            4,
            224,
            4,
            1,
            5,
            (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1),
            (64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024),
            1000,
        ),
        (1, 56, 3, 1, 3, (1, 2, 1, 2, 1), (32, 48, 48, 96, 96), 200),
        (2, 14, 2, 2, 2, (1, 1), (4, 4), 5),
    )
    dtype, wide = half(size), max(side // 16, 1)

    def net(x, is_training=False):
        """This is the network with kept statistics."""
        return hk.nets.MobileNetV1(strides, channels, kinds)(x, is_training)

    model = hk.without_apply_rng(hk.transform_with_state(net))
    picture = jax.ShapeDtypeStruct((b, side, side, 3), dtype)
    weights, state = jax.eval_shape(lambda x: model.init(jax.random.key(0), x, True), picture)

    def kept(path, s):
        """This describes kept means near nought and kept spreads near one."""
        if jnp.issubdtype(s.dtype, jnp.integer):
            return Random(tuple(s.shape), jnp.dtype(s.dtype), below=1000)
        spread = "var_ema" in path[0].key
        return normal(*s.shape, dtype=dtype, scale=0.05, offset=1.0 if spread else 0.0)

    def blurred(x):
        """This takes means of squares around each pixel."""
        window = (1, 2 * wide + 1, 2 * wide + 1, 1)
        total = lax.reduce_window(x, 0.0, lax.add, window, (1, 1, 1, 1), "SAME")
        return total / lax.reduce_window(jnp.ones_like(x), 0.0, lax.add, window, (1, 1, 1, 1), "SAME")

    def run(p, state, photo, seed):
        """This gives classes, maps of pixels, how much of the gap is explained, both curves and their areas."""
        mean, spread = jnp.asarray([0.485, 0.456, 0.406]), jnp.asarray([0.229, 0.224, 0.225])
        x = (photo.astype(jnp.float32) / 255.0 - mean) / spread
        base = blurred(x)

        def logp(x):
            """This tells logarithms of chances of classes."""
            return jax.nn.log_softmax(model.apply(p, state, x.astype(dtype))[0].astype(jnp.float32), axis=-1)

        first = logp(x)
        label = jnp.argmax(first, axis=-1)

        def score(x):
            """This is the sum of logarithms of chances of the told classes."""
            each = jnp.take_along_axis(logp(x), label[:, None], axis=-1)[:, 0]
            return jnp.sum(each), each

        def along(total, each):
            """This adds slopes at one point of a path."""
            share, key = each
            noisy = x + 0.1 * jax.random.normal(key, x.shape)
            (_, now), slope = jax.value_and_grad(score, has_aux=True)(base + share * (noisy - base))
            return total + slope * (noisy - base), now

        shares = jnp.tile((jnp.arange(points) + 0.5) / points, noises)
        keys = jax.random.split(jax.random.key(seed), points * noises)
        total, path = lax.scan(along, jnp.zeros_like(x), (shares, keys))
        total = total / (points * noises)
        gap = score(x)[1] - score(base)[1]
        explained = jnp.sum(total, axis=(1, 2, 3))
        heat = jnp.sum(jnp.abs(total), axis=-1)
        top = jnp.quantile(heat.reshape(b, -1), 0.99, axis=1)[:, None, None]
        heat = jnp.clip(heat / jnp.maximum(top, 1e-9), 0.0, 1.0)
        order = jnp.argsort(jnp.argsort(-blurred(heat[..., None]).reshape(b, -1), axis=1), axis=1)
        rank = (order / (side * side)).reshape(b, side, side, 1)

        def taken(share):
            """This tells chances when a share of pixels is blurred, and when only this share is not."""
            gone = rank < share
            return tuple(jnp.exp(score(z)[1]) for z in (jnp.where(gone, base, x), jnp.where(gone, x, base)))

        grid = jnp.linspace(0.0, 1.0, cuts)
        less, more = lax.map(taken, grid)
        areas = jnp.stack([jnp.trapezoid(z, grid, axis=0) for z in (less, more)])
        return label, heat, jnp.stack([gap, explained]), path, less, more, areas

    def lively(r):
        """This makes filters large enough for what ramps cut off."""
        return normal(*r.shape, dtype=dtype, scale=1.4 * r.scale) if len(r.shape) > 1 else r

    p = jax.tree.map(lively, drawn(weights, dtype), is_leaf=lambda r: isinstance(r, Random))
    p = p, jax.tree_util.tree_map_with_path(kept, state)
    return Built(run, (*p, integers(b, side, side, 3, below=256), integers(below=1000)))


@program("davit-windows-of-places-attend-then-groups-of-channels-attend-classifier-equinox", GROUP)
def _davit(size: Size) -> Built:
    """This program names what photographs show with places that attend in windows and channels that attend in groups, in turns.

    It is DaViT (Ding, 2022; dingmyu/davit), with equinox and the exact GELU: small filters tell places before each half of a block,
    windows see themselves, then channels of a group see each other over the whole picture.
    """
    import equinox as eqx

    b, side, widths, heads, depths, window, kinds = pick(
        size,
        (24, 224, (96, 192, 384, 768), (3, 6, 12, 24), (1, 1, 3, 1), 7, 1000),
        (1, 64, (32, 64, 128), (2, 4, 8), (1, 1, 1), 4, 200),
        (2, 16, (4, 8), (2, 2), (1, 1), 2, 5),
    )
    dtype = half(size)

    class Places(eqx.Module):
        """This adds a filter of each channel's neighbours."""

        filter: eqx.nn.Conv2d

        def __init__(self, n, key):
            self.filter = eqx.nn.Conv2d(n, n, 3, padding=1, groups=n, key=key)

        def __call__(self, x):
            return x + self.filter(x)

    class Half(eqx.Module):
        """This is an attention between windows of places or between channels, on tokens [k, n]."""

        qkv: eqx.nn.Linear
        out: eqx.nn.Linear
        heads: int = eqx.field(static=True)
        by_channel: bool = eqx.field(static=True)

        def __init__(self, n, heads, by_channel, key):
            one, two = jax.random.split(key)
            self.qkv, self.out = eqx.nn.Linear(n, 3 * n, key=one), eqx.nn.Linear(n, n, key=two)
            self.heads, self.by_channel = heads, by_channel

        def __call__(self, x):
            k, n = x.shape
            query, key, value = jnp.moveaxis(jax.vmap(self.qkv)(x).reshape(k, 3, self.heads, n // self.heads), 1, 0)
            if self.by_channel:
                scores = jnp.einsum("khc,khe->hce", query * (k**-0.5), key, preferred_element_type=jnp.float32)
                y = jnp.einsum("hce,khe->khc", jax.nn.softmax(scores, axis=-1).astype(x.dtype), value)
            else:
                scores = jnp.einsum("qhc,khc->hqk", query, key, preferred_element_type=jnp.float32)
                scores = jax.nn.softmax(scores * (n // self.heads) ** -0.5, axis=-1).astype(x.dtype)
                y = jnp.einsum("hqk,khc->qhc", scores, value)
            return jax.vmap(self.out)(y.reshape(k, n))

    class Block(eqx.Module):
        """This is an attention and a feed-forward part, on a map [n, rows, columns]."""

        places: list
        norms: list
        attend: Half
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, n, heads, by_channel, key):
            keys = jax.random.split(key, 5)
            self.places, self.norms = [Places(n, k) for k in keys[:2]], [eqx.nn.LayerNorm(n) for _ in range(2)]
            self.attend = Half(n, heads, by_channel, keys[2])
            self.up, self.down = eqx.nn.Linear(n, 4 * n, key=keys[3]), eqx.nn.Linear(4 * n, n, key=keys[4])

        def __call__(self, x):
            n, rows, columns = x.shape
            x = self.places[0](x)
            flat = jax.vmap(self.norms[0])(x.reshape(n, -1).T)
            if self.attend.by_channel:
                y = self.attend(flat)
            else:
                cut = flat.reshape(rows // window, window, columns // window, window, n).swapaxes(1, 2)
                y = jax.vmap(self.attend)(cut.reshape(-1, window * window, n)).reshape(cut.shape)
                y = y.swapaxes(1, 2).reshape(rows * columns, n)
            x = self.places[1](x + y.T.reshape(x.shape))
            y = jax.vmap(self.norms[1])(x.reshape(n, -1).T)
            y = jax.vmap(lambda z: self.down(jax.nn.gelu(self.up(z), approximate=False)))(y)
            return x + y.T.reshape(x.shape)

    class Net(eqx.Module):
        """This is the whole network for one photograph [3, rows, columns]."""

        cuts: list
        norms: list
        blocks: list
        last: eqx.nn.LayerNorm
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = iter(jax.random.split(key, 64))
            self.cuts, self.norms, self.blocks, before = [], [], [], 3
            for k, (n, h, depth) in enumerate(zip(widths, heads, depths, strict=True)):
                kernel, stride, pad = (7, 4, 3) if k == 0 else (2, 2, 0)
                self.norms.append(eqx.nn.LayerNorm(n if k == 0 else before))
                self.cuts.append(eqx.nn.Conv2d(before, n, kernel, stride, pad, key=next(keys)))
                self.blocks.append([Block(n, h, c, next(keys)) for _ in range(depth) for c in (False, True)])
                before = n
            self.last, self.head = eqx.nn.LayerNorm(before), eqx.nn.Linear(before, kinds, key=next(keys))

        def __call__(self, x):
            strengths = []
            for k, (cut, norm, blocks) in enumerate(zip(self.cuts, self.norms, self.blocks, strict=True)):
                over = jax.vmap(jax.vmap(norm, 1, 1), 1, 1)
                x = over(cut(x)) if k == 0 else cut(over(x))
                for block in blocks:
                    x = block(x)
                strengths.append(jnp.sqrt(jnp.mean(x.astype(jnp.float32) ** 2)))
            pooled = self.last(jnp.mean(x.astype(jnp.float32), axis=(1, 2)).astype(x.dtype))
            return self.head(pooled), pooled, jnp.stack(strengths)

    shapes = eqx.filter_eval_shape(Net, jax.random.key(0))
    arrays, rest = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def run(p, photo, label):
        """This gives the best classes with their chances, surprises, hits, what pictures look like, and strengths by stage."""
        mean, spread = jnp.asarray([0.485, 0.456, 0.406]), jnp.asarray([0.229, 0.224, 0.225])
        x = jnp.moveaxis((photo.astype(jnp.float32) / 255.0 - mean) / spread, 3, 1).astype(dtype)
        logits, pooled, strengths = jax.vmap(eqx.combine(p, rest))(x)
        logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        best, which = lax.top_k(logp, min(5, kinds))
        hit = which == label[:, None]
        surprise = -jnp.take_along_axis(logp, label[:, None], axis=1)[:, 0]
        return which, jnp.exp(best), surprise, hit[:, 0], jnp.any(hit, axis=1), pooled, strengths

    def weights(path, s):
        """This describes filters and matrices [outputs, inputs, ...], gains and biases."""
        if len(s.shape) == 1:
            offset = 1.0 if getattr(path[-1], "name", "") == "weight" else 0.0
            return normal(*s.shape, dtype=dtype, scale=0.1, offset=offset)
        if len(s.shape) == 3:
            return normal(*s.shape, dtype=dtype, scale=0.1)
        inputs = 1
        for k in s.shape[1:]:
            inputs *= k
        return normal(*s.shape, dtype=dtype, scale=inputs**-0.5)

    p = jax.tree_util.tree_map_with_path(weights, arrays)
    return Built(run, (p, integers(b, side, side, 3, below=256), integers(b, below=kinds)))
