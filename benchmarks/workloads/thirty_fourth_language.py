"""Nought shares, solved states, tied keys, melted experts and told answers, the thirty-fourth set: its author saw no plan."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, gain, half, integers, normal, pick, program
from benchmarks.workloads.thirty_first_parts import drawn_with_stack
from benchmarks.workloads.twenty_fifth_parts import rms_norm, rotary
from benchmarks.workloads.twenty_sixth_parts import is_random

GROUP = "thirty-fourth"


def _stack_of(depth, dtype, n, **shapes):
    """This describes matrices of layers, stacked, and the gains of two norms."""
    ones = {"dtype": dtype, "scale": 0.1, "offset": 1.0}
    stack = {name: normal(depth, *s, dtype=dtype, scale=s[-2] ** -0.5) for name, s in shapes.items()}
    return stack | {"norm1": normal(depth, n, **ones), "norm2": normal(depth, n, **ones)}


def _words_of(words, n, dtype):
    """This describes the table of words, the last norm and the last matrix."""
    head = normal(n, words, dtype=dtype, scale=2 * n**-0.5)
    return {"table": normal(words, n, dtype=dtype), "norm": gain(n, dtype), "head": head}


def _fed(q, x):
    """This is the gated half of a layer."""
    one, two = jnp.split(rms_norm(q["norm2"], x) @ q["up"], 2, axis=-1)
    return x + (jax.nn.silu(one) * two) @ q["down"]


def _log_chances(p, x):
    """These are logarithms of chances of words."""
    return jax.nn.log_softmax((rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32), axis=-1)


@program("shares-that-may-be-nought-with-gated-heads-and-part-turned-keys-scored-prompts", GROUP)
def _nought(size: Size) -> Built:
    """This program scores texts with layers whose shares of attention need not add up to one, and may be nothing.

    It is softpick (Zuhri, 2025; zaydzuhri/softpick-attention) in a layer with gates on heads (Qiu, 2025): what is left of
    exponentials above one is divided by how far all of them lie from one, a quarter of each head turns, and keys are shared.
    """
    b, t, n, h, groups, d, depth, words = pick(
        size, (2, 1536, 2048, 16, 4, 128, 3, 32000), (2, 128, 192, 6, 2, 32, 3, 3001), (1, 6, 8, 2, 1, 8, 3, 11)
    )
    dtype, share, part = half(size), h // groups, d // 4

    def softpick(scores, seen):
        """This gives shares over the last axis [..., t], and what they add up to."""
        scores = jnp.where(seen, scores, -1e30)
        top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), 0.0)
        above = jnp.exp(scores - top) - jnp.exp(-top)
        far = jnp.sum(jnp.where(seen, jnp.abs(above), 0.0), axis=-1, keepdims=True)
        shares = jnp.where(seen, jax.nn.relu(above), 0.0) / (far + 1e-6)
        return shares, jnp.sum(shares, axis=-1)

    def run(p, text, short):
        """This gives surprise of words and texts, and how much heads pick in all and at the first word."""
        place = jnp.arange(t)
        real = place < (t - short)[:, None]
        seen = (place <= place[:, None]) & real[:, None]

        def turned(x):
            return jnp.concatenate([rotary(x[..., :part], place[None]), x[..., part:]], axis=-1)

        def layer(x, q):
            y = rms_norm(q["norm1"], x)
            query, key, value = jnp.split((y @ q["qkv"]).reshape(b, t, -1, d), [h, h + groups], axis=2)
            query, key = turned(query).reshape(b, t, groups, share, d), turned(key)
            scores = jnp.einsum("bqgsd,bkgd->bgsqk", query, key, preferred_element_type=jnp.float32) * d**-0.5
            shares, whole = softpick(scores, seen[:, None, None])
            out = jnp.einsum("bgsqk,bkgd->bqgsd", shares.astype(dtype), value).reshape(b, t, h * d)
            x = x + (out * jax.nn.sigmoid(y @ q["gate"])) @ q["out"]
            told = jnp.where(real[:, None, None], whole, 0.0), jnp.where(real[:, None, None], shares[..., 0], 0.0)
            return _fed(q, x), tuple(jnp.sum(z, axis=-1) / jnp.sum(real, axis=-1)[:, None, None] for z in told)

        x, (whole, first) = lax.scan(layer, p["table"][text], p["layers"])
        logp = _log_chances(p, x[:, :-1])
        found = jnp.take_along_axis(logp, text[:, 1:, None], axis=-1)[..., 0]
        miss = jnp.where(real[:, 1:], -found, 0.0)
        return miss, jnp.sum(miss, axis=1) / jnp.sum(real[:, 1:], axis=1), whole, first

    shapes = {
        "qkv": (n, (h + 2 * groups) * d),
        "gate": (n, h * d),
        "out": (h * d, n),
        "up": (n, 6 * n),
        "down": (3 * n, n),
    }
    p = _words_of(words, n, dtype) | {"layers": _stack_of(depth, dtype, n, **shapes)}
    return Built(run, (p, integers(b, t, below=words), integers(b, below=max(1, t // 3))))


@program("states-solved-for-each-query-by-conjugate-steps-decode", GROUP)
def _solved(size: Size) -> Built:
    """This program goes on from prompts with layers that solve a small system of their state for each new word.

    It is MesaNet (von Oswald, 2025; as in fla-org/flash-linear-attention): sums of keys by keys and of values by keys fade by
    gates, a query is put through the inverse of the first sum by conjugate steps, and the answer is read from the second sum.
    """
    b, m, new, n, h, d, depth, words, rounds = pick(
        size,
        (16, 512, 2, 1024, 8, 128, 4, 32000, 10),
        (8, 128, 2, 256, 4, 64, 4, 3001, 10),
        (1, 5, 2, 8, 2, 4, 4, 11, 3),
    )
    dtype, full = half(size), jnp.float32

    def unit(x):
        x = x.astype(full)
        return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

    def solve(state, ridge, query):
        """This gives x with (state + ridge) x = query, for [b, h, d], and how far that is from a plain start."""
        start = query / (jnp.diagonal(state, axis1=-2, axis2=-1) + ridge)

        def times(x):
            return jnp.einsum("bhij,bhj->bhi", state, x) + ridge * x

        def step(_, carry):
            x, left, way, old = carry
            turned = times(way)
            pace = old / (jnp.sum(way * turned, axis=-1, keepdims=True) + 1e-9)
            x, left = x + pace * way, left - pace * turned
            square = jnp.sum(left * left, axis=-1, keepdims=True)
            return x, left, left + square / (old + 1e-9) * way, square

        left = query - times(start)
        square = jnp.sum(left * left, axis=-1, keepdims=True)
        x = lax.fori_loop(0, rounds, step, (start, left, left, square))[0]
        return x, jnp.sqrt(jnp.mean(jnp.square(x - start), axis=-1))

    def layer(x, q, both, cross, window):
        """This reads one word [b, n], and moves both states on."""
        y = rms_norm(q["norm1"], x)
        window = jnp.concatenate([window[:, 1:], (y @ q["qkv"])[:, None]], axis=1)
        mixed = jax.nn.silu(jnp.einsum("bwc,wc->bc", window.astype(full), q["taps"].astype(full)))
        query, key, value = jnp.split(mixed.reshape(b, 3 * h, d), 3, axis=1)
        query, key = unit(query), unit(key)
        keep, write = jnp.split(jax.nn.sigmoid((y @ q["gates"]).astype(full)), 2, axis=-1)
        keep, write = 0.9 + 0.1 * keep[..., None, None], write[..., None, None]
        both = keep * both + write * key[..., :, None] * key[..., None, :]
        cross = keep * cross + write * value[..., :, None] * key[..., None, :]
        ridge = 0.25 + jax.nn.softplus(q["ridge"].astype(full)).reshape(h, d)
        found, moved = solve(both, ridge, query)
        out = jnp.einsum("bhij,bhj->bhi", cross, found)
        out = out * lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + 1e-5)
        out = out.reshape(b, h * d).astype(dtype) * jax.nn.silu(y @ q["gate"])
        return _fed(q, x + out @ q["out"]), (both, cross, window, moved)

    def run(p, keys, values, fade, windows, text):
        """This gives surprise of the next words, doubts, how far solves go, and states at the end."""
        weigh = jnp.exp(jnp.cumsum(-0.02 * jax.nn.softplus(fade.astype(full)), axis=-1)[..., ::-1])[..., None]
        keys = unit(keys)
        both = jnp.einsum("lbhmi,lbhmj->lbhij", keys * weigh, keys)
        cross = jnp.einsum("lbhmi,lbhmj->lbhij", values.astype(full) * weigh, keys)

        def word(carry, now):
            states, x = carry[:3], p["table"][now]
            x, (*states, moved) = lax.scan(lambda x, q: layer(x, *q), x, (p["layers"], *states))
            logp = _log_chances(p, x)
            return tuple(states), (logp, moved)

        states, (logp, moved) = lax.scan(word, (both, cross, windows), text[:, :-1].T)
        found = jnp.take_along_axis(logp, text[:, 1:].T[..., None], axis=-1)[..., 0]
        return found, -jnp.sum(jnp.exp(logp) * logp, axis=-1), moved, states

    shapes = {"qkv": (n, 3 * h * d), "gates": (n, 2 * h), "gate": (n, h * d), "out": (h * d, n), "up": (n, 6 * n)}
    layers = _stack_of(depth, dtype, n, **shapes, down=(3 * n, n), taps=(4, 3 * h * d), ridge=(1, h * d))
    p = _words_of(words, n, dtype) | {"layers": layers}
    past = [normal(depth, b, h, m, d, dtype=dtype) for _ in range(2)]
    inputs = normal(depth, b, h, m), normal(depth, b, 4, 3 * h * d, dtype=dtype), integers(b, new + 1, below=words)
    return Built(run, (p, *past, *inputs))


@program("keys-whose-still-half-is-half-of-the-value-two-drafted-words-ragged-decode", GROUP)
def _tied(size: Size) -> Built:
    """This program checks two drafted words per row with a cache in which keys and values are one and the same.

    It is grouped-tied attention (Zadouri, 2025; Dao-AILab/grouped-latent-attention): a group keeps one state per word, which is
    the value, half of it is the part of the key that does not turn, and one turned half is shared by all heads.
    """
    b, t, n, h, groups, d, depth, words, drafted = pick(
        size,
        (32, 2048, 2048, 16, 4, 128, 3, 32000, 2),
        (12, 768, 256, 8, 2, 32, 3, 4001, 2),
        (2, 7, 8, 2, 1, 8, 3, 11, 2),
    )
    dtype, share, still = half(size), h // groups, d // 2

    def layer(x, q, tied, turning, long):
        """This reads drafted words [b, drafted, n], and writes them behind each row's own end."""
        y, row = rms_norm(q["norm1"], x), jnp.arange(b)[:, None]
        place = long[:, None] + jnp.arange(drafted)
        fresh = rms_norm(q["tie_norm"], (y @ q["tie"]).reshape(b, drafted, groups, d))
        spun = rotary((y @ q["spin"])[:, :, None], place)[:, :, 0]
        tied, turning = tied.at[row, place].set(fresh), turning.at[row, place].set(spun)
        query = (y @ q["query"]).reshape(b, drafted, h, d)
        calm = query[..., :still].reshape(b, drafted, groups, share, still)
        spun_query = rotary(query[..., still:], place).reshape(b, drafted, groups, share, d - still)
        scores = jnp.einsum("bqgsd,bkgd->bgsqk", calm, tied[..., :still], preferred_element_type=jnp.float32)
        scores = scores + jnp.einsum("bqgsd,bkd->bgsqk", spun_query, turning, preferred_element_type=jnp.float32)
        seen = jnp.arange(t) <= place[..., None]
        scores = jnp.where(seen[:, None, None], scores * d**-0.5, -1e9)
        shares = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("bgsqk,bkgd->bqgsd", shares.astype(dtype), tied).reshape(b, drafted, h * d)
        doubt = -jnp.sum(jnp.where(seen[:, None, None], shares * jnp.log(shares + 1e-9), 0.0), axis=-1)
        return _fed(q, x + out @ q["out"]), (fresh, spun, jnp.mean(doubt, axis=(1, 2)))

    def run(p, tied, turning, long, draft, chance):
        """This gives chances that drafts are kept, what words come instead, and what layers would write down."""
        x, (fresh, spun, doubt) = lax.scan(
            lambda x, q: layer(x, *q, long), p["table"][draft], (p["layers"], tied, turning)
        )
        logp, small = _log_chances(p, x), -4.0 - jnp.abs(chance)
        guessed = jnp.take_along_axis(logp[:, :-1], draft[:, 1:, None], axis=-1)[..., 0]
        kept = jnp.exp(jnp.minimum(guessed - small, 0.0))
        best = lax.top_k(logp[:, -1], 4)[0]
        return kept, best, -jnp.sum(jnp.exp(logp) * logp, axis=-1), doubt, fresh, spun

    shapes = {"tie": (n, groups * d), "spin": (n, d - still), "query": (n, h * d), "out": (h * d, n), "up": (n, 6 * n)}
    layers = _stack_of(depth, dtype, n, **shapes, down=(3 * n, n))
    layers["tie_norm"] = normal(depth, d, dtype=dtype, scale=0.1, offset=1.0)
    p = _words_of(words, n, dtype) | {"layers": layers}
    cache = normal(depth, b, t, groups, d, dtype=dtype), normal(depth, b, t, d - still, dtype=dtype)
    inputs = integers(b, below=t - drafted), integers(b, drafted, below=words), normal(b, drafted - 1)
    return Built(run, (p, *cache, *inputs))


