"""On a Hopper GPU: kernels for warpgroups are as accurate as `jax.jit` of the same function."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from benchmarks.cases import ATTENTION
from tests.gpu.test_on_gpu import largest_error
from tests.losses import FORMS, LOSSES
from tests.pallas_backend.variants import VARIANTS


def is_hopper() -> bool:
    device = jax.devices()[0]
    return device.platform == "gpu" and str(getattr(device, "compute_capability", "")) == "9.0"


pytestmark = pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")


def check(function, arrays, static=(), static_argnums=()):
    fused = pf.fuse(function, target="mosaic_gpu", static_argnums=static_argnums)
    plan = fused.explain(*arrays, *static)
    ours = jax.tree.leaves(fused(*arrays, *static))
    theirs = jax.tree.leaves(jax.jit(function, static_argnums=static_argnums)(*arrays, *static))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [np.asarray(a, np.float64 if jnp.issubdtype(a.dtype, jnp.floating) else None) for a in arrays]
        exact = [np.asarray(x) for x in jax.tree.leaves(function(*wide, *static))]
    for mine, plain, reference in zip(ours, theirs, exact, strict=True):
        ulp = float(jnp.finfo(mine.dtype).eps) * np.abs(reference).max()
        assert np.array_equal(np.isnan(mine), np.isnan(plain))
        assert largest_error(mine, reference) <= max(1.5 * largest_error(plain, reference), 2 * ulp)
    return plan


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, dtype):
    plan = check(VARIANTS[name].function, VARIANTS[name].arrays(dtype))
    (kernel,) = plan.kernels
    assert kernel.target.name == ("triton" if name == "few" else "mosaic_gpu"), kernel.declined


@pytest.mark.parametrize("length", [200, 1000, 1024])
@pytest.mark.parametrize("case", [pytest.param(c.small(), id=c.name) for c in ATTENTION])
def test_cases(case, length):
    arrays = case.arrays(length, jnp.dtype("bfloat16"), batch=1)
    plan = check(case.plain, arrays, case.static, case.static_argnums)
    assert [k.target.name for k in plan.kernels] == ["mosaic_gpu"], plan.kernels[0].declined


def loss_arguments(shapes, rows, dtype):
    *arrays, labels = (jax.random.normal(jax.random.key(n), s, jnp.dtype(dtype)) for n, s in enumerate((*shapes, rows)))
    arrays[1] *= 3 * shapes[0][-1] ** -0.5
    columns = next(n for n in shapes[1] if n != shapes[0][-1])
    return [*arrays, jnp.abs(labels * 1000).astype(jnp.int32) % columns]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1000, 1032, 8008), (4096, 4096, 8192), (200, 264, 30000)], ids=str)
@pytest.mark.parametrize("function", LOSSES, ids=lambda f: f.__name__)
def test_products_in_slices(function, shape, dtype):
    rows, features, columns = shape
    plan = check(function, loss_arguments(((rows, features), (features, columns)), (rows,), dtype))
    assert [k.target.name for k in plan.kernels] == ["mosaic_gpu"], plan.kernels[0].declined


@pytest.mark.parametrize("name", FORMS)
def test_other_forms_of_products_in_slices(name):
    function, shapes, rows = FORMS[name]
    plan = check(function, loss_arguments(shapes, rows, "bfloat16"))
    assert [k.target.name for k in plan.kernels] == ["mosaic_gpu"], plan.kernels[0].declined


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2.0**24), ("bfloat16", 2.0**80), ("float16", 2.0**12)])
@pytest.mark.parametrize("name", ["plain", "causal", "log sum"])
def test_rows_with_large_scores(name, dtype, size):
    """Some reach 2^28: what is not rounded before a difference would overflow. Every key is there twice."""
    variant = replace(VARIANTS[name], queries=3000, keys=1000, heads=(8, 8))
    q, k, v = variant.arrays(dtype)
    k = (k * (size if dtype == "float16" else 1.0)).at[1::2].set(k[::2] * (size if dtype == "float16" else 1.0))
    q = q.at[40:50].multiply(size).at[290].multiply(-size)
    function = pf.fuse(variant.function, target="mosaic_gpu")
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        exact = jax.tree.leaves(variant.function(*(np.asarray(a, np.float64) for a in (q, k, v))))
    for ours, reference in zip(jax.tree.leaves(function(q, k, v)), exact, strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float64), reference, atol=0.02, rtol=0.02)
