"""Programs against each other on a device: compiled, run on drawn arguments, and timed in turns."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from pallasfuse import samples, timing
from pallasfuse.isolation import together

Function = Callable[..., Any]

_REPEATS = 32
"""Trips of the loop in which programs are measured that are too short to be sent off one by one."""
_SHORT_S = 100e-6
_OUT_OF_MEMORY = ("out of memory", "failed to allocate")


@dataclass(frozen=True, slots=True)
class Measured:
    """How programs compare.

    `microseconds`: the median time of one call of those that ran. `winner`: the one that is clearly faster than the first program,
    or the first. `uncompiled` and `failed`: errors of those that did not compile, or failed when they ran. `skipped`: why nothing
    was timed. `seconds`: what it took, compilation included.
    """

    microseconds: Mapping[str, float] = field(default_factory=dict)
    winner: str = ""
    uncompiled: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    skipped: str = ""
    seconds: float = 0.0


def compare(functions: Mapping[str, Function], avals: Sequence[Any], device: Any, *, budget_s: float) -> Measured:
    """Time functions of the same arguments on a device. The first is the one to beat.

    budget_s: of all timed calls together; compilation comes on top. To be called inside `isolation.apart`.
    """
    start = time.perf_counter()
    programs = together({n: partial(compiled, f, avals, device) for n, f in functions.items()}, device)
    uncompiled = {n: p for n, p in programs.items() if isinstance(p, str)}
    usable = {n: p for n, p in programs.items() if not isinstance(p, str)}
    failed: dict[str, str] = {}
    found = _timed(functions, usable, avals, device, budget_s, failed)
    seconds = time.perf_counter() - start
    if isinstance(found, str):
        return Measured(uncompiled=uncompiled, failed=failed, skipped=found, seconds=seconds)
    microseconds = {n: 1e6 * s for n, s in found.seconds.items()}
    return Measured(microseconds, found.winner, uncompiled, failed, "", seconds)


def compiled(function: Function, avals: Sequence[Any], device: Any) -> Any:
    """`function` compiled for a device, or the error that this ended with."""
    where = jax.sharding.SingleDeviceSharding(device)
    try:
        given = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where) for a in avals]
        return jax.jit(function).lower(*given).compile()
    except Exception as error:  # whatever a lowering or a compiler raises
        return summary(error)


def summary(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def _timed(
    functions: Mapping[str, Function], programs: Mapping[str, Any], avals: Sequence[Any], device: Any, budget_s: float,
    failed: dict[str, str],
) -> timing.Outcome | str:  # fmt: skip
    """The race of programs that compiled, or why there was none. Those that fail when they run are noted in `failed`."""
    reference = next(iter(functions))
    if reference not in programs:
        return f"{reference} does not compile"
    if len(programs) == 1:
        return "nothing else compiles"
    short_of = samples.room_for(list(programs.values()), device)
    if short_of is not None:
        return short_of
    try:
        arguments = samples.drawn(avals, device)
        jax.block_until_ready(arguments)
    except Exception as error:
        return f"no arguments could be drawn ({summary(error)})"
    samplers = _samplers(programs, arguments, device, 1, failed)
    if reference not in samplers or len(samplers) == 1:
        return next(iter(failed.values()))
    if (
        device.platform != "cpu"
        and min(seconds / calls for seconds, calls in (s() for s in samplers.values())) < _SHORT_S
    ):
        looped = {n: timing.repeated(functions[n], _REPEATS) for n in samplers}
        longer = together({n: partial(compiled, f, avals, device) for n, f in looped.items()}, device)
        if not any(isinstance(p, str) for p in longer.values()):
            lasting = _samplers(longer, arguments, device, _REPEATS, {})
            samplers = lasting if len(lasting) == len(samplers) else samplers
    return timing.race(samplers, budget_s=budget_s)


def _samplers(
    programs: Mapping[str, Any], arguments: Sequence[Any], device: Any, times: int, failed: dict[str, str]
) -> dict[str, timing.Sampler]:
    """What runs each program, warmed up."""
    found: dict[str, timing.Sampler] = {}
    for name, program in programs.items():
        try:
            in_flight = device.platform != "cpu"
            found[name] = timing.sampler(partial(program, *arguments), in_flight=in_flight, times=times)
        except Exception as error:
            failed[name] = summary(error)
    return found


def is_shortage(error: str) -> bool:
    """Does an error of a running program say that there was no memory? It may run another time."""
    return any(sign in error.lower() for sign in _OUT_OF_MEMORY)
