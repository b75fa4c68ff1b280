"""Runs a group by the definition of its folds (ir/fold.py): parts of the rolled axis, any frames on the way.

This is not how kernels are lowered: frames between the parts are random, because only the last one matters
(design, "frames are free").
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate_expr
from pallasfuse.ir.expr import Expr, Index, Read, convert, index, postorder, read, rename_axes, substitute
from pallasfuse.ir.fold import OLD, Fold, Group
from pallasfuse.ir.ops import OPS

Array = np.ndarray[Any, Any]


class GroupRun:
    """One group on given inputs; `tensors` collects what it computes."""

    def __init__(
        self, group: Group, inputs: Mapping[str, Array], random: np.random.Generator, frame_error: float = 0.0
    ) -> None:
        """`frame_error`: how far the last frame of a refined fold is from what it should be."""
        self.group, self.random, self.frame_error = group, random, frame_error
        self.tensors: dict[str, Array] = {t: np.asarray(inputs[t]) for t in group.inputs}

    def run(self, *, split: bool) -> dict[str, Array]:
        """The group's outputs. `split`: every part starts anew and is combined at the end; else one part continues the last."""
        self._inner()
        for pass_index in range(self.group.passes):
            for fold in (f for f in self.group.folds if f.pass_index == pass_index):
                self._fold(fold, split)
            self._inner()
        return {n.name: evaluate_expr(n.body, n.axes, self.tensors) for n in self.group.outputs}

    def _inner(self) -> None:
        """Inner reductions whose reads are known by now."""
        for nest in self.group.inner:
            if nest.name not in self.tensors and nest.reads <= self.tensors.keys():
                value = evaluate_expr(nest.body, nest.axes + nest.reduced, self.tensors)
                self.tensors[nest.name] = nest.reducer.reduce(value, axis=tuple(range(len(nest.axes), value.ndim)))

    def _fold(self, fold: Fold, split: bool) -> None:
        final = {f.name: evaluate_expr(f.value, f.axes, self.tensors) for f in fold.frames}
        if fold.refined is not None:
            final = {name: value + self.frame_error for name, value in final.items()}
        positions = self.random.permutation(self.group.rolled.extent)
        cuts = np.sort(self.random.integers(0, len(positions) + 1, 3))
        parts = [p for p in np.split(positions, cuts) if len(p)]
        state: list[Array] | None = None
        at: dict[str, Array] = {}
        for n, part in enumerate(parts):
            seen = part if split else np.concatenate(parts[: n + 1])
            frames = final if part is parts[-1] and not split else self._random_frames(fold, seen)
            new = self._terms(fold, part, frames)
            if split:
                new, frames = self._moved(fold, new, frames, final), final
            if state is not None:
                new = self._combined(fold, self._moved(fold, state, at, frames), new)
            state, at = new, frames
        assert state is not None
        named = {a.name: v for a, v in zip(fold.accumulators, state, strict=True)}
        if fold.refined is not None:
            main = fold.accumulators[0]
            named[main.name] = evaluate_expr(fold.refined, main.axes, self.tensors | named)
        self.tensors[fold.name] = evaluate_expr(fold.finish, fold.nest.axes, self.tensors | named)

    def _random_frames(self, fold: Fold, seen: Array) -> dict[str, Array]:
        """Any frames; those that elements are compared with are the extrema of the positions seen, as no other has them all."""
        found = {f.name: self.random.uniform(0.5, 2.0, [a.extent for a in f.axes]) for f in fold.frames}
        folds = {f.name: f for f in self.group.folds}
        return found | {f.name: self._terms(folds[f.value.tensor], seen, {})[0] for f in fold.frames if f.compared}

    def _terms(self, fold: Fold, part: Array, frames: Mapping[str, Array]) -> list[Array]:
        """Every accumulator over some positions of the rolled axis."""
        rolled = self.group.rolled
        short = Axis(rolled.name, len(part))
        results = []
        for a in fold.accumulators:
            term = _with_positions(a.term, rolled)
            tensors: dict[str, Array] = {"positions": part}
            for node in postorder(term):
                if isinstance(node, Read) and node.tensor != "positions":
                    value = (dict(self.tensors) | dict(frames))[node.tensor]
                    for dim, axis in enumerate(node.indices):
                        if axis == rolled:
                            value = np.take(value, part, axis=dim)
                    tensors[node.tensor] = value
            space = tuple(short if x == rolled else x for x in fold.nest.axes + fold.nest.reduced)
            full = evaluate_expr(rename_axes(term, {rolled: short}), space, tensors)
            results.append(a.reducer.reduce(full, axis=tuple(range(len(fold.nest.axes), full.ndim))))
        return results

    def _moved(self, fold: Fold, state: list[Array], old: Mapping[str, Array], new: Mapping[str, Array]) -> list[Array]:
        known = self.tensors | dict(new) | {n + OLD: v for n, v in old.items()}
        known |= {a.name: v for a, v in zip(fold.accumulators, state, strict=True)}
        return [v if a.update is None else evaluate_expr(a.update, a.axes, known)
                for a, v in zip(fold.accumulators, state, strict=True)]  # fmt: skip

    def _combined(self, fold: Fold, a: list[Array], b: list[Array]) -> list[Array]:
        return [OPS[x.reducer.combine].evaluate(p, q) for x, p, q in zip(fold.accumulators, a, b, strict=True)]


def _with_positions(term: Expr, rolled: Axis) -> Expr:
    """Positions along the rolled axis as a read, so that a part of them can be taken."""
    reads = {n: convert(read("positions", (n.axis,), n.dtype), n.dtype)
             for n in postorder(term) if isinstance(n, Index) and n.axis == rolled}  # fmt: skip
    assert all(index(rolled, n.dtype) is n for n in reads)
    return substitute(term, reads)
