"""Groups that lose in the whole program are found one after the other: what one costs may be what another reads."""

from dataclasses import dataclass

from pallasfuse.fusion.judging import losing_together
from pallasfuse.price.terms import Price


@dataclass(eq=False)
class Named:
    name: str


class Told:
    """A judge that was told what XLA would take instead of each group beside others, and the margin."""

    def __init__(self, prices, replaced, margin=1.0):
        self.prices, self.replaced, self.margin = prices, replaced, margin
        self.asked = []

    def price_of(self, group):
        price = self.prices[group.name]
        return price if isinstance(price, str) else Price(price, ())

    def replaced_us(self, group, others):
        beside = "".join(sorted(g.name for g in others))
        self.asked.append((group.name, beside))
        return self.replaced[group.name](beside)

    def margin_for(self, group, price):
        return self.margin


def lost(judge, names, most_asked=100):
    return [group.name for group, _ in losing_together(judge, [Named(n) for n in names], most_asked)]


def test_what_loses_only_beside_another_stays_when_that_is_gone():
    prices = {"a": 10.0, "b": 10.0, "c": 10.0}
    replaced = {"a": lambda _: 20.0, "b": lambda _: 1.0, "c": lambda beside: 5.0 if "b" in beside else 15.0}
    assert lost(Told(prices, replaced), "abc") == ["b"]


def test_what_saves_only_beside_another_goes_with_it():
    """XLA stores a value for one of them, so the other one saves its store; without the first, nothing."""
    replaced = {"a": lambda _: 1.0, "b": lambda beside: 20.0 if "a" in beside else 3.0, "c": lambda _: 20.0}
    assert lost(Told(dict.fromkeys("abc", 10.0), replaced), "abc") == ["a", "b"]


def test_groups_are_asked_so_many_times_and_no_more():
    judge = Told(dict.fromkeys("abcdef", 10.0), dict.fromkeys("abcdef", lambda _: 1.0))
    assert lost(judge, "abcdef", most_asked=11) == ["a", "b"]  # six are asked, then five
    assert len(judge.asked) == 11
    assert lost(Told(judge.prices, judge.replaced), "abcdef", most_asked=5) == []


def test_the_worst_goes_first_and_ties_go_to_xla():
    judge = Told({"a": 10.0, "b": 10.0}, {"a": lambda _: 10.0, "b": lambda _: 3.0})
    assert lost(judge, "ab") == ["b", "a"]


def test_the_margin_counts_and_what_has_no_price_is_left_to_others():
    saving = {"a": lambda _: 11.0}
    assert lost(Told({"a": 10.0}, saving), "a") == []
    assert lost(Told({"a": 10.0}, saving, margin=1.2), "a") == ["a"]
    assert lost(Told({"a": "no target has one"}, saving), "a") == []


def test_the_reason_names_both_times():
    ((_, why),) = losing_together(Told({"a": 10.0}, {"a": lambda _: 4.0}), [Named("a")], 10)
    assert why == "one kernel would not be faster: 10 us predicted, 4 us apart"
