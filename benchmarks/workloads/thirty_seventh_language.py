"""Chosen blocks, fetched keys, lattice codes, reflections and tiny experts, the thirty-seventh set: its author saw no plan."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program
from benchmarks.workloads.thirty_fifth_parts import ends_of, stack_of
from benchmarks.workloads.twenty_fifth_parts import attention, rms_norm, rotary

GROUP = "thirty-seventh"


def _swiglu(q, y):
    """This is a gated layer."""
    return (jax.nn.silu(y @ q["gate"]) * (y @ q["up"])) @ q["down"]


@program("moba-blocks-of-keys-chosen-by-their-means-full-last-layer-prefill", GROUP)
def _moba(size: Size) -> Built:
    """This program reads a long prompt in which each query sees only the few blocks of keys whose means it likes best.

    It is the mixture of block attention (Lu, 2025; MoonshotAI/MoBA) as its plain version does it: the own block is always seen,
    causally, blocks ahead never, and the last layer attends to all words.
    """
    b, t, block, top, n, h, groups, d, wide, depth, words = pick(
        size,
        (1, 3072, 256, 3, 2048, 16, 4, 128, 5632, 3, 32000),
        (1, 384, 48, 3, 192, 6, 2, 32, 512, 3, 8001),
        (1, 8, 2, 2, 8, 2, 1, 4, 12, 3, 11),
    )
    dtype, blocks = half(size), t // block

    def chosen(query, key):
        """This tells which blocks each query sees [b, h, t, blocks]."""
        means = jnp.mean(key.astype(jnp.float32).reshape(b, blocks, block, h, d), axis=2)
        liking = jnp.einsum("bqhd,bkhd->bhqk", query.astype(jnp.float32), means)
        own = jnp.arange(t)[:, None] // block
        ahead, here = own < jnp.arange(blocks), own == jnp.arange(blocks)
        liking = jnp.where(ahead, -jnp.inf, jnp.where(here, jnp.inf, liking))
        best, which = lax.top_k(liking, top)
        picked = jnp.any(jax.nn.one_hot(which, blocks, dtype=bool) & (best > -jnp.inf)[..., None], axis=-2)
        return picked

    def run(p, prompt):
        """This gives logarithms of chances of the next word, keys and values of layers, and how often blocks are seen."""
        causal = jnp.tril(jnp.ones((t, t), bool))
        places = jnp.broadcast_to(jnp.arange(t), (b, t))
        x, kept, seen = p["table"][prompt], [], []
        for k in range(depth):
            q = jax.tree.map(lambda w, k=k: w[k], p["layers"])
            qkv = (rms_norm(q["norm1"], x) @ q["qkv"]).reshape(b, t, h + 2 * groups, d)
            query, key, value = jnp.split(qkv, [h, h + groups], axis=2)
            query, key = rotary(query, places), rotary(key, places)
            kept.append((key, value))
            wide_key, wide_value = (jnp.repeat(z, h // groups, axis=2) for z in (key, value))
            mask = causal
            if k < depth - 1:
                blocks_of = chosen(query, wide_key)
                mask = causal & jnp.repeat(blocks_of, block, axis=-1)
                seen.append(jnp.mean(blocks_of, axis=(0, 2)))
            x = x + attention(query, wide_key, wide_value, mask).reshape(b, t, h * d) @ q["out"]
            x = x + _swiglu(q, rms_norm(q["norm2"], x))
        scores = rms_norm(p["norm"], x[:, -1]) @ p["head"]
        return jax.nn.log_softmax(scores.astype(jnp.float32)), kept, jnp.stack(seen)

    layers = {"norm1": (n,), "norm2": (n,), "qkv": (n, (h + 2 * groups) * d), "out": (h * d, n)}
    layers |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    p = ends_of(words, n, dtype) | {"layers": stack_of(depth, dtype, **layers)}
    return Built(run, (p, integers(b, t, below=words)))


@program("sparq-few-parts-of-queries-fetch-few-keys-rest-by-mean-value-decode", GROUP)
def _sparq(size: Size) -> Built:
    """This program reads one more word, and fetches only the keys that matter by the largest parts of the queries.

    It is SparQ attention (Ribar, 2024; graphcore-research/llm-inference-research) on layers as in Mistral: keys are kept in both
    orders, scores from few parts are made warmer by the share that these parts hold, and what the chosen keys leave goes to the
    running mean of values.
    """
    b, t, parts, many, n, h, groups, d, wide, depth, words = pick(
        size,
        (8, 4096, 32, 128, 2048, 16, 4, 128, 7168, 3, 32000),
        (8, 1536, 16, 64, 512, 16, 4, 32, 1536, 3, 8001),
        (1, 6, 2, 2, 8, 2, 1, 4, 12, 3, 11),
    )
    dtype, share = half(size), h // groups

    def fetched(query, key, turned, value, mean, count):
        """This attends to few keys: query [b, groups, share, d], key and value [b, groups, t, d], turned [b, groups, d, t]."""
        open_ = jnp.arange(t) < count[:, None, None, None]
        size_of = jnp.sum(jnp.abs(query.astype(jnp.float32)), axis=2)
        where = lax.top_k(size_of, parts)[1]
        few = jnp.take_along_axis(query, where[:, :, None], axis=3)
        rows = jnp.take_along_axis(turned, where[..., None], axis=2)
        held = jnp.sum(jnp.abs(few), axis=-1) / (jnp.sum(jnp.abs(query), axis=-1) + 1e-6)
        warm = lax.rsqrt(d * held.astype(jnp.float32) + 1e-6)[..., None]
        rough = jnp.einsum("bgsr,bgrt->bgst", few, rows, preferred_element_type=jnp.float32) * warm
        rough = jax.nn.softmax(jnp.where(open_, rough, -1e9), axis=-1)
        near = jnp.arange(t) >= (count - many // 4)[:, None, None]
        liked = jnp.where(near & open_[:, :, 0], 1e3, 0.0) + jnp.sum(rough, axis=2)
        place = lax.top_k(liked, many)[1]
        mass = jnp.sum(jnp.take_along_axis(rough, place[:, :, None], axis=3), axis=-1, keepdims=True)
        key, value = (jnp.take_along_axis(z, place[..., None], axis=2) for z in (key, value))
        scores = jnp.einsum("bgsd,bgkd->bgsk", query, key, preferred_element_type=jnp.float32) * d**-0.5
        scores = jnp.where((place < count[:, None, None])[:, :, None], scores, -1e9)
        out = jnp.einsum("bgsk,bgkd->bgsd", jax.nn.softmax(scores, axis=-1).astype(dtype), value)
        out = mass * out.astype(jnp.float32) + (1 - mass) * mean[:, :, None]
        return out.astype(dtype), place, mass[..., 0]

    def run(p, keys, turned, values, means, word, count):
        """This gives logarithms of chances of the next word, what is written into caches, chosen places and their shares."""
        row = jnp.arange(b)

        def layer(x, carried):
            """This reads one word [b, n] of each text."""
            q, key, turned, value, mean = carried
            qkv = (rms_norm(q["norm1"], x) @ q["qkv"]).reshape(b, 1, h + 2 * groups, d)
            query, fresh, new = jnp.split(qkv, [h, h + groups], axis=2)
            query, fresh = rotary(query, count[:, None])[:, 0], rotary(fresh, count[:, None])[:, 0]
            new = new[:, 0]
            key, value = key.at[row, :, count].set(fresh), value.at[row, :, count].set(new)
            turned = turned.at[row, :, :, count].set(fresh)
            mean = mean + (new - mean) / (count + 1)[:, None, None]
            query = query.reshape(b, groups, share, d)
            out, place, mass = fetched(query, key, turned, value, mean, count + 1)
            x = x + out.reshape(b, h * d) @ q["out"]
            x = x + _swiglu(q, rms_norm(q["norm2"], x))
            return x, (fresh, new, mean, place, mass)

        x, out = lax.scan(layer, p["table"][word], (p["layers"], keys, turned, values, means))
        return jax.nn.log_softmax((rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32)), out

    layers = {"norm1": (n,), "norm2": (n,), "qkv": (n, (h + 2 * groups) * d), "out": (h * d, n)}
    layers |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    p = ends_of(words, n, dtype) | {"layers": stack_of(depth, dtype, **layers)}
    cache = normal(depth, b, groups, t, d, dtype=dtype)
    caches = cache, normal(depth, b, groups, d, t, dtype=dtype), cache, normal(depth, b, groups, d, scale=0.1)
    return Built(run, (p, *caches, integers(b, below=words), integers(b, below=t)))


@program("quip-sharp-codes-of-an-eight-axis-lattice-between-hadamard-turns-decode", GROUP)
def _lattice(size: Size) -> Built:
    """This program reads one more word with weights of two bits, in which 16 bits name eight weights of a lattice.

    It is QuIP# (Tseng, 2024; Cornell-RelaxML/quip-sharp): eight bits choose absolute values, seven are signs and the eighth sign
    keeps the sum even, the last bit shifts all by a quarter; inputs and outputs are turned by signs and a fast Hadamard transform.
    """
    b, t, n, h, groups, d, wide, depth, words = pick(
        size,
        (4, 1024, 2048, 32, 8, 64, 8192, 3, 128256),
        (2, 512, 512, 8, 2, 64, 2048, 3, 16001),
        (1, 4, 8, 2, 1, 4, 16, 3, 11),
    )
    dtype = half(size)

    def hadamard(x):
        """This adds and subtracts pairs of the last axis, at all distances that are powers of two."""
        many, step = x.shape[-1], 1
        x = x.astype(jnp.float32)
        while step < many:
            pairs = x.reshape(*x.shape[:-1], many // (2 * step), 2, step)
            one, two = pairs[..., 0, :], pairs[..., 1, :]
            x = jnp.stack([one + two, one - two], axis=-2).reshape(x.shape)
            step = 2 * step
        return x * many**-0.5

    def decoded(codes, book):
        """This makes weights [outputs, inputs] of codes [outputs, inputs / 8] and absolute values [256, 8]."""
        codes = codes.astype(jnp.int32)
        size_of = book[codes >> 8].astype(jnp.float32) + 0.5
        odd = jnp.sum(book[codes >> 8], axis=-1) & 1
        minus = (codes[..., None] >> (1 + jnp.arange(7))) & 1
        last = (jnp.sum(minus, axis=-1) + odd) & 1
        minus = jnp.concatenate([minus, last[..., None]], axis=-1)
        shift = jnp.where(codes & 1, 0.25, -0.25)
        weights = jnp.where(minus, -size_of, size_of) + shift[..., None]
        return weights.reshape(codes.shape[0], -1).astype(dtype)

    def run(p, keys, values, word, at):
        """This gives logarithms of chances of the next word, and the new keys and values."""
        seen = jnp.arange(t) <= at

        def linear(x, q):
            """This multiplies rows by quantised weights between two turns."""
            x = hadamard(x * q["inward"]).astype(dtype)
            y = jnp.matmul(x, decoded(q["codes"], p["book"]).T, preferred_element_type=jnp.float32)
            return (hadamard(y) * q["scale"] * q["outward"]).astype(dtype)

        def layer(x, carried):
            """This reads one word [b, n]."""
            q, keys, values = carried
            y = rms_norm(q["norm1"], x)
            query = linear(y, q["query"]).reshape(b, 1, h, d)
            key, value = (linear(y, q[name]).reshape(b, 1, groups, d) for name in ("key", "value"))
            place = jnp.full((b, 1), at)
            query, key = rotary(query, place), rotary(key, place)
            keys = lax.dynamic_update_slice_in_dim(keys, key, at, axis=1)
            values = lax.dynamic_update_slice_in_dim(values, value, at, axis=1)
            out = attention(query, *(jnp.repeat(z, h // groups, axis=2) for z in (keys, values)), seen)
            x = x + linear(out.reshape(b, h * d), q["out"])
            y = rms_norm(q["norm2"], x)
            x = x + linear(jax.nn.silu(linear(y, q["gate"])) * linear(y, q["up"]), q["down"])
            return x, (key[:, 0], value[:, 0])

        x, fresh = lax.scan(layer, p["table"][word], (p["layers"], keys, values))
        scores = jnp.matmul(rms_norm(p["norm"], x), p["table"].T, preferred_element_type=jnp.float32)
        return jax.nn.log_softmax(scores * n**-0.5, axis=-1), fresh

    def weights(i, o):
        """This describes codes, signs that are nearly one in size, and the scale of a matrix."""
        return {
            "codes": Random((depth, o, i // 8), jnp.dtype(jnp.uint16), below=2**16),
            "inward": normal(depth, i, dtype=dtype, scale=0.1, offset=1.0),
            "outward": normal(depth, o, dtype=dtype, scale=0.1, offset=-1.0),
            "scale": normal(depth, scale=0.02 * i**-0.5, offset=0.6 * i**-0.5),
        }

    shapes = {"query": (n, h * d), "key": (n, groups * d), "value": (n, groups * d), "out": (h * d, n)}
    shapes |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    layers = stack_of(depth, dtype, norm1=(n,), norm2=(n,)) | {k: weights(*v) for k, v in shapes.items()}
    ends = ends_of(words, n, dtype)
    p = {"table": ends["table"], "norm": ends["norm"], "book": integers(256, 8, below=3), "layers": layers}
    cache = normal(depth, b, t, groups, d, dtype=dtype)
    return Built(run, (p, cache, cache, integers(b, below=words), integers(below=t)))


@program("delta-product-two-reflections-per-word-forgetting-chunks-prefill", GROUP)
def _reflections(size: Size) -> Built:
    """This program reads a text into states that each word changes by a product of two reflections and a gate that forgets.

    It is Gated DeltaProduct (Siems, 2025; automl/DeltaProduct) in chunks: words are doubled, strengths reach to two so that a step
    may turn a direction round, steps of a chunk are joined by a triangular solve, and short filters come before.
    """
    b, t, chunk, n, h, d, wide, depth, words = pick(
        size,
        (2, 2048, 64, 1024, 8, 128, 2816, 2, 32000),
        (1, 320, 32, 128, 4, 32, 352, 2, 4001),
        (1, 6, 4, 8, 2, 4, 12, 2, 11),
    )
    dtype, twice = half(size), 2
    chunks = twice * t // chunk

    def filtered(x, taps):
        """This mixes each word with the three before, channel by channel."""
        padded = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
        return jax.nn.silu(sum(padded[:, k : k + t] * taps[k] for k in range(4)))

    def unit(x):
        """This gives vectors length one."""
        return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)

    def split(x):
        """This cuts [b, steps, h, ...] into chunks [b, h, chunks, chunk, ...]."""
        return jnp.moveaxis(x.reshape(b, chunks, chunk, h, *x.shape[3:]), 3, 1)

    def states(query, key, value, strength, forget):
        """This is the recurrence over steps, chunk by chunk, in float32."""
        total = jnp.cumsum(split(forget), axis=-1)
        query, key, value, strength = (split(z) for z in (query, key, value, strength))
        apart = total[..., :, None] - total[..., None, :]
        lower = jnp.tril(jnp.ones((chunk, chunk), bool))
        fade = jnp.exp(jnp.where(lower, apart, -jnp.inf))
        met = strength[..., None] * fade * jnp.einsum("bhcid,bhcjd->bhcij", key, key)
        met = jnp.where(jnp.eye(chunk, dtype=bool), 1.0, met)
        wanted = jnp.concatenate([value, key * jnp.exp(total)[..., None]], axis=-1) * strength[..., None]
        solved = lax.linalg.triangular_solve(met, wanted, left_side=True, lower=True, unit_diagonal=True)
        fresh, known = jnp.split(solved, 2, axis=-1)
        within = fade * jnp.einsum("bhcid,bhcjd->bhcij", query, key)
        rest = jnp.exp(total[..., -1:] - total)

        def one(state, c):
            """This reads one chunk."""
            query, key, fresh, known, within, total, rest = c
            fresh = fresh - known @ state
            out = (query * jnp.exp(total)[..., None]) @ state + within @ fresh
            state = state * jnp.exp(total[..., -1])[..., None, None]
            return state + jnp.einsum("bhid,bhie->bhde", key * rest[..., None], fresh), out

        parts = jax.tree.map(lambda z: jnp.moveaxis(z, 2, 0), (query, key, fresh, known, within, total, rest))
        state, out = lax.scan(one, jnp.zeros((b, h, d, d)), parts)
        return state, jnp.moveaxis(out, 0, 2).reshape(b, h, twice * t, d)[:, :, twice - 1 :: twice]

    def run(p, text):
        """This gives logarithms of chances of the next word, and the states of layers."""

        def layer(x, q):
            """This is one layer of the model."""
            y = rms_norm(q["norm1"], x)
            query = unit(filtered(y @ q["query"], q["taps_q"]).reshape(b, t, h, d).astype(jnp.float32)) * d**-0.5
            key = unit(filtered(y @ q["key"], q["taps_k"]).reshape(b, twice * t, h, d).astype(jnp.float32))
            value = filtered(y @ q["value"], q["taps_v"]).reshape(b, twice * t, h, d).astype(jnp.float32)
            query = jnp.repeat(query, twice, axis=1)
            strength = 2.0 * jax.nn.sigmoid((y @ q["strength"]).astype(jnp.float32)).reshape(b, twice * t, h)
            step = jax.nn.softplus((y @ q["forget"]).astype(jnp.float32) + q["bias"].astype(jnp.float32) - 3.0)
            forget = jnp.stack([-step, jnp.zeros_like(step)], axis=2).reshape(b, twice * t, h)
            state, out = states(query, key, value, strength, forget)
            out = rms_norm(q["norm_out"], out.transpose(0, 2, 1, 3).astype(dtype)).reshape(b, t, h * d)
            x = x + (out * jax.nn.silu(y @ q["open"])) @ q["out"]
            return x + _swiglu(q, rms_norm(q["norm2"], x)), state

        x, kept = lax.scan(layer, p["table"][text], p["layers"])
        scores = rms_norm(p["norm"], x[:, -1]) @ p["head"]
        return jax.nn.log_softmax(scores.astype(jnp.float32)), kept

    layers = {"norm1": (n,), "norm2": (n,), "norm_out": (d,), "bias": (h,), "query": (n, h * d), "open": (n, h * d)}
    layers |= {"key": (n, twice * h * d), "value": (n, twice * h * d), "strength": (n, twice * h), "forget": (n, h)}
    layers |= {"taps_q": (4, h * d), "taps_k": (4, twice * h * d), "taps_v": (4, twice * h * d), "out": (h * d, n)}
    layers |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    p = ends_of(words, n, dtype) | {"layers": stack_of(depth, dtype, **layers)}
    return Built(run, (p, integers(b, t, below=words)))


@program("peer-experts-of-one-neuron-retrieved-by-split-keys-words-grad", GROUP)
def _peer(size: Size) -> Built:
    """This program gives slopes of a language model in which each word asks for a few of very many experts of one neuron.

    It is PEER (He, 2024; lucidrains/PEER-pytorch): queries of several heads meet two sets of half keys, the best sums of both name
    experts whose rows are looked up, their gates go through a softmax, and queries are normed over the batch as in the paper.
    """
    b, t, n, h, side, heads, top, width, words = pick(
        size,
        (2, 512, 768, 12, 192, 8, 16, 128, 32000),
        (2, 96, 160, 5, 48, 4, 8, 32, 4001),
        (1, 4, 8, 2, 4, 2, 2, 4, 11),
    )
    dtype = half(size)

    def looked_up(q, y):
        """This is the layer of tiny experts [tokens, n], and how often each half key is asked."""
        query = (y @ q["query"]).astype(jnp.float32)
        query = (query - jnp.mean(query, axis=0)) * lax.rsqrt(jnp.var(query, axis=0) + 1e-5)
        query = query.reshape(-1, heads, 2, width // 2)
        score, which = lax.top_k(jnp.einsum("thsc,sec->thse", query, q["keys"].astype(jnp.float32)), top)
        both = (score[:, :, 0, :, None] + score[:, :, 1, None]).reshape(-1, heads, top * top)
        index = (which[:, :, 0, :, None] * side + which[:, :, 1, None]).reshape(-1, heads, top * top)
        best, place = lax.top_k(both, top)
        expert = jnp.take_along_axis(index, place, axis=2)
        gate = jax.nn.softmax(best, axis=-1)
        inner = jnp.einsum("tn,thkn->thk", y, q["inward"][expert], preferred_element_type=jnp.float32)
        inner = (jax.nn.gelu(inner) * gate).astype(dtype)
        asked = jnp.zeros(side * side, jnp.int32).at[expert.reshape(-1)].add(1)
        return jnp.einsum("thk,thkn->tn", inner, q["outward"][expert]), asked

    def run(p, text):
        """This gives the loss, slopes of all weights, and the share and evenness of experts that are asked."""
        causal = jnp.tril(jnp.ones((t, t), bool))
        places = jnp.broadcast_to(jnp.arange(t), (b, t))

        def loss(p):
            """This is the mean surprise of words."""
            x = p["table"][text[:, :-1]]
            for q in (p["one"], p["two"]):
                qkv = (rms_norm(q["norm1"][0], x) @ q["qkv"][0]).reshape(b, t, 3, h, n // h)
                query, key, value = (qkv[:, :, k] for k in range(3))
                query, key = rotary(query, places), rotary(key, places)
                x = x + attention(query, key, value, causal).reshape(b, t, n) @ q["out"][0]
                y = rms_norm(q["norm2"][0], x)
                if "up" in q:
                    x = x + jax.nn.gelu(y @ q["up"][0]) @ q["down"][0]
                else:
                    found, asked = looked_up(q, y.reshape(b * t, n))
                    x = x + found.reshape(b, t, n)
            logits = (rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32)
            logp = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), text[:, 1:, None], axis=-1)
            return -jnp.mean(logp), asked

        (value, asked), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        share = asked / (b * t * heads * top)
        uneven = jnp.log(side * side) + jnp.sum(share * jnp.log(share + 1e-12))
        return value, slopes, jnp.mean(asked > 0), uneven

    common = {"norm1": (n,), "norm2": (n,), "qkv": (n, 3 * n), "out": (n, n)}
    one = stack_of(1, dtype, **common, up=(n, 4 * n), down=(4 * n, n))
    two = stack_of(1, dtype, **common) | {"query": normal(n, heads * width, dtype=dtype, scale=n**-0.5)}
    two |= {"keys": normal(2, side, width // 2, dtype=dtype, scale=(width // 2) ** -0.5)}
    two |= {"inward": normal(side * side, n, dtype=dtype, scale=n**-0.5)}
    two |= {"outward": normal(side * side, n, dtype=dtype, scale=heads**-0.5)}
    p = ends_of(words, n, dtype) | {"one": one, "two": two}
    return Built(run, (p, integers(b, t + 1, below=words)))
