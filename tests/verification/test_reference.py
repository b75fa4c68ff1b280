"""The float64 reference of a jaxpr."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallasfuse import _compat
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.verification.reference import float64_results, largest_bytes, noise, sensitivity

pytestmark = pytest.mark.any_jax

X = np.random.default_rng(0).normal(size=(4, 9)).astype("float32")


def results(function, *arrays):
    jaxpr = convert(jax.make_jaxpr(function)(*arrays)).jaxpr
    return float64_results(jaxpr, [*jaxpr.consts, *arrays])


def softmax64(x):
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_are_those_of_float64(dtype):
    x = jnp.asarray(X, dtype)
    (got,) = results(lambda a: jax.nn.softmax(a, -1), x)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, softmax64(np.asarray(x, np.float64)), rtol=1e-14)


def test_casts_round_nothing():
    def function(x):
        y = x.astype(jnp.float16).astype(jnp.float32)
        return jnp.einsum("ij,kj->ik", y, y, preferred_element_type=jnp.float32)

    wide = X.astype(np.float64)
    np.testing.assert_allclose(results(function, X)[0], wide @ wide.T, rtol=1e-13)


def test_integers_booleans_and_positions_keep_their_types():
    def function(x, n):
        return jnp.argmax(x, -1), x > 0, n * 2, jnp.where(jnp.arange(9) < 4, x, 0.5)

    n = np.arange(3, dtype=np.int32)
    which, positive, doubled, chosen = results(function, X, n)
    np.testing.assert_array_equal(which, X.argmax(-1))
    assert positive.dtype == bool
    np.testing.assert_array_equal(doubled, 2 * n)
    np.testing.assert_allclose(chosen[:, :4], X[:, :4])


def test_infinities_and_nan():
    (got,) = results(lambda x: jnp.log(x) / x, np.array([0.0, -1.0, np.inf], np.float32))
    assert np.isneginf(got[0])
    assert np.isnan(got[1])
    assert np.isnan(got[2])


def test_the_default_precision_stays_as_it_was():
    results(lambda x: x + 1, X)
    assert not jax.config.jax_enable_x64
    assert jnp.ones(2).dtype == jnp.float32


def test_the_largest_value():
    arguments = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    jaxpr = convert(jax.make_jaxpr(lambda q: jnp.sum(q @ q.T, -1))(arguments)).jaxpr
    assert largest_bytes(jaxpr) == 8 * 64 * 64
    nothing = convert(jax.make_jaxpr(lambda q: q)(arguments)).jaxpr
    assert largest_bytes(nothing) == 0
    assert _compat.shape_of(jaxpr.invars[0]) == (64, 32)


def summed_in_a_loop(x):
    def step(carry, row):
        return carry + jnp.exp(row), carry.max()

    total, seen = jax.lax.scan(step, jnp.zeros(9), x)
    return total / 3.75, seen


def one_of_two(x):
    return jax.lax.cond(x[0, 0] > 0, lambda y: y * 0.125, lambda y: jnp.exp(y) / 3, x).sum(-1)


def solved_in_a_loop(x):
    system = x[:2, :2] @ x[:2, :2].T + 2.5 * jnp.eye(2, dtype=x.dtype)
    return jax.lax.scan(lambda y, row: (jnp.linalg.solve(system, y) / 3 + row[:2], y), x[0, :2], x)


def traced(x):
    return jnp.trace(x @ x.T) + jnp.zeros(3).at[jnp.array([0, 1, 1, 2])].add(x[:, 0])


def with_noise(x):
    return x * jax.random.uniform(jax.random.key(0), x.shape, jnp.float32)


@pytest.mark.parametrize("function", [summed_in_a_loop, one_of_two, solved_in_a_loop, traced])
def test_bodies_of_loops_and_branches_are_wide(function):
    with jax.enable_x64(True):
        expected = jax.tree.leaves(function(X.astype(np.float64)))
    for got, want in zip(results(function, X), expected, strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_random_bits_stay_what_they_are():
    (got,) = results(with_noise, X)
    np.testing.assert_allclose(got, with_noise(X), rtol=1e-6)


def moved(function, *arrays):
    jaxpr = convert(jax.make_jaxpr(function)(*arrays)).jaxpr
    arguments = [*jaxpr.consts, *arrays]
    return sensitivity(jaxpr, arguments, float64_results(jaxpr, arguments), 0)


def test_only_what_rounding_turns_over_is_sensitive():
    x = np.array([0.3, 1.0, 2.7, 4.0], np.float32)  # two of them on a step
    (floors,) = moved(jnp.floor, x)
    assert floors.tolist() == [0, 1, 0, 1]
    (integers,) = moved(lambda x: jnp.floor(x).astype(jnp.int32), x)
    assert integers.tolist() == [0, np.inf, 0, np.inf]
    (infinite,) = moved(lambda x: 1 / jnp.maximum(x - 1, 0), x)
    assert np.isinf(infinite).tolist() == [False, True, False, False]
    smooth = moved(jnp.exp, x)[0] / np.exp(x)
    assert (smooth > 0).all() and (smooth < 1e-5).all()


def test_the_coarsest_type_of_the_program_is_what_is_rounded_to():
    x = np.array([0.3, 2.7], np.float32)
    fine, coarse = moved(lambda x: x * 2, x)[0], moved(lambda x: (x.astype(jnp.bfloat16) * 2).astype(jnp.float32), x)[0]
    assert (coarse > 1e3 * fine).all()


def bias_before_a_norm(b, x):
    """The gradient of a bias that a norm takes off again: zero, whatever the arguments are."""

    def loss(b):
        y = x + b
        y = y - y.mean(0)
        return (jnp.tanh(y * lax.rsqrt((y * y).mean(0) + 1e-5)) ** 3).sum()

    return jax.grad(loss)(b)


def test_what_is_zero_of_necessity_moves_by_the_roundings_of_its_terms():
    draw = np.random.default_rng(0)
    b, x = draw.normal(size=8).astype(np.float32), draw.normal(size=(64, 8)).astype(np.float32)
    jaxpr = convert(jax.make_jaxpr(bias_before_a_norm)(b, x)).jaxpr
    given = [*jaxpr.consts, b, x]
    exact = float64_results(jaxpr, given)
    (by_arguments,), (by_roundings,) = (f(jaxpr, given, exact, 0) for f in (sensitivity, noise))
    got = np.abs(np.asarray(jax.jit(bias_before_a_norm)(b, x), np.float64))
    assert np.abs(exact[0]).max() < 1e-12
    assert 1e-8 < got.max() < 1e-4
    assert by_arguments.max() < 1e-12
    assert got.max() / 30 < by_roundings.max() < 30 * got.max()


def test_roundings_move_other_results_as_little_as_they_do():
    x = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    jaxpr = convert(jax.make_jaxpr(lambda x: (x.T, jnp.maximum(x, 0.0), jax.nn.softmax(x, -1)))(x)).jaxpr
    given = [*jaxpr.consts, x]
    exact = float64_results(jaxpr, given)
    turned, clipped, shares = noise(jaxpr, given, exact, 0)
    assert not turned.any() and not clipped.any()
    assert 0 < (shares / exact[2]).max() < 2e-6
