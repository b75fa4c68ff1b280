"""Products of few rows with a matrix, beside what they took on an H200 (`benchmarks/few_rows.py`)."""

import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks.few_rows import _of
from pallasfuse import device
from pallasfuse.options import FuseOptions
from pallasfuse.price import gpu
from pallasfuse.price.kernel import price_kernel
from pallasfuse.primitive import FusedCall, Once
from pallasfuse.targets import find

H200 = device.find("NVIDIA H200", "gpu")
FASTEST = [  # kind, rows, summed, columns; elements a trip sums, parts, warps, slots; microseconds
    ("relu", 16, 2048, 4096, 128, 1, 4, 6, 4.96),
    ("relu", 16, 4096, 4096, 64, 4, 4, 4, 7.36),
    ("relu", 16, 4096, 5120, 64, 4, 4, 3, 9.41),
    ("relu", 16, 4096, 6144, 64, 2, 4, 5, 13.57),
    ("relu", 16, 8192, 4096, 128, 1, 4, 6, 18.18),
    ("gated", 16, 2048, 5504, 128, 1, 4, 5, 8.64),
    ("gated", 16, 4096, 4096, 128, 1, 4, 5, 17.12),
    ("relu", 64, 4096, 4096, 64, 2, 4, 5, 9.44),
]
"""The matrices have 16.8 to 67 MB; the cache has 52."""


@pytest.mark.parametrize(("kind", "rows", "summed", "columns", "tile", "parts", "warps", "stages", "us"), FASTEST)
def test_the_fastest_launches_take_what_is_predicted(kind, rows, summed, columns, tile, parts, warps, stages, us):
    assert kernel_of(kind, rows, summed, columns, tile, parts, warps, stages).price.us == pytest.approx(us, rel=0.2)


def kernel_of(kind, rows, summed, columns, tile, parts, warps, stages):
    case = _of(kind, rows, summed, columns)
    structs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in case.shapes]
    options = FuseOptions(
        price=False, check=False, target="triton", tiles=(("i", case.rows), ("j", tile)), parts=parts, warps=warps, stages=stages
    )  # fmt: skip
    call = FusedCall(jax.make_jaxpr(case.function)(*structs), options, "f", Once())
    (kernel,) = call.plan(find("triton").on(H200).judged(timed=False, one_device=True)).kernels
    return kernel


def first_of(kernel):
    """The price of its first program, by itself."""
    phase = kernel.phases[0]
    return price_kernel([(phase.program, phase.target)])


def cache_us(price):
    return next(t.us for t in price.terms if t.name == "cache sectors")


@pytest.mark.parametrize(
    ("summed", "columns", "stages", "kept"), [(2048, 4096, 6, 1.0), (2048, 4096, 1, 0.0), (8192, 4096, 6, 0.0)]
)
def test_what_is_cached_and_asked_for_ahead_comes_faster(monkeypatch, summed, columns, stages, kept):
    """Not what threads load as they need it, and not what the cache has lost."""
    launch = "relu", 16, summed, columns, 128, 1, 4, stages
    faster = cache_us(first_of(kernel_of(*launch)))
    monkeypatch.setattr(gpu, "_CACHED_AHEAD", 1.0)
    slower = cache_us(first_of(kernel_of(*launch)))
    bytes_read = 2 * (summed * columns + 16 * summed)
    want = kept * 1e-3 * bytes_read * (1 - 1 / 1.15) / H200.cache_gb_s
    assert slower - faster == pytest.approx(want, rel=0.02, abs=1e-9)


@pytest.mark.parametrize("columns", [1024, 4096, 5120, 5632, 6144, 8192])
def test_no_launch_takes_less_than_the_least_time(columns):
    found = [
        kernel_of("relu", 16, 4096, columns, *how).price.us for how in ((64, 4, 4, 4), (128, 1, 4, 5), (64, 4, 4, 5))
    ]
    moved = 2 * (4096 * columns + 16 * 4096 + 16 * columns)
    assert gpu.least_us(moved, 2 * 16 * 4096 * columns, H200) <= min(found)


def test_what_the_cache_loses_grows_with_what_is_read():
    lost = [gpu._lost(share * H200.cache_bytes, H200) for share in (0.1, 0.75, 0.8, 0.9, 1.0, 3.0)]
    assert lost == sorted(lost) and lost[:2] == [0.0, 0.0] and lost[-2:] == [1.0, 1.0] and 0 < lost[2] < lost[3] < 1


def test_in_a_program_that_the_cache_does_not_hold_matrices_come_from_memory():
    """Of two matrices of 34 MB neither is found again; by itself, one is."""
    moved = 4096 * 4096 * 2
    assert gpu._lost(moved, H200.among(moved)) == 0.0
    assert gpu._lost(moved, H200.among(2 * moved)) == 1.0
    assert gpu._lost(moved, H200.among(math.inf)) == 1.0
