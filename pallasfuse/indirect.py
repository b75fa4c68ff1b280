"""Finds inputs that kernels look up by a table of indices, where XLA would gather them first.

A kernel is planned over what the gather stores. Where its target can read the same elements from where they are, and that is
predicted to be faster than to store them first (`placement.looking_up`), its tile programs say so (`TileProgram.lookups`), and the
gather is not computed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pallasfuse.decisions import Phase, lookups_of
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.loop_program import External, LoopProgram
from pallasfuse.ir.tile_program import Load, every


def lookups_in(program: LoopProgram) -> dict[str, Lookup]:
    """The tensors of a program that may be looked up, by name."""
    return {n.name: n.lookup for n in program.nests if isinstance(n, External) and n.lookup is not None}


def unable(phases: Sequence[Phase], lookup: Lookup) -> str | None:
    """Says why a kernel cannot look up one of its inputs; None if it can."""
    name = lookup.result.name
    for phase in phases:
        program = phase.program
        if name not in {t.name for t in program.inputs}:
            continue
        if not phase.target.looks_up:
            return f"kernels for {phase.target.name} take tiles from stored arrays only"
        if program.instead is not None or any(name in r.predicate.tensors for r in program.ranges):
            return "what bounds its loop is found before the kernel runs, from the rows as they are stored"
        if lookup.result not in program.inputs:
            return "the kernel has a part of them only"
        for s in every(program.body):
            if isinstance(s, Load) and s.tensor == name and len(set(s.indices)) != len(s.indices):
                return "the kernel reads two of their dimensions along one axis"
    return None


def why_stored(phases: Sequence[Phase], lookup: Lookup) -> str:
    """Says why an input of a kernel that may be looked up is stored."""
    return unable(phases, lookup) or "to look them up there would not be faster"


def with_lookups(phases: Sequence[Phase], lookups: Iterable[Lookup]) -> tuple[Phase, ...]:
    """The phases of a kernel with these inputs looked up, and no others; the same ones where that changes nothing."""
    wanted = {x.result.name: x for x in lookups}
    if wanted.keys() == lookups_of(phases).keys():
        return tuple(phases)
    found = []
    for phase in phases:
        own = tuple(x for name, x in wanted.items() if name in {t.name for t in phase.program.inputs})
        found.append(Phase(replace(phase.program, lookups=own), phase.target))
    return tuple(found)
