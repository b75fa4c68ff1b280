"""Layers and blocks of recent models at inference, by an author who knew nothing of the package: a third set."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, booleans, gain, half, like, normal, pick, program, weight

GROUP = "third"


def _rms(x, scale, eps=1e-6):
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + eps) * scale).astype(x.dtype)


def _layer_norm(x, eps=1e-6):
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    var = ((x32 - mean) ** 2).mean(-1, keepdims=True)
    return ((x32 - mean) / jnp.sqrt(var + eps)).astype(x.dtype)


def _rope(x, positions, base=10000.0):
    """Rotates halves of x[b, t, h, d]."""
    d = x.shape[-1]
    freq = base ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)
    angle = positions[..., None, None] * freq
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@program("qwen3-qk-norm-decoder-layer", GROUP)
def _qwen3(size: Size) -> Built:
    """A prefill through a decoder layer of Qwen3: grouped queries, norms of queries and keys, SwiGLU."""
    b, t, n, h, kv, d, f = pick(
        size, (2, 2048, 2048, 16, 8, 128, 6144), (1, 256, 256, 8, 2, 32, 768), (1, 8, 16, 4, 2, 4, 24)
    )
    dtype = half(size)

    def attention(p, x, valid):
        pos = jnp.arange(t, dtype=jnp.float32)[None]
        q = _rope(_rms((x @ p["q"]).reshape(b, t, h, d), p["q_norm"]), pos, 1e6)
        k = _rope(_rms((x @ p["k"]).reshape(b, t, kv, d), p["k_norm"]), pos, 1e6)
        v = (x @ p["v"]).reshape(b, t, kv, d)
        k, v = jnp.repeat(k, h // kv, axis=2), jnp.repeat(v, h // kv, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * d**-0.5
        mask = jnp.tril(jnp.ones((t, t), bool))[None, None] & valid[:, None, None, :]
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
        probs = jax.nn.softmax(scores, axis=-1).astype(dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(b, t, h * d) @ p["o"]

    def layer(p, x, valid):
        x = x + attention(p, _rms(x, p["norm1"]), valid)
        y = _rms(x, p["norm2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    params = {"q": weight(n, h * d, dtype=dtype), "k": weight(n, kv * d, dtype=dtype)}
    params |= {"v": weight(n, kv * d, dtype=dtype), "o": weight(h * d, n, dtype=dtype)}
    params |= {"gate": weight(n, f, dtype=dtype), "up": weight(n, f, dtype=dtype), "down": weight(f, n, dtype=dtype)}
    params |= {"q_norm": gain(d), "k_norm": gain(d), "norm1": gain(n), "norm2": gain(n)}
    return Built(layer, (params, normal(b, t, n, dtype=dtype), booleans(b, t)))


@program("t5-relative-bias-decode-step", GROUP)
def _t5(size: Size) -> Built:
    """A step of T5's decoder: a cache, bucketed relative biases, then the encoder's padded keys."""
    b, t, s, n, h, d = pick(size, (64, 512, 512, 1024, 16, 64), (4, 128, 128, 256, 4, 64), (2, 6, 5, 8, 2, 4))
    dtype, buckets, far = half(size), 32, 128

    def bucket(distance):
        distance = jnp.maximum(distance, 0)
        exact = buckets // 2
        large = jnp.log(jnp.maximum(distance, 1) / exact) / np.log(far / exact) * (buckets - exact)
        large = jnp.minimum(exact + large.astype(jnp.int32), buckets - 1)
        return jnp.where(distance < exact, distance, large)

    def attend(q, k, v, bias):
        scores = jnp.einsum("bhd,bkhd->bhk", q, k).astype(jnp.float32) + bias
        return jnp.einsum("bhk,bkhd->bhd", jax.nn.softmax(scores, axis=-1).astype(dtype), v).reshape(b, h * d)

    def step(p, x, cache_k, cache_v, enc_k, enc_v, enc_mask):
        at = t - t // 4
        y = _rms(x, p["norm1"])
        q, k, v = ((y @ p[name]).reshape(b, h, d) for name in ("q", "k", "v"))
        cache_k = lax.dynamic_update_slice_in_dim(cache_k, k[:, None], at, axis=1)
        cache_v = lax.dynamic_update_slice_in_dim(cache_v, v[:, None], at, axis=1)
        keys = jnp.arange(t)
        bias = p["bias"][bucket(at - keys)].T + jnp.where(keys <= at, 0.0, -1e9)
        x = x + attend(q, cache_k, cache_v, bias) @ p["o"]
        q = (_rms(x, p["norm2"]) @ p["cq"]).reshape(b, h, d)
        x = x + attend(q, enc_k, enc_v, jnp.where(enc_mask, 0.0, -1e9)[:, None]) @ p["co"]
        y = _rms(x, p["norm3"])
        x = x + (jax.nn.gelu(y @ p["wi0"]) * (y @ p["wi1"])) @ p["wo"]
        return x, cache_k, cache_v

    params = {k: weight(n, h * d, dtype=dtype) for k in ("q", "k", "v", "cq")}
    params |= {k: weight(h * d, n, dtype=dtype) for k in ("o", "co")}
    params |= {"wi0": weight(n, 3 * n, dtype=dtype), "wi1": weight(n, 3 * n, dtype=dtype)}
    params |= {"wo": weight(3 * n, n, dtype=dtype), "bias": normal(buckets, h)}
    params |= {f"norm{i}": gain(n) for i in (1, 2, 3)}
    own, enc = normal(b, t, h, d, dtype=dtype), normal(b, s, h, d, dtype=dtype)
    return Built(step, (params, normal(b, n, dtype=dtype), own, own, enc, enc, booleans(b, s)))


@program("nemotron-squared-relu-layer", GROUP)
def _nemotron(size: Size) -> Built:
    """A layer of Nemotron-4: norms whose scale is one plus a weight, a partial rotation, a squared ReLU."""
    b, t, n, h, d = pick(size, (2, 2048, 2048, 16, 128), (1, 256, 256, 8, 32), (2, 6, 16, 2, 8))
    dtype, turned = half(size), d // 2

    def norm1p(p, x):
        return (_layer_norm(x, 1e-5) * (1.0 + p["w"]) + p["b"]).astype(x.dtype)

    def partial(x):
        pos = jnp.arange(t, dtype=jnp.float32)[None]
        return jnp.concatenate([_rope(x[..., :turned], pos), x[..., turned:]], axis=-1)

    def layer(p, x):
        qkv = (norm1p(p["norm1"], x) @ p["qkv"]).reshape(b, t, 3, h, d)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        out = jax.nn.dot_product_attention(partial(q), partial(k), v, is_causal=True)
        x = x + out.reshape(b, t, h * d) @ p["o"]
        return x + jnp.square(jax.nn.relu(norm1p(p["norm2"], x) @ p["up"])) @ p["down"]

    norm = {"w": normal(n, scale=0.1), "b": normal(n, scale=0.05)}
    params = {"qkv": weight(n, 3 * h * d, dtype=dtype), "o": weight(h * d, n, dtype=dtype), "norm1": norm}
    params |= {"up": weight(n, 4 * n, dtype=dtype), "down": weight(4 * n, n, dtype=dtype), "norm2": norm}
    return Built(layer, (params, normal(b, t, n, dtype=dtype)))


@program("gla-chunk-decay-gates", GROUP)
def _gla(size: Size) -> Built:
    """Gated linear attention in chunks, after flash-linear-attention: decays per channel, a gated norm of the output."""
    b, t, h, d, c = pick(size, (4, 2048, 8, 128, 64), (1, 512, 4, 32, 32), (1, 8, 2, 4, 4))
    dtype = half(size)

    def gla(q, k, v, gate, out_gate, scale):
        def split(x):
            return x.reshape(b, t // c, c, h, d).transpose(1, 0, 3, 2, 4).astype(jnp.float32)

        decay = jax.nn.log_sigmoid(gate.astype(jnp.float32)) / 16.0
        mask = jnp.tril(jnp.ones((c, c)))

        def chunk(state, xs):
            q, k, v, g = xs
            g = jnp.cumsum(g, axis=-2)
            total = g[..., -1:, :]
            inner = jnp.einsum("bhid,bhjd->bhij", q * jnp.exp(g), k * jnp.exp(-g)) * mask
            out = inner @ v + (q * jnp.exp(g)) @ state
            state = jnp.swapaxes(jnp.exp(total), -1, -2) * state
            state = state + jnp.einsum("bhid,bhie->bhde", k * jnp.exp(total - g), v)
            return state, out

        state = jnp.zeros((b, h, d, d), jnp.float32)
        state, out = lax.scan(chunk, state, (split(q) * d**-0.5, split(k), split(v), split(decay)))
        out = out.transpose(1, 0, 3, 2, 4).reshape(b, t, h, d)
        return (_rms(out, scale) * jax.nn.silu(out_gate)).astype(dtype), state

    x = normal(b, t, h, d, dtype=dtype)
    return Built(gla, (x, x, x, normal(b, t, h, d, dtype=dtype, offset=2.0), x, gain(d)))


@program("mlstm-parallel-stabilised", GROUP)
def _mlstm(size: Size) -> Built:
    """The parallel form of xLSTM's matrix memory: exponential gates in log space, a stabiliser per row, a norm per head."""
    b, h, t, d = pick(size, (4, 8, 2048, 128), (1, 4, 256, 64), (1, 2, 6, 4))
    dtype = half(size)

    def mlstm(q, k, v, igate, fgate, scale):
        log_f = jax.nn.log_sigmoid(fgate)
        cum = jnp.cumsum(log_f, axis=-1)
        log_d = cum[..., :, None] - cum[..., None, :] + igate[..., None, :]
        log_d = jnp.where(jnp.tril(jnp.ones((t, t), bool)), log_d, -jnp.inf)
        m = jnp.max(log_d, axis=-1, keepdims=True)
        weights = jnp.exp(log_d - m)
        qk = jnp.einsum("bhqd,bhkd->bhqk", q, k / np.sqrt(d).astype(dtype)).astype(jnp.float32)
        c = qk * weights
        normaliser = jnp.maximum(jnp.abs(jnp.sum(c, axis=-1, keepdims=True)), jnp.exp(-m))
        out = jnp.einsum("bhqk,bhkd->bhqd", (c / (normaliser + 1e-6)).astype(dtype), v)
        return _layer_norm(out) * scale[:, None, :].astype(dtype)

    x = normal(b, h, t, d, dtype=dtype)
    return Built(mlstm, (x, x, x, normal(b, h, t), normal(b, h, t, offset=3.0), normal(h, d, scale=0.1, offset=1.0)))


