"""Whole models of films, pictures, speech, bytes and robots, the twenty-third set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import linen_program
from benchmarks.workloads.registry import Built, Size, booleans, gain, half, integers, normal, pick, program, weight
from benchmarks.workloads.twenty_third_parts import convolved, kernel, standard

GROUP = "twenty-third"


def _between(maps, row, column):
    """This reads maps [rows, columns, channels] between their pixels; places outside take the nearest edge."""
    rows, columns = maps.shape[:2]
    row, column = jnp.clip(row, 0, rows - 1.001), jnp.clip(column, 0, columns - 1.001)
    i, j = row.astype(jnp.int32), column.astype(jnp.int32)
    a, c = (row - i)[..., None].astype(maps.dtype), (column - j)[..., None].astype(maps.dtype)
    top = maps[i, j] * (1 - c) + maps[i, j + 1] * c
    return top * (1 - a) + (maps[i + 1, j] * (1 - c) + maps[i + 1, j + 1] * c) * a


@program("points-of-a-film-tracked-by-cost-maps-then-refined-in-time", GROUP)
def _tapir(size: Size) -> Built:
    """This follows points through a film by likeness to every place, then by local refinements over time, as TAPIR (2023)."""
    t, side, points, c, n = pick(size, (24, 256, 201, 128, 384), (7, 96, 37, 48, 96), (3, 32, 3, 4, 8))
    dtype, g, wide, rounds = half(size), side // 8, 3, 2
    offsets = np.indices((2 * wide + 1, 2 * wide + 1)).reshape(2, -1) - wide

    def seen(p, film):
        def unit(q, x, stride):
            y = jax.nn.relu(standard(jnp.moveaxis(x, -1, 1).reshape(*x.shape[:1], x.shape[-1], -1)))
            y = jnp.moveaxis(y.reshape(x.shape[0], x.shape[-1], *x.shape[1:3]), 1, -1)
            return convolved(x, q["skip"], stride) + convolved(jax.nn.relu(convolved(y, q["a"], stride)), q["b"])

        x = convolved(film.astype(dtype), p["stem"], 2)
        for q in p["units"]:
            x = unit(q, x, 2)
        x = x.astype(jnp.float32)
        return (x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)).astype(dtype)

    def first(p, maps, own):
        cost = jnp.einsum("nc,tijc->ntij", own, maps).reshape(-1, g, g, 1)
        x = jax.nn.relu(convolved(cost, p["cost1"]))
        heat = convolved(x, p["cost2"])[..., 0].astype(jnp.float32).reshape(points, t, g * g)
        share = jax.nn.softmax(20 * heat, axis=-1).reshape(points, t, g, g)
        at = jnp.stack([jnp.sum(share, axis=3) @ jnp.arange(g), jnp.sum(share, axis=2) @ jnp.arange(g)], axis=-1)
        pooled = jnp.mean(convolved(x, p["hide1"], 2), axis=(1, 2)).reshape(points, t, -1)
        return at.astype(jnp.float32), (jax.nn.relu(pooled) @ p["hide2"]).astype(jnp.float32)

    def mixed(p, x):
        x = x @ p["enter"]
        for q in p["mixers"]:
            y = jnp.pad(standard(x) * q["norm"], ((0, 0), (1, 1), (0, 0)))
            y = jax.nn.gelu(sum(y[:, i : i + t] * q["time"][i] for i in range(3)))
            x = x + y
            x = x + jax.nn.gelu((standard(x) * q["norm2"]) @ q["up"]) @ q["down"]
        return (standard(x) @ p["leave"]).astype(jnp.float32)

    def model(p, film, when, where):
        maps = seen(p, film)
        small = jnp.mean(maps.reshape(t, g // 2, 2, g // 2, 2, c).astype(jnp.float32), axis=(2, 4)).astype(dtype)
        start = jax.nn.sigmoid(where) * (g - 1)
        own = jax.vmap(lambda i, at: _between(maps[i], at[0], at[1]))(when, start)
        at, hidden = first(p, maps, own)
        owns = jnp.broadcast_to(own[:, None], (points, t, c))
        steps = [at]
        for _ in range(rounds):
            near = []
            for level, scale in ((maps, 1.0), (small, 0.5)):
                row = at[..., 0, None] * scale + offsets[0]
                column = at[..., 1, None] * scale + offsets[1]
                patch = jax.vmap(_between, in_axes=(0, 1, 1), out_axes=1)(level, row, column)
                near.append(jnp.einsum("ntkc,ntc->ntk", patch, owns))
            move = (at - at[:, :1]) / g
            x = jnp.concatenate([*near, owns, move.astype(dtype), hidden.astype(dtype)], axis=-1)
            change = mixed(p, x)
            at, hidden = at + jnp.tanh(change[..., :2]), hidden + change[..., 2:4]
            owns = owns + 0.1 * change[..., 4:].astype(dtype)
            steps.append(at)
        sure = jax.nn.sigmoid(-hidden)
        return jnp.stack(steps) * (side / g), sure[..., 0] * sure[..., 1]

    widths = (c // 4, c // 2, c)
    p = {"stem": kernel(7, 3, widths[0], dtype), "units": []}
    for i, o in ((widths[0], widths[1]), (widths[1], widths[2])):
        p["units"].append({"skip": kernel(1, i, o, dtype), "a": kernel(3, i, o, dtype), "b": kernel(3, o, o, dtype)})
    p |= {"cost1": kernel(3, 1, 16, dtype), "cost2": kernel(3, 16, 1, dtype), "hide1": kernel(3, 16, 32, dtype)}
    p |= {"hide2": weight(32, 2, dtype=dtype), "enter": weight(2 * offsets.shape[1] + c + 4, n, dtype=dtype)}
    p |= {"leave": normal(n, 4 + c, dtype=dtype, scale=0.3 * n**-0.5)}
    p["mixers"] = [
        {"norm": gain(n, dtype), "norm2": gain(n, dtype), "time": normal(3, n, dtype=dtype, scale=0.6)}
        | {"up": weight(n, 4 * n, dtype=dtype), "down": weight(4 * n, n, dtype=dtype)}
        for _ in range(3)
    ]
    return Built(model, (p, normal(t, side, side, 3), integers(points, below=t), normal(points, 2)))


@program("queries-that-look-only-inside-their-own-masks-linen", GROUP)
def _masked_queries(size: Size) -> Built:
    """This parts pictures into things by queries that attend only inside the masks they gave before, as Mask2Former (2022)."""
    import flax.linen as nn

    b, rows, columns, n, h, queries, classes = pick(
        size, (4, 352, 480, 256, 8, 100, 133), (1, 96, 160, 96, 4, 37, 133), (2, 32, 64, 8, 2, 3, 5)
    )
    dtype = half(size)

    class Stage(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x):
            x = nn.Conv(self.width, (2, 2), (2, 2), dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
            y = nn.Conv(self.width, (7, 7), feature_group_count=self.width, dtype=dtype)(x)
            y = nn.gelu(nn.Dense(4 * self.width, dtype=dtype)(nn.LayerNorm(dtype=dtype)(y)))
            return x + nn.Dense(self.width, dtype=dtype)(y)

    def waves(i, j):
        y, x = np.indices((i, j)).reshape(2, -1)[..., None] + 1
        rate = 10000.0 ** (-np.arange(n // 4) / (n // 4)) * 2 * np.pi
        parts = [f(z * rate) for z in (y / i, x / j) for f in (np.sin, np.cos)]
        return jnp.asarray(np.concatenate(parts, axis=-1), dtype)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, pictures):
            x = nn.Conv(n // 4, (4, 4), (4, 4), dtype=dtype)(pictures.astype(dtype))
            levels = [x]
            for width in (n // 2, n, n):
                levels.append(Stage(width)(levels[-1]))
            path, scales = None, []
            for level in levels[::-1]:
                y = nn.GroupNorm(n // 4, dtype=dtype)(nn.Conv(n, (1, 1), dtype=dtype)(level))
                if path is not None:
                    y = y + jax.image.resize(path, y.shape, "nearest")
                path = nn.relu(nn.GroupNorm(n // 4, dtype=dtype)(nn.Conv(n, (3, 3), dtype=dtype)(y)))
                scales.append(path)
            pixels = nn.Conv(n, (1, 1), dtype=dtype)(scales.pop())
            x = self.param("queries", nn.initializers.normal(1.0), (queries, n)).astype(dtype)
            own = self.param("places", nn.initializers.normal(1.0), (queries, n)).astype(dtype)
            x = jnp.broadcast_to(x, (b, queries, n))
            norm, name = nn.LayerNorm(dtype=dtype), nn.Dense(classes + 1, dtype=jnp.float32)
            draws = [nn.Dense(n, dtype=dtype) for _ in range(3)]

            def predict(x):
                y = norm(x)
                drawn = draws[2](nn.relu(draws[1](nn.relu(draws[0](y)))))
                masks = jnp.einsum("bqc,bijc->bqij", drawn, pixels, preferred_element_type=jnp.float32) * n**-0.5
                return name(y), masks

            every = [predict(x)]
            for i, level in enumerate(scales):
                shape = level.shape[1:3]
                flat = level.reshape(b, -1, n) + self.param(f"level{i}", nn.initializers.normal(1.0), (n,)).astype(
                    dtype
                )
                shrunk = jax.image.resize(every[-1][1], (b, queries, *shape), "bilinear").reshape(b, queries, -1)
                inside = shrunk > 0
                inside = inside | ~jnp.any(inside, axis=-1, keepdims=True)
                attend = nn.MultiHeadDotProductAttention(h, dtype=dtype)
                x = nn.LayerNorm(dtype=dtype)(x + attend(x + own, flat + waves(*shape), flat, mask=inside[:, None]))
                y = x + own
                x = nn.LayerNorm(dtype=dtype)(x + nn.MultiHeadDotProductAttention(h, dtype=dtype)(y, y, x))
                y = nn.Dense(n, dtype=dtype)(nn.relu(nn.Dense(4 * n, dtype=dtype)(x)))
                x = nn.LayerNorm(dtype=dtype)(x + y)
                every.append(predict(x))
            names, masks = every[-1]
            chances = nn.softmax(names, axis=-1)[..., :-1]
            whole = nn.sigmoid(masks)
            picture = jnp.einsum("bqk,bqij->bijk", chances, whole)
            sure = jnp.sum(whole * (masks > 0), axis=(2, 3)) / (jnp.sum(masks > 0, axis=(2, 3)) + 1e-6)
            return picture, sure * jnp.max(chances, axis=-1), tuple(k for k, _ in every)

    return linen_program(size, Net(), normal(b, rows, columns, 3))


@program("frames-that-fire-into-words-when-their-weights-fill-up", GROUP)
def _fire(size: Size) -> Built:
    """This reads all words of speech at once from frames that fire when their weights fill up, as Paraformer (Gao, 2022).

    Encoder and decoder layers remember neighbours by depthwise filters of values; clips are padded.
    """
    b, t, inputs, n, h, most, words = pick(
        size, (8, 333, 560, 512, 4, 97, 8404), (1, 121, 560, 160, 4, 37, 2003), (2, 9, 6, 8, 2, 4, 7)
    )
    dtype, reach = half(size), pick(size, 11, 11, 3)

    def remember(x, filters, alive):
        x = jnp.where(alive[..., None], x, 0)
        y = lax.conv_general_dilated(
            x, filters, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=n
        )
        return jnp.where(alive[..., None], x + y, 0)

    def attend(q, k, v, alive):
        q, k, v = (z.reshape(*z.shape[:2], h, n // h) for z in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * (n // h) ** -0.5
        probs = jax.nn.softmax(jnp.where(alive[:, None, None], scores, -1e9), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", probs.astype(dtype), v).reshape(b, -1, n)

    def model(p, frames, cut):
        alive = jnp.arange(t) < (t - cut)[:, None]
        x = (frames.astype(dtype) @ p["enter"]) * n**0.5
        rate = jnp.exp(-np.log(10000.0) * jnp.arange(n // 2) / (n // 2 - 1))
        angle = jnp.arange(1, t + 1)[:, None] * rate
        x = x + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1).astype(dtype)
        for q in p["encoder"]:
            y = standard(x) * q["norm"]
            query, key, value = jnp.split(y @ q["qkv"], 3, axis=-1)
            x = x + attend(query, key, value, alive) @ q["out"] + remember(value, q["filters"], alive)
            x = x + jax.nn.relu((standard(x) * q["norm2"]) @ q["up"]) @ q["down"]
        x = standard(x) * p["norm"]
        padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
        y = jnp.concatenate([padded[:, i : i + t] for i in range(3)], axis=-1) @ p["near"]
        weights = jax.nn.sigmoid((jax.nn.relu(y + x) @ p["fire"])[..., 0].astype(jnp.float32) - 0.5)
        weights = jnp.where(alive, weights, jnp.where(jnp.arange(t) == (t - cut)[:, None], 0.45, 0.0))
        filled = jnp.cumsum(weights, axis=1)
        before = filled - weights
        slots = jnp.arange(most)[:, None]
        part = jnp.minimum(filled[:, None], slots + 1) - jnp.maximum(before[:, None], slots)
        part = jax.nn.relu(part)
        count = jnp.minimum(jnp.floor(filled[:, -1]), most)
        real = jnp.arange(most) < count[:, None]
        z = jnp.einsum("bst,btn->bsn", part.astype(dtype), x)
        for q in p["decoder"]:
            y = jax.nn.relu((standard(z) * q["norm"]) @ q["up"]) @ q["down"]
            z = z + remember(standard(y) * q["norm2"], q["filters"], real)
            key, value = jnp.split(x @ q["kv"], 2, axis=-1)
            z = z + attend((standard(z) * q["norm3"]) @ q["q"], key, value, alive) @ q["out"]
        logits = ((standard(z) * p["norm2"]) @ p["words"]).astype(jnp.float32)
        best, _ = lax.top_k(jax.nn.log_softmax(logits, axis=-1), 3)
        best = jnp.where(real[..., None], best, 0)
        peaks = jnp.sum(part * jnp.arange(t), axis=-1) / (jnp.sum(part, axis=-1) + 1e-3)
        return best, jnp.sum(best[..., 0], axis=1) / jnp.maximum(count, 1), filled, jnp.where(real, peaks, 0)

    def layer(*norms):
        q = {k: gain(n, dtype) for k in norms} | {"filters": normal(reach, 1, n, dtype=dtype, scale=reach**-0.5)}
        q |= {"up": weight(n, 4 * n, dtype=dtype), "down": weight(4 * n, n, dtype=dtype)}
        return q | {"out": weight(n, n, dtype=dtype)}

    p = {"enter": normal(inputs, n, dtype=dtype, scale=(inputs * n) ** -0.5), "norm": gain(n, dtype)}
    p |= {"near": weight(3 * n, n, dtype=dtype), "fire": weight(n, 1, dtype=dtype), "norm2": gain(n, dtype)}
    p["encoder"] = [layer("norm", "norm2") | {"qkv": weight(n, 3 * n, dtype=dtype)} for _ in range(3)]
    extra = {"kv": weight(n, 2 * n, dtype=dtype), "q": weight(n, n, dtype=dtype)}
    p["decoder"] = [layer("norm", "norm2", "norm3") | extra for _ in range(2)]
    p["words"] = weight(n, words, dtype=dtype)
    return Built(model, (p, normal(b, t, inputs), integers(b, below=t // 3)))


@program("many-positive-neurons-in-one-layer-used-again-bytes", GROUP)
def _neurons(size: Size) -> Built:
    """This gives the next bytes by one layer of many positive neurons, used four times, as the dragon hatchling (2025).

    Attention has no softmax: neurons that were active together with earlier ones read what those saw, and multiply again.
    """
    b, t, n, h, wide = pick(size, (2, 513, 256, 4, 4096), (1, 129, 96, 4, 384), (2, 6, 8, 2, 12))
    dtype, depth = half(size), 4

    def turned(x, cos, sin):
        a, c = x[..., 0::2], x[..., 1::2]
        return jnp.stack([a * cos - c * sin, c * cos + a * sin], axis=-1).reshape(x.shape)

    def model(p, text):
        rate = 2.0 ** (-16 * jnp.arange(0, wide, 2) / wide)
        phase = jnp.arange(t)[:, None] * rate
        angle = (phase - jnp.floor(phase)) * (2 * jnp.pi)
        cos, sin = jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)
        earlier = jnp.tril(jnp.ones((t, t), dtype), -1)
        x = standard(p["bytes"][text])
        active = []
        for _ in range(depth):
            fired = jax.nn.relu(jnp.einsum("btn,hnm->bhtm", x, p["enter"]))
            key = turned(fired, cos, sin)
            scores = jnp.einsum("bhqm,bhkm->bhqk", key, key, preferred_element_type=jnp.float32)
            seen = jnp.einsum("bhqk,bkn->bhqn", (scores / wide**0.5).astype(dtype) * earlier, x)
            again = jax.nn.relu(jnp.einsum("bhtn,hnm->bhtm", standard(seen), p["value"]))
            both = fired * again
            active.append(jnp.mean((both > 0).astype(jnp.float32), axis=(2, 3)))
            y = jnp.swapaxes(both, 1, 2).reshape(b, t, h * wide) @ p["leave"]
            x = standard(x + standard(y))
        logits = (x @ p["head"]).astype(jnp.float32)
        logp = jax.nn.log_softmax(logits, axis=-1)
        own = jnp.take_along_axis(logp[:, :-1], text[:, 1:, None], axis=-1)[..., 0]
        return logp[:, -1], own, jnp.stack(active)

    p = {"bytes": normal(256, n, dtype=dtype), "head": weight(n, 256, dtype=dtype)}
    p |= {"enter": weight(h, n, wide, dtype=dtype), "value": weight(h, n, wide, dtype=dtype)}
    return Built(model, (p | {"leave": weight(h * wide, n, dtype=dtype)}, integers(b, t, below=256)))


@program("scene-features-turned-and-correlated-to-pick-and-place-linen", GROUP)
def _transporter(size: Size) -> Built:
    """This tells a robot where to pick and where to place by turned features matched to a scene, as Transporter (Zeng, 2020)."""
    import flax.linen as nn

    b, rows, columns, crop, turns, wide, keys = pick(
        size, (2, 320, 160, 36, 24, 64, 3), (1, 80, 64, 18, 12, 16, 3), (2, 16, 8, 5, 3, 4, 2)
    )
    dtype = half(size)
    angles = 2 * np.pi * np.arange(turns) / turns
    near = np.indices((crop, crop)).reshape(2, -1) - (crop - 1) / 2
    tilt = np.stack([np.cos(angles), -np.sin(angles), np.sin(angles), np.cos(angles)], -1).reshape(-1, 2, 2)
    spots = (tilt @ near).astype(np.float32)

    class Unit(nn.Module):
        width: int
        stride: int = 1

        @nn.compact
        def __call__(self, x):
            y = nn.relu(nn.Conv(self.width, (1, 1), (self.stride, self.stride), dtype=dtype)(x))
            y = nn.relu(nn.Conv(self.width, (3, 3), dtype=dtype)(y))
            y = nn.Conv(self.width, (1, 1), dtype=dtype)(y)
            if x.shape != y.shape:
                x = nn.Conv(self.width, (1, 1), (self.stride, self.stride), dtype=dtype)(x)
            return nn.relu(x + y)

    class Hourglass(nn.Module):
        out: int

        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(wide, (3, 3), dtype=dtype)(x))
            for width in (wide, 2 * wide, 4 * wide):
                x = Unit(width)(Unit(width, 2)(x))
            for width in (2 * wide, wide, wide // 2):
                x = Unit(width)(x)
                x = jax.image.resize(x, (b, 2 * x.shape[1], 2 * x.shape[2], width), "bilinear")
            return nn.Conv(self.out, (1, 1), dtype=jnp.float32)(x)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, colours, heights):
            scene = jnp.concatenate([colours.astype(jnp.float32) / 255 - 0.5, heights[..., None] / 3], axis=-1)
            scene = scene.astype(dtype)
            pick_heat = Hourglass(1)(scene)[..., 0]
            chance = nn.softmax(4 * pick_heat.reshape(b, -1), axis=-1).reshape(pick_heat.shape)
            at = jnp.stack([jnp.sum(chance, 2) @ jnp.arange(rows), jnp.sum(chance, 1) @ jnp.arange(columns)], -1)
            key, query = Hourglass(keys)(scene), Hourglass(keys)(scene)

            def place(key, query, at):
                kernels = _between(query, at[0] + spots[:, 0], at[1] + spots[:, 1])
                kernels = kernels.reshape(turns, crop, crop, keys).transpose(1, 2, 3, 0) / crop
                return convolved(key[None].astype(dtype), kernels.astype(dtype))[0].astype(jnp.float32)

            heat = jnp.stack([place(key[i], query[i], at[i]) for i in range(b)])
            logp = nn.log_softmax(heat.reshape(b, -1), axis=-1).reshape(heat.shape)
            share = jnp.exp(logp)
            turn = jnp.sum(share, axis=(1, 2))
            towards = jnp.arctan2(turn @ np.sin(angles), turn @ np.cos(angles) + 1e-3)
            entropy = -jnp.sum(share * logp, axis=(1, 2, 3))
            return chance, at, jnp.max(logp, axis=-1), towards, entropy

    return linen_program(size, Net(), integers(b, rows, columns, 3, below=256), normal(b, rows, columns))


@program("actions-guessed-between-frames-and-hidden-tokens-filled-in", GROUP)
def _world(size: Size) -> Built:
    """This guesses latent actions between frames and fills in hidden tokens of the frames they lead to, as Genie (Bruce, 2024).

    Each layer attends over a frame, then over the past of a place; actions are drawn around means, as AdaWorld (2025) does.
    """
    b, t, i, j, patch, n, h, codes, act = pick(
        size, (2, 12, 9, 12, 8, 512, 8, 1024, 32), (1, 5, 6, 8, 8, 128, 4, 509, 16), (2, 3, 2, 2, 2, 8, 2, 7, 3)
    )
    dtype, s, d = half(size), i * j, n // h

    def attend(q, x, causal):
        y = standard(x) * q["norm"]
        query, key, value = jnp.moveaxis((y @ q["qkv"]).reshape(*x.shape[:-1], 3, h, d), -3, 0)
        query, key = standard(query), standard(key)
        scores = jnp.einsum("...qhd,...khd->...hqk", query, key).astype(jnp.float32) * d**-0.5
        if causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        y = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores, axis=-1).astype(dtype), value)
        return x + y.reshape(x.shape) @ q["out"]

    def layers(p, x):
        for q in p:
            x = attend(q["space"], x, causal=False)
            x = jnp.swapaxes(attend(q["time"], jnp.swapaxes(x, 1, 2), causal=True), 1, 2)
            x = x + jax.nn.gelu((standard(x) * q["norm"]) @ q["up"]) @ q["down"]
        return x

    def model(p, film, tokens, shown, noise):
        x = film.reshape(b, t, i, patch, j, patch, 3).transpose(0, 1, 2, 4, 3, 5, 6).reshape(b, t, s, -1)
        x = x.astype(dtype) @ p["patch"] + p["places"]
        x = jnp.concatenate([jnp.broadcast_to(p["ask"], (b, t, 1, n)), x], axis=2)
        asked = layers(p["guess"], x + p["times"])[:, 1:, 0]
        mean, spread = jnp.split((standard(asked) @ p["action"]).astype(jnp.float32), 2, axis=-1)
        spread = jnp.clip(spread, -5, 3)
        action = mean + jnp.exp(0.5 * spread) * noise
        surprise = 0.5 * jnp.sum(mean**2 + jnp.exp(spread) - spread - 1, axis=-1)
        known = shown | (jnp.arange(t) == 0)[:, None]
        y = jnp.where(known[..., None], p["codes"][tokens], p["hidden"]) + p["places"]
        moved = jnp.pad(action.astype(dtype) @ p["act"], ((0, 0), (1, 0), (0, 0)))
        y = layers(p["fill"], y + moved[:, :, None] + p["times"])
        logits = ((standard(y) * p["norm"]) @ p["codes"].T).astype(jnp.float32) * n**-0.5
        logp = jax.nn.log_softmax(logits, axis=-1)
        own = jnp.take_along_axis(logp, tokens[..., None], axis=-1)[..., 0]
        unknown = 1 - known.astype(jnp.float32)
        loss = -jnp.sum(own * unknown, axis=(1, 2)) / jnp.maximum(jnp.sum(unknown, axis=(1, 2)), 1)
        sure = jnp.where(known, 0.0, jnp.max(logp, axis=-1))
        return loss, sure, action, surprise

    def attention():
        return {"norm": gain(n, dtype), "qkv": weight(n, 3 * n, dtype=dtype), "out": weight(n, n, dtype=dtype)}

    def stack():
        feed = {"norm": gain(n, dtype), "up": weight(n, 4 * n, dtype=dtype), "down": weight(4 * n, n, dtype=dtype)}
        return [{"space": attention(), "time": attention()} | feed for _ in range(3)]

    p = {"guess": stack(), "fill": stack(), "patch": weight(patch * patch * 3, n, dtype=dtype), "norm": gain(n, dtype)}
    p |= {"places": normal(s, n, dtype=dtype, scale=0.5), "times": normal(t, 1, n, dtype=dtype, scale=0.5)}
    p |= {"ask": normal(n, dtype=dtype), "hidden": normal(n, dtype=dtype), "codes": normal(codes, n, dtype=dtype)}
    p |= {"action": normal(n, 2 * act, dtype=dtype, scale=0.5 * n**-0.5), "act": weight(act, n, dtype=dtype)}
    inputs = (normal(b, t, i * patch, j * patch, 3), integers(b, t, s, below=codes), booleans(b, t, s))
    return Built(model, (p, *inputs, normal(b, t - 1, act)))
