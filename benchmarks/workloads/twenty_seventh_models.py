"""Whole models of weather, noisy pictures, photographs and shoppers, the twenty-seventh set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_sixth_parts import drawn, layers_of_nnx

GROUP = "twenty-seventh"


@program("air-in-boxes-of-height-with-biases-per-latitude-weather-linen", GROUP)
def _air(size: Size) -> Built:
    """This tells the weather of the next hours from maps of the air at many heights, and how wrong it is.

    It is Pangu-Weather (Bi, 2023; 198808xc/Pangu-Weather, whose pseudocode was ported to flax): attention within boxes of height,
    latitude and longitude, a bias of its own for each height and latitude, and boxes that are moved around the globe.
    """
    from flax import linen as nn

    levels, rows, columns, n, d, box = pick(
        size, (13, 181, 360, 192, 32, (2, 6, 9)), (13, 89, 144, 32, 16, (2, 6, 9)), (5, 15, 16, 8, 4, (2, 2, 2))
    )
    dtype, patch = half(size), 4
    cells = int(np.prod(box))

    def tokens(x, sides):
        """This cuts maps [..., rows, columns, channels] into patches."""
        x = jnp.pad(x, ((0, (-x.shape[0]) % sides[0]), (0, (-rows) % patch), (0, 0), (0, 0)))
        z, y, w, c = x.shape
        x = x.reshape(z // sides[0], sides[0], y // patch, patch, w // patch, patch, c)
        return x.transpose(0, 2, 4, 1, 3, 5, 6).reshape(z // sides[0], y // patch, w // patch, -1)

    def maps(x, sides, c):
        z, y, w, _ = x.shape
        x = x.reshape(z, y, w, sides, patch, patch, c).transpose(0, 3, 1, 4, 2, 5, 6)
        return x.reshape(z * sides, y * patch, w * patch, c)

    def numbers():
        """These tell which entry of a table of biases belongs to each pair of cells of a box."""
        at = np.stack(np.unravel_index(np.arange(cells), box))
        height = at[0][:, None] * box[0] + at[0]
        latitude = at[1][:, None] * box[1] + at[1]
        longitude = at[2][:, None] - at[2] + box[2] - 1
        return (height * box[1] ** 2 + latitude) * (2 * box[2] - 1) + longitude

    def strangers(z, y):
        """These are the pairs of a moved box that do not touch: the globe is closed along longitudes only."""
        part = np.zeros((z, y), int)
        part[z - box[0] // 2 :] += 1
        part[:, y - box[1] // 2 :] += 2
        part = part.reshape(z // box[0], box[0], y // box[1], box[1]).transpose(0, 2, 1, 3)
        part = np.repeat(part.reshape(part.shape[0] * part.shape[1], -1), box[2], axis=-1)
        return part[:, :, None] != part[:, None]

    def dense(o):
        return nn.Dense(o, dtype=dtype, param_dtype=dtype)

    def norm():
        return nn.LayerNorm(dtype=dtype, param_dtype=dtype)

    class Block(nn.Module):
        moved: bool

        @nn.compact
        def __call__(self, x):
            z, y, w, c = x.shape
            kinds, h = (z // box[0]) * (y // box[1]), c // d
            kept, steps = x, tuple(k // 2 for k in box)
            if self.moved:
                x = jnp.roll(x, [-k for k in steps], axis=(0, 1, 2))
            x = x.reshape(z // box[0], box[0], y // box[1], box[1], w // box[2], box[2], c)
            x = x.transpose(4, 0, 2, 1, 3, 5, 6).reshape(-1, kinds, cells, c)
            query, key, value = jnp.moveaxis(dense(3 * c)(x).reshape(*x.shape[:3], 3, h, d), 3, 0)
            entries = box[0] ** 2 * box[1] ** 2 * (2 * box[2] - 1)
            table = self.param("table", nn.initializers.normal(), (entries, kinds, h), jnp.float32)
            scores = jnp.einsum("wkqhd,wkchd->wkhqc", query * d**-0.5, key).astype(jnp.float32)
            scores = scores + jnp.transpose(table[numbers()], (2, 3, 0, 1))
            if self.moved:
                scores = jnp.where(strangers(z, y)[:, None], -100.0, scores)
            probs = nn.softmax(scores, axis=-1).astype(dtype)
            x = dense(c)(jnp.einsum("wkhqc,wkchd->wkqhd", probs, value).reshape(x.shape))
            x = x.reshape(w // box[2], z // box[0], y // box[1], *box, c).transpose(1, 3, 2, 4, 0, 5, 6)
            x = x.reshape(z, y, w, c)
            if self.moved:
                x = jnp.roll(x, steps, axis=(0, 1, 2))
            x = kept + norm()(x)
            return x + norm()(dense(c)(nn.gelu(dense(4 * c)(x))))

    class Globe(nn.Module):
        @nn.compact
        def __call__(self, air, ground, still):
            low = dense(n)(tokens(jnp.concatenate([ground, still], axis=-1)[None], (1,)))
            x = jnp.concatenate([low, dense(n)(tokens(air, (2,)))])
            z, y, w, _ = x.shape
            x = jnp.pad(x, ((0, 0), (0, (-y) % (2 * box[1])), (0, 0), (0, 0)))
            high = x.shape[1]
            for k in range(2):
                x = Block(k % 2 == 1)(x)
            skip = x
            x = (
                x.reshape(z, high // 2, 2, w // 2, 2, n)
                .transpose(0, 1, 3, 2, 4, 5)
                .reshape(z, high // 2, w // 2, 4 * n)
            )
            x = dense(2 * n)(norm()(x))
            for k in range(4):
                x = Block(k % 2 == 1)(x)
            x = dense(4 * n)(x).reshape(z, high // 2, w // 2, 2, 2, n).transpose(0, 1, 3, 2, 4, 5)
            x = norm()(x.reshape(z, high, w, n))
            for k in range(2):
                x = Block(k % 2 == 1)(x)
            x = jnp.concatenate([skip, x], axis=-1)[:, :y]
            ground = maps(dense(patch * patch * 4)(x[:1]), 1, 4)[0, :rows]
            return maps(dense(2 * patch * patch * 5)(x[1:]), 2, 5)[:levels, :rows], ground

    model = Globe()

    def run(p, air, ground, still, later, usual):
        mean, spread = jnp.mean(air, axis=(1, 2), keepdims=True), jnp.std(air, axis=(1, 2), keepdims=True) + 1e-6
        change, low = model.apply(p, ((air - mean) / spread).astype(dtype), ground.astype(dtype), still.astype(dtype))
        air = air + spread * change.astype(jnp.float32)
        weigh = np.cos(np.linspace(-np.pi / 2, np.pi / 2, rows))[:, None, None]
        weigh = weigh / weigh.mean()
        error = jnp.sqrt(jnp.mean(weigh * (air - later) ** 2, axis=(1, 2)))
        one, two = air - usual, later - usual
        alike = jnp.sum(weigh * one * two, axis=(1, 2))
        alike = alike * lax.rsqrt(jnp.sum(weigh * one**2, axis=(1, 2)) * jnp.sum(weigh * two**2, axis=(1, 2)))
        return air, ground + low.astype(jnp.float32), error, alike

    structs = [
        jax.ShapeDtypeStruct(s, dtype) for s in ((levels, rows, columns, 5), (rows, columns, 4), (rows, columns, 3))
    ]
    p = drawn(jax.eval_shape(model.init, jax.random.key(0), *structs))
    maps_of = [normal(*s.shape) for s in structs]
    return Built(run, (p, *maps_of, normal(levels, rows, columns, 5), normal(levels, rows, columns, 5, scale=0.3)))


@program("few-latents-read-and-write-a-noisy-picture-in-blocks-equinox", GROUP)
def _latents(size: Size) -> Built:
    """This takes noise out of pictures in a few steps with a small set of latents that read all patches, think and write back.

    It is the recurrent interface network (Jabri, 2023; google-research/pix2seq), written with equinox and `vmap`: the latents of
    one step begin those of the next one.
    """
    import equinox as eqx

    b, side, patch, n, m, wide, h = pick(
        size, (12, 132, 4, 256, 126, 640, 8), (1, 68, 4, 48, 30, 96, 4), (2, 8, 4, 8, 3, 12, 2)
    )
    blocks, thoughts, steps, grid = 2, 2, 3, side // patch

    class Feed(eqx.Module):
        norm: eqx.nn.LayerNorm
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, c, key):
            one, two = jax.random.split(key)
            self.norm, self.up = eqx.nn.LayerNorm(c), eqx.nn.Linear(c, 4 * c, key=one)
            self.down = eqx.nn.Linear(4 * c, c, key=two)

        def __call__(self, x):
            return x + jax.vmap(lambda y: self.down(jax.nn.gelu(self.up(self.norm(y)))))(x)

    class Look(eqx.Module):
        norm: eqx.nn.LayerNorm
        other: eqx.nn.LayerNorm
        mix: eqx.nn.MultiheadAttention
        feed: Feed

        def __init__(self, c, o, key):
            one, two = jax.random.split(key)
            self.norm, self.other = eqx.nn.LayerNorm(c), eqx.nn.LayerNorm(o)
            self.mix = eqx.nn.MultiheadAttention(h, c, o, o, use_output_bias=True, key=one)
            self.feed = Feed(c, two)

        def __call__(self, x, seen):
            seen = jax.vmap(self.other)(seen)
            return self.feed(x + self.mix(jax.vmap(self.norm)(x), seen, seen))

    class Network(eqx.Module):
        enter: eqx.nn.Linear
        enter_norm: eqx.nn.LayerNorm
        places: jax.Array
        latents: jax.Array
        time: eqx.nn.MLP
        before: eqx.nn.MLP
        before_norm: eqx.nn.LayerNorm
        reads: list[Look]
        thinks: list[Look]
        writes: list[Look]
        leave_norm: eqx.nn.LayerNorm
        leave: eqx.nn.Linear

        def __init__(self, key):
            keys = iter(jax.random.split(key, 30))
            self.enter = eqx.nn.Linear(3 * patch * patch, n, key=next(keys))
            self.enter_norm, self.leave_norm = eqx.nn.LayerNorm(n), eqx.nn.LayerNorm(n)
            self.places = jax.random.normal(next(keys), (grid * grid, n))
            self.latents = jax.random.normal(next(keys), (m, wide))
            self.time = eqx.nn.MLP(32, wide, wide, 1, jax.nn.silu, key=next(keys))
            self.before = eqx.nn.MLP(wide, wide, 2 * wide, 1, jax.nn.gelu, key=next(keys))
            self.before_norm = eqx.nn.LayerNorm(wide)
            self.reads = [Look(wide, n, next(keys)) for _ in range(blocks)]
            self.thinks = [Look(wide, wide, next(keys)) for _ in range(blocks * thoughts)]
            self.writes = [Look(n, wide, next(keys)) for _ in range(blocks)]
            self.leave = eqx.nn.Linear(n, 3 * patch * patch, key=next(keys))

        def __call__(self, picture, level, kept):
            x = picture.reshape(grid, patch, grid, patch, 3).transpose(0, 2, 1, 3, 4).reshape(grid * grid, -1)
            x = jax.vmap(lambda y: self.enter_norm(self.enter(y)))(x) + self.places
            angle = level * 10.0 ** jnp.linspace(0.0, 3.0, 16)
            time = self.time(jnp.concatenate([jnp.sin(angle), jnp.cos(angle)]))
            z = self.latents + jax.vmap(lambda y: self.before_norm(y + self.before(y)))(kept)
            z = jnp.concatenate([z, time[None]])
            for k in range(blocks):
                z = self.reads[k](z, x)
                for think in self.thinks[k * thoughts : (k + 1) * thoughts]:
                    z = think(z, z)
                x = self.writes[k](x, z)
            y = jax.vmap(lambda y: self.leave(self.leave_norm(y)))(x).reshape(grid, grid, patch, patch, 3)
            return y.transpose(0, 2, 1, 3, 4).reshape(side, side, 3), z[:-1]

    shapes = eqx.filter_eval_shape(Network, jax.random.key(0))
    arrays, still = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def run(arrays, noise):
        net = eqx.combine(arrays, still)

        def share(k):
            return jnp.cos(0.5 * np.pi * k / steps) ** 2 * 0.998 + 0.001

        def step(carry, k):
            """This guesses the noise, keeps the clean guess within bounds and moves to the next level."""
            x, kept = carry
            now, then = share(steps - k), share(steps - k - 1)
            told, kept = jax.vmap(lambda x, z: net(x, now, z))(x, kept)
            clean = jnp.clip((x - jnp.sqrt(1 - now) * told) / jnp.sqrt(now), -1.0, 1.0)
            told = (x - jnp.sqrt(now) * clean) / jnp.sqrt(1 - now)
            moved = jnp.sqrt(then) * clean + jnp.sqrt(1 - then) * told
            return (moved, kept), (jnp.mean(moved, axis=(1, 2)), jnp.std(kept, axis=(1, 2)))

        (x, kept), told = lax.scan(step, (noise, jnp.zeros((b, m, wide))), jnp.arange(steps))
        return 0.5 + 0.5 * x, kept, told

    return Built(run, (drawn(arrays), normal(b, side, side, 3)))


@program("regions-choose-regions-then-attend-classifier-nnx", GROUP)
def _regions(size: Size) -> Built:
    """This names what a picture shows: each region first chooses a few other regions, then its pixels attend to theirs.

    It is BiFormer (Zhu, 2023; rayleizhu/BiFormer): regions are compared by their means, the chosen ones are gathered, and values
    also go through a convolution of their own.
    """
    from flax import nnx

    b, side, w, d, cut, classes = pick(
        size, (16, 240, 64, 32, 5, 1000), (1, 160, 32, 16, 5, 1000), (2, 80, 8, 4, 5, 11)
    )
    dtype, chosen, areas = half(size), (2, 4, 9), cut * cut

    dense, norm, conv = layers_of_nnx(dtype)

    class Routed(nnx.Module):
        def __init__(self, c, top, rngs):
            self.top, self.heads = top, c // d
            self.all, self.leave, self.near = dense(c, 3 * c, rngs), dense(c, c, rngs), conv(c, c, 5, rngs, groups=c)

        def __call__(self, x):
            _, rows, columns, c = x.shape
            z = self.all(x)
            parts = z.reshape(b, cut, rows // cut, cut, columns // cut, 3 * c).transpose(0, 1, 3, 2, 4, 5)
            query, key, value = jnp.split(parts.reshape(b, areas, -1, 3 * c), 3, axis=-1)
            means = [jnp.mean(y.astype(jnp.float32), axis=2) for y in (query, key)]
            _, at = lax.top_k(jnp.einsum("bqc,bkc->bqk", *means), self.top)
            rows_of = jnp.arange(b)[:, None, None]
            key = key[rows_of, at].reshape(b, areas, -1, self.heads, d)
            read = value[rows_of, at].reshape(b, areas, -1, self.heads, d)
            query = query.reshape(b, areas, -1, self.heads, d) * d**-0.5
            scores = jnp.einsum("brqhd,brkhd->brhqk", query, key)
            probs = jax.nn.softmax(scores.astype(jnp.float32), axis=-1)
            y = jnp.einsum("brhqk,brkhd->brqhd", probs.astype(dtype), read)
            y = y.reshape(b, cut, cut, rows // cut, columns // cut, c).transpose(0, 1, 3, 2, 4, 5)
            return self.leave(y.reshape(x.shape) + self.near(z[..., 2 * c :])), jnp.max(probs, axis=(2, 3, 4))

    class Block(nnx.Module):
        def __init__(self, c, top, rngs):
            self.places, self.mix = conv(c, c, 3, rngs, groups=c), Routed(c, top, rngs)
            self.norm1, self.norm2 = norm(c, rngs), norm(c, rngs)
            self.up, self.down = dense(c, 3 * c, rngs), dense(3 * c, c, rngs)

        def __call__(self, x):
            x = x + self.places(x)
            y, sure = self.mix(self.norm1(x))
            x = x + y
            return x + self.down(nnx.gelu(self.up(self.norm2(x)))), sure

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.stem = nnx.List([conv(3, w // 2, 3, rngs, 2), conv(w // 2, w, 3, rngs, 2)])
            self.stem_norm = norm(w // 2, rngs)
            self.stages = nnx.List(
                [nnx.List([Block(w * 2**k, top, rngs) for _ in range(2)]) for k, top in enumerate(chosen)]
            )
            self.smaller = nnx.List([conv(w * 2**k, w * 2 ** (k + 1), 3, rngs, 2) for k in range(2)])
            self.last, self.head = norm(4 * w, rngs), nnx.Linear(4 * w, classes, rngs=rngs)

        def __call__(self, x):
            x, told = self.stem[1](nnx.gelu(self.stem_norm(self.stem[0](x)))), []
            for k, stage in enumerate(self.stages):
                for block in stage:
                    x, sure = block(x)
                    told.append(sure)
                if k < 2:
                    x = self.smaller[k](x)
            x = jnp.mean(self.last(x).astype(jnp.float32), axis=(1, 2))
            return jax.nn.log_softmax(self.head(x), axis=-1), jnp.stack(told)

    graph, state = nnx.split(nnx.eval_shape(lambda: Network(nnx.Rngs(0))))

    def run(state, pictures):
        x = pictures.astype(jnp.float32)
        x = (x - jnp.mean(x, axis=(1, 2), keepdims=True)) / (jnp.std(x, axis=(1, 2), keepdims=True) + 1e-3)
        logp, told = nnx.merge(graph, state)(x.astype(dtype))
        return *lax.top_k(jnp.exp(logp), 5), -jnp.sum(jnp.exp(logp) * logp, axis=-1), told

    return Built(run, (drawn(state), integers(b, side, side, 3, below=256)))


@program("long-histories-searched-by-signs-for-each-candidate-haiku", GROUP)
def _histories(size: Size) -> Built:
    """This ranks goods for shoppers by the few of thousands of past clicks whose signed codes are nearest to each candidate.

    It is ETA (Chen, 2021; Alibaba), written with haiku: codes of signs are packed into whole numbers and compared by counting bits;
    the nearest clicks and the newest ones are then attended to, and a network reads all fields.
    """
    import haiku as hk

    b, past, goods, n, items, shops, nearest, new, h = pick(
        size,
        (40, 4999, 31, 64, 400009, 5003, 48, 50, 4),
        (12, 997, 13, 32, 20011, 503, 24, 20, 4),
        (2, 11, 3, 8, 23, 7, 4, 3, 2),
    )
    lanes = 3

    def codes(x, ways):
        """This packs the signs along 32 random ways per lane into whole numbers."""
        signs = (jnp.einsum("...n,nlw->...lw", x, ways) > 0).astype(jnp.uint32)
        return jnp.sum(signs << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)

    class Asked(hk.Module):
        def __call__(self, query, seen, real):
            q = hk.Linear(n, with_bias=False, name="q")(query).reshape(b, goods, h, -1)
            k = hk.Linear(n, with_bias=False, name="k")(seen)
            v = hk.Linear(n, with_bias=False, name="v")(seen)
            k, v = (y.reshape(*y.shape[:-1], h, -1) for y in (k, v))
            scores = jnp.einsum("bghd,bgkhd->bghk", q, k) * (n // h) ** -0.5
            probs = jax.nn.softmax(jnp.where(real[:, :, None], scores, -1e4), axis=-1)
            return hk.Linear(n, name="o")(jnp.einsum("bghk,bgkhd->bghd", probs, v).reshape(b, goods, n)), probs

    @hk.without_apply_rng
    @hk.transform
    def net(clicks, shop, ages, length, wanted, wanted_shop, user, ways):
        table, shop_table = hk.Embed(items, n, name="items"), hk.Embed(shops, n, name="shops")
        query = table(wanted)
        seen = table(clicks)
        alive = jnp.arange(past) < length[:, None]
        far = lax.population_count(codes(query, ways)[:, :, None] ^ codes(seen, ways)[:, None])
        far = jnp.sum(far.astype(jnp.int32), axis=-1)
        near, at = lax.top_k(jnp.where(alive[:, None], -far, -1000), nearest)
        rows = jnp.arange(b)[:, None, None]
        when = hk.Embed(17, n, name="ages")
        full = seen + shop_table(shop) + when(jnp.minimum(jnp.log2(1.0 + ages).astype(jnp.int32), 16))
        told, probs = Asked(name="long")(query, full[rows, at], near > -1000)
        last = jnp.maximum(length[:, None] - 1 - jnp.arange(new), 0)
        recent = jnp.broadcast_to(full[jnp.arange(b)[:, None], last][:, None], (b, goods, new, n))
        fresh = (jnp.arange(new) < length[:, None])[:, None]
        now, _ = Asked(name="short")(query, recent, jnp.broadcast_to(fresh, (b, goods, new)))
        whole = jnp.sum(jnp.where(alive[..., None], seen, 0), axis=1) / jnp.maximum(length, 1)[:, None]
        who = jnp.concatenate([user, whole], axis=-1)
        who = jnp.broadcast_to(hk.Linear(n, name="who")(who)[:, None], (b, goods, n))
        x = [query, shop_table(wanted_shop), told, now, who, query * told, query * now, query * who]
        x = hk.LayerNorm(-1, True, True)(jnp.concatenate([*x, near.astype(jnp.float32) / 32], axis=-1))
        for k, width in enumerate((8 * n, 4 * n)):
            slope = hk.get_parameter(f"slope{k}", (width,), init=jnp.ones)
            x = hk.Linear(width)(x)
            x = jnp.where(x > 0, x, 0.25 * slope * x)
        logits = hk.Linear(1)(x)[..., 0]
        return logits, -far, jnp.sum(jax.scipy.special.entr(probs), axis=-1)

    def run(p, *inputs):
        logits, near, spread = net.apply(p, *inputs)
        chance = jax.nn.sigmoid(logits)
        order = jnp.argsort(-logits, axis=-1)
        return chance, order, jax.nn.softmax(logits, axis=-1), jnp.max(near, axis=-1), jnp.mean(spread, axis=-1)

    inputs = (integers(b, past, below=items), integers(b, past, below=shops), integers(b, past, below=40000))
    inputs += (integers(b, below=past), integers(b, goods, below=items), integers(b, goods, below=shops))
    inputs += (normal(b, 23), normal(n, lanes, 32))
    p = jax.eval_shape(net.init, jax.random.key(0), *(r.struct for r in inputs))
    return Built(run, (drawn(p), *inputs))
