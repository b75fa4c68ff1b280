"""What trials say about two values."""

from dataclasses import replace

import numpy as np
import pytest

from pallasfuse.verification.compare import Comparison
from pallasfuse.verification.value import ASSUMED, NAN, ROOT, ZERO
from tests.verification.values import KINDS, TRIALS, compared, finite_fields, number, special

pytestmark = pytest.mark.any_jax


def changed(value, at, where=slice(None)):
    """`value` with another residue at one element, in some trials."""
    levels = [x.copy() for x in value.levels]
    levels[0][(*at, where)] += 1
    return replace(value, levels=tuple(levels))


def marked(value, flag, at, where, mark=True):
    flags = np.zeros((*value.shape, TRIALS), getattr(value, flag).dtype)
    flags[(*at, where)] = mark
    return replace(value, **{flag: flags})


@pytest.fixture
def x():
    return finite_fields(2).random((2, 3), "float32")


def test_equal_values_match_in_every_trial(x):
    comparison = compared(x, x)
    assert comparison.mismatch is None
    assert (comparison.counts == TRIALS).all()
    assert comparison.counts.shape == (2, 3)


def test_one_mismatch_is_enough_and_says_where(x):
    comparison = compared(x, changed(x, (1, 2), 7))
    assert comparison.mismatch.index == (1, 2)
    assert comparison.mismatch.expected == f"{x.levels[0][1, 2, 7]} (mod p_0)"
    assert comparison.mismatch.found == f"{x.levels[0][1, 2, 7] + 1} (mod p_0)"
    assert comparison.fewest == TRIALS - 1


def test_a_residue_of_an_upper_level_counts_too(x):
    levels = (x.levels[0], x.levels[1] + 1)
    assert compared(x, replace(x, levels=levels)).mismatch is not None
    assert compared(x, replace(x, levels=(x.levels[0], None))).mismatch is None  # what is unknown is not compared


def test_a_tainted_mismatch_proves_nothing_and_a_clean_one_does(x):
    other = changed(x, (0, 1), slice(0, 5))
    relies = marked(other, "taint", (0, 1), slice(0, 5), ASSUMED)
    root = marked(other, "taint", (0, 1), slice(0, 5), ROOT)
    for comparison in (compared(x, relies), compared(root, x), compared(root, root_of(x))):
        assert comparison.mismatch is None
        assert comparison.counts[0, 1] == TRIALS - 5
        assert comparison.counts[1, 1] == TRIALS
    less = marked(other, "taint", (0, 1), slice(0, 4), ASSUMED)
    assert compared(x, less).mismatch.index == (0, 1)


def root_of(value):
    return marked(value, "taint", (0, 1), slice(0, 5), ROOT)


def test_a_root_of_a_negative_number_that_the_reference_does_not_take_is_wrong(x):
    assert compared(x, root_of(x)).mismatch.index == (0, 1)
    assert compared(root_of(x), root_of(x)).mismatch is None


def test_tainted_matches_count_only_while_all_of_them_agree(x):
    tainted = marked(x, "taint", (0, 1), slice(0, 20), ASSUMED)
    assert compared(x, tainted).counts[0, 1] == TRIALS
    wrong = changed(tainted, (0, 1), 3)
    comparison = compared(x, wrong)
    assert comparison.mismatch is None
    assert comparison.counts[0, 1] == TRIALS - 20


def test_bad_trials_are_left_out(x):
    other = marked(changed(x, (1, 0), slice(0, 9)), "bad", (1, 0), slice(0, 9))
    comparison = compared(x, other)
    assert comparison.mismatch is None
    assert comparison.counts[1, 0] == comparison.fewest == TRIALS - 9
    assert compared(other, x).fewest == TRIALS - 9


def test_values_without_a_common_residue_are_never_determined(x):
    a, b = (replace(x, levels=levels) for levels in ((x.levels[0], None), (None, x.levels[1])))
    comparison = compared(a, b)
    assert comparison.mismatch is None
    assert comparison.fewest == 0


def test_kinds_are_compared():
    fields = finite_fields(2)
    x = fields.random((), "float32")
    values = {name: special(fields, kind) for name, kind in KINDS.items()} | {"number": x}
    for a in values:
        for b in values:
            mismatch = compared(values[a], values[b]).mismatch
            assert (mismatch is None) == (a == b), (a, b)
    assert compared(values["inf"], values["nan"]).mismatch.found == "nan"


def test_a_number_may_be_zero_by_chance():
    fields = finite_fields(2)
    x = fields.random((), "float32")
    nothing = fields.apply("sub", [x, x], "float32")
    assert compared(nothing, special(fields, ZERO)).mismatch is None
    assert compared(nothing, number(fields, 0.0)).mismatch is None
    assert compared(nothing, special(fields, NAN)).mismatch is not None


def test_a_value_that_no_input_decides_speaks_for_all_trials():
    fields = finite_fields(2)
    assert compared(number(fields, 2.0), number(fields, 2.0)).fewest == TRIALS
    assert compared(number(fields, 2.0), number(fields, 3.0)).mismatch.expected == "2.0"


def test_integers_and_booleans_are_compared_as_they_are():
    fields = finite_fields(2)
    n = fields.random((4,), "int32")
    assert compared(n, n).fewest == TRIALS
    more = fields.apply("add", [n, number(fields, 1, "int32", 1)], "int32")
    assert compared(n, more).mismatch is not None


def test_batches_add_up(x):
    comparison = Comparison()
    assert not comparison.compared
    for _ in range(3):
        comparison.add(x, x, TRIALS)
    assert comparison.fewest == 3 * TRIALS
    comparison.add(x, changed(x, (0, 0), 1), TRIALS)
    assert comparison.mismatch.index == (0, 0)


def test_shapes_must_be_the_same(x):
    with pytest.raises(AssertionError, match="shapes"):
        compared(x, x.transpose((1, 0)))


def test_no_elements_need_no_trials():
    empty = finite_fields(2).random((0, 3), "float32")
    comparison = compared(empty, empty)
    assert comparison.mismatch is None
    assert comparison.fewest > 10**9
