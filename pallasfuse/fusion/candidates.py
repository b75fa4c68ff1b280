"""Candidates: nests that could share a kernel, by the axis that it rolls over, checked for legality.

A candidate starts from reductions over one axis (the folds), takes in the reductions they read that fit inside a tile
(the inner nests), derives each fold, and absorbs the maps that follow. It is legal when no value leaves it and comes back.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from pallasfuse.errors import Refusal
from pallasfuse.fusion import widening
from pallasfuse.fusion.candidate import (
    ALONE,
    MOST_POSITIONS,
    WHOLE,
    Candidate,
    Context,
    Way,
    as_store,
    convexity_violation,
    is_opaque,
    materialized_maps,
    moved_reads,
    needed,
    unsupported,
    with_body,
)
from pallasfuse.fusion.cost import apart, product_operands, sliced, together
from pallasfuse.fusion.folding import fold_over, plain_fold
from pallasfuse.fusion.graph import Graph
from pallasfuse.fusion.recomputation import CONDITION, computed_again, is_of, needed_elsewhere
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Expr, Read, applied_in, reads_in
from pallasfuse.ir.fold import Fold, Group
from pallasfuse.ir.loop_program import Nest
from pallasfuse.targets import Target


def rebuild(graph: Graph, candidate: Candidate, context: Context, target: Target) -> Candidate | None:
    group = candidate.group
    members = sorted((graph.nests[f.name] for f in group.folds), key=lambda n: graph.order[n.name])
    built = _build(graph, group.rolled, members, group.parallel, target, context, candidate.way)
    return built if isinstance(built, Candidate) else None


def components(graph: Graph, axis: Axis) -> list[list[Nest]]:
    """Reductions over `axis` that depend on each other or vary with a common tensor along the axis."""
    members = [n for n in graph.reductions() if axis in n.reduced]
    touched = {n.name: {n.name} | {t for t in graph.ancestors[n.name]} for n in members}
    components: list[list[Nest]] = []
    for nest in members:
        joined = [c for c in components if any(touched[nest.name] & touched[m.name] for m in c)]
        merged = [m for c in joined for m in c] + [nest]
        components = [c for c in components if c not in joined] + [merged]
    return [sorted(c, key=lambda n: graph.order[n.name]) for c in components]


def candidates(
    graph: Graph, axis: Axis, members: list[Nest], target: Target, reasons: dict[str, str]
) -> Iterable[Candidate]:
    """One candidate for every choice of the axes that all folds keep, and for every prefix that stays legal.

    What prevents a kernel is left out, with all that depends on it; then it is looked at by itself.
    """
    cores = {frozenset(n.axes) for n in members}
    for nest in members:
        # one side of a matrix product may stay whole inside the tile
        kept = [frozenset(o.axes) - frozenset(nest.reduced) for o in product_operands(nest) or ()]
        cores |= {frozenset(nest.axes) - (a - b) for a, b in (kept, kept[::-1])} if kept else set()
    seen: set[frozenset[str]] = set()
    waiting = deque(
        (core, [n for n in members if core <= set(n.axes)]) for core in sorted(cores, key=lambda c: (len(c), sorted(c)))
    )
    while waiting:
        core, whole = waiting.popleft()
        chosen, legal = whole, False
        while chosen:
            names = frozenset(n.name for n in chosen)
            if names in seen:
                break
            parallel = tuple(a for a in chosen[0].axes if a in core)
            built = _build(graph, axis, chosen, parallel, target)
            if isinstance(built, Candidate):
                seen.add(names)  # what other axes prevent may be legal with these
                others = [n for n in whole if n.name not in names]
                if not legal and len(others) > 1:
                    waiting.append((core, others))
                legal = True
                yield built
                variants = (
                    _build(graph, axis, chosen, parallel, target, way=way) for way in _other_ways(graph, built, names)
                )
                yield from (c for c in variants if isinstance(c, Candidate))
                chosen = chosen[:-1]
                continue
            name, reason = built
            reasons.setdefault(name, reason)
            shorter = [n for n in chosen if n.name != name and not graph.depends(n.name, [name])]
            chosen = shorter if len(shorter) < len(chosen) else chosen[:-1]


def _other_ways(graph: Graph, built: Candidate, members: frozenset[str]) -> Iterator[Way]:
    """Yields what may be better than to compute everything inside, from arguments as they lie, and to store it for others."""
    hands_out = {True, all(is_of(graph, n.name, members) for n in built.group.outputs)}
    for relaid in (frozenset[str](), *_stored_before(graph, built.group)):
        yield from (Way(relaid, h) for h in sorted(hands_out) if relaid or not h)
    streams = {True, not any(_is_streamed(graph, n, built.group.rolled) for n in built.group.outputs)}
    widens = {False, not graph.widened.isdisjoint(built.group.inputs)}
    for s, w in sorted(product(streams, widens)):
        yield from (Way(hands_out=h, streams=s, widens=w) for h in sorted(hands_out) if w or not s)
    given = needed_elsewhere(graph, members, [n.name for n in built.group.inner], built.group.rolled)
    # a number for all blocks: each of them would compute it
    single = frozenset(n.name for n in built.group.inner if not n.axes and not graph.depends(n.name, members))
    yield from (Way(given=names) for names in dict.fromkeys((given, single)) if names)


def _build(
    graph: Graph, axis: Axis, members: list[Nest], core: tuple[Axis, ...], target: Target, context: Context = ALONE,
    way: Way = WHOLE,
) -> Candidate | tuple[str, str]:  # fmt: skip
    """The candidate with exactly these folds, or (the member that prevents it, why)."""
    names = frozenset(n.name for n in members)
    too_long = next((a for a in (*core, axis) if a.extent > MOST_POSITIONS), None)
    if too_long is not None or volume(core) > MOST_POSITIONS:
        what = f"axis {too_long}" if too_long is not None else f"axes {', '.join(map(str, core))}"
        return members[-1].name, f"{what}: more than 2**30 positions, and kernels count in 32 bits"
    for nest in members:
        extra = [a for a in (*nest.axes, *nest.reduced) if a not in core and a != axis]
        if any(a.extent > target.max_inner for a in extra) or volume(extra) > target.max_inner:
            return nest.name, f"axes {', '.join(map(str, extra))} are too large to be kept whole inside a tile"
        why_not = unsupported(nest, target) or _wide_product(nest, core)
        if why_not is not None:
            return nest.name, why_not
    inside_axes = frozenset(core).union({axis}, *(n.axes for n in members), *(n.reduced for n in members))

    rejected: dict[str, str] = {}
    before = context.made | way.relaid | way.given | _unsupported_maps(graph, names, target)
    while True:
        keep = materialized_maps(graph, frozenset(rejected), names, widens=way.widens) | before
        bodies = graph.inlined(keep)
        inner = _inner_nests(graph, members, bodies, keep | rejected.keys(), names)
        moved = moved_reads([*members, *inner], bodies)
        whys = (
            (
                n,
                moved.get(n.name)
                or unsupported(n, target, bodies[n.name])
                or _inner_refusal(graph, n, names, core, inside_axes, axis, target),
            )
            for n in inner
        )
        refused = next(((n, why) for n, why in whys if why is not None), None)
        refused = refused or _needed_outside(graph, members, inner)
        if refused is None:
            break
        nest, why = refused
        if graph.depends(nest.name, names):
            culprit = next(m for m in reversed(members) if graph.depends(m.name, [nest.name]))
            return culprit.name, why
        rejected[nest.name] = why
    inside = names | {n.name for n in inner}

    for member in members:
        missing = unsupported(member, target, bodies[member.name])
        if missing is not None:
            return member.name, missing

    violation = convexity_violation(graph, members, inner, inside)
    if violation is not None:
        return violation
    outputs = _absorb(graph, bodies, inside, inside_axes, axis, keep, context, target, streams=way.streams)
    again = frozenset[str]()
    if not way.hands_out:
        again = computed_again(graph, names, inner, outputs)
        outputs = [n for n in outputs if is_of(graph, n, names)]
    if not outputs or not (way.hands_out or again):
        return members[-1].name, "nothing outside reads it"
    final = tuple(with_body(graph.nests[n], bodies) if not graph.nests[n].is_reduction else as_store(graph.nests[n])
                  for n in outputs)  # fmt: skip
    inner_nests = tuple(with_body(n, bodies) for n in inner)
    folded_nests = tuple(with_body(n, bodies) for n in members)
    written = (*folded_nests, *inner_nests, *final)
    exact = graph.strict or not widening.is_allowed()
    computed = written if exact else widening.widened(written, outputs, graph.compared())
    folded_nests, computed = computed[: len(folded_nests)], computed[len(folded_nests) :]
    inner_nests, final = computed[: len(inner_nests)], computed[len(inner_nests) :]
    folded = _derive_folds(graph, axis, folded_nests, inner_nests)
    if not isinstance(folded, _Folds):
        return folded
    conditions, exceptions = folded.conditions, folded.exceptions
    conditions = (*conditions, CONDITION) if again else conditions
    if (*folded_nests, *inner_nests, *final) != written:
        conditions = (*conditions, widening.CONDITION)
        exceptions = (*exceptions, widening.EXCEPTION) if widening.may_cancel(written) else exceptions
    reads = frozenset().union(*(n.reads for n in final), *(n.reads for n in inner_nests),
                              *(f.nest.reads for f in folded.folds))  # fmt: skip
    waits = next((t for t in sorted(reads - inside) if graph.depends(t, inside)), None)
    if waits is not None:
        return members[-1].name, f"{waits} is computed outside the kernel from values inside it"
    step = next((t for t in sorted({*outputs, *(reads - inside)}) if t in graph.internal), None)
    if step is not None:
        return members[-1].name, f"{step} is a step of one operation, which a kernel computes as a whole"
    named = [n for n in members if not n.internal] or final
    group = Group(
        name=f"fused_{'_'.join(n.name for n in named)}",
        rolled=axis, parallel=core, folds=folded.folds, inner=inner_nests, outputs=final,
        inputs=tuple(d.name for d in graph.program.definitions() if d.name in reads - inside),
        conditions=conditions, exceptions=exceptions, strict=graph.strict, source=members[0].source,
    )  # fmt: skip
    passes = dict.fromkeys(inside, group.passes)
    work = together([f.nest for f in folded.folds], inner_nests, final, core, passes)
    least = (work + sliced(inner_nests, axis, target.max_inner, group.passes)).least_us(target.device)
    taken = replace(way, relaid=way.relaid & reads, given=way.given & reads)
    return Candidate(group, inside - again, least, taken, again)


def _unsupported_maps(graph: Graph, members: frozenset[str], target: Target) -> frozenset[str]:
    """Finds the maps with operations that a target's kernels lack, which are stored before: nothing of the kernel is in them."""
    above = frozenset[str]().union(*(graph.ancestors[m] for m in members))
    return frozenset(
        n for n in above if n in graph.nests and not graph.nests[n].is_reduction and not graph.depends(n, members)
        and unsupported(graph.nests[n], target) is not None
    )  # fmt: skip