@program("experts-melted-into-one-per-stretch-as-the-stretch-before-asks-prefill", GROUP)
def _melted(size: Size) -> Built:
    """This program reads prompts with layers whose experts are melted into one, anew for each stretch of words.

    It is Lory (Zhong, 2024): the mean of the stretch before tells how much of each expert's matrices goes into the one that this
    stretch uses, so no word is sent anywhere; the first stretch asks for itself, and keys and values are kept for decoding.
    """
    b, parts, long, n, h, experts, wide, depth, words = pick(
        size, (4, 4, 256, 1024, 8, 8, 1024, 3, 32000), (2, 4, 48, 160, 5, 6, 192, 3, 4001), (1, 2, 3, 8, 2, 3, 5, 3, 11)
    )
    dtype, t, d = half(size), parts * long, n // h

    def melted(q, y):
        """This gives what the melted expert of each stretch makes of [b, parts, long, n], and shares of experts."""
        mean = jnp.mean(y.astype(jnp.float32), axis=2)
        asks = jnp.concatenate([mean[:, :1], mean[:, :-1]], axis=1)
        shares = jax.nn.softmax(6 * asks @ q["route"].astype(jnp.float32), axis=-1)
        mix = shares.astype(dtype)
        gate, up, down = (jnp.einsum("bse,eij->bsij", mix, q[name]) for name in ("gate", "up", "down"))
        inner = jax.nn.silu(jnp.einsum("bsln,bsnf->bslf", y, gate)) * jnp.einsum("bsln,bsnf->bslf", y, up)
        return jnp.einsum("bslf,bsfn->bsln", inner, down), shares

    def run(p, text):
        """This gives the surprise of words by stretch, the next word's chances, shares of experts, and what is kept."""
        place = jnp.arange(t)
        seen = place <= place[:, None]

        def layer(x, q):
            query, key, value = jnp.split((rms_norm(q["norm1"], x) @ q["qkv"]).reshape(b, t, 3 * h, d), 3, axis=2)
            query, key = rotary(query, place[None]), rotary(key, place[None])
            scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * d**-0.5
            probs = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1).astype(dtype)
            x = x + jnp.einsum("bhqk,bkhd->bqhd", probs, value).reshape(b, t, n) @ q["out"]
            y, shares = melted(q, rms_norm(q["norm2"], x).reshape(b, parts, long, n))
            return x + y.reshape(b, t, n), (key, value, shares)

        x, (keys, values, shares) = lax.scan(layer, p["table"][text], p["layers"])
        logp = _log_chances(p, x)
        found = jnp.take_along_axis(logp[:, :-1], text[:, 1:, None], axis=-1)[..., 0]
        by_part = jnp.mean(jnp.pad(-found, ((0, 0), (1, 0))).reshape(b, parts, long), axis=-1)
        use = jnp.mean(shares, axis=(1, 2))
        return by_part, logp[:, -1], shares, jnp.sum(use * jnp.log(use * experts + 1e-9), axis=-1), keys, values

    many = {"gate": (experts, n, wide), "up": (experts, n, wide), "down": (experts, wide, n)}
    layers = _stack_of(depth, dtype, n, qkv=(n, 3 * n), out=(n, n), route=(n, experts), **many)
    p = _words_of(words, n, dtype) | {"layers": layers}
    return Built(run, (p, integers(b, t, below=words)))


