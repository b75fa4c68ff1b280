"""Models of language and losses of their answers, as users write them: the fifteenth set, by an author who had seen no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.eleventh_vision import module_weights
from benchmarks.workloads.registry import Built, Size, gain, half, integers, normal, pick, program, weight

GROUP = "fifteenth"


@program("fusion-in-decoder-passages-relative-bias-layers", GROUP)
def _fusion(size: Size) -> Built:
    """This gives the words of an answer that a T5-like decoder reads out of many passages, each encoded alone."""
    b, passages, t, answer, n, h, d, wide, layers, words = pick(
        size,
        (2, 20, 200, 30, 768, 12, 64, 2048, 2, 32128),
        (1, 4, 60, 9, 192, 6, 32, 512, 2, 8011),
        (2, 3, 7, 4, 8, 2, 4, 12, 2, 17),
    )
    dtype, buckets, far = half(size), 32, 128

    def norm(x, scale):
        variance = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        return (x * lax.rsqrt(variance + 1e-6)).astype(dtype) * scale

    def bucket(distance, both):
        count, start = (buckets // 2, jnp.where(distance > 0, buckets // 2, 0)) if both else (buckets, 0)
        distance = jnp.abs(distance) if both else jnp.maximum(-distance, 0)
        exact = count // 2
        large = jnp.log(jnp.maximum(distance, 1) / exact) / np.log(far / exact) * (count - exact)
        large = jnp.minimum(exact + large.astype(jnp.int32), count - 1)
        return start + jnp.where(distance < exact, distance, large)

    def bias(table, length, both):
        distance = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
        return jnp.transpose(table[bucket(distance, both)], (2, 0, 1)).astype(jnp.float32)

    def attend(p, x, memory, added):
        q, k, v = (jnp.einsum("...tn,nhd->...thd", y, p[name]) for y, name in ((x, "q"), (memory, "k"), (memory, "v")))
        scores = jnp.einsum("...qhd,...khd->...hqk", q, k).astype(jnp.float32) + added
        out = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores, axis=-1).astype(dtype), v)
        return jnp.einsum("...thd,hdn->...tn", out, p["o"])

    def feed(p, x):
        return (jax.nn.gelu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]

    def read(params, tokens, lengths, written):
        x = params["embed"][tokens]
        padding = jnp.where(jnp.arange(t) < jnp.maximum(lengths, 3)[..., None], 0.0, -1e9)
        added = bias(params["near"], t, True) + padding[:, :, None, None, :]
        for p in params["encoder"]:
            x = x + attend(p["self"], norm(x, p["norm1"]), norm(x, p["norm1"]), added)
            x = x + feed(p, norm(x, p["norm2"]))
        memory = norm(x, params["norm1"]).reshape(b, passages * t, n)
        padding = padding.reshape(b, 1, 1, passages * t)
        y = params["embed"][written]
        causal = jnp.where(jnp.tril(jnp.ones((answer, answer), bool)), bias(params["past"], answer, False), -1e9)
        for p in params["decoder"]:
            z = norm(y, p["norm1"])
            y = y + attend(p["self"], z, z, causal)
            y = y + attend(p["cross"], norm(y, p["norm3"]), memory, padding)
            y = y + feed(p, norm(y, p["norm2"]))
        logits = (norm(y, params["norm2"]) @ params["head"]).astype(jnp.float32)
        chosen = jnp.argmax(logits, axis=-1)
        sure = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), chosen[..., None], axis=-1)
        return chosen, jnp.sum(sure[..., 0], axis=-1)

    def heads():
        of = {name: normal(n, h, d, dtype=dtype, scale=n**-0.5) for name in ("k", "v")}
        of["q"] = normal(n, h, d, dtype=dtype, scale=(n * d) ** -0.5)
        return of | {"o": normal(h, d, n, dtype=dtype, scale=(h * d) ** -0.5)}

    def layer(*attentions):
        p = {name: weight(n, wide, dtype=dtype) for name in ("gate", "up")} | {"down": weight(wide, n, dtype=dtype)}
        p |= {name: heads() for name in attentions}
        return p | {f"norm{i}": gain(n, dtype) for i in (1, 2, 3)}

    params = {
        "embed": normal(words, n, dtype=dtype),
        "near": normal(buckets, h, dtype=dtype),
        "past": normal(buckets, h, dtype=dtype),
        "encoder": [layer("self") for _ in range(layers)],
        "decoder": [layer("self", "cross") for _ in range(layers)],
        "norm1": gain(n, dtype),
        "norm2": gain(n, dtype),
        "head": weight(n, words, dtype=dtype),
    }
    tokens, lengths = integers(b, passages, t, below=words), integers(b, passages, below=t)
    return Built(read, (params, tokens, lengths, integers(b, answer, below=words)))


@program("min-gru-log-space-parallel-scan-words-equinox", GROUP)
def _min_gru(size: Size) -> Built:
    """This gives the losses of texts' words by layers of minimal gated units, scanned in parallel in log space."""
    import equinox as eqx

    b, t, n, wide, layers, words = pick(
        size, (4, 1000, 768, 1152, 3, 20011), (1, 150, 192, 288, 2, 5003), (2, 7, 8, 12, 2, 13)
    )
    dtype = half(size)

    def log_g(x):
        return jnp.where(x >= 0, jnp.log(jax.nn.relu(x) + 0.5), -jax.nn.softplus(-x))

    def combine(first, second):
        decay1, value1 = first
        decay2, value2 = second
        return decay1 + decay2, jnp.logaddexp(decay2 + value1, value2)

    class Layer(eqx.Module):
        norm1: eqx.nn.RMSNorm
        norm2: eqx.nn.RMSNorm
        kernel: jax.Array
        inwards: eqx.nn.Linear
        outwards: eqx.nn.Linear
        mlp: eqx.nn.MLP

        def __init__(self, key):
            keys = jax.random.split(key, 4)
            self.norm1, self.norm2 = eqx.nn.RMSNorm(n), eqx.nn.RMSNorm(n)
            self.kernel = jax.random.normal(keys[0], (3, n))
            self.inwards = eqx.nn.Linear(n, 2 * wide, use_bias=False, key=keys[1])
            self.outwards = eqx.nn.Linear(wide, n, use_bias=False, key=keys[2])
            self.mlp = eqx.nn.MLP(n, n, 4 * n, 1, jax.nn.gelu, key=keys[3])

        def __call__(self, x):
            y = jax.vmap(self.norm1)(x)
            padded = jnp.pad(y, ((2, 0), (0, 0)))
            y = sum(padded[i : i + t] * self.kernel[i] for i in range(3))
            hidden, gate = jnp.split(jax.vmap(self.inwards)(y).astype(jnp.float32), 2, axis=-1)
            decays = -jax.nn.softplus(gate)
            values = -jax.nn.softplus(-gate) + log_g(hidden)
            _, states = lax.associative_scan(combine, (decays, values))
            x = x + jax.vmap(self.outwards)(jnp.exp(states).astype(dtype))
            return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))

    class Language(eqx.Module):
        embed: eqx.nn.Embedding
        layers: list
        norm: eqx.nn.RMSNorm
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, layers + 2)
            self.embed = eqx.nn.Embedding(words, n, key=keys[0])
            self.layers = [Layer(k) for k in keys[2:]]
            self.norm = eqx.nn.RMSNorm(n)
            self.head = eqx.nn.Linear(n, words, use_bias=False, key=keys[1])

        def __call__(self, tokens):
            x = jax.vmap(self.embed)(tokens[:-1])
            for layer in self.layers:
                x = layer(x)
            logits = jax.vmap(self.head)(jax.vmap(self.norm)(x)).astype(jnp.float32)
            right = jnp.take_along_axis(logits, tokens[1:, None], axis=-1)[:, 0]
            return jax.nn.logsumexp(logits, axis=-1) - right

    model = eqx.filter_eval_shape(Language, jax.random.key(0))
    arrays, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def losses(arrays, tokens):
        each = jax.vmap(eqx.combine(arrays, static))(tokens)
        counted = tokens[:, 1:] != 0
        return jnp.sum(each * counted, axis=-1) / jnp.maximum(jnp.sum(counted, axis=-1), 1)

    return Built(losses, (module_weights(arrays, dtype), integers(b, t + 1, below=words)))


