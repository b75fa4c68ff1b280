"""Thirty whole programs of vision, audio, biology, physics, recommendation, statistics and robotics, as users write them."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import (
    Built,
    Size,
    booleans,
    gain,
    half,
    integers,
    like,
    normal,
    pick,
    program,
    weight,
)

GROUP = "foreign-science"


def _bias(n: int, dtype: Any = jnp.float32) -> Any:
    return normal(n, dtype=dtype, scale=0.02)


def _dense(n_in: int, n_out: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    return {"kernel": weight(n_in, n_out, dtype=dtype), "bias": _bias(n_out, dtype)}


def _ln_params(n: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    return {"scale": gain(n, dtype), "bias": _bias(n, dtype)}


def _apply(p: Any, x: Any) -> Any:
    return x @ p["kernel"] + p["bias"]


# ---------------------------------------------------------------- vision


@program("swin-shifted-block-49", GROUP)
def _swin(size: Size) -> Built:
    """A shifted Swin block: roll, windows of 49 tokens, relative bias table, region mask, roll back, MLP."""
    batch, side, c, heads, win = pick(size, (32, 56, 96, 3, 7), (4, 28, 96, 3, 7), (1, 4, 8, 2, 2))
    shift, tokens = win // 2, win * win
    dtype = half(size)

    coords = np.stack(np.meshgrid(np.arange(win), np.arange(win), indexing="ij")).reshape(2, -1)
    rel = coords[:, :, None] - coords[:, None, :] + win - 1
    rel_index = rel[0] * (2 * win - 1) + rel[1]

    region = np.zeros((side, side), np.int32)
    cuts = (slice(0, -win), slice(-win, -shift), slice(-shift, None))
    for i, a in enumerate(cuts):
        for j, b in enumerate(cuts):
            region[a, b] = 3 * i + j
    g = side // win
    ids = region.reshape(g, win, g, win).transpose(0, 2, 1, 3).reshape(g * g, tokens)
    shift_mask = np.where(ids[:, :, None] != ids[:, None, :], -100.0, 0.0).astype(np.float32)

    def norm(p, x):
        xf = x.astype(jnp.float32)
        mu = xf.mean(-1, keepdims=True)
        var = ((xf - mu) ** 2).mean(-1, keepdims=True)
        return ((xf - mu) / jnp.sqrt(var + 1e-5)).astype(x.dtype) * p["scale"] + p["bias"]

    def block(p, x):
        shortcut = x
        x = jnp.roll(norm(p["norm1"], x), (-shift, -shift), axis=(1, 2))
        x = x.reshape(batch, g, win, g, win, c).transpose(0, 1, 3, 2, 4, 5).reshape(-1, tokens, c)
        qkv = _apply(p["qkv"], x).reshape(-1, tokens, 3, heads, c // heads).transpose(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q * (c // heads) ** -0.5) @ k.swapaxes(-2, -1)
        bias = p["table"][rel_index.reshape(-1)].reshape(tokens, tokens, heads).transpose(2, 0, 1)
        attn = attn.astype(jnp.float32) + bias[None]
        attn = attn.reshape(batch, g * g, heads, tokens, tokens) + shift_mask[None, :, None]
        attn = jax.nn.softmax(attn.reshape(-1, heads, tokens, tokens), axis=-1).astype(x.dtype)
        x = (attn @ v).transpose(0, 2, 1, 3).reshape(-1, tokens, c)
        x = _apply(p["proj"], x)
        x = x.reshape(batch, g, g, win, win, c).transpose(0, 1, 3, 2, 4, 5).reshape(batch, side, side, c)
        x = shortcut + jnp.roll(x, (shift, shift), axis=(1, 2))
        return x + _apply(p["fc2"], jax.nn.gelu(_apply(p["fc1"], norm(p["norm2"], x)), approximate=False))

    params = {
        "norm1": _ln_params(c, dtype),
        "norm2": _ln_params(c, dtype),
        "qkv": _dense(c, 3 * c, dtype),
        "proj": _dense(c, c, dtype),
        "fc1": _dense(c, 4 * c, dtype),
        "fc2": _dense(4 * c, c, dtype),
        "table": normal((2 * win - 1) ** 2, heads, scale=0.02),
    }
    return Built(block, (params, normal(batch, side, side, c, dtype=dtype)))


@program("vit-197-classifier-tail", GROUP)
def _vit(size: Size) -> Built:
    """The last block of a ViT with layer scale over 197 tokens, the class token's norm, 1000 classes and the top five."""
    batch, tokens, n, heads, classes = pick(size, (64, 197, 768, 12, 1000), (2, 197, 192, 3, 1000), (2, 5, 16, 2, 10))
    dtype = half(size)

    def layer_norm(x, scale, bias):
        x32 = jnp.asarray(x, jnp.float32)
        mean = jnp.mean(x32, axis=-1, keepdims=True)
        mean2 = jnp.mean(lax.square(x32), axis=-1, keepdims=True)
        var = jnp.maximum(0.0, mean2 - lax.square(mean))
        return ((x32 - mean) * (lax.rsqrt(var + 1e-6) * scale) + bias).astype(x.dtype)

    def forward(p, x):
        h = layer_norm(x, **p["ln1"])
        q, k, v = (jnp.einsum("btc,chd->bthd", h, p[name]) + p[name + "_bias"] for name in ("query", "key", "value"))
        logits = lax.dot_general(
            q, k, (((3,), (3,)), ((0, 2), (0, 2))), preferred_element_type=jnp.float32
        ) / math.sqrt(n // heads)
        logits -= lax.stop_gradient(logits.max(-1, keepdims=True))
        unnormalised = jnp.exp(logits)
        probs = (unnormalised / unnormalised.sum(-1, keepdims=True)).astype(dtype)
        ctx = jnp.einsum("bhqk,bkhd->bqhd", probs, v)
        x = x + p["gamma1"] * jnp.einsum("bthd,hdc->btc", ctx, p["out"])
        x = x + p["gamma2"] * _apply(p["fc2"], jax.nn.gelu(_apply(p["fc1"], layer_norm(x, **p["ln2"]))))
        cls = layer_norm(x[:, 0], **p["ln3"])
        scores = lax.dot_general(cls, p["head"]["kernel"], (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        probability = jax.nn.softmax(scores + p["head"]["bias"])
        return lax.top_k(probability, 5)

    d = n // heads
    params: dict[str, Any] = {f"ln{i}": _ln_params(n) for i in (1, 2, 3)}
    for name in ("query", "key", "value"):
        params[name] = normal(n, heads, d, dtype=dtype, scale=n**-0.5)
        params[name + "_bias"] = normal(heads, d, dtype=dtype, scale=0.02)
    params |= {"out": normal(heads, d, n, dtype=dtype, scale=n**-0.5)}
    params |= {"gamma1": normal(n, dtype=dtype, scale=0.1), "gamma2": normal(n, dtype=dtype, scale=0.1)}
    params |= {"fc1": _dense(n, 4 * n, dtype), "fc2": _dense(4 * n, n, dtype), "head": _dense(n, classes, dtype)}
    return Built(forward, (params, normal(batch, tokens, n, dtype=dtype)))


@program("sam-two-way-mask-decoder", GROUP)
def _sam(size: Size) -> Built:
    """One two-way block of a mask decoder over prompts (vmap): tokens to image, image to tokens, and masks by hypernetwork."""
    prompts, points, side, n, heads = pick(size, (16, 7, 64, 256, 8), (2, 7, 24, 256, 8), (2, 3, 4, 16, 2))
    dtype = half(size)
    inner, masks = n // 2, min(4, points)

    def attention(p, q, k, v):
        q, k, v = q @ p["q"], k @ p["k"], v @ p["v"]

        def split(t):
            return t.reshape(t.shape[0], heads, -1).transpose(1, 0, 2)

        q, k, v = split(q), split(k), split(v)
        a = jnp.matmul(q, k.transpose(0, 2, 1)) / np.sqrt(q.shape[-1]).astype(np.float32).item()
        out = jnp.matmul(jax.nn.softmax(a, axis=-1), v)
        return out.transpose(1, 0, 2).reshape(q.shape[1], -1) @ p["o"]

    def norm(p, x):
        return jax.nn.standardize(x.astype(jnp.float32), axis=-1, epsilon=1e-5).astype(x.dtype) * p["scale"] + p["bias"]

    def one_prompt(p, tokens, image, image_pe):
        queries, keys = tokens, image
        queries = norm(p["n1"], queries + attention(p["self"], queries, queries, queries))
        queries = norm(p["n2"], queries + attention(p["t2i"], queries + tokens, keys + image_pe, keys))
        queries = norm(p["n3"], queries + _apply(p["fc2"], jax.nn.relu(_apply(p["fc1"], queries))))
        keys = norm(p["n4"], keys + attention(p["i2t"], keys + image_pe, queries + tokens, queries))
        up = jax.nn.gelu(_apply(p["upscale"], keys))
        hyper = jax.nn.relu(_apply(p["h1"], queries[:masks])) @ p["h2"]
        return (hyper @ up.T).reshape(masks, side, side)

    def decoder(p, tokens, image, image_pe):
        return jax.vmap(one_prompt, in_axes=(None, 0, None, None))(p, tokens, image, image_pe)

    def att(width):
        return {k: weight(n, width, dtype=dtype) for k in "qkv"} | {"o": weight(width, n, dtype=dtype)}

    params = {"self": att(n), "t2i": att(inner), "i2t": att(inner)}
    params |= {f"n{i}": _ln_params(n, dtype) for i in (1, 2, 3, 4)}
    params |= {"fc1": _dense(n, 8 * n, dtype), "fc2": _dense(8 * n, n, dtype), "upscale": _dense(n, n // 8, dtype)}
    params |= {"h1": _dense(n, n, dtype), "h2": weight(n, n // 8, dtype=dtype)}
    image = normal(side * side, n, dtype=dtype)
    return Built(decoder, (params, normal(prompts, points, n, dtype=dtype), image, image))


@program("detr-padded-decoder-layer", GROUP)
def _detr(size: Size) -> Built:
    """A post-norm DETR decoder layer in linen: object queries, then a padded image memory, boxes and classes."""
    from flax import linen as nn

    batch, queries, memory, n, heads, classes = pick(
        size, (16, 100, 850, 256, 8, 92), (2, 100, 425, 256, 8, 92), (2, 4, 6, 16, 2, 5)
    )
    dtype = half(size)

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, tgt, query_pos, mem, pos, valid):
            attend = partial(nn.MultiHeadDotProductAttention, num_heads=heads, dtype=dtype, deterministic=True)
            q = tgt + query_pos
            tgt = nn.LayerNorm(dtype=dtype)(tgt + attend()(q, q, tgt))
            mask = jnp.broadcast_to(valid[:, None, None, :], (batch, 1, queries, memory))
            cross = attend()(tgt + query_pos, mem + pos, mem, mask=mask)
            tgt = nn.LayerNorm(dtype=dtype)(tgt + cross)
            ff = nn.Dense(n, dtype=dtype)(nn.relu(nn.Dense(8 * n, dtype=dtype)(tgt)))
            tgt = nn.LayerNorm(dtype=dtype)(tgt + ff)
            h = nn.relu(nn.Dense(n, dtype=dtype)(tgt))
            return nn.log_softmax(nn.Dense(classes, dtype=jnp.float32)(tgt)), nn.sigmoid(nn.Dense(4, dtype=dtype)(h))

    q, m = normal(batch, queries, n, dtype=dtype), normal(batch, memory, n, dtype=dtype)
    inputs = (q, normal(1, queries, n, dtype=dtype), m, m, booleans(batch, memory))
    module = Layer()
    shapes = jax.eval_shape(lambda *xs: module.init(jax.random.key(0), *xs), *[r.struct for r in inputs])
    return Built(module.apply, (like(shapes, dtype), *inputs))


@program("latent-unet-resnet-nnx", GROUP)
def _unet_resnet(size: Size) -> Built:
    """A resnet block of a latent diffusion U-Net in nnx: group norm, silu, 3x3, timestep added, and a 1x1 shortcut."""
    from flax import nnx

    batch, side, c_in, c_out, emb, groups = pick(
        size, (4, 64, 320, 640, 1280, 32), (2, 24, 96, 160, 320, 32), (1, 4, 8, 16, 16, 4)
    )
    dtype = half(size)

    class ResnetBlock(nnx.Module):
        def __init__(self, rngs):
            self.norm1 = nnx.GroupNorm(c_in, num_groups=groups, epsilon=1e-5, dtype=dtype, rngs=rngs)
            self.conv1 = nnx.Conv(c_in, c_out, (3, 3), dtype=dtype, rngs=rngs)
            self.time = nnx.Linear(emb, c_out, dtype=dtype, rngs=rngs)
            self.norm2 = nnx.GroupNorm(c_out, num_groups=groups, epsilon=1e-5, dtype=dtype, rngs=rngs)
            self.conv2 = nnx.Conv(c_out, c_out, (3, 3), dtype=dtype, rngs=rngs)
            self.shortcut = nnx.Conv(c_in, c_out, (1, 1), dtype=dtype, rngs=rngs)

        def __call__(self, x, temb):
            h = self.conv1(nnx.swish(self.norm1(x)))
            h = h + jnp.expand_dims(jnp.expand_dims(self.time(nnx.swish(temb)), 1), 1)
            h = self.conv2(nnx.swish(self.norm2(h)))
            return h + self.shortcut(x)

    graph, state = nnx.split(nnx.eval_shape(lambda: ResnetBlock(nnx.Rngs(0))))
    structs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    inputs = normal(batch, side, side, c_in, dtype=dtype), normal(batch, emb, dtype=dtype)
    return Built(lambda state, x, t: nnx.merge(graph, state)(x, t), (like(structs, dtype), *inputs))


@program("latent-unet-text-77", GROUP)
def _unet_text(size: Size) -> Built:
    """A U-Net's transformer block at width 320: pixels attend to 77 text tokens, then a GEGLU feed-forward."""
    batch, pixels, n, text, text_n, heads = pick(
        size, (2, 4096, 320, 77, 768, 8), (1, 576, 320, 77, 768, 8), (1, 6, 16, 3, 8, 2)
    )
    dtype = half(size)
    dim = n // heads

    def norm(x, p):
        mean = jnp.mean(x, -1, keepdims=True, dtype=jnp.float32)
        var = jnp.var(x.astype(jnp.float32), -1, keepdims=True)
        y = (x - mean) * lax.rsqrt(var + 1e-5)
        return (y * p["scale"] + p["bias"]).astype(x.dtype)

    def cross(p, x, context):
        q = (x @ p["to_q"]).reshape(batch, -1, heads, dim).transpose(0, 2, 1, 3).reshape(batch * heads, -1, dim)
        k = (context @ p["to_k"]).reshape(batch, -1, heads, dim).transpose(0, 2, 1, 3).reshape(batch * heads, -1, dim)
        v = (context @ p["to_v"]).reshape(batch, -1, heads, dim).transpose(0, 2, 1, 3).reshape(batch * heads, -1, dim)
        scores = jnp.einsum("b i d, b j d -> b i j", q, k) * dim**-0.5
        out = jnp.einsum("bij,bjd->bid", jax.nn.softmax(scores, axis=2), v)
        out = out.reshape(batch, heads, -1, dim).transpose(0, 2, 1, 3).reshape(batch, -1, n)
        return out @ p["to_out"]

    def block(p, x, context):
        x = cross(p["attn"], norm(x, p["norm1"]), context) + x
        hidden, gate = jnp.split(_apply(p["geglu"], norm(x, p["norm2"])), 2, axis=-1)
        return _apply(p["out"], hidden * jax.nn.gelu(gate)) + x

    attn = {"to_q": weight(n, n, dtype=dtype), "to_out": weight(n, n, dtype=dtype)}
    attn |= {"to_k": weight(text_n, n, dtype=dtype), "to_v": weight(text_n, n, dtype=dtype)}
    params = {"attn": attn, "norm1": _ln_params(n), "norm2": _ln_params(n)}
    params |= {"geglu": _dense(n, 8 * n, dtype), "out": _dense(4 * n, n, dtype)}
    return Built(block, (params, normal(batch, pixels, n, dtype=dtype), normal(batch, text, text_n, dtype=dtype)))


@program("dit-adaln-flow-grad", GROUP)
def _dit(size: Size) -> Built:
    """Loss and gradients of rectified flow through a DiT block with adaLN-zero; float32 weights cast where used."""
    batch, tokens, n, heads = pick(size, (4, 256, 1152, 16), (1, 64, 256, 4), (2, 4, 16, 2))
    dtype = half(size)

    def modulate(x, shift, scale):
        mean = x.mean(-1, keepdims=True)
        var = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(var + 1e-6) * (1 + scale[:, None]) + shift[:, None]

    def velocity(p, x, t):
        freqs = jnp.exp(-math.log(10000.0) * jnp.arange(n // 2) / (n // 2))
        ang = 1000.0 * t[:, None] * freqs[None]
        cond = jnp.concatenate([jnp.cos(ang), jnp.sin(ang)], -1)
        mod = _apply(p["ada"], jax.nn.silu(_apply(p["time"], cond)))
        s1, c1, g1, s2, c2, g2 = jnp.split(mod, 6, axis=-1)
        h = modulate(x, s1, c1).astype(dtype)
        q, k, v = jnp.moveaxis((h @ p["qkv"].astype(dtype)).reshape(batch, tokens, 3, heads, -1), 2, 0)
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * (n // heads) ** -0.5
        a = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s).astype(dtype), v).reshape(batch, tokens, n)
        x = x + g1[:, None] * (a @ p["out"].astype(dtype)).astype(jnp.float32)
        h = modulate(x, s2, c2).astype(dtype)
        h = jax.nn.gelu(h @ p["up"].astype(dtype)) @ p["down"].astype(dtype)
        return x + g2[:, None] * h.astype(jnp.float32)

    def loss(p, data, noise, logit_t):
        t = jax.nn.sigmoid(logit_t)
        x_t = (1 - t[:, None, None]) * data + t[:, None, None] * noise
        return jnp.mean((velocity(p, x_t, t) - (noise - data)) ** 2)

    params = {"ada": _dense(n, 6 * n), "time": _dense(n, n), "qkv": weight(n, 3 * n), "out": weight(n, n)}
    params |= {"up": weight(n, 4 * n), "down": weight(4 * n, n)}
    x = normal(batch, tokens, n)
    return Built(jax.value_and_grad(loss), (params, x, x, normal(batch)))


@program("guided-step-with-ema", GROUP)
def _guidance(size: Size) -> Built:
    """A DDIM step: the EMA of the weights, classifier-free guidance by one doubled batch, rescaled and clipped."""
    batch, side, width, cond_n = pick(size, (8, 64, 128, 768), (2, 32, 64, 128), (1, 4, 8, 8))

    def conv(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def denoise(p, x, cond):
        h = conv(x, p["in"])
        scale, shift = jnp.split(jax.nn.silu(cond @ p["c1"]) @ p["c2"], 2, -1)
        b, a, d, _ = h.shape
        g = h.reshape(b, a, d, 4, width // 4)
        g = (g - g.mean((1, 2, 4), keepdims=True)) / jnp.sqrt(g.var((1, 2, 4), keepdims=True) + 1e-5)
        h = h + conv(jax.nn.silu(g.reshape(h.shape) * (1 + scale[:, None, None]) + shift[:, None, None]), p["mid"])
        return conv(jax.nn.silu(h), p["out"])

    def step(params, ema, x, cond, null, alpha_logits):
        ema = jax.tree.map(lambda e, q: e * 0.9999 + q * (1.0 - 0.9999), ema, params)
        a_t, a_prev = jax.nn.sigmoid(alpha_logits[0]), jax.nn.sigmoid(alpha_logits[1])
        both = denoise(ema, jnp.concatenate([x, x]), jnp.concatenate([cond, jnp.broadcast_to(null, cond.shape)]))
        eps_c, eps_u = jnp.split(both, 2)
        eps = eps_u + 7.5 * (eps_c - eps_u)
        ratio = eps_c.std(axis=(1, 2, 3), keepdims=True) / (eps.std(axis=(1, 2, 3), keepdims=True) + 1e-8)
        eps = 0.7 * eps * ratio + 0.3 * eps
        x0 = jnp.clip((x - jnp.sqrt(1 - a_t) * eps) / jnp.sqrt(a_t), -4.0, 4.0)
        eps = (x - jnp.sqrt(a_t) * x0) / jnp.sqrt(1 - a_t)
        return jnp.sqrt(a_prev) * x0 + jnp.sqrt(1 - a_prev) * eps, ema

    params = {
        "in": normal(3, 3, 4, width, scale=(9 * 4) ** -0.5),
        "mid": normal(3, 3, width, width, scale=(9 * width) ** -0.5),
        "out": normal(3, 3, width, 4, scale=(9 * width) ** -0.5),
        "c1": weight(cond_n, 1280 if size == "gpu" else width),
        "c2": weight(1280 if size == "gpu" else width, 2 * width),
    }
    arguments = normal(batch, side, side, 4), normal(batch, cond_n), normal(cond_n), normal(2)
    return Built(step, (params, params, *arguments))


@program("radiance-field-rays", GROUP)
def _nerf(size: Size) -> Built:
    """NeRF: positional encoding, an MLP with a view branch, and rendering by transmittance on a white background."""
    rays, samples, width, freqs = pick(size, (4096, 64, 256, 10), (96, 32, 96, 10), (3, 4, 8, 2))

    def encode(x, levels):
        xb = (x[..., None, :] * (2.0 ** jnp.arange(levels))[:, None]).reshape(*x.shape[:-1], -1)
        return jnp.concatenate([x, jnp.sin(xb), jnp.sin(xb + 0.5 * jnp.pi)], -1)

    def render(p, origins, directions, jitter):
        view = directions / jnp.linalg.norm(directions, axis=-1, keepdims=True)
        edges = jnp.linspace(2.0, 6.0, samples)
        t = edges + 4.0 / samples * jax.nn.sigmoid(jitter)
        points = origins[:, None, :] + t[..., None] * view[:, None, :]
        h = encode(points, freqs)
        skip = h
        for i, layer in enumerate(p["trunk"]):
            h = jax.nn.relu(_apply(layer, h if i != 2 else jnp.concatenate([h, skip], -1)))
        sigma = jax.nn.softplus(_apply(p["sigma"], h)[..., 0] - 1.0)
        v = jnp.broadcast_to(encode(view, 4)[:, None], (rays, samples, 27))
        rgb = jax.nn.sigmoid(_apply(p["rgb2"], jax.nn.relu(_apply(p["rgb1"], jnp.concatenate([h, v], -1)))))
        delta = jnp.concatenate([t[:, 1:] - t[:, :-1], jnp.full((rays, 1), 1e10)], -1)
        alpha = 1.0 - jnp.exp(-sigma * delta)
        trans = jnp.cumprod(1.0 - alpha[:, :-1] + 1e-10, axis=-1)
        weights = alpha * jnp.concatenate([jnp.ones((rays, 1)), trans], -1)
        acc = weights.sum(-1)
        colour = (weights[..., None] * rgb).sum(-2) + (1.0 - acc[:, None])
        return colour, (weights * t).sum(-1), acc

    n_in = 3 + 6 * freqs
    trunk = [_dense(n_in, width), _dense(width, width), _dense(width + n_in, width), _dense(width, width)]
    params = {"trunk": trunk, "sigma": _dense(width, 1), "rgb1": _dense(width + 27, width // 2)}
    params["rgb2"] = _dense(width // 2, 3)
    return Built(render, (params, normal(rays, 3, scale=0.3), normal(rays, 3), normal(rays, samples)))


@program("gated-bag-attention-grad", GROUP)
def _mil(size: Size) -> Built:
    """Multiple-instance learning on slides: gated attention pooling over padded bags, and its loss and gradients."""
    bags, instances, n, hidden = pick(size, (8, 2048, 1024, 384), (4, 500, 320, 96), (2, 16, 8, 4))

    def loss(p, x, there, label):
        h = jax.nn.relu(_apply(p["embed"], x))
        a = jnp.tanh(_apply(p["v"], h)) * jax.nn.sigmoid(_apply(p["u"], h)) @ p["w"]
        a = jnp.where(there, jnp.squeeze(a, -1), -jnp.inf)
        a = jax.nn.softmax(a, axis=1)
        z = jnp.einsum("bi,bid->bd", a, h)
        logit = _apply(p["head"], z)[:, 0]
        y = label.astype(jnp.float32)
        return jnp.mean(jnp.maximum(logit, 0) - logit * y + jnp.log1p(jnp.exp(-jnp.abs(logit))))

    params = {"embed": _dense(n, hidden), "v": _dense(hidden, hidden // 2), "u": _dense(hidden, hidden // 2)}
    params |= {"w": weight(hidden // 2, 1), "head": _dense(hidden, 1)}
    arguments = normal(bags, instances, n), booleans(bags, instances), integers(bags, below=2)
    return Built(jax.value_and_grad(loss), (params, *arguments))


# ---------------------------------------------------------------- audio


@program("log-mel-utterance-norm", GROUP)
def _mel(size: Size) -> Built:
    """Pre-emphasis, framing, a Hann window, power spectrum, 80 mel bands, a floor below the maximum, mean and variance norm."""
    batch, length, frame, hop, mels = pick(
        size, (32, 160000, 400, 160, 80), (12, 48000, 400, 160, 80), (1, 64, 16, 8, 4)
    )
    n_fft = 512 if frame == 400 else 16
    count = 1 + (length - frame) // hop
    top = 2595.0 * np.log10(1.0 + 8000.0 / 700.0)
    hz = 700.0 * (10.0 ** (np.linspace(0.0, top, mels + 2) / 2595.0) - 1.0)
    bins = np.linspace(0.0, 8000.0, n_fft // 2 + 1)
    up = (bins[:, None] - hz[None, :-2]) / (hz[1:-1] - hz[:-2])
    down = (hz[None, 2:] - bins[:, None]) / (hz[2:] - hz[1:-1])
    bank = np.maximum(0.0, np.minimum(up, down)).astype(np.float32)
    window = np.hanning(frame).astype(np.float32)

    def features(wave):
        wave = jnp.concatenate([wave[:, :1], wave[:, 1:] - 0.97 * wave[:, :-1]], axis=1)
        index = jnp.arange(count)[:, None] * hop + jnp.arange(frame)[None, :]
        frames = wave[:, index] * window
        spectrum = jnp.abs(jnp.fft.rfft(frames, n=n_fft)) ** 2
        mel = jnp.log10(jnp.maximum(spectrum @ bank, 1e-10))
        mel = jnp.maximum(mel, mel.max(axis=(1, 2), keepdims=True) - 8.0)
        centred = mel - jnp.mean(mel, axis=1, keepdims=True)
        return centred / (jnp.sqrt(jnp.mean(centred * centred, axis=1, keepdims=True)) + 1e-5)

    return Built(features, (normal(batch, length, scale=0.1),))


# ---------------------------------------------------------------- biology


@program("evoformer-msa-row-outer-mean", GROUP)
def _evoformer(size: Size) -> Built:
    """MSA row attention with a bias of the pairs and a gate, then the outer product mean into the pairs."""
    seqs, res, c_m, c_z, heads, c_o = pick(
        size, (64, 256, 256, 128, 8, 32), (24, 72, 64, 48, 4, 16), (3, 5, 8, 8, 2, 4)
    )
    dtype = half(size)
    d = c_m // heads

    def ln(p, x):
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(x32, axis=-1, keepdims=True)
        variance = jnp.var(x32, axis=-1, keepdims=True)
        return (p["scale"] * (x32 - mean) / jnp.sqrt(variance + 1e-5) + p["bias"]).astype(x.dtype)

    def update(p, msa, pair, mask):
        m = ln(p["ln_m"], msa)
        pair_bias = jnp.einsum("qkc,ch->hqk", ln(p["ln_z"], pair), p["pair_w"])
        bias = 1e9 * (mask.astype(jnp.float32) - 1.0)[:, None, None, :]
        q = jnp.einsum("sra,ahc->srhc", m, p["q"]) * d ** (-0.5)
        k = jnp.einsum("sra,ahc->srhc", m, p["k"])
        v = jnp.einsum("sra,ahc->srhc", m, p["v"])
        logits = jnp.einsum("bqhc,bkhc->bhqk", q, k).astype(jnp.float32) + bias + pair_bias[None]
        weights = jax.nn.softmax(logits).astype(dtype)
        average = jnp.einsum("bhqk,bkhc->bqhc", weights, v)
        gate = jax.nn.sigmoid(jnp.einsum("bqa,ahc->bqhc", m, p["gate_w"]) + p["gate_b"])
        msa = msa + jnp.einsum("bqhc,hco->bqo", average * gate, p["o"])

        act = ln(p["ln_o"], msa)
        float_mask = mask[..., None].astype(dtype)
        left, right = float_mask * (act @ p["left"]), float_mask * (act @ p["right"])
        outer = jnp.einsum("sic,sje->ijce", left, right)
        norm = jnp.einsum("abc,adc->bdc", float_mask, float_mask)
        pair = pair + jnp.einsum("ijce,cef->ijf", outer, p["outer_w"]) / (1e-3 + norm)
        return msa, pair

    head = normal(c_m, heads, d, dtype=dtype, scale=c_m**-0.5)
    params = {
        "q": head,
        "k": head,
        "v": head,
        "gate_w": head,
        "gate_b": normal(heads, d, dtype=dtype, scale=0.1, offset=1.0),
    }
    params |= {"o": normal(heads, d, c_m, dtype=dtype, scale=c_m**-0.5), "pair_w": weight(c_z, heads, dtype=dtype)}
    params |= {"left": weight(c_m, c_o, dtype=dtype), "right": weight(c_m, c_o, dtype=dtype)}
    params |= {"outer_w": normal(c_o, c_o, c_z, dtype=dtype, scale=1.0 / c_o)}
    params |= {"ln_m": _ln_params(c_m), "ln_z": _ln_params(c_z), "ln_o": _ln_params(c_m)}
    arguments = normal(seqs, res, c_m, dtype=dtype), normal(res, res, c_z, dtype=dtype), booleans(seqs, res)
    return Built(update, (params, *arguments))


@program("triangles-incoming-then-ending", GROUP)
def _triangles(size: Size) -> Built:
    """Pairs of residues: triangle multiplication along incoming edges, then triangle attention around ending nodes."""
    res, c, heads = pick(size, (256, 128, 4), (64, 64, 4), (4, 8, 2))
    dtype = half(size)
    d = c // heads

    def ln(p, x):
        x = x.astype(jnp.float32)
        mean = x.mean(-1, keepdims=True)
        square = (x * x).mean(-1, keepdims=True)
        return ((x - mean) * lax.rsqrt(square - mean**2 + 1e-5) * p["scale"] + p["bias"]).astype(dtype)

    def incoming(p, z, mask):
        x = ln(p["ln_in"], z)
        proj = mask[..., None].astype(dtype) * (x @ p["proj"]) * jax.nn.sigmoid(x @ p["proj_gate"])
        left, right = proj[..., :c], proj[..., c:]
        out = jnp.einsum("kjc,kic->ijc", left, right, preferred_element_type=jnp.float32)
        return (ln(p["ln_mid"], out) @ p["mul_out"]) * jax.nn.sigmoid(x @ p["out_gate"])

    def ending(p, z, mask):
        x = ln(p["ln_att"], jnp.swapaxes(z, 0, 1))
        there = jnp.swapaxes(mask, 0, 1)
        bias = jnp.transpose(x @ p["att_bias"], (2, 0, 1)).astype(jnp.float32)

        def row(r, seen):
            q, k, v = ((r @ p[name]).reshape(res, heads, d) for name in ("att_q", "att_k", "att_v"))
            s = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32) / jnp.sqrt(float(d)) + bias
            s = jnp.where(seen[None, None, :], s, jnp.finfo(jnp.float32).min)
            a = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(s, -1).astype(dtype), v).reshape(res, c)
            return (a * jax.nn.sigmoid(r @ p["att_gate"])) @ p["att_out"]

        return jnp.swapaxes(jax.vmap(row)(x, there), 0, 1)

    def block(p, z, mask):
        z = z + incoming(p, z, mask)
        return z + ending(p, z, mask)

    names = ("mul_out", "out_gate", "att_q", "att_k", "att_v", "att_gate", "att_out")
    params: dict[str, Any] = {name: weight(c, c, dtype=dtype) for name in names}
    params |= {"proj": weight(c, 2 * c, dtype=dtype), "proj_gate": weight(c, 2 * c, dtype=dtype)}
    params |= {"att_bias": weight(c, heads, dtype=dtype)} | {k: _ln_params(c) for k in ("ln_in", "ln_mid", "ln_att")}
    return Built(block, (params, normal(res, res, c, dtype=dtype), booleans(res, res)))


@program("invariant-points-and-frames", GROUP)
def _ipa(size: Size) -> Built:
    """Invariant point attention: frames by Gram-Schmidt, squared distances of points in the scores, values in local frames."""
    n, c, c_z, heads, sq, pq, pv = pick(
        size, (384, 384, 128, 12, 16, 4, 8), (140, 96, 32, 6, 16, 4, 8), (5, 8, 4, 2, 4, 2, 3)
    )

    def frames(v1, v2):
        e1 = v1 / jnp.linalg.norm(v1, axis=-1, keepdims=True)
        u2 = v2 - e1 * jnp.sum(e1 * v2, -1, keepdims=True)
        e2 = u2 / jnp.linalg.norm(u2, axis=-1, keepdims=True)
        return jnp.stack([e1, e2, jnp.cross(e1, e2)], axis=-1)

    def attention(p, s, z, v1, v2, trans, there):
        rot = frames(v1, v2)
        q, k = ((s @ p[x]).reshape(n, heads, sq) for x in ("q", "k"))
        v = (s @ p["v"]).reshape(n, heads, sq)

        def to_global(x):
            return jnp.einsum("nij,nhpj->nhpi", rot, x) + trans[:, None, None, :]

        q_pts = to_global((s @ p["q_pts"]).reshape(n, heads, pq, 3))
        k_pts = to_global((s @ p["k_pts"]).reshape(n, heads, pq, 3))
        v_pts = to_global((s @ p["v_pts"]).reshape(n, heads, pv, 3))
        d2 = jnp.sum((q_pts[:, None] - k_pts[None]) ** 2, axis=(-1, -2))
        gamma = jax.nn.softplus(p["gamma"]) * math.sqrt(1.0 / (3 * (pq * 9.0 / 2)))
        logits = math.sqrt(1.0 / (3 * sq)) * jnp.einsum("qhc,khc->qkh", q, k)
        logits = logits + math.sqrt(1.0 / 3) * (z @ p["z_bias"]) - 0.5 * gamma * d2
        logits = logits - 1e5 * (1.0 - (there[:, None] & there[None, :]).astype(jnp.float32))[..., None]
        a = jax.nn.softmax(logits, axis=1)
        o = jnp.einsum("qkh,khc->qhc", a, v)
        o_pts = jnp.einsum("qkh,khpx->qhpx", a, v_pts) - trans[:, None, None, :]
        o_pts = jnp.einsum("nji,nhpj->nhpi", rot, o_pts)
        length = jnp.sqrt(jnp.sum(o_pts**2, -1) + 1e-8)
        o_z = jnp.einsum("qkh,qkc->qhc", a, z)
        out = jnp.concatenate([t.reshape(n, -1) for t in (o, o_pts, length, o_z)], -1)
        return s + out @ p["out"]

    params = {k: weight(c, heads * sq) for k in "qkv"} | {"gamma": normal(heads, scale=0.1, offset=0.5)}
    params |= {
        "q_pts": weight(c, heads * pq * 3),
        "k_pts": weight(c, heads * pq * 3),
        "v_pts": weight(c, heads * pv * 3),
    }
    params |= {"z_bias": weight(c_z, heads), "out": weight(heads * (sq + 4 * pv + c_z), c)}
    vec = normal(n, 3)
    return Built(attention, (params, normal(n, c), normal(n, n, c_z), vec, vec, normal(n, 3), booleans(n)))


@program("hmm-posterior-two-scans", GROUP)
def _hmm(size: Size) -> Built:
    """The posterior of a hidden Markov model: forward and backward in log space by two scans, vmapped over sequences."""
    batch, steps, states = pick(size, (16, 64, 256), (4, 48, 128), (2, 5, 3))

    def posterior(log_emit, trans_logits, init_logits):
        log_a, log_pi = jax.nn.log_softmax(trans_logits, axis=1), jax.nn.log_softmax(init_logits)

        def one(emit):
            def forward(alpha, e):
                new = jax.scipy.special.logsumexp(alpha[:, None] + log_a, axis=0) + e
                return new, new

            def backward(beta, e):
                new = jax.scipy.special.logsumexp(log_a + (e + beta)[None, :], axis=1)
                return new, beta

            first = log_pi + emit[0]
            last, alphas = lax.scan(forward, first, emit[1:])
            _, betas = lax.scan(backward, jnp.zeros(states), jnp.roll(emit, -1, axis=0), reverse=True)
            alphas = jnp.concatenate([first[None], alphas])
            evidence = jax.scipy.special.logsumexp(last)
            return jnp.exp(
                alphas + betas - jax.scipy.special.logsumexp(alphas + betas, axis=1, keepdims=True)
            ), evidence

        return jax.vmap(one)(log_emit)

    return Built(posterior, (normal(batch, steps, states), normal(states, states), normal(states)))


# ---------------------------------------------------------------- physics


@program("lennard-jones-periodic-grad", GROUP)
def _lennard_jones(size: Size) -> Built:
    """The energy of a truncated, shifted and soft-cored Lennard-Jones fluid in a periodic box, with its forces."""
    n = pick(size, 4096, 1024, 6)
    box = float((n / 0.8) ** (1 / 3))
    cutoff = min(2.5, box / 2)

    def energy(fraction):
        pos = box * fraction
        dr = pos[:, None, :] - pos[None, :, :]
        dr = dr - box * jnp.round(dr / box)
        r2 = jnp.sum(dr**2, axis=-1)
        near = (r2 < cutoff**2) & ~jnp.eye(n, dtype=bool)
        safe = jnp.where(near, jnp.maximum(r2, 0.64), 1.0)
        inv6 = (1.0 / safe) ** 3
        shift = cutoff**-12 - cutoff**-6
        return 0.5 * jnp.sum(jnp.where(near, 4.0 * (inv6 * (inv6 - 1.0) - shift), 0.0))

    def forces(fraction):
        value, gradient = jax.value_and_grad(energy)(fraction)
        return value, -gradient / box

    return Built(forces, (normal(n, 3, scale=0.5),))


@program("fourier-operator-layer", GROUP)
def _fno(size: Size) -> Built:
    """A layer of a Fourier neural operator: two corners of the spectrum times complex weights, a 1x1 skip, instance norm."""
    batch, side, c, modes = pick(size, (16, 64, 64, 12), (4, 64, 32, 12), (1, 8, 4, 2))

    def layer(p, x):
        ft = jnp.fft.rfft2(x, axes=(1, 2))
        out = jnp.zeros((batch, side, side // 2 + 1, c), jnp.complex64)
        w1 = lax.complex(p["re1"], p["im1"])
        w2 = lax.complex(p["re2"], p["im2"])
        out = out.at[:, :modes, :modes].set(jnp.einsum("bxyi,ioxy->bxyo", ft[:, :modes, :modes], w1))
        out = out.at[:, -modes:, :modes].set(jnp.einsum("bxyi,ioxy->bxyo", ft[:, -modes:, :modes], w2))
        y = jnp.fft.irfft2(out, s=(side, side), axes=(1, 2)) + jnp.einsum("bxyi,io->bxyo", x, p["skip"]) + p["bias"]
        mean, var = jnp.mean(y, axis=(1, 2), keepdims=True), jnp.var(y, axis=(1, 2), keepdims=True)
        y = (y - mean) / jnp.sqrt(var + 1e-5) * p["scale"] + p["shift"]
        return jax.nn.gelu(y)

    spectral = normal(c, c, modes, modes, scale=1.0 / c)
    params = {name: spectral for name in ("re1", "im1", "re2", "im2")}
    params |= {"skip": weight(c, c), "bias": _bias(c), "scale": gain(c), "shift": _bias(c)}
    return Built(layer, (params, normal(batch, side, side, c)))


@program("neural-ode-runge-kutta", GROUP)
def _ode(size: Size) -> Built:
    """A continuous flow: sixteen Runge-Kutta steps of a network of time and state, in a fori_loop."""
    rows, n, hidden, steps = pick(size, (2048, 64, 256, 16), (256, 32, 96, 12), (4, 3, 8, 3))

    def field(p, t, y):
        h = jnp.tanh(_apply(p[0], jnp.concatenate([y, jnp.full((rows, 1), t)], axis=-1)))
        h = jnp.tanh(_apply(p[1], h))
        return _apply(p[2], h)

    def integrate(p, y0):
        dt = 1.0 / steps

        def body(i, y):
            t = i * dt
            k1 = field(p, t, y)
            k2 = field(p, t + dt / 2, y + dt / 2 * k1)
            k3 = field(p, t + dt / 2, y + dt / 2 * k2)
            k4 = field(p, t + dt, y + dt * k3)
            return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

        y = lax.fori_loop(0, steps, body, y0)
        return y, -0.5 * jnp.sum(y * y, axis=-1) - 0.5 * n * jnp.log(2 * jnp.pi)

    return Built(integrate, ([_dense(n + 1, hidden), _dense(hidden, hidden), _dense(hidden, n)], normal(rows, n)))


# ---------------------------------------------------------------- recommendation


@program("deep-fm-click-linen", GROUP)
def _deepfm(size: Size) -> Built:
    """DeepFM in linen: first order, the pairwise term by squares of sums, a deep tower, and the mean click loss."""
    from flax import linen as nn

    batch, fields, rows, n, widths = pick(
        size, (16384, 39, 200000, 16, (400, 400)), (4096, 39, 20000, 10, (128, 128)), (4, 3, 10, 4, (8, 8))
    )

    class DeepFM(nn.Module):
        @nn.compact
        def __call__(self, ids, values, clicked):
            first = nn.Embed(rows, 1)(ids)[..., 0] * values
            e = nn.Embed(rows, n)(ids) * values[..., None]
            second = 0.5 * (jnp.square(e.sum(1)) - jnp.square(e).sum(1)).sum(-1)
            h = e.reshape(e.shape[0], -1)
            for width in widths:
                h = nn.relu(nn.Dense(width)(h))
            logit = first.sum(-1) + second + nn.Dense(1)(h)[:, 0]
            y = clicked.astype(jnp.float32)
            return -jnp.mean(y * jax.nn.log_sigmoid(logit) + (1 - y) * jax.nn.log_sigmoid(-logit)), jax.nn.sigmoid(
                logit
            )

    inputs = integers(batch, fields, below=rows), normal(batch, fields, offset=1.0, scale=0.2), integers(batch, below=2)
    module = DeepFM()
    shapes = jax.eval_shape(lambda *xs: module.init(jax.random.key(0), *xs), *[r.struct for r in inputs])
    return Built(module.apply, (like(shapes), *inputs))


@program("sampled-softmax-logq-grad", GROUP)
def _sampled_softmax(size: Size) -> Built:
    """Next-item loss by sampled softmax: pooled histories, negatives corrected by log q, accidental hits hidden; gradients."""
    batch, history, items, negatives, n = pick(
        size, (4096, 20, 100000, 2048, 128), (768, 20, 10000, 768, 48), (4, 3, 16, 5, 8)
    )

    def loss(p, past, target, negative, log_q):
        seen = (past > 0).astype(jnp.float32)
        pooled = jnp.einsum("blc,bl->bc", p["items"][past], seen) / jnp.maximum(seen.sum(1, keepdims=True), 1.0)
        user = jax.nn.relu(_apply(p["fc1"], pooled)) @ p["fc2"]
        user = user / jnp.sqrt(jnp.sum(user**2, axis=1, keepdims=True) + 1e-12)

        def unit(e):
            return e / (jnp.linalg.norm(e, axis=1, keepdims=True) + 1e-6)

        pos, neg = unit(p["items"][target]), unit(p["items"][negative])
        pos_logit = jnp.sum(user * pos, axis=1) / 0.07 - log_q[target]
        neg_logit = jnp.matmul(user, neg.T) / 0.07 - log_q[negative][None, :]
        hit = target[:, None] == negative[None, :]
        neg_logit = jnp.where(hit, jnp.finfo(neg_logit.dtype).min, neg_logit)
        logits = jnp.concatenate([pos_logit[:, None], neg_logit], axis=1)
        return -jnp.mean(jax.nn.log_softmax(logits, axis=1)[:, 0])

    params = {"items": normal(items, n, scale=0.1), "fc1": _dense(n, 2 * n), "fc2": weight(2 * n, n)}
    past, target = integers(batch, history, below=items), integers(batch, below=items)
    arguments = past, target, integers(negatives, below=items), normal(items, scale=0.5, offset=-8.0)
    return Built(jax.value_and_grad(loss), (params, *arguments))


# ---------------------------------------------------------------- statistics


@program("mmd-encoder-mixture-grad", GROUP)
def _mmd(size: Size) -> Built:
    """Domain adaptation: the unbiased MMD of encoded samples with five RBF widths of the mean distance, and its gradients."""
    rows, n, hidden = pick(size, (2048, 512, 256), (384, 128, 64), (4, 6, 5))

    def loss(p, source, target):
        def encode(x):
            return jax.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"]

        total = jnp.concatenate([encode(source), encode(target)], axis=0)
        l2 = jnp.sum(total**2, 1)[:, None] + jnp.sum(total**2, 1)[None, :] - 2.0 * total @ total.T
        l2 = jnp.maximum(l2, 0.0)
        bandwidth = lax.stop_gradient(jnp.sum(l2)) / (2 * rows * (2 * rows - 1)) / 2.0**2
        kernel = sum(jnp.exp(-l2 / (bandwidth * 2.0**i)) for i in range(5))
        off = 1.0 - jnp.eye(rows)
        xx = jnp.sum(kernel[:rows, :rows] * off) / (rows * (rows - 1))
        yy = jnp.sum(kernel[rows:, rows:] * off) / (rows * (rows - 1))
        return xx + yy - 2.0 * jnp.mean(kernel[:rows, rows:])

    params = {"w1": weight(n, hidden), "b1": _bias(hidden), "w2": weight(hidden, hidden // 2)}
    return Built(jax.value_and_grad(loss), (params, normal(rows, n), normal(rows, n, scale=1.2, offset=0.1)))


@program("sliced-wasserstein-sorted", GROUP)
def _sliced(size: Size) -> Built:
    """The sliced Wasserstein distance of two clouds: unit directions, sorted projections, and a mean power of differences."""
    rows, n, directions = pick(size, (4096, 512, 256), (1024, 96, 64), (5, 4, 3))

    def distance(x, y, theta):
        theta = theta / jnp.linalg.norm(theta, axis=0, keepdims=True)
        px, py = jnp.sort(x @ theta, axis=0), jnp.sort(y @ theta, axis=0)
        per_direction = jnp.mean(jnp.abs(px - py) ** 2, axis=0)
        return jnp.sqrt(per_direction.mean()), jnp.sqrt(per_direction.max())

    return Built(distance, (normal(rows, n), normal(rows, n, offset=0.2), normal(n, directions)))


@program("real-nvp-density-scan", GROUP)
def _real_nvp(size: Size) -> Built:
    """The log density of a normalising flow: eight affine couplings over stacked weights in a scan, halves swapped between."""
    rows, n, hidden, layers = pick(size, (16384, 64, 256, 8), (4096, 32, 64, 8), (5, 4, 8, 2))
    d = n // 2

    def log_prob(p, x):
        def coupling(carry, q):
            z, log_det = carry
            a, b = z[:, :d], z[:, d:]
            h = jax.nn.leaky_relu(a @ q["w1"] + q["b1"], 0.2)
            h = jax.nn.leaky_relu(h @ q["w2"] + q["b2"], 0.2)
            s, t = jnp.split(h @ q["w3"], 2, axis=-1)
            s = 2.0 * jnp.tanh(s / 2.0)
            return (jnp.concatenate([(b - t) * jnp.exp(-s), a], axis=-1), log_det - s.sum(-1)), None

        (z, log_det), _ = lax.scan(coupling, (x, jnp.zeros(rows)), p)
        return -0.5 * jnp.sum(z**2, axis=1) - 0.5 * n * jnp.log(2 * jnp.pi) + log_det

    params = {"w1": weight(layers, d, hidden), "b1": normal(layers, hidden, scale=0.02)}
    params |= {"w2": weight(layers, hidden, hidden), "b2": normal(layers, hidden, scale=0.02)}
    params["w3"] = normal(layers, hidden, n, scale=0.3 * hidden**-0.5)
    return Built(log_prob, (params, normal(rows, n)))


@program("perplexity-search-affinities", GROUP)
def _perplexity(size: Size) -> Built:
    """The affinities of t-SNE: squared distances, a bisection of every row's precision to perplexity 30, symmetrised."""
    n, dim, steps, perplexity = pick(size, (2048, 50, 30, 30.0), (384, 50, 24, 30.0), (6, 3, 10, 3.0))

    def affinities(x):
        sq = jnp.einsum("ij,ij->i", x, x)
        dist = jnp.maximum(sq[:, None] + sq[None, :] - 2 * jnp.dot(x, x.T), 0.0)
        diagonal = jnp.eye(n, dtype=bool)

        def rows(beta):
            logits = jnp.where(diagonal, -jnp.inf, -dist * beta[:, None])
            return jax.nn.softmax(logits, axis=1)

        def body(_, state):
            low, high, beta = state
            p = rows(beta)
            entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0), axis=1)
            spread = entropy > jnp.log(perplexity)
            low, high = jnp.where(spread, beta, low), jnp.where(spread, high, beta)
            return low, high, jnp.where(jnp.isinf(high), beta * 2, (low + high) / 2)

        start = jnp.zeros(n), jnp.full((n,), jnp.inf), jnp.full((n,), 1.0 / dim)
        _, _, beta = lax.fori_loop(0, steps, body, start)
        p = rows(beta)
        return jnp.maximum((p + p.T) / (2.0 * n), 1e-12), beta

    return Built(affinities, (normal(n, dim),))


@program("self-organising-map-batch", GROUP)
def _som(size: Size) -> Built:
    """A batch update of a self-organising map: best units, their Gaussian neighbourhood on the grid, and the mean error."""
    rows, n, side = pick(size, (16384, 64, 32), (2048, 24, 16), (8, 3, 3))
    grid = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij"), -1).reshape(-1, 2).astype(np.float32)

    def update(x, codebook, log_radius):
        d = jnp.sum(x**2, 1, keepdims=True) - 2 * jnp.dot(x, codebook.T) + jnp.sum(codebook**2, 1)
        best = jnp.argmin(d, axis=1)
        error = jnp.sqrt(jnp.maximum(jnp.take_along_axis(d, best[:, None], 1), 0.0)).mean()
        offset = jnp.asarray(grid)[best][:, None, :] - grid[None, :, :]
        h = jnp.exp(-jnp.sum(offset**2, -1) / (2 * jnp.exp(2 * log_radius)))
        new = jnp.einsum("bu,bd->ud", h, x) / (h.sum(0)[:, None] + 1e-9)
        return codebook + 0.5 * (new - codebook), error

    return Built(update, (normal(rows, n), normal(side * side, n, scale=0.5), normal(scale=0.1, offset=1.0)))


# ---------------------------------------------------------------- efficient attention, graphs


@program("nystrom-landmarks-pinv", GROUP)
def _nystrom(size: Size) -> Built:
    """Nystrom attention: mean landmarks, three softmax kernels, an iterative pseudo-inverse, a depthwise convolution of values."""
    batch, heads, tokens, d, marks, width = pick(
        size, (4, 8, 4096, 64, 64, 33), (1, 4, 1024, 32, 32, 33), (1, 2, 8, 4, 2, 3)
    )
    dtype = half(size)

    def pinv(a):
        eye = jnp.eye(marks, dtype=a.dtype)
        z = a.swapaxes(-1, -2) / (jnp.abs(a).sum(-2).max() * jnp.abs(a).sum(-1).max())
        for _ in range(6):
            az = a @ z
            z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
        return z

    def attention(q, k, v, kernel):
        q = q * d**-0.25
        k = k * d**-0.25
        q_l = q.reshape(batch, heads, marks, tokens // marks, d).mean(3)
        k_l = k.reshape(batch, heads, marks, tokens // marks, d).mean(3)

        def sim(a, b):
            return jax.nn.softmax(jnp.einsum("...id,...jd->...ij", a, b).astype(jnp.float32), axis=-1)

        k1, k2, k3 = sim(q, k_l), sim(q_l, k_l), sim(q_l, k)
        right = k3.astype(dtype) @ v
        out = (k1 @ pinv(k2)).astype(dtype) @ right
        flat = v.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * d)
        conv = lax.conv_general_dilated(
            flat, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=heads * d
        )
        return out + conv.reshape(batch, tokens, heads, d).transpose(0, 2, 1, 3)

    x = normal(batch, heads, tokens, d, dtype=dtype)
    return Built(attention, (x, x, x, normal(width, 1, heads * d, dtype=dtype, scale=0.1)))


@program("performer-positive-features", GROUP)
def _performer(size: Size) -> Built:
    """FAVOR+: positive random features of queries and keys with their stabilisers, and attention in linear time."""
    batch, tokens, heads, d, m = pick(size, (4, 2048, 8, 64, 256), (2, 1000, 4, 32, 96), (1, 5, 2, 4, 6))

    def phi(x, projection, is_query):
        x = x * d**-0.25
        data_dash = jnp.einsum("blhd,md->blhm", x, projection)
        diag = jnp.sum(jnp.square(x), axis=-1, keepdims=True) / 2.0
        axis = (-1,) if is_query else (-1, -3)
        stabiliser = lax.stop_gradient(jnp.max(data_dash, axis=axis, keepdims=True))
        return m**-0.5 * (jnp.exp(data_dash - diag - stabiliser) + 1e-4)

    def attention(q, k, v, there, projection):
        qp, kp = phi(q, projection, True), phi(k, projection, False)
        kp = jnp.where(there[:, :, None, None], kp, 0.0)
        kv = jnp.einsum("blhm,blhd->bhmd", kp, v)
        den = jnp.einsum("blhm,bhm->blh", qp, kp.sum(axis=1))
        return jnp.einsum("blhm,bhmd->blhd", qp, kv) / den[..., None]

    x = normal(batch, tokens, heads, d)
    return Built(attention, (x, x, x, booleans(batch, tokens), normal(m, d)))


@program("graph-attention-edge-segments", GROUP)
def _gat(size: Size) -> Built:
    """GATv2 on a list of edges sorted by receiver: a softmax by segment maximum and sum, heads averaged, elu and residual."""
    nodes, edges, n, heads = pick(size, (10000, 160000, 128, 4), (2000, 16000, 64, 4), (5, 12, 8, 2))

    def layer(p, x, edge_features, senders, receivers):
        left = (x @ p["left"]).reshape(nodes, heads, n)
        right = (x @ p["right"]).reshape(nodes, heads, n)
        e = (edge_features @ p["edge"]).reshape(edges, heads, n)
        score = jnp.sum(jax.nn.leaky_relu(left[senders] + right[receivers] + e, 0.2) * p["a"], axis=-1)
        top = jax.ops.segment_max(score, receivers, nodes, indices_are_sorted=True)
        w = jnp.exp(score - top[receivers])
        total = jax.ops.segment_sum(w, receivers, nodes, indices_are_sorted=True)
        w = w / (total[receivers] + 1e-16)
        out = jax.ops.segment_sum(left[senders] * w[..., None], receivers, nodes, indices_are_sorted=True)
        return jax.nn.elu(out.mean(axis=1) + p["bias"]) + x

    params = {"left": weight(n, heads * n), "right": weight(n, heads * n), "edge": weight(8, heads * n)}
    params |= {"a": normal(heads, n, scale=n**-0.5), "bias": _bias(n)}
    ends = integers(edges, below=nodes), integers(edges, below=nodes, ramp=True)
    return Built(layer, (params, normal(nodes, n), normal(edges, 8), *ends))


# ---------------------------------------------------------------- robotics


@program("particle-filter-resample", GROUP)
def _particles(size: Size) -> Built:
    """One step of many particle filters: motion, ranges to landmarks, log weights, effective size, systematic resampling."""
    filters, count, landmarks = pick(size, (64, 4096, 16), (16, 2000, 12), (2, 6, 3))

    def one(particles, log_w, ranges, control, noise, offset, marks):
        heading = particles[:, 2] + control[1] + 0.05 * noise[:, 2]
        move = control[0] + 0.1 * noise[:, 0]
        moved = jnp.stack(
            [particles[:, 0] + move * jnp.cos(heading), particles[:, 1] + move * jnp.sin(heading), heading], 1
        )
        expected = jnp.linalg.norm(moved[:, None, :2] - marks[None] + 1e-6, axis=-1)
        log_lik = -0.5 * jnp.sum(((expected - ranges) / 0.5) ** 2, axis=-1)
        log_w = log_w + log_lik
        log_w = log_w - jax.nn.logsumexp(log_w)
        w = jnp.exp(log_w)
        ess = 1.0 / jnp.sum(w**2)
        estimate = w @ moved
        positions = (jnp.arange(count) + jax.nn.sigmoid(offset)) / count
        index = jnp.clip(jnp.searchsorted(jnp.cumsum(w), positions), 0, count - 1)
        resample = ess < count / 2
        new = jnp.where(resample, moved[index], moved)
        return new, jnp.where(resample, -jnp.log(float(count)), log_w), estimate, ess

    def step(particles, log_w, ranges, control, noise, offset, marks):
        return jax.vmap(one, in_axes=(0, 0, 0, 0, 0, 0, None))(particles, log_w, ranges, control, noise, offset, marks)

    cloud = normal(filters, count, 3)
    arguments = cloud, normal(filters, count), normal(filters, landmarks, offset=3.0), normal(filters, 2, scale=0.3)
    return Built(step, (*arguments, cloud, normal(filters), normal(landmarks, 2, scale=3.0)))


@program("path-integral-control", GROUP)
def _mppi(size: Size) -> Built:
    """Model predictive path integral control: rollouts of a learnt model in a scan, and controls weighted by a softmin of costs."""
    samples, horizon, state, action, hidden = pick(size, (4096, 32, 12, 4, 128), (1024, 24, 8, 2, 64), (6, 4, 3, 2, 8))

    def plan(p, x0, nominal, noise, goal):
        controls = jnp.clip(nominal[None] + 0.5 * noise, -1.0, 1.0)

        def step(carry, u):
            x, cost = carry
            h = jax.nn.silu(_apply(p[0], jnp.concatenate([x, u], -1)))
            h = jax.nn.silu(_apply(p[1], h))
            x = x + 0.05 * _apply(p[2], h)
            cost = cost + jnp.sum((x - goal) ** 2, -1) + 0.01 * jnp.sum(u**2, -1)
            return (x, cost), None

        start = jnp.broadcast_to(x0, (samples, state)), jnp.zeros(samples)
        (last, cost), _ = lax.scan(step, start, jnp.swapaxes(controls, 0, 1))
        cost = cost + 10.0 * jnp.sum((last - goal) ** 2, -1)
        beta = cost.min()
        w = jnp.exp(-(cost - beta) / 5.0)
        w = w / w.sum()
        best = jnp.einsum("k,kta->ta", w, controls)
        return (
            best,
            jnp.concatenate([best[1:], best[-1:]]),
            -5.0 * jnp.log(jnp.mean(jnp.exp(-(cost - beta) / 5.0))) + beta,
        )

    params = [_dense(state + action, hidden), _dense(hidden, hidden), _dense(hidden, state)]
    arguments = normal(state), normal(horizon, action, scale=0.2), normal(samples, horizon, action), normal(state)
    return Built(plan, (params, *arguments))
