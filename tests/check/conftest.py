"""Every test of the check has a store of its own; `clock` makes times up."""

import pytest

from pallasfuse import loop_check, written_out
from tests.check.clock import Clock, timed_by


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PALLASFUSE_CHECK", "1")


@pytest.fixture
def clock(monkeypatch):
    def install(*speedups, **more):
        made = Clock(*speedups, **more)
        timed_by(monkeypatch, made)
        monkeypatch.setattr(loop_check, "compare", made)
        monkeypatch.setattr(written_out, "compare", made)
        return made

    return install
