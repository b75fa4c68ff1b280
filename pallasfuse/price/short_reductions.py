"""Reductions of a few elements, as XLA computes them on a GPU: each thread for itself, in a loop, inside of what reads them."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from pallasfuse.ir.axes import volume
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.ir.loop_program import Nest
from pallasfuse.price.moves import MOST_REPEATED
from pallasfuse.price.xla_forms import LoopFusion

_WARP = 32


def with_short_reductions(fusions: Sequence[LoopFusion], outside: Collection[str]) -> list[LoopFusion]:
    """Returns the fusions, in the same order, with the short reductions inside of those that read them.

    outside: tensors that somebody else reads, too: these are stored. The fusions that read such reductions are changed.
    """
    left = list(fusions)
    for fusion in reversed(fusions):
        if not all(is_short(n) and n.name not in outside for n in fusion.roots):
            continue
        made = {n.name for n in fusion.roots}
        readers = [f for f in left if f is not fusion and any(tensor in made for tensor, _ in f.reads)]
        space = volume({a for n in fusion.roots for a in (*n.axes, *n.reduced)})
        if not readers or (len(readers) - 1) * space > MOST_REPEATED:
            continue
        left = [f for f in left if f is not fusion]
        for reader in readers:
            reader.roots += [replace(n, reduced=(), reducer=None) for n in fusion.roots]
            reader.bodies += fusion.bodies
            reader.reads |= fusion.reads
            reader.inside |= made
    return left


def is_short(nest: Nest) -> bool:
    """Is a reduction so short that no lanes or warps share it (`IsUnnestedReductionFasterThanElemental`)? Rows whose elements are
    neighbours and divide a warp are reduced by its lanes."""
    if not nest.is_reduction or nest.precision is not None or nest.picks:
        return False
    number = volume(nest.reduced)
    space = frozenset((*nest.axes, *nest.reduced))
    order = next(
        (x.indices for x in postorder(nest.body) if isinstance(x, Read) and frozenset(x.indices) == space),
        (*nest.axes, *nest.reduced),
    )
    last = next((a for a in reversed(order) if a.extent > 1), None)
    return number < _WARP and (last not in nest.reduced or _WARP % number != 0)
