"""The tiers themselves: every value of a parameter stays in the default one, and shares are disjoint and complete."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import sample

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("one_in", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("sizes", [(5, 3), (3, 5), (4, 4), (1, 6), (2, 3, 4)], ids=str)
def test_every_value_is_in_a_sample(sizes, one_in):
    cases = [list(enumerate(values)) for values in itertools.product(*map(range, sizes))]
    kept = sample(cases, one_in)
    assert {v for n in kept for v in cases[n]} == {v for case in cases for v in case}
    assert len(kept) <= max(sum(sizes), -(-len(cases) // one_in) + max(sizes))
    assert len(kept) * one_in >= len(cases)


def test_cases_without_values_are_spread_evenly():
    assert sample([()] * 10, 4) == {0, 4, 8}
    assert sample([()] * 3, 1) == {0, 1, 2}


SUITE = """
import pytest

@pytest.mark.sampled(4)
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(4))
def test_product(a, b):
    pass

@pytest.mark.deep
def test_deep():
    pass

@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("seed", range(8))
def test_seeds(seed):
    pass
"""


def collected(folder, *options):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest",
               "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), *options, str(folder)]  # fmt: skip
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return {line for line in done.stdout.splitlines() if "::" in line}


def test_tiers_and_shares_divide_a_suite(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    everything = collected(tmp_path)
    default, deep = (collected(tmp_path, "-m", m) for m in ("not deep", "deep"))
    assert len(everything) == 25 and default | deep == everything and not default & deep
    assert len(default) == 4 + 2
    shares = [collected(tmp_path, "-m", "deep", "--share", f"{k}/2") for k in (1, 2)]
    assert set.union(*shares) == deep and sum(map(len, shares)) == len(deep)
    assert max(map(len, shares)) < len(deep)
