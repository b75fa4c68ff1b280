"""Candidates for kernels, and the checks that all kinds of them share."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from pallasfuse.fusion.graph import Graph
from pallasfuse.ir.axes import volume
from pallasfuse.ir.expr import Apply, Expr, Read, postorder, read, reads_in
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import External, Nest
from pallasfuse.targets import Target

MOST_POSITIONS = 2**30
"""Of a loop: positions, bounds and block numbers are 32-bit integers, and the bound of a mask may be a tile beyond."""


@dataclass(frozen=True, slots=True)
class Way:
    """The values that a kernel computes, reads and stores, where there is a choice."""

    relaid: frozenset[str] = frozenset()
    """Maps that stay outside of the kernel, which reads what they store."""
    hands_out: bool = True
    """Does the kernel store inner reductions that others read? Else they compute them again."""
    given: frozenset[str] = frozenset()
    """Reductions that the kernel could compute inside, but reads: XLA stores them for others, or they are a single number."""
    streams: bool = True
    """Does it store maps over its rolled axis that others read? Else they compute them again, from its reductions."""
    widens: bool = False
    """Does it compute maps of rejected reductions that take more bytes than what they are computed from? Else it reads them."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A legal group, and the least time that its kernel could take."""

    group: Group
    covers: frozenset[str]
    """Reductions computed inside."""
    least_us: float
    way: Way = Way()
    again: frozenset[str] = frozenset()
    """Reductions that the kernel computes for itself, though others compute them as well (`fusion.recomputation`)."""


@dataclass(frozen=True, slots=True)
class Context:
    """The groups chosen so far, as they matter for one more: values that are already made, and values that must be handed out."""

    made: frozenset[str] = frozenset()
    wanted: frozenset[str] = frozenset()


ALONE = Context()
"""No groups are chosen yet."""
WHOLE = Way()
"""Everything is computed inside, from arguments as they lie, and stored for others."""


def unsupported(nest: Nest, target: Target, body: Expr | None = None) -> str | None:
    """The operation of a nest that the target's kernels lack, as a reason. body: of the nest, with maps inlined."""
    if nest.reducer is not None and nest.reducer.name in target.unsupported_reducers:
        return f"target {target.name} has no {nest.reducer} reduction"
    return _unsupported_in(nest.body if body is None else body, target.unsupported_ops, target.name)


@lru_cache(1 << 12)
def _unsupported_in(body: Expr, ops: frozenset[str], target: str) -> str | None:
    for node in postorder(body):
        if isinstance(node, Read) and len(set(node.indices)) != len(node.indices):
            return f"{node} reads a diagonal"
        if isinstance(node, Apply) and node.op in ops:
            return f"target {target} has no {node.op}"
    return None


def with_body(nest: Nest, bodies: Mapping[str, Expr]) -> Nest:
    """The nest with its body from `bodies`, where maps are inlined."""
    return replace(nest, body=bodies[nest.name])


def as_store(nest: Nest) -> Nest:
    """The map that stores a finished reduction under its own name."""
    return Nest(nest.name, nest.axes, read(nest.name, nest.axes, nest.dtype), nest.dtype, source=nest.source)


def materialized_maps(
    graph: Graph, rejected: frozenset[str], members: frozenset[str], *, widens: bool = False
) -> frozenset[str]:
    """Maps above rejected reductions that are no larger than those: the cheapest values to hand to the kernel.

    widens: without those that take more bytes than what they are computed from.
    """
    if not rejected:
        return frozenset()
    keep: set[str] = set()
    sizes = {r: volume(graph.nests[r].axes) for r in rejected}
    for nest in graph.nests.values():
        if nest.is_reduction or graph.depends(nest.name, members) or (widens and nest.name in graph.widened):
            continue
        below = [sizes[r] for r in rejected & graph.ancestors[nest.name]]
        if below and volume(nest.axes) <= max(below):
            keep.add(nest.name)
    return frozenset(keep)


def moved_reads(nests: Iterable[Nest], bodies: Mapping[str, Expr]) -> dict[str, str]:
    """Finds the reductions among `nests` that others of them read at other positions than their own, each with a reason.

    A block has their elements at its own positions only: the others are those of other blocks.
    """
    own = {n.name: n.axes for n in nests if n.is_reduction}
    found: dict[str, str] = {}
    for nest in nests:
        for node in reads_in(bodies[nest.name]):
            if node.tensor in own and node.indices != own[node.tensor]:
                found.setdefault(node.tensor, f"{nest.name} reads {node} at other positions than its own")
    return found


def convexity_violation(
    graph: Graph, members: list[Nest], inner: list[Nest], inside: frozenset[str]
) -> tuple[str, str] | None:
    """A group must not feed a value through something outside and back."""
    for nest in [*members, *inner]:
        outside = [n for n in graph.ancestors[nest.name] - inside if n in graph.order and is_opaque(graph, n)]
        for name in sorted(outside, key=graph.order.__getitem__):
            if graph.depends(name, inside):
                culprit = next(
                    m for m in reversed(members) if m.name == nest.name or graph.depends(m.name, [nest.name])
                )
                return culprit.name, f"{name} is computed outside the kernel from values inside it"
    return None


def is_opaque(graph: Graph, name: str) -> bool:
    """No map: it is not inlined into what reads it."""
    return name not in graph.nests or graph.nests[name].is_reduction


def computed_outside(graph: Graph, inside: Collection[str]) -> set[str]:
    """Returns what is computed outside of a kernel: all that is no map, and the maps that something outside reads."""
    outside: set[str] = set()
    for node in reversed(graph.program.nests):
        lives = isinstance(node, External) or node.is_reduction or node.name in graph.outputs
        if node.name not in inside and (lives or not outside.isdisjoint(graph.consumers[node.name])):
            outside.add(node.name)
    return outside


def needed(graph: Graph, available: frozenset[str], context: Context) -> list[str]:
    """Returns what a kernel that can store `available` has to store, in the program's order: results, what the groups chosen so far
    read, and what anything reads that is computed outside."""
    outside = computed_outside(graph, available) | (context.made - available)
    found = (n for n in available
             if n in graph.outputs or n in context.wanted or not outside.isdisjoint(graph.consumers[n]))  # fmt: skip
    return sorted(found, key=graph.order.__getitem__)
