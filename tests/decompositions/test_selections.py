"""Parts of axes, and parts put together, as sums: equal to the operations that they stand for, on random programs."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallasfuse import _compat
from pallasfuse.decompositions.selections import Piece, View, without_selections

_WRITTEN = {
    "slice",
    "concatenate",
    "rev",
    "split",
    "stack",
    "unstack",
    "cumsum",
    "cummax",
    "cummin",
    "argmax",
    "argmin",
    "reduce_prod",
}


def one_step(rng, values):
    """A random operation on a random value; None where it does not fit."""
    x = rng.choice(values)
    axis = rng.randrange(x.ndim)
    n, is_bool = x.shape[axis], x.dtype == jnp.bool_
    match rng.choice(
        ("slice", "join", "rev", "pad", "split", "stack", "unstack", "running", "extreme", "product", "map")
    ):
        case "slice":
            start = rng.randrange(n)
            return lax.slice_in_dim(x, start, rng.randint(start + 1, n), rng.randint(1, 3), axis)
        case "join":
            fits = [y for y in values if y.dtype == x.dtype and y.ndim == x.ndim]
            fits = [
                y
                for y in fits
                if all(a == b for d, (a, b) in enumerate(zip(y.shape, x.shape, strict=True)) if d != axis)
            ]
            return jnp.concatenate([rng.choice(fits) for _ in range(rng.randint(1, 3))], axis)
        case "rev":
            return jnp.flip(x, axis)
        case "pad":
            if rng.random() < 0.5:
                ends = [(rng.randint(0, 2), rng.randint(0, 2), 0) if d == axis else (0, 0, 0) for d in range(x.ndim)]
            else:
                ends = [(rng.randint(-1, 2), rng.randint(0, 2), rng.randint(0, 2)) for d in range(x.ndim)]
            return lax.pad(x, jnp.asarray(1, x.dtype), ends)
        case "split" if n > 1:
            return lax.split(x, (1, n - 1), axis)[rng.randrange(2)]
        case "stack":
            return jnp.stack([x, x[::-1]], axis)
        case "unstack" if x.ndim > 1:
            return jnp.unstack(x, axis=axis)[rng.randrange(n)]
        case "product" if not is_bool and n <= 8:
            return jnp.prod(x, axis, dtype=x.dtype)
        case "running" if not is_bool:
            return rng.choice((lax.cumsum, lax.cummax, lax.cummin))(x, axis, reverse=rng.random() < 0.5)
        case "extreme" if not is_bool and x.ndim > 1:
            return rng.choice((jnp.argmax, jnp.argmin))(x, axis)
        case "map" if not is_bool:
            return x * 2 + 1
    return None


@pytest.mark.sampled(18, cover=())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(60))
def test_random_programs_compute_the_same(seed, dtype):
    def program(x, y):
        rng, values = random.Random(seed), [x, y, x > 0]
        for _ in range(rng.randint(2, 7)):
            made = one_step(rng, values)
            values += [] if made is None or made.size > 500 else [made]
        return values[3:]

    own = np.random.default_rng(seed)
    args = jnp.asarray(own.normal(size=(3, 4)), dtype), jnp.asarray(own.integers(0, 5, size=(3, 4)))
    jaxpr = jax.make_jaxpr(program)(*args)
    written = without_selections(jaxpr)
    assert not {e.primitive.name for e in written.eqns} & _WRITTEN
    for got, want in zip(_compat.eval_jaxpr(written, written.consts, *args), program(*args), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        close = 1e-6 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(
            np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=close, atol=10 * close
        )


def test_running_extremes_of_infinite_numbers_in_half_precision():
    x = jnp.full((2, 3), -jnp.inf, jnp.bfloat16)
    written = without_selections(jax.make_jaxpr(lambda x: jax.lax.cummax(x, 1))(x))
    np.testing.assert_array_equal(np.asarray(_compat.eval_jaxpr(written, written.consts, x)[0], np.float32), -np.inf)


def test_extremes_of_what_is_no_number_are_where_jax_finds_them():
    x = jnp.asarray([[1.0, np.nan, 3.0, np.nan], [2.0, 5.0, 5.0, 1.0], [-np.inf] * 4])
    for function in (jnp.argmax, jnp.argmin):
        written = without_selections(jax.make_jaxpr(lambda x, f=function: f(x, 1))(x))
        (got,) = _compat.eval_jaxpr(written, written.consts, x)
        np.testing.assert_array_equal(got, function(x, 1))


def test_infinite_neighbours_do_not_leak():
    x = jnp.asarray([1.0, np.inf, np.nan, -np.inf])
    written = without_selections(jax.make_jaxpr(lambda x: jnp.concatenate([x[:1], x[3:]]))(x))
    np.testing.assert_array_equal(_compat.eval_jaxpr(written, written.consts, x)[0], [1.0, -np.inf])


def test_a_shift_is_one_sum():
    jaxpr = jax.make_jaxpr(lambda x: jnp.concatenate([jnp.zeros((5, 1)), x[:, :-1]], 1))(jnp.zeros((5, 7)))
    written = without_selections(jaxpr)
    assert [e.primitive.name for e in written.eqns].count("reduce_sum") == 1


def test_parts_of_a_view_are_those_of_its_pieces():
    view = View(0, (Piece("x", 3, 0), Piece("y", 4, 2, 2)))
    assert view.part(1, 3, 2) == View(0, (Piece("x", 1, 1, 2), Piece("y", 2, 2, 4)))
    assert view.backwards() == View(0, (Piece("y", 4, 8, -2), Piece("x", 3, 2, -1)))
