"""Sharded arrays under `jax.jit`: the partitioner runs a fused kernel piece by piece, and gathers states at most."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("devices", [4, 8])
def test_on_devices(devices):
    result = subprocess.run(
        [sys.executable, "-m", "tests.sharding.on_devices", str(devices)],
        capture_output=True, text=True, check=False, timeout=600, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines()[-1] == "ok"
