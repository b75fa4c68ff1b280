"""Moves that merge: loops with loops, reductions with the loops that compute their terms, maps with maps (rules 1, 2, 3 and 9)."""

from collections.abc import Iterator
from dataclasses import replace

from pallasfuse.errors import Refusal
from pallasfuse.ir.expr import Expr, Read, postorder, substitute
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.tree import Do, RangeLoop
from pallasfuse.schedule.block_program import BlockProgram, Path, depends, needed, replaced, without
from pallasfuse.schedule.rule import Legality, Site
from pallasfuse.schedule.space import computed


def together(first: RangeLoop, following: RangeLoop) -> RangeLoop:
    """Returns one loop of two over the same axis; what both compute is computed once."""
    return replace(first, body=(*first.body, *(x for x in following.body if x not in first.body)))


def same_trips(first: RangeLoop, following: RangeLoop) -> bool:
    """Returns whether two loops run over the same pieces of the same axis."""
    return replace(first, body=()) == replace(following, body=())


# --- rules 1 and 2: loops over the same axis


def loops_in_a_row(program: BlockProgram, path: Path) -> Iterator[Site]:
    """Yields pairs of loops of which the second one reads what the first one computes."""
    for i, j in _pairs(program, path):
        body = program.at(path)
        if depends(program, computed(body[j]) - computed(body[i]), computed(body[i])):
            yield Site(path, (i, j))


def sibling_loops(program: BlockProgram, path: Path) -> Iterator[Site]:
    """Yields pairs of loops that read the same tensor."""
    body, nests = program.at(path), program.region.by_name
    for i, j in _pairs(program, path):
        a, b = (frozenset().union(*(nests[n].reads for n in computed(body[k]))) for k in (i, j))
        if a & b:
            yield Site(path, (i, j))


def _pairs(program: BlockProgram, path: Path) -> Iterator[tuple[int, int]]:
    body = program.at(path)
    for i, first in enumerate(body):
        for j in range(i + 1, len(body)):
            second = body[j]
            if isinstance(first, RangeLoop) and isinstance(second, RangeLoop) and same_trips(first, second):
                yield i, j


def merge(program: BlockProgram, site: Site, legality: Legality) -> BlockProgram | Refusal:
    """Makes one loop of two, unless something between them depends on the first and the second on that."""
    body, (i, j) = program.at(site.path), site.nodes
    between = range(i + 1, j)
    after = [n for n in between if i in needed(program, body, [n], [i, *between])]
    if any(depends(program, computed(body[j]), computed(body[n])) for n in after):
        return Refusal("the second loop reads what is computed from all of the first one")
    return legality.legal(merged(program, site, frozenset(after)))


def merged(program: BlockProgram, site: Site, after: frozenset[int] = frozenset()) -> BlockProgram:
    """Returns the program with one loop for two. after: what stands between them and is to follow."""
    body, (i, j) = program.at(site.path), site.nodes
    first, second = body[i], body[j]
    assert isinstance(first, RangeLoop) and isinstance(second, RangeLoop)
    before, behind = ([body[n] for n in range(i + 1, j) if (n in after) == late] for late in (False, True))
    nodes = (*body[:i], *before, together(first, second), *behind, *body[j + 1 :])
    return program.with_body(site.path, nodes)


# --- rule 3: a reduction in the loop that computes its terms


def terms_and_sums(program: BlockProgram, path: Path) -> Iterator[Site]:
    """Yields loops that compute the terms of a reduction, with the loops that reduce them."""
    body, nests = program.at(path), program.region.by_name
    for j, node in enumerate(body):
        if not isinstance(node, RangeLoop) or len(computed(node)) != 1:
            continue
        nest = nests[next(iter(computed(node)))]
        if not isinstance(nest.body, Read) or nest.body.tensor not in program.terms:
            continue
        if node.axis not in {a.name for a in nest.reduced}:
            continue
        for i in range(j):
            if nest.body.tensor in computed(body[i]):
                yield Site(path, (i, j), nest.name, nest.body.tensor)


def reduce_where_computed(program: BlockProgram, site: Site, legality: Legality) -> BlockProgram | Refusal:
    """Sums terms in the loop that computes them, unless something else reads them."""
    if program.readers[site.read] != (site.nest,) or site.read in program.region.outputs:
        return Refusal(f"{site.read} is read by others than {site.nest}")
    return legality.legal(reduced_there(program, site))


def reduced_there(program: BlockProgram, site: Site) -> BlockProgram:
    """Returns the program with a reduction in the place of its terms."""
    body, (i, j) = program.at(site.path), site.nodes
    nests = program.region.by_name
    (node,) = replaced((body[i],), site.read, (Do(site.nest),))
    nodes = (*body[:i], node, *body[i + 1 : j], *body[j + 1 :])
    nest = replace(nests[site.nest], body=nests[site.read].body)
    return program.with_nests(site.path, nodes, {site.read, site.nest}, [nest])


# --- rule 9: maps of one operand


def maps_in_a_row(program: BlockProgram, path: Path) -> Iterator[Site]:
    """Yields maps of one operand, each with a map in the same body that reads nothing but it."""
    body, nests = program.at(path), program.region.by_name
    elementwise = {n: x.nest for n, x in enumerate(body) if isinstance(x, Do) and _has_one_operand(nests[x.nest])}
    for i, first in elementwise.items():
        for j, second in elementwise.items():
            if nests[second].reads == {first}:
                yield Site(path, (i, j), second, first)


def _has_one_operand(nest: Nest) -> bool:
    """Returns whether a map is a function of a single element: the one at its own position."""
    reads = {n for n in postorder(nest.body) if isinstance(n, Read)}
    return not nest.is_reduction and len(reads) == 1 and all(set(r.indices) == set(nest.axes) for r in reads)


def compose(program: BlockProgram, site: Site, legality: Legality) -> BlockProgram | Refusal:
    """Makes one map of two, unless something else reads the first."""
    if program.readers[site.read] != (site.nest,) or site.read in program.region.outputs:
        return Refusal(f"{site.read} is read by others than {site.nest}")
    return legality.legal(composed(program, site))


def composed(program: BlockProgram, site: Site) -> BlockProgram:
    """Returns the program with one map inside of another, which no longer reads it."""
    nests = program.region.by_name
    nest = replace(nests[site.nest], body=inlined(nests[site.nest], nests[site.read]))
    body = without(program.at(site.path), {site.read})
    return program.with_nests(site.path, body, {site.read, site.nest}, [nest])


def inlined(nest: Nest, operand: Nest) -> Expr:
    """Returns the body of a nest with that of a map in the place of its reads."""
    reads = [n for n in postorder(nest.body) if isinstance(n, Read) and n.tensor == operand.name]
    return substitute(nest.body, dict.fromkeys(reads, operand.body))
