"""The folder of records: what is written is found again, by anyone, and nothing else is taken for it."""

import json
import os
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from pallasfuse import store
from pallasfuse.store import Store

ROOT = Path(__file__).resolve().parents[1]
A, B = {"of": "part", "part": "a"}, {"of": "part", "part": "b"}


def put(where, identity, **content):
    return where.update(identity, lambda record: record | content)


def test_a_record_is_found_again(tmp_path):
    put(Store(tmp_path), A, x=1)
    again = Store(tmp_path)
    assert again.get(A) == {"x": 1}
    assert again.get(B) is None
    put(again, A, y=2)
    assert Store(tmp_path).get(A) == {"x": 1, "y": 2}
    assert list(Store(tmp_path).entries()) == [(A, {"x": 1, "y": 2})]


def test_what_another_process_writes_is_seen(tmp_path):
    ours, theirs = Store(tmp_path), Store(tmp_path)
    assert ours.get(A) is None
    put(theirs, A, x=1)
    assert ours.get(A) == {"x": 1}
    put(theirs, A, y=2)
    assert put(ours, A, z=3) == {"x": 1, "y": 2, "z": 3}


def test_a_change_may_stay_in_memory(tmp_path):
    ours = Store(tmp_path)
    ours.update(A, lambda _: {"x": 1}, on_disk=False)
    assert ours.get(A) == {"x": 1}
    assert Store(tmp_path).get(A) is None
    assert list(ours.entries()) == []


def files(folder):
    return list(folder.rglob("*.json"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\x80\x04K\x01.",
        b"[]",
        b"null",
        b'{"identity": {}}',
        b'{"identity": [], "record": {}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_one_warning_and_measured_again(tmp_path, content):
    for identity in (A, B):
        put(Store(tmp_path), identity, x=1)
    for file in files(tmp_path):
        file.write_bytes(content)
    again = Store(tmp_path)
    with pytest.warns(UserWarning, match=r"pallasfuse's cache: .* is damaged") as caught:
        assert again.get(A) is None
        assert again.get(B) is None
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        put(again, A, x=2)
        assert Store(tmp_path).get(A) == {"x": 2}


def test_a_file_of_something_else_is_no_answer(tmp_path):
    ours = Store(tmp_path)
    put(ours, A, x=1)
    (file,) = files(tmp_path)
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"identity": B}))
    with pytest.warns(UserWarning, match="not of what its name says"):
        assert Store(tmp_path).get(A) is None


def test_an_unwritable_folder_is_one_warning_and_memory_goes_on(tmp_path):
    (tmp_path / "file").write_text("")
    ours = Store(tmp_path / "file")  # nothing can be made below a file
    with pytest.warns(UserWarning, match="PALLASFUSE_CACHE_DIR names another folder") as caught:
        put(ours, A, x=1)
        put(ours, B, x=2)
    assert len(caught) == 1
    assert (ours.get(A), ours.get(B)) == ({"x": 1}, {"x": 2})


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.warns(UserWarning, match="cannot be written"):
        put(Store(tmp_path), A, x=1)


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path / "here"))
    put(store.current(), A, x=1)
    assert files(tmp_path / "here")
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path / "there"))
    assert store.current().get(A) is None


def test_without_it_it_is_the_users_cache_folder(monkeypatch):
    monkeypatch.delenv("PALLASFUSE_CACHE_DIR")
    assert "pallasfuse" in str(store.current().folder)


WRITER = """
import os, sys
from pathlib import Path
from pallasfuse.store import Store

ours = Store(Path(sys.argv[1]))
for n in range(100):
    ours.update({"of": "part", "part": "a"}, lambda record: record | {str(os.getpid()): n, "long": "x" * 20000})
"""


@pytest.mark.deep  # a long race; damaged files are read by the tests above
def test_processes_write_at_once_and_nobody_reads_half_a_file(tmp_path):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT) for _ in range(2)]
    deadline, read = time.monotonic() + 60, 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while any(w.poll() is None for w in writers) and time.monotonic() < deadline:
            found = Store(tmp_path).get(A)
            read += found is not None
            assert found is None or len(found["long"]) == 20000
            time.sleep(0.001)
    assert [w.wait(timeout=60) for w in writers] == [0, 0]
    assert read
    assert not list(tmp_path.rglob("*.tmp"))


def test_threads_change_one_record(tmp_path):
    ours = Store(tmp_path)
    threads = [threading.Thread(target=lambda n=n: put(ours, {"n": str(n % 3)}, **{str(n): n})) for n in range(24)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    found = [Store(tmp_path).get({"n": str(n)}) for n in range(3)]
    assert sorted(v for f in found for v in f.values()) == list(range(24))
