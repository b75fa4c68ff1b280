"""Ordinary layers and steps of language models, the twelfth set: its author had seen no plan."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.eleventh_vision import linen_program, module_weights
from benchmarks.workloads.registry import Built, Random, Size, gain, half, integers, normal, pick, program, weight

GROUP = "twelfth"


def layer_norm(p, x, eps=1e-5):
    """This function norms the last axis in float32."""
    y = x.astype(jnp.float32)
    mean = jnp.mean(y, axis=-1, keepdims=True)
    var = jnp.mean(jnp.square(y - mean), axis=-1, keepdims=True)
    return ((y - mean) * lax.rsqrt(var + eps) * p["scale"] + p["bias"]).astype(x.dtype)


@program("longformer-blocks-and-global-words-linen", GROUP)
def _longformer(size: Size) -> Built:
    """This gives an encoder layer like Longformer's, in which words see their neighbourhood and a few words see everything.

    The sequence is cut into blocks that look at the blocks beside them; the first words are global, are keys of every word, and
    have projections of their own for their queries over the whole text.
    """
    import flax.linen as nn

    b, blocks, w, n, h, first = pick(size, (2, 11, 128, 768, 12, 24), (1, 7, 48, 384, 6, 10), (2, 3, 4, 8, 2, 2))
    dtype, t, d = half(size), blocks * w, n // h

    def split(x):
        return x.reshape(b, -1, h, d)

    def beside(x):
        padded = jnp.pad(x, ((0, 0), (w, w), (0, 0), (0, 0))).reshape(b, blocks + 2, w, h, d)
        return jnp.concatenate([padded[:, :-2], padded[:, 1:-1], padded[:, 2:]], axis=2)

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, lengths):
            q, k, v, gq, gk, gv = (nn.Dense(n, dtype=dtype, name=m) for m in ("q", "k", "v", "gq", "gk", "gv"))
            queries, keys, values = split(q(x)) * d**-0.5, split(k(x)), split(v(x))
            real = jnp.arange(t)[None] <= lengths[:, None]

            place = jnp.arange(t).reshape(blocks, w)
            other = (jnp.arange(blocks)[:, None] - 1) * w + jnp.arange(3 * w)[None]
            near = (jnp.abs(place[:, :, None] - other[:, None]) <= w) & (other >= first)[:, None] & (other < t)[:, None]
            near = near[None] & real[:, jnp.clip(other, 0, t - 1)][:, :, None]
            local = jnp.einsum("bcqhd,bckhd->bhcqk", queries.reshape(b, blocks, w, h, d), beside(keys))
            local = jnp.where(near[:, None], local.astype(jnp.float32), -1e9)
            to_first = jnp.einsum("bqhd,bkhd->bhqk", queries, keys[:, :first]).astype(jnp.float32)
            to_first = jnp.where(real[:, None, None, :first], to_first, -1e9).reshape(b, h, blocks, w, first)
            probs = nn.softmax(jnp.concatenate([to_first, local], axis=-1)).astype(dtype)
            out = jnp.einsum("bhcqk,bckhd->bcqhd", probs[..., first:], beside(values)).reshape(b, t, h, d)
            out += jnp.einsum("bhcqk,bkhd->bcqhd", probs[..., :first], values[:, :first]).reshape(b, t, h, d)

            wide = jnp.einsum("bqhd,bkhd->bhqk", split(gq(x[:, :first])) * d**-0.5, split(gk(x)))
            wide = nn.softmax(jnp.where(real[:, None, None], wide.astype(jnp.float32), -1e9)).astype(dtype)
            whole = jnp.einsum("bhqk,bkhd->bqhd", wide, split(gv(x)))
            out = out.at[:, :first].set(whole).reshape(b, t, n)

            x = nn.LayerNorm(epsilon=1e-5, dtype=dtype)(x + nn.Dense(n, dtype=dtype)(out))
            y = nn.Dense(n, dtype=dtype)(nn.gelu(nn.Dense(4 * n, dtype=dtype)(x), approximate=False))
            return nn.LayerNorm(epsilon=1e-5, dtype=dtype)(x + y)

    return linen_program(size, Layer(), normal(b, t, n, dtype=dtype), integers(b, below=t))


@program("electra-replaced-words-grad", GROUP)
def _electra(size: Size) -> Built:
    """This gives the loss and gradient of ELECTRA: words drawn by a generator are to be told from the real ones.

    The generator's hidden vectors at the masked places give words by Gumbel noise, which go into the text; the discriminator, whose
    layers are scanned, says of each word whether it was replaced, and its loss counts fifty times.
    """
    b, t, masked, e, n, h, layers, words = pick(
        size, (32, 128, 19, 128, 256, 4, 3, 30522), (2, 77, 11, 96, 192, 4, 2, 8009), (2, 6, 2, 4, 8, 2, 2, 11)
    )
    dtype, d = half(size), n // h

    def layer(x, p, mask):
        q, k, v = (jnp.einsum("btn,nhd->bthd", x, p[name]) for name in ("q", "k", "v"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / jnp.sqrt(d) + mask
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1).astype(dtype), v)
        x = layer_norm(p["norm1"], x + jnp.einsum("bqhd,hdn->bqn", out, p["out"]), 1e-12)
        y = jax.nn.gelu(x @ p["up"] + p["up_bias"], approximate=False) @ p["down"]
        return layer_norm(p["norm2"], x + y, 1e-12)

    def loss(p, tokens, places, hidden, lengths, seed):
        labels = jnp.take_along_axis(tokens, places, axis=1)
        logits = jnp.einsum("bme,we->bmw", hidden, p["words"], preferred_element_type=jnp.float32) + p["word_bias"]
        nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        noise = jax.random.gumbel(jax.random.key(seed), logits.shape)
        drawn = jnp.argmax(lax.stop_gradient(logits) + noise, axis=-1)
        corrupt = tokens.at[jnp.arange(b)[:, None], places].set(drawn)
        replaced = (corrupt != tokens).astype(jnp.float32)

        real = jnp.arange(t)[None] <= lengths[:, None]
        x = layer_norm(p["norm"], p["words"][corrupt] + p["places"][None]) @ p["widen"]
        mask = jnp.where(real, 0.0, -1e9)[:, None, None]
        x, _ = lax.scan(lambda x, q: (layer(x, q, mask), None), x, p["layers"])
        score = (jax.nn.gelu(x @ p["head"]) @ p["score"])[..., 0].astype(jnp.float32)
        each = jax.nn.softplus(score) - replaced * score
        detect = jnp.sum(each * real) / jnp.sum(real)
        return jnp.mean(nll) + 50.0 * detect, jnp.mean((score > 0) == (replaced > 0), where=real)

    def norm(width, *lead):
        return {"scale": normal(*lead, width, scale=0.1, offset=1.0), "bias": normal(*lead, width, scale=0.02)}

    stacked = {name: normal(layers, n, h, d, dtype=dtype, scale=n**-0.5) for name in ("q", "k", "v")}
    stacked |= {"out": normal(layers, h, d, n, dtype=dtype, scale=n**-0.5), "up": weight(layers, n, 4 * n, dtype=dtype)}
    stacked |= {
        "up_bias": normal(layers, 4 * n, dtype=dtype, scale=0.02),
        "down": weight(layers, 4 * n, n, dtype=dtype),
    }
    stacked |= {"norm1": norm(n, layers), "norm2": norm(n, layers)}
    params = {
        "words": normal(words, e, dtype=dtype, scale=0.1),
        "word_bias": normal(words, dtype=dtype, scale=0.02),
        "places": normal(t, e, dtype=dtype, scale=0.1),
        "norm": norm(e),
        "widen": weight(e, n, dtype=dtype),
        "layers": stacked,
        "head": weight(n, n, dtype=dtype),
        "score": weight(n, 1, dtype=dtype),
    }
    inputs = (integers(b, t, below=words), integers(b, masked, below=t), normal(b, masked, e, dtype=dtype))
    inputs += (integers(b, below=t), integers(below=2**31 - 1))
    return Built(jax.value_and_grad(loss, has_aux=True), (params, *inputs))


@program("one-stream-int8-scanned-layers-decode", GROUP)
def _int8_decode(size: Size) -> Built:
    """This gives one decoding step of a whole small Llama with byte weights for a single user.

    The layers are stacked and scanned with their caches; each weight is turned back to half precision with a scale per output
    column before its product, and heads of 80 or 96 features share keys and values in pairs.
    """
    layers, n, h, d, wide, cache, words = pick(
        size, (6, 1920, 20, 96, 5120, 777, 32003), (4, 480, 6, 80, 1280, 333, 8009), (2, 8, 4, 2, 12, 7, 11)
    )
    dtype, groups = half(size), h // 2

    def rms(x, scale):
        y = x.astype(jnp.float32)
        return (y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)).astype(dtype) * scale

    def dequantised(p):
        return p["bytes"].astype(dtype) * jnp.abs(p["scale"]).astype(dtype)

    def rotate(x, position):
        angle = position * 500000.0 ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(dtype)

    def step(p, token, position, keys, values):
        def layer(x, xs):
            q_p, k_cache, v_cache = xs
            y = rms(x, q_p["norm1"])
            qkv = y @ dequantised(q_p["qkv"])
            q, k, v = jnp.split(qkv, [h * d, (h + groups) * d], axis=-1)
            q, k = rotate(q.reshape(1, h, d), position), rotate(k.reshape(1, groups, d), position)
            k_cache = lax.dynamic_update_slice_in_dim(k_cache, k, position, axis=0)
            v_cache = lax.dynamic_update_slice_in_dim(v_cache, v.reshape(1, groups, d), position, axis=0)
            q = q.reshape(groups, 2, d)
            scores = jnp.einsum("grd,sgd->grs", q, k_cache).astype(jnp.float32) * d**-0.5
            scores = jnp.where(jnp.arange(cache) <= position, scores, -jnp.inf)
            out = jnp.einsum("grs,sgd->grd", jax.nn.softmax(scores, axis=-1).astype(dtype), v_cache)
            x = x + out.reshape(1, h * d) @ dequantised(q_p["out"])
            y = rms(x, q_p["norm2"])
            gate, up = jnp.split(y @ dequantised(q_p["gate_up"]), 2, axis=-1)
            return x + (jax.nn.silu(gate) * up) @ dequantised(q_p["down"]), (k_cache, v_cache)

        x = p["words"][token][None]
        x, caches = lax.scan(layer, x, (p["layers"], keys, values))
        logits = (rms(x, p["norm"])[0] @ p["words"].T).astype(jnp.float32)
        return logits, caches

    def quantised(i, o):
        scale = i**-0.5 / 74
        stored = Random((layers, i, o), jnp.dtype(jnp.int8), below=256)
        return {"bytes": stored, "scale": normal(layers, 1, o, scale=0.1 * scale, offset=scale)}

    stacked = {"qkv": quantised(n, (h + 2 * groups) * d), "out": quantised(h * d, n)}
    stacked |= {"gate_up": quantised(n, 2 * wide), "down": quantised(wide, n)}
    stacked |= {name: normal(layers, n, dtype=dtype, scale=0.1, offset=1.0) for name in ("norm1", "norm2")}
    params = {"words": normal(words, n, dtype=dtype, scale=n**-0.5), "layers": stacked, "norm": gain(n, dtype)}
    buffer = normal(layers, cache, groups, d, dtype=dtype)
    return Built(step, (params, integers(below=words), integers(below=cache), buffer, buffer))


@program("masked-diffusion-guided-unmasking-step", GROUP)
def _unmask(size: Size) -> Built:
    """This gives one step of a masked diffusion language model that fills in the words it is most sure of.

    Logits with and without the prompt are combined by guidance, words are drawn with Gumbel noise, and only the surest of the
    places that are still masked keep their word; the others stay masked for the next step.
    """
    b, t, n, words, temperature, guidance = pick(
        size, (4, 197, 1024, 50257, 0.4, 1.5), (1, 49, 384, 12007, 0.4, 1.5), (2, 7, 8, 11, 0.4, 1.5)
    )
    dtype, mask_word = half(size), words - 1

    def step(p, hidden, free_hidden, tokens, count, seed):
        def head(x):
            y = x.astype(jnp.float32)
            y = y * lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-6)
            y = y.astype(dtype) * p["norm"]
            return jnp.einsum("btn,nw->btw", y, p["head"], preferred_element_type=jnp.float32)

        conditioned, free = head(hidden), head(free_hidden)
        logits = free + (1.0 + guidance) * (conditioned - free)
        logits = logits.at[..., mask_word].set(-jnp.inf)
        noise = jax.random.gumbel(jax.random.key(seed), logits.shape)
        drawn = jnp.argmax(logits + temperature * noise, axis=-1)
        probs = jax.nn.softmax(logits, axis=-1)
        sure = jnp.take_along_axis(probs, drawn[..., None], axis=-1)[..., 0]
        masked = (tokens == mask_word) | (jnp.arange(t)[None] >= t // 3)
        sure = jnp.where(masked, sure, -jnp.inf)
        rank = jnp.argsort(jnp.argsort(-sure, axis=-1), axis=-1)
        taken = masked & (rank <= count[:, None])
        filled = jnp.where(taken, drawn, jnp.where(masked, mask_word, tokens))
        entropy = -jnp.sum(jnp.where(probs > 0, probs * jnp.log(jnp.maximum(probs, 1e-20)), 0.0), axis=-1)
        return filled, jnp.where(masked, sure, 1.0), jnp.sum(entropy * masked, axis=-1) / jnp.sum(masked, axis=-1)

    params = {"norm": gain(n, dtype), "head": weight(n, words, dtype=dtype)}
    inputs = (normal(b, t, n, dtype=dtype), normal(b, t, n, dtype=dtype), integers(b, t, below=words))
    return Built(step, (params, *inputs, integers(b, below=max(2, t // 4)), integers(below=2**31 - 1)))


@program("translator-additive-attention-lstm-haiku", GROUP)
def _translator(size: Size) -> Built:
    """This gives the smoothed loss of a translator whose LSTM looks back at the source by additive attention.

    Each step feeds the word before and the last context to the cell, scores every source place by a hyperbolic tangent, and
    the hidden vector and its context together give the logits.
    """
    import haiku as hk

    b, s, t, n, words, smoothing = pick(
        size, (32, 49, 24, 512, 16003, 0.1), (8, 23, 12, 192, 8009, 0.1), (2, 5, 3, 8, 11, 0.1)
    )
    dtype = half(size)

    def model(memory, lengths, targets):
        table = hk.get_parameter("words", (words, n), dtype, hk.initializers.RandomNormal(0.1))
        cell = hk.LSTM(n)
        query, score, merge = hk.Linear(n, with_bias=False), hk.Linear(1, with_bias=False), hk.Linear(n)
        keys = hk.Linear(n)(memory)
        there = jnp.arange(s)[None] <= lengths[:, None]

        def step(carry, word):
            state, context = carry
            hidden, state = cell(jnp.concatenate([word, context], axis=-1), state)
            energy = score(jnp.tanh(keys + query(hidden)[:, None]))[..., 0].astype(jnp.float32)
            align = jax.nn.softmax(jnp.where(there, energy, -1e9), axis=-1).astype(dtype)
            context = jnp.einsum("bs,bsn->bn", align, memory)
            return (state, context), jnp.tanh(merge(jnp.concatenate([hidden, context], axis=-1)))

        zeros = jnp.zeros((b, n), dtype)
        start = (hk.LSTMState(zeros, zeros), zeros)
        shifted = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        _, outputs = hk.scan(step, start, jnp.swapaxes(table[shifted] * n**0.5, 0, 1))
        logits = hk.Linear(words)(jnp.swapaxes(outputs, 0, 1)).astype(jnp.float32)
        log_probs = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
        loss = -(1 - smoothing) * picked - smoothing * jnp.mean(log_probs, axis=-1)
        real = targets != 0
        return jnp.sum(loss * real, axis=1) / jnp.maximum(jnp.sum(real, axis=1), 1)

    inputs = (normal(b, s, n, dtype=dtype), integers(b, below=s), integers(b, t, below=words))
    pure = hk.without_apply_rng(hk.transform(model))
    structs = jax.eval_shape(lambda *xs: pure.init(jax.random.key(0), *xs), *(r.struct for r in inputs))
    return Built(pure.apply, (module_weights(structs, dtype), *inputs))


@program("s5-two-way-diagonal-layer", GROUP)
def _s5(size: Size) -> Built:
    """This gives a sequence layer like S5's: a diagonal complex state that is scanned associatively in both directions.

    Steps and poles are made discrete by a zero-order hold, the real part of the read-out is doubled for the conjugates that were
    left out, and a gated linear unit ends the layer; the sequences of the batch are mapped.
    """
    b, t, n, states = pick(size, (8, 1000, 192, 96), (4, 777, 96, 48), (2, 7, 6, 4))

    def scan(poles, driven, reverse):
        def combine(left, right):
            a1, x1 = left
            a2, x2 = right
            return a2 * a1, a2 * x1 + x2

        a = jnp.broadcast_to(poles, driven.shape)
        return lax.associative_scan(combine, (a, driven), reverse=reverse)[1]

    def layer(p, u):
        y = layer_norm(p["norm"], u)
        step = jnp.exp(p["log_step"])
        poles = lax.complex(-jnp.exp(p["log_decay"]), p["turn"])
        discrete = jnp.exp(poles * step)
        b_bar = ((discrete - 1.0) / poles)[:, None] * (p["b"][0] + 1j * p["b"][1])
        driven = jnp.einsum("pn,tn->tp", b_bar, y)
        x = jnp.concatenate([scan(discrete, driven, False), scan(discrete, driven, True)], axis=-1)
        out = 2.0 * jnp.real(jnp.einsum("np,tp->tn", p["c"][0] + 1j * p["c"][1], x)) + p["d"] * y
        out = jax.nn.gelu(out)
        return u + out * jax.nn.sigmoid(out @ p["gate"] + p["gate_bias"])

    params = {
        "norm": {"scale": gain(n), "bias": normal(n, scale=0.02)},
        "log_step": normal(states, scale=0.7, offset=-4.0),
        "log_decay": normal(states, scale=0.3, offset=-0.7),
        "turn": normal(states, scale=20.0),
        "b": normal(2, states, n, scale=n**-0.5),
        "c": normal(2, n, 2 * states, scale=states**-0.5),
        "d": normal(n),
        "gate": weight(n, n),
        "gate_bias": normal(n, scale=0.02),
    }
    return Built(jax.vmap(layer, in_axes=(None, 0)), (params, normal(b, t, n)))
