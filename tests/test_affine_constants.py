"""Constant arrays of positions become the operations that compute them; other constants stay data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.affine_constants import as_operations
from pallasfuse.options import FuseOptions

ARRAYS = {
    "arange": np.arange(12, dtype=np.int32),
    "from the end": np.arange(11, -1, -1, dtype=np.int32),
    "column": np.arange(5, 17, dtype=np.int32)[:, None],
    "differences": np.arange(6, dtype=np.int32)[:, None] - np.arange(9, dtype=np.int32)[None, :],
    "strided": 3 * np.arange(7, dtype=np.int32) + 2,
    "wrapping": np.asarray([0, -(2**31), 0], np.int32),
    "two elements": np.asarray([4, -3], np.int32),
    "on a device": jnp.arange(8),
}
OTHERS = {
    "squares": np.arange(6, dtype=np.int32) ** 2,
    "one wrong": np.asarray([0, 1, 2, 3, 5], np.int32),
    "product": np.outer(np.arange(4), np.arange(4)).astype(np.int32),
    "constant": np.full(5, 3, np.int32),
    "scalar": np.asarray(3, np.int32),
    "empty": np.zeros(0, np.int32),
    "floats": np.arange(6, dtype=np.float32),
    "bytes": np.arange(6, dtype=np.int8),
    "far apart": np.asarray([-2_000_000_000, 2_000_000_000, 5], np.int32),
    "wide without x64": np.arange(5, dtype=np.int64),
    "many": np.arange((1 << 20) + 1, dtype=np.int32),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_positions_are_computed(name):
    operations = as_operations(ARRAYS[name])
    (result,) = jax.core.eval_jaxpr(operations, operations.consts)
    np.testing.assert_array_equal(result, ARRAYS[name])
    assert not operations.consts and result.dtype == ARRAYS[name].dtype
    assert as_operations(np.array(ARRAYS[name])) is operations


@pytest.mark.parametrize("name", OTHERS)
def test_other_constants_are_data(name):
    assert as_operations(OTHERS[name]) is None


def test_wide_integers_where_they_are_enabled():
    assert as_operations(np.arange(7, dtype=np.int32)).outvars[0].aval.dtype == np.int32
    with jax.enable_x64(True):
        assert as_operations(np.arange(7, dtype=np.int64)).outvars[0].aval.dtype == np.int64


def test_a_window_of_the_library_bounds_its_loop():
    """Its positions are NumPy's, and so constants of the jaxpr."""

    def window(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, local_window_size=5)

    arrays = [np.random.default_rng(n).normal(size=(1, 64, 2, 8)).astype("float32") for n in range(3)]
    fused = pf.fuse(window, target="xla", options=FuseOptions(price=False, check=False))
    (kernel,) = fused.explain(*arrays).kernels
    rolled, rows = kernel.schedule.rolled.name, max(kernel.group.parallel, key=lambda a: a.extent).name
    small = pf.fuse(window, target="xla", options=FuseOptions(tiles=((rolled, 8), (rows, 8))))
    assert small.explain(*arrays).kernels[0].visited_share < 0.6
    np.testing.assert_allclose(small(*arrays), jax.jit(window)(*arrays), rtol=2e-5, atol=2e-6)
    assert pf.verify(small, *arrays, delta=1e-4).equivalent


def test_constants_that_are_read_elsewhere_keep_their_values():
    order = np.arange(9, -1, -1, dtype=np.int32)

    def picked(x):
        return x[order] + jax.nn.softmax(x * order, -1), order

    x = np.random.default_rng(0).normal(size=10).astype("float32")
    for have, want in zip(pf.fuse(picked)(x), picked(x), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-6)
