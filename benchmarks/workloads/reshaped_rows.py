"""Models whose words or patches are one axis in some layers and several in others: pooled, stacked, or laid out as a picture."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads.registry import Built, Size, gain, half, integers, normal, pick, program, weight

GROUP = "reshaped"


def _norm(x: Any, scale: Any) -> Any:
    y = x.astype(jnp.float32)
    mean = y.mean(-1, keepdims=True)
    y = (y - mean) * jax.lax.rsqrt(jnp.square(y - mean).mean(-1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * scale


def _attend(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    scores = jnp.einsum("...thd,...shd->...hts", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    scores = scores if mask is None else jnp.where(mask, scores, -1e30)
    return jnp.einsum("...hts,...shd->...thd", jax.nn.softmax(scores, -1).astype(v.dtype), v)


def _layer(p: Any, x: Any, heads: int, mask: Any = None) -> Any:
    q, k, v = jnp.split((_norm(x, p["norm1"]) @ p["qkv"]).reshape(*x.shape[:-1], 3 * heads, -1), 3, axis=-2)
    x = x + _attend(q, k, v, mask).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"]) @ p["down"]


def _weights(n: int, dtype: Any) -> dict[str, Any]:
    return {
        "norm1": gain(n, dtype), "norm2": gain(n, dtype), "qkv": weight(n, 3 * n, dtype=dtype),
        "out": weight(n, n, dtype=dtype), "up": weight(n, 4 * n, dtype=dtype), "down": weight(4 * n, n, dtype=dtype),
    }  # fmt: skip


@program("patches-to-a-picture-diffusion-transformer", GROUP)
def _to_picture(size: Size) -> Built:
    """Two layers over the patches of a latent picture, which are cut out of it before and laid side by side after."""
    batch, side, channels, n, heads = pick(size, (6, 56, 16, 1152, 16), (2, 28, 4, 192, 4), (2, 6, 2, 8, 2))
    dtype, patch = half(size), 2
    rows = side // patch

    def denoise(p: Any, x: Any) -> Any:
        x = x.reshape(batch, rows, patch, rows, patch, channels).transpose(0, 1, 3, 2, 4, 5)
        x = x.reshape(batch, rows * rows, -1) @ p["in"]
        for layer in p["layers"]:
            x = _layer(layer, x, heads)
        x = (_norm(x, p["norm"]) @ p["out"]).reshape(batch, rows, rows, patch, patch, channels)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, side, side, channels)

    cut = patch * patch * channels
    p = {"in": weight(cut, n, dtype=dtype), "out": weight(n, cut, dtype=dtype), "norm": gain(n, dtype)}
    p["layers"] = [_weights(n, dtype), _weights(n, dtype)]
    return Built(denoise, (p, normal(batch, side, side, channels, dtype=dtype)))


@program("patches-pooled-by-fours-into-words-of-a-language-model", GROUP)
def _pooled(size: Size) -> Built:
    """Two layers over the patches of pictures; then each square of four by four becomes one word of another width."""
    batch, rows, n, heads, words = pick(size, (3, 48, 1152, 16, 2048), (1, 24, 192, 4, 256), (2, 8, 8, 2, 12))
    dtype, square = half(size), 4

    def encode(p: Any, x: Any) -> Any:
        for layer in p["layers"]:
            x = _layer(layer, x, heads)
        x = x.reshape(batch, rows // square, square, rows // square, square, n).mean((2, 4))
        return _norm(x.reshape(batch, -1, n), p["norm"]) @ p["out"]

    p = {
        "out": weight(n, words, dtype=dtype),
        "norm": gain(n, dtype),
        "layers": [_weights(n, dtype), _weights(n, dtype)],
    }
    return Built(encode, (p, normal(batch, rows * rows, n, dtype=dtype)))


@program("frames-of-speech-stacked-between-two-encoders", GROUP)
def _stacked(size: Size) -> Built:
    """A layer over all frames of speech, then four neighbours are one wider frame, and a layer over these."""
    batch, frames, n, heads = pick(size, (8, 1500, 512, 8), (2, 300, 128, 4), (2, 12, 8, 2))
    dtype, several = half(size), 4

    def encode(p: Any, x: Any) -> Any:
        x = _layer(p["fine"], x, heads)
        x = x.reshape(batch, frames // several, several * n) @ p["join"]
        return _norm(_layer(p["coarse"], x, heads), p["norm"])

    p = {"fine": _weights(n, dtype), "coarse": _weights(n, dtype)}
    p |= {"join": weight(several * n, n, dtype=dtype), "norm": gain(n, dtype)}
    return Built(encode, (p, normal(batch, frames, n, dtype=dtype)))


@program("chunks-and-all-words-in-turns-causal-layers", GROUP)
def _in_turns(size: Size) -> Built:
    """Words see their own chunk in one layer, and all words before them in the next."""
    batch, words, chunk, n, heads = pick(size, (4, 2100, 300, 768, 12), (1, 400, 50, 192, 4), (2, 12, 4, 8, 2))
    dtype = half(size)

    def decode(p: Any, x: Any) -> Any:
        order = jnp.arange(words)
        near = jnp.arange(chunk)
        for one, other in p["layers"]:
            parts = x.reshape(batch, words // chunk, chunk, n)
            x = _layer(one, parts, heads, near[:, None] >= near).reshape(x.shape)
            x = _layer(other, x, heads, order[:, None] >= order)
        return _norm(x, p["norm"])

    p = {"layers": [(_weights(n, dtype), _weights(n, dtype))], "norm": gain(n, dtype)}
    return Built(decode, (p, normal(batch, words, n, dtype=dtype)))


@program("words-scored-in-chunks-behind-two-layers", GROUP)
def _scored(size: Size) -> Built:
    """Two causal layers, and a head over a large vocabulary that scores the words chunk by chunk."""
    batch, words, chunk, n, heads, vocabulary = pick(
        size, (3, 1530, 170, 640, 10, 32003), (1, 320, 80, 192, 4, 3001), (2, 12, 4, 8, 2, 15)
    )
    dtype = half(size)

    def score(p: Any, x: Any, targets: Any) -> Any:
        order = jnp.arange(words)
        for layer in p["layers"]:
            x = _layer(layer, x, heads, order[:, None] >= order)

        def part(given: Any) -> Any:
            rows, wanted = given
            logits = (rows @ p["head"]).astype(jnp.float32)
            return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, wanted[:, None], -1)[:, 0]

        losses = jax.lax.map(part, (_norm(x, p["norm"]).reshape(-1, chunk, n), targets.reshape(-1, chunk)))
        return losses.reshape(batch, words).mean(-1)

    p = {"head": weight(n, vocabulary, dtype=dtype), "norm": gain(n, dtype)}
    p["layers"] = [_weights(n, dtype), _weights(n, dtype)]
    return Built(score, (p, normal(batch, words, n, dtype=dtype), integers(batch, words, below=vocabulary)))
