"""Equality saturation: rules applied to an e-graph until nothing new is found, or a limit is reached."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pallasfuse.search.egraph import EGraph, FullError, Node
from pallasfuse.search.found import Searched
from pallasfuse.search.rules import PHASES, Rule


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
