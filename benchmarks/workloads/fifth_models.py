"""Whole layers of networks, some with their training objective, by an author who has seen no plan of the package: a fifth set."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, gain, half, integers, like, normal, pick, program, weight

GROUP = "fifth"


@program("gemma3-local-global-layers-linen", GROUP)
def _gemma3(size: Size) -> Built:
    """A prefill through a local and a global layer of Gemma 3: norms on both sides, normed queries and keys, two rotary bases."""
    from flax import linen as nn

    b, t, n, h, kv, d, wide, window = pick(
        size, (1, 2048, 2560, 8, 4, 256, 10240, 1024), (1, 160, 192, 4, 2, 48, 640, 64), (1, 6, 8, 4, 2, 4, 12, 3)
    )
    dtype = half(size)

    class RMSNorm(nn.Module):
        @nn.compact
        def __call__(self, x):
            scale = self.param("scale", nn.initializers.zeros_init(), (x.shape[-1],))
            y = x.astype(jnp.float32)
            y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-6)
            return (y * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)

    def rope(x, positions, base, stretch):
        fraction = 2.0 * jnp.arange(d // 2) / d
        angle = positions[..., None, None] / (base**fraction) / stretch
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

    class Attention(nn.Module):
        local: bool

        @nn.compact
        def __call__(self, x, positions, mask):
            init = nn.initializers.normal()
            q = jnp.einsum("btd,ndh->btnh", x, self.param("q", init, (h, n, d)))
            k, v = jnp.einsum("bsd,ckdh->cbskh", x, self.param("kv", init, (2, kv, n, d)))
            q, k = RMSNorm(name="q_norm")(q), RMSNorm(name="k_norm")(k)
            base, stretch = (10_000.0, 1.0) if self.local else (1_000_000.0, 8.0)
            q = rope(q, positions, base, stretch) * np.asarray(d**-0.5, dtype)
            k = rope(k, positions, base, stretch)
            q = q.reshape(b, t, kv, h // kv, d)
            logits = jnp.einsum("btkgh,bskh->bkgts", q, k)
            if self.local:
                apart = positions[:, :, None] - positions[:, None, :]
                mask = mask & (apart < window)
            logits = jnp.where(mask[:, None, None], logits, -2.3819763e38)
            probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1).astype(k.dtype)
            encoded = jnp.einsum("bkgts,bskh->btkgh", probs, v).reshape(b, t, h, d)
            return jnp.einsum("btnh,nhd->btd", encoded, self.param("o", init, (h, d, n)))

    class Block(nn.Module):
        local: bool

        @nn.compact
        def __call__(self, x, positions, mask):
            y = RMSNorm(name="pre_attention")(x)
            y = Attention(self.local)(y, positions, mask)
            x = x + RMSNorm(name="post_attention")(y)
            y = RMSNorm(name="pre_ffw")(x)
            gating = self.param("gating", nn.initializers.normal(), (2, n, wide))
            gate, up = jnp.einsum("btd,cdf->cbtf", y, gating)
            y = nn.gelu(gate) * up
            y = y @ self.param("linear", nn.initializers.normal(), (wide, n))
            return x + RMSNorm(name="post_ffw")(y)

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x, length):
            valid = jnp.arange(t)[None, :] >= t - jnp.maximum(length, 1)[:, None]
            positions = jnp.maximum(jnp.cumsum(valid, axis=-1) - 1, 0)
            mask = jnp.tril(jnp.ones((t, t), bool))[None] & valid[:, None, :]
            x = x * jnp.sqrt(n).astype(x.dtype)
            for local in (True, False):
                x = Block(local)(x, positions, mask)
            return RMSNorm(name="final")(x)[:, -1]

    module = Layers()
    x, length = normal(b, t, n, dtype=dtype, scale=n**-0.5), integers(b, below=t + 1)
    params = like(jax.eval_shape(module.init, jax.random.key(0), x.struct, length.struct), dtype)
    return Built(module.apply, (params, x, length))


@program("modernbert-alternating-windows-nnx", GROUP)
def _modernbert(size: Size) -> Built:
    """ModernBERT's embedding, one global and two windowed layers, and the best tokens of its masked positions."""
    from flax import nnx

    b, t, n, h, wide, window, vocabulary, blanks = pick(
        size, (8, 1024, 768, 12, 1152, 64, 50368, 153), (2, 128, 128, 4, 192, 16, 3000, 20), (2, 7, 8, 2, 12, 2, 13, 3)
    )
    dtype, d = half(size), n // h

    def rotate(x, theta):
        angle = jnp.arange(t)[:, None] * theta ** (-jnp.arange(0, d, 2) / d)
        angle = jnp.concatenate([angle, angle], axis=-1)[None, :, None, :]
        a, b = jnp.split(x, 2, axis=-1)
        turned = jnp.concatenate([-b, a], axis=-1)
        return x * jnp.cos(angle).astype(x.dtype) + turned * jnp.sin(angle).astype(x.dtype)

    def linear(i, o, rngs):
        return nnx.Linear(i, o, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs)

    def norm(rngs):
        return nnx.LayerNorm(n, epsilon=1e-5, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs)

    class Layer(nnx.Module):
        def __init__(self, index, rngs):
            self.everywhere = index % 3 == 0
            self.attention_norm = norm(rngs) if index else None
            self.qkv, self.out = linear(n, 3 * n, rngs), linear(n, n, rngs)
            self.mlp_norm = norm(rngs)
            self.wi, self.wo = linear(n, 2 * wide, rngs), linear(wide, n, rngs)

        def __call__(self, x, mask):
            y = x if self.attention_norm is None else self.attention_norm(x)
            q, k, v = jnp.moveaxis(self.qkv(y).reshape(b, t, 3, h, d), 2, 0)
            theta = 160_000.0 if self.everywhere else 10_000.0
            near = None if self.everywhere else (window, window)
            y = jax.nn.dot_product_attention(rotate(q, theta), rotate(k, theta), v, mask=mask, local_window_size=near)
            x = x + self.out(y.reshape(b, t, n))
            value, gate = jnp.split(self.wi(self.mlp_norm(x)), 2, axis=-1)
            return x + self.wo(nnx.gelu(value, approximate=False) * gate)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(vocabulary, n, dtype=dtype, param_dtype=dtype, rngs=rngs)
            self.embed_norm, self.final_norm, self.head_norm = norm(rngs), norm(rngs), norm(rngs)
            self.layers = nnx.List([Layer(i, rngs) for i in range(3)])
            self.head = linear(n, n, rngs)
            self.bias = nnx.Param(jnp.zeros(vocabulary, dtype))

        def __call__(self, tokens, length, blank):
            mask = (jnp.arange(t) < jnp.maximum(length, 1)[:, None])[:, None, None, :]
            x = self.embed_norm(self.embed(tokens))
            for layer in self.layers:
                x = layer(x, mask)
            x = jnp.take_along_axis(self.final_norm(x), blank[:, :, None], axis=1)
            x = self.head_norm(nnx.gelu(self.head(x), approximate=False))
            logits = self.embed.attend(x) + self.bias[...]
            return lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), 5)

    graph, state = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))

    def fill(state, tokens, length, blank):
        return nnx.merge(graph, state)(tokens, length, blank)

    arguments = (integers(b, t, below=vocabulary), integers(b, below=t + 1), integers(b, blanks, below=t))
    return Built(fill, (like(state, dtype), *arguments))


