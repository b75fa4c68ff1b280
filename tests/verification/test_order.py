"""Opaque maxima and minima."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasfuse.ir.reducers import MAX, MIN
from pallasfuse.verification.value import ASSUMED, FINITE, NEGATIVE_INFINITY, POSITIVE_INFINITY, stack
from tests.verification.values import TRIALS, agree, differ, finite_fields, kinds_of, number, special

pytestmark = pytest.mark.any_jax


def joined(fields, parts, mode="max"):
    result = parts[0]
    for part in parts[1:]:
        result = fields.apply(mode, [result, part], "float32")
    return result


def some(fields, count):
    return [fields.random((), "float32") for _ in range(count)]


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_order_and_grouping_of_the_elements_do_not_matter(mode, count):
    fields = finite_fields(2)
    x = some(fields, count)
    first = joined(fields, x, mode)
    for order in permutations(x):
        assert agree(first, joined(fields, order, mode), at_least=TRIALS)
    halves = [joined(fields, x[:1], mode), joined(fields, x[1:], mode)]
    assert agree(first, joined(fields, halves, mode), at_least=TRIALS)
    assert "max and min" in fields.notes


@pytest.mark.parametrize("mode", ["max", "min"])
def test_an_element_may_be_taken_twice(mode):
    fields = finite_fields(2)
    x, y, z = some(fields, 3)
    once = joined(fields, [x, y, z], mode)
    assert agree(once, joined(fields, [x, y, y, z, x], mode), at_least=TRIALS)
    assert agree(once, joined(fields, [joined(fields, [x, y], mode), joined(fields, [y, z], mode)], mode))
    assert agree(once, joined(fields, [once, once], mode))
    assert agree(joined(fields, [x, x], mode), x, at_least=TRIALS)


@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_lost_or_extra_element_changes_the_result(mode):
    fields = finite_fields(2)
    x = some(fields, 5)
    for count in range(1, 5):
        smaller, larger = joined(fields, x[:count], mode), joined(fields, x[: count + 1], mode)
        assert not (smaller.levels[0] == larger.levels[0]).any()
    swapped = joined(fields, [x[0], x[1], x[4]], mode)
    assert not (swapped.levels[0] == joined(fields, x[:3], mode).levels[0]).any()


def test_the_maximum_of_parts_is_unrelated_to_the_whole():
    fields = finite_fields(1, 4000)
    x = some(fields, 4)
    part, whole = joined(fields, x[:3]), joined(fields, x)
    p = fields.tower.primes[0]
    for a, b in ((part, whole), (x[0], whole)):
        correlation = np.corrcoef((a.levels[0] / p) % 1, (b.levels[0] / p) % 1)[0, 1]
        assert abs(correlation) < 0.06
    assert not (whole.levels[0] == np.stack([v.levels[0] for v in x])).any()  # not even one of the elements


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_positive_affine_maps_commute(mode, count):
    fields = finite_fields(2)
    x = some(fields, count)
    shift = fields.random((), "float32")
    for scale in (number(fields, 0.5), number(fields, 3.0), fields.squares(fields.random((), "float32"))):
        moved = [fields.apply("add", [fields.apply("mul", [v, scale], "float32"), shift], "float32") for v in x]
        image = fields.apply(
            "add", [fields.apply("mul", [joined(fields, x, mode), scale], "float32"), shift], "float32"
        )
        lead = [joined(fields, moved, mode).levels[0], image.plain().levels[0]]
        assert (lead[0] == lead[1]).all()


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_maximum_of_negatives_is_the_negative_of_the_minimum(count):
    fields = finite_fields(2)
    x = some(fields, count)
    negatives = [fields.apply("neg", [v], "float32") for v in x]
    want = fields.apply("neg", [joined(fields, x, "min")], "float32")
    assert agree(joined(fields, negatives, "max"), want, at_least=TRIALS)
    assert differ(joined(fields, negatives, "max"), fields.apply("neg", [joined(fields, x, "max")], "float32"))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_maximum_is_no_minimum(count):
    fields = finite_fields(2)
    x = some(fields, count)
    assert differ(joined(fields, x, "max"), joined(fields, x, "min"))


def test_a_negative_factor_makes_a_maximum_a_minimum():
    fields = finite_fields(2)
    x = some(fields, 3)
    flipped = fields.apply("mul", [joined(fields, x, "max"), number(fields, -2.0)], "float32")
    assert flipped.mode == "min"
    scaled = [fields.apply("mul", [v, number(fields, -2.0)], "float32") for v in x]
    assert agree(flipped, joined(fields, scaled, "min"), at_least=TRIALS)
    further = some(fields, 1)[0]
    assert agree(joined(fields, [flipped, further], "min"), joined(fields, [*scaled, further], "min"))


def test_a_maximum_that_was_moved_is_still_a_maximum_of_its_elements():
    """The repair of a maximum: shift what was found so far, and go on."""
    fields = finite_fields(2)
    x, y, z, shift = some(fields, 4)
    so_far = fields.apply("sub", [joined(fields, [x, y]), shift], "float32")
    found = joined(fields, [so_far, fields.apply("sub", [z, shift], "float32")])
    want = joined(fields, [fields.apply("sub", [v, shift], "float32") for v in (x, y, z)])
    assert agree(found, want, at_least=TRIALS)


def test_a_factor_of_unknown_sign_is_tainted():
    fields = finite_fields(2)
    x, y, z, scale = some(fields, 4)
    so_far = fields.apply("mul", [joined(fields, [x, y]), scale], "float32")
    found = joined(fields, [so_far, fields.apply("mul", [z, scale], "float32")])
    negative = fields.sign(scale) < 0
    assert (np.broadcast_to(found.taint, (TRIALS,))[negative] == ASSUMED).all()
    assert not np.broadcast_to(found.taint, (TRIALS,))[~negative].any()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-5, 5, width=16), min_size=1, max_size=5), st.sampled_from(["max", "min"]))
def test_maxima_of_known_numbers_are_known(numbers, mode):
    fields = finite_fields(2, 2)
    result = joined(fields, [number(fields, n) for n in numbers], mode)
    assert result.real.item() == (max if mode == "max" else min)(numbers)
    assert not fields.notes


def test_infinities():
    fields = finite_fields(2)
    x, y = some(fields, 2)
    below, above = special(fields, NEGATIVE_INFINITY), special(fields, POSITIVE_INFINITY)
    assert agree(joined(fields, [x, below]), x, at_least=TRIALS)
    assert agree(joined(fields, [below, x, below, y]), joined(fields, [x, y]), at_least=TRIALS)
    assert (kinds_of(joined(fields, [x, above])) == POSITIVE_INFINITY).all()
    assert (kinds_of(joined(fields, [x, below], "min")) == NEGATIVE_INFINITY).all()
    assert (kinds_of(joined(fields, [below, below])) == NEGATIVE_INFINITY).all()


@pytest.mark.parametrize("reducer", [MAX, MIN])
def test_a_reduction_over_two_dimensions_is_one_over_both(reducer):
    fields = finite_fields(2)
    x = fields.random((3, 4), "float32")
    both = fields.reduce(reducer, x, (0, 1), "float32").reshape(())
    flat = fields.reduce(reducer, x.reshape((12,)), (0,), "float32").reshape(())
    assert agree(both, flat, at_least=TRIALS)
    rows = fields.reduce(reducer, x, (1,), "float32")
    assert rows.shape == (3, 1)
    assert agree(rows.take((0, 0)), fields.reduce(reducer, x.take((slice(0, 1),)), (0, 1), "float32").reshape(()))
    empty = fields.reduce(reducer, x.take((slice(0, 0),)), (0,), "float32")
    assert empty.shape == (1, 4)
    assert (kinds_of(empty) == (NEGATIVE_INFINITY if reducer is MAX else POSITIVE_INFINITY)).all()


def test_a_finished_maximum_joined_with_a_number_is_the_maximum_of_all():
    """The frame `max(m, b)` of a loop is that of the finished m, which is what the loop's last one must be."""
    fields = finite_fields(2)
    x, b = fields.random((3,), "float32"), fields.random((1,), "float32")
    finished = fields.finished(fields.reduce(MAX, x, (0,), "float32"))
    every = fields.reduce(MAX, stack([x, b], 0), (0,), "float32")
    assert agree(fields.apply("max", [finished, b], "float32"), every, at_least=TRIALS)
    assert differ(finished, every)


def test_a_reduction_takes_its_elements_as_they_are():
    """max over j of max(x_j, y_j) is a maximum of numbers, not of pairs: no law of maxima is used across a nest."""
    fields = finite_fields(2)
    x, y = (fields.random((3,), "float32") for _ in range(2))
    pairs = fields.apply("max", [x, y], "float32")
    both = fields.reduce(MAX, pairs, (0,), "float32").reshape(())
    numbers = fields.reduce(MAX, stack([x, y], 0), (0,), "float32").reshape(())
    assert differ(both, numbers)
    finished = fields.finished(both)
    assert (kinds_of(finished) == FINITE).all()
