"""Products by algorithms that the CPU does not have: a library's second choice is lost in its jaxpr, and found again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.lax import DotAlgorithmPreset

import pallasfuse as pf
from pallasfuse.algorithms import for_platform
from pallasfuse.options import FuseOptions

CHECK_OFF = FuseOptions(check=False)
EVERYTHING = FuseOptions(check=False, price=False)
RNG = np.random.default_rng(0)
QKV = tuple(jnp.asarray(RNG.standard_normal((1, 24, 2, 8)), jnp.float16) for _ in range(3))


def product(algorithm, x, y):
    return lax.dot(x, y, precision=algorithm, preferred_element_type=jnp.float32)


def stacked(q, k, v):
    return lax.scan(lambda x, _: (jax.nn.dot_product_attention(x, k, v), None), q, length=3)[0]


@pytest.mark.parametrize("options", [CHECK_OFF, EVERYTHING], ids=["by price", "everything"])
@pytest.mark.parametrize("attention", [jax.nn.dot_product_attention, stacked])
def test_float16_attention_of_jax_runs_on_a_cpu(options, attention):
    exact = [np.asarray(x, np.float64) for x in QKV]
    reference = exact[0]
    for _ in range(3 if attention is stacked else 1):
        scores = np.einsum("bihd,bjhd->bhij", reference, exact[1]) / np.sqrt(8)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        reference = np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), exact[2])
    np.testing.assert_allclose(pf.fuse(attention, options=options)(*QKV), reference, atol=4e-3)


@pytest.mark.sampled(2, cover=())
@pytest.mark.filterwarnings("ignore:.*differentiating a fused function")
@pytest.mark.parametrize("outside", [True, False], ids=["gradient of the fused", "fused gradient"])
def test_its_gradient_is_the_plain_one(outside):
    def loss(q, k, v):
        return jax.nn.dot_product_attention(q, k, v).astype(jnp.float32).sum()

    fused = jax.grad(pf.fuse(loss, options=CHECK_OFF)) if outside else pf.fuse(jax.grad(loss), options=CHECK_OFF)
    np.testing.assert_allclose(fused(*QKV), jax.grad(loss)(*QKV), atol=2e-3)  # by jax.grad, operation by operation


def test_other_algorithms_and_platforms_are_left_alone():
    x = jnp.ones((4, 4), jnp.float16)
    half = jax.make_jaxpr(lambda x, y: product(DotAlgorithmPreset.F16_F16_F32, x, y))(x, x)
    assert for_platform(half, "cuda") is half
    assert for_platform(half, "cpu") is not half
    single = jax.make_jaxpr(lambda x, y: product(DotAlgorithmPreset.TF32_TF32_F32, x, y))(*2 * [x.astype(jnp.float32)])
    assert for_platform(single, "cpu") is single
    default = jax.make_jaxpr(jax.jit(jnp.dot))(x, x)
    assert for_platform(default, "cpu") is default


def test_an_algorithm_that_is_missing_is_refused_as_by_jax():
    x = jnp.ones((4, 4))
    with pytest.raises(ValueError, match="not supported by dot_general on CPU"):
        pf.fuse(lambda x: product(DotAlgorithmPreset.TF32_TF32_F32, x, x), options=CHECK_OFF)(x)
