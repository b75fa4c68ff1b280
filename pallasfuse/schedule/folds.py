"""The reads of unfinished reductions that a part's algebra allows: where the fold of a nest over them can be derived."""

from functools import cache

from pallasfuse.errors import Refusal
from pallasfuse.fusion.folding import fold_over
from pallasfuse.ir.fold import Fold
from pallasfuse.ir.part import Part
from pallasfuse.repair.signs import Sign, infer_sign, reduction_sign
from pallasfuse.schedule.placement import MayFold


def derivable(part: Part, *, strict: bool = False) -> MayFold:
    """Returns the test that derives folds of a part's nests, each once. strict: none with exceptions for special values."""
    nests = part.by_name
    signs: dict[str, Sign] = {}
    for nest in part.nests:
        sign = infer_sign(nest.body, signs)
        signs[nest.name] = sign if nest.reducer is None else reduction_sign(nest.reducer, sign)

    @cache
    def fold(name: str, unfinished: frozenset[str]) -> Fold | None:
        nest = nests[name]
        if len(nest.reduced) != 1:
            return None
        read = {}
        for other in unfinished:
            found = fold(
                other, frozenset(r for r in nests[other].reads if r in nests and nests[r].reduced == nest.reduced)
            )
            if found is None or nests[other].reduced != nest.reduced:
                return None
            read[other] = found
        derived = fold_over(nest, nest.reduced[0], 0, read, signs, strict=strict)
        return None if isinstance(derived, Refusal) else derived.fold

    def may_fold(nest: str, unfinished: frozenset[str]) -> bool:
        return fold(nest, unfinished) is not None

    return may_fold
