"""On a GPU: every case computed by the Triton target and by the default one is as accurate as `jax.jit` of the same function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from benchmarks.cases import all_cases

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


def largest_error(result, reference):
    return float(np.nanmax(np.abs(np.asarray(result, np.float64) - reference)))


@pytest.mark.parametrize(
    ("dtype", "target"),
    [("float32", "triton"), ("float16", "triton"), ("bfloat16", "triton"), ("float16", None), ("bfloat16", None)],
)
@pytest.mark.parametrize("length", [1000, 96, 61])
@pytest.mark.parametrize("case", [pytest.param(c.small(), id=c.name.replace(" ", "-")) for c in all_cases()])
def test_error_against_float64(case, length, dtype, target):
    arrays = case.arrays(length, jnp.dtype(dtype), batch=2)
    with jax.default_matmul_precision("highest"):
        fused = pf.fuse(case.plain, target=target, static_argnums=case.static_argnums)
        ours = jax.tree.leaves(fused(*arrays, *case.static))
        theirs = jax.tree.leaves(jax.jit(case.plain, static_argnums=case.static_argnums)(*arrays, *case.static))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [np.asarray(a, np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else np.asarray(a) for a in arrays]
        exact = [np.asarray(x) for x in jax.tree.leaves(case.plain(*wide, *case.static))]
    for mine, plain, reference in zip(ours, theirs, exact, strict=True):
        ulp = float(jnp.finfo(mine.dtype).eps) * np.abs(reference).max()
        assert np.array_equal(np.isnan(mine), np.isnan(plain))
        assert largest_error(mine, reference) <= max(1.5 * largest_error(plain, reference), 4 * ulp)


@pytest.mark.parametrize("kind", ["variance", "third"])
def test_moments_far_from_zero(kind):
    x = (1e4 + np.random.default_rng(0).standard_normal((4, 8192))).astype(np.float32)
    power = {"variance": 2, "third": 3}[kind]
    centred = x.astype(np.float64) - x.astype(np.float64).mean(-1, keepdims=True)

    def moment(x):
        return jnp.mean((x - jnp.mean(x, -1, keepdims=True)) ** power, -1)

    for tiles in ((), (("j", 512),)):
        fused = pf.fuse(moment, target="triton", options=pf.FuseOptions(tiles=tiles))
        assert largest_error(fused(x), (centred**power).mean(-1)) <= 1e-5
