"""Everything besides a program that its speed depends on, as strings: device, versions, flags."""

import hashlib
import os
import platform
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax


def environment(device: Any) -> dict[str, str]:
    """The identity of a device and of all that makes programs for it."""
    return {
        "device": _device(device),
        "driver": str(getattr(device.client, "platform_version", "")),
        **versions(),
        "flags": os.environ.get("XLA_FLAGS", ""),
    }


def versions() -> dict[str, str]:
    """The versions of everything that a plan depends on."""
    return {"jax": jax.__version__, "jaxlib": _jaxlib_version(), "pallasfuse": _own_version()}


@cache
def _device(device: Any) -> str:
    """The kind of a device; of a processor its name and how many cores this process may use."""
    if device.platform != "cpu":
        return f"{device.platform} {device.device_kind}"
    return f"cpu {_processor()}, {_cores()} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _jaxlib_version() -> str:
    import jaxlib.version

    return str(jaxlib.version.__version__)


@cache
def _own_version() -> str:
    """The version of this package, with a hash of its sources: in a checkout they change and the version does not."""
    try:
        named = version("pallasfuse")
    except PackageNotFoundError:
        named = "unknown"
    sources = hashlib.sha256()
    folder = os.path.dirname(__file__)
    for name, path in sorted(_sources(folder)):
        with open(path, "rb") as file:
            sources.update(name.encode() + b"\0" + file.read())
    return f"{named}+{sources.hexdigest()[:12]}"


def _sources(folder: str) -> Iterator[tuple[str, str]]:
    """Yields each file of the package below a folder, as its name there and its path.

    Text, not `Path` objects: with those, it takes as long as to read a plan that was kept.
    """
    for where, _, files in os.walk(folder):
        for file in files:
            if file.endswith((".py", ".json", ".toml")):
                path = os.path.join(where, file)
                yield path[len(folder) + 1 :], path
