"""Passes over the rolled axis: the loop, the repairs in it, the combination of parts, and the values after it."""

import math
from collections.abc import Callable, Mapping

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Expr, Read, apply, const, convert, postorder, read, sub, substitute
from pallasfuse.ir.fold import OLD, Fold, Frame
from pallasfuse.ir.ranges import Range
from pallasfuse.ir.reducers import MAX, MIN, SUM
from pallasfuse.ir.simplify import simplify
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import (
    Let,
    Reduce,
    before,
    least,
    most,
    to_visit,
    visited,
)
from pallasfuse.tiling.masks import Extent, Interval
from pallasfuse.tiling.ranges import range_of
from pallasfuse.tiling.values import Scope, Values


class Passes(Values):
    """The steps of folds in a loop with their repairs, the same from the states of all parts, and the values after that."""

    _carried_frames: Mapping[str, Frame]
    """Of the current pass: every carried frame's name -> the frame that is carried for it."""
    _late_frames: frozenset[str]
    _done = ""
    """What counts the positions in the states that are combined; empty: they are those of all parts."""

    def _progress(self, done: str) -> tuple[Expr, Expr]:
        """Returns the number of positions that the scalar `done` counts, and their number in all."""
        return read(done, (), "int32"), read(to_visit(self.rolled), (), "int32")

    def _enter(self, folds: list[Fold]) -> None:
        self._late_frames = _late_frames(folds)
        self._carried_frames = self._share_frames(folds)
        bodies = {f.name: f.nest.body for f in folds}
        compared = [f for fold in folds for f in fold.frames if f.compared]
        self._elements = {bodies[u]: f"{u}.element" for f in compared for u in f.unfinished}

    def _range_ends(self, visible: Expr, all_if_none: bool) -> Extent:
        """Where something is visible in the rows of the block, and where everything surely is, from the ends of a range."""
        known = (r for r in self.ranges if r.predicate is visible and r.all_if_none == all_if_none)
        found = next(known, None)
        if found is None:
            rows = self._sorted(visible.axes - {self.rolled})
            found = range_of(visible, self.rolled, rows, number=len(self.ranges), all_if_none=all_if_none)
            self.ranges.append(found)
            self.tensors = {**self.tensors, **{t.name: t for t in found.found}}
            self._range_of_block(found)
        extent = const(self.rolled.extent, "int32")

        def between(of: Callable[[str], str]) -> Interval:
            left, right = (read(of(t.name), (), "int32") for t in (found.left, found.right))
            return Interval(sub(extent, left), right)

        return Extent(between(most), between(least))

    def _range_of_block(self, found: Range) -> None:
        """Both ends in the block, the largest of its rows, and those of what is solid, the smallest. Rows outside their axes do not
        count."""
        left, right, count = (self._expr(read(t.name, t.axes, t.dtype), self.top) for t in found.found)
        rows = self._sorted(frozenset(found.left.axes))
        outside = [a for a in rows if self.tails != "exact" and a.extent % self._tile(a)]
        for tensor, end in ((found.left, left), (found.right, right)):
            here = self._let(f"{tensor.name}.here", rows, found.visited(end, right), self.top)
            value = self._in_range(here, outside, 0, self.top)
            self.top.statements.append(Reduce(most(tensor.name), (), MAX, value, rows))
            here = self._let(f"{tensor.name}.solid", rows, found.solid(end, left, right, count), self.top)
            value = self._in_range(here, outside, self.rolled.extent, self.top)
            self.top.statements.append(Reduce(least(tensor.name), (), MIN, value, rows))

    def _at_safe_frames(self, folds: list[Fold]) -> dict[Expr, Expr]:
        """Returns the safe values at which late frames stay during the pass."""
        fixed: dict[Expr, Expr] = {}
        for frame in (f for fold in folds for f in fold.frames if f.name in self._late_frames):
            for name in (frame.name, frame.name + OLD):
                fixed[read(name, frame.axes, frame.value.dtype)] = const(frame.safe, frame.value.dtype)
        return fixed

    # --- one step of a pass

    def _frames(self, fold: Fold, values: Mapping[str, Fold], scope: Scope) -> None:
        """The frames of one fold in this step. values: the folds of its pass."""
        for frame in fold.frames:
            if frame.name not in self._late_frames:
                self._frame(frame, fold, values, scope)

    def _accumulate(self, fold: Fold, scope: Scope) -> None:
        """The accumulators of one fold after this step, at its frames."""
        nest = fold.nest
        for a in fold.accumulators:
            tile = self._reduction(f"{a.name}.tile", nest.axes, a.reducer, a.term, nest.reduced, scope, nest.precision)
            carried = read(a.name, self._sorted(frozenset(nest.axes)), a.dtype)
            kept = carried if a.update is None else self._bind(a.update, fold, scope)
            joined = apply(a.reducer.combine, convert(kept, tile.dtype), tile)
            scope.statements.append(Let(f"{a.name}.next", self._sorted(frozenset(nest.axes)), joined))

    def _bind(self, update: Expr, fold: Fold, scope: Scope) -> Expr:
        """An update over carried accumulators and the frames of this step."""
        replacements: dict[Expr, Expr] = {}
        own = {a.name for a in fold.accumulators}
        update = simplify(substitute(update, dict(scope.fixed)))
        for node in postorder(update):
            if isinstance(node, Read):
                if node.tensor in own:
                    replacements[node] = read(node.tensor, self._sorted(node.axes), node.dtype)
                else:
                    known = self._find(node, scope)
                    replacements[node] = known if known is not None else self._emit_read(node, self.top)
        return substitute(update, replacements)

    def _current(self, fold: Fold, values: Mapping[str, Fold], scope: Scope, suffix: str, done: str) -> Expr:
        """The value of a fold, over the accumulators named with `suffix`; a sum over `done` positions is extrapolated to the
        whole axis."""
        main = fold.accumulators[0]
        value: Expr = read(main.name + suffix, self._sorted(frozenset(main.axes)), main.dtype)
        if done and fold.nest.reducer == SUM and dtypes.is_float(main.dtype):
            seen, every = self._progress(done)
            ratio = apply("div", convert(every, main.dtype), convert(seen, main.dtype))
            value = apply("select", apply("eq", seen, every), value, apply("mul", value, ratio))
        replacements: dict[Expr, Expr] = {read(main.name, main.axes, main.dtype): value}
        for node in postorder(fold.finish):
            if isinstance(node, Read) and node.tensor in values and node.tensor != fold.name:
                replacements[node] = self._current(values[node.tensor], values, scope, suffix, done)
        return convert(substitute(fold.finish, replacements), fold.nest.dtype)

    def _share_frames(self, folds: list[Fold]) -> dict[str, Frame]:
        """Every carried frame's name -> the first frame of the pass with the same value: carried once."""
        first: dict[tuple[object, ...], Frame] = {}
        frames = [f for fold in folds for f in fold.frames if f.name not in self._late_frames]
        return {f.name: first.setdefault((f.value, f.positive, f.low, f.high, f.compared), f) for f in frames}

    def _frame(self, frame: Frame, fold: Fold, values: Mapping[str, Fold], scope: Scope) -> None:
        """The new and the old value of a frame, both usable: where the unfinished value is not, a safe one stands in."""
        shared = self._carried_frames[frame.name]
        axes, dtype = self._sorted(frozenset(frame.axes)), frame.value.dtype
        new = read(shared.name, axes, dtype)
        if new not in scope.known:
            value = self._frame_value(shared, values, scope, ".next", visited(self.rolled))
            scope.statements.append(Let(shared.name, axes, guarded(value, shared), pinned=True))
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

    def _frame_value(self, frame: Frame, values: Mapping[str, Fold], scope: Scope, suffix: str, done: str) -> Expr:
        replacements: dict[Expr, Expr] = {}
        for node in postorder(frame.value):
            if isinstance(node, Read) and node.tensor in values:
                replacements[node] = self._current(values[node.tensor], values, scope, suffix, done)
        rest = substitute(frame.value, replacements)
        return self._outer(rest, scope)

    def _outer(self, root: Expr, scope: Scope) -> Expr:
        """Resolve what is read from outside the loop; carried values and scalars stay as they are."""
        replacements: dict[Expr, Expr] = {}
        for node in postorder(root):
            if not isinstance(node, Read):
                continue
            nest = self.nests.get(node.tensor)
            if node.tensor in self.tensors or (nest is not None and nest.is_reduction):
                known = self._find(node, scope)
                replacements[node] = known if known is not None else self._emit_read(node, self.top)
        return substitute(root, replacements)

    def _is_empty(self, frame: Frame, values: Mapping[str, Fold], scope: Scope, suffix: str) -> Expr | None:
        """Returns whether a max or min that the frame depends on still is its identity."""
        result: Expr | None = None
        for name in frame.empties:
            nest = values[name].nest
            assert nest.reducer is not None
            current = self._current(values[name], values, scope, suffix, "")
            here = apply("eq", current, const(nest.reducer.identity(nest.dtype), nest.dtype))
            result = here if result is None else apply("or", result, here)
        return result

    # --- the states of parts

    def _states(self, folds: list[Fold]) -> list[tuple[Tensor, Read]]:
        """Returns what a pass over one part leaves: (tensor over all parts, its value in a block)."""
        found = []
        frames = dict.fromkeys(self._carried_frames.values())
        values = [(a.name, a.axes, a.dtype) for f in folds for a in f.accumulators]
        values += [(f.name + OLD, f.axes, f.value.dtype) for f in frames]
        for name, axes, dtype in values:
            tensor = Tensor(f"{name}.part", (self.part, *self._sorted(frozenset(axes))), dtype)
            found.append((tensor, read(name, self._sorted(frozenset(axes)), dtype)))
        return found

    def _combine(self, fold: Fold, values: Mapping[str, Fold], loaded: Mapping[str, Read]) -> None:
        """The accumulators of one fold from those of all parts. values: the folds of its pass; loaded: states by name."""
        fixed = self._at_safe_frames([fold])
        frames: dict[Expr, Expr] = {}
        for frame in fold.frames:
            if frame.name not in self._late_frames:
                frames |= self._last_frame(frame, values, loaded)
        empty: Expr = const(True, "bool")
        for a in fold.accumulators:
            identity = const(a.reducer.identity(a.dtype), a.dtype)
            empty = apply("and", empty, apply("eq", loaded[a.name], identity))
        for a in fold.accumulators:
            identity = const(a.reducer.identity(a.dtype), a.dtype)
            value: Expr = loaded[a.name]
            if a.update is not None:
                own: dict[Expr, Expr] = {read(b.name, b.axes, b.dtype): loaded[b.name] for b in fold.accumulators}
                moved = self._expr_with(simplify(substitute(a.update, fixed)), own | frames, self.top)
                value = simplify(apply("select", empty, identity, moved))
            padded = [self.parts] if self.tails != "exact" and self._tile(self.parts) != self.parts.extent else []
            value = self._in_range(value, padded, identity.value, self.top)
            axes = self._sorted(frozenset(a.axes))
            self.top.statements.append(Reduce(a.name, axes, a.reducer, value, (self.parts,), joins=True))

    def _last_frame(self, frame: Frame, values: Mapping[str, Fold], loaded: Mapping[str, Read]) -> dict[Expr, Expr]:
        """Returns what an update reads of a frame: its value over all parts, usable, and that of each part."""
        shared = self._carried_frames[frame.name]
        axes, dtype = self._sorted(frozenset(frame.axes)), frame.value.dtype
        last = read(shared.name + OLD, axes, dtype)
        if last not in self.top.known:
            value = self._frame_value(shared, values, self.top, "", self._done)
            self.top.statements.append(Let(shared.name + OLD, axes, guarded(value, shared), pinned=True))
            self.top.known[last] = last
        return {
            read(frame.name, frame.axes, dtype): last,
            read(frame.name + OLD, frame.axes, dtype): loaded[shared.name + OLD],
        }

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
            if fold.identity_where:
                identity = const(main.reducer.identity(main.dtype), main.dtype)
                result = apply("select", self._was_empty(fold, folds), identity, result)
        if fold.refined is not None:
            replacements = {read(a.name, a.axes, a.dtype): finished[a.name] for a in fold.accumulators}
            result = self._refined(substitute(fold.refined, replacements), result)
        value = self._expr_with(fold.finish, {read(main.name, main.axes, main.dtype): result}, scope)
        scope.known[read(nest.name, nest.axes, nest.dtype)] = self._let(
            f"{nest.name}.value", nest.axes, convert(value, nest.dtype), scope
        )

    def _was_empty(self, fold: Fold, folds: list[Fold]) -> Expr:
        """Returns whether a finished max or min is its identity that makes this reduction its own (`Fold.identity_where`)."""
        values = {f.name: f.nest for f in folds}
        result: Expr = const(False, "bool")
        for name in fold.identity_where:
            nest = values[name]
            assert nest.reducer is not None
            final = self._expr(read(nest.name, nest.axes, nest.dtype), self.top)
            result = apply("or", result, apply("eq", final, const(nest.reducer.identity(nest.dtype), nest.dtype)))
        return simplify(result)

    def _refined(self, value: Expr, otherwise: Expr) -> Expr:
        """The corrected value of a fold whose accumulators have seen the whole axis."""
        return value

    def _last(self, frame: Frame) -> Expr:
        """The value at which the loop leaves the accumulators."""
        if frame.name in self._late_frames:
            return const(frame.safe, frame.value.dtype)
        shared = self._carried_frames[frame.name]
        return read(shared.name + OLD, self._sorted(frozenset(frame.axes)), frame.value.dtype)

    def _is_last(self, frame: Frame, final: Expr) -> Expr:
        """Returns whether the loop leaves the accumulators at the finished frame."""
        return const(False, "bool") if frame.name in self._late_frames else usable(final, frame)