def _wide_product(nest: Nest, core: tuple[Axis, ...]) -> str | None:
    """A product between two grid axes needs tiles along both: XLA's matrix products do that better."""
    operands = product_operands(nest)
    if operands is None:
        return None
    lhs, rhs = (frozenset(o.axes) - frozenset(nest.reduced) for o in operands)
    if (lhs - rhs) & frozenset(core) and (rhs - lhs) & frozenset(core):
        return f"{nest.name} is a matrix product that keeps large axes on both sides: left to XLA's own kernel"
    return None


def _inner_nests(
    graph: Graph, members: list[Nest], bodies: Mapping[str, Expr], stop: frozenset[str], names: frozenset[str]
) -> list[Nest]:
    found: dict[str, Nest] = {}
    stack = [bodies[n.name] for n in members]
    while stack:
        for tensor in stack.pop().tensors:
            nest = graph.nests.get(tensor)
            if nest is not None and nest.is_reduction and tensor not in names | stop | found.keys():
                found[tensor] = nest
                stack.append(bodies[tensor])
    return sorted(found.values(), key=lambda n: graph.order[n.name])


def _inner_refusal(
    graph: Graph, nest: Nest, members: frozenset[str], core: tuple[Axis, ...], inside: frozenset[Axis], axis: Axis,
    target: Target,
) -> str | None:  # fmt: skip
    """Why a reduction that the folds read is not computed inside the tile; None when it should be."""
    if axis in nest.reduced:
        return f"{nest.name} reduces {axis} as well, outside the group"
    if nest.picks:
        return f"{nest.name} takes one element by its index: XLA reads no others"
    if volume(nest.reduced) > target.max_inner and not _whole_product(nest, core, axis, target):
        return f"{nest.name} reduces {volume(nest.reduced)} elements, too many to keep inside a tile"
    stray = [a for a in nest.axes if a not in inside]
    if stray or any(a in core for a in nest.reduced):
        return f"{nest.name} varies along axes that the tile does not have"
    if graph.depends(nest.name, members):
        return None
    inner = together([], [nest], [], core, {nest.name: 1})
    stored = 2 * volume(nest.axes) * dtypes.itemsize_bytes(nest.dtype)
    recompute_us = replace(inner, bytes_read=0.0, bytes_written=0.0, launches=0).least_us(target.device)
    store_us = replace(apart(nest), bytes_read=0.0, bytes_written=float(stored), launches=1).least_us(target.device)
    if recompute_us > store_us:
        return (
            f"computing {nest.name} again in every block would cost {recompute_us:.3g} us, storing it {store_us:.3g} us"
        )
    return None


