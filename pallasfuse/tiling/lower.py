"""`Group` + `Schedule` -> tile programs: one for a rolled axis, a phase after the other for a split one."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from pallasfuse.ir.expr import Expr, Read, convert, read
from pallasfuse.ir.fold import Fold, Group
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Load, Loop, Segment, Statement, Store, TileProgram, block_start, every, verify
from pallasfuse.targets import Tails, Target
from pallasfuse.tiling.bounds import plan_loop
from pallasfuse.tiling.passes import Passes
from pallasfuse.tiling.split import state_elements
from pallasfuse.tiling.values import Scope

_COMBINED_ELEMENTS = 1 << 11
"""Elements of the states that one block combines."""


def lower(
    group: Group, schedule: Schedule, tails: Tails, tensors: Mapping[str, Tensor], smallest_dot: int = 1, *,
    multiple: int = 0, static_bounds: bool = False, together: bool = False,
) -> tuple[TileProgram, ...]:  # fmt: skip
    """The kernel of `group` under `schedule`: one tile program, or phases of which each reads what those before have stored.

    `tensors` gives the definition of every input and output by name. With masked tails, tiles are rounded up to powers of two,
    or to multiples of `multiple`, and those of axes that take part in a matrix product are padded to `smallest_dot`.
    `static_bounds`: as `Target.static_bounds`. `together`: the blocks of all parts run all phases (`Target.cluster`).

    Where the rolled axis is split (Neptune, section 4.3), every pass is a phase in which each block has a part of it and stores
    its state. What follows begins with the states of all parts. The last phase stores the results.
    """
    if static_bounds or together:
        schedule = replace(schedule, ranges=False)
    if schedule.parts == 1 or schedule.trips == 1:
        return (Lowering(group, schedule, tails, tensors, smallest_dot, multiple, static_bounds=static_bounds).run(),)
    along = any(group.rolled in n.axes for n in group.outputs)
    programs: list[TileProgram] = []
    for phase in range(group.passes + 1):
        last = phase == group.passes
        apart = last and not along and not together
        own = combining(group, schedule) if apart else schedule
        known = {**tensors, **{t.name: t for p in programs for t in p.outputs}}
        lowering = Lowering(
            group,
            own,
            tails,
            known,
            smallest_dot,
            multiple,
            own_part=not apart,
            static_bounds=static_bounds,
            together=together,
        )
        programs.append(lowering.run(phase))
    return tuple(programs)


def lower_for(
    target: Target, group: Group, schedule: Schedule, tensors: Mapping[str, Tensor], *, most_padded: int = 1 << 30
) -> tuple[TileProgram, ...]:
    """The kernel as `target` has it. most_padded: pad the tiles of short axes to no more than that."""
    least, multiple = min(target.smallest_dot, most_padded), min(target.tile_multiple, most_padded)
    return lower(
        group, schedule, target.tails, tensors, least, multiple=multiple, static_bounds=target.static_bounds,
        together=target.cluster > 0,
    )  # fmt: skip


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


class Lowering(Passes):
    """A kernel under construction, or one phase of it."""

    def run(self, phase: int | None = None) -> TileProgram:
        """The kernel, or one phase of it."""
        states: list[tuple[Tensor, Read]] = []
        later: tuple[Statement, ...] = ()
        for pass_index in range(self.group.passes if phase is None else min(phase + 1, self.group.passes)):
            folds = [f for f in self.group.folds if f.pass_index == pass_index]
            if self.single_trip:
                for fold in folds:
                    self._whole(fold)
            elif pass_index == phase:
                self._rolled(folds, split=True)
                states, later = self._states(folds), self._later(folds, self.group.outputs)
            else:
                (self._rolled if phase is None else self._combined)(folds)
                for fold in folds:
                    self._finish(fold, folds)
        if phase is None or phase == self.group.passes:
            self._store_outputs(split=phase is not None)
        self.top.statements += [Store(t.name, t.axes, value) for t, value in states]
        segments = [g for s in self.top.statements if isinstance(s, Loop) for g in s.segments]
        ends = frozenset().union(*(g.stop.tensors for g in segments))
        descending = tuple(a for a, _ in self.schedule.grid if block_start(a) in ends)
        unequal = bool(descending) and ends.isdisjoint(*(g.start.tensors for g in segments[:1]))
        outputs = tuple(t for t, _ in states) or tuple(Tensor(n.name, n.axes, n.dtype) for n in self.group.outputs)
        names = dict.fromkeys(self.group.inputs if phase is None else loaded(self.top.statements))
        for r in self.ranges:
            names |= dict.fromkeys((*sorted(r.predicate.tensors), *(t.name for t in r.found)))
        return verify(TileProgram(
            self.group.name if phase is None else f"{self.group.name}_{phase}", tuple(self.tensors[t] for t in names), outputs,
            tuple((a, self._tile(a)) for a, _ in self.grid), tuple((a, self._tile(a)) for a in self.order),
            _with_reuse(self.top.statements), self.schedule.warps, self.schedule.stages, self.schedule.alternate, descending,
            self.schedule.ahead, self.schedule.persistent, self._side_by_side() if unequal else 1, self.schedule.eager,
            ranges=tuple(self.ranges), later=later,
        ))  # fmt: skip

    def _later(self, folds: list[Fold], outputs: tuple[Nest, ...]) -> tuple[Statement, ...]:
        """What turns the state of this pass into `outputs`, once it is that of all parts; empty where more passes follow."""
        if self.group.passes > 1 or any(self.rolled in n.axes for n in outputs):
            return ()
        at = len(self.top.statements)
        for fold in folds:
            self._finish(fold, folds)
        for nest in outputs:
            self._store(nest, self.top)
        later = tuple(self.top.statements[at:])
        del self.top.statements[at:]
        return later

    def _whole(self, fold: Fold) -> None:
        """The rolled axis fits into one tile: reduce it at once, as the program says."""
        nest = fold.nest
        assert nest.reducer is not None
        if fold.refined is not None:
            self._whole_refined(fold, fold.refined)
            return
        value = self._reduction(
            f"{nest.name}.all", nest.axes, nest.reducer, nest.body, nest.reduced, self.top, nest.precision
        )
        self.top.known[read(nest.name, nest.axes, nest.dtype)] = self._let(
            f"{nest.name}.value", nest.axes, convert(value, nest.dtype), self.top
        )

    def _whole_refined(self, fold: Fold, refined: Expr) -> None:
        """As `_whole`, with the companions that correct the rounding of the frames."""
        nest, scope = fold.nest, self.top
        for frame in fold.frames:
            key = read(frame.name, frame.axes, frame.value.dtype)
            scope.known[key] = self._let(frame.name, frame.axes, self._expr(frame.value, scope), scope, pinned=True)
        replacements: dict[Expr, Expr] = {}
        for a in fold.accumulators:
            total = self._reduction(f"{a.name}.all", a.axes, a.reducer, a.term, nest.reduced, scope, nest.precision)
            replacements[read(a.name, a.axes, a.dtype)] = total
        main = fold.accumulators[0]
        result = self._let(f"{main.name}.refined", main.axes, self._expr_with(refined, replacements, scope), scope)
        value = self._expr_with(fold.finish, {read(main.name, main.axes, main.dtype): result}, scope)
        key = read(nest.name, nest.axes, nest.dtype)
        scope.known[key] = self._let(f"{nest.name}.value", nest.axes, convert(value, nest.dtype), scope)

    def _store_outputs(self, *, split: bool) -> None:
        along = [n for n in self.group.outputs if self.rolled in n.axes]
        for nest in self.group.outputs:
            if nest not in along or self.single_trip:
                self._store(nest, self.top)
        if along and not self.single_trip:
            for nest in along:
                self._preload(nest.body)
            plan = plan_loop(self.schedule, self.rolled, self._tile, self.tails, [])
            if split:
                plan = plan.part(self.part)
            segments = []
            for trip in plan.trips:
                scope = Scope(parent=self.top, edge=trip.edge)
                for nest in along:
                    self._store(nest, scope)
                segments.append(
                    Segment(
                        trip.start, trip.stop, trip.offset, trip.tile, tuple(scope.statements), trip.label, trip.edge
                    )
                )
            loop = Loop(self.rolled, (), tuple(segments), plan.to_visit, plan.first, plan.split, backwards=True)
            self.top.statements.append(loop)

    def _store(self, nest: Nest, scope: Scope) -> None:
        scope.statements.append(Store(nest.name, nest.axes, convert(self._expr(nest.body, scope), nest.dtype)))


def _with_reuse(body: list[Statement]) -> tuple[Statement, ...]:
    """What several loops load is marked."""
    tensors_of = {n: set(loaded([s])) for n, s in enumerate(body) if isinstance(s, Loop)}
    result = list(body)
    for n, s in enumerate(body):
        if not isinstance(s, Loop):
            continue
        later = frozenset().union(*(tensors for m, tensors in tensors_of.items() if m > n))
        earlier = frozenset().union(*(tensors for m, tensors in tensors_of.items() if m < n))
        if tensors_of[n].isdisjoint(later | earlier):
            continue

        def mark(x: Statement, later: frozenset[str] = later, earlier: frozenset[str] = earlier) -> Statement:
            if not isinstance(x, Load) or x.tensor not in later | earlier:
                return x
            return replace(x, again="later" if x.tensor in later else "last")

        segments = tuple(replace(g, body=tuple(map(mark, g.body))) for g in s.segments)
        result[n] = replace(s, segments=segments)
    return tuple(result)


def loaded(body: Iterable[Statement]) -> Iterator[str]:
    """The tensors that statements load, in order."""
    return (s.tensor for s in every(body) if isinstance(s, Load))