@program("olmo2-reordered-norm-equinox", GROUP)
def _olmo2(size: Size) -> Built:
    """A layer of OLMo 2 in Equinox: norms after attention and after the network, norms of whole queries and keys, rotations."""
    import equinox as eqx

    b, t, n, h, wide = pick(size, (2, 2048, 2048, 16, 8192), (2, 192, 192, 6, 640), (2, 5, 8, 2, 12))
    dtype, d = half(size), n // h

    class Attention(eqx.Module):
        q: eqx.nn.Linear
        k: eqx.nn.Linear
        v: eqx.nn.Linear
        o: eqx.nn.Linear
        q_norm: eqx.nn.RMSNorm
        k_norm: eqx.nn.RMSNorm
        rope: eqx.nn.RotaryPositionalEmbedding

        def __init__(self, key):
            keys = jax.random.split(key, 4)
            self.q, self.k, self.v, self.o = (eqx.nn.Linear(n, n, use_bias=False, key=k) for k in keys)
            self.q_norm, self.k_norm = (eqx.nn.RMSNorm(n, eps=1e-6, use_bias=False) for _ in range(2))
            self.rope = eqx.nn.RotaryPositionalEmbedding(d, theta=500_000.0)

        def __call__(self, x):
            q = jax.vmap(self.q_norm)(jax.vmap(self.q)(x)).reshape(t, h, d)
            k = jax.vmap(self.k_norm)(jax.vmap(self.k)(x)).reshape(t, h, d)
            v = jax.vmap(self.v)(x).reshape(t, h, d)
            q = jax.vmap(self.rope, in_axes=1, out_axes=1)(q).astype(x.dtype)
            k = jax.vmap(self.rope, in_axes=1, out_axes=1)(k).astype(x.dtype)
            scores = jnp.einsum("qhd,khd->hqk", q, k) / np.asarray(d**0.5, x.dtype)
            scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, jnp.finfo(x.dtype).min)
            weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(x.dtype)
            return jax.vmap(self.o)(jnp.einsum("hqk,khd->qhd", weights, v).reshape(t, n))

    class Layer(eqx.Module):
        attention: Attention
        gate: eqx.nn.Linear
        up: eqx.nn.Linear
        down: eqx.nn.Linear
        attention_norm: eqx.nn.RMSNorm
        mlp_norm: eqx.nn.RMSNorm

        def __init__(self, key):
            k1, k2, k3, k4 = jax.random.split(key, 4)
            self.attention = Attention(k1)
            self.gate = eqx.nn.Linear(n, wide, use_bias=False, key=k2)
            self.up = eqx.nn.Linear(n, wide, use_bias=False, key=k3)
            self.down = eqx.nn.Linear(wide, n, use_bias=False, key=k4)
            self.attention_norm, self.mlp_norm = (eqx.nn.RMSNorm(n, eps=1e-6, use_bias=False) for _ in range(2))

        def __call__(self, x):
            x = x + jax.vmap(self.attention_norm)(self.attention(x))
            y = jax.vmap(lambda row: self.down(jax.nn.silu(self.gate(row)) * self.up(row)))(x)
            return x + jax.vmap(self.mlp_norm)(y)

    shapes = eqx.filter_eval_shape(Layer, jax.random.key(0))
    params, static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def forward(params, x):
        return jax.vmap(eqx.combine(params, static))(x)

    return Built(forward, (like(params, dtype), normal(b, t, n, dtype=dtype)))


