"""Hypothesis grows programs; fused, they must agree with their float64 evaluation on every emitter that runs on a CPU.

`make fuzz N=10000` judges more of them.
"""

import collections
import os

import jax
import pytest
from hypothesis import HealthCheck, Phase, event, given, seed, settings
from hypothesis import strategies as st

from tests.property.growing import grow
from tests.property.judging import INTERPRETED, Case
from tests.property.programs import Drawn, Seeded

pytestmark = pytest.mark.optimized

COUNTS: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
# A seed gives programs of the intended mix; PALLASFUSE_SHRINK=1 draws every choice from Hypothesis instead, which favours
# small numbers (and so fuses less), and shrinks what fails (which compiles hundreds of programs).
SHRINK = bool(os.environ.get("PALLASFUSE_SHRINK"))
CHOICES = st.data() if SHRINK else st.integers(0, 2**40)
PHASES = tuple(Phase) if SHRINK else (Phase.explicit, Phase.generate)
common = settings(deadline=None, phases=PHASES, print_blob=True, database=None,
                  suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])  # fmt: skip


def _check(choices, emitters):
    program = grow(Seeded(choices) if isinstance(choices, int) else Drawn(choices))
    case = Case(program.function(), program.arguments(), program.tiles)
    assert not case.plain_verdict.problems, f"the bound is too small: {case.plain_verdict}\n{program}"
    for emitter in emitters:
        verdict = case.judge(emitter)
        event(f"{emitter}: {verdict.event}")
        event(f"{emitter}: several trips with a repair: {verdict.rolls}")
        counts = COUNTS[emitter]
        counts[verdict.event] += 1
        counts["rolls"] += verdict.rolls
        counts["programs"] += 1
        assert not verdict.problems, f"{emitter}: {verdict}\n{program}"
    if COUNTS[emitters[0]]["programs"] % 20 == 0:
        jax.clear_caches()


# Several tests of one kind, so that the workers of pytest-xdist share the examples, and one stays in the default tier:
# the first one, which is shorter.
@pytest.mark.sampled(32, cover=())
@pytest.mark.parametrize("part", range(32))
def test_random_programs_on_xla(part):
    @seed(part)
    @settings(common, max_examples={0: 2, 1: 6}.get(part, 5))
    @given(CHOICES)
    def run(choices):
        _check(choices, ["xla", *INTERPRETED])

    run()


@pytest.mark.sampled(14, cover=())
@pytest.mark.parametrize("part", range(14))
def test_random_programs_on_interpret(part):
    @seed(100 + part)
    @settings(common, max_examples={0: 1, 1: 4}.get(part, 3))
    @given(CHOICES)
    def run(choices):
        _check(choices, ["interpret"])

    run()


@pytest.fixture(scope="module", autouse=True)
def summary():
    yield
    for emitter, counts in COUNTS.items():
        if counts["programs"] and emitter != "loop program":
            print(f"\n{emitter}: {dict(counts)}")
            fused = 1 - counts["left to XLA"] / counts["programs"]
            assert counts["programs"] < 40 or fused > 0.6, f"the generator rarely fuses: {counts}"