def _whole_product(nest: Nest, core: tuple[Axis, ...], rolled: Axis, target: Target) -> bool:
    """A product of all rows of the grid with a slice of one matrix along the rolled axis: nothing of it is computed twice, and
    where a target calls a library for it, its sum may be long."""
    operands = product_operands(nest)
    if operands is None or not target.long_products or len(nest.reduced) != 1:
        return False
    sides = [frozenset(o.axes) - frozenset(nest.reduced) for o in operands]
    return any(rows == frozenset(core) and columns == {rolled} for rows, columns in (sides, sides[::-1]))


@dataclass(frozen=True, slots=True)
class _Folds:
    folds: tuple[Fold, ...]
    conditions: tuple[str, ...]
    exceptions: tuple[str, ...]


def _derive_folds(
    graph: Graph, axis: Axis, members: Collection[Nest], inner: Collection[Nest]
) -> _Folds | tuple[str, str]:
    """Every member in the earliest pass that it can share. members, inner: with maps inlined."""
    own = {n.name: n for n in [*members, *inner]}
    ready: dict[str, int] = {}
    """The first pass in which a value may be read as finished (inner nests: computed) within the loop body."""
    folds: dict[str, Fold] = {}
    conditions: list[str] = []
    exceptions: list[str] = []
    for nest in sorted(own.values(), key=lambda n: graph.order[n.name]):
        body = nest.body
        for node in reads_in(body):
            if node.tensor in own and node.indices != own[node.tensor].axes:
                return _member_above(members, graph, nest), f"{nest.name} reads {node} at other positions than its own"
        inputs = [t for t in body.tensors if t in own]
        if nest in inner:
            # an inner nest reads folds only when they are finished
            ready[nest.name] = max((folds[t].pass_index + 1 if t in folds else ready[t] for t in inputs), default=0)
            continue
        earliest = max((folds[t].pass_index if t in folds else ready[t] for t in inputs), default=0)
        last = max((folds[t].pass_index + 1 if t in folds else ready[t] for t in inputs), default=0)
        refusals: list[str] = []
        for pass_index in range(earliest, last + 1):
            direct = [t for t in inputs if t in folds and folds[t].pass_index == pass_index]
            # a fold that is read brings those of its pass that it depends on
            unfinished = {t: f for t, f in folds.items() if f.pass_index == pass_index
                          and any(t == d or graph.depends(d, [t]) for d in direct)}  # fmt: skip
            got = (
                fold_over(nest, axis, pass_index, unfinished, graph.signs, strict=graph.strict) if unfinished else None
            )
            if isinstance(got, Refusal):
                refusals.append(got.reason)
                continue
            fold = got.fold if got is not None else plain_fold(nest, axis, pass_index)
            finished = frozenset(t for t in inputs if t not in unfinished and (t in folds or graph.depends(t, folds)))
            folds[nest.name] = replace(fold, finished_reads=finished, refusals=tuple(refusals))
            if nest.picks:
                conditions.append("a -0.0 that is taken by its index is 0.0")
            if got is not None:
                conditions.extend(got.conditions)
                exceptions.extend(got.exceptions)
            break
    return _Folds(tuple(sorted(folds.values(), key=lambda f: (f.pass_index, graph.order[f.name]))),
                  tuple(dict.fromkeys(conditions)), tuple(dict.fromkeys(exceptions)))  # fmt: skip


