"""Programs against each other on a device: compiled, run on drawn arguments, and timed in turns."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax

from pallasfuse import _compat, samples, timing, turns
from pallasfuse.executables import Executables, Function, Request, summary
from pallasfuse.price.scattered import SKEW

BUDGET_S = 0.25
"""The seconds that the timed calls of one comparison may take together, or twice that if they are few."""
MORE_FOR_CALLS_S = 1.0
"""The seconds that the comparison of a whole call gets beyond that, while its kernels, those of its loops, or another form of it
seem to win: this decides on all of them."""
_REPEATS = 32
"""Trips of the loop in which programs are measured that are too short to be sent off one by one."""
_SHORT_S = 100e-6
_EVEN_KERNELS = 1.05
"""Times of kernels that differ by less do not tell which program is faster."""
_CONFIRMED_S = 5e-3
"""Programs that take less must win in the time of their kernels alone, too: to start a call may take 100 microseconds."""
_STARTS_S = 100e-6
"""Parts that take so much longer by the clock are not asked for the time of their kernels: starts do not take that."""
_SURELY_S = 10 * _STARTS_S
"""A program that is faster by more than this by the clock is faster, whatever its kernels take: no start of a call explains it. And
of thousands of kernels some may be lost where they are counted."""
_NOISE_OF_STARTS_S = 5e-6
"""By so much the starts of one call differ from process to process, and with what else the machine does."""
_LOOKS = 3
"""Samples of the clock of each part whose kernels are timed: the least of them tells what takes much longer than its kernels."""
_KERNEL_TURNS, _KERNEL_CALLS = 3, 10
"""Turns after a first one that does not count, and calls in each, by which the kernels of such programs are compared."""
_KERNEL_SAMPLES = 20
"""So many samples of each program are needed, by more turns where a turn gives one: fewer tell only what is far apart."""
_LITTLE_BYTES, _PARTS_OF_FREE = 64 << 20, 256
"""Nobody minds a program that takes so much more memory than another, however little that is; nor where that is less than one of so
many parts of the memory that is free (a judgement)."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a comparison: how long programs take, and which of them are faster than the first one.

    `microseconds`: the median time of one call of those that ran. `faster`: those that are clearly faster than the first program;
    `winner`: the fastest of them, or the first. `uncompiled` and `failed`: errors of those that did not compile, or failed when
    they ran. `too_large`: how much memory those take that were not run for that; `larger`: those that take more and were run.
    `skipped`: why nothing was timed. `seconds`: what it took, compilation included, without waiting for other processes.
    `kernels`: of short programs on a GPU that won or tied by the clock, and of short parts that lost, the microseconds of their
    kernels alone: they are `faster` only if they are so in that, too. Empty where that was not measured. Of the shortest parts
    these are the `microseconds`, too, where all were timed so.
    """

    microseconds: Mapping[str, float] = field(default_factory=dict)
    winner: str = ""
    faster: frozenset[str] = frozenset()
    uncompiled: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    skipped: str = ""
    seconds: float = 0.0
    kernels: Mapping[str, float] = field(default_factory=dict)
    too_large: Mapping[str, str] = field(default_factory=dict)
    larger: frozenset[str] = frozenset()


def compare(
    functions: Mapping[str, Function],
    avals: Sequence[Any],
    device: Any,
    *,
    budget_s: float,
    more_s: float = 0.0,
    expected_us: float | None = None,
    executables: Executables | None = None,
    parts: bool = False,
    most_memory: float = math.inf,
    runs_up_to: float | None = None,
    below: Sequence[int | tuple[int, ...] | None] = (),
) -> Measured:
    """Time functions of the same arguments on a device. The first is the one to beat. To be called inside `isolation.apart`.

    budget_s, more_s: as of `timing.race`; compilation comes on top. expected_us: about what a call takes, where that is known: a
    short program is compiled only as it is measured. executables: what is compiled already, to which is added what is not. parts:
    the functions are parts of a larger program, which hides the starts of kernels: between short ones the time of their kernels
    decides, unless the clock is against one by more than starts take, and no other time is taken where it takes longer to send a
    call off. Between other short programs it decides where the clock is against one by no more than starts differ from process to
    process. most_memory: programs that take so many times as much memory as the first one are not run, unless it is little more.
    runs_up_to: those that take up to so many times as much are run, and are `larger`. below: as of `samples.drawn`.
    """
    start = time.perf_counter()
    times = _times(device, expected_us, parts=parts)
    compiled = partial(_compiled, avals=avals, device=device, executables=executables or Executables())
    programs = compiled(functions, times)
    uncompiled = {n: p for n, p in programs.items() if isinstance(p, str)}
    little = max(_LITTLE_BYTES, (samples.free_bytes(device) or 0) // _PARTS_OF_FREE)
    too_large = _too_large(programs, most_memory if runs_up_to is None else runs_up_to, little)
    larger = frozenset(_too_large(programs, most_memory, little)).difference(too_large)
    usable = {n: p for n, p in programs.items() if n not in uncompiled and n not in too_large}
    failed: dict[str, str] = {}
    race = partial(timing.race, budget_s=budget_s, more_s=more_s)
    waiting = time.perf_counter()
    with turns.turn(device):
        start += time.perf_counter() - waiting
        draw = partial(samples.drawn, avals, device, below, skew=SKEW)
        found = _timed(functions, usable, times, draw, device, race, failed, compiled, parts=parts)
    seconds = time.perf_counter() - start
    if isinstance(found, str):
        return Measured(
            uncompiled=uncompiled, failed=failed, too_large=too_large, skipped=found, seconds=seconds
        )  # fmt: skip
    outcome, kernels = found
    microseconds = {n: 1e6 * s for n, s in outcome.seconds.items()}
    return Measured(
        microseconds, outcome.winner, outcome.faster, uncompiled, failed, "", seconds, kernels, too_large, larger
    )


def requests(
    functions: Mapping[str, Function], avals: Sequence[Any], device: Any, *, expected_us: float | None = None,
    parts: bool = False,
) -> list[Request]:  # fmt: skip
    """Returns what `compare` is going to ask for, to be compiled ahead of it, beside that of other comparisons."""
    counts = {_times(device, expected_us, parts=parts), 1}
    return [Request(f, avals, times) for times in counts for f in functions.values()]


def _times(device: Any, expected_us: float | None, *, parts: bool) -> int:
    """Returns how often a program runs what is measured: a short one of an accelerator takes less than it takes to send it off.

    A program that is compared by the times of its kernels alone, as parts of calls are, runs it once.
    """
    is_short = not parts and (expected_us or math.inf) < 1e6 * _SHORT_S
    return _REPEATS if _is_accelerator(device) and is_short else 1


def _compiled(
    functions: Mapping[str, Function], times: int, *, avals: Sequence[Any], device: Any, executables: Executables
) -> dict[str, Any]:
    """Programs that run each function so many times, or the errors of those that do not compile."""
    made = executables.of([Request(f, avals, times) for f in functions.values()], device)
    return dict(zip(functions, made, strict=True))


def _too_large(programs: Mapping[str, Any], most: float, little: int) -> dict[str, str]:
    """Returns how much memory those programs take that take more than `most` times as much as the first, and more than a little."""
    first = next(iter(programs.values()))
    if isinstance(first, str) or most == math.inf:
        return {}
    needed_by_first = samples.needed_bytes(first)
    bound = max(most * needed_by_first, needed_by_first + little)
    needed = {n: samples.needed_bytes(p) for n, p in programs.items() if not isinstance(p, str)}
    return {
        name: f"it takes {of / 2**20:.0f} MiB of memory, more than {bound / 2**20:.0f}"
        for name, of in needed.items()
        if of > bound
    }


def _is_accelerator(device: Any) -> bool:
    """Does a program run there while the host goes on? Then it may take less than it takes to send it off."""
    return bool(device.platform != "cpu")


def _timed(
    functions: Mapping[str, Function], programs: Mapping[str, Any], times: int, draw: Callable[[], list[jax.Array]], device: Any,
    race: Callable[[Mapping[str, timing.Sampler]], timing.Outcome], failed: dict[str, str],
    compiled: Callable[[Mapping[str, Function], int], dict[str, Any]], *, parts: bool,
) -> tuple[timing.Outcome, dict[str, float]] | str:  # fmt: skip
    """The race of programs that compiled, or why there was none; and where it is known, what kernels of those take that may win.

    Those that fail when they run are noted in `failed`.
    """
    reference = next(iter(functions))
    if reference not in programs:
        return f"{reference} does not compile"
    if len(programs) == 1:
        return "nothing else compiles"
    short_of = samples.room_for(list(programs.values()), device)
    if short_of is not None:
        return short_of
    try:
        arguments = draw()
        jax.block_until_ready(arguments)
    except Exception as error:
        return f"no arguments could be drawn ({summary(error)})"
    samplers = _samplers(programs, arguments, device, times, failed)
    if reference not in samplers or len(samplers) == 1:
        return next(iter(failed.values()))
    is_short = (
        times == 1 and _is_accelerator(device) and min(t / n for t, n in (s() for s in samplers.values())) < _SHORT_S
    )
    if is_short and parts and (decided := _by_kernels(samplers, programs, arguments)) is not None:
        return decided
    if is_short:
        longer = compiled({n: functions[n] for n in samplers}, _REPEATS)
        if not any(isinstance(p, str) for p in longer.values()):
            lasting = _samplers(longer, arguments, device, _REPEATS, {})
            samplers = lasting if len(lasting) == len(samplers) else samplers
    outcome = race(samplers)
    ahead = outcome.faster
    if outcome.seconds[reference] < _CONFIRMED_S:  # starts of kernels may hide what the kernels take
        most = outcome.seconds[reference] + (_STARTS_S if parts else _NOISE_OF_STARTS_S)
        ahead |= outcome.tied | {n for n, s in outcome.seconds.items() if n != reference and s < most}
    fastest_s = outcome.seconds[outcome.winner]
    gained_s = 0.0 if parts else outcome.seconds[reference] - fastest_s
    is_sure = fastest_s >= _CONFIRMED_S or gained_s > _SURELY_S
    if not ahead or not _is_accelerator(device) or is_sure:
        return outcome, {}
    left = {n: f for n, f in functions.items() if n == reference or n in ahead}
    single = {n: programs[n] for n in left} if times == 1 else compiled(left, 1)
    return _confirmed(outcome, single, arguments)


def _by_kernels(
    samplers: Mapping[str, timing.Sampled], programs: Mapping[str, Any], arguments: Sequence[Any]
) -> tuple[timing.Outcome, dict[str, float]] | None:
    """Decides about short parts by the time of their kernels alone; None where that is not known. The first is the one to beat.

    Those that the clock is against by more than starts take have lost: something else than kernels takes long.
    """
    reference = next(iter(samplers))
    least_s = {n: min(t / calls for t, calls in (s() for _ in range(_LOOKS))) for n, s in samplers.items()}
    by_clock = timing.Outcome(least_s, reference, frozenset(), _LOOKS)
    left = {n: programs[n] for n, s in least_s.items() if s < least_s[reference] + _STARTS_S}
    if len(left) == 1:
        return by_clock, {}
    outcome, kernels = _confirmed(by_clock, left, arguments)
    if not kernels:
        return None
    # the clock sees no difference between calls that take less than to send them off
    winner = min(outcome.faster, key=kernels.__getitem__, default=reference)
    seconds = {n: 1e-6 * us for n, us in kernels.items()} if kernels.keys() == least_s.keys() else least_s
    return replace(outcome, winner=winner, seconds=seconds), kernels


def _confirmed(
    outcome: timing.Outcome, programs: Mapping[str, Any], arguments: Sequence[Any]
) -> tuple[timing.Outcome, dict[str, float]]:
    """A race's outcome, in which those have won whose kernels alone are faster, too, and the microseconds that kernels take. The
    first program is the one to beat. Where it is not known what kernels take, the outcome is as it was. Of those
    whose kernels are about the fastest, the clock decides: a little less in kernels does not outweigh much more by the clock.

    A short program in a loop pays for the start of every kernel; in a larger program, starts are hidden behind other work. Hence
    one that has tied by the clock may win here, too, and a part also one that has lost.
    """
    reference, *ahead = programs
    if any(isinstance(p, str) for p in programs.values()):  # it did not compile
        return outcome, {}
    taken: dict[str, list[float]] = {n: [] for n in programs}
    turn = 0
    while turn <= _KERNEL_TURNS or min(map(len, taken.values())) < _KERNEL_SAMPLES:
        for name in programs if turn % 2 == 0 else reversed(list(programs)):
            found = _compat.kernel_seconds(programs[name], arguments, _KERNEL_CALLS)
            if not found:
                return outcome, {}
            taken[name] += found if turn else []  # after a pause the device's clock is higher, for whoever comes first
        turn += 1
    faster = frozenset(n for n in ahead if timing.is_ahead(taken[n], taken[reference]))
    kernels = {n: 1e6 * statistics.median(s) for n, s in taken.items()}
    least = _EVEN_KERNELS * min((kernels[n] for n in faster), default=0.0)
    winner = min((n for n in faster if kernels[n] <= least), key=outcome.seconds.__getitem__, default=reference)
    return replace(outcome, winner=winner, faster=faster), kernels


def _samplers(
    programs: Mapping[str, Any], arguments: Sequence[Any], device: Any, times: int, failed: dict[str, str]
) -> dict[str, timing.Sampled]:
    """Runs each program once to warm it up, and returns its sampler by name. Notes those that fail in `failed`."""
    found: dict[str, timing.Sampled] = {}
    for name, program in programs.items():
        try:
            in_flight = _is_accelerator(device)
            found[name] = timing.Sampled(partial(program, *arguments), in_flight, times)
        except Exception as error:
            failed[name] = summary(error)
    timing.alike(found.values())
    return found
