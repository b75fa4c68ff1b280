"""Two ways to run a kernel: the best listed schedule, and the best tree that a search finds, where they are predicted to be close.

The price of a tree is the least of many, and so more often too low. The listed schedule stays unless the tree is much faster by its
price, and a clock decides wherever there is one (`check.py`).
"""

from collections.abc import Mapping
from dataclasses import replace

from pallasfuse.decisions import Placed
from pallasfuse.ir.fold import Group
from pallasfuse.ir.tensors import Tensor
from pallasfuse.options import FuseOptions
from pallasfuse.price.kernel import price_kernel
from pallasfuse.price.visited_tiles import visited_shares
from pallasfuse.searched import searched
from pallasfuse.targets import Target

_CLOSE, _FASTER = 1.05, 0.8
"""The shares of a listed schedule's price at which a tree is tried as well, and at which it is what is planned."""


def with_rival(
    group: Group, placed: Placed, target: Target, tensors: Mapping[str, Tensor], options: FuseOptions
) -> Placed:
    """The way to run a group, and with it the other one that is about as fast. A kernel that looks something up has one way."""
    asked = options.tiles or options.parts or options.warps or options.stages or options.target
    if asked or not options.price or not group.folds or placed.refused is not None or placed.lookups:
        return placed
    if visited_shares([p.program for p in placed.phases])[0] < 1.0:  # trees of the space visit what masks hide
        return placed
    own_us = _us(placed)
    best: tuple[float, Placed] | None = None
    runner: Target | None = target
    while runner is not None and best is None:
        best = next(iter(searched(group, runner, tensors, _CLOSE * own_us)), None)
        runner = runner.fallback
    if best is None or best[0] > _CLOSE * own_us:
        return placed
    us, tree = best
    if us > _FASTER * own_us:
        return replace(placed, rival=tree)
    why = f"{placed.phases[0].target.name}: a tree is predicted to be faster than {placed.schedule}"
    return replace(tree, declined=(*placed.declined, why), rival=replace(placed, rival=None))


def _us(placed: Placed) -> float:
    return price_kernel([(p.program, p.target) for p in placed.phases]).us
