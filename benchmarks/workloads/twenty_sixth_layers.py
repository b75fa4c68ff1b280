"""Unusual layers of language models, drawing and decoding, the twenty-sixth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, gain, half, integers, normal, pick, program, weight
from benchmarks.workloads.twenty_fifth_parts import attention, dense, dense_of, layer_norm, norm_of, rms_norm, rotary

GROUP = "twenty-sixth"


@program("bytes-cut-where-neighbours-differ-then-averaged-back-grad", GROUP)
def _cut_bytes(size: Size) -> Built:
    """This gives the gradients of a model of bytes that learns where to cut them and lets wide layers see one state per piece.

    It is H-Net (Hwang, 2025; goombalab/hnet): a byte begins a piece where it points elsewhere than the one before it, states of
    pieces are averaged by how sure the cuts are, and a loss holds the number of pieces.
    """
    b, t, pieces, n, wide, h = pick(size, (4, 1531, 640, 512, 1024, 8), (1, 197, 131, 64, 128, 4), (2, 11, 7, 8, 12, 2))
    dtype, depth, aim = half(size), 2, 3.0

    def layer(q, x, mask):
        places = jnp.arange(x.shape[1])
        y = rms_norm(q["norm1"], x)
        query, key, value = jnp.split((y @ q["qkv"]).reshape(*x.shape[:2], 3 * h, -1), 3, axis=2)
        y = attention(rotary(query, places), rotary(key, places), value, mask)
        x = x + y.reshape(x.shape) @ q["o"]
        gate, up = jnp.split(rms_norm(q["norm2"], x) @ q["up"], 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ q["down"]

    def unit(x):
        x = x.astype(jnp.float32)
        return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

    def averaged(share, states):
        """This lets each piece be a mix of its own state and the mix before it: y = p x + (1 - p) y."""

        def join(one, two):
            return one[0] * two[0], one[1] * two[0] + two[1]

        return lax.associative_scan(join, (1 - share, share * states), axis=1)[1]

    def loss(p, text):
        x = p["table"][text]
        near = jnp.tril(jnp.ones((t, t), bool)) & ~jnp.tril(jnp.ones((t, t), bool), -64)
        for q in p["enter"]:
            x = layer(q, x, near)
        like = jnp.sum(unit(x[:, 1:] @ p["ask"]) * unit(x[:, :-1] @ p["tell"]), axis=-1)
        chance = jnp.pad(0.5 * (1 - like), ((0, 0), (1, 0)), constant_values=1.0)
        cut = chance >= 0.5
        count = jnp.sum(cut, axis=1)
        order = jnp.argsort(~cut, axis=1, stable=True)[:, :pieces]
        real = jnp.arange(pieces) < count[:, None]
        y = jnp.take_along_axis(x, order[..., None], axis=1) @ p["widen"]
        mask = jnp.tril(jnp.ones((pieces, pieces), bool)) & real[:, None, None]
        for q in p["main"]:
            y = layer(q, y, mask)
        y = (rms_norm(p["norm"], y) @ p["narrow"]).astype(jnp.float32)
        share = jnp.clip(jnp.take_along_axis(chance, order, axis=1), 1e-4, 1 - 1e-4) * real
        y = averaged(share[..., None], jnp.where(real[..., None], y, 0.0))
        at = jnp.clip(jnp.cumsum(cut, axis=1) - 1, 0, pieces - 1)
        sure = jnp.where(cut, chance, 1 - chance)
        sure = sure + lax.stop_gradient(1 - sure)
        back = jnp.take_along_axis(y, at[..., None], axis=1) * sure[..., None]
        x = (x @ p["skip"]).astype(jnp.float32) + back
        x = x.astype(dtype)
        for q in p["leave"]:
            x = layer(q, x, near)
        logits = (rms_norm(p["last"], x) @ p["head"]).astype(jnp.float32)[:, :-1]
        own = jnp.take_along_axis(logits, text[:, 1:, None], axis=-1)[..., 0]
        logp = own - jax.nn.logsumexp(logits, axis=-1)
        kept, believed = jnp.mean(cut.astype(jnp.float32), axis=1), jnp.mean(chance, axis=1)
        held = aim / (aim - 1) * ((aim - 1) * kept * believed + (1 - kept) * (1 - believed))
        value = -jnp.mean(logp) + 0.03 * jnp.mean(held)
        return value, (-jnp.mean(logp, axis=1) / np.log(2), count, kept)

    def weights(c):
        q = {"norm1": gain(c, dtype), "norm2": gain(c, dtype), "qkv": weight(c, 3 * c, dtype=dtype)}
        return q | {
            "o": weight(c, c, dtype=dtype),
            "up": weight(c, 6 * c, dtype=dtype),
            "down": weight(3 * c, c, dtype=dtype),
        }

    p = {
        "table": normal(256, n, dtype=dtype),
        "head": weight(n, 256, dtype=dtype),
        "widen": weight(n, wide, dtype=dtype),
    }
    p |= {"narrow": weight(wide, n, dtype=dtype), "norm": gain(wide, dtype), "last": gain(n, dtype)}
    p |= {k: weight(n, n, dtype=dtype) for k in ("ask", "tell", "skip")}
    p |= {k: [weights(c) for _ in range(depth)] for k, c in (("enter", n), ("main", wide), ("leave", n))}
    return Built(jax.value_and_grad(loss, has_aux=True), (p, integers(b, t, below=256)))


@program("layers-left-early-once-the-best-word-stands-out-decode", GROUP)
def _left_early(size: Size) -> Built:
    """This takes one step of one answer and leaves the layers as soon as the best word is far enough ahead of the second.

    It is CALM (Schuster, 2022), whose code is in google-research/t5x (contrib/calm): layers are stacked and looped over, and the
    layers that are skipped still get keys and values from the state that was left.
    """
    n, h, few, d, wide, seen, words, depth = pick(
        size,
        (2048, 16, 4, 128, 5632, 1201, 32003, 10),
        (384, 6, 2, 64, 1024, 301, 8009, 10),
        (16, 4, 2, 4, 24, 7, 13, 10),
    )
    dtype, prompt = half(size), 3

    def one_of(tree, k):
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, k, keepdims=False), tree)

    def remembered(q, x, caches, k, count):
        """This puts the key and the value of a state into the caches of a layer."""
        y = rms_norm(q["norm1"], x)
        key = rotary((y @ q["k"]).reshape(1, few, d), count[None])
        value = (y @ q["v"]).reshape(1, few, d)
        keys = lax.dynamic_update_slice(caches[0], key[None], (k, count, 0, 0))
        return keys, lax.dynamic_update_slice(caches[1], value[None], (k, count, 0, 0))

    def layer(q, x, caches, k, count):
        caches = remembered(q, x, caches, k, count)
        query = rotary((rms_norm(q["norm1"], x) @ q["q"]).reshape(1, h, d), count[None]).reshape(few, h // few, d)
        keys, values = (lax.dynamic_index_in_dim(c, k, keepdims=False) for c in caches)
        scores = jnp.einsum("kgd,lkd->kgl", query, keys, preferred_element_type=jnp.float32) * d**-0.5
        scores = jnp.where(jnp.arange(seen) <= count, scores, -1e9)
        y = jnp.einsum("kgl,lkd->kgd", jax.nn.softmax(scores, axis=-1).astype(dtype), values)
        x = x + y.reshape(h * d) @ q["o"]
        gate, up = jnp.split(rms_norm(q["norm2"], x) @ q["up"], 2)
        return x + (jax.nn.silu(gate) * up) @ q["down"], caches

    def step(p, now, count, caches, rate):
        bar = 0.3 + 0.3 * jax.nn.sigmoid(rate) + 0.1 * jnp.exp(-4.0 * (count - prompt) / seen)

        def told(x):
            probs = jax.nn.softmax((rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32))
            best, at = lax.top_k(probs, 2)
            return best[0] - best[1], at[0], probs[at[0]]

        def going(carry):
            k, _, _, (ahead, _, _), _ = carry
            return (k < depth) & (ahead < bar)

        def deeper(carry):
            k, x, caches, _, gaps = carry
            x, caches = layer(one_of(p["layers"], k), x, caches, k, count)
            now = told(x)
            return k + 1, x, caches, now, gaps.at[k].set(now[0])

        def skipped(k, caches):
            return remembered(one_of(p["layers"], k), x, caches, k, count)

        first = (jnp.float32(0.0), jnp.int32(0), jnp.float32(0.0))
        used, x, caches, (_, word, sure), gaps = lax.while_loop(
            going, deeper, (0, p["table"][now], caches, first, jnp.zeros(depth))
        )
        caches = lax.fori_loop(used, depth, skipped, caches)
        return word, sure, used, gaps, x, caches

    def stacked(i, o):
        return normal(depth, i, o, dtype=dtype, scale=i**-0.5)

    p = {
        "table": normal(words, n, dtype=dtype),
        "head": normal(n, words, dtype=dtype, scale=4 * n**-0.5),
        "norm": gain(n, dtype),
    }
    q = {k: normal(depth, n, dtype=dtype, scale=0.1, offset=1.0) for k in ("norm1", "norm2")}
    q |= {"q": stacked(n, h * d), "k": stacked(n, few * d), "v": stacked(n, few * d), "o": stacked(h * d, n)}
    p["layers"] = q | {"up": stacked(n, 2 * wide), "down": stacked(wide, n)}
    caches = tuple(normal(depth, seen, few, d, dtype=dtype) for _ in range(2))
    return Built(step, (p, integers(below=words), integers(below=seen), caches, normal()))


@program("thirty-tournaments-mark-drawn-words-and-texts-are-scored", GROUP)
def _tournaments(size: Size) -> Built:
    """This draws words that carry a hidden mark, and scores texts for carrying it.

    It is SynthID-Text (Dathathri, 2024; google-deepmind/synthid-text, whose detector is written in JAX): each of thirty rounds
    moves chances towards words whose hash of the last words is one; texts get weighted means of their hashes.
    """
    b, words, best, texts, t = pick(size, (96, 128256, 200, 128, 1021), (16, 32003, 100, 24, 401), (2, 23, 7, 3, 13))
    rounds, run = 30, 5
    level = np.linspace(10, 1, rounds, dtype=np.float32)
    level = level / level.sum()

    def hashed(state, value):
        return (state * jnp.uint32(1664525) + value.astype(jnp.uint32) + jnp.uint32(1013904223)) ^ (state >> 15)

    def bits(states, keys):
        """This gives a bit for each round and each hash."""
        mixed = hashed(states[..., None], keys)
        mixed = hashed(mixed, mixed >> 7)
        return ((mixed >> 28) & 1).astype(jnp.float32)

    def of_runs(past):
        state = jnp.zeros(past.shape[:-1], jnp.uint32) + jnp.uint32(7)
        for k in range(past.shape[-1]):
            state = hashed(state, past[..., k])
        return state

    def drawn(logits, past, keys, heat, seed):
        scores, at = lax.top_k(logits / (0.6 + jax.nn.sigmoid(heat))[:, None], best)
        probs = jax.nn.softmax(scores, axis=-1)
        marks = bits(hashed(of_runs(past)[:, None], at), keys)

        def play(probs, mark):
            won = jnp.sum(mark * probs, axis=-1, keepdims=True)
            return probs * (1 + mark - won), won[:, 0]

        after, won = lax.scan(play, probs, jnp.moveaxis(marks, -1, 0))
        noise = jax.random.gumbel(jax.random.key(seed), after.shape)
        one = jnp.argmax(jnp.log(after + 1e-20) + noise, axis=-1)[:, None]
        word, chance = jnp.take_along_axis(at, one, axis=1)[:, 0], jnp.take_along_axis(after, one, axis=1)[:, 0]
        moved = 0.5 * jnp.sum(jnp.abs(after - probs), axis=-1)
        return word, chance, won, moved

    def scored(text, length, keys):
        """This scores texts: runs of words that were seen before, and words after the end, do not count."""
        windows = jnp.stack([text[:, k : t - run + 1 + k] for k in range(run)], axis=-1)
        context = of_runs(windows[..., :-1])
        marks = bits(hashed(context, windows[..., -1]), keys)
        same = context[:, :, None] == context[:, None, :]
        first = ~jnp.any(same & jnp.tril(jnp.ones((t - run + 1, t - run + 1), bool), -1), axis=-1)
        inside = first & (jnp.arange(t - run + 1) < length[:, None])
        count = jnp.maximum(jnp.sum(inside, axis=1), 1).astype(jnp.float32)
        per_round = jnp.sum(marks * inside[..., None], axis=1) / count[:, None]
        mean = jnp.sum(per_round * level, axis=-1)
        z = (mean - 0.5) / jnp.sqrt(0.25 * np.sum(level**2) / count)
        return mean, z, jax.scipy.stats.norm.sf(z), count

    def step(logits, past, keys, heat, text, length, seed):
        return drawn(logits.astype(jnp.float32), past, keys, heat, seed), scored(text, length, keys)

    inputs = (normal(b, words, dtype=half(size), scale=3.0), integers(b, run - 1, below=words))
    inputs += (integers(rounds, below=2**31 - 1), normal(b))
    return Built(step, (*inputs, integers(texts, t, below=words), integers(texts, below=t), integers(below=1000)))


@program("moving-averages-of-many-rates-before-one-gated-head-in-chunks", GROUP)
def _moving(size: Size) -> Built:
    """This classes long texts with layers whose queries and keys come from damped moving averages of many rates.

    It is Mega (Ma, 2023; facebookresearch/mega, with ports to flax): averages are convolutions by Fourier transforms, a single head
    attends within chunks by a squashed bell instead of a softmax, and gates choose between old and new.
    """
    b, chunks, m, n, z, wide, rates, classes = pick(
        size, (8, 31, 131, 512, 128, 1024, 16, 10), (1, 11, 61, 64, 32, 128, 16, 10), (2, 2, 5, 8, 4, 12, 3, 3)
    )
    dtype, depth, t = half(size), 3, chunks * m
    middle, spread = float(np.sqrt(0.5)), float(np.sqrt(0.25 * np.pi))

    def averaged(q, x):
        """This convolves each channel, forwards and backwards, with a sum of fading averages."""
        share = jax.nn.sigmoid(q["share"])
        fade = jnp.log1p(-share * jax.nn.sigmoid(q["damp"]))
        kernel = jnp.exp(fade[..., None] * jnp.arange(t))
        kernel = jnp.einsum("sck,sckt->sct", share * q["in"] * q["out"] * rates**-0.5, kernel)
        both = jnp.pad(kernel[0], ((0, 0), (0, t))) + jnp.pad(kernel[1, :, :0:-1], ((0, 0), (t + 1, 0)))
        y = jnp.swapaxes(x.astype(jnp.float32), 1, 2)
        tones = jnp.fft.rfft(jnp.concatenate([jnp.pad(y, ((0, 0), (0, 0), (0, t))), both[None]]))
        y = jnp.fft.irfft(tones[:-1] * tones[-1], n=2 * t)[..., :t]
        return jax.nn.silu(jnp.swapaxes(y, 1, 2) + x.astype(jnp.float32) * q["direct"]).astype(dtype)

    def block(q, x, real):
        normed = layer_norm(q["norm1"], x) * real
        y = averaged(q, normed)
        value = jax.nn.silu(dense(q["value"], normed))
        change, shared, reset, fresh = jnp.split(dense(q["all"], y), [n, n + z, n + z + wide], axis=-1)
        change, shared, reset = jax.nn.sigmoid(change), jax.nn.silu(shared), jax.nn.silu(reset)
        turned = shared[:, :, None] * q["gain"] + q["bias"]
        query, key = turned[:, :, 0].reshape(b, chunks, m, z), turned[:, :, 1].reshape(b, chunks, m, z)
        alive = real.reshape(b, chunks, 1, m).astype(jnp.float32)
        scores = jnp.einsum("bcqz,bckz->bcqk", query, key, preferred_element_type=jnp.float32)
        scores = scores / jnp.maximum(jnp.sum(alive, axis=-1, keepdims=True), 1.0)
        gaps = np.arange(m)[:, None] - np.arange(m) + m - 1
        scores = scores + q["places"][gaps]
        probs = 0.5 * (1 + lax.erf((scores - middle) / (spread * np.sqrt(2)))) * alive
        y = jnp.einsum("bcqk,bckv->bcqv", probs.astype(dtype), value.reshape(b, chunks, m, wide))
        fresh = jax.nn.silu(fresh + (y.reshape(b, t, wide) * reset) @ q["down"])
        x = x + change * (fresh - x)
        y = jax.nn.silu(dense(q["feed1"], layer_norm(q["norm2"], x)))
        return x + dense(q["feed2"], y)

    def model(p, text, length):
        real = (jnp.arange(t) < length[:, None])[..., None].astype(dtype)
        x = p["table"][text] * real
        for q in p["layers"]:
            x = block(q, x, real)
        x = layer_norm(p["norm"], x).astype(jnp.float32) * real
        x = jnp.sum(x, axis=1) / jnp.maximum(length, 1)[:, None].astype(jnp.float32)
        x = jax.nn.silu(dense(p["mix"], x))
        return jax.nn.log_softmax(dense(p["head"], x), axis=-1), x

    def layer():
        q = {"norm1": norm_of(n, dtype), "norm2": norm_of(n, dtype), "value": dense_of(n, wide, dtype)}
        q |= {"all": dense_of(n, 2 * n + z + wide, dtype), "down": weight(wide, n, dtype=dtype)}
        q |= {k: normal(2, n, rates) for k in ("in", "out")} | {k: normal(2, n, rates) for k in ("share", "damp")}
        q |= {"direct": normal(n), "gain": normal(2, z, dtype=dtype, offset=1.0, scale=0.1)}
        q |= {"bias": normal(2, z, dtype=dtype, scale=0.1), "places": normal(2 * m - 1, scale=0.1)}
        return q | {"feed1": dense_of(n, 2 * n, dtype), "feed2": dense_of(2 * n, n, dtype)}

    p = {"table": normal(256, n, dtype=dtype), "layers": [layer() for _ in range(depth)], "norm": norm_of(n, dtype)}
    p |= {"mix": dense_of(n, 2 * n), "head": dense_of(2 * n, classes)}
    return Built(model, (p, integers(b, t, below=256), integers(b, below=t)))


@program("heads-that-learn-how-many-words-get-exactly-nothing", GROUP)
def _exactly_nothing(size: Size) -> Built:
    """This encodes sentences with heads that each learn how sparse their attention is: most words get exactly nothing.

    It is the adaptively sparse transformer (Correia, 2019; deep-spin/entmax, with ports to JAX): the threshold of every row is
    found by halving an interval thirty times, and pictures of sparsity are reported per head.
    """
    b, t, n, h, wide, words = pick(
        size, (16, 257, 512, 8, 2048, 32003), (2, 77, 128, 8, 512, 5003), (2, 7, 8, 2, 12, 13)
    )
    dtype, depth, halvings, d = half(size), 3, 30, n // h

    def sparse(scores, power):
        """This maps scores [b, h, q, k] to shares by the power of each head, 1 < power < 2: p = max((a-1) s - tau, 0)^(1/(a-1))."""
        rest = power[:, None, None] - 1
        scaled = scores * rest
        low = jnp.max(scaled, axis=-1, keepdims=True) - 1
        gap = 1 - (1.0 / t) ** rest

        def shares(tau):
            over = jnp.maximum(scaled - tau, 0.0)
            return jnp.where(over > 0, jnp.maximum(over, 1e-30) ** (1 / rest), 0.0)

        def halve(carry, _):
            low, gap = carry
            gap = 0.5 * gap
            middle = low + gap
            low = jnp.where(jnp.sum(shares(middle), axis=-1, keepdims=True) >= 1, middle, low)
            return (low, gap), None

        (low, _), _ = lax.scan(halve, (low, jnp.broadcast_to(gap, low.shape)), None, length=halvings)
        probs = shares(low)
        return probs / jnp.sum(probs, axis=-1, keepdims=True)

    def block(q, x, real):
        y = dense(q["qkv"], layer_norm(q["norm1"], x)).reshape(b, t, 3, h, d)
        scores = jnp.einsum("bqhd,bkhd->bhqk", y[:, :, 0], y[:, :, 1], preferred_element_type=jnp.float32) * d**-0.5
        probs = sparse(jnp.where(real[:, None, None], scores, -1e4), 1.02 + 0.96 * jax.nn.sigmoid(q["power"]))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", probs.astype(dtype), y[:, :, 2])
        x = x + dense(q["o"], mixed.reshape(x.shape))
        x = x + dense(q["down"], jax.nn.relu(dense(q["up"], layer_norm(q["norm2"], x))))
        kept = jnp.sum((probs > 0) & real[:, None, :, None], axis=(0, 2, 3)) / jnp.sum(real)
        mean = jnp.mean(probs, axis=1, keepdims=True)
        alone = jnp.mean(jnp.sum(jax.scipy.special.entr(probs), axis=-1), axis=1, keepdims=True)
        unlike = jnp.mean(jnp.sum(jax.scipy.special.entr(mean), axis=-1) - alone)
        return x, (kept, unlike)

    def model(p, text, length):
        real = jnp.arange(t) <= length[:, None]
        x, told = p["table"][text] + p["places"], []
        for q in p["layers"]:
            x, more = block(q, x, real)
            told.append(more)
        x = layer_norm(p["norm"], x)
        x = jnp.where(real[..., None], x, 0)
        top = jnp.max(jnp.where(real[..., None], x, -jnp.inf), axis=1)
        return x, top, jnp.stack([kept for kept, _ in told]), jnp.stack([unlike for _, unlike in told])

    def layer():
        q = {
            "norm1": norm_of(n, dtype),
            "norm2": norm_of(n, dtype),
            "qkv": dense_of(n, 3 * n, dtype),
            "power": normal(h),
        }
        return q | {"o": dense_of(n, n, dtype), "up": dense_of(n, wide, dtype), "down": dense_of(wide, n, dtype)}

    p = {
        "table": normal(words, n, dtype=dtype),
        "places": normal(t, n, dtype=dtype, scale=0.3),
        "norm": norm_of(n, dtype),
    }
    p["layers"] = [layer() for _ in range(depth)]
    return Built(model, (p, integers(b, t, below=words), integers(b, below=t)))
