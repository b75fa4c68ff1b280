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
        return total([self, other])

    def __str__(self) -> str:
        listed = "; ".join(str(t) for t in sorted(self.terms, key=lambda t: -t.us) if t.us > 0)
        return f"{self.us:.3g} us, limited by {self.limit} ({listed})"


NOTHING = Price(0.0, ())


def total(prices: Iterable[Price]) -> Price:
    """All of them, one after the other: terms of one name are added."""
    us = 0.0
    summed: dict[tuple[str, str], tuple[float, float]] = {}
    for price in prices:
        us += price.us
        for t in price.terms:
            amount, time = summed.get((t.name, t.unit), (0.0, 0.0))
            summed[t.name, t.unit] = amount + t.amount, time + t.us
    return Price(us, tuple(Term(name, amount, unit, time) for (name, unit), (amount, time) in summed.items()))


def repeated(price: Price, times: float) -> Price:
    """The same so many times, one after the other."""
    return Price(price.us * times, tuple(Term(t.name, t.amount * times, t.unit, t.us * times) for t in price.terms))


def scaled(amount: float) -> str:
    """A number with three digits and a metric prefix."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(amount) < 1000:
            return f"{amount:.3g} {prefix}"
        amount /= 1000
    return f"{amount:.3g} P"
