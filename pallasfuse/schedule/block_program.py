"""Block programs: nests of a region and the loops around them, from one group of loops for each nest on (Blockbuster, section 2).

Every node of the outermost body is a kernel; between kernels tensors are in global memory. What a kernel reads in other loops than
those that compute it is kept in global memory, too: `kernels` says so in the trees that it returns.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import read
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.region import Region, is_reduced
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tree import Do, Keep, Node, RangeLoop, TreeKernel, walk
from pallasfuse.schedule.folds import with_inlined_maps
from pallasfuse.schedule.placement import Broken, MayFold, no_folds, place
from pallasfuse.schedule.space import computed

Body = tuple[Node, ...]
Path = tuple[int, ...]
"""The place of a body: the number of the node in the outermost body, of the one in its body, and so on."""


@dataclass(frozen=True)
class BlockProgram:
    """A region, and a body that computes all of it."""

    region: Region
    body: Body
    terms: frozenset[str] = frozenset()
    """The maps that are the terms of reductions, not summed yet."""
    conditions: tuple[str, ...] = ()
    """The ways in which it rounds otherwise than the program that it was made of."""

    @cached_property
    def readers(self) -> dict[str, tuple[str, ...]]:
        """The nests that read each tensor, by its name."""
        found: dict[str, list[str]] = {}
        for nest in self.region.nests:
            for name in nest.reads:
                found.setdefault(name, []).append(nest.name)
        return {name: tuple(by) for name, by in found.items()}

    def at(self, path: Path) -> Body:
        """Returns the body at a place."""
        body = self.body
        for n in path:
            node = body[n]
            assert isinstance(node, RangeLoop)
            body = node.body
        return body

    def around(self, path: Path) -> tuple[RangeLoop, ...]:
        """Returns the loops around the body at a place, the outermost first."""
        loops, body = [], self.body
        for n in path:
            node = body[n]
            assert isinstance(node, RangeLoop)
            loops.append(node)
            body = node.body
        return tuple(loops)

    def with_body(self, path: Path, body: Body) -> "BlockProgram":
        """Returns the program with another body at a place."""

        def rewritten(of: Body, rest: Path) -> Body:
            if not rest:
                return body
            node = of[rest[0]]
            assert isinstance(node, RangeLoop)
            inside = replace(node, body=rewritten(node.body, rest[1:]))
            return (*of[: rest[0]], inside, *of[rest[0] + 1 :])

        return replace(self, body=rewritten(self.body, path))

    def with_nests(self, path: Path, body: Body, removed: Collection[str], added: Collection[Nest]) -> "BlockProgram":
        """Returns the program with another body at a place, and other nests for some of the region's."""
        nests = ordered([*(n for n in self.region.nests if n.name not in removed), *added])
        return replace(self.with_body(path, body), region=replace(self.region, nests=nests))

    def __str__(self) -> str:
        return "\n".join(str(kernel.tree) for kernel in kernels(self))


def ordered(nests: Collection[Nest]) -> tuple[Nest, ...]:
    """Returns nests in an order that respects their reads, and changes theirs as little as possible."""
    waiting, names = list(nests), {n.name for n in nests}
    found: list[Nest] = []
    known: set[str] = set()
    while waiting:
        nest = next(n for n in waiting if n.reads & names <= known)
        waiting.remove(nest)
        found.append(nest)
        known.add(nest.name)
    return tuple(found)


# --- the beginning: each nest its own loops


def with_terms(region: Region) -> Region:
    """Returns the region with a map for the terms of each reduction: its own nest before they are summed."""
    nests: list[Nest] = []
    for nest in region.nests:
        if not nest.is_reduction:
            nests.append(nest)
            continue
        axes = (*nest.axes, *nest.reduced)
        terms = Nest(terms_of(nest.name), axes, nest.body, nest.body.dtype, source=nest.source)
        nests += (terms, replace(nest, body=read(terms.name, axes, terms.dtype)))
    return replace(region, nests=tuple(nests))


def terms_of(reduction: str) -> str:
    """Returns the name of the map with the terms of a reduction."""
    return f"{reduction}_terms"


def unfused(region: Region) -> BlockProgram:
    """Returns the region with loops for each of its nests alone: over its axes, then over those that it reduces."""
    return BlockProgram(region, tuple(loops_around(region, nest, (), (Do(nest.name),)) for nest in region.nests))


