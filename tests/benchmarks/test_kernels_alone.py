"""Prices of kernels beside the times that they took alone on an H100, and kernels of every kind of the benchmark."""

import functools
import json
from pathlib import Path

import pytest

from benchmarks.kernels_alone import KINDS, ways_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "kernels_alone_h100.json"
OF_EACH_LAW = {
    "more blocks than begin while others run": [
        ("tiny product 32256x3x3 32256x3x3 float32", "i:1 j:3 (k:3)"),
        ("tiny product 8192x4x4 8192x4x4 float32", "i:2 j:4 (k:4)"),
    ],
    "two blocks on a multiprocessor wait for their loads": [
        ("rows norm 256x50257 bfloat16", "i:1 (j:8192)"),
        ("rows entropy 256x50257 float32", "i:1 (j:4096)"),
        ("pairs gauss 4096x3 4096x3 float32", "i:16 (k:128)"),
        ("pairs morse 1000x2 3000x2 float32", "i:4 (k:512)"),
    ],
    "a multiprocessor keeps what every block reads": [("pairs gauss 2048x8 2048x8 float32", "i:1 (k:2048)")],
    "rows begin anywhere": [
        ("rows norm 16384x197 float32", "i:8 (j:197)"),
        ("rows norm 4096x1001 bfloat16", "i:2 (j:1001)"),
    ],
    "no trip begins the loads of a later one": [
        ("products 4096x909 909x256 256 bfloat16", "i:64 (j:64)"),
        ("products 64x1001 1001x1001 1001 bfloat16", "k:64 (j:64), split into 8 parts"),
    ],
    "stores in trips reach a part of the memory's rate": [
        ("stored 4 plain 32x1000x64 32x1000x64 bfloat16", "i:1 j:64 (m:32)"),
        ("stored 2 long 4x2048x32 4x2048x32 bfloat16", "i:1 j:128 (m:64), split into 4 parts"),
    ],
    "a block that is alone stores while nothing else runs": [
        ("stored 1 plain 4x2048x32 4x2048x32 float32", "i:1 j:64 (m:32)"),
        ("stored 2 plain 4x2048x32 4x2048x32 float32", "i:1 j:64 (m:32)"),
    ],
    "what is masked by an odd load lies as it was loaded": [
        ("scores bool of heads 2x8x1543x128 bfloat16", "i:1 j:1 l:64 (n:64)"),
        ("scores bool of batches 2x8x1543x128 bfloat16", "i:1 j:1 l:64 (n:32)"),
    ],
    "short pieces are requests of their own": [
        ("groups parts 12x784x24x16 bfloat16", "i:1 k:1 (j:784)"),
        ("groups pulled 16x256x32x16 16x256x32x16 bfloat16", "i:1 k:1 (j:256)"),
    ],
}  # fmt: skip


@functools.cache
def prices(label):
    case = next(c for c in KINDS[label.split()[0]]() if c.label == label)
    return {way.schedule.removeprefix("triton "): way.price.us for way in ways_of(case, 8)}


@functools.cache
def measured():
    rows = json.loads(RESULTS.read_text())["rows"]
    return {(label, schedule.removeprefix("triton ")): us for label, schedule, us, _ in rows}


@pytest.mark.parametrize(("label", "schedule"), [case for cases in OF_EACH_LAW.values() for case in cases], ids=str)
def test_what_was_measured_is_foretold(label, schedule):
    assert prices(label)[schedule] == pytest.approx(measured()[label, schedule], rel=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_planned_kernels_take_what_is_foretold(kind):
    """All but one of a kind: 225 of the 228 that were measured are within 0.6 and 1.6."""
    cases = list(KINDS[kind]())
    planned = [(c.label, next(iter(prices(c.label).items()))) for c in cases if prices(c.label)]
    found = {
        label: us / measured()[label, schedule] for label, (schedule, us) in planned if (label, schedule) in measured()
    }
    assert len(found) > len(cases) / 2
    assert sum(not 0.6 <= ratio <= 1.6 for ratio in found.values()) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_kernel_in_several_schedules(kind):
    found = [list(ways_of(c, 2)) for c in KINDS[kind]()]
    assert sum(len(ways) == 2 for ways in found) > len(found) / 2
