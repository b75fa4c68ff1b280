"""Whole models of pictures, pianos, rain, words and molecules, the twenty-fifth set: its author saw no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, gain, half, integers, normal, pick, program, weight
from benchmarks.workloads.twenty_fifth_parts import (
    attention,
    conv,
    dense,
    dense_of,
    drawn,
    kernel_of,
    layer_norm,
    norm_of,
    rms_norm,
    rotary,
    short,
)

GROUP = "twenty-fifth"


@program("pixels-attend-to-near-windows-clamped-at-edges-classifier", GROUP)
def _near_pixels(size: Size) -> Built:
    """This names what a picture shows with attention in which every pixel sees only the pixels around it.

    It is the Neighborhood Attention Transformer (Hassani, 2023): a window slides with each pixel and stops at the edges, and
    every pair of places in a window has a learned bias.
    """
    b, side, w, window, head, classes = pick(
        size, (6, 228, 64, 7, 32, 1000), (2, 156, 24, 7, 12, 1000), (2, 44, 4, 3, 2, 11)
    )
    dtype, depths = short(size), (2, 3, 4)

    def around(n):
        """These are the places that each place sees, and how far they lie from it."""
        start = np.clip(np.arange(n) - window // 2, 0, n - window)
        places = start[:, None] + np.arange(window)
        return places, places - np.arange(n)[:, None] + window - 1

    def near_attention(q, x):
        _, rows, columns, c = x.shape
        heads = c // head
        (i, di), (j, dj) = around(rows), around(columns)
        query, key, value = jnp.split(dense(q["qkv"], x).reshape(b, rows, columns, 3 * heads, head), 3, axis=3)
        # [b, rows, window, columns, window, heads, width]
        key = key[:, i[:, :, None, None], j[None, None]]
        value = value[:, i[:, :, None, None], j[None, None]]
        scores = jnp.einsum("bijhd,biujvhd->bijhuv", query * head**-0.5, key).astype(jnp.float32)
        bias = q["bias"][:, di[:, :, None, None], dj[None, None]]
        scores = scores + jnp.einsum("hiujv->ijhuv", bias)
        probs = jax.nn.softmax(scores.reshape(b, rows, columns, heads, window**2), axis=-1)
        probs = probs.reshape(scores.shape).astype(dtype)
        y = jnp.einsum("bijhuv,biujvhd->bijhd", probs, value)
        return dense(q["out"], y.reshape(x.shape))

    def block(q, x):
        x = x + q["gain1"] * near_attention(q, layer_norm(q["norm1"], x))
        y = jax.nn.gelu(dense(q["up"], layer_norm(q["norm2"], x)), approximate=False)
        return x + q["gain2"] * dense(q["down"], y)

    def model(p, pictures):
        mean, spread = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
        x = ((pictures / 255.0 - mean) / spread).astype(dtype)
        x = conv(conv(x, p["stem1"], 2) + p["bias1"], p["stem2"], 2) + p["bias2"]
        x = layer_norm(p["norm"], x)
        for stage in p["stages"]:
            for q in stage["blocks"]:
                x = block(q, x)
            if "down" in stage:
                x = layer_norm(stage["norm"], conv(x, stage["down"], 2))
        x = jnp.mean(layer_norm(p["last"], x).astype(jnp.float32), axis=(1, 2))
        logp = jax.nn.log_softmax(dense(p["head"], x), axis=-1)
        return logp, lax.top_k(logp, 5)[1], x

    def layer(c):
        q = {"norm1": norm_of(c, dtype), "norm2": norm_of(c, dtype), "qkv": dense_of(c, 3 * c, dtype)}
        q |= {"out": dense_of(c, c, dtype), "up": dense_of(c, 3 * c, dtype), "down": dense_of(3 * c, c, dtype)}
        q |= {k: normal(c, dtype=dtype, scale=0.1, offset=0.3) for k in ("gain1", "gain2")}
        return q | {"bias": normal(c // head, 2 * window - 1, 2 * window - 1, scale=0.3)}

    p = {"stem1": kernel_of(3, 3, w // 2, dtype), "stem2": kernel_of(3, w // 2, w, dtype), "norm": norm_of(w, dtype)}
    p |= {"bias1": normal(w // 2, dtype=dtype, scale=0.1), "bias2": normal(w, dtype=dtype, scale=0.1), "stages": []}
    for k, depth in enumerate(depths):
        c = w * 2**k
        stage = {"blocks": [layer(c) for _ in range(depth)]}
        if k + 1 < len(depths):
            stage |= {"down": kernel_of(3, c, 2 * c, dtype), "norm": norm_of(2 * c, dtype)}
        p["stages"].append(stage)
    p |= {"last": norm_of(4 * w, dtype), "head": dense_of(4 * w, classes)}
    return Built(model, (p, integers(b, side, side, 3, below=256)))


@program("piano-notes-whose-starts-guide-which-keys-sound-linen", GROUP)
def _piano(size: Size) -> Built:
    """This writes down the notes of piano recordings: one stack hears starts of notes, another which keys sound.

    It is Onsets and Frames (Hawthorne, 2018): convolutions over a mel spectrogram, then cells with memory read both ways; a key
    counts as sounding only after a start.
    """
    from flax import linen as nn

    b, t, mel, w, wide, cell, keys = pick(
        size, (8, 47, 229, 48, 768, 128, 88), (3, 47, 229, 24, 384, 64, 88), (2, 7, 21, 3, 8, 4, 5)
    )

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x[..., None]
            for k, c in enumerate((w, w, 2 * w)):
                x = nn.Conv(c, (3, 3), use_bias=False)(x)
                x = nn.relu(nn.BatchNorm(use_running_average=True)(x))
                if k:
                    x = nn.max_pool(x, (1, 2), (1, 2))
            return nn.relu(nn.Dense(wide)(x.reshape(*x.shape[:2], -1)))

    def both_ways():
        return nn.Bidirectional(nn.RNN(nn.OptimizedLSTMCell(cell)), nn.RNN(nn.OptimizedLSTMCell(cell)))

    class Transcriber(nn.Module):
        @nn.compact
        def __call__(self, x):
            start = nn.sigmoid(nn.Dense(keys)(both_ways()(Stack()(x))))
            sound = nn.sigmoid(nn.Dense(keys)(Stack()(x)))
            joined = jnp.concatenate([start, sound], axis=-1)
            sound = nn.sigmoid(nn.Dense(keys)(both_ways()(joined)))
            loud = nn.Dense(keys)(Stack()(x))
            return start, sound, jnp.clip(loud, 0.0, 1.0)

    model = Transcriber()

    def run(variables, power):
        spectrum = jnp.log1p(1e4 * jnp.square(power) / (1 + jnp.square(power))) / 9.2
        start, sound, loud = model.apply(variables, spectrum)

        def step(carry, now):
            """This keeps a note while its key sounds, from a start on, with the loudness of its start."""
            on, level = carry
            begins, stays, louder = now
            level = jnp.where(begins, louder, level)
            on = begins | (on & stays)
            return (on, level), (on, level * on)

        begins = start > 0.5
        time_first = [jnp.swapaxes(x, 0, 1) for x in (begins, sound > 0.5, loud)]
        carry = (jnp.zeros((b, keys), bool), jnp.zeros((b, keys)))
        _, (on, level) = lax.scan(step, carry, tuple(time_first))
        fresh = jnp.sum(begins[:, 1:] & ~begins[:, :-1], axis=1)
        return start, sound, jnp.swapaxes(on, 0, 1), jnp.swapaxes(level, 0, 1), fresh

    variables = drawn(jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((b, t, mel), jnp.float32)))
    return Built(run, (variables, normal(b, t, mel)))


@program("rain-maps-ahead-by-convolved-memory-cells-haiku", GROUP)
def _rain(size: Size) -> Built:
    """This forecasts maps of rain from past radar maps with memory cells whose products are convolutions.

    It is ConvLSTM (Shi, 2015): two levels of cells read the past, their states start two levels that draw the future.
    """
    import haiku as hk

    b, past, future, side, w = pick(size, (5, 5, 10, 159, 48), (2, 5, 10, 99, 16), (2, 2, 3, 21, 4))
    dtype = half(size)
    coarse, tiny = -(-side // 3), -(-side // 6)

    def per_frame(module, x):
        return hk.BatchApply(module)(x)

    def zeros(core):
        return jax.tree.map(lambda x: x.astype(dtype), core.initial_state(b))

    def larger(x, n):
        return jax.image.resize(x, (*x.shape[:2], n, n, x.shape[-1]), "linear")

    @hk.without_apply_rng
    @hk.transform
    def net(maps):
        def cells(n, c, name):
            return hk.Conv2DLSTM((n, n), c, 3, name=name)

        x = jax.nn.leaky_relu(per_frame(hk.Conv2D(w // 2, 7, 3), maps), 0.2)
        first, second = cells(coarse, w, "in_1"), cells(tiny, 2 * w, "in_2")
        x, fine = hk.dynamic_unroll(first, x, zeros(first))
        x = jax.nn.leaky_relu(per_frame(hk.Conv2D(w, 3, 2), x), 0.2)
        x, rough = hk.dynamic_unroll(second, x, zeros(second))
        x, _ = hk.dynamic_unroll(cells(tiny, 2 * w, "out_2"), jnp.zeros((future, *x.shape[1:-1], w), dtype), rough)
        x = jax.nn.leaky_relu(per_frame(hk.Conv2D(w, 3), larger(x, coarse)), 0.2)
        x, _ = hk.dynamic_unroll(cells(coarse, w, "out_1"), x, fine)
        x = jax.nn.leaky_relu(per_frame(hk.Conv2D(w // 4, 5), larger(x, side)), 0.2)
        return per_frame(hk.Conv2D(1, 1), x)

    def run(p, noise):
        rate = jax.nn.relu(noise)
        pixels = jnp.log1p(10 * rate) / 4
        maps = jax.nn.sigmoid(net.apply(p, pixels.astype(dtype)).astype(jnp.float32))[..., 0]
        still = jnp.broadcast_to(pixels[-1, ..., 0], maps.shape)
        scores = []
        for bar in (0.3, 0.5, 0.7):
            soon, now = maps > bar, still > bar
            hits = jnp.sum(soon & now, axis=(2, 3)).astype(jnp.float32)
            scores.append(hits / jnp.maximum(jnp.sum(soon | now, axis=(2, 3)), 1))
        return maps, jnp.stack(scores), jnp.mean(maps, axis=(0, 1)), jnp.max(maps, axis=0)

    shape = jax.ShapeDtypeStruct((past, b, side, side, 1), dtype)
    p = drawn(jax.eval_shape(net.init, jax.random.key(0), shape), dtype)
    return Built(run, (p, normal(past, b, side, side, 1)))


@program("words-read-found-passages-chunk-by-chunk-decoder", GROUP)
def _found_passages(size: Size) -> Built:
    """This is a language model that, for each chunk of its text, also reads two passages found in a large library.

    It is RETRO (Borgeaud, 2022): passages are encoded beside the chunk that found them, and words of the next chunk attend to
    them, so that no word sees the future.
    """
    b, chunks, m, found, r, n, h, words = pick(
        size, (2, 7, 64, 2, 128, 896, 14, 32003), (1, 7, 33, 2, 64, 176, 11, 5003), (1, 3, 4, 2, 6, 8, 2, 13)
    )
    dtype, t, d = half(size), chunks * m, n // h

    def heads(x):
        return x.reshape(*x.shape[:-1], h, d)

    def mix(q, x, source, mask=None, places=None):
        query, key, value = (heads(z) for z in (x @ q["q"], source @ q["k"], source @ q["v"]))
        if places is not None:
            query, key = rotary(query, places), rotary(key, places)
        y = attention(query, key, value, mask)
        return y.reshape(x.shape) @ q["o"]

    def feed(q, x):
        return jax.nn.gelu(rms_norm(q["norm"], x) @ q["up"]) @ q["down"]

    def encoded(layers, passages, near):
        """This reads passages [b, chunks, found, r, n] beside the states [b, chunks, m, n] of their chunks."""
        x = passages
        near = jnp.broadcast_to(near[:, :, None], (b, chunks, found, m, n))
        for q in layers:
            y = rms_norm(q["norm1"], x)
            x = x + mix(q["self"], y, y, places=jnp.arange(r))
            x = x + mix(q["cross"], rms_norm(q["norm2"], x), near)
            x = x + feed(q["feed"], x)
        return x.reshape(b, chunks, found * r, n)

    def chunked(q, x, passages):
        """This lets the last word of a chunk and all but the last of the next one read what the chunk found."""
        moved = jnp.pad(x[:, m - 1 :], ((0, 0), (0, m - 1), (0, 0))).reshape(b, chunks, m, n)
        y = mix(q, moved, passages).reshape(b, t, n)
        return jnp.pad(y, ((0, 0), (m - 1, 0), (0, 0)))[:, :t]

    def model(p, text, passages):
        x, kept = p["table"][text], None
        causal = jnp.tril(jnp.ones((t, t), bool))
        for q in p["layers"]:
            y = rms_norm(q["norm1"], x)
            x = x + mix(q["self"], y, y, causal, jnp.arange(t))
            if "cross" in q:
                if kept is None:
                    near = rms_norm(p["norm2"], x).reshape(b, chunks, m, n)
                    kept = rms_norm(p["norm3"], encoded(p["encoder"], p["table"][passages], near))
                x = x + chunked(q["cross"], rms_norm(q["norm2"], x), kept)
            x = x + feed(q["feed"], x)
        logits = (rms_norm(p["norm"], x) @ p["table"].T).astype(jnp.float32)
        logp = jax.nn.log_softmax(logits[:, :-1], axis=-1)
        own = jnp.take_along_axis(logp, text[:, 1:, None], axis=-1)[..., 0]
        return own, -jnp.mean(own, axis=-1), logits[:, -1], x[:, -1]

    def projections():
        return {k: weight(n, n, dtype=dtype) for k in "qkvo"}

    def layer(cross):
        q = {"norm1": gain(n, dtype), "self": projections()}
        q["feed"] = {
            "norm": gain(n, dtype),
            "up": weight(n, 4 * n, dtype=dtype),
            "down": weight(4 * n, n, dtype=dtype),
        }
        return q | ({"norm2": gain(n, dtype), "cross": projections()} if cross else {})

    p = {"table": normal(words, n, dtype=dtype, scale=n**-0.5), "layers": [layer(k % 2 == 1) for k in range(4)]}
    p |= {"encoder": [layer(True) for _ in range(2)]} | {k: gain(n, dtype) for k in ("norm", "norm2", "norm3")}
    return Built(model, (p, integers(b, t, below=words), integers(b, chunks, found, r, below=words)))


@program("molecules-by-messages-that-never-turn-back-ensemble-equinox", GROUP)
def _messages(size: Size) -> Built:
    """This tells properties of molecules, and how sure it is, by messages that pass along bonds and never turn back.

    It is Chemprop (Yang, 2019), five networks at once: each bond has two directions with a state each, and twelve properties are
    told as four numbers of a distribution over bell shapes (Amini, 2020).
    """
    import equinox as eqx

    molecules, atoms, bonds, n, extra, tasks = pick(
        size, (199, 5003, 5407, 300, 200, 12), (67, 1601, 1733, 100, 200, 12), (3, 17, 19, 6, 5, 2)
    )
    atom, bond, depth, copies = pick(size, 133, 133, 9), pick(size, 14, 14, 3), 4, 5

    class Network(eqx.Module):
        start: eqx.nn.Linear
        again: eqx.nn.Linear
        gather: eqx.nn.Linear
        hidden: list[eqx.nn.Linear]
        last: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 6)
            self.start = eqx.nn.Linear(atom + bond, n, use_bias=False, key=keys[0])
            self.again = eqx.nn.Linear(n, n, use_bias=False, key=keys[1])
            self.gather = eqx.nn.Linear(atom + n, n, key=keys[2])
            self.hidden = [eqx.nn.Linear(n + extra, n, key=keys[3]), eqx.nn.Linear(n, n, key=keys[4])]
            self.last = eqx.nn.Linear(n, 4 * tasks, key=keys[5])

        def __call__(self, features, kinds, source, target, owner, told):
            back = jnp.arange(2 * bonds) ^ 1
            begin = jax.vmap(self.start)(jnp.concatenate([features[source], kinds], axis=-1))
            state = jax.nn.relu(begin)
            for _ in range(depth):
                into = jax.ops.segment_sum(state, target, atoms)
                message = into[source] - state[back]
                state = jax.nn.relu(begin + jax.vmap(self.again)(message))
            into = jax.ops.segment_sum(state, target, atoms)
            x = jax.nn.relu(jax.vmap(self.gather)(jnp.concatenate([features, into], axis=-1)))
            many = jax.ops.segment_sum(jnp.ones(atoms), owner, molecules, indices_are_sorted=True)
            x = jax.ops.segment_sum(x, owner, molecules, indices_are_sorted=True)
            x = jnp.concatenate([x / jnp.maximum(many, 1.0)[:, None], told], axis=-1)
            for layer in self.hidden:
                x = jax.nn.relu(jax.vmap(layer)(x))
            return jax.vmap(self.last)(x).reshape(molecules, tasks, 4)

    def run(networks, features, kinds, ends, owner, told):
        source = ends.reshape(-1)
        target = ends[:, ::-1].reshape(-1)
        kinds = jnp.repeat(kinds, 2, axis=0)
        told = (told - jnp.mean(told, axis=0)) / (jnp.std(told, axis=0) + 1e-3)
        out = eqx.filter_vmap(lambda net: net(features, kinds, source, target, owner, told))(networks)
        mean, v, alpha, beta = jnp.moveaxis(out, -1, 0)
        v, alpha, beta = jax.nn.softplus(v) + 1e-3, jax.nn.softplus(alpha) + 1.001, jax.nn.softplus(beta)
        noise = beta / (alpha - 1 + 1e-2)
        unsure = noise / v + jnp.var(mean, axis=0)
        return jnp.mean(mean, axis=0), jnp.mean(noise, axis=0), jnp.mean(unsure, axis=0)

    shapes = jax.eval_shape(eqx.filter_vmap(Network), jax.random.split(jax.random.key(0), copies))
    networks = jax.tree.map(lambda s: normal(*s.shape, scale=s.shape[-1] ** -0.5 if s.ndim > 2 else 0.05), shapes)
    inputs = (normal(atoms, atom), normal(bonds, bond), integers(bonds, 2, below=atoms))
    inputs += (integers(atoms, below=molecules, ramp=True), normal(molecules, extra))
    return Built(run, (networks, *inputs))
