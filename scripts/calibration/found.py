"""The results of measurements: numbers of a device, each with how it was measured, or why it was not."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Found:
    """A number of a device (a field of `pallasfuse.device.Device`) and how it was measured."""

    field: str
    value: Any
    how: str


@dataclass(frozen=True, slots=True)
class Missing:
    """A measurement that failed, or for which there was no time."""

    name: str
    reason: str


Measurement = Callable[[Mapping[str, Any]], Iterable[Found]]
"""Measures some fields; sees those that were measured before."""


def measure(
    steps: Iterable[Measurement], *, seconds: float, seen: Callable[[str, float], None] = lambda *_: None
) -> tuple[list[Found], list[Missing]]:
    """The results of measurements, one after the other, begun within so many seconds. A failure leaves the others alone.

    seen: told the name of each when it is over, and how many seconds it took.
    """
    found: list[Found] = []
    missing: list[Missing] = []
    begin = time.monotonic()
    for step in steps:
        name = getattr(step, "__name__", "measurement")
        if time.monotonic() - begin > seconds:
            missing.append(Missing(name, "no time was left"))
            continue
        start = time.monotonic()
        try:
            found += step({f.field: f.value for f in found})
        except Exception as failure:  # a compiler or a driver may fail in any way: the old number stays
            missing.append(Missing(name, f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"))
        seen(name, time.monotonic() - start)
    return found, missing


def named(step: Measurement, name: str) -> Measurement:
    """The measurement under a name, for messages."""
    step.__name__ = name  # type: ignore[attr-defined]
    return step
