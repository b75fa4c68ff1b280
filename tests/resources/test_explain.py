"""`explain` says what the blocks of every GPU kernel take."""

import pytest

import pallasfuse as pf
from benchmarks import kernels
from pallasfuse.pallas_backend.kernel_resources import resources
from tests.pallas_backend.rows import ROWS


@pytest.mark.parametrize(
    ("function", "arguments", "target", "parts"),
    [
        (kernels.causal, [kernels.array(1024, 4, 64, dtype="bfloat16")] * 3, "triton", 1),
        (kernels.causal, [kernels.array(1024, 4, 64, dtype="bfloat16")] * 3, "mosaic_gpu", 1),
        (ROWS["softmax"].function, [kernels.array(512, 128256, dtype="bfloat16")], "mosaic_cluster", 8),
    ],
    ids=["triton", "mosaic_gpu", "mosaic_cluster"],
)
def test_a_line_for_every_kernel(function, arguments, target, parts):
    plan = pf.fuse(function, options=pf.FuseOptions(target=target, price=False, parts=parts)).explain(*arguments)
    (kernel,) = plan.kernels
    assert kernel.target.name == target
    taken = resources([p.program for p in kernel.phases], kernel.target)
    assert f"a block takes {taken.shared_bytes} bytes of shared memory" in str(plan)