@program("words-read-as-blends-of-what-was-said-and-what-was-likely-loop", GROUP)
def _blended(size: Size) -> Built:
    """This program scores answers behind prompts while each word is read as a blend of itself and of what else was likely.

    It is the mixture of inputs (Zhuang, 2025; EvanZhuang/mixinputs) for given words: the less sure the step before was, the more
    of the likeliest words, weighed by how much likelier they are than the last of them, goes in; caches grow in a loop.
    """
    b, t, new, n, h, groups, d, depth, words, most = pick(
        size,
        (16, 1024, 5, 1536, 12, 3, 128, 4, 32000, 24),
        (4, 384, 4, 256, 8, 2, 32, 4, 6007, 24),
        (1, 5, 2, 8, 2, 1, 4, 4, 13, 3),
    )
    dtype, share, long = half(size), h // groups, t + new

    def run(p, key, value, said, heat):
        """This gives chances of words that were said, blends that were read, doubts, the likeliest chances, and what is kept."""
        heat = (0.6 + 0.2 * jax.nn.sigmoid(heat))[:, None]

        def layer(x, q):
            q, key, value, at = q
            y = (rms_norm(q["norm1"], x) @ q["qkv"]).reshape(b, 1, -1, d)
            query, one, two = jnp.split(y, [h, h + groups], axis=2)
            place = jnp.full((b, 1), at)
            key = lax.dynamic_update_slice(key, rotary(one, place), (0, at, 0, 0))
            value = lax.dynamic_update_slice(value, two, (0, at, 0, 0))
            query = rotary(query, place).reshape(b, groups, share, d)
            scores = jnp.einsum("bgsd,bkgd->bgsk", query, key, preferred_element_type=jnp.float32) * d**-0.5
            probs = jax.nn.softmax(jnp.where(jnp.arange(long) <= at, scores, -1e9), axis=-1).astype(dtype)
            out = jnp.einsum("bgsk,bkgd->bgsd", probs, value).reshape(b, h * d)
            return _fed(q, x + out @ q["out"]), (key, value)

        def think(k, carry):
            x, key, value, founds, blends, doubts, chances = carry
            ats = jnp.full(depth, t + k)
            y, (key, value) = lax.scan(layer, x, (p["layers"], key, value, ats))
            logp = jax.nn.log_softmax(_log_chances(p, y) / heat, axis=-1)
            best, word = lax.top_k(logp, most)
            mix = jnp.exp(best) - jnp.exp(best[:, -1:])
            mix = mix / (jnp.sum(mix, axis=-1, keepdims=True) + 1e-9)
            blend = jnp.einsum("bk,bkn->bn", mix, p["table"][word].astype(jnp.float32))
            doubt = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
            found = jnp.take_along_axis(logp, said[:, k + 1, None], axis=-1)[:, 0]
            share = 0.5 * (doubt / float(np.log(words)))[:, None]
            x = share * blend + (1 - share) * p["table"][said[:, k + 1]].astype(jnp.float32)
            now = (founds, found), (blends, x), (doubts, doubt), (chances, jnp.exp(best))
            return x.astype(dtype), key, value, *(z.at[k].set(one) for z, one in now)

        room = ((0, 0), (0, 0), (0, new), (0, 0), (0, 0))
        start = p["table"][said[:, 0]], jnp.pad(key, room), jnp.pad(value, room)
        told = [jnp.zeros((new, b, *more)) for more in ((), (n,), (), (most,))]
        _, key, value, *told = lax.fori_loop(0, new, think, (*start, *told))
        return told, key[:, :, t:], value[:, :, t:]

    layers = _stack_of(depth, dtype, n, qkv=(n, (h + 2 * groups) * d), out=(h * d, n), up=(n, 6 * n), down=(3 * n, n))
    p = _words_of(words, n, dtype) | {"layers": layers}
    kept = normal(depth, b, t, groups, d, dtype=dtype)
    return Built(run, (p, kept, kept, integers(b, new + 1, below=words), normal(b)))


