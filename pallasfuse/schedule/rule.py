"""Rules of block programs: the form that all of them have, and what they are asked in (Blockbuster, section 3)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pallasfuse.errors import Refusal
from pallasfuse.ir.region import Region
from pallasfuse.schedule.block_program import BlockProgram, Path, problem
from pallasfuse.schedule.folds import derivable
from pallasfuse.schedule.placement import Broken, MayFold


@dataclass(frozen=True, slots=True)
class Site:
    """A place in a program where a rule may apply: nodes of a body, and a nest where one of several is meant."""

    path: Path
    nodes: tuple[int, ...]
    nest: str = ""
    read: str = ""
    """The map that the nest reads, where the rule is about both."""


@dataclass(slots=True)
class Legality:
    """Says whether what rules make of a program is legal, and whether they may lose accuracy."""

    stable: bool = True
    """Rules are refused where sums may cancel that did not before."""
    _folds: dict[Region, MayFold] = field(default_factory=dict)

    def may_fold(self, region: Region) -> MayFold:
        """Returns the reads before the end that the algebra of a region allows."""
        if region not in self._folds:
            self._folds[region] = derivable(region)
        return self._folds[region]

    def problem(self, program: BlockProgram) -> Broken | None:
        """Returns the rule of legal trees that a program breaks, if it does."""
        return problem(program, self.may_fold(program.region))

    def legal(self, program: BlockProgram) -> BlockProgram | Refusal:
        """Returns the program, or why it is none."""
        broken = self.problem(program)
        return program if broken is None else Refusal(str(broken))


Rewrite = Callable[[BlockProgram, Site, Legality], BlockProgram | Refusal]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rewrite of block programs that keeps their values."""

    number: int
    name: str
    before: str
    after: str
    condition: str
    sites: Callable[[BlockProgram, Path], Iterator[Site]]
    """Yields the places in one body where the pattern stands."""
    apply: Rewrite
    """Returns the program after it, or why it does not apply at a site."""

    def __str__(self) -> str:
        return f"R{self.number}"
