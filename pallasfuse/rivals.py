"""Other ways to run a kernel that are timed beside the planned one: trees that a search finds and predicts to be about as fast.

The price of a tree is the least of many, and so more often too low. A listed schedule stays unless a tree is much faster by its
price, and a clock decides wherever there is one (`check.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pallasfuse.decisions import Placed
from pallasfuse.ir.fold import Group
from pallasfuse.ir.tensors import Tensor
from pallasfuse.options import FuseOptions
from pallasfuse.price.kernel import price_kernel
from pallasfuse.price.visited_tiles import visited_shares
from pallasfuse.searched import searched, with_others
from pallasfuse.targets import Target

_CLOSE, _FASTER = 1.05, 0.8
"""The shares of a listed schedule's price at which a tree is tried as well, and at which it is what is planned."""
_RIVALS = 2


def with_rivals(
    group: Group, placed: Placed, target: Target, tensors: Mapping[str, Tensor], options: FuseOptions
) -> Placed:
    """The way to run a group by a listed schedule, and with it trees that are about as fast.

    A kernel that looks something up has one way.
    """
    asked = options.tiles or options.parts or options.warps or options.stages or options.target
    if asked or not options.price or not group.folds or placed.refused is not None or placed.lookups:
        return placed
    if visited_shares([p.program for p in placed.phases])[0] < 1.0:  # trees of the space visit what masks hide
        return placed
    own_us = _us(placed)
    found: Sequence[tuple[float, Placed]] = ()
    runner: Target | None = target
    while runner is not None and not found:
        found = searched(group, runner, tensors, _CLOSE * own_us)
        runner = runner.fallback
    trees = with_others(found, _CLOSE * own_us)
    if trees is None:
        return placed
    if found[0][0] > _FASTER * own_us:
        return replace(placed, rivals=(replace(trees, rivals=()), *trees.rivals)[:_RIVALS])
    why = f"{placed.phases[0].target.name}: a tree is predicted to be faster than {placed.schedule}"
    return replace(trees, declined=(*placed.declined, why), rivals=(placed, *trees.rivals)[:_RIVALS])


def _us(placed: Placed) -> float:
    return price_kernel([(p.program, p.target) for p in placed.phases]).us
