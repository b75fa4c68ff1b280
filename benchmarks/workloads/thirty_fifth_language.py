"""Parallel streams, learned bends, one wide key, drafts in turn and nibbles, the thirty-fifth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, gain, half, integers, normal, pick, program
from benchmarks.workloads.thirty_fifth_parts import ends_of, stack_of
from benchmarks.workloads.twenty_fifth_parts import rms_norm, rotary

GROUP = "thirty-fifth"


@program("one-model-in-four-streams-with-own-prefixes-blended-at-the-end-decode", GROUP)
def _streams(size: Size) -> Built:
    """This program reads one more word per row with four streams of the same weights, and blends what they end with.

    It is ParScale (Chen, 2025; QwenLM/ParScale) on layers of Qwen 2.5: each stream has keys and values of a learned prefix in front
    of its cache, rows end at places of their own, and a small network weighs streams, with a floor for each.
    """
    b, streams, prefix, t, n, h, groups, d, wide, depth, words = pick(
        size,
        (4, 4, 48, 1024, 2048, 16, 2, 128, 8192, 4, 64000),
        (4, 4, 16, 384, 384, 12, 2, 32, 1024, 4, 8003),
        (1, 2, 2, 5, 8, 2, 1, 4, 12, 2, 11),
    )
    dtype, rows, share = half(size), streams * b, h // groups

    def layer(x, q, keys, values, at):
        """This reads one word [rows, n], and writes it at each row's end behind the prefix."""
        row = jnp.arange(rows)
        qkv = rms_norm(q["norm1"], x) @ q["qkv"] + q["bias"][0]
        query, key, value = jnp.split(qkv.reshape(rows, 1, h + 2 * groups, d), [h, h + groups], axis=2)
        query, key = rotary(query, at[:, None]), rotary(key, at[:, None])
        keys = keys.at[row, prefix + at].set(key[:, 0])
        values = values.at[row, prefix + at].set(value[:, 0])
        query = query.reshape(rows, groups, share, d)
        scores = jnp.einsum("bgsd,bkgd->bgsk", query, keys, preferred_element_type=jnp.float32) * d**-0.5
        seen = jnp.arange(prefix + t) <= prefix + at[:, None]
        probs = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e9), axis=-1).astype(dtype)
        x = x + jnp.einsum("bgsk,bkgd->bgsd", probs, values).reshape(rows, h * d) @ q["out"]
        y = rms_norm(q["norm2"], x)
        x = x + (jax.nn.silu(y @ q["gate"]) * (y @ q["up"])) @ q["down"]
        return x, (key[:, 0], value[:, 0])

    def run(p, keys, values, word, long):
        """This gives logarithms of chances of the next word, weights of streams, and new keys and values."""
        x = jnp.repeat(p["table"][word][None], streams, axis=0).reshape(rows, n)
        at = jnp.tile(long, streams)
        x, fresh = lax.scan(lambda x, q: layer(x, *q, at), x, (p["layers"], keys, values))
        x = rms_norm(p["norm"], x).reshape(streams, b, n)
        joined = x.transpose(1, 0, 2).reshape(b, streams * n)
        score = jax.nn.silu(joined @ p["blend1"]) @ p["blend2"]
        weigh = jax.nn.softmax(score.astype(jnp.float32), axis=-1)
        weigh = 0.9 * weigh + 0.1 / streams
        blended = jnp.einsum("bs,sbn->bn", weigh.astype(dtype), x)
        return jax.nn.log_softmax((blended @ p["head"]).astype(jnp.float32)), weigh, fresh

    layers = stack_of(
        depth,
        dtype,
        norm1=(n,),
        norm2=(n,),
        qkv=(n, (h + 2 * groups) * d),
        bias=(1, (h + 2 * groups) * d),
        out=(h * d, n),
        gate=(n, wide),
        up=(n, wide),
        down=(wide, n),
    )
    p = ends_of(words, n, dtype) | {"layers": layers}
    p |= {
        "blend1": normal(streams * n, n, dtype=dtype, scale=(streams * n) ** -0.5),
        "blend2": normal(n, streams, dtype=dtype, scale=n**-0.5),
    }
    kept = normal(depth, rows, prefix + t, groups, d, dtype=dtype)
    return Built(run, (p, kept, kept, integers(b, below=words), integers(b, below=t)))


