"""Values that a kernel computes for itself, though something else computes them as well.

The scores of a contrastive loss are normalised along both of their axes: two kernels each compute them tile by tile, and nobody
stores them. A kernel that stored them for the other one would save less than it costs.

Two computations of one value round otherwise. That is a change like that of any order of summation, unless something tells the two
apart: it compares them, rounds them to integers, or takes a function of both that has an edge. `x == max(x)` and `sqrt(max(x) - x)`
need the same `x` on both sides. So may whoever gets both from the program, as long as nothing was summed up in between. There, a
kernel hands out what others need.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pallasfuse.fusion.candidate import computed_outside
from pallasfuse.fusion.graph import Graph
from pallasfuse.fusion.roundings import looked_at
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.loop_program import External, Nest
from pallasfuse.ir.reducers import PROD, SUM

CONDITION = "a value that something else needs, too, is computed again in the kernel, and rounded by itself"


def computed_again(
    graph: Graph, members: Collection[str], inner: Sequence[Nest], stored: Collection[str]
) -> frozenset[str]:
    """Returns the inner reductions of a kernel that it may compute for itself alone, as others compute them anyway.

    members: the names of its folds, which it hands out as before. stored: what it would store if it handed out all that others
    read. Empty where it stores nothing else, or where something outside looks at the roundings of both.
    """
    dropped = frozenset(n for n in stored if not is_of(graph, n, members))
    again = frozenset(n.name for n in inner if n.name in dropped or any(n.name in graph.ancestors[d] for d in dropped))
    inside = frozenset(members) | {n.name for n in inner if n.name not in again} | (frozenset(stored) - dropped)
    return again if again and not _meet(graph, again, inside) else frozenset()


def needed_elsewhere(graph: Graph, members: Collection[str], inner: Sequence[str], rolled: Axis) -> frozenset[str]:
    """Returns the inner reductions of a kernel that something outside needs as well, other than what the kernel hands out.

    A reduction that follows the kernel's own over its rolled axis does not count, as it might be one of them.
    """
    follow = [n.name for n in graph.reductions() if rolled in n.reduced and graph.depends(n.name, members)]
    outside = computed_outside(graph, (*members, *inner, *follow))
    return frozenset(n for n in inner if not outside.isdisjoint(graph.consumers[n]) or n in graph.outputs)


def is_of(graph: Graph, name: str, members: Collection[str]) -> bool:
    """Is a value one of some reductions, or computed from them?"""
    return name in members or graph.depends(name, members)


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a value comes from: what is computed `again` outside of a kernel, what the kernel hands out, or both."""

    again: bool = False
    own: bool = False
    summed: bool = False
    """Is it a sum of such values, or made of one? Then its last digits mean nothing to anybody."""

    def __or__(self, other: "_Origin") -> "_Origin":
        return _Origin(self.again or other.again, self.own or other.own, self.summed or other.summed)


def _meet(graph: Graph, again: frozenset[str], inside: frozenset[str]) -> bool:
    """Can anything tell values that are computed `again` outside of a kernel from those that the kernel has itself?"""
    outside = computed_outside(graph, inside)
    origins: dict[str, _Origin] = {}

    def origin(tensors: Iterable[str]) -> _Origin:
        found = _Origin()
        for name in tensors:
            found |= origins.get(name, _Origin())
        return found

    for node in graph.program.nests:
        found = origin(node.reads)
        if node.name in again:
            origins[node.name] = _Origin(again=True)
            continue
        if isinstance(node, Nest):
            found |= _Origin(summed=node.reducer in (SUM, PROD) and not node.picks and (found.again or found.own))
        if node.name in inside:
            origins[node.name] = _Origin(own=True, summed=found.summed)
            continue
        if node.name not in outside:
            origins[node.name] = found
            continue
        seen = [node.reads] if isinstance(node, External) else [e.tensors for e in looked_at(node.body)]
        if any(o.again and o.own for o in map(origin, seen)):
            return True
        origins[node.name] = found
    exact = [o for name in graph.outputs if not (o := origins.get(name, _Origin())).summed]
    return any(o.again for o in exact) and any(o.own for o in exact)
