"""Bent scores, simple recurrence, as many experts as needed, coded keys, drafting beams: their author saw no plan."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program
from benchmarks.workloads.thirty_fifth_parts import ends_of, stack_of
from benchmarks.workloads.twenty_fifth_parts import layer_norm, rms_norm, rotary

GROUP = "forty-third"


@program("dape-a-small-network-over-heads-bends-scores-and-kernels-of-distance-together-scored-prompts", GROUP)
def _adaptive(size: Size) -> Built:
    """This program scores prompts with attention in which a small network makes biases of places out of scores.

    It is DAPE (Zheng, 2024; chuanyang-Zheng/DAPE) over Kerple: logarithms of distances are joined with scores of all heads, two
    small matrices turn them into one more bias for each head, and all three are added before the softmax.
    """
    b, long, n, h, wide, bent, depth, words = pick(
        size,
        (2, 1024, 1024, 16, 4096, 32, 3, 50257),
        (2, 128, 192, 6, 768, 12, 2, 4001),
        (2, 7, 8, 2, 12, 3, 2, 11),
    )
    dtype, d = half(size), n // h

    def run(p, word, short):
        """This gives surprises of words and texts, how far back and how sharply heads look, and how large biases are."""
        line = jnp.arange(long)
        away = jnp.maximum(line[:, None] - line, 0).astype(jnp.float32)
        causal = line <= line[:, None]
        real = line < (long - short)[:, None]

        def layer(x, q):
            """This is one layer."""
            rows = (layer_norm({"scale": q["norm1"], "shift": q["shift1"]}, x) @ q["qkv"]).reshape(b, long, 3, h, d)
            query, key, value = jnp.moveaxis(rows, 2, 0)
            scores = jnp.einsum("bqhd,bkhd->bqkh", query, key, preferred_element_type=jnp.float32) * d**-0.5
            size_, rate = (jax.nn.softplus(q[k].astype(jnp.float32)) for k in ("size", "rate"))
            kernel = -size_ * jnp.log1p(rate * away[..., None])
            both = jnp.concatenate([scores, jnp.broadcast_to(kernel, scores.shape)], axis=-1).astype(dtype)
            more = jax.nn.leaky_relu(both @ q["bend"] + q["bend_shift"], 0.01) @ q["unbend"]
            total = jnp.where(causal[..., None], scores + kernel + more.astype(jnp.float32), -1e9)
            share = jax.nn.softmax(total, axis=2)
            y = jnp.einsum("bqkh,bkhd->bqhd", share.astype(dtype), value).reshape(b, long, n)
            x = x + y @ q["out"]
            y = layer_norm({"scale": q["norm2"], "shift": q["shift2"]}, x)
            x = x + jax.nn.gelu(y @ q["up"]) @ q["down"]
            back = jnp.einsum("bqkh,qk->bh", share, away) / long
            sharp = jnp.mean(jnp.max(share, axis=2), axis=1)
            strong = jnp.sum(jnp.where(causal[..., None], jnp.abs(more.astype(jnp.float32)), 0.0), axis=(1, 2))
            return x, (back, sharp, strong / jnp.sum(causal))

        x, (back, sharp, strong) = lax.scan(layer, p["table"][word], p["layers"])
        logp = jax.nn.log_softmax((rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32), axis=-1)
        surprise = -jnp.take_along_axis(logp[:, :-1], word[:, 1:, None], axis=-1)[..., 0] * real[:, 1:]
        text = jnp.sum(surprise, axis=1) / jnp.sum(real[:, 1:], axis=1)
        return surprise, text, back, sharp, strong

    shapes = {"norm1": (n,), "norm2": (n,), "qkv": (n, 3 * n), "out": (n, n), "up": (n, wide), "down": (wide, n)}
    shapes |= {"bend": (2 * h, bent), "unbend": (bent, h)}
    layers = stack_of(depth, dtype, **shapes)
    layers |= {k: normal(depth, n, dtype=dtype, scale=0.05) for k in ("shift1", "shift2")}
    layers |= {"bend_shift": normal(depth, bent, dtype=dtype, scale=0.1)}
    layers |= {"size": normal(depth, h, dtype=dtype, scale=0.7), "rate": normal(depth, h, dtype=dtype, scale=0.7)}
    p = ends_of(words, n, dtype) | {"layers": layers}
    return Built(run, (p, integers(b, long, below=words), integers(b, below=long // 2)))


@program(
    "sru-plus-plus-attention-feeds-a-recurrence-without-matrices-letters-told-with-memory-of-the-segment-before-grad",
    GROUP,
)
def _simple_units(size: Size) -> Built:
    """This program learns letters with recurrent units whose only matrices are in a narrow attention before the recurrence.

    It is SRU++ (Lei, 2021; asappresearch/sru): states fade by gates that look at states through vectors alone, highways mix in the
    input, attention also reads the segment before, and states go on from segment to segment.
    """
    b, long, past, n, narrow, depth, letters = pick(
        size, (16, 192, 192, 1536, 384, 3, 256), (4, 64, 64, 192, 48, 2, 256), (2, 6, 4, 8, 4, 2, 11)
    )
    dtype = half(size)

    def run(p, memory, state, letter, cut):
        """This gives the loss in bits, slopes, bits by letter, states and memories to go on from, and means of gates."""
        line = jnp.arange(past + long)
        seen = line <= past + jnp.arange(long)[:, None]

        def layer(x, each):
            """This is one layer; x is [b, long, n]."""
            q, old, cell = each
            low = jnp.concatenate([old, x], axis=1) @ q["narrow"]
            query = x @ q["narrow"]
            key, value = jnp.split(low @ q["kv"], 2, axis=-1)
            scores = jnp.einsum("bqd,bkd->bqk", query, key, preferred_element_type=jnp.float32) * narrow**-0.5
            share = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1).astype(dtype)
            low = query + q["mix"] * jnp.einsum("bqk,bkd->bqd", share, value)
            low = layer_norm({"scale": q["norm"], "shift": q["shift"]}, low)
            fresh, forget, reset = jnp.split((low @ q["wide"]).astype(jnp.float32), 3, axis=-1)
            look_f, look_r, add_f, add_r = q["units"].astype(jnp.float32)

            def step(cell, parts):
                """This is one moment of the units."""
                new, f, r, kept = parts
                f = jax.nn.sigmoid(f + look_f * cell + add_f)
                r = jax.nn.sigmoid(r + look_r * cell + add_r)
                cell = f * cell + (1 - f) * new
                return cell, (r * cell + (1 - r) * kept, jnp.mean(f, axis=-1), jnp.mean(r, axis=-1))

            rows = tuple(jnp.swapaxes(z, 0, 1) for z in (fresh, forget, reset, x.astype(jnp.float32)))
            cell, (y, f, r) = lax.scan(step, cell, rows)
            y = layer_norm({"scale": q["norm_out"], "shift": q["shift_out"]}, jnp.swapaxes(y, 0, 1)).astype(dtype)
            kept = jnp.concatenate([old, x], axis=1)[:, -past:]
            return y, (lax.stop_gradient(kept), lax.stop_gradient(cell), jnp.stack([f, r]).mean(axis=(1, 2)))

        def loss(p):
            """This is the mean surprise of the next letters, in bits."""
            x = p["table"][letter[:, :-1]]
            x, told = lax.scan(layer, x, (p["layers"], memory, state))
            logp = jax.nn.log_softmax((x @ p["head"]).astype(jnp.float32), axis=-1)
            bits = -jnp.take_along_axis(logp, letter[:, 1:, None], axis=-1)[..., 0] / jnp.log(2.0)
            real = jnp.arange(long) < (long - cut)[:, None]
            return jnp.sum(bits * real) / jnp.sum(real), (bits * real, told)

        (value, (bits, (memory, state, gates))), slopes = jax.value_and_grad(loss, has_aux=True)(p)
        long_ = jnp.sqrt(sum(jnp.sum(jnp.square(z.astype(jnp.float32))) for z in jax.tree.leaves(slopes)))
        slopes = jax.tree.map(lambda z: z * jnp.minimum(1.0, 1.0 / long_).astype(z.dtype), slopes)
        return value, slopes, long_, bits, memory, state, gates

    shapes = {
        "narrow": (n, narrow),
        "kv": (narrow, 2 * narrow),
        "wide": (narrow, 3 * n),
        "norm": (narrow,),
        "norm_out": (n,),
    }
    layers = stack_of(depth, dtype, **shapes)
    layers |= {
        "mix": normal(depth, 1, dtype=dtype, scale=0.2, offset=0.5),
        "shift": normal(depth, narrow, dtype=dtype, scale=0.1),
    }
    layers |= {
        "units": normal(depth, 4, n, dtype=dtype, scale=0.5),
        "shift_out": normal(depth, n, dtype=dtype, scale=0.1),
    }
    p = {
        "table": normal(letters, n, dtype=dtype),
        "head": normal(n, letters, dtype=dtype, scale=n**-0.5),
        "layers": layers,
    }
    carried = normal(depth, b, past, n, dtype=dtype), normal(depth, b, n, scale=0.5)
    return Built(run, (p, *carried, integers(b, long + 1, below=letters), integers(b, below=long // 4)))


@program("as-many-experts-as-a-share-of-trust-needs-harder-words-get-more-scored-prompts", GROUP)
def _trusted(size: Size) -> Built:
    """This program scores prompts with experts of which each word gets as many as it takes to sum up to a share of trust.

    It is the router of Huang (2024, "Harder Tasks Need More Experts"; ZhenweiAn/Dynamic_MoE): chances are sorted and summed, words
    stand in line at each expert up to its room, and losses ask for sure routers and for experts of equal load.
    """
    b, long, n, h, experts, wide, depth, words, most, trust = pick(
        size,
        (4, 1024, 1024, 16, 16, 2048, 2, 32000, 6, 0.45),
        (2, 96, 192, 6, 8, 256, 2, 4001, 4, 0.5),
        (2, 6, 8, 2, 4, 6, 2, 11, 3, 0.6),
    )
    dtype, d, count = half(size), n // h, b * long
    room = -(-count * 3 // experts)

    def run(p, word, short):
        """This gives surprises, experts by word, loads, shares dropped, both losses of routers, and surprise by experts."""
        place = jnp.broadcast_to(jnp.arange(long), (b, long))
        real = place < (long - short)[:, None]
        causal = jnp.tril(jnp.ones((long, long), bool))

        def experts_of(q, x):
            """This sends words [count, n] to experts and back."""
            chance = jax.nn.softmax((x @ q["router"]).astype(jnp.float32), axis=-1)
            best, which = lax.top_k(chance, most)
            before = jnp.cumsum(best, axis=-1) - best
            wanted = (before < trust) & real.reshape(-1, 1)
            hot = jax.nn.one_hot(which, experts, dtype=jnp.int32) * wanted[..., None]
            line = jnp.cumsum(hot.reshape(-1, experts), axis=0).reshape(hot.shape) - hot
            line = jnp.sum(line * hot, axis=-1)
            kept = wanted & (line < room)
            slot = jnp.where(kept, which * room + line, experts * room)
            rows = (
                jnp.zeros((experts * room + 1, n), dtype).at[slot].set(jnp.broadcast_to(x[:, None], (count, most, n)))
            )
            rows = rows[:-1].reshape(experts, room, n)
            gate, value = jnp.split(jnp.einsum("ecn,enf->ecf", rows, q["up"]), 2, axis=-1)
            rows = jnp.einsum("ecf,efn->ecn", jax.nn.silu(gate) * value, q["down"]).reshape(-1, n)
            weight = jnp.where(kept, best, 0.0)
            weight = weight / jnp.maximum(jnp.sum(weight, axis=-1, keepdims=True), 1e-6)
            read = rows[jnp.minimum(slot, experts * room - 1)] * weight[..., None].astype(dtype)
            load = jnp.sum(hot, axis=(0, 1)) / jnp.sum(hot)
            mean = jnp.sum(chance * real.reshape(-1, 1), axis=0) / jnp.sum(real)
            sure = -jnp.sum(chance * jnp.log(chance + 1e-9), axis=-1)
            losses = jnp.stack([experts * jnp.sum(load * mean), jnp.sum(sure * real.reshape(-1)) / jnp.sum(real)])
            dropped = 1 - jnp.sum(kept) / jnp.sum(wanted)
            return jnp.sum(read, axis=1), (jnp.sum(wanted, axis=-1).reshape(b, long), load, dropped, losses)

        def layer(x, q):
            """This is attention and experts."""
            rows = (rms_norm(q["norm1"], x) @ q["qkv"]).reshape(b, long, 3, h, d)
            query, key, value = rotary(rows[:, :, 0], place), rotary(rows[:, :, 1], place), rows[:, :, 2]
            x = x + jax.nn.dot_product_attention(query, key, value, mask=causal).reshape(b, long, n) @ q["out"]
            y, told = experts_of(q, rms_norm(q["norm2"], x).reshape(count, n))
            return x + y.reshape(b, long, n), told

        x, (many, load, dropped, losses) = lax.scan(layer, p["table"][word], p["layers"])
        logp = jax.nn.log_softmax((rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32), axis=-1)
        surprise = -jnp.take_along_axis(logp[:, :-1], word[:, 1:, None], axis=-1)[..., 0] * real[:, 1:]
        group = jax.nn.one_hot(many[-1, :, :-1] - 1, most) * real[:, 1:, None]
        by_many = jnp.einsum("bt,btk->k", surprise, group) / jnp.maximum(jnp.sum(group, axis=(0, 1)), 1)
        return surprise, many, load, dropped, losses, by_many

    shapes = {"norm1": (n,), "norm2": (n,), "qkv": (n, 3 * n), "out": (n, n)}
    shapes |= {"up": (experts, n, 2 * wide), "down": (experts, wide, n)}
    layers = stack_of(depth, dtype, **shapes) | {"router": normal(depth, n, experts, dtype=dtype, scale=1.3 * n**-0.5)}
    p = ends_of(words, n, dtype) | {"layers": layers}
    return Built(run, (p, integers(b, long, below=words), integers(b, below=long // 2)))


@program("pqcache-codes-of-parts-of-keys-tell-which-keys-to-fetch-beside-first-and-last-words-decode", GROUP)
def _coded(size: Size) -> Built:
    """This program writes next words and fetches only those old keys that seem to matter by small codes of their parts.

    It is PQCache (Zhang, 2024; HugoZHL/PQCache) in Llama: each part of a key is named by its nearest middle, tables of products of
    queries and middles are summed by codes, the best are fetched, and the first and last words are always seen.
    """
    b, past, first, near, fetched, n, h, groups, d, parts, middles, wide, depth, words = pick(
        size,
        (8, 8192, 16, 128, 512, 4096, 32, 8, 128, 4, 64, 14336, 2, 128256),
        (8, 2048, 4, 64, 256, 384, 12, 4, 32, 4, 32, 1024, 3, 8001),
        (2, 9, 1, 2, 3, 8, 2, 1, 4, 2, 3, 12, 2, 11),
    )
    dtype, part = half(size), d // parts

    def run(p, keys, values, codes, books, word, count, seed):
        """This gives drawn words, surprises, entropies, fetched places, how much they weigh, and new rows with their codes."""
        count = count + first + near
        row, line, place = jnp.arange(b), jnp.arange(past), count[:, None]
        middle = (line >= first) & (line <= place - near)
        always = jnp.concatenate(
            [jnp.broadcast_to(jnp.arange(first), (b, first)), place - near + 1 + jnp.arange(near)], axis=1
        )

        def layer(x, each):
            """This is one layer with its caches."""
            q, key, value, code, book = each
            y = rms_norm(q["norm1"], x)
            query, fresh, new = ((y @ q[k]).reshape(b, 1, -1, d) for k in ("q", "k", "v"))
            query, fresh, new = rotary(query, place)[:, 0], rotary(fresh, place)[:, 0], new[:, 0]
            cut = fresh.reshape(b, groups, parts, part).astype(jnp.float32)
            gap = jnp.sum((cut[:, :, :, None] - book.astype(jnp.float32)) ** 2, axis=-1)
            name = jnp.argmin(gap, axis=-1).astype(jnp.uint8)
            key, value = key.at[row, count].set(fresh), value.at[row, count].set(new)
            code = code.at[row, :, :, count].set(name)
            asked = query.reshape(b, groups, h // groups, parts, part)
            table = jnp.einsum("bgrpc,bgpmc->bgpmr", asked, book, preferred_element_type=jnp.float32)
            guess = sum(
                jnp.take_along_axis(table[:, :, k], code[:, :, k, :, None].astype(jnp.int32), axis=2)
                for k in range(parts)
            )
            guess = jnp.where(middle[:, None, :, None], guess * d**-0.5, -1e9)
            chance = jnp.sum(jax.nn.softmax(guess, axis=2), axis=-1)
            weigh, at = lax.top_k(chance, fetched)
            all_ = jnp.concatenate([at, jnp.broadcast_to(always[:, None], (b, groups, first + near))], axis=-1)
            far = jnp.take_along_axis(jnp.broadcast_to(middle[:, None], (b, groups, past)), at, axis=-1)
            seen = jnp.concatenate([far, jnp.ones((b, groups, first + near), bool)], axis=-1)
            group = jnp.arange(groups)[:, None]
            key_, value_ = (z[row[:, None, None], all_, group] for z in (key, value))
            asked = query.reshape(b, groups, -1, d)
            scores = jnp.einsum("bgrd,bgkd->bgrk", asked, key_, preferred_element_type=jnp.float32) * d**-0.5
            share = jax.nn.softmax(jnp.where(seen[:, :, None], scores, -1e9), axis=-1)
            y = jnp.einsum("bgrk,bgkd->bgrd", share.astype(dtype), value_).reshape(b, h * d)
            x = x + y @ q["out"]
            y = rms_norm(q["norm2"], x)
            x = x + (jax.nn.silu(y @ q["gate"]) * (y @ q["up"])) @ q["down"]
            mass = jnp.sum(weigh, axis=-1) / (h // groups), jnp.mean(jnp.sum(share[..., :fetched], axis=-1), axis=-1)
            return x, (at, jnp.stack(mass), fresh, new, name)

        x, told = lax.scan(layer, p["table"][word], (p["layers"], keys, values, codes, books))
        logp = jax.nn.log_softmax((rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32), axis=-1)
        drawn = jax.random.categorical(jax.random.key(seed), logp / 0.8, axis=-1)
        surprise = -jnp.take_along_axis(logp, drawn[:, None], axis=-1)[:, 0]
        return drawn, surprise, -jnp.sum(jnp.exp(logp) * logp, axis=-1), *told

    shapes = {"norm1": (n,), "norm2": (n,), "q": (n, h * d), "k": (n, groups * d), "v": (n, groups * d)}
    shapes |= {"out": (h * d, n), "gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    p = ends_of(words, n, dtype) | {"layers": stack_of(depth, dtype, **shapes)}
    cache = normal(depth, b, past, groups, d, dtype=dtype)
    codes = Random((depth, b, groups, parts, past), jnp.dtype(jnp.uint8), below=middles)
    books = normal(depth, b, groups, parts, middles, part, dtype=dtype)
    inputs = integers(b, below=words), integers(b, below=past - first - near), integers(below=1000)
    return Built(run, (p, cache, cache, codes, books, *inputs))


@program("redrafter-a-small-recurrent-head-searches-beams-that-one-pass-of-the-model-checks-decode", GROUP)
def _drafted(size: Size) -> Built:
    """This program writes several words at once: a recurrent head drafts beams of words, and the model checks all in one pass.

    It is the Recurrent Drafter (Zhang, 2024; apple/ml-recurrent-drafter): the head starts from the last state of the model, beams
    see the cache and themselves, beams that begin alike are counted once, and the longest agreed beginning enters the cache.
    """
    b, past, beams, ahead, n, h, d, wide, depth, words = pick(
        size,
        (8, 2048, 8, 5, 4096, 32, 128, 11008, 2, 32000),
        (2, 192, 4, 4, 256, 4, 64, 704, 2, 4001),
        (2, 6, 2, 2, 8, 2, 4, 12, 2, 11),
    )
    dtype, extra = half(size), ahead + 1
    total = past + extra

    def run(p, keys, values, state, word, count):
        """This gives accepted words, how many, the next word, drafts with their chances, shared beginnings, and caches."""
        row = jnp.arange(b)

        def drafted(carry, _):
            """This makes beams one word longer."""
            unit, score, last = carry
            unit = jax.nn.silu(unit @ p["draft_state"] + p["table"][last] @ p["draft_word"] + p["draft_shift"])
            y = jnp.concatenate([jnp.broadcast_to(state[:, None], unit.shape), unit], axis=-1) @ p["draft_join"]
            y = p["table"][last] + y + jax.nn.silu(y @ p["draft_up"])
            logp = jax.nn.log_softmax((rms_norm(p["norm"], y) @ p["head"]).astype(jnp.float32), axis=-1)
            score, at = lax.top_k((score[..., None] + logp).reshape(b, -1), beams)
            parent, last = at // words, at % words
            unit = jnp.take_along_axis(unit, parent[..., None], axis=1)
            return (unit, score, last), (parent, last)

        begin = jnp.where(jnp.arange(beams) == 0, 0.0, -1e9)
        begin = (
            jnp.zeros((b, beams, n), dtype),
            jnp.broadcast_to(begin, (b, beams)),
            jnp.tile(word[:, None], (1, beams)),
        )
        (_, score, _), (parent, made) = lax.scan(drafted, begin, None, length=ahead)

        def traced(at, each):
            """This goes back along a beam."""
            parent, made = each
            return jnp.take_along_axis(parent, at, axis=1), jnp.take_along_axis(made, at, axis=1)

        own = jnp.broadcast_to(jnp.arange(beams), (b, beams))
        _, text = lax.scan(traced, own, (parent, made), reverse=True)
        text = jnp.concatenate([jnp.broadcast_to(word[:, None, None], (b, beams, 1)), jnp.moveaxis(text, 0, 2)], axis=2)
        same = jnp.cumprod(text[:, :, None] == text[:, None], axis=-1)
        leader = jnp.argmax(same, axis=2)
        shared = jnp.sum(leader != own[..., None], axis=(1, 2))
        place = jnp.broadcast_to((count[:, None] + jnp.arange(extra))[:, None], text.shape).reshape(b, -1)
        old = jnp.broadcast_to(jnp.arange(total) < count[:, None], (b, total))[:, None, None]
        step = jnp.tile(jnp.arange(extra), beams)
        beam = jnp.repeat(jnp.arange(beams), extra)
        inside = (beam[:, None] == beam) & (step <= step[:, None])

        def layer(x, each):
            """This is one layer over all words of all beams."""
            q, key, value = each
            y = rms_norm(q["norm1"], x)
            query, fresh, new = jnp.split((y @ q["qkv"]).reshape(b, beams * extra, 3 * h, d), 3, axis=2)
            query, fresh = rotary(query, place), rotary(fresh, place)
            far = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
            near = jnp.einsum("bqhd,bkhd->bhqk", query, fresh, preferred_element_type=jnp.float32)
            scores = jnp.concatenate([jnp.where(old, far, -1e9), jnp.where(inside, near, -1e9)], axis=-1)
            share = jax.nn.softmax(scores * d**-0.5, axis=-1).astype(dtype)
            y = jnp.einsum("bhqk,bkhd->bqhd", share[..., :total], value) + jnp.einsum(
                "bhqk,bkhd->bqhd", share[..., total:], new
            )
            x = x + y.reshape(b, -1, h * d) @ q["out"]
            y = rms_norm(q["norm2"], x)
            return x + (jax.nn.silu(y @ q["gate"]) * (y @ q["up"])) @ q["down"], (fresh, new)

        x, rows = lax.scan(layer, p["table"][text.reshape(b, -1)], (p["layers"], keys, values))
        x = rms_norm(p["norm"], x)
        logits = (x @ p["head"]).astype(jnp.float32).reshape(b, beams, extra, words)
        wanted = jnp.argmax(logits, axis=-1)
        agreed = jnp.sum(jnp.cumprod(wanted[..., :-1] == text[..., 1:], axis=-1), axis=-1)
        winner, many = jnp.argmax(agreed, axis=1), jnp.max(agreed, axis=1)
        won = text[row, winner]
        after = wanted[row, winner, many]
        state = x.reshape(b, beams, extra, n)[row, winner, many]
        sure = jnp.max(jax.nn.log_softmax(logits, axis=-1), axis=-1)[row, winner, many]

        def put(cache, fresh):
            """This writes rows of the winning beam into one cache."""
            fresh = fresh.reshape(depth, b, beams, extra, h, d)[:, row, winner]
            return jax.vmap(lambda c, f, k: lax.dynamic_update_slice(c, f, (0, k, 0, 0)), (1, 1, 0), 1)(
                cache, fresh, count
            )

        keys, values = (put(c, f) for c, f in zip((keys, values), rows, strict=True))
        return won, many, after, sure, text, score, shared, state, keys, values, count + many + 1

    shapes = {"norm1": (n,), "norm2": (n,), "qkv": (n, 3 * h * d), "out": (h * d, n)}
    shapes |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    p = ends_of(words, n, dtype) | {"layers": stack_of(depth, dtype, **shapes)}
    for name in ("out", "down"):
        p["layers"][name] = replace(p["layers"][name], scale=0.4 * p["layers"][name].scale)
    small = {"draft_state": (n, n), "draft_word": (n, n), "draft_join": (2 * n, n), "draft_up": (n, n)}
    p |= {
        k: normal(*s, dtype=dtype, scale=(0.5 if k == "draft_join" else 1.0) * s[0] ** -0.5) for k, s in small.items()
    }
    p["draft_shift"] = normal(n, dtype=dtype, scale=0.1)
    cache = normal(depth, b, total, h, d, dtype=dtype)
    return Built(run, (p, cache, cache, normal(b, n, dtype=dtype), integers(b, below=words), integers(b, below=past)))
