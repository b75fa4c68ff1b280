"""Updates of places that are numbers in the program, as choices by position, against XLA's own updates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallasfuse import _compat
from pallasfuse.decompositions.known_places import with_choices_at_known_places
from pallasfuse.jaxpr_frontend import flatten
from tests.running_loops import scans_of, with_kernels


def names(jaxpr):
    return [e.primitive.name for e in jaxpr.eqns]


def updated(function, *arguments):
    jaxpr = jax.make_jaxpr(function)(*arguments)
    found = with_choices_at_known_places(jaxpr)
    return found, _compat.eval_jaxpr(found, found.consts, *arguments)


X = np.random.default_rng(0).standard_normal((6, 5)).astype("float32")


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.at[0].set(2.0),
        lambda x: x.at[-1].add(x[0]),
        lambda x: x.at[:, -2].set(x[:, 0]),
        lambda x: x.at[1:-1].set(x[2:]),
        lambda x: x.at[1:-1, 2:4].add(x[2:, 1:3]),
        lambda x: x.at[2, 3].add(1.0),
        lambda x: x.at[2, 3].multiply(7.0),
        lambda x: x.at[1].subtract(x[2]),
        lambda x: x.at[None, 1].add(2.0),
        lambda x: x.at[2:4].max(0.0),
        lambda x: x.at[:2].min(0.0),
        lambda x: x.at[:].set(x + 1),
        lambda x: x.at[9].set(1.0),  # outside
        lambda x: x.at[9].set(1.0, mode="clip"),
        jax.vmap(lambda row: row.at[0].add(1.0)),
        lambda x: (x > 0).at[1].set(False),
        lambda x: x.astype(jnp.bfloat16).at[2].set(jnp.nan),
        lambda x: x.at[1].set(jnp.inf).at[1, 2].add(-jnp.inf),
    ],
)
def test_updates_of_known_places_are_choices(function):
    jaxpr, (found,) = updated(function, X)
    assert not any(name.startswith("scatter") for name in names(jaxpr))
    wanted = function(jnp.asarray(X))
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(np.asarray(found, "float32"), np.asarray(wanted, "float32"))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.at[jnp.argmax(x[:, 0])].set(1.0),  # depends on data
        lambda x: x.at[jnp.asarray([0, 2])].set(1.0),  # two places
        lambda x: x.at[1].apply(jnp.sin),  # a function of what stands there
        lambda x: lax.scatter_add(
            x, jnp.zeros((3, 0), "int32"), jnp.ones((3, 6, 5)), lax.ScatterDimensionNumbers((1, 2), (), ())
        ),  # three at once
        lambda x: lax.fori_loop(0, 3, lambda n, y: y.at[n].set(0.0), x),
    ],
)
def test_other_updates_stay(function):
    jaxpr = jax.make_jaxpr(function)(X)
    assert with_choices_at_known_places(jaxpr) is jaxpr


def test_places_are_known_without_a_device():
    jaxpr = jax.make_jaxpr(lambda x: x.at[1:3, 2].add(1.0))(X)
    with jax.transfer_guard("disallow"):
        assert "scatter-add" not in names(with_choices_at_known_places(jaxpr))


def test_other_loops_keep_functions_of_what_stands_there():
    """The kernel of a loop must not take the placeholder of such an update for what comes."""

    def trip(state, row):
        state = state.at[0].apply(lambda y: y * 0.5 + 1)
        return state + row, jnp.sum(state, 0)

    args = jnp.ones((7, 16)), jnp.ones((9, 16))
    jaxpr, loops = scans_of(lambda *a: lax.scan(trip, *a), *args)
    results, _ = with_kernels(jaxpr, loops, *args)
    for got, want in zip(results, jax.tree.leaves(lax.scan(trip, *args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


DIAGONALS = {
    "the last dimensions": lambda x: jnp.diagonal(x, axis1=-2, axis2=-1),
    "the first and the last": lambda x: jnp.diagonal(x, axis1=0, axis2=2),
    "a trace": lambda x: jnp.trace(x, axis1=1, axis2=2),
    "of whole numbers": lambda x: jnp.diagonal(x.astype(jnp.int32), axis1=1, axis2=2),
    "of all three": lambda x: x[jnp.arange(3), jnp.arange(3), jnp.arange(3)],
}


@pytest.mark.parametrize("case", DIAGONALS)
def test_diagonals_are_sums(case):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3, 3)) * 9, jnp.float32)
    jaxpr = jax.make_jaxpr(DIAGONALS[case])(x)
    made = with_choices_at_known_places(jaxpr)
    assert "gather" not in {e.primitive.name for e in made.eqns}
    (got,) = _compat.eval_jaxpr(made, made.consts, x)
    want = DIAGONALS[case](x)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("function", [
    lambda x: jnp.diagonal(x, 1, 1, 2), lambda x: jnp.diagonal(x[:, :, :2], axis1=1, axis2=2),
    lambda x: x[:, jnp.asarray([2, 1, 0]), jnp.asarray([0, 1, 2])], lambda x: jnp.diagonal(x > 0, axis1=1, axis2=2),
])  # fmt: skip
def test_other_gathers_stay(function):
    jaxpr = jax.make_jaxpr(function)(jnp.zeros((3, 3, 3)))
    assert "gather" in {e.primitive.name for e in flatten(with_choices_at_known_places(jaxpr)).eqns}


def test_a_place_may_be_chosen_from_several_numbers():
    numbers = lax.ScatterDimensionNumbers((0,), (0,), (0,))

    def changed(x):
        place = lax.select_n(
            lax.full((1,), 2, jnp.int32), *(lax.full((1,), n, jnp.int32) for n in (0, 1, 2, *[5] * 70))
        )
        return lax.scatter(x, place, jnp.full(5, 9.0), numbers, mode="clip")

    found, (got,) = updated(changed, X)
    assert "scatter" not in names(found)
    np.testing.assert_array_equal(got, changed(X))
