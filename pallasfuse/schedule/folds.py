"""The reads of unfinished reductions that a region's algebra allows: where the fold of a nest over them can be derived."""

from collections.abc import Container, Mapping
from dataclasses import replace
from functools import cache

from pallasfuse.errors import Refusal
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.fusion.inline import inline_maps
from pallasfuse.ir.fold import Fold
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.ir.region import Region
from pallasfuse.schedule.placement import MayFold


def with_inlined_maps(region: Region) -> Region:
    """Returns the region with reductions and results that read no map: what others of its maps compute is in their bodies."""
    bodies = inline_maps(LoopProgram(region.inputs, region.nests, region.outputs))
    nests = [n for n in region.nests if n.is_reduction or n.name in region.outputs]
    return replace(region, nests=tuple(replace(n, body=bodies[n.name]) for n in nests))


def derivable(region: Region, *, strict: bool = False) -> MayFold:
    """Returns the test that derives folds of a region's nests, each once, with the maps that they read inlined.

    strict: none with exceptions for special values.
    """
    region = with_inlined_maps(region)
    nests, derive = region.by_name, FoldsOnDemand(region, strict=strict)

    @cache
    def fold(name: str, unfinished: frozenset[str]) -> Fold | None:
        """Returns the fold of a nest that depends on these unfinished reductions; each of them on some of the others."""
        nest = nests[name]
        if len(nest.reduced) != 1 or any(nests[other].reduced != nest.reduced for other in unfinished):
            return None
        before = {other: fold(other, _before(nests, other, unfinished)) for other in unfinished}
        read = {other: found for other, found in before.items() if found is not None}
        if len(read) < len(before):
            return None
        derived = derive(nest, nest.reduced[0], read)
        return None if isinstance(derived, Refusal) else derived

    def may_fold(nest: str, unfinished: frozenset[str]) -> bool:
        finished = nests[nest].reads - unfinished  # also where what is unfinished reads it
        running = {n for n in nests if nests[n].reduced == nests[nest].reduced and n not in finished}
        return fold(nest, _before(nests, nest, running | unfinished)) is not None

    return may_fold


def _before(nests: Mapping[str, Nest], name: str, among: Container[str]) -> frozenset[str]:
    """Returns those of `among` that a nest reads, directly or through each other."""
    found: set[str] = set()
    stack = list(nests[name].reads)
    while stack:
        read = stack.pop()
        if read not in found and read in among:
            found.add(read)
            stack.extend(nests[read].reads)
    return frozenset(found)
