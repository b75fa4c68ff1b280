"""Unusual layers, decoding, poolings and retrieval, the twenty-fifth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, gain, half, integers, normal, pick, program, weight
from benchmarks.workloads.twenty_fifth_parts import attention, dense_of, rms_norm, rotary, short

GROUP = "twenty-fifth"


@program("many-answers-read-one-prompt-once-in-two-part-softmax-decode", GROUP)
def _one_prompt(size: Size) -> Built:
    """This draws the next word of many answers to the same prompts, whose keys and values are kept and read only once.

    It is Hydragen (Juravsky, 2024): words of a prompt are attended to by all its answers in one product, words of each answer
    apart, and both parts are joined by the logarithms of their sums; improbable words are left out before drawing.
    """
    prompts, answers, long, room, n, h, few, d, wide, words = pick(
        size,
        (3, 41, 1531, 97, 1536, 12, 4, 128, 4608, 32003),
        (2, 29, 523, 61, 384, 6, 2, 64, 1024, 10007),
        (2, 3, 7, 5, 8, 4, 2, 4, 12, 13),
    )
    dtype, depth = half(size), 3
    row, column = np.indices((prompts, answers))

    def part(query, key, value, shared, mask=None):
        """This attends to one part of the words and gives the logarithm of the sum below the fraction, too."""
        names = "plkd" if shared else "palkd"
        scores = jnp.einsum(f"pakgd,{names}->pakgl", query, key, preferred_element_type=jnp.float32) * d**-0.5
        if mask is not None:
            scores = jnp.where(mask[:, :, None, None], scores, -1e9)
        total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        probs = jnp.exp(scores - total).astype(dtype)
        y = jnp.einsum(f"pakgl,{names}->pakgd", probs, value, preferred_element_type=jnp.float32)
        return y, total

    def layer(q, x, prompt, answer, count):
        y = rms_norm(q["norm1"], x)
        query = rotary((y @ q["q"]).reshape(prompts, answers, h, d), long + count)
        key = rotary((y @ q["k"]).reshape(prompts, answers, few, d), long + count)
        value = (y @ q["v"]).reshape(prompts, answers, few, d)
        query = query.reshape(prompts, answers, few, h // few, d)
        keys, values = answer[0].at[row, column, count].set(key), answer[1].at[row, column, count].set(value)
        seen = jnp.arange(room) <= count[..., None]
        one, sum_one = part(query, *prompt, shared=True)
        two, sum_two = part(query, keys, values, shared=False, mask=seen)
        share = jax.nn.sigmoid(sum_one - sum_two)
        y = (share * one + (1 - share) * two).astype(dtype)
        x = x + y.reshape(prompts, answers, h * d) @ q["o"]
        gate, up = jnp.split(rms_norm(q["norm2"], x) @ q["up"], 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ q["down"], (keys, values), share

    def step(p, now, count, prompt_caches, answer_caches, heat, seed):
        x, fresh, shares = p["table"][now], [], []
        for q, prompt, answer in zip(p["layers"], prompt_caches, answer_caches, strict=True):
            x, cache, share = layer(q, x, prompt, answer, count)
            fresh.append(cache)
            shares.append(jnp.mean(share, axis=(2, 3, 4)))
        logits = (rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32)
        plain = jax.nn.log_softmax(logits, axis=-1)
        logits = logits / (0.5 + jax.nn.sigmoid(heat))[:, None, None]
        least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(0.05)
        noise = jax.random.gumbel(jax.random.key(seed), logits.shape)
        drawn = jnp.argmax(jnp.where(logits < least, -1e9, logits + noise), axis=-1)
        own = jnp.take_along_axis(plain, drawn[..., None], axis=-1)[..., 0]
        surprise = -jnp.sum(jnp.exp(plain) * plain, axis=-1)
        return drawn, own, surprise, jnp.sum(logits >= least, axis=-1), count + 1, fresh, jnp.stack(shares)

    def cache(*shape):
        return tuple(normal(*shape, few, d, dtype=dtype) for _ in range(2))

    p = {"table": normal(words, n, dtype=dtype), "head": weight(n, words, dtype=dtype), "norm": gain(n, dtype)}
    p["layers"] = [
        {"norm1": gain(n, dtype), "norm2": gain(n, dtype), "up": weight(n, 2 * wide, dtype=dtype)}
        | {
            "q": weight(n, h * d, dtype=dtype),
            "k": weight(n, few * d, dtype=dtype),
            "v": weight(n, few * d, dtype=dtype),
        }
        | {"o": weight(h * d, n, dtype=dtype), "down": weight(wide, n, dtype=dtype)}
        for _ in range(depth)
    ]
    caches = ([cache(prompts, long) for _ in range(depth)], [cache(prompts, answers, room) for _ in range(depth)])
    inputs = (integers(prompts, answers, below=words), integers(prompts, answers, below=room - 1), *caches)
    return Built(step, (p, *inputs, normal(prompts), integers(below=1000)))


@program("places-known-again-by-summed-residuals-and-powered-means-search", GROUP)
def _places(size: Size) -> Built:
    """This finds where a photograph was taken by comparing a summary of it with those of many known places.

    Summaries join NetVLAD (Arandjelović, 2016), sums of what local features differ from centres, with means of learned powers
    (GeM, Radenović, 2018); queries are then widened by what they found and asked again.
    """
    b, rows, columns, c, centres, small, places, best = pick(
        size,
        (17, 30, 41, 512, 64, 768, 100003, 25),
        (11, 30, 41, 128, 48, 256, 20011, 25),
        (3, 3, 5, 6, 4, 7, 29, 5),
    )
    dtype = half(size)

    def unit(x):
        y = x.astype(jnp.float32)
        return y * lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-9)

    def residual_sums(q, x):
        x = unit(x).astype(dtype)
        share = jax.nn.softmax((x @ q["assign"]["w"] + q["assign"]["b"]).astype(jnp.float32), axis=-1)
        sums = jnp.einsum("bpk,bpc->bkc", share.astype(dtype), x, preferred_element_type=jnp.float32)
        sums = sums - jnp.sum(share, axis=1)[..., None] * q["centres"]
        whole = unit(unit(sums).reshape(b, centres * c)).astype(dtype)
        return unit(whole @ q["white"]["w"] + q["white"]["b"]), share

    def powered_means(q, x):
        power = 1 + jax.nn.softplus(q["power"])
        y = jnp.maximum(x.astype(jnp.float32), 1e-3)
        y = jnp.mean(y**power, axis=1) ** (1 / power)
        return unit(y @ q["white"]["w"] + q["white"]["b"])

    def asked(query, known):
        like = jnp.einsum("bn,pn->bp", query.astype(dtype), known, preferred_element_type=jnp.float32)
        return lax.top_k(like, best)

    def model(p, features, known, where):
        x = jax.nn.relu(features).reshape(b, rows * columns, c)
        sums, share = residual_sums(p["sums"], x)
        query = unit(jnp.concatenate([sums, p["trust"] * powered_means(p["means"], x)], axis=-1))
        known = unit(known).astype(dtype)
        first, at = asked(query, known)
        rate = jnp.maximum(first[:, :10], 0.0) ** 3
        wider = query + jnp.einsum("bk,bkn->bn", rate, known[at[:, :10]].astype(jnp.float32))
        score, at = asked(unit(wider), known)
        trust = jax.nn.softmax(50 * score, axis=-1)
        found = jnp.einsum("bk,bkx->bx", trust, where[at])
        spread = jnp.einsum("bk,bk->b", trust, jnp.sum((where[at] - found[:, None]) ** 2, axis=-1))
        return at, score, found, jnp.sqrt(spread), query, jnp.mean(share, axis=1)

    p = {"sums": {"assign": dense_of(c, centres, dtype), "centres": normal(centres, c, scale=c**-0.5)}}
    p["sums"]["white"] = dense_of(centres * c, small, dtype)
    p |= {"means": {"power": normal(scale=0.1, offset=2.0), "white": dense_of(c, small)}, "trust": normal(offset=1.0)}
    return Built(
        model, (p, normal(b, rows, columns, c, dtype=dtype), normal(places, 2 * small, dtype=dtype), normal(places, 2))
    )


@program("weights-as-sums-of-entries-of-two-books-layers-decode", GROUP)
def _two_books(size: Size) -> Built:
    """This takes a step of a language model whose weights are kept as numbers of entries in two small books of vectors.

    It is AQLM (Egiazarian, 2024): eight weights in a row are the sum of one entry of each book, so that a weight takes two bits;
    the books and the scales of rows are in float16.
    """
    b, n, h, few, d, wide, seen, words = pick(
        size,
        (5, 1536, 12, 4, 128, 4096, 577, 32003),
        (3, 640, 10, 5, 64, 1760, 197, 10007),
        (2, 16, 4, 2, 4, 24, 7, 13),
    )
    dtype, depth, entries, run = short(size), 3, 256, 8

    def linear(q, x):
        weights = q["books"][0][q["codes"][..., 0]] + q["books"][1][q["codes"][..., 1]]
        weights = weights.reshape(weights.shape[0], -1) * q["scale"][:, None]
        return jnp.einsum("...i,oi->...o", x, weights, preferred_element_type=jnp.float32).astype(dtype)

    def layer(q, x, cache, count):
        y = rms_norm(q["norm1"], x)
        query, key, value = jnp.split(linear(q["qkv"], y), [h * d, (h + few) * d], axis=-1)
        query = rotary(query.reshape(b, 1, h, d), count[:, None])
        key = rotary(key.reshape(b, 1, few, d), count[:, None])
        rows = jnp.arange(b)
        keys = cache[0].at[rows, count].set(key[:, 0])
        values = cache[1].at[rows, count].set(value.reshape(b, few, d))
        alive = (jnp.arange(seen) <= count[:, None])[:, None, None]
        many_keys, many_values = (jnp.repeat(z, h // few, axis=2) for z in (keys, values))
        x = x + linear(q["out"], attention(query, many_keys, many_values, alive).reshape(b, h * d))
        gate, up = jnp.split(linear(q["up"], rms_norm(q["norm2"], x)), 2, axis=-1)
        return x + linear(q["down"], jax.nn.silu(gate) * up), (keys, values)

    def step(p, now, count, caches):
        x, fresh = p["table"][now], []
        for q, cache in zip(p["layers"], caches, strict=True):
            x, longer = layer(q, x, cache, count)
            fresh.append(longer)
        logits = (rms_norm(p["norm"], x) @ p["table"].T).astype(jnp.float32)
        logp = jax.nn.log_softmax(logits, axis=-1)
        return jnp.argmax(logp, axis=-1), lax.top_k(logp, 5), fresh, x

    def coded(i, o):
        q = {"codes": integers(o, i // run, 2, below=entries), "books": normal(2, entries, run, dtype=dtype, scale=0.7)}
        return q | {"scale": normal(o, dtype=dtype, scale=0.1 * i**-0.5, offset=i**-0.5)}

    p = {"table": normal(words, n, dtype=dtype, scale=n**-0.5), "norm": gain(n, dtype)}
    p["layers"] = [
        {"norm1": gain(n, dtype), "norm2": gain(n, dtype), "qkv": coded(n, (h + 2 * few) * d), "out": coded(h * d, n)}
        | {"up": coded(n, 2 * wide), "down": coded(wide, n)}
        for _ in range(depth)
    ]
    caches = [tuple(normal(b, seen, few, d, dtype=dtype) for _ in range(2)) for _ in range(depth)]
    return Built(step, (p, integers(b, below=words), integers(b, below=seen), caches))


@program("shelves-made-diverse-by-greedy-determinants-after-retrieval", GROUP)
def _shelves(size: Size) -> Built:
    """This picks a shelf of items for each user that suit the user and differ from each other.

    Two small networks find candidates, then items are taken one by one so that the determinant of their likeness grows most, by
    a Cholesky factor that grows by a row for each item (Chen, 2018); no seller may have more than four items.
    """
    users, items, n, mid, out, some, shelf, sellers = pick(
        size,
        (61, 50021, 177, 256, 96, 600, 30, 211),
        (47, 10007, 91, 128, 64, 500, 30, 101),
        (3, 23, 7, 6, 4, 11, 5, 3),
    )

    def tower(layers, x):
        for k, q in enumerate(layers):
            x = x @ q["w"] + q["b"]
            x = jax.nn.gelu(x) if k + 1 < len(layers) else x
        return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

    def chosen(quality, vectors, seller):
        """This takes items greedily for one user: quality [some], vectors [some, out], seller [some]."""
        likeness = 0.5 * (1 + vectors @ vectors.T)
        kernel = quality[:, None] * (likeness + 1e-3 * jnp.eye(some)) * quality

        def step(k, carry):
            rows, gain_left, taken, counts, picked, gains = carry
            free = ~taken & (counts[seller] < 4)
            value = jnp.where(free, jnp.maximum(gain_left, 1e-10), 0.0)
            one = jnp.argmax(value)
            best = jnp.maximum(gain_left[one], 1e-10)
            row = (kernel[one] - rows.T @ rows[:, one]) * lax.rsqrt(best)
            rows = rows.at[k].set(row)
            gain_left = gain_left - row * row
            counts = counts.at[seller[one]].add(1)
            return (
                rows,
                gain_left,
                taken.at[one].set(True),
                counts,
                picked.at[k].set(one),
                gains.at[k].set(jnp.log(best)),
            )

        carry = (jnp.zeros((shelf, some)), jnp.diagonal(kernel), jnp.zeros(some, bool), jnp.zeros(sellers, jnp.int32))
        carry = lax.fori_loop(0, shelf, step, (*carry, jnp.zeros(shelf, jnp.int32), jnp.zeros(shelf)))
        picked = carry[4]
        pairs = likeness[picked[:, None], picked]
        return picked, carry[5], (jnp.sum(pairs) - shelf) / (shelf * (shelf - 1))

    def model(p, history, features, seller, theta):
        user, item = tower(p["user"], history), tower(p["item"], features)
        score, at = lax.top_k(user @ item.T, some)
        score = (score - jnp.mean(score, axis=-1, keepdims=True)) / (jnp.std(score, axis=-1, keepdims=True) + 1e-6)
        weigh = jax.nn.sigmoid(theta)[:, None]
        quality = jnp.exp(0.5 * weigh / (1.0 - 0.9 * weigh) * jnp.clip(score, -3.0, 3.0))
        picked, gains, alike = jax.vmap(chosen)(quality, item[at], seller[at])
        shown = jnp.take_along_axis(at, picked, axis=1)
        worth = jnp.take_along_axis(score, picked, axis=1)
        seen = jnp.sum(worth / jnp.log2(jnp.arange(shelf) + 2.0), axis=1)
        reach = jnp.zeros(items).at[shown.reshape(-1)].add(1.0)
        return shown, worth, gains, alike, seen, jnp.mean(reach > 0)

    p = {k: [dense_of(n, mid), dense_of(mid, mid), dense_of(mid, out)] for k in ("user", "item")}
    return Built(model, (p, normal(users, n), normal(items, n), integers(items, below=sellers), normal(users)))


@program("few-heads-whose-values-and-outputs-come-from-chosen-experts", GROUP)
def _few_heads(size: Size) -> Built:
    """This reads words with few attention heads, each of which chooses among experts how to read and how to write each word.

    It is SwitchHead (Csordás, 2024): two of five matrices per head are chosen by gates that do not compete; the layer after it
    chooses four of sixteen small networks for each word in the same way, and gates are kept busy by their entropy.
    """
    b, t, n, h, d, experts, many, slim, words = pick(
        size,
        (2, 1021, 1024, 4, 112, 5, 16, 176, 8003),
        (1, 251, 192, 4, 48, 5, 16, 64, 2003),
        (2, 7, 8, 2, 4, 5, 16, 3, 13),
    )
    dtype, depth = half(size), 2

    def gates(logits, best):
        """This keeps the largest gates of the last axis and gives how evenly experts are used on the whole."""
        logits = logits.astype(jnp.float32)
        least = lax.top_k(logits, best)[0][..., -1:]
        kept = jnp.where(logits >= least, jax.nn.sigmoid(logits), 0.0)
        share = jnp.mean(jax.nn.softmax(logits, axis=-1), axis=(0, 1))
        return kept.astype(dtype), -jnp.sum(share * jnp.log(share + 1e-9), axis=-1)

    def attend(q, x):
        read, even_read = gates(jnp.einsum("btn,nhe->bthe", x, q["gate_read"]), 2)
        write, even_write = gates(jnp.einsum("btn,nhe->bthe", x, q["gate_write"]), 2)
        query = rotary((x @ q["q"]).reshape(b, t, h, d), jnp.arange(t))
        key = rotary((x @ q["k"]).reshape(b, t, h, d), jnp.arange(t))
        value = jnp.einsum("btn,hend->bthed", x, q["read"])
        value = jnp.einsum("bthed,bthe->bthd", value, read)
        y = attention(query, key, value, jnp.tril(jnp.ones((t, t), bool)))
        y = jnp.einsum("bthd,bthe->bthed", y, write)
        return jnp.einsum("bthed,hedn->btn", y, q["write"]), jnp.mean(even_read) + jnp.mean(even_write)

    def feed(q, x):
        """This lets each word pass through four small networks: words are put in the order of their networks."""
        logits = (x @ q["gate"]).astype(jnp.float32).reshape(b * t, many)
        top, at = lax.top_k(logits, 4)
        share = jnp.mean(jax.nn.softmax(logits, axis=-1), axis=0)
        flat = at.reshape(-1)
        order = jnp.argsort(flat)
        sizes = jnp.bincount(flat, length=many).astype(jnp.int32)
        rows = x.reshape(b * t, n)[order // 4]
        y = lax.ragged_dot(jax.nn.relu(lax.ragged_dot(rows, q["up"], sizes)), q["down"], sizes)
        y = y * jax.nn.sigmoid(top).reshape(-1)[order][:, None].astype(dtype)
        y = jax.ops.segment_sum(y.astype(jnp.float32), order // 4, b * t).astype(dtype)
        return y.reshape(x.shape), -jnp.sum(share * jnp.log(share + 1e-9)), sizes

    def model(p, text):
        x, even, used = p["table"][text], 0.0, []
        for q in p["layers"]:
            y, more = attend(q, rms_norm(q["norm1"], x))
            x, even = x + y, even + more
            y, more, sizes = feed(q, rms_norm(q["norm2"], x))
            x, even = x + y, even + 0.5 * more
            used.append(sizes)
        logits = (rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32)
        own = jnp.take_along_axis(logits[:, :-1], text[:, 1:, None], axis=-1)[..., 0]
        logp = own - jax.nn.logsumexp(logits[:, :-1], axis=-1)
        return logp, -jnp.mean(logp) - 1e-3 * even, jnp.stack(used), x[:, -1]

    def layer():
        q = {"norm1": gain(n, dtype), "norm2": gain(n, dtype), "q": weight(n, h * d, dtype=dtype)}
        q |= {"k": weight(n, h * d, dtype=dtype), "gate": weight(n, many, dtype=dtype)}
        q |= {k: normal(n, h, experts, dtype=dtype, scale=n**-0.5) for k in ("gate_read", "gate_write")}
        q |= {"read": weight(h, experts, n, d, dtype=dtype)}
        q |= {"write": normal(h, experts, d, n, dtype=dtype, scale=(h * d) ** -0.5)}
        return q | {"up": weight(many, n, slim, dtype=dtype), "down": weight(many, slim, n, dtype=dtype)}

    p = {"table": normal(words, n, dtype=dtype), "head": weight(n, words, dtype=dtype), "norm": gain(n, dtype)}
    p["layers"] = [layer() for _ in range(depth)]
    return Built(model, (p, integers(b, t, below=words)))
