"""Loops that update a part of each slice, as loops that update whole arrays: every element is computed as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallasfuse import _compat
from pallasfuse.decompositions import Decomposer
from pallasfuse.decompositions.in_place import updated_in_place
from pallasfuse.device import assumed, find
from pallasfuse.jaxpr_frontend import flatten
from tests.decompositions.test_decomposer import operations, smoothed

H200 = find("NVIDIA H200", "gpu")
TRIPS, ROWS, WIDTH = 5, 6, 4
ROW = np.linspace(-1.0, 1.0, WIDTH, dtype=np.float32)
SLICES = np.random.default_rng(0).normal(size=(TRIPS, ROWS, WIDTH)).astype(np.float32)
PLACES = np.array([3, 0, 9, -2, 5], np.int32)
"""One place for each trip, of which two lie outside of the slice."""


def written(row, slice, at):
    return lax.dynamic_update_slice(slice, row[None], (at, 0))


def eqn_of(step, *, reverse=False, length=TRIPS, unroll=1, places=PLACES):
    """The scan of a step over slices and places, and its arguments."""
    args = ROW, SLICES[:length], places[:length]

    def looped(row, slices, at):
        return lax.scan(step, row, (slices, at), reverse=reverse, unroll=unroll)

    (eqn,) = (e for e in jax.make_jaxpr(looped)(*args).eqns if e.primitive.name == "scan")
    return eqn, args


def same(eqn, args):
    """Is a scan written in place, and is every bit of it the same then?"""
    run = updated_in_place(eqn)
    if run is None:
        return False
    for found, expected in zip(run(*args), _compat.bind(eqn, args), strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert np.array_equal(found, expected)
    return True


def read_again(row, now):
    slice, at = now
    new = written(row, slice, at)
    return jnp.tanh(new.sum(0)), new


def two_updates(row, now):
    slice, at = now
    return row + 1, written(2 * row, slice.at[at, 1].add(row[0]), jnp.minimum(at, 3))


def several_places(row, now):
    slice, at = now
    return row * 0.5, slice.at[at + jnp.arange(2), jnp.arange(2)].set(row[:2], mode="drop")


STEPS = {
    "a row": lambda row, now: (row + 1, written(row, *now)),
    "read again": read_again,
    "two updates": two_updates,
    "several places": several_places,
    "added": lambda row, now: (row + 1, now[0].at[now[1]].add(row)),
    "clipped": lambda row, now: (row + 1, now[0].at[now[1]].multiply(row, mode="clip")),
    "largest": lambda row, now: (row + 1, now[0].at[jnp.stack([now[1], now[1] - 1])].max(row)),
    "each row at its place": lambda row, now: (
        row + 1,
        jax.vmap(lambda r, at: r.at[at].set(row[0]))(now[0], now[1] + jnp.arange(ROWS)),
    ),
    "places of 8 bits": lambda row, now: (
        row,
        lax.dynamic_update_slice(now[0], row[None], (now[1].astype(jnp.uint8), jnp.uint8(0))),
    ),
    "an update is stacked, too, which is updated again": lambda row, now: (
        row,
        ((new := written(row, *now)), written(row, new, now[1] - 1)),
    ),
    "stacked twice": lambda row, now: ((row, (new := written(row, *now), new, row))[0], (new, new, row)),
}


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize(
    "how", [{}, {"reverse": True}, {"unroll": 2}, {"length": 2}], ids=["", "reverse", "unroll", "short"]
)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_every_bit_is_the_same(step, how):
    assert same(*eqn_of(step, **how))


OTHERS = {
    "the slice is read, too": lambda row, now: (now[0].sum(0), written(row, *now)),
    "the slice is an update, too": lambda row, now: (row, written(now[0][0], *now)),
    "no result of the loop": lambda row, now: (written(row, *now).sum(0), None),
    "nothing is updated": lambda row, now: (row + 1, now[0] + row),
    "another array is updated": lambda row, now: (row + 1, written(row, jnp.zeros((ROWS, WIDTH)), now[1])),
    "between two updates something is read": lambda row, now: (
        (one := written(row, *now)).sum(0),
        written(row, one, now[1] - 1),
    ),
}


@pytest.mark.parametrize("step", OTHERS.values(), ids=OTHERS)
def test_slices_that_are_needed_as_they_were_stay(step):
    assert updated_in_place(eqn_of(step)[0]) is None


def test_one_trip_stays():
    assert updated_in_place(eqn_of(STEPS["a row"], length=1)[0]) is None


def added(row, slice):
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    return lax.scatter_add(slice, jnp.full((1, 1), 1, jnp.int8), row[:1], numbers)


@pytest.mark.parametrize(
    "update",
    [lambda row, slice: lax.dynamic_update_slice(slice, row[:1], (jnp.uint8(1),)), added],
    ids=["a part", "scattered"],
)
def test_numbers_of_many_trips_do_not_wrap(update):
    """Places in 8 bits do not hold the number of each of 300 trips."""

    def looped(row, slices):
        return lax.scan(lambda c, s: (c + 1, update(c, s)), row, slices)

    args = ROW, np.zeros((300, WIDTH), np.float32)
    (eqn,) = jax.make_jaxpr(looped)(*args).eqns
    assert same(eqn, args)


# --- where it is done


def layers(w, cache, x, at):
    """Layers with a cache of rows each, to which one is written, and over which there is a softmax."""

    def layer(x, now):
        w, cache = now
        cache = lax.dynamic_update_slice(cache, (x @ w)[:, None], (0, at, 0))
        shares = jax.nn.softmax(jnp.einsum("bn,btn->bt", x, cache))
        return x + jnp.einsum("bt,btn->bn", shares, cache), cache

    return lax.scan(layer, x, (w, cache))


def words(w, cache, x):
    def word(carry, at):
        x, cache = layers(w, carry[1], carry[0], at)
        return (x, cache), x

    return lax.scan(word, (x, cache), jnp.arange(3))


def shapes(depth, b, t, n):
    return [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((depth, n, n), (depth, b, t, n), (b, n))]


def stacked(jaxpr):
    """The numbers of dimensions of all that scans stack, those in bodies too."""
    flat = flatten(jaxpr)
    for eqn in flat.eqns:
        if eqn.primitive.name == "scan":
            carried = _compat.scan_counts(eqn)[1]
            yield from (len(v.aval.shape) for v in eqn.outvars[carried:])
            yield from stacked(eqn.params["jaxpr"])


def test_a_price_knows_that_caches_need_not_be_moved():
    jaxpr = jax.make_jaxpr(words)(*shapes(8, 8, 2048, 512))
    assert sorted(stacked(jaxpr)) == [3, 4]
    assert list(stacked(Decomposer(H200, (), 1.25).of(jaxpr))) == [3]


@pytest.mark.parametrize(("clock", "left"), [(None, [3, 4]), (lambda *_: False, [3, 4]), (lambda *_: True, [3])])
def test_on_a_cpu_a_clock_decides(clock, left):
    """Where the new slice is reduced, XLA updates it inside of the reduction there, and copies the whole array for that."""
    jaxpr = jax.make_jaxpr(words)(*shapes(8, 8, 2048, 512))
    assert sorted(stacked(Decomposer(assumed("cpu"), (), 1.25, clock).of(jaxpr))) == left


def test_what_a_user_leaves_stays():
    jaxpr = jax.make_jaxpr(jax.named_scope("mine")(words))(*shapes(8, 8, 2048, 512))
    assert Decomposer(H200, ("mine",), 1.25).of(jaxpr) is jaxpr


def test_an_update_that_a_user_leaves_stays():
    def layer(x, now):
        with jax.named_scope("mine"):
            cache = written(x, *now)
        return x + 1, cache

    structs = [
        jax.ShapeDtypeStruct(s, t) for s, t in (((4096,), "float32"), ((8, 2048, 4096), "float32"), ((8,), "int32"))
    ]
    jaxpr = jax.make_jaxpr(lambda x, *xs: lax.scan(layer, x, xs))(*structs)
    assert Decomposer(H200, ("mine",), 1.25).of(jaxpr) is jaxpr
    assert Decomposer(H200, ("yours",), 1.25).of(jaxpr) is not jaxpr


def test_operations_in_the_body_are_decomposed_in_turn():
    """Channels that are smoothed one by one are shifted (`test_decomposer`)."""

    def layer(x, images):
        images = lax.dynamic_update_slice(images, x[:, None], (0, 3, 0))
        return x + smoothed(images[:1]).mean(1), images

    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 256), (8, 32, 64, 256))]
    jaxpr = jax.make_jaxpr(lambda x, images: lax.scan(layer, x, images))(*structs)
    made = Decomposer(assumed("cpu"), (), 1.25, lambda *_: True).of(jaxpr)
    assert "conv_general_dilated" in operations(jaxpr)
    assert "conv_general_dilated" not in operations(made)
    assert list(stacked(made)) == []
