"""The numbers of a CPU, by plain `jax.jit` programs: what XLA's own loops and library reach on it."""

import functools
import math
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scripts.calibration import hlo
from scripts.calibration.clock import Clock, Program, slope
from scripts.calibration.found import Found, Measurement, named

MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the programs; tests shrink them."""

    memory_bytes: int = field(default_factory=lambda: max(96 * MB, 3 * largest_cache_bytes()))
    """The bytes of one array that no cache holds."""
    cache_bytes: tuple[int, ...] = (
        MB,
        2 * MB,
        4 * MB,
        6 * MB,
        8 * MB,
        12 * MB,
        16 * MB,
        24 * MB,
        32 * MB,
        48 * MB,
        64 * MB,
    )
    """The bytes of an array that is read and one that is written, together."""
    product: int = 768
    points: int = 1 << 17
    """Points of a loop that computes much and moves little: they stay in each core's own cache, and are spread over all cores."""
    operations: int = 64
    trips: int = 500
    page_bytes: int = 128 * MB
    kept_bytes: tuple[int, int] = (MB, 256 * MB)
    """Between these sizes, buffers begin to go back to the system."""


def steps(clock: Clock, sizes: Sizes | None = None) -> list[Measurement]:
    """The measurements, in their order."""
    measurements = (cores, memory, cache, products, arithmetic, thunks, trips, kept, pages)
    return [named(functools.partial(m, clock, sizes or Sizes()), m.__name__) for m in measurements]


def number_of_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    yield Found("multiprocessors", number_of_cores(), "cores that the process may use")
    clocks = re.findall(r"cpu MHz\s*:\s*([\d.]+)", _text(Path("/proc/cpuinfo")))
    if clocks:
        yield Found("clock_ghz", max(map(float, clocks)) / 1e3, "/proc/cpuinfo; the price of a CPU does not use it")


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# --- memory and caches


