"""Evaluation of the loops of a region, trip by trip, in float64: what a tree computes, legal or not.

Every nest has one array of its values, which are not numbers (of integers: zeros) until they are computed. A reduction begins
anew whenever the outermost of the loops that reduce it does. What is read too early, or added twice, shows in the result.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, assert_never

import numpy as np

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.domain import FLOAT64, Array, wide_type
from pallasfuse.ir.evaluate import evaluate_over
from pallasfuse.ir.expr import Expr, Index, Read, add, const, index, postorder, read, rebuild, with_args
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.region import Region
from pallasfuse.ir.tree import Do, Keep, Merge, Node, RangeLoop, walk

Window = tuple[int, int]
"""The first position of a piece of an axis, and the one after its last."""


def evaluate_trees(
    region: Region, body: Iterable[Node], inputs: Mapping[str, Any], sizes: Mapping[str, int] | None = None
) -> dict[str, Array]:
    """Returns the values of all nests after the loops of a body have run.

    sizes: of the tiles along axes, instead of those of the loops.
    """
    arrays: dict[str, Array] = {t.name: np.asarray(inputs[t.name]).astype(wide_type(t.dtype)) for t in region.inputs}
    for nest in region.nests:
        wide = np.dtype(wide_type(nest.dtype))
        arrays[nest.name] = np.full([a.extent for a in nest.axes], np.nan if wide.kind == "f" else 0, wide)
    run = _Run(region, arrays, sizes or {})
    run.body(tuple(body))
    return {n.name: arrays[n.name] for n in region.nests}


@dataclass(slots=True)
class _Run:
    region: Region
    arrays: dict[str, Array]
    sizes: Mapping[str, int]
    windows: dict[str, Window] = field(default_factory=dict)
    open: tuple[str, ...] = ()
    """The axes of the loops around."""
    begun: dict[str, Array] = field(default_factory=dict)
    """The elements of each reduction that have terms already."""

    def body(self, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            match node:
                case RangeLoop():
                    self._loop(node)
                case Do(name):
                    self._do(self.region.by_name[name])
                case Keep() | Merge():
                    pass
                case _:
                    assert_never(node)

    def _loop(self, loop: RangeLoop) -> None:
        for _, node in walk(loop.body):
            nest = self.region.by_name[node.nest] if isinstance(node, Do) else None
            reduced = {a.name for a in nest.reduced} if nest is not None else set()
            if nest is not None and loop.axis in reduced and not reduced & set(self.open):
                self.begun[nest.name] = np.zeros([a.extent for a in nest.axes], bool)
        outer = self.windows.get(loop.axis)
        start, stop = outer or (0, self.region.axes[loop.axis].extent)
        size = self.sizes.get(loop.axis, loop.size)
        tiles = range(start, stop, size)[loop.begin : loop.end or None]
        self.open = (*self.open, loop.axis)
        for at in tiles:
            self.windows[loop.axis] = (at, min(at + size, stop))
            self.body(loop.body)
        self.open = self.open[:-1]
        if outer is None:
            self.windows.pop(loop.axis, None)
        else:
            self.windows[loop.axis] = outer

    def _window(self, axis: Axis) -> Window:
        return self.windows.get(axis.name, (0, axis.extent))

    def _do(self, nest: Nest) -> None:
        space = (*nest.axes, *nest.reduced)
        pieces = {a: Axis(a.name, self._window(a)[1] - self._window(a)[0]) for a in space}
        here = tuple(slice(*self._window(a)) for a in nest.axes)
        tiles = {
            _piece(r): self.arrays[r.tensor][tuple(slice(*self._window(a)) for a in r.indices)] for r in _reads(nest)
        }
        body = self._on_pieces(nest.body, pieces)
        value = np.broadcast_to(
            evaluate_over(body, tuple(pieces[a] for a in space), tiles, FLOAT64), [pieces[a].extent for a in space]
        )
        if nest.reducer is None:
            self.arrays[nest.name][here] = value
            return
        dims = tuple(range(len(nest.axes), len(space)))
        folded = FLOAT64.reduce(nest.reducer, np.asarray(value), dims, nest.body.dtype).reshape(
            [pieces[a].extent for a in nest.axes]
        )
        if not {a.name for a in nest.reduced} & set(self.open):
            self.arrays[nest.name][here] = folded
            return
        begun = self.begun[nest.name]
        joined = FLOAT64.apply(nest.reducer.combine, [self.arrays[nest.name][here], folded], nest.body.dtype)
        self.arrays[nest.name][here] = np.where(begun[here], joined, folded)
        begun[here] = True

    def _on_pieces(self, body: Expr, pieces: Mapping[Axis, Axis]) -> Expr:
        def piece(node: Expr, args: tuple[Expr, ...]) -> Expr:
            match node:
                case Index(axis, dtype):
                    return add(const(self._window(axis)[0], dtype), index(pieces[axis], dtype))
                case Read(_, indices, dtype):
                    return read(_piece(node), (pieces[a] for a in indices), dtype)
                case _:
                    return with_args(node, args)

        return rebuild(body, piece)


def _piece(of: Read) -> str:
    """Returns a name for the piece of a tensor that is read at some axes."""
    return f"{of.tensor}[{', '.join(a.name for a in of.indices)}]"


def _reads(nest: Nest) -> list[Read]:
    return [n for n in postorder(nest.body) if isinstance(n, Read)]
