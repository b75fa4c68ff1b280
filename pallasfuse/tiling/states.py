"""The state of a pass as a value: tile programs that make one from a chunk of the rolled axis, merge several, and finish one.

A state is what a rolling loop carries, for the positions that it has seen: accumulators and frames, over their own axes. The
programs are those of a split axis (`lower`), but where a chunk lies is an input, and how much of the axis a state has seen is
part of it: sums that are frames are extrapolated from there to the whole axis.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import (
    Expr,
    Index,
    Read,
    add,
    apply,
    const,
    convert,
    index,
    postorder,
    read,
    rename_axes,
    sub,
    substitute,
)
from pallasfuse.ir.fold import OLD, Accumulator, Fold, Group
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.region import region_of_group
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.simplify import simplify
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Load, Reduce, Store, TileProgram
from pallasfuse.ir.tree import TreeKernel
from pallasfuse.targets import Target
from pallasfuse.tiling.bounds import guards, unmasked_in
from pallasfuse.tiling.flat import FoldsOfGroup, joined, part_of
from pallasfuse.tiling.masks import EVERYWHERE, extent, integer, intersect, maximum, minimum
from pallasfuse.tiling.tree_values import Kernels, OpenPass, Tiles
from pallasfuse.tiling.trees import TreeLowering
from pallasfuse.tiling.values import Scope

PART = ".part"
"""Suffix of the tensor that holds one value of a state, or that value of several states."""
_MERGED = ".merged"


def start_of(axis: Axis) -> str:
    """The int32 input of `local`: the position of the chunk's first element."""
    return f"{axis.name}.start"


@dataclass(frozen=True, slots=True)
class Piece:
    """A group some of whose axes are only pieces; their `Index` is counted from the start of the whole axis."""

    group: Group
    tensors: Mapping[str, Tensor]
    """What the group reads, over the pieces."""
    sliced: Mapping[str, tuple[str, tuple[tuple[int, Axis], ...]]]
    """Tensors that hold a piece of another one: (its name, the dimensions to cut and the whole axis that each lies along)."""


