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


@pytest.mark.parametrize("mode", ["clip", "fill"])
@pytest.mark.parametrize(
    ("size", "dtype"), [(1, "float16"), (8, "bfloat16"), (16, "bfloat16"), (16, "float32"), (96, "float16")]
)
def test_pages_of_a_cache(size, dtype, mode):
    """A page is read where it lies, by the table; entries out of range mean what `jnp` says."""
    random = np.random.default_rng(0)
    pages = -(-700 // size)
    pool = 2 * pages
    q = jnp.asarray(random.normal(size=(3, 2, 4, 64)), dtype)
    k, v = (jnp.asarray(random.normal(size=(pool, size, 2, 64)), dtype) for _ in range(2))
    table = jnp.asarray(
        random.integers(-3 if mode == "clip" else 0, pool + (3 if mode == "clip" else 0), (3, pages)), jnp.int32
    )
    length = jnp.array([1, 300, 700], jnp.int32)

    def decode(q, k, v, table, length):
        keys, values = (p.at[table].get(mode=mode).reshape(3, -1, 2, 64) for p in (k, v))
        scores = jnp.einsum("bhgd,bnhd->bhgn", q, keys, preferred_element_type=jnp.float32) / 8
        scores = jnp.where((jnp.arange(keys.shape[1]) < length[:, None])[:, None, None], scores, -jnp.inf)
        return jnp.einsum("bhgn,bnhd->bhgd", jax.nn.softmax(scores).astype(values.dtype), values)

    options = pf.FuseOptions(check=False, price=False)
    fused = pf.fuse(decode, target="triton", options=options)
    assert sum(len(k.lookups) for k in fused.explain(q, k, v, table, length).kernels) == 2
    with jax.default_matmul_precision("highest"):
        ours, theirs = (np.asarray(f(q, k, v, table, length), np.float64) for f in (fused, jax.jit(decode)))
    np.testing.assert_allclose(ours, theirs, atol=4 * float(jnp.finfo(dtype).eps) if dtype != "float32" else 1e-5)
