"""All trees of a region, each once: loops over its axes in every order, merged or apart, with nests recomputed where that may help.

A tree of the space has a loop over every axis of a nest around it, each axis at most once on a path; `tiled` gives these loops
their sizes. Spatial axes are loops of the grid, or serial ones. Bodies are built from what they have to compute, their *goals*:
first the nests that are computed in this very body besides, then loops and nests in every order that reads allow. A nest that is
read in a loop and was not computed before is computed again there.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from operator import is_

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.region import Region, independent_axes, spatial_axes
from pallasfuse.ir.tree import Do, Node, RangeLoop, TreeKernel, walk
from pallasfuse.schedule.placement import Broken, MayFold, Placement, no_folds, place

Body = tuple[Node, ...]


def trees(region: Region, may_fold: MayFold = no_folds, *, most: int | None = None) -> tuple[TreeKernel, ...]:
    """Returns every legal tree once, in its canonical form, with tiles of one position. most: where to stop.

    Trees that compute what nothing reads are left out.
    """
    found: dict[Signature, TreeKernel] = {}
    for tree in dict.fromkeys(canonical(region, t) for t in all_trees(region, may_fold)):
        placement = place(region, tree, may_fold)
        if not isinstance(placement, Broken) and not placement.unread:
            found.setdefault(signature(placement), tree)
            if len(found) == most:
                break
    return tuple(found.values())


class TooManyTrees(Exception):
    """A space has more bodies than were asked for."""


def all_trees(region: Region, may_fold: MayFold = no_folds, *, most_bodies: int | None = None) -> Iterator[TreeKernel]:
    """Yields every tree that can be built: equal ones too, and some that compute what nothing reads.

    Args:
      most_bodies: of loops and blocks, that may be built before the trees of one grid are known.

    Raises:
      TooManyTrees: there are more.
    """
    spatial = spatial_axes(region)
    always = {*independent_axes(region), *(a for a in spatial if all(a in n.axes for n in region.nests))}
    free = [a for a in spatial if a not in always]
    for count in range(len(free), -1, -1):
        for chosen in combinations(free, count):
            grid = [a.name for a in spatial if a in always or a in chosen]
            if spatial and not grid:
                continue
            for body in _Builder(region, may_fold, most_bodies).bodies(
                frozenset(region.outputs), _Scope(frozenset(grid))
            ):
                yield TreeKernel("kernel", _rebuilt([RangeLoop(axis, 1, (), "grid") for axis in grid], body))


Dropped = dict[tuple[TreeKernel, tuple[str, ...]], tuple[str, ...]]
"""The axes whose loops are left out, by tree and by the axes whose serial loops run once. No size but that decides it."""


def tiled(
    region: Region, tree: TreeKernel, sizes: Mapping[str, int], may_fold: MayFold = no_folds,
    dropped: Dropped | None = None,
) -> TreeKernel:  # fmt: skip
    """Returns the tree with tiles of these sizes, without the serial loops that then run once.

    One stays where it holds values together that later loops read piece by piece: the tree would not be legal without it.
    dropped: of the same region and `may_fold`; grows.
    """

    def sized(body: Body) -> Body:
        return tuple(
            replace(n, size=sizes.get(n.axis, n.size), body=sized(n.body)) if isinstance(n, RangeLoop) else n
            for n in body
        )

    result = replace(tree, body=sized(tree.body))
    loops = [n for _, n in walk(result.body) if isinstance(n, RangeLoop) and n.level == "serial"]
    once = tuple(dict.fromkeys(n.axis for n in loops if n.size >= region.axes[n.axis].extent))
    if not once:
        return result
    known = {} if dropped is None else dropped
    if (tree, once) not in known:
        known[tree, once], shorter = _dropped(region, result, once, may_fold)
        return shorter  # the object whose places were just found
    axes = known[tree, once]
    return replace(result, body=without_loops(result.body, axes)) if axes else result


def _dropped(
    region: Region, tree: TreeKernel, once: tuple[str, ...], may_fold: MayFold
) -> tuple[tuple[str, ...], TreeKernel]:
    """The axes, of those whose serial loops run once, whose loops the tree stays legal without, and the tree without them."""
    found: tuple[str, ...] = ()
    for axes in (once, *((axis,) for axis in once)):
        shorter = replace(tree, body=without_loops(tree.body, axes))
        if shorter != tree and not isinstance(place(region, shorter, may_fold), Broken):
            tree, found = shorter, (*found, *axes)
    return found, tree


def without_loops(body: Body, axes: Collection[str]) -> Body:
    """Returns the body without the serial loops over some axes; what was inside of them takes their place."""
    found: list[Node] = []
    for node in body:
        if isinstance(node, RangeLoop):
            inside = without_loops(node.body, axes)
            dropped = node.axis in axes and node.level == "serial"
            found += inside if dropped else (_with_body(node, inside),)
        else:
            found.append(node)
    return tuple(found)


def _with_body(loop: RangeLoop, body: Body) -> RangeLoop:
    """The loop around another body: the same object where that is no other one."""
    same = len(body) == len(loop.body) and all(map(is_, body, loop.body))
    return loop if same else replace(loop, body=body)


# --- canonical form


def canonical(region: Region, tree: TreeKernel) -> TreeKernel:
    """Returns the one form of all trees that are equal for each block.

    Loops of the grid are sorted by axis, since their order only numbers the blocks, and a spatial loop around all that a block
    does is one of them; what is independent in a body, so that it may run in any order, has the order of the region's nests.
    """
    grid, inside = _split_grid(tree.body)
    order = {name: n for n, name in enumerate(region.axes)}
    spatial = {a.name for a in spatial_axes(region)} - {x.axis for x in grid}
    while (
        len(inside) == 1
        and isinstance(inside[0], RangeLoop)
        and inside[0].axis in spatial
        and inside[0].level == "serial"
    ):
        grid.append(replace(inside[0], level="grid"))
        spatial.remove(inside[0].axis)
        inside = inside[0].body
    body = _sorted(region, inside)
    for loop in sorted(grid, key=lambda x: order[x.axis], reverse=True):
        body = (replace(loop, body=body),)
    return replace(tree, body=body)


Signature = tuple[object, ...]


def signature(placement: Placement) -> Signature:
    """Returns what two trees have in common that run the same statements with the same windows in the same loops.

    A loop is told by its axis and by the statements inside of it: which of two loops around the same statements is the outer one
    does not count, unless it moves a load or a buffer.
    """
    inside: dict[int, tuple[str, str, list[int]]] = {}
    for n, statement in enumerate(placement.statements):
        for number, loop in zip(statement.numbers, statement.around, strict=True):
            inside.setdefault(number, (loop.axis, loop.level, []))[2].append(n)
    return (
        tuple((s.kind, s.name, s.axes) for s in placement.statements),
        frozenset((axis, level, tuple(numbers)) for axis, level, numbers in inside.values()),
        tuple((b.name, _cut(b.axes, b.around), frozenset(x.axis for x in b.indexed_by)) for b in placement.buffers),
    )


def _cut(axes: Iterable[Axis], around: Iterable[RangeLoop]) -> frozenset[str]:
    return frozenset(a.name for a in axes) & frozenset(loop.axis for loop in around)


def _split_grid(body: Body) -> tuple[list[RangeLoop], Body]:
    grid: list[RangeLoop] = []
    while len(body) == 1 and isinstance(body[0], RangeLoop) and body[0].level == "grid":
        grid.append(body[0])
        body = body[0].body
    axes = [x.axis for x in grid]
    return (grid, body) if len(set(axes)) == len(axes) else ([], _rebuilt(grid, body))


def _rebuilt(grid: list[RangeLoop], body: Body) -> Body:
    for loop in reversed(grid):
        body = (replace(loop, body=body),)
    return body


def computed(node: Node) -> frozenset[str]:
    """Returns the nests that are computed somewhere inside of a node."""
    return frozenset(n.nest for _, n in walk((node,)) if isinstance(n, Do))


def _sorted(region: Region, body: Body) -> Body:
    """Puts the nodes of bodies in the first order, by the region's nests, that keeps each after those that it depends on."""
    order = {n.name: i for i, n in enumerate(region.nests)}
    waiting = [replace(n, body=_sorted(region, n.body)) if isinstance(n, RangeLoop) else n for n in body]
    if not all(isinstance(n, Do | RangeLoop) for n in waiting):
        return tuple(waiting)
    inside = {id(n): computed(n) for n in waiting}
    done: list[Node] = []
    while waiting:
        free = [
            n
            for i, n in enumerate(waiting)
            if not any(_depends(region, inside[id(n)], inside[id(m)]) for m in waiting[:i])
        ]
        first = (
            free[0] if len(free) == 1 else min(free, key=lambda n: (sorted(order[x] for x in inside[id(n)]), str(n)))
        )
        done.append(first)
        waiting = [n for n in waiting if n is not first]
    return tuple(done)