def _member_above(members: Collection[Nest], graph: Graph, nest: Nest) -> str:
    return next(m.name for m in reversed(tuple(members)) if m.name == nest.name or graph.depends(m.name, [nest.name]))


def _absorb(
    graph: Graph, bodies: Mapping[str, Expr], inside: frozenset[str], axes: frozenset[Axis], rolled: Axis,
    keep: frozenset[str], context: Context, target: Target, *, streams: bool,
) -> list[str]:  # fmt: skip
    """The tensors that the kernel stores: follow the maps downstream, and stop where they leave the kernel's axes.

    streams: also maps over the rolled axis that others could compute again.
    """
    absorbed: set[str] = set()
    largest = max(volume(graph.nests[n].axes) for n in inside)
    for nest in graph.nests.values():
        if nest.is_reduction or nest.name in keep or not graph.depends(nest.name, inside):
            continue
        if not streams and _is_streamed(graph, nest, rolled):
            continue
        body = bodies[nest.name]
        if body.tensors.isdisjoint(inside) or not axes.issuperset(nest.axes):
            continue
        if unsupported(nest, target, body) is not None:
            continue
        reads = reads_in(body)
        from_inside = [r for r in reads if r.tensor in inside]
        aligned = all(r.indices == graph.nests[r.tensor].axes for r in from_inside)
        foreign = any(r.tensor not in inside and graph.depends(r.tensor, inside) for r in reads)
        if not aligned or foreign:
            continue
        in_tiles = rolled in nest.axes
        expands = not any(rolled in r.indices for r in reads) if in_tiles else volume(nest.axes) > largest
        if not expands or nest.name in graph.outputs:
            absorbed.add(nest.name)
    return needed(graph, inside | (absorbed - _stored_twice(graph, inside | absorbed)), context)


