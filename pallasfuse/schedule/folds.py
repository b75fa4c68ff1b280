"""The reads of unfinished reductions that a region's algebra allows: where the fold of a nest over them can be derived."""

from dataclasses import replace
from functools import cache

from pallasfuse.errors import Refusal
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.fusion.inline import inline_maps
from pallasfuse.ir.fold import Fold
from pallasfuse.ir.loop_program import LoopProgram
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
        nest = nests[name]
        if len(nest.reduced) != 1:
            return None
        read = {}
        for other in unfinished:
            together = (r for r in nests[other].reads if r in nests and nests[r].reduced == nest.reduced)
            found = fold(other, frozenset(together)) if nests[other].reduced == nest.reduced else None
            if found is None:
                return None
            read[other] = found
        derived = derive(nest, nest.reduced[0], read)
        return None if isinstance(derived, Refusal) else derived

    def may_fold(nest: str, unfinished: frozenset[str]) -> bool:
        return fold(nest, unfinished) is not None

    return may_fold
