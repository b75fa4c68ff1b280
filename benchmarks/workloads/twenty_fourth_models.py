"""Whole models of pictures, bodies and points, the twenty-fourth set: its author saw no plan."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, gain, half, integers, normal, pick, program, weight
from benchmarks.workloads.twenty_fourth_parts import attended, convolved, filters, layer_normed, unit

GROUP = "twenty-fourth"


@program("any-names-guide-picture-levels-and-boxes-by-shares-of-sides", GROUP)
def _open_names(size: Size) -> Built:
    """This finds boxes of things named by any phrases, which guide the levels of a picture, as YOLO-World (Cheng, 2024).

    Sides of boxes are means of shares over sixteen lengths; overlapping boxes lose score by a matrix of overlaps.
    """
    b, rows, columns, w, text, names, heads, best = pick(
        size, (8, 448, 640, 32, 512, 83, 8, 300), (1, 96, 160, 12, 96, 29, 4, 60), (2, 64, 64, 4, 8, 5, 2, 7)
    )
    dtype, bins = half(size), 16

    def conv(q, x, stride=1):
        return jax.nn.silu(convolved(x, q["w"], stride) + q["b"])

    def split_block(q, x, guide=None):
        first, second = jnp.split(conv(q["enter"], x), 2, axis=-1)
        parts = [first, second]
        for unit_q in q["units"]:
            parts.append(parts[-1] + conv(unit_q["b"], conv(unit_q["a"], parts[-1])))
        if guide is not None:
            y = parts[-1]
            c = y.shape[-1]
            key = (guide @ q["guide"]).reshape(b, names, heads, c // heads)
            query = y.reshape(*y.shape[:3], heads, c // heads)
            like = (
                jnp.einsum("bijhd,bkhd->bijhk", query, key, preferred_element_type=jnp.float32) * (c // heads) ** -0.5
            )
            gate = jax.nn.sigmoid(jnp.max(like, axis=-1) + q["shift"].astype(jnp.float32)).astype(dtype)
            value = conv(q["value"], y).reshape(query.shape)
            parts.append((value * gate[..., None]).reshape(y.shape))
        return conv(q["leave"], jnp.concatenate(parts, axis=-1))

    def pooled(q, levels, words):
        """This lets phrases read the largest values of four regions of every level."""
        regions = []
        for level, proj in zip(levels, q["project"], strict=True):
            i, j = level.shape[1] // 2, level.shape[2] // 2
            y = level[:, : 2 * i, : 2 * j].reshape(b, 2, i, 2, j, -1)
            regions.append(jnp.max(y, axis=(2, 4)).reshape(b, 4, -1) @ proj)
        x = jnp.concatenate(regions, axis=1)
        y = layer_normed(words, q["norm"])
        return words + attended(y @ q["q"], x @ q["k"], x @ q["v"], heads) @ q["o"]

    def model(p, pictures, phrases):
        words = jnp.broadcast_to(unit(phrases.astype(dtype)) * text**0.5, (b, names, text))
        x = conv(p["stem"], (pictures.astype(jnp.float32) / 255).astype(dtype), 2)
        levels = []
        for q in p["stages"]:
            x = split_block(q["block"], conv(q["down"], x, 2))
            levels.append(x)
        c3, c4, c5 = levels[1:]

        def twice(x):
            return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)

        n4 = split_block(p["top4"], jnp.concatenate([twice(c5), c4], axis=-1), words)
        n3 = split_block(p["top3"], jnp.concatenate([twice(n4), c3], axis=-1), words)
        words = pooled(p["pool"], (n3, n4, c5), words)
        m4 = split_block(p["low4"], jnp.concatenate([conv(p["down3"], n3, 2), n4], axis=-1), words)
        m5 = split_block(p["low5"], jnp.concatenate([conv(p["down4"], m4, 2), c5], axis=-1), words)
        boxes, logits = [], []
        keys = unit(words)
        for level, q, stride in zip((n3, m4, m5), p["heads"], (8, 16, 32), strict=True):
            i, j = level.shape[1:3]
            sides = convolved(conv(q["box2"], conv(q["box1"], level)), q["box3"]).astype(jnp.float32)
            share = jax.nn.softmax(sides.reshape(b, i * j, 4, bins), axis=-1)
            far = (share @ jnp.arange(bins, dtype=jnp.float32)) * stride
            y, x = (np.indices((i, j)).reshape(2, -1) + 0.5) * stride
            box = [x - far[..., 0], y - far[..., 1], x + far[..., 2], y + far[..., 3]]
            boxes.append(jnp.stack(box, axis=-1))
            drawn = convolved(conv(q["name2"], conv(q["name1"], level)), q["name3"]).reshape(b, i * j, text)
            logits.append(
                jnp.einsum("bpt,bkt->bpk", unit(drawn), keys, preferred_element_type=jnp.float32) * jnp.exp(q["scale"])
                - 2.0
            )
        box, score = jnp.concatenate(boxes, axis=1), jax.nn.sigmoid(jnp.concatenate(logits, axis=1))
        top, at = lax.top_k(jnp.max(score, axis=-1), best)
        kept = jnp.take_along_axis(box, at[..., None], axis=1)
        low = jnp.maximum(kept[:, :, None, :2], kept[:, None, :, :2])
        high = jnp.minimum(kept[:, :, None, 2:], kept[:, None, :, 2:])
        shared = jnp.prod(jnp.maximum(high - low, 0), axis=-1)
        area = jnp.prod(jnp.maximum(kept[..., 2:] - kept[..., :2], 0), axis=-1)
        over = shared / (area[:, :, None] + area[:, None] - shared + 1e-6)
        over = jnp.where(jnp.triu(jnp.ones((best, best), bool), 1), over, 0)
        worst = jnp.max(over, axis=1)
        fade = jnp.min(jnp.exp(-2 * (over**2 - worst[:, :, None] ** 2)), axis=1)
        return box, score, top * jnp.minimum(fade, 1.0)

    def layer(k, i, o):
        return {"w": filters(k, i, o, dtype), "b": normal(o, dtype=dtype, scale=0.1)}

    def block(i, o, guided=False):
        c = o // 2
        q = {"enter": layer(1, i, o), "leave": layer(1, (4 + guided) * c, o)}
        q["units"] = [{"a": layer(3, c, c), "b": layer(3, c, c)} for _ in range(2)]
        if guided:
            q |= {"guide": weight(text, c, dtype=dtype), "value": layer(3, c, c)}
            q["shift"] = normal(heads, dtype=dtype)
        return q

    def head(i):
        q = {"box1": layer(3, i, 2 * w), "box2": layer(3, 2 * w, 2 * w), "box3": filters(1, 2 * w, 4 * bins, dtype)}
        q |= {"name1": layer(3, i, 4 * w), "name2": layer(3, 4 * w, 4 * w), "name3": filters(1, 4 * w, text, dtype)}
        return q | {"scale": normal(scale=0.1, offset=1.0)}

    wide = (w, 2 * w, 4 * w, 8 * w, 16 * w)
    p = {"stem": layer(3, 3, w), "stages": []}
    for i, o in itertools.pairwise(wide):
        p["stages"].append({"down": layer(3, i, o), "block": block(o, o)})
    p |= {"top4": block(24 * w, 8 * w, True), "top3": block(12 * w, 4 * w, True)}
    p |= {"low4": block(12 * w, 8 * w, True), "low5": block(24 * w, 16 * w, True)}
    p |= {"down3": layer(3, 4 * w, 4 * w), "down4": layer(3, 8 * w, 8 * w), "heads": [head(c) for c in wide[2:]]}
    p["pool"] = {k: weight(text, text, dtype=dtype) for k in "qkvo"} | {"norm": gain(text, dtype)}
    p["pool"]["project"] = [weight(c, text, dtype=dtype) for c in wide[2:]]
    return Built(model, (p, integers(b, rows, columns, 3, below=256), normal(names, text)))


@program("pictures-drawn-map-by-map-from-coarse-codes-guided-by-class", GROUP)
def _next_map(size: Size) -> Built:
    """This draws pictures as sums of ever finer maps of codes, each from all coarser ones, as VAR (Tian, 2024).

    Codes are drawn softly with noise from the most likely ones, pulled away from what no class would give.
    """
    b, n, h, codes, deep, kept, sides = pick(
        size,
        (6, 1024, 16, 4096, 32, 900, (1, 2, 3, 5, 9, 16)),
        (1, 128, 4, 509, 16, 100, (1, 2, 3, 4, 5, 8)),
        (2, 8, 2, 11, 4, 5, (1, 2, 2, 3, 3, 4)),
    )
    dtype, d, full, depth = half(size), n // h, sides[-1], 4
    starts = np.cumsum([0, *[s * s for s in sides]])

    def attend(q, x, cache):
        query, key, value = jnp.moveaxis((x @ q["qkv"]).reshape(2 * b, -1, 3, h, d), 2, 0)
        query, key = unit(query) * jnp.exp(q["scale"])[:, None].astype(dtype), unit(key)
        if cache is not None:
            key, value = jnp.concatenate([cache[0], key], axis=1), jnp.concatenate([cache[1], value], axis=1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1).astype(dtype), value)
        return y.reshape(x.shape) @ q["out"], (key, value)

    def modulated(x, scale, shift):
        return layer_normed(x, jnp.ones(n)) * (1 + scale[:, None]) + shift[:, None]

    def pass_layers(p, x, shape, caches):
        fresh = []
        for q, before in zip(p["layers"], caches, strict=True):
            a = jnp.split(jax.nn.silu(shape) @ q["shape"], 6, axis=-1)
            y, cache = attend(q, modulated(x, a[0], a[1]), before)
            x = x + y * a[2][:, None]
            y = jax.nn.gelu(modulated(x, a[3], a[4]) @ q["up"]) @ q["down"]
            x = x + y * a[5][:, None]
            fresh.append(cache)
        scale, shift = jnp.split(jax.nn.silu(shape) @ p["last"], 2, axis=-1)
        return (modulated(x, scale, shift) @ p["head"]).astype(jnp.float32), fresh

    def model(p, classes, seed, strength):
        names = jnp.concatenate([classes, jnp.full_like(classes, 1000)])
        shape = p["classes"][names]
        x = shape[:, None] + p["first"]
        whole = jnp.zeros((b, full, full, deep))
        caches, sure = [None] * depth, []
        keys = jax.random.split(jax.random.key(seed), len(sides))
        for k, side in enumerate(sides):
            x = x + p["level"][k] + p["places"][starts[k] : starts[k + 1]]
            logits, caches = pass_layers(p, x, shape, caches)
            pull = jax.nn.softplus(strength) * k / (len(sides) - 1)
            logits = (1 + pull) * logits[:b] - pull * logits[b:]
            least = lax.top_k(logits, kept)[0][..., -1:]
            logits = jnp.where(logits < least, -1e9, logits)
            noise = jax.random.gumbel(keys[k], logits.shape)
            share = jax.nn.softmax((logits + noise) / (1 - 0.85 * k / 5), axis=-1)
            sure.append(jnp.max(jax.nn.log_softmax(logits, axis=-1), axis=-1))
            drawn = (share @ p["codes"].astype(jnp.float32)).reshape(b, side, side, deep)
            drawn = jax.image.resize(drawn, whole.shape, "bicubic")
            whole = whole + 0.5 * drawn + 0.5 * convolved(drawn, p["smooth"][k // 2].astype(jnp.float32))
            if k + 1 < len(sides):
                after = jax.image.resize(whole, (b, sides[k + 1], sides[k + 1], deep), "linear")
                x = after.reshape(b, -1, deep).astype(dtype) @ p["enter"]
                x = jnp.concatenate([x, x])
        y = convolved(whole.astype(dtype), p["paint"]["in"])
        for q in p["paint"]["ups"]:
            y = jnp.repeat(jnp.repeat(y, 2, axis=1), 2, axis=2)
            y = jax.nn.silu(convolved(y, q["a"]))
            y = y + convolved(jax.nn.silu(layer_normed(y, q["norm"])), q["b"])
        picture = jnp.clip(convolved(y, p["paint"]["out"]).astype(jnp.float32), -1, 1)
        return 0.5 * (picture + 1), whole, jnp.concatenate(sure, axis=1)

    wide = n // 8
    p = {"classes": normal(1001, n, dtype=dtype, scale=0.5), "first": normal(1, n, dtype=dtype, scale=0.5)}
    p |= {"level": normal(len(sides), n, dtype=dtype, scale=0.2), "places": normal(int(starts[-1]), n, dtype=dtype)}
    p |= {"codes": normal(codes, deep, dtype=dtype), "enter": weight(deep, n, dtype=dtype)}
    p |= {"smooth": [filters(3, deep, deep, dtype) for _ in range(3)], "head": weight(n, codes, dtype=dtype)}
    p["last"] = normal(n, 2 * n, dtype=dtype, scale=0.5 * n**-0.5)
    p["layers"] = [
        {
            "qkv": weight(n, 3 * n, dtype=dtype),
            "out": weight(n, n, dtype=dtype),
            "scale": normal(h, scale=0.1, offset=1.4),
        }
        | {"up": weight(n, 4 * n, dtype=dtype), "down": weight(4 * n, n, dtype=dtype)}
        | {"shape": normal(n, 6 * n, dtype=dtype, scale=0.5 * n**-0.5)}
        for _ in range(depth)
    ]
    p["paint"] = {"in": filters(3, deep, wide, dtype), "ups": [], "out": filters(3, wide // 4 or 1, 3, dtype)}
    for i, o in ((wide, wide // 2 or 1), (wide // 2 or 1, wide // 4 or 1)):
        p["paint"]["ups"].append({"a": filters(3, i, o, dtype), "b": filters(3, o, o, dtype), "norm": gain(o, dtype)})
    return Built(model, (p, integers(b, below=1000), integers(below=1000), normal(offset=1.0)))


@program("each-channel-of-near-points-weighed-apart-down-and-up-levels", GROUP)
def _vector_points(size: Size) -> Built:
    """This names every point of rooms by attention that weighs each channel of near points apart (Point Transformer, 2021)."""
    b, t, w, near, share, classes = pick(size, (2, 4099, 48, 16, 4, 13), (1, 768, 24, 8, 3, 13), (2, 24, 4, 3, 2, 5))
    counts = (t, t // share, t // share**2)
    wide = (w, 2 * w, 4 * w)

    def apart(a, c):
        return jnp.sum((a[:, :, None] - c[:, None]) ** 2, axis=-1)

    take = jax.vmap(lambda x, at: x[at])

    def nearest(asked, known, k):
        far, at = lax.top_k(-apart(asked, known), k)
        return -far, at

    def two(q, x):
        return jax.nn.relu(x @ q["a"]) @ q["b"]

    def block(q, x, where, at):
        y = layer_normed(x, q["norm"])
        query, key, value = jnp.split(y @ q["qkv"], 3, axis=-1)
        place = two(q["place"], where[:, :, None] - take(where, at))
        like = query[:, :, None] - take(key, at) + place
        probs = jax.nn.softmax(two(q["weigh"], like) * like.shape[-1] ** -0.5, axis=2)
        y = jnp.sum(probs * (take(value, at) + place), axis=2)
        return x + jax.nn.relu(layer_normed(y, q["norm2"])) @ q["out"]

    def model(p, where, colours, order):
        where = 2 * where
        x = jax.nn.relu(layer_normed(jnp.concatenate([where, colours], axis=-1) @ p["enter"], p["norm"]))
        levels = []
        for level, q in enumerate(p["down"]):
            if level:
                some = order[: counts[level]] % counts[level - 1]
                fresh = where[:, some]
                _, at = nearest(fresh, where, near)
                local = jnp.concatenate([take(where, at) - fresh[:, :, None], take(x, at)], axis=-1)
                x = jnp.max(jax.nn.relu(layer_normed(local @ q["pool"], q["norm"])), axis=2)
                where = fresh
            _, at = nearest(where, where, near)
            for layer in q["blocks"]:
                x = block(layer, x, where, at)
            levels.append((where, x, at))
        x = levels[-1][1]
        for level, q in zip((1, 0), p["up"], strict=True):
            fine, skip, own = levels[level]
            far, at = nearest(fine, levels[level + 1][0], 3)
            parts = 1 / (jnp.maximum(far, 0) + 1e-3)
            parts = parts / jnp.sum(parts, axis=-1, keepdims=True)
            spread = jnp.sum(take(x @ q["coarse"], at) * parts[..., None], axis=2)
            x = jax.nn.relu(layer_normed(spread + skip @ q["fine"], q["norm"]))
            x = block(q["block"], x, fine, own)
        logits = two(p["head"], layer_normed(x, p["norm2"]))
        logp = jax.nn.log_softmax(logits, axis=-1)
        room = jnp.mean(jnp.exp(logp), axis=1)
        return logp, room, -jnp.sum(jnp.exp(logp) * logp, axis=-1)

    def pair(i, m, o):
        return {"a": weight(i, m), "b": weight(m, o)}

    def layer(n):
        q = {"norm": gain(n), "norm2": gain(n), "qkv": weight(n, 3 * n), "out": weight(n, n)}
        return q | {"place": pair(3, n, n), "weigh": pair(n, n, n)}

    p = {"enter": weight(6, w), "norm": gain(w), "norm2": gain(w), "head": pair(w, w, classes), "down": [], "up": []}
    for level, n in enumerate(wide):
        q = {"blocks": [layer(n) for _ in range(2)]}
        p["down"].append(q | ({"pool": weight(3 + n // 2, n), "norm": gain(n)} if level else {}))
    for n in (wide[1], wide[0]):
        p["up"].append({"coarse": weight(2 * n, n), "fine": weight(n, n), "norm": gain(n), "block": layer(n)})
    return Built(model, (p, normal(b, t, 3), normal(b, t, 3, scale=0.5), integers(t, below=t, distinct=True)))


@program("joints-of-moving-bodies-with-bonds-of-their-own-per-channel", GROUP)
def _bodies(size: Size) -> Built:
    """This names what moving bodies do from joints whose bonds are refined for each channel, as CTR-GCN (Chen, 2021)."""
    b, people, t, joints, w, classes = pick(size, (16, 2, 300, 25, 64, 120), (2, 2, 96, 25, 16, 60), (2, 2, 8, 5, 8, 7))
    dtype = half(size)
    plan = ((3, w, 1), (w, w, 1), (w, 2 * w, 2), (2 * w, 2 * w, 1), (2 * w, 4 * w, 2), (4 * w, 4 * w, 1))

    def bonded(q, x):
        """This mixes joints by three shared graphs plus differences of joints of the clip, for each channel."""
        mean, total = jnp.mean(x, axis=1), 0.0
        for s in q["graphs"]:
            left, right = mean @ s["left"], mean @ s["right"]
            own = jnp.tanh(left[:, :, None] - right[:, None]) @ s["grow"]
            graph = s["graph"][..., None] + own * s["share"]
            total = total + jnp.einsum("nuvc,ntvc->ntuc", graph, x @ s["value"])
        skip = x if "skip" not in q else x @ q["skip"]
        return jax.nn.relu(total * q["scale"] + q["shift"] + skip)

    def in_time(x, taps, far, stride):
        reach = (taps.shape[0] - 1) * far // 2
        return lax.conv_general_dilated(
            x,
            taps,
            (stride, 1),
            ((reach, reach), (0, 0)),
            rhs_dilation=(far, 1),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    def block(q, x, stride):
        y = bonded(q, x)
        parts = []
        for far, branch in zip((1, 2), q["wide"], strict=True):
            parts.append(in_time(jax.nn.relu(y @ branch["in"]), branch["taps"], far, stride))
        z = jax.nn.relu(y @ q["most"])
        parts.append(
            lax.reduce_window(z, -jnp.inf, lax.max, (1, 3, 1, 1), (1, stride, 1, 1), ((0, 0), (1, 1), (0, 0), (0, 0)))
        )
        parts.append((y @ q["plain"])[:, ::stride])
        y = jnp.concatenate(parts, axis=-1) * q["scale2"] + q["shift2"]
        if "through" in q:
            return jax.nn.relu(y + x[:, ::stride] @ q["through"])
        return jax.nn.relu(y + x) if x.shape == y.shape else jax.nn.relu(y)

    def model(p, places, cut):
        alive = (jnp.arange(t) < (t - cut)[:, None]).astype(jnp.float32)
        middle = places[:, :, :, :1]
        x = places - middle
        x = jnp.where(alive[:, None, :, None, None] > 0, x, 0)
        x = x * lax.rsqrt(jnp.mean(x * x, axis=(2, 3), keepdims=True) + 1e-5)
        x = (x * p["stretch"]).reshape(b * people, t, joints, 3).astype(dtype)
        for q, (_, _, stride) in zip(p["blocks"], plan, strict=True):
            x = block(q, x, stride)
        x = x.reshape(b, people, *x.shape[1:]).astype(jnp.float32)
        frames = jnp.mean(x, axis=(1, 3))
        logits = jnp.mean(frames, axis=1) @ p["names"]
        when = jax.nn.softmax(frames @ p["when"], axis=1)
        return jax.nn.log_softmax(logits, axis=-1), when[..., 0], jnp.mean(x, axis=(2, 4))

    def made(i, o):
        r, c = max(i // 8, 4) if i > 3 else 8, o // 4
        graph = {
            "left": weight(i, r, dtype=dtype),
            "right": weight(i, r, dtype=dtype),
            "grow": weight(r, o, dtype=dtype),
        }
        graph |= {
            "value": weight(i, o, dtype=dtype),
            "graph": normal(joints, joints, dtype=dtype, scale=0.4 * joints**-0.5),
        }
        q = {"graphs": [graph | {"share": normal(o, dtype=dtype, scale=0.1)} for _ in range(3)]}
        for k in ("scale", "scale2"):
            q[k] = gain(o, dtype)
        for k in ("shift", "shift2"):
            q[k] = normal(o, dtype=dtype, scale=0.1)
        taps = normal(5, 1, c, c, dtype=dtype, scale=(5 * c) ** -0.5)
        q["wide"] = [{"in": weight(o, c, dtype=dtype), "taps": taps} for _ in range(2)]
        q |= {"most": weight(o, c, dtype=dtype), "plain": weight(o, c, dtype=dtype)}
        if i != o:
            q |= {"skip": weight(i, o, dtype=dtype), "through": weight(i, o, dtype=dtype)}
        return q

    p = {"stretch": gain(3), "names": weight(4 * w, classes), "when": weight(4 * w, 1)}
    p["blocks"] = [made(i, o) for i, o, _ in plan]
    return Built(model, (p, normal(b, people, t, joints, 3), integers(b, below=t // 3)))