@program("wide-layers-with-a-learned-bend-of-squares-and-exponentials-2048-prefill", GROUP)
def _bend(size: Size) -> Built:
    """This program reads a prompt of 2048 words with layers whose bend is a square above nought and an exponential below.

    It is Apertus (Swiss AI, 2025; in transformers): the bend xIELU has two learned numbers per layer and no gate, queries and keys
    have norms per head, and slow rotations are stretched as in Llama 3.1; keys and values are kept.
    """
    b, t, n, h, groups, d, wide, depth, words = pick(
        size,
        (1, 2048, 2048, 16, 4, 128, 10752, 3, 131072),
        (1, 256, 192, 6, 2, 32, 1024, 2, 8003),
        (1, 7, 8, 2, 1, 8, 20, 2, 11),
    )
    dtype, share = half(size), h // groups
    base, factor, low, high, old = 12_000_000.0, 8.0, 1.0, 4.0, 8192

    def frequencies():
        """These are the speeds of rotations, of which slow ones are stretched."""
        speed = 1.0 / base ** (np.arange(0, d, 2) / d)
        long = 2 * np.pi / speed
        smooth = np.clip((old / long - low) / (high - low), 0, 1)
        return jnp.asarray((1 - smooth) * speed / factor + smooth * speed, jnp.float32)

    def turned(x, cos, sin):
        """This turns halves of heads."""
        one, two = jnp.split(x, 2, axis=-1)
        return x * cos + jnp.concatenate([-two, one], axis=-1) * sin

    def xielu(x, above, below, beta=0.5, eps=-1e-6):
        """This is the bend."""
        x = x.astype(jnp.float32)
        above, below = jax.nn.softplus(above), beta + jax.nn.softplus(below)
        return jnp.where(
            x > 0, above * x * x + beta * x, (jnp.expm1(jnp.minimum(x, eps)) - x) * below + beta * x
        ).astype(dtype)

    def run(p, text):
        """This gives logarithms of chances of the next word, and the keys and values of layers."""
        angle = jnp.arange(t)[:, None] * frequencies()
        cos = jnp.cos(jnp.concatenate([angle, angle], axis=-1)).astype(dtype)[:, None]
        sin = jnp.sin(jnp.concatenate([angle, angle], axis=-1)).astype(dtype)[:, None]
        causal = jnp.tril(jnp.ones((t, t), bool))

        def layer(x, q):
            """This is one layer of the model."""
            y = rms_norm(q["norm1"], x)
            query = rms_norm(q["query_norm"], (y @ q["query"]).reshape(b, t, h, d))
            key = rms_norm(q["key_norm"], (y @ q["key"]).reshape(b, t, groups, d))
            value = (y @ q["value"]).reshape(b, t, groups, d)
            query, key = turned(query, cos, sin), turned(key, cos, sin)
            query = query.reshape(b, t, groups, share, d)
            scores = jnp.einsum("bqgsd,bkgd->bgsqk", query, key, preferred_element_type=jnp.float32) * d**-0.5
            scores = jnp.where(causal, scores, jnp.finfo(jnp.float32).min)
            probs = jax.nn.softmax(scores, axis=-1).astype(dtype)
            x = x + jnp.einsum("bgsqk,bkgd->bqgsd", probs, value).reshape(b, t, h * d) @ q["out"]
            y = rms_norm(q["norm2"], x) @ q["up"]
            return x + xielu(y, *q["bend"].astype(jnp.float32)) @ q["down"], (key, value)

        x, kept = lax.scan(layer, p["table"][text], p["layers"])
        scores = rms_norm(p["norm"], x[:, -1]) @ p["head"]
        return jax.nn.log_softmax(scores.astype(jnp.float32)), kept

    layers = stack_of(
        depth,
        dtype,
        norm1=(n,),
        norm2=(n,),
        query_norm=(d,),
        key_norm=(d,),
        bend=(2,),
        query=(n, h * d),
        key=(n, groups * d),
        value=(n, groups * d),
        out=(h * d, n),
        up=(n, wide),
        down=(wide, n),
    )
    return Built(run, (ends_of(words, n, dtype) | {"layers": layers}, integers(b, t, below=words)))


