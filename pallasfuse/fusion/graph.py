"""Who reads whom in a loop program, and what is known of its values: the questions that grouping asks."""

from collections.abc import Iterable, Mapping
from functools import cached_property

from pallasfuse.fusion.cost import product_operands
from pallasfuse.fusion.inline import Known, inline_maps
from pallasfuse.fusion.roundings import told_apart
from pallasfuse.fusion.sources import Sources
from pallasfuse.fusion.widening import compared
from pallasfuse.ir.ancestors import Ancestors
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, reads_in
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.repair.signs import Sign, infer_sign, reduction_sign


class Graph:
    """Who reads whom, transitively. Immutable after construction."""

    def __init__(self, program: LoopProgram, *, strict: bool = False, along: frozenset[Axis] = frozenset()) -> None:
        self.program, self.strict, self.along = program, strict, along
        self.nests = {n.name: n for n in program.nests if isinstance(n, Nest)}
        self.order = {n.name: i for i, n in enumerate(program.nests)}
        self.reads: dict[str, frozenset[str]] = {n.name: n.reads for n in program.nests}
        self.consumers: dict[str, list[str]] = {d.name: [] for d in program.definitions()}
        self.ancestors = Ancestors()
        for node in program.nests:
            self.ancestors.add(node.name, node.reads)
            for operand in node.reads:
                self.consumers[operand].append(node.name)
        self.outputs = frozenset(program.outputs)
        self.internal = frozenset(n.name for n in self.nests.values() if n.internal)
        self._inlined: dict[frozenset[str], dict[str, Expr]] = {}
        self._known = Known()
        self._compared: frozenset[str] | None = None

    def inlined(self, keep: frozenset[str] = frozenset()) -> Mapping[str, Expr]:
        """Every nest's body, over inputs, reductions, external tensors and the maps named in `keep`."""
        if keep not in self._inlined:
            self._inlined[keep] = inline_maps(self.program, keep, self._known)
        return self._inlined[keep]

    @cached_property
    def signs(self) -> Mapping[str, Sign]:
        """The known signs of values, by name."""
        return _reduction_signs(self.program)

    @cached_property
    def stored(self) -> frozenset[str]:
        """What XLA stores in any case: results, and operands of products and of external tensors.

        So is what such a map is computed from by maps, as long as that is one value of its size: it could as well be that one. Of
        several, XLA stores what they become together.
        """
        found = set(self.outputs)
        for node in reversed(self.program.nests):
            if isinstance(node, External) or product_operands(node) is not None:
                found |= node.reads
            elif not node.is_reduction and node.name in found:
                whole = {r.tensor for r in reads_in(node.body) if frozenset(r.indices) == frozenset(node.axes)}
                found |= whole if len(whole) == 1 else set()
        return frozenset(found)

    @cached_property
    def told_apart(self) -> frozenset[str]:
        """The maps that something could tell from themselves, were they computed in two kernels."""
        return told_apart(self.program)

    @cached_property
    def fragile(self) -> frozenset[str]:
        """The same, and what is computed from them by maps: to compute that again is to compute them again."""
        found = set(self.told_apart)
        for nest in self.nests.values():
            if not nest.is_reduction and not nest.reads.isdisjoint(found):
                found.add(nest.name)
        return frozenset(found)

    @cached_property
    def widened(self) -> frozenset[str]:
        """The maps that take more bytes than what they are computed from, and of which nothing tells two computations apart."""
        sources = Sources(self.told_apart)
        return frozenset(n.name for n in self.nests.values() if not n.is_reduction and sources.add(n))

    def compared(self) -> frozenset[str]:
        """The tensors on whose exact bfloat16 values something depends."""
        if self._compared is None:
            self._compared = compared(self.inlined().values())
        return self._compared

    def roots(self) -> list[Nest]:
        """What XLA would compute as a kernel of its own: reductions, outputs and operands of external tensors."""
        for_external = {t for n in self.program.nests if isinstance(n, External) for t in n.reads}
        return [n for n in self.nests.values() if n.is_reduction or n.name in self.outputs | for_external]

    def reductions(self) -> list[Nest]:
        return [n for n in self.nests.values() if n.is_reduction]

    def computed_by(self, covers: frozenset[str]) -> frozenset[str]:
        """What a kernel that covers these reductions could hand out: the reductions, and maps that depend on them."""
        depends = self.ancestors.depend(covers)
        return covers | {n.name for n in self.nests.values() if not n.is_reduction and depends(n.name)}

    def depends(self, name: str, on: Iterable[str]) -> bool:
        return self.ancestors.depend(on)(name)


def _reduction_signs(program: LoopProgram) -> dict[str, Sign]:
    signs: dict[str, Sign] = {}
    for nest in program.nests:
        if isinstance(nest, Nest):
            sign = infer_sign(nest.body, signs)
            if nest.reducer is not None:
                sign = reduction_sign(nest.reducer, sign)
            signs[nest.name] = sign
    return signs
