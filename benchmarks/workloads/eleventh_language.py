"""Ordinary layers of language models, the eleventh set: its author had seen no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import linen_program, module_weights
from benchmarks.workloads.registry import Built, Random, Size, gain, half, integers, normal, pick, program, weight

GROUP = "eleventh"


def rms_norm(x, scale, eps=1e-6):
    """This function divides each row by its root mean square in float32 and multiplies it by a scale."""
    dtype = x.dtype
    x = x.astype(jnp.float32)
    x = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps)
    return x.astype(dtype) * scale


@program("gpt-fused-qkv-learned-places-haiku", GROUP)
def _gpt(size: Size) -> Built:
    """This gives the logits of the next word by a small GPT: a table of words, a table of places, and two blocks.

    One product makes queries, keys and values; the mask is causal, and the last hidden vector of each sequence is compared with
    the same table that embeds the words.
    """
    import haiku as hk

    b, t, n, h, words = pick(size, (3, 1000, 768, 12, 50257), (1, 197, 384, 6, 50257), (2, 6, 8, 2, 11))
    dtype, d = half(size), n // h

    def norm(x, name):
        return hk.LayerNorm(-1, create_scale=True, create_offset=True, name=name)(x)

    def attend(x, name):
        qkv = hk.Linear(3 * n, name=f"{name}_qkv")(x).reshape(b, t, 3, h, d)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(d).astype(dtype)
        causal = jnp.tril(jnp.ones((t, t), bool))
        scores = jnp.where(causal, scores.astype(jnp.float32), -1e10)
        probs = jax.nn.softmax(scores).astype(dtype)
        return hk.Linear(n, name=f"{name}_out")(jnp.einsum("bhts,bshd->bthd", probs, v).reshape(b, t, n))

    def model(tokens):
        table = hk.get_parameter("words", (words, n), dtype, hk.initializers.TruncatedNormal(0.02))
        places = hk.get_parameter("places", (t, n), dtype, hk.initializers.TruncatedNormal(0.02))
        x = table[tokens] + places
        for layer in range(2):
            x = x + attend(norm(x, f"norm1_{layer}"), f"attention_{layer}")
            y = hk.Linear(4 * n, name=f"up_{layer}")(norm(x, f"norm2_{layer}"))
            x = x + hk.Linear(n, name=f"down_{layer}")(jax.nn.gelu(y))
        last = norm(x, "norm")[:, -1]
        return (last @ table.T).astype(jnp.float32)

    tokens = integers(b, t, below=words)
    pure = hk.without_apply_rng(hk.transform(model))
    structs = jax.eval_shape(lambda xs: pure.init(jax.random.key(0), xs), tokens.struct)
    return Built(pure.apply, (module_weights(structs, dtype), tokens))


@program("grouped-queries-ragged-cache-decode", GROUP)
def _decode(size: Size) -> Built:
    """This gives one decoding step of a layer like Llama's for a batch of sequences that have grown to different lengths.

    Five query heads share a head of keys and values; the new key and value are written into each sequence's own slot of the cache,
    and the rest of the cache is masked.
    """
    b, n, h, groups, d, cache, wide = pick(
        size, (12, 2560, 20, 4, 96, 1536, 6912), (5, 768, 10, 2, 80, 333, 2304), (2, 8, 4, 2, 4, 7, 12)
    )
    dtype = half(size)

    def rope(x, position):
        freqs = 10000.0 ** (-jnp.arange(0, d, 2) / d)
        angle = position[:, None, None] * freqs
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        x1, x2 = x[..., : d // 2], x[..., d // 2 :]
        return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(dtype)

    def write(buffer, new, position):
        return jax.vmap(lambda c, u, p: lax.dynamic_update_slice(c, u[:, None], (0, p, 0)))(buffer, new, position)

    def layer(p, x, keys, values, lengths):
        y = rms_norm(x, p["norm1"])
        q = rope((y @ p["q"]).reshape(b, h, d), lengths)
        k = rope((y @ p["k"]).reshape(b, groups, d), lengths)
        v = (y @ p["v"]).reshape(b, groups, d)
        keys, values = write(keys, k, lengths), write(values, v, lengths)
        q = q.reshape(b, groups, h // groups, d)
        scores = jnp.einsum("bgrd,bgsd->bgrs", q, keys, preferred_element_type=jnp.float32) / jnp.sqrt(d)
        visible = jnp.arange(cache)[None] <= lengths[:, None]
        scores = jnp.where(visible[:, None, None], scores, -1e30)
        out = jnp.einsum("bgrs,bgsd->bgrd", jax.nn.softmax(scores, axis=-1).astype(dtype), values)
        x = x + out.reshape(b, h * d) @ p["out"]
        y = rms_norm(x, p["norm2"])
        x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
        return x, keys, values, lengths + 1

    params = {
        "norm1": gain(n, dtype),
        "norm2": gain(n, dtype),
        "q": weight(n, h * d, dtype=dtype),
        "k": weight(n, groups * d, dtype=dtype),
        "v": weight(n, groups * d, dtype=dtype),
        "out": weight(h * d, n, dtype=dtype),
        "gate": weight(n, wide, dtype=dtype),
        "up": weight(n, wide, dtype=dtype),
        "down": weight(wide, n, dtype=dtype),
    }
    buffer = normal(b, groups, cache, d, dtype=dtype)
    return Built(layer, (params, normal(b, n, dtype=dtype), buffer, buffer, integers(b, below=cache)))


@program("bidirectional-buckets-gated-encoder-linen", GROUP)
def _t5(size: Size) -> Built:
    """This gives two encoder layers in the manner of T5, which know of places only through buckets of distances.

    Half of the buckets are for keys to the left; near distances have a bucket each and far ones share it by their logarithm. Both
    layers add the same bias to unscaled scores, and padding is masked by length.
    """
    import flax.linen as nn

    b, t, n, h, d, wide, buckets, farthest = pick(
        size, (5, 333, 768, 12, 64, 2048, 32, 128), (1, 333, 384, 6, 64, 1024, 32, 128), (2, 7, 8, 2, 4, 12, 8, 16)
    )
    dtype = half(size)

    def dense(width, name):
        return nn.Dense(width, use_bias=False, dtype=dtype, name=name)

    def bucket(distance):
        side, near = buckets // 2, buckets // 4
        far = jnp.abs(distance)
        ratio = jnp.log(jnp.maximum(far, 1) / near) / np.log(farthest / near)
        large = jnp.minimum(near + (ratio * (side - near)).astype(jnp.int32), side - 1)
        return jnp.where(distance > 0, side, 0) + jnp.where(far < near, far, large)

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, bias):
            y = nn.RMSNorm(epsilon=1e-6, dtype=dtype)(x)
            q, k, v = (dense(h * d, name)(y).reshape(b, t, h, d) for name in ("q", "k", "v"))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) + bias
            probs = nn.softmax(scores, axis=-1).astype(dtype)
            x = x + dense(n, "out")(jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(b, t, h * d))
            y = nn.RMSNorm(epsilon=1e-6, dtype=dtype)(x)
            return x + dense(n, "down")(nn.gelu(dense(wide, "gate")(y)) * dense(wide, "up")(y))

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x, lengths):
            places = jnp.arange(t)
            table = nn.Embed(buckets, h, name="relative")
            bias = jnp.transpose(table(bucket(places[None, :] - places[:, None])), (2, 0, 1))[None]
            padding = jnp.where(places[None, :] <= lengths[:, None], 0.0, -1e9)[:, None, None, :]
            bias = bias.astype(jnp.float32) + padding
            for _ in range(2):
                x = Layer()(x, bias)
            return nn.RMSNorm(epsilon=1e-6, dtype=dtype)(x)

    return linen_program(size, Encoder(), normal(b, t, n, dtype=dtype), integers(b, below=t))


@program("few-tokens-every-expert-top-two", GROUP)
def _mixtral(size: Size) -> Built:
    """This gives a feed-forward block like Mixtral's for a few tokens, where it is simplest to evaluate every expert.

    The two best of eight experts get weights by a softmax over their logits alone; a product with a mostly zero matrix of gates
    adds up the outputs.
    """
    tokens, n, wide, experts, best = pick(size, (12, 1152, 3456, 8, 2), (5, 384, 1152, 8, 2), (3, 8, 12, 4, 2))
    dtype = half(size)

    def block(p, x):
        y = rms_norm(x, p["norm"])
        logits = (y @ p["router"]).astype(jnp.float32)
        top, chosen = lax.top_k(logits, best)
        share = jax.nn.softmax(top, axis=-1)
        gates = jnp.sum(jax.nn.one_hot(chosen, experts) * share[..., None], axis=1)
        hidden = jax.nn.silu(jnp.einsum("tn,enf->tef", y, p["gate"])) * jnp.einsum("tn,enf->tef", y, p["up"])
        out = jnp.einsum("tef,efn->ten", hidden, p["down"])
        return x + jnp.einsum("ten,te->tn", out, gates.astype(dtype)), gates

    params = {
        "norm": gain(n, dtype),
        "router": weight(n, experts, dtype=dtype),
        "gate": weight(experts, n, wide, dtype=dtype),
        "up": weight(experts, n, wide, dtype=dtype),
        "down": weight(experts, wide, n, dtype=dtype),
    }
    return Built(block, (params, normal(tokens, n, dtype=dtype)))


@program("prefix-and-low-rank-tuned-layer-grad", GROUP)
def _prefix(size: Size) -> Built:
    """This gives the gradient of the few trained weights of a frozen layer: a learned prefix and low-rank changes.

    Vectors of the prefix stand before the keys and values of every sequence, the queries and values have low-rank terms that are
    scaled by alpha over rank, and the mean over the text goes to a classifier.
    """
    b, t, n, h, prefix, rank, classes = pick(
        size, (12, 333, 768, 12, 24, 12, 5), (2, 77, 384, 6, 24, 12, 5), (2, 5, 8, 2, 3, 2, 3)
    )
    dtype, d, alpha = half(size), n // h, 24.0

    def norm(x, p):
        y = x.astype(jnp.float32)
        y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5)
        return (y * p["scale"] + p["shift"]).astype(dtype)

    def heads(x):
        return x.reshape(*x.shape[:-1], h, d)

    def forward(tuned, frozen, x, lengths):
        def adapted(name, y):
            low = tuned[name]
            return y @ frozen[name] + (y @ low["a"]) @ low["b"] * (alpha / rank)

        y = norm(x, frozen["norm1"])
        q, k, v = adapted("q", y), y @ frozen["k"], adapted("v", y)
        first = jnp.broadcast_to(tuned["prefix"].astype(dtype), (b, 2, prefix, n))
        k, v = jnp.concatenate([first[:, 0], k], axis=1), jnp.concatenate([first[:, 1], v], axis=1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", heads(q), heads(k)).astype(jnp.float32) * d**-0.5
        text = jnp.arange(t)[None] <= lengths[:, None]
        seen = jnp.concatenate([jnp.ones((b, prefix), bool), text], axis=1)
        probs = jax.nn.softmax(scores, axis=-1, where=seen[:, None, None]).astype(dtype)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", probs, heads(v)).reshape(b, t, n) @ frozen["out"]
        x = x + jax.nn.gelu(norm(x, frozen["norm2"]) @ frozen["up"]) @ frozen["down"]
        pooled = jnp.sum(jnp.where(text[..., None], x, 0), axis=1) / jnp.sum(text, axis=1)[:, None]
        return pooled.astype(jnp.float32) @ tuned["head"]

    def loss(tuned, frozen, x, lengths, labels):
        log_probs = jax.nn.log_softmax(forward(tuned, frozen, x, lengths))
        return -jnp.mean(jnp.take_along_axis(log_probs, labels[:, None], axis=1))

    low = {"a": weight(n, rank, dtype=dtype), "b": normal(rank, n, dtype=dtype, scale=0.02)}
    tuned = {"prefix": normal(2, prefix, n), "q": low, "v": low, "head": weight(n, classes)}
    norms = {"scale": gain(n), "shift": normal(n, scale=0.02)}
    frozen = {name: weight(n, n, dtype=dtype) for name in ("q", "k", "v", "out")}
    frozen |= {"up": weight(n, 4 * n, dtype=dtype), "down": weight(4 * n, n, dtype=dtype)}
    frozen |= {"norm1": norms, "norm2": norms}
    inputs = (normal(b, t, n, dtype=dtype), integers(b, below=t), integers(b, below=classes))
    return Built(jax.value_and_grad(loss), (tuned, frozen, *inputs))


@program("norm-then-bytes-times-bytes-mlp", GROUP)
def _bytes(size: Size) -> Built:
    """This gives a multilayer perceptron of which both the weights and the activations are rounded to bytes.

    Rows are normed and divided by their largest value, products of bytes are summed as integers, and one scale per row and one per
    output column turn the sums back; the weights are stored with a zero point of 128.
    """
    rows, n, wide = pick(size, (1536, 1152, 4608), (333, 384, 1536), (3, 8, 12))
    dtype = half(size)

    def quantise(x):
        x = x.astype(jnp.float32)
        scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1e-6) / 127.0
        return jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8), scale

    def linear(p, x):
        values, row_scale = quantise(x)
        signed = (p["bytes"].astype(jnp.int16) - 128).astype(jnp.int8)
        sums = jnp.matmul(values, signed, preferred_element_type=jnp.int32)
        return (sums.astype(jnp.float32) * row_scale * jnp.abs(p["scale"]) + p["bias"]).astype(dtype)

    def mlp(p, x):
        return x + linear(p["down"], jax.nn.gelu(linear(p["up"], rms_norm(x, p["norm"]))))

    def lin(i, o):
        stored = Random((i, o), jnp.dtype(jnp.uint8), below=256)
        scale = i**-0.5 / 74
        return {"bytes": stored, "scale": normal(o, scale=0.1 * scale, offset=scale), "bias": normal(o, scale=0.02)}

    params = {"norm": gain(n, dtype), "up": lin(n, wide), "down": lin(wide, n)}
    return Built(mlp, (params, normal(rows, n, dtype=dtype)))


@program("penalised-top-k-top-p-categorical-draw", GROUP)
def _draw(size: Size) -> Built:
    """This gives the next word of each sequence, drawn from the best words of the model's distribution.

    Words that have been said are penalised, logits are divided by each request's temperature, and of the forty best words those
    that make up the first nine tenths are kept; the draw's log-probability under the whole distribution is returned with it.
    """
    b, n, words, said, best = pick(size, (12, 768, 50257, 333, 40), (5, 384, 32003, 197, 40), (2, 6, 13, 4, 5))
    dtype, penalty, nucleus = half(size), 1.2, 0.9

    def sample(hidden, table, history, temperature, seed):
        logits = (hidden @ table.T).astype(jnp.float32)
        rows = jnp.arange(b)[:, None]
        seen = jnp.zeros((b, words), bool).at[rows, history].set(True)
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
        logits = logits / jnp.maximum(jnp.abs(temperature), 0.05)[:, None]
        top, index = lax.top_k(logits, best)
        probs = jax.nn.softmax(top, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs
        kept = jnp.where(before < nucleus, top, -jnp.inf)
        place = jax.random.categorical(jax.random.key(seed), kept, axis=-1)
        word = jnp.take_along_axis(index, place[:, None], axis=-1)[:, 0]
        drawn = jnp.take_along_axis(top, place[:, None], axis=-1)[:, 0]
        return word, drawn - jax.nn.logsumexp(logits, axis=-1)

    inputs = (normal(b, n, dtype=dtype), normal(words, n, dtype=dtype, scale=2.0 * n**-0.5))
    inputs += (integers(b, said, below=words), normal(b, scale=0.1, offset=0.8), integers(below=2**31 - 1))
    return Built(sample, inputs)
