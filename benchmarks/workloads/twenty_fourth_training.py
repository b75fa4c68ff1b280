"""Losses with their gradients and whole training steps, the twenty-fourth set: its author saw no plan."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, gain, half, integers, normal, pick, program, weight
from benchmarks.workloads.twenty_fourth_parts import chosen, convolved, filters, layer_normed

GROUP = "twenty-fourth"


@program("depths-and-turns-learned-from-frames-before-and-after-grad", GROUP)
def _depths(size: Size) -> Built:
    """This gives gradients of depths and turns of a camera, learned by laying frames over each other (Monodepth2, 2019).

    Each pixel takes the better of the frames before and after, unless standing still fits it better.
    """
    b, rows, columns, w = pick(size, (4, 192, 640, 32), (1, 64, 96, 12), (2, 32, 32, 4))
    dtype, floor, top = half(size), 1 / 100.0, 1 / 0.1
    wide = (w, w, 2 * w, 4 * w, 8 * w)

    def boxed(x):
        x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
        return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "VALID") / 9

    def unlike(x, y):
        """This mixes the structural unlikeness of windows with the plain difference."""
        mx, my = boxed(x), boxed(y)
        vx, vy = boxed(x * x) - mx * mx, boxed(y * y) - my * my
        both = boxed(x * y) - mx * my
        like = (2 * mx * my + 1e-4) * (2 * both + 9e-4) / ((mx * mx + my * my + 1e-4) * (vx + vy + 9e-4))
        wrong = 0.85 * jnp.clip((1 - like) / 2, 0, 1) + 0.15 * jnp.abs(x - y)
        return jnp.mean(wrong, axis=-1)

    def conv(q, x, stride=1):
        return jax.nn.elu(convolved(x, q["w"], stride) + q["b"])

    def encoded(p, x):
        x = conv(p["stem"], x, 2)
        levels = [x]
        for q in p["stages"]:
            y = conv(q["b"], conv(q["a"], x, 2))
            x = y + convolved(x, q["skip"], 2)
            levels.append(x)
        return levels

    def lifted(p, levels):
        x, out = levels[-1], []
        for k, q in enumerate(p):
            x = conv(q["a"], x)
            x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
            x = conv(q["b"], jnp.concatenate([x, levels[-2 - k]], axis=-1) if k < 4 else x)
            if k:
                out.append(jax.nn.sigmoid(convolved(x, q["show"]).astype(jnp.float32)[..., 0]))
        return out[::-1]

    def moved(p, one, two):
        x = encoded(p, jnp.concatenate([one, two], axis=-1))[-1]
        return 0.01 * jnp.mean((conv(p["last"], x) @ p["out"]).astype(jnp.float32), axis=(1, 2))

    def rigid(v):
        """This turns six numbers into a turn (Rodrigues) and a shift."""
        angle = jnp.sqrt(jnp.sum(v[:, :3] ** 2, axis=-1) + 1e-12)[:, None, None]
        x, y, z = v[:, 0], v[:, 1], v[:, 2]
        none = jnp.zeros_like(x)
        k = jnp.stack([none, -z, y, z, none, -x, -y, x, none], axis=-1).reshape(-1, 3, 3)
        turn = jnp.eye(3) + jnp.sin(angle) / angle * k + (1 - jnp.cos(angle)) / angle**2 * (k @ k)
        return turn, v[:, 3:]

    lens = np.array([[0.58 * columns, 0, 0.5 * columns], [0, 1.92 * rows, 0.5 * rows], [0, 0, 1]], np.float32)
    spots = np.stack([*np.meshgrid(np.arange(columns), np.arange(rows)), np.ones((rows, columns))], -1)
    rays = (spots @ np.linalg.inv(lens).T).astype(np.float32)

    def read(picture, at):
        x, y = jnp.clip(at[..., 0], 0, columns - 1.001), jnp.clip(at[..., 1], 0, rows - 1.001)
        i, j = jnp.floor(y).astype(jnp.int32), jnp.floor(x).astype(jnp.int32)
        a, c = (y - i)[..., None], (x - j)[..., None]
        upper = picture[i, j] * (1 - c) + picture[i, j + 1] * c
        return upper * (1 - a) + (picture[i + 1, j] * (1 - c) + picture[i + 1, j + 1] * c) * a

    def loss(p, frames):
        before, now, after = frames
        small = [f.astype(dtype) for f in frames]
        maps = lifted(p["lift"], encoded(p["see"], small[1]))
        turns = [rigid(moved(p["move"], small[0], small[1])), rigid(moved(p["move"], small[1], small[2]))]
        (r, s), forth = turns
        back = (jnp.swapaxes(r, 1, 2), -jnp.einsum("bji,bj->bi", r, s))
        still = jnp.minimum(unlike(before, now), unlike(after, now))
        total, shares = 0.0, []
        for k, shown in enumerate(maps):
            full = jax.image.resize(shown, (b, rows, columns), "bilinear")
            depth = 1 / (floor + (top - floor) * full)
            points = rays * depth[..., None]
            errors = []
            for picture, (turn, shift) in ((before, back), (after, forth)):
                seen = (jnp.einsum("bij,bxyj->bxyi", turn, points) + shift[:, None, None]) @ lens.T
                at = seen[..., :2] / jnp.maximum(seen[..., 2:], 1e-3)
                errors.append(unlike(jax.vmap(read)(picture, at), now))
            best = jnp.minimum(*errors)
            shares.append(jnp.mean((best < still).astype(jnp.float32)))
            total = total + jnp.mean(jnp.minimum(best, still))
            even = shown / (jnp.mean(shown, axis=(1, 2), keepdims=True) + 1e-6)
            tiny = jax.image.resize(now, (b, *shown.shape[1:], 3), "linear")
            for axis in (1, 2):
                slope = jnp.abs(jnp.diff(even, axis=axis))
                edge = jnp.mean(jnp.abs(jnp.diff(tiny, axis=axis)), axis=-1)
                total = total + 1e-3 / 2**k * jnp.mean(slope * jnp.exp(-edge))
        return total / 4, (jnp.stack(shares), maps[0], turns)

    def layer(k, i, o):
        return {"w": filters(k, i, o, dtype), "b": normal(o, dtype=dtype, scale=0.1)}

    def eye(channels):
        q = {"stem": layer(7, channels, w), "stages": []}
        for i, o in itertools.pairwise(wide):
            q["stages"].append({"a": layer(3, i, o), "b": layer(3, o, o), "skip": filters(1, i, o, dtype)})
        return q

    p = {
        "see": eye(3),
        "move": eye(6) | {"last": layer(1, 8 * w, 4 * w), "out": weight(4 * w, 6, dtype=dtype)},
        "lift": [],
    }
    for k, (i, o) in enumerate(((8 * w, 4 * w), (4 * w, 2 * w), (2 * w, w), (w, w), (w, w // 2))):
        p["lift"].append({"a": layer(3, i, o), "b": layer(3, o + (wide[3 - k] if k < 4 else 0), o)})
        if k:
            p["lift"][k]["show"] = filters(3, o, 1, dtype)

    def step(p, coarse):
        scene = [jax.nn.sigmoid(jax.image.resize(c, (b, rows, columns, 3), "cubic")) for c in coarse]
        return jax.value_and_grad(loss, has_aux=True)(p, (0.7 * scene[0] + 0.3 * scene[1], scene[0], scene[2]))

    return Built(step, (p, normal(3, b, rows // 8, columns // 8, 3)))


@program("arcs-among-words-by-sums-over-all-trees-likelihood-grad", GROUP)
def _arcs(size: Size) -> Built:
    """This gives gradients of heads and names of words by sums over all trees of a sentence (Dozat, 2017; Koo, 2007).

    Two layers of cells read both ways; the sum over trees is the determinant of a matrix of arcs.
    """
    b, t, words, small, n, arc, name, names = pick(
        size, (48, 43, 28003, 100, 400, 500, 100, 49), (8, 23, 1009, 32, 48, 64, 24, 49), (2, 6, 13, 4, 6, 5, 4, 3)
    )

    def cells(q, x, reverse):
        x = jnp.swapaxes(x @ q["in"] + q["bias"], 0, 1)

        def step(carry, now):
            state, held = carry
            i, f, o, g = jnp.split(now + state @ q["again"], 4, axis=-1)
            held = jax.nn.sigmoid(f + 1) * held + jax.nn.sigmoid(i) * jnp.tanh(g)
            state = jax.nn.sigmoid(o) * jnp.tanh(held)
            return (state, held), state

        start = jnp.zeros((b, n))
        return jnp.swapaxes(lax.scan(step, (start, start), x, reverse=reverse)[1], 0, 1)

    def loss(p, text, kinds, cut, heads, labels):
        real = jnp.arange(t) < (t - cut)[:, None]
        x = jnp.concatenate([p["words"][text], p["kinds"][kinds]], axis=-1) * real[..., None]
        for q in p["layers"]:
            x = jnp.concatenate([cells(q[0], x, False), cells(q[1], x, True)], axis=-1) * real[..., None]
        x = jnp.concatenate([jnp.broadcast_to(p["root"], (b, 1, 2 * n)), x], axis=1)

        def read(key):
            return jax.nn.leaky_relu(x @ p[key], 0.1)

        head, own = read("arc_head"), read("arc_own")[:, 1:]
        scores = jnp.einsum("bia,ac,bjc->bij", head, p["arc"], own) + (head @ p["lean"])[..., None]
        seen = jnp.concatenate([jnp.ones((b, 1), bool), real], axis=1)
        off = ~jnp.eye(t + 1, dtype=bool)[:, 1:]
        allowed = seen[:, :, None] & real[:, None] & off
        most = lax.stop_gradient(jnp.max(jnp.where(allowed, scores, -1e9), axis=1, keepdims=True))
        most = jnp.where(real[:, None], most, 0)
        weigh = jnp.where(allowed, jnp.exp(jnp.minimum(scores - most, 0.0)), 0.0)
        into = jnp.sum(weigh, axis=1)
        kirchhoff = jnp.where(jnp.eye(t, dtype=bool), jnp.where(real, into, 1.0)[:, None], -weigh[:, 1:])
        kirchhoff = kirchhoff + 1e-5 * jnp.eye(t)
        trees = jnp.linalg.slogdet(kirchhoff)[1] + jnp.sum(most[:, 0], axis=-1)
        gold = jnp.minimum(heads % (jnp.arange(t) + 1), t - cut[:, None])
        arcs = jnp.take_along_axis(scores, gold[:, None], axis=1)[:, 0]
        arcs = jnp.sum(jnp.where(real, arcs, 0), axis=1)
        of_head = jnp.take_along_axis(read("name_head"), gold[..., None], axis=1)
        logits = jnp.einsum("bti,lij,btj->btl", of_head, p["name"], read("name_own")[:, 1:])
        named = jnp.where(real, chosen(logits + p["names"], labels), 0)
        many = jnp.sum(real, axis=1).astype(jnp.float32)
        value = (trees - arcs - jnp.sum(named, axis=1)) / many
        return jnp.mean(value), (trees, arcs, jnp.sum(named, axis=1), jnp.where(allowed, scores, 0))

    def step(p, slow, *inputs):
        (value, extra), grads = jax.value_and_grad(loss, has_aux=True)(p, *inputs)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 5 / (norm + 1e-6)), grads)
        slow = jax.tree.map(lambda s, w: 0.9999 * s + 1e-4 * w, slow, p)
        return value, extra, norm, grads, slow

    def parameters():
        def way(i):
            return {"in": weight(i, 4 * n), "again": weight(n, 4 * n), "bias": normal(4 * n, scale=0.1)}

        p = {"words": normal(words, small), "kinds": normal(47, small), "root": normal(2 * n, scale=0.5)}
        p["layers"] = [[way(i), way(i)] for i in (2 * small, 2 * n)]
        p |= {f"arc_{k}": weight(2 * n, arc) for k in ("head", "own")}
        p |= {f"name_{k}": weight(2 * n, name) for k in ("head", "own")}
        p |= {"arc": normal(arc, arc, scale=2 / arc), "lean": normal(arc, scale=arc**-0.5)}
        return p | {"name": normal(names, name, name, scale=2 / name), "names": normal(names)}

    inputs = (integers(b, t, below=words), integers(b, t, below=47), integers(b, below=t // 2))
    inputs += (integers(b, t, below=t + 1), integers(b, t, below=names))
    return Built(step, (parameters(), parameters(), *inputs))


@program("pictures-pushed-off-inside-a-ball-then-made-to-agree-step", GROUP)
def _pushed(size: Size) -> Built:
    """This trains names of small pictures that agree with those of pictures pushed off inside a ball (TRADES, Zhang, 2019)."""
    b, side, widths, classes, pushes = pick(
        size, (128, 32, (64, 128, 256), 10, 4), (16, 16, (12, 24, 48), 10, 4), (3, 8, (4, 6, 8), 5, 4)
    )
    dtype, ball, stride, beta = half(size), 0.5, 0.18, 6.0

    def normed(q, x):
        y = x.astype(jnp.float32)
        mean = jnp.mean(y, axis=(0, 1, 2))
        var = jnp.mean(jnp.square(y - mean), axis=(0, 1, 2))
        return ((y - mean) * lax.rsqrt(var + 1e-5) * q["scale"] + q["shift"]).astype(dtype), (mean, var)

    def net(p, pictures):
        x, seen = convolved(pictures.astype(dtype), p["stem"].astype(dtype)), []
        for k, q in enumerate(p["blocks"]):
            y, one = normed(q["norm"], x)
            y = jax.nn.relu(y)
            skip = convolved(y, q["skip"].astype(dtype), 1 + (k > 0))
            y, two = normed(q["norm2"], convolved(y, q["a"].astype(dtype), 1 + (k > 0)))
            x = skip + convolved(jax.nn.relu(y), q["b"].astype(dtype))
            seen += [one, two]
        y, last = normed(p["norm"], x)
        y = jnp.mean(jax.nn.relu(y).astype(jnp.float32), axis=(1, 2))
        return y @ p["out"], [*seen, last]

    def apart(one, two):
        a, c = jax.nn.log_softmax(one, axis=-1), jax.nn.log_softmax(two, axis=-1)
        return jnp.sum(jnp.exp(a) * (a - c), axis=-1)

    def size_of(x):
        return jnp.sqrt(jnp.sum(x * x, axis=(1, 2, 3), keepdims=True) + 1e-12)

    def pushed(p, pictures, noise):
        plain = lax.stop_gradient(net(p, pictures)[0])

        def climb(x, _):
            slope = jax.grad(lambda x: jnp.sum(apart(plain, net(p, x)[0])))(x)
            away = x + stride * slope / size_of(slope) - pictures
            away = away * jnp.minimum(1.0, ball / size_of(away))
            return jnp.clip(pictures + away, 0.0, 1.0), jnp.mean(size_of(away))

        return lax.scan(climb, pictures + 0.01 * noise, None, length=pushes)

    def loss(p, pictures, names, rival):
        logits, seen = net(p, pictures)
        other, _ = net(p, rival)
        soft = 0.9 * jax.nn.one_hot(names, classes) + 0.1 / classes
        plain = -jnp.sum(soft * jax.nn.log_softmax(logits, axis=-1), axis=-1)
        agree = apart(logits, other)
        right = jnp.mean(jnp.exp(chosen(other, names)))
        return jnp.mean(plain + beta * agree), (plain, agree, right, seen)

    def step(p, speed, stats, pictures, names, flips, noise):
        pictures = pictures.astype(jnp.float32) / 255
        pictures = jnp.where(flips[:, None, None, None], pictures[:, :, ::-1], pictures)
        rival, far = pushed(p, pictures, noise)
        (value, extra), grads = jax.value_and_grad(loss, has_aux=True)(p, pictures, names, lax.stop_gradient(rival))
        grads = jax.tree.map(lambda g, w: g + 5e-4 * w, grads, p)
        speed = jax.tree.map(lambda v, g: 0.9 * v + g, speed, grads)
        p = jax.tree.map(lambda w, g, v: w - 0.02 * (g + 0.9 * v), p, grads, speed)
        stats = jax.tree.map(lambda s, x: 0.9 * s + 0.1 * x, stats, extra[3])
        return p, speed, stats, value, extra[:3], far, rival

    def tree(factor=None):
        def drawn(k, i, o):
            return normal(k, k, i, o, scale=factor or (k * k * i) ** -0.5)

        def norm(n):
            return {
                "scale": gain(n) if factor is None else normal(n, scale=factor),
                "shift": normal(n, scale=factor or 0.1),
            }

        p = {"stem": drawn(3, 3, widths[0]), "blocks": [], "norm": norm(widths[-1])}
        for i, o in itertools.pairwise((widths[0], *widths)):
            q = {"norm": norm(i), "norm2": norm(o), "skip": drawn(1, i, o), "a": drawn(3, i, o), "b": drawn(3, o, o)}
            p["blocks"].append(q)
        return p | {"out": normal(widths[-1], classes, scale=factor or widths[-1] ** -0.5)}

    every = [c for pair in itertools.pairwise((widths[0], *widths)) for c in pair] + [widths[-1]]
    stats = [(normal(c), gain(c)) for c in every]
    inputs = (integers(b, side, side, 3, below=256), integers(b, below=classes), booleans(b), normal(b, side, side, 3))
    return Built(step, (tree(), tree(1e-3), stats, *inputs))


@program("gains-of-a-treatment-by-three-heads-a-shift-and-folds-grad", GROUP)
def _treated(size: Size) -> Built:
    """This gives gradients of three heads that tell who gains from a treatment, in folds, with a targeted shift (Dragonnet, 2019).

    Hidden features of treated and others are pulled together; the gain is told with its error from rows left out.
    """
    rows, inputs, n, m, folds, some = pick(
        size, (8009, 177, 200, 100, 5, 997), (997, 58, 64, 32, 3, 211), (17, 4, 6, 5, 2, 7)
    )

    def net(p, x):
        for w, c in zip(p["trunk"], p["shifts"], strict=True):
            x = jax.nn.elu(x @ w + c)
        both = jnp.einsum("rn,knm->krm", x, p["first"])
        both = jax.nn.elu(jnp.einsum("krm,kmo->kro", jax.nn.elu(both), p["second"]))
        return x, jnp.einsum("kro,ko->rk", both, p["last"]), (x @ p["chance"])[:, 0]

    def near(x, y, width):
        gap = jnp.sum(x * x, axis=-1)[:, None] + jnp.sum(y * y, axis=-1) - 2 * x @ y.T
        return jnp.exp(-jnp.maximum(gap, 0.0) / width)

    def loss(p, x, treated, outcome, kept):
        z, answers, logit = net(p, x)
        total = jnp.maximum(jnp.sum(kept), 1.0)
        own = jnp.where(treated > 0, answers[:, 1], answers[:, 0])
        fit = jnp.sum(kept * (outcome - own) ** 2) / total
        odds = jnp.sum(kept * (jax.nn.softplus(logit) - treated * logit)) / total
        chance = jnp.clip(jax.nn.sigmoid(logit), 0.02, 0.98)
        tilt = treated / chance - (1 - treated) / (1 - chance)
        target = jnp.sum(kept * (outcome - own - p["tilt"] * tilt) ** 2) / total
        part, given, alive = z[:some], treated[:some], kept[:some]
        like = near(part, part, 2.0 * n**0.5)
        one, none = alive * given, alive * (1 - given)
        one, none = one / jnp.maximum(jnp.sum(one), 1.0), none / jnp.maximum(jnp.sum(none), 1.0)
        gap = one - none
        decay = sum(jnp.sum(w * w) for w in p["trunk"])
        value = fit + odds + target + 0.5 * gap @ like @ gap + 1e-4 * decay
        return value, (fit, odds, target, answers, chance, tilt)

    def step(p, raw, noise, effects, fold):
        x = (raw - jnp.mean(raw, axis=0)) / (jnp.std(raw, axis=0) + 1e-3)
        lean = x[:, :3] @ effects
        treated = (lean[:, 0] + noise[:, 0] > 0).astype(jnp.float32)
        outcome = jnp.sin(lean[:, 1]) + treated * (1 + 0.5 * jnp.tanh(lean[:, 2])) + 0.3 * noise[:, 1]
        kept = (fold != jnp.arange(folds)[:, None]).astype(jnp.float32)
        one = jax.value_and_grad(loss, has_aux=True)
        (value, extra), grads = jax.vmap(one, in_axes=(0, None, None, None, 0))(p, x, treated, outcome, kept)
        fit, odds, target, answers, chance, tilt = extra
        left = 1 - kept
        gain_of = answers[..., 1] - answers[..., 0]
        own = jnp.where(treated > 0, answers[..., 1], answers[..., 0])
        sway = jnp.sum(left * (gain_of + tilt * (outcome - own)), axis=0)
        gained = jnp.mean(sway)
        error = jnp.std(sway) / rows**0.5
        by = jnp.argsort(jnp.sum(left * gain_of, axis=0))[::-1]
        lift = jnp.cumsum(sway[by]) / (jnp.arange(rows) + 1) - gained
        return grads, value, (fit, odds, target), gained, error, lift, jnp.sum(left * chance, axis=0)

    def many(*shape, fan=1):
        return normal(folds, *shape, scale=fan**-0.5)

    p = {"trunk": [many(inputs, n, fan=inputs), many(n, n, fan=n), many(n, n, fan=n)], "shifts": [many(n, fan=100)] * 3}
    p |= {"first": many(2, n, m, fan=n), "second": many(2, m, m, fan=m), "last": many(2, m, fan=m)}
    p |= {"chance": many(n, 1, fan=4 * n), "tilt": many(fan=100)}
    return Built(step, (p, normal(rows, inputs), normal(rows, 2), normal(3, 3), integers(rows, below=folds)))


@program("worths-of-unseen-moves-held-down-from-logs-only-step", GROUP)
def _held_down(size: Size) -> Built:
    """This trains a player from logs only, with worths of moves that the logs lack held down (CQL, Kumar, 2020).

    Two critics, a squashed bell-shaped player, its heat and the weight of the holding down all take a step of Adam.
    """
    b, see, act, n, draws, depth = pick(size, (256, 67, 21, 256, 10, 3), (64, 17, 6, 48, 10, 3), (3, 4, 2, 6, 3, 3))

    def dense(p, x):
        for k, (w, c) in enumerate(p):
            x = x @ w + c
            x = jax.nn.relu(layer_normed(x, jnp.ones(x.shape[-1])) if k == 0 else x) if k < depth else x
        return x

    def worth(p, seen, move):
        x = jnp.concatenate([seen, move], axis=-1)
        return jax.vmap(lambda q: dense(q, x)[..., 0])(p)

    def acted(p, seen, noise):
        mean, log = jnp.split(dense(p, seen), 2, axis=-1)
        log = jnp.clip(log, -5.0, 2.0)
        raw = mean + jnp.exp(log) * noise
        chance = -0.5 * noise**2 - log - 0.919 - 2 * (np.log(2.0) - raw - jax.nn.softplus(-2 * raw))
        return jnp.tanh(raw), jnp.sum(chance, axis=-1)

    def critic_loss(critics, hold, target, heat, player, batch, noises, spread):
        seen, move, reward, after, ended = batch
        later, chance = acted(player, after, noises[0])
        value = jnp.min(worth(target, after, later), axis=0) - jnp.exp(heat) * chance
        goal = lax.stop_gradient(reward + 0.99 * jnp.where(ended, 0.0, 1.0) * value)
        own = worth(critics, seen, move)
        fit = jnp.mean((own - goal) ** 2)
        wide = jnp.broadcast_to(seen[:, None], (b, draws, see))
        now, chance_now = acted(player, wide, noises[1])
        then, chance_then = acted(player, jnp.broadcast_to(after[:, None], (b, draws, see)), noises[2])
        even = jnp.tanh(spread)
        every = [
            worth(critics, wide, even) + act * np.log(2.0),
            worth(critics, wide, lax.stop_gradient(now)) - lax.stop_gradient(chance_now),
            worth(critics, wide, lax.stop_gradient(then)) - lax.stop_gradient(chance_then),
        ]
        soft = jax.nn.logsumexp(jnp.concatenate(every, axis=-1), axis=-1) - np.log(3 * draws)
        gap = jnp.mean(soft - own, axis=1)
        push = jnp.clip(jnp.exp(hold), 0.0, 1e6)
        held = jnp.sum(lax.stop_gradient(push) * (gap - 5.0))
        return fit + held, (fit, gap, own, -jnp.sum(push * lax.stop_gradient(gap - 5.0)))

    def player_loss(player, heat, critics, seen, noise):
        move, chance = acted(player, seen, noise)
        value = jnp.min(worth(critics, seen, move), axis=0)
        return jnp.mean(lax.stop_gradient(jnp.exp(heat)) * chance - value), (jnp.mean(chance), jnp.mean(value))

    def adam(w, g, m, v, rate):
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.999 * jnp.abs(v) + 0.001 * g * g, v, g)
        return jax.tree.map(lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-8), w, m, v), m, v

    def step(p, first, second, target, batch, noises, many, spread):
        critics, player, heat, hold = p
        noises = (noises[0], *many)
        grad = jax.value_and_grad(critic_loss, has_aux=True)
        (_, seen), slopes = grad(critics, hold, target, heat, player, batch, noises, spread)
        of_hold = jax.grad(lambda h: -jnp.sum(jnp.exp(h) * (seen[1] - 5.0)))(hold)
        (_, told), of_player = jax.value_and_grad(player_loss, has_aux=True)(player, heat, critics, batch[0], noises[0])
        of_heat = -jnp.exp(heat) * (told[0] - act)
        grads = (slopes, of_player, of_heat, of_hold)
        p, first, second = adam(p, grads, first, second, 3e-4)
        target = jax.tree.map(lambda s, w: s + 0.005 * (w - s), target, p[0])
        return p, first, second, target, seen[:2], told, grads

    def tree(factor=None):
        def layers(i, o, *many):
            pairs = itertools.pairwise((i, *[n] * depth, o))
            return [
                (normal(*many, i, o, scale=factor or i**-0.5), normal(*many, o, scale=factor or 0.1)) for i, o in pairs
            ]

        small = factor or 0.1
        return layers(see + act, 1, 2), layers(see, 2 * act), normal(scale=small), normal(2, scale=small)

    batch = (normal(b, see), normal(b, act, scale=0.5), normal(b), normal(b, see), booleans(b))
    noises = (normal(1, b, act), normal(2, b, draws, act), normal(b, draws, act))
    return Built(step, (tree(), tree(1e-3), tree(1e-4), tree()[0], batch, *noises))
