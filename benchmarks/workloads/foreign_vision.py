"""Programs of vision and audio, as users write them who knew nothing of the package."""

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
