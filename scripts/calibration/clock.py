"""The least time of programs that take turns: noise only ever adds, and comes in bursts."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.program_timing import kernel_times

SAMPLE_S = 0.02
"""About how long one program runs in a round."""
MOST_CALLS = 20
GPU_CALLS = 4


@dataclass(slots=True)
class Program:
    """A compiled program and what it is called on.

    recycles: its last argument is donated, and its result is that argument of the next call, so that no call needs new memory.
    """

    call: Callable[..., Any]
    arguments: list[Any]
    recycles: bool = False

    def run(self) -> None:
        result = jax.block_until_ready(self.call(*self.arguments))
        if self.recycles:
            self.arguments[-1] = result


@dataclass(frozen=True, slots=True)
class Clock:
    """A clock with a limit on how long measurements take: each set of programs `seconds`, and at least two rounds."""

    seconds: float = 4.0
    on_gpu: bool = False

    def least_us(self, *programs: Program) -> list[float]:
        """The least microseconds of a call of each program: of its kernels on a GPU, as a whole on a CPU."""
        return self._by_kernels(programs) if self.on_gpu else self._by_wall(programs)

    def own_us(self, *programs: Program) -> list[float]:
        """Measures the programs as `least_us`, and takes away what it costs on the host to call anything.

        Raises:
          RuntimeError: a program takes no longer than one that does nothing.
        """
        if self.on_gpu:
            return self.least_us(*programs)
        *times, nothing = self.least_us(*programs, Program(jax.jit(lambda x: x + 1), [jnp.zeros(())]))
        return [slope([nothing, us], [0.0, 1.0]) for us in times]

    def _by_kernels(self, programs: Sequence[Program]) -> list[float]:
        least = [math.inf] * len(programs)
        begin, rounds = time.monotonic(), 0
        while rounds < 2 or (rounds < 5 and time.monotonic() - begin < self.seconds):
            for n in _turn(len(programs), rounds):
                launched = kernel_times(programs[n].call, programs[n].arguments, GPU_CALLS)
                if not launched or not launched[0]:
                    raise RuntimeError("no kernel was launched")
                least[n] = min(least[n], *(sum(us for _, us in one) for one in launched))
            rounds += 1
        return least

    def _by_wall(self, programs: Sequence[Program]) -> list[float]:
        least = [math.inf] * len(programs)
        for program in programs:
            program.run()
        begin, rounds = time.monotonic(), 0
        while rounds < 2 or time.monotonic() - begin < self.seconds:
            for n in _turn(len(programs), rounds):
                until = time.monotonic() + SAMPLE_S
                for _ in range(MOST_CALLS):
                    start = time.perf_counter()
                    programs[n].run()
                    least[n] = min(least[n], 1e6 * (time.perf_counter() - start))
                    if time.monotonic() > until:
                        break
            rounds += 1
        return least


def _turn(number: int, rounds: int) -> range:
    return range(number) if rounds % 2 == 0 else range(number - 1, -1, -1)


def slope(times: Sequence[float], amounts: Sequence[float]) -> float:
    """Microseconds for one more: of two programs that differ only in how much they do.

    Raises:
      RuntimeError: the larger one is not slower, so that noise hides it.
    """
    (few, many), (less, more) = times, amounts
    if many <= few:
        raise RuntimeError(f"noise: {more:g} took {many:.3g} us, {less:g} took {few:.3g} us")
    return (many - few) / (more - less)