@program("many-queries-from-a-narrow-state-over-one-wide-key-beside-a-shared-expert-decode", GROUP)
def _narrow(size: Size) -> Built:
    """This program reads one word of one text with many wide query heads, which come from a narrow state and share one key.

    It is multi-matrix factorisation attention (Hu, 2024) as in Step-3 (StepFun, 2025): the narrow state has a norm, all heads use
    one key and value of width 256, and a gated layer follows whose expert runs beside a shared one that all words pass.
    """
    b, t, n, narrow, h, d, wide, shared, depth, words = pick(
        size,
        (1, 4096, 4096, 1536, 32, 256, 8192, 4096, 4, 64000),
        (1, 2048, 512, 192, 8, 64, 1536, 512, 4, 16001),
        (1, 6, 8, 4, 2, 4, 12, 6, 2, 11),
    )
    dtype = half(size)

    def gated(y, up, down):
        """This is a gated layer, with gates and values in one matrix."""
        gate, value = jnp.split(y @ up, 2, axis=-1)
        return (jax.nn.silu(gate) * value) @ down

    def run(p, keys, values, word, at):
        """This gives logarithms of chances of the next word, and caches with the new word in them."""
        seen = jnp.arange(t) <= at

        def layer(x, carried):
            """This reads one word [b, n]."""
            q, keys, values = carried
            y = rms_norm(q["norm1"], x)
            state = rms_norm(q["narrow_norm"], y @ q["narrow"])
            query = rotary((state @ q["query"]).reshape(b, 1, h, d), jnp.full((b, 1), at))[:, 0]
            key, value = jnp.split(y @ q["kv"], 2, axis=-1)
            key = rotary(key[:, None, None], jnp.full((b, 1), at))[:, :, 0]
            keys = lax.dynamic_update_slice_in_dim(keys, key, at, axis=1)
            values = lax.dynamic_update_slice_in_dim(values, value[:, None], at, axis=1)
            scores = jnp.einsum("bhd,bkd->bhk", query, keys, preferred_element_type=jnp.float32) * d**-0.5
            probs = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1).astype(dtype)
            x = x + jnp.einsum("bhk,bkd->bhd", probs, values).reshape(b, h * d) @ q["out"]
            y = rms_norm(q["norm2"], x)
            x = x + gated(y, q["shared_up"], q["shared_down"]) + gated(y, q["up"], q["down"])
            return x, (keys, values)

        x, kept = lax.scan(layer, p["table"][word], (p["layers"], keys, values))
        return jax.nn.log_softmax((rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32)), kept

    layers = stack_of(
        depth,
        dtype,
        norm1=(n,),
        norm2=(n,),
        narrow_norm=(narrow,),
        narrow=(n, narrow),
        query=(narrow, h * d),
        kv=(n, 2 * d),
        out=(h * d, n),
        up=(n, 2 * wide),
        down=(wide, n),
        shared_up=(n, 2 * shared),
        shared_down=(shared, n),
    )
    cache = normal(depth, b, t, d, dtype=dtype)
    inputs = integers(b, below=words), integers(below=t)
    return Built(run, (ends_of(words, n, dtype) | {"layers": layers}, cache, cache, *inputs))


