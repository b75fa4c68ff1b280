"""Candidates around matrix products: a few reductions without a rolled axis, whose schedule is a tree that a search finds.

A product with large axes on both sides, what normalizes its rows, a second product of the same rows, a map of both, a product of a
product: whatever few reductions are read together can share a kernel whose blocks tile rows and columns. Such a group has no folds:
its reductions are all computed inside, and the tree derives what it reads unfinished.

A product alone is the library's: nothing of it is saved, but for slices of arrays, which XLA would copy for it. The price of a tree
is the least of many, and so more often too low than others: `judging` asks for more where no clock decides. `grouping` asks for
these groups in programs on one device; on several, what a product sums may be sharded, which XLA's partitioner handles.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from pallasfuse.errors import InvalidProgramError, Refusal
from pallasfuse.fusion import widening
from pallasfuse.fusion.candidate import (
    ALONE,
    MOST_POSITIONS,
    Candidate,
    Context,
    as_store,
    convexity_violation,
    materialized_maps,
    moved_reads,
    needed,
    unsupported,
    with_body,
)
from pallasfuse.fusion.cost import product_operands, together
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.fusion.graph import Graph
from pallasfuse.ir.dtypes import itemsize_bytes
from pallasfuse.ir.expr import Expr, Read, postorder, reads_in
from pallasfuse.ir.fold import Fold, Group
from pallasfuse.ir.loop_program import External, Nest, is_slice
from pallasfuse.ir.region import Region, region_of_group
from pallasfuse.ir.tensors import Tensor
from pallasfuse.price.gpu import least_us
from pallasfuse.price.xla_products import without_casts
from pallasfuse.targets import Target

MOST_REDUCTIONS = 4
"""The reductions of such a group: the number of trees grows fast with them."""
_HALF_BYTES = 2
"""An element of an operand that has no more may be one of a half type; masks count as well, as this only makes bounds lower."""


def candidates(graph: Graph, target: Target) -> Iterator[Candidate]:
    """Yields the groups around the products of a program, for the first target in turn that runs trees; none where none does."""
    runner = runner_of(target)
    if runner is None:
        return
    seen: set[frozenset[str]] = set()
    for root in _roots(graph):
        for names in _read_together(graph, root):
            if names not in seen:
                seen.add(names)
                found = build(graph, names, runner)
                if found is not None:
                    yield found


def rebuild(graph: Graph, candidate: Candidate, context: Context, target: Target) -> Candidate | None:
    """Returns the candidate of the same reductions beside other groups; None where it is not legal there."""
    runner = runner_of(target)
    names = frozenset(n.name for n in candidate.group.inner)
    return None if runner is None else build(graph, names, runner, context)


def runner_of(target: Target | None) -> Target | None:
    """The target, or the first that stands in for it, whose schedules are searched as trees."""
    while target is not None and not (target.runs_trees and target.platform == "gpu"):
        target = target.fallback
    return target


def _roots(graph: Graph) -> Iterator[Nest]:
    """What is computed at once from several reductions: a reduction, a result, and what products and others are handed."""
    handed = {t for n in graph.program.nests if isinstance(n, External) or product_operands(n) for t in n.reads}
    for nest in graph.nests.values():
        if nest.is_reduction or nest.name in graph.outputs | handed:
            yield nest


def _read_together(graph: Graph, root: Nest) -> Iterator[frozenset[str]]:
    """Yields sets of reductions: those that a root is computed from, then with those that these are computed from, and so on."""
    bodies = graph.inlined()
    level = {root.name} if root.is_reduction else _reductions_in(graph, bodies[root.name])
    inside: frozenset[str] = frozenset()
    while level:
        grown = _without_earlier(graph, inside | level, bodies)
        if grown == inside or len(grown) > MOST_REDUCTIONS:
            return
        inside = grown
        if any(product_operands(with_body(graph.nests[n], bodies)) for n in inside):
            yield inside
        level = set().union(*(_reductions_in(graph, bodies[n]) for n in inside)) - inside


def _reductions_in(graph: Graph, body: Expr) -> set[str]:
    return {t for t in body.tensors if t in graph.nests and graph.nests[t].is_reduction}


def _without_earlier(graph: Graph, names: Collection[str], bodies: Mapping[str, Expr]) -> frozenset[str]:
    """Leaves out the reductions that others are computed from by way of what is outside: they are of earlier kernels."""
    inside = set(names)
    for name in sorted(names, key=graph.order.__getitem__, reverse=True):
        behind = graph.ancestors[name]
        if name in inside:
            near = _near(graph, name, inside, bodies)
            inside -= {n for n in inside if n in behind and n not in near}
    return frozenset(inside)


def _near(graph: Graph, name: str, inside: Collection[str], bodies: Mapping[str, Expr]) -> set[str]:
    """The reductions of `inside` that one of them is computed from by way of others of them only."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        more = (_reductions_in(graph, bodies[waiting.pop()]) & set(inside)) - found
        found |= more
        waiting += more
    return found


