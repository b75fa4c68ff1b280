"""docs/testing.md says what is so: its blocks run, one after the other, on four devices, and the tests that they define pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "testing.md"
SETUP = "import os\nos.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'\n"
TESTS = """
import unittest
for case in (BlockTest, TestBlock):
    print(*(test._testMethodName for test in unittest.defaultTestLoader.loadTestsFromTestCase(case)))
"""


def shape(line):
    """A line without its numbers, and what varies with the compiler."""
    return re.sub(r"-?[\d.]+(e-\d+)?|fused_\w+|\[.*?\]|\(xla.*", "#", line)


def test_blocks_run(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 8
    program = tmp_path / "model.py"  # kernels are called by their lines
    program.write_text(SETUP + "\n".join(blocks) + TESTS)
    result = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"PYTHONPATH": str(DOCUMENT.parents[1])},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    *printed, block_test, test_block = result.stdout.splitlines()
    (shown,) = re.findall(r"^```text\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert [shape(line) for line in shown.splitlines()[:4]] == [shape(line) for line in printed[:4]]
    assert len(block_test.split()) == 4
    assert set(test_block.split()) == {"test_with_jit", "test_grad", "test_sharded", "test_proof"}
