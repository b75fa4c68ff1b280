"""docs/checking.md says what is so: its blocks run, one after the other, with the check on."""

import os
import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "checking.md"


def test_blocks_run(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    environment = os.environ | {"PALLASFUSE_CHECK": "1", "PALLASFUSE_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        capture_output=True, text=True, check=False, timeout=300, cwd=DOCUMENT.parents[1], env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert "weights: tuned in" in result.stdout
