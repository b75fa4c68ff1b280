"""On a Hopper GPU: kernels of clusters are as accurate as `jax.jit` of the same function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from tests.gpu.test_on_gpu import largest_error
from tests.gpu.test_warpgroups import is_hopper
from tests.pallas_backend.rows import ROWS, three_passes
from tests.pallas_backend.test_cluster_gpu import in_float64_but_integers

pytestmark = pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")


def check(function, arrays, **options):
    fused = pf.fuse(function, options=pf.FuseOptions(target="mosaic_cluster", **options))
    (kernel,) = fused.explain(*arrays).kernels
    assert kernel.target.name == "mosaic_cluster", kernel.declined
    ours, theirs = (jax.tree.leaves(f(*arrays)) for f in (fused, jax.jit(function)))
    with jax.default_device(jax.devices("cpu")[0]):
        exact = in_float64_but_integers(function, arrays)
    for mine, plain, reference in zip(ours, theirs, exact, strict=True):
        kept = np.ones(reference.shape, bool)
        if function is three_passes:  # its results jump: where one is nearly between two, either will do
            kept = np.abs(np.asarray(mine, np.float64) - reference) < 0.5
            assert kept.mean() > 0.9995
        ulp = float(jnp.finfo(mine.dtype).eps) * np.abs(reference).max()
        ours_off, theirs_off = (largest_error(np.where(kept, x, reference), reference) for x in (mine, plain))
        assert ours_off <= max(1.5 * theirs_off, 2 * ulp)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", ROWS)
def test_rows(name, dtype):
    check(ROWS[name].function, ROWS[name].arrays(12, 3 * 8192 + 200, dtype))


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("name", ["softmax", "layer norm", "three passes"])
def test_clusters_of_any_size(name, parts):
    check(ROWS[name].function, ROWS[name].arrays(12, 32000, "float16"), parts=parts, tiles=(("j", 2048),))


@pytest.mark.parametrize("columns", [16392, 32776, 50304, 151936])
def test_rows_of_any_length(columns):
    check(ROWS["softmax"].function, ROWS["softmax"].arrays(150, columns, "float16"))


def test_special_values():
    (x,) = ROWS["softmax"].arrays(6, 40000, "float16")
    x = x.at[0, 3].set(jnp.nan).at[1, 20000].set(jnp.inf).at[2].set(-jnp.inf)
    x = x.at[3, :25000].set(-jnp.inf).at[4, -1].set(jnp.nan)
    function = ROWS["softmax"].function
    np.testing.assert_allclose(pf.fuse(function, target="mosaic_cluster")(x), function(x), rtol=2e-3, atol=1e-7)


def test_rows_that_do_not_wait_for_each_other():
    """Many more clusters than run at a time, again and again."""
    (x,) = ROWS["softmax"].arrays(4096, 32768, "float16")
    fused = jax.jit(pf.fuse(ROWS["softmax"].function, target="mosaic_cluster", options=pf.FuseOptions(parts=4)))
    first = np.asarray(fused(x))
    for _ in range(20):
        assert np.array_equal(np.asarray(fused(x)), first)
