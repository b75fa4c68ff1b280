"""Schedules of one rolled axis as schedule trees: loops over the grid, one loop for each pass, and one for what is stored along the
axis."""

from collections.abc import Sequence

from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tree import Do, Launch, Level, Merge, Node, RangeLoop, Tree, TreeKernel
from pallasfuse.tiling.lower import combining


def tree_of(group: Group, schedule: Schedule, *, level: Level = "grid") -> Tree:
    """Returns the tree of a group under a schedule; the schedule's own, where it is one. level: where parts of the axis run."""
    if schedule.tree:
        return schedule.tree
    return _Flat(group, schedule).tree(combining(group, schedule), level)


class _Flat:
    def __init__(self, group: Group, schedule: Schedule) -> None:
        self.group, self.schedule = group, schedule
        self.inner = {n.name: n for n in group.inner}
        self.along = [n for n in group.outputs if group.rolled in n.axes]
        self.once = [n for n in group.outputs if group.rolled not in n.axes]
        self.reductions = {f.name for f in group.folds} | self.inner.keys()

    def tree(self, joining: Schedule, level: Level) -> Tree:
        group, schedule = self.group, self.schedule
        if schedule.trips == 1:
            return (self._kernel(group.name, schedule, self._whole()),)
        passes = [[f.nest for f in group.folds if f.pass_index == p] for p in range(group.passes)]
        if schedule.parts == 1:
            loops = [n for nests in passes for n in self._loop(nests)]
            return (self._kernel(group.name, schedule, (*loops, *self._outputs())),)
        if level == "cluster":
            return (self._kernel(group.name, schedule, self._in_cluster(passes)),)
        kernels: list[TreeKernel] = []
        merges: list[Node] = []
        for number, nests in enumerate(passes):
            kernels.append(self._kernel(f"{group.name}_{number}", schedule, (*merges, *self._loop(nests)), level))
            merges += [Merge(n.name) for n in nests]
        own = schedule if self.along else joining
        body = (*merges, *self._outputs())
        kernels.append(self._kernel(f"{group.name}_{len(passes)}", own, body, level if self.along else None))
        return tuple(kernels)

    def _kernel(self, name: str, schedule: Schedule, body: tuple[Node, ...], level: Level | None = None) -> TreeKernel:
        if level is not None:
            body = (self._part(body, level),)
        for axis, tile in reversed(schedule.grid):
            body = (RangeLoop(axis.name, tile, body, "grid"),)
        launch = Launch(
            schedule.persistent, schedule.alternate, schedule.ahead, schedule.eager, schedule.warps, schedule.interleave
        )
        return TreeKernel(name, body, launch)

    def _in_cluster(self, passes: Sequence[Sequence[Nest]]) -> tuple[Node, ...]:
        """One kernel: after each pass the blocks of a cluster merge what their parts left."""
        body: list[Node] = []
        for nests in passes:
            *before, loop = self._loop(nests)
            body += [*before, self._part((loop,), "cluster"), *(Merge(n.name) for n in nests)]
        *before, last = self._outputs() or (None,)
        body += [n for n in before if n is not None]
        if last is not None:
            body.append(self._part((last,), "cluster") if self.along else last)
        return tuple(body)

    def _part(self, body: tuple[Node, ...], level: Level) -> RangeLoop:
        return RangeLoop(self.group.rolled.name, self.schedule.parts, body, level, shares=True)

    def _loop(self, nests: Sequence[Nest]) -> list[Node]:
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

    def _outputs(self) -> tuple[Node, ...]:
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
