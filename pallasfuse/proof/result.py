"""The result of a proof, and the record of comparisons that is collected on the way to it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pallasfuse.decisions import Phase
from pallasfuse.ir.fold import Group
from pallasfuse.ir.schedule import Schedule
from pallasfuse.verification.bound import NEVER_ENOUGH
from pallasfuse.verification.compare import Comparison
from pallasfuse.verification.value import Value


@dataclass(frozen=True, slots=True)
class Counterexample:
    """Shows one element at which a stage computes something else than the stage before."""

    stage: str
    tensor: str
    index: tuple[int, ...]
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.tensor}{list(self.index)} is {self.found}, expected {self.expected}"


@dataclass(frozen=True)
class Proof:
    """The result of random tests over finite fields that were made of a plan.

    `bound`: the probability that two different programs would have passed, at most. `extents`: of the instance that was
    tested, by axis. `opaque`: functions that were treated as arbitrary ones. `uncovered`: what no test speaks for.
    """

    holds: bool
    bound: float
    trials: int
    extents: Mapping[str, int]
    stages: tuple[str, ...]
    opaque: tuple[str, ...]
    assumed: tuple[str, ...]
    uncovered: tuple[str, ...]
    counterexample: Counterexample | None

    def and_of(self, what: str, other: "Proof") -> "Proof":
        """The proof of a program together with that of a part which is planned by itself, like the body of a loop."""

        def labelled(lines: Iterable[str]) -> tuple[str, ...]:
            return tuple(f"{what}: {line}" for line in lines)

        return Proof(
            self.holds and other.holds, min(1.0, self.bound + other.bound), self.trials + other.trials,
            {**self.extents, **{f"{a} ({what})": n for a, n in other.extents.items()}},
            (*self.stages, *labelled(other.stages)), tuple(dict.fromkeys((*self.opaque, *other.opaque))),
            (*self.assumed, *labelled(other.assumed)), (*self.uncovered, *labelled(other.uncovered)),
            self.counterexample or other.counterexample,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlannedKernel:
    """One kernel of a plan: its group and how it is tiled."""

    group: Group
    schedule: Schedule
    phases: tuple[Phase, ...]
    """The phases that run one after the other, on the plan's own target or on those that stand in for it."""


@dataclass
class Record:
    """Comparisons by stage and tensor, in the order in which they were first made."""

    comparisons: dict[tuple[str, str], Comparison] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    uncovered: dict[str, None] = field(default_factory=dict)
    given: dict[str, None] = field(default_factory=dict)
    stages: dict[str, None] = field(default_factory=dict)
    wrong: Counterexample | None = None
    bound: float = 0.0
    trials: int = 0
    comparing: Callable[[], Comparison] = Comparison
    irrelevant: set[tuple[str, str]] = field(default_factory=set)
    """Comparisons that say nothing about a result."""

    def compare(
        self, stage: str, tensor: str, expected: Value, found: Value, trials: int, *, unfinished: bool = False
    ) -> None:
        """Add one batch of trials."""
        self.stages[stage] = None
        if (stage, tensor) in self.irrelevant:
            return
        if (stage, tensor) not in self.comparisons:
            self.comparisons[stage, tensor] = self.comparing()
        self.comparisons[stage, tensor].add(expected, found, trials, unfinished=unfinished)

    def mismatches(self) -> Iterator[Counterexample]:
        """Returns the differences of the comparisons that are not settled."""
        for (stage, tensor), comparison in self.comparisons.items():
            if comparison.mismatch is not None:
                m = comparison.mismatch
                yield Counterexample(stage, tensor, m.index, m.expected, m.found)

    def mismatch(self) -> Counterexample | None:
        """The first that differs."""
        return next(self.mismatches(), None)

    def drop_mismatches(self, stage: str | None = None) -> None:
        """Keep the comparisons (of a stage) that have found no difference; the others are not made any more."""
        dropped = {k for k, c in self.comparisons.items() if c.mismatch is not None and stage in (None, k[0])}
        self.irrelevant |= dropped
        self.comparisons = {k: c for k, c in self.comparisons.items() if k not in dropped}

    def counterexample(self) -> Counterexample | None:
        return self.wrong or self.mismatch()

    def settle(self, needed: int, miss: float, trials: int) -> None:
        """Take stock of comparisons that needed `needed` trials each."""
        if self.counterexample() is not None:
            return
        if trials < needed:
            enough = (
                "no number of tests is enough"
                if needed >= NEVER_ENOUGH
                else f"it needs {needed} tests, {trials} were made"
            )
            self.uncovered[f"the bound: {enough}"] = None
        for (stage, tensor), comparison in self.comparisons.items():
            if comparison.fewest < min(needed, trials):
                text = (
                    f"{stage}: {tensor} was determined in {comparison.fewest} of {trials} tests, {needed} are needed: "
                    "in the others a divisor is zero, or a sign that the plan relies on is another"
                )
                self.uncovered[text] = None
        fewest = min((c.fewest for c in self.comparisons.values()), default=needed)
        self.bound = max(self.bound, min(1.0, miss**fewest))
        self.trials = max(self.trials, trials)
        self.comparisons.clear()
