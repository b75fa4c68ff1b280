"""Models by length: which there are, and the rows that are measured."""

import pytest

from benchmarks import models


def test_models_take_a_number_of_tokens():
    names = [entry.name for entry in models.models((), "tokens")]
    assert {"linen-self-attention", "nnx-encoder-block", "transformers-gpt2", "haiku-attention"} <= set(names)
    assert not any(name.startswith("decoder") for name in names)
    assert all(entry.group == "transformers" for entry in models.models((), "layers"))


@pytest.fixture
def entry(monkeypatch):
    monkeypatch.setattr(models, "SIZE", "tiny")
    monkeypatch.setattr(models, "ROUNDS", 1)
    return next(models.models(["linen-self-attention"], "tokens"))


def test_a_row_has_both_times(entry):
    row = models.measured(entry, {"tokens": 12})
    assert row["jit_ms"] > 0 and row["fused_ms"] > 0 and row["x"] > 0, row
    assert row["name"] in models._line(row)


def test_what_fails_is_a_row(entry):
    assert "TypeError" in models.measured(entry, {"tokens": 12, "layers": 2})["failed"]


def test_seconds_to_plan_and_compile(entry):
    row = models.by_layers(entry.build("tiny", tokens=12))
    assert row["x"] == row["fused_compile_s"] / row["jit_compile_s"]
    assert row["plan_s"] > 0 and row["summary_lines"] > 0
