"""Runs a group by the definition of its folds (`ir.fold`): parts of the rolled axis, arbitrary frames on the way.

This is not how kernels are lowered. Parts are cut anywhere and taken in any order, frames between them are random (only the
last one matters: design, "frames are free"), and states are either continued (rolling update) or combined (split-k).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate_nest, evaluate_over
from pallasfuse.ir.expr import Expr, Index, Read, postorder, read, rename_axes, substitute
from pallasfuse.ir.fold import OLD, Accumulator, Fold, Frame, Group
from pallasfuse.ir.reducers import MAX, MIN
from pallasfuse.verification.domain import FiniteFields
from pallasfuse.verification.field import Array
from pallasfuse.verification.value import ASSUMED, Value

_POSITIONS = "positions"


class GroupRun:
    """One group over the finite fields. `tensors` holds what is known of its inputs and what it has computed."""

    def __init__(self, group: Group, tensors: Mapping[str, Value], fields: FiniteFields, *, split: bool) -> None:
        """Prepares a run of the group.

        split: every part starts anew and is combined at the end; else one part continues the last.
        """
        self.group, self.fields, self.split = group, fields, split
        self.tensors = {t: tensors[t] for t in group.inputs}

    def run(self) -> Iterator[tuple[str, Value]]:
        """Yields (name, value) of every fold, then of every output."""
        self._inner()
        for pass_index in range(self.group.passes):
            for fold in (f for f in self.group.folds if f.pass_index == pass_index):
                self.tensors[fold.name] = self._fold(fold)
                yield fold.name, self.tensors[fold.name]
            self._inner()
        for nest in self.group.outputs:
            yield nest.name, evaluate_nest(nest, self.tensors, self.fields)

    def _inner(self) -> None:
        """Computes the inner reductions whose reads are known by now."""
        for nest in self.group.inner:
            if nest.name not in self.tensors and nest.reads <= self.tensors.keys():
                self.tensors[nest.name] = evaluate_nest(nest, self.tensors, self.fields)

    def _value(self, expr: Expr, axes: tuple[Axis, ...], extra: Mapping[str, Value]) -> Value:
        value = evaluate_over(expr, axes, self.tensors | dict(extra), self.fields)
        return value.broadcast(tuple(a.extent for a in axes))

    def _fold(self, fold: Fold) -> Value:
        final = {f.name: self._value(f.value, f.axes, {}) for f in fold.frames}
        positions = self.fields.tower.generator.permutation(self.group.rolled.extent)
        cuts = np.sort(self.fields.tower.generator.integers(0, len(positions) + 1, 2))
        parts = [p for p in np.split(positions, cuts) if len(p)]
        state: list[Value] | None = None
        at: dict[str, Value] = {}
        for n, part in enumerate(parts):
            last = part is parts[-1]
            seen = part if self.split else np.concatenate(parts[: n + 1])
            frames = final if last and not self.split else {f.name: self._any(f, seen) for f in fold.frames}
            new = self._terms(fold, part, frames)
            if self.split:
                new, frames = self._moved(fold, new, frames, final), final
            if state is not None:
                new = self._combined(fold, self._moved(fold, state, at, frames), new)
            state, at = new, frames
        assert state is not None
        named = {a.name: v for a, v in zip(fold.accumulators, state, strict=True)}
        if fold.refined is not None:
            main = fold.accumulators[0]
            named[main.name] = self._value(fold.refined, main.axes, named)
        return self.fields.finished(self._value(fold.finish, fold.nest.axes, named))

    def _any(self, frame: Frame, seen: Array) -> Value:
        """Returns any value for a frame. One that elements are compared with is the extremum of the positions seen: at no other
        value are all accumulators right."""
        if not frame.compared:
            return random_frame(frame, self.fields)
        (name,) = frame.unfinished
        return self._terms(next(f for f in self.group.folds if f.name == name), seen, {})[0]

    def _terms(self, fold: Fold, part: Array, frames: Mapping[str, Value]) -> list[Value]:
        """Every accumulator over some positions of the rolled axis."""
        rolled = self.group.rolled
        short = Axis(rolled.name, len(part))
        results = []
        for a in fold.accumulators:
            term, tensors = self._of_part(a.term, part, self.tensors | dict(frames))
            over = tuple(short if x == rolled else x for x in fold.nest.reduced)
            space = fold.nest.axes + over
            full = evaluate_over(rename_axes(term, {rolled: short}), space, tensors, self.fields)
            full = full.broadcast(tuple(x.extent for x in space))
            dims = tuple(range(len(fold.nest.axes), len(space)))
            folded = self.fields.reduce(a.reducer, full, dims, a.dtype)
            results.append(folded.reshape(tuple(x.extent for x in fold.nest.axes)))
        return results

    def _of_part(self, term: Expr, part: Array, tensors: Mapping[str, Value]) -> tuple[Expr, dict[str, Value]]:
        """Returns a term, and the tensors that it reads, over some positions of the rolled axis.

        Every read has a tensor of its own: one tensor may be read along the rolled axis in one place and along another axis in the
        next.
        """
        rolled = self.group.rolled
        reads: dict[Expr, Expr] = {}
        taken: dict[str, Value] = {_POSITIONS: self.fields.integers(part, "int32")}
        for number, node in enumerate(postorder(term)):
            match node:
                case Index(axis, dtype) if axis == rolled:  # a read, so that a part of the positions can be taken
                    reads[node] = read(_POSITIONS, (axis,), dtype)
                case Read(tensor, indices, dtype):
                    name = f"{tensor}@{number}"
                    reads[node] = read(name, indices, dtype)
                    taken[name] = tensors[tensor]
                    for dim in (d for d, axis in enumerate(indices) if axis == rolled):
                        taken[name] = taken[name].take((slice(None),) * dim + (part,))
        return substitute(term, reads), taken

    def _moved(self, fold: Fold, state: list[Value], old: Mapping[str, Value], new: Mapping[str, Value]) -> list[Value]:
        """The accumulators, expressed at other frames."""
        known = dict(new) | {n + OLD: v for n, v in old.items()}
        known |= {a.name: v for a, v in zip(fold.accumulators, state, strict=True)}

        return [self._moved_one(fold, a, v, known) for a, v in zip(fold.accumulators, state, strict=True)]

    def _moved_one(self, fold: Fold, a: Accumulator, value: Value, known: Mapping[str, Value]) -> Value:
        if a.update is None:
            return value
        result = self._value(a.update, a.axes, known)
        read_frames = [f for f in fold.frames if f.name in a.update.tensors]
        if a.reducer not in (MAX, MIN) or not all(f.positive for f in read_frames):
            return result
        # the factor of a maximum is positive because the frames are: where it is not, as 1 + r for a square r, nothing is proven
        at = [
            self._value(
                a.update,
                a.axes,
                {**known, a.name: self.fields.constant(n, a.dtype, len(a.axes)).broadcast(value.shape)},
            )
            for n in (1.0, 0.0)
        ]
        slope = self.fields.apply("sub", at, a.dtype)
        return replace(result, taint=result.taint | np.where(self.fields.sign(slope) < 0, ASSUMED, np.uint8(0)))

    def _combined(self, fold: Fold, a: list[Value], b: list[Value]) -> list[Value]:
        return [self.fields.apply(x.reducer.combine, [p, q], x.dtype)
                for x, p, q in zip(fold.accumulators, a, b, strict=True)]  # fmt: skip


def random_frame(frame: Frame, fields: FiniteFields) -> Value:
    """Returns an arbitrary value of a frame; a square where the repair relies on a positive one."""
    value = fields.random([a.extent for a in frame.axes], frame.value.dtype)
    return fields.squares(value) if frame.positive else value
