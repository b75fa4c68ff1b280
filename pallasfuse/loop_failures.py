"""Kernels of loops that do not run on a device: they are found, remembered, and their loops left to XLA from then on."""

import functools
import hashlib
from collections.abc import Iterable
from typing import Any

import jax

from pallasfuse.device import Device
from pallasfuse.environment import environment
from pallasfuse.executables import compiled, is_shortage
from pallasfuse.loop_calls import KernelOfLoop, recurrence_p
from pallasfuse.store import Identity, current


def fails(loop: KernelOfLoop, device: Device) -> bool:
    """Is the kernel of a loop known to fail on a device? device: its numbers, as plans have them."""
    return _known_error(loop, device) is not None


def _known_error(loop: KernelOfLoop, device: Device) -> str | None:
    """Returns the error by which the kernel of a loop is known to fail on a device; None where it is not."""
    error: str | None = (current().get(_identity(loop, device)) or {}).get("error")
    return error


def note_failure(loop: KernelOfLoop, device: Device, error: str, *, on_disk: bool = True) -> None:
    """Remember that the kernel of a loop fails. on_disk: False forgets it with the process."""
    current().update(_identity(loop, device), lambda _: {"error": error}, on_disk=on_disk)


def find_failing(loops: Iterable[KernelOfLoop], numbers: Device, device: Any) -> list[str]:
    """Compile the kernel of each loop alone, and note those that fail. Returns one line for each failure.

    Others may have noted some since these loops were planned. numbers: of the device, as plans have them. To be called inside
    `isolation.apart`.
    """
    found = dict[str, str]()
    for loop in loops:
        error = _known_error(loop, numbers)
        if error is None and repr(loop) not in found:
            avals = [v.aval for v in loop.loop.invars]
            made = compiled(functools.partial(recurrence_p.bind, of=loop), avals, device)
            if isinstance(made, str):
                error = made
                note_failure(loop, numbers, error, on_disk=not is_shortage(error))
        if error is not None:
            found[repr(loop)] = f"{words_for(loop)} does not run on {device.device_kind}: {error}; XLA's own is used"
    return list(found.values())


def words_for(loop: KernelOfLoop) -> str:
    """Names the kernel of a loop, with the line of the program that the loop comes from."""
    return f"{loop.kernel.name} (the loop at {loop.source})"


def _identity(loop: KernelOfLoop, device: Device) -> Identity:
    kernel = hashlib.sha256(repr(loop).encode()).hexdigest()[:32]
    return {**environment(jax.devices()[0]), "of": "the kernel of a loop", "kernel": kernel, "for": device.kind}
