"""The numbers of a GPU: kernel times of XLA's programs and of loops in Pallas:Triton."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from scripts.calibration import driver, hlo, triton_loops
from scripts.calibration.clock import Clock, Program, slope
from scripts.calibration.found import Found, Measurement, named

MB = 1 << 20
TILE = 2048
"""Elements of a tile of the loops: 16 for each thread."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the programs."""

    memory_bytes: int = 1024 * MB
    cache_bytes: tuple[int, ...] = (8 * MB, 16 * MB, 24 * MB, 32 * MB, 40 * MB, 56 * MB, 96 * MB)
    cached_bytes: int = 16 * MB
    """The bytes of an array that the shared cache holds."""
    product: int = 8192
    row: tuple[int, int] = (1024, 262144)
    """The shortest and the longest row that is tried."""
    row_bytes: int = 64 * MB
    """The bytes of all rows together."""


def steps(clock: Clock, sizes: Sizes | None = None) -> list[Measurement]:
    """The measurements, in their order: what others need comes first."""
    measurements = (
        chip, memory, cache, vectors, shortest, latency, trips, launches, clocks, products, rows,
    )  # fmt: skip
    return [named(functools.partial(m, clock, sizes or Sizes()), m.__name__) for m in measurements]


def chip(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    attributes = driver.attributes()
    yield Found("multiprocessors", attributes.multiprocessors, "the driver")
    yield Found("shared_memory_bytes", attributes.shared_memory_bytes, "the driver: the most that a block may ask for")
    yield Found("cache_bytes", attributes.cache_bytes, "the driver")


def _processors(known: Mapping[str, Any]) -> int:
    return int(known["multiprocessors"]) if "multiprocessors" in known else int(jax.devices()[0].core_count)


# --- memory and the shared cache


def memory(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    x = jnp.ones(sizes.memory_bytes // 4)
    copies = {
        "XLA's loop": jax.jit(lambda x: x + 1),
        "tiles of 8 kB": jax.jit(functools.partial(triton_loops.copy_tiles, tile=TILE)),
        "tiles of 16 kB": jax.jit(functools.partial(triton_loops.copy_tiles, tile=2 * TILE)),
        "only read, by XLA": jax.jit(jnp.sum),
    }
    moved = {name: (1 if name.startswith("only") else 2) * x.nbytes for name in copies}
    times = clock.least_us(*(Program(call, [x]) for call in copies.values()))
    rates = {name: 1e-3 * moved[name] / us for name, us in zip(copies, times, strict=True)}
    reached = ", ".join(f"{name}: {rate:.0f}" for name, rate in rates.items())
    copied = max(rate for name, rate in rates.items() if moved[name] > x.nbytes)
    yield Found("memory_gb_s", copied, f"the fastest copy of {sizes.memory_bytes // MB} MB; GB/s by {reached}")


def cache(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    together, few, many = 4, 16, 80
    blocks = 8 * _processors(known)
    programs = []
    for size in sizes.cache_bytes:
        x = jnp.ones(size // 4)
        for trips in (few, many):
            read = functools.partial(triton_loops.read_tiles, blocks=blocks, trips=trips, tile=TILE, together=together)
            programs.append(Program(jax.jit(read), [x]))
    times = clock.least_us(*programs)
    moved = [4.0 * TILE * blocks * together * trips for trips in (few, many)]
    rates = [1e-3 / slope(times[2 * n : 2 * n + 2], moved) for n in range(len(sizes.cache_bytes))]
    reached = ", ".join(f"{size // MB}: {rate:.0f}" for size, rate in zip(sizes.cache_bytes, rates, strict=True))
    yield Found("cache_gb_s", max(rates), f"tiles that blocks load again and again; GB/s by MB of the array: {reached}")


# --- arithmetic


def vectors(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    blocks, number = 8 * _processors(known), 16
    x = jnp.linspace(0.0, 1.0, TILE)
    amounts = (16, 144)
    programs = [
        Program(jax.jit(functools.partial(loop, blocks=blocks, trips=trips, tile=TILE, number=number)), [x])
        for loop in (triton_loops.additions, triton_loops.exponentials)
        for trips in amounts
    ]
    times = clock.least_us(*programs)
    done = [1.0 * blocks * TILE * number * trips for trips in amounts]
    yield Found(
        "vector_gop_s", 1e-3 / slope(times[:2], done), "additions of float32 in registers, on all multiprocessors"
    )
    yield Found("special_gop_s", 1e-3 / slope(times[2:], done), "powers of two of float32 in registers, the same way")


@dataclass(frozen=True, slots=True)
class _Product:
    name: str
    dtype: Any
    result: Any
    precision: str | None = None


_PRODUCTS = (
    _Product("float16", jnp.float16, jnp.float16), _Product("bfloat16", jnp.bfloat16, jnp.bfloat16),
    _Product("tf32", jnp.float32, jnp.float32), _Product("float32", jnp.float32, jnp.float32, "highest"),
    _Product("int8", jnp.int8, jnp.int32), _Product("float8_e4m3fn", jnp.float8_e4m3fn, jnp.bfloat16),
)  # fmt: skip


def product_program(product: _Product, n: int) -> Program:
    """A product of n x n matrices of random numbers, the second one as the library likes it best: transposed."""

    def call(x: Any, y: Any) -> Any:
        return jnp.einsum("ik,jk->ij", x, y, precision=product.precision, preferred_element_type=product.result)

    keys = jax.random.split(jax.random.key(0))
    if product.dtype == jnp.int8:
        arrays = [jax.random.randint(k, (n, n), -100, 100).astype(jnp.int8) for k in keys]
    else:
        arrays = [jax.random.normal(k, (n, n)).astype(product.dtype) for k in keys]
    return Program(jax.jit(call), arrays)


def products(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    n, rates, failed = sizes.product, {}, []
    for product in _PRODUCTS:
        try:
            (us,) = clock.least_us(product_program(product, n))
            rates[product.name] = 2e-6 * n**3 / us
        except Exception as failure:  # a library need not have all of them
            failed.append(f"{product.name}: {type(failure).__name__}")
    without = f"; not run: {', '.join(failed)}" if failed else ""
    yield Found("matmul_tflop_s", rates, f"XLA's product of {n} x {n} random matrices{without}")


# --- time that passes without work


def shortest(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    small = jnp.ones(128)
    us = clock.least_us(Program(jax.jit(lambda x: x + 1), [small]), Program(jax.jit(lambda x: x * x.sum()), [small]))
    yield Found("kernel_us", us[0], f"XLA's loop over 128 elements; with a sum of them {us[1]:.2f}")


def latency(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    amounts, blocks = (64, 320), _processors(known)
    places = {"latency_us": sizes.memory_bytes // 4, "cache_latency_us": int(known["cache_bytes"]) // 8}
    for field, elements in places.items():
        found = {}
        for tile in (128, TILE, 4 * TILE):
            hop, length = blocks * tile, max(elements, 2 * blocks * tile)
            x = (jnp.arange(length, dtype=jnp.int32) + hop) % length
            follow = [
                jax.jit(functools.partial(triton_loops.follow, blocks=blocks, trips=t, tile=tile)) for t in amounts
            ]
            found[tile] = slope(clock.least_us(*(Program(call, [x]) for call in follow)), amounts)
        loads = ", ".join(f"{us:.3f} where each loads {4 * tile / 1024:g} kB" for tile, us in found.items())
        yield Found(
            field,
            found[TILE],
            f"one block a multiprocessor, loads of {4e-6 * elements:.0f} MB that wait for each other: {loads}",
        )


def trips(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    blocks, summed, amounts, found = _processors(known), 32, (64, 320), {}
    for side in (16, 64):
        programs = []
        for number in amounts:
            a, b = (jnp.ones(s, jnp.float16) for s in ((side, summed * number), (summed * number, side)))
            programs.append(
                Program(jax.jit(functools.partial(triton_loops.small_products, blocks=blocks, trips=number)), [a, b])
            )
        found[side] = slope(clock.least_us(*programs), amounts)
    each = ", ".join(f"{us:.3f} with {side} x {side} x {summed}" for side, us in found.items())
    yield Found("trip_us", found[64], f"a trip of a pipelined loop over products of tiles that the cache holds: {each}")


def small_kernels(x: Any, number: int) -> Any:
    """Kernels that need each other's results: reductions along one axis, then the other."""
    for _ in range(number):
        x = x - x.max(axis=0, keepdims=True)
        x = x + x.min(axis=1, keepdims=True) * 0.5
    return x


def launches(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    x = jnp.ones((256, 256))
    programs = [Program(jax.jit(functools.partial(small_kernels, number=k)).lower(x).compile(), [x]) for k in (8, 24)]
    numbers = [hlo.count_kernels(p.call.as_text()) for p in programs]
    own = slope(clock.least_us(*programs), numbers)
    whole = slope([_back_to_back_us(p) for p in programs], numbers)
    how = (
        f"{numbers[1]} small kernels less {numbers[0]}: {whole:.2f} us for each by the clock, {own:.2f} of them its own"
    )
    yield Found("launch_us", max(0.0, whole - own), how)


def _back_to_back_us(program: Program, calls: int = 50) -> float:
    """Microseconds of a call where many are under way, so that the device never waits for the host."""
    least = []
    for _ in range(5):
        jax.block_until_ready(program.call(*program.arguments))
        start = time.perf_counter()
        jax.block_until_ready([program.call(*program.arguments) for _ in range(calls)])
        least.append(1e6 * (time.perf_counter() - start) / calls)
    return min(least)


# --- XLA's habits


def row_softmax(x: Any) -> Any:
    return jax.nn.softmax(x, axis=-1)


def row_normalised(x: Any) -> Any:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred * centred).mean(axis=-1, keepdims=True) + 1e-5)


def longest_row(is_one_kernel: Callable[[int], bool], least: int, most: int, steps: int = 2) -> int:
    """The longest row for which something is one kernel: by doubling, then by halving the gap. 0: not even the least."""
    if not is_one_kernel(least):
        return 0
    row = least
    while row < most and is_one_kernel(2 * row):
        row *= 2
    if row >= most:
        return row
    fails = 2 * row
    for _ in range(steps):
        middle = (row + fails) // 2
        row, fails = (middle, fails) if is_one_kernel(middle) else (row, middle)
    return row


def rows(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    def one_kernel(function: Callable[[Any], Any], row: int) -> bool:
        shape = jax.ShapeDtypeStruct((max(1, sizes.row_bytes // (4 * row)), row), jnp.float32)
        return hlo.count_kernels(jax.jit(function).lower(shape).compile().as_text()) == 1

    found = [longest_row(functools.partial(one_kernel, f), *sizes.row) for f in (row_softmax, row_normalised)]
    how = f"XLA makes one kernel of a softmax of rows of {found[0]} elements, and of {found[1]} that are centred and normalised"
    yield Found("longest_row", min(found), how)


# --- the clock


def clocks(clock: Clock, sizes: Sizes, known: Mapping[str, Any]) -> Iterator[Found]:
    """The clock while large products run, as the driver says; else from the vector units, which take 128 a clock."""
    try:
        program = product_program(_PRODUCTS[1], sizes.product)
        seen = _clocks_under_load(program)
        yield Found(
            "clock_ghz", statistics.median(seen) / 1e3, f"the driver, {len(seen)} times while large products run"
        )
    except (OSError, RuntimeError) as failure:
        ghz = known["vector_gop_s"] / (128 * _processors(known))
        yield Found("clock_ghz", ghz, f"from vector_gop_s, 128 a clock; the driver: {failure}")


def _clocks_under_load(program: Program, rounds: int = 40) -> Sequence[float]:
    """Clocks in MHz. The first quarter is left out: power and clocks have yet to settle."""
    seen, before = [], program.call(*program.arguments)
    for _ in range(rounds):
        under_way = [program.call(*program.arguments) for _ in range(4)]
        jax.block_until_ready(before)
        seen.append(driver.clock_mhz())
        before = under_way[-1]
    jax.block_until_ready(before)
    return seen[rounds // 4 :]
