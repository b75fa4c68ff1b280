"""Parts of models of images with text, of molecules and of language of the ninth set: its author had seen no plan."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, gain, half, integers, normal, pick, program, weight

GROUP = "ninth"


def linear(n, m, dtype, offset=0.0):
    """A dense layer's weights with a bias."""
    return {"w": weight(n, m, dtype=dtype), "b": normal(m, dtype=dtype, scale=0.02, offset=offset)}


def dense(p, x):
    """A dense layer."""
    return x @ p["w"] + p["b"]


def rms(scale, x, eps=1e-6):
    """The rows with a mean square of one, times a scale."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * scale).astype(x.dtype)


@program("flamingo-resampler-gated-cross-layer", GROUP)
def _flamingo(size: Size) -> Built:
    """This gives OpenFlamingo's vision: latents resample the features of each image, and the text attends to its last image.

    Latents attend to an image's features and to themselves; each token of the text sees only the latents of the image that came
    last before it, and none before the first. Gates (tanh of a scalar) scale what is added.
    """
    b, images, v, m, latents, t, n, h, d, layers = pick(
        size,
        (4, 4, 256, 1024, 64, 1024, 2048, 8, 64, 2),
        (2, 3, 64, 192, 32, 128, 256, 4, 32, 2),
        (2, 3, 5, 6, 4, 11, 8, 2, 3, 1),
    )
    dtype = half(size)

    def norm(p, x):
        y = x.astype(jnp.float32)
        mean, variance = jnp.mean(y, axis=-1, keepdims=True), jnp.var(y, axis=-1, keepdims=True)
        return ((y - mean) * lax.rsqrt(variance + 1e-5) * p["scale"] + p["shift"]).astype(dtype)

    def heads(x):
        return x.reshape(*x.shape[:-1], h, d)

    def feed_forward(p, x):
        return jax.nn.gelu(norm(p["norm"], x) @ p["up"], approximate=False) @ p["down"]

    def resample(p, features, x):
        features, y = norm(p["norm_media"], features), norm(p["norm_latents"], x)
        q = heads(y @ p["q"]) * d**-0.5
        k, values = jnp.split(jnp.concatenate([features, y], axis=-2) @ p["kv"], 2, axis=-1)
        scores = jnp.einsum("bmihd,bmjhd->bmhij", q, heads(k))
        scores = scores - lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
        out = jnp.einsum("bmhij,bmjhd->bmihd", jax.nn.softmax(scores, axis=-1), heads(values))
        x = x + out.reshape(*x.shape[:-1], h * d) @ p["out"]
        return x + feed_forward(p["network"], x)

    def cross(p, x, media, places):
        marks = jnp.any(jnp.arange(t) == places[:, :, None], axis=1)
        text_time = jnp.cumsum(marks, axis=-1)
        media_time = jnp.repeat(jnp.arange(images) + 1, latents)
        q = heads(norm(p["norm"], x) @ p["q"]) * d**-0.5
        k, values = jnp.split(media.reshape(b, images * latents, m) @ p["kv"], 2, axis=-1)
        scores = jnp.einsum("bihd,bjhd->bhij", q, heads(k))
        seen = text_time[:, None, :, None] == media_time[None, None, None, :]
        scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
        probs = jax.nn.softmax(scores, axis=-1)
        probs = jnp.where((text_time == 0)[:, None, :, None], 0.0, probs)
        out = jnp.einsum("bhij,bjhd->bihd", probs, heads(values)).reshape(b, t, h * d) @ p["out"]
        x = x + out * jnp.tanh(p["attention_gate"])
        return x + feed_forward(p["network"], x) * jnp.tanh(p["network_gate"])

    def forward(p, features, x, places):
        features = features + p["times"][None, :, None, :]
        z = jnp.broadcast_to(p["latents"], (b, images, latents, m))
        for layer in p["resampler"]:
            z = resample(layer, features, z)
        return cross(p["cross"], x, norm(p["norm"], z), places)

    def norms(width):
        return {"scale": gain(width), "shift": normal(width, scale=0.1)}

    def network(width):
        up, down = weight(width, 4 * width, dtype=dtype), weight(4 * width, width, dtype=dtype)
        return {"norm": norms(width), "up": up, "down": down}

    def attention(width):
        q, kv = weight(width, h * d, dtype=dtype), weight(m, 2 * h * d, dtype=dtype)
        return {"q": q, "kv": kv, "out": weight(h * d, width, dtype=dtype), "network": network(width)}

    one = attention(m) | {"norm_media": norms(m), "norm_latents": norms(m)}
    gates = {name: normal(dtype=dtype, offset=0.5, scale=0.1) for name in ("attention_gate", "network_gate")}
    params = {
        "times": normal(images, m, dtype=dtype),
        "latents": normal(latents, m, dtype=dtype),
        "resampler": [one] * layers,
        "norm": norms(m),
        "cross": attention(n) | gates | {"norm": norms(n)},
    }
    inputs = (normal(b, images, v, m, dtype=dtype), normal(b, t, n, dtype=dtype), integers(b, images, below=t))
    return Built(forward, (params, *inputs))


@program("alphafold3-atom-windows-denoiser", GROUP)
def _atoms(size: Size) -> Built:
    """This gives AlphaFold 3's transformer of atoms, as its diffusion module runs it for some samples of one molecule at once.

    Windows of 32 atoms attend to the 128 atoms around them with a bias from pairs of atoms; norms, gates and transitions are
    conditioned on the atoms' features, and the blocks are scanned with stacked weights.
    """
    samples, windows, queries, keys, c, pairs, h, blocks = pick(
        size, (5, 192, 32, 128, 128, 16, 4, 3), (2, 10, 32, 128, 64, 16, 4, 2), (2, 5, 4, 10, 6, 3, 2, 2)
    )
    dtype, d, atoms = half(size), c // h, windows * queries
    around = np.arange(windows)[:, None] * queries + (queries - keys) // 2 + np.arange(keys)[None, :]
    inside, around = (around >= 0) & (around < atoms), np.clip(around, 0, atoms - 1)

    def norm(x, scale=None):
        y = x.astype(jnp.float32)
        y = (y - jnp.mean(y, axis=-1, keepdims=True)) * lax.rsqrt(jnp.var(y, axis=-1, keepdims=True) + 1e-5)
        return (y if scale is None else y * scale).astype(dtype)

    def adaptive(p, x, condition):
        condition = norm(condition, p["scale"])
        return jax.nn.sigmoid(dense(p["gate"], condition)) * norm(x) + condition @ p["shift"]

    def zero_gate(p, x, condition):
        return jax.nn.sigmoid(dense(p["condition"], condition)) * (x @ p["out"])

    def cross(p, x, xk, seen, seen_k, bias, condition, condition_k):
        x, xk = adaptive(p["norm_q"], x, condition), adaptive(p["norm_k"], xk, condition_k)
        q = dense(p["q"], x).reshape(*x.shape[:-1], h, d)
        k, v = ((xk @ p[name]).reshape(*xk.shape[:-1], h, d) for name in ("k", "v"))
        logits = jnp.einsum("swqhc,swkhc->swhqk", q * d**-0.5, k).astype(jnp.float32)
        masked = 1e9 * (seen.astype(jnp.float32) - 1.0)[:, None, :, None] + 1e9 * (seen_k - 1.0)[:, None, None, :]
        probs = jax.nn.softmax(logits + masked + bias, axis=-1).astype(dtype)
        out = jnp.einsum("swhqk,swkhc->swqhc", probs, v).reshape(x.shape)
        return zero_gate(p["zero"], out * jax.nn.sigmoid(x @ p["gate"]), condition)

    def transition(p, x, condition):
        left, right = jnp.split(adaptive(p["norm"], x, condition) @ p["up"], 2, axis=-1)
        return zero_gate(p["zero"], jax.nn.silu(left) * right, condition)

    def to_keys(x):
        return x.reshape(*x.shape[:-3], atoms, x.shape[-1])[..., around, :]

    def forward(p, x, condition, pair, length):
        seen = (jnp.arange(atoms) <= atoms // 2 + length).reshape(windows, queries)
        seen_k = (seen.reshape(atoms)[around] & inside).astype(jnp.float32)
        condition_k = to_keys(condition)
        bias = jnp.einsum("wqkc,cnh->nwhqk", norm(pair, p["pair_scale"]), p["pair"]).astype(jnp.float32)

        def block(x, layer):
            weights, bias = layer
            xk = to_keys(x)
            x = x + cross(weights["attention"], x, xk, seen, seen_k, bias, condition, condition_k)
            return x + transition(weights["transition"], x, condition), None

        x, _ = lax.scan(block, x, (p["blocks"], bias))
        x = x * seen[..., None].astype(dtype)
        return (norm(x, p["out_scale"]) @ p["position"]).astype(jnp.float32)

    def many(shape, scale, offset=0.0, kind=dtype):
        return normal(blocks, *shape, dtype=kind, scale=scale, offset=offset)

    def linear(offset=0.0):
        return {"w": many((c, c), c**-0.5), "b": many((c,), 0.02, offset)}

    def conditioned():
        return {"scale": many((c,), 0.1, 1.0, jnp.float32), "gate": linear(), "shift": many((c, c), c**-0.5)}

    def zero(inputs):
        return {"condition": linear(-2.0), "out": many((inputs, c), inputs**-0.5)}

    attention = {name: many((c, c), c**-0.5) for name in ("k", "v", "gate")}
    attention |= {"q": linear(), "norm_q": conditioned(), "norm_k": conditioned(), "zero": zero(c)}
    params = {
        "pair_scale": gain(pairs),
        "pair": normal(pairs, blocks, h, dtype=dtype, scale=pairs**-0.5),
        "blocks": {
            "attention": attention,
            "transition": {"norm": conditioned(), "up": many((c, 4 * c), c**-0.5), "zero": zero(2 * c)},
        },
        "out_scale": gain(c),
        "position": weight(c, 3, dtype=dtype),
    }
    x, condition = normal(samples, windows, queries, c, dtype=dtype), normal(windows, queries, c, dtype=dtype)
    pair = normal(windows, queries, keys, pairs, dtype=dtype)
    return Built(forward, (params, x, condition, pair, integers(below=atoms // 2)))


@program("kimi-linear-delta-decode-gathered-experts", GROUP)
def _kimi(size: Size) -> Built:
    """This gives a layer of Kimi Linear in decoding: one token of each request, with states in the place of a cache.

    A short convolution keeps its last inputs; the state decays per channel and is corrected by the delta rule; then each token's
    experts, chosen by sigmoids with a correcting bias, are gathered and a shared expert is added.
    """
    b, n, h, d, taps, experts, best, wide = pick(
        size, (8, 2304, 32, 128, 4, 64, 8, 1024), (4, 288, 4, 32, 4, 16, 4, 128), (3, 10, 2, 4, 3, 5, 2, 6)
    )
    dtype = half(size)

    def short(p, x, past):
        window = jnp.concatenate([past, x[:, None, :]], axis=1)
        return jax.nn.silu(jnp.sum(window * p, axis=1)), window[:, 1:]

    def unit(x):
        return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

    def mix(p, x, pasts, state):
        mixed, news = {}, {}
        for name in ("q", "k", "v"):
            y, news[name] = short(p["short"][name], x @ p[name], pasts[name])
            mixed[name] = y.reshape(b, h, d).astype(jnp.float32)
        q, k, v = unit(mixed["q"]) * d**-0.5, unit(mixed["k"]), mixed["v"]
        decay = ((x @ p["decay1"]) @ p["decay2"]).astype(jnp.float32) + p["decay_bias"]
        decay = -jnp.exp(p["log"])[:, None] * jax.nn.softplus(decay.reshape(b, h, d))
        beta = jax.nn.sigmoid((x @ p["beta"]).astype(jnp.float32))
        state = state * jnp.exp(decay)[..., None]
        wrong = v - jnp.sum(k[..., None] * state, axis=-2)
        state = state + jnp.einsum("bhk,bhv->bhkv", beta[..., None] * k, wrong)
        out = jnp.einsum("bhk,bhkv->bhv", q, state).astype(dtype)
        gate = dense(p["gate2"], x @ p["gate1"]).reshape(b, h, d)
        out = rms(p["head_norm"], out) * jax.nn.sigmoid(gate)
        return out.reshape(b, h * d) @ p["out"], news, state

    def feed(p, x):
        scores = jax.nn.sigmoid(x.astype(jnp.float32) @ p["router"])
        _, index = lax.top_k(scores + p["correction"], best)
        weights = jnp.take_along_axis(scores, index, axis=-1)
        weights = 2.446 * weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        gate = jnp.einsum("bn,beno->beo", x, p["gate"][index])
        up = jnp.einsum("bn,beno->beo", x, p["up"][index])
        each = jnp.einsum("beo,beon->ben", jax.nn.silu(gate) * up, p["down"][index])
        shared = (jax.nn.silu(x @ p["shared_gate"]) * (x @ p["shared_up"])) @ p["shared_down"]
        return jnp.einsum("ben,be->bn", each, weights.astype(dtype)) + shared

    def layer(p, x, pasts, state):
        y, pasts, state = mix(p["mix"], rms(p["norm1"], x), pasts, state)
        x = x + y
        return x + feed(p["feed"], rms(p["norm2"], x)), pasts, state

    mixing = {name: weight(n, h * d, dtype=dtype) for name in ("q", "k", "v")}
    mixing |= {name: weight(n, d, dtype=dtype) for name in ("decay1", "gate1")}
    mixing |= {
        "short": {name: normal(taps, h * d, dtype=dtype, scale=taps**-0.5) for name in ("q", "k", "v")},
        "decay2": weight(d, h * d, dtype=dtype),
        "decay_bias": normal(h * d, scale=0.5, offset=-2.0),
        "log": normal(h, scale=0.5, offset=1.0),
        "beta": weight(n, h, dtype=dtype),
        "gate2": linear(d, h * d, dtype),
        "head_norm": gain(d),
        "out": weight(h * d, n, dtype=dtype),
    }
    feeding = {name: weight(experts, n, wide, dtype=dtype) for name in ("gate", "up")}
    feeding |= {name: weight(n, wide, dtype=dtype) for name in ("shared_gate", "shared_up")}
    feeding |= {"down": weight(experts, wide, n, dtype=dtype), "shared_down": weight(wide, n, dtype=dtype)}
    feeding |= {"router": weight(n, experts), "correction": normal(experts, scale=0.1)}
    params = {"norm1": gain(n), "norm2": gain(n), "mix": mixing, "feed": feeding}
    pasts = {name: normal(b, taps - 1, h * d, dtype=dtype) for name in ("q", "k", "v")}
    return Built(layer, (params, normal(b, n, dtype=dtype), pasts, normal(b, h, d, d, scale=0.1)))
