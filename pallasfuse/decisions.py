"""Records of what was decided about a program: its groups, where each of them runs, and what stays with XLA.

The decisions are made in `fusion`, `tiling` and `placement`. A plan that was kept on disk needs these records only, and imports no
planner.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pallasfuse.ir.fold import Group
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.loop_program import Source
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.price.terms import Price
from pallasfuse.targets import Target


@dataclass(frozen=True, slots=True)
class Phase:
    """One tile program of a kernel, and the target whose emitter runs it."""

    program: TileProgram
    target: Target


@dataclass(frozen=True, slots=True)
class Placed:
    """A group on the first target that has a kernel for it, and why others have none."""

    schedule: Schedule
    phases: tuple[Phase, ...]
    declined: tuple[str, ...]
    refused: str | None = None
    """The reason why the target cannot run tiles that the user asked for; its emitter raises it. None where it can."""
    rivals: "tuple[Placed, ...]" = ()
    """Other ways to run the group that are predicted to take about as long: a clock decides, where there is one."""

    @property
    def lookups(self) -> dict[str, Lookup]:
        """The inputs of the group that its kernel reads from other tensors, by tables."""
        return lookups_of(self.phases)


def lookups_of(phases: Iterable[Phase]) -> dict[str, Lookup]:
    """Returns the lookups of all phases of a kernel, by the names of the tensors that they need not have."""
    return {x.result.name: x for p in phases for x in p.program.lookups}


def reads_of(inputs: Iterable[str], lookups: Mapping[str, Lookup]) -> tuple[str, ...]:
    """The names of what a kernel reads for the inputs of its group, where some of them are looked up."""
    parts = ((lookups[n].source.name, lookups[n].table.name) if n in lookups else (n,) for n in inputs)
    return tuple(dict.fromkeys(name for names in parts for name in names))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Original:
    """A group in canonical names and where it runs: one object for all groups that are equal up to names."""

    group: Group
    placed: Placed

    @property
    def reads(self) -> tuple[str, ...]:
        """As `Kernel.reads`, in canonical names."""
        return reads_of(self.group.inputs, self.placed.lookups)


@dataclass(frozen=True, slots=True)
class Left:
    """A reduction that stays with XLA."""

    name: str
    reason: str
    source: Source


@dataclass(frozen=True, slots=True)
class Grouping:
    """The chosen groups in execution order, and the reductions left to XLA with the reason for each."""

    groups: tuple[Group, ...]
    left: tuple[Left, ...]
    replaced: tuple[Price, ...] = ()
    """The price of what XLA would run instead of each group."""
