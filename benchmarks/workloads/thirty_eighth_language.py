"""Landmarks, mixtures of adapters, Cauchy kernels, sampled caches and low-rank branches: their author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program
from benchmarks.workloads.thirty_fifth_parts import ends_of, stack_of
from benchmarks.workloads.twenty_fifth_parts import attention, rms_norm, rotary

GROUP = "thirty-eighth"


@program("landmark-attention-grouped-softmax-prefill", GROUP)
def _landmark(size: Size) -> Built:
    """This program reads a long prompt in which the last token of each block is a landmark that opens the block to later words.

    It is landmark attention (Mohtashami, 2023; epfml/landmark-attention): a first softmax runs over the words of the own block and
    the landmarks of earlier blocks, a second one runs inside each earlier block, and their products weigh the values.
    """
    b, t, block, n, h, groups, d, wide, depth, words = pick(
        size,
        (1, 2048, 64, 2048, 16, 4, 128, 5632, 3, 32001),
        (1, 320, 32, 192, 6, 2, 32, 512, 3, 8001),
        (1, 8, 4, 8, 2, 1, 4, 12, 3, 11),
    )
    dtype, blocks = half(size), t // block

    def grouped(query, key, value):
        """This attends by two softmaxes over [b, t, h, d], and tells how much each block gets [b, h, blocks]."""
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * d**-0.5
        causal = jnp.tril(jnp.ones((t, t), bool))
        scores = jnp.where(causal, scores, -1e9).reshape(b, h, t, blocks, block)
        mine = jnp.arange(t)[:, None] // block
        own, past = mine == jnp.arange(blocks), mine > jnp.arange(blocks)
        landmark = jnp.arange(block) == block - 1
        first = (own[..., None] & ~landmark) | (past[..., None] & landmark)
        outer = jax.nn.softmax(jnp.where(first, scores, -1e9).reshape(b, h, t, t), axis=-1)
        outer = outer.reshape(b, h, t, blocks, block)
        inner = jax.nn.softmax(jnp.where(landmark, -1e9, scores), axis=-1)
        opened = jnp.where(past, outer[..., -1], 0.0)
        weights = jnp.where(own[..., None], outer, inner * opened[..., None]).reshape(b, h, t, t)
        return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(dtype), value), jnp.mean(opened, axis=2)

    def run(p, prompt):
        """This gives logarithms of probabilities of the next word, keys and values, and how much landmarks get."""
        prompt = prompt.at[:, block - 1 :: block].set(words - 1)
        places = jnp.broadcast_to(jnp.arange(t), (b, t))

        def layer(x, q):
            """This is one layer."""
            qkv = (rms_norm(q["norm1"], x) @ q["qkv"]).reshape(b, t, h + 2 * groups, d)
            query, key, value = jnp.split(qkv, [h, h + groups], axis=2)
            query, key = rotary(query, places), rotary(key, places)
            out, opened = grouped(query, *(jnp.repeat(z, h // groups, axis=2) for z in (key, value)))
            x = x + out.reshape(b, t, h * d) @ q["out"]
            y = rms_norm(q["norm2"], x)
            x = x + (jax.nn.silu(y @ q["gate"]) * (y @ q["up"])) @ q["down"]
            return x, (key, value, opened)

        x, kept = lax.scan(layer, p["table"][prompt], p["layers"])
        scores = rms_norm(p["norm"], x[:, -1]) @ p["head"]
        return jax.nn.log_softmax(scores.astype(jnp.float32)), kept

    layers = {"norm1": (n,), "norm2": (n,), "qkv": (n, (h + 2 * groups) * d), "out": (h * d, n)}
    layers |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    p = ends_of(words, n, dtype) | {"layers": stack_of(depth, dtype, **layers)}
    return Built(run, (p, integers(b, t, below=words - 1)))


@program("mixlora-top-two-low-rank-experts-on-a-shared-feed-forward-scored-prompts", GROUP)
def _mixlora(size: Size) -> Built:
    """This program scores prompts with a frozen model whose feed-forward layers get two of eight low-rank experts per word.

    It is MixLoRA (Li, 2024; TUDB-Labs/MixLoRA): experts add products of thin matrices to all three shared matrices, attention has
    adapters of its own, and a loss tells how evenly words are spread over the experts.
    """
    b, t, n, h, d, wide, rank, experts, depth, words = pick(
        size,
        (2, 512, 2048, 16, 128, 5632, 16, 8, 2, 32000),
        (2, 64, 192, 6, 32, 512, 8, 8, 2, 8001),
        (1, 4, 8, 2, 4, 12, 2, 8, 2, 11),
    )
    dtype, strength, top = half(size), 2.0, 2

    def low_rank(x, pair):
        """This is the product of a pair of thin matrices."""
        return strength * ((x @ pair["down"]) @ pair["up"])

    def feed_forward(q, y):
        """This is the shared layer with chosen experts on [words, n], and the loss of balance."""
        probs = jax.nn.softmax((y @ q["router"]).astype(jnp.float32), axis=-1)
        best, which = lax.top_k(probs, top)
        best = best / jnp.sum(best, axis=-1, keepdims=True)
        share = jnp.sum(jax.nn.one_hot(which, experts) * best[..., None], axis=1)
        gate, up = y @ q["gate"], y @ q["up"]

        def expert(total, each):
            """This adds what one expert says to the words that chose it."""
            pairs, mine = each
            inner = jax.nn.silu(gate + low_rank(y, pairs["gate"])) * (up + low_rank(y, pairs["up"]))
            out = inner @ q["down"] + low_rank(inner, pairs["down"])
            return total + mine[:, None] * out.astype(jnp.float32), None

        out, _ = lax.scan(expert, jnp.zeros(y.shape, jnp.float32), (q["experts"], share.T))
        used = jnp.mean(share > 0, axis=0)
        return out.astype(dtype), experts * jnp.sum(used * jnp.mean(probs, axis=0)) / top, used

    def run(p, text, short):
        """This gives the probabilities of words of texts, their perplexities, and the balance of experts by layers."""
        real = jnp.arange(t) < t - short[:, None]
        mask = jnp.tril(jnp.ones((t, t), bool)) & real[:, None, None]
        places = jnp.broadcast_to(jnp.arange(t), (b, t))

        def layer(x, q):
            """This is one layer."""
            y = rms_norm(q["norm1"], x)
            query, key, value = ((y @ q[k] + low_rank(y, q[f"{k}_lora"])).reshape(b, t, h, d) for k in ("q", "k", "v"))
            out = attention(rotary(query, places), rotary(key, places), value, mask).reshape(b, t, h * d)
            x = x + out @ q["out"] + low_rank(out, q["out_lora"])
            out, balance, used = feed_forward(q, rms_norm(q["norm2"], x).reshape(b * t, n))
            return x + out.reshape(b, t, n), (balance, used)

        x, balance = lax.scan(layer, p["table"][text], p["layers"])
        logits = (rms_norm(p["norm"], x[:, :-1]) @ p["head"]).astype(jnp.float32)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), text[:, 1:, None], axis=-1)[..., 0]
        logp = jnp.where(real[:, 1:], logp, 0.0)
        return logp, jnp.exp(-jnp.sum(logp, axis=1) / jnp.sum(real[:, 1:], axis=1)), balance

    def pair(i, o, *many):
        """This describes a pair of thin matrices."""
        how = {"dtype": dtype, "scale": i**-0.5}
        up = normal(depth, *many, rank, o, dtype=dtype, scale=0.1 * rank**-0.5)
        return {"down": normal(depth, *many, i, rank, **how), "up": up}

    layers = {"norm1": (n,), "norm2": (n,), "q": (n, h * d), "k": (n, h * d), "v": (n, h * d), "out": (h * d, n)}
    layers |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n), "router": (n, experts)}
    stack = stack_of(depth, dtype, **layers) | {f"{k}_lora": pair(n, h * d) for k in ("q", "k", "v")}
    shapes = {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    stack |= {"out_lora": pair(h * d, n), "experts": {k: pair(*v, experts) for k, v in shapes.items()}}
    p = ends_of(words, n, dtype) | {"layers": stack}
    return Built(run, (p, integers(b, t, below=words), integers(b, below=t // 2)))


@program("s4-diagonal-plus-low-rank-cauchy-kernel-byte-model", GROUP)
def _s4(size: Size) -> Built:
    """This program reads bytes with state-space layers that are long convolutions, whose filters come from Cauchy kernels.

    It is S4 (Gu, 2022; srush/annotated-s4): transition matrices are diagonal plus rank one, the generating function of the filter
    is evaluated at roots of unity by Woodbury's identity, and filters are applied by Fourier transforms of twice the length.
    """
    b, t, n, states, depth, symbols = pick(
        size, (4, 2048, 512, 32, 4, 256), (1, 512, 64, 16, 4, 256), (2, 8, 4, 2, 4, 9)
    )
    dtype = half(size)
    roots = jnp.asarray(np.exp(-2j * np.pi * np.arange(t) / t), jnp.complex64)
    hippo = jnp.asarray(np.pi * np.arange(states), jnp.float32)

    def kernel(q):
        """This makes the filters of all channels [n, t]."""
        step = jnp.exp(q["log_step"].astype(jnp.float32))[:, None]
        pole = lax.complex(-jnp.exp(q["decay"].astype(jnp.float32)), hippo + q["turn"].astype(jnp.float32))
        low, into, out = (lax.complex(*jnp.moveaxis(q[k].astype(jnp.float32), -1, 0)) for k in ("low", "into", "out"))
        bottom = 2 * (1 - roots)[:, None] - (step * pole)[:, None] * (1 + roots)[:, None]

        def cauchy(x, y):
            """This sums over states [n, states] at each root [n, t]."""
            return 2 * step * jnp.sum((x.conj() * y)[:, None] / bottom, axis=-1)

        half_way = 0.5 * (1 + roots)
        across = cauchy(out, low) * half_way * cauchy(low, into)
        at_roots = cauchy(out, into) - across / (1 + half_way * cauchy(low, low))
        return jnp.fft.ifft(at_roots, axis=-1).real

    def run(p, text):
        """This gives bits per byte by place, filters of the last layer, and the most probable next bytes."""
        x = p["table"][text[:, :-1]]

        def layer(x, q):
            """This is one layer: a norm, a long convolution, a gate and a residual."""
            y = rms_norm(q["norm"], x).astype(jnp.float32)
            filters = kernel(q)
            wide = jnp.fft.rfft(y, 2 * t, axis=1) * jnp.fft.rfft(filters, 2 * t, axis=1).T
            y = jnp.fft.irfft(wide, 2 * t, axis=1)[:, :t] + q["skip"].astype(jnp.float32) * y
            one, two = jnp.split(jax.nn.gelu(y).astype(dtype) @ q["mix"] + q["bias"], 2, axis=-1)
            return x + one * jax.nn.sigmoid(two), filters[:, : t // 2]

        x, filters = lax.scan(layer, x, p["layers"])
        logp = jax.nn.log_softmax((rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32), axis=-1)
        bits = -jnp.take_along_axis(logp, text[:, 1:, None], axis=-1)[..., 0] / jnp.log(2.0)
        return jnp.mean(bits, axis=0), filters[-1], lax.top_k(logp[:, -1], 5)

    layers = stack_of(depth, dtype, norm=(n,), skip=(n,), mix=(n, 2 * n))
    layers |= {
        "log_step": normal(depth, n, scale=1.0, offset=-4.5),
        "bias": normal(depth, 2 * n, dtype=dtype, scale=0.1),
    }
    layers |= {"decay": normal(depth, n, states, scale=0.1, offset=-0.7), "turn": normal(depth, n, states, scale=0.1)}
    layers |= {k: normal(depth, n, states, 2, scale=0.7) for k in ("low", "into", "out")}
    p = ends_of(symbols, n, dtype) | {"layers": layers}
    return Built(run, (p, integers(b, t + 1, below=symbols)))


@program("magicpig-locality-sensitive-hash-sampled-attention-decode", GROUP)
def _magicpig(size: Size) -> Built:
    """This program reads one more word and attends to cached keys that are sampled by hash tables, each weighed by its chance.

    It is MagicPIG (Chen, 2024; Infini-AI-Lab/MagicPIG): a key is sampled if at least two tables of random signs agree with the
    query, the logarithm of that chance is taken off its score, and the first and the last words are always seen.
    """
    b, t, tables, bits, sinks, near, n, h, groups, d, wide, depth, words = pick(
        size,
        (4, 8192, 64, 8, 4, 64, 2048, 16, 4, 128, 7168, 3, 32000),
        (2, 1536, 32, 6, 4, 32, 384, 12, 4, 32, 1024, 3, 8001),
        (1, 8, 4, 2, 1, 2, 8, 2, 1, 4, 12, 3, 11),
    )
    dtype, share = half(size), h // groups
    powers = 2 ** jnp.arange(bits)

    def coded(planes, x):
        """This hashes vectors [..., d] into one code for each table [..., tables]."""
        signs = jnp.einsum("...d,dlk->...lk", x, planes, preferred_element_type=jnp.float32) > 0
        return jnp.sum(signs * powers, axis=-1).astype(jnp.uint16)

    def sampled(query, asked, key, value, codes, mean, count):
        """This attends to sampled keys: query [b, groups, share, d], key and value [b, groups, t, d], codes by table."""
        place = jnp.arange(t)
        open_ = place < count[:, None, None, None]
        agree = jnp.sum(asked[..., None] == codes[:, :, None], axis=-2)
        always = (place < sinks) | (place >= count[:, None, None, None] - near)
        centred = key.astype(jnp.float32) - mean[:, :, None]
        lengths = jnp.sqrt(jnp.sum(centred**2, axis=-1) + 1e-6)[:, :, None]
        longest = jnp.sqrt(jnp.sum(query.astype(jnp.float32) ** 2, axis=-1, keepdims=True) + 1e-6)
        met = jnp.einsum("bgsd,bgtd->bgst", query, centred.astype(dtype), preferred_element_type=jnp.float32)
        angle = jnp.arccos(jnp.clip(met / (lengths * longest), -0.999, 0.999))
        one = (1.0 - angle / np.pi) ** bits
        chance = 1.0 - (1.0 - one) ** tables - tables * one * (1.0 - one) ** (tables - 1)
        scores = jnp.einsum("bgsd,bgtd->bgst", query, key, preferred_element_type=jnp.float32) * d**-0.5
        scores = scores - jnp.where(always, 0.0, jnp.log(jnp.maximum(chance, 1e-4)))
        seen = open_ & (always | (agree >= 2))
        probs = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
        return jnp.einsum("bgst,bgtd->bgsd", probs.astype(dtype), value), jnp.sum(seen, axis=-1) / count[:, None, None]

    def run(p, keys, values, codes, means, word, before):
        """This gives logarithms of probabilities of the next word, what is written into caches, and shares of keys seen."""
        row, count = jnp.arange(b), jnp.maximum(before, 1)

        def layer(x, carried):
            """This reads one word [b, n] of each text."""
            q, key, value, codes, mean = carried
            qkv = (rms_norm(q["norm1"], x) @ q["qkv"]).reshape(b, 1, h + 2 * groups, d)
            query, fresh, new = jnp.split(qkv, [h, h + groups], axis=2)
            query, fresh = rotary(query, count[:, None])[:, 0], rotary(fresh, count[:, None])[:, 0]
            query, new = query.reshape(b, groups, share, d), new[:, 0]
            code = coded(q["planes"], fresh - mean.astype(dtype))
            key, value = key.at[row, :, count].set(fresh), value.at[row, :, count].set(new)
            codes = codes.at[row, :, :, count].set(code)
            out, seen = sampled(query, coded(q["planes"], query), key, value, codes, mean, count + 1)
            x = x + out.reshape(b, h * d) @ q["out"]
            y = rms_norm(q["norm2"], x)
            x = x + (jax.nn.silu(y @ q["gate"]) * (y @ q["up"])) @ q["down"]
            return x, (fresh, new, code, seen)

        x, out = lax.scan(layer, p["table"][word], (p["layers"], keys, values, codes, means))
        return jax.nn.log_softmax((rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32)), out

    layers = {"norm1": (n,), "norm2": (n,), "qkv": (n, (h + 2 * groups) * d), "out": (h * d, n)}
    layers |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    stack = stack_of(depth, dtype, **layers) | {"planes": normal(depth, d, tables, bits, dtype=dtype)}
    p = ends_of(words, n, dtype) | {"layers": stack}
    cache = normal(depth, b, groups, t, d, dtype=dtype)
    codes = Random((depth, b, groups, tables, t), jnp.dtype(jnp.uint16), below=2**bits)
    caches = cache, cache, codes, normal(depth, b, groups, d, scale=0.1)
    return Built(run, (p, *caches, integers(b, below=words), integers(b, below=t - 1)))


@program("svdquant-low-rank-branch-beside-four-bit-weights-and-activations-prefill", GROUP)
def _svdquant(size: Size) -> Built:
    """This program reads a prompt with weights and activations of four bits, beside a thin branch that takes what is large.

    It is SVDQuant (Li, 2025; nunchaku-ai/nunchaku): channels are smoothed, the largest singular directions of the weights stay in
    half precision, the rest is rounded in groups, and products of integers are scaled group by group.
    """
    b, t, n, h, groups, d, wide, rank, group, depth, words = pick(
        size,
        (1, 256, 2048, 16, 4, 128, 5632, 32, 64, 2, 32000),
        (1, 64, 256, 8, 2, 32, 512, 16, 32, 2, 8001),
        (1, 4, 8, 2, 1, 4, 16, 2, 4, 2, 11),
    )
    dtype = half(size)

    def linear(q, x):
        """This multiplies rows [rows, inputs] by smoothed, split and rounded weights."""
        x = (x * q["smooth"]).astype(jnp.float32)
        thin = (x.astype(dtype) @ q["left"]) @ q["right"]
        parts = x.reshape(x.shape[0], -1, group)
        step = jnp.max(jnp.abs(parts), axis=-1, keepdims=True) / 7.0 + 1e-8
        small = jnp.clip(jnp.round(parts / step), -8, 7).astype(jnp.int8)
        packed = q["codes"].astype(jnp.int32)
        codes = jnp.stack([packed & 15, packed >> 4], axis=1) - 8
        codes = codes.astype(jnp.int8).reshape(-1, group, codes.shape[-1])
        product = jnp.einsum("rgi,gio->gro", small, codes, preferred_element_type=jnp.int32)
        scaled = product * step.transpose(1, 0, 2) * q["scales"].astype(jnp.float32)[:, None]
        return thin + jnp.sum(scaled, axis=0).astype(dtype) + q["bias"]

    def run(p, prompt, short):
        """This gives logarithms of probabilities of the next word after each prompt, and the caches of layers."""
        real = jnp.arange(t) >= short[:, None]
        mask = jnp.tril(jnp.ones((t, t), bool)) & real[:, None, None]
        places = jnp.maximum(jnp.arange(t) - short[:, None], 0)

        def layer(x, q):
            """This is one layer on [b * t, n]."""
            qkv = linear(q["qkv"], rms_norm(q["norm1"], x)).reshape(b, t, h + 2 * groups, d)
            query, key, value = jnp.split(qkv, [h, h + groups], axis=2)
            query, key = rotary(query, places), rotary(key, places)
            out = attention(query, *(jnp.repeat(z, h // groups, axis=2) for z in (key, value)), mask)
            x = x + linear(q["out"], out.reshape(b * t, h * d))
            gate, up = jnp.split(linear(q["wide"], rms_norm(q["norm2"], x)), 2, axis=-1)
            return x + linear(q["down"], jax.nn.silu(gate) * up), (key, value)

        x, kept = lax.scan(layer, p["table"][prompt].reshape(b * t, n), p["layers"])
        last = rms_norm(p["norm"], x.reshape(b, t, n)[:, -1])
        return jax.nn.log_softmax((last @ p["head"]).astype(jnp.float32)), kept

    def weights(i, o):
        """This describes a split matrix: smoothing, the two thin halves, nibbles, scales of groups and a bias."""
        return {
            "smooth": normal(depth, i, dtype=dtype, scale=0.1, offset=1.0),
            "left": normal(depth, i, rank, dtype=dtype, scale=i**-0.5),
            "right": normal(depth, rank, o, dtype=dtype, scale=0.5 * rank**-0.5),
            "codes": Random((depth, i // 2, o), jnp.dtype(jnp.uint8), below=256),
            "scales": normal(depth, i // group, o, dtype=dtype, scale=0.02 * i**-0.5, offset=0.2 * i**-0.5),
            "bias": normal(depth, o, dtype=dtype, scale=0.1),
        }

    shapes = {"qkv": (n, (h + 2 * groups) * d), "out": (h * d, n), "wide": (n, 2 * wide), "down": (wide, n)}
    layers = stack_of(depth, dtype, norm1=(n,), norm2=(n,)) | {k: weights(*v) for k, v in shapes.items()}
    p = ends_of(words, n, dtype) | {"layers": layers}
    return Built(run, (p, integers(b, t, below=words), integers(b, below=t // 2)))