def _depends(region: Region, later: frozenset[str], earlier: frozenset[str]) -> bool:
    """Returns whether two nodes must keep their order: one reads what the other computes, or both compute the same."""
    return bool(later & earlier) or any(
        (region.by_name[a].reads & earlier) or a in region.by_name[b].reads for a in later for b in earlier
    )


# --- all bodies


@dataclass(frozen=True, slots=True)
class _Scope:
    """Where a body stands: what is open, and what can be read."""

    open: frozenset[str]
    """Axes of the loops around."""
    done: frozenset[str] = frozenset()
    """Nests that are finished and can be read."""
    running: frozenset[str] = frozenset()
    """Nests of this trip that are not finished."""
    last: str | None = None
    """The axis of the innermost serial loop."""


@dataclass(slots=True)
class _Builder:
    region: Region
    may_fold: MayFold
    most: int | None = None
    built: int = 0
    nests: Mapping[str, Nest] = field(init=False)
    axes: dict[str, frozenset[str]] = field(init=False)
    reduced: dict[str, frozenset[str]] = field(init=False)
    reads: dict[str, frozenset[str]] = field(init=False)
    memo: dict[tuple[frozenset[str], _Scope], tuple[Body, ...]] = field(default_factory=dict)
    nodes: dict[tuple[object, ...], Node] = field(default_factory=dict)
    """Every node that was built, once: equal ones are the same object, so that bodies are compared without their insides."""
    same: dict[tuple[int, ...], Body] = field(default_factory=dict)
    inside: dict[int, frozenset[str]] = field(default_factory=dict)
    """The nests that are computed in a node, by its identity."""

    def __post_init__(self) -> None:
        self.nests = self.region.by_name
        self.axes = {n.name: frozenset(a.name for a in (*n.axes, *n.reduced)) for n in self.region.nests}
        self.reduced = {n.name: frozenset(a.name for a in n.reduced) for n in self.region.nests}
        self.reads = {n.name: n.reads & frozenset(self.nests) for n in self.region.nests}

    def bodies(self, goals: frozenset[str], scope: _Scope) -> tuple[Body, ...]:
        """Returns every body that computes its goals."""
        key = (goals, scope)
        if key not in self.memo:
            found: dict[tuple[int, ...], Body] = {}
            for extra in self._extras(goals, scope):
                for body in self._ordered(goals | extra, goals, scope, scope.done):
                    self.built += 1
                    if self.most is not None and self.built > self.most:
                        raise TooManyTrees
                    name = tuple(map(id, body))
                    found.setdefault(name, self.same.setdefault(name, body))
            self.memo[key] = tuple(found.values())
        return self.memo[key]

    def _do(self, name: str) -> Node:
        key = (name,)
        if key not in self.nodes:
            node = self.nodes[key] = Do(name)
            self.inside[id(node)] = frozenset(key)
        return self.nodes[key]

    def _loop(self, axis: str, body: Body) -> Node:
        key = axis, id(body)
        if key not in self.nodes:
            node = self.nodes[key] = RangeLoop(axis, 1, body)
            self.inside[id(node)] = frozenset().union(*(self.inside[id(n)] for n in body))
        return self.nodes[key]

    def _extras(self, goals: frozenset[str], scope: _Scope) -> Iterator[frozenset[str]]:
        """Yields the sets of nests that may be computed in this body to be read by others of it."""
        missing = self._missing(goals, scope.done | scope.running) - goals
        possible = [n for n in self.nests if n in missing and not self.reduced[n] & scope.open]
        for count in range(len(possible) + 1):
            for chosen in combinations(possible, count):
                extra = frozenset(chosen)
                if all(any(e in self.reads[n] for n in extra | goals | self._missing(goals, extra)) for e in extra):
                    yield extra

    def _missing(self, goals: Iterable[str], known: frozenset[str]) -> frozenset[str]:
        """Returns everything that goals read, directly or not, and that is not known."""
        found: set[str] = set()
        waiting = list(goals)
        while waiting:
            for read in self.reads[waiting.pop()]:
                if read not in found and read not in known:
                    found.add(read)
                    waiting.append(read)
        return frozenset(found)

    def _ordered(
        self, left: frozenset[str], goals: frozenset[str], scope: _Scope, outside: frozenset[str]
    ) -> Iterator[Body]:
        """Yields the rest of a body. outside: what could be read before the loop that the body belongs to."""
        if not left:
            yield ()
            return
        for name in sorted(left):
            if self.axes[name] <= scope.open and self._readable(name, scope):
                if self._hoistable((name,), scope, outside):
                    continue
                for rest in self._ordered(left - {name}, goals, self._after(scope, frozenset((name,))), outside):
                    yield (self._do(name), *rest)
        for axis in sorted(frozenset().union(*(self.axes[n] for n in left)) - scope.open):
            possible = [n for n in sorted(left) if axis in self.axes[n] and self._may_loop(n, axis, n in goals, scope)]
            for count in range(1, len(possible) + 1):
                for chosen in combinations(possible, count):
                    yield from self._looped(axis, frozenset(chosen), left, goals, scope, outside)

    def _may_loop(self, name: str, axis: str, is_goal: bool, scope: _Scope) -> bool:
        """Returns whether a nest that is computed in a loop over an axis is of use after it."""
        lives_on = axis in self.reduced[name] or bool(self.reduced[name] & scope.open)
        return lives_on or (is_goal and name in self.region.outputs)

    def _looped(
        self, axis: str, chosen: frozenset[str], left: frozenset[str], goals: frozenset[str], scope: _Scope,
        outside: frozenset[str],
    ) -> Iterator[Body]:  # fmt: skip
        inner = _Scope(scope.open | {axis}, scope.done, scope.running, axis)
        for body in self.bodies(chosen, inner):
            loop = self._loop(axis, body)
            if self._hoistable(self.inside[id(loop)], scope, outside):
                continue
            lives = frozenset(n for n in chosen if axis in self.reduced[n] or self.reduced[n] & scope.open)
            for rest in self._ordered(left - chosen, goals, self._after(scope, lives), outside):
                yield (loop, *rest)

    def _after(self, scope: _Scope, names: frozenset[str]) -> _Scope:
        """Returns the scope after some nests whose values can be read there, finished or not."""
        running = frozenset(n for n in names if self.reduced[n] & scope.open)
        return _Scope(scope.open, scope.done | (names - running), scope.running | running, scope.last)

    def _readable(self, name: str, scope: _Scope) -> bool:
        missing = self.reads[name] - scope.done
        if not missing:
            return True
        if not missing <= scope.running:
            return False
        around = frozenset().union(*(self.reduced[m] & scope.open for m in missing))
        return around <= self.reduced[name] and self.may_fold(name, missing)

    def _hoistable(self, names: Iterable[str], scope: _Scope, outside: frozenset[str]) -> bool:
        """Returns whether nests could as well be computed once before the loop that they stand in."""
        inside = frozenset(names)
        read = frozenset().union(*(self.reads[n] for n in inside)) - inside
        return scope.last is not None and read <= outside and all(scope.last not in self.axes[n] for n in inside)
