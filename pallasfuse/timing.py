"""Finds the fastest of several programs on a device, by a clock that does not trust one measurement.

Contenders take turns, so that whatever slows the machine down slows all of them alike. One is faster than another when the ranks of
their samples say so (Mann and Whitney's test), which assumes nothing about noise. The race ends as soon as it is decided, or when
its time is over. Long calls give few samples, too few for ranks where one of them was disturbed: then what is far apart in nearly
every round is a difference, too. Without a decision nobody has beaten the first contender.
"""

import math
import statistics
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

Sampler = Callable[[], tuple[float, int]]
"""Runs a program some times and returns what that took, in seconds, and how many times it was."""

LEAST_GAIN = 1.02
"""A contender beats another when it is faster by more than this: what cannot be told apart is no gain."""
_STANDARD_ERRORS = 2.8
"""So far from chance must the ranks be: one time in 400 (one-sided), with some to spare for looking more than once."""
_FEW_ROUNDS = {1: 1.5, 2: 1.3, 3: 1.2, 4: 1.15, 5: 1.1}
"""Below the fewest rounds of the test: how far apart the slowest sample of one and the fastest of the other must be."""
_FIRST_LOOK = 3
"""No race is decided in fewer rounds, unless its time is over; from there on it is looked at less and less often."""
_MOST_ROUNDS = 200
_ENOUGH_ROUNDS = 10
"""A race with fewer may take twice the time, if it is not decided before."""
_FOR_FEW = 10.0
"""Calls that are so long that there are fewer rounds than the test needs may take so many times the time that others get beyond
theirs."""
_ROUNDS_AHEAD = {3: 1.5, 4: 1.3, 5: 1.15}
"""When the time is over: by how many rounds more one contender must lead than the other, and how far apart the rounds' medians must
then be. Leads of more than five rounds count as of five."""
_MOST_LOST = 0.2
"""The share of all rounds that one may lose which is nevertheless ahead in nearly every one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a race: the times of all contenders, and who has won.

    `seconds`: the median of what a call of each contender took. `faster`: those that beat the first contender clearly; `winner`:
    the fastest of them, or the first contender. `rounds`: turns that every contender had which stayed. `tied`: those that
    are neither clearly faster nor clearly slower than the first contender.
    """

    seconds: Mapping[str, float]
    winner: str
    faster: frozenset[str]
    rounds: int
    tied: frozenset[str] = frozenset()


def race(contenders: Mapping[str, Sampler], *, budget_s: float, more_s: float = 0.0) -> Outcome:
    """Let contenders run in turns. The first is the one to beat: ties are its own.

    budget_s: what all measured calls together may take, or twice that for the first few rounds; every contender runs at least once.
    more_s: what they may take beyond that while another contender has the lower median; ten times that for the first six rounds.
    """
    names = list(contenders)
    reference = names[0]
    samples: dict[str, list[float]] = {n: [] for n in names}
    running, spent, rounds = list(names), 0.0, 0
    look = _FIRST_LOOK
    while not rounds or (
        len(running) > 1 and rounds < _MOST_ROUNDS and _has_time(spent, rounds, budget_s, more_s, samples, reference)
    ):
        for name in running if rounds % 2 == 0 else reversed(running):
            seconds, calls = contenders[name]()
            samples[name].append(seconds / calls)
            spent += seconds
        rounds += 1
        if rounds >= look:
            running, look = (
                _remaining(running, samples, reference, late=more_s > 0 and spent >= budget_s),
                rounds + 1 + rounds // 4,
            )
    medians = {n: statistics.median(samples[n]) for n in names}
    ahead = [n for n in names if n != reference and is_ahead(samples[n], samples[reference])]
    tied = {n for n in names if n != reference and n not in ahead and not _faster(samples[reference], samples[n], 1.0)}
    winner = min(ahead, key=medians.__getitem__, default=reference)
    return Outcome(medians, winner, frozenset(ahead), rounds, frozenset(tied))


def is_ahead(one: Sequence[float], other: Sequence[float]) -> bool:
    """Is `one` faster by more than the least gain, when no more samples are to come? They were taken in turns."""
    return _faster(one, other, LEAST_GAIN) or _leads(one, other, LEAST_GAIN)


def _has_time(
    spent: float, rounds: int, budget_s: float, more_s: float, samples: Mapping[str, Sequence[float]], reference: str
) -> bool:
    """Is there time for another round? A little more where there were few, and the next one does not exceed it.

    Programs that may take more time take it while one of them is promising, and long ones at least the fewest rounds of the test.
    """
    if spent < budget_s:
        return True
    needed = spent * (rounds + 1) / rounds
    if rounds < _ENOUGH_ROUNDS and needed <= 2 * budget_s:
        return True
    most_s = _FOR_FEW * more_s if rounds <= max(_FEW_ROUNDS) else more_s
    return more_s > 0 and needed <= 2 * budget_s + most_s and _is_promising(samples, reference)


def _is_promising(samples: Mapping[str, Sequence[float]], reference: str) -> bool:
    """Does a contender have the least median, by more than the least gain?"""
    medians = {n: statistics.median(of) for n, of in samples.items()}
    return LEAST_GAIN * min(medians.values()) < medians[reference]