def _stream(moved: int) -> Program:
    """A loop that reads an array and writes another one, without new memory: so many bytes together."""
    call = jax.jit(lambda x, _: x + 1, donate_argnums=1, keep_unused=True)
    elements = max(1, moved // 8)
    return Program(call, [jnp.zeros(elements), jnp.zeros(elements)], recycles=True)


def memory(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    moved = 2 * sizes.memory_bytes
    (us,) = clock.own_us(_stream(moved))
    how = f"all cores read {sizes.memory_bytes / MB:g} MB and write as many, into memory that is there"
    yield Found("memory_gb_s", 1e-3 * moved / us, how)


def cache(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    programs = [_stream(moved) for moved in sizes.cache_bytes]
    times = clock.own_us(*programs)
    rates = [1e-3 * moved / us for moved, us in zip(sizes.cache_bytes, times, strict=True)]
    reached = ", ".join(f"{moved / MB:g}: {rate:.0f}" for moved, rate in zip(sizes.cache_bytes, rates, strict=True))
    slow = known.get("memory_gb_s", min(rates))
    rate = max(rates)
    yield Found("cache_gb_s", rate, f"the same where it fits; GB/s by MB moved: {reached}")
    limit = largest_cache_bytes() or max(sizes.cache_bytes)
    held = edge_of_cache(sizes.cache_bytes, rates, slow)
    yield Found(
        "cache_bytes",
        min(held, limit),
        f"the last size at which it is nearer to that than to memory, at most {limit / MB:g} MB",
    )


def edge_of_cache(sizes: Sequence[int], rates: Sequence[float], memory_rate: float) -> int:
    """The last size, from the fastest one on, whose rate is above the geometric mean of the fastest and that of memory."""
    fastest = max(range(len(rates)), key=rates.__getitem__)
    least = math.sqrt(rates[fastest] * min(memory_rate, rates[fastest]))
    held = sizes[fastest]
    for size, rate in zip(sizes[fastest:], rates[fastest:], strict=True):
        if rate < least:
            break
        held = size
    return held


def largest_cache_bytes() -> int:
    """The size of the largest cache, as the system says; 0 where it does not."""
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    found = [_text(f) for f in folder.glob("index*/size")] if folder.exists() else []
    return max((size_bytes(text) for text in found), default=0)


def size_bytes(text: str) -> int:
    """A size as the system writes it: 32768K, 32M."""
    matched = re.fullmatch(r"\s*(\d+)\s*([KMG]?)\s*", text)
    return int(matched[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[matched[2]] if matched else 0


# --- arithmetic, for each core


def products(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    n = sizes.product
    programs = []
    for dtype in _PRODUCTS:
        x = jax.random.normal(jax.random.key(0), (n, n)).astype(dtype)
        programs.append(Program(jax.jit(jnp.matmul), [x, x]))
    times = clock.own_us(*programs)
    rates = {d: 2e-6 * n**3 / us / number_of_cores() for d, us in zip(_PRODUCTS, times, strict=True)}
    yield Found("matmul_tflop_s", rates, f"XLA's product of {n} x {n} matrices, for each of the cores")


_PRODUCTS = ("float32", "float16", "bfloat16")


def simple_chain(x: Any, operations: int) -> Any:
    """Operations on each element, one after the other, of kinds that take one instruction each."""
    for n in range(operations // 4):
        x = jnp.maximum((x + (0.5 + n)) * 0.75, 0.25) - 0.125
    return x


def exponentials(x: Any, number: int) -> Any:
    """The sum of exponentials of each element, plus a number each: none waits for another one."""
    total = x
    for n in range(number):
        total = total + jnp.exp(x + (0.25 + n / 64))
    return total


_SIMPLE_OF_EXP = 4.0
"""Simple instructions of an exponential and two additions (`pallasfuse.price.operations`)."""


def arithmetic(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    x = jnp.linspace(0.0, 1.0, sizes.points)
    few, many = sizes.operations // 4, sizes.operations
    simple = [Program(jax.jit(functools.partial(simple_chain, operations=k)), [x]) for k in (few, many)]
    special = [Program(jax.jit(functools.partial(exponentials, number=k // 4)), [x]) for k in (few, many)]
    times = clock.least_us(*simple, *special)
    share = sizes.points / number_of_cores()
    simple_us = slope(times[:2], [few * share, many * share])
    special_us = slope(times[2:], [few // 4 * share, many // 4 * share]) - _SIMPLE_OF_EXP * simple_us
    how = f"of {sizes.points} points, for each of the cores: a longer chain less a shorter one"
    yield Found("vector_gop_s", 1e-3 / simple_us, f"additions, multiplications, maxima, subtractions {how}")
    if special_us <= 0:
        raise RuntimeError("noise: exponentials took no longer than simple operations")
    yield Found("special_gop_s", 1e-3 / special_us, f"exponentials {how}, without their simple instructions")


# --- thunks

_SIDE = 4
"""Rows and columns of what thunks work on: no time beside their own."""
_ALONE, _SPREAD = 128, 256
"""The sides of what one core works on, and of what XLA spreads over the cores."""


def thunk_chain(x: Any, number: int) -> Any:
    """Maps that need each other's results, and that XLA may not fuse: each is a thunk."""
    for _ in range(number):
        x = lax.optimization_barrier(x * 0.5 + 1.0)
    return x


def loop_of_thunks(x: Any, number: int, trips: int) -> Any:
    """Runs the chain of thunks in every trip of a loop."""
    return lax.fori_loop(0, trips, lambda _, y: thunk_chain(y, number), x)


def _thunk_us(clock: Clock, x: Any, one: Any, many: Any) -> float:
    """Microseconds of a thunk, by two programs that differ in their number."""
    compiled = [jax.jit(f).lower(x).compile() for f in (one, many)]
    numbers = [float(hlo.count_kernels(c.as_text())) for c in compiled]
    return slope(clock.least_us(*(Program(c, [x]) for c in compiled)), numbers)


def thunks(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    few, many = (functools.partial(thunk_chain, number=k) for k in (8, 72))
    us = _thunk_us(clock, jnp.ones((_SIDE, _SIDE)), few, functools.partial(thunk_chain, number=264))
    yield Found(
        "kernel_us", us, "another thunk in a chain of thunks that do next to nothing, in a program without loops"
    )
    alone, spread = (_thunk_us(clock, jnp.ones((side, side)), few, many) for side in (_ALONE, _SPREAD))
    share = alone * (_SPREAD / _ALONE) ** 2 / number_of_cores()
    how = f"a thunk of {_SPREAD**2} points, {spread:.2f} us, less its share of what one core takes, {share:.2f} us"
    yield Found("launch_us", max(0.0, spread - share), how)


def trips(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    loops = [functools.partial(loop_of_thunks, number=k, trips=sizes.trips) for k in (2, 12)]
    us = _thunk_us(clock, jnp.ones((_SIDE, _SIDE)), *loops) / sizes.trips
    yield Found("trip_us", us, f"another thunk in each of {sizes.trips} trips of a loop")


# --- memory that the system hands out


def faults(moved: int, calls: int = 7) -> float:
    """Page faults of a call whose result takes so many bytes, where those of its predecessor are free again: the median."""
    import resource  # not on every system

    x = jnp.zeros(max(1, moved // 4))
    call = jax.jit(lambda x: x + 1)
    found = []
    for _ in range(calls):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        jax.block_until_ready(call(x))
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return statistics.median(found)


_LARGEST_PAGE = 2 * MB


def is_kept(moved: int) -> bool:
    """Does the allocator have the memory of a result at hand? If not, half of its pages are new at least, however large."""
    return faults(moved) < max(1.0, 0.5 * moved / _LARGEST_PAGE)


def kept(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    low, high = sizes.kept_bytes
    size = low
    while size <= high and is_kept(size):
        size *= 2
    if size > high:
        yield Found("kept_bytes", high, f"no buffer of up to {high / MB:g} MB was made anew")
        return
    least, most = (size // 2, size) if size > low else (0, low)
    while most - least > max(MB, most // 16):
        middle = (least + most) // 2
        least, most = (middle, most) if is_kept(middle) else (least, middle)
    yield Found(
        "kept_bytes", least, "the largest result whose memory needs no page faults when the last one is free again"
    )


def pages(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    written = sizes.page_bytes
    x = jnp.zeros(max(1, written // 4))
    fresh = Program(jax.jit(lambda x: x + 1), [x])
    fresh_us, kept_us = clock.least_us(fresh, _stream(2 * written))
    us = slope([kept_us, fresh_us], [0.0, 1.0])
    yield Found("page_gb_s", 1e-3 * written / us, f"what a result of {written / MB:g} MB takes longer in new memory")
