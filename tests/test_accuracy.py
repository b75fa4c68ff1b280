"""docs/accuracy.md is current in form, its ratios are within the bound, and a cheap part of it is measured again."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_jax

ROOT = Path(__file__).resolve().parents[1]


def test_the_table_of_errors_is_current():
    check = [sys.executable, str(ROOT / "scripts" / "accuracy.py"), "--check"]
    done = subprocess.run(check, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
