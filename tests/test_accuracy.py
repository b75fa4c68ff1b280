"""docs/accuracy.md is current in form, its ratios are within the bound, and a cheap part of it is measured again."""

import pytest

from scripts import accuracy

pytestmark = pytest.mark.any_jax


def test_the_table_of_errors_is_current():
    assert not accuracy.problems_of_document()


@pytest.mark.deep  # tests/examples compares other draws in the default tier
def test_a_cheap_part_of_it_is_so_today():
    assert not accuracy.problems_measured()
