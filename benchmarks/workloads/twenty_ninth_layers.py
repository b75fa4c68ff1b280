"""Small blocks, a tape, halting units and sums of powers, the twenty-ninth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, gain, half, integers, normal, pick, program, weight
from benchmarks.workloads.twenty_fifth_parts import attention, layer_norm, norm_of, rms_norm, rotary
from benchmarks.workloads.twenty_sixth_parts import drawn

GROUP = "twenty-ninth"


@program("matrices-as-two-rounds-of-small-blocks-with-a-shuffle-gated-layer", GROUP)
def _blocks(size: Size) -> Built:
    """This puts padded texts through layers whose matrices are two rounds of small blocks with a shuffle between them.

    It is Monarch (Dao, 2022; HazyResearch/fly): each round multiplies blocks of columns by themselves, and the shuffle lets every
    output hear every input; words hear their neighbours by a short convolution, and texts are averaged in the end.
    """
    b, t, n, wide, blocks, depth = pick(
        size, (16, 509, 2048, 6144, 16, 3), (3, 173, 256, 768, 8, 2), (2, 5, 16, 32, 4, 2)
    )
    dtype, reach = half(size), 4

    def product(q, x):
        """This multiplies by both rounds of blocks: [k, q, p] and [l, s, r] with k q = l r."""
        y = jnp.einsum("...kp,kqp->...kq", x.reshape(*x.shape[:-1], q["one"].shape[0], -1), q["one"])
        many, _, inner = q["two"].shape
        y = y.reshape(*x.shape[:-1], inner, many).swapaxes(-1, -2)
        y = jnp.einsum("...lr,lsr->...sl", y, q["two"])
        return y.reshape(*x.shape[:-1], -1) + q["b"]

    def near(q, x, real):
        """This sums up words before, each channel with its own few weights."""
        x = jnp.where(real[..., None], x, 0)
        padded = jnp.pad(x, ((0, 0), (reach - 1, 0), (0, 0)))
        return sum(padded[:, k : k + t] * q[k] for k in range(reach))

    def layer(x, q, real):
        """This is one layer."""
        y = layer_norm(q["norm1"], x)
        x = x + jax.nn.silu(near(q["near"], y, real)) * product(q["mix"], y)
        y = layer_norm(q["norm2"], x)
        gate = jax.nn.gelu(product(q["gate"], y))
        return x + product(q["down"], gate * product(q["up"], y))

    def run(p, x, length):
        """This runs all layers and tells the mean word of each text."""
        real = jnp.arange(t) < 1 + length[:, None]

        def one(x, q):
            """This is one layer, and how large its words are."""
            x = layer(x, q, real)
            return x, jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=(1, 2)))

        x, large = lax.scan(one, x, p["layers"])
        y = layer_norm(p["norm"], x).astype(jnp.float32)
        mean = jnp.sum(jnp.where(real[..., None], y, 0.0), axis=1) / (1 + length[:, None])
        unit = mean * lax.rsqrt(jnp.sum(mean * mean, axis=-1, keepdims=True) + 1e-9)
        return unit, unit @ unit.T, large

    def blocks_of(i, o):
        """This describes both rounds of a matrix."""
        middle = min(i, o)
        one = normal(depth, blocks, middle // blocks, i // blocks, dtype=dtype, scale=(i // blocks) ** -0.5)
        two = normal(depth, blocks, o // blocks, middle // blocks, dtype=dtype, scale=(middle // blocks) ** -0.5)
        return {"one": one, "two": two, "b": normal(depth, o, dtype=dtype, scale=0.1)}

    def norms():
        """This describes the norms of all layers."""
        return {
            "scale": normal(depth, n, dtype=dtype, scale=0.1, offset=1.0),
            "shift": normal(depth, n, dtype=dtype, scale=0.1),
        }

    q = {"norm1": norms(), "norm2": norms(), "near": normal(depth, reach, n, dtype=dtype, scale=0.5)}
    q |= {"mix": blocks_of(n, n), "gate": blocks_of(n, wide), "up": blocks_of(n, wide), "down": blocks_of(wide, n)}
    p = {"layers": q, "norm": norm_of(n, dtype)}
    return Built(run, (p, normal(b, t, n, dtype=dtype), integers(b, below=t)))


@program("a-tape-read-and-written-where-likeness-and-shifts-point-haiku", GROUP)
def _tape(size: Size) -> Built:
    """This reads rows of bits, writes them on a tape and tells them again while rows are hidden from it.

    It is the neural Turing machine (Graves, 2014; MarkPKCollier/NeuralTuringMachine), with haiku: heads look for like rows, mix
    with where they were, shift by convolution around the tape and sharpen; then they wipe and add.
    """
    import haiku as hk

    b, steps, bits, rows, n, deep, reads = pick(
        size, (512, 64, 8, 128, 32, 256, 2), (48, 41, 8, 64, 20, 100, 1), (2, 6, 3, 5, 4, 8, 1)
    )
    heads, shifts = reads + 1, 3
    parts = [n, 1, 1, shifts, 1]

    def controller(x, read, state):
        """This is the network that moves the heads."""
        y, state = hk.LSTM(deep)(jnp.concatenate([x, read.reshape(b, -1)], axis=-1), state)
        y = jnp.clip(y, -20.0, 20.0)
        return hk.Linear(heads * sum(parts))(y), hk.Linear(2 * n)(y), y, state

    def told(y, read):
        """This tells bits."""
        return hk.Linear(bits)(jnp.concatenate([y, read.reshape(b, -1)], axis=-1))

    move = hk.without_apply_rng(hk.transform(controller))
    tell = hk.without_apply_rng(hk.transform(told))

    def pointed(orders, tape, before):
        """This tells where the heads point: [batch, heads, rows]."""
        key, beta, gate, shift, gamma = jnp.split(orders, np.cumsum(parts)[:-1], axis=-1)
        key, beta, gate = jnp.tanh(key), jax.nn.softplus(beta), jax.nn.sigmoid(gate)
        shift, gamma = jax.nn.softmax(shift, axis=-1), 1 + jax.nn.softplus(gamma)
        long = jnp.sqrt(jnp.sum(tape * tape, axis=-1))[:, None] * jnp.sqrt(jnp.sum(key * key, axis=-1, keepdims=True))
        like = jnp.einsum("brn,bhn->bhr", tape, key) / (long + 1e-6)
        w = gate * jax.nn.softmax(beta * like, axis=-1) + (1 - gate) * before
        w = sum(shift[..., k : k + 1] * jnp.roll(w, k - 1, axis=-1) for k in range(shifts))
        w = jnp.maximum(w, 1e-9) ** gamma
        return w / jnp.sum(w, axis=-1, keepdims=True)

    def run(p, rows_of_bits, length):
        """This shows rows, hides them and judges what is told."""
        length = 1 + length
        place = jnp.arange(steps)
        shown = (place < length[:, None])[..., None]
        bit = rows_of_bits.astype(jnp.float32) * shown
        end = (place == length[:, None]).astype(jnp.float32)[..., None]
        x = jnp.concatenate([bit, end], axis=-1).swapaxes(0, 1)

        def step(carry, now):
            """This is one step of the controller and of all heads."""
            tape, read, w, state = carry
            orders, change, y, state = move.apply(p["move"], now, read, state)
            w = pointed(orders.reshape(b, heads, -1), tape, w)
            wipe, add = jnp.split(change, 2, axis=-1)
            last = w[:, -1, :, None]
            tape = tape * (1 - last * jax.nn.sigmoid(wipe)[:, None]) + last * jnp.tanh(add)[:, None]
            read = jnp.einsum("bhr,brn->bhn", w[:, :reads], tape)
            return (tape, read, w, state), (tell.apply(p["tell"], y, read), jnp.argmax(w[:, 0], axis=-1))

        state = hk.LSTMState(jnp.zeros((b, deep)), jnp.zeros((b, deep)))
        tape = jnp.broadcast_to(jnp.tanh(p["tape"]), (b, rows, n))
        read = jnp.broadcast_to(jnp.tanh(p["read"]), (b, reads, n))
        w = jnp.broadcast_to(jax.nn.softmax(p["w"], axis=-1), (b, heads, rows))
        (tape, _, w, _), (scores, at) = lax.scan(step, (tape, read, w, state), x)
        scores = scores.swapaxes(0, 1)
        source = place - 1 - length[:, None]
        asked = (source >= 0) & (source < length[:, None])
        truth = jnp.take_along_axis(bit, jnp.maximum(source, 0)[..., None], axis=1)
        lost = jnp.maximum(scores, 0) - scores * truth + jnp.log1p(jnp.exp(-jnp.abs(scores)))
        lost = jnp.sum(lost * asked[..., None], axis=(1, 2))
        wrong = jnp.sum(((scores > 0) != (truth > 0)) & asked[..., None], axis=(1, 2))
        unsure = -jnp.sum(w * jnp.log(jnp.maximum(w, 1e-12)), axis=-1)
        return lost, wrong, at.T, unsure, jnp.mean(tape, axis=1)

    def f32(*shape):
        """This is the shape of an array."""
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    key, state = jax.random.key(0), hk.LSTMState(f32(b, deep), f32(b, deep))
    p = {"move": drawn(jax.eval_shape(move.init, key, f32(b, bits + 1), f32(b, reads, n), state))}
    p |= {"tell": drawn(jax.eval_shape(tell.init, key, f32(b, deep), f32(b, reads, n)))}
    p |= {"tape": normal(rows, n, scale=0.3), "read": normal(reads, n), "w": normal(heads, rows, scale=3.0)}
    return Built(run, (p, booleans(b, steps, bits), integers(b, below=steps // 2 - 1)))


@program("a-unit-asked-again-until-its-wish-to-halt-is-full-while-haiku", GROUP)
def _halting(size: Size) -> Built:
    """This reads series with a memory that thinks about each step until all series are content, and tells how long it thought.

    It is adaptive computation time (Graves, 2016; DeNeutoy/act-tensorflow), with haiku: states are averaged by
    chances to halt, the last thought takes what is left, and a first thought is marked by a flag.
    """
    import haiku as hk

    b, steps, seen, deep, classes, most = pick(
        size, (1024, 24, 64, 512, 10, 8), (64, 32, 33, 128, 10, 6), (2, 4, 3, 6, 3, 3)
    )
    slack = 0.01

    def thought(x, state):
        """This is one thought: a gated memory and a wish to halt."""
        y, state = hk.GRU(deep)(x, state)
        return state, jax.nn.sigmoid(hk.Linear(1)(y))[:, 0]

    def head(state):
        """This gives scores of classes."""
        return hk.Linear(classes)(hk.LayerNorm(-1, True, True)(state))

    think, tell = (hk.without_apply_rng(hk.transform(f)) for f in (thought, head))

    def run(p, x, label, length):
        """This reads all steps, and judges the answers and the time they took."""

        def step(state, now):
            """This thinks about one step."""
            x, real = now

            def on(carry):
                """This tells whether one series still thinks."""
                _, _, total, _, _, k = carry
                return jnp.any((total < 1 - slack) & real) & (k < most)

            def again(carry):
                """This is one more thought of all; those that have halted get no share of it."""
                state, mean, total, rest, count, k = carry
                flag = jnp.full((b, 1), k == 0).astype(jnp.float32)
                state, wish = think.apply(p["think"], jnp.concatenate([x, flag], axis=-1), state)
                live = (total < 1 - slack) & real
                last = live & ((total + wish > 1 - slack) | (k == most - 1))
                share = jnp.where(live, jnp.where(last, 1 - total, wish), 0.0)
                rest = jnp.where(last, 1 - total, rest)
                return state, mean + share[:, None] * state, total + share, rest, count + live, k + 1

            nought = jnp.zeros(b)
            start = (state, jnp.zeros_like(state), nought, nought, jnp.zeros(b, jnp.int32), jnp.int32(0))
            _, mean, _, rest, count, k = lax.while_loop(on, again, start)
            state = jnp.where(real[:, None], mean, state)
            return state, (count, rest, k)

        real = jnp.arange(steps)[:, None] <= length
        state, (count, rest, rounds) = lax.scan(step, jnp.zeros((b, deep)), (x, real))
        logp = jax.nn.log_softmax(tell.apply(p["tell"], state), axis=-1)
        own = -jnp.take_along_axis(logp, label[:, None], axis=-1)[:, 0]
        ponder = jnp.sum(count + rest, axis=0) / (1 + length)
        often = jnp.bincount(count.reshape(-1), length=most + 1)
        return jnp.argmax(logp, axis=-1), jnp.mean(own) + 0.01 * jnp.mean(ponder), ponder, often, rounds

    def f32(*shape):
        """This is the shape of an array."""
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    key = jax.random.key(0)
    p = {"think": drawn(jax.eval_shape(think.init, key, f32(b, seen + 1), f32(b, deep)))}
    p |= {"tell": drawn(jax.eval_shape(tell.init, key, f32(b, deep)))}
    return Built(run, (p, normal(steps, b, seen), integers(b, below=classes), integers(b, below=steps)))


@program("words-kept-as-sums-of-powers-beside-a-window-of-few-decode", GROUP)
def _powers(size: Size) -> Built:
    """This writes one word for many answers with layers that keep sums of powers of keys, and layers that see few words.

    It is Based (Arora, 2024; HazyResearch/based): the exponential of a product is written as one, the product and half its square,
    so that all words before fit into one state; other layers look at a ring of 64 words, and a short convolution comes first.
    """
    b, n, h, few, d, window, wide, words = pick(
        size, (96, 2048, 16, 16, 128, 64, 5504, 50277), (4, 256, 4, 12, 64, 64, 768, 5003), (2, 8, 2, 2, 4, 4, 12, 11)
    )
    dtype, reach, terms = half(size), 3, 1 + few + few * few

    def features(x):
        """This is one, a vector and all products of two of its numbers."""
        x = x.astype(jnp.float32)
        two = (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], few * few)
        return jnp.concatenate([jnp.ones_like(x[..., :1]), x * few**-0.25, two * (2 * few) ** -0.5], axis=-1)

    def summed(q, x, state, count):
        """This adds a word to the sums and reads them; the sum of ones is the number of words."""
        query, key = (features((x @ q[k]).reshape(b, h, few)) for k in ("q", "k"))
        value = (x @ q["v"]).reshape(b, h, d).astype(jnp.float32)
        sums = state["sums"] + key[..., None] * value[..., None, :]
        keys = state["keys"] + key[..., 1:]
        under = jnp.maximum((query[..., 1:] * keys).sum(-1) + 1 + count[:, None], 1.0)
        y = (query[..., None] * sums).sum(-2) / under[..., None]
        return y.reshape(b, h * d).astype(dtype) @ q["o"], {"sums": sums, "keys": keys}

    def near(q, x, state, count):
        """This looks at the last words, which are kept in a ring."""
        rows, at = jnp.arange(b), count % window
        both = (x @ q["qk"]).reshape(b, 1, 2 * h, d)
        query, key = jnp.split(rotary(both, count[:, None]), 2, axis=2)
        keys = state["k"].at[rows, at].set(key[:, 0])
        values = state["v"].at[rows, at].set((x @ q["v"]).reshape(b, h, d))
        seen = (jnp.arange(window) <= count[:, None]) | (count[:, None] >= window)
        y = attention(query, keys, values, seen[:, None, None])
        return y.reshape(b, h * d) @ q["o"], {"k": keys, "v": values}

    def mixed(q, x, past):
        """This is a convolution over the last words, with a gate, and what is kept for the next word."""
        both = jnp.concatenate([past, x[:, None]], axis=1)
        y = jnp.einsum("btn,tn->bn", both, q["conv"], preferred_element_type=jnp.float32)
        return (y * jax.nn.silu((x @ q["gate"]).astype(jnp.float32))).astype(dtype), both[:, 1:]

    def step(p, word, state, count):
        """This puts one word of each answer through all layers."""
        x = p["table"][word]
        y, past = mixed(p["mix"], rms_norm(p["mix"]["norm"], x), state["past"])
        x, fresh = x + y, {"past": past}
        y, fresh["summed"] = summed(p["summed"], rms_norm(p["norm1"], x), state["summed"], count)
        x = x + y
        y = rms_norm(p["norm2"], x)
        x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
        y, fresh["near"] = near(p["near"], rms_norm(p["norm3"], x), state["near"], count)
        logits = jnp.einsum("bn,wn->bw", rms_norm(p["norm4"], x + y), p["table"], preferred_element_type=jnp.float32)
        best, at = lax.top_k(logits, 5)
        return at, best - jax.nn.logsumexp(logits, axis=-1, keepdims=True), fresh

    p = {k: gain(n, dtype) for k in ("norm1", "norm2", "norm3", "norm4")} | {
        "table": normal(words, n, dtype=dtype, scale=n**-0.5)
    }
    p |= {"mix": {"norm": gain(n, dtype), "conv": normal(reach, n, dtype=dtype), "gate": weight(n, n, dtype=dtype)}}
    p |= {
        "gate": weight(n, wide, dtype=dtype),
        "up": weight(n, wide, dtype=dtype),
        "down": weight(wide, n, dtype=dtype),
    }
    own = {"v": weight(n, h * d, dtype=dtype), "o": weight(h * d, n, dtype=dtype)}
    p |= {"summed": own | {k: weight(n, h * few, dtype=dtype) for k in ("q", "k")}}
    p |= {"near": own | {"qk": weight(n, 2 * h * d, dtype=dtype)}}
    sums = {"sums": normal(b, h, terms, d, scale=0.3), "keys": normal(b, h, terms - 1, scale=0.1)}
    state = {"past": normal(b, reach - 1, n, dtype=dtype), "summed": sums}
    state |= {"near": {k: normal(b, window, h, d, dtype=dtype) for k in ("k", "v")}}
    return Built(step, (p, integers(b, below=words), state, integers(b, below=3 * window)))
