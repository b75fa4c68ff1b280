"""Cheaper forms of the sums and products of a program: each region is searched, and what is predicted to be faster is taken.

Equal regions, up to names, are searched once, also those of other programs of one call.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from pallasfuse.device import Device
from pallasfuse.first_time import shared
from pallasfuse.ir.expr import Apply, postorder
from pallasfuse.ir.loop_program import External, LoopProgram, Nest, verify
from pallasfuse.ir.renaming import UnknownNameError, canonical, restored
from pallasfuse.ir.tensors import Tensor
from pallasfuse.price.terms import Price
from pallasfuse.price.xla import price_xla
from pallasfuse.search.agreement import agree
from pallasfuse.search.costs import Costing
from pallasfuse.search.egraph import EGraph, FullError, Node
from pallasfuse.search.extraction import Costs, Nests
from pallasfuse.search.found import Rewriting, Searched
from pallasfuse.search.orders import may_gain
from pallasfuse.search.regions import Region, Terms, fixed_in, is_algebraic, regions, without_copies
from pallasfuse.search.rules import PHASES, Rule

_PRECISIONS = frozenset({"DEFAULT", "HIGH", "HIGHEST"})


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to search: terms of the graph, rounds, what rules find, equal terms that are known already among it; and seconds, so
    many that no other limit is reached later on any machine."""

    terms: int = 2000
    rounds: int = 12
    found: int = 6000
    seconds: float = 3.0


LIMITS = Limits()
"""What planning has."""


def rewritings(program: LoopProgram, device: Device, limits: Limits = LIMITS) -> list[Rewriting]:
    """The rewritings of a program that are predicted to be faster by more than the price's error, and than it takes to start a
    kernel."""
    program = without_copies(program)
    known: dict[LoopProgram, Rewriting | None] = shared((search, device, limits), dict)
    found = []
    for region in regions(program):
        part = _part(program, region)
        try:
            form = canonical(part)
            if form.program not in known:
                known[form.program] = search(form.program, device, limits)
            cheaper = known[form.program]
            found += [] if cheaper is None else [restored(cheaper, form.names)]
        except UnknownNameError:
            continue
    return found


def _part(program: LoopProgram, region: Region) -> LoopProgram:
    """The region as a program of its own, whose outputs are the root, first, and what others need of the rest."""
    definitions = {d.name: d for d in program.definitions()}
    nests = (*(n for n in region.fixed if n.name not in region.names), *region.nests)
    own = {n.name for n in nests}
    needed = {t for n in program.nests if n.name not in own for t in n.reads} | set(program.outputs)
    others = [n.name for n in region.nests if n.name in needed and n is not region.root]
    leaves = dict.fromkeys(t for n in nests for t in sorted(n.reads) if t not in own)
    inputs = tuple(Tensor(t, definitions[t].axes, definitions[t].dtype) for t in leaves)
    return verify(LoopProgram(inputs, nests, (region.root.name, *others)))


def search(part: LoopProgram, device: Device, limits: Limits = LIMITS) -> Rewriting | None:
    """The cheapest way to compute the first output of a part beside the others; None where it is as it is written."""
    root_name = part.outputs[0]
    fixed = fixed_in(part)
    deltas = fixed.deltas
    nests = {n.name: n for n in part.nests if isinstance(n, Nest) and is_algebraic(n, fixed) and n.name not in deltas}
    precision = _precision(list(nests.values()))
    if precision is None:
        return None
    dtype = nests[root_name].dtype
    picks = any(not deltas.isdisjoint(n.reads) for n in nests.values())
    if not picks and not may_gain(part, nests, Costing(device, dtype)):
        return None
    before = price_xla(part, device)
    if before.us <= _least_gain_us(0.0, device):  # whatever is found
        return None
    try:
        graph = EGraph(limits.terms, deltas)
        root = _root(graph, part, nests)
    except FullError:
        return None
    searched = saturate(graph, limits)
    made = Nests(
        Costs(graph, Costing(device, dtype)), (f"{root_name}.{n}" for n in count()), precision, nests[root_name]
    )
    made.root(root, nests[root_name])
    return _judged(part, tuple(made.made), before, searched, device)


