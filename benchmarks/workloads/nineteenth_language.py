"""Models of language, their caches, byte forms and draws, the nineteenth set: its author saw no plan."""

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

GROUP = "nineteenth"


def codes(*shape: int, below: int) -> Random:
    """This function describes random unsigned bytes."""
    return Random(shape, jnp.dtype(jnp.uint8), below=below)


@program("slots-written-by-gates-read-by-two-softmaxes-layer", GROUP)
def _gated_slots(size: Size) -> Built:
    """This gives a layer of gated slot attention (Zhang, 2024), whose keys and values fade in a few slots per head.

    The slots of keys are read by the query, a softmax over slots follows, and its shares read the slots of values.
    """
    b, t, n, h, m = pick(size, (6, 150, 768, 6, 48), (4, 150, 384, 3, 48), (2, 5, 8, 2, 3))
    d, dtype = n // h, half(size)

    def layer(p, x, slots):
        y = rms(x, p["norm"])
        q, k, v = (jax.nn.silu(y @ p[name]).reshape(b, t, h, d) for name in "qkv")
        fade = jax.nn.log_sigmoid((y @ p["fade"]).astype(jnp.float32)).reshape(b, t, h, m) / 8.0

        def step(carry, xs):
            keys, values = carry
            q, k, v, f = xs
            keep = jnp.exp(f)[..., None]
            keys = keep * keys + (1 - keep) * k.astype(jnp.float32)[:, :, None]
            values = keep * values + (1 - keep) * v.astype(jnp.float32)[:, :, None]
            share = jax.nn.softmax(jnp.einsum("bhmd,bhd->bhm", keys, q.astype(jnp.float32)), axis=-1)
            return (keys, values), jnp.einsum("bhm,bhmd->bhd", share, values).astype(dtype)

        xs = tuple(jnp.moveaxis(z, 1, 0) for z in (q, k, v, fade))
        (keys, values), out = lax.scan(step, slots, xs)
        out = jnp.moveaxis(out, 0, 1)
        out = rms(jax.nn.silu(out), p["head_norm"]).reshape(b, t, n)
        x = x + out @ p["o"]
        a, g = jnp.split(rms(x, p["norm2"]) @ p["up"], 2, axis=-1)
        return x + (jax.nn.silu(g) * a) @ p["down"], keys, values

    p = {name: weight(n, n, dtype=dtype) for name in "qkvo"} | {"fade": weight(n, h * m, dtype=dtype)}
    p |= {"norm": gain(n, dtype), "norm2": gain(n, dtype), "head_norm": gain(d, dtype)}
    p |= {"up": weight(n, 4 * n, dtype=dtype), "down": weight(2 * n, n, dtype=dtype)}
    slots = (normal(b, h, m, d, scale=0.1), normal(b, h, m, d, scale=0.1))
    return Built(layer, (p, normal(b, t, n, dtype=dtype), slots))


