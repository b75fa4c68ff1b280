"""Results that are kept name no folders of the machine that made them."""

import re

import pytest

from benchmarks.program_measurement import FOLDER

RESULTS = sorted((FOLDER / "benchmarks" / "results").glob("*.json"))
_ABSOLUTE = re.compile(r"(?<![\w.])/(?:home|root|tmp|usr|opt|var|mnt|work)/")


def test_there_are_some():
    assert len(RESULTS) > 20


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_they_name_no_folders_of_a_machine(path):
    found = _ABSOLUTE.search(path.read_text())
    assert found is None, path.read_text()[max(0, found.start() - 60) : found.end() + 60]