def _root(graph: EGraph, part: LoopProgram, nests: Mapping[str, Nest]) -> int:
    """The class of a part's first output; the others are stored anyway."""
    name, *others = part.outputs
    terms = Terms(graph, nests)
    root = terms.value(name, nests[name].axes)
    for other in others:
        graph.union(terms.value(other, nests[other].axes), terms.stored(other))
    return root


def _least_gain_us(after_us: float, device: Device) -> float:
    """The time that a part must take as it is written, for one that is predicted to take so long instead to be worth it."""
    return max(after_us * device.price_error, after_us + device.kernel_us + device.launch_us)


def _judged(
    part: LoopProgram, made: tuple[Nest, ...], before: Price, searched: Searched, device: Device
) -> Rewriting | None:
    kept = _needed(part, (*part.outputs[1:], *(t for n in made for t in n.reads)))
    old = tuple(n for n in part.nests if n not in kept and isinstance(n, Nest))
    new = replace(part, nests=(*kept, *made))
    after = price_xla(new, device)
    if before.us <= _least_gain_us(after.us, device):
        return None
    if not agree(part, new):
        return None
    return Rewriting(made, before, after, old, searched, part.inputs)


def _needed(part: LoopProgram, names: tuple[str, ...]) -> tuple[Nest | External, ...]:
    """The nests of a part that some tensors are computed from."""
    wanted = set(names)
    found: list[Nest | External] = []
    for nest in reversed(part.nests):
        if nest.name in wanted and nest.name != part.outputs[0]:
            found.append(nest)
            wanted |= nest.reads
    return tuple(reversed(found))


def _precision(nests: list[Nest]) -> str | None:
    """The precision of the products of a region: full where the program adds up products that it has written out; None where they
    differ."""
    asked = {n.precision for n in nests if n.is_reduction} - {None}
    if len(asked) > 1 or not asked <= _PRECISIONS:
        return None
    by_hand = any(n.precision is None for n in nests if n.is_reduction)
    products = any(_multiplies(n) for n in nests if not n.is_reduction)
    full = by_hand and products and any(n.dtype == "float32" for n in nests)
    return "HIGHEST" if full else next(iter(asked), "HIGHEST")


def _multiplies(nest: Nest) -> bool:
    """Does a nest multiply one element by another one, or by itself?"""
    products = (n for n in postorder(nest.body) if isinstance(n, Apply) and n.op in ("mul", "square"))
    return any(all(a.tensors for a in n.args) for n in products)


# --- equality saturation: rules applied until nothing new is found, or a limit is reached


def saturate(graph: EGraph, limits: Limits = LIMITS, phases: Sequence[Sequence[Rule]] = PHASES) -> Searched:
    """Applies rules to all terms, round by round, phase by phase. The graph holds what was found so far wherever it stops."""
    start = time.perf_counter()
    searched = Searched(complete=True)
    try:
        for rules in phases:
            known: dict[Node, tuple[int, ...]] = {}
            for _ in range(limits.rounds):
                searched.rounds += 1
                if not _round(graph, rules, known, searched, limits, start + limits.seconds):
                    break
            else:
                searched.complete = False
    except FullError:
        searched.complete = False
    graph.rebuild()
    searched.terms, searched.classes = len(graph), len(graph.classes())
    searched.seconds = time.perf_counter() - start
    return searched


def _round(
    graph: EGraph,
    rules: Sequence[Rule],
    known: dict[Node, tuple[int, ...]],
    searched: Searched,
    limits: Limits,
    end: float,
) -> bool:
    """Applies rules to the terms that there are. Is anything new?

    known: the states in which terms were seen before; in the same state, a rule finds the same.
    """
    changed = False
    for number in graph.classes():
        for node in graph.nodes(number):
            state = graph.state(node)
            if known.get(node) == state:
                continue
            known[node] = state
            for rule in rules:
                for other in list(rule.apply(graph, node)):
                    searched.tried += 1
                    if graph.union(number, other):
                        searched.found[rule.name] = searched.found.get(rule.name, 0) + 1
                        changed = True
            if searched.tried > limits.found or time.perf_counter() > end:
                raise FullError
    graph.rebuild()
    return changed
