"""Networks and their losses, by an author who has seen no plan of the package: a fourth set."""

import itertools

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

GROUP = "fourth"


@program("efficientnet-squeeze-excite-linen", GROUP)
def _efficientnet(size: Size) -> Built:
    """Two MBConv blocks of EfficientNet at inference: expand, depthwise, squeeze and excite, project, running statistics."""
    from flax import linen as nn

    b, side, n = pick(size, (64, 28, 80), (1, 28, 24), (1, 6, 4))
    dtype = half(size)

    class SqueezeExcite(nn.Module):
        reduced: int

        @nn.compact
        def __call__(self, x):
            s = jnp.mean(x, axis=(1, 2), keepdims=True)
            s = nn.swish(nn.Conv(self.reduced, (1, 1), dtype=dtype)(s))
            return x * nn.sigmoid(nn.Conv(x.shape[-1], (1, 1), dtype=dtype)(s))

    class MBConv(nn.Module):
        kernel: int
        expand: int = 6

        @nn.compact
        def __call__(self, x):
            def norm(y):
                return nn.BatchNorm(use_running_average=True, momentum=0.99, epsilon=1e-3, dtype=dtype)(y)

            wide = n * self.expand
            y = nn.swish(norm(nn.Conv(wide, (1, 1), use_bias=False, dtype=dtype)(x)))
            k = (self.kernel, self.kernel)
            y = nn.swish(norm(nn.Conv(wide, k, feature_group_count=wide, use_bias=False, dtype=dtype)(y)))
            y = SqueezeExcite(max(1, n // 4))(y)
            return x + norm(nn.Conv(n, (1, 1), use_bias=False, dtype=dtype)(y))

    class Stage(nn.Module):
        @nn.compact
        def __call__(self, x):
            return MBConv(5)(MBConv(3)(x))

    x = normal(b, side, side, n, dtype=dtype)
    module = Stage()
    return Built(module.apply, (like(jax.eval_shape(module.init, jax.random.key(0), x.struct), dtype), x))


@program("medical-unet-pool-dice-grad", GROUP)
def _unet(size: Size) -> Built:
    """A training step's gradient for a small U-Net: max pooling down, transposed convolutions up, Dice and cross-entropy."""
    from flax import linen as nn

    b, side, n, levels = pick(size, (8, 256, 32, 2), (1, 48, 8, 2), (1, 8, 2, 2))
    dtype = half(size)

    class Double(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = nn.Conv(self.features, (3, 3), dtype=dtype)(x)
                x = nn.relu(nn.GroupNorm(num_groups=None, group_size=1, dtype=dtype)(x))
            return x

    class UNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            skips = []
            for level in range(levels):
                x = Double(n * 2**level)(x)
                skips.append(x)
                x = nn.max_pool(x, (2, 2), strides=(2, 2))
            x = Double(n * 2**levels)(x)
            for level in reversed(range(levels)):
                x = nn.ConvTranspose(n * 2**level, (2, 2), strides=(2, 2), dtype=dtype)(x)
                x = Double(n * 2**level)(jnp.concatenate([skips[level], x], axis=-1))
            return nn.Conv(1, (1, 1), dtype=dtype)(x)[..., 0]

    module = UNet()

    def loss(params, image, mask):
        logits = module.apply(params, image).astype(jnp.float32)
        target = mask.astype(jnp.float32)
        bce = jnp.mean(jnp.maximum(logits, 0) - logits * target + jnp.log1p(jnp.exp(-jnp.abs(logits))))
        prob = jax.nn.sigmoid(logits)
        overlap = jnp.sum(prob * target, axis=(1, 2))
        dice = (2 * overlap + 1.0) / (jnp.sum(prob, axis=(1, 2)) + jnp.sum(target, axis=(1, 2)) + 1.0)
        return bce + jnp.mean(1.0 - dice)

    x = normal(b, side, side, 1, dtype=dtype)
    params = like(jax.eval_shape(module.init, jax.random.key(0), x.struct), dtype)
    return Built(jax.value_and_grad(loss), (params, x, booleans(b, side, side)))


@program("wavenet-dilated-gates-likelihood", GROUP)
def _wavenet(size: Size) -> Built:
    """WaveNet's log likelihood of mu-law audio: causal dilated convolutions, gates, a residual and a skip of each layer."""
    b, t, n, skip, layers = pick(size, (4, 8192, 64, 256, 10), (1, 768, 24, 48, 5), (1, 12, 4, 6, 2))
    dtype, levels = half(size), 256

    def causal(x, kernel, dilation):
        pad = (kernel.shape[0] - 1) * dilation
        dims = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(x, kernel, (1,), [(pad, 0)], rhs_dilation=(dilation,), dimension_numbers=dims)

    def encode(wave, mu=levels - 1):
        y = jnp.sign(wave) * jnp.log1p(mu * jnp.abs(wave)) / np.log1p(mu)
        return jnp.clip(((y + 1) / 2 * mu + 0.5).astype(jnp.int32), 0, mu)

    def likelihood(params, wave):
        codes = encode(jnp.clip(wave, -1.0, 1.0))
        x = params["embed"][jnp.pad(codes[:, :-1], ((0, 0), (1, 0)), constant_values=levels // 2)]
        total = 0.0
        for i, p in enumerate(params["layers"]):
            y = causal(x, p["dilated"], 2 ** (i % 10)) + p["bias"]
            gate, value = jnp.split(y, 2, axis=-1)
            y = jnp.tanh(value) * jax.nn.sigmoid(gate)
            total = total + y @ p["skip"]
            x = (x + y @ p["residual"]) * np.asarray(0.5**0.5, dtype)
        y = jax.nn.relu(jax.nn.relu(total) @ params["head1"])
        logp = jax.nn.log_softmax((y @ params["head2"]).astype(jnp.float32), axis=-1)
        return jnp.sum(jnp.take_along_axis(logp, codes[..., None], axis=-1)[..., 0], axis=-1) / (t * np.log(2))

    layer = {
        "dilated": normal(2, n, 2 * n, dtype=dtype, scale=(2 * n) ** -0.5),
        "bias": normal(2 * n, dtype=dtype, scale=0.1),
        "skip": weight(n, skip, dtype=dtype),
        "residual": weight(n, n, dtype=dtype),
    }
    params = {"embed": normal(levels, n, dtype=dtype), "layers": [layer] * layers}
    params |= {"head1": weight(skip, skip, dtype=dtype), "head2": weight(skip, levels, dtype=dtype)}
    return Built(likelihood, (params, normal(b, t, scale=0.2)))


@program("mixture-of-softmaxes-head-grad", GROUP)
def _mixture_of_softmaxes(size: Size) -> Built:
    """The head of a mixture of softmaxes language model and the gradient of its loss, with padded targets."""
    n, d, k, vocabulary = pick(size, (1024, 512, 5, 32000), (48, 96, 3, 2000), (4, 6, 2, 11))
    dtype = half(size)

    def loss(p, hidden, target):
        prior = jax.nn.log_softmax((hidden @ p["prior"]).astype(jnp.float32), axis=-1)
        latent = jnp.tanh(hidden @ p["latent"] + p["bias"]).reshape(n, k, d)
        logits = jnp.einsum("nkd,vd->nkv", latent, p["embedding"]).astype(jnp.float32)
        prob = jnp.sum(jnp.exp(prior)[..., None] * jax.nn.softmax(logits, axis=-1), axis=1)
        picked = jnp.take_along_axis(prob, target[:, None], axis=-1)[:, 0]
        keep = target != 0
        return -jnp.sum(jnp.where(keep, jnp.log(picked + 1e-8), 0.0)) / jnp.maximum(jnp.sum(keep), 1)

    params = {
        "prior": weight(d, k, dtype=dtype),
        "latent": weight(d, k * d, dtype=dtype),
        "bias": normal(k * d, dtype=dtype, scale=0.05),
        "embedding": normal(vocabulary, d, dtype=dtype, scale=d**-0.5),
    }
    return Built(jax.value_and_grad(loss), (params, normal(n, d, dtype=dtype), integers(n, below=vocabulary)))


@program("bart-decode-step-tied-head", GROUP)
def _bart(size: Size) -> Built:
    """One decoding step of BART for a beam: post-norm layers with caches, the encoder's keys, a tied head, the best tokens."""
    b, t, s, n, h, layers, vocabulary = pick(
        size, (32, 128, 256, 1024, 16, 2, 50265), (4, 32, 48, 128, 4, 2, 3000), (2, 5, 4, 8, 2, 2, 13)
    )
    dtype, d = half(size), n // h

    def norm(p, x):
        y = x.astype(jnp.float32)
        mean = jnp.mean(y, axis=-1, keepdims=True)
        var = jnp.mean(jnp.square(y), axis=-1, keepdims=True) - jnp.square(mean)
        return ((y - mean) * lax.rsqrt(var + 1e-5)).astype(x.dtype) * p["scale"] + p["bias"]

    def dense(p, x):
        return x @ p["kernel"] + p["bias"]

    def attend(q, k, v, mask):
        q = q.reshape(b, h, d) * np.asarray(d**-0.5, dtype)
        scores = jnp.einsum("bhd,bthd->bht", q, k)
        scores = jnp.where(mask[:, None, :], scores, jnp.finfo(dtype).min)
        w = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(dtype)
        return jnp.einsum("bht,bthd->bhd", w, v).reshape(b, n)

    def step(params, token, at, cache, encoded, encoder_mask, scores):
        x = params["embed"][token] * np.asarray(n**0.5, dtype) + params["positions"][at + 2]
        x = norm(params["norm"], x)
        seen = jnp.broadcast_to(jnp.arange(t) <= at, (b, t))
        new = []
        for p, (old_k, old_v), (ek, ev) in zip(params["layers"], cache, encoded, strict=True):
            k = lax.dynamic_update_slice(old_k, dense(p["k"], x).reshape(b, 1, h, d), (0, at, 0, 0))
            v = lax.dynamic_update_slice(old_v, dense(p["v"], x).reshape(b, 1, h, d), (0, at, 0, 0))
            new.append((k, v))
            x = norm(p["norm1"], x + dense(p["o"], attend(dense(p["q"], x), k, v, seen)))
            x = norm(p["norm2"], x + dense(p["co"], attend(dense(p["cq"], x), ek, ev, encoder_mask)))
            x = norm(p["norm3"], x + dense(p["fc2"], jax.nn.gelu(dense(p["fc1"], x), approximate=False)))
        logits = (x @ params["embed"].T).astype(jnp.float32) + params["final_bias"]
        logp = jax.nn.log_softmax(logits, axis=-1) + scores[:, None]
        best, tokens = lax.top_k(logp, 8)
        return best, tokens, new

    def linear(i, o):
        return {"kernel": weight(i, o, dtype=dtype), "bias": normal(o, dtype=dtype, scale=0.05)}

    ln = {"scale": gain(n, dtype), "bias": normal(n, dtype=dtype, scale=0.05)}
    layer = {k: linear(n, n) for k in ("q", "k", "v", "o", "cq", "co")}
    layer |= {"fc1": linear(n, 4 * n), "fc2": linear(4 * n, n), "norm1": ln, "norm2": ln, "norm3": ln}
    params = {"embed": normal(vocabulary, n, dtype=dtype, scale=n**-0.5), "norm": ln, "layers": [layer] * layers}
    params |= {"positions": normal(t + 2, n, dtype=dtype, scale=0.1), "final_bias": normal(vocabulary, scale=0.1)}
    own, enc = normal(b, t, h, d, dtype=dtype), normal(b, s, h, d, dtype=dtype)
    arguments = (params, integers(b, below=vocabulary), integers(below=t), [(own, own)] * layers)
    return Built(step, (*arguments, [(enc, enc)] * layers, booleans(b, s), normal(b)))


@program("classifier-lora-attention-grad", GROUP)
def _lora(size: Size) -> Built:
    """Gradients of the adapters alone: queries and values with LoRA and its dropout over frozen weights, a pooled classifier."""
    b, t, n, h, r, classes = pick(size, (8, 512, 1024, 16, 16, 20), (2, 64, 128, 4, 8, 5), (1, 5, 8, 2, 2, 3))
    dtype, d = half(size), n // h

    def adapted(frozen, lora, x, key):
        keep = jax.random.bernoulli(key, 0.95, x.shape)
        dropped = jnp.where(keep, x / 0.95, 0).astype(x.dtype)
        return x @ frozen + (dropped @ lora["a"]) @ lora["b"] * np.asarray(16.0 / r, dtype)

    def loss(trained, frozen, x, mask, label, seed):
        k1, k2 = jax.random.split(jax.random.key(seed))
        y = x.astype(jnp.float32)
        y = (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(dtype) * frozen["norm"]
        q = adapted(frozen["q"], trained["q"], y, k1).reshape(b, t, h, d)
        v = adapted(frozen["v"], trained["v"], y, k2).reshape(b, t, h, d)
        k = (y @ frozen["k"]).reshape(b, t, h, d)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * d**-0.5
        w = jax.nn.softmax(jnp.where(mask[:, None, None, :], scores, -1e9), axis=-1).astype(dtype)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", w, v).reshape(b, t, n) @ frozen["o"]
        pooled = jnp.sum(jnp.where(mask[..., None], x, 0), axis=1) / jnp.sum(mask, axis=1, keepdims=True).astype(dtype)
        logits = pooled.astype(jnp.float32) @ trained["head"]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, label[:, None], -1)[:, 0])

    lora = {"a": weight(n, r, dtype=dtype), "b": normal(r, n, dtype=dtype, scale=0.02)}
    frozen = {k: weight(n, n, dtype=dtype) for k in "qkvo"} | {"norm": gain(n, dtype)}
    trained = {"q": lora, "v": lora, "head": weight(n, classes)}
    arguments = (trained, frozen, normal(b, t, n, dtype=dtype), booleans(b, t), integers(b, below=classes))
    return Built(jax.value_and_grad(loss), (*arguments, integers(below=1000)))


@program("hypernetwork-task-fields-grad", GROUP)
def _hypernetwork(size: Size) -> Built:
    """A hypernetwork writes the weights of a small network per task; the gradient of the fit of every task's points."""
    tasks, points, e, wide, hidden, i = pick(
        size, (128, 512, 128, 256, 64, 3), (24, 192, 24, 48, 24, 3), (2, 5, 4, 6, 4, 2)
    )
    dtype = half(size)
    shapes = {
        "w1": (i, hidden),
        "b1": (hidden,),
        "w2": (hidden, hidden),
        "b2": (hidden,),
        "w3": (hidden, 1),
        "b3": (1,),
    }

    def generate(p, z):
        y = jax.nn.elu(z @ p["in"] + p["in_bias"])
        y = y + jax.nn.elu(y @ p["mid"])
        made = {k: (y @ p["heads"][k]).reshape(shape) for k, shape in shapes.items()}
        return {
            k: v / (jnp.linalg.norm(v.astype(jnp.float32)) + 1e-3).astype(dtype) * p["sizes"][k]
            for k, v in made.items()
        }

    def field(w, x):
        y = jax.nn.softplus(x @ w["w1"] + w["b1"])
        y = jax.nn.softplus(y @ w["w2"] + w["b2"])
        return (y @ w["w3"] + w["b3"])[..., 0]

    def loss(p, z, x, y):
        out = jax.vmap(lambda z, x: field(generate(p, z), x))(z, x).astype(jnp.float32)
        return jnp.mean(jnp.square(out - y)) + 1e-3 * jnp.mean(jnp.square(z.astype(jnp.float32)))

    params = {
        "in": weight(e, wide, dtype=dtype),
        "in_bias": normal(wide, dtype=dtype, scale=0.1),
        "mid": weight(wide, wide, dtype=dtype),
        "heads": {k: weight(wide, int(np.prod(s)), dtype=dtype) for k, s in shapes.items()},
        "sizes": {k: normal(dtype=dtype, scale=0.1, offset=2.0) for k in shapes},
    }
    arguments = (params, normal(tasks, e, dtype=dtype), normal(tasks, points, i, dtype=dtype), normal(tasks, points))
    return Built(jax.value_and_grad(loss, argnums=(0, 1)), arguments)


@program("fourier-siren-poisson-grad", GROUP)
def _siren(size: Size) -> Built:
    """A physics-informed fit of Poisson's equation: Fourier features, sine layers, the Laplacian forward over reverse."""
    n, features, hidden, layers = pick(size, (16384, 64, 128, 2), (256, 16, 32, 2), (3, 2, 4, 2))

    def network(p, x):
        phase = 2 * jnp.pi * (x @ p["frequencies"])
        y = jnp.concatenate([jnp.sin(phase), jnp.cos(phase)])
        for w, b in p["layers"]:
            y = jnp.sin(w.T @ y + b)
        return jnp.dot(p["out"], y)

    def laplacian(p, x):
        slope = jax.grad(network, argnums=1)
        eye = jnp.eye(2)
        return sum(jax.jvp(lambda x: slope(p, x), (x,), (eye[i],))[1][i] for i in range(2))

    def loss(p, inside, source, border):
        residual = jax.vmap(laplacian, (None, 0))(p, inside) - source
        edge = jax.vmap(network, (None, 0))(p, border)
        return jnp.mean(residual**2) + 10.0 * jnp.mean(edge**2)

    widths = [2 * features] + [hidden] * layers
    stack = [(weight(i, o), normal(o, scale=0.1)) for i, o in itertools.pairwise(widths)]
    params = {"frequencies": normal(2, features, scale=0.5), "layers": stack, "out": normal(hidden, scale=0.1)}
    return Built(jax.value_and_grad(loss), (params, normal(n, 2), normal(n), normal(max(1, n // 8), 2)))


@program("pointnet2-sample-group-max", GROUP)
def _pointnet(size: Size) -> Built:
    """A set abstraction of PointNet++: farthest points, balls around them, a shared network, the maximum of each group."""
    b, n, m, k, c, wide = pick(size, (16, 2048, 128, 32, 64, 128), (2, 512, 32, 16, 16, 48), (1, 8, 3, 4, 3, 4))
    radius = 0.8

    def farthest(points):
        def body(i, carry):
            chosen, far, last = carry
            d2 = jnp.sum((points - points[last]) ** 2, axis=-1)
            far = jnp.minimum(far, d2)
            return chosen.at[i].set(last), far, jnp.argmax(far).astype(jnp.int32)

        start = (jnp.zeros(m, jnp.int32), jnp.full(n, 1e10), jnp.int32(0))
        return lax.fori_loop(0, m, body, start)[0]

    def ball(points, centres):
        d2 = jnp.sum((centres[:, None, :] - points[None, :, :]) ** 2, axis=-1)
        where = jnp.where(d2 > radius**2, n, jnp.arange(n)[None, :])
        where = jnp.sort(where, axis=-1)[:, :k]
        return jnp.where(where == n, where[:, :1], where)

    def abstract(params, points, features):
        centres = points[farthest(points)]
        group = ball(points, centres)
        local = (points[group] - centres[:, None, :]) / radius
        y = jnp.concatenate([local, features[group]], axis=-1)
        for p in params:
            y = (y @ p["kernel"] - p["mean"]) * lax.rsqrt(jnp.abs(p["var"]) + 1e-5) * p["scale"] + p["bias"]
            y = jax.nn.relu(y)
        return centres, jnp.max(y, axis=1)

    def layer(i, o):
        each = {"mean": normal(o, scale=0.1), "var": gain(o), "scale": gain(o), "bias": normal(o, scale=0.1)}
        return {"kernel": weight(i, o), **each}

    params = [layer(3 + c, wide), layer(wide, wide), layer(wide, 2 * wide)]
    return Built(jax.vmap(abstract, in_axes=(None, 0, 0)), (params, normal(b, n, 3), normal(b, n, c)))


@program("multiscale-ssim-charbonnier-grad", GROUP)
def _ssim(size: Size) -> Built:
    """The gradient of a restoration loss in the image: SSIM at several scales by Gaussian windows, and Charbonnier's norm."""
    b, side, scales = pick(size, (8, 512, 4), (1, 48, 2), (1, 24, 2))
    taps = np.exp(-0.5 * (np.arange(11) - 5.0) ** 2 / 1.5**2)
    taps = (taps / taps.sum()).astype(np.float32)
    weights = np.array([0.0448, 0.2856, 0.3001, 0.2363, 0.1333], np.float32)[:scales]

    def blur(x):
        dims = ("NHWC", "HWIO", "NHWC")
        for window in (taps[:, None], taps[None, :]):
            kernel = jnp.tile(window[:, :, None, None], (1, 1, 1, 3))
            x = lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=dims, feature_group_count=3)
        return x

    def ssim(x, y):
        c1, c2 = 0.01**2, 0.03**2
        mx, my = blur(x), blur(y)
        vx, vy, xy = blur(x * x) - mx**2, blur(y * y) - my**2, blur(x * y) - mx * my
        contrast = (2 * xy + c2) / (vx + vy + c2)
        luminance = (2 * mx * my + c1) / (mx**2 + my**2 + c1)
        return jnp.mean(luminance * contrast, axis=(1, 2)), jnp.mean(contrast, axis=(1, 2))

    def halve(x):
        return lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4.0

    def loss(x, y):
        total, a, b = 1.0, x, y
        for i in range(scales):
            full, contrast = ssim(a, b)
            value = full if i == scales - 1 else contrast
            total = total * jnp.maximum(value, 1e-4) ** (weights[i] / weights.sum())
            a, b = halve(a), halve(b)
        charbonnier = jnp.mean(jnp.sqrt((x - y) ** 2 + 1e-6))
        return 0.84 * (1.0 - jnp.mean(total)) + 0.16 * charbonnier

    image = normal(b, side, side, 3, scale=0.2, offset=0.5)
    return Built(jax.value_and_grad(loss), (image, image))
