"""Rules of schedule trees that are checked before any is lowered, since they need no values: each is a function named after it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.region import Region
from pallasfuse.ir.tree import Do, Keep, Level, Merge, Node, RangeLoop, Tree, TreeKernel, walk
from pallasfuse.tiling.levels import OUTER, grid_of
from pallasfuse.tiling.rules import broken


def check(tree: Tree, region: Region, *, uneven: bool = False) -> None:
    """Ends the walk at the first rule that the tree breaks.

    Args:
      uneven: bodies may run in other numbers of blocks of a cluster, or warpgroups, as they do over short axes: the place where
        trips run changes no value.

    Raises:
      BrokenRuleError: with the rule, and where.
    """
    for kernel in tree:
        names(kernel, region)
        windows(kernel)
        levels(kernel)
        if not uneven:
            instances(kernel, region)
        nests(kernel, region)
        loads(kernel, region)
        slots(kernel)
    merges(tree, region)
    cover(tree, region)


def _loops(kernel: TreeKernel) -> Iterator[tuple[tuple[RangeLoop, ...], RangeLoop]]:
    return ((around, n) for around, n in walk(kernel.body) if isinstance(n, RangeLoop))


def _under(body: tuple[Node, ...], region: Region) -> list[Nest]:
    return [region.by_name[n.nest] for _, n in walk(body) if isinstance(n, Do | Merge)]


def names(kernel: TreeKernel, region: Region) -> None:
    """Rules 1 and 3: axes and nests are those of the region."""
    for _, node in walk(kernel.body):
        if isinstance(node, RangeLoop) and node.axis not in region.axes:
            broken(1, f"no axis is called {node.axis}; there are {', '.join(region.axes)}")
        if isinstance(node, Do | Merge) and node.nest not in region.by_name:
            broken(3, f"no nest is called {node.nest}; there are {', '.join(region.by_name)}")


def windows(kernel: TreeKernel) -> None:
    """Rule 1: a tile divides the one around it, and a loop runs over all of its tiles."""
    for around, loop in _loops(kernel):
        if loop.begin or loop.end:
            broken(1, f"the loop over {loop.axis} leaves out tiles, which no kernel does yet")
        outer = next((x for x in reversed(around) if x.axis == loop.axis), None)
        if outer is not None and not outer.shares and not loop.shares and outer.size % loop.size:
            broken(1, f"{loop.axis}:{loop.size} does not divide the piece of {outer.size} around it")


def levels(kernel: TreeKernel) -> None:
    """Rule 2: streams, devices and blocks stand outermost, in this order, one loop in the other."""
    grid, body = grid_of(kernel.body)
    inside = next((n for _, n in walk(body) if isinstance(n, RangeLoop) and n.level in OUTER), None)
    if inside is not None:
        broken(
            2,
            f"{kernel.name}: loops over blocks stand outermost, one in the other, but {inside.axis}@{inside.level} does not",
        )
    for outer, inner in pairwise(grid):
        if OUTER.index(outer.level) > OUTER.index(inner.level):
            broken(2, f"{kernel.name}: {inner.axis}@{inner.level} stands inside {outer.axis}@{outer.level}")


def side_by_side(kernel: TreeKernel, grid: Sequence[int]) -> None:
    """Rule 2: blocks of all grid axes but the last run side by side in groups of equal sizes. grid: the blocks of each axis."""
    together, others = kernel.launch.grid_swizzle, prod(grid[:-1])
    if others % together:
        broken(
            2,
            f"{kernel.name}: grid_swizzle={together} does not divide the {others} blocks of the grid axes before the last",
        )


def instances(kernel: TreeKernel, region: Region) -> None:
    """Rule 2: every body runs in as many blocks of the cluster as the others do, and in as many warpgroups."""
    level: Level
    for level in ("cluster", "group"):
        first: tuple[int, Node] | None = None
        for around, node in walk(kernel.body):
            if not isinstance(node, Do | Merge) or all(x.level != level for x in around):
                continue
            count = prod(n for x, n in _trips(around, region) if x.level == level)
            first = first or (count, node)
            if count != first[0]:
                broken(2, f"{kernel.name}: {node.nest} runs in {count} instances of a {level}, others in {first[0]}")


def _trips(around: tuple[RangeLoop, ...], region: Region) -> Iterator[tuple[RangeLoop, int]]:
    """Yields the loops and how often each runs in a whole window."""
    covered: dict[str, int] = {}
    for loop in around:
        window = covered.get(loop.axis, region.axes[loop.axis].extent)
        yield loop, loop.size if loop.shares else -(-window // loop.size)
        covered[loop.axis] = -(-window // loop.size) if loop.shares else min(loop.size, window)


def nests(kernel: TreeKernel, region: Region) -> None:
    """Rule 3: something under a loop has its axis; a body that is the same in every trip is none."""
    for _, loop in _loops(kernel):
        if all(loop.axis not in {a.name for a in (*n.axes, *n.reduced)} for n in _under(loop.body, region)):
            broken(3, f"{kernel.name}: nothing in the loop over {loop.axis} has that axis")


def loads(kernel: TreeKernel, region: Region) -> None:
    """Rules 8 and 9: what is kept is a tensor, and is read from the buffer in the body where that stands."""

    def visit(body: tuple[Node, ...]) -> None:
        for number, node in enumerate(body):
            if isinstance(node, RangeLoop):
                visit(node.body)
            if isinstance(node, Keep):
                known = {t.name for t in region.inputs} | region.by_name.keys()
                if node.tensor not in known:
                    broken(
                        8, f"{node.tensor} is kept, but no tensor is called so; there are {', '.join(sorted(known))}"
                    )
                if all(node.tensor not in n.reads for n in _under(body[number + 1 :], region)):
                    broken(9, f"nothing in its body reads {node.tensor}, which is kept in {node.memory} memory")

    visit(kernel.body)


def slots(kernel: TreeKernel) -> None:
    """Rule 11: tiles are on their way while others are computed where trips run one after the other."""
    for _, loop in _loops(kernel):
        if loop.slots > 1 and loop.level != "serial":
            broken(
                11,
                f"{kernel.name}: the trips of {loop.axis}@{loop.level} run side by side, {loop.slots} slots have no use",
            )


@dataclass(slots=True)
class _Partial:
    """The states of a reduction: the loops at which they are apart, the outermost first, each with the number of its kernel."""

    apart: list[tuple[RangeLoop, int]] = field(default_factory=list)
    merged_in: int = -1
    """The kernel with the last merge."""


def merges(tree: Tree, region: Region) -> None:
    """Rule 7: clusters and warpgroups are merged after their loop, in its kernel; blocks, devices and streams in a later one."""
    states: dict[str, _Partial] = {}
    for number, kernel in enumerate(tree):
        for around, node in walk(kernel.body):
            if isinstance(node, Do):
                reduced = {a.name for a in region.by_name[node.nest].reduced}
                earlier = states.get(node.nest, _Partial()).apart
                if earlier and earlier[-1][1] == number:
                    broken(7, f"{kernel.name}: {node.nest} leaves partial states twice before they are merged")
                apart = [(x, number) for x in around if x.axis in reduced and x.level != "serial"]
                states[node.nest] = _Partial(apart)
            if isinstance(node, Merge):
                _merge(node, states.setdefault(node.nest, _Partial()), around, number, kernel.name)
        for name, state in states.items():
            left = next((x for x, at in state.apart if at == number and x.level in ("cluster", "group")), None)
            if left is not None:
                broken(7, f"{kernel.name} never merges {name}, whose states are apart along {left.axis}@{left.level}")
    for name, state in states.items():
        if state.apart and name in region.outputs:
            broken(7, f"{name} is never merged over {state.apart[-1][0].axis}@{state.apart[-1][0].level}")


def _merge(node: Merge, state: _Partial, around: tuple[RangeLoop, ...], number: int, kernel: str) -> None:
    if not state.apart:
        if state.merged_in in (-1, number):
            broken(7, f"{kernel}: {node.nest} has no partial states to merge")
        return  # states are still in memory: a later kernel merges them for itself
    loop, at = state.apart.pop()
    state.merged_in = number
    if loop.level in OUTER and at == number:
        broken(7, f"{kernel}: states along {loop.axis}@{loop.level} are merged by a later kernel, not by their own")
    if loop.level not in OUTER and any(x is loop for x in around):
        broken(7, f"{kernel}: {node.nest} is merged inside the loop {loop.axis}@{loop.level} whose states it joins")


def cover(tree: Tree, region: Region) -> None:
    """Rule 13: something computes every output."""
    done = {n.nest for k in tree for _, n in walk(k.body) if isinstance(n, Do | Merge)}
    missing = [n for n in region.outputs if n not in done]
    if missing:
        broken(13, f"nothing stores {', '.join(missing)}")