def build(graph: Graph, names: frozenset[str], target: Target, context: Context = ALONE) -> Candidate | None:
    """The group of exactly these reductions, with the maps that follow them; None where it is not legal or saves nothing."""
    members = [n for n in graph.nests.values() if n.name in names]
    behind = frozenset().union(*(graph.ancestors[n] for n in names))
    outside = frozenset(n.name for n in graph.reductions() if n.name in behind - names)
    slices = frozenset(n.name for n in graph.program.nests if is_slice(n))
    bodies = graph.inlined(materialized_maps(graph, outside, names) | context.made)
    inside = [with_body(n, bodies) for n in members]
    if any(n.picks or any(a.extent > MOST_POSITIONS for a in (*n.axes, *n.reduced)) for n in inside):
        return None
    if any(unsupported(n, target) for n in inside) or moved_reads(inside, bodies):
        return None
    if convexity_violation(graph, members, [], names) is not None:
        return None
    maps = _maps_behind(graph, names, bodies, target)
    products = {n.name for n in inside if product_operands(n)}
    # what only normalizes rows is computed by its other readers, too
    stored = [n for n in needed(graph, names | maps, context) if n in products | maps]
    outputs = [as_store(n) if n.is_reduction else with_body(n, bodies) for n in map(graph.nests.__getitem__, stored)]
    inside = _read_by(inside, outputs)
    if not any(map(product_operands, inside)) or not _is_more_than_a_product(inside, outputs, slices):
        return None
    return _candidate(graph, inside, outputs, target)


def _maps_behind(graph: Graph, names: frozenset[str], bodies: Mapping[str, Expr], target: Target) -> frozenset[str]:
    """The maps that the kernel can compute from its products: no larger than these, and of nothing that comes later."""
    products = {n for n in names if product_operands(with_body(graph.nests[n], bodies))}
    spaces = [frozenset(graph.nests[n].axes) for n in products]
    found = set()
    for nest in graph.nests.values():
        body = bodies[nest.name]
        if nest.is_reduction or body.tensors.isdisjoint(products) or not any(s >= frozenset(nest.axes) for s in spaces):
            continue
        reads = reads_in(body)
        own = [r for r in reads if r.tensor in names]
        aligned = all(r.indices == graph.nests[r.tensor].axes for r in own)
        later = any(r.tensor not in names and graph.depends(r.tensor, names) for r in reads)
        if aligned and not later and unsupported(nest, target, body) is None:
            found.add(nest.name)
    return frozenset(found)


def _read_by(inside: list[Nest], outputs: Collection[Nest]) -> list[Nest]:
    """The reductions that outputs are computed from: others of the program may have made what the rest was for."""
    names = {n.name for n in inside}
    wanted: set[str] = set()
    waiting = list(outputs)
    while waiting:
        more = (waiting.pop().reads & names) - wanted
        wanted |= more
        waiting += [n for n in inside if n.name in more]
    return [n for n in inside if n.name in wanted]