@program("several-drafts-of-each-word-tried-in-turn-on-what-is-left-of-chances", GROUP)
def _tried(size: Size) -> Built:
    """This program verifies several drafted words for each place, one after another, against what is left of true chances.

    It is the multi-round rejection of SpecInfer (Miao, 2024; also SpecTr): each turned-down word takes the draft's chances off the
    true ones, which are made to add up to one again; the true scores have a soft cap, and each row has a heat of its own.
    """
    b, places, tries, n, words = pick(size, (16, 4, 4, 2048, 128256), (8, 4, 4, 192, 16001), (1, 2, 2, 8, 11))
    dtype = half(size)

    def run(p, state, guess, seed, heat):
        """This gives chances that each draft is kept, how many places are expected, what is left, and its entropy."""
        heat = (0.5 + jax.nn.sigmoid(heat))[:, None, None]
        scores = (rms_norm(p["norm"], state) @ p["head"]).astype(jnp.float32)
        scores = 30.0 * jnp.tanh(scores / 30.0)
        true = jax.nn.softmax(scores / heat, axis=-1)
        guess = guess.astype(jnp.float32) / heat
        draft = jax.nn.softmax(guess, axis=-1)
        drafted = jax.random.categorical(jax.random.key(seed), guess, shape=(tries, b, places))

        def attempt(carry, word):
            """This tries one word of each place."""
            left, alive = carry
            one = jnp.take_along_axis(left, word[..., None], axis=-1)[..., 0]
            two = jnp.take_along_axis(draft, word[..., None], axis=-1)[..., 0]
            keep = jnp.minimum(one / jnp.maximum(two, 1e-20), 1.0)
            rest = jnp.maximum(left - draft, 0.0)
            rest = rest / (jnp.sum(rest, axis=-1, keepdims=True) + 1e-20)
            return (rest, alive * (1 - keep)), (alive * keep, keep)

        start = true, jnp.ones((b, places))
        (left, alive), (taken, keep) = lax.scan(attempt, start, drafted)
        expected = jnp.sum(jnp.cumprod(1 - alive, axis=1), axis=1) + 1
        doubt = -jnp.sum(left * jnp.log(left + 1e-20), axis=-1)
        best = lax.top_k(left, min(8, words))[0]
        return taken, keep, alive, expected, doubt, best, jnp.sum(jnp.minimum(true, draft), axis=-1)

    p = {"norm": gain(n, dtype), "head": normal(n, words, dtype=dtype, scale=2 * n**-0.5)}
    inputs = normal(b, places, n, dtype=dtype), normal(b, places, words, dtype=dtype, scale=2.0)
    return Built(run, (p, *inputs, integers(below=1000), normal(b)))


