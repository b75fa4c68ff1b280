"""Layers and steps of speech, image, language and table models of the seventh set: its author had seen no plan."""

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

GROUP = "seventh"


@program("branchformer-merged-branches-linen", GROUP)
def _branchformer(size: Size) -> Built:
    """This gives a layer of the E-Branchformer speech encoder on padded utterances, as ESPnet has it, in Flax's linen.

    One branch attends with relative positions, the other is a convolutional gating of channels; a depthwise convolution merges
    them; half-step feed-forward layers are before and after.
    """
    import flax.linen as nn

    b, t, n, h, wide, units, width = pick(
        size, (12, 749, 512, 8, 2048, 3072, 31), (2, 187, 128, 4, 512, 384, 31), (2, 7, 8, 2, 12, 8, 3)
    )
    dtype, d = half(size), n // h

    def depthwise(channels, name=None):
        return nn.Conv(channels, (width,), padding="SAME", feature_group_count=channels, dtype=dtype, name=name)

    class FeedForward(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm(epsilon=1e-12, dtype=dtype)(x)
            return nn.Dense(n, dtype=dtype)(nn.swish(nn.Dense(wide, dtype=dtype)(y)))

    class RelativeAttention(nn.Module):
        @nn.compact
        def __call__(self, x, places, seen):
            q, k, v = (nn.DenseGeneral((h, d), dtype=dtype, name=name)(x) for name in ("q", "k", "v"))
            p = nn.DenseGeneral((h, d), use_bias=False, dtype=dtype, name="places")(places)
            u = self.param("u", nn.initializers.xavier_uniform(), (h, d)).astype(dtype)
            w = self.param("w", nn.initializers.xavier_uniform(), (h, d)).astype(dtype)
            content = jnp.einsum("bqhd,bkhd->bhqk", q + u, k)
            position = jnp.einsum("bqhd,khd->bhqk", q + w, p)
            padded = jnp.pad(position, ((0, 0), (0, 0), (0, 0), (1, 0)))
            shifted = padded.reshape(b, h, 2 * t, t)[:, :, 1:].reshape(b, h, t, 2 * t - 1)[..., :t]
            scores = (content + shifted).astype(jnp.float32) / np.sqrt(d)
            scores = jnp.where(seen[:, None, None, :], scores, jnp.finfo(jnp.float32).min)
            probs = jnp.where(seen[:, None, None, :], nn.softmax(scores, axis=-1), 0.0).astype(dtype)
            return nn.DenseGeneral(n, axis=(-2, -1), dtype=dtype)(jnp.einsum("bhqk,bkhd->bqhd", probs, v))

    class GatedChannels(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.gelu(nn.Dense(units, dtype=dtype)(x), approximate=False)
            kept, gate = jnp.split(y, 2, axis=-1)
            gate = depthwise(units // 2)(nn.LayerNorm(epsilon=1e-12, dtype=dtype)(gate))
            return nn.Dense(n, dtype=dtype)(kept * gate)

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, length):
            seen = jnp.arange(t)[None, :] < jnp.maximum(length, 1)[:, None]
            steps = jnp.exp(jnp.arange(0, n, 2) * (-np.log(10_000.0) / n))
            angle = jnp.arange(t - 1, -t, -1)[:, None] * steps
            places = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(2 * t - 1, n).astype(dtype)
            x = x + 0.5 * FeedForward(name="before")(x)
            attended = nn.LayerNorm(epsilon=1e-12, dtype=dtype, name="norm_attention")(x)
            attended = RelativeAttention(name="attention")(attended, places, seen)
            gated = GatedChannels(name="gating")(nn.LayerNorm(epsilon=1e-12, dtype=dtype, name="norm_gating")(x))
            both = jnp.where(seen[..., None], jnp.concatenate([attended, gated], axis=-1), 0.0)
            x = x + nn.Dense(n, dtype=dtype, name="merge")(both + depthwise(2 * n, "merge_conv")(both))
            x = x + 0.5 * FeedForward(name="after")(x)
            x = nn.LayerNorm(epsilon=1e-12, dtype=dtype, name="norm_final")(x)
            return jnp.where(seen[..., None], x, 0.0)

    module, x, length = Layer(), normal(b, t, n, dtype=dtype), integers(b, below=t + 1)
    params = like(jax.eval_shape(module.init, jax.random.key(0), x.struct, length.struct), dtype)
    return Built(module.apply, (params, x, length))


@program("pixart-guided-multistep-sampling-step", GROUP)
def _pixart(size: Size) -> Built:
    """This gives the next latents of PixArt's diffusion transformer by a guided step of the second-order DPM-Solver++.

    One modulation is shared by all blocks, which add their own tables; text of varying length is attended to; guidance is
    rescaled to the spread of the conditional prediction; the last step's prediction of the clean image is used again.
    """
    b, side, n, h, text, layers, channels = pick(
        size, (3, 64, 1152, 16, 120, 2, 4), (1, 24, 192, 6, 40, 2, 4), (1, 4, 8, 2, 5, 1, 2)
    )
    dtype, d, grid, frequencies = half(size), n // h, side // 2, pick(size, 256, 64, 4)
    t = grid * grid

    def linear(p, x):
        return x @ p["kernel"] + p["bias"]

    def norm(x):
        y = x.astype(jnp.float32)
        y = (y - jnp.mean(y, axis=-1, keepdims=True)) * lax.rsqrt(jnp.var(y, axis=-1, keepdims=True) + 1e-6)
        return y.astype(x.dtype)

    def attend(q, k, v, mask=None):
        q, k, v = (y.reshape(y.shape[0], -1, h, d) for y in (q, k, v))
        return jax.nn.dot_product_attention(q, k, v, mask=mask).reshape(q.shape[0], -1, n)

    def block(p, x, y, seen, modulation):
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(p["table"] + modulation, 6, axis=1)
        z = norm(x) * (1 + scale1) + shift1
        q, k, v = jnp.split(linear(p["qkv"], z), 3, axis=-1)
        x = x + gate1 * linear(p["out"], attend(q, k, v))
        k, v = jnp.split(linear(p["cross_kv"], y), 2, axis=-1)
        x = x + linear(p["cross_out"], attend(linear(p["cross_q"], x), k, v, seen[:, None, None, :]))
        z = norm(x) * (1 + scale2) + shift2
        return x + gate2 * linear(p["down"], jax.nn.gelu(linear(p["up"], z), approximate=True))

    def embed(p, x):
        patches = x.reshape(-1, grid, 2, grid, 2, channels).transpose(0, 1, 3, 2, 4, 5).reshape(-1, t, 4 * channels)
        omega = 10_000.0 ** (-jnp.arange(n // 4) / (n / 4))
        angle = jnp.arange(grid)[:, None] * omega
        one = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=1)
        columns = jnp.broadcast_to(one[None], (grid, grid, n // 2))
        rows = jnp.broadcast_to(one[:, None], (grid, grid, n // 2))
        return linear(p, patches) + jnp.concatenate([columns, rows], axis=-1).reshape(t, n).astype(dtype)

    def predict(p, x, time, y, seen):
        angle = time * jnp.exp(-np.log(10_000.0) * jnp.arange(frequencies // 2) / (frequencies // 2))
        wave = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)]).astype(dtype)[None]
        condition = linear(p["time2"], jax.nn.silu(linear(p["time1"], wave)))
        modulation = linear(p["modulation"], jax.nn.silu(condition)).reshape(1, 6, n)
        x = embed(p["patch"], x.astype(dtype))
        y = linear(p["caption2"], jax.nn.gelu(linear(p["caption1"], y), approximate=True))
        for layer in p["blocks"]:
            x = block(layer, x, y, seen, modulation)
        shift, scale = jnp.split(p["final_table"] + condition[:, None, :], 2, axis=1)
        x = linear(p["final"], norm(x) * (1 + scale) + shift).astype(jnp.float32)
        x = x.reshape(-1, grid, grid, 2, 2, 2 * channels).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(-1, side, side, 2 * channels)[..., :channels]

    def step(p, x, before, captions, length, index):
        steps = 20
        betas = jnp.linspace(1e-4, 2e-2, 1000)
        kept = jnp.cumprod(1.0 - betas)
        times = jnp.linspace(999.0, 1.0, steps + 1).astype(jnp.int32)
        now, then, earlier = times[index], times[index + 1], times[jnp.maximum(index - 1, 0)]
        alpha, sigma = jnp.sqrt(kept), jnp.sqrt(1.0 - kept)
        lam = jnp.log(alpha) - jnp.log(sigma)
        seen = jnp.arange(text)[None, :] < jnp.concatenate([jnp.ones(b, jnp.int32), jnp.maximum(length, 1)])[:, None]
        y = jnp.concatenate([jnp.broadcast_to(p["no_caption"], captions.shape), captions])
        free, bound = jnp.split(predict(p, jnp.concatenate([x, x]), now, y, seen), 2)
        noise = free + 4.5 * (bound - free)
        spread = jnp.std(bound, axis=(1, 2, 3), keepdims=True) / jnp.std(noise, axis=(1, 2, 3), keepdims=True)
        noise = 0.7 * noise * spread + 0.3 * noise
        clean = (x - sigma[now] * noise) / alpha[now]
        gap = lam[then] - lam[now]
        ratio = jnp.where(index > 0, (lam[now] - lam[earlier]) / gap, 1.0)
        mixed = clean + jnp.where(index > 0, 0.5 / ratio, 0.0) * (clean - before)
        return sigma[then] / sigma[now] * x - alpha[then] * jnp.expm1(-gap) * mixed, clean

    def pair(i, o):
        return {"kernel": weight(i, o, dtype=dtype), "bias": normal(o, dtype=dtype, scale=0.05)}

    layer = {"table": normal(1, 6, n, dtype=dtype, scale=n**-0.5), "qkv": pair(n, 3 * n), "out": pair(n, n)}
    layer |= {"cross_q": pair(n, n), "cross_kv": pair(n, 2 * n), "cross_out": pair(n, n)}
    layer |= {"up": pair(n, 4 * n), "down": pair(4 * n, n)}
    params = {
        "time1": pair(frequencies, n),
        "time2": pair(n, n),
        "modulation": pair(n, 6 * n),
        "patch": pair(4 * channels, n),
        "caption1": pair(2 * n, n),
        "caption2": pair(n, n),
        "no_caption": normal(text, 2 * n, dtype=dtype, scale=0.1),
        "blocks": [layer] * layers,
        "final_table": normal(1, 2, n, dtype=dtype, scale=n**-0.5),
        "final": pair(n, 8 * channels),
    }
    latents = (normal(b, side, side, channels), normal(b, side, side, channels, scale=0.5))
    texts = (normal(b, text, 2 * n, dtype=dtype), integers(b, below=text + 1))
    return Built(step, (params, *latents, *texts, integers(below=20)))


@program("gemma3n-alternating-streams-window-decode", GROUP)
def _gemma3n(size: Size) -> Built:
    """This gives a decoding step of two layers of Gemma 3n, one of a sliding window in a ring and one of the whole cache.

    Four streams are predicted and corrected around each layer, a low-rank path goes beside attention, the feed-forward layer keeps
    only gates above a Gaussian quantile, and an embedding of each layer is mixed in, as in Hugging Face's port.
    """
    b, n, h, kv, d, wide, window, t, low, each, vocabulary, streams = pick(
        size,
        (16, 2048, 8, 2, 256, 8192, 512, 4096, 64, 256, 65536, 4),
        (4, 640, 4, 1, 128, 2560, 128, 700, 16, 64, 16000, 4),
        (2, 8, 2, 1, 4, 12, 4, 9, 2, 3, 11, 3),
    )
    dtype = half(size)

    def rms(x, scale=None):
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
        return (y if scale is None else y * scale.astype(jnp.float32)).astype(x.dtype)

    def rotate(x, position, base):
        angle = position[:, None, None] * base ** (-jnp.arange(0, d, 2) / d)
        sin, cos = (jnp.concatenate([f, f], axis=-1) for f in (jnp.sin(angle), jnp.cos(angle)))
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = jnp.concatenate([-second, first], axis=-1)
        return (x.astype(jnp.float32) * cos + turned * sin).astype(x.dtype)

    def modalities(p, x):
        return jnp.tanh((rms(x, p["router_norm"]) * n**-1.0 @ p["router"]).astype(jnp.float32))

    def predicted(p, x):
        coefficients = (modalities(p, x[0]) @ p["predict"]).reshape(b, streams, streams)
        return jnp.einsum("sbn,bst->tbn", x.astype(jnp.float32), coefficients).astype(dtype) + x

    def corrected(p, predictions, activated):
        coefficients = modalities(p, activated) @ p["correct"] + 1.0
        innovation = (activated - predictions[0])[None] * coefficients.T[:, :, None].astype(dtype)
        return innovation + predictions

    def attend(p, y, keys, values, position, local):
        base = 10_000.0 if local else 1_000_000.0
        q = rotate(rms((y @ p["q"]).reshape(b, h, d), p["q_norm"]), position, base)
        k = rotate(rms((y @ p["k"]).reshape(b, kv, d), p["k_norm"]), position, base)
        v = rms((y @ p["v"]).reshape(b, kv, d))
        slots = keys.shape[1]
        at, row = position % slots, jnp.arange(b)
        keys, values = keys.at[row, at].set(k), values.at[row, at].set(v)
        age = (at[:, None] - jnp.arange(slots)[None, :]) % slots
        seen = age <= position[:, None]
        scores = jnp.einsum("bkgd,bskd->bkgs", q.reshape(b, kv, h // kv, d), keys)
        scores = jnp.where(seen[:, None, None, :], scores.astype(jnp.float32), -1e30)
        probs = jax.nn.softmax(scores, axis=-1).astype(dtype)
        mixed = jnp.einsum("bkgs,bskd->bkgd", probs, values).reshape(b, h * d)
        return mixed @ p["o"], keys, values

    def feed(p, y, sparse):
        gate = y @ p["gate"]
        if sparse:
            z = gate.astype(jnp.float32)
            cutoff = jnp.mean(z, axis=-1, keepdims=True) + 1.6448536 * jnp.std(z, axis=-1, keepdims=True)
            gate = jax.nn.relu(gate - cutoff.astype(dtype))
        return (jax.nn.gelu(gate, approximate=True) * (y @ p["up"])) @ p["down"]

    def layer(p, x, extra, cache, position, local):
        predictions = predicted(p, x)
        active = predictions[0]
        y = rms(active, p["input_norm"])
        beside = y + rms((y @ p["left"]) @ p["right"], p["beside_norm"])
        out, *cache = attend(p, y, *cache, position, local)
        z = (active + rms(out, p["attention_norm"]) + beside) * np.asarray(0.5**0.5, dtype)
        z = z + rms(feed(p, rms(z, p["feed_norm"]), local), p["feed_out_norm"])
        streams_now = corrected(p, predictions, z)
        first = jax.nn.gelu((streams_now[0] * p["output_scale"]) @ p["extra_gate"], approximate=True) * extra
        first = rms(first @ p["extra_out"], p["extra_norm"])
        return streams_now.at[1:].add(first), cache

    def magnitude(x):
        return jnp.sqrt(jnp.maximum(jnp.mean(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True), 1e-5))

    def step(p, token, caches, position):
        x = p["table"][token] * np.asarray(n**0.5, dtype)
        extras = p["extra_table"][token].reshape(b, 2, each) * np.asarray(each**0.5, dtype)
        projected = rms((x @ p["extra_in"] * n**-0.5).reshape(b, 2, each), p["extra_in_norm"])
        extras = (projected + extras) * np.asarray(0.5**0.5, dtype)
        others = jnp.einsum("bn,snm->sbm", x, p["spread"])
        others = (others * magnitude(x) / magnitude(others)).astype(dtype)
        x = jnp.concatenate([x[None], others])
        after = []
        for i, local in enumerate((True, False)):
            x, cache = layer(p["layers"][i], x, extras[:, i], caches[i], position, local)
            after.append(cache)
        others = jnp.einsum("sbn,snm->sbm", x[1:], p["gather"])
        others = (others * magnitude(x[0]) / magnitude(others)).astype(dtype)
        y = rms(jnp.mean(jnp.concatenate([x[:1], others]).astype(jnp.float32), axis=0).astype(dtype), p["norm"])
        logits = (y @ p["table"].T).astype(jnp.float32)
        logits = 30.0 * jnp.tanh(logits / 30.0)
        return jnp.argmax(logits, axis=-1), jax.nn.logsumexp(logits, axis=-1), after

    norms = ("input_norm", "router_norm", "beside_norm", "attention_norm", "feed_norm", "feed_out_norm", "extra_norm")
    one = {name: gain(n, dtype) for name in (*norms, "output_scale")}
    one |= {"q_norm": gain(d, dtype), "k_norm": gain(d, dtype), "router": weight(n, streams, dtype=dtype)}
    one |= {"predict": normal(streams, streams * streams, scale=0.3), "correct": normal(streams, streams, scale=0.3)}
    shapes = {"q": (n, h * d), "k": (n, kv * d), "v": (n, kv * d), "o": (h * d, n), "left": (n, low), "right": (low, n)}
    shapes |= {"gate": (n, wide), "up": (n, wide), "down": (wide, n), "extra_gate": (n, each), "extra_out": (each, n)}
    one |= {name: weight(*shape, dtype=dtype) for name, shape in shapes.items()}
    params = {
        "table": normal(vocabulary, n, dtype=dtype, scale=n**-0.5),
        "extra_table": normal(vocabulary, 2 * each, dtype=dtype, scale=each**-0.5),
        "extra_in": weight(n, 2 * each, dtype=dtype),
        "extra_in_norm": gain(each, dtype),
        "spread": weight(streams - 1, n, n, dtype=dtype),
        "gather": weight(streams - 1, n, n, dtype=dtype),
        "layers": [one, one],
        "norm": gain(n, dtype),
    }
    caches = [[normal(b, slots, kv, d, dtype=dtype)] * 2 for slots in (window, t)]
    return Built(step, (params, integers(b, below=vocabulary), caches, integers(b, below=t)))


@program("soft-moe-slots-linen-grad", GROUP)
def _soft_moe(size: Size) -> Built:
    """This gives the gradient of a vision layer with a Soft MoE and its classifier's sigmoid loss, as in the V-MoE code.

    Each slot of an expert is a weighted mean of an image's tokens, each token a weighted mean of the experts' slots; weights are
    those of normalised tokens and normalised directions with a learned scale.
    """
    import flax.linen as nn

    b, t, n, h, wide, experts, slots, labels = pick(
        size, (32, 196, 768, 12, 3072, 16, 12, 1000), (2, 64, 192, 3, 384, 8, 8, 100), (2, 5, 8, 2, 12, 3, 2, 4)
    )
    dtype = half(size)

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(n, dtype=dtype)(nn.gelu(nn.Dense(wide, dtype=dtype)(x)))

    class SoftRouter(nn.Module):
        @nn.compact
        def __call__(self, x):
            phi = self.param("mu", nn.initializers.lecun_normal(), (n, experts, slots))
            scale = self.param("scale", nn.initializers.ones, ())
            y = x.astype(jnp.float32)
            y = y * lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6)
            phi = scale * phi * lax.rsqrt(jnp.sum(phi * phi, axis=0, keepdims=True) + 1e-6)
            logits = jnp.einsum("gmd,dnp->gmnp", y, phi, preferred_element_type=jnp.float32)
            dispatch = nn.softmax(logits, axis=1).astype(dtype)
            combine = nn.softmax(logits, axis=(2, 3)).astype(dtype)
            mixed = jnp.einsum("gmd,gmnp->ngpd", x, dispatch)
            each = nn.vmap(Mlp, in_axes=0, out_axes=0, variable_axes={"params": 0}, split_rngs={"params": True})
            done = each(name="experts")(mixed.reshape(experts, b * slots, n)).reshape(experts, b, slots, n)
            return jnp.einsum("ngpd,gmnp->gmd", done, combine)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm(dtype=dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=h, dtype=dtype, deterministic=True)(y, y)
            x = x + SoftRouter(name="moe")(nn.LayerNorm(dtype=dtype)(x))
            x = jnp.mean(nn.LayerNorm(dtype=dtype)(x), axis=1)
            return nn.Dense(labels, bias_init=nn.initializers.constant(-10.0))(x.astype(jnp.float32))

    module, x = Model(), normal(b, t, n, dtype=dtype)

    def loss(params, x, label):
        logits = module.apply(params, x)
        each = jax.nn.log_sigmoid(jnp.where(jax.nn.one_hot(label, labels) > 0, logits, -logits))
        return -jnp.mean(jnp.sum(each, axis=-1)), jnp.mean(jnp.argmax(logits, axis=-1) == label)

    params = like(jax.eval_shape(module.init, jax.random.key(0), x.struct))
    params["params"]["moe"]["scale"] = normal(scale=0.1, offset=8.0)
    return Built(jax.value_and_grad(loss, has_aux=True), (params, x, integers(b, below=labels)))


@program("tabpfn-features-then-rows-nnx", GROUP)
def _tabpfn(size: Size) -> Built:
    """This gives class probabilities of a table's test rows in context by layers as TabPFN's second version, in Flax's nnx.

    Cells are standardised by the training rows and embedded with a flag of what is missing; attention goes over a row's features,
    then over a feature's rows, where test rows see the first head of the training rows.
    """
    from flax import nnx

    b, rows, train, features, n, h, layers, classes = pick(
        size, (2, 1000, 830, 17, 192, 6, 3, 10), (1, 200, 150, 8, 96, 3, 2, 5), (2, 7, 5, 3, 8, 2, 1, 3)
    )
    dtype, d = half(size), n // h

    def linear(i, o, rngs, bias=False):
        return nnx.Linear(i, o, use_bias=bias, dtype=dtype, param_dtype=dtype, rngs=rngs)

    def norm(rngs):
        return nnx.LayerNorm(n, epsilon=1e-5, use_bias=False, use_scale=False, dtype=dtype, rngs=rngs)

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.across, self.across_out = linear(n, 3 * n, rngs), linear(n, n, rngs)
            self.q, self.kv, self.out = linear(n, n, rngs), linear(n, 2 * n, rngs), linear(n, n, rngs)
            self.up, self.down = linear(n, 4 * n, rngs), linear(4 * n, n, rngs)
            self.norm1, self.norm2, self.norm3 = norm(rngs), norm(rngs), norm(rngs)

        def of_features(self, x):
            q, k, v = jnp.split(self.across(x).reshape(b * rows, -1, 3 * h, d), 3, axis=2)
            return self.across_out(nnx.dot_product_attention(q, k, v).reshape(x.shape))

        def of_rows(self, x):
            x = x.swapaxes(1, 2).reshape(-1, rows, n)
            q = self.q(x).reshape(-1, rows, h, d)
            k, v = jnp.split(self.kv(x[:, :train]).reshape(-1, train, 2 * h, d), 2, axis=2)
            own = nnx.dot_product_attention(q[:, :train], k, v)
            k, v = (jnp.broadcast_to(y[:, :, :1], y.shape) for y in (k, v))
            other = nnx.dot_product_attention(q[:, train:], k, v)
            out = jnp.concatenate([own, other], axis=1).reshape(b, -1, rows, n)
            return self.out(out).swapaxes(1, 2)

        def __call__(self, x):
            x = self.norm1(x + self.of_features(x))
            x = self.norm2(x + self.of_rows(x))
            return self.norm3(x + self.down(nnx.gelu(self.up(x), approximate=False)))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.cell, self.target, self.places = linear(2, n, rngs), linear(2, n, rngs), linear(n // 4, n, rngs)
            self.layers = nnx.List([Layer(rngs) for _ in range(layers)])
            self.head1, self.head2 = linear(n, 4 * n, rngs, bias=True), linear(4 * n, classes, rngs, bias=True)

        def __call__(self, table, present, label, places):
            known = present[:, :train].astype(jnp.float32)
            count = jnp.maximum(jnp.sum(known, axis=1, keepdims=True), 2.0)
            mean = jnp.sum(known * table[:, :train], axis=1, keepdims=True) / count
            spread = jnp.sum(known * (table[:, :train] - mean) ** 2, axis=1, keepdims=True) / (count - 1.0)
            cells = jnp.clip((table - mean) / (jnp.sqrt(spread) + 1e-6), -100.0, 100.0)
            cells = jnp.stack([jnp.where(present, cells, 0.0), jnp.where(present, 0.0, -2.0)], axis=-1)
            x = self.cell(cells.astype(dtype)) + self.places(places)
            test = jnp.arange(rows) >= train
            middle = jnp.mean(label[:, :train].astype(jnp.float32), axis=1, keepdims=True)
            y = jnp.where(test, middle, label.astype(jnp.float32))
            flag = jnp.broadcast_to(jnp.where(test, -2.0, 0.0), y.shape)
            y = self.target(jnp.stack([y, flag], axis=-1).astype(dtype))
            x = jnp.concatenate([x, y[:, :, None]], axis=2)
            for layer in self.layers:
                x = layer(x)
            logits = self.head2(nnx.gelu(self.head1(x[:, train:, -1]), approximate=False)).astype(jnp.float32) / 0.9
            seen = jnp.any(label[:, :train, None] == jnp.arange(classes), axis=1)
            return nnx.softmax(jnp.where(seen[:, None, :], logits, -jnp.inf), axis=-1)

    graph, state = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))

    def predict(state, *inputs):
        return nnx.merge(graph, state)(*inputs)

    inputs = (normal(b, rows, features, scale=3.0, offset=1.0), booleans(b, rows, features))
    labels = integers(b, rows, below=classes)
    return Built(predict, (like(state, dtype), *inputs, labels, normal(features, n // 4, dtype=dtype)))
