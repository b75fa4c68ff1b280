"""Folds of the nests of a region, derived where a schedule reads reductions before they are finished."""

from collections.abc import Mapping
from dataclasses import replace

from pallasfuse.errors import Refusal
from pallasfuse.fusion.folding import fold_over
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
        self._known: dict[tuple[str, Axis, frozenset[str]], Fold | Refusal] = {}
        for nest in region.nests:
            sign = infer_sign(nest.body, self._signs)
            self._signs[nest.name] = sign if nest.reducer is None else reduction_sign(nest.reducer, sign)

    def __call__(self, nest: Nest, axis: Axis, unfinished: Mapping[str, Fold]) -> Fold | Refusal:
        """Returns the fold of `nest` over `axis`, which reads the `unfinished` folds over it; or why there is none."""
        key = nest.name, axis, frozenset(unfinished)
        if key not in self._known:
            self._known[key] = self._derived(nest, axis, unfinished)
        return self._known[key]

    def _derived(self, nest: Nest, axis: Axis, unfinished: Mapping[str, Fold]) -> Fold | Refusal:
        found = fold_over(nest, axis, 0, unfinished, self._signs, strict=self.strict)
        if isinstance(found, Refusal):
            return found
        self.conditions |= dict.fromkeys(found.conditions)
        self.exceptions |= dict.fromkeys(found.exceptions)
        finished = (n.name for n in self.region.reads(nest) if n.name not in unfinished and axis not in n.axes)
        return replace(found.fold, finished_reads=frozenset(finished))
