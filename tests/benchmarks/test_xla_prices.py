"""Prices of whole programs beside the times that XLA took."""

import json

import pytest

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
    kind, measured = xla_prices.measured_us()
    predicted = xla_prices.predicted_us(kind, name)
    assert predicted is not None and xla_prices.LEAST < predicted / measured[name] < xla_prices.MOST


def test_a_program_of_which_only_a_step_is_planned_is_not_priced():
    name = "sinkhorn-fused-step"
    kind, measured = xla_prices.measured_us()
    assert xla_prices.predicted_us(kind, name) is None and measured[name] > 1000


def test_of_a_program_that_was_measured_twice_the_last_time_counts(tmp_path):
    files = [_results(tmp_path / f"{n}.json", "NVIDIA H200", us) for n, us in enumerate((30.0, 20.0))]
    assert xla_prices.measured_us(files) == ("NVIDIA H200", {"one": 20.0})


def test_times_of_two_kinds_of_devices_are_refused(tmp_path):
    files = [_results(tmp_path / f"{kind}.json", kind, 30.0) for kind in ("H100", "H200")]
    with pytest.raises(ValueError, match="H100 and H200"):
        xla_prices.measured_us(files)


def test_a_program_that_failed_later_keeps_its_time(tmp_path):
    files = [_results(tmp_path / "0.json", "H200", 30.0), _results(tmp_path / "1.json", "H200", None)]
    assert xla_prices.measured_us(files) == ("H200", {"one": 30.0})


@pytest.mark.parametrize("content", ["[]", '{"rows": []}', None])
def test_files_without_results_are_refused(tmp_path, content):
    file = tmp_path / "other.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match="holds no results of programs"):
        xla_prices.measured_us([file])


def _results(file, kind, us):
    rows = [
        {"name": "one", "priced": True, "jit": {"us": us}},
        {"name": "no price", "priced": False, "jit": {"us": us}},
    ]
    file.write_text(json.dumps({"device": kind, "rows": rows}))
    return file
