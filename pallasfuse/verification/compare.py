"""Two values that ought to be equal: what the trials say about it."""

from dataclasses import dataclass

import numpy as np

from pallasfuse.verification.field import Array
from pallasfuse.verification.value import ASSUMED, FINITE, NAN, NEGATIVE_INFINITY, POSITIVE_INFINITY, ROOT, ZERO, Value

_NAMES = {ZERO: "0", POSITIVE_INFINITY: "inf", NEGATIVE_INFINITY: "-inf", NAN: "nan"}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One element that differs, with what was expected and found (a residue, or a number that is known)."""

    index: tuple[int, ...]
    expected: str
    found: str


class Comparison:
    """Counts, over batches of trials, how often each element of a value was the same as its reference.

    Where the reference is tainted (see `Value.taint`), or the value relies on an assumption that fails, a trial is evidence for
    equality only: an element is equal if all its trials agree, or else if those without a taint do. A value that takes a
    root or logarithm of a negative number where the reference takes none is wrong, even if it agrees: with -x, say, log(x * x)
    is a number and 2 * log(x) is none.
    """

    def __init__(self) -> None:
        self.matches: Array | int = 0
        self.clean_matches: Array | int = 0
        self.tainted_mismatches: Array | int = 0
        self.mismatch: Mismatch | None = None
        self.compared = False

    def add(self, expected: Value, found: Value, trials: int, *, unfinished: bool = False) -> None:
        """One batch of trials. unfinished: `found` may take roots and logarithms of partial results, whose signs are any."""
        if expected.shape != found.shape:
            raise AssertionError(f"shapes {expected.shape} and {found.shape}")
        equal, defined = _equal(expected, found)
        taint = (expected.taint | found.taint & (ROOT | ASSUMED if unfinished else ASSUMED)) != 0
        equal = equal & ~(((found.taint & ~expected.taint & ROOT) != 0) & (found.kind == FINITE) & ~taint)
        own = np.broadcast_shapes(equal.shape, defined.shape, taint.shape)[-1]
        weight = trials // own  # a value that no input decides is the same in all trials
        equal, defined, taint = (np.broadcast_to(x, (*expected.shape, own)) for x in (equal, defined, taint))
        self.matches = self.matches + weight * (equal & defined).sum(-1)
        self.clean_matches = self.clean_matches + weight * (equal & defined & ~taint).sum(-1)
        self.tainted_mismatches = self.tainted_mismatches + (~equal & defined & taint).sum(-1)
        self.compared = True
        wrong = ~equal & defined & ~taint
        if wrong.any() and self.mismatch is None:
            at = tuple(int(n) for n in np.argwhere(wrong)[0])
            self.mismatch = Mismatch(at[:-1], _show(expected, at), _show(found, at))

    @property
    def counts(self) -> Array:
        """Counts the trials that speak for each element."""
        return np.where(np.asarray(self.tainted_mismatches) == 0, self.matches, self.clean_matches)

    @property
    def fewest(self) -> int:
        """The number of trials that agree, for the element with the fewest."""
        counts = self.counts
        return int(counts.min()) if counts.size else np.iinfo(np.int64).max


def _equal(a: Value, b: Value) -> tuple[Array, Array]:
    """Returns (equal, comparable) for every element and trial."""
    defined = ~(a.bad | b.bad)
    if not a.levels or not b.levels:
        assert a.real is not None and b.real is not None
        return np.asarray(a.real == b.real), defined
    finite = [(v.kind == FINITE) | (v.kind == ZERO) for v in (a, b)]
    equal = (a.kind == b.kind) | (finite[0] & finite[1])
    known = False
    for x, y in zip(a.levels, b.levels, strict=True):
        if x is not None and y is not None:
            equal = equal & ((x == y) | ~finite[0] | ~finite[1])
            known = True
    return np.asarray(equal), defined if known else defined & ~(finite[0] & finite[1])


def _show(value: Value, at: tuple[int, ...]) -> str:
    def element(x: Array) -> str:
        wide = np.broadcast_to(
            x, (*value.shape, max(x.shape[-1], at[-1] + 1)) if x.shape[-1] == 1 else (*value.shape, x.shape[-1])
        )
        return str(wide[at])

    kind = int(element(value.kind))
    if kind in _NAMES:
        return _NAMES[kind]
    if value.real is not None:
        return element(value.real)
    level = value.lowest
    residue = value.levels[level] if level >= 0 else None
    return "unknown" if residue is None else f"{element(residue)} (mod p_{level})"