def _late_frames(folds: list[Fold]) -> frozenset[str]:
    """Late frames, but of folds whose unfinished values others read."""
    read_early = frozenset().union(*(f.unfinished for fold in folds for f in fold.frames))
    for fold in reversed(folds):
        read_early |= fold.finish.tensors if fold.name in read_early else frozenset()
    return frozenset(f.name for fold in folds if fold.name not in read_early for f in fold.frames if f.late)


# --- where the unfinished value of a frame can be used, and what stands in for it where not


def usable(value: Expr, frame: Frame) -> Expr:
    """True where a frame's value is finite, and positive and in its range if the repair relies on that; a compared one always."""
    if frame.compared:
        return const(True, "bool")
    below = apply("lt", apply("abs", value), const(frame.high, value.dtype))
    return apply("and", below, apply("gt", value, const(frame.low, value.dtype))) if frame.positive else below


def guarded(value: Expr, frame: Frame) -> Expr:
    """The value; the end of the frame's range that is next to it where it lies outside; a safe one where there is no such end."""
    if frame.compared:
        return value
    dtype = value.dtype
    instead: Expr = const(frame.safe, dtype)
    if frame.low > 0:
        low = const(frame.low, dtype)
        instead = apply("select", apply("le", value, low), low, instead)
    if frame.high < math.inf:
        high = const(frame.high, dtype)
        instead = apply("select", apply("ge", value, high), high, instead)
    return apply("select", usable(value, frame), value, instead)
