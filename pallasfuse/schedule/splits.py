"""Splits of trees: the loop over a reduced axis in shares of the grid, whose partial states a second kernel merges (split-k)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pallasfuse.ir.region import Region
from pallasfuse.ir.tree import Do, Launch, Merge, Node, RangeLoop, Tree, TreeKernel, walk

_MERGED = 64
"""The largest tile of the kernel that merges: it only reads states, in many small blocks."""


def split(region: Region, tree: TreeKernel, shares: int, warps: int = 0) -> Tree | None:
    """Returns a tree as two kernels, of which the first runs its outermost serial loop in so many shares.

    None where the block does something before that loop, or runs several loops over its axis. Whether the states of all reductions
    in it can be merged, `placement` says. warps: of the kernel that merges; 0: as many as there are by default.
    """
    around, body = grid_loops(tree.body)
    if not body or not isinstance(body[0], RangeLoop) or body[0].level != "serial":
        return None
    loop, after = body[0], body[1:]
    inside = [n.nest for _, n in walk((loop,)) if isinstance(n, Do)]
    own = frozenset(a for a in region.by_name[inside[0]].reduced if a.name == loop.axis)
    partial = [n for n in inside if own & frozenset(region.by_name[n].reduced)]
    if len(partial) < len(inside) or any(isinstance(n, RangeLoop) and n.axis == loop.axis for _, n in walk(after)):
        return None
    shared = RangeLoop(loop.axis, shares, (loop,), "grid", shares=True)
    merging = tuple(replace(x, size=min(x.size, _MERGED)) for x in around)
    return (
        replace(tree, name=f"{tree.name}_parts", body=within(around, (shared,))),
        replace(tree, launch=Launch(warps=warps), body=within(merging, (*map(Merge, partial), *after))),
    )


def grid_loops(body: tuple[Node, ...]) -> tuple[list[RangeLoop], tuple[Node, ...]]:
    """The loops of the grid, the outermost first, and what each block runs."""
    around: list[RangeLoop] = []
    while len(body) == 1 and isinstance(body[0], RangeLoop) and body[0].level == "grid":
        around.append(body[0])
        body = body[0].body
    return around, body


def within(around: Sequence[RangeLoop], body: tuple[Node, ...]) -> tuple[Node, ...]:
    """Returns a body inside of loops, of which the first is the outermost."""
    for loop in reversed(around):
        body = (replace(loop, body=body),)
    return body


def useful_shares(region: Region, tree: TreeKernel, processors: int) -> Iterator[int]:
    """Yields numbers of shares, powers of two, with which few blocks become one or two for each multiprocessor.

    Each share has two trips or more.
    """
    around, body = grid_loops(tree.body)
    if not body or not isinstance(body[0], RangeLoop):
        return
    blocks = 1
    for x in around:
        blocks *= -(-region.axes[x.axis].extent // x.size)
    trips = -(-region.axes[body[0].axis].extent // body[0].size)
    shares = 2
    while shares * blocks <= 2 * processors and 2 * shares <= trips:
        if 2 * shares * blocks > processors:
            yield shares
        shares *= 2
