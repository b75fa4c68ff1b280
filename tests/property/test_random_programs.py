"""Hypothesis grows reduction programs; fused and plain must agree in value and in the pattern of NaN and infinities."""

import collections
import os

import jax
import pytest
from hypothesis import HealthCheck, Phase, event, given, seed, settings
from hypothesis import strategies as st

from tests.property.judging import judge
from tests.property.programs import Drawn, Seeded, grow

COUNTS: dict[str, collections.Counter] = {"xla": collections.Counter(), "interpret": collections.Counter()}
# A seed gives programs of the intended mix; PALLASFUSE_SHRINK=1 draws every choice from Hypothesis instead, which favours
# small numbers (and so fuses less), and shrinks what fails (which compiles hundreds of programs).
SHRINK = bool(os.environ.get("PALLASFUSE_SHRINK"))
CHOICES = st.data() if SHRINK else st.integers(0, 2**40)
PHASES = tuple(Phase) if SHRINK else (Phase.explicit, Phase.generate)
common = settings(deadline=None, phases=PHASES, print_blob=True, database=None,
                  suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])  # fmt: skip


def _check(choices, target):
    program = grow(Seeded(choices) if isinstance(choices, int) else Drawn(choices))
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
@pytest.mark.parametrize("part", range(8))
def test_random_programs_on_xla(part):
    @seed(part)
    @settings(common, max_examples=50)
    @given(CHOICES)
    def run(choices):
        _check(choices, "xla")

    run()


@pytest.mark.parametrize("part", range(2))
def test_random_programs_on_interpret(part):
    @seed(100 + part)
    @settings(common, max_examples=50)
    @given(CHOICES)
    def run(choices):
        _check(choices, "interpret")

    run()


@pytest.fixture(scope="module", autouse=True)
def summary():
    yield
    for target, counts in COUNTS.items():
        if counts["programs"]:
            print(f"\n{target}: {dict(counts)}")
            fused = counts["fully fused"] / counts["programs"]
            assert counts["programs"] < 40 or fused > 0.6, f"the generator rarely fuses: {counts}"
