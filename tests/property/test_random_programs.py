"""Hypothesis grows reduction programs; fused and plain must agree in value and in the pattern of NaN and infinities."""

import collections

import jax
import pytest
from hypothesis import HealthCheck, event, given, seed, settings
from hypothesis import strategies as st

from tests.property.programs import Drawn, grow, judge

COUNTS: dict[str, collections.Counter] = {"xla": collections.Counter(), "interpret": collections.Counter()}
common = settings(deadline=None, print_blob=True, database=None,
                  suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])  # fmt: skip


def _check(data, target):
    program = grow(Drawn(data))
    verdict = judge(program, target)
    event(verdict.event)
    event(f"several trips with a repair: {verdict.rolls}")
    counts = COUNTS[target]
    counts[verdict.event] += 1
    counts["rolls"] += verdict.rolls
    counts["programs"] += 1
    if counts["programs"] % 20 == 0:
        jax.clear_caches()
    assert not verdict.problems, f"{target}: {verdict}\n{program}"


# Several tests of one kind, so that the workers of pytest-xdist share the examples.
@pytest.mark.parametrize("part", range(6))
def test_random_programs_on_xla(part):
    @seed(part)
    @settings(common, max_examples=25)
    @given(st.data())
    def run(data):
        _check(data, "xla")

    run()


@pytest.mark.parametrize("part", range(2))
def test_random_programs_on_interpret(part):
    @seed(100 + part)
    @settings(common, max_examples=25)
    @given(st.data())
    def run(data):
        _check(data, "interpret")

    run()


@pytest.fixture(scope="module", autouse=True)
def summary():
    yield
    for target, counts in COUNTS.items():
        if counts["programs"]:
            print(f"\n{target}: {dict(counts)}")
            fused = counts["fully fused"] / counts["programs"]
            assert counts["programs"] < 40 or fused > 0.6, f"the generator rarely fuses: {counts}"
