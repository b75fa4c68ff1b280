"""Prices of whole programs beside the times that XLA took."""

from benchmarks import xla_prices

MEASURED = {"near": 100.0, "far": 100.0, "farther": 100.0}


def test_programs_outside_of_the_range_are_listed_worst_first():
    *listed, last = xla_prices.lines({"near": 110.0, "far": 200.0, "farther": 20.0}, MEASURED, {})
    assert [line.split()[-1] for line in listed] == ["farther", "far"]
    assert last.startswith("3 programs") and "33.3% within" in last


def test_beside_earlier_prices_what_has_changed_is_listed():
    before = {"near": 110.0, "far": 100.0, "farther": 20.0}
    *listed, _ = xla_prices.lines({"near": 110.0, "far": 200.0, "farther": 20.0}, MEASURED, before)
    assert [line.split() for line in listed] == [["2.00", "100", "->", "200", "of", "100", "us", "far"]]


def test_a_program_is_priced_without_a_gpu():
    name = "softened-bodies"
    predicted, measured = xla_prices.predicted_us(name), xla_prices.measured_us()[name]
    assert predicted is not None and xla_prices.LEAST < predicted / measured < xla_prices.MOST


def test_a_program_of_which_only_a_step_is_planned_is_not_priced():
    name = "sinkhorn-fused-step"
    assert xla_prices.predicted_us(name) is None and xla_prices.measured_us()[name] > 1000
