"""Grown programs: drawn from a seed, contracted twice or more, and judged against float64."""

import jax
import numpy as np
import pytest

from benchmarks import grown

SEEDS = range(40)


def test_programs_are_drawn_from_their_seed_and_contract():
    programs = [grown.Grown(seed) for seed in SEEDS]
    assert [p.source for p in programs] == [grown.Grown(seed).source for seed in SEEDS]
    assert all(p.contractions >= 2 for p in programs)
    assert len({p.source for p in programs}) == len(programs)


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("seed", SEEDS[:6])
def test_programs_run(seed):
    program = grown.Grown(seed)
    results = jax.jit(program.function())(*program.arrays())
    assert results and all(np.size(x) for x in jax.tree.leaves(results))


def test_a_wrong_result_and_a_crash_are_noticed(monkeypatch):
    right = grown.measured(1, rounds=1)
    assert not right["problem"] and right["speedup"] > 0 and right["plan_s"] > 0
    fuse = grown.pf.fuse

    def wrong(function, **options):
        return fuse(lambda *args: jax.tree.map(lambda x: x * 1.01, function(*args)), **options)

    monkeypatch.setattr(grown.pf, "fuse", wrong)
    assert grown.measured(1, rounds=1)["problem"].startswith("wrong")
    monkeypatch.setattr(grown.pf, "fuse", lambda *args, **options: 1 / 0)
    assert "ZeroDivisionError" in grown.measured(1, rounds=1)["problem"]


def test_the_report_begins_with_what_is_wrong():
    rows = [
        {"seed": 1, "contractions": 2, "kernels": 1, "plan_s": 0.1, "speedup": 0.9, "jit_us": 10.0, "problem": ""},
        {"seed": 2, "contractions": 3, "problem": "wrong: error 1"},
    ]
    told = grown.told(rows).splitlines()
    assert told[0] == "seed 2: wrong: error 1" and "1 below 0.95x" in told[-1]
