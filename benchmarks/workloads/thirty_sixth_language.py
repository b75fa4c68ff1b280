"""Chunked positions, looked-up weights, drafts by iteration, experts of two kinds, heads of two kinds: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, booleans, gain, half, integers, normal, pick, program
from benchmarks.workloads.thirty_fifth_parts import ends_of, stack_of
from benchmarks.workloads.twenty_fifth_parts import rms_norm, rotary

GROUP = "thirty-sixth"


def _swiglu(q, y):
    """This is a gated layer."""
    return (jax.nn.silu(y @ q["gate"]) * (y @ q["up"])) @ q["down"]


@program("dual-chunk-attention-long-prompt-prefill", GROUP)
def _chunks(size: Size) -> Built:
    """This program reads a prompt longer than the model was trained for, with positions that never exceed those of training.

    It is dual chunk attention (An, 2024; HKUNLP/ChunkLlama) as Qwen 2.5 1M uses it: queries are turned in three ways for their own
    chunk, the chunk before and all earlier ones, three attentions are merged by their log-sum-exps, and scores are sharpened.
    """
    b, chunk, window, n, h, groups, d, wide, depth, words = pick(
        size,
        (1, 768, 256, 1536, 12, 2, 128, 8960, 2, 151936),
        (1, 96, 32, 192, 6, 1, 32, 640, 2, 8001),
        (1, 3, 2, 8, 2, 1, 4, 12, 2, 11),
    )
    dtype, share, chunks = half(size), h // groups, 4
    t = chunk * chunks
    sharp = 0.1 * float(np.log(t / (chunk + window))) + 1.0

    def part(query, key, value, mask):
        """This is attention to a stretch of keys, with the log-sum-exp of its scores."""
        scores = jnp.einsum("bqgsd,bkgd->bgsqk", query, key, preferred_element_type=jnp.float32) * (sharp * d**-0.5)
        if mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        total = jax.nn.logsumexp(scores, axis=-1)
        probs = jnp.exp(scores - total[..., None]).astype(dtype)
        return jnp.einsum("bgsqk,bkgd->bgsqd", probs, value).astype(jnp.float32), total

    def run(p, prompt):
        """This gives logarithms of chances of the next word, and the keys and values of layers."""
        within = jnp.tile(jnp.arange(chunk), chunks)
        causal = jnp.tril(jnp.ones((chunk, chunk), bool))

        def turned(query, places):
            """This turns queries, and groups them by the keys that they share."""
            query = rotary(query, jnp.broadcast_to(places, (b, t)))
            return query.reshape(b, chunks, chunk, groups, share, d)

        def layer(x, q):
            """This is one layer of the model."""
            qkv = rms_norm(q["norm1"], x) @ q["qkv"] + q["bias"][0]
            query, key, value = jnp.split(qkv.reshape(b, t, h + 2 * groups, d), [h, h + groups], axis=2)
            key = rotary(key, jnp.broadcast_to(within, (b, t)))
            own = turned(query, within)
            near = turned(query, jnp.minimum(within + chunk, chunk + window))
            far = turned(query, jnp.full((t,), chunk + window))
            outs = []
            for k in range(chunks):
                parts = [part(own[:, k], *(z[:, k * chunk : (k + 1) * chunk] for z in (key, value)), causal)]
                if k > 0:
                    parts.append(part(near[:, k], *(z[:, (k - 1) * chunk : k * chunk] for z in (key, value)), None))
                if k > 1:
                    parts.append(part(far[:, k], *(z[:, : (k - 1) * chunk] for z in (key, value)), None))
                weigh = jax.nn.softmax(jnp.stack([total for _, total in parts]), axis=0)
                outs.append(sum(w[..., None] * out for w, (out, _) in zip(weigh, parts, strict=True)))
            out = jnp.concatenate(outs, axis=3).transpose(0, 3, 1, 2, 4).reshape(b, t, h * d)
            x = x + out.astype(dtype) @ q["out"]
            return x + _swiglu(q, rms_norm(q["norm2"], x)), (key, value)

        x, kept = lax.scan(layer, p["table"][prompt], p["layers"])
        return jax.nn.log_softmax((rms_norm(p["norm"], x[:, -1]) @ p["head"]).astype(jnp.float32)), kept

    heads = (h + 2 * groups) * d
    layers = {"norm1": (n,), "norm2": (n,), "qkv": (n, heads), "bias": (1, heads), "out": (h * d, n)}
    layers |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    p = ends_of(words, n, dtype) | {"layers": stack_of(depth, dtype, **layers)}
    return Built(run, (p, integers(b, t, below=words)))


@program("squeezellm-lookup-table-weights-with-sparse-outliers-decode", GROUP)
def _looked(size: Size) -> Built:
    """This program reads one more word with four-bit weights that stand for sixteen learned values per output, plus rare outliers.

    It is SqueezeLLM (Kim, 2024; SqueezeAILab/SqueezeLLM): eight codes share a word of 32 bits, values come from a table of each
    output, outliers are kept as coordinates and summed by output, and a few inputs with many of them have whole rows.
    """
    b, t, n, h, d, wide, depth, words = pick(
        size, (1, 1024, 2048, 16, 128, 5504, 3, 32000), (1, 520, 512, 8, 64, 1376, 3, 16000), (1, 5, 8, 2, 4, 16, 3, 11)
    )
    dtype, few = half(size), 10 if size != "tiny" else 2

    def linear(x, q):
        """This multiplies rows [b, inputs] by what codes stand for, and adds outliers."""
        shifts = jnp.arange(8, dtype=jnp.uint32) * 4
        codes = (q["codes"][:, None] >> shifts[:, None]) & 15
        codes = codes.reshape(-1, codes.shape[-1]).astype(jnp.int32)
        values = jnp.take_along_axis(q["table"].T, codes, axis=0)
        y = jnp.matmul(x, values, preferred_element_type=jnp.float32)
        single = x[:, q["inputs"]].astype(jnp.float32) * q["values"].astype(jnp.float32)
        many = q["table"].shape[0]
        y = y + jax.ops.segment_sum(single.T, q["outputs"], num_segments=many).T
        return (y + x[:, q["row_inputs"]].astype(jnp.float32) @ q["rows"].astype(jnp.float32)).astype(dtype)

    def run(p, keys, values, word, at):
        """This gives logarithms of chances of the next word, and what is written into caches."""
        seen = jnp.arange(t) <= at

        def layer(x, carried):
            """This reads one word [b, n]."""
            q, keys, values = carried
            y = rms_norm(q["norm1"], x)
            query, key, value = (linear(y, q[name]).reshape(b, 1, h, d) for name in ("query", "key", "value"))
            place = jnp.full((b, 1), at)
            query, key = rotary(query, place)[:, 0], rotary(key, place)
            keys = lax.dynamic_update_slice_in_dim(keys, key, at, axis=1)
            values = lax.dynamic_update_slice_in_dim(values, value, at, axis=1)
            scores = jnp.einsum("bhd,bkhd->bhk", query, keys, preferred_element_type=jnp.float32) * d**-0.5
            probs = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1).astype(dtype)
            x = x + linear(jnp.einsum("bhk,bkhd->bhd", probs, values).reshape(b, h * d), q["out"])
            y = rms_norm(q["norm2"], x)
            x = x + linear(jax.nn.silu(linear(y, q["gate"])) * linear(y, q["up"]), q["down"])
            return x, (key[:, 0], value[:, 0])

        x, fresh = lax.scan(layer, p["embedding"][word], (p["layers"], keys, values))
        return jax.nn.log_softmax((rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32)), fresh

    def weights(i, o):
        """This describes codes, tables of outputs, and outliers of which there are half a percent."""
        sparse = max(i * o // 200, 4)
        return {
            "codes": Random((depth, i // 8, o), jnp.dtype(jnp.uint32), below=2**32),
            "table": normal(depth, o, 16, dtype=dtype, scale=i**-0.5),
            "inputs": integers(depth, sparse, below=i),
            "outputs": integers(depth, sparse, below=o),
            "values": normal(depth, sparse, dtype=dtype, scale=3 * i**-0.5),
            "row_inputs": integers(depth, few, below=i),
            "rows": normal(depth, few, o, dtype=dtype, scale=i**-0.5),
        }

    shapes = {"query": (n, h * d), "key": (n, h * d), "value": (n, h * d), "out": (h * d, n)}
    shapes |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    layers = stack_of(depth, dtype, norm1=(n,), norm2=(n,)) | {k: weights(*v) for k, v in shapes.items()}
    ends = ends_of(words, n, dtype)
    p = {"embedding": ends["table"], "norm": ends["norm"], "head": ends["head"], "layers": layers}
    cache = normal(depth, b, t, h, d, dtype=dtype)
    return Built(run, (p, cache, cache, integers(b, below=words), integers(below=t)))


@program("jacobi-parallel-decoding-of-a-block-until-it-is-fixed-while", GROUP)
def _jacobi(size: Size) -> Built:
    """This program decodes a block of words at once, by guessing all of them again until no guess changes.

    It is Jacobi decoding (Santilli, 2023; hao-ai-lab/Consistency_LLM) in float32 on layers as in Phi-2: attention and the wide
    layer stand side by side, a part of each head is turned, and the keys and values of the prompt are read from a cache.
    """
    t, block, n, h, d, part, depth, words = pick(
        size, (1024, 16, 1024, 16, 64, 32, 4, 51200), (192, 6, 160, 5, 32, 12, 4, 4001), (4, 3, 8, 2, 4, 2, 4, 11)
    )

    def layer_norm(q, name, x):
        """This is a norm with a shift."""
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * q[name] + q[name + "_shift"]

    def turned(x, places):
        """This turns a part of each head."""
        return jnp.concatenate([rotary(x[..., :part], places), x[..., part:]], axis=-1)

    def run(p, keys, values, word, guess):
        """This gives the words, chances of them, how many rounds it took, and keys and values of the block."""
        places = t + jnp.arange(block)
        causal = jnp.tril(jnp.ones((block, block), bool))
        seen = jnp.concatenate([jnp.ones((block, t), bool), causal], axis=1)

        def layer(x, carried):
            """This is one layer for all words of the block."""
            q, old_key, old_value = carried
            y = layer_norm(q, "norm", x)
            qkv = (y @ q["qkv"] + q["qkv_bias"]).reshape(block, 3, h, d)
            query, key, value = turned(qkv[:, 0], places), turned(qkv[:, 1], places), qkv[:, 2]
            scores = jnp.einsum("qhd,khd->hqk", query, jnp.concatenate([old_key, key])) * d**-0.5
            probs = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
            out = jnp.einsum("hqk,khd->qhd", probs, jnp.concatenate([old_value, value])).reshape(block, h * d)
            wide = jax.nn.gelu(y @ q["up"] + q["up_bias"]) @ q["down"] + q["down_bias"]
            return x + out @ q["out"] + q["out_bias"] + wide, (key, value)

        def forward(draft):
            """This gives scores of the words that follow the block's words, and its keys and values."""
            x = p["table"][jnp.concatenate([word[None], draft[:-1]])]
            x, kept = lax.scan(layer, x, (p["layers"], keys, values))
            return layer_norm(p, "norm", x) @ p["head"] + p["head_bias"], kept

        def again(carry):
            """This guesses all words again."""
            draft, _, k = carry
            fresh = jnp.argmax(forward(draft)[0], axis=-1).astype(jnp.int32)
            return fresh, jnp.any(fresh != draft), k + 1

        def changing(carry):
            """This tells whether a guess has changed."""
            return carry[1] & (carry[2] < block + 1)

        draft, _, rounds = lax.while_loop(changing, again, (guess, jnp.bool_(True), jnp.int32(0)))
        scores, kept = forward(draft)
        logp = jax.nn.log_softmax(scores, axis=-1)
        return draft, jnp.take_along_axis(logp, draft[:, None], axis=1)[:, 0], rounds, kept

    layers = stack_of(depth, jnp.float32, norm=(n,), qkv=(n, 3 * h * d), out=(h * d, n), up=(n, 4 * n), down=(4 * n, n))
    sizes = {"norm_shift": n, "qkv_bias": 3 * h * d, "out_bias": n, "up_bias": 4 * n, "down_bias": n}
    layers |= {name: normal(depth, many, scale=0.1) for name, many in sizes.items()}
    p = ends_of(words, n, jnp.float32) | {"layers": layers}
    p |= {"norm_shift": normal(n, scale=0.1), "head_bias": normal(words, scale=0.1)}
    cache = normal(depth, t, h, d)
    return Built(run, (p, cache, cache, integers(below=words), integers(block, below=words)))


