"""Chooses how many warps run a block of a kernel that Triton compiles, by the price of each number."""

from collections.abc import Sequence
from dataclasses import replace

from pallasfuse.decisions import Phase
from pallasfuse.ir.tile_program import Contract, Loop, every
from pallasfuse.pallas_backend import kernel_resources
from pallasfuse.phases import too_large, us_of
from pallasfuse.resources import triton
from pallasfuse.resources.as_threads import as_threads_run_it
from pallasfuse.resources.block import Resources

_COUNTS = (1, 2, 4, 8, 16)
_CLEARLY = 0.95
"""Other warps than those of the schedule are to take less than so much of its price.

Of 178 kernels of whole programs, measured with each number of warps on an H100, 18 change by that: to 0.81 of their time in the
geometric mean, and to 1.06 times at most.
"""
_MOST_SPILLED_BYTES = 2048
"""A thread that spills more is slower than its price says, which counts the bytes that are written and read.

The median of 42 of these kernels with such an estimate took 2.6 times as long as with the next number of warps that spills nothing
(at most 33 times); that of 26 with a smaller one took 1.1 times as long (at most 2.6 times).
"""
_MOST_REGISTERS = 224
"""Threads of fewer warps than the schedule has should not need more registers: too few warps live on a multiprocessor then to
hide each other's loads, which no price says. For the same reason blocks with a loop keep the warps that they have, or get
more: with one or two, rows of 32 and 128 K elements took up to 1.4 times as long, although they were to be faster."""


def with_warps_by_price(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """Returns the phases with the warps that the price likes best, each on its own.

    Blocks with products on matrix units stay as they are: what their warps share is laid out by the schedule. Products that are
    written out, as those of a few coordinates, are sums like others.
    """
    return tuple(_with_warps_by_price(phase) for phase in phases)


def _with_warps_by_price(phase: Phase) -> Phase:
    if not kernel_resources.is_of_triton(phase.target) or any(
        isinstance(s, Contract) for s in every(as_threads_run_it(phase.program).program.body)
    ):
        return phase
    own = phase.program.warps
    others = [replace(phase, program=replace(phase.program, warps=n)) for n in _COUNTS if n != own]
    prices_us = {other.program.warps: us_of((other,)) for other in others if _fits(other, own)}
    if not prices_us:
        return phase
    best = min(prices_us, key=prices_us.__getitem__)
    spills = spilled_bytes(phase) > _MOST_SPILLED_BYTES
    clearly = spills or prices_us[best] < _CLEARLY * us_of((phase,))
    return next(other for other in others if other.program.warps == best) if clearly else phase


def _fits(phase: Phase, own: int) -> bool:
    """Are the registers enough? own: the warps of the schedule."""
    held = _held(phase)
    if phase.program.warps < own and (
        held.registers > _MOST_REGISTERS or any(isinstance(s, Loop) for s in phase.program.body)
    ):
        return False
    return held.spilled_bytes <= _MOST_SPILLED_BYTES and too_large(phase) is None


def spilled_bytes(phase: Phase) -> int:
    """Returns the bytes that each thread of a kernel of Triton's spills, by an estimate; 0 for other kernels."""
    return _held(phase).spilled_bytes if kernel_resources.is_of_triton(phase.target) else 0


def _held(phase: Phase) -> Resources:
    """Returns an estimate of the registers and the memory that a block takes, and of what its threads spill."""
    return triton.resources(as_threads_run_it(phase.program).program, phase.target)
