"""`Group` + `Schedule` -> `TileProgram`: place loads, rolled loops, repairs, guards and stores."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, Read, apply, const, convert, index, postorder, read, substitute
from pallasfuse.ir.fold import OLD, Fold, Frame, Group
from pallasfuse.ir.loop_program import Nest, Tensor
from pallasfuse.ir.reducers import MAX, MIN, SUM, Reducer
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.simplify import simplify
from pallasfuse.ir.tile_program import (
    Carry,
    Contract,
    Let,
    Load,
    Loop,
    Reduce,
    Segment,
    Statement,
    Store,
    TileProgram,
    before,
    block_start,
    to_visit,
    verify,
    visited,
)
from pallasfuse.targets import Tails, Target, power_of_two
from pallasfuse.tiling import guards
from pallasfuse.tiling.bounds import Trip, plan_loop
from pallasfuse.tiling.products import Product, contracts, narrow, split_product


@dataclass(slots=True)
class _Scope:
    """Statements under construction, and the values that they define."""

    statements: list[Statement] = field(default_factory=list)
    known: dict[Expr, Expr] = field(default_factory=dict)
    parent: "_Scope | None" = None
    edge: bool = False
    """The current tile of the rolled axis may reach past the axis' end."""
    fixed: Mapping[Expr, Expr] = field(default_factory=dict)
    """What is known on the whole tile: predicates that hold everywhere, frames that come late."""

    def find(self, node: Expr) -> Expr | None:
        scope: _Scope | None = self
        while scope is not None:
            if node in scope.known:
                return scope.known[node]
            scope = scope.parent
        return None


def lower(
    group: Group, schedule: Schedule, tails: Tails, tensors: Mapping[str, Tensor], smallest_dot: int = 1, *,
    multiple: int = 0,
) -> TileProgram:  # fmt: skip
    """The kernel of `group` under `schedule`.

    `tensors` gives the definition of every input and output by name. With masked tails, tiles are rounded up to powers of two,
    or to multiples of `multiple`, and those of axes that take part in a matrix product are padded to `smallest_dot`.
    """
    return _Lowering(group, schedule, tails, tensors, smallest_dot, multiple).run()


def lower_for(
    target: Target, group: Group, schedule: Schedule, tensors: Mapping[str, Tensor], *, most_padded: int = 1 << 30
) -> TileProgram:
    """The kernel as `target` has it. most_padded: pad the tiles of short axes to no more than that."""
    least, multiple = min(target.smallest_dot, most_padded), min(target.tile_multiple, most_padded)
    return lower(group, schedule, target.tails, tensors, least, multiple=multiple)


