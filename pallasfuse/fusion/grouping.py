"""Which nests share a kernel: the disjoint candidates that save most, so that each hands out what the others read."""

import math
from collections.abc import Sequence

from pallasfuse.decisions import Grouping, Left
from pallasfuse.fusion import candidates, product_regions
from pallasfuse.fusion.candidate import Candidate, Context
from pallasfuse.fusion.graph import Graph
from pallasfuse.fusion.inline import deduplicate
from pallasfuse.fusion.judging import Judge, KernelPrice, KernelReads, others_than, why_not, worth_it
from pallasfuse.fusion.segments import segments
from pallasfuse.fusion.selection import best_disjoint, select
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import LoopProgram
from pallasfuse.price.terms import Price
from pallasfuse.targets import Target


def group(
    program: LoopProgram, target: Target, price: KernelPrice | None = None, *, strict: bool = False,
    along: frozenset[Axis] = frozenset(),
) -> Grouping:  # fmt: skip
    """Choose the groups of `program` for `target`: the disjoint ones that save most. `strict`: groups without exceptions only.

    price: of the kernel that a group becomes; without it, groups are taken at their least time.
    along: axes whose reductions belong in kernels, whatever that costs.
    """
    return joined([group_segment(Choice(s, target, price, strict=strict, along=along)) for s in segments(program)])


def joined(parts: Sequence[Grouping]) -> Grouping:
    """The groups of a program from those of its segments."""
    return Grouping(
        tuple(g for p in parts for g in p.groups), tuple(left for p in parts for left in p.left),
        tuple(r for p in parts for r in p.replaced),
    )  # fmt: skip


_MOST_IN_VAIN = 64
"""So many kernels of a segment are priced in a row that save nothing; then the others are given up. (Of segments with more than 20
priced ones, 160 of ten programs on a CPU had at most 39 of them before one that was chosen, 99% at most 24; 40 of seven programs on
an H200 at most 13; 2026-11-29.)"""
_GIVEN_UP = f"{_MOST_IN_VAIN} kernels of this part, one after the other, would not be faster: no more are looked at"


class Choice:
    """A segment and the candidates for its kernels: what these could save is known before any of them is priced.

    reads: what the kernel of a group reads, which may be less than its inputs. compares_trees: a clock is going to compare trees of
    a chosen group with what is listed for it. The rest as of `group`.
    """

    def __init__(
        self, program: LoopProgram, target: Target, price: KernelPrice | None = None, reads: KernelReads | None = None, *,
        strict: bool = False, along: frozenset[Axis] = frozenset(), compares_trees: bool = False,
    ) -> None:  # fmt: skip
        self.target = target
        self.compares_trees = compares_trees
        self.graph = graph = Graph(deduplicate(program), strict=strict, along=along)
        self.judge = Judge(graph, target, price, reads)
        self.reasons: dict[str, str] = {}
        self.found: list[Candidate] = []
        self.trees_of_listed: list[Candidate] = []
        """Tried if what is listed saves less; if it is chosen, trees are its rivals."""
        for axis in dict.fromkeys(a for n in graph.reductions() for a in n.reduced):
            for members in candidates.components(graph, axis):
                self.found.extend(candidates.candidates(graph, axis, members, target, self.reasons))
        if price is not None and target.one_device and not along:
            listed = {c.covers for c in self.found}
            for tree in product_regions.candidates(graph, target):
                (self.trees_of_listed if tree.covers in listed else self.found).append(tree)
        self.bounds = [self.judge.bound_alone(c) for c in self.found]
        """The most that each can save, by bounds that are soon found."""

    @property
    def candidates(self) -> int:
        """The number of candidates that may save something."""
        return sum(us > 0.0 for us in self.bounds)

    def most_saved_us(self, *, closely: bool = False) -> float:
        """The microseconds that disjoint candidates could save, each by itself, if their kernels took the least time.

        Infinity where they may share memory that XLA would need for any of them: what they save together has no such bound.
        closely: by bounds that take longer to find.
        """
        if self.judge.is_shared(()):
            return math.inf
        every = [*self.found, *self.trees_of_listed]
        bounds, covers = [self.judge.bound_alone(c) for c in every], [c.covers for c in every]
        chosen = best_disjoint(bounds, covers)
        if closely:  # only those that would be chosen are asked for
            chosen, bounds, _ = select(bounds, covers, lambda n: self.judge.bound(every[n]))
        return sum(bounds[n] for n in chosen)

    def saved_us(self, groups: Sequence[Group], kernels: Sequence[Price | str]) -> float:
        """The microseconds that groups save together, after a margin for the error of the prices of their kernels."""
        ours = sum(math.inf if isinstance(k, str) else k.us * self.judge.margin for k in kernels)
        return self.judge.apart_us([]) - self.judge.apart_us(groups) - ours


