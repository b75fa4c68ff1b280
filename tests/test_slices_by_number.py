"""Kernels in the body of a scan that read their element of an array where it is, by the number of the trip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse import bodies
from pallasfuse.options import FuseOptions

LAYERS, ROWS, WIDTH = 5, 8, 32


def layer(x, p):
    """A norm with a gain of its own before a product with weights of its own."""
    y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * p["gain"]
    return x + jnp.tanh(y @ p["weights"]), y.sum(-1)


def scanned(x, p, **how):
    return lax.scan(layer, x, p, **how)


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


X = drawn(ROWS, WIDTH)
P = {"gain": drawn(LAYERS, WIDTH, seed=1), "weights": drawn(LAYERS, WIDTH, WIDTH, seed=2) * 0.3}


def fused(function, **options):
    return pf.fuse(function, options=FuseOptions(target="interpret", check=False, price=False, **options))


def taken(plan):
    """The arrays that kernels in bodies take their elements from."""
    kernels = [k for b in plan.bodies for k in b.plan.kernels]
    return {x.source.name for k in kernels for x in k.lookups.values() if x.is_slice}


def close(have, want):
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_a_kernel_takes_its_slices_by_itself():
    function = fused(scanned)
    plan = function.explain(X, P)
    assert taken(plan) == {"p_gain_1", "p_weights_2"} and all(
        k.takes_slices for b in plan.bodies for k in b.plan.kernels
    )
    close(function(X, P), scanned(X, P))
    close(jax.vmap(function, (0, None))(np.stack([X, 2 * X]), P), jax.vmap(scanned, (0, None))(np.stack([X, 2 * X]), P))


def test_what_is_read_by_number_is_proved():
    report = pf.verify(fused(scanned), X, P, delta=1e-4)
    assert report.equivalent, str(report)
    assert any("lookups of" in stage for stage in report.proof.stages)


@pytest.mark.parametrize("how", [{"reverse": True}, {"unroll": 5}], ids=str)
def test_where_xla_would_have_to_find_the_number_slices_stay(how):
    function = fused(lambda x, p: scanned(x, p, **how))
    plan = function.explain(X, P)
    assert plan.bodies and not taken(plan)
    close(function(X, P), scanned(X, P, **how))


def test_elements_that_are_no_arrays_stay_slices():
    """The scale of each trip is a number, and so are the keys; what is read by number stands beside them."""

    def step(x, p):
        return jax.nn.softmax(x * p["scale"] + p["gain"], -1), None

    def steps(x, p):
        return lax.scan(step, x, p)[0]

    p = {"gain": P["gain"], "scale": drawn(LAYERS, seed=3)}
    function = fused(steps)
    assert taken(function.explain(X, p)) == {"p_gain_1"}
    close(function(X, p), steps(X, p))


def test_a_body_that_cannot_be_traced_again_keeps_its_slices(monkeypatch):
    monkeypatch.setattr(bodies, "_element", lambda *_: 1 / 0)
    function = fused(scanned)
    plan = function.explain(X, P)
    assert plan.bodies and not taken(plan)
    close(function(X, P), scanned(X, P))


def test_a_target_whose_kernels_xla_looks_into_reads_slices():
    plan = pf.fuse(scanned, options=FuseOptions(target="xla", check=False, price=False)).explain(X, P)
    assert plan.bodies and not taken(plan)
