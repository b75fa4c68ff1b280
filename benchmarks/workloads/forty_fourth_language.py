"""Planes of bits, random matrices that all tuners share, neurons told ahead, the forty-fourth set: its author saw no plan."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program
from benchmarks.workloads.thirty_fifth_parts import ends_of, stack_of
from benchmarks.workloads.twenty_fifth_parts import layer_norm, rms_norm, rotary

GROUP = "forty-fourth"


@program(
    "any-precision-planes-of-bits-three-planes-draft-a-word-that-six-planes-of-the-same-weights-check-decode", GROUP
)
def _planes(size: Size) -> Built:
    """This program drafts a word with the upper bits of its weights, and checks it with all bits in one pass over two words.

    It is the Any-Precision LLM (Park, 2024; SNU-ARC/any-precision-llm) in Llama: bits of codes lie in planes, each row has a table
    of values for each number of bits, and a drafted word stays by the ratio of the two chances, else the rest is drawn from.
    """
    b, past, n, h, groups, d, wide, depth, words, few, all_bits = pick(
        size,
        (8, 1024, 4096, 32, 8, 128, 11008, 2, 32000, 3, 6),
        (4, 96, 128, 4, 2, 32, 256, 2, 2000, 3, 6),
        (2, 5, 8, 2, 1, 4, 16, 2, 11, 2, 3),
    )
    dtype = half(size)

    def unpacked(q, bits):
        """This looks up the values of a matrix [outputs, inputs] of which the first planes are read."""
        planes = q["planes"][:bits]
        bit = (planes[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
        code = sum(bit[k].astype(jnp.int32) << (bits - 1 - k) for k in range(bits))
        table = q["few"] if bits == few else q["all"]
        return jnp.take_along_axis(table, code.reshape(code.shape[0], -1), axis=1)

    def scored(p, keys, values, word, count, bits):
        """This gives logits of words [b, t] after caches of some length, and new rows."""
        t = word.shape[1]
        place = count[:, None] + jnp.arange(t)
        old = jnp.broadcast_to(jnp.arange(past) < count[:, None], (b, past))[:, None, None, None]
        inside = jnp.tril(jnp.ones((t, t), bool))

        def product(q, x):
            """This multiplies rows with a matrix of codes."""
            return jnp.einsum("btn,mn->btm", x, unpacked(q, bits))

        def layer(x, each):
            """This is one layer."""
            q, key, value = each
            y = product(q["qkv"], rms_norm(q["norm1"], x)).reshape(b, t, -1, d)
            query, fresh, new = jnp.split(y, [h, h + groups], axis=2)
            query, fresh = rotary(query, place).reshape(b, t, groups, -1, d), rotary(fresh, place)
            far = jnp.einsum("btgrd,bkgd->bgrtk", query, key, preferred_element_type=jnp.float32)
            near = jnp.einsum("btgrd,bkgd->bgrtk", query, fresh, preferred_element_type=jnp.float32)
            scores = jnp.concatenate([jnp.where(old, far, -1e9), jnp.where(inside, near, -1e9)], axis=-1) * d**-0.5
            share = jax.nn.softmax(scores, axis=-1).astype(dtype)
            y = jnp.einsum("bgrtk,bkgd->btgrd", share[..., :past], value)
            y = y + jnp.einsum("bgrtk,bkgd->btgrd", share[..., past:], new)
            x = x + product(q["out"], y.reshape(b, t, -1))
            gate, up = jnp.split(product(q["up"], rms_norm(q["norm2"], x)), 2, axis=-1)
            return x + product(q["down"], jax.nn.silu(gate) * up), (fresh, new)

        x, rows = lax.scan(layer, p["table"][word], (p["layers"], keys, values))
        return (rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32), rows

    def run(p, keys, values, word, count, seed):
        """This gives the draft and whether it stays, the words after it, both chances, how far they differ, and new rows."""
        one, two, three = jax.random.split(jax.random.key(seed), 3)
        quick, _ = scored(p, keys, values, word[:, None], count, few)
        guess = jax.nn.log_softmax(quick[:, 0] / 0.8, axis=-1)
        draft = jax.random.categorical(one, guess, axis=-1)
        exact, rows = scored(p, keys, values, jnp.stack([word, draft], axis=1), count, all_bits)
        true = jax.nn.log_softmax(exact / 0.8, axis=-1)
        pair = [jnp.take_along_axis(z, draft[:, None], axis=1)[:, 0] for z in (guess, true[:, 0])]
        stays = jnp.log(jax.random.uniform(two, (b,), minval=1e-6)) < pair[1] - pair[0]
        rest = jnp.maximum(jnp.exp(true[:, 0]) - jnp.exp(guess), 0.0)
        rest = jnp.log(rest / jnp.maximum(jnp.sum(rest, axis=-1, keepdims=True), 1e-9) + 1e-12)
        after = jax.random.categorical(three, jnp.where(stays[:, None], true[:, 1], rest), axis=-1)
        differ = jnp.sum(jnp.exp(true[:, 0]) * (true[:, 0] - guess), axis=-1)
        overlap = jnp.sum(jnp.minimum(jnp.exp(true[:, 0]), jnp.exp(guess)), axis=-1)
        return draft, stays, after, jnp.stack(pair), differ, overlap, rows, count + 1 + stays

    def codes(outputs, inputs, share=1.0):
        """This describes planes of bits and tables of a stack of matrices; few bits see a table of fewer values."""
        scale = share * inputs**-0.5
        tables = {
            k: normal(depth, outputs, 2**m, dtype=dtype, scale=scale) for k, m in (("few", few), ("all", all_bits))
        }
        return tables | {"planes": Random((depth, all_bits, outputs, inputs // 8), jnp.dtype(jnp.uint8), below=256)}

    layers = stack_of(depth, dtype, norm1=(n,), norm2=(n,))
    layers |= {"qkv": codes((h + 2 * groups) * d, n), "out": codes(n, h * d, 0.3)}
    layers |= {"up": codes(2 * wide, n), "down": codes(n, wide, 0.3)}
    cache = normal(depth, b, past, groups, d, dtype=dtype)
    p = ends_of(words, n, dtype) | {"layers": layers}
    return Built(run, (p, cache, cache, integers(b, below=words), integers(b, below=past), integers(below=1000)))


@program("vera-shared-random-matrices-with-two-vectors-of-each-tuner-sixteen-readers-of-many-tuners-decode", GROUP)
def _shared_random(size: Size) -> Built:
    """This program writes next words for readers with tuners of their own, where a tuner is only two vectors for each matrix.

    It is VeRA (Kopiczko, 2023; huggingface/peft) served in a batch in Llama 3: two random matrices are shared by all layers and cut
    to the shape of each matrix, vectors are fetched by the name of the tuner, and one name stands for no tuner at all.
    """
    b, past, n, h, groups, d, wide, rank, tuners, depth, words = pick(
        size,
        (16, 2048, 4096, 32, 8, 128, 14336, 256, 64, 3, 128256),
        (16, 128, 256, 8, 2, 32, 640, 32, 12, 2, 4003),
        (2, 5, 8, 2, 1, 4, 12, 3, 3, 2, 11),
    )
    dtype = half(size)

    def run(p, down, up, keys, values, word, count, tuner, seed):
        """This gives drawn words, surprises, entropies, how much tuners move rows by layer, and caches."""
        row, place = jnp.arange(b), count[:, None]
        seen = jnp.arange(past) <= place
        tuned = (tuner > 0)[:, None]

        def tuned_product(q, name, x):
            """This multiplies rows [b, i] with a matrix and adds the part of their tuners."""
            matrix = q[name]
            i, o = matrix.shape
            low = (x @ down[:i]) * q[name + "_low"][tuner]
            more = (low @ up[:, :o]) * q[name + "_high"][tuner]
            more = jnp.where(tuned, more, jnp.zeros_like(more))
            plain = x @ matrix
            size_ = [jnp.sqrt(jnp.mean(jnp.square(z.astype(jnp.float32)), axis=1)) for z in (more, plain)]
            return plain + more, size_[0] / (size_[1] + 1e-6)

        def layer(x, each):
            """This is one layer with its caches."""
            q, key, value = each
            y = rms_norm(q["norm1"], x)
            query, one = tuned_product(q, "q", y)
            fresh = y @ q["k"]
            new, two = tuned_product(q, "v", y)
            query, fresh, new = (z.reshape(b, 1, -1, d) for z in (query, fresh, new))
            query, fresh = rotary(query, place), rotary(fresh, place)
            key, value = key.at[row, count].set(fresh[:, 0]), value.at[row, count].set(new[:, 0])
            query = query.reshape(b, groups, h // groups, d)
            scores = jnp.einsum("bgrd,bkgd->bgrk", query, key, preferred_element_type=jnp.float32) * d**-0.5
            share = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e9), axis=-1).astype(dtype)
            y, three = tuned_product(q, "out", jnp.einsum("bgrk,bkgd->bgrd", share, value).reshape(b, -1))
            x = x + y
            y = rms_norm(q["norm2"], x)
            gate, four = tuned_product(q, "gate", y)
            y, five = tuned_product(q, "down", jax.nn.silu(gate) * (y @ q["up"]))
            return x + y, (key, value, jnp.stack([one, two, three, four, five]))

        x, (keys, values, moved) = lax.scan(layer, p["table"][word], (p["layers"], keys, values))
        logp = jax.nn.log_softmax((rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32), axis=-1)
        drawn = jax.random.categorical(jax.random.key(seed), logp / 0.7, axis=-1)
        surprise = -jnp.take_along_axis(logp, drawn[:, None], axis=-1)[:, 0]
        return drawn, surprise, -jnp.sum(jnp.exp(logp) * logp, axis=-1), moved, keys, values

    shapes = {"q": (n, h * d), "k": (n, groups * d), "v": (n, groups * d), "out": (h * d, n)}
    shapes |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    layers = stack_of(depth, dtype, norm1=(n,), norm2=(n,), **shapes)
    for name in ("q", "v", "out", "gate", "down"):
        layers |= {name + "_low": normal(depth, tuners, rank, dtype=dtype, scale=0.3, offset=0.5)}
        layers |= {name + "_high": normal(depth, tuners, shapes[name][1], dtype=dtype, scale=0.3)}
    p = ends_of(words, n, dtype) | {"layers": layers}
    most, cache = max(n, wide, h * d), normal(depth, b, past, groups, d, dtype=dtype)
    shared = normal(most, rank, dtype=dtype, scale=n**-0.5), normal(rank, most, dtype=dtype, scale=rank**-0.5)
    inputs = integers(b, below=words), integers(b, below=past), integers(b, below=tuners), integers(below=1000)
    return Built(run, (p, *shared, cache, cache, *inputs))


@program("deja-vu-small-networks-tell-a-layer-ahead-which-heads-and-neurons-will-matter-one-reader-decode", GROUP)
def _told_ahead(size: Size) -> Built:
    """This program writes the next word for one reader and fetches only those heads and neurons that small networks foretell.

    It is Deja Vu (Liu, 2023; FMInference/DejaVu) in OPT: rows of the layer before are read by a small network for neurons, one
    matrix marks heads, the best of both are gathered out of the weights, and keys and values of all heads are still kept.
    """
    past, n, h, heads, wide, neurons, low, depth, words = pick(
        size,
        (2048, 5120, 40, 20, 20480, 2048, 1024, 3, 50272),
        (256, 512, 16, 8, 2048, 320, 64, 3, 8001),
        (6, 8, 4, 2, 16, 6, 3, 2, 11),
    )
    dtype, d = half(size), n // h

    def run(p, keys, values, said, count, seed):
        """This gives the word, its surprise, chosen heads and neurons, how many fire, how sure they were, and new rows."""
        seen = jnp.arange(past) <= count

        def layer(carry, each):
            """This is one layer with its caches; what was told of it came from the input of the layer before."""
            x, before = carry
            q, key, value = each
            guess = jax.nn.relu(before @ q["tell_low"]) @ q["tell"]
            hope, neuron = lax.top_k(guess.astype(jnp.float32)[0], neurons)
            best, head = lax.top_k((before @ q["tell_head"]).astype(jnp.float32)[0], heads)
            y = layer_norm({"scale": q["norm1"], "shift": q["shift1"]}, x)
            query = jnp.einsum("n,hnd->hd", y[0], q["q"][head]) + q["q_shift"][head]
            fresh, new = (jnp.einsum("n,hnd->hd", y[0], q[k]) + q[k + "_shift"] for k in ("k", "v"))
            key, value = (
                lax.dynamic_update_slice(z, w[:, None], (0, count, 0)) for z, w in ((key, fresh), (value, new))
            )
            scores = jnp.einsum("hd,hkd->hk", query, key[head], preferred_element_type=jnp.float32) * d**-0.5
            share = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1).astype(dtype)
            y = jnp.einsum("hk,hkd->hd", share, value[head])
            z = x + jnp.einsum("hd,hdn->n", y, q["out"][head])[None] + q["out_shift"]
            y = layer_norm({"scale": q["norm2"], "shift": q["shift2"]}, z)
            y = jax.nn.relu(y @ q["up"][neuron].T + q["up_shift"][neuron])
            fires = jnp.sum(y > 0)
            z = z + y @ q["down"][neuron] + q["down_shift"]
            sharp = -jnp.sum(jax.scipy.special.xlogy(share, share).astype(jnp.float32), axis=-1)
            told = head, best, neuron.astype(jnp.int32), jnp.mean(jax.nn.sigmoid(hope)), fires, sharp, fresh, new
            return (z, x), told

        x = p["table"][said] + p["places"][count + 2]
        (x, _), told = lax.scan(layer, (x[None], x[None]), (p["layers"], keys, values))
        x = layer_norm({"scale": p["norm"], "shift": p["shift"]}, x)
        logits = (x @ p["head"]).astype(jnp.float32)[0]
        logp = jax.nn.log_softmax(logits)
        sorted_ = jnp.sort(logp)[::-1]
        edge = sorted_[jnp.argmax(jnp.cumsum(jnp.exp(sorted_)) >= 0.9)]
        drawn = jax.random.categorical(jax.random.key(seed), jnp.where(logp >= edge, logp, -1e9))
        return drawn, -logp[drawn], -jnp.sum(jnp.exp(logp) * logp), jnp.sum(logp >= edge), *told

    layers = stack_of(depth, dtype, norm1=(n,), norm2=(n,), tell_low=(n, low), tell=(low, wide), tell_head=(n, h))
    layers |= {k: normal(depth, h, n, d, dtype=dtype, scale=n**-0.5) for k in ("q", "k", "v")}
    layers |= {"out": normal(depth, h, d, n, dtype=dtype, scale=(heads * d) ** -0.5)}
    layers |= {"up": normal(depth, wide, n, dtype=dtype, scale=n**-0.5)}
    layers |= {"down": normal(depth, wide, n, dtype=dtype, scale=neurons**-0.5)}
    layers |= {k + "_shift": normal(depth, h, d, dtype=dtype, scale=0.1) for k in ("q", "k", "v")}
    layers |= {k: normal(depth, n, dtype=dtype, scale=0.1) for k in ("shift1", "shift2", "out_shift", "down_shift")}
    layers |= {"up_shift": normal(depth, wide, dtype=dtype, scale=0.1)}
    p = ends_of(words, n, dtype) | {"shift": normal(n, dtype=dtype, scale=0.1), "layers": layers}
    p |= {"places": normal(past + 2, n, dtype=dtype, scale=0.3)}
    cache = normal(depth, h, past, d, dtype=dtype)
    return Built(run, (p, cache, cache, integers(below=words), integers(below=past), integers(below=1000)))
