"""Models of pictures, jets, brain waves, molecules, films, scenes and meshes, the twenty-first set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import linen_program
from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program, weight

GROUP = "twenty-first"


def _layer_norm(x, p):
    y = x.astype(jnp.float32)
    mean = jnp.mean(y, axis=-1, keepdims=True)
    var = jnp.mean(jnp.square(y - mean), axis=-1, keepdims=True)
    y = (y - mean) * lax.rsqrt(var + 1e-5)
    return (y * p["scale"] + p["bias"]).astype(x.dtype)


def _ln(n):
    """Describes the scale and the bias of a layer norm of width n."""
    return {"scale": normal(n, scale=0.1, offset=1.0), "bias": normal(n, scale=0.1)}


def _dense(i, o, dtype):
    return {"w": weight(i, o, dtype=dtype), "b": normal(o, dtype=dtype, scale=0.05)}


def _apply(p, x):
    return x @ p["w"] + p["b"]


@program("patches-mixed-by-wide-depth-and-point-convolutions-linen", GROUP)
def _convmixer(size: Size) -> Built:
    """This classifies pictures by wide depthwise and pointwise convolutions alone, as ConvMixer (Trockman, 2022)."""
    import flax.linen as nn

    b, side, patch, n, kernel, classes = pick(
        size, (16, 224, 7, 384, 9, 1000), (1, 98, 7, 128, 7, 100), (2, 8, 2, 8, 3, 5)
    )
    dtype = half(size)

    class ConvMixer(nn.Module):
        @nn.compact
        def __call__(self, x):
            def act(y):
                return nn.BatchNorm(use_running_average=True, dtype=dtype)(nn.gelu(y))

            x = act(nn.Conv(n, (patch, patch), strides=patch, padding="VALID", dtype=dtype)(x))
            for _ in range(4):
                x = x + act(nn.Conv(n, (kernel, kernel), feature_group_count=n, dtype=dtype)(x))
                x = act(nn.Conv(n, (1, 1), dtype=dtype)(x))
            return nn.Dense(classes, dtype=dtype)(jnp.mean(x, axis=(1, 2)))

    return linen_program(size, ConvMixer(), normal(b, side, side, 3, dtype=dtype))


@program("jets-of-particles-attend-with-angles-and-masses-of-pairs", GROUP)
def _particle_transformer(size: Size) -> Built:
    """This names the origin of jets by attention biased with physics of pairs, as Particle Transformer (Qu, 2022).

    Angles, transverse momenta and masses of each pair become a bias of the scores; a class token reads the last states.
    """
    b, parts, n, h, classes = pick(size, (64, 100, 128, 8, 10), (6, 60, 64, 4, 10), (2, 5, 8, 2, 3))
    dtype, d = half(size), n // h

    def pairs(momenta):
        pt, rapidity, phi = jnp.exp(momenta[..., 0]), momenta[..., 1], jnp.pi * jnp.tanh(momenta[..., 2])
        turn = phi[:, :, None] - phi[:, None]
        turn = (turn + jnp.pi) % (2 * jnp.pi) - jnp.pi
        delta = jnp.sqrt((rapidity[:, :, None] - rapidity[:, None]) ** 2 + turn**2 + 1e-8)
        low = jnp.minimum(pt[:, :, None], pt[:, None])
        share = low / (pt[:, :, None] + pt[:, None])
        energy, pz = pt * jnp.cosh(rapidity), pt * jnp.sinh(rapidity)
        four = jnp.stack([energy, pt * jnp.cos(phi), pt * jnp.sin(phi), pz], axis=-1)
        both = four[:, :, None] + four[:, None]
        mass = both[..., 0] ** 2 - jnp.sum(both[..., 1:] ** 2, axis=-1)
        return jnp.log(jnp.stack([low * delta, share, delta, jnp.maximum(mass, 1e-8)], axis=-1) + 1e-8)

    def attend(p, x, memory, bias):
        q, k, v = (_apply(p[z], y).reshape(b, -1, h, d) for z, y in (("q", x), ("k", memory), ("v", memory)))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / np.sqrt(d) + bias
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1).astype(dtype), v)
        return y * p["gamma"][:, None]

    def layer(p, x, memory, bias):
        y = attend(p, _layer_norm(x, p["ln1"]), _layer_norm(memory, p["ln1"]), bias).reshape(b, -1, n)
        x = x + _layer_norm(_apply(p["o"], y), p["ln2"])
        y = jax.nn.gelu(_apply(p["up"], _layer_norm(x, p["ln3"])))
        return x + _apply(p["down"], _layer_norm(y, p["ln4"]))

    def classify(p, momenta, features, missing):
        alive = jnp.arange(parts) < parts - missing[:, None]
        bias = _apply(p["pair1"], pairs(momenta).astype(dtype))
        bias = _apply(p["pair2"], jax.nn.gelu(bias)).astype(jnp.float32)
        hidden = jnp.where(alive[:, None, None], 0.0, -1e9)
        bias = jnp.moveaxis(bias, -1, 1) + hidden
        x = jnp.concatenate([momenta.astype(dtype), features], axis=-1)
        x = _apply(p["in2"], jax.nn.gelu(_apply(p["in1"], x)))
        for block in p["layers"]:
            x = jnp.where(alive[..., None], layer(block, x, x, bias), 0)
        token = jnp.broadcast_to(p["class"], (b, 1, n))
        for block in p["class_layers"]:
            both = jnp.concatenate([token, x], axis=1)
            token = layer(block, token, both, jnp.pad(hidden, ((0, 0), (0, 0), (0, 0), (1, 0))))
        return jax.nn.log_softmax(_apply(p["head"], token[:, 0]).astype(jnp.float32), axis=-1)

    def block():
        p = {z: _dense(n, n, dtype) for z in "qkvo"} | {"up": _dense(n, 4 * n, dtype), "down": _dense(4 * n, n, dtype)}
        return p | {
            "ln1": _ln(n),
            "ln2": _ln(n),
            "ln3": _ln(n),
            "ln4": _ln(4 * n),
            "gamma": normal(h, dtype=dtype, offset=1.0),
        }

    p = {"pair1": _dense(4, 64, dtype), "pair2": _dense(64, h, dtype), "in1": _dense(16, 4 * n, dtype)}
    p |= {"in2": _dense(4 * n, n, dtype), "class": normal(1, 1, n, dtype=dtype), "head": _dense(n, classes, dtype)}
    p |= {"layers": [block() for _ in range(4)], "class_layers": [block() for _ in range(2)]}
    return Built(
        classify, (p, normal(b, parts, 3, scale=0.8), normal(b, parts, 13, dtype=dtype), integers(b, below=parts // 2))
    )


@program("brain-waves-filtered-in-time-then-over-the-scalp", GROUP)
def _eegnet(size: Size) -> Built:
    """This decodes brain waves by filters in time and then over electrodes, as EEGNet (Lawhern, 2018), with attention."""
    b, electrodes, t, filters, depth, kernel, classes = pick(
        size, (128, 62, 1125, 16, 2, 65, 4), (4, 22, 375, 8, 2, 33, 4), (2, 3, 65, 2, 2, 5, 3)
    )
    dtype, n = half(size), filters * depth
    numbers = ("NHWC", "HWIO", "NHWC")

    def bn(p, x):
        scale = p["scale"] * lax.rsqrt(jnp.exp(p["var"]) + 1e-3)
        return (x * scale + (p["bias"] - p["mean"] * scale)).astype(dtype)

    def conv(x, w, groups=1, padding="SAME"):
        return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=numbers, feature_group_count=groups)

    def pool(x, width):
        keep = x.shape[2] // width * width
        return x[:, :, :keep].reshape(*x.shape[:2], keep // width, width, x.shape[-1]).mean(axis=3)

    def decode(p, waves):
        x = waves.astype(jnp.float32)
        x = (x - x.mean(axis=-1, keepdims=True)) / (x.std(axis=-1, keepdims=True) + 1e-6)
        x = (x - x.mean(axis=1, keepdims=True)).astype(dtype)[..., None]
        x = bn(p["bn1"], conv(x, p["time"]))
        x = bn(p["bn2"], conv(x, p["space"], filters, "VALID"))
        x = pool(jax.nn.elu(x), 4)
        x = conv(conv(x, p["narrow"], n), p["point"])
        x = pool(jax.nn.elu(bn(p["bn3"], x)), 8)[:, 0]
        q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
        scores = jnp.einsum("bqn,bkn->bqk", q, k).astype(jnp.float32) * n**-0.5
        x = x + jnp.einsum("bqk,bkn->bqn", jax.nn.softmax(scores, axis=-1).astype(dtype), v)
        logits = _apply(p["head"], x.reshape(b, -1)).astype(jnp.float32)
        probs = jax.nn.softmax(logits, axis=-1)
        return probs, -jnp.sum(probs * jnp.log(probs + 1e-9), axis=-1)

    def stats(c):
        return {"scale": normal(c, offset=1.0, scale=0.1)} | {z: normal(c, scale=0.1) for z in ("bias", "mean", "var")}

    p = {
        "bn1": stats(filters),
        "bn2": stats(n),
        "bn3": stats(n),
        "time": normal(1, kernel, 1, filters, dtype=dtype, scale=0.15),
    }
    p |= {
        "space": normal(electrodes, 1, 1, n, dtype=dtype, scale=electrodes**-0.5),
        "qkv": weight(n, 3 * n, dtype=dtype),
    }
    p |= {"narrow": normal(1, 16, 1, n, dtype=dtype, scale=0.25), "point": weight(1, 1, n, n, dtype=dtype)}
    p |= {"head": _dense(t // 4 // 8 * n, classes, dtype)}
    return Built(decode, (p, normal(b, electrodes, t, dtype=dtype)))


@program("molecules-gated-bonds-beside-attention-over-all-atoms", GROUP)
def _graph_gps(size: Size) -> Built:
    """This predicts a property of molecules by gated bonds beside attention over all atoms, as GraphGPS (2022).

    Bonds live in a flat list with padding, atoms are laid out densely for the attention, and both results are added.
    """
    graphs, atoms, edges, n, h, walk = pick(
        size, (256, 37, 20011, 96, 4, 16), (32, 23, 1500, 64, 4, 16), (3, 5, 17, 8, 2, 4)
    )
    dtype, nodes, d = half(size), graphs * atoms, n // h

    def run(p, kinds, walks, bonds, sender, step, counts):
        graph = sender // atoms
        alive = (jnp.arange(atoms) < (atoms // 3 + counts)[:, None]).reshape(nodes)
        receiver = graph * atoms + (sender + step + 1) % atoms
        real = (alive[sender] & alive[receiver])[:, None]
        walks = walks.astype(jnp.float32)
        walks = ((walks - walks.mean(axis=0)) * lax.rsqrt(walks.var(axis=0) + 1e-5)).astype(dtype)
        x = jnp.concatenate([p["atom"][kinds], walks @ p["walk"]], axis=-1)
        e = p["bond"][bonds]
        mask = jnp.where(alive.reshape(graphs, 1, 1, atoms), 0.0, -1e9)

        def layer(carry, p):
            x, e = carry
            a, bx, dx, ex = jnp.split(x @ p["nodes"], 4, axis=-1)
            raw = e @ p["edges"] + dx[receiver] + ex[sender]
            gate = jnp.where(real, jax.nn.sigmoid(raw.astype(jnp.float32)), 0.0)
            top = jax.ops.segment_sum(gate * bx[sender].astype(jnp.float32), receiver, nodes)
            low = jax.ops.segment_sum(gate, receiver, nodes)
            local = x + jax.nn.relu(_layer_norm(a + (top / (low + 1e-6)).astype(dtype), p["ln1"]))
            e = e + jax.nn.relu(_layer_norm(raw, p["ln2"]))
            q, k, v = jnp.moveaxis((x @ p["qkv"]).reshape(graphs, atoms, 3, h, d), 2, 0)
            scores = jnp.einsum("gqhd,gkhd->ghqk", q, k).astype(jnp.float32) * d**-0.5 + mask
            y = jnp.einsum("ghqk,gkhd->gqhd", jax.nn.softmax(scores, axis=-1).astype(dtype), v)
            whole = _layer_norm(x + y.reshape(nodes, n) @ p["out"], p["ln3"])
            x = local + whole
            x = _layer_norm(x + jax.nn.relu(x @ p["up"]) @ p["down"], p["ln4"])
            return (x, e), None

        (x, _), _ = lax.scan(layer, (x, e), p["layers"])
        weights = alive.reshape(graphs, atoms, 1).astype(dtype)
        pooled = jnp.sum(x.reshape(graphs, atoms, n) * weights, axis=1) / jnp.sum(weights, axis=1)
        return (jax.nn.relu(pooled @ p["head1"]) @ p["head2"]).astype(jnp.float32)

    def stack(*shape):
        return weight(4, *shape, dtype=dtype)

    def ln():
        return {"scale": normal(4, n, scale=0.1, offset=1.0), "bias": normal(4, n, scale=0.1)}

    layers = {"nodes": stack(n, 4 * n), "edges": stack(n, n), "qkv": stack(n, 3 * n), "out": stack(n, n)}
    layers |= {"up": stack(n, 2 * n), "down": stack(2 * n, n), "ln1": ln(), "ln2": ln(), "ln3": ln(), "ln4": ln()}
    p = {
        "atom": normal(28, n - 8, dtype=dtype),
        "bond": normal(5, n, dtype=dtype),
        "walk": weight(walk, 8, dtype=dtype),
    }
    p |= {"layers": layers, "head1": weight(n, n // 2, dtype=dtype), "head2": weight(n // 2, 1, dtype=dtype)}
    inputs = (integers(nodes, below=28), normal(nodes, walk), integers(edges, below=5), integers(edges, below=nodes))
    return Built(run, (p, *inputs, integers(edges, below=3), integers(graphs, below=2 * atoms // 3)))


@program("film-frames-between-two-by-flows-that-warp-them", GROUP)
def _rife(size: Size) -> Built:
    """This makes the frame between two frames of a film by flows refined at three scales, as RIFE (Huang, 2020).

    Each scale shrinks the frames, guesses both flows and a mask by convolutions, and warps the frames by the flows.
    """
    b, high, wide, n = pick(size, (2, 256, 448, 48), (1, 96, 160, 32), (1, 8, 16, 4))
    dtype = half(size)

    def conv(p, x, stride=1):
        y = lax.conv_general_dilated(x, p["w"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return y + p["b"]

    def warp(image, flow):
        y = jnp.arange(high)[:, None] + flow[..., 1]
        x = jnp.arange(wide) + flow[..., 0]
        y, x = jnp.clip(y, 0, high - 1), jnp.clip(x, 0, wide - 1)
        y0, x0 = jnp.floor(y).astype(jnp.int32), jnp.floor(x).astype(jnp.int32)
        y1, x1 = jnp.minimum(y0 + 1, high - 1), jnp.minimum(x0 + 1, wide - 1)
        fy, fx = (y - y0)[..., None], (x - x0)[..., None]
        at = jax.vmap(lambda image, y, x: image[y, x])
        top = at(image, y0, x0) * (1 - fx) + at(image, y0, x1) * fx
        low = at(image, y1, x0) * (1 - fx) + at(image, y1, x1) * fx
        return top * (1 - fy) + low * fy

    def resize(x, factor):
        return jax.image.resize(x, (b, int(x.shape[1] * factor), int(x.shape[2] * factor), x.shape[3]), "bilinear")

    def between(p, first, second):
        flow, mask = jnp.zeros((b, high, wide, 4)), jnp.zeros((b, high, wide, 1))
        warped = first, second
        for block, scale in zip(p, (4, 2, 1), strict=True):
            x = jnp.concatenate([first, second, *warped, mask], axis=-1)
            x = jnp.concatenate([resize(x, 1 / scale), resize(flow, 1 / scale) / scale], axis=-1).astype(dtype)
            x = jax.nn.leaky_relu(conv(block["in"], x, 2), 0.2)
            for inner in block["body"]:
                x = jax.nn.leaky_relu(conv(inner, x) * inner["beta"] + x, 0.2)
            x = conv(block["out"], resize(x, 2)).astype(jnp.float32)
            x = resize(x, scale)
            flow, mask = flow + x[..., :4] * scale, mask + x[..., 4:]
            warped = warp(first, flow[..., :2]), warp(second, flow[..., 2:])
        share = jax.nn.sigmoid(mask)
        return jnp.clip(warped[0] * share + warped[1] * (1 - share), 0, 1), flow, share

    def kernel(i, o):
        return {"w": normal(3, 3, i, o, dtype=dtype, scale=(9 * i) ** -0.5), "b": normal(o, dtype=dtype, scale=0.05)}

    def block():
        body = [kernel(n, n) | {"beta": normal(n, dtype=dtype, scale=0.1, offset=1.0)} for _ in range(3)]
        return {"in": kernel(17, n), "body": body, "out": kernel(n, 5)}

    frame = normal(b, high, wide, 3, scale=0.2, offset=0.5)
    return Built(between, ([block() for _ in range(3)], frame, frame))


@program("rays-through-three-planes-of-features-and-a-small-net", GROUP)
def _triplane(size: Size) -> Built:
    """This renders rays through three crossed planes of features, first evenly and then where light is, as EG3D (2021)."""
    rays, coarse, fine, side, n, hidden = pick(
        size, (4096, 48, 48, 256, 32, 64), (300, 24, 24, 64, 16, 32), (5, 4, 3, 6, 4, 8)
    )
    dtype = half(size)

    def sample(planes, points):
        pairs = jnp.stack([points[..., jnp.array(axes)] for axes in ((0, 1), (0, 2), (1, 2))])
        at = (jnp.clip(pairs, -1, 1) + 1) * 0.5 * (side - 1)
        low = jnp.clip(jnp.floor(at).astype(jnp.int32), 0, side - 2)
        f = (at - low).astype(dtype)

        def one(plane, low, f):
            u, v = low[..., 0], low[..., 1]
            fu, fv = f[..., :1], f[..., 1:]
            near = plane[u, v] * (1 - fv) + plane[u, v + 1] * fv
            return near * (1 - fu) + (plane[u + 1, v] * (1 - fv) + plane[u + 1, v + 1] * fv) * fu

        return jnp.mean(jax.vmap(one)(planes, low, f), axis=0)

    def field(p, points):
        y = jax.nn.softplus(_apply(p["in"], sample(p["planes"], points)))
        y = _apply(p["out"], y).astype(jnp.float32)
        return jax.nn.softplus(y[..., 0] - 1), jax.nn.sigmoid(y[..., 1:]) * 1.002 - 0.001

    def march(depth, density, colour):
        gap = jnp.diff(depth, axis=-1)
        density = 0.5 * (density[:, 1:] + density[:, :-1])
        colour = 0.5 * (colour[:, 1:] + colour[:, :-1])
        alpha = 1 - jnp.exp(-density * gap)
        light = jnp.cumprod(jnp.concatenate([jnp.ones((rays, 1)), 1 - alpha + 1e-10], axis=-1), axis=-1)[:, :-1]
        share = alpha * light
        return (
            share,
            jnp.einsum("rs,rsc->rc", share, colour),
            jnp.sum(share * 0.5 * (depth[:, 1:] + depth[:, :-1]), axis=-1),
        )

    def render(p, origins, ways, seed):
        way = ways / jnp.linalg.norm(ways, axis=-1, keepdims=True)
        key, other = jax.random.split(jax.random.key(seed))
        depth = jnp.linspace(0.2, 2.2, coarse) + jax.random.uniform(key, (rays, coarse)) * 2 / (coarse - 1)
        density, colour = field(p, origins[:, None] + depth[..., None] * way[:, None])
        share, _, _ = march(depth, density, colour)
        share = jnp.pad(share, ((0, 0), (1, 1)), mode="edge")
        share = jnp.maximum(share[:, :-1], share[:, 1:]) + 0.01
        total = jnp.cumsum(share / jnp.sum(share, axis=-1, keepdims=True), axis=-1)
        draws = jax.random.uniform(other, (rays, fine)) * total[:, -1:]
        index = jnp.clip(jax.vmap(jnp.searchsorted)(total, draws), 0, coarse - 1)
        more = jnp.take_along_axis(depth, index, axis=-1) + 0.3 * (draws - 0.5) / coarse
        density2, colour2 = field(p, origins[:, None] + more[..., None] * way[:, None])
        depth = jnp.concatenate([depth, more], axis=-1)
        order = jnp.argsort(depth, axis=-1)
        density = jnp.take_along_axis(jnp.concatenate([density, density2], axis=-1), order, axis=-1)
        colour = jnp.take_along_axis(jnp.concatenate([colour, colour2], axis=1), order[..., None], axis=1)
        share, colour, far = march(jnp.take_along_axis(depth, order, axis=-1), density, colour)
        return colour * 2 - 1, far, jnp.sum(share, axis=-1)

    p = {
        "planes": normal(3, side, side, n, dtype=dtype),
        "in": _dense(n, hidden, dtype),
        "out": _dense(hidden, 33, dtype),
    }
    return Built(render, (p, normal(rays, 3, scale=0.3), normal(rays, 3), integers(below=999)))


@program("points-of-a-mesh-softly-cut-into-physical-tokens", GROUP)
def _transolver(size: Size) -> Built:
    """This predicts a field on mesh points that attend as a few softly cut tokens, as Transolver (Wu, 2024)."""
    b, points, n, h, slices = pick(size, (2, 9001, 256, 8, 64), (1, 1501, 96, 4, 32), (2, 7, 8, 2, 3))
    dtype, d = half(size), n // h

    def layer(x, p):
        y = _layer_norm(x, p["ln1"])
        value = (y @ p["value"]).reshape(b, points, h, d)
        scores = jnp.einsum("bphd,ds->bhps", (y @ p["place"]).reshape(b, points, h, d), p["slice"])
        share = jax.nn.softmax(scores.astype(jnp.float32) / jnp.clip(p["warmth"], 0.1, 5.0)[:, None, None], axis=-1)
        mass = jnp.sum(share, axis=2)
        share = share.astype(dtype)
        token = jnp.einsum("bphd,bhps->bhsd", value, share) / (mass + 1e-5)[..., None].astype(dtype)
        q, k, v = jnp.split(token @ p["qkv"], 3, axis=-1)
        inner = jnp.einsum("bhsd,bhzd->bhsz", q, k).astype(jnp.float32) * d**-0.5
        token = jnp.einsum("bhsz,bhzd->bhsd", jax.nn.softmax(inner, axis=-1).astype(dtype), v)
        y = jnp.einsum("bhsd,bhps->bphd", token, share).reshape(b, points, n)
        x = x + y @ p["out"]
        return x + jax.nn.gelu(_layer_norm(x, p["ln2"]) @ p["up"]) @ p["down"], None

    def predict(p, places, normals):
        edge = jnp.linspace(-1, 1, 4)
        grid = jnp.stack(jnp.meshgrid(edge, edge, edge, indexing="ij"), axis=-1).reshape(-1, 3)
        far = jnp.sqrt(jnp.sum((places[:, :, None] - grid) ** 2, axis=-1) + 1e-6)
        x = jnp.concatenate([places, normals, far], axis=-1).astype(dtype)
        x = _apply(p["in2"], jax.nn.gelu(_apply(p["in1"], x)))
        x, _ = lax.scan(layer, x, p["layers"])
        return _apply(p["head"], _layer_norm(x, p["last"])).astype(jnp.float32)

    def stack(*shape):
        return weight(5, *shape, dtype=dtype)

    def ln():
        return {"scale": normal(5, n, scale=0.1, offset=1.0), "bias": normal(5, n, scale=0.1)}

    layers = {
        "value": stack(n, n),
        "place": stack(n, n),
        "slice": stack(d, slices),
        "qkv": stack(d, 3 * d),
        "out": stack(n, n),
    }
    layers |= {"warmth": normal(5, h, scale=0.1, offset=0.5), "up": stack(n, 2 * n), "down": stack(2 * n, n)}
    p = {"layers": layers | {"ln1": ln(), "ln2": ln()}, "in1": _dense(70, 2 * n, dtype), "in2": _dense(2 * n, n, dtype)}
    p |= {"head": _dense(n, 4, dtype), "last": _ln(n)}
    return Built(predict, (p, normal(b, points, 3), normal(b, points, 3)))