@program("mpt-alibi-window-ragged-decode", GROUP)
def _mpt(size: Size) -> Built:
    """A token of MPT for requests of ragged lengths: each writes its place of the cache; ALiBi, a window, clipped projections."""
    b, t, n, h, window = pick(size, (16, 4096, 4096, 32, 2048), (8, 512, 384, 8, 200), (2, 9, 8, 2, 4))
    dtype, d = half(size), n // h

    def norm(scale, x):
        y = x.astype(jnp.float32)
        y = (y - jnp.mean(y, axis=-1, keepdims=True)) * lax.rsqrt(jnp.var(y, axis=-1, keepdims=True) + 1e-5)
        return (y * scale).astype(x.dtype)

    def write(cache, new, at):
        return lax.dynamic_update_slice_in_dim(cache, new[:, None, :], at, axis=1)

    def step(p, x, cache_k, cache_v, length):
        qkv = jnp.clip(norm(p["norm1"], x) @ p["qkv"], -8.0, 8.0)
        q, k, v = (part.reshape(b, h, d) for part in jnp.split(qkv, 3, axis=-1))
        cache_k, cache_v = jax.vmap(write)(cache_k, k, length), jax.vmap(write)(cache_v, v, length)
        slopes = 2.0 ** (-8.0 * jnp.arange(1, h + 1) / h)
        back = length[:, None] - jnp.arange(t)[None, :]
        scores = jnp.einsum("bhd,bhtd->bht", q, cache_k, preferred_element_type=jnp.float32) * d**-0.5
        scores = scores - slopes[None, :, None] * back[:, None, :]
        seen = (back >= 0) & (back < window)
        scores = jnp.where(seen[:, None, :], scores, -jnp.inf)
        w = jax.nn.softmax(scores, axis=-1).astype(dtype)
        y = jnp.einsum("bht,bhtd->bhd", w, cache_v).reshape(b, n)
        x = x + y @ p["out"]
        x = x + jax.nn.gelu(norm(p["norm2"], x) @ p["up"], approximate=False) @ p["down"]
        return x, cache_k, cache_v, length + 1

    params = {"norm1": gain(n), "norm2": gain(n), "qkv": weight(n, 3 * n, dtype=dtype)}
    params |= {"out": weight(n, n, dtype=dtype)}
    params |= {"up": weight(n, 4 * n, dtype=dtype), "down": weight(4 * n, n, dtype=dtype)}
    cache = normal(b, h, t, d, dtype=dtype)
    return Built(step, (params, normal(b, n, dtype=dtype), cache, cache, integers(b, below=t)))


