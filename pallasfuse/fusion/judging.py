"""The savings of candidates: the price of the kernels that XLA would run instead, less that of their own."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from pallasfuse.first_time import shared
from pallasfuse.fusion.candidate import Candidate
from pallasfuse.fusion.cost import product_operands
from pallasfuse.fusion.graph import Graph
from pallasfuse.ir.axes import volume
from pallasfuse.ir.dtypes import itemsize_bytes
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.ir.tensors import Tensor
from pallasfuse.price.cpu import NEW_PAGES
from pallasfuse.price.ranges import FINDING_RANGES
from pallasfuse.price.terms import Price
from pallasfuse.price.without_loops import WITHOUT_LOOPS
from pallasfuse.price.xla import ONE_KERNEL, XlaPrices, count_xla, price_xla
from pallasfuse.price.xla_products import without_casts
from pallasfuse.targets import Target

KernelPrice = Callable[[Group, float], Price | str]
"""Returns the price of the kernel that a group becomes, or why no target has one. Of what takes longer than so many microseconds,
nobody wants a better one."""
KernelReads = Callable[[Group], tuple[str, ...]]
"""The names of what the kernel reads, as far as is known: at first as little as it may be."""

_Beside = tuple[frozenset[str], frozenset[str]]
"""The names of what kernels of ours make, and of what they read."""


@dataclass(frozen=True, slots=True)
class _OfXla:
    """What XLA takes for the rest of one program beside kernels, and for what they replace, as far as it was asked for."""

    prices: XlaPrices
    apart: dict[_Beside, Price] = field(default_factory=dict)
    apart_us: dict[_Beside, float] = field(default_factory=dict)
    alone_us: dict[_Beside, float] = field(default_factory=dict)


def _work_of(program: LoopProgram) -> tuple[object, ...]:
    """Returns what XLA's operations in a program do, on which its price depends: programs are equal that differ in nothing else."""
    operations = [n for n in program.nests if isinstance(n, External)]
    return tuple((n.operation or id(n.work), n.run, n.within, n.combines) for n in operations)