class _Lowering:
    def __init__(
        self, group: Group, schedule: Schedule, tails: Tails, tensors: Mapping[str, Tensor], smallest_dot: int,
        multiple: int,
    ) -> None:  # fmt: skip
        self.group, self.schedule, self.tails, self.tensors = group, schedule, tails, tensors
        self.multiple = multiple
        self.rolled = group.rolled
        self.folds = {f.name: f for f in group.folds}
        self.inner = {n.name: n for n in group.inner}
        self.top = _Scope()
        self.order = self._axis_order()
        self.padded_axes: dict[Axis, int] = {}
        for nest in [*(f.nest for f in group.folds), *group.inner]:
            if nest.reducer == SUM and contracts(nest.body, frozenset(nest.reduced)):
                self.padded_axes |= {a: smallest_dot for a in (*nest.axes, *nest.reduced) if schedule.tile(a) > 1}
        self.single_trip = schedule.trips == 1
        self._carried_frames: dict[str, Frame] = {}
        self._late_frames: frozenset[str] = frozenset()

    # --- axes

    def _axis_order(self) -> tuple[Axis, ...]:
        grid = [a for a, _ in self.schedule.grid]
        rest: dict[Axis, None] = {}
        for nest in [*(f.nest for f in self.group.folds), *self.group.inner, *self.group.outputs]:
            rest |= dict.fromkeys((*nest.axes, *nest.reduced))
        return (*grid, self.rolled, *(a for a in rest if a not in grid and a != self.rolled))

    def _tile(self, axis: Axis) -> int:
        size = self.schedule.tile(axis)
        if self.tails == "exact":
            return size
        size = max(size, self.padded_axes.get(axis, 1))
        return -(-size // self.multiple) * self.multiple if self.multiple and size > 1 else power_of_two(size)

    def _side_by_side(self) -> int:
        """The schedule's `interleave`, as far as it divides the blocks of the other axes."""
        blocks = math.prod(-(-a.extent // self._tile(a)) for a, _ in self.schedule.grid[:-1])
        return math.gcd(self.schedule.interleave, blocks)

    def _sorted(self, axes: frozenset[Axis]) -> tuple[Axis, ...]:
        return tuple(a for a in self.order if a in axes)

    def _is_padded(self, axis: Axis, scope: _Scope) -> bool:
        """May a tile along this axis hold positions outside it? (Only axes that are reduced inside a tile ask.)"""
        if self.tails == "exact":
            return False
        if axis == self.rolled and not self.single_trip:
            return scope.edge
        return self._tile(axis) != axis.extent

    # --- expressions

    def _expr(self, root: Expr, scope: _Scope) -> Expr:
        """`root` over values of this kernel: loads and inner reductions are emitted on first use."""
        root = simplify(substitute(root, dict(scope.fixed)))
        replacements: dict[Expr, Expr] = {}
        for node in postorder(root):
            if isinstance(node, Read):
                known = scope.find(node)
                replacements[node] = known if known is not None else self._emit_read(node, scope)
        return substitute(root, replacements)

    def _emit_read(self, node: Read, scope: _Scope) -> Expr:
        target = scope if self.rolled in node.axes else self.top
        if node.tensor in self.inner:
            nest = self.inner[node.tensor]
            assert nest.reducer is not None
            value = self._reduction(nest.name, nest.axes, nest.reducer, nest.body, nest.reduced, target, nest.precision)
            result = self._let(f"{nest.name}.value", nest.axes, convert(value, nest.dtype), target)
        elif node.tensor in self.tensors:
            axes = self._sorted(node.axes)
            name = f"{node.tensor}.{'_'.join(a.name for a in node.indices)}" if node.indices else f"{node.tensor}.value"
            target.statements.append(Load(name, node.tensor, node.indices, node.dtype))
            result = read(name, axes, node.dtype)
        else:
            raise AssertionError(f"{node} is neither an input nor computed yet")
        target.known[node] = result
        return result

    def _let(self, name: str, axes: tuple[Axis, ...], value: Expr, scope: _Scope, *, pinned: bool = False) -> Expr:
        if isinstance(value, Read):
            return value
        axes = self._sorted(frozenset(axes))
        scope.statements.append(Let(name, axes, value, pinned))
        return read(name, axes, value.dtype)

    def _reduction(
        self, name: str, axes: tuple[Axis, ...], reducer: Reducer, body: Expr, over: tuple[Axis, ...], scope: _Scope,
        precision: str | None = None,
    ) -> Expr:  # fmt: skip
        """Fold `body` over axes of the tile: as a matrix product when it is one."""
        accumulator = dtypes.accumulator(body.dtype)
        axes = self._sorted(frozenset(axes))
        padded = [a for a in over if self._is_padded(a, scope)]
        ones = frozenset(a for a in self.order if self._tile(a) == 1)
        product = split_product(body, frozenset(over), ones) if reducer == SUM else None
        if product is not None:
            if self._leads(product.rhs, product.lhs, frozenset(over) | ones):
                product = Product(product.rhs, product.lhs)
            sides = [
                self._in_range(narrow(self._expr(s, scope)), padded, 0.0, scope) for s in (product.lhs, product.rhs)
            ]
            if sides[0].dtype != sides[1].dtype:
                sides = [convert(s, accumulator) for s in sides]
            scope.statements.append(Contract(name, axes, sides[0], sides[1], over, accumulator, precision))
        else:
            value = convert(self._expr(body, scope), accumulator)
            value = self._in_range(value, padded, reducer.identity(accumulator), scope)
            scope.statements.append(Reduce(name, axes, reducer, value, over))
        return read(name, axes, accumulator)

    def _leads(self, a: Expr, b: Expr, ignored: frozenset[Axis]) -> bool:
        """True when the first axis that `a` keeps comes before the first that `b` keeps: `a` gives the rows."""
        first = [min((self.order.index(x) for x in e.axes - ignored), default=len(self.order)) for e in (a, b)]
        return first[0] < first[1]

    def _in_range(self, value: Expr, padded: list[Axis], identity: float | int | bool, scope: _Scope) -> Expr:
        if identity == 0 and isinstance(value, Read) and self._is_load(value):
            padded = [a for a in padded if a not in value.axes]  # a load is zero outside its tensor
        if not padded:
            return value
        inside: Expr | None = None
        for axis in padded:
            here = apply("lt", index(axis), const(axis.extent, "int32"))
            inside = here if inside is None else apply("and", inside, here)
        assert inside is not None
        return apply("select", inside, value, const(identity, value.dtype))

    def _is_load(self, value: Read) -> bool:
        return any(value.tensor.startswith(f"{t}.") for t in self.group.inputs)

    # --- the kernel

    def run(self) -> TileProgram:
        for pass_index in range(self.group.passes):
            folds = [f for f in self.group.folds if f.pass_index == pass_index]
            if self.single_trip:
                for fold in folds:
                    self._whole(fold)
            else:
                self._rolled(folds)
        self._store_outputs()
        segments = [g for s in self.top.statements if isinstance(s, Loop) for g in s.segments]
        ends = frozenset().union(*(g.stop.tensors for g in segments))
        descending = tuple(a for a, _ in self.schedule.grid if block_start(a) in ends)
        unequal = bool(descending) and ends.isdisjoint(*(g.start.tensors for g in segments[:1]))
        outputs = tuple(Tensor(n.name, n.axes, n.dtype) for n in self.group.outputs)
        return verify(TileProgram(
            self.group.name, tuple(self.tensors[t] for t in self.group.inputs), outputs,
            tuple((a, self._tile(a)) for a, _ in self.schedule.grid), tuple((a, self._tile(a)) for a in self.order),
            tuple(self.top.statements), self.schedule.warps, self.schedule.stages, self.schedule.alternate, descending,
            self.schedule.ahead, self.schedule.persistent, self._side_by_side() if unequal else 1, self.schedule.eager,
        ))  # fmt: skip

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

    def _rolled(self, folds: list[Fold]) -> None:
        """One pass over the rolled axis."""
        plan = plan_loop(self.schedule, self.rolled, self._tile, self.tails, folds, strict=self.group.strict)
        for fold in folds:  # loads and inner values that every tile shares come before the loop
            for accumulator in fold.accumulators:
                self._preload(accumulator.term)
        self._late_frames = _late_frames(folds)
        self._carried_frames = self._share_frames(folds)
        carries = [
            Carry(a.name, self._sorted(frozenset(a.axes)), a.dtype, const(a.reducer.identity(a.dtype), a.dtype), f"{a.name}.next")
            for f in folds for a in f.accumulators
        ]  # fmt: skip
        for frame in dict.fromkeys(self._carried_frames.values()):
            axes, dtype = self._sorted(frozenset(frame.axes)), frame.value.dtype
            carries.append(Carry(frame.name + OLD, axes, dtype, const(frame.safe, dtype), frame.name))
        segments = tuple(self._segment(trip, folds) for trip in plan.trips)
        self.top.statements.append(Loop(self.rolled, tuple(carries), segments, plan.to_visit, plan.first))
        for fold in folds:
            self._finish(fold, folds)

    def _preload(self, term: Expr) -> None:
        """Emit, before the loop, what a term reads that does not vary along the rolled axis."""
        for node in postorder(term):
            if not isinstance(node, Read) or self.top.find(node) is not None:
                continue
            if node.tensor in self.inner:
                self._preload(self.inner[node.tensor].body)
                if self.rolled not in node.axes:
                    self._emit_read(node, self.top)
            elif node.tensor in self.tensors and self.rolled not in node.axes:
                self._emit_read(node, self.top)

    def _segment(self, trip: Trip, folds: list[Fold]) -> Segment:
        fixed: dict[Expr, Expr] = {p: const(True, "bool") for p in trip.true}
        for frame in (f for fold in folds for f in fold.frames if f.name in self._late_frames):
            for name in (frame.name, frame.name + OLD):
                fixed[read(name, frame.axes, frame.value.dtype)] = const(frame.safe, frame.value.dtype)
        scope = _Scope(parent=self.top, edge=trip.edge, fixed=fixed)
        self._step(folds, scope)
        return Segment(trip.start, trip.stop, trip.offset, trip.tile, tuple(scope.statements), trip.label, trip.edge)

    # --- one step of a pass

    def _step(self, folds: list[Fold], scope: _Scope) -> None:
        values = {f.name: f for f in folds}
        for fold in folds:
            for frame in fold.frames:
                if frame.name not in self._late_frames:
                    self._frame(frame, fold, values, scope)
            for accumulator in fold.accumulators:
                nest = fold.nest
                tile = self._reduction(f"{accumulator.name}.tile", nest.axes, accumulator.reducer, accumulator.term,
                                       nest.reduced, scope, nest.precision)  # fmt: skip
                carried = read(accumulator.name, self._sorted(frozenset(nest.axes)), accumulator.dtype)
                kept = carried if accumulator.update is None else self._bind(accumulator.update, fold, scope)
                joined = apply(accumulator.reducer.combine, convert(kept, tile.dtype), tile)
                scope.statements.append(Let(f"{accumulator.name}.next", self._sorted(frozenset(nest.axes)), joined))

    def _bind(self, update: Expr, fold: Fold, scope: _Scope) -> Expr:
        """An update over carried accumulators and the frames of this step."""
        replacements: dict[Expr, Expr] = {}
        own = {a.name for a in fold.accumulators}
        update = simplify(substitute(update, dict(scope.fixed)))
        for node in postorder(update):
            if isinstance(node, Read):
                if node.tensor in own:
                    replacements[node] = read(node.tensor, self._sorted(node.axes), node.dtype)
                else:
                    known = scope.find(node)
                    replacements[node] = known if known is not None else self._emit_read(node, self.top)
        return substitute(update, replacements)

    def _current(self, fold: Fold, values: Mapping[str, Fold], scope: _Scope, suffix: str, done: str) -> Expr:
        """The unfinished value of a fold, over the accumulators named with `suffix`; a sum is extrapolated to the whole axis."""
        main = fold.accumulators[0]
        value: Expr = read(main.name + suffix, self._sorted(frozenset(main.axes)), main.dtype)
        if fold.nest.reducer == SUM and dtypes.is_float(main.dtype):
            seen = read(done, (), "int32")
            every = read(to_visit(self.rolled), (), "int32")
            ratio = apply("div", convert(every, main.dtype), convert(seen, main.dtype))
            value = apply("select", apply("eq", seen, every), value, apply("mul", value, ratio))
        replacements: dict[Expr, Expr] = {read(main.name, main.axes, main.dtype): value}
        for node in postorder(fold.finish):
            if isinstance(node, Read) and node.tensor in values and node.tensor != fold.name:
                replacements[node] = self._current(values[node.tensor], values, scope, suffix, done)
        return convert(substitute(fold.finish, replacements), fold.nest.dtype)

    def _share_frames(self, folds: list[Fold]) -> dict[str, Frame]:
        """Every carried frame's name -> the first frame of the pass with the same value: carried once."""
        first: dict[tuple[Expr, bool, float, float], Frame] = {}
        frames = [f for fold in folds for f in fold.frames if f.name not in self._late_frames]
        return {f.name: first.setdefault((f.value, f.positive, f.low, f.high), f) for f in frames}

    def _frame(self, frame: Frame, fold: Fold, values: Mapping[str, Fold], scope: _Scope) -> None:
        """The new and the old value of a frame, both usable: where the unfinished value is not, a safe one stands in."""
        shared = self._carried_frames[frame.name]
        axes, dtype = self._sorted(frozenset(frame.axes)), frame.value.dtype
        new = read(shared.name, axes, dtype)
        if new not in scope.known:
            value = self._frame_value(shared, values, scope, ".next", visited(self.rolled))
            scope.statements.append(Let(shared.name, axes, guards.guarded(value, shared), pinned=True))
            scope.known[new] = new
        scope.known[read(frame.name, frame.axes, dtype)] = new
        first = apply("eq", read(before(self.rolled), (), "int32"), const(0, "int32"))
        empty = self._is_empty(shared, values, scope, "")
        if empty is None or not fold.empty_is_neutral:
            fresh: Expr = first
        elif all(values[u].nest.reducer in (MAX, MIN) for u in frame.unfinished):
            fresh = empty
        else:
            fresh = apply("or", first, empty)
        old = apply("select", fresh, new, read(shared.name + OLD, axes, dtype))
        if old not in scope.known:
            scope.known[old] = self._let(f"{frame.name}.from", axes, old, scope, pinned=True)
        scope.known[read(frame.name + OLD, frame.axes, dtype)] = scope.known[old]

    def _frame_value(self, frame: Frame, values: Mapping[str, Fold], scope: _Scope, suffix: str, done: str) -> Expr:
        replacements: dict[Expr, Expr] = {}
        for node in postorder(frame.value):
            if isinstance(node, Read) and node.tensor in values:
                replacements[node] = self._current(values[node.tensor], values, scope, suffix, done)
        rest = substitute(frame.value, replacements)
        return self._outer(rest, scope)

    def _outer(self, root: Expr, scope: _Scope) -> Expr:
        """Resolve what is read from outside the loop; carried values and scalars stay as they are."""
        replacements: dict[Expr, Expr] = {}
        for node in postorder(root):
            if isinstance(node, Read) and (
                node.tensor in self.tensors or node.tensor in self.inner or node.tensor in self.folds
            ):
                known = scope.find(node)
                replacements[node] = known if known is not None else self._emit_read(node, self.top)
        return substitute(root, replacements)

    def _is_empty(self, frame: Frame, values: Mapping[str, Fold], scope: _Scope, suffix: str) -> Expr | None:
        """True where a max or min that the frame depends on still is its identity."""
        result: Expr | None = None
        for name in frame.empties:
            nest = values[name].nest
            assert nest.reducer is not None
            current = self._current(values[name], values, scope, suffix, "")
            here = apply("eq", current, const(nest.reducer.identity(nest.dtype), nest.dtype))
            result = here if result is None else apply("or", result, here)
        return result

    # --- after a pass

    def _finish(self, fold: Fold, folds: list[Fold]) -> None:
        """The finished value. Where the last frame was a stand-in, or is late, re-frame at the finished predecessors."""
        scope = self.top
        nest = fold.nest
        axes = self._sorted(frozenset(nest.axes))
        finished = {a.name: read(a.name, axes, a.dtype) for a in fold.accumulators}
        main = fold.accumulators[0]
        result: Expr = finished[main.name]
        if fold.frames and main.update is not None:
            replacements: dict[Expr, Expr] = {
                read(a.name, a.axes, a.dtype): finished[a.name] for a in fold.accumulators
            }
            usable: Expr = const(True, "bool")
            for frame in fold.frames:
                final = self._expr(frame.value, scope)
                usable = apply("and", usable, self._is_last(frame, final))
                dtype = frame.value.dtype
                replacements[read(frame.name + OLD, frame.axes, dtype)] = self._last(frame)
                replacements[read(frame.name, frame.axes, dtype)] = final
            moved = self._expr_with(main.update, replacements, scope)
            result = simplify(apply("select", usable, result, moved))
        if fold.refined is not None:
            replacements = {read(a.name, a.axes, a.dtype): finished[a.name] for a in fold.accumulators}
            result = substitute(fold.refined, replacements)
        value = self._expr_with(fold.finish, {read(main.name, main.axes, main.dtype): result}, scope)
        scope.known[read(nest.name, nest.axes, nest.dtype)] = self._let(
            f"{nest.name}.value", nest.axes, convert(value, nest.dtype), scope
        )

    def _last(self, frame: Frame) -> Expr:
        """The value at which the loop leaves the accumulators."""
        if frame.name in self._late_frames:
            return const(frame.safe, frame.value.dtype)
        shared = self._carried_frames[frame.name]
        return read(shared.name + OLD, self._sorted(frozenset(frame.axes)), frame.value.dtype)

    def _is_last(self, frame: Frame, final: Expr) -> Expr:
        """True where the loop leaves the accumulators at the finished frame."""
        return const(False, "bool") if frame.name in self._late_frames else guards.usable(final, frame)

    def _expr_with(self, root: Expr, replacements: dict[Expr, Expr], scope: _Scope) -> Expr:
        for node in postorder(root):
            if isinstance(node, Read) and node not in replacements:
                replacements[node] = self._expr(node, scope)
        return substitute(root, replacements)

    def _store_outputs(self) -> None:
        along = [n for n in self.group.outputs if self.rolled in n.axes]
        for nest in self.group.outputs:
            if nest not in along or self.single_trip:
                self._store(nest, self.top)
        if along and not self.single_trip:
            for nest in along:
                self._preload(nest.body)
            plan = plan_loop(self.schedule, self.rolled, self._tile, self.tails, [])
            segments = []
            for trip in plan.trips:
                scope = _Scope(parent=self.top, edge=trip.edge)
                for nest in along:
                    self._store(nest, scope)
                segments.append(
                    Segment(
                        trip.start, trip.stop, trip.offset, trip.tile, tuple(scope.statements), trip.label, trip.edge
                    )
                )
            self.top.statements.append(Loop(self.rolled, (), tuple(segments), plan.to_visit, plan.first))

    def _store(self, nest: Nest, scope: _Scope) -> None:
        scope.statements.append(Store(nest.name, nest.axes, convert(self._expr(nest.body, scope), nest.dtype)))


def _late_frames(folds: list[Fold]) -> frozenset[str]:
    """Late frames, but of folds whose unfinished values others read."""
    read_early = frozenset().union(*(f.unfinished for fold in folds for f in fold.frames))
    for fold in reversed(folds):
        read_early |= fold.finish.tensors if fold.name in read_early else frozenset()
    return frozenset(f.name for fold in folds if fold.name not in read_early for f in fold.frames if f.late)
