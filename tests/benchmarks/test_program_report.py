"""The arithmetic of the report on whole programs, on rows made by hand."""

import argparse
import json
import math

import pytest

from benchmarks import program_report as report
from benchmarks.programs import content
from benchmarks.programs import report as report_files


def row(name, fused, checked=None, **more):
    """A row whose jax.jit takes 100 us."""
    found = {"name": name, "jit": {"us": 100.0}, "fused": {"us": 100.0 / fused}, "speedup": {"fused": fused}}
    if checked is not None:
        found |= {"checked": {"us": 100.0 / checked}}
        found["speedup"]["checked"] = checked
    return found | more


def kernel(predicted, measured, predicted_xla=1.0, xla=1.0):
    return {
        "name": "k", "count": 1, "predicted_us": predicted, "alone": {"us": measured}, "predicted_xla_us": predicted_xla,
        "xla": {"us": xla},
    }  # fmt: skip


FAILED = {"name": "broken", "failed": "its process died (-9)"}
MISSING = {"name": "absent", "not_installed": "not installed: haiku"}


def test_the_worst_program_comes_first_and_what_is_not_installed_last():
    rows = [row("fast", 3.0, 3.0), MISSING, row("even", 0.5, 1.0), row("slow", 2.0, 0.9), FAILED]
    assert [r["name"] for r in report.worst_first(rows)] == ["broken", "slow", "even", "fast", "absent"]
    printed = report.table(rows)
    assert printed[0] == report.HEADER
    assert [x.split()[0] for x in printed[1:]] == ["broken", "slow", "even", "fast", "absent"]


def test_a_row_without_a_check_is_ordered_by_its_price_alone():
    rows = [row("b", 0.8), row("a", 0.5), row("c", 0.2, 1.5)]
    assert [r["name"] for r in report.worst_first(rows)] == ["a", "b", "c"]


def test_geometric_means_floors_and_the_quotient_of_both():
    found = report.summary([row("a", 0.5, 1.0), row("b", 2.0, 4.0), row("c", 0.86, 0.96), MISSING, FAILED])
    assert found["programs"] == 5
    assert found["fused"]["geometric_mean"] == pytest.approx((0.5 * 2.0 * 0.86) ** (1 / 3))
    assert found["checked"]["geometric_mean"] == pytest.approx((4.0 * 0.96) ** (1 / 3))
    assert list(found["fused"]["below"]) == ["a"], "the floor of the price alone is 0.85"
    assert list(found["checked"]["below"]) == ["c"], "the floor of what was checked is 0.97"
    assert found["checked"]["least"] == 0.96
    assert found["price_alone_of_checked"] == pytest.approx((0.5 * 0.5 * 0.86 / 0.96) ** (1 / 3))
    assert found["not_installed"] == ["absent"]
    assert found["failed"] == {"broken": "its process died (-9)"}
    assert "tuned" not in found


def test_a_way_that_fails_is_named_and_the_others_count():
    broken = row("half", 2.0) | {"checked": {"reason": "ValueError: no"}}
    found = report.summary([broken])
    assert found["failed"] == {"half": "checked: ValueError: no"}
    assert found["fused"]["number"] == 1
    assert "checked: ValueError: no" in report.line(broken)


def test_ratios_come_from_rounds_where_there_are_any():
    assert report.speedup({"jit": {"us": 10.0}, "fused": {"us": 5.0}, "speedup": {"fused": 1.9}}) == 1.9
    assert report.speedup({"jit": {"us": 10.0}, "fused": {"us": 5.0}}) == 2.0
    assert report.speedup(FAILED) is None


def test_ranks_share_ties():
    assert report.ranks([30.0, 10.0, 20.0, 20.0]) == [4.0, 1.0, 2.5, 2.5]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1, 10), (2, 20), (3, 1000)], 1.0),
        ([(1, 3), (2, 2), (3, 1)], -1.0),
        ([(1, 2), (2, 1), (3, 4), (4, 3)], 0.6),
        ([(1, 1), (2, 2)], None),
        ([(1, 1), (1, 2), (1, 3)], None),
    ],
)
def test_spearman(pairs, expected):
    found = report.spearman(pairs)
    assert found == (None if expected is None else pytest.approx(expected))


def test_predictions_of_kernels_and_of_what_they_replace():
    rows = [
        row("a", 1.0, kernels=[kernel(1.0, 2.0, 3.0, 1.0), kernel(10.0, 10.0, 8.0, 4.0)]),
        row("b", 1.0, kernels=[kernel(90.0, 30.0), {**kernel(5.0, 1.0), "alone": {"reason": "did not run"}}]),
    ]
    found = report.summary(rows)
    ours, theirs = found["kernels"], found["kernels_by_xla"]
    assert (ours["number"], ours["least"], ours["most"]) == (3, 0.5, 3.0)
    assert ours["within"] == pytest.approx(2 / 3)
    assert ours["geometric_mean"] == pytest.approx(1.5 ** (1 / 3))
    assert ours["spearman"] == 1.0
    assert (theirs["number"], theirs["most"]) == (4, 3.0)


