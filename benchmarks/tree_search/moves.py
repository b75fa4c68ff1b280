"""Neighbours in a space of trees: those that are one move away, which orders, merges, parts, sinks or binds loops at one place.

Merging and sinking are what rules of block programs do (`pallasfuse.schedule.rules`), here without their conditions: not every
result is legal or worth anything, and neighbours are those whose canonical form the space has.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pallasfuse.ir.region import Region, spatial_axes
from pallasfuse.ir.tree import Do, Node, RangeLoop, TreeKernel
from pallasfuse.schedule import merging, recompute
from pallasfuse.schedule.candidates import Candidate, Space
from pallasfuse.schedule.placement import Broken, place
from pallasfuse.schedule.space import Signature, canonical, computed, signature

Body = tuple[Node, ...]


def moved(region: Region, tree: TreeKernel) -> Iterator[TreeKernel]:
    """Yields the trees that are one move away, legal or not. What does not depend on a serial loop is taken out of it."""
    for body in (*_moved(region, tree.body), *_bound(region, tree.body)):
        yield replace(tree, body=_hoisted(region, body))


def _moved(region: Region, body: Body) -> Iterator[Body]:
    for n, node in enumerate(body):
        before, after = body[:n], body[n + 1 :]
        if isinstance(node, RangeLoop):
            for inside in _moved(region, node.body):
                yield (*before, replace(node, body=inside), *after)
            for nodes in (*_ordered(node), *_parted(region, node), *_raised(node)):
                yield (*before, *nodes, *after)
        if after:
            for nodes in (*_merged(node, after[0]), *_sunk(node, after[0])):
                yield (*before, *nodes, *after[1:])


def _ordered(loop: RangeLoop) -> Iterator[Body]:
    """Exchanges a loop with the only one inside of it."""
    if len(loop.body) == 1 and isinstance(loop.body[0], RangeLoop):
        inner = loop.body[0]
        yield (replace(inner, body=(replace(loop, body=inner.body),)),)


def _parted(region: Region, loop: RangeLoop) -> Iterator[Body]:
    """Takes a loop apart into two; the second one computes again what it needs of the first."""
    for n in range(1, len(loop.body)):
        first, second = loop.body[:n], loop.body[n:]
        needed = [x for x in first if _is_needed(region, x, second)]
        for body in (second, (*needed, *second)) if needed else (second,):
            apart = replace(loop, body=first)
            yield (apart, replace(loop, body=body))
            for inner in _ordered(apart):
                yield (*inner, replace(loop, body=body))


def _is_needed(region: Region, node: Node, by: Body) -> bool:
    reads = {r for x in by for name in computed(x) for r in region.by_name[name].reads}
    return bool(computed(node) & reads)


def _merged(node: Node, following: Node) -> Iterator[Body]:
    """Makes one loop of two over the same axis, once the first is the outer one; what both compute is computed once."""
    if isinstance(node, RangeLoop) and isinstance(following, RangeLoop):
        for first in (node, *(n for nodes in _ordered(node) for n in nodes)):
            if isinstance(first, RangeLoop) and first.axis == following.axis:
                yield (merging.together(first, following),)


def _sunk(node: Node, following: Node) -> Iterator[Body]:
    """Moves a node into the loop that follows, where it is computed again in every trip."""
    if isinstance(following, RangeLoop):
        yield (recompute.sunk((node,), following),)


def _raised(loop: RangeLoop) -> Iterator[Body]:
    """Moves the first node of a loop before the loop."""
    if len(loop.body) > 1:
        yield (loop.body[0], replace(loop, body=loop.body[1:]))


def _hoisted(region: Region, body: Body) -> Body:
    """Puts before each serial loop what computes the same in all of its trips."""
    found: list[Node] = []
    for node in body:
        if not isinstance(node, RangeLoop):
            found.append(node)
            continue
        stay: list[Node] = []
        for inner in _hoisted(region, node.body):
            names = computed(inner)
            depends = any(
                node.axis in {a.name for a in (*n.axes, *n.reduced)} for n in map(region.by_name.get, names) if n
            )
            if node.level != "serial" or depends or any(_is_needed(region, x, (inner,)) for x in stay):
                stay.append(inner)
            else:
                found.append(inner)
        found.append(replace(node, body=tuple(stay)))
    return tuple(found)


def _bound(region: Region, body: Body) -> Iterator[Body]:
    """Makes a spatial loop one of the grid, or one of the grid a serial loop around each nest that has its axis."""
    for axis in spatial_axes(region):
        loops = _loops(body, axis.name)
        if any(loop.level == "grid" for loop in loops):
            own = {n.name for n in region.nests if axis in n.axes}
            yield _wrapped(_without(body, axis.name), axis.name, own)
        elif loops:
            yield (RangeLoop(axis.name, loops[0].size, _without(body, axis.name), "grid"),)


def _loops(body: Body, axis: str) -> list[RangeLoop]:
    found = []
    for node in body:
        if isinstance(node, RangeLoop):
            found += [node] * (node.axis == axis) + _loops(node.body, axis)
    return found


def _without(body: Body, axis: str) -> Body:
    found: list[Node] = []
    for node in body:
        if isinstance(node, RangeLoop):
            inside = _without(node.body, axis)
            found += inside if node.axis == axis else (replace(node, body=inside),)
        else:
            found.append(node)
    return tuple(found)


def _wrapped(body: Body, axis: str, nests: set[str]) -> Body:
    return tuple(
        replace(n, body=_wrapped(n.body, axis, nests)) if isinstance(n, RangeLoop)
        else RangeLoop(axis, 1, (n,)) if isinstance(n, Do) and n.nest in nests else n
        for n in body
    )  # fmt: skip


@dataclass
class Neighbours:
    """The candidates of a space that are one step away: another size of one tile, or one move of the tree."""

    space: Space
    _numbers: dict[Signature, int] | None = None
    _trees: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def trees(self, number: int) -> tuple[int, ...]:
        """Returns the numbers of the trees that are one move away from a tree."""
        if number not in self._trees:
            region, fold = self.space.region, self.space.may_fold
            if self._numbers is None:
                self._numbers = {}
                for n, tree in enumerate(self.space.trees):
                    placement = place(region, tree, fold)
                    if not isinstance(placement, Broken):
                        self._numbers[signature(placement)] = n
            found: set[int] = set()
            for tree in {canonical(region, t) for t in moved(region, self.space.trees[number])}:
                placement = place(region, tree, fold)
                if not isinstance(placement, Broken):
                    found.add(self._numbers.get(signature(placement), number))
            self._trees[number] = tuple(sorted(found - {number}))
        return self._trees[number]

    def of(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yields the neighbours of a candidate."""
        for tree in self.trees(candidate.tree):
            yield candidate._replace(tree=tree)
        for n, sizes in enumerate(self.space.choices.values()):
            for size in sizes:
                if size != candidate.sizes[n]:
                    yield candidate._replace(sizes=(*candidate.sizes[:n], size, *candidate.sizes[n + 1 :]))
