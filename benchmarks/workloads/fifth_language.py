"""Layers of language models of a set that nobody had tried: an author who had seen no plan wrote it."""

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