def test_predictions_leave_out_the_time_of_calling_and_programs_with_loops():
    rows = [
        row("a", 1.0, predicted_xla_us=50.0) | {"jit": {"us": 100.0, "own_us": 50.0}},
        row("b", 1.0, predicted_xla_us=200.0),
        row("c", 1.0, predicted_xla_us=1.0, control_flow=["scan"]),
        row("d", 1.0, predicted_xla_us=1.0, control_flow=["while"], priced=False),
    ]
    found = report.summary(rows)["programs_by_xla"]
    assert (found["number"], found["least"], found["most"], found["within"]) == (2, 1.0, 2.0, 0.5)
    assert report.summary(rows)["with_loops"] == ["c", "d"]


def test_a_loop_that_has_a_price_counts():
    rows = [row("a", 1.0, predicted_xla_us=50.0, control_flow=["scan"], priced=True)]
    assert report.summary(rows)["programs_by_xla"]["number"] == 1


def test_large_differences_are_named():
    wrong = row("wrong", 1.0) | {"fused": {"us": 100.0, "error": 0.5}}
    assert report.summary([wrong, row("right", 1.0)])["wrong"] == ["wrong"]
    assert report.summary([row("right", 1.0) | {"fused": {"us": 1.0, "error": 0.01}}])["wrong"] == []


def test_lines_of_the_summary():
    rows = [row("a", 0.5, 0.9, kernels=[kernel(1.0, 1.0)]), row("b", 2.0, 2.0), FAILED]
    text = "\n".join(report.summary_lines(report.summary(rows)))
    assert "3 programs, 1 failed" in text
    assert "checked: 2 programs, geometric mean 1.342x, worst 0.90x, 1 faster by 3%, 1 below 0.97" in text
    assert "price alone: 2 programs, geometric mean 1.000x, worst 0.50x, 1 faster by 3%, 1 below 0.85" in text
    assert "kernels: 1, predicted over measured 1.00" in text


def test_nothing_to_report_is_reported():
    assert report.summary_lines(report.summary([])) == ["0 programs, 0 failed; not installed: none"]


def test_the_file_is_json_with_a_line_for_each_row():
    rows = [row("b", 2.0, 2.0, error=math.pi), row("a", 0.5, 0.5, error=math.inf), MISSING]
    text = content(rows, {"device": "some GPU"})
    read = json.loads(text)
    assert read["device"] == "some GPU"
    assert [r["name"] for r in read["rows"]] == ["a", "b", "absent"]
    assert read["summary"]["checked"]["geometric_mean"] == 1.0
    assert read["rows"][1]["error"] == 3.1416
    assert read["rows"][0]["error"] == "inf", "JSON has no infinity"
    assert sum(line.startswith('{"name"') for line in text.splitlines()) == 3


def test_files_are_reported_together_and_the_last_measurement_counts(tmp_path, capsys):
    first = [row("a", 0.5, 0.5), row("b", 2.0, 2.0)]
    second = [row("a", 1.0, 3.0), {"name": "b", "failed": "not measured: the time is spent"}]
    names = []
    for n, rows in enumerate((first, second)):
        path = tmp_path / f"{n}.json"
        path.write_text(content(rows, {"device": "some GPU"}))
        names.append(str(path))
    out = tmp_path / "both.json"
    report_files(argparse.Namespace(names=names, out=str(out)))
    merged = json.loads(out.read_text())
    assert {r["name"]: r["speedup"]["checked"] for r in merged["rows"]} == {"b": 2.0, "a": 3.0}
    assert merged["device"] == "some GPU"
    assert "checked: 2 programs" in capsys.readouterr().out


def test_what_differs_from_jax_jit_is_listed_with_its_distance_from_float64():
    far = {"jit": {"us": 100.0}, "fused": {"us": 50.0, "error": 0.2}, "error64": {"jit": 0.25, "fused": 0.21}}
    found = report.summary([{"name": "rounds"} | far, row("even", 1.0)])
    assert found["wrong"] == ["rounds"] and found["wrong_by_float64"] == {"rounds": {"jit": 0.25, "fused": 0.21}}
    assert "  rounds, from float64: jax.jit 0.25, price alone 0.21" in report.summary_lines(found)


def test_distances_without_an_end_are_read_back_from_a_file():
    far = {"jit": {"us": 100.0}, "fused": {"us": 50.0, "error": 0.2}, "error64": {"jit": math.inf, "fused": 0.21}}
    (kept,) = json.loads(content([{"name": "rounds"} | far], {}))["rows"]
    lines = report.summary_lines(report.summary([kept]))
    assert "  rounds, from float64: jax.jit inf, price alone 0.21" in lines
