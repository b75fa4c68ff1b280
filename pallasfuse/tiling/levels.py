"""Schedule trees for targets that have blocks and loops only: warpgroups, clusters, devices and streams as blocks and loops.

The level at which a loop runs changes no value. Warpgroups run one after the other; the blocks of a cluster, the devices of a mesh
and the chunks of a stream become blocks of a grid, whose partial states the next kernel merges, all at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pallasfuse.errors import Refusal
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.region import Region
from pallasfuse.ir.tree import Do, Keep, Level, Merge, Node, RangeLoop, Tree, TreeKernel, walk

OUTER = ("time", "mesh", "grid")
"""Levels whose loops stand outermost in a kernel."""


def blocks_and_loops(tree: Tree, region: Region) -> Tree | Refusal:
    """Returns the tree with levels of blocks and serial loops only, kernels that merge clusters being kernels of their own."""
    kernels: list[TreeKernel] = []
    for kernel in _merged_at_once(tree, region):
        if any(isinstance(n, RangeLoop) and n.level == "group" and splits(n, region) for _, n in walk(kernel.body)):
            return Refusal("rule 14 (target): only a target with warpgroups merges what they have reduced")
        found = _phases(replace(kernel, body=_serial(kernel.body, "group")), region)
        if isinstance(found, Refusal):
            return found
        kernels += found
    return _named_apart(kernels)


def _named_apart(kernels: Sequence[TreeKernel]) -> Tree:
    """Returns kernels whose names differ: a number follows the name of one that is called like an earlier one."""
    found: dict[str, TreeKernel] = {}
    for kernel in kernels:
        names = (kernel.name, *(f"{kernel.name}_{n}" for n in range(2, len(kernels) + 2)))
        name = next(n for n in names if n not in found)
        found[name] = replace(kernel, name=name)
    return tuple(found.values())


def _merged_at_once(tree: Tree, region: Region) -> Tree:
    """Returns the tree with one merge of each reduction, the last one, which joins the states of all levels that split it."""
    missing = _split_levels(tree, region)

    def kept(body: tuple[Node, ...]) -> tuple[Node, ...]:
        result: list[Node] = []
        for node in body:
            if isinstance(node, RangeLoop):
                inner = kept(node.body)
                result += [replace(node, body=inner)] if inner else []
                continue
            if isinstance(node, Merge):
                missing[node.nest] = missing.get(node.nest, 1) - 1
            if not isinstance(node, Merge) or missing[node.nest] <= 0:
                result.append(node)
        return tuple(result)

    kernels = [replace(kernel, body=kept(kernel.body)) for kernel in tree]
    return tuple(k for k in kernels if any(isinstance(n, Do | Merge) for _, n in walk(k.body)))


def _split_levels(tree: Tree, region: Region) -> dict[str, int]:
    """The number of spatial loops that leave partial states of each reduction."""
    nests, found = region.by_name, dict[str, int]()
    for kernel in tree:
        for around, node in walk(kernel.body):
            if isinstance(node, Do) and node.nest in nests:
                reduced = {a.name for a in nests[node.nest].reduced}
                found[node.nest] = sum(x.axis in reduced and x.level != "serial" for x in around)
    return found


def grid_of(body: tuple[Node, ...]) -> tuple[tuple[RangeLoop, ...], tuple[Node, ...]]:
    """Returns the loops over blocks that a kernel begins with, the outermost first, and what each block runs."""
    loops: list[RangeLoop] = []
    while len(body) == 1 and isinstance(body[0], RangeLoop) and body[0].level in OUTER:
        loops.append(body[0])
        body = body[0].body
    return tuple(loops), body


def in_grid(loops: Sequence[RangeLoop], body: tuple[Node, ...]) -> tuple[Node, ...]:
    """Returns a body inside of loops, of which the first is the outermost."""
    for loop in reversed(loops):
        body = (replace(loop, body=body),)
    return body


def _serial(body: tuple[Node, ...], level: Level) -> tuple[Node, ...]:
    """Loops at a level run in turn."""
    result: list[Node] = []
    for node in body:
        if isinstance(node, RangeLoop):
            own: Level = "serial" if node.level == level else node.level
            result.append(replace(node, body=_serial(node.body, level), level=own))
        else:
            result.append(node)
    return tuple(result)


def splits(loop: RangeLoop, region: Region) -> bool:
    """Says whether a loop leaves partial states: it is spatial, and something under it reduces its axis."""
    nests = region.by_name
    done = (nests[n.nest] for _, n in walk(loop.body) if isinstance(n, Do) and n.nest in nests)
    return loop.level != "serial" and any(loop.axis == a.name for nest in done for a in nest.reduced)


def _uses(body: Sequence[Node], axis: str, region: Region) -> bool:
    done = [region.by_name[n.nest] for _, n in walk(body) if isinstance(n, Do)]
    return any(axis == a.name for nest in done for a in (*nest.axes, *nest.reduced))


def _phases(kernel: TreeKernel, region: Region) -> list[TreeKernel] | Refusal:
    """The kernels of a kernel with clusters: one for each loop that leaves partial states, and one for what comes after them.

    Each begins with what stands before: the merges of the states that earlier ones left.
    """
    grid, body = grid_of(kernel.body)
    found: list[tuple[Node, ...]] = []
    before: list[Node] = []
    rest: list[Node] = []
    for node in body:
        if isinstance(node, RangeLoop) and node.level == "cluster" and splits(node, region):
            if _uses(
                before, node.axis, region
            ):  # all of the axis, where the blocks have parts: it goes through global memory
                found.append(in_grid(grid, tuple(before)))
                before = [n for n in before if isinstance(n, Keep)]
            block = (*before, *_serial(node.body, "cluster"))
            found.append(in_grid((*grid, replace(node, level="grid")), block))
            rest = []
            continue
        if any(isinstance(n, RangeLoop) and n.level == "cluster" and splits(n, region) for _, n in walk((node,))):
            return Refusal("rule 14 (target): only a target with clusters runs one inside of a loop")
        rest = list(_serial((node,), "cluster"))
        before += rest
    if not found:
        return [replace(kernel, body=in_grid(grid, tuple(before)))]
    if rest:
        found.append(in_grid(grid, tuple(before)))
    return [replace(kernel, name=f"{kernel.name}_{n}", body=body) for n, body in enumerate(found)]


def each_in_a_loop(body: tuple[Node, ...], axis: Axis, size: int, nests: Mapping[str, Nest]) -> tuple[Node, ...]:
    """The body of blocks that have parts of an axis, where a loop over it stands around all that has the axis."""
    result: list[Node] = []
    together: list[Node] = []
    for node in body:
        under = list(walk((node,)))
        looped = any(isinstance(n, RangeLoop) and n.axis == axis.name for _, n in under)
        has = any(isinstance(n, Do) and axis in (*nests[n.nest].axes, *nests[n.nest].reduced) for _, n in under)
        if has and not looped:
            together.append(node)
            continue
        if together:
            result.append(RangeLoop(axis.name, size, tuple(together)))
            together = []
        if isinstance(node, RangeLoop) and node.axis != axis.name and looped:
            result.append(replace(node, body=each_in_a_loop(node.body, axis, size, nests)))
        else:
            result.append(node)
    return (*result, RangeLoop(axis.name, size, tuple(together))) if together else tuple(result)
