"""Processes of one machine take turns to measure."""

import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest

from pallasfuse import turns

GPU = SimpleNamespace(platform="gpu", id=0)

HOLDER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from types import SimpleNamespace
from pallasfuse import turns
with turns.turn(SimpleNamespace(platform=sys.argv[2], id=int(sys.argv[3]))) as held:
    print(held, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    return tmp_path


@pytest.fixture
def holder(folder):
    """Starts a process that holds a device until it is told to end."""
    started = []

    def start(platform="gpu", number=0):
        command = [sys.executable, "-c", HOLDER, str(folder), platform, str(number)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "True\n"
        return process

    yield start
    for process in started:
        process.communicate()


def test_a_process_waits_until_the_other_one_has_measured(holder):
    other = holder()
    with turns.turn(GPU, longest_s=0.05) as held:
        assert not held
    other.communicate()
    with turns.turn(GPU, longest_s=0.05) as held:
        assert held


def test_what_others_measure_too_long_is_not_waited_for(holder):
    holder()
    start = time.perf_counter()
    with turns.turn(GPU, longest_s=0.1) as held:
        assert not held
    assert 0.1 <= time.perf_counter() - start < 5.0


def test_other_devices_are_free(holder):
    holder()
    for device in (SimpleNamespace(platform="gpu", id=1), SimpleNamespace(platform="cpu", id=0)):
        with turns.turn(device, longest_s=0.05) as held:
            assert held


def test_a_process_that_is_killed_holds_nothing(holder):
    holder().kill()
    with turns.turn(GPU, longest_s=5.0) as held:
        assert held


def test_without_a_folder_for_locks_nothing_is_held(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with turns.turn(GPU) as held:
        assert not held


def test_without_a_temporary_folder_nothing_is_held(monkeypatch):
    def missing():
        raise FileNotFoundError("no usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", missing)
    with turns.turn(GPU) as held:
        assert not held
