"""Layers that draft, chosen blocks, cosines, chains of experts and packed signs, the forty-first set: its author saw no plan."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program
from benchmarks.workloads.thirty_fifth_parts import ends_of, stack_of
from benchmarks.workloads.twenty_fifth_parts import attention, dense, dense_of, layer_norm, norm_of, rms_norm, rotary

GROUP = "forty-first"


@program("layerskip-early-layers-draft-words-and-late-layers-check-them-with-shared-caches-decode", GROUP)
def _layer_skip(size: Size) -> Built:
    """This program lets the first layers of a model write some words ahead, and lets the other layers check them at once.

    It is the self-speculative decoding of LayerSkip (Elhoushi, 2024; facebookresearch/LayerSkip): drafts leave early through the
    same last matrix, and the check goes on from their states and caches instead of beginning again.
    """
    b, past, n, h, groups, d, wide, early, late, drafts, words = pick(
        size,
        (4, 1024, 2048, 32, 8, 64, 8192, 3, 7, 4, 128256),
        (2, 96, 192, 6, 2, 32, 512, 2, 3, 3, 4001),
        (2, 6, 16, 4, 2, 8, 24, 1, 2, 2, 11),
    )
    dtype, long = half(size), past + drafts + 1

    def layer(x, carried, place):
        """This is one layer over rows [b, t, n], which writes keys and values at their places."""
        q, key, value = carried
        t = x.shape[1]
        y = rms_norm(q["norm1"], x)
        query, fresh = ((y @ q[k]).reshape(b, t, -1, d) for k in ("q", "k"))
        row = jnp.arange(b)[:, None]
        key = key.at[row, place].set(rotary(fresh, place))
        value = value.at[row, place].set((y @ q["v"]).reshape(b, t, groups, d))
        many = (jnp.repeat(z, h // groups, axis=2) for z in (key, value))
        mask = (jnp.arange(long) <= place[..., None])[:, None]
        x = x + attention(rotary(query, place), *many, mask).reshape(b, t, h * d) @ q["out"]
        y = rms_norm(q["norm2"], x)
        return x + (jax.nn.silu(y @ q["gate"]) * (y @ q["up"])) @ q["down"], (key, value)

    def run(p, first, second, word, count):
        """This gives drafts, the words of the whole model, how many drafts hold, new caches, and surprises of both."""

        def logp(x):
            """This tells logarithms of chances."""
            return jax.nn.log_softmax((rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32), axis=-1)

        def draft(carry, step):
            """This reads one word with the early layers and guesses the next."""
            word, caches = carry
            place = (count + step)[:, None]
            x = p["table"][word][:, None]
            x, caches = lax.scan(lambda x, z: layer(x, z, place), x, (p["early"], *caches))
            chance = logp(x[:, 0])
            fresh = jnp.argmax(chance, axis=-1)
            return (fresh, caches), (fresh, x[:, 0], jnp.max(chance, axis=-1))

        (_, first), (guess, state, sure) = lax.scan(draft, (word, first), jnp.arange(drafts + 1))
        guess, state, sure = guess.T, jnp.swapaxes(state, 0, 1), sure.T
        place = count[:, None] + jnp.arange(drafts + 1)
        x, second = lax.scan(lambda x, z: layer(x, z, place), state, (p["late"], *second))
        chance = logp(x)
        true = jnp.argmax(chance, axis=-1)
        good = jnp.cumprod(guess[:, :drafts] == true[:, :drafts], axis=1)
        held = jnp.sum(good, axis=1)
        text = jnp.where(jnp.arange(drafts + 1) <= held[:, None], true, -1)
        theirs = jnp.take_along_axis(chance, guess[..., None], axis=-1)[..., 0]
        last = jnp.take_along_axis(text, held[:, None], axis=1)[:, 0]
        return text, held, last, count + held + 1, sure, theirs, first, second

    shapes = {"norm1": (n,), "norm2": (n,), "q": (n, h * d), "k": (n, groups * d), "v": (n, groups * d)}
    shapes |= {"out": (h * d, n), "gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    rest = stack_of(late, dtype, **shapes)
    for name in ("out", "down"):
        rest[name] = normal(*rest[name].shape, dtype=dtype, scale=0.06 * rest[name].scale)
    p = ends_of(words, n, dtype) | {"early": stack_of(early, dtype, **shapes), "late": rest}
    caches = [(normal(k, b, long, groups, d, dtype=dtype),) * 2 for k in (early, late)]
    return Built(run, (p, *caches, integers(b, below=words), integers(b, below=past)))


@program("xattention-blocks-of-keys-chosen-by-sums-along-antidiagonals-prefill", GROUP)
def _antidiagonals(size: Size) -> Built:
    """This program reads a long prompt with attention to few blocks of keys, which sums along antidiagonals of scores choose.

    It is XAttention (Xu, 2025; mit-han-lab/x-attention) in a model like Llama: queries and keys are joined by strides in opposite
    orders, a softmax over the joined rows tells shares of blocks, and each row of blocks keeps the fewest that make up most.
    """
    long, block, stride, most, n, h, groups, d, wide, depth, words = pick(
        size,
        (8192, 128, 8, 16, 2048, 16, 4, 128, 5632, 2, 32000),
        (512, 32, 4, 6, 256, 4, 2, 64, 640, 2, 4001),
        (32, 8, 4, 2, 16, 4, 2, 8, 24, 2, 11),
    )
    dtype, blocks, few = half(size), long // block, long // stride

    def run(p, word, level):
        """This gives logarithms of chances of the next word, the best words, shares of blocks that are read, and their cover."""
        place = jnp.arange(long)
        level = 0.8 + 0.15 * jax.nn.sigmoid(level)

        def chosen(query, key, level):
            """This tells which blocks [h, blocks, most] are read, which of them count, and how much they cover."""
            back = query.reshape(few, stride, h, d)[:, ::-1]
            joined = jnp.einsum(
                "qsgrd,ksgd->grqk",
                back.reshape(few, stride, groups, h // groups, d),
                key.reshape(few, stride, groups, d),
                preferred_element_type=jnp.float32,
            )
            joined = joined.reshape(h, few, few) * (d**-0.5 / stride)
            joined = jnp.where(jnp.arange(few) <= jnp.arange(few)[:, None], joined, -1e9)
            share = jax.nn.softmax(joined, axis=-1).reshape(h, blocks, block // stride, blocks, block // stride)
            share = jnp.mean(jnp.sum(share, axis=4), axis=2)
            own = jnp.eye(blocks, dtype=bool) | (jnp.arange(blocks) == 0)
            top, which = lax.top_k(jnp.where(own, share + 2.0, share), most)
            top = jnp.where(top >= 2.0, top - 2.0, top)
            before = jnp.cumsum(top, axis=-1) - top
            used = (before < level[:, None, None]) | (jnp.arange(most) < 2)
            used = used & (which <= jnp.arange(blocks)[:, None])
            return which, used, jnp.sum(jnp.where(used, top, 0.0), axis=-1)

        def layer(x, q):
            """This is one layer."""
            weights, level = q
            y = rms_norm(weights["norm1"], x)
            query, key, value = (jnp.reshape(y @ weights[k], (long, -1, d)) for k in ("q", "k", "v"))
            query, key = rotary(query, place), rotary(key, place)
            which, used, cover = chosen(query, key, level)
            keys, values = (z.reshape(blocks, block, groups, d).transpose(2, 0, 1, 3) for z in (key, value))
            group = jnp.arange(h)[:, None] // (h // groups)

            def row(each):
                """This attends with one block of queries."""
                at, queries, which, used = each
                near_keys, near_values = (z[group, which].reshape(h, most * block, d) for z in (keys, values))
                scores = jnp.einsum("qhd,hkd->hqk", queries, near_keys, preferred_element_type=jnp.float32) * d**-0.5
                there = (which[..., None] * block + jnp.arange(block)).reshape(h, 1, most * block)
                mask = (there <= at[:, None]) & jnp.repeat(used, block, axis=1)[:, None]
                probs = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1).astype(dtype)
                return jnp.einsum("hqk,hkd->qhd", probs, near_values)

            rows = place.reshape(blocks, block), query.reshape(blocks, block, h, d)
            seen = lax.map(row, (*rows, which.swapaxes(0, 1), used.swapaxes(0, 1)))
            x = x + seen.reshape(long, h * d) @ weights["out"]
            y = rms_norm(weights["norm2"], x)
            x = x + (jax.nn.silu(y @ weights["gate"]) * (y @ weights["up"])) @ weights["down"]
            return x, (jnp.sum(used, axis=(1, 2)) / (blocks * (blocks + 1) / 2), jnp.mean(cover, axis=1), key, value)

        x, (read, cover, keys, values) = lax.scan(layer, p["table"][word], (p["layers"], level))
        logp = jax.nn.log_softmax((rms_norm(p["norm"], x[-1]) @ p["head"]).astype(jnp.float32), axis=-1)
        best, which = lax.top_k(logp, 5)
        return logp, best, which, read, cover, keys, values

    shapes = {"norm1": (n,), "norm2": (n,), "q": (n, h * d), "k": (n, groups * d), "v": (n, groups * d)}
    shapes |= {"out": (h * d, n), "gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    p = ends_of(words, n, dtype) | {"layers": stack_of(depth, dtype, **shapes)}
    return Built(run, (p, integers(long, below=words), normal(depth, h)))


@program("cosformer-kept-positive-rows-weighed-by-cosines-of-distance-hidden-words-guessed", GROUP)
def _cos_former(size: Size) -> Built:
    """This program guesses hidden words of long documents with an attention whose cost does not grow with the square of length.

    It is cosFormer (Qin, 2022; OpenNLPLab/cosFormer): rows are made positive by a ramp, and a cosine of the distance is split
    into products of cosines and of sines, so that two sums over keys are enough; norms lie after halves, as in RoBERTa.
    """
    b, long, n, h, wide, depth, words, hidden = pick(
        size,
        (4, 4096, 768, 12, 3072, 6, 50265, 512),
        (1, 512, 192, 6, 512, 3, 4001, 64),
        (2, 8, 8, 2, 12, 2, 11, 3),
    )
    dtype, d = half(size), n // h

    def run(p, word, short, which, instead):
        """This gives surprises of hidden words, ranks of the true ones, how sure it is, and means of documents."""
        real = jnp.arange(long) < (long - short)[:, None]
        at = jnp.sort(which % (long - short)[:, None], axis=1)
        row = jnp.arange(b)[:, None]
        true = word[row, at]
        swap = jnp.where(instead < 8, 3, jnp.where(instead < 9, (true * 31 + 7) % words, true))
        word = word.at[row, at].set(swap)
        angle = jnp.pi / 2 * jnp.arange(long) / (long - short)[:, None]
        cos, sin = (f(angle)[..., None, None].astype(dtype) for f in (jnp.cos, jnp.sin))

        def layer(x, q):
            """This is one layer."""
            query, key, value = jnp.split(dense(q["qkv"], x).reshape(b, long, 3 * h, d), 3, axis=2)
            query, key = jax.nn.relu(query), jnp.where(real[..., None, None], jax.nn.relu(key), 0)
            query, key = (jnp.concatenate([z * cos, z * sin], axis=-1) for z in (query, key))
            state = jnp.einsum("bkhc,bkhd->bhcd", key, value, preferred_element_type=jnp.float32).astype(dtype)
            total = jnp.einsum("bqhc,bhc->bqh", query.astype(jnp.float32), jnp.sum(key.astype(jnp.float32), axis=1))
            y = jnp.einsum("bqhc,bhcd->bqhd", query, state, preferred_element_type=jnp.float32)
            y = (y / jnp.maximum(total, 1e-3)[..., None]).astype(dtype).reshape(b, long, n)
            x = layer_norm(q["norm1"], x + dense(q["out"], y))
            y = dense(q["down"], jax.nn.gelu(dense(q["up"], x), approximate=False))
            return layer_norm(q["norm2"], x + y), None

        x = layer_norm(p["norm"], p["table"][word] + p["places"])
        x, _ = lax.scan(layer, x, p["layers"])
        y = layer_norm(p["last"], jax.nn.gelu(dense(p["dense"], x[row, at]), approximate=False))
        logits = (y @ p["table"].T).astype(jnp.float32) * n**-0.5 + p["bias"].astype(jnp.float32)
        logp = jax.nn.log_softmax(logits, axis=-1)
        mine = jnp.take_along_axis(logp, true[..., None], axis=-1)
        rank = jnp.sum(logp > mine, axis=-1)
        weight = real[..., None].astype(jnp.float32)
        mean = jnp.sum(x.astype(jnp.float32) * weight, axis=1) / jnp.sum(weight, axis=1)
        return -mine[..., 0], rank, jnp.max(logp, axis=-1), jnp.mean(rank < 5, axis=1), mean

    def stacked(r):
        """This describes one matrix for each layer."""
        return normal(depth, *r.shape, dtype=dtype, scale=r.scale, offset=r.offset)

    layer = {"norm1": norm_of(n), "norm2": norm_of(n), "qkv": dense_of(n, 3 * n), "out": dense_of(n, n)}
    layer |= {"up": dense_of(n, wide), "down": dense_of(wide, n)}
    p = {
        "table": normal(words, n, dtype=dtype),
        "places": normal(long, n, dtype=dtype, scale=0.3),
        "norm": norm_of(n, dtype),
        "layers": jax.tree.map(stacked, layer, is_leaf=lambda r: isinstance(r, Random)),
        "dense": dense_of(n, n, dtype),
        "last": norm_of(n, dtype),
        "bias": normal(words, dtype=dtype, scale=0.1),
    }
    inputs = integers(b, long, below=words), integers(b, below=long // 2), integers(b, hidden, below=long)
    return Built(run, (p, *inputs, integers(b, hidden, below=10)))


@program("chain-of-experts-words-choose-again-after-each-round-inside-a-layer-scored-prompts", GROUP)
def _chain_of_experts(size: Size) -> Built:
    """This program scores prompts with layers in which words pass through chosen experts, choose anew, and pass through others.

    It is Chain-of-Experts (Wang, 2025; ZihanWang314/CoE): each round has a router of its own and adds to what the round before
    left, a shared expert works beside each round, and sorted words are multiplied by their experts in ragged groups.
    """
    b, long, n, h, d, wide, experts, top, rounds, depth, words = pick(
        size,
        (4, 512, 1024, 16, 64, 512, 32, 4, 2, 4, 32000),
        (2, 64, 128, 4, 32, 96, 8, 2, 2, 2, 4001),
        (1, 5, 8, 2, 4, 6, 4, 2, 2, 2, 11),
    )
    dtype, many = half(size), b * long

    def gated(x, up, down, product):
        """This is an expert: half of the wide rows open the other half."""
        gate, value = jnp.split(product(x, up), 2, axis=-1)
        return product(jax.nn.silu(gate) * value, down)

    def run(p, word, short):
        """This gives surprises of words, means of documents, loads of experts by layer and round, balances, repeated choices."""
        place = jnp.broadcast_to(jnp.arange(long), (b, long))
        mask = jnp.tril(jnp.ones((long, long), bool))
        real = (place < (long - short)[:, None]).reshape(-1)

        def turn(x, q):
            """This is one round of experts over all words."""
            score = jax.nn.softmax((x @ q["router"]).astype(jnp.float32), axis=-1)
            weight, which = lax.top_k(score, top)
            weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
            flat = which.reshape(-1)
            order = jnp.argsort(flat)
            load = jnp.zeros(experts, jnp.int32).at[flat].add(1)
            told = gated(x[order // top], q["ups"], q["downs"], lambda a, w: lax.ragged_dot(a, w, load))
            told = told * weight.reshape(-1)[order][:, None].astype(dtype)
            y = jnp.zeros_like(x).at[order // top].add(told)
            y = y + gated(x, q["up"], q["down"], jnp.matmul)
            seen = jnp.zeros(experts).at[flat].add(jnp.repeat(real, top)) / (jnp.sum(real) * top)
            mean = jnp.sum(jnp.where(real[:, None], score, 0.0), axis=0) / jnp.sum(real)
            return x + y, (which, seen, experts * jnp.sum(seen * mean))

        def layer(x, q):
            """This is one layer with its rounds."""
            y = rms_norm(q["norm1"], x) @ q["qkv"]
            query, key, value = jnp.split(y.reshape(b, long, 3 * h, d), 3, axis=2)
            y = attention(rotary(query, place), rotary(key, place), value, mask)
            x = x + y.reshape(b, long, h * d) @ q["out"]
            start = rms_norm(q["norm2"], x).reshape(many, n)
            inside = {k: q[k] for k in ("router", "ups", "downs")} | {k: q[k] for k in ("up", "down")}
            shared = {
                k: jnp.broadcast_to(inside[k], (rounds, *inside[k].shape)) for k in ("ups", "downs", "up", "down")
            }
            y, (which, load, balance) = lax.scan(turn, start, shared | {"router": inside["router"]})
            again = jnp.any(which[1:, :, :, None] == which[:-1, :, None], axis=-1)
            return x + (y - start).reshape(x.shape), (load, balance, jnp.mean(again * real[:, None], axis=(1, 2)))

        x, (load, balance, again) = lax.scan(layer, p["table"][word], p["layers"])
        x = rms_norm(p["norm"], x)
        logp = jax.nn.log_softmax((x @ p["head"]).astype(jnp.float32), axis=-1)
        surprise = -jnp.take_along_axis(logp[:, :-1], word[:, 1:, None], axis=-1)[..., 0]
        real = real.reshape(b, long)
        surprise = jnp.where(real[:, 1:], surprise, 0.0)
        mean = jnp.sum(x.astype(jnp.float32) * real[..., None], axis=1) / jnp.sum(real, axis=1)[:, None]
        return surprise, jnp.sum(surprise, axis=1) / jnp.sum(real, axis=1), mean, load, balance, again

    shapes = {"norm1": (n,), "norm2": (n,), "qkv": (n, 3 * h * d), "out": (h * d, n), "router": (rounds, n, experts)}
    shapes |= {"ups": (experts, n, 2 * wide), "downs": (experts, wide, n), "up": (n, 2 * wide), "down": (wide, n)}
    p = ends_of(words, n, dtype) | {"layers": stack_of(depth, dtype, **shapes)}
    return Built(run, (p, integers(b, long, below=words), integers(b, below=long // 2)))


@program("onebit-packed-signs-between-two-vectors-and-a-norm-layers-decode", GROUP)
def _one_bit(size: Size) -> Built:
    """This program writes next words with matrices of which only the signs are kept, packed into words of 32 bits.

    It is OneBit (Xu, 2024; xuyuzhuang11/OneBit) at the widths of Llama 2 7B: what goes in and what comes out is scaled by a vector
    for each matrix, a norm follows every product, and all else is a decoding step with a cache.
    """
    b, past, n, h, wide, depth, words = pick(
        size, (8, 1024, 4096, 32, 11008, 3, 32000), (2, 96, 256, 8, 704, 3, 4001), (2, 6, 32, 4, 64, 2, 11)
    )
    dtype, d = half(size), n // h
    shapes = {k: (n, n) for k in ("q", "k", "v", "out")} | {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}

    def product(q, name, x):
        """This multiplies rows [b, i] by signs that lie in bits [o, i / 32]."""
        bits = (q[name][..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        sign = (2 * bits.astype(jnp.int8) - 1).reshape(shapes[name][1], -1).astype(dtype)
        y = jnp.einsum("bi,oi->bo", x * q[f"{name}_in"], sign) * q[f"{name}_out"]
        return layer_norm({"scale": q[f"{name}_norm"], "shift": jnp.zeros((), dtype)}, y)

    def run(p, keys, values, word, count, heat, seed):
        """This gives drawn words, their surprises, the best five, entropies, and new rows of the caches."""
        place = count[:, None]
        seen = (jnp.arange(past) <= place)[:, None, None]
        row = jnp.arange(b)

        def layer(x, carried):
            """This is one layer."""
            q, key, value = carried
            y = rms_norm(q["norm1"], x)
            query, fresh, new = (product(q, k, y).reshape(b, 1, h, d) for k in ("q", "k", "v"))
            query, fresh = rotary(query, place), rotary(fresh, place)
            key, value = key.at[row, count].set(fresh[:, 0]), value.at[row, count].set(new[:, 0])
            x = x + product(q, "out", attention(query, key, value, seen).reshape(b, n))
            y = rms_norm(q["norm2"], x)
            x = x + product(q, "down", jax.nn.silu(product(q, "gate", y)) * product(q, "up", y))
            return x, (fresh[:, 0], new[:, 0])

        x, fresh = lax.scan(layer, p["table"][word], (p["layers"], keys, values))
        logits = (rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32)
        logp = jax.nn.log_softmax(logits / (0.5 + jax.nn.sigmoid(heat))[:, None], axis=-1)
        drawn = jax.random.categorical(jax.random.key(seed), logp, axis=-1)
        surprise = -jnp.take_along_axis(logp, drawn[:, None], axis=-1)[:, 0]
        return drawn, surprise, lax.top_k(logp, 5), -jnp.sum(jnp.exp(logp) * logp, axis=-1), fresh

    layers = stack_of(depth, dtype, norm1=(n,), norm2=(n,))
    for name, (i, o) in shapes.items():
        layers[name] = Random((depth, o, i // 32), jnp.dtype(jnp.uint32), below=2**32)
        layers[f"{name}_in"] = normal(depth, i, dtype=dtype, scale=0.2, offset=1.0)
        layers[f"{name}_out"] = normal(depth, o, dtype=dtype, scale=0.2 * i**-0.5, offset=i**-0.5)
        layers[f"{name}_norm"] = normal(depth, o, dtype=dtype, scale=0.1, offset=1.0)
    p = ends_of(words, n, dtype) | {"layers": layers}
    cache = normal(depth, b, past, h, d, dtype=dtype)
    inputs = integers(b, below=words), integers(b, below=past), normal(b), integers(below=1000)
    return Built(run, (p, cache, cache, *inputs))
