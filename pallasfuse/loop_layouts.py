"""Layouts of loops' kernels that a clock has compared on a device: plans have the fastest from then on."""

import functools
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from pallasfuse._compat import Var
from pallasfuse.device import Device
from pallasfuse.environment import environment
from pallasfuse.errors import Refusal
from pallasfuse.executables import Executables, is_shortage
from pallasfuse.first_time import IMPORTS
from pallasfuse.loop_calls import LEFT_TO_XLA, KernelOfLoop, recurrence_p
from pallasfuse.measure import BUDGET_S, compare
from pallasfuse.parts import digest
from pallasfuse.store import Identity, Record, current
from pallasfuse.subjects import XLA


def winner_of(loop: KernelOfLoop, device: Device) -> str | None:
    """Returns the name of the layout that was the fastest for a loop, or `LEFT_TO_XLA`; None where nobody knows.

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


def measure(
    loop: KernelOfLoop, numbers: Device, device: Any, *, most: int, at_once: int, until: float | None = None
) -> Sequence[str]:
    """Compares the cheapest layouts of a loop with each other and with XLA's own loop, and notes what they take.

    Where no layout runs, nothing is settled. What fails for want of memory, or when it runs, is forgotten with the process: another
    time it may run.

    numbers: of the device, as plans have them. most: layouts. at_once: so many are compiled together, and race against XLA's loop
    and the best so far. until: no race begins after this time (`time.perf_counter`) but the first. Returns the layouts that were
    compared. To be called inside `isolation.apart`.
    """
    with IMPORTS:  # most programs have no loop that is a kernel
        from pallasfuse.recurrences import kernels_of

    found = kernels_of(loop.loop, numbers, shortest=1)
    kernels = {k.layout_name: k for k in (loop, *(() if isinstance(found, Refusal) else found))}
    waiting = iter(list(kernels)[:most])
    executables = Executables()
    timed, errors, passing = dict[str, tuple[float, float]](), dict[str, str](), dict[str, str]()
    best: str | None = None
    winner = XLA
    while field := list(itertools.islice(waiting, at_once)):
        if timed and until is not None and time.perf_counter() >= until:
            break
        names = field if best is None else [best, *field]
        functions = {XLA: loop.by_xla} | {n: functools.partial(recurrence_p.bind, of=kernels[n]) for n in names}
        measured = compare(
            functions, [v.aval for v in loop.loop.invars], device, budget_s=BUDGET_S * len(names),
            expected_us=loop.price.us, executables=executables,
        )  # fmt: skip
        took = measured.microseconds
        timed |= {n: (took[n], took[XLA]) for n in names if n in took}
        for name, error in measured.uncompiled.items():
            (passing if is_shortage(error) else errors)[name] = error
        passing |= {**measured.failed, **measured.too_large}
        ran = [n for n in names if n in took]
        if ran:
            winner = measured.winner
            best = winner if winner in ran else min(ran, key=took.__getitem__)
    if timed:
        ways = {n: _entry(kernels[n]) | {"us": ours, "xla_us": by_xla} for n, (ours, by_xla) in timed.items()}
        ways |= {n: _entry(kernels[n]) | {"error": error} for n, error in errors.items() if n in kernels}
        record = {"winner": LEFT_TO_XLA if winner == XLA else winner, "ways": ways}
        current().update(_identity(loop, numbers), lambda _: record)
    return [n for n in kernels if n in timed or n in errors or n in passing]


def _entry(kernel: KernelOfLoop) -> Record:
    """Returns what a record says of a layout before it is measured."""
    return {"schedule": kernel.layout_name, "target": kernel.target.name, "predicted_us": kernel.price.us}


def _identity(loop: KernelOfLoop, device: Device) -> Identity:
    own = loop.loop
    program = digest([v for v in own.invars if isinstance(v, Var)], [own], own.outvars)
    return {**environment(jax.devices()[0]), "of": "layouts of a loop", "loop": program, "for": device.kind}