class Judge:
    """The savings of candidates: what XLA would take for what they replace, less their kernels. Without prices, every kernel
    counts as one, and traffic decides between equals."""

    def __init__(
        self, graph: Graph, target: Target, price: KernelPrice | None, reads: KernelReads | None = None
    ) -> None:
        self.reads: KernelReads = reads or (lambda group: group.inputs)
        self.graph, self.device, self.price = graph, target.device, price
        self.margin = target.margin if price is not None else 1.0
        self._kernels: dict[int, tuple[Group, Price | str]] = {}
        # a program is planned twice in a task, where a clock decides and where the price does: XLA takes the same for its parts
        known: dict[object, _OfXla] = shared((_OfXla, target.device, price is None), dict)
        key = graph.program, _work_of(graph.program)
        if key not in known:
            known[key] = _OfXla(XlaPrices(graph.program, target.device))
        self._known = known[key]

    def apart(self, groups: Sequence[Group]) -> Price:
        """XLA's price of everything that these groups do not compute, what they read among it."""
        beside = self._beside(groups)
        if beside not in self._known.apart:
            self._known.apart[beside] = (
                self._known.prices.price(*beside)
                if self.price is not None
                else count_xla(self.graph.program, self.device, *beside)
            )
        return self._known.apart[beside]

    def apart_us(self, groups: Sequence[Group]) -> float:
        """The time of what `apart` returns."""
        if self.price is None:
            return self.apart(groups).us
        beside = self._beside(groups)
        if beside not in self._known.apart_us:
            self._known.apart_us[beside] = self._known.prices.us(*beside)
        return self._known.apart_us[beside]

    def _beside(self, groups: Sequence[Group]) -> "_Beside":
        made = frozenset([n.name for g in groups for n in g.outputs])
        return made, frozenset([t for g in groups for t in self.reads(g)])

    def replaced(self, group: Group, others: Sequence[Group] = ()) -> Price:
        """Returns the price of XLA's kernels for the work of a group, beside these others."""
        return replace(self.apart(others), us=self.replaced_us(group, others))

    def replaced_us(self, group: Group, others: Sequence[Group] = ()) -> float:
        """The time of what `replaced` returns: that by which the rest of the program gets shorter, but no more than XLA takes for
        the work of the group by itself. What changes in kernels that are not ours is left out: it depends on XLA's layouts and
        on the order of its passes, and more often than not it does not come true.
        """
        shorter_us = self._shorter_us(group, others)
        return shorter_us if self.price is None or shorter_us <= 0.0 else min(shorter_us, self._alone_us(group))

    def _shorter_us(self, group: Group, others: Sequence[Group] = ()) -> float:
        return max(0.0, self.apart_us(others) - self.apart_us([*others, group]))

    def _alone_us(self, group: Group) -> float:
        """XLA's price of the work of a group as a program of its own, whose inputs are what the kernel reads."""
        made, read = self._beside([group])
        if (made, read) not in self._known.alone_us:
            self._known.alone_us[made, read] = price_xla(part_of(self.graph.program, made, read), self.device).us
        return self._known.alone_us[made, read]

    def is_shared(self, groups: Iterable[Group]) -> bool:
        """Does XLA's program for the rest pay for memory once that several of its kernels need?"""
        if self.price is None or self.device.platform == "gpu":  # no new pages are priced there
            return False
        return any(t.name == NEW_PAGES and t.us for t in self.apart(list(groups)).terms)

    def may_share(self, candidate: Candidate) -> bool:
        """Does XLA need such memory for what a candidate keeps inside of its kernel? Only those that were priced are asked."""
        found = self._kernels.get(id(candidate.group))
        if found is None or isinstance(found[1], str):
            return False
        nests = (*(f.nest for f in candidate.group.folds), *candidate.group.inner)
        values = [(n.axes, n.dtype) for n in nests]
        values += [(x.indices, x.dtype) for n in nests for x in postorder(n.body) if isinstance(x, Read)]
        return any(volume(axes) * itemsize_bytes(dtype) > self.device.kept_bytes for axes, dtype in values)

    def total_us(self, chosen: Sequence[Candidate]) -> float:
        """The time of the program with these kernels, after a margin for the error of their prices."""
        # a margin below one is only hoped for, as in `saving`
        kernels = [(self.kernel(c), max(1.0, self.margin_of(c))) for c in chosen]
        ours = sum(math.inf if isinstance(k, str) else k.us * margin for k, margin in kernels)
        return self.apart_us([c.group for c in chosen]) + ours

    def kernel(self, candidate: Candidate) -> Price | str:
        """The price of its kernel, or why there is none."""
        found = self._kernels.get(id(candidate.group))
        if found is None:
            found = (
                candidate.group,
                ONE_KERNEL if self.price is None else self.price(candidate.group, self._most_us(candidate)),
            )
            self._kernels[id(candidate.group)] = found
        return found[1]

    def is_priced(self, candidate: Candidate) -> bool:
        """Was the kernel of a candidate asked for before?"""
        return id(candidate.group) in self._kernels

    def price_of(self, group: Group) -> Price | str:
        """Returns the price of a group that was placed before."""
        return ONE_KERNEL if self.price is None else self.price(group, math.inf)

    def _most_us(self, candidate: Candidate) -> float:
        """The time with which a kernel would save nothing."""
        return math.inf if self.is_asked(candidate) else self.replaced_us(candidate.group) / self.margin_of(candidate)

    def margin_of(self, candidate: Candidate) -> float:
        """The factor by which XLA's price must exceed a candidate's.

        The least price of many trees is more often too low: where no clock decides, the factor is squared. Where one does, it is at
        least one: each takes a search, and what the clock refuses was compiled in vain. So it is where masks over data bound loops:
        a clock sees drawn masks, which hide more than the user's may. And so it is of a kernel that XLA compiles as a program
        like any other (on a CPU, one without loops): both prices err alike, and one that is not lower gives a clock no chance.
        """
        _, price = self._kernels.get(id(candidate.group), (None, ""))
        return self.margin_for(candidate.group, price)

    def margin_for(self, group: Group, price: Price | str) -> float:
        """Returns the factor by which XLA's price must exceed that of a group's kernel, which is `price`.

        Without a clock it is squared for a product alone, too: of a library's kernels XLA takes the fastest by a clock.
        """
        own = self.margin if group.folds and (self.margin < 1.0 or not _is_product_alone(group)) else self.margin**2
        no_chance = isinstance(price, Price) and any(t.name in (FINDING_RANGES, WITHOUT_LOOPS) for t in price.terms)
        return max(1.0, own) if no_chance or not group.folds else own

    def is_asked(self, candidate: Candidate) -> bool:
        """Is the kernel wanted whatever it costs? A strict user has ruled out leaving dependent reductions to XLA."""
        group = candidate.group
        return (self.graph.strict and len(group.folds) > 1) or group.rolled in self.graph.along

    def bound_alone(self, candidate: Candidate) -> float:
        """The most microseconds that a candidate can save beside any groups: XLA's time for its work alone, less its least one.

        It is found sooner than `bound`.
        """
        if self.price is None or self.is_asked(candidate):
            return self.bound(candidate)
        return self._alone_us(candidate.group) - candidate.least_us * self.margin_of(candidate)

    def bound(self, candidate: Candidate, others: Sequence[Group] = ()) -> float:
        """The most microseconds that a candidate can save, beside other groups."""
        if self.is_asked(candidate):
            return _ASKED * len(candidate.covers) - candidate.least_us
        if self.price is None:
            return self.saving(candidate, others)
        ours = candidate.least_us * self.margin_of(candidate)
        alone_us = self._alone_us(candidate.group)
        # XLA's price of the program without the group takes longer to find, and may not be needed
        return (alone_us if alone_us <= ours else self.replaced_us(candidate.group, others)) - ours

    def may_save(self, candidate: Candidate, others: Sequence[Group], more_than_us: float = 0.0) -> bool:
        """Could a candidate save more microseconds than some beside other groups, as far as is known before it is priced?"""
        if self.price is None or self.is_asked(candidate):
            return self.bound(candidate, others) > more_than_us
        _, price = self._kernels.get(id(candidate.group), (None, candidate.least_us))
        if isinstance(price, str):
            return False
        ours = (price.us if isinstance(price, Price) else price) * self.margin_of(candidate)
        return self._alone_us(candidate.group) - ours > more_than_us and self.bound(candidate, others) > more_than_us

    def saving_if_bound(self, candidate: Candidate) -> float | None:
        """Returns what a candidate saves alone; None where its bound says that this is nothing, and it is not priced."""
        return self.saving(candidate) if self.bound(candidate) > 0.0 else None

    def saving(self, candidate: Candidate, others: Sequence[Group] = ()) -> float:
        """Returns the microseconds that a candidate saves beside other groups, after a margin for the error of its price.

        Little, but more than nothing, where only that error can make it faster and a clock decides. Minus infinity where no target
        has a kernel.
        """
        price = self.kernel(candidate)
        if isinstance(price, str):
            return -math.inf
        if self.is_asked(candidate):
            return _ASKED * len(candidate.covers) - price.us
        apart_us, margin = self.replaced_us(candidate.group, others), self.margin_of(candidate)
        saved_us, hoped_us = apart_us - price.us * max(1.0, margin), apart_us - price.us * margin
        return saved_us if saved_us > 0.0 or hoped_us <= 0.0 else _HOPED * hoped_us