@program("q-former-image-text-haiku", GROUP)
def _q_former(size: Size) -> Built:
    """Two layers of BLIP-2's Q-Former: queries and text attend together, queries also to the image; the matching head."""
    import haiku as hk

    b, queries, words, patches, image, n, h = pick(
        size, (64, 32, 32, 257, 1408, 768, 12), (6, 16, 16, 65, 160, 128, 4), (2, 3, 4, 5, 6, 8, 2)
    )
    dtype, d = half(size), n // h

    def dense(x, width, name):
        return hk.Linear(width, name=name)(x)

    def norm(x, name):
        return hk.LayerNorm(-1, create_scale=True, create_offset=True, eps=1e-12, name=name)(x)

    def attend(x, context, mask, name):
        q = dense(x, n, f"{name}_query").reshape(b, -1, h, d)
        k = dense(context, n, f"{name}_key").reshape(b, -1, h, d)
        v = dense(context, n, f"{name}_value").reshape(b, -1, h, d)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.asarray(np.sqrt(d), dtype)
        if mask is not None:
            scores = scores + (1.0 - mask[:, None, None, :].astype(dtype)) * np.asarray(-10000.0, dtype)
        weights = jax.nn.softmax(scores, axis=-1)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, -1, n)
        return norm(x + dense(y, n, f"{name}_out"), f"{name}_norm")

    def feed(x, name):
        y = dense(jax.nn.gelu(dense(x, 4 * n, f"{name}_in"), approximate=False), n, f"{name}_out")
        return norm(x + y, f"{name}_norm")

    def model(tokens, seen, features):
        learned = hk.get_parameter("queries", (1, queries, n), dtype, hk.initializers.TruncatedNormal(0.02))
        table = hk.get_parameter("words", (pick(size, 30523, 1000, 11), n), dtype, hk.initializers.TruncatedNormal())
        places = hk.get_parameter("places", (words, n), dtype, hk.initializers.TruncatedNormal())
        x = jnp.concatenate([jnp.broadcast_to(learned, (b, queries, n)), table[tokens] + places], axis=1)
        x = norm(x, "embedding_norm")
        text = jnp.arange(words) < jnp.maximum(seen, 1)[:, None]
        mask = jnp.concatenate([jnp.ones((b, queries), bool), text], axis=1)
        for i in range(2):
            x = attend(x, x, mask, f"self{i}")
            q, text_part = x[:, :queries], x[:, queries:]
            if i % 2 == 0:
                q = attend(q, features, None, f"cross{i}")
            x = jnp.concatenate([feed(q, f"query_ffn{i}"), feed(text_part, f"text_ffn{i}")], axis=1)
        logits = dense(x[:, :queries], 2, "matching").astype(jnp.float32)
        return jax.nn.softmax(jnp.mean(logits, axis=1), axis=-1)[:, 1], x

    module = hk.without_apply_rng(hk.transform(model))
    tokens = integers(b, words, below=pick(size, 30523, 1000, 11))
    arguments = (tokens, integers(b, below=words + 1), normal(b, patches, image, dtype=dtype))
    shapes = jax.eval_shape(module.init, jax.random.key(0), *(a.struct for a in arguments))
    return Built(module.apply, (like(shapes, dtype), *arguments))


