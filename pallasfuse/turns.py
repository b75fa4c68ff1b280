"""Processes of one machine take turns to measure on a device: two that measured at the same time would slow each other down."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

LONGEST_S = 10.0
"""A process waits so long for the others, in seconds, and then measures beside them: a busy machine must not stop a program."""


@contextlib.contextmanager
def turn(device: Any, *, longest_s: float = LONGEST_S) -> Iterator[bool]:
    """Holds a device for measurements, and yields whether it is free of those of the user's other processes.

    Where the lock cannot be had, because of its folder or because others take longer than `longest_s`, nothing is held.
    """
    try:
        lock = _lock(device)
        lock.acquire(timeout=longest_s, poll_interval=0.01)
    except (filelock.Timeout, OSError, NotImplementedError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _lock(device: Any) -> filelock.BaseFileLock:
    """Returns the lock of a device. Processes that number their devices in another way have other locks."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    visible = "" if device.platform == "cpu" else f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}-{device.id}"
    folder = Path(tempfile.gettempdir()) / f"pallasfuse-{user}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
    return filelock.FileLock(folder / (re.sub(r"[^\w-]+", "_", f"{device.platform}-{visible}") + ".lock"))
