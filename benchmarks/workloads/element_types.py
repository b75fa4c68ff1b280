"""Programs over other types than float32 and bfloat16: bytes, short and long integers, bits, booleans, float16 and float8."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import Built, Random, Size, booleans, gain, integers, normal, pick, program, weight

GROUP = "element-types"


def _words(*shape: int, dtype: Any = jnp.int8, below: int = 127) -> Random:
    return Random(shape, jnp.dtype(dtype), below=below)


def _softmax(x: Any) -> Any:
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@program("hamming-nearest-codes", GROUP)
def _hamming(size: Size) -> Built:
    """This gives the nearest stored binary code of each query, by counting the bits that differ."""
    queries, codes, words = pick(size, (1500, 20011, 8), (120, 3001, 8), (3, 9, 2))

    def nearest(q, c):
        differ = jnp.sum(lax.population_count(q[:, None, :] ^ c[None, :, :]), axis=-1).astype(jnp.int32)
        return jnp.argmin(differ, axis=1), jnp.min(differ, axis=1)

    kind = jnp.uint32
    return Built(
        nearest, (_words(queries, words, dtype=kind, below=2**31), _words(codes, words, dtype=kind, below=2**31))
    )


@program("reachable-in-two-steps", GROUP)
def _reachable(size: Size) -> Built:
    """This gives which nodes of a graph two steps reach, and how many, from a boolean matrix of edges."""
    n = pick(size, 3000, 500, 9)

    def reach(edges):
        reached = edges | (edges @ edges)
        return reached, jnp.sum(reached, axis=1)

    return Built(reach, (booleans(n, n),))


@program("shortest-paths-of-integers", GROUP)
def _paths(size: Size) -> Built:
    """This gives the lengths of the shortest paths of two edges: a product of integers with minima for sums."""
    n = pick(size, 700, 200, 7)
    return Built(lambda d: jnp.min(d[:, :, None] + d[None, :, :], axis=1), (integers(n, n, below=1000),))


@program("byte-weights-and-rows-with-bias-gelu", GROUP)
def _bytes(size: Size) -> Built:
    """This gives a layer whose signed bytes are multiplied exactly, scaled back per row and column, with a bias and a gelu."""
    rows, n, m = pick(size, (3000, 2048, 3000), (200, 512, 700), (3, 16, 5))

    def layer(x, w, rows, columns, bias):
        sums = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
        return jax.nn.gelu(sums.astype(jnp.float32) * rows[:, None] * columns + bias).astype(jnp.bfloat16)

    scales = normal(rows, scale=1e-4, offset=1e-2), normal(m, scale=1e-4, offset=1e-2)
    return Built(layer, (_words(rows, n), _words(m, n), *scales, normal(m)))


@program("byte-scores-attention", GROUP)
def _byte_scores(size: Size) -> Built:
    """This gives attention whose scores are exact sums of products of signed bytes, with one scale per query and key."""
    h, t, d = pick(size, (16, 2000, 64), (4, 300, 64), (2, 9, 8))

    def attend(q, k, v, qs, ks):
        s = lax.dot_general(q, k, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.int32)
        p = _softmax(s.astype(jnp.float32) * qs[:, :, None] * ks[:, None, :])
        return jnp.einsum("hts,hsd->htd", p.astype(v.dtype), v)

    scales = normal(h, t, scale=1e-4, offset=1e-2), normal(h, t, scale=1e-4, offset=1e-2)
    values = normal(h, t, d, dtype=jnp.bfloat16 if size == "gpu" else jnp.float32)
    return Built(attend, (_words(h, t, d), _words(h, t, d), values, *scales))


@program("half-precision-attention-with-bias", GROUP)
def _half(size: Size) -> Built:
    """This gives attention in float16 throughout, with a bias per head and pair of positions."""
    h, t, d = pick(size, (16, 1500, 80), (4, 300, 64), (2, 9, 8))

    def attend(q, k, v, bias):
        s = jnp.einsum("htd,hsd->hts", q, k) * jnp.float16(d**-0.5) + bias
        return jnp.einsum("hts,hsd->htd", jax.nn.softmax(s, axis=-1), v)

    one = normal(h, t, d, dtype=jnp.float16)
    return Built(attend, (one, one, one, normal(h, t, t, dtype=jnp.float16)))


@program("exact-attention-and-norm", GROUP)
def _exact(size: Size) -> Built:
    """This gives attention of float32 whose products keep all digits, and the norm of its result."""
    h, t, d = pick(size, (12, 1000, 64), (4, 300, 64), (2, 9, 8))

    def attend(q, k, v, scale):
        with jax.default_matmul_precision("highest"):
            y = jnp.einsum("hts,hsd->htd", _softmax(jnp.einsum("htd,hsd->hts", q, k) * d**-0.5), v)
        return y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6) * scale

    one = normal(h, t, d)
    return Built(attend, (one, one, one, gain(d)))


@program("normalised-bytes-of-images", GROUP)
def _images(size: Size) -> Built:
    """This gives images of unsigned bytes as floats with mean zero and variance one per image and channel, and their extremes."""
    b, side = pick(size, (64, 333), (4, 333), (2, 5))

    def normalise(x):
        x = x.astype(jnp.float32) / 255.0
        mean, var = x.mean((1, 2), keepdims=True), x.var((1, 2), keepdims=True)
        return ((x - mean) * lax.rsqrt(var + 1e-5)).astype(jnp.bfloat16), x.min((1, 2)), x.max((1, 2))

    return Built(normalise, (_words(b, side, side, 3, dtype=jnp.uint8, below=256),))


@program("histogram-by-equality-counts", GROUP)
def _histogram(size: Size) -> Built:
    """This gives how often each of a few hundred values is in each row of integers, by comparing with all of them."""
    rows, n, values = pick(size, (500, 5000, 257), (16, 3000, 257), (2, 9, 5))
    return Built(
        lambda x: jnp.sum(x[:, :, None] == jnp.arange(values, dtype=jnp.int32), axis=1),
        (integers(rows, n, below=values),),
    )


@program("any-and-all-of-visible-pairs", GROUP)
def _pairs(size: Size) -> Built:
    """This gives for each row of a boolean matrix if any or all columns of the same group are set, and how many are."""
    n = pick(size, 6000, 1500, 9)

    def reduce(x, group):
        same = group[:, None] == group[None, :]
        return (x & same).any(1), (x | ~same).all(1), jnp.sum(x & same, axis=0)

    return Built(reduce, (booleans(n, n), integers(n, below=16)))


@program("fixed-point-scaled-sums", GROUP)
def _fixed(size: Size) -> Built:
    """This gives sums of products of short integers with shifts and saturation, as audio in fixed point has them."""
    rows, taps, n = pick(size, (2000, 64, 999), (300, 32, 400), (3, 4, 5))

    def filtered(x, w):
        sums = jnp.sum(x[:, :, None].astype(jnp.int32) * w[None].astype(jnp.int32), axis=1)
        return jnp.clip((sums + 2**14) >> 15, -(2**15), 2**15 - 1).astype(jnp.int16)

    return Built(
        filtered, (_words(rows, taps, dtype=jnp.int16, below=2**11), _words(taps, n, dtype=jnp.int16, below=2**11))
    )


@program("hashed-signatures-minima", GROUP)
def _signatures(size: Size) -> Built:
    """This gives the smallest hash of the elements of each set, for many multiplicative hashes (MinHash)."""
    sets, n, hashes = pick(size, (2000, 512, 256), (200, 128, 128), (3, 5, 4))

    def signature(x, a, b):
        mixed = x[:, :, None] * a + b
        return jnp.min(mixed ^ (mixed >> 15), axis=1)

    kind = jnp.uint32
    odd = _words(hashes, dtype=kind, below=2**31)
    return Built(signature, (_words(sets, n, dtype=kind, below=2**31), odd, odd))


@program("float8-weights-gated-layer", GROUP)
def _float8(size: Size) -> Built:
    """This gives a gated layer whose weights are stored in eight bits of floating point, with one scale per output column."""
    rows, n, m = pick(size, (16, 4096, 11008), (4, 512, 1024), (2, 8, 6))
    dtype = jnp.bfloat16 if size == "gpu" else jnp.float32

    def layer(x, gate, up, gate_scale, up_scale):
        g = (x @ gate.astype(dtype)) * gate_scale
        return jax.nn.silu(g) * ((x @ up.astype(dtype)) * up_scale)

    stored = Random((n, m), jnp.dtype(jnp.float8_e4m3fn), n**-0.5)
    return Built(layer, (normal(rows, n, dtype=dtype), stored, stored, gain(m, dtype), gain(m, dtype)))


@program("half-weights-mixed-with-wide-rows", GROUP)
def _mixed(size: Size) -> Built:
    """This gives a residual layer of float32 rows whose weights are float16: the product converts one side only."""
    rows, n, m = pick(size, (1000, 1536, 3000), (100, 384, 1000), (3, 8, 5))

    def layer(x, w, back, scale):
        y = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale
        return x + jnp.square(jax.nn.relu(y @ w.astype(jnp.float32))) @ back.astype(jnp.float32)

    kind = jnp.float16
    return Built(layer, (normal(rows, n), weight(n, m, dtype=kind), weight(m, n, dtype=kind), gain(n)))


@program("integer-ranks-and-votes", GROUP)
def _ranks(size: Size) -> Built:
    """This gives the rank of each score in its row by counting smaller ones, and votes of the first ten."""
    rows, n = pick(size, (300, 2000), (8, 1500), (2, 9))

    def ranks(x):
        lower = (x[:, None, :] > x[:, :, None]) | (
            (x[:, None, :] == x[:, :, None]) & (jnp.arange(n)[None, :] < jnp.arange(n)[:, None])
        )
        place = jnp.sum(lower, axis=-1, dtype=jnp.int32)
        return place, jnp.sum(jnp.where(place < 10, 10 - place, 0), axis=0)

    return Built(ranks, (integers(rows, n, below=500),))


@program("float16-variance-of-long-rows", GROUP)
def _variance(size: Size) -> Built:
    """This gives long rows of float16 with mean zero and variance one, whose statistics are float16, too."""
    rows, n = pick(size, (4000, 5000), (300, 5000), (3, 12))

    def standardise(x):
        return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + jnp.float16(1e-3))

    return Built(standardise, (normal(rows, n, dtype=jnp.float16),))
