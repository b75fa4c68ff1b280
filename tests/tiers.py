"""A choice of cases for the default tier of tests."""

import zlib
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence


def shares(names: Sequence[str]) -> Iterator[int]:
    """Numbers, taken modulo that of shares, by which the cases of each function are dealt out evenly.

    The first one's depends on the name, so that functions of one case are in all shares alike.
    """
    dealt: Counter[str] = Counter()
    for name in names:
        function = name.partition("[")[0]
        yield zlib.crc32(function.encode()) + dealt[function]
        dealt[function] += 1


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
