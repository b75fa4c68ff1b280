"""Models of fields, weather, proteins, poses, robots and streets, the seventeenth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import linen_program, module_weights
from benchmarks.workloads.registry import Built, Random, Size, booleans, half, integers, normal, pick, program
from benchmarks.workloads.sixteenth_models import equinox_parts, nnx_program

GROUP = "seventeenth"


@program("crop-series-one-query-per-head-time-attention-nnx", GROUP)
def _crops(size: Size) -> Built:
    """This gives the crop of each field from satellite images of a year.

    A set of pixels of the field is pooled by masked mean and spread at every date; then each head has one learned query, and
    reads only its own slice of the channels.
    """
    from flax import nnx

    b, dates, pixels, bands, n, h, key, classes = pick(
        size, (512, 61, 32, 10, 256, 16, 8, 45), (24, 37, 24, 10, 128, 16, 8, 45), (2, 5, 6, 3, 8, 2, 4, 5)
    )
    dtype = half(size)
    kinds = {"dtype": dtype, "param_dtype": dtype}

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.pixel1 = nnx.Linear(bands, n // 8, rngs=rngs, **kinds)
            self.pixel2 = nnx.Linear(n // 8, n // 4, rngs=rngs, **kinds)
            self.pixel_norm = nnx.LayerNorm(n // 8, rngs=rngs, **kinds)
            self.set_out = nnx.Linear(n // 2, n, rngs=rngs, **kinds)
            self.groups_in = nnx.GroupNorm(n, num_groups=h // 2, rngs=rngs, **kinds)
            self.queries = nnx.Param(jnp.zeros((h, key), dtype))
            self.keys = nnx.Linear(n, h * key, rngs=rngs, **kinds)
            self.mix = nnx.Linear(n, n // 2, rngs=rngs, **kinds)
            self.mix_norm = nnx.BatchNorm(n // 2, use_running_average=True, rngs=rngs, **kinds)
            self.head1 = nnx.Linear(n // 2, 64, rngs=rngs, **kinds)
            self.head2 = nnx.Linear(64, classes, rngs=rngs, **kinds)

        def __call__(self, series, inside, days):
            x = series.astype(dtype)
            x = nnx.relu(self.pixel_norm(self.pixel1(x)))
            x = nnx.relu(self.pixel2(x)).astype(jnp.float32)
            w = inside[:, None, :, None].astype(jnp.float32)
            count = jnp.sum(w, axis=2) + 1e-6
            mean = jnp.sum(x * w, axis=2) / count
            spread = jnp.sqrt(jnp.sum(w * (x - mean[:, :, None]) ** 2, axis=2) / count + 1e-6)
            x = nnx.relu(self.set_out(jnp.concatenate([mean, spread], axis=-1).astype(dtype)))
            rates = 1000.0 ** (-2 * (jnp.arange(n // h) // 2) / (n // h))
            angles = jnp.cumsum(days, axis=1)[..., None] * rates
            place = jnp.where(jnp.arange(n // h) % 2 == 0, jnp.sin(angles), jnp.cos(angles))
            x = self.groups_in(x) + jnp.tile(place, (1, 1, h)).astype(dtype)
            keys = self.keys(x).reshape(b, dates, h, key)
            scores = jnp.einsum("hk,bthk->bht", self.queries[...], keys).astype(jnp.float32) / np.sqrt(key)
            weights = nnx.softmax(scores, axis=-1)
            seen = jnp.einsum("bht,bthc->bhc", weights.astype(dtype), x.reshape(b, dates, h, n // h))
            y = nnx.relu(self.mix_norm(self.mix(seen.reshape(b, n))))
            logits = self.head2(nnx.relu(self.head1(y))).astype(jnp.float32)
            return nnx.log_softmax(logits), jnp.mean(weights, axis=1)

    inputs = (normal(b, dates, pixels, bands), booleans(b, pixels), integers(b, dates, below=9))
    return nnx_program(size, Net, *inputs)


@program("weather-on-a-sphere-spectral-operator-linen", GROUP)
def _sphere(size: Size) -> Built:
    """This gives the next state of the weather by blocks that filter fields over the globe by spherical harmonics.

    The Legendre polynomials are constants of the program; a filter is a matrix of complex numbers for each degree.
    """
    import flax.linen as nn

    b, lats, lons, degrees, fields, n = pick(
        size, (2, 91, 180, 60, 26, 96), (1, 46, 90, 30, 20, 32), (1, 7, 12, 4, 3, 4)
    )
    dtype = half(size)
    nodes, areas = np.polynomial.legendre.leggauss(lats)
    table = np.zeros((degrees, degrees, lats))  # orders, degrees, latitudes
    diagonal = np.full(lats, np.sqrt(0.5))
    for m in range(degrees):
        if m > 0:
            diagonal = -np.sqrt((2 * m + 1) / (2 * m)) * np.sqrt(1 - nodes**2) * diagonal
        table[m, m] = diagonal
        for k in range(m + 1, degrees):
            a = np.sqrt((4 * k * k - 1) / (k * k - m * m))
            c = np.sqrt(((k - 1) ** 2 - m * m) / (4 * (k - 1) ** 2 - 1)) if k > m + 1 else 0.0
            table[m, k] = a * (nodes * table[m, k - 1] - c * table[m, k - 2])
    legendre, forward = table.astype(np.float32), (table * areas).astype(np.float32)

    def analysed(x):
        waves = jnp.fft.rfft(x.astype(jnp.float32), axis=2, norm="forward")[:, :, :degrees]
        return jnp.einsum("mlk,bkmc->blmc", forward, waves)

    def composed(s):
        waves = jnp.einsum("mlk,blmc->bkmc", legendre, s)
        waves = jnp.pad(waves, ((0, 0), (0, 0), (0, lons // 2 + 1 - degrees), (0, 0)))
        return jnp.fft.irfft(waves, n=lons, axis=2, norm="forward")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm(dtype=dtype)(x)
            real, imaginary = (
                self.param(name, nn.initializers.lecun_normal(), (degrees, n, n)) for name in ("real", "imaginary")
            )
            filters = lax.complex(real.astype(jnp.float32), imaginary.astype(jnp.float32)) * degrees**0.5
            filtered = composed(jnp.einsum("blmc,lcd->blmd", analysed(y), filters)).astype(dtype)
            x = x + nn.gelu(filtered + nn.Dense(n, dtype=dtype)(y))
            y = nn.LayerNorm(dtype=dtype)(x)
            return x + nn.Dense(n, dtype=dtype)(nn.gelu(nn.Dense(2 * n, dtype=dtype)(y)))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, state, still):
            seen = jnp.concatenate([state, still], axis=-1).astype(dtype)
            x = nn.Dense(n, dtype=dtype)(nn.gelu(nn.Dense(n, dtype=dtype)(seen)))
            x = x + self.param("place", nn.initializers.normal(), (lats, lons, n)).astype(dtype)
            for _ in range(3):
                x = Block()(x)
            change = nn.Dense(fields, dtype=jnp.float32)(jnp.concatenate([x, seen], axis=-1))
            after = state + 0.1 * change
            power = jnp.sum(jnp.abs(analysed(after)) ** 2, axis=2)
            return after, power, jnp.einsum("k,bkjc->bc", areas.astype(np.float32), after) / (2 * lons)

    return linen_program(size, Net(), normal(b, lats, lons, fields), normal(b, lats, lons, 4))


@program("sequences-for-a-backbone-masked-decoder-equinox", GROUP)
def _inverse_folding(size: Size) -> Built:
    """This gives the likelihood of amino acids for protein backbones, decoded in a random order.

    Each residue hears its nearest residues; edges carry distances of all pairs of atoms and the offset along the chain. The
    decoder sees the kind of a neighbour only if it comes earlier in the order.
    """
    import equinox as eqx

    b, length, near, n, kinds, bases = pick(
        size, (4, 487, 48, 128, 21, 16), (2, 83, 24, 64, 21, 16), (2, 9, 4, 8, 5, 3)
    )
    dtype = half(size)

    class Layer(eqx.Module):
        messages: list
        feed: list
        edges: list
        norms: list

        def __init__(self, inner, key):
            k = jax.random.split(key, 8)
            sizes = [(inner, n), (n, n), (n, n)]
            self.messages = [eqx.nn.Linear(i, o, key=k[j]) for j, (i, o) in enumerate(sizes)]
            self.feed = [eqx.nn.Linear(n, 4 * n, key=k[3]), eqx.nn.Linear(4 * n, n, key=k[4])]
            self.edges = [eqx.nn.Linear(3 * n, n, key=k[5]), eqx.nn.Linear(n, n, key=k[6])]
            self.norms = [eqx.nn.LayerNorm(n) for _ in range(3)]

    def chained(layers, x):
        for layer in layers[:-1]:
            x = jax.nn.gelu(x @ layer.weight.T + layer.bias)
        return x @ layers[-1].weight.T + layers[-1].bias

    def normed(norm, x):
        return jax.vmap(norm)(x.reshape(-1, n)).reshape(x.shape).astype(dtype)

    def told(layer, x, heard, alive):
        told_ = jnp.concatenate([jnp.broadcast_to(x[:, None], (length, near, n)), heard], axis=-1)
        news = jnp.sum(chained(layer.messages, told_) * alive[..., None], axis=1) / 30
        x = normed(layer.norms[0], x + news)
        return normed(layer.norms[1], x + chained(layer.feed, x))

    class Net(eqx.Module):
        pairs: eqx.nn.Linear
        offsets: eqx.nn.Embedding
        letters: eqx.nn.Embedding
        edge_norm: eqx.nn.LayerNorm
        encoder: list
        decoder: list
        out: eqx.nn.Linear

        def __init__(self, key):
            k = jax.random.split(key, 8)
            self.pairs = eqx.nn.Linear(25 * bases + 16, n, key=k[0])
            self.offsets = eqx.nn.Embedding(66, 16, key=k[1])
            self.letters = eqx.nn.Embedding(kinds, n, key=k[2])
            self.edge_norm = eqx.nn.LayerNorm(n)
            self.encoder = [Layer(3 * n, key) for key in k[3:5]]
            self.decoder = [Layer(4 * n, key) for key in k[5:7]]
            self.out = eqx.nn.Linear(n, kinds, key=k[7])

        def __call__(self, atoms, chain, letters, order, known):
            place = jnp.cumsum(1.5 * atoms[:, :1] + 0.5, axis=0) + atoms
            nitrogen, alpha, carbon = place[:, 0], place[:, 1], place[:, 2]
            u, v = alpha - nitrogen, carbon - alpha
            beta = -0.583 * jnp.cross(u, v) + 0.568 * u - 0.541 * v + alpha
            place = jnp.concatenate([place, beta[:, None]], axis=1)
            apart = jnp.sqrt(jnp.sum((alpha[:, None] - alpha[None]) ** 2, axis=-1) + 1e-6)
            apart = jnp.where(known[None] & known[:, None], apart, 1e4)
            _, neighbour = lax.top_k(-apart, near)
            alive = (known[:, None] & known[neighbour]).astype(dtype)
            gaps = place[:, None, :, None] - place[neighbour][:, :, None]
            gaps = jnp.sqrt(jnp.sum(gaps**2, axis=-1) + 1e-6).reshape(length, near, 25, 1)
            shells = jnp.exp(-(((gaps - jnp.linspace(2.0, 22.0, bases)) / 1.25) ** 2)).reshape(length, near, -1)
            steps = jnp.clip(neighbour - jnp.arange(length)[:, None] + 32, 0, 64)
            steps = jnp.where(chain[neighbour] == chain[:, None], steps, 65)
            seen = jnp.concatenate([shells.astype(dtype), self.offsets.weight[steps]], axis=-1)
            e = normed(self.edge_norm, seen @ self.pairs.weight.T + self.pairs.bias)
            x = jnp.zeros((length, n), dtype)
            for layer in self.encoder:
                x = told(layer, x, jnp.concatenate([x[neighbour], e], axis=-1), alive)
                both = jnp.concatenate([jnp.broadcast_to(x[:, None], e.shape), x[neighbour], e], axis=-1)
                e = normed(layer.norms[2], e + chained(layer.edges, both))
            rank = jnp.zeros(length, jnp.int32).at[order].set(jnp.arange(length))
            earlier = (rank[neighbour] < rank[:, None])[..., None]
            encoded, letter = x[neighbour], jnp.where(earlier, self.letters.weight[letters][neighbour], 0)
            for layer in self.decoder:
                state = jnp.where(earlier, x[neighbour], encoded)
                x = told(layer, x, jnp.concatenate([e, letter, state], axis=-1), alive)
            logits = (x @ self.out.weight.T + self.out.bias).astype(jnp.float32)
            log_probs = jax.nn.log_softmax(logits)
            picked = jnp.take_along_axis(log_probs, letters[:, None], axis=1)[:, 0]
            return log_probs, jnp.sum(picked * known) / jnp.maximum(jnp.sum(known), 1)

    weights, whole = equinox_parts(Net, dtype)

    def apply(weights, atoms, chain, letters, scores, known):
        model, order = whole(weights), jnp.argsort(scores, axis=1)
        return jax.vmap(model)(atoms, chain, letters, order, known)

    chain = integers(b, length, below=2, ramp=True)
    inputs = (normal(b, length, 4, 3), chain, integers(b, length, below=kinds), normal(b, length), booleans(b, length))
    return Built(apply, (weights, *inputs))


@program("body-joints-from-exchanging-resolutions-haiku", GROUP)
def _joints(size: Size) -> Built:
    """This gives the joints of persons by three resolutions that exchange maps, averaged with the mirrored image.

    The peak of each heat map is refined by a second-order expansion of its logarithm.
    """
    import haiku as hk

    b, high, wide, stem, widths, joints = pick(
        size, (12, 256, 192, 64, (32, 64, 128), 17), (1, 96, 64, 32, (16, 32, 64), 17), (1, 32, 32, 4, (4, 6, 8), 5)
    )
    dtype = half(size)

    def conv(x, n, side=3, stride=1, relu=True):
        x = hk.Conv2D(n, side, stride, with_bias=False)(x)
        scale = hk.get_parameter("scale", (n,), x.dtype, jnp.ones)
        shift = hk.get_parameter("offset_shift", (n,), x.dtype, jnp.zeros)
        x = x * scale + shift
        return jax.nn.relu(x) if relu else x

    class Unit(hk.Module):
        def __init__(self, n, side=3, stride=1, relu=True):
            super().__init__("unit")
            self.settings = (n, side, stride, relu)

        def __call__(self, x):
            return conv(x, *self.settings)

    def exchange(maps):
        fused = []
        for i, n in enumerate(widths):
            total = 0
            for j, seen in enumerate(maps):
                y = seen
                if j > i:
                    y = Unit(n, 1, relu=False)(y)
                    y = jax.image.resize(y, (*maps[i].shape[:3], n), "nearest")
                elif j < i:
                    for step in range(i - j):
                        last = step == i - j - 1
                        y = Unit(n if last else y.shape[-1], 3, 2, relu=not last)(y)
                total = total + y
            fused.append(jax.nn.relu(total))
        return fused

    def heat(images):
        x = Unit(stem, 3, 2)(Unit(stem, 3, 2)(images.astype(dtype)))
        maps = [Unit(widths[0])(x)]
        for n in widths[1:]:
            maps.append(Unit(n, 3, 2)(maps[-1]))
        for _ in range(2):
            for i, n in enumerate(widths):
                for _ in range(2):
                    maps[i] = jax.nn.relu(maps[i] + Unit(n, relu=False)(Unit(n)(maps[i])))
            maps = exchange(maps)
        return hk.Conv2D(joints, 1)(maps[0]).astype(jnp.float32)

    def refined(row):
        h, w = row.shape
        smooth = lax.conv_general_dilated(row[None, None], np.ones((1, 1, 3, 3), np.float32) / 9, (1, 1), "SAME")[0, 0]
        top = jnp.argmax(row)
        y, x = jnp.clip(top // w, 2, h - 3), jnp.clip(top % w, 2, w - 3)
        p = jnp.log(jnp.maximum(lax.dynamic_slice(smooth, (y - 2, x - 2), (5, 5)), 1e-10))
        dx, dy = 0.5 * (p[2, 3] - p[2, 1]), 0.5 * (p[3, 2] - p[1, 2])
        dxx, dyy = 0.25 * (p[2, 4] - 2 * p[2, 2] + p[2, 0]), 0.25 * (p[4, 2] - 2 * p[2, 2] + p[0, 2])
        dxy = 0.25 * (p[3, 3] - p[1, 3] - p[3, 1] + p[1, 1])
        det = dxx * dyy - dxy**2
        safe = jnp.where(jnp.abs(det) > 1e-4, det, 1.0)
        step = jnp.stack([dxy * dy - dyy * dx, dxy * dx - dxx * dy]) / safe
        step = jnp.where(jnp.abs(det) > 1e-4, jnp.clip(step, -1, 1), 0.0)
        return jnp.stack([x, y]) + step, row.reshape(-1)[top]

    def net(images):
        images = (images.astype(jnp.float32) / 255 - 0.45) / 0.225
        both = heat(jnp.concatenate([images, images[:, :, ::-1]]))
        swap = np.array([0, *((i + 1) if i % 2 else (i - 1) for i in range(1, joints))])
        maps = jax.nn.sigmoid(0.5 * (both[:b] + both[b:, :, ::-1][..., swap]))
        places, sure = jax.vmap(jax.vmap(refined))(jnp.moveaxis(maps, -1, 1))
        return places * 4.0, sure, jnp.mean(sure, axis=1)

    model = hk.without_apply_rng(hk.transform(net))
    images = integers(b, high, wide, 3, below=256)
    structs = jax.eval_shape(model.init, jax.random.key(0), images.struct)
    return Built(model.apply, (module_weights(structs, dtype), images))


@program("robot-words-modulate-frames-eight-learned-tokens-linen", GROUP)
def _robot(size: Size) -> Built:
    """This gives the next action of a robot, as one of 256 steps for each joint, from six frames and an instruction.

    The instruction scales and shifts the convolved maps; eight maps of attention make eight tokens of a frame.
    """
    import flax.linen as nn

    b, side, widths, told, n, h, joints = pick(
        size,
        (8, 150, (48, 96, 192), 512, 512, 8, 11),
        (1, 75, (16, 32, 64), 256, 128, 4, 11),
        (1, 17, (4, 6, 8), 6, 8, 2, 3),
    )
    frames, tokens, bins, dtype = 6, 8, 256, half(size)

    class Stage(nn.Module):
        n: int

        @nn.compact
        def __call__(self, x, words):
            x = nn.Conv(self.n, (3, 3), (2, 2), use_bias=False, dtype=dtype)(x)
            x = nn.swish(nn.GroupNorm(None, group_size=self.n // 2, dtype=dtype)(x))
            y = nn.Conv(self.n, (3, 3), feature_group_count=self.n, use_bias=False, dtype=dtype)(
                nn.LayerNorm(dtype=dtype)(x)
            )
            squeezed = nn.Dense(self.n, dtype=dtype)(
                nn.swish(nn.Dense(self.n // 2, dtype=dtype)(jnp.mean(y, axis=(1, 2))))
            )
            y = nn.Conv(self.n, (1, 1), dtype=dtype)(nn.swish(y) * nn.sigmoid(squeezed)[:, None, None])
            scale, shift = (nn.Dense(self.n, dtype=dtype, kernel_init=nn.initializers.zeros)(words) for _ in range(2))
            return x + y * (1 + scale[:, None, None]) + shift[:, None, None]

    class Policy(nn.Module):
        @nn.compact
        def __call__(self, images, instruction, past):
            x = (images.astype(jnp.float32) / 127.5 - 1).astype(dtype).reshape(b * frames, side, side, 3)
            words = jnp.repeat(instruction.astype(dtype), frames, axis=0)
            for width in widths:
                x = Stage(width)(x, words)
            y = nn.LayerNorm(dtype=dtype)(x.reshape(b * frames, -1, widths[-1]))
            maps = nn.Dense(tokens, dtype=dtype)(nn.gelu(nn.Dense(64, dtype=dtype)(y))).astype(jnp.float32)
            maps = nn.softmax(maps, axis=1).astype(dtype)
            x = jnp.einsum("bpk,bpc->bkc", maps, x.reshape(b * frames, -1, widths[-1]))
            x = nn.Dense(n, dtype=dtype)(x).reshape(b, frames * tokens, n)
            x = x + self.param("place", nn.initializers.normal(0.02), (frames * tokens, n)).astype(dtype)
            times = np.repeat(np.arange(frames), tokens)
            mask = jnp.asarray(times[:, None] >= times[None])[None] & jnp.repeat(past >= 0, tokens, axis=1)[:, None, :]
            mask = mask | jnp.eye(frames * tokens, dtype=bool)
            for _ in range(3):
                y = nn.LayerNorm(dtype=dtype)(x)
                x = x + nn.MultiHeadDotProductAttention(h, dtype=dtype)(y, mask=mask[:, None])
                y = nn.LayerNorm(dtype=dtype)(x)
                x = x + nn.Dense(n, dtype=dtype)(nn.relu(nn.Dense(n, dtype=dtype)(y)))
            x = nn.LayerNorm(dtype=dtype)(x)[:, -tokens:].reshape(b, -1)
            logits = nn.Dense(joints * bins, dtype=dtype)(x).astype(jnp.float32).reshape(b, joints, bins)
            action = (jnp.argmax(logits, axis=-1) + 0.5) / bins * 2 - 1
            probs = nn.softmax(logits)
            return action, -jnp.sum(probs * jnp.log(probs + 1e-9), axis=-1), maps

    past = Random((b, frames), jnp.dtype(jnp.float32), 0.5, 0.6)
    return linen_program(size, Policy(), integers(b, frames, side, side, 3, below=256), normal(b, told), past)


@program("lidar-pillars-scattered-to-birds-eye-boxes-linen", GROUP)
def _pillars(size: Size) -> Built:
    """This gives the likeliest boxes of a street from laser points that are pooled in upright pillars of a grid."""
    import flax.linen as nn

    b, points, high, wide, n, widths, top = pick(
        size,
        (2, 60000, 248, 216, 64, (64, 128, 256), 500),
        (1, 9000, 60, 52, 32, (16, 32, 64), 100),
        (1, 60, 8, 8, 4, (4, 6, 8), 5),
    )
    anchors, dtype = 2, half(size)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, cloud):
            shift = jnp.array([0.5 * wide, 0.5 * high, -1.0]) * jnp.array([0.32, 0.32, 1.0])
            xyz = cloud[..., :3] * jnp.array([0.07 * wide, 0.07 * high, 0.7]) + shift
            column, row = (jnp.floor(xyz[..., i] / 0.32).astype(jnp.int32) for i in range(2))
            inside = (column >= 0) & (column < wide) & (row >= 0) & (row < high) & (jnp.abs(xyz[..., 2] + 1) < 2)
            ids = jnp.where(inside, row * wide + column, high * wide)
            ids = (ids + jnp.arange(b)[:, None] * (high * wide + 1)).reshape(-1)
            bins = b * (high * wide + 1)
            flat = xyz.reshape(-1, 3)
            count = jax.ops.segment_sum(jnp.ones(b * points), ids, bins)
            mean = jax.ops.segment_sum(flat, ids, bins) / jnp.maximum(count, 1.0)[:, None]
            centre = (jnp.stack([column, row], axis=-1) + 0.5).reshape(-1, 2) * 0.32
            seen = [flat, cloud[..., 3:].reshape(-1, 1), flat - mean[ids], flat[:, :2] - centre]
            y = nn.Dense(n, use_bias=False, dtype=dtype)(jnp.concatenate(seen, axis=-1).astype(dtype))
            y = nn.relu(nn.LayerNorm(dtype=dtype)(y))
            grid = jax.ops.segment_max(y, ids, bins).reshape(b, high * wide + 1, n)[:, :-1]
            filled = count.reshape(b, -1)[:, :-1] > 0
            x = jnp.where(filled[..., None], grid, 0).reshape(b, high, wide, n)
            maps, shape = [], (b, high // 2, wide // 2)
            for i, width in enumerate(widths):
                for j in range(3):
                    x = nn.Conv(width, (3, 3), (2, 2) if j == 0 else (1, 1), use_bias=False, dtype=dtype)(x)
                    x = nn.relu(x * self.param(f"scale{i}{j}", nn.initializers.ones, (width,)).astype(dtype))
                y = nn.ConvTranspose(widths[1], (2**i, 2**i), (2**i, 2**i), padding="VALID", dtype=dtype)(x)
                maps.append(nn.relu(y[:, : shape[1], : shape[2]]))
            x = jnp.concatenate(maps, axis=-1)
            scores = nn.Conv(anchors * 3, (1, 1), dtype=jnp.float32)(x).reshape(b, -1, 3)
            boxes = nn.Conv(anchors * 7, (1, 1), dtype=jnp.float32)(x).reshape(b, -1, 7)
            ways = nn.Conv(anchors * 2, (1, 1), dtype=jnp.float32)(x).reshape(b, -1, 2)
            best, place = lax.top_k(jnp.max(nn.sigmoid(scores), axis=-1), top)
            boxes, ways, scores = (jnp.take_along_axis(m, place[..., None], axis=1) for m in (boxes, ways, scores))
            cell, turned = place // anchors, (place % anchors).astype(jnp.float32) * (np.pi / 2)
            corner = jnp.stack([cell % shape[2], cell // shape[2]], axis=-1) * 0.64
            sizes = jnp.array([1.6, 3.9, 1.56]) * jnp.exp(jnp.clip(boxes[..., 3:6], -2, 2))
            turn = turned + boxes[..., 6]
            turn = turn - jnp.floor(turn / np.pi) * np.pi + np.pi * jnp.argmax(ways, axis=-1)
            places = jnp.concatenate([corner + boxes[..., :2] * 4.2, boxes[..., 2:3] * 1.56 - 1], axis=-1)
            return places, sizes, turn, best, jnp.argmax(scores, axis=-1)

    return linen_program(size, Net(), normal(b, points, 4))