def group_segment(choice: Choice) -> Grouping:
    """Choose the groups of one segment, as `group`."""
    graph, judge, target, reasons, found = choice.graph, choice.judge, choice.target, choice.reasons, choice.found
    wanted = graph.strict or graph.along
    numbers, savings, given_up = select(
        choice.bounds, [c.covers for c in found], lambda n: judge.saving_if_bound(found[n]), math.inf if wanted else _MOST_IN_VAIN
    )  # fmt: skip
    for n, candidate in enumerate(found):
        if savings[n] <= 0:
            open_ones = [name for name in candidate.group.heads if name not in reasons]
            why = _GIVEN_UP if n in given_up else why_not(judge, candidate) if open_ones else ""
            reasons |= dict.fromkeys(open_ones, why)
    others = [candidate for n, candidate in enumerate(found) if n not in given_up]
    chosen: list[Candidate] = []
    for candidate in sorted((found[n] for n in numbers), key=lambda c: -judge.saving(c)):
        joined = _join(graph, chosen, candidate, target, judge)
        if joined is None:
            for name in candidate.group.heads:
                reasons.setdefault(name, "its kernel and another one would wait for each other")
        else:
            chosen = joined
    chosen = _with_trees(graph, chosen, () if given_up else choice.trees_of_listed, target, judge)
    chosen = _with_more(graph, chosen, others, target, judge)
    chosen = _exchanged(graph, chosen, others, choice.trees_of_listed if choice.compares_trees else (), target, judge)
    chosen = worth_it(judge, chosen, reasons)
    if judge.is_shared(c.group for c in chosen) or any(c.again for c in others):
        ranked = sorted((n for n in range(len(found)) if n not in given_up), key=lambda n: -savings[n])
        chosen = _with_others_together(graph, chosen, [found[n] for n in ranked], target, judge)
    groups = _in_order(graph, chosen)
    assert groups is not None
    again = frozenset[str]().union(*(c.again for c in chosen))
    reasons |= dict.fromkeys(again, "kernels compute it for themselves, and something else needs it")
    covered = frozenset(n.name for c in chosen for n in c.group.inner).union(*(c.covers for c in chosen)) - again
    left = tuple(
        Left(n.name, reasons.get(n.name, "a single reduction: XLA already runs it in one pass"), n.source)
        for n in graph.reductions() if n.name not in covered
    )  # fmt: skip
    return Grouping(tuple(groups), left, tuple(judge.replaced(g, others_than(chosen, g)) for g in groups))


def _with_trees(
    graph: Graph, chosen: list[Candidate], trees: Sequence[Candidate], target: Target, judge: Judge
) -> list[Candidate]:
    """Returns the chosen candidates, with a tree instead of those that it overlaps where they save less together.

    A candidate with folds is never replaced here, because trees are timed beside it later, as its rivals.
    """
    for tree in trees:
        others = [c for c in chosen if not tree.covers.isdisjoint(c.covers)]
        saved_us = sum(judge.saving(c) for c in others)
        if not any(c.group.folds for c in others) and judge.bound(tree) > saved_us < judge.saving(tree):
            rest = [c for c in chosen if all(c is not other for other in others)]
            chosen = _join(graph, rest, tree, target, judge) or chosen
    return chosen


def _with_more(
    graph: Graph, chosen: list[Candidate], found: Sequence[Candidate], target: Target, judge: Judge
) -> list[Candidate]:
    """Returns the chosen candidates, and those that are worth a kernel beside the ones that make what they read."""
    for candidate in found:
        others = [c.group for c in chosen]
        apart = all(candidate.covers.isdisjoint(c.covers) for c in chosen)
        if chosen and apart and judge.may_save(candidate, others) and judge.saving(candidate, others) > 0:
            chosen = _join(graph, chosen, candidate, target, judge) or chosen
    return chosen


_LESS = 0.999
"""Kernels are exchanged for others where a program takes less than so much of the time: each round of it takes long."""


