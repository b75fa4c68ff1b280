"""Fused functions that run as their plain ones, or with other options, in a context; JAX's caches keep the two apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.jaxpr_frontend import fused_calls
from pallasfuse.overrides import is_plain, options_here, overridden
from pallasfuse.verification.reference import float64_function, float64_results

X = np.random.default_rng(0).normal(size=(4, 48)).astype("float32")


@pf.fuse(options=pf.FuseOptions(target="xla", price=True))
def weights(x):
    return jax.nn.softmax(x, -1)


@jax.jit
def model(x):
    return weights(x) + 1


def calls_of(function):
    return list(fused_calls(jax.make_jaxpr(function)(X)))


@pytest.mark.parametrize("function", [weights, model, lambda x: jax.lax.map(weights, x)])
def test_plain_inside_and_fused_outside(function):
    assert calls_of(function)
    with overridden("plain"):
        assert is_plain()
        assert not calls_of(function)
        plain = function(X)
    assert not is_plain()
    assert calls_of(function)
    np.testing.assert_allclose(function(X), plain, rtol=1e-5)


def test_options_inside():
    own = weights.trace(X).call.options
    assert options_here(own) is own
    other = pf.FuseOptions(target="interpret")
    for override, expected in (("every kernel", (False, False)), (other, (other.price, None)), (None, (True, None))):
        with overridden(override):
            (call,) = calls_of(model)
            assert (call.options.price, call.options.check) == expected
            assert call.options.target == ("interpret" if override is other else "xla")
            assert options_here(own) == call.options


def test_the_leaves_of_a_call_are_replaced():
    @pf.fuse(static_argnums=1, static_argnames="scale")
    def function(tree, axis, x, *, scale, shift):
        return jax.nn.softmax(scale * tree["a"] + tree["b"] + x, axis) + shift

    given = ({"a": X, "b": X + 1}, -1, X + 2), {"scale": 2.0, "shift": jnp.float32(3)}
    leaves = function.leaves(*given)
    assert len(leaves) == 4
    np.testing.assert_array_equal(function.with_leaves(*given, leaves), function(*given[0], **given[1]))
    changed = function.with_leaves(*given, [x + n for n, x in enumerate(leaves)])
    expected = function({"a": X, "b": X + 2}, -1, X + 4, scale=2.0, shift=jnp.float32(6))
    np.testing.assert_array_equal(changed, expected)


def test_one_compilation_in_float64():
    jaxpr = jax.make_jaxpr(lambda x: jnp.sum(x**2, -1))(X)
    run = float64_function(jaxpr)
    for x in (X, 2 * X):
        (got,), (want,) = run([x]), float64_results(jaxpr, [x])
        assert got.dtype == np.float64
        np.testing.assert_array_equal(got, want)
        np.testing.assert_allclose(got, (x.astype(np.float64) ** 2).sum(-1), rtol=1e-12)
