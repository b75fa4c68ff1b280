"""Which candidates become kernels: the disjoint set that saves most, with prices that are exact where they decide.

A candidate's saving is at first a bound (nothing runs faster than its traffic and its arithmetic). Those that would be chosen are
lowered and priced exactly, and the choice is made again, until it consists of exactly priced kernels only. No candidate
that was left aside could have been better, since its bound was looked at; but for those that are given up after many in vain.
"""

import math
from collections.abc import Callable, Sequence

_EXACT = 18
"""Conflicting candidates of which every disjoint set is looked at (by branch and bound); of more, sets grow one by one."""


def best_disjoint(savings: Sequence[float], covers: Sequence[frozenset[str]]) -> list[int]:
    """The numbers of the candidates, no two of which cover the same reduction, whose savings have the largest sum.

    Exact for groups of at most 18 candidates that get in each other's way; greedy with exchanges beyond. Only positive
    savings are taken.
    """
    chosen: list[int] = []
    for component in _components([n for n, s in enumerate(savings) if s > 0], covers):
        solve = _branch_and_bound if len(component) <= _EXACT else _greedy
        chosen += solve(component, savings, covers)
    return sorted(chosen)


def _components(numbers: Sequence[int], covers: Sequence[frozenset[str]]) -> list[list[int]]:
    """Candidates that get in each other's way, directly or through others."""
    components: list[tuple[frozenset[str], list[int]]] = []
    for n in numbers:
        touching = [c for c in components if c[0] & covers[n]]
        merged = (covers[n].union(*(c[0] for c in touching)), [m for c in touching for m in c[1]] + [n])
        components = [c for c in components if c not in touching] + [merged]
    return [members for _, members in components]


def _branch_and_bound(numbers: Sequence[int], savings: Sequence[float], covers: Sequence[frozenset[str]]) -> list[int]:
    ordered = sorted(numbers, key=lambda n: -savings[n])
    rest = [0.0]
    for n in reversed(ordered):
        rest.append(rest[-1] + savings[n])
    rest.reverse()
    best: tuple[float, tuple[int, ...]] = (0.0, ())

    def extend(at: int, taken: tuple[int, ...], used: frozenset[str], saved: float) -> None:
        nonlocal best
        if saved > best[0]:
            best = saved, taken
        if at == len(ordered) or saved + rest[at] <= best[0]:
            return
        n = ordered[at]
        if not covers[n] & used:
            extend(at + 1, (*taken, n), used | covers[n], saved + savings[n])
        extend(at + 1, taken, used, saved)

    extend(0, (), frozenset(), 0.0)
    return list(best[1])


def _greedy(numbers: Sequence[int], savings: Sequence[float], covers: Sequence[frozenset[str]]) -> list[int]:
    """The largest saving first; then exchanges, as long as one of them saves more: a candidate for all those that it gets in the
    way of, and one chosen candidate for the best of those that it alone keeps out.

    At least the k-th part of the best sum, where no candidate covers more than k reductions.
    """

    def filled(chosen: list[int]) -> list[int]:
        used = frozenset().union(*(covers[m] for m in chosen))
        for n in sorted(numbers, key=lambda n: -savings[n]):
            if n not in chosen and not covers[n] & used:
                chosen, used = [*chosen, n], used | covers[n]
        return chosen

    def exchanged(chosen: list[int]) -> list[int]:
        others = [n for n in numbers if n not in chosen]
        in_the_way = {n: [m for m in chosen if covers[n] & covers[m]] for n in others}
        for n in others:
            if savings[n] > sum(savings[m] for m in in_the_way[n]):
                return [m for m in chosen if m not in in_the_way[n]] + [n]
        for m in chosen:
            freed = [n for n in others if in_the_way[n] == [m]][:_EXACT]
            instead = _branch_and_bound(freed, savings, covers)
            if sum(savings[n] for n in instead) > savings[m]:
                return [c for c in chosen if c != m] + instead
        return chosen

    chosen = filled([])
    while (better := exchanged(chosen)) is not chosen:
        chosen = filled(better)
    return chosen


def select(
    bounds: Sequence[float], covers: Sequence[frozenset[str]], exact: Callable[[int], float | None], most_in_vain: float = math.inf
) -> tuple[list[int], list[float], frozenset[int]]:  # fmt: skip
    """Returns the best disjoint candidates, the savings by which they were chosen, and those that were given up unseen.

    bounds: the most that each can save. exact: what one saves, which takes longer to say; minus infinity where it cannot be, and
    None where a better bound says that it is nothing. most_in_vain: after so many in a row that save nothing, what is not known is
    given up; those of a better bound do not count.
    """
    savings = list(bounds)
    known: set[int] = set()
    in_vain = 0
    while True:
        chosen = best_disjoint(savings, covers)
        unknown = [n for n in chosen if n not in known]
        if not unknown:
            return chosen, savings, frozenset()
        for n in unknown:
            found = exact(n)
            savings[n] = 0.0 if found is None else min(savings[n], found)
            known.add(n)
            if found is not None:
                in_vain = 0 if savings[n] > 0.0 else in_vain + 1
        if in_vain >= most_in_vain:
            given_up = frozenset(n for n, us in enumerate(savings) if us > 0.0 and n not in known)
            savings = [0.0 if n in given_up else us for n, us in enumerate(savings)]
            return best_disjoint(savings, covers), savings, given_up
