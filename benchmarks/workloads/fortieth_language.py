"""Trellises of weights, numbers that become texts, shared pages, ranges of names, turned states: their author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, half, integers, normal, pick, program
from benchmarks.workloads.thirty_fifth_parts import ends_of, stack_of
from benchmarks.workloads.twenty_fifth_parts import attention, dense, dense_of, layer_norm, norm_of, rms_norm, rotary

GROUP = "fortieth"


@program("qtip-two-bit-weights-on-a-bitshift-trellis-unpacked-by-computed-codes-decode", GROUP)
def _trellis(size: Size) -> Built:
    """This program writes the next words with matrices whose weights are sliding windows over a ring of packed bits.

    It is QTIP (Tseng, 2024; Cornell-RelaxML/qtip) at the sizes of Llama 3.2 1B: tiles of 16 by 16 weights are rings of 512 bits, a
    window of 16 bits at every second bit is multiplied and its four bytes are added, and Hadamard turns lie around each matrix.
    """
    b, past, n, h, groups, d, wide, depth, words = pick(
        size,
        (8, 1024, 2048, 32, 8, 64, 8192, 4, 128256),
        (2, 96, 256, 8, 2, 32, 512, 3, 4001),
        (1, 6, 16, 4, 2, 8, 32, 2, 11),
    )
    dtype, side, lanes = half(size), 16, 16
    shapes = {"q": (n, h * d), "k": (n, groups * d), "v": (n, groups * d), "out": (h * d, n)}
    shapes |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n)}

    def turned(x):
        """This turns the last axis by the matrix of Hadamard, as two smaller ones."""
        long = x.shape[-1].bit_length() - 1
        sizes = 1 << long // 2, 1 << (long - long // 2)
        one, two = (jnp.asarray(hadamard(s) / np.sqrt(s), x.dtype) for s in sizes)
        y = jnp.einsum("...ij,ik,jl->...kl", x.reshape(*x.shape[:-1], *sizes), one, two)
        return y.reshape(x.shape)

    def hadamard(s):
        """This builds the matrix of Hadamard."""
        one = np.ones((1, 1))
        while one.shape[0] < s:
            one = np.block([[one, one], [one, -one]])
        return one

    def unpacked(bits, i, o):
        """This opens rings of bits [tiles, 16] to a matrix [i, o]."""
        after = jnp.roll(bits, -1, axis=-1)
        at = jnp.arange(0, 32, 2, dtype=jnp.uint32)
        window = (bits[..., None] << at) | ((after[..., None] >> 1) >> (31 - at))
        state = (window >> 16) * jnp.uint32(34038481) + jnp.uint32(76625530)
        total = sum((state >> k) & 0xFF for k in (0, 8, 16, 24)).astype(jnp.int32)
        tile = ((total - 510).astype(jnp.float32) / 147.8).astype(dtype)
        tile = tile.reshape(i // side, o // side, side, side)
        return tile.swapaxes(1, 2).reshape(i, o)

    def product(q, name, x):
        """This multiplies rows by a turned matrix of two bits."""
        i, o = shapes[name]
        y = turned(x * q[f"{name}_in"]) @ unpacked(q[name], i, o)
        return turned(y) * q[f"{name}_out"]

    def run(p, keys, values, word, count):
        """This gives the chances of next words, the best ones, and new rows of the caches."""
        place = count[:, None]
        seen = (jnp.arange(past) <= place)[:, None, None]

        def layer(x, carried):
            """This is one layer."""
            q, key, value = carried
            y = rms_norm(q["norm1"], x)
            query, fresh, new = (product(q, k, y).reshape(b, 1, -1, d) for k in ("q", "k", "v"))
            query, fresh = rotary(query, place), rotary(fresh, place)
            row = jnp.arange(b)
            key, value = key.at[row, count].set(fresh[:, 0]), value.at[row, count].set(new[:, 0])
            many = (jnp.repeat(z, h // groups, axis=2) for z in (key, value))
            x = x + product(q, "out", attention(query, *many, seen).reshape(b, h * d))
            y = rms_norm(q["norm2"], x)
            x = x + product(q, "down", jax.nn.silu(product(q, "gate", y)) * product(q, "up", y))
            return x, (fresh, new)

        x, fresh = lax.scan(layer, p["table"][word], (p["layers"], keys, values))
        logits = (rms_norm(p["norm"], x) @ p["table"].T).astype(jnp.float32) * n**-0.5
        best, which = lax.top_k(jax.nn.log_softmax(logits, axis=-1), 5)
        return logits, best, which, fresh

    layers = stack_of(depth, dtype, norm1=(n,), norm2=(n,))
    for name, (i, o) in shapes.items():
        layers[name] = Random((depth, i * o // 256, lanes), jnp.dtype(jnp.uint32), below=2**32)
        layers[f"{name}_in"] = normal(depth, i, dtype=dtype, scale=0.1, offset=1.0)
        layers[f"{name}_out"] = normal(depth, o, dtype=dtype, scale=i**-0.5)
    p = {
        "table": normal(words, n, dtype=dtype),
        "norm": normal(n, dtype=dtype, scale=0.1, offset=1.0),
        "layers": layers,
    }
    cache = normal(depth, b, past, groups, d, dtype=dtype)
    return Built(run, (p, cache, cache, integers(b, below=words), integers(b, below=past)))


@program("arithmetic-sampling-each-text-unfolds-one-number-of-a-shifted-lattice-decode-scan", GROUP)
def _arithmetic(size: Size) -> Built:
    """This program writes many different texts per prompt: each text is what one number between nought and one stands for.

    It is arithmetic sampling (Vilnis, 2023): numbers lie evenly with one random shift, the word is where the number
    falls among summed chances, and the number is stretched to what is left of it, so that texts need not know of each other.
    """
    b, texts, past, steps, n, h, d, depth, words = pick(
        size,
        (4, 32, 512, 8, 1024, 16, 64, 3, 50304),
        (2, 8, 64, 4, 192, 6, 32, 3, 4001),
        (1, 3, 4, 2, 8, 2, 8, 2, 11),
    )
    dtype, part = half(size), d // 4

    def turned(x, place):
        """This turns a quarter of each head by places, as GPT-NeoX does."""
        return jnp.concatenate([rotary(x[..., :part], place), x[..., part:]], axis=-1)

    def run(p, keys, values, word, count, heat, seed):
        """This gives texts, their surprise, what is left of numbers, how varied texts are, and how often words are shared."""
        code = (jnp.arange(texts) + jax.random.uniform(jax.random.key(seed), (b, 1))) / texts
        before = jnp.arange(past) < 1 + count[:, None]
        heat = 0.5 + jax.nn.sigmoid(heat)[:, None, None]

        def step(carry, at):
            """This reads one word of each text and finds the next."""
            word, code, own_keys, own_values = carry
            place = jnp.broadcast_to((1 + count + at)[:, None], (b, texts))
            mask = jnp.concatenate([before, jnp.broadcast_to(jnp.arange(steps) <= at, (b, steps))], axis=1)

            def layer(x, carried):
                """This is one layer whose two halves run beside each other."""
                q, key, value, own_key, own_value = carried
                y = layer_norm(q["norm1"], x)
                query, fresh, new = jnp.split(dense(q["qkv"], y).reshape(b, texts, 3 * h, d), 3, axis=2)
                query, fresh = turned(query, place), turned(fresh, place)
                own_key = lax.dynamic_update_slice_in_dim(own_key, fresh[:, :, None], at, axis=2)
                own_value = lax.dynamic_update_slice_in_dim(own_value, new[:, :, None], at, axis=2)
                shared = jnp.einsum("bthd,bkhd->bthk", query, key, preferred_element_type=jnp.float32)
                own = jnp.einsum("bthd,btkhd->bthk", query, own_key, preferred_element_type=jnp.float32)
                scores = jnp.concatenate([shared, own], axis=-1) * d**-0.5
                probs = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e9), axis=-1).astype(dtype)
                out = jnp.einsum("bthk,bkhd->bthd", probs[..., :past], value)
                out = out + jnp.einsum("bthk,btkhd->bthd", probs[..., past:], own_value)
                out = dense(q["out"], out.reshape(b, texts, h * d))
                y = layer_norm(q["norm2"], x)
                return x + out + dense(q["down"], jax.nn.gelu(dense(q["up"], y))), (own_key, own_value)

            carried = p["layers"], keys, values, own_keys, own_values
            x, (own_keys, own_values) = lax.scan(layer, p["table"][word], carried)
            logits = (layer_norm(p["norm"], x) @ p["head"]).astype(jnp.float32) / heat
            logp = jax.nn.log_softmax(logits, axis=-1)
            summed = jnp.cumsum(jnp.exp(logp), axis=-1)
            summed = summed / summed[..., -1:]
            fresh = jnp.minimum(jnp.sum(summed <= code[..., None], axis=-1), words - 1)
            high = jnp.take_along_axis(summed, fresh[..., None], axis=-1)[..., 0]
            low = jnp.take_along_axis(summed, jnp.maximum(fresh - 1, 0)[..., None], axis=-1)[..., 0]
            low = jnp.where(fresh > 0, low, 0.0)
            code = jnp.clip((code - low) / jnp.maximum(high - low, 1e-9), 0.0, 1 - 1e-6)
            surprise = -jnp.take_along_axis(logp, fresh[..., None], axis=-1)[..., 0]
            return (fresh, code, own_keys, own_values), (fresh, surprise)

        own = jnp.zeros((depth, b, texts, steps, h, d), dtype)
        carry = (jnp.broadcast_to(word[:, None], (b, texts)), code, own, own)
        (_, code, _, _), (text, surprise) = lax.scan(step, carry, jnp.arange(steps))
        text, surprise = jnp.moveaxis(text, 0, 2), jnp.moveaxis(surprise, 0, 2)
        same = text[:, :, None] == text[:, None]
        prefix = jnp.mean(jnp.cumprod(same.astype(jnp.int32), axis=-1).astype(jnp.float32), axis=(1, 2))
        order = jnp.sort(text.reshape(b, -1), axis=1)
        varied = 1 + jnp.sum(order[:, 1:] != order[:, :-1], axis=1)
        return text, surprise, code, varied / (texts * steps), prefix

    def stacked(r):
        """This describes one matrix for each layer."""
        return normal(depth, *r.shape, dtype=dtype, scale=r.scale, offset=r.offset)

    layer = {"norm1": norm_of(n), "norm2": norm_of(n), "qkv": dense_of(n, 3 * h * d), "out": dense_of(h * d, n)}
    layer |= {"up": dense_of(n, 4 * n), "down": dense_of(4 * n, n)}
    layers = jax.tree.map(stacked, layer, is_leaf=lambda r: isinstance(r, Random))
    p = ends_of(words, n, dtype) | {"norm": norm_of(n, dtype), "layers": layers}
    cache = normal(depth, b, past, h, d, dtype=dtype)
    return Built(
        run, (p, cache, cache, integers(b, below=words), integers(b, below=past), normal(b), integers(below=1000))
    )


@program("prompt-chunks-and-next-words-share-one-batch-over-eight-bit-float-pages-by-slots", GROUP)
def _mixed_batch(size: Size) -> Built:
    """This program reads chunks of some prompts and the next words of other texts in one batch, over pages of eight-bit floats.

    It is one step of a server with chunked prefill (Agrawal, 2023; vllm-project/vllm) and a model like Qwen3: rows of all requests
    are multiplied at once, keys and values go to slots of pages with a scale for each head, and last rows draw words by top-p.
    """
    chunks, long, texts, pages, page, n, h, groups, d, wide, depth, words = pick(
        size,
        (3, 256, 64, 72, 16, 2048, 16, 8, 128, 6144, 3, 151936),
        (2, 24, 6, 12, 8, 192, 6, 2, 32, 512, 2, 4001),
        (1, 3, 2, 3, 4, 8, 2, 1, 4, 12, 2, 11),
    )
    dtype, kind = half(size), jnp.float8_e4m3fn
    requests, rows, most = chunks + texts, chunks * long + texts, pages * page
    everywhere = requests * pages

    def run(p, cache, scales, block, word, done, heat, seed):
        """This gives drawn words, their chances, new caches, and how much of each cached row is cut off."""
        first = done[:chunks] % (most - long)
        place = jnp.concatenate([(first[:, None] + jnp.arange(long)).reshape(-1), done[chunks:] % most])
        request = jnp.concatenate([jnp.repeat(jnp.arange(chunks), long), chunks + jnp.arange(texts)])
        slot = block.reshape(requests, pages)[request, place // page] * page + place % page

        def read(flat, scale, one, two):
            """This gathers the pages of requests [many, most, groups, d]."""
            rows = flat[block.reshape(requests, pages)[one:two]].reshape(two - one, most, groups, d)
            return (rows.astype(jnp.float32) * scale[:, None]).astype(dtype)

        def seen(query, key, value, at):
            """This attends with groups of heads [many, rows, h, d] to all places up to their own."""
            many, k = query.shape[:2]
            query = query.reshape(many, k, groups, h // groups, d)
            scores = jnp.einsum("bqgrd,bkgd->bgrqk", query, key, preferred_element_type=jnp.float32) * d**-0.5
            scores = jnp.where((jnp.arange(most) <= at[..., None])[:, None, None], scores, -1e9)
            probs = jax.nn.softmax(scores, axis=-1).astype(dtype)
            return jnp.einsum("bgrqk,bkgd->bqgrd", probs, value).reshape(many * k, h * d)

        def layer(x, carried):
            """This is one layer over all rows."""
            q, both, scale = carried
            y = rms_norm(q["norm1"], x) @ q["qkv"]
            query, key, value = jnp.split(y.reshape(rows, h + 2 * groups, d), [h, h + groups], axis=1)
            query, key = rotary(rms_norm(q["norm_q"], query), place), rotary(rms_norm(q["norm_k"], key), place)
            kept, scale = [], 0.01 + jnp.abs(scale)
            for k, fresh in enumerate((key, value)):
                small = fresh.astype(jnp.float32) / scale[k][:, None]
                cut = jnp.clip(small, -448.0, 448.0).astype(kind)
                flat = both[k].reshape(everywhere * page, groups, d).at[slot].set(cut)
                kept.append(flat.reshape(everywhere, page, groups, d))
            where = chunks * long
            parts = []
            for one, two, some, at in (
                (0, chunks, query[:where].reshape(chunks, long, h, d), place[:where].reshape(chunks, long)),
                (chunks, requests, query[where:, None], place[where:, None]),
            ):
                parts.append(seen(some, *(read(z, scale[k], one, two) for k, z in enumerate(kept)), at))
            x = x + jnp.concatenate(parts) @ q["out"]
            y = rms_norm(q["norm2"], x)
            lost = jnp.mean(jnp.abs(small - cut.astype(jnp.float32)))
            return x + (jax.nn.silu(y @ q["gate"]) * (y @ q["up"])) @ q["down"], (jnp.stack(kept), lost)

        x, (cache, lost) = lax.scan(layer, p["table"][word], (p["layers"], cache, scales))
        last = jnp.concatenate([(jnp.arange(chunks) + 1) * long - 1, chunks * long + jnp.arange(texts)])
        logits = (rms_norm(p["norm"], x[last]) @ p["head"]).astype(jnp.float32)
        logits = logits / (0.3 + jax.nn.sigmoid(heat))[:, None]
        top, which = lax.top_k(jax.nn.log_softmax(logits, axis=-1), min(64, words))
        before = jnp.cumsum(jnp.exp(top), axis=-1) - jnp.exp(top)
        noise = jax.random.gumbel(jax.random.key(seed), top.shape)
        drawn = jnp.argmax(jnp.where(before < 0.9, top, -jnp.inf) + noise, axis=-1)[:, None]
        chosen = (jnp.take_along_axis(z, drawn, axis=-1)[:, 0] for z in (which, top))
        return *chosen, cache, lost

    shapes = {"norm1": (n,), "norm2": (n,), "norm_q": (d,), "norm_k": (d,), "qkv": (n, (h + 2 * groups) * d)}
    shapes |= {"out": (h * d, n), "gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    p = ends_of(words, n, dtype) | {"layers": stack_of(depth, dtype, **shapes)}
    cache = normal(depth, 2, everywhere, page, groups, d, dtype=kind, scale=20.0)
    inputs = integers(everywhere, below=everywhere, distinct=True), integers(rows, below=words)
    counts = integers(requests, below=most), normal(requests), integers(below=1000)
    return Built(run, (p, cache, normal(depth, 2, groups, scale=0.05), *inputs, *counts))


@program("tiger-generative-retrieval-names-of-items-by-beams-over-ranges-of-a-sorted-table", GROUP)
def _names_of_items(size: Size) -> Built:
    """This program recommends items by writing their names of four codes, and only names that exist can be written.

    It is TIGER (Rajput, 2023): an encoder reads the names of what users had, a decoder writes names by beams, and a beam knows its
    range in the sorted table of all names, so that codes that lead nowhere are ruled out by searches.
    """
    b, items, history, beams, n, h, d, wide, depth, codes = pick(
        size,
        (192, 300000, 20, 24, 128, 6, 64, 1024, 4, 256),
        (8, 4000, 8, 8, 64, 4, 16, 160, 2, 32),
        (2, 20, 2, 3, 8, 2, 4, 12, 2, 4),
    )
    dtype, levels, inner = half(size), 4, h * d

    def looked(q, x, y, mask, bias=0.0):
        """This is attention without biases and scaling, as in T5: x [rows, length, n] looks at y."""
        query = (rms_norm(q["norm"], x) @ q["q"]).reshape(*x.shape[:2], h, d)
        key, value = ((y @ q[k]).reshape(*y.shape[:2], h, d) for k in ("k", "v"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * d**-0.5 + bias
        probs = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1).astype(dtype)
        return x + jnp.einsum("bhqk,bkhd->bqhd", probs, value).reshape(*x.shape[:2], inner) @ q["o"]

    def bent(q, x):
        """This is the layer after attention."""
        return x + jax.nn.relu(rms_norm(q["norm"], x) @ q["up"]) @ q["down"]

    def run(p, table, had, short, wanted):
        """This gives items with their scores, the hits of wanted items, and how many codes were open by level."""
        place = codes ** jnp.arange(levels - 1, -1, -1, dtype=jnp.uint32)
        name = jnp.sum(table.astype(jnp.uint32) * place, axis=1)
        order = jnp.argsort(name)
        name, table = name[order], table[order]
        offset = jnp.arange(levels) * codes
        text = (table[had] + offset).reshape(b, history * levels)
        real = jnp.repeat(jnp.arange(history) < history - short[:, None], levels, axis=1)[:, None, None]
        bias = jnp.moveaxis(
            p["bias"][jnp.abs(jnp.arange(history * levels)[:, None] - jnp.arange(history * levels))], -1, 0
        )

        def encode(x, q):
            """This is one layer of the encoder."""
            x = looked(q["self"], x, rms_norm(q["self"]["norm"], x), real, bias.astype(jnp.float32))
            return bent(q["mlp"], x), None

        seen, _ = lax.scan(encode, p["table"][text], p["encoder"])
        seen = rms_norm(p["norm1"], seen)
        many = jnp.repeat(seen, beams, axis=0), jnp.repeat(real, beams, axis=0)

        said = jnp.zeros((b, beams, 0), jnp.int32)
        score = jnp.where(jnp.arange(beams) == 0, 0.0, -1e9) + jnp.zeros((b, 1))
        prefix, opened = jnp.zeros((b, beams), jnp.uint32), []
        for level in range(levels):
            start = jnp.full((b, beams, 1), levels * codes)
            whole = jnp.concatenate([start, said + offset[:level]], axis=-1).reshape(b * beams, level + 1)
            causal = jnp.tril(jnp.ones((level + 1, level + 1), bool))

            def decode(x, q, causal=causal):
                """This is one layer of the decoder."""
                x = looked(q["self"], x, rms_norm(q["self"]["norm"], x), causal)
                return bent(q["mlp"], looked(q["cross"], x, many[0], many[1])), None

            x, _ = lax.scan(decode, p["table"][whole], p["decoder"])
            logits = (rms_norm(p["norm2"], x[:, -1]) @ p["head"][level]).astype(jnp.float32).reshape(b, beams, codes)
            step = np.uint32(codes ** (levels - 1 - level))
            edge = prefix[..., None] + jnp.arange(codes, dtype=jnp.uint32) * step
            low = jnp.searchsorted(name, edge, side="left")
            high = jnp.searchsorted(name, edge + (step - np.uint32(1)), side="right")
            good = high > low
            opened.append(jnp.mean(jnp.sum(good, axis=-1), axis=-1))
            logp = jax.nn.log_softmax(jnp.where(good, logits, -1e9), axis=-1)
            total = jnp.where(good, score[..., None] + logp, -1e9).reshape(b, -1)
            score, which = lax.top_k(total, beams)
            row, code = which // codes, which % codes
            said = jnp.take_along_axis(said, row[..., None], axis=1)
            said = jnp.concatenate([said, code[..., None]], axis=-1)
            prefix = jnp.take_along_axis(edge.reshape(b, -1), which, axis=1)
        at = jnp.minimum(jnp.searchsorted(name, prefix), items - 1)
        shared = jnp.searchsorted(name, prefix, side="right") - at
        hit = (name[wanted][:, None] == prefix) & (score > -1e8)
        rank = jnp.argmax(hit, axis=1)
        gain = jnp.where(jnp.any(hit, axis=1), 1.0 / jnp.log2(rank + 2.0), 0.0)
        return order[at], score, shared, hit, gain, jnp.stack(opened, axis=1)

    look = {"norm": (n,), "q": (n, inner), "k": (n, inner), "v": (n, inner), "o": (inner, n)}
    parts = {"self": look, "cross": look, "mlp": {"norm": (n,), "up": (n, wide), "down": (wide, n)}}
    p = {
        "table": normal(levels * codes + 1, n, dtype=dtype),
        "head": normal(levels, n, codes, dtype=dtype, scale=2 * n**-0.5),
    }
    for side, names in (("encoder", ("self", "mlp")), ("decoder", ("self", "cross", "mlp"))):
        p[side] = {k: stack_of(depth, dtype, **parts[k]) for k in names}
    p |= {"bias": normal(history * levels, h, dtype=dtype, scale=0.3)}
    p |= {k: normal(n, dtype=dtype, scale=0.1, offset=1.0) for k in ("norm1", "norm2")}
    inputs = integers(items, levels, below=codes), integers(b, history, below=items), integers(b, below=history)
    return Built(run, (p, *inputs, integers(b, below=items)))


@program("mamba3-trapezoid-steps-and-states-turned-by-data-in-chunks-scored-words", GROUP)
def _turned_states(size: Size) -> Built:
    """This program scores words with layers whose states decay, turn by angles that words choose, and take in two words at a time.

    It is Mamba-3 (2025; state-spaces/mamba): a gate weighs the new word against the one before (the rule of trapezoids), keys and
    queries of states have norms and biases and are turned, nothing is convolved, and chunks hand on their states.
    """
    b, t, chunk, n, h, d, state, wide, depth, words = pick(
        size,
        (4, 2048, 128, 1024, 32, 64, 128, 2816, 4, 32000),
        (1, 192, 32, 160, 5, 32, 32, 400, 3, 4001),
        (1, 8, 4, 8, 2, 4, 4, 12, 2, 11),
    )
    dtype, inner, pieces = half(size), h * d, t // chunk
    sizes = np.cumsum([inner, inner, state, state, h, h, h])

    def mixed(q, x):
        """This is the layer of states; it also gives the last states [b, h, state, d]."""
        parts = jnp.split(rms_norm(q["norm1"], x) @ q["enter"], sizes, axis=-1)
        gate, value, key, query = parts[:4]
        step, fade, share, angle = (z.astype(jnp.float32) for z in parts[4:])
        step = jax.nn.softplus(step + q["step"].astype(jnp.float32))
        loss = -step * (0.01 + jax.nn.softplus(fade))
        share = jax.nn.sigmoid(share)
        turn = jnp.cumsum(step[..., None] * jnp.tanh(angle)[:, :, None] * jnp.pi, axis=1)

        def turned(z, bias, norm):
            """This gives each head its own bias and turns pairs of states by summed angles."""
            z = rms_norm(norm, z)[:, :, None].astype(jnp.float32) + bias.astype(jnp.float32)
            one, two = jnp.split(z, 2, axis=-1)
            cos, sin = jnp.cos(turn), jnp.sin(turn)
            z = jnp.concatenate([one * cos - two * sin, one * sin + two * cos], axis=-1)
            return z.reshape(b, pieces, chunk, h, state).astype(dtype)

        key, query = turned(key, q["bias_k"], q["norm_k"]), turned(query, q["bias_q"], q["norm_q"])
        value = value.reshape(b, pieces, chunk, h, d)
        after = jnp.pad(((1 - share) * step)[:, 1:], ((0, 0), (0, 1), (0, 0)))
        now, both = share * step, share * step + after
        loss, now, both = (z.reshape(b, pieces, chunk, h) for z in (loss, now, both))
        summed = jnp.cumsum(loss, axis=2)
        gap = summed[:, :, :, None] - summed[:, :, None]
        lower = jnp.tril(jnp.ones((chunk, chunk), bool))[..., None]
        weigh = jnp.exp(jnp.where(lower, gap, -jnp.inf)) * both[:, :, None]
        weigh = jnp.where(jnp.eye(chunk, dtype=bool)[..., None], now[:, :, :, None], weigh)
        scores = jnp.einsum("bcqhs,bckhs->bcqkh", query, key, preferred_element_type=jnp.float32)
        near = jnp.einsum("bcqkh,bckhd->bcqhd", (scores * weigh).astype(dtype), value)
        rest = (jnp.exp(summed[:, :, -1:] - summed) * both).astype(dtype)
        fresh = jnp.einsum("bckhs,bckh,bckhd->bchsd", key, rest, value, preferred_element_type=jnp.float32)

        def hand_on(kept, each):
            """This hands the states of a chunk on to the next."""
            fade, new = each
            return kept * jnp.exp(fade)[..., None, None] + new, kept

        moved = jnp.moveaxis(summed[:, :, -1], 1, 0), jnp.moveaxis(fresh, 1, 0)
        last, before = lax.scan(hand_on, jnp.zeros((b, h, state, d)), moved)
        before = jnp.moveaxis(before, 0, 1).astype(dtype)
        far = jnp.einsum("bcqhs,bchsd,bcqh->bcqhd", query, before, jnp.exp(summed).astype(dtype))
        y = near + far + value * q["skip"][:, None]
        return x + (y.reshape(b, t, inner) * jax.nn.silu(gate)) @ q["leave"], last

    def run(p, text, short):
        """This gives surprises of words, their mean by texts, and the last states of layers."""
        real = jnp.arange(t) < t - short[:, None]

        def layer(x, q):
            """This is one layer of states and one gated layer."""
            x, last = mixed(q, x)
            y = rms_norm(q["norm2"], x)
            return x + (jax.nn.silu(y @ q["gate"]) * (y @ q["up"])) @ q["down"], last

        x, last = lax.scan(layer, p["table"][text[:, :-1]], p["layers"])
        logits = (rms_norm(p["norm"], x) @ p["head"]).astype(jnp.float32)
        whole = jax.nn.logsumexp(logits, axis=-1)
        surprise = whole - jnp.take_along_axis(logits, text[:, 1:, None], axis=-1)[..., 0]
        surprise = jnp.where(real, surprise, 0.0)
        return surprise, jnp.sum(surprise, axis=1) / jnp.sum(real, axis=1), last

    shapes = {
        "norm1": (n,),
        "enter": (n, int(sizes[-1]) + state // 2),
        "norm_k": (state,),
        "norm_q": (state,),
        "skip": (h,),
    }
    shapes |= {"leave": (inner, n), "norm2": (n,), "gate": (n, wide), "up": (n, wide), "down": (wide, n)}
    layers = stack_of(depth, dtype, **shapes)
    layers |= {k: normal(depth, h, state, dtype=dtype, scale=0.2, offset=1.0) for k in ("bias_k", "bias_q")}
    layers["step"] = normal(depth, h, dtype=dtype, offset=-3.0)
    p = ends_of(words, n, dtype) | {"layers": layers}
    return Built(run, (p, integers(b, t + 1, below=words), integers(b, below=t // 2)))
