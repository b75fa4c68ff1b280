"""A memory that learns, multivectors, trees of small layers and trees of words, the thirtieth set: its author saw no plan."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, gain, half, integers, normal, pick, program, weight
from benchmarks.workloads.twenty_fifth_parts import attention, dense, dense_of, layer_norm, norm_of, rms_norm

GROUP = "thirtieth"


@program("a-deep-memory-that-learns-what-astonishes-it-with-pushes-one-word-decode", GROUP)
def _memory(size: Size) -> Built:
    """This writes one word of many answers with a layer whose memory is a small network that is trained at each word.

    It is Titans with memory as gate (Behrouz, 2025; lucidrains/titans-pytorch): the gradient of the memory's error is its surprise,
    surprises are pushed on and old ones forgotten by gates per head, and a window of few words beside it has fixed first words.
    """
    b, n, h, d, deep, window, fixed, wide = pick(
        size, (24, 1024, 8, 64, 256, 512, 16, 2816), (12, 512, 8, 64, 128, 64, 8, 1376), (2, 8, 2, 4, 6, 4, 2, 12)
    )
    dtype = half(size)

    def recall(memory, x):
        """This asks a memory for one key: two layers beside a straight way."""
        y = jax.nn.silu(x @ memory["one"]) @ memory["two"]
        y = (y - jnp.mean(y)) * lax.rsqrt(jnp.var(y) + 1e-5) * memory["scale"]
        return x + y

    def astonished(memory, key, value):
        """This is the error of a memory."""
        return jnp.mean(jnp.square(recall(memory, key) - value))

    def learned(memory, push, key, value, query, gates):
        """This trains the memory of one head and asks it."""
        rate, keep, forget = gates
        error, grads = jax.value_and_grad(astonished)(memory, key, value)
        long = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g / jnp.maximum(long, 1.0), grads)
        push = jax.tree.map(lambda s, g: keep * s - rate * g, push, grads)
        memory = jax.tree.map(lambda m, s: (1 - forget) * m + s, memory, push)
        return memory, push, recall(memory, query), error

    def unit(x):
        """This gives rows length one."""
        x = x.astype(jnp.float32)
        return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

    def step(p, x, memory, push, cache, count):
        """This is the layer for one word of each answer."""
        y = rms_norm(p["norm1"], x)
        query, key, value = (y @ p[k] for k in ("q", "k", "v"))
        heads = [z.reshape(b, h, d) for z in (query, key, value)]
        gates = jax.nn.sigmoid(dense(p["gates"], y).astype(jnp.float32)).reshape(b, h, 3) * jnp.array([0.5, 0.95, 0.05])
        inputs = (unit(heads[1]), jax.nn.silu(heads[2].astype(jnp.float32)), unit(heads[0]), gates)
        memory, push, told, error = jax.vmap(jax.vmap(learned))(memory, push, *inputs)

        rows, at = jnp.arange(b), count % window
        keys, values = cache["k"].at[rows, at].set(heads[1]), cache["v"].at[rows, at].set(heads[2])
        first = jnp.broadcast_to(p["first"], (b, *p["first"].shape))
        seen = (jnp.arange(window) <= count[:, None]) | (count[:, None] >= window)
        seen = jnp.pad(seen, ((0, 0), (fixed, 0)), constant_values=True)
        both = [jnp.concatenate([first[:, :, k], z], axis=1) for k, z in enumerate((keys, values))]
        near = attention(heads[0][:, None], *both, seen[:, None, None]).reshape(b, h * d)

        told = rms_norm(p["norm3"], told.reshape(b, h * d).astype(dtype))
        mixed = rms_norm(p["norm4"], near) * jax.nn.sigmoid(told)
        x = x + mixed @ p["o"]
        y = rms_norm(p["norm2"], x)
        x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
        return x, memory, push, {"k": keys, "v": values}, error

    p = {k: gain(m, dtype) for k, m in (("norm1", n), ("norm2", n), ("norm3", h * d), ("norm4", h * d))}
    p |= {k: weight(n, h * d, dtype=dtype) for k in ("q", "k", "v")}
    p |= {"gates": dense_of(n, 3 * h, dtype), "o": weight(h * d, n, dtype=dtype)}
    p["first"] = normal(fixed, 2, h, d, dtype=dtype)
    p |= {
        "gate": weight(n, wide, dtype=dtype),
        "up": weight(n, wide, dtype=dtype),
        "down": weight(wide, n, dtype=dtype),
    }

    def memories(scale, offset):
        """This describes the memories of all heads."""
        two = {
            "one": normal(b, h, d, deep, scale=scale * d**-0.5),
            "two": normal(b, h, deep, d, scale=scale * deep**-0.5),
        }
        return two | {"scale": normal(b, h, d, scale=0.1 * scale, offset=offset)}

    cache = {k: normal(b, window, h, d, dtype=dtype) for k in ("k", "v")}
    inputs = (normal(b, n, dtype=dtype), memories(1.0, 1.0), memories(0.1, 0.0), cache, integers(b, below=2 * window))
    return Built(step, (p, *inputs))


def _algebra() -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Returns the tables of the geometric and of the outer product of G(3, 0, 1), and the grades of its sixteen parts."""
    blades = [c for k in range(5) for c in itertools.combinations(range(4), k)]
    geometric, outer = np.zeros((16, 16, 16), np.float32), np.zeros((16, 16, 16), np.float32)
    for i, one in enumerate(blades):
        for j, two in enumerate(blades):
            letters, sign = [*one, *two], 1.0
            for end in range(len(letters) - 1, 0, -1):
                for k in range(end):
                    if letters[k] > letters[k + 1]:
                        letters[k], letters[k + 1], sign = letters[k + 1], letters[k], -sign
            both = set(one) & set(two)
            rest = tuple(x for x in sorted(set(letters)) if x not in both)
            geometric[blades.index(rest), i, j] = 0.0 if 0 in both else sign
            outer[blades.index(rest), i, j] = 0.0 if both else sign
    return geometric, outer, [len(c) for c in blades]