@program("simpo-length-normalised-pairs-adapters-grad", GROUP)
def _simpo(size: Size) -> Built:
    """This gives the loss and gradient of low-rank adapters that learn which of two answers people prefer."""
    pairs, t, n, h, wide, rank, words, layers = pick(
        size, (2, 333, 768, 12, 2048, 16, 32003, 2), (1, 60, 192, 6, 512, 8, 5003, 2), (2, 7, 8, 2, 12, 2, 17, 2)
    )
    dtype, d = half(size), n // h
    places = {"q": (n, n), "k": (n, n), "v": (n, n), "o": (n, n), "gate": (n, wide), "up": (n, wide), "down": (wide, n)}

    def norm(x, scale):
        y = x.astype(jnp.float32)
        return (y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)).astype(dtype) * scale

    def product(x, frozen, adapter):
        low = x @ adapter["down"].astype(dtype)
        return x @ frozen + (low @ adapter["up"].astype(dtype)) * (32.0 / rank)

    def rotate(x):
        angles = jnp.arange(t)[:, None] * 10000.0 ** (-jnp.arange(0, d, 2) / d)
        cos, sin = jnp.cos(angles)[:, None].astype(dtype), jnp.sin(angles)[:, None].astype(dtype)
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    @jax.checkpoint
    def layer(x, frozen, adapters):
        y = norm(x, frozen["norm1"])
        q, k, v = (product(y, frozen[name], adapters[name]).reshape(-1, t, h, d) for name in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotate(q), rotate(k)).astype(jnp.float32) / d**0.5
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1).astype(dtype), v).reshape(x.shape)
        x = x + product(out, frozen["o"], adapters["o"])
        y = norm(x, frozen["norm2"])
        gate, up = (product(y, frozen[name], adapters[name]) for name in ("gate", "up"))
        return x + product(jax.nn.silu(gate) * up, frozen["down"], adapters["down"])

    def mean_log_probs(adapters, frozen, tokens, counted):
        x = frozen["embed"][tokens]
        for p, a in zip(frozen["layers"], adapters, strict=True):
            x = layer(x, p, a)
        logits = (norm(x, frozen["norm"])[:, :-1] @ frozen["embed"].T).astype(jnp.float32)
        logs = jax.nn.log_softmax(logits, axis=-1)
        logs = jnp.take_along_axis(logs, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.sum(logs * counted, axis=-1) / jnp.maximum(jnp.sum(counted, axis=-1), 1)

    def loss(adapters, frozen, chosen, rejected, prompts):
        tokens = jnp.concatenate([chosen, rejected])
        counted = jnp.arange(1, t) >= jnp.concatenate([prompts, prompts])[:, None]
        good, bad = jnp.split(mean_log_probs(adapters, frozen, tokens, counted), 2)
        margin = 2.5 * (good - bad) - 1.4
        return jnp.mean(-jax.nn.log_sigmoid(margin)), (jnp.mean(margin > -1.4), jnp.mean(good), jnp.mean(bad))

    def frozen_layer():
        norms = {"norm1": gain(n, dtype), "norm2": gain(n, dtype)}
        return {name: weight(*shape, dtype=dtype) for name, shape in places.items()} | norms

    def adapter(i, o):
        return {"down": weight(i, rank), "up": normal(rank, o, scale=0.01)}

    adapters = [{name: adapter(*shape) for name, shape in places.items()} for _ in range(layers)]
    frozen = {"embed": normal(words, n, dtype=dtype, scale=n**-0.5), "norm": gain(n, dtype)}
    frozen["layers"] = [frozen_layer() for _ in range(layers)]
    tokens = (integers(pairs, t, below=words), integers(pairs, t, below=words), integers(pairs, below=t // 2))
    return Built(jax.value_and_grad(loss, has_aux=True), (adapters, frozen, *tokens))


@program("gspo-whole-answer-ratios-in-groups-grad", GROUP)
def _gspo(size: Size) -> Built:
    """This gives the loss and gradient of a policy of words that is clipped by the likelihood ratio of whole answers.

    Rewards are standardised within the answers to one question; the answers' logits are taken a slice of words at a
    time, again in the backward pass.
    """
    questions, answers, t, n, words, piece = pick(
        size, (4, 4, 300, 896, 30001, 100), (2, 3, 60, 192, 5003, 20), (2, 3, 6, 8, 13, 3)
    )
    dtype = half(size)

    def loss(params, features, tokens, old, lengths, rewards):
        rewards = rewards.reshape(questions, answers)
        advantage = (rewards - jnp.mean(rewards, axis=1, keepdims=True)) / (
            jnp.std(rewards, axis=1, keepdims=True) + 1e-4
        )
        advantage = advantage.reshape(-1)
        mask = jnp.arange(t)[None] <= lengths[:, None]
        hidden = features + jnp.tanh(features @ params["mix"].astype(dtype))

        @jax.checkpoint
        def one(carry, over):
            x, y = over
            logits = jnp.einsum("btn,nw->btw", x, params["head"].astype(dtype)).astype(jnp.float32)
            logs = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
            entropy = -jnp.sum(jnp.exp(logs) * logs, axis=-1)
            return carry, (jnp.take_along_axis(logs, y[..., None], axis=-1)[..., 0], entropy)

        def pieces(x):
            return jnp.swapaxes(x.reshape(x.shape[0], t // piece, piece, *x.shape[2:]), 0, 1)

        _, (new, entropy) = lax.scan(one, 0, (pieces(hidden), pieces(tokens)))
        new, entropy = (jnp.swapaxes(x, 0, 1).reshape(-1, t) for x in (new, entropy))
        count = jnp.sum(mask, axis=-1)
        gap = jnp.sum(jnp.where(mask, new - old, 0.0), axis=-1) / count
        ratio = jnp.exp(gap)
        clipped = jnp.clip(ratio, 1 - 3e-2, 1 + 4e-2)
        objective = jnp.minimum(ratio * advantage, clipped * advantage)
        spread = jnp.sum(jnp.where(mask, entropy, 0.0)) / jnp.sum(mask)
        return -jnp.mean(objective) - 1e-3 * spread, (jnp.mean(ratio != clipped), spread)

    rows = questions * answers
    params = {"mix": weight(n, n), "head": weight(n, words)}
    data = (
        normal(rows, t, n, dtype=dtype),
        integers(rows, t, below=words),
        normal(rows, t, offset=-float(np.log(words)) - 0.7),
    )
    data = (*data, integers(rows, below=t), normal(rows))
    return Built(jax.value_and_grad(loss, has_aux=True), (params, *data))
