"""Equal programs, by generating them: sequences of operators that compute the same, verified, with the one that costs least.

`rewriting` derives cheaper forms of sums and products by rules. Here nothing is derived: whatever sequence computes the output is
found, with other functions in between, too, as long as it is short. It takes seconds, so planning does not do it.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass

from pallasfuse.errors import Refusal
from pallasfuse.ir.loop_program import LoopProgram, Nest, verify
from pallasfuse.ir.tensors import Tensor
from pallasfuse.search.abstract import LAWS, Law
from pallasfuse.search.agreement import agree, agree_in_fields
from pallasfuse.search.operators import Written
from pallasfuse.search.prefixes import BOUNDS, Bounds, Counted, Prefixes
from pallasfuse.search.written import written

type Price = Callable[[LoopProgram], float]
"""Returns the predicted time of a program in microseconds; infinite where it cannot run."""
type Check = Callable[[LoopProgram, LoopProgram], bool]
"""Returns whether two programs compute the same."""


def verified(one: LoopProgram, other: LoopProgram) -> bool:
    """Do two programs compute the same, in float64 and over finite fields, on drawn inputs over short axes?"""
    return agree(one, other) and agree_in_fields(one, other)


@dataclass(frozen=True, slots=True)
class Variant:
    """One program that computes what another one does, its price in microseconds, and the number of its operators."""

    program: LoopProgram
    us: float
    operators: int


@dataclass(frozen=True, slots=True)
class Variants:
    """The variants of a program, the cheapest first, of those that a search has come to.

    written: the program itself, as operators. rejected: sequences that agreed in the search, and not when they were verified.
    """

    written: Variant
    found: tuple[Variant, ...]
    counted: Counted
    rejected: int = 0

    @property
    def best(self) -> Variant:
        """The cheapest variant; ties go to the program as it is written."""
        cheapest = min(self.found, key=lambda v: v.us, default=self.written)
        return cheapest if cheapest.us < self.written.us else self.written


def variants(
    program: LoopProgram, price: Price, bounds: Bounds = BOUNDS, laws: Set[Law] | None = LAWS, check: Check = verified
) -> Variants | Refusal:  # fmt: skip
    """The variants of a program with one output, or why it has none.

    Args:
      price: of a program.
      bounds: of the search. Where one is reached, the variants are those found so far; the program itself is always known.
      laws: of the abstract expressions that prune it; None: nothing is pruned by them.
      check: of every sequence that the search comes up with.
    """
    source = written(program)
    if isinstance(source, Refusal):
        return source
    search = Prefixes(source, bounds, None if laws is None else frozenset(laws)).run()
    forms: dict[int, int] = {}
    for number in (source.output, *sorted(search.found, key=lambda n: len(source.table.behind(n)))):
        forms.setdefault(source.table.expanded(number), number)  # the shortest way to write it
    own, *others = (_variant(source, number, price) for number in forms.values())
    right = [v for v in others if check(program, v.program)]
    found = tuple(sorted((own, *right), key=lambda v: v.us))
    return Variants(own, found, search.counted, len(others) - len(right))


def parts(program: LoopProgram, most: int) -> tuple[LoopProgram, ...] | Refusal:
    """A program with one output in parts of so many operators at most, in the order in which they are computed, each with one
    output.

    From an output backwards, operators that nothing else reads join its part, the nearest first; what is left starts other parts.
    """
    source = written(program)
    if isinstance(source, Refusal):
        return source
    whole = source.nests(source.output)
    nests = {n.name: n for n in whole.nests if isinstance(n, Nest)}
    readers: dict[str, set[str]] = {name: set() for name in nests}
    for nest in nests.values():
        for name in nest.reads & nests.keys():
            readers[name].add(nest.name)
    found: list[LoopProgram] = []
    waiting, seen = [*whole.outputs], set[str]()
    while waiting:
        root = waiting.pop(0)
        if root in seen:
            continue
        seen.add(root)
        chosen = [root]
        for name in chosen:  # grows
            inside = sorted(nests[name].reads & nests.keys() - set(chosen))
            chosen += [n for n in inside if readers[n] <= set(chosen)][: most - len(chosen)]
        own = tuple(n for name, n in nests.items() if name in chosen)
        outside = sorted({t for n in own for t in n.reads} - set(chosen))
        waiting += [t for t in outside if t in nests]
        stored = {d.name: Tensor(d.name, d.axes, d.dtype) for d in whole.definitions()}
        found.append(verify(LoopProgram(tuple(stored[t] for t in outside), own, (root,))))
    order = list(nests)
    return tuple(sorted(found, key=lambda p: order.index(p.outputs[0])))


def _variant(source: Written, number: int, price: Price) -> Variant:
    program = source.nests(number)
    return Variant(program, price(program), len(program.nests))