@program("dinov3-axial-rope-block-linen", GROUP)
def _dinov3(size: Size) -> Built:
    """Patches, registers and a block of DINOv3: rotations by two axes for patches alone, LayerScale, SwiGLU, class and patches."""
    from flax import linen as nn

    b, side, patch, n, h, wide = pick(
        size, (8, 512, 16, 1280, 20, 5120), (1, 224, 16, 192, 6, 512), (1, 8, 4, 16, 2, 12)
    )
    dtype, d, registers = half(size), n // h, 4
    grid = side // patch

    def angles():
        periods = 100.0 ** (2.0 * jnp.arange(d // 4) / (d // 2))
        centre = (jnp.arange(grid) + 0.5) / grid * 2.0 - 1.0
        rows, columns = jnp.meshgrid(centre, centre, indexing="ij")
        places = jnp.stack([rows, columns], axis=-1).reshape(-1, 2)
        angle = 2 * jnp.pi * places[:, :, None] / periods
        return jnp.tile(angle.reshape(grid * grid, -1), (1, 2))

    def rotate(x, sin, cos):
        prefix, patches = x[:, : 1 + registers], x[:, 1 + registers :]
        first, second = jnp.split(patches, 2, axis=-1)
        patches = patches * cos + jnp.concatenate([-second, first], axis=-1) * sin
        return jnp.concatenate([prefix, patches.astype(x.dtype)], axis=1)

    class LayerScale(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * self.param("gamma", nn.initializers.constant(1e-5), (n,))

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, sin, cos):
            y = nn.LayerNorm(epsilon=1e-5, dtype=dtype)(x)
            q = nn.Dense(n, dtype=dtype, name="q")(y).reshape(b, -1, h, d)
            k = nn.Dense(n, use_bias=False, dtype=dtype, name="k")(y).reshape(b, -1, h, d)
            v = nn.Dense(n, dtype=dtype, name="v")(y).reshape(b, -1, h, d)
            y = jax.nn.dot_product_attention(rotate(q, sin, cos), rotate(k, sin, cos), v)
            y = nn.Dense(n, dtype=dtype, name="o")(y.reshape(b, -1, n))
            x = x + LayerScale()(y).astype(dtype)
            y = nn.LayerNorm(epsilon=1e-5, dtype=dtype)(x)
            y = nn.silu(nn.Dense(wide, dtype=dtype, name="w1")(y)) * nn.Dense(wide, dtype=dtype, name="w2")(y)
            return x + LayerScale()(nn.Dense(n, dtype=dtype, name="w3")(y)).astype(dtype)

    class Tower(nn.Module):
        @nn.compact
        def __call__(self, images):
            mean, std = jnp.array([0.485, 0.456, 0.406]), jnp.array([0.229, 0.224, 0.225])
            x = ((images - mean) / std).astype(dtype)
            x = nn.Conv(n, (patch, patch), strides=(patch, patch), dtype=dtype)(x).reshape(b, -1, n)
            first = self.param("class_and_registers", nn.initializers.normal(0.02), (1, 1 + registers, n))
            x = jnp.concatenate([jnp.broadcast_to(first, (b, 1 + registers, n)).astype(dtype), x], axis=1)
            angle = angles()[None, :, None, :]
            x = Block()(x, jnp.sin(angle).astype(dtype), jnp.cos(angle).astype(dtype))
            x = nn.LayerNorm(epsilon=1e-5, dtype=dtype)(x)
            patches = x[:, 1 + registers :].astype(jnp.float32)
            patches = patches / jnp.linalg.norm(patches, axis=-1, keepdims=True)
            return x[:, 0], patches.reshape(b, grid, grid, n)

    module = Tower()
    images = normal(b, side, side, 3, scale=0.25, offset=0.5)
    params = like(jax.eval_shape(module.init, jax.random.key(0), images.struct), dtype)
    return Built(module.apply, (params, images))


@program("ft-transformer-mixed-table-grad", GROUP)
def _ft_transformer(size: Size) -> Built:
    """A step's gradient of an FT-Transformer on a table: a token of each number and category, dropout, ReGLU, a binary loss."""
    b, numbers, categories, kinds, n, h, layers = pick(
        size, (1024, 28, 8, 100, 192, 8, 2), (48, 10, 4, 30, 48, 4, 2), (3, 3, 2, 4, 8, 2, 2)
    )
    d, wide = n // h, int(n * 4 / 3)

    def norm(p, x):
        mean = jnp.mean(x, axis=-1, keepdims=True)
        return (x - mean) / jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    def dropout(key, rate, x):
        keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
        return jnp.where(keep, x / (1.0 - rate), 0.0)

    def tokens(p, number, category):
        a = number[..., None] * p["number_weight"] + p["number_bias"]
        offsets = jnp.arange(categories) * kinds
        c = p["category_table"][category + offsets] + p["category_bias"]
        first = jnp.broadcast_to(p["class"], (b, 1, n))
        return jnp.concatenate([first, a, c], axis=1)

    def attention(p, x, key):
        q, k, v = (jnp.einsum("bti,ihd->bthd", x, p[name]) for name in "qkv")
        w = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(d), axis=-1)
        return jnp.einsum("bhqk,bkhd,hdo->bqo", dropout(key, 0.2, w), v, p["o"])

    def loss(params, number, category, label, seed):
        x = tokens(params, number, category)
        for i, p in enumerate(params["layers"]):
            k1, k2 = jax.random.split(jax.random.fold_in(jax.random.key(seed), i))
            x = x + attention(p, norm(p["norm1"], x) if i else x, k1)
            value, gate = jnp.split(norm(p["norm2"], x) @ p["in"] + p["in_bias"], 2, axis=-1)
            x = x + dropout(k2, 0.1, value * jax.nn.relu(gate)) @ p["out"] + p["out_bias"]
        logit = (jax.nn.relu(norm(params["head_norm"], x[:, 0])) @ params["head"])[:, 0]
        target = label.astype(jnp.float32)
        return -jnp.mean(target * jax.nn.log_sigmoid(logit) + (1.0 - target) * jax.nn.log_sigmoid(-logit))

    ln = {"scale": gain(n), "bias": normal(n, scale=0.05)}
    heads = {name: normal(n, h, d, scale=n**-0.5) for name in "qkv"} | {"o": normal(h, d, n, scale=n**-0.5)}
    layer = {**heads, "norm2": ln, "in": weight(n, 2 * wide), "in_bias": normal(2 * wide, scale=0.05)}
    layer |= {"out": weight(wide, n), "out_bias": normal(n, scale=0.05)}
    params = {
        "number_weight": normal(numbers, n, scale=0.3),
        "number_bias": normal(numbers, n, scale=0.3),
        "category_table": normal(categories * kinds, n, scale=0.3),
        "category_bias": normal(categories, n, scale=0.3),
        "class": normal(1, 1, n, scale=0.3),
        "layers": [layer] + [{**layer, "norm1": ln}] * (layers - 1),
        "head_norm": ln,
        "head": weight(n, 1),
    }
    rows = (normal(b, numbers), integers(b, categories, below=kinds), integers(b, below=2), integers(below=1000))
    return Built(jax.value_and_grad(loss), (params, *rows))


@program("masked-autoencoder-shuffle-grad", GROUP)
def _masked_autoencoder(size: Size) -> Built:
    """A masked autoencoder's gradient: a random quarter of the patches encoded, put back among mask tokens, pixels predicted."""
    from flax import linen as nn

    b, side, patch, n, h, m, heads = pick(
        size, (64, 224, 16, 768, 12, 512, 16), (4, 96, 16, 96, 4, 64, 4), (2, 8, 4, 8, 2, 8, 2)
    )
    dtype = half(size)
    grid = side // patch
    count = grid * grid
    kept = max(1, count // 4)

    def patches(images):
        x = images.reshape(b, grid, patch, grid, patch, 3)
        return jnp.einsum("bhpwqc->bhwpqc", x).reshape(b, count, patch * patch * 3)

    def sines(width):
        def axis(places, width):
            angle = np.outer(places, 1.0 / 10000 ** (np.arange(width // 2) / (width / 2)))
            return np.concatenate([np.sin(angle), np.cos(angle)], axis=1)

        rows, columns = np.divmod(np.arange(count), grid)
        return np.concatenate([axis(columns, width // 2), axis(rows, width // 2)], axis=1).astype(np.float32)

    class Block(nn.Module):
        width: int
        heads: int

        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads, dtype=dtype)(y, y)
            y = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x)
            y = nn.gelu(nn.Dense(4 * self.width, dtype=dtype)(y), approximate=False)
            return x + nn.Dense(self.width, dtype=dtype)(y)

    class Autoencoder(nn.Module):
        @nn.compact
        def __call__(self, x, key):
            x = nn.Dense(n, dtype=dtype, name="embed")(x.astype(dtype)) + jnp.asarray(sines(n), dtype)
            shuffle = jnp.argsort(jax.random.uniform(key, (b, count)), axis=1)
            restore = jnp.argsort(shuffle, axis=1)
            x = jnp.take_along_axis(x, shuffle[:, :kept, None], axis=1)
            first = self.param("class", nn.initializers.normal(0.02), (1, 1, n))
            x = jnp.concatenate([jnp.broadcast_to(first, (b, 1, n)).astype(dtype), x], axis=1)
            x = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(Block(n, h)(x))
            x = nn.Dense(m, dtype=dtype, name="to_decoder")(x)
            blank = self.param("mask_token", nn.initializers.normal(0.02), (1, 1, m)).astype(dtype)
            full = jnp.concatenate([x[:, 1:], jnp.broadcast_to(blank, (b, count - kept, m))], axis=1)
            full = jnp.take_along_axis(full, restore[:, :, None], axis=1) + jnp.asarray(sines(m), dtype)
            x = Block(m, heads)(jnp.concatenate([x[:, :1], full], axis=1))
            x = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x)
            hidden = (restore >= kept).astype(jnp.float32)
            return nn.Dense(patch * patch * 3, dtype=dtype, name="pixels")(x)[:, 1:], hidden

    module = Autoencoder()

    def loss(params, images, seed):
        target = patches(images)
        predicted, hidden = module.apply(params, target, jax.random.key(seed))
        mean = jnp.mean(target, axis=-1, keepdims=True)
        var = jnp.var(target, axis=-1, keepdims=True, ddof=1)
        target = (target - mean) / jnp.sqrt(var + 1e-6)
        error = jnp.mean(jnp.square(predicted.astype(jnp.float32) - target), axis=-1)
        return jnp.sum(error * hidden) / jnp.sum(hidden)

    images = normal(b, side, side, 3)
    start = jax.ShapeDtypeStruct((b, count, patch * patch * 3), jnp.float32)
    params = like(jax.eval_shape(module.init, jax.random.key(0), start, jax.random.key(0)))
    return Built(jax.value_and_grad(loss), (params, images, integers(below=1000)))


@program("hstu-pointwise-time-bias", GROUP)
def _hstu(size: Size) -> Built:
    """A layer of the HSTU recommender over padded histories: SiLU scores with bias of place and time, gates, the best items."""
    b, t, n, h, items, buckets = pick(
        size, (8, 1024, 512, 8, 50_000, 128), (2, 256, 128, 4, 4000, 64), (2, 6, 8, 2, 12, 8)
    )
    dtype, d = half(size), n // h

    def norm(x):
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        return (y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)

    def bias(p, times):
        following = jnp.concatenate([times[:, 1:], times[:, -1:]], axis=1)
        apart = jnp.abs(following[:, :, None] - times[:, None, :]).astype(jnp.float32)
        bucket = jnp.clip((jnp.log(jnp.maximum(apart, 1.0)) / 0.301).astype(jnp.int32), 0, buckets)
        place = jnp.arange(t)[None, :] - jnp.arange(t)[:, None] + t - 1
        return p["places"][place][None] + p["times"][bucket]

    def rank(p, history, times, length):
        length = jnp.maximum(length, 1)
        times = jnp.cumsum(times, axis=1)
        valid = jnp.arange(t)[None, :] < length[:, None]
        x = p["items"][history] * np.asarray(n**0.5, dtype) + p["positions"]
        x = jnp.where(valid[..., None], x, 0)
        u, v, q, k = jnp.split(jax.nn.silu(norm(x) @ p["uvqk"]), 4, axis=-1)
        q, k, v = (a.reshape(b, t, h, d) for a in (q, k, v))
        scores = jnp.einsum("bnhd,bmhd->bhnm", q, k) + bias(p, times)[:, None].astype(dtype)
        scores = jax.nn.silu(scores) / t
        causal = jnp.tril(jnp.ones((t, t), dtype)) * valid[:, None, :].astype(dtype)
        y = jnp.einsum("bhnm,bmhd->bnhd", scores * causal[:, None], v).reshape(b, t, n)
        x = x + (u * norm(y)) @ p["out"] + p["out_bias"]
        last = jnp.take_along_axis(x, length[:, None, None] - 1, axis=1)[:, 0].astype(jnp.float32)
        last = last / jnp.maximum(jnp.linalg.norm(last, axis=-1, keepdims=True), 1e-6)
        logits = last @ p["items"].T.astype(jnp.float32) / 0.05
        logits = logits.at[jnp.arange(b)[:, None], history].set(-jnp.inf)
        return lax.top_k(logits, min(100, items - t))

    params = {
        "items": normal(items, n, dtype=dtype, scale=n**-0.5),
        "positions": normal(t, n, dtype=dtype, scale=0.1),
        "uvqk": weight(n, 4 * n, dtype=dtype),
        "places": normal(2 * t - 1, scale=0.02),
        "times": normal(buckets + 1, scale=0.02),
        "out": weight(n, n, dtype=dtype),
        "out_bias": normal(n, dtype=dtype, scale=0.05),
    }
    history = (integers(b, t, below=items), integers(b, t, below=5000), integers(b, below=t + 1))
    return Built(rank, (params, *history))


@program("deepseek-v3-grouped-router-ragged", GROUP)
def _deepseek_experts(size: Size) -> Built:
    """DeepSeek V3's experts: sigmoid scores with a bias, the best groups, tokens sorted by expert, ragged products, shared one."""
    tokens, n, wide, experts, groups, best_groups, k = pick(
        size, (256, 2048, 1408, 64, 8, 4, 6), (128, 128, 96, 16, 4, 2, 4), (5, 6, 4, 8, 4, 2, 3)
    )
    dtype = half(size)

    def route(p, x):
        scores = jax.nn.sigmoid(x.astype(jnp.float32) @ p["router"])
        choice = scores + p["correction"]
        grouped = choice.reshape(tokens, groups, experts // groups)
        group_scores = jnp.sum(lax.top_k(grouped, 2)[0], axis=-1)
        _, chosen = lax.top_k(group_scores, best_groups)
        allowed = jnp.sum(jax.nn.one_hot(chosen, groups), axis=1) > 0
        choice = jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(tokens, experts)
        _, index = lax.top_k(choice, k)
        w = jnp.take_along_axis(scores, index, axis=-1)
        return index, w / (jnp.sum(w, axis=-1, keepdims=True) + 1e-20) * 2.5

    def gated(x, gate, up, down, product):
        return product(jax.nn.silu(product(x, gate)) * product(x, up), down)

    def layer(p, x):
        index, w = route(p, x)
        flat = index.reshape(-1)
        order = jnp.argsort(flat)
        counts = jnp.bincount(flat, length=experts)
        rows = x[order // k]
        y = gated(rows, p["gate"], p["up"], p["down"], lambda a, m: lax.ragged_dot(a, m, counts))
        y = y[jnp.argsort(order)].reshape(tokens, k, n)
        routed = jnp.einsum("tkn,tk->tn", y, w.astype(dtype))
        shared = gated(x, p["shared_gate"], p["shared_up"], p["shared_down"], jnp.matmul)
        return x + routed + shared, counts

    params = {
        "router": weight(n, experts),
        "correction": normal(experts, scale=0.05),
        "gate": weight(experts, n, wide, dtype=dtype),
        "up": weight(experts, n, wide, dtype=dtype),
        "down": weight(experts, wide, n, dtype=dtype),
        "shared_gate": weight(n, 2 * wide, dtype=dtype),
        "shared_up": weight(n, 2 * wide, dtype=dtype),
        "shared_down": weight(2 * wide, n, dtype=dtype),
    }
    return Built(layer, (params, normal(tokens, n, dtype=dtype)))