def part_of(program: LoopProgram, outputs: frozenset[str], inputs: frozenset[str]) -> LoopProgram:
    """Returns the part of a program that computes some of its tensors from others, which are its inputs."""
    nests: list[Nest | External] = []
    given: dict[str, Tensor] = {}
    wanted = set(outputs)
    for node in reversed(program.nests):
        if node.name in inputs or node.name not in wanted:
            continue
        nests.append(node)
        wanted |= node.reads
        if isinstance(node, External) and node.lookup is not None:
            wanted |= {node.lookup.source.name, node.lookup.table.name}
    made = {n.name for n in nests}
    for one in program.definitions():
        if one.name in wanted and one.name not in made:
            given[one.name] = Tensor(one.name, one.axes, one.dtype)
    return LoopProgram(tuple(given.values()), tuple(reversed(nests)), tuple(sorted(outputs)))


_HOPED = 1e-3
"""The weight of what is saved only if a price is wrong, where a clock decides later: a saving that is predicted goes before it."""
_ASKED = 1e9
"""Microseconds by which a kernel that is asked for is worth more than any that is not."""


def losing_together(judge: Judge, groups: Sequence[Group], most_asked: int) -> list[tuple[Group, str]]:
    """Finds the groups without which a program takes less time, each with the reason.

    judge: of all of the program. Its parts, for which groups are chosen, do not see what a kernel costs elsewhere: that a value
    of another part is stored for it, or a product of another part written once more in the order in which it reads.

    most_asked: so many times is a group asked what it saves beside the others, which takes long. What one saves changes where
    another is gone: all are asked until none loses.
    """
    lost: list[tuple[Group, str]] = []
    kept, doubtful, asked = list(groups), list(groups), len(groups)
    while asked <= most_asked:
        losses: list[tuple[float, Group, str]] = []
        for group in doubtful:
            price = judge.price_of(group)
            apart_us = judge.replaced_us(group, [g for g in kept if g is not group])
            margin = judge.margin_for(group, price)
            if not isinstance(price, str) and apart_us <= price.us * margin:
                losses.append((_loss_us(price, margin, apart_us), group, _not_faster(price, apart_us)))
        if losses:
            _, worst, why = max(losses, key=lambda entry: entry[0])
            lost.append((worst, why))
            kept = [g for g in kept if g is not worst]
        elif len(doubtful) == len(kept):
            break
        doubtful = [g for _, g, _ in losses if g is not worst] or kept
        asked += len(doubtful)
    return lost


