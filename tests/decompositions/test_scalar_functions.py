"""What XLA's CPU backend computes one element after the other, by vectors: places, sorting, random words, sines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.random import threefry2x32_p

from pallasfuse import device
from pallasfuse.decompositions import Decomposer, angles, arcs, places, random_words, running, sorting
from pallasfuse.jaxpr_frontend import flatten

SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 3e38, 1.0)


def rule_of(rule, function, *arrays):
    (eqn,) = flatten(jax.make_jaxpr(function)(*arrays)).eqns
    return rule(eqn)


def mixed(data, shape, dtype="float32"):
    """Numbers of which many are equal, and some are special."""
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    x = rng.integers(-4, 5, shape).astype("float32")
    some = rng.random(shape) < data.draw(st.sampled_from([0.0, 0.1, 0.6]))
    return jnp.asarray(np.where(some, rng.choice(np.asarray(SPECIAL, "float32"), shape), x)).astype(dtype)


def same_bits(found, wanted):
    assert found.dtype == wanted.dtype
    as_words = f"uint{8 * wanted.dtype.itemsize}"
    np.testing.assert_array_equal(np.asarray(found).view(as_words), np.asarray(wanted).view(as_words))


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("part", range(4))
@settings(deadline=None, max_examples=15)
@given(st.data())
def test_places_are_those_of_the_first_extreme(part, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    axis = data.draw(st.integers(0, len(shape) - 1))
    x = mixed(data, shape)
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int32", "int8", "uint8"]))
    if "int" in dtype:
        x = jnp.nan_to_num(x, posinf=3, neginf=0).clip(0, 4)
    x = x.astype(dtype)
    for extreme in (lax.argmax, lax.argmin):

        def function(x, extreme=extreme):
            return extreme(x, axis, jnp.int32)

        (found,) = rule_of(places.first_place, function, x)(x)
        np.testing.assert_array_equal(found, function(x))


def test_places_that_an_index_type_does_not_have_stay():
    x = jnp.zeros((2, 300))
    assert rule_of(places.first_place, lambda x: lax.argmax(x, 1, jnp.uint8), x) is None
    assert rule_of(places.first_place, lambda x: lax.argmax(x, 0, jnp.uint8), x) is not None


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("part", range(4))
@settings(deadline=None, max_examples=15)
@given(st.data())
def test_rows_in_order_are_those_of_jax(part, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    axis, others = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(0, 2))
    x = mixed(data, shape, data.draw(st.sampled_from(["float32", "bfloat16", "float16"])))
    number = jnp.arange(x.size, dtype="int32").reshape(shape)

    def function(*arrays):
        return lax.sort(arrays, dimension=axis, num_keys=1, is_stable=True)

    arrays = (x, number, -number)[: others + 1]
    wanted, found = function(*arrays), rule_of(sorting.by_integers, function, *arrays)(*arrays)
    for one, other in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(one, other)
    if others:  # each element moves as it is
        same_bits(found[0], wanted[0])
    else:  # zeros, and what JAX takes for zero, are in an order of their own, and each that is no number is one of them
        least = float(jnp.finfo(x.dtype).smallest_normal)
        found, wanted = (
            [np.where(np.abs(a) < least, np.copysign(0, a), a) for a in map(np.float32, b)] for b in (found, wanted)
        )
        np.testing.assert_array_equal(found[0], wanted[0])
        assert np.signbit(found[0]).sum() >= (np.signbit(wanted[0]) & ~np.isnan(wanted[0])).sum()


def test_rows_of_two_keys_or_of_integers_stay():
    x = jnp.ones((3, 4))
    assert rule_of(sorting.by_integers, lambda x, y: lax.sort((x, y), num_keys=2), x, x) is None
    assert rule_of(sorting.by_integers, lax.sort, jnp.ones((3, 4), "int32")) is None


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("count", [None, 3])
def test_random_bits_are_the_same_bits(width, shape, count):
    keys = jax.random.key(7) if count is None else jax.random.split(jax.random.key(7), count)

    def one(key):
        return jax.random.bits(key, shape, f"uint{width}")

    function = one if count is None else jax.vmap(one)
    (found,) = rule_of(random_words.bits, function, keys)(keys)
    same_bits(found, function(keys))


def test_bits_of_other_generators_and_orders_stay():
    def function(key):
        return jax.random.bits(key, (4,))

    assert rule_of(random_words.bits, function, jax.random.key(0, impl="rbg")) is None
    assert rule_of(random_words.bits, lambda key: jax.random.bits(key, (4,), "uint32"), jax.random.key(0)) is not None
    with jax.threefry_partitionable(False):
        assert rule_of(random_words.bits, function, jax.random.key(0)) is None


def test_words_that_are_encrypted_are_the_same():
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.integers(0, 1 << 32, (50,), np.uint32)) for _ in range(4)]

    def function(*words):
        return threefry2x32_p.bind(*words)

    for found, wanted in zip(
        rule_of(random_words.words, function, *operands)(*operands), function(*operands), strict=True
    ):
        same_bits(found, wanted)


@pytest.mark.parametrize("name", ["sin", "cos"])
@pytest.mark.parametrize("largest", [1e-3, 1.0, 20.0, 3e3, 131072.0])
def test_waves_are_within_two_units_in_the_last_place(name, largest):
    angle = np.random.default_rng(0).uniform(-largest, largest, 200_000).astype("float32")
    quarters = np.arange(1, 83443, 7) * (np.pi / 2)  # where they, or what is left of an angle, are close to zero
    angle = np.concatenate([angle, np.float32(quarters[quarters <= largest]), np.float32([0.0, -0.0, 1e-40])])
    run = rule_of(angles.wave, getattr(lax, name), jnp.asarray(angle))
    found = np.float64(jax.jit(run)(jnp.asarray(angle))[0])
    wanted = getattr(np, name)(np.float64(angle))
    unit = np.float64(np.spacing(np.abs(wanted).astype("float32")))
    assert (np.abs(found - wanted) / np.maximum(unit, 2.0**-149)).max() < 2
    if name == "sin":
        assert np.array_equal(np.signbit(found), np.signbit(wanted))


@pytest.mark.parametrize("largest", [1e-3, 1.0, 20.0, 3e3, 131072.0])
def test_tangents_are_within_four_units_in_the_last_place(largest):
    angle = np.random.default_rng(0).uniform(-largest, largest, 200_000).astype("float32")
    quarters = np.arange(1, 83443, 7) * (np.pi / 2)  # where they, or what they are divided by, are close to zero
    angle = np.concatenate([angle, np.float32(quarters[quarters <= largest]), np.float32([0.0, -0.0])])
    found = np.float64(jax.jit(rule_of(angles.wave, lax.tan, jnp.asarray(angle)))(jnp.asarray(angle))[0])
    wanted = np.tan(np.float64(angle))
    assert units(found, wanted).max() < 4
    assert np.array_equal(np.signbit(found), np.signbit(wanted))


def units(found, wanted):
    """How far numbers are from others, in units in the last place of these."""
    unit = np.float64(np.spacing(np.abs(wanted).astype("float32")))
    return np.abs(np.float64(found) - wanted) / np.maximum(unit, 2.0**-149)


@pytest.mark.parametrize("spread", ["normal", "wide", "large", "small", "alike"])
def test_angles_of_points_are_within_three_units_in_the_last_place(spread):
    rng = np.random.default_rng(0)
    x = {
        "normal": rng.normal(size=200_000),
        "wide": np.exp(rng.uniform(-80, 80, 200_000)) * rng.choice([-1, 1], 200_000),
        "large": rng.uniform(0.1, 1, 200_000) * 3.4e38,
        "small": rng.uniform(1, 9, 200_000) * 1.2e-38,
        "alike": 1 + 1e-6 * rng.normal(size=200_000),
    }[spread].astype("float32")
    y = rng.permutation(x)
    found = jax.jit(rule_of(arcs.arc, lax.atan2, y, x))(y, x)[0]
    wanted = np.arctan2(np.float64(y), np.float64(x))
    normal = np.abs(wanted) >= 2.0**-126  # of others the library's last digits are gone as well
    assert units(found, wanted)[normal].max() < 3
    found, wanted = jax.jit(rule_of(arcs.arc, lax.atan, x))(x)[0], np.arctan(np.float64(x))
    assert units(found, wanted).max() < 3


@pytest.mark.parametrize("name", ["asin", "acos"])
def test_inverse_sines_are_within_three_units_in_the_last_place(name):
    rng = np.random.default_rng(0)
    near = np.exp(rng.uniform(-17, 0, 50_000))
    x = np.float32(np.concatenate([rng.uniform(-1, 1, 200_000), 1 - near, near - 1, [0.0, -0.0, 1.0, -1.0]]))
    found = jax.jit(rule_of(arcs.arc, getattr(lax, name), x))(x)[0]
    wanted = getattr(np, f"arc{name[1:]}")(np.float64(x))
    assert units(found, wanted).max() < 3
    beyond = jnp.asarray([1.5, -1.5, np.nan, np.inf], "float32")
    assert np.isnan(rule_of(arcs.arc, getattr(lax, name), beyond)(beyond)[0]).all()


def test_angles_of_special_points_are_those_of_the_library():
    own = np.float32([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 0.5, 1.2e-38])
    y, x = (jnp.asarray(v.ravel()) for v in np.meshgrid(own, own))
    found, wanted = rule_of(arcs.arc, lax.atan2, y, x)(y, x)[0], np.arctan2(y, x)
    np.testing.assert_allclose(found, wanted, rtol=3e-7, atol=2e-38)
    known = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(found)[known], np.signbit(wanted)[known])


@pytest.mark.parametrize("value", [1e-45, -1e-40])
def test_angles_of_numbers_with_few_digits_are_those_of_the_library(value):
    """Vectors take them for zero, and a point on one axis for one on the other."""
    y, x = jnp.asarray([value, 0.5, value], "float32"), jnp.asarray([0.0, 2.0, -1.0], "float32")
    same_bits(rule_of(arcs.arc, lax.atan2, y, x)(y, x)[0], lax.atan2(y, x))
    same_bits(rule_of(arcs.arc, lax.atan2, x, y)(x, y)[0], lax.atan2(x, y))
    for function in (lax.atan, lax.asin, lax.acos):
        same_bits(rule_of(arcs.arc, function, y)(y)[0], function(y))


def test_arcs_of_other_types_stay():
    x = jnp.ones(3)
    assert rule_of(arcs.arc, lambda x: lax.atan2(x, x), x.astype("bfloat16")) is not None
    with jax.enable_x64(True):
        assert rule_of(arcs.arc, lax.atan, jnp.ones(3, "float64")) is None
    half = jnp.linspace(-1, 1, 999).astype("bfloat16")
    for function in (lax.atan, lax.asin, lax.acos):
        found = rule_of(arcs.arc, function, half)(half)[0]
        assert found.dtype == half.dtype
        np.testing.assert_allclose(found.astype("float32"), function(half).astype("float32"), rtol=2**-7)


def test_waves_of_an_accuracy_that_is_asked_for_stay():
    x = jnp.ones(3)
    assert rule_of(angles.wave, lambda x: lax.sin(x, accuracy=lax.AccuracyMode.HIGHEST), x) is None
    assert rule_of(angles.wave, lax.sin, x) is not None


@pytest.mark.parametrize("value", [np.inf, np.nan, 2e5, -1e30])
def test_waves_of_arrays_with_other_angles_are_those_of_the_library(value):
    angle = jnp.asarray([0.5, value, -3.0], "float32")
    for function in (lax.sin, lax.cos, lax.tan):
        same_bits(rule_of(angles.wave, function, angle)(angle)[0], function(angle))


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (40, 300), (300, 40), (5, 5000)])
def test_running_sums_of_logarithms(axis, backwards, shape):
    x = 3 * np.random.default_rng(0).standard_normal(shape).astype("float32")
    x[1, 2:4], x[2, :3] = -np.inf, (-np.inf, np.inf, 1.0)

    def function(x):
        return lax.cumlogsumexp(x, axis, backwards)

    (found,) = rule_of(running.running, function, x)(x)
    turned = np.flip(np.float64(x), axis) if backwards else np.float64(x)
    wanted = np.logaddexp.accumulate(turned, axis)
    np.testing.assert_allclose(found, np.flip(wanted, axis) if backwards else wanted, rtol=1e-5, atol=1e-5)


def test_what_nobody_reads_is_not_timed():
    asked = []

    def clock(written, other):
        asked.append((written, other))
        return True

    x = jnp.ones((256, 4096))
    Decomposer(device.assumed("cpu"), (), 1.0, clock).of(jax.make_jaxpr(jnp.argsort)(x))
    ((written, other),) = asked
    assert len(written.outvars) == len(other.outvars) == 1
    assert [v.aval.dtype for v in written.outvars] == ["int32"]
