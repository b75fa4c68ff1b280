"""Elements at places that a program computes, as sums and choices over all positions: equal to gathers, scatters and slices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pallasfuse import _compat
from pallasfuse.decompositions.computed_places import RULES
from pallasfuse.decompositions.selections import without_selections
from pallasfuse.jaxpr_frontend import flatten

ROWS = (jnp.arange(24.0).reshape(4, 6) + 0.5).at[3, 1].set(jnp.nan).at[0, 4].set(-jnp.inf)
CLOUDS = jnp.stack([ROWS - 9, 3 - ROWS[::-1]])
AT, EACH = jnp.int32(2), jnp.asarray([1, 3], jnp.int32)


def written(function, *args):
    """Returns which operations with computed places are left of a program that is written without, and what it gives."""
    jaxpr = jax.make_jaxpr(function)(*args)
    found = without_selections(jaxpr)
    left = {e.primitive.name for e in flatten(found).eqns} & RULES.keys()
    return left, _compat.eval_jaxpr(found, found.consts, *args)


ONE = {
    "a row": lambda x, k: x[k],
    "a column": lambda x, k: x[:, k],
    "several rows": lambda x, k: x[jnp.stack([k, k - 1, k + 1])],
    "several columns beyond the end": lambda x, k: x.at[:, jnp.stack([k, 9 * k, k - 2, k + 4])].get(mode="fill"),
    "several elements": lambda x, k: x[jnp.stack([k, k - 1]), jnp.stack([k + 1, k])],
    "rows in another order": lambda x, k: jnp.take_along_axis(x, jnp.argsort(-x, axis=0), axis=0),
    "an element": lambda x, k: x[k, k + 1],
    "from the end": lambda x, k: x[k - 5],
    "the nearest": lambda x, k: jnp.take(x, 9 * k - 3, axis=0, mode="clip"),
    "beyond the end": lambda x, k: jnp.take(x, 9 * k, axis=0, mode="fill"),
    "beyond the end, with a number": lambda x, k: jnp.take(x, 9 * k, axis=1, mode="fill", fill_value=3.0),
    "whole numbers beyond the end": lambda x, k: x.astype(jnp.int32).at[9 * k].get(mode="fill"),
    "conditions": lambda x, k: (x > 7)[k],
    "a slice": lambda x, k: lax.dynamic_slice(x, (k * 3, 1), (1, 6)),
    "a slice before the first": lambda x, k: lax.dynamic_slice(x, (k - 9, 1), (1, 6)),
    "a row is set": lambda x, k: x.at[k].set(jnp.arange(6.0)),
    "a column is set": lambda x, k: x.at[:, k].set(jnp.arange(4.0)),
    "an element is set": lambda x, k: x.at[k, k + 1].set(9.0),
    "nothing is set": lambda x, k: x.at[9 * k].set(9.0),
    "the nearest is multiplied": lambda x, k: x.at[9 * k].mul(2.0, mode="clip"),
    "a row is added": lambda x, k: x.at[k].add(jnp.arange(6.0)),
    "the larger stays": lambda x, k: x.at[k].max(14.0),
    "the smaller stays": lambda x, k: x.at[k].min(14.0),
    "a row is taken off": lambda x, k: x.at[k].add(-jnp.arange(6.0)),
    "conditions beyond the end": lambda x, k: (x > 7).at[9 * k].get(mode="fill"),
    "a narrow number": lambda x, k: lax.dynamic_index_in_dim(jnp.tile(x, (75, 1)), (k + 98).astype(jnp.uint8), 0),
    "a narrow number beyond the end": lambda x, k: x.at[(k + 98).astype(jnp.uint8)].get(mode="clip"),
    "an update by a slice": lambda x, k: lax.dynamic_update_slice(x, 9 * x[:1], (k * 3, 0)),
}


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("case", ONE)
@pytest.mark.parametrize("each", [False, True])
def test_what_is_written_is_what_it_stands_for(case, each):
    """Also with a place for each of a batch, in whatever dimension the batch is."""
    function, args = ONE[case], (ROWS, AT)
    if each:
        function, args = jax.vmap(function, (1, 0)), (jnp.moveaxis(CLOUDS, 0, 1), EACH)
    left, (got,) = written(function, *args)
    want = function(*args)
    assert not left
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(got, want)


OTHERS = {
    "parts of rows": lambda x, k: lax.dynamic_slice(x, (k, 1), (1, 3)),
    "two rows": lambda x, k: lax.dynamic_slice(x, (k, 0), (2, 6)),
    "two rows are set": lambda x, k: lax.dynamic_update_slice(x, x[:2], (k, 0)),
    "many rows": lambda x, k: x[jnp.arange(40) % 3 + k],
    "complex numbers": lambda x, k: jnp.real(lax.complex(x, x)[k]),
    "a row at a narrow number is set": lambda x, k: lax.scatter(
        jnp.tile(x, (75, 1)), (k + 98).astype(jnp.uint8)[None], x[0], NARROW, mode="clip"
    ),
    "a function of what stands there": lambda x, k: x.at[k].apply(jnp.sin),
    "a window at a place": lambda x, k: lax.scatter(x, (k - 1)[None], x[:, 0], WINDOW, mode="drop"),
    "all rows, if they are inside": lambda x, k: lax.gather(x, (k - 1)[None], WHOLE, (4, 6), mode="fill"),
    "several places are added to": lambda x, k: x.at[jnp.stack([k, k, k + 1])].add(1.0),
}


NARROW = lax.ScatterDimensionNumbers((0,), (0,), (0,))
WINDOW = lax.ScatterDimensionNumbers((0,), (1,), (0,))
WHOLE = lax.GatherDimensionNumbers((0, 1), (), (0,))


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("case", OTHERS)
def test_others_stay(case):
    left, (got,) = written(OTHERS[case], ROWS, AT)
    assert left
    np.testing.assert_array_equal(got, OTHERS[case](ROWS, AT))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_axes_of_arrays_and_batches(data):
    """The place may run with any dimension of the array, and be beyond its ends."""
    rank = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank)))
    axis, mode = data.draw(st.integers(0, rank - 1)), data.draw(st.sampled_from(["clip", "fill", "drop"]))
    batch, at = data.draw(st.integers(0, rank)), data.draw(st.integers(-6, 6))
    x = jnp.arange(1.0, 1 + 3 * np.prod(shape)).reshape(3, *shape)
    places = jnp.asarray([at, at + 1, 0], jnp.int32)

    def function(x, k):
        index = (*[slice(None)] * axis, k)
        if mode == "drop":
            return x.at[index].set(-1.0, mode=mode)
        return x.at[index].get(mode=mode)

    args = jnp.moveaxis(x, 0, batch), places
    left, (got,) = written(jax.vmap(function, (batch, 0)), *args)
    assert not left
    np.testing.assert_array_equal(got, jax.vmap(function, (batch, 0))(*args))


def test_places_of_64_bits_do_not_come_back_inside():
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    with jax.enable_x64(True):
        x, at = jnp.arange(9.0), jnp.asarray([2**32 + 3])
        left, (got,) = written(lambda x, at: lax.scatter(x, at, jnp.float64(-1), numbers, mode="drop"), x, at)
        assert not left
        np.testing.assert_array_equal(got, x)
        left, (got,) = written(lambda x, at: jnp.take(x, at, mode="fill"), x, at[0])
        assert left
        np.testing.assert_array_equal(got, jax.jit(lambda x, at: jnp.take(x, at, mode="fill"))(x, at[0]))


def test_arrays_without_elements_stay():
    numbers = lax.GatherDimensionNumbers((0,), (0,), (0,))
    left, (got,) = written(lambda x, k: lax.gather(x, k[None], numbers, (1, 0), mode="clip"), jnp.zeros((4, 0)), AT)
    assert left == {"gather"} and got.shape == (0,)