@program("answers-to-choose-from-told-through-a-cache-beside-a-picture-linen", GROUP)
def _told(size: Size) -> Built:
    """This program tells which of some answers fits a picture and a question, by telling them word by word through a cache.

    It is a decoder as in google-research/big_vision, with linen's own `decode=True` under `nn.scan`: questions are in the cache,
    queries and keys have norms, pictures are attended to in each layer, and answers [batch, answers, words] are scored.
    """
    from flax import linen as nn

    b, answers, t, asked, new, n, h, depth, seen, words = pick(
        size,
        (4, 8, 512, 448, 6, 1024, 16, 4, 196, 32000),
        (2, 4, 96, 64, 4, 192, 6, 4, 36, 4003),
        (1, 2, 6, 3, 2, 8, 2, 4, 3, 11),
    )
    dtype, rows = half(size), b * answers
    how = {"dtype": dtype, "param_dtype": dtype}

    class Layer(nn.Module):
        """This is one layer, which reads one word."""

        @nn.compact
        def __call__(self, x, picture):
            y = nn.LayerNorm(use_bias=False, **how)(x)
            own = nn.MultiHeadDotProductAttention(h, decode=True, normalize_qk=True, use_bias=False, name="own", **how)
            x = x + own(y, y)
            other = nn.MultiHeadDotProductAttention(
                h, normalize_qk=True, force_fp32_for_softmax=True, name="other", **how
            )
            x = x + other(nn.RMSNorm(**how)(x), picture)
            y = nn.LayerNorm(use_bias=False, **how)(x)
            y = nn.Dense(4 * n, **how)(y)
            return x + nn.Dense(n, **how)(nn.gelu(y)), None

    class Teller(nn.Module):
        """This is the whole decoder."""

        @nn.compact
        def __call__(self, word, at, picture):
            table = nn.Embed(words, n, **how)
            places = self.param("places", nn.initializers.normal(0.02), (t, n), dtype)
            x = table(word) + lax.dynamic_slice_in_dim(places, at, word.shape[1])
            kinds = {"params": 0, "cache": 0}
            stack = nn.scan(Layer, kinds, split_rngs={"params": True}, in_axes=nn.broadcast, length=depth)
            x, _ = stack(name="stack")(x, nn.Dense(n, **how)(picture))
            return table.attend(nn.LayerNorm(**how)(x))

    model = Teller()

    def run(p, keys, values, picture, answer, short):
        """This gives chances of answers, surprises of words, the last caches' sums, and how sure each step is."""
        real = jnp.arange(new) < new - short[..., None]
        picture = jnp.repeat(picture, answers, axis=0)
        own = {"cached_key": keys, "cached_value": values, "cache_index": jnp.full(depth, asked, jnp.int32)}

        def step(carry, now):
            """This scores the next word of each answer, and then reads it."""
            cache, word = carry
            wanted, at = now
            scores, cache = model.apply({"params": p, **cache}, word, at, picture, mutable=["cache"])
            logp = jax.nn.log_softmax(scores[:, 0].astype(jnp.float32) * (2 * n**-0.5), axis=-1)
            found = jnp.take_along_axis(logp, wanted[:, None], axis=-1)[:, 0]
            return (cache, wanted[:, None]), (found, -jnp.sum(jnp.exp(logp) * logp, axis=-1))

        start = {"cache": {"stack": {"own": own}}}, jnp.ones((rows, 1), jnp.int32)
        told = answer.reshape(rows, new).T, asked + jnp.arange(new)
        (cache, _), (found, doubt) = lax.scan(step, start, told)
        found = jnp.where(real, found.T.reshape(b, answers, new), 0.0)
        mean = jnp.sum(found, axis=-1) / jnp.sum(real, axis=-1)
        fresh = cache["cache"]["stack"]["own"]["cached_key"][:, :, asked:]
        return jax.nn.softmax(mean, axis=-1), found, doubt, jnp.mean(jnp.abs(fresh.astype(jnp.float32)), axis=(2, 3, 4))

    word = jax.ShapeDtypeStruct((rows, t), jnp.int32)
    seen_by = jax.ShapeDtypeStruct((rows, seen, n), dtype)
    structs = jax.eval_shape(
        lambda key, word, picture: model.init(key, word, 0, picture), jax.random.key(0), word, seen_by
    )
    kept = normal(depth, rows, t, h, n // h, dtype=dtype)
    inputs = kept, kept, normal(b, seen, n, dtype=dtype), integers(b, answers, new, below=words)

    def louder(path, r):
        """This makes what stands for words and places as large as it is in use."""
        loud = any(str(k.key) in ("embedding", "places") for k in path)
        return replace(r, scale=1.0) if loud else r

    p = drawn_with_stack(structs["params"], "stack")
    p = jax.tree_util.tree_map_with_path(louder, p, is_leaf=is_random)
    return Built(run, (p, *inputs, integers(b, answers, below=new)))
