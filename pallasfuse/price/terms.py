"""`Price`: a predicted time as a sum of named terms, each with its amount and its unit."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """One resource that a kernel uses: how much of it, and how long that takes by itself."""

    name: str
    amount: float
    unit: str
    us: float

    def __str__(self) -> str:
        return f"{self.name} {scaled(self.amount)}{self.unit} {self.us:.3g} us"


@dataclass(frozen=True, slots=True)
class Price:
    """The time of a kernel, or of several one after the other, and the terms that it is made of."""

    us: float
    terms: tuple[Term, ...]

    @property
    def limit(self) -> str:
        """The name of the term that takes longest."""
        return max(self.terms, key=lambda t: t.us).name if self.terms else "nothing"

    def __add__(self, other: "Price") -> "Price":
        """One after the other: terms of one name are added."""
        summed: dict[tuple[str, str], Term] = {}
        for t in (*self.terms, *other.terms):
            old = summed.get((t.name, t.unit))
            summed[t.name, t.unit] = t if old is None else Term(t.name, old.amount + t.amount, t.unit, old.us + t.us)
        return Price(self.us + other.us, tuple(summed.values()))

    def __str__(self) -> str:
        listed = "; ".join(str(t) for t in sorted(self.terms, key=lambda t: -t.us) if t.us > 0)
        return f"{self.us:.3g} us, limited by {self.limit} ({listed})"


NOTHING = Price(0.0, ())


def total(prices: Iterable[Price]) -> Price:
    """All of them, one after the other."""
    return sum(prices, NOTHING)


def scaled(amount: float) -> str:
    """A number with three digits and a metric prefix."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(amount) < 1000:
            return f"{amount:.3g} {prefix}"
        amount /= 1000
    return f"{amount:.3g} P"
