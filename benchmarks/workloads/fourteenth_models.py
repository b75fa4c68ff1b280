"""Models of words, proteins, speech and videos, the second half of the fourteenth set: its author had seen no plan."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.eleventh_vision import linen_program, module_weights
from benchmarks.workloads.registry import (
    Built,
    Random,
    Size,
    booleans,
    gain,
    half,
    integers,
    normal,
    pick,
    program,
    weight,
)

GROUP = "fourteenth"


@program("transformer-xl-memory-shifted-positions-grad-haiku", GROUP)
def _transformer_xl(size: Size) -> Built:
    """This gives the loss and gradient of a segment of text by a Transformer-XL, whose layers also see the last segment."""
    import haiku as hk

    b, t, past, n, h, layers, words = pick(
        size, (8, 250, 130, 512, 8, 3, 10003), (2, 60, 34, 128, 4, 3, 3001), (2, 5, 3, 8, 2, 3, 11)
    )
    dtype, d, length = half(size), n // h, past + t

    def norm(x):
        return hk.LayerNorm(-1, True, True)(x)

    def shift(x):
        rows = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (1, 0)))
        return rows.reshape(b, h, length + 1, t)[:, :, 1:].reshape(b, h, t, length)

    def layer(x, memory):
        every = jnp.concatenate([memory, x], axis=1)
        q = hk.Linear(n, with_bias=False)(x).reshape(b, t, h, d)
        k = hk.Linear(n, with_bias=False)(every).reshape(b, length, h, d)
        v = hk.Linear(n, with_bias=False)(every).reshape(b, length, h, d)
        far = jnp.arange(length - 1, -1, -1.0)
        angles = far[:, None] / 10000.0 ** (jnp.arange(0, n, 2) / n)
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(dtype)
        r = hk.Linear(n, with_bias=False)(waves).reshape(length, h, d)
        content = hk.get_parameter("content_bias", (h, d), dtype, hk.initializers.TruncatedNormal(0.02))
        place = hk.get_parameter("place_bias", (h, d), dtype, hk.initializers.TruncatedNormal(0.02))
        by_word = jnp.einsum("bqhd,bkhd->bhqk", q + content, k)
        by_place = shift(jnp.einsum("bqhd,khd->bhqk", q + place, r))
        scores = (by_word + by_place).astype(jnp.float32) * d**-0.5
        seen = jnp.arange(length)[None] <= jnp.arange(t)[:, None] + past
        probs = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1).astype(dtype)
        out = jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(b, t, n)
        x = norm(x + hk.Linear(n, with_bias=False)(out))
        return norm(x + hk.Linear(n)(jax.nn.relu(hk.Linear(4 * n)(x))))

    def model(tokens, memories):
        table = hk.get_parameter("words", (words, n), dtype, hk.initializers.TruncatedNormal(0.02))
        x = table[tokens] * n**0.5
        kept = []
        for i in range(layers):
            kept.append(lax.stop_gradient(x[:, -past:]))
            x = layer(x, memories[i])
        return x @ table.T, jnp.stack(kept)

    pure = hk.without_apply_rng(hk.transform(model))

    def loss(p, tokens, memories):
        logits, kept = pure.apply(p, tokens[:, :-1], memories)
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)), kept

    tokens, memories = integers(b, t + 1, below=words), normal(layers, b, past, n, dtype=dtype)
    shorter = jax.ShapeDtypeStruct((b, t), jnp.int32)
    structs = jax.eval_shape(lambda *xs: pure.init(jax.random.key(0), *xs), shorter, memories.struct)
    weights = module_weights(structs, dtype)
    weights["~"]["words"] = normal(words, n, dtype=dtype, scale=n**-0.5)
    return Built(jax.value_and_grad(loss, has_aux=True), (weights, tokens, memories))


@program("protein-language-attention-contact-map", GROUP)
def _contacts(size: Size) -> Built:
    """This gives which residues of padded proteins touch, from the attention maps of a language model like ESM-2.

    The maps of all layers and heads are made symmetric, freed of the mean of their rows and columns, and weighed by a logistic
    regression; a masked residue is embedded as zero, and the rest are scaled up in turn.
    """
    layers, b, t, n, h, kinds = pick(size, (6, 4, 390, 640, 20, 33), (3, 2, 115, 240, 12, 33), (2, 2, 7, 8, 2, 9))
    dtype, d = half(size), n // h
    mask_token = kinds - 1

    def norm(x, p):
        y = x.astype(jnp.float32)
        mean, var = jnp.mean(y, axis=-1, keepdims=True), jnp.var(y, axis=-1, keepdims=True)
        return ((y - mean) * lax.rsqrt(var + 1e-5)).astype(dtype) * p["gain"] + p["bias"]

    def rotate(x):
        angles = jnp.arange(t)[:, None] * 10000.0 ** -(jnp.arange(0, d, 2) / d)
        cos, sin = (jnp.concatenate([f(angles)] * 2, axis=-1)[:, None].astype(dtype) for f in (jnp.cos, jnp.sin))
        first, second = jnp.split(x, 2, axis=-1)
        return x * cos + jnp.concatenate([-second, first], axis=-1) * sin

    def layer(x, p, valid):
        y = norm(x, p["norm1"])
        q, k, v = ((y @ p[name]).reshape(b, t, h, d) for name in ("q", "k", "v"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotate(q * d**-0.5), rotate(k)).astype(jnp.float32)
        probs = jax.nn.softmax(jnp.where(valid[:, None, None], scores, -jnp.inf), axis=-1)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", probs.astype(dtype), v).reshape(b, t, n) @ p["o"]
        y = jax.nn.gelu(norm(x, p["norm2"]) @ p["up"], approximate=False)
        return x + y @ p["down"], probs

    def contacts(params, tokens, lengths):
        valid = jnp.arange(t) < jnp.maximum(lengths, t // 2)[:, None]
        masked = (tokens == mask_token) & valid
        share = jnp.sum(masked, axis=1) / jnp.sum(valid, axis=1)
        x = jnp.where(masked[..., None], 0.0, params["embed"][tokens])
        x = x * (0.88 / (1.0 - share))[:, None, None].astype(dtype)
        x = jnp.where(valid[..., None], x, 0.0).astype(dtype)
        maps = []
        for p in params["layers"]:
            x, probs = layer(x, p, valid)
            maps.append(probs)
        inside = valid & (jnp.arange(t) > 0)
        both = inside[:, None, :, None] & inside[:, None, None, :]
        a = jnp.where(both, jnp.concatenate(maps, axis=1), 0.0)
        a = a + a.swapaxes(-1, -2)
        rows, columns = jnp.sum(a, axis=-1, keepdims=True), jnp.sum(a, axis=-2, keepdims=True)
        a = a - rows * columns / jnp.sum(a, axis=(-2, -1), keepdims=True)
        logits = jnp.einsum("bcij,c->bij", a, params["regress"]) + params["regress_bias"]
        return jax.nn.sigmoid(logits)[:, 1:, 1:], norm(x, params["norm"])

    def one_norm():
        return {"gain": gain(n, dtype), "bias": normal(n, dtype=dtype, scale=0.05)}

    shapes = {name: (n, n) for name in ("q", "k", "v", "o")} | {"up": (n, 4 * n), "down": (4 * n, n)}
    every = [
        {name: weight(*shape, dtype=dtype) for name, shape in shapes.items()}
        | {"norm1": one_norm(), "norm2": one_norm()}
        for _ in range(layers)
    ]
    params = {"layers": every, "embed": normal(kinds, n, dtype=dtype), "norm": one_norm()}
    params |= {"regress": normal(layers * h, scale=4.0), "regress_bias": normal(scale=0.1, offset=-2.0)}
    return Built(contacts, (params, integers(b, t, below=kinds), integers(b, below=t)))


@program("mamba-bytes-convolution-window-and-state-decode", GROUP)
def _mamba_step(size: Size) -> Built:
    """This gives one decoding step of a stack of Mamba layers with weights of bytes, for a few users."""
    layers, b, n, inner, states, rank, words = pick(
        size, (8, 3, 1536, 3072, 16, 96, 50280), (4, 2, 512, 1024, 16, 32, 8003), (2, 2, 8, 12, 4, 3, 11)
    )
    dtype, width = half(size), 4

    def norm(x, scale):
        y = x.astype(jnp.float32)
        return (y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)).astype(dtype) * scale

    def product(x, p):
        return (x @ p["bytes"].astype(dtype)) * p["scale"].astype(dtype)

    def layer(x, scanned):
        p, window, state = scanned
        y, gate = jnp.split(product(norm(x, p["norm"]), p["wide"]), 2, axis=-1)
        window = jnp.concatenate([window[:, 1:], y[:, None]], axis=1)
        y = jax.nn.silu(jnp.sum(window * p["kernel"], axis=1) + p["kernel_bias"])
        low, enter, leave = jnp.split(y @ p["select"], [rank, rank + states], axis=-1)
        step = jax.nn.softplus((low @ p["step"]).astype(jnp.float32) + p["step_bias"])
        decay = jnp.exp(step[..., None] * -jnp.exp(p["decay"]))
        driven = (step * y.astype(jnp.float32))[..., None] * enter.astype(jnp.float32)[:, None]
        state = state * decay + driven
        out = jnp.einsum("bis,bs->bi", state, leave.astype(jnp.float32)) + p["skip"] * y
        return x + product(out.astype(dtype) * jax.nn.silu(gate), p["narrow"]), (window, state)

    def step(params, tokens, windows, states_before):
        x = params["words"][tokens]
        x, (windows, after) = lax.scan(layer, x, (params["layers"], windows, states_before))
        logits = (norm(x, params["norm"]) @ params["words"].T).astype(jnp.float32)
        return lax.top_k(jax.nn.log_softmax(logits), 5), windows, after

    def bytes_of(i, o):
        scale = normal(layers, o, scale=1e-5, offset=0.013 * i**-0.5)
        return {"bytes": Random((layers, i, o), jnp.dtype(jnp.int8), below=255), "scale": scale}

    stack = {"wide": bytes_of(n, 2 * inner), "narrow": bytes_of(inner, n)}
    stack |= {"norm": normal(layers, n, dtype=dtype, scale=0.1, offset=1.0)}
    stack |= {"kernel": normal(layers, width, inner, dtype=dtype, scale=0.5)}
    stack |= {"kernel_bias": normal(layers, inner, dtype=dtype, scale=0.1)}
    stack |= {"select": weight(layers, inner, rank + 2 * states, dtype=dtype)}
    stack |= {"step": weight(layers, rank, inner, dtype=dtype), "step_bias": normal(layers, inner, offset=-3.0)}
    stack |= {"decay": normal(layers, inner, states, scale=0.5, offset=1.0), "skip": normal(layers, inner, offset=1.0)}
    params = {"layers": stack, "words": normal(words, n, dtype=dtype, scale=0.2), "norm": gain(n, dtype)}
    windows = normal(layers, b, width, inner, dtype=dtype)
    return Built(step, (params, integers(b, below=words), windows, normal(layers, b, inner, states)))


@program("video-tubelets-space-then-time-linen", GROUP)
def _video(size: Size) -> Built:
    """This gives the classes of short videos by a transformer like ViViT, with one encoder for space and one for time."""
    import flax.linen as nn

    b, frames, side, deep, patch, n, h, layers, classes = pick(
        size, (2, 16, 224, 2, 16, 384, 6, 2, 400), (1, 8, 112, 2, 16, 256, 4, 2, 400), (2, 4, 8, 2, 4, 8, 2, 1, 5)
    )
    dtype = half(size)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm(dtype=dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(h, dtype=dtype)(y, y)
            y = nn.Dense(4 * n, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
            return x + nn.Dense(n, dtype=dtype)(nn.gelu(y))

    class Video(nn.Module):
        @nn.compact
        def __call__(self, clips):
            x = nn.Conv(n, (deep, patch, patch), (deep, patch, patch), padding="VALID", dtype=dtype)(clips)
            moments, tokens = x.shape[1], x.shape[2] * x.shape[3]
            x = x.reshape(b, moments, tokens, n)
            x = x + self.param("places", nn.initializers.normal(0.02), (tokens, n)).astype(dtype)
            for _ in range(layers):
                x = Block()(x)
            x = jnp.mean(nn.LayerNorm(dtype=dtype)(x), axis=2)
            first = self.param("first", nn.initializers.zeros, (1, n)).astype(dtype)
            x = jnp.concatenate([jnp.tile(first[None], (b, 1, 1)), x], axis=1)
            x = x + self.param("moments", nn.initializers.normal(0.02), (moments + 1, n)).astype(dtype)
            for _ in range(layers):
                x = Block()(x)
            logits = nn.Dense(classes, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x)[:, 0])
            return nn.softmax(logits.astype(jnp.float32))

    return linen_program(size, Video(), normal(b, frames, side, side, 3, dtype=dtype))


@program("tacotron-location-attention-speech-frames", GROUP)
def _tacotron(size: Size) -> Built:
    """This gives frames of speech by a decoder like Tacotron's, whose attention looks at where it was before."""
    b, letters, frames, n, narrow, bins, filters, window = pick(
        size, (16, 131, 40, 512, 128, 80, 32, 31), (6, 70, 40, 192, 64, 80, 16, 31), (2, 7, 3, 8, 6, 5, 3, 3)
    )

    def cell(p, x, state):
        h, c = state
        i, f, g, o = jnp.split(jnp.concatenate([x, h], axis=-1) @ p["w"] + p["b"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    def speak(p, text, lengths):
        valid = jnp.arange(letters) <= lengths[:, None]
        keys = text @ p["keys"]
        zeros = jnp.zeros((b, n))

        def step(carry, _):
            frame, first, second, context, last, total = carry
            y = jax.nn.relu(jax.nn.relu(frame @ p["pre1"]) @ p["pre2"])
            first = cell(p["cell1"], jnp.concatenate([y, context], axis=-1), first)
            places = jnp.stack([last, total], axis=-1)
            features = lax.conv_general_dilated(
                places, p["filters"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            )
            mixed = jnp.tanh((first[0] @ p["query"])[:, None] + keys + features @ p["place"])
            scores = jnp.where(valid, mixed @ p["energy"], -1e9)
            last = jax.nn.softmax(scores, axis=-1)
            context = jnp.einsum("bl,bln->bn", last, text)
            second = cell(p["cell2"], jnp.concatenate([first[0], context], axis=-1), second)
            both = jnp.concatenate([second[0], context], axis=-1)
            frame, stop = both @ p["frame"], jax.nn.sigmoid(both @ p["stop"])
            return (frame, first, second, context, last, total + last), (frame, stop, last)

        start = (jnp.zeros((b, bins)), (zeros, zeros), (zeros, zeros), zeros)
        start = (*start, jnp.zeros((b, letters)), jnp.zeros((b, letters)))
        _, (spoken, stops, aligned) = lax.scan(step, start, None, length=frames)
        ended = jnp.cumsum(stops > 0.5, axis=0) > 1
        return jnp.where(ended[..., None], jnp.log(1e-5), spoken).swapaxes(0, 1), stops, aligned

    def lstm(i):
        return {"w": weight(i + n, 4 * n), "b": normal(4 * n, scale=0.1)}

    p = {"pre1": weight(bins, n // 2), "pre2": weight(n // 2, n // 2)}
    p |= {"cell1": lstm(n + n // 2), "cell2": lstm(2 * n), "keys": weight(n, narrow), "query": weight(n, narrow)}
    p |= {"filters": normal(window, 2, filters, scale=0.5), "place": weight(filters, narrow)}
    p |= {"energy": normal(narrow, scale=0.3), "frame": weight(2 * n, bins), "stop": normal(2 * n, scale=0.02)}
    return Built(speak, (p, normal(b, letters, n), integers(b, below=letters)))


@program("decision-transformer-returns-states-actions-grad-equinox", GROUP)
def _decisions(size: Size) -> Built:
    """This gives the loss and gradient of a model that predicts actions from wanted returns, states and past actions."""
    import equinox as eqx

    b, t, states, actions, n, h, layers, longest = pick(
        size, (64, 20, 17, 6, 128, 1, 3, 1000), (16, 20, 11, 3, 64, 1, 3, 1000), (2, 4, 5, 3, 8, 2, 3, 9)
    )

    class Block(eqx.Module):
        norm1: eqx.nn.LayerNorm
        norm2: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP

        def __init__(self, key):
            k1, k2 = jax.random.split(key)
            self.norm1, self.norm2 = eqx.nn.LayerNorm(n), eqx.nn.LayerNorm(n)
            self.attention = eqx.nn.MultiheadAttention(h, n, use_query_bias=True, use_output_bias=True, key=k1)
            self.mlp = eqx.nn.MLP(n, n, 4 * n, 1, jax.nn.relu, key=k2)

        def __call__(self, x, mask):
            y = jax.vmap(self.norm1)(x)
            x = x + self.attention(y, y, y, mask)
            return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))

    class Actor(eqx.Module):
        times: eqx.nn.Embedding
        inwards: list
        norm: eqx.nn.LayerNorm
        blocks: list
        out: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 5 + layers)
            self.times = eqx.nn.Embedding(longest, n, key=keys[0])
            self.inwards = [eqx.nn.Linear(w, n, key=k) for w, k in zip((1, states, actions), keys[1:4], strict=True)]
            self.norm = eqx.nn.LayerNorm(n)
            self.blocks = [Block(k) for k in keys[5:]]
            self.out = eqx.nn.Linear(n, actions, key=keys[4])

        def __call__(self, wanted, seen, done, start, valid):
            place = jax.vmap(self.times)(jnp.clip(start + jnp.arange(t), 0, longest - 1))
            parts = [jax.vmap(f)(x) + place for f, x in zip(self.inwards, (wanted, seen, done), strict=True)]
            x = jax.vmap(self.norm)(jnp.stack(parts, axis=1).reshape(3 * t, n))
            mask = jnp.tril(jnp.ones((3 * t, 3 * t), bool)) & jnp.repeat(valid, 3)[None]
            mask = mask | jnp.eye(3 * t, dtype=bool)
            for block in self.blocks:
                x = block(x, mask)
            return jnp.tanh(jax.vmap(self.out)(x.reshape(t, 3, n)[:, 1]))

    module = eqx.filter_eval_shape(Actor, jax.random.key(0))
    structs, rest = eqx.partition(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(arrays, rewards, seen, raw, start, missing):
        wanted = jnp.cumsum(rewards[:, ::-1], axis=1)[:, ::-1, None] / 10.0
        done = jnp.tanh(raw)
        valid = jnp.arange(t)[None] >= missing[:, None]
        out = jax.vmap(eqx.combine(arrays, rest))(wanted, seen, done, start, valid)
        errors = jnp.where(valid[..., None], (out - done) ** 2, 0.0)
        return jnp.sum(errors) / (jnp.sum(valid) * actions)

    inputs = (normal(b, t), normal(b, t, states), normal(b, t, actions))
    inputs = (*inputs, integers(b, below=longest), integers(b, below=t - 1))

    def graded(*arguments):
        value, slopes = jax.value_and_grad(loss)(*arguments)
        return value, jax.tree.leaves(slopes)

    return Built(graded, (module_weights(structs, jnp.float32), *inputs))


@program("graphormer-distance-and-degree-biases-nnx", GROUP)
def _graphormer(size: Size) -> Built:
    """This gives energies of molecules by a transformer like Graphormer, whose attention knows how many bonds lie between atoms."""
    from flax import nnx

    b, atoms, n, h, layers, farthest, kinds, bonds = pick(
        size, (64, 51, 512, 32, 3, 20, 119, 5), (16, 27, 192, 8, 3, 20, 119, 5), (2, 5, 8, 2, 2, 4, 7, 3)
    )
    dtype, d, t = half(size), n // h, atoms + 1
    types = {"dtype": dtype, "param_dtype": dtype}

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.norm1, self.norm2 = (nnx.LayerNorm(n, rngs=rngs, **types) for _ in range(2))
            self.qkv, self.out = (nnx.Linear(n, w, rngs=rngs, **types) for w in (3 * n, n))
            self.up, self.down = (nnx.Linear(n, n, rngs=rngs, **types) for _ in range(2))

        def __call__(self, x, bias):
            q, k, v = jnp.unstack(self.qkv(self.norm1(x)).reshape(b, t, 3, h, d), axis=2)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * d**-0.5 + bias
            probs = jax.nn.softmax(scores, axis=-1).astype(dtype)
            x = x + self.out(jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(b, t, n))
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    class Graph(nnx.Module):
        def __init__(self, rngs):
            self.atom, self.degree = (nnx.Embed(w, n, rngs=rngs, **types) for w in (kinds, atoms + 1))
            self.distance = nnx.Embed(farthest + 2, h, rngs=rngs, **types)
            self.bond = nnx.Embed(bonds, h, rngs=rngs, **types)
            self.whole = nnx.Param(jnp.zeros((1, 1, n), dtype))
            self.to_whole = nnx.Param(jnp.zeros((h, 1), dtype))
            self.layers = nnx.List([Layer(rngs) for _ in range(layers)])
            self.norm = nnx.LayerNorm(n, rngs=rngs, **types)
            self.read = nnx.Linear(n, 1, rngs=rngs, **types)

        def __call__(self, atom, bonded, kind, valid):
            both = valid[:, :, None] & valid[:, None]
            bonded = bonded & both
            bonded = bonded | bonded.swapaxes(1, 2)
            reached = jnp.broadcast_to(jnp.eye(atoms, dtype=bool), bonded.shape)
            steps = jnp.where(reached, 0, farthest + 1)
            edges = bonded.astype(jnp.float32)
            for i in range(1, 6):
                reached = reached | (jnp.einsum("bij,bjk->bik", reached.astype(jnp.float32), edges) > 0)
                steps = jnp.where(reached & (steps > farthest), min(i, farthest), steps)
            degree = jnp.sum(bonded, axis=-1)
            x = self.atom(atom) + self.degree(degree)
            x = jnp.concatenate([jnp.tile(self.whole[...], (b, 1, 1)), x], axis=1)
            near = jnp.where(bonded[..., None], self.bond(kind), 0)
            inner = jnp.moveaxis((self.distance(steps) + near).astype(jnp.float32), -1, 1)
            bias = jnp.zeros((b, h, t, t)).at[:, :, 1:, 1:].set(inner)
            bias = bias.at[:, :, 0, :].add(self.to_whole[...]).at[:, :, 1:, 0].add(self.to_whole[...])
            seen = jnp.concatenate([jnp.ones((b, 1), bool), valid], axis=1)
            bias = jnp.where(seen[:, None, None], bias, -1e9)
            for layer in self.layers:
                x = layer(x, bias)
            return self.read(self.norm(x)[:, 0])[:, 0].astype(jnp.float32)

    graph, state = nnx.split(nnx.eval_shape(lambda: Graph(nnx.Rngs(0))))

    def energies(state, atom, links, kind, missing):
        valid = jnp.arange(atoms)[None] < atoms - missing[:, None]
        bonded = (links == 0) | (jnp.arange(atoms)[:, None] + 1 == jnp.arange(atoms)[None])
        return nnx.merge(graph, state)(atom, bonded, kind, valid)

    inputs = (integers(b, atoms, below=kinds), integers(b, atoms, atoms, below=3 * atoms))
    inputs = (*inputs, integers(b, atoms, atoms, below=bonds), integers(b, below=atoms // 2))
    return Built(energies, (module_weights(state, dtype), *inputs))


@program("captions-and-contrast-two-losses-grad-linen", GROUP)
def _captions(size: Size) -> Built:
    """This gives the sum of a contrastive and a caption loss, and its gradient, for pictures and texts as CoCa trains."""
    import flax.linen as nn

    b, patches, t, n, h, queries, words = pick(
        size, (24, 196, 65, 512, 8, 77, 20011), (4, 49, 21, 128, 4, 17, 3001), (3, 6, 5, 8, 2, 3, 11)
    )
    dtype = half(size)

    class Attend(nn.Module):
        @nn.compact
        def __call__(self, x, other=None, mask=None):
            y = nn.LayerNorm(dtype=dtype, use_bias=False)(x)
            return x + nn.MultiHeadDotProductAttention(h, dtype=dtype)(y, y if other is None else other, mask=mask)

    class Feed(nn.Module):
        @nn.compact
        def __call__(self, x):
            y, gate = jnp.split(nn.Dense(4 * n, use_bias=False, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x)), 2, axis=-1)
            return x + nn.Dense(n, use_bias=False, dtype=dtype)(y * nn.silu(gate))

    class Captioner(nn.Module):
        @nn.compact
        def __call__(self, picture, tokens, valid):
            asked = self.param("queries", nn.initializers.normal(0.02), (queries + 1, n)).astype(dtype)
            seen = nn.Dense(n, dtype=dtype)(picture)
            seen = nn.LayerNorm(dtype=dtype)(Feed()(Attend()(seen)))
            pooled = Attend()(jnp.tile(asked[None], (b, 1, 1)), seen)
            pooled = nn.LayerNorm(dtype=dtype)(pooled)
            embed = nn.Embed(words, n, dtype=dtype)
            mark = self.param("mark", nn.initializers.normal(0.02), (1, 1, n)).astype(dtype)
            x = jnp.concatenate([embed(tokens), jnp.tile(mark, (b, 1, 1))], axis=1)
            x = x + self.param("places", nn.initializers.normal(0.02), (t + 1, n)).astype(dtype)
            known = jnp.concatenate([valid, jnp.ones((b, 1), bool)], axis=1)
            causal = jnp.tril(jnp.ones((t + 1, t + 1), bool))[None, None]
            x = Feed()(Attend()(x, mask=causal & (known[:, None, None] | jnp.eye(t + 1, dtype=bool))))
            text = nn.LayerNorm(dtype=dtype)(x[:, -1])
            x = Feed()(Attend()(x[:, :-1], pooled[:, 1:]))
            logits = embed.attend(nn.LayerNorm(dtype=dtype)(x))
            scale = jnp.exp(self.param("scale", nn.initializers.constant(1.0), ()))
            return pooled[:, 0], text, logits, scale

    module = Captioner()

    def unit(x):
        x = x.astype(jnp.float32)
        return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

    def loss(p, picture, tokens, lengths):
        valid = jnp.arange(t)[None] <= lengths[:, None] + 1
        image, text, logits, scale = module.apply(p, picture, tokens, valid)
        pairs = scale * unit(image) @ unit(text).T
        own = jnp.diag(pairs)
        contrast = jnp.mean(jax.nn.logsumexp(pairs, axis=0) + jax.nn.logsumexp(pairs, axis=1) - 2 * own) / 2
        log_probs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
        picked = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
        caption = -jnp.sum(jnp.where(valid[:, 1:], picked, 0.0)) / jnp.sum(valid[:, 1:])
        return contrast + 2.0 * caption, (contrast, caption)

    inputs = (normal(b, patches, n, dtype=dtype), integers(b, t, below=words))
    structs = jax.eval_shape(
        lambda *xs: module.init(jax.random.key(0), *xs), *(r.struct for r in inputs), booleans(b, t).struct
    )
    grad = jax.value_and_grad(loss, has_aux=True)
    return Built(grad, (module_weights(structs, jnp.float32), *inputs, integers(b, below=t)))
