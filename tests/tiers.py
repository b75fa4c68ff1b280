"""A choice of cases for the default tier of tests."""

from collections.abc import Hashable, Sequence


def sample(cases: Sequence[Sequence[Hashable]], one_in: int) -> set[int]:
    """Numbers of cases that have every value among them, and are at least one in so many, evenly spread."""
    missing, kept = {value for case in cases for value in case}, set()
    while missing:
        best = max(range(len(cases)), key=lambda n: len(missing & set(cases[n])))
        kept.add(best)
        missing -= set(cases[best])
    wanted = -(-len(cases) // one_in)
    for n in range(0, len(cases), one_in):
        if len(kept) < wanted:
            kept.add(n)
    return kept
