"""Prices of kernels beside the times that they took alone on an H100, and kernels of every kind of the benchmark."""

import functools

import pytest

from benchmarks.kernels_alone import KINDS, ways_of

MEASURED = {
    # more blocks than begin while others run
    ("tiny product 32256x3x3 32256x3x3 float32", "i:1 j:3 (k:3)"): 20.5,
    ("tiny product 8192x4x4 8192x4x4 float32", "i:2 j:4 (k:4)"): 3.8,
    # two blocks on a multiprocessor, which wait for their loads
    ("rows norm 256x50257 bfloat16", "i:1 (j:8192)"): 34.8,
    ("rows entropy 256x50257 float32", "i:1 (j:4096)"): 34.7,
    ("pairs gauss 4096x3 4096x3 float32", "i:16 (k:128)"): 24.4,
    ("pairs morse 1000x2 3000x2 float32", "i:4 (k:512)"): 6.9,
    # what every block reads, and a multiprocessor keeps
    ("pairs gauss 2048x8 2048x8 float32", "i:1 (k:2048)"): 10.6,
    # rows that begin anywhere
    ("rows norm 16384x197 float32", "i:8 (j:197)"): 8.6,
    ("rows norm 4096x1001 bfloat16", "i:2 (j:1001)"): 5.9,
    # operands of products whose loads no trip can begin for a later one
    ("products 4096x909 909x256 256 bfloat16", "i:64 (j:64)"): 16.8,
    ("products 64x1001 1001x1001 1001 bfloat16", "k:64 (j:64), split into 8 parts"): 5.5,
}  # fmt: skip


@functools.cache
def prices(label):
    case = next(c for c in KINDS[label.split()[0]]() if c.label == label)
    return {way.schedule.removeprefix("triton "): way.price.us for way in ways_of(case, 8)}


@pytest.mark.parametrize("label, schedule", MEASURED, ids=str)
def test_what_was_measured_is_foretold(label, schedule):
    assert prices(label)[schedule] == pytest.approx(MEASURED[label, schedule], rel=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_kernel_in_several_schedules(kind):
    found = [list(ways_of(c, 2)) for c in KINDS[kind]()]
    assert sum(len(ways) == 2 for ways in found) > len(found) / 2
