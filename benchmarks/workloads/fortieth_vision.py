"""Two views matched without corners and clouds whose hidden parts are guessed, the fortieth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_sixth_parts import drawn, layers_of_nnx

GROUP = "fortieth"


@program("loftr-detector-free-matches-linear-attention-dual-softmax-then-fine-windows-linen", GROUP)
def _loftr(size: Size) -> Built:
    """This program finds which places of two photographs of a scene are the same, without looking for corners first.

    It is LoFTR (Sun, 2021; zju3dv/LoFTR), with linen: coarse maps see themselves and each other by linear attention, a softmax both
    ways and mutual best choices give matches, and windows of a fine map around them tell the match to parts of a pixel.
    """
    import flax.linen as nn

    b, rows, columns, widths, h, pairs, window, most = pick(
        size,
        (2, 384, 512, (128, 196, 256), 8, 4, 5, 1024),
        (1, 64, 96, (24, 32, 48), 4, 2, 5, 32),
        (1, 16, 24, (4, 4, 8), 2, 1, 3, 3),
    )
    dtype, (small, middle, n) = half(size), widths
    high, wide = rows // 8, columns // 8

    class Unit(nn.Module):
        """This is a residual block with norms that use kept statistics."""

        channels: int
        stride: int = 1

        @nn.compact
        def __call__(self, x):
            how = {"use_bias": False, "dtype": dtype}
            norm = {"use_running_average": True, "dtype": dtype}
            y = nn.Conv(self.channels, (3, 3), (self.stride,) * 2, **how)(x)
            y = nn.Conv(self.channels, (3, 3), **how)(nn.relu(nn.BatchNorm(**norm)(y)))
            y = nn.BatchNorm(**norm)(y)
            if self.stride > 1 or x.shape[-1] != self.channels:
                x = nn.BatchNorm(**norm)(nn.Conv(self.channels, (1, 1), (self.stride,) * 2, **how)(x))
            return nn.relu(x + y)

    class Look(nn.Module):
        """This is a layer in which x [b, k, c] looks at y by linear attention."""

        heads: int

        @nn.compact
        def __call__(self, x, y):
            c = x.shape[-1]
            query, key, value = (nn.Dense(c, use_bias=False, dtype=dtype)(z) for z in (x, y, y))
            query, key, value = (z.reshape(*z.shape[:-1], self.heads, c // self.heads) for z in (query, key, value))
            query, key = (nn.elu(z.astype(jnp.float32)) + 1 for z in (query, key))
            long = value.shape[-3]
            state = jnp.einsum("bkhd,bkhe->bhde", key, value.astype(jnp.float32) / long)
            total = jnp.einsum("bqhd,bhd->bqh", query, jnp.sum(key, axis=1)) + 1e-6
            out = jnp.einsum("bqhd,bhde->bqhe", query, state) * long / total[..., None]
            out = nn.Dense(c, use_bias=False, dtype=dtype)(out.reshape(x.shape).astype(dtype))
            out = nn.LayerNorm(dtype=dtype)(out)
            out = nn.Dense(2 * c, use_bias=False, dtype=dtype)(jnp.concatenate([x, out], axis=-1))
            out = nn.Dense(c, use_bias=False, dtype=dtype)(nn.relu(out))
            return x + nn.LayerNorm(dtype=dtype)(out)

    class Looks(nn.Module):
        """These are layers in which each side looks at itself and then at the other."""

        pairs: int
        heads: int

        @nn.compact
        def __call__(self, x, y):
            for _ in range(self.pairs):
                alone, across = Look(self.heads), Look(self.heads)
                x, y = alone(x, x), alone(y, y)
                x = across(x, y)
                y = across(y, x)
            return x, y

    class Matcher(nn.Module):
        """This is the whole network."""

        @nn.compact
        def __call__(self, one, two):
            norm = nn.BatchNorm(use_running_average=True, dtype=dtype)
            x = nn.Conv(small, (7, 7), (2, 2), use_bias=False, dtype=dtype)(jnp.concatenate([one, two]))
            first = Unit(small)(Unit(small)(nn.relu(norm(x))))
            second = Unit(middle)(Unit(middle, 2)(first))
            third = nn.Conv(n, (1, 1), dtype=dtype)(Unit(n)(Unit(n, 2)(second)))

            def larger(x):
                """This doubles rows and columns."""
                shape = (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3])
                return jax.image.resize(x, shape, "bilinear")

            x = nn.Conv(n, (1, 1), use_bias=False, dtype=dtype)(second) + larger(third)
            x = nn.Conv(middle, (3, 3), dtype=dtype)(nn.leaky_relu(nn.Conv(n, (3, 3), dtype=dtype)(x)))
            x = nn.Conv(middle, (1, 1), use_bias=False, dtype=dtype)(first) + larger(x)
            fine = nn.Conv(small, (3, 3), dtype=dtype)(nn.leaky_relu(nn.Conv(middle, (3, 3), dtype=dtype)(x)))

            rate = np.exp(-np.log(10000.0) * np.arange(n // 4) / (n // 4))
            across, down = np.arange(1, wide + 1)[:, None] * rate, np.arange(1, high + 1)[:, None] * rate
            waves = [np.sin(across), np.cos(across)], [np.sin(down), np.cos(down)]
            flat = [np.broadcast_to(z, (high, wide, n // 4)) for z in waves[0]]
            flat += [np.broadcast_to(z[:, None], (high, wide, n // 4)) for z in waves[1]]
            coarse = (third + jnp.asarray(np.concatenate(flat, axis=-1), dtype)).reshape(2, b, high * wide, n)
            x, y = Looks(pairs, h, name="coarse")(coarse[0], coarse[1])
            scores = jnp.einsum("bqc,bkc->bqk", x, y, preferred_element_type=jnp.float32) / (n * 0.1)
            chance = jax.nn.softmax(scores, axis=1) * jax.nn.softmax(scores, axis=2)

            best = (chance == jnp.max(chance, axis=2, keepdims=True)) & (
                chance == jnp.max(chance, axis=1, keepdims=True)
            )
            place = jnp.arange(high * wide)
            row, column = place // wide, place % wide
            edge = (row < 1) | (row >= high - 1) | (column < 1) | (column >= wide - 1)
            good = jnp.where(best & ~edge[:, None] & ~edge, chance, 0.0)
            partner = jnp.argmax(good, axis=2)
            sure, mine = lax.top_k(jnp.max(good, axis=2), most)
            theirs = jnp.take_along_axis(partner, mine, axis=1)

            fine = fine.reshape(2, b, rows // 2, columns // 2, small)
            around = jnp.arange(window) - window // 2

            def cut(x, at):
                """This cuts windows [b, most, window * window, small] of a fine map around coarse places."""
                i = jnp.clip((at // wide * 4)[..., None] + around, 0, rows // 2 - 1)
                j = jnp.clip((at % wide * 4)[..., None] + around, 0, columns // 2 - 1)
                batch = jnp.arange(b)[:, None, None, None]
                return x[batch, i[..., :, None], j[..., None, :]].reshape(b * most, window * window, small)

            told = nn.Dense(small, dtype=dtype, name="down")
            merge = nn.Dense(small, dtype=dtype, name="merge")

            def both(x, at, coarse):
                """This joins a window with what the coarse place knows."""
                near = jnp.take_along_axis(coarse, at[..., None], axis=1).reshape(b * most, 1, n)
                near = jnp.broadcast_to(told(near), (b * most, window * window, small))
                return merge(jnp.concatenate([cut(x, at), near], axis=-1))

            p, q = Looks(1, h, name="fine")(both(fine[0], mine, x), both(fine[1], theirs, y))
            centre = p[:, window * window // 2]
            heat = jnp.einsum("mc,mkc->mk", centre, q, preferred_element_type=jnp.float32) * small**-0.5
            heat = jax.nn.softmax(heat, axis=-1).reshape(b, most, window, window)
            line = jnp.linspace(-1.0, 1.0, window)
            grid = jnp.stack(jnp.meshgrid(line, line, indexing="ij"), axis=-1)
            shift = jnp.einsum("bmij,ijc->bmc", heat, grid)
            spread = jnp.einsum("bmij,ijc->bmc", heat, grid**2) - shift**2
            return mine, theirs, sure, shift, jnp.sum(jnp.sqrt(jnp.maximum(spread, 1e-10)), axis=-1)

    model = Matcher()
    photo = jax.ShapeDtypeStruct((b, rows, columns, 1), dtype)
    structs = jax.eval_shape(model.init, jax.random.key(0), photo, photo)

    def run(p, one, two, moved):
        """This gives pairs of places, how sure and sharp they are, and how far they are from a known plane's move."""
        views = [((z.astype(jnp.float32) / 255.0)[..., None]).astype(dtype) for z in (one, two)]
        mine, theirs, sure, shift, spread = model.apply(p, *views)
        first = 8.0 * jnp.stack([mine // wide, mine % wide], axis=-1)
        second = 8.0 * jnp.stack([theirs // wide, theirs % wide], axis=-1) + shift * (window // 2) * 2.0
        plane = jnp.eye(3) + moved * jnp.asarray([[0.05, 0.05, 8.0], [0.05, 0.05, 8.0], [1e-5, 1e-5, 0.0]])
        flat = jnp.einsum("bij,bmj->bmi", plane, jnp.concatenate([first, jnp.ones((b, most, 1))], axis=-1))
        error = jnp.sqrt(jnp.sum((flat[..., :2] / flat[..., 2:] - second) ** 2, axis=-1))
        used = sure > 0.0
        right = jnp.sum((error[..., None] < jnp.asarray([1.0, 3.0, 5.0, 10.0])) & used[..., None], axis=1)
        return jnp.stack([first, second]), sure, spread, jnp.where(used, error, 0.0), right

    shots = integers(b, rows, columns, below=256), integers(b, rows, columns, below=256)
    return Built(run, (drawn(structs, dtype), *shots, normal(b, 3, 3)))


@program("point-mae-hidden-patches-of-clouds-farthest-centres-chamfer-step-nnx", GROUP)
def _point_mae(size: Size) -> Built:
    """This program does one step of training a network that guesses the hidden parts of clouds of points.

    It is Point-MAE (Pang, 2022; Pang-Yatian/Point-MAE), with nnx and optax: centres lie far from each other, nearest points are a
    patch, a small net with maxima reads patches that are shown, and hidden ones are drawn by a decoder and compared both ways.
    """
    import optax
    from flax import nnx

    b, points, groups, near, n, h, depth, after, share = pick(
        size, (48, 1024, 64, 32, 384, 6, 5, 2, 0.6), (3, 256, 16, 16, 96, 4, 5, 2, 0.6), (1, 12, 4, 3, 8, 2, 5, 2, 0.5)
    )
    dtype = half(size)
    dense, norm, _ = layers_of_nnx(dtype)
    hidden, inner = int(share * groups), min(n, 128)
    shown = groups - hidden

    class Patch(nnx.Module):
        """This reads patches [b, k, near, 3]."""

        def __init__(self, rngs):
            self.one, self.two = dense(3, n // 3, rngs), dense(n // 3, 2 * n // 3, rngs)
            self.three, self.four = dense(2 * (2 * n // 3), n, rngs), dense(n, n, rngs)
            self.norm1, self.norm2 = norm(n // 3, rngs), norm(n, rngs)

        def __call__(self, x):
            x = self.two(nnx.relu(self.norm1(self.one(x))))
            whole = jnp.broadcast_to(jnp.max(x, axis=2, keepdims=True), x.shape)
            x = nnx.relu(self.norm2(self.three(jnp.concatenate([whole, x], axis=-1))))
            return jnp.max(self.four(x), axis=2)

    class Layer(nnx.Module):
        """This is a layer of a transformer."""

        def __init__(self, rngs):
            how = {"dtype": dtype, "param_dtype": dtype, "decode": False, "rngs": rngs}
            self.norm1, self.norm2 = norm(n, rngs), norm(n, rngs)
            self.look = nnx.MultiHeadAttention(h, n, **how)
            self.up, self.down = dense(n, 4 * n, rngs), dense(4 * n, n, rngs)

        def __call__(self, x):
            x = x + self.look(self.norm1(x))
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    class Net(nnx.Module):
        """This is the whole network."""

        def __init__(self, rngs):
            self.patch = Patch(rngs)
            self.places = nnx.List([dense(3, inner, rngs), dense(inner, n, rngs)])
            self.again = nnx.List([dense(3, inner, rngs), dense(inner, n, rngs)])
            self.layers = nnx.List([Layer(rngs) for _ in range(depth)])
            self.decoder = nnx.List([Layer(rngs) for _ in range(after)])
            self.norm, self.last = norm(n, rngs), norm(n, rngs)
            self.mask = nnx.Param(jnp.zeros((n,), dtype))
            self.head = dense(n, 3 * near, rngs)

        def __call__(self, patches, seen, unseen):
            """This tells points of hidden patches [b, hidden, near, 3] from shown patches and all centres."""
            at, there = self.places[1](nnx.gelu(self.places[0](seen))), jnp.concatenate([seen, unseen], axis=1)
            x = self.patch(patches)
            for layer in self.layers:
                x = layer(x + at)
            x = self.norm(x)
            there = self.again[1](nnx.gelu(self.again[0](there)))
            x = jnp.concatenate([x, jnp.broadcast_to(self.mask[...], (b, hidden, n))], axis=1)
            for layer in self.decoder:
                x = layer(x + there)
            return self.head(self.last(x[:, shown:])).reshape(b, hidden, near, 3), x[:, :shown]

    graph, structs = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))
    optimiser = optax.adamw(1e-3, weight_decay=0.05, mask=lambda p: jax.tree.map(lambda z: z.ndim > 1, p))

    def centres(cloud, first):
        """This chooses points [groups] of one cloud, each the farthest from all before."""

        def step(carry, _):
            """This adds one centre."""
            away, last = carry
            away = jnp.minimum(away, jnp.sum((cloud - cloud[last]) ** 2, axis=-1))
            return (away, jnp.argmax(away)), last

        _, chosen = lax.scan(step, (jnp.full(points, 1e10), first), None, length=groups)
        return chosen

    def run(p, cloud, first, seed):
        """This gives the loss, new weights, the length of slopes, guessed points, distances by patch, and what clouds look like."""
        one, two, three = jax.random.split(jax.random.key(seed), 3)
        cloud = cloud - jnp.mean(cloud, axis=1, keepdims=True)
        cloud = cloud / jnp.max(jnp.linalg.norm(cloud, axis=-1), axis=1)[:, None, None]
        wide = jax.random.uniform(one, (b, 1, 3), minval=2 / 3, maxval=3 / 2)
        cloud = cloud * wide + jax.random.uniform(two, (b, 1, 3), minval=-0.2, maxval=0.2)
        chosen = jax.vmap(centres)(cloud, first)
        middle = jnp.take_along_axis(cloud, chosen[..., None], axis=1)
        away = jnp.sum((middle[:, :, None] - cloud[:, None]) ** 2, axis=-1)
        _, at = lax.top_k(-away, near)
        patches = jax.vmap(lambda z, k: z[k])(cloud, at) - middle[:, :, None]
        order = jnp.argsort(jax.random.uniform(three, (b, groups)), axis=1)
        patches = jnp.take_along_axis(patches, order[..., None, None], axis=1)
        middle = jnp.take_along_axis(middle, order[..., None], axis=1)
        seen, unseen = middle[:, :shown].astype(dtype), middle[:, shown:].astype(dtype)
        true = patches[:, shown:]

        def loss(p):
            """This is the mean of squares of distances to the nearest point, both ways."""
            told, x = nnx.merge(graph, p)(patches[:, :shown].astype(dtype), seen, unseen)
            told = told.astype(jnp.float32)
            gap = jnp.sum((told[..., :, None, :] - true[..., None, :, :]) ** 2, axis=-1)
            each = jnp.mean(jnp.min(gap, axis=-1), axis=-1) + jnp.mean(jnp.min(gap, axis=-2), axis=-1)
            return jnp.mean(each), (told + middle[:, shown:, None], each, jnp.max(x, axis=1))

        (value, (told, each, whole)), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        change, _ = optimiser.update(slopes, optimiser.init(p), p)
        return value, optax.apply_updates(p, change), optax.tree.norm(slopes), told, each, whole

    clouds = normal(b, points, 3), integers(b, below=points)
    return Built(run, (drawn(structs, dtype), *clouds, integers(below=1000)))