def _is_streamed(graph: Graph, nest: Nest, rolled: Axis) -> bool:
    """Is a value as large as what a kernel reads tile by tile, so that others had better compute it again than read it?

    Not one that XLA stores in any case, nor one that could be told from itself.
    """
    return rolled in nest.axes and nest.name not in graph.stored and nest.name not in graph.fragile


def _stored_twice(graph: Graph, made: frozenset[str]) -> set[str]:
    """The transposes that a kernel would store although it stores their source for others, too, who can read that in any order."""
    others = [n for n in graph.nests.values() if n.name not in made]
    read = graph.outputs.union(*(n.reads for n in others))
    found = {n: graph.nests[n] for n in made - graph.outputs if _is_transpose(graph.nests[n])}
    return {name for name, nest in found.items() if not nest.reads.isdisjoint(made & read)}


# --- maps that are better stored before

# A map is inlined into the kernel that reads it. Where the map is a transpose of what lies in memory, every tile that varies along
# the kernel's grid and its rolled axis only then gathers elements that are apart. Stored by XLA beforehand, they are neighbours.


def _stored_before(graph: Graph, group: Group) -> Iterator[frozenset[str]]:
    """Yields sets of maps that a group may read from memory, instead of computing them.

    First the computed operands of its products. Then what it may read instead of strided tensors, which lies along
    the rolled axis: the transposes of these tensors, and what is stored for others anyway, should there be such maps.
    """
    again = [name for name, axes in _computed_operands(graph, group) if axes < {group.rolled, *group.parallel}]
    if again:
        yield frozenset(again)
    strided = {node.tensor for nest in group.nests
               for node in reads_in(nest.body) if _is_strided(node, group)}  # fmt: skip
    if not strided:
        return
    bodies = graph.inlined()
    behind = frozenset().union(*(graph.ancestors[f.name] for f in group.folds))
    along = {
        name: nest for name, nest in graph.nests.items()
        if name in behind and not nest.is_reduction and nest.axes[-1:] == (group.rolled,)
        and any(n.tensor in strided and n.indices[-1] != group.rolled for n in reads_in(bodies[name]))
    }  # fmt: skip
    transposed = frozenset(n for n, nest in along.items() if _is_transpose(nest) and isinstance(bodies[n], Read))
    stored = frozenset(along) & graph.outputs
    yield from dict.fromkeys(maps for maps in (transposed, stored) if maps)


