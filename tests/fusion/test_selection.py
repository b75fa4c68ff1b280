"""The choice of disjoint candidates: equal to the exhaustive optimum where that can be had, near it beyond."""

from itertools import chain, combinations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pallasfuse.fusion import selection
from pallasfuse.fusion.selection import best_disjoint, select


def exhaustive(savings, covers):
    numbers = range(len(savings))
    sets = chain.from_iterable(combinations(numbers, r) for r in range(len(savings) + 1))
    fitting = (s for s in sets if all(covers[a].isdisjoint(covers[b]) for a, b in combinations(s, 2)))
    return max(sum(savings[n] for n in s) for s in fitting)


CASES = st.lists(
    st.tuples(st.integers(-5, 40), st.frozensets(st.sampled_from("abcdefgh"), min_size=1, max_size=4)), max_size=10
)


@given(CASES)
@settings(max_examples=100, deadline=None)
def test_the_choice_is_the_exhaustive_optimum(cases):
    savings, covers = [float(s) for s, _ in cases], [c for _, c in cases]
    chosen = best_disjoint(savings, covers)
    assert all(covers[a].isdisjoint(covers[b]) for a, b in combinations(chosen, 2))
    assert sum(savings[n] for n in chosen) == pytest.approx(exhaustive(savings, covers))


@given(CASES)
@settings(max_examples=100, deadline=None)
def test_many_candidates_are_chosen_near_the_optimum(cases):
    """The same by exchanges alone, as for more candidates than can all be looked at."""
    savings, covers = [float(s) for s, _ in cases], [c for _, c in cases]
    positive = [n for n, s in enumerate(savings) if s > 0]
    chosen = selection._greedy(positive, savings, covers)
    assert all(covers[a].isdisjoint(covers[b]) for a, b in combinations(chosen, 2))
    found = sum(savings[n] for n in chosen)
    assert found >= max((savings[n] for n in positive), default=0.0)
    most = max((len(c) for c in covers), default=1)  # what is chosen keeps out so many that save no more
    assert most * found >= exhaustive(savings, covers)


@pytest.mark.parametrize(
    "cases",
    [
        [(9, "a"), (20, "c"), (26, "d"), (27, "acd")],  # one gives way to three
        [(9, "ab"), (8, "a"), (7, "b"), (6, "bc"), (5, "c")],
        [(30, "abcd"), (10, "ae"), (9, "b"), (8, "c"), (7, "d"), (6, "e")],
    ],
)
def test_exchanges_find_the_optimum(cases):
    savings, covers = [float(s) for s, _ in cases], [frozenset(c) for _, c in cases]
    assert sum(savings[n] for n in selection._greedy(range(len(cases)), savings, covers)) == exhaustive(savings, covers)


@given(CASES, st.lists(st.integers(0, 10), min_size=10, max_size=10))
@settings(max_examples=100, deadline=None)
def test_prices_are_exact_where_they_decide_and_the_choice_is_the_best_by_exact_ones(cases, losses):
    covers = [c for _, c in cases]
    exact = [float(s) for s, _ in cases]
    bounds = [s + loss for s, loss in zip(exact, losses, strict=False)]
    asked = []

    def price(n):
        asked.append(n)
        return exact[n]

    chosen, savings, given_up = select(bounds, covers, price)
    assert not given_up
    assert len(asked) == len(set(asked)) and set(chosen) <= set(asked)
    assert sum(savings[n] for n in chosen) == pytest.approx(exhaustive(exact, covers))


def test_a_candidate_without_a_kernel_makes_room_for_others():
    covers = [frozenset("ab"), frozenset("a"), frozenset("b")]
    chosen, _, _ = select([10.0, 4.0, 3.0], covers, lambda n: float("-inf") if n == 0 else 2.0)
    assert chosen == [1, 2]


def test_after_many_in_vain_the_others_are_given_up():
    """The best bound first: what saves nothing is asked one after the other, and a saving begins the count again."""
    covers = [frozenset([n]) if n == 3 else frozenset([n, "all"]) for n in range(8)]
    bounds = [float(20 - n) for n in range(8)]
    exact = {n: -1.0 for n in range(8)} | {3: 5.0, 6: 7.0}
    asked = []

    def price(n):
        asked.append(n)
        return exact[n]

    assert select(bounds, covers, price, 3) == ([3], [-1.0, -1.0, -1.0, 5.0, -1.0, 0.0, 0.0, 0.0], frozenset({5, 6, 7}))
    assert asked == [0, 3, 1, 2, 4]
    assert select(bounds, covers, price, 5)[0] == [3, 6]


def test_what_a_better_bound_tells_is_no_price_in_vain():
    covers = [frozenset("a")] * 6
    prices = {0: None, 1: -1.0, 2: None, 3: None, 4: None, 5: 2.0}
    chosen, savings, given_up = select([9.0, 8.0, 7.0, 6.0, 5.0, 4.0], covers, prices.__getitem__, 2)
    assert (chosen, savings, given_up) == ([5], [0.0, -1.0, 0.0, 0.0, 0.0, 2.0], frozenset())