@program("hyena-filter-long-convolution", GROUP)
def _hyena(size: Size) -> Built:
    """A Hyena operator of order two: short convolutions, filters made by a sine network, products by FFT."""
    b, t, n, w = pick(size, (4, 4096, 512, 64), (1, 512, 64, 32), (2, 8, 4, 4))
    dtype, bands = half(size), 8

    def filters(p):
        time = jnp.linspace(0.0, 1.0, t)[:, None]
        z = jnp.concatenate([time, jnp.sin(time * jnp.arange(1, bands) * jnp.pi)], axis=-1)
        z = jnp.sin(p["freq"] * (z @ p["f1"]))
        z = jnp.sin(p["freq"] * (z @ p["f2"]))
        decay = jnp.exp(-time * jnp.abs(jnp.linspace(1.0, 20.0, n)))
        return (z @ p["f3"]) * (decay + 0.01)

    def short(kernel, x):
        padded = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))
        return sum(padded[:, i : i + t] * kernel[i] for i in range(3))

    def hyena(p, x):
        q, k, v = jnp.split(short(p["short"], x @ p["in"]), 3, axis=-1)
        u = (k * v).astype(jnp.float32)
        spectrum = jnp.fft.rfft(u, n=2 * t, axis=1) * jnp.fft.rfft(filters(p), n=2 * t, axis=0)
        y = jnp.fft.irfft(spectrum, n=2 * t, axis=1)[:, :t] + u * p["skip"]
        return (q * y.astype(dtype)) @ p["out"]

    params = {"in": weight(n, 3 * n, dtype=dtype), "out": weight(n, n, dtype=dtype), "skip": normal(n)}
    params |= {"short": normal(3, 3 * n, dtype=dtype, scale=0.5), "freq": normal(w, offset=1.0)}
    params |= {"f1": weight(bands, w), "f2": weight(w, w), "f3": weight(w, n)}
    return Built(hyena, (params, normal(b, t, n, dtype=dtype)))