def operators(region: Region) -> BlockProgram:
    """Returns the program that rules begin with: as unfused, but that a reduction follows its terms inside of common loops."""
    apart = with_terms(region)
    body: list[Node] = []
    for nest in region.nests:
        inside: Body = (Do(nest.name),)
        if nest.is_reduction:
            inside = tuple(_looped(nest.reduced, (Do(name),)) for name in (terms_of(nest.name), nest.name))
        for axis in reversed(_kept(region, nest)):
            inside = (RangeLoop(axis.name, 1, inside),)
        body += inside
    return BlockProgram(apart, tuple(body), frozenset(terms_of(n.name) for n in region.nests if n.is_reduction))


def loops_around(region: Region, nest: Nest, open_axes: Collection[str], inside: Body) -> Node:
    """Returns the loops over the axes of a nest that are not open, around a body of one node."""
    left = [a for a in (*_kept(region, nest), *nest.reduced) if a.name not in open_axes]
    return _looped(left, inside)


def _looped(axes: Collection[Axis], inside: Body) -> Node:
    for axis in reversed(tuple(axes)):
        inside = (RangeLoop(axis.name, 1, inside),)
    (node,) = inside
    return node


def _kept(region: Region, nest: Nest) -> list[Axis]:
    """Returns the axes that a nest keeps: those that no nest reduces first, in the order of the region."""
    order = {name: n for n, name in enumerate(region.axes)}
    return sorted(nest.axes, key=lambda a: (is_reduced(region, a), order[a.name]))


# --- what depends on what


def depends(program: BlockProgram, later: Collection[str], earlier: Collection[str]) -> bool:
    """Returns whether one of some nests reads one of others."""
    names = program.region.by_name
    return any(names[n].reads & set(earlier) for n in later)


def needed(program: BlockProgram, body: Body, by: Collection[int], among: Collection[int]) -> set[int]:
    """Returns the numbers of the nodes of a body from which some of them are computed, directly or not, those included."""
    found = set(by)
    waiting = list(by)
    while waiting:
        n = waiting.pop()
        for m in among:
            if m < n and m not in found and depends(program, computed(body[n]), computed(body[m])):
                found.add(m)
                waiting.append(m)
    return found


def without(body: Body, names: Collection[str]) -> Body:
    """Returns the body without some nests, and without the loops that held nothing else."""
    found: list[Node] = []
    for node in body:
        if isinstance(node, RangeLoop):
            inside = without(node.body, names)
            if inside:
                found.append(replace(node, body=inside))
        elif not (isinstance(node, Do) and node.nest in names):
            found.append(node)
    return tuple(found)


def replaced(body: Body, nest: str, by: Body) -> Body:
    """Returns the body with other nodes in the place of a nest."""
    found: list[Node] = []
    for node in body:
        if isinstance(node, RangeLoop):
            found.append(replace(node, body=replaced(node.body, nest, by)))
        else:
            found += by if node == Do(nest) else (node,)
    return tuple(found)


# --- kernels


@dataclass(frozen=True, slots=True)
class BlockKernel:
    """One kernel of a block program: the nests that it computes, what it reads and stores, and its tree."""

    region: Region
    tree: TreeKernel


def kernels(program: BlockProgram) -> tuple[BlockKernel, ...]:
    """Returns the kernels of a program in launch order: blocks run the outermost loops over axes that nothing in them reduces."""
    inside = [computed(node) for node in program.body]
    return tuple(_kernel(program, number, inside) for number in range(len(inside)))


def _kernel(program: BlockProgram, number: int, inside: list[frozenset[str]]) -> BlockKernel:
    region, own, node = program.region, inside[number], program.body[number]
    named = region.by_name
    others = {r for n in inside[number + 1 :] for name in n for r in named[name].reads - n}
    nests = tuple(n for n in region.nests if n.name in own)
    made = tuple(
        Tensor(n.name, n.axes, n.dtype)
        for n in region.nests
        if n.name not in own and any(n.name in named[x].reads for x in own)
    )
    read_here = {r for n in nests for r in n.reads}
    inputs = (*(t for t in region.inputs if t.name in read_here), *made)
    earlier = frozenset[str]().union(*inside[:number]) - _in_parts((node,))
    outputs = tuple(n.name for n in nests if (n.name in others or n.name in region.outputs) and n.name not in earlier)
    part = Region(nests, inputs, outputs)
    body = _with_buffers(part, (node,))
    return BlockKernel(part, TreeKernel(f"kernel{number}", _blocks(part, body)))