def _exchanged(
    graph: Graph, chosen: list[Candidate], found: Sequence[Candidate], rivals: Sequence[Candidate], target: Target, judge: Judge
) -> list[Candidate]:  # fmt: skip
    """Returns the chosen candidates, or others instead of those that they overlap, where all take less time together.

    Candidates are chosen by what each saves alone, and two of them may save the same: a kernel that computes a value, and one that
    reads it, both save XLA's store of it. More kernels are looked for only beside those that take less time without.

    rivals: trees that a clock is going to compare with candidates of the same reductions. A candidate with such a tree counts at
    the price of that before it is exchanged.
    """

    def as_tree(candidate: Candidate) -> Candidate:
        own = [tree for tree in rivals if tree.covers == candidate.covers]
        return min(own, key=lambda tree: judge.total_us([tree]), default=candidate)

    while True:
        beside = {id(c): judge.saving(c, others_than(chosen, c.group)) for c in chosen}
        best, best_us = chosen, judge.total_us(chosen)
        for candidate in found:
            overlapping = [c for c in chosen if not candidate.covers.isdisjoint(c.covers)]
            saved_us = sum(beside[id(c)] for c in overlapping)
            rest = [c for c in chosen if candidate.covers.isdisjoint(c.covers)]
            if not overlapping or not _may_save(judge, candidate, rest, saved_us):
                continue
            others = _join(graph, rest, candidate, target, judge)
            if others and judge.total_us(others) < _LESS * best_us:
                best, best_us = others, judge.total_us(others)
        if best is chosen or judge.total_us(list(map(as_tree, chosen))) <= best_us:
            return chosen
        # what saves something only if prices err makes the whole longer by its price, and each round has to make it shorter
        chosen = min(best, _with_more(graph, best, found, target, judge), key=judge.total_us)


def _may_save(judge: Judge, candidate: Candidate, rest: Sequence[Candidate], saved_us: float) -> bool:
    """Does a candidate save more than some microseconds, alone or beside the rest? What several compute for themselves nobody has
    to store once all of them do."""
    for others in ([], [c.group for c in rest]):
        if judge.may_save(candidate, others, saved_us) and judge.saving(candidate, others) > saved_us:
            return True
    return False


def _with_others_together(
    graph: Graph, chosen: list[Candidate], ranked: Sequence[Candidate], target: Target, judge: Judge
) -> list[Candidate]:
    """The chosen candidates, and others that save something only if all of them are kernels: memory that XLA needs for any of them,
    a value that they share, or one that each computes for itself. ranked: all candidates, the best first."""
    together = chosen
    for candidate in ranked:
        shares = candidate.again or judge.may_share(candidate)
        if shares and all(candidate.covers.isdisjoint(c.covers) for c in together):
            together = _join(graph, together, candidate, target, judge) or together
    together = worth_it(judge, together, {})
    return together if judge.total_us(together) < judge.total_us(chosen) else chosen


def _join(
    graph: Graph, chosen: list[Candidate], candidate: Candidate, target: Target, judge: Judge
) -> list[Candidate] | None:
    """The chosen groups and one more, rebuilt so that each hands out what the others read; None when that is impossible."""
    made = frozenset(n.name for c in chosen for n in c.group.outputs)
    read_by_chosen = frozenset(t for c in chosen for t in c.group.inputs)
    if not chosen:
        return [candidate]
    new = _rebuilt(graph, candidate, Context(made, read_by_chosen), target)
    if new is None or (judge.saving(new) == -math.inf):
        return None
    result = []
    for old in chosen:
        missing = frozenset(new.group.inputs) & graph.computed_by(old.covers)
        if missing <= {n.name for n in old.group.outputs}:
            result.append(old)
            continue
        others = frozenset(n.name for c in (*chosen, new) if c is not old for n in c.group.outputs)
        rebuilt = _rebuilt(graph, old, Context(others, missing), target)
        if rebuilt is None:
            return None
        result.append(rebuilt)
    result.append(new)
    return result if _in_order(graph, result) is not None else None


def _rebuilt(graph: Graph, candidate: Candidate, context: Context, target: Target) -> Candidate | None:
    """The same candidate beside other groups; None where it is not legal there."""
    rebuild = candidates.rebuild if candidate.group.folds else product_regions.rebuild
    return rebuild(graph, candidate, context, target)


def _in_order(graph: Graph, chosen: Sequence[Candidate]) -> list[Group] | None:
    """Sorts the groups of candidates so that each comes after those it reads; None when they wait for each other."""
    groups = [c.group for c in chosen]
    made = {n.name: i for i, g in enumerate(groups) for n in g.outputs}
    inside = [(frozenset(f.name for f in c.group.folds) | {n.name for n in c.group.inner}) - c.again for c in chosen]
    needs = []
    for i, g in enumerate(groups):
        sources = set(g.inputs).union(*(graph.ancestors.get(t, frozenset()) for t in g.inputs))
        needs.append(
            {j for t in sources for j in range(len(groups)) if j != i and (t in inside[j] or made.get(t) == j)}
        )
    ordered: list[int] = []
    while len(ordered) < len(groups):
        free = next((i for i in range(len(groups)) if i not in ordered and needs[i] <= set(ordered)), None)
        if free is None:
            return None
        ordered.append(free)
    return [groups[i] for i in ordered]
