"""The loops that XLA makes of maps and reductions: which of them share one, on one space of points.

Reductions of the same values share a kernel, with maps of these values and of what such maps store (multi-output fusion); on GPUs
a thread computes short reductions for itself.
"""

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, replace

from pallasfuse.ir.ancestors import Ancestors
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Expr
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.plain_work import Drawn, Running
from pallasfuse.price.stored_terms import is_shorter_inside
from pallasfuse.price.xla_forms import LoopFusion, Opaque, Place, XlaKernel
from pallasfuse.price.xla_habits import Habits
from pallasfuse.price.xla_products import places
from pallasfuse.price.xla_reductions import is_short
from pallasfuse.price.xla_vectors import is_large


@dataclass(slots=True)
class _Open:
    """A loop that may take further nests, and the bits of the tensors that it makes."""

    fusion: LoopFusion
    made: int


class Fusions:
    """The loops so far, in order, and those over each space of points. above: what each tensor depends on; grows outside.

    around: the places around which windows are read: no kernel does that which stores the tensor.
    """

    def __init__(self, habits: Habits, above: Ancestors, around: Collection[Place] = ()) -> None:
        self.habits, self.above, self.around = habits, above, around
        self.all: list[LoopFusion] = []
        self._over: dict[frozenset[Axis], list[_Open]] = {}

    def take(self, node: Nest, body: Expr) -> None:
        """Add a nest to the last fusion that can take it, or begin one."""
        habits, reads = self.habits, dict(places(body))
        space = frozenset((*node.axes, *node.reduced))
        over = self._over.setdefault(space, [])
        if over and habits.shares_reads:
            largest = {p for p in reads if frozenset(p[1]) == space}
            for one in reversed(over):
                if self._shares_kernel(node, body, largest, one):
                    fusion = one.fusion
                    fusion.roots.append(node)
                    fusion.bodies.append(body)
                    fusion.reads |= reads
                    one.made |= self.above.bit(node.name)
                    return
        multiplies = node.precision is not None and isinstance(body, Apply) and body.op == "mul"
        streams = multiplies and volume(space) >= habits.smallest_product
        self.all.append(LoopFusion([node], [body], reads, streams_matrix=streams))
        over.append(_Open(self.all[-1], self.above.bit(node.name)))

    def _shares_kernel(self, node: Nest, body: Expr, largest: set[Place], one: _Open) -> bool:
        """May a nest be computed in a loop over the same space? largest: what it reads at every point of it.

        All nests of a loop reduce the same axes, if any, and its maps are stored in the order of the tensor that it reduces. A nest
        joins the loop if it reads the same values, or the values that maps of the loop store.
        """
        made, reads = {n.name: n for n in one.fusion.roots}, one.fusion.reads
        reads_here = [place for place, _ in places(body)]
        reduced = frozenset(node.reduced) | one.fusion.reduced
        nests = (*one.fusion.roots, node)
        if any(n.reduced and frozenset(n.reduced) != reduced for n in nests):
            return False
        orders = {axes for _, axes in largest}
        if reduced and any(not n.reduced and orders != {n.axes} for n in nests):
            return False
        if not one.made & self.above.of(node.name):
            return not largest.isdisjoint(reads)
        if any(one.made & self.above.of(t) for t in body.tensors - made.keys()):  # through another kernel
            return False
        return all(
            not made[tensor].is_reduction and axes == made[tensor].axes and (tensor, axes) not in self.around
            for tensor, axes in reads_here
            if tensor in made
        )


# --- reductions of a few elements: on a GPU each thread computes one for itself, inside of what reads it


def with_short_reductions(
    fusions: Sequence[LoopFusion], outside: Collection[str], habits: Habits
) -> list[LoopFusion]:  # fmt: skip
    """Returns the fusions, in the same order, with the short reductions inside of those that read them.

    outside: tensors that somebody else reads, too: these are stored. The fusions that read such reductions are changed. What
    keeps rows on the chip shares what is stored with others, rather than compute it, too (seen in one program: softmaxes of
    distances in both directions).
    """
    left = list(fusions)
    for fusion in reversed(fusions):
        roots = list(zip(fusion.roots, fusion.bodies, strict=True))
        if not all(n.name not in outside and is_short(n) and not is_large(n, b, habits) for n, b in roots):
            continue
        made = {n.name for n in fusion.roots} - fusion.inside
        readers = [
            f for f in left
            if f is not fusion and made.isdisjoint(f.makes) and any(tensor in made for tensor, _ in f.reads)
        ]  # fmt: skip
        parts = [list(zip(f.roots, f.bodies, strict=True)) for f in readers]
        if not readers or (len(readers) > 1 and any(f.is_row for f in readers)):
            continue
        if not all(is_shorter_inside(n, b, parts, habits) for n, b in roots):
            continue
        left = [f for f in left if f is not fusion]
        for reader in readers:
            own = set(reader.makes)
            for nest, body in roots:
                if nest.name not in own:
                    reader.roots.append(replace(nest, reduced=(), reducer=None))
                    reader.bodies.append(body)
            reader.reads |= fusion.reads
            reader.inside |= made | fusion.inside
    return left


def ended_inside(
    kernels: Sequence[XlaKernel], fusions: Sequence[LoopFusion], outside: Set[str]
) -> list[XlaKernel]:  # fmt: skip
    """Returns the kernels without the last part of those which end inside of the loops that read them.

    Such are running sums, and random numbers where one loop reads them, which has them `inside` from now on. outside: what others
    than loops read.
    """
    found = list(kernels)
    for at, kernel in enumerate(kernels):
        if not isinstance(kernel, Opaque) or kernel.name in outside:
            continue
        if isinstance(kernel.work, Drawn):
            readers = [f for f in fusions if any(tensor == kernel.name for tensor, _ in f.reads)]
            if len(readers) != 1:
                continue
            readers[0].inside |= {kernel.name}
        if isinstance(kernel.work, Running | Drawn):
            found[at] = replace(kernel, stored=False)
    return found
