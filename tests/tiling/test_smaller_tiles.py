"""Schedules below one that does not fit; and that programs whose listed tiles do not fit get a kernel."""

import pytest

import pallasfuse as pf
from benchmarks import kernels
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.schedule import Schedule
from pallasfuse.pallas_backend import kernel_resources
from pallasfuse.targets import find
from pallasfuse.tiling.descent import smaller

ROWS, KEYS, HEADS = Axis("i", 4096), Axis("k", 4096), Axis("h", 8)


def schedule(rows, keys, warps, stages, **more):
    return Schedule(((HEADS, 1), (ROWS, rows)), KEYS, keys, warps, stages, **more)


def test_each_is_smaller_and_none_is_listed_twice():
    start = schedule(128, 128, 8, 3)
    found = smaller(start, find("triton"))
    assert len(set(found)) == len(found)
    for s in found:
        assert s.stages <= 3 and s.rolled_tile <= 128 and s.tile(ROWS) <= 128 and s != start
    assert found[0] == schedule(128, 128, 8, 2)
    assert min(s.tile(ROWS) for s in found) == 16


def test_warps_have_rows():
    for s in smaller(schedule(128, 128, 8, 3), find("triton")):
        assert s.warps == (8 if s.tile(ROWS) == 128 else 4)


def test_warpgroups_have_64_rows_each():
    for s in smaller(schedule(128, 128, 8, 2, alternate=True), find("mosaic_gpu")):
        assert s.tile(ROWS) in (64, 128)
        assert s.warps == 4 * s.tile(ROWS) // 64
        assert s.alternate == (s.warps == 8)


def large(subject):
    return subject.target == "triton" and subject.name.startswith(("relative bias", "pairs 128", "pairs 64", "paged"))


@pytest.mark.sampled(2, cover=("target",))
@pytest.mark.parametrize("target", ["triton", "mosaic_gpu"])
@pytest.mark.parametrize("subject", [s for s in kernels.harder() if large(s)], ids=lambda s: s.name.replace(" ", "-"))
def test_no_planned_kernel_overflows_shared_memory(subject, target):
    """Once crashes: arrays that are read for every pair, and pages."""
    plan = pf.fuse(subject.function, options=pf.FuseOptions(target=target, price=False)).explain(*subject.arguments)
    assert plan.kernels or any("bytes of shared memory" in str(f) for f in plan.fallbacks)
    for kernel in plan.kernels:
        for phase in kernel.phases:
            assert kernel_resources.beyond_shared_memory(phase.program, phase.target) is None


def test_a_listed_tiling_that_does_not_fit_gives_way():
    heads = [kernels.array(1024, 8, 128, dtype="float32")] * 3
    bias = kernels.array(8, 1024, 1024), kernels.array(1024, 1024, dtype="bool")
    options = pf.FuseOptions(target="triton", price=False, stages=4)
    (kernel,) = pf.fuse(kernels.pair_bias_and_mask, options=options).explain(*heads, *bias).kernels
    assert kernel.schedule.stages == 4
    taken = kernel_resources.resources([kernel.program], kernel.target)
    assert 0 < taken.shared_bytes <= kernel.target.shared_memory_bytes
    assert kernel.schedule.rolled_tile < 64  # what is listed for heads of 128 does not fit
