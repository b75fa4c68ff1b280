"""Merges of a schedule tree: reductions from the states that the blocks of an earlier kernel have left, part by part."""

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Read, read
from pallasfuse.ir.fold import OLD, Fold
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.tile_program import Load
from pallasfuse.tiling.rules import broken
from pallasfuse.tiling.tree_values import Kernels, OpenPass, TreeValues
from pallasfuse.tiling.values import Scope


class TreeMerges(TreeValues):
    """A kernel under construction, in which states of parts are joined."""

    def __init__(self, known: Kernels) -> None:
        super().__init__(known)
        self.joined: list[tuple[Scope, str]] = []
        """The bodies where the states of parts were joined, with the reduction."""

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
