"""Programs of vision, audio, molecules and rendering, by an author who knew nothing of the package: a second set."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, gain, half, integers, normal, pick, program, weight

GROUP = "second"


def _norm(n):
    return {"scale": gain(n), "bias": normal(n, scale=0.05)}


def _layer_norm(p, x, eps=1e-6):
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32, -1, keepdims=True)
    mean2 = jnp.mean(jnp.square(x32), -1, keepdims=True)
    var = jnp.maximum(0.0, mean2 - jnp.square(mean))
    return ((x32 - mean) * lax.rsqrt(var + eps) * p["scale"] + p["bias"]).astype(x.dtype)


def _linear(i, o, dtype):
    return {"w": weight(i, o, dtype=dtype), "b": normal(o, dtype=dtype, scale=0.05)}


def _dense(p, x):
    return x @ p["w"] + p["b"]


@program("swin-v2-cosine-block", GROUP)
def _swin_v2(size: Size) -> Built:
    """A shifted block of Swin V2: cosine attention, biases by an MLP of log distances, norms after."""
    batch, side, window, n, heads = pick(size, (8, 48, 24, 256, 8), (2, 24, 12, 128, 4), (1, 4, 2, 8, 2))
    dtype = half(size)
    d, inner, shift, area, across = n // heads, 2 * n, window // 2, window**2, side // window
    line = np.arange(-(window - 1), window, dtype=np.float32) * 8.0 / (window - 1)
    table = np.stack(np.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    table = np.sign(table) * np.log2(np.abs(table) + 1.0) / np.log2(8.0)
    grid = np.stack(np.meshgrid(np.arange(window), np.arange(window), indexing="ij")).reshape(2, -1)
    offset = grid[:, :, None] - grid[:, None, :] + window - 1
    index = (offset[0] * (2 * window - 1) + offset[1]).reshape(-1)
    third = np.digitize(np.arange(side), [side - window, side - shift])
    region = 3 * third[:, None] + third[None, :]

    def partition(x):
        x = x.reshape(x.shape[0], across, window, across, window, x.shape[-1])
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, area, x.shape[-1])

    def block(p, x):
        h = partition(jnp.roll(x, (-shift, -shift), axis=(1, 2)))
        qkv = h @ p["qkv"] + jnp.concatenate([p["q_bias"], jnp.zeros_like(p["q_bias"]), p["v_bias"]])
        q, k, v = jnp.moveaxis(qkv.reshape(-1, area, 3, heads, d), (2, 3), (0, 2)).astype(jnp.float32)
        q = q / jnp.maximum(jnp.linalg.norm(q, axis=-1, keepdims=True), 1e-12)
        k = k / jnp.maximum(jnp.linalg.norm(k, axis=-1, keepdims=True), 1e-12)
        attn = q.astype(dtype) @ jnp.swapaxes(k.astype(dtype), -1, -2)
        attn = attn.astype(jnp.float32) * jnp.exp(jnp.minimum(p["logit_scale"], np.log(100.0)))[:, None, None]
        bias = jax.nn.relu(jnp.asarray(table) @ p["cpb1"] + p["cpb1_b"]) @ p["cpb2"]
        bias = 16.0 * jax.nn.sigmoid(bias[index].reshape(area, area, heads).transpose(2, 0, 1))
        ids = partition(jnp.asarray(region)[None, :, :, None])[..., 0]
        mask = jnp.where(ids[:, None, :] != ids[:, :, None], -100.0, 0.0)
        attn = (attn + bias).reshape(batch, across**2, heads, area, area) + mask[None, :, None]
        attn = jax.nn.softmax(attn, axis=-1).astype(dtype).reshape(-1, heads, area, area)
        out = jnp.swapaxes(attn @ v.astype(dtype), 1, 2).reshape(-1, area, n)
        out = _dense(p["proj"], out).reshape(batch, across, across, window, window, n)
        out = out.transpose(0, 1, 3, 2, 4, 5).reshape(batch, side, side, n)
        x = x + _layer_norm(p["norm1"], jnp.roll(out, (shift, shift), axis=(1, 2)))
        return x + _layer_norm(p["norm2"], _dense(p["fc2"], jax.nn.gelu(_dense(p["fc1"], x), approximate=False)))

    params = {"qkv": weight(n, 3 * n, dtype=dtype), "proj": _linear(n, n, dtype), "norm1": _norm(n), "norm2": _norm(n)}
    params |= {k: normal(n, dtype=dtype, scale=0.1) for k in ("q_bias", "v_bias")}
    params |= {"cpb1": weight(2, inner), "cpb1_b": normal(inner, scale=0.1), "cpb2": weight(inner, heads)}
    params |= {"logit_scale": normal(heads, scale=0.5, offset=2.3)}
    params |= {"fc1": _linear(n, 4 * n, dtype), "fc2": _linear(4 * n, n, dtype)}
    return Built(block, (params, normal(batch, side, side, n, dtype=dtype)))


@program("deformable-detr-decoder-layer", GROUP)
def _deformable(size: Size) -> Built:
    """Object queries attend to one another, then sample four levels bilinearly; one image, vmapped."""
    batch, rows, columns, queries, n, heads = pick(
        size, (4, 100, 134, 300, 256, 8), (2, 40, 53, 100, 128, 8), (2, 4, 5, 3, 8, 2)
    )
    levels = [(-(-rows // 2**i), -(-columns // 2**i)) for i in range(4)]
    dtype, points = half(size), 4
    d, total = n // heads, sum(h * w for h, w in levels)

    def bilinear(image, xy):
        """Samples of image[h, w, d] at xy[..., 2] in pixels, zeros outside."""
        h, w = image.shape[:2]
        low = jnp.floor(xy)
        part = xy - low
        out = 0.0
        for dy in (0, 1):
            for dx in (0, 1):
                ix, iy = low[..., 0].astype(jnp.int32) + dx, low[..., 1].astype(jnp.int32) + dy
                inside = (ix >= 0) & (ix < w) & (iy >= 0) & (iy < h)
                share = jnp.abs(1 - dx - part[..., 0]) * jnp.abs(1 - dy - part[..., 1])
                taken = image[jnp.clip(iy, 0, h - 1), jnp.clip(ix, 0, w - 1)]
                out = out + taken * jnp.where(inside, share, 0.0)[..., None].astype(image.dtype)
        return out

    def self_attention(p, x, pos):
        q, k = (_dense(p[name], x + pos).reshape(queries, heads, d) for name in "qk")
        v = _dense(p["v"], x).reshape(queries, heads, d)
        a = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q / np.sqrt(d).astype(dtype), k), axis=-1)
        return _dense(p["o"], jnp.einsum("hqk,khd->qhd", a, v).reshape(queries, n))

    def cross(p, x, reference, memory, valid):
        value = jnp.where(valid[:, None], _dense(p["value"], memory), 0).reshape(total, heads, d)
        offsets = _dense(p["offsets"], x).reshape(queries, heads, len(levels), points, 2).astype(jnp.float32)
        a = _dense(p["weights"], x).reshape(queries, heads, len(levels) * points)
        a = jax.nn.softmax(a.astype(jnp.float32), axis=-1).reshape(queries, heads, len(levels), points).astype(dtype)
        out, start = 0.0, 0
        for level, (h, w) in enumerate(levels):
            image = value[start : start + h * w].reshape(h, w, heads, d)
            start += h * w
            xy = reference[:, None, None, :] * jnp.array([w, h], jnp.float32) + offsets[:, :, level] - 0.5
            sampled = jax.vmap(bilinear, in_axes=(2, 1), out_axes=1)(image, xy)
            out = out + jnp.einsum("qhpd,qhp->qhd", sampled, a[:, :, level])
        return _dense(p["out"], out.reshape(queries, n))

    def one(p, x, pos, memory, valid):
        x = _layer_norm(p["norm1"], x + self_attention(p, x, pos))
        reference = jax.nn.sigmoid(_dense(p["reference"], pos).astype(jnp.float32))
        x = _layer_norm(p["norm2"], x + cross(p, x + pos, reference, memory, valid))
        x = _layer_norm(p["norm3"], x + _dense(p["fc2"], jax.nn.relu(_dense(p["fc1"], x))))
        return x, reference

    params = {name: _linear(n, n, dtype) for name in ("q", "k", "v", "o", "value", "out")}
    params |= {"offsets": _linear(n, heads * len(levels) * points * 2, dtype), "reference": _linear(n, 2, dtype)}
    params |= {"weights": _linear(n, heads * len(levels) * points, dtype)}
    params |= {"fc1": _linear(n, 4 * n, dtype), "fc2": _linear(4 * n, n, dtype)}
    params |= {name: _norm(n) for name in ("norm1", "norm2", "norm3")}
    inputs = normal(batch, queries, n, dtype=dtype), normal(queries, n, dtype=dtype)
    layer = jax.vmap(one, in_axes=(None, 0, None, 0, 0))
    return Built(layer, (params, *inputs, normal(batch, total, n, dtype=dtype), booleans(batch, total)))


@program("siglip-map-head-loss-grad", GROUP)
def _siglip(size: Size) -> Built:
    """The gradient of SigLIP's sigmoid loss in the image tower's head, which pools 196 patches by a learnt probe."""
    batch, patches, n, heads = pick(size, (256, 196, 768, 12), (12, 196, 192, 3), (3, 5, 8, 2))
    dtype, d = half(size), n // heads

    def pool(p, x):
        probe = jnp.broadcast_to(p["probe"], (x.shape[0], 1, n)).astype(dtype)
        q = jnp.einsum("bqn,nhd->bqhd", probe, p["q"])
        k = jnp.einsum("bkn,nhd->bkhd", x, p["k"])
        v = jnp.einsum("bkn,nhd->bkhd", x, p["v"])
        a = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q / np.sqrt(d).astype(dtype), k), axis=-1)
        y = jnp.einsum("bqhd,hdn->bqn", jnp.einsum("bhqk,bkhd->bqhd", a, v), p["o"])
        y = y + _dense(p["fc2"], jax.nn.gelu(_dense(p["fc1"], _layer_norm(p["norm"], y))))
        return y[:, 0]

    def unit(x):
        x = x.astype(jnp.float32)
        return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-8)

    def loss(p, patches_in, text):
        zimg = unit(pool(p, _layer_norm(p["encoder_norm"], patches_in)))
        ztxt = unit(_dense(p["text_head"], text))
        logits = zimg @ ztxt.T * jnp.exp(p["t"]) + p["b"]
        m1_diag1 = -jnp.ones_like(logits) + 2 * jnp.eye(batch)
        accuracy = jnp.mean(jnp.argmax(logits, axis=1) == jnp.arange(batch))
        return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(m1_diag1 * logits), axis=-1)), accuracy

    split = normal(n, heads, d, dtype=dtype, scale=n**-0.5)
    params = {"q": split, "k": split, "v": split, "o": normal(heads, d, n, dtype=dtype, scale=n**-0.5)}
    params |= {"probe": normal(1, 1, n), "norm": _norm(n), "encoder_norm": _norm(n), "text_head": _linear(n, n, dtype)}
    params |= {"fc1": _linear(n, 4 * n, dtype), "fc2": _linear(4 * n, n, dtype)}
    params |= {"t": normal(scale=0.0, offset=2.3), "b": normal(scale=0.0, offset=-10.0)}
    step = jax.value_and_grad(loss, has_aux=True)
    return Built(step, (params, normal(batch, patches, n, dtype=dtype), normal(batch, n, dtype=dtype)))


@program("slot-attention-loop", GROUP)
def _slots(size: Size) -> Built:
    """Slot attention: slots compete for positions by a softmax over slots, in a loop of three rounds with a GRU."""
    batch, inputs, slots, n, hidden = pick(size, (32, 16384, 7, 64, 128), (4, 4096, 7, 64, 128), (2, 6, 3, 8, 8))
    dtype = half(size)

    def gru(p, x, h):
        xr, xz, xn = jnp.split(_dense(p["gru_x"], x), 3, axis=-1)
        hr, hz, hn = jnp.split(_dense(p["gru_h"], h), 3, axis=-1)
        r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
        return (1.0 - z) * jnp.tanh(xn + r * hn) + z * h

    def one(p, features, noise):
        x = _layer_norm(p["norm_in"], features)
        k, v = x @ p["k"], x @ p["v"]

        def body(_, state):
            current, _ = state
            q = (_layer_norm(p["norm_slots"], current) @ p["q"]) * n**-0.5
            logits = jnp.einsum("kd,sd->ks", k, q.astype(dtype), preferred_element_type=jnp.float32)
            attn = jax.nn.softmax(logits, axis=-1)
            share = (attn + 1e-8) / jnp.sum(attn + 1e-8, axis=0, keepdims=True)
            updates = jnp.einsum("ks,kd->sd", share.astype(dtype), v).astype(jnp.float32)
            new = gru(p, updates, current)
            new = new + _dense(p["fc2"], jax.nn.relu(_dense(p["fc1"], _layer_norm(p["norm_mlp"], new))))
            return new, attn

        start = p["mu"] + jnp.exp(p["log_sigma"]) * noise
        return lax.fori_loop(0, 3, body, (start, jnp.zeros((inputs, slots), jnp.float32)))

    params = {"k": weight(n, n, dtype=dtype), "v": weight(n, n, dtype=dtype), "q": weight(n, n)}
    params |= {"gru_x": _linear(n, 3 * n, jnp.float32), "gru_h": _linear(n, 3 * n, jnp.float32)}
    params |= {"fc1": _linear(n, hidden, jnp.float32), "fc2": _linear(hidden, n, jnp.float32)}
    params |= {name: _norm(n) for name in ("norm_in", "norm_slots", "norm_mlp")}
    params |= {"mu": normal(n), "log_sigma": normal(n, scale=0.1)}
    attend = jax.vmap(one, in_axes=(None, 0, 0))
    return Built(attend, (params, normal(batch, inputs, n, dtype=dtype), normal(batch, slots, n)))


@program("conformer-relative-block", GROUP)
def _conformer(size: Size) -> Built:
    """A whole Conformer block: half-steps around shifted relative attention and a gated depthwise convolution."""
    batch, frames, n, heads, taps = pick(size, (16, 401, 512, 8, 31), (3, 151, 144, 4, 15), (2, 5, 8, 2, 3))
    dtype, d = half(size), n // heads

    def feed_forward(p, x):
        return _dense(p["down"], jax.nn.swish(_dense(p["up"], _layer_norm(p["norm"], x))))

    def positions():
        offsets = jnp.arange(frames - 1, -frames, -1.0)
        angle = offsets[:, None] * jnp.exp(jnp.arange(0, n, 2) * -(np.log(10000.0) / n))
        return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(2 * frames - 1, n).astype(dtype)

    def relative_shift(s):
        s = jnp.pad(s, ((0, 0), (0, 0), (0, 0), (1, 0))).reshape(batch, heads, 2 * frames, frames)
        return s[:, :, 1:].reshape(batch, heads, frames, 2 * frames - 1)[..., :frames]

    def attention(p, x, seen):
        h = _layer_norm(p["att_norm"], x)
        q, k, v = (_dense(p[name], h).reshape(batch, frames, heads, d) for name in ("q", "k", "v"))
        r = (positions() @ p["pos"]).reshape(2 * frames - 1, heads, d)
        content = jnp.einsum("bqhd,bkhd->bhqk", q + p["u"], k)
        place = relative_shift(jnp.einsum("bqhd,rhd->bhqr", q + p["w"], r))
        scores = ((content + place) / np.sqrt(d).astype(dtype)).astype(jnp.float32)
        scores = jnp.where(seen[:, None, None, :], scores, -1e9)
        a = jnp.where(seen[:, None, None, :], jax.nn.softmax(scores, axis=-1), 0.0).astype(dtype)
        return _dense(p["o"], jnp.einsum("bhqk,bkhd->bqhd", a, v).reshape(batch, frames, n))

    def convolution(p, x, seen):
        h = jax.nn.glu(_dense(p["point1"], _layer_norm(p["conv_norm"], x)), axis=-1)
        h = jnp.where(seen[..., None], h, 0)
        h = lax.conv_general_dilated(h, p["depth"], (1,), "SAME", None, None, ("NWC", "WIO", "NWC"), n)
        h = (h - p["bn_mean"]) * (lax.rsqrt(p["bn_var"] + 1e-5) * p["bn_scale"]) + p["bn_bias"]
        return _dense(p["point2"], jax.nn.swish(h).astype(dtype))

    def block(p, x, seen):
        x = x + 0.5 * feed_forward(p["ff1"], x)
        x = x + attention(p, x, seen)
        x = x + convolution(p, x, seen)
        x = x + 0.5 * feed_forward(p["ff2"], x)
        return _layer_norm(p["final_norm"], x)

    ff = {"up": _linear(n, 4 * n, dtype), "down": _linear(4 * n, n, dtype), "norm": _norm(n)}
    params = {name: _linear(n, n, dtype) for name in ("q", "k", "v", "o", "point2")}
    params |= {"ff1": ff, "ff2": ff, "pos": weight(n, n, dtype=dtype), "point1": _linear(n, 2 * n, dtype)}
    params |= {"u": normal(heads, d, dtype=dtype, scale=0.3), "w": normal(heads, d, dtype=dtype, scale=0.3)}
    params |= {"depth": normal(taps, 1, n, dtype=dtype, scale=taps**-0.5), "bn_mean": normal(n, scale=0.1)}
    params |= {"bn_var": normal(n, scale=0.1, offset=1.0), "bn_scale": gain(n), "bn_bias": normal(n, scale=0.05)}
    params |= {name: _norm(n) for name in ("att_norm", "conv_norm", "final_norm")}
    return Built(block, (params, normal(batch, frames, n, dtype=dtype), booleans(batch, frames)))


@program("mel-pcen-scan-frontend", GROUP)
def _pcen(size: Size) -> Built:
    """A front end of keyword spotting: mel energies, normalised by a scanned average, stacked and projected."""
    batch, samples, bins, out = pick(size, (64, 48000, 80, 512), (8, 24000, 64, 192), (2, 2000, 8, 6))
    dtype, width, hop, fft, stack = half(size), 400, 160, 512, 3
    frames = (samples - width) // hop + 1
    groups = frames // stack

    def mel(f):
        return 1127.0 * np.log1p(f / 700.0)

    edges = np.linspace(mel(60.0), mel(7600.0), bins + 2)
    at = mel(np.linspace(0.0, 8000.0, fft // 2 + 1))[:, None]
    up = (at - edges[:-2]) / (edges[1:-1] - edges[:-2])
    down = (edges[2:] - at) / (edges[2:] - edges[1:-1])
    bank = np.maximum(0.0, np.minimum(up, down)).astype(np.float32)

    def frontend(p, wave):
        wave = jnp.concatenate([wave[:, :1], wave[:, 1:] - 0.97 * wave[:, :-1]], axis=1)
        index = jnp.arange(frames)[:, None] * hop + jnp.arange(width)[None, :]
        spectrum = jnp.fft.rfft(wave[:, index] * jnp.hanning(width), n=fft)
        energy = jnp.square(jnp.abs(spectrum)) @ bank
        s = jax.nn.sigmoid(p["s"])

        def smooth(m, e):
            m = (1.0 - s) * m + s * e
            return m, m

        m = jnp.swapaxes(lax.scan(smooth, energy[:, 0], jnp.swapaxes(energy, 0, 1))[1], 0, 1)
        alpha, root = jnp.minimum(p["alpha"], 1.0), 1.0 / jnp.maximum(p["root"], 1.0)
        delta = jax.nn.softplus(p["delta"])
        gained = energy * jnp.exp(-alpha * jnp.log(1e-6 + m))
        pcen = (gained + delta) ** root - delta**root
        stacked = pcen[:, : groups * stack].reshape(batch, groups, stack * bins)
        return jax.nn.relu(_layer_norm(p["norm"], stacked).astype(dtype) @ p["w"] + p["b"])

    params = {"s": normal(bins, scale=0.3, offset=-3.0), "alpha": normal(bins, scale=0.02, offset=0.96)}
    params |= {"root": normal(bins, scale=0.1, offset=2.0), "delta": normal(bins, scale=0.1, offset=2.0)}
    params |= {"norm": _norm(stack * bins), **_linear(stack * bins, out, dtype)}
    return Built(frontend, (params, normal(batch, samples, scale=0.1)))


@program("equivariant-graph-messages", GROUP)
def _egnn(size: Size) -> Built:
    """Two layers of an equivariant graph network: gated messages summed by segments, then a readout per molecule."""
    nodes, edges, graphs, n = pick(size, (9001, 150000, 500, 128), (900, 9001, 50, 64), (7, 20, 2, 8))
    dtype = half(size)

    def layer(p, h, x, senders, receivers, live):
        delta = x[receivers] - x[senders]
        d2 = jnp.sum(delta**2, axis=-1, keepdims=True)
        m = jnp.concatenate([h[receivers], h[senders], d2.astype(dtype)], axis=-1)
        m = jax.nn.silu(_dense(p["edge2"], jax.nn.silu(_dense(p["edge1"], m))))
        m = m * jax.nn.sigmoid(_dense(p["gate"], m)) * live[:, None].astype(dtype)
        step = jnp.tanh((jax.nn.silu(_dense(p["x1"], m)) @ p["x2"]).astype(jnp.float32)) * live[:, None]
        move = delta / (jnp.sqrt(d2 + 1e-8) + 1.0) * step
        degree = jax.ops.segment_sum(live.astype(jnp.float32), receivers, nodes, indices_are_sorted=True)
        moved = jax.ops.segment_sum(move, receivers, nodes, indices_are_sorted=True)
        x = x + moved / jnp.maximum(degree, 1.0)[:, None]
        gathered = jax.ops.segment_sum(m.astype(jnp.float32), receivers, nodes, indices_are_sorted=True).astype(dtype)
        update = _dense(p["node2"], jax.nn.silu(_dense(p["node1"], jnp.concatenate([h, gathered], axis=-1))))
        return h + update, x

    def energies(params, species, x, senders, receivers, live, graph):
        h = params["embed"][species]
        for p in params["layers"]:
            h, x = layer(p, h, x, senders, receivers, live)
        atom = jax.nn.silu(_dense(params["read1"], h)) @ params["read2"]
        return jax.ops.segment_sum(atom.astype(jnp.float32)[:, 0], graph, graphs, indices_are_sorted=True), x

    def one():
        p = {"edge1": _linear(2 * n + 1, n, dtype), "edge2": _linear(n, n, dtype), "gate": _linear(n, 1, dtype)}
        p |= {"x1": _linear(n, n, dtype), "x2": weight(n, 1, dtype=dtype)}
        return p | {"node1": _linear(2 * n, n, dtype), "node2": _linear(n, n, dtype)}

    params = {"embed": normal(10, n, dtype=dtype), "layers": [one(), one()]}
    params |= {"read1": _linear(n, n, dtype), "read2": weight(n, 1, dtype=dtype)}
    ends = integers(edges, below=nodes), integers(edges, below=nodes, ramp=True), booleans(edges)
    atoms = integers(nodes, below=10), normal(nodes, 3, scale=2.0)
    return Built(energies, (params, *atoms, *ends, integers(nodes, below=graphs, ramp=True)))


@program("gaussian-splat-tiles-grad", GROUP)
def _splat(size: Size) -> Built:
    """The gradient of a photometric loss in flat Gaussians, composited front to back over a map of chunks of tiles."""
    splats, across, down, depth, tile = pick(size, (20000, 30, 20, 96, 16), (600, 12, 9, 48, 8), (9, 2, 2, 3, 2))

    def conics(p):
        c, s = jnp.cos(p["angle"]), jnp.sin(p["angle"])
        vx, vy = jnp.exp(2 * p["log_scale"][:, 0]), jnp.exp(2 * p["log_scale"][:, 1])
        xx, xy, yy = c * c * vx + s * s * vy + 0.3, c * s * (vx - vy), s * s * vx + c * c * vy + 0.3
        det = xx * yy - xy * xy
        return jnp.stack([yy / det, -xy / det, xx / det], axis=-1)

    def render(p, lists):
        conic, opacity, colour = conics(p), jax.nn.sigmoid(p["opacity"]), jax.nn.sigmoid(p["colour"])
        inner = jnp.stack(jnp.meshgrid(jnp.arange(tile), jnp.arange(tile), indexing="xy"), -1).reshape(-1, 2) + 0.5

        def one(args):
            number, ids = args
            origin = jnp.stack([number % across, number // across]) * tile
            centre = p["mean"][ids] * jnp.array([across * tile, down * tile])
            dx, dy = jnp.moveaxis((inner + origin)[:, None, :] - centre[None], -1, 0)
            a, b, c = conic[ids].T
            power = -0.5 * (a * dx * dx + c * dy * dy) - b * dx * dy
            alpha = jnp.minimum(0.99, opacity[ids] * jnp.exp(jnp.minimum(power, 0.0)))
            alpha = jnp.where(alpha < 1.0 / 255.0, 0.0, alpha)
            through = jnp.exp(jnp.cumsum(jnp.log1p(-alpha), axis=-1))
            before = jnp.concatenate([jnp.ones_like(through[:, :1]), through[:, :-1]], axis=-1)
            return (alpha * before) @ colour[ids] + through[:, -1:] * p["background"]

        return lax.map(one, (jnp.arange(across * down), lists), batch_size=across * down // 4)

    def loss(p, lists, target):
        error = render(p, lists) - target
        return 0.8 * jnp.mean(jnp.abs(error)) + 0.2 * jnp.mean(error**2)

    params = {"mean": normal(splats, 2, scale=0.25, offset=0.5), "log_scale": normal(splats, 2, scale=0.5, offset=3.0)}
    params |= {"angle": normal(splats), "opacity": normal(splats, scale=1.0, offset=-1.0), "colour": normal(splats, 3)}
    params |= {"background": normal(3, scale=0.1, offset=0.5)}
    target = normal(across * down, tile * tile, 3, scale=0.2, offset=0.5)
    return Built(jax.value_and_grad(loss), (params, integers(across * down, depth, below=splats), target))


@program("raft-correlation-lookup", GROUP)
def _raft(size: Size) -> Built:
    """Optical flow of RAFT: all pairs, a pyramid of means, bilinear lookups around the flow, the motion encoder."""
    batch, rows, columns, n, radius = pick(size, (1, 55, 128, 256, 4), (1, 26, 38, 96, 4), (2, 8, 9, 8, 1))
    dtype, levels, reach = half(size), 4 if rows > 8 else 3, 2 * radius + 1

    def halve(c):
        c = c[:, : c.shape[1] // 2 * 2, : c.shape[2] // 2 * 2]
        return lax.reduce_window(c, 0.0, lax.add, (1, 2, 2), (1, 2, 2), "VALID") * 0.25

    def sample(plane, at):
        h, w = plane.shape
        x0, y0 = jnp.floor(at[..., 0]), jnp.floor(at[..., 1])
        fx, fy = at[..., 0] - x0, at[..., 1] - y0

        def tap(y, x):
            inside = (y >= 0) & (y < h) & (x >= 0) & (x < w)
            flat = jnp.clip(y, 0, h - 1) * w + jnp.clip(x, 0, w - 1)
            return jnp.where(inside, plane.reshape(-1)[flat.astype(jnp.int32)], 0.0)

        top = (1 - fx) * tap(y0, x0) + fx * tap(y0, x0 + 1)
        bottom = (1 - fx) * tap(y0 + 1, x0) + fx * tap(y0 + 1, x0 + 1)
        return (1 - fy) * top + fy * bottom

    def lookup(p, first, second, flow):
        volume = jnp.einsum("bijc,bklc->bijkl", first, second, preferred_element_type=jnp.float32) / np.sqrt(n)
        volume = volume.reshape(batch * rows * columns, rows, columns)
        y, x = jnp.meshgrid(jnp.arange(rows), jnp.arange(columns), indexing="ij")
        centre = (jnp.stack([x, y], -1) + flow).reshape(-1, 1, 1, 2)
        line = jnp.arange(-radius, radius + 1)
        window = jnp.stack(jnp.meshgrid(line, line, indexing="ij"), -1)[None]
        found = []
        for level in range(levels):
            found.append(jax.vmap(sample)(volume, centre / 2**level + window))
            volume = halve(volume)
        corr = jnp.stack(found, axis=1).reshape(batch, rows, columns, levels * reach**2).astype(dtype)
        corr = jax.nn.relu(_dense(p["corr"], corr))
        moved = jax.nn.relu(_dense(p["flow"], flow.astype(dtype)))
        both = jax.nn.relu(_dense(p["both"], jnp.concatenate([corr, moved], axis=-1)))
        return jnp.concatenate([both, flow.astype(dtype)], axis=-1)

    params = {"corr": _linear(levels * reach**2, n, dtype), "flow": _linear(2, 64, dtype)}
    params |= {"both": _linear(n + 64, n // 2, dtype)}
    features = normal(batch, rows, columns, n, dtype=dtype)
    return Built(lookup, (params, features, features, normal(batch, rows, columns, 2, scale=3.0)))


@program("retina-focal-giou-grad", GROUP)
def _retina(size: Size) -> Built:
    """A detector's gradient: anchors matched to padded boxes, a focal loss of classes, a GIoU loss of boxes."""
    batch, image, boxes, classes, top = pick(size, (8, 640, 63, 80, 8), (2, 256, 31, 20, 7), (2, 16, 3, 4, 5))
    dtype = half(size)
    sizes = [(2**s, 2 ** (r / 2), 2 ** (2 + s + o / 3)) for s in range(3, top) for o in range(3) for r in (-1, 0, 1)]
    parts = []
    for stride, root, side in sizes:
        line = (np.arange(image // stride) + 0.5) * stride
        cy, cx = np.meshgrid(line, line, indexing="ij")
        parts.append(np.stack([cx, cy, 0 * cx + side * root, 0 * cx + side / root], -1).reshape(-1, 4))
    anchors = (np.concatenate(parts) / image).astype(np.float32)

    def corners(b):
        return jnp.concatenate([b[..., :2] - 0.5 * b[..., 2:], b[..., :2] + 0.5 * b[..., 2:]], axis=-1)

    def overlap(a, b):
        """Intersection, union and hull of boxes given by corners, broadcast."""
        area_a, area_b = (jnp.prod(t[..., 2:] - t[..., :2], axis=-1) for t in (a, b))
        common = jnp.maximum(jnp.minimum(a[..., 2:], b[..., 2:]) - jnp.maximum(a[..., :2], b[..., :2]), 0.0)
        hull = jnp.maximum(a[..., 2:], b[..., 2:]) - jnp.minimum(a[..., :2], b[..., :2])
        inter = common[..., 0] * common[..., 1]
        return inter, area_a + area_b - inter, hull[..., 0] * hull[..., 1]

    def one(logits, deltas, gt, labels, live):
        truth = corners(gt)
        inter, union, _ = overlap(corners(jnp.asarray(anchors))[:, None], truth[None])
        iou = jnp.where(live[None, :], inter / (union + 1e-8), -1.0)
        best, which = jnp.max(iou, axis=1), jnp.argmax(iou, axis=1)
        forced = jnp.zeros(len(anchors), bool).at[jnp.argmax(iou, axis=0)].max(live)
        positive = (best >= 0.5) | forced
        used = positive | (best < 0.4)
        target = jax.nn.one_hot(labels[which], classes) * positive[:, None]
        x = logits.astype(jnp.float32)
        p = jax.nn.sigmoid(x)
        ce = jnp.maximum(x, 0) - x * target + jnp.log1p(jnp.exp(-jnp.abs(x)))
        p_t = p * target + (1 - p) * (1 - target)
        focal = (0.25 * target + 0.75 * (1 - target)) * ce * (1 - p_t) ** 2
        count = jnp.maximum(jnp.sum(positive), 1)

        deltas = deltas.astype(jnp.float32)
        centre = anchors[:, :2] + deltas[:, :2] * anchors[:, 2:]
        extent = anchors[:, 2:] * jnp.exp(jnp.clip(deltas[:, 2:], -4.0, 4.0))
        inter, union, hull = overlap(corners(jnp.concatenate([centre, extent], -1)), truth[which])
        giou = inter / (union + 1e-8) - (hull - union) / (hull + 1e-8)
        return jnp.sum(focal * used[:, None]) / count, jnp.sum((1.0 - giou) * positive) / count

    def loss(logits, deltas, centres, extents, labels, live):
        gt = jnp.concatenate([centres, jnp.maximum(extents, 0.02)], axis=-1)
        classify, regress = jax.vmap(one)(logits, deltas, gt, labels, live)
        return jnp.mean(classify) + 2.0 * jnp.mean(regress)

    scores = normal(batch, len(anchors), classes, dtype=dtype, offset=-4.0)
    deltas = normal(batch, len(anchors), 4, dtype=dtype, scale=0.3)
    truth = normal(batch, boxes, 2, scale=0.2, offset=0.5), normal(batch, boxes, 2, scale=0.1, offset=0.25)
    labels = integers(batch, boxes, below=classes), booleans(batch, boxes)
    return Built(jax.value_and_grad(loss, argnums=(0, 1)), (scores, deltas, *truth, *labels))
