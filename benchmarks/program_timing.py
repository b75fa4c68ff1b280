"""Times of compiled programs that take turns: on a GPU sums of kernel times (CUPTI), on a CPU wall times.

Noise comes in bursts, so programs are compared round by round: the ratio of two programs is the median, over the rounds, of the
ratios of their times in one round.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

Row = dict[str, Any]

MOST_ROUND_S = {"gpu": 0.4, "cpu": 0.1}
"""About how long one program may take in a round."""
MOST_CALLS = {"gpu": 4, "cpu": 20}
"""Calls in a round."""
MOST_ROUNDS = {"gpu": 3, "cpu": 7}
LEAST_ROUNDS = 3
ALL_ROUNDS_S = 3.0
"""About how long all rounds may take, unless there are the fewest."""
CLOSE = (0.9, 0.99)
"""A program whose ratio is between them gets as many rounds again: it may be noise, and the figures depend on it."""


@dataclass(slots=True)
class Samples:
    """Times of one program, in microseconds, by round."""

    rounds: list[list[float]] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    kernels: list[list[tuple[str, float]]] = field(default_factory=list)

    def row(self, *, names: bool) -> Row:
        """The median and the least time, the program's own time (to compare predictions with), and what was launched.

        names: with the name and the time of each kernel."""
        every = [us for r in self.rounds for us in r]
        if not every:
            return {}
        found: Row = {"us": statistics.median(every), "least_us": min(every), "rounds": len(self.rounds)}
        found["own_us"] = found["us"] if self.kernels else max(0.1 * min(every), min(every) - call_us())
        if self.kernels:
            found["wall_us"] = statistics.median(self.wall)
            found["launches"] = len(self.kernels[0])
        if self.untimed:  # what a call takes is known by the clock alone
            found |= {"untimed": self.untimed, "us": found["wall_us"], "least_us": min(self.wall)}
            del found["own_us"]
        if self.kernels and names:
            by_launch = zip(*self.kernels, strict=True)
            found["kernels"] = [[x[0][0], round(statistics.median(us for _, us in x), 3)] for x in by_launch]
        return found

    @property
    def untimed(self) -> int:
        """Counts the kernels of a call of which the profiler tells no time, as of some that start only in a branch."""
        return max((sum(us <= 0 for _, us in launches) for launches in self.kernels), default=0)

    def by_round(self, *, by_wall: bool = False) -> list[float]:
        """One time for each round: the least wall time, which no other process has disturbed, or the median of kernel times.

        by_wall: the wall time also where there are kernel times.
        """
        if by_wall and self.kernels:
            return self.wall
        return [statistics.median(r) if self.kernels else min(r) for r in self.rounds]


@functools.cache
def call_us() -> float:
    """Measures the microseconds that calling a program that does nothing takes on the host.

    That part of a CPU's wall times is not the program's own.
    """
    nothing = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), "float32")).compile()
    one, least = jax.numpy.zeros(()), math.inf
    for _ in range(200):
        start = time.perf_counter()
        jax.block_until_ready(nothing(one))
        least = min(least, 1e6 * (time.perf_counter() - start))
    return least


def ratio(first: Samples, second: Samples) -> float | None:
    """Returns how many times as long the first one takes, by the median round; by wall times where a kernel has no time."""
    by_wall = bool(first.untimed or second.untimed)
    both = zip(first.by_round(by_wall=by_wall), second.by_round(by_wall=by_wall), strict=False)
    rounds = [a / b for a, b in both if b > 0]
    return statistics.median(rounds) if rounds else None


@dataclass(slots=True)
class Contender:
    """A compiled program, its samples and result, or the reason why there are none."""

    call: Any
    reason: str = ""
    samples: Samples = field(default_factory=Samples)
    result: Any = None
    least_s: float = math.inf
    """The least seconds of a first call."""

    @property
    def runs(self) -> bool:
        return self.call is not None and not self.reason


def take_turns(
    contenders: Sequence[Contender], arguments: Sequence[Any], *, rounds: int | None = None, patient: bool = True
) -> None:
    """Fills the samples of contenders, which are called in turn, and their results.

    patient: more rounds where one is about as fast as the first one.
    """
    for contender in contenders:
        _attempt(contender, lambda c=contender: _warm_up(c, arguments))
    running = [c for c in contenders if c.runs]
    number = rounds or _rounds(running)
    _rounds_of(running, arguments, number)
    if patient and any(_is_close(contenders[0], c) for c in running[1:]):
        _rounds_of(running, arguments, number)


def _is_close(first: Contender, other: Contender) -> bool:
    found = ratio(first.samples, other.samples)
    return found is not None and CLOSE[0] < found < CLOSE[1]


def _rounds(running: Sequence[Contender]) -> int:
    if len(running) == 1:  # nothing to compare it with
        return LEAST_ROUNDS
    kind = _kind()
    once = sum(_calls(c, kind) * c.least_s for c in running)
    return max(LEAST_ROUNDS, min(MOST_ROUNDS[kind], int(ALL_ROUNDS_S / max(once, 1e-6))))


def _rounds_of(running: Sequence[Contender], arguments: Sequence[Any], number: int) -> None:
    for n in range(number):
        for contender in running if n % 2 == 0 else reversed(running):
            if contender.runs:
                _attempt(contender, lambda c=contender: _sample(c, arguments))


def _attempt(contender: Contender, step: Callable[[], None]) -> None:
    """A program that fails when it runs has a reason from then on, and no times."""
    if contender.runs:
        try:
            step()
        except Exception as failure:  # any program may fail in any way: the row says how
            contender.reason, contender.samples, contender.result = reason_of(failure), Samples(), None


def _warm_up(contender: Contender, arguments: Sequence[Any]) -> None:
    contender.result = jax.block_until_ready(contender.call(*arguments))
    start = time.perf_counter()
    jax.block_until_ready(contender.call(*arguments))
    contender.least_s = time.perf_counter() - start


def _kind() -> str:
    return "gpu" if jax.default_backend() == "gpu" else "cpu"


def _calls(contender: Contender, kind: str) -> int:
    return max(1, min(MOST_CALLS[kind], int(MOST_ROUND_S[kind] / max(contender.least_s, 1e-6))))


def _sample(contender: Contender, arguments: Sequence[Any]) -> None:
    """One round: several calls, as many as fit."""
    kind, call, samples = _kind(), contender.call, contender.samples
    calls, own = _calls(contender, kind), []
    if kind == "cpu":
        for _ in range(calls):
            start = time.perf_counter()
            jax.block_until_ready(call(*arguments))
            own.append(1e6 * (time.perf_counter() - start))
        samples.rounds.append(own)
        return
    for launches in kernel_times(call, arguments, calls):
        # a call whose launches differ from the first one's is not comparable launch by launch
        if not samples.kernels or [n for n, _ in launches] == [n for n, _ in samples.kernels[0]]:
            samples.kernels.append(launches)
        own.append(sum(us for _, us in launches))
    samples.rounds.append(own)
    start = time.perf_counter()
    jax.block_until_ready([call(*arguments) for _ in range(calls)])
    samples.wall.append(1e6 * (time.perf_counter() - start) / calls)


def kernel_times(call: Any, arguments: Sequence[Any], calls: int) -> list[list[tuple[str, float]]]:
    """Returns the kernels that each call launched, with their microseconds."""
    from jax.experimental.mosaic.gpu import profiler

    try:
        _, measured = profiler.measure(call, aggregate=False, iterations=calls)(*arguments)
        found = [measured] if calls == 1 else measured
    except RuntimeError as failure:
        if "kernel" not in str(failure).lower() or calls == 1:
            raise
        # the calls launch differently
        found = [profiler.measure(call, aggregate=False)(*arguments)[1] for _ in range(2)]
    return [[(name, 1e3 * ms) for name, ms in launches or []] for launches in found or []]


def reason_of(failure: BaseException) -> str:
    """The kind of an error and the beginning of its message, in one line."""
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
