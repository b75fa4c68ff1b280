"""The price takes XLA to make the kernels that it makes: compiled for an H100 without one, they read and write as much."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks import h100
from benchmarks.xla_kernels import both, moved_bytes

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not h100.can_compile(), reason="needs requirements/aot-0.11.txt: make test-aot"),
]


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


HALF = jnp.bfloat16
ROWS, PLACES = array(8192, 1024), array(100_000, dtype=jnp.int32)


def normed(x):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def of_each(first, second):
    return lambda y: (first(y), second(y))


FUNCTIONS = {
    "a softmax is one kernel": (lambda x: jax.nn.softmax(x, -1), ROWS),
    "and what is added up along its rows": (lambda x, y: (jax.nn.softmax(x, -1) * y).sum(-1), ROWS, ROWS),
    "but it is stored for sums along other axes": (lambda x: jax.nn.softmax(x, -1).sum(0), ROWS),
    "and for rows that are taken from it": (lambda x, i: jax.nn.softmax(x, -1)[i] * 2, ROWS, PLACES),
    "a largest element that is wanted itself": (lambda x: jax.nn.logsumexp(x, -1), ROWS),
    "root mean squares": (normed, ROWS),
    "before a product": (lambda x, w: normed(x) @ w, ROWS, array(1024, 1024)),
    "long rows are read again": (lambda x: jax.nn.softmax(x, -1), array(256, 65536)),
    "a map is stored while it is added up": (lambda x: of_each(lambda e: e, lambda e: e.sum(-1))(jnp.exp(x)), ROWS),
    "or along columns": (lambda x: of_each(lambda e: e, lambda e: e.sum(0))(jnp.exp(x)), ROWS),
    "cheap maps are computed again": (lambda x: of_each(lambda e: e.sum(0), lambda e: e.sum(1))(jnp.exp(x)), ROWS),
    "dear ones are stored": (lambda x: of_each(lambda e: e.sum(0), lambda e: e.sum(1))(jnp.sin(x)), array(8192, 8192)),
    "rows are taken where they are read": (lambda x, i, j: ((x[i] - x[j]) ** 2).sum(-1), ROWS, PLACES, PLACES),
    "and where they are added to others": (
        lambda x, i, j: jax.ops.segment_sum(x[i] * 2, j, 8192), array(8192, 64), PLACES, PLACES,
    ),
    "an operand of batches": (lambda x, v: jnp.exp(x) @ v, array(64, 1024, 1024), array(64, 1024, 64)),
    "but not from two tensors": (lambda x, m, v: (x * m) @ v, *[array(64, 1024, 1024)] * 2, array(64, 1024, 64)),
    "a matrix of bytes is stored for one row": (
        lambda x, w, s: x @ (w.astype(x.dtype) * s), array(1, 1920, dtype=HALF), array(1920, 10240, dtype=jnp.int8),
        array(1, 10240, dtype=HALF),
    ),
    "and the terms are, where the matrix is small": (
        lambda x, w, s: x @ (w.astype(x.dtype) * s), array(1, 1920, dtype=HALF), array(1920, 3840, dtype=jnp.int8),
        array(1, 3840, dtype=HALF),
    ),
    "a cast is computed as it is read": (
        lambda x, w: x @ w.astype(x.dtype), array(1, 1920, dtype=HALF), array(1920, 10240, dtype=jnp.int8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_many_bytes_are_moved(name):
    function, *arguments = FUNCTIONS[name]
    ours, xla = both(function, arguments)
    assert 0.85 < moved_bytes(ours) / moved_bytes(xla) < 1.18
