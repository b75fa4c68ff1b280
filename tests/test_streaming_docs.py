"""docs/streaming.md says what is so: its blocks run, one after the other, on one device and on four."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "streaming.md"


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.deep), 4])
def test_blocks_run(devices):
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 8
    setup = f"import os\nos.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count={devices}'\n"
    result = subprocess.run(
        [sys.executable, "-c", setup + "\n".join(blocks)],
        capture_output=True, text=True, check=False, timeout=300, cwd=DOCUMENT.parents[1],
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