def _blocks(region: Region, body: Body) -> Body:
    """Makes the outermost loops that stand alone, over axes that no nest reduces, those of the grid."""
    if len(body) != 1 or not isinstance(body[0], RangeLoop) or is_reduced(region, region.axes[body[0].axis]):
        return body
    return (replace(body[0], level="grid", body=_blocks(region, body[0].body)),)


def _with_buffers(region: Region, body: Body) -> Body:
    """Puts before what it is read by a buffer in global memory of each nest whose values end with the loops around them."""
    named = region.by_name
    kept: dict[Path, dict[str, None]] = {}

    def visit(of: Body, path: Path, visible: dict[str, Path], made: dict[str, Path]) -> None:
        """visible: where values are read from registers; made: the bodies in which the others were computed."""
        for n, node in enumerate(of):
            if isinstance(node, RangeLoop):
                inner = dict(visible)
                visit(node.body, (*path, n), inner, made)
                visible |= {name: at for name, at in inner.items() if at == path[: len(at)]}
            elif isinstance(node, Do):
                for name in sorted(named[node.nest].reads & named.keys()):
                    if name not in visible and name in made:
                        common = _common(path, made[name])
                        kept.setdefault(common, {})[name] = None
                visible[node.nest] = made[node.nest] = _lives_in(region, named[node.nest], body, path)

    visit(body, (), {}, {})
    return _kept_at(body, (), kept)


def _lives_in(region: Region, nest: Nest, body: Body, path: Path) -> Path:
    """Returns the place of the body in which the values of a nest that is computed at a place can be read."""
    reduced = {a.name for a in nest.reduced}
    for depth, n in enumerate(path):
        node = body[n]
        assert isinstance(node, RangeLoop)
        if node.axis in reduced:
            return path[:depth]
        body = node.body
    return path


def _common(a: Path, b: Path) -> Path:
    count = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:count]


def _kept_at(
    body: Body, path: Path, kept: dict[Path, dict[str, None]], already: frozenset[str] = frozenset()
) -> Body:  # fmt: skip
    """Puts buffers at their places, unless there is one in a body around."""
    here = [name for name in kept.get(path, ()) if name not in already]
    every = already | frozenset(here)
    inside = tuple(
        replace(n, body=_kept_at(n.body, (*path, i), kept, every)) if isinstance(n, RangeLoop) else n
        for i, n in enumerate(body)
    )
    return (*(Keep(name, "global") for name in here), *inside)


def with_maps_inlined(kernel: BlockKernel) -> BlockKernel:
    """Returns a kernel whose maps that it does not store are computed by their readers, each in its own body."""
    region = with_inlined_maps(kernel.region)
    gone = kernel.region.by_name.keys() - region.by_name.keys()
    return BlockKernel(region, replace(kernel.tree, body=without(kernel.tree.body, gone)))


def problem(program: BlockProgram, may_fold: MayFold = no_folds) -> Broken | None:
    """Returns the rule of legal trees that a program breaks, if it does."""
    for kernel in kernels(program):
        found = place(kernel.region, kernel.tree, may_fold)
        if isinstance(found, Broken):
            return found
    return _left_out(program)


def _left_out(program: BlockProgram) -> Broken | None:
    """Returns the rule that a program breaks whose loops over parts of an axis do not cover all of it together."""
    parts: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for around, node in walk(program.body):
        if isinstance(node, Do):
            for axis in program.region.by_name[node.nest].axes:
                loop = next((x for x in around if x.axis == axis.name), None)
                part = (0, inf) if loop is None else (loop.begin, loop.end or inf)
                parts.setdefault((node.nest, axis.name), []).append(part)
    for (name, along), found in parts.items():
        at: float = 0
        for begin, end in sorted(found):
            at = max(at, end) if begin <= at else at
        if at < inf:
            return Broken(13, f"{name} is computed for a part of the tiles of {along} only")
    return None


def _in_parts(body: Body) -> frozenset[str]:
    """Returns the nests that are computed in loops that leave out tiles."""
    found = (n.nest for around, n in walk(body) if isinstance(n, Do) and any(x.begin or x.end for x in around))
    return frozenset(found)


def recomputed(program: BlockProgram) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the nests that are computed again in trips of loops over axes that they do not have, with these axes."""
    named = program.region.by_name
    for around, node in walk(program.body):
        if isinstance(node, Do):
            own = {a.name for a in (*named[node.nest].axes, *named[node.nest].reduced)}
            again = tuple(x.axis for x in around if x.axis not in own and x.end != x.begin + 1)
            if again:
                yield node.nest, again