def localize(
    group: Group, tensors: Mapping[str, Tensor], sizes: Mapping[Axis, int], given: Mapping[str, Mapping[int, Axis]]
) -> Piece:
    """`group` over pieces of the axes in `sizes`.

    given: the dimensions of each input along which it is a piece already, and the whole axis that each lies along.
    """
    pieces = {axis: Axis(axis.name, size) for axis, size in sizes.items()}
    known = {name: tensors[name] for name in group.inputs}
    sliced: dict[str, tuple[str, tuple[tuple[int, Axis], ...]]] = {}
    known |= {name: Tensor(name, (), "int32") for name in map(start_of, sizes)}
    for name, dims in given.items():
        own = tensors[name].axes
        cut_axes = (Axis(a.name, sizes[dims[d]]) if d in dims else a for d, a in enumerate(own))
        known[name] = replace(tensors[name], axes=tuple(cut_axes))
    used: dict[str, None] = {}

    def of_input(node: Read) -> Read:
        along = [(d, a) for d, a in enumerate(node.indices) if a in sizes]
        cut = tuple((d, a) for d, a in along if d not in given.get(node.tensor, {}))
        name = node.tensor
        if cut:
            name = f"{node.tensor}.{'_'.join(f'{d}{a.name}' for d, a in cut)}.here"
            dims = dict(along)
            axes = (Axis(a.name, sizes[dims[d]]) if d in dims else a for d, a in enumerate(tensors[node.tensor].axes))
            known[name] = Tensor(name, tuple(axes), node.dtype)
            sliced[name] = node.tensor, cut
        return read(name, (pieces.get(a, a) for a in node.indices), node.dtype)

    def here(root: Expr) -> Expr:
        replacements: dict[Expr, Expr] = {}
        for node in postorder(root):
            if isinstance(node, Index) and node.axis in sizes:
                position = add(index(pieces[node.axis], "int32"), read(start_of(node.axis), (), "int32"))
                replacements[node] = convert(position, node.dtype)
            elif isinstance(node, Read) and node.tensor in group.inputs:
                replacements[node] = of_input(node)
        result = rename_axes(substitute(root, replacements), pieces)
        used.update(dict.fromkeys(t for t in sorted(result.tensors) if t in known))
        return result

    def over(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(pieces.get(a, a) for a in axes)

    def nest_here(nest: Nest) -> Nest:
        return replace(nest, axes=over(nest.axes), reduced=over(nest.reduced), body=here(nest.body))

    def accumulator_here(a: Accumulator) -> Accumulator:
        update = None if a.update is None else here(a.update)
        return replace(a, axes=over(a.axes), term=here(a.term), update=update)

    def fold_here(fold: Fold) -> Fold:
        return replace(
            fold, nest=nest_here(fold.nest), accumulators=tuple(map(accumulator_here, fold.accumulators)),
            frames=tuple(replace(f, axes=over(f.axes), value=here(f.value)) for f in fold.frames), finish=here(fold.finish),
            refined=None if fold.refined is None else here(fold.refined),
        )  # fmt: skip

    outputs = () if group.rolled in sizes else tuple(map(nest_here, group.outputs))
    moved = replace(
        group, rolled=pieces.get(group.rolled, group.rolled), parallel=over(group.parallel),
        folds=tuple(map(fold_here, group.folds)), inner=tuple(map(nest_here, group.inner)), outputs=outputs,
    )  # fmt: skip
    known |= {n.name: Tensor(n.name, n.axes, n.dtype) for n in outputs}
    return Piece(replace(moved, inputs=tuple(used)), known, sliced)


def local(group: Group, piece: Piece, schedule: Schedule, target: Target, *, inside: bool = False) -> TileProgram:
    """The state of one chunk: outputs `<name>.part`, with an axis of as many parts as the schedule splits the chunk into.

    inside: the chunk lies within the axis. Else positions outside of it contribute nothing.
    """
    return _Local(group, piece, schedule, target, inside=inside).run()


def merge(group: Group, tensors: Mapping[str, Tensor], parts: int) -> TileProgram:
    """One state from those of `parts` parts: inputs `<name>.part`, outputs `<name>.merged` without the axis of the parts."""
    return _Merging(group, tensors, parts).run()


def finish(group: Group, tensors: Mapping[str, Tensor]) -> TileProgram:
    """The results of the group from one state, whatever part of the axis it has seen."""
    return _Finishing(group, tensors, 1).run()


def counts_positions(program: TileProgram, group: Group) -> bool:
    """Does a state tell how much of the axis it has seen? Then a chunk is not split into parts."""
    return any(t.name == _seen_name(group) + PART for t in program.outputs)


def merged_name(tensor: str) -> str:
    """The output of `merge` for its input `<name>.part`."""
    return tensor.removesuffix(PART) + _MERGED


def identities(group: Group, tensors: Mapping[str, Tensor]) -> dict[str, float | int | bool]:
    """The state of no positions: the value of every element of each tensor, by name."""
    found: dict[str, float | int | bool] = {}
    for fold in group.folds:
        found |= {a.name + PART: a.reducer.identity(a.dtype) for a in fold.accumulators}
        found |= {f.name + OLD + PART: f.safe for f in fold.frames}
    found[_seen_name(group) + PART] = 0
    return {name: value for name, value in found.items() if name in tensors}


def _at_once(group: Group, parts: int) -> Schedule:
    """One block: states are small."""
    return Schedule(tuple((a, a.extent) for a in group.parallel), group.rolled, group.rolled.extent, parts=parts)


def _seen_name(group: Group) -> str:
    return f"{group.rolled.name}.seen"


class _Progress(TreeLowering):
    """How much of the axis a state has seen: counted where masks leave a term, row by row."""

    group: Group

    def _of(self, whole: Group) -> None:
        rows = frozenset(whole.parallel)

        def block(axis: Axis) -> tuple[Expr, int]:
            return (index(axis), 1) if axis in rows else (integer(0), axis.extent)

        possible = EVERYWHERE
        inner = unmasked_in(whole)
        for predicate in guards(whole.folds, whole.rolled, inner=inner, strict=whole.strict).predicates:
            possible = intersect(possible, extent(predicate, whole.rolled, block).possible)
        total = integer(whole.rolled.extent)
        self.low = integer(0) if possible.low is None else maximum(possible.low, integer(0))
        self.high = total if possible.high is None else minimum(possible.high, total)
        self.every = maximum(simplify(sub(self.high, self.low)), integer(0))
        self.seen_axes = self._sorted(self.low.axes | self.high.axes)

    def _needs_seen(self) -> bool:
        """Is a sum read before it is finished, or is the correction of a value right for the whole axis only?"""
        if any(f.refined is not None for f in self.group.folds):
            return True
        folds = {f.name: f for f in self.group.folds}
        sums = {f.name for f in self.group.folds if f.nest.reducer == SUM}
        direct = {u for f in self._carried_frames.values() for u in f.unfinished}
        stack = list(direct)
        while stack:
            finish = folds[stack.pop()].finish
            more = {t for t in finish.tensors if t in folds} - direct
            direct |= more
            stack += more
        return not sums.isdisjoint(direct)

    def _states(self, folds: list[Fold]) -> list[tuple[Tensor, Read]]:
        """As in a split kernel, but part after part: what a block stores is contiguous, and parts are joined by appending."""
        found = super()._states(folds)
        return [(replace(t, axes=(self.part, *(a for a in t.axes if a != self.part))), value) for t, value in found]

    def _seen_tensor(self) -> Tensor:
        return Tensor(_seen_name(self.group) + PART, (self.part, *self.seen_axes), "int32")


class _Local(_Progress):
    def __init__(self, whole: Group, piece: Piece, schedule: Schedule, target: Target, *, inside: bool) -> None:
        self.group, self.checks, self.length = piece.group, not inside, whole.rolled.extent
        region = region_of_group(replace(piece.group, outputs=()), piece.tensors)
        tiles = Tiles(target.tails, target.smallest_dot, target.tile_multiple)
        known = Kernels(region, FoldsOfGroup(piece.group), tiles, piece.group.strict, dict(piece.tensors))
        at_the_end = () if any(whole.rolled in n.axes for n in whole.outputs) else whole.outputs
        last = (*(f.nest for f in piece.group.folds), *at_the_end) if at_the_end else ()
        super().__init__(part_of(piece.group, schedule, f"{piece.group.name}_local"), known, frozenset(), last)
        self._of(whole)

    def _closed(self, own: OpenPass, scope: Scope, *, split: bool) -> None:
        super()._closed(own, scope, split=split)
        if self._needs_seen():
            assert self.part.extent == 1, "positions are counted from the start of the chunk"
            tensor = self._seen_tensor()
            scope.statements.append(Store(tensor.name, tensor.axes, self._seen(integer(self.rolled.extent))))
            self.outputs.append(tensor)

    def _origin(self) -> Expr:
        return self._expr(read(start_of(self.rolled), (), "int32"), self.root)

    def _seen(self, done: Expr) -> Expr:
        origin = self._origin()
        return maximum(sub(minimum(self.high, add(origin, done)), maximum(self.low, origin)), integer(0))

    def _progress(self, done: str) -> tuple[Expr, Expr]:
        return self._seen(read(done, (), "int32")), self.every

    def _is_padded(self, axis: Axis, scope: Scope) -> bool:
        return (axis == self.rolled and self.checks) or super()._is_padded(axis, scope)

    def _in_range(self, value: Expr, padded: list[Axis], identity: float | int | bool, scope: Scope) -> Expr:
        if self.rolled in padded and self.checks:
            position = add(index(self.rolled), self._origin())
            below = apply("lt", position, integer(self.length))
            value = apply(
                "select", apply("and", below, apply("ge", position, integer(0))), value, const(identity, value.dtype)
            )
            padded = [a for a in padded if a != self.rolled or super(_Local, self)._is_padded(a, scope)]
        return super()._in_range(value, padded, identity, scope)


class _Joining(_Progress):
    """A kernel that begins with the states of some parts."""

    def __init__(self, group: Group, tensors: Mapping[str, Tensor], parts: int, kernel: TreeKernel) -> None:
        self.group = group
        part = Axis(f"{group.rolled.name}.part", parts)
        known = Kernels(
            region_of_group(group, tensors), FoldsOfGroup(group), Tiles("exact"), group.strict, dict(tensors)
        )
        known.partial |= {
            f.name: OpenPass(group.rolled, list(group.folds), frozenset(), part=part) for f in group.folds
        }
        super().__init__(kernel, known, frozenset())
        self.part, self.parts = part, Axis(part.name + "s", parts)
        self._of(group)
        self._enter(list(group.folds))
        self.tensors |= {t.name: t for t, _ in self._states(list(group.folds))}

    def _load_seen(self) -> None:
        """How much all parts have seen together, as the value `_seen_name`."""
        tensor, name = self._seen_tensor(), _seen_name(self.group)
        self.tensors[tensor.name] = tensor
        indices = tuple(self.parts if a == self.part else a for a in tensor.axes)
        parts = read(f"{name}.parts", self._sorted(frozenset(indices)), "int32")
        self.root.statements.append(Load(parts.tensor, tensor.name, indices, "int32"))
        self.root.statements.append(Reduce(name, self.seen_axes, SUM, parts, (self.parts,)))

    def _progress(self, done: str) -> tuple[Expr, Expr]:
        return read(_seen_name(self.group), self.seen_axes, "int32"), self.every


class _Merging(_Joining):
    _done = "together"

    def __init__(self, group: Group, tensors: Mapping[str, Tensor], parts: int) -> None:
        super().__init__(
            group, tensors, parts, joined(group, _at_once(group, parts), f"{group.name}_merge", results=False)
        )
        if self._needs_seen():
            self._load_seen()

    def _finished(self, fold: Fold, folds: list[Fold], scope: Scope) -> None:
        """Of the last reduction: stores what has been merged. Nobody reads the finished values."""
        nest = fold.nest
        scope.known[read(nest.name, nest.axes, nest.dtype)] = read(nest.name, nest.axes, nest.dtype)
        if fold is not folds[-1]:
            return
        if self._needs_seen():
            self._store_merged(self._seen_tensor(), read(_seen_name(self.group), self.seen_axes, "int32"), scope)
        for tensor, value in self._states(folds):
            self._store_merged(tensor, value, scope)

    def _store_merged(self, tensor: Tensor, value: Expr, scope: Scope) -> None:
        axes = tuple(a for a in tensor.axes if a != self.part)
        self.outputs.append(Tensor(merged_name(tensor.name), axes, tensor.dtype))
        scope.statements.append(Store(merged_name(tensor.name), axes, value))


class _Finishing(_Joining):
    def __init__(self, group: Group, tensors: Mapping[str, Tensor], parts: int) -> None:
        super().__init__(
            group, tensors, parts, joined(group, _at_once(group, parts), f"{group.name}_finish", results=True)
        )
        if any(f.refined is not None for f in group.folds):
            self._load_seen()

    def _refined(self, value: Expr, otherwise: Expr) -> Expr:
        seen, every = self._progress("")
        return apply("select", apply("eq", seen, every), value, otherwise)
