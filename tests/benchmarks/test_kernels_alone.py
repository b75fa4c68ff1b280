"""Prices of kernels beside the times that they took alone on an H100 or an H200, and kernels of every kind of the benchmark."""

import functools
import json
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.kernels_alone import KINDS, ways_of
from pallasfuse import stages
from pallasfuse.device import find

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
FILES = {H100: "kernels_alone_h100.json", H200: "kernels_alone_h200.json"}
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


WARPGROUPS, TOGETHER = "mosaic_gpu i:1 j:1 l:128", ", persistent, 16 side by side"
OF_EACH_LAW_ON_AN_H200 = {
    "rows that begin anywhere are made longer before": [
        ("beside chances float32 4x4x1501x64 bfloat16", "i:1 j:1 l:64 (n:64)"),
        ("beside statistics float32 4x4x577x64 bfloat16", "i:1 j:1 l:64 (n:128)"),
        ("scores bfloat16 of batches 8x12x197x64 bfloat16", "i:1 j:1 l:64 (n:128)"),
    ],
    "what no product is made of is waited for": [
        ("beside chances bfloat16 4x4x1500x32 bfloat16", "i:1 j:1 l:64 (n:64)"),
        ("beside statistics float32 4x4x1500x32 bfloat16", "i:1 j:1 l:64 (n:64)"),
        ("beside statistics bool 4x4x1500x32 bfloat16", "i:1 j:1 l:64 (n:128)"),
    ],
    "float32 in short pieces is loaded by threads": [
        ("uneven by columns 4x64x2048 4x2048x1081 float32", "i:1 l:64 (k:64), split into 3 parts"),
        ("uneven twice 4x1081x1081 13x4x1081 13x4x1081 float32", "i:1 j:64 (k:64)"),
    ],
    "half types in pieces of two words are multiplied as fast as others": [
        ("uneven attention 16x1024x68 16x1024x68 16x1024x68 bfloat16", "i:1 j:128 (m:128)"),
    ],
    "products of single warps have operands in their registers": [
        ("short to float32 147456x32 32x192 float32", "i:32 (j:32)"),
        ("short to int32 147456x32 32x192 int8", "i:32 (j:32)"),
    ],
    "a block with one trip that is alone overlaps little": [
        ("short to float32 147456x32 32x192 float32", "i:128 (j:32)"),
        ("short to float32 147456x32 32x192 bfloat16", "i:128 (j:32)"),
    ],
    "booleans become bytes, four in a thread": [
        ("scores bool of heads 2x8x1536x64 bfloat16", f"{WARPGROUPS} (n:256), warpgroups alternate{TOGETHER}"),
        (
            "scores bool of batches 2x8x1543x128 bfloat16",
            f"{WARPGROUPS} (n:128), warpgroups alternate, next operands awaited early{TOGETHER}",
        ),
    ],
}  # fmt: skip
CASES = [
    (kind, *case)
    for kind, laws in ((H100, OF_EACH_LAW), (H200, OF_EACH_LAW_ON_AN_H200))
    for cases in laws.values()
    for case in cases
]


@functools.cache
def prices(label, kind=H100, most=8):
    """The prices of a program's kernel on a kind of device by its schedules: as planned, and then others."""
    device = find(kind, "gpu")
    case = next(c for c in KINDS[label.split()[0]]() if c.label == label)
    on_device = mock.patch.object(stages, "for_device_at_hand", lambda t: t.on(device) if t.platform == "gpu" else t)
    with on_device:
        return {way.schedule.removeprefix("triton "): way.price.us for way in ways_of(case, most)}


@functools.cache
def measured(kind=H100):
    rows = json.loads((RESULTS / FILES[kind]).read_text())["rows"]
    return {(label, schedule.removeprefix("triton ")): us for label, schedule, us, _ in rows}


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize(("kind", "label", "schedule"), CASES, ids=str)
def test_what_was_measured_is_foretold(kind, label, schedule):
    assert prices(label, kind)[schedule] == pytest.approx(measured(kind)[label, schedule], rel=0.3)


def planned(kind, device):
    """The prices of the kernels of a kind over the times that were measured, by program: of those as planned."""
    cases = list(KINDS[kind]())
    every = {c.label: prices(c.label, device, 1) for c in cases}
    first = {label: next(iter(of.items())) for label, of in every.items() if of}
    known = measured(device)
    found = {label: us / known[label, s] for label, (s, us) in first.items() if (label, s) in known}
    assert len(found) > len(cases) / 2
    return found


@pytest.mark.sampled(10, cover=())
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("beside", "clusters", "short", "uneven")])
def test_planned_kernels_take_what_is_foretold(kind):
    """All but one of a kind: 223 of the 226 that were measured are within 0.6 and 1.6."""
    assert sum(not 0.6 <= ratio <= 1.6 for ratio in planned(kind, H100).values()) <= 1


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("kind", ["beside", "scores", "short", "uneven"])
def test_planned_kernels_take_what_is_foretold_on_an_h200(kind):
    """Four of five are within 0.6 and 1.6; of chances beside 1500 columns, tiles of 128 of them are too cheap."""
    ratios = planned(kind, H200).values()
    assert 5 * sum(not 0.6 <= ratio <= 1.6 for ratio in ratios) <= len(ratios)


@pytest.mark.sampled(12, cover=())
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_kernel_in_several_schedules(kind):
    found = [list(ways_of(c, 2)) for c in KINDS[kind]()]
    assert sum(len(ways) == 2 for ways in found) > len(found) / 2
