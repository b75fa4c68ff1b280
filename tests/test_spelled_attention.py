"""However queries and keys are made, attention is one kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.at_hand import target_for
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan
from pallasfuse.targets import default_for
from tests.spelled_attention import ROTATIONS, attend, clipped, normed, scaled, with_rotations

H100 = default_for("cuda", frozenset({"9.0"}))
PRICED = FuseOptions(check=False, price=True)


def core(function, target, shape, dtype):
    """The kernel of a function's plan that saves most."""
    structs = [jax.ShapeDtypeStruct(shape, dtype)] * 3
    plan = make_plan(jax.make_jaxpr(function)(*structs), target, PRICED)
    assert plan.kernels, [f.reason for f in plan.fallbacks]
    return max(plan.kernels, key=lambda k: k.replaced.us - k.price.us)


@functools.cache
def on_a_gpu(function):
    return core(function, H100, (2, 2048, 16, 128), jnp.bfloat16)


@pytest.mark.parametrize("before", [None, normed], ids=["as they are", "normed"])
@pytest.mark.parametrize("rotate", ROTATIONS)
@pytest.mark.sampled(9, cover=("before",))
def test_rotated_queries_and_keys_on_a_gpu(rotate, before):
    kernel, plain = on_a_gpu(with_rotations(rotate, before)), on_a_gpu(attend)
    assert len(kernel.group.folds) == 3
    assert kernel.price.us < 1.25 * plain.price.us


@pytest.mark.parametrize("rotate", ROTATIONS)
@pytest.mark.sampled(3, cover=())
def test_rotated_queries_and_keys_on_a_cpu(rotate):
    kernel = core(with_rotations(rotate, normed), target_for("cpu", PRICED), (1, 1024, 8, 64), jnp.float32)
    assert len(kernel.group.folds) == 3


@pytest.mark.parametrize("change", [clipped, scaled, lambda x: x.astype(jnp.float32).astype(x.dtype) * 2])
def test_what_is_computed_of_each_operand_is_computed_once(change):
    kernel = on_a_gpu(lambda q, k, v: attend(change(q), change(k), change(v)))
    assert len(kernel.group.folds) == 3
    assert kernel.price.us < 1.25 * on_a_gpu(attend).price.us


@pytest.mark.parametrize("before", [None, normed], ids=["as they are", "normed"])
@pytest.mark.parametrize("rotate", ROTATIONS)
@pytest.mark.sampled(2, cover=("before",))
def test_values(rotate, before):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 64, 2, 16)), jnp.float32) for _ in range(3))
    function = with_rotations(rotate, before)
    fused = pf.fuse(function, options=FuseOptions(check=False, price=False))
    np.testing.assert_allclose(jax.jit(fused)(q, k, v), function(q, k, v), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rotate", ROTATIONS)
@pytest.mark.sampled(9, cover=())
def test_proof(rotate):
    structs = [jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)] * 3
    fused = pf.fuse(with_rotations(rotate, normed), options=FuseOptions(check=False, price=False))
    report = pf.verify(fused, *structs, delta=1e-4)
    assert report.counterexample is None, report
    assert report.plan.kernels


def test_sums_without_a_softmax_find_what_stays_whole():
    """Scores that pass a function of each of them: the sum over keys is one fold, over rows of queries."""

    def attention(q, k, v):
        scores = jax.nn.silu(jnp.einsum("bqhd,bkhd->bhqk", q, k)) / q.shape[1]
        return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, 0), v)

    kernel = on_a_gpu(attention)
    assert len(kernel.group.folds) == len(kernel.group.inner) == 1
