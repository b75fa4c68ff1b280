"""Arguments to measure a program on: what is drawn, and the memory that there is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse import samples

DEVICE = jax.devices()[0]
TABLE = jax.ShapeDtypeStruct((1000, 8), jnp.float32)
ROWS = jax.ShapeDtypeStruct((4,), jnp.int32)
NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


def test_integers_with_a_bound_are_skewed():
    """A user's indices name some places more often than others; what has no bound is as it was."""
    shapes = [jax.ShapeDtypeStruct((60_000,), dtype) for dtype in (jnp.int32, jnp.int32, jnp.uint8)]
    some, others, small = samples.drawn(shapes, DEVICE, [100, None, 300], skew=1.5)
    counts = np.bincount(some, minlength=100)
    assert counts.shape == (100,)  # none is 100 or more
    assert counts[0] == pytest.approx(60_000 * 100 ** (-1 / 1.5), rel=0.1)
    assert counts[-1] > 0
    assert int(others.max()) > 59_000
    assert abs(float(others.mean()) / 30_000 - 1) < 0.02
    assert int(small.max()) == 255


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool", "complex64", "float8_e4m3fn"]
)
def test_values_are_plausible(dtype):
    shapes = [
        jax.ShapeDtypeStruct((300, 70), dtype),
        jax.ShapeDtypeStruct((), dtype),
        jax.ShapeDtypeStruct((0, 3), dtype),
    ]
    matrix, scalar, empty = samples.drawn(shapes, DEVICE)
    assert [x.shape for x in (matrix, scalar, empty)] == [(300, 70), (), (0, 3)]
    assert matrix.dtype == dtype
    if dtype == "bool":
        assert 0.4 < matrix.mean() < 0.6
    elif jnp.issubdtype(matrix.dtype, jnp.integer):
        assert int(matrix.min()) >= 0
        assert int(matrix.max()) <= min(300, jnp.iinfo(dtype).max)
        assert int(matrix.max()) > 100
    else:
        wide = jnp.abs(matrix.astype("complex64"))
        assert 0.5 < float(wide.mean()) < 1.5
        assert not bool((matrix[0] == matrix[1]).all())


def test_large_arrays_are_written_out_where_they_are(monkeypatch):
    from dataclasses import dataclass

    @dataclass
    class Gpu:
        platform: str = "gpu"

    monkeypatch.setattr(jax, "device_put", lambda x, device: jnp.asarray(x))
    monkeypatch.setattr(samples, "_ON_HOST_BYTES", 1 << 10)
    (x,) = samples.drawn([jax.ShapeDtypeStruct((700, 300), jnp.float32)], Gpu())
    assert x.shape == (700, 300)
    assert 0.9 < float(x.std()) < 1.1


def test_the_free_memory_of_the_host_is_known():
    assert samples.free_bytes(DEVICE) > 1 << 20


def test_drawn_integers_stay_below():
    table, rows, number, other = samples.drawn([TABLE, jax.ShapeDtypeStruct((500,), jnp.int32), NUMBER, ROWS], DEVICE,
                                               [None, 17, 61, None])  # fmt: skip
    assert table.shape == (1000, 8)
    assert set(np.unique(rows)) == set(range(17))
    assert int(number) == 30
    assert 17 < int(jnp.max(other)) <= 1000


@pytest.mark.parametrize("rows", [500, 70_000])
def test_columns_of_indices_have_bounds_of_their_own(rows):
    (pairs,) = samples.drawn([jax.ShapeDtypeStruct((rows, 2), jnp.int32)], DEVICE, [(4, 61)])
    assert [int(column.max()) for column in pairs.T] == [3, 60]
    assert len({(int(a), int(b)) for a, b in np.asarray(pairs)}) > 200


def test_small_types_hold_what_is_drawn():
    (small,) = samples.drawn([jax.ShapeDtypeStruct((500,), jnp.int8)], DEVICE, [1000])
    assert 100 < int(jnp.max(small)) <= 127 and int(jnp.min(small)) >= 0
