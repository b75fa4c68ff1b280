"""Loops of a schedule tree: the trips that they make, the masks that bound them, and merges of the states that parts have left."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, Read, add, apply, read, sub
from pallasfuse.ir.fold import OLD, Fold
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.neutrality import fills_of
from pallasfuse.ir.simplify import simplify
from pallasfuse.ir.tile_program import Load, Split, block_start
from pallasfuse.ir.tree import Do, Merge, RangeLoop, walk
from pallasfuse.tiling.bounds import Guards, Trip, plan_loop, unmasked
from pallasfuse.tiling.masks import Extent, integer, maximum, minimum
from pallasfuse.tiling.rules import broken
from pallasfuse.tiling.tree_values import Kernels, OpenPass, TreeValues
from pallasfuse.tiling.values import Scope


@dataclass(frozen=True, slots=True)
class PlannedLoop:
    """The trips of a loop, what they visit together, and where its positions are counted from."""

    trips: list[Trip]
    to_visit: Expr
    first: Expr
    split: Split | None
    origin: Expr
    guards: Guards = field(default_factory=Guards)
    numbers: frozenset[float] = frozenset()
    folds: tuple[Fold, ...] = ()


class TreeLoops(TreeValues):
    """A kernel under construction, whose loops are planned, and in which states of parts are joined."""

    stores: frozenset[str]
    """The nests that others read: later kernels, or whoever calls."""

    def __init__(self, known: Kernels) -> None:
        super().__init__(known)
        self.joined: list[tuple[Scope, str]] = []
        """The bodies where the states of parts were joined, with the reduction."""

    def _under(self, loop: RangeLoop) -> Iterable[Nest]:
        return (self.nests[n.nest] for _, n in walk(loop.body) if isinstance(n, Do))

    def _inner_loop(
        self, axis: Axis, tile: int, window: int, scope: Scope, visits: tuple[Expr, Expr] | None
    ) -> PlannedLoop:
        """A loop in the piece that a block, or a loop around it, has of its axis: it visits all of it.

        visits: where it goes on with the states of a loop around it, what that one visits, and its first position.
        """
        start = read(block_start(axis), (), "int32")
        around = self._loop_over(axis, scope)
        edge = around.edge if around is not None else self.tails != "exact" and axis.extent % window != 0
        left = maximum(sub(integer(axis.extent), start), integer(0))
        to_visit = simplify(minimum(integer(window), left)) if edge else integer(window)
        # no trip begins beyond the end of the axis, where a tile of one position has no mask
        reached = (
            simplify(apply("div", add(to_visit, integer(tile - 1)), integer(tile))) if edge else integer(window // tile)
        )
        trips = [Trip(integer(0), minimum(reached, integer(window // tile)), 0, tile, edge, frozenset(), "")]
        if window % tile:
            rest = maximum(sub(to_visit, integer(window - window % tile)), integer(0))
            last = simplify(minimum(rest, integer(1)))
            trips.append(Trip(integer(0), last, window - window % tile, window % tile, edge, frozenset(), "tail"))
        to_visit, first = visits or (to_visit, start)
        return PlannedLoop(trips, to_visit, first, None, start)

    def _outer_loop(
        self, loop: RangeLoop, own: OpenPass, axis: Axis, tile: int, scope: Scope, *, split: bool
    ) -> PlannedLoop:
        """A loop over all of its axis, or a block's part of it: bounded by masks outside of which nothing is added or stored."""
        nests = list(self._under(loop))
        adding = [self._with_maps(f, axis, nests) for f in self._adding(own, nests)]
        lasting = self._lasting(own) - {f.name for f in adding}
        adds_only = all(n.name not in lasting for n in nests)
        adds_only &= all(n.reads.isdisjoint(self.kept) for n in nests)  # a loop that fills a buffer fills all of it
        adds_only &= not any(isinstance(n, Merge) for _, n in walk(loop.body))
        opened = {a for a in self.axes.values() if a in self.blocks or self._loop_over(a, scope) is not None}
        plan = plan_loop(
            opened, axis, lambda a: tile if a == axis else self._window(a, scope), self.tails, adding if adds_only else [],
            inputs=self.bounding, inner=unmasked(self.nests.values()) & {n.name for n in nests}, strict=self.strict,
            far=all(f.name in own.by_name for f in adding),
            range_ends=self._ends_by_data if self.kernel.launch.data_bounds and not self.known.static_bounds else None,
        )  # fmt: skip
        plan = plan.map(lambda bound: self._outer(bound, scope))
        if split:
            plan = plan.part(self.part)
        return PlannedLoop(
            list(plan.trips), plan.to_visit, plan.first, plan.split, integer(0), plan.guards,
            _filled(adding) if plan.guards.fills else frozenset(), tuple(adding),
        )  # fmt: skip

    def _ends_by_data(self, visible: Expr, all_if_none: bool) -> Extent:
        """Returns where a block's loop ends, as data inputs say; only a loop that is in no other one may end there (rule 14)."""
        if self.opened:
            outer = self.opened[0][1].axis
            broken(
                14,
                f"data_bounds: what bounds a loop by data holds for a block, and this loop is in another over {outer}",
            )
        return self._range_ends(visible, all_if_none)

    def _lasting(self, own: OpenPass) -> frozenset[str]:
        """What is read after a loop that carries a pass."""
        return self.stores | self.active.keys() | own.by_name.keys()

    def _adding(self, own: OpenPass, nests: Sequence[Nest]) -> list[Fold]:
        """The folds that go on in a loop and may skip some of it: what is moved there is moved everywhere."""
        around = (f for p in self.active.values() for f in p.folds if all(a.update is None for a in f.accumulators))
        return [f for f in (*own.folds, *around) if any(n.name == f.name for n in nests)]

    # --- merges: reductions from the states that the blocks of an earlier kernel have left, part by part

    def _finished(self, fold: Fold, folds: list[Fold], scope: Scope) -> None:
        """Computes the value of a reduction whose last step is done, and stores it where somebody else reads it."""
        raise NotImplementedError

    def _merge(self, nest: Nest, scope: Scope) -> None:
        of = self.known.partial.get(nest.name)
        if of is None or of.part is None:
            broken(7, f"{nest.name} has no partial states")
        if of.kernel == self.kernel.name:
            broken(7, f"{nest.name}: states of the blocks of a grid are merged by a later kernel")
        fold = of.by_name[nest.name]
        saved = self._place()
        self.rolled, self.top, self.here, self.part = of.axis, scope, scope, of.part
        self.parts = Axis(of.part.name + "s", of.part.extent)
        self._enter(of.folds)
        needed_by = {fold.name}
        for other in reversed(of.folds[: of.folds.index(fold) + 1]):
            if other.name in needed_by:
                needed_by |= other.finish.tensors.union(*(f.unfinished for f in other.frames))
        earlier = [f for f in of.folds[: of.folds.index(fold)] if f.name in needed_by]
        inside = next((f.name for f in (*earlier, fold) if f.name in self.active), None)
        if inside is not None:
            broken(6, f"{nest.name} is merged inside a loop in which {inside} goes on")
        for other in of.folds:
            needed = any(other.name in f.unfinished for f in fold.frames) or other.name in fold.finish.tensors
            if needed and scope.find(read(other.name, other.nest.axes, other.nest.dtype)) is None:
                broken(7, f"{nest.name} is merged before {other.name}, which its repair reads")
        for other in earlier:
            if not self._is_joined(
                other, scope
            ):  # its accumulators here are those of larger windows, or of another loop
                self._join(other, of, scope)
        self._join(fold, of, scope)
        self._finished(fold, of.folds, scope)
        self._return_to(saved)

    def _is_joined(self, fold: Fold, scope: Scope) -> bool:
        at: Scope | None = scope
        while at is not None and not (at.along is not None and at.along in fold.nest.axes):
            if any(of is at and name == fold.name for of, name in self.joined):
                return True
            at = at.parent
        return at is not None and any(of is at and name == fold.name for of, name in self.joined)

    def _join(self, fold: Fold, of: OpenPass, scope: Scope) -> None:
        """The accumulators of a fold from the states that all parts have left."""
        self.joined.append((scope, fold.name))
        states = {value.tensor: self.tensors[tensor.name] for tensor, value in self._states(of.folds)}
        wanted = [a.name for a in fold.accumulators]
        wanted += [self._carried_frames[f.name].name + OLD for f in fold.frames if f.name not in self._late_frames]
        have: dict[str, Read] = {}
        for name in dict.fromkeys(wanted):
            tensor = states[name]
            indices = tuple(self.parts if a == of.part else a for a in tensor.axes)
            node = read(tensor.name, indices, tensor.dtype)
            value = self._find(node, scope)
            if not isinstance(value, Read):
                home = self._home(node.axes, scope)
                home.statements.append(Load(f"{name}.parts", tensor.name, indices, tensor.dtype))
                value = home.known[node] = read(f"{name}.parts", self._sorted(node.axes), tensor.dtype)
            have[name] = value
        self._combine(fold, of.by_name, have)


def _filled(folds: Sequence[Fold]) -> frozenset[float]:
    """The numbers that masks fill in."""
    found = (fills_of(a.term) for f in folds for a in f.accumulators)
    return frozenset(n for fills in found if fills is not None for n in fills.numbers)


def shared_loops(paths: Sequence[tuple[RangeLoop, ...]], axis: str) -> tuple[RangeLoop, ...]:
    """The loops over an axis that all paths begin with, one in the other."""
    found: list[RangeLoop] = []
    for level in zip(*paths, strict=False):
        if level[0].axis != axis or any(x is not level[0] for x in level):
            break
        found.append(level[0])
    return tuple(found)