def _remaining(
    running: Sequence[str], samples: Mapping[str, Sequence[float]], reference: str, *, late: bool
) -> list[str]:
    """Returns the contenders that are not clearly slower than the best so far.

    There are none where it is clear of the last one on which side of the least gain over the reference it ends. late: the time for
    telling the others apart is over, and it is enough if that is clear of each.
    """
    best = min(running, key=lambda n: statistics.median(samples[n]))
    kept = [n for n in running if n in (best, reference) or not _faster(samples[best], samples[n], 1.0)]
    others = [n for n in kept if n != reference]
    if (len(others) == 1 or late) and all(_decided(samples[reference], samples[n]) for n in others):
        return []
    return kept if others else []


def _decided(reference: Sequence[float], other: Sequence[float]) -> bool:
    return _faster(other, reference, LEAST_GAIN) or _faster(reference, other, 1.0 / LEAST_GAIN)


def _faster(one: Sequence[float], other: Sequence[float], by: float) -> bool:
    """Is `one` faster than `other` by more than a factor, beyond the noise?"""
    few = min(len(one), len(other))
    if few in _FEW_ROUNDS:
        return min(other) > max(by, 1.0) * _FEW_ROUNDS[few] * max(one)
    slower = sorted(other)
    wins = sum(len(slower) - 0.5 * (bisect_left(slower, by * a) + bisect_right(slower, by * a)) for a in one)
    pairs = len(one) * len(other)
    return wins - pairs / 2 > _STANDARD_ERRORS * math.sqrt(pairs * (len(one) + len(other) + 1) / 12)


def _leads(one: Sequence[float], other: Sequence[float], by: float) -> bool:
    """Is `one` faster than `other` in nearly every round, and far so in the middle one? For the end of a race: to decide as soon as
    this holds would be wrong too often."""
    ratios = [b / a if a else math.inf for a, b in zip(one, other, strict=False)]
    lost = sum(r <= by for r in ratios)
    least = _ROUNDS_AHEAD.get(min(len(ratios) - 2 * lost, max(_ROUNDS_AHEAD)))
    return least is not None and lost <= _MOST_LOST * len(ratios) and statistics.median(ratios) > by * least


# --- calls on a device

_BATCH_S = 1e-3
"""The least seconds of one sample: clocks and interruptions weigh little on it."""
_IN_FLIGHT_S = 4e-3
"""The same where calls are awaited together: the start of the first one and the end of the last, 100 to 300 microseconds on a GPU,
would otherwise hide much of what programs differ by."""
_MOST_IN_BATCH = 100


_LONG_S = 0.1
"""The last call that warms up what takes longer is a measurement already."""
_VERY_LONG_S = 1.0
"""On a CPU the first call of what takes longer is one, too: what it takes to get going, some 0.1 s, is a small part of it."""


@dataclass
class Sampled:
    """Measures a compiled program on its arguments, in batches of `calls`, after it was run to warm it up.

    call: runs it. in_flight: calls are sent off one behind the other and awaited together, so that what it takes to send them is
    hidden (GPUs). times: how often one call runs what is measured.
    """

    call: Callable[[], Any]
    in_flight: bool
    times: int = 1
    clock: Callable[[], float] = time.perf_counter
    calls: int = field(init=False, default=1)
    _known: list[tuple[float, int]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        taken = self._run(1)
        if self.in_flight or taken < _VERY_LONG_S:  # the first call has loaded and set up what the others find
            taken = self._run(1)
        if taken >= _LONG_S:
            self._known = [(taken, self.times)]
        least_s = _IN_FLIGHT_S if self.in_flight else _BATCH_S
        while taken < least_s and self.calls < _MOST_IN_BATCH:
            wanted = int(1.2 * self.calls * least_s / max(taken, 1e-7))
            self.calls = min(_MOST_IN_BATCH, max(2 * self.calls, wanted))
            taken = self._run(self.calls)

    def __call__(self) -> tuple[float, int]:
        """Runs a batch, and returns how many seconds that took, and how often what is measured ran."""
        return self._known.pop() if self._known else (self._run(self.calls), self.calls * self.times)

    def _run(self, calls: int) -> float:
        start = self.clock()
        for _ in range(calls):
            last = self.call()
            if not self.in_flight:
                jax.block_until_ready(last)
        jax.block_until_ready(last)
        return self.clock() - start


def alike(samplers: Iterable[Sampled]) -> None:
    """Gives programs that are compared batches of as many calls: each batch has one start and one end."""
    several = list(samplers)
    fewest = min((s.calls for s in several), default=1)
    for sampler in several:
        sampler.calls = fewest


def repeated(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    """A function that computes another one so many times, one after the other, and nothing but that.

    On a GPU a short program takes less than it takes to send it off. In a loop it does not: its trips are counted, so that the
    device never waits for the host, and every trip waits for the results of the one before, so that none is hoisted or shared.
    """
    inner = jax.jit(function)

    def run(*args: Any) -> Any:
        def trip(_: Any, results: Any) -> Any:
            given, _ = jax.lax.optimization_barrier((args, results))
            return inner(*given)

        return jax.lax.fori_loop(0, times - 1, trip, inner(*args))

    return run
