"""Folds of the nests of a region, derived where a schedule reads reductions before they are finished."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from pallasfuse.errors import Refusal
from pallasfuse.fusion.folding import Folded, fold_over, plain_fold
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.fold import Fold
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.region import Region
from pallasfuse.repair.signs import Sign, infer_sign, reduction_sign


class FoldsOnDemand:
    """Derives folds, each once, and remembers how results may differ by them."""

    def __init__(self, region: Region, *, strict: bool = False) -> None:
        self.region, self.strict = region, strict
        self.conditions: dict[str, None] = {}
        """The ways in which the kernels that were derived round otherwise."""
        self.exceptions: dict[str, None] = {}
        """Where results may be NaN, infinite or finite though the program's are not."""
        self._signs: dict[str, Sign] = {}
        self._known: dict[tuple[str, Axis, frozenset[str]], Folded | Refusal] = {}
        self._at_once: dict[tuple[str, Axis, frozenset[str]], Folded | Refusal] = {}
        """Of reductions that read finished ones only."""
        for nest in region.nests:
            sign = infer_sign(nest.body, self._signs)
            self._signs[nest.name] = sign if nest.reducer is None else reduction_sign(nest.reducer, sign)

    def __call__(self, nest: Nest, axis: Axis, unfinished: Mapping[str, Fold]) -> Fold | Refusal:
        """Returns the fold of `nest` over `axis`, which reads the `unfinished` folds over it; or why there is none."""
        key = nest.name, axis, frozenset(unfinished)
        if key not in self._known:
            self._known[key] = fold_over(nest, axis, 0, unfinished, self._signs, strict=self.strict)
        return self._noted(self._known[key], nest, axis, unfinished)

    def forget(self) -> None:
        """Forgets how results differ, but not the folds: what is derived from now on is another kernel's."""
        self.conditions.clear()
        self.exceptions.clear()

    def refined(self, nest: Nest, axis: Axis, finished: Sequence[Nest]) -> Fold | None:
        """Returns the fold of `nest` if it has a correction for what the rounding of `finished` reductions loses; else None."""
        key = nest.name, axis, frozenset(n.name for n in finished)
        if key not in self._at_once:
            folds = {n.name: plain_fold(n, axis, 0) for n in finished}
            self._at_once[key] = fold_over(nest, axis, 0, folds, self._signs, strict=self.strict)
        found = self._at_once[key]
        if isinstance(found, Refusal) or found.fold.refined is None:
            return None
        noted = self._noted(found, nest, axis, key[2])
        return None if isinstance(noted, Refusal) else noted

    def _noted(self, found: Folded | Refusal, nest: Nest, axis: Axis, unfinished: Container[str]) -> Fold | Refusal:
        """The fold of a derivation that is used, with the conditions of that."""
        if isinstance(found, Refusal):
            return found
        self.conditions |= dict.fromkeys(found.conditions)
        self.exceptions |= dict.fromkeys(found.exceptions)
        finished = (n.name for n in self.region.reads(nest) if n.name not in unfinished and axis not in n.axes)
        return replace(found.fold, finished_reads=frozenset(finished))
