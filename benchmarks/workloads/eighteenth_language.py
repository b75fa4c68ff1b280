"""Models of language, their memories, draws and scores, the eighteenth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import (
    Built,
    Random,
    Size,
    booleans,
    gain,
    half,
    integers,
    normal,
    pick,
    program,
    weight,
)
from benchmarks.workloads.sixteenth_language import rms, rotate

GROUP = "eighteenth"


@program("segments-read-a-compressed-memory-by-learned-gates-prefill", GROUP)
def _compressed(size: Size) -> Built:
    """This gives a layer over a long text whose segments attend to themselves and to a matrix that sums up earlier segments.

    The memory holds only what it could not yet predict of new values, and each head has a gate between near and far.
    """
    b, segments, s, n, h = pick(size, (2, 6, 500, 1040, 13), (2, 6, 60, 208, 13), (2, 6, 5, 8, 2))
    d, dtype = n // h, half(size)

    def layer(p, x, start):
        y = rms(x, p["norm"])
        q, k, v = (jnp.einsum("btn,nhd->bthd", y, p[name]) for name in "qkv")

        def split(z):
            return jnp.moveaxis(z.reshape(b, segments, s, h, d), (1, 3), (0, 2))

        causal = jnp.tri(s, dtype=bool)
        gate = jax.nn.sigmoid(p["gate"])[:, None, None]

        def segment(carry, qkv):
            memory, total = carry
            q, k, v = qkv
            fq, fk = (jax.nn.elu(z.astype(jnp.float32)) + 1.0 for z in (q, k))
            far = (fq @ memory) / (fq @ total[..., None] + 1e-6)
            known = (fk @ memory) / (fk @ total[..., None] + 1e-6)
            memory = memory + jnp.swapaxes(fk, -1, -2) @ (v.astype(jnp.float32) - known)
            total = total + jnp.sum(fk, axis=-2)
            places = jnp.arange(s)
            q, k = (jnp.moveaxis(rotate(jnp.moveaxis(z, 1, 2), places), 2, 1) for z in (q, k))
            scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32) * d**-0.5
            near = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(dtype) @ v
            return (memory, total), (gate * far + (1 - gate) * near).astype(dtype)

        zero = (start, jnp.ones((b, h, d)))
        (memory, total), out = lax.scan(segment, zero, (split(q), split(k), split(v)))
        out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(b, segments * s, n)
        x = x + out @ p["out"]
        y = rms(x, p["norm2"])
        return x + (jax.nn.gelu(y @ p["gate_up"][0]) * (y @ p["gate_up"][1])) @ p["down"], memory, total

    p = {name: normal(n, h, d, dtype=dtype, scale=n**-0.5) for name in "qkv"}
    p |= {"norm": gain(n, dtype), "norm2": gain(n, dtype), "gate": normal(h), "out": weight(n, n, dtype=dtype)}
    p |= {"gate_up": weight(2, n, 2 * n, dtype=dtype), "down": weight(2 * n, n, dtype=dtype)}
    return Built(layer, (p, normal(b, segments * s, n, dtype=dtype), normal(b, h, d, d, scale=0.01)))


@program("compressed-chosen-and-near-blocks-three-gates-attention", GROUP)
def _three_ways(size: Size) -> Built:
    """This gives attention that adds three readings: of blocks squeezed to one key, of the best whole blocks, and of a window.

    All heads that share keys choose the same blocks, by the sum of their weights on the squeezed keys.
    """
    t, n, groups, per, d, block, keep, window = pick(
        size, (1536, 1024, 4, 4, 64, 64, 6, 300), (384, 256, 2, 4, 32, 32, 3, 70), (24, 8, 2, 2, 4, 4, 2, 5)
    )
    dtype, blocks, low = half(size), t // block, -1e30

    def attend(scores, mask):
        return jax.nn.softmax(jnp.where(mask, scores, low), axis=-1) * mask

    def layer(p, x):
        y = rms(x, p["norm"])
        q = jnp.einsum("tn,ngpd->tgpd", y, p["q"])
        k, v = (jnp.einsum("tn,ngd->tgd", y, p[name]) for name in "kv")
        gates = jax.nn.sigmoid(jnp.einsum("tn,ngpw->tgpw", y, p["gates"]).astype(jnp.float32))
        place = jnp.arange(t)

        def squeezed(z, w1, w2):
            z = jnp.moveaxis(z.reshape(blocks, block, groups, d) + p["within"][:, None], 1, 2)
            return jax.nn.relu(z.reshape(blocks, groups, block * d) @ w1) @ w2

        ck, cv = squeezed(k, *p["squeeze_k"]), squeezed(v, *p["squeeze_v"])
        scores = jnp.einsum("tgpd,bgd->tgpb", q, ck).astype(jnp.float32) * d**-0.5
        ended = (jnp.arange(blocks) + 1) * block - 1 <= place[:, None]
        coarse = attend(scores, ended[:, None, None])
        far = jnp.einsum("tgpb,bgd->tgpd", coarse.astype(dtype), cv)

        own = place // block
        worth = (
            jnp.sum(coarse, axis=2)
            + 10.0 * (jnp.arange(blocks) == own[:, None])[:, None]
            + 5.0 * (jnp.arange(blocks) == 0)
        )
        worth = jnp.where((jnp.arange(blocks) <= own[:, None])[:, None], worth, -1.0)
        best, chosen = lax.top_k(worth, keep)
        q, k = rotate(q.reshape(t, -1, d), place).reshape(q.shape), rotate(k, place)
        picked = jnp.zeros((t, groups, blocks), bool)
        picked = picked.at[place[:, None, None], jnp.arange(groups)[None, :, None], chosen].set(best >= 0)
        causal = place[None] <= place[:, None]
        full = jnp.einsum("tgpd,sgd->tgps", q, k).astype(jnp.float32) * d**-0.5
        fine = attend(full, (jnp.repeat(picked, block, axis=-1) & causal[:, None])[:, :, None])
        close = attend(full, (causal & (place[:, None] - place[None] < window))[:, None, None])
        fine, close = (jnp.einsum("tgps,sgd->tgpd", w.astype(dtype), v) for w in (fine, close))
        out = sum(gates[..., i, None] * z for i, z in enumerate((far, fine, close)))
        return x + out.reshape(t, -1).astype(dtype) @ p["out"], chosen, jnp.mean(gates, axis=(0, 1, 2))

    p = {"norm": gain(n, dtype), "q": normal(n, groups, per, d, dtype=dtype, scale=n**-0.5)}
    p |= {name: normal(n, groups, d, dtype=dtype, scale=n**-0.5) for name in "kv"}
    p |= {
        "gates": normal(n, groups, per, 3, dtype=dtype, scale=n**-0.5),
        "within": normal(block, d, dtype=dtype, scale=0.1),
    }
    for name in ("squeeze_k", "squeeze_v"):
        p[name] = (weight(block * d, 2 * d, dtype=dtype), weight(2 * d, d, dtype=dtype))
    p["out"] = weight(groups * per * d, n, dtype=dtype)
    return Built(layer, (p, normal(t, n, dtype=dtype)))


@program("scores-fade-by-gates-that-forget-with-shifted-keys-layer", GROUP)
def _forget(size: Size) -> Built:
    """This gives two layers of causal attention whose scores lose the sum of logarithms of forget gates in between.

    Keys and values are mixed with those of the word before; outputs are normed by head and gated.
    """
    b, t, n, h = pick(size, (3, 1025, 960, 15), (2, 143, 240, 15), (2, 7, 8, 2))
    d, dtype = n // h, half(size)

    def shifted(z, share):
        share = jax.nn.sigmoid(share.astype(jnp.float32)).astype(dtype)[..., None]
        before = jnp.pad(z, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
        return share * before + (1 - share) * z

    def layer(p, x, document):
        y = rms(x, p["norm"])
        q, k, v = ((y @ p[name]).reshape(b, t, h, d) for name in "qkv")
        shares = (y @ p["shares"]).reshape(b, t, 2, h)
        k, v = shifted(k, shares[:, :, 0]), shifted(v, shares[:, :, 1])
        q, k = rms(q, p["q_norm"]), rms(k, p["k_norm"])
        fade = jax.nn.log_sigmoid((y @ p["forget"]).astype(jnp.float32) + p["forget_bias"])
        total = jnp.moveaxis(jnp.cumsum(fade, axis=1), 1, 2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * d**-0.5
        scores = scores + total[..., :, None] - total[..., None, :]
        mask = jnp.tri(t, dtype=bool) & (document[:, :, None] == document[:, None, :])
        probs = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
        out = jnp.einsum("bhqk,bkhd->bqhd", probs.astype(dtype), v)
        out = rms(out, p["o_norm"]).reshape(b, t, n) * jax.nn.sigmoid(y @ p["out_gate"])
        x = x + out @ p["out"]
        y = rms(x, p["norm2"])
        reach = jnp.sum(probs * (jnp.arange(t)[:, None] - jnp.arange(t)[None]), axis=-1)
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], jnp.mean(reach, axis=(0, 2))

    def model(layers, x, starts):
        document, reaches = jnp.cumsum(~starts, axis=1), []
        document = document // jnp.maximum(t // 8, 1)
        for p in layers:
            x, reach = layer(p, x, document)
            reaches.append(reach)
        return x, jnp.stack(reaches)

    def made():
        p = {name: weight(n, n, dtype=dtype) for name in ("q", "k", "v", "out", "out_gate")}
        p |= {name: gain(d, dtype) for name in ("q_norm", "k_norm", "o_norm")} | {"norm": gain(n, dtype)}
        p |= {"shares": weight(n, 2 * h, dtype=dtype), "forget": weight(n, h, dtype=dtype), "norm2": gain(n, dtype)}
        p |= {"forget_bias": normal(h, offset=4.0), "gate": weight(n, 2 * n, dtype=dtype)}
        return p | {"up": weight(n, 2 * n, dtype=dtype), "down": weight(2 * n, n, dtype=dtype)}

    return Built(model, ([made(), made()], normal(b, t, n, dtype=dtype), booleans(b, t)))


@program("queries-keys-values-as-products-of-small-factors-decode", GROUP)
def _factors(size: Size) -> Built:
    """This gives the next words of many chats by layers that cache small factors of keys and values instead of the whole.

    A query, key or value of all heads is a mean of a few outer products of a vector over heads and a vector over channels.
    """
    b, t, n, h, d, rq, rk, words = pick(
        size, (48, 1200, 1664, 26, 64, 6, 2, 20000), (6, 150, 416, 13, 32, 6, 2, 2000), (2, 7, 8, 2, 4, 3, 2, 13)
    )
    dtype, layers = half(size), 3

    def step(params, caches, text, lengths):
        x = params["table"][text]
        lengths = jnp.minimum(lengths, t - 1)
        rows, fresh = jnp.arange(b), []
        for p, old in zip(params["layers"], caches, strict=True):
            y = rms(x, p["norm"])

            def factors(name, rank, p=p, y=y):
                heads, channels = jnp.split(y @ p[name], [rank * h], axis=-1)
                return heads.reshape(b, rank, h), channels.reshape(b, rank, d)

            (aq, bq), (ak, bk), (av, bv) = factors("q", rq), factors("k", rk), factors("v", rk)
            bq, bk = rotate(bq, lengths), rotate(bk, lengths)
            new = (ak, bk, av, bv)
            cache = tuple(c.at[rows, lengths].set(z) for c, z in zip(old, new, strict=True))
            fresh.append(cache)
            ak, bk, av, bv = cache
            q = jnp.einsum("brh,brd->bhd", aq, bq) / rq
            inner = jnp.einsum("bhd,btrd->bhtr", q, bk)
            scores = jnp.einsum("bhtr,btrh->bht", inner, ak).astype(jnp.float32) * (d**-0.5 / rk)
            seen = jnp.arange(t) <= lengths[:, None]
            probs = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30)).astype(dtype)
            mixed = jnp.einsum("bht,btrh->bhtr", probs, av)
            out = jnp.einsum("bhtr,btrd->bhd", mixed, bv) / rk
            x = x + out.reshape(b, h * d) @ p["out"]
            y = rms(x, p["norm2"])
            x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
        logits = (rms(x, params["norm"]) @ params["table"].T).astype(jnp.float32)
        word = jnp.argmax(logits, axis=-1)
        return word, jnp.max(jax.nn.log_softmax(logits), axis=-1), fresh

    def made():
        p = {"q": weight(n, rq * (h + d), dtype=dtype), "norm": gain(n, dtype), "norm2": gain(n, dtype)}
        p |= {name: weight(n, rk * (h + d), dtype=dtype) for name in "kv"} | {"out": weight(h * d, n, dtype=dtype)}
        p |= {"gate": weight(n, 2 * n, dtype=dtype), "up": weight(n, 2 * n, dtype=dtype)}
        return p | {"down": weight(2 * n, n, dtype=dtype)}

    params = {"table": normal(words, n, dtype=dtype, scale=2 * n**-0.5), "norm": gain(n, dtype)}
    params["layers"] = [made() for _ in range(layers)]
    caches = [tuple(normal(b, t, rk, w, dtype=dtype) for w in (h, d, h, d)) for _ in range(layers)]
    return Built(step, (params, caches, integers(b, below=words), integers(b, below=t)))


@program("draws-steered-to-a-wanted-surprise-over-words-scan", GROUP)
def _steered(size: Size) -> Built:
    """This gives a few drawn words for each prompt by a small gated network, where feedback keeps the surprise near a target.

    Words that are more surprising than a moving bound are left out; the bound moves by the error of the surprise, and words whose
    first letters were banned or which were drawn before are made less likely.
    """
    b, n, words, steps = pick(size, (64, 768, 12001, 5), (24, 256, 3001, 5), (2, 8, 17, 5))
    dtype = half(size)

    def cell(p, h, x):
        both = jnp.concatenate([x, h], axis=-1) @ p["gates"] + p["bias"]
        reset, keep = jnp.split(jax.nn.sigmoid(both), 2, axis=-1)
        new = jnp.tanh(x @ p["x"] + (reset * h) @ p["h"])
        return keep * h + (1 - keep) * new

    def decode(p, h, first, allowed, seed):
        def step(carry, g):
            h, word, bound, counts = carry
            hidden = []
            x = p["table"][word]
            for i in range(2):
                x = cell(p["cells"][i], h[i], x)
                hidden.append(x)
            logits = (rms(x, p["norm"]) @ p["table"].T).astype(jnp.float32)
            logits = jnp.where(logits > 0, logits / 1.1 ** (counts > 0), logits * 1.1 ** (counts > 0)) - 0.2 * counts
            logits = jnp.where(allowed, logits, -1e30)
            log_probs = jax.nn.log_softmax(logits)
            surprise = -log_probs / np.log(2.0)
            best = jnp.max(log_probs, axis=-1, keepdims=True)
            kept = (surprise <= bound[:, None]) | (log_probs >= best)
            final = jnp.where(kept, log_probs, -jnp.inf)
            word = jnp.argmax(final + jax.random.gumbel(g, final.shape), axis=-1)
            told = jnp.take_along_axis(surprise, word[:, None], axis=-1)[:, 0]
            bound = bound - 0.1 * (told - 5.0)
            counts = counts.at[jnp.arange(b), word].add(1.0)
            return (jnp.stack(hidden), word, bound, counts), (word, told, jnp.sum(kept, axis=-1), bound)

        carry = (h, first, jnp.full(b, 10.0), jnp.zeros((b, words)))
        (h, _, bound, _), seen = lax.scan(step, carry, jax.random.split(jax.random.key(seed[0]), steps))
        return h, bound, seen

    def made():
        p = {"gates": weight(2 * n, 2 * n, dtype=dtype), "bias": normal(2 * n, dtype=dtype, scale=0.1)}
        return p | {"x": weight(n, n, dtype=dtype), "h": weight(n, n, dtype=dtype)}

    p = {"cells": [made(), made()], "norm": gain(n, dtype), "table": normal(words, n, dtype=dtype, scale=2 * n**-0.5)}
    inputs = (
        normal(2, b, n, dtype=dtype, scale=0.3),
        integers(b, below=words),
        booleans(words),
        integers(1, below=1000),
    )
    return Built(decode, (p, *inputs))


@program("outlier-channels-kept-wide-rest-in-bytes-feed-forward", GROUP)
def _outliers(size: Size) -> Built:
    """This gives feed-forward layers whose rows are bytes, but for a few channels of large values that stay in wide numbers.

    The channels are found anew in each layer by their largest value; the weights are bytes with a scale for each column.
    """
    b, n, m, wide = pick(size, (1000, 2048, 5504, 32), (150, 512, 1368, 8), (5, 16, 24, 2))
    dtype = half(size)

    def linear(p, x):
        top = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=0)
        _, large = lax.top_k(top, wide)
        hot = jnp.zeros(x.shape[-1], bool).at[large].set(True)
        usual = jnp.where(hot, 0.0, x.astype(jnp.float32))
        scale = jnp.maximum(jnp.max(jnp.abs(usual), axis=-1, keepdims=True), 1e-6) / 127.0
        codes = jnp.clip(jnp.round(usual / scale), -127, 127).astype(jnp.int8)
        weights = p["codes"]
        whole = lax.dot_general(codes, weights, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
        out = whole.astype(jnp.float32) * scale * jnp.abs(p["scales"])
        kept = weights[large].astype(jnp.float32) * jnp.abs(p["scales"])
        rest = x[:, large].astype(jnp.float32) @ kept
        error = jnp.mean(jnp.abs(usual - codes * scale)) / (jnp.mean(jnp.abs(usual)) + 1e-6)
        return (out + rest).astype(dtype), error

    def model(layers, x):
        errors = []
        for p in layers:
            y = rms(x, p["norm"])
            gate, e1 = linear(p["gate"], y)
            up, e2 = linear(p["up"], y)
            down, e3 = linear(p["down"], jax.nn.silu(gate) * up)
            x = x + down
            errors.append(jnp.stack([e1, e2, e3]))
        return x, jnp.stack(errors)

    def made(i, o):
        codes = Random((i, o), jnp.dtype(jnp.int8), below=255)
        return {"codes": codes, "scales": normal(o, scale=0.1 / (73 * i**0.5), offset=1 / (73 * i**0.5))}

    layers = [{"norm": gain(n, dtype), "gate": made(n, m), "up": made(n, m), "down": made(m, n)} for _ in range(2)]
    return Built(model, (layers, normal(b, n, dtype=dtype)))


@program("heads-for-four-words-ahead-shared-trunk-loss-grad", GROUP)
def _ahead(size: Size) -> Built:
    """This gives gradients of a trunk with four heads of one layer each, which predict the next four words.

    Heads are run one after the other, and each reads the logits of its own place only where the text goes on in a document.
    """
    b, t, n, h, words = pick(size, (2, 511, 576, 9, 9001), (2, 65, 144, 9, 1001), (2, 9, 8, 2, 13))
    d, dtype, ahead = n // h, half(size), 4

    def block(p, x):
        y = rms(x, p["norm"])
        q, k, v = (z.reshape(b, t, h, d) for z in jnp.split(y @ p["qkv"], 3, axis=-1))
        q, k = rotate(q, jnp.arange(t)), rotate(k, jnp.arange(t))
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, n) @ p["out"]
        y = rms(x, p["norm2"])
        return x + jax.nn.gelu(y @ p["up"]) @ p["down"]

    def loss(params, text):
        x = params["table"][text]
        for p in params["trunk"]:
            x = block(p, x)
        document = jnp.cumsum(text == 0, axis=1)

        def head(total, xs):
            p, k = xs
            logits = (rms(block(p, x), params["norm"]) @ params["table"].T).astype(jnp.float32)
            target, place = jnp.roll(text, -k, axis=1), jnp.roll(document, -k, axis=1)
            alive = (jnp.arange(t) < t - k) & (place == document)
            nll = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
            right = jnp.sum((jnp.argmax(logits, axis=-1) == target) & alive) / jnp.maximum(jnp.sum(alive), 1)
            mean = jnp.sum(jnp.where(alive, nll, 0.0)) / jnp.maximum(jnp.sum(alive), 1)
            return total + mean, (mean, right)

        total, parts = lax.scan(jax.checkpoint(head), 0.0, (params["heads"], jnp.arange(1, ahead + 1)))
        return total / ahead, parts

    def made(*lead):
        p = {"qkv": weight(*lead, n, 3 * n, dtype=dtype), "out": weight(*lead, n, n, dtype=dtype)}
        p |= {"up": weight(*lead, n, 4 * n, dtype=dtype), "down": weight(*lead, 4 * n, n, dtype=dtype)}
        ones = normal(*lead, n, dtype=dtype, scale=0.1, offset=1.0)
        return p | {"norm": ones, "norm2": ones}

    params = {"table": normal(words, n, dtype=dtype, scale=n**-0.5), "trunk": [made(), made()]}
    params |= {"heads": made(ahead), "norm": gain(n, dtype)}
    return Built(jax.value_and_grad(loss, has_aux=True), (params, integers(b, t, below=words)))
