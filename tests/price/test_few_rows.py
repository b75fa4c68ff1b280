"""Products of few rows with a matrix, beside what they took on an H200 (`benchmarks/few_rows.py`)."""

import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks.few_rows import _of
from pallasfuse import device
from pallasfuse.options import FuseOptions
from pallasfuse.price import gpu
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
    case = _of(kind, rows, summed, columns)
    structs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in case.shapes]
    options = FuseOptions(
        price=False, check=False, target="triton", tiles=(("i", case.rows), ("j", tile)), parts=parts, warps=warps, stages=stages
    )  # fmt: skip
    call = FusedCall(jax.make_jaxpr(case.function)(*structs), options, "f", Once())
    plan = call.plan(find("triton").on(H200).judged(timed=False, one_device=True))
    assert sum(k.price.us for k in plan.kernels) == pytest.approx(us, rel=0.2)


def test_what_the_cache_loses_grows_with_what_is_read():
    lost = [gpu._lost(share * H200.cache_bytes, H200) for share in (0.1, 0.75, 0.8, 0.9, 1.0, 3.0)]
    assert lost == sorted(lost) and lost[:2] == [0.0, 0.0] and lost[-2:] == [1.0, 1.0] and 0 < lost[2] < lost[3] < 1


def test_in_a_program_that_the_cache_does_not_hold_matrices_come_from_memory():
    """Of two matrices of 34 MB neither is found again; by itself, one is."""
    moved = 4096 * 4096 * 2
    assert gpu._lost(moved, H200.among(moved)) == 0.0
    assert gpu._lost(moved, H200.among(2 * moved)) == 1.0
    assert gpu._lost(moved, H200.among(math.inf)) == 1.0
