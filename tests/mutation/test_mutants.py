"""Every planted mistake must be rejected, by the check that is there for it."""

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.mutation.checks import CHECKS, NOTHING_SHOWN, baseline
from tests.mutation.mutants import MUTANTS
from tests.mutation.planting import Mutant, Planting

pytestmark = pytest.mark.any_jax

_killed: dict[str, tuple[str, str]] = {}


@pytest.fixture(scope="module", autouse=True)
def _summary(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and _killed:
        terminal.write_line(f"\n{summary()}")


def summary() -> str:
    by = Counter(by for _, by in _killed.values())
    lines = [f"{len(_killed)} mutants killed: " + ", ".join(f"{n} by {b}" for b, n in by.most_common())]
    rooms = Counter(_killed.values())
    for room in sorted({r for r, _ in rooms}):
        lines.append(f"  {room}: " + ", ".join(f"{n} by {b}" for (r, b), n in rooms.most_common() if r == room))
    return "\n".join(lines)


@pytest.mark.sampled(18, cover=("room", "check"))
@pytest.mark.parametrize(
    ("room", "check", "mutant"),
    [pytest.param(m.room.partition("/")[0], m.check, m, id=f"{m.room.replace('/', '.')}-{m.name}") for m in MUTANTS],
)
def test_is_rejected(room: str, check: str, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    unspoiled = baseline(mutant.subject, check)
    assert not unspoiled.rejected_by, f"{check} rejects {mutant.subject} as it is: {unspoiled.reason}"
    planting = Planting(monkeypatch)
    mutant.plant(planting)
    outcome = CHECKS[check](mutant.subject)
    assert planting.calls or not planting.wrapped, "the mutant is never reached"
    assert outcome.evidence != unspoiled.evidence, "the mutant changes nothing"
    assert outcome.rejected_by, f"{check} accepts the mutant on {mutant.subject}"
    assert outcome.rejected_by != NOTHING_SHOWN, f"rejected for want of evidence only: {outcome.reason}"
    _killed[mutant.name] = mutant.room, outcome.rejected_by


def test_names_are_unique() -> None:
    names = Counter(m.name for m in MUTANTS)
    assert max(names.values()) == 1, names.most_common(3)
    assert len(MUTANTS) >= 75
