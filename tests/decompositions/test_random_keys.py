"""Loops with the words of random keys in their places, against the loops themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallasfuse.decompositions.random_keys import of_words
from pallasfuse.recurrences import AsKernel
from tests.loops_of_programs import WITH_KEYS
from tests.running_loops import DEVICE, as_numbers, run, scans_of

KEY, X = jax.random.key(0), jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)


def scanned(trip):
    """A program that runs a trip with a key and an array as its state, five times."""
    return lambda key, x: lax.scan(trip, (key, x), None, length=5)


def moved(state, _):
    """Keys in an array that is cut, taken apart, and given other shapes."""
    key, x = state
    keys = jax.random.split(key, (2, 3))
    own = keys[1, :2].reshape(2, 1)
    spread = jnp.broadcast_to(keys[0, 0], (3,))
    drawn = jax.vmap(jax.vmap(lambda k: jax.random.normal(k, (6,))))(own)
    return (jax.random.clone(keys[0, 1]), x + drawn.sum((0, 1))), jax.vmap(jax.random.bits)(spread)


def of_widths(state, _):
    key, x = state
    key, own = jax.random.split(key)
    parts = [jax.random.bits(own, (6,), t).astype(jnp.float32) for t in (jnp.uint8, jnp.uint16, jnp.uint32)]
    return (key, x + sum(parts) / 2.0**32), parts[0]


def of_data(state, _):
    key, x = state
    words = jax.random.key_data(jax.random.fold_in(key, 7))
    return (jax.random.wrap_key_data(words ^ jnp.uint32(5)), x * 0.5), words


def from_seeds(state, n):
    key, x = state
    seed = jnp.int32(-7) + jnp.sum(x > 0)
    return (jax.random.key(seed), x + jax.random.normal(jax.random.key(3), x.shape)), jax.random.bits(key)


def handed_on(state, _):
    key, x = state
    return (key, x + 1), key


RIGHT = {
    **{name: function for name, (function, _) in WITH_KEYS.items()}, "moved": scanned(moved), "widths": scanned(of_widths),
    "data": scanned(of_data), "seeds": scanned(from_seeds),
    "handed on": scanned(handed_on),
}  # fmt: skip


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", RIGHT)
def test_words_do_what_keys_do(name):
    args = WITH_KEYS[name][1] if name in WITH_KEYS else (KEY, X)
    jaxpr, loops = scans_of(RIGHT[name], *args)
    ways = {id(loop): of_words(loop) for loop in loops}
    assert all(ways.values())
    for got, want in zip(run(jaxpr, *args, ways=ways), jax.tree.leaves(RIGHT[name](*args)), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(as_numbers(got), as_numbers(want), rtol=1e-6)


def by_another_generator(_, x):
    return scanned(of_widths)(jax.random.key(0, impl="rbg"), x)


def in_a_choice(state, _):
    key, x = state
    return (lax.cond(x[0, 0] > 0, jax.random.clone, lambda k: jax.random.fold_in(k, 1), key), x), None


def of_64_bits(state, _):
    key, x = state
    return (key, x + jax.random.normal(key, x.shape, jnp.float64)), None


@pytest.mark.parametrize("function", [by_another_generator, scanned(in_a_choice)])
def test_what_is_no_pair_of_words_stays(function):
    _, loops = scans_of(function, KEY, X)
    assert [of_words(loop) for loop in loops] == [None]


def from_a_long_seed(state, _):
    key, x = state
    return (jax.random.key(jnp.sum(x > 0).astype(jnp.int64)), x), jax.random.bits(key)


@pytest.mark.parametrize("trip", [of_64_bits, from_a_long_seed])
def test_words_of_64_bits_stay(trip):
    with jax.enable_x64(True):
        _, loops = scans_of(scanned(trip), KEY, X.astype(jnp.float64))
        assert [of_words(loop) for loop in loops] == [None]


def test_another_order_of_numbers_stays():
    before = jax.config.jax_threefry_partitionable
    jax.config.update("jax_threefry_partitionable", False)
    try:
        _, loops = scans_of(scanned(of_widths), KEY, X)
        assert [of_words(loop) for loop in loops] == [None]
    finally:
        jax.config.update("jax_threefry_partitionable", before)


def of_another_order_inside(state, _):
    key, x = state
    with jax.threefry_partitionable(False):
        drawn = jax.random.normal(key, x.shape)
    return (jax.random.split(key)[0], x + drawn), None


def test_one_equation_in_another_order_is_enough():
    _, loops = scans_of(scanned(of_another_order_inside), KEY, X)
    assert [of_words(loop) for loop in loops] == [None]


def many_draws(state, _):
    key, x = state
    keys = jax.random.split(key, 40)
    return (keys[0], x + sum(jax.random.normal(k, x.shape) for k in keys[1:])), None


@pytest.mark.parametrize("trip", [in_a_choice, of_another_order_inside, many_draws])
def test_such_loops_and_long_ones_have_no_kernel(trip):
    _, loops = scans_of(scanned(trip), KEY, X)
    assert [AsKernel(DEVICE)(loop) for loop in loops] == [None]


def test_loops_without_keys_stay():
    _, loops = scans_of(lambda x: lax.scan(lambda c, row: (c + row, c), x[0], x), X)
    assert [of_words(loop) for loop in loops] == [None]