def _is_more_than_a_product(inside: Collection[Nest], outputs: Collection[Nest], slices: Collection[str]) -> bool:
    """Is something computed around a product that its library would read or store by itself, or is a slice read where it is?"""
    if len(inside) > 1 or any(n.body.tensors != {n.name} or not isinstance(n.body, Read) for n in outputs):
        return bool(outputs)
    operands = [o for n in inside for o in product_operands(n) or ()]
    cores = [without_casts(o) for o in operands]
    return bool(outputs) and not all(isinstance(c, Read) and c.tensor not in slices for c in cores)


def _candidate(graph: Graph, inside: list[Nest], outputs: list[Nest], target: Target) -> Candidate | None:
    written = (*inside, *outputs)
    stored = [n.name for n in outputs]
    exact = graph.strict or not widening.is_allowed()
    computed = written if exact else widening.widened(written, stored, graph.compared())
    inner, final = computed[: len(inside)], computed[len(inside) :]
    reads = frozenset().union(*(n.reads for n in computed)) - {n.name for n in inside}
    group = Group(
        name=f"fused_{'_'.join(n.name for n in inside)}", rolled=inner[-1].reduced[0],
        parallel=tuple(a for a in final[0].axes if all(a in n.axes for n in final)),
        folds=(), inner=inner, outputs=final,
        inputs=tuple(d.name for d in graph.program.definitions() if d.name in reads),
        strict=graph.strict, source=inside[0].source,
    )  # fmt: skip
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in graph.program.definitions()}
    try:
        derived = _derived(region_of_group(group, tensors), strict=graph.strict)
    except InvalidProgramError:
        return None
    conditions, exceptions = tuple(derived.conditions), tuple(derived.exceptions)
    if computed != written:
        conditions = (*conditions, widening.CONDITION)
        exceptions = (*exceptions, widening.EXCEPTION) if widening.may_cancel(written) else exceptions
    group = replace(group, conditions=conditions, exceptions=exceptions)
    return Candidate(group, _covers(graph, inside, outputs), _least_us(group, target))


def _derived(region: Region, *, strict: bool) -> FoldsOnDemand:
    """Derives what a tree may read unfinished, and so the conditions of all trees."""
    folds = FoldsOnDemand(region, strict=strict)
    known: dict[str, Fold] = {}
    before: dict[str, dict[str, Fold]] = {}
    for nest in region.nests:
        if len(nest.reduced) != 1:
            continue
        together_with = [n for n in region.reads(nest) if n.name in known and n.reduced == nest.reduced]
        folds.refined(nest, nest.reduced[0], together_with)
        before[nest.name] = {}
        for n in together_with:  # and what they read unfinished themselves
            before[nest.name] |= before[n.name] | {n.name: known[n.name]}
        found = folds(nest, nest.reduced[0], before[nest.name])
        if not isinstance(found, Refusal):
            known[nest.name] = found
    return folds


def _covers(graph: Graph, inside: Collection[Nest], outputs: Collection[Nest]) -> frozenset[str]:
    """The reductions that no other kernel is to compute. What only normalizes rows costs little: every reader may compute it."""
    own = frozenset(n.name for n in (*inside, *outputs))
    stored = {n.name for n in outputs}
    return frozenset(
        n.name for n in inside if product_operands(n) or n.name in stored or _readers(graph, n.name) <= own
    )


def _readers(graph: Graph, name: str) -> frozenset[str]:
    """The reductions, results and operands of what XLA keeps that are computed from a value by way of maps only."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for reader in graph.consumers[waiting.pop()]:
            is_map = reader in graph.nests and not graph.nests[reader].is_reduction
            if not is_map or reader in graph.outputs:
                found.add(reader)
            if is_map:
                waiting.append(reader)
    return frozenset(found)


def _least_us(group: Group, target: Target) -> float:
    """The least time of a kernel whose products are not those of the library."""
    work = together([], group.inner, group.outputs, (), {n.name: 1 for n in group.inner})
    operands = [side for n in group.inner for side in product_operands(n) or ()]
    half = any(itemsize_bytes(n.dtype) <= _HALF_BYTES for n in postorder(*operands))
    return least_us(work.moved, work.matmul_flops, target.device, half=half)
