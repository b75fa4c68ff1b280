"""Values that a kernel computes for itself, though something else computes them as well.

The scores of a contrastive loss are normalised along both of their axes: two kernels each compute them tile by tile, and nobody
stores them. A kernel that stored them for the other one would save less than it costs.

Two computations of one value round otherwise. That is a change like that of any order of summation, unless something outside
compares a value of the one with a value of the other, or takes a function of both where it has an edge: `x == max(x)` or
`sqrt(max(x) - x)` need the same `x` on both sides. There, a kernel hands out what others need.
"""

from collections.abc import Collection, Iterable, Sequence

from pallasfuse.fusion.candidate import computed_outside
from pallasfuse.fusion.graph import Graph
from pallasfuse.fusion.widening import EDGED, JUMPS
from pallasfuse.ir.expr import Apply, Expr, postorder
from pallasfuse.ir.loop_program import External, Nest

_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


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


def needed_elsewhere(graph: Graph, members: Collection[str], inner: Sequence[str]) -> frozenset[str]:
    """Returns the inner reductions of a kernel that something outside needs as well, other than what the kernel hands out."""
    outside = computed_outside(graph, (*members, *inner))
    return frozenset(n for n in inner if not outside.isdisjoint(graph.consumers[n]) or n in graph.outputs)


def is_of(graph: Graph, name: str, members: Collection[str]) -> bool:
    """Is a value one of some reductions, or computed from them?"""
    return name in members or graph.depends(name, members)


def _meet(graph: Graph, again: frozenset[str], inside: frozenset[str]) -> bool:
    """Does anything outside of a kernel look at values that are computed `again`, beside those that the kernel hands out?"""
    outside = computed_outside(graph, inside)
    behind: dict[str, tuple[bool, bool]] = dict.fromkeys(again, (True, False)) | dict.fromkeys(inside, (False, True))

    def are_both(tensors: Iterable[str]) -> bool:
        return all(map(any, zip(*(behind.get(t, (False, False)) for t in tensors), strict=True)))

    for node in graph.program.nests:
        if node.name in again or node.name not in outside:
            continue
        looked_at = [node.reads] if isinstance(node, External) else [e.tensors for e in _looked_at(node.body)]
        if any(tensors and are_both(tensors) for tensors in looked_at):
            return True
        found = [behind[t] for t in node.reads if t in behind]
        if found:
            first, other = map(any, zip(*found, strict=True))
            behind[node.name] = first, other
    return False


def _looked_at(body: Expr) -> Iterable[Expr]:
    """Yields the expressions of which a rounding may decide what a body is."""
    for node in postorder(body):
        if isinstance(node, Apply) and node.op in _COMPARISONS | JUMPS:
            yield node
        elif isinstance(node, Apply) and node.op in EDGED:
            yield node.args[0 if "pow" in node.op else -1]