@program("nibbles-widened-to-bytes-then-byte-products-with-a-nibble-cache-decode", GROUP)
def _nibbles(size: Size) -> Built:
    """This program reads one more word per row with weights of four bits, states of eight bits and a cache of four bits.

    It is QServe (Lin, 2024; mit-han-lab/omniserve): nibbles become bytes by small whole scales and offsets per group of inputs,
    bytes multiply bytes, scales of channels and rows follow, and keys and values are unpacked with a scale and an offset per head.
    """
    b, t, n, h, groups, d, wide, depth, part = pick(
        size,
        (16, 1024, 2048, 16, 4, 128, 5632, 3, 128),
        (8, 768, 512, 8, 2, 64, 1536, 3, 64),
        (1, 5, 8, 2, 1, 4, 12, 3, 4),
    )
    dtype, share = half(size), h // groups

    def unpacked(x, axis):
        """This gives nibbles of bytes, low ones first, along an axis."""
        return jnp.concatenate([x & 15, x >> 4], axis=axis).astype(jnp.int8)

    def linear(x, q):
        """This rounds rows [b, n] to bytes, and multiplies them by bytes made of nibbles."""
        x = x.astype(jnp.float32)
        scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1e-6) / 127.0
        rounded = jnp.round(x / scale).astype(jnp.int8)
        nibble = unpacked(q["nibbles"], 0).reshape(-1, part, q["nibbles"].shape[-1])
        byte = (nibble - q["offset"][:, None]) * (q["step"] + 1)[:, None]
        byte = byte.reshape(-1, byte.shape[-1])
        out = lax.dot_general(rounded, byte, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
        return (out.astype(jnp.float32) * scale * q["scale"]).astype(dtype)

    def packed(x):
        """This packs heads [b, groups, d] to nibbles, with their scales and offsets."""
        x = x.astype(jnp.float32)
        low, high = jnp.min(x, axis=-1, keepdims=True), jnp.max(x, axis=-1, keepdims=True)
        scale = jnp.maximum(high - low, 1e-5) / 15.0
        nibble = jnp.clip(jnp.round((x - low) / scale), 0, 15).astype(jnp.uint8)
        return nibble[..., : d // 2] | (nibble[..., d // 2 :] << 4), jnp.concatenate([scale, low], axis=-1)

    def opened(nibbles, pair):
        """This gives what a cache [b, t, groups, d / 2] stands for."""
        return (unpacked(nibbles, -1) * pair[..., :1] + pair[..., 1:]).astype(dtype)

    def run(p, cache, pairs, x, long):
        """This gives states behind the layers, and what is written into caches."""
        row = jnp.arange(b)
        seen = (jnp.arange(t) <= long[:, None])[:, None, None]

        def layer(x, q):
            """This reads one word [b, n]."""
            q, cache, pairs = q
            qkv = linear(rms_norm(q["norm1"], x), q["qkv"]).reshape(b, 1, h + 2 * groups, d)
            query, key, value = jnp.split(qkv, [h, h + groups], axis=2)
            query, key = rotary(query, long[:, None]), rotary(key, long[:, None])
            fresh = jnp.stack([key[:, 0], value[:, 0]])
            nibbles, pair = jax.vmap(packed)(fresh)
            cache, pairs = cache.at[:, row, long].set(nibbles), pairs.at[:, row, long].set(pair)
            keys, values = opened(cache[0], pairs[0]), opened(cache[1], pairs[1])
            query = query.reshape(b, groups, share, d)
            scores = jnp.einsum("bgsd,bkgd->bgsk", query, keys, preferred_element_type=jnp.float32) * d**-0.5
            probs = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1).astype(dtype)
            x = x + linear(jnp.einsum("bgsk,bkgd->bgsd", probs, values).reshape(b, h * d), q["out"])
            gate, up = jnp.split(linear(rms_norm(q["norm2"], x), q["up"]), 2, axis=-1)
            return x + linear(jax.nn.silu(gate) * up, q["down"]), (fresh, pair)

        return lax.scan(layer, x, (p, cache, pairs))

    def weights(i, o):
        """This describes nibbles, whole steps and offsets of groups, and scales of channels."""
        return {
            "nibbles": Random((depth, i // 2, o), jnp.dtype(jnp.uint8), below=256),
            "offset": Random((depth, i // part, o), jnp.dtype(jnp.int8), below=16),
            "step": Random((depth, i // part, o), jnp.dtype(jnp.int8), below=7),
            "scale": normal(depth, o, scale=0.002 * i**-0.5, offset=0.03 * i**-0.5),
        }

    p = stack_of(depth, dtype, norm1=(n,), norm2=(n,))
    p |= {"qkv": weights(n, (h + 2 * groups) * d), "out": weights(h * d, n)}
    p |= {"up": weights(n, 2 * wide), "down": weights(wide, n)}
    cache = Random((depth, 2, b, t, groups, d // 2), jnp.dtype(jnp.uint8), below=256)
    pairs = normal(depth, 2, b, t, groups, 2, scale=0.02, offset=0.1)
    return Built(run, (p, cache, pairs, normal(b, n, dtype=dtype), integers(b, below=t)))
