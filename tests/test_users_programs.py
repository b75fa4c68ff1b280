"""Programs as users write them: `verify` raises nothing, and no right plan has a counterexample."""

import pytest

import pallasfuse as pf
from tests.users_programs import PROGRAMS

pytestmark = pytest.mark.any_jax

DELTA = 1e-6
TARGETS = ("xla", "triton", "mosaic_gpu")
NOT_COVERED = {
    "rows_that_are_masked_as_a_whole": "in the others a divisor is zero",
    "router_with_a_balance_loss": "the bound: no number",
}
"""What the report says about programs that not all tests speak for."""


def test_there_are_many():
    assert len(PROGRAMS) >= 160


@pytest.mark.sampled(90, cover=("target",))
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_verifies_or_says_why_not(name, target):
    program = PROGRAMS[name]
    found = pf.verify(pf.fuse(program.function), *program.arrays(), target=target, delta=DELTA)
    assert found.counterexample is None, found
    reason = NOT_COVERED.get(name)
    if reason is None:
        assert found.equivalent, found
        assert found.bound <= DELTA
    else:
        assert not found.equivalent
        assert any(reason in u for u in found.proof.uncovered), found
