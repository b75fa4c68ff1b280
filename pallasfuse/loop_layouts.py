"""Layouts of loops' kernels that a clock has compared on a device: plans have the fastest from then on."""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from pallasfuse._compat import Var
from pallasfuse.device import Device
from pallasfuse.environment import environment
from pallasfuse.errors import Refusal
from pallasfuse.executables import Executables
from pallasfuse.first_time import IMPORTS
from pallasfuse.loop_calls import KernelOfLoop, recurrence_p
from pallasfuse.measure import BUDGET_S, compare
from pallasfuse.parts import digest
from pallasfuse.store import Identity, Record, current
from pallasfuse.subjects import XLA

_LOOP = ""
"""The winner of a record where no kernel is faster than XLA's own loop."""


def winner_of(loop: KernelOfLoop, device: Device) -> str | None:
    """Returns the layout that was the fastest for a loop (`KernelOfLoop.way`); empty where XLA's own loop was as fast, None where
    nobody knows.

    device: its numbers, as plans have them.
    """
    winner: str | None = known(loop, device).get("winner")
    return winner


def known(loop: KernelOfLoop, device: Device) -> Record:
    """Returns what is known about a loop's layouts: the `winner`, and of each of its `ways` what was predicted and measured."""
    return current().get(_identity(loop, device)) or {}


def distinct(loops: Iterable[KernelOfLoop], device: Device) -> list[KernelOfLoop]:
    """Returns one of equal loops."""
    return list({str(sorted(_identity(loop, device).items())): loop for loop in loops}.values())


def measure(loop: KernelOfLoop, numbers: Device, device: Any, most: int) -> Sequence[str]:
    """Compares the cheapest layouts of a loop with each other and with XLA's own loop, and notes what they take.

    Returns the ways that were compared. numbers: of the device, as plans have them. most: layouts. To be called inside
    `isolation.apart`.
    """
    with IMPORTS:  # most programs have no loop that is a kernel
        from pallasfuse.recurrences import kernels_of

    found = kernels_of(loop.loop, numbers, shortest=1)
    kernels = [loop] if isinstance(found, Refusal) else list(itertools.islice(found, most))
    by_way = {k.way: k for k in (loop, *kernels)}
    functions = {XLA: loop.by_xla} | {way: functools.partial(recurrence_p.bind, of=k) for way, k in by_way.items()}
    avals = [v.aval for v in loop.loop.invars]
    measured = compare(
        functions, avals, device, budget_s=BUDGET_S * len(by_way), expected_us=loop.price.us, executables=Executables()
    )
    if measured.skipped:
        return ()
    errors = {**measured.uncompiled, **measured.failed, **measured.too_large}
    ways = {
        way: {
            "schedule": way,
            "target": kernel.target.name,
            "predicted_us": kernel.price.us,
            "xla_us": measured.microseconds[XLA],
        }
        | ({"error": errors[way]} if way in errors else {"us": measured.microseconds[way]})
        for way, kernel in by_way.items()
        if way in errors or way in measured.microseconds
    }
    winner = _LOOP if measured.winner == XLA else measured.winner
    current().update(_identity(loop, numbers), lambda _: {"winner": winner, "ways": ways})
    return tuple(ways)


def _identity(loop: KernelOfLoop, device: Device) -> Identity:
    own = loop.loop
    program = digest([v for v in own.invars if isinstance(v, Var)], [own], own.outvars)
    return {**environment(jax.devices()[0]), "of": "layouts of a loop", "loop": program, "for": device.kind}