def _needed_outside(graph: Graph, members: Sequence[Nest], inner: Sequence[Nest]) -> tuple[Nest, str] | None:
    """The first inner nest from which something is computed that the kernel reads and does not compute; with the reason.

    A kernel cannot wait for that: the nest is computed before, and its result is stored.
    """
    inside = {n.name for n in (*members, *inner)}
    above = frozenset[str]().union(*(graph.ancestors[n] for n in inside)) - inside
    opaque = sorted(n for n in above if n in graph.order and is_opaque(graph, n))
    for nest in inner:
        name = next((n for n in opaque if graph.depends(n, [nest.name])), None)
        if name is not None:
            return nest, f"{name} is computed outside the kernel from it"
    return None


def _computed_operands(graph: Graph, group: Group) -> Iterator[tuple[str, frozenset[Axis]]]:
    """The maps that products read, each with those of its axes that blocks or trips run over.

    A kernel computes an element of it anew for each position on the other ones, before each of its products.
    """
    own = frozenset((group.rolled, *group.parallel))
    bodies = graph.inlined()
    for nest in dict.fromkeys(n.name for n in (*(f.nest for f in group.folds), *group.inner) if product_operands(n)):
        for node in reads_in(graph.nests[nest].body):
            made = graph.nests.get(node.tensor)
            if made is not None and not made.is_reduction and any(n.axes - own for n in applied_in(bodies[made.name])):
                yield made.name, own & frozenset(node.indices)


def _is_strided(node: Read, group: Group) -> bool:
    """Does a tile of the grid and the rolled axis, without other axes, read elements that are apart?

    Operands of products have an axis that is whole inside a tile: they are not meant.
    """
    return group.rolled in node.indices[:-1] and set(node.indices) <= {group.rolled, *group.parallel}


def _is_transpose(nest: Nest) -> bool:
    """Are the elements of a nest those of one tensor, each once and in another order?"""
    body = nest.body
    return isinstance(body, Read) and body.indices != nest.axes and sorted(body.indices) == sorted(nest.axes)
