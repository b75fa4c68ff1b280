"""What XLA stores before it sums the product of a vector and a matrix: compared with what it compiles for an H100."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse import device
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.price.xla import kernels_on
from pallasfuse.price.xla_forms import LoopFusion

H100 = device.find("NVIDIA H100 80GB HBM3", "gpu")


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def plain(x, w, scale):
    return x @ w


def scaled(x, w, scale):
    return x @ (w.astype(x.dtype) * scale)


def cast(x, w, scale):
    return x @ w.astype(x.dtype)


def scaled_rows(x, w, scale):
    return x @ (w.astype(x.dtype) * scale).T


def stored(function, rows, columns, dtype=jnp.bfloat16, weights=None):
    """The bytes of the matrices that are written and read again, for each element."""
    shape = (columns, rows) if function is scaled_rows else (rows, columns)
    scale = array(1, shape[1], dtype=dtype)
    arguments = array(1, rows, dtype=dtype), array(*shape, dtype=weights or dtype), scale
    kernels = kernels_on(H100, convert(jax.make_jaxpr(function)(*arguments)).program)
    assert all(isinstance(k, LoopFusion) for k in kernels)
    return sum(k.written_bytes for k in kernels if k.written_bytes > 4 * columns) / (rows * columns)


@pytest.mark.parametrize(
    ("function", "rows", "columns", "bytes_of_each"),
    [
        (plain, 1920, 1024, 2),
        (plain, 1920, 4096, 0),
        (plain, 512, 4096, 0),
        (scaled, 1024, 1024, 2),
        (scaled, 1920, 4096, 2),
        (scaled, 512, 9000, 0),
        (scaled, 5120, 1024, 0),
        (scaled_rows, 1920, 3840, 0),
        (scaled, 1920, 10240, 2),
        (scaled_rows, 1920, 10240, 2),
        (cast, 1920, 10240, 0),
    ],
)  # fmt: skip
def test_terms_of_small_products_and_matrices_of_large_ones(function, rows, columns, bytes_of_each):
    weights = None if function is plain else jnp.int8
    assert stored(function, rows, columns, weights=weights) == bytes_of_each


def test_wider_terms_are_stored_for_fewer_columns():
    assert [stored(scaled, 1024, n, dtype=jnp.float32) for n in (2048, 4096)] == [4, 0]
    assert [stored(plain, 1024, n, dtype=jnp.float32) for n in (1024, 1920)] == [4, 0]


def test_what_a_product_makes_is_stored_once():
    def updated(x, w, a, b):
        return x @ (w + a @ b)

    arguments = array(1, 1920), array(1920, 10240), array(1920, 16), array(16, 10240)
    kernels = kernels_on(H100, convert(jax.make_jaxpr(updated)(*arguments)).program)
    assert len(kernels) == 2