@program("points-planes-and-turns-as-multivectors-multiplied-and-attended-layers", GROUP)
def _multivectors(size: Size) -> Built:
    """This moves bodies by layers whose states are multivectors, so that turned scenes give turned answers.

    It is the geometric algebra transformer (Brehmer, 2023; Qualcomm-AI-research/geometric-algebra-transformer): linear maps act per
    grade, pairs are multiplied and joined, attention takes products that turns do not change, and plain numbers go beside.
    """
    b, items, c, s, h, depth = pick(size, (32, 256, 32, 128, 8, 4), (4, 96, 8, 32, 4, 2), (2, 4, 2, 4, 2, 1))
    geometric, outer, grades = _algebra()
    basis = np.zeros((9, 16, 16), np.float32)
    for i, g in enumerate(grades):
        basis[g, i, i] = 1.0
        for o in range(16):
            if geometric[o, 1, i]:
                basis[5 + g, o, i] = geometric[o, 1, i]
    basis /= np.sqrt(np.maximum((basis**2).sum((1, 2), keepdims=True), 1.0)) / 2
    flip = np.arange(15, -1, -1)
    signs = np.array([outer[15, i, 15 - i] for i in range(16)], np.float32)
    plain = np.array([i for i in range(16) if geometric[0, i, i] != 0])

    def linear(q, x, y):
        """This maps multivectors [..., channels, 16] and plain numbers together."""
        x_out = jnp.einsum("oik,kpq,...iq->...op", q["vv"], basis, x)
        x_out = x_out.at[..., 0].add(y @ q["sv"])
        return x_out, x[..., 0] @ q["vs"] + dense(q["ss"], y)

    def normed(x, y):
        """This divides multivectors by their mean length, and norms plain numbers."""
        size_of = jnp.mean(jnp.sum(jnp.square(x[..., plain]), axis=-1), axis=-1)
        y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
        return x * lax.rsqrt(size_of + 1e-2)[..., None, None], y

    def attended(q, x, y, real):
        """This attends by products of multivectors and of plain numbers."""
        three, flat = linear(q["qkv"], x, y)
        xq, xk, xv = (z.reshape(b, items, h, c // h, 16) for z in jnp.split(three, 3, axis=2))
        yq, yk, yv = (z.reshape(b, items, h, s // h) for z in jnp.split(flat, 3, axis=-1))
        scores = jnp.einsum("bqhcp,bkhcp->bhqk", xq[..., plain], xk[..., plain]) + jnp.einsum("bqhs,bkhs->bhqk", yq, yk)
        scores = scores * (8 * c // h + s // h) ** -0.5
        probs = jax.nn.softmax(jnp.where(real[:, None, None], scores, -1e9), axis=-1)
        x = jnp.einsum("bhqk,bkhcp->bqhcp", probs, xv).reshape(b, items, c, 16)
        y = jnp.einsum("bhqk,bkhs->bqhs", probs, yv).reshape(b, items, s)
        return linear(q["out"], x, y)

    def multiplied(q, x, y, mean):
        """This multiplies and joins channels, and opens them by their plain parts."""
        four, y = linear(q["up"], x, y)
        one, two, three, last = jnp.split(four, 4, axis=2)
        product = jnp.einsum("pij,bnci,bncj->bncp", geometric, one, two)
        left, right = (signs * z[..., flip] for z in (three, last))
        join = (signs * jnp.einsum("pij,bnci,bncj->bncp", outer, left, right))[..., flip] * mean
        x = jnp.concatenate([product, join], axis=2)
        return linear(q["down"], jax.nn.gelu(x[..., :1]) * x, jax.nn.gelu(y))

    def run(p, where, speed, mass, count):
        """This tells where bodies will be."""
        real = jnp.arange(items) < items - count[:, None]
        ones = jnp.ones_like(where[..., :1])
        zeros = jnp.zeros((b, items, 16))
        point = zeros.at[..., 11:14].set(where * jnp.array([-1.0, 1.0, -1.0])).at[..., 14:15].set(ones)
        moved = zeros.at[..., 0:1].set(ones).at[..., 5:8].set(0.5 * speed)
        x = jnp.stack([point, moved], axis=2)
        x, y = linear(p["enter"], x, jnp.abs(mass)[..., None])
        mean = (
            jnp.sum(x * real[..., None, None], axis=(1, 2), keepdims=True)[..., 15:]
            / jnp.sum(real, axis=1)[:, None, None, None]
        )

        def layer(carry, q):
            """This is one layer."""
            x, y = carry
            dx, dy = attended(q, *normed(x, y), real)
            x, y = x + dx, y + dy
            dx, dy = multiplied(q, *normed(x, y), 1 + mean)
            return (x + dx, y + dy), jnp.mean(jnp.square(x), axis=(1, 2))

        (x, y), large = lax.scan(layer, (x, y), p["layers"])
        x, _ = linear(p["leave"], *normed(x, y))
        low = x[:, :, 0, 14]
        low = jnp.where(jnp.abs(low) < 0.1, 0.1 * jnp.where(low < 0, -1.0, 1.0), low)
        after = x[:, :, 0, 11:14] * jnp.array([-1.0, 1.0, -1.0]) / low[..., None]
        return jnp.where(real[..., None], after, where), large

    def linear_of(i, o, si, so, *many):
        """This describes a linear map."""
        q = {"vv": normal(*many, o, i, 9, scale=0.5 * i**-0.5), "vs": normal(*many, i, so, scale=0.3 * i**-0.5)}
        q |= {"ss": {"w": normal(*many, si, so, scale=si**-0.5), "b": normal(*many, so, scale=0.1)}}
        return q | {"sv": normal(*many, si, o, scale=0.3 * si**-0.5)}

    q = {"qkv": linear_of(c, 3 * c, s, 3 * s, depth), "out": linear_of(c, c, s, s, depth)}
    q |= {"up": linear_of(c, 4 * c, s, 2 * s, depth), "down": linear_of(2 * c, c, 2 * s, s, depth)}
    p = {"enter": linear_of(2, c, 1, s), "layers": q, "leave": linear_of(c, 1, s, 1)}
    inputs = (normal(b, items, 3), normal(b, items, 3), normal(b, items), integers(b, below=items // 3))
    return Built(run, (p, *inputs))


@program("words-walk-down-trees-of-small-units-and-hear-only-those-on-their-way", GROUP)
def _trees(size: Size) -> Built:
    """This puts texts through layers whose wide part is some trees: each word walks down by signs and hears few units.

    It is UltraFastBERT (Belcak, 2023; pbelcak/UltraFastBERT): a unit's product both tells the way and is what is added, so of some
    thousands of units each word hears twelve per tree.
    """
    b, t, n, h, trees, levels, depth = pick(
        size, (32, 128, 768, 12, 4, 11, 3), (8, 64, 192, 4, 3, 9, 2), (2, 5, 8, 2, 2, 3, 1)
    )
    dtype, units = half(size), 2**levels - 1

    def walked(q, x):
        """This walks all words [words, n] down all trees, and tells where they end."""

        def down(carry, _):
            """This is one level."""
            at, total = carry
            told = jnp.einsum("wn,wkn->wk", x, q["in"][jnp.arange(trees), at], preferred_element_type=jnp.float32)
            told = told + q["b"][jnp.arange(trees), at].astype(jnp.float32)
            heard = jax.nn.gelu(told).astype(dtype)
            total = total + jnp.einsum("wk,wkn->wn", heard, q["out"][jnp.arange(trees), at]).astype(jnp.float32)
            return (2 * at + 1 + (told > 0), total), jnp.mean(jax.nn.sigmoid(told) > 0.5, axis=0)

        start = (jnp.zeros((x.shape[0], trees), jnp.int32), jnp.zeros(x.shape, jnp.float32))
        (at, total), turned = lax.scan(down, start, None, length=levels)
        return total.astype(dtype), at - units, turned

    def run(p, words, kinds, length):
        """This runs all layers and tells how evenly the leaves are met."""
        real = jnp.arange(t) < t - length[:, None]
        x = p["table"][words] + p["places"] + p["kinds"][kinds[:, None] * (jnp.arange(t) > t // 2)]
        x = layer_norm(p["norm"], x)
        met, ways = [], []
        for q in p["layers"]:
            query, key, value = (dense(q[k], x).reshape(b, t, h, n // h) for k in ("q", "k", "v"))
            y = dense(q["o"], attention(query, key, value, real[:, None, None]).reshape(b, t, n))
            x = layer_norm(q["norm1"], x + y)
            y, leaf, turned = walked(q["tree"], x.reshape(b * t, n))
            x = layer_norm(q["norm2"], x + y.reshape(b, t, n))
            leaf = leaf + jnp.arange(trees) * (units + 1)
            seen = jnp.broadcast_to(real.reshape(-1, 1), leaf.shape).reshape(-1)
            count = jnp.zeros(trees * (units + 1), jnp.int32).at[leaf.reshape(-1)].add(seen.astype(jnp.int32))
            met.append(count.reshape(trees, units + 1))
            ways.append(turned)
        met = jnp.stack(met)
        share = met / jnp.sum(met, axis=-1, keepdims=True)
        unsure = -jnp.sum(jnp.where(met > 0, share * jnp.log(jnp.maximum(share, 1e-9)), 0.0), axis=-1)
        return jnp.tanh(dense(p["pool"], x[:, 0])), met, unsure, jnp.stack(ways)

    def layer_of():
        """This describes one layer."""
        tree = {
            "in": normal(trees, units, n, dtype=dtype, scale=n**-0.5),
            "b": normal(trees, units, dtype=dtype, scale=0.1),
        }
        tree |= {"out": normal(trees, units, n, dtype=dtype, scale=(trees * levels) ** -0.5)}
        q = {k: dense_of(n, n, dtype) for k in ("q", "k", "v", "o")}
        return q | {"tree": tree, "norm1": norm_of(n, dtype), "norm2": norm_of(n, dtype)}

    words = 30522 if size == "gpu" else 1009
    p = {
        "table": normal(words, n, dtype=dtype),
        "places": normal(t, n, dtype=dtype, scale=0.3),
        "norm": norm_of(n, dtype),
    }
    p |= {"kinds": normal(2, n, dtype=dtype, scale=0.3), "layers": [layer_of() for _ in range(depth)]}
    p |= {"pool": dense_of(n, n, dtype)}
    return Built(run, (p, integers(b, t, below=words), integers(b, below=2), integers(b, below=t // 2)))


@program("sentences-read-from-leaves-to-roots-by-sums-of-children", GROUP)
def _roots(size: Size) -> Built:
    """This reads pairs of sentences along their grammar from leaves to roots and tells how alike they are.

    It is the child-sum Tree-LSTM (Tai, 2015; dasguptar/treelstm.pytorch): heights are found first, then all words of one height are
    read together, each with a gate per child, and likeness is a curve over five marks.
    """
    b, m, seen, n, words = pick(size, (512, 40, 300, 256, 21701), (32, 24, 100, 64, 2003), (2, 6, 5, 4, 7))
    total, marks = 2 * b * m, 5

    def heights(parent, root):
        """This is how far each word is above its lowest leaf, and how many rounds that took."""

        def lift(carry):
            old, _, k = carry
            up = jnp.zeros(total, jnp.int32).at[parent].max(jnp.where(root, 0, old + 1))
            fresh = jnp.maximum(old, up)
            return fresh, jnp.any(fresh != old), k + 1

        start = (jnp.zeros(total, jnp.int32), jnp.bool(True), jnp.int32(0))
        height, _, k = lax.while_loop(lambda c: c[1], lift, start)
        return height, k

    def run(p, word, jump, mark):
        """This reads all sentences; a parent is some words after its child, and the last word is the root."""
        own = jnp.arange(total)
        end = own // m * m + m - 1
        root = own == end
        parent = jnp.minimum(own + 1 + jump.reshape(-1), end)
        height, rounds = heights(parent, root)
        x = p["table"][word.reshape(-1)]
        given = dense(p["given"], x)
        ask = dense(p["forget"], x)[parent]
        upward = jnp.where(root, total, parent)

        def read(level, carry):
            """This reads all words of one height."""
            h, c = carry
            below = jax.ops.segment_sum(h, upward, total)
            gate = jax.nn.sigmoid(ask + h @ p["forget_h"])
            kept = jax.ops.segment_sum(gate * c, upward, total)
            i, o, u = jnp.split(given + below @ p["below"], 3, axis=-1)
            fresh = jax.nn.sigmoid(i) * jnp.tanh(u) + kept
            now = (height == level)[:, None]
            return jnp.where(now, jax.nn.sigmoid(o) * jnp.tanh(fresh), h), jnp.where(now, fresh, c)

        h, _ = lax.fori_loop(0, jnp.max(height) + 1, read, (jnp.zeros((total, n)), jnp.zeros((total, n))))
        top = h.reshape(2, b, m, n)[:, :, -1]
        alike = jnp.concatenate([top[0] * top[1], jnp.abs(top[0] - top[1])], axis=-1)
        logp = jax.nn.log_softmax(dense(p["mark"], jax.nn.sigmoid(dense(p["alike"], alike))), axis=-1)
        true = 1 + (marks - 1) * mark / 1000.0
        low = jnp.floor(true)
        places = jnp.arange(1, marks + 1)
        target = jnp.where(places == low[:, None], (low + 1 - true)[:, None], 0.0)
        target = jnp.where(places == low[:, None] + 1, (true - low)[:, None], target)
        lost = jnp.sum(jnp.where(target > 0, target * (jnp.log(jnp.maximum(target, 1e-9)) - logp), 0.0), axis=-1)
        told = jnp.sum(jnp.exp(logp) * places, axis=-1)
        one, two = told - jnp.mean(told), true - jnp.mean(true)
        together = jnp.sum(one * two) * lax.rsqrt(jnp.sum(one**2) * jnp.sum(two**2) + 1e-9)
        return told, jnp.mean(lost), together, jnp.max(height.reshape(2, b, m), axis=-1), rounds, top

    p = {"table": normal(words, seen), "given": dense_of(seen, 3 * n), "forget": dense_of(seen, n)}
    p |= {
        "below": weight(n, 3 * n),
        "forget_h": weight(n, n),
        "alike": dense_of(2 * n, 50),
        "mark": dense_of(50, marks),
    }
    return Built(run, (p, integers(2, b, m, below=words), integers(2, b, m, below=6), integers(b, below=1001)))