@program("convnext-v2-response-norm-linen", GROUP)
def _convnext(size: Size) -> Built:
    """A block of ConvNeXt V2 in Flax Linen: a depthwise convolution, then global response normalisation."""
    from flax import linen as nn

    b, side, n = pick(size, (32, 28, 384), (2, 14, 96), (1, 8, 4))
    dtype = half(size)

    class GlobalResponseNorm(nn.Module):
        @nn.compact
        def __call__(self, x):
            gamma = self.param("gamma", nn.initializers.zeros, (x.shape[-1],))
            beta = self.param("beta", nn.initializers.zeros, (x.shape[-1],))
            g = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(1, 2), keepdims=True) + 1e-6)
            ratio = (g / (jnp.mean(g, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)
            return gamma.astype(x.dtype) * (x * ratio) + beta.astype(x.dtype) + x

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Conv(n, (7, 7), feature_group_count=n, dtype=dtype)(x)
            y = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(y)
            y = nn.gelu(nn.Dense(4 * n, dtype=dtype)(y))
            return x + nn.Dense(n, dtype=dtype)(GlobalResponseNorm()(y))

    x = normal(b, side, side, n, dtype=dtype)
    module = Block()
    return Built(module.apply, (like(jax.eval_shape(module.init, jax.random.key(0), x.struct), dtype), x))


@program("rwkv7-delta-state-scan", GROUP)
def _rwkv7(size: Size) -> Built:
    """The time mix of RWKV-7: a decayed state with a generalised delta rule, scanned, with a bonus of the present token."""
    b, t, h, d = pick(size, (8, 128, 16, 64), (1, 96, 4, 32), (1, 5, 2, 4))
    dtype = half(size)

    def time_mix(r, k, v, w, a, bonus, scale, bias):
        f32 = [x.astype(jnp.float32) for x in (r, k, v, w, a)]
        r, k, v, w, a = f32
        w = jnp.exp(-np.exp(-0.5) * jax.nn.sigmoid(w))
        a = jax.nn.sigmoid(a)
        kk = k / jnp.maximum(jnp.linalg.norm(k, axis=-1, keepdims=True), 1e-12)
        k = k * (1.0 + (a - 1.0) * 0.5)

        def step(s, xs):
            r, k, v, w, kk, a = xs
            removed = jnp.einsum("bhvk,bhk->bhv", s, -kk)
            s = s * w[:, :, None, :] + removed[..., None] * (kk * a)[:, :, None, :] + v[..., None] * k[:, :, None, :]
            return s, jnp.einsum("bhvk,bhk->bhv", s, r)

        xs = tuple(jnp.swapaxes(x, 0, 1) for x in (r, k, v, w, kk, a))
        state, out = lax.scan(step, jnp.zeros((b, h, d, d)), xs)
        out = _layer_norm(jnp.swapaxes(out, 0, 1), 64e-5) * scale + bias
        out = out + jnp.sum(r * k * bonus, axis=-1, keepdims=True) * v
        return out.astype(dtype), state

    x, heads = normal(b, t, h, d, dtype=dtype), normal(h, d, scale=0.3)
    return Built(time_mix, (x, x, x, x, x, heads, normal(h, d, scale=0.1, offset=1.0), heads))


@program("mmdit-joint-attention-block", GROUP)
def _mmdit(size: Size) -> Built:
    """A block of Stable Diffusion 3: text and image have weights of their own, and attend together."""
    b, t, s, n, h = pick(size, (2, 1024, 154, 1536, 24), (1, 144, 40, 192, 4), (1, 6, 3, 8, 2))
    dtype, d = half(size), n // h

    def pre(p, x, mod):
        shift, scale = mod[:, None, :n], mod[:, None, n : 2 * n]
        y = _layer_norm(x) * (1 + scale) + shift
        q, k, v = jnp.split((y @ p["qkv"]).reshape(b, -1, 3 * h, d), 3, axis=2)
        return _rms(q, p["q_norm"]), _rms(k, p["k_norm"]), v

    def post(p, x, out, mod):
        gate1, shift, scale, gate2 = jnp.split(mod[:, None, 2 * n :], 4, axis=-1)
        x = x + gate1 * (out @ p["o"])
        y = _layer_norm(x) * (1 + scale) + shift
        return x + gate2 * (jax.nn.gelu(y @ p["fc1"], approximate=True) @ p["fc2"])

    def block(p, image, text, c):
        mods = [jax.nn.silu(c) @ p[name]["mod"] for name in ("image", "text")]
        parts = [pre(p["image"], image, mods[0]), pre(p["text"], text, mods[1])]
        q, k, v = (jnp.concatenate(pair, axis=1) for pair in zip(*parts, strict=True))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * d**-0.5
        probs = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(dtype)
        out = jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(b, t + s, n)
        return post(p["image"], image, out[:, :t], mods[0]), post(p["text"], text, out[:, t:], mods[1])

    one = {"qkv": weight(n, 3 * n, dtype=dtype), "o": weight(n, n, dtype=dtype), "mod": weight(n, 6 * n, dtype=dtype)}
    one |= {"fc1": weight(n, 4 * n, dtype=dtype), "fc2": weight(4 * n, n, dtype=dtype)}
    one |= {"q_norm": gain(d), "k_norm": gain(d)}
    image, text = normal(b, t, n, dtype=dtype), normal(b, s, n, dtype=dtype)
    return Built(block, ({"image": one, "text": one}, image, text, normal(b, n, dtype=dtype)))


@program("griffin-recurrent-block", GROUP)
def _griffin(size: Size) -> Built:
    """The recurrent block of RecurrentGemma: a causal convolution, a gated linear recurrence by an associative scan."""
    b, t, n, heads = pick(size, (4, 2048, 1024, 8), (1, 256, 128, 4), (2, 6, 8, 2))
    dtype = half(size)

    def block_diagonal(w, bias, x):
        y = jnp.einsum("bthi,hij->bthj", x.reshape(b, t, heads, n // heads), w)
        return jax.nn.sigmoid(y.reshape(b, t, n).astype(jnp.float32) + bias)

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    def block(p, x):
        branch = jax.nn.gelu(x @ p["y"], approximate=True)
        u = x @ p["x"]
        padded = jnp.pad(u, ((0, 0), (3, 0), (0, 0)))
        u = sum(padded[:, i : i + t] * p["conv"][i] for i in range(4))
        r = block_diagonal(p["ra"], p["ba"], u)
        i = block_diagonal(p["rx"], p["bx"], u)
        log_a = -8.0 * r * jax.nn.softplus(p["lambda"])
        normal_x = jnp.sqrt(-jnp.expm1(2.0 * log_a)) * i * u.astype(jnp.float32)
        _, state = lax.associative_scan(combine, (jnp.exp(log_a), normal_x), axis=1)
        return (branch * state.astype(dtype)) @ p["out"]

    params = {k: weight(n, n, dtype=dtype) for k in ("x", "y", "out")}
    params |= {k: weight(heads, n // heads, n // heads, dtype=dtype) for k in ("ra", "rx")}
    params |= {"conv": normal(4, n, dtype=dtype, scale=0.5), "lambda": normal(n, scale=0.5, offset=-4.0)}
    params |= {"ba": normal(n), "bx": normal(n)}
    return Built(block, (params, normal(b, t, n, dtype=dtype)))
