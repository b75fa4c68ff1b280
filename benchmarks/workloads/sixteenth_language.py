"""Models of language and ways to decode them, as users write them: the sixteenth set, by an author who saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import linen_program, module_weights
from benchmarks.workloads.registry import Built, Size, gain, half, integers, normal, pick, program, weight

GROUP = "sixteenth"


def rms(x, scale):
    """This function divides rows by their root mean square and multiplies them by a scale."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * scale


def rotate(x, places, base=10000.0):
    """This function turns the two halves of each head's vector ([..., places, heads, width]) by rotary angles."""
    d = x.shape[-1]
    angle = places[..., None].astype(jnp.float32) * base ** (-jnp.arange(0, d, 2) / d)
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@program("bytes-in-patches-global-and-local-model-linen", GROUP)
def _patches(size: Size) -> Built:
    """This gives the log-likelihood of bytes by a model of patches and a smaller one of the bytes in a patch."""
    import flax.linen as nn

    b, patches, p, n, m, h = pick(size, (4, 192, 8, 1000, 360, 10), (2, 60, 8, 240, 120, 10), (2, 5, 4, 24, 8, 2))
    dtype = half(size)

    class Block(nn.Module):
        heads: int

        @nn.compact
        def __call__(self, x):
            *_, length, width = x.shape
            y = nn.RMSNorm(dtype=dtype)(x)
            qkv = nn.DenseGeneral((3, self.heads, width // self.heads), use_bias=False, dtype=dtype)(y)
            q, k, v = (qkv[..., i, :, :] for i in range(3))
            q, k = rotate(q, jnp.arange(length)), rotate(k, jnp.arange(length))
            scores = jnp.einsum("...qhd,...khd->...hqk", q, k).astype(jnp.float32) * (width // self.heads) ** -0.5
            visible = jnp.arange(length)[:, None] >= jnp.arange(length)
            probs = nn.softmax(jnp.where(visible, scores, jnp.finfo(jnp.float32).min)).astype(dtype)
            y = jnp.einsum("...hqk,...khd->...qhd", probs, v)
            x = x + nn.DenseGeneral(width, axis=(-2, -1), use_bias=False, dtype=dtype)(y)
            y = nn.RMSNorm(dtype=dtype)(x)
            return x + nn.Dense(width, dtype=dtype)(nn.gelu(nn.Dense(4 * width, dtype=dtype)(y)))

    class Megabyte(nn.Module):
        @nn.compact
        def __call__(self, text):
            whole = nn.Embed(256, n // p, dtype=dtype)(text.reshape(b, patches, p)).reshape(b, patches, n // p * p)
            start = self.param("start", nn.initializers.normal(0.02), (n // p * p,)).astype(dtype)
            x = jnp.concatenate([jnp.broadcast_to(start, (b, 1, start.size)), whole[:, :-1]], axis=1)
            for _ in range(3):
                x = Block(h)(x)
            x = nn.Dense(m, use_bias=False, dtype=dtype)(nn.RMSNorm(dtype=dtype)(x).reshape(b, patches, p, -1))
            local = nn.Embed(257, m, dtype=dtype)
            before = jnp.pad(text.reshape(b, patches, p)[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=256)
            x = x + local(before)
            for _ in range(2):
                x = Block(4)(x)
            logits = nn.Dense(256, dtype=dtype)(nn.RMSNorm(dtype=dtype)(x)).astype(jnp.float32)
            chosen = jnp.take_along_axis(logits, text.reshape(b, patches, p, 1), axis=-1)[..., 0]
            log_probs = chosen - jax.nn.logsumexp(logits, axis=-1)
            return log_probs, -jnp.mean(log_probs, axis=(1, 2)) / np.log(2.0)

    return linen_program(size, Megabyte(), integers(b, patches * p, below=256))


@program("heavy-hitter-cache-eviction-decode", GROUP)
def _heavy(size: Size) -> Built:
    """This gives the scores of a few words read one by one by a model whose full caches drop the least attended key.

    Each head sums the attention that its keys got; recent keys are safe, and the new key takes the dropped key's slot.
    """
    b, layers, n, h, slots, recent, words, rounds = pick(
        size, (24, 2, 1024, 16, 600, 120, 32000, 6), (8, 2, 256, 8, 200, 40, 4000, 6), (2, 2, 16, 2, 9, 3, 30, 3)
    )
    dtype, d = half(size), n // h

    def attend(p, x, cache, now):
        q = rotate((x @ p["q"]).reshape(b, h, d), jnp.full((b,), now))
        k = rotate((x @ p["k"]).reshape(b, h, d), jnp.full((b,), now))
        v = (x @ p["v"]).reshape(b, h, d)
        age = now - cache["born"]
        weakest = jnp.argmin(jnp.where(age > recent, cache["mass"], jnp.inf), axis=-1)
        rows, heads = jnp.arange(b)[:, None], jnp.arange(h)[None]
        keys, values = cache["k"].at[rows, heads, weakest].set(k), cache["v"].at[rows, heads, weakest].set(v)
        born = cache["born"].at[rows, heads, weakest].set(now)
        mass = cache["mass"].at[rows, heads, weakest].set(0.0)
        scores = jnp.einsum("bhd,bhsd->bhs", q, keys, preferred_element_type=jnp.float32) * d**-0.5
        probs = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("bhs,bhsd->bhd", probs.astype(dtype), values).reshape(b, n) @ p["o"]
        return out, {"k": keys, "v": values, "born": born, "mass": mass + probs}

    def decode(layer_params, table, last, text, caches):
        def step(caches, inputs):
            now, word, later = inputs
            x, new = table[word], []
            for p, cache in zip(layer_params, caches, strict=True):
                y, changed = attend(p, rms(x, p["norm1"]), cache, now)
                x = x + y
                new.append(changed)
                gate, up = jnp.split(rms(x, p["norm2"]) @ p["up"], 2, axis=-1)
                x = x + (jax.nn.silu(gate) * up) @ p["down"]
            logits = jnp.einsum("bn,wn->bw", rms(x, last), table, preferred_element_type=jnp.float32)
            log_probs = jax.nn.log_softmax(logits, axis=-1)
            scores = jnp.take_along_axis(log_probs, later[:, None], axis=-1)[:, 0]
            return new, (scores, jnp.max(log_probs, axis=-1))

        caches = [c | {"mass": jnp.abs(c["mass"])} for c in caches]
        inputs = (2 * slots + jnp.arange(rounds), text[:-1], text[1:])
        caches, scores = lax.scan(step, caches, inputs)
        return scores, [c["mass"] for c in caches]

    def params():
        p = {name: weight(n, n, dtype=dtype) for name in "qkvo"}
        p |= {"up": weight(n, 6 * n, dtype=dtype), "down": weight(3 * n, n, dtype=dtype)}
        return p | {"norm1": gain(n, dtype), "norm2": gain(n, dtype)}

    def cache():
        kv = {name: normal(b, h, slots, d, dtype=dtype) for name in "kv"}
        return kv | {"born": integers(b, h, slots, below=2 * slots), "mass": normal(b, h, slots, scale=30.0)}

    table = normal(words, n, dtype=dtype, scale=n**-0.5)
    model = ([params() for _ in range(layers)], table, gain(n, dtype))
    return Built(decode, (*model, integers(rounds + 1, b, below=words), [cache() for _ in range(layers)]))


@program("prompt-lookup-drafts-verified-in-one-pass", GROUP)
def _lookup(size: Size) -> Built:
    """This gives how many words drafted from an earlier place in the prompt a model keeps, with their scores.

    The draft follows the last place where the three newest words stood before; the model reads it behind its cache.
    """
    b, past, draft, n, h, shared, words = pick(
        size, (16, 1500, 10, 1152, 12, 3, 32000), (8, 600, 10, 384, 6, 2, 3000), (2, 14, 3, 16, 4, 2, 5)
    )
    dtype, d, grams = half(size), n // h, 3

    def find(history, length):
        windows = jnp.stack([jnp.roll(history, -i) for i in range(grams)], axis=-1)
        newest = lax.dynamic_slice(history, (length - grams,), (grams,))
        places = jnp.arange(past)
        fits = jnp.all(windows == newest, axis=-1) & (places < length - grams)
        shorter = jnp.all(windows[:, :1] == newest[-1], axis=-1) & (places < length - 1)
        place = jnp.max(jnp.where(fits, places + grams, -1))
        place = jnp.where(place < 0, jnp.max(jnp.where(shorter, places + 1, 0)), place)
        return lax.dynamic_slice(history, (place,), (draft,)), newest[-1], jnp.any(fits)

    def layer(p, x, cache_k, cache_v, lengths):
        y = rms(x, p["norm1"])
        places = lengths[:, None] - 1 + jnp.arange(draft + 1)
        q = rotate(jnp.einsum("btn,nhd->bthd", y, p["q"]), places).reshape(b, draft + 1, shared, h // shared, d)
        k, v = rotate(jnp.einsum("btn,nhd->bthd", y, p["k"]), places), jnp.einsum("btn,nhd->bthd", y, p["v"])
        keys, values = jnp.concatenate([cache_k, k], axis=1), jnp.concatenate([cache_v, v], axis=1)
        old = jnp.broadcast_to((jnp.arange(past) < lengths[:, None] - 1)[:, None], (b, draft + 1, past))
        new = jnp.broadcast_to(jnp.tri(draft + 1, dtype=bool), (b, draft + 1, draft + 1))
        visible = jnp.concatenate([old, new], axis=-1)[:, None, None]
        scores = jnp.einsum("btgrd,bsgd->bgrts", q, keys).astype(jnp.float32) * d**-0.5
        probs = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1).astype(dtype)
        y = jnp.einsum("bgrts,bsgd->btgrd", probs, values).reshape(b, draft + 1, n)
        x = x + y @ p["o"]
        y = rms(x, p["norm2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    def verify(layers, table, head, last, history, caches):
        lengths = past - draft - (jnp.sum(history, axis=1) % (past // 4))
        drafted, newest, found = jax.vmap(find)(history, lengths)
        x = table[jnp.concatenate([newest[:, None], drafted], axis=1)]
        for p, (k, v) in zip(layers, caches, strict=True):
            x = layer(p, x, k, v, lengths)
        log_probs = jax.nn.log_softmax((rms(x, last) @ head).astype(jnp.float32), axis=-1)
        scores = jnp.take_along_axis(log_probs[:, :-1], drafted[..., None], axis=-1)[..., 0]
        typical = scores > jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)[:, :-1] - 1.0
        kept = jnp.sum(jnp.cumprod(typical.astype(jnp.int32), axis=1), axis=1)
        return drafted, scores, kept, jnp.max(log_probs, axis=-1), found

    def params():
        p = {"q": normal(n, h, d, dtype=dtype, scale=n**-0.5), "o": weight(n, n, dtype=dtype)}
        p |= {name: normal(n, shared, d, dtype=dtype, scale=n**-0.5) for name in "kv"}
        p |= {name: weight(n, 3 * n, dtype=dtype) for name in ("gate", "up")}
        return p | {"down": weight(3 * n, n, dtype=dtype), "norm1": gain(n, dtype), "norm2": gain(n, dtype)}

    cache = normal(b, past, shared, d, dtype=dtype)
    model = ([params() for _ in range(2)], normal(words, n, dtype=dtype), weight(n, words, dtype=dtype), gain(n, dtype))
    return Built(verify, (*model, integers(b, past, below=min(words, 10)), [(cache, cache) for _ in range(2)]))


@program("nearest-neighbour-words-mixed-into-predictions", GROUP)
def _datastore(size: Size) -> Built:
    """This gives next-word log-probabilities mixed with the words that followed the nearest of many stored contexts."""
    queries, stored, n, words, top = pick(
        size, (512, 60000, 520, 20000, 64), (48, 6000, 200, 3000, 32), (3, 40, 8, 20, 4)
    )
    dtype = half(size)

    def predict(p, hidden, keys, followers):
        inner = rms(hidden, p["norm"])
        y = inner + jax.nn.relu(inner @ p["up"] + p["b"]) @ p["down"]
        logits = (rms(y, p["last"]) @ p["head"]).astype(jnp.float32)
        own = jax.nn.log_softmax(logits, axis=-1)
        norms = jnp.sum(jnp.square(keys.astype(jnp.float32)), axis=-1)
        far = norms[None] - 2.0 * jnp.einsum("qn,kn->qk", inner, keys, preferred_element_type=jnp.float32)
        far = far + jnp.sum(jnp.square(inner.astype(jnp.float32)), axis=-1, keepdims=True)
        near, places = lax.top_k(-far, top)
        shares = jax.nn.softmax(near / 10.0, axis=-1)
        rows = jnp.arange(queries)[:, None]
        votes = jnp.zeros((queries, words), jnp.float32).at[rows, followers[places]].add(shares)
        trust = jax.nn.sigmoid(jnp.concatenate([near[:, :4], jnp.max(own, axis=-1, keepdims=True)], -1) @ p["trust"])
        mixed = jnp.logaddexp(jnp.log(1 - 0.5 * trust) + own, jnp.log(0.5 * trust) + jnp.log(votes + 1e-10))
        return mixed, near, -jnp.sum(jnp.exp(mixed) * mixed, axis=-1)

    p = {"norm": gain(n, dtype), "last": gain(n, dtype), "up": weight(n, 4 * n, dtype=dtype)}
    p |= {"b": normal(4 * n, dtype=dtype, scale=0.1), "down": weight(4 * n, n, dtype=dtype)}
    p |= {"head": weight(n, words, dtype=dtype), "trust": normal(5, 1, scale=0.001)}
    store = (normal(stored, n, dtype=dtype), integers(stored, below=words))
    return Built(predict, (p, normal(queries, n, dtype=dtype), *store))


@program("automaton-constrained-beams-until-ended-haiku", GROUP)
def _beams(size: Size) -> Built:
    """This gives the best sequences of a recurrent decoder by beams that a finite automaton allows, until all end."""
    import haiku as hk

    b, beams, n, words, states, longest, source = pick(
        size, (16, 6, 512, 4000, 40, 24, 90), (16, 5, 232, 1000, 30, 20, 40), (2, 3, 8, 12, 4, 4, 5)
    )
    dtype, end = jnp.float32, 0

    def one(word, hidden, memory, mask):
        x = hk.Embed(words, n, name="words")(word)
        y, hidden = hk.GRU(n, name="cell")(x, hidden)
        scores = jnp.einsum("bkn,bsn->bks", hk.Linear(n, name="query")(y).reshape(b, beams, n), memory)
        scores = jnp.where(mask[:, None], scores.astype(jnp.float32) * n**-0.5, -1e9)
        seen = jnp.einsum("bks,bsn->bkn", jax.nn.softmax(scores).astype(dtype), memory).reshape(b * beams, n)
        y = jnp.tanh(hk.Linear(n, name="join")(jnp.concatenate([y, seen], axis=-1)))
        return jax.nn.log_softmax(hk.Linear(words, name="head")(y).astype(jnp.float32)), hidden

    model = hk.without_apply_rng(hk.transform(one))

    def search(params, memory, lengths, table):
        mask = jnp.arange(source) < 1 + lengths[:, None]
        first = jnp.mean(memory, axis=1)

        def expand(state):
            step, word, hidden, total, place, ended, text = state
            log_probs, hidden = model.apply(params, word.reshape(-1), hidden.reshape(-1, n), memory, mask)
            log_probs = log_probs.reshape(b, beams, words)
            allowed = (table[place] < states) | (jnp.arange(words) == end)
            log_probs = jnp.where(allowed, log_probs, -1e7).at[:, :, end].add(0.3 * step)
            only_end = jnp.where(jnp.arange(words) == end, 0.0, -1e7)
            sums = total[..., None] + jnp.where(ended[..., None], only_end, log_probs)
            total, flat = lax.top_k(sums.reshape(b, -1), beams)
            parent, word = flat // words, flat % words

            def take(x):
                return jnp.take_along_axis(x, parent.reshape(b, beams, *[1] * (x.ndim - 2)), axis=1)

            place = jnp.minimum(table[take(place), word], states - 1)
            text = take(text).at[:, :, step].set(word)
            ended = take(ended) | (word == end)
            return step + 1, word, take(hidden.reshape(b, beams, n)), total, place, ended, text

        def going(state):
            return (state[0] < longest) & ~jnp.all(state[5])

        total = jnp.where(jnp.arange(beams) == 0, 0.0, -1e7) * jnp.ones((b, 1))
        zeros = jnp.zeros((b, beams), jnp.int32)
        hidden = jnp.broadcast_to(first[:, None], (b, beams, n))
        start = (0, zeros, hidden, total, zeros, zeros > 0, jnp.zeros((b, beams, longest), jnp.int32))
        _, _, _, total, _, ended, text = lax.while_loop(going, expand, start)
        length = jnp.sum(text != end, axis=-1) + 1
        scores = total / ((5.0 + length) / 6.0) ** 0.6
        best = jnp.argmax(scores, axis=-1)
        return jnp.take_along_axis(text, best[:, None, None], axis=1)[:, 0], scores, ended

    structs = (
        jax.ShapeDtypeStruct((b * beams,), jnp.int32),
        jax.ShapeDtypeStruct((b * beams, n), dtype),
        jax.ShapeDtypeStruct((b, source, n), dtype),
        jax.ShapeDtypeStruct((b, source), bool),
    )
    params = module_weights(jax.eval_shape(model.init, jax.random.key(0), *structs), dtype)
    memory = normal(b, source, n, dtype=dtype)
    return Built(search, (params, memory, integers(b, below=source), integers(states, words, below=2 * states)))
