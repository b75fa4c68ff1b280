"""Models of pictures, speech, molecules, points, cameras and clicks, the nineteenth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import linen_program, module_weights
from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program, weight
from benchmarks.workloads.sixteenth_models import equinox_parts, nnx_program

GROUP = "nineteenth"


@program("four-ways-through-a-picture-selective-scans-linen", GROUP)
def _vmamba(size: Size) -> Built:
    """This gives classes of pictures by selective scans of the patches in four orders, as VMamba (Liu, 2024)."""
    import flax.linen as nn

    b, side, patch, n, states, classes = pick(
        size, (4, 224, 16, 192, 8, 1000), (1, 112, 8, 96, 4, 1000), (2, 8, 2, 8, 2, 5)
    )
    dtype, wide = half(size), side // patch

    def scanned(x, delta, a, read, write):
        decay = jnp.exp(delta[..., None] * a)
        push = (delta * x)[..., None] * write[:, :, None]

        def join(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        _, h = lax.associative_scan(join, (decay, push), axis=1)
        return jnp.einsum("btds,bts->btd", h, read)

    class Scan(nn.Module):
        @nn.compact
        def __call__(self, x):
            d, rank = x.shape[-1], max(n // 16, 1)
            rows = x.reshape(b, -1, d)
            columns = jnp.swapaxes(x, 1, 2).reshape(b, -1, d)
            out = []
            for way, z in enumerate((rows, columns, rows[:, ::-1], columns[:, ::-1])):
                made = nn.Dense(rank + 2 * states, use_bias=False, dtype=dtype)(z)
                delta, read, write = jnp.split(made, [rank, rank + states], axis=-1)
                delta = nn.softplus(nn.Dense(d, dtype=dtype)(delta).astype(jnp.float32) - 3)
                a = -jnp.exp(self.param(f"a{way}", nn.initializers.zeros, (d, states)).astype(jnp.float32))
                y = scanned(z.astype(jnp.float32), delta, a, read.astype(jnp.float32), write.astype(jnp.float32))
                skip = self.param(f"skip{way}", nn.initializers.ones, (d,)).astype(jnp.float32)
                y = y + skip * z.astype(jnp.float32)
                y = y[:, ::-1] if way >= 2 else y
                y = y.reshape(b, wide, wide, d)
                out.append(jnp.swapaxes(y, 1, 2) if way % 2 else y)
            return nn.LayerNorm(dtype=dtype)(sum(out))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, pictures):
            x = pictures.astype(dtype) / 127.5 - 1
            x = nn.LayerNorm(dtype=dtype)(nn.Conv(n, (patch, patch), (patch, patch), dtype=dtype)(x))
            for _ in range(2):
                y = nn.Dense(4 * n, use_bias=False, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
                y, gate = jnp.split(y, 2, axis=-1)
                y = nn.silu(nn.Conv(2 * n, (3, 3), feature_group_count=2 * n, dtype=dtype)(y))
                x = x + nn.Dense(n, use_bias=False, dtype=dtype)(Scan()(y) * nn.silu(gate))
            x = jnp.mean(nn.LayerNorm(dtype=dtype)(x).astype(jnp.float32), axis=(1, 2))
            return nn.log_softmax(nn.Dense(classes)(x))

    return linen_program(size, Net(), integers(b, side, side, 3, below=256))


@program("voice-from-magnitudes-and-turns-by-inverse-fourier-linen", GROUP)
def _vocos(size: Size) -> Built:
    """This gives waves of speech from log-mel frames by convolutions and an inverse Fourier transform, as Vocos (2023).

    The head predicts the logarithm of magnitudes and the phases; frames are windowed, added where they overlap, and
    divided by the sum of squared windows.
    """
    import flax.linen as nn

    b, frames, mels, n, hop = pick(size, (8, 750, 100, 512, 256), (2, 188, 100, 192, 128), (2, 9, 6, 8, 4))
    dtype, wave = half(size), 4 * hop
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(wave) / wave)).astype(np.float32)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, mel, speaker):
            x = nn.Conv(n, (7,), dtype=dtype)(mel.astype(dtype))
            x = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x)
            for i in range(4):
                y = nn.Conv(n, (7,), feature_group_count=n, dtype=dtype)(x)
                scale = nn.Embed(4, n, dtype=dtype)(speaker)[:, None]
                shift = nn.Embed(4, n, dtype=dtype)(speaker)[:, None]
                y = nn.LayerNorm(epsilon=1e-6, use_bias=False, use_scale=False, dtype=dtype)(y) * (1 + scale) + shift
                y = nn.Dense(n, dtype=dtype)(nn.gelu(nn.Dense(3 * n, dtype=dtype)(y), approximate=False))
                x = x + self.param(f"gamma{i}", nn.initializers.constant(0.25), (n,)).astype(dtype) * y
            x = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x)
            made = nn.Dense(wave + 2, dtype=dtype)(x).astype(jnp.float32)
            magnitude, phase = jnp.split(made, 2, axis=-1)
            magnitude = jnp.minimum(jnp.exp(magnitude), 1e2)
            spectrum = magnitude * (jnp.cos(phase) + 1j * jnp.sin(phase))
            pieces = jnp.fft.irfft(spectrum, n=wave, axis=-1) * window
            at = (jnp.arange(frames) * hop)[:, None] + jnp.arange(wave)
            length = (frames - 1) * hop + wave
            total = jnp.zeros((b, length)).at[:, at].add(pieces)
            envelope = jnp.zeros(length).at[at].add(window**2)
            pad = (wave - hop) // 2
            sound = (total / jnp.maximum(envelope, 1e-6))[:, pad:-pad]
            return jnp.clip(sound, -1, 1), jnp.sqrt(jnp.mean(sound**2, axis=-1))

    return linen_program(size, Net(), normal(b, frames, mels), integers(b, below=4))


@program("molecule-tensors-of-three-by-three-energies-and-pulls", GROUP)
def _tensornet(size: Size) -> Built:
    """This gives energies and forces of molecules by layers of matrices for each atom, as TensorNet (Simeon, 2023).

    A matrix is the sum of a scalar, an antisymmetric and a symmetric traceless part, and parts mix by products of
    matrices.
    """
    molecules, atoms, n, bases = pick(size, (24, 21, 64, 32), (2, 13, 32, 16), (2, 4, 3, 4))
    eye = jnp.eye(3)

    def parts(x):
        scalar = jnp.trace(x, axis1=-2, axis2=-1)[..., None, None] / 3 * eye
        turn = 0.5 * (x - jnp.swapaxes(x, -1, -2))
        return scalar, turn, 0.5 * (x + jnp.swapaxes(x, -1, -2)) - scalar

    def mix(z, w):
        return jnp.einsum("acij,cd->adij", z, w)

    def size_of(x):
        return jnp.sum(x**2, axis=(-2, -1))

    def energy(p, places, kinds):
        gap = places[None] - places[:, None]
        far = jnp.sqrt(jnp.sum(gap**2, axis=-1) + 1e-6)
        other = (1 - jnp.eye(atoms)) * (far < 4.5)
        window = 0.5 * (jnp.cos(jnp.pi * jnp.minimum(far, 4.5) / 4.5) + 1) * other
        shells = jnp.exp(-8.0 * (jnp.exp(-far)[..., None] - jnp.linspace(0.0, 1.0, bases)) ** 2)
        unit = gap / far[..., None]
        cross = (
            jnp.zeros((atoms, atoms, 3, 3))
            .at[..., [0, 0, 1], [1, 2, 2]]
            .set(jnp.stack([-unit[..., 2], unit[..., 1], -unit[..., 0]], axis=-1))
        )
        cross = cross - jnp.swapaxes(cross, -1, -2)
        outer = unit[..., :, None] * unit[..., None, :] - eye / 3
        e = p["kinds"][kinds]
        pair = jnp.concatenate(
            [jnp.broadcast_to(e[:, None], (atoms, atoms, n)), jnp.broadcast_to(e, (atoms, atoms, n))], -1
        )
        pair = (pair @ p["pair"]) * window[..., None]
        f = jnp.einsum("abk,kcr->abcr", shells, p["first"]) * pair[..., None]
        x = jnp.einsum("abc,ij->acij", f[..., 0], eye)
        x = x + jnp.einsum("abc,abij->acij", f[..., 1], cross) + jnp.einsum("abc,abij->acij", f[..., 2], outer)
        for layer in p["layers"]:
            x = x / (size_of(x)[..., None, None] + 1)
            radial = jax.nn.silu(jax.nn.silu(shells @ layer["r1"]) @ layer["r2"]).reshape(atoms, atoms, n, 3)
            radial = radial * window[..., None, None]
            i, a, s = (mix(z, w) for z, w in zip(parts(x), layer["before"], strict=True))
            y = i + a + s
            m = sum(jnp.einsum("abc,bcij->acij", radial[..., r], z) for r, z in enumerate((i, a, s)))
            both = jnp.matmul(y, m) + jnp.matmul(m, y)
            i, a, s = parts(both / (size_of(both)[..., None, None] + 1))
            change = sum(mix(z, w) for z, w in zip((i, a, s), layer["after"], strict=True))
            x = x + change + jnp.sum(change[..., None] * change[..., None, :, :], axis=-2)
        seen = jnp.concatenate([size_of(z) for z in parts(x)], axis=-1)
        seen = (seen - seen.mean(-1, keepdims=True)) / jnp.sqrt(seen.var(-1, keepdims=True) + 1e-5)
        return jnp.sum(jax.nn.silu(seen @ p["out"] + p["out_bias"]) @ p["last"])

    def pulled(p, places, kinds):
        value, slope = jax.vmap(jax.value_and_grad(energy, argnums=1), in_axes=(None, 0, 0))(p, places, kinds)
        return value, -slope

    layer = {"r1": weight(bases, n), "r2": weight(n, 3 * n), "before": weight(3, n, n), "after": weight(3, n, n)}
    p = {"kinds": normal(10, n), "pair": weight(2 * n, n), "first": normal(bases, n, 3, scale=bases**-0.5)}
    p |= {
        "layers": [dict(layer), dict(layer)],
        "out": weight(3 * n, n),
        "out_bias": normal(n, scale=0.1),
        "last": weight(n, 1),
    }
    return Built(pulled, (p, normal(molecules, atoms, 3, scale=2.0), integers(molecules, atoms, below=10)))


@program("points-sorted-along-two-curves-patch-attention-equinox", GROUP)
def _serialised(size: Size) -> Built:
    """This gives labels of points by attention in runs of points that are sorted along space-filling curves.

    As in Point Transformer V3 (2024), a layer sorts by the interleaved bits of a cell, the next by those of the
    turned cell, and the points are pooled into coarse cells in between.
    """
    import equinox as eqx

    count, run, n, h, labels = pick(size, (20480, 128, 192, 6, 20), (2560, 64, 48, 3, 20), (24, 4, 8, 2, 3))
    dtype, bits = half(size), 6

    def curve(cell, order):
        code = jnp.zeros(cell.shape[:-1], jnp.int32)
        for i in range(bits):
            for axis, which in enumerate(order):
                code = code | (((cell[..., which] >> i) & 1) << (3 * i + axis))
        return code

    class Block(eqx.Module):
        norm: eqx.nn.LayerNorm
        norm2: eqx.nn.LayerNorm
        places: eqx.nn.Linear
        qkv: eqx.nn.Linear
        out: eqx.nn.Linear
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key):
            k = jax.random.split(key, 5)
            self.norm, self.norm2 = eqx.nn.LayerNorm(n), eqx.nn.LayerNorm(n)
            self.places, self.qkv = eqx.nn.Linear(3, n, key=k[0]), eqx.nn.Linear(n, 3 * n, key=k[1])
            self.out, self.up = eqx.nn.Linear(n, n, key=k[2]), eqx.nn.Linear(n, 4 * n, key=k[3])
            self.down = eqx.nn.Linear(4 * n, n, key=k[4])

        def __call__(self, x, at, code):
            x = x + jax.vmap(self.places)(at)
            order = jnp.argsort(code)
            y = jax.vmap(self.norm)(x).astype(dtype)[order]
            q, k, v = jnp.moveaxis(jax.vmap(self.qkv)(y).reshape(-1, run, 3, h, n // h), 2, 0)
            scores = jnp.einsum("pqhd,pkhd->phqk", q, k).astype(jnp.float32) * (n // h) ** -0.5
            y = jnp.einsum("phqk,pkhd->pqhd", jax.nn.softmax(scores).astype(dtype), v).reshape(-1, n)
            x = x + jax.vmap(self.out)(y)[jnp.argsort(order)]
            return x + jax.vmap(lambda z: self.down(jax.nn.gelu(self.up(z))))(jax.vmap(self.norm2)(x).astype(dtype))

    class Net(eqx.Module):
        enter: eqx.nn.Linear
        blocks: list
        head: eqx.nn.Linear

        def __init__(self, key):
            k = jax.random.split(key, 5)
            self.enter, self.head = eqx.nn.Linear(6, n, key=k[0]), eqx.nn.Linear(2 * n, labels, key=k[1])
            self.blocks = [Block(key) for key in k[2:]]

        def __call__(self, places, colours):
            low, high = jnp.min(places, axis=0), jnp.max(places, axis=0)
            unit = (places - low) / (high - low)
            cell = jnp.clip((unit * 2**bits).astype(jnp.int32), 0, 2**bits - 1)
            x = jax.vmap(self.enter)(jnp.concatenate([unit, colours], axis=-1).astype(dtype))
            at = (unit * 2 - 1).astype(dtype)
            x = self.blocks[0](x, at, curve(cell, (0, 1, 2)))
            x = self.blocks[1](x, at, curve(cell, (2, 1, 0)))
            coarse = curve(cell >> 3, (0, 1, 2))
            pooled = jax.ops.segment_max(x, coarse, num_segments=512)
            pooled = jnp.where(jnp.isfinite(pooled), pooled, 0)
            x = self.blocks[2](x + pooled[coarse], at, curve(cell, (1, 2, 0)))
            logits = jax.vmap(self.head)(jnp.concatenate([x, pooled[coarse]], axis=-1)).astype(jnp.float32)
            return jax.nn.log_softmax(logits), jnp.argmax(logits, axis=-1)

    leaves, whole = equinox_parts(Net, dtype)
    return Built(lambda leaves, *xs: whole(leaves)(*xs), (leaves, normal(count, 3), normal(count, 3)))


@program("cameras-lifted-by-depths-and-splatted-on-a-ground-grid", GROUP)
def _lift_splat(size: Size) -> Built:
    """This gives a map of the ground around a car from six cameras, as Lift, Splat, Shoot (Philion and Fidler, 2020).

    Each pixel has a law of depths and a feature; their outer products are sorted by cell and added up by a running
    sum.
    """
    cameras, high, wide, depths, n, grid = pick(
        size, (6, 16, 44, 59, 64, 128), (3, 8, 22, 24, 32, 64), (2, 3, 4, 5, 4, 8)
    )
    dtype, inputs = half(size), pick(size, 256, 96, 6)
    points = cameras * high * wide * depths

    def conv(x, w, step=1):
        return lax.conv_general_dilated(x, w, (step, step), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def seen(p, maps, lenses, turns, shifts):
        z = conv(jax.nn.relu(conv(maps, p["neck"])), p["lift"]) + p["lift_bias"]
        chance = jax.nn.softmax(z[..., :depths].astype(jnp.float32), axis=-1)
        feature = z[..., depths:].astype(jnp.float32)
        lifted = chance[..., None] * feature[..., None, :]
        v, u, d = jnp.meshgrid(
            jnp.arange(high) / high, jnp.arange(wide) / wide, jnp.arange(depths) + 4.0, indexing="ij"
        )
        rays = jnp.stack([(u - 0.5) * d, (v - 0.5) * d, d], axis=-1)
        lens = jnp.eye(3) + 0.05 * lenses
        turn, _ = jnp.linalg.qr(turns)
        places = jnp.einsum("cij,hwdj->chwdi", turn @ jnp.linalg.inv(lens), rays) + shifts[:, None, None, None]
        cell = jnp.floor((places[..., :2] / 60.0 + 0.5) * grid).astype(jnp.int32)
        inside = jnp.all((cell >= 0) & (cell < grid), axis=-1) & (jnp.abs(places[..., 2]) < 20.0)
        index = jnp.where(inside, cell[..., 0] * grid + cell[..., 1], grid * grid).reshape(-1)
        order = jnp.argsort(index)
        index, values = index[order], lifted.reshape(points, n)[order]
        sums = jnp.cumsum(values, axis=0)
        ends = jnp.searchsorted(index, jnp.arange(grid * grid), side="right")
        padded = jnp.concatenate([jnp.zeros((1, n)), sums])
        total = padded[ends]
        ground = jnp.diff(total, axis=0, prepend=jnp.zeros((1, n))).reshape(1, grid, grid, n).astype(dtype)
        x = jax.nn.relu(conv(ground, p["first"]))
        for w1, w2 in p["rest"]:
            x = jax.nn.relu(x + conv(jax.nn.relu(conv(x, w1)), w2))
        return jax.nn.sigmoid(conv(x, p["last"]).astype(jnp.float32)), jnp.sum(inside), jnp.argmax(chance, axis=-1)

    def kernel(side, i, o):
        return normal(side, side, i, o, dtype=dtype, scale=(side * side * i) ** -0.5)

    p = {"neck": kernel(3, inputs, inputs), "lift": kernel(1, inputs, depths + n), "last": kernel(1, n, 4)}
    p |= {"lift_bias": normal(depths + n, dtype=dtype, scale=0.1), "first": kernel(3, n, n)}
    p |= {"rest": [(kernel(3, n, n), kernel(3, n, n)) for _ in range(2)]}
    maps = normal(cameras, high, wide, inputs, dtype=dtype)
    return Built(seen, (p, maps, normal(cameras, 3, 3), normal(cameras, 3, 3), normal(cameras, 3)))


@program("whole-series-as-tokens-forecast-nnx", GROUP)
def _inverted(size: Size) -> Built:
    """This gives forecasts by attention among series, each of which is one token as a whole, as iTransformer (2024)."""
    from flax import nnx

    b, past, ahead, series, n, h = pick(size, (16, 96, 192, 321, 512, 8), (4, 96, 96, 137, 128, 4), (2, 9, 4, 5, 8, 2))
    dtype = half(size)
    kinds = {"dtype": dtype, "param_dtype": dtype}

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.qkv, self.out = nnx.Linear(n, 3 * n, rngs=rngs, **kinds), nnx.Linear(n, n, rngs=rngs, **kinds)
            self.up, self.down = nnx.Linear(n, 2 * n, rngs=rngs, **kinds), nnx.Linear(2 * n, n, rngs=rngs, **kinds)
            self.norm, self.norm2 = (nnx.LayerNorm(n, rngs=rngs, **kinds) for _ in range(2))

        def __call__(self, x):
            q, k, v = (z.reshape(*x.shape[:2], h, n // h) for z in jnp.split(self.qkv(x), 3, axis=-1))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(n // h).astype(dtype)
            probs = nnx.softmax(scores.astype(jnp.float32), axis=-1)
            y = jnp.einsum("bhqk,bkhd->bqhd", probs.astype(dtype), v).reshape(x.shape)
            x = self.norm(x + self.out(y))
            return self.norm2(x + self.down(nnx.gelu(self.up(x)))), jnp.mean(probs, axis=(0, 1))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.enter, self.leave = nnx.Linear(past, n, rngs=rngs, **kinds), nnx.Linear(n, ahead, rngs=rngs, **kinds)
            self.layers = nnx.List([Layer(rngs) for _ in range(3)])
            self.norm = nnx.LayerNorm(n, rngs=rngs, **kinds)

        def __call__(self, x, stamps):
            mean = jnp.mean(x, axis=1, keepdims=True)
            spread = jnp.sqrt(jnp.var(x, axis=1, keepdims=True) + 1e-5)
            z = jnp.concatenate([(x - mean) / spread, stamps], axis=-1)
            z = self.enter(jnp.swapaxes(z, 1, 2).astype(dtype))
            maps = []
            for layer in self.layers:
                z, seen = layer(z)
                maps.append(seen)
            z = self.leave(self.norm(z))[:, :series].astype(jnp.float32)
            return jnp.swapaxes(z, 1, 2) * spread + mean, jnp.stack(maps)

    return nnx_program(size, Net, normal(b, past, series, scale=2.0, offset=1.0), normal(b, past, 4, scale=0.3))


@program("shared-and-own-experts-in-levels-for-many-aims-haiku", GROUP)
def _layered_experts(size: Size) -> Built:
    """This gives chances of a click, a purchase, a share and a like by levels of shared and own experts.

    It is progressive layered extraction (Tang et al. 2020) over bags of embedded ids and the history of a user.
    """
    import haiku as hk

    b, fields, ids, history, e, n = pick(
        size, (4096, 26, 100000, 50, 32, 256), (512, 26, 10000, 50, 16, 64), (3, 4, 12, 5, 4, 8)
    )
    dtype, tasks, own, common = half(size), 4, 2, 2

    def expert(x):
        return jax.nn.relu(hk.Linear(n)(jax.nn.relu(hk.Linear(n)(x))))

    def net(ids_seen, past, dense):
        table = hk.get_parameter("table", (ids, e), dtype, init=hk.initializers.RandomNormal())
        alone = table[ids_seen]
        known = past > 0
        bags = jnp.where(known[..., None], table[past], 0)
        target = hk.Linear(e)(alone[:, 0])
        weights = jnp.where(known, jnp.einsum("bte,be->bt", bags, target).astype(jnp.float32) / np.sqrt(e), -1e9)
        bag = jnp.einsum("bt,bte->be", jax.nn.softmax(weights).astype(dtype), bags)
        mean = jnp.sum(bags, axis=1) / jnp.maximum(jnp.sum(known, axis=1, keepdims=True), 1).astype(dtype)
        logged = jnp.log1p(jnp.abs(dense)).astype(dtype)
        x = jnp.concatenate([alone.reshape(b, -1), bag, mean, logged], axis=-1)
        inputs = [x] * (tasks + 1)
        for level in range(2):
            shared = [expert(inputs[-1]) for _ in range(common)]
            mine = [[expert(inputs[i]) for _ in range(own)] for i in range(tasks)]
            outputs = []
            for i in range(tasks):
                gate = jax.nn.softmax(hk.Linear(own + common)(inputs[i]))
                outputs.append(jnp.einsum("bk,bkn->bn", gate, jnp.stack(mine[i] + shared, axis=1)))
            if level == 0:
                everything = jnp.stack([z for group in mine for z in group] + shared, axis=1)
                gate = jax.nn.softmax(hk.Linear(everything.shape[1])(inputs[-1]))
                outputs.append(jnp.einsum("bk,bkn->bn", gate, everything))
            inputs = outputs
        logits = [hk.Linear(1)(jax.nn.relu(hk.Linear(n // 4)(z)))[:, 0] for z in inputs]
        chance = jax.nn.sigmoid(jnp.stack(logits, axis=-1).astype(jnp.float32))
        both = chance.at[:, 1].multiply(chance[:, 0])
        return both, jnp.argsort(-jnp.prod(both ** jnp.array([1.0, 2.0, 0.5, 0.5]), axis=-1))

    model = hk.without_apply_rng(hk.transform(net))
    inputs = (integers(b, fields, below=ids), integers(b, history, below=ids), normal(b, 13, scale=10.0))
    structs = jax.eval_shape(model.init, jax.random.key(0), *(r.struct for r in inputs))
    return Built(model.apply, (module_weights(structs, dtype), *inputs))