@program("prompt-keys-kept-by-votes-of-its-last-words-prefill", GROUP)
def _snap(size: Size) -> Built:
    """This gives a prefill of two layers whose cache keeps only the keys that the last words of the prompt attend to.

    As in SnapKV (Li et al. 2024), the votes are smoothed by a moving mean over neighbours, and the last words always
    stay.
    """
    b, t, n, h, kv, last, keep = pick(
        size, (2, 1100, 1024, 8, 2, 32, 224), (1, 300, 256, 4, 2, 16, 60), (2, 12, 16, 2, 1, 3, 4)
    )
    d, dtype = n // h, half(size)

    def attend(p, x, places):
        y = rms(x, p["norm"])
        q = rotate((y @ p["q"]).reshape(b, t, h, d), places)
        k = rotate((y @ p["k"]).reshape(b, t, kv, d), places)
        v = (y @ p["v"]).reshape(b, t, kv, d)
        kk, vv = (jnp.repeat(z, h // kv, axis=2) for z in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, kk).astype(jnp.float32) / np.sqrt(d)
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9)
        probs = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("bhqk,bkhd->bqhd", probs.astype(dtype), vv).reshape(b, t, n)
        votes = jnp.sum(probs[:, :, -last:, : t - last], axis=2)
        votes = lax.reduce_window(votes, 0.0, lax.add, (1, 1, 7), (1, 1, 1), "SAME") / 7
        votes = jnp.mean(votes.reshape(b, kv, h // kv, t - last), axis=2)
        _, at = lax.top_k(votes, keep)
        at = jnp.sort(at, axis=-1)
        old = [jnp.take_along_axis(jnp.swapaxes(z, 1, 2), at[..., None], axis=2) for z in (k, v)]
        cache = [
            jnp.concatenate([o, jnp.swapaxes(z, 1, 2)[:, :, -last:]], axis=2) for o, z in zip(old, (k, v), strict=True)
        ]
        return x + out @ p["o"], cache, at

    def prefill(p, text):
        x, places = p["table"][text], jnp.arange(t)
        caches, kept = [], []
        for layer in p["layers"]:
            x, cache, at = attend(layer, x, places)
            y = rms(x, layer["norm2"])
            x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
            caches.append(cache)
            kept.append(at)
        logits = (rms(x[:, -1], p["last"]) @ p["table"].T).astype(jnp.float32)
        return logits, caches, jnp.stack(kept)

    def layer():
        p = {"q": weight(n, n, dtype=dtype), "o": weight(n, n, dtype=dtype)}
        p |= {name: weight(n, kv * d, dtype=dtype) for name in "kv"}
        p |= {"gate": weight(n, 2 * n, dtype=dtype), "up": weight(n, 2 * n, dtype=dtype)}
        return p | {"down": weight(2 * n, n, dtype=dtype), "norm": gain(n, dtype), "norm2": gain(n, dtype)}

    words = pick(size, 16000, 3000, 20)
    p = {"table": normal(words, n, dtype=dtype, scale=n**-0.5), "layers": [layer(), layer()], "last": gain(n, dtype)}
    return Built(prefill, (p, integers(b, t, below=words)))


@program("four-bit-floats-with-shared-powers-of-two-experts", GROUP)
def _mx_experts(size: Size) -> Built:
    """This gives a layer of experts whose weights are four-bit floats, two in a byte, with a power of two per 32.

    It is the reference form of gpt-oss (2025): weights of the chosen experts are gathered, widened, and used word by
    word.
    """
    b, n, experts, top = pick(size, (8, 768, 32, 4), (4, 192, 16, 4), (2, 32, 5, 2))
    dtype, per = half(size), 16
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    levels = np.concatenate([levels, -levels])

    def widen(packed, powers):
        table = jnp.asarray(levels, dtype)
        low, high = table[packed & 15], table[packed >> 4]
        both = jnp.stack([low, high], axis=-1).reshape(*packed.shape[:-1], 2 * per)
        both = jnp.ldexp(both.astype(jnp.float32), powers[..., None].astype(jnp.int32) - 8)
        return both.reshape(*packed.shape[:-2], -1).astype(dtype)

    def swiglu(x):
        glu, linear = x[..., ::2], x[..., 1::2]
        glu, linear = jnp.minimum(glu, 7.0), jnp.clip(linear, -7.0, 7.0)
        return glu * jax.nn.sigmoid(1.702 * glu) * (linear + 1)

    def layer(p, x):
        y = rms(x, p["norm"])
        scores = (y @ p["router"]).astype(jnp.float32) + p["router_bias"]
        best, which = lax.top_k(scores, top)
        share = jax.nn.softmax(best, axis=-1)
        up = widen(p["up"][which], p["up_powers"][which])
        z = jnp.einsum("beoi,bi->beo", up, y) + p["up_bias"][which]
        z = swiglu(z)
        down = widen(p["down"][which], p["down_powers"][which])
        z = jnp.einsum("beoi,bei->beo", down, z) + p["down_bias"][which]
        return x + jnp.einsum("beo,be->bo", z, share.astype(dtype)), which, share

    p = {"norm": gain(n, dtype), "router": weight(n, experts, dtype=dtype), "router_bias": normal(experts, scale=0.1)}
    for name, out in (("up", 2 * n), ("down", n)):
        p[name] = codes(experts, out, n // (2 * per), per, below=256)
        p[f"{name}_powers"] = codes(experts, out, n // (2 * per), below=4)
        p[f"{name}_bias"] = normal(experts, out, dtype=dtype, scale=0.1)
    return Built(layer, (p, normal(b, n, dtype=dtype)))


@program("long-repeats-penalised-and-top-choices-left-out-draws", GROUP)
def _dry_xtc(size: Size) -> Built:
    """This gives words drawn after penalties for continuing a repeat, and with top choices left out at random.

    The penalty ("DRY") grows as a power of the repeat's length; the rule ("XTC") drops all likely words but the least
    likely one. Both are samplers of llama.cpp and text-generation-webui.
    """
    b, t, words, longest = pick(size, (48, 2000, 128256, 24), (12, 1000, 32000, 16), (3, 14, 11, 4))

    def draw(logits, history, breaker, seed):
        breaker = breaker & (jnp.arange(words) % 7 == 0)

        def one(scores, past, breaks):
            at = jnp.arange(t - 1)
            back = at[:, None] - jnp.arange(longest)
            same = (past[jnp.clip(back, 0)] == past[t - 1 - jnp.arange(longest)]) & (back >= 0)
            same = same & ~breaks[past[jnp.clip(back, 0)]]
            length = jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=1), axis=1)
            penalty = jnp.where(length >= 2, 0.8 * 1.75 ** (length - 2.0), 0.0)
            worst = jnp.zeros(words).at[past[1:]].max(penalty)
            return scores - worst, jnp.max(length)

        scores, longest_run = jax.vmap(one, in_axes=(0, 0, None))(logits.astype(jnp.float32), history, breaker)
        probs = jax.nn.softmax(scores / 0.9, axis=-1)
        k1, k2 = jax.random.split(jax.random.key(seed[0]))
        likely = probs >= 0.01 / words**0.5
        least = jnp.min(jnp.where(likely, probs, jnp.inf), axis=-1, keepdims=True)
        chance = jax.random.uniform(k1, (b, 1)) < 0.5
        drop = likely & (probs > least) & chance & (jnp.sum(likely, axis=-1, keepdims=True) >= 2)
        probs = jnp.where(drop, 0.0, probs)
        probs = jnp.where(probs < 0.02 * jnp.max(probs, axis=-1, keepdims=True), 0.0, probs)
        probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
        noise = jax.random.exponential(k2, (b, words)) + 1e-10
        word = jnp.argmax(probs / noise, axis=-1)
        chosen = jnp.take_along_axis(probs, word[:, None], axis=-1)[:, 0]
        return word, jnp.log(chosen), longest_run, jnp.sum(drop, axis=-1)

    few = pick(size, 400, 60, 3)
    inputs = (normal(b, words, dtype=half(size), scale=3.0), integers(b, t, below=few), booleans(words))
    return Built(draw, (*inputs, integers(1, below=99)))


@program("scores-convolved-over-queries-keys-and-heads-layer", GROUP)
def _multi_token(size: Size) -> Built:
    """This gives multi-token attention (Golovneva, 2025), whose scores are convolved over queries, keys and heads.

    The scores are masked by zeros before the convolution and by minus infinity after it; each head's output has its
    own norm.
    """
    b, t, n, h, over_q, over_k = pick(size, (2, 450, 768, 12, 6, 11), (1, 120, 192, 6, 4, 9), (2, 7, 16, 4, 2, 3))
    d, dtype = n // h, half(size)

    def layer(p, x):
        y = rms(x, p["norm"])
        q, k, v = jnp.split(y @ p["qkv"], 3, axis=-1)
        q, k, v = (z.reshape(b, t, h, d) for z in (q, k, v))
        q, k = rotate(q, jnp.arange(t)), rotate(k, jnp.arange(t))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * d**-0.5
        causal = jnp.tril(jnp.ones((t, t), bool))
        scores = jnp.where(causal, scores, 0)
        pads = [(over_q - 1, 0), (over_k // 2, over_k // 2)]
        scores = lax.conv_general_dilated(scores, p["over"], (1, 1), pads, feature_group_count=h)
        probs = jax.nn.softmax(jnp.where(causal, scores.astype(jnp.float32), -jnp.inf), axis=-1)
        probs = probs.reshape(b, h // 2, 2, t, t)
        probs = jnp.einsum("bgiqk,gij->bgjqk", probs, p["heads"]).reshape(b, h, t, t)
        out = jnp.einsum("bhqk,bkhd->bqhd", probs.astype(dtype), v)
        out = rms(out, p["head_norm"]) * 0.8
        x = x + out.reshape(b, t, n) @ p["o"]
        y = rms(x, p["norm2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    p = {"qkv": weight(n, 3 * n, dtype=dtype), "o": weight(n, n, dtype=dtype), "heads": normal(h // 2, 2, 2, scale=0.5)}
    p |= {"over": normal(h, 1, over_q, over_k, dtype=dtype, scale=0.15), "head_norm": gain(d, dtype)}
    p |= {"gate": weight(n, 2 * n, dtype=dtype), "up": weight(n, 2 * n, dtype=dtype)}
    p |= {"down": weight(2 * n, n, dtype=dtype), "norm": gain(n, dtype), "norm2": gain(n, dtype)}
    return Built(layer, (p, normal(b, t, n, dtype=dtype)))


@program("hashed-runs-of-words-looked-up-and-gated-into-states", GROUP)
def _engram(size: Size) -> Built:
    """This gives hidden states to which a memory of runs of two and three words is added, found by several hashes.

    As in Engram (Cheng et al. 2026), the state decides by a normed product how much of the memory it takes, and a
    short convolution with gaps follows.
    """
    b, t, n, heads, wide, slots = pick(
        size, (4, 1000, 1280, 8, 80, 50021), (2, 250, 320, 4, 40, 5003), (2, 6, 8, 2, 4, 13)
    )
    dtype = half(size)
    odd = np.array([2654435761, 2246822519, 3266489917], np.uint32)

    def hashed(text, run, head):
        total = jnp.zeros(text.shape, jnp.uint32)
        for i in range(run):
            past = jnp.pad(text, ((0, 0), (i, 0)))[:, :t].astype(jnp.uint32)
            total = total ^ (past * odd[i] + np.uint32(977 * head + 31 * run))
        return ((total ^ (total >> 15)) % np.uint32(slots)).astype(jnp.int32)

    def norm(x):
        y = x.astype(jnp.float32)
        return y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-6)

    def memory(p, x, text):
        found = [
            p["tables"][j, hashed(text, run, i)]
            for j, (run, i) in enumerate((r, i) for r in (2, 3) for i in range(heads))
        ]
        found = jnp.concatenate(found, axis=-1)
        key, value = found @ p["key"], found @ p["value"]
        score = jnp.sum(norm(x) * p["q_norm"] * norm(key) * p["k_norm"], axis=-1, keepdims=True) / np.sqrt(n)
        score = jnp.sqrt(jnp.maximum(jnp.abs(score), 1e-6)) * jnp.sign(score)
        gate = jax.nn.sigmoid(score)
        value = (gate * value.astype(jnp.float32)).astype(dtype)
        y = rms(value, p["norm"])
        padded = jnp.pad(y, ((0, 0), (9, 0), (0, 0)))
        y = sum(padded[:, 3 * i : 3 * i + t] * p["conv"][i] for i in range(4))
        x = x + value + jax.nn.silu(y)
        y = rms(x, p["norm2"])
        return x + jax.nn.gelu(y @ p["up"]) @ p["down"], gate[..., 0]

    p = {"tables": normal(2 * heads, slots, wide, dtype=dtype), "conv": normal(4, n, dtype=dtype, scale=0.5)}
    p |= {name: weight(2 * heads * wide, n, dtype=dtype) for name in ("key", "value")}
    p |= {"q_norm": gain(n), "k_norm": gain(n), "norm": gain(n, dtype), "norm2": gain(n, dtype)}
    p |= {"up": weight(n, 2 * n, dtype=dtype), "down": weight(2 * n, n, dtype=dtype)}
    return Built(memory, (p, normal(b, t, n, dtype=dtype), integers(b, t, below=pick(size, 64000, 3000, 20))))


@program("pairs-of-layers-share-one-cache-decode", GROUP)
def _cross_layer(size: Size) -> Built:
    """This gives the next words of many chats by four layers; every second one reads the cache of the one before.

    It is cross-layer attention (Brandon et al. 2024) with grouped queries and chats of different lengths.
    """
    b, past, n, h, kv, words = pick(
        size, (24, 1500, 1024, 16, 4, 32000), (8, 700, 384, 8, 2, 5000), (2, 9, 16, 4, 2, 13)
    )
    d, dtype = n // h, half(size)

    def write(cache, new, at):
        return jax.vmap(lambda c, x, i: lax.dynamic_update_slice_in_dim(c, x[None], i, axis=0))(cache, new, at)

    def step(p, caches, word, lengths):
        x = p["table"][word]
        lengths = lengths + past // 2
        seen = jnp.arange(past)[None, :] <= lengths[:, None]
        fresh = []
        for i, layer in enumerate(p["layers"]):
            y = rms(x, layer["norm"])
            q = rotate((y @ layer["q"]).reshape(b, 1, h, d), lengths[:, None])[:, 0].reshape(b, kv, h // kv, d)
            if i % 2 == 0:
                k = rotate((y @ layer["k"]).reshape(b, 1, kv, d), lengths[:, None])[:, 0]
                v = (y @ layer["v"]).reshape(b, kv, d)
                keys, values = write(caches[i // 2][0], k, lengths), write(caches[i // 2][1], v, lengths)
                fresh.append((keys, values))
            scores = jnp.einsum("bgqd,btgd->bgqt", q, keys).astype(jnp.float32) * d**-0.5
            probs = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1)
            out = jnp.einsum("bgqt,btgd->bgqd", probs.astype(dtype), values).reshape(b, n)
            x = x + out @ layer["o"]
            y = rms(x, layer["norm2"])
            x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
        logits = (rms(x, p["last"]) @ p["table"].T).astype(jnp.float32)
        return jnp.argmax(logits, axis=-1), jax.nn.log_softmax(logits), fresh

    def layer(own):
        p = {"q": weight(n, n, dtype=dtype), "o": weight(n, n, dtype=dtype)}
        p |= {name: weight(n, kv * d, dtype=dtype) for name in ("kv" if own else "")}
        p |= {"gate": weight(n, 3 * n, dtype=dtype), "up": weight(n, 3 * n, dtype=dtype)}
        return p | {"down": weight(3 * n, n, dtype=dtype), "norm": gain(n, dtype), "norm2": gain(n, dtype)}

    p = {"table": normal(words, n, dtype=dtype, scale=n**-0.5), "last": gain(n, dtype)}
    p["layers"] = [layer(i % 2 == 0) for i in range(4)]
    caches = [tuple(normal(b, past, kv, d, dtype=dtype) for _ in range(2)) for _ in range(2)]
    return Built(step, (p, caches, integers(b, below=words), integers(b, below=past - past // 2 - 1)))
