"""Lanes, shifted frames, closed-form cells, sparse voxels and whole-number nets, the thirty-third set: its author saw no plan."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program
from benchmarks.workloads.twenty_fifth_parts import dense, dense_of, layer_norm, norm_of
from benchmarks.workloads.twenty_sixth_parts import drawn

GROUP = "thirty-third"


@program("lanes-of-a-road-as-one-choice-of-cell-per-row-linen", GROUP)
def _lanes(size: Size) -> Built:
    """This program finds the lanes of a road by choosing, in each of a few rows of a photograph, the cell where a lane passes.

    It is Ultra-Fast-Lane-Detection (Qin, 2020; cfzd/Ultra-Fast-Lane-Detection), with linen: a residual network reads
    [batch, rows, columns, 3], and two wide layers give a softmax over cells, one of which means that there is no lane.
    """
    from flax import linen as nn

    b, high, wide, c, n, cells, anchors, lanes = pick(
        size, (16, 288, 800, 64, 2048, 100, 56, 4), (1, 96, 192, 16, 256, 40, 18, 4), (1, 32, 64, 2, 8, 5, 3, 2)
    )
    dtype = half(size)
    how = {"dtype": dtype, "param_dtype": dtype}

    def norm(x):
        return nn.BatchNorm(use_running_average=True, **how)(x)

    class Unit(nn.Module):
        """This is a residual unit of two convolutions."""

        c: int
        stride: int

        @nn.compact
        def __call__(self, x):
            y = nn.Conv(self.c, (3, 3), self.stride, padding=1, use_bias=False, **how)(x)
            y = nn.Conv(self.c, (3, 3), padding=1, use_bias=False, **how)(nn.relu(norm(y)))
            if self.stride > 1 or x.shape[-1] != self.c:
                x = norm(nn.Conv(self.c, (1, 1), self.stride, use_bias=False, **how)(x))
            return nn.relu(norm(y) + x)

    class Lanes(nn.Module):
        """This is the whole network."""

        @nn.compact
        def __call__(self, x):
            x = nn.relu(norm(nn.Conv(c, (7, 7), 2, padding=3, use_bias=False, **how)(x)))
            x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
            for k in range(4):
                x = Unit(c << k, 1 if k == 0 else 2)(x)
                x = Unit(c << k, 1)(x)
            x = nn.Conv(8, (1, 1), **how)(x).reshape(b, -1)
            x = nn.relu(nn.Dense(n, **how)(x))
            return nn.Dense((cells + 1) * anchors * lanes, **how)(x).reshape(b, cells + 1, anchors, lanes)

    model = Lanes()

    def run(p, photograph):
        """This gives where lanes pass, in pixels, whether they are there, and how sure that is."""
        bright = photograph.astype(jnp.float32) / 255
        mean, spread = jnp.array([0.485, 0.456, 0.406]), jnp.array([0.229, 0.224, 0.225])
        scores = model.apply(p, ((bright - mean) / spread).astype(dtype)).astype(jnp.float32)
        chance = jax.nn.softmax(scores[:, :-1], axis=1)
        place = jnp.einsum("bcal,c->bal", chance, jnp.arange(cells) + 0.5)
        none = jax.nn.softmax(scores, axis=1)[:, -1]
        there = jnp.argmax(scores, axis=1) < cells
        seen = jnp.sum(there, axis=1) > 2
        pixel = jnp.where(there & seen[:, None], place * (wide / cells), -1.0)
        return pixel, seen, none

    inputs = integers(b, high, wide, 3, below=256)
    structs = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((b, high, wide, 3), dtype))
    return Built(run, (drawn(structs), inputs))


@program("frames-lend-some-channels-to-their-neighbours-actions-haiku", GROUP)
def _lent(size: Size) -> Built:
    """This program names the actions in short films with a network of pictures whose frames lend channels to their neighbours.

    It is the temporal shift module (Lin, 2019; mit-han-lab/temporal-shift-module), with haiku: before each bottleneck an eighth
    of the channels comes from the frame before and an eighth from the frame after, and norms are folded into convolutions.
    """
    import haiku as hk

    b, t, side, c, depth, kinds = pick(
        size, (8, 8, 224, 64, (3, 4, 6, 3), 400), (1, 4, 48, 16, (1, 1, 2, 1), 50), (1, 2, 16, 8, (1, 1), 5)
    )
    dtype = half(size)

    def lent(x):
        """This moves an eighth of the channels one frame on, and an eighth one frame back."""
        y = x.reshape(b, t, *x.shape[1:])
        part = x.shape[-1] // 8
        zero = jnp.zeros_like(y[:, :1, ..., :part])
        after = jnp.concatenate([y[:, 1:, ..., :part], zero], axis=1)
        before = jnp.concatenate([zero, y[:, :-1, ..., part : 2 * part]], axis=1)
        return jnp.concatenate([after, before, y[..., 2 * part :]], axis=-1).reshape(x.shape)

    def unit(x, wide, stride):
        """This is a bottleneck whose branch sees lent channels."""
        y = jax.nn.relu(hk.Conv2D(wide, 1)(lent(x)))
        y = jax.nn.relu(hk.Conv2D(wide, 3, stride)(y))
        y = hk.Conv2D(4 * wide, 1)(y)
        if x.shape[-1] != 4 * wide or stride > 1:
            x = hk.Conv2D(4 * wide, 1, stride)(x)
        return jax.nn.relu(0.7 * (x + y))

    def net(film):
        x = film.reshape(b * t, side, side, 3)
        x = jax.nn.relu(hk.Conv2D(c, 7, 2)(x))
        x = hk.max_pool(x, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for k, many in enumerate(depth):
            for j in range(many):
                x = unit(x, c << k, 2 if k and not j else 1)
        x = jnp.mean(x, axis=(1, 2), dtype=jnp.float32).astype(dtype)
        return hk.Linear(kinds)(x).reshape(b, t, kinds)

    model = hk.without_apply_rng(hk.transform(net))

    def run(p, film):
        """This gives the five likeliest actions of each film, and how far frames agree."""
        scores = model.apply(p, film).astype(jnp.float32)
        whole = jax.nn.log_softmax(jnp.mean(scores, axis=1), axis=-1)
        each = jax.nn.log_softmax(scores, axis=-1)
        apart = jnp.sum(jnp.exp(whole)[:, None] * (whole[:, None] - each), axis=-1)
        return lax.top_k(whole, 5 if kinds > 5 else 2), apart

    film = normal(b, t, side, side, 3, dtype=dtype)
    return Built(run, (drawn(jax.eval_shape(model.init, jax.random.key(0), film.struct)), film))


@program("a-car-steered-by-cells-whose-time-runs-in-closed-form-equinox", GROUP)
def _steered(size: Size) -> Built:
    """This program steers a car from grey frames that come at uneven times, with cells whose dynamics are known in closed form.

    It is the closed-form continuous-time network (Hasani, 2022; mlech26l/ncps), with equinox: convolutions read each frame of
    [batch, time, rows, columns], and a gate of the time since the last frame blends two states; wires between units are sparse.
    """
    import equinox as eqx

    b, t, high, wide, c, back, units = pick(
        size, (32, 64, 66, 200, 24, 128, 64), (2, 12, 66, 100, 8, 48, 24), (1, 3, 36, 40, 2, 5, 4)
    )

    class Eye(eqx.Module):
        """This gives features of one frame."""

        convs: list
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 6)
            plan = [(1, c, 5, 2), (c, 3 * c // 2, 5, 2), (3 * c // 2, 2 * c, 3, 2), (2 * c, 2 * c, 3, 1)]
            self.convs = [eqx.nn.Conv2d(i, o, k, s, key=key) for (i, o, k, s), key in zip(plan, keys, strict=False)]
            shape = (high, wide)
            for _, _, k, s in plan:
                shape = tuple((z - k) // s + 1 for z in shape)
            self.head = eqx.nn.Linear(2 * c * math.prod(shape), back, key=keys[5])

        def __call__(self, frame):
            x = (frame - jnp.mean(frame)) * lax.rsqrt(jnp.var(frame) + 1e-4)
            x = x[None]
            for conv in self.convs:
                x = jax.nn.elu(conv(x))
            return self.head(x.reshape(-1))

    class Cell(eqx.Module):
        """This moves the states of units on by some time."""

        trunk: eqx.nn.Linear
        ways: list

        def __init__(self, key):
            keys = jax.random.split(key, 5)
            self.trunk = eqx.nn.Linear(back + units, back, key=keys[0])
            self.ways = [eqx.nn.Linear(back, units, key=k) for k in keys[1:]]

        def __call__(self, x, state, wires, gap):
            y = 1.7159 * jnp.tanh(0.666 * self.trunk(jnp.concatenate([x, state])))
            one, two, rate, shift = self.ways
            low, top = (jnp.tanh((way.weight * wires) @ y + way.bias) for way in (one, two))
            share = jax.nn.sigmoid(-rate(y) * gap + shift(y))
            return low * (1 - share) + share * top

    class Driver(eqx.Module):
        """This is the whole driver."""

        eye: Eye
        cells: list
        hand: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 4)
            self.eye = Eye(keys[0])
            self.cells = [Cell(keys[1]), Cell(keys[2])]
            self.hand = eqx.nn.Linear(units, 2, key=keys[3])

        def __call__(self, frames, gaps, wires):
            seen = jax.vmap(self.eye)(frames)

            def step(states, now):
                x, gap = now
                first = self.cells[0](x, states[0], wires[0], gap)
                fed = jnp.pad(first, (0, max(0, back - units)))[:back]
                second = self.cells[1](fed, states[1], wires[1], gap)
                return (first, second), (self.hand(second), first)

            zero = jnp.zeros(units)
            states, (hand, course) = lax.scan(step, (zero, zero), (seen, gaps))
            return hand, course, states

    shapes = eqx.filter_eval_shape(Driver, jax.random.key(0))
    arrays, still = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def run(p, frames, gaps, wires):
        """This gives the angle and the speed at each frame, states at the end, and how busy units are."""
        driver = eqx.combine(p, still)
        gaps = jnp.exp(0.3 * gaps)
        hand, course, states = jax.vmap(driver, in_axes=(0, 0, None))(frames, gaps, jnp.where(wires > 0, 1.3, 0.0))
        angle = 0.6 * jnp.tanh(hand[..., 0])
        return angle, jax.nn.softplus(hand[..., 1]), states, jnp.mean(jnp.abs(course), axis=(0, 1))

    inputs = (normal(b, t, high, wide), normal(b, t), integers(2, units, back, below=2))
    return Built(run, (drawn(arrays), *inputs))


@program("filled-cells-of-a-room-convolved-where-sorted-keys-meet", GROUP)
def _filled(size: Size) -> Built:
    """This program names what each point of a scanned room belongs to, with filters that only touch cells that hold points.

    It is a small MinkowskiNet (Choy, 2019; NVIDIA/MinkowskiEngine): points [points, 3] become cells by sorting, 27 neighbours are
    found by search among sorted keys, and a coarse level is read and joined again.
    """
    n, side, c, kinds, depth = pick(size, (131072, 96, 64, 20, 2), (3000, 24, 24, 13, 1), (12, 4, 4, 3, 1))
    dtype, far = half(size), 2**30
    offsets = [(x, y, z) for x in (-1, 0, 1) for y in (-1, 0, 1) for z in (-1, 0, 1)]

    def key_of(place, wide):
        """This is one number per cell; cells out of the room have none."""
        inside = jnp.all((place >= 0) & (place < wide), axis=-1)
        return jnp.where(inside, (place[..., 0] * wide + place[..., 1]) * wide + place[..., 2], -1)

    def cells_of(key):
        """This gives sorted keys without repeats [n], and the cell of each thing."""
        order = jnp.argsort(key)
        ordered = key[order]
        fresh = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
        rank = jnp.cumsum(fresh) - 1
        keys = jnp.full(n, far).at[rank].set(ordered)
        return keys, jnp.zeros(n, jnp.int32).at[order].set(rank)

    def near(keys, place, wide):
        """These are neighbours [27, n] of cells; a cell that is not there is n."""

        def one(offset):
            wanted = key_of(place + offset, wide)
            at = jnp.searchsorted(keys, wanted)
            hit = (keys[jnp.minimum(at, n - 1)] == wanted) & (keys < far)
            return jnp.where(hit, at, n)

        return lax.map(one, jnp.array(offsets))

    def filtered(kernel, x, neighbours):
        """This sums neighbours through a matrix for each offset."""
        x = jnp.concatenate([x, jnp.zeros((1, x.shape[1]), x.dtype)])

        def one(total, now):
            at, w = now
            return total + jnp.matmul(x[at], w, preferred_element_type=jnp.float32), None

        return lax.scan(one, jnp.zeros((n, kernel.shape[-1])), (neighbours, kernel))[0].astype(dtype)

    def unit(q, x, neighbours):
        """This is a residual unit."""
        y = filtered(q["one"], jax.nn.relu(layer_norm(q["norm1"], x)), neighbours)
        return x + filtered(q["two"], jax.nn.relu(layer_norm(q["norm2"], y)), neighbours)

    def meaned(x, cell):
        """This is the mean of what falls in each cell."""
        total = jax.ops.segment_sum(x.astype(jnp.float32), cell, n)
        many = jax.ops.segment_sum(jnp.ones(n), cell, n)
        return total / jnp.maximum(many, 1)[:, None]

    def run(p, point, colour):
        """This gives scores of kinds per point, and how many cells hold points at both levels."""
        keys, cell = cells_of(key_of(point, side))
        place = jnp.stack([keys // side**2, keys // side % side, keys % side], axis=-1)
        place = jnp.where(keys[:, None] < far, place, -2)
        fine = near(keys, place, side)
        x = filtered(p["stem"], meaned(colour, cell).astype(dtype), fine)
        for q in p["fine"]:
            x = unit(q, x, fine)
        half_side = side // 2
        coarse_key = jnp.where(keys < far, key_of(place // 2, half_side), far)
        coarse_keys, parent = cells_of(coarse_key)
        down = jnp.stack([dense(q, x) for q in p["down"]])
        corner = jnp.sum((place % 2) * jnp.array([4, 2, 1]), axis=-1)
        y = jnp.take_along_axis(down, corner[None, :, None], axis=0)[0]
        y = jnp.where(keys[:, None] < far, y, 0)
        y = jax.ops.segment_sum(y.astype(jnp.float32), parent, n).astype(dtype)
        spot = jnp.stack(
            [coarse_keys // half_side**2, coarse_keys // half_side % half_side, coarse_keys % half_side], -1
        )
        coarse = near(coarse_keys, jnp.where(coarse_keys[:, None] < far, spot, -2), half_side)
        for q in p["coarse"]:
            y = unit(q, y, coarse)
        x = jnp.concatenate([x, dense(p["up"], y)[parent]], axis=-1)
        x = jax.nn.gelu(dense(p["join"], x))[cell]
        scores = dense(p["head"], layer_norm(p["norm"], x)).astype(jnp.float32)
        return scores, jnp.argmax(scores, axis=-1), jnp.stack([jnp.sum(keys < far), jnp.sum(coarse_keys < far)])

    def kernel(i, o):
        return normal(27, i, o, dtype=dtype, scale=(6 * i) ** -0.5)

    def unit_of(w):
        return {"one": kernel(w, w), "two": kernel(w, w), "norm1": norm_of(w, dtype), "norm2": norm_of(w, dtype)}

    p = {
        "stem": kernel(6, c),
        "fine": [unit_of(c) for _ in range(depth)],
        "down": [dense_of(c, 2 * c, dtype) for _ in range(8)],
        "coarse": [unit_of(2 * c) for _ in range(depth)],
        "up": dense_of(2 * c, c, dtype),
        "join": dense_of(2 * c, c, dtype),
        "norm": norm_of(c, dtype),
        "head": dense_of(c, kinds, dtype),
    }
    return Built(run, (p, integers(n, 3, below=side), normal(n, 6, dtype=dtype)))


@program("a-camera-chip-that-counts-in-whole-numbers-only", GROUP)
def _whole(size: Size) -> Built:
    """This program tells whether people stand before a small camera, with bytes and whole numbers from end to end.

    It is a quantised MobileNetV2 as on chips (Jacob, 2018; tensorflow/tflite-micro): bytes are multiplied and summed in 32 bits,
    each channel has a multiplier and a shift, noughts of layers differ, and residuals are added after being scaled alike.
    """
    b, side, c, depth, wide = pick(size, (256, 96, 32, 3, 6), (16, 96, 16, 2, 6), (1, 8, 4, 1, 2))
    byte = jnp.dtype(jnp.int8)

    def bytes_of(*shape):
        return Random(shape, byte, below=256)

    def scaled(total, factor, taps, louder=0):
        """This brings sums of `taps` products to bytes, by a multiplier per channel and a shift."""
        shift = round(math.log2(112 * math.sqrt(taps) * 74)) - louder
        total = ((total + 64) >> 7) * (12288 + factor)
        return (total + (1 << (shift - 1))) >> shift

    def clipped(x, nought, low=-128):
        return jnp.clip(x + nought, low, 127).astype(jnp.int8)

    def mixed(q, x, nought, louder=0):
        """This multiplies channels of bytes, and takes off what the nought adds."""
        total = jnp.matmul(x, q["w"], preferred_element_type=jnp.int32)
        total = total - nought * jnp.sum(q["w"].astype(jnp.int32), axis=0) + q["b"] - 500
        return scaled(total, q["factor"], q["w"].shape[0], louder)

    def spread(q, x, nought, stride):
        """This filters each channel with nine taps."""
        high = x.shape[1]
        x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=nought).astype(jnp.int32) - nought
        total = jnp.zeros((), jnp.int32)
        for i in range(3):
            for j in range(3):
                total = total + x[:, i : i + high : stride, j : j + high : stride] * q["w"][3 * i + j].astype(jnp.int32)
        return scaled(total + q["b"] - 500, q["factor"], 9)

    def block(q, x, nought, stride):
        """This widens, filters and narrows channels; a residual is added where shapes agree."""
        y = clipped(mixed(q["up"], x, nought), -128)
        y = clipped(spread(q["depth"], y, -128, stride), -128)
        y = mixed(q["down"], y, -128, louder=1)
        if y.shape == x.shape:
            y = ((x.astype(jnp.int32) - nought) * 11585 + y * 11585 + (1 << 13)) >> 14
        return clipped(y, 3)

    def run(p, picture):
        """This gives two scores of each picture as bytes, their distance, sums of maps, and shares of bytes at their ends."""
        x = (picture - 128).astype(jnp.int8)
        patch = jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)), constant_values=-1)
        cut = [patch[:, i : i + side : 2, j : j + side : 2] for i in range(3) for j in range(3)]
        x = clipped(mixed(p["stem"], jnp.concatenate(cut, axis=-1), -1), -128)
        x, nought, full = clipped(mixed(p["first"], x, -128), 3), 3, []
        for q, stride in zip(p["blocks"], strides, strict=True):
            x = block(q, x, nought, stride)
            full.append(jnp.mean((x == -128) | (x == 127), axis=(1, 2, 3), dtype=jnp.float32))
        area = x.shape[1] * x.shape[2]
        total = jnp.sum(x.astype(jnp.int32), axis=(1, 2))
        mean = clipped(((total - area * nought) * (8192 // area) + 1024) >> 11, 0)
        scores = clipped(mixed(p["head"], mean, 0), 0)
        return scores, scores[:, 1].astype(jnp.int32) - scores[:, 0], total, jnp.stack(full)

    def matrix(i, o):
        return {"w": bytes_of(i, o), "b": integers(o, below=1000), "factor": integers(o, below=4096)}

    blocks, strides, now = [], [], c
    for k in range(3):
        for j in range(depth):
            out = c << k
            q = {"up": matrix(now, wide * now), "down": matrix(wide * now, out), "depth": matrix(9, wide * now)}
            blocks.append(q)
            strides.append(2 if not j else 1)
            now = out
    p = {"stem": matrix(27, c), "first": matrix(c, c), "blocks": blocks, "head": matrix(now, 2)}
    return Built(run, (p, integers(b, side, side, 3, below=256)))
