"""Schedules of one rolled axis as schedule trees: loops over the grid, one loop for each pass, and one for what is stored along the
axis."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pallasfuse.errors import Refusal
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.fold import Fold, Group
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tree import Do, Launch, Level, Merge, Node, RangeLoop, Tree, TreeKernel
from pallasfuse.tiling.split import state_elements

_COMBINED_ELEMENTS = 1 << 11
"""Elements of the states that one block combines."""


def tree_of(group: Group, schedule: Schedule, *, level: Level = "grid", together: bool = False) -> Tree:
    """Returns the tree of a group under a schedule; the schedule's own, where it is one.

    Args:
      level: where parts of the axis run.
      together: the last kernel has as many blocks as the others: the same ones run all, one after the other.
    """
    if schedule.tree:
        return schedule.tree
    return _Flat(group, schedule).tree(None if together else combining(group, schedule), level)


def combining(group: Group, schedule: Schedule) -> Schedule:
    """The schedule of a phase that only combines states and stores results: as many blocks as there is work for."""
    inner = state_elements(group, schedule)
    rows = max(1, _COMBINED_ELEMENTS // (schedule.parts * inner))
    tiles = []
    for axis, _ in reversed(schedule.grid):
        tiles.append((axis, min(axis.extent, rows)))
        rows = max(1, rows // axis.extent)
    warps = 4 if schedule.parts * inner <= 8 * _COMBINED_ELEMENTS else 8
    return replace(schedule, grid=tuple(reversed(tiles)), warps=warps, stages=1, alternate=False, ahead=False, persistent=False,
                   interleave=1, eager=False)  # fmt: skip


def part_of(group: Group, schedule: Schedule, name: str) -> TreeKernel:
    """Returns the kernel that leaves the states of a group of one pass, of as many parts as the schedule has."""
    flat = _Flat(group, schedule)
    return flat.kernel(name, schedule, tuple(flat.loop([f.nest for f in group.folds])), "grid")


def joined(group: Group, schedule: Schedule, name: str, *, results: bool) -> TreeKernel:
    """Returns the kernel that merges states of a group. results: and computes its outputs."""
    flat = _Flat(group, schedule)
    merges = tuple(Merge(f.name) for f in group.folds)
    return flat.kernel(name, schedule, (*merges, *(flat.outputs() if results else ())))


class FoldsOfGroup:
    """The folds that a group has been grouped with, for `lower_tree`."""

    def __init__(self, group: Group) -> None:
        self._folds = {f.name: f for f in group.folds}

    def __call__(self, nest: Nest, axis: Axis, unfinished: Mapping[str, Fold]) -> Fold | Refusal:
        """Returns the fold of a nest."""
        return self._folds.get(nest.name) or Refusal(f"{nest.name} is computed inside of a tile")

    def refined(self, nest: Nest, axis: Axis, finished: Sequence[Nest]) -> Fold | None:
        """Returns the fold of a nest if it has a correction for what the rounding of the others loses."""
        fold = self._folds.get(nest.name)
        return None if fold is None or fold.refined is None else fold


class _Flat:
    def __init__(self, group: Group, schedule: Schedule) -> None:
        self.group, self.schedule = group, schedule
        self.inner = {n.name: n for n in group.inner}
        self.along = [n for n in group.outputs if group.rolled in n.axes]
        self.once = [n for n in group.outputs if group.rolled not in n.axes]
        self.reductions = {f.name for f in group.folds} | self.inner.keys()

    def tree(self, joining: Schedule | None, level: Level) -> Tree:
        """joining: the schedule of the last kernel, where it only joins states; None where it is this one."""
        group, schedule = self.group, self.schedule
        if schedule.trips == 1:
            return (self.kernel(group.name, schedule, self._whole()),)
        passes = [[f.nest for f in group.folds if f.pass_index == p] for p in range(group.passes)]
        if schedule.parts == 1:
            loops = [n for nests in passes for n in self.loop(nests)]
            return (self.kernel(group.name, schedule, (*loops, *self.outputs())),)
        if level == "cluster":
            return (self.kernel(group.name, schedule, self._in_cluster(passes)),)
        kernels: list[TreeKernel] = []
        merges: list[Node] = []
        for number, nests in enumerate(passes):
            kernels.append(self.kernel(f"{group.name}_{number}", schedule, (*merges, *self.loop(nests)), level))
            merges += [Merge(n.name) for n in nests]
        body, name = (*merges, *self.outputs()), f"{group.name}_{len(passes)}"
        if joining is not None and not self.along:
            kernels.append(self.kernel(name, joining, body))
        else:
            kernels.append(self.kernel(name, schedule, body, level))
        return tuple(kernels)

    def kernel(self, name: str, schedule: Schedule, body: tuple[Node, ...], level: Level | None = None) -> TreeKernel:
        if level is not None:
            body = (self._part(body, level),)
        for axis, tile in reversed(schedule.grid):
            body = (RangeLoop(axis.name, tile, body, "grid"),)
        launch = Launch(
            schedule.persistent,
            schedule.alternate,
            schedule.ahead,
            schedule.eager,
            schedule.ranges,
            schedule.warps,
            schedule.interleave,
        )
        return TreeKernel(name, body, launch)

    def _in_cluster(self, passes: Sequence[Sequence[Nest]]) -> tuple[Node, ...]:
        """One kernel: after each pass the blocks of a cluster merge what their parts left."""
        body: list[Node] = []
        for nests in passes:
            *before, loop = self.loop(nests)
            body += [*before, self._part((loop,), "cluster"), *(Merge(n.name) for n in nests)]
        *before, last = self.outputs() or (None,)
        body += [n for n in before if n is not None]
        if last is not None:
            body.append(self._part((last,), "cluster") if self.along else last)
        return tuple(body)

    def _part(self, body: tuple[Node, ...], level: Level) -> RangeLoop:
        return RangeLoop(self.group.rolled.name, self.schedule.parts, body, level, shares=True)

    def loop(self, nests: Sequence[Nest]) -> list[Node]:
        """One pass over the axis, after what it reads that does not vary along it."""
        needed = self._needed(nests)
        before: list[Node] = [Do(n.name) for n in needed if self.group.rolled not in n.axes]
        inside: list[Node] = []
        for nest in nests:
            have = {n.nest for n in inside if isinstance(n, Do)}
            inside += [Do(n.name) for n in self._needed([nest]) if self.group.rolled in n.axes and n.name not in have]
            inside.append(Do(nest.name))
        return [*before, self._rolled(tuple(inside))]

    def _rolled(self, body: tuple[Node, ...]) -> RangeLoop:
        return RangeLoop(self.group.rolled.name, self.schedule.rolled_tile, body, slots=self.schedule.stages)

    def _whole(self) -> tuple[Node, ...]:
        body: list[Node] = []
        for nest in [*(f.nest for f in self.group.folds), *self.group.outputs]:
            have = {n.nest for n in body if isinstance(n, Do)}
            body += [Do(n.name) for n in self._needed([nest]) if n.name not in have]
            body += [Do(nest.name)] if nest.name not in self.inner and nest.name not in have else []
        return tuple(body)

    def outputs(self) -> tuple[Node, ...]:
        body: list[Node] = []
        for nest in self.once:
            if nest.name not in self.reductions:
                body += [Do(n.name) for n in self._needed([nest]) if self.group.rolled not in n.axes]
                body.append(Do(nest.name))
        if self.along:
            inside = [Do(n.name) for n in self._needed(self.along) if self.group.rolled in n.axes]
            names = [n.nest for n in inside]
            inside += [Do(n.name) for n in self.along if n.name not in names]
            body.append(self._rolled(tuple(inside)))
        return tuple(body)

    def _needed(self, nests: Sequence[Nest]) -> list[Nest]:
        """The reductions inside a tile that nests read, in the order in which they can be computed."""
        found: dict[str, Nest] = {}

        def visit(nest: Nest) -> None:
            for name in self.inner:
                if name in nest.reads and name not in found:
                    visit(self.inner[name])
                    found[name] = self.inner[name]

        for nest in nests:
            visit(nest)
        return list(found.values())