@program("ernie-vl-text-and-picture-experts-three-axis-rotations-prefill", GROUP)
def _modal(size: Size) -> Built:
    """This program reads a prompt of words and patches of pictures, which have experts of their own and shared ones.

    It is ERNIE 4.5 VL (Baidu, 2025; in transformers): rotations tell time, row and column, routers of words and of patches choose
    experts by chances plus a bias that only steers, experts of patches are narrow, and products go by sorted groups.
    """
    t, n, h, groups, d, experts, top, wide, narrow, shared, depth = pick(
        size,
        (1024, 1536, 12, 2, 128, 32, 6, 768, 256, 1536, 2),
        (128, 160, 5, 1, 32, 8, 3, 96, 40, 192, 2),
        (6, 8, 2, 1, 12, 3, 2, 6, 4, 6, 2),
    )
    dtype, share = half(size), h // groups
    axes = np.where(np.arange(d // 2) >= d // 2 - d // 6, 0, 1 + np.arange(d // 2) % 2)

    def turned(x, places):
        """This turns pairs of neighbours by the time, row or column that belongs to each pair."""
        angle = places[:, axes] * 500000.0 ** (-jnp.arange(d // 2) * 2.0 / d)
        cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
        one, two = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
        return jnp.stack([one * cos - two * sin, two * cos + one * sin], axis=-1).reshape(x.shape).astype(dtype)

    def routed(q, y, mine):
        """This sends tokens to their experts, sorts them, and adds up what experts give; others weigh nothing."""
        probs = jax.nn.softmax(y.astype(jnp.float32) @ q["router"].astype(jnp.float32), axis=-1)
        chosen = lax.top_k(probs + q["steer"], top)[1]
        weigh = jnp.take_along_axis(probs, chosen, axis=1)
        weigh = weigh / jnp.maximum(jnp.sum(weigh, axis=1, keepdims=True), 1e-12)
        weigh, chosen = jnp.where(mine[:, None], weigh, 0.0), jnp.where(mine[:, None], chosen, 0)
        order = jnp.argsort(chosen.reshape(-1))
        many = jnp.bincount(chosen.reshape(-1), length=experts)
        x = y[order // top]
        gate, up = jnp.split(lax.ragged_dot(x, q["up"], many), 2, axis=-1)
        out = lax.ragged_dot(jax.nn.silu(gate) * up, q["down"], many)
        out = out.astype(jnp.float32) * weigh.reshape(-1)[order][:, None]
        load = jnp.sum(jax.nn.one_hot(chosen, experts) * mine[:, None, None], axis=(0, 1))
        return jnp.zeros((t, n)).at[order // top].add(out).astype(dtype), load

    def run(p, x, picture, places):
        """This gives the last state of each token, the load of experts by layer, and keys and values."""
        places = jnp.cumsum(places, axis=0)
        causal = jnp.tril(jnp.ones((t, t), bool))

        def layer(x, q):
            """This is one layer of the model."""
            y = rms_norm(q["norm1"], x)
            query, key, value = jnp.split((y @ q["qkv"]).reshape(t, h + 2 * groups, d), [h, h + groups], axis=1)
            query, key = turned(query, places).reshape(t, groups, share, d), turned(key, places)
            scores = jnp.einsum("qgsd,kgd->gsqk", query, key, preferred_element_type=jnp.float32) * d**-0.5
            probs = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1).astype(dtype)
            x = x + jnp.einsum("gsqk,kgd->qgsd", probs, value).reshape(t, h * d) @ q["out"]
            y = rms_norm(q["norm2"], x)
            one, load_one = routed(q["text"], y, ~picture)
            two, load_two = routed(q["picture"], y, picture)
            return x + one + two + _swiglu(q, y), (jnp.stack([load_one, load_two]), key, value)

        x, (load, keys, values) = lax.scan(layer, x, p["layers"])
        return rms_norm(p["norm"], x), load, keys, values

    def experts_of(wide):
        """This describes a router and its experts."""
        q = stack_of(depth, dtype, router=(n, experts), up=(experts, n, 2 * wide), down=(experts, wide, n))
        return q | {"steer": normal(depth, experts, scale=0.02)}

    layers = stack_of(
        depth,
        dtype,
        norm1=(n,),
        norm2=(n,),
        qkv=(n, (h + 2 * groups) * d),
        out=(h * d, n),
        gate=(n, shared),
        up=(n, shared),
        down=(shared, n),
    )
    p = {"norm": gain(n, dtype), "layers": layers | {"text": experts_of(wide), "picture": experts_of(narrow)}}
    return Built(run, (p, normal(t, n, dtype=dtype), booleans(t), integers(t, 3, below=2)))


@program("duo-attention-retrieval-heads-and-streaming-heads-decode", GROUP)
def _duo(size: Size) -> Built:
    """This program reads one more word per row, where some heads see all words and the others see only the first and the latest.

    It is DuoAttention (Xiao, 2025; mit-han-lab/duo-attention) on layers of Llama 3: retrieval heads have a whole cache, streaming
    heads have a short one whose first places stay and whose others are overwritten in turn, and both are joined before one matrix.
    """
    b, t, sink, recent, n, h, groups, whole, d, wide, depth, words = pick(
        size,
        (8, 3072, 64, 256, 2048, 16, 8, 3, 128, 7168, 3, 128256),
        (4, 960, 16, 112, 448, 14, 7, 3, 32, 1152, 3, 16001),
        (2, 7, 1, 3, 8, 4, 2, 1, 4, 12, 3, 11),
    )
    dtype, share, short = half(size), h // groups, sink + recent

    def attended(query, keys, values, seen):
        """This is attention of one query per row and head."""
        scores = jnp.einsum("bgsd,bkgd->bgsk", query, keys, preferred_element_type=jnp.float32) * d**-0.5
        probs = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e9), axis=-1).astype(dtype)
        return jnp.einsum("bgsk,bkgd->bgsd", probs, values)

    def run(p, full, streaming, word, at):
        """This gives logarithms of chances of the next word, and both kinds of caches."""
        row = jnp.arange(b)
        slot = jnp.where(at < short, at, sink + (at - sink) % recent)
        seen_full = jnp.arange(t) <= at[:, None]
        seen_short = jnp.arange(short) <= at[:, None]

        def layer(x, carried):
            """This reads one word [b, n]."""
            q, full, streaming = carried
            qkv = (rms_norm(q["norm1"], x) @ q["qkv"]).reshape(b, 1, h + 2 * groups, d)
            query, key, value = jnp.split(qkv, [h, h + groups], axis=2)
            query, key = rotary(query, at[:, None])[:, 0], rotary(key, at[:, None])[:, 0]
            pair = jnp.stack([key, value[:, 0]])
            full = full.at[:, row, at].set(pair[:, :, :whole])
            streaming = streaming.at[:, row, slot].set(pair[:, :, whole:])
            query = query.reshape(b, groups, share, d)
            one = attended(query[:, :whole], full[0], full[1], seen_full)
            two = attended(query[:, whole:], streaming[0], streaming[1], seen_short)
            x = x + jnp.concatenate([one, two], axis=1).reshape(b, h * d) @ q["out"]
            return x + _swiglu(q, rms_norm(q["norm2"], x)), (full, streaming)

        x, caches = lax.scan(layer, p["table"][word], (p["layers"], full, streaming))
        return jax.nn.log_softmax((rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32)), caches

    shapes = {"norm1": (n,), "norm2": (n,), "qkv": (n, (h + 2 * groups) * d), "out": (h * d, n)}
    shapes |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    p = ends_of(words, n, dtype) | {"layers": stack_of(depth, dtype, **shapes)}
    full = normal(depth, 2, b, t, whole, d, dtype=dtype)
    streaming = normal(depth, 2, b, short, groups - whole, d, dtype=dtype)
    return Built(run, (p, full, streaming, integers(b, below=words), integers(b, below=t)))
