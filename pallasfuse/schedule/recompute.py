"""Moves that compute again: a loop is extended over what it reads, in all of its trips or in the first one (rules 6 and 7)."""

from collections.abc import Iterator
from dataclasses import replace

from pallasfuse.errors import Refusal
from pallasfuse.ir.tree import Node, RangeLoop, walk
from pallasfuse.schedule import merging
from pallasfuse.schedule.block_program import BlockProgram, Body, Path, depends, needed
from pallasfuse.schedule.rule import Legality, Site
from pallasfuse.schedule.space import computed


def sunk(nodes: Body, loop: RangeLoop) -> RangeLoop:
    """Returns the loop with some nodes before its own, where they are computed again in every trip."""
    return replace(loop, body=(*nodes, *loop.body))


def extendable(program: BlockProgram, path: Path) -> Iterator[Site]:
    """Yields loops X that contain a loop over an axis Y, with loops over Y beside X: those first that X reads, then those that read
    an input that X reads, then those that read a nest that it reads."""
    body = program.at(path)
    inputs = {t.name for t in program.region.inputs}
    found: dict[int, list[Site]] = {0: [], 1: [], 2: []}
    for x, loop in enumerate(body):
        for y, other in enumerate(body):
            if not isinstance(loop, RangeLoop) or not isinstance(other, RangeLoop) or x == y:
                continue
            for inner in loop.body:
                if isinstance(inner, RangeLoop) and merging.same_trips(inner, other):
                    shared = _reads(program, inner) & _reads(program, other)
                    if y < x and depends(program, computed(inner), computed(other)):
                        found[0].append(Site(path, (x, y)))
                    elif shared & inputs:
                        found[1].append(Site(path, (x, y)))
                    elif shared:
                        found[2].append(Site(path, (x, y)))
    for sites in found.values():
        yield from dict.fromkeys(sites)


def _reads(program: BlockProgram, node: Node) -> frozenset[str]:
    nests = program.region.by_name
    own = computed(node)
    return frozenset().union(*(nests[n].reads for n in own)) - own


def extend(program: BlockProgram, site: Site, legality: Legality) -> BlockProgram | Refusal:
    """Moves what a loop reads into it, and the loop beside it, if one inside can then be merged with that."""
    moved = _movable(program, site)
    if isinstance(moved, Refusal):
        return moved
    found = legality.legal(extended(program, site, moved))
    return found if isinstance(found, Refusal) else _if_mergeable(program, site, found, legality)


def peel(program: BlockProgram, site: Site, legality: Legality) -> BlockProgram | Refusal:
    """Runs the first trip of a loop apart, and moves what the loop reads into that: the other trips read what it has stored."""
    moved = _movable(program, site)
    if isinstance(moved, Refusal):
        return moved
    loop = program.at(site.path)[site.nodes[0]]
    assert isinstance(loop, RangeLoop)
    nests = program.region.by_name
    if loop.begin or loop.end or any(loop.axis in {a.name for a in nests[n].reduced} for n in computed(loop)):
        return Refusal(f"the loop over {loop.axis} reduces it, or is a part already: its trips belong together")
    found = legality.legal(peeled(program, site, moved))
    return found if isinstance(found, Refusal) else _if_mergeable(program, site, found, legality)


def _movable(program: BlockProgram, site: Site) -> set[int] | Refusal:
    """Returns the numbers of the nodes that a loop is extended over: the one beside it, and what both are computed from."""
    body, (x, y) = program.at(site.path), site.nodes
    if computed(body[x]) & computed(body[y]):
        return Refusal("the loop computes it already")
    if x in needed(program, body, [y], range(y)):
        return Refusal("what stands beside the loop is computed from it")
    return needed(program, body, [x, y], range(max(x, y))) - {x}


def extended(program: BlockProgram, site: Site, moved: set[int]) -> BlockProgram:
    """Returns the program with nodes inside of a loop; those that others read, or that are results, stay where they are, too."""
    body, (x, _) = program.at(site.path), site.nodes
    loop = body[x]
    assert isinstance(loop, RangeLoop)
    inside = sunk(tuple(body[n] for n in sorted(moved)), loop)
    stay = _staying(program, site, moved)
    nodes = [inside if n == x else node for n, node in enumerate(body) if n not in moved or n in stay]
    return program.with_body(site.path, _in_order(program, tuple(nodes)))


def peeled(program: BlockProgram, site: Site, moved: set[int]) -> BlockProgram:
    """Returns the program with the first trip of a loop apart, and nodes inside of that trip."""
    body, (x, _) = program.at(site.path), site.nodes
    loop = body[x]
    assert isinstance(loop, RangeLoop)
    first = sunk(tuple(body[n] for n in sorted(moved)), replace(loop, end=1))
    nodes: list[Node] = []
    for n, node in enumerate(body):
        if n == x:
            nodes += (first, replace(loop, begin=1))
        elif n not in moved:
            nodes.append(node)
    return program.with_body(site.path, tuple(nodes))


def _staying(program: BlockProgram, site: Site, moved: set[int]) -> set[int]:
    body, (x, _) = program.at(site.path), site.nodes
    others = [n for n in range(len(body)) if n not in moved and n != x]
    read_by = frozenset().union(*(computed(body[n]) for n in others)) | _outside(program, site.path)
    wanted = [
        n
        for n in moved
        if depends(program, read_by - computed(body[n]), computed(body[n]))
        or computed(body[n]) & set(program.region.outputs)
    ]
    return needed(program, body, wanted, sorted(moved))


def _outside(program: BlockProgram, path: Path) -> frozenset[str]:
    """Returns the nests that are computed elsewhere than in the body at a place."""
    here = frozenset().union(*(computed(n) for n in program.at(path)))
    return frozenset(program.region.by_name) - here


def _in_order(program: BlockProgram, body: Body) -> Body:
    """Returns nodes in an order in which each follows what it reads."""
    waiting, found = list(body), []
    while waiting:
        free = next((n for n in waiting if not any(
            m is not n and depends(program, computed(n) - computed(m), computed(m) - computed(n)) for m in waiting
        )), waiting[0])  # fmt: skip
        waiting.remove(free)
        found.append(free)
    return tuple(found)


def _if_mergeable(program: BlockProgram, site: Site, found: BlockProgram, legality: Legality) -> BlockProgram | Refusal:
    """Returns the program if the loop that was moved merges with one beside it now, or why it does not."""
    other = program.at(site.path)[site.nodes[1]]
    reason = Refusal("nothing can be merged after it")
    for n, node in enumerate(found.at(site.path)):
        if not isinstance(node, RangeLoop) or other not in node.body:
            continue
        path = (*site.path, n)
        for pair in (*merging.loops_in_a_row(found, path), *merging.sibling_loops(found, path)):
            if found.at(path)[pair.nodes[0]] == other or found.at(path)[pair.nodes[1]] == other:
                after = merging.merge(found, pair, legality)
                if not isinstance(after, Refusal):
                    return found
                reason = after
    return reason


def trips_of(before: BlockProgram, after: BlockProgram) -> tuple[str, ...]:
    """Returns the axes in whose loops nests are computed again that were not before."""
    own = {n.name: {a.name for a in (*n.axes, *n.reduced)} for n in after.region.nests}

    def again(program: BlockProgram) -> set[tuple[str, str]]:
        return {
            (x.axis, name) for around, node in walk(program.body) if not isinstance(node, RangeLoop)
            for name in computed(node) for x in around if x.axis not in own[name]
        }  # fmt: skip

    return tuple(sorted({axis for axis, _ in again(after) - again(before)}))
