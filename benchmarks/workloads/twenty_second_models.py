"""Whole models of pictures, sounds, proteins and robots, the twenty-second set: its author saw no plan."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import linen_program
from benchmarks.workloads.registry import Built, Size, gain, half, integers, normal, pick, program, weight
from benchmarks.workloads.sixteenth_models import nnx_program

GROUP = "twenty-second"


def _layer_norm(x, scale, shift=0.0):
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
    return (y * scale + shift).astype(x.dtype)


def _rms(x, scale):
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6) * scale.astype(jnp.float32)).astype(x.dtype)


def _turned(x, angle):
    """This rotates neighbouring channels of heads by angles; x: [..., time, heads, width], angle: [..., time, 1, width / 2]."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    out = jnp.stack([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], axis=-1)
    return out.reshape(x.shape).astype(x.dtype)


@program("depths-of-one-picture-from-four-taps-fused-upwards-linen", GROUP)
def _depth(size: Size) -> Built:
    """This gives the depth of each pixel from four taps of a vision transformer, fused upwards, as Depth Anything V2 (2024)."""
    import flax.linen as nn

    b, side, patch, n, h, m = pick(size, (8, 266, 14, 384, 6, 64), (1, 126, 14, 192, 3, 32), (2, 8, 2, 8, 2, 4))
    dtype, grid = half(size), side // patch

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            def scaled(name, y):
                return y * self.param(name, nn.initializers.constant(0.1), (n,)).astype(dtype)

            y = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x)
            x = x + scaled("first", nn.MultiHeadDotProductAttention(h, dtype=dtype)(y))
            y = nn.Dense(4 * n, dtype=dtype)(nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x))
            return x + scaled("second", nn.Dense(n, dtype=dtype)(nn.gelu(y, approximate=False)))

    class Unit(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Conv(m, (3, 3), dtype=dtype)(nn.relu(x))
            return x + nn.Conv(m, (3, 3), dtype=dtype)(nn.relu(y))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, pictures):
            mean, std = jnp.array([0.485, 0.456, 0.406]), jnp.array([0.229, 0.224, 0.225])
            x = ((pictures.astype(jnp.float32) / 255 - mean) / std).astype(dtype)
            x = nn.Conv(n, (patch, patch), (patch, patch), dtype=dtype)(x).reshape(b, -1, n)
            cls = self.param("cls", nn.initializers.zeros, (1, 1, n)).astype(dtype)
            x = jnp.concatenate([jnp.broadcast_to(cls, (b, 1, n)), x], axis=1)
            x = x + self.param("places", nn.initializers.normal(0.02), (1, x.shape[1], n)).astype(dtype)
            taps = []
            for i in range(4):
                x = Block()(x)
                y = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x)
                read = jnp.concatenate([y[:, 1:], jnp.broadcast_to(y[:, :1], y[:, 1:].shape)], axis=-1)
                y = nn.gelu(nn.Dense(n, dtype=dtype)(read)).reshape(b, grid, grid, n)
                y = nn.Conv((m, m, 2 * m, 2 * m)[i], (1, 1), dtype=dtype)(y)
                if i < 2:
                    step = (4, 2)[i]
                    y = nn.ConvTranspose(y.shape[-1], (step, step), (step, step), dtype=dtype)(y)
                if i == 3:
                    y = nn.Conv(y.shape[-1], (3, 3), (2, 2), padding=1, dtype=dtype)(y)
                taps.append(nn.Conv(m, (3, 3), use_bias=False, dtype=dtype)(y))
            path = None
            for i in (3, 2, 1, 0):
                y = Unit()(taps[i]) if path is None else path + Unit()(taps[i])
                y = Unit()(y)
                target = taps[i - 1].shape[1] if i else 2 * taps[0].shape[1]
                path = nn.Conv(m, (1, 1), dtype=dtype)(jax.image.resize(y, (b, target, target, m), "bilinear"))
            y = nn.Conv(m // 2, (3, 3), dtype=dtype)(path)
            y = jax.image.resize(y, (b, side, side, m // 2), "bilinear")
            y = nn.relu(nn.Conv(32, (3, 3), dtype=dtype)(y))
            depth = nn.relu(nn.Conv(1, (1, 1), dtype=jnp.float32)(y))[..., 0]
            low, high = jnp.min(depth, axis=(1, 2), keepdims=True), jnp.max(depth, axis=(1, 2), keepdims=True)
            return depth, (depth - low) / (high - low + 1e-3)

    return linen_program(size, Net(), integers(b, side, side, 3, below=256))


@program("frames-alone-then-all-together-cameras-and-point-maps", GROUP)
def _geometry(size: Size) -> Built:
    """This gives cameras and maps of points of a few views by attention within and then across frames, as VGGT (Wang, 2025)."""
    s, rows, columns, patch, n, h = pick(size, (6, 18, 21, 14, 512, 8), (3, 9, 12, 14, 192, 3), (2, 2, 3, 2, 16, 2))
    dtype, d, extra = half(size), n // h, 5
    t = rows * columns + extra

    def angles():
        y, x = np.indices((rows, columns)).reshape(2, -1) + 1
        y, x = (np.concatenate([np.zeros(extra), z])[:, None] for z in (y, x))
        rates = 100.0 ** (-np.arange(d // 4) / (d // 4))
        return np.concatenate([y * rates, x * rates], axis=-1)[:, None].astype(np.float32)

    turns = angles()

    def attend(p, x, turn):
        g, length, _ = x.shape
        y = _layer_norm(x, p["norm"], p["shift"])
        q, k, v = jnp.moveaxis((y @ p["qkv"]).reshape(g, length, 3, h, d), 2, 0)
        q, k = _turned(_layer_norm(q, p["q"]), turn), _turned(_layer_norm(k, p["k"]), turn)
        y = jax.nn.dot_product_attention(q, k, v).reshape(g, length, n)
        x = x + (y @ p["out"]) * p["layer1"]
        y = jax.nn.gelu(_layer_norm(x, p["norm2"], p["shift"]) @ p["up"], approximate=False)
        return x + (y @ p["down"]) * p["layer2"]

    def model(p, views):
        x = views.reshape(s, rows, patch, columns, patch, 3).transpose(0, 1, 3, 2, 4, 5).reshape(s, rows * columns, -1)
        x = x.astype(dtype) @ p["patch"]
        own = jnp.where((jnp.arange(s) == 0)[:, None, None], p["special"][0], p["special"][1])
        x = jnp.concatenate([own, x], axis=1)

        def pair(x, q):
            inside = attend(q[0], x, turns)
            across = attend(q[1], inside.reshape(1, s * t, n), jnp.tile(turns, (s, 1, 1))).reshape(s, t, n)
            return across, jnp.concatenate([inside, across], axis=-1)

        _, seen = lax.scan(pair, x, p["pairs"])
        last = seen[-1]
        camera = _layer_norm(last[:, 0], p["camera_norm"])
        pose = jnp.zeros((s, 9))
        for _ in range(4):
            shift, scale, gate = jnp.split(jax.nn.silu(pose.astype(dtype) @ p["embed"]) @ p["mods"], 3, axis=-1)
            y = camera + gate * (_layer_norm(camera, 1.0) * (1 + scale) + shift)
            pose = pose + (jax.nn.gelu(y @ p["pose1"]) @ p["pose2"]).astype(jnp.float32)
        tokens = jnp.mean(seen[:, :, extra:].astype(jnp.float32), axis=0).astype(dtype) @ p["point1"]
        maps = (jax.nn.gelu(tokens) @ p["point2"]).astype(jnp.float32)
        maps = maps.reshape(s, rows, columns, patch, patch, 4).transpose(0, 1, 3, 2, 4, 5)
        maps = maps.reshape(s, rows * patch, columns * patch, 4)
        points = jnp.sign(maps[..., :3]) * jnp.expm1(jnp.abs(maps[..., :3]))
        return pose, points, 1 + jnp.exp(maps[..., 3])

    def stacked(*shape, scale=None):
        return normal(2, *shape, dtype=dtype, scale=scale or shape[0] ** -0.5)

    def block():
        q = {"qkv": stacked(n, 3 * n), "out": stacked(n, n), "up": stacked(n, 4 * n), "down": stacked(4 * n, n)}
        ones = {k: normal(2, w, dtype=dtype, scale=0.1, offset=1.0) for k, w in zip("qk", (d, d), strict=True)}
        ones |= {k: normal(2, n, dtype=dtype, scale=0.1, offset=1.0) for k in ("norm", "norm2")}
        return q | ones | {k: stacked(n, scale=0.1) for k in ("layer1", "layer2", "shift")}

    p = {"patch": weight(patch * patch * 3, n, dtype=dtype), "special": normal(2, extra, n, dtype=dtype)}
    p |= {"pairs": (block(), block()), "camera_norm": gain(2 * n, dtype), "embed": weight(9, n, dtype=dtype)}
    p |= {"mods": normal(n, 6 * n, dtype=dtype, scale=0.3 * n**-0.5), "pose1": weight(2 * n, n, dtype=dtype)}
    p |= {"pose2": weight(n, 9, dtype=dtype), "point1": weight(2 * n, n, dtype=dtype)}
    p |= {"point2": weight(n, 4 * patch * patch, dtype=dtype)}
    return Built(model, (p, normal(s, rows * patch, columns * patch, 3)))


@program("sounds-cut-in-bands-attention-over-time-then-over-bands", GROUP)
def _bands(size: Size) -> Built:
    """This takes a voice out of stereo music by masks of a spectrum cut in unequal bands, as BS-RoFormer (Lu et al., 2023)."""
    b, samples, window, hop, n, h, widths = pick(
        size,
        (2, 88200, 1024, 441, 192, 6, (4,) * 12 + (12,) * 6 + (24,) * 6 + (249,)),
        (1, 22050, 512, 256, 96, 3, (4,) * 8 + (12,) * 6 + (24,) * 4 + (57,)),
        (2, 64, 16, 8, 8, 2, (2, 3, 4)),
    )
    dtype, d, bins = half(size), n // h, window // 2 + 1
    assert sum(widths) == bins
    starts = np.cumsum((0, *widths))[:-1]
    frames = samples // hop + 1
    index = np.arange(frames)[:, None] * hop + np.arange(window)
    shape = np.hanning(window + 1)[:-1].astype(np.float32)

    def attend(p, x):
        t = x.shape[-2]
        angle = (np.arange(t)[:, None] * 10000.0 ** (-np.arange(d // 2) / (d // 2)))[:, None].astype(np.float32)
        y = _rms(x, p["norm"])
        q, k, v = jnp.moveaxis((y @ p["qkv"]).reshape(*x.shape[:-1], 3, h, d), -3, 0)
        q, k = _turned(q, angle), _turned(k, angle)
        scores = jnp.einsum("...qhd,...khd->...hqk", q, k).astype(jnp.float32) * d**-0.5
        y = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores, axis=-1).astype(dtype), v)
        y = y * jax.nn.sigmoid(x @ p["gates"])[..., None]
        x = x + y.reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(_rms(x, p["norm2"]) @ p["up"]) @ p["down"]

    def model(p, sound):
        padded = jnp.pad(sound, ((0, 0), (0, 0), (window // 2, window)))
        spectrum = jnp.fft.rfft(padded[..., index] * shape, axis=-1) / window**0.5
        parts = jnp.stack([spectrum.real, spectrum.imag], axis=-1)
        x = parts.transpose(0, 2, 3, 1, 4).reshape(b, frames, bins, 4)
        bands = []
        for i, (start, width) in enumerate(zip(starts, widths, strict=True)):
            y = x[:, :, start : start + width].reshape(b, frames, 4 * width).astype(dtype)
            bands.append(_rms(y, p["split"][i]["norm"]) @ p["split"][i]["w"])
        y = jnp.stack(bands, axis=1)
        for q in p["layers"]:
            y = attend(q["time"], y)
            y = jnp.swapaxes(attend(q["band"], jnp.swapaxes(y, 1, 2)), 1, 2)
        y = _rms(y, p["last"])
        masks = []
        for i, width in enumerate(widths):
            z = jnp.tanh(y[:, i] @ p["masks"][i]["w1"]) @ p["masks"][i]["w2"]
            a, g = jnp.split(z.astype(jnp.float32), 2, axis=-1)
            masks.append((a * jax.nn.sigmoid(g)).reshape(b, frames, width, 2, 2))
        mask = jnp.concatenate(masks, axis=2).transpose(0, 3, 1, 2, 4)
        kept = spectrum * lax.complex(mask[..., 0], mask[..., 1])
        pieces = jnp.fft.irfft(kept * window**0.5, n=window, axis=-1) * shape
        wave = jnp.zeros((b, 2, padded.shape[-1])).at[..., index].add(pieces)
        weigh = jnp.zeros(padded.shape[-1]).at[index].add(shape**2)
        return (wave / jnp.maximum(weigh, 1e-2))[..., window // 2 : window // 2 + samples], jnp.abs(kept)

    def layer():
        p = {"norm": gain(n, dtype), "norm2": gain(n, dtype), "qkv": weight(n, 3 * n, dtype=dtype)}
        p |= {"gates": weight(n, h, dtype=dtype), "out": weight(n, n, dtype=dtype)}
        return p | {"up": weight(n, 4 * n, dtype=dtype), "down": weight(4 * n, n, dtype=dtype)}

    p = {"split": [{"norm": gain(4 * w, dtype), "w": weight(4 * w, n, dtype=dtype)} for w in widths]}
    p["masks"] = [{"w1": weight(n, 2 * n, dtype=dtype), "w2": weight(2 * n, 8 * w, dtype=dtype)} for w in widths]
    p |= {"layers": [{"time": layer(), "band": layer()} for _ in range(2)], "last": gain(n, dtype)}
    return Built(model, (p, normal(b, 2, samples, scale=0.3)))


@program("phonemes-stretched-by-durations-to-spectra-of-speech-nnx", GROUP)
def _speech(size: Size) -> Built:
    """This gives spectra of speech from phonemes that are stretched by durations, with pitch and energy, as FastSpeech 2 (2020)."""
    from flax import nnx

    b, t, frames, n, h, mels = pick(size, (16, 131, 777, 256, 2, 80), (2, 61, 301, 128, 2, 80), (2, 5, 13, 8, 2, 5))
    dtype, bins = half(size), 255
    kinds = {"dtype": dtype, "param_dtype": dtype}

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(h, n, decode=False, rngs=rngs, **kinds)
            self.norm1, self.norm2 = nnx.LayerNorm(n, rngs=rngs, **kinds), nnx.LayerNorm(n, rngs=rngs, **kinds)
            self.up = nnx.Conv(n, 4 * n, (9,), rngs=rngs, **kinds)
            self.down = nnx.Conv(4 * n, n, (1,), rngs=rngs, **kinds)

        def __call__(self, x, alive):
            x = self.norm1(x + self.attention(x, mask=alive[:, None, None]))
            x = jnp.where(alive[..., None], x, 0)
            x = self.norm2(x + self.down(nnx.relu(self.up(x))))
            return jnp.where(alive[..., None], x, 0)

    class Guess(nnx.Module):
        def __init__(self, rngs):
            self.convs = nnx.List([nnx.Conv(n, n, (3,), rngs=rngs, **kinds) for _ in range(2)])
            self.norms = nnx.List([nnx.LayerNorm(n, rngs=rngs, **kinds) for _ in range(2)])
            self.last = nnx.Linear(n, 1, rngs=rngs, **kinds)

        def __call__(self, x, alive):
            for conv, norm in zip(self.convs, self.norms, strict=True):
                x = norm(nnx.relu(conv(x)))
            return jnp.where(alive, self.last(x)[..., 0].astype(jnp.float32), 0)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(151, n, rngs=rngs, **kinds)
            self.pitch_table, self.energy_table = (nnx.Embed(bins + 1, n, rngs=rngs, **kinds) for _ in range(2))
            self.encoder = nnx.List([Block(rngs) for _ in range(2)])
            self.decoder = nnx.List([Block(rngs) for _ in range(2)])
            self.lengths, self.pitch, self.energy = Guess(rngs), Guess(rngs), Guess(rngs)
            self.mel = nnx.Linear(n, mels, rngs=rngs, **kinds)
            widths = (mels, n, n, mels)
            self.post = nnx.List([nnx.Conv(i, o, (5,), rngs=rngs, **kinds) for i, o in itertools.pairwise(widths)])

        def __call__(self, phonemes, durations, cut, pitch, energy):
            def places(count):
                angle = jnp.arange(count)[:, None] * 10000.0 ** (-jnp.arange(0, n, 2) / n)
                return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1).astype(dtype)

            alive = jnp.arange(t) < (t - cut)[:, None]
            x = self.table(phonemes) + places(t)
            for block in self.encoder:
                x = block(x, alive)
            guesses = self.lengths(x, alive), self.pitch(x, alive), self.energy(x, alive)
            edges = jnp.linspace(-3, 3, bins)
            x = x + self.pitch_table(jnp.searchsorted(edges, pitch)) + self.energy_table(jnp.digitize(energy, edges))
            ends = jnp.cumsum(jnp.where(alive, durations + 2, 0), axis=1)
            owner = jax.vmap(lambda e: jnp.searchsorted(e, jnp.arange(frames), side="right"))(ends)
            there = jnp.arange(frames) < ends[:, -1:]
            y = jnp.take_along_axis(x, jnp.minimum(owner, t - 1)[..., None], axis=1) + places(frames)
            y = jnp.where(there[..., None], y, 0)
            for block in self.decoder:
                y = block(y, there)
            mel = jnp.where(there[..., None], self.mel(y), 0)
            z = mel
            for i, conv in enumerate(self.post):
                z = conv(z)
                z = jnp.tanh(z) if i < 2 else z
            return mel.astype(jnp.float32), jnp.where(there[..., None], mel + z, 0).astype(jnp.float32), guesses

    inputs = (integers(b, t, below=151), integers(b, t, below=9), integers(b, below=t // 2))
    return nnx_program(size, Net, *inputs, normal(b, t), normal(b, t))


@program("letters-of-proteins-from-backbones-of-nearest-residues", GROUP)
def _residues(size: Size) -> Built:
    """This gives chances of amino acids for backbones by messages among nearest residues, as ProteinMPNN (Dauparas, 2022).

    Distances of five atoms of each pair are spread over bumps; the decoder sees letters that come earlier in a random order.
    """
    b, t, near, n = pick(size, (4, 501, 48, 128), (1, 151, 30, 128), (2, 7, 4, 8))
    bumps, reach = 16, 32

    def gelu(x):
        return jax.nn.gelu(x, approximate=False)

    def gathered(x, index):
        return jax.vmap(lambda row, i: row[i])(x, index)

    def mlp(p, x):
        return gelu(gelu(x @ p[0]) @ p[1]) @ p[2]

    def forward(p, node, message, alive):
        node = _layer_norm(node + jnp.sum(message, axis=-2) / 30, p["norm1"])
        node = _layer_norm(node + gelu(node @ p["up"]) @ p["down"], p["norm2"])
        return node * alive[..., None]

    def model(p, centre, n_off, c_off, o_off, letters, cut, noise):
        alive = (jnp.arange(t) < (t - cut)[:, None]).astype(jnp.float32)
        atoms = [centre + n_off, centre, centre + c_off, centre + o_off]
        u, v = atoms[1] - atoms[0], atoms[2] - atoms[1]
        atoms.append(-0.58273431 * jnp.cross(u, v) + 0.56802827 * u - 0.54067466 * v + atoms[1])
        gap = jnp.sqrt(jnp.sum((centre[:, :, None] - centre[:, None]) ** 2, axis=-1) + 1e-6)
        gap = jnp.where(alive[:, None] * alive[:, :, None] > 0, gap, 1e4)
        _, index = lax.top_k(-gap, near)
        means = jnp.linspace(2.0, 22.0, bumps)
        features = []
        for a in atoms:
            for c in atoms:
                far = jnp.sqrt(jnp.sum((a[:, :, None] - gathered(c, index)) ** 2, axis=-1) + 1e-6)
                features.append(jnp.exp(-(((far[..., None] - means) / 1.25) ** 2)))
        offset = jnp.clip(jnp.arange(t)[:, None] - index + reach, 0, 2 * reach)
        edge = jnp.concatenate([p["offsets"][offset], *features], axis=-1)
        edge = _layer_norm(edge @ p["edge"], p["edge_norm"]) @ p["edge2"]
        pair = alive[:, :, None] * gathered(alive, index)
        node = jnp.zeros((b, t, n))
        for q in p["encoder"]:
            both = jnp.concatenate(
                [jnp.broadcast_to(node[:, :, None], edge.shape), edge, gathered(node, index)], axis=-1
            )
            node = forward(q, node, mlp(q["message"], both) * pair[..., None], alive)
            both = jnp.concatenate(
                [jnp.broadcast_to(node[:, :, None], edge.shape), edge, gathered(node, index)], axis=-1
            )
            edge = _layer_norm(edge + mlp(q["edges"], both), q["norm3"])
        rank = jnp.argsort(jnp.argsort(jnp.where(alive > 0, noise, 1e3), axis=-1), axis=-1)
        seen = (gathered(rank, index) < rank[..., None]).astype(jnp.float32)[..., None]
        letter = p["letters"][letters]
        known = jnp.concatenate([edge, gathered(letter, index)], axis=-1)
        blank = jnp.concatenate([edge, jnp.zeros_like(edge), gathered(node, index)], axis=-1)
        for q in p["decoder"]:
            now = jnp.concatenate([known, gathered(node, index)], axis=-1)
            mixed = pair[..., None] * (seen * now + (1 - seen) * blank)
            both = jnp.concatenate([jnp.broadcast_to(node[:, :, None], edge.shape), mixed], axis=-1)
            node = forward(q, node, mlp(q["message"], both), alive)
        logp = jax.nn.log_softmax(node @ p["out"], axis=-1)
        own = jnp.take_along_axis(logp, letters[..., None], axis=-1)[..., 0] * alive
        return logp, jnp.sum(own, axis=1) / jnp.sum(alive, axis=1)

    def layer(wide):
        p = {"message": (weight(wide * n, n), weight(n, n), weight(n, n)), "up": weight(n, 4 * n)}
        return p | {"down": weight(4 * n, n), "norm1": gain(n), "norm2": gain(n)}

    p = {
        "offsets": normal(2 * reach + 1, bumps),
        "edge": weight(26 * bumps, n),
        "edge_norm": gain(n),
        "edge2": weight(n, n),
    }
    extra = {"norm3": gain(n), "edges": (weight(3 * n, n), weight(n, n), weight(n, n))}
    p |= {"encoder": [layer(3) | extra for _ in range(2)], "decoder": [layer(4) for _ in range(2)]}
    p |= {"letters": normal(21, n), "out": weight(n, 21)}
    places = (normal(b, t, 3, scale=10.0), *(normal(b, t, 3) for _ in range(3)))
    return Built(model, (p, *places, integers(b, t, below=21), integers(b, below=t // 3), normal(b, t)))


@program("robot-motions-by-flow-steps-beside-a-cached-prefix", GROUP)
def _pi_zero(size: Size) -> Built:
    """This gives a robot's next motions by five flow steps of a small expert that reads a cached prefix, as pi-0 (Black, 2024).

    Pictures and padded words run once through wide layers; the expert has its own weights but shares the heads of attention.
    """
    b, sights, words, ahead, n, m, h, d, acts = pick(
        size, (8, 512, 48, 50, 1024, 384, 8, 128, 32), (1, 128, 31, 50, 256, 96, 4, 64, 32), (2, 6, 5, 3, 8, 4, 2, 4, 3)
    )
    dtype, steps = half(size), 5
    vocabulary = pick(size, 32003, 4001, 11)

    def heads(p, x, places):
        y = _rms(x, p["norm"])
        q, k, v = jnp.split(y @ p["qkv"], [h * d, (h + 1) * d], axis=-1)
        angle = places[..., None, None].astype(jnp.float32) * 10000.0 ** (-jnp.arange(d // 2) / (d // 2))
        return _turned(q.reshape(*x.shape[:2], h, d), angle), _turned(k[:, :, None], angle)[:, :, 0], v

    def attend(q, k, v, mask):
        scores = jnp.einsum("bqhd,bkd->bhqk", q, k).astype(jnp.float32) * d**-0.5
        probs = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e9), axis=-1).astype(dtype)
        return jnp.einsum("bhqk,bkd->bqhd", probs, v).reshape(*q.shape[:2], h * d)

    def feed(p, x):
        gate, up = jnp.split(_rms(x, p["norm2"]) @ p["up"], 2, axis=-1)
        return x + (jax.nn.gelu(gate) * up) @ p["down"]

    def model(p, views, tokens, cut, state, noise):
        real = jnp.concatenate([jnp.ones((b, sights), bool), jnp.arange(words) < (words - cut)[:, None]], axis=1)
        places = jnp.cumsum(real, axis=1) - 1
        x = jnp.concatenate([views @ p["see"], p["table"][tokens]], axis=1)
        cache = []
        for q in p["prefix"]:
            query, key, value = heads(q, x, places)
            cache.append((key, value))
            x = feed(q, x + attend(query, key, value, real[:, None]) @ q["out"])
        count = ahead + 1
        own = jnp.broadcast_to(jnp.arange(count)[:, None] >= jnp.minimum(jnp.arange(count), 1), (b, count, count))
        mask = jnp.concatenate([jnp.broadcast_to(real[:, None], (b, count, real.shape[1])), own], axis=-1)
        later = jnp.sum(real, axis=1)[:, None] + jnp.arange(count)

        def step(i, motion):
            time = 1 - i / steps
            angle = time * 2 * jnp.pi / 4e-3 * (1e3 ** -jnp.linspace(0, 1, m // 2))
            when = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)]).astype(dtype)
            y = motion.astype(dtype) @ p["act_in"]
            y = jnp.concatenate([y, jnp.broadcast_to(when, y.shape)], axis=-1)
            y = jax.nn.silu(y @ p["mix1"]) @ p["mix2"]
            y = jnp.concatenate([(state.astype(dtype) @ p["state"])[:, None], y], axis=1)
            for q, (keys, values) in zip(p["expert"], cache, strict=True):
                query, key, value = heads(q, y, later)
                key, value = jnp.concatenate([keys, key], axis=1), jnp.concatenate([values, value], axis=1)
                y = feed(q, y + attend(query, key, value, mask) @ q["out"])
            velocity = (_rms(y[:, 1:], p["last"]) @ p["act_out"]).astype(jnp.float32)
            return motion - velocity / steps

        return lax.fori_loop(0, steps, step, noise)

    def layer(c):
        q = {"norm": gain(c, dtype), "norm2": gain(c, dtype), "qkv": weight(c, (h + 2) * d, dtype=dtype)}
        q |= {"out": weight(h * d, c, dtype=dtype), "up": weight(c, 8 * c, dtype=dtype)}
        return q | {"down": weight(4 * c, c, dtype=dtype)}

    p = {"see": weight(n, n, dtype=dtype), "table": normal(vocabulary, n, dtype=dtype), "last": gain(m, dtype)}
    p |= {"prefix": [layer(n) for _ in range(3)], "expert": [layer(m) for _ in range(3)]}
    p |= {"act_in": weight(acts, m, dtype=dtype), "act_out": weight(m, acts, dtype=dtype)}
    p |= {
        "mix1": weight(2 * m, m, dtype=dtype),
        "mix2": weight(m, m, dtype=dtype),
        "state": weight(acts, m, dtype=dtype),
    }
    inputs = (normal(b, sights, n, dtype=dtype), integers(b, words, below=vocabulary), integers(b, below=words // 2))
    return Built(model, (p, *inputs, normal(b, acts), normal(b, ahead, acts)))