def _is_product_alone(group: Group) -> bool:
    """Is a group a product of two arrays as they are stored, and nothing else?"""
    reductions = [*(f.nest for f in group.folds), *group.inner]
    if len(reductions) > 1 or not all(isinstance(n.body, Read) for n in group.outputs):
        return False
    operands = product_operands(reductions[0])
    return operands is not None and all(isinstance(without_casts(side), Read) for side in operands)


def _loss_us(price: Price, margin: float, apart_us: float) -> float:
    """Returns what a kernel loses, after a margin for the error of its price. A margin below one is only hoped for."""
    return price.us * max(1.0, margin) - apart_us


def _not_faster(price: Price, apart_us: float) -> str:
    return f"one kernel would not be faster: {price.us:.3g} us predicted, {apart_us:.3g} us apart"


def others_than(chosen: Iterable[Candidate], group: Group) -> list[Group]:
    """The chosen groups but one."""
    return [c.group for c in chosen if c.group is not group]


def why_not(judge: Judge, candidate: Candidate) -> str:
    is_open = judge.is_priced(candidate) or judge.bound(candidate) > 0
    price = judge.kernel(candidate) if is_open else Price(candidate.least_us, ())
    if isinstance(price, str):
        return price
    return _not_faster(price, judge.replaced_us(candidate.group))


def worth_it(judge: Judge, chosen: list[Candidate], reasons: dict[str, str]) -> list[Candidate]:
    """Returns the candidates that save something beside each other: what a group replaces depends on what the others make.

    Where several save nothing, the one that loses most is left out first: the others may save something then.
    """
    while True:
        losses = []
        for candidate in chosen:
            price = judge.kernel(candidate)
            apart = judge.replaced_us(candidate.group, others_than(chosen, candidate.group))
            if isinstance(price, str):
                losses.append((math.inf, candidate, price))
            elif not judge.is_asked(candidate) and apart <= price.us * judge.margin_of(candidate):
                loss_us = _loss_us(price, judge.margin_of(candidate), apart)
                losses.append((loss_us, candidate, _not_faster(price, apart)))
        if not losses:
            return chosen
        _, worst, why = max(losses, key=lambda entry: entry[0])
        reasons |= dict.fromkeys(worst.group.heads, why)
        chosen = [c for c in chosen if c is not worst]
