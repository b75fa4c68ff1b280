"""Voices, pens, long texts and drawn sentences, read or made step by step, the thirty-second set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, normal, pick, program, weight
from benchmarks.workloads.twenty_fifth_parts import dense, dense_of, layer_norm, norm_of
from benchmarks.workloads.twenty_sixth_parts import drawn

GROUP = "thirty-second"


@program("voice-drawn-sample-by-sample-as-a-surprise-added-to-a-linear-guess", GROUP)
def _voice(size: Size) -> Built:
    """This program makes speech from a few numbers per frame, one sample after another.

    It is LPCNet (Valin and Skoglund, 2019; xiph/LPCNet): each frame gives a linear filter that guesses the next sample, a sparse
    gated unit and a small one give the chances of 256 levels of what the guess misses, and one level is drawn.
    """
    b, frames, each, n, small, c, blocks = pick(
        size, (64, 8, 24, 384, 16, 128, 10), (4, 10, 24, 256, 16, 64, 10), (2, 3, 2, 32, 3, 8, 2)
    )
    bands, order, levels, wide = 18, 16, 256, 64
    dtype = half(size)
    k, m = np.meshgrid(np.arange(bands), np.arange(bands), indexing="ij")
    cosines = (np.cos(np.pi * k * (m + 0.5) / bands) * (2 / bands) ** 0.5).astype(np.float32)
    cosines[0] *= 0.5**0.5
    at = np.linspace(0, bands - 1, 81)
    spread = np.maximum(0.0, 1 - np.abs(at[:, None] - np.arange(bands))).astype(np.float32)

    def to_level(x):
        """This gives the level of a sample between minus one and one, by the mu law."""
        y = jnp.sign(x) * jnp.log1p(255 * jnp.abs(x)) / np.log(256)
        return jnp.clip(jnp.round(128 + 128 * y), 0, 255).astype(jnp.int32)

    def of_level(level):
        """This gives the sample of a level."""
        y = (level - 128) / 128
        return jnp.sign(y) * jnp.expm1(jnp.abs(y) * np.log(256)) / 255

    def filters(cepstrum):
        """This gives the filters [..., order] that guess the next sample, from cepstra."""
        power = jnp.exp(jnp.clip(cepstrum @ cosines, -6.0, 6.0)) @ spread.T
        lag = jnp.fft.irfft(power, axis=-1)[..., : order + 1]
        lag = lag * np.exp(-0.5 * (2 * np.pi * 40 / 16000 * np.arange(order + 1)) ** 2)
        lag = lag.at[..., 0].multiply(1.001)
        a, error = jnp.zeros_like(lag).at[..., 0].set(1.0), lag[..., 0]
        for i in range(1, order + 1):
            turn = -jnp.sum(a[..., :i] * lag[..., i:0:-1], axis=-1) / error
            a = a.at[..., 1 : i + 1].add(turn[..., None] * a[..., :i][..., ::-1])
            error = error * (1 - turn**2)
        return -a[..., 1:]

    def gated(q, x, h):
        """This is a gated unit whose part from the input is already known."""
        y = h @ q["w"] + q["b"]
        r, u = jnp.split(jax.nn.sigmoid(x[..., : 2 * h.shape[-1]] + y[..., : 2 * h.shape[-1]]), 2, axis=-1)
        fresh = jnp.tanh(x[..., 2 * h.shape[-1] :] + r * y[..., 2 * h.shape[-1] :])
        return u * h + (1 - u) * fresh

    def run(p, cepstrum, period, voicing, kept, seed):
        """This makes the samples of all frames."""
        voicing = 0.5 * jnp.tanh(voicing)
        x = jnp.concatenate([cepstrum, p["period"][period], voicing[..., None]], axis=-1).astype(dtype)
        for q in p["frames"]:
            y = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
            y = jnp.concatenate([y[:, k : k + frames] for k in range(3)], axis=-1)
            x = jnp.tanh(dense(q, y))
        told = jnp.tanh(dense(p["two"], jnp.tanh(dense(p["one"], x))))
        a = filters(0.3 * cepstrum)

        mask = jnp.repeat(jnp.repeat(kept < blocks // 3 + 1, 16, axis=0), 16, axis=1)[:n, : 3 * n]
        mask = mask | (jnp.arange(n)[:, None] == jnp.arange(3 * n) % n)
        sparse = {"w": jnp.where(mask, p["large"]["w"], 0), "b": p["large"]["b"]}
        tables = jnp.einsum("klc,kco->klo", p["embed"], p["enter"])

        def sample(carry, now):
            h, g, past, surprise, key = carry
            told, a, voiced = now
            guess = jnp.sum(a * past, axis=-1)
            level = jnp.stack([to_level(past[:, 0]), to_level(guess), surprise])
            x = jnp.sum(jnp.take_along_axis(tables, level[..., None], axis=1), axis=0) + told @ p["told"]
            h = gated(sparse, x, h)
            g = gated(p["small"], dense(p["join"], jnp.concatenate([h, told], axis=-1)), g)
            both = jnp.tanh(jnp.einsum("bi,kio->bko", g, p["last"]) + p["last_b"])
            scores = jnp.sum(both * p["scale"], axis=1).astype(jnp.float32)
            scores = scores * (1 + jnp.maximum(0.0, 1.5 * voiced - 0.5))[:, None]
            chance = jnp.maximum(jax.nn.softmax(scores, axis=-1) - 0.002, 0.0)
            key, now_key = jax.random.split(key)
            course = jnp.cumsum(chance, axis=-1)
            luck = jax.random.uniform(now_key, (b, 1)) * course[:, -1:]
            surprise = jnp.minimum(jnp.sum(course <= luck, axis=-1), levels - 1)
            new = jnp.clip(guess + 0.3 * of_level(surprise), -1.0, 1.0)
            past = jnp.concatenate([new[:, None], past[:, :-1]], axis=-1)
            return (h, g, past, surprise, key), (new, surprise, jnp.max(chance, axis=-1))

        def frame(carry, now):
            return lax.scan(lambda c, _: sample(c, now), carry, None, length=each)

        start = (jnp.zeros((b, n), dtype), jnp.zeros((b, small), dtype), jnp.zeros((b, order)))
        start += (jnp.full(b, 128, jnp.int32), jax.random.key(seed))
        over = jax.tree.map(lambda z: z.swapaxes(0, 1), (told, a, voicing))
        _, (voice, level, sure) = lax.scan(frame, start, over)
        voice = voice.reshape(frames * each, b)
        loud = lax.associative_scan(
            lambda one, two: (one[0] * two[0], one[1] * two[0] + two[1]), (jnp.full_like(voice, 0.85), voice)
        )[1]
        return loud.T, level.reshape(frames * each, b).T, jnp.mean(sure, axis=(0, 1)), a

    shape = [3 * (bands + 1 + wide), 3 * c]
    p = {
        "period": normal(levels, wide, dtype=dtype),
        "frames": [dense_of(i, c, dtype) for i in shape],
        "one": dense_of(c, c, dtype),
        "two": dense_of(c, c, dtype),
        "embed": normal(3, levels, c, dtype=dtype),
        "enter": weight(3, c, 3 * n, dtype=dtype),
        "told": weight(c, 3 * n, dtype=dtype),
        "large": dense_of(n, 3 * n, dtype),
        "join": dense_of(n + c, 3 * small, dtype),
        "small": dense_of(small, 3 * small, dtype),
        "last": weight(2, small, levels, dtype=dtype),
        "last_b": normal(2, levels, dtype=dtype, scale=0.1),
        "scale": normal(2, levels, dtype=dtype, scale=1.5),
    }
    inputs = (normal(b, frames, bands), integers(b, frames, below=levels), normal(b, frames))
    kept = integers(-(-n // 16), -(-3 * n // 16), below=blocks)
    return Built(run, (p, *inputs, kept, integers(below=1000)))


@program("pen-strokes-drawn-from-blends-while-a-soft-window-slides-over-letters-haiku", GROUP)
def _pen(size: Size) -> Built:
    """This program writes given words by hand: it draws where the pen goes next until all letters are written.

    It is Graves's network of handwriting (2013; sjvasquez/handwriting-synthesis), with haiku: three units with memories, a window
    of bells that only moves on over the letters, and blends of slanted bells for the next move, drawn with some bias.
    """
    import haiku as hk

    b, letters, alphabet, n, bells, blends, steps = pick(
        size, (64, 40, 77, 400, 10, 20, 160), (3, 20, 77, 256, 10, 20, 90), (2, 5, 7, 8, 2, 3, 3)
    )

    @hk.transform
    def network(text, length, bias, prime):
        """This gives the strokes [b, steps, 3] and which of them are written."""
        one_hot = jax.nn.one_hot(text, alphabet) * (jnp.arange(letters) < length[:, None])[..., None]
        low, middle, top = (hk.LSTM(n, name=name) for name in ("low", "middle", "top"))
        window_of, blend_of = hk.Linear(3 * bells, name="window"), hk.Linear(6 * blends + 1, name="blends")
        place = jnp.arange(letters)

        def step(carry, now):
            states, at, window, stroke, done = carry
            key, given, is_given = now
            stroke = jnp.where(is_given, given, stroke)
            x, low_state = low(jnp.concatenate([stroke, window], axis=-1), states[0])
            height, sharp, move = jnp.split(jnp.exp(jnp.clip(window_of(x), -4.0, 4.0)), 3, axis=-1)
            at = at + move / 4
            shape = height[..., None] * jnp.exp(-sharp[..., None] * jnp.square(at[..., None] - place))
            phi = jnp.sum(shape, axis=1)
            window = jnp.einsum("bu,bua->ba", phi, one_hot)
            y, middle_state = middle(jnp.concatenate([stroke, x, window], axis=-1), states[1])
            z, top_state = top(jnp.concatenate([stroke, y, window], axis=-1), states[2])
            told = blend_of(jnp.concatenate([x, y, z], axis=-1))
            share, east, north, log_east, log_north, slant = jnp.split(told[:, :-1], 6, axis=-1)
            share = share * (1 + bias[:, None])
            keys = jax.random.split(key, 3)
            which = jax.random.categorical(keys[0], share)[:, None]
            means = [jnp.take_along_axis(v, which, axis=1)[:, 0] for v in (east, north)]
            wide = [jnp.exp(jnp.take_along_axis(v, which, axis=1)[:, 0] - bias) for v in (log_east, log_north)]
            rho = jnp.tanh(jnp.take_along_axis(slant, which, axis=1)[:, 0])
            one, two = jax.random.normal(keys[1], (2, b))
            moved_x = means[0] + wide[0] * one
            moved_y = means[1] + wide[1] * (rho * one + jnp.sqrt(1 - rho * rho) * two)
            lifted = jax.random.uniform(keys[2], (b,)) < jax.nn.sigmoid(told[:, -1] - 2.0)
            stroke = jnp.stack([moved_x, moved_y, lifted.astype(jnp.float32)], axis=-1)
            last = jnp.max(jnp.where(place == length[:, None] - 1, phi, 0.0), axis=-1)
            beyond = jnp.mean(at, axis=-1) > length
            done = done | (beyond & (last < 0.5))
            stroke = jnp.where(done[:, None], 0.0, jnp.clip(stroke, -20.0, 20.0))
            new = ((low_state, middle_state, top_state), at, window, stroke, done)
            return new, (stroke, done, jnp.argmax(phi, axis=-1))

        start = (tuple(u.initial_state(b) for u in (low, middle, top)), jnp.zeros((b, bells)), one_hot[:, 0])
        start += (jnp.zeros((b, 3)), jnp.zeros(b, bool))
        keys = jax.random.split(hk.next_rng_key(), steps)
        given = jnp.zeros((steps, b, 3)).at[: prime.shape[0]].set(prime)
        xs = (keys, given, jnp.arange(steps) < prime.shape[0])
        (_, at, *_), (strokes, done, letter) = hk.scan(step, start, xs)
        return strokes.swapaxes(0, 1), done.T, letter.T, at

    def run(p, text, length, bias, prime, seed):
        """This writes lines, and gives them as points that are upright and of the same height."""
        length = letters - length
        bias = 0.5 * jnp.abs(bias)
        strokes, done, letter, _ = network.apply(p, jax.random.key(seed), text, length, bias, prime)
        real = ~done
        points = jnp.cumsum(strokes[..., :2], axis=1)
        many = jnp.maximum(jnp.sum(real, axis=1), 1)[:, None]
        mean = jnp.sum(jnp.where(real[..., None], points, 0.0), axis=1) / many
        off = jnp.where(real[..., None], points - mean[:, None], 0.0)
        slope = jnp.sum(off[..., 0] * off[..., 1], axis=1) / (jnp.sum(off[..., 0] ** 2, axis=1) + 1e-6)
        turn = jnp.arctan(slope)[:, None]
        x = jnp.cos(turn) * off[..., 0] + jnp.sin(turn) * off[..., 1]
        y = jnp.cos(turn) * off[..., 1] - jnp.sin(turn) * off[..., 0]
        tall = jnp.sqrt(jnp.sum(y * y, axis=1, keepdims=True) / many + 1e-6)
        return jnp.stack([x / tall, y / tall, strokes[..., 2]], axis=-1), jnp.sum(real, axis=1), letter

    inputs = (integers(b, letters, below=alphabet), integers(b, below=letters // 2), normal(b))
    inputs += (normal(max(1, steps // 8), b, 3),)
    structs = jax.eval_shape(network.init, jax.random.key(0), *(z.struct for z in inputs))
    return Built(run, (drawn(structs), *inputs, integers(below=1000)))


@program("windows-of-words-and-a-carried-set-of-states-read-each-other-by-gates-linen", GROUP)
def _windows(size: Size) -> Built:
    """This program gives the chances of words of long documents, which are read window by window.

    It is the block-recurrent transformer (Hutchins, 2022; google-research/meliad), with linen: words of a window see the window
    before and a set of states, states see words and themselves, and gates tell how much of each state stays.
    """
    from flax import linen as nn

    b, windows, w, s, n, h, wide, words = pick(
        size, (4, 8, 256, 256, 768, 12, 3072, 32000), (2, 4, 64, 32, 192, 4, 512, 2003), (1, 2, 4, 3, 8, 2, 12, 11)
    )
    dtype, d = half(size), n // h
    how = {"use_bias": False, "dtype": dtype, "param_dtype": dtype}
    norm_how = {"dtype": dtype, "param_dtype": dtype}
    gap = np.arange(w)[:, None] + w - np.arange(2 * w)
    near = (gap >= 0) & (gap < w)
    bucket = np.where(gap < 16, gap, 16 + np.log(np.maximum(gap, 16) / 16) / np.log(max(w / 16, 2)) * 15)
    bucket = np.clip(bucket, 0, 31).astype(np.int32)

    def split(x, many):
        return x.reshape(*x.shape[:2], many, h, d)

    def attended(query, key, value, bias=None):
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * d**-0.5
        probs = jax.nn.softmax(scores if bias is None else scores + bias, axis=-1).astype(dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", probs, value).reshape(*query.shape[:2], n)

    class Wide(nn.Module):
        """This is the gated wide part."""

        @nn.compact
        def __call__(self, x):
            gate, up = jnp.split(nn.Dense(2 * wide, **how)(nn.RMSNorm(**norm_how)(x)), 2, axis=-1)
            return nn.Dense(n, **how)(nn.gelu(gate) * up)

    class Near(nn.Module):
        """This lets words see this window and the one before."""

        @nn.compact
        def __call__(self, x, before, fresh):
            table = self.param("bias", nn.initializers.normal(1.0), (32, h))
            x_norm = nn.RMSNorm(**norm_how)(x)
            query, key, value = jnp.moveaxis(split(nn.Dense(3 * n, **how)(x_norm), 3), 2, 0)
            seen = near & ~(fresh[:, None, None] & (np.arange(2 * w) < w))
            bias = jnp.where(seen[:, None], jnp.moveaxis(table[bucket], -1, 0), -1e9)
            both = [jnp.concatenate(z, axis=1) for z in ((before[0], key), (before[1], value))]
            return attended(query, *both, bias), jnp.stack([key, value]), x_norm

    class Cell(nn.Module):
        """This reads one window and moves the states."""

        @nn.compact
        def __call__(self, carry, now):
            states, before = carry
            text, fresh = now
            first = self.param("first", nn.initializers.normal(1.0), (s, n), dtype)
            states = jnp.where(fresh[:, None, None], first, states)
            table = self.param("table", nn.initializers.normal(1.0), (words, n), dtype)
            x = table[text]
            y, kept_one, _ = Near(name="near")(x, before[0], fresh)
            x = x + nn.Dense(n, **how)(y)
            x = x + Wide()(x)

            y, kept_two, x_norm = Near(name="both")(x, before[1], fresh)
            own = nn.RMSNorm(**norm_how)(states) + self.param("place", nn.initializers.normal(0.5), (s, n), dtype)
            key, value, query = jnp.moveaxis(split(nn.Dense(3 * n, name="states", **how)(own), 3), 2, 0)
            across = split(nn.Dense(n, name="across", **how)(x_norm), 1)[:, :, 0]
            to_words = split(nn.Dense(n, name="to_words", **how)(own), 1)[:, :, 0]
            y = jnp.concatenate([y, attended(across, key, value)], axis=-1)
            x = x + nn.Dense(n, name="words_out", **how)(y)
            x = x + Wide(name="wide")(x)

            z = jnp.concatenate([attended(query, key, value), attended(to_words, *kept_two)], axis=-1)
            z = nn.Dense(n, name="states_out", **how)(z)
            stay = nn.sigmoid(self.param("stay", nn.initializers.normal(1.0), (n,)) + 1.0).astype(dtype)
            states = stay * states + (1 - stay) * z
            enter, leave = jnp.split(nn.Dense(2 * n, name="gates", **how)(z), 2, axis=-1)
            change = jnp.tanh(Wide(name="change")(states))
            states = states * nn.sigmoid(leave + 1) + change * nn.sigmoid(enter - 1)
            x = nn.RMSNorm(**norm_how)(x)
            scores = 4 * (x @ table.T).astype(jnp.float32)
            scores = 30 * jnp.tanh(scores / 30)
            whole = jax.nn.logsumexp(scores, axis=-1)
            own = jnp.take_along_axis(scores[:, :-1], text[:, 1:, None], axis=-1)[..., 0]
            return (states, jnp.stack([kept_one, kept_two])), (own - whole[:, :-1], jnp.argmax(scores[:, -1], -1))

    class Model(nn.Module):
        """This reads all windows in order."""

        @nn.compact
        def __call__(self, text, fresh):
            cell = nn.scan(Cell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
            start = (jnp.zeros((b, s, n), dtype), jnp.zeros((2, 2, b, w, h, d), dtype))
            return cell(name="cell")(start, (text.reshape(b, windows, w), fresh))

    model = Model()

    def run(p, text, start):
        """This gives the chances of words, the surprise per window and the last states."""
        fresh = (start == 0) | (jnp.arange(windows) == 0)
        (states, _), (chance, word) = model.apply(p, text, fresh)
        return chance, -jnp.mean(chance, axis=-1), word, states

    inputs = (integers(b, windows * w, below=words), integers(b, windows, below=5))
    structs = jax.eval_shape(model.init, jax.random.key(0), inputs[0].struct, jax.ShapeDtypeStruct((b, windows), bool))
    return Built(run, (drawn(structs), *inputs))


@program("beams-drawn-without-repeats-from-units-with-exponential-gates", GROUP)
def _beams(size: Size) -> Built:
    """This program draws several different sentences after a prompt, and none of them twice, from a recurrent language model.

    It is stochastic beam search (Kool, 2019; wouterkool/stochastic-beam-search) over layers of xLSTM's scalar memories (Beck,
    2024; NX-AI/xlstm): noise of a parent is handed down to its children, so that the best beams are a fair draw.
    """
    b, beams, n, h, depth, prompt, out, words = pick(
        size, (8, 8, 1024, 4, 3, 96, 20, 32000), (2, 4, 256, 4, 2, 12, 8, 2003), (1, 3, 8, 2, 2, 3, 3, 11)
    )
    dtype, d, wide, taps = half(size), n // h, 4 * n // 3 // 8 * 8 + 8, 4
    ends, never = max(2, words // 16), -1e6

    def layer(q, x, state):
        """This is one layer for one word [rows, n]."""
        past, y, cell, norm, top = state
        x_norm = layer_norm(q["norm"], x)
        past = jnp.concatenate([past[:, 1:], x_norm[:, None]], axis=1)
        smooth = jax.nn.silu(jnp.sum(past * q["taps"], axis=1))
        halves = jnp.stack([smooth, x_norm]).reshape(2, -1, h, d)
        gates = jnp.einsum("khio,krhi->rkho", q["sharp"], jnp.stack([halves[0], halves[0], halves[1], halves[1]]))
        gates = gates + jnp.einsum("rhi,khio->rkho", y, q["back"]) + q["bias"]
        i, f, z, o = (gates[:, k].astype(jnp.float32) for k in range(4))
        f = jax.nn.log_sigmoid(f)
        new = jnp.maximum(f + top, i)
        i, f = jnp.exp(i - new), jnp.exp(f + top - new)
        cell, norm = f * cell + i * jnp.tanh(z), f * norm + i
        y = (jax.nn.sigmoid(o) * cell / jnp.maximum(norm, 1e-6)).astype(dtype)
        heads = y.astype(jnp.float32)
        heads = (heads - jnp.mean(heads, -1, keepdims=True)) * lax.rsqrt(jnp.var(heads, -1, keepdims=True) + 1e-5)
        x = x + heads.reshape(-1, n).astype(dtype) * q["scale"]
        gate, up = jnp.split(layer_norm(q["norm2"], x) @ q["up"], 2, axis=-1)
        return x + (jax.nn.gelu(gate) * up) @ q["down"], (past, y, cell, norm, new)

    def fresh(rows):
        zero = jnp.zeros((depth, rows, h, d))
        return jnp.zeros((depth, rows, taps, n), dtype), zero.astype(dtype), zero, zero, zero - 10.0

    def read(p, word, states):
        """This reads one word per row through all layers."""
        x, states = lax.scan(lambda x, now: layer(now[0], x, now[1]), p["table"][word], (p["layers"], states))
        return layer_norm(p["norm"], x), states

    def run(p, text, length, seed):
        """This gives sentences, their log chances, and the noisy scores that rank them."""
        length = prompt - length

        def prefill(carry, now):
            x, states = carry
            word, place = now
            new_x, new = read(p, word, states)
            real = place < length
            on = jax.tree.map(lambda a, c: jnp.where(real.reshape(-1, *[1] * (a.ndim - 2)), a, c), new, states)
            return (jnp.where(real[:, None], new_x, x), on), None

        start = (jnp.zeros((b, n), dtype), fresh(b))
        (x, states), _ = lax.scan(prefill, start, (text.T, jnp.arange(prompt)))
        x = jnp.repeat(x, beams, axis=0)
        states = jax.tree.map(lambda a: jnp.repeat(a, beams, axis=1), states)
        rows = jnp.arange(b)[:, None] * beams

        def step(carry, now):
            x, states, chance, noisy, done = carry
            key, k = now
            scores = (x @ p["head"]).astype(jnp.float32).reshape(b, beams, words)
            logp = jax.nn.log_softmax(scores, axis=-1)
            logp = logp.at[..., :ends].add(jnp.where(k < 2, never, 0.0))
            over = jnp.where(jnp.arange(words) == 0, 0.0, never)
            total = chance[..., None] + jnp.where(done[..., None], over, logp)
            drawn_of = total + jax.random.gumbel(key, total.shape)
            top = jnp.max(drawn_of, axis=-1, keepdims=True)
            below = jnp.where(drawn_of < top, jnp.log1p(-jnp.exp(jnp.minimum(drawn_of - top, -1e-6))), -jnp.inf)
            v = noisy[..., None] - drawn_of + below
            handed = noisy[..., None] - jnp.maximum(v, 0.0) - jnp.log1p(jnp.exp(-jnp.abs(v)))
            noisy, at = lax.top_k(handed.reshape(b, -1), beams)
            parent, word = at // words, at % words
            chance = jnp.take_along_axis(total.reshape(b, -1), at, axis=1)
            done = jnp.take_along_axis(done, parent, axis=1) | (word < ends)
            own = (rows + parent).reshape(-1)
            states = jax.tree.map(lambda a: a[:, own], states)
            x, states = read(p, word.reshape(-1), states)
            return (x, states, chance, noisy, done), (word, parent)

        first = jnp.where(jnp.arange(beams) == 0, 0.0, never) + jnp.zeros((b, beams))
        start = (x, states, first, first, jnp.zeros((b, beams), bool))
        keys = jax.random.split(jax.random.key(seed), out)
        (_, _, chance, noisy, done), (word, parent) = lax.scan(step, start, (keys, jnp.arange(out)))

        def back(own, now):
            word, parent = now
            return jnp.take_along_axis(parent, own, axis=1), jnp.take_along_axis(word, own, axis=1)

        last = jnp.broadcast_to(jnp.arange(beams), (b, beams))
        _, sentence = lax.scan(back, last, (word, parent), reverse=True)
        bar = noisy[:, -1:]
        kept = -jnp.expm1(-jnp.exp(jnp.clip(chance - bar, -20.0, 20.0)))
        share = jnp.exp(chance) / jnp.maximum(kept, 1e-20) * (jnp.arange(beams) < beams - 1)
        share = share / jnp.sum(share, axis=1, keepdims=True)
        return jnp.moveaxis(sentence, 0, -1), chance, noisy, done, -jnp.sum(share * chance, axis=1)

    def stacked(*shape, scale):
        return normal(depth, *shape, dtype=dtype, scale=scale)

    layers = {
        "norm": {"scale": stacked(n, scale=1.0), "shift": stacked(n, scale=0.1)},
        "norm2": {"scale": stacked(n, scale=1.0), "shift": stacked(n, scale=0.1)},
        "taps": stacked(taps, n, scale=0.5),
        "sharp": stacked(4, h, d, d, scale=d**-0.5),
        "back": stacked(4, h, d, d, scale=0.5 * d**-0.5),
        "bias": stacked(4, h, d, scale=1.0),
        "scale": stacked(n, scale=1.0),
        "up": stacked(n, 2 * wide, scale=n**-0.5),
        "down": stacked(wide, n, scale=wide**-0.5),
    }
    p = {"table": normal(words, n, dtype=dtype), "layers": layers, "norm": norm_of(n, dtype)}
    p["head"] = normal(n, words, dtype=dtype, scale=2 * n**-0.5)
    return Built(
        run, (p, integers(b, prompt, below=words), integers(b, below=max(1, prompt // 2)), integers(below=1000))
    )
